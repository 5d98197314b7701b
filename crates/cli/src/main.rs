//! `blockyard`: makes block devices, serves them, and looks after them while they are served.

mod args;
mod backup;
mod config;
mod devices;
mod failure;
mod faults;
mod human;
mod iostat;
mod listeners;
mod manual;
mod output_file;
mod pool;
mod ram;
mod replay;
mod run;
mod sched;
mod serve;
mod shell_snippet;
mod stats;
mod status;
mod top;
mod trace;
mod ublk;
mod upgrade;
mod volume;
mod zone;
mod zonefs;

use std::io::{self, Write};
use std::process::ExitCode;

use blockyard_object::Provider;
use blockyard_yard::paths;
use clap::Parser;

use crate::args::{Cli, Command};
use crate::failure::Failure;

fn main() -> ExitCode {
    let parent = rustix::process::getppid();
    let Cli { command } = match Cli::try_parse() {
        Ok(cli) => cli,
        // For monitoring, 2 is CRITICAL: a wrong option of `status` says nothing about the yard.
        Err(error) if error.use_stderr() && std::env::args_os().nth(1) == Some("status".into()) => {
            // Standard error may be closed.
            let _ = error.print();
            return ExitCode::from(status::UNKNOWN);
        }
        Err(error) => error.exit(),
    };
    blockyard_store::remote::register(Box::new(Provider::new(paths::state_dir)));
    let mut out = io::BufWriter::new(io::stdout().lock());
    let result = match command {
        // The daemon has threads of its own that must not wait for the lock.
        Command::Serve(args) => {
            drop(out);
            return finish(serve::run(*args, parent));
        }
        // Its exit codes are those of plugins for monitoring.
        Command::Status(args) => {
            let code = status::run(&args.talk, &mut out);
            let flushed = code.and_then(|code| out.flush().map(|()| code).map_err(Failure::from));
            return finish(flushed);
        }
        Command::List(talk) => devices::list(&talk, &mut out),
        Command::Show(args) => devices::show(&args, &mut out),
        Command::Add(args) => devices::add(&args, &mut out),
        Command::Remove(args) => devices::remove(&args, &mut out),
        Command::Promote(talk) => status::promote(&talk, &mut out),
        Command::Connections(talk) => devices::connections(&talk, &mut out),
        Command::Upgrade(args) => upgrade::run(&args, &mut out),
        Command::Trace(args) => trace::run(&args, &mut out),
        Command::Replay(args) => replay::run(&args, &mut out),
        Command::Rescan(args) => devices::rescan(&args, &mut out),
        Command::Inject(args) => faults::run(&args, &mut out),
        Command::Zone(command) => zone::run(&command, &mut out),
        Command::Mkzonefs(args) => zonefs::format(&args, &mut out),
        Command::Zonefs(command) => zonefs::run(&command, &mut out),
        Command::Sched(command) => sched::run(&command, &mut out),
        Command::Nvme(command) => listeners::run_nvme(&command, &mut out),
        Command::Vhost(command) => listeners::run_vhost(&command, &mut out),
        Command::Ublk(command) => ublk::run(&command, &mut out),
        Command::Ram(command) => ram::run(&command, &mut out),
        Command::Pool(command) => pool::run(&command, &mut out),
        Command::Backup(command) => backup::run(&command, &mut out),
        Command::Volume(command) => volume::run(&command, &mut out),
        Command::Stats(args) => stats::run(&args, &mut out),
        Command::Iostat(args) => iostat::run(&args, &mut out),
        Command::Top(args) => top::run(&args, &mut out),
        Command::Init(args) => config::init(&args, &mut out),
        Command::Check(args) => config::check(&args, &mut out),
        Command::Schema => config::print_schema(&mut out),
        Command::Version { json } => manual::version(json, &mut out),
        Command::HelpDevice(args) => manual::help_device(&args, &mut out),
        Command::Man { dir, force } => manual::man(&dir, force),
        Command::Completions { shell } => manual::completions(shell, &mut out),
    };
    let result = result.and_then(|()| out.flush().map_err(Failure::from));
    finish(result.map(|()| ExitCode::SUCCESS))
}

fn finish(result: Result<ExitCode, Failure>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(Failure::Said(code, message)) => {
            eprintln!("blockyard: {message}");
            ExitCode::from(code as u8)
        }
        Err(Failure::Silent(code)) => ExitCode::from(code as u8),
        Err(Failure::OutputClosed) => ExitCode::SUCCESS,
    }
}

//! `blockyard-lab`: measures this machine, the devices of Blockyard, the coarse locks that they
//! replace, and the programs of other projects.

use std::io::{self, Write};
use std::process::ExitCode;

use blockyard_lab::command::{self, CommandError, LabCommand};
use clap::Parser;

const AFTER_HELP: &str = "\
The lab starts the `blockyard` that lies in its own directory; `make lab` builds both.

Exit codes:
  0    done
  1    failed
  2    a wrong option or name
  130  Ctrl-C ended `run`; the rounds that were complete are kept
";

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "blockyard-lab",
    version,
    about = "Measures block devices, the locks they replace, and the programs of other projects",
    after_help = AFTER_HELP,
    propagate_version = true,
    arg_required_else_help = true,
)]
struct Cli {
    #[command(subcommand)]
    command: LabCommand,
}

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let mut out = io::BufWriter::new(io::stdout().lock());
    let result = command::run(&command, &mut out).and_then(|()| Ok(out.flush()?));
    let Err(error) = result else { return ExitCode::SUCCESS };
    let code = match &error {
        // The reader of a pipe has closed it.
        CommandError::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            return ExitCode::SUCCESS;
        }
        CommandError::Usage(_) => 2,
        // 128 + SIGINT, as shells report it.
        CommandError::Interrupted(_) => 130,
        _ => 1,
    };
    eprintln!("blockyard-lab: {error}");
    ExitCode::from(code)
}

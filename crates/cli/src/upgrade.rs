//! `upgrade`: a running yard gets a new process.

use std::io::Write;
use std::path::{PathBuf, absolute};

use blockyard_yard::error::counted;
use blockyard_yard::table::duration;
use blockyard_yard::upgrade::{UpgradeRequest, UpgradeView};
use clap::Args;

use crate::args::TalkArgs;
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};

const UPGRADE_HELP: &str = "\
The yard starts the program again, with the same arguments, and hands its sockets, its NBD
connections and its devices to the new process: clients wait for a moment and see no error. NVMe
hosts and hypervisors are disconnected, and connect again to the same sockets. If the new process
cannot start, or cannot open a device, the old one serves on, and this command fails.

The devices and places are those of the running yard. Other settings are read from the configuration
again.

Devices in memory keep their data, which are copied while clients wait.

A yard is not upgraded while it serves ublk or files, has a zonefs mounted, or records or replays a
trace; or while it has TLS clients, unless --force disconnects them. Only the yard's own user and
root may upgrade it.

Examples:
  blockyard upgrade
  blockyard upgrade --program /opt/blockyard/bin/blockyard
";

/// `upgrade`.
#[derive(Args, Debug)]
#[command(after_help = UPGRADE_HELP)]
pub(crate) struct UpgradeArgs {
    /// The program; by default that of the running yard, as it is on disk now
    #[arg(long, value_name = "PATH")]
    pub(crate) program: Option<PathBuf>,
    /// Disconnect the clients whose connections cannot be handed over: those that use TLS
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

pub(crate) fn run(args: &UpgradeArgs, out: &mut impl Write) -> Result<(), Failure> {
    let failed = |error| Failure::new(Code::Usage, format!("program: {error}"));
    let program = args.program.as_deref().map(absolute).transpose().map_err(failed)?;
    let program = program.map(|path| path.display().to_string());
    let view = client(&args.talk).upgrade(&UpgradeRequest { program, force: args.force })?;
    if args.talk.json {
        return print_json(&view, out);
    }
    let UpgradeView { pid, connections, devices, pause_ns } = view;
    let connections = counted(connections, "connection");
    let devices = counted(devices, "device");
    let pause = duration(pause_ns);
    Ok(writeln!(out, "process {pid} serves {devices} and {connections}; clients waited {pause}")?)
}

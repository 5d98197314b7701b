//! `nvme`, `vhost` and `ublk`: where hosts, hypervisors and this machine find devices.

use blockyard_yard::endpoint::Endpoint;
use blockyard_yard::ublk::{UblkPlace, parse_id};
use clap::{Args, Subcommand};

use super::{TalkArgs, name, nvme_place, ublk_place};

/// `nvme`.
#[derive(Debug, Subcommand)]
pub(crate) enum NvmeCommand {
    /// Let NVMe hosts connect at one more place
    Listen(NvmeListenArgs),
    /// Stop listening at a place
    Unlisten(NvmeUnlistenArgs),
    /// List the places where NVMe hosts connect
    List(TalkArgs),
}

const NVME_LISTEN_HELP: &str = "\
The rules of access are those of `serve`: --nvme-allow, --nvme-secrets, or [nvme] in the
configuration. Without them any host that reaches the place can read and write every device.

Examples:
  blockyard nvme listen tcp:127.0.0.1:4420
  blockyard nvme listen tcp:192.0.2.1:8009 --discovery
";

/// `nvme listen`.
#[derive(Args, Debug)]
#[command(after_help = NVME_LISTEN_HELP)]
pub(crate) struct NvmeListenArgs {
    /// Where to listen: tcp:HOST:PORT
    #[arg(value_parser = nvme_place)]
    pub(crate) place: Endpoint,
    /// Let hosts only discover the devices there, which another place has to serve
    #[arg(long)]
    pub(crate) discovery: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `nvme unlisten`.
#[derive(Args, Debug)]
pub(crate) struct NvmeUnlistenArgs {
    /// The place, as it was given or as `nvme list` shows its address
    #[arg(value_parser = nvme_place)]
    pub(crate) place: Endpoint,
    /// Stop it even if hosts are connected; they are disconnected
    #[arg(short, long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

const UBLK_HELP: &str = "\
`add`, and `remove` of a device's name, ask a yard, which needs root. `list`, and `remove` of a
number, ask the kernel and need root, and no yard. A device is `live` while a server serves it,
`quiesced` while its requests wait for another server: the same `blockyard serve ... --ublk
DEVICE=ID` goes on with it. A `dead` one has no block device.

Examples:
  blockyard ublk add root=0
  blockyard ublk remove root
  blockyard ublk remove 3
";

/// `ublk`.
#[derive(Debug, Subcommand)]
#[command(after_help = UBLK_HELP)]
pub(crate) enum UblkCommand {
    /// Make a device of a yard a block device of this machine
    Add(UblkAddArgs),
    /// List the ublk devices of this machine, those of other programs included
    List(UblkListArgs),
    /// Remove the block device of a yard's device, or a ublk device that has no server
    Remove(UblkRemoveArgs),
}

/// `ublk list`.
#[derive(Args, Debug)]
pub(crate) struct UblkListArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `ublk add`.
#[derive(Args, Debug)]
pub(crate) struct UblkAddArgs {
    /// The device, and the N of /dev/ublkbN; without N the kernel chooses it
    #[arg(value_name = "DEVICE[=N]", value_parser = ublk_place)]
    pub(crate) place: UblkPlace,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// What `ublk remove` removes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UblkTarget {
    /// The block device of a device of a yard.
    Device(String),
    /// A ublk device without a server, by its number.
    Left(u32),
}

/// Reads the target of `ublk remove`: digits are a number.
fn ublk_target(text: &str) -> Result<UblkTarget, String> {
    match text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => parse_id(text).map(UblkTarget::Left),
        false => name(text).map(UblkTarget::Device),
    }
}

/// `ublk remove`.
#[derive(Args, Debug)]
pub(crate) struct UblkRemoveArgs {
    /// The device of a yard, or the N of a /dev/ublkbN that has no server; requests that wait for
    /// one fail
    #[arg(value_name = "DEVICE|N", value_parser = ublk_target)]
    pub(crate) target: UblkTarget,
    /// Remove it even if it is mounted, or if another program has made it
    #[arg(short, long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `vhost`.
#[derive(Debug, Subcommand)]
pub(crate) enum VhostCommand {
    /// Serve a device to a virtual machine at a unix socket
    Listen(VhostListenArgs),
    /// Stop serving a device to virtual machines, and remove its socket
    Unlisten(VhostUnlistenArgs),
    /// List the sockets at which virtual machines find devices
    List(VhostListArgs),
}

/// `vhost list`.
#[derive(Args, Debug)]
pub(crate) struct VhostListArgs {
    /// List the rings, with the counts of each since the device has its socket
    #[arg(long)]
    pub(crate) rings: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

const VHOST_LISTEN_HELP: &str = "\
The yard makes the socket at or below the directories of `serve --api-directory DIR` only; by
default there is none. `serve --vhost` needs no such directory.

Examples:
  blockyard serve --api-directory /run/blockyard
  blockyard vhost listen mem0 unix:/run/blockyard/mem0.sock
";

/// `vhost listen`.
#[derive(Args, Debug)]
#[command(after_help = VHOST_LISTEN_HELP)]
pub(crate) struct VhostListenArgs {
    /// The device
    pub(crate) device: String,
    /// Where to listen: unix:PATH
    pub(crate) place: String,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `vhost unlisten`.
#[derive(Args, Debug)]
pub(crate) struct VhostUnlistenArgs {
    /// The device
    pub(crate) device: String,
    /// Stop it even if a hypervisor is connected; it is disconnected
    #[arg(short, long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

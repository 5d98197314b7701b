//! The command line.

mod activity;
mod faults;
mod pool;
mod ram;
mod trace;
mod volume;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

pub(crate) use activity::{IostatArgs, StatsArgs, TopArgs};
pub(crate) use faults::{
    InjectArgs, InjectCommand, InjectListArgs, InjectRemoveArgs, InjectRunArgs, RemovedRules,
};
pub(crate) use pool::{
    AttachArgs, BackupCommand, PoolAttachArgs, PoolCommand, PoolDetachArgs, PoolIostatArgs,
    PoolListArgs, PoolPreflightArgs, PoolReplaceArgs, PoolResyncArgs, PoolStatusArgs, PoolsArgs,
    ResyncOptions, ScriptArgs,
};
pub(crate) use ram::{
    RamBlocksArgs, RamCommand, RamFileArgs, RamListArgs, RamSelectArgs, RamSetArgs,
};
pub(crate) use trace::{ReplayArgs, ReplayEvents, TraceArgs};
pub(crate) use volume::{
    BackingFiles, ImageFormat, ListedKind, SecretArgs, VerifyStreamArgs, VolumeAt,
    VolumeChangeKeyArgs, VolumeCommand, VolumeDestroyArgs, VolumeDiffArgs, VolumeExportArgs,
    VolumeGetArgs, VolumeHoldArgs, VolumeHoldsArgs, VolumeImportArgs, VolumeListArgs,
    VolumeMoveArgs, VolumeNameArgs, VolumePoolArgs, VolumePruneArgs, VolumeReceiveArgs,
    VolumeScrubArgs, VolumeSendArgs, VolumeSetArgs, VolumeShowArgs, VolumeUnlockArgs,
};

use blockyard_core::zone::check::Target;
use blockyard_yard::config::{NVME_CONNECTIONS, NVME_THREADS};
use blockyard_yard::endpoint::{Endpoint, EndpointError};
use blockyard_yard::param::KINDS;
use blockyard_yard::size;
use blockyard_yard::spec::{DeviceSpec, NAME_WANTED, check_name};
use blockyard_yard::ublk::{ANY_ID, UblkPlace};
use blockyard_yard::vhost::VhostPlace;
use blockyard_yard::{
    AllowLists, AllowedHosts, AuthHash, DhGroup, NBD_MEMORY_MIN, UnixPlace, check_subsystem_nqn,
};
use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};

mod listeners;

pub(crate) use listeners::*;

const ABOUT: &str = "Makes block devices (null, zoned, shingled, compressed RAM, durable volumes) \
                     and serves them";

const AFTER_HELP: &str = "\
Begin with:
  blockyard serve                            the default yard: zoned0, null0, mem0, smr0, ...
  blockyard list                             from another terminal: what is served
  blockyard zone report zoned0 -c 4          the first zones of a zoned device
  blockyard add 'null:///fast?size=10G'      one more device, at run time
  blockyard top                              what it does, every second

Devices are named by URI: KIND:///NAME?KEY=VALUE&... . `blockyard help-device null` lists the keys.
Sizes are binary: 4k is 4096 bytes; 10G, 10GB and 10GiB are the same; 8s is 8 sectors of 512 bytes.

Exit codes:
  0  done                            4  no yard answers on the control socket
  1  failed                          5  there is no such device, volume or pool
  2  a wrong option or device URI    6  the yard, or a device or zone of it, refused
  7  `volume check`, `scrub` or `verify-stream` found damage, or a copy that is not good; or a pool
     is so damaged that it cannot be opened
  3  a wrong configuration file, or certificates or NVMe secrets that cannot be used
  `serve --run` exits as the command does; `status` has codes of its own
";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "blockyard",
    version,
    about = ABOUT,
    after_help = AFTER_HELP,
    propagate_version = true,
    arg_required_else_help = true,
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make devices and serve them until a signal, or while a command runs
    Serve(Box<ServeArgs>),
    /// List the devices of a yard
    #[command(visible_alias = "ls")]
    List(TalkArgs),
    /// Show the warnings of a yard, with an exit code for monitoring
    Status(StatusArgs),
    /// Show one device: geometry, limits, clients
    Show(DeviceArgs),
    /// Add a device to a running yard
    Add(AddArgs),
    /// Remove a device from a running yard
    #[command(visible_alias = "rm")]
    Remove(RemoveArgs),
    /// Serve the length that the file of a `file` device has now
    Rescan(DeviceArgs),
    /// Report or manage the zones of a device, with the words of blkzone
    #[command(subcommand)]
    Zone(ZoneCommand),
    /// Make a file system with a file per zone on a zoned device
    Mkzonefs(MkzonefsArgs),
    /// Mount and unmount such file systems
    #[command(subcommand)]
    Zonefs(ZonefsCommand),
    /// Show or change the I/O scheduler of a device, and its tunables
    #[command(subcommand)]
    Sched(SchedCommand),
    /// Start and stop NVMe listeners of a running yard
    #[command(subcommand)]
    Nvme(NvmeCommand),
    /// List and remove the ublk devices of this machine
    #[command(subcommand)]
    Ublk(UblkCommand),
    /// Serve devices of a running yard to virtual machines
    #[command(subcommand)]
    Vhost(VhostCommand),
    /// Work on a compressed RAM disk: compact, recompress, write back, save
    #[command(subcommand)]
    Ram(RamCommand),
    /// Show the state and the activity of pools of volumes
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Show the backup policies that a yard runs
    #[command(subcommand)]
    Backup(BackupCommand),
    /// Look after a pool of durable volumes: volumes, snapshots, clones, a check
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Show what the devices have done, or are doing
    Stats(StatsArgs),
    /// Show what the devices do, with the columns of iostat -x or zpool iostat -l
    Iostat(IostatArgs),
    /// Watch devices, zones, RAM disks, pools and clients on a terminal
    Top(TopArgs),
    /// Replace the program of a running yard while clients are connected
    Upgrade(crate::upgrade::UpgradeArgs),
    /// Have a standby take over its pools, and wait until it serves them
    Promote(PromoteArgs),
    /// List the clients of a yard: of NBD, NVMe, vhost-user and ublk
    Connections(TalkArgs),
    /// Record what a device does, in the format of blktrace
    Trace(TraceArgs),
    /// Replay a trace on a device
    Replay(ReplayArgs),
    /// Inject faults and latency into a device, list and remove them, run a scenario
    Inject(InjectArgs),
    /// Write a commented configuration: the default yard
    Init(InitArgs),
    /// Check a configuration, and show where it is invalid
    Check(CheckArgs),
    /// Print the JSON schema of the configuration
    Schema,
    /// Print the version of this program
    Version {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List every parameter that a kind of device takes
    HelpDevice(HelpDeviceArgs),
    /// Write the man pages into a directory
    Man {
        /// The directory; it must exist
        dir: PathBuf,
        /// Replace files of the same names that are not manual pages of blockyard
        #[arg(short, long)]
        force: bool,
    },
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

const SERVE_HELP: &str = "\
Without URIs and without -c the default yard is served: zoned0 (zoned, in memory, with limits),
null0 (plain, keeps nothing), mem0 (plain, in memory), smr0 (a shingled disk that speaks SCSI, in
memory), ram0 (compressed memory) and vol0 (a durable volume, in the state directory); `blockyard
init` writes it out. Without --nbd, NBD is served on nbd.sock in the runtime directory, which only
its owner may connect to; with `--nbd none` it is not served. TCP is served where --nbd asks for it.

A unix socket has the mode 0600, whatever the umask. To let QEMU in, which libvirt runs as another
user, name its group: --nbd 'unix:/run/vm/nbd.sock?group=kvm'. The options are owner=USER,
group=GROUP (which makes the mode 0660) and mode=OCTAL, with & between them; --control and --unix
take them, too.

The runtime directory is $XDG_RUNTIME_DIR/blockyard, for root /run/blockyard, and as a last resort
blockyard-UID in the directory for temporary files. The state directory, for volumes without
`path`, is $XDG_STATE_HOME/blockyard, or ~/.local/state/blockyard.

With --run, and with -U -, sockets are temporary and go when the server does. The command of --run
finds these variables: uri (of the first device), exportname (its name), nbd (the old form of the
URI), unixsocket, port, and BLOCKYARD_CONTROL, by which `blockyard zone` and the others find this
yard. Its exit code is that of `serve`.

With --nbd stdio nothing but NBD goes to standard output, and the server ends with its client.

Started by systemd, or by libnbd's [ COMMAND ], with sockets (LISTEN_FDS), NBD is served on those,
and on them instead of stdio. The server notifies systemd of READY, STOPPING, STATUS and the
watchdog.

SIGINT, SIGTERM and SIGHUP end the server: what is in flight is answered first. A second signal
ends it at once.

Examples:
  blockyard serve
  blockyard serve 'null:///z?size=10G&zoned=1&zone_size=256M&memory_backed=1' --nbd unix:/tmp/z.sock
  blockyard serve 'null:///x?size=1G' --run 'nbdinfo \"$uri\"'
  nbdinfo -- [ blockyard serve 'null:///x?size=1G' --nbd stdio ]
  blockyard serve --fuse /mnt/yard       then: losetup --find --show --direct-io=on /mnt/yard/mem0
  blockyard serve 'volume:///v0?size=10G' --ublk v0=0         then, as root: mkfs.ext4 /dev/ublkb0
  blockyard serve --web tcp:127.0.0.1:9465      then, in a browser: http://127.0.0.1:9465/
  blockyard serve -c yard.toml --pidfile /run/blockyard.pid
";

/// `serve`.
#[derive(Args, Debug)]
#[command(after_help = SERVE_HELP)]
pub(crate) struct ServeArgs {
    /// Devices, e.g. 'null:///n0?size=10G'
    #[arg(value_name = "URI", value_parser = device)]
    pub(crate) devices: Vec<DeviceSpec>,
    /// Read devices and places from a configuration; URIs come on top
    #[arg(short, long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Serve NBD at unix:PATH, tcp:HOST:PORT or stdio; may be repeated; `none` for nowhere
    #[arg(long, value_name = "PLACE")]
    pub(crate) nbd: Vec<NbdPlace>,
    /// Serve NVMe at tcp:HOST:PORT, by default nowhere; may be repeated
    #[arg(long, value_name = "PLACE", value_parser = nvme_place)]
    pub(crate) nvme: Vec<Endpoint>,
    /// Let NVMe hosts discover the devices at tcp:HOST:PORT, e.g. port 8009; may be repeated
    #[arg(long, value_name = "PLACE", value_parser = nvme_place)]
    pub(crate) nvme_discovery: Vec<Endpoint>,
    /// Serve DEVICE to a virtual machine by vhost-user-blk at a unix socket, DEVICE=unix:PATH; may
    /// be repeated
    #[arg(long, value_name = "DEVICE=PLACE", value_parser = VhostPlace::parse)]
    pub(crate) vhost: Vec<VhostPlace>,
    /// Make DEVICE the block device /dev/ublkbID of this machine by ublk, or one of any number;
    /// needs root; may be repeated
    #[arg(long, value_name = "DEVICE[=ID]", value_parser = ublk_place)]
    pub(crate) ublk: Vec<UblkPlace>,
    /// Poll each ring of a virtual machine for at most PERCENT of the time, instead of sleeping
    /// [default: 0]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) vhost_poll: Option<u32>,
    /// Let the NVMe host with this NQN, as in its /etc/nvme/hostnqn, use DEVICE, `*` for every
    /// device without a list, and no others; may be repeated
    #[arg(long, value_name = "DEVICE=NQN", value_parser = device_host)]
    pub(crate) nvme_allow: Vec<(String, String)>,
    /// Let NVMe hosts authenticate by DH-HMAC-CHAP: FILE, of mode 0600, has a line with NQN and
    /// secret of each, and the secret of the controller if the host authenticates it
    #[arg(long, value_name = "FILE")]
    pub(crate) nvme_secrets: Option<PathBuf>,
    /// Hash functions that NVMe hosts may use for DH-HMAC-CHAP, the preferred one first [default:
    /// all]
    #[arg(long, value_name = "HASH,...", value_delimiter = ',', value_parser = auth_hash())]
    pub(crate) nvme_hashes: Vec<AuthHash>,
    /// Diffie-Hellman groups that NVMe hosts may use for DH-HMAC-CHAP, the preferred one first
    /// [default: all]
    #[arg(long, value_name = "GROUP,...", value_delimiter = ',', value_parser = dh_group())]
    pub(crate) nvme_dh_groups: Vec<DhGroup>,
    /// Serve one more NVMe subsystem, of this NQN, e.g. nqn.2026-11.io.blockyard:all, with all
    /// devices as namespaces
    #[arg(long, value_name = "NQN", value_parser = subsystem_nqn)]
    pub(crate) nvme_subsystem: Option<String>,
    /// Serve the connections of all NVMe hosts by at most N threads [default: the number of
    /// processors]
    #[arg(long, value_name = "N", value_parser = nvme_count(&NVME_THREADS))]
    pub(crate) nvme_threads: Option<u64>,
    /// Allow at most N connections to each NVMe place; each queue of a host is one [default: 1024]
    #[arg(long, value_name = "N", value_parser = nvme_count(&NVME_CONNECTIONS))]
    pub(crate) nvme_connections: Option<u64>,
    /// Serve NBD on a unix socket at PATH, or at a temporary place with `-`
    #[arg(short = 'U', long, value_name = "PATH|-", conflicts_with = "nbd")]
    pub(crate) unix: Option<String>,
    /// The control socket; `none` for none
    #[arg(long, value_name = "PATH", value_parser = unix_place)]
    pub(crate) control: Option<UnixPlace>,
    /// Let requests of the control API, as those of `add`, name files below DIR; may be repeated
    #[arg(long, value_name = "DIR")]
    pub(crate) api_directory: Vec<PathBuf>,
    /// Serve metrics at tcp:HOST:PORT or unix:PATH too; they are on the control socket anyway
    #[arg(long, value_name = "PLACE")]
    pub(crate) metrics: Option<Endpoint>,
    /// Serve the dashboard, a page that shows what the yard does and changes nothing, at
    /// tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "PLACE")]
    pub(crate) web: Option<Endpoint>,
    /// Let clients of the dashboard show the token in FILE, of mode 0600; needed where other
    /// machines reach it
    #[arg(long, value_name = "FILE")]
    pub(crate) web_token_file: Option<PathBuf>,
    /// Mount every device as a file in DIR, an empty directory, for losetup and other programs
    #[arg(long, value_name = "DIR")]
    pub(crate) fuse: Option<PathBuf>,
    /// Let other users, root included, see the files of --fuse; a user's mount needs
    /// `user_allow_other` in /etc/fuse.conf for it
    #[arg(long)]
    pub(crate) fuse_allow_other: bool,
    /// The directory for volumes that have no `path` [default: see below]
    #[arg(long, value_name = "DIR", env = "BLOCKYARD_STATE")]
    pub(crate) state: Option<PathBuf>,
    /// Run a command by `sh -c`, and end with it
    #[arg(long, value_name = "COMMAND")]
    pub(crate) run: Option<String>,
    /// Open and serve nothing until `blockyard promote`, or until the lease of a pool in an object
    /// store has run out
    #[arg(long)]
    pub(crate) standby: bool,
    /// Write the process id to FILE once clients can connect
    #[arg(short = 'P', long, value_name = "FILE")]
    pub(crate) pidfile: Option<PathBuf>,
    /// End when the parent process does
    #[arg(long)]
    pub(crate) exit_with_parent: bool,
    /// Most memory for the buffers of all NBD connections together [default: a quarter of what the
    /// process may use, 256M at most]
    #[arg(long, value_name = "SIZE", value_parser = nbd_memory)]
    pub(crate) nbd_memory: Option<u64>,
    /// Whether NBD clients may or must use TLS
    #[arg(long, value_name = "MODE")]
    pub(crate) tls: Option<Tls>,
    /// Directory with server-cert.pem, server-key.pem and, for --tls-verify-peer, ca-cert.pem;
    /// needs --tls
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_certificates: Option<PathBuf>,
    /// Refuse NBD clients without a certificate that ca-cert.pem has signed; needs --tls require
    #[arg(long)]
    pub(crate) tls_verify_peer: bool,
    /// Let clients whose certificate has SUBJECT, e.g. CN=alice, use EXPORT, `*` for every export
    /// without a list, and no others; may be repeated; needs --tls-verify-peer
    #[arg(long, value_name = "EXPORT=SUBJECT", value_parser = export_subject)]
    pub(crate) tls_allow: Vec<(String, String)>,
    /// What to log on standard error, e.g. warn, info, debug or blockyard_nbd=debug
    #[arg(long, value_name = "FILTER", env = "BLOCKYARD_LOG")]
    pub(crate) log: Option<String>,
    /// Print devices and places as JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// `--nbd`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NbdPlace {
    /// NBD is not served.
    Nowhere,
    /// NBD is served there.
    At(Endpoint),
}

impl FromStr for NbdPlace {
    type Err = String;

    fn from_str(text: &str) -> Result<NbdPlace, String> {
        match text {
            "none" => Ok(NbdPlace::Nowhere),
            text => {
                let error = |error: EndpointError| format!("{error}, or none");
                text.parse().map(NbdPlace::At).map_err(error)
            }
        }
    }
}

/// `--tls`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Tls {
    /// TLS is not offered
    Off,
    /// TLS is offered
    On,
    /// Clients without TLS are refused
    Require,
}

/// `promote`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PromoteArgs {
    /// Return at once: do not wait until the pools are open
    #[arg(long)]
    pub(crate) no_wait: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// What every command that talks to a yard takes.
#[derive(Args, Clone, Debug)]
pub(crate) struct TalkArgs {
    /// The yard's control socket [default: control.sock in the runtime directory]
    #[arg(long, value_name = "PATH", env = "BLOCKYARD_CONTROL")]
    pub(crate) control: Option<PathBuf>,
    /// Fail if the yard does not answer for SECONDS [default: 90, or 3600 for long operations]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: Option<u64>,
    /// Print JSON, as the control API gives it
    #[arg(long)]
    pub(crate) json: bool,
}

const STATUS_HELP: &str = "\
Warnings: pool_fill and ram_limit (`warn_fill` of a volume or RAM disk is the mark, 80 % by
default), no_space (writes to a pool or RAM disk failed with ENOSPC within ten minutes),
pool_read_only, copy_bad, scrub_damage, pool_held, writes_missing, writes_lost, local_log_failed and
lease_unreadable (of a pool in an object store), reservations (more is reserved than is left),
device_latched (a sync of the file of a device, or of the files of its zones, failed), backup_failed
(the last run of a backup policy). A fill that has fallen 5 points below its mark is no warning any
more. A line for each backup policy has its last success.

Exit codes, those of plugins for Nagios and Icinga:
  0  OK: no warnings                     2  CRITICAL: data are lost or refused, or one copy is left
  1  WARNING: other warnings             3  UNKNOWN: no yard answers, or an option is wrong
";

/// `status`.
#[derive(Args, Debug)]
#[command(after_help = STATUS_HELP)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// A command about one device.
#[derive(Args, Debug)]
pub(crate) struct DeviceArgs {
    /// The device's name
    #[arg(value_parser = name)]
    pub(crate) device: String,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

const ADD_HELP: &str = "\
A parameter that is a path (`path`, `backing`, `trace`, `load`, ...) must be at or below a directory
of `serve --api-directory DIR`; by default there is none. `serve URI` needs no such directory.

Examples:
  blockyard add 'null:///fast?size=10G'
  blockyard serve --api-directory /srv/pool
  blockyard add 'volume:///v0?path=/srv/pool&size=1G'
";

/// `add`.
#[derive(Args, Debug)]
#[command(after_help = ADD_HELP)]
pub(crate) struct AddArgs {
    /// The device, e.g. 'null:///n1?size=10G&zoned=1'
    #[arg(value_name = "URI", value_parser = device)]
    pub(crate) device: DeviceSpec,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `remove`.
#[derive(Args, Debug)]
pub(crate) struct RemoveArgs {
    /// The device's name
    #[arg(value_parser = name)]
    pub(crate) device: String,
    /// Remove it even if clients use it; they are disconnected
    #[arg(short, long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `zone`.
#[derive(Debug, Subcommand)]
pub(crate) enum ZoneCommand {
    /// List zones, a line each, with the columns of `blkzone report`
    Report(ZoneArgs),
    /// Open zones explicitly
    Open(ZoneChangeArgs),
    /// Close open zones
    Close(ZoneChangeArgs),
    /// Make zones full
    Finish(ZoneChangeArgs),
    /// Make zones empty; without a range, all that can be
    Reset(ZoneChangeArgs),
    /// Make all zones empty that can be
    ResetAll(ZoneResetAllArgs),
    /// Say whether a device's zones would be accepted elsewhere, and quote the reason if not
    Check(ZoneCheckArgs),
    /// Write the geometry, the zones and the data of a device to a file
    Save(ZoneImageArgs),
    /// Bring a device of the same geometry into the state of a saved file
    Load(ZoneImageArgs),
}

const ZONE_IMAGE_HELP: &str = "\
The file begins with a line of JSON: the geometry, and each zone that holds something. The data
follow. `head -1 FILE` prints the line. Stop the clients of the device first: `save` fails if a zone
is reset meanwhile. `load` closes zones that were open; if it fails, the device is empty.

Examples:
  blockyard zone save zoned0 before.zones
  blockyard zone load zoned0 before.zones --force
";

/// `zone save`, `zone load`.
#[derive(Args, Debug)]
#[command(after_help = ZONE_IMAGE_HELP)]
pub(crate) struct ZoneImageArgs {
    /// The device's name
    #[arg(value_parser = name)]
    pub(crate) device: String,
    /// The file; `save` replaces it as a whole or not at all
    pub(crate) file: PathBuf,
    /// With `save`, replace the file whatever it is; with `load`, replace what the device holds,
    /// even if clients use it
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

const ZONE_CHECK_HELP: &str = "\
Refusals are quoted as Linux prints them in its log, each once, for the first zone that it is
about. The exit code is 6 if any of the targets would refuse the device.

Examples:
  blockyard zone check zoned0 --for linux-6.12
  blockyard zone check 'null:///z?zoned=1&zone_nr_conv=8' --for zbc --for zns
";

/// `zone check`.
#[derive(Args, Debug)]
#[command(after_help = ZONE_CHECK_HELP)]
pub(crate) struct ZoneCheckArgs {
    /// The name of a device that is served, or a URI, which needs no yard
    #[arg(value_name = "DEVICE|URI", value_parser = subject)]
    pub(crate) subject: Subject,
    /// Where it is to be accepted; may be repeated
    #[arg(long = "for", value_name = "TARGET", required = true, value_parser = targets())]
    pub(crate) targets: Vec<Target>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// A device that runs in a yard, or one to be made.
#[derive(Clone, Debug)]
pub(crate) enum Subject {
    /// The name of one that runs.
    Served(String),
    /// What to make.
    Made(Box<DeviceSpec>),
}

/// A command about a range of zones.
#[derive(Args, Debug)]
pub(crate) struct ZoneArgs {
    /// The device's name
    #[arg(value_parser = name)]
    pub(crate) device: String,
    /// Where the range begins: a sector as the report prints it (decimal or 0x-hexadecimal), a size
    /// such as 2G, or a zone number such as 5z. `report` begins with the zone of that sector; other
    /// commands take only the start of a zone
    #[arg(short, long, value_name = "OFFSET", value_parser = Distance::parse)]
    pub(crate) offset: Option<Distance>,
    /// Length of the range: sectors, a size such as 2G, or zones such as 2z. Commands other than
    /// `report` take whole zones only
    #[arg(short, long, value_name = "LENGTH", value_parser = Distance::parse)]
    #[arg(conflicts_with = "count")]
    pub(crate) length: Option<Distance>,
    /// Length of the range in zones
    #[arg(short, long, value_name = "ZONES", value_parser = number)]
    pub(crate) count: Option<u64>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `zone open`, `close`, `finish` and `reset`.
#[derive(Args, Debug)]
pub(crate) struct ZoneChangeArgs {
    #[command(flatten)]
    pub(crate) zones: ZoneArgs,
    /// Change zones although clients use the device or its file is open
    #[arg(long)]
    pub(crate) force: bool,
}

/// `zone reset-all`.
#[derive(Args, Debug)]
pub(crate) struct ZoneResetAllArgs {
    /// The device's name
    pub(crate) device: String,
    /// Reset zones although clients use the device or its file is open
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

const MKZONEFS_HELP: &str = "\
All sequential zones are reset, whatever they hold. Zone 0 takes the superblock and is no file.

Options of -o, with commas between them:
  aggr_cnv     contiguous conventional zones become one file
  uid=NUMBER   owner of the files [default: root, or the user who mounts]
  gid=NUMBER   group of the files [default: root, or the group of the user who mounts]
  perm=OCTAL   permissions of the files [default: 640]

Examples:
  blockyard mkzonefs zoned0
  blockyard mkzonefs -f -v -L logs -o aggr_cnv,uid=1000,gid=1000 zoned0
";

/// `mkzonefs`.
#[derive(Args, Debug)]
#[command(after_help = MKZONEFS_HELP)]
pub(crate) struct MkzonefsArgs {
    /// A device of a yard by its name, or one of this command's own by its URI
    #[arg(value_name = "DEVICE|URI", value_parser = name_or_uri)]
    pub(crate) device: String,
    /// Overwrite what the device holds
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Say what was made
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// A label of up to 64 bytes
    #[arg(short = 'L', long)]
    pub(crate) label: Option<String>,
    /// The UUID; a random one without it
    #[arg(short = 'U', long)]
    pub(crate) uuid: Option<String>,
    /// Options, see below
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub(crate) options: Vec<String>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `zonefs`.
#[derive(Debug, Subcommand)]
pub(crate) enum ZonefsCommand {
    /// Mount the file system of a zoned device
    Mount(ZonefsMountArgs),
    /// Unmount the file system of a device of a yard
    #[command(visible_alias = "umount")]
    Unmount(ZonefsUnmountArgs),
    /// List what a yard has mounted
    List(TalkArgs),
}

const ZONEFS_MOUNT_HELP: &str = "\
The device of a yard is served by the yard: the command returns when it is mounted, and
`zonefs unmount`, umount or `fusermount3 -u` end the mount. A device by URI is this command's own:
it serves until it is unmounted, or until SIGINT, SIGTERM or SIGHUP, which unmount it.

A yard mounts at or below the directories of `serve --api-directory DIR` only; by default there is
none. While it is mounted, the file system has the device to itself.

Options of -o, with commas between them:
  errors=remount-ro    an error of the device makes the file system read-only [default]
  errors=zone-ro       ... makes the file read-only
  errors=zone-offline  ... makes the file inaccessible
  errors=repair        ... corrects the file's size and keeps its permissions
  explicit-open        a file open for writing has its zone open; no more than the device allows
  ro                   no changes
  allow_other          other users may use it

Without root it needs fusermount3, and allow_other needs `user_allow_other` in /etc/fuse.conf.
";

/// `zonefs mount`.
#[derive(Args, Debug)]
#[command(after_help = ZONEFS_MOUNT_HELP)]
pub(crate) struct ZonefsMountArgs {
    /// A device of a yard by its name, or one of this command's own by its URI
    #[arg(value_name = "DEVICE|URI", value_parser = name_or_uri)]
    pub(crate) device: String,
    /// The directory to mount at
    pub(crate) dir: PathBuf,
    /// Mount it although clients use the device or its block file is open
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Options, see below
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub(crate) options: Vec<String>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `zonefs unmount`.
#[derive(Args, Debug)]
pub(crate) struct ZonefsUnmountArgs {
    /// The device's name
    #[arg(value_parser = name)]
    pub(crate) device: String,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `sched`.
#[derive(Debug, Subcommand)]
pub(crate) enum SchedCommand {
    /// Show the scheduler of a device, its tunables and what it has done
    Show(DeviceArgs),
    /// Give a device another scheduler or other tunables, while it is used
    Set(SchedSetArgs),
}

const SCHED_SET_HELP: &str = "\
Parameters, with Linux's names, units and ranges:
  scheduler=none|mq-deadline   the scheduler; `deadline` is mq-deadline too
  read_expire=MS               when a read is overdue: milliseconds, or 500ms, 5s
  write_expire=MS              when any other request is overdue
  writes_starved=N             how often reads go before waiting writes
  front_merges=0|1             merge what ends where a waiting request begins
  async_depth=N                most writes that wait or run at once; 0: as many as there is room for
  fifo_batch=N                 requests in order of sectors before the overdue are looked at
  prio_aging_expire=MS         when a lower class is served in spite of a higher

Tunables are those of mq-deadline. They may be set under `none`, and stay what they are until the
device is removed. Several are set together: if one is invalid, none is set.

Examples:
  blockyard sched set mem0 scheduler=mq-deadline
  blockyard sched set mem0 read_expire=100ms fifo_batch=8
";

/// `sched set`.
#[derive(Args, Debug)]
#[command(after_help = SCHED_SET_HELP)]
pub(crate) struct SchedSetArgs {
    /// The device's name
    #[arg(value_parser = name)]
    pub(crate) device: String,
    /// What to set
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = key_value)]
    pub(crate) pairs: Vec<(String, String)>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `init`.
#[derive(Args, Debug)]
pub(crate) struct InitArgs {
    /// The file to write; `-` for standard output
    #[arg(default_value = "yard.toml")]
    pub(crate) file: PathBuf,
    /// Overwrite a file that is there
    #[arg(short, long)]
    pub(crate) force: bool,
}

/// `check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// The configuration; `-` for standard input
    pub(crate) file: PathBuf,
    /// Print what was found as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `help-device`.
#[derive(Args, Debug)]
pub(crate) struct HelpDeviceArgs {
    /// The kind of device; without it, the kinds there are
    #[arg(value_parser = kinds())]
    pub(crate) kind: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn kinds() -> clap::builder::PossibleValuesParser {
    KINDS.iter().map(|kind| kind.name).collect::<Vec<_>>().into()
}

/// A URI has a colon; a name has none.
fn subject(text: &str) -> Result<Subject, String> {
    match text.contains(':') {
        true => device(text).map(|spec| Subject::Made(Box::new(spec))),
        false => name(text).map(Subject::Served),
    }
}

/// The name of a device that is served.
pub(crate) fn name(text: &str) -> Result<String, String> {
    match check_name(text) {
        Ok(()) => Ok(text.to_owned()),
        Err(_) => Err(format!("expected {NAME_WANTED}")),
    }
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = pair.ok_or("expected KEY=VALUE, e.g. scheduler=mq-deadline")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// The name of a device that is served, or the URI of one that is made.
fn name_or_uri(text: &str) -> Result<String, String> {
    if text.contains(':') { Ok(text.to_owned()) } else { name(text) }
}

fn targets() -> impl TypedValueParser<Value = Target> {
    PossibleValuesParser::new(Target::ALL.map(Target::name)).map(|name| {
        let named = Target::ALL.into_iter().find(|target| target.name() == name);
        named.expect("only these are possible")
    })
}

fn export_subject(text: &str) -> Result<(String, String), String> {
    let (export, subject) = text.split_once('=').ok_or("expected EXPORT=SUBJECT")?;
    AllowLists::default().allow(export, subject)?;
    Ok((export.to_owned(), subject.to_owned()))
}

fn device_host(text: &str) -> Result<(String, String), String> {
    let (device, host) = text.split_once('=').ok_or("expected DEVICE=NQN")?;
    AllowedHosts::default().allow(device, host)?;
    Ok((device.to_owned(), host.to_owned()))
}

fn subsystem_nqn(text: &str) -> Result<String, &'static str> {
    check_subsystem_nqn(text).map(|()| text.to_owned())
}

fn auth_hash() -> impl TypedValueParser<Value = AuthHash> {
    let word = |text: String| AuthHash::ALL.into_iter().find(|hash| hash.word() == text);
    PossibleValuesParser::new(AuthHash::ALL.map(AuthHash::word))
        .map(move |text| word(text).expect("it is one of the words"))
}

fn dh_group() -> impl TypedValueParser<Value = DhGroup> {
    let word = |text: String| DhGroup::ALL.into_iter().find(|group| group.word() == text);
    PossibleValuesParser::new(DhGroup::ALL.map(DhGroup::word))
        .map(move |text| word(text).expect("it is one of the words"))
}

fn ublk_place(text: &str) -> Result<UblkPlace, String> {
    let (device, id) = text.split_once('=').unwrap_or((text, ANY_ID));
    UblkPlace::of(&name(device)?, id)
}

/// A number within bounds.
fn nvme_count(bounds: &RangeInclusive<usize>) -> RangedU64ValueParser {
    RangedU64ValueParser::new().range(*bounds.start() as u64..=*bounds.end() as u64)
}

fn nvme_place(text: &str) -> Result<Endpoint, String> {
    match text.parse() {
        Ok(place @ Endpoint::Tcp { .. }) => Ok(place),
        Ok(Endpoint::Unix(_) | Endpoint::Stdio) => Err("expected tcp:HOST:PORT".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn nbd_memory(text: &str) -> Result<u64, String> {
    let bytes = blockyard_yard::size::parse(text).map_err(|error| error.to_string())?;
    match bytes >= NBD_MEMORY_MIN {
        true => Ok(bytes),
        false => Err(format!("expected {}M at least", NBD_MEMORY_MIN >> 20)),
    }
}

fn unix_place(text: &str) -> Result<UnixPlace, String> {
    UnixPlace::read(text).map_err(str::to_owned)
}

fn device(text: &str) -> Result<DeviceSpec, String> {
    blockyard_yard::uri::parse(text).map_err(|error| error.to_string())
}

/// A distance on a zoned device.
#[derive(Clone, Debug)]
pub(crate) struct Distance {
    /// What was typed, for errors.
    pub(crate) text: String,
    pub(crate) amount: Amount,
}

/// The amount of a distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Amount {
    /// Sectors of 512 bytes.
    Sectors(u64),
    /// Zones of the device.
    Zones(u64),
}

impl Distance {
    fn parse(text: &str) -> Result<Distance, String> {
        Ok(Distance { text: text.to_owned(), amount: Amount::parse(text)? })
    }
}

impl Amount {
    fn parse(text: &str) -> Result<Amount, String> {
        let wanted = || {
            "expected sectors of 512 bytes (decimal, or hexadecimal after 0x), a size with a unit \
             in whole sectors, e.g. 2G, or zones, e.g. 5z"
                .to_owned()
        };
        if let Some(zones) = text.strip_suffix('z') {
            let is_plain = zones.bytes().all(|byte| byte.is_ascii_digit());
            let zones = zones.parse().ok().filter(|_| is_plain);
            return zones.map(Amount::Zones).ok_or_else(wanted);
        }
        // A bare number counts sectors, as for blkzone; bytes need a unit.
        if let Ok(sectors) = number(text) {
            return Ok(Amount::Sectors(sectors));
        }
        let has_unit = text.ends_with(|last: char| last.is_ascii_alphabetic());
        let bytes = size::parse(text).ok().filter(|_| has_unit);
        let sectors = bytes.filter(|bytes| bytes.is_multiple_of(512)).map(|bytes| bytes / 512);
        sectors.map(Amount::Sectors).ok_or_else(wanted)
    }
}

/// A number as reports print it: decimal, or hexadecimal after 0x.
fn number(text: &str) -> Result<u64, String> {
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    let plain = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
    let number = u64::from_str_radix(digits, radix).ok().filter(|_| plain);
    number.ok_or_else(|| "expected a whole number, decimal or hexadecimal after 0x".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_declaration_holds_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn distances_are_sectors_sizes_or_zones() {
        for (text, amount) in [
            ("0x80000", Amount::Sectors(0x80000)),
            ("524288", Amount::Sectors(524_288)),
            ("2G", Amount::Sectors(4 << 20)),
            ("64M", Amount::Sectors(131_072)),
            ("8s", Amount::Sectors(8)),
            ("512b", Amount::Sectors(1)),
            ("0", Amount::Sectors(0)),
            ("5z", Amount::Zones(5)),
        ] {
            assert_eq!(Distance::parse(text).unwrap().amount, amount, "{text}");
        }
        for text in ["", "z", "-1", "+1z", "0x5z", "100b", "1.5G", "5 z", "99999999999999999999z"] {
            let error = Distance::parse(text).unwrap_err();
            assert!(error.contains("e.g. 2G, or zones, e.g. 5z"), "{text}: {error}");
        }
    }

    #[test]
    fn numbers_are_decimal_or_hexadecimal() {
        assert_eq!(number("0x80000"), Ok(0x80000));
        assert_eq!(number("524288"), Ok(524_288));
        for text in ["", "0x", "-1", "+1", "0x+1", "1k", "99999999999999999999"] {
            assert!(number(text).is_err(), "{text}");
        }
    }
}

//! The command lines of `pool` and `backup`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::volume::bytes;
use super::{TalkArgs, VolumePoolArgs};

const HELP: &str = "\
POOL is the pool's directory or disk; without one, every pool that the yard has open is shown.

Examples:
  blockyard pool list
  blockyard pool status -v /srv/pool
  blockyard pool iostat -lqw 1
";

/// `pool`.
#[derive(Debug, Subcommand)]
#[command(after_help = HELP)]
pub(crate) enum PoolCommand {
    /// List pools with their space and health, as zpool list does; changes nothing
    #[command(after_help = LIST_HELP)]
    List(PoolListArgs),
    /// Show the state of pools, their copies and their last scrub, as zpool status does; changes
    /// nothing
    Status(PoolStatusArgs),
    /// Show what the pools of a yard do, as zpool iostat does
    #[command(after_help = IOSTAT_HELP)]
    Iostat(PoolIostatArgs),
    /// Make an empty directory or disk a copy of a pool that may be in use, as zpool attach does
    #[command(after_help = ATTACH_HELP)]
    Attach(PoolAttachArgs),
    /// Remove a copy from a pool that may be in use, as zpool detach does
    Detach(PoolDetachArgs),
    /// Replace a copy of a pool that may be in use, as zpool replace does
    #[command(after_help = ATTACH_HELP)]
    Replace(PoolReplaceArgs),
    /// Wait for the resync of a pool, or change its rate, pause or continue it
    Resync(PoolResyncArgs),
    /// Check whether an object store excludes a second writer, as a pool on it needs
    #[command(after_help = PREFLIGHT_HELP)]
    Preflight(PoolPreflightArgs),
}

const ATTACH_HELP: &str = "\
The new copy gets every write at once, and is resynced while clients use the pool. The command
returns when the resync has begun, unless --wait is given; `pool status` shows the progress. If no
yard has the pool open, the command resyncs, and waits. An interrupted resync continues when the
pool is opened again.

Examples:
  blockyard pool attach /srv/a /srv/b
  blockyard pool replace /srv/a /srv/b /srv/c --rate 200M
  blockyard pool resync /srv/a --rate 0
";

/// Options of commands after which a copy is resynced.
#[derive(Args, Debug)]
pub(crate) struct ResyncOptions {
    /// Erase what NEW holds: a copy that was detached or replaced, or other data on a disk. A pool,
    /// or a copy that belongs to one, is still refused
    #[arg(long)]
    pub(crate) force: bool,
    /// Compare at most this number of bytes per second; 0: any number [default: unchanged]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) rate: Option<u64>,
}

/// `pool attach`.
#[derive(Args, Debug)]
pub(crate) struct PoolAttachArgs {
    #[command(flatten)]
    pub(crate) attach: AttachArgs,
    /// Wait until the new copy is good
    #[arg(long)]
    pub(crate) wait: bool,
}

/// `volume attach`, which waits until the new copy is good.
#[derive(Args, Debug)]
pub(crate) struct AttachArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// An empty directory on another disk, or for a pool on a disk an empty disk
    #[arg(value_name = "NEW", index = 2)]
    pub(crate) new: PathBuf,
    #[command(flatten)]
    pub(crate) options: ResyncOptions,
}

/// `pool detach`.
#[derive(Args, Debug)]
pub(crate) struct PoolDetachArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The copy that leaves the pool
    #[arg(value_name = "COPY", index = 2)]
    pub(crate) copy: PathBuf,
}

/// `pool replace`.
#[derive(Args, Debug)]
pub(crate) struct PoolReplaceArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The copy that leaves the pool when the new one is good; it may have failed, or be gone
    #[arg(value_name = "OLD", index = 2)]
    pub(crate) old: PathBuf,
    /// An empty directory on another disk, or for a pool on a disk an empty disk
    #[arg(value_name = "NEW", index = 3)]
    pub(crate) new: PathBuf,
    #[command(flatten)]
    pub(crate) options: ResyncOptions,
    /// Wait until the new copy is good
    #[arg(long)]
    pub(crate) wait: bool,
}

/// `pool resync`.
#[derive(Args, Debug)]
pub(crate) struct PoolResyncArgs {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// Compare at most this number of bytes per second from now on; 0: any number
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    #[arg(conflicts_with_all = ["pause", "resume"])]
    pub(crate) rate: Option<u64>,
    /// Pause the resync until --resume, or until the pool is opened again
    #[arg(long, conflicts_with = "resume")]
    pub(crate) pause: bool,
    /// Let a paused resync continue
    #[arg(long)]
    pub(crate) resume: bool,
}

const PREFLIGHT_HELP: &str = "\
The endpoint, the region and the credentials come from AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the credentials from the file
AWS_SHARED_CREDENTIALS_FILE. The command writes objects below PREFIX/preflight/, some thousand
requests, and removes them. It exits with 6 if the store does not do what a pool needs.

Example:
  AWS_ENDPOINT_URL=http://127.0.0.1:9000 blockyard pool preflight s3://volumes/pool0
";

/// `pool preflight`.
#[derive(Args, Debug)]
pub(crate) struct PoolPreflightArgs {
    /// The bucket, and the prefix of the pool's objects in it
    #[arg(value_name = "s3://BUCKET/PREFIX")]
    pub(crate) uri: String,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const LIST_HELP: &str = "\
SIZE is what the pool can hold: ALLOC, live blocks and map pages, and FREE, what can be written,
growth included. FRAG is the share of the segments in use that is garbage, which cleaning regains;
the ends of segments that are being written do not count.
WAMP is the bytes written per byte that clients have written since the pool was opened. HEALTH is
ONLINE, DEGRADED (a copy is not good), READONLY (a write or a sync has failed), or OFFLINE (no
process has the pool open).
";

/// The pools that a command shows.
#[derive(Args, Debug)]
pub(crate) struct PoolsArgs {
    /// Directories or disks of pools [default: every pool that the yard has open]
    #[arg(value_name = "POOL")]
    pub(crate) pools: Vec<PathBuf>,
    /// Open a mirrored pool with this copy only, although the other copy may be newer
    #[arg(long)]
    pub(crate) degraded: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// How a table is printed for scripts.
#[derive(Args, Debug)]
pub(crate) struct ScriptArgs {
    /// For scripts: no headings, a tab between columns
    #[arg(short = 'H', long)]
    pub(crate) scripted: bool,
    /// Print exact numbers: bytes, nanoseconds, and seconds since 1970
    #[arg(short = 'p', long)]
    pub(crate) parsable: bool,
}

/// `pool list`.
#[derive(Args, Debug)]
pub(crate) struct PoolListArgs {
    #[command(flatten)]
    pub(crate) pools: PoolsArgs,
    #[command(flatten)]
    pub(crate) script: ScriptArgs,
}

/// `pool status`.
#[derive(Args, Debug)]
pub(crate) struct PoolStatusArgs {
    #[command(flatten)]
    pub(crate) pools: PoolsArgs,
    /// Show segments by their share of live blocks too, and counters since the pool was opened
    #[arg(short = 'v', long)]
    pub(crate) verbose: bool,
}

const IOSTAT_HELP: &str = "\
The first report is of the time since each device and pool was opened, the next ones are of each
INTERVAL. The words at the end that are numbers are INTERVAL and COUNT, the others are pools.

Columns that do not fit the terminal, or 80 characters without one, follow in a block below.
Operations, bandwidth and latency are those of the pool's volumes that are devices, together.
disk_bw is what the pool writes: log, map pages, and blocks that cleaning moves.

Examples:
  blockyard pool iostat                     since the pools were opened
  blockyard pool iostat -lqw 1              every second until Ctrl-C
  blockyard pool iostat -y /srv/pool 5 3    three reports of five seconds
";

/// `pool iostat`.
#[derive(Args, Debug)]
pub(crate) struct PoolIostatArgs {
    /// Pools, all by default; the seconds between two reports; the number of reports
    #[arg(value_name = "POOL... [INTERVAL [COUNT]]")]
    pub(crate) words: Vec<String>,
    /// Mean latency of reads and writes, and percentiles of both together
    #[arg(short, long)]
    pub(crate) latency: bool,
    /// Operations in flight, syncs of the log, and waits of writes for cleaning
    #[arg(short, long)]
    pub(crate) queues: bool,
    /// Histograms of the latency of reads and writes; not with -H, which prints lines
    #[arg(short = 'w', long, conflicts_with = "scripted")]
    pub(crate) histograms: bool,
    /// Leave out the report of the time since the pools were opened
    #[arg(short = 'y', long)]
    pub(crate) no_first: bool,
    #[command(flatten)]
    pub(crate) script: ScriptArgs,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

const BACKUP_HELP: &str = "\
A yard runs the backup policies of its configuration, [[backup]]: it makes snapshots, sends them by
a command and prunes them.

Example:
  blockyard backup list
";

/// `backup`.
#[derive(Debug, Subcommand)]
#[command(after_help = BACKUP_HELP)]
pub(crate) enum BackupCommand {
    /// List the backup policies of a yard with their last results; fails if a last run failed
    List(TalkArgs),
}

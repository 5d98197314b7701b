//! The command lines of `pool` and `backup`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::TalkArgs;

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
    /// Print exact numbers: bytes, and seconds since 1970
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
    /// Histograms of the latency of reads and writes
    #[arg(short = 'w', long)]
    pub(crate) histograms: bool,
    /// Leave out the report of the time since the pools were opened
    #[arg(short = 'y', long)]
    pub(crate) no_first: bool,
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

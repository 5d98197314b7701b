//! The arguments of the commands that show what the devices do: `stats`, `iostat`, `top`.

use std::time::Duration;

use clap::Args;

use super::{TalkArgs, name};
use crate::top;

const STATS_HELP: &str = "\
Columns, as in iostat -x: reads, writes and MiB of each per second; merged reads and writes per
second; mean latency of reads and of writes; 50th, 99th and 99.9th percentile over both; failed
operations per second. Appends and write-zeroes count as writes. The first lines are means since
the daemon opened the device; with --watch the next ones are of each second.
";

/// `stats`.
#[derive(Args, Debug)]
#[command(after_help = STATS_HELP)]
pub(crate) struct StatsArgs {
    /// Only this device
    #[arg(value_parser = name)]
    pub(crate) device: Option<String>,
    /// Print again every second until Ctrl-C
    #[arg(short, long)]
    pub(crate) watch: bool,
    /// Seconds between two prints
    #[arg(long, value_name = "SECONDS", default_value_t = 1, requires = "watch")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) interval: u64,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

const IOSTAT_HELP: &str = "\
The first report is of the time since the daemon opened each device, the next ones are of each
INTERVAL. The words at the end that are numbers are INTERVAL and COUNT, the others are devices.

Columns, as in iostat -xm: operations per second (r reads, w writes, d discards, f flushes), MiB per
second, merged operations per second and their share of all in percent, mean latency in milliseconds
(await), mean size in KiB (areq-sz), and the mean number of operations in progress (aqu-sz). Appends
and write-zeroes count as writes. iostat has no z/s and z_await: they are the rate and the mean
latency of zone management (reset, open, close, finish). There is no %util: a device that executes
requests in parallel can show 100 % far below its limit. Flushes of a device without a write cache
complete at once: f/s counts them, f_await does not.

With -l, similar to zpool iostat -l: operations per second, bytes per second, mean latency of reads,
writes, flushes and discards, and percentiles of the latency of reads and writes together.

Examples:
  blockyard iostat                           since the daemon opened the devices
  blockyard iostat -y 1                      every second until Ctrl-C
  blockyard iostat -l mem0 0.5 10            ten reports of one device
";

/// `iostat`.
#[derive(Args, Debug)]
#[command(after_help = IOSTAT_HELP)]
pub(crate) struct IostatArgs {
    /// Devices, all by default; the seconds between two reports; the number of reports
    #[arg(value_name = "DEVICE... [INTERVAL [COUNT]]")]
    pub(crate) words: Vec<String>,
    /// Show latencies, with columns like those of zpool iostat -l
    #[arg(short, long)]
    pub(crate) latency: bool,
    /// Leave out the report of the time since the daemon opened the devices
    #[arg(short = 'y', long)]
    pub(crate) no_first: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

const TOP_HELP: &str = "\
Keys:
  1 to 5, Tab    page: devices, zones by condition, RAM disks, pools, clients
  < >            sort by the column before, after; without a column in the yard's order
  r              reverse the order
  + -            double, halve the time between two samples
  p, space       pause
  q, Esc         quit

CPU is that of the daemon: 100% is one processor. Its time per I/O is over all devices. The columns
of devices are those of iostat (blockyard help iostat). amp is write amplification: the bytes that a
pool wrote to its log, for checkpoints and for cleaning, per byte that it was given. Each connection
of an NVMe host is a queue. With --json, each sample is a line, in base units (docs/top.md).

Examples:
  blockyard top
  blockyard top --batch -d 5 -n 12           a minute as text
";

/// `top`.
#[derive(Args, Debug)]
#[command(after_help = TOP_HELP)]
pub(crate) struct TopArgs {
    /// Print text, for a file or a pipe
    #[arg(short, long)]
    pub(crate) batch: bool,
    /// Seconds between two samples
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = top::delay)]
    pub(crate) delay: Duration,
    /// End after this many samples
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) count: Option<u64>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

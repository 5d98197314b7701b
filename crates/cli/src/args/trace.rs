//! The arguments of `trace` and `replay`.

use std::path::PathBuf;
use std::time::Duration;

use blockyard_yard::trace::{REPLAY_MS_MAX, TRACE_BYTES_MIN, parse_speed};
use clap::{Args, ValueEnum};

use super::{TalkArgs, name, name_or_uri};
use crate::top;

const TRACE_HELP: &str = "\
The trace has the binary format of blktrace, which blkparse, btt, iowatcher and fio's --read_iolog
read. It begins with the next batch of requests of each client and lasts until Ctrl-C, or until
--duration or --size-max. A device has one trace at a time. An event that does not fit into the
memory for it is lost, counted and reported; a trace delays no request to wait for its file.

Events: Q a client has submitted a bio, X a bio was cut, G a bio became a request, M a bio was
merged, I a request has to wait, D a request went to the device, R the device did not take it, C it
has completed. The CPU of an event is the queue, the PID the thread of the yard. Operations of zones
other than appends are messages: the format has no category for them.

btt, iowatcher and fio read the file, blkparse reads it from standard input.

Examples:
  blockyard trace mem0 -o mem0.bin --duration 10
  blkparse -i - < mem0.bin
  blockyard trace mem0 -o - | blkparse -i -
";

/// `trace`.
#[derive(Args, Debug)]
#[command(after_help = TRACE_HELP)]
pub(crate) struct TraceArgs {
    /// The device's name
    #[arg(value_parser = name)]
    pub(crate) device: String,
    /// The file; `-` for standard output
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// End after SECONDS, e.g. 0.5 or 60
    #[arg(long, value_name = "SECONDS", value_parser = top::delay)]
    pub(crate) duration: Option<Duration>,
    /// End before the file is longer than SIZE
    #[arg(long, value_name = "SIZE", value_parser = trace_size)]
    pub(crate) size_max: Option<u64>,
    /// Replace the file even if it is no trace
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

const REPLAY_HELP: &str = "\
FILE is a trace of `blockyard trace` or of blktrace itself, of any byte order, version 7 or 8; or a
NAME of which blktrace has written NAME.blktrace.0, NAME.blktrace.1, ...; or `-`, standard input.
Each operation that a client queued (Q) is submitted at its time, on a channel for each CPU of the
trace, up to 64. A trace of blktrace (version 7) has zone appends as writes, and no other operations
of zones.

Reads are discarded. Writes write pseudo-random bytes: replaying them destroys the data of the
device, and needs --write. --force replays writes although clients use the device. Ctrl-C stops the
replay; what was done until then is printed, and the exit code is 1.

Examples:
  blockyard replay mem0.bin null0 --write
  blockyard replay sda 'null:///n?size=100G' --write --speed max
  blkparse -i sda -d sda.bin -O && blockyard replay sda.bin mem0 --write --speed 10
";

/// `replay`.
#[derive(Args, Debug)]
#[command(after_help = REPLAY_HELP)]
pub(crate) struct ReplayArgs {
    /// The trace; `-` for standard input
    pub(crate) file: PathBuf,
    /// A device of a yard by its name, or one of this command's own by its URI
    #[arg(value_name = "DEVICE|URI", value_parser = name_or_uri)]
    pub(crate) device: String,
    /// How fast: a factor such as 2 or 0.5, or `max` for as fast as the device goes
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = speed)]
    pub(crate) speed: String,
    /// Operations in flight on each channel, at most
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) queue_depth: u16,
    /// Refuse a trace that lasts longer than SECONDS at this speed; a day by default
    #[arg(long, value_name = "SECONDS", value_parser = duration_max)]
    pub(crate) duration_max: Option<Duration>,
    /// Refuse a trace of more than N operations
    #[arg(long, value_name = "N", default_value_t = 5_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) operations_max: u64,
    /// The events to replay
    #[arg(long, value_name = "EVENTS", default_value = "queued")]
    pub(crate) events: ReplayEvents,
    /// Replay writes, discards and operations of zones too, which destroys data
    #[arg(long)]
    pub(crate) write: bool,
    /// Replay them although clients use the device
    #[arg(long, requires = "write")]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `--events`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ReplayEvents {
    /// What clients queued (Q)
    Queued,
    /// What was issued to the device (D), after merging
    Issued,
}

fn duration_max(text: &str) -> Result<Duration, String> {
    let max = Duration::from_millis(REPLAY_MS_MAX);
    let wanted = || format!("expected 0.001 to {} seconds", max.as_secs());
    let duration = text.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
    duration.filter(|it| it.as_millis() > 0 && *it <= max).ok_or_else(wanted)
}

fn speed(text: &str) -> Result<String, String> {
    parse_speed(text).map(|_| text.to_owned()).map_err(|wanted| format!("expected {wanted}"))
}

fn trace_size(text: &str) -> Result<u64, String> {
    let bytes = blockyard_yard::size::parse(text).map_err(|error| error.to_string())?;
    match bytes >= TRACE_BYTES_MIN {
        true => Ok(bytes),
        false => Err(format!("expected {}k at least", TRACE_BYTES_MIN >> 10)),
    }
}

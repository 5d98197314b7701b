//! The command line of `ram`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{DeviceArgs, TalkArgs};

const LIST_HELP: &str = "\
Columns, as zramctl has them: NAME, ALGORITHM, DISKSIZE, DATA (stored data before compression),
COMPR (after it), TOTAL (memory for it), STREAMS (channels, each of which compresses on its own
thread), ZERO-PAGES (blocks of one repeated word), MEM-LIMIT, MEM-USED (the most memory so far),
MIGRATED (pages that compaction has freed), COMP-RATIO (DATA to TOTAL), MOUNTPOINT (of its ublk
device).
";

/// `ram list`.
#[derive(Args, Debug)]
pub(crate) struct RamListArgs {
    /// RAM disks, all by default
    #[arg(value_name = "DEVICE", value_parser = super::name)]
    pub(crate) devices: Vec<String>,
    /// Print sizes in bytes
    #[arg(short, long)]
    pub(crate) bytes: bool,
    /// Print no headings
    #[arg(short, long)]
    pub(crate) noheadings: bool,
    /// The columns, separated by commas
    #[arg(short, long, value_name = "COLUMN,...", value_delimiter = ',')]
    pub(crate) output: Vec<String>,
    /// All columns
    #[arg(long, conflicts_with = "output")]
    pub(crate) output_all: bool,
    /// A space between columns, which are not aligned
    #[arg(long)]
    pub(crate) raw: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `ram`.
#[derive(Debug, Subcommand)]
pub(crate) enum RamCommand {
    /// List RAM disks with the columns of zramctl
    #[command(after_help = LIST_HELP)]
    List(RamListArgs),
    /// Compact size classes and return free pages to the system
    Compact(DeviceArgs),
    /// Begin a round: increase the idle age of every block by one; an access resets it to 0
    Idle(DeviceArgs),
    /// Recompress blocks with the secondary algorithms (recomp_algo) where that saves space
    Recompress(RamRecompressArgs),
    /// Write blocks back to the backing file in compressed form
    Writeback(RamWritebackArgs),
    /// Save the device's data to a file for `load=FILE`. Each block that a client writes meanwhile
    /// may be old or new: unmount or freeze a file system first
    Save(RamFileArgs),
    /// Train a zstd dictionary on the device's data, for `dict=FILE`
    Train(RamFileArgs),
    /// List blocks: number, idle age in rounds of `ram idle`, stored bytes, zram's flags (s w h i
    /// r n)
    Blocks(RamBlocksArgs),
    /// Show histograms of stored sizes and of idle ages
    Histograms(DeviceArgs),
    /// Change mem_limit, mem_used_max or compact while the device is used
    Set(RamSetArgs),
}

const SET_HELP: &str = "\
Settings, with zram's names:
  mem_limit=SIZE    most memory for data; what is used beyond it stays; 0: no limit
  mem_used_max=0    reset the peak of memory use
  compact=PERCENT   overhead over which the pool is compacted in the background; 0: never

Several are set together: if one is invalid, none is set.

Examples:
  blockyard ram set ram0 mem_limit=512M
  blockyard ram set ram0 mem_used_max=0 compact=10
";

/// `ram set`.
#[derive(Args, Debug)]
#[command(after_help = SET_HELP)]
pub(crate) struct RamSetArgs {
    /// The device's name
    #[arg(value_parser = super::name)]
    pub(crate) device: String,
    /// What to set
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = pair)]
    pub(crate) pairs: Vec<(String, String)>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = pair.ok_or("expected KEY=VALUE, e.g. mem_limit=512M")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Which blocks of a RAM disk.
#[derive(Args, Debug)]
pub(crate) struct RamSelectArgs {
    /// The device's name
    #[arg(value_parser = super::name)]
    pub(crate) device: String,
    /// Which blocks: all, idle, huge, huge_idle or incompressible
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) which: Option<String>,
    /// With idle ones: rounds of `ram idle` since the last access, 1 to 7 [default: 1]
    #[arg(long, value_name = "ROUNDS")]
    pub(crate) age: Option<u8>,
    /// Only blocks whose stored size is at least SIZE
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) threshold: Option<u64>,
    /// Stop after this number of blocks; the largest come first
    #[arg(long, value_name = "BLOCKS")]
    pub(crate) max: Option<u64>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `ram recompress`.
#[derive(Args, Debug)]
pub(crate) struct RamRecompressArgs {
    #[command(flatten)]
    pub(crate) select: RamSelectArgs,
    /// Only by this one of the device's algorithms: 1 is recomp_algo, 2 recomp_algo2, 3
    /// recomp_algo3 [default: each in turn]
    #[arg(long, value_name = "PRIORITY")]
    pub(crate) priority: Option<u8>,
}

/// `ram writeback`.
#[derive(Args, Debug)]
pub(crate) struct RamWritebackArgs {
    #[command(flatten)]
    pub(crate) select: RamSelectArgs,
    /// Write so much at most
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) limit: Option<u64>,
}

/// A RAM disk and a file, which the command writes.
#[derive(Args, Debug)]
pub(crate) struct RamFileArgs {
    /// The device's name
    #[arg(value_parser = super::name)]
    pub(crate) device: String,
    /// The file; it is replaced as a whole or not at all
    pub(crate) file: PathBuf,
    /// Replace the file even if no such command has written it
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `ram blocks`.
#[derive(Args, Debug)]
pub(crate) struct RamBlocksArgs {
    /// The device's name
    #[arg(value_parser = super::name)]
    pub(crate) device: String,
    /// From this block on
    #[arg(long, value_name = "BLOCK", default_value_t = 0)]
    pub(crate) from: u64,
    /// List at most this number of blocks
    #[arg(long, value_name = "BLOCKS")]
    pub(crate) count: Option<u64>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

fn bytes(text: &str) -> Result<u64, String> {
    blockyard_yard::size::parse(text).map_err(|error| error.to_string())
}

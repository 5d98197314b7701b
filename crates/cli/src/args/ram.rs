//! The command line of `ram`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{DeviceArgs, TalkArgs};

/// `ram`.
#[derive(Debug, Subcommand)]
pub(crate) enum RamCommand {
    /// Move objects together and give memory back to the system
    Compact(DeviceArgs),
    /// Make every block one turn older; blocks that are used begin anew
    Idle(DeviceArgs),
    /// Compress blocks by the device's second algorithm (recomp_algo) where that is smaller
    Recompress(RamSelectArgs),
    /// Move blocks to the backing file, compressed as they are
    Writeback(RamWritebackArgs),
    /// Save what the device holds to a file, for `load=FILE` of a device like it
    Save(RamFileArgs),
    /// Train a zstd dictionary on what the device holds, for `dict=FILE`
    Train(RamFileArgs),
    /// List blocks: number, age in turns, stored bytes, zram's flags (s w h i r n)
    Blocks(RamBlocksArgs),
}

/// Which blocks of a RAM disk.
#[derive(Args, Debug)]
pub(crate) struct RamSelectArgs {
    /// The device's name
    pub(crate) device: String,
    /// Which blocks: all, idle, huge, huge_idle or incompressible
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) which: Option<String>,
    /// With idle ones: turns of `ram idle` since the last access, 1 to 7 [default: 1]
    #[arg(long, value_name = "TURNS")]
    pub(crate) age: Option<u8>,
    /// Only blocks that take at least so many bytes
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) threshold: Option<u64>,
    /// Stop after so many blocks; the largest come first
    #[arg(long, value_name = "BLOCKS")]
    pub(crate) max: Option<u64>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
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

/// A RAM disk and a file of the yard's.
#[derive(Args, Debug)]
pub(crate) struct RamFileArgs {
    /// The device's name
    pub(crate) device: String,
    /// The file; it is replaced as a whole or not at all
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// `ram blocks`.
#[derive(Args, Debug)]
pub(crate) struct RamBlocksArgs {
    /// The device's name
    pub(crate) device: String,
    /// From this block on
    #[arg(long, value_name = "BLOCK", default_value_t = 0)]
    pub(crate) from: u64,
    /// So many at most
    #[arg(long, value_name = "BLOCKS")]
    pub(crate) count: Option<u64>,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

fn bytes(text: &str) -> Result<u64, String> {
    blockyard_yard::size::parse(text).map_err(|error| error.to_string())
}

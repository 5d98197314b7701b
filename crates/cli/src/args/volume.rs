//! The command line of `volume`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::TalkArgs;

const HELP: &str = "\
POOL is the pool's directory. Where a yard has it open, the command asks that yard.

Examples:
  blockyard volume create /srv/pool v0 --size 100G
  blockyard volume snapshot /srv/pool v0@monday
  blockyard volume clone /srv/pool v0@monday try
  blockyard volume check /srv/pool
";

/// `volume`.
#[derive(Debug, Subcommand)]
#[command(after_help = HELP)]
pub(crate) enum VolumeCommand {
    /// Make a volume, and the pool if there is none
    Create(VolumeCreateArgs),
    /// List volumes and snapshots
    List(VolumePoolArgs),
    /// Show a volume or snapshot, and what it takes
    Show(VolumeNameArgs),
    /// Make a snapshot VOLUME@SNAPSHOT
    Snapshot(VolumeNameArgs),
    /// Make a volume with the contents of a snapshot, whose blocks the two share
    Clone(VolumeCloneArgs),
    /// Give a volume that nobody uses the contents of its snapshot VOLUME@SNAPSHOT again
    Rollback(VolumeNameArgs),
    /// Change the size of a volume; what lies beyond a smaller one is gone
    Resize(VolumeResizeArgs),
    /// Remove a volume without snapshots, or a snapshot
    Destroy(VolumeNameArgs),
    /// Verify a pool that nobody has open and every block in it, and change nothing
    Check(VolumePoolArgs),
}

/// A pool.
#[derive(Args, Debug)]
pub(crate) struct VolumePoolArgs {
    /// The pool's directory
    #[arg(value_name = "POOL")]
    pub(crate) pool: PathBuf,
    #[command(flatten)]
    pub(crate) talk: TalkArgs,
}

/// A pool and a name in it.
#[derive(Args, Debug)]
pub(crate) struct VolumeAt {
    #[command(flatten)]
    pub(crate) pool: VolumePoolArgs,
    /// The name: VOLUME or VOLUME@SNAPSHOT
    pub(crate) name: String,
}

/// A command about a name in a pool.
#[derive(Args, Debug)]
pub(crate) struct VolumeNameArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
}

/// `volume create`.
#[derive(Args, Debug)]
pub(crate) struct VolumeCreateArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// Its capacity
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) size: u64,
    /// What is checksummed and compressed as one: 4k to 64k
    #[arg(long, value_name = "SIZE", value_parser = bytes, default_value = "16k")]
    pub(crate) volblocksize: u64,
}

/// `volume clone`.
#[derive(Args, Debug)]
pub(crate) struct VolumeCloneArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// The name of the new volume
    pub(crate) new: String,
}

/// `volume resize`.
#[derive(Args, Debug)]
pub(crate) struct VolumeResizeArgs {
    #[command(flatten)]
    pub(crate) at: VolumeAt,
    /// Its new capacity
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) size: u64,
}

fn bytes(text: &str) -> Result<u64, String> {
    blockyard_yard::size::parse(text).map_err(|error| error.to_string())
}

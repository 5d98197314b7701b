//! Verifies a pool that is not open, without changing it: superblock, catalogue, all map pages, the
//! log after the checkpoint, and the bytes of every block. It also checks that each segment's live
//! count is at least what the maps reference.

use std::path::Path;
use std::sync::Arc;

use crate::address_space;
use crate::error::VolumeError;
use crate::format::catalogue::Traits;
use crate::options::Options;
use crate::recovery::{self, Looked};
use crate::store::mirror::CopyStatus;
use crate::store::mirror::places::Places;
use crate::store::{Copies, Directory};
use crate::verify::Verifier;

/// A block that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// One of the volumes or snapshots that contain the block.
    pub volume: String,
    /// The number of the block in that volume; for a damaged map page, the first block that the
    /// page maps.
    pub block: u64,
    /// The address in the pool, in bytes.
    pub address: u64,
    /// A description of the damage.
    pub what: String,
}

/// The result of verifying a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of volumes and snapshots.
    pub volumes: u64,
    /// Blocks that are stored; a shared block is counted once.
    pub blocks: u64,
    /// Bytes of these blocks, as stored.
    pub stored_bytes: u64,
    /// Groups in the log after the checkpoint; 0 for a pool that is in use, whose log is not read.
    pub groups: u64,
    /// Blocks and pages that are damaged in at least one copy.
    pub damaged: u64,
    /// Blocks and pages that were damaged in one of two copies and were repaired from the other.
    pub mended: u64,
    /// How many blocks of the last groups of the log reached only one of two copies before a kill
    /// or a power cut. They are not damaged: the next opening writes them to the other copy.
    pub behind: u64,
    /// The state of each copy, if the pool has two.
    pub copies: Vec<CopyStatus>,
    /// The first damaged blocks and pages, described.
    pub damage: Vec<Damage>,
}

/// Verifies the pool in a directory, and its second copy. `progress` gets the number of bytes that
/// were verified.
///
/// # Errors
/// If there is no pool, another process has it open, or it is too damaged to be opened.
pub fn check(path: &Path, progress: &mut dyn FnMut(u64)) -> Result<Report, VolumeError> {
    address_space::check(&Options::default())?;
    if !crate::device::is_pool(path)? {
        return Err(VolumeError::NoPool { path: path.to_owned() });
    }
    check_in(Places::of(path).look()?, progress)
}

/// Verifies the pool in any [`Directory`], without changing it.
///
/// # Errors
/// As [`check`].
pub fn check_in<D: Directory>(
    directory: Copies<D>,
    progress: &mut dyn FnMut(u64),
) -> Result<Report, VolumeError> {
    verify(directory, false, usize::MAX, &mut |bytes| {
        progress(bytes);
        true
    })
}

/// Verifies the pool in any [`Directory`]. With `mends`, a block that is damaged in one copy and
/// intact in another is rewritten. References to segments from `segments_max` on are refused.
/// `goes_on` gets the number of bytes that were verified and returns whether to continue.
///
/// # Errors
/// As [`check`], and [`VolumeError::Stopped`] if `goes_on` ends it.
pub(crate) fn verify<D: Directory>(
    directory: Copies<D>,
    mends: bool,
    segments_max: usize,
    goes_on: &mut dyn FnMut(u64) -> bool,
) -> Result<Report, VolumeError> {
    let options = Options::default();
    let segments_max = segments_max.min(options.segments_max);
    let options = Options { segments_max, ..options };
    let Looked { volumes, groups, loose, segments } = recovery::look(directory, &options)?;
    let mut verifier = Verifier::new(&segments, mends).with_loose(loose);
    for live in volumes.by_id.values() {
        let (frozen, now) = (live.map.freeze(), || Some(Arc::clone(live)));
        if !verifier.volume(live.traits.block_bytes, &frozen, &now, goes_on) {
            return Err(VolumeError::Stopped);
        }
    }
    if !mends {
        verifier.counts();
    }
    let volumes = volumes.by_id.len() as u64;
    let copies = segments.directory().status();
    Ok(Report { volumes, groups, copies, ..verifier.report })
}

/// Lists the volumes and snapshots of a pool that is not open, without changing it, and the state
/// of its copies if it has two.
///
/// # Errors
/// As [`check`].
pub fn list(path: &Path) -> Result<(Vec<Traits>, Vec<CopyStatus>), VolumeError> {
    address_space::check(&Options::default())?;
    let found = recovery::look(Places::of(path).look()?, &Options::default())?;
    Ok((found.volumes.list(), found.segments.directory().status()))
}

//! Verifies a pool that nobody has open, and changes nothing: superblock, catalogue, every page of
//! the maps, the log behind the checkpoint, the bytes of every block, and that as many count of
//! each segment as the maps name at least.

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
    /// One of the volumes or snapshots that have it.
    pub volume: String,
    /// Its number there; of a page of the map the first of those that it names.
    pub block: u64,
    /// Where it is, in bytes from the pool's beginning.
    pub address: u64,
    /// What is wrong with it.
    pub what: String,
}

/// What was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Volumes and snapshots.
    pub volumes: u64,
    /// Blocks that are somewhere; what is shared counts once.
    pub blocks: u64,
    /// Their bytes as they are stored.
    pub stored_bytes: u64,
    /// Groups in the log behind the checkpoint; none were read of a pool that is in use.
    pub groups: u64,
    /// How many blocks and pages are damaged, in one copy at least.
    pub damaged: u64,
    /// How many were damaged in one of two copies, and were written again from the other one.
    pub mended: u64,
    /// How many blocks of the last groups of the log reached only one of two copies before a kill
    /// or a power cut. They are not damaged: the next opening writes them to the other copy.
    pub behind: u64,
    /// Where there are two copies, how they are.
    pub copies: Vec<CopyStatus>,
    /// The first of them.
    pub damage: Vec<Damage>,
}

/// Verifies the pool in a directory, and its second copy. `progress` is told the bytes that were
/// verified.
///
/// # Errors
/// If there is no pool, somebody has it open, or it is damaged so that it cannot be opened.
pub fn check(path: &Path, progress: &mut dyn FnMut(u64)) -> Result<Report, VolumeError> {
    address_space::check(&Options::default())?;
    if !crate::device::is_pool(path)? {
        return Err(VolumeError::NoPool { path: path.to_owned() });
    }
    check_in(Places::of(path).look()?, progress)
}

/// The same in any directory.
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

/// Verifies the pool in any directory. With `mends` what is damaged in one copy and whole in
/// another one is written again; what is in segments from `segments_max` on is refused. `goes_on`
/// is told the bytes that were verified and returns whether to go on.
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

/// The volumes and snapshots of a pool that nobody has open, of which nothing is changed; and how
/// its copies are, where it has two.
///
/// # Errors
/// As [`check`].
pub fn list(path: &Path) -> Result<(Vec<Traits>, Vec<CopyStatus>), VolumeError> {
    address_space::check(&Options::default())?;
    let found = recovery::look(Places::of(path).look()?, &Options::default())?;
    Ok((found.volumes.list(), found.segments.directory().status()))
}

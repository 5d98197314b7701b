//! Verifies a pool that is not open, without changing it: superblock, catalogue, all map pages, the
//! log after the checkpoint, and the bytes of every block. It also checks that each segment's live
//! count is at least what the maps reference.

use std::path::Path;

use blockyard_store::{Mirror, PoolBacking, PoolPaths, SegmentStore, is_pool, no_pool};
use blockyard_volume::verify::{PoolVerifier, Report, verify};
use blockyard_volume::{Options, ReadOnlyPool, VolumeError, address_space};

/// Verifies the pool in a directory, and its second copy. `progress` gets the number of bytes that
/// were verified.
///
/// # Errors
/// If there is no pool, another process has it open, or it is too damaged to be opened.
pub fn check(path: &Path, progress: &mut dyn FnMut(u64)) -> Result<Report, VolumeError> {
    address_space::check(&Options::default())?;
    if !is_pool(path)? {
        return Err(no_pool(path).into());
    }
    check_in(PoolPaths::of(path).open_read_only(&PoolVerifier)?, progress)
}

/// Verifies the pool in any [`SegmentStore`], without changing it.
///
/// # Errors
/// As [`check`].
pub fn check_in<D: SegmentStore>(
    directory: Mirror<D>,
    progress: &mut dyn FnMut(u64),
) -> Result<Report, VolumeError> {
    verify(directory, progress)
}

/// Opens a pool that is not open, to show it without changing it.
///
/// # Errors
/// As [`check`].
pub fn open_read_only(path: &Path) -> Result<ReadOnlyPool<PoolBacking>, VolumeError> {
    address_space::check(&Options::default())?;
    if !is_pool(path)? {
        return Err(no_pool(path).into());
    }
    ReadOnlyPool::open(PoolPaths::of(path).open_read_only(&PoolVerifier)?)
}

//! Lists the ranges in which a volume or snapshot differs from a snapshot, by comparing their maps:
//! no block is read. A block that was overwritten with equal data differs.

use std::iter::Peekable;
use std::sync::Arc;

use blockyard_store::{PoolBacking, SegmentStore};
use blockyard_volume::map::Leaf;
use blockyard_volume::names::invalid;
use blockyard_volume::pool::Volumes;
use blockyard_volume::record::OpenVolume;
use blockyard_volume::{ReadOnlyPool, Running, VolumeError};

use crate::changes::{Changes, Run};
use crate::send::Passing;

/// A range that differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiffRange {
    /// Where it begins, in bytes from the start of the volume.
    pub offset_bytes: u64,
    /// The length in bytes.
    pub len_bytes: u64,
    /// Whether it has become zeros, by a discard or in another way; otherwise it was written.
    pub is_discarded: bool,
}

/// The ranges that differ, in order. Neighbouring blocks of a kind are one range.
pub struct Diff<'a, D: SegmentStore = PoolBacking> {
    changes: Peekable<Changes<'a>>,
    block_bytes: u64,
    /// The capacity of the snapshot that is compared with, in bytes.
    pub from_size_bytes: u64,
    /// The capacity of the volume or snapshot that is compared, in bytes. Ranges end here.
    pub to_size_bytes: u64,
    /// Removes the snapshot of a volume afterwards. Dropped after the fields that use it.
    _passing: Option<Passing<D>>,
}

/// Compares a volume as it is at this moment, or a snapshot, with the snapshot `from`, which cannot
/// be destroyed meanwhile. A volume gets a hidden snapshot until the comparison is dropped.
///
/// # Errors
/// If there is no such snapshot or volume, the two share no blocks, or a volume has a reservation
/// and there is no space for a snapshot of it.
pub fn diff<D: SegmentStore>(
    running: &Arc<Running<D>>,
    from: &str,
    to: &str,
) -> Result<Diff<'static, D>, VolumeError> {
    // A wrong name is refused before the snapshot is made.
    find_both(&running.pool().volumes(), from, to)?;
    let passing = if to.contains('@') { None } else { Some(Passing::of(running, to)?) };
    let to = passing.as_ref().map_or(to, |passing| &passing.name);
    let pool = Arc::clone(running.pool());
    let (old, new) = find_both(&pool.volumes(), from, to)?;
    let sizes = Sizes::of(&old, &new);
    // Freeze both maps at one moment: cleaning moves blocks of both.
    let freezes = Arc::clone(&pool);
    let freeze = move || {
        let _volumes = freezes.volumes();
        (Some(old.map.freeze()), new.map.freeze())
    };
    let (old, new) = freeze();
    let read = move |leaf: &Leaf| pool.segments().page(leaf);
    let changes = Changes::between(old, new, sizes.blocks, read).freezing_again(freeze);
    Ok(Diff::new(changes, sizes, passing))
}

/// Compares as [`diff`] does, in a pool that is opened for reading only.
///
/// # Errors
/// If there is no such snapshot or volume, or the two share no blocks.
pub fn diff_read_only<'a>(
    pool: &'a ReadOnlyPool<PoolBacking>,
    from: &str,
    to: &str,
) -> Result<Diff<'a>, VolumeError> {
    let (old, new) = find_both(pool.volumes(), from, to)?;
    let sizes = Sizes::of(&old, &new);
    let read = |leaf: &Leaf| pool.segments().page(leaf);
    let changes = Changes::between(Some(old.map.freeze()), new.map.freeze(), sizes.blocks, read);
    Ok(Diff::new(changes, sizes, None))
}

/// The sizes of what is compared.
struct Sizes {
    block_bytes: u32,
    /// Of the newer one.
    blocks: u64,
    from_size_bytes: u64,
    to_size_bytes: u64,
}

impl Sizes {
    fn of(old: &OpenVolume, new: &OpenVolume) -> Sizes {
        let (from_size_bytes, to_size_bytes) = (old.meta.size_bytes(), new.meta.size_bytes());
        let (block_bytes, blocks) = (new.meta.block_bytes, new.meta.blocks);
        Sizes { block_bytes, blocks, from_size_bytes, to_size_bytes }
    }
}

/// Finds what is compared. Maps of one family share blocks and have blocks of one length.
fn find_both(
    volumes: &Volumes,
    from: &str,
    to: &str,
) -> Result<(Arc<OpenVolume>, Arc<OpenVolume>), VolumeError> {
    let find = |name: &str| {
        let found = volumes.find(name).map(Arc::clone);
        found.ok_or_else(|| VolumeError::NoSuchVolume { name: name.to_owned() })
    };
    if !from.contains('@') {
        return invalid("from", from, "VOLUME@SNAPSHOT");
    }
    let (old, new) = (find(from)?, find(to)?);
    if old.family != new.family {
        let wanted = format!("a snapshot of `{to}`, of its origin or of a clone of it");
        return invalid("from", from, &wanted);
    }
    Ok((old, new))
}

impl<'a, D: SegmentStore> Diff<'a, D> {
    fn new(changes: Changes<'a>, sizes: Sizes, passing: Option<Passing<D>>) -> Diff<'a, D> {
        let Sizes { block_bytes, from_size_bytes, to_size_bytes, .. } = sizes;
        let (changes, block_bytes) = (changes.peekable(), block_bytes.into());
        Diff { changes, block_bytes, from_size_bytes, to_size_bytes, _passing: passing }
    }
}

impl<D: SegmentStore> Iterator for Diff<'_, D> {
    type Item = Result<DiffRange, VolumeError>;

    fn next(&mut self) -> Option<Self::Item> {
        let Run { first, mut count, is_hole } = match self.changes.next()? {
            Ok(run) => run,
            Err(error) => return Some(Err(error)),
        };
        let follows = |next: &Result<Run, _>, end| {
            next.as_ref().is_ok_and(|next| next.first == end && next.is_hole == is_hole)
        };
        while let Some(Ok(next)) = self.changes.next_if(|next| follows(next, first + count)) {
            count += next.count;
        }
        Some(Ok(DiffRange {
            offset_bytes: first * self.block_bytes,
            len_bytes: count * self.block_bytes,
            is_discarded: is_hole,
        }))
    }
}

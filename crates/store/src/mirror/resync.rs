//! Makes a file of one copy again from another one, and lets a stale copy get every write, before a
//! resync in the background (`online.rs`) makes it equal.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::Arc;

use blockyard_core::Bytes;
use blockyard_volume_format::{label, superblock};

use super::assemble::{failed, newest};
use super::members::{Member, Members, SLOTS};
use super::{CopyState, Mirror, VerifyPool};
use crate::buffer::{ALIGN, Memory};
use crate::error::StoreError;
use crate::{Layout, SegmentStore, StoreFile};

/// Bytes of the superblock's file.
pub(super) const SUPERBLOCK_BYTES: u64 = superblock::SLOTS * superblock::SLOT_BYTES as u64;

/// Bytes that are compared and written at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Whether a file is a segment of the pool.
fn is_segment(name: &str) -> bool {
    name.starts_with("segment-") && !name.ends_with(".new")
}

/// Returns an error if the superblock of a directory cannot be read any more: its disk is gone, or
/// returns other data than it has stored. A disk that has bad sectors elsewhere can still read the
/// superblock.
pub(super) fn check_alive<D: SegmentStore>(directory: &D) -> io::Result<()> {
    newest(directory, &directory.title()).map(drop).map_err(|error| match error {
        StoreError::Io { source, .. } => source,
        error => io::Error::new(io::ErrorKind::InvalidData, error.to_string()),
    })
}

/// Makes the superblock's file of a new copy, if it has none, so that it gets every write from now
/// on.
pub(super) fn make_superblock<D: SegmentStore>(directory: &D) -> io::Result<()> {
    match directory.open(superblock::FILE)? {
        Some(_) => Ok(()),
        None => crate::make(directory, superblock::FILE, SUPERBLOCK_BYTES).map(drop),
    }
}

/// Copies the file `from` to the new file `to`, of the same length, which holds zeros. Before a
/// chunk is written, and if a whole chunk cannot be read, `check` examines the disk of `from`: a
/// disk that fails must not replace data by what it returns.
fn copy_contents<F: StoreFile, T: StoreFile>(
    from: &F,
    to: &T,
    check: &dyn Fn() -> io::Result<()>,
) -> io::Result<()> {
    let len = from.len()?;
    let chunk = CHUNK_BYTES.min(len as usize);
    let mut bytes = Memory::new(CHUNK_BYTES as u64).take_beyond(chunk);
    let (mut at, mut lost) = (0, 0);
    while at < len {
        let part = &mut bytes[..chunk.min((len - at) as usize)];
        let unread = read_units(from, at, part);
        let is_written = |(index, unit): &(usize, &[u8])| {
            !unread.contains(index) && unit.iter().any(|byte| *byte != 0)
        };
        let units = || part.chunks(ALIGN).enumerate().filter(is_written);
        if unread.len() == part.len().div_ceil(ALIGN) || units().next().is_some() {
            check()?;
        }
        for (index, unit) in units() {
            to.write_at(at + (index * ALIGN) as u64, &[unit])?;
        }
        lost += unread.len();
        at += part.len() as u64;
    }
    if lost > 0 {
        tracing::error!(
            "{lost} units of {ALIGN} bytes of the good copy could not be read; the new file has \
             zeros there, and a reader recognises damage by the checksums"
        );
    }
    Ok(())
}

/// Reads a chunk of a file, unit by unit if it cannot be read as a whole. Returns the units that
/// could not be read.
fn read_units<F: StoreFile>(file: &F, at: u64, into: &mut [u8]) -> Vec<usize> {
    if file.read_at(at, into).is_ok() {
        return Vec::new();
    }
    // Direct I/O needs page-aligned memory; every unit is page-aligned.
    let units = into.chunks_mut(ALIGN).enumerate();
    let unread = units.filter_map(|(index, unit)| {
        let offset = at + (index * ALIGN) as u64;
        file.read_at(offset, unit).err().map(|_| index)
    });
    unread.collect()
}

/// Makes a copy of a file atomically, under the same name.
fn copy_file<D: SegmentStore>(
    from: &D::File,
    to: &D,
    name: &str,
    check: &dyn Fn() -> io::Result<()>,
) -> io::Result<D::File> {
    let new = format!("{name}.new");
    let file = to.create(&new, from.len()?)?;
    copy_contents(from, &file, check)?;
    file.sync()?;
    to.rename(&new, name)?;
    to.sync_names()?;
    drop(file);
    to.open(name)?.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// How the segments of a copy differ from those of a good one.
#[derive(Debug)]
pub(super) struct SegmentDifference {
    /// Segments that the good copy does not have, or that have another length there.
    surplus: Vec<String>,
    /// The number of the first segment that the copy lacks when the surplus is removed; `u64::MAX`
    /// if it lacks none.
    pub(super) first_missing: u64,
    /// Bytes of all segments that it lacks then, and bytes of the surplus.
    missing_bytes: u64,
    surplus_bytes: u64,
    /// Whether the file of the superblock is too short.
    is_superblock_short: bool,
}

impl SegmentDifference {
    /// Compares the segments of a copy with those of a good one. A disk has no names: nothing
    /// differs there.
    pub(super) fn of<D: SegmentStore>(good: &D, copy: &D) -> io::Result<SegmentDifference> {
        let len_of = |directory: &D, name: &str| {
            let len = || directory.open(name)?.map(|file| file.len()).transpose();
            let named =
                |error: io::Error| io::Error::new(error.kind(), format!("`{name}`: {error}"));
            len().map(Option::unwrap_or_default).map_err(named)
        };
        let segments = |directory: &D| -> io::Result<BTreeSet<String>> {
            Ok(directory.names()?.into_iter().filter(|name| is_segment(name)).collect())
        };
        let (wanted, mut present) = (segments(good)?, segments(copy)?);
        let (mut surplus, mut surplus_bytes, mut missing_bytes) = (Vec::new(), 0, 0);
        for name in present.clone() {
            let len = len_of(copy, &name)?;
            if !wanted.contains(&name) || len != len_of(good, &name)? {
                surplus_bytes += len;
                present.remove(&name);
                surplus.push(name);
            }
        }
        for name in wanted.difference(&present) {
            missing_bytes += len_of(good, name)?;
        }
        let first_missing = wanted.iter().position(|name| !present.contains(name));
        let first_missing = first_missing.map_or(u64::MAX, |number| number as u64);
        let is_superblock_short = copy.open(superblock::FILE)?.is_some()
            && len_of(copy, superblock::FILE)? < SUPERBLOCK_BYTES;
        Ok(SegmentDifference {
            surplus,
            first_missing,
            missing_bytes,
            surplus_bytes,
            is_superblock_short,
        })
    }

    /// Whether nothing is to be removed from the copy before a resync.
    pub(super) fn is_part(&self) -> bool {
        self.surplus.is_empty() && !self.is_superblock_short
    }

    /// Returns an error if the file system of the copy has no space for the segments that it lacks.
    /// If the resync began all the same, the pool would have no space for new segments.
    pub(super) fn check_space<D: SegmentStore>(&self, copy: &D) -> io::Result<()> {
        let free_bytes = copy.growth_bytes().saturating_add(self.surplus_bytes);
        if self.missing_bytes <= free_bytes {
            return Ok(());
        }
        let why = format!(
            "the segments that this copy lacks need {}, and its file system has {} free",
            Bytes(self.missing_bytes),
            Bytes(free_bytes)
        );
        Err(io::Error::new(io::ErrorKind::StorageFull, why))
    }
}

/// Returns an error if a copy that joins has no space, as [`SegmentDifference::check_space`] does.
/// If the segments cannot be compared, the resync finds out why.
pub(super) fn check_joining_space<D: SegmentStore>(
    members: &Members<D>,
    new: &Member<D>,
) -> io::Result<()> {
    let good = members.good().next();
    match good.map(|it| SegmentDifference::of(it.directory(), new.directory())) {
        Some(Ok(difference)) => difference.check_space(new.directory()),
        _ => Ok(()),
    }
}

/// Prepares a copy for a resync: removes segments that the good copy does not have, or that have
/// another length there, and makes the superblock's file, so that it gets every write from now on.
fn prepare_copy<D: SegmentStore>(good: &D, copy: &D) -> io::Result<()> {
    let difference = SegmentDifference::of(good, copy)?;
    difference.check_space(copy)?;
    difference.surplus.iter().try_for_each(|name| copy.remove(name))?;
    if difference.is_superblock_short {
        copy.remove(superblock::FILE)?;
    }
    copy.sync_names()?;
    make_superblock(copy)
}

impl<D: SegmentStore> Mirror<D> {
    /// Copies a file that is missing or shorter in one copy. The power was cut while it was made,
    /// or a user has removed it.
    pub(super) fn complete(
        &self,
        name: &str,
        members: &Members<D>,
        files: &mut Vec<(usize, D::File)>,
    ) -> io::Result<()> {
        debug_assert_ne!(name, label::FILE, "each copy has its own");
        let shared = &self.0;
        if !shared.writes || members.good().count() < 2 {
            return Ok(());
        }
        let mut lens = Vec::new();
        for member in members.good() {
            let file = files.iter().find(|(slot, _)| *slot == member.slot);
            match file.map(|(_, file)| file.len()).transpose() {
                Ok(len) => lens.push((len, member)),
                Err(error) => return shared.mark_failed(member.slot, &error),
            }
        }
        let Some(&(longest, owner)) = lens.iter().max_by_key(|(len, _)| *len) else {
            return Ok(());
        };
        for (_, member) in lens.iter().filter(|(len, _)| *len < longest) {
            let source = files.iter().find(|(slot, _)| *slot == owner.slot);
            let Some((_, source)) = source else { return Ok(()) };
            let title = &member.side.title;
            let check = || check_alive(owner.directory());
            match copy_file(source, member.directory(), name, &check) {
                Ok(file) => {
                    tracing::warn!(
                        "{title}/{name}: the file was missing or too short; copied it from the \
                         other copy"
                    );
                    shared.repaired(member.slot);
                    files.retain(|(slot, _)| *slot != member.slot);
                    files.push((member.slot, file));
                }
                Err(error) => shared.mark_failed(member.slot, &error)?,
            }
        }
        Ok(())
    }
}

impl<D: SegmentStore> Mirror<D> {
    /// Makes a stale copy get every write from now on; a [`Resync`](super::Resync) is to be done
    /// then. A copy that cannot be written becomes failed. Nothing is done while another copy
    /// joins, which may replace the stale one: a later opening resyncs it.
    ///
    /// # Errors
    /// If `verifier` cannot open the pool in the good copy. The stale copy, which may be all that
    /// is left, is unchanged then.
    pub fn resume_stale<V: VerifyPool>(&self, verifier: &V) -> Result<(), V::Error> {
        let members = self.0.members();
        let stale = members.list().iter().find(|it| it.state == CopyState::Stale);
        let Some(stale) = stale.filter(|_| self.0.writes && members.resyncing().next().is_none())
        else {
            return Ok(());
        };
        let number = stale.slot;
        let [from, to] = self.ends(number);
        let (source, target) = (from.directory(), to.directory());
        let (title, source_title) = (&to.side.title, &from.side.title);
        // Without a valid superblock, the source has lost its data.
        let newest = newest(source, source_title)?;
        let layout = Layout { align: newest.align, segment_bytes: newest.segment_bytes };
        source.set_layout(layout, false)?;
        tracing::warn!("{title}: this copy is stale; resyncing it from `{source_title}`");
        // From here on `verifier` may read there what is damaged in the good copy.
        {
            let mut state = self.0.state();
            // Invariant 7: nothing in this copy is equal yet, whatever another one has reached.
            state.cursor = 0;
            self.0.set_copy(&mut state, number, CopyState::Resyncing, None);
        }
        if let Err(error) = target.set_layout(layout, false) {
            return Ok(self.fail_resync(number, &error)?);
        }
        let segments_max = source.segments_max().min(target.segments_max());
        match verifier.check_opens(Mirror(Arc::clone(&self.0)), segments_max) {
            // There may be data beyond the end of the shorter copy.
            Err(error) if segments_max < source.segments_max() => {
                return Ok(self.fail_resync(number, &error)?);
            }
            Err(error) => {
                tracing::error!("{source_title}: {error}; the copy at `{title}` is left as it is");
                return Err(error);
            }
            Ok(()) => {}
        }
        let gone = StoreError::io(format!("cannot read `{source_title}` any more"));
        check_alive(source).map_err(gone)?;
        // From here on the target cannot be used without the source.
        self.advance(1 - number)?;
        let recorded = self.0.record(&self.0.state(), &self.0.members(), &to, Some(0));
        let begun = recorded.and_then(|()| prepare_copy(source, target));
        Ok(begun.or_else(|error| self.fail_resync(number, &error))?)
    }

    /// The source and the target of a resync of the copy `number`. While a mirror is assembled, the
    /// slots are the numbers.
    fn ends(&self, number: usize) -> [Member<D>; 2] {
        let members = self.0.members();
        [1 - number, number].map(|at| members.find(at).expect("a pair has both numbers").clone())
    }

    /// Continues with the source alone, and records that in its label: whatever the label of the
    /// copy `number` says by now, that one is not good.
    pub(super) fn fail_resync(
        &self,
        number: usize,
        why: &dyn fmt::Display,
    ) -> Result<(), StoreError> {
        let [from, to] = self.ends(number);
        let (title, source_title) = (&to.side.title, &from.side.title);
        tracing::error!(
            "{title}: the resync has failed: {why}; the pool continues with `{source_title}` alone"
        );
        self.advance(1 - number)?;
        let why = Some(why.to_string());
        self.0.set_copy(&mut self.0.state(), number, CopyState::Failed, why);
        Ok(())
    }

    /// Increases the generation, and records durably in the label of the copy `number` that only
    /// this one is good.
    pub(super) fn advance(&self, number: usize) -> Result<(), StoreError> {
        let mut state = self.0.state();
        state.generation = state.generation.saturating_add(1);
        let members = self.0.members();
        let others = members.good().map(|it| it.slot).filter(|slot| *slot != number);
        let fail = |all: Members<D>, slot| all.with_state(slot, CopyState::Failed);
        let new = others.fold(members.without(SLOTS), fail);
        let Some(member) = new.find(number) else { return Ok(()) };
        self.0.record(&state, &new, member, None).map_err(failed(&member.side.path))
    }
}

//! Resync: makes one copy equal to the other. Copies a missing file, or everything to a stale copy.
//! Data that are equal already are not written.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::Arc;

use blockyard_volume_format::{label, segment_name, superblock};

use super::assemble::{failed, has_pool, newest};
use super::members::{Member, Members, SLOTS};
use super::{CopyState, Mirror, Verified, VerifyPool, only};
use crate::buffer::{ALIGN, Memory};
use crate::error::StoreError;
use crate::{Layout, SegmentStore, StoreFile};

/// Bytes of the superblock's file.
pub(super) const SUPERBLOCK_BYTES: u64 = superblock::SLOTS * superblock::SLOT_BYTES as u64;

/// Bytes that are compared and written at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Bytes between two log lines.
const LOG_BYTES: u64 = 10 << 30;

/// ResyncProgress callback: bytes compared, and bytes in total.
pub(super) type ResyncProgress<'t> = dyn FnMut(u64, u64) + 't;

/// Whether a file belongs to the pool, and not to one copy alone.
fn is_shared(name: &str) -> bool {
    name == superblock::FILE || name.starts_with("segment-") && !name.ends_with(".new")
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

/// Makes the file `to` equal to `from`, of the same length. Returns the number of bytes written.
/// Before a chunk is written, and if a whole chunk cannot be read, `check` examines the disk
/// of `from`: a disk that fails must not replace the data of the other copy by what it returns.
fn copy_contents<F: StoreFile, T: StoreFile>(
    from: &F,
    to: &T,
    check: &dyn Fn() -> io::Result<()>,
) -> io::Result<u64> {
    let len = from.len()?;
    let memory = Memory::new(CHUNK_BYTES as u64);
    let chunk = CHUNK_BYTES.min(len as usize);
    let (mut want, mut have) = (memory.take_beyond(chunk), memory.take_beyond(chunk));
    let (mut at, mut written, mut lost) = (0, 0, 0);
    while at < len {
        let part = chunk.min((len - at) as usize);
        let (want, have) = (&mut want[..part], &mut have[..part]);
        let unread = read_units(from, at, want);
        if unread.len() == want.len().div_ceil(ALIGN) {
            check()?;
        }
        // A chunk that cannot be read is written completely.
        let all = to.read_at(at, have).is_err();
        if all || want != have {
            check()?;
            // Write only the units that differ.
            for (index, unit) in want.chunks(ALIGN).enumerate() {
                let offset = index * ALIGN;
                let differs = all || have[offset..offset + unit.len()] != *unit;
                if differs && !unread.contains(&index) {
                    to.write_at(at + offset as u64, &[unit])?;
                    written += unit.len() as u64;
                }
            }
        }
        lost += unread.len();
        at += part as u64;
    }
    if written > 0 {
        to.sync()?;
    }
    if lost > 0 {
        tracing::error!(
            "{lost} units of {ALIGN} bytes of the good copy could not be read; the other copy \
             keeps what it has there, and a reader recognises damage by the checksums"
        );
    }
    Ok(written)
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

/// Makes all files of a directory equal to those of another one, except segments with number
/// `segments` or above. Returns the number of bytes written.
fn copy_all<D: SegmentStore>(
    from: &D,
    to: &D,
    segments: usize,
    progress: &mut ResyncProgress<'_>,
) -> io::Result<u64> {
    let end = segment_name(segments);
    let shared = |names: Vec<String>| -> BTreeSet<String> {
        let shared = names.into_iter().filter(|name| is_shared(name));
        shared.filter(|name| name == superblock::FILE || *name < end).collect()
    };
    let (wanted, present) = (shared(from.copied_names()?), shared(to.copied_names()?));
    let (mut written, mut compared, mut logged) = (0, 0, 0);
    let lengths = wanted.iter().map(|name| from.open(name)?.map_or(Ok(0), |file| file.len()));
    let total = lengths.sum::<io::Result<u64>>()?;
    let check = || check_alive(from);
    for name in &wanted {
        let Some(source) = from.open(name)? else { continue };
        let len = source.len()?;
        match to.open(name)? {
            Some(target) if target.len()? == len => {
                written += copy_contents(&source, &target, &check)?
            }
            _ => {
                copy_file(&source, to, name, &check)?;
                written += len;
            }
        }
        compared += len;
        progress(compared, total);
        if compared - logged >= LOG_BYTES {
            logged = compared;
            let (title, done, whole) = (to.title(), compared >> 30, total >> 30);
            tracing::info!("{title}: resync: {done} of {whole} GiB are equal");
        }
    }
    for name in present.difference(&wanted) {
        to.remove(name)?;
    }
    to.sync_names()?;
    Ok(written)
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
    /// Resyncs the copy `number` from the other one. If it cannot be written, it becomes failed,
    /// and the pool continues with the other one alone.
    pub(super) fn resync<V: VerifyPool>(
        &self,
        number: usize,
        verifier: &V,
        progress: &mut ResyncProgress<'_>,
    ) -> Result<(), V::Error> {
        let [from, to] = self.ends(number);
        let (source, target) = (from.directory(), to.directory());
        let (title, source_title) = (&to.side.title, &from.side.title);
        // Without a valid superblock, the source has lost its data.
        let newest = newest(source, source_title)?;
        let layout = Layout { align: newest.align, segment_bytes: newest.segment_bytes };
        source.set_layout(layout, false)?;
        tracing::warn!("{title}: this copy is stale; resyncing it from `{source_title}`");
        self.begin_resync(number);
        let divided = target.set_layout(layout, false);
        let segments = source.segments_max().min(target.segments_max());
        let is_shorter = segments < source.segments_max();
        let mut ready = divided.map(drop).map_err(V::Error::from);
        if ready.is_ok() && (is_shorter || has_pool(target)?) {
            let repaired = self.repair_source(number, segments, verifier);
            if is_shorter {
                // There may be data beyond the end of the shorter copy.
                ready = repaired;
            } else {
                repaired?;
            }
        }
        if self.0.members().resyncing().next().is_none() {
            // A repair could not be written to it.
            return Ok(());
        }
        let written = match ready.and_then(|()| Ok(self.copy(number, segments, progress)?)) {
            Ok(written) => written,
            Err(error) => return Ok(self.fail_resync(number, &error)?),
        };
        // First the label of the source: if only that is written, the target counts as stale again.
        self.advance(1 - number, [true, true])?;
        if let Err(error) = self.end_resync(number) {
            return Ok(self.fail_resync(number, &error)?);
        }
        tracing::warn!("{title}: the resync is done; {written} bytes were written");
        Ok(())
    }

    /// The source and the target of a resync of the copy `number`. While a mirror is assembled, the
    /// slots are the numbers.
    fn ends(&self, number: usize) -> [Member<D>; 2] {
        let members = self.0.members();
        [1 - number, number].map(|at| members.find(at).expect("a pair has both numbers").clone())
    }

    fn begin_resync(&self, number: usize) {
        self.0.set_copy(&mut self.0.state(), number, CopyState::Resyncing, None);
    }

    /// Records in the label of the copy `number` that both are good, as the label of the other one
    /// does already (invariant 3).
    fn end_resync(&self, number: usize) -> io::Result<()> {
        let mut state = self.0.state();
        let new = self.0.members().with_state(number, CopyState::Good);
        let member = new.find(number).ok_or(io::ErrorKind::NotFound)?;
        self.0.record(&state, &new, member, None)?;
        self.0.set_copy(&mut state, number, CopyState::Good, None);
        Ok(())
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
        self.advance(1 - number, only(1 - number))?;
        let why = Some(why.to_string());
        self.0.set_copy(&mut self.0.state(), number, CopyState::Failed, why);
        Ok(())
    }

    /// Copies the files of the source, except segments with number `segments` or above. Returns the
    /// number of bytes written.
    fn copy(
        &self,
        number: usize,
        segments: usize,
        progress: &mut ResyncProgress<'_>,
    ) -> Result<u64, StoreError> {
        debug_assert!(
            self.0.members().resyncing().any(|it| it.slot == number),
            "invariant 4: the target of a resync"
        );
        let [from, to] = self.ends(number);
        // From here on the target cannot be used without the source.
        let recorded = self.0.record(&self.0.state(), &self.0.members(), &to, None);
        recorded.map_err(failed(&to.side.path))?;
        let doing = format!("cannot resync `{}` from `{}`", to.side.title, from.side.title);
        copy_all(from.directory(), to.directory(), segments, progress)
            .map_err(StoreError::io(doing))
    }

    /// Before the copy `number` is overwritten: reads everything from the good copy, and repairs
    /// damaged blocks there from the one that is resyncing. Blocks that have rotted since both were
    /// equal may still be intact there. Each block or page is verified by its checksum. The pool
    /// must be within the first `segments` segments.
    ///
    /// # Errors
    /// If the pool on the good copy cannot be opened. The other copy is unchanged then.
    fn repair_source<V: VerifyPool>(
        &self,
        number: usize,
        segments: usize,
        verifier: &V,
    ) -> Result<(), V::Error> {
        let shared = &self.0;
        let [from, to] = self.ends(number);
        let (title, source_title) = (&to.side.title, &from.side.title);
        let mut alive = Ok(());
        let verified = verifier.verify(Mirror(Arc::clone(shared)), segments, &mut || {
            alive = check_alive(from.directory());
            alive.is_ok()
        });
        alive.map_err(StoreError::io(format!("cannot read `{source_title}` any more")))?;
        let Verified { repaired, damaged } = verified.inspect_err(|error| {
            tracing::error!("{source_title}: {error}; the copy at `{title}` is left as it is");
        })?;
        shared.state().repaired[1 - number] += repaired;
        if damaged > 0 {
            tracing::error!(
                "{source_title}: {damaged} blocks or pages are damaged, and in `{title}` too"
            );
        }
        Ok(())
    }

    /// Increases the generation, and records durably in the label of the copy `number` which copies
    /// are good.
    pub(super) fn advance(&self, number: usize, good: [bool; 2]) -> Result<(), StoreError> {
        let mut state = self.0.state();
        state.generation = state.generation.saturating_add(1);
        let mut new = self.0.members().without(SLOTS);
        for (number, is_good) in good.into_iter().enumerate() {
            let is_now = new.find(number).is_some_and(|it| it.state.is_good());
            if is_now != is_good {
                let next = if is_good { CopyState::Good } else { CopyState::Failed };
                new = new.with_state(number, next);
            }
        }
        let Some(member) = new.find(number) else { return Ok(()) };
        self.0.record(&state, &new, member, None).map_err(failed(&member.side.path))
    }
}

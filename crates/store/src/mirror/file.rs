//! A file of a mirror.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blockyard_volume_format::superblock;

use super::members::{CopyResults, FIRST_SLOTS, Member, SLOTS};
use super::{CopyState, Shared};
use crate::buffer::{ALIGN, Buffer};
use crate::file::is_short;
use crate::{GoodCopies, Pin, SegmentStore, StoreFile};

/// A file with one instance in each copy.
pub struct MirrorFile<D: SegmentStore> {
    shared: Arc<Shared<D>>,
    name: String,
    sides: Sides<D::File>,
    /// Ranges that are being written. Locked during a repair and while a resync copies a range, so
    /// that neither sees a write that has reached only one copy.
    writing: Writes,
}

/// The instances of a file, by slot. An instance is set once, so that a read finds it without a
/// lock.
struct Sides<F> {
    first: [OnceLock<Arc<F>>; FIRST_SLOTS],
    more: OnceLock<Box<[OnceLock<Arc<F>>; SLOTS - FIRST_SLOTS]>>,
}

impl<F> Default for Sides<F> {
    fn default() -> Sides<F> {
        Sides { first: Default::default(), more: OnceLock::new() }
    }
}

impl<F> Sides<F> {
    #[inline]
    fn get(&self, slot: usize) -> Option<&Arc<F>> {
        match slot.checked_sub(FIRST_SLOTS) {
            None => self.first[slot].get(),
            Some(at) => self.more.get()?[at].get(),
        }
    }

    fn set(&self, slot: usize, file: Arc<F>) {
        let place = match slot.checked_sub(FIRST_SLOTS) {
            None => &self.first[slot],
            Some(at) => &self.more.get_or_init(Default::default)[at],
        };
        _ = place.set(file);
    }
}

/// The ranges of a file that are being written.
#[derive(Clone, Debug, Default)]
pub(super) struct Writes(Arc<(Mutex<Vec<Range<u64>>>, AtomicUsize)>);

impl Writes {
    fn lock(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        let (ranges, waiting) = &*self.0;
        if let Ok(ranges) = ranges.try_lock() {
            return ranges;
        }
        // Relaxed, here and below: the number publishes nothing but itself.
        waiting.fetch_add(1, Ordering::Relaxed);
        let ranges = ranges.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.fetch_sub(1, Ordering::Relaxed);
        ranges
    }

    /// Locks, unless another thread waits: a thread that locks again and again would keep that one
    /// out.
    fn lock_after_others(&self) -> Option<MutexGuard<'_, Vec<Range<u64>>>> {
        let is_awaited = self.0.1.load(Ordering::Relaxed) > 0;
        (!is_awaited).then(|| self.lock())
    }
}

/// Whether a range is being written.
fn is_written(writing: &[Range<u64>], range: &Range<u64>) -> bool {
    writing.iter().any(|other| other.start < range.end && range.start < other.end)
}

/// A write in progress; its range is removed when this is dropped.
struct Writing<'a, D: SegmentStore>(&'a MirrorFile<D>, Range<u64>);

impl<D: SegmentStore> Drop for Writing<'_, D> {
    fn drop(&mut self) {
        self.0.end(&self.1);
    }
}

impl<D: SegmentStore> MirrorFile<D> {
    pub(super) fn new(
        shared: &Arc<Shared<D>>,
        name: &str,
        files: Vec<(usize, D::File)>,
    ) -> MirrorFile<D> {
        let writing = match name == superblock::FILE {
            true => shared.superblock_writing.clone(),
            false => Writes::default(),
        };
        let sides = Sides::default();
        files.into_iter().for_each(|(slot, file)| sides.set(slot, Arc::new(file)));
        MirrorFile { shared: Arc::clone(shared), name: name.to_owned(), sides, writing }
    }

    /// The file without the instances in copies that do not belong to the pool any more, so that
    /// these are closed.
    pub fn renewed(&self) -> MirrorFile<D> {
        let sides = Sides::default();
        for member in self.shared.members().list() {
            if let Some(file) = self.side(member.slot) {
                sides.set(member.slot, Arc::clone(file));
            }
        }
        let (shared, writing) = (Arc::clone(&self.shared), self.writing.clone());
        MirrorFile { shared, name: self.name.clone(), sides, writing }
    }

    /// The name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The file in one copy.
    #[inline]
    pub(super) fn side(&self, slot: usize) -> Option<&Arc<D::File>> {
        self.sides.get(slot)
    }

    /// Adds the file in one copy. Writes that begin from now on go there too.
    pub(super) fn add_side(&self, slot: usize, file: D::File) {
        // The lock: a write that is not in the list yet sees the file.
        let _writing = self.writing.lock();
        self.sides.set(slot, Arc::new(file));
    }

    /// The file in a copy that is written, if that one has it. This instance may have been opened
    /// before the copy joined, or before that one got the file.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub(super) fn written_side(&self, member: &Member<D>) -> io::Result<Option<&Arc<D::File>>> {
        if self.side(member.slot).is_none()
            && let Some(file) = member.directory().open(&self.name)?
        {
            self.sides.set(member.slot, Arc::new(file));
        }
        Ok(self.side(member.slot))
    }

    /// Registers a write; see [`MirrorFile::end`].
    pub(super) fn begin(&self, range: Range<u64>) {
        self.writing.lock().push(range);
    }

    /// Ends a write, which has ended in all copies.
    pub(super) fn end(&self, range: &Range<u64>) {
        let mut writing = self.writing.lock();
        if let Some(at) = writing.iter().position(|other| other == range) {
            writing.swap_remove(at);
        }
    }

    /// Applies an operation to each copy that is written. If the process has no descriptors
    /// left, the operation fails before it touches a copy, so no copy is marked as failed.
    fn each(&self, what: impl Fn(&D::File) -> io::Result<()>) -> io::Result<()> {
        let _pin = self.pin()?;
        let members = self.shared.members();
        let mut results = CopyResults::default();
        for member in members.written() {
            match self.written_side(member) {
                Ok(Some(file)) => results.add(member, what(file)),
                Ok(None) => {}
                Err(error) => results.add(member, Err(error)),
            }
        }
        self.shared.combine(results)
    }

    /// Makes a range of the copy in `slot` equal to a good copy. Returns the bytes that were
    /// written and the units that no good copy could read; `None` if the range is being written, or
    /// a write waits. `check` examines a good copy before its data are used.
    ///
    /// # Errors
    /// If the copy cannot be written, or `check` refuses each good copy.
    pub(super) fn resync(
        &self,
        slot: usize,
        range: Range<u64>,
        (want, have): (&mut Buffer, &mut Buffer),
        check: &dyn Fn(&Member<D>) -> io::Result<()>,
    ) -> io::Result<Option<(u64, u64)>> {
        let Some(target) = self.side(slot) else { return Err(io::ErrorKind::NotFound.into()) };
        // No write begins while this is locked. A write that waits comes first.
        let Some(writing) = self.writing.lock_after_others() else { return Ok(None) };
        if is_written(&writing, &range) {
            return Ok(None);
        }
        let len = (range.end - range.start) as usize;
        let (want, have) = (&mut want[..len], &mut have[..len]);
        let members = self.shared.members();
        let good = || members.good().filter_map(|it| Some((it, self.side(it.slot)?)));
        let all = target.read_at(range.start, have).is_err();
        let mut unread: Vec<usize> = (0..len.div_ceil(ALIGN)).collect();
        let mut refused = None;
        for (member, file) in good() {
            if file.read_at(range.start, want).is_err() {
                continue;
            }
            if !all && want == have {
                return Ok(Some((0, 0)));
            }
            match check(member) {
                Ok(()) => {
                    unread.clear();
                    break;
                }
                Err(error) => _ = refused.get_or_insert(error),
            }
        }
        if !unread.is_empty() {
            let mut is_alive = |member: &Member<D>| match check(member) {
                Ok(()) => true,
                Err(error) => {
                    refused.get_or_insert(error);
                    false
                }
            };
            let alive: Vec<_> = good().filter(|(member, _)| is_alive(member)).collect();
            if alive.is_empty() {
                return Err(refused.unwrap_or_else(|| io::Error::other("no copy is left")));
            }
            for (_, file) in alive {
                unread.retain(|index| {
                    let unit = index * ALIGN..len.min((index + 1) * ALIGN);
                    file.read_at(range.start + unit.start as u64, &mut want[unit]).is_err()
                });
            }
        }
        let units = want.chunks(ALIGN).zip(have.chunks(ALIGN)).enumerate();
        let differs = |(index, (want, have)): (usize, (&[u8], &[u8]))| {
            (all || want != have) && !unread.contains(&index)
        };
        let differing: Vec<bool> = units.map(differs).collect();
        let (mut at, mut written) = (0, 0);
        for run in differing.chunk_by(|one, next| one == next) {
            let bytes = at * ALIGN..len.min((at + run.len()) * ALIGN);
            at += run.len();
            if run[0] {
                written += bytes.len() as u64;
                target.write_at(range.start + bytes.start as u64, &[&want[bytes]])?;
            }
        }
        Ok(Some((written, unread.len() as u64)))
    }
}

impl<D: SegmentStore> StoreFile for MirrorFile<D> {
    fn len(&self) -> io::Result<u64> {
        let mut len = Err(io::ErrorKind::NotFound.into());
        for slot in self.copies().numbers() {
            len = self.side(slot).map_or(len, |file| file.len());
            if len.is_ok() {
                break;
            }
        }
        len
    }

    /// Reads data that cannot be verified: from the first copy that can be read.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mut first = None;
        for slot in self.copies().numbers() {
            match self.read_copy(slot, offset, into) {
                Ok(()) => return Ok(()),
                Err(error) => _ = first.get_or_insert(error),
            }
        }
        Err(first.unwrap_or_else(|| io::Error::other("no copy is left")))
    }

    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let range = offset..offset + len as u64;
        self.begin(range.clone());
        let _writing = Writing(self, range);
        self.each(|file| file.write_at(offset, parts))
    }

    fn sync(&self) -> io::Result<()> {
        self.each(StoreFile::sync)
    }

    fn is_sparse(&self) -> bool {
        self.copies().numbers().any(|slot| self.side(slot).is_some_and(|file| file.is_sparse()))
    }

    /// A file that cannot be opened for another reason than missing descriptors reports that when
    /// it is written.
    fn pin(&self) -> io::Result<Pin> {
        let mut all = Pin::default();
        let members = self.shared.members();
        for member in members.written() {
            match self.written_side(member).and_then(|file| file.map(|it| it.pin()).transpose()) {
                Ok(pin) => pin.into_iter().for_each(|pin| all.join(pin)),
                Err(error) if is_short(&error) => return Err(error),
                Err(_) => {}
            }
        }
        Ok(all)
    }

    #[inline]
    fn copies(&self) -> GoodCopies {
        match self.shared.good() {
            GoodCopies::ONE => GoodCopies::ONE,
            good => good.filter(|slot| self.side(slot).is_some()),
        }
    }

    fn read_copy(&self, copy: usize, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.side(copy).ok_or(io::ErrorKind::NotFound)?.read_at(offset, into)
    }

    fn read_resyncing(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let members = self.shared.members();
        let file = members.resyncing().find_map(|member| self.side(member.slot));
        file.ok_or(io::ErrorKind::NotFound)?.read_at(offset, into)
    }

    fn repair_from_resyncing(&self, offset: u64, whole: &[u8]) -> io::Result<bool> {
        let shared = &self.shared;
        if !shared.writes {
            return Ok(false);
        }
        let _pin = self.pin()?;
        // No write begins while this is locked: the bytes may have been freed and written since
        // they were read.
        let writing = self.writing.lock();
        let mut found = shared.memory.take_beyond(whole.len());
        let is_same = self.read_resyncing(offset, &mut found).is_ok() && found[..] == *whole;
        if !is_same || is_written(&writing, &pages(offset, whole.len())) {
            return Ok(false);
        }
        let members = shared.members();
        let source = members.resyncing().find_map(|member| self.side(member.slot));
        let mut results = CopyResults::default();
        for member in members.good() {
            let file = self.side(member.slot).ok_or(io::ErrorKind::NotFound)?;
            let source = source.ok_or(io::ErrorKind::NotFound)?;
            let written = self.rewrite(file, source, offset, whole);
            if written.is_ok() {
                shared.repaired(member.slot);
            }
            results.add(member, written);
        }
        shared.combine(results).map(|()| true)
    }

    fn repair(&self, offset: u64, whole: &[u8]) -> io::Result<Option<usize>> {
        if !self.shared.writes {
            return Ok(Some(0));
        }
        let _pin = self.pin()?;
        let (shared, name) = (&self.shared, &self.name);
        // No write begins while this is locked.
        let writing = self.writing.lock();
        if is_written(&writing, &pages(offset, whole.len())) {
            return Ok(None);
        }
        let members = shared.members();
        let mut found = shared.memory.take_beyond(whole.len());
        let mut has_it = |file: &D::File| {
            let read = file.read_at(offset, &mut found);
            read.is_ok() && found[..] == *whole
        };
        let sides = members.written().filter_map(|it| Some((it, self.side(it.slot)?)));
        let sides: Vec<_> = sides.map(|(it, file)| (it, file, has_it(file))).collect();
        let is_source =
            |(member, _, has_it): &&(&Member<D>, _, bool)| *has_it && member.state.is_good();
        let Some((_, source, _)) = sides.iter().find(is_source) else { return Ok(Some(0)) };
        let mut repaired = 0;
        for (member, file, _) in sides.iter().filter(|(.., has_it)| !has_it) {
            let title = &member.side.title;
            match self.rewrite(file, source, offset, whole) {
                // The resync has not come there yet, or has copied the damage.
                Ok(()) if member.state == CopyState::Resyncing => {}
                Ok(()) => {
                    tracing::debug!(
                        "{title}/{name}: {} bytes at {offset} were damaged, and are written again \
                         from the other copy",
                        whole.len()
                    );
                    shared.repaired(member.slot);
                    repaired += 1;
                }
                Err(error) => shared.mark_failed(member.slot, &error)?,
            }
        }
        Ok(Some(repaired))
    }
}

/// The pages that contain a range, in bytes.
fn pages(offset: u64, len: usize) -> Range<u64> {
    let page = ALIGN as u64;
    offset / page * page..(offset + len as u64).next_multiple_of(page)
}

impl<D: SegmentStore> MirrorFile<D> {
    /// Writes bytes to one copy and syncs it. The write covers whole pages: a disk with longer
    /// sectors cannot write parts of them, nor replace a part of a sector that it cannot read. The
    /// bytes around are those of the copy, or of `source` where the copy cannot be read.
    fn rewrite(
        &self,
        copy: &D::File,
        source: &D::File,
        offset: u64,
        whole: &[u8],
    ) -> io::Result<()> {
        let range = pages(offset, whole.len());
        let len = (range.end - range.start) as usize;
        let mut bytes = self.shared.memory.take_beyond(len);
        if len > whole.len() {
            let read = copy.read_at(range.start, &mut bytes);
            read.or_else(|_| source.read_at(range.start, &mut bytes))?;
        }
        bytes[(offset - range.start) as usize..][..whole.len()].copy_from_slice(whole);
        copy.write_at(range.start, &[&bytes])?;
        copy.sync()
    }
}

impl<D: SegmentStore> fmt::Debug for MirrorFile<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MirrorFile").field("name", &self.name).finish_non_exhaustive()
    }
}

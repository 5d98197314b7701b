//! A file of a mirror.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Shared;
use crate::file::is_short;
use crate::{GoodCopies, Pin, SegmentStore, StoreFile};

/// A file with one instance in each copy.
pub struct MirrorFile<D: SegmentStore> {
    shared: Arc<Shared<D>>,
    name: String,
    sides: [Option<Arc<D::File>>; 2],
    /// Ranges that are being written. Locked during a repair, so that the repair does not see a
    /// write that has reached only one copy.
    writing: Mutex<Vec<Range<u64>>>,
}

/// A write in progress; its range is removed when this is dropped.
pub(super) struct Writing<'a, D: SegmentStore>(&'a MirrorFile<D>, Range<u64>);

impl<D: SegmentStore> Drop for Writing<'_, D> {
    fn drop(&mut self) {
        self.0.end(&self.1);
    }
}

impl<D: SegmentStore> MirrorFile<D> {
    pub(super) fn new(
        shared: &Arc<Shared<D>>,
        name: &str,
        sides: [Option<Arc<D::File>>; 2],
    ) -> MirrorFile<D> {
        let writing = Mutex::new(Vec::new());
        MirrorFile { shared: Arc::clone(shared), name: name.to_owned(), sides, writing }
    }

    /// The file in one copy.
    pub(super) fn side(&self, number: usize) -> Option<&Arc<D::File>> {
        self.sides[number].as_ref()
    }

    /// The files of the good copies, with their numbers.
    pub(super) fn good(&self) -> impl Iterator<Item = (usize, &Arc<D::File>)> {
        let good = self.shared.good();
        let sides = self.sides.iter().enumerate().filter(move |(number, _)| good[*number]);
        sides.filter_map(|(number, file)| Some((number, file.as_ref()?)))
    }

    fn writing(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a write; see [`MirrorFile::end`].
    pub(super) fn begin(&self, range: Range<u64>) {
        self.writing().push(range);
    }

    /// Ends a write, which has ended in all copies.
    pub(super) fn end(&self, range: &Range<u64>) {
        let mut writing = self.writing();
        if let Some(at) = writing.iter().position(|other| other == range) {
            writing.swap_remove(at);
        }
    }

    /// Applies an operation to each good copy. If the process has no descriptors
    /// left, the operation fails before it touches a copy, so no copy is marked as failed.
    fn each(&self, what: impl Fn(&D::File) -> io::Result<()>) -> io::Result<()> {
        let _pin = self.pin()?;
        let mut results = [None, None];
        for (number, file) in self.good() {
            results[number] = Some(what(file));
        }
        self.shared.combine(results)
    }
}

impl<D: SegmentStore> StoreFile for MirrorFile<D> {
    fn len(&self) -> io::Result<u64> {
        let mut len = Err(io::ErrorKind::NotFound.into());
        for (_, file) in self.good() {
            len = file.len();
            if len.is_ok() {
                break;
            }
        }
        len
    }

    /// Reads data that cannot be verified: from the first copy that can be read.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mut first = None;
        for (_, file) in self.good() {
            match file.read_at(offset, into) {
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
        self.good().any(|(_, file)| file.is_sparse())
    }

    /// A file that cannot be opened for another reason than missing descriptors reports that when
    /// it is written.
    fn pin(&self) -> io::Result<Pin> {
        let mut all = Pin::default();
        for (_, file) in self.good() {
            match file.pin() {
                Ok(pin) => all.join(pin),
                Err(error) if is_short(&error) => return Err(error),
                Err(_) => {}
            }
        }
        Ok(all)
    }

    fn copies(&self) -> GoodCopies {
        let good = self.shared.good();
        GoodCopies::new(std::array::from_fn(|at| good[at] && self.sides[at].is_some()))
    }

    fn read_copy(&self, copy: usize, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let file = self.sides.get(copy).and_then(Option::as_ref);
        file.ok_or(io::ErrorKind::NotFound)?.read_at(offset, into)
    }

    fn read_resyncing(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let file = self.shared.resyncing().and_then(|number| self.sides[number].as_ref());
        file.ok_or(io::ErrorKind::NotFound)?.read_at(offset, into)
    }

    fn repair(&self, offset: u64, whole: &[u8]) -> io::Result<usize> {
        if !self.shared.writes {
            return Ok(0);
        }
        let _pin = self.pin()?;
        let (shared, name) = (&self.shared, &self.name);
        let range = offset..offset + whole.len() as u64;
        // No write begins while this is locked.
        let writing = self.writing();
        if writing.iter().any(|other| other.start < range.end && range.start < other.end) {
            return Ok(0);
        }
        let mut found = shared.memory.take_beyond(whole.len());
        let has_it: Vec<(usize, &Arc<D::File>, bool)> = self
            .good()
            .map(|(number, file)| {
                let read = file.read_at(offset, &mut found);
                (number, file, read.is_ok() && found[..] == *whole)
            })
            .collect();
        if !has_it.iter().any(|(.., has_it)| *has_it) {
            return Ok(0);
        }
        found.copy_from_slice(whole);
        let mut repaired = 0;
        for (number, file, _) in has_it.into_iter().filter(|(.., has_it)| !has_it) {
            let title = &shared.sides[number].title;
            match file.write_at(offset, &[&found]).and_then(|()| file.sync()) {
                Ok(()) => {
                    tracing::debug!(
                        "{title}/{name}: {} bytes at {offset} were damaged, and are written again \
                         from the other copy",
                        whole.len()
                    );
                    shared.repaired(number);
                    repaired += 1;
                }
                Err(error) => shared.mark_failed(number, &error)?,
            }
        }
        Ok(repaired)
    }
}

impl<D: SegmentStore> fmt::Debug for MirrorFile<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MirrorFile").field("name", &self.name).finish_non_exhaustive()
    }
}

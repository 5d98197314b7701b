//! An open file of a pool: a file of its own, or a part of the disk that contains the pool.
#![allow(clippy::disallowed_types)] // A sync takes far longer than a lock.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::ReadWriteFlags;

use crate::descriptors::{OnDemand, Use};
use crate::{Pin, StoreFile};

/// Most parts that the kernel takes in one call (`IOV_MAX`).
const PARTS_MAX: usize = 1024;

/// The type that `statfs` reports for a FUSE file system (`FUSE_SUPER_MAGIC` of linux/magic.h).
const FUSE: rustix::fs::FsWord = 0x6573_5546;

/// How an open file is obtained.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Open as long as this exists.
    Open(Arc<File>),
    /// Opened when it is needed; the number distinguishes files of this kind.
    OnDemand(Arc<OnDemand>, u32),
}

impl Source {
    /// The open file, which stays open while the result is held.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(crate) fn get(&self, what: Use) -> io::Result<Arc<File>> {
        match self {
            Source::Open(file) => Ok(Arc::clone(file)),
            Source::OnDemand(file, _) => file.get(what),
        }
    }

    /// Whether both are one file.
    pub(crate) fn is(&self, other: &Source) -> bool {
        match (self, other) {
            (Source::Open(one), Source::Open(other)) => Arc::ptr_eq(one, other),
            (Source::OnDemand(one, _), Source::OnDemand(other, _)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// A number that is different for most files.
    pub(crate) fn number(&self) -> usize {
        match self {
            Source::Open(file) => file.as_raw_fd() as usize,
            Source::OnDemand(_, number) => *number as usize,
        }
    }
}

/// An open file of a pool.
#[derive(Debug)]
pub struct PoolFile {
    source: Source,
    /// Offset of the part in the source, in bytes.
    base: u64,
    /// The length, if this is a part.
    len: Option<u64>,
    /// The file took less space than its length when it was found.
    is_sparse: bool,
    /// Shared sync state, for parts that use the page cache.
    syncs: Option<Arc<Syncs>>,
}

/// Serialises the syncs of a shared descriptor. The system reports a failed write-back only to the
/// first sync; this reports it to all later ones too.
#[derive(Debug, Default)]
pub(crate) struct Syncs {
    has_failed: Mutex<bool>,
}

impl Syncs {
    fn sync(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut has_failed = self.has_failed.lock().unwrap_or_else(PoisonError::into_inner);
        if *has_failed {
            return Err(io::Error::other("a sync before has failed"));
        }
        let synced = sync();
        *has_failed = synced.is_err();
        synced
    }
}

impl PoolFile {
    /// A whole file.
    pub(crate) fn of(file: File) -> PoolFile {
        PoolFile::sharing(&Arc::new(file))
    }

    /// A whole file that other owners have open too.
    pub(crate) fn sharing(file: &Arc<File>) -> PoolFile {
        let source = Source::Open(Arc::clone(file));
        PoolFile { source, base: 0, len: None, is_sparse: false, syncs: None }
    }

    /// A whole file of `len` bytes that is opened when it is needed; `number` identifies it.
    pub(crate) fn on_demand(
        file: Arc<OnDemand>,
        number: u32,
        len: u64,
        is_sparse: bool,
    ) -> PoolFile {
        let source = Source::OnDemand(file, number);
        PoolFile { source, base: 0, len: Some(len), is_sparse, syncs: None }
    }

    /// How the file is obtained.
    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// A part of a file, which begins at `base`. `syncs` is the shared sync state, if the parts
    /// have one.
    pub(crate) fn part(
        file: &Arc<File>,
        base: u64,
        len: u64,
        syncs: Option<&Arc<Syncs>>,
    ) -> PoolFile {
        let source = Source::Open(Arc::clone(file));
        PoolFile { source, base, len: Some(len), is_sparse: false, syncs: syncs.cloned() }
    }

    /// Whether the file system is FUSE. There the kernel passes the durability of a write as a flag
    /// of the write, which many servers ignore; a sync is a request of its own.
    pub(crate) fn is_behind_fuse(&self) -> bool {
        self.source
            .get(Use::Read)
            .is_ok_and(|file| rustix::fs::fstatfs(&file).is_ok_and(|it| it.f_type == FUSE))
    }

    /// The offset in the source file of an offset in this file.
    #[inline]
    pub(crate) fn source_offset(&self, offset: u64) -> u64 {
        debug_assert!(self.len.is_none_or(|len| offset < len), "{offset} of {:?}", self.len);
        self.base + offset
    }

    /// Writes slices contiguously.
    pub(crate) fn write_slices(
        &self,
        offset: u64,
        slices: &mut [IoSlice<'_>],
        flags: ReadWriteFlags,
    ) -> io::Result<()> {
        let file = self.source.get(Use::Read)?;
        let mut at = self.source_offset(offset);
        let mut left = slices;
        IoSlice::advance_slices(&mut left, 0);
        while !left.is_empty() {
            let some = &left[..left.len().min(PARTS_MAX)];
            let write = || rustix::io::pwritev2(&file, some, at, flags);
            let written = rustix::io::retry_on_intr(write)?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            at += written as u64;
            IoSlice::advance_slices(&mut left, written);
        }
        Ok(())
    }
}

impl StoreFile for PoolFile {
    fn len(&self) -> io::Result<u64> {
        match self.len {
            Some(len) => Ok(len),
            None => Ok(self.source.get(Use::Read)?.metadata()?.len()),
        }
    }

    #[inline]
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.source.get(Use::Read)?.read_exact_at(into, self.source_offset(offset))
    }

    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        self.write_slices(offset, &mut slices, ReadWriteFlags::empty())
    }

    fn sync(&self) -> io::Result<()> {
        let file = self.source.get(Use::Read)?;
        match &self.syncs {
            Some(syncs) => syncs.sync(|| file.sync_data()),
            None => file.sync_data(),
        }
    }

    fn is_sparse(&self) -> bool {
        self.is_sparse
    }

    fn pin(&self) -> io::Result<Pin> {
        Ok(Pin::of(self.source.get(Use::Write)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the checkpoint got the error, and the log then took for durable what had not
    /// been written.
    #[test]
    fn all_threads_that_sync_a_descriptor_get_its_error() {
        let syncs = Syncs::default();
        assert!(syncs.sync(|| Ok(())).is_ok());
        assert!(syncs.sync(|| Err(io::ErrorKind::StorageFull.into())).is_err());
        assert!(syncs.sync(|| Ok(())).is_err());
    }

    #[test]
    fn only_one_thread_syncs_a_descriptor_at_a_time() {
        let (syncs, running) = (Syncs::default(), Mutex::new(()));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let sync = || {
                            assert!(running.try_lock().is_ok());
                            Ok(())
                        };
                        assert!(syncs.sync(sync).is_ok());
                    }
                });
            }
        });
    }
}

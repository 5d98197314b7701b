//! The backing file: holds blocks that were moved out of memory, compressed as they are.
//!
//! ```text
//! "BLKYBACK", 4096 bytes ▸ stored bytes at multiples of 64, wherever there is room
//! ```
//!
//! The file has no allocation map: the table of words and the readers' pins say which places are
//! taken. A writeback reads both before it allocates ([`FreeSpace`]). So a client's write frees the
//! old place without any work. After the device is closed, the contents of the file mean nothing.

use std::fs::{File, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use blockyard_sync::block_table::{PLACE_BYTES, PLACES_MAX};
use blockyard_sync::quota::Quota;
use blockyard_sync::rcu_cell::RcuCell;

use crate::error::RamError;

/// The first bytes of a backing file.
const MAGIC: [u8; 8] = *b"BLKYBACK";
/// Readable by the owner only: the file holds the contents of a disk.
const MODE: u32 = 0o600;
/// Bytes before the first place.
const HEAD_BYTES: u64 = 4096;
/// Allocation unit of the file in bytes: a cache line, since compressed pages have many sizes.
const GRAIN_BYTES: u64 = 64;

/// An open backing file.
#[derive(Debug)]
pub(crate) struct Backing {
    file: File,
    path: PathBuf,
    /// Injected fault: how many further reads and writes fail.
    failing: RcuCell<Quota>,
    /// Injected fault: how many further syncs fail after the kernel has accepted the write, as when
    /// the disk below the page cache rejects it.
    failing_late: RcuCell<Quota>,
    /// Injected fault: how many further writes fail half way because the file system is full.
    full: RcuCell<Quota>,
}

impl Backing {
    /// Creates the file, or reuses an earlier backing file. Any earlier contents are lost.
    pub(crate) fn open(path: &Path) -> Result<Backing, RamError> {
        let refused = |what: &'static str| {
            let path = path.display().to_string();
            move |source| RamError::File { field: "backing", path, what, source }
        };
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(MODE);
        let file = options.open(path).map_err(refused("cannot be opened"))?;
        file.try_lock().map_err(|error| {
            let source = match error {
                TryLockError::WouldBlock => io::Error::from(ErrorKind::ResourceBusy),
                TryLockError::Error(error) => error,
            };
            refused("is used by another device")(source)
        })?;
        let metadata = file.metadata().map_err(refused("cannot be read"))?;
        if !metadata.is_file() {
            let wanted = "a regular file, or a path where one can be made";
            return Err(RamError::invalid("backing", path.display(), wanted));
        }
        if metadata.len() > 0 {
            let mut magic = [0; MAGIC.len()];
            let read = file.read_exact_at(&mut magic, 0);
            if read.is_err() || magic != MAGIC {
                let wanted = "an empty file or a backing file; this one holds something else";
                return Err(RamError::invalid("backing", path.display(), wanted));
            }
        }
        let narrowed = file.set_permissions(Permissions::from_mode(MODE));
        narrowed.map_err(refused("cannot be made its owner's alone"))?;
        file.set_len(HEAD_BYTES).map_err(refused("cannot be emptied"))?;
        file.write_all_at(&MAGIC, 0).map_err(refused("cannot be written"))?;
        let none = || RcuCell::new(Quota::new(0));
        let (failing, failing_late, full) = (none(), none(), none());
        Ok(Backing { file, path: path.to_owned(), failing, failing_late, full })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads stored bytes.
    pub(crate) fn read(&self, place: u64, into: &mut [u8]) -> io::Result<()> {
        strike(&self.failing, libc::EIO)?;
        self.file.read_exact_at(into, place * PLACE_BYTES)
    }

    /// Writes stored bytes to the page cache. They are not durable before [`Backing::sync`].
    pub(crate) fn write(&self, place: u64, bytes: &[u8]) -> io::Result<()> {
        strike(&self.failing, libc::EIO)?;
        let full = strike(&self.full, libc::ENOSPC);
        let fits = if full.is_ok() { bytes } else { &bytes[..bytes.len() / 2] };
        self.file.write_all_at(fits, place * PLACE_BYTES)?;
        full
    }

    /// Waits until the written data is durable. The kernel reports a late write error only here,
    /// and only once: until this returns, the bytes must stay in memory.
    pub(crate) fn sync(&self) -> io::Result<()> {
        strike(&self.failing_late, libc::EIO)?;
        self.file.sync_data()
    }

    /// Injected fault: the next `times` reads and writes fail with EIO, as on a dying disk.
    pub(crate) fn fail(&self, times: u64) {
        self.failing.update(|_| Quota::new(times));
    }

    /// Injected fault: the next `times` batches fail with EIO after the kernel has accepted the
    /// writes.
    pub(crate) fn fail_late(&self, times: u64) {
        self.failing_late.update(|_| Quota::new(times));
    }

    /// Injected fault: the next `times` writes fail with ENOSPC, as on a full file system.
    pub(crate) fn fill_up(&self, times: u64) {
        self.full.update(|_| Quota::new(times));
    }
}

fn strike(failing: &RcuCell<Quota>, errno: i32) -> io::Result<()> {
    if failing.get().take() { Err(io::Error::from_raw_os_error(errno)) } else { Ok(()) }
}

/// The free space of the file.
#[derive(Debug)]
pub(crate) struct FreeSpace {
    /// Byte ranges of the file that are taken, sorted, with no two adjacent.
    taken: Vec<(u64, u64)>,
    /// Index in `taken` of the range after the gap to search next.
    next: usize,
    /// Start of the free part of that gap.
    at: u64,
}

impl FreeSpace {
    /// The space that the given places and lengths leave free.
    pub(crate) fn outside(taken: impl Iterator<Item = (u64, usize)>) -> FreeSpace {
        let range = |(place, len): (u64, usize)| {
            let at = place * PLACE_BYTES;
            (at, (at + len as u64).next_multiple_of(GRAIN_BYTES))
        };
        let mut taken: Vec<(u64, u64)> = taken.map(range).collect();
        taken.sort_unstable();
        FreeSpace { taken, next: 0, at: HEAD_BYTES }
    }

    /// Allocates a place of `len` bytes. Gaps are used in ascending order, each once: a gap that is
    /// too small for `len` is skipped until the next writeback.
    pub(crate) fn take(&mut self, len: usize) -> Option<u64> {
        let len = (len as u64).next_multiple_of(GRAIN_BYTES);
        loop {
            match self.taken.get(self.next) {
                Some(&(start, end)) if self.at + len > start => {
                    self.at = self.at.max(end);
                    self.next += 1;
                }
                _ => break,
            }
        }
        let place = self.at / PLACE_BYTES;
        self.at += len;
        (place < PLACES_MAX).then_some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_places_do_not_overlap_used_ones() {
        let head = HEAD_BYTES / PLACE_BYTES;
        let taken = [(head + 400, 100), (head, 10), (head + 4, 60), (head + 12, 1)];
        let mut room = FreeSpace::outside(taken.into_iter());
        let mut all: Vec<(u64, u64)> = taken.map(|(place, len)| (place * 16, len as u64)).to_vec();
        for len in [64, 1, 4096, 2000, 4096, 65] {
            let place = room.take(len).unwrap();
            assert_eq!(place * PLACE_BYTES % GRAIN_BYTES, 0);
            all.push((place * PLACE_BYTES, len as u64));
        }
        all.sort_unstable();
        for pair in all.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{all:?}");
        }
        assert_eq!(FreeSpace::outside(std::iter::empty()).take(1), Some(head));
    }

    #[test]
    fn foreign_file_is_not_touched() {
        let name = format!("blockyard-backing-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, "precious").unwrap();
        let error = Backing::open(&path).unwrap_err();
        assert!(error.to_string().contains("holds something else"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_file(&path).unwrap();
        let first = Backing::open(&path).unwrap();
        let error = Backing::open(&path).unwrap_err();
        assert!(error.to_string().contains("is used by another device"), "{error}");
        first.write(256, b"stored").unwrap();
        let mut back = [0; 6];
        first.read(256, &mut back).unwrap();
        assert_eq!(&back, b"stored");
        drop(first);
        assert!(Backing::open(&path).is_ok());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn its_owner_alone_reads_it() {
        let name = format!("blockyard-backing-mode-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        let open_to_all = || {
            std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        };
        drop(Backing::open(&path).unwrap());
        assert_eq!(mode(), MODE, "one that is made");
        open_to_all();
        drop(Backing::open(&path).unwrap());
        assert_eq!(mode(), MODE, "one that was a backing file");
        std::fs::write(&path, "").unwrap();
        open_to_all();
        drop(Backing::open(&path).unwrap());
        assert_eq!(mode(), MODE, "an empty one");
        std::fs::write(&path, "a file of another program").unwrap();
        open_to_all();
        Backing::open(&path).unwrap_err();
        assert_eq!(mode(), 0o644, "one that is left alone");
        std::fs::remove_file(&path).unwrap();
    }
}

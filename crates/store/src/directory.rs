//! A directory as the storage of a pool, with a file for each segment. This process has it
//! exclusively.
//!
//! The directory is held open, and names are looked up in the open directory. So it may be moved or
//! renamed meanwhile, and its removal is noticed.
//!
//! Three things are locked, so that no deleted, renamed or restored file lets a second process in:
//! the directory itself, its superblock, and the file `lock`, which also names the lock owner.
//! [`DirectoryStore::check_location`] notices a superblock that was removed or replaced meanwhile.
//!
//! A pool is made in an otherwise empty directory. If there are other files and no pool, not even
//! the file `lock` is made.
#![allow(clippy::disallowed_types)] // The superblock is opened once, and replaced when copies are.

use std::fs::{File, TryLockError};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_core::owner_only;
use blockyard_volume_format::FormatError;
use blockyard_volume_format::superblock::Superblock;
use blockyard_volume_format::{label, segment_name, superblock};
use rustix::fs::{AtFlags, Dir, FallocateFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::buffer::Memory;
use crate::error::StoreError;
use crate::file::{self, ClosesAll, OnDemand, Use};
use crate::lock::Lock;
use crate::lock_owner::LockOwner;
use crate::{PoolFile, Purpose, StoreFile};

/// The name of the lock file.
const LOCK: &str = "lock";

/// Names that an empty directory may have, in addition to the remains of an interrupted `create`:
/// itself, and what a file system brings along.
const EMPTY: [&str; 3] = [".", "..", "lost+found"];

/// The unit of `st_blocks` in bytes.
const BLOCK_BYTES: u64 = 512;

/// The name of the superblock until the creation of the pool is complete.
const SUPERBLOCK_NEW: &str = "superblock.new";

/// Bytes of a segment in which a log or pages begin: if they are zeros, it is not used.
const HEAD_BYTES: u64 = 4096;

/// Length of the magic number of a superblock or a label in bytes.
const MARK_BYTES: u64 = 8;

/// Zeros that are written at once, in bytes.
const ZEROS: usize = 1 << 20;

/// A directory that this process has exclusively.
#[derive(Debug)]
pub(crate) struct DirectoryStore {
    /// The open directory, in which names are looked up.
    open: Arc<File>,
    /// Alignment of direct I/O in bytes; `None` if files go through the page cache.
    direct_align: Option<u32>,
    purpose: Purpose,
    /// The directory, locked until this is dropped, or until the process dies and its last write
    /// has reached the disk. `None` if the file system cannot lock a directory.
    itself: Option<Arc<Lock>>,
    /// The file `lock`, locked in the same way. `None` if there is none and the pool is only read,
    /// or if the directory has other files.
    lock: Option<Arc<Lock>>,
    /// This process has made the file `lock`, and removes it if no pool is made.
    has_made_lock: bool,
    /// Whether this process writes the lock owner into the file `lock`, whose contents are not
    /// those of another program.
    signs: bool,
    /// The superblock, locked in the same way, once there is one.
    superblock: Mutex<Option<Lock>>,
    /// A file of another program, if there is no pool.
    foreign: Option<String>,
    /// Dropped after `open`.
    _closes_all: ClosesAll,
}

impl DirectoryStore {
    /// Takes an existing directory exclusively.
    pub(crate) fn take(path: &Path, purpose: Purpose) -> Result<DirectoryStore, StoreError> {
        let doing = |what: &str| format!("cannot {what} `{}`", path.display());
        let in_use = || {
            let lock_owner = LockOwner::read(&path.join(LOCK));
            StoreError::InUse { path: path.to_owned(), lock_owner }
        };
        file::keep_spares();
        let open = Arc::new(File::open(path).map_err(StoreError::io(doing("open")))?);
        let itself = at(&open, ".", OFlags::RDONLY | OFlags::DIRECTORY);
        let itself = itself.map_err(StoreError::io(doing("open")))?;
        let itself = Lock::take_if_able(itself).map_err(|_| in_use())?.map(Arc::new);
        let foreign = match purpose {
            Purpose::ReadOnly => None,
            _ => foreign(&open).map_err(StoreError::io(doing("list")))?,
        };
        let (flags, what) = match purpose {
            Purpose::ReadOnly => (OFlags::RDONLY, "read"),
            _ => (OFlags::RDWR | OFlags::CREATE, "write to"),
        };
        let had_lock = rustix::fs::statat(&open, LOCK, AtFlags::empty()).is_ok();
        let lock = match foreign.is_none().then(|| regular(&open, LOCK, flags)).transpose() {
            Ok(lock) => lock,
            Err(error)
                if purpose == Purpose::ReadOnly && error.kind() == io::ErrorKind::NotFound =>
            {
                None
            }
            Err(error) => return Err(StoreError::io(doing(what))(error)),
        };
        let has_made_lock = !had_lock && lock.is_some();
        let lock = match lock.map(Lock::take).transpose() {
            Ok(lock) => lock.map(Arc::new),
            Err(TryLockError::WouldBlock) => return Err(in_use()),
            Err(TryLockError::Error(error)) => return Err(StoreError::io(doing("lock"))(error)),
        };
        let direct_align = direct_align(&open, foreign.is_some());
        let signs = purpose != Purpose::ReadOnly && lock.as_ref().is_some_and(|lock| is_ours(lock));
        if purpose != Purpose::ReadOnly && lock.is_some() && !signs {
            let shown = path.display();
            tracing::warn!("{shown}/{LOCK} has bytes of another program, and keeps them");
        }
        let superblock = Mutex::default();
        let directory = DirectoryStore {
            _closes_all: ClosesAll(Arc::downgrade(&open)),
            open,
            direct_align,
            purpose,
            itself,
            lock,
            has_made_lock,
            signs,
            superblock,
            foreign,
        };
        if directory.foreign.is_none() {
            match directory.lock_superblock() {
                Err(TryLockError::WouldBlock) => return Err(in_use()),
                // The file is opened again when it is read, which reports the error.
                Ok(()) | Err(TryLockError::Error(_)) => {}
            }
        }
        if directory.signs && directory.has_pool() {
            narrow(path);
        }
        // The entry is informative only, and a pool on a full disk must open.
        if let Err(error) = directory.write_lock_owner(&LockOwner::this(None)) {
            tracing::warn!("{}/{LOCK}: {error}", path.display());
        }
        Ok(directory)
    }

    /// The locks that this process holds while it has the directory.
    pub(crate) fn locks(&self) -> Vec<Arc<Lock>> {
        self.itself.iter().chain(&self.lock).cloned().collect()
    }

    fn superblock(&self) -> MutexGuard<'_, Option<Lock>> {
        self.superblock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens and locks the current superblock, if there is one.
    fn lock_superblock(&self) -> Result<(), TryLockError> {
        let found = rustix::fs::statat(&self.open, superblock::FILE, AtFlags::empty());
        // Opening a pipe would block here. What is not a regular file is refused when it is read.
        if !found.is_ok_and(|it| FileType::from_raw_mode(it.st_mode).is_file()) {
            return Ok(());
        }
        let file = regular(&self.open, superblock::FILE, self.flags());
        let file = file.map_err(TryLockError::Error)?;
        *self.superblock() = Lock::take_if_able(file)?;
        Ok(())
    }

    /// Whether the locked superblock still has its name.
    ///
    /// # Errors
    /// If it was removed or replaced, or that cannot be found out.
    fn is_superblock_same(&self) -> io::Result<bool> {
        let guard = self.superblock();
        let Some(locked) = &*guard else { return Ok(true) };
        let (locked, named) = (
            locked.metadata()?,
            rustix::fs::statat(&self.open, superblock::FILE, AtFlags::empty())?,
        );
        Ok((locked.dev(), locked.ino()) == (named.st_dev, named.st_ino))
    }

    /// Whether the directory has a pool, or a copy of one.
    fn has_pool(&self) -> bool {
        let is_there = |file: &str| rustix::fs::statat(&self.open, file, AtFlags::empty()).is_ok();
        is_there(superblock::FILE) || is_there(label::FILE)
    }

    /// Checks that a pool may be made here, where there is none, and completes an interrupted
    /// removal.
    pub(crate) fn prepare(&self, path: &Path) -> Result<(), StoreError> {
        let Some(foreign) = &self.foreign else {
            narrow(path);
            let failed = StoreError::io(format!("cannot remove files in `{}`", path.display()));
            return match self.is_being_removed() {
                true => self.remove_segments().map_err(failed),
                false if self.has_pool() => Ok(()),
                false => self.check_segments(path),
            };
        };
        let wanted = format!(
            "an empty directory to make a pool in, for example one below it (one that is not there \
             is made); it holds `{foreign}`"
        );
        Err(StoreError::Invalid { field: "path", value: path.display().to_string(), wanted })
    }

    /// Refuses segments that have data, but no superblock. Of two copies, neither is changed then.
    fn check_segments(&self, path: &Path) -> Result<(), StoreError> {
        let is_used = |name: &String| -> io::Result<bool> {
            let mut head = Vec::new();
            regular(&self.open, name, OFlags::RDONLY)?.take(HEAD_BYTES).read_to_end(&mut head)?;
            Ok(head.iter().any(|byte| *byte != 0))
        };
        let failed = || StoreError::io(format!("cannot examine `{}`", path.display()));
        let names = self.names().map_err(|error| failed()(error))?;
        for name in names.iter().filter(|name| segment(name).is_some()) {
            if is_used(name).map_err(|error| failed()(error))? {
                let path = path.display().to_string();
                return Err(FormatError::NoSuperblock { path }.into());
            }
        }
        Ok(())
    }

    /// Writes the lock owner's entry: the process, and its control socket.
    pub(crate) fn write_lock_owner(&self, lock_owner: &LockOwner) -> io::Result<()> {
        match &self.lock {
            Some(lock) if self.signs => lock_owner.write(lock),
            _ => Ok(()),
        }
    }

    /// Alignment of the offsets and lengths that the system reads and writes, in bytes.
    pub(crate) fn io_align(&self) -> u32 {
        self.direct_align.unwrap_or(file::ANY_ALIGN)
    }

    /// Whether I/O bypasses the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct_align.is_some()
    }

    /// Free bytes of the file system.
    pub(crate) fn free_bytes(&self) -> io::Result<u64> {
        let space = rustix::fs::fstatvfs(&self.open)?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    }

    /// Free bytes of the file system; `None` if the file system does not report its size.
    pub(crate) fn growth_bytes(&self) -> Option<u64> {
        let space = rustix::fs::fstatvfs(&self.open).ok().filter(|space| space.f_blocks > 0)?;
        Some(space.f_bavail.saturating_mul(space.f_frsize))
    }

    /// Checks that the pool in the directory was not removed and its superblock not replaced. Data
    /// in removed files exist only as long as these are open.
    pub(crate) fn check_location(&self) -> io::Result<()> {
        let is_gone = |error: &io::Error| {
            [Errno::NOENT, Errno::STALE]
                .map(|it| Some(it.raw_os_error()))
                .contains(&error.raw_os_error())
        };
        if let Err(error) = rustix::fs::statat(&self.open, superblock::FILE, AtFlags::empty())
            && is_gone(&error.into())
        {
            return Err(error.into());
        }
        match self.is_superblock_same() {
            Ok(false) => Err(io::Error::other("another file has the name of its superblock")),
            // Other errors do not prove that the pool is gone.
            _ => Ok(()),
        }
    }

    fn flags(&self) -> OFlags {
        let direct = if self.is_direct() { OFlags::DIRECT } else { OFlags::empty() };
        let access = if self.purpose == Purpose::ReadOnly { OFlags::RDONLY } else { OFlags::RDWR };
        access | direct
    }

    /// Opens a file, if it exists.
    ///
    /// # Errors
    /// Also if a pool was made here after the directory was taken with other files in it: then
    /// nothing was locked.
    pub(crate) fn open(&self, name: &str) -> io::Result<Option<PoolFile>> {
        if name == superblock::FILE
            && let Some(locked) = &*self.superblock()
        {
            return Ok(Some(PoolFile::sharing(locked.file())));
        }
        if let Some(number) = segment(name) {
            return self.open_segment(name, number);
        }
        let begins = || [superblock::FILE, label::FILE].contains(&name);
        match file::open_with_retry(Use::Read, || regular(&self.open, name, self.flags())) {
            Ok(_)
                if self.foreign.is_some()
                    && begins()
                    && at(&self.open, name, LOOKING).is_ok_and(is_pools) =>
            {
                Err(io::Error::other("a pool has been made here this moment; open it again"))
            }
            Ok(file) => {
                self.check_links(name, file.metadata()?.nlink())?;
                Ok(Some(PoolFile::of(file)))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Refuses a file that another directory has too, if this pool may be written.
    fn check_links(&self, name: &str, links: u64) -> io::Result<()> {
        if self.purpose == Purpose::ReadOnly || links < 2 {
            return Ok(());
        }
        let what = format!(
            "`{name}` has {links} names (hard links): writing it would change another copy of the \
             pool too; expected files of its own, as `cp -r` makes"
        );
        Err(io::Error::other(what))
    }

    /// A segment file, which is opened when it is needed.
    fn open_segment(&self, name: &str, number: u32) -> io::Result<Option<PoolFile>> {
        let found = match rustix::fs::statat(&self.open, name, AtFlags::empty()) {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if !FileType::from_raw_mode(found.st_mode).is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        self.check_links(name, found.st_nlink)?;
        let (name, flags) = (segment_name(number as usize), self.flags());
        let file = OnDemand::new(&self.open, move |open| regular(open, &name, flags));
        let (len, blocks) = (found.st_size.cast_unsigned(), found.st_blocks.cast_unsigned());
        let file = PoolFile::on_demand(file, number, len, blocks * BLOCK_BYTES < len);
        Ok(Some(file.aligned(self.io_align())))
    }

    pub(crate) fn create(&self, name: &str, len: u64) -> io::Result<PoolFile> {
        // A symbolic link may lead to a file of another program.
        let flags = self.flags() | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW;
        let file = file::open_with_retry(Use::Write, || at(&self.open, name, flags))?;
        if !reserve(&file, len)? {
            file.set_len(len)?;
        }
        let file = PoolFile::of(file).aligned(self.io_align());
        write_zeros(&file, len)?;
        Ok(file)
    }

    /// Gives the space of a file back, and keeps its length.
    pub(crate) fn deallocate(&self, file: &PoolFile) -> io::Result<()> {
        let (open, len) = (file.source().get(Use::Read)?, file.len()?);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::io::retry_on_intr(|| rustix::fs::fallocate(&open, flags, 0, len))?)
    }

    /// Allocates the space of a file again.
    pub(crate) fn allocate(&self, file: &PoolFile, len: u64) -> io::Result<()> {
        let open = file.source().get(Use::Read)?;
        reserve(&open, len)?;
        write_zeros(file, len)?;
        file.sync()
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        rustix::fs::renameat(&self.open, from, &self.open, to)?;
        if to == superblock::FILE {
            self.lock_superblock().map_err(io::Error::from)?;
        }
        Ok(())
    }

    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.open, name, AtFlags::empty()) {
            Err(error) if error != Errno::NOENT => return Err(error.into()),
            _ => {}
        }
        if name == superblock::FILE {
            // The descriptor of its lock would keep the removed file.
            *self.superblock() = None;
        }
        Ok(())
    }

    /// Removes the files of a pool. The superblock gets the name that it has during a creation, and
    /// is removed last: if the removal is interrupted, the next creation completes it.
    pub(crate) fn erase(&self) -> io::Result<()> {
        self.retire()?;
        self.remove(label::FILE)?;
        self.remove_segments()?;
        if self.has_made_lock {
            self.remove(LOCK)?;
        }
        self.sync_names()
    }

    /// Begins a removal: after that there is no pool.
    fn retire(&self) -> io::Result<()> {
        match self.rename(superblock::FILE, SUPERBLOCK_NEW) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.sync_names(),
        }
    }

    /// Whether a removal was interrupted, or a creation that has made its last file: the superblock
    /// is complete and has the name of a new one. A copy of two, which has a label, also has such a
    /// file while its superblock is made again from the other copy: that one keeps its data.
    fn is_being_removed(&self) -> bool {
        let whole = superblock::SLOTS * superblock::SLOT_BYTES as u64;
        let mut bytes = Vec::new();
        let read = regular(&self.open, SUPERBLOCK_NEW, OFlags::RDONLY | OFlags::NOFOLLOW)
            .and_then(|file| file.take(whole).read_to_end(&mut bytes));
        !self.has_pool() && read.is_ok() && Superblock::all(&bytes).is_ok()
    }

    /// Removes the segments and what is incomplete, and last the sign of an interrupted removal.
    fn remove_segments(&self) -> io::Result<()> {
        let goes = |name: &&String| {
            let whole = name.strip_suffix(".new").unwrap_or(name);
            segment(whole).is_some() || whole == label::FILE && whole != name.as_str()
        };
        for name in self.names()?.iter().filter(goes) {
            self.remove(name)?;
        }
        self.sync_names()?;
        self.remove(SUPERBLOCK_NEW)?;
        self.sync_names()
    }

    pub(crate) fn sync_names(&self) -> io::Result<()> {
        self.open.sync_all()
    }

    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        names(&self.open)
    }
}

/// Clears the lock owner's entry, and removes the lock file if this process made it and no pool was
/// made.
impl Drop for DirectoryStore {
    fn drop(&mut self) {
        // An entry that remains is ignored once nothing is locked.
        _ = self.write_lock_owner(&LockOwner::default());
        let is_there = |name| rustix::fs::statat(&self.open, name, AtFlags::empty()).is_ok();
        if self.has_made_lock && ![superblock::FILE, label::FILE].into_iter().any(is_there) {
            _ = self.remove(LOCK);
        }
    }
}

/// Removes the access rights of other users: a process that may open a segment reads every volume,
/// and one that may open `lock` can keep the pool from being opened. A pool whose modes cannot be
/// changed is served anyway.
fn narrow(path: &Path) {
    let shown = path.display();
    match owner_only::narrow_directory(path) {
        Ok(0) => {}
        Ok(count) => tracing::warn!(
            "{shown}: other users had access: set {count} modes to 0700 (directory) and 0600"
        ),
        Err(error) => tracing::warn!("{shown}: other users may have access: {error}"),
    }
}

/// Reserves space for a file of this length. Returns whether the file system supports that. If not,
/// the written zeros take the space.
fn reserve(file: &File, len: u64) -> io::Result<bool> {
    let empty = FallocateFlags::empty();
    match rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, empty, 0, len)) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Writes zeros: otherwise the first write to an extent costs an entry in the file system's journal
/// later.
fn write_zeros(file: &PoolFile, len: u64) -> io::Result<()> {
    let zeros = Memory::new(ZEROS as u64).take_beyond(ZEROS.min(len as usize));
    let mut at = 0;
    while at < len {
        let part = zeros.len().min((len - at) as usize);
        file.write_at(at, &[&zeros[..part]])?;
        at += part as u64;
    }
    Ok(())
}

/// The segment number of a file name.
fn segment(name: &str) -> Option<u32> {
    let number = u32::from_str_radix(name.strip_prefix("segment-")?, 16).ok()?;
    (segment_name(number as usize) == name).then_some(number)
}

fn names(open: &File) -> io::Result<Vec<String>> {
    let entries = Dir::read_from(open)?;
    let name = |entry: rustix::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    entries.map(|entry| Ok(name(entry?))).collect()
}

/// The superblock's slots, if the directory holds a pool.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn superblock_of(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path.join(superblock::FILE)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut slots = vec![0; superblock::SLOTS as usize * superblock::SLOT_BYTES];
    superblock::read(&mut slots, |into| file.read_exact_at(into, 0))?;
    Ok(Some(slots))
}

/// A file in a directory without a pool, for the error that says so; `None` if there is none.
pub(crate) fn other_file(path: &Path) -> Option<String> {
    let names = std::fs::read_dir(path).ok()?.filter_map(|entry| Some(entry.ok()?.file_name()));
    names.map(|name| name.to_string_lossy().into_owned()).filter(|name| name != LOCK).min()
}

/// A file of another program in the directory; none if it has a pool, or a copy of one.
fn foreign(open: &File) -> io::Result<Option<String>> {
    let mut names = names(open)?;
    names.sort_unstable();
    let may_lock = at(open, LOCK, LOOKING).is_ok_and(|lock| is_ours(&lock));
    let is_foreign = |name: &&String| match name.as_str() {
        LOCK => !may_lock,
        name => !EMPTY.contains(&name) && !is_begun(open, name, &names),
    };
    let Some(foreign) = names.iter().filter(is_foreign).min() else { return Ok(None) };
    // Damaged or unreadable files count as a pool: opening it reports the error.
    let is_pool = [superblock::FILE, label::FILE].into_iter().any(|file| {
        names.iter().any(|name| name == file)
            && (names.iter().any(|name| name == LOCK) && may_lock
                || at(open, file, LOOKING).map_or(true, is_pools))
    });
    Ok((!is_pool).then(|| foreign.clone()))
}

/// Whether an interrupted creation may have left a file. It makes segments in ascending order, and
/// a file that is not complete begins with zeros or with its magic number. `names` is the sorted
/// list of all files.
fn is_begun(open: &File, name: &str, names: &[String]) -> bool {
    let Some(whole) = name.strip_suffix(".new") else {
        let before = |number: u32| number.checked_sub(1).map(|it| segment_name(it as usize));
        let is_next = |number| before(number).is_none_or(|it| names.binary_search(&it).is_ok());
        let is_removed = || names.binary_search_by(|it| it[..].cmp(SUPERBLOCK_NEW)).is_ok();
        return segment(name).is_some_and(|number| is_next(number) || is_removed());
    };
    let is_marked: fn(&[u8]) -> bool = match whole {
        superblock::FILE => superblock::is_marked,
        label::FILE => label::is_marked,
        _ if segment(whole).is_some() => |_| false,
        _ => return false,
    };
    let mut head = Vec::new();
    let read = regular(open, name, OFlags::RDONLY | OFlags::NOFOLLOW)
        .and_then(|file| file.take(MARK_BYTES).read_to_end(&mut head));
    read.is_ok() && (head.iter().all(|byte| *byte == 0) || is_marked(&head))
}

/// Whether a file, or its second slot, begins as a superblock or a label does.
fn is_pools(file: File) -> bool {
    let slots = [0, superblock::SLOT_BYTES as u64];
    slots.into_iter().any(|slot| {
        let mut mark = [0; 8];
        let read = file.read_exact_at(&mut mark, slot);
        let is_short = read.as_ref().is_err_and(|it| it.kind() == io::ErrorKind::UnexpectedEof);
        !is_short && (read.is_err() || superblock::is_marked(&mark) || label::is_marked(&mark))
    })
}

/// Whether an open lock file has contents that this program writes: nothing, the lock owner, or
/// zeros after a power cut.
fn is_ours(lock: &File) -> bool {
    let mut text = Vec::new();
    let read = lock.metadata().and_then(|it| match it.is_file() {
        true => lock.take(LockOwner::LEN_MAX).read_to_end(&mut text),
        false => Err(io::ErrorKind::InvalidInput.into()),
    });
    read.is_ok() && (text.iter().all(|byte| *byte == 0) || text.starts_with(b"pid "))
}

/// Flags to open a file for reading only, which does not block, whatever the file is.
const LOOKING: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK);

/// The alignment of direct I/O in a directory in bytes; `None` if its files cannot be opened for
/// direct I/O. Some memory file systems refuse it; nothing survives a power cut there anyway. If
/// the directory has other files, an unnamed file is opened for the test, which leaves nothing.
fn direct_align(open: &File, is_foreign: bool) -> Option<u32> {
    let opened = match is_foreign {
        false => at(open, LOCK, OFlags::RDONLY | OFlags::DIRECT),
        true => at(open, ".", OFlags::RDWR | OFlags::TMPFILE | OFlags::DIRECT),
    };
    opened.ok().map(|file| file::direct_align(&file))
}

/// Opens a regular file in a directory. The open does not block if the name is something else, such
/// as a FIFO that no process writes to.
fn regular(open: &File, name: &str, flags: OFlags) -> io::Result<File> {
    let file = at(open, name, flags | OFlags::NONBLOCK)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    // With `O_NONBLOCK`, reads by io_uring would fail where they had to wait.
    rustix::fs::fcntl_setfl(&file, flags & OFlags::DIRECT)?;
    Ok(file)
}

/// Opens a name in a directory.
fn at(open: &File, name: &str, flags: OFlags) -> io::Result<File> {
    let mode = Mode::from_raw_mode(owner_only::FILE_MODE);
    let opened = || rustix::fs::openat(open.as_fd(), name, flags | OFlags::CLOEXEC, mode);
    Ok(rustix::io::retry_on_intr(opened)?.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // All of this is test code; clippy knows only whole test functions.
mod tests {
    use blockyard_testing::temp_dir::TempDir;
    use rustix::fs::{CWD, FileType};

    use super::*;

    /// Regression: a FIFO in the place of a segment blocked `volume check` until a process wrote to
    /// it.
    #[test]
    fn open_of_a_fifo_instead_of_a_segment_fails_without_waiting() {
        let temp_dir = TempDir::new(&std::env::temp_dir(), "blockyard-directory-fifo");
        let path = temp_dir.path();
        for (name, purpose) in [("segment-00000000", Purpose::ReadOnly), (LOCK, Purpose::ReadOnly)]
        {
            std::fs::write(path.join(superblock::FILE), b"BLKYVOL\n").unwrap();
            let mode = Mode::RUSR | Mode::WUSR;
            rustix::fs::mknodat(CWD, path.join(name), FileType::Fifo, mode, 0).unwrap();
            let error = match DirectoryStore::take(path, purpose) {
                Ok(directory) => directory.open(name).unwrap_err().to_string(),
                Err(error) => error.to_string(),
            };
            assert!(error.contains("not a regular file"), "{error}");
            std::fs::remove_file(path.join(name)).unwrap();
        }
    }

    /// Regression: the descriptor of the superblock's lock kept the file that was removed.
    #[test]
    fn removing_the_superblock_closes_it() {
        let temp_dir = TempDir::new(&std::env::temp_dir(), "blockyard-directory-superblock");
        let path = temp_dir.path();
        std::fs::write(path.join(superblock::FILE), b"BLKYVOL\n").unwrap();
        let directory = DirectoryStore::take(path, Purpose::Use).unwrap();
        let locked = || directory.superblock().is_some();
        assert!(locked());
        directory.remove("segment-00000000").unwrap();
        assert!(locked());
        directory.remove(superblock::FILE).unwrap();
        assert!(!locked());
        assert_eq!(directory.open(superblock::FILE).unwrap().map(drop), None);
    }

    /// Regression: a removal that was interrupted left a directory that no creation accepted: the
    /// superblock went first, and the segments without it look like those of a lost pool.
    #[test]
    fn an_interrupted_removal_is_completed_by_the_next_creation() {
        let name = format!("blockyard-directory-removal-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        let mut bytes = vec![0; superblock::SLOTS as usize * superblock::SLOT_BYTES];
        let log = superblock::LogPlace { segment: 0, offset: 0, next: 1, number: 1, chain: 0 };
        let superblock = Superblock {
            id: [1; 16],
            align: 512,
            segment_bytes: 4 << 20,
            sequence: 0,
            epoch: 1,
            log,
            catalogue: blockyard_volume_format::entry::Entry::HOLE,
            catalogue_bytes: 0,
            catalogue_crc: 0,
            durable: 0,
        };
        superblock.print(&mut bytes[..superblock::SLOT_BYTES]);
        let files = ["segment-00000001", "segment-00000002", "segment-00000003.new", "copy.new"];
        let directory = DirectoryStore::take(&path, Purpose::Use).unwrap();
        std::fs::write(path.join(superblock::FILE), &bytes).unwrap();
        files.iter().for_each(|name| std::fs::write(path.join(name), "data").unwrap());
        // No call can remove this as a file.
        std::fs::create_dir(path.join("segment-00000000")).unwrap();
        directory.erase().unwrap_err();
        drop(directory);
        assert!(!path.join(superblock::FILE).exists() && path.join(SUPERBLOCK_NEW).exists());
        std::fs::remove_dir(path.join("segment-00000000")).unwrap();
        for name in &files[..2] {
            std::fs::write(path.join(name), "data").unwrap();
        }
        let directory = DirectoryStore::take(&path, Purpose::Use).unwrap();
        directory.prepare(&path).unwrap();
        let left = || std::fs::read_dir(&path).unwrap().map(|it| it.unwrap().file_name());
        assert_eq!(left().collect::<Vec<_>>(), [LOCK]);
        // A complete removal leaves nothing.
        std::fs::write(path.join(superblock::FILE), &bytes).unwrap();
        files.iter().for_each(|name| std::fs::write(path.join(name), "data").unwrap());
        directory.erase().unwrap();
        assert_eq!(left().collect::<Vec<_>>(), [LOCK; 0]);
        drop(directory);
        std::fs::remove_dir_all(&path).unwrap();
    }

    /// Otherwise two processes would use the pool: its maker with the lock, and this one without.
    #[test]
    fn a_pool_that_is_made_after_a_directory_was_taken_is_not_opened() {
        let temp_dir = TempDir::new(&std::env::temp_dir(), "blockyard-directory");
        let path = temp_dir.path();
        std::fs::write(path.join("notes"), "mine\n").unwrap();
        let directory = DirectoryStore::take(path, Purpose::Use).unwrap();
        assert!(directory.lock.is_none());
        for (file, mark) in [(superblock::FILE, b"BLKYVOL\n"), (label::FILE, b"BLKYCPY\n")] {
            assert!(directory.open(file).unwrap().is_none());
            // The owner of these contents is found when they are read.
            std::fs::write(path.join(file), [b'x'; 8192]).unwrap();
            assert!(directory.open(file).unwrap().is_some());
            let mut begun = [0; 8192];
            begun[4096..4104].copy_from_slice(mark);
            std::fs::write(path.join(file), begun).unwrap();
            let error = directory.open(file).unwrap_err().to_string();
            assert_eq!(error, "a pool has been made here this moment; open it again");
        }
        drop(directory);
        assert!(DirectoryStore::take(path, Purpose::Use).unwrap().lock.is_some());
    }
}

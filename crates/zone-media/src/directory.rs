//! A directory of the file system as a [`Store`], locked against other processes.
//!
//! The directory is held open and file names are resolved relative to it, so it may be renamed
//! meanwhile. Three objects are locked: the directory itself, its superblock, and the file `lock`.
//! So no deleted, renamed or restored file lets a second process in.
#![allow(clippy::disallowed_types)] // The superblock is opened once.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use blockyard_core::owner_only;
use blockyard_core::provisional::Provisional;
use rustix::fs::{AtFlags, Dir, FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::error::MediaError;
use crate::head::Id;
use crate::recovery::{SUPERBLOCK_NEW, is_ours};
use crate::store::{Store, StoreFile};
use crate::superblock;

/// Name of the lock file.
pub(crate) const LOCK: &str = "lock";

/// A directory that only this process uses.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// The open directory, locked until it is dropped or the process dies.
    open: File,
    /// The lock file, locked likewise.
    lock: File,
    /// Whether this process created the file `lock`, and the directories that it created, a
    /// directory before its parent. All are removed if no disk is created.
    has_made: (bool, Vec<PathBuf>),
    /// Whether a disk stays that was created since this process took the directory. The files are
    /// removed only after [`Store::begin_disk`].
    pub(crate) provisional: Provisional,
    /// The superblock, locked likewise, once it exists.
    superblock: Mutex<Option<File>>,
}

/// Unlocks explicitly instead of only closing the files: a process that is being started has copies
/// of all file descriptors until it calls exec.
impl Drop for Directory {
    fn drop(&mut self) {
        if !self.provisional.is_kept()
            && let Err(error) = self.erase()
        {
            let shown = self.path.display();
            tracing::warn!("parts of the new disk in {shown} stay: {error}");
        }
        let is_none = rustix::fs::statat(&self.open, superblock::FILE, AtFlags::empty())
            .is_err_and(|error| error == Errno::NOENT);
        let (has_made_lock, new_directories) = &self.has_made;
        if is_none && *has_made_lock {
            _ = self.remove(LOCK);
            // A directory that is not empty stays.
            new_directories.iter().for_each(|path| _ = std::fs::remove_dir(path));
        }
        // Closing the files releases any lock that the unlock call failed to release.
        let superblock = self.superblock().take();
        superblock.iter().chain([&self.lock, &self.open]).for_each(|file| _ = file.unlock());
    }
}

impl Directory {
    /// Takes a directory for this process only; creates it if it does not exist.
    ///
    /// # Errors
    /// If it cannot be created, or another process uses it.
    pub fn take(path: &Path) -> Result<Directory, MediaError> {
        let what = |doing: &str| format!("{doing} {}", path.display());
        let in_use = || MediaError::InUse { path: path.to_owned() };
        if path.exists() && !path.is_dir() {
            return Err(MediaError::NotDirectory { path: path.to_owned() });
        }
        let new_directories = owner_only::missing_directories(path);
        // A power cut after the first flush must not lose the directory itself.
        let made = owner_only::create_dir_all_durably(path);
        made.map_err(MediaError::io(what("cannot make")))?;
        let open = File::open(path).map_err(MediaError::io(what("cannot open")))?;
        // Some file systems cannot lock a directory.
        if matches!(open.try_lock(), Err(TryLockError::WouldBlock)) {
            return Err(in_use());
        }
        let has_made_lock = rustix::fs::statat(&open, LOCK, AtFlags::empty()).is_err();
        let lock = at(&open, LOCK, OFlags::RDWR | OFlags::CREATE);
        let lock = lock.map_err(MediaError::io(what("cannot write to")))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(in_use()),
            Err(TryLockError::Error(source)) => {
                return Err(MediaError::io(what("cannot lock"))(source));
            }
        }
        let has_made = (has_made_lock, new_directories);
        let path = path.to_owned();
        let (provisional, superblock) = (Provisional::kept(), Mutex::default());
        let directory = Directory { path, open, lock, has_made, provisional, superblock };
        match directory.lock_superblock() {
            // A damaged superblock is reported when it is read.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(directory),
            Err(TryLockError::WouldBlock) => Err(in_use()),
        }
    }

    /// Removes the files of a disk. The superblock gets the name that it has during a creation, and
    /// is removed last: if the removal is interrupted, the next creation recognises the remains.
    fn erase(&self) -> io::Result<()> {
        match rustix::fs::renameat(&self.open, superblock::FILE, &self.open, SUPERBLOCK_NEW) {
            Err(error) if error != Errno::NOENT => return Err(error.into()),
            _ => self.sync_names()?,
        }
        let goes = |name: &&String| is_ours(name) && ![LOCK, SUPERBLOCK_NEW].contains(&&name[..]);
        for name in self.names()?.iter().filter(goes) {
            self.remove(name)?;
        }
        self.sync_names()?;
        self.remove(SUPERBLOCK_NEW)?;
        self.sync_names()
    }

    fn superblock(&self) -> MutexGuard<'_, Option<File>> {
        self.superblock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens and locks the current superblock, if there is one.
    fn lock_superblock(&self) -> Result<(), TryLockError> {
        let Some(file) = self.open(superblock::FILE).map_err(TryLockError::Error)? else {
            return Ok(());
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            _ => {
                *self.superblock() = Some(file);
                Ok(())
            }
        }
    }

    /// Restricts the permissions of an existing disk to its owner. The files hold the disk's
    /// contents, and any process that can open `lock` could keep the disk locked. A disk whose
    /// permissions cannot be changed is still served.
    pub(crate) fn narrow(&self) {
        let shown = self.path.display();
        match owner_only::narrow_directory(&self.path) {
            Ok(0) => {}
            Ok(count) => tracing::warn!(
                "{shown}: other users had access: set {count} modes to 0700 (directory) and 0600"
            ),
            Err(error) => tracing::warn!("{shown}: other users may have access: {error}"),
        }
    }
}

/// Opens a name in a directory.
fn at(open: &File, name: &str, flags: OFlags) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    let opened = || rustix::fs::openat(open, name, flags | OFlags::CLOEXEC, mode);
    Ok(rustix::io::retry_on_intr(opened)?.into())
}

impl Store for Directory {
    type File = File;

    fn title(&self) -> String {
        self.path.display().to_string()
    }

    fn open(&self, name: &str) -> io::Result<Option<File>> {
        match at(&self.open, name, OFlags::RDWR) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn create(&self, name: &str, len: u64) -> io::Result<File> {
        let new = OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW;
        let file = at(&self.open, name, OFlags::RDWR | new)?;
        file.set_len(len)?;
        Ok(file)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        rustix::fs::renameat(&self.open, from, &self.open, to)?;
        if to == superblock::FILE {
            self.lock_superblock().map_err(io::Error::from)?;
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.open, name, AtFlags::empty()) {
            Err(error) if error != Errno::NOENT => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// A creation makes the file `lock` first.
    fn may_have_remains(&self) -> bool {
        !self.has_made.0
    }

    fn begin_disk(&self) {
        self.provisional.remove_at_close();
    }

    fn look(&self) -> io::Result<()> {
        let guard = self.superblock();
        let Some(locked) = &*guard else { return Ok(()) };
        let named = match rustix::fs::statat(&self.open, superblock::FILE, AtFlags::empty()) {
            Err(error @ (Errno::NOENT | Errno::STALE)) => return Err(error.into()),
            // Any other error does not show that the file was removed or replaced.
            Err(_) => return Ok(()),
            Ok(named) => named,
        };
        let locked = locked.metadata()?;
        match (locked.dev(), locked.ino()) == (named.st_dev, named.st_ino) {
            true => Ok(()),
            false => Err(io::Error::other("another file has the name of the superblock")),
        }
    }

    fn sync_names(&self) -> io::Result<()> {
        self.open.sync_all()
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let name = |entry: rustix::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        let names = Dir::read_from(&self.open)?.map(|entry| Ok(name(entry?)));
        let names: Vec<String> = names.collect::<io::Result<_>>()?;
        Ok(names.into_iter().filter(|name| name != "." && name != "..").collect())
    }

    fn boot(&self) -> io::Result<Id> {
        blockyard_os::boot_id()
    }

    fn fresh_id(&self) -> io::Result<Id> {
        blockyard_os::fresh_id()
    }
}

impl StoreFile for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    #[inline]
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(into, offset)
    }

    #[inline]
    fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.write_all_at(from, offset)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A signal may interrupt the call; repeating it is harmless.
        Ok(rustix::io::retry_on_intr(|| rustix::fs::fallocate(self, flags, offset, len))?)
    }

    fn first_data(&self) -> io::Result<Option<u64>> {
        match rustix::fs::seek(self, SeekFrom::Data(0)) {
            Ok(at) => Ok(Some(at)),
            Err(Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use blockyard_testing::temp_dir::TempDir;

    use super::*;

    fn place(name: &str) -> TempDir {
        TempDir::new(&std::env::temp_dir(), &format!("blockyard-zone-media-{name}"))
    }

    fn options() -> crate::Options {
        crate::Options::new(crate::MediaGeometry {
            bytes: 4 << 20,
            zone_bytes: 1 << 20,
            zone_capacity_bytes: 1 << 20,
            conventional_zones: 0,
            block_bytes: 4096,
        })
    }

    fn names(path: &Path) -> Vec<std::ffi::OsString> {
        std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    /// Dropping it releases the directory even if another process has a copy of the descriptor.
    #[test]
    fn it_is_free_when_it_is_dropped() {
        let place = place("directory");
        let path = place.fresh();
        let directory = Directory::take(&path).unwrap();
        assert!(matches!(Directory::take(&path), Err(MediaError::InUse { .. })));
        let known = directory.lock.try_clone().unwrap();
        let known = (known, directory.open.try_clone().unwrap());
        drop(directory);
        drop(Directory::take(&path).unwrap());
        drop(known);
    }

    /// Regression: a refused `smr:///s?backing=DIR` left a directory with a file `lock` in it.
    #[test]
    fn failed_creation_leaves_no_files() {
        let place = place("nothing");
        let path = place.fresh();
        drop(Directory::take(&path).unwrap());
        assert!(!path.exists());
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("notes"), "mine").unwrap();
        drop(Directory::take(&path).unwrap());
        assert_eq!(names(&path), ["notes"]);
    }

    /// Regression: a removal that was interrupted left a directory that no creation accepted: the
    /// superblock went first, and the files without it look like those of a lost disk.
    #[test]
    fn an_interrupted_removal_is_completed_by_the_next_creation() {
        let place = place("removal");
        let (path, aside) = (place.fresh(), place.fresh());
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join(LOCK), "").unwrap();
        let files = crate::Files::open_provisional(&path, &options()).unwrap();
        // No call can remove a directory as a file, so the removal ends after its first step.
        std::fs::create_dir(&aside).unwrap();
        let mut names = names(&path);
        names.retain(|name| name != LOCK && name != superblock::FILE);
        for name in &names {
            std::fs::rename(path.join(name), aside.join(name)).unwrap();
            std::fs::create_dir(path.join(name)).unwrap();
        }
        drop(files);
        assert!(!path.join(superblock::FILE).exists());
        for name in &names {
            std::fs::remove_dir(path.join(name)).unwrap();
            std::fs::rename(aside.join(name), path.join(name)).unwrap();
        }
        drop(crate::Files::open(&path, &options()).unwrap());
        assert!(path.join(superblock::FILE).exists() && !path.join(SUPERBLOCK_NEW).exists());
    }

    /// Regression: files of a `backing=` had mode 0644 in a directory of 0755, so any local user
    /// could read the disk.
    #[test]
    fn a_disk_that_other_users_could_read_is_its_owners_alone_after_an_opening() {
        let place = place("modes");
        let path = place.fresh();
        let modes = || {
            let files = names(&path).into_iter().map(|name| path.join(name));
            let all = files.chain([path.clone()]);
            all.map(|path| (path.metadata().unwrap().mode() & 0o777, path)).collect::<Vec<_>>()
        };
        for _ in 0..2 {
            drop(crate::Files::open(&path, &options()).unwrap());
            assert!(modes().len() > 3, "the directory, the lock, data and states of zones");
            for (mode, path) in modes() {
                assert_eq!(mode, if path.is_dir() { 0o700 } else { 0o600 }, "{}", path.display());
                let loose = if path.is_dir() { 0o755 } else { 0o644 };
                std::fs::set_permissions(&path, PermissionsExt::from_mode(loose)).unwrap();
            }
        }
    }

    /// Regression: after the file `lock` of an open disk was deleted, a second process opened the
    /// disk.
    #[test]
    fn no_file_that_is_deleted_or_moved_lets_a_second_process_in() {
        let place = place("second");
        let (path, moved) = (place.fresh(), place.fresh());
        let directory = Directory::take(&path).unwrap();
        directory.create("superblock.new", 4096).unwrap();
        directory.rename("superblock.new", superblock::FILE).unwrap();
        let is_refused = |path| matches!(Directory::take(path), Err(MediaError::InUse { .. }));
        std::fs::remove_file(path.join(LOCK)).unwrap();
        assert!(is_refused(&path), "its lock was deleted");
        directory.look().unwrap();
        std::fs::rename(&path, &moved).unwrap();
        assert!(is_refused(&moved), "the directory was renamed");
        // New files are created where the directory is now.
        directory.create("live.00", 8).unwrap();
        assert!(moved.join("live.00").exists() && !path.exists());
        std::fs::create_dir(&path).unwrap();
        std::fs::rename(moved.join(superblock::FILE), path.join(superblock::FILE)).unwrap();
        assert!(is_refused(&path), "its superblock is in another directory");
        assert!(directory.look().is_err(), "its superblock is gone");
        std::fs::copy(path.join(superblock::FILE), moved.join(superblock::FILE)).unwrap();
        assert!(directory.look().is_err(), "its superblock is another file");
        drop(directory);
        drop(Directory::take(&moved).unwrap());
    }
}

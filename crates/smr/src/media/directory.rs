//! A real directory as a [`Store`], locked against a second process.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use blockyard_core::owner_only;
use rustix::fs::FallocateFlags;

use super::error::MediaError;
use super::store::{Store, StoreFile};
use super::word::Id;

/// The file that is locked.
pub(crate) const LOCK: &str = "lock";

/// Where Linux says which run of the kernel this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Where Linux gives identities away.
const FRESH_ID: &str = "/proc/sys/kernel/random/uuid";

/// A directory that this process has for itself.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// Locked until it is dropped, or the process dies.
    lock: File,
}

/// A program that is started just then has every file of this process until it is executed.
impl Drop for Directory {
    fn drop(&mut self) {
        // What is not unlocked is closed now.
        _ = self.lock.unlock();
    }
}

impl Directory {
    /// Takes a directory for this process alone; makes it if it does not exist.
    ///
    /// # Errors
    /// If it cannot be made, or if another process has it.
    pub fn take(path: &Path) -> Result<Directory, MediaError> {
        let what = |doing: &str| format!("{doing} {}", path.display());
        owner_only::create_dir_all(path).map_err(MediaError::io(what("cannot make")))?;
        let lock = path.join(LOCK);
        let lock = owner_only::make_options().open(lock);
        let lock = lock.map_err(MediaError::io(what("cannot write to")))?;
        match lock.try_lock() {
            Ok(()) => Ok(Directory { path: path.to_owned(), lock }),
            Err(TryLockError::WouldBlock) => Err(MediaError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(source)) => Err(MediaError::io(what("cannot lock"))(source)),
        }
    }

    /// Takes the rights of other users away from a disk that is here: its files hold the disk's
    /// contents, and a process that may open `lock` may keep the disk shut. What cannot be narrowed
    /// can still be served.
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

impl Store for Directory {
    type File = File;

    fn title(&self) -> String {
        self.path.display().to_string()
    }

    fn open(&self, name: &str) -> io::Result<Option<File>> {
        match OpenOptions::new().read(true).write(true).open(self.path.join(name)) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn create(&self, name: &str, len: u64) -> io::Result<File> {
        let file = owner_only::make_options().truncate(true).open(self.path.join(name))?;
        file.set_len(len)?;
        Ok(file)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(&self.path)?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn boot(&self) -> io::Result<Id> {
        id_in(BOOT_ID)
    }

    fn fresh_id(&self) -> io::Result<Id> {
        id_in(FRESH_ID)
    }
}

/// The identity that a file of the kernel shows, as 32 hexadecimal digits with dashes.
fn id_in(file: &str) -> io::Result<Id> {
    let text = std::fs::read_to_string(file)?;
    let digits: String = text.trim().chars().filter(|digit| *digit != '-').collect();
    match u128::from_str_radix(&digits, 16) {
        Ok(number) if digits.len() == 32 => Ok(number.to_be_bytes()),
        _ => Err(io::Error::other(format!("{file} says `{}`, which is no identity", text.trim()))),
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
        // A signal may end it early; to do it again does no harm.
        Ok(rustix::io::retry_on_intr(|| rustix::fs::fallocate(self, flags, offset, len))?)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever else knows the file that is locked, the directory is free when this is gone.
    #[test]
    fn it_is_free_when_it_is_dropped() {
        let name = format!("blockyard-smr-directory-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let directory = Directory::take(&path).unwrap();
        assert!(matches!(Directory::take(&path), Err(MediaError::InUse { .. })));
        let known = directory.lock.try_clone().unwrap();
        drop(directory);
        drop(Directory::take(&path).unwrap());
        drop(known);
        std::fs::remove_dir_all(&path).unwrap();
    }

    /// Files of `smr backing=` were 0644 in a directory of 0755: any local user read the disk.
    #[test]
    fn a_disk_that_other_users_could_read_is_its_owners_alone_after_an_opening() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let name = format!("blockyard-smr-modes-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let modes = || {
            let files = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path());
            let all = files.chain([path.clone()]);
            all.map(|path| (path.metadata().unwrap().mode() & 0o777, path)).collect::<Vec<_>>()
        };
        let geometry = super::super::MediaGeometry {
            bytes: 4 << 20,
            zone_bytes: 1 << 20,
            zone_capacity_bytes: 1 << 20,
            conventional_zones: 0,
            block_bytes: 4096,
        };
        let options = super::super::Options::new(geometry);
        for _ in 0..2 {
            drop(super::super::Files::open(&path, &options).unwrap());
            assert!(modes().len() > 3, "the directory, the lock, data and states of zones");
            for (mode, path) in modes() {
                assert_eq!(mode, if path.is_dir() { 0o700 } else { 0o600 }, "{}", path.display());
                let loose = if path.is_dir() { 0o755 } else { 0o644 };
                std::fs::set_permissions(&path, PermissionsExt::from_mode(loose)).unwrap();
            }
        }
        std::fs::remove_dir_all(&path).unwrap();
    }
}

//! The registry of files that a daemon makes and removes at its end, so that an immediate exit can
//! remove them too.
#![allow(clippy::disallowed_types)] // The list is control plane.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// Sockets, the file with the process id, the directory for temporary files, a mount.
///
/// Their owners also remove them, before the daemon has ended. By then the next daemon may have put
/// its own files at these paths, so a file is identified by its inode too, not only by its path.
#[derive(Debug, Default)]
pub struct CleanupRegistry {
    files: Mutex<Vec<(PathBuf, Identity)>>,
    /// Mounts, identified by the mounted file system, not by the directory below it.
    mounts: Mutex<Vec<(PathBuf, Identity)>>,
}

/// The identity of a file, which differs from that of a file that replaced it. An inode number can
/// be reused after the file is removed; the time of birth, if the file system has it, then differs.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    number: u64,
    born: Option<SystemTime>,
}

impl Identity {
    fn of(metadata: &Metadata) -> Identity {
        let (device, number) = (metadata.dev(), metadata.ino());
        Identity { device, number, born: metadata.created().ok() }
    }
}

impl CleanupRegistry {
    /// Registers a file. One that does not exist is ignored.
    pub fn add(&self, path: impl Into<PathBuf>) {
        self.insert(path.into(), usize::MAX);
    }

    /// Registers a directory that contains files that were registered before.
    pub fn add_first(&self, path: impl Into<PathBuf>) {
        self.insert(path.into(), 0);
    }

    /// Registers a directory with a mounted file system of this process.
    pub fn add_mount(&self, path: impl Into<PathBuf>) {
        let path = path.into();
        let Ok(metadata) = std::fs::symlink_metadata(&path) else { return };
        let mut noted = self.mounts.lock().unwrap_or_else(PoisonError::into_inner);
        noted.push((path, Identity::of(&metadata)));
    }

    fn insert(&self, path: PathBuf, index: usize) {
        let Ok(metadata) = std::fs::symlink_metadata(&path) else { return };
        let mut noted = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let index = index.min(noted.len());
        noted.insert(index, (path, Identity::of(&metadata)));
    }

    /// Takes everything out of the registry.
    pub(crate) fn take(&self) -> CleanupRegistry {
        let files = std::mem::take(&mut *self.files.lock().unwrap_or_else(PoisonError::into_inner));
        let mounts =
            std::mem::take(&mut *self.mounts.lock().unwrap_or_else(PoisonError::into_inner));
        CleanupRegistry { files: Mutex::new(files), mounts: Mutex::new(mounts) }
    }

    /// Puts back what [`CleanupRegistry::take`] took.
    pub(crate) fn put(&self, taken: CleanupRegistry) {
        let CleanupRegistry { files, mounts } = taken;
        let inner = |it: Mutex<_>| it.into_inner().unwrap_or_else(PoisonError::into_inner);
        *self.files.lock().unwrap_or_else(PoisonError::into_inner) = inner(files);
        *self.mounts.lock().unwrap_or_else(PoisonError::into_inner) = inner(mounts);
    }

    /// Removes the registered files that still exist, the latest first.
    pub fn remove(&self) {
        let mounts =
            std::mem::take(&mut *self.mounts.lock().unwrap_or_else(PoisonError::into_inner));
        for (path, identity) in mounts {
            // The root of another mount has another device number, and so has the directory below.
            let metadata = std::fs::symlink_metadata(&path);
            if metadata.is_ok_and(|metadata| Identity::of(&metadata) == identity) {
                // A failed unmount must not keep the process from ending.
                let _ = blockyard_os::detach(&path);
            }
        }
        let noted = std::mem::take(&mut *self.files.lock().unwrap_or_else(PoisonError::into_inner));
        noted.iter().rev().for_each(|(path, identity)| remove(path, identity));
    }
}

fn remove(path: &Path, identity: &Identity) {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return };
    if Identity::of(&metadata) != *identity {
        return;
    }
    // A failed removal must not keep the process from ending.
    let _ = if metadata.is_dir() { std::fs::remove_dir(path) } else { std::fs::remove_file(path) };
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::paths::TempDir;

    #[test]
    fn a_directory_goes_after_what_is_in_it() {
        let temp = TempDir::new().unwrap();
        let (inner, cleanup) = (temp.path().join("inner"), CleanupRegistry::default());
        std::fs::create_dir(&inner).unwrap();
        std::fs::write(inner.join("file"), "x").unwrap();
        cleanup.add(inner.join("file"));
        cleanup.add(inner.join("gone"));
        cleanup.add_first(&inner);
        cleanup.remove();
        assert!(!inner.exists());
    }

    #[test]
    fn a_file_that_took_the_place_of_another_stays() {
        // The bug: the first signal had removed the socket and waited for clients; a second signal
        // then removed the socket of the next daemon.
        let temp = TempDir::new().unwrap();
        let (path, cleanup) = (temp.path().join("nbd.sock"), CleanupRegistry::default());
        let first = UnixListener::bind(&path).unwrap();
        cleanup.add(&path);
        // Moved, not removed: its inode number cannot be reused.
        std::fs::rename(&path, temp.path().join("old")).unwrap();
        let second = UnixListener::bind(&path).unwrap();
        cleanup.remove();
        assert!(path.exists());
        drop((first, second));
    }

    #[test]
    fn a_file_that_was_changed_goes() {
        let temp = TempDir::new().unwrap();
        let (path, cleanup) = (temp.path().join("pid"), CleanupRegistry::default());
        std::fs::write(&path, "1").unwrap();
        cleanup.add(&path);
        std::fs::write(&path, "2").unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        cleanup.remove();
        assert!(!path.exists());
    }
}

//! Files that a daemon makes and takes away in the end: known in one place, so that an end in haste
//! takes them away too.
#![allow(clippy::disallowed_types)] // The list is control plane.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// Sockets, the file with the process id, the directory for temporary files, a mount.
///
/// Their owners take them away too, before the daemon has ended. The next one may have put files of
/// its own at the same paths by then: so a file is known by what it is, not only by its path.
#[derive(Debug, Default)]
pub struct Litter {
    files: Mutex<Vec<(PathBuf, Identity)>>,
    /// By what is mounted there, not by the directory below.
    mounts: Mutex<Vec<(PathBuf, Identity)>>,
}

/// What tells a file from one that took its place. A number can be given again when the file is
/// gone; the time of birth, where the file system has it, then differs.
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

impl Litter {
    /// Notes a file. One that is not there is gone already.
    pub fn add(&self, path: impl Into<PathBuf>) {
        self.insert(path.into(), usize::MAX);
    }

    /// Notes a directory that holds what was noted before.
    pub fn add_first(&self, path: impl Into<PathBuf>) {
        self.insert(path.into(), 0);
    }

    /// Notes a directory with a file system of ours mounted on it.
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

    /// Removes what is there still, the latest first.
    pub fn remove(&self) {
        let mounts =
            std::mem::take(&mut *self.mounts.lock().unwrap_or_else(PoisonError::into_inner));
        for (path, identity) in mounts {
            // The root of another mount has another device, and so has what was below.
            let metadata = std::fs::symlink_metadata(&path);
            if metadata.is_ok_and(|metadata| Identity::of(&metadata) == identity) {
                // What cannot be unmounted must not keep the process from ending.
                let _ = blockyard_mounts::detach(&path);
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
    // What cannot go must not keep the process from ending.
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
        let (inner, litter) = (temp.path().join("inner"), Litter::default());
        std::fs::create_dir(&inner).unwrap();
        std::fs::write(inner.join("file"), "x").unwrap();
        litter.add(inner.join("file"));
        litter.add(inner.join("gone"));
        litter.add_first(&inner);
        litter.remove();
        assert!(!inner.exists());
    }

    #[test]
    fn a_file_that_took_the_place_of_another_stays() {
        // A second signal, while the first had removed the socket and waited for clients, took the
        // socket of the next daemon away.
        let temp = TempDir::new().unwrap();
        let (path, litter) = (temp.path().join("nbd.sock"), Litter::default());
        let first = UnixListener::bind(&path).unwrap();
        litter.add(&path);
        // Moved, not removed: its number cannot be given again.
        std::fs::rename(&path, temp.path().join("old")).unwrap();
        let second = UnixListener::bind(&path).unwrap();
        litter.remove();
        assert!(path.exists());
        drop((first, second));
    }

    #[test]
    fn a_file_that_was_changed_goes() {
        let temp = TempDir::new().unwrap();
        let (path, litter) = (temp.path().join("pid"), Litter::default());
        std::fs::write(&path, "1").unwrap();
        litter.add(&path);
        std::fs::write(&path, "2").unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        litter.remove();
        assert!(!path.exists());
    }
}

//! Files that a daemon makes and takes away in the end: known in one place, so that an end in haste
//! takes them away too.
#![allow(clippy::disallowed_types)] // The list is control plane.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Sockets, the file with the process id, the directory for temporary files.
#[derive(Debug, Default)]
pub struct Litter(Mutex<Vec<PathBuf>>);

impl Litter {
    /// Notes a file.
    pub fn add(&self, path: impl Into<PathBuf>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(path.into());
    }

    /// Notes a directory that holds what was noted before.
    pub fn add_first(&self, path: impl Into<PathBuf>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(0, path.into());
    }

    /// Removes what is there, the latest first.
    pub fn remove(&self) {
        let paths = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        paths.iter().rev().for_each(|path| remove(path));
    }
}

fn remove(path: &Path) {
    // What is gone already, or cannot go, must not keep the process from ending.
    let _ = if path.is_dir() { std::fs::remove_dir(path) } else { std::fs::remove_file(path) };
}

#[cfg(test)]
mod tests {
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
}

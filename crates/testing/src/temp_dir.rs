//! A temporary directory of a test.
// The paths of a test come from any of its threads.
#![allow(clippy::disallowed_types)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A directory that is removed when dropped.
#[derive(Debug)]
pub struct TempDir {
    path: PathBuf,
    next: Mutex<u32>,
}

impl TempDir {
    /// Makes an empty directory below `parent`, named after the test and the process. Removes what
    /// a killed process with the same number left there.
    ///
    /// # Panics
    /// If the directory cannot be made.
    pub fn new(parent: &Path, name: &str) -> TempDir {
        let path = parent.join(format!("{name}-{}", std::process::id()));
        _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a test can make its directory");
        TempDir { path, next: Mutex::new(0) }
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path in the directory that was not returned before.
    ///
    /// # Panics
    /// If another thread has panicked here.
    pub fn fresh(&self) -> PathBuf {
        let mut next = self.next.lock().expect("no thread panics with the number");
        *next += 1;
        self.path.join(next.to_string())
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.path);
    }
}

//! A temporary directory for tests.
#![allow(dead_code, unreachable_pub, clippy::disallowed_types, clippy::unwrap_used)] // Test code.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A directory that is removed when dropped.
pub struct Place {
    path: PathBuf,
    next: Mutex<u32>,
}

impl Place {
    /// Makes an empty directory, named after the test and the process.
    pub fn new(under: &Path, name: &str) -> Place {
        let path = under.join(format!("{name}-{}", std::process::id()));
        _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Place { path, next: Mutex::new(0) }
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path in the directory that was not used before.
    pub fn fresh(&self) -> PathBuf {
        let mut next = self.next.lock().unwrap();
        *next += 1;
        self.path.join(next.to_string())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.path);
    }
}

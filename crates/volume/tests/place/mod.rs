//! A directory for tests, which goes with them.
#![allow(dead_code, unreachable_pub, clippy::disallowed_types, clippy::unwrap_used)] // A test may.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A directory.
pub struct Place {
    path: PathBuf,
    next: Mutex<u32>,
}

impl Place {
    /// An empty one, named after the process.
    pub fn new(under: &Path, name: &str) -> Place {
        let path = under.join(format!("{name}-{}", std::process::id()));
        _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Place { path, next: Mutex::new(0) }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path in it that nobody has had.
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

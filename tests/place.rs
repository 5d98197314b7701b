//! A temporary folder that belongs to one test.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, process};

/// A folder that goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Place(PathBuf);

impl Place {
    /// A new folder. Its path is short: a socket's path has room for 107 bytes.
    pub(crate) fn new() -> Place {
        static MADE: AtomicU32 = AtomicU32::new(0);
        loop {
            // Relaxed: only the number itself matters.
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            let path = env::temp_dir().join(format!("blockyard-{}-{number}", process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Place(path),
                // A process of the same number has left it, some time ago.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => panic!("{}: {error}", path.display()),
            }
        }
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The path of a file in the folder, as text.
    pub(crate) fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("temporary folders have plain names").into()
    }

    /// Writes a file into the folder and returns its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        let path = self.file(name);
        fs::write(&path, text).unwrap_or_else(|error| panic!("{path}: {error}"));
        path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // What cannot be removed lies in the folder for temporary files, where it may lie.
        let _ = fs::remove_dir_all(&self.0);
    }
}

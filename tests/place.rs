//! A temporary folder that belongs to one test.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, process};

use crate::left;

/// A folder that is removed on drop.
#[derive(Debug)]
pub(crate) struct Place {
    path: PathBuf,
    /// While this lock is held, no other process removes the folder.
    _held: File,
}

impl Place {
    /// Makes a new folder. Its path is short: the path of a socket has at most 107 bytes.
    pub(crate) fn new() -> Place {
        static MADE: AtomicU32 = AtomicU32::new(0);
        static TAKEN_AWAY: Once = Once::new();
        TAKEN_AWAY.call_once(left::take_away);
        loop {
            // Relaxed: only the number itself matters.
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            let name = format!("{}{}-{number}", left::PREFIX, process::id());
            let path = env::temp_dir().join(name);
            match fs::create_dir(&path) {
                Ok(()) => {
                    // Another process may take the folder for a remainder and remove it before it
                    // is locked.
                    if let Some(held) = left::hold(&path) {
                        return Place { path, _held: held };
                    }
                }
                // Left by an earlier process of this number.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => panic!("{}: {error}", path.display()),
            }
        }
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file in the folder, as text.
    pub(crate) fn file(&self, name: &str) -> String {
        self.path.join(name).to_str().expect("temporary folders have plain names").into()
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
        // A folder that cannot be removed stays among the temporary files.
        let _ = fs::remove_dir_all(&self.path);
    }
}

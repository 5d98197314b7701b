//! A temporary folder that belongs to one test.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, process};

use crate::left;

/// A folder that goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    path: PathBuf,
    /// As long as it is, nobody else takes the folder away.
    _held: File,
}

impl Place {
    /// A new folder. Its path is short: a socket's path has room for 107 bytes.
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
                    // Another process may be faster, which takes it for one that was left.
                    if let Some(held) = left::hold(&path) {
                        return Place { path, _held: held };
                    }
                }
                // A process of the same number has left it, some time ago.
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
        // What cannot be removed lies in the folder for temporary files, where it may lie.
        let _ = fs::remove_dir_all(&self.path);
    }
}

//! A directory of a run's own, which is removed when the run ends.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::error::LabError;

/// The number of names that are tried.
const TRIES: usize = 16;

/// The most directories in a scratch directory at a time.
const FOLDERS_MAX: u32 = 1000;

/// A new directory in a scratch directory, for one server.
///
/// # Errors
/// If it cannot be made, or there are too many.
pub fn folder(scratch: &Path) -> Result<PathBuf, LabError> {
    for number in 0..FOLDERS_MAX {
        let folder = scratch.join(format!("server{number}"));
        match fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(LabError::io(folder.display().to_string())(error)),
        }
    }
    Err(LabError::failed(scratch.display().to_string(), "it is full of servers' directories"))
}

/// A directory that is removed on drop.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// A new directory, for this user only, in the directory for temporary files. Its path is
    /// short, because the path of a socket has at most 107 bytes.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new() -> Result<Scratch, LabError> {
        Scratch::within(&std::env::temp_dir())
    }

    /// A new directory, for this user only, in `directory`.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn within(directory: &Path) -> Result<Scratch, LabError> {
        let mut last = None;
        for _ in 0..TRIES {
            let name = format!("by-lab-{:08x}", fastrand::u32(..));
            let path = directory.join(name);
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Scratch { path }),
                Err(error) => last = Some((path, error)),
            }
        }
        let (path, error) = last.expect("it was tried at least once");
        Err(LabError::Io { what: path.display().to_string(), source: error })
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A directory that cannot be removed stays among the temporary files.
        let _ = fs::remove_dir_all(&self.path);
    }
}

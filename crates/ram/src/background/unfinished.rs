//! A file that has its name only when it is whole.

use std::fs::{File, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Its owner alone reads it: it holds a disk's contents.
const MODE: u32 = 0o600;

/// A file beside the one that it is to be. It is locked while somebody writes it, so that one whose
/// writer was killed is taken over by the next one.
pub(super) struct Unfinished {
    path: PathBuf,
    into: PathBuf,
    has_name: bool,
}

impl Unfinished {
    /// An empty file beside `into`.
    ///
    /// # Errors
    /// If it cannot be made, or somebody else writes it now.
    pub(super) fn beside(into: &Path) -> io::Result<(Unfinished, File)> {
        let mut name = into.file_name().ok_or(ErrorKind::IsADirectory)?.to_owned();
        name.push(".unfinished");
        let path = into.with_file_name(name);
        loop {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false).mode(MODE);
            let file = options.open(&path)?;
            file.try_lock().map_err(|error| match error {
                TryLockError::WouldBlock => {
                    let what = format!("{} is being written by somebody else", path.display());
                    io::Error::new(ErrorKind::ResourceBusy, what)
                }
                TryLockError::Error(error) => error,
            })?;
            let opened = file.metadata()?;
            if !opened.is_file() {
                let what = format!("{} is no regular file", path.display());
                return Err(io::Error::new(ErrorKind::InvalidInput, what));
            }
            // Whoever had it before may have finished it since it was opened: then it has its own
            // name by now, and is not to be touched.
            let is_there = std::fs::metadata(&path)
                .is_ok_and(|found| (found.dev(), found.ino()) == (opened.dev(), opened.ino()));
            if is_there {
                file.set_permissions(Permissions::from_mode(MODE))?;
                file.set_len(0)?;
                return Ok((Unfinished { path, into: into.to_owned(), has_name: false }, file));
            }
        }
    }

    /// Gives the file its name, durably.
    ///
    /// # Errors
    /// If it cannot be made durable or renamed.
    pub(super) fn finish(mut self, file: &File) -> io::Result<()> {
        file.sync_all()?;
        std::fs::rename(&self.path, &self.into)?;
        self.has_name = true;
        let folder = match self.into.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        File::open(folder)?.sync_all()
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.has_name {
            // It is of no use; if it stays, the next one takes it over.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A folder of its own, removed in the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("blockyard-unfinished-{name}-{}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            std::fs::create_dir_all(&folder).unwrap();
            Folder(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_a_killed_writer_left_is_taken_over() {
        let folder = Folder::new("killed");
        let into = folder.0.join("disk");
        std::fs::write(folder.0.join("disk.unfinished"), [7; 100]).unwrap();
        let (unfinished, mut file) = Unfinished::beside(&into).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 0, "what was left is gone");
        file.write_all(b"whole").unwrap();
        unfinished.finish(&file).unwrap();
        assert_eq!(std::fs::read(&into).unwrap(), b"whole");
        assert_eq!(std::fs::metadata(&into).unwrap().mode() & 0o777, MODE);
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
    }

    #[test]
    fn one_writes_at_a_time_and_what_is_given_up_goes() {
        let folder = Folder::new("one");
        let into = folder.0.join("disk");
        let first = Unfinished::beside(&into).unwrap();
        let refused = Unfinished::beside(&into).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ResourceBusy);
        assert!(refused.to_string().contains("disk.unfinished is being written"), "{refused}");
        drop(first);
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
        // The next one is a file of its own, whatever becomes of the name of the first.
        let (first, file) = Unfinished::beside(&into).unwrap();
        first.finish(&file).unwrap();
        let (second, mut other) = Unfinished::beside(&into).unwrap();
        other.write_all(b"second").unwrap();
        assert_eq!(std::fs::read(&into).unwrap(), b"");
        second.finish(&other).unwrap();
        assert_eq!(std::fs::read(&into).unwrap(), b"second");
    }
}

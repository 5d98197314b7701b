//! A file that has its name only when it is whole.

use std::fs::{File, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Its owner alone reads it: it holds a disk's contents.
const MODE: u32 = 0o600;
/// What a zstd dictionary begins with.
const DICTIONARY_MAGIC: [u8; 4] = 0xec30_a437_u32.to_le_bytes();

/// A file beside the one that it is to be. It is locked while somebody writes it, so that one whose
/// writer was killed is taken over by the next one.
#[derive(Debug)]
pub(super) struct Unfinished {
    path: PathBuf,
    into: PathBuf,
    has_name: bool,
    /// Closed last, and the lock given up with it: nobody takes the name over while it is removed.
    file: File,
}

impl Unfinished {
    /// An empty file beside `into`.
    ///
    /// # Errors
    /// If it cannot be made, somebody else writes it now, or there is something of that name that
    /// nobody has left here.
    pub(super) fn beside(into: &Path) -> io::Result<Unfinished> {
        let mut name = into.file_name().ok_or(ErrorKind::IsADirectory)?.to_owned();
        name.push(".unfinished");
        let path = into.with_file_name(name);
        loop {
            let file = open(&path)?;
            file.try_lock().map_err(|error| match error {
                TryLockError::WouldBlock => {
                    let what = format!("{} is being written by somebody else", path.display());
                    io::Error::new(ErrorKind::ResourceBusy, what)
                }
                TryLockError::Error(error) => error,
            })?;
            let opened = file.metadata()?;
            if !opened.is_file() {
                return Err(not_ours(&path, "is no regular file"));
            }
            // Whoever had it before may have finished it since it was opened: then it has its own
            // name by now, and is not to be touched.
            let is_there = std::fs::symlink_metadata(&path)
                .is_ok_and(|found| (found.dev(), found.ino()) == (opened.dev(), opened.ino()));
            if is_there {
                if opened.len() > 0 && !was_left_by_us(&file) {
                    return Err(not_ours(&path, "was not left by a save that was cut short"));
                }
                file.set_permissions(Permissions::from_mode(MODE))?;
                file.set_len(0)?;
                let into = into.to_owned();
                return Ok(Unfinished { path, into, has_name: false, file });
            }
        }
    }

    /// What is written.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name, durably.
    ///
    /// # Errors
    /// If it cannot be made durable or renamed.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, &self.into)?;
        self.has_name = true;
        let folder = match self.into.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        File::open(folder)?.sync_all()
    }
}

/// Opens the file, or makes it. A link of that name is not followed: whoever may write to the
/// folder could have it lead anywhere. Nor is a pipe waited for.
fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(MODE);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => not_ours(path, "is a symbolic link"),
        Some(libc::ENXIO) => not_ours(path, "is no regular file"),
        _ => error,
    })
}

/// Whether a file begins as what is written here, a snapshot or a zstd dictionary, or holds zeros
/// only: a power cut leaves those where a length was durable and what had been written was not.
fn was_left_by_us(file: &File) -> bool {
    let mut start = [0; 8];
    // A writer that was killed early has left fewer.
    let Ok(len) = file.read_at(&mut start, 0) else { return false };
    let begins = |magic: &[u8]| start[..len.min(magic.len())] == magic[..len.min(magic.len())];
    begins(&crate::snapshot::MAGIC) || begins(&DICTIONARY_MAGIC) || holds_zeros(file)
}

/// Looks no further than the first byte that is none.
fn holds_zeros(file: &File) -> bool {
    let (mut piece, mut at) = (vec![0; 1 << 20], 0);
    loop {
        match file.read_at(&mut piece, at) {
            Ok(0) => return true,
            Ok(len) if piece[..len].iter().all(|byte| *byte == 0) => at += len as u64,
            Ok(_) => return false,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
}

fn not_ours(path: &Path, what: &str) -> io::Error {
    let what = format!("{} {what}; it is in the way", path.display());
    io::Error::new(ErrorKind::InvalidInput, what)
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
        let zeros = vec![0; 3 << 20];
        let magic = &crate::snapshot::MAGIC;
        let starts = [&magic[..], &magic[..3], &DICTIONARY_MAGIC, &zeros[..3], &zeros];
        for start in starts {
            std::fs::write(folder.0.join("disk.unfinished"), start).unwrap();
            let unfinished = Unfinished::beside(&into).unwrap();
            assert_eq!(unfinished.file().metadata().unwrap().len(), 0, "what was left is gone");
            unfinished.file().write_all(b"whole").unwrap();
            unfinished.finish().unwrap();
            assert_eq!(std::fs::read(&into).unwrap(), b"whole");
            assert_eq!(std::fs::metadata(&into).unwrap().mode() & 0o777, MODE);
            assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
        }
    }

    #[test]
    fn what_somebody_else_has_put_there_is_left_alone() {
        let folder = Folder::new("other");
        let (into, beside) = (folder.0.join("disk"), folder.0.join("disk.unfinished"));
        let victim = folder.0.join("victim");
        std::fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, &beside).unwrap();
        let refused = Unfinished::beside(&into).unwrap_err().to_string();
        assert!(refused.contains("disk.unfinished is a symbolic link"), "{refused}");
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
        std::fs::remove_file(&beside).unwrap();
        std::fs::write(&beside, "somebody's own").unwrap();
        let refused = Unfinished::beside(&into).unwrap_err().to_string();
        assert!(refused.contains("was not left by a save"), "{refused}");
        assert_eq!(std::fs::read(&beside).unwrap(), b"somebody's own");
        let mut late = vec![0; 3 << 20];
        late.push(1);
        std::fs::write(&beside, &late).unwrap();
        let refused = Unfinished::beside(&into).unwrap_err().to_string();
        assert!(refused.contains("was not left by a save"), "{refused}");
        assert!(std::fs::read(&beside).unwrap() == late);
        std::fs::remove_file(&beside).unwrap();
        std::fs::create_dir(&beside).unwrap();
        assert!(Unfinished::beside(&into).is_err());
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
        Unfinished::beside(&into).unwrap().finish().unwrap();
        let second = Unfinished::beside(&into).unwrap();
        second.file().write_all(b"second").unwrap();
        assert_eq!(std::fs::read(&into).unwrap(), b"");
        second.finish().unwrap();
        assert_eq!(std::fs::read(&into).unwrap(), b"second");
    }
}

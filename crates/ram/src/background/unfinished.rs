//! A file that gets its final name only when it is complete.

use std::fs::{File, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Readable by the owner only: the file holds the contents of a disk.
const MODE: u32 = 0o600;
/// The first bytes of a zstd dictionary.
pub(super) const DICTIONARY_MAGIC: [u8; 4] = 0xec30_a437_u32.to_le_bytes();

/// Which existing files a save may replace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replace {
    /// An empty file, or one that starts like a save of this kind.
    #[default]
    Own,
    /// Any regular file.
    Any,
}

/// A temporary file in the directory of the target. The writer holds a lock on it, so that the next
/// save can take over the file of a writer that was killed.
#[derive(Debug)]
pub(super) struct Unfinished {
    path: PathBuf,
    into: PathBuf,
    has_name: bool,
    /// Closed last, which releases the lock: no other save can take the name over during its
    /// removal.
    file: File,
}

impl Unfinished {
    /// Creates an empty temporary file for `into`. A complete file starts with `magic`.
    ///
    /// # Errors
    /// If the file cannot be created, or another save is writing it. If a file of its name was not
    /// left by a save, or `into` holds something else and must not be replaced.
    pub(super) fn beside(into: &Path, replace: Replace, magic: &[u8]) -> io::Result<Unfinished> {
        check_replaced(into, replace, magic)?;
        let mut name = into.file_name().ok_or(ErrorKind::IsADirectory)?.to_owned();
        name.push(".unfinished");
        let path = into.with_file_name(name);
        loop {
            let file = open(&path)?;
            file.try_lock().map_err(|error| match error {
                TryLockError::WouldBlock => {
                    let what = format!("{} is being written by another process", path.display());
                    io::Error::new(ErrorKind::ResourceBusy, what)
                }
                TryLockError::Error(error) => error,
            })?;
            let opened = file.metadata()?;
            if !opened.is_file() {
                return Err(not_ours(&path, "is no regular file"));
            }
            // The previous owner of the lock may have renamed the file since this open. Then the
            // file has its final name and must not be touched.
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

    /// The temporary file to write to.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Syncs the file, renames it to the target, and syncs the directory.
    ///
    /// # Errors
    /// If the file or its name cannot be made durable, or the rename fails.
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

/// Refuses to replace a file that no save has made. Never replaces anything but a regular file: a
/// rename would put a file in the place of a device node.
fn check_replaced(into: &Path, replace: Replace, magic: &[u8]) -> io::Result<()> {
    let refused = |what: &str| Err(io::Error::new(ErrorKind::AlreadyExists, what.to_owned()));
    match std::fs::symlink_metadata(into) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(found) if !found.is_file() => return refused("it is no regular file"),
        Ok(found) if found.len() == 0 || replace == Replace::Any => return Ok(()),
        Ok(_) => {}
    }
    let mut start = [0; 8];
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(into)?;
    let len = file.read_at(&mut start, 0)?;
    match start[..len].starts_with(magic) {
        true => Ok(()),
        false => refused("it holds something that no save has written; force replaces it"),
    }
}

/// Opens the file, or creates it. Does not follow a symbolic link: a user with write access to the
/// directory could point it anywhere. Does not wait for the other end of a FIFO.
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

/// Whether a save left this file: it starts as a snapshot or a zstd dictionary does, or holds only
/// zeros. A power cut leaves zeros if the file's length was durable and its data was not.
fn was_left_by_us(file: &File) -> bool {
    let mut start = [0; 8];
    // A writer that was killed early has left fewer than 8 bytes.
    let Ok(len) = file.read_at(&mut start, 0) else { return false };
    let begins = |magic: &[u8]| start[..len.min(magic.len())] == magic[..len.min(magic.len())];
    begins(&crate::snapshot::MAGIC) || begins(&DICTIONARY_MAGIC) || holds_zeros(file)
}

/// Whether the file has only zeros; stops at the first other byte.
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
            // The file is useless; if the removal fails, the next save takes the file over.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn begin(into: &Path) -> io::Result<Unfinished> {
        Unfinished::beside(into, Replace::Any, &crate::snapshot::MAGIC)
    }

    /// Regression: `ram save r0 /etc/passwd` replaced that file.
    #[test]
    fn what_no_save_has_written_is_replaced_by_force_alone() {
        let folder = Folder::new("replaced");
        let into = folder.0.join("disk");
        let own = |into: &Path| Unfinished::beside(into, Replace::Own, &crate::snapshot::MAGIC);
        std::fs::write(&into, "root:x:0:0").unwrap();
        let refused = own(&into).unwrap_err().to_string();
        assert!(refused.contains("no save has written; force replaces it"), "{refused}");
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
        assert_eq!(std::fs::read(&into).unwrap(), b"root:x:0:0");
        begin(&into).unwrap();
        for ours in [&b""[..], &crate::snapshot::MAGIC] {
            std::fs::write(&into, ours).unwrap();
            own(&into).unwrap();
        }
        std::fs::remove_file(&into).unwrap();
        std::os::unix::fs::symlink("/dev/null", &into).unwrap();
        assert!(begin(&into).is_err(), "a link is not replaced");
    }

    /// A temporary directory, removed on drop.
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
            let unfinished = begin(&into).unwrap();
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
        let refused = begin(&into).unwrap_err().to_string();
        assert!(refused.contains("disk.unfinished is a symbolic link"), "{refused}");
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
        std::fs::remove_file(&beside).unwrap();
        std::fs::write(&beside, "somebody's own").unwrap();
        let refused = begin(&into).unwrap_err().to_string();
        assert!(refused.contains("was not left by a save"), "{refused}");
        assert_eq!(std::fs::read(&beside).unwrap(), b"somebody's own");
        let mut late = vec![0; 3 << 20];
        late.push(1);
        std::fs::write(&beside, &late).unwrap();
        let refused = begin(&into).unwrap_err().to_string();
        assert!(refused.contains("was not left by a save"), "{refused}");
        assert!(std::fs::read(&beside).unwrap() == late);
        std::fs::remove_file(&beside).unwrap();
        std::fs::create_dir(&beside).unwrap();
        assert!(begin(&into).is_err());
    }

    #[test]
    fn one_writes_at_a_time_and_what_is_given_up_goes() {
        let folder = Folder::new("one");
        let into = folder.0.join("disk");
        let first = begin(&into).unwrap();
        let refused = begin(&into).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ResourceBusy);
        assert!(refused.to_string().contains("disk.unfinished is being written"), "{refused}");
        drop(first);
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
        // The next save creates a new file and never touches the renamed one.
        begin(&into).unwrap().finish().unwrap();
        let second = begin(&into).unwrap();
        second.file().write_all(b"second").unwrap();
        assert_eq!(std::fs::read(&into).unwrap(), b"");
        second.finish().unwrap();
        assert_eq!(std::fs::read(&into).unwrap(), b"second");
    }
}

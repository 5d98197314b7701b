//! A file that has its name only when it is complete.

use std::fs::{File, Metadata, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use blockyard_core::owner_only;
use tempfile::{Builder, NamedTempFile};

/// Suffix of the temporary file of a file that is being written.
pub const UNFINISHED: &str = ".blockyard-unfinished";

/// Which existing files a command may replace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replace {
    /// An empty file, or one that begins with the magic bytes of the files that the command writes.
    #[default]
    Own,
    /// Any regular file.
    Any,
}

/// A file that is written under a temporary name in the directory of its target, and renamed when
/// it is complete. Dropping it before removes the temporary file.
///
/// The name of the temporary file is fixed, and its writer holds a lock on it. So two writers of
/// one target exclude each other, and a writer takes over the file that a killed one left.
#[derive(Debug)]
pub struct AtomicFile {
    /// Closed after the removal of its name, which releases the lock: no other writer can take the
    /// name over during the removal.
    temporary: NamedTempFile,
    target: PathBuf,
    /// Whether there was no target. Then the rename does not replace one.
    is_new: bool,
}

impl AtomicFile {
    /// Creates an empty temporary file for `target`, which only its owner can use. Complete files
    /// of the caller begin with `magic`, which may be empty.
    ///
    /// # Errors
    /// `AlreadyExists` if the target is not a regular file, or one that must not be replaced.
    /// `ResourceBusy` if another process is writing the target. Any error if a file of the
    /// temporary name was not left by a writer, or cannot be created.
    pub fn create(target: &Path, replace: Replace, magic: &[u8]) -> io::Result<AtomicFile> {
        let is_new = check_replaced(target, replace, magic)?;
        let mut name = target.file_name().ok_or(ErrorKind::IsADirectory)?.to_owned();
        name.push(UNFINISHED);
        let mut builder = Builder::new();
        builder.prefix(&name).rand_bytes(0);
        let temporary = builder.make_in(parent(target), |path| open(path, magic))?;
        Ok(AtomicFile { temporary, target: target.to_owned(), is_new })
    }

    /// The file to write to.
    pub fn file(&self) -> &File {
        self.temporary.as_file()
    }

    /// Gives the file the owner and the permissions of another one. Without the right to change the
    /// owner, group and others get no permissions.
    ///
    /// # Errors
    /// If the permissions cannot be changed.
    pub fn inherit(&self, from: &Metadata) -> io::Result<()> {
        let is_given = fchown(self.file(), Some(from.uid()), Some(from.gid())).is_ok();
        let most = if is_given { 0o777 } else { 0o700 };
        self.file().set_permissions(Permissions::from_mode(from.mode() & most))
    }

    /// Syncs the file, renames it to the target, and syncs the directory.
    ///
    /// # Errors
    /// `AlreadyExists` if another process has made a target meanwhile. Otherwise if the file or its
    /// name cannot be made durable, or the rename fails.
    pub fn commit(self) -> io::Result<()> {
        let AtomicFile { temporary, target, is_new } = self;
        temporary.as_file().sync_all()?;
        match is_new {
            true => temporary.persist_noclobber(&target)?,
            false => temporary.persist(&target)?,
        };
        owner_only::sync_directory(parent(&target))
    }
}

/// The directory of a path.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Refuses to replace a file that the caller has not made; returns whether there is none. Refuses
/// everything but a regular file: a rename would put a file in the place of a device node.
fn check_replaced(target: &Path, replace: Replace, magic: &[u8]) -> io::Result<bool> {
    let refused = |what: &str| Err(io::Error::new(ErrorKind::AlreadyExists, what.to_owned()));
    match std::fs::symlink_metadata(target) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
        Ok(found) if !found.is_file() => return refused("it is no regular file"),
        Ok(found) if found.len() == 0 || replace == Replace::Any => return Ok(false),
        Ok(_) => {}
    }
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(target)?;
    let mut start = vec![0; magic.len()];
    let is_ours = !magic.is_empty() && file.read_exact_at(&mut start, 0).is_ok() && start == magic;
    match is_ours {
        true => Ok(false),
        false => refused("it was not written by Blockyard; force replaces it"),
    }
}

/// Opens, locks and empties the temporary file, or creates it. Follows no symbolic link, which a
/// user with write access to the directory could point anywhere. Does not wait for the other end of
/// a FIFO.
fn open(path: &Path, magic: &[u8]) -> io::Result<File> {
    loop {
        let mut options = owner_only::make_options();
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = options.open(path).map_err(|error| match error.raw_os_error() {
            Some(libc::ELOOP) => not_ours(path, "is a symbolic link"),
            Some(libc::ENXIO) => not_ours(path, "is no regular file"),
            _ => error,
        })?;
        // Some file systems have no locks.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            let what = format!("{} is being written by another process", path.display());
            return Err(io::Error::new(ErrorKind::ResourceBusy, what));
        }
        let opened = file.metadata()?;
        if !opened.is_file() {
            return Err(not_ours(path, "is no regular file"));
        }
        // The previous owner of the lock may have renamed the file since this open. Then the file
        // has its final name and must not be touched.
        let is_there = std::fs::symlink_metadata(path)
            .is_ok_and(|found| (found.dev(), found.ino()) == (opened.dev(), opened.ino()));
        if !is_there {
            continue;
        }
        if !was_left_by_a_writer(&file, magic) {
            return Err(not_ours(path, "was not left by a writer that was killed"));
        }
        file.set_permissions(Permissions::from_mode(owner_only::FILE_MODE))?;
        file.set_len(0)?;
        return Ok(file);
    }
}

/// Whether a writer left this file: it begins with as much of the magic bytes as it holds, or holds
/// only zeros. A power cut leaves zeros if the file's length was durable and its data was not.
fn was_left_by_a_writer(file: &File, magic: &[u8]) -> bool {
    let mut start = vec![0; magic.len()];
    let Ok(len) = file.read_at(&mut start, 0) else { return false };
    start[..len] == magic[..len] || holds_zeros(file)
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tempfile::{TempDir, tempdir};

    use super::*;

    const MAGIC: [u8; 8] = *b"MAGIC\0\0\x01";

    fn begin(into: &Path) -> io::Result<AtomicFile> {
        AtomicFile::create(into, Replace::Any, &MAGIC)
    }

    fn count(directory: &TempDir) -> usize {
        std::fs::read_dir(directory.path()).unwrap().count()
    }

    /// Regression: `ram save r0 /etc/passwd` replaced that file.
    #[test]
    fn foreign_file_is_replaced_only_by_force() {
        let folder = tempdir().unwrap();
        let into = folder.path().join("disk");
        let own = |into: &Path| AtomicFile::create(into, Replace::Own, &MAGIC);
        std::fs::write(&into, "root:x:0:0").unwrap();
        let refused = own(&into).unwrap_err().to_string();
        assert!(refused.contains("not written by Blockyard; force replaces it"), "{refused}");
        assert_eq!(count(&folder), 1);
        assert_eq!(std::fs::read(&into).unwrap(), b"root:x:0:0");
        begin(&into).unwrap();
        for ours in [&b""[..], &MAGIC] {
            std::fs::write(&into, ours).unwrap();
            own(&into).unwrap();
        }
        std::fs::remove_file(&into).unwrap();
        std::os::unix::fs::symlink("/dev/null", &into).unwrap();
        assert!(begin(&into).is_err(), "a link is not replaced");
    }

    #[test]
    fn temporary_file_of_a_killed_writer_is_taken_over() {
        let folder = tempdir().unwrap();
        let into = folder.path().join("disk");
        let zeros = vec![0; 3 << 20];
        let magic = &MAGIC;
        let starts = [&magic[..], &magic[..3], &[], &zeros[..3], &zeros];
        for start in starts {
            std::fs::write(folder.path().join("disk.blockyard-unfinished"), start).unwrap();
            let atomic = begin(&into).unwrap();
            assert_eq!(atomic.file().metadata().unwrap().len(), 0, "what was left is gone");
            atomic.file().write_all(b"whole").unwrap();
            atomic.commit().unwrap();
            assert_eq!(std::fs::read(&into).unwrap(), b"whole");
            assert_eq!(std::fs::metadata(&into).unwrap().mode() & 0o777, owner_only::FILE_MODE);
            assert_eq!(count(&folder), 1);
        }
    }

    #[test]
    fn foreign_file_of_the_temporary_name_is_not_touched() {
        let folder = tempdir().unwrap();
        let (into, temporary) =
            (folder.path().join("disk"), folder.path().join("disk.blockyard-unfinished"));
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, &temporary).unwrap();
        let refused = begin(&into).unwrap_err().to_string();
        assert!(refused.contains("disk.blockyard-unfinished is a symbolic link"), "{refused}");
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
        std::fs::remove_file(&temporary).unwrap();
        std::fs::write(&temporary, "another program's").unwrap();
        let refused = begin(&into).unwrap_err().to_string();
        assert!(refused.contains("was not left by a writer"), "{refused}");
        assert_eq!(std::fs::read(&temporary).unwrap(), b"another program's");
        let mut late = vec![0; 3 << 20];
        late.push(1);
        std::fs::write(&temporary, &late).unwrap();
        let refused = begin(&into).unwrap_err().to_string();
        assert!(refused.contains("was not left by a writer"), "{refused}");
        assert!(std::fs::read(&temporary).unwrap() == late);
        std::fs::remove_file(&temporary).unwrap();
        std::fs::create_dir(&temporary).unwrap();
        assert!(begin(&into).is_err());
    }

    #[test]
    fn writers_exclude_each_other_and_an_abandoned_file_is_removed() {
        let folder = tempdir().unwrap();
        let into = folder.path().join("disk");
        let first = begin(&into).unwrap();
        let refused = begin(&into).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ResourceBusy);
        assert!(
            refused.to_string().contains("disk.blockyard-unfinished is being written"),
            "{refused}"
        );
        drop(first);
        assert_eq!(count(&folder), 0);
        // The next save creates a new file and never touches the renamed one.
        begin(&into).unwrap().commit().unwrap();
        let second = begin(&into).unwrap();
        second.file().write_all(b"second").unwrap();
        assert_eq!(std::fs::read(&into).unwrap(), b"");
        second.commit().unwrap();
        assert_eq!(std::fs::read(&into).unwrap(), b"second");
    }

    #[test]
    fn target_made_during_the_write_is_not_replaced() {
        let folder = tempdir().unwrap();
        let into = folder.path().join("disk");
        let atomic = begin(&into).unwrap();
        std::fs::write(&into, "another program's").unwrap();
        assert_eq!(atomic.commit().unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&into).unwrap(), b"another program's");
        assert_eq!(count(&folder), 1, "the temporary file is removed");
    }

    #[test]
    fn inherited_permissions_survive_the_rename() {
        let folder = tempdir().unwrap();
        let into = folder.path().join("disk");
        std::fs::write(&into, "").unwrap();
        std::fs::set_permissions(&into, Permissions::from_mode(0o640)).unwrap();
        let atomic = begin(&into).unwrap();
        atomic.inherit(&into.metadata().unwrap()).unwrap();
        atomic.commit().unwrap();
        assert_eq!(into.metadata().unwrap().mode() & 0o777, 0o640);
    }
}

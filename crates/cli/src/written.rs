//! A file that has its name only when it is whole.

use std::fs::{File, Metadata, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{
    FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown,
};
use std::path::{Path, PathBuf};

use blockyard_core::owner_only;
use rustix::fs::OFlags;

use crate::failure::{Code, Failure};

/// Suffix of a file that is not complete yet; no other program uses it.
const UNFINISHED: &str = ".blockyard-unfinished";

/// A file that a command writes. A regular file is written under a temporary name in the same
/// directory and renamed when it is complete; it is removed if the command does not complete it.
pub(crate) struct Written<'a> {
    path: &'a Path,
    /// The temporary name and the final name; `None` for a device or a pipe.
    names: Option<(PathBuf, PathBuf)>,
    pub(crate) file: File,
    is_finished: bool,
}

/// Why something with a file failed.
pub(crate) fn file_failed(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::Failed, format!("{}: {error}", path.display()))
}

/// What may be replaced.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replace<'m> {
    /// Anything.
    pub(crate) force: bool,
    /// Otherwise a file that begins so, which this program has written; empty: none.
    pub(crate) magic: &'m [u8],
}

impl Replace<'_> {
    /// Refuses to replace what this program has not made.
    fn check(&self, path: &Path, found: &Metadata) -> Result<(), Failure> {
        let kind = found.file_type();
        let is_ours = match () {
            () if self.force => true,
            () if kind.is_block_device() => false,
            () if !kind.is_file() || found.len() == 0 => true,
            () if self.magic.is_empty() => false,
            () => {
                let mut start = vec![0; self.magic.len()];
                let read = File::open(path).and_then(|file| file.read_exact_at(&mut start, 0));
                read.is_ok() && start == self.magic
            }
        };
        if is_ours {
            return Ok(());
        }
        let what = if kind.is_file() { "file" } else { "block device" };
        let message = format!(
            "cannot write {}: the {what} is there already, and this command did not write it; \
             --force replaces it",
            path.display()
        );
        Err(Failure::new(Code::Failed, message))
    }
}

impl<'a> Written<'a> {
    pub(crate) fn create(path: &'a Path, replace: Replace<'_>) -> Result<Written<'a>, Failure> {
        let found = path.metadata().ok();
        if let Some(found) = &found {
            replace.check(path, found)?;
        }
        let names = match &found {
            Some(found) if !found.is_file() => None,
            // Where it is a link, what that leads to is replaced.
            Some(_) => Some(path.canonicalize().unwrap_or_else(|_| path.to_owned())),
            None if path.is_symlink() => {
                let error = io::Error::other("it is a link to what is not there");
                return Err(file_failed(path, &error));
            }
            None => Some(path.to_owned()),
        };
        let names = names.map(|into| {
            let mut name = into.clone().into_os_string();
            name.push(UNFINISHED);
            (PathBuf::from(name), into)
        });
        let (opened, file) = match &names {
            Some((unfinished, _)) => (unfinished.as_path(), begin(unfinished, found.as_ref())),
            // A pipe waits for its reader; a block device must have no other user.
            None => {
                let is_disk = found.is_some_and(|it| it.file_type().is_block_device());
                let flags = if is_disk { OFlags::EXCL } else { OFlags::empty() };
                let mut options = File::options();
                options.write(true).custom_flags(flags.bits().cast_signed());
                (path, options.open(path))
            }
        };
        let file = file.map_err(|error| file_failed(opened, &error))?;
        Ok(Written { path, names, file, is_finished: false })
    }

    /// Gives the file its name, durably.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        self.name().map_err(|error| file_failed(self.path, &error))
    }

    fn name(&mut self) -> io::Result<()> {
        let Some((unfinished, into)) = &self.names else {
            return or_none(self.file.sync_all());
        };
        self.file.sync_all()?;
        std::fs::rename(unfinished, into)?;
        self.is_finished = true;
        let folder = into.parent().filter(|folder| !folder.as_os_str().is_empty());
        or_none(File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all()))
    }
}

/// Not everything has a sync: a pipe has none, nor has a directory in each file system, or that may
/// be written and not read.
fn or_none(synced: io::Result<()>) -> io::Result<()> {
    use ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    match synced {
        Err(error) if [InvalidInput, PermissionDenied, Unsupported].contains(&error.kind()) => {
            Ok(())
        }
        synced => synced,
    }
}

/// Creates the temporary file, or takes over one that an interrupted command left. Follows no link.
/// The file gets the owner and the mode of the file that it replaces.
fn begin(path: &Path, replaced: Option<&Metadata>) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(owner_only::FILE_MODE);
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.custom_flags(flags.bits().cast_signed()).open(path)?;
    // Some file systems have no locks.
    let is_free = !matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    let (opened, named) = (file.metadata()?, path.symlink_metadata()?);
    // Another command may have renamed it to its final name since it was opened.
    let is_same = (opened.dev(), opened.ino()) == (named.dev(), named.ino());
    if !opened.is_file() || !is_free || !is_same {
        return Err(io::Error::other("it is not a regular file, or another process is writing it"));
    }
    owner_only::narrow(&file)?;
    file.set_len(0)?;
    if let Some(replaced) = replaced {
        let is_given = fchown(&file, Some(replaced.uid()), Some(replaced.gid())).is_ok();
        let most = if is_given { 0o777 } else { 0o700 };
        file.set_permissions(Permissions::from_mode(replaced.mode() & most))?;
    }
    Ok(file)
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        if let Some((unfinished, _)) = self.names.as_ref().filter(|_| !self.is_finished) {
            // It is of no use; if it stays, the next one takes it over.
            let _ = std::fs::remove_file(unfinished);
        }
    }
}

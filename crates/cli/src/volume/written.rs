//! A file that has its name only when it is whole.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::failure::{Code, Failure};

/// A file that is written: a regular one beside the one that it is to be, which stays as it is
/// until then; and gone again if it is not finished.
pub(super) struct Written<'a> {
    path: &'a Path,
    /// What is written and what that becomes, where it is no device or pipe.
    beside: Option<(PathBuf, PathBuf)>,
    pub(super) file: File,
    is_finished: bool,
}

/// Why something with a file failed.
pub(super) fn file_failed(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::Failed, format!("{}: {error}", path.display()))
}

impl<'a> Written<'a> {
    pub(super) fn create(path: &'a Path) -> Result<Written<'a>, Failure> {
        let beside = match path.metadata() {
            Ok(found) if !found.is_file() => None,
            // Where it is a link, what that leads to is replaced.
            _ => Some(path.canonicalize().unwrap_or_else(|_| path.to_owned())),
        };
        let beside = beside.map(|into| {
            let mut name = into.clone().into_os_string();
            name.push(".unfinished");
            (PathBuf::from(name), into)
        });
        let (opened, file) = match &beside {
            Some((unfinished, _)) => (unfinished.as_path(), begin(unfinished)),
            None => (path, File::options().read(true).write(true).open(path)),
        };
        let file = file.map_err(|error| file_failed(opened, &error))?;
        Ok(Written { path, beside, file, is_finished: false })
    }

    /// Gives the file its name, durably.
    pub(super) fn finish(mut self) -> Result<(), Failure> {
        let named = self.file.sync_all().and_then(|()| {
            let Some((unfinished, into)) = &self.beside else { return Ok(()) };
            std::fs::rename(unfinished, into)?;
            self.is_finished = true;
            match into.parent() {
                Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
                _ => File::open(".")?.sync_all(),
            }
        });
        named.map_err(|error| file_failed(self.path, &error))
    }
}

/// Makes a file that is empty, or takes one over that was left. No link is followed.
fn begin(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.custom_flags(flags.bits().cast_signed()).open(path)?;
    let is_free = file.try_lock().is_ok();
    let (opened, named) = (file.metadata()?, path.symlink_metadata()?);
    // Whoever had it may have given it its own name since it was opened.
    let is_same = (opened.dev(), opened.ino()) == (named.dev(), named.ino());
    if !opened.is_file() || !is_free || !is_same {
        return Err(io::Error::other("it is no regular file, or somebody else writes it just now"));
    }
    file.set_len(0)?;
    Ok(file)
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        if let Some((unfinished, _)) = self.beside.as_ref().filter(|_| !self.is_finished) {
            // It is of no use; if it stays, the next one takes it over.
            let _ = std::fs::remove_file(unfinished);
        }
    }
}

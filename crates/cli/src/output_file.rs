//! A file that a command writes.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use blockyard_os::AtomicFile;
use rustix::fs::OFlags;

use crate::failure::{Code, Failure};

/// A file that a command writes. A regular file is written under a temporary name in the same
/// directory and renamed when it is complete; it is removed if the command does not complete it.
pub(crate) struct OutputFile<'a> {
    path: &'a Path,
    target: Target,
}

enum Target {
    Regular(AtomicFile),
    /// A block device, a pipe or another special file, which is written in place.
    InPlace(File),
}

/// Why something with a file failed.
pub(crate) fn file_failed(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::Failed, format!("cannot write `{}`: {error}", path.display()))
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
    /// Refuses to replace what this program has not made. Returns the existing file's description.
    pub(crate) fn check(&self, path: &Path) -> Result<Option<Metadata>, Failure> {
        let Ok(found) = path.metadata() else { return Ok(None) };
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
            return Ok(Some(found));
        }
        let what = if kind.is_file() { "the file exists" } else { "it is a block device" };
        let message = format!("cannot replace {}: {what}; --force replaces it", path.display());
        Err(Failure::new(Code::Failed, message))
    }
}

impl<'a> OutputFile<'a> {
    pub(crate) fn create(path: &'a Path, replace: Replace<'_>) -> Result<OutputFile<'a>, Failure> {
        let found = replace.check(path)?;
        let target = open(path, found.as_ref(), replace.magic);
        Ok(OutputFile { path, target: target.map_err(|error| file_failed(path, &error))? })
    }

    /// The file to write to.
    pub(crate) fn file(&self) -> &File {
        match &self.target {
            Target::Regular(file) => file.file(),
            Target::InPlace(file) => file,
        }
    }

    /// Makes the file durable, and gives a regular one its name.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        let finished = match self.target {
            Target::Regular(file) => file.commit(),
            Target::InPlace(file) => sync(&file),
        };
        finished.map_err(|error| file_failed(self.path, &error))
    }
}

/// Opens the target. `found` describes the existing file, which may be replaced.
fn open(path: &Path, found: Option<&Metadata>, magic: &[u8]) -> io::Result<Target> {
    match found {
        // The target of a symbolic link is replaced, not the link.
        Some(found) if found.is_file() => {
            let target = path.canonicalize()?;
            let file = AtomicFile::create(&target, blockyard_os::Replace::Any, magic)?;
            file.inherit(found)?;
            Ok(Target::Regular(file))
        }
        // A pipe waits for its reader; a block device must have no other user.
        Some(found) => {
            let is_disk = found.file_type().is_block_device();
            let flags = if is_disk { OFlags::EXCL } else { OFlags::empty() };
            let mut options = File::options();
            options.write(true).custom_flags(flags.bits().cast_signed());
            Ok(Target::InPlace(options.open(path)?))
        }
        None if path.is_symlink() => {
            Err(io::Error::other("it is a symbolic link to a file that does not exist"))
        }
        None => AtomicFile::create(path, blockyard_os::Replace::Own, magic).map(Target::Regular),
    }
}

/// Syncs a file, if it can be synced: a pipe cannot.
fn sync(file: &File) -> io::Result<()> {
    match file.sync_all() {
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
            Ok(())
        }
        synced => synced,
    }
}

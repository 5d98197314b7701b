//! A directory that this process has for itself: the pool's files are in it, one for each segment.
//!
//! It is held open, and names are looked for in what is held: a directory that is moved or renamed
//! meanwhile is the same one, and one that was removed is noticed.

use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::lock::Lock;
use super::{Purpose, RealFile, StoreFile};
use crate::buffer::Memory;
use crate::error::VolumeError;
use crate::format::superblock;
use crate::holder::Holder;

/// The file that is locked.
const LOCK: &str = "lock";

/// Zeros that are written at once.
const ZEROS: usize = 1 << 20;

/// See the module.
#[derive(Debug)]
pub(crate) struct Folder {
    /// What names are looked for in.
    open: File,
    direct: bool,
    purpose: Purpose,
    /// Locked until it is dropped, or the process dies and its last write has landed. Not there if
    /// nobody ever was here.
    lock: Option<Arc<Lock>>,
}

impl Folder {
    /// Takes a directory that is there for this process alone.
    pub(crate) fn take(path: &Path, purpose: Purpose) -> Result<Folder, VolumeError> {
        let doing = |what: &str| format!("cannot {what} `{}`", path.display());
        let open = File::open(path).map_err(VolumeError::io(doing("open")))?;
        let (flags, what) = match purpose {
            Purpose::Look => (OFlags::RDONLY, "read"),
            _ => (OFlags::RDWR | OFlags::CREATE, "write to"),
        };
        let lock = match at(&open, LOCK, flags) {
            Ok(lock) => Some(lock),
            Err(error) if purpose == Purpose::Look && error.kind() == io::ErrorKind::NotFound => {
                None
            }
            Err(error) => return Err(VolumeError::io(doing(what))(error)),
        };
        let lock = match lock.map(Lock::take).transpose() {
            Ok(lock) => lock.map(Arc::new),
            Err(TryLockError::WouldBlock) => {
                let holder = Holder::read(&path.join(LOCK));
                return Err(VolumeError::InUse { path: path.to_owned(), holder });
            }
            Err(TryLockError::Error(error)) => return Err(VolumeError::io(doing("lock"))(error)),
        };
        // Some file systems in memory refuse this; there nothing survives a power cut anyway.
        let direct = at(&open, LOCK, OFlags::RDONLY | OFlags::DIRECT).is_ok();
        let folder = Folder { open, direct, purpose, lock };
        // Nothing depends on it, and a pool on a full disk has to open.
        if let Err(error) = folder.hold(&Holder::this(None)) {
            tracing::warn!("{}/{LOCK}: {error}", path.display());
        }
        Ok(folder)
    }

    /// What is locked as long as it is this process's.
    pub(crate) fn lock(&self) -> Option<&Arc<Lock>> {
        self.lock.as_ref()
    }

    /// Lets others know who has the directory, and where that can be asked.
    pub(crate) fn hold(&self, holder: &Holder) -> io::Result<()> {
        match &self.lock {
            Some(lock) if self.purpose != Purpose::Look => holder.write(lock),
            _ => Ok(()),
        }
    }

    /// Whether I/O goes past the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }

    /// What is free on its file system, in bytes.
    pub(crate) fn free_bytes(&self) -> io::Result<u64> {
        let space = rustix::fs::fstatvfs(&self.open)?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    }

    /// The same; `None` where the file system does not say how much there is at all.
    pub(crate) fn outside_bytes(&self) -> Option<u64> {
        let space = rustix::fs::fstatvfs(&self.open).ok().filter(|space| space.f_blocks > 0)?;
        Some(space.f_bavail.saturating_mul(space.f_frsize))
    }

    /// Fails if the pool in it was removed: what is in files that are open lasts as long as they
    /// are, and not a moment longer.
    pub(crate) fn look(&self) -> io::Result<()> {
        match rustix::fs::statat(&self.open, superblock::FILE, AtFlags::empty()) {
            Err(error @ (Errno::NOENT | Errno::STALE)) => Err(error.into()),
            // Whatever else is wrong says nothing about that.
            _ => Ok(()),
        }
    }

    fn flags(&self) -> OFlags {
        let direct = if self.direct { OFlags::DIRECT } else { OFlags::empty() };
        let access = if self.purpose == Purpose::Look { OFlags::RDONLY } else { OFlags::RDWR };
        access | direct
    }

    pub(crate) fn open(&self, name: &str) -> io::Result<Option<RealFile>> {
        match at(&self.open, name, self.flags()) {
            Ok(file) => Ok(Some(RealFile::of(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn create(&self, name: &str, len: u64) -> io::Result<RealFile> {
        let file = at(&self.open, name, self.flags() | OFlags::CREATE | OFlags::TRUNC)?;
        let empty = FallocateFlags::empty();
        match rustix::io::retry_on_intr(|| rustix::fs::fallocate(&file, empty, 0, len)) {
            Ok(()) => {}
            // No reservation there; the zeros below take the space.
            Err(Errno::OPNOTSUPP) => file.set_len(len)?,
            Err(error) => return Err(error.into()),
        }
        // An extent that was never written costs an entry in the file system's journal later.
        let zeros = Memory::new(ZEROS as u64).take_beyond(ZEROS.min(len as usize));
        let file = RealFile::of(file);
        let mut at = 0;
        while at < len {
            let part = zeros.len().min((len - at) as usize);
            file.write_at(at, &[&zeros[..part]])?;
            at += part as u64;
        }
        Ok(file)
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.open, from, &self.open, to)?)
    }

    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.open, name, AtFlags::empty()) {
            Err(error) if error != Errno::NOENT => Err(error.into()),
            _ => Ok(()),
        }
    }

    pub(crate) fn sync_names(&self) -> io::Result<()> {
        self.open.sync_all()
    }

    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        let entries = Dir::read_from(&self.open)?;
        let name = |entry: rustix::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        entries.map(|entry| Ok(name(entry?))).collect()
    }
}

/// Who is gone holds nothing.
impl Drop for Folder {
    fn drop(&mut self) {
        // What is left there counts for nothing once the lock is gone.
        _ = self.hold(&Holder::default());
    }
}

/// Opens a name in a directory.
fn at(open: &File, name: &str, flags: OFlags) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    let opened = || rustix::fs::openat(open.as_fd(), name, flags | OFlags::CLOEXEC, mode);
    Ok(rustix::io::retry_on_intr(opened)?.into())
}

/// Makes a directory, and those above it that are missing.
pub(crate) fn make(path: &Path) -> io::Result<()> {
    let missing = path.ancestors().take_while(|path| !path.exists()).count();
    std::fs::create_dir_all(path)?;
    keep_names(path, missing.max(1))
}

/// Whether a directory is not there to be synced, for whoever asks.
fn has_none(error: &io::Error) -> bool {
    let kinds = [io::ErrorKind::PermissionDenied, io::ErrorKind::InvalidInput];
    kinds.contains(&error.kind()) || error.raw_os_error() == Some(libc::EOPNOTSUPP)
}

/// Makes a name durable: it is in the directory above, which has to be synced so that it outlives a
/// power cut. What is there may have been made an instant before, or before the power was cut the
/// last time, so this is done also for what nobody has made here. The same for so many names in all
/// that lead there.
pub(crate) fn keep_names(path: &Path, count: usize) -> io::Result<()> {
    let path = path.canonicalize()?;
    for above in path.ancestors().skip(1).take(count) {
        match File::open(above).and_then(|above| above.sync_all()) {
            // Who may not read it did not make anything in it either; and some file systems have no
            // sync of a directory.
            Err(error) if has_none(&error) => {}
            synced => synced?,
        }
    }
    Ok(())
}

//! The file system: requests that need no I/O.
//!
//! There is one flat directory. The yard adds and removes its files, not a client of the mount.
//! Their sizes are the devices' and never change.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::SystemTime;

use blockyard_core::Sector;
use fuser::{Errno, FopenFlags, INodeNo};

use crate::files::{FILES_MAX, File, Files};
use crate::memory::IO_BYTES_MAX;
use crate::wire::{AttrChanges, Attributes, Call, Out};

/// How many seconds the kernel may cache a reply: sizes never change, and names of removed files
/// are invalidated explicitly.
const TTL: u64 = 3600;
/// The preferred I/O size that `stat` reports to programs; loop devices use it as granularity.
const BLOCK_BYTES: u32 = 4096;
/// The most queries to a disk during one search for a hole or for data.
const QUESTIONS_MAX: usize = 4096;

/// The inode number of the directory.
const ROOT: u64 = INodeNo::ROOT.0;
/// The offsets of the directory's own two entries; every later entry has its inode number as
/// offset.
const OFFSET_SELF: u64 = 1;
const OFFSET_PARENT: u64 = 2;

/// The owner of the files, and who can see them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileOwner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Whether other users can list the directory.
    pub(crate) open_to_others: bool,
}

/// The file system of one mount.
pub(crate) struct FileSystem {
    pub(crate) files: Arc<Files>,
    pub(crate) owner: FileOwner,
    pub(crate) mounted: SystemTime,
}

impl FileSystem {
    /// Answers a call that needs no device.
    ///
    /// # Errors
    /// The error for the caller; then the contents of `out` are undefined.
    pub(crate) fn answer(&self, node: u64, call: &Call<'_>, out: &mut Out) -> Result<(), Errno> {
        match *call {
            Call::Lookup(name) => self.lookup(node, OsStr::from_bytes(name), out),
            Call::GetAttr => self.attr_of(node).map(|attr| out.attr(TTL, &attr)),
            Call::SetAttr(change) => self.set_attr(node, &change, out),
            Call::Open(flags) => self.open(node, flags, out),
            Call::OpenDir => {
                out.open(0);
                Ok(())
            }
            Call::ReadDir { offset, len } => self.read_dir(node, offset, len, out),
            Call::Release => {
                self.files.released(node);
                Ok(())
            }
            Call::ReleaseDir | Call::Destroy | Call::Forget => Ok(()),
            Call::Lseek { offset, whence } => {
                let file = self.files.find(node).ok_or(Errno::ENODEV)?;
                let found = match whence {
                    libc::SEEK_DATA => seek(&file, offset, false),
                    libc::SEEK_HOLE => seek(&file, offset, true),
                    _ => Err(Errno::EINVAL),
                };
                out.u64(found? as u64);
                Ok(())
            }
            Call::StatFs => {
                self.statfs(out);
                Ok(())
            }
            // A regular file has no ioctl.
            Call::Ioctl => Err(Errno::ENOTTY),
            // After one ENOSYS the kernel does not send such a call again. A close (`flush`) is one
            // of these calls, because a close makes nothing durable and should not wait.
            Call::Other(_) => Err(Errno::ENOSYS),
            Call::Read { .. } | Call::Write { .. } | Call::Fsync | Call::Fallocate { .. } => {
                Err(Errno::EIO)
            }
        }
    }

    fn root(&self) -> Attributes {
        let perm = if self.owner.open_to_others { 0o755 } else { 0o700 };
        let size = self.files.count() as u64;
        let attr = self.attr(ROOT, size, self.mounted, libc::S_IFDIR | perm);
        Attributes { blocks: 0, links: 2, ..attr }
    }

    fn file(&self, file: &File) -> Attributes {
        let perm = if file.rules.read_only { 0o400 } else { 0o600 };
        self.attr(file.ino, file.rules.len_bytes, file.made, libc::S_IFREG | perm)
    }

    fn attr(&self, ino: u64, size: u64, time: SystemTime, mode: u32) -> Attributes {
        Attributes {
            ino,
            size,
            blocks: size.div_ceil(512),
            time,
            mode,
            links: 1,
            uid: self.owner.uid,
            gid: self.owner.gid,
            block_bytes: BLOCK_BYTES,
        }
    }

    fn attr_of(&self, ino: u64) -> Result<Attributes, Errno> {
        if ino == ROOT {
            return Ok(self.root());
        }
        let file = self.files.find(ino).ok_or(Errno::ENODEV)?;
        Ok(self.file(&file))
    }

    fn lookup(&self, parent: u64, name: &OsStr, out: &mut Out) -> Result<(), Errno> {
        let file = self.files.lookup(name).filter(|_| parent == ROOT).ok_or(Errno::ENOENT)?;
        out.entry(TTL, &self.file(&file));
        Ok(())
    }

    /// Sizes, owners and modes do not change. New times are accepted and ignored, and so is a
    /// truncation by `O_TRUNC` or `truncate -s 0`, as with a block device: shells and dd open files
    /// so.
    fn set_attr(&self, ino: u64, change: &AttrChanges, out: &mut Out) -> Result<(), Errno> {
        let attr = self.attr_of(ino)?;
        if change.rights {
            return Err(Errno::EPERM);
        }
        match change.size {
            Some(0) if !change.by_handle => {}
            Some(size) if size != attr.size => return Err(Errno::EINVAL),
            _ => {}
        }
        out.attr(TTL, &attr);
        Ok(())
    }

    fn open(&self, ino: u64, flags: i32, out: &mut Out) -> Result<(), Errno> {
        let file = self.files.opened(ino).ok_or(Errno::ENODEV)?;
        let refusal = if file.rules.read_only {
            Some(Errno::EROFS)
        } else {
            // A mounted file system has the device to itself.
            file.claim.is_claimed().then_some(Errno::EBUSY)
        };
        if let Some(refusal) = refusal
            && flags & libc::O_ACCMODE != libc::O_RDONLY
        {
            self.files.released(ino);
            return Err(refusal);
        }
        let how = FopenFlags::FOPEN_DIRECT_IO
            | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            | FopenFlags::FOPEN_NOFLUSH;
        out.open(how.bits());
        Ok(())
    }

    fn read_dir(&self, ino: u64, offset: u64, len: u32, out: &mut Out) -> Result<(), Errno> {
        if ino != ROOT {
            return Err(Errno::ENOTDIR);
        }
        let room = (len as usize).min(IO_BYTES_MAX as usize);
        for (at, name) in [(OFFSET_SELF, "."), (OFFSET_PARENT, "..")] {
            if offset < at && !out.dir_entry(room, ROOT, at, libc::S_IFDIR, name) {
                return Ok(());
            }
        }
        for file in self.files.snapshot().iter().filter(|file| file.ino > offset) {
            if !out.dir_entry(room, file.ino, file.ino, libc::S_IFREG, &file.name) {
                break;
            }
        }
        Ok(())
    }

    fn statfs(&self, out: &mut Out) {
        let files = self.files.snapshot();
        let bytes: u64 = files.iter().fold(0, |sum, file| sum.saturating_add(file.rules.len_bytes));
        let (count, free) = (files.len() as u64, (FILES_MAX - files.len()) as u64);
        out.statfs(bytes / u64::from(BLOCK_BYTES), count, free, BLOCK_BYTES);
    }
}

/// The first offset from `offset` on that is in a hole, or in data. The end of the file counts as a
/// hole, as lseek(2) requires. A range whose state the disk does not know counts as data.
fn seek(file: &File, offset: i64, hole: bool) -> Result<i64, Errno> {
    let end = file.rules.len_bytes;
    let offset = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
    if offset >= end {
        return Err(Errno::ENXIO);
    }
    let mut at = file.rules.span(offset, 1).start;
    for _ in 0..QUESTIONS_MAX {
        if at >= end {
            break;
        }
        let sector = Sector::containing(at);
        let extent = file.disk.extent(sector, Sector::containing(end) - sector);
        if extent.zero == hole {
            return Ok(at.max(offset) as i64);
        }
        // An empty extent means that the disk does not know.
        match extent.sectors {
            0 => break,
            sectors => at = Sector(sector.0.saturating_add(sectors)).bytes(),
        }
    }
    match hole {
        true => Ok(end as i64),
        false if at >= end => Err(Errno::ENXIO),
        // The searched range is a hole; the rest is unknown and counts as data.
        false => Ok(at.max(offset) as i64),
    }
}

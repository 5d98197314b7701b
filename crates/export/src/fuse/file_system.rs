//! The file system: from the kernel's requests to doors and back.
//!
//! One flat directory. Files are made and removed by the yard, not through the mount; their sizes
//! are the devices' and never change.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use blockyard_core::{Flags, Sector};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use crate::fuse::files::{FILES_MAX, File, Files};
use crate::fuse::memory::IO_BYTES_MAX;
use crate::fuse::mount::Ended;
use crate::fuse::seat::Seats;

/// How long the kernel may believe what it was told: sizes never change, and names that go are
/// taken back explicitly.
const TTL: Duration = Duration::from_secs(3600);
/// Requests of asynchronous I/O that the kernel sends at once; its default would hold them back.
const BACKGROUND_MAX: u16 = 256;
/// From so many on it thinks of us as busy.
const CONGESTED: u16 = 192;
/// What programs are told is a good size, and the granularity that loop devices take over.
const BLOCK_BYTES: u32 = 4096;
/// Most questions to a disk for one search for a hole or for data.
const QUESTIONS_MAX: usize = 4096;

/// Offsets in the directory: what comes after these two entries has its inode number.
const OFFSET_SELF: u64 = 1;
const OFFSET_PARENT: u64 = 2;

/// Whose the files are, and who sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Whether others may look into the directory.
    pub(crate) open_to_others: bool,
}

/// One mount's file system.
pub(crate) struct FileSystem {
    pub(crate) files: Arc<Files>,
    pub(crate) seats: Arc<Seats>,
    pub(crate) owner: Owner,
    pub(crate) mounted: SystemTime,
    pub(crate) ended: Arc<Ended>,
}

impl FileSystem {
    fn root(&self) -> FileAttr {
        let perm = if self.owner.open_to_others { 0o755 } else { 0o700 };
        let size = self.files.count() as u64;
        let attr = self.attr(INodeNo::ROOT.0, size, self.mounted, perm);
        FileAttr { kind: FileType::Directory, blocks: 0, nlink: 2, ..attr }
    }

    fn file(&self, file: &File) -> FileAttr {
        let perm = if file.shape.read_only { 0o400 } else { 0o600 };
        self.attr(file.ino, file.shape.len_bytes, file.made, perm)
    }

    fn attr(&self, ino: u64, size: u64, time: SystemTime, perm: u16) -> FileAttr {
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: FileType::RegularFile,
            perm,
            nlink: 1,
            uid: self.owner.uid,
            gid: self.owner.gid,
            rdev: 0,
            blksize: BLOCK_BYTES,
            flags: 0,
        }
    }

    fn attr_of(&self, ino: INodeNo) -> Result<FileAttr, Errno> {
        if ino == INodeNo::ROOT {
            return Ok(self.root());
        }
        let file = self.files.find(ino.0).ok_or(Errno::ENODEV)?;
        Ok(self.file(&file))
    }
}

impl Filesystem for FileSystem {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            // Direct I/O in parallel.
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            // mmap of a file that is otherwise not cached.
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                tracing::debug!(?flag, "this kernel's FUSE has it not");
            }
        }
        let io_max = IO_BYTES_MAX as u32;
        let refused = |what| io::Error::other(format!("fuse: {what} out of range"));
        config.set_max_write(io_max).map_err(|_| refused("max_write"))?;
        // An error means that the kernel's own limit is below.
        let _ = config.set_max_readahead(io_max);
        config.set_max_background(BACKGROUND_MAX).map_err(|_| refused("max_background"))?;
        config.set_congestion_threshold(CONGESTED).map_err(|_| refused("congestion threshold"))?;
        Ok(())
    }

    fn destroy(&mut self) {
        self.ended.set();
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.files.lookup(name).filter(|_| parent == INodeNo::ROOT) {
            Some(file) => reply.entry(&TTL, &self.file(&file), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr_of(ino) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    /// Sizes, owners and modes stay. Times are taken and forgotten, and so is the truncation of
    /// `O_TRUNC` or `truncate -s 0`, as a block device does it: shells and dd open files so.
    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let attr = match self.attr_of(ino) {
            Ok(attr) => attr,
            Err(errno) => return reply.error(errno),
        };
        if mode.is_some() || uid.is_some() || gid.is_some() {
            return reply.error(Errno::EPERM);
        }
        match size {
            Some(0) if handle.is_none() => reply.attr(&TTL, &attr),
            Some(size) if size != attr.size => reply.error(Errno::EINVAL),
            _ => reply.attr(&TTL, &attr),
        }
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let Some(file) = self.files.opened(ino.0) else { return reply.error(Errno::ENODEV) };
        if file.shape.read_only && flags.acc_mode() != OpenAccMode::O_RDONLY {
            self.files.released(ino.0);
            return reply.error(Errno::EROFS);
        }
        let how = FopenFlags::FOPEN_DIRECT_IO
            | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            | FopenFlags::FOPEN_NOFLUSH;
        reply.opened(FileHandle(0), how);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.seats.with_door(ino.0, |door| match door {
            Ok(door) => door.read(offset, size.into(), reply),
            Err(errno) => reply.error(errno),
        });
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // O_SYNC holds O_DSYNC.
        let durable = flags.0 & libc::O_DSYNC != 0;
        let flags = if durable { Flags::FUA } else { Flags::NONE };
        self.seats.with_door(ino.0, |door| match door {
            Ok(door) => door.write(offset, data, flags, reply),
            Err(errno) => reply.error(errno),
        });
    }

    /// Nothing waits for a close: it is not what makes data durable. With this answer a kernel that
    /// does not know `FOPEN_NOFLUSH` stops asking.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.files.released(ino.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.seats.with_door(ino.0, |door| match door {
            Ok(door) => door.flush(reply),
            Err(errno) => reply.error(errno),
        });
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.seats.with_door(ino.0, |door| match door {
            Ok(door) => door.zero(offset, length, mode, reply),
            Err(errno) => reply.error(errno),
        });
    }

    fn lseek(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let Some(file) = self.files.find(ino.0) else { return reply.error(Errno::ENODEV) };
        let result = match whence {
            libc::SEEK_DATA => seek(&file, offset, false),
            libc::SEEK_HOLE => seek(&file, offset, true),
            _ => Err(Errno::EINVAL),
        };
        match result {
            Ok(offset) => reply.offset(offset),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if ino != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        for (at, name) in [(OFFSET_SELF, "."), (OFFSET_PARENT, "..")] {
            if offset < at && reply.add(INodeNo::ROOT, at, FileType::Directory, name) {
                return reply.ok();
            }
        }
        for file in self.files.snapshot().iter().filter(|file| file.ino > offset) {
            if reply.add(INodeNo(file.ino), file.ino, FileType::RegularFile, &file.name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let files = self.files.snapshot();
        let bytes: u64 = files.iter().fold(0, |sum, file| sum.saturating_add(file.shape.len_bytes));
        let (count, free) = (files.len() as u64, (FILES_MAX - files.len()) as u64);
        reply.statfs(
            bytes / u64::from(BLOCK_BYTES),
            0,
            0,
            count,
            free,
            BLOCK_BYTES,
            255,
            BLOCK_BYTES,
        );
    }

    /// A regular file has none; without this a warning is logged for each that asks.
    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }
}

/// The first offset from `offset` on that is in a hole, or in data. The end of the file counts as a
/// hole, as lseek(2) wants it. What the disk does not know counts as data.
fn seek(file: &File, offset: i64, hole: bool) -> Result<i64, Errno> {
    let end = file.shape.len_bytes;
    let offset = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
    if offset >= end {
        return Err(Errno::ENXIO);
    }
    let mut at = file.shape.span(offset, 1).start;
    for _ in 0..QUESTIONS_MAX {
        if at >= end {
            break;
        }
        let sector = Sector::containing(at);
        let extent = file.disk.extent(sector, Sector::containing(end) - sector);
        if extent.zero == hole {
            return Ok(at.max(offset) as i64);
        }
        // A disk that answers with nothing is taken not to know.
        match extent.sectors {
            0 => break,
            sectors => at = Sector(sector.0.saturating_add(sectors)).bytes(),
        }
    }
    match hole {
        true => Ok(end as i64),
        false if at >= end => Err(Errno::ENXIO),
        // As far as was asked there was a hole; what follows is not known, so it is data.
        false => Ok(at.max(offset) as i64),
    }
}

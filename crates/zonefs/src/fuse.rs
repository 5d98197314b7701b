//! The FUSE server: translates FUSE requests to [`ZoneFs`] calls and back.
//!
//! The protocol needs more than the file system's rules:
//! - FUSE's root is node 1, which may be a file in zonefs. So a node id is the inode number plus
//!   one. `stat` shows the inode number, because attributes are never cached and a new request
//!   returns it.
//! - The flags of each request, not those of the open, say whether a write is direct.
//! - A write that extends a file arrives alone: the kernel holds the inode's lock during it, and
//!   without asynchronous direct I/O it sends the pieces one after another. So the requests for one
//!   sequential file arrive in order, whichever thread receives them.
//! - Writable handles of sequential files bypass the page cache, so they cannot be mapped shared.
//!   Other handles use the page cache; the kernel drops their pages when size or time have changed.

// A table of open files that only opens and closes change; an I/O only looks a handle up.
#![allow(clippy::disallowed_types)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request,
    TimeOrNow, WriteFlags,
};

use crate::attributes::{Attributes, FileKind, NAME_BYTES_MAX, Space, TreeNode};
use crate::error::FileError;
use crate::file::{AccessMode, Manner, ZoneFile};
use crate::fs::ZoneFs;
use crate::io_handle::{BUFFER_BYTES, IoHandle};
use crate::manage::AttributeChange;

/// The kernel must not cache anything: other users may change the device directly.
const NO_TIME: Duration = Duration::ZERO;

/// Maximum number of background requests of the kernel.
const BACKGROUND_MAX: u16 = 256;

thread_local! {
    /// This thread's handle to the file system that it serves.
    static IO_HANDLE: RefCell<Option<IoHandle>> = const { RefCell::new(None) };
    /// Buffer for data that are read.
    static BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The server of one mount.
pub(crate) struct ZoneFsServer {
    fs: Arc<ZoneFs>,
    handles: Handles,
    /// Called after the mount has ended.
    ended: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl ZoneFsServer {
    pub(crate) fn new(fs: Arc<ZoneFs>, ended: Box<dyn FnOnce() + Send + Sync>) -> ZoneFsServer {
        ZoneFsServer { fs, handles: Handles::default(), ended: Some(ended) }
    }

    fn node(&self, id: INodeNo) -> Result<TreeNode, Errno> {
        let node = match id {
            INodeNo::ROOT => Some(TreeNode::Root),
            INodeNo(id) => id.checked_sub(1).and_then(|ino| self.fs.node(ino)),
        };
        node.ok_or(Errno::ENOENT)
    }

    fn attributes(&self, node: TreeNode) -> Result<Attributes, Errno> {
        self.fs.attributes(node).ok_or(Errno::ENOENT)
    }

    /// The reply to a lookup: the node id stands in place of the inode number.
    fn entry(&self, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        if name.len() > NAME_BYTES_MAX as usize {
            return Err(Errno::ENAMETOOLONG);
        }
        let node = self.fs.lookup(self.node(parent)?, name.as_bytes()).ok_or(Errno::ENOENT)?;
        let attributes = self.attributes(node)?;
        Ok(FileAttr { ino: INodeNo(attributes.ino + 1), ..attr(&attributes) })
    }

    fn open_node(&self, id: INodeNo, flags: OpenFlags) -> Result<(u64, FopenFlags), Errno> {
        let TreeNode::File(kind, number) = self.node(id)? else { return Err(Errno::EISDIR) };
        let access = match flags.0 & libc::O_ACCMODE {
            libc::O_RDONLY => AccessMode::Read,
            _ => AccessMode::Write,
        };
        let opened = self.fs.open_file(kind, number, access).ok_or(Errno::ENOENT)?;
        let opened = opened.map_err(errno)?;
        let past_the_cache = match kind {
            // For an unreadable file, the kernel's cache would report an empty file.
            FileKind::Sequential => access == AccessMode::Write || !opened.is_readable(),
            FileKind::Conventional => flags.0 & libc::O_DIRECT != 0,
        };
        let handle = self.handles.insert(opened);
        let how = if past_the_cache {
            FopenFlags::FOPEN_DIRECT_IO
                | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
                | FopenFlags::FOPEN_NOFLUSH
        } else {
            FopenFlags::empty()
        };
        Ok((handle, how))
    }

    /// Calls `work` with an open file and this thread's handle.
    fn with_file<T>(
        &self,
        handle: FileHandle,
        work: impl FnOnce(&ZoneFile, &mut IoHandle) -> Result<T, FileError>,
    ) -> Result<T, Errno> {
        let file = self.handles.get(handle.0).ok_or(Errno::EBADF)?;
        IO_HANDLE.with_borrow_mut(|place| {
            let io = match place {
                Some(io) => io,
                None => place.insert(self.fs.io_handle().map_err(|error| {
                    tracing::warn!("{error}");
                    Errno::EIO
                })?),
            };
            work(&file, io).map_err(errno)
        })
    }

    fn write_file(
        &self,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        cached: bool,
        flags: i32,
    ) -> Result<u32, Errno> {
        let manner = Manner {
            append: flags & libc::O_APPEND != 0 && !cached,
            durable: flags & (libc::O_DSYNC | libc::O_SYNC) != 0,
        };
        self.with_file(handle, |file, io| {
            let direct = flags & libc::O_DIRECT != 0 && !cached;
            let written = match direct {
                true => file.write_direct(io, offset, data, manner),
                false => file.write_buffered(io, offset, data, manner),
            }?;
            file.touch();
            Ok(written as u32)
        })
    }

    fn change(
        &self,
        id: INodeNo,
        change: AttributeChange,
        len_bytes: Option<u64>,
    ) -> Result<FileAttr, Errno> {
        let node = self.node(id)?;
        if let Some(len_bytes) = len_bytes {
            let TreeNode::File(kind, number) = node else { return Err(Errno::EISDIR) };
            let done = self.fs.truncate(kind, number, len_bytes).ok_or(Errno::ENOENT)?;
            done.map_err(errno)?;
        }
        if change != AttributeChange::default() {
            self.fs.change(node, change).map_err(errno)?;
        }
        Ok(attr(&self.attributes(node)?))
    }

    fn list(&self, id: INodeNo, offset: u64, reply: &mut ReplyDirectory) -> Result<(), Errno> {
        let node = self.node(id)?;
        let root = self.attributes(TreeNode::Root)?.ino;
        let own = self.attributes(node)?.ino;
        // A directory offset is the number of the next entry.
        let add = |reply: &mut ReplyDirectory, index: u64, ino: u64, kind, name: &str| {
            index >= offset && reply.add(INodeNo(ino), index + 1, kind, name)
        };
        if add(reply, 0, own, FileType::Directory, ".")
            || add(reply, 1, root, FileType::Directory, "..")
        {
            return Ok(());
        }
        match node {
            TreeNode::Root => {
                for (index, kind) in self.fs.directories().enumerate() {
                    let ino = self.attributes(TreeNode::Directory(kind))?.ino;
                    let name = kind.directory();
                    if add(reply, index as u64 + 2, ino, FileType::Directory, name) {
                        break;
                    }
                }
            }
            TreeNode::Directory(kind) => {
                let first = offset.saturating_sub(2);
                for number in first..u64::from(self.fs.file_count(kind)) {
                    let ino = self.attributes(TreeNode::File(kind, number as u32))?.ino;
                    let name = number.to_string();
                    if add(reply, number + 2, ino, FileType::RegularFile, &name) {
                        break;
                    }
                }
            }
            TreeNode::File(..) => return Err(Errno::ENOTDIR),
        }
        Ok(())
    }
}

fn errno(error: FileError) -> Errno {
    Errno::from_i32(error.errno())
}

fn attr(attributes: &Attributes) -> FileAttr {
    let Attributes { ino, size, blocks, modified, nlink, uid, gid, .. } = *attributes;
    let kind = match attributes.is_directory {
        true => FileType::Directory,
        false => FileType::RegularFile,
    };
    FileAttr {
        ino: INodeNo(ino),
        size,
        blocks,
        atime: modified,
        mtime: modified,
        ctime: modified,
        crtime: modified,
        kind,
        perm: attributes.permissions,
        nlink,
        uid,
        gid,
        rdev: 0,
        blksize: attributes.block_bytes,
        flags: 0,
    }
}

fn time(time: TimeOrNow) -> SystemTime {
    match time {
        TimeOrNow::SpecificTime(time) => time,
        TimeOrNow::Now => SystemTime::now(),
    }
}

impl Filesystem for ZoneFsServer {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let wanted = [InitFlags::FUSE_PARALLEL_DIROPS, InitFlags::FUSE_AUTO_INVAL_DATA];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                tracing::debug!(?flag, "this kernel's FUSE has it not");
            }
        }
        let refused = |what| std::io::Error::other(format!("fuse: {what} is out of range"));
        config.set_max_write(BUFFER_BYTES as u32).map_err(|_| refused("max_write"))?;
        // An error means that the kernel's limit is lower.
        let _ = config.set_max_readahead(BUFFER_BYTES as u32);
        config.set_max_background(BACKGROUND_MAX).map_err(|_| refused("max_background"))?;
        Ok(())
    }

    fn destroy(&mut self) {
        if let Some(ended) = self.ended.take() {
            ended();
        }
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.entry(parent, name) {
            Ok(attr) => reply.entry(&NO_TIME, &attr, Generation(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn getattr(&self, _: &Request, id: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.node(id).and_then(|node| self.attributes(node)) {
            Ok(attributes) => reply.attr(&NO_TIME, &attr(&attributes)),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        id: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let permissions = mode.map(|mode| (mode & 0o7777) as u16);
        // A truncation sets the time itself.
        let modified = modified.filter(|_| size.is_none()).map(time);
        match self.change(id, AttributeChange { permissions, uid, gid, modified }, size) {
            Ok(attr) => reply.attr(&NO_TIME, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, _: &Request, id: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.open_node(id, flags) {
            Ok((handle, how)) => reply.opened(FileHandle(handle), how),
            Err(errno) => reply.error(errno),
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        drop(self.handles.remove(handle.0));
        reply.ok();
        // This file may have kept the mount from becoming read-only.
        self.fs.remount();
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        BYTES.with_borrow_mut(|bytes| {
            bytes.resize((size as usize).max(bytes.len()), 0);
            let into = &mut bytes[..size as usize];
            let read = self.with_file(handle, |file, io| match flags.0 & libc::O_DIRECT {
                0 => file.read(io, offset, into),
                _ => file.read_direct(io, offset, into),
            });
            match read {
                Ok(len) => reply.data(&bytes[..len]),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let cached = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        match self.write_file(handle, offset, data, cached, flags.0) {
            Ok(len) => reply.written(len),
            Err(errno) => reply.error(errno),
        }
    }

    /// Nothing is buffered here: completed writes are on the device.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.with_file(handle, ZoneFile::sync) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        id: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        match self.list(id, offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let Space { block_bytes, blocks, free, files } = self.fs.space();
        reply.statfs(blocks, free, free, files, 0, block_bytes, NAME_BYTES_MAX, block_bytes);
    }

    // Files and zones are neither created nor removed. The errors are those that Linux returns for
    // a directory without these operations.

    fn create(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        reply.error(Errno::EACCES);
    }

    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EPERM);
    }

    fn symlink(&self, _: &Request, _: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }

    fn rename(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: INodeNo,
        _: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EPERM);
    }

    fn link(&self, _: &Request, _: INodeNo, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        reply.error(Errno::EPERM);
    }
}

/// Open files by the handle number that the kernel uses.
#[derive(Default)]
struct Handles {
    table: RwLock<HandleTable>,
}

#[derive(Default)]
struct HandleTable {
    next: u64,
    open: HashMap<u64, Arc<ZoneFile>>,
}

impl Handles {
    /// Adds a file and returns a number that was never used before.
    fn insert(&self, file: ZoneFile) -> u64 {
        let mut table = self.change();
        table.next += 1;
        let number = table.next;
        table.open.insert(number, Arc::new(file));
        number
    }

    fn get(&self, number: u64) -> Option<Arc<ZoneFile>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        table.open.get(&number).cloned()
    }

    /// Removes and returns a file. Dropping the last reference closes it, with the table unlocked.
    fn remove(&self, number: u64) -> Option<Arc<ZoneFile>> {
        self.change().open.remove(&number)
    }

    fn change(&self) -> RwLockWriteGuard<'_, HandleTable> {
        // Every change is one call, so a panic cannot leave the table inconsistent.
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

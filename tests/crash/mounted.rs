//! A [`Disk`] as a mounted file system, over FUSE. The kernel caches no data: files are open for
//! direct I/O whatever a program requests, and names are looked up each time, because a cut may
//! remove them.

use std::ffi::OsStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs,
    ReplyWrite, Request, Session, TimeOrNow, WriteFlags,
};

use crate::attach::unmount_lazily;
use crate::disk::{Disk, Look, ROOT};
use crate::place::Place;

/// How long the kernel may cache names and attributes.
const TTL: Duration = Duration::ZERO;

/// The number of files that `statfs` reports; it has no effect.
const FILES: u64 = 1 << 20;

const DIRECT: FopenFlags =
    FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

/// A write that has reached the disk and is delayed.
struct Held {
    node: u64,
    offset: u64,
    bytes: Vec<u8>,
    durable: bool,
    reply: ReplyWrite,
}

/// The delayed writes; `None` while writes are not delayed.
type Gate = Arc<Mutex<Option<Vec<Held>>>>;

/// A mounted disk. Dropping it unmounts the disk, even one in use.
pub(crate) struct Mounted {
    disk: Arc<Mutex<Disk>>,
    gate: Gate,
    dir: String,
    session: Option<BackgroundSession>,
    _place: Place,
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mounted {
    /// An empty disk, whose cuts are seeded by `seed`.
    pub(crate) fn new(seed: u64) -> Mounted {
        let place = Place::new();
        let dir = place.file("disk");
        std::fs::create_dir(&dir).unwrap();
        let disk = Arc::new(Mutex::new(Disk::new(seed)));
        let mut config = Config::default();
        let name = MountOption::FSName("volatile".to_owned());
        config.mount_options = vec![name, MountOption::NoAtime];
        let gate = Gate::default();
        let server = Server { disk: Arc::clone(&disk), gate: Arc::clone(&gate) };
        let session = Session::new(server, &dir, &config).unwrap();
        let session = Some(session.spawn().unwrap());
        Mounted { disk, gate, dir, session, _place: place }
    }

    /// From now on writes do not complete. Reads and syncs do.
    pub(crate) fn hold(&self) {
        lock(&self.gate).get_or_insert_default();
    }

    /// The number of delayed writes.
    pub(crate) fn held(&self) -> usize {
        lock(&self.gate).as_ref().map_or(0, Vec::len)
    }

    /// Completes all delayed writes in their order, and ends the delay.
    pub(crate) fn release(&self) {
        let mut gate = lock(&self.gate);
        for Held { node, offset, bytes, durable, reply } in gate.take().into_iter().flatten() {
            let written = self.disk().write(node, offset, &bytes, durable);
            match written {
                Ok(()) => reply.written(bytes.len() as u32),
                Err(error) => reply.error(error),
            }
        }
    }

    /// The disk below.
    pub(crate) fn disk(&self) -> MutexGuard<'_, Disk> {
        lock(&self.disk)
    }

    /// Tells whether the power of the disk is off.
    pub(crate) fn power_off(&self) -> Box<dyn Fn() -> bool + Send> {
        let disk = Arc::clone(&self.disk);
        Box::new(move || lock(&disk).is_off())
    }

    /// The path of a name in the disk's root folder.
    pub(crate) fn file(&self, name: &str) -> String {
        format!("{}/{name}", self.dir)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A process that waits for a write cannot end.
        self.release();
        unmount_lazily(&self.dir);
        // A process that still has a file open keeps the session; this does not wait for it.
        std::mem::forget(self.session.take());
    }
}

struct Server {
    disk: Arc<Mutex<Disk>>,
    gate: Gate,
}

impl Server {
    fn disk(&self) -> MutexGuard<'_, Disk> {
        lock(&self.disk)
    }
}

fn attributes(look: Look) -> FileAttr {
    let kind = if look.is_folder { FileType::Directory } else { FileType::RegularFile };
    FileAttr {
        ino: INodeNo(look.node),
        size: look.len,
        blocks: look.len.div_ceil(512),
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: if look.is_folder { 0o755 } else { 0o644 },
        nlink: 1,
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn entry(found: Result<Look, Errno>, reply: ReplyEntry) {
    match found {
        Ok(look) => reply.entry(&TTL, &attributes(look), Generation(0)),
        Err(error) => reply.error(error),
    }
}

fn empty(done: Result<(), Errno>, reply: ReplyEmpty) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        entry(self.disk().find(parent.0, name), reply);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let looked = self.disk().look(ino.0);
        match looked {
            Ok(look) => reply.attr(&TTL, &attributes(look)),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut disk = self.disk();
        let resized = size.map_or(Ok(()), |size| disk.resize(ino.0, size));
        match resized.and_then(|()| disk.look(ino.0)) {
            Ok(look) => reply.attr(&TTL, &attributes(look)),
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        entry(self.disk().make(parent.0, name, true), reply);
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let made = self.disk().make(parent.0, name, false);
        match made {
            Ok(look) => {
                let (attributes, handle) = (attributes(look), FileHandle(0));
                reply.created(&TTL, &attributes, Generation(0), handle, DIRECT);
            }
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let looked = self.disk().look(ino.0);
        match looked {
            Ok(_) => reply.opened(FileHandle(0), DIRECT),
            Err(error) => reply.error(error),
        }
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(self.disk().remove(parent.0, name), reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(self.disk().remove(parent.0, name), reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        to: INodeNo,
        to_name: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        empty(self.disk().rename((parent.0, name), (to.0, to_name)), reply);
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
        match self.disk().read(ino.0, offset, size as usize) {
            Ok(bytes) => reply.data(bytes),
            Err(error) => reply.error(error),
        }
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
        // The kernel sets it for single writes (RWF_DSYNC) too. O_SYNC includes O_DSYNC.
        let durable = flags.0 & libc::O_DSYNC != 0;
        if let Some(held) = &mut *lock(&self.gate) {
            let (node, bytes) = (ino.0, data.to_vec());
            return held.push(Held { node, offset, bytes, durable, reply });
        }
        let written = self.disk().write(ino.0, offset, data, durable);
        match written {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // Closing a file makes nothing durable.
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        empty(self.disk().sync(ino.0), reply);
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        empty(self.disk().sync_folder(ino.0), reply);
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
        let mut disk = self.disk();
        let look = match disk.look(ino.0) {
            Ok(look) => look,
            Err(error) => return reply.error(error),
        };
        let grown = match mode & libc::FALLOC_FL_KEEP_SIZE {
            0 if offset + length > look.len => disk.resize(ino.0, offset + length),
            _ => Ok(()),
        };
        let zeros = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE;
        empty(
            grown.and_then(|()| match mode & !libc::FALLOC_FL_KEEP_SIZE {
                0 => Ok(()),
                mode if mode & !zeros == 0 => disk.zero(ino.0, offset, length),
                _ => Err(Errno::EOPNOTSUPP),
            }),
            reply,
        );
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.disk().list(ino.0);
        let names = match listed {
            Ok(names) => names,
            Err(error) => return reply.error(error),
        };
        for (number, (name, look)) in (1..).zip(names).skip(offset as usize) {
            let attributes = attributes(look);
            if reply.add(attributes.ino, number, attributes.kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let (all, free) = self.disk().space();
        let (all, free) = (all / 4096, free / 4096);
        reply.statfs(all, free, free, FILES, FILES, 4096, 255, 4096);
    }
}

/// The file system behaves through the kernel as specified.
#[test]
fn programs_write_to_it_and_lose_what_they_did_not_sync() {
    const SCRIPT: &str = "
import os, sys
os.chdir(sys.argv[1])
def write(name, flags, sync):
    file = os.open(name, os.O_CREAT | os.O_RDWR | flags)
    if sync == 'rwf': os.pwritev(file, [b'x' * 4096], 0, os.RWF_DSYNC)
    else: os.pwrite(file, b'x' * 4096, 0)
    if sync == 'fsync': os.fsync(file)
    if sync == 'fdatasync': os.fdatasync(file)
os.mkdir('folder')
write('folder/none', 0, '')
write('folder/fsync', 0, 'fsync')
write('folder/fdatasync', 0, 'fdatasync')
write('folder/dsync', os.O_DSYNC, '')
write('folder/sync', os.O_SYNC, '')
write('folder/rwf', 0, 'rwf')
write('folder/old', 0, 'fsync')
os.rename('folder/old', 'folder/new')
for name in ['folder', '.']: os.fsync(os.open(name, os.O_DIRECTORY))
write('folder/late', os.O_DSYNC, '')
";
    // Some cuts keep volatile data.
    let (mut lost, mut nameless) = (0, 0);
    for seed in 1..=6 {
        let mounted = Mounted::new(seed);
        crate::run::python(SCRIPT, &[&mounted.file("")]);
        assert_eq!(
            mounted.disk().find(ROOT, OsStr::new("folder")).map(|it| it.is_folder),
            Ok(true)
        );
        mounted.disk().cut();
        assert!(std::fs::read(mounted.file("folder/fsync")).is_err(), "the power is off");
        mounted.disk().switch_on();
        for name in ["fsync", "fdatasync", "dsync", "sync", "rwf", "new"] {
            let found = std::fs::read(mounted.file(&format!("folder/{name}"))).unwrap();
            assert!(found == [b'x'; 4096], "{name}, seed {seed}: {} bytes", found.len());
        }
        lost += u32::from(std::fs::read(mounted.file("folder/none")).unwrap() != [b'x'; 4096]);
        nameless += u32::from(std::fs::read(mounted.file("folder/late")).is_err());
    }
    assert!(lost > 0 && nameless > 0, "{lost} {nameless}");
}

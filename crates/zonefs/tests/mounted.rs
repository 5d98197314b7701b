//! The mounted file system, used through plain system calls as by any program.
#![allow(clippy::unwrap_used)] // A test that cannot continue panics.
#![allow(clippy::disallowed_types)] // A counter of directories, not on the I/O path.
#![allow(unsafe_code)] // mmap and flock, which the library crate does not need.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use blockyard_core::blocking::Io;
use blockyard_core::{Disk, Flags, Sector};
use blockyard_null::NullConfig;
use blockyard_testing::capability::Capability;
use blockyard_zonefs::format::{Format, format};
use blockyard_zonefs::{Mount, ZoneFs};
use common::{CAPACITY, ZONE, break_zone, config, disk, formatted, pattern};

const BLOCK: usize = 4096;
const DIRECT: i32 = libc::O_DIRECT;

/// A file system mounted at a directory of its own.
struct Mounted {
    // Drop order: the mount is removed before its directory.
    mount: Mount,
    dir: Directory,
}

/// A directory that is removed at the end of the test.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Unmount even after a failure.
            let detached = std::process::Command::new("umount").arg("-l").arg(&self.0).output();
            drop(detached);
        }
        // The removal succeeds only if nothing is mounted there.
        let _ = fs::remove_dir(&self.0);
    }
}

impl Mounted {
    fn new(disk: &Arc<dyn Disk>, options: &str) -> Mounted {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only a unique number is needed.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("blockyard-zonefs-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        let fs = ZoneFs::open(Arc::clone(disk), options.parse().unwrap()).unwrap();
        let mount = Mount::new(fs, &dir, Box::new(|| {})).unwrap();
        Mounted { mount, dir: Directory(dir) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.0.join(name)
    }

    /// Opens a file for reading and writing with these flags.
    fn open(&self, name: &str, flags: i32) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(self.path(name))
    }

    fn direct(&self, name: &str) -> File {
        self.open(name, DIRECT).unwrap()
    }

    fn size(&self, name: &str) -> u64 {
        fs::metadata(self.path(name)).unwrap().len()
    }
}

/// Bytes in memory that is aligned for direct I/O in many pieces.
struct Aligned {
    bytes: Vec<u8>,
    from: usize,
    len: usize,
}

impl Aligned {
    fn new(data: &[u8]) -> Aligned {
        let mut bytes = vec![0; data.len() + BLOCK];
        let from = bytes.as_ptr().align_offset(BLOCK);
        bytes[from..from + data.len()].copy_from_slice(data);
        Aligned { bytes, from, len: data.len() }
    }

    fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.from..self.from + self.len]
    }
}

/// Unmounts a file system of which this test has no file open. A program that another test is
/// starting has copies of all file descriptors of this process until its exec.
fn unmount(m: &Mounted) {
    while let Err(error) = m.mount.unmount() {
        assert!(error.to_string().contains("busy"), "{error}");
        std::thread::yield_now();
    }
}

fn mounted(options: &str) -> Mounted {
    Mounted::new(&formatted("d", config()), options)
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn stat_readdir_and_statfs_show_the_zones() {
    let m = mounted("");
    assert_eq!(names(&m.dir.0), ["cnv", "seq"]);
    let wanted: Vec<String> = (0..13).map(|number| number.to_string()).collect();
    assert_eq!(names(&m.path("seq")), wanted);
    let root = fs::metadata(&m.dir.0).unwrap();
    assert_eq!((root.ino(), root.len(), root.nlink(), root.mode()), (16, 4, 4, 0o40555));
    let seq = fs::metadata(m.path("seq")).unwrap();
    assert_eq!((seq.ino(), seq.len(), seq.nlink()), (18, 13, 2));
    // Zone 1 has the same inode number as FUSE's root.
    let first = fs::metadata(m.path("cnv/0")).unwrap();
    assert_eq!((first.ino(), first.len(), first.mode()), (1, ZONE, 0o100640));
    let file = fs::metadata(m.path("seq/0")).unwrap();
    assert_eq!((file.ino(), file.len(), file.nlink()), (3, 0, 1));
    assert_eq!((file.blocks(), file.blksize()), (CAPACITY / 512, 4096));
    for entry in fs::read_dir(m.path("seq")).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(std::os::unix::fs::DirEntryExt::ino(&entry), entry.metadata().unwrap().ino());
    }
    let space = rustix::fs::statvfs(&m.dir.0).unwrap();
    assert_eq!((space.f_blocks, space.f_frsize), ((2 * ZONE + 13 * CAPACITY) / 4096, 4096));
    assert_eq!((space.f_bfree, space.f_bavail), (13 * CAPACITY / 4096, 13 * CAPACITY / 4096));
    assert_eq!((space.f_files, space.f_ffree, space.f_namemax), (17, 0, 16));
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    assert!(mounts.contains(&format!("/dev/blockyard/d {} fuse", m.dir.0.display())), "{mounts}");
}

#[test]
fn nothing_is_made_renamed_or_removed() {
    let m = mounted("");
    assert_eq!(errno(File::create(m.path("seq/13"))), libc::EACCES);
    assert_eq!(errno(File::create(m.path("x"))), libc::EACCES);
    assert_eq!(errno(fs::create_dir(m.path("d"))), libc::EPERM);
    assert_eq!(errno(fs::remove_file(m.path("seq/0"))), libc::EPERM);
    assert_eq!(errno(fs::remove_dir(m.path("seq"))), libc::EPERM);
    assert_eq!(errno(fs::rename(m.path("seq/0"), m.path("seq/1"))), libc::EPERM);
    assert_eq!(errno(fs::hard_link(m.path("seq/0"), m.path("seq/x"))), libc::EPERM);
    assert_eq!(errno(std::os::unix::fs::symlink("a", m.path("seq/x"))), libc::EPERM);
    assert_eq!(errno(File::open(m.path("seq/00"))), libc::ENOENT);
    assert_eq!(errno(File::open(m.path("seq/13"))), libc::ENOENT);
    assert_eq!(errno(File::open(m.path("seq/12345678901234567"))), libc::ENAMETOOLONG);
}

#[test]
fn sequential_files_are_written_directly_and_at_their_end() {
    let m = mounted("");
    let (file, data) = (m.direct("seq/0"), pattern(1, 3 * BLOCK));
    assert_eq!(file.write_at(&data, 0).unwrap(), data.len());
    assert_eq!(m.size("seq/0"), data.len() as u64);
    assert_eq!(errno(file.write_at(&data, 0)), libc::EINVAL);
    assert_eq!(errno(file.write_at(&data, 6 * BLOCK as u64)), libc::EINVAL);
    assert_eq!(errno(file.write_at(&data[..512], 3 * BLOCK as u64)), libc::EINVAL);
    assert_eq!(errno(file.write_at(&data[..BLOCK], CAPACITY)), libc::EFBIG);
    assert_eq!(errno(m.open("seq/0", 0).unwrap().write_at(&data, 3 * BLOCK as u64)), libc::EIO);
    assert_eq!(errno(m.open("seq/0", 0).unwrap().write_at(&data, CAPACITY)), libc::EFBIG);
    // O_APPEND writes at the end, whatever the position is.
    let mut appender = OpenOptions::new()
        .append(true)
        .custom_flags(DIRECT | libc::O_DSYNC)
        .open(m.path("seq/0"))
        .unwrap();
    appender.write_all(&data).unwrap();
    appender.sync_all().unwrap();
    assert_eq!(m.size("seq/0"), 6 * BLOCK as u64);
    let all = [&data[..], &data].concat();
    assert!(fs::read(m.path("seq/0")).unwrap() == all);
    // A write that crosses the capacity is shortened, and then the file is full.
    let rest = vec![7; CAPACITY as usize];
    let room = CAPACITY as usize - all.len();
    assert_eq!(file.write_at(&rest, all.len() as u64).unwrap(), room);
    assert_eq!(errno(appender.write(&data)), libc::EFBIG);
}

#[test]
fn a_write_of_many_pieces_arrives_whole() {
    let large = NullConfig { size: 64 * ZONE, zone_size: 8 * ZONE, zone_capacity: 0, ..config() };
    let m = Mounted::new(&formatted("d", large), "");
    let data = pattern(2, 7 << 20);
    let file = m.direct("seq/0");
    assert_eq!(file.write_at(Aligned::new(&data).get(), 0).unwrap(), data.len());
    let mut back = Aligned::new(&vec![0; data.len()]);
    file.read_exact_at(back.get(), 0).unwrap();
    assert!(back.get() == data);
    assert!(fs::read(m.path("seq/0")).unwrap() == data);
}

#[test]
fn truncating_resets_finishes_and_does_nothing_else() {
    let m = mounted("");
    let file = m.direct("seq/0");
    file.write_all_at(&pattern(1, 2 * BLOCK), 0).unwrap();
    for len in [1, BLOCK as u64, CAPACITY - 1, CAPACITY + 1, u64::MAX >> 2] {
        assert_eq!(errno(file.set_len(len)), libc::EPERM, "{len}");
    }
    file.set_len(CAPACITY).unwrap();
    assert_eq!(m.size("seq/0"), CAPACITY);
    file.set_len(CAPACITY).unwrap();
    file.set_len(0).unwrap();
    assert_eq!(m.size("seq/0"), 0);
    // O_TRUNC resets the zone too, and a reader that has the file open sees the new data.
    file.write_all_at(&[1; BLOCK], 0).unwrap();
    let reader = File::open(m.path("seq/0")).unwrap();
    let mut back = [0; BLOCK];
    reader.read_exact_at(&mut back, 0).unwrap();
    let again = OpenOptions::new().write(true).truncate(true).custom_flags(DIRECT).to_owned();
    let again = again.open(m.path("seq/0")).unwrap();
    assert_eq!(m.size("seq/0"), 0);
    assert_eq!(reader.read_at(&mut back, 0).unwrap(), 0);
    again.write_all_at(&[2; BLOCK], 0).unwrap();
    reader.read_exact_at(&mut back, 0).unwrap();
    assert_eq!(back, [2; BLOCK]);
    assert_eq!(errno(m.open("cnv/0", 0).unwrap().set_len(0)), libc::EPERM);
    assert_eq!(errno(File::create(m.path("cnv/0"))), libc::EPERM);
}

#[test]
fn reads_end_at_the_size() {
    let m = mounted("");
    let (file, data) = (m.direct("seq/0"), pattern(3, 3 * BLOCK));
    file.write_all_at(&data, 0).unwrap();
    let mut back = vec![0; 5 * BLOCK];
    assert_eq!(file.read_at(&mut back, 0).unwrap(), 3 * BLOCK);
    assert_eq!(file.read_at(&mut back, 3 * BLOCK as u64).unwrap(), 0);
    assert_eq!(errno(file.read_at(&mut back[..100], 0)), libc::EINVAL);
    assert_eq!(errno(file.read_at(&mut back[..BLOCK], 512)), libc::EINVAL);
    let cached = File::open(m.path("seq/0")).unwrap();
    assert_eq!(cached.read_at(&mut back, 5000).unwrap(), 3 * BLOCK - 5000);
    assert!(back[..3 * BLOCK - 5000] == data[5000..]);
    // A reader that has had the file open sees data that are appended now.
    file.write_all_at(&data, 3 * BLOCK as u64).unwrap();
    assert_eq!(cached.read_at(&mut back, 3 * BLOCK as u64).unwrap(), 3 * BLOCK);
    assert!(back[..3 * BLOCK] == data);
}

#[test]
fn conventional_files_take_any_bytes_anywhere() {
    let m = mounted("");
    let file = m.open("cnv/0", 0).unwrap();
    let mut model = vec![0; ZONE as usize];
    for (seed, offset, len) in [(1, 0, 10), (2, 4090, 20), (3, 100_000, 70_001), (4, 12288, 8192)] {
        let data = pattern(seed, len);
        file.write_all_at(&data, offset).unwrap();
        model[offset as usize..][..len].copy_from_slice(&data);
    }
    assert_eq!(file.write_at(&[9; 20], ZONE - 10).unwrap(), 10);
    model[ZONE as usize - 10..].fill(9);
    assert_eq!(errno(file.write_at(&[9; 20], ZONE)), libc::EFBIG);
    assert!(fs::read(m.path("cnv/0")).unwrap() == model);
    let direct = m.direct("cnv/0");
    let mut back = Aligned::new(&vec![0; ZONE as usize]);
    direct.read_exact_at(back.get(), 0).unwrap();
    assert!(back.get() == model);
    assert_eq!(errno(direct.write_at(&back.get()[..100], 0)), libc::EINVAL);
    direct.write_all_at(&[5; BLOCK], 8192).unwrap();
    let mut cached = [0; BLOCK];
    m.open("cnv/0", 0).unwrap().read_exact_at(&mut cached, 8192).unwrap();
    assert_eq!(cached, [5; BLOCK]);
    let appender = OpenOptions::new().append(true).open(m.path("cnv/0")).unwrap();
    assert_eq!(errno((&appender).write(&[1; BLOCK])), libc::EINVAL);
}

/// Maps the first block of a file.
fn map(file: &File, protection: i32, sharing: i32) -> io::Result<*mut u8> {
    let fd = file.as_raw_fd();
    // SAFETY: the kernel chooses the address, so no existing mapping is affected.
    let place = unsafe { libc::mmap(std::ptr::null_mut(), BLOCK, protection, sharing, fd, 0) };
    if place == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(place.cast()) }
}

#[test]
fn only_conventional_files_are_mapped_to_be_written() {
    let m = mounted("");
    let file = m.direct("seq/0");
    file.write_all_at(&[3; BLOCK], 0).unwrap();
    assert!(map(&file, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED).is_err());
    assert!(map(&file, libc::PROT_READ, libc::MAP_SHARED).is_err());
    let reader = File::open(m.path("seq/0")).unwrap();
    let shared = map(&reader, libc::PROT_READ, libc::MAP_SHARED).unwrap();
    let private = map(&file, libc::PROT_READ, libc::MAP_PRIVATE).unwrap();
    let cnv = m.open("cnv/0", 0).unwrap();
    let writable = map(&cnv, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED).unwrap();
    // SAFETY: each mapping is a block long and stays mapped until the end of this block.
    unsafe {
        assert_eq!((shared.read_volatile(), private.read_volatile()), (3, 3));
        writable.add(17).write_volatile(8);
        assert_eq!(libc::msync(writable.cast(), BLOCK, libc::MS_SYNC), 0);
        for place in [shared, private, writable] {
            assert_eq!(libc::munmap(place.cast(), BLOCK), 0);
        }
    }
    let mut back = [0; BLOCK];
    m.direct("cnv/0").read_exact_at(&mut back, 0).unwrap();
    assert_eq!((back[16], back[17]), (0, 8));
}

#[test]
fn explicit_open_keeps_to_the_limit() {
    let device = formatted("d", NullConfig { zone_max_open: 2, ..config() });
    let m = Mounted::new(&device, "explicit-open");
    let (first, second) = (m.direct("seq/0"), m.direct("seq/1"));
    assert_eq!(errno(m.open("seq/2", DIRECT)), libc::EBUSY);
    File::open(m.path("seq/2")).unwrap();
    let again = m.direct("seq/1");
    assert_eq!(m.mount.fs().resources().write_open, 2);
    second.write_all_at(&[1; BLOCK], 0).unwrap();
    drop((first, second, again));
    // The kernel sends the last close asynchronously: an unmount waits for it, an open does not.
    let device2 = Arc::clone(m.mount.fs().disk());
    unmount(&m);
    drop(m);
    let mut zones = Vec::new();
    device2.report_zones(Sector(3 * ZONE / 512), 2, &mut zones).unwrap();
    assert_eq!((zones[0].cond.short(), zones[1].cond.short()), ("em", "cl"));
}

/// What system calls return after a failed write: size in blocks and mode; the errors of a read, of
/// a write, and of opening another file for writing.
fn after(options: &str, fault: Option<&str>) -> (u64, u32, i32, i32, i32) {
    let device = formatted("d", config());
    let m = Mounted::new(&device, options);
    let file = m.direct("seq/0");
    file.write_all_at(&pattern(1, 3 * BLOCK), 0).unwrap();
    match fault {
        Some(fault) => break_zone(device.as_ref(), fault, 3),
        None => {
            let mut io = Io::new(device.open().unwrap(), BLOCK);
            let wp = Sector((3 * ZONE + 3 * BLOCK as u64) / 512);
            io.write(wp, &[9; BLOCK], Flags::NONE).unwrap();
        }
    }
    assert_eq!(errno(file.write_at(&[1; BLOCK], 3 * BLOCK as u64)), libc::EIO, "{options}");
    let metadata = fs::metadata(m.path("seq/0")).unwrap();
    let code = |result: io::Result<usize>| result.err().map_or(0, |e| e.raw_os_error().unwrap());
    let read = code(file.read_at(&mut [0; BLOCK], 0));
    let reader = File::open(m.path("seq/0")).unwrap();
    assert_eq!(code(reader.read_at(&mut [0; BLOCK], 0)), read, "{options} {fault:?}");
    let written = code(file.write_at(&[1; BLOCK], metadata.len()));
    let other = code(m.open("seq/1", DIRECT).and_then(|other| other.write_at(&[1; BLOCK], 0)));
    (metadata.len() / BLOCK as u64, metadata.mode() & 0o777, read, written, other)
}

#[test]
fn device_errors_on_a_mount_follow_the_errors_option() {
    use libc::{EPERM, EROFS};
    let (ro, off) = (Some("zone_readonly"), Some("zone_offline"));
    for (options, fault, wanted) in [
        ("errors=remount-ro", None, (3, 0o640, 0, EROFS, EROFS)),
        ("errors=remount-ro", ro, (3, 0o440, 0, EPERM, EROFS)),
        ("errors=remount-ro", off, (0, 0, EPERM, EPERM, EROFS)),
        ("errors=zone-ro", None, (3, 0o440, 0, EPERM, 0)),
        ("errors=zone-ro", ro, (3, 0o440, 0, EPERM, 0)),
        ("errors=zone-ro", off, (0, 0, EPERM, EPERM, 0)),
        ("errors=zone-offline", None, (0, 0, EPERM, EPERM, 0)),
        ("errors=zone-offline", ro, (0, 0, EPERM, EPERM, 0)),
        ("errors=zone-offline", off, (0, 0, EPERM, EPERM, 0)),
        ("errors=repair", None, (5, 0o640, 0, 0, 0)),
        ("errors=repair", ro, (3, 0o440, 0, EPERM, 0)),
        ("errors=repair", off, (0, 0, EPERM, EPERM, 0)),
    ] {
        assert_eq!(after(options, fault), wanted, "{options} {fault:?}");
    }
}

/// Whether /proc/mounts shows the mount as read-only; waits for up to 20 seconds.
fn becomes_read_only(m: &Mounted) -> bool {
    let line = format!(" {} fuse ro,", m.dir.0.display());
    let has_it = || fs::read_to_string("/proc/mounts").unwrap().contains(&line);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !has_it() && std::time::Instant::now() < until {
        std::thread::yield_now();
    }
    has_it()
}

#[test]
fn the_mount_becomes_read_only_with_the_file_system() {
    let device = formatted("d", config());
    let m = Mounted::new(&device, "errors=remount-ro");
    let file = m.direct("seq/0");
    break_zone(device.as_ref(), "zone_readonly", 3);
    assert_eq!(errno(file.write_at(&[1; BLOCK], 0)), libc::EIO);
    assert_eq!(errno(m.open("seq/1", DIRECT)), libc::EROFS);
    assert_eq!(
        errno(fs::set_permissions(&m.dir.0, fs::Permissions::from_mode(0o500))),
        libc::EROFS
    );
    drop(file);
    // The remount needs root, and that no file is open for writing.
    if rustix::process::geteuid().is_root() {
        assert!(becomes_read_only(&m));
    }
    assert!(File::open(m.path("seq/1")).is_ok());
}

#[test]
fn modes_and_owners_are_kept_while_it_is_mounted() {
    let m = mounted("");
    let path = m.path("seq/0");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::chown(&path, Some(1000), Some(100)).unwrap();
    let file = fs::metadata(&path).unwrap();
    assert_eq!((file.mode(), file.uid(), file.gid()), (0o100600, 1000, 100));
    let seq = m.path("seq");
    let writable = fs::set_permissions(&seq, fs::Permissions::from_mode(0o755));
    assert_eq!(errno(writable), libc::EPERM);
    fs::set_permissions(&seq, fs::Permissions::from_mode(0o500)).unwrap();
    assert_eq!(fs::metadata(&seq).unwrap().mode(), 0o40500);
}

#[test]
fn files_are_locked_inside_the_kernel() {
    let m = mounted("");
    let (first, second) = (m.direct("seq/0"), m.direct("seq/0"));
    let lock = |file: &File| {
        // SAFETY: the descriptor is open; flock accesses no memory.
        unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }
    };
    assert_eq!(lock(&first), 0);
    assert_eq!(lock(&second), -1);
}

#[test]
fn files_are_written_and_read_in_parallel() {
    let m = mounted("");
    std::thread::scope(|scope| {
        for number in 0..4 {
            let m = &m;
            scope.spawn(move || {
                let (name, data) = (format!("seq/{number}"), pattern(number, CAPACITY as usize));
                let file = m.direct(&name);
                for (piece, at) in data.chunks(16 * BLOCK).zip((0..).step_by(16 * BLOCK)) {
                    file.write_all_at(piece, at).unwrap();
                }
                assert!(fs::read(m.path(&name)).unwrap() == data, "{name}");
            });
        }
        // Two threads write one conventional file.
        for half in 0..2 {
            let m = &m;
            scope.spawn(move || {
                let (file, data) = (m.direct("cnv/1"), pattern(half, ZONE as usize / 2));
                for (piece, at) in data.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
                    file.write_all_at(piece, half * ZONE / 2 + at).unwrap();
                }
            });
        }
    });
    let both = [pattern(0, ZONE as usize / 2), pattern(1, ZONE as usize / 2)].concat();
    assert!(fs::read(m.path("cnv/1")).unwrap() == both);
}

#[test]
fn unmount_keeps_the_files_and_does_not_wait_for_open_ones() {
    let device = formatted("d", config());
    let m = Mounted::new(&device, "");
    let data = pattern(5, 2 * BLOCK);
    m.direct("seq/3").write_all_at(&data, 0).unwrap();
    let open = File::open(m.path("seq/3")).unwrap();
    assert!(m.mount.unmount().unwrap_err().to_string().contains("busy"));
    assert!(!m.mount.has_ended());
    drop(open);
    unmount(&m);
    drop(m);
    let m = Mounted::new(&device, "ro");
    assert!(fs::read(m.path("seq/3")).unwrap() == data);
    assert_eq!(errno(m.open("seq/3", DIRECT)), libc::EROFS);
    // A program that has a file open when it is unmounted can continue to use it.
    let (open, dir) = (File::open(m.path("seq/3")).unwrap(), m.dir.0.clone());
    drop(m);
    assert!(!dir.exists(), "it is mounted there no longer");
    let mut back = [0; BLOCK];
    open.read_exact_at(&mut back, 0).unwrap();
    assert!(back == data[..BLOCK]);
}

#[test]
fn one_file_spans_conventional_zones_that_are_aggregated() {
    let device = disk("d", config());
    let options = "aggr_cnv,uid=12,gid=34,perm=644".parse().unwrap();
    format(device.as_ref(), &Format { options, ..Format::default() }).unwrap();
    let m = Mounted::new(&device, "");
    assert_eq!(names(&m.path("cnv")), ["0"]);
    let file = fs::metadata(m.path("cnv/0")).unwrap();
    assert_eq!((file.len(), file.uid(), file.gid()), (2 * ZONE, 12, 34));
    assert_eq!(file.mode(), 0o100644);
    let data = pattern(1, 20_000);
    m.open("cnv/0", 0).unwrap().write_all_at(&data, ZONE - 10_001).unwrap();
    let mut back = vec![0; data.len()];
    m.open("cnv/0", 0).unwrap().read_exact_at(&mut back, ZONE - 10_001).unwrap();
    assert!(back == data);
}

/// A tmpfs at a directory of its own, on which other file systems are mounted.
struct Below(PathBuf);

impl Drop for Below {
    fn drop(&mut self) {
        while run(&["umount", "-l"], &self.0) {}
        let _ = fs::remove_dir(&self.0);
    }
}

/// Runs a command on a directory and returns whether it succeeded.
fn run(words: &[&str], dir: &Path) -> bool {
    let output = std::process::Command::new(words[0]).args(&words[1..]).arg(dir).output();
    output.unwrap().status.success()
}

#[test]
fn mount_below_the_mount_point_stays_mounted() {
    if !rustix::process::geteuid().is_root() {
        return Capability::Root.is_missing("only root mounts what lies below");
    }
    let device = formatted("d", config());
    let name = format!("blockyard-zonefs-below-{}", std::process::id());
    let below = Below(std::env::temp_dir().join(name));
    let dir = &below.0;
    fs::create_dir_all(dir).unwrap();
    assert!(run(&["mount", "-t", "tmpfs", "below"], dir));
    fs::write(dir.join("below"), "here").unwrap();
    for round in 0..12 {
        let fs = ZoneFs::open(Arc::clone(&device), "".parse().unwrap()).unwrap();
        let mount = Mount::new(fs, dir, Box::new(|| {})).unwrap();
        assert_eq!(names(dir), ["cnv", "seq"]);
        match round % 4 {
            0 => mount.unmount().unwrap(),
            1 => assert!(run(&["umount"], dir)),
            2 => {
                // Another file system is mounted in its place.
                assert!(run(&["umount"], dir) && run(&["mount", "-t", "tmpfs", "other"], dir));
                drop(mount);
                assert!(names(dir).is_empty() && run(&["umount"], dir));
                continue;
            }
            _ => {}
        }
        drop(mount);
        assert_eq!(names(dir), ["below"], "round {round}");
    }
}

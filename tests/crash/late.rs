//! The server is killed while the disk has unfinished writes of it. No other process may get the
//! pool or file before these writes have ended, because they would overwrite later data.

use std::cell::Cell;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::attach::{FileSystem, Loop};
use crate::client::Client;
use crate::mounted::Mounted;
use crate::place::Place;
use crate::run::ok;
use crate::yard::Yard;

const MIB: u64 = 1 << 20;

/// Longer than the writes that the committer does by a blocking call.
const LONG: usize = 512 << 10;

/// What the kernel writes to a block device at once.
const SECTOR: usize = 512;

/// The number of polls and their interval: together a minute.
const LOOKS_MAX: u32 = 12_000;
const LOOK: Duration = Duration::from_millis(5);

/// A directory in which no segment is made has the same files in this many polls.
const SAME: u32 = 100;

#[track_caller]
fn until(is_so: impl Fn() -> bool) {
    let looks = (0..LOOKS_MAX).take_while(|_| !is_so()).map(|_| thread::park_timeout(LOOK));
    assert!(looks.count() < LOOKS_MAX as usize, "it does not come to that");
}

/// Whether a process has the lock of a pool.
fn is_locked(path: &str) -> bool {
    let lock = Path::new(path).join("lock");
    let file = File::open(if lock.exists() { lock.as_path() } else { Path::new(path) }).unwrap();
    matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

/// Waits until no segment is being made in a pool's directory. A thread that makes one holds the
/// directory's lock in the kernel while its write is delayed.
fn until_it_grows_no_more(path: &str) {
    let names = || {
        let names = fs::read_dir(path).unwrap().map(|it| it.unwrap().file_name());
        let mut names: Vec<String> = names.map(|it| it.into_string().unwrap()).collect();
        names.sort();
        names
    };
    let last = Cell::new((names(), 0));
    until(|| {
        let (before, same) = last.take();
        let now = names();
        let is_made = now.iter().any(|it| it.ends_with(".new"));
        let same = if is_made || now != before { 0 } else { same + 1 };
        last.set((now, same));
        same == SAME
    });
}

/// Whether a process has ended, except for threads that cannot end.
fn has_ended(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}

/// Releases the writes on drop, also after a panic: a process that waits for a write cannot end
/// before.
struct Hold<'m>(&'m Mounted);

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// How the server's write was submitted when the server is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// By io_uring: the process ends completely.
    Ring,
    /// By one or more threads, which cannot end.
    Thread,
}

/// Kills a server in the middle of a write to the slow disk, which holds the pool, a copy of it or
/// the file at `slow`. Returns the server, which may end only after the writes are released.
fn kill_in_a_write<'m>(mounted: &'m Mounted, slow: &str, device: &str, by: By) -> (Yard, Hold<'m>) {
    let mut yard = Yard::serve(&[device]);
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    client.write(0, 0, &[1; 4096], true).unwrap();
    assert_eq!(client.answer().unwrap().error, 0);
    if Path::new(slow).is_dir() {
        until_it_grows_no_more(slow);
    }
    mounted.hold();
    let hold = Hold(mounted);
    client.write(1, MIB, &[2; LONG], true).unwrap();
    until(|| mounted.held() > 0);
    yard.signal("KILL");
    match by {
        By::Ring => _ = yard.end(),
        By::Thread => until(|| has_ended(yard.pid())),
    }
    assert!(is_locked(slow), "the disk is free while a write is in flight");
    let is_device = slow.starts_with("/dev/");
    let exclusive = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(slow);
    assert!(exclusive.is_err() || !is_device, "not its own any more");
    (yard, hold)
}

/// Checks that a device has the data of [`kill_in_a_write`], and ends its server. Of the write that
/// was not answered, each unit of `unit` bytes is there whole, or not.
fn check(mut yard: Yard, unit: usize) {
    let mut client = Client::connect(&yard.socket(), "v0").unwrap();
    let mut found = vec![0; LONG];
    client.read(0, &mut found[..4096]).unwrap();
    assert!(found[..4096] == [1; 4096]);
    client.read(MIB, &mut found).unwrap();
    let is_whole = |unit: &[u8]| matches!(unit[0], 0 | 2) && unit.iter().all(|it| *it == unit[0]);
    assert!(found.chunks(unit).all(is_whole), "torn");
    drop(client);
    yard.signal("TERM");
    assert!(yard.end().success());
}

/// Kills a server in the middle of a write, and starts another server, which waits for the pool.
fn kill(mounted: &Mounted, slow: &str, device: &str, by: By) {
    let second;
    let (yard, hold) = kill_in_a_write(mounted, slow, device, by);
    let held = mounted.held();
    second = Yard::begin(&[device]);
    if slow.starts_with("/dev/") {
        assert_eq!(mounted.held(), held, "the waiting server has written");
    } else {
        // The data that the server must read for this message are in memory.
        let waits = format!("waiting for writes of process {}", yard.pid());
        until(|| second.complained().contains(&waits));
    }
    assert!(is_locked(slow));
    drop(hold);
    check(second.ready().unwrap(), LONG);
}

/// Kills a server of a file or block device in the middle of a write. Another server is refused it
/// until the write has ended.
fn kill_server_of_file(mounted: &Mounted, path: &str, io: &str, by: By) {
    let device = format!("file:///v0?path={path}&io={io}");
    let (_killed, hold) = kill_in_a_write(mounted, path, &device, by);
    let is_device = path.starts_with("/dev/");
    let refusal = if is_device { "another program has it exclusively" } else { "it is in use by" };
    let held = mounted.held();
    let (status, text) = Yard::try_serve(&[&device]).unwrap_err();
    assert!(!status.success() && text.contains(refusal), "{status}: {text}");
    assert_eq!(mounted.held(), held, "the refused server has written");
    assert!(is_locked(path));
    drop(hold);
    until(|| !is_locked(path));
    check(Yard::serve(&[&device]), SECTOR);
}

/// A slow disk, as a block device.
fn slow(mib: u64) -> (Mounted, Loop) {
    let mounted = Mounted::new(1);
    let image = mounted.file("image");
    File::create(&image).unwrap().set_len(mib * MIB).unwrap();
    let device = Loop::attach(&image);
    (mounted, device)
}

fn uri(path: &str, more: &str) -> String {
    format!("volume:///v0?path={path}&size=8M&compress=none{more}")
}

#[test]
fn a_disk_stays_locked_until_the_last_write_of_a_ring_has_ended() {
    let (mounted, device) = slow(80);
    kill(&mounted, &device.0, &uri(&device.0, "&store=uring"), By::Ring);
}

#[test]
fn a_disk_stays_locked_until_the_last_call_has_ended() {
    let (mounted, device) = slow(80);
    kill(&mounted, &device.0, &uri(&device.0, "&store=threads"), By::Thread);
}

#[test]
fn a_directory_stays_locked_until_the_last_write_has_ended() {
    let (mounted, device) = slow(200);
    ok(&["mke2fs", "-q", "-t", "ext4", &device.0]);
    let place = Place::new();
    let at = place.file("at");
    let file_system = FileSystem::mount("ext4", &device.0, &at);
    for store in ["uring", "threads"] {
        // With either store another thread may run the pool's maintenance.
        kill(&mounted, &at, &uri(&at, &format!("&store={store}")), By::Thread);
    }
    file_system.unmount();
}

/// The other copy's disk has finished its part of the write.
#[test]
fn two_copies_stay_locked_until_the_last_write_to_either_has_ended() {
    let (mounted, device) = slow(80);
    let place = Place::new();
    let fast = place.file("fast");
    File::create(&fast).unwrap().set_len(80 * MIB).unwrap();
    let more = format!("&path2={}&copies=2&store=uring", device.0);
    kill(&mounted, &device.0, &uri(&fast, &more), By::Ring);
}

#[test]
fn a_block_device_stays_locked_until_the_last_write_of_its_server_has_ended() {
    for (io, by) in [("uring", By::Ring), ("blocking", By::Thread)] {
        let (mounted, device) = slow(8);
        kill_server_of_file(&mounted, &device.0, io, by);
    }
}

#[test]
fn a_file_stays_locked_until_the_last_write_of_its_server_has_ended() {
    // The file system has no asynchronous writes, so threads of the kernel's io_uring wait too.
    for io in ["uring", "blocking"] {
        let mounted = Mounted::new(1);
        let path = mounted.file("image");
        File::create(&path).unwrap().set_len(8 * MIB).unwrap();
        kill_server_of_file(&mounted, &path, io, By::Thread);
    }
}

//! Files served as they are, with faults below: the disk fails a sync, a write or a read, it is
//! full, and the server is killed.

use std::fs::File;

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};

use crate::attach::{Loop, Unmount};
use crate::client::{Answer, Client, Command};
use crate::disk::{Counts, Fault};
use crate::history::PAGE;
use crate::mounted::Mounted;
use crate::place::Place;
use crate::rounds::{Seed, seeds};
use crate::run::ok;
use crate::yard::Yard;

/// The kills in `make test`.
const FEW: u64 = 8;

const BYTES: u64 = 8 << 20;
const PAGES: u64 = BYTES / PAGE as u64;
const EIO: u32 = 5;
const ENOSPC: u32 = 28;

/// Writes in flight at once before a kill.
const DEPTH: usize = 16;

fn serve(path: &str, more: &str) -> Yard {
    Yard::serve(&[&format!("file:///f0?path={path}{more}")])
}

fn connect(yard: &Yard) -> Client {
    Client::connect(&yard.socket(), "f0").unwrap()
}

/// Writes a page filled with `byte`, and returns the error.
fn write(client: &mut Client, page: u64, byte: u8, fua: bool) -> u32 {
    client.write(page, page * PAGE as u64, &[byte; PAGE], fua).unwrap();
    let Answer { cookie, error } = client.answer().unwrap();
    assert_eq!(cookie, page);
    error
}

/// What has failed when a device is latched.
const LATCHED: &str = "a flush or a write with FUA of its file has failed";

/// Each way to execute requests.
const WAYS: [&str; 2] = ["&io=uring", "&io=blocking"];

/// A write is not durable before a flush, and one with FUA is when it is answered.
#[track_caller]
fn assert_flush_and_fua_reach_the_disk(mounted: &Mounted, yard: &Yard, way: &str) {
    let mut client = connect(yard);
    let mut data = [0; PAGE];
    for number in 0..100 {
        let is_fua = number % 2 == 0;
        Rng::with_seed(number).fill(&mut data);
        client.write(number, number * PAGE as u64, &data, is_fua).unwrap();
        assert_eq!(client.answer().unwrap(), Answer { cookie: number, error: 0 });
        if !is_fua {
            assert!(mounted.disk().has_unsynced(&data), "{way}: request {number}");
            assert_eq!(client.flush().unwrap().error, 0);
        }
        assert!(!mounted.disk().has_unsynced(&data), "{way}: request {number}");
    }
}

#[test]
fn flush_and_fua_of_a_file_reach_the_disk() {
    for way in WAYS {
        let mounted = Mounted::new(1);
        let yard = serve(&mounted.file("image"), &format!("&size={BYTES}{way}"));
        assert_flush_and_fua_reach_the_disk(&mounted, &yard, way);
    }
}

/// A file of the disk as a block device: the kernel makes a flush of that a sync of the file.
fn block_device(mounted: &Mounted) -> Loop {
    let path = mounted.file("image");
    File::create(&path).unwrap().set_len(BYTES).unwrap();
    Loop::attach(&path)
}

#[test]
fn flush_and_fua_of_a_block_device_reach_the_disk() {
    for way in WAYS {
        let mounted = Mounted::new(1);
        let device = block_device(&mounted);
        let yard = serve(&device.0, way);
        assert_flush_and_fua_reach_the_disk(&mounted, &yard, way);
    }
}

#[test]
fn failed_flush_and_failed_fua_latch_a_block_device() {
    for way in WAYS {
        for is_fua in [false, true] {
            let mounted = Mounted::new(1);
            let device = block_device(&mounted);
            let yard = serve(&device.0, way);
            let mut client = connect(&yard);
            assert_eq!(write(&mut client, 7, 7, true), 0);
            assert_eq!(write(&mut client, 8, 8, false), 0);
            mounted.disk().fail(Some(Fault::Sync(0)));
            let error = match is_fua {
                true => write(&mut client, 9, 9, true),
                false => client.flush().unwrap().error,
            };
            assert_eq!(error, EIO, "{way} {is_fua}");
            mounted.disk().fail(None);
            assert_eq!(client.flush().unwrap().error, EIO, "{way} {is_fua}");
            assert_eq!(write(&mut client, 9, 9, false), EIO, "{way} {is_fua}");
            assert_eq!(write(&mut client, 9, 9, true), EIO, "{way} {is_fua}");
            let mut page = vec![0; PAGE];
            client.read(7 * PAGE as u64, &mut page).unwrap();
            assert_eq!(page, [7; PAGE], "{way} {is_fua}");
            let failed = if is_fua { "a write with FUA failed" } else { "a flush failed" };
            assert!(yard.complained().contains(failed), "{}", yard.complained());
            let shown = yard.command(&["show", "f0"]).ok().out;
            assert!(shown.contains(LATCHED), "{shown}");
        }
    }
}

/// After a failed flush, the kernel may have dropped writes that had completed. No later flush may
/// succeed.
#[test]
fn failed_sync_of_a_file_is_reported_by_all_later_flushes() {
    for way in WAYS {
        let mounted = Mounted::new(1);
        let path = mounted.file("image");
        let yard = serve(&path, &format!("&size={BYTES}{way}"));
        let mut clients = [connect(&yard), connect(&yard)];
        assert_eq!(write(&mut clients[0], 7, 7, true), 0);
        assert_eq!(write(&mut clients[0], 8, 8, false), 0);
        mounted.disk().fail(Some(Fault::Sync(0)));
        assert_eq!(clients[0].flush().unwrap().error, EIO, "{way}");
        mounted.disk().fail(None);
        for client in &mut clients {
            assert_eq!(client.flush().unwrap().error, EIO, "{way}");
            assert_eq!(write(client, 9, 9, false), EIO, "{way}");
            assert_eq!(write(client, 9, 9, true), EIO, "{way}");
            client.send(Command::Trim, 1, 0, PAGE as u32, false).unwrap();
            assert_eq!(client.answer().unwrap().error, EIO, "{way}");
            let mut page = vec![0; PAGE];
            client.read(7 * PAGE as u64, &mut page).unwrap();
            assert_eq!(page, [7; PAGE], "{way}");
        }
        let Counts { writes, syncs, .. } = mounted.disk().counts();
        assert_eq!((writes, syncs), (0, 0), "{way}: of a latched device");
        let said = yard.complained();
        assert!(
            said.contains("until the device is opened again, writes and flushes fail"),
            "{said}"
        );
        // The bug: these opened the file again, and the next flush of a client succeeded.
        let refused = yard.command(&["upgrade"]);
        assert!(refused.err.contains(LATCHED), "{refused:?}");
        drop(clients);
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2 * BYTES).unwrap();
        let refused = loop {
            let refused = yard.command(&["rescan", "f0"]);
            // The yard may not know yet that the clients have left.
            if !refused.err.contains("disconnect and close first") {
                break refused;
            }
        };
        assert!(refused.err.contains(LATCHED), "{refused:?}");
        let mut client = connect(&yard);
        assert_eq!(client.flush().unwrap().error, EIO, "{way}");
        for what in [&["show", "f0"][..], &["list"]] {
            let shown = yard.command(what).ok().out;
            assert!(shown.contains(LATCHED), "{shown}");
        }
        let status = yard.command(&["status"]);
        assert!(status.code == Some(2) && status.out.contains("device_latched f0"), "{status:?}");
        drop((client, yard));
        let yard = serve(&path, way);
        let mut client = connect(&yard);
        assert_eq!(write(&mut client, 9, 9, true), 0);
        let shown = yard.command(&["show", "f0"]).ok().out;
        let by = if way == WAYS[0] { "by io_uring" } else { "by blocking calls" };
        assert!(shown.contains(by) && !shown.contains("latched"), "{shown}");
    }
}

#[test]
fn failed_write_and_failed_read_of_a_file_are_reported_alone() {
    for way in WAYS {
        let mounted = Mounted::new(1);
        let yard = serve(&mounted.file("image"), &format!("&size={BYTES}{way}"));
        let mut client = connect(&yard);
        assert_eq!(write(&mut client, 7, 7, true), 0);
        mounted.disk().fail(Some(Fault::Write(0)));
        assert_eq!(write(&mut client, 8, 8, false), EIO, "{way}");
        mounted.disk().fail(Some(Fault::Read));
        let mut page = vec![0; PAGE];
        let error = client.read(7 * PAGE as u64, &mut page).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(EIO as i32), "{way}");
        mounted.disk().fail(None);
        client.read(7 * PAGE as u64, &mut page).unwrap();
        assert_eq!(page, [7; PAGE], "{way}");
        assert_eq!(write(&mut client, 8, 8, true), 0, "{way}");
    }
}

/// A sparse file is longer than its file system.
#[test]
fn full_file_system_below_a_file_is_reported_and_nothing_is_lost() {
    const MIB: usize = 1 << 20;
    let place = Place::new();
    let dir = place.file("small");
    std::fs::create_dir(&dir).unwrap();
    ok(&["mount", "-t", "tmpfs", "-o", "size=16M", "small", &dir]);
    let mount = Unmount(dir);
    for way in WAYS {
        let path = format!("{}/image", mount.0);
        let yard = serve(&path, &format!("&size=64M{way}"));
        let mut client = connect(&yard);
        let mut put = |number: u64, byte: u8| {
            client.write(number, number << 20, &[byte; MIB], number.is_multiple_of(2)).unwrap();
            client.answer().unwrap().error
        };
        let written = (0..64).find(|number| match put(*number, *number as u8 + 1) {
            0 => false,
            error => {
                assert_eq!(error, ENOSPC, "{way}: at {number} MiB");
                true
            }
        });
        let written = written.expect("the file system is smaller than the file");
        assert!((8..=16).contains(&written), "{way}: {written}");
        assert_eq!(put(0, 77), 0, "{way}: the file has this space already");
        assert_eq!(client.flush().unwrap().error, 0, "{way}");
        // A discard makes space.
        client.send(Command::Trim, 1, 1 << 20, 4 << 20, false).unwrap();
        assert_eq!(client.answer().unwrap().error, 0, "{way}");
        client.write(written, written << 20, &[9; MIB], true).unwrap();
        assert_eq!(client.answer().unwrap().error, 0, "{way}");
        let mut found = vec![0; MIB];
        for number in 0..=written {
            let wanted = match number {
                0 => 77,
                1..5 => 0,
                _ if number == written => 9,
                _ => number as u8 + 1,
            };
            client.read(number << 20, &mut found).unwrap();
            assert!(found.iter().all(|byte| *byte == wanted), "{way}: at {number} MiB");
        }
        drop((client, yard));
        std::fs::remove_file(&path).unwrap();
        // The kernel closes the rings of a process, and their files, some time after its end.
        let free = || {
            let found = rustix::fs::statvfs(&mount.0).unwrap();
            found.f_bavail * found.f_frsize
        };
        while free() < 15 << 20 {
            std::thread::yield_now();
        }
    }
}

/// The writes to each page since the last check: those that may be there.
struct Pages {
    /// The number of the last answered write of each page.
    answered: Vec<u64>,
    /// The write that was sent to each page and not answered.
    sent: Vec<Option<u64>>,
    next: u64,
}

impl Pages {
    fn bytes(page: u64, number: u64) -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        if number > 0 {
            Rng::with_seed(page << 32 | number).fill(&mut bytes);
        }
        bytes
    }

    /// Writes random pages until `answers` have come, or the server is gone.
    fn write(&mut self, client: &mut Client, random: &mut Rng, answers: u64) {
        let mut in_flight = self.sent.iter().flatten().count();
        for _ in 0..answers {
            while in_flight < DEPTH {
                let page = random.u64(..PAGES);
                if self.sent[page as usize].is_some() {
                    continue;
                }
                let bytes = Pages::bytes(page, self.next);
                self.sent[page as usize] = Some(self.next);
                self.next += 1;
                if client.write(page, page * PAGE as u64, &bytes, random.bool()).is_err() {
                    return;
                }
                in_flight += 1;
            }
            let Ok(answer) = client.answer() else { return };
            assert_eq!(answer.error, 0);
            let page = answer.cookie as usize;
            self.answered[page] = self.sent[page].take().expect("it was sent");
            in_flight -= 1;
        }
    }

    /// Checks that each page has its last answered write, or the one that was in flight. A write in
    /// flight may be there in part, in sectors.
    fn check(&mut self, contents: &[u8], seed: &Seed) {
        for (page, found) in contents.chunks(PAGE).enumerate() {
            let old = Pages::bytes(page as u64, self.answered[page]);
            let Some(number) = self.sent[page].take() else {
                assert!(found == old, "{seed}: page {page} has not its answered write");
                continue;
            };
            let new = Pages::bytes(page as u64, number);
            let sectors = found.chunks(512).zip(old.chunks(512).zip(new.chunks(512)));
            for (sector, (old, new)) in sectors {
                assert!(sector == old || sector == new, "{seed}: page {page} has foreign bytes");
            }
            self.answered[page] = if found == new { number } else { self.answered[page] };
            if found != old && found != new {
                // The next write of this page starts from a known state.
                self.sent[page] = Some(number);
            }
        }
    }
}

/// `kill -9` at random moments, repeatedly, while a client writes. The killed server's last writes
/// end before the next one opens the file.
#[test]
fn answered_writes_to_a_file_survive_kills_of_the_server() {
    let place = Place::new();
    let path = place.file("image");
    let mut pages =
        Pages { answered: vec![0; PAGES as usize], sent: vec![None; PAGES as usize], next: 1 };
    drop(serve(&path, &format!("&size={BYTES}")));
    for seed in seeds(FEW) {
        let seed = Seed(seed);
        let mut random = Rng::with_seed(seed.0);
        let way = ["", "&direct=off", "&io=blocking", "&scheduler=mq-deadline"];
        let yard = serve(&path, way[random.usize(..way.len())]);
        let mut client = connect(&yard);
        pages.check(&client.contents().unwrap(), &seed);
        for page in 0..PAGES {
            // A page that a killed write left in part is written again.
            if pages.sent[page as usize].take().is_some() {
                let bytes = Pages::bytes(page, pages.next);
                client.write(page, page * PAGE as u64, &bytes, true).unwrap();
                assert_eq!(client.answer().unwrap().error, 0);
                pages.answered[page as usize] = pages.next;
                pages.next += 1;
            }
        }
        let answers = random.u64(1..1500);
        pages.write(&mut client, &mut random, answers);
        let process = Pid::from_raw(yard.pid() as i32).unwrap();
        kill_process(process, Signal::KILL).unwrap();
        pages.write(&mut client, &mut random, u64::MAX);
    }
    let yard = serve(&path, "");
    let seed = Seed(0);
    pages.check(&connect(&yard).contents().unwrap(), &seed);
}

//! What the target asks of a device, and when, as the device sees it: a device that counts the
//! calls and holds the threads that make them.
#![allow(clippy::unwrap_used, clippy::disallowed_types)] // A test may.

mod initiator;

use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use blockyard_core::{Bio, Completion, DeviceError, Op, Sector, Status};
use blockyard_null::NullConfig;
use blockyard_nvme::{ConnectionThreads, HostAccess, TargetOptions, TargetServer};
use blockyard_testing::watched_disk::{DiskWatch, WatchedDisk};
use initiator::{
    Initiator, Target, command, disk, pattern, plain, pointed, target_for, with, zoned,
};

const WATCHED: &str = "nqn.2026-11.io.blockyard:watched";
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const COMPARE: u8 = 0x05;
const VERIFY: u8 = 0x0c;
const WRITE_ZEROES: u8 = 0x08;
const DISCARD: u8 = 0x09;
const ZONE_SEND: u8 = 0x79;
const ZONE_RECEIVE: u8 = 0x7a;
/// The blocks of 512 bytes that the device zeroes or discards at once, at most.
const PIECE: u64 = 16384;
/// The blocks of the device: 4 GiB.
const BLOCKS: u64 = 1 << 23;

#[derive(Default)]
struct Calls {
    /// The operations with their first block and length, in the order in which they were begun.
    begun: Vec<(Op, u64, u64)>,
    /// The names of the threads that have opened a channel.
    opened: Vec<String>,
    /// The reports of zones so far.
    reports: usize,
    /// Their number when the device was first given a read after one of them.
    reports_before_read: Option<usize>,
    /// The most blocks to zero and discard in one `submit`.
    most_at_once: u64,
    /// The call in which threads stop.
    held: Option<HeldCall>,
    /// The number of these calls that do not stop, before the others.
    let_through: usize,
    /// The operation that fails.
    failing: Option<Op>,
    /// The bios that fail when they are complete, by their user data.
    to_fail: Vec<u64>,
    /// The threads that wait in each of the calls.
    waiting: [usize; 2],
}

/// A call in which a device can hold threads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HeldCall {
    Submit,
    Report,
}

#[derive(Default)]
struct Watched {
    calls: Mutex<Calls>,
    changed: Condvar,
}

impl Watched {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap()
    }

    /// From now on each thread stops in this call, and in no other.
    fn hold(&self, call: HeldCall) -> Held<'_> {
        self.calls().held = Some(call);
        self.changed.notify_all();
        Held(self, call)
    }

    fn wait_until_a_thread_is_held(&self, call: HeldCall) {
        let is_none = |calls: &mut Calls| calls.waiting[call as usize] == 0;
        drop(self.changed.wait_while(self.calls(), is_none).unwrap());
    }

    /// Stops the thread if the call is held.
    fn pass(&self, mut calls: MutexGuard<'_, Calls>, call: HeldCall) {
        calls.waiting[call as usize] += 1;
        self.changed.notify_all();
        if calls.held == Some(call) && calls.let_through > 0 {
            calls.let_through -= 1;
            calls.waiting[call as usize] -= 1;
            return;
        }
        let is_held = |calls: &mut Calls| calls.held == Some(call);
        calls = self.changed.wait_while(calls, is_held).unwrap();
        calls.waiting[call as usize] -= 1;
    }

    /// The write-zeroes and discards since the last call.
    fn take_begun(&self) -> Vec<(Op, u64, u64)> {
        let begun = std::mem::take(&mut self.calls().begun);
        begun.into_iter().filter(|(op, ..)| matches!(op, Op::WriteZeroes | Op::Discard)).collect()
    }
}

/// Lets the threads go on, also if the test fails.
struct Held<'a>(&'a Watched, HeldCall);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.calls().held.take_if(|call| *call == self.1);
        self.0.changed.notify_all();
    }
}

impl DiskWatch for Watched {
    fn open(&self) -> Result<(), DeviceError> {
        let thread = std::thread::current();
        self.calls().opened.push(thread.name().unwrap_or_default().to_owned());
        Ok(())
    }

    fn report_zones(&self, _: Sector) -> Result<(), DeviceError> {
        let mut calls = self.calls();
        calls.reports += 1;
        self.pass(calls, HeldCall::Report);
        Ok(())
    }

    fn submit(&self, bios: &[Bio]) {
        let mut calls = self.calls();
        for Bio { op, sector, sectors, user_data, .. } in bios {
            calls.begun.push((*op, sector.0, *sectors));
            if calls.failing == Some(*op) {
                calls.to_fail.push(*user_data);
            }
            if *op == Op::Read && calls.reports > 0 {
                let reports = calls.reports;
                calls.reports_before_read.get_or_insert(reports);
            }
        }
        let to_clear = bios.iter().filter(|bio| matches!(bio.op, Op::WriteZeroes | Op::Discard));
        calls.most_at_once = calls.most_at_once.max(to_clear.map(|bio| bio.sectors).sum());
        self.pass(calls, HeldCall::Submit);
    }

    fn reap(&self, completions: &mut [Completion]) {
        let mut calls = self.calls();
        for completion in completions {
            if let Some(at) = calls.to_fail.iter().position(|it| *it == completion.user_data) {
                calls.to_fail.swap_remove(at);
                completion.status = Status::IoErr;
            }
        }
    }
}

/// A target with a watched device, and this many threads.
fn target_on(threads: usize) -> (Target, Arc<Watched>) {
    target_of(threads, NullConfig { size: BLOCKS << 9, ..plain() })
}

/// As `target_on`, with a device of this configuration.
fn target_of(threads: usize, config: NullConfig) -> (Target, Arc<Watched>) {
    let watched = Arc::<Watched>::default();
    let Target { subsystems, server } = target_for(HostAccess::default(), TargetOptions::default());
    drop(server);
    let inner = disk("watched", config);
    subsystems.add("watched", WatchedDisk::over(inner, Arc::clone(&watched))).unwrap();
    let threads = ConnectionThreads::new(NonZeroUsize::new(threads).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (served, options) = (Arc::clone(&subsystems), TargetOptions::default());
    let server = TargetServer::start_on(threads, served, vec![listener], options).unwrap();
    (Target { subsystems, server }, watched)
}

/// Ranges of first block and length, as a Dataset Management command lists them.
fn ranges(list: &[(u64, u64)]) -> ([u8; 64], Vec<u8>) {
    let mut data = Vec::new();
    for (first, blocks) in list {
        data.extend([0; 4]);
        data.extend((*blocks as u32).to_le_bytes());
        data.extend(first.to_le_bytes());
    }
    (with(with(command(DISCARD, 0, 0), 10, list.len() as u32 - 1), 11, 4), data)
}

/// The operations that a range becomes.
fn pieces(op: Op, first: u64, blocks: u64) -> Vec<(Op, u64, u64)> {
    let (mut at, end, mut pieces) = (first, first + blocks, Vec::new());
    while at < end {
        let next = end.min((at / PIECE + 1) * PIECE);
        pieces.push((op, at, next - at));
        at = next;
    }
    pieces
}

/// A write of a host that has given up and connected again was executed after one of its next
/// association, and overwrote it: the thread of the old connections was in a call of a device, and
/// had not seen that the host had closed them.
#[test]
fn a_write_of_an_earlier_association_is_not_executed_after_one_of_the_next() {
    let (target, watched) = target_on(2);
    let write = |io: &mut Initiator, block, seed| {
        io.capsule(pointed(command(WRITE, block, 1), 0x01, 512), &pattern(512, seed));
    };
    // A connection on the first thread, so that the admin queue gets the second one.
    let _first = target.idle(0);
    let (admin, controller) = target.admin(WATCHED, 0);
    let (mut here, mut elsewhere) = (Vec::new(), Vec::new());
    for queue in 1..=8 {
        let mut io = target.idle(0);
        assert_eq!(io.connect(WATCHED, queue, controller, 31, 0).status, 0);
        let is_here = watched.calls().opened.last().unwrap() == "nvme-1";
        if is_here { here.push(io) } else { elsewhere.push(io) }
    }
    // The first thread gets the next connections.
    drop(elsewhere);
    while target.server.connections().len() > 2 + here.len() {
        std::thread::yield_now();
    }
    let held = watched.hold(HeldCall::Submit);
    write(&mut here[0], 100, 0);
    watched.wait_until_a_thread_is_held(HeldCall::Submit);
    write(&mut here[1], 8, 1);
    drop((here, admin));
    let mut admin = target.idle(0);
    let connected = admin.connect(WATCHED, 0, 0xffff, 31, 0);
    assert_eq!(connected.status, 0);
    assert_eq!(admin.property_set(0x14, 0x46_0061).status, 0);
    assert_eq!(admin.property_get(0x1c, false).result, 0, "not ready: a write may be there");
    let mut io = target.idle(0);
    let mut connect = || io.connect(WATCHED, 1, connected.result as u16, 31, 0).status;
    assert_eq!(connect(), 0x0181);
    drop(held);
    while admin.property_get(0x1c, false).result == 0 {
        std::thread::yield_now();
    }
    assert_eq!(connect(), 0);
    assert_eq!(io.execute(command(WRITE, 8, 1), &pattern(512, 2)).status, 0);
    for _ in 0..20 {
        assert_eq!(io.read(command(READ, 8, 1), 512).data, pattern(512, 2));
    }
}

/// A later association waits for one turn of each connection of an earlier one, not for its end.
#[test]
fn a_host_may_have_two_associations_at_once() {
    let (target, _watched) = target_on(2);
    let (mut first, controller) = target.admin(WATCHED, 0);
    let mut first_io = target.io(WATCHED, controller, 0, 0);
    let (mut second, controller) = target.admin(WATCHED, 0);
    let mut second_io = target.io(WATCHED, controller, 0, 0);
    for (admin, io) in [(&mut first, &mut first_io), (&mut second, &mut second_io)] {
        assert_eq!(admin.property_get(0x1c, false).result, 1);
        assert_eq!(io.execute(command(WRITE, 8, 1), &pattern(512, 1)).status, 0);
    }
}

#[test]
fn a_long_write_zeroes_becomes_pieces() {
    let (target, watched) = target_on(1);
    let (_admin, controller) = target.admin(WATCHED, 0);
    let mut io = target.io(WATCHED, controller, 0, 0);
    for block in [99, 100, PIECE, 65635, 65636] {
        assert_eq!(io.execute(command(WRITE, block, 1), &pattern(512, 7)).status, 0);
    }
    assert_eq!(io.execute(command(WRITE_ZEROES, 100, 65536), &[]).status, 0);
    let begun = watched.take_begun();
    assert_eq!(begun, pieces(Op::WriteZeroes, 100, 65536));
    assert_eq!(begun.len(), 5);
    for (block, is_zeroed) in [(99, false), (100, true), (PIECE, true), (65635, true)] {
        let wanted = if is_zeroed { vec![0; 512] } else { pattern(512, 7) };
        assert_eq!(io.read(command(READ, block, 1), 512).data, wanted, "block {block}");
    }
    assert_eq!(io.read(command(READ, 65636, 1), 512).data, pattern(512, 7));
    // Of many commands, the device gets no more at once than of one.
    for at in 0..16 {
        io.capsule(command(WRITE_ZEROES, at * 65536, 65536), &[]);
    }
    for _ in 0..16 {
        assert_eq!(io.done().status, 0);
    }
    assert_eq!(watched.take_begun().len(), 16 * 4);
    assert!(watched.calls().most_at_once <= PIECE, "{}", watched.calls().most_at_once);
}

#[test]
fn a_long_range_to_discard_becomes_pieces() {
    let (target, watched) = target_on(1);
    let (_admin, controller) = target.admin(WATCHED, 0);
    let mut io = target.io(WATCHED, controller, 0, 0);
    let list = [(5, 81920), (1 << 20, 8), (7, 0), (1 << 21, PIECE)];
    let (sqe, data) = ranges(&list);
    assert_eq!(io.execute(sqe, &data).status, 0);
    let wanted = list.map(|(first, blocks)| pieces(Op::Discard, first, blocks)).concat();
    assert_eq!(watched.take_begun(), wanted);
    // A range beyond the end fails the command, after those before it.
    let (sqe, data) = ranges(&[(0, PIECE + 1), (BLOCKS, 1), (9, 1)]);
    assert_eq!(io.execute(sqe, &data).status, 0x4080);
    assert_eq!(watched.take_begun(), pieces(Op::Discard, 0, PIECE + 1));
    assert!(watched.calls().most_at_once <= PIECE, "{}", watched.calls().most_at_once);
}

#[test]
fn an_ending_connection_begins_no_further_piece() {
    let (target, watched) = target_on(1);
    let (admin, controller) = target.admin(WATCHED, 0);
    let mut io = target.io(WATCHED, controller, 0, 0);
    let held = watched.hold(HeldCall::Submit);
    let (sqe, data) = ranges(&[(0, BLOCKS)]);
    io.capsule(pointed(sqe, 0x01, data.len()), &data);
    watched.wait_until_a_thread_is_held(HeldCall::Submit);
    // The controller ends, and cuts the queue, at the next turn of the admin queue: each turn of
    // the queue before that begins at most eight pieces.
    drop(admin);
    drop(held);
    io.ends();
    let begun = watched.take_begun().len() as u64;
    assert!((1..=64).contains(&begun), "{begun} of {} pieces", BLOCKS / PIECE);
}

/// Commands that a zone did not permit cost a report of zones each, all in one round: a host with
/// a queue of them kept the thread from the other connections.
#[test]
fn refused_commands_cost_a_report_of_zones_each_round() {
    const COUNT: usize = 64;
    let (target, watched) = target_of(1, zoned());
    let (_admin, controller) = target.admin(WATCHED, 0);
    let mut io = target.io(WATCHED, controller, 0, 0);
    let mut other = target.idle(0);
    assert_eq!(other.connect(WATCHED, 2, controller, 31, 0).status, 0);
    let held = watched.hold(HeldCall::Submit);
    io.capsule(pointed(command(READ, 0, 1), 0x5a, 4096), &[]);
    watched.wait_until_a_thread_is_held(HeldCall::Submit);
    for _ in 0..COUNT {
        // Close of an empty zone.
        io.capsule(with(command(ZONE_SEND, 1024, 0), 13, 1), &[]);
    }
    let reports_held = watched.hold(HeldCall::Report);
    drop(held);
    watched.wait_until_a_thread_is_held(HeldCall::Report);
    other.capsule(pointed(command(READ, 0, 1), 0x5a, 4096), &[]);
    drop(reports_held);
    assert_eq!(io.done().status, 0);
    assert_eq!(other.done().status, 0);
    for _ in 0..COUNT {
        assert_eq!(io.done().status, 0x41bf);
    }
    let calls = watched.calls();
    // A turn has eight rounds.
    let before = calls.reports_before_read.unwrap();
    assert!((1..=16).contains(&before), "{before} reports before the read of another connection");
    assert_eq!(calls.reports, COUNT);
}

/// Zones of 1 MiB, 256 blocks of 4 KiB each.
const MANY_ZONES: u64 = 1 << 18;

/// A target with a device of many zones, of which two are open; and an I/O queue of it.
fn target_with_many_zones() -> (Target, Arc<Watched>, [Initiator; 3]) {
    let zones = NullConfig { size: MANY_ZONES << 20, zone_size: 1 << 20, ..zoned() };
    let config = NullConfig { zone_capacity: 1 << 20, memory_backed: false, ..zones };
    let (target, watched) = target_of(1, config);
    let (admin, controller) = target.admin(WATCHED, 0);
    let mut io = target.io(WATCHED, controller, 0, 0);
    let mut other = target.idle(0);
    assert_eq!(other.connect(WATCHED, 2, controller, 31, 0).status, 0);
    for zone in [5000, MANY_ZONES - 1] {
        assert_eq!(io.execute(with(command(ZONE_SEND, zone * 256, 0), 13, 3), &[]).status, 0);
    }
    (target, watched, [admin, io, other])
}

/// A report of the zones from `first` on, with a filter, of this many bytes.
fn report(first: u64, filter: u32, partial: bool, bytes: u32) -> [u8; 64] {
    let sqe = with(command(ZONE_RECEIVE, first * 256, 0), 12, bytes / 4 - 1);
    pointed(with(sqe, 13, filter << 8 | u32::from(partial) << 16), 0x5a, bytes as usize)
}

/// A command that looked at all zones of a large device did so in one round, whatever the number of
/// zones was.
#[test]
fn a_command_that_looks_at_all_zones_does_so_in_parts() {
    let (_target, watched, [_admin, mut io, mut other]) = target_with_many_zones();
    let close_all = with(command(ZONE_SEND, 0, 0), 13, 1 << 8 | 1);
    for (sqe, found) in [(report(0, 0, false, 64), MANY_ZONES), (close_all, 0)] {
        watched.calls().reports = 0;
        watched.calls().reports_before_read = None;
        let held = watched.hold(HeldCall::Report);
        io.capsule(sqe, &[]);
        watched.wait_until_a_thread_is_held(HeldCall::Report);
        other.capsule(pointed(command(READ, 0, 1), 0x5a, 4096), &[]);
        drop(held);
        assert_eq!(other.done().status, 0);
        let done = io.done();
        assert_eq!(done.status, 0);
        if found > 0 {
            assert_eq!(done.data[..8], found.to_le_bytes());
        }
        let calls = watched.calls();
        assert!(calls.reports as u64 >= MANY_ZONES / 256, "{} queries", calls.reports);
        // A turn has eight rounds of 16 queries.
        let before = calls.reports_before_read.unwrap();
        assert!((1..=256).contains(&before), "{before} queries before the read of another queue");
    }
    assert_eq!(io.read(report(0, 3, false, 64), 64).data[0], 0, "all are closed");
}

#[test]
fn a_report_in_parts_is_that_of_all_zones() {
    let (_target, watched, [_admin, mut io, _other]) = target_with_many_zones();
    let word = |data: &[u8], at: usize| u64::from_le_bytes(*data[at..].first_chunk().unwrap());
    let open = io.read(report(0, 3, true, 64 * 4), 64 * 4).data;
    let starts = [64, 128].map(|at| word(&open, at + 16));
    assert_eq!((word(&open, 0), starts), (2, [5000 * 256, (MANY_ZONES - 1) * 256]));
    assert_eq!(open[192..], [0; 64]);
    let short = io.read(report(4999, 3, false, 128), 128).data;
    assert_eq!((word(&short, 0), word(&short, 64 + 16)), (2, 5000 * 256));
    let later = io.read(report(5001, 3, false, 128), 128).data;
    assert_eq!((word(&later, 0), word(&later, 64 + 16)), (1, (MANY_ZONES - 1) * 256));
    // A report that is full looks no further.
    watched.calls().reports = 0;
    let full = io.read(report(70, 0, true, 64 * 301), 64 * 301).data;
    assert_eq!((word(&full, 0), word(&full, 300 * 64 + 16)), (300, 369 * 256));
    assert_eq!(watched.calls().reports, 2);
}

/// A command with FUA for the blocks 8 to 15.
fn fua(opcode: u8) -> [u8; 64] {
    with(command(opcode, 8, 8), 12, 1 << 30 | 7)
}

/// The bug: a read with FUA returned data that a power cut could take back.
#[test]
fn a_read_with_fua_flushes_a_volatile_cache() {
    for (cache_size, wanted) in [(1 << 20, &[Op::Read, Op::Flush][..]), (0, &[Op::Read])] {
        let (target, watched) = target_of(1, NullConfig { cache_size, ..plain() });
        let (_admin, controller) = target.admin(WATCHED, 0);
        let mut io = target.io(WATCHED, controller, 0, 0);
        let data = pattern(4096, 1);
        assert_eq!(io.execute(command(WRITE, 8, 8), &data).status, 0);
        let begun = || {
            let begun = std::mem::take(&mut watched.calls().begun);
            begun.into_iter().map(|(op, ..)| op).collect::<Vec<_>>()
        };
        begun();
        assert_eq!(io.read(fua(READ), 4096).data, data);
        assert_eq!(begun(), wanted);
        assert_eq!(io.execute(fua(COMPARE), &data).status, 0);
        assert_eq!(begun(), wanted);
        assert_eq!(io.execute(fua(VERIFY), &[]).status, 0);
        assert_eq!(begun(), wanted);
        assert_eq!(io.read(command(READ, 8, 8), 4096).data, data);
        assert_eq!(begun(), [Op::Read]);
    }
}

/// The bug: the flush came before the read, which then returned a write that was in the cache by
/// then, and was not flushed.
#[test]
fn a_read_with_fua_returns_no_write_that_completes_after_its_flush() {
    let (target, watched) = target_of(2, NullConfig { cache_size: 1 << 20, ..plain() });
    let (_admin, controller) = target.admin(WATCHED, 0);
    let mut io = target.io(WATCHED, controller, 0, 0);
    let mut other = target.idle(0);
    assert_eq!(other.connect(WATCHED, 2, controller, 31, 0).status, 0);
    // The first operation of the read passes, and the second one waits.
    watched.calls().let_through = 1;
    let held = watched.hold(HeldCall::Submit);
    io.capsule(pointed(fua(READ), 0x5a, 4096), &[]);
    watched.wait_until_a_thread_is_held(HeldCall::Submit);
    watched.calls().let_through = 1;
    assert_eq!(other.execute(command(WRITE, 8, 8), &pattern(4096, 1)).status, 0);
    drop(held);
    let done = io.done();
    assert_eq!(done.status, 0);
    assert!(done.data == [0; 4096], "the read returns what no flush has made durable");
}

#[test]
fn a_read_with_fua_fails_if_its_flush_does() {
    let (target, watched) = target_of(1, NullConfig { cache_size: 1 << 20, ..plain() });
    let (_admin, controller) = target.admin(WATCHED, 0);
    let mut io = target.io(WATCHED, controller, 0, 0);
    watched.calls().failing = Some(Op::Flush);
    let read = io.read(fua(READ), 4096);
    assert_eq!((read.status, read.data.len()), (0x4006, 0));
    assert_eq!(io.execute(fua(COMPARE), &[0; 4096]).status, 0x4006);
    assert_eq!(io.execute(fua(VERIFY), &[]).status, 0x4006);
    assert_eq!(io.read(command(READ, 8, 8), 4096).status, 0);
}

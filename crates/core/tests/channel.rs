//! The stack over a device that writes down what it is asked: merging, splitting, flush sequences,
//! order, tags, middleware and the adapters.
#![allow(clippy::disallowed_types, clippy::unwrap_used, unsafe_code)]

use std::sync::{Arc, Mutex};

use blockyard_core::blocking::Io;
use blockyard_core::channel::{ChannelConfig, Stats};
use blockyard_core::clock::Clock;
use blockyard_core::inject::{Injection, Rule};
use blockyard_core::middleware::{Delayed, Faulty, Trace, Traced};
use blockyard_core::sched::NoneScheduler;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::*;

/// What the device was asked, in order: operation, sector, sectors, FUA.
type Log = Arc<Mutex<Vec<(Op, u64, u64, bool)>>>;

/// A memory device of 1 MiB that logs, and whose habits a test can choose.
struct Recorder {
    geometry: Geometry,
    limits: Limits,
    log: Log,
    /// Starts at most so many requests per call, and says so only by leaving the rest.
    starts_max: usize,
    /// Completes at the next poll instead of at once.
    late: bool,
    /// Breaks up merged requests that touch this sector, and fails the bio that does.
    bad: Option<u64>,
}

const SECTORS: u64 = 2048;

impl Recorder {
    fn new() -> Recorder {
        Recorder {
            geometry: Geometry {
                sectors: SECTORS,
                logical_block_bytes: 512,
                physical_block_bytes: 512,
                zones: None,
            },
            limits: Limits { sectors_max: 64, ..Limits::unlimited(16) },
            log: Log::default(),
            starts_max: usize::MAX,
            late: false,
            bad: None,
        }
    }

    fn cached(fua: bool) -> Recorder {
        let mut recorder = Recorder::new();
        recorder.limits.write_cache = true;
        recorder.limits.fua = fua;
        recorder
    }
}

impl Device for Recorder {
    type Queue = RecorderQueue;

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open_queue(&self) -> Result<RecorderQueue, DeviceError> {
        Ok(RecorderQueue {
            memory: vec![0; (SECTORS * SECTOR_BYTES) as usize],
            log: Arc::clone(&self.log),
            starts_max: self.starts_max,
            late: self.late,
            bad: self.bad,
            held: Done::with_capacity(16),
        })
    }

    fn report_zones(
        &self,
        _from: Sector,
        _zones_max: usize,
        _out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        Ok(())
    }
}

struct RecorderQueue {
    memory: Vec<u8>,
    log: Log,
    starts_max: usize,
    late: bool,
    bad: Option<u64>,
    held: Done,
}

impl RecorderQueue {
    fn copy(&mut self, started: &Started) {
        let mut at = started.sector().bytes() as usize;
        for segment in started.segments() {
            let memory = &mut self.memory[at..at + segment.len_bytes];
            // SAFETY: a segment is valid for its length until the request is completed, and the
            // tests keep no references into regions.
            let data =
                unsafe { std::slice::from_raw_parts_mut(segment.data.as_ptr(), segment.len_bytes) };
            match started.op() {
                Op::Read => data.copy_from_slice(memory),
                _ => memory.copy_from_slice(data),
            }
            at += segment.len_bytes;
        }
    }
}

impl DeviceQueue for RecorderQueue {
    fn start(&mut self, _now: Nanos, batch: &mut Batch, done: &mut Done) {
        for _ in 0..self.starts_max {
            let Some(started) = batch.next() else { return };
            let range = started.sector().0..started.end().0;
            let hit = self.bad.is_some_and(|bad| range.contains(&bad));
            if hit && started.is_merged() {
                return batch.break_up(started);
            }
            let fua = started.flags().contains(Flags::FUA);
            let entry = (started.op(), started.sector().0, started.sectors(), fua);
            self.log.lock().unwrap().push(entry);
            if !hit {
                self.copy(&started);
            }
            let into = if self.late { &mut self.held } else { &mut *done };
            into.complete(started, if hit { Status::Medium } else { Status::Ok });
        }
    }

    fn poll(&mut self, _now: Nanos, done: &mut Done) {
        while done.take_from(&mut self.held) {}
    }

    fn room(&self) -> usize {
        usize::MAX
    }

    fn due(&self) -> Due {
        if self.held.is_empty() { Due::Never } else { Due::At(Nanos(0)) }
    }
}

/// A clock that stands still until somebody sleeps.
#[derive(Clone, Default)]
struct Still(Arc<Mutex<u64>>);

impl Clock for Still {
    fn now(&self) -> Nanos {
        Nanos(*self.0.lock().unwrap())
    }

    fn sleep_until(&self, at: Nanos) {
        let mut now = self.0.lock().unwrap();
        *now = (*now).max(at.0);
    }
}

fn composed<D: Device>(device: D) -> Composed<D, NoneScheduler, Still> {
    composed_of(device, 64, Still::default())
}

fn composed_of<D: Device>(
    device: D,
    depth: u16,
    clock: Still,
) -> Composed<D, NoneScheduler, Still> {
    let config = ChannelConfig { depth };
    Composed::with_clock("test".into(), "test", device, config, NoneScheduler::new, clock)
}

/// A channel with one region of 256 KiB.
struct Rig {
    channel: Box<dyn Channel>,
    region: Arc<Region>,
    id: RegionId,
}

impl Rig {
    fn new(disk: &dyn Disk) -> Rig {
        let mut channel = disk.open().unwrap();
        let region = Region::alloc(256 << 10);
        let id = channel.register(Arc::clone(&region));
        Rig { channel, region, id }
    }

    fn buf(&self, offset: u64) -> BufRef {
        BufRef { region: self.id, offset }
    }

    /// Pushes everything at once, submits, and reaps until all is done. In the order of user data.
    fn run(&mut self, bios: &[Bio]) -> Vec<Completion> {
        let numbered: Vec<Bio> =
            bios.iter().enumerate().map(|(n, bio)| bio.with_user_data(n as u64)).collect();
        let mut left = &numbered[..];
        let mut done = Vec::new();
        while done.len() < bios.len() {
            left = &left[self.channel.push(left)..];
            self.channel.submit();
            self.channel.wait(None);
            self.channel.reap(&mut done);
        }
        assert_eq!(self.channel.in_flight(), 0);
        done.sort_by_key(|end| end.user_data);
        let numbers: Vec<u64> = done.iter().map(|end| end.user_data).collect();
        assert_eq!(numbers, (0..bios.len() as u64).collect::<Vec<_>>(), "each bio ends once");
        done
    }

    fn statuses(&mut self, bios: &[Bio]) -> Vec<Status> {
        self.run(bios).iter().map(|end| end.status).collect()
    }
}

fn log_of(log: &Log) -> Vec<(Op, u64, u64, bool)> {
    std::mem::take(&mut log.lock().unwrap())
}

#[test]
fn data_come_back_through_merged_and_split_requests() {
    let recorder = Recorder::new();
    let disk = composed(recorder);
    let mut rig = Rig::new(&disk);
    let pattern: Vec<u8> = (0..128u32 << 10).map(|n| (n * 7 + n / 511) as u8).collect();
    rig.region.write(0, &pattern);
    // 32 writes of 4 KiB, which merge, and one read of 128 KiB, which is split.
    let writes: Vec<Bio> =
        (0..32).map(|n| Bio::write(Sector(n * 8), 8, rig.buf(n * 4096))).collect();
    assert!(rig.statuses(&writes).iter().all(|status| status.is_ok()));
    assert!(rig.statuses(&[Bio::read(Sector(0), 256, rig.buf(128 << 10))])[0].is_ok());
    let mut back = vec![0; pattern.len()];
    rig.region.read(128 << 10, &mut back);
    assert!(back == pattern);
}

#[test]
fn neighbours_merge_behind_and_before_within_the_limits() {
    let recorder = Recorder::new();
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut rig = Rig::new(&disk);
    let buf = rig.buf(0);
    let write = |sector, sectors| Bio::write(Sector(sector), sectors, buf);
    // Back, front, back; then a stranger; then one whose flags forbid it.
    rig.run(&[write(16, 8), write(24, 8), write(8, 8), write(32, 8), write(100, 8)]);
    assert_eq!(log_of(&log), [(Op::Write, 8, 32, false), (Op::Write, 100, 8, false)]);
    rig.run(&[write(0, 8), write(8, 8).with_flags(Flags::NOMERGE), write(16, 8)]);
    assert_eq!(log_of(&log).len(), 3);
    rig.run(&[write(0, 8), write(8, 8).with_prio(Prio::RealTime), Bio::read(Sector(16), 8, buf)]);
    assert_eq!(log_of(&log).len(), 3);
    // At most 64 sectors in one request.
    rig.run(&[write(0, 40), write(40, 24), write(64, 8)]);
    assert_eq!(log_of(&log), [(Op::Write, 0, 64, false), (Op::Write, 64, 8, false)]);
    assert_eq!(disk.stats().op(Op::Write).merges, 4);
}

#[test]
fn chunk_boundaries_split_and_are_not_merged_across() {
    let mut recorder = Recorder::new();
    recorder.limits.chunk_sectors = 32;
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut rig = Rig::new(&disk);
    let buf = rig.buf(0);
    rig.run(&[Bio::read(Sector(24), 50, buf)]);
    let pieces = [(24, 8), (32, 32), (64, 10)];
    assert_eq!(log_of(&log), pieces.map(|(at, len)| (Op::Read, at, len, false)));
    rig.run(&[Bio::write(Sector(24), 8, buf), Bio::write(Sector(32), 8, buf)]);
    assert_eq!(log_of(&log).len(), 2);
}

#[test]
fn a_bio_of_more_pieces_than_slots_completes_once() {
    let mut recorder = Recorder::new();
    recorder.limits.sectors_max = 8;
    recorder.late = true;
    let disk = composed_of(recorder, 4, Still::default());
    let mut rig = Rig::new(&disk);
    let pattern: Vec<u8> = (0..100u32 << 9).map(|n| (n % 253) as u8).collect();
    rig.region.write(0, &pattern);
    let (out, back) = (rig.buf(0), rig.buf(100 << 9));
    let bios = [Bio::write(Sector(0), 100, out), Bio::read(Sector(0), 100, back)];
    assert!(rig.run(&bios[..1])[0].status.is_ok());
    assert!(rig.run(&bios[1..])[0].status.is_ok());
    let mut read = vec![0; pattern.len()];
    rig.region.read(100 << 9, &mut read);
    assert!(read == pattern);
}

#[test]
fn one_bad_bio_fails_alone_whatever_it_was_merged_with() {
    let mut recorder = Recorder::new();
    recorder.bad = Some(20);
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut rig = Rig::new(&disk);
    let buf = rig.buf(0);
    let bios: Vec<Bio> = (0..5).map(|n| Bio::write(Sector(n * 8), 8, buf)).collect();
    let expected = [Status::Ok, Status::Ok, Status::Medium, Status::Ok, Status::Ok];
    assert_eq!(rig.statuses(&bios), expected);
    // Offered again one by one and in order.
    let starts: Vec<u64> = log_of(&log).iter().map(|entry| entry.1).collect();
    assert_eq!(starts, [0, 8, 16, 24, 32]);
}

#[test]
fn what_a_device_leaves_is_offered_again_in_order() {
    let mut recorder = Recorder::new();
    recorder.starts_max = 2;
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut rig = Rig::new(&disk);
    let buf = rig.buf(0);
    let bios: Vec<Bio> = (0..40).map(|n| Bio::read(Sector(n * 16), 8, buf)).collect();
    assert!(rig.statuses(&bios).iter().all(|status| status.is_ok()));
    let starts: Vec<u64> = log_of(&log).iter().map(|entry| entry.1).collect();
    assert_eq!(starts, (0..40).map(|n| n * 16).collect::<Vec<_>>());
}

#[test]
fn flush_sequences_are_what_the_cache_needs() {
    use Op::{Flush, Write};
    let buf = BufRef { region: RegionId(0), offset: 0 };
    let write = |flags| Bio::write(Sector(8), 8, buf).with_flags(flags);
    let both = Flags::PREFLUSH | Flags::FUA;
    type Row = (Op, u64, u64, bool);
    let flush: Row = (Flush, 0, 0, false);
    let plain: Row = (Write, 8, 8, false);
    let fua: Row = (Write, 8, 8, true);
    let table: [(Recorder, Bio, &[Row]); 12] = [
        (Recorder::new(), Bio::flush(), &[]),
        (Recorder::new(), write(Flags::FUA), &[plain]),
        (Recorder::new(), write(both), &[plain]),
        (Recorder::cached(true), Bio::flush(), &[flush]),
        (Recorder::cached(true), write(Flags::NONE), &[plain]),
        (Recorder::cached(true), write(Flags::FUA), &[fua]),
        (Recorder::cached(true), write(Flags::PREFLUSH), &[flush, plain]),
        (Recorder::cached(true), write(both), &[flush, fua]),
        (Recorder::cached(false), Bio::flush(), &[flush]),
        (Recorder::cached(false), write(Flags::FUA), &[plain, flush]),
        (Recorder::cached(false), write(Flags::PREFLUSH), &[flush, plain]),
        (Recorder::cached(false), write(both), &[flush, plain, flush]),
    ];
    for (recorder, bio, expected) in table {
        for late in [false, true] {
            let log = Log::default();
            let limits = recorder.limits.clone();
            let device = Recorder { late, limits, log: Arc::clone(&log), ..Recorder::new() };
            let disk = composed(device);
            let mut rig = Rig::new(&disk);
            assert_eq!(rig.statuses(&[bio]), [Status::Ok]);
            assert_eq!(log_of(&log), expected, "{bio:?}");
        }
    }
}

#[test]
fn bios_that_make_no_sense_complete_with_what_is_wrong() {
    let mut recorder = Recorder::new();
    recorder.geometry.logical_block_bytes = 4096;
    recorder.limits.discard_sectors_max = 0;
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut rig = Rig::new(&disk);
    let buf = rig.buf(0);
    let cases = [
        (Bio::read(Sector(0), 0, buf), Status::Inval),
        (Bio::read(Sector(4), 8, buf), Status::Inval),
        (Bio::read(Sector(0), 4, buf), Status::Inval),
        (Bio::read(Sector(SECTORS), 8, buf), Status::IoErr),
        (Bio::read(Sector(SECTORS - 8), 16, buf), Status::IoErr),
        (Bio::read(Sector(u64::MAX - 7), 8, buf), Status::IoErr),
        (Bio::read(Sector(0), 8, BufRef { region: RegionId(9), offset: 0 }), Status::Inval),
        (Bio::read(Sector(0), 8, rig.buf((256 << 10) - 4095)), Status::Inval),
        (Bio::read(Sector(0), 8, rig.buf(u64::MAX)), Status::Inval),
        (Bio::new(Op::Discard, Sector(0), 8), Status::NotSupp),
        (Bio::append(Sector(0), 8, buf), Status::NotSupp),
        (Bio::new(Op::ZoneReset, Sector(0), 0), Status::NotSupp),
        (Bio::new(Op::ZoneResetAll, Sector(0), 0), Status::NotSupp),
    ];
    for (bio, status) in cases {
        assert_eq!(rig.statuses(&[bio]), [status], "{bio:?}");
    }
    assert!(log_of(&log).is_empty(), "none of them came to the device");
    assert_eq!(disk.stats().op(Op::Read).errors, 9);
}

#[test]
fn a_full_channel_takes_less_and_a_region_in_use_stays() {
    let mut recorder = Recorder::new();
    recorder.late = true;
    let disk = composed_of(recorder, 8, Still::default());
    let mut rig = Rig::new(&disk);
    let bios: Vec<Bio> = (0..12).map(|n| Bio::read(Sector(n * 16), 8, rig.buf(0))).collect();
    assert_eq!(rig.channel.push(&bios), 8);
    rig.channel.submit();
    assert_eq!(rig.channel.push(&bios), 0);
    assert!(!rig.channel.unregister(rig.id));
    let mut done = Vec::new();
    assert_eq!(rig.channel.reap(&mut done), 8);
    assert_eq!(rig.channel.due(), Due::Never);
    assert!(rig.channel.unregister(rig.id));
    assert!(!rig.channel.unregister(rig.id));
    assert_eq!(rig.channel.push(&bios), 8);
    rig.channel.submit();
    assert_eq!(rig.channel.reap(&mut done), 8);
    assert!(done[8..].iter().all(|end| end.status == Status::Inval));
}

#[test]
fn statistics_outlive_their_channel() {
    let disk = composed(Recorder::new());
    let count = |stats: &Stats| (stats.op(Op::Read).ops, stats.op(Op::Read).sectors);
    let mut rig = Rig::new(&disk);
    let buf = rig.buf(0);
    rig.run(&[Bio::read(Sector(0), 8, buf), Bio::read(Sector(64), 16, buf)]);
    assert_eq!(count(&disk.stats()), (2, 24));
    assert_eq!(disk.stats().channels, 1);
    drop(rig);
    assert_eq!(count(&disk.stats()), (2, 24));
    assert_eq!(disk.stats().channels, 0);
    assert_eq!(disk.stats().read_latency.iter().sum::<u64>(), 2);
}

#[test]
fn a_dropped_channel_has_done_what_was_started() {
    let mut recorder = Recorder::new();
    recorder.late = true;
    let log = Arc::clone(&recorder.log);
    let disk = composed(recorder);
    let mut rig = Rig::new(&disk);
    let bios: Vec<Bio> = (0..20).map(|n| Bio::read(Sector(n * 16), 8, rig.buf(0))).collect();
    assert_eq!(rig.channel.push(&bios), 20);
    rig.channel.submit();
    drop(rig);
    assert_eq!(log_of(&log).len(), 16, "as many as there are tags");
}

/// Once a request that was put back for ever, or that a device had lost, kept its channel from
/// ending: the drop waited for all that was submitted, however long it took.
#[test]
fn a_channel_ends_whatever_its_device_does() {
    struct Endless(usize);
    impl DeviceQueue for Endless {
        fn start(&mut self, _now: Nanos, batch: &mut Batch, _done: &mut Done) {
            // Keeps one for itself without ever completing it, and puts all others back.
            if self.0 == 0
                && let Some(started) = batch.next()
            {
                std::mem::forget(started);
                self.0 = 1;
            }
        }
        fn poll(&mut self, _now: Nanos, _done: &mut Done) {}
        fn room(&self) -> usize {
            4
        }
        fn due(&self) -> Due {
            Due::Never
        }
    }
    let recorder = Recorder::new();
    let mut stack = channel::Stack::new(
        ChannelConfig::default(),
        &recorder.geometry,
        &recorder.limits,
        NoneScheduler::new(256),
        Endless(0),
        Still::default(),
        channel::ChannelStats::new(),
    );
    let id = stack.register(Region::alloc(4096));
    let buf = BufRef { region: id, offset: 0 };
    let bios = [0, 16, 32].map(|at| Bio::read(Sector(at), 8, buf));
    assert_eq!(stack.push(&bios), 3);
    stack.submit();
    drop(stack);

    let clock = Still::default();
    let disk = composed_of(Delayed::new(Recorder::new(), u64::MAX / 2), 64, clock.clone());
    let mut rig = Rig::new(&disk);
    assert_eq!(rig.channel.push(&[Bio::read(Sector(0), 8, rig.buf(0))]), 1);
    rig.channel.submit();
    drop(rig);
    // Nor does what would follow in a flush sequence.
    let disk = composed_of(Delayed::new(Recorder::cached(false), 1 << 60), 64, clock.clone());
    let mut rig = Rig::new(&disk);
    let write = Bio::write(Sector(0), 8, rig.buf(0)).with_flags(Flags::PREFLUSH | Flags::FUA);
    assert_eq!(rig.channel.push(&[write]), 1);
    rig.channel.submit();
    drop(rig);
    assert_eq!(clock.now(), Nanos(0), "nobody slept until it would have been due");
}

#[test]
fn what_an_operation_ignores_may_be_anything() {
    let disk = composed(Recorder::cached(true));
    let mut rig = Rig::new(&disk);
    let garbage = Bio::new(Op::Flush, Sector(u64::MAX), u64::MAX);
    let refused = Bio::read(Sector(u64::MAX - 7), u64::MAX - 7, rig.buf(0));
    let write = Bio::write(Sector(0), 8, rig.buf(0));
    let bios = [garbage, garbage, write, refused, refused, garbage];
    let statuses = rig.statuses(&bios);
    use Status::{IoErr, Ok};
    assert_eq!(statuses, [Ok, Ok, Ok, IoErr, IoErr, Ok]);
    let stats = disk.stats();
    assert_eq!((stats.op(Op::Flush).sectors, stats.op(Op::Read).sectors), (0, 0));
    assert_eq!(stats.read_latency.iter().sum::<u64>(), 0, "they never came to the device");
}

#[test]
fn delayed_completions_come_when_their_time_has_come() {
    let clock = Still::default();
    let disk = composed_of(Delayed::new(Recorder::new(), 1_000_000), 64, clock.clone());
    let mut rig = Rig::new(&disk);
    assert_eq!(rig.channel.push(&[Bio::read(Sector(0), 8, rig.buf(0))]), 1);
    rig.channel.submit();
    let mut done = Vec::new();
    assert_eq!(rig.channel.reap(&mut done), 0);
    assert_eq!(rig.channel.due(), Due::At(Nanos(1_000_000)));
    clock.sleep_until(Nanos(999_999));
    assert_eq!(rig.channel.reap(&mut done), 0);
    rig.channel.wait(None);
    assert_eq!(rig.channel.reap(&mut done), 1);
    assert_eq!(clock.now(), Nanos(1_000_000));
    assert_eq!(rig.channel.due(), Due::Never);
}

fn rule(op: Option<Op>, start: u64, sectors: u64) -> Rule {
    Rule { op, start: Sector(start), sectors, status: Status::Medium, chance: 1, times: None }
}

#[test]
fn injected_faults_take_bios_and_not_their_neighbours() {
    let recorder = Recorder::new();
    let log = Arc::clone(&recorder.log);
    let disk = composed(Faulty::new(recorder, 1));
    let mut rig = Rig::new(&disk);
    let buf = rig.buf(0);
    let once = Rule { times: Some(1), ..rule(Some(Op::Write), 8, 8) };
    disk.inject(&Injection::AddRule(once)).unwrap();
    let bios: Vec<Bio> = (0..3).map(|n| Bio::write(Sector(n * 8), 8, buf)).collect();
    assert_eq!(rig.statuses(&bios), [Status::Ok, Status::Medium, Status::Ok]);
    assert_eq!(disk.device().strikes(), [1]);
    let starts: Vec<u64> = log_of(&log).iter().map(|entry| entry.1).collect();
    assert_eq!(starts, [0, 16], "the failed one never came to the device");
    assert_eq!(rig.statuses(&bios), [Status::Ok; 3], "once means once");
    // The newest rule decides, and a rule for reads leaves writes alone.
    disk.inject(&Injection::AddRule(rule(None, 0, SECTORS))).unwrap();
    let newest = Rule { status: Status::NoSpc, ..rule(Some(Op::Read), 0, 1) };
    disk.inject(&Injection::AddRule(newest)).unwrap();
    let mixed = [Bio::read(Sector(0), 8, buf), Bio::write(Sector(0), 8, buf)];
    assert_eq!(rig.statuses(&mixed), [Status::NoSpc, Status::Medium]);
    disk.inject(&Injection::RemoveRules).unwrap();
    assert_eq!(rig.statuses(&mixed), [Status::Ok; 2]);
    let unknown = Injection::Device { name: "fire".into(), value: "1".into() };
    assert!(disk.inject(&unknown).unwrap_err().to_string().contains("`fire`"));
}

/// A writer whose bytes the test can look at.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_trace_has_a_line_for_each_request_issued_and_completed() {
    let sink = Shared::default();
    let trace = Trace::new(Box::new(sink.clone()));
    let disk = composed(Traced::new(Recorder::cached(false), trace));
    let mut rig = Rig::new(&disk);
    let buf = rig.buf(0);
    rig.run(&[Bio::write(Sector(8), 8, buf).with_flags(Flags::FUA)]);
    rig.run(&[Bio::read(Sector(0), 16, buf)]);
    drop(rig);
    let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    let events: Vec<(String, String)> = text
        .lines()
        .map(|line| {
            let columns: Vec<&str> = line.split_whitespace().collect();
            (columns[5].to_owned(), columns[6..].join(" "))
        })
        .collect();
    let expected = [
        ("D", "W 8 + 8 [tag 0]"),
        ("C", "W [tag 0] OK"),
        ("D", "F 0 + 0 [tag 0]"),
        ("C", "F [tag 0] OK"),
        ("D", "R 0 + 16 [tag 0]"),
        ("C", "R [tag 0] OK"),
    ];
    assert_eq!(events, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
}

#[test]
fn the_blocking_adapter_reads_what_it_wrote() {
    let mut recorder = Recorder::new();
    recorder.late = true;
    let disk = composed(recorder);
    let mut io = Io::new(disk.open().unwrap(), 8192);
    io.write(Sector(16), &[7; 4096], Flags::FUA).unwrap();
    let mut back = [0; 4096];
    io.read(Sector(16), &mut back).unwrap();
    assert_eq!(back, [7; 4096]);
    assert_eq!(io.read(Sector(SECTORS), &mut back), Err(Status::IoErr));
    assert_eq!(io.read(Sector(0), &mut back[..100]), Err(Status::Inval));
    assert_eq!(io.append(Sector(0), &back), Err(Status::NotSupp));
}

#[test]
fn the_blocking_adapter_gives_up_and_does_not_take_an_old_answer_for_a_new_one() {
    let mut recorder = Recorder::new();
    recorder.bad = Some(0);
    let disk = composed_of(Delayed::new(recorder, 1 << 40), 64, Still::default());
    let mut io = Io::new(disk.open().unwrap(), 8192).with_timeout(std::time::Duration::ZERO);
    assert_eq!(io.write(Sector(0), &[1; 512], Flags::NONE), Err(Status::Timeout));
    // By now the clock stands where the first write is due, and it has failed.
    let mut io = io.with_timeout(std::time::Duration::from_secs(3600));
    assert_eq!(io.write(Sector(64), &[1; 512], Flags::NONE), Ok(()));
}

#[test]
fn futures_end_when_their_bios_do() {
    let mut recorder = Recorder::new();
    recorder.late = true;
    let disk = composed_of(recorder, 4, Still::default());
    let io = blockyard_core::future::Io::new(disk.open().unwrap());
    let region = Region::alloc(8192);
    let id = io.with_channel(|channel| channel.register(Arc::clone(&region)));
    region.write(0, &[9; 4096]);
    let (out, back) = (BufRef { region: id, offset: 0 }, BufRef { region: id, offset: 4096 });
    let status = io.block_on(async {
        let write = io.run(Bio::write(Sector(0), 8, out).with_user_data(5)).await;
        assert_eq!((write.status, write.user_data), (Status::Ok, 5));
        io.run(Bio::read(Sector(0), 8, back)).await.status
    });
    assert_eq!(status, Status::Ok);
    let mut read = [0; 4096];
    region.read(4096, &mut read);
    assert_eq!(read, [9; 4096]);
    // A future that is given up leaves its bio to end by itself, and its place is used again.
    let mut given_up = Box::pin(io.run(Bio::read(Sector(0), 8, back)));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(given_up.as_mut().poll(&mut context).is_pending());
    drop(given_up);
    assert_eq!(io.drive(true), 1);
    assert_eq!(io.block_on(io.run(Bio::flush())).status, Status::Ok);
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "request dropped without a completion")]
fn a_started_request_that_is_dropped_is_noticed() {
    struct Forgetful;
    impl DeviceQueue for Forgetful {
        fn start(&mut self, _now: Nanos, batch: &mut Batch, _done: &mut Done) {
            drop(batch.next());
        }
        fn poll(&mut self, _now: Nanos, _done: &mut Done) {}
        fn room(&self) -> usize {
            1
        }
        fn due(&self) -> Due {
            Due::Never
        }
    }
    let recorder = Recorder::new();
    let mut stack = channel::Stack::new(
        ChannelConfig::default(),
        &recorder.geometry,
        &recorder.limits,
        NoneScheduler::new(4),
        Forgetful,
        Still::default(),
        channel::ChannelStats::new(),
    );
    let id = stack.register(Region::alloc(4096));
    stack.push(&[Bio::read(Sector(0), 8, BufRef { region: id, offset: 0 })]);
    stack.submit();
}

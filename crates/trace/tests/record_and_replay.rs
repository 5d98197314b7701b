//! Traces of devices in this process: recorded, read, and replayed on a device of the same kind,
//! which does the same.
#![allow(clippy::unwrap_used)] // All of this is test code; clippy knows only whole test functions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::middleware::{Faulty, Recording};
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{Bio, Disk, Flags, Op, Sector};
use blockyard_null::{Null, NullConfig};
use blockyard_trace::{
    Operations, RecordLimits, ReplayError, ReplayOptions, ReplayStop, ReplayView, SOURCE, Select,
    Speed, TraceEnd, TraceOperation, TraceTally, replay, write_trace,
};

const ZONE_SECTORS: u64 = 2048;

fn disk(config: NullConfig, is_scheduled: bool) -> Arc<dyn Disk> {
    let device = Faulty::new(Null::open(config).unwrap(), 1);
    let (name, config) = ("d".to_owned(), ChannelConfig::default());
    match is_scheduled {
        true => {
            let device = Scheduled::new(device, true).unwrap();
            Arc::new(Composed::new(name, "null", device, config))
        }
        false => Arc::new(Composed::new(name, "null", device, config)),
    }
}

fn flat() -> NullConfig {
    NullConfig {
        size: 64 << 20,
        memory_backed: true,
        discard: true,
        cache_size: 1 << 20,
        max_sectors: 1024,
        ..NullConfig::default()
    }
}

fn zoned() -> NullConfig {
    NullConfig {
        size: 16 << 20,
        memory_backed: true,
        zoned: true,
        zone_size: ZONE_SECTORS * 512,
        ..NullConfig::default()
    }
}

/// Records what `work` does with a disk.
fn traced(disk: &Arc<dyn Disk>, work: impl FnOnce()) -> (TraceTally, Vec<u8>) {
    let recording = disk.trace_point().unwrap().record(SOURCE).unwrap();
    let writer = start(recording, RecordLimits::default());
    work();
    disk.trace_point().unwrap().recorder().unwrap().stop();
    let (ended, tally, bytes) = writer.join().unwrap();
    assert_eq!(ended, TraceEnd::Stopped);
    assert_eq!((tally.lost, tally.bytes), (0, bytes.len() as u64));
    (tally, bytes)
}

fn start(
    recording: Recording,
    limits: RecordLimits,
) -> thread::JoinHandle<(TraceEnd, TraceTally, Vec<u8>)> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let (ended, tally) = write_trace(&recording, "test", limits, || false, &mut bytes).unwrap();
        (ended, tally, bytes)
    })
}

/// The operations of a trace, without their times.
fn operations(bytes: &[u8], select: Select) -> Vec<TraceOperation> {
    let all = Operations::new(bytes, select).map(|operation| operation.unwrap());
    all.map(|operation| TraceOperation { at: blockyard_core::Nanos(0), queue: 0, ..operation })
        .collect()
}

/// The operations of each queue in their order, and the queues in the order of their last sectors:
/// two queues are replayed at once, so that their numbers may be exchanged.
fn by_queue(bytes: &[u8]) -> Vec<Vec<TraceOperation>> {
    let mut queues: BTreeMap<u32, Vec<TraceOperation>> = BTreeMap::new();
    for operation in Operations::new(bytes, Select::Queue) {
        let operation = operation.unwrap();
        let one = TraceOperation { at: blockyard_core::Nanos(0), queue: 0, ..operation };
        queues.entry(operation.queue).or_default().push(one);
    }
    let mut queues: Vec<_> = queues.into_values().collect();
    queues.sort_by_key(|all| all.last().map(|one| one.sector));
    queues
}

fn max(write: bool) -> ReplayOptions {
    ReplayOptions { speed: Speed::Max, queue_depth: 8, write }
}

/// Every operation of a flat device, merged and split, and what a trace of it replays.
fn flat_operations(disk: &dyn Disk) {
    let mut io = Io::new(disk.open().unwrap(), 4 << 20);
    let sync = Flags::SYNC;
    io.write(Sector(0), &[1; 8192], sync).unwrap();
    io.write(Sector(64), &[1; 4096], Flags::FUA).unwrap();
    io.write(Sector(128), &vec![3; 3 << 20], Flags::PREFLUSH).unwrap();
    io.read(Sector(8), &mut [0; 4096]).unwrap();
    io.run(Bio::flush().with_flags(sync)).unwrap();
    io.run(Bio::new(Op::Discard, Sector(64), 8)).unwrap();
    io.run(Bio::new(Op::WriteZeroes, Sector(0), 8)).unwrap();
    drop(io);
    let mut channel = disk.open().unwrap();
    let region = channel.register(blockyard_core::Region::alloc(8192));
    let buf = |offset| blockyard_core::BufRef { region, offset };
    // No neighbours of the operations above: the two channels are replayed at once.
    let pair = [Bio::read(Sector(1024), 8, buf(0)), Bio::read(Sector(1032), 8, buf(4096))];
    assert_eq!(channel.push(&pair), 2);
    channel.submit();
    let mut done = Vec::new();
    while channel.in_flight() > 0 {
        channel.reap(&mut done);
        channel.wait(None);
    }
}

#[test]
fn replay_does_what_was_traced() {
    for is_scheduled in [false, true] {
        let first = disk(flat(), is_scheduled);
        let (tally, bytes) = traced(&first, || flat_operations(first.as_ref()));
        let queued = operations(&bytes, Select::Queue);
        assert_eq!((queued.len() as u64, tally.queued), (9, 9));
        assert_eq!((tally.merged, tally.errors), (1, 0));
        assert!(tally.split > 0 && tally.issued == tally.completed, "{tally:?}");
        assert_eq!(queued[0].flags, Flags::SYNC);
        assert_eq!(queued[1].flags, Flags::FUA);
        assert_eq!((queued[2].flags, queued[2].sectors), (Flags::PREFLUSH, 6144));
        assert_eq!((queued[4].op, queued[4].flags), (Op::Flush, Flags::SYNC));

        let second = disk(flat(), is_scheduled);
        let (again, replayed) = traced(&second, || {
            let all = Operations::new(&bytes[..], Select::Queue);
            let view = replay(second.as_ref(), all, &max(true), &ReplayStop::new()).unwrap();
            assert_eq!((view.total().operations, view.total().errors), (9, 0));
            assert_eq!(view.operations["write"].bytes, 8192 + 4096 + (3 << 20));
        });
        let sorted = |mut all: Vec<TraceOperation>| {
            all.sort_by_key(|one| (one.sector, one.op as u8));
            all
        };
        assert_eq!(sorted(operations(&replayed, Select::Queue)), sorted(queued));
        // The two adjacent reads merge only if the replay has read both before it submits the
        // first.
        assert_eq!(again.split, tally.split);
        assert!(again.merged <= tally.merged, "{again:?}");
        if !is_scheduled {
            assert_eq!(by_queue(&replayed), by_queue(&bytes));
        }
    }
}

fn zones(disk: &dyn Disk) -> Vec<ZoneInfo> {
    let mut zones = Vec::new();
    disk.report_zones(Sector(0), 100, &mut zones).unwrap();
    zones
}

#[test]
fn zone_operations_and_appends_are_replayed() {
    let first = disk(zoned(), false);
    let zone = |number: u64| Sector(number * ZONE_SECTORS);
    let (tally, bytes) = traced(&first, || {
        let mut io = Io::new(first.open().unwrap(), 1 << 20);
        io.write(zone(0), &[1; 4096], Flags::NONE).unwrap();
        io.append(zone(1), &[2; 8192]).unwrap();
        assert_eq!(io.append(zone(1), &[2; 4096]), Ok(zone(1) + 16));
        io.append(zone(2), &[2; 4096]).unwrap();
        for (op, number) in
            [(Op::ZoneReset, 2), (Op::ZoneOpen, 3), (Op::ZoneFinish, 4), (Op::ZoneClose, 0)]
        {
            io.run(Bio::new(op, zone(number), 0)).unwrap();
        }
        io.run(Bio::new(Op::ZoneReset, Sector(1), 0)).unwrap_err();
    });
    // The last one is invalid: no request was made of it.
    assert_eq!((tally.queued, tally.issued, tally.completed), (8, 8, 8));
    let queued = operations(&bytes, Select::Queue);
    let ops: Vec<Op> = queued.iter().map(|operation| operation.op).collect();
    let zone_ops = [Op::ZoneReset, Op::ZoneOpen, Op::ZoneFinish, Op::ZoneClose];
    let wanted = [&[Op::Write, Op::ZoneAppend, Op::ZoneAppend, Op::ZoneAppend], &zone_ops[..]];
    assert_eq!(ops, wanted.concat());
    assert_eq!(queued[1].sector, zone(1), "where it landed is in the completion");

    let second = disk(zoned(), false);
    let all = Operations::new(&bytes[..], Select::Queue);
    let options = ReplayOptions { queue_depth: 1, ..max(true) };
    let view = replay(second.as_ref(), all, &options, &ReplayStop::new()).unwrap();
    assert_eq!((view.total().operations, view.total().errors), (8, 0));
    assert_eq!(zones(second.as_ref()), zones(first.as_ref()));
}

#[test]
fn errors_are_counted_by_status() {
    let first = disk(flat(), false);
    let (_, bytes) = traced(&first, || {
        let mut io = Io::new(first.open().unwrap(), 4096);
        io.read(Sector(100_000), &mut [0; 4096]).unwrap();
        io.read(Sector(0), &mut [0; 4096]).unwrap();
    });
    let small = disk(NullConfig { size: 1 << 20, ..NullConfig::default() }, false);
    let all = Operations::new(&bytes[..], Select::Queue);
    let view = replay(small.as_ref(), all, &max(false), &ReplayStop::new()).unwrap();
    assert_eq!((view.total().operations, view.total().errors), (2, 1));
    assert_eq!(view.errors["IOERR"], 1);
}

#[test]
fn writes_are_replayed_with_consent_only() {
    let first = disk(flat(), false);
    let (_, bytes) = traced(&first, || flat_operations(first.as_ref()));
    let all = Operations::new(&bytes[..], Select::Queue);
    let error = replay(first.as_ref(), all, &max(false), &ReplayStop::new()).unwrap_err();
    assert!(matches!(error, ReplayError::Write { op: Op::Write, .. }), "{error}");
}

#[test]
fn size_limit_ends_a_trace_that_can_be_read() {
    let first = disk(flat(), false);
    let recording = first.trace_point().unwrap().record(SOURCE).unwrap();
    let limits = RecordLimits { bytes_max: Some(4096), duration: None };
    let recorder = Arc::clone(recording.recorder());
    let writer = start(recording, limits);
    let mut io = Io::new(first.open().unwrap(), 4096);
    for _ in 0..100 {
        io.read(Sector(0), &mut [0; 4096]).unwrap();
    }
    // The events that are kept to be sorted are printed at the end at last.
    recorder.stop();
    let (ended, tally, bytes) = writer.join().unwrap();
    assert_eq!(ended, TraceEnd::Size);
    assert!(bytes.len() <= 4096 && bytes.len() > 2048, "{}", bytes.len());
    assert!(tally.queued > 10 && operations(&bytes, Select::Queue).len() as u64 == tally.queued);
    let end = "at its size limit";
    assert!(bytes.windows(end.len()).any(|window| window == end.as_bytes()));
}

/// A length of 4 GiB and more does not fit into an event.
#[test]
fn a_bio_of_five_gibibytes_has_several_events() {
    const SECTORS: u64 = 5 << 21;
    let long = || disk(NullConfig { size: 6 << 30, ..flat() }, false);
    let (first, second) = (long(), long());
    let (_, bytes) = traced(&first, || {
        let mut io = Io::new(first.open().unwrap(), 4096);
        io.run(Bio::new(Op::Discard, Sector(8), SECTORS)).unwrap();
    });
    let queued = operations(&bytes, Select::Queue);
    let ranges: Vec<_> = queued.iter().map(|it| (it.op, it.sector.0, it.sectors)).collect();
    let at_most = (4 << 21) - 8;
    let rest = (Op::Discard, 8 + at_most, SECTORS - at_most);
    assert_eq!(ranges, [(Op::Discard, 8, at_most), rest]);
    let all = Operations::new(&bytes[..], Select::Queue);
    let view = replay(second.as_ref(), all, &max(true), &ReplayStop::new()).unwrap();
    let total = view.total();
    assert_eq!((total.operations, total.bytes, total.errors), (2, SECTORS * 512, 0));
}

/// Two reads an hour apart, on one queue and on two.
fn an_hour_apart(second_queue: u32) -> [TraceOperation; 2] {
    let one = TraceOperation {
        at: blockyard_core::Nanos(0),
        op: Op::Read,
        flags: Flags::NONE,
        sector: Sector(0),
        sectors: 8,
        queue: 0,
    };
    let hour = blockyard_core::Nanos(3600 * 1_000_000_000);
    [one, TraceOperation { at: hour, queue: second_queue, ..one }]
}

const IN_TIME: ReplayOptions =
    ReplayOptions { speed: Speed::Factor(1.0), queue_depth: 8, write: false };

/// The bug: nothing interrupted the wait for an operation that was due much later.
#[test]
fn a_stop_ends_a_replay_with_what_was_done() {
    for queue in [0, 1] {
        let disk = disk(flat(), false);
        let stop = ReplayStop::new();
        let view: ReplayView = thread::scope(|scope| {
            let replayed = scope.spawn(|| {
                let all = an_hour_apart(queue).into_iter().map(Ok);
                replay(disk.as_ref(), all, &IN_TIME, &stop).unwrap()
            });
            while disk.stats().ops[Op::Read as usize].ops == 0 {
                thread::yield_now();
            }
            stop.stop();
            replayed.join().unwrap()
        });
        assert!(view.is_stopped);
        assert_eq!(view.total().operations, 1);
        // The second channel is opened while the first one already reads.
        assert!((1..=u64::from(queue) + 1).contains(&view.channels), "{view:?}");
    }
}

/// No operation is submitted before its time, by the speed.
#[test]
fn times_are_kept_at_a_factor_and_not_at_most_speed() {
    let gap = 40_000_000;
    let [first, later] = an_hour_apart(0);
    let second = TraceOperation { at: blockyard_core::Nanos(gap), ..later };
    let replayed = |speed| {
        let (disk, options) = (disk(flat(), false), ReplayOptions { speed, ..IN_TIME });
        let all = [first, second].into_iter().map(Ok);
        replay(disk.as_ref(), all, &options, &ReplayStop::new()).unwrap()
    };
    for (factor, least_ns) in [(0.5, 2 * gap), (1.0, gap), (4.0, gap / 4)] {
        let view = replayed(Speed::Factor(factor));
        assert_eq!((view.trace_ns, view.total().operations), (gap, 2));
        assert!(view.elapsed_ns >= least_ns, "{factor}: {view:?}");
        assert!(view.lateness.max_ns > 0, "{factor}: {view:?}");
    }
    assert_eq!(replayed(Speed::Max).lateness.max_ns, 0);
}

/// The bug: a trace that was damaged after an operation in an hour was refused in an hour.
#[test]
fn a_damaged_trace_is_refused_at_once() {
    let mut bytes = Vec::new();
    an_hour_apart(0).iter().for_each(|one| one.record().print(&mut bytes));
    bytes.push(b'x');
    let disk = disk(flat(), false);
    let all = Operations::new(&bytes[..], Select::Queue);
    let error = replay(disk.as_ref(), all, &IN_TIME, &ReplayStop::new()).unwrap_err();
    assert!(matches!(error, ReplayError::Format(_)), "{error}");
}

/// Reads of 64 queues, long and short, share one memory; operations that are too long fail without
/// a latency.
#[test]
fn reads_of_many_queues_share_the_memory() {
    let disk = disk(NullConfig { size: 1 << 30, ..NullConfig::default() }, false);
    let [one, _] = an_hour_apart(0);
    let lens = [8, 65536, 1, 65537, 32768];
    let all = (0..4000_u32).map(|number| {
        let sectors = lens[number as usize % lens.len()];
        Ok(TraceOperation { queue: number % 70, sectors, ..one })
    });
    let view = replay(disk.as_ref(), all, &max(false), &ReplayStop::new()).unwrap();
    assert_eq!((view.total().operations, view.total().errors), (4000, 800));
    assert_eq!((view.channels, view.errors["INVAL"]), (64, 800));
}

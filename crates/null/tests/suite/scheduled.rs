//! The device contract on null devices whose channels share a scheduler.

use std::sync::{Arc, Barrier};

use blockyard_core::channel::ChannelConfig;
use blockyard_core::clock::Clock;
use blockyard_core::inject::Injection;
use blockyard_core::middleware::{Delayed, Faulty};
use blockyard_core::sched::deadline::{Direction, Tunable};
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::{
    Bio, BufRef, Composed, Device, Disk, Nanos, Op, Prio, Region, Sector, Status,
};
use blockyard_null::{IrqMode, Null, NullConfig};
use blockyard_testing::clock::ManualClock;
use blockyard_testing::contract::{self, Subject};

/// 8 MiB without memory or zones.
fn flat() -> NullConfig {
    NullConfig { size: 8 << 20, bs: 4096, max_sectors: 128, ..NullConfig::default() }
}

/// A memory-backed device of 8 MiB.
fn backed() -> NullConfig {
    NullConfig { memory_backed: true, discard: true, ..flat() }
}

fn null(config: &NullConfig) -> Arc<Null> {
    Null::open(config.clone()).expect("the configuration fits")
}

/// Runs the contract with the scheduler active and with the scheduler bypassed.
fn suite(name: &str, config: NullConfig) {
    for (mode, active) in [("deadline", true), ("past deadline", false)] {
        let config = config.clone();
        contract::run(&Subject::plain(
            &format!("{mode}, {name}"),
            config.memory_backed,
            move || Scheduled::new(null(&config), active).unwrap(),
        ));
    }
}

#[test]
fn completed_at_once() {
    suite("null", flat());
    suite("memory", backed());
    suite("memory, 512", NullConfig { bs: 512, max_sectors: 0, ..backed() });
}

#[test]
fn completed_later() {
    suite("softirq", NullConfig { irqmode: IrqMode::Softirq, ..backed() });
    suite("timer", NullConfig { irqmode: IrqMode::Timer, hw_queue_depth: 8, ..backed() });
}

#[test]
fn held_back() {
    let config = backed();
    contract::run(&Subject::plain("deadline, delayed", true, move || {
        Scheduled::new(Delayed::new(null(&config), 50_000), true).unwrap()
    }));
}

#[test]
fn a_write_cache_and_few_tags() {
    suite("cache", NullConfig { cache_size: 1 << 20, ..backed() });
    suite("cache without fua", NullConfig { cache_size: 1 << 20, fua: false, ..backed() });
    suite("one tag", NullConfig { hw_queue_depth: 1, ..backed() });
    let shared = NullConfig { submit_queues: Some(1), hw_queue_depth: 4, ..backed() };
    suite("one hardware queue", shared);
}

/// 16 zones of 512 KiB, of which 384 KiB can be written; two zones are conventional.
fn zoned() -> NullConfig {
    NullConfig {
        bs: 512,
        zoned: true,
        zone_size: 512 << 10,
        zone_capacity: 384 << 10,
        zone_nr_conv: 2,
        zone_append_max_sectors: 64,
        ..backed()
    }
}

/// Zones keep their order with a zone write plug above the scheduler, however the scheduler sorts.
#[test]
fn zones_below_a_gate() {
    let none = |config| NullConfig { zone_append_max_sectors: 0, ..config };
    for (name, config) in [
        ("zones", zoned()),
        ("zones, timer", NullConfig { irqmode: IrqMode::Timer, ..zoned() }),
        ("zones, appends made of writes", none(zoned())),
    ] {
        contract::run_gated(&format!("deadline, {name}"), true, move || {
            Scheduled::new(null(&config), true).unwrap()
        });
    }
}

/// Faults affect single bios, even if requests of several channels were merged.
#[test]
fn faulty() {
    let config = backed();
    contract::run_wrapped("deadline, faulty", true, move || {
        Scheduled::new(Faulty::new(null(&config), 1), true).unwrap()
    });
}

/// A channel that writes one block at a time.
struct Writer {
    channel: Box<dyn blockyard_core::Channel>,
    buf: BufRef,
}

const BLOCK: u64 = 8;

impl Writer {
    fn new(disk: &dyn Disk) -> Writer {
        let mut channel = disk.open().unwrap();
        let region = channel.register(Region::alloc(4096));
        Writer { channel, buf: BufRef { region, offset: 0 } }
    }

    fn write(&mut self, sector: u64) {
        let bio = Bio::write(Sector(sector), BLOCK, self.buf).with_user_data(sector);
        assert_eq!(self.channel.push(&[bio]), 1);
        self.channel.submit();
    }

    fn finish(&mut self, sector: u64) {
        let mut done = Vec::new();
        while self.channel.reap(&mut done) == 0 {
            self.channel.wait(None);
        }
        assert_eq!((done.len(), done[0].user_data, done[0].status), (1, sector, Status::Ok));
        assert_eq!(self.channel.in_flight(), 0);
    }
}

/// A set of kernel patches distributed requests over buckets and lost merges, because waiting
/// requests could not be found and held a tag. The workload was one disk and 64 threads of
/// sequential 4 KiB writes, each with one in flight. Here a request that waits for the only tag can
/// be merged, whichever channel it came from.
#[test]
fn waiting_requests_merge_across_channels() {
    const WRITERS: u64 = 64;
    const ROUNDS: u64 = 8;
    for streams in [1, 4] {
        let config = NullConfig {
            hw_queue_depth: 1,
            max_sectors: 0,
            size: 64 << 20,
            ..NullConfig { memory_backed: false, ..backed() }
        };
        let device = Scheduled::new(Delayed::new(null(&config), 1_000_000), true).unwrap();
        let (name, depth) = ("merging".to_owned(), ChannelConfig { depth: 4 });
        let clock = ManualClock::new();
        let disk = Composed::with_clock(name, "null", device, depth, clock);
        let mut writers: Vec<Writer> = (0..WRITERS).map(|_| Writer::new(&disk)).collect();
        // Each stream is a part of the device; its writers take turns for the next block.
        let sector = |round: u64, writer: u64| {
            let (stream, at) = (writer % streams, writer / streams);
            stream * 16_384 + (round * (WRITERS / streams) + at) * BLOCK
        };
        for round in 0..ROUNDS {
            for (index, writer) in (0..).zip(&mut writers) {
                writer.write(sector(round, index));
            }
            for (index, writer) in (0..).zip(&mut writers) {
                writer.finish(sector(round, index));
            }
        }
        let stats = disk.device().scheduler().unwrap().stats();
        let writes = stats.of(Prio::BestEffort, Direction::Write);
        // The first write of each round finds the device idle. The others merge into one per
        // stream.
        let requests = ROUNDS * (1 + streams);
        assert_eq!(writes.inserted, ROUNDS * WRITERS);
        assert_eq!((writes.dispatched, writes.completed), (requests, requests));
        assert_eq!(writes.merged, ROUNDS * WRITERS - requests);
        assert_eq!(disk.stats().op(Op::Write).ops, ROUNDS * WRITERS);
    }
}

/// Threads on the real clock: every thread that sleeps is woken, and none is left.
#[test]
fn sleeping_threads_are_woken() {
    const THREADS: u64 = 16;
    const ROUNDS: u64 = 200;
    let devices = [
        NullConfig { irqmode: IrqMode::Timer, completion_nsec: 30_000, ..flat() },
        NullConfig { irqmode: IrqMode::Timer, hw_queue_depth: 2, ..flat() },
        backed(),
    ];
    for config in devices {
        let device = Scheduled::new(null(&config), true).unwrap();
        let (name, depth) = ("woken".to_owned(), ChannelConfig { depth: 4 });
        let disk = Composed::new(name, "null", device, depth);
        let start = Barrier::new(THREADS as usize);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (disk, start) = (&disk, &start);
                scope.spawn(move || {
                    let mut writer = Writer::new(disk);
                    start.wait();
                    for round in 0..ROUNDS {
                        let sector = (round % 10 * THREADS + thread) * BLOCK;
                        writer.write(sector);
                        // Some channels are dropped with requests in flight.
                        if round % 50 == 49 {
                            writer = Writer::new(disk);
                        } else {
                            writer.finish(sector);
                        }
                    }
                });
            }
        });
        let control = disk.device().scheduler().unwrap();
        let stats = control.stats();
        let writes = stats.of(Prio::BestEffort, Direction::Write);
        assert_eq!(writes.inserted, THREADS * ROUNDS);
        assert_eq!((writes.queued(), control.waiting()), (0, 0));
        assert_eq!(disk.stats().channels, 0);
    }
}

/// A fault makes a request time out and is removed before the timeout: the device completes at once
/// again, and the request still ends.
#[test]
fn removed_fault_leaves_no_request_in_flight() {
    let inject = |disk: &dyn Disk, value: &str| {
        let (name, value) = ("timeout".to_owned(), value.to_owned());
        disk.inject(&Injection::Device { name, value }).unwrap();
    };
    for closes in [false, true] {
        let device = Scheduled::new(null(&flat()), true).unwrap();
        let (name, depth) = ("timeout".to_owned(), ChannelConfig { depth: 4 });
        let clock = ManualClock::new();
        let disk = Composed::with_clock(name, "null", device, depth, clock.clone());
        let mut writer = Writer::new(&disk);
        inject(&disk, "1,100,0,1");
        writer.write(0);
        inject(&disk, "");
        let mut other = Writer::new(&disk);
        other.write(2 * BLOCK);
        other.finish(2 * BLOCK);
        if !closes {
            let mut done = Vec::new();
            while writer.channel.reap(&mut done) == 0 {
                writer.channel.wait(None);
            }
            assert_eq!((done.len(), done[0].status), (1, Status::Timeout));
            assert_eq!(clock.now(), Nanos(5_000_000_000));
        }
        drop((writer, other));
        assert_eq!(disk.stats().channels, 0);
    }
}

/// More requests than a submit ring has entries, which all complete at once.
#[test]
fn device_with_many_tags_uses_all_of_them() {
    const COUNT: u64 = 3000;
    let deep = NullConfig {
        irqmode: IrqMode::Timer,
        completion_nsec: 1_000_000,
        hw_queue_depth: 4096,
        size: 64 << 20,
        ..flat()
    };
    let device = Scheduled::new(null(&deep), true).unwrap();
    let (name, depth) = ("deep".to_owned(), ChannelConfig { depth: 4096 });
    let clock = ManualClock::new();
    let disk = Composed::with_clock(name, "null", device, depth, clock);
    let mut channel = disk.open().unwrap();
    let region = channel.register(Region::alloc(4096));
    let buf = BufRef { region, offset: 0 };
    let reads: Vec<Bio> =
        (0..COUNT).map(|index| Bio::read(Sector(2 * index * BLOCK), BLOCK, buf)).collect();
    let (mut pushed, mut done) = (0, Vec::new());
    while done.len() < reads.len() {
        pushed += channel.push(&reads[pushed..]);
        channel.submit();
        if channel.reap(&mut done) == 0 {
            channel.wait(None);
        }
    }
    assert!(done.iter().all(|done| done.status == Status::Ok));
    assert_eq!((channel.in_flight(), done.len()), (0, reads.len()));
}

/// Far more writes than `async_depth` admits to the queue wait outside it and in the submit ring;
/// all are executed.
#[test]
fn writes_beyond_async_depth_are_served() {
    const COUNT: u64 = 900;
    let config = NullConfig { irqmode: IrqMode::Timer, size: 64 << 20, ..flat() };
    let device = Scheduled::new(null(&config), true).unwrap();
    let (name, depth) = ("async".to_owned(), ChannelConfig { depth: 1024 });
    let clock = ManualClock::new();
    let disk = Composed::with_clock(name, "null", device, depth, clock);
    let control = disk.device().scheduler().unwrap();
    let mut tunables = control.tunables();
    tunables.set(Tunable::AsyncDepth, 1).unwrap();
    control.set(tunables);
    let mut channel = disk.open().unwrap();
    let region = channel.register(Region::alloc(4096));
    let buf = BufRef { region, offset: 0 };
    let writes: Vec<Bio> =
        (0..COUNT).map(|index| Bio::write(Sector(2 * index * BLOCK), BLOCK, buf)).collect();
    let (mut pushed, mut done) = (0, Vec::new());
    while done.len() < writes.len() {
        pushed += channel.push(&writes[pushed..]);
        channel.submit();
        if channel.reap(&mut done) == 0 {
            channel.wait(None);
        }
    }
    assert!(done.iter().all(|done| done.status == Status::Ok));
    let stats = control.stats();
    assert_eq!(stats.of(Prio::BestEffort, Direction::Write).completed, COUNT);
}

/// Dropping a channel does not wait for requests that only a timer holds back: they are dropped
/// with it.
#[test]
fn dropped_channel_does_not_wait_for_timer() {
    let hour = NullConfig {
        irqmode: IrqMode::Timer,
        completion_nsec: 3_600_000_000_000,
        hw_queue_depth: 1,
        ..flat()
    };
    let device = Scheduled::new(null(&hour), true).unwrap();
    let (name, depth) = ("hour".to_owned(), ChannelConfig { depth: 4 });
    let disk = Composed::new(name, "null", device, depth);
    for _ in 0..2 {
        let mut writer = Writer::new(&disk);
        writer.write(0);
        writer.write(2 * BLOCK);
        drop(writer);
    }
    assert_eq!(disk.stats().channels, 0);
}

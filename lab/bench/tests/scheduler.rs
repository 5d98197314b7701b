//! The merging and fairness of the schedulers are checked decision by decision: one thread drives
//! all channels, on a manual clock.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use blockyard_baselines::sched::{self, NONE, PRODUCT};
use blockyard_baselines::{sched_fifo, sched_lock};
use blockyard_core::channel::Channel;
use blockyard_core::sched::deadline::Tunable;
use blockyard_core::{Bio, BufRef, Completion, Disk, Nanos, Op, Prio, Region, RegionId, Sector};
use blockyard_lab::tap::{TapReading, Tapped};
use blockyard_null::{IrqMode, Null, NullConfig};
use blockyard_testing::clock::ManualClock;

/// Sectors of an I/O.
const SECTORS: u64 = 8;
/// The device's time for a request, and the step of the clock.
const SERVICE_NS: u64 = 1_000_000;

/// Channels of a device that takes a millisecond for a request, all driven by one thread.
struct Bench {
    disk: Arc<dyn Disk>,
    tap: Arc<Tapped<Arc<Null>>>,
    clock: ManualClock,
    channels: Vec<(Box<dyn Channel>, RegionId)>,
    done: Vec<Completion>,
}

impl Bench {
    fn new(name: &str, tags: u16, channels: usize) -> Bench {
        let config = NullConfig {
            size: 64 << 30,
            bs: 4096,
            irqmode: IrqMode::Timer,
            completion_nsec: SERVICE_NS,
            hw_queue_depth: tags,
            ..NullConfig::default()
        };
        let (tap, clock) =
            (Arc::new(Tapped::in_order(Null::open(config).unwrap())), ManualClock::new());
        let disk = sched::disk(name, name, Arc::clone(&tap), clock.clone()).unwrap();
        let channels = (0..channels).map(|_| {
            let mut channel = disk.open().unwrap();
            let region = channel.register(Region::alloc(4096));
            (channel, region)
        });
        let channels = channels.collect();
        Bench { disk, tap, clock, channels, done: Vec::new() }
    }

    fn set(&self, tunable: Tunable, value: i64) {
        let control = self.disk.scheduler().unwrap();
        let mut tunables = control.tunables();
        tunables.set(tunable, value).unwrap();
        control.set(tunables);
    }

    fn submit(&mut self, channel: usize, op: Op, sector: u64, prio: Prio) {
        let (channel, region) = &mut self.channels[channel];
        let buf = BufRef { region: *region, offset: 0 };
        let bio = Bio::new(op, Sector(sector), SECTORS).with_buf(buf).with_prio(prio);
        assert_eq!(channel.push(&[bio]), 1);
        channel.submit();
    }

    /// Advances the clock, lets each channel reap, and returns the number of completions by
    /// channel.
    fn step(&mut self, ns: u64) -> Vec<usize> {
        self.clock.advance(ns);
        let mut counts = Vec::with_capacity(self.channels.len());
        for (channel, _) in &mut self.channels {
            self.done.clear();
            let count = channel.reap(&mut self.done);
            assert!(self.done.iter().all(|completion| completion.status.is_ok()));
            counts.push(count);
        }
        counts
    }

    fn now(&self) -> Nanos {
        blockyard_core::clock::Clock::now(&self.clock)
    }

    /// Runs until no request is in flight.
    fn finish(&mut self) {
        for _ in 0..100_000 {
            if self.channels.iter().all(|(channel, _)| channel.in_flight() == 0) {
                return;
            }
            self.step(SERVICE_NS);
        }
        panic!("something never completes");
    }
}

/// The published regression: 64 submitters with one sequential 4 KiB write each. Returns the
/// requests that a device with `tags` tags sees if they write `streams` streams.
fn sequential_writes(name: &str, tags: u16, streams: u64) -> TapReading {
    const SUBMITTERS: usize = 64;
    let mut bench = Bench::new(name, tags, SUBMITTERS);
    let mut next: Vec<u64> = (0..streams).map(|stream| stream << 24).collect();
    let mut idle = [true; SUBMITTERS];
    for _ in 0..200 {
        for submitter in 0..SUBMITTERS {
            if std::mem::take(&mut idle[submitter]) {
                let sector = &mut next[submitter % streams as usize];
                let at = *sector;
                *sector += SECTORS;
                bench.submit(submitter, Op::Write, at, Prio::BestEffort);
            }
        }
        for (idle, count) in idle.iter_mut().zip(bench.step(SERVICE_NS / 4)) {
            *idle |= count > 0;
        }
    }
    bench.finish();
    bench.tap.reading()
}

/// With as many tags as submitters no request waits, and none merges under any scheduler.
#[test]
fn waiting_requests_merge_as_under_one_lock() {
    for (tags, streams, blocks_min) in
        [(64, 1, 1.0), (64, 4, 1.0), (8, 1, 4.0), (8, 4, 4.0), (1, 1, 16.0)]
    {
        let read = |way| sequential_writes(way, tags, streams);
        let (lock, product) = (read(sched_lock::PARKING), read(PRODUCT));
        let blocks = |reading: TapReading| reading.size_and_merged(4096).0 / 4096.0;
        let told = format!("{tags} tags, {streams} streams: {product:?}, one lock {lock:?}");
        assert!(product.sectors >= lock.sectors, "fewer writes: {told}");
        assert!(blocks(product) >= blocks(lock), "fewer merges: {told}");
        assert!(blocks(product) >= blocks_min, "too few merges: {told}");
        assert!(blocks(read(NONE)) <= 1.0, "who has no scheduler merges in a channel only");
    }
}

/// The schedulers whose policy sees all waiting requests. With buckets a request first waits in
/// line for a tag, so with few tags the policy sees neither its direction nor its age nor its
/// class.
const SCHEDULED: [&str; 3] = [sched_lock::SPINNING, sched_lock::PARKING, PRODUCT];

/// The number of recorded requests that were started before the one at `sector`.
fn place_of(order: &[(Op, Sector, u64)], sector: u64) -> Option<usize> {
    order.iter().position(|started| started.1 == Sector(sector))
}

/// A read concurrent with 200 waiting writes is next, after the rest of their batch of 16.
#[test]
fn a_read_overtakes_writes_that_wait() {
    let overtaken = |name| {
        let mut bench = Bench::new(name, 4, 1);
        for write in 0..200 {
            bench.submit(0, Op::Write, 1000 + 16 * write, Prio::BestEffort);
        }
        bench.tap.take_order();
        bench.submit(0, Op::Read, 0, Prio::BestEffort);
        bench.finish();
        place_of(&bench.tap.take_order(), 0).unwrap()
    };
    for name in SCHEDULED {
        assert!(overtaken(name) <= 16, "{name}: {}", overtaken(name));
    }
    assert!(overtaken(NONE) >= 190, "first in, first out");
}

/// A read concurrent with writes on four other channels. A device that is full of writes has no tag
/// for the read, and their batch continues; with `async_depth` the writes leave tags free for it.
#[test]
fn a_read_overtakes_the_writes_of_other_channels() {
    let overtaken = |name, async_depth| {
        let mut bench = Bench::new(name, 8, 5);
        if let Some(async_depth) = async_depth {
            bench.set(Tunable::AsyncDepth, async_depth);
        }
        for write in 0..64 {
            for channel in 1..5 {
                let sector = (channel as u64) << 20 | (write * 16);
                bench.submit(channel, Op::Write, sector, Prio::BestEffort);
            }
        }
        bench.step(SERVICE_NS);
        bench.tap.take_order();
        bench.submit(0, Op::Read, 0, Prio::BestEffort);
        bench.finish();
        place_of(&bench.tap.take_order(), 0).unwrap()
    };
    for name in SCHEDULED {
        assert!(overtaken(name, None) <= 16, "{name}: {}", overtaken(name, None));
    }
    assert_eq!(overtaken(PRODUCT, Some(4)), 0, "there are free tags");
    assert!(overtaken(sched_fifo::NAME, None) >= 230, "first in, first out");
}

/// Keeps reads of ascending sectors in flight on the first channel, without starting a new batch.
fn flood(bench: &mut Bench, next: &mut u64, count: usize) {
    for _ in 0..count {
        bench.submit(0, Op::Read, *next, Prio::BestEffort);
        *next += 2 * SECTORS;
    }
}

/// An expired request is started within `fifo_batch` decisions, whatever its sector.
#[test]
fn an_expired_request_is_dispatched_after_the_batch() {
    for name in SCHEDULED {
        let (mut bench, mut next) = (Bench::new(name, 4, 2), 1 << 20);
        flood(&mut bench, &mut next, 64);
        bench.step(SERVICE_NS);
        // At a sector below the sweep, which ascends for ever.
        bench.submit(1, Op::Read, 0, Prio::BestEffort);
        let expires = Nanos(bench.now().0 + 500_000_000);
        while bench.now() < Nanos(expires.0 - SERVICE_NS) {
            let count = bench.step(SERVICE_NS)[0];
            flood(&mut bench, &mut next, count);
            assert_eq!(place_of(&bench.tap.take_order(), 0), None, "{name}: too early");
        }
        let mut order = Vec::new();
        for _ in 0..16 {
            let count = bench.step(SERVICE_NS)[0];
            flood(&mut bench, &mut next, count);
            order.extend(bench.tap.take_order());
        }
        let place = place_of(&order, 0).unwrap_or_else(|| panic!("{name}: overdue and not next"));
        assert!(place <= 16 + 4, "{name}: {place}");
        bench.finish();
    }
}

/// Writes wait for at most `writes_starved` batches of reads, and the rest of one.
#[test]
fn writes_are_not_starved() {
    for name in SCHEDULED {
        let (mut bench, mut next) = (Bench::new(name, 4, 2), 1 << 20);
        flood(&mut bench, &mut next, 64);
        bench.tap.take_order();
        bench.submit(1, Op::Write, 0, Prio::BestEffort);
        let mut order = Vec::new();
        for _ in 0..32 {
            let count = bench.step(SERVICE_NS)[0];
            flood(&mut bench, &mut next, count);
            order.extend(bench.tap.take_order());
        }
        let place = place_of(&order, 0).unwrap_or_else(|| panic!("{name}: starved"));
        assert!(place <= 3 * 16, "{name}: {place}");
        bench.finish();
    }
}

/// A lower class waits while a higher one has requests, but no longer than `prio_aging_expire`.
#[test]
fn the_idle_class_waits_until_it_has_aged() {
    const AGING_MS: u64 = 100;
    for name in SCHEDULED {
        let (mut bench, mut next) = (Bench::new(name, 4, 2), 1 << 20);
        bench.set(Tunable::PrioAgingExpire, AGING_MS as i64);
        flood(&mut bench, &mut next, 64);
        bench.submit(1, Op::Read, 0, Prio::Idle);
        let since = bench.now().0;
        bench.tap.take_order();
        let mut started = None;
        while started.is_none() && bench.now().0 < since + 2 * AGING_MS * 1_000_000 {
            let count = bench.step(SERVICE_NS)[0];
            flood(&mut bench, &mut next, count);
            started = place_of(&bench.tap.take_order(), 0).map(|_| bench.now().0 - since);
        }
        let waited_ms = started.unwrap_or_else(|| panic!("{name}: starved")) / 1_000_000;
        assert!((AGING_MS..=AGING_MS + 1).contains(&waited_ms), "{name}: {waited_ms} ms");
        bench.finish();
    }
}

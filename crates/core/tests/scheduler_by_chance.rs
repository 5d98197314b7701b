//! A shared scheduler over the real order, in random interleavings of shuttle. Up to 32 submitters
//! use devices that complete within `start` or later, that leave requests unstarted or want them in
//! parts. Some channels are dropped with requests in flight, and the scheduler is switched off and
//! on. Waits have no timeout here, so that a lost wakeup is a deadlock. Run by `make shuttle`;
//! without `--cfg shuttle` this file is empty.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used, unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use blockyard_core::channel::{Channel, ChannelConfig};
use blockyard_core::clock::Clock;
use blockyard_core::sched::deadline::{Counters, Tunable};
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::*;
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;

const SECTORS: u64 = 512;

/// A clock that advances on each reading and does not end a long sleep.
#[derive(Clone)]
struct Ticks(Arc<AtomicU64>);

impl Clock for Ticks {
    fn now(&self) -> Nanos {
        Nanos(self.0.fetch_add(100, Ordering::SeqCst))
    }

    fn sleep_until(&self, at: Nanos) {
        self.0.fetch_max(at.0, Ordering::SeqCst);
        // A short sleep yields to other threads.
        thread::yield_now();
    }

    fn doze_until(&self, at: Nanos, sleep: &mut dyn FnMut(Duration)) {
        let wait_ns = at.since(self.now());
        if wait_ns < 1_000_000 {
            self.sleep_until(at)
        } else {
            sleep(Duration::from_nanos(wait_ns))
        }
    }
}

/// The behaviour of a device.
#[derive(Clone, Copy)]
struct Habits {
    /// The device completes requests within `start`, and reports so.
    immediate: bool,
    /// The device leaves some requests unstarted, and wants some in parts.
    moody: bool,
    depth: u16,
    /// Number of priority classes, which the submitters take in turns.
    classes: usize,
}

struct Disk {
    geometry: Geometry,
    limits: Limits,
    medium: Arc<Vec<AtomicU64>>,
    habits: Habits,
}

impl Disk {
    fn new(habits: Habits) -> Disk {
        Disk {
            geometry: Geometry {
                sectors: SECTORS,
                logical_block_bytes: 512,
                physical_block_bytes: 512,
                zones: None,
            },
            limits: Limits::unlimited(habits.depth),
            medium: Arc::new((0..SECTORS).map(|_| AtomicU64::new(0)).collect()),
            habits,
        }
    }
}

impl Device for Disk {
    type Queue = Queue;

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open_queue(&self) -> Result<Queue, DeviceError> {
        let held = CompletionBatch::with_capacity(self.habits.depth.into());
        Ok(Queue { medium: Arc::clone(&self.medium), habits: self.habits, held })
    }

    fn report_zones(&self, _: Sector, _: usize, _: &mut Vec<ZoneInfo>) -> Result<(), DeviceError> {
        Ok(())
    }
}

struct Queue {
    medium: Arc<Vec<AtomicU64>>,
    habits: Habits,
    held: CompletionBatch,
}

impl DeviceQueue for Queue {
    fn start(&mut self, _now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        while let Some(started) = batch.next() {
            let mood = if self.habits.moody { thread_rng().gen_range(0..6) } else { 9 };
            if mood == 0 && (self.habits.immediate || !self.held.is_empty()) {
                return batch.requeue(started);
            }
            if mood == 1 && started.is_merged() {
                return batch.break_up(started);
            }
            assert!(self.held.len() < self.habits.depth.into(), "more than there are tags");
            assert!(started.tag().0 < self.habits.depth);
            let mut sector = started.sector().0 as usize;
            for segment in started.segments() {
                for at in 0..segment.len_bytes / 512 {
                    // SAFETY: a segment is readable for its length, which is a whole number of
                    // sectors.
                    let stamp = unsafe { segment.data.add(at * 512).cast().read_unaligned() };
                    self.medium[sector].store(stamp, Ordering::SeqCst);
                    sector += 1;
                }
            }
            let into = if self.habits.immediate { &mut *done } else { &mut self.held };
            into.complete(started, Status::Ok);
        }
    }

    fn poll(&mut self, _now: Nanos, done: &mut CompletionBatch) {
        for _ in 0..thread_rng().gen_range(0..=self.held.len()) {
            done.take_from(&mut self.held);
        }
    }

    fn room(&self) -> usize {
        usize::from(self.habits.depth) - self.held.len()
    }

    fn due(&self) -> Due {
        if self.held.is_empty() { Due::Never } else { Due::At(Nanos(0)) }
    }

    fn is_immediate(&mut self) -> bool {
        self.habits.immediate
    }
}

type Shared = Composed<Scheduled<Disk>, Ticks>;

fn shared(habits: Habits) -> Arc<Shared> {
    let device = Scheduled::new(Disk::new(habits), true).unwrap();
    let clock = Ticks(Arc::new(AtomicU64::new(1)));
    let config = ChannelConfig { depth: 8 };
    let name = "chance".to_owned();
    Arc::new(Composed::with_clock(name, "test", device, config, clock))
}

/// Default maximum number of bios in a round.
const FEW: u64 = 3;
/// More than a submit ring holds under shuttle.
const MANY: u64 = 8;

/// Writes stamped sectors, which interleave with those of other threads, several at once, and waits
/// for them.
fn write(disk: &Shared, number: u64, threads: u64, rounds: u64, most: u64, is_dropped: bool) {
    let mut channel = disk.open_stack().unwrap();
    let region = Region::alloc(4096);
    let region_id = channel.register(Arc::clone(&region));
    let classes = disk.device().inner().habits.classes;
    let prio = [Prio::BestEffort, Prio::RealTime, Prio::Idle][number as usize % classes];
    let mut done = Vec::with_capacity(8);
    for round in 0..rounds {
        let count = thread_rng().gen_range(1..=most);
        for index in 0..count {
            let sector = (round * most + index) * threads + number;
            region.write(index * 512, &(sector + 1000).to_le_bytes());
            let buf = BufRef { region: region_id, offset: index * 512 };
            let bio = Bio::write(Sector(sector), 1, buf).with_user_data(sector).with_prio(prio);
            assert_eq!(channel.push(&[bio]), 1);
        }
        channel.submit();
        if is_dropped && round + 1 == rounds {
            return;
        }
        done.clear();
        while channel.in_flight() > 0 {
            if channel.reap(&mut done) == 0 {
                channel.wait(None);
            }
        }
        assert_eq!(done.len() as u64, count, "each bio ends once");
        for end in &done {
            assert!(end.status.is_ok());
            let found = disk.device().inner().medium[end.user_data as usize].load(Ordering::SeqCst);
            assert_eq!(found, end.user_data + 1000);
        }
    }
}

/// At the end no request waits or is in flight, and every request was counted once.
fn is_quiet(disk: &Shared) {
    let control = disk.device().scheduler().unwrap();
    assert_eq!(control.waiting(), 0);
    for (prio, direction, counters) in control.stats().iter() {
        let Counters { inserted, merged, completed, .. } = *counters;
        assert_eq!(inserted, merged + completed, "{prio:?} {direction:?}");
    }
}

fn submitters(habits: Habits, threads: u64, rounds: u64) {
    writers(&shared(habits), threads, rounds, FEW);
}

/// `threads` threads write `rounds` times each, up to `most` bios at a time.
fn writers(disk: &Arc<Shared>, threads: u64, rounds: u64, most: u64) {
    let writers: Vec<_> = (0..threads)
        .map(|number| {
            let disk = Arc::clone(disk);
            // Every fourth thread drops its channel with requests in flight.
            thread::spawn(move || write(&disk, number, threads, rounds, most, number % 4 == 3))
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    is_quiet(disk);
}

/// Runs a body in random interleavings of two kinds.
fn draw(iterations: usize, body: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(body.clone(), iterations);
    shuttle::check_pct(body, iterations, 3);
}

const AT_ONCE: Habits = Habits { immediate: true, moody: false, depth: 4, classes: 1 };
/// Two requests of each channel at a time take the fast path.
const AT_ONCE_DEEP: Habits = Habits { depth: 8, ..AT_ONCE };
const LATER: Habits = Habits { immediate: false, ..AT_ONCE };

#[test]
fn three_submitters_on_one_tag() {
    draw(1_000, || submitters(Habits { depth: 1, ..AT_ONCE }, 3, 3));
    draw(1_000, || submitters(Habits { depth: 1, ..LATER }, 3, 3));
}

#[test]
fn eight_submitters() {
    draw(300, || submitters(AT_ONCE, 8, 3));
    draw(300, || submitters(AT_ONCE_DEEP, 8, 3));
    draw(300, || submitters(LATER, 8, 3));
}

#[test]
fn eight_submitters_on_device_that_leaves_requests() {
    draw(300, || submitters(Habits { moody: true, ..AT_ONCE }, 8, 3));
    draw(300, || submitters(Habits { moody: true, ..AT_ONCE_DEEP }, 8, 3));
    draw(300, || submitters(Habits { moody: true, ..LATER }, 8, 3));
}

#[test]
fn nine_submitters_of_three_classes() {
    for moody in [false, true] {
        draw(150, move || submitters(Habits { classes: 3, moody, ..AT_ONCE }, 9, 3));
        draw(150, move || submitters(Habits { classes: 3, moody, ..AT_ONCE_DEEP }, 9, 3));
        draw(150, move || submitters(Habits { classes: 3, moody, ..LATER }, 9, 3));
    }
}

#[test]
fn thirty_two_submitters() {
    draw(40, || submitters(AT_ONCE, 32, 2));
    draw(40, || submitters(LATER, 32, 2));
}

/// Submit rings, the order and the refused requests fill up, with a device of one tag.
#[test]
fn six_submitters_beyond_capacity() {
    for habits in [Habits { depth: 1, ..AT_ONCE }, Habits { depth: 1, ..LATER }] {
        draw(200, move || writers(&shared(habits), 6, 2, MANY));
    }
}

/// `async_depth` admits few writes to the order, so that others wait as refused or in submit rings.
#[test]
fn five_submitters_whose_writes_are_throttled() {
    for (habits, async_depth) in [(AT_ONCE, 1), (AT_ONCE_DEEP, 3), (LATER, 1), (LATER, 3)] {
        draw(150, move || {
            let disk = shared(habits);
            let control = disk.device().scheduler().unwrap();
            let mut tunables = control.tunables();
            tunables.set(Tunable::AsyncDepth, async_depth).unwrap();
            control.set(tunables);
            writers(&disk, 5, 2, MANY);
        });
    }
}

/// The scheduler is switched off and on, tuned and observed under load.
#[test]
fn four_submitters_with_control_plane_changes() {
    for habits in [AT_ONCE, AT_ONCE_DEEP, LATER] {
        draw(300, move || {
            let disk = shared(habits);
            let writers: Vec<_> = (0..4)
                .map(|number| {
                    let disk = Arc::clone(&disk);
                    thread::spawn(move || write(&disk, number, 4, 4, FEW, false))
                })
                .collect();
            let control = disk.device().scheduler().unwrap();
            for name in ["none", "mq-deadline", "none", "mq-deadline"] {
                control.switch(name).unwrap();
                assert_eq!(control.active(), name);
                let mut tunables = control.tunables();
                tunables.set(Tunable::FifoBatch, 1).unwrap();
                control.set(tunables);
                control.stats();
            }
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            is_quiet(&disk);
        });
    }
}

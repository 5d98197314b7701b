//! The fast path of a shared scheduler: requests pass in the scheduler's order, each exactly once,
//! regardless of what the device does with them.

use std::sync::{Arc, Mutex};

use blockyard_core::channel::{Channel, ChannelConfig};
use blockyard_core::sched::deadline::{Counters, Direction, Stats, Tunable};
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Batch, Bio, BufRef, CompletionBatch, Composed, Device, DeviceError, DeviceQueue, Disk as _,
    Due, Geometry, Limits, Nanos, Op, Prio, Region, Sector, Status,
};

const SECTORS: u64 = 1 << 20;

/// What a device does with every `n`-th request; 0 means never.
#[derive(Clone, Copy, Default)]
struct Habits {
    leaves: u64,
    breaks: u64,
}

/// A device that completes within `start` and logs the requests that it has started.
struct Disk {
    geometry: Geometry,
    limits: Limits,
    habits: Habits,
    started: Arc<Mutex<Vec<u64>>>,
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
        let (depth, habits) = (self.limits.queue_depth, self.habits);
        Ok(Queue { depth, habits, count: 0, started: Arc::clone(&self.started) })
    }

    fn report_zones(&self, _: Sector, _: usize, _: &mut Vec<ZoneInfo>) -> Result<(), DeviceError> {
        Ok(())
    }
}

struct Queue {
    depth: u16,
    habits: Habits,
    count: u64,
    started: Arc<Mutex<Vec<u64>>>,
}

impl DeviceQueue for Queue {
    fn start(&mut self, _now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        let mut tags = vec![false; self.depth.into()];
        while let Some(started) = batch.next() {
            self.count += 1;
            let is_turn = |every: u64| every > 0 && self.count.is_multiple_of(every);
            if is_turn(self.habits.leaves) {
                return batch.requeue(started);
            }
            if started.is_merged() && is_turn(self.habits.breaks) {
                return batch.break_up(started);
            }
            let tag = &mut tags[usize::from(started.tag().0)];
            assert!(!std::mem::replace(tag, true), "a tag of the device's is out once");
            self.started.lock().unwrap().push(started.sector().0);
            done.complete(started, Status::Ok);
        }
    }

    fn poll(&mut self, _now: Nanos, _done: &mut CompletionBatch) {}

    fn room(&self) -> usize {
        self.depth.into()
    }

    fn due(&self) -> Due {
        Due::Never
    }

    fn is_immediate(&mut self) -> bool {
        true
    }
}

type Shared = Composed<Scheduled<Disk>>;

struct Fixture {
    disk: Shared,
    started: Arc<Mutex<Vec<u64>>>,
}

impl Fixture {
    fn new(depth: u16, habits: Habits) -> Fixture {
        let started = Arc::new(Mutex::new(Vec::new()));
        let geometry = Geometry {
            sectors: SECTORS,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            zones: None,
        };
        let limits = Limits::unlimited(depth);
        let device = Disk { geometry, limits, habits, started: Arc::clone(&started) };
        let (name, config) = ("passing".to_owned(), ChannelConfig { depth: 256 });
        let device = Scheduled::new(device, true).unwrap();
        Fixture { disk: Composed::new(name, "test", device, config), started }
    }

    fn stats(&self) -> Stats {
        self.disk.device().scheduler().unwrap().stats()
    }

    fn set(&self, tunable: Tunable, value: i64) {
        let control = self.disk.device().scheduler().unwrap();
        let mut tunables = control.tunables();
        tunables.set(tunable, value).unwrap();
        control.set(tunables);
    }

    /// The sectors of the requests that the device has started since the last call.
    fn started(&self) -> Vec<u64> {
        std::mem::take(&mut self.started.lock().unwrap())
    }
}

/// A channel whose requests are given by sectors.
struct User {
    channel: Box<dyn Channel>,
    buf: BufRef,
}

impl User {
    fn new(fixture: &Fixture) -> User {
        let mut channel = fixture.disk.open().unwrap();
        let region = channel.register(Region::alloc(4096));
        User { channel, buf: BufRef { region, offset: 0 } }
    }

    /// Submits one sector at each of these positions.
    fn submit(&mut self, op: Op, sectors: &[u64]) {
        for &sector in sectors {
            let bio = Bio::new(op, Sector(sector), 1).with_buf(self.buf).with_user_data(sector);
            assert_eq!(self.channel.push(&[bio]), 1);
        }
        self.channel.submit();
    }

    /// Waits for all completions; returns them in ascending order.
    fn finish(&mut self) -> Vec<u64> {
        let mut done = Vec::new();
        while self.channel.in_flight() > 0 {
            if self.channel.reap(&mut done) == 0 {
                self.channel.wait(None);
            }
        }
        assert!(done.iter().all(|end| end.status.is_ok()));
        let mut sectors: Vec<u64> = done.iter().map(|end| end.user_data).collect();
        sectors.sort_unstable();
        sectors
    }
}

#[test]
fn bypass_continues_sweep_at_last_position() {
    let fixture = Fixture::new(64, Habits::default());
    let mut user = User::new(&fixture);
    user.submit(Op::Read, &[50, 10, 30]);
    assert_eq!(fixture.started(), [10, 30, 50]);
    user.submit(Op::Read, &[20, 70, 40, 60]);
    assert_eq!(fixture.started(), [60, 70, 20, 40], "from 50 up, and then from the start");
    user.submit(Op::Write, &[35, 15]);
    assert_eq!(fixture.started(), [15, 35], "writes have a sweep of their own");
    user.submit(Op::Read, &[80, 40]);
    assert_eq!(fixture.started(), [40, 80]);
    assert_eq!(user.finish().len(), 11);
    user.submit(Op::Write, &[5, 36]);
    assert_eq!(fixture.started(), [36, 5]);
    user.finish();
    let stats = fixture.stats();
    let reads = stats.of(Prio::BestEffort, Direction::Read);
    let counted = Counters { inserted: 9, dispatched: 9, completed: 9, ..Counters::default() };
    assert_eq!(*reads, counted);
    assert_eq!(stats.of(Prio::BestEffort, Direction::Write).queued(), 0);
}

/// More requests than may pass together, from several channels in turn, with channel tags above the
/// device's.
#[test]
fn large_batch_bypasses_in_parts_with_device_tags() {
    for depth in [1, 3, 8, 40, 128] {
        let fixture = Fixture::new(depth, Habits::default());
        let mut users = [User::new(&fixture), User::new(&fixture)];
        let mut sectors: Vec<u64> = (0..120).map(|index| index * 7919 % SECTORS).collect();
        for user in &mut users {
            user.submit(Op::Read, &sectors);
            user.submit(Op::Write, &sectors);
        }
        let mut started = fixture.started();
        started.sort_unstable();
        sectors.sort_unstable();
        assert_eq!(started.len(), 480);
        for user in &mut users {
            let home = user.finish();
            assert!(home.chunks(2).zip(&sectors).all(|(pair, sector)| pair == [*sector; 2]));
        }
        assert_eq!(fixture.stats().of(Prio::BestEffort, Direction::Read).completed, 240);
    }
}

/// Requests that the device does not start go before all others, and those that it wants bio by bio
/// are split; each completes once.
#[test]
fn unstarted_bypass_request_is_started_again() {
    for (leaves, breaks) in [(5, 0), (0, 3), (2, 3), (7, 2)] {
        let fixture = Fixture::new(64, Habits { leaves, breaks });
        let mut users = [User::new(&fixture), User::new(&fixture)];
        let mut all = 0;
        for round in 0..40_u64 {
            for user in &mut users {
                // Some bios merge in the plug, so that there are requests to break up.
                let sectors: Vec<u64> = (0..24).map(|at| at / 3 * 100 + at % 3 + round).collect();
                user.submit(Op::Write, &sectors);
                assert_eq!(user.finish(), sectors);
                all += sectors.len();
            }
        }
        let stats = fixture.stats();
        let writes = stats.of(Prio::BestEffort, Direction::Write);
        assert_eq!((writes.queued(), writes.in_flight()), (0, 0));
        assert!(writes.requeued > 0);
        assert_eq!(fixture.disk.stats().op(Op::Write).ops, all as u64);
    }
}

/// Requests that are expired on arrival, exceed the tags, or have two classes go through the order.
#[test]
fn refused_bypass_goes_through_the_order() {
    let fixture = Fixture::new(64, Habits::default());
    let mut user = User::new(&fixture);
    fixture.set(Tunable::ReadExpire, 0);
    user.submit(Op::Read, &[9, 3, 6]);
    assert_eq!(fixture.started(), [3, 6, 9]);
    let expired = fixture.stats().of(Prio::BestEffort, Direction::Read).expired;
    assert_eq!(expired, 3);
    fixture.set(Tunable::ReadExpire, 500);
    fixture.set(Tunable::AsyncDepth, 2);
    user.submit(Op::Write, &[90, 30, 60, 10]);
    assert_eq!(fixture.started().len(), 4);
    for sector in [100, 200] {
        let op = if sector == 100 { Op::Write } else { Op::Read };
        let bio = Bio::new(op, Sector(sector), 1).with_buf(user.buf).with_user_data(sector);
        assert_eq!(user.channel.push(&[bio]), 1);
    }
    user.channel.submit();
    assert_eq!(fixture.started(), [100, 200], "the batch of writes goes on");
    assert_eq!(user.finish(), [3, 6, 9, 10, 30, 60, 90, 100, 200]);
}

/// Threads take the fast path concurrently and meet when requests are left; none is lost.
#[test]
fn bypassing_and_waiting_threads_complete_all() {
    const THREADS: u64 = 6;
    let fixture = Fixture::new(8, Habits { leaves: 101, breaks: 0 });
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let fixture = &fixture;
            scope.spawn(move || {
                let mut user = User::new(fixture);
                for round in 0..300 {
                    let base = (round * THREADS + thread) * 100;
                    let mut sectors: Vec<u64> = (0..8).map(|at| base + at * 3).collect();
                    let op = if (round + thread) % 3 == 0 { Op::Write } else { Op::Read };
                    sectors.rotate_left(3);
                    user.submit(op, &sectors);
                    sectors.rotate_right(3);
                    assert_eq!(user.finish(), sectors);
                }
            });
        }
    });
    let stats = fixture.stats();
    for (prio, direction, counters) in stats.iter() {
        assert_eq!((counters.queued(), counters.in_flight()), (0, 0), "{prio:?} {direction:?}");
    }
    assert_eq!(fixture.started().len() as u64, THREADS * 300 * 8);
}

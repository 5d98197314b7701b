//! Concurrent channels of a shared scheduler, over a device that completes requests within `start`:
//! which requests may take the fast path, and in which order they go. Most tests run on one thread
//! and submit from within the device, so that each run is the same.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockyard_core::channel::{Channel, ChannelConfig};
use blockyard_core::clock::Clock;
use blockyard_core::sched::deadline::Tunable;
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Batch, Bio, BufRef, CompletionBatch, Composed, Device, DeviceError, DeviceQueue, Disk as _,
    Due, Flags, Geometry, Limits, Nanos, Op, Prio, Region, Sector, Status, ZoneGeometry,
};

const SECTORS: u64 = 1 << 20;
const ZONE_SECTORS: u64 = 64;

/// An action to execute while requests are in flight; the last one added runs first.
type During = Box<dyn FnOnce() + Send>;

/// The state that all queues of a device share.
#[derive(Default)]
struct Log {
    /// First sector and length of each request when it starts, and again with length 0 when it
    /// ends.
    events: Mutex<Vec<(u64, u64)>>,
    during: Mutex<Vec<During>>,
    /// Requests in flight and their maximum, then the same for writes.
    in_hand: AtomicUsize,
    in_hand_max: AtomicUsize,
    writes: AtomicUsize,
    writes_max: AtomicUsize,
    /// Depth of nested starts, and its maximum.
    nested: AtomicUsize,
    nested_max: AtomicUsize,
    /// The next start leaves all of its requests in the batch.
    leaves: AtomicBool,
    /// Requests complete at the next poll, although the device claims to complete within `start`.
    holds: AtomicBool,
    /// The device starts no requests.
    blocked: AtomicBool,
}

impl Log {
    fn enter(now: &AtomicUsize, most: &AtomicUsize, count: usize) -> usize {
        let now = now.fetch_add(count, Ordering::SeqCst) + count;
        most.fetch_max(now, Ordering::SeqCst);
        now
    }

    /// The requests that have started since the last call, in order.
    fn begun(&self) -> Vec<(u64, u64)> {
        let mut events = std::mem::take(&mut *self.events.lock().unwrap());
        events.retain(|(_, sectors)| *sectors > 0);
        events
    }

    /// The first sectors of the requests that have started since the last call.
    fn sectors(&self) -> Vec<u64> {
        self.begun().into_iter().map(|(sector, _)| sector).collect()
    }

    fn meanwhile(&self, act: impl FnOnce() + Send + 'static) {
        self.during.lock().unwrap().push(Box::new(act));
    }
}

struct Disk {
    geometry: Geometry,
    limits: Limits,
    log: Arc<Log>,
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
        let depth = self.limits.queue_depth.into();
        Ok(Queue { depth, held: CompletionBatch::with_capacity(depth), log: Arc::clone(&self.log) })
    }

    fn report_zones(&self, _: Sector, _: usize, _: &mut Vec<ZoneInfo>) -> Result<(), DeviceError> {
        Ok(())
    }
}

struct Queue {
    depth: usize,
    held: CompletionBatch,
    log: Arc<Log>,
}

impl DeviceQueue for Queue {
    fn start(&mut self, _now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        let log = Arc::clone(&self.log);
        if batch.is_empty() || log.leaves.swap(false, Ordering::SeqCst) {
            return;
        }
        let requests: Vec<_> = std::iter::from_fn(|| batch.next()).collect();
        let (count, sectors) =
            (requests.len(), requests.iter().map(|it| (it.sector().0, it.sectors())));
        log.events.lock().unwrap().extend(sectors);
        let writes = requests.iter().filter(|request| request.op() == Op::Write).count();
        let in_hand = Log::enter(&log.in_hand, &log.in_hand_max, count);
        assert!(in_hand <= self.depth, "{in_hand} at a device of {} tags", self.depth);
        Log::enter(&log.writes, &log.writes_max, writes);
        Log::enter(&log.nested, &log.nested_max, 1);
        let act = log.during.lock().unwrap().pop();
        if let Some(act) = act {
            act();
        }
        for request in requests {
            log.events.lock().unwrap().push((request.sector().0, 0));
            let holds = log.holds.load(Ordering::SeqCst);
            let into = if holds { &mut self.held } else { &mut *done };
            into.complete(request, Status::Ok);
        }
        log.nested.fetch_sub(1, Ordering::SeqCst);
        log.writes.fetch_sub(writes, Ordering::SeqCst);
        log.in_hand.fetch_sub(count, Ordering::SeqCst);
    }

    fn poll(&mut self, _now: Nanos, done: &mut CompletionBatch) {
        while done.take_from(&mut self.held) {}
    }

    fn room(&self) -> usize {
        if self.log.blocked.load(Ordering::SeqCst) { 0 } else { self.depth - self.held.len() }
    }

    fn due(&self) -> Due {
        if self.held.is_empty() { Due::Never } else { Due::At(Nanos(0)) }
    }

    fn is_immediate(&mut self) -> bool {
        !self.log.blocked.load(Ordering::SeqCst)
    }
}

/// A clock that advances on each reading. A sleeping thread reports its sleep, and sleeps forever
/// unless it is woken.
#[derive(Clone)]
struct Ticks {
    now: Arc<AtomicUsize>,
    sleeps: Sender<()>,
}

impl Clock for Ticks {
    fn now(&self) -> Nanos {
        Nanos(self.now.fetch_add(100, Ordering::SeqCst) as u64)
    }

    fn sleep_until(&self, at: Nanos) {
        self.now.fetch_max(at.0 as usize, Ordering::SeqCst);
    }

    fn doze_until(&self, _: Nanos, sleep: &mut dyn FnMut(Duration)) {
        // Tests of other things have no receiver.
        let _ = self.sleeps.send(());
        sleep(Duration::from_secs(1 << 20));
    }
}

struct Fixture {
    disk: Composed<Scheduled<Disk>, Ticks>,
    log: Arc<Log>,
    sleeps: Mutex<Receiver<()>>,
}

impl Fixture {
    fn new(depth: u16, processors: usize, zones: Option<ZoneGeometry>) -> Fixture {
        let geometry = Geometry {
            sectors: SECTORS,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            zones,
        };
        let (limits, log) = (Limits::unlimited(depth), Arc::new(Log::default()));
        let device = Disk { geometry, limits, log: Arc::clone(&log) };
        let device = Scheduled::for_processors(device, true, processors).unwrap();
        let (name, config) = ("at-once".to_owned(), ChannelConfig { depth: 512 });
        let (now, (sender, sleeps)) = (Arc::new(AtomicUsize::new(1)), channel());
        let clock = Ticks { now, sleeps: sender };
        let disk = Composed::with_clock(name, "test", device, config, clock);
        Fixture { disk, log, sleeps: Mutex::new(sleeps) }
    }

    fn set(&self, tunable: Tunable, value: i64) {
        let control = self.disk.device().scheduler().unwrap();
        let mut tunables = control.tunables();
        tunables.set(tunable, value).unwrap();
        control.set(tunables);
    }

    /// Makes the dispatcher account for the requests of all leases; has no other effect.
    fn look(&self) {
        self.disk.device().scheduler().unwrap().waiting();
    }

    /// Every request was counted once, and none is left.
    fn is_quiet(&self) {
        let control = self.disk.device().scheduler().unwrap();
        assert_eq!(control.waiting(), 0);
        for (prio, direction, counters) in control.stats().iter() {
            assert_eq!((counters.queued(), counters.in_flight()), (0, 0), "{prio:?} {direction:?}");
        }
    }
}

/// A channel whose requests are given by sectors.
struct User {
    channel: Box<dyn Channel>,
    buf: BufRef,
    prio: Prio,
    flags: Flags,
}

impl User {
    fn new(fixture: &Fixture) -> User {
        let mut channel = fixture.disk.open().unwrap();
        let region = channel.register(Region::alloc(4096));
        let buf = BufRef { region, offset: 0 };
        User { channel, buf, prio: Prio::BestEffort, flags: Flags::NONE }
    }

    /// A user that has completed a request, and so has noticed the scheduler.
    fn at_work(fixture: &Fixture) -> User {
        let mut user = User::new(fixture);
        user.submit(Op::Read, [0]);
        assert_eq!(user.finish(), [0]);
        user
    }

    /// Submits one sector at each of these positions.
    fn submit(&mut self, op: Op, sectors: impl IntoIterator<Item = u64>) {
        for sector in sectors {
            let bio = Bio::new(op, Sector(sector), 1).with_buf(self.buf).with_user_data(sector);
            let bio = bio.with_prio(self.prio).with_flags(self.flags);
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

/// Users whose submissions are nested in one another; they finish after all have submitted.
type Nest = Arc<Mutex<Vec<User>>>;

/// Distant sectors, except for two that merge if `touch` is set: then the batch cannot take the
/// fast path.
fn apart(from: u64, count: u64, touch: bool) -> Vec<u64> {
    let mut sectors: Vec<u64> = (0..count).map(|at| from + 10 * at).collect();
    if touch {
        sectors[2] = from + 1;
    }
    sectors
}

/// On a machine of eight processors, eight threads may hold requests of a device with 128 tags
/// while all other threads still find tags. A tag is useless to a request that waits after 31
/// others of its thread. This holds on the fast path and after a dispatch.
#[test]
fn every_processor_has_requests_at_the_device() {
    for touch in [false, true] {
        let fixture = Fixture::new(128, 8, None);
        let nest = Nest::default();
        for number in 1..8 {
            let (mut user, nest) = (User::new(&fixture), Arc::clone(&nest));
            fixture.log.meanwhile(move || {
                user.submit(Op::Read, apart(number * 1000, 32, touch));
                nest.lock().unwrap().push(user);
            });
        }
        let mut user = User::new(&fixture);
        user.submit(Op::Read, apart(0, 32, touch));
        assert_eq!(fixture.log.nested_max.load(Ordering::SeqCst), 8, "touching: {touch}");
        assert_eq!(user.finish().len(), 32);
        for mut user in nest.lock().unwrap().drain(..) {
            assert_eq!(user.finish().len(), 32);
        }
        fixture.is_quiet();
    }
}

/// A thread that takes its maximum, and leaves more requests that could start, wakes another thread
/// before it starts its own. Otherwise that thread would sleep until the first one has finished.
#[test]
fn busy_thread_wakes_another() {
    let fixture = Fixture::new(128, 8, None);
    let (mut user, mut sleeper) = (User::new(&fixture), User::at_work(&fixture));
    fixture.log.blocked.store(true, Ordering::SeqCst);
    sleeper.submit(Op::Read, [7]);
    let thread = std::thread::spawn(move || sleeper.finish());
    fixture.sleeps.lock().unwrap().recv().unwrap();
    fixture.log.blocked.store(false, Ordering::SeqCst);
    let (started, other) = channel();
    fixture.log.meanwhile(move || started.send(()).unwrap());
    fixture.log.meanwhile(move || {
        let woken = other.recv_timeout(Duration::from_secs(20));
        assert!(woken.is_ok(), "no thread was woken, though there are tags and requests");
    });
    user.submit(Op::Read, apart(1000, 64, true));
    assert_eq!(thread.join().unwrap(), [7]);
    assert_eq!(user.finish().len(), 64);
    fixture.is_quiet();
}

/// Threads use the fast path and the order concurrently: never more requests are in flight than
/// tags.
#[test]
fn requests_in_flight_never_exceed_tags() {
    const THREADS: u64 = 8;
    for (depth, processors) in [(8, 1), (16, 2), (30, 8)] {
        let fixture = Fixture::new(depth, processors, None);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let fixture = &fixture;
                scope.spawn(move || {
                    let mut user = User::new(fixture);
                    for round in 0..200 {
                        let from = (round * THREADS + thread) * 100;
                        let op = if (round + thread) % 3 == 0 { Op::Write } else { Op::Read };
                        user.submit(op, apart(from, 10, round % 8 == 0));
                        assert_eq!(user.finish().len(), 10);
                    }
                });
            }
        });
        fixture.is_quiet();
    }
}

/// A queue in which a delay fault was armed between two polls holds requests. With them it holds
/// the tags that passed requests would need if the device does not start them.
#[test]
fn delayed_requests_leave_no_room_to_bypass() {
    let fixture = Fixture::new(64, 2, None);
    let mut user = User::new(&fixture);
    fixture.log.holds.store(true, Ordering::SeqCst);
    user.submit(Op::Read, apart(0, 16, true));
    fixture.log.holds.store(false, Ordering::SeqCst);
    fixture.log.leaves.store(true, Ordering::SeqCst);
    user.submit(Op::Read, apart(1000, 16, false));
    assert_eq!(user.finish().len(), 32);
    fixture.is_quiet();
}

/// A delay fault is armed while a batch takes the fast path. Between two parts of the batch the
/// queue has started waiting requests of another channel, and holds them.
#[test]
fn delay_of_requests_ends_bypass() {
    let fixture = Fixture::new(64, 2, None);
    let (mut user, mut other) = (User::new(&fixture), User::new(&fixture));
    fixture.log.blocked.store(true, Ordering::SeqCst);
    other.submit(Op::Read, apart(0, 16, false));
    fixture.log.blocked.store(false, Ordering::SeqCst);
    fixture.log.holds.store(true, Ordering::SeqCst);
    let log = Arc::clone(&fixture.log);
    fixture.log.meanwhile(move || log.holds.store(false, Ordering::SeqCst));
    fixture.log.meanwhile(|| {});
    user.submit(Op::Read, apart(1000, 200, false));
    assert_eq!(user.finish().len(), 200);
    assert_eq!(other.finish().len(), 16);
    fixture.is_quiet();
}

/// Two writes to a zone keep the order of their submission, with writes to other zones between
/// them.
#[test]
fn two_writes_of_one_zone_do_not_bypass() {
    let zones = ZoneGeometry {
        zone_sectors: ZONE_SECTORS,
        zone_capacity_sectors: ZONE_SECTORS,
        zone_count: (SECTORS / ZONE_SECTORS) as u32,
        conventional_count: 0,
        open_max: 0,
        active_max: 0,
    };
    let fixture = Fixture::new(64, 2, Some(zones));
    let mut user = User::new(&fixture);
    user.submit(Op::Write, [80, 5, 70]);
    assert_eq!(fixture.log.sectors(), [5, 80, 70]);
    user.submit(Op::Write, [300, 200, 100]);
    assert_eq!(fixture.log.sectors(), [100, 200, 300], "one a zone");
    user.submit(Op::Read, [310, 305]);
    assert_eq!(fixture.log.sectors(), [305, 310], "reads have no order");
    assert_eq!(user.finish().len(), 8);
}

/// Adjacent requests are merged, wherever they are in the batch; those that must not be merged take
/// the fast path.
#[test]
fn mergeable_requests_do_not_bypass() {
    let fixture = Fixture::new(64, 2, None);
    let mut user = User::new(&fixture);
    user.submit(Op::Read, [10, 30, 11]);
    assert_eq!(fixture.log.begun(), [(10, 2), (30, 1)]);
    user.submit(Op::Write, [11, 30, 10]);
    assert_eq!(fixture.log.begun(), [(10, 2), (30, 1)]);
    user.flags = Flags::NOMERGE;
    user.submit(Op::Read, [50, 70, 51]);
    assert_eq!(fixture.log.begun(), [(50, 1), (51, 1), (70, 1)]);
    assert_eq!(user.finish().len(), 9);
}

/// At most `async_depth` writes are in flight, over all channels and on both paths.
#[test]
fn async_depth_bounds_the_writes_of_all_channels() {
    let fixture = Fixture::new(64, 2, None);
    fixture.set(Tunable::AsyncDepth, 2);
    let (mut user, nest) = (User::new(&fixture), Nest::default());
    for (number, writes) in [(1, 4), (2, 2), (3, 1), (4, 1)] {
        let (mut other, nest) = (User::new(&fixture), Arc::clone(&nest));
        fixture.log.meanwhile(move || {
            other.submit(Op::Write, apart(1000 * number, writes, false));
            nest.lock().unwrap().push(other);
        });
    }
    user.submit(Op::Write, [10]);
    user.submit(Op::Write, [20, 30]);
    user.submit(Op::Write, [40, 50, 60]);
    assert_eq!(user.finish().len(), 6);
    for mut other in nest.lock().unwrap().drain(..) {
        other.finish();
    }
    assert_eq!(fixture.log.begun().len(), 14);
    assert_eq!(fixture.log.writes_max.load(Ordering::SeqCst), 2);
    fixture.is_quiet();
}

/// A lower class waits for requests in flight of a higher class, also for those of the fast path.
#[test]
fn lower_class_waits_for_bypassed_higher_class() {
    let fixture = Fixture::new(64, 2, None);
    let (mut first, mut other) = (User::new(&fixture), User::new(&fixture));
    first.prio = Prio::RealTime;
    let nest = Nest::default();
    let kept = Arc::clone(&nest);
    fixture.log.meanwhile(move || {
        other.submit(Op::Read, [5]);
        kept.lock().unwrap().push(other);
    });
    first.submit(Op::Read, [10]);
    assert_eq!(first.finish(), [10]);
    assert_eq!(*fixture.log.events.lock().unwrap(), [(10, 1), (10, 0), (5, 1), (5, 0)]);
    assert_eq!(nest.lock().unwrap()[0].finish(), [5]);
    fixture.is_quiet();
}

/// A higher class does not wait for a lower one, and requests that the device left go before all
/// others.
#[test]
fn unstarted_request_precedes_lower_class() {
    let fixture = Fixture::new(64, 2, None);
    let (mut first, mut lower) = (User::new(&fixture), User::new(&fixture));
    (first.prio, lower.prio) = (Prio::RealTime, Prio::Idle);
    fixture.log.leaves.store(true, Ordering::SeqCst);
    let nest = Nest::default();
    let kept = Arc::clone(&nest);
    fixture.log.meanwhile(move || {
        lower.submit(Op::Read, [5]);
        kept.lock().unwrap().push(lower);
    });
    first.submit(Op::Read, [30, 10]);
    assert_eq!(fixture.log.begun(), [(10, 1), (30, 1), (5, 1)]);
    assert_eq!(first.finish(), [10, 30]);
    assert_eq!(nest.lock().unwrap()[0].finish(), [5]);
    fixture.is_quiet();
}

/// Of the sweeps of several channels, the one used last defines where the order continues.
#[test]
fn order_continues_at_latest_revoked_sweep() {
    for is_first_latest in [false, true] {
        let fixture = Fixture::new(64, 2, None);
        let (mut first, mut second) = (User::new(&fixture), User::new(&fixture));
        first.submit(Op::Read, [20]);
        second.submit(Op::Read, [100]);
        if is_first_latest {
            first.submit(Op::Read, [50]);
        }
        fixture.log.begun();
        fixture.look();
        first.submit(Op::Read, [40, 60, 150]);
        let want = if is_first_latest { [60, 150, 40] } else { [150, 40, 60] };
        assert_eq!(fixture.log.sectors(), want, "the first was the latest: {is_first_latest}");
        first.finish();
        second.finish();
        fixture.is_quiet();
    }
}

/// A thread that finds many requests left by others starts a bounded number of them. Later requests
/// that could take the fast path do not overtake those that wait.
#[test]
fn thread_stops_at_budget_and_waiting_requests_keep_order() {
    let fixture = Fixture::new(64, 2, None);
    fixture.set(Tunable::AsyncDepth, 1);
    let mut flood: Vec<User> = (0..4).map(|_| User::at_work(&fixture)).collect();
    fixture.log.begun();
    fixture.log.blocked.store(true, Ordering::SeqCst);
    for (number, user) in (0..).zip(&mut flood) {
        user.submit(Op::Write, apart(number * 10_000, 100, false));
    }
    fixture.log.blocked.store(false, Ordering::SeqCst);
    let mut done = Vec::new();
    flood[0].channel.reap(&mut done);
    assert_eq!(fixture.log.begun().len(), 256, "the other requests wait for the next turn");
    let mut late = User::new(&fixture);
    late.submit(Op::Write, [500_000]);
    late.finish();
    let mut ends = done.len();
    for user in &mut flood {
        ends += user.finish().len();
    }
    let begun = fixture.log.sectors();
    assert_eq!((ends, begun.len(), begun.last()), (400, 145, Some(&500_000)));
    fixture.is_quiet();
}

//! The zone write plug on null devices: what waits, in which order it is submitted, what is merged,
//! and where appends that are made of writes land, whatever fails or changes from outside.
#![allow(clippy::disallowed_types, clippy::unwrap_used)] // Test code.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::inject::{Injection, Rule};
use blockyard_core::middleware::Faulty;
use blockyard_core::sched::NoneScheduler;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::zone::gate::{GateMode, ZoneGates};
use blockyard_core::*;
use blockyard_null::{IrqMode, Null, NullConfig};
use blockyard_sim::clock::ManualClock;

const ZONE: u64 = 2048;

/// A null device that logs its requests, and whose reports can be made to fail.
struct Watched {
    inner: Arc<Null>,
    log: Arc<Mutex<Vec<(Op, u64, u64)>>>,
    reports: AtomicU32,
    failing_reports: AtomicU32,
}

struct WatchedQueue {
    inner: <Null as Device>::Queue,
    log: Arc<Mutex<Vec<(Op, u64, u64)>>>,
}

impl Device for Watched {
    type Queue = WatchedQueue;

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn open_queue(&self) -> Result<WatchedQueue, DeviceError> {
        Ok(WatchedQueue { inner: self.inner.open_queue()?, log: Arc::clone(&self.log) })
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        self.reports.fetch_add(1, SeqCst);
        if self.failing_reports.load(SeqCst) > 0 {
            self.failing_reports.fetch_sub(1, SeqCst);
            return Err(DeviceError::Gone);
        }
        self.inner.report_zones(from, zones_max, out)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.inner.inject(injection)
    }
}

impl DeviceQueue for WatchedQueue {
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut Done) {
        let mut log = self.log.lock().unwrap();
        for started in (0..).map_while(|index| batch.get(index)) {
            log.push((started.op(), started.sector().0, started.sectors()));
        }
        drop(log);
        self.inner.start(now, batch, done);
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) {
        self.inner.poll(now, done);
    }

    fn room(&self) -> usize {
        self.inner.room()
    }

    fn due(&self) -> Due {
        self.inner.due()
    }

    fn abort(&mut self, done: &mut Done) {
        self.inner.abort(done);
    }
}

type Fault = Arc<Faulty<Arc<Watched>>>;

/// A disk with a zone write plug, and access to the layers below it.
struct Yard {
    watched: Arc<Watched>,
    faulty: Fault,
    disk: Arc<dyn Disk>,
}

/// One channel of the disk.
struct Door {
    channel: Box<dyn Channel>,
    id: RegionId,
    region: Arc<Region>,
    done: Vec<Completion>,
}

fn zoned() -> NullConfig {
    let size = 64 << 20;
    NullConfig {
        size,
        zoned: true,
        zone_size: 1 << 20,
        memory_backed: true,
        ..NullConfig::default()
    }
}

/// A device without an append of its own.
fn appendless() -> NullConfig {
    NullConfig { zone_append_max_sectors: 0, ..zoned() }
}

/// A device that completes only at the next poll, so that requests are in flight between submit and
/// reap.
fn late(config: NullConfig) -> NullConfig {
    NullConfig { irqmode: IrqMode::Softirq, ..config }
}

fn yard(config: NullConfig) -> Yard {
    let watched = Arc::new(Watched {
        inner: Null::open(config).unwrap(),
        log: Arc::default(),
        reports: AtomicU32::new(0),
        failing_reports: AtomicU32::new(0),
    });
    let faulty = Arc::new(Faulty::new(Arc::clone(&watched), 1));
    let gates = ZoneGates::new(Arc::clone(&faulty)).unwrap().unwrap();
    let (name, depth) = ("gated".to_owned(), ChannelConfig { depth: 64 });
    let device = Arc::clone(&faulty);
    let clock = ManualClock::new();
    let disk = Composed::with_clock(name, "null", device, depth, NoneScheduler::new, clock);
    watched.reports.store(0, SeqCst);
    Yard { watched, faulty, disk: Arc::new(disk.with_gates(gates)) }
}

impl Yard {
    fn door(&self) -> Door {
        let mut channel = self.disk.open().unwrap();
        let region = Region::alloc(1 << 20);
        let id = channel.register(Arc::clone(&region));
        Door { channel, id, region, done: Vec::new() }
    }

    /// The requests that the device received since the last call.
    fn log(&self) -> Vec<(Op, u64, u64)> {
        std::mem::take(&mut self.watched.log.lock().unwrap())
    }

    fn reports(&self) -> u32 {
        self.watched.reports.swap(0, SeqCst)
    }

    /// Makes the next request with this operation fail.
    fn fail_next(&self, op: Op) {
        self.fail_next_with(op, Status::Medium);
    }

    fn fail_next_with(&self, op: Op, status: Status) {
        let (start, sectors) = (Sector(0), u64::MAX);
        let rule = Rule { op: Some(op), start, sectors, status, chance: 1, times: Some(1) };
        self.faulty.inject(&Injection::AddRule(rule)).unwrap();
    }

    fn wp(&self, sector: u64) -> u64 {
        let mut zones = Vec::new();
        self.disk.report_zones(Sector(sector), 1, &mut zones).unwrap();
        self.reports();
        zones[0].wp.0
    }
}

impl Door {
    fn buf(&self) -> BufRef {
        BufRef { region: self.id, offset: 0 }
    }

    /// Pushes and submits writes of 8 sectors, one batch each.
    fn write(&mut self, sectors: &[u64]) {
        for &sector in sectors {
            let bio = Bio::write(Sector(sector), 8, self.buf()).with_user_data(sector);
            self.push(bio);
        }
    }

    fn push(&mut self, bio: Bio) {
        assert_eq!(self.channel.push(&[bio]), 1);
        self.channel.submit();
    }

    fn reap(&mut self) -> Vec<(u64, Status)> {
        self.channel.reap(&mut self.done);
        self.done.drain(..).map(|end| (end.user_data, end.status)).collect()
    }

    /// Waits for all completions.
    fn all(&mut self) -> Vec<Completion> {
        let mut all = Vec::new();
        while self.channel.in_flight() > 0 {
            if self.channel.reap(&mut all) == 0 {
                self.channel.wait(None);
            }
        }
        all
    }

    fn one(&mut self, bio: Bio) -> (Status, u64) {
        self.push(bio);
        let done = self.all();
        assert_eq!(done.len(), 1);
        (done[0].status, done[0].sector.0)
    }

    fn append(&mut self, zone: u64, byte: u8) -> (Status, u64) {
        self.region.write(0, &[byte; 4096]);
        self.one(Bio::append(Sector(zone * ZONE), 8, self.buf()))
    }

    /// Whether the sectors of an append hold what it wrote.
    fn holds(&mut self, sector: u64, byte: u8) -> bool {
        assert_eq!(self.one(Bio::read(Sector(sector), 8, self.buf())).0, Status::Ok);
        let mut data = [0; 4096];
        self.region.read(0, &mut data);
        data.iter().all(|found| *found == byte)
    }
}

#[test]
fn one_write_of_a_zone_is_in_flight_and_the_others_merge() {
    let yard = yard(late(zoned()));
    assert_eq!(yard.disk.gate().unwrap().mode, GateMode::Plug);
    let mut door = yard.door();
    // The third and fourth write merge while they wait; a write to another zone and a read do not
    // wait.
    door.write(&[0, 8, 16, 24, 5 * ZONE]);
    door.push(Bio::read(Sector(7 * ZONE), 8, door.buf()).with_user_data(1));
    let mut asked = yard.log();
    assert_eq!(asked, [(Op::Write, 0, 8), (Op::Write, 5 * ZONE, 8), (Op::Read, 7 * ZONE, 8)]);
    let all = door.all();
    assert_eq!(all.len(), 6);
    assert!(
        all.iter().all(|end| end.status.is_ok() && end.sector.0 % ZONE == end.user_data % ZONE
            || end.user_data == 1)
    );
    asked = yard.log();
    assert_eq!(asked, [(Op::Write, 8, 24)]);
    assert_eq!(yard.disk.stats().op(Op::Write).merges, 2);
}

#[test]
fn what_waits_holds_no_tag() {
    // One tag, and a zone whose waiting writes must not hold it.
    let yard = yard(NullConfig { hw_queue_depth: 2, ..late(zoned()) });
    let mut door = yard.door();
    door.write(&[0, 8, 16, 24, 32]);
    door.push(Bio::read(Sector(9 * ZONE), 8, door.buf()));
    assert_eq!(yard.log(), [(Op::Write, 0, 8), (Op::Read, 9 * ZONE, 8)]);
    assert_eq!(door.all().len(), 6);
}

#[test]
fn channels_take_turns_in_the_order_of_arrival() {
    let yard = yard(late(zoned()));
    let (mut a, mut b) = (yard.door(), yard.door());
    a.write(&[0]);
    b.write(&[8]);
    // It waits after the other channel's write, and does not merge with its own waiting one.
    a.write(&[16]);
    b.write(&[24]);
    assert_eq!(b.reap(), []);
    assert_ne!(b.channel.due(), Due::Never, "it waits, and says when to look again");
    assert_eq!(a.reap(), [(0, Status::Ok)]);
    assert_eq!(a.reap(), []);
    assert_eq!(b.reap(), []); // Started by this reap.
    assert_eq!(b.reap(), [(8, Status::Ok)]);
    assert_eq!((a.reap(), a.reap()), (vec![], vec![(16, Status::Ok)]));
    assert_eq!((b.reap(), b.reap()), (vec![], vec![(24, Status::Ok)]));
    assert_eq!(yard.log(), [0, 8, 16, 24].map(|at| (Op::Write, at, 8)));
}

#[test]
fn a_channel_that_sleeps_is_woken_and_one_that_goes_lets_the_next_in() {
    let yard = yard(late(zoned()));
    let (mut a, mut b) = (yard.door(), yard.door());
    a.write(&[0, 8]);
    let gone = yard.door();
    let mut gone = gone;
    gone.write(&[16]);
    b.write(&[16]);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            // Waits up to the test's time limit; the wait ends when the zone is free for this
            // write.
            while b.channel.in_flight() > 0 {
                b.channel.wait(Some(Instant::now() + Duration::from_secs(600)));
                b.channel.reap(&mut b.done);
            }
            b.done[0].status
        });
        drop(gone);
        assert_eq!(a.all().len(), 2);
        drop(a);
        assert_eq!(waiter.join().unwrap(), Status::Ok);
    });
    assert_eq!(yard.wp(0), 24);
}

#[test]
fn resets_take_their_turn_and_a_reset_of_all_parts_what_comes_before_and_behind() {
    let yard = yard(late(appendless()));
    let mut door = yard.door();
    door.write(&[0, 8]);
    door.push(Bio::new(Op::ZoneReset, Sector(0), 0));
    door.write(&[0]);
    door.push(Bio::new(Op::ZoneResetAll, Sector(0), 0));
    door.push(Bio::append(Sector(0), 8, door.buf()).with_user_data(77));
    door.write(&[ZONE]);
    let all = door.all();
    assert!(all.iter().all(|end| end.status.is_ok()), "{all:?}");
    let ops: Vec<Op> = yard.log().iter().map(|asked| asked.0).collect();
    use Op::{Write, ZoneReset, ZoneResetAll};
    assert_eq!(ops, [Write, Write, ZoneReset, Write, ZoneResetAll, Write, Write]);
    assert_eq!((yard.wp(0), yard.wp(ZONE)), (8, ZONE + 8));
}

#[test]
fn a_write_with_a_flush_before_it_keeps_its_place() {
    for config in [zoned(), appendless()] {
        let yard = yard(NullConfig { cache_size: 1 << 20, ..late(config) });
        let (mut door, mut other) = (yard.door(), yard.door());
        let first = Bio::write(Sector(0), 8, door.buf()).with_flags(Flags::PREFLUSH);
        let bios = [first, Bio::write(Sector(8), 8, door.buf())];
        assert_eq!(door.channel.push(&bios), 2);
        door.channel.submit();
        other.write(&[16]);
        assert_eq!(yard.log(), [(Op::Flush, 0, 0)]);
        let all = door.all();
        assert!(all.len() == 2 && all.iter().all(|end| end.status.is_ok()), "{all:?}");
        assert_eq!(other.all()[0].status, Status::Ok);
        assert_eq!(yard.log(), [0, 8, 16].map(|at| (Op::Write, at, 8)));
        // If the flush fails, there is no write, and the zone is free for the next one.
        yard.fail_next(Op::Flush);
        door.push(Bio::write(Sector(24), 8, door.buf()).with_flags(Flags::PREFLUSH));
        other.write(&[24]);
        assert_eq!(door.all()[0].status, Status::Medium);
        assert_eq!(other.all()[0].status, Status::Ok);
        // The zone is also freed if a channel is dropped between flush and write.
        door.push(Bio::write(Sector(32), 8, door.buf()).with_flags(Flags::PREFLUSH));
        other.write(&[32]);
        drop(door);
        assert_eq!(other.all()[0].status, Status::Ok);
        assert_eq!(yard.wp(0), 40);
    }
}

#[test]
fn an_append_becomes_a_write_and_knows_where_it_landed() {
    let yard = yard(appendless());
    assert!(yard.disk.gate().unwrap().emulates_append);
    assert_eq!(yard.disk.limits().zone_append_sectors_max, ZONE);
    let (mut a, mut b) = (yard.door(), yard.door());
    assert_eq!(a.append(3, 1), (Status::Ok, 3 * ZONE));
    assert_eq!(b.append(3, 2), (Status::Ok, 3 * ZONE + 8));
    assert_eq!(a.one(Bio::write(Sector(3 * ZONE + 16), 8, a.buf())).0, Status::Ok);
    assert_eq!(a.append(3, 3), (Status::Ok, 3 * ZONE + 24));
    assert!(a.holds(3 * ZONE, 1) && b.holds(3 * ZONE + 8, 2) && b.holds(3 * ZONE + 24, 3));
    for (op, next) in
        [(Op::ZoneReset, (Status::Ok, 3 * ZONE)), (Op::ZoneFinish, (Status::IoErr, 3 * ZONE))]
    {
        assert_eq!(b.one(Bio::new(op, Sector(3 * ZONE), 0)).0, Status::Ok);
        assert_eq!(a.append(3, 4), next);
    }
    assert_eq!(yard.reports(), 0, "all of this was known");
    // An append that exceeds the limit is refused, not split.
    let long = Bio::append(Sector(ZONE), ZONE + 8, a.buf());
    assert_eq!(a.one(long).0, Status::IoErr);
}

#[test]
fn appends_are_never_merged_nor_split() {
    let yard = yard(NullConfig { max_sectors: 16, ..appendless() });
    let mut door = yard.door();
    assert_eq!(yard.disk.limits().zone_append_sectors_max, 16);
    for _ in 0..4 {
        assert_eq!(door.channel.push(&[Bio::append(Sector(0), 8, door.buf())]), 1);
    }
    door.channel.submit();
    let mut landed: Vec<u64> = door.all().iter().map(|end| end.sector.0).collect();
    landed.sort_unstable();
    assert_eq!(landed, [0, 8, 16, 24]);
    assert_eq!(yard.log(), [0, 8, 16, 24].map(|at| (Op::Write, at, 8)));
    assert_eq!(door.one(Bio::append(Sector(0), 24, door.buf())).0, Status::IoErr);
}

#[test]
fn an_error_costs_one_report_of_one_zone() {
    let yard = yard(appendless());
    let mut door = yard.door();
    assert_eq!(door.append(1, 1), (Status::Ok, ZONE));
    yard.fail_next(Op::Write);
    assert_eq!(door.append(1, 2), (Status::Medium, ZONE));
    assert_eq!(yard.reports(), 0, "nobody has asked for the pointer yet");
    // A write needs no report, and a successful one makes the write pointer known.
    yard.log();
    assert_eq!(door.append(2, 1), (Status::Ok, 2 * ZONE));
    assert_eq!(yard.reports(), 0, "other zones have nothing to do with it");
    assert_eq!(door.append(1, 3), (Status::Ok, ZONE + 8));
    assert_eq!(yard.reports(), 1);
    assert_eq!(door.append(1, 4), (Status::Ok, ZONE + 16));
    assert_eq!(yard.reports(), 0);
    yard.fail_next(Op::Write);
    assert_eq!(door.append(1, 2).0, Status::Medium);
    assert_eq!(door.one(Bio::write(Sector(ZONE + 24), 8, door.buf())).0, Status::Ok);
    assert_eq!(door.append(1, 5), (Status::Ok, ZONE + 32));
    assert_eq!(yard.reports(), 0);
}

#[test]
fn other_zones_are_started_before_the_device_is_asked() {
    let yard = yard(late(appendless()));
    let mut door = yard.door();
    yard.fail_next(Op::Write);
    assert_eq!(door.append(1, 1).0, Status::Medium);
    yard.log();
    let bios =
        [Bio::append(Sector(ZONE), 8, door.buf()), Bio::append(Sector(2 * ZONE), 8, door.buf())];
    assert_eq!(door.channel.push(&bios), 2);
    door.channel.submit();
    assert_eq!(yard.log(), [(Op::Write, 2 * ZONE, 8), (Op::Write, ZONE, 8)]);
    assert_eq!(yard.reports(), 1);
    assert_eq!(door.all().len(), 2);
}

#[test]
fn a_report_that_fails_is_not_for_good() {
    let yard = yard(appendless());
    let mut door = yard.door();
    yard.fail_next(Op::Write);
    assert_eq!(door.append(1, 1).0, Status::Medium);
    // After two failures the report is retried.
    yard.watched.failing_reports.store(2, SeqCst);
    assert_eq!(door.append(1, 2), (Status::Ok, ZONE));
    assert_eq!(yard.reports(), 3);
    // A third failure fails the append, and only this one.
    yard.fail_next(Op::Write);
    assert_eq!(door.append(1, 1).0, Status::Medium);
    yard.watched.failing_reports.store(3, SeqCst);
    assert_eq!(door.append(1, 3), (Status::Offline, ZONE), "what the report fails with");
    assert_eq!(yard.reports(), 3);
    assert_eq!(door.append(1, 4), (Status::Ok, ZONE + 8));
    assert_eq!(yard.reports(), 1);
    // A failed report does not replace the device's status for the append itself.
    yard.fail_next_with(Op::Write, Status::Target);
    yard.watched.failing_reports.store(3, SeqCst);
    assert_eq!(door.append(1, 5), (Status::Target, ZONE));
    assert_eq!(yard.reports(), 3);
}

/// A channel to the device itself, which bypasses the zone write plug.
fn outside(yard: &Yard) -> blocking::Io {
    let (device, depth) = (Arc::clone(&yard.watched.inner), ChannelConfig::default());
    let disk = Composed::new("outside".to_owned(), "null", device, depth, NoneScheduler::new);
    blocking::Io::new(disk.open().unwrap(), 1 << 20)
}

#[test]
fn what_changes_outside_costs_one_report_of_one_zone() {
    let yard = yard(appendless());
    let mut door = yard.door();
    let mut outside = outside(&yard);
    for (op, sectors) in [(Op::ZoneReset, 0), (Op::Write, 64), (Op::ZoneReset, 0)] {
        assert_eq!(door.append(1, 1).0, Status::Ok);
        let at = if op == Op::Write { yard.wp(ZONE) } else { ZONE };
        let bio = Bio::new(op, Sector(at), sectors);
        outside.run(bio.with_buf(outside.buffer())).unwrap();
        let wp = yard.wp(ZONE);
        assert_eq!(door.append(1, 3), (Status::Ok, wp), "after {op}");
        assert!(door.holds(wp, 3));
        assert_eq!(yard.reports(), 1);
    }
    // A finish, and a write as long as the append: the plug could mistake it for its own.
    assert_eq!(door.append(1, 1).0, Status::Ok);
    let wp = Sector(yard.wp(ZONE));
    outside.run(Bio::write(wp, 8, outside.buffer())).unwrap();
    assert_eq!(door.append(1, 2).0, Status::IoErr);
    assert_eq!(door.append(1, 3), (Status::Ok, wp.0 + 8));
    assert_eq!(yard.reports(), 1);
    outside.run(Bio::new(Op::ZoneFinish, Sector(ZONE), 0)).unwrap();
    assert_eq!(door.append(1, 1), (Status::IoErr, ZONE));
    outside.run(Bio::new(Op::ZoneReset, Sector(ZONE), 0)).unwrap();
    yard.reports();
    // The plug notices zone faults that are injected through its own disk.
    for value in [format!("{ZONE}"), format!("-{ZONE}")] {
        let name = "zone_offline".to_owned();
        yard.disk.inject(&Injection::Device { name, value }).unwrap();
    }
    yard.log();
    assert_eq!(door.append(1, 4), (Status::Ok, ZONE));
    assert_eq!((yard.log(), yard.reports()), (vec![(Op::Write, ZONE, 8)], 1));
}

#[test]
fn an_append_that_the_device_refuses_for_good_fails_with_what_it_said() {
    let yard = yard(NullConfig { badblocks: "+2048-2048".to_owned(), ..appendless() });
    let mut door = yard.door();
    yard.log();
    assert_eq!(door.append(1, 1), (Status::IoErr, ZONE));
    assert_eq!((yard.log().len(), yard.reports()), (1, 1), "asked once, and not sent again");
    assert_eq!(door.append(2, 1), (Status::Ok, 2 * ZONE));
}

#[test]
fn threads_that_append_to_few_zones_and_reset_them_find_what_they_wrote() {
    for config in [appendless(), late(appendless())] {
        let yard = yard(config);
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let mut door = yard.door();
                scope.spawn(move || {
                    for round in 0..300u64 {
                        // All threads append to the first two zones, which only grow; the third
                        // zone is this thread's.
                        let zone = round % 3 + if round % 3 == 2 { u64::from(thread) } else { 0 };
                        let byte = thread * 50 + (round % 50) as u8;
                        let (status, at) = door.append(zone, byte);
                        if status.is_ok() {
                            assert!(door.holds(at, byte), "zone {zone}, round {round}");
                        } else {
                            assert_eq!(status, Status::IoErr, "the zone is full");
                        }
                        if zone >= 2 && round % 30 == 29 {
                            let reset = Bio::new(Op::ZoneReset, Sector(zone * ZONE), 0);
                            assert_eq!(door.one(reset).0, Status::Ok);
                            assert_eq!(door.append(zone, byte), (Status::Ok, zone * ZONE));
                        }
                    }
                });
            }
        });
        assert_eq!(yard.reports(), 0);
    }
}

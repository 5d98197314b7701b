//! The zone write plug on null devices: what waits, in which order it is submitted, what is merged,
//! and where appends that are made of writes land, whatever fails or changes from outside.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::inject::{Injection, Rule};
use blockyard_core::middleware::Faulty;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::zone::gate::{GateMode, ZoneWritePlugs};
use blockyard_core::*;
use blockyard_null::{IrqMode, Null, NullConfig};
use blockyard_testing::clock::ManualClock;

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
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        let mut log = self.log.lock().unwrap();
        for started in (0..).map_while(|index| batch.get(index)) {
            log.push((started.op(), started.sector().0, started.sectors()));
        }
        drop(log);
        self.inner.start(now, batch, done);
    }

    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        self.inner.poll(now, done);
    }

    fn room(&self) -> usize {
        self.inner.room()
    }

    fn due(&self) -> Due {
        self.inner.due()
    }

    fn abort(&mut self, done: &mut CompletionBatch) {
        self.inner.abort(done);
    }
}

type Fault = Arc<Faulty<Arc<Watched>>>;

/// A disk with a zone write plug, and access to the layers below it.
struct Fixture {
    watched: Arc<Watched>,
    faulty: Fault,
    disk: Arc<dyn Disk>,
}

/// One channel of the disk.
struct Client {
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

fn fixture(config: NullConfig) -> Fixture {
    let watched = Arc::new(Watched {
        inner: Null::open(config).unwrap(),
        log: Arc::default(),
        reports: AtomicU32::new(0),
        failing_reports: AtomicU32::new(0),
    });
    let faulty = Arc::new(Faulty::new(Arc::clone(&watched), 1));
    let gates = ZoneWritePlugs::new(Arc::clone(&faulty)).unwrap().unwrap();
    let (name, depth) = ("gated".to_owned(), ChannelConfig { depth: 64 });
    let device = Arc::clone(&faulty);
    let clock = ManualClock::new();
    let disk = Composed::with_clock(name, "null", device, depth, clock);
    watched.reports.store(0, SeqCst);
    Fixture { watched, faulty, disk: Arc::new(disk.with_gates(gates)) }
}

impl Fixture {
    fn client(&self) -> Client {
        let mut channel = self.disk.open().unwrap();
        let region = Region::alloc(1 << 20);
        let id = channel.register(Arc::clone(&region));
        Client { channel, id, region, done: Vec::new() }
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
        let rule = Rule { op: Some(op), times: Some(1), ..Rule::new(status) };
        self.faulty.inject(&Injection::AddRule(rule)).unwrap();
    }

    fn wp(&self, sector: u64) -> u64 {
        let mut zones = Vec::new();
        self.disk.report_zones(Sector(sector), 1, &mut zones).unwrap();
        self.reports();
        zones[0].wp.0
    }
}

impl Client {
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
    let fixture = fixture(late(zoned()));
    assert_eq!(fixture.disk.gate().unwrap().mode, GateMode::ZoneWritePlug);
    let mut client = fixture.client();
    // The third and fourth write merge while they wait; a write to another zone and a read do not
    // wait.
    client.write(&[0, 8, 16, 24, 5 * ZONE]);
    client.push(Bio::read(Sector(7 * ZONE), 8, client.buf()).with_user_data(1));
    let mut asked = fixture.log();
    assert_eq!(asked, [(Op::Write, 0, 8), (Op::Write, 5 * ZONE, 8), (Op::Read, 7 * ZONE, 8)]);
    let all = client.all();
    assert_eq!(all.len(), 6);
    assert!(
        all.iter().all(|end| end.status.is_ok() && end.sector.0 % ZONE == end.user_data % ZONE
            || end.user_data == 1)
    );
    asked = fixture.log();
    assert_eq!(asked, [(Op::Write, 8, 24)]);
    assert_eq!(fixture.disk.stats().op(Op::Write).merges, 2);
}

#[test]
fn waiting_write_holds_no_tag() {
    // One tag, and a zone whose waiting writes must not hold it.
    let fixture = fixture(NullConfig { hw_queue_depth: 2, ..late(zoned()) });
    let mut client = fixture.client();
    client.write(&[0, 8, 16, 24, 32]);
    client.push(Bio::read(Sector(9 * ZONE), 8, client.buf()));
    assert_eq!(fixture.log(), [(Op::Write, 0, 8), (Op::Read, 9 * ZONE, 8)]);
    assert_eq!(client.all().len(), 6);
}

#[test]
fn channels_get_zone_in_order_of_arrival() {
    let fixture = fixture(late(zoned()));
    let (mut a, mut b) = (fixture.client(), fixture.client());
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
    assert_eq!(fixture.log(), [0, 8, 16, 24].map(|at| (Op::Write, at, 8)));
}

#[test]
fn sleeping_channel_is_woken_and_dropped_channel_releases_zone() {
    let fixture = fixture(late(zoned()));
    let (mut a, mut b) = (fixture.client(), fixture.client());
    a.write(&[0, 8]);
    let gone = fixture.client();
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
    assert_eq!(fixture.wp(0), 24);
}

#[test]
fn reset_waits_for_its_zone_and_reset_all_is_a_barrier() {
    let fixture = fixture(late(appendless()));
    let mut client = fixture.client();
    client.write(&[0, 8]);
    client.push(Bio::new(Op::ZoneReset, Sector(0), 0));
    client.write(&[0]);
    client.push(Bio::new(Op::ZoneResetAll, Sector(0), 0));
    client.push(Bio::append(Sector(0), 8, client.buf()).with_user_data(77));
    client.write(&[ZONE]);
    let all = client.all();
    assert!(all.iter().all(|end| end.status.is_ok()), "{all:?}");
    let ops: Vec<Op> = fixture.log().iter().map(|asked| asked.0).collect();
    use Op::{Write, ZoneReset, ZoneResetAll};
    assert_eq!(ops, [Write, Write, ZoneReset, Write, ZoneResetAll, Write, Write]);
    assert_eq!((fixture.wp(0), fixture.wp(ZONE)), (8, ZONE + 8));
}

#[test]
fn write_with_preflush_keeps_its_position() {
    for config in [zoned(), appendless()] {
        let fixture = fixture(NullConfig { cache_size: 1 << 20, ..late(config) });
        let (mut client, mut other) = (fixture.client(), fixture.client());
        let first = Bio::write(Sector(0), 8, client.buf()).with_flags(Flags::PREFLUSH);
        let bios = [first, Bio::write(Sector(8), 8, client.buf())];
        assert_eq!(client.channel.push(&bios), 2);
        client.channel.submit();
        other.write(&[16]);
        assert_eq!(fixture.log(), [(Op::Flush, 0, 0)]);
        let all = client.all();
        assert!(all.len() == 2 && all.iter().all(|end| end.status.is_ok()), "{all:?}");
        assert_eq!(other.all()[0].status, Status::Ok);
        assert_eq!(fixture.log(), [0, 8, 16].map(|at| (Op::Write, at, 8)));
        // If the flush fails, there is no write, and the zone is free for the next one.
        fixture.fail_next(Op::Flush);
        client.push(Bio::write(Sector(24), 8, client.buf()).with_flags(Flags::PREFLUSH));
        other.write(&[24]);
        assert_eq!(client.all()[0].status, Status::Medium);
        assert_eq!(other.all()[0].status, Status::Ok);
        // The zone is also freed if a channel is dropped between flush and write.
        client.push(Bio::write(Sector(32), 8, client.buf()).with_flags(Flags::PREFLUSH));
        other.write(&[32]);
        drop(client);
        assert_eq!(other.all()[0].status, Status::Ok);
        assert_eq!(fixture.wp(0), 40);
    }
}

#[test]
fn emulated_append_returns_its_sector() {
    let fixture = fixture(appendless());
    assert!(fixture.disk.gate().unwrap().emulates_append);
    assert_eq!(fixture.disk.limits().zone_append_sectors_max, ZONE);
    let (mut a, mut b) = (fixture.client(), fixture.client());
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
    assert_eq!(fixture.reports(), 0, "all of this was known");
    // An append that exceeds the limit is refused, not split.
    let long = Bio::append(Sector(ZONE), ZONE + 8, a.buf());
    assert_eq!(a.one(long).0, Status::IoErr);
}

#[test]
fn emulated_appends_are_not_merged_or_split() {
    let fixture = fixture(NullConfig { max_sectors: 16, ..appendless() });
    let mut client = fixture.client();
    assert_eq!(fixture.disk.limits().zone_append_sectors_max, 16);
    for _ in 0..4 {
        assert_eq!(client.channel.push(&[Bio::append(Sector(0), 8, client.buf())]), 1);
    }
    client.channel.submit();
    let mut landed: Vec<u64> = client.all().iter().map(|end| end.sector.0).collect();
    landed.sort_unstable();
    assert_eq!(landed, [0, 8, 16, 24]);
    assert_eq!(fixture.log(), [0, 8, 16, 24].map(|at| (Op::Write, at, 8)));
    assert_eq!(client.one(Bio::append(Sector(0), 24, client.buf())).0, Status::IoErr);
}

#[test]
fn write_error_costs_one_zone_report() {
    let fixture = fixture(appendless());
    let mut client = fixture.client();
    assert_eq!(client.append(1, 1), (Status::Ok, ZONE));
    fixture.fail_next(Op::Write);
    assert_eq!(client.append(1, 2), (Status::Medium, ZONE));
    assert_eq!(fixture.reports(), 0, "no request has needed the write pointer yet");
    // A write needs no report, and a successful one makes the write pointer known.
    fixture.log();
    assert_eq!(client.append(2, 1), (Status::Ok, 2 * ZONE));
    assert_eq!(fixture.reports(), 0, "other zones have nothing to do with it");
    assert_eq!(client.append(1, 3), (Status::Ok, ZONE + 8));
    assert_eq!(fixture.reports(), 1);
    assert_eq!(client.append(1, 4), (Status::Ok, ZONE + 16));
    assert_eq!(fixture.reports(), 0);
    fixture.fail_next(Op::Write);
    assert_eq!(client.append(1, 2).0, Status::Medium);
    assert_eq!(client.one(Bio::write(Sector(ZONE + 24), 8, client.buf())).0, Status::Ok);
    assert_eq!(client.append(1, 5), (Status::Ok, ZONE + 32));
    assert_eq!(fixture.reports(), 0);
}

#[test]
fn other_zones_start_before_zone_report() {
    let fixture = fixture(late(appendless()));
    let mut client = fixture.client();
    fixture.fail_next(Op::Write);
    assert_eq!(client.append(1, 1).0, Status::Medium);
    fixture.log();
    let bios = [
        Bio::append(Sector(ZONE), 8, client.buf()),
        Bio::append(Sector(2 * ZONE), 8, client.buf()),
    ];
    assert_eq!(client.channel.push(&bios), 2);
    client.channel.submit();
    assert_eq!(fixture.log(), [(Op::Write, 2 * ZONE, 8), (Op::Write, ZONE, 8)]);
    assert_eq!(fixture.reports(), 1);
    assert_eq!(client.all().len(), 2);
}

#[test]
fn failed_zone_report_is_repeated() {
    let fixture = fixture(appendless());
    let mut client = fixture.client();
    fixture.fail_next(Op::Write);
    assert_eq!(client.append(1, 1).0, Status::Medium);
    // After two failures the report is retried.
    fixture.watched.failing_reports.store(2, SeqCst);
    assert_eq!(client.append(1, 2), (Status::Ok, ZONE));
    assert_eq!(fixture.reports(), 3);
    // A third failure fails the append, and only this one.
    fixture.fail_next(Op::Write);
    assert_eq!(client.append(1, 1).0, Status::Medium);
    fixture.watched.failing_reports.store(3, SeqCst);
    assert_eq!(client.append(1, 3), (Status::Offline, ZONE), "what the report fails with");
    assert_eq!(fixture.reports(), 3);
    assert_eq!(client.append(1, 4), (Status::Ok, ZONE + 8));
    assert_eq!(fixture.reports(), 1);
    // A failed report does not replace the device's status for the append itself.
    fixture.fail_next_with(Op::Write, Status::Target);
    fixture.watched.failing_reports.store(3, SeqCst);
    assert_eq!(client.append(1, 5), (Status::Target, ZONE));
    assert_eq!(fixture.reports(), 3);
}

/// A channel to the device itself, which bypasses the zone write plug.
fn outside(fixture: &Fixture) -> blocking::Io {
    let (device, depth) = (Arc::clone(&fixture.watched.inner), ChannelConfig::default());
    let disk = Composed::new("outside".to_owned(), "null", device, depth);
    blocking::Io::new(disk.open().unwrap(), 1 << 20)
}

#[test]
fn outside_change_costs_one_zone_report() {
    let fixture = fixture(appendless());
    let mut client = fixture.client();
    let mut outside = outside(&fixture);
    for (op, sectors) in [(Op::ZoneReset, 0), (Op::Write, 64), (Op::ZoneReset, 0)] {
        assert_eq!(client.append(1, 1).0, Status::Ok);
        let at = if op == Op::Write { fixture.wp(ZONE) } else { ZONE };
        let bio = Bio::new(op, Sector(at), sectors);
        outside.run(bio.with_buf(outside.buffer())).unwrap();
        let wp = fixture.wp(ZONE);
        assert_eq!(client.append(1, 3), (Status::Ok, wp), "after {op}");
        assert!(client.holds(wp, 3));
        assert_eq!(fixture.reports(), 1);
    }
    // A finish, and a write as long as the append: the plug could mistake it for its own.
    assert_eq!(client.append(1, 1).0, Status::Ok);
    let wp = Sector(fixture.wp(ZONE));
    outside.run(Bio::write(wp, 8, outside.buffer())).unwrap();
    assert_eq!(client.append(1, 2).0, Status::IoErr);
    assert_eq!(client.append(1, 3), (Status::Ok, wp.0 + 8));
    assert_eq!(fixture.reports(), 1);
    outside.run(Bio::new(Op::ZoneFinish, Sector(ZONE), 0)).unwrap();
    assert_eq!(client.append(1, 1), (Status::IoErr, ZONE));
    outside.run(Bio::new(Op::ZoneReset, Sector(ZONE), 0)).unwrap();
    fixture.reports();
    // The plug notices zone faults that are injected through its own disk.
    for value in [format!("{ZONE}"), format!("-{ZONE}")] {
        let name = "zone_offline".to_owned();
        fixture.disk.inject(&Injection::Device { name, value }).unwrap();
    }
    fixture.log();
    assert_eq!(client.append(1, 4), (Status::Ok, ZONE));
    assert_eq!((fixture.log(), fixture.reports()), (vec![(Op::Write, ZONE, 8)], 1));
}

#[test]
fn permanently_refused_append_fails_with_device_status() {
    let fixture = fixture(NullConfig { badblocks: "+2048-2048".to_owned(), ..appendless() });
    let mut client = fixture.client();
    fixture.log();
    assert_eq!(client.append(1, 1), (Status::IoErr, ZONE));
    assert_eq!((fixture.log().len(), fixture.reports()), (1, 1), "asked once, and not sent again");
    assert_eq!(client.append(2, 1), (Status::Ok, 2 * ZONE));
}

#[test]
fn appends_and_resets_of_many_threads_keep_data() {
    for config in [appendless(), late(appendless())] {
        let fixture = fixture(config);
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let mut client = fixture.client();
                scope.spawn(move || {
                    for round in 0..300u64 {
                        // All threads append to the first two zones, which only grow; the third
                        // zone is this thread's.
                        let zone = round % 3 + if round % 3 == 2 { u64::from(thread) } else { 0 };
                        let byte = thread * 50 + (round % 50) as u8;
                        let (status, at) = client.append(zone, byte);
                        if status.is_ok() {
                            assert!(client.holds(at, byte), "zone {zone}, round {round}");
                        } else {
                            assert_eq!(status, Status::IoErr, "the zone is full");
                        }
                        if zone >= 2 && round % 30 == 29 {
                            let reset = Bio::new(Op::ZoneReset, Sector(zone * ZONE), 0);
                            assert_eq!(client.one(reset).0, Status::Ok);
                            assert_eq!(client.append(zone, byte), (Status::Ok, zone * ZONE));
                        }
                    }
                });
            }
        });
        assert_eq!(fixture.reports(), 0);
    }
}

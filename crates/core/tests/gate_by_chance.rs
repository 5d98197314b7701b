//! The zone write plug and its cached write pointers in random interleavings of shuttle: several
//! channels, errors in any order, resets, and an external writer that changes zones. Run by `make
//! shuttle`; without `--cfg shuttle` this file is empty.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used, unsafe_code)]

use std::sync::Arc;

use blockyard_core::channel::{Channel, ChannelConfig, Stack};
use blockyard_core::clock::Monotonic;
use blockyard_core::zone::gate::{ZoneWritePlug, ZoneWritePlugs};
use blockyard_core::zone::{AtomicZoneSet, Erase, Transfer, ZoneInfo, ZoneLayout, ZoneOp, ZoneSet};
use blockyard_core::*;
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;

const ZONE_SECTORS: u64 = 16;
const ZONES: u32 = 2;
const SECTORS: u64 = ZONE_SECTORS * ZONES as u64;

/// The contents of the sectors: the stamp of the last writer.
#[derive(Clone)]
struct Medium(Arc<Vec<AtomicU64>>);

impl Medium {
    fn at(&self, sector: u64) -> u64 {
        self.0[sector as usize].load(Ordering::SeqCst)
    }
}

struct Stamp<'a>(&'a Medium, u64);

impl Transfer for Stamp<'_> {
    fn may_fall_short(&self) -> bool {
        false
    }

    fn admit(&mut self, _: Sector, sectors: u64) -> (u64, Status) {
        (sectors, Status::Ok)
    }

    fn copy(&mut self, at: Sector, sectors: u64) {
        for sector in at.0..at.0 + sectors {
            self.0.0[sector as usize].store(self.1, Ordering::SeqCst);
        }
    }
}

impl Erase for Medium {
    fn erase(&mut self, start: Sector, sectors: u64) {
        for sector in start.0..start.0 + sectors {
            self.0[sector as usize].store(0, Ordering::SeqCst);
        }
    }
}

/// A zoned device without append, whose writes sometimes fail, before or after they took effect.
struct Disk {
    geometry: Geometry,
    limits: Limits,
    zones: Arc<AtomicZoneSet>,
    medium: Medium,
    fails: bool,
}

struct Queue {
    zones: Arc<AtomicZoneSet>,
    medium: Medium,
    fails: bool,
    held: CompletionBatch,
}

impl Disk {
    fn new(fails: bool) -> Arc<Disk> {
        let zones = ZoneGeometry {
            zone_sectors: ZONE_SECTORS,
            zone_capacity_sectors: ZONE_SECTORS,
            zone_count: ZONES,
            conventional_count: 0,
            open_max: 0,
            active_max: 0,
        };
        let layout = ZoneLayout { zones: zones.clone(), sectors: SECTORS, full: false, data: true };
        let medium = Medium(Arc::new((0..SECTORS).map(|_| AtomicU64::new(0)).collect()));
        Arc::new(Disk {
            geometry: Geometry {
                sectors: SECTORS,
                logical_block_bytes: 512,
                physical_block_bytes: 512,
                zones: Some(zones),
            },
            limits: Limits { chunk_sectors: ZONE_SECTORS, ..Limits::unlimited(8) },
            zones: Arc::new(AtomicZoneSet::new(layout).unwrap()),
            medium,
            fails,
        })
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
        let (zones, medium) = (Arc::clone(&self.zones), self.medium.clone());
        Ok(Queue { zones, medium, fails: self.fails, held: CompletionBatch::with_capacity(8) })
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        let first = (from.0 / ZONE_SECTORS) as u32;
        out.extend((first..ZONES).take(zones_max).map(|zone| self.zones.info(ZoneNo(zone))));
        Ok(())
    }
}

impl Queue {
    fn carry_out(&mut self, started: &Started) -> Status {
        let zone = ZoneNo((started.sector().0 / ZONE_SECTORS) as u32);
        let chance = if self.fails { thread_rng().gen_range(0..8) } else { 7 };
        if chance == 0 {
            return Status::Medium;
        }
        let done = match started.op() {
            Op::Write => {
                let data = started.segments().next().unwrap().data.cast::<u64>();
                // SAFETY: a segment is readable for its length, which is at least a sector.
                let stamp = &mut Stamp(&self.medium, unsafe { data.read_unaligned() });
                self.zones.write(zone, started.sector(), started.sectors(), stamp)
            }
            Op::ZoneReset => self.zones.manage(zone, ZoneOp::Reset, &mut self.medium),
            Op::ZoneResetAll => {
                self.zones.reset_all(&mut self.medium);
                Ok(())
            }
            other => panic!("{other} is not asked for"),
        };
        match done {
            Ok(()) if chance == 1 => Status::Medium,
            Ok(()) => Status::Ok,
            Err(status) => status,
        }
    }
}

impl DeviceQueue for Queue {
    fn start(&mut self, _now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        while let Some(started) = batch.next() {
            let status = self.carry_out(&started);
            let late = thread_rng().gen_range(0..2) == 0;
            let into = if late { &mut self.held } else { &mut *done };
            into.complete(started, status);
        }
    }

    fn poll(&mut self, _now: Nanos, done: &mut CompletionBatch) {
        while done.take_from(&mut self.held) {}
    }

    fn room(&self) -> usize {
        8 - self.held.len()
    }

    fn due(&self) -> Due {
        if self.held.is_empty() { Due::Never } else { Due::At(Nanos(0)) }
    }
}

type Gated = Composed<Arc<Disk>, Monotonic, ZoneWritePlugs<Disk>>;

fn gated(device: &Arc<Disk>) -> Arc<Gated> {
    let gates = ZoneWritePlugs::new(Arc::clone(device)).unwrap().unwrap();
    let (name, depth) = ("chance".to_owned(), ChannelConfig { depth: 8 });
    let disk = Composed::new(name, "test", Arc::clone(device), depth);
    Arc::new(disk.with_gates(gates))
}

/// A channel with a buffer for stamps.
struct Client {
    channel: Stack<Queue, Monotonic, ZoneWritePlug<Disk>>,
    region: Arc<Region>,
    buf: BufRef,
    done: Vec<Completion>,
}

impl Client {
    fn new(disk: &Gated) -> Client {
        let mut channel = disk.open_stack().unwrap();
        let region = Region::alloc(4096);
        let buf = BufRef { region: channel.register(Arc::clone(&region)), offset: 0 };
        Client { channel, region, buf, done: Vec::new() }
    }

    fn all(&mut self) -> Vec<Completion> {
        self.channel.submit();
        while self.channel.in_flight() > 0 {
            if self.channel.reap(&mut self.done) == 0 {
                self.channel.wait(None);
            }
        }
        std::mem::take(&mut self.done)
    }

    fn run(&mut self, bio: Bio) -> Completion {
        assert_eq!(self.channel.push(&[bio]), 1);
        self.all()[0]
    }

    /// Appends two stamped sectors at once to a zone; returns where they landed.
    fn append_two(&mut self, zone: u64, stamps: [u64; 2]) -> Vec<(Completion, u64)> {
        for (index, stamp) in (0..).zip(stamps) {
            self.region.write(index * 512, &stamp.to_le_bytes());
            let buf = BufRef { offset: index * 512, ..self.buf };
            let bio = Bio::append(Sector(zone * ZONE_SECTORS), 1, buf).with_user_data(index);
            assert_eq!(self.channel.push(&[bio]), 1);
        }
        self.all().into_iter().map(|end| (end, stamps[end.user_data as usize])).collect()
    }
}

/// Runs a body in random interleavings of two kinds.
fn draw(body: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(body.clone(), 1_000);
    shuttle::check_pct(body, 1_000, 3);
}

/// At the end the channel still works: an append fails at most once because of an outdated pointer.
fn goes_on(device: &Disk, client: &mut Client) {
    for zone in 0..ZONES {
        let info = device.zones.info(ZoneNo(zone));
        if info.wp.0 + 2 >= info.start.0 + ZONE_SECTORS {
            continue;
        }
        let append = Bio::append(info.start, 1, client.buf);
        let first = client.run(append);
        let second = client.run(append);
        // An external writer may have written as much as the append, so that its data was taken for
        // the append's.
        assert!(first.status.is_ok() || first.status == Status::IoErr, "{first:?}");
        let at = if first.status.is_ok() { info.wp + 1 } else { info.wp };
        assert_eq!((second.status, second.sector), (Status::Ok, at));
    }
}

/// Channels append to two zones, and an external writer does too, bypassing the zone write plug.
fn appends(channels: u64, fails: bool, outside: u64) {
    let device = Disk::new(fails);
    let disk = gated(&device);
    let mut threads = Vec::new();
    for number in 1..=channels {
        let (disk, medium) = (Arc::clone(&disk), device.medium.clone());
        threads.push(thread::spawn(move || {
            let mut client = Client::new(&disk);
            let mut landed = Vec::new();
            for round in 0..2 {
                let stamp = number << 8 | round << 1;
                for (end, stamp) in client.append_two(round % 2, [stamp, stamp | 1]) {
                    if end.status.is_ok() {
                        assert_eq!(medium.at(end.sector.0), stamp, "at {}", end.sector);
                        landed.push((end.sector.0, stamp));
                    } else {
                        assert!(fails || outside > 0, "{end:?}");
                    }
                }
            }
            landed
        }));
    }
    for _ in 0..outside {
        let zone = ZoneNo(thread_rng().gen_range(0..ZONES));
        device.zones.append(zone, 1, &mut Stamp(&device.medium, u64::MAX)).unwrap();
    }
    let landed: Vec<(u64, u64)> =
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    for (sector, stamp) in landed {
        assert_eq!(device.medium.at(sector), stamp, "at {sector}, in the end");
    }
    if !fails {
        goes_on(&device, &mut Client::new(&disk));
    }
}

#[test]
fn three_channels_append() {
    draw(|| appends(3, false, 0));
}

#[test]
fn three_channels_append_and_some_fail() {
    draw(|| appends(3, true, 0));
}

#[test]
fn two_channels_append_with_outside_writes() {
    draw(|| appends(2, false, 2));
}

#[test]
fn three_channels_append_with_all_faults() {
    draw(|| appends(3, true, 2));
}

/// Appends run concurrently with resets of a zone and of all zones, through the zone write plug and
/// from outside. Data that an append reports is at the reported sector, unless the zone was emptied
/// meanwhile.
fn resets(outside: bool) {
    let device = Disk::new(false);
    let disk = gated(&device);
    let mut threads = Vec::new();
    for number in 1..=2 {
        let (disk, device) = (Arc::clone(&disk), Arc::clone(&device));
        threads.push(thread::spawn(move || {
            let mut client = Client::new(&disk);
            for round in 0..3 {
                let erasures = device.zones.erasures(ZoneNo(0));
                let stamp = number << 8 | round << 1;
                for (end, stamp) in client.append_two(0, [stamp, stamp | 1]) {
                    let found = device.medium.at(end.sector.0);
                    let emptied = device.zones.erasures(ZoneNo(0)) != erasures;
                    assert!(!end.status.is_ok() || found == stamp || emptied, "{end:?}");
                    assert!(end.status.is_ok(), "{end:?}");
                }
            }
        }));
    }
    if outside {
        device.zones.manage(ZoneNo(0), ZoneOp::Reset, &mut device.medium.clone()).unwrap();
    } else {
        let mut client = Client::new(&disk);
        let reset = Bio::new(Op::ZoneReset, Sector(0), 0);
        assert_eq!(client.run(reset).status, Status::Ok);
        let all = Bio::new(Op::ZoneResetAll, Sector(0), 0);
        assert_eq!(client.run(all).status, Status::Ok);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    goes_on(&device, &mut Client::new(&disk));
}

#[test]
fn channels_append_during_resets() {
    draw(|| resets(false));
}

#[test]
fn channels_append_during_outside_reset() {
    draw(|| resets(true));
}

/// Channels open and close while other channels wait for them: no channel waits forever.
#[test]
fn channels_open_and_close_during_appends() {
    draw(|| {
        let device = Disk::new(false);
        let disk = gated(&device);
        let threads: Vec<_> = (0..4u64)
            .map(|number| {
                let disk = Arc::clone(&disk);
                thread::spawn(move || {
                    let mut client = Client::new(&disk);
                    let append = Bio::append(Sector(0), 1, client.buf);
                    assert_eq!(client.channel.push(&[append, append]), 2);
                    client.channel.submit();
                    // Half of the channels are dropped with requests in flight.
                    if number % 2 == 0 {
                        assert!(client.all().iter().all(|end| end.status.is_ok()));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        goes_on(&device, &mut Client::new(&disk));
    });
}

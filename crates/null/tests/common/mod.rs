//! A null device with one channel, and a clock that moves only when a thread sleeps.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_core::channel::ChannelConfig;
use blockyard_core::clock::Clock;
use blockyard_core::composed::Composed;
use blockyard_core::inject::Injection;
use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::*;
use blockyard_null::{Null, NullConfig};

/// A clock that moves when a thread sleeps.
#[derive(Clone, Debug, Default)]
pub(crate) struct SleepyClock(Arc<AtomicU64>);

impl Clock for SleepyClock {
    fn now(&self) -> Nanos {
        Nanos(self.0.load(Ordering::SeqCst))
    }

    fn sleep_until(&self, at: Nanos) {
        self.0.fetch_max(at.0, Ordering::SeqCst);
    }
}

pub(crate) type TestDisk = Composed<Arc<Null>, SleepyClock>;

/// Size of a fixture's region in bytes.
pub(crate) const REGION_BYTES: usize = 1 << 20;

/// A device and one channel to it.
pub(crate) struct Fixture {
    pub(crate) disk: Arc<TestDisk>,
    pub(crate) clock: SleepyClock,
    pub(crate) channel: Box<dyn Channel>,
    pub(crate) region: Arc<Region>,
    pub(crate) id: RegionId,
}

impl Fixture {
    pub(crate) fn new(config: NullConfig) -> Fixture {
        let clock = SleepyClock::default();
        let device = Null::open(config).unwrap();
        let name = "test".to_owned();
        let channels = ChannelConfig::default();
        let disk = Composed::with_clock(name, "null", device, channels, clock.clone());
        Fixture::on(Arc::new(disk), clock)
    }

    pub(crate) fn on(disk: Arc<TestDisk>, clock: SleepyClock) -> Fixture {
        let mut channel = disk.open().unwrap();
        let region = Region::alloc(REGION_BYTES);
        let id = channel.register(Arc::clone(&region));
        Fixture { disk, clock, channel, region, id }
    }

    /// Another channel to the same device.
    pub(crate) fn another(&self) -> Fixture {
        Fixture::on(Arc::clone(&self.disk), self.clock.clone())
    }

    pub(crate) fn buf(&self, offset: u64) -> BufRef {
        BufRef { region: self.id, offset }
    }

    /// Pushes bios and waits for all; returns the completions in the order of the bios.
    pub(crate) fn all(&mut self, bios: &[Bio]) -> Vec<Completion> {
        let bios: Vec<Bio> =
            bios.iter().zip(0..).map(|(bio, index)| bio.with_user_data(index)).collect();
        assert_eq!(self.channel.push(&bios), bios.len());
        self.channel.submit();
        let mut out = Vec::new();
        while self.channel.reap(&mut out) == 0 || out.len() < bios.len() {
            self.channel.wait(None);
        }
        out.sort_by_key(|completion| completion.user_data);
        out
    }

    pub(crate) fn one(&mut self, bio: Bio) -> Completion {
        self.all(&[bio])[0]
    }

    pub(crate) fn op(&mut self, op: Op, sector: u64, sectors: u64) -> Status {
        let buf = self.buf(0);
        self.one(Bio::new(op, Sector(sector), sectors).with_buf(buf)).status
    }

    /// Writes `byte` to every byte of a range.
    pub(crate) fn write(&mut self, sector: u64, sectors: u64, byte: u8) -> Status {
        self.region.write(0, &vec![byte; (sectors * SECTOR_BYTES) as usize]);
        self.op(Op::Write, sector, sectors)
    }

    pub(crate) fn append(&mut self, zone_start: u64, sectors: u64, byte: u8) -> Completion {
        self.region.write(0, &vec![byte; (sectors * SECTOR_BYTES) as usize]);
        self.one(Bio::append(Sector(zone_start), sectors, self.buf(0)))
    }

    pub(crate) fn read(&mut self, sector: u64, sectors: u64) -> Result<Vec<u8>, Status> {
        let mut data = vec![0x55; (sectors * SECTOR_BYTES) as usize];
        self.region.write(0, &data);
        match self.op(Op::Read, sector, sectors) {
            Status::Ok => {
                self.region.read(0, &mut data);
                Ok(data)
            }
            status => Err(status),
        }
    }

    /// Whether every byte of a range is `byte`.
    pub(crate) fn holds(&mut self, sector: u64, sectors: u64, byte: u8) -> bool {
        self.read(sector, sectors).unwrap().iter().all(|&found| found == byte)
    }

    pub(crate) fn inject(&self, name: &str, value: &str) -> Result<(), DeviceError> {
        let (name, value) = (name.to_owned(), value.to_owned());
        self.disk.inject(&Injection::Device { name, value })
    }

    pub(crate) fn zone(&self, sector: u64) -> ZoneInfo {
        let mut zones = Vec::new();
        self.disk.report_zones(Sector(sector), 1, &mut zones).unwrap();
        zones[0]
    }

    pub(crate) fn cond(&self, sector: u64) -> ZoneCond {
        self.zone(sector).cond
    }
}

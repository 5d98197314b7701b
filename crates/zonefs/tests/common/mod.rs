//! Devices for the tests: null devices, zoned and in memory.
#![allow(dead_code, reason = "no test uses all of it")]

use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::inject::{Injection, Rule};
use blockyard_core::middleware::Faulty;
use blockyard_core::sched::NoneScheduler;
use blockyard_core::{Composed, Device, Disk, Op, Sector, Status};
use blockyard_null::{Null, NullConfig};
use blockyard_zonefs::format::{Format, format};
use blockyard_zonefs::{MountOptions, ZoneFs};

/// Zone size and capacity of the devices here, in bytes.
pub(crate) const ZONE: u64 = 1 << 20;
/// What can be written of a zone.
pub(crate) const CAPACITY: u64 = 768 << 10;

/// 16 zones of 1 MiB, 768 KiB of it writable, 3 of them conventional, in memory.
pub(crate) fn config() -> NullConfig {
    NullConfig {
        size: 16 * ZONE,
        bs: 4096,
        memory_backed: true,
        zoned: true,
        zone_size: ZONE,
        zone_capacity: CAPACITY,
        zone_nr_conv: 3,
        ..NullConfig::default()
    }
}

/// A device of this configuration, with an error injector.
pub(crate) fn disk(name: &str, config: NullConfig) -> Arc<dyn Disk> {
    let device = Faulty::new(Null::open(config).unwrap(), 1);
    let depth = 2 * device.limits().queue_depth;
    let config = ChannelConfig { depth };
    Arc::new(Composed::new(name.to_owned(), "null", device, config, NoneScheduler::new))
}

/// The same with a file system on it.
pub(crate) fn formatted(name: &str, config: NullConfig) -> Arc<dyn Disk> {
    let disk = disk(name, config);
    format(disk.as_ref(), &Format::default()).unwrap();
    disk
}

/// The file system of a device.
pub(crate) fn open(disk: &Arc<dyn Disk>, options: &str) -> Arc<ZoneFs> {
    let options: MountOptions = options.parse().unwrap();
    ZoneFs::open(Arc::clone(disk), options).unwrap()
}

/// The next so many operations of this kind fail.
pub(crate) fn fail(disk: &dyn Disk, op: Op, times: u64) {
    let rule = Rule {
        op: Some(op),
        start: Sector(0),
        sectors: u64::MAX,
        status: Status::IoErr,
        chance: 1,
        times: Some(times),
    };
    disk.inject(&Injection::AddRule(rule)).unwrap();
}

/// Gives a zone a fault: `zone_readonly` or `zone_offline`.
pub(crate) fn break_zone(disk: &dyn Disk, fault: &str, zone: u64) {
    let value = (zone * ZONE / 512).to_string();
    disk.inject(&Injection::Device { name: fault.to_owned(), value }).unwrap();
}

/// So many bytes that differ from those of another seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| random.u8(..)).collect()
}

//! Devices for the tests: zoned memory-backed null devices.
#![allow(dead_code, reason = "no test uses all of it")]

use std::sync::Arc;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::inject::{Injection, Rule};
use blockyard_core::middleware::Faulty;
use blockyard_core::{Composed, Device, Disk, Op, Status};
use blockyard_null::{Null, NullConfig};
use blockyard_zonefs::format::{Format, format};
use blockyard_zonefs::{MountOptions, ZoneFs};

/// Zone size of the devices in bytes.
pub(crate) const ZONE: u64 = 1 << 20;
/// Writable bytes of a zone.
pub(crate) const CAPACITY: u64 = 768 << 10;

/// 16 memory-backed zones of 1 MiB, of which 768 KiB are writable; 3 zones are conventional.
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

/// A device with this configuration and a fault injector.
pub(crate) fn disk(name: &str, config: NullConfig) -> Arc<dyn Disk> {
    let device = Faulty::new(Null::open(config).unwrap(), 1);
    let depth = 2 * device.limits().queue_depth;
    let config = ChannelConfig { depth };
    Arc::new(Composed::new(name.to_owned(), "null", device, config))
}

/// A device with this configuration and a file system.
pub(crate) fn formatted(name: &str, config: NullConfig) -> Arc<dyn Disk> {
    let disk = disk(name, config);
    format(disk.as_ref(), &Format::default()).unwrap();
    disk
}

/// Opens the file system of a device.
pub(crate) fn open(disk: &Arc<dyn Disk>, options: &str) -> Arc<ZoneFs> {
    let options: MountOptions = options.parse().unwrap();
    ZoneFs::open(Arc::clone(disk), options).unwrap()
}

/// Makes the next `times` operations of this kind fail.
pub(crate) fn fail(disk: &dyn Disk, op: Op, times: u64) {
    let rule = Rule { op: Some(op), times: Some(times), ..Rule::new(Status::IoErr) };
    disk.inject(&Injection::AddRule(rule)).unwrap();
}

/// Injects a zone fault: `zone_readonly` or `zone_offline`.
pub(crate) fn break_zone(disk: &dyn Disk, fault: &str, zone: u64) {
    let value = (zone * ZONE / 512).to_string();
    disk.inject(&Injection::Device { name: fault.to_owned(), value }).unwrap();
}

/// `len` pseudorandom bytes that depend on the seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| random.u8(..)).collect()
}

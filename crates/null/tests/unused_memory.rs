//! Devices that no client uses take little physical memory. The test is a program of its own,
//! because it looks at the memory of the process.
#![allow(clippy::unwrap_used)] // Test code.

use std::fs;

use blockyard_core::Device;
use blockyard_core::sched::shared::Scheduled;
use blockyard_null::{Null, NullConfig};

/// Devices that are open before the memory is looked at first, and those that come then.
const FIRST: usize = 16;
const MORE: usize = 256;

/// The most physical memory of a device with its scheduler, in bytes.
const DEVICE_BYTES_MAX: u64 = 256 << 10;

/// The anonymous memory of this process in bytes.
fn anonymous_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// Regression: a device had 1 MiB of physical memory for a scheduler that was not in use, so 4096
/// devices took 4 GiB.
#[test]
fn a_device_whose_scheduler_is_not_used_takes_little_memory() {
    let device = || {
        let config = NullConfig { size: 1 << 30, ..NullConfig::default() };
        Scheduled::new(Null::open(config).unwrap(), false).unwrap()
    };
    let mut devices: Vec<_> = (0..FIRST).map(|_| device()).collect();
    let before = anonymous_bytes();
    devices.extend((0..MORE).map(|_| device()));
    let each = (anonymous_bytes() - before) / MORE as u64;
    assert!(devices.iter().all(|device| device.geometry().sectors == 2 << 20));
    assert!(each < DEVICE_BYTES_MAX, "{each} bytes for each device");
}

//! The contract suite of all devices on files and block devices, by each way to execute requests,
//! with and without the page cache.
#![allow(clippy::unwrap_used)] // Test code.

// Of the tests of blockyard-volume.
#[path = "../../volume/tests/loop_device/mod.rs"]
mod loop_device;

use std::path::Path;
use std::sync::Arc;

use blockyard_core::sched::shared::Scheduled;
use blockyard_file::{Direct, FileConfig, FileDevice, IoEngine};
use blockyard_testing::capability::Capability;
use blockyard_testing::contract;
use blockyard_testing::temp_dir::TempDir;

use loop_device::LoopDevice;

const SIZE: u64 = 8 << 20;

/// Makes devices on new files.
fn maker(
    name: &str,
    direct: Direct,
    io: IoEngine,
) -> impl Fn() -> FileDevice + Sync + Clone + use<> {
    let place = Arc::new(TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name));
    move || {
        let config = FileConfig { size: SIZE, direct, io, ..FileConfig::new(place.fresh()) };
        FileDevice::open(&config).unwrap()
    }
}

/// Makes devices on new loop devices with sectors of 512 bytes or 4 KiB.
fn loop_maker(
    name: &str,
    direct: Direct,
    io: IoEngine,
    sector: u32,
) -> impl Fn() -> FileDevice + Sync + Clone + use<> {
    let place = Arc::new(TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name));
    move || {
        // The kernel detaches the loop device when the device has been closed.
        let device = LoopDevice::new(&place.fresh(), SIZE, sector);
        let config = FileConfig { direct, io, ..FileConfig::new(device.path()) };
        FileDevice::open(&config).unwrap()
    }
}

/// Whether the user may attach loop devices.
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        Capability::Root.is_missing("only root attaches loop devices");
    }
    is_root
}

/// Whether the system has io_uring.
fn has_uring(name: &str) -> bool {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), name);
    let io = IoEngine::Uring;
    let config = FileConfig { size: SIZE, io, ..FileConfig::new(place.fresh()) };
    match FileDevice::open(&config) {
        Ok(_) => true,
        Err(error) => {
            Capability::Uring.is_missing(error);
            false
        }
    }
}

#[test]
fn io_uring_under_everything() {
    if has_uring("probe") {
        contract::run_wrapped("file", true, maker("wrapped", Direct::Auto, IoEngine::Uring));
    }
}

#[test]
fn io_uring_with_the_page_cache() {
    if has_uring("probe-cached") {
        let make = maker("cached", Direct::Off, IoEngine::Uring);
        contract::run(&contract::Subject::plain("file, page cache", true, make));
    }
}

/// Any thread starts requests on the ring that all channels share, and polls it.
#[test]
fn io_uring_under_a_scheduler() {
    if has_uring("probe-scheduled") {
        let make = maker("scheduled", Direct::Auto, IoEngine::Uring);
        let make = move || Scheduled::new(make(), true).unwrap();
        contract::run(&contract::Subject::plain("scheduled file", true, make));
    }
}

#[test]
fn blocking_calls_under_everything() {
    contract::run_wrapped(
        "file, blocking calls",
        true,
        maker("blocking", Direct::Auto, IoEngine::Blocking),
    );
}

#[test]
fn blocking_calls_with_the_page_cache() {
    let make = maker("blocking-cached", Direct::Off, IoEngine::Blocking);
    contract::run(&contract::Subject::plain("file, blocking calls, page cache", true, make));
}

#[test]
fn io_uring_on_a_block_device() {
    if is_root() && has_uring("probe-loop") {
        let make = loop_maker("loop", Direct::On, IoEngine::Uring, 512);
        contract::run(&contract::Subject::plain("loop device", true, make));
    }
}

#[test]
fn io_uring_on_a_block_device_with_the_page_cache() {
    if is_root() && has_uring("probe-loop-cached") {
        let make = loop_maker("loop-cached", Direct::Off, IoEngine::Uring, 512);
        contract::run(&contract::Subject::plain("loop device, page cache", true, make));
    }
}

#[test]
fn blocking_calls_on_a_block_device() {
    if is_root() {
        let make = loop_maker("loop-blocking", Direct::On, IoEngine::Blocking, 4096);
        contract::run(&contract::Subject::plain("loop device, blocking calls", true, make));
    }
}

#[test]
fn blocking_calls_on_a_block_device_with_the_page_cache() {
    if is_root() {
        let make = loop_maker("loop-blocking-cached", Direct::Off, IoEngine::Blocking, 512);
        let name = "loop device, blocking calls, page cache";
        contract::run(&contract::Subject::plain(name, true, make));
    }
}

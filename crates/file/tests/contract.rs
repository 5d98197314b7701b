//! The contract suite of all devices on files, by each way to execute requests, with and without
//! the page cache.
#![allow(clippy::unwrap_used)] // Test code.

use std::path::Path;
use std::sync::Arc;

use blockyard_core::sched::shared::Scheduled;
use blockyard_file::{Direct, FileConfig, FileDevice, IoEngine};
use blockyard_testing::capability::Capability;
use blockyard_testing::contract;
use blockyard_testing::temp_dir::TempDir;

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

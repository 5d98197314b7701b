//! The contract of all devices on volumes of several shapes, in directories of their own.
#![allow(clippy::unwrap_used)] // A test may.

mod place;

use std::path::Path;
use std::sync::Arc;

use blockyard_sim::contract;
use blockyard_volume::store::{Commit, StoreKind};
use blockyard_volume::{Compression, Options, SyncMode, Volume, VolumeConfig};

use place::Place;

/// 8 MiB of 4 KiB blocks.
fn plain() -> VolumeConfig {
    VolumeConfig {
        path: "".into(),
        name: "v0".to_owned(),
        size: 8 << 20,
        volblocksize: 4096,
        compress: Compression::None,
        sync: SyncMode::Standard,
        ..VolumeConfig::new("", "")
    }
}

/// Fresh volumes: each in a pool of its own, whose directory goes with the test.
fn fresh(place: &Arc<Place>, config: &VolumeConfig) -> Arc<Volume> {
    fresh_by(place, config, StoreKind::Auto)
}

fn fresh_by(place: &Arc<Place>, config: &VolumeConfig, store: StoreKind) -> Arc<Volume> {
    let path = place.fresh();
    let options = Options { segment_bytes: 4 << 20, store, ..Options::default() };
    Volume::open_with(VolumeConfig { path, ..config.clone() }, options).unwrap()
}

fn alone(name: &str, config: VolumeConfig) {
    // Of this test alone: others run beside it in this process.
    let place =
        Arc::new(Place::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &name.replace(' ', "")));
    contract::run(&contract::Subject::plain(name, true, move || fresh(&place, &config)));
}

#[test]
fn blocks_of_4_kib_under_everything() {
    let place = Arc::new(Place::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "wrapped"));
    let config = plain();
    contract::run_wrapped("volume", true, move || fresh(&place, &config));
}

/// Parts of blocks are written, by several at once.
#[test]
fn blocks_of_16_kib_compressed() {
    let (volblocksize, compress) = (16 << 10, Compression::Lz4);
    alone("volume, 16k, lz4", VolumeConfig { volblocksize, compress, ..plain() });
}

/// In two directories.
#[test]
fn two_copies() {
    let place = Arc::new(Place::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "copies"));
    let make = move || {
        let config = VolumeConfig { path2: Some(place.fresh()), copies: 2, ..plain() };
        fresh(&place, &config)
    };
    contract::run(&contract::Subject::plain("volume, two copies", true, make));
}

/// Where io_uring is refused.
#[test]
fn by_calls_that_block() {
    let place = Arc::new(Place::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "blocking"));
    let config = VolumeConfig { sync: SyncMode::Always, ..plain() };
    let make = move || fresh_by(&place, &config, StoreKind::Threads);
    contract::run(&contract::Subject::plain("volume, threads", true, make));
}

/// Each write by a worker of its own.
#[test]
fn by_a_queue_of_tasks() {
    let place = Arc::new(Place::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "tasks"));
    let config = VolumeConfig { sync: SyncMode::Always, ..plain() };
    let make = move || {
        let options =
            Options { segment_bytes: 4 << 20, commit: Commit::TaskQueue(8), ..Options::default() };
        let path = place.fresh();
        Volume::open_with(VolumeConfig { path, ..config.clone() }, options).unwrap()
    };
    contract::run(&contract::Subject::plain("volume, taskq", true, make));
}

#[test]
fn every_write_durable() {
    alone("volume, always", VolumeConfig { sync: SyncMode::Always, ..plain() });
}

#[test]
fn nothing_durable() {
    alone("volume, disabled", VolumeConfig { sync: SyncMode::Disabled, ..plain() });
}

//! The memory of an open pool grows linearly with its volumes, and by little for each. The test is
//! a program of its own, because it counts the allocations of the process.
#![allow(clippy::unwrap_used)] // Test code.

use std::path::Path;
use std::sync::Arc;

use blockyard_core::{Flags, Sector};
use blockyard_testing::allocations::Counting;
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Options, Running, Volume, VolumeConfig};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK: usize = 16 << 10;
const SIZE: u64 = 1 << 30;

/// Volumes of the pool at each opening.
const STEPS: [u32; 3] = [64, 192, 320];

/// The most memory and the most allocations of an opening for each volume with one span that has a
/// leaf: a root without the zeros at its end, a node, a part of its leaves, a leaf, and the volume
/// itself. They were 0.8 KiB and 40.
const BYTES_MAX: u64 = 2 << 10;
const ALLOCATIONS_MAX: u64 = 64;

/// Makes volumes with a written block each.
fn make(path: &Path, numbers: std::ops::Range<u32>) {
    let pool = Running::open(path, Options::default()).unwrap();
    for number in numbers {
        let name = format!("v{number}");
        pool.create(&name, SIZE, BLOCK as u32).unwrap();
        let volume = Volume::open_in(Arc::clone(&pool), VolumeConfig::new("pool", name)).unwrap();
        handle(&volume).write(Sector(0), &[1; BLOCK], Flags::NONE).unwrap();
    }
}

/// Opens the pool. Returns the bytes that the open pool has allocated, and how many allocations the
/// opening made.
fn opened(path: &Path, volumes: u32) -> (u64, u64) {
    let (bytes, made) = (Counting::live_bytes(), Counting::made_by_all());
    let pool = Running::open(path, Options::default()).unwrap();
    let found = (Counting::live_bytes() - bytes, Counting::made_by_all() - made);
    assert_eq!(pool.pool().list().len(), volumes as usize);
    found
}

#[test]
fn an_open_pool_takes_little_memory_for_each_volume() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "many-volumes");
    let path = place.path().join("pool");
    let mut found = Vec::new();
    for (at, volumes) in STEPS.into_iter().enumerate() {
        make(&path, if at == 0 { 0 } else { STEPS[at - 1] }..volumes);
        // The first opening after a close replays nothing.
        found.push(opened(&path, volumes));
    }
    for (steps, found) in STEPS.windows(2).zip(found.windows(2)) {
        let more = u64::from(steps[1] - steps[0]);
        let bytes = found[1].0.saturating_sub(found[0].0) / more;
        let allocations = found[1].1.saturating_sub(found[0].1) / more;
        assert!(bytes <= BYTES_MAX, "{bytes} bytes for each volume: {found:?}");
        assert!(allocations <= ALLOCATIONS_MAX, "{allocations} allocations each: {found:?}");
    }
}

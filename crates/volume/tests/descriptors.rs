//! Pools with few file descriptors left. Each case is a process of its own, with its own limit.
#![allow(clippy::unwrap_used)] // Test code.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use blockyard_core::{Flags, Sector, Status};
use blockyard_testing::channel::handle;
use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::{Options, Volume, VolumeConfig};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The environment variable with the pool's directory, set in a process that runs one case.
const DIRECTORY: &str = "BLOCKYARD_VOLUME_DESCRIPTORS_DIRECTORY";

/// The limit of descriptors of such a process.
const LIMIT: u64 = 256;

/// Number of segments of 32 MiB that make 10 TiB; fewer in a normal run, unless
/// `BLOCKYARD_DESCRIPTORS_ALL=1` runs all.
const SEGMENTS: usize = (10 << 40) / (32 << 20);
const FEWER: usize = 20_000;

/// Runs a case in a process of its own.
fn apart(case: &str, pool: &Path) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([case, "--exact", "--nocapture"]).env(DIRECTORY, pool);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stdout));
}

/// In a process that runs a case: limits its descriptors, and returns the pool's directory.
fn is_apart() -> Option<PathBuf> {
    let directory = std::env::var_os(DIRECTORY)?;
    let limit = Rlimit { current: Some(LIMIT), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
    Some(directory.into())
}

fn open(path: &Path, options: Options) -> Arc<Volume> {
    let config = VolumeConfig { size: 1 << 30, ..VolumeConfig::new(path, "v") };
    Volume::open_with(VolumeConfig { volblocksize: 4096, ..config }, options).unwrap()
}

/// Segments so short that there are many.
fn short() -> Options {
    Options { segment_bytes: 64 << 10, checkpoint_bytes: 4 << 20, ..Options::default() }
}

fn page(number: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(number);
    (0..64 << 10).map(|_| random.u8(..)).collect()
}

fn fill(volume: &Arc<Volume>, pages: std::ops::Range<u64>) -> Result<(), Status> {
    let mut io = handle(volume);
    // A write as long as a segment would not fit, so it is divided.
    let last = pages.end - 1;
    pages.into_iter().try_for_each(|number| {
        // The last write is durable, and everything before it with it.
        let flags = if number == last { Flags::FUA } else { Flags::NONE };
        page(number)
            .chunks(16 << 10)
            .enumerate()
            .try_for_each(|(at, part)| io.write(Sector(number * 128 + at as u64 * 32), part, flags))
    })
}

fn verify(volume: &Arc<Volume>, pages: impl Iterator<Item = u64>) {
    let mut io = handle(volume);
    let mut bytes = vec![0; 64 << 10];
    for number in pages {
        for (at, part) in bytes.chunks_mut(16 << 10).enumerate() {
            io.read(Sector(number * 128 + at as u64 * 32), part).unwrap();
        }
        assert!(bytes == page(number), "page {number}");
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Takes all descriptors that are left, until the result is dropped.
fn exhaust() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// Regression: a directory pool had a descriptor for each segment. With a limit of 1,024 it could
/// have at most 32 GiB, and growing further latched it.
#[test]
fn a_pool_has_more_segments_than_the_process_descriptors() {
    let Some(path) = is_apart() else {
        let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "descriptors-many");
        return apart("a_pool_has_more_segments_than_the_process_descriptors", &place.fresh());
    };
    for round in 0..2 {
        let volume = open(&path, short());
        if round == 0 {
            fill(&volume, 0..800).unwrap();
        }
        let segments = volume.running().pool().counts().all;
        assert!(segments > 2 * LIMIT as usize, "{segments} segments");
        verify(&volume, 0..800);
        // In an order that jumps between segments.
        verify(&volume, (0..800).map(|number| number * 13 % 800));
        assert!(open_descriptors() < LIMIT as usize / 2, "{}", open_descriptors());
        assert!(!volume.running().pool().is_latched());
    }
}

/// Regression: a pool of 10 TiB has 327,680 segments, and opening it needed a descriptor for each.
#[test]
fn a_pool_of_10_tib_opens_and_works() {
    let Some(path) = is_apart() else {
        let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "descriptors-10t");
        return apart("a_pool_of_10_tib_opens_and_works", &place.fresh());
    };
    let volume = open(&path, Options::default());
    fill(&volume, 0..8).unwrap();
    let there = volume.running().pool().counts().all;
    drop(volume);
    let all = std::env::var_os("BLOCKYARD_DESCRIPTORS_ALL").is_some();
    for number in there..if all { SEGMENTS } else { FEWER } {
        let file = File::create(path.join(format!("segment-{number:08x}"))).unwrap();
        file.set_len(32 << 20).unwrap();
    }
    for _ in 0..2 {
        let volume = open(&path, Options::default());
        verify(&volume, 0..8);
        fill(&volume, 8..16).unwrap();
        verify(&volume, 0..16);
        assert!(open_descriptors() < LIMIT as usize, "{}", open_descriptors());
    }
}

/// Regression: idle clients of another export had taken all descriptors. The next checkpoint could
/// not open the superblock, and the pool latched.
#[test]
fn a_pool_goes_on_where_no_descriptor_is_left() {
    let Some(path) = is_apart() else {
        let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "descriptors-none");
        let (one, two) = (place.fresh(), place.fresh());
        for path in [&one, &two] {
            apart("a_pool_goes_on_where_no_descriptor_is_left", path);
        }
        return;
    };
    let volume = open(&path, short());
    fill(&volume, 0..100).unwrap();
    let all = exhaust();
    assert!(File::open("/dev/null").is_err());
    // This takes several checkpoints and new segments.
    for round in 0..4 {
        match fill(&volume, 100..300) {
            Ok(()) | Err(Status::NoSpc) => {}
            Err(status) => panic!("round {round}: {status}"),
        }
        verify(&volume, 0..100);
        assert!(!volume.running().pool().is_latched(), "round {round}");
    }
    drop(all);
    // Only some of the refused writes search for space.
    assert!((0..64).any(|_| fill(&volume, 100..500).is_ok()));
    drop(volume);
    verify(&open(&path, short()), 0..500);
}

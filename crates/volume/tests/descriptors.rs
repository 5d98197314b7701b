//! Pools where few descriptors are left. Each case is a process of its own, whose limit is its own.
#![allow(clippy::unwrap_used)] // A test may.

mod door;
mod place;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use blockyard_core::{Flags, Sector, Status};
use blockyard_volume::{Options, Volume, VolumeConfig};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use door::door;
use place::Place;

/// Names the directory of a process that is one case.
const DIRECTORY: &str = "BLOCKYARD_VOLUME_DESCRIPTORS_DIRECTORY";

/// Descriptors of such a process.
const LIMIT: u64 = 256;

/// Segments of 32 MiB that are 10 TiB; fewer in a run of all tests, unless
/// `BLOCKYARD_DESCRIPTORS_ALL=1` asks for all.
const SEGMENTS: usize = (10 << 40) / (32 << 20);
const FEWER: usize = 20_000;

/// Runs a case as a process of its own, if this is not that process.
fn apart(case: &str, pool: &Path) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([case, "--exact", "--nocapture"]).env(DIRECTORY, pool);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stdout));
}

/// The directory, in a process that is a case; its descriptors are limited then.
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

/// Segments so short that many are written.
fn short() -> Options {
    Options { segment_bytes: 64 << 10, checkpoint_bytes: 4 << 20, ..Options::default() }
}

fn page(number: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(number);
    (0..64 << 10).map(|_| random.u8(..)).collect()
}

fn fill(volume: &Arc<Volume>, pages: std::ops::Range<u64>) -> Result<(), Status> {
    let mut io = door(volume);
    // A write of the length of a segment would not fit there.
    let last = pages.end - 1;
    pages.into_iter().try_for_each(|number| {
        // The last of them makes durable what was before it.
        let flags = if number == last { Flags::FUA } else { Flags::NONE };
        page(number)
            .chunks(16 << 10)
            .enumerate()
            .try_for_each(|(at, part)| io.write(Sector(number * 128 + at as u64 * 32), part, flags))
    })
}

fn verify(volume: &Arc<Volume>, pages: impl Iterator<Item = u64>) {
    let mut io = door(volume);
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

/// All descriptors that are left, held until this is dropped.
fn exhaust() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// A pool in a directory had a descriptor for each segment: with a limit of 1,024 it was 32 GiB at
/// most, and growing further poisoned it.
#[test]
fn a_pool_has_more_segments_than_the_process_descriptors() {
    let Some(path) = is_apart() else {
        let place = Place::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "descriptors-many");
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
        // Each of them from somewhere else.
        verify(&volume, (0..800).map(|number| number * 13 % 800));
        assert!(open_descriptors() < LIMIT as usize / 2, "{}", open_descriptors());
        assert!(!volume.running().pool().is_poisoned());
    }
}

/// A pool of 10 TiB has 327,680 segments, and needed as many descriptors to be opened.
#[test]
fn a_pool_of_10_tib_opens_and_works() {
    let Some(path) = is_apart() else {
        let place = Place::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "descriptors-10t");
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

/// Idle clients of another export had taken all descriptors. The next checkpoint could not open the
/// superblock, and the pool was read-only from then on.
#[test]
fn a_pool_goes_on_where_no_descriptor_is_left() {
    let Some(path) = is_apart() else {
        let place = Place::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "descriptors-none");
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
    // Through several checkpoints, and segments that are made meanwhile.
    for round in 0..4 {
        match fill(&volume, 100..300) {
            Ok(()) | Err(Status::NoSpc) => {}
            Err(status) => panic!("round {round}: {status}"),
        }
        verify(&volume, 0..100);
        assert!(!volume.running().pool().is_poisoned(), "round {round}");
    }
    drop(all);
    // Space is looked for by one in some of the writes that are refused.
    assert!((0..64).any(|_| fill(&volume, 100..500).is_ok()));
    drop(volume);
    verify(&open(&path, short()), 0..500);
}

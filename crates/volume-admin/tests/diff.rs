//! The ranges of `diff` against a comparison of all contents, over random histories.
#![allow(clippy::unwrap_used)] // Test code.

use std::sync::Arc;
use std::time::Duration;

use blockyard_core::Status;
use blockyard_store::Mirror;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::SimulatedStore;
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::{Compression, Options, Running};
use blockyard_volume_admin::diff::{DiffRange, diff};

type Store = Mirror<SimulatedStore>;
type Pool = Arc<Running<Store>>;

/// Random histories.
const HISTORIES: u64 = 12;

/// Operations of a history.
const STEPS: usize = 60;

const BLOCK: u64 = 4096;

/// Blocks of a volume: several leaves, the last one in part.
const BLOCKS: u64 = 700;

/// Most volumes, and most snapshots.
const MOST: usize = 4;

/// Between two looks whether a write is complete.
const LOOK: Duration = Duration::from_millis(1);

fn open(directory: &SimulatedDirectory) -> Pool {
    let options = Options {
        segment_bytes: 256 << 10,
        // Little space, so that cleaning moves blocks.
        segments_max: 70,
        memory_bytes: 1 << 20,
        checkpoint_bytes: 512 << 10,
        // A few leaves, so that others are read.
        map_cache_bytes: 16 << 10,
        ..Options::default()
    };
    Running::start(Mirror::single(SimulatedStore::new(directory), "pool"), options).unwrap()
}

fn handle(pool: &Pool, name: &str) -> VolumeHandle<Store> {
    let live = pool.pool().find(name).unwrap();
    VolumeHandle::open(pool.pool(), live, Compression::Lz4, 8).unwrap()
}

/// Executes a change to its end. A lack of space changes nothing.
fn change(pool: &Pool, name: &str, begin: &dyn Fn(&mut VolumeHandle<Store>) -> Outcome) {
    let mut handle = handle(pool, name);
    loop {
        match begin(&mut handle) {
            Outcome::Taken => break,
            Outcome::Ended(status) => return assert!(is_expected(status), "{status:?}"),
            Outcome::Full => handle.completion_queue().event_count().sleep(LOOK, || false),
        }
    }
    while handle.out() > 0 {
        match handle.take() {
            Some(reply) => assert!(is_expected(reply.status), "{:?}", reply.status),
            None => handle.completion_queue().event_count().sleep(LOOK, || handle.is_any()),
        }
    }
}

fn is_expected(status: Status) -> bool {
    matches!(status, Status::Ok | Status::NoSpc)
}

/// Writes blocks that differ from every other write of the history.
fn write(pool: &Pool, name: &str, first: u64, count: u64, random: &mut fastrand::Rng) {
    let mut bytes = vec![0; (count * BLOCK) as usize];
    for block in bytes.chunks_mut(BLOCK as usize) {
        let noise = random.usize(16..=block.len());
        random.fill(&mut block[..noise]);
    }
    let fill = |from: usize, into: &mut [u8]| into.copy_from_slice(&bytes[from..from + into.len()]);
    let (at, len) = (first * BLOCK, bytes.len());
    change(pool, name, &|handle| handle.write(at, len, &fill, 0, false));
}

fn contents(pool: &Pool, name: &str) -> Vec<u8> {
    let len = pool.pool().find(name).unwrap().meta.size_bytes() as usize;
    let mut bytes = Vec::with_capacity(len);
    let status = handle(pool, name).read(0, len, |part| bytes.extend_from_slice(part));
    assert_eq!(status, Status::Ok);
    bytes
}

/// The ranges in which contents differ, block by block; there are zeros after the end of `old`.
fn expected(mut old: Vec<u8>, new: &[u8]) -> Vec<DiffRange> {
    old.resize(new.len(), 0);
    let block = |at| at..at + BLOCK as usize;
    let mut ranges: Vec<DiffRange> = Vec::new();
    for at in (0..new.len()).step_by(BLOCK as usize) {
        if old[block(at)] == new[block(at)] {
            continue;
        }
        let (offset_bytes, len_bytes) = (at as u64, BLOCK);
        let is_discarded = new[block(at)].iter().all(|byte| *byte == 0);
        match ranges.last_mut() {
            Some(last)
                if last.offset_bytes + last.len_bytes == offset_bytes
                    && last.is_discarded == is_discarded =>
            {
                last.len_bytes += BLOCK;
            }
            _ => ranges.push(DiffRange { offset_bytes, len_bytes, is_discarded }),
        }
    }
    ranges
}

/// Compares a snapshot with another one, or a volume, and their contents. Returns whether a range
/// was found.
fn compare(pool: &Pool, from: &str, to: &str) -> bool {
    let ranges: Vec<DiffRange> = diff(pool, from, to).unwrap().map(Result::unwrap).collect();
    let (old, new) = (contents(pool, from), contents(pool, to));
    assert_eq!(ranges, expected(old, &new), "{from} {to}");
    let listed = pool.pool().list().len();
    assert_eq!(pool.pool().volumes().by_id.len(), listed, "a hidden snapshot is left");
    !ranges.is_empty()
}

/// Runs a history. Returns how many comparisons found a range.
fn run(random: &mut fastrand::Rng) -> usize {
    let directory = SimulatedDirectory::default();
    let mut pool = open(&directory);
    pool.create("v0", BLOCKS * BLOCK, BLOCK as u32).unwrap();
    let (mut number, mut found) = (0, 0);
    for _ in 0..STEPS {
        let all = pool.pool().list();
        let names = |is_snapshot: bool| -> Vec<String> {
            all.iter()
                .filter(|it| it.is_snapshot == is_snapshot)
                .map(|it| it.name.clone())
                .collect()
        };
        let (volumes, snapshots) = (names(false), names(true));
        let volume = random.choice(&volumes).unwrap().clone();
        let snapshot = random.choice(&snapshots).cloned();
        number += 1;
        let first = random.u64(..BLOCKS - 100);
        match (random.u32(..100), snapshot) {
            (0..45, _) => write(&pool, &volume, first, random.u64(1..60), random),
            (45..55, _) => {
                let len = random.u64(1..100) * BLOCK;
                change(&pool, &volume, &|handle| handle.zero(first * BLOCK, len, 0, false));
            }
            (55..68, _) if snapshots.len() < MOST => {
                pool.snapshot(&format!("{volume}@{number}")).unwrap();
            }
            (68..71, Some(snapshot)) if volumes.len() < MOST => {
                pool.clone_of(&snapshot, &format!("clone-{number}")).unwrap();
            }
            // Refused if the size differs.
            (71..75, Some(snapshot)) => _ = pool.rollback(&snapshot),
            (75..79, Some(snapshot)) => pool.destroy(&snapshot).unwrap(),
            (79..81, _) => _ = pool.promote(&volume),
            (81..83, _) => {
                let blocks = BLOCKS + random.u64(..100);
                pool.resize(&volume, blocks * BLOCK, true).unwrap();
            }
            (83..85, _) => assert!(pool.pool().checkpoint().is_ok()),
            (85..87, _) => {
                drop(pool);
                pool = open(&directory);
            }
            (_, Some(from)) => {
                let to = random.choice(&all).unwrap().name.clone();
                found += usize::from(compare(&pool, &from, &to));
            }
            (_, None) => {}
        }
    }
    found
}

#[test]
fn the_ranges_are_those_in_which_contents_differ() {
    let seed = Seed::from_env();
    let mut found = 0;
    for history in 0..HISTORIES {
        let _watch = seed.watch(&format!("history {history}"));
        found += run(&mut seed.rng(history));
    }
    assert!(found > HISTORIES as usize, "{found} comparisons found a range");
}

#[test]
fn only_a_snapshot_that_shares_blocks_is_compared_with() {
    let pool = open(&SimulatedDirectory::default());
    pool.create("v0", BLOCKS * BLOCK, BLOCK as u32).unwrap();
    pool.create("other", BLOCKS * BLOCK, BLOCK as u32).unwrap();
    pool.snapshot("v0@a").unwrap();
    let refused = |from: &str, to: &str| match diff(&pool, from, to) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{from} {to}"),
    };
    assert_eq!(refused("v0", "v0@a"), "invalid from `v0`: expected VOLUME@SNAPSHOT");
    let text = refused("v0@a", "other");
    assert!(text.starts_with("invalid from `v0@a`: expected a snapshot of `other`"), "{text}");
    assert!(refused("v0@b", "v0").contains("there is no snapshot `v0@b`"));
    assert!(refused("v0@a", "none").contains("there is no volume `none`"));
    // Neither name is left with a hidden snapshot; the snapshot is kept from being destroyed.
    assert_eq!(pool.pool().volumes().by_id.len(), 3);
    let running = diff(&pool, "v0@a", "v0").unwrap();
    let busy = pool.destroy("v0@a").unwrap_err().to_string();
    assert!(busy.contains("`v0@a` is"), "{busy}");
    drop(running);
    pool.destroy("v0@a").unwrap();
}

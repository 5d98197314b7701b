//! A reservation depends on the number of blocks that only the volume has. That number must be
//! exact, whichever part of the map is in memory.

use std::collections::BTreeSet;

use blockyard_core::Status;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_volume_format::catalogue::Change;

use crate::damage::rot_leaf;
use crate::fixture::{Fixture, Shape, Step, format};

const LEAF: u64 = 256;

fn reserve(fixture: &mut Fixture, bytes: u64) {
    let id = fixture.pool.find("v").unwrap().meta.id;
    let mut answer = fixture.pool.submit_change(Change::Reserve { id, bytes });
    fixture.run();
    assert_eq!(answer.take().map(|reply| reply.status), Some(Status::Ok));
}

/// Regression: a discard of a whole leaf that was never read subtracted 256 owned blocks.
#[test]
fn exclusive_space_is_exact_when_whole_leaves_are_discarded() {
    let seed = Seed::from_env();
    for stream in 9300..9330 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let mut shape = Shape::tiny();
        shape.blocks = LEAF * 12;
        let options = &mut shape.options;
        (options.segments_max, options.segment_bytes) = (400, 32 << 10);
        options.checkpoint_bytes = random.u64(16..64) << 10;
        options.map_cache_bytes = 4 << 12;
        let reserved = shape.blocks * u64::from(shape.block_bytes);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut fixture = Fixture::open(&directory, &shape);
        // Without a reservation the owned blocks are not counted exactly; from the reservation on
        // they are.
        let from = random.usize(..100);
        let mut own: BTreeSet<u64> = BTreeSet::new();
        for round in 0..200 {
            if round == from {
                reserve(&mut fixture, reserved);
            }
            match random.u32(..20) {
                0 => {
                    let history = fixture.history.clone();
                    drop(fixture);
                    fixture = Fixture::open(&directory, &shape);
                    fixture.history = history;
                }
                1 if random.bool() => {
                    assert_eq!(fixture.take(Step::Snapshot), Status::Ok);
                    own.clear();
                }
                2..6 => {
                    let first = random.u64(..12);
                    let count = random.u64(1..=(12 - first).min(4)) * LEAF;
                    let first = first * LEAF;
                    assert_eq!(
                        fixture.take(Step::Discard { first, count, fua: false }),
                        Status::Ok
                    );
                    own.retain(|block| !(first..first + count).contains(block));
                }
                6 => {
                    let first = random.u64(..shape.blocks);
                    let count = random.u64(1..=(shape.blocks - first).min(300));
                    assert_eq!(
                        fixture.take(Step::Discard { first, count, fua: false }),
                        Status::Ok
                    );
                    own.retain(|block| !(first..first + count).contains(block));
                }
                _ => {
                    let first = random.u64(..shape.blocks);
                    let count = random.u64(1..=(shape.blocks - first).min(3));
                    let status = fixture.take(Step::Write { first, count, fua: random.bool() });
                    assert_eq!(status, Status::Ok);
                    own.extend(first..first + count);
                }
            }
            if round >= from {
                let owned = fixture.pool.find("v").unwrap().owned();
                assert_eq!(owned, own.len() as u64, "round {round}");
            }
        }
    }
}

/// The number of blocks that only the volume has, computed from all leaves of its map.
fn own_by_map(fixture: &Fixture) -> u64 {
    let live = fixture.pool.find("v").unwrap();
    let (map, copied) = (live.map.freeze(), live.map.copied());
    let leaves = map.iter().flatten().flat_map(|node| node.leaves());
    let own = leaves.filter(|(_, leaf)| leaf.birth() > copied);
    own.map(|(_, leaf)| {
        let page = fixture.pool.segments().page(leaf).unwrap();
        (0..LEAF as usize).filter(|at| page.is_fresh(*at)).count() as u64
    })
    .sum()
}

/// How a rotten leaf is given up.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// By a liveness scan.
    Counted,
    /// By an opening that finds a write to the leaf in the log.
    Opened,
    /// By the committer: the leaf is evicted while a write to it is pending.
    Written,
}

/// Regression: owned blocks of a lost leaf were counted twice when they were written again, and
/// shared blocks of the leaf were subtracted. The reservation was then too small or too large.
#[test]
fn exclusive_space_is_exact_when_leaves_are_lost() {
    let ways = [Way::Counted, Way::Opened, Way::Written];
    for (way, is_shared) in ways.into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let mut shape = Shape::tiny();
        shape.blocks = LEAF * 5;
        shape.options.checkpoint_bytes = 128 << 10;
        shape.options.segments_max = 400;
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut fixture = Fixture::open(&directory, &shape);
        reserve(&mut fixture, shape.blocks * 512);
        let write = |fixture: &mut Fixture, first, count| {
            assert_eq!(fixture.take(Step::Write { first, count, fua: true }), Status::Ok);
        };
        for leaf in 0..5 {
            (0..100).step_by(8).for_each(|at| write(&mut fixture, leaf * LEAF + at, 8));
        }
        if is_shared {
            assert_eq!(fixture.take(Step::Snapshot), Status::Ok);
            [0, 2, 3, 4].into_iter().for_each(|leaf| write(&mut fixture, leaf * LEAF, 5));
        }
        rot_leaf(&directory, &mut fixture, 1, "");
        match way {
            Way::Counted => {
                drop(fixture);
                fixture = Fixture::open(&directory, &shape);
                // The number of lost bytes is unknown; make it enough for a liveness scan.
                let discard = Step::Discard { first: 3 * LEAF, count: LEAF, fua: true };
                assert_eq!(fixture.take(discard), Status::Ok);
                (0..200).for_each(|_| write(&mut fixture, 0, 1));
            }
            Way::Opened => {
                write(&mut fixture, LEAF + 50, 2);
                drop(fixture);
                fixture = Fixture::open(&directory, &shape);
            }
            Way::Written => {
                let step = Step::Write { first: LEAF + 50, count: 2, fua: true };
                assert_eq!(fixture.begin(step), Status::Ok);
                // The cache holds one leaf.
                for leaf in [0, 2, 3] {
                    assert_eq!(fixture.handle.read(leaf * LEAF * 512, 512, |_| {}), Status::Ok);
                }
                assert_eq!(fixture.go_on(), Status::Ok);
            }
        }
        for first in [LEAF + 10, LEAF + 200] {
            let owned = fixture.pool.find("v").unwrap().owned();
            assert_eq!(owned, own_by_map(&fixture), "{way:?}, shared: {is_shared}");
            write(&mut fixture, first, 3);
        }
    }
}

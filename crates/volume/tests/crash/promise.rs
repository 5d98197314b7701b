//! What a volume is promised goes by how many blocks are its alone: these are counted exactly,
//! whatever of its map is in memory.

use std::collections::BTreeSet;

use blockyard_core::Status;
use blockyard_sim::directory::Directory;
use blockyard_sim::seed::Seed;
use blockyard_volume::format::catalogue::Change;

use crate::damage::rot_leaf;
use crate::rig::{Rig, Shape, Step, format};

const LEAF: u64 = 256;

fn reserve(rig: &mut Rig, bytes: u64) {
    let id = rig.pool.find("v").unwrap().traits.id;
    let mut answer = rig.pool.ask(Change::Reserve { id, bytes });
    rig.run();
    assert_eq!(answer.take().map(|reply| reply.status), Some(Status::Ok));
}

/// Where whole leaves were discarded that nobody had read, a volume owned 256 blocks less for each.
#[test]
fn what_a_volume_owns_is_counted_where_whole_leaves_go() {
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
        let directory = Directory::default();
        format(&directory, &shape);
        let mut rig = Rig::open(&directory, &shape);
        // Who is promised nothing is not counted exactly; who is promised something later is.
        let from = random.usize(..100);
        let mut own: BTreeSet<u64> = BTreeSet::new();
        for round in 0..200 {
            if round == from {
                reserve(&mut rig, reserved);
            }
            match random.u32(..20) {
                0 => {
                    let history = rig.history.clone();
                    drop(rig);
                    rig = Rig::open(&directory, &shape);
                    rig.history = history;
                }
                1 if random.bool() => {
                    assert_eq!(rig.take(Step::Snapshot), Status::Ok);
                    own.clear();
                }
                2..6 => {
                    let first = random.u64(..12);
                    let count = random.u64(1..=(12 - first).min(4)) * LEAF;
                    let first = first * LEAF;
                    assert_eq!(rig.take(Step::Discard { first, count, fua: false }), Status::Ok);
                    own.retain(|block| !(first..first + count).contains(block));
                }
                6 => {
                    let first = random.u64(..shape.blocks);
                    let count = random.u64(1..=(shape.blocks - first).min(300));
                    assert_eq!(rig.take(Step::Discard { first, count, fua: false }), Status::Ok);
                    own.retain(|block| !(first..first + count).contains(block));
                }
                _ => {
                    let first = random.u64(..shape.blocks);
                    let count = random.u64(1..=(shape.blocks - first).min(3));
                    let status = rig.take(Step::Write { first, count, fua: random.bool() });
                    assert_eq!(status, Status::Ok);
                    own.extend(first..first + count);
                }
            }
            if round >= from {
                let owned = rig.pool.find("v").unwrap().owned();
                assert_eq!(owned, own.len() as u64, "round {round}");
            }
        }
    }
}

/// How many blocks of the volume are its alone, by all leaves of its map.
fn own_by_map(rig: &Rig) -> u64 {
    let live = rig.pool.find("v").unwrap();
    let (map, copied) = (live.map.freeze(), live.map.copied());
    let leaves = map.iter().flatten().flat_map(|node| node.leaves());
    let own = leaves.filter(|(_, leaf)| leaf.birth() > copied);
    own.map(|(_, leaf)| {
        let page = rig.pool.segments().page(leaf).unwrap();
        (0..LEAF as usize).filter(|at| page.is_fresh(*at)).count() as u64
    })
    .sum()
}

/// How a leaf that has rotted is given up.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Blocks are counted.
    Counted,
    /// An opening finds a write to it in the log.
    Opened,
    /// It goes from memory while a write to it is on its way.
    Written,
}

/// What a volume owned in a leaf that was lost was counted twice when it was written again, and
/// what it shared there was taken off: its promise was less than it was, or more.
#[test]
fn what_a_volume_owns_is_counted_where_leaves_are_lost() {
    let ways = [Way::Counted, Way::Opened, Way::Written];
    for (way, is_shared) in ways.into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let mut shape = Shape::tiny();
        shape.blocks = LEAF * 5;
        shape.options.checkpoint_bytes = 128 << 10;
        shape.options.segments_max = 400;
        let directory = Directory::default();
        format(&directory, &shape);
        let mut rig = Rig::open(&directory, &shape);
        reserve(&mut rig, shape.blocks * 512);
        let write = |rig: &mut Rig, first, count| {
            assert_eq!(rig.take(Step::Write { first, count, fua: true }), Status::Ok);
        };
        for leaf in 0..5 {
            (0..100).step_by(8).for_each(|at| write(&mut rig, leaf * LEAF + at, 8));
        }
        if is_shared {
            assert_eq!(rig.take(Step::Snapshot), Status::Ok);
            [0, 2, 3, 4].into_iter().for_each(|leaf| write(&mut rig, leaf * LEAF, 5));
        }
        rot_leaf(&directory, &mut rig, 1, "");
        match way {
            Way::Counted => {
                drop(rig);
                rig = Rig::open(&directory, &shape);
                // What it had is not known: enough to count again.
                let discard = Step::Discard { first: 3 * LEAF, count: LEAF, fua: true };
                assert_eq!(rig.take(discard), Status::Ok);
                (0..200).for_each(|_| write(&mut rig, 0, 1));
            }
            Way::Opened => {
                write(&mut rig, LEAF + 50, 2);
                drop(rig);
                rig = Rig::open(&directory, &shape);
            }
            Way::Written => {
                let step = Step::Write { first: LEAF + 50, count: 2, fua: true };
                assert_eq!(rig.begin(step), Status::Ok);
                // There is room for one in memory.
                for leaf in [0, 2, 3] {
                    assert_eq!(rig.door.read(leaf * LEAF * 512, 512, |_| {}), Status::Ok);
                }
                assert_eq!(rig.go_on(), Status::Ok);
            }
        }
        for first in [LEAF + 10, LEAF + 200] {
            let owned = rig.pool.find("v").unwrap().owned();
            assert_eq!(owned, own_by_map(&rig), "{way:?}, shared: {is_shared}");
            write(&mut rig, first, 3);
        }
    }
}

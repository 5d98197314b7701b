//! What a volume is promised goes by how many blocks are its alone: these are counted exactly,
//! whatever of its map is in memory.

use std::collections::BTreeSet;

use blockyard_core::Status;
use blockyard_sim::directory::Directory;
use blockyard_sim::seed::Seed;
use blockyard_volume::format::catalogue::Change;

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

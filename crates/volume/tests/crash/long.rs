//! Segments so long that an opening searches them for headers on several threads, and a log that
//! has many of them after the last checkpoint.

use blockyard_core::Status;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;

use crate::fixture::{Fixture, Shape, Step, format};
use crate::{look, work};

/// The segment length, in bytes, from which an opening uses threads.
const LONG_BYTES: u32 = 1 << 20;

/// Approximate number of cuts per run.
const MOMENTS: usize = 12;

#[test]
fn a_power_cut_below_a_log_of_long_segments_leaves_a_prefix_with_everything_durable() {
    let seed = Seed::from_env();
    let mut segments = 0;
    for stream in 42_000..42_016 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let mut shape = Shape::tiny();
        (shape.block_bytes, shape.blocks) = (16 << 10, random.u64(8..40));
        shape.mirror = random.u8(..4) == 0;
        let options = &mut shape.options;
        (options.segment_bytes, options.memory_bytes) = (LONG_BYTES, 4 << 20);
        options.checkpoint_bytes = random.u64(2 << 20..16 << 20);
        options.sync_bytes = random.u64(32 << 10..1 << 20);
        (shape.depth, options.pipeline_bytes) = (random.usize(1..4), random.u32(..64 << 10));
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium = directory.medium();
        let mut fixture = Fixture::open(&directory, &shape);
        // Phases of short groups, many of which fit into a read, and of long groups.
        for _ in 0..random.usize(4..10) {
            let count = random.usize(10..40);
            work(&mut fixture, &mut random, &shape, count);
            for _ in 0..random.usize(..8) {
                let first = random.u64(..shape.blocks - 4);
                let step = Step::Write { first, count: 4, fua: random.bool() };
                assert_eq!(fixture.take(step), Status::Ok);
            }
        }
        let (history, changes) = (fixture.history.clone(), directory.changes());
        segments = segments.max(fixture.pool.counts().all - fixture.pool.counts().free);
        drop(fixture);
        let every = changes.len() / MOMENTS + 1;
        for (moment, change) in (1..).zip(&changes) {
            medium.apply(change);
            if random.usize(..every) == 0 {
                look(&history, moment, &medium.cut(|_, _| 0), &shape);
                look(&history, moment, &medium.cut(|_, count| random.usize(..count)), &shape);
            }
        }
        look(&history, changes.len(), &medium.kill(), &shape);
    }
    assert!(segments > 5, "the log goes through many: {segments}");
}

//! Full pools: only writes without space are refused, acknowledged writes are kept, requests that
//! free space continue, and afterwards there is space.

use blockyard_core::Status;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::{FaultPlan, SimulatedStore, When};
use blockyard_volume::committer::Turn;
use blockyard_volume::handle::{NO_REPLY, Outcome, VolumeHandle};
use blockyard_volume::record::Body;
use blockyard_volume_format::catalogue::{Change, VolumeMeta};

use crate::fixture::{Blocks, Fixture, Shape, Step, format, read};

/// A shape whose segments have space for the pages of a checkpoint.
fn shape(segments_max: usize) -> Shape {
    let mut shape = Shape::tiny();
    shape.options.segment_bytes = 32 << 10;
    shape.block_bytes = 2048;
    shape.options.segments_max = segments_max;
    shape
}

/// Starts a write of one block; returns whether it was answered before it was in the log.
fn write_early(fixture: &mut Fixture, shape: &Shape, block: u64, number: u64) -> Option<bool> {
    let size = shape.block_bytes as usize;
    let early = fixture.handle.may_answer_early();
    let fill = |_: usize, into: &mut [u8]| {
        into.chunks_mut(8).for_each(|part| part.copy_from_slice(&number.to_le_bytes()));
    };
    let token = if early { NO_REPLY } else { number as u32 };
    match fixture.handle.write(block * size as u64, size, &fill, token, false) {
        Outcome::Taken => Some(early),
        Outcome::Full => None,
        Outcome::Ended(status) => panic!("{status}"),
    }
}

/// Writes that are answered early, until long after space ran out: each answered write is there
/// after a flush, regardless of the others.
#[test]
fn nothing_that_was_answered_is_lost() {
    let seed = Seed::from_env();
    let (mut refused, mut answered) = (0, 0);
    for stream in 9100..9140 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let mut shape = shape(random.usize(20..40));
        shape.block_bytes = [512, 1024, 2048][random.usize(..3)];
        shape.blocks = random.u64(300..600);
        shape.options.memory_bytes = 32 << 10;
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut medium = directory.medium();
        let store = SimulatedStore::new(&directory);
        let mut fixture = Fixture::on(store.clone(), &directory, &shape).unwrap();
        // The limit is sometimes the pool's, sometimes the file system's.
        if random.bool() {
            store.set_faults(FaultPlan {
                full: When::After(random.u64(8..24)),
                ..FaultPlan::default()
            });
        }
        let mut model: Blocks = vec![0; shape.blocks as usize];
        let mut waiting: Vec<(u64, u64)> = Vec::new();
        let mut number = 0;
        for _ in 0..100 {
            // As many in flight as there is memory for.
            for _ in 0..random.usize(1..60) {
                number += 1;
                let block = random.u64(..shape.blocks);
                // A waiting write may succeed or fail, so do not write its block again.
                if waiting.iter().any(|(_, it)| *it == block) {
                    continue;
                }
                match write_early(&mut fixture, &shape, block, number) {
                    Some(true) => {
                        answered += 1;
                        model[block as usize] = number;
                    }
                    Some(false) => waiting.push((number, block)),
                    None => break,
                }
            }
            assert!(fixture.handle.flush(0) == Outcome::Taken);
            fixture.run();
            while let Some(reply) = fixture.handle.take() {
                if reply.token == 0 {
                    assert_eq!(reply.status, Status::Ok, "a flush: something was lost");
                    continue;
                }
                let at = waiting.iter().position(|it| it.0 as u32 == reply.token).unwrap();
                let (number, block) = waiting.swap_remove(at);
                match reply.status {
                    Status::Ok => model[block as usize] = number,
                    Status::NoSpc => refused += 1,
                    other => panic!("{other}"),
                }
            }
            assert_eq!(read(&mut fixture.handle, &shape).unwrap(), model);
        }
        drop(fixture);
        directory.changes().iter().for_each(|change| medium.apply(change));
        let found = medium.cut(|_, _| 0);
        let mut fixture = Fixture::open(&found, &shape);
        assert_eq!(read(&mut fixture.handle, &shape).unwrap(), model, "after a cut");
    }
    assert!(refused > 1000 && answered > 1000, "{refused} refused, {answered} answered early");
}

/// Writes random blocks until this number of bytes was refused.
fn fill(fixture: &mut Fixture, shape: &Shape, random: &mut fastrand::Rng, bytes: u64) {
    let (mut refused, mut steps) = (0, 0);
    while refused * u64::from(shape.block_bytes) < bytes {
        let first = random.u64(..shape.blocks);
        match fixture.take(Step::Write { first, count: 1, fua: random.bool() }) {
            Status::Ok if steps % shape.blocks == 0 => {
                fixture.take(Step::Snapshot);
            }
            Status::Ok => {}
            Status::NoSpc => refused += 1,
            other => panic!("{other}"),
        }
        steps += 1;
        assert!(steps < 100_000, "it has no end: {:?}", fixture.pool.counts());
    }
    assert!(!fixture.pool.is_latched());
}

/// Fills a pool, continues until ten segments of writes were refused, frees space, and checks that
/// the pool works again. Then repeats this with the contents it has by then.
fn wedge(shape: &Shape, seed: u64, free_space: impl Fn(&mut Fixture)) {
    let mut random = fastrand::Rng::with_seed(seed);
    let directory = SimulatedDirectory::default();
    format(&directory, shape);
    let mut fixture = Fixture::open(&directory, shape);
    for _ in 0..2 {
        fill(&mut fixture, shape, &mut random, 10 * u64::from(shape.options.segment_bytes));
        free_space(&mut fixture);
        // The pool searches for space after a request that may have freed some, and otherwise only
        // now and then.
        let write = Step::Write { first: 0, count: 1, fua: true };
        assert!(
            (0..40).any(|_| fixture.take(write.clone()).is_ok()),
            "{:?}",
            fixture.pool.counts()
        );
        for round in 0..50 {
            let first = random.u64(..8);
            let status = fixture.take(Step::Write { first, count: 1, fua: true });
            assert_eq!(status, Status::Ok, "round {round}: {:?}", fixture.pool.counts());
        }
        let contents = read(&mut fixture.handle, shape).unwrap();
        drop(fixture);
        fixture = Fixture::open(&directory, shape);
        assert_eq!(read(&mut fixture.handle, shape).unwrap(), contents);
    }
}

/// Discards everything, `part` blocks at a time.
fn discard(fixture: &mut Fixture, blocks: u64, part: u64) {
    for first in (0..blocks).step_by(part as usize) {
        let count = part.min(blocks - first);
        assert_eq!(
            fixture.take(Step::Discard { first, count, fua: false }),
            Status::Ok,
            "{:?}",
            fixture.pool.counts()
        );
    }
}

fn destroy_snapshots(fixture: &mut Fixture) {
    for meta in fixture.pool.list().into_iter().filter(|meta| meta.is_snapshot) {
        let mut answer = fixture.pool.submit_change(Change::Destroy { id: meta.id });
        fixture.run();
        let status = answer.take().map(|reply| reply.status);
        assert_eq!(status, Some(Status::Ok), "{:?}", fixture.pool.counts());
    }
}

/// A volume with more data than fit, in few leaves.
#[test]
fn a_discard_frees_space_in_a_full_pool() {
    for (seed, segments_max) in [(1, 24), (2, 30)] {
        let mut shape = shape(segments_max);
        shape.blocks = segments_max as u64 * 16;
        wedge(&shape, seed, |fixture| {
            discard(fixture, shape.blocks, 16);
            destroy_snapshots(fixture);
        });
    }
}

/// A volume that fits, but not together with a snapshot.
#[test]
fn destroying_a_snapshot_frees_space_in_a_full_pool() {
    for (seed, segments_max) in [(1, 24), (2, 40)] {
        let mut shape = shape(segments_max);
        shape.blocks = segments_max as u64 * 4;
        wedge(&shape, seed, destroy_snapshots);
    }
}

/// Random blocks in a volume whose map is many times larger than a segment: a checkpoint of all
/// pages that could change would exceed the reserve.
#[test]
fn a_checkpoint_of_many_pages_finds_space_in_a_full_pool() {
    for (seed, segments_max) in [(1, 60), (2, 90)] {
        let mut shape = shape(segments_max);
        (shape.block_bytes, shape.blocks) = (512, 256 * 64);
        shape.options.checkpoint_bytes = 1 << 20;
        wedge(&shape, seed, |fixture| {
            discard(fixture, shape.blocks, 4096);
            destroy_snapshots(fixture);
        });
    }
}

/// What ends the growth of a pool.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The number of segments is limited, as on a disk.
    Segments,
    /// The file system is full.
    Space,
    /// Other programs take the rest of the file system.
    Others,
    /// No further segment can be made, although the file system reports free space.
    Quota,
}

/// A pool accepts only as much data as can be overwritten indefinitely, whatever ended its growth.
/// A few blocks are discarded first, to have the space of one write.
#[test]
fn a_full_pool_is_written_again_and_again_whatever_made_it_full() {
    for (seed, end) in (0..12).zip([End::Segments, End::Space, End::Others, End::Quota].repeat(3)) {
        let mut random = fastrand::Rng::with_seed(seed);
        let count = random.usize(40..80);
        let mut shape = shape(if matches!(end, End::Segments) { count } else { 1 << 20 });
        // Segments so long that the unused space at their ends is negligible.
        shape.options.segment_bytes = 128 << 10;
        shape.options.checkpoint_bytes = 512 << 10;
        shape.blocks = count as u64 * 64;
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let store = SimulatedStore::new(&directory);
        let bytes = count as u64 * u64::from(shape.options.segment_bytes) + (64 << 10);
        if matches!(end, End::Space) {
            store.set_bytes_max(bytes);
        }
        let mut fixture = Fixture::on(store.clone(), &directory, &shape).unwrap();
        let mut order: Vec<u64> = (0..shape.blocks).collect();
        random.shuffle(&mut order);
        let mut written = Vec::new();
        for (at, block) in order.into_iter().enumerate() {
            if !matches!(end, End::Space) {
                // In a running pool a thread does this.
                fixture.pool.segments().prepare(1, 128 << 10);
            }
            if at == count * 32 && matches!(end, End::Others) {
                store.set_bytes_max(directory.bytes());
            } else if at == count * 32 && matches!(end, End::Quota) {
                store.set_faults(FaultPlan { full: When::After(0), ..FaultPlan::default() });
            }
            match fixture.take(Step::Write { first: block, count: 1, fua: false }) {
                Status::Ok => written.push(block),
                Status::NoSpc => break,
                other => panic!("{other}"),
            }
            assert!(written.len() < shape.blocks as usize, "{end:?}: it is not full");
        }
        for block in written.drain(..4) {
            let step = Step::Discard { first: block, count: 1, fua: false };
            assert_eq!(
                fixture.take(step),
                Status::Ok,
                "{seed} {end:?}: {:?}",
                fixture.pool.counts()
            );
        }
        for round in 0..2000 {
            let first = written[random.usize(..written.len())];
            let status = fixture.take(Step::Write { first, count: 1, fua: false });
            let (counts, segments) = (fixture.pool.counts(), fixture.pool.segments());
            assert_eq!(status, Status::Ok, "{seed} {end:?}, {round}: {counts:?}, {segments:?}");
        }
    }
}

/// Growing a volume or a reservation does not use the reserve of requests that free space: in a
/// full pool these still succeed, and growing fails.
#[test]
fn a_volume_does_not_grow_in_a_full_pool() {
    let mut shape = shape(24);
    shape.blocks = 600;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    let change = |fixture: &mut Fixture, change: Change| {
        let mut answer = fixture.pool.submit_change(change);
        fixture.run();
        answer.take().map(|reply| reply.status).unwrap()
    };
    let name = "w".to_owned();
    let meta = VolumeMeta { name, blocks: 8, ..fixture.pool.find("v").unwrap().meta.clone() };
    assert_eq!(change(&mut fixture, Change::Create(meta)), Status::Ok);
    let id = fixture.pool.find("w").unwrap().meta.id;
    assert_eq!(change(&mut fixture, Change::Resize { id, blocks: 16 }), Status::Ok);
    fill(&mut fixture, &shape, &mut fastrand::Rng::with_seed(8), 64 << 10);
    for round in 0..50 {
        let status = change(&mut fixture, Change::Resize { id, blocks: 17 + round });
        assert_eq!(status, Status::NoSpc, "round {round}: {:?}", fixture.pool.counts());
        let status = change(&mut fixture, Change::Reserve { id, bytes: 2048 });
        assert_eq!(status, Status::NoSpc, "round {round}: {:?}", fixture.pool.counts());
    }
    assert_eq!(change(&mut fixture, Change::Resize { id, blocks: 15 }), Status::Ok);
    assert_eq!(change(&mut fixture, Change::Reserve { id, bytes: 0 }), Status::Ok);
}

/// A full pool accepts any number of discards, even if none of them frees space.
#[test]
fn a_full_pool_takes_any_number_of_discards() {
    let mut shape = shape(24);
    shape.blocks = 600;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    assert_eq!(fixture.take(Step::Discard { first: 0, count: 1, fua: false }), Status::Ok);
    fill(&mut fixture, &shape, &mut fastrand::Rng::with_seed(3), 16 << 10);
    for round in 0..1000 {
        let first = round % 3;
        let status = fixture.take(Step::Discard { first, count: 1, fua: false });
        assert_eq!(status, Status::Ok, "round {round}: {:?}", fixture.pool.counts());
        if round % 10 == 0 {
            assert_eq!(fixture.take(Step::Flush), Status::Ok);
        }
    }
    let contents = fixture.contents();
    fixture.history.check(usize::MAX, &contents);
    drop(fixture);
    assert_eq!(Fixture::open(&directory, &shape).contents(), contents);
}

/// A full pool is killed and opened repeatedly: each opening finds the contents and accepts
/// discards, and none takes a segment.
#[test]
fn a_full_pool_opens_any_number_of_times() {
    for seed in 0..4 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut shape = shape(30);
        shape.blocks = 600;
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut fixture = Fixture::open(&directory, &shape);
        fill(&mut fixture, &shape, &mut random, 64 << 10);
        for round in 0..60 {
            let contents = read(&mut fixture.handle, &shape).unwrap();
            drop(fixture);
            fixture = Fixture::open(&directory, &shape);
            let found = read(&mut fixture.handle, &shape).unwrap();
            assert_eq!(found, contents, "seed {seed}, round {round}");
            for _ in 0..random.usize(..6) {
                let first = random.u64(..shape.blocks);
                let status = fixture.take(Step::Write { first, count: 1, fua: random.bool() });
                assert!(matches!(status, Status::Ok | Status::NoSpc), "{status}");
            }
            let discard = Step::Discard { first: random.u64(..shape.blocks), count: 1, fua: false };
            let counts = fixture.pool.counts();
            assert_eq!(fixture.take(discard), Status::Ok, "seed {seed}, round {round}: {counts:?}");
        }
        discard(&mut fixture, shape.blocks, 16);
        destroy_snapshots(&mut fixture);
        let write = Step::Write { first: 0, count: 1, fua: true };
        assert!(
            (0..40).any(|_| fixture.take(write.clone()).is_ok()),
            "{:?}",
            fixture.pool.counts()
        );
    }
}

/// Regression: writes that arrived together with one without space were refused with it.
#[test]
fn a_write_without_space_is_refused_alone() {
    let mut shape = shape(24);
    shape.blocks = 600;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    fill(&mut fixture, &shape, &mut fastrand::Rng::with_seed(4), 16 << 10);
    let blocks = |fixture: &mut Fixture, token: u32, count: u64| {
        let len = count as usize * 2048;
        let outcome = fixture.handle.write(0, len, &|_, into: &mut [u8]| into.fill(7), token, true);
        assert!(outcome == Outcome::Taken);
    };
    blocks(&mut fixture, 1, 7);
    assert!(fixture.handle.flush(2) == Outcome::Taken);
    assert!(fixture.handle.zero(100 * 2048, 2048, 3, true) == Outcome::Taken);
    blocks(&mut fixture, 4, 7);
    assert!(fixture.handle.zero(101 * 2048, 2048, 5, false) == Outcome::Taken);
    fixture.run();
    let mut answers = std::iter::from_fn(|| fixture.handle.take()).collect::<Vec<_>>();
    answers.sort_by_key(|reply| reply.token);
    let answers: Vec<_> = answers.iter().map(|reply| reply.status).collect();
    assert_eq!(answers[0], Status::NoSpc);
    // The discard before the fourth request may have freed space for it.
    let others = [answers[1], answers[2], answers[4]];
    assert_eq!(others, [Status::Ok; 3]);
}

/// Regression: in a full pool a flush in one group with a refused catalogue change was answered
/// without a sync.
#[test]
fn a_flush_concurrent_with_a_refused_change_is_durable() {
    let mut shape = shape(24);
    shape.blocks = 600;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut medium = directory.medium();
    let mut fixture = Fixture::open(&directory, &shape);
    fill(&mut fixture, &shape, &mut fastrand::Rng::with_seed(6), 16 << 10);
    let contents = read(&mut fixture.handle, &shape).unwrap();
    let block = contents.iter().position(|number| *number != 0).unwrap();
    let discard = Step::Discard { first: block as u64, count: 1, fua: false };
    assert_eq!(fixture.take(discard), Status::Ok);
    assert!(fixture.handle.flush(7) == Outcome::Taken);
    let meta = fixture.pool.find("v").unwrap().meta.clone();
    let mut refused = fixture.pool.submit_change(Change::Create(meta));
    fixture.run();
    assert_eq!(refused.take().map(|reply| reply.status), Some(Status::Inval));
    assert_eq!(fixture.handle.take().map(|reply| reply.status), Some(Status::Ok));
    directory.changes().iter().for_each(|change| medium.apply(change));
    let mut fixture = Fixture::open(&medium.cut(|_, _| 0), &shape);
    let found = read(&mut fixture.handle, &shape).unwrap();
    assert_eq!((found[block], found.len()), (0, contents.len()));
}

/// Groups in flight together change more pages than each of them: admission must leave enough for a
/// checkpoint after all of them have landed.
#[test]
fn groups_on_their_way_leave_what_a_checkpoint_takes() {
    for segments_max in 30..50 {
        let mut random = fastrand::Rng::with_seed(segments_max as u64);
        let mut shape = shape(segments_max);
        (shape.block_bytes, shape.blocks, shape.depth) = (512, 256 * 64, 8);
        let options = &mut shape.options;
        (options.checkpoint_bytes, options.pipeline_bytes) = (1 << 20, 0);
        (options.group_records, options.memory_bytes) = (8, 1 << 20);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut fixture = Fixture::open(&directory, &shape);
        for round in 0..20 {
            // One block of each leaf.
            let block = random.u64(..2);
            for leaf in 0..64 {
                let first = leaf * 256 + block;
                assert!(fixture.begin(Step::Write { first, count: 1, fua: false }).is_ok());
            }
            while fixture.committer.turn() == Turn::Worked {
                let segments = fixture.pool.segments();
                let (free, reserved) = (segments.free(), segments.reserved());
                assert!(free >= reserved, "{segments_max}, {round}: {free}, {segments:?}");
            }
            let status = fixture.go_on();
            assert!(matches!(status, Status::Ok | Status::NoSpc), "{status}");
        }
        discard(&mut fixture, shape.blocks, 4096);
        let write = Step::Write { first: 0, count: 1, fua: true };
        assert!(
            (0..40).any(|_| fixture.take(write.clone()).is_ok()),
            "{:?}",
            fixture.pool.counts()
        );
    }
}

/// Clones share a root until each of them is written: the dirty count must include the roots that a
/// checkpoint then writes.
#[test]
fn a_root_that_is_new_is_counted() {
    let mut shape = shape(400);
    (shape.blocks, shape.options.checkpoint_bytes) = (8, 4 << 20);
    shape.options.map_cache_bytes = 1 << 20;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    assert_eq!(fixture.take(Step::Write { first: 0, count: 8, fua: true }), Status::Ok);
    let live = fixture.pool.find("v").unwrap().meta.clone();
    for number in 0..40 {
        let meta = VolumeMeta { name: format!("clone-{number}"), origin: live.id, ..live.clone() };
        let mut answer = fixture.pool.submit_change(Change::Copy(meta));
        fixture.run();
        assert_eq!(answer.take().map(|reply| reply.status), Some(Status::Ok));
    }
    let checkpoint = |fixture: &mut Fixture| {
        let before = fixture.pool.activity().page_bytes;
        let mut answer = fixture.pool.submit(Body::Checkpoint);
        fixture.run();
        assert_eq!(answer.take().map(|reply| reply.status), Some(Status::Ok));
        fixture.pool.activity().page_bytes - before
    };
    checkpoint(&mut fixture);
    for number in 0..40 {
        let clone = fixture.pool.find(&format!("clone-{number}")).unwrap();
        let mut handle = VolumeHandle::open(&fixture.pool, clone, shape.compression, 1).unwrap();
        let outcome = handle.write(0, 2048, &|_, into: &mut [u8]| into.fill(number), 0, true);
        assert!(outcome == Outcome::Taken);
        fixture.run();
        assert_eq!(handle.take().map(|reply| reply.status), Some(Status::Ok));
    }
    let counted = fixture.pool.segments().dirty_bytes();
    let written = checkpoint(&mut fixture);
    // The pages of the catalogue are not in the count.
    assert!((120 << 12..=counted + (8 << 12)).contains(&written), "{written} of {counted}");
}

/// A file system that is full at times: the contents stay valid, and when it has space permanently,
/// every write succeeds.
#[test]
fn a_file_system_that_is_full_now_and_then_breaks_nothing() {
    let seed = Seed::from_env();
    for stream in 9200..9260 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let mut shape = crate::shape(&mut random);
        shape.options.segments_max = 39;
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let store = SimulatedStore::new(&directory);
        let mut fixture = Fixture::on(store.clone(), &directory, &shape).unwrap();
        for _ in 0..20 {
            let full = random.bool();
            store.set_faults(if full {
                FaultPlan { full: When::After(random.u64(..4)), ..FaultPlan::default() }
            } else {
                FaultPlan::default()
            });
            let count = random.usize(1..30);
            crate::work(&mut fixture, &mut random, &shape, count);
            let contents = fixture.contents();
            fixture.history.check(usize::MAX, &contents);
        }
        assert!(!fixture.pool.is_latched());
        store.set_faults(FaultPlan::default());
        destroy_snapshots(&mut fixture);
        let write = Step::Write { first: 0, count: 1, fua: true };
        assert!(
            (0..40).any(|_| fixture.take(write.clone()).is_ok()),
            "{:?}",
            fixture.pool.counts()
        );
    }
}

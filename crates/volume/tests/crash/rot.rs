//! Rot after a crash: bits and sectors of the last writes change before the pool is opened again.
//! An idle log has stated what is durable, so none of it is lost silently: the opening fails and
//! names the damage, or each block is intact or an error. Two copies together have everything.

use blockyard_core::Status;
use blockyard_store::mirror::assemble::Terms;
use blockyard_testing::directory::{Medium, SECTOR, SimulatedDirectory};
use blockyard_testing::seed::Seed;
use blockyard_volume::VolumeError;
use blockyard_volume_admin::check::check_in;
use blockyard_volume_format::superblock::{self, SLOT_BYTES, Superblock};
use blockyard_volume_format::{FormatError, group};

use crate::fixture::{self, Fixture, History, Shape, Step, USE, format};
use crate::{fingerprint, shape, work};

/// Number of groups at the end of the log in which every bit is flipped.
const LAST: usize = 6;

/// A part of a file.
#[derive(Clone, Debug)]
struct Range {
    name: String,
    offset: u64,
    len: u64,
}

/// The bytes of a file.
fn content(directory: &SimulatedDirectory, name: &str) -> Vec<u8> {
    let file = directory.open(name).unwrap();
    let mut bytes = vec![0; file.len() as usize];
    file.read_at(0, &mut bytes).unwrap();
    bytes
}

/// The last groups of the log, and the used parts of both superblock slots.
fn last(directory: &SimulatedDirectory, count: usize) -> Vec<Range> {
    let mut groups = Vec::new();
    let mut slots = Vec::new();
    for name in directory.names() {
        let bytes = content(directory, &name);
        if name.ends_with(superblock::FILE) {
            let slot = |at| Range { name: name.clone(), offset: at, len: superblock::BYTES as u64 };
            slots.extend([0, SLOT_BYTES as u64].map(slot));
        }
        if !name.contains("segment-") {
            continue;
        }
        for offset in (0..bytes.len()).step_by(SECTOR) {
            if let Some((head, ..)) = group::parse(&bytes[offset..], SECTOR as u32) {
                let len = u64::from(head.head_bytes + head.payload_bytes);
                groups
                    .push((head.number, Range { name: name.clone(), offset: offset as u64, len }));
            }
        }
    }
    let newest = groups.iter().map(|(number, _)| *number).max().unwrap_or(0);
    groups.retain(|(number, _)| number + count as u64 > newest);
    slots.into_iter().chain(groups.into_iter().map(|(_, range)| range)).collect()
}

/// The results of openings: all blocks intact, some unreadable, or refused.
#[derive(Debug, Default)]
struct Felt {
    right: u64,
    errors: u64,
    refused: u64,
}

/// Opens what a crash and rot have left. It must have at least `least` steps, or report the damage;
/// two copies must have all of it.
fn judge(
    found: &SimulatedDirectory,
    shape: &Shape,
    history: &History,
    least: usize,
    felt: &mut Felt,
) {
    let store = fixture::store(found, shape, USE);
    let mut fixture = match store.and_then(|store| Fixture::of(store, found, shape)) {
        Ok(fixture) => fixture,
        Err(VolumeError::Format(error)) if !shape.mirror => {
            assert!(matches!(error, FormatError::Log { .. }), "{error}");
            felt.refused += 1;
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let blocks = fixture::read_each(&mut fixture.handle, shape);
    let list = fixture.pool.list().into_iter().filter(|meta| meta.is_snapshot);
    let snapshots: Vec<String> = list.map(|meta| meta.name).collect();
    history.check_some(least, &blocks, &snapshots);
    let is_whole = blocks.iter().all(Option::is_some);
    assert!(is_whole || !shape.mirror, "two copies have everything: {blocks:?}");
    if is_whole { felt.right += 1 } else { felt.errors += 1 }
}

/// A small workload that matches a reported loss: writes without FUA, a flush, then idle.
fn flushed(directory: &SimulatedDirectory, shape: &Shape) -> Fixture {
    format(directory, shape);
    let mut fixture = Fixture::open(directory, shape);
    for first in 0..shape.blocks {
        assert_eq!(fixture.take(Step::Write { first, count: 1, fua: true }), Status::Ok);
    }
    fixture.rest();
    for first in 0..shape.blocks {
        assert_eq!(fixture.take(Step::Write { first, count: 1, fua: false }), Status::Ok);
    }
    assert_eq!(fixture.take(Step::Flush), Status::Ok);
    fixture
}

fn few_blocks(mirror: bool) -> Shape {
    let mut shape = Shape { mirror, blocks: 5, ..Shape::tiny() };
    // No checkpoint, and no sync other than the flush.
    shape.options.checkpoint_bytes = 1 << 20;
    shape.options.sync_bytes = 1 << 20;
    shape
}

/// Flips each bit of the ranges, or one bit of each byte, and overwrites each of their sectors.
fn each_rot(ranges: &[Range], every_bit: bool, mut what: impl FnMut(&Range, u64, usize, u8)) {
    for range in ranges {
        for at in range.offset..range.offset + range.len {
            let bits = if every_bit { 0..8 } else { (at % 8) as u8..(at % 8) as u8 + 1 };
            bits.for_each(|bit| what(range, at, 1, 1 << bit));
        }
        let sectors = (range.offset..range.offset + range.len).step_by(SECTOR);
        sectors.for_each(|at| what(range, at, SECTOR, 0xa5));
    }
}

/// Regression: 64 writes of 128 KiB and a flush were answered, the pool was idle for 20 s and was
/// killed, and a bit flipped in one of the last blocks. 20 of 20 openings silently returned to the
/// state before the damaged group, with 160 to 1888 of 2048 flushed blocks old, and `check`
/// reported no damage. This test flips every bit of the last groups and of both superblocks, after
/// a kill and after power cuts that also tear a write in flight.
#[test]
fn every_bit_of_the_last_groups() {
    let (directory, shape) = (SimulatedDirectory::default(), few_blocks(false));
    let mut fixture = flushed(&directory, &shape);
    fixture.rest();
    let mut medium = directory.medium();
    let (moment, recorded) = (directory.change_count(), fixture.history.len());
    assert_eq!(fixture.history.recorded(moment), recorded, "an idle log records what is durable");
    fixture.rest();
    assert_eq!(directory.change_count(), moment, "and only once");
    // The header of one more group, its block, both, or neither.
    assert_eq!(fixture.take(Step::Write { first: 0, count: 1, fua: false }), Status::Ok);
    directory.changes()[moment..].iter().for_each(|change| medium.apply(change));
    let mut images = vec![medium.kill()];
    assert_eq!(medium.choices(), [1, 2, 2], "the head and the block are not durable");
    images.extend(
        (0..3).map(|kept| medium.cut(|at, _| if at > 0 { kept >> (at - 1) & 1 } else { 0 })),
    );
    let mut felt = Felt::default();
    for (number, image) in images.iter().enumerate() {
        let (ranges, base) = (last(image, LAST), image.medium());
        assert!(ranges.len() > LAST);
        each_rot(&ranges, number == 1, |range, at, len, bits| {
            let found = base.kill();
            assert!(found.rot(&range.name, at, len, bits));
            judge(&found, &shape, &fixture.history, recorded, &mut felt);
        });
    }
    assert!(felt.right > 0 && felt.errors > 0 && felt.refused > 0, "{felt:?}");
}

#[test]
fn two_copies_have_everything_whatever_rots_in_one() {
    let (directory, shape) = (SimulatedDirectory::default(), few_blocks(true));
    let fixture = flushed(&directory, &shape);
    // The first image is from before the log was idle.
    let (steps, mut images) = (fixture.history.len(), vec![directory.medium()]);
    let (mut fixture, mut felt) = (fixture, Felt::default());
    fixture.rest();
    images.push(directory.medium());
    for base in images {
        each_rot(&last(&base.kill(), 3), false, |range, at, len, bits| {
            let found = base.kill();
            assert!(found.rot(&range.name, at, len, bits));
            judge(&found, &shape, &fixture.history, steps, &mut felt);
        });
    }
    assert!(felt.right > 0);
}

/// Closes a pool and damages the newest superblock.
fn closed_and_lost(shape: &Shape) -> (Medium, Fixture) {
    let directory = SimulatedDirectory::default();
    let mut fixture = flushed(&directory, shape);
    fixture.close();
    let name = superblock::FILE;
    let newest = Superblock::newest(&content(&directory, name)).unwrap();
    assert!(directory.rot(name, newest.slot() + 20, 1, 1));
    (directory.medium(), fixture)
}

/// Regression: only the superblock that a clean stop writes stated that the last groups are
/// durable. If it was lost too, they were silently left out.
#[test]
fn after_a_clean_stop_the_older_superblock_is_enough() {
    let shape = few_blocks(false);
    let (base, fixture) = closed_and_lost(&shape);
    let steps = fixture.history.len();
    let mut whole = Felt::default();
    judge(&base.kill(), &shape, &fixture.history, steps, &mut whole);
    assert_eq!(whole.right, 1, "the log has everything");
    let mut felt = Felt::default();
    let groups = last(&base.kill(), LAST).into_iter().filter(|it| it.name != superblock::FILE);
    each_rot(&groups.collect::<Vec<_>>(), false, |range, at, len, bits| {
        let found = base.kill();
        assert!(found.rot(&range.name, at, len, bits));
        judge(&found, &shape, &fixture.history, steps, &mut felt);
    });
    assert!(felt.right > 0 && felt.errors > 0 && felt.refused > 0, "{felt:?}");
}

/// Regression: a group rotted before its flush was recorded. The opening left out intact later
/// groups, and neither the log nor `check` said so.
#[test]
fn check_counts_intact_groups_after_the_end_of_the_log() {
    let (directory, shape) = (SimulatedDirectory::default(), few_blocks(false));
    drop(flushed(&directory, &shape));
    let base = directory.medium();
    let unused = |found: &SimulatedDirectory| {
        let store = fixture::store(found, &shape, Terms::ReadOnly).unwrap();
        check_in(store, &mut |_| {}).map(|report| report.unused_groups)
    };
    assert_eq!(unused(&base.kill()).unwrap(), 0);
    let groups = last(&base.kill(), LAST).into_iter().filter(|it| it.name != superblock::FILE);
    let counts: Vec<u64> = groups
        .filter_map(|range| {
            let found = base.kill();
            assert!(found.rot(&range.name, range.offset + 40, 1, 2));
            unused(&found).ok()
        })
        .collect();
    assert!(counts.contains(&0) && counts.iter().any(|count| *count > 0), "{counts:?}");
}

/// Regression: `check` reported such a pool as undamaged; it must report what an opening does.
#[test]
fn check_names_what_has_rotted_in_the_last_groups() {
    let (directory, shape) = (SimulatedDirectory::default(), few_blocks(false));
    let mut fixture = flushed(&directory, &shape);
    fixture.rest();
    let base = directory.medium();
    let ranges = last(&base.kill(), LAST);
    // The last group is the empty one, which no group follows.
    let data = ranges.iter().filter(|it| it.len > SECTOR as u64 && it.name != superblock::FILE);
    let mut seen = [0, 0];
    for range in data {
        for (place, named) in [(range.offset + 40, 0), (range.offset + SECTOR as u64 + 9, 1)] {
            let found = base.kill();
            assert!(found.rot(&range.name, place, 1, 2));
            let store = fixture::store(&found, &shape, Terms::ReadOnly).unwrap();
            match check_in(store, &mut |_| {}) {
                Err(VolumeError::Format(FormatError::Log { segment, offset, .. })) => {
                    assert_eq!(format!("segment-{segment:08x}"), range.name);
                    assert_eq!((u64::from(offset), named), (range.offset, 0));
                }
                Ok(report) => assert_eq!((report.damaged, named), (1, 1)),
                Err(error) => panic!("{error}"),
            }
            seen[named] += 1;
        }
    }
    assert!(seen[0] >= LAST - 1 && seen[1] >= LAST - 1, "{seen:?}");
}

/// Regression: a damaged group in a full segment was not detected, because the group that states it
/// as durable is several segments later.
#[test]
fn a_group_several_segments_later_is_found() {
    let (directory, mut shape) = (SimulatedDirectory::default(), few_blocks(false));
    (shape.block_bytes, shape.blocks) = (2048, 40);
    let mut fixture = flushed(&directory, &shape);
    fixture.rest();
    let base = directory.medium();
    let groups: Vec<Range> = last(&base.kill(), shape.blocks as usize + 1);
    let data = groups.iter().filter(|it| it.len > 2048);
    assert_eq!(data.clone().count(), shape.blocks as usize, "a group for each block");
    let mut felt = Felt::default();
    for range in data {
        for place in [0, 8, 33, 57, 63, 511] {
            let found = base.kill();
            assert!(found.rot(&range.name, range.offset + place, 1, 16));
            judge(&found, &shape, &fixture.history, fixture.history.len(), &mut felt);
        }
    }
    assert_eq!(felt.right + felt.errors, 0, "{felt:?}");
}

/// Runs a workload with idle phases, crashes it at every operation, and damages what is left.
fn rot_everywhere(stream: u64, mirror: bool, felt: &mut Felt) {
    let mut random = Seed::from_env().rng(stream);
    // A group is at most half a segment long, as in production.
    let mut shape = Shape { mirror, ..shape(&mut random) };
    shape.block_bytes = shape.block_bytes.min(1024);
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    // The opening has stated that the volume exists.
    directory.settle();
    let mut medium = directory.medium();
    for _ in 0..random.usize(2..5) {
        let count = random.usize(2..8);
        work(&mut fixture, &mut random, &shape, count);
        fixture.rest();
    }
    work(&mut fixture, &mut random, &shape, 3);
    let (history, changes) = (fixture.history.clone(), directory.changes());
    drop(fixture);
    for moment in 0..=changes.len() {
        let image = match random.u8(..3) {
            0 => medium.kill(),
            1 => medium.cut(|_, _| 0),
            _ => medium.cut(|_, count| random.usize(..count)),
        };
        let least = if mirror { history.durable(moment) } else { history.recorded(moment) };
        let ranges = last(&image, 8);
        let range = &ranges[random.usize(..ranges.len())];
        let at = range.offset + random.u64(..range.len);
        let sector = at - at % SECTOR as u64;
        let (at, len) = if random.bool() { (at, 1) } else { (sector, SECTOR) };
        let before = fingerprint(&image);
        assert!(image.rot(&range.name, at, len, 1 << random.u8(..8)));
        assert_ne!(fingerprint(&image), before);
        judge(&image, &shape, &history, least, felt);
        if let Some(change) = changes.get(moment) {
            medium.apply(change);
        }
    }
}

#[test]
fn recorded_groups_are_never_lost_silently() {
    let mut felt = Felt::default();
    for stream in 9000..9200 {
        let _watch = Seed::from_env().watch(&format!("stream {stream}"));
        rot_everywhere(stream, false, &mut felt);
    }
    assert!(felt.right > 100 && felt.errors > 100 && felt.refused > 100, "{felt:?}");
}

#[test]
fn of_two_copies_nothing_durable_is_lost_by_rot_in_one() {
    let mut felt = Felt::default();
    for stream in 9500..9540 {
        let _watch = Seed::from_env().watch(&format!("stream {stream}"));
        rot_everywhere(stream, true, &mut felt);
    }
    assert!(felt.right > 500, "{felt:?}");
}

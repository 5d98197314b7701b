//! Disk faults: lost and misdirected writes, misdirected reads, and rot. A read returns the data
//! that were written, or an error that names the place; other data stay readable.

use blockyard_core::Status;
use blockyard_store::mirror::assemble::Terms;
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::{FaultPlan, SimulatedStore, When};
use blockyard_volume::handle::VolumeHandle;
use blockyard_volume::record::Body;
use blockyard_volume::{Compression, Running, VolumeError};
use blockyard_volume_admin::check::check_in;
use blockyard_volume_admin::scrub::scrub;
use blockyard_volume_format::catalogue::Change;
use blockyard_volume_format::{FormatError, group};

use crate::fixture::{Fixture, Shape, Step, USE, format};
use crate::{fixture, shape, work};

/// Writes that the disk reports as done but loses or misdirects. A read returns old or new data of
/// that block, or an error, and never other data.
#[test]
fn lost_and_misdirected_writes_are_never_returned() {
    let seed = Seed::from_env();
    let mut refused = 0;
    for stream in 7000..7150 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let shape = shape(&mut random);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let store = SimulatedStore::new(&directory);
        let mut fixture = Fixture::on(store.clone(), &directory, &shape).unwrap();
        let number = random.u64(1..20);
        let lost = random.bool();
        store.set_faults(if lost {
            FaultPlan { lost_writes: When::Only(number), ..FaultPlan::default() }
        } else {
            FaultPlan { misdirected_writes: When::Only(number), ..FaultPlan::default() }
        });
        for _ in 0..20 {
            let first = random.u64(..shape.blocks);
            // A write of part of a block fails if the rest cannot be read.
            _ = fixture.take(Step::Write { first, count: 1, fua: random.bool() });
            match fixture::read(&mut fixture.handle, &shape) {
                Ok(found) => fixture.history.check(0, &(found, Vec::new())),
                Err(status) => {
                    assert_eq!(status, Status::Protection);
                    refused += 1;
                }
            }
        }
        drop(fixture);
        store.set_faults(FaultPlan::default());
        let opened = Fixture::on(SimulatedStore::new(&directory), &directory, &shape);
        refused += usize::from(opened.is_err());
    }
    assert!(refused > 20, "the faults were felt: {refused}");
}

/// A bit on disk changes: the pool reports an error with the place, or the bit was not in use.
#[test]
fn rot_is_found() {
    let seed = Seed::from_env();
    let (mut refused, mut failed) = (0, 0);
    for stream in 8000..8200 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let shape = shape(&mut random);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut fixture = Fixture::open(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 20);
        assert_eq!(fixture.take(Step::Flush), Status::Ok);
        let history = fixture.history.clone();
        drop(fixture);
        let names = directory.names();
        let file = directory.open(&names[random.usize(..names.len())]).unwrap();
        for _ in 0..8 {
            let at = random.u64(..file.len());
            let mut byte = [0];
            file.read_at(at, &mut byte).unwrap();
            file.write_at(at, &[byte[0] ^ 1 << random.u8(..8)]).unwrap();
        }
        match Fixture::on(SimulatedStore::new(&directory), &directory, &shape) {
            Err(_) => refused += 1,
            Ok(mut fixture) => match fixture::read(&mut fixture.handle, &shape) {
                Err(status) => {
                    assert_eq!(status, Status::Protection);
                    failed += 1;
                }
                // Rot in the last group looks like the end of the log, so the contents are a state
                // that existed.
                Ok(found) => history.check_volume(&found),
            },
        }
    }
    assert!(refused > 0 && failed > 0, "the rot was felt: {refused} refused, {failed} failed");
}

/// Reads that the disk misdirects: the checksum detects them.
#[test]
fn misdirected_reads_are_never_returned() {
    let seed = Seed::from_env();
    let mut refused = 0;
    for stream in 7500..7600 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let shape = shape(&mut random);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let store = SimulatedStore::new(&directory);
        let mut fixture = Fixture::on(store.clone(), &directory, &shape).unwrap();
        work(&mut fixture, &mut random, &shape, 20);
        let (wanted, history) = (fixture.contents(), fixture.history.clone());
        store.set_faults(FaultPlan {
            misdirected_reads: When::Every(random.u64(1..4)),
            ..FaultPlan::default()
        });
        for _ in 0..4 {
            match fixture::read(&mut fixture.handle, &shape) {
                Ok(found) => assert_eq!(found, wanted.0),
                Err(status) => {
                    assert_eq!(status, Status::Protection);
                    refused += 1;
                }
            }
        }
        drop(fixture);
        // An opening reads too: it fails, or finds a state that existed.
        match Fixture::on(store.clone(), &directory, &shape) {
            Err(_) => refused += 1,
            Ok(mut fixture) => {
                store.set_faults(FaultPlan::default());
                // The last group may be taken for missing.
                history.check_volume(&fixture::read(&mut fixture.handle, &shape).unwrap());
            }
        }
    }
    assert!(refused > 50, "the faults were felt: {refused}");
}

/// The groups in the segments: file, offset, number.
fn groups(directory: &SimulatedDirectory) -> Vec<(String, usize, u64)> {
    let mut found = Vec::new();
    for name in directory.names().into_iter().filter(|name| name.starts_with("segment-")) {
        let file = directory.open(&name).unwrap();
        let mut bytes = vec![0; file.len() as usize];
        file.read_at(0, &mut bytes).unwrap();
        for offset in (0..bytes.len()).step_by(512) {
            if let Some((head, ..)) = group::parse(&bytes[offset..], 512) {
                found.push((name.clone(), offset, head.number));
            }
        }
    }
    found.sort_by_key(|(.., number)| *number);
    found
}

/// Regression: a rotten header in the middle of the log was taken for the end of the log, and
/// acknowledged writes after it were silently lost. Now the opening fails and names the place. No
/// later group states the last group as durable, so rot there is not detected. A rotten block of a
/// durable group is detected when it is read; if it was overwritten, it is never read.
#[test]
fn rot_in_the_middle_of_the_log_is_not_its_end() {
    let seed = Seed::from_env();
    let (mut refused, mut failed, mut nobody) = (0, 0, 0);
    for stream in 8300..8360 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let mut shape = Shape::tiny();
        shape.options.checkpoint_bytes = 1 << 20;
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let medium = directory.medium();
        let mut fixture = Fixture::open(&directory, &shape);
        let count = random.u64(2..40);
        for round in 0..count {
            let step = Step::Write { first: round % 3, count: 1, fua: true };
            assert_eq!(fixture.take(step), Status::Ok);
        }
        let (history, wanted) = (fixture.history.clone(), fixture.contents());
        drop((fixture, medium));
        let all = groups(&directory);
        let (name, offset, number) = &all[random.usize(..all.len())];
        let file = directory.open(name).unwrap();
        // In the header or in the block after it.
        let place = random.usize(..1024);
        let at = (*offset + place) as u64;
        let mut byte = [0];
        file.read_at(at, &mut byte).unwrap();
        file.write_at(at, &[byte[0] ^ 1 << random.u8(..8)]).unwrap();
        let last = all.last().map_or(0, |it| it.2);
        match Fixture::on(SimulatedStore::new(&directory), &directory, &shape) {
            Ok(mut fixture) if *number == last => {
                history.check_volume(&fixture::read(&mut fixture.handle, &shape).unwrap());
            }
            Ok(mut fixture) => {
                assert!(place >= 512, "a head is missed");
                let mut bytes = Vec::new();
                for block in 0..3 {
                    bytes.clear();
                    let read = |part: &[u8]| bytes.extend_from_slice(part);
                    match fixture.handle.read(block * 512, 512, read) {
                        Status::Ok => assert_eq!(bytes, fixture.bytes(wanted.0[block as usize])),
                        status => {
                            assert_eq!(status, Status::Protection);
                            // The live data are in the last three groups.
                            assert!(last - number < 3);
                            failed += 1;
                        }
                    }
                }
                nobody += usize::from(last - number >= 3);
            }
            Err(VolumeError::Format(FormatError::Log { segment, offset: at, number: missing })) => {
                let found = (format!("segment-{segment:08x}"), at as usize, missing);
                assert_eq!(found, (name.clone(), *offset, *number));
                // The first group makes the volume, and is always read completely.
                assert!((place < 512 || missing == 1) && missing != last);
                refused += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    let felt = format!("{refused} refused, {failed} failed, {nobody} of no use");
    assert!(refused > 0 && failed > 0 && nobody > 0, "{felt}");
}

/// Regression: the superblock states a durable group number, but not of which log. A header with
/// that number, left from a log that an opening had truncated, was accepted without reading its
/// torn block.
#[test]
fn a_group_that_only_the_superblock_states_as_durable_is_verified() {
    let mut shape = Shape::tiny();
    shape.options.checkpoint_bytes = 1 << 20;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    for first in [0, 1, 2] {
        assert_eq!(fixture.take(Step::Write { first, count: 1, fua: true }), Status::Ok);
    }
    drop(fixture);
    drop(Fixture::open(&directory, &shape));
    let (name, offset, number) = groups(&directory).pop().unwrap();
    let file = directory.open(&name).unwrap();
    let mut bytes = [0; 512];
    file.read_at(offset as u64, &mut bytes).unwrap();
    let (head, _, mut descriptors) = group::parse(&bytes, 512).unwrap();
    descriptors[0].crc ^= 1;
    group::print(&head, &descriptors, &mut bytes);
    file.write_at(offset as u64, &bytes).unwrap();
    match Fixture::on(SimulatedStore::new(&directory), &directory, &shape).map(drop).unwrap_err() {
        VolumeError::Format(FormatError::Log { number: missing, .. }) => {
            assert_eq!(missing, number);
        }
        error => panic!("{error}"),
    }
}

/// A change of the catalogue is protected only by its group's checksum, so an opening verifies it
/// however long it has been durable.
#[test]
fn a_rotten_change_of_the_catalogue_is_refused() {
    let mut shape = Shape::tiny();
    shape.options.checkpoint_bytes = 1 << 20;
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    // The pool is killed: no checkpoint follows.
    let medium = directory.medium();
    assert_eq!(fixture.take(Step::Snapshot), Status::Ok);
    let (name, offset, number) = groups(&directory).pop().unwrap();
    for first in [0, 1, 2] {
        assert_eq!(fixture.take(Step::Write { first, count: 1, fua: true }), Status::Ok);
    }
    drop((fixture, medium));
    let opened = || Fixture::on(SimulatedStore::new(&directory), &directory, &shape);
    assert_eq!(opened().unwrap().contents().1.len(), 1);
    let file = directory.open(&name).unwrap();
    file.write_at(offset as u64 + 512, &[0xff; 4]).unwrap();
    match opened().map(drop).unwrap_err() {
        VolumeError::Format(FormatError::Log { number: missing, .. }) => {
            assert_eq!(missing, number);
        }
        error => panic!("{error}"),
    }
}

/// Regression: cleaning chose a nearly empty segment with a damaged block again and again, without
/// effect. Now the segment stays, reads of the block fail, and cleaning continues elsewhere.
#[test]
fn cleaning_leaves_damage_alone_and_goes_on() {
    let mut shape = Shape::tiny();
    (shape.blocks, shape.block_bytes) = (240, 1024);
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    let rest = (8..240).step_by(8).map(|first| (first, 8));
    for (first, count) in [(7, 1), (0, 7)].into_iter().chain(rest) {
        assert_eq!(fixture.take(Step::Write { first, count, fua: true }), Status::Ok);
    }
    // The first write contained block 7, whose bytes are therefore the number 1.
    let wanted = 1_u64.to_le_bytes().repeat(64);
    for name in directory.names().into_iter().filter(|name| name.starts_with("segment-")) {
        let file = directory.open(&name).unwrap();
        let mut bytes = vec![0; file.len() as usize];
        file.read_at(0, &mut bytes).unwrap();
        for (at, _) in (0..).zip(bytes.chunks(512)).filter(|(_, it)| *it == wanted) {
            file.write_at(at * 512, &[0xff]).unwrap();
        }
    }
    let mut quarantined = 0;
    for round in 0..1500_u64 {
        quarantined = fixture.pool.counts().quarantined.max(quarantined);
        // One in eight blocks is never overwritten, block 7 among them.
        let first = round * 7 % 240;
        if first % 8 == 7 {
            continue;
        }
        let status = fixture.take(Step::Write { first, count: 1, fua: round % 4 == 0 });
        assert_eq!(status, Status::Ok, "round {round}: {:?}", fixture.pool.counts());
    }
    assert_eq!(quarantined, 1);
    let mut read = |block: u64| fixture.handle.read(block * 1024, 1024, |_| {});
    assert_eq!(read(7), Status::Protection);
    assert!((0..240).filter(|block| *block != 7).all(|block| read(block).is_ok()));
}

/// A pool with a full volume whose map has three leaves, of which the cache holds one.
pub(crate) fn three_leaves(
    directory: &SimulatedDirectory,
    segments_max: usize,
) -> (Fixture, Shape) {
    three_leaves_in(directory, segments_max, false)
}

/// A pool like that of [`three_leaves`], in one copy or two.
fn three_leaves_in(
    directory: &SimulatedDirectory,
    segments_max: usize,
    mirror: bool,
) -> (Fixture, Shape) {
    let mut shape = Shape { mirror, blocks: 600, ..Shape::tiny() };
    shape.options.checkpoint_bytes = 256 << 10;
    shape.options.segments_max = segments_max;
    format(directory, &shape);
    let mut fixture = Fixture::open(directory, &shape);
    fill_three_leaves(&mut fixture);
    (fixture, shape)
}

/// Writes all blocks of the volume.
pub(crate) fn fill_three_leaves(fixture: &mut Fixture) {
    for first in (0..600).step_by(8) {
        assert_eq!(fixture.take(Step::Write { first, count: 8, fua: true }), Status::Ok);
    }
}

/// Makes a checkpoint.
pub(crate) fn checkpoint(fixture: &mut Fixture) {
    let mut answer = fixture.pool.submit(Body::Checkpoint);
    fixture.run();
    assert_eq!(answer.take().map(|reply| reply.status), Some(Status::Ok));
}

/// Flips a bit near this offset.
fn rot(directory: &SimulatedDirectory, name: &str, offset: u64) {
    let file = directory.open(name).unwrap();
    let mut byte = [0];
    file.read_at(offset + 9, &mut byte).unwrap();
    file.write_at(offset + 9, &[byte[0] ^ 4]).unwrap();
}

/// Makes a checkpoint, then flips a bit of a leaf of the volume's map: in the files of one copy, or
/// in all. Returns the leaf's address.
pub(crate) fn rot_leaf(
    directory: &SimulatedDirectory,
    fixture: &mut Fixture,
    leaf: usize,
    side: &str,
) -> u64 {
    checkpoint(fixture);
    // The read brings the leaf into memory.
    assert!(fixture.handle.read(leaf as u64 * 256 * 512, 512, |_| {}).is_ok());
    let nodes = fixture.pool.find("v").unwrap().map.freeze();
    let location = nodes[0].as_ref().unwrap().leaf(leaf).unwrap().location().unwrap();
    let (segment, offset) = fixture.pool.segments().split(location.address());
    rot(directory, &format!("{side}segment-{segment:08x}"), offset);
    location.address()
}

/// The blocks that cannot be read.
pub(crate) fn lost(fixture: &mut Fixture) -> Vec<u64> {
    let mut read = |block: &u64| fixture.handle.read(*block * 512, 512, |_| {});
    let is_lost = |block: &u64| match read(block) {
        Status::Ok => false,
        status => {
            assert_eq!(status, Status::Protection);
            true
        }
    };
    (0..600).filter(is_lost).collect()
}

/// Regression: a write changed a leaf that was in memory but had rotted on disk. After a crash this
/// one leaf made the opening fail.
#[test]
fn a_write_after_a_damaged_leaf_does_not_prevent_an_opening() {
    let directory = SimulatedDirectory::default();
    let (mut fixture, shape) = three_leaves(&directory, 100);
    rot_leaf(&directory, &mut fixture, 1, "");
    assert_eq!(fixture.take(Step::Write { first: 300, count: 2, fua: true }), Status::Ok);
    let wanted = fixture.contents().0[300];
    drop(fixture);
    let mut gone: Vec<u64> = (256..512).filter(|block| ![300, 301].contains(block)).collect();
    for round in 0..3 {
        let mut fixture = Fixture::open(&directory, &shape);
        assert_eq!(lost(&mut fixture), gone, "round {round}");
        let (new, mut found) = (fixture.bytes(wanted), Vec::new());
        assert!(fixture.handle.read(301 * 512, 512, |part| found.extend_from_slice(part)).is_ok());
        assert!(found == new);
        // Blocks written there can be read again; discarded blocks are zeros.
        let first = gone[0];
        assert_eq!(fixture.take(Step::Write { first, count: 1, fua: true }), Status::Ok);
        assert_eq!(
            fixture.take(Step::Discard { first: first + 1, count: 1, fua: true }),
            Status::Ok
        );
        gone.drain(..2);
        if round == 1 {
            checkpoint(&mut fixture);
        }
    }
}

/// Regression: one rotten leaf made every liveness scan fail, so space that snapshots had shared
/// was never freed.
#[test]
fn space_comes_back_where_a_leaf_has_rotten() {
    let directory = SimulatedDirectory::default();
    let (mut fixture, shape) = three_leaves(&directory, 75);
    rot_leaf(&directory, &mut fixture, 2, "");
    drop(fixture);
    let mut fixture = Fixture::open(&directory, &shape);
    for round in 0..40 {
        assert_eq!(fixture.take(Step::Snapshot), Status::Ok, "round {round}: {:?}", fixture.pool);
        for first in (0..512).step_by(8) {
            let status = fixture.take(Step::Write { first, count: 8, fua: false });
            assert_eq!(status, Status::Ok, "round {round}: {:?}", fixture.pool);
        }
        let list = fixture.pool.list();
        let id = list.iter().find(|meta| meta.is_snapshot).unwrap().id;
        let mut answer = fixture.pool.submit_change(Change::Destroy { id });
        fixture.run();
        assert_eq!(answer.take().map(|reply| reply.status), Some(Status::Ok));
    }
    assert_eq!(fixture.pool.counts().quarantined, 0);
    let gone: Vec<u64> = (512..600).collect();
    assert_eq!(lost(&mut fixture), gone);
    assert_eq!(fixture.take(Step::Discard { first: 512, count: 88, fua: true }), Status::Ok);
    assert!(lost(&mut fixture).is_empty());
}

/// Regression: a leaf's lost blocks have entries that name the leaf's old place. So `check` and the
/// scrub took whatever lay there later as already verified, and skipped it.
#[test]
fn blocks_at_the_old_address_of_a_lost_page_are_verified() {
    for (mirror, wants_page) in [(false, false), (false, true), (true, false), (true, true)] {
        let directory = SimulatedDirectory::default();
        let (mut fixture, shape) = three_leaves_in(&directory, 100, mirror);
        let sides: &[&str] = if mirror { &["a/", "b/"] } else { &[""] };
        let mut place = 0;
        for side in sides {
            place = rot_leaf(&directory, &mut fixture, 1, side);
        }
        // An opening that finds a block of the leaf in the log replaces the leaf.
        assert_eq!(fixture.take(Step::Write { first: 300, count: 1, fua: true }), Status::Ok);
        drop(fixture);
        let mut fixture = Fixture::open(&directory, &shape);
        let is_there = |fixture: &mut Fixture| {
            let node = fixture.pool.find("v").unwrap().map.freeze()[0].clone().unwrap();
            let leaf = node.leaf(2).unwrap();
            let page = fixture.pool.segments().page(leaf).unwrap();
            let mut blocks = page.entries().iter().filter(|entry| !entry.is_hole());
            match wants_page {
                true => leaf.location().is_some_and(|location| location.address() == place),
                false => blocks.any(|entry| entry.address() == place),
            }
        };
        // Overwrite all other blocks repeatedly, in groups of different lengths.
        let is_used = (0..20_000_u64).any(|round| {
            let (first, count) = ([0, 512][round as usize % 2] + round / 2 % 80, 1 + round % 7);
            assert_eq!(fixture.take(Step::Write { first, count, fua: true }), Status::Ok);
            if round.is_multiple_of(16 + round / 256 % 64) {
                checkpoint(&mut fixture);
            }
            is_there(&mut fixture)
        });
        assert!(is_used, "nothing came to lie at {place}: {mirror} {wants_page}");
        checkpoint(&mut fixture);
        assert!(is_there(&mut fixture));
        let (segment, offset) = fixture.pool.segments().split(place);
        drop(fixture);
        rot(&directory, &format!("{}segment-{segment:08x}", sides[0]), offset);
        let check = || {
            let store = fixture::store(&directory, &shape, Terms::ReadOnly).unwrap();
            let report = check_in(store, &mut |_| {}).unwrap();
            let lost = report.damage.iter().filter(|it| (256..512).contains(&it.block)).count();
            assert_eq!(lost, 255, "blocks of the lost page, each of them once");
            let here = report.damage.iter().filter(|it| it.address == place).count();
            assert_eq!(report.damaged, (lost + here) as u64);
            here
        };
        assert_eq!(check(), 1, "{mirror} {wants_page}");
        if mirror {
            let store = fixture::store(&directory, &shape, USE).unwrap();
            let running = Running::start(store, shape.options).unwrap();
            let report = scrub(&running, 0, &mut |_, _| true).unwrap();
            assert_eq!((report.damaged, report.repaired), (255, 1));
            drop(running);
            assert_eq!(check(), 0);
        }
    }
}

/// One superblock slot is enough: if the other is lost, the pool opens with everything that was
/// durable. This holds also if the log moved to a new segment for lack of space.
#[test]
fn a_lost_superblock_slot_loses_nothing() {
    let seed = Seed::from_env();
    for stream in 8600..8680 {
        let _watch = seed.watch(&format!("stream {stream}"));
        let mut random = seed.rng(stream);
        let mut shape = shape(&mut random);
        shape.options.segments_max = random.usize(16..21);
        let directory = SimulatedDirectory::default();
        format(&directory, &shape);
        let mut fixture = Fixture::open(&directory, &shape);
        work(&mut fixture, &mut random, &shape, 40);
        assert!(fixture.take(Step::Flush).is_ok());
        let history = fixture.history.clone();
        let wanted = fixture.contents();
        drop(fixture);
        let file = directory.open("superblock").unwrap();
        let slot = random.u64(..2) * 4096;
        file.write_at(slot, &[random.u8(..); 512]).unwrap();
        let mut fixture = Fixture::open(&directory, &shape);
        assert_eq!(fixture.contents(), wanted);
        history.check(usize::MAX, &wanted);
    }
}

/// Regression: a second lookup decides whether a block is damaged or has moved. If its leaf had
/// been evicted meanwhile, the block counted as moved, and after a few tries the read returned
/// neither result.
#[test]
fn damage_is_reported_while_map_pages_are_evicted() {
    let shape = Shape { blocks: 600, ..Shape::tiny() };
    let directory = SimulatedDirectory::default();
    format(&directory, &shape);
    let mut fixture = Fixture::open(&directory, &shape);
    // In different leaves, of which the cache holds one.
    for first in [0, 300] {
        assert_eq!(fixture.take(Step::Write { first, count: 1, fua: true }), Status::Ok);
    }
    checkpoint(&mut fixture);
    let block = 1_u64.to_le_bytes().repeat(512 / 8);
    for name in directory.names() {
        let file = directory.open(&name).unwrap();
        let mut bytes = vec![0; file.len() as usize];
        file.read_at(0, &mut bytes).unwrap();
        if let Some(at) = bytes.chunks(512).position(|part| part == block) {
            file.write_at(at as u64 * 512 + 100, &[9]).unwrap();
        }
    }
    let open = || {
        VolumeHandle::open(&fixture.pool, fixture.pool.find("v").unwrap(), Compression::None, 1)
            .unwrap()
    };
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut handle = open();
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                assert_eq!(handle.read(300 * 512, 512, |_| {}), Status::Ok);
            }
        });
        let mut handle = open();
        for round in 0..5000 {
            let status = handle.read(0, 512, |_| {});
            assert_eq!(status, Status::Protection, "round {round}");
        }
        drop(stop);
    });
}

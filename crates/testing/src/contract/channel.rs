//! Promises of the channel itself: regions, bounds, capacity, waiting, statistics.

use std::sync::Arc;

use blockyard_core::Status;
use blockyard_core::bio::{Bio, BufRef, Op, RegionId};
use blockyard_core::device::Due;
use blockyard_core::region::Region;
use blockyard_core::units::{SECTOR_BYTES, Sector};

use super::fixture::{BUFFER_BYTES, Fixture};
use super::{DEPTH, Subject};
use crate::seed::Seed;
use crate::workload::{Mix, Workload};

/// More bios than any channel of the suite's subjects has room for.
const BIOS: u64 = 1000;

/// Reads that any device answers with OK.
fn reads(fixture: &Fixture, count: u64) -> Vec<Bio> {
    let block = fixture.disk.geometry().block_sectors();
    let bio = |index: u64| {
        let sector = Sector(index % 8 * block);
        let buf = fixture.buf(index % u64::from(DEPTH) * block * SECTOR_BYTES);
        Bio::read(sector, block, buf).with_user_data(index)
    };
    (0..count).map(bio).collect()
}

/// Each invalid bio fails alone, and has changed nothing.
pub(super) fn senseless(subject: &Subject, _: Seed) {
    let mut fixture = subject.fixture();
    let geometry = fixture.disk.geometry().clone();
    let (block, end) = (geometry.block_sectors(), geometry.sectors);
    for op in [Op::Read, Op::Write, Op::Discard, Op::WriteZeroes, Op::ZoneAppend] {
        let mut ranges = vec![
            (0, 0),
            (end, block),
            (end - block, 2 * block),
            (u64::MAX - (block - 1), block),
            (u64::MAX - (block - 1), 2 * block),
        ];
        if block > 1 {
            ranges.extend([(1, block), (0, block + 1), (0, block - 1), (end, 1)]);
        }
        for (sector, sectors) in ranges {
            let outcome = fixture.both(Bio::new(op, Sector(sector), sectors));
            assert_ne!(outcome.status, Status::Ok, "{op} of {sectors} at {sector}");
        }
    }
    for op in Op::ALL.into_iter().filter(|op| op.is_zone_mgmt()) {
        // Beyond the end, and inside a zone: `INVAL` on zoned devices, else `NOTSUPP`.
        for sector in [end, u64::MAX, block] {
            if op != Op::ZoneResetAll {
                assert_ne!(fixture.both(Bio::new(op, Sector(sector), 0)).status, Status::Ok);
            }
        }
    }
    fixture.same_report();
    fixture.same_contents();
}

/// Data must lie in a region that the channel knows.
pub(super) fn outside_of_regions(subject: &Subject, _: Seed) {
    let mut fixture = subject.fixture();
    let block = fixture.disk.geometry().block_sectors();
    let bytes = block * SECTOR_BYTES;
    let len_bytes = BUFFER_BYTES as u64;
    let other = fixture.channel.register(Region::alloc(bytes as usize));
    let wrong = [
        BufRef { region: fixture.region_id, offset: len_bytes },
        BufRef { region: fixture.region_id, offset: len_bytes - bytes + 1 },
        BufRef { region: fixture.region_id, offset: u64::MAX },
        BufRef { region: fixture.region_id, offset: u64::MAX - bytes + 1 },
        BufRef { region: other, offset: 1 },
        BufRef { region: RegionId(other.0 + 1), offset: 0 },
        BufRef { region: RegionId(u32::MAX), offset: 0 },
    ];
    for buf in wrong {
        for op in [Op::Read, Op::Write] {
            let done = fixture.run(Bio::new(op, Sector(0), block).with_buf(buf));
            assert_eq!(done.status, Status::Inval, "{op} with {buf:?}");
        }
    }
    let fits = BufRef { region: other, offset: 0 };
    assert_eq!(fixture.run(Bio::read(Sector(0), block, fits)).status, Status::Ok);
    assert!(fixture.channel.unregister(other));
    assert!(!fixture.channel.unregister(other), "twice");
    assert_eq!(fixture.run(Bio::read(Sector(0), block, fits)).status, Status::Inval);
    fixture.same_report();
    fixture.same_contents();
}

/// Pushes more bios than there is room for.
pub(super) fn full(subject: &Subject, _: Seed) {
    let mut fixture = subject.fixture();
    let bios = reads(&fixture, BIOS);
    let taken = fixture.channel.push(&bios);
    assert!((1..bios.len()).contains(&taken), "took {taken} of {}", bios.len());
    assert_eq!(fixture.channel.in_flight(), taken);
    assert_eq!(fixture.channel.push(&bios[taken..]), 0, "a full channel takes nothing");
    let mut done = fixture.finish();
    // The rest of the bios go through, as many at a time as there is room for.
    let mut next = taken;
    while next < bios.len() {
        let took = fixture.channel.push(&bios[next..]);
        assert!(took > 0, "an idle channel has room");
        next += took;
        done.append(&mut fixture.finish());
    }
    done.sort_by_key(|completion| completion.user_data);
    let numbers: Vec<u64> = done.iter().map(|completion| completion.user_data).collect();
    assert_eq!(numbers, (0..bios.len() as u64).collect::<Vec<_>>());
    assert!(done.iter().all(|completion| completion.status.is_ok()));
}

/// Drops a channel with bios that are pushed, submitted and completed. The memory is freed, and the
/// disk serves the next channel.
pub(super) fn dropped_in_flight(subject: &Subject, seed: Seed) {
    let fixture = subject.fixture();
    let mut workload = Workload::new(seed, 4, Mix::tame());
    let disk = Arc::clone(&fixture.disk);
    let region = Arc::clone(&fixture.region);
    let mut fixture = fixture;
    for part in 0..3 {
        let mut bio = workload.next(&fixture.model).with_buf(fixture.buf(0));
        bio.flags = blockyard_core::bio::Flags::NONE;
        let bios = reads(&fixture, 10);
        assert_eq!(fixture.channel.push(&bios), bios.len());
        fixture.channel.push(&[bio]);
        if part < 2 {
            fixture.channel.submit();
        }
        if part < 1 {
            fixture.channel.reap(&mut Vec::new());
        }
    }
    drop(fixture);
    assert_eq!(Arc::strong_count(&region), 1, "the channel has let go of its memory");
    assert_eq!(disk.stats().channels, 0);
    let model = subject.model(&*disk);
    let mut fixture = Fixture::with_model(disk, model);
    let bios = reads(&fixture, 10);
    assert_eq!(fixture.channel.push(&bios), bios.len());
    assert_eq!(fixture.finish().len(), bios.len());
}

/// A region stays registered until its bios are reaped.
pub(super) fn unregister_in_flight(subject: &Subject, _: Seed) {
    let mut fixture = subject.fixture();
    let block = fixture.disk.geometry().block_sectors();
    let region = Region::alloc((block * SECTOR_BYTES) as usize);
    let region_id = fixture.channel.register(Arc::clone(&region));
    let bio = Bio::read(Sector(0), block, BufRef { region: region_id, offset: 0 });
    assert_eq!(fixture.channel.push(&[bio]), 1);
    assert!(!fixture.channel.unregister(region_id), "pushed");
    fixture.channel.submit();
    assert!(!fixture.channel.unregister(region_id), "submitted");
    let done = fixture.finish();
    assert_eq!((done.len(), done[0].status), (1, Status::Ok));
    assert!(fixture.channel.unregister(region_id), "reaped");
    assert_eq!(Arc::strong_count(&region), 1);
    assert!(!fixture.channel.unregister(RegionId(u32::MAX)), "never registered");
}

/// An idle channel waits for nothing; a busy one waits until there is a completion.
pub(super) fn waiting(subject: &Subject, _: Seed) {
    let mut fixture = subject.fixture();
    let mut done = Vec::new();
    assert_eq!(fixture.channel.due(), Due::Never);
    fixture.channel.wait(None);
    assert_eq!(fixture.channel.reap(&mut done), 0);
    for round in 1..=20 {
        let bios = reads(&fixture, round);
        assert_eq!(fixture.channel.push(&bios), bios.len());
        assert_eq!(fixture.channel.in_flight(), bios.len());
        fixture.channel.submit();
        done.clear();
        let mut waits = 0;
        while fixture.channel.in_flight() > 0 {
            assert_ne!(fixture.channel.due(), Due::Never, "in flight, yet never due");
            fixture.channel.wait(None);
            let before = done.len();
            let reaped = fixture.channel.reap(&mut done);
            assert_eq!(done.len() - before, reaped, "reap counts what it appends");
            waits += 1;
            assert!(waits <= 1000, "waiting does not end");
        }
        assert_eq!(done.len(), bios.len());
        assert_eq!(fixture.channel.due(), Due::Never, "idle again");
    }
}

/// Every bio is counted once, under its operation.
pub(super) fn statistics(subject: &Subject, seed: Seed) {
    let mut fixture = subject.fixture();
    let mut workload = Workload::new(seed, 5, Mix::wild());
    let mut counted = [(0, 0, 0); Op::COUNT];
    for _ in 0..300 {
        let bio = workload.next(&fixture.model);
        let status = fixture.both(bio).status;
        let (ops, errors, sectors) = &mut counted[bio.op as usize];
        *ops += 1;
        match status {
            Status::Ok if bio.op.has_range() => *sectors += bio.sectors,
            Status::Ok => {}
            _ => *errors += 1,
        }
    }
    let stats = fixture.disk.stats();
    assert_eq!(stats.channels, 1);
    for op in Op::ALL {
        let found = stats.op(op);
        assert_eq!((found.ops, found.errors, found.sectors), counted[op as usize], "{op}");
    }
    let disk = Arc::clone(&fixture.disk);
    drop(fixture);
    let closed = disk.stats();
    assert_eq!(closed.channels, 0);
    assert_eq!(closed.ops, stats.ops, "a closed channel's counts remain");
}

/// Extents cover the device, and those reported as zero read as zeros.
pub(super) fn extents(subject: &Subject, seed: Seed) {
    let mut fixture = subject.fixture();
    let mut workload = Workload::new(seed, 6, Mix::wild());
    for _ in 0..200 {
        let bio = workload.next(&fixture.model);
        super::lockstep::fill(&fixture, &mut workload, &bio);
        fixture.both(bio);
    }
    let sectors = fixture.disk.geometry().sectors;
    let block = fixture.disk.geometry().block_sectors();
    let mut at = 0;
    while at < sectors {
        let extent = fixture.disk.extent(Sector(at), sectors - at);
        assert!((block..=sectors - at).contains(&extent.sectors), "{extent:?} at {at}");
        assert!(extent.sectors.is_multiple_of(block), "{extent:?} at {at}");
        assert!(!extent.zero || fixture.model.keeps_data(), "no data are kept, yet {extent:?}");
        if extent.zero {
            all_zeros(&mut fixture, at, extent.sectors);
        }
        at += extent.sectors;
    }
    // The extent of a single block is that block.
    assert_eq!(fixture.disk.extent(Sector(sectors - block), block).sectors, block);
}

fn all_zeros(fixture: &mut Fixture, from: u64, sectors: u64) {
    let step = 2048;
    let mut at = from;
    while at < from + sectors {
        let bio = Bio::new(Op::Read, Sector(at), step.min(from + sectors - at));
        assert_eq!(fixture.both(bio).status, Status::Ok, "zeros at {at}");
        let mut data = vec![1; (bio.sectors * SECTOR_BYTES) as usize];
        fixture.region.read(0, &mut data);
        assert!(data.iter().all(|byte| *byte == 0), "sectors from {at} on are not zeros");
        at += bio.sectors;
    }
}

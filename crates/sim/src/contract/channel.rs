//! Promises of the channel itself: regions, bounds, capacity, waiting, statistics.

use std::sync::Arc;

use blockyard_core::bio::{Bio, BufRef, Op, RegionId};
use blockyard_core::device::Due;
use blockyard_core::region::Region;
use blockyard_core::status::Status;
use blockyard_core::units::{SECTOR_BYTES, Sector};

use super::rig::{BUFFER_BYTES, Rig};
use super::{DEPTH, Subject};
use crate::seed::Seed;
use crate::workload::{Mix, Workload};

/// More bios than any channel of the suite's subjects has room for.
const BIOS: u64 = 1000;

/// Reads that any device answers with OK.
fn reads(rig: &Rig, count: u64) -> Vec<Bio> {
    let block = rig.disk.geometry().block_sectors();
    let bio = |index: u64| {
        let sector = Sector(index % 8 * block);
        let buf = rig.buf(index % u64::from(DEPTH) * block * SECTOR_BYTES);
        Bio::read(sector, block, buf).with_user_data(index)
    };
    (0..count).map(bio).collect()
}

/// Each invalid bio fails alone, and has changed nothing.
pub(super) fn senseless(subject: &Subject, _: Seed) {
    let mut rig = subject.rig();
    let geometry = rig.disk.geometry().clone();
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
            let outcome = rig.both(Bio::new(op, Sector(sector), sectors));
            assert_ne!(outcome.status, Status::Ok, "{op} of {sectors} at {sector}");
        }
    }
    for op in Op::ALL.into_iter().filter(|op| op.is_zone_mgmt()) {
        // Beyond the end, and inside a zone: `INVAL` on zoned devices, else `NOTSUPP`.
        for sector in [end, u64::MAX, block] {
            if op != Op::ZoneResetAll {
                assert_ne!(rig.both(Bio::new(op, Sector(sector), 0)).status, Status::Ok);
            }
        }
    }
    rig.same_report();
    rig.same_contents();
}

/// Data must lie in a region that the channel knows.
pub(super) fn outside_of_regions(subject: &Subject, _: Seed) {
    let mut rig = subject.rig();
    let block = rig.disk.geometry().block_sectors();
    let bytes = block * SECTOR_BYTES;
    let len_bytes = BUFFER_BYTES as u64;
    let other = rig.channel.register(Region::alloc(bytes as usize));
    let wrong = [
        BufRef { region: rig.region_id, offset: len_bytes },
        BufRef { region: rig.region_id, offset: len_bytes - bytes + 1 },
        BufRef { region: rig.region_id, offset: u64::MAX },
        BufRef { region: rig.region_id, offset: u64::MAX - bytes + 1 },
        BufRef { region: other, offset: 1 },
        BufRef { region: RegionId(other.0 + 1), offset: 0 },
        BufRef { region: RegionId(u32::MAX), offset: 0 },
    ];
    for buf in wrong {
        for op in [Op::Read, Op::Write] {
            let done = rig.run(Bio::new(op, Sector(0), block).with_buf(buf));
            assert_eq!(done.status, Status::Inval, "{op} with {buf:?}");
        }
    }
    let fits = BufRef { region: other, offset: 0 };
    assert_eq!(rig.run(Bio::read(Sector(0), block, fits)).status, Status::Ok);
    assert!(rig.channel.unregister(other));
    assert!(!rig.channel.unregister(other), "twice");
    assert_eq!(rig.run(Bio::read(Sector(0), block, fits)).status, Status::Inval);
    rig.same_report();
    rig.same_contents();
}

/// Pushes more bios than there is room for.
pub(super) fn full(subject: &Subject, _: Seed) {
    let mut rig = subject.rig();
    let bios = reads(&rig, BIOS);
    let taken = rig.channel.push(&bios);
    assert!((1..bios.len()).contains(&taken), "took {taken} of {}", bios.len());
    assert_eq!(rig.channel.in_flight(), taken);
    assert_eq!(rig.channel.push(&bios[taken..]), 0, "a full channel takes nothing");
    let mut done = rig.finish();
    // The rest of the bios go through, as many at a time as there is room for.
    let mut next = taken;
    while next < bios.len() {
        let took = rig.channel.push(&bios[next..]);
        assert!(took > 0, "an idle channel has room");
        next += took;
        done.append(&mut rig.finish());
    }
    done.sort_by_key(|completion| completion.user_data);
    let numbers: Vec<u64> = done.iter().map(|completion| completion.user_data).collect();
    assert_eq!(numbers, (0..bios.len() as u64).collect::<Vec<_>>());
    assert!(done.iter().all(|completion| completion.status.is_ok()));
}

/// Drops a channel with bios that are pushed, submitted and completed. The memory is freed, and the
/// disk serves the next channel.
pub(super) fn dropped_in_flight(subject: &Subject, seed: Seed) {
    let rig = subject.rig();
    let mut workload = Workload::new(seed, 4, Mix::tame());
    let disk = Arc::clone(&rig.disk);
    let region = Arc::clone(&rig.region);
    let mut rig = rig;
    for part in 0..3 {
        let mut bio = workload.next(&rig.model).with_buf(rig.buf(0));
        bio.flags = blockyard_core::bio::Flags::NONE;
        let bios = reads(&rig, 10);
        assert_eq!(rig.channel.push(&bios), bios.len());
        rig.channel.push(&[bio]);
        if part < 2 {
            rig.channel.submit();
        }
        if part < 1 {
            rig.channel.reap(&mut Vec::new());
        }
    }
    drop(rig);
    assert_eq!(Arc::strong_count(&region), 1, "the channel has let go of its memory");
    assert_eq!(disk.stats().channels, 0);
    let model = subject.model(&*disk);
    let mut rig = Rig::with_model(disk, model);
    let bios = reads(&rig, 10);
    assert_eq!(rig.channel.push(&bios), bios.len());
    assert_eq!(rig.finish().len(), bios.len());
}

/// A region stays registered until its bios are reaped.
pub(super) fn unregister_in_flight(subject: &Subject, _: Seed) {
    let mut rig = subject.rig();
    let block = rig.disk.geometry().block_sectors();
    let region = Region::alloc((block * SECTOR_BYTES) as usize);
    let region_id = rig.channel.register(Arc::clone(&region));
    let bio = Bio::read(Sector(0), block, BufRef { region: region_id, offset: 0 });
    assert_eq!(rig.channel.push(&[bio]), 1);
    assert!(!rig.channel.unregister(region_id), "pushed");
    rig.channel.submit();
    assert!(!rig.channel.unregister(region_id), "submitted");
    let done = rig.finish();
    assert_eq!((done.len(), done[0].status), (1, Status::Ok));
    assert!(rig.channel.unregister(region_id), "reaped");
    assert_eq!(Arc::strong_count(&region), 1);
    assert!(!rig.channel.unregister(RegionId(u32::MAX)), "never registered");
}

/// An idle channel waits for nothing; a busy one waits until there is a completion.
pub(super) fn waiting(subject: &Subject, _: Seed) {
    let mut rig = subject.rig();
    let mut done = Vec::new();
    assert_eq!(rig.channel.due(), Due::Never);
    rig.channel.wait(None);
    assert_eq!(rig.channel.reap(&mut done), 0);
    for round in 1..=20 {
        let bios = reads(&rig, round);
        assert_eq!(rig.channel.push(&bios), bios.len());
        assert_eq!(rig.channel.in_flight(), bios.len());
        rig.channel.submit();
        done.clear();
        let mut waits = 0;
        while rig.channel.in_flight() > 0 {
            assert_ne!(rig.channel.due(), Due::Never, "in flight, yet never due");
            rig.channel.wait(None);
            let before = done.len();
            let reaped = rig.channel.reap(&mut done);
            assert_eq!(done.len() - before, reaped, "reap counts what it appends");
            waits += 1;
            assert!(waits <= 1000, "waiting does not end");
        }
        assert_eq!(done.len(), bios.len());
        assert_eq!(rig.channel.due(), Due::Never, "idle again");
    }
}

/// Every bio is counted once, under its operation.
pub(super) fn statistics(subject: &Subject, seed: Seed) {
    let mut rig = subject.rig();
    let mut workload = Workload::new(seed, 5, Mix::wild());
    let mut counted = [(0, 0, 0); Op::COUNT];
    for _ in 0..300 {
        let bio = workload.next(&rig.model);
        let status = rig.both(bio).status;
        let (ops, errors, sectors) = &mut counted[bio.op as usize];
        *ops += 1;
        match status {
            Status::Ok if bio.op.has_range() => *sectors += bio.sectors,
            Status::Ok => {}
            _ => *errors += 1,
        }
    }
    let stats = rig.disk.stats();
    assert_eq!(stats.channels, 1);
    for op in Op::ALL {
        let found = stats.op(op);
        assert_eq!((found.ops, found.errors, found.sectors), counted[op as usize], "{op}");
    }
    let disk = Arc::clone(&rig.disk);
    drop(rig);
    let closed = disk.stats();
    assert_eq!(closed.channels, 0);
    assert_eq!(closed.ops, stats.ops, "a closed channel's counts remain");
}

/// Extents cover the device, and those reported as zero read as zeros.
pub(super) fn extents(subject: &Subject, seed: Seed) {
    let mut rig = subject.rig();
    let mut workload = Workload::new(seed, 6, Mix::wild());
    for _ in 0..200 {
        let bio = workload.next(&rig.model);
        super::lockstep::fill(&rig, &mut workload, &bio);
        rig.both(bio);
    }
    let sectors = rig.disk.geometry().sectors;
    let block = rig.disk.geometry().block_sectors();
    let mut at = 0;
    while at < sectors {
        let extent = rig.disk.extent(Sector(at), sectors - at);
        assert!((block..=sectors - at).contains(&extent.sectors), "{extent:?} at {at}");
        assert!(extent.sectors.is_multiple_of(block), "{extent:?} at {at}");
        assert!(!extent.zero || rig.model.keeps_data(), "no data are kept, yet {extent:?}");
        if extent.zero {
            all_zeros(&mut rig, at, extent.sectors);
        }
        at += extent.sectors;
    }
    // The extent of a single block is that block.
    assert_eq!(rig.disk.extent(Sector(sectors - block), block).sectors, block);
}

fn all_zeros(rig: &mut Rig, from: u64, sectors: u64) {
    let step = 2048;
    let mut at = from;
    while at < from + sectors {
        let bio = Bio::new(Op::Read, Sector(at), step.min(from + sectors - at));
        assert_eq!(rig.both(bio).status, Status::Ok, "zeros at {at}");
        let mut data = vec![1; (bio.sectors * SECTOR_BYTES) as usize];
        rig.region.read(0, &mut data);
        assert!(data.iter().all(|byte| *byte == 0), "sectors from {at} on are not zeros");
        at += bio.sectors;
    }
}

//! Several channels on several threads.

use std::ops::Range;
use std::sync::{Arc, Barrier};
use std::thread;

use blockyard_core::Status;
use blockyard_core::bio::{Bio, Op};
use blockyard_core::disk::Disk;
use blockyard_core::geometry::ZoneGeometry;
use blockyard_core::units::{SECTOR_BYTES, Sector};
use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};

use super::fixture::{BUFFER_BYTES, Fixture};
use super::{Subject, lockstep};
use crate::seed::Seed;
use crate::workload::{Mix, Workload};

/// Default number of threads of a clause.
const THREADS: u64 = 4;

/// Longest read, in sectors.
const READ_SECTORS_MAX: u64 = 1024;

/// Length of a thread's buffer: enough for the longest read of these clauses, and for a whole zone.
fn buffer_bytes(disk: &dyn Disk) -> usize {
    let zone_sectors = disk.geometry().zones.as_ref().map_or(0, |zones| zones.zone_sectors);
    let bytes = zone_sectors.max(READ_SECTORS_MAX).saturating_mul(SECTOR_BYTES);
    usize::try_from(bytes).map_or(BUFFER_BYTES, |bytes| bytes.min(BUFFER_BYTES))
}

/// Runs `body` on `count` threads at once, each with its own fixture on the same disk.
fn on_threads<R: Send>(
    subject: &Subject,
    disk: &Arc<dyn Disk>,
    count: u64,
    body: impl Fn(u64, Fixture) -> R + Sync,
) -> Vec<R> {
    let start = Barrier::new(count as usize);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|number| {
                let (start, body) = (&start, &body);
                let (disk, model) = (Arc::clone(disk), subject.model(&**disk));
                let len_bytes = buffer_bytes(&*disk);
                let fixture = Fixture::with_buffer(disk, model, len_bytes);
                scope.spawn(move || {
                    start.wait();
                    body(number, fixture)
                })
            })
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, R>| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().map(join).collect()
    })
}

/// The part of the device that belongs to one of `count` threads: whole zones, or whole blocks.
fn area(disk: &dyn Disk, number: u64, count: u64) -> Range<u64> {
    let geometry = disk.geometry();
    let unit = match &geometry.zones {
        Some(zones) => zones.zone_sectors,
        None => geometry.block_sectors(),
    };
    let share = geometry.sectors / unit / count * unit;
    number * share..(number + 1) * share
}

/// Each thread compares its own area with its own model, as if it were alone.
pub(super) fn disjoint(subject: &Subject, seed: Seed) {
    let disk = subject.disk();
    // Limits couple the areas; they have their own clause.
    if disk.geometry().zones.as_ref().is_some_and(|zones| zones.open_max + zones.active_max > 0) {
        return;
    }
    on_threads(subject, &disk, THREADS, |number, mut fixture| {
        let mut workload = Workload::new(seed, 100 + number, Mix::tame());
        let area = area(&*fixture.disk, number, THREADS);
        for _ in 0..400 {
            let bio = match fixture.model.geometry().zones {
                Some(_) => zone_step(&fixture, &mut workload, &area),
                None => workload.next_in(&fixture.model, area.clone()),
            };
            lockstep::fill(&fixture, &mut workload, &bio);
            fixture.both(bio);
        }
        // Compare the whole area, as this thread left it.
        let mut at = area.start;
        while at < area.end {
            let sectors = READ_SECTORS_MAX.min(area.end - at);
            fixture.both(Bio::new(Op::Read, Sector(at), sectors));
            at += sectors;
        }
    });
}

/// A valid bio for one of the zones in `area`.
fn zone_step(fixture: &Fixture, workload: &mut Workload, area: &Range<u64>) -> Bio {
    let block = fixture.model.write_sectors();
    let zones: Vec<ZoneInfo> = fixture.model.report().into_iter().collect();
    let mine: Vec<&ZoneInfo> = zones.iter().filter(|zone| area.contains(&zone.start.0)).collect();
    let zone = mine[workload.below(mine.len().min(4) as u64) as usize];
    let sectors = block * (1 + workload.below(8));
    let limit = zone.start.0 + zone.capacity_sectors;
    if zone.kind == ZoneType::Conventional {
        let at = zone.start.0 + workload.below(zone.sectors / block - 8) * block;
        let op = if workload.below(2) == 0 { Op::Write } else { Op::Read };
        return Bio::new(op, Sector(at), sectors);
    }
    match workload.below(12) {
        0 => Bio::new(Op::ZoneReset, zone.start, 0),
        1 => Bio::new(Op::ZoneClose, zone.start, 0),
        2 => Bio::new(Op::ZoneOpen, zone.start, 0),
        3 if zone.wp.0 == limit => Bio::new(Op::ZoneFinish, zone.start, 0),
        4 | 5 => Bio::new(Op::Read, zone.start, 16 * block),
        6 | 7 if fixture.model.limits().zone_append_sectors_max >= 8 * block => {
            Bio::new(Op::ZoneAppend, zone.start, sectors)
        }
        _ => {
            let left = limit.saturating_sub(zone.wp.0);
            Bio::new(Op::Write, zone.wp, sectors.min(left.max(block)))
        }
    }
}

/// Eight threads append to one zone until it is full. Each completion has a sector, the ranges tile
/// the zone, and each contains the data of its writer.
pub(super) fn appends(subject: &Subject, _: Seed) {
    let disk = subject.disk();
    let max = disk.limits().zone_append_sectors_max;
    let Some(zones) = &disk.geometry().zones else { return };
    let first = zones.conventional_count;
    if max == 0 || first == zones.zone_count {
        return;
    }
    let zone_start = u64::from(first) * zones.zone_sectors;
    let capacity = zones.zone_capacity_sectors.min(disk.geometry().sectors - zone_start);
    let block = subject.model(&*disk).write_sectors();
    let landed = on_threads(subject, &disk, 8, |number, mut fixture| {
        // Lengths differ between threads, so that ranges do not line up by accident.
        let sectors = (block * (1 + number % 3)).min(max / block * block);
        append_until_full(&mut fixture, number, zone_start, sectors)
    });
    let mut ranges: Vec<(u64, u64, u64, u64)> = landed.into_iter().flatten().collect();
    ranges.sort_unstable();
    let mut at = zone_start;
    for (sector, sectors, _, _) in &ranges {
        assert_eq!(*sector, at, "a gap or an overlap");
        at += sectors;
    }
    let mut fixture = Fixture::with_model(Arc::clone(&disk), subject.model(&*disk));
    let report = fixture.report()[first as usize];
    assert!(at <= zone_start + capacity && report.capacity_sectors == capacity);
    let end = match report.cond {
        // By the rules of ZBC, the write pointer of a full zone is the zone's end, and there may be
        // a gap before it.
        ZoneCond::Full => zone_start + capacity,
        _ => report.wp.0,
    };
    assert_eq!(end, at, "the write pointer is after the last append");
    // The zone may stop before its capacity only if no thread's next append fits.
    assert!(zone_start + capacity - at < 3 * block, "appends were refused too early");
    if !fixture.model.keeps_data() {
        return;
    }
    for (sector, sectors, writer, serial) in ranges {
        let buf = fixture.buf(0);
        assert_eq!(fixture.run(Bio::read(Sector(sector), sectors, buf)).status, Status::Ok);
        let mut data = vec![0; (sectors * SECTOR_BYTES) as usize];
        fixture.region.read(0, &mut data);
        assert!(data == stamp(writer, serial, sectors), "sector {sector} is not {writer}'s");
    }
}

/// The data that a writer appends under this serial number.
fn stamp(writer: u64, serial: u64, sectors: u64) -> Vec<u8> {
    let sector = |index: u64| {
        let word = (writer << 56 | serial << 16 | index).to_le_bytes();
        word.into_iter().cycle().take(SECTOR_BYTES as usize)
    };
    (0..sectors).flat_map(sector).collect()
}

/// Appends batches until one fails; returns (sector, sectors, writer, serial) of the successful
/// appends.
fn append_until_full(
    fixture: &mut Fixture,
    writer: u64,
    zone_start: u64,
    sectors: u64,
) -> Vec<(u64, u64, u64, u64)> {
    let mut landed = Vec::new();
    let mut serial = 0;
    loop {
        for slot in 0..8 {
            let offset = slot * sectors * SECTOR_BYTES;
            fixture.region.write(offset, &stamp(writer, serial, sectors));
            let bio = Bio::append(Sector(zone_start), sectors, fixture.buf(offset));
            assert_eq!(fixture.channel.push(&[bio.with_user_data(serial)]), 1);
            serial += 1;
        }
        let done = fixture.finish();
        assert_eq!(done.len(), 8, "one completion each");
        let mut failed = false;
        for completion in done {
            match completion.status {
                Status::Ok => {
                    landed.push((completion.sector.0, sectors, writer, completion.user_data));
                }
                status => {
                    assert_eq!(status, Status::IoErr, "a full zone refuses appends");
                    failed = true;
                }
            }
        }
        if failed {
            return landed;
        }
    }
}

/// Four threads fill, close, open and reset their own zones under shared limits. No limit is ever
/// exceeded, and after a reset of all zones all resources are free again.
///
/// null_blk fails this: a zone that is closed implicitly while another thread fills it is counted
/// as closed permanently. So after some seconds of such work, fewer and fewer zones can be opened.
pub(super) fn limits(subject: &Subject, seed: Seed) {
    let disk = subject.disk();
    let Some(zones) = disk.geometry().zones.clone() else { return };
    if zones.open_max + zones.active_max == 0 {
        return;
    }
    let sequential = zones.zone_count - zones.conventional_count;
    let share = (sequential / THREADS as u32).min(4);
    assert!(share > 0, "the suite wants four sequential zones at least");
    for round in 0..20 {
        on_threads(subject, &disk, THREADS, |number, mut fixture| {
            let mut rng = seed.rng(200 + round * THREADS + number);
            let first = zones.conventional_count + number as u32 * share;
            for _ in 0..40 {
                let zone = first + rng.u32(0..share);
                limited_step(&mut fixture, &zones, zone, &mut rng);
            }
        });
        within_limits(&*disk, &zones);
    }
    let mut fixture = Fixture::with_model(Arc::clone(&disk), subject.model(&*disk));
    assert_eq!(fixture.run(Bio::new(Op::ZoneResetAll, Sector(0), 0)).status, Status::Ok);
    fixture.same_report();
    super::zones::all_slots_are_there(&mut fixture);
}

/// One step of a thread on one of its zones; refusals for lack of resources are allowed.
fn limited_step(
    fixture: &mut Fixture,
    geometry: &ZoneGeometry,
    zone: u32,
    rng: &mut fastrand::Rng,
) {
    let block = fixture.model.write_sectors();
    let start = Sector(u64::from(zone) * geometry.zone_sectors);
    let mut report = Vec::new();
    fixture.disk.report_zones(start, 1, &mut report).expect("the zone exists");
    let (wp, limit) = (report[0].wp, start + report[0].capacity_sectors);
    let bio = match rng.u32(0..8) {
        0 => Bio::new(Op::ZoneReset, start, 0),
        1 => Bio::new(Op::ZoneOpen, start, 0),
        2 => Bio::new(Op::ZoneClose, start, 0),
        3 => Bio::new(Op::ZoneFinish, start, 0),
        // To the end, where a zone frees its resources by itself.
        4 if wp < limit => Bio::new(Op::Write, wp, limit - wp),
        _ if wp < limit => Bio::new(Op::Write, wp, block),
        _ => Bio::new(Op::ZoneReset, start, 0),
    };
    let status = fixture.run(bio.with_buf(fixture.buf(0))).status;
    let refused = matches!(status, Status::ZoneOpenResource | Status::ZoneActiveResource);
    // Closing an empty zone, or opening a full one, is an expected error of this test.
    let silly = matches!(bio.op, Op::ZoneClose | Op::ZoneOpen) && status == Status::IoErr;
    assert!(status.is_ok() || refused || silly, "{status} for {bio:?}");
}

/// Checks the limits between two rounds, when no bio is in flight.
fn within_limits(disk: &dyn Disk, geometry: &ZoneGeometry) {
    let mut report = Vec::new();
    disk.report_zones(Sector(0), usize::MAX, &mut report).expect("sector 0 exists");
    let count =
        |conds: &[ZoneCond]| report.iter().filter(|zone| conds.contains(&zone.cond)).count();
    let open = count(&[ZoneCond::ImplicitOpen, ZoneCond::ExplicitOpen]);
    let active = open + count(&[ZoneCond::Closed]);
    let within = |count: usize, max: u32| max == 0 || count <= max as usize;
    assert!(within(open, geometry.open_max), "{open} zones are open");
    assert!(within(active, geometry.active_max), "{active} zones are active");
}

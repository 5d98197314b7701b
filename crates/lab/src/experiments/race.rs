//! `race`: whether writers that close one another's zones lose open or active zones.
//!
//! The published failure of null_blk: each writer fills zones of its own in two halves and resets
//! them, so that it has one active zone at most; there are fewer open zones than writers, so that
//! they close each other's zones all the time. Afterwards everything is reset, and as many zones as
//! the active limit says must be had again.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use blockyard_core::channel::Channel;
use blockyard_core::zone::{WordZones, ZoneCond, ZoneInfo, ZoneSet};
use blockyard_core::{
    Bio, BufRef, Completion, Disk, Op, Region, RegionId, SECTOR_BYTES, Sector, Status,
};
use blockyard_yard::{stack, uri};
use rustix::time::{ClockId, clock_gettime};

use crate::baseline::lock_per_zone::{self, LockPerZone};
use crate::baseline::null_blk::{self, NullBlkZones};
use crate::baseline::one_lock::{self, OneLock};
use crate::error::LabError;
use crate::experiment::{Cell, Comparison, Experiment, Kind, Published, Variant, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::settings::Settings;
use crate::stop::Stop;

/// The name on the command line.
pub const NAME: &str = "race";

const PRODUCT: &str = "product";

/// Zones that may be open, and active, at once.
const OPEN_MAX: u64 = 2;
const ACTIVE_MAX: u64 = 6;
/// Zones of each writer.
const ZONES_EACH: u64 = 4;
/// Sectors of the writes that count what can be had again.
const BLOCK_SECTORS: u64 = 8;
/// How often a measurement looks whether it is to stop.
const SLICE: Duration = Duration::from_millis(20);

const WRITERS: [u32; 2] = [4, 32];

/// Zones filled and reset.
const CYCLES: Metric = Metric::more("cycles", "");
const CYCLES_PER_SECOND: Metric = Metric::more("cycles_per_second", "1/s");
const CPU_PER_CYCLE: Metric = Metric::less("cpu_per_cycle", "ns");
/// Active zones that cannot be had again.
const LOST: Metric = Metric::less("lost_zones", "");
/// Failures of what must not fail.
const SPURIOUS: Metric = Metric::less("spurious_errors", "");
/// Zones that could not become active because others were: no failure with more writers than that.
const REFUSED: Metric = Metric::less("refused", "");

type Open = fn(&str) -> Result<Arc<dyn Disk>, LabError>;

const GUARDINGS: [(Variant, Open); 4] = [
    (
        Variant {
            name: null_blk::NAME,
            kind: Kind::Before,
            about: "null_blk's way, fault included: a victim is closed without its lock",
        },
        disk::<NullBlkZones>,
    ),
    (
        Variant {
            name: one_lock::NAME,
            kind: Kind::Before,
            about: "one lock over all zones and what is counted",
        },
        disk::<OneLock>,
    ),
    (
        Variant {
            name: lock_per_zone::NAME,
            kind: Kind::After,
            about: "a lock per zone; a victim is closed under its own, its token in transit",
        },
        disk::<LockPerZone>,
    ),
    (
        Variant {
            name: PRODUCT,
            kind: Kind::Product,
            about: "a word per zone; a victim is closed by an exchange of its word",
        },
        disk::<WordZones>,
    ),
];

/// Workloads: name, what, bytes of a zone, whether there are data.
const WORKLOADS: [(&str, &str, u64, bool); 2] = [
    ("fill-and-reset", "1 MiB zones without data; jobs are writers", 1 << 20, false),
    ("fill-and-reset-data", "64 KiB zones in memory; jobs are writers", 64 << 10, true),
];

/// A device with zones for so many writers, through the product's whole stack.
fn disk<Z: ZoneSet>(uri: &str) -> Result<Arc<dyn Disk>, LabError> {
    let spec = uri::parse(uri).map_err(|error| LabError::failed(uri, error))?;
    let made = stack::open_with_zones::<Z>(&spec);
    Ok(made.map_err(|error| LabError::failed(uri, error))?.disk)
}

fn uri_of(writers: u32, zone_bytes: u64, data: bool) -> String {
    let size = u64::from(writers) * ZONES_EACH * zone_bytes;
    format!(
        "null:///race?size={size}&bs=4k&zoned=1&zone_size={zone_bytes}&memory_backed={}\
         &zone_max_open={OPEN_MAX}&zone_max_active={ACTIVE_MAX}",
        u8::from(data)
    )
}

/// The experiment.
pub fn build(settings: &Settings) -> Experiment {
    let writers = if settings.quick { &WRITERS[..1] } else { &WRITERS[..] };
    let mut cells = Vec::new();
    for (workload, _, zone_bytes, data) in WORKLOADS {
        for &writers in writers {
            for (variant, open) in GUARDINGS {
                let uri = uri_of(writers, zone_bytes, data);
                let body = move |round: &Round<'_>| measure(round, &*open(&uri)?, writers);
                cells.push(Cell::new(variant.name, workload, writers, body));
            }
        }
    }
    Experiment {
        name: NAME,
        title: "writers that close one another's zones",
        about: "Each writer fills its four zones in turn, in two halves, and resets each: it has \
                one active zone at most. Two zones may be open and six active, so that writers \
                close one another's zones all the time, while these are being written. With four \
                writers nothing may fail; with 32 a first half may find six zones active \
                (`refused`), and nothing else may fail (`spurious_errors`). Then all zones are \
                reset, and six must become active again: how many did not is `lost_zones`. The \
                published rows are of the kernel's null_blk, in virtual machines, for 20 seconds; \
                their writers give up after 21 failures, so their cycles are no throughput.",
        published: published(),
        variants: GUARDINGS.map(|guarding| guarding.0).to_vec(),
        workloads: WORKLOADS.map(|(name, about, ..)| Workload { name, about }).to_vec(),
        comparisons: [one_lock::NAME, lock_per_zone::NAME]
            .map(|before| Comparison::new(before, PRODUCT, CPU_PER_CYCLE))
            .to_vec(),
        plots: vec![LOST, CYCLES_PER_SECOND],
        cells,
    }
}

fn published() -> Vec<Published> {
    const RUNS: [(&str, [[f64; 3]; 2]); 3] = [
        (
            "null_blk, Linux 6.1.192, QEMU guest, without and with memory",
            [[29784.0, 78.0, 3.0], [1684.0, 80.0, 3.0]],
        ),
        (
            "null_blk, Linux 6.12.107, QEMU guest, without and with memory",
            [[118_619.0, 77.0, 3.0], [7776.0, 75.0, 4.0]],
        ),
        (
            "null_blk, Linux 7.2.13, QEMU guest, without and with memory",
            [[129_543.0, 75.0, 2.0], [7282.0, 78.0, 3.0]],
        ),
    ];
    let mut rows = Vec::new();
    for (source, runs) in RUNS {
        for ((workload, ..), values) in WORKLOADS.into_iter().zip(runs) {
            let metrics = [CYCLES, SPURIOUS, LOST];
            rows.extend(metrics.into_iter().zip(values).map(|(metric, value)| Published {
                variant: null_blk::NAME,
                workload,
                jobs: WRITERS[0],
                metric,
                value,
                source,
            }));
        }
    }
    rows
}

/// What a writer did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    cycles: u64,
    spurious: u64,
    refused: u64,
    cpu: Duration,
}

/// The race, and then the count of what can be had again.
fn measure(round: &Round<'_>, disk: &dyn Disk, writers: u32) -> Result<Sample, LabError> {
    let (done, start) = (Stop::new(), Barrier::new(writers as usize + 1));
    let mut doors = (0..=writers).map(|_| Door::open(disk)).collect::<Result<Vec<_>, _>>()?;
    let mut counting = doors.pop().expect("one more than writers");
    let zones = zones(disk)?;
    let (tallies, wall) = thread::scope(|scope| {
        let mut threads = Vec::with_capacity(doors.len());
        for (door, own) in doors.into_iter().zip(zones.chunks(ZONES_EACH as usize)) {
            let (done, start) = (&done, &start);
            let may_be_refused = u64::from(writers) > ACTIVE_MAX;
            threads.push(scope.spawn(move || {
                start.wait();
                write(door, own, may_be_refused, done)
            }));
        }
        start.wait();
        let since = Instant::now();
        let interrupted = pause(round.warm_up + round.duration, round);
        done.set();
        let tallies: Vec<Tally> = threads
            .into_iter()
            .map(|thread| thread.join().expect("a writer counts its errors"))
            .collect();
        interrupted.map(|()| (tallies, since.elapsed()))
    })?;
    let sum = |of: fn(&Tally) -> u64| tallies.iter().map(of).sum::<u64>() as f64;
    let cycles = sum(|tally| tally.cycles);
    let (had, spurious) = have_again(&mut counting, disk)?;
    let cpu: Duration = tallies.iter().map(|tally| tally.cpu).sum();
    Ok(Sample::of(CYCLES, cycles)
        .with(CYCLES_PER_SECOND, cycles / wall.as_secs_f64())
        .with(CPU_PER_CYCLE, cpu.as_nanos() as f64 / cycles.max(1.0))
        .with(LOST, had.abs_diff(ACTIVE_MAX) as f64)
        .with(SPURIOUS, sum(|tally| tally.spurious) + spurious as f64)
        .with(REFUSED, sum(|tally| tally.refused)))
}

fn pause(duration: Duration, round: &Round<'_>) -> Result<(), LabError> {
    let start = Instant::now();
    while start.elapsed() < duration {
        if round.stop.is_set() {
            return Err(LabError::Interrupted);
        }
        thread::sleep(SLICE.min(duration.saturating_sub(start.elapsed())));
    }
    Ok(())
}

fn zones(disk: &dyn Disk) -> Result<Vec<ZoneInfo>, LabError> {
    let mut zones = Vec::new();
    let report = disk.report_zones(Sector(0), usize::MAX, &mut zones);
    report.map_err(|error| LabError::failed(disk.name(), error))?;
    Ok(zones)
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// One writer, until it is done.
fn write(mut door: Door, own: &[ZoneInfo], may_be_refused: bool, done: &Stop) -> Tally {
    let (mut tally, since) = (Tally::default(), thread_time());
    for zone in own.iter().cycle() {
        if done.is_set() {
            break;
        }
        let half = zone.sectors / 2;
        let first = door.run(Op::Write, zone.start, half);
        match first {
            Status::Ok => {}
            Status::ZoneActiveResource if may_be_refused => {
                tally.refused += 1;
                thread::yield_now();
                continue;
            }
            _ => tally.spurious += 1,
        }
        if first.is_ok() {
            let second = door.run(Op::Write, zone.start + half, half);
            tally.spurious += u64::from(!second.is_ok());
        }
        let reset = door.run(Op::ZoneReset, zone.start, 0);
        tally.spurious += u64::from(!reset.is_ok());
        tally.cycles += 1;
    }
    tally.cpu = thread_time() - since;
    tally
}

/// Resets everything, and says how many zones could be made active then, and how much failed that
/// must not.
fn have_again(door: &mut Door, disk: &dyn Disk) -> Result<(u64, u64), LabError> {
    let mut spurious = u64::from(!door.run(Op::ZoneResetAll, Sector(0), 0).is_ok());
    let zones = zones(disk)?;
    spurious += zones.iter().filter(|zone| zone.cond != ZoneCond::Empty).count() as u64;
    let mut had = 0;
    for zone in &zones {
        match door.run(Op::Write, zone.start, BLOCK_SECTORS) {
            Status::Ok => had += 1,
            Status::ZoneActiveResource => break,
            _ => spurious += 1,
        }
    }
    Ok((had, spurious))
}

/// A channel that carries out one bio at a time, with a buffer for the longest.
struct Door {
    channel: Box<dyn Channel>,
    region: RegionId,
    out: Vec<Completion>,
}

impl Door {
    fn open(disk: &dyn Disk) -> Result<Door, LabError> {
        let channel = disk.open();
        let mut channel =
            channel.map_err(|error| LabError::failed(format!("opening {}", disk.name()), error))?;
        let zone_sectors = disk.geometry().zones.as_ref().map_or(0, |zones| zones.zone_sectors);
        let region = Region::alloc((zone_sectors / 2 * SECTOR_BYTES) as usize);
        let region = channel.register(region);
        Ok(Door { channel, region, out: Vec::with_capacity(1) })
    }

    fn run(&mut self, op: Op, sector: Sector, sectors: u64) -> Status {
        let buf = BufRef { region: self.region, offset: 0 };
        self.out.clear();
        if self.channel.push(&[Bio::new(op, sector, sectors).with_buf(buf)]) == 0 {
            return Status::Again;
        }
        self.channel.submit();
        while self.channel.reap(&mut self.out) == 0 {
            self.channel.wait(None);
        }
        self.out[0].status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The product and the locks lose nothing. Whether null_blk's way does in so short a time is
    /// chance; that it can is a test of its own.
    #[test]
    fn nothing_is_lost_and_nothing_fails() {
        let none = std::path::PathBuf::new();
        let settings = Settings {
            quick: false,
            engine: None,
            program: none.clone(),
            scratch: none,
            processors: 2,
        };
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(30));
        let round = Round { warm_up, duration, number: 0, seed: 3, stop: &stop };
        for cell in build(&settings).cells {
            let sample = (cell.body)(&round).unwrap();
            let value = |metric| sample.values.iter().find(|value| value.0 == metric).unwrap().1;
            assert!(value(CYCLES) > 0.0, "{cell:?}");
            if cell.variant != null_blk::NAME {
                assert_eq!((value(LOST), value(SPURIOUS)), (0.0, 0.0), "{cell:?}");
            }
            if cell.jobs == 4 && cell.variant != null_blk::NAME {
                assert_eq!(value(REFUSED), 0.0, "{cell:?}");
            }
        }
    }
}

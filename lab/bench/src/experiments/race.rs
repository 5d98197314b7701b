//! `race`: whether writers that close one another's zones lose open or active zones.
//!
//! This is the published failure of null_blk. Each writer fills zones of its own in two halves and
//! resets them, so that it has at most one active zone. There are fewer open zones than writers, so
//! that they close each other's zones all the time. Afterwards all zones are reset, and it must be
//! possible to activate as many zones as the limit allows.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use blockyard_baselines::lock_per_zone::{self, LockPerZone};
use blockyard_baselines::null_blk::{self, NullBlkZones};
use blockyard_baselines::one_lock::{self, OneLock};
use blockyard_core::channel::Channel;
use blockyard_core::zone::{AtomicZoneSet, ZoneCond, ZoneInfo, ZoneSet};
use blockyard_core::{
    Bio, BufRef, Completion, Disk, Op, Region, RegionId, SECTOR_BYTES, Sector, Status,
};
use blockyard_yard::{stack, uri};

use crate::counted::{self, Counts};
use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload};
use crate::experiments::zone_locks::{CountedLockPerZone, CountedOneLock, CountedWords};
use crate::load::workers::{self, Work};
use crate::metric::Metric;
use crate::sample::{RoomCount, Round, Sample};

/// The experiment's name on the command line.
pub const NAME: &str = "race";

const PRODUCT: &str = "product";

/// The limits of open and of active zones.
const OPEN_MAX: u64 = 2;
const ACTIVE_MAX: u64 = 6;
/// The number of zones of each writer.
const ZONES_EACH: u64 = 4;
/// The length in sectors of the writes that count the zones that can become active again.
const BLOCK_SECTORS: u64 = 8;

const WRITERS: [u32; 2] = [4, 32];

/// The window with counting locks is shorter than the measured window by this factor.
const COUNTED_PART: u32 = 4;

/// The number of zones filled and reset.
const CYCLES: Metric = Metric::more("cycles", "");
const CYCLES_PER_SECOND: Metric = Metric::more("cycles_per_second", "1/s");
/// The CPU time of all writers per cycle.
pub const CPU_PER_CYCLE: Metric = Metric::less("cpu_per_cycle", "ns");
/// The number of active zones that cannot be used again.
const LOST: Metric = Metric::less("lost_zones", "");
/// The number of failures of operations that must not fail.
const SPURIOUS: Metric = Metric::less("spurious_errors", "");
/// The number of refused activations because too many other zones were active. With more writers
/// than the limit a refusal is no failure.
const REFUSED: Metric = Metric::less("refused", "");

type OpenFn = fn(&str) -> Result<Arc<dyn Disk>, LabError>;

/// The variants, each with how it is opened, and how it is opened with counting locks. null_blk's
/// variant has no counting form: it loses tokens between its locks.
const GUARDINGS: [(Variant, OpenFn, Option<OpenFn>); 4] = [
    (
        Variant {
            name: null_blk::NAME,
            kind: VariantRole::Before,
            about: "the method of null_blk with its defect: a victim zone is closed without its \
                    lock",
        },
        disk::<NullBlkZones>,
        None,
    ),
    (
        Variant {
            name: one_lock::NAME,
            kind: VariantRole::Before,
            about: "one lock protects all zones and the counts of open and active zones",
        },
        disk::<OneLock>,
        Some(disk::<CountedOneLock>),
    ),
    (
        Variant {
            name: lock_per_zone::NAME,
            kind: VariantRole::After,
            about: "a lock per zone; a victim is closed under its own lock while its token is \
                    transferred",
        },
        disk::<LockPerZone>,
        Some(disk::<CountedLockPerZone>),
    ),
    (
        Variant {
            name: PRODUCT,
            kind: VariantRole::Product,
            about: "an atomic word per zone; a victim is closed by a compare-and-exchange of its \
                    word",
        },
        disk::<AtomicZoneSet>,
        Some(disk::<CountedWords>),
    ),
];

/// The workloads: name, description, zone size in bytes, whether data are stored.
const WORKLOADS: [(&str, &str, u64, bool); 2] = [
    ("fill-and-reset", "zones of 1 MiB without data; each job is a writer", 1 << 20, false),
    (
        "fill-and-reset-data",
        "zones of 64 KiB with data in memory; each job is a writer",
        64 << 10,
        true,
    ),
];

/// A device with zones for the writers of an experiment, through the product's whole stack.
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

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let writers = if settings.quick { &WRITERS[..1] } else { &WRITERS[..] };
    let mut cells = Vec::new();
    for (workload, _, zone_bytes, data) in WORKLOADS {
        for &writers in writers {
            for (variant, open, open_counted) in GUARDINGS {
                let uri = uri_of(writers, zone_bytes, data);
                let body = move |round: &Round<'_>| {
                    let sample = measure(round, &*open(&uri)?, writers)?;
                    // Round 0 is enough to see at which locks the writers meet; the other rounds
                    // need the time.
                    let rooms = match open_counted.filter(|_| round.number == 0) {
                        Some(open) => rooms(round, &*open(&uri)?, writers)?,
                        None => Vec::new(),
                    };
                    Ok(Sample { rooms, ..sample })
                };
                let cell = Cell::new(variant.name, workload, writers, body);
                cells.push(cell.overhead(Duration::from_millis(60)));
            }
        }
    }
    Experiment {
        name: NAME,
        title: "writers that close each other's zones",
        about: "Whether zone resources are lost when writers close each other's zones. Each writer \
                fills its four zones in turn, each in two halves, and resets them, so that it has \
                at most one active zone. The limits are two open and six active zones: the device \
                therefore closes zones of one writer for another while they are written. With four \
                writers no operation may fail. With 32, the first half of a zone may find six \
                zones active (`refused`); every other failure counts as `spurious_errors`. After \
                the run all zones are reset, and six of them must become active again: \
                `lost_zones` counts those that do not. Lock contention (`rooms`) is counted in the \
                first round, in a separate window. The published rows are those of the kernel's \
                null_blk in virtual machines, for 20 seconds; its writers stop after 21 failures, \
                so their cycles are not a throughput.",
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

/// Runs the race and returns the writers' counts of the window.
fn race<'a>(
    round: &Round<'_>,
    disk: &dyn Disk,
    zones: &'a [ZoneInfo],
    writers: u32,
) -> Result<workers::WorkersResult<RaceWriter<'a>, ()>, LabError> {
    let may_be_refused = u64::from(writers) > ACTIVE_MAX;
    let workers = zones.chunks(ZONES_EACH as usize).map(|own| {
        let (channel, counts) = (BioChannel::open(disk)?, Counts::default());
        let (next, cycles, spurious, refused) = (0, 0, 0, 0);
        Ok(RaceWriter { channel, own, next, may_be_refused, cycles, spurious, refused, counts })
    });
    workers::run(workers.collect::<Result<_, LabError>>()?, round, || ())
}

/// The counts of the counting locks for a race in a shorter window.
fn rooms(round: &Round<'_>, disk: &dyn Disk, writers: u32) -> Result<Vec<RoomCount>, LabError> {
    let (warm_up, duration) = (round.warm_up / COUNTED_PART, round.duration / COUNTED_PART);
    let zones = zones(disk)?;
    let outcome = race(&Round { warm_up, duration, ..*round }, disk, &zones, writers)?;
    let mut counts = Counts::default();
    outcome.workers.iter().for_each(|writer| counts.add(&writer.counts));
    Ok(counts.rooms())
}

/// Runs the race, and then counts the zones that can become active again.
fn measure(round: &Round<'_>, disk: &dyn Disk, writers: u32) -> Result<Sample, LabError> {
    let zones = zones(disk)?;
    let mut counting = BioChannel::open(disk)?;
    let outcome = race(round, disk, &zones, writers)?;
    let sum = |of: fn(&RaceWriter<'_>) -> u64| outcome.workers.iter().map(of).sum::<u64>() as f64;
    let cycles = sum(|writer| writer.cycles);
    let (had, spurious) = have_again(&mut counting, disk)?;
    Ok(Sample::of(CYCLES, cycles)
        .with(CYCLES_PER_SECOND, cycles / outcome.wall.as_secs_f64())
        .with(CPU_PER_CYCLE, outcome.cpu.as_nanos() as f64 / cycles.max(1.0))
        .with(LOST, had.abs_diff(ACTIVE_MAX) as f64)
        .with(SPURIOUS, sum(|writer| writer.spurious) + spurious as f64)
        .with(REFUSED, sum(|writer| writer.refused)))
}

fn zones(disk: &dyn Disk) -> Result<Vec<ZoneInfo>, LabError> {
    let mut zones = Vec::new();
    let report = disk.report_zones(Sector(0), usize::MAX, &mut zones);
    report.map_err(|error| LabError::failed(disk.name(), error))?;
    Ok(zones)
}

/// A writer and its counts.
struct RaceWriter<'a> {
    channel: BioChannel,
    own: &'a [ZoneInfo],
    /// The index of its next zone in `own`.
    next: usize,
    may_be_refused: bool,
    /// Zones filled and reset in the window.
    cycles: u64,
    /// Failures since the start: no operation may fail in the warm-up either.
    spurious: u64,
    /// Refused activations in the window.
    refused: u64,
    /// The counts of the counting locks in the window.
    counts: Counts,
}

impl Work for RaceWriter<'_> {
    /// One turn: fills and resets a zone, unless its activation is refused.
    fn turn(&mut self) -> Result<u64, LabError> {
        let zone = &self.own[self.next];
        self.next = (self.next + 1) % self.own.len();
        let half = zone.sectors / 2;
        let first = self.channel.run(Op::Write, zone.start, half);
        match first {
            Status::Ok => {}
            Status::ZoneActiveResource if self.may_be_refused => {
                self.refused += 1;
                thread::yield_now();
                return Ok(1);
            }
            _ => self.spurious += 1,
        }
        if first.is_ok() {
            let second = self.channel.run(Op::Write, zone.start + half, half);
            self.spurious += u64::from(!second.is_ok());
        }
        let reset = self.channel.run(Op::ZoneReset, zone.start, 0);
        self.spurious += u64::from(!reset.is_ok());
        self.cycles += 1;
        Ok(1)
    }

    fn begin(&mut self) {
        (self.cycles, self.refused) = (0, 0);
        counted::begin();
    }

    fn end(&mut self) {
        self.counts = counted::end();
    }
}

/// Resets all zones. Returns the number of zones that could become active afterwards, and the
/// number of failures that must not occur.
fn have_again(channel: &mut BioChannel, disk: &dyn Disk) -> Result<(u64, u64), LabError> {
    let mut spurious = u64::from(!channel.run(Op::ZoneResetAll, Sector(0), 0).is_ok());
    let zones = zones(disk)?;
    spurious += zones.iter().filter(|zone| zone.cond != ZoneCond::Empty).count() as u64;
    let mut had = 0;
    for zone in &zones {
        match channel.run(Op::Write, zone.start, BLOCK_SECTORS) {
            Status::Ok => had += 1,
            Status::ZoneActiveResource => break,
            _ => spurious += 1,
        }
    }
    Ok((had, spurious))
}

/// A channel that executes one bio at a time, with a buffer for the longest bio.
struct BioChannel {
    channel: Box<dyn Channel>,
    region: RegionId,
    out: Vec<Completion>,
}

impl BioChannel {
    fn open(disk: &dyn Disk) -> Result<BioChannel, LabError> {
        let channel = disk.open();
        let mut channel =
            channel.map_err(|error| LabError::failed(format!("opening {}", disk.name()), error))?;
        let zone_sectors = disk.geometry().zones.as_ref().map_or(0, |zones| zones.zone_sectors);
        let region = Region::alloc((zone_sectors / 2 * SECTOR_BYTES) as usize);
        let region = channel.register(region);
        Ok(BioChannel { channel, region, out: Vec::with_capacity(1) })
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
    use std::time::Duration;

    use super::*;
    use crate::stop::Stop;

    /// The product and the locks lose no zone. Whether null_blk's variant loses one in so short a
    /// time is chance; a test of its own shows that it can.
    #[test]
    fn nothing_is_lost_and_nothing_fails() {
        let none = std::path::PathBuf::new();
        let settings = Settings {
            quick: false,
            engine: None,
            program: none.clone(),
            lab: "blockyard-lab".into(),
            scratch: none,
            processors: 2,
            peers: Default::default(),
        };
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(30));
        let round = Round { warm_up, duration, number: 0, seed: 3, stop: &stop };
        for cell in build(&settings).cells {
            let sample = (cell.body)(&round).unwrap();
            let rooms: Vec<&str> = sample.rooms.iter().map(|room| room.room.as_str()).collect();
            let wanted: &[&str] = match cell.variant {
                null_blk::NAME => &[],
                one_lock::NAME => &["one lock"],
                lock_per_zone::NAME => &["zone_table", "zone_resources"],
                _ => &["zone_resources"],
            };
            assert_eq!(rooms, wanted, "{cell:?}");
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

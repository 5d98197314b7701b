//! The published iozone rows: each thread reads or writes a part of its own.

use std::sync::Arc;
use std::time::Duration;

use blockyard_baselines::locked_ram;
use blockyard_core::Disk;

use super::{Guarding, PRODUCT, Sizes, guardings, open};
use crate::counted::Counts;
use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Published, Workload};
use crate::experiments::cached::Cached;
use crate::experiments::ram_lines::{self, JOBS, SOURCE_IOZONE, iozone};
use crate::load::records::{Does, Order, Part, Passed, Records, Task, Way, pass};
use crate::load::workers;
use crate::metric::Metric;
use crate::sample::{RoomCount, Round, Sample};

/// The length of a record in bytes.
pub(super) const RECORD_BYTES: u64 = 16 << 10;
/// The number of processors of the smallest machine that can show a difference.
const JOBS_TWO: u32 = 2;
/// The window with counting locks is shorter than the measured window by this factor.
const COUNTED_PART: u32 = 4;
/// The aims: for reads, and for all other operations.
const AIM_READ: f64 = 1.33;
const AIM_WRITE: f64 = 1.0;
/// The number of processors from which the published gain can show.
const PROCESSORS_ENOUGH: usize = 4;

/// A row: the operation of each thread, and the published figures in KiB/s.
struct RowSpec {
    workload: Workload,
    does: Does,
    order: Order,
    way: Way,
    /// Whether the run writes blocks that were never written before.
    fresh: bool,
    published: [u32; 5],
    /// Whether the row is also measured with two threads.
    two: bool,
    /// Whether a quick run includes the row.
    quick: bool,
}

const fn line(
    name: &'static str,
    about: &'static str,
    (does, order, way): (Does, Order, Way),
    published: [u32; 5],
) -> RowSpec {
    let workload = Workload { name, about };
    RowSpec { workload, does, order, way, fresh: false, published, two: false, quick: false }
}

static LINES: [RowSpec; 11] = [
    RowSpec {
        fresh: true,
        quick: true,
        two: true,
        ..line(
            "initial-write",
            "sequential writes of 16 KiB records to blocks that were never written; one pass of \
             200 MiB per thread",
            (Does::Write, Order::Forward, Way::Push),
            iozone::INITIAL_WRITE,
        )
    },
    RowSpec {
        quick: true,
        two: true,
        ..line(
            "rewrite",
            "sequential overwrites of 16 KiB records",
            (Does::Write, Order::Forward, Way::Push),
            iozone::REWRITE,
        )
    },
    RowSpec {
        quick: true,
        two: true,
        ..line(
            "read",
            "sequential reads of 16 KiB records",
            (Does::Read, Order::Forward, Way::Push),
            iozone::READ,
        )
    },
    line(
        "re-read",
        "a second run of `read`",
        (Does::Read, Order::Forward, Way::Push),
        iozone::RE_READ,
    ),
    line(
        "reverse-read",
        "reads of 16 KiB records from the last to the first",
        (Does::Read, Order::Backward, Way::Push),
        iozone::REVERSE_READ,
    ),
    line(
        "stride-read",
        "reads of every 17th 16 KiB record, in 17 passes that together reach all records",
        (Does::Read, Order::Strided, Way::Push),
        iozone::STRIDE_READ,
    ),
    RowSpec {
        quick: true,
        two: true,
        ..line(
            "random-read",
            "random reads of 16 KiB records",
            (Does::Read, Order::Random, Way::Push),
            iozone::RANDOM_READ,
        )
    },
    RowSpec {
        quick: true,
        two: true,
        ..line(
            "mixed",
            "random reads and writes of 16 KiB records, equally often",
            (Does::Either, Order::Random, Way::Push),
            iozone::MIXED,
        )
    },
    RowSpec {
        two: true,
        ..line(
            "random-write",
            "random overwrites of 16 KiB records",
            (Does::Write, Order::Random, Way::Push),
            iozone::RANDOM_WRITE,
        )
    },
    line(
        "pwrite",
        "sequential writes of 16 KiB records, executed inline by the submitting call",
        (Does::Write, Order::Forward, Way::Carry),
        iozone::PWRITE,
    ),
    line(
        "pread",
        "sequential reads of 16 KiB records, executed inline by the submitting call",
        (Does::Read, Order::Forward, Way::Carry),
        iozone::PREAD,
    ),
];

fn listed(settings: &Settings) -> impl Iterator<Item = &'static RowSpec> + use<> {
    let quick = settings.quick;
    LINES.iter().filter(move |line| line.quick || !quick)
}

pub(super) fn workloads(settings: &Settings) -> impl Iterator<Item = Workload> {
    listed(settings).map(|line| line.workload)
}

/// A cell for each row, variant and number of threads.
pub(super) fn cells(settings: &Settings, sizes: Sizes) -> Vec<Cell> {
    let homes: Vec<(&Guarding, Cached<dyn Disk>)> =
        guardings(settings).map(|guarding| (guarding, Cached::new())).collect();
    let processors = settings.processors;
    let mut cells = Vec::new();
    for line in listed(settings) {
        for jobs in [JOBS_TWO, JOBS] {
            if jobs == JOBS_TWO && !line.two {
                continue;
            }
            for (guarding, kept) in &homes {
                let (guarding, kept) = (*guarding, kept.clone());
                let body = move |round: &Round<'_>| {
                    measure(guarding, &kept, line, (jobs, processors), sizes, round)
                };
                let cell = Cell::new(guarding.variant.name, line.workload.name, jobs, body);
                // No window bounds the duration of a pass.
                let overhead =
                    Duration::from_millis(if line.fresh { sizes.file >> 19 } else { 20 });
                cells.push(cell.overhead(overhead));
            }
        }
    }
    cells
}

fn device(sizes: Sizes) -> String {
    format!("ram:///r?size={}&algo=lz4&compact=0", sizes.device)
}

fn measure(
    guarding: &Guarding,
    kept: &Cached<dyn Disk>,
    line: &RowSpec,
    (jobs, processors): (u32, usize),
    sizes: Sizes,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let passed = if line.fresh {
        let disk = open(guarding.before, &device(sizes))?;
        pass(threads(&*disk, line, jobs, sizes.file, round.seed)?, round)?
    } else {
        let disk =
            kept.get(|| filled(open(guarding.before, &device(sizes))?, sizes.file, round))?;
        window(&*disk, line, jobs, sizes.file, round)?.0
    };
    let sample = passed.limited_sample(RECORD_BYTES, jobs as usize, processors);
    // Round 0 is enough to see at which locks the threads meet; the other rounds need the time.
    let Some(open_counted) = guarding.open_counted.filter(|_| round.number == 0) else {
        return Ok(sample);
    };
    let disk = open_counted(&device(sizes))?;
    let (warm_up, duration) = (round.warm_up / COUNTED_PART, round.duration / COUNTED_PART);
    let short = Round { warm_up, duration, ..*round };
    if !line.fresh {
        let fill = line_like(line, Does::Write);
        pass(threads(&*disk, &fill, JOBS, sizes.counted_file, round.seed)?, round)?;
    }
    let rooms = window(&*disk, line, jobs, sizes.counted_file, &short)?.1.rooms();
    let mut sample = Sample { rooms, ..sample };
    if guarding.before == Some(locked_ram::TABLE_LOCK) && line.does == Does::Read {
        let note = sample.rooms.first().map(|room| what_limits(line, jobs, processors, room));
        sample.notes.extend(note);
    }
    Ok(sample)
}

/// A row over the records of `line` in order, with the operation `does`.
fn line_like(line: &RowSpec, does: Does) -> RowSpec {
    let RowSpec { workload, published, .. } = *line;
    let (order, way) = (Order::Forward, Way::Push);
    RowSpec { workload, does, order, way, fresh: false, published, two: false, quick: false }
}

/// The threads of a row, each with its part of the disk.
fn threads(
    disk: &dyn Disk,
    line: &RowSpec,
    jobs: u32,
    file: u64,
    seed: u64,
) -> Result<Vec<Records>, LabError> {
    let RowSpec { does, order, way, .. } = *line;
    let task = Task { does, order, way, record_bytes: RECORD_BYTES };
    let thread = |number: u64| {
        let part = Part { from: number * file, len_bytes: file };
        Records::open(disk, task, part, seed.wrapping_add(number))
    };
    (0..u64::from(jobs)).map(thread).collect()
}

/// Writes the parts of all threads, and returns the disk.
fn filled(disk: Arc<dyn Disk>, file: u64, round: &Round<'_>) -> Result<Arc<dyn Disk>, LabError> {
    let fill = line_like(&LINES[0], Does::Write);
    pass(threads(&*disk, &fill, JOBS, file, 1)?, round)?;
    Ok(disk)
}

/// The operations of a window, and the counts of its counting locks.
fn window(
    disk: &dyn Disk,
    line: &RowSpec,
    jobs: u32,
    file: u64,
    round: &Round<'_>,
) -> Result<(Passed, Counts), LabError> {
    let outcome = workers::run(threads(disk, line, jobs, file, round.seed)?, round, || ())?;
    if outcome.ios == 0 {
        return Err(LabError::failed(line.workload.name, "no I/O ended in the measured window"));
    }
    let mut counts = Counts::default();
    outcome.workers.iter().for_each(|thread| counts.add(thread.counts()));
    Ok((Passed { records: outcome.ios, wall: outcome.wall, cpu: outcome.cpu }, counts))
}

/// Explains the gain of a read row by the counts of its lock.
fn what_limits(line: &RowSpec, jobs: u32, processors: usize, room: &RoomCount) -> String {
    let RoomCount { acquisitions, contended, hold_ns, .. } = room;
    let share = *contended as f64 / (*acquisitions).max(1) as f64 * 100.0;
    let mut text = format!(
        "{} with {jobs} threads: the lock over the table was taken {acquisitions} times, for {:.0} \
         ns each; {contended} times ({share:.2} %) a thread had to wait for it. Readers share the \
         lock, so it costs them no waiting, but its cache line, which each reader changes twice a \
         block.",
        line.workload.name, hold_ns[0],
    );
    if processors < PROCESSORS_ENOUGH {
        text.push_str(&format!(
            "On {processors} CPUs the cache line moves between {processors} only, and the \
             published gain, measured on four, cannot show; `blockyard-lab scale ram-locks --cores \
             4` prints what a model predicts for four.",
        ));
    }
    text
}

/// The published figures of these rows.
pub(super) fn published(settings: &Settings) -> impl Iterator<Item = Published> {
    listed(settings).flat_map(|line| {
        ram_lines::published(line.workload.name, Some(line.published), SOURCE_IOZONE)
    })
}

/// The comparisons and their aims.
pub(super) fn comparisons(settings: &Settings) -> impl Iterator<Item = Comparison> {
    listed(settings).map(|line| {
        let aim = if line.does == Does::Read { AIM_READ } else { AIM_WRITE };
        let comparison = Comparison::new(locked_ram::TABLE_LOCK, PRODUCT, Metric::BANDWIDTH);
        comparison.under(line.workload.name).from_jobs(2).aim(aim)
    })
}

#[cfg(test)]
mod tests {
    use super::super::{NAME, build_with};
    use super::*;
    use crate::stop::Stop;

    const SMALL: Sizes = Sizes { device: 8 << 20, file: 1 << 20, counted_file: 256 << 10 };

    /// Every row is measured for every variant, and has lock counts where the variant has a lock.
    #[test]
    fn every_row_is_measured_for_every_variant() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(2));
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
        let mut notes = Vec::new();
        for cell in cells(&settings, SMALL) {
            let round = Round { warm_up, duration, number: 0, seed: 3, stop: &stop };
            let sample = (cell.body)(&round).unwrap_or_else(|error| panic!("{cell:?}: {error}"));
            assert!(sample.values.iter().all(|value| value.1 > 0.0), "{cell:?}");
            let rooms: Vec<&str> = sample.rooms.iter().map(|room| room.room.as_str()).collect();
            let wanted: &[&str] = match cell.variant {
                PRODUCT => &[],
                locked_ram::TABLE_LOCK => &["table"],
                _ => &["entries"],
            };
            assert_eq!(rooms, wanted, "{cell:?}");
            notes.extend(sample.notes.into_iter().filter(|note| note.contains("lab scale")));
        }
        assert!(!notes.is_empty() && notes.iter().all(|note| note.contains(NAME)), "{notes:?}");
        let experiment = build_with(&settings, SMALL);
        assert_eq!(experiment.published.iter().filter(|row| row.workload == "pread").count(), 5);
    }
}

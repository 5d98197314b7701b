//! `zone-locks`: the gain when cores do not wait for one another at the zones.

use std::sync::Arc;
use std::time::Duration;

use blockyard_baselines::lock_per_zone::{self, LockPerZone};
use blockyard_baselines::locked_zones::{SleepingZone, SpinningZone};
use blockyard_baselines::one_lock::{self, OneLock, QueuedZones, SleepingZones, SpinningZones};
use blockyard_baselines::tokens::TokensLock;
use blockyard_core::Disk;
use blockyard_core::zone::{AtomicZoneSet, ZoneSet};
use blockyard_sync::zone_resources::AccountsLock;
use blockyard_yard::{stack, uri};

use crate::counted::{Counted, ONE_LOCK, ZONE_RESOURCES, ZONE_TABLE};
use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload};
use crate::experiments::zone_locks_fio as by_fio;
use crate::load::{self, Load, Pattern, UNDISTURBED_IOPS};
use crate::metric::Metric;
use crate::sample::{RoomCount, Round, Sample};

/// The experiment's name on the command line.
pub const NAME: &str = "zone-locks";

/// The device: 256 zones, without data, as in the published command lines.
const DEVICE: &str = "null:///z?size=64G&zoned=1&zone_size=256M&bs=4096";

const PRODUCT: &str = "product";

const READ: &str = "random-read";
const WRITE: &str = "random-write";
const READ_DEEP: &str = "random-read-32";
const WRITE_DEEP: &str = "random-write-32";

const JOBS: [u32; 5] = [1, 2, 8, 32, 96];
/// The numbers of jobs for the workloads with many I/Os in flight, of which further numbers show
/// nothing new.
const JOBS_DEEP: [u32; 3] = [1, 2, 8];

/// The window with counting locks is shorter than the measured window by this factor.
const COUNTED_PART: u32 = 4;

/// The workloads, each with the access pattern and depth of a thread.
const WORKLOADS: [(Workload, Pattern, usize); 4] = [
    (
        Workload {
            name: READ,
            about: "4 KiB random reads, 8 in flight per job (published: libaio)",
        },
        Pattern::RandomRead,
        8,
    ),
    (
        Workload {
            name: WRITE,
            about: "4 KiB writes at the write pointer of a random zone, one in flight per job \
                    (published: psync)",
        },
        Pattern::RandomWrite,
        1,
    ),
    (
        Workload { name: READ_DEEP, about: "4 KiB random reads, 32 in flight per job" },
        Pattern::RandomRead,
        32,
    ),
    (
        Workload {
            name: WRITE_DEEP,
            about: "4 KiB writes at the write pointer of a random zone, 32 in flight per job",
        },
        Pattern::RandomWrite,
        32,
    ),
];

/// The baseline with one lock, which counts.
pub(crate) type CountedOneLock =
    OneLock<Counted<SpinningZones, ONE_LOCK>, Counted<SleepingZones, ONE_LOCK>>;
/// The baseline with a lock per zone; all its locks count, including that of the resources.
pub(crate) type CountedLockPerZone = LockPerZone<
    Counted<SpinningZone, ZONE_TABLE>,
    Counted<SleepingZone, ZONE_TABLE>,
    Counted<TokensLock, ZONE_RESOURCES>,
>;
/// The product, whose only lock, that of the resources, counts.
pub(crate) type CountedWords = AtomicZoneSet<Counted<AccountsLock, ZONE_RESOURCES>>;

/// A way to protect zones, and the disk that counts its locks' use.
struct Guarding {
    variant: Variant,
    open: fn() -> Result<Arc<dyn Disk>, LabError>,
    open_counted: fn() -> Result<Arc<dyn Disk>, LabError>,
    /// Whether results with more jobs than processors are meaningful.
    oversubscribed: bool,
}

const GUARDINGS: [Guarding; 4] = [
    Guarding {
        variant: Variant {
            name: one_lock::NAME_QUEUED,
            kind: VariantRole::Before,
            about: "one ticket spin lock over all zones, granted in the order of arrival as \
                    Linux's spin locks are: the published form. If a waiting thread is preempted, \
                    all threads after it in the queue stop, which cannot happen in the kernel; \
                    this variant is therefore measured only with at most as many jobs as CPUs",
        },
        open: disk::<OneLock<QueuedZones>>,
        open_counted: disk::<
            OneLock<Counted<QueuedZones, ONE_LOCK>, Counted<SleepingZones, ONE_LOCK>>,
        >,
        oversubscribed: false,
    },
    Guarding {
        variant: Variant {
            name: one_lock::NAME,
            kind: VariantRole::Before,
            about: "one unfair spin lock over all zones, which also protects the counts of open \
                    and active zones",
        },
        open: disk::<OneLock>,
        open_counted: disk::<CountedOneLock>,
        oversubscribed: true,
    },
    Guarding {
        variant: Variant {
            name: lock_per_zone::NAME,
            kind: VariantRole::After,
            about: "a lock per zone, which reads take too",
        },
        open: disk::<LockPerZone>,
        open_counted: disk::<CountedLockPerZone>,
        oversubscribed: true,
    },
    Guarding {
        variant: Variant {
            name: PRODUCT,
            kind: VariantRole::Product,
            about: "an atomic word per zone: a write exchanges it, and a read only loads it",
        },
        open: disk::<AtomicZoneSet>,
        open_counted: disk::<CountedWords>,
        oversubscribed: true,
    },
];

/// A new device whose zones are of type `Z`, through the product's whole stack.
pub(crate) fn disk<Z: ZoneSet>() -> Result<Arc<dyn Disk>, LabError> {
    let spec = uri::parse(DEVICE).map_err(|error| LabError::failed(DEVICE, error))?;
    let made = stack::open_with_zones::<Z>(&spec);
    Ok(made.map_err(|error| LabError::failed(DEVICE, error))?.disk)
}

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let workloads = if settings.quick { &WORKLOADS[..2] } else { &WORKLOADS[..] };
    let processors = settings.processors;
    let jobs = |depth| match (settings.quick, depth) {
        (true, _) => &[1, 2, 96][..],
        (false, 32) => &JOBS_DEEP,
        (false, _) => &JOBS,
    };
    let mut cells = Vec::new();
    for &(workload, pattern, depth) in workloads {
        for &jobs in jobs(depth) {
            for Guarding { variant, open, open_counted, oversubscribed } in GUARDINGS {
                if jobs as usize > processors && !oversubscribed {
                    continue;
                }
                let load = Load { pattern, threads: jobs as usize, depth };
                let body = move |round: &Round<'_>| {
                    let sample = load::run(&*open()?, &load, round)?.sample(processors);
                    // Round 0 is enough to see at which locks the threads meet; the other rounds
                    // need the time.
                    let rooms = match round.number {
                        0 => rooms(&*open_counted()?, &load, round)?,
                        _ => Vec::new(),
                    };
                    Ok(Sample { rooms, ..sample })
                };
                let counted = Duration::from_millis(60);
                cells.push(Cell::new(variant.name, workload.name, jobs, body).overhead(counted));
            }
        }
    }
    let variants = GUARDINGS.map(|guarding| guarding.variant);
    let many = GUARDINGS.iter().filter(|guarding| guarding.oversubscribed);
    let many: Vec<&str> = many.map(|guarding| guarding.variant.name).collect();
    cells.extend(by_fio::cells(settings, DEVICE, &many, PRODUCT));
    let mut workloads: Vec<Workload> = workloads.iter().map(|workload| workload.0).collect();
    workloads.extend(by_fio::workloads(settings));
    Experiment {
        name: NAME,
        title: "the zone table: one lock, a lock per zone, and no lock for reads",
        about: "Throughput (IOPS) and CPU time per I/O (ns) of a zoned null device without data, \
                by the technique that protects its zones. Threads read at random offsets, or write \
                at the write pointers of their own zones, as fast as they can: no two threads \
                write to the same zone, so that they wait for each other only because of that \
                technique. All variants have the same stack and load generator, in process, and a \
                new device for each measurement. With at most as many jobs as CPUs, \
                `undisturbed_iops` is the throughput of those half milliseconds in which every job \
                had a CPU. Few CPUs bound the gain: on two, the product reaches twice its rate of \
                one job, and the rest of a ratio is the loss of the one lock against its own rate \
                of one job; see those rows. Lock contention (`rooms`) is counted in the first \
                round, in a separate window with counting locks, so that the counting does not \
                slow the measured throughput. Latencies are those of whole batches, from push to \
                reap: a batch has as many I/Os as a job has in flight. The published fio command \
                lines use the same devices through our fio engine, in fio's process; their CPU \
                time includes fio's.",
        published: published(settings),
        variants: variants.to_vec(),
        workloads,
        comparisons: comparisons(settings),
        plots: vec![Metric::IOPS, UNDISTURBED_IOPS, Metric::CPU_PER_IO],
        cells,
    }
}

/// The counts of the counting locks in a shorter window.
fn rooms(disk: &dyn Disk, load: &Load, round: &Round<'_>) -> Result<Vec<RoomCount>, LabError> {
    let (warm_up, duration) = (round.warm_up / COUNTED_PART, round.duration / COUNTED_PART);
    let round = Round { warm_up, duration, ..*round };
    Ok(load::run(disk, load, &round)?.counts.rooms())
}

fn published(settings: &Settings) -> Vec<Published> {
    let source = "null_blk, Linux 5.10 (2020), fio zonemode=zbd, scheduler none, two sockets with \
                  24 cores each";
    let row = |variant, workload, kilo_iops: f64| Published {
        variant,
        workload,
        jobs: 96,
        metric: Metric::IOPS,
        value: kilo_iops * 1000.0,
        source,
    };
    let mut rows = vec![
        row(one_lock::NAME, READ, 1361.0),
        row(lock_per_zone::NAME, READ, 4096.0),
        row(one_lock::NAME, WRITE, 465.0),
        row(lock_per_zone::NAME, WRITE, 456.0),
    ];
    rows.extend(by_fio::published(settings, source));
    rows
}

fn comparisons(settings: &Settings) -> Vec<Comparison> {
    let aims = [(READ, 3.0), (READ_DEEP, 3.0), (WRITE, 1.5), (WRITE_DEEP, 1.5)];
    let aimed = aims.map(|(workload, aim)| {
        let comparison = Comparison::new(one_lock::NAME, PRODUCT, Metric::IOPS);
        comparison.under(workload).from_jobs(2).aim(aim)
    });
    let mut comparisons = aimed.to_vec();
    // Compared with the lock of the published form, where it is available.
    comparisons.extend(aims.map(|(workload, aim)| {
        let comparison = Comparison::new(one_lock::NAME_QUEUED, PRODUCT, Metric::IOPS);
        comparison.under(workload).from_jobs(2).aim(aim)
    }));
    // The comparisons for a machine that is otherwise busy, where the aims are about undisturbed
    // I/Os.
    comparisons.extend(aims.map(|(workload, aim)| {
        let comparison = Comparison::new(one_lock::NAME, PRODUCT, UNDISTURBED_IOPS);
        comparison.under(workload).from_jobs(2).aim(aim)
    }));
    comparisons.push(Comparison::new(lock_per_zone::NAME, PRODUCT, UNDISTURBED_IOPS));
    comparisons.extend(by_fio::comparisons(settings, PRODUCT));
    comparisons.push(Comparison::new(one_lock::NAME, PRODUCT, Metric::CPU_PER_IO));
    comparisons.push(Comparison::new(one_lock::NAME, lock_per_zone::NAME, Metric::IOPS));
    comparisons.push(Comparison::new(lock_per_zone::NAME, PRODUCT, Metric::IOPS));
    comparisons
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;

    fn settings() -> Settings {
        let none = std::path::PathBuf::new();
        Settings {
            quick: true,
            engine: None,
            program: none.clone(),
            lab: "blockyard-lab".into(),
            scratch: none,
            processors: 2,
            peers: Default::default(),
        }
    }

    /// Every variant is measured, and the counts are those of its own locks.
    #[test]
    fn rooms_are_those_of_the_variant() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::from_millis(1), Duration::from_millis(20));
        let round = Round { warm_up, duration, number: 0, seed: 3, stop: &stop };
        let experiment = build(&settings());
        for cell in experiment.cells.iter().filter(|cell| cell.jobs == 2) {
            let sample = (cell.body)(&round).unwrap();
            let rooms: Vec<&str> = sample.rooms.iter().map(|room| room.room.as_str()).collect();
            let wanted: &[&str] = match (cell.variant, cell.workload) {
                (one_lock::NAME | one_lock::NAME_QUEUED, _) => &["one lock"],
                (PRODUCT, _) => &[],
                _ => &["zone_table"],
            };
            assert_eq!(rooms, wanted, "{cell:?}");
        }
    }

    #[test]
    fn rows_that_fio_drives_need_its_engine() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::ZERO);
        let round = Round { warm_up, duration, number: 0, seed: 3, stop: &stop };
        let by_fio: Vec<Cell> = build(&settings())
            .cells
            .into_iter()
            .filter(|cell| cell.workload.ends_with("-fio"))
            .collect();
        assert_eq!(by_fio.len(), 3);
        for cell in by_fio {
            let error = (cell.body)(&round).unwrap_err().to_string();
            assert_eq!(error, "libblockyard_fio-*.so is missing; run `make fio`");
        }
    }

    #[test]
    fn every_cell_has_its_variant_and_workload() {
        let experiment = build(&Settings { quick: false, ..settings() });
        let (many, processors) = (3 * 2 * (JOBS.len() + JOBS_DEEP.len() + 1), 2 * 4);
        assert_eq!(experiment.cells.len(), many + processors);
        for cell in &experiment.cells {
            assert!(experiment.variants.iter().any(|variant| variant.name == cell.variant));
            assert!(experiment.workloads.iter().any(|workload| workload.name == cell.workload));
        }
        for comparison in &experiment.comparisons {
            for name in [comparison.before, comparison.after] {
                assert!(experiment.variants.iter().any(|variant| variant.name == name));
            }
        }
    }
}

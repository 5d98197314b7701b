//! `zone-append`: the gain of appends over ordered writes, and the cost of an append.

use std::fmt;
use std::sync::Arc;

use blockyard_baselines::zone_lock::ZoneLocks;
use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::{Bio, BufRef, Composed, Disk, Op, RegionId, SECTOR_BYTES, Sector};
use blockyard_null::Null;
use blockyard_yard::{stack, uri};
use blockyard_zonefs::{
    AccessMode, FileKind, IoHandle, MountOptions, Superblock, Uuid, ZoneFile, ZoneFs,
};
use fastrand::Rng;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload};
use crate::limits::pair::together;
use crate::limits::slices::alone;
use crate::load::workers::{self, Work};
use crate::load::{Load, Pattern, UNDISTURBED_IOPS, Worker};
use crate::metric::Metric;
use crate::sample::{Round, Sample};

/// The experiment's name on the command line.
pub const NAME: &str = "zone-append";

/// The device of the published pair: each I/O takes 10 us. No run fills a zone, and one zone is for
/// the superblock of zonefs.
const TIMER: &str = "null:///t?size=576G&zoned=1&zone_size=64G&bs=4k&irqmode=timer\
                     &completion_nsec=10000";
/// The devices of appends that take no time: with more zones than any workload needs, or with one.
const MANY: &str = "null:///m?size=64G&zoned=1&zone_size=256M&bs=4k";
const ONE: &str = "null:///o?size=1T&zoned=1&zone_size=1T&bs=4k";

/// The length of a write or an append to the timed device.
const SECTORS: u64 = (64 << 10) / SECTOR_BYTES;
const BYTES: usize = (SECTORS * SECTOR_BYTES) as usize;
/// The first zone of the timed device that is written; the zone before has the superblock.
const FIRST_ZONE: usize = 1;
/// The number of zones that are written.
pub(super) const ZONES: usize = 8;
/// The batch size of appends that take no time.
const DEPTH: usize = 32;
/// The aim for the appends per second of one core.
const AIM_PER_CORE: f64 = 20e6;

const WRITE_LOCKED: &str = "write-locked";
const APPEND_LOCKED: &str = "append-locked";
const APPEND_EMULATED: &str = "append-emulated";
const APPEND: &str = "append";
/// The aim for one core, in words.
const AIM: &str = "20 M/s";
const ALONE: &str = "alone";
const PAIR: &str = "pair";

const ONE_THREAD: &str = "one-thread";
const MANY_ZONES: &str = "many-zones";
const ONE_ZONE: &str = "one-zone";
const BARE: &str = "no-data";
const BARE_MANY: &str = "no-data-many-zones";
const BARE_ONE: &str = "no-data-one-zone";

/// The number of requeues per completed write, because another write to the zone was in flight.
const PUT_BACK: Metric = Metric::less("put_back_per_io", "");

const VARIANTS: [Variant; 6] = [
    Variant {
        name: WRITE_LOCKED,
        kind: VariantRole::Before,
        about: "writes at the write pointer under mq-deadline, one in flight per zone: a bit per \
                zone is tried, and the write is requeued if it is set",
    },
    Variant {
        name: APPEND_LOCKED,
        kind: VariantRole::After,
        about: "zone appends under mq-deadline, one in flight per zone, under the same bit",
    },
    Variant {
        name: APPEND,
        kind: VariantRole::Product,
        about: "zone appends without a scheduler, any number in flight; on the device with a timer \
                through the zonefs library",
    },
    Variant {
        name: APPEND_EMULATED,
        kind: VariantRole::Product,
        about: "as `append`, on a device without zone append: the zone write plug converts appends \
                into writes, one in flight per zone",
    },
    Variant { name: ALONE, kind: VariantRole::Limit, about: "one thread on its own CPU" },
    Variant { name: PAIR, kind: VariantRole::Product, about: "two threads, each on its own CPU" },
];

const WORKLOADS: [Workload; 6] = [
    Workload { name: ONE_THREAD, about: "64 KiB blocks by one thread to one zone; 10 us per I/O" },
    Workload {
        name: MANY_ZONES,
        about: "64 KiB blocks by 8 threads, each to a random one of 8 zones; 10 us per I/O",
    },
    Workload { name: ONE_ZONE, about: "64 KiB blocks by 8 threads to one zone; 10 us per I/O" },
    Workload {
        name: BARE,
        about: "4 KiB appends without data or timer by one thread, 32 in flight; jobs are threads",
    },
    Workload {
        name: BARE_MANY,
        about: "as `no-data` by two threads, each to its own zones, and by one of them alone",
    },
    Workload {
        name: BARE_ONE,
        about: "as `no-data` by two threads to one zone, and by one of them alone",
    },
];

/// How a 64 KiB block is written to a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteMethod {
    WriteLocked,
    AppendLocked,
    AppendEmulated,
    Append,
}

const WAYS: [(&str, WriteMethod); 4] = [
    (WRITE_LOCKED, WriteMethod::WriteLocked),
    (APPEND_LOCKED, WriteMethod::AppendLocked),
    (APPEND_EMULATED, WriteMethod::AppendEmulated),
    (APPEND, WriteMethod::Append),
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let threads = 8;
    let mut cells = Vec::new();
    for (workload, jobs, zones) in
        [(ONE_THREAD, 1, 1), (MANY_ZONES, threads, ZONES), (ONE_ZONE, threads, 1)]
    {
        for (variant, way) in WAYS {
            let body = move |round: &Round<'_>| timed(round, way, jobs, zones);
            cells.push(Cell::new(variant, workload, jobs, body));
        }
    }
    cells.push(Cell::new(APPEND, BARE, 1, |round| bare(round, many, Pattern::OwnAppend, 1)));
    if settings.processors >= 2 {
        for (workload, open, pattern) in [
            (BARE_MANY, many as fn() -> _, Pattern::OwnAppend),
            (BARE_ONE, one as fn() -> _, Pattern::RandomAppend),
        ] {
            for (variant, threads) in [(ALONE, 1), (PAIR, 2)] {
                let body = move |round: &Round<'_>| bare(round, open, pattern, threads);
                cells.push(Cell::new(variant, workload, 2, body));
            }
        }
    }
    Experiment {
        name: NAME,
        title: "ordered writes and zone appends",
        about: "IOPS of ordered writes compared with zone appends. A write to a sequential zone \
                must start at the write pointer, so that only one can be in flight; appends need \
                no order. Each thread executes one 64 KiB I/O after the other on a null device \
                without data, whose timer takes 10 us; the rest of an I/O's time is the wake-up of \
                the thread. In the locked variants a thread takes the zone's bit, which holds the \
                write pointer, and requeues its write if the bit is taken (`put_back_per_io`), as \
                the Linux block layer did from 5.8 to 6.9; the product's mq-deadline is between \
                the threads and the device. Appends use the zonefs library, one file per zone. \
                With many zones each I/O is to a random one, so that threads contend. The rows \
                `no-data` measure the append itself, without data or timer, in slices in which the \
                threads had their CPUs: there CPU time per I/O is wall time multiplied by the \
                number of threads.",
        published: published(),
        variants: VARIANTS.to_vec(),
        workloads: WORKLOADS.to_vec(),
        comparisons: comparisons(),
        plots: vec![Metric::IOPS, UNDISTURBED_IOPS],
        cells,
    }
}

fn comparisons() -> Vec<Comparison> {
    let locked = |after| Comparison::new(WRITE_LOCKED, after, Metric::IOPS);
    let bare = |before, after| Comparison::new(before, after, UNDISTURBED_IOPS);
    vec![
        locked(APPEND).under(ONE_THREAD),
        locked(APPEND).under(MANY_ZONES).aim(1.65),
        locked(APPEND).under(ONE_ZONE).aim(6.0),
        locked(APPEND_LOCKED),
        locked(APPEND_EMULATED),
        Comparison::to(AIM, AIM_PER_CORE, APPEND, UNDISTURBED_IOPS).under(BARE).aim(1.0),
        bare(ALONE, PAIR).under(BARE_MANY).aim(1.9),
        bare(ALONE, PAIR).under(BARE_ONE).aim(0.9),
    ]
}

fn published() -> Vec<Published> {
    let source = "Linux 5.8 (2020), zonefs on null_blk, synchronous 64 KiB; locked variants under \
                  mq-deadline, appends under none";
    let row = |variant, workload, jobs, kilo_iops: f64| Published {
        variant,
        workload,
        jobs,
        metric: Metric::IOPS,
        value: kilo_iops * 1000.0,
        source,
    };
    vec![
        row(WRITE_LOCKED, ONE_THREAD, 1, 10.1),
        row(APPEND_LOCKED, ONE_THREAD, 1, 13.2),
        row(APPEND, ONE_THREAD, 1, 15.6),
        row(WRITE_LOCKED, MANY_ZONES, 8, 10.2),
        row(APPEND_LOCKED, MANY_ZONES, 8, 10.4),
        row(APPEND, MANY_ZONES, 8, 16.9),
    ]
}

/// Opens the disk of a URI.
pub(super) fn open(uri: &str) -> Result<Arc<dyn Disk>, LabError> {
    let spec = uri::parse(uri).map_err(|error| LabError::failed(uri, error))?;
    Ok(stack::open(&spec).map_err(|error| LabError::failed(uri, error))?.disk)
}

fn many() -> Result<Arc<dyn Disk>, LabError> {
    open(MANY)
}

fn one() -> Result<Arc<dyn Disk>, LabError> {
    open(ONE)
}

/// Appends without data by one or two threads with processors of their own.
fn bare(
    round: &Round<'_>,
    open: fn() -> Result<Arc<dyn Disk>, LabError>,
    pattern: Pattern,
    threads: usize,
) -> Result<Sample, LabError> {
    let load = Load { pattern, threads, depth: DEPTH };
    let ns = ns_per_io(round, open, &load)?;
    Ok(Sample::of(UNDISTURBED_IOPS, 1e9 / ns).with(Metric::CPU_PER_IO, ns * threads as f64))
}

/// Nanoseconds of wall time per I/O of one or two threads on a fresh device, together. Each thread
/// opens its own channel, so that they meet only in the device.
///
/// # Errors
/// If the device cannot be opened, an I/O fails, or the machine is too busy.
fn ns_per_io(
    round: &Round<'_>,
    open: fn() -> Result<Arc<dyn Disk>, LabError>,
    load: &Load,
) -> Result<f64, LabError> {
    let disk = open()?;
    let mut failed = [None, None];
    let reading = {
        let [first, second] = &mut failed;
        let mut run = batches(&*disk, load, 0, round.seed, first);
        if load.threads == 1 {
            alone(round, |ops| {
                run(ops);
            })
        } else {
            together(round, false, [run, batches(&*disk, load, 1, round.seed, second)])
        }
    };
    if let Some(error) = failed.into_iter().flatten().next() {
        return Err(error);
    }
    Ok(reading?.ns_per_op / load.depth as f64)
}

/// Runs the requested batches, until one fails. The first call opens the worker.
fn batches<'a>(
    disk: &'a dyn Disk,
    load: &'a Load,
    number: usize,
    seed: u64,
    failed: &'a mut Option<LabError>,
) -> impl FnMut(u32) -> u64 + 'a {
    let mut worker = None;
    move |ops| {
        for _ in 0..ops {
            if failed.is_some() {
                break;
            }
            let done = match &mut worker {
                Some(worker) => Worker::batch(worker)
                    .map(drop)
                    .map_err(|status| LabError::failed(disk.name(), status)),
                None => Worker::open(disk, load, number, seed).map(|opened| worker = Some(opened)),
            };
            if let Err(error) = done {
                *failed = Some(error);
            }
        }
        0
    }
}

/// The timed device under the product's deadline scheduler, without a zone write plug. The writers
/// keep their order by the bits of zones, as the kernel's did then.
fn under_deadline() -> Result<Arc<dyn Disk>, LabError> {
    let failed = |error: &dyn fmt::Display| LabError::failed(TIMER, error);
    let spec = uri::parse(TIMER).map_err(|error| failed(&error))?;
    let config = stack::null_config(&spec).map_err(|error| failed(&error))?;
    let null = Null::open(config).map_err(|error| failed(&error))?;
    let device = Scheduled::new(null, true).map_err(|error| failed(&error))?;
    let (name, config) = (spec.name().to_owned(), ChannelConfig::default());
    Ok(Arc::new(Composed::new(name, "null", device, config)))
}

/// Threads that write blocks to zones of the timed device, one after the other.
fn timed(round: &Round<'_>, way: WriteMethod, jobs: u32, zones: usize) -> Result<Sample, LabError> {
    let disk = match way {
        WriteMethod::WriteLocked | WriteMethod::AppendLocked => under_deadline()?,
        WriteMethod::AppendEmulated => open(&format!("{TIMER}&zone_append_max_sectors=0"))?,
        WriteMethod::Append => open(TIMER)?,
    };
    blocks(round, &disk, way, jobs, zones)
}

/// Threads that write blocks, one after the other, to a disk with zones that no run fills.
pub(super) fn blocks(
    round: &Round<'_>,
    disk: &Arc<dyn Disk>,
    way: WriteMethod,
    jobs: u32,
    zones: usize,
) -> Result<Sample, LabError> {
    let failed = |error: &dyn fmt::Display| LabError::failed(disk.name(), error);
    let locks = ZoneLocks::new(&**disk).map_err(|error| LabError::failed(disk.name(), error))?;
    let (fs, files) = files(disk)?;
    let mut writers = Vec::new();
    for number in 0..jobs {
        let channel = disk.open().map_err(|error| failed(&error))?;
        writers.push(ZoneWriter {
            way,
            io: Io::new(channel, BYTES),
            locks: &locks,
            handle: fs.io_handle().map_err(|error| failed(&error))?,
            files: &files,
            zone_sectors: disk.geometry().zones.as_ref().map_or(0, |zones| zones.zone_sectors),
            zones,
            rng: Rng::with_seed(round.seed ^ u64::from(number)),
            put_back: 0,
        });
    }
    let outcome = workers::run(writers, round, || ())?;
    let put_back: u64 = outcome.workers.iter().map(|writer| writer.put_back).sum();
    let per_io = put_back as f64 / outcome.ios.max(1) as f64;
    Ok(outcome.sample(disk.name())?.with(PUT_BACK, per_io))
}

/// A zonefs on a disk, and those of its files that are written.
fn files(disk: &Arc<dyn Disk>) -> Result<(Arc<ZoneFs>, Vec<ZoneFile>), LabError> {
    let failed = |error: &dyn fmt::Display| LabError::failed(disk.name(), error);
    // The superblock is not stored, because the disk is not opened again.
    let superblock = Superblock::new(Uuid::from_bytes([7; 16]));
    let fs = ZoneFs::open_with(Arc::clone(disk), superblock, MountOptions::default());
    let fs = fs.map_err(|error| failed(&error))?;
    let file = |number| {
        let file = fs.open_file(FileKind::Sequential, number, AccessMode::Write);
        let file = file.ok_or_else(|| failed(&format!("there is no file seq/{number}")))?;
        file.map_err(|error| failed(&error))
    };
    let files = (0..ZONES as u32).map(file).collect::<Result<_, _>>()?;
    Ok((fs, files))
}

/// One thread's channels, and the zones to which it writes.
struct ZoneWriter<'a> {
    way: WriteMethod,
    io: Io,
    locks: &'a ZoneLocks,
    handle: IoHandle,
    files: &'a [ZoneFile],
    zone_sectors: u64,
    /// The thread writes to any of the first `zones` zones.
    zones: usize,
    rng: Rng,
    /// The number of requeues in the window.
    put_back: u64,
}

impl Work for ZoneWriter<'_> {
    fn turn(&mut self) -> Result<u64, LabError> {
        let zone = self.rng.usize(..self.zones);
        let start = Sector((FIRST_ZONE + zone) as u64 * self.zone_sectors);
        match self.way {
            WriteMethod::Append | WriteMethod::AppendEmulated => {
                let landed = self.files[zone].append_buffer(&mut self.handle, BYTES);
                landed.map_err(|error| LabError::failed("an append", error))?;
            }
            WriteMethod::WriteLocked | WriteMethod::AppendLocked => {
                let (held, put_back) = self.locks.take(FIRST_ZONE + zone);
                self.put_back += put_back;
                let bio = match self.way {
                    WriteMethod::WriteLocked => block(Op::Write, start + held.written()),
                    _ => block(Op::ZoneAppend, start),
                };
                let done = self.io.run(bio);
                done.map_err(|status| LabError::failed("a write under a zone's bit", status))?;
                held.advance(SECTORS);
            }
        }
        Ok(1)
    }

    fn begin(&mut self) {
        self.put_back = 0;
    }
}

fn block(op: Op, at: Sector) -> Bio {
    // The first region of an `Io` is its own buffer.
    Bio::new(op, at, SECTORS).with_buf(BufRef { region: RegionId(0), offset: 0 })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stop::Stop;

    #[test]
    fn every_way_gets_blocks_into_zones() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(5));
        let round = Round { warm_up, duration, number: 0, seed: 7, stop: &stop };
        for (_, way) in WAYS {
            for (jobs, zones) in [(1, 1), (1, ZONES), (3, ZONES), (3, 1)] {
                let sample = timed(&round, way, jobs, zones)
                    .unwrap_or_else(|error| panic!("{way:?}, {jobs} jobs, {zones} zones: {error}"));
                let value = |at: usize| sample.values[at].1;
                assert!(value(0) > 0.0 && value(1) > 0.0, "{way:?}");
                let is_locked = matches!(way, WriteMethod::WriteLocked | WriteMethod::AppendLocked);
                assert!(value(2) == 0.0 || (is_locked && jobs > 1), "{way:?}");
            }
        }
    }
}

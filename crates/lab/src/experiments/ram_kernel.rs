//! `ram-kernel`: our RAM disk beside the running kernel's zram, with the same data and algorithm.
//!
//! Twice: by a loop of the lab's own, and by stock fio with the same line. With two kinds of data:
//! the corpus, whose compression and decompression are most of what both sides do, and fio's own,
//! which compress four times as fast. A zram device is made for each measurement and removed after
//! it.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::channel::ChannelConfig;
use blockyard_core::sched::NoneScheduler;
use blockyard_core::{Composed, Disk, Region};
use blockyard_ram::{Ram, RamConfig};
use fastrand::Rng;

use crate::corpus::{CORPUS_BYTES, corpus};
use crate::error::LabError;
use crate::experiment::{Cell, Comparison, Experiment, Kind, Published, Variant, Workload};
use crate::fio_bytes::{self, HALF};
use crate::load::crew::{self, Work};
use crate::load::records::{Does, Order, Part, Passed, Records, Task, Way, pass};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::settings::Settings;
use crate::stop::Stop;
use crate::tools::direct;
use crate::tools::fio::{Fio, Report};
use crate::tools::zram_device::ZramDevice;

/// The name on the command line.
pub const NAME: &str = "ram-kernel";

const ZRAM: &str = "zram";
const ZRAM_URING: &str = "zram-io_uring";
const OURS: &str = "blockyard";
const OURS_DEEP: &str = "blockyard-32";
/// fio's lines without a device.
pub const FIO_ALONE: &str = "fio-alone";

/// The codec of both.
const ALGORITHM: &str = "lz4";
/// Length of an I/O in bytes.
const BLOCK_BYTES: u64 = 4096;
/// The devices.
const DEVICE_BYTES: u64 = 256 << 20;
const DEVICE_BYTES_QUICK: u64 = 64 << 20;
/// What a turn of our background gets through at least, of data that compress by half.
const TURN_BYTES: usize = 64 << 20;
/// How much is written at a time when a device is filled, in bytes.
const FILL_BYTES: usize = 1 << 20;
/// So many jobs need so long until each has had its turn.
const RUNTIME_MIN: Duration = Duration::from_millis(300);
/// What starting and ending fio take, and filling a device.
const OVERHEAD_FIO: Duration = Duration::from_millis(1000);
/// The same of a first look, whose device is a quarter as long.
const OVERHEAD_FIO_QUICK: Duration = Duration::from_millis(600);
const OVERHEAD: Duration = Duration::from_millis(250);
/// The part of the fio lines that is the same for all.
const COMMON: &str = "--bs=4k --direct=1 --norandommap --randrepeat=0 --gtod_reduce=1";
/// Stored bytes for each byte that is kept, the other way round: how many times smaller it became.
const RATIO: Metric = Metric::more("compression_ratio", "");
/// Memory in total, with the table.
const MEMORY: Metric = Metric::less("memory", "B");
/// The part of it that is no compressed data.
const OVERHEAD_PART: Metric = Metric::less("memory_overhead", "%");

/// What the devices are filled with, and what is written to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Data {
    /// [`crate::corpus`].
    Corpus,
    /// [`crate::fio_bytes`].
    Half,
}

impl Data {
    /// A name for files.
    fn name(self) -> &'static str {
        match self {
            Data::Corpus => "corpus",
            Data::Half => "half",
        }
    }

    /// As many bytes as there are of the corpus.
    fn bytes(self, scratch: &Path, stop: &Stop) -> Result<&'static Arc<Region>, LabError> {
        match self {
            Data::Corpus => corpus(),
            Data::Half => fio_bytes::half(scratch, stop),
        }
    }
}

/// What is measured: who does what with which data, and the least ratio that is aimed at.
struct Row {
    workload: Workload,
    does: Does,
    data: Data,
    /// By stock fio, not by the lab's own loop.
    by_fio: bool,
}

const fn row(name: &'static str, does: Does, data: Data, by_fio: bool, about: &'static str) -> Row {
    Row { workload: Workload { name, about }, does, data, by_fio }
}

static ROWS: [Row; 10] = [
    row(
        "read",
        Does::Read,
        Data::Corpus,
        false,
        "4 KiB reads anywhere, of the corpus, one at a time per job: pread on the kernel's device, \
         the same on the spot on ours",
    ),
    row(
        "fio-read",
        Does::Read,
        Data::Corpus,
        true,
        "stock fio: --bs=4k --rw=randread, of the corpus",
    ),
    row("read-50", Does::Read, Data::Half, false, "as `read`, of fio's bytes"),
    row(
        "fio-read-50",
        Does::Read,
        Data::Half,
        true,
        "stock fio: --bs=4k --rw=randread, of bytes that it wrote with \
         --buffer_compress_percentage=50",
    ),
    row(
        "write",
        Does::Write,
        Data::Corpus,
        false,
        "4 KiB writes anywhere, of the corpus, one at a time per job: pwrite and the same on the \
         spot",
    ),
    row("write-50", Does::Write, Data::Half, false, "as `write`, of fio's bytes"),
    row(
        "fio-write-50",
        Does::Write,
        Data::Half,
        true,
        "stock fio: --bs=4k --rw=randwrite --buffer_compress_percentage=50",
    ),
    row(
        "mixed",
        Does::Either,
        Data::Corpus,
        false,
        "4 KiB reads and writes anywhere, equally often, of the corpus, one at a time per job",
    ),
    row("mixed-50", Does::Either, Data::Half, false, "as `mixed`, of fio's bytes"),
    row(
        "fio-mixed-50",
        Does::Either,
        Data::Half,
        true,
        "stock fio: --bs=4k --rw=randrw --buffer_compress_percentage=50",
    ),
];

/// fio's word for it, and the least ratio that is aimed at.
fn asked(does: Does) -> (&'static str, f64) {
    match does {
        Does::Read => ("--rw=randread", 2.5),
        Does::Write => ("--rw=randwrite", 1.2),
        Does::Either => ("--rw=randrw", 2.0),
    }
}

const FULL: Workload = Workload {
    name: "memory",
    about: "a device that is full of the corpus: what it became, and what it takes with its table",
};
/// Compression is to be as good as zram's within 2 %.
const AIM_RATIO: f64 = 0.98;
const AIM_MEMORY: f64 = 1.0;

const VARIANTS: [Variant; 5] = [
    Variant { name: ZRAM, kind: Kind::Peer, about: "the kernel's zram; by fio: psync, direct" },
    Variant {
        name: ZRAM_URING,
        kind: Kind::Peer,
        about: "the same by fio's io_uring, 32 in flight per job; by the wall only",
    },
    Variant {
        name: OURS,
        kind: Kind::Product,
        about: "our RAM disk in the process that uses it; by fio: our engine, depth 1",
    },
    Variant {
        name: OURS_DEEP,
        kind: Kind::Product,
        about: "the same by our engine, 32 in flight per job, in batches of 8",
    },
    Variant {
        name: FIO_ALONE,
        kind: Kind::Limit,
        about: "fio's own null engine: what the line costs without a device",
    },
];

/// fio's way to the kernel's device.
#[derive(Clone, Copy)]
enum Engine {
    Psync,
    Uring,
}

impl Engine {
    fn options(self) -> &'static str {
        match self {
            Engine::Psync => "--ioengine=psync",
            Engine::Uring => "--ioengine=io_uring --iodepth=32",
        }
    }

    /// The kernel carries out what io_uring is given on threads of its own, because zram does not
    /// promise not to wait. fio counts the time of its jobs' threads only, which would be a part.
    fn sample(self, report: &Report, processors: usize) -> Sample {
        let mut sample = report.sample(processors);
        if let Engine::Uring = self {
            let of_cpu = [Metric::CPU_PER_IO, Metric::IOS_PER_CPU_SECOND, Metric::CPUS];
            sample.values.retain(|(metric, _)| !of_cpu.contains(metric));
        }
        sample
    }
}

/// What fio drives.
#[derive(Clone, Copy)]
enum By {
    Zram(Engine),
    Ours(&'static str),
    Nothing,
}

const BY_FIO: [(&str, By); 5] = [
    (ZRAM, By::Zram(Engine::Psync)),
    (ZRAM_URING, By::Zram(Engine::Uring)),
    (OURS, By::Ours("--iodepth=1")),
    (OURS_DEEP, By::Ours("--iodepth=32 --iodepth_batch_submit=8 --iodepth_batch_complete_max=8")),
    (FIO_ALONE, By::Nothing),
];

/// The experiment.
pub fn build(settings: &Settings) -> Experiment {
    let jobs: &[u32] = if settings.quick { &[2] } else { &[1, 2, 4] };
    let bytes = if settings.quick { DEVICE_BYTES_QUICK } else { DEVICE_BYTES };
    let mut cells = Vec::new();
    for row in &ROWS {
        for &jobs in jobs {
            match row.by_fio {
                true => cells.extend(by_fio(settings, row, jobs, bytes)),
                false => cells.extend(directly(settings, row, jobs, bytes)),
            }
        }
    }
    cells.push(Cell::new(ZRAM, FULL.name, 1, move |round| zram_memory(bytes, round)));
    cells.push(Cell::new(OURS, FULL.name, 1, move |round| our_memory(bytes, round)));
    let listed = |workload: &Workload| cells.iter().any(|cell| cell.workload == workload.name);
    let all = ROWS.iter().map(|row| row.workload).chain([FULL]);
    let workloads: Vec<Workload> = all.filter(listed).collect();
    Experiment {
        name: NAME,
        title: "our RAM disk beside the kernel's zram",
        about: "The same data, the same algorithm (lz4), the same size. The data are a corpus \
                (pieces of /usr/bin, text, and noise that compresses by half), and, where the \
                row's name ends in 50, what fio itself makes of \
                --buffer_compress_percentage=50. Of the corpus, lz4 is most of what either \
                side does, and it is the same on both, so it \
                bounds the ratio; fio's data cost it a fourth. A zram device is made for each \
                measurement and removed after it, which needs root; where it cannot be had its \
                rows are missing, with the reason. CPU time is that of the threads that read and \
                write, which is all there is: zram works in the thread that calls it, and ours in \
                the process. Not so by io_uring, which carries the kernel's I/Os out on threads \
                that fio does not count: those rows have none. The loop is the lab's own and costs \
                next to nothing; fio's own cost is on both sides and is the row `fio-alone`: it \
                makes every ratio smaller than that of the devices. fio reads what was filled in \
                before; for writes it must fill a buffer before each, because in 3.33 a pattern \
                has 512 bytes at most, which compress like nothing real. Clocks \
                (`--gtod_reduce`) and the map of blocks are off. Memory is what mm_stat says and \
                the table: 16 bytes a page for zram, 8 for ours.",
        published: published(&workloads),
        variants: VARIANTS.to_vec(),
        workloads,
        comparisons: comparisons(),
        plots: vec![Metric::IOS_PER_CPU_SECOND, Metric::IOPS, MEMORY],
        cells,
    }
}

/// The cells of a row that fio drives.
fn by_fio(settings: &Settings, row: &'static Row, jobs: u32, bytes: u64) -> Vec<Cell> {
    // What fio itself makes is what its lines are about; of the corpus the two sides are enough.
    let few = settings.quick || row.data == Data::Corpus;
    let overhead = if settings.quick { OVERHEAD_FIO_QUICK } else { OVERHEAD_FIO };
    let listed = BY_FIO.iter().filter(|(name, _)| !few || [ZRAM, OURS].contains(name));
    let mut cells = Vec::new();
    for &(name, by) in listed {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| measure_by_fio(round, &settings, row, by, jobs, bytes);
        cells.push(Cell::new(name, row.workload.name, jobs, body).overhead(overhead));
    }
    cells
}

fn measure_by_fio(
    round: &Round<'_>,
    settings: &Settings,
    row: &Row,
    by: By,
    jobs: u32,
    bytes: u64,
) -> Result<Sample, LabError> {
    let half = if row.does == Does::Read { "" } else { HALF };
    let options = format!("{COMMON} {} {half} --numjobs={jobs}", asked(row.does).0);
    let runtime = round.duration.max(RUNTIME_MIN);
    let run = |fio: Fio| fio.run(round.warm_up, runtime, round.stop);
    match by {
        By::Zram(engine) => {
            let source = row.data.bytes(&settings.scratch, round.stop)?;
            let device = filled_zram(bytes, source, round)?;
            let fio = Fio::new(&format!("{} {options}", engine.options()));
            let report = run(fio.option("filename", device.path().display()))?;
            Ok(engine.sample(&report, settings.processors))
        }
        By::Ours(depth) => {
            let name = format!("ram-kernel-{bytes}-{}.ram", row.data.name());
            let snapshot = settings.scratch.join(name);
            if !snapshot.exists() {
                let source = row.data.bytes(&settings.scratch, round.stop)?;
                let saved = filled_ram(bytes, source, round)?.save(&snapshot);
                saved.map_err(|error| LabError::failed(snapshot.display().to_string(), error))?;
            }
            let load = snapshot.display();
            let dev = format!("ram:///r?size={bytes}&algo={ALGORITHM}&load={load}");
            let fio = Fio::on_engine(settings, &dev, None, &format!("{depth} {options}"))?;
            Ok(run(fio.option("filename", "r"))?.sample(settings.processors))
        }
        By::Nothing => {
            let fio = Fio::new(&format!("--ioengine=null {options}")).option("size", bytes);
            Ok(run(fio)?.sample(settings.processors))
        }
    }
}

/// The cells of a row that the lab drives itself.
fn directly(settings: &Settings, row: &'static Row, jobs: u32, bytes: u64) -> [Cell; 2] {
    let (processors, does) = (settings.processors, row.does);
    let scratch = settings.scratch.clone();
    let kernel = move |round: &Round<'_>| {
        let source = row.data.bytes(&scratch, round.stop)?;
        let device = filled_zram(bytes, source, round)?;
        let thread =
            |number: u64| ZramLoop::open(&device, source, does, bytes, round.seed ^ number);
        let works = (0..u64::from(jobs)).map(thread).collect::<Result<Vec<_>, LabError>>()?;
        sample(crew::run(works, round, || ())?, jobs, processors)
    };
    let scratch = settings.scratch.clone();
    let ours = move |round: &Round<'_>| {
        let source = row.data.bytes(&scratch, round.stop)?;
        let disk = disk(&filled_ram(bytes, source, round)?);
        let (order, way) = (Order::Random, Way::Carry);
        let task = Task { does, order, way, record_bytes: BLOCK_BYTES };
        let part = Part { from: 0, len_bytes: bytes };
        let thread =
            |number: u64| Records::open_with(source, &disk, task, part, round.seed ^ number);
        let works = (0..u64::from(jobs)).map(thread).collect::<Result<Vec<_>, LabError>>()?;
        sample(crew::run(works, round, || ())?, jobs, processors)
    };
    [
        Cell::new(ZRAM, row.workload.name, jobs, kernel).overhead(OVERHEAD),
        Cell::new(OURS, row.workload.name, jobs, ours).overhead(OVERHEAD),
    ]
}

fn sample<W>(
    outcome: crew::Outcome<W, ()>,
    jobs: u32,
    processors: usize,
) -> Result<Sample, LabError> {
    if outcome.ios == 0 {
        return Err(LabError::failed(NAME, "no I/O ended in the measured window"));
    }
    let passed = Passed { records: outcome.ios, wall: outcome.wall, cpu: outcome.cpu };
    let sample = passed.limited_sample(BLOCK_BYTES, jobs as usize, processors);
    let per_second = outcome.ios as f64 / outcome.cpu.as_secs_f64();
    Ok(sample.with(Metric::IOS_PER_CPU_SECOND, per_second))
}

/// A zram device that is full of the bytes, again and again.
fn filled_zram(bytes: u64, source: &Region, round: &Round<'_>) -> Result<ZramDevice, LabError> {
    let device = ZramDevice::new(bytes, ALGORITHM)?;
    let file = device.open()?;
    let what = || device.path().display().to_string();
    for at in (0..bytes).step_by(FILL_BYTES) {
        if round.stop.is_set() {
            return Err(LabError::Interrupted);
        }
        let from = at % CORPUS_BYTES as u64;
        let written = direct::write(&file, source, from, FILL_BYTES, at);
        written.map_err(|error| LabError::io(what())(error))?;
    }
    Ok(device)
}

/// Our RAM disk, full of the same bytes at the same places, as it is some seconds later: its
/// background has looked at the pool, and has asked the system for huge pages. The kernel's memory
/// is mapped by such from the beginning.
fn filled_ram(bytes: u64, source: &Arc<Region>, round: &Round<'_>) -> Result<Arc<Ram>, LabError> {
    let ram = Ram::open(RamConfig { size: bytes, ..RamConfig::default() });
    let ram = ram.map_err(|error| LabError::failed(OURS, error))?;
    let (does, order, way) = (Does::Write, Order::Forward, Way::Push);
    let task = Task { does, order, way, record_bytes: FILL_BYTES as u64 };
    let part = Part { from: 0, len_bytes: bytes };
    pass(vec![Records::open_with(source, &disk(&ram), task, part, 0)?], round)?;
    for _ in (0..bytes).step_by(TURN_BYTES) {
        ram.compact_in_background();
    }
    Ok(ram)
}

fn disk(ram: &Arc<Ram>) -> impl Disk + use<> {
    let (name, channels) = ("r".to_owned(), ChannelConfig::default());
    Composed::new(name, "ram", Arc::clone(ram), channels, NoneScheduler::new)
}

fn zram_memory(bytes: u64, round: &Round<'_>) -> Result<Sample, LabError> {
    let device = filled_zram(bytes, corpus()?, round)?;
    let stat = device.mm_stat()?;
    memory(stat.orig_data_size, stat.compr_data_size, stat.mem_used_total + device.table_bytes())
}

fn our_memory(bytes: u64, round: &Round<'_>) -> Result<Sample, LabError> {
    let stats = filled_ram(bytes, corpus()?, round)?.stats();
    let mm = stats.mm;
    memory(mm.orig_data_size, mm.compr_data_size, mm.mem_used_total + stats.table_bytes)
}

fn memory(plain: u64, compressed: u64, total: u64) -> Result<Sample, LabError> {
    if compressed == 0 {
        return Err(LabError::failed(FULL.name, "nothing was stored"));
    }
    let (plain, compressed, total) = (plain as f64, compressed as f64, total as f64);
    Ok(Sample::of(MEMORY, total)
        .with(RATIO, plain / compressed)
        .with(OVERHEAD_PART, (total / compressed - 1.0) * 100.0))
}

/// One thread that reads and writes a zram device as [`Records`] does ours.
struct ZramLoop {
    file: File,
    source: &'static Arc<Region>,
    buffer: Arc<Region>,
    does: Does,
    blocks: u64,
    rng: Rng,
}

impl fmt::Debug for ZramLoop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZramLoop").field("does", &self.does).finish_non_exhaustive()
    }
}

impl ZramLoop {
    fn open(
        device: &ZramDevice,
        source: &'static Arc<Region>,
        does: Does,
        bytes: u64,
        seed: u64,
    ) -> Result<ZramLoop, LabError> {
        Ok(ZramLoop {
            file: device.open()?,
            source,
            buffer: Region::alloc(BLOCK_BYTES as usize),
            does,
            blocks: bytes / BLOCK_BYTES,
            rng: Rng::with_seed(seed),
        })
    }
}

impl Work for ZramLoop {
    fn turn(&mut self) -> Result<u64, LabError> {
        let at = self.rng.u64(..self.blocks) * BLOCK_BYTES;
        let write = match self.does {
            Does::Read => false,
            Does::Write => true,
            Does::Either => self.rng.bool(),
        };
        let len = BLOCK_BYTES as usize;
        let done = if write {
            // The next block after the one that is there.
            let from = (at + BLOCK_BYTES) % CORPUS_BYTES as u64;
            direct::write(&self.file, self.source, from, len, at)
        } else {
            direct::read(&self.file, &self.buffer, 0, len, at)
        };
        done.map_err(LabError::io(ZRAM))?;
        Ok(1)
    }
}

fn comparisons() -> Vec<Comparison> {
    let mut comparisons = Vec::new();
    for row in &ROWS {
        for metric in [Metric::IOS_PER_CPU_SECOND, Metric::IOPS] {
            let comparison = Comparison::new(ZRAM, OURS, metric);
            comparisons.push(comparison.under(row.workload.name).aim(asked(row.does).1));
        }
        if row.by_fio && row.data == Data::Half {
            let deep = Comparison::new(ZRAM_URING, OURS_DEEP, Metric::IOPS);
            comparisons.push(deep.under(row.workload.name).aim(asked(row.does).1));
        }
    }
    comparisons.push(Comparison::new(ZRAM, OURS, MEMORY).under(FULL.name).aim(AIM_MEMORY));
    comparisons.push(Comparison::new(ZRAM, OURS, RATIO).under(FULL.name).aim(AIM_RATIO));
    comparisons
}

/// What zram did when the aims were set.
fn published(workloads: &[Workload]) -> Vec<Published> {
    const SOURCE: &str = "fio 3.33, 2 virtual processors (AMD Zen 5), Linux 6.18, loaded: the best \
                          of 5, buffers that compress by half";
    let row = |variant, workload, jobs, kilo_iops: f64| Published {
        variant,
        workload,
        jobs,
        metric: Metric::IOPS,
        value: kilo_iops * 1000.0,
        source: SOURCE,
    };
    let rows = [
        row(ZRAM, "fio-read-50", 1, 360.0),
        row(ZRAM, "fio-read-50", 2, 773.0),
        row(ZRAM, "fio-write-50", 1, 210.0),
        row(ZRAM, "fio-write-50", 2, 420.0),
        row(ZRAM_URING, "fio-read-50", 1, 278.0),
        row(ZRAM_URING, "fio-read-50", 2, 566.0),
        row(ZRAM_URING, "fio-write-50", 1, 175.0),
        row(ZRAM_URING, "fio-write-50", 2, 325.0),
    ];
    let listed = |row: &Published| workloads.iter().any(|workload| workload.name == row.workload);
    rows.into_iter().filter(listed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    const SMALL: u64 = 16 << 20;

    /// The kernel's rows need the right to make a device, as the project's tests have it.
    #[test]
    fn both_sides_are_measured_and_hold_the_same() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(5));
        let round = Round { warm_up, duration, number: 0, seed: 3, stop: &stop };
        let scratch = Scratch::new().unwrap();
        let settings = Settings {
            quick: true,
            engine: None,
            program: std::path::PathBuf::new(),
            scratch: scratch.path().to_owned(),
            processors: 2,
        };
        for row in ROWS.iter().filter(|row| !row.by_fio) {
            for cell in directly(&settings, row, 2, SMALL) {
                let sample =
                    (cell.body)(&round).unwrap_or_else(|error| panic!("{cell:?}: {error}"));
                assert!(sample.values.iter().all(|value| value.1 > 0.0), "{cell:?}");
            }
        }
        let value = |sample: &Sample, metric| {
            sample.values.iter().find(|value| value.0 == metric).map(|value| value.1).unwrap()
        };
        let both = [zram_memory(SMALL, &round), our_memory(SMALL, &round)].map(Result::unwrap);
        let [zrams, ours] = both.each_ref().map(|sample| value(sample, RATIO));
        assert!((ours / zrams - 1.0).abs() < 0.02, "the same algorithm: {ours} and {zrams}");
        let [zrams, ours] = both.each_ref().map(|sample| value(sample, MEMORY));
        assert!(ours < zrams, "{ours} bytes and {zrams}");
        let row = ROWS.iter().find(|row| row.by_fio && row.data == Data::Half).unwrap();
        let by = |by| measure_by_fio(&round, &settings, row, by, 1, SMALL);
        let psync = by(By::Zram(Engine::Psync)).unwrap();
        assert!(psync.values.iter().any(|value| value.0 == Metric::CPU_PER_IO));
        let uring = by(By::Zram(Engine::Uring)).unwrap();
        assert!(uring.values.iter().all(|value| value.0 != Metric::CPU_PER_IO), "{uring:?}");
        assert!(by(By::Nothing).is_ok());
        let error = by(By::Ours("--iodepth=1")).unwrap_err().to_string();
        assert_eq!(error, "libblockyard_fio-*.so is missing; run `make fio`");
        stop.set();
        let filled = filled_zram(SMALL, corpus().unwrap(), &round);
        assert!(matches!(filled, Err(LabError::Interrupted)));
    }
}

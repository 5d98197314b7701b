//! `ram-kernel`: our RAM disk compared with the running kernel's zram, with equal data and
//! algorithm.
//!
//! Two drivers measure both: a loop of the lab's own ([`loops`]), and stock fio with one command
//! line ([`by_fio`]). There are two kinds of data: the corpus, whose compression and decompression
//! take most of the time on both sides, and fio's own data, which compress four times as fast. Then
//! follow the command lines that were published for zram ([`lines`]).
//!
//! A zram device is made for each measurement and removed after it; a large one is made once for
//! iozone's rows.

mod by_fio;
mod lines;
mod loops;

use crate::error::LabError;
use crate::experiment::{
    Cell, Comparison, Experiment, Published, Settings, Variant, VariantRole, Workload,
};
use crate::experiments::ram_data::{FillData, Filling};
use crate::experiments::ram_lines::LINES;
use crate::load::records::Does;
use crate::metric::Metric;
use crate::sample::{Round, Sample};

/// The experiment's name on the command line.
pub const NAME: &str = "ram-kernel";

const ZRAM: &str = "zram";
const ZRAM_URING: &str = "zram-io_uring";
const OURS: &str = "blockyard";
const OURS_DEEP: &str = "blockyard-32";
/// The name of the variant that runs fio's lines without a device.
pub const FIO_ALONE: &str = "fio-alone";

/// The length of an I/O in bytes.
const BLOCK_BYTES: u64 = 4096;
/// The sizes of the devices, in bytes.
const DEVICE_BYTES: u64 = 256 << 20;
const DEVICE_BYTES_QUICK: u64 = 64 << 20;
/// The compression ratio: stored bytes per byte of memory for compressed data.
const RATIO: Metric = Metric::more("compression_ratio", "");
/// The total memory, including the table.
const MEMORY: Metric = Metric::less("memory", "B");
/// The part of the memory that holds no compressed data.
const OVERHEAD_PART: Metric = Metric::less("memory_overhead", "%");

/// A measurement: driver, operation and data, and the least ratio that is the aim.
struct AimedRow {
    workload: Workload,
    does: Does,
    data: FillData,
    /// Whether stock fio drives the row, instead of the lab's own loop.
    by_fio: bool,
}

const fn row(
    name: &'static str,
    does: Does,
    data: FillData,
    by_fio: bool,
    about: &'static str,
) -> AimedRow {
    AimedRow { workload: Workload { name, about }, does, data, by_fio }
}

static ROWS: [AimedRow; 10] = [
    row(
        "read",
        Does::Read,
        FillData::Corpus,
        false,
        "4 KiB random reads of the corpus, one in flight per job: pread on the kernel's device, \
         inline I/O on ours",
    ),
    row(
        "fio-read",
        Does::Read,
        FillData::Corpus,
        true,
        "4 KiB random reads of the corpus by stock fio: --bs=4k --rw=randread",
    ),
    row(
        "read-50",
        Does::Read,
        FillData::Half,
        false,
        "as `read`, with fio's data that compress by half",
    ),
    row(
        "fio-read-50",
        Does::Read,
        FillData::Half,
        true,
        "4 KiB random reads by stock fio of data that it wrote with \
         --buffer_compress_percentage=50: --bs=4k --rw=randread",
    ),
    row(
        "write",
        Does::Write,
        FillData::Corpus,
        false,
        "4 KiB random writes of the corpus, one in flight per job: pwrite on the kernel's device, \
         inline I/O on ours",
    ),
    row(
        "write-50",
        Does::Write,
        FillData::Half,
        false,
        "as `write`, with fio's data that compress by half",
    ),
    row(
        "fio-write-50",
        Does::Write,
        FillData::Half,
        true,
        "4 KiB random writes by stock fio: --bs=4k --rw=randwrite --buffer_compress_percentage=50",
    ),
    row(
        "mixed",
        Does::Either,
        FillData::Corpus,
        false,
        "4 KiB random reads and writes of the corpus, equally often, one in flight per job",
    ),
    row(
        "mixed-50",
        Does::Either,
        FillData::Half,
        false,
        "as `mixed`, with fio's data that compress by half",
    ),
    row(
        "fio-mixed-50",
        Does::Either,
        FillData::Half,
        true,
        "4 KiB random reads and writes by stock fio: --bs=4k --rw=randrw \
         --buffer_compress_percentage=50",
    ),
];

/// The value of fio's `--rw` for the operation, and the least ratio that is the aim.
fn asked(does: Does) -> (&'static str, f64) {
    match does {
        Does::Read => ("--rw=randread", 2.5),
        Does::Write => ("--rw=randwrite", 1.2),
        Does::Either => ("--rw=randrw", 2.0),
    }
}

const FULL: Workload = Workload {
    name: "memory",
    about: "a device full of the corpus: its compression ratio, and its memory including the block \
            table",
};
/// The compression ratio must be within 2 % of zram's.
const AIM_RATIO: f64 = 0.98;
const AIM_MEMORY: f64 = 1.0;

const VARIANTS: [Variant; 5] = [
    Variant {
        name: ZRAM,
        kind: VariantRole::Peer,
        about: "the kernel's zram; rows of fio: psync, direct",
    },
    Variant {
        name: ZRAM_URING,
        kind: VariantRole::Peer,
        about: "the kernel's zram by fio's io_uring, 32 in flight per job; wall time only",
    },
    Variant {
        name: OURS,
        kind: VariantRole::Product,
        about: "our RAM disk, in the process that uses it; rows of fio: our engine, one in flight",
    },
    Variant {
        name: OURS_DEEP,
        kind: VariantRole::Product,
        about: "our RAM disk by our engine for fio, 32 in flight per job, in batches of 8",
    },
    Variant {
        name: FIO_ALONE,
        kind: VariantRole::Limit,
        about: "fio's own null engine: the cost of the command line without a device",
    },
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let jobs: &[u32] = if settings.quick { &[2] } else { &[1, 2, 4] };
    let bytes = if settings.quick { DEVICE_BYTES_QUICK } else { DEVICE_BYTES };
    let mut cells = Vec::new();
    for row in &ROWS {
        for &jobs in jobs {
            match row.by_fio {
                true => cells.extend(by_fio::cells(settings, row, jobs, bytes)),
                false => cells.extend(loops::cells(settings, row, jobs, bytes)),
            }
        }
    }
    cells.extend(lines::cells(settings));
    cells.extend(memory_cells(settings, bytes));
    let listed = |workload: &Workload| cells.iter().any(|cell| cell.workload == workload.name);
    let published_lines = LINES.iter().map(|line| line.workload);
    let all = ROWS.iter().map(|row| row.workload).chain(published_lines).chain([FULL]);
    let workloads: Vec<Workload> = all.filter(listed).collect();
    Experiment {
        name: NAME,
        title: "our RAM disk compared with the kernel's zram",
        about: "Speed and memory of our RAM disk and of the kernel's zram, with the same data, \
                algorithm (lz4) and size. The data are a corpus (parts of /usr/bin, text, and \
                noise that compresses by half) or, in rows whose name ends in 50, the data that \
                fio writes with --buffer_compress_percentage=50. With the corpus, lz4 takes most \
                of the time on both sides, which bounds the ratio; fio's data take a fourth of \
                that. Each measurement makes a zram device and removes it, which needs root; \
                without root the rows of zram are missing and the report states the reason. CPU \
                time is that of the threads that read and write, which do all the work on both \
                sides: zram works in the calling thread, and our disk in the process. The io_uring \
                rows have no CPU time, because the kernel then executes the I/Os in threads that \
                fio does not count. Rows without `fio` in their name use the lab's own loop, whose \
                cost is negligible. In the rows of fio both sides include fio's own cost, the row \
                `fio-alone`, so that their ratios are smaller than those of the devices. Before \
                each write fio must fill a buffer, because a pattern of fio 3.33 has 512 bytes at \
                most and compresses unlike real data. fio's clocks (`--gtod_reduce`) and its map \
                of blocks are off. The further rows are the command lines that were published for \
                zram's table, with four jobs: the fio line on 10 MiB, whose buffers are noise; the \
                same line with data that compress by half; and iozone's rows as fio options, with \
                read and write on the kernel's device except for pread and pwrite. Memory is the \
                sum of mm_stat and the block table, which has 16 bytes a page in zram and 8 in \
                ours.",
        published: published(&workloads),
        variants: VARIANTS.into_iter().chain(lines::VARIANTS).collect(),
        workloads,
        comparisons: comparisons(),
        plots: vec![Metric::IOS_PER_CPU_SECOND, Metric::IOPS, MEMORY],
        cells,
    }
}

fn comparisons() -> Vec<Comparison> {
    let mut comparisons = Vec::new();
    for row in &ROWS {
        for metric in [Metric::IOS_PER_CPU_SECOND, Metric::IOPS] {
            let comparison = Comparison::new(ZRAM, OURS, metric);
            comparisons.push(comparison.under(row.workload.name).aim(asked(row.does).1));
        }
        if row.by_fio && row.data == FillData::Half {
            let deep = Comparison::new(ZRAM_URING, OURS_DEEP, Metric::IOPS);
            comparisons.push(deep.under(row.workload.name).aim(asked(row.does).1));
        }
    }
    comparisons.extend(lines::comparisons());
    comparisons.push(Comparison::new(ZRAM, OURS, MEMORY).under(FULL.name).aim(AIM_MEMORY));
    comparisons.push(Comparison::new(ZRAM, OURS, RATIO).under(FULL.name).aim(AIM_RATIO));
    comparisons
}

/// zram's figures at the time when the aims were set.
fn published(workloads: &[Workload]) -> Vec<Published> {
    const SOURCE: &str = "fio 3.33, 2 virtual CPUs (AMD Zen 5), Linux 6.18, loaded machine, the \
                          best of 5 runs, buffers that compress by half";
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
    rows.into_iter().chain(lines::published()).filter(listed).collect()
}

/// The cells of [`FULL`]: both sides, filled with the corpus.
fn memory_cells(settings: &Settings, bytes: u64) -> [Cell; 2] {
    let filling = Filling::whole(FillData::Corpus, bytes);
    let scratch = settings.scratch.clone();
    let kernel = move |round: &Round<'_>| {
        let device = filling.zram(&scratch, round)?;
        let stat = device.mm_stat()?;
        let total = stat.mem_used_total + device.table_bytes();
        memory_sample(stat.orig_data_size, stat.compr_data_size, total)
    };
    let scratch = settings.scratch.clone();
    let ours = move |round: &Round<'_>| {
        let stats = filling.ram(&scratch, round)?.stats();
        let mm = stats.mm;
        memory_sample(mm.orig_data_size, mm.compr_data_size, mm.mem_used_total + stats.table_bytes)
    };
    [Cell::new(ZRAM, FULL.name, 1, kernel), Cell::new(OURS, FULL.name, 1, ours)]
}

fn memory_sample(plain: u64, compressed: u64, total: u64) -> Result<Sample, LabError> {
    if compressed == 0 {
        return Err(LabError::failed(FULL.name, "nothing was stored"));
    }
    let (plain, compressed, total) = (plain as f64, compressed as f64, total as f64);
    Ok(Sample::of(MEMORY, total)
        .with(RATIO, plain / compressed)
        .with(OVERHEAD_PART, (total / compressed - 1.0) * 100.0))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::by_fio::{By, Engine};
    use super::*;
    use crate::scratch::Scratch;
    use crate::stop::Stop;

    const SMALL: u64 = 16 << 20;

    /// The kernel's rows need the privilege to make a device, as other tests of the project do.
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
            lab: "blockyard-lab".into(),
            scratch: scratch.path().to_owned(),
            processors: 2,
            peers: Default::default(),
        };
        let measure =
            |cell: &Cell| (cell.body)(&round).unwrap_or_else(|error| panic!("{cell:?}: {error}"));
        for row in ROWS.iter().filter(|row| !row.by_fio) {
            for cell in loops::cells(&settings, row, 2, SMALL) {
                let sample = measure(&cell);
                assert!(sample.values.iter().all(|value| value.1 > 0.0), "{cell:?}");
            }
        }
        let value = |sample: &Sample, metric| {
            sample.values.iter().find(|value| value.0 == metric).map(|value| value.1).unwrap()
        };
        let both = memory_cells(&settings, SMALL).each_ref().map(measure);
        let [zrams, ours] = both.each_ref().map(|sample| value(sample, RATIO));
        assert!((ours / zrams - 1.0).abs() < 0.02, "the same algorithm: {ours} and {zrams}");
        let [zrams, ours] = both.each_ref().map(|sample| value(sample, MEMORY));
        assert!(ours < zrams, "{ours} bytes and {zrams}");
        let row = ROWS.iter().find(|row| row.by_fio && row.data == FillData::Half).unwrap();
        let by = |by| by_fio::measure(&round, &settings, row, by, 1, SMALL);
        let psync = by(By::Zram(Engine::Psync)).unwrap();
        assert!(psync.values.iter().any(|value| value.0 == Metric::CPU_PER_IO));
        let uring = by(By::Zram(Engine::Uring)).unwrap();
        assert!(uring.values.iter().all(|value| value.0 != Metric::CPU_PER_IO), "{uring:?}");
        assert!(by(By::Nothing).is_ok());
        let error = by(By::Ours("--iodepth=1")).unwrap_err().to_string();
        assert_eq!(error, "libblockyard_fio-*.so is missing; run `make fio`");
        stop.set();
        assert!(matches!(by(By::Zram(Engine::Psync)), Err(LabError::Interrupted)));
    }
}

//! The published fio line, by stock fio with our engine: ten megabytes, blocks of 32 KiB, four
//! jobs.
//!
//! The line was made of four jobs, one after the other: write, read, read and write in order, read
//! and write at random. Here each is a run of its own, so the device begins with what the first of
//! them would have left: a snapshot with noise in every block, or with blocks that compress by
//! half.

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockyard_core::bio::Flags;
use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::sched::NoneScheduler;
use blockyard_core::{Composed, Disk, SECTOR_BYTES, Sector};
use blockyard_ram::{Ram, RamConfig};
use fastrand::Rng;

use super::{GUARDINGS, PRODUCT, guardings};
use crate::baseline::locked_ram;
use crate::error::LabError;
use crate::experiment::{Cell, Published, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::settings::Settings;
use crate::tools::fio::Fio;

/// The published number of jobs.
const JOBS: u32 = 4;
/// The device of the line.
const BYTES: u64 = 10 << 20;
/// Four jobs on few processors need so long until each has had its turn.
const RUNTIME_MIN: Duration = Duration::from_millis(300);
/// What starting and ending fio take, and the longer run.
const OVERHEAD: Duration = Duration::from_millis(800);
/// The part of the line that is the same for all.
const COMMON: &str = "--filename=r --bs=32k --randrepeat=1 --randseed=100 --refill_buffers \
                      --scramble_buffers=1 --direct=1 --numjobs=4";
/// What makes buffers that compress by half.
const HALF: &str = "--buffer_compress_percentage=50 --buffer_compress_chunk=4k";
/// The unit of the published rows, in bytes.
const KIB: f64 = 1024.0;
const SOURCE: &str = "zram, Linux 3.16 (2014), the published fio line, 4 cores, average of 10";

/// What limits these cells.
const WHY_LESS: &str = "The published fio line refills its buffers with noise before each write: \
                        most of a write's CPU time is fio's, no block compresses, and a read \
                        copies a block that is stored raw. What its rows show of a lock is less \
                        than the rows in process do.";

/// A row: its part of the line, whether its buffers compress, and what was published, in KiB/s.
struct Line {
    workload: Workload,
    part: &'static str,
    half: bool,
    published: Option<[u32; 5]>,
    quick: bool,
}

static LINES: [Line; 6] = [
    Line {
        workload: Workload {
            name: "fio-seq-write",
            about: "stock fio: --bs=32k --refill_buffers --numjobs=4 --rw=write, 10 MiB of noise",
        },
        part: "--rw=write",
        half: false,
        published: Some([933_789, 999_357, 1_003_298, 995_961, 1_001_958]),
        quick: false,
    },
    Line {
        workload: Workload { name: "fio-seq-read", about: "the same with --rw=read" },
        part: "--rw=read",
        half: false,
        published: Some([5_634_130, 6_577_930, 6_380_861, 6_243_912, 6_230_006]),
        quick: true,
    },
    Line {
        workload: Workload { name: "fio-seq-rw", about: "the same with --rw=rw" },
        part: "--rw=rw",
        half: false,
        published: Some([1_405_687, 1_638_117, 1_640_256, 1_633_903, 1_634_459]),
        quick: false,
    },
    Line {
        workload: Workload { name: "fio-rand-rw", about: "the same with --rw=randrw" },
        part: "--rw=randrw",
        half: false,
        published: Some([1_386_119, 1_614_664, 1_617_211, 1_609_267, 1_612_471]),
        quick: false,
    },
    Line {
        workload: Workload {
            name: "fio-seq-read-50",
            about: "the same with --rw=read, of blocks that compress by half",
        },
        part: "--rw=read",
        half: true,
        published: None,
        quick: false,
    },
    Line {
        workload: Workload {
            name: "fio-rand-rw-50",
            about: "the same with --rw=randrw and --buffer_compress_percentage=50",
        },
        part: "--rw=randrw",
        half: true,
        published: None,
        quick: false,
    },
];

fn listed(settings: &Settings) -> impl Iterator<Item = &'static Line> + use<> {
    let quick = settings.quick;
    LINES.iter().filter(move |line| line.quick || !quick)
}

pub(super) fn workloads(settings: &Settings) -> impl Iterator<Item = Workload> + use<> {
    listed(settings).map(|line| line.workload)
}

/// The cells. Rows that nobody published have the variants that matter most.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    const FEW: [&str; 3] = [locked_ram::TABLE_LOCK, locked_ram::BIT_SPIN, PRODUCT];
    let mut cells = Vec::new();
    for line in listed(settings) {
        for guarding in guardings(settings) {
            let name = guarding.variant.name;
            if line.published.is_none() && !FEW.contains(&name) {
                continue;
            }
            let (settings, before) = (settings.clone(), guarding.before);
            let body = move |round: &Round<'_>| measure(round, &settings, before, line);
            cells.push(Cell::new(name, line.workload.name, JOBS, body).overhead(OVERHEAD));
        }
    }
    cells
}

fn measure(
    round: &Round<'_>,
    settings: &Settings,
    before: Option<&str>,
    line: &Line,
) -> Result<Sample, LabError> {
    let snapshot = snapshot(&settings.scratch, line.half)?;
    let dev = format!("ram:///r?size={BYTES}&algo=lz4&compact=0&load={}", snapshot.display());
    let half = if line.half { HALF } else { "" };
    let options = format!("{COMMON} {} {half}", line.part);
    let fio = Fio::on_engine(settings, &dev, before, &options)?;
    let report = fio.run(round.warm_up, round.duration.max(RUNTIME_MIN), round.stop)?;
    let mut sample = report.sample(settings.processors);
    sample.notes.push(WHY_LESS.to_owned());
    Ok(sample)
}

/// A snapshot of the device as the line's first job would have left it; made once in a run.
fn snapshot(scratch: &Path, half: bool) -> Result<PathBuf, LabError> {
    let path = scratch.join(if half { "ram-locks-half.ram" } else { "ram-locks-noise.ram" });
    if path.exists() {
        return Ok(path);
    }
    let failed = |what: &dyn std::fmt::Display| LabError::failed(path.display().to_string(), what);
    let ram = Ram::open(RamConfig { size: BYTES, ..RamConfig::default() });
    let ram = ram.map_err(|error| failed(&error))?;
    let channels = ChannelConfig::default();
    let disk = Composed::new("r".to_owned(), "ram", ram.clone(), channels, NoneScheduler::new);
    let mut block = [0; 4096];
    let mut io = Io::new(disk.open().map_err(|error| failed(&error))?, block.len());
    let mut rng = Rng::with_seed(100);
    let noise = if half { block.len() / 2 } else { block.len() };
    for at in (0..BYTES).step_by(block.len()) {
        rng.fill(&mut block[..noise]);
        let written = io.write(Sector(at / SECTOR_BYTES), &block, Flags::NONE);
        written.map_err(|status| failed(&status))?;
    }
    ram.save(&path).map_err(|error| failed(&error))?;
    Ok(path)
}

/// The published rows: the lines are theirs.
pub(super) fn published(settings: &Settings) -> impl Iterator<Item = Published> + use<> {
    listed(settings).flat_map(|line| {
        let rows = line.published.into_iter().flatten().zip(&GUARDINGS);
        rows.map(|(kib, guarding)| Published {
            variant: guarding.variant.name,
            workload: line.workload.name,
            jobs: JOBS,
            metric: Metric::BANDWIDTH,
            value: f64::from(kib) * KIB,
            source: SOURCE,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::stop::Stop;

    #[test]
    fn a_snapshot_holds_what_compresses_or_does_not() {
        let scratch = Scratch::new().unwrap();
        for (half, huge) in [(false, BYTES / 4096), (true, 0)] {
            let path = snapshot(scratch.path(), half).unwrap();
            assert_eq!(snapshot(scratch.path(), half).unwrap(), path);
            let config = RamConfig { size: BYTES, load: Some(path), ..RamConfig::default() };
            let stats = Ram::open(config).unwrap().stats().mm;
            assert_eq!((stats.orig_data_size, stats.huge_pages), (BYTES, huge));
        }
    }

    #[test]
    fn fio_needs_its_engine() {
        let (stop, scratch) = (Stop::new(), Scratch::new().unwrap());
        let round = Round {
            warm_up: Duration::ZERO,
            duration: Duration::ZERO,
            number: 0,
            seed: 3,
            stop: &stop,
        };
        let settings = Settings {
            quick: true,
            engine: None,
            program: PathBuf::new(),
            scratch: scratch.path().to_owned(),
            processors: 2,
        };
        let cells = cells(&settings);
        assert_eq!(cells.len(), 3);
        let error = (cells[0].body)(&round).unwrap_err().to_string();
        assert_eq!(error, "libblockyard_fio-*.so is missing; run `make fio`");
    }
}

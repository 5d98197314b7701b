//! `file`: the device `file` compared with fio's own io_uring on the same file.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fastrand::Rng;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::scratch::folder;
use crate::tools::fio::Fio;

/// The experiment's name on the command line.
pub const NAME: &str = "file";

const RAW: &str = "fio-io_uring";
const FIXED: &str = "fio-io_uring-fixed";
const OURS: &str = "blockyard";

/// The least ratios to fio's own io_uring: IOPS, and I/Os per second of CPU time.
const IOPS_AIM: f64 = 0.95;
const CPU_AIM: f64 = 1.0 / 1.1;

/// The length of the file, in bytes, and of the writes that fill it.
pub(super) const FILE_BYTES: u64 = 256 << 20;
const FILL_BYTES: usize = 1 << 20;
/// The time that filling the file, and starting and ending fio take.
pub(super) const OVERHEAD: Duration = Duration::from_millis(1200);
/// The options that all lines share.
pub(super) const COMMON: &str = "--bs=4k --norandommap --randrepeat=0";

/// Where the file lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FilePlace {
    /// In tmpfs, through the page cache.
    Memory,
    /// In the run's own directory, by direct I/O.
    Disk,
}

impl FilePlace {
    /// A file with data at this place.
    pub(super) fn fill(self, settings: &Settings, seed: u64) -> Result<FilledFile, LabError> {
        let place = match self {
            FilePlace::Memory => Path::new("/dev/shm"),
            FilePlace::Disk => settings.scratch.as_path(),
        };
        FilledFile::make(place, seed)
    }
}

/// A workload.
struct FileLoad {
    workload: Workload,
    place: FilePlace,
    options: &'static str,
}

const fn load(place: FilePlace, options: &'static str, text: [&'static str; 2]) -> FileLoad {
    FileLoad { workload: Workload { name: text[0], about: text[1] }, place, options }
}

const LOADS: [FileLoad; 4] = [
    load(
        FilePlace::Memory,
        "--rw=randread --iodepth=32 --iodepth_batch_submit=8 --iodepth_batch_complete_max=32",
        ["memory-read-32", "4 KiB random reads of a file in tmpfs, 32 in flight"],
    ),
    load(
        FilePlace::Memory,
        "--rw=randwrite --iodepth=32 --iodepth_batch_submit=8 --iodepth_batch_complete_max=32",
        ["memory-write-32", "4 KiB random writes to a file in tmpfs, 32 in flight"],
    ),
    load(
        FilePlace::Disk,
        "--rw=randread --iodepth=32 --iodepth_batch_submit=8 --iodepth_batch_complete_max=32",
        ["disk-read-32", "4 KiB random direct reads of a file on a disk, 32 in flight"],
    ),
    load(
        FilePlace::Disk,
        "--rw=randread --iodepth=1",
        ["disk-read-1", "4 KiB random direct reads of a file on a disk, one at a time"],
    ),
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let loads = if settings.quick { &LOADS[..1] } else { &LOADS[..] };
    let mut cells = Vec::new();
    for load in loads {
        for variant in [RAW, FIXED, OURS] {
            let settings = settings.clone();
            let body = move |round: &Round<'_>| measure(variant, load, &settings, round);
            cells.push(Cell::new(variant, load.workload.name, 1, body).overhead(OVERHEAD));
        }
    }
    let variant = |name, kind, about| Variant { name, kind, about };
    let mut comparisons = Vec::new();
    for load in &LOADS {
        let compare = |before, after, metric| {
            Comparison::new(before, after, metric).under(load.workload.name)
        };
        comparisons.push(compare(RAW, OURS, Metric::IOPS).aim(IOPS_AIM));
        comparisons.push(compare(RAW, OURS, Metric::IOS_PER_CPU_SECOND).aim(CPU_AIM));
        comparisons.push(compare(RAW, FIXED, Metric::IOS_PER_CPU_SECOND));
    }
    Experiment {
        name: NAME,
        title: "the device `file` compared with fio's own io_uring",
        about: "Throughput and CPU cost of the device `file` under fio, by our engine, compared \
                with fio's io_uring on the same file with the same options. `fio-io_uring` has \
                the file registered, as the device has; `fio-io_uring-fixed` has its buffers \
                registered too. CPU time is that of fio's threads, in user space and in the \
                kernel.",
        published: Vec::new(),
        variants: vec![
            variant(RAW, VariantRole::Limit, "--ioengine=io_uring --registerfiles=1"),
            variant(FIXED, VariantRole::Limit, "the same with --fixedbufs=1"),
            variant(
                OURS,
                VariantRole::Product,
                "--ioengine=external:ENGINE --dev=file:///f?path=FILE",
            ),
        ],
        workloads: loads.iter().map(|load| load.workload).collect(),
        comparisons,
        plots: vec![Metric::IOPS, Metric::IOS_PER_CPU_SECOND],
        cells,
    }
}

fn measure(
    variant: &str,
    load: &FileLoad,
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let file = load.place.fill(settings, round.seed)?;
    let fio = line(variant, load, settings, &file.path())?;
    Ok(fio.run(round.warm_up, round.duration, round.stop)?.sample(settings.processors))
}

fn line(variant: &str, load: &FileLoad, settings: &Settings, path: &Path) -> Result<Fio, LabError> {
    let options = format!("{COMMON} {} --size={FILE_BYTES}", load.options);
    let path = path.display();
    if variant == OURS {
        let direct = if load.place == FilePlace::Disk { "on" } else { "off" };
        let device = format!("file:///f?path={path}&direct={direct}&io=uring");
        return Fio::on_engine(settings, &device, None, &options);
    }
    let direct = u8::from(load.place == FilePlace::Disk);
    let fixed = u8::from(variant == FIXED);
    let own = format!("--ioengine=io_uring --registerfiles=1 --fixedbufs={fixed} {options}");
    Ok(Fio::new(&own).option("direct", direct).option("filename", path))
}

/// A file with data, in a directory of its own. Dropping it removes both.
pub(super) struct FilledFile(PathBuf);

impl FilledFile {
    fn make(place: &Path, seed: u64) -> Result<FilledFile, LabError> {
        let made = FilledFile(folder(place)?);
        let fill = || {
            let mut bytes = vec![0; FILL_BYTES];
            Rng::with_seed(seed).fill(&mut bytes);
            let mut file = File::create(made.path())?;
            for _ in 0..FILE_BYTES / FILL_BYTES as u64 {
                file.write_all(&bytes)?;
            }
            file.sync_all()
        };
        fill().map_err(LabError::io("a file with data"))?;
        Ok(made)
    }

    pub(super) fn path(&self) -> PathBuf {
        self.0.join("data")
    }
}

impl Drop for FilledFile {
    fn drop(&mut self) {
        // What is left in the run's own directory is removed with it.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_are_the_same_but_for_the_engine() {
        let settings = Settings {
            quick: false,
            engine: Some("/l/e.so".into()),
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch: "/tmp".into(),
            processors: 2,
            peers: Default::default(),
        };
        for load in &LOADS {
            let text = |variant| {
                let line = line(variant, load, &settings, Path::new("/f")).unwrap();
                line.line(Duration::ZERO, Duration::from_secs(1)).text()
            };
            let is_disk = load.place == FilePlace::Disk;
            assert!(text(RAW).contains(&format!("--direct={}", u8::from(is_disk))));
            assert_eq!(text(FIXED), text(RAW).replace("--fixedbufs=0", "--fixedbufs=1"));
            let direct = if is_disk { "on" } else { "off" };
            let wanted = format!("file:///f?path=/f&direct={direct}&io=uring");
            assert!(text(OURS).contains(&wanted) && text(OURS).contains(load.options));
        }
    }
}

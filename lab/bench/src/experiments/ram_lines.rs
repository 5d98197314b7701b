//! The published command lines for zram's table, for stock fio: the published fio line, and
//! iozone's rows as fio options. `ram-locks` and `ram-kernel` use both.
//!
//! The fio line has four jobs, one after the other: sequential write, sequential read, sequential
//! reads and writes, random reads and writes. Here each job is a run of its own. So the device
//! starts in the state that the first job would have left: noise in every block, or blocks that
//! compress by half.
//!
//! iozone's threads had a file each; here each has a part of the device. iozone reads and writes by
//! `lseek` and `read`, which is fio's `sync`, and by `pread` in its rows of that name. fio's stride
//! starts at the first record again at the end, so each thread reaches only every 17th record.

use std::path::Path;
use std::time::Duration;

use blockyard_baselines::locked_ram;

use super::ram_data::{ALGORITHM, FillData, Filling};
use crate::error::LabError;
use crate::experiment::{Published, Workload};
use crate::fio_bytes::HALF;
use crate::metric::Metric;
use crate::sample::Round;
use crate::tools::fio::{Fio, FioReport};

/// The published number of jobs.
pub(super) const JOBS: u32 = 4;
/// The columns of the published tables, by the lab's own names.
pub(super) const COLUMNS: [&str; 5] = [
    locked_ram::TABLE_LOCK,
    locked_ram::CAS,
    locked_ram::SPIN,
    locked_ram::RWLOCK,
    locked_ram::BIT_SPIN,
];
/// The unit of the published rows, in bytes.
const KIB: f64 = 1024.0;
/// The source of the published rows of the fio line.
const SOURCE_FIO: &str = "zram, Linux 3.16 (2014), the published fio line, 4 cores, average of 10 \
                          runs";
/// The source of the published rows of iozone.
pub(super) const SOURCE_IOZONE: &str = "zram, Linux 3.16 (2014), iozone -t 4 -r 16K -s 200M -I, 4 \
                                        cores, average of 10 runs";

/// The sizes of the device for the fio line and for iozone's rows, in bytes.
const FIO_BYTES: u64 = 10 << 20;
const IOZONE_BYTES: u64 = 1 << 30;
/// The part of the device that each of iozone's threads uses, in bytes.
const FILE_BYTES: u64 = 200 << 20;
/// The options that all runs of the fio line share.
const FIO_LINE: &str = "--bs=32k --randrepeat=1 --randseed=100 --refill_buffers \
                        --scramble_buffers=1 --direct=1 --numjobs=4";
/// The options that all of iozone's rows share.
const IOZONE_LINE: &str =
    "--bs=16k --direct=1 --norandommap --randrepeat=0 --gtod_reduce=1 --numjobs=4";
/// The least run time in which each of four jobs gets its turn on few processors.
const RUNTIME_MIN: Duration = Duration::from_millis(300);
/// The time limit of a pass, which takes far less.
const PASS_MAX: Duration = Duration::from_secs(60);

/// The published figures of iozone's rows, in KiB/s, by [`COLUMNS`].
pub(super) mod iozone {
    pub(crate) const INITIAL_WRITE: [u32; 5] =
        [1_381_094, 1_425_435, 1_422_860, 1_423_075, 1_421_521];
    pub(crate) const REWRITE: [u32; 5] = [1_529_479, 1_641_199, 1_668_762, 1_672_855, 1_654_910];
    pub(crate) const READ: [u32; 5] = [8_468_009, 11_324_979, 11_305_569, 11_117_273, 10_997_202];
    pub(crate) const RE_READ: [u32; 5] =
        [8_467_476, 11_260_914, 11_248_059, 11_145_336, 10_906_486];
    pub(crate) const REVERSE_READ: [u32; 5] =
        [6_821_393, 8_106_334, 8_282_174, 8_279_195, 8_109_186];
    pub(crate) const STRIDE_READ: [u32; 5] =
        [7_191_093, 8_994_306, 9_153_982, 8_961_224, 9_004_434];
    pub(crate) const RANDOM_READ: [u32; 5] =
        [7_156_353, 8_957_932, 9_167_098, 8_980_465, 8_940_476];
    pub(crate) const MIXED: [u32; 5] = [4_172_747, 5_680_814, 5_927_825, 5_489_578, 5_972_253];
    pub(crate) const RANDOM_WRITE: [u32; 5] =
        [1_483_044, 1_605_588, 1_594_329, 1_600_453, 1_596_010];
    pub(crate) const PWRITE: [u32; 5] = [1_276_644, 1_303_108, 1_311_612, 1_314_228, 1_300_960];
    pub(crate) const PREAD: [u32; 5] = [4_324_337, 4_632_869, 4_618_386, 4_457_870, 4_500_166];
}

/// The fio engine that reaches the kernel's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// `lseek`, then `read` or `write`.
    Sync,
    /// `pread` or `pwrite`.
    Psync,
}

/// A row that stock fio drives.
#[derive(Debug)]
pub(super) struct FioRow {
    pub(super) workload: Workload,
    /// The options of this row only.
    part: &'static str,
    pub(super) data: FillData,
    pub(super) call: Call,
    /// Whether the row is one of iozone's.
    is_iozone: bool,
    /// Whether the run writes blocks that were never written before, once each.
    is_fresh: bool,
    /// The published figures, by [`COLUMNS`], in KiB/s.
    pub(super) published: Option<[u32; 5]>,
}

const fn fio(
    name: &'static str,
    about: &'static str,
    part: &'static str,
    data: FillData,
    published: Option<[u32; 5]>,
) -> FioRow {
    let workload = Workload { name, about };
    let call = Call::Psync;
    FioRow { workload, part, data, call, is_iozone: false, is_fresh: false, published }
}

const fn iozone(
    name: &'static str,
    about: &'static str,
    part: &'static str,
    published: [u32; 5],
) -> FioRow {
    let (workload, published) = (Workload { name, about }, Some(published));
    let (data, call) = (FillData::Half, Call::Sync);
    FioRow { workload, part, data, call, is_iozone: true, is_fresh: false, published }
}

pub(super) static LINES: [FioRow; 19] = [
    fio(
        "fio-seq-write",
        "sequential writes of 10 MiB of noise; stock fio: --bs=32k --refill_buffers --numjobs=4 \
         --rw=write",
        "--rw=write",
        FillData::Noise,
        Some([933_789, 999_357, 1_003_298, 995_961, 1_001_958]),
    ),
    fio(
        "fio-seq-read",
        "sequential reads of 10 MiB of noise; stock fio: --bs=32k --refill_buffers --numjobs=4 \
         --rw=read",
        "--rw=read",
        FillData::Noise,
        Some([5_634_130, 6_577_930, 6_380_861, 6_243_912, 6_230_006]),
    ),
    fio(
        "fio-seq-rw",
        "sequential reads and writes of 10 MiB of noise; stock fio: --bs=32k --refill_buffers \
         --numjobs=4 --rw=rw",
        "--rw=rw",
        FillData::Noise,
        Some([1_405_687, 1_638_117, 1_640_256, 1_633_903, 1_634_459]),
    ),
    fio(
        "fio-rand-rw",
        "random reads and writes of 10 MiB of noise; stock fio: --bs=32k --refill_buffers \
         --numjobs=4 --rw=randrw",
        "--rw=randrw",
        FillData::Noise,
        Some([1_386_119, 1_614_664, 1_617_211, 1_609_267, 1_612_471]),
    ),
    fio(
        "fio-seq-write-50",
        "sequential writes of data that compress by half; stock fio: --bs=32k --refill_buffers \
         --numjobs=4 --rw=write --buffer_compress_percentage=50",
        "--rw=write",
        FillData::Half,
        None,
    ),
    fio(
        "fio-seq-read-50",
        "sequential reads of data that compress by half; stock fio: --bs=32k --refill_buffers \
         --numjobs=4 --rw=read",
        "--rw=read",
        FillData::Half,
        None,
    ),
    fio(
        "fio-seq-rw-50",
        "sequential reads and writes of data that compress by half; stock fio: --bs=32k \
         --refill_buffers --numjobs=4 --rw=rw --buffer_compress_percentage=50",
        "--rw=rw",
        FillData::Half,
        None,
    ),
    fio(
        "fio-rand-rw-50",
        "random reads and writes of data that compress by half; stock fio: --bs=32k \
         --refill_buffers --numjobs=4 --rw=randrw --buffer_compress_percentage=50",
        "--rw=randrw",
        FillData::Half,
        None,
    ),
    FioRow {
        is_fresh: true,
        ..iozone(
            "iozone-initial-write",
            "one pass of sequential writes over 200 MiB per job that were never written; stock \
             fio: --bs=16k --numjobs=4 --rw=write --buffer_compress_percentage=50",
            "--rw=write --time_based=0",
            iozone::INITIAL_WRITE,
        )
    },
    iozone(
        "iozone-rewrite",
        "sequential overwrites; stock fio: --bs=16k --numjobs=4 --rw=write \
         --buffer_compress_percentage=50",
        "--rw=write",
        iozone::REWRITE,
    ),
    iozone(
        "iozone-read",
        "sequential reads; stock fio: --bs=16k --numjobs=4 --rw=read",
        "--rw=read",
        iozone::READ,
    ),
    iozone(
        "iozone-re-read",
        "a second run of `iozone-read`; stock fio: --bs=16k --numjobs=4 --rw=read",
        "--rw=read",
        iozone::RE_READ,
    ),
    iozone(
        "iozone-reverse-read",
        "reads from the last record to the first; stock fio: --bs=16k --numjobs=4 --rw=read:-32k",
        "--rw=read:-32k",
        iozone::REVERSE_READ,
    ),
    iozone(
        "iozone-stride-read",
        "reads of every 17th record; stock fio: --bs=16k --numjobs=4 --rw=read:256k",
        "--rw=read:256k",
        iozone::STRIDE_READ,
    ),
    iozone(
        "iozone-random-read",
        "random reads; stock fio: --bs=16k --numjobs=4 --rw=randread",
        "--rw=randread",
        iozone::RANDOM_READ,
    ),
    iozone(
        "iozone-mixed",
        "random reads and writes; stock fio: --bs=16k --numjobs=4 --rw=randrw",
        "--rw=randrw",
        iozone::MIXED,
    ),
    iozone(
        "iozone-random-write",
        "random overwrites; stock fio: --bs=16k --numjobs=4 --rw=randwrite",
        "--rw=randwrite",
        iozone::RANDOM_WRITE,
    ),
    FioRow {
        call: Call::Psync,
        ..iozone(
            "iozone-pwrite",
            "as `iozone-rewrite`, with pwrite on the kernel's device",
            "--rw=write",
            iozone::PWRITE,
        )
    },
    FioRow {
        call: Call::Psync,
        ..iozone(
            "iozone-pread",
            "as `iozone-read`, with pread on the kernel's device",
            "--rw=read",
            iozone::PREAD,
        )
    },
];

impl FioRow {
    /// The device and its data at the start of the run.
    pub(super) fn filling(&self) -> Filling {
        let (size, filled) = match (self.is_iozone, self.is_fresh) {
            (false, _) => (FIO_BYTES, FIO_BYTES),
            (true, false) => (IOZONE_BYTES, u64::from(JOBS) * FILE_BYTES),
            (true, true) => (IOZONE_BYTES, 0),
        };
        Filling { data: self.data, size, filled }
    }

    /// Whether the row uses the large device, which takes long to fill and which a run does not
    /// change.
    pub(super) fn is_large(&self) -> bool {
        self.is_iozone && !self.is_fresh
    }

    /// The URI of our device for this row, with further `parameters`. Unless the device starts
    /// empty, its snapshot must exist: see [`Filling::snapshot`].
    pub(super) fn uri(&self, scratch: &Path, parameters: &str) -> String {
        let filling = self.filling();
        let mut uri = format!("ram:///r?size={}&algo={ALGORITHM}{parameters}", filling.size);
        if filling.filled > 0 {
            uri += &format!("&load={}", filling.path(scratch).display());
        }
        uri
    }

    /// The fio options, except engine and file.
    pub(super) fn options(&self) -> String {
        let half = if self.data == FillData::Half { HALF } else { "" };
        match self.is_iozone {
            true => format!(
                "{IOZONE_LINE} --size={FILE_BYTES} --offset_increment={FILE_BYTES} {} {half}",
                self.part
            ),
            false => format!("{FIO_LINE} {} {half}", self.part),
        }
    }

    /// Runs the row by fio.
    pub(super) fn run(&self, fio: &Fio, round: &Round<'_>) -> Result<FioReport, LabError> {
        match self.is_fresh {
            true => fio.run(Duration::ZERO, PASS_MAX, round.stop),
            false => fio.run(round.warm_up, round.duration.max(RUNTIME_MIN), round.stop),
        }
    }

    /// The row's published figures.
    pub(super) fn published(&self) -> impl Iterator<Item = Published> + use<> {
        let source = if self.is_iozone { SOURCE_IOZONE } else { SOURCE_FIO };
        published(self.workload.name, self.published, source)
    }
}

/// Published figures in KiB/s as rows.
pub(super) fn published(
    workload: &'static str,
    row: Option<[u32; 5]>,
    source: &'static str,
) -> impl Iterator<Item = Published> {
    row.into_iter().flat_map(move |row| {
        row.into_iter().zip(COLUMNS).map(move |(kib, variant)| Published {
            variant,
            workload,
            jobs: JOBS,
            metric: Metric::BANDWIDTH,
            value: f64::from(kib) * KIB,
            source,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_the_published_one() {
        let line = |name| LINES.iter().find(|line| line.workload.name == name).unwrap();
        let noise = line("fio-seq-read").options();
        assert!(noise.contains("--bs=32k") && !noise.contains("compress"), "{noise}");
        assert!(line("fio-seq-read-50").options().contains("compress_percentage=50"));
        let reverse = line("iozone-reverse-read").options();
        assert!(reverse.contains("--offset_increment=209715200 --rw=read:-32k"), "{reverse}");
        let scratch = Path::new("/s");
        let uri = line("iozone-read").uri(scratch, "&compact=0");
        let wanted = "ram:///r?size=1073741824&algo=lz4&compact=0\
                      &load=/s/ram-1073741824-838860800-half.ram";
        assert_eq!(uri, wanted);
        let uri = line("iozone-initial-write").uri(scratch, "");
        assert_eq!(uri, "ram:///r?size=1073741824&algo=lz4", "nothing was written before");
        let rows: Vec<Published> = line("iozone-pread").published().collect();
        assert_eq!((rows.len(), rows[0].value), (5, 4_324_337.0 * 1024.0));
    }
}

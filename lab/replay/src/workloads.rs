//! The recorded workloads: each exercises some rules of the scheduler.

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceWorkload {
    /// The workload's name, which is also that of its file.
    pub name: &'static str,
    /// The rules that the workload exercises.
    pub about: &'static str,
    /// The tunables, by the kernel's names.
    pub tunables: &'static [(&'static str, u32)],
    /// The queue's `nomerges`.
    pub nomerges: u32,
    /// fio's options: the first ones for all jobs, then the jobs.
    pub jobs: &'static str,
}

/// The common start of every fio command line. All threads run on one processor, so that the events
/// have one order.
pub const COMMON: &str = "fio --thread --direct=1 --ioengine=io_uring --bs=4k --cpus_allowed=0 \
                          --size=128M --eta=never --output-format=terse";

/// One job that keeps more in flight than the driver accepts.
macro_rules! deep {
    ($($options:literal),*) => {
        concat!(
            "--iodepth=224 --iodepth_batch_submit=32 --iodepth_batch_complete_max=32 \
             --number_ios=2400 ",
            $($options, " ",)*
            "--name=job"
        )
    };
}

const MIXED: &str = deep!("--rw=randrw");

/// Large requests, which take the driver so long that the requests after them expire.
const SLOW: &str = deep!("--rw=randrw --bs=64k");

/// A job of each class, the higher ones with pauses.
const CLASSES: &str = "--rw=randrw --iodepth_batch_submit=8 --iodepth_batch_complete_max=8 \
    --name=rt --prioclass=1 --prio=4 --iodepth=16 --number_ios=600 --thinktime=3000 \
    --thinktime_blocks=24 \
    --name=be --prioclass=2 --prio=4 --iodepth=64 --number_ios=900 --thinktime=2000 \
    --thinktime_blocks=96 \
    --name=idle --prioclass=3 --iodepth=96 --number_ios=900";

/// Many jobs that each read and write a piece of the device sequentially, and meet at its ends.
const SEQUENTIAL: &str = "--iodepth=24 --iodepth_batch_submit=1 --number_ios=300 --size=1200k \
    --offset_increment=1200k --numjobs=8 --rw=rw --rwmixread=30 --name=job";

/// Jobs that run backwards, so that new bios join waiting requests at their front.
const BACKWARD: &str = "--iodepth=60 --iodepth_batch_submit=1 --number_ios=500 --size=16M \
    --name=reads --rw=read:-8k --offset=16M --name=writes --rw=write:-8k --offset=48M \
    --name=more --rw=write:-8k --offset=80M --name=random --rw=randrw --offset=96M";

/// All workloads.
pub const WORKLOADS: &[TraceWorkload] = &[
    plain(
        "random-reads",
        "sorted reads, and the restart at the oldest read after the last sector",
        deep!("--rw=randread"),
    ),
    plain(
        "random-writes",
        "sorted writes, and the restart at the oldest write after the last sector",
        deep!("--rw=randwrite"),
    ),
    plain("mixed", "batches, and the alternation of reads and writes", MIXED),
    tuned(
        "starved-0",
        "writes before reads whenever a write waits",
        &[("writes_starved", 0)],
        MIXED,
    ),
    tuned("starved-1", "one batch of reads before writes", &[("writes_starved", 1)], MIXED),
    tuned("starved-5", "five batches of reads before writes", &[("writes_starved", 5)], MIXED),
    tuned("batch-1", "every decision begins a batch", &[("fifo_batch", 1)], MIXED),
    tuned("batch-4", "short batches", &[("fifo_batch", 4)], MIXED),
    tuned("batch-64", "long batches", &[("fifo_batch", 64)], MIXED),
    tuned("read-expiry", "reads that expire", &[("read_expire", 1)], SLOW),
    tuned("write-expiry", "writes that expire", &[("write_expire", 1)], SLOW),
    tuned(
        "at-once",
        "reads that have expired when they are inserted",
        &[("read_expire", 0)],
        MIXED,
    ),
    plain(
        "classes",
        "requests of the classes real-time, best-effort and idle at the same time",
        CLASSES,
    ),
    tuned(
        "aging",
        "requests of lower classes that have waited for prio_aging_expire",
        &[("prio_aging_expire", 10)],
        CLASSES,
    ),
    plain("sequential", "back merges: bios that extend a request at its end", SEQUENTIAL),
    plain("backward", "front merges: bios that extend a request at its start", BACKWARD),
    tuned(
        "no-front-merges",
        "the jobs of `backward` with `front_merges` off",
        &[("front_merges", 0)],
        BACKWARD,
    ),
    TraceWorkload { nomerges: 2, ..plain("no-merges", "no merges: `nomerges` is 2", SEQUENTIAL) },
];

const fn plain(name: &'static str, about: &'static str, jobs: &'static str) -> TraceWorkload {
    TraceWorkload { name, about, tunables: &[], nomerges: 0, jobs }
}

const fn tuned(
    name: &'static str,
    about: &'static str,
    tunables: &'static [(&'static str, u32)],
    jobs: &'static str,
) -> TraceWorkload {
    TraceWorkload { tunables, ..plain(name, about, jobs) }
}

/// The workload with this name.
pub fn find(name: &str) -> Option<&'static TraceWorkload> {
    WORKLOADS.iter().find(|workload| workload.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::KernelTunables;

    #[test]
    fn names_are_different_and_tunables_are_the_kernels() {
        for workload in WORKLOADS {
            assert_eq!(find(workload.name), Some(workload));
            let same = WORKLOADS.iter().filter(|other| other.name == workload.name).count();
            assert_eq!(same, 1, "{}", workload.name);
            for (name, _) in workload.tunables {
                assert!(KernelTunables::NAMES.contains(name), "{name}");
            }
            assert!(workload.jobs.contains("--name="), "{}", workload.name);
        }
        assert_eq!(find("mix"), None);
    }
}

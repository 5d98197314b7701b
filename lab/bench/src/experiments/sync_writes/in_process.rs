//! Clients in the process that has the volume open, compared with fio.

use blockyard_volume::Options;

use super::*;
use crate::experiment::Cell;
use crate::load::durable::{Ask, Durable, Ios};
use crate::load::latencies;
use crate::load::workers;
use crate::sample::{LatencyPercentiles, Round, Sample};
use crate::tools::cpu::of_process;
use crate::tools::fio::Fio;

/// The time that making and closing a volume takes.
const OVERHEAD: Duration = Duration::from_millis(120);
/// The time that starting and ending fio takes.
const OVERHEAD_FIO: Duration = Duration::from_millis(400);
/// The fio options that all runs share.
const FIO: &str = "--direct=1 --norandommap --randrepeat=0";
/// The number of clients on a delayed disk, for small and large writes.
const SLOW_SMALL: u32 = 32;
const SLOW_LARGE: u32 = 4;
/// The writes in flight of a restore, and the number of writes between its flushes.
const RESTORE_DEPTH: usize = 4;
const RESTORE_FLUSH: u32 = 32;

/// The clients of a cell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clients {
    pub(crate) threads: u32,
    pub(crate) ios: Ios,
    pub(crate) pool: &'static PoolShape,
    pub(crate) commit: Commit,
    pub(crate) delay: Duration,
}

/// The commit modes, with the names of their variants.
const WAYS: [(&str, Commit); 4] = [
    (SERIAL, Commit::Serial),
    (TASKQ, Commit::TaskWorkers),
    (LOG_TASKQ, Commit::LogWorkers),
    (GROUP, Commit::Group),
];

/// All cells in process.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    let few = settings.quick;
    let mut cells = Vec::new();
    let whole = [(W_4K, SMALL), (W_16K, MIDDLE), (W_1M, LARGE)];
    for (workload, size) in &whole[..if few { 1 } else { 3 }] {
        for &jobs in if few { &[MANY][..] } else { &[1, 4, 8, 32] } {
            on_disk(&mut cells, settings, workload.name, *size, jobs);
        }
    }
    let add = |cells: &mut Vec<Cell>, workload: &'static str, jobs, size: Size, delay| {
        for (name, commit) in WAYS {
            let ios = Ios { ask: Ask::DurableWrite, len: size.len, depth: 1 };
            let clients = Clients { threads: jobs, ios, pool: size.pool, commit, delay };
            cells.push(clients.cell(name, workload, jobs, settings));
        }
    };
    if few {
        return cells;
    }
    for Delayed { delay, small, large, .. } in &DELAYED {
        add(&mut cells, small.name, SLOW_SMALL, SMALL, *delay);
        add(&mut cells, large.name, SLOW_LARGE, LARGE, *delay);
    }
    restore(&mut cells, settings);
    cells
}

/// Adds the cells of one size and number of clients on the machine's disk.
fn on_disk(
    cells: &mut Vec<Cell>,
    settings: &Settings,
    workload: &'static str,
    size: Size,
    jobs: u32,
) {
    let (len, pool, delay) = (size.len, size.pool, Duration::ZERO);
    let ask = Ask::DurableWrite;
    for (name, commit) in WAYS {
        let ios = Ios { ask, len, depth: 1 };
        let clients = Clients { threads: jobs, ios, pool, commit, delay };
        cells.push(clients.cell(name, workload, jobs, settings));
    }
    if jobs > 1 {
        let ios = Ios { ask, len, depth: jobs as usize };
        let clients = Clients { threads: 1, ios, pool, commit: Commit::Group, delay };
        cells.push(clients.cell(GROUP_ONE_THREAD, workload, jobs, settings));
    }
    let options = format!("--ioengine=psync --sync=dsync --rw=randwrite --bs={len}");
    cells.push(raw(workload, jobs, options, settings));
}

fn restore(cells: &mut Vec<Cell>, settings: &Settings) {
    let slow = DELAYED[PUBLISHED_DELAY].delay;
    for (workload, delay) in [(W_RESTORE, Duration::ZERO), (W_RESTORE_3MS, slow)] {
        for (name, commit) in WAYS {
            let (len, depth) = (LARGE.len, RESTORE_DEPTH);
            let ios = Ios { ask: Ask::Stream(RESTORE_FLUSH), len, depth };
            let clients = Clients { threads: 1, ios, pool: LARGE.pool, commit, delay };
            cells.push(clients.cell(name, workload.name, 1, settings));
        }
    }
    let options = format!(
        "--ioengine=io_uring --iodepth={RESTORE_DEPTH} --fdatasync={RESTORE_FLUSH} --rw=write \
         --bs={}",
        LARGE.len
    );
    cells.push(raw(W_RESTORE.name, 1, options, settings));
}

/// A cell of fio on the raw file.
fn raw(workload: &'static str, jobs: u32, options: String, settings: &Settings) -> Cell {
    let settings = settings.clone();
    let body = move |round: &Round<'_>| {
        let bytes = raw_bytes(&settings);
        let file = pool_place::raw_file(&settings, bytes)?;
        let fio = Fio::new(&format!("{options} {FIO} --numjobs={jobs} --size={bytes}"));
        let fio = fio.option("filename", file.display());
        Ok(fio.run(round.warm_up, round.duration, round.stop)?.sample(usize::MAX))
    };
    Cell::new(RAW, workload, jobs, body).overhead(OVERHEAD_FIO)
}

impl Clients {
    fn cell(
        self,
        variant: &'static str,
        workload: &'static str,
        jobs: u32,
        settings: &Settings,
    ) -> Cell {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| {
            let path = source(&settings, self.pool, self.commit)?;
            let disk = pool_place::open(&path, self.commit, self.delay, Options::default())?;
            self.measure(&*disk, round)
        };
        Cell::new(variant, workload, jobs, body).overhead(OVERHEAD)
    }

    /// Measures the clients on a disk.
    pub(crate) fn measure(
        &self,
        disk: &dyn blockyard_core::Disk,
        round: &Round<'_>,
    ) -> Result<Sample, LabError> {
        let open =
            |number: u32| Durable::open(disk, self.ios, round.seed ^ u64::from(number) << 32);
        let works = (0..self.threads).map(open).collect::<Result<Vec<_>, LabError>>()?;
        let gauge = || (of_process(std::process::id()), pool_place::written_bytes());
        let outcome = workers::run(works, round, gauge)?;
        if outcome.ios == 0 {
            return Err(LabError::failed(NAME, "no I/O ended in the measured window"));
        }
        let ((cpu_before, written_before), (cpu_after, written_after)) = outcome.gauge;
        let what = "CPU time of the lab";
        let cpu_before = cpu_before.map_err(LabError::io(what))?;
        let cpu = cpu_after.map_err(LabError::io(what))?.saturating_sub(cpu_before);
        let mut latency = latencies();
        for work in &outcome.workers {
            latency.add(work.latency()).expect("both have the same range");
        }
        let (ios, wall) = (outcome.ios as f64, outcome.wall.as_secs_f64());
        let bytes = ios * self.ios.len as f64;
        let mut sample = Sample::of(Metric::IOPS, ios / wall)
            .with(Metric::CPU_PER_IO, cpu.as_nanos() as f64 / ios)
            .with(Metric::BANDWIDTH, bytes / wall)
            .with(Metric::CPUS, cpu.as_secs_f64() / wall)
            .with(Metric::P50, latency.value_at_quantile(0.5) as f64)
            .with(Metric::P99, latency.value_at_quantile(0.99) as f64);
        if let (Some(before), Some(after)) = (written_before, written_after)
            && !matches!(self.ios.ask, Ask::Read | Ask::SequentialRead)
        {
            sample = sample.with(AMPLIFICATION, (after - before) as f64 / bytes);
        }
        sample.latency = LatencyPercentiles::of(&latency);
        Ok(sample)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::stop::Stop;

    static POOL: PoolShape = PoolShape {
        name: "pool",
        block_bytes: 4096,
        volume_bytes: 16 << 20,
        pool_bytes: 128 << 20,
    };

    #[test]
    fn all_ways_are_measured() {
        let scratch = Scratch::new().unwrap();
        let settings = Settings {
            quick: true,
            engine: None,
            program: "by".into(),
            lab: "blockyard-lab".into(),
            scratch: scratch.path().to_owned(),
            processors: 2,
            peers: Default::default(),
        };
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(20));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        for (_, commit) in WAYS {
            for ask in [Ask::DurableWrite, Ask::Stream(4), Ask::Read] {
                let ios = Ios { ask, len: 8192, depth: 2 };
                let delay = Duration::from_micros(50);
                let clients = Clients { threads: 3, ios, pool: &POOL, commit, delay };
                let cell = clients.cell(GROUP, "w", 3, &settings);
                let sample = (cell.body)(&round).unwrap();
                assert!(sample.values.iter().all(|(_, value)| *value > 0.0), "{sample:?}");
                let has = |wanted| sample.values.iter().any(|(metric, _)| *metric == wanted);
                assert_eq!(has(AMPLIFICATION), ask != Ask::Read);
            }
        }
    }
}

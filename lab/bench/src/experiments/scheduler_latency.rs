//! `scheduler-latency`: how long a read waits while writes saturate the device.

use blockyard_baselines::sched_fifo;
use blockyard_core::sched::deadline::Tunable;
use blockyard_core::{Disk, Prio};

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Variant, VariantRole, Workload};
use crate::experiments::schedulers::{self, NONE, PRODUCT};
use crate::load::mixed::{Mix, Mixed};
use crate::load::workers;
use crate::metric::Metric;
use crate::sample::{LatencyPercentiles, Round, Sample};

/// The experiment's name on the command line.
pub const NAME: &str = "scheduler-latency";

/// The longest latency of a read.
const LONGEST: Metric = Metric::less("latency_max", "ns");
/// Reads per second.
const READS: Metric = Metric::more("reads", "1/s");

const ONE_CHANNEL: &str = "one-channel";
const OWN_CHANNELS: &str = "own-channels";
const THROTTLED: &str = "own-channels-throttled";
const IDLE: &str = "idle-class";

/// The time after which a lower class may overtake, in milliseconds. Linux's ten seconds are longer
/// than a round.
const AGING_MS: i64 = 100;
/// The latency allowed for a read of class IDLE: twice the aging time, in nanoseconds.
const AGED_NS: f64 = 2e6 * AGING_MS as f64;
/// The number of writers concurrent with an idle read.
const IDLE_WRITERS: usize = 4;

/// The number of device tags that throttled writes may use: as many as under `none`, where each of
/// the four writers has one.
const ASYNC_DEPTH: i64 = 4;

/// 8 tags of 200 us each: 40,000 requests per second.
const DEVICE: &str =
    "null:///l?size=64G&bs=4096&irqmode=timer&completion_nsec=200000&hw_queue_depth=8";

const WORKLOADS: [Workload; 4] = [
    Workload {
        name: ONE_CHANNEL,
        about: "one thread keeps 200 random writes and one read in flight on one channel, as an \
                export does for its client",
    },
    Workload {
        name: OWN_CHANNELS,
        about: "four threads keep 64 random writes each in flight, and a fifth thread reads, one \
                request at a time",
    },
    Workload {
        name: THROTTLED,
        about: "as `own-channels`; under mq-deadline async_depth is 4, so that writes leave device \
                tags free",
    },
    Workload {
        name: IDLE,
        about: "four threads keep 64 random writes each in flight, and a fifth thread reads in the \
                class IDLE, one request at a time; prio_aging_expire is 100 ms",
    },
];

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let mut cells = Vec::new();
    for (workload, jobs) in [(ONE_CHANNEL, 1), (OWN_CHANNELS, 5)] {
        for variant in schedulers::NAMES {
            let body = move |round: &Round<'_>| measure(round, variant, workload);
            cells.push(Cell::new(variant, workload, jobs, body));
        }
    }
    let mut one = |variant, workload| {
        let body = move |round: &Round<'_>| measure(round, variant, workload);
        cells.push(Cell::new(variant, workload, 5, body));
    };
    one(sched_fifo::NAME, OWN_CHANNELS);
    one(PRODUCT, THROTTLED);
    one(NONE, THROTTLED);
    if !settings.quick {
        one(PRODUCT, IDLE);
    }
    Experiment {
        name: NAME,
        title: "reads concurrent with writes that saturate the device",
        about: "Latency in nanoseconds of single reads, from push to reap, while writes saturate \
                the device: a null device without data that completes a request after 200 us and \
                executes eight at a time. Under `none` a read waits for the earlier writes of its \
                channel. A reader with its own channel has its own share of the device tags there; \
                `none-in-line` is `none` without such shares. Under mq-deadline a read is \
                dispatched after the rest of the current batch, and writes are dispatched when \
                they expire or after writes_starved batches of reads. A read of the class IDLE \
                waits for prio_aging_expire and then for its turn; the aim allows twice that time, \
                for a machine that schedules threads late.",
        published: Vec::new(),
        variants: variants(),
        workloads: WORKLOADS.to_vec(),
        comparisons: vec![
            Comparison::new(NONE, PRODUCT, Metric::P99).under(ONE_CHANNEL).aim(5.0),
            Comparison::new(NONE, PRODUCT, Metric::P50).under(ONE_CHANNEL),
            Comparison::new(sched_fifo::NAME, PRODUCT, Metric::P99).under(OWN_CHANNELS).aim(5.0),
            Comparison::new(NONE, PRODUCT, Metric::P99).under(OWN_CHANNELS),
            Comparison::new(NONE, PRODUCT, Metric::IOPS).under(OWN_CHANNELS),
            Comparison::new(NONE, PRODUCT, Metric::P99).under(THROTTLED),
            Comparison::new(NONE, PRODUCT, Metric::IOPS).under(THROTTLED),
            Comparison::to("200 ms", AGED_NS, PRODUCT, LONGEST).under(IDLE).aim(1.0),
        ],
        plots: vec![Metric::P99, Metric::P50],
        cells,
    }
}

fn variants() -> Vec<Variant> {
    let mut variants = schedulers::variants();
    variants.push(Variant {
        name: sched_fifo::NAME,
        kind: VariantRole::Before,
        about: "no scheduler: all channels share one FIFO queue, and each request gets a tag in \
                the order of arrival",
    });
    variants
}

/// The readers and writers of a workload.
fn mixes(workload: &str) -> Vec<Mix> {
    let writers = vec![Mix { writes: 64, read: None }; IDLE_WRITERS];
    let with_reader = |class| [writers, vec![Mix { writes: 0, read: Some(class) }]].concat();
    match workload {
        ONE_CHANNEL => vec![Mix { writes: 200, read: Some(Prio::BestEffort) }],
        OWN_CHANNELS | THROTTLED => with_reader(Prio::BestEffort),
        _ => with_reader(Prio::Idle),
    }
}

/// Sets a tunable of a disk's scheduler.
fn tune(disk: &dyn Disk, tunable: Tunable, value: i64) -> Result<(), LabError> {
    let failed = |why: String| LabError::failed(DEVICE, why);
    let control = disk.scheduler().ok_or_else(|| failed("it has no scheduler".to_owned()))?;
    let mut tunables = control.tunables();
    let set = tunables.set(tunable, value);
    set.map_err(|error| failed(error.to_string()))?;
    control.set(tunables);
    Ok(())
}

fn measure(
    round: &Round<'_>,
    variant: &'static str,
    workload: &'static str,
) -> Result<Sample, LabError> {
    let (disk, _) = schedulers::open_tapped(variant, DEVICE)?;
    match (workload, variant) {
        (IDLE, _) => tune(&*disk, Tunable::PrioAgingExpire, AGING_MS)?,
        (THROTTLED, PRODUCT) => tune(&*disk, Tunable::AsyncDepth, ASYNC_DEPTH)?,
        _ => {}
    }
    let workers = mixes(workload).into_iter().zip(round.seed..);
    let workers =
        workers.map(|(mix, seed)| Mixed::open(&*disk, mix, seed)).collect::<Result<_, _>>()?;
    let outcome = workers::run(workers, round, || ())?;
    let mut reads = outcome.workers[0].latency().clone();
    for member in &outcome.workers[1..] {
        reads.add(member.latency()).expect("all have the same range");
    }
    if reads.is_empty() {
        return Err(LabError::failed(workload, "no read ended in the measured window"));
    }
    let mut sample = Sample {
        latency: LatencyPercentiles::of(&reads),
        ..Sample::of(Metric::P99, reads.value_at_quantile(0.99) as f64)
    };
    sample = sample
        .with(Metric::P50, reads.value_at_quantile(0.5) as f64)
        .with(LONGEST, reads.max() as f64)
        .with(READS, reads.len() as f64 / outcome.wall.as_secs_f64());
    sample.values.extend(outcome.sample(workload)?.values);
    Ok(sample)
}

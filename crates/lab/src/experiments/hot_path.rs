//! `hot-path`: what each floor between a bio and the null device costs.

use std::hint::black_box;
use std::time::{Duration, Instant};

use blockyard_core::channel::{Bare, Channel, ChannelConfig};
use blockyard_core::clock::Clock;
use blockyard_core::request::Request;
use blockyard_core::sched::{NoneScheduler, Scheduler};
use blockyard_core::{
    Bio, BufRef, Completion, Composed, DeviceError, Disk, Nanos, Region, RegionId, SECTOR_BYTES,
    Sector,
};
use blockyard_null::{Null, NullConfig};
use blockyard_yard::{stack, uri};
use fastrand::Rng;
use rustix::time::{ClockId, clock_gettime};

use crate::error::LabError;
use crate::experiment::{Cell, Comparison, Experiment, Kind, Published, Variant, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::settings::Settings;

/// The name on the command line.
pub const NAME: &str = "hot-path";

/// Sectors of an I/O.
const SECTORS: u64 = 8;
/// I/Os between two looks at the clock.
const STRETCH: usize = 4096;
/// Tags of the device, and the largest batch.
const DEPTH: u16 = 128;

const GENERATOR: &str = "generator";
const BARE: &str = "bare";
const TAGS: &str = "tags";
const CLOCK: &str = "clock";
const SCHEDULER: &str = "scheduler";
const WHOLE: &str = "whole";

/// How a batch is carried out: opened once a measurement.
type Floor = fn(&Device) -> Result<Carry, LabError>;
type Carry = Box<dyn FnMut(&[Bio]) -> Result<(), LabError>>;

const FLOORS: [(Variant, Floor); 6] = [
    (
        Variant {
            name: GENERATOR,
            kind: Kind::Limit,
            about: "the bios are made and nothing is done with them: contained in all others",
        },
        generator,
    ),
    (
        Variant {
            name: BARE,
            kind: Kind::Limit,
            about: "each bio is checked and started on the device queue",
        },
        bare,
    ),
    (
        Variant {
            name: TAGS,
            kind: Kind::Product,
            about: "plus plug, tags and statistics; time stands still",
        },
        tags,
    ),
    (Variant { name: CLOCK, kind: Kind::Product, about: "plus the clock, twice a batch" }, clock),
    (
        Variant {
            name: SCHEDULER,
            kind: Kind::Product,
            about: "plus a scheduler that every request goes through, first in, first out",
        },
        scheduler,
    ),
    (
        Variant {
            name: WHOLE,
            kind: Kind::Product,
            about: "a device as the yard makes it: boxed channel, error injector without rules, \
                    scheduler none, which hands on directly",
        },
        whole,
    ),
];

/// Workloads: name, what, I/Os of a batch, whether the device has zones.
const WORKLOADS: [(&str, &str, usize, bool); 6] = [
    ("batch-1", "4 KiB random reads, one at a time", 1, false),
    ("batch-4", "4 KiB random reads in batches of 4", 4, false),
    ("batch-32", "4 KiB random reads in batches of 32", 32, false),
    ("batch-128", "4 KiB random reads in batches of 128", 128, false),
    ("zoned-1", "4 KiB random reads of 256 zones, one at a time", 1, true),
    ("zoned-128", "4 KiB random reads of 256 zones in batches of 128", 128, true),
];

/// The device, as the two ways of making it want it.
struct Device {
    zoned: bool,
}

impl Device {
    fn sectors(&self) -> u64 {
        (64 << 30) / SECTOR_BYTES
    }

    fn null(&self) -> Result<std::sync::Arc<Null>, LabError> {
        let config = NullConfig {
            size: self.sectors() * SECTOR_BYTES,
            bs: 4096,
            hw_queue_depth: DEPTH,
            zoned: self.zoned,
            ..NullConfig::default()
        };
        Null::open(config).map_err(|error| LabError::failed("null", error))
    }

    fn uri(&self) -> String {
        let zoned = u8::from(self.zoned);
        format!("null:///h?size=64G&bs=4096&hw_queue_depth={DEPTH}&zoned={zoned}")
    }
}

/// The experiment.
pub fn build(settings: &Settings) -> Experiment {
    let wanted = |batch: usize| !settings.quick || [1, 32, 128].contains(&batch);
    let workloads: Vec<_> = WORKLOADS.into_iter().filter(|workload| wanted(workload.2)).collect();
    let mut cells = Vec::new();
    for &(workload, _, batch, zoned) in &workloads {
        for (variant, floor) in FLOORS {
            let body = move |round: &Round<'_>| measure(round, &Device { zoned }, batch, floor);
            cells.push(Cell::new(variant.name, workload, 1, body));
        }
    }
    let floors = [BARE, TAGS, CLOCK, SCHEDULER];
    let steps = floors.windows(2).map(|pair| (pair[0], pair[1])).chain([(BARE, WHOLE)]);
    Experiment {
        name: NAME,
        title: "the null device, floor by floor",
        about: "One thread reads at random from a null device without data, from which each floor \
                above the device is left away in turn; CPU time of the thread per I/O, the making \
                of the bios included. There is no zone gate yet, so there is no floor for it. A \
                floor is made of the same types as the product, put together otherwise.",
        published: published(),
        variants: FLOORS.map(|floor| floor.0).to_vec(),
        workloads: workloads.iter().map(|&(name, about, ..)| Workload { name, about }).collect(),
        comparisons: steps
            .map(|(before, after)| Comparison::new(before, after, Metric::CPU_PER_IO).cost())
            .collect(),
        plots: vec![Metric::CPU_PER_IO],
        cells,
    }
}

fn published() -> Vec<Published> {
    let source = "SPDK 25.05 bdevperf, null bdev (zoned: zone_block on it), one core of a virtual \
                  machine on an AMD EPYC Zen 5, polled; another machine than this";
    let row = |workload, value| Published {
        variant: WHOLE,
        workload,
        jobs: 1,
        metric: Metric::CPU_PER_IO,
        value,
        source,
    };
    vec![row("batch-1", 68.0), row("batch-128", 42.0), row("zoned-128", 71.0)]
}

/// Random reads through one floor.
fn measure(
    round: &Round<'_>,
    device: &Device,
    batch: usize,
    floor: Floor,
) -> Result<Sample, LabError> {
    let mut carry = floor(device)?;
    let mut rng = Rng::with_seed(round.seed);
    let blocks = device.sectors() / SECTORS;
    let mut bios = Vec::with_capacity(batch);
    let mut stretch = || {
        for _ in 0..STRETCH / batch {
            bios.clear();
            bios.extend((0..batch).map(|slot| {
                let offset = slot as u64 * SECTORS * SECTOR_BYTES;
                let buf = BufRef { region: RegionId(0), offset };
                Bio::read(Sector(rng.u64(..blocks) * SECTORS), SECTORS, buf)
            }));
            carry(&bios)?;
        }
        Ok(())
    };
    run_for(round, round.warm_up, &mut stretch)?;
    let (cpu, start) = (thread_time(), Instant::now());
    let stretches = run_for(round, round.duration, &mut stretch)?;
    let (cpu, wall) = (thread_time() - cpu, start.elapsed());
    let ios = (stretches * (STRETCH / batch * batch) as u64) as f64;
    Ok(Sample::of(Metric::CPU_PER_IO, cpu.as_nanos() as f64 / ios)
        .with(Metric::IOPS, ios / wall.as_secs_f64()))
}

/// Goes on for so long, and at least once; says how many stretches that were.
fn run_for(
    round: &Round<'_>,
    duration: Duration,
    stretch: &mut impl FnMut() -> Result<(), LabError>,
) -> Result<u64, LabError> {
    let (start, mut count) = (Instant::now(), 0);
    while count == 0 || start.elapsed() < duration {
        if round.stop.is_set() {
            return Err(LabError::Interrupted);
        }
        stretch()?;
        count += 1;
    }
    Ok(count)
}

/// CPU time of this thread.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn region() -> std::sync::Arc<Region> {
    Region::alloc(usize::from(DEPTH) * (SECTORS * SECTOR_BYTES) as usize)
}

fn opened<T>(result: Result<T, DeviceError>) -> Result<T, LabError> {
    result.map_err(|error| LabError::failed("opening a queue of null", error))
}

fn generator(_: &Device) -> Result<Carry, LabError> {
    Ok(Box::new(|bios| {
        black_box(bios);
        Ok(())
    }))
}

fn bare(device: &Device) -> Result<Carry, LabError> {
    let null = device.null()?;
    let mut bare = opened(Bare::open(&null, DEPTH, region()))?;
    Ok(Box::new(move |bios| {
        bare.run(bios).map_err(|status| LabError::failed("a read of null", status))
    }))
}

fn tags(device: &Device) -> Result<Carry, LabError> {
    composed(device, NoneScheduler::new, Still)
}

fn clock(device: &Device) -> Result<Carry, LabError> {
    composed(device, NoneScheduler::new, blockyard_core::clock::Monotonic)
}

fn scheduler(device: &Device) -> Result<Carry, LabError> {
    composed(device, Queued::new, blockyard_core::clock::Monotonic)
}

fn whole(device: &Device) -> Result<Carry, LabError> {
    let uri = device.uri();
    let spec = uri::parse(&uri).map_err(|error| LabError::failed(uri.clone(), error))?;
    let disk = stack::open(&spec).map_err(|error| LabError::failed(uri, error))?.disk;
    let mut channel = opened(disk.open())?;
    channel.register(region());
    Ok(through(move |bios, out| carry_out(&mut *channel, bios, out)))
}

/// A stack of its own type, without box and injector.
fn composed<S: Scheduler, C: Clock + Clone + Sync>(
    device: &Device,
    scheduler: fn(usize) -> S,
    clock: C,
) -> Result<Carry, LabError> {
    let config = ChannelConfig { depth: 2 * DEPTH };
    let name = "floor".to_owned();
    let disk = Composed::with_clock(name, "null", device.null()?, config, scheduler, clock);
    debug_assert_eq!(disk.geometry().sectors, device.sectors());
    let mut stack = opened(disk.open_stack())?;
    stack.register(region());
    Ok(through(move |bios, out| carry_out(&mut stack, bios, out)))
}

/// A batch from push to reap, with the list of completions kept from batch to batch.
fn through(
    mut carry: impl FnMut(&[Bio], &mut Vec<Completion>) -> Result<(), LabError> + 'static,
) -> Carry {
    let mut out = Vec::with_capacity(usize::from(DEPTH));
    Box::new(move |bios| {
        out.clear();
        carry(bios, &mut out)
    })
}

/// Pushes, submits and reaps a batch that there is room for.
#[inline]
fn carry_out<C: Channel + ?Sized>(
    channel: &mut C,
    bios: &[Bio],
    out: &mut Vec<Completion>,
) -> Result<(), LabError> {
    let mut pushed = 0;
    while out.len() < bios.len() {
        pushed += channel.push(&bios[pushed..]);
        channel.submit();
        channel.reap(out);
    }
    match out.iter().find(|completion| !completion.status.is_ok()) {
        None => Ok(()),
        Some(failed) => Err(LabError::failed("a read of null", failed.status)),
    }
}

/// A clock that costs nothing, because it stands still.
#[derive(Clone, Copy, Debug)]
struct Still;

impl Clock for Still {
    #[inline]
    fn now(&self) -> Nanos {
        Nanos(0)
    }

    fn sleep_until(&self, _: Nanos) {}
}

/// The scheduler `none`, but every request goes through its queue.
struct Queued(NoneScheduler);

impl Queued {
    fn new(depth: usize) -> Queued {
        Queued(NoneScheduler::new(depth))
    }
}

impl Scheduler for Queued {
    const NAME: &'static str = "queued";

    #[inline]
    fn insert(&mut self, request: Request, now: Nanos) {
        self.0.insert(request, now);
    }

    fn requeue(&mut self, request: Request) {
        self.0.requeue(request);
    }

    #[inline]
    fn dispatch(&mut self, now: Nanos) -> Option<Request> {
        self.0.dispatch(now)
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;

    #[test]
    fn every_floor_carries_every_workload() {
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(1));
        let round = Round { warm_up, duration, number: 0, seed: 5, stop: &stop };
        let none = std::path::PathBuf::new();
        let settings = Settings {
            quick: false,
            engine: None,
            program: none.clone(),
            scratch: none,
            processors: 1,
        };
        let experiment = build(&settings);
        assert_eq!(experiment.cells.len(), FLOORS.len() * WORKLOADS.len());
        for cell in &experiment.cells {
            let sample = (cell.body)(&round).unwrap();
            assert!(sample.values.iter().all(|value| value.1 > 0.0), "{cell:?}");
        }
    }

    #[test]
    fn a_bare_queue_refuses_what_it_cannot_carry() {
        let device = Device { zoned: true };
        let mut bare = bare(&device).unwrap();
        let buf = |offset| BufRef { region: RegionId(0), offset };
        assert!(bare(&[Bio::read(Sector(0), SECTORS, buf(0))]).is_ok());
        assert!(bare(&[Bio::read(Sector(device.sectors()), SECTORS, buf(0))]).is_err());
        assert!(bare(&[Bio::read(Sector(0), SECTORS, buf(1 << 40))]).is_err());
        assert!(bare(&[Bio::flush()]).is_err());
        let many = vec![Bio::read(Sector(0), SECTORS, buf(0)); usize::from(DEPTH) + 1];
        assert!(bare(&many).is_err());
        assert!(bare(&many[1..]).is_ok());
    }
}

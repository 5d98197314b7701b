//! `hot-path`: the cost of each layer between a bio and the null device.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::channel::{Bare, Channel, ChannelConfig};
use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::zone::gate::{Gates, Ungated, ZoneWritePlugs};
use blockyard_core::{
    Bio, BufRef, Completion, Composed, Device as CoreDevice, DeviceError, Nanos, Region, RegionId,
    SECTOR_BYTES, Sector,
};
use blockyard_null::{Null, NullConfig};
use blockyard_yard::{stack, uri};
use fastrand::Rng;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::experiment::{Cell, Comparison, Experiment, Published, Variant, VariantRole, Workload};
use crate::metric::Metric;
use crate::sample::{Round, Sample};
use crate::tools::cpu::of_thread;

/// The experiment's name on the command line.
pub const NAME: &str = "hot-path";

/// The length of an I/O, in sectors.
const SECTORS: u64 = 8;
/// The number of I/Os between two readings of the clock.
const STRETCH: usize = 4096;
/// The number of the device's tags, which is the largest batch.
const DEPTH: u16 = 128;
/// The number of zones of a zoned device: more than a batch, so that no two writes of a batch can
/// merge.
const ZONES: u64 = 256;

const GENERATOR: &str = "generator";
/// The lowest layer: the device queue alone.
pub const BARE: &str = "bare";
const TAGS: &str = "tags";
const CLOCK: &str = "clock";
const GATE: &str = "gate";
const DEADLINE: &str = "mq-deadline";
const WHOLE: &str = "whole";
const WHOLE_DEADLINE: &str = "whole-mq-deadline";

/// Opens the layers up to one, once per measurement, and returns the function that executes a
/// batch.
type Floor = fn(&DeviceParams) -> Result<Carry, LabError>;
type Carry = Box<dyn FnMut(&[Bio]) -> Result<(), LabError>>;

const FLOORS: [(Variant, Floor); 8] = [
    (
        Variant {
            name: GENERATOR,
            kind: VariantRole::Limit,
            about: "the load generator builds the bios and discards them; all other variants \
                    include this cost",
        },
        generator,
    ),
    (
        Variant {
            name: BARE,
            kind: VariantRole::Limit,
            about: "the lowest layer: each bio is checked and started on the device queue",
        },
        bare,
    ),
    (
        Variant {
            name: TAGS,
            kind: VariantRole::Product,
            about: "plus the plug, tags and statistics, with a clock that stands still",
        },
        tags,
    ),
    (
        Variant {
            name: CLOCK,
            kind: VariantRole::Product,
            about: "plus two clock readings a batch",
        },
        clock,
    ),
    (
        Variant {
            name: GATE,
            kind: VariantRole::Product,
            about: "plus the zone write plug (gate=plug); only on zoned devices",
        },
        gate,
    ),
    (
        Variant {
            name: DEADLINE,
            kind: VariantRole::Product,
            about: "plus the scheduler mq-deadline, shared by all channels; on zoned devices with \
                    the zone write plug",
        },
        deadline,
    ),
    (
        Variant {
            name: WHOLE,
            kind: VariantRole::Product,
            about: "the device as the daemon opens it: boxed channel, fault injector without \
                    rules, scheduler none and no gate, because the null device keeps the order of \
                    writes",
        },
        whole,
    ),
    (
        Variant {
            name: WHOLE_DEADLINE,
            kind: VariantRole::Product,
            about: "as `whole`, with scheduler=mq-deadline and, on zoned devices, the zone write \
                    plug that this scheduler needs",
        },
        whole_deadline,
    ),
];

/// The I/Os that a workload sends to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IoKind {
    Reads,
    /// Reads of a zoned device.
    ZonedReads,
    /// Writes at the write pointers of all zones in turn.
    ZonedWrites,
}

/// The workloads: name, description, batch size, kind of I/O.
const WORKLOADS: [(&str, &str, usize, IoKind); 8] = [
    ("batch-1", "4 KiB random reads, one at a time", 1, IoKind::Reads),
    ("batch-4", "4 KiB random reads in batches of 4", 4, IoKind::Reads),
    ("batch-32", "4 KiB random reads in batches of 32", 32, IoKind::Reads),
    ("batch-128", "4 KiB random reads in batches of 128", 128, IoKind::Reads),
    ("zoned-1", "4 KiB random reads of 256 zones, one at a time", 1, IoKind::ZonedReads),
    (ZONED_128, "4 KiB random reads of 256 zones in batches of 128", 128, IoKind::ZonedReads),
    ("zoned-write-1", "4 KiB writes to 256 zones in turn, one at a time", 1, IoKind::ZonedWrites),
    (
        "zoned-write-128",
        "4 KiB writes to 256 zones in turn, in batches of 128",
        128,
        IoKind::ZonedWrites,
    ),
];

/// The workload with the largest batches, of reads of a zoned device.
pub const ZONED_128: &str = "zoned-128";

/// The parameters of a device, from which both ways of opening it take what they need.
struct DeviceParams {
    asked: IoKind,
}

impl DeviceParams {
    fn is_zoned(&self) -> bool {
        self.asked != IoKind::Reads
    }

    /// The zone size in bytes. Zones that are written are so large that no run fills one.
    fn zone_bytes(&self) -> u64 {
        if self.asked == IoKind::ZonedWrites { 64 << 30 } else { 256 << 20 }
    }

    fn bytes(&self) -> u64 {
        ZONES * self.zone_bytes()
    }

    fn null(&self) -> Result<Arc<Null>, LabError> {
        let config = NullConfig {
            size: self.bytes(),
            bs: 4096,
            hw_queue_depth: DEPTH,
            zoned: self.is_zoned(),
            zone_size: self.zone_bytes(),
            ..NullConfig::default()
        };
        Null::open(config).map_err(|error| LabError::failed("null", error))
    }

    fn uri(&self, scheduler: &str) -> String {
        let (size, zoned, zone) = (self.bytes(), u8::from(self.is_zoned()), self.zone_bytes());
        format!(
            "null:///h?size={size}&bs=4096&hw_queue_depth={DEPTH}&zoned={zoned}&zone_size={zone}\
             &scheduler={scheduler}"
        )
    }

    /// The next I/O after `count` earlier ones.
    #[inline]
    fn bio(&self, rng: &mut Rng, count: u64, buf: BufRef) -> Bio {
        match self.asked {
            IoKind::Reads | IoKind::ZonedReads => {
                let blocks = self.bytes() / SECTOR_BYTES / SECTORS;
                Bio::read(Sector(rng.u64(..blocks) * SECTORS), SECTORS, buf)
            }
            IoKind::ZonedWrites => {
                let start = Sector(count % ZONES * (self.zone_bytes() / SECTOR_BYTES));
                Bio::write(start + count / ZONES * SECTORS, SECTORS, buf)
            }
        }
    }
}

/// Builds the experiment.
pub fn build(settings: &Settings) -> Experiment {
    let wanted = |batch: usize| !settings.quick || [1, 32, 128].contains(&batch);
    let workloads: Vec<_> = WORKLOADS.into_iter().filter(|workload| wanted(workload.2)).collect();
    let mut cells = Vec::new();
    for &(workload, _, batch, asked) in &workloads {
        for (variant, floor) in FLOORS {
            if variant.name == GATE && asked == IoKind::Reads {
                continue;
            }
            let body =
                move |round: &Round<'_>| measure(round, &DeviceParams { asked }, batch, floor);
            cells.push(Cell::new(variant.name, workload, 1, body));
        }
    }
    Experiment {
        name: NAME,
        title: "the null device, layer by layer",
        about: "CPU time in nanoseconds per I/O of one thread, including the load generator. The \
                thread reads a null device without data at random offsets, or writes to its zones \
                in turn. Each variant adds one layer above the device to the variant before it; \
                the layers have the same types as in the product. A zone gate is necessary where \
                the scheduler or the device does not keep the order of writes; elsewhere gate=plug \
                requests it.",
        published: published(),
        variants: FLOORS.map(|floor| floor.0).to_vec(),
        workloads: workloads.iter().map(|&(name, about, ..)| Workload { name, about }).collect(),
        comparisons: comparisons(),
        plots: vec![Metric::CPU_PER_IO],
        cells,
    }
}

/// The cost of each layer on top of the one below. With zones the scheduler is replaced by the zone
/// write plug.
fn comparisons() -> Vec<Comparison> {
    let cost = |(before, after)| Comparison::new(before, after, Metric::CPU_PER_IO).cost();
    let steps = [
        (BARE, TAGS),
        (TAGS, CLOCK),
        (CLOCK, GATE),
        (GATE, DEADLINE),
        (BARE, WHOLE),
        (WHOLE, WHOLE_DEADLINE),
    ];
    let ungated = WORKLOADS.into_iter().filter(|workload| workload.3 == IoKind::Reads);
    let ungated = ungated.map(|workload| cost((CLOCK, DEADLINE)).under(workload.0));
    steps.map(cost).into_iter().chain(ungated).collect()
}

fn published() -> Vec<Published> {
    let source = "SPDK 25.05 bdevperf, null bdev (zoned: with zone_block), polled, one core of a \
                  virtual machine (AMD EPYC, Zen 5); a different machine";
    let row = |workload, value| Published {
        variant: WHOLE,
        workload,
        jobs: 1,
        metric: Metric::CPU_PER_IO,
        value,
        source,
    };
    vec![row("batch-1", 68.0), row("batch-128", 42.0), row(ZONED_128, 71.0)]
}

/// Measures batches through the layers up to one.
fn measure(
    round: &Round<'_>,
    device: &DeviceParams,
    batch: usize,
    floor: Floor,
) -> Result<Sample, LabError> {
    let mut carry = floor(device)?;
    let mut rng = Rng::with_seed(round.seed);
    let mut count = 0;
    let mut bios = Vec::with_capacity(batch);
    let mut stretch = || {
        for _ in 0..STRETCH / batch {
            bios.clear();
            bios.extend((0..batch).map(|slot| {
                let offset = slot as u64 * SECTORS * SECTOR_BYTES;
                let buf = BufRef { region: RegionId(0), offset };
                count += 1;
                device.bio(&mut rng, count - 1, buf)
            }));
            carry(&bios)?;
        }
        Ok(())
    };
    run_for(round, round.warm_up, &mut stretch)?;
    let (cpu, start) = (of_thread(), Instant::now());
    let stretches = run_for(round, round.duration, &mut stretch)?;
    let (cpu, wall) = (of_thread() - cpu, start.elapsed());
    let ios = (stretches * (STRETCH / batch * batch) as u64) as f64;
    Ok(Sample::of(Metric::CPU_PER_IO, cpu.as_nanos() as f64 / ios)
        .with(Metric::IOPS, ios / wall.as_secs_f64()))
}

/// Runs batches for the given time, and at least once. Returns the number of stretches of
/// [`STRETCH`] I/Os.
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

fn region() -> Arc<Region> {
    Region::alloc(usize::from(DEPTH) * (SECTORS * SECTOR_BYTES) as usize)
}

fn opened<T>(result: Result<T, DeviceError>) -> Result<T, LabError> {
    result.map_err(|error| LabError::failed("opening a queue of null", error))
}

fn generator(_: &DeviceParams) -> Result<Carry, LabError> {
    Ok(Box::new(|bios| {
        black_box(bios);
        Ok(())
    }))
}

fn bare(device: &DeviceParams) -> Result<Carry, LabError> {
    let null = device.null()?;
    let mut bare = opened(Bare::open(&null, DEPTH, region()))?;
    Ok(Box::new(move |bios| {
        bare.run(bios).map_err(|status| LabError::failed("an I/O of null", status))
    }))
}

fn tags(device: &DeviceParams) -> Result<Carry, LabError> {
    over(device.null()?, Ungated, Still)
}

fn clock(device: &DeviceParams) -> Result<Carry, LabError> {
    over(device.null()?, Ungated, Monotonic)
}

fn gate(device: &DeviceParams) -> Result<Carry, LabError> {
    let null = device.null()?;
    over(Arc::clone(&null), gates(null)?, Monotonic)
}

fn deadline(device: &DeviceParams) -> Result<Carry, LabError> {
    let scheduled = Arc::new(opened(Scheduled::new(device.null()?, true))?);
    match device.is_zoned() {
        true => over(Arc::clone(&scheduled), gates(scheduled)?, Monotonic),
        false => over(scheduled, Ungated, Monotonic),
    }
}

fn gates<D: CoreDevice>(device: Arc<D>) -> Result<ZoneWritePlugs<D>, LabError> {
    let gates = ZoneWritePlugs::new(device).map_err(|error| LabError::failed("a gate", error))?;
    gates.ok_or_else(|| LabError::failed("a gate", "the device has no zones"))
}

fn whole(device: &DeviceParams) -> Result<Carry, LabError> {
    by_yard(device.uri("none"))
}

fn whole_deadline(device: &DeviceParams) -> Result<Carry, LabError> {
    by_yard(device.uri("mq-deadline"))
}

fn by_yard(uri: String) -> Result<Carry, LabError> {
    let spec = uri::parse(&uri).map_err(|error| LabError::failed(uri.clone(), error))?;
    let disk = stack::open(&spec).map_err(|error| LabError::failed(uri, error))?.disk;
    let mut channel = opened(disk.open())?;
    channel.register(region());
    Ok(through(move |bios, out| carry_out(&mut *channel, bios, out)))
}

/// A stack of concrete type, without `Box` and without fault injector.
fn over<D: CoreDevice, W: Gates, C: Clock + Clone + Sync>(
    device: D,
    gates: W,
    clock: C,
) -> Result<Carry, LabError> {
    let config = ChannelConfig { depth: 2 * DEPTH };
    let name = "floor".to_owned();
    let disk = Composed::with_clock(name, "null", device, config, clock);
    let mut stack = opened(disk.with_gates(gates).open_stack())?;
    stack.register(region());
    Ok(through(move |bios, out| carry_out(&mut stack, bios, out)))
}

/// Wraps `execute_inline` with a completion list that is kept from batch to batch.
fn through(
    mut carry: impl FnMut(&[Bio], &mut Vec<Completion>) -> Result<(), LabError> + 'static,
) -> Carry {
    let mut out = Vec::with_capacity(usize::from(DEPTH));
    Box::new(move |bios| {
        out.clear();
        carry(bios, &mut out)
    })
}

/// Pushes, submits and reaps a batch for which the channel has room.
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
        Some(failed) => Err(LabError::failed("an I/O of null", failed.status)),
    }
}

/// A clock without cost, because it stands still.
#[derive(Clone, Copy, Debug)]
struct Still;

impl Clock for Still {
    #[inline]
    fn now(&self) -> Nanos {
        Nanos(0)
    }

    fn sleep_until(&self, _: Nanos) {}
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
            lab: "blockyard-lab".into(),
            scratch: none,
            processors: 1,
            peers: Default::default(),
        };
        let experiment = build(&settings);
        let gateless = WORKLOADS.iter().filter(|workload| workload.3 == IoKind::Reads).count();
        assert_eq!(experiment.cells.len(), FLOORS.len() * WORKLOADS.len() - gateless);
        for cell in &experiment.cells {
            let sample = (cell.body)(&round).unwrap();
            assert!(sample.values.iter().all(|value| value.1 > 0.0), "{cell:?}");
        }
    }

    #[test]
    fn a_bare_queue_refuses_what_it_cannot_carry() {
        let device = DeviceParams { asked: IoKind::ZonedReads };
        let mut bare = bare(&device).unwrap();
        let buf = |offset| BufRef { region: RegionId(0), offset };
        assert!(bare(&[Bio::read(Sector(0), SECTORS, buf(0))]).is_ok());
        assert!(
            bare(&[Bio::read(Sector(device.bytes() / SECTOR_BYTES), SECTORS, buf(0))]).is_err()
        );
        assert!(bare(&[Bio::read(Sector(0), SECTORS, buf(1 << 40))]).is_err());
        assert!(bare(&[Bio::flush()]).is_err());
        let many = vec![Bio::read(Sector(0), SECTORS, buf(0)); usize::from(DEPTH) + 1];
        assert!(bare(&many).is_err());
        assert!(bare(&many[1..]).is_ok());
    }
}

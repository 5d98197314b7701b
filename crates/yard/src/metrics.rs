//! The yard's counters in the text formats of OpenMetrics and Prometheus. docs/metrics.md describes
//! each.
//!
//! The data path counts in per-channel counters. They are read and summed at each scrape, so that
//! scrapes cost the data path nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use blockyard_core::channel::Stats;
use blockyard_core::middleware::{FaultInjector, InjectedFaults};
use blockyard_core::sched::deadline::{Counters, Stats as Scheduled};
use blockyard_core::zone::ZoneCond;
use blockyard_core::{Op, SECTOR_BYTES};
use blockyard_nbd::MemoryUse;
use blockyard_nvme::SubsystemInfo;
use blockyard_sync::counter::bucket_floor;
use blockyard_vhost::{RingCounts, VhostInfo};
use blockyard_volume_admin::prune::Period;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::backup::BackupView;
use crate::devices::Devices;
use crate::entry::DeviceEntry;
use crate::monitor::history::Peaks;
use crate::param::SCHEDULERS;
use crate::process::ProcessView;
use crate::ram::{HistogramsView, RamView, SizeView};
use crate::scheduler;
use crate::volumes::{PoolView, UploadView};
use crate::warnings::WarningKind;
use crate::zone_counts::count_by_condition;

mod clients;
mod format;

pub use clients::ClientMetrics;
pub use format::MetricsFormat;

/// The latency buckets' upper bounds: powers of two from 2^10 ns (about 1 us) to 2^33 (about 9 s).
const BUCKET_POWERS: RangeInclusive<u32> = 10..=33;

/// All metrics of a yard; `clients` are those that are connected, `memory` is the use of memory of
/// the NBD connections, `backups` are the policies, `peaks` those of devices, by their names.
pub fn encode(
    devices: &Devices,
    clients: ClientMetrics,
    memory: MemoryUse,
    backups: Vec<BackupView>,
    peaks: BTreeMap<String, Peaks>,
    format: MetricsFormat,
) -> String {
    let mut registry = Registry::with_prefix("blockyard");
    let pools = devices.pool_views();
    devices.look_for_warnings(&pools, &backups, blockyard_volume::admin::now());
    // The list of all devices is gone before a drive is asked for its zones, which may take long:
    // a device that a request has cannot be replaced.
    let samples = devices.list().into_iter().map(|entry| DeviceSample::new(&entry)).collect();
    let zones = devices.zoned_disks().into_iter().map(|disk| {
        let counts = count_by_condition(disk.as_ref());
        (disk.name().to_owned(), counts)
    });
    let sample = MetricsSample {
        clients,
        memory,
        backups,
        peaks,
        pools,
        subsystems: devices.subsystems().map(|table| table.list()).unwrap_or_default(),
        hypervisors: devices
            .vhost()
            .list()
            .into_iter()
            .map(|(it, info)| (it.device, info))
            .collect(),
        block_devices: devices
            .ublk()
            .list()
            .into_iter()
            .map(|(device, info)| (device, info.is_outdated))
            .collect(),
        devices: samples,
        zones: zones.collect(),
        warnings: devices.warnings().counts().to_vec(),
        process: ProcessView::new(),
    };
    registry.register_collector(Box::new(sample));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)
        .expect("writing to a string cannot fail");
    format.convert(text)
}

/// All values at one moment.
#[derive(Debug)]
struct MetricsSample {
    clients: ClientMetrics,
    memory: MemoryUse,
    backups: Vec<BackupView>,
    /// The peaks of devices, by their names.
    peaks: BTreeMap<String, Peaks>,
    pools: Vec<PoolView>,
    subsystems: Vec<SubsystemInfo>,
    /// The vhost-user servers, by the names of their devices.
    hypervisors: Vec<(String, VhostInfo)>,
    /// The block devices of the kernel, by the names of their devices: whether each is outdated.
    block_devices: Vec<(String, bool)>,
    devices: Vec<DeviceSample>,
    /// The zones of each zoned device by condition.
    zones: Vec<(String, Vec<(ZoneCond, u64)>)>,
    /// For each kind of warning how many there are now, and were raised so far.
    warnings: Vec<(WarningKind, u64, u64)>,
    process: ProcessView,
}

/// The values of one device.
struct DeviceSample {
    name: String,
    size_bytes: u64,
    /// The rules of its fault injector, and what they did.
    fault_rules: u64,
    injected: InjectedFaults,
    stats: Stats,
    /// The name of its scheduler.
    scheduler: &'static str,
    scheduled: Scheduled,
    ram: Option<RamView>,
    /// Whether it is latched, if it has a latch of its own.
    is_latched: Option<bool>,
    /// For a RAM disk: objects by size, blocks by age.
    sizes: Vec<SizeView>,
    ages: Vec<u64>,
}

impl fmt::Debug for DeviceSample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Row").field("device", &self.name()).finish_non_exhaustive()
    }
}

impl DeviceSample {
    fn new(entry: &DeviceEntry) -> DeviceSample {
        let scheduled = entry.disk.scheduler().map(|control| control.stats());
        let injector = entry.disk.fault_injector();
        let ram = RamView::of(entry);
        let (sizes, ages) = entry.ram.as_ref().map_or_else(Default::default, |ram| {
            let histograms = HistogramsView::new(ram);
            (histograms.coarse(ram.config().unit.into()), histograms.ages)
        });
        DeviceSample {
            name: entry.spec.name().to_owned(),
            size_bytes: entry.disk.geometry().len_bytes(),
            fault_rules: injector.map_or(0, |injector| injector.rules().len() as u64),
            injected: injector.map(FaultInjector::injected).unwrap_or_default(),
            stats: entry.disk.stats(),
            scheduler: scheduler::active(entry.disk.as_ref()),
            scheduled: scheduled.unwrap_or_default(),
            ram,
            is_latched: entry.has_latch().then(|| entry.latched_by().is_some()),
            sizes,
            ages,
        }
    }

    fn name(&self) -> &str {
        &self.name
    }
}

type CountOf = fn(&Stats, Op) -> u64;

/// Counters per device and operation: name, help, and how to read the value.
const PER_OP: [(&str, &str, CountOf); 4] = [
    ("device_ops", "Bios completed, failed ones included", |stats, op| stats.op(op).ops),
    ("device_bytes", "Bytes of the bios that succeeded", |stats, op| {
        stats.op(op).sectors * SECTOR_BYTES
    }),
    ("device_errors", "Bios that failed", |stats, op| stats.op(op).errors),
    ("device_merges", "Bios merged into another's request", |stats, op| stats.op(op).merges),
];

/// A value of the NVMe hosts of a device.
type HostsOf = fn(&SubsystemInfo) -> u64;

/// A count of a ring of a hypervisor.
type RingOf = fn(&RingCounts) -> u64;

/// Counters per device and ring of hypervisors.
const PER_RING: [(&str, &str, RingOf); 6] = [
    ("vhost_requests", "Requests of hypervisors that were answered", |ring| ring.requests),
    ("vhost_errors", "Requests of hypervisors that were answered with an error", |ring| {
        ring.errors
    }),
    ("vhost_kicks", "Kicks of guests that woke the thread of a ring", |ring| ring.kicks),
    ("vhost_calls", "Calls: interrupts that were sent to guests", |ring| ring.calls),
    ("vhost_sleeps", "Sleeps of the thread of a ring", |ring| ring.sleeps),
    ("vhost_faults", "How often a ring was malformed, and not served any more", |ring| ring.faults),
];

/// Counters per device and ring of hypervisors with one more label: its name, and its values.
type RingsBy = (&'static str, &'static str, &'static str, [(&'static str, RingOf); 2]);

const PER_RING_AND: [RingsBy; 2] = [
    (
        "vhost_bytes",
        "Data of requests of hypervisors that succeeded",
        "op",
        [("read", |ring| ring.read_bytes), ("write", |ring| ring.written_bytes)],
    ),
    (
        "vhost_spins",
        "Spins of the thread of a ring, by whether they found work",
        "found",
        [("yes", |ring| ring.spins_found), ("no", |ring| ring.spins_empty)],
    ),
];

/// A value of a backup policy.
type BackupOf = fn(&BackupView) -> u64;

/// Counters per backup policy.
const BACKUP_COUNTERS: [(&str, &str, BackupOf); 3] = [
    ("backup_runs", "Runs of the backup policy", |it| it.runs),
    ("backup_failures", "Runs that failed", |it| it.failures),
    ("backup_sent_bytes", "Bytes of streams that were sent to the target", |it| it.sent_bytes),
];

/// Gauges per backup policy.
const BACKUP_GAUGES: [(&str, &str, BackupOf); 5] = [
    ("backup_running", "1 while the policy runs", |it| it.running.into()),
    ("backup_failed", "1 if its last run failed", |it| it.error.is_some().into()),
    (
        "backup_last_success_timestamp_seconds",
        "When the last run that succeeded ended, in seconds since 1970; 0: none",
        |it| it.last_success.unwrap_or(0),
    ),
    ("backup_start_timestamp_seconds", "When the daemon began to run the policy", |it| it.since),
    ("backup_period_seconds", "The period of the snapshots, at most", |it| {
        Period::of_adverb(&it.snapshots).map_or(0, Period::seconds_max)
    }),
];

type Gauge = fn(&DeviceSample) -> u64;

/// Gauges per device.
const PER_DEVICE: [(&str, &str, Gauge); 3] = [
    ("device_size_bytes", "Capacity", |row| row.size_bytes),
    ("device_channels", "Channels open now", |row| row.stats.channels),
    ("device_fault_rules", "Rules of the fault injector now", |row| row.fault_rules),
];

/// The statistics of RAM disks that only grow; the others go up and down.
const RAM_EVENTS: [&str; 11] = [
    "failed_reads",
    "failed_writes",
    "invalid_io",
    "notify_free",
    "pages_compacted",
    "huge_pages_since",
    "bd_reads",
    "bd_writes",
    "writestall",
    "miss_free",
    "patch_retries",
];

/// A statistic of a RAM disk: its labels, and its value.
type RamStat<'a> = ([(&'static str, &'a str); 3], u64);

type Ordered = fn(&Counters) -> u64;

/// Counters per device, class and direction of the scheduler.
const PER_CLASS: [(&str, &str, Ordered); 5] = [
    ("scheduler_inserted", "Requests that came to mq-deadline", |counts| counts.inserted),
    ("scheduler_merged", "Requests that it made part of another", |counts| counts.merged),
    ("scheduler_dispatched", "Requests that it sent to the device", |counts| counts.dispatched),
    ("scheduler_completed", "Requests of it that are complete", |counts| counts.completed),
    ("scheduler_expired", "Requests that it sent when they were overdue", |counts| counts.expired),
];

type LatencyOf = fn(&Stats) -> &[u64];

/// Latency histograms per device, by the class of the operation: `write` has zone appends and
/// write-zeroes, `zone` all operations that manage zones.
const LATENCIES: [(&str, LatencyOf); 5] = [
    ("read", |stats| &stats.read_latency),
    ("write", |stats| &stats.write_latency),
    ("flush", |stats| &stats.flush_latency),
    ("discard", |stats| &stats.discard_latency),
    ("zone", |stats| &stats.zone_latency),
];

impl Collector for MetricsSample {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, count) in PER_OP {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for row in &self.devices {
                for op in Op::ALL {
                    family
                        .encode_family(&[("device", row.name()), ("op", op.name())])?
                        .encode_counter::<NoLabelSet, _, f64>(&count(&row.stats, op), None)?;
                }
            }
        }
        for (name, help, value) in PER_DEVICE {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for row in &self.devices {
                family.encode_family(&[("device", row.name())])?.encode_gauge(&value(row))?;
            }
        }
        let (name, help) =
            ("device_injected_faults", "Requests that fault rules failed or delayed");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for row in &self.devices {
            let effects = [("error", row.injected.failed), ("delay", row.injected.delayed)];
            for (effect, count) in effects {
                family
                    .encode_family(&[("device", row.name()), ("effect", effect)])?
                    .encode_counter::<NoLabelSet, _, f64>(&count, None)?;
            }
        }
        let help = "Time from submit to completion; the sum is exact to one sixteenth";
        let name = "device_latency_seconds";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for row in &self.devices {
            for (class, latency) in LATENCIES {
                let (sum, count, buckets) = histogram(latency(&row.stats), BUCKET_POWERS);
                family
                    .encode_family(&[("device", row.name()), ("op", class)])?
                    .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
            }
        }
        self.encode_schedulers(&mut encoder)?;
        let help = "Zones by condition";
        let mut family = encoder.encode_descriptor("zones", help, None, MetricType::Gauge)?;
        for (device, zones) in &self.zones {
            for (cond, count) in zones {
                family
                    .encode_family(&[("device", device.as_str()), ("cond", cond.name())])?
                    .encode_gauge(count)?;
            }
        }
        self.encode_peaks(&mut encoder)?;
        self.encode_ram(&mut encoder)?;
        self.encode_pools(&mut encoder)?;
        self.encode_backups(&mut encoder)?;
        let help = "NBD connections open now";
        encoder
            .encode_descriptor("nbd_connections", help, None, MetricType::Gauge)?
            .encode_gauge(&self.clients.count_of("nbd"))?;
        self.clients.encode(&mut encoder)?;
        self.encode_memory(&mut encoder)?;
        self.encode_nvme(&mut encoder)?;
        self.encode_vhost(&mut encoder)?;
        self.encode_ublk(&mut encoder)?;
        self.encode_latches(&mut encoder)?;
        self.encode_warnings(&mut encoder)?;
        self.encode_process(&mut encoder)
    }
}

impl MetricsSample {
    fn encode_peaks(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // A device that has been removed is in the history for longer.
        let peaks = || {
            let rows = self.devices.iter();
            rows.filter_map(|row| Some((row.name(), self.peaks.get(row.name())?)))
        };
        type PeaksByOp = fn(&Peaks) -> [(&'static str, f32); 2];
        let by_op: [(&str, &str, PeaksByOp); 2] = [
            (
                "device_peak_ops_per_second",
                "Most reads or writes in a second of the last minute",
                |it| [("read", it.reads_per_second), ("write", it.writes_per_second)],
            ),
            (
                "device_peak_bytes_per_second",
                "Most bytes that were read or written in a second of the last minute",
                |it| [("read", it.read_bytes_per_second), ("write", it.written_bytes_per_second)],
            ),
        ];
        for (name, help, values) in by_op {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (device, peaks) in peaks() {
                for (op, value) in values(peaks) {
                    let labels = [("device", device), ("op", op)];
                    family.encode_family(&labels)?.encode_gauge(&f64::from(value))?;
                }
            }
        }
        let help = "Most requests in flight, as the mean of a second of the last minute";
        let name = "device_peak_queue_size";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (device, peaks) in peaks() {
            let queue_size = f64::from(peaks.queue_size);
            family.encode_family(&[("device", device)])?.encode_gauge(&queue_size)?;
        }
        Ok(())
    }

    fn encode_backups(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, value) in BACKUP_COUNTERS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for it in &self.backups {
                family
                    .encode_family(&[("backup", it.name.as_str())])?
                    .encode_counter::<NoLabelSet, _, f64>(&value(it), None)?;
            }
        }
        for (name, help, value) in BACKUP_GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for it in &self.backups {
                let backup = [("backup", it.name.as_str())];
                family.encode_family(&backup)?.encode_gauge(&value(it))?;
            }
        }
        Ok(())
    }

    fn encode_warnings(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Warnings now, as `blockyard status` lists them";
        let mut family = encoder.encode_descriptor("warnings", help, None, MetricType::Gauge)?;
        for (kind, now, _) in &self.warnings {
            family.encode_family(&[("kind", kind.name())])?.encode_gauge(now)?;
        }
        let (name, help) = ("warnings_raised", "Warnings that were raised");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (kind, _, raised) in &self.warnings {
            family
                .encode_family(&[("kind", kind.name())])?
                .encode_counter::<NoLabelSet, _, f64>(raised, None)?;
        }
        Ok(())
    }

    fn encode_process(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "1, with the version of the program as a label";
        encoder
            .encode_descriptor("build_info", help, None, MetricType::Gauge)?
            .encode_family(&[("version", env!("CARGO_PKG_VERSION"))])?
            .encode_gauge(&1)?;
        let help = "CPU time of the daemon, of the user and of the system together";
        encoder
            .encode_descriptor("process_cpu_seconds", help, None, MetricType::Counter)?
            .encode_counter::<NoLabelSet, _, f64>(&(self.process.cpu_ns as f64 / 1e9), None)?;
        let help = "Memory of the daemon that is resident";
        encoder
            .encode_descriptor("process_resident_memory_bytes", help, None, MetricType::Gauge)?
            .encode_gauge(&self.process.resident_bytes)
    }

    fn encode_ublk(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "1 if requests of the block device of the kernel fail, or it has another size";
        let mut family =
            encoder.encode_descriptor("ublk_outdated", help, None, MetricType::Gauge)?;
        for (device, is_outdated) in &self.block_devices {
            let device = [("device", device.as_str())];
            family.encode_family(&device)?.encode_gauge(&u64::from(*is_outdated))?;
        }
        Ok(())
    }

    fn encode_latches(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "1 if the device is latched after a failed sync: writes and flushes fail";
        let mut family =
            encoder.encode_descriptor("device_latched", help, None, MetricType::Gauge)?;
        for device in &self.devices {
            let Some(is_latched) = device.is_latched else { continue };
            let name = [("device", device.name.as_str())];
            family.encode_family(&name)?.encode_gauge(&u64::from(is_latched))?;
        }
        Ok(())
    }

    fn encode_nvme(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gauges: [(&str, &str, HostsOf); 2] = [
            ("nvme_controllers", "Controllers of NVMe hosts now", |row| row.controllers as u64),
            ("nvme_queues", "I/O queues of NVMe hosts now", |row| row.queues as u64),
        ];
        for (name, help, value) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for row in &self.subsystems {
                family.encode_family(&[("device", &*row.name)])?.encode_gauge(&value(row))?;
            }
        }
        let counters: [(&str, &str, HostsOf); 2] = [
            ("nvme_commands", "I/O commands of NVMe hosts", |row| row.totals.commands),
            ("nvme_errors", "I/O commands of NVMe hosts that failed", |row| row.totals.errors),
        ];
        for (name, help, value) in counters {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for row in &self.subsystems {
                family
                    .encode_family(&[("device", &*row.name)])?
                    .encode_counter::<NoLabelSet, _, f64>(&value(row), None)?;
            }
        }
        let help = "Data of I/O commands of NVMe hosts that succeeded";
        let mut family =
            encoder.encode_descriptor("nvme_bytes", help, None, MetricType::Counter)?;
        for row in &self.subsystems {
            let bytes = [("read", row.totals.read_bytes), ("write", row.totals.written_bytes)];
            for (op, bytes) in bytes {
                family
                    .encode_family(&[("device", &*row.name), ("op", op)])?
                    .encode_counter::<NoLabelSet, _, f64>(&bytes, None)?;
            }
        }
        Ok(())
    }

    fn encode_vhost(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        type ServerOf = fn(&VhostInfo) -> u64;
        let gauges: [(&str, &str, ServerOf); 2] = [
            ("vhost_connected", "1 if a hypervisor is connected", |it| it.is_connected.into()),
            ("vhost_queues", "Rings of hypervisors that are served now", |it| it.queues as u64),
        ];
        for (name, help, value) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (device, info) in &self.hypervisors {
                family.encode_family(&[("device", device.as_str())])?.encode_gauge(&value(info))?;
            }
        }
        let rings = || {
            self.hypervisors.iter().flat_map(|(device, info)| {
                info.rings.iter().map(move |(ring, counts)| (device.as_str(), *ring, counts))
            })
        };
        for (name, help, value) in PER_RING {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (device, ring, counts) in rings() {
                family
                    .encode_family(&[("device", device), ("ring", &ring.to_string())])?
                    .encode_counter::<NoLabelSet, _, f64>(&value(counts), None)?;
            }
        }
        for (name, help, label, values) in PER_RING_AND {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (device, ring, counts) in rings() {
                for (which, value) in values {
                    let ring = ring.to_string();
                    family
                        .encode_family(&[("device", device), ("ring", &ring), (label, which)])?
                        .encode_counter::<NoLabelSet, _, f64>(&value(counts), None)?;
                }
            }
        }
        let (name, help) = ("vhost_spin_seconds", "Time that the thread of a ring spun");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (device, ring, counts) in rings() {
            family
                .encode_family(&[("device", device), ("ring", &ring.to_string())])?
                .encode_counter::<NoLabelSet, _, f64>(&(counts.spin_ns as f64 / 1e9), None)?;
        }
        Ok(())
    }

    fn encode_memory(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let MemoryUse { limit_bytes, used_bytes, waits, refused, .. } = self.memory;
        let gauges = [
            ("nbd_memory_limit_bytes", "Most memory for buffers of NBD connections", limit_bytes),
            ("nbd_memory_used_bytes", "Memory that NBD connections have now", used_bytes),
        ];
        for (name, help, value) in gauges {
            let mut gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            gauge.encode_gauge(&value)?;
        }
        let counters = [
            ("nbd_memory_waits", "Times that an NBD connection waited for memory", waits),
            ("nbd_memory_refused", "NBD connections and requests without memory", refused),
        ];
        for (name, help, value) in counters {
            let mut counter = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            counter.encode_counter::<NoLabelSet, _, f64>(&value, None)?;
        }
        Ok(())
    }

    fn encode_pools(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let empty = PoolView::default();
        let label = |pool: &PoolView| [("pool", pool.path.clone())];
        for (at, (name, help, _)) in empty.counters().into_iter().enumerate() {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for pool in &self.pools {
                family
                    .encode_family(&label(pool))?
                    .encode_counter::<NoLabelSet, _, f64>(&pool.counters()[at].2, None)?;
            }
        }
        for (at, (name, help, _)) in empty.gauges().into_iter().enumerate() {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for pool in &self.pools {
                family.encode_family(&label(pool))?.encode_gauge(&pool.gauges()[at].2)?;
            }
        }
        self.encode_uploads(encoder)
    }

    /// Of pools in object stores alone.
    fn encode_uploads(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let empty = UploadView::default();
        let uploads: Vec<([(&str, &str); 1], &UploadView)> = (self.pools.iter())
            .filter_map(|pool| Some(([("pool", pool.path.as_str())], pool.upload.as_ref()?)))
            .collect();
        for (at, (name, help, _)) in empty.counters().into_iter().enumerate() {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (label, upload) in &uploads {
                family
                    .encode_family(label)?
                    .encode_counter::<NoLabelSet, _, f64>(&upload.counters()[at].2, None)?;
            }
        }
        for (at, (name, help, _)) in empty.gauges().into_iter().enumerate() {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (label, upload) in &uploads {
                family.encode_family(label)?.encode_gauge(&upload.gauges()[at].2)?;
            }
        }
        Ok(())
    }

    /// The RAM disks' statistics whose names are `wanted`.
    fn ram_stats(&self, wanted: fn(&str) -> bool) -> Vec<RamStat<'_>> {
        let mut all = Vec::new();
        for row in &self.devices {
            let groups = row.ram.iter().flat_map(RamView::groups);
            for (group, fields) in groups {
                let fields = fields.into_iter().filter(|(stat, _)| wanted(stat));
                all.extend(fields.map(|(stat, value)| {
                    ([("device", row.name()), ("group", group), ("stat", stat)], value)
                }));
            }
        }
        all
    }

    fn encode_ram(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "RAM disks: zram's statistics that go up and down, by zram's names";
        let mut family = encoder.encode_descriptor("ram", help, None, MetricType::Gauge)?;
        for (labels, value) in self.ram_stats(|stat| !RAM_EVENTS.contains(&stat)) {
            family.encode_family(&labels)?.encode_gauge(&value)?;
        }
        let help = "RAM disks: zram's statistics that only grow, by zram's names";
        let mut family =
            encoder.encode_descriptor("ram_events", help, None, MetricType::Counter)?;
        for (labels, value) in self.ram_stats(|stat| RAM_EVENTS.contains(&stat)) {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)?;
        }
        let help = "RAM disks: objects by stored bytes, from the class below up to these";
        let name = "ram_objects";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for row in &self.devices {
            for size in &row.sizes {
                let bytes = size.bytes.to_string();
                family
                    .encode_family(&[("device", row.name()), ("bytes", &bytes)])?
                    .encode_gauge(&size.objects)?;
            }
        }
        let help = "RAM disks: blocks that hold something, by rounds since their last access";
        let mut family = encoder.encode_descriptor("ram_blocks", help, None, MetricType::Gauge)?;
        for row in &self.devices {
            for (age, blocks) in row.ages.iter().enumerate() {
                let age = age.to_string();
                family
                    .encode_family(&[("device", row.name()), ("age", &age)])?
                    .encode_gauge(blocks)?;
            }
        }
        Ok(())
    }

    fn encode_schedulers(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (name, help) = ("device_scheduler", "1 for the scheduler that a device has");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for row in &self.devices {
            for name in SCHEDULERS {
                family
                    .encode_family(&[("device", row.name()), ("scheduler", name)])?
                    .encode_gauge(&u64::from(*name == row.scheduler))?;
            }
        }
        let (name, help) = (
            "scheduler_requests",
            "Requests of mq-deadline now: those that wait, and those that the device executes",
        );
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for row in &self.devices {
            let (mut queued, mut in_flight) = (0, 0);
            for (_, _, counts) in row.scheduled.iter() {
                queued += counts.queued();
                in_flight += counts.in_flight();
            }
            let waiting = queued.saturating_sub(in_flight);
            for (state, count) in [("waiting", waiting), ("in_flight", in_flight)] {
                family
                    .encode_family(&[("device", row.name()), ("state", state)])?
                    .encode_gauge(&count)?;
            }
        }
        for (name, help, count) in PER_CLASS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for row in &self.devices {
                for (prio, direction, counts) in row.scheduled.iter() {
                    let class = [
                        ("device", row.name()),
                        ("class", prio.name()),
                        ("direction", direction.name()),
                    ];
                    family
                        .encode_family(&class)?
                        .encode_counter::<NoLabelSet, _, f64>(&count(counts), None)?;
                }
            }
        }
        Ok(())
    }
}

/// The sum in seconds, the count, and the bucket counts by upper bound in seconds. The bounds are
/// these powers of two, in nanoseconds.
fn histogram(
    latency: &[u64],
    powers: impl IntoIterator<Item = u32>,
) -> (f64, u64, Vec<(f64, u64)>) {
    let bounds: Vec<u64> = powers.into_iter().map(|power| 1 << power).collect();
    let seconds = |ns: u64| ns as f64 / 1e9;
    let mut buckets: Vec<_> = bounds.iter().map(|bound| (seconds(*bound), 0)).collect();
    buckets.push((f64::INFINITY, 0));
    let (mut sum, mut total) = (0.0, 0);
    for (index, count) in latency.iter().enumerate().filter(|(_, count)| **count > 0) {
        let floor_ns = bucket_floor(index);
        // A fine bucket ends at or below the next power of two, so none is split.
        let slot = bounds.partition_point(|bound| *bound <= floor_ns);
        buckets[slot].1 += count;
        sum += seconds(floor_ns) * *count as f64;
        total += count;
    }
    (sum, total, buckets)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockyard_core::blocking::Io;
    use blockyard_core::{Bio, Sector};
    use blockyard_nvme::HostAccess;

    use super::*;
    use crate::paths::TempDir;
    use crate::view::ConnectionView;

    fn devices() -> (Arc<Devices>, TempDir) {
        let (devices, temp) = (Devices::new(), TempDir::new().unwrap());
        let volume = format!("volume:///v?size=1G&path={}", temp.path().join("pool").display());
        for uri in [
            "null:///plain?size=1G&memory_backed=1&discard=1&cache_size=1M",
            "null:///z?size=1G&zoned=1&zone_size=64M&zone_nr_conv=2",
            volume.as_str(),
        ] {
            devices.add(crate::uri::parse(uri).unwrap()).unwrap();
        }
        (devices, temp)
    }

    fn nbd(id: u64) -> ConnectionView {
        let (protocol, peer) = ("nbd".to_owned(), format!("process {id}"));
        ConnectionView { protocol, id, peer, ..ConnectionView::default() }
    }

    fn peaks_of<const N: usize>(devices: [&str; N]) -> BTreeMap<String, Peaks> {
        let peaks = Peaks { reads_per_second: 3.5, queue_size: 0.25, ..Peaks::default() };
        devices.map(|device| (device.to_owned(), peaks)).into()
    }

    #[test]
    fn every_sample_has_a_type_and_the_text_ends_as_it_must() {
        let (devices, temp) = devices();
        let entry = devices.find("plain").unwrap();
        let mut io = Io::new(entry.disk.open().unwrap(), 4096);
        for _ in 0..3 {
            io.read(Sector(8), &mut [0; 4096]).unwrap();
        }
        io.run(Bio::new(Op::Flush, Sector(0), 0)).unwrap();
        io.run(Bio::new(Op::Discard, Sector(0), 8)).unwrap();
        let mut zoned = Io::new(devices.find("z").unwrap().disk.open().unwrap(), 4096);
        zoned.run(Bio::new(Op::ZoneOpen, Sector(2 * 131_072), 0)).unwrap();
        drop(zoned);
        let text = encode(
            &devices,
            ClientMetrics::new(vec![nbd(1), nbd(2)], |_| None),
            MemoryUse::default(),
            vec![BackupView { name: "off".to_owned(), runs: 2, ..BackupView::default() }],
            peaks_of(["plain", "removed"]),
            MetricsFormat::OpenMetrics,
        );
        let pool = temp.path().canonicalize().unwrap().join("pool");
        let volumes = format!("blockyard_pool_volumes{{pool=\"{}\"}} 1", pool.display());
        assert!(text.ends_with("# EOF\n"), "{text}");
        for line in [
            "# TYPE blockyard_device_ops counter",
            "blockyard_backup_runs_total{backup=\"off\"} 2",
            "blockyard_device_ops_total{device=\"plain\",op=\"read\"} 3",
            "blockyard_device_bytes_total{device=\"plain\",op=\"read\"} 12288",
            "blockyard_device_latency_seconds_count{device=\"plain\",op=\"read\"} 3",
            "blockyard_device_latency_seconds_bucket{le=\"+Inf\",device=\"plain\",op=\"read\"} 3",
            "blockyard_device_peak_ops_per_second{device=\"plain\",op=\"read\"} 3.5",
            "blockyard_device_peak_bytes_per_second{device=\"plain\",op=\"write\"} 0.0",
            "blockyard_device_peak_queue_size{device=\"plain\"} 0.25",
            "blockyard_device_channels{device=\"plain\"} 1",
            "blockyard_device_size_bytes{device=\"z\"} 1073741824",
            "blockyard_zones{device=\"z\",cond=\"not-wp\"} 2",
            "blockyard_zones{device=\"z\",cond=\"empty\"} 13",
            "blockyard_device_scheduler{device=\"plain\",scheduler=\"none\"} 1",
            "blockyard_device_scheduler{device=\"plain\",scheduler=\"mq-deadline\"} 0",
            "# TYPE blockyard_scheduler_inserted counter",
            "# TYPE blockyard_pool_groups counter",
            "# TYPE blockyard_pool_segments_cleaned counter",
            "# TYPE blockyard_pool_space_searches counter",
            "# TYPE blockyard_pool_free_bytes gauge",
            volumes.as_str(),
            "blockyard_nbd_connections 2",
            "blockyard_clients{protocol=\"nbd\"} 2",
            "blockyard_device_latency_seconds_count{device=\"plain\",op=\"flush\"} 1",
            "blockyard_device_latency_seconds_count{device=\"plain\",op=\"discard\"} 1",
            "blockyard_device_latency_seconds_count{device=\"plain\",op=\"zone\"} 0",
            "blockyard_device_latency_seconds_count{device=\"z\",op=\"zone\"} 1",
            "blockyard_scheduler_requests{device=\"plain\",state=\"waiting\"} 0",
            "# TYPE blockyard_pool_scrub_damaged counter",
            "# TYPE blockyard_nbd_memory_used_bytes gauge",
            "# TYPE blockyard_nbd_memory_waits counter",
            "# TYPE blockyard_process_cpu_seconds counter",
            "# TYPE blockyard_process_resident_memory_bytes gauge",
            concat!("blockyard_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing:\n{text}");
        }
        let names: Vec<_> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
            .collect();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(names.iter().any(|name| line.starts_with(name)), "{line} has no type");
        }
        assert!(!text.contains("removed"), "a device that was removed has no peaks: {text}");
    }

    #[test]
    fn hosts_of_nvme_are_counted_by_device() {
        let devices = Devices::new();
        devices.make_subsystems(HostAccess::default(), None);
        devices.add(crate::uri::parse("null:///n0?size=1M").unwrap()).unwrap();
        let text = encode(
            &devices,
            ClientMetrics::default(),
            MemoryUse::default(),
            Vec::new(),
            BTreeMap::new(),
            MetricsFormat::OpenMetrics,
        );
        for line in [
            "blockyard_nvme_controllers{device=\"n0\"} 0",
            "blockyard_nvme_queues{device=\"n0\"} 0",
            "blockyard_nvme_commands_total{device=\"n0\"} 0",
            "blockyard_nvme_bytes_total{device=\"n0\",op=\"read\"} 0",
            "blockyard_nvme_bytes_total{device=\"n0\",op=\"write\"} 0",
            "blockyard_nvme_errors_total{device=\"n0\"} 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} is missing:\n{text}");
        }
    }

    /// The bug: counts were gauges, so a program that adds up rates took a restart for a decrease.
    #[test]
    fn statistics_of_ram_disks_are_counters_where_they_only_grow() {
        let devices = Devices::new();
        devices.add(crate::uri::parse("ram:///r?size=1M").unwrap()).unwrap();
        let mut io = Io::new(devices.find("r").unwrap().disk.open().unwrap(), 4096);
        io.write(Sector(0), &[7; 4096], blockyard_core::Flags::NONE).unwrap();
        io.run(Bio::new(Op::Discard, Sector(0), 8)).unwrap();
        let text = encode(
            &devices,
            ClientMetrics::default(),
            MemoryUse::default(),
            Vec::new(),
            BTreeMap::new(),
            MetricsFormat::OpenMetrics,
        );
        let value = |family: &str, group: &str, stat: &str| {
            let line = format!("{family}{{device=\"r\",group=\"{group}\",stat=\"{stat}\"}} ");
            text.lines().find_map(|have| have.strip_prefix(&line)?.parse::<u64>().ok())
        };
        assert_eq!(value("blockyard_ram_events_total", "io_stat", "notify_free"), Some(1));
        assert_eq!(value("blockyard_ram", "own", "table_bytes"), Some(2048));
        let (mut events, row) = (0, DeviceSample::new(&devices.find("r").unwrap()));
        for (group, fields) in row.ram.unwrap().groups() {
            for (stat, _) in fields {
                let event = value("blockyard_ram_events_total", group, stat);
                let level = value("blockyard_ram", group, stat);
                assert!(event.is_some() != level.is_some(), "{group} {stat}: {event:?} {level:?}");
                assert_eq!(event.is_some(), RAM_EVENTS.contains(&stat), "{group} {stat}");
                events += usize::from(event.is_some());
            }
        }
        assert_eq!(events, RAM_EVENTS.len(), "each is the name of a statistic");
        for line in ["# TYPE blockyard_ram gauge", "# TYPE blockyard_ram_events counter"] {
            assert!(text.lines().any(|have| have == line), "{line} is missing:\n{text}");
        }
    }

    #[test]
    fn no_latency_is_lost_between_the_buckets() {
        let latency: Vec<u64> = (0..blockyard_sync::counter::HISTOGRAM_BUCKETS as u64).collect();
        let (_, total, buckets) = histogram(&latency, BUCKET_POWERS);
        assert_eq!(total, latency.iter().sum::<u64>());
        assert_eq!(buckets.iter().map(|(_, count)| count).sum::<u64>(), total);
    }
}

//! The responses of the control API as types: written by the daemon, read by the commands.

use blockyard_core::channel::Stats;
use blockyard_core::zone::gate::GateMode;
use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};
use blockyard_core::{Op, Sector};
use blockyard_file::FileStatus;
use blockyard_nbd::MemoryUse;
use blockyard_sync::counter::{HISTOGRAM_BUCKETS, bucket_floor, bucket_of};
use blockyard_ublk::{UblkInfo, block_path};
use blockyard_vhost::{RingCounts, VhostInfo};
use serde::{Deserialize, Serialize};

use crate::devices::Devices;
use crate::entry::{DeviceEntry, describe};
use crate::inject::FaultRuleView;
use crate::ram::RamView;
use crate::scheduler;
use crate::vhost::VhostPlace;

/// `GET /v1`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct RootView {
    /// The program's version.
    pub version: String,
    /// All paths of the API.
    pub paths: Vec<String>,
}

/// `GET /v1/version`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct VersionView {
    /// `blockyard`.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// The version of this API: the number in its paths.
    pub api: u32,
    /// The daemon's process.
    pub pid: u32,
}

/// A device: `GET /v1/devices/{name}`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct DeviceView {
    /// The device's name.
    pub name: String,
    /// The kind of device.
    pub kind: String,
    /// The URI of the device, with only the parameters that were given.
    pub uri: String,
    /// A description for people.
    pub description: String,
    /// Capacity.
    pub size_bytes: u64,
    /// Smallest unit of I/O.
    pub logical_block_bytes: u32,
    /// Smallest unit without read-modify-write.
    pub physical_block_bytes: u32,
    /// Whether changes are refused.
    pub read_only: bool,
    /// The device's zones, if it has any.
    pub zoned: Option<ZonedView>,
    /// The limits of a request.
    pub limits: LimitsView,
    /// The scheduler's name.
    #[serde(default)]
    pub scheduler: String,
    /// Channels open now.
    pub channels: u64,
    /// NBD clients, NVMe hosts, hypervisors and block devices of the kernel that use it now.
    pub clients: u64,
    /// The NQN of its NVMe subsystem, if it has one.
    #[serde(default)]
    pub nqn: Option<String>,
    /// The NSID of the device in the NVMe subsystem of all devices, if that is served.
    #[serde(default)]
    pub nsid: Option<u32>,
    /// The NVMe hosts that use it now.
    #[serde(default)]
    pub hosts: Vec<HostView>,
    /// The socket at which hypervisors find it, if it has one: `unix:PATH`.
    #[serde(default)]
    pub vhost: Option<String>,
    /// The path of the block device of the kernel that it is, if it is one: `/dev/ublkbN`.
    #[serde(default)]
    pub ublk: Option<String>,
    /// Whether requests of that block device fail, or it has another capacity than the device:
    /// after a change of the device that the block device did not take over.
    #[serde(default)]
    pub ublk_is_outdated: bool,
    /// What has failed, if the device is latched: writes and flushes fail until it is removed and
    /// added again.
    #[serde(default)]
    pub latched_by: Option<String>,
    /// How it accesses its file, if it is a `file` device.
    #[serde(default)]
    pub file_access: Option<FileAccessView>,
    /// The path of its block file, if files are mounted.
    #[serde(default)]
    pub file: Option<String>,
    /// The transport of requests for that file: `/dev/fuse` or `io_uring`.
    #[serde(default)]
    pub file_transport: Option<String>,
    /// How many times that file is open now.
    #[serde(default)]
    pub opens: u64,
    /// The rules of its fault injector, newest first.
    #[serde(default)]
    pub faults: Vec<FaultRuleView>,
    /// Notes on parameters that were corrected when the device was opened, and on NVMe.
    pub notes: Vec<String>,
    /// Nanoseconds since the device was opened.
    pub age_ns: u64,
}

/// How a device is divided into zones. Lengths in sectors of 512 bytes.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ZonedView {
    /// The distance between the starts of two zones.
    pub zone_sectors: u64,
    /// The writable part of a sequential zone.
    pub zone_capacity_sectors: u64,
    /// The number of zones.
    pub zone_count: u32,
    /// The number of conventional zones.
    pub conventional_count: u32,
    /// The limit of open zones; 0: no limit.
    pub open_max: u32,
    /// The limit of active zones; 0: no limit.
    pub active_max: u32,
    /// The mode of the zone write plug, which keeps changes of a zone in order: `pipeline`, `plug`.
    pub gate: String,
    /// Whether zone appends are made of writes, because the device has none of its own.
    pub append_emulated: bool,
}

/// The limits of a request. Lengths in sectors of 512 bytes; `null`: no limit.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct LimitsView {
    /// The longest read or write.
    pub sectors_max: Option<u64>,
    /// The longest discard; 0: none.
    pub discard_sectors_max: Option<u64>,
    /// The longest write-zeroes; 0: none.
    pub write_zeroes_sectors_max: Option<u64>,
    /// The longest zone append; 0: none.
    pub zone_append_sectors_max: Option<u64>,
    /// Whether there is a volatile cache.
    pub write_cache: bool,
    /// Whether the device itself implements FUA.
    pub fua: bool,
    /// The number of requests that one queue executes at once.
    pub queue_depth: u16,
}

/// An NVMe host of a device.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct HostView {
    /// The NQN of the host.
    pub nqn: String,
    /// The NQN of the subsystem that it uses: the device's own, or that of all devices.
    #[serde(default)]
    pub subsystem: String,
    /// The address of its admin queue.
    pub peer: String,
    /// The controller.
    pub controller: u16,
    /// The number of its I/O queues.
    pub queues: u64,
    /// The numbers by which the host calls them.
    #[serde(default)]
    pub queue_numbers: Vec<u16>,
}

/// How a `file` device accesses its file.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct FileAccessView {
    /// Whether I/O bypasses the page cache.
    pub is_direct: bool,
    /// Whether io_uring executes requests, and not blocking calls.
    pub is_uring: bool,
}

impl From<&FileStatus> for FileAccessView {
    fn from(status: &FileStatus) -> FileAccessView {
        let FileStatus { is_direct, is_uring, .. } = *status;
        FileAccessView { is_direct, is_uring }
    }
}

impl DeviceView {
    /// A device with its clients, its file and its sockets.
    pub fn new(entry: &DeviceEntry, devices: &Devices) -> DeviceView {
        let name = entry.spec.name();
        let (file, ublk) = (devices.files().find_info(name), devices.ublk().find(name));
        let (disk, limits) = (entry.disk.as_ref(), entry.disk.limits());
        let (geometry, gate) = (disk.geometry(), disk.gate());
        DeviceView {
            name: disk.name().to_owned(),
            kind: disk.kind().to_owned(),
            uri: entry.spec.to_string(),
            description: describe(&entry.spec, disk),
            size_bytes: geometry.len_bytes(),
            logical_block_bytes: geometry.logical_block_bytes,
            physical_block_bytes: geometry.physical_block_bytes,
            read_only: limits.read_only,
            zoned: geometry.zones.as_ref().map(|zones| ZonedView {
                zone_sectors: zones.zone_sectors,
                zone_capacity_sectors: zones.zone_capacity_sectors,
                zone_count: zones.zone_count,
                conventional_count: zones.conventional_count,
                open_max: zones.open_max,
                active_max: zones.active_max,
                gate: gate.map_or(GateMode::default(), |gate| gate.mode).to_string(),
                append_emulated: gate.is_some_and(|gate| gate.emulates_append),
            }),
            limits: LimitsView {
                sectors_max: limit(limits.sectors_max),
                discard_sectors_max: limit(limits.discard_sectors_max),
                write_zeroes_sectors_max: limit(limits.write_zeroes_sectors_max),
                zone_append_sectors_max: limit(limits.zone_append_sectors_max),
                write_cache: limits.write_cache,
                fua: limits.fua,
                queue_depth: disk.scheduler().map_or(limits.queue_depth, |control| control.depth()),
            },
            scheduler: scheduler::active(disk).to_owned(),
            channels: disk.stats().channels,
            clients: devices.clients(name),
            nqn: entry.nqn().map(str::to_owned),
            nsid: entry.nsid(),
            hosts: devices.hosts(name),
            vhost: devices.vhost().find(name).map(|(place, _)| format!("unix:{}", place.place)),
            ublk_is_outdated: ublk.as_ref().is_some_and(|info| info.is_outdated),
            ublk: ublk.map(|info| block_path(info.id)),
            latched_by: entry.latched_by().map(str::to_owned),
            file_access: entry.file.as_ref().map(FileAccessView::from),
            opens: file.as_ref().map_or(0, |file| file.opens),
            file_transport: file
                .as_ref()
                .and_then(|file| file.transport)
                .map(|transport| transport.name().to_owned()),
            file: file.and_then(|file| file.path).map(|path| path.display().to_string()),
            faults: disk
                .fault_injector()
                .map(|injector| injector.rules().into_iter().map(FaultRuleView::from).collect())
                .unwrap_or_default(),
            notes: entry.notes(),
            age_ns: age_ns(entry),
        }
    }
}

/// A limit in JSON, some of whose readers lack 64-bit integers.
fn limit(sectors: u64) -> Option<u64> {
    Some(sectors).filter(|sectors| *sectors != u64::MAX)
}

fn age_ns(entry: &DeviceEntry) -> u64 {
    u64::try_from(entry.since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// One zone. Positions and lengths in sectors of 512 bytes.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ZoneView {
    /// First sector.
    pub start: u64,
    /// Length.
    pub len: u64,
    /// The writable length.
    pub cap: u64,
    /// The write pointer, relative to the zone's start; `null` where there is none.
    pub wptr: Option<u64>,
    /// The condition's name, e.g. `implicit-open`.
    pub cond: String,
    /// The condition's number in a ZBC zone descriptor.
    pub cond_code: u8,
    /// `conventional` or `sequential-write-required`.
    #[serde(rename = "type")]
    pub kind: String,
}

impl From<&ZoneInfo> for ZoneView {
    fn from(zone: &ZoneInfo) -> ZoneView {
        let has_wp = zone.wp != Sector::NONE && zone.kind == ZoneType::SequentialWriteRequired;
        ZoneView {
            start: zone.start.0,
            len: zone.sectors,
            cap: zone.capacity_sectors,
            wptr: has_wp.then(|| zone.wp.0.saturating_sub(zone.start.0)),
            cond: zone.cond.name().to_owned(),
            cond_code: zone.cond as u8,
            kind: match zone.kind {
                ZoneType::Conventional => "conventional",
                ZoneType::SequentialWriteRequired => "sequential-write-required",
            }
            .to_owned(),
        }
    }
}

impl ZoneView {
    /// The line that `blkzone report` prints.
    pub fn line(&self) -> String {
        let cond = ZoneCond::ALL.iter().find(|cond| **cond as u8 == self.cond_code);
        let short = cond.map_or("??", |cond| cond.short());
        let (code, name) = match self.kind.as_str() {
            "conventional" => (1, "CONVENTIONAL"),
            _ => (2, "SEQ_WRITE_REQUIRED"),
        };
        // The kernel has no write pointer for these zones either, and blkzone prints 0.
        let wptr = self.wptr.unwrap_or(0);
        format!(
            "  start: 0x{:09x}, len 0x{:06x}, cap 0x{:06x}, wptr 0x{wptr:06x} reset:0 non-seq:0, \
             zcond:{:2}({short}) [type: {code}({name})]",
            self.start, self.len, self.cap, self.cond_code
        )
    }
}

/// A page of a zone report.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ZonesView {
    /// The zones, in order.
    pub zones: Vec<ZoneView>,
    /// The sector at which the next page begins; `null` at the end of the device.
    pub next: Option<u64>,
}

/// Counters of one operation.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct OpView {
    /// Operations completed, failed ones included.
    pub ops: u64,
    /// The bytes of successful operations.
    pub bytes: u64,
    /// The number of failed operations.
    pub errors: u64,
    /// The number of operations that were merged into another request.
    pub merges: u64,
}

/// Counts of a latency: pairs of a bucket's least latency in nanoseconds and its count, empty
/// buckets left out.
pub type LatencyView = Vec<(u64, u64)>;

/// Statistics of one device since it was opened.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct StatsView {
    /// The device.
    pub device: String,
    /// Nanoseconds since the device was opened.
    pub age_ns: u64,
    /// Channels open now.
    pub channels: u64,
    /// By the operation's name; operations that never ran are left out.
    pub ops: std::collections::BTreeMap<String, OpView>,
    /// Latency of reads.
    pub read_latency: LatencyView,
    /// Latency of writes, appends and write-zeroes.
    pub write_latency: LatencyView,
    /// Latency of flushes.
    pub flush_latency: LatencyView,
    /// Latency of discards.
    pub discard_latency: LatencyView,
    /// Latency of operations that manage zones.
    pub zone_latency: LatencyView,
    /// The statistics of a RAM disk, by zram's names; absent for other devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<RamView>,
    /// The pool of a volume; absent for other devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The NVMe hosts that use it now; absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostView>,
}

impl StatsView {
    /// The present statistics of a device, without its hosts.
    pub fn new(entry: &DeviceEntry) -> StatsView {
        let stats: Stats = entry.disk.stats();
        let ops = Op::ALL.into_iter().filter_map(|op| {
            let row = stats.op(op);
            let used = row.ops | row.errors | row.merges != 0;
            used.then(|| {
                let bytes = Sector(row.sectors).bytes();
                let (ops, errors, merges) = (row.ops, row.errors, row.merges);
                (op.name().to_owned(), OpView { ops, bytes, errors, merges })
            })
        });
        StatsView {
            device: entry.disk.name().to_owned(),
            age_ns: age_ns(entry),
            channels: stats.channels,
            ops: ops.collect(),
            read_latency: sparse(&stats.read_latency),
            write_latency: sparse(&stats.write_latency),
            flush_latency: sparse(&stats.flush_latency),
            discard_latency: sparse(&stats.discard_latency),
            zone_latency: sparse(&stats.zone_latency),
            ram: RamView::of(entry),
            pool: entry.pool.as_ref().map(|pool| pool.path().display().to_string()),
            hosts: Vec::new(),
        }
    }

    /// The present statistics of a device, with its hosts.
    pub fn with_hosts(entry: &DeviceEntry, devices: &Devices) -> StatsView {
        let hosts = devices.hosts(entry.spec.name());
        StatsView { hosts, ..StatsView::new(entry) }
    }
}

/// A latency without its empty buckets, as the API returns it.
pub fn sparse(latency: &[u64]) -> LatencyView {
    let filled = latency.iter().enumerate().filter(|(_, count)| **count > 0);
    filled.map(|(bucket, count)| (bucket_floor(bucket), *count)).collect()
}

/// A latency with all its buckets, as [`blockyard_core::channel::percentile_ns`] expects it.
pub fn dense(latency: &LatencyView) -> Vec<u64> {
    let mut buckets = vec![0; HISTOGRAM_BUCKETS];
    for (floor_ns, count) in latency {
        buckets[bucket_of(*floor_ns)] += count;
    }
    buckets
}

/// The connection of an NBD client, of a queue of an NVMe host, of a hypervisor, or of the kernel.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct ConnectionView {
    /// The protocol: `nbd`, `nvme`, `vhost` or `ublk`.
    #[serde(default)]
    pub protocol: String,
    /// The address of the NBD server: `unix:PATH`, or the first of its addresses.
    #[serde(default)]
    pub server: Option<String>,
    /// The connection's number in its server.
    pub id: u64,
    /// The address of the client.
    pub peer: String,
    /// The device; `null` during the handshake, for a host that discovers devices, and for one that
    /// uses all of them.
    pub device: Option<String>,
    /// The NQN of the subsystem that an NVMe host uses; `null` during the handshake.
    #[serde(default)]
    pub subsystem: Option<String>,
    /// The NQN of an NVMe host.
    #[serde(default)]
    pub host: Option<String>,
    /// The controller of an NVMe host.
    #[serde(default)]
    pub controller: Option<u16>,
    /// The queue of an NVMe host; 0 is the admin queue.
    #[serde(default)]
    pub queue: Option<u16>,
    /// Whether the connection is encrypted.
    pub tls: bool,
    /// Requests received.
    pub requests: u64,
    /// Bytes read from the device.
    pub read_bytes: u64,
    /// Bytes written to the device.
    pub written_bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// The bytes of the memory for NBD connections that it holds now.
    #[serde(default)]
    pub memory_bytes: u64,
    /// The latency of reads of the device that it has submitted.
    #[serde(default)]
    pub read_latency: LatencyView,
    /// The latency of writes, appends and write-zeroes that it has submitted.
    #[serde(default)]
    pub write_latency: LatencyView,
}

/// `GET /v1/nbd-memory`: the memory for the buffers of all NBD connections together.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct NbdMemoryView {
    /// The limit.
    pub limit_bytes: u64,
    /// The bytes that connections hold now.
    pub used_bytes: u64,
    /// How often a connection waited for memory.
    pub waits: u64,
    /// Connections and requests that were refused because of the limit.
    pub refused: u64,
}

impl From<MemoryUse> for NbdMemoryView {
    fn from(usage: MemoryUse) -> NbdMemoryView {
        let MemoryUse { limit_bytes, used_bytes, waits, refused, .. } = usage;
        NbdMemoryView { limit_bytes, used_bytes, waits, refused }
    }
}

/// An NVMe listener: `GET /v1/nvme/listeners`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ListenerView {
    /// The place, as it was given.
    pub place: String,
    /// The addresses, with the actual port.
    pub addresses: Vec<String>,
    /// Whether hosts find only the discovery subsystem there.
    pub discovery: bool,
    /// The hosts that use devices through it now.
    pub hosts: u64,
    /// Warnings about hosts that connect without authentication.
    pub warnings: Vec<String>,
}

/// `POST /v1/nvme/listeners`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ListenRequest {
    /// Where to listen: `tcp:HOST:PORT`.
    pub place: String,
    /// Whether hosts find only the discovery subsystem there.
    #[serde(default)]
    pub discovery: bool,
}

/// The socket at which a hypervisor finds a device: `GET /v1/vhost`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct VhostView {
    /// The device.
    pub device: String,
    /// The socket: `unix:PATH`.
    pub place: String,
    /// Whether a hypervisor is connected.
    pub is_connected: bool,
    /// The process of the hypervisor, if the system knows it.
    pub pid: Option<i32>,
    /// The rings that are served.
    pub queues: u64,
    /// The rings that were served since the device has the socket.
    #[serde(default)]
    pub rings: Vec<RingView>,
}

/// The counts of a ring since its device has its socket; a hypervisor that leaves does not reset
/// them.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct RingView {
    /// The index of the ring.
    pub ring: u64,
    /// Requests that were answered.
    pub requests: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Kicks that were taken: several that came before the thread read are one.
    pub kicks: u64,
    /// Calls: interrupts that were sent to the guest.
    pub calls: u64,
    /// Sleeps of the thread: those that end by a timeout count too, and one that has not ended.
    pub sleeps: u64,
    /// Spins of the thread that found work.
    pub spins_found: u64,
    /// Spins of the thread that found none.
    pub spins_empty: u64,
    /// The time of all spins, in nanoseconds.
    pub spin_ns: u64,
    /// How often the ring was malformed, and not served until the guest set it up again.
    #[serde(default)]
    pub faults: u64,
}

impl From<(usize, RingCounts)> for RingView {
    fn from((index, counts): (usize, RingCounts)) -> RingView {
        RingView {
            ring: index as u64,
            requests: counts.requests,
            errors: counts.errors,
            read_bytes: counts.read_bytes,
            written_bytes: counts.written_bytes,
            kicks: counts.kicks,
            calls: counts.calls,
            sleeps: counts.sleeps,
            spins_found: counts.spins_found,
            spins_empty: counts.spins_empty,
            spin_ns: counts.spin_ns,
            faults: counts.faults,
        }
    }
}

impl From<(VhostPlace, VhostInfo)> for VhostView {
    fn from((place, info): (VhostPlace, VhostInfo)) -> VhostView {
        VhostView {
            device: place.device,
            place: format!("unix:{}", place.place),
            is_connected: info.is_connected,
            pid: info.pid,
            queues: info.queues as u64,
            rings: info.rings.into_iter().map(RingView::from).collect(),
        }
    }
}

/// `POST /v1/vhost`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct VhostRequest {
    /// The device.
    pub device: String,
    /// Where to listen: `unix:PATH`.
    pub place: String,
}

/// A device that is a block device of the kernel: `GET /v1/ublk`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct UblkView {
    /// The device.
    pub device: String,
    /// The N of `/dev/ublkbN`.
    pub id: u32,
    /// The path of the block device.
    pub path: String,
    /// The queues that are served.
    pub queues: u64,
    /// Whether an earlier server has made the block device.
    pub is_recovered: bool,
    /// Whether requests of the block device fail, or it has another capacity than the device.
    #[serde(default)]
    pub is_outdated: bool,
}

impl From<(String, UblkInfo)> for UblkView {
    fn from((device, info): (String, UblkInfo)) -> UblkView {
        UblkView {
            device,
            id: info.id,
            path: block_path(info.id),
            queues: info.queues as u64,
            is_recovered: info.is_recovered,
            is_outdated: info.is_outdated,
        }
    }
}

/// `POST /v1/ublk`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct UblkRequest {
    /// The device.
    pub device: String,
    /// The N of `/dev/ublkbN`; without one the kernel chooses it.
    #[serde(default)]
    pub id: Option<u32>,
}

/// `POST /v1/devices`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AddRequest {
    /// The device's URI.
    pub uri: String,
}

/// `POST /v1/devices/{name}/zones/{verb}`. Without `from` it affects the whole device.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ZoneRequest {
    /// First sector of the first zone.
    pub from: Option<u64>,
    /// The number of zones; by default all that follow.
    pub count: Option<u64>,
    /// Change the zones although clients use the device or its file is open.
    #[serde(default)]
    pub force: bool,
}

/// The result of a zone operation.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ZoneDone {
    /// The number of zones that were changed.
    pub zones: u64,
    /// The sector at which to continue, if one request could not change all zones; otherwise
    /// `null`.
    pub next: Option<u64>,
}

/// `POST /v1/devices/{name}/inject`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct InjectRequest {
    /// The fault; see [`crate::inject`].
    pub fault: String,
}

/// What `POST /v1/devices/{name}/inject` has done.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Injected {
    /// The number of the rule; `null` if the fault is no rule.
    pub id: Option<u64>,
}

/// What `DELETE /v1/devices/{name}/inject` has done.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct FaultsRemoved {
    /// The device.
    pub device: String,
    /// The number of rules that were removed.
    pub removed: u64,
}

/// The body of every error response.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorView,
}

/// An error.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct ErrorView {
    /// The error's code, for programs.
    pub code: String,
    /// The invalid argument or parameter.
    pub field: Option<String>,
    /// The invalid value.
    pub value: Option<String>,
    /// A sentence for people: the error, and what is expected.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(wp: u64, cond: ZoneCond, kind: ZoneType) -> ZoneInfo {
        ZoneInfo {
            start: Sector(0x80000),
            sectors: 0x80000,
            capacity_sectors: 0x60000,
            wp: Sector(wp),
            kind,
            cond,
        }
    }

    #[test]
    fn zones_are_printed_as_blkzone_prints_them() {
        let seq = ZoneType::SequentialWriteRequired;
        let cases = [
            (
                zone(0x80000, ZoneCond::Empty, seq),
                "  start: 0x000080000, len 0x080000, cap 0x060000, wptr 0x000000 reset:0 \
                 non-seq:0, zcond: 1(em) [type: 2(SEQ_WRITE_REQUIRED)]",
            ),
            (
                zone(0x80008, ZoneCond::ImplicitOpen, seq),
                "  start: 0x000080000, len 0x080000, cap 0x060000, wptr 0x000008 reset:0 \
                 non-seq:0, zcond: 2(oi) [type: 2(SEQ_WRITE_REQUIRED)]",
            ),
            (
                zone(u64::MAX, ZoneCond::Offline, seq),
                "  start: 0x000080000, len 0x080000, cap 0x060000, wptr 0x000000 reset:0 \
                 non-seq:0, zcond:15(ol) [type: 2(SEQ_WRITE_REQUIRED)]",
            ),
            (
                zone(0x100000, ZoneCond::NotWp, ZoneType::Conventional),
                "  start: 0x000080000, len 0x080000, cap 0x060000, wptr 0x000000 reset:0 \
                 non-seq:0, zcond: 0(nw) [type: 1(CONVENTIONAL)]",
            ),
        ];
        for (zone, line) in cases {
            assert_eq!(ZoneView::from(&zone).line(), line);
        }
    }

    #[test]
    fn a_latency_survives_the_wire() {
        let mut buckets = vec![0; HISTOGRAM_BUCKETS];
        for (index, bucket) in buckets.iter_mut().enumerate().step_by(7).take(120) {
            *bucket = index as u64 + 1;
        }
        assert_eq!(dense(&sparse(&buckets)), buckets);
    }
}

/// A request to make a zonefs.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct FormatRequest {
    /// Whether existing data are overwritten.
    pub force: bool,
    /// A name for people.
    pub label: String,
    /// A UUID; a random one if there is none.
    pub uuid: Option<String>,
    /// The options as for `-o`: `aggr_cnv`, `uid=`, `gid=`, `perm=`, separated by commas.
    pub options: String,
}

/// A zonefs that was made.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct FormatView {
    /// The device.
    pub device: String,
    /// The label.
    pub label: String,
    /// The UUID.
    pub uuid: String,
    /// Files in `cnv`.
    pub conventional_files: u32,
    /// Files in `seq`.
    pub sequential_files: u32,
    /// Whether the superblock's zone was sequential, and was finished.
    pub zone_0_finished: bool,
}

/// A request to mount a zonefs.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct MountRequest {
    /// The absolute path of the directory.
    pub dir: String,
    /// The options as for `-o`: `errors=`, `explicit-open`, `ro`, `allow_other`.
    pub options: String,
    /// Mount it although clients use the device.
    pub force: bool,
}

/// A zonefs that is mounted.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct MountView {
    /// The device.
    pub device: String,
    /// The mount point.
    pub dir: String,
    /// All options.
    pub options: String,
    /// Whether writes are refused, from the beginning or since an error.
    pub read_only: bool,
    /// The label.
    pub label: String,
    /// The UUID.
    pub uuid: String,
    /// Files in `cnv`.
    pub conventional_files: u32,
    /// Files in `seq`.
    pub sequential_files: u32,
    /// Sequential files open for writing.
    pub write_open: u32,
    /// The limit of files open for writing with `explicit-open`; 0: no limit.
    pub write_open_max: u32,
    /// Sequential files that are partly written or explicitly open.
    pub active: u32,
    /// The device's limit of active zones; 0: no limit.
    pub active_max: u32,
}

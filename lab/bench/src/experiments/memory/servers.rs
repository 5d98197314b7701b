//! The memory of servers with few and with many devices, connections or zones.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use blockyard_core::Region;

use super::*;
use crate::experiment::Cell;
use crate::experiments::nvme::{NVME_NULL_NQN, free_ports};
use crate::load::workers::Work;
use crate::tools::direct;
use crate::tools::file_server::KINDS as FILE_SERVERS;
use crate::tools::nvme_client::{NvmeCommands, NvmeController, NvmeOp};
use crate::tools::vhost_client::{VhostClient, VhostRequests};

/// Devices of the smaller and of the larger server.
const DEVICES: (usize, usize) = (16, 528);
/// Zones of the smaller and of the larger disk; the larger has 14 TB.
const ZONES: (usize, usize) = (1000, 52_156);
const ZONE_BYTES: u64 = 256 << 20;
/// Connections, queues and open files at first and then, while they rest and while they are busy.
const NBD_IDLE: (usize, usize) = (8, 136);
const NVME_IDLE: (usize, usize) = (32, 160);
const NBD_BUSY: (usize, usize) = (4, 20);
const NVME_BUSY: (usize, usize) = (4, 20);
const RINGS: (usize, usize) = (1, 33);
const FILES: (usize, usize) = (8, 520);
/// I/O queues of a controller.
const CONTROLLER_QUEUES: usize = 32;
/// The turns of each busy client.
const TURNS: usize = 3;
/// The length of a file that is a device, in bytes.
const FILE_BYTES: u64 = 1 << 20;
/// The length of the device of a FUSE mount, in bytes.
const MOUNTED_BYTES: u64 = 1 << 30;
const BLOCK: u64 = 4096;
const BUSY_BYTES: u64 = 128 << 10;
const BUSY_DEPTH: usize = 32;

/// The times of the measurements beyond the measured window, which these cells do not have.
const OVERHEAD: Duration = Duration::from_millis(400);
const OVERHEAD_POOL: Duration = Duration::from_secs(4);
const OVERHEAD_IDLE: Duration = Duration::from_millis(5500);

/// A cell: its variant, workload, number of jobs, measurement and time.
type ServerCell = (&'static str, Workload, usize, MeasureMemory, Duration);

/// The cells of a quick run, which need neither a disk nor a rest.
const QUICK: &[ServerCell] = &[
    (NULL, DEVICE, DEVICES.1, devices::<NullDevices>, OVERHEAD),
    (ZONED, ZONE, 1, zones::<ZonedDevices>, OVERHEAD),
    (SMR, ZONE, 1, zones::<SmrDisks>, OVERHEAD),
    (NBD, BUSY, NBD_BUSY.1, nbd_busy, OVERHEAD),
    (NVME, BUSY, NVME_BUSY.1, nvme_busy, OVERHEAD),
];
const WHOLE: &[ServerCell] = &[
    (ZONED, DEVICE, DEVICES.1, devices::<ZonedDevices>, OVERHEAD),
    (RAM, DEVICE, DEVICES.1, devices::<RamDisks>, OVERHEAD),
    (SMR, DEVICE, DEVICES.1, devices::<SmrDisks>, OVERHEAD),
    (FILE, DEVICE, DEVICES.1, devices::<FileDevices>, OVERHEAD),
    (VOLUME, DEVICE, DEVICES.1, devices::<PoolVolumes>, OVERHEAD_POOL),
    (NBD, IDLE, NBD_IDLE.1, nbd_idle::<NullDevices>, OVERHEAD_IDLE),
    (NBD_RAM, IDLE, NBD_IDLE.1, nbd_idle::<RamDisks>, OVERHEAD_IDLE),
    (NBD_FILE, IDLE, NBD_IDLE.1, nbd_idle::<FileDevices>, OVERHEAD_IDLE),
    (NBD_VOLUME, IDLE, NBD_IDLE.1, nbd_idle::<PoolVolumes>, OVERHEAD_IDLE),
    (NVME, IDLE, NVME_IDLE.1, nvme_idle, OVERHEAD_IDLE),
    (VHOST, IDLE, RINGS.1, vhost::<1, BLOCK>, OVERHEAD_IDLE),
    (VHOST, BUSY, RINGS.1, vhost::<BUSY_DEPTH, BUSY_BYTES>, OVERHEAD),
    (FUSE, IDLE, FILES.1, fuse, OVERHEAD_IDLE),
];

/// All cells of servers.
pub(super) fn cells(settings: &Settings) -> Vec<Cell> {
    let whole = if settings.quick { &[][..] } else { WHOLE };
    let cell = |&(variant, workload, jobs, measure, overhead): &ServerCell| {
        let settings = settings.clone();
        let body = move |round: &Round<'_>| measure(&settings, round);
        Cell::new(variant, workload.name, jobs as u32, body).overhead(overhead)
    };
    QUICK.iter().chain(whole).map(cell).collect()
}

/// A type of devices.
trait MeasuredDevice {
    /// The URI of a device; makes what it needs.
    fn uri(settings: &Settings, number: usize) -> Result<String, LabError>;
}

/// A type of zoned devices.
trait ZonedDisks {
    /// The URI of a device with this number of zones.
    fn with_zones(zones: usize) -> String;
}

struct NullDevices;
struct ZonedDevices;
struct RamDisks;
struct SmrDisks;
struct FileDevices;
struct PoolVolumes;

impl MeasuredDevice for NullDevices {
    fn uri(_: &Settings, number: usize) -> Result<String, LabError> {
        Ok(format!("null:///d{number}?size=1T&bs=4k"))
    }
}

impl MeasuredDevice for ZonedDevices {
    fn uri(_: &Settings, number: usize) -> Result<String, LabError> {
        Ok(format!("null:///d{number}?size=16G&bs=4k&zoned=1&zone_size=256M"))
    }
}

impl ZonedDisks for ZonedDevices {
    fn with_zones(zones: usize) -> String {
        let bytes = zones as u64 * ZONE_BYTES;
        format!("null:///d0?size={bytes}&bs=4k&zoned=1&zone_size={ZONE_BYTES}")
    }
}

impl MeasuredDevice for RamDisks {
    fn uri(_: &Settings, number: usize) -> Result<String, LabError> {
        Ok(format!("ram:///d{number}?size=1G"))
    }
}

impl MeasuredDevice for SmrDisks {
    fn uri(_: &Settings, number: usize) -> Result<String, LabError> {
        Ok(format!("smr:///d{number}?size=16G&zone_size=256M"))
    }
}

impl ZonedDisks for SmrDisks {
    fn with_zones(zones: usize) -> String {
        let bytes = zones as u64 * ZONE_BYTES;
        format!("smr:///d0?size={bytes}&zone_size={ZONE_BYTES}")
    }
}

impl MeasuredDevice for FileDevices {
    fn uri(settings: &Settings, number: usize) -> Result<String, LabError> {
        let path = settings.scratch.join(format!("memory-file-{number}"));
        let made = File::create(&path).and_then(|file| file.set_len(FILE_BYTES));
        made.map_err(LabError::io(path.display().to_string()))?;
        Ok(format!("file:///d{number}?path={}", path.display()))
    }
}

impl MeasuredDevice for PoolVolumes {
    fn uri(settings: &Settings, number: usize) -> Result<String, LabError> {
        let pool = settings.scratch.join("memory-pool");
        Ok(format!("volume:///d{number}?size=1G&path={}", pool.display()))
    }
}

/// A server of these devices, with more options.
fn serve(
    uris: Vec<String>,
    options: &[(&str, String)],
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Server, LabError> {
    let last = uris.last().and_then(|uri| uri.split(['/', '?']).nth(3)).unwrap_or_default();
    let last = last.to_owned();
    let mut line = CommandLine::new("", "PROGRAM serve --nbd unix:SOCKET --control none");
    line.words.extend(uris);
    for (option, value) in options {
        line.words.extend([(*option).to_owned(), value.clone()]);
    }
    started(line, &last, settings, round)
}

fn devices<K: MeasuredDevice>(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let memory = |count| {
        let uris = (0..count).map(|number| K::uri(settings, number)).collect::<Result<_, _>>()?;
        serve(uris, &[], settings, round)?.process().memory()
    };
    // First the larger one, which makes the volumes of the pool; the smaller finds them.
    let many = memory(DEVICES.1)?;
    Ok(slope((memory(DEVICES.0)?, DEVICES.0), (many, DEVICES.1)))
}

fn zones<K: ZonedDisks>(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let memory =
        |zones| serve(vec![K::with_zones(zones)], &[], settings, round)?.process().memory();
    Ok(slope((memory(ZONES.0)?, ZONES.0), (memory(ZONES.1)?, ZONES.1)))
}

/// The memory of a server with few and with many clients. After `open` has added clients, each has
/// `turns` turns; then all of them rest.
fn clients<C: Work>(
    server: &Server,
    (few, many): (usize, usize),
    mut open: impl FnMut(usize) -> Result<C, LabError>,
    (turns, rest): (usize, Duration),
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let mut all: Vec<C> = Vec::new();
    let mut memory = |count| {
        while all.len() < count {
            all.push(open(all.len())?);
        }
        for _ in 0..turns {
            for client in &mut all {
                if round.stop.is_set() {
                    return Err(LabError::Interrupted);
                }
                client.turn()?;
            }
        }
        round.pause(rest)?;
        server.process().memory()
    };
    Ok(slope((memory(few)?, few), (memory(many)?, many)))
}

fn nbd<K: MeasuredDevice>(
    requests: NbdRequests,
    counts: (usize, usize),
    work: (usize, Duration),
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let server = serve(vec![K::uri(settings, 0)?], &[], settings, round)?;
    let place = Place::Unix(server.socket());
    let open =
        |job: usize| NbdClient::connect(&place, "d0", requests, round.seed ^ (job as u64) << 32);
    clients(&server, counts, open, work, round)
}

fn nbd_idle<K: MeasuredDevice>(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let requests = NbdRequests { op: NbdOp::Read, len: BLOCK, depth: 1 };
    nbd::<K>(requests, NBD_IDLE, (1, REST), settings, round)
}

fn nbd_busy(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let requests = NbdRequests { op: NbdOp::Write, len: BUSY_BYTES, depth: BUSY_DEPTH };
    nbd::<NullDevices>(requests, NBD_BUSY, (TURNS, Duration::ZERO), settings, round)
}

fn nvme(
    commands: NvmeCommands,
    counts: (usize, usize),
    work: (usize, Duration),
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let [port, _] = free_ports().map_err(LabError::io("a free port"))?;
    let uri = "null:///null?size=1T&bs=4k".to_owned();
    let server = serve(vec![uri], &[("--nvme", format!("tcp:{port}"))], settings, round)?;
    let mut controllers = Vec::new();
    let open = |job: usize| {
        if job.is_multiple_of(CONTROLLER_QUEUES) {
            controllers.push(NvmeController::connect(port, NVME_NULL_NQN)?);
        }
        let number = (job % CONTROLLER_QUEUES + 1) as u16;
        let seed = round.seed ^ (job as u64) << 32;
        controllers[job / CONTROLLER_QUEUES].queue(number, commands, seed)
    };
    clients(&server, counts, open, work, round)
}

fn nvme_idle(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let commands = NvmeCommands { op: NvmeOp::Read, len: BLOCK, depth: 1 };
    nvme(commands, NVME_IDLE, (1, REST), settings, round)
}

fn nvme_busy(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let commands = NvmeCommands { op: NvmeOp::Write, len: BUSY_BYTES, depth: BUSY_DEPTH };
    nvme(commands, NVME_BUSY, (TURNS, Duration::ZERO), settings, round)
}

/// Rings of one hypervisor, with reads of one block or with longer writes.
fn vhost<const DEPTH: usize, const BYTES: u64>(
    settings: &Settings,
    round: &Round<'_>,
) -> Result<Sample, LabError> {
    let is_write = BYTES > BLOCK;
    let options = [("--vhost", "d0=unix:SOCKET.vhost".to_owned())];
    let server = serve(vec![NullDevices::uri(settings, 0)?], &options, settings, round)?;
    let socket = PathBuf::from(format!("{}.vhost", server.socket().display()));
    let memory = |count| {
        let requests = VhostRequests { is_write, len: BYTES, depth: DEPTH };
        let mut client = VhostClient::connect(&socket, count, requests)?;
        let mut rings = client.rings(round.seed)?;
        for _ in 0..TURNS {
            for ring in &mut rings {
                ring.turn()?;
            }
        }
        round.pause(if is_write { Duration::ZERO } else { REST })?;
        let memory = server.process().memory();
        rings.iter_mut().for_each(Work::end);
        memory
    };
    Ok(slope((memory(RINGS.0)?, RINGS.0), (memory(RINGS.1)?, RINGS.1)))
}

fn fuse(settings: &Settings, round: &Round<'_>) -> Result<Sample, LabError> {
    let server = FILE_SERVERS[0].start(settings, MOUNTED_BYTES, round.stop)?;
    let path = server.file();
    let failed = |error| LabError::io(path.display().to_string())(error);
    // Direct I/O needs aligned memory.
    let data = Region::alloc(BLOCK as usize);
    let mut files = Vec::new();
    let mut memory = |count| {
        while files.len() < count {
            let mut options = OpenOptions::new();
            let file =
                options.read(true).custom_flags(libc::O_DIRECT).open(path).map_err(failed)?;
            let at = files.len() as u64 * BLOCK;
            direct::read(&file, &data, 0, BLOCK as usize, at).map_err(failed)?;
            files.push(file);
        }
        round.pause(REST)?;
        server.process().memory()
    };
    Ok(slope((memory(FILES.0)?, FILES.0), (memory(FILES.1)?, FILES.1)))
}

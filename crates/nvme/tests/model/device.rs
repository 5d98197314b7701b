//! The device of the model: its operations complete when the schedule says so, and it checks what
//! the connection begins.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use blockyard_core::channel::Stats;
use blockyard_core::inject::Injection;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Bio, Channel, Completion, DeviceError, Disk, Due, Extent, Geometry, Limits, Nanos, Op, Region,
    RegionId, Sector, Status,
};

use super::{BLOCK, BLOCKS};

/// The most operations that a channel of the device takes at once.
const CHANNEL_DEPTH: usize = 8;

/// A connection that ends.
struct EndingConnection {
    /// The memory, by which its channels are known.
    region: Arc<Region>,
    /// The commands that may begin no operation any more, by channel and number.
    begun: HashSet<(usize, u64)>,
}

#[derive(Default)]
pub(super) struct SimDevice {
    pub(super) data: Vec<u8>,
    /// Operations that the device executes, with their channels.
    pub(super) started: Vec<(usize, Bio, Arc<Region>)>,
    /// Completions that the channels have not reaped.
    completed: Vec<VecDeque<Completion>>,
    pub(super) open: usize,
    /// The connection that ends.
    ending: Option<EndingConnection>,
    /// Whether a connection has a turn, which must not wait.
    pub(super) is_in_turn: bool,
}

impl SimDevice {
    pub(super) fn new(data: Vec<u8>) -> SimDevice {
        SimDevice { data, ..SimDevice::default() }
    }

    /// From now on a command begins one operation at most, and none if it has begun one that the
    /// connection has not reaped.
    pub(super) fn note_end(&mut self, of: &Arc<Region>) {
        if self.ending.is_none() {
            let started = self.started.iter().map(|(channel, bio, _)| (*channel, bio.user_data));
            let completed = self.completed.iter().enumerate().flat_map(|(channel, completed)| {
                completed.iter().map(move |completion| (channel, completion.user_data))
            });
            let begun = started.chain(completed).collect();
            self.ending = Some(EndingConnection { region: Arc::clone(of), begun });
        }
    }

    pub(super) fn complete(&mut self, at: usize) {
        let (channel, bio, region) = self.started.swap_remove(at);
        let from = bio.sector.0 as usize * BLOCK;
        let range = from..from + bio.sectors as usize * BLOCK;
        match bio.op {
            Op::Read => region.write(bio.buf.offset, &self.data[range]),
            Op::Write => region.read(bio.buf.offset, &mut self.data[range]),
            Op::Discard => self.data[range].fill(0),
            _ => {}
        }
        let Bio { user_data, sector, .. } = bio;
        let status = Status::Ok;
        self.completed[channel].push_back(Completion { user_data, sector, status });
    }
}

pub(super) struct SimDisk {
    device: Arc<Mutex<SimDevice>>,
    geometry: Geometry,
    limits: Limits,
}

impl SimDisk {
    pub(super) fn of(device: &Arc<Mutex<SimDevice>>) -> Arc<dyn Disk> {
        let (logical_block_bytes, physical_block_bytes) = (BLOCK as u32, BLOCK as u32);
        let geometry =
            Geometry { sectors: BLOCKS, logical_block_bytes, physical_block_bytes, zones: None };
        let limits = Limits { write_cache: true, ..Limits::unlimited(CHANNEL_DEPTH as u16) };
        Arc::new(SimDisk { device: Arc::clone(device), geometry, limits })
    }
}

impl Disk for SimDisk {
    fn name(&self) -> &str {
        "sim"
    }

    fn kind(&self) -> &'static str {
        "sim"
    }

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open(&self) -> Result<Box<dyn Channel>, DeviceError> {
        let mut device = self.device.lock().unwrap();
        device.completed.push(VecDeque::new());
        device.open += 1;
        let number = device.completed.len() - 1;
        let device = Arc::clone(&self.device);
        Ok(Box::new(SimChannel { device, number, region: None, pushed: Vec::new(), in_flight: 0 }))
    }

    fn report_zones(&self, _: Sector, _: usize, _: &mut Vec<ZoneInfo>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn extent(&self, _: Sector, sectors: u64) -> Extent {
        Extent { sectors, allocated: true, zero: false }
    }

    fn inject(&self, _: &Injection) -> Result<(), DeviceError> {
        Ok(())
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

struct SimChannel {
    device: Arc<Mutex<SimDevice>>,
    number: usize,
    region: Option<Arc<Region>>,
    pushed: Vec<Bio>,
    in_flight: usize,
}

impl Channel for SimChannel {
    fn register(&mut self, region: Arc<Region>) -> RegionId {
        self.region = Some(region);
        RegionId(0)
    }

    fn unregister(&mut self, _: RegionId) -> bool {
        self.in_flight == 0 && self.region.take().is_some()
    }

    fn push(&mut self, bios: &[Bio]) -> usize {
        let taken = bios.len().min(CHANNEL_DEPTH - self.in_flight);
        self.pushed.extend(&bios[..taken]);
        self.in_flight += taken;
        taken
    }

    fn submit(&mut self) {
        let mut device = self.device.lock().unwrap();
        for bio in self.pushed.drain(..) {
            let region = self.region.as_ref().unwrap();
            if let Some(ending) = &mut device.ending
                && Arc::ptr_eq(&ending.region, region)
            {
                let is_first = ending.begun.insert((self.number, bio.user_data));
                assert!(is_first, "a command of an ending connection begins another operation");
            }
            device.started.push((self.number, bio, Arc::clone(region)));
        }
    }

    fn reap(&mut self, out: &mut Vec<Completion>) -> usize {
        let mut device = self.device.lock().unwrap();
        let reaped = device.completed[self.number].drain(..);
        let before = out.len();
        out.extend(reaped);
        self.in_flight -= out.len() - before;
        out.len() - before
    }

    fn wait(&mut self, _: Option<Instant>) {
        panic!("a turn waits for the device");
    }

    fn due(&self) -> Due {
        let is_empty = self.device.lock().unwrap().completed[self.number].is_empty();
        match is_empty {
            true => Due::Never,
            false => Due::At(Nanos(0)),
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for SimChannel {
    /// Waits for the operations that the device has started, as every channel.
    fn drop(&mut self) {
        let mut device = self.device.lock().unwrap();
        while let Some(at) = device.started.iter().position(|it| it.0 == self.number) {
            assert!(!device.is_in_turn, "a turn waits for the device");
            device.complete(at);
        }
        device.open -= 1;
    }
}

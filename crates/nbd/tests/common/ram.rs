//! A disk in memory for tests of the exporter alone, simple enough to be verified by reading.
#![allow(clippy::disallowed_types, clippy::unwrap_used)] // A test may.
#![allow(dead_code)] // Each test program uses a part.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use blockyard_core::channel::Stats;
use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::inject::Injection;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Bio, Channel, Completion, DeviceError, Disk, Due, Extent, Geometry, Limits, Op, Region,
    RegionId, Sector, Status,
};

/// Bytes in a block.
pub(crate) const BLOCK: u64 = 4096;

/// The state that the test reads and controls.
#[derive(Default)]
pub(crate) struct Inner {
    blocks: Vec<Option<Box<[u8]>>>,
    /// While set, no bio completes.
    pub(crate) held: bool,
    /// Bios pushed since the disk was made.
    pub(crate) pushed: u64,
    /// Flushes completed.
    pub(crate) flushes: u64,
    /// How often a channel with nothing in flight was asked for its next completion time.
    pub(crate) idle_asks: u64,
    /// Every bio that touches this sector fails with this status.
    pub(crate) bad: Option<(Sector, Status)>,
    /// Whether opening a channel fails.
    pub(crate) closed: bool,
}

/// The disk.
pub(crate) struct Ram {
    geometry: Geometry,
    limits: Limits,
    inner: Arc<(Mutex<Inner>, Condvar)>,
}

impl Ram {
    pub(crate) fn new(len_bytes: u64) -> Arc<Ram> {
        Ram::with(len_bytes, 512, Limits::unlimited(64))
    }

    pub(crate) fn with(len_bytes: u64, block_bytes: u32, limits: Limits) -> Arc<Ram> {
        let geometry = Geometry {
            sectors: len_bytes / 512,
            logical_block_bytes: block_bytes,
            physical_block_bytes: block_bytes,
            zones: None,
        };
        let mut inner = Inner::default();
        inner.blocks.resize_with(len_bytes.div_ceil(BLOCK) as usize, || None);
        Arc::new(Ram { geometry, limits, inner: Arc::new((Mutex::new(inner), Condvar::new())) })
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.0.lock().unwrap()
    }

    /// Changes the state, and notifies the channels.
    pub(crate) fn set(&self, change: impl FnOnce(&mut Inner)) {
        change(&mut self.inner());
        self.inner.1.notify_all();
    }

    /// Sleeps until `count` bios were pushed.
    pub(crate) fn wait_pushed(&self, count: u64) {
        let mut inner = self.inner();
        while inner.pushed < count {
            inner = self.inner.1.wait(inner).unwrap();
        }
    }
}

impl Disk for Ram {
    fn name(&self) -> &str {
        "ram"
    }

    fn kind(&self) -> &'static str {
        "ram"
    }

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open(&self) -> Result<Box<dyn Channel>, DeviceError> {
        if self.inner().closed {
            return Err(DeviceError::Gone);
        }
        Ok(Box::new(RamChannel {
            inner: Arc::clone(&self.inner),
            depth: usize::from(self.limits.queue_depth),
            regions: Vec::new(),
            pending: Vec::new(),
        }))
    }

    fn report_zones(&self, _: Sector, _: usize, _: &mut Vec<ZoneInfo>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let inner = self.inner();
        let block = (from.bytes() / BLOCK) as usize;
        let allocated = inner.blocks[block].is_some();
        let run = inner.blocks[block..].iter().take_while(|b| b.is_some() == allocated).count();
        let end = (block + run) as u64 * BLOCK / 512;
        Extent { sectors: (end - from.0).min(sectors), allocated, zero: !allocated }
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        Err(DeviceError::NoSuchFault { fault: injection.name().to_owned() })
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

struct RamChannel {
    inner: Arc<(Mutex<Inner>, Condvar)>,
    depth: usize,
    regions: Vec<Arc<Region>>,
    pending: Vec<Bio>,
}

impl RamChannel {
    fn carry_out(&self, inner: &mut Inner, bio: &Bio) -> Status {
        if let Some((sector, status)) = inner.bad
            && (bio.sector.0..bio.end().0).contains(&sector.0)
        {
            return status;
        }
        if bio.op == Op::Flush {
            inner.flushes += 1;
            return Status::Ok;
        }
        for step in 0..bio.sectors {
            let at = (bio.sector + step).bytes();
            let block = &mut inner.blocks[(at / BLOCK) as usize];
            let within = (at % BLOCK) as usize..(at % BLOCK) as usize + 512;
            let offset = bio.buf.offset + step * 512;
            match bio.op {
                Op::Read => match block {
                    Some(data) => {
                        self.regions[bio.buf.region.0 as usize].write(offset, &data[within]);
                    }
                    None => self.regions[bio.buf.region.0 as usize].write(offset, &[0; 512]),
                },
                Op::Write => {
                    let data =
                        block.get_or_insert_with(|| vec![0; BLOCK as usize].into_boxed_slice());
                    self.regions[bio.buf.region.0 as usize].read(offset, &mut data[within]);
                }
                Op::Discard | Op::WriteZeroes => {
                    if bio.sectors * 512 >= BLOCK && at.is_multiple_of(BLOCK) {
                        *block = None;
                    } else if let Some(data) = block {
                        data[within].fill(0);
                    }
                }
                _ => return Status::NotSupp,
            }
        }
        Status::Ok
    }
}

impl Channel for RamChannel {
    fn register(&mut self, region: Arc<Region>) -> RegionId {
        self.regions.push(region);
        RegionId(self.regions.len() as u32 - 1)
    }

    fn unregister(&mut self, _: RegionId) -> bool {
        false
    }

    fn push(&mut self, bios: &[Bio]) -> usize {
        let taken = bios.len().min(self.depth - self.pending.len());
        self.pending.extend_from_slice(&bios[..taken]);
        self.inner.0.lock().unwrap().pushed += taken as u64;
        self.inner.1.notify_all();
        taken
    }

    fn submit(&mut self) {}

    fn reap(&mut self, out: &mut Vec<Completion>) -> usize {
        let mut inner = self.inner.0.lock().unwrap();
        if inner.held {
            return 0;
        }
        let bios = std::mem::take(&mut self.pending);
        for bio in &bios {
            let status = self.carry_out(&mut inner, bio);
            out.push(Completion { user_data: bio.user_data, sector: bio.sector, status });
        }
        bios.len()
    }

    fn wait(&mut self, deadline: Option<Instant>) {
        let mut inner = self.inner.0.lock().unwrap();
        while inner.held && !self.pending.is_empty() {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            inner = match left {
                Some(Duration::ZERO) => return,
                Some(left) => self.inner.1.wait_timeout(inner, left).unwrap().0,
                None => self.inner.1.wait(inner).unwrap(),
            };
        }
    }

    fn due(&self) -> Due {
        if self.pending.is_empty() {
            self.inner.0.lock().unwrap().idle_asks += 1;
            return Due::Never;
        }
        let held = self.inner.0.lock().unwrap().held;
        let later = if held { Duration::from_millis(1) } else { Duration::ZERO };
        Due::At(Monotonic.now() + later.as_nanos() as u64)
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }
}

impl Drop for RamChannel {
    fn drop(&mut self) {
        // Held bios wait only for the test, so they end at once without effect.
        self.reap(&mut Vec::new());
    }
}

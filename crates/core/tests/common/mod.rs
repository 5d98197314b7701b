//! A device that logs its requests, a manual clock, and a channel for both.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::disallowed_types, clippy::unwrap_used, unsafe_code)] // A test may.

use std::sync::{Arc, Mutex};

use blockyard_core::channel::ChannelConfig;
use blockyard_core::clock::Clock;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::*;

/// The requests of the device, in order: operation, sector, sectors, FUA.
pub(crate) type Log = Arc<Mutex<Vec<(Op, u64, u64, bool)>>>;

/// A memory device of 1 MiB that logs its requests, and whose behaviour a test can choose.
pub(crate) struct Recorder {
    pub(crate) geometry: Geometry,
    pub(crate) limits: Limits,
    pub(crate) log: Log,
    /// Maximum number of requests started per call; the device leaves the others in the batch.
    pub(crate) starts_max: usize,
    /// Completes at the next poll instead of within `start`.
    pub(crate) late: bool,
    /// Breaks up merged requests that contain this sector, and fails the bio that contains it.
    pub(crate) bad: Option<u64>,
}

pub(crate) const SECTORS: u64 = 2048;

impl Recorder {
    pub(crate) fn new() -> Recorder {
        Recorder {
            geometry: Geometry {
                sectors: SECTORS,
                logical_block_bytes: 512,
                physical_block_bytes: 512,
                zones: None,
            },
            limits: Limits { sectors_max: 64, ..Limits::unlimited(16) },
            log: Log::default(),
            starts_max: usize::MAX,
            late: false,
            bad: None,
        }
    }

    pub(crate) fn cached(fua: bool) -> Recorder {
        let mut recorder = Recorder::new();
        recorder.limits.write_cache = true;
        recorder.limits.fua = fua;
        recorder
    }
}

impl Device for Recorder {
    type Queue = RecorderQueue;

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn open_queue(&self) -> Result<RecorderQueue, DeviceError> {
        Ok(RecorderQueue {
            memory: vec![0; (SECTORS * SECTOR_BYTES) as usize],
            log: Arc::clone(&self.log),
            starts_max: self.starts_max,
            late: self.late,
            bad: self.bad,
            held: CompletionBatch::with_capacity(16),
        })
    }

    fn report_zones(
        &self,
        _from: Sector,
        _zones_max: usize,
        _out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        Ok(())
    }
}

pub(crate) struct RecorderQueue {
    memory: Vec<u8>,
    log: Log,
    starts_max: usize,
    late: bool,
    bad: Option<u64>,
    held: CompletionBatch,
}

impl RecorderQueue {
    fn copy(&mut self, started: &Started) {
        let mut at = started.sector().bytes() as usize;
        for segment in started.segments() {
            let memory = &mut self.memory[at..at + segment.len_bytes];
            // SAFETY: a segment is valid for its length until the request is completed, and the
            // tests keep no references into regions.
            let data =
                unsafe { std::slice::from_raw_parts_mut(segment.data.as_ptr(), segment.len_bytes) };
            match started.op() {
                Op::Read => data.copy_from_slice(memory),
                _ => memory.copy_from_slice(data),
            }
            at += segment.len_bytes;
        }
    }
}

impl DeviceQueue for RecorderQueue {
    fn start(&mut self, _now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        for _ in 0..self.starts_max {
            let Some(started) = batch.next() else { return };
            let range = started.sector().0..started.end().0;
            let hit = self.bad.is_some_and(|bad| range.contains(&bad));
            if hit && started.is_merged() {
                return batch.break_up(started);
            }
            let fua = started.flags().contains(Flags::FUA);
            let entry = (started.op(), started.sector().0, started.sectors(), fua);
            self.log.lock().unwrap().push(entry);
            if !hit {
                self.copy(&started);
            }
            let into = if self.late { &mut self.held } else { &mut *done };
            into.complete(started, if hit { Status::Medium } else { Status::Ok });
        }
    }

    fn poll(&mut self, _now: Nanos, done: &mut CompletionBatch) {
        while done.take_from(&mut self.held) {}
    }

    fn room(&self) -> usize {
        usize::MAX
    }

    fn due(&self) -> Due {
        if self.held.is_empty() { Due::Never } else { Due::At(Nanos(0)) }
    }
}

/// A clock that advances only when a thread sleeps.
#[derive(Clone, Default)]
pub(crate) struct Still(Arc<Mutex<u64>>);

impl Clock for Still {
    fn now(&self) -> Nanos {
        Nanos(*self.0.lock().unwrap())
    }

    fn sleep_until(&self, at: Nanos) {
        let mut now = self.0.lock().unwrap();
        *now = (*now).max(at.0);
    }
}

pub(crate) fn composed<D: Device>(device: D) -> Composed<D, Still> {
    composed_of(device, 64, Still::default())
}

pub(crate) fn composed_of<D: Device>(device: D, depth: u16, clock: Still) -> Composed<D, Still> {
    let config = ChannelConfig { depth };
    Composed::with_clock("test".into(), "test", device, config, clock)
}

/// A channel with one region of 256 KiB.
pub(crate) struct Fixture {
    pub(crate) channel: Box<dyn Channel>,
    pub(crate) region: Arc<Region>,
    pub(crate) id: RegionId,
}

impl Fixture {
    pub(crate) fn new(disk: &dyn Disk) -> Fixture {
        let mut channel = disk.open().unwrap();
        let region = Region::alloc(256 << 10);
        let id = channel.register(Arc::clone(&region));
        Fixture { channel, region, id }
    }

    pub(crate) fn buf(&self, offset: u64) -> BufRef {
        BufRef { region: self.id, offset }
    }

    /// Pushes all bios at once, submits, and reaps until all are complete. Returns completions by
    /// user data.
    pub(crate) fn run(&mut self, bios: &[Bio]) -> Vec<Completion> {
        let numbered: Vec<Bio> =
            bios.iter().enumerate().map(|(n, bio)| bio.with_user_data(n as u64)).collect();
        let mut left = &numbered[..];
        let mut done = Vec::new();
        while done.len() < bios.len() {
            left = &left[self.channel.push(left)..];
            self.channel.submit();
            self.channel.wait(None);
            self.channel.reap(&mut done);
        }
        assert_eq!(self.channel.in_flight(), 0);
        done.sort_by_key(|end| end.user_data);
        let numbers: Vec<u64> = done.iter().map(|end| end.user_data).collect();
        assert_eq!(numbers, (0..bios.len() as u64).collect::<Vec<_>>(), "each bio ends once");
        done
    }

    pub(crate) fn statuses(&mut self, bios: &[Bio]) -> Vec<Status> {
        self.run(bios).iter().map(|end| end.status).collect()
    }
}

pub(crate) fn log_of(log: &Log) -> Vec<(Op, u64, u64, bool)> {
    std::mem::take(&mut log.lock().unwrap())
}

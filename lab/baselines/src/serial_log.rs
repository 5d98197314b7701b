//! A volume whose submitting threads write and sync for themselves, one after the other: the design
//! before sync writes went to workers.
//!
//! The log, its format and its checksums are the product's. The thread that submits a write holds
//! one lock, writes its own record as a group of one, syncs, and publishes the record before the
//! next thread may proceed.
#![allow(clippy::disallowed_types)] // The coarse lock is what this is about.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Batch, CompletionBatch, Device, DeviceError, DeviceQueue, Due, Flags, Geometry, Limits, Nanos,
    Op, Pieces, SECTOR_BYTES, SECTOR_SHIFT, Sector, Started, Status,
};
use blockyard_store::SegmentStore;
use blockyard_volume::committer::{Committer, Turn};
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::record::{Body, OpenVolume};
use blockyard_volume::{Compression, Options, Pool, VolumeError};

/// The longest read or write, in bytes, as for the product.
const LEN_MAX: u64 = 1 << 20;
/// The number of records of one queue.
const RECORDS: usize = 8;
/// After this many turns without an answer none will come.
const TURNS_MAX: u32 = 1 << 16;

/// A volume of a pool that has no other user.
pub struct SerialVolume<D: SegmentStore> {
    shared: Arc<Shared<D>>,
}

struct Shared<D: SegmentStore> {
    pool: Arc<Pool<D>>,
    live: Arc<OpenVolume>,
    geometry: Geometry,
    limits: Limits,
    /// The committer, protected by the coarse lock.
    log: Mutex<Committer<D>>,
    /// The order in which threads take the lock.
    line: ArrivalOrder,
}

/// Threads in the order of arrival. The lock alone would go to the thread that had it last, because
/// no other thread is awake.
struct ArrivalOrder {
    /// The number of tickets given out, and the number of tickets whose turn is over.
    tickets: Mutex<(usize, usize)>,
    /// The condition variables on which threads wait, by the low bits of their tickets.
    turns: [Condvar; 64],
}

impl ArrivalOrder {
    fn new() -> ArrivalOrder {
        ArrivalOrder { tickets: Mutex::new((0, 0)), turns: [const { Condvar::new() }; 64] }
    }

    fn enter(&self) {
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = tickets.0;
        tickets.0 += 1;
        while tickets.1 != mine {
            let turn = &self.turns[mine % self.turns.len()];
            tickets = turn.wait(tickets).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn leave(&self) {
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        tickets.1 += 1;
        self.turns[tickets.1 % self.turns.len()].notify_all();
    }
}

impl<D: SegmentStore> SerialVolume<D> {
    /// Opens an existing volume, in the pool of a directory.
    ///
    /// # Errors
    /// If the pool cannot be opened, or has no such volume.
    pub fn open(
        directory: D,
        options: Options,
        name: &str,
    ) -> Result<SerialVolume<D>, VolumeError> {
        let (pool, committer) = Pool::open(directory, options)?;
        let live = pool.find(name)?;
        let block_bytes = live.meta.block_bytes;
        let geometry = Geometry {
            sectors: live.meta.blocks * u64::from(block_bytes) / SECTOR_BYTES,
            logical_block_bytes: block_bytes.min(4096),
            physical_block_bytes: block_bytes,
            zones: None,
        };
        let limits = Limits {
            sectors_max: LEN_MAX / SECTOR_BYTES,
            chunk_sectors: LEN_MAX / SECTOR_BYTES,
            discard_sectors_max: 0,
            write_zeroes_sectors_max: 0,
            write_cache: true,
            fua: true,
            ..Limits::unlimited(1)
        };
        let (log, line) = (Mutex::new(committer), ArrivalOrder::new());
        Ok(SerialVolume { shared: Arc::new(Shared { pool, live, geometry, limits, log, line }) })
    }
}

impl<D: SegmentStore> Device for SerialVolume<D> {
    type Queue = SerialQueue<D>;

    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    fn open_queue(&self) -> Result<SerialQueue<D>, DeviceError> {
        let Shared { pool, live, .. } = &*self.shared;
        let handle = VolumeHandle::open(pool, Arc::clone(live), Compression::None, RECORDS)
            .expect("the volume is not encrypted");
        Ok(SerialQueue { shared: Arc::clone(&self.shared), handle })
    }

    fn report_zones(&self, _: Sector, _: usize, _: &mut Vec<ZoneInfo>) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Closes the log as the product does, so that the next opening has nothing to recover.
impl<D: SegmentStore> Drop for Shared<D> {
    fn drop(&mut self) {
        let log = self.log.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _answer = self.pool.submit(Body::Stop);
        for _ in 0..TURNS_MAX {
            if log.turn() == Turn::Stopped {
                return;
            }
        }
    }
}

/// The queue of one channel.
pub struct SerialQueue<D: SegmentStore> {
    shared: Arc<Shared<D>>,
    handle: VolumeHandle<D>,
}

impl<D: SegmentStore> SerialQueue<D> {
    fn carry_out(&mut self, started: &Started) -> Status {
        let (at, len) = (started.sector().bytes(), (started.sectors() << SECTOR_SHIFT) as usize);
        match started.op() {
            Op::Read => {
                let mut into = Pieces::new(started.segments());
                self.handle.read(at, len, |bytes| into.write(bytes))
            }
            Op::Write => {
                let durable = started.flags().contains(Flags::FUA);
                self.change(|handle| {
                    let fill = |from: usize, into: &mut [u8]| {
                        let mut pieces = Pieces::new(started.segments());
                        pieces.skip(from);
                        pieces.read(into);
                    };
                    handle.write(at, len, &fill, 0, durable)
                })
            }
            Op::Flush => self.change(|handle| handle.flush(0)),
            _ => Status::NotSupp,
        }
    }

    /// Writes a record into the log and waits for it, while all other threads wait too.
    fn change(&mut self, send: impl Fn(&mut VolumeHandle<D>) -> Outcome) -> Status {
        self.shared.line.enter();
        let status = self.change_alone(send);
        self.shared.line.leave();
        status
    }

    fn change_alone(&mut self, send: impl Fn(&mut VolumeHandle<D>) -> Outcome) -> Status {
        let mut log = self.shared.log.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..TURNS_MAX {
            match send(&mut self.handle) {
                Outcome::Ended(status) => return status,
                // Records that other threads left in the queue go first.
                Outcome::Full => {
                    log.turn();
                }
                Outcome::Taken => break,
            }
        }
        for _ in 0..TURNS_MAX {
            if let Some(reply) = self.handle.take() {
                return reply.status;
            }
            log.turn();
        }
        Status::Timeout
    }
}

impl<D: SegmentStore> DeviceQueue for SerialQueue<D> {
    fn start(&mut self, _: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        while let Some(started) = batch.next() {
            let status = self.carry_out(&started);
            done.complete(started, status);
        }
    }

    fn poll(&mut self, _: Nanos, _: &mut CompletionBatch) {}

    fn room(&self) -> usize {
        1
    }

    fn due(&self) -> Due {
        Due::Never
    }

    fn is_immediate(&mut self) -> bool {
        true
    }
}

impl<D: SegmentStore> fmt::Debug for SerialVolume<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialVolume").field("pool", &self.shared.pool).finish_non_exhaustive()
    }
}

impl<D: SegmentStore> fmt::Debug for SerialQueue<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialQueue").finish_non_exhaustive()
    }
}

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
    Batch, Device, DeviceError, DeviceQueue, Done, Due, Flags, Geometry, Limits, Nanos, Op, Pieces,
    SECTOR_BYTES, SECTOR_SHIFT, Sector, Started, Status,
};
use blockyard_volume::committer::{Committer, Turn};
use blockyard_volume::door::{Door, Outcome};
use blockyard_volume::record::{Body, Live};
use blockyard_volume::store::Directory;
use blockyard_volume::{Compression, Options, Pool, VolumeError};

/// The longest read or write, in bytes, as for the product.
const LEN_MAX: u64 = 1 << 20;
/// The number of records of one queue.
const RECORDS: usize = 8;
/// After this many turns without an answer none will come.
const TURNS_MAX: u32 = 1 << 16;

/// A volume of a pool that has no other user.
pub struct SerialVolume<D: Directory> {
    shared: Arc<Shared<D>>,
}

struct Shared<D: Directory> {
    pool: Arc<Pool<D>>,
    live: Arc<Live>,
    geometry: Geometry,
    limits: Limits,
    /// The committer, protected by the coarse lock.
    log: Mutex<Committer<D>>,
    /// The order in which threads take the lock.
    line: Line,
}

/// Threads in the order of arrival. The lock alone would go to the thread that had it last, because
/// no other thread is awake.
struct Line {
    /// The number of tickets given out, and the number of tickets whose turn is over.
    tickets: Mutex<(usize, usize)>,
    /// The condition variables on which threads wait, by the low bits of their tickets.
    turns: [Condvar; 64],
}

impl Line {
    fn new() -> Line {
        Line { tickets: Mutex::new((0, 0)), turns: [const { Condvar::new() }; 64] }
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

impl<D: Directory> SerialVolume<D> {
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
        let block_bytes = live.traits.block_bytes;
        let geometry = Geometry {
            sectors: live.traits.blocks * u64::from(block_bytes) / SECTOR_BYTES,
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
        let (log, line) = (Mutex::new(committer), Line::new());
        Ok(SerialVolume { shared: Arc::new(Shared { pool, live, geometry, limits, log, line }) })
    }
}

impl<D: Directory> Device for SerialVolume<D> {
    type Queue = SerialQueue<D>;

    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    fn open_queue(&self) -> Result<SerialQueue<D>, DeviceError> {
        let Shared { pool, live, .. } = &*self.shared;
        let door = Door::open(pool, Arc::clone(live), Compression::None, RECORDS);
        Ok(SerialQueue { shared: Arc::clone(&self.shared), door })
    }

    fn report_zones(&self, _: Sector, _: usize, _: &mut Vec<ZoneInfo>) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Closes the log as the product does, so that the next opening has nothing to recover.
impl<D: Directory> Drop for Shared<D> {
    fn drop(&mut self) {
        let log = self.log.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _answer = self.pool.ask_for(Body::Stop);
        for _ in 0..TURNS_MAX {
            if log.turn() == Turn::Stopped {
                return;
            }
        }
    }
}

/// The queue of one channel.
pub struct SerialQueue<D: Directory> {
    shared: Arc<Shared<D>>,
    door: Door<D>,
}

impl<D: Directory> SerialQueue<D> {
    fn carry_out(&mut self, started: &Started) -> Status {
        let (at, len) = (started.sector().bytes(), (started.sectors() << SECTOR_SHIFT) as usize);
        match started.op() {
            Op::Read => {
                let mut into = Pieces::new(started.segments());
                self.door.read(at, len, |bytes| into.write(bytes))
            }
            Op::Write => {
                let durable = started.flags().contains(Flags::FUA);
                self.change(|door| {
                    let fill = |from: usize, into: &mut [u8]| {
                        let mut pieces = Pieces::new(started.segments());
                        pieces.skip(from);
                        pieces.read(into);
                    };
                    door.write(at, len, &fill, 0, durable)
                })
            }
            Op::Flush => self.change(|door| door.flush(0)),
            _ => Status::NotSupp,
        }
    }

    /// Writes a record into the log and waits for it, while all other threads wait too.
    fn change(&mut self, send: impl Fn(&mut Door<D>) -> Outcome) -> Status {
        self.shared.line.enter();
        let status = self.change_alone(send);
        self.shared.line.leave();
        status
    }

    fn change_alone(&mut self, send: impl Fn(&mut Door<D>) -> Outcome) -> Status {
        let mut log = self.shared.log.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..TURNS_MAX {
            match send(&mut self.door) {
                Outcome::Ended(status) => return status,
                // Records that other threads left in the queue go first.
                Outcome::Full => {
                    log.turn();
                }
                Outcome::Taken => break,
            }
        }
        for _ in 0..TURNS_MAX {
            if let Some(reply) = self.door.take() {
                return reply.status;
            }
            log.turn();
        }
        Status::Timeout
    }
}

impl<D: Directory> DeviceQueue for SerialQueue<D> {
    fn start(&mut self, _: Nanos, batch: &mut Batch, done: &mut Done) {
        while let Some(started) = batch.next() {
            let status = self.carry_out(&started);
            done.complete(started, status);
        }
    }

    fn poll(&mut self, _: Nanos, _: &mut Done) {}

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

impl<D: Directory> fmt::Debug for SerialVolume<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialVolume").field("pool", &self.shared.pool).finish_non_exhaustive()
    }
}

impl<D: Directory> fmt::Debug for SerialQueue<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SerialQueue").finish_non_exhaustive()
    }
}

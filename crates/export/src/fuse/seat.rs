//! A serving thread's handles (its seat): one for each device that it has used.
//!
//! The lock of a seat is taken by its thread for each request, and by the control plane when a
//! device is removed. So the handles of a sleeping thread to a removed device are closed with it.

use std::sync::Arc;
use std::time::Instant;

use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::{BufRef, Channel, Disk, Flags, Op, Region, RegionId, Status};
use blockyard_sync::lock::Lock;
use blockyard_sync::pad::Padded;
use blockyard_sync::rank::ranks;
use blockyard_sync::rmw_lock::{RmwLock, Writer};
use blockyard_sync::sleep_lock::SleepLock;
use fuser::Errno;

use crate::fuse::files::{File, Files, slot_of};
use crate::fuse::lane::{Lane, Work};
use crate::fuse::memory::IO_BYTES_MAX;
use crate::fuse::ranges::Shape;
use crate::fuse::status::errno_of;
use crate::fuse::ticket::Ticket;
use crate::rmw::Span;

/// The attempts to execute a request inline: one, and one more for each layer that may first have
/// to reload its rules (the error injector, the device).
const CARRIES: u32 = 3;

/// The seats of one mount.
pub(crate) struct Seats {
    files: Arc<Files>,
    seats: Box<[Padded<SleepLock<Seat, { ranks::SEAT }>>]>,
}

/// The handles of one thread, by the slot of the file.
type Seat = Vec<Option<Box<Door>>>;

impl Seats {
    pub(crate) fn new(files: Arc<Files>, count: usize) -> Arc<Seats> {
        let seats = (0..count.max(1)).map(|_| Padded(SleepLock::new(Vec::new()))).collect();
        Arc::new(Seats { files, seats })
    }

    /// Calls `f` with a thread's handle to the device of a file, or returns the error if there is
    /// none. The region is the one with this thread's data.
    #[inline]
    pub(crate) fn with_door<R>(
        &self,
        index: usize,
        region: &Arc<Region>,
        ino: u64,
        f: impl FnOnce(Result<&mut Door, Errno>) -> R,
    ) -> R {
        self.seats[index].with(|seat| {
            if let Some(Some(door)) = seat.get_mut(slot_of(ino))
                && door.ino == ino
            {
                return f(Ok(door));
            }
            f(self.open(seat, region, ino))
        })
    }

    /// Opens a handle. A file that is being removed is no longer in the table, so no handle is
    /// opened after [`Seats::close`].
    #[cold]
    fn open<'s>(
        &self,
        seat: &'s mut Seat,
        region: &Arc<Region>,
        ino: u64,
    ) -> Result<&'s mut Door, Errno> {
        let file = self.files.find(ino).ok_or(Errno::ENODEV)?;
        let door = Door::open(&file, region)?;
        let slot = slot_of(ino);
        if seat.len() <= slot {
            seat.resize_with(slot + 1, || None);
        }
        Ok(seat[slot].insert(Box::new(door)))
    }

    /// Closes every thread's handle to a device; requests that still wait fail at the deadline.
    pub(crate) fn close(&self, ino: u64, deadline: Instant) {
        let slot = slot_of(ino);
        for seat in &self.seats {
            let door = seat.with(|seat| {
                let door = seat.get_mut(slot)?;
                door.take_if(|door| door.ino == ino)
            });
            if let Some(door) = door {
                door.close(deadline);
            }
        }
    }

    /// Closes all handles.
    pub(crate) fn close_all(&self, deadline: Instant) {
        for seat in &self.seats {
            let doors = seat.with(std::mem::take);
            doors.into_iter().flatten().for_each(|door| door.close(deadline));
        }
    }
}

/// The result of an inline request.
pub(crate) enum Carried {
    /// Success: the number of bytes, and for a read their offset in the thread's region.
    Done(u64, u64),
    /// An error.
    Failed(Errno),
    /// The request must wait for the device.
    Later(Work),
}

/// A thread's handle to one device.
pub(crate) struct Door {
    ino: u64,
    disk: Arc<dyn Disk>,
    shape: Shape,
    channel: Box<dyn Channel>,
    /// The thread's region, which is registered with the channel; no bio is in flight in it after
    /// `carry` has returned.
    region_id: RegionId,
    lock: Arc<RmwLock>,
    /// For the one write that may be executed inline at a time.
    writer: Writer,
    /// The worker for other requests; started when it is first needed.
    lane: Option<Lane>,
}

impl Door {
    fn open(file: &File, region: &Arc<Region>) -> Result<Door, Errno> {
        let disk = Arc::clone(&file.disk);
        let mut channel = open_channel(&disk)?;
        let region_id = channel.register(Arc::clone(region));
        let (ino, shape, lock) = (file.ino, file.shape, Arc::clone(&file.lock));
        let writer = lock.writer(1);
        Ok(Door { ino, disk, shape, channel, region_id, lock, writer, lane: None })
    }

    fn close(self, deadline: Instant) {
        if let Some(lane) = self.lane {
            lane.close(deadline);
        }
    }

    /// Reads the part of the range that lies in the file, into the buffer at `at` of the thread's
    /// region.
    #[inline]
    pub(crate) fn read(&mut self, offset: u64, len: u64, at: u64) -> Carried {
        let want = self.shape.clip(offset, len.min(IO_BYTES_MAX));
        if want == 0 {
            return Carried::Done(0, at);
        }
        let span = self.shape.span(offset, want);
        match self.carry(Op::Read, &span, at) {
            Some(status) if status.is_ok() => Carried::Done(want, at + span.skip),
            Some(status) => Carried::Failed(errno_of(status)),
            None => Carried::Later(Work::Read(span)),
        }
    }

    /// Writes the part of the range that lies in the file; `len` bytes are at `at` of the thread's
    /// region.
    #[inline]
    pub(crate) fn write(&mut self, offset: u64, len: u64, flags: Flags, at: u64) -> Carried {
        if self.shape.read_only {
            return Carried::Failed(Errno::EROFS);
        }
        let want = self.shape.clip(offset, len.min(IO_BYTES_MAX));
        if want == 0 {
            // As for a block device; an empty write is no error.
            return if len == 0 { Carried::Done(0, at) } else { Carried::Failed(Errno::ENOSPC) };
        }
        let span = self.shape.span(offset, want);
        if !span.is_whole() && span.start + span.len > self.shape.sequential_from {
            return Carried::Failed(Errno::EINVAL);
        }
        let range = span.range();
        // A write that overlaps a read-modify-write waits for it at the worker.
        if span.is_whole() && flags == Flags::NONE && self.writer.try_start(0, range) {
            let carried = self.carry(Op::Write, &span, at);
            self.writer.clear(0);
            match carried {
                Some(status) if status.is_ok() => return Carried::Done(want, at),
                Some(status) => return Carried::Failed(errno_of(status)),
                None => {}
            }
        }
        Carried::Later(Work::Write(span, flags))
    }

    /// Executes a read or a write of whole blocks inline, between the device and the region.
    #[inline]
    fn carry(&mut self, op: Op, span: &Span, offset: u64) -> Option<Status> {
        let buf = BufRef { region: self.region_id, offset };
        let began = Monotonic.now();
        let mut carry = || self.channel.carry(op, span.sector(), span.sectors(), buf);
        // A layer whose rules have changed reloads them and executes nothing in that attempt.
        let status = (0..CARRIES).find_map(|_| carry())?;
        self.channel.note_latency(op, Monotonic.now().since(began));
        Some(status)
    }

    /// Makes the part of a range that lies in the file read as zeros.
    pub(crate) fn zero(&mut self, offset: u64, len: u64, mode: i32) -> Carried {
        match self.shape.zeroing(offset, len, mode) {
            Ok(Some(zeroing)) => Carried::Later(Work::Zero(zeroing)),
            Ok(None) => Carried::Done(0, 0),
            Err(errno) => Carried::Failed(errno),
        }
    }

    /// Passes a request to the worker, with the data of a write.
    #[cold]
    pub(crate) fn hand_over(&mut self, work: Work, ticket: Ticket, data: &[u8]) {
        match self.lane() {
            Ok(lane) => lane.send(work, ticket, data),
            Err(errno) => ticket.fail(errno),
        }
    }

    fn lane(&mut self) -> Result<&Lane, Errno> {
        if self.lane.is_none() {
            let channel = open_channel(&self.disk)?;
            let lane = Lane::start(self.disk.name(), channel, self.shape, &self.lock);
            self.lane = Some(lane.map_err(|error| {
                let device = self.disk.name();
                tracing::error!(device, %error, "no lane for requests that have to wait");
                Errno::ENOMEM
            })?);
        }
        Ok(self.lane.as_ref().expect("it was just made"))
    }
}

fn open_channel(disk: &Arc<dyn Disk>) -> Result<Box<dyn Channel>, Errno> {
    disk.open().map_err(|error| {
        tracing::error!(device = disk.name(), %error, "no channel for its file");
        Errno::ENODEV
    })
}

//! Seats: what a serving thread has of each device it has touched.
//!
//! A seat's lock is taken for each request by the thread whose seat it is, and by the control plane
//! when a device goes: so what a thread that sleeps has of that device goes with it.

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

/// How often a request is tried to be carried: once, and once more for each floor that may have
/// something to fetch first (the error injector, the device).
const CARRIES: u32 = 3;

/// The seats of one mount.
pub(crate) struct Seats {
    files: Arc<Files>,
    seats: Box<[Padded<SleepLock<Seat, { ranks::SEAT }>>]>,
}

/// One thread's doors, by the slot of the file.
type Seat = Vec<Option<Box<Door>>>;

impl Seats {
    pub(crate) fn new(files: Arc<Files>, count: usize) -> Arc<Seats> {
        let seats = (0..count.max(1)).map(|_| Padded(SleepLock::new(Vec::new()))).collect();
        Arc::new(Seats { files, seats })
    }

    /// Runs `f` with the door of a thread to the device of a file, or the reason why there is none.
    /// The region is the one that this thread's data are in.
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

    /// Opens a door. A file that is being removed is no longer in the table, so that none is opened
    /// after [`Seats::close`] was here.
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

    /// Closes every thread's door to a device; what has to wait is given up at the deadline.
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

    /// Closes every door.
    pub(crate) fn close_all(&self, deadline: Instant) {
        for seat in &self.seats {
            let doors = seat.with(std::mem::take);
            doors.into_iter().flatten().for_each(|door| door.close(deadline));
        }
    }
}

/// How far a request got on the spot.
pub(crate) enum Carried {
    /// It is done: so many bytes, which of a read begin at this offset of the thread's region.
    Done(u64, u64),
    /// It failed.
    Failed(Errno),
    /// It has to wait for the device.
    Later(Work),
}

/// One thread's way to one device.
pub(crate) struct Door {
    ino: u64,
    disk: Arc<dyn Disk>,
    shape: Shape,
    channel: Box<dyn Channel>,
    /// The thread's region, which the channel knows; nothing is ever in flight in it once `carry`
    /// has returned.
    region_id: RegionId,
    lock: Arc<RmwLock>,
    /// For the one write that may be carried out at a time.
    writer: Writer,
    /// For what cannot be carried on the spot; started when it is first needed.
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

    /// Reads what of the range lies in the file, to the buffer at `at` of the thread's region.
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

    /// Writes what of the range lies in the file; `len` bytes are at `at` of the thread's region.
    #[inline]
    pub(crate) fn write(&mut self, offset: u64, len: u64, flags: Flags, at: u64) -> Carried {
        if self.shape.read_only {
            return Carried::Failed(Errno::EROFS);
        }
        let want = self.shape.clip(offset, len.min(IO_BYTES_MAX));
        if want == 0 {
            // As a block device says it; nothing of nothing is no error.
            return if len == 0 { Carried::Done(0, at) } else { Carried::Failed(Errno::ENOSPC) };
        }
        let span = self.shape.span(offset, want);
        if !span.is_whole() && span.start + span.len > self.shape.sequential_from {
            return Carried::Failed(Errno::EINVAL);
        }
        let range = span.range();
        // What overlaps a read-modify-write waits for it in the lane.
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

    /// Carries a read or a write of whole blocks out, between the device and the region.
    #[inline]
    fn carry(&mut self, op: Op, span: &Span, offset: u64) -> Option<Status> {
        let buf = BufRef { region: self.region_id, offset };
        let began = Monotonic.now();
        let mut carry = || self.channel.carry(op, span.sector(), span.sectors(), buf);
        // A floor whose rules have changed since it last looked fetches them and carries nothing.
        let status = (0..CARRIES).find_map(|_| carry())?;
        self.channel.note_latency(op, Monotonic.now().since(began));
        Some(status)
    }

    /// Makes a range read as zeros, as far as it lies in the file.
    pub(crate) fn zero(&mut self, offset: u64, len: u64, mode: i32) -> Carried {
        match self.shape.zeroing(offset, len, mode) {
            Ok(Some(zeroing)) => Carried::Later(Work::Zero(zeroing)),
            Ok(None) => Carried::Done(0, 0),
            Err(errno) => Carried::Failed(errno),
        }
    }

    /// Hands over what has to wait, with what it writes.
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

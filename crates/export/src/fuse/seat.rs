//! Seats: what a serving thread has of each device it has touched.
//!
//! A seat's lock is taken for each request by the thread whose seat it is, and by the control plane
//! when a device goes: so what a thread that sleeps has of that device goes with it.
#![allow(unsafe_code)] // Replies are sent from a door's region.
#![allow(clippy::disallowed_types)] // A count that each thread takes once.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use blockyard_core::{BufRef, Channel, Disk, Flags, Op, Region, RegionId, Status};
use blockyard_sync::atomics::{AtomicUsize, Ordering};
use blockyard_sync::lock::Lock;
use blockyard_sync::pad::Padded;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;
use fuser::{Errno, ReplyData, ReplyEmpty, ReplyWrite};

use crate::fuse::files::{Edges, File, Files, slot_of};
use crate::fuse::lane::{Answer, Lane, Work};
use crate::fuse::memory::{self, BUFFER_BYTES, IO_BYTES_MAX};
use crate::fuse::ranges::{Shape, Span};
use crate::fuse::status::errno_of;
use crate::os;

/// How often a request is tried to be carried: once, and once more for each floor that may have
/// something to fetch first (the error injector, the device).
const CARRIES: u32 = 3;

thread_local! {
    /// This thread's seat. A thread serves one mount as long as it lives.
    static SEAT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The seats of one mount.
pub(crate) struct Seats {
    files: Arc<Files>,
    seats: Box<[Padded<SleepLock<Seat, { ranks::SEAT }>>]>,
    /// How many threads have come.
    taken: AtomicUsize,
}

/// One thread's doors, by the slot of the file.
type Seat = Vec<Option<Box<Door>>>;

impl Seats {
    pub(crate) fn new(files: Arc<Files>, count: usize) -> Arc<Seats> {
        let seats = (0..count.max(1)).map(|_| Padded(SleepLock::new(Vec::new()))).collect();
        Arc::new(Seats { files, seats, taken: AtomicUsize::new(0) })
    }

    /// Runs `f` with this thread's door to the device of a file, or the reason why there is none.
    #[inline]
    pub(crate) fn with_door<R>(
        &self,
        ino: u64,
        f: impl FnOnce(Result<&mut Door, Errno>) -> R,
    ) -> R {
        let index = SEAT.get().unwrap_or_else(|| self.sit_down());
        self.seats[index].with(|seat| {
            if let Some(Some(door)) = seat.get_mut(slot_of(ino))
                && door.ino == ino
            {
                return f(Ok(door));
            }
            f(self.open(seat, ino))
        })
    }

    #[cold]
    fn sit_down(&self) -> usize {
        // Relaxed: only the number itself matters. Should there be more threads than seats, some
        // share one, which its lock allows.
        let index = self.taken.fetch_add(1, Ordering::Relaxed) % self.seats.len();
        SEAT.set(Some(index));
        index
    }

    /// Opens a door. A file that is being removed is no longer in the table, so that none is opened
    /// after [`Seats::close`] was here.
    #[cold]
    fn open<'s>(&self, seat: &'s mut Seat, ino: u64) -> Result<&'s mut Door, Errno> {
        let file = self.files.find(ino).ok_or(Errno::ENODEV)?;
        let door = Door::open(&file)?;
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

/// One thread's way to one device.
pub(crate) struct Door {
    ino: u64,
    disk: Arc<dyn Disk>,
    shape: Shape,
    channel: Box<dyn Channel>,
    /// The channel knows it; in it nothing is ever in flight once `carry` has returned.
    region: Arc<Region>,
    region_id: RegionId,
    edges: Arc<Edges>,
    /// For what cannot be carried on the spot; started when it is first needed.
    lane: Option<Lane>,
}

impl Door {
    fn open(file: &File) -> Result<Door, Errno> {
        let disk = Arc::clone(&file.disk);
        let mut channel = open_channel(&disk)?;
        let region = os::map_region(BUFFER_BYTES as usize).map_err(|error| {
            tracing::error!(device = disk.name(), %error, "no memory for its file");
            Errno::ENOMEM
        })?;
        let region_id = channel.register(Arc::clone(&region));
        let (ino, shape, edges) = (file.ino, file.shape, Arc::clone(&file.edges));
        Ok(Door { ino, disk, shape, channel, region, region_id, edges, lane: None })
    }

    fn close(self, deadline: Instant) {
        if let Some(lane) = self.lane {
            lane.close(deadline);
        }
    }

    /// Reads what of the range lies in the file.
    #[inline]
    pub(crate) fn read(&mut self, offset: u64, len: u64, reply: ReplyData) {
        let want = self.shape.clip(offset, len.min(IO_BYTES_MAX));
        if want == 0 {
            return reply.data(&[]);
        }
        let span = self.shape.span(offset, want);
        match self.carry(Op::Read, &span) {
            Some(status) if status.is_ok() => {
                // SAFETY: the carried read has completed and nothing else is in flight in the
                // region, which belongs to this door alone.
                reply.data(unsafe { memory::bytes(&self.region, span.skip, want) });
            }
            Some(status) => reply.error(errno_of(status)),
            None => self.hand_over(Work::Read(span), Answer::Read(reply), &[]),
        }
    }

    /// Writes what of the range lies in the file.
    #[inline]
    pub(crate) fn write(&mut self, offset: u64, data: &[u8], flags: Flags, reply: ReplyWrite) {
        if self.shape.read_only {
            return reply.error(Errno::EROFS);
        }
        let want = self.shape.clip(offset, (data.len() as u64).min(IO_BYTES_MAX));
        if want == 0 {
            // As a block device says it; nothing of nothing is no error.
            return if data.is_empty() { reply.written(0) } else { reply.error(Errno::ENOSPC) };
        }
        let span = self.shape.span(offset, want);
        let data = &data[..want as usize];
        if !span.is_whole() && self.shape.zoned {
            return reply.error(Errno::EINVAL);
        }
        if span.is_whole() && flags == Flags::NONE {
            self.region.write(0, data);
            match self.carry(Op::Write, &span) {
                Some(status) if status.is_ok() => return reply.written(want as u32),
                Some(status) => return reply.error(errno_of(status)),
                None => {}
            }
        }
        self.hand_over(Work::Write(span, flags), Answer::Write(reply), data);
    }

    /// Carries a read or a write of whole blocks out, between the device and the region's start.
    #[inline]
    fn carry(&mut self, op: Op, span: &Span) -> Option<Status> {
        let buf = BufRef { region: self.region_id, offset: 0 };
        let mut carry = || self.channel.carry(op, span.sector(), span.sectors(), buf);
        // A floor whose rules have changed since it last looked fetches them and carries nothing.
        (0..CARRIES).find_map(|_| carry())
    }

    /// Makes durable what was written.
    pub(crate) fn flush(&mut self, reply: ReplyEmpty) {
        self.hand_over(Work::Flush, Answer::Done(reply), &[]);
    }

    /// Makes a range read as zeros, as far as it lies in the file.
    pub(crate) fn zero(&mut self, offset: u64, len: u64, mode: i32, reply: ReplyEmpty) {
        match self.shape.zeroing(offset, len, mode) {
            Ok(Some(zeroing)) => self.hand_over(Work::Zero(zeroing), Answer::Done(reply), &[]),
            Ok(None) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    #[cold]
    fn hand_over(&mut self, work: Work, answer: Answer, data: &[u8]) {
        match self.lane() {
            Ok(lane) => lane.send(work, answer, data),
            Err(errno) => answer.fail(errno),
        }
    }

    fn lane(&mut self) -> Result<&Lane, Errno> {
        if self.lane.is_none() {
            let channel = open_channel(&self.disk)?;
            let edges = Arc::clone(&self.edges);
            let lane = Lane::start(self.disk.name(), channel, self.shape, edges);
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

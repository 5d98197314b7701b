//! A job's door to one of its files' devices: a channel, fio's buffers as a region of it, and what
//! waits on either side.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::Channel;
use blockyard_core::completion::Completion;
use blockyard_core::{
    Bio, BufRef, DeviceError, Disk, Due, Flags, Op, Prio, Region, RegionId, SECTOR_BYTES, Sector,
    Status,
};

/// Length of the buffer for writes that do not come from fio's own buffers, in bytes.
const CONTROL_BYTES: usize = 1 << 20;

/// fio's numbers of operations (`enum fio_ddir`).
const DDIR_READ: u32 = 0;
const DDIR_WRITE: u32 = 1;
const DDIR_TRIM: u32 = 2;

/// The priority class in fio's `ioprio`, which is Linux's: the class lies above 13 bits for the
/// level, of which the block layer makes nothing here. No class is the ordinary one.
pub(crate) fn prio(ioprio: u32) -> Prio {
    match ioprio >> 13 {
        1 => Prio::RealTime,
        3 => Prio::Idle,
        _ => Prio::BestEffort,
    }
}

/// One I/O as fio asks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// fio's number of the operation.
    pub(crate) ddir: u32,
    /// The priority class.
    pub(crate) prio: Prio,
    /// Where on the device, in bytes.
    pub(crate) offset: u64,
    /// Address of the data, in fio's buffers.
    pub(crate) buf: usize,
    /// How much, in bytes.
    pub(crate) len: u64,
}

impl Asked {
    /// Whether it is whole sectors.
    #[inline]
    fn is_whole(&self) -> bool {
        (self.offset | self.len) & (SECTOR_BYTES - 1) == 0
    }

    #[inline]
    fn sector(&self) -> Sector {
        Sector(self.offset / SECTOR_BYTES)
    }
}

/// A job's door to a device. Belongs to the job's thread.
pub(crate) struct Door {
    /// Open from `init` until fio frees its buffers.
    channel: Option<Box<dyn Channel>>,
    /// Whether something panicked on the way: it is closed for good, and what was in flight lost.
    broken: bool,
    /// Address and length of fio's buffers, and the region that they are.
    base: usize,
    len_bytes: usize,
    region: RegionId,
    /// The last of fio's operations that may be carried out on the spot: a write, unless each has
    /// to be durable.
    ddir_last: u32,
    /// What was pushed, and not yet submitted or without room in the channel. fio never has more
    /// in flight than the job's depth, which is its capacity: there is always room here.
    pushed: Vec<Bio>,
    /// What was reaped, from `handed` on not yet handed out.
    ended: Vec<Completion>,
    handed: usize,
    /// For zones: opened when first asked for.
    control: Option<Io>,
    disk: Arc<dyn Disk>,
}

impl Door {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Door {
        Door {
            channel: None,
            broken: false,
            base: 0,
            len_bytes: 0,
            region: RegionId(0),
            ddir_last: DDIR_WRITE,
            pushed: Vec::new(),
            ended: Vec::new(),
            handed: 0,
            control: None,
            disk,
        }
    }

    pub(crate) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// Opens the channel, for a job of this depth, unless it is open.
    pub(crate) fn open(&mut self, depth: usize, durable: bool) -> Result<(), DeviceError> {
        if self.channel.is_some() || self.broken {
            return Ok(());
        }
        self.channel = Some(self.disk.open()?);
        self.ddir_last = if durable { DDIR_READ } else { DDIR_WRITE };
        self.pushed.reserve(depth);
        self.ended.reserve(depth);
        Ok(())
    }

    /// Closes the channel, which then refers to fio's buffers no more.
    pub(crate) fn close(&mut self) {
        self.channel = None;
        self.base = 0;
        self.len_bytes = 0;
        self.pushed.clear();
    }

    /// Closes the door for good, after a panic.
    pub(crate) fn give_up(&mut self) {
        self.broken = true;
        self.close();
        self.control = None;
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Tells the channel of fio's buffers, in place of those that it was told of before.
    ///
    /// # Safety
    /// The memory must be readable and writable until the next call or until `close`, and no Rust
    /// reference to it may exist while an I/O on it is in flight.
    pub(crate) unsafe fn adopt(&mut self, base: *mut u8, len_bytes: usize) -> Result<(), Status> {
        if self.broken {
            return Ok(());
        }
        let channel = self.channel.as_mut().ok_or(Status::Offline)?;
        // A job that only trims has none.
        let Some(base) = NonNull::new(base) else { return Ok(()) };
        // fio makes its buffers anew only when none of its I/O is in flight. What is, is newer, and
        // lies where the old buffers and the new ones overlap: then the old region, which owns
        // nothing, stays known until the channel closes.
        if self.base != 0 && self.pushed.is_empty() && !channel.unregister(self.region) {
            debug_assert!(channel.in_flight() > 0, "a region that was registered");
        }
        // SAFETY: by this function's own contract; the next call forgets the region and `close`
        // drops the channel, which alone holds it.
        let region = unsafe { Region::foreign(base, len_bytes, Box::new(())) };
        (self.base, self.len_bytes) = (base.as_ptr() as usize, len_bytes);
        self.region = channel.register(region);
        Ok(())
    }

    /// Carries an I/O out on the spot and says how it ended; `None` if it has to be pushed.
    #[inline]
    pub(crate) fn carry(&mut self, asked: &Asked) -> Option<Status> {
        // What was pushed before goes first: writes to a zone must stay in order.
        if asked.ddir > self.ddir_last || !asked.is_whole() || !self.pushed.is_empty() {
            return None;
        }
        let op = if asked.ddir == DDIR_READ { Op::Read } else { Op::Write };
        // An address outside the buffers becomes an offset outside the region.
        let offset = asked.buf.wrapping_sub(self.base) as u64;
        let buf = BufRef { region: self.region, offset };
        self.channel.as_mut()?.carry(op, asked.sector(), asked.len / SECTOR_BYTES, buf)
    }

    /// Takes an I/O that goes the way down and up: `submit` starts it, and `reap` hands it out with
    /// its `user_data`.
    pub(crate) fn push(&mut self, asked: &Asked, user_data: u64) -> Result<(), Status> {
        if self.channel.is_none() {
            return Err(if self.broken { Status::IoErr } else { Status::Offline });
        }
        let (op, flags) = match asked.ddir {
            DDIR_READ => (Op::Read, Flags::NONE),
            DDIR_WRITE if self.ddir_last == DDIR_READ => (Op::Write, Flags::FUA),
            DDIR_WRITE => (Op::Write, Flags::NONE),
            DDIR_TRIM => (Op::Discard, Flags::NONE),
            // sync, datasync, sync_file_range.
            _ => (Op::Flush, Flags::NONE),
        };
        let offset = asked.buf.wrapping_sub(self.base) as u64;
        let inside = offset.checked_add(asked.len).is_some_and(|end| end <= self.len_bytes as u64);
        if op.has_range() && !asked.is_whole() || op.has_data() && !inside {
            return Err(Status::Inval);
        }
        let bio = Bio::new(op, asked.sector(), asked.len / SECTOR_BYTES)
            .with_buf(BufRef { region: self.region, offset })
            .with_flags(flags)
            .with_prio(asked.prio)
            .with_user_data(user_data);
        self.pushed.push(bio);
        Ok(())
    }

    /// Starts what was pushed, as far as there is room.
    #[inline]
    pub(crate) fn submit(&mut self) {
        if !self.pushed.is_empty()
            && let Some(channel) = &mut self.channel
        {
            let taken = channel.push(&self.pushed);
            self.pushed.drain(..taken);
            channel.submit();
        }
    }

    /// Hands out up to `max` of what has ended.
    #[inline]
    pub(crate) fn reap(&mut self, max: usize, mut out: impl FnMut(usize, u64, Status)) -> usize {
        if self.handed == self.ended.len() {
            self.ended.clear();
            self.handed = 0;
            let Some(channel) = &mut self.channel else { return 0 };
            channel.reap(&mut self.ended);
            self.submit();
        }
        let count = max.min(self.ended.len() - self.handed);
        for (at, end) in self.ended[self.handed..self.handed + count].iter().enumerate() {
            out(at, end.user_data, end.status);
        }
        self.handed += count;
        count
    }

    /// When `reap` will next find something.
    pub(crate) fn due(&self) -> Due {
        self.channel.as_ref().map_or(Due::Never, |channel| channel.due())
    }

    /// Sleeps until `reap` would find something.
    pub(crate) fn wait(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.wait(None);
        }
    }

    /// Waits for the end of the only I/O, in a job of depth 1.
    pub(crate) fn await_one(&mut self) -> Status {
        self.submit();
        loop {
            let mut ended = None;
            if self.reap(1, |_, _, status| ended = Some(status)) > 0 {
                return ended.expect("it was handed out just now");
            }
            if self.due() == Due::Never {
                self.give_up();
                return Status::Timeout;
            }
            self.wait();
        }
    }

    /// The channel for what is not the job's own I/O.
    fn control(&mut self) -> Result<&mut Io, Status> {
        if self.control.is_none() {
            let channel = self.disk.open().map_err(|_| Status::Offline)?;
            self.control = Some(Io::new(channel, CONTROL_BYTES));
        }
        Ok(self.control.as_mut().expect("it was made just now"))
    }

    /// Resets or finishes every sequential zone that lies in a range, in bytes.
    pub(crate) fn manage(&mut self, op: Op, from: u64, len: u64) -> Result<(), Status> {
        let zones = self.disk.geometry().zones.clone().ok_or(Status::NotSupp)?;
        let end = from.checked_add(len).ok_or(Status::Inval)?.div_ceil(SECTOR_BYTES);
        let end = end.min(self.disk.geometry().sectors);
        let mut zone = zones.zone_of(Sector(from / SECTOR_BYTES));
        while zones.start_of(zone).0 < end {
            if !zones.is_conventional(zone) {
                let bio = Bio::new(op, zones.start_of(zone), 0);
                self.control()?.run(bio)?;
            }
            zone.0 += 1;
        }
        Ok(())
    }

    /// Writes bytes that do not lie in fio's buffers.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        let mut sector = Sector(offset / SECTOR_BYTES);
        for piece in bytes.chunks(CONTROL_BYTES) {
            self.control()?.write(sector, piece, Flags::NONE)?;
            sector += piece.len() as u64 / SECTOR_BYTES;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fios_classes_are_those_of_linux() {
        for (ioprio, class) in [
            (0, Prio::BestEffort),
            (7, Prio::BestEffort),
            (1 << 13, Prio::RealTime),
            (1 << 13 | 7, Prio::RealTime),
            (2 << 13 | 4, Prio::BestEffort),
            (3 << 13, Prio::Idle),
            (3 << 13 | 7, Prio::Idle),
            (0xffff, Prio::BestEffort),
        ] {
            assert_eq!(prio(ioprio), class, "{ioprio:#x}");
        }
    }
}

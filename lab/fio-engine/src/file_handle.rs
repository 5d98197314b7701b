//! A job's handle to the device of one of its files: a channel, fio's buffers as a region of it,
//! and the I/Os that wait on either side.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use blockyard_core::Completion;
use blockyard_core::blocking::Io;
use blockyard_core::channel::Channel;
use blockyard_core::{
    Bio, BufRef, DeviceError, Disk, Due, Flags, Op, Prio, Region, RegionId, SECTOR_BYTES, Sector,
    Status,
};

/// The length in bytes of the buffer for writes that do not come from fio's own buffers.
const CONTROL_BYTES: usize = 1 << 20;

/// fio's operation numbers (`enum fio_ddir`).
const DDIR_READ: u32 = 0;
const DDIR_WRITE: u32 = 1;
const DDIR_TRIM: u32 = 2;

/// The priority class in fio's `ioprio`, whose format is Linux's: the class is above 13 bits for
/// the level, which the block layer ignores. No class means best effort.
pub(crate) fn prio(ioprio: u32) -> Prio {
    match ioprio >> 13 {
        1 => Prio::RealTime,
        3 => Prio::Idle,
        _ => Prio::BestEffort,
    }
}

/// One I/O of fio.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IoRequest {
    /// fio's operation number.
    pub(crate) ddir: u32,
    /// The priority class.
    pub(crate) prio: Prio,
    /// The offset on the device, in bytes.
    pub(crate) offset: u64,
    /// The address of the data, in fio's buffers.
    pub(crate) buf: usize,
    /// The length in bytes.
    pub(crate) len: u64,
}

impl IoRequest {
    /// Whether offset and length are multiples of a sector.
    #[inline]
    fn is_whole(&self) -> bool {
        (self.offset | self.len) & (SECTOR_BYTES - 1) == 0
    }

    #[inline]
    fn sector(&self) -> Sector {
        Sector(self.offset / SECTOR_BYTES)
    }
}

/// A job's handle to a device. Only the job's thread uses it.
pub(crate) struct FileHandle {
    /// Open from `init` until fio frees its buffers.
    channel: Option<Box<dyn Channel>>,
    /// Whether a panic occurred: the handle is closed permanently, and I/Os in flight are lost.
    broken: bool,
    /// The address and length of fio's buffers, and their region.
    base: usize,
    len_bytes: usize,
    region: RegionId,
    /// The greatest of fio's operation numbers that may be executed inline: that of a write, unless
    /// every write has to be durable.
    ddir_last: u32,
    /// Bios that were pushed and not yet submitted, or found the channel full. fio never has more
    /// in flight than the job's depth, which is the capacity, so there is always room.
    pushed: Vec<Bio>,
    /// Reaped completions; those from `handed` on have not been passed to fio yet.
    ended: Vec<Completion>,
    handed: usize,
    /// A second channel for zone operations, opened on first use.
    control: Option<Io>,
    disk: Arc<dyn Disk>,
}

impl FileHandle {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> FileHandle {
        FileHandle {
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

    /// Opens the channel for a job of this depth, unless it is open.
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

    /// Closes the channel, which then no longer refers to fio's buffers.
    pub(crate) fn close(&mut self) {
        self.channel = None;
        self.base = 0;
        self.len_bytes = 0;
        self.pushed.clear();
    }

    /// Closes the handle permanently, after a panic.
    pub(crate) fn give_up(&mut self) {
        self.broken = true;
        self.close();
        self.control = None;
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Registers fio's buffers with the channel, in place of earlier ones.
    ///
    /// # Safety
    /// The memory must be readable and writable until the next call or until `close`, and no Rust
    /// reference to it may exist while an I/O on it is in flight.
    pub(crate) unsafe fn adopt(&mut self, base: *mut u8, len_bytes: usize) -> Result<(), Status> {
        if self.broken {
            return Ok(());
        }
        let channel = self.channel.as_mut().ok_or(Status::Offline)?;
        // A job that only trims has no buffers.
        let Some(base) = NonNull::new(base) else { return Ok(()) };
        // fio allocates its buffers again only while none of its I/Os is in flight. An I/O in
        // flight is therefore newer, and lies where the old and the new buffers overlap. Then the
        // old region, which owns no memory, stays registered until the channel closes.
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

    /// Executes an I/O inline and returns its status; `None` if it has to be pushed.
    #[inline]
    pub(crate) fn carry(&mut self, asked: &IoRequest) -> Option<Status> {
        // I/Os that were pushed before go first: writes to a zone must stay in order.
        if asked.ddir > self.ddir_last || !asked.is_whole() || !self.pushed.is_empty() {
            return None;
        }
        let op = if asked.ddir == DDIR_READ { Op::Read } else { Op::Write };
        // An address outside the buffers becomes an offset outside the region.
        let offset = asked.buf.wrapping_sub(self.base) as u64;
        let buf = BufRef { region: self.region, offset };
        self.channel.as_mut()?.execute_inline(op, asked.sector(), asked.len / SECTOR_BYTES, buf)
    }

    /// Queues an I/O for the channel: `submit` starts it, and `reap` returns it with its
    /// `user_data`.
    pub(crate) fn push(&mut self, asked: &IoRequest, user_data: u64) -> Result<(), Status> {
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

    /// Submits the pushed bios, as far as the channel has room.
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

    /// Passes up to `max` completions to `out`.
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

    /// The time at which `reap` will next find a completion.
    pub(crate) fn due(&self) -> Due {
        self.channel.as_ref().map_or(Due::Never, |channel| channel.due())
    }

    /// Sleeps until `reap` would find a completion.
    pub(crate) fn wait(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.wait(None);
        }
    }

    /// Waits for the completion of the only I/O, in a job of depth 1.
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

    /// The channel for operations other than the job's own I/Os.
    fn control(&mut self) -> Result<&mut Io, Status> {
        if self.control.is_none() {
            let channel = self.disk.open().map_err(|_| Status::Offline)?;
            self.control = Some(Io::new(channel, CONTROL_BYTES));
        }
        Ok(self.control.as_mut().expect("it was made just now"))
    }

    /// Resets or finishes every sequential zone in a range, in bytes.
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

    /// Writes bytes that are not in fio's buffers.
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

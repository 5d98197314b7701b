//! A job's door to one of its files' devices: a channel, fio's buffers as a region of it, and what
//! waits on either side.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::Channel;
use blockyard_core::completion::Completion;
use blockyard_core::{
    Bio, BufRef, DeviceError, Disk, Due, Flags, Op, Region, RegionId, SECTOR_BYTES, Sector, Status,
};

/// Length of the buffer for writes that do not come from fio's own buffers, in bytes.
const CONTROL_BYTES: usize = 1 << 20;

/// fio's numbers of operations (`enum fio_ddir`).
const DDIR_READ: i32 = 0;
const DDIR_WRITE: i32 = 1;
const DDIR_TRIM: i32 = 2;

/// One I/O as fio asks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// fio's number of the operation.
    pub(crate) ddir: i32,
    /// Where on the device, in bytes.
    pub(crate) offset: u64,
    /// Address of the data, in fio's buffers.
    pub(crate) buf: usize,
    /// How much, in bytes.
    pub(crate) len: u64,
}

/// A job's door to a device. Belongs to the job's thread.
pub(crate) struct Door {
    disk: Arc<dyn Disk>,
    /// Open from `init` until fio frees its buffers.
    channel: Option<Box<dyn Channel>>,
    /// Address of fio's buffers, and the region that they are.
    base: usize,
    region: RegionId,
    /// Of every write: FUA where the job wants each to be durable.
    write_flags: Flags,
    /// What the channel has no room for yet. fio never has more in flight than the job's depth,
    /// which is its capacity.
    waiting: VecDeque<Bio>,
    /// What was reaped, from `handed` on not yet handed out.
    ended: Vec<Completion>,
    handed: usize,
    /// For zones: opened when first asked for.
    control: Option<Io>,
}

impl Door {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Door {
        Door {
            disk,
            channel: None,
            base: 0,
            region: RegionId(0),
            write_flags: Flags::NONE,
            waiting: VecDeque::new(),
            ended: Vec::new(),
            handed: 0,
            control: None,
        }
    }

    pub(crate) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// Opens the channel, for a job of this depth.
    pub(crate) fn open(&mut self, depth: usize, durable: bool) -> Result<(), DeviceError> {
        self.channel = Some(self.disk.open()?);
        self.write_flags = if durable { Flags::FUA } else { Flags::NONE };
        self.waiting.reserve(depth);
        self.ended.reserve(depth);
        Ok(())
    }

    /// Closes the channel, which then refers to fio's buffers no more.
    pub(crate) fn close(&mut self) {
        self.channel = None;
        self.waiting.clear();
    }

    /// Tells the channel of fio's buffers, in place of those that it was told of before.
    ///
    /// # Safety
    /// The memory must be readable and writable until the next call or until `close`, and no Rust
    /// reference to it may exist while an I/O on it is in flight.
    pub(crate) unsafe fn adopt(&mut self, base: *mut u8, len_bytes: usize) {
        let (Some(channel), Some(base)) = (&mut self.channel, NonNull::new(base)) else { return };
        if self.base != 0 {
            // fio makes its buffers anew only when none of its I/O is in flight.
            channel.unregister(self.region);
        }
        // SAFETY: by this function's own contract; the next call forgets the region and `close`
        // drops the channel, which alone holds it.
        let region = unsafe { Region::foreign(base, len_bytes, Box::new(())) };
        self.base = base.as_ptr() as usize;
        self.region = channel.register(region);
    }

    /// The bio of an I/O; `Inval` if it is not whole sectors.
    #[inline]
    fn bio(&self, asked: &Asked, user_data: u64) -> Result<Bio, Status> {
        if (asked.offset | asked.len) & (SECTOR_BYTES - 1) != 0 {
            return Err(Status::Inval);
        }
        let (op, flags) = match asked.ddir {
            DDIR_READ => (Op::Read, Flags::NONE),
            DDIR_WRITE => (Op::Write, self.write_flags),
            DDIR_TRIM => (Op::Discard, Flags::NONE),
            // sync, datasync, sync_file_range.
            _ => return Ok(Bio::flush().with_user_data(user_data)),
        };
        // An address outside the buffers becomes an offset outside the region: the channel checks.
        let offset = asked.buf.wrapping_sub(self.base) as u64;
        let buf = BufRef { region: self.region, offset };
        let bio = Bio::new(op, Sector(asked.offset / SECTOR_BYTES), asked.len / SECTOR_BYTES);
        Ok(bio.with_buf(buf).with_flags(flags).with_user_data(user_data))
    }

    /// Takes an I/O; `submit` starts it.
    #[inline]
    pub(crate) fn push(&mut self, asked: &Asked, user_data: u64) -> Result<(), Status> {
        let bio = self.bio(asked, user_data)?;
        let channel = self.channel.as_mut().ok_or(Status::Offline)?;
        if !self.waiting.is_empty() || channel.push(&[bio]) == 0 {
            self.waiting.push_back(bio);
        }
        Ok(())
    }

    /// Starts what was pushed.
    #[inline]
    pub(crate) fn submit(&mut self) {
        let Some(channel) = &mut self.channel else { return };
        channel.submit();
        if !self.waiting.is_empty() {
            self.feed();
        }
    }

    /// Pushes what waits, as far as there is room.
    #[cold]
    fn feed(&mut self) {
        let Some(channel) = &mut self.channel else { return };
        let pushed = channel.push(self.waiting.make_contiguous());
        self.waiting.drain(..pushed);
        channel.submit();
    }

    /// Hands out up to `max` of what has ended.
    #[inline]
    pub(crate) fn reap(&mut self, max: usize, mut out: impl FnMut(usize, u64, Status)) -> usize {
        if self.handed == self.ended.len() {
            self.ended.clear();
            self.handed = 0;
            let Some(channel) = &mut self.channel else { return 0 };
            channel.reap(&mut self.ended);
            if !self.waiting.is_empty() {
                self.feed();
            }
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

    /// Carries one I/O out, for a job of depth 1.
    #[inline]
    pub(crate) fn now(&mut self, asked: &Asked) -> Status {
        let bio = match self.bio(asked, 0) {
            Ok(bio) => bio,
            Err(status) => return status,
        };
        let Some(channel) = &mut self.channel else { return Status::Offline };
        if channel.push(&[bio]) == 0 {
            return Status::Again;
        }
        channel.submit();
        loop {
            self.ended.clear();
            if channel.reap(&mut self.ended) > 0 {
                return self.ended[0].status;
            }
            channel.wait(None);
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

//! A harness for devices that may refuse requests, because they run out of memory or their file
//! fails. It compares the device with an array of bytes.
//!
//! A request that succeeds has its whole effect. A request that fails may have changed whole units
//! of its range and nothing else; a failed write changed only units before the first that it has
//! not changed.

use std::fmt;
use std::sync::Arc;

use blockyard_core::{
    Bio, BufRef, Channel, DeviceError, Disk, Flags, Op, Region, RegionId, SECTOR_BYTES, Sector,
    Status,
};

/// A device's channel, and the expected contents. Requests are executed one at a time.
pub struct Refusing {
    channel: Box<dyn Channel>,
    region: Arc<Region>,
    id: RegionId,
    wanted: Vec<u8>,
    unit: u64,
    len_max: u64,
}

impl Refusing {
    /// A harness for a device that reads as zeros and changes units of `unit` bytes atomically. No
    /// request is longer than `len_max` bytes.
    ///
    /// # Errors
    /// If the device opens no channel.
    pub fn new(disk: &dyn Disk, unit: u64, len_max: u64) -> Result<Refusing, DeviceError> {
        let mut channel = disk.open()?;
        let region = Region::alloc(len_max as usize);
        let id = channel.register(Arc::clone(&region));
        let wanted = vec![0; (disk.geometry().sectors * SECTOR_BYTES) as usize];
        Ok(Refusing { channel, region, id, wanted, unit, len_max })
    }

    /// Length of the device in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.wanted.len() as u64
    }

    fn run(&mut self, bio: Bio) -> Status {
        let buf = BufRef { region: self.id, offset: 0 };
        assert_eq!(self.channel.push(&[bio.with_buf(buf)]), 1, "nothing else is under way");
        self.channel.submit();
        let mut done = Vec::new();
        while self.channel.reap(&mut done) == 0 {
            self.channel.wait(None);
        }
        done[0].status
    }

    fn fetch(&mut self, at: u64, len: u64) -> Result<Vec<u8>, Status> {
        let bio = Bio::new(Op::Read, Sector::containing(at), len / SECTOR_BYTES);
        match self.run(bio) {
            Status::Ok => {
                let mut data = vec![0; len as usize];
                self.region.read(0, &mut data);
                Ok(data)
            }
            failed => Err(failed),
        }
    }

    /// Reads, and compares with the expected contents.
    ///
    /// # Errors
    /// The status of the read.
    ///
    /// # Panics
    /// If the contents differ.
    pub fn read(&mut self, at: u64, len: u64) -> Result<(), Status> {
        let found = self.fetch(at, len)?;
        let wanted = &self.wanted[at as usize..(at + len) as usize];
        let differs = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
        assert_eq!(differs, None, "in the {len} bytes at {at}");
        Ok(())
    }

    /// Executes a change that makes the contents `data`. After a failed change, call
    /// [`Refusing::adopt`].
    pub fn change(&mut self, op: Op, flags: Flags, at: u64, data: &[u8]) -> Status {
        self.region.write(0, data);
        let len = data.len() as u64;
        let bio = Bio::new(op, Sector::containing(at), len / SECTOR_BYTES).with_flags(flags);
        let status = self.run(bio);
        if status.is_ok() {
            self.wanted[at as usize..(at + len) as usize].copy_from_slice(data);
        }
        status
    }

    /// After a failed change: checks that each unit of the range is either old or new, and makes
    /// the found contents the expected ones.
    ///
    /// # Panics
    /// If a unit is anything else, or cannot be read.
    pub fn adopt(&mut self, op: Op, at: u64, data: &[u8]) {
        let found = match self.fetch(at, data.len() as u64) {
            Ok(found) => found,
            Err(failed) => panic!("what was there before is lost at {at}: {failed}"),
        };
        let (mut from, mut stopped) = (0, false);
        while from < data.len() {
            let start = at + from as u64;
            let unit_end = ((start / self.unit + 1) * self.unit - at) as usize;
            let part = from..unit_end.min(data.len());
            from = part.end;
            let old = &mut self.wanted[start as usize..][..part.len()];
            let (found, new) = (&found[part.clone()], &data[part]);
            assert!(found == new || found == old, "the unit at {start} is neither old nor new");
            let is_made = found == new && found != old;
            let is_out_of_order = op == Op::Write && stopped && is_made;
            assert!(!is_out_of_order, "the unit at {start} was written after one that failed");
            stopped |= found != new;
            old.copy_from_slice(found);
        }
    }

    /// Compares the whole device with the expected contents.
    ///
    /// # Panics
    /// If the contents differ, or cannot be read.
    pub fn compare(&mut self) {
        for at in (0..self.len_bytes()).step_by(self.len_max as usize) {
            let len = self.len_max.min(self.len_bytes() - at);
            assert_eq!(self.read(at, len), Ok(()), "a read of {len} bytes at {at}");
        }
    }

    /// Discards the whole device.
    ///
    /// # Panics
    /// If a discard fails: it needs no memory.
    pub fn discard_all(&mut self) {
        let zeros = vec![0; self.len_max as usize];
        for at in (0..self.len_bytes()).step_by(zeros.len()) {
            let len = self.len_max.min(self.len_bytes() - at) as usize;
            let status = self.change(Op::Discard, Flags::NONE, at, &zeros[..len]);
            assert_eq!(status, Status::Ok, "a discard of {len} bytes at {at}");
        }
    }
}

impl fmt::Debug for Refusing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len_bytes = self.len_bytes();
        f.debug_struct("Refusing").field("len_bytes", &len_bytes).finish_non_exhaustive()
    }
}

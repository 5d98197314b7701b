//! The blocking adapter: one call executes one I/O and waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bio::{Bio, BufRef, Flags, Op, RegionId};
use crate::bio::{Completion, Status};
use crate::channel::Channel;
use crate::device::Due;
use crate::region::Region;
use crate::units::{SECTOR_BYTES, Sector};

/// A channel with its own buffer, which executes one I/O at a time.
pub struct Io {
    channel: Box<dyn Channel>,
    region: Arc<Region>,
    region_id: RegionId,
    done: Vec<Completion>,
    /// The number of the next bio. By it `run` ignores a late completion of a bio that timed out.
    next: u64,
    timeout: Option<Duration>,
}

impl Io {
    /// Takes ownership of the channel. `len_bytes_max` bounds the length of one call, in bytes.
    ///
    /// # Panics
    /// If `len_bytes_max` is 0.
    pub fn new(mut channel: Box<dyn Channel>, len_bytes_max: usize) -> Io {
        let region = Region::alloc(len_bytes_max);
        let region_id = channel.register(Arc::clone(&region));
        Io { channel, region, region_id, done: Vec::with_capacity(4), next: 0, timeout: None }
    }

    /// Returns the adapter with a timeout per call. A call that exceeds `timeout` fails with
    /// `TIMEOUT`; its bio stays in flight.
    pub fn with_timeout(mut self, timeout: Duration) -> Io {
        self.timeout = Some(timeout);
        self
    }

    /// The adapter's buffer, for callers that fill it themselves.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// A reference to the start of the adapter's buffer, for a bio that the caller builds.
    pub fn buffer(&self) -> BufRef {
        BufRef { region: self.region_id, offset: 0 }
    }

    /// Executes one bio and returns the sector at which its data landed. Replaces the bio's user
    /// data.
    ///
    /// # Errors
    /// The bio's status, if it is not OK.
    pub fn run(&mut self, bio: Bio) -> Result<Sector, Status> {
        self.next += 1;
        // The adapter has one bio in flight at a time, so the channel has space for it unless many
        // bios have timed out.
        if self.channel.push(&[bio.with_user_data(self.next)]) == 0 {
            return Err(Status::Again);
        }
        self.channel.submit();
        let deadline = self.timeout.map(|timeout| Instant::now() + timeout);
        loop {
            self.done.clear();
            self.channel.reap(&mut self.done);
            if let Some(end) = self.done.iter().find(|end| end.user_data == self.next) {
                return if end.status.is_ok() { Ok(end.sector) } else { Err(end.status) };
            }
            let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if late || (self.done.is_empty() && self.channel.due() == Due::Never) {
                return Err(Status::Timeout);
            }
            self.channel.wait(deadline);
        }
    }

    /// Reads whole sectors, starting at `sector`.
    ///
    /// # Errors
    /// The read's status; `INVAL` if the buffer is not whole sectors or longer than the adapter's.
    pub fn read(&mut self, sector: Sector, into: &mut [u8]) -> Result<(), Status> {
        let bio = self.data_bio(Op::Read, sector, into.len())?;
        self.run(bio)?;
        self.region.read(0, into);
        Ok(())
    }

    /// Writes whole sectors at `sector`.
    ///
    /// # Errors
    /// As for [`Io::read`].
    pub fn write(&mut self, sector: Sector, from: &[u8], flags: Flags) -> Result<(), Status> {
        let bio = self.data_bio(Op::Write, sector, from.len())?.with_flags(flags);
        self.region.write(0, from);
        self.run(bio).map(drop)
    }

    /// Appends whole sectors to the zone that starts at `zone_start`; returns the first sector of
    /// the data.
    ///
    /// # Errors
    /// As for [`Io::read`].
    pub fn append(&mut self, zone_start: Sector, from: &[u8]) -> Result<Sector, Status> {
        let bio = self.data_bio(Op::ZoneAppend, zone_start, from.len())?;
        self.region.write(0, from);
        self.run(bio)
    }

    fn data_bio(&self, op: Op, sector: Sector, len_bytes: usize) -> Result<Bio, Status> {
        let whole = (len_bytes as u64).is_multiple_of(SECTOR_BYTES);
        if !whole || len_bytes > self.region.len_bytes() {
            return Err(Status::Inval);
        }
        Ok(Bio::new(op, sector, len_bytes as u64 / SECTOR_BYTES).with_buf(self.buffer()))
    }
}

//! One thread's way to the files: a channel of the device with a buffer of its own.

use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::{Bio, BufRef, Disk, Flags, Op, Region, Sector, Status};

use crate::error::{Problem, ZoneFsError};

/// Length of the buffer in bytes: a longer read or write goes in pieces.
pub(crate) const BUFFER_BYTES: usize = 1 << 20;

/// One thread's way to the files of a file system.
///
/// What a thread reads and writes goes through the door's own channel and buffer, so that threads
/// share nothing above the device but the file they work on.
pub struct Door {
    io: Io,
}

impl Door {
    pub(crate) fn open(disk: &dyn Disk) -> Result<Door, ZoneFsError> {
        let channel = disk.open().map_err(|error| ZoneFsError::new(disk.name(), error))?;
        Ok(Door { io: Io::new(channel, BUFFER_BYTES) })
    }

    /// The buffer, for callers that fill it themselves and then append what is in it.
    pub fn buffer(&self) -> &Arc<Region> {
        self.io.region()
    }

    /// Carries out an operation without data.
    pub(crate) fn run(&mut self, op: Op, sector: Sector) -> Result<(), Status> {
        self.io.run(Bio::new(op, sector, 0)).map(drop)
    }

    /// Moves `sectors` between the device and the buffer, from the buffer's byte `at` on, and says
    /// where on the device that was.
    pub(crate) fn transfer(
        &mut self,
        op: Op,
        sector: Sector,
        sectors: u64,
        at: usize,
        flags: Flags,
    ) -> Result<Sector, Status> {
        let BufRef { region, offset } = self.io.buffer();
        let buf = BufRef { region, offset: offset + at as u64 };
        self.io.run(Bio::new(op, sector, sectors).with_buf(buf).with_flags(flags))
    }

    /// Reads bytes of the device from its start on, whole sectors.
    pub(crate) fn load(
        &mut self,
        sector: Sector,
        into: &mut [u8],
        what: &'static str,
    ) -> Result<(), Problem> {
        self.io.read(sector, into).map_err(|status| Problem::Io { what, status })
    }
}

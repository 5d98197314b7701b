//! Per-thread access to the files: a channel of the device with its own buffer.

use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::{Bio, BufRef, Disk, Flags, Op, Region, Sector, Status};

use crate::error::{Problem, ZoneFsError};

/// Length of the buffer in bytes: longer reads and writes are split.
pub(crate) const BUFFER_BYTES: usize = 1 << 20;

/// One thread's access to the files of a file system.
///
/// All data of a thread pass through the channel and buffer of its `IoHandle`. So threads share
/// nothing above the device except the files they work on.
pub struct IoHandle {
    io: Io,
}

impl IoHandle {
    pub(crate) fn open(disk: &dyn Disk) -> Result<IoHandle, ZoneFsError> {
        let channel = disk.open().map_err(|error| ZoneFsError::new(disk.name(), error))?;
        Ok(IoHandle { io: Io::new(channel, BUFFER_BYTES) })
    }

    /// The buffer, for callers that fill it directly and then append its contents.
    pub fn buffer(&self) -> &Arc<Region> {
        self.io.region()
    }

    /// Executes an operation without data.
    pub(crate) fn run(&mut self, op: Op, sector: Sector) -> Result<(), Status> {
        self.io.run(Bio::new(op, sector, 0)).map(drop)
    }

    /// Transfers `sectors` between the device and the buffer, from byte `at` of the buffer on.
    /// Returns the sector on the device.
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

    /// Reads whole sectors of the device into `into`.
    pub(crate) fn load(
        &mut self,
        sector: Sector,
        into: &mut [u8],
        what: &'static str,
    ) -> Result<(), Problem> {
        self.io.read(sector, into).map_err(|status| Problem::Io { what, status })
    }
}

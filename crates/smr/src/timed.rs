//! A disk with the timing of a real drive: a model of the drive on top of a fast transport.
//!
//! A command takes effect when it is executed; only its completion waits until the model says that
//! the drive would be done. The commands of all channels share one arm.
#![allow(clippy::disallowed_types)] // One arm, used only with a timing model.

use std::sync::{Mutex, PoisonError};

use blockyard_core::inject::Injection;
use blockyard_core::{DeviceError, Extent, Nanos, Sector};

use crate::cdb::{Blocks, Command};
use crate::config::DiskConfig;
use crate::timing::{AccessKind, DriveTimes, Timing};
use crate::transport::{Data, Outcome, ScsiTransport, TransportError};

/// A transport whose completions are delayed by a model of a drive.
#[derive(Debug)]
pub struct Timed<T> {
    inner: T,
    arm: Mutex<Timing>,
    block_bytes: u64,
    /// End of the conventional zones, in bytes.
    conventional_end: u64,
}

impl<T: ScsiTransport> Timed<T> {
    /// A disk of this configuration with the timing of a drive. Without a write cache no write is
    /// buffered.
    pub fn new(inner: T, config: &DiskConfig, times: DriveTimes) -> Timed<T> {
        let write_buffer_bytes = if config.write_cache { times.write_buffer_bytes } else { 0 };
        let times = DriveTimes { write_buffer_bytes, ..times };
        Timed {
            inner,
            arm: Mutex::new(Timing::new(times, config.size)),
            block_bytes: config.logical_block.into(),
            conventional_end: config.zone_size * u64::from(config.zone_nr_conv),
        }
    }

    /// The access that a command makes: its kind, first byte and length.
    fn access(&self, cdb: &[u8]) -> (AccessKind, u64, u64) {
        let range = |blocks: Blocks| {
            // A range beyond the medium is refused before the arm moves.
            let offset = blocks.lba.saturating_mul(self.block_bytes);
            (offset, u64::from(blocks.count) * self.block_bytes)
        };
        let write = |blocks, fua| {
            let (offset, len) = range(blocks);
            let conventional = offset < self.conventional_end;
            (AccessKind::Write { fua, conventional }, offset, len)
        };
        match Command::parse(cdb) {
            Ok(Command::Read { blocks, .. }) => {
                let (offset, len) = range(blocks);
                (AccessKind::Read, offset, len)
            }
            Ok(Command::Write { blocks, fua, .. }) => write(blocks, fua),
            Ok(Command::WriteSame { blocks, .. }) => write(blocks, false),
            Ok(Command::SynchronizeCache { .. }) => (AccessKind::Flush, 0, 0),
            _ => (AccessKind::Other, 0, 0),
        }
    }
}

impl<T: ScsiTransport> ScsiTransport for Timed<T> {
    fn execute(&self, cdb: &[u8], data: Data<'_>) -> Result<Outcome, TransportError> {
        self.inner.execute(cdb, data)
    }

    fn due(&self, now: Nanos, cdb: &[u8]) -> Nanos {
        let (access, offset, len) = self.access(cdb);
        // The model is consistent between calls, even after a panic.
        let mut arm = self.arm.lock().unwrap_or_else(PoisonError::into_inner);
        Nanos(arm.done_at(access, offset, len, now.0))
    }

    fn is_immediate(&self) -> bool {
        false
    }

    fn bytes_max(&self) -> usize {
        self.inner.bytes_max()
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        self.inner.extent(from, sectors)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.inner.inject(injection)
    }
}

//! A disk that takes its time: the model of a drive beside a transport that answers at once.
//!
//! The effects of a command are there when it has been executed; only its completion waits until
//! the model says that the drive would be done. Commands of all channels move one arm.
#![allow(clippy::disallowed_types)] // There is one arm, asked only where time is modelled.

use std::sync::{Mutex, PoisonError};

use blockyard_core::inject::Injection;
use blockyard_core::{DeviceError, Nanos};

use crate::cdb::{Blocks, Command};
use crate::config::DiskConfig;
use crate::timing::{Access, DriveTimes, Timing};
use crate::transport::{Data, Outcome, ScsiTransport, TransportError};

/// See the module.
#[derive(Debug)]
pub struct Timed<T> {
    inner: T,
    arm: Mutex<Timing>,
    block_bytes: u64,
    /// Where sequential zones begin, in bytes.
    conventional_end: u64,
}

impl<T: ScsiTransport> Timed<T> {
    /// A disk of this configuration, as fast as a drive with these times. Without a write cache
    /// nothing is buffered.
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

    /// What a command does to the drive: how, from which byte on, and how many of them.
    fn access(&self, cdb: &[u8]) -> (Access, u64, u64) {
        let range = |blocks: Blocks| {
            // A range beyond the medium is refused before the arm moves.
            let offset = blocks.lba.saturating_mul(self.block_bytes);
            (offset, u64::from(blocks.count) * self.block_bytes)
        };
        let write = |blocks, fua| {
            let (offset, len) = range(blocks);
            let conventional = offset < self.conventional_end;
            (Access::Write { fua, conventional }, offset, len)
        };
        match Command::parse(cdb) {
            Ok(Command::Read { blocks, .. }) => {
                let (offset, len) = range(blocks);
                (Access::Read, offset, len)
            }
            Ok(Command::Write { blocks, fua, .. }) => write(blocks, fua),
            Ok(Command::WriteSame { blocks, .. }) => write(blocks, false),
            Ok(Command::SynchronizeCache { .. }) => (Access::Flush, 0, 0),
            _ => (Access::Other, 0, 0),
        }
    }
}

impl<T: ScsiTransport> ScsiTransport for Timed<T> {
    fn execute(&self, cdb: &[u8], data: Data<'_>) -> Result<Outcome, TransportError> {
        self.inner.execute(cdb, data)
    }

    fn due(&self, now: Nanos, cdb: &[u8]) -> Nanos {
        let (access, offset, len) = self.access(cdb);
        // The model is whole between two calls, whoever panicked.
        let mut arm = self.arm.lock().unwrap_or_else(PoisonError::into_inner);
        Nanos(arm.done_at(access, offset, len, now.0))
    }

    fn is_immediate(&self) -> bool {
        false
    }

    fn bytes_max(&self) -> usize {
        self.inner.bytes_max()
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.inner.inject(injection)
    }
}

//! The first message of a connection, which negotiates with the kernel.
#![allow(clippy::disallowed_types)] // Mounting is control plane.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use fuser::{Filesystem, InitFlags, KernelConfig, Request};

use crate::memory::IO_BYTES_MAX;
use crate::ring::{self, Prepared};

/// The number of asynchronous requests that the kernel sends at once; its default is too low.
const BACKGROUND_MAX: u16 = 256;
/// The number of these from which the kernel considers the file system congested.
const CONGESTED: u16 = 192;

/// The rings that the handshake makes if the kernel offers io_uring.
#[derive(Default)]
pub(crate) struct Rings {
    /// The number of threads, and so of rings; 0 makes none.
    threads: usize,
    prepared: Mutex<Vec<Prepared>>,
}

impl Rings {
    pub(crate) fn wanted(threads: usize) -> Arc<Rings> {
        Arc::new(Rings { threads: threads.max(1), prepared: Mutex::default() })
    }

    pub(crate) fn unwanted() -> Arc<Rings> {
        Arc::default()
    }

    /// Takes the rings; none if io_uring is not used.
    pub(crate) fn take(&self) -> Vec<Prepared> {
        std::mem::take(&mut self.prepared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Accepts io_uring if the rings can be made: after accepting, the kernel waits for them.
    fn negotiate(&self, config: &mut KernelConfig) {
        let offered = config.capabilities().contains(InitFlags::FUSE_OVER_IO_URING);
        if !offered || self.threads == 0 {
            tracing::debug!(offered, "no FUSE over io_uring");
            return;
        }
        match ring::prepare(self.threads) {
            Ok(rings) => {
                if config.add_capabilities(InitFlags::FUSE_OVER_IO_URING).is_ok() {
                    *self.prepared.lock().unwrap_or_else(PoisonError::into_inner) = rings;
                }
            }
            Err(error) => tracing::warn!(
                %error, "the kernel offers FUSE over io_uring, but no ring can be made"
            ),
        }
    }
}

/// Answers the first message. The serving threads answer all later ones.
pub(crate) struct Handshake {
    rings: Arc<Rings>,
}

impl Handshake {
    pub(crate) fn new(rings: Arc<Rings>) -> Handshake {
        Handshake { rings }
    }
}

impl Filesystem for Handshake {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            // Parallel direct I/O.
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            // mmap of a file that is otherwise not cached.
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                tracing::debug!(?flag, "this kernel's FUSE has it not");
            }
        }
        let io_max = IO_BYTES_MAX as u32;
        let refused = |what| io::Error::other(format!("fuse: {what} out of range"));
        config.set_max_write(io_max).map_err(|_| refused("max_write"))?;
        // An error means that the kernel's own limit is lower.
        let _ = config.set_max_readahead(io_max);
        config.set_max_background(BACKGROUND_MAX).map_err(|_| refused("max_background"))?;
        config.set_congestion_threshold(CONGESTED).map_err(|_| refused("congestion threshold"))?;
        self.rings.negotiate(config);
        Ok(())
    }
}

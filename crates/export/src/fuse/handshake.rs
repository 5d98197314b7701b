//! The first message of a connection: what is agreed upon with the kernel.
#![allow(clippy::disallowed_types)] // Mounting is control plane.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use fuser::{Filesystem, InitFlags, KernelConfig, Request};

use crate::fuse::memory::IO_BYTES_MAX;
use crate::fuse::ring::{self, Prepared};

/// Requests of asynchronous I/O that the kernel sends at once; its default would hold them back.
const BACKGROUND_MAX: u16 = 256;
/// From so many on it thinks of us as busy.
const CONGESTED: u16 = 192;

/// Rings that the handshake makes where the kernel offers to use them.
#[derive(Default)]
pub(crate) struct Rings {
    /// For how many threads; 0 makes none.
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

    /// What was agreed upon: no rings, if there are to be none.
    pub(crate) fn take(&self) -> Vec<Prepared> {
        std::mem::take(&mut self.prepared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Asks for rings if they can be had: once the kernel is told, it waits for them.
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

/// Answers the first message. Whatever comes afterwards is the threads' own.
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
            // Direct I/O in parallel.
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
        // An error means that the kernel's own limit is below.
        let _ = config.set_max_readahead(io_max);
        config.set_max_background(BACKGROUND_MAX).map_err(|_| refused("max_background"))?;
        config.set_congestion_threshold(CONGESTED).map_err(|_| refused("congestion threshold"))?;
        self.rings.negotiate(config);
        Ok(())
    }
}

//! io_uring: a ring for one thread, and the files that it knows by number.

pub(crate) mod files;
pub(crate) mod writes;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blockyard_sync::bell::Caller;
use io_uring::{IoUring, opcode};
use rustix::event::{EventfdFlags, eventfd};

/// The operations that are used.
const NEEDED: [u8; 5] = [
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Read::CODE,
    opcode::PollAdd::CODE,
    opcode::FilesUpdate::CODE,
];

/// A ring with room for so many submissions, to be used by the calling thread alone.
pub(crate) fn open(entries: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    match builder.build(entries) {
        // Before Linux 6.1.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        result => result,
    }
}

/// Whether the system lets this process use rings, with everything that is needed of them.
///
/// # Errors
/// Why not.
pub(crate) fn probe() -> io::Result<()> {
    let ring = open(4)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    match NEEDED.iter().find(|code| !probe.is_supported(**code)) {
        Some(code) => {
            Err(io::Error::other(format!("the kernel does not know operation {code} of io_uring")))
        }
        None => Ok(()),
    }
}

/// What is written to wakes who waits for a ring, or polls.
#[derive(Clone, Debug)]
pub(crate) struct Doorbell(Arc<OwnedFd>);

impl Doorbell {
    /// A silent one.
    pub(crate) fn new() -> io::Result<Doorbell> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Doorbell(Arc::new(eventfd(0, flags)?)))
    }

    /// Who is called rings.
    pub(crate) fn caller(&self) -> Caller {
        let own = self.clone();
        Caller::new(move || own.ring())
    }

    /// Rings.
    pub(crate) fn ring(&self) {
        // Full is rung as well.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes it silent.
    pub(crate) fn hush(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    pub(crate) fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

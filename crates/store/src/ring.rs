//! io_uring: a ring for one thread, and its registered files.

pub(crate) mod files;
pub(crate) mod reads;
pub(crate) mod writes;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::event_count::Waker;
use io_uring::{IoUring, opcode};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

/// The operations that are used.
const NEEDED: [u8; 5] = [
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Read::CODE,
    opcode::PollAdd::CODE,
    opcode::FilesUpdate::CODE,
];

/// Which threads use a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Only the thread that opens it.
    Thread,
    /// Any thread, one at a time.
    AnyThread,
}

/// Opens a ring with this number of submission entries.
pub(crate) fn open(entries: u32, owner: Owner) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    match owner {
        Owner::Thread => builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag(),
        Owner::AnyThread => builder.setup_coop_taskrun().setup_taskrun_flag(),
    };
    match builder.build(entries) {
        // Linux before 6.1 does not have these flags.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        result => result,
    }
}

/// Checks that the system allows rings to this process, with all operations that are needed.
///
/// # Errors
/// The reason why not.
pub(crate) fn probe() -> io::Result<()> {
    let ring = open(4, Owner::AnyThread)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    match NEEDED.iter().find(|code| !probe.is_supported(**code)) {
        Some(code) => {
            Err(io::Error::other(format!("the kernel does not know operation {code} of io_uring")))
        }
        None => Ok(()),
    }
}

/// An eventfd: writing to it wakes a thread that waits for a ring, or polls.
#[derive(Clone, Debug)]
pub struct EventFd(Arc<OwnedFd>);

impl EventFd {
    /// An eventfd that is not signalled.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn new() -> io::Result<EventFd> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(EventFd(Arc::new(eventfd(0, flags)?)))
    }

    /// A waker that signals this eventfd.
    pub fn waker(&self) -> Waker {
        let own = self.clone();
        Waker::new(move || own.notify())
    }

    /// Signals the eventfd.
    pub(crate) fn notify(&self) {
        // A full counter wakes the waiter as well.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Resets the eventfd.
    #[inline]
    pub fn reset(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    /// Sleeps until it is signalled, or `at_most` has passed.
    pub fn wait(&self, at_most: Duration) {
        let mut entry = [PollFd::new(&self.0, PollFlags::IN)];
        let time = Timespec::try_from(at_most).ok();
        // On a signal, or a lack of memory, the caller checks again.
        let _ = rustix::event::poll(&mut entry, time.as_ref());
    }

    pub(crate) fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.raw()
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

//! Reply tokens: send the reply to a request, at any time and on any thread.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use fuser::Errno;

use crate::fuse::ring::home::Home;
use crate::fuse::wire;

/// The obligation to answer one request. Dropped unanswered, it answers `EIO`.
#[derive(Debug)]
pub(crate) struct Ticket {
    unique: u64,
    /// `None` once the request is answered.
    way: Option<Way>,
}

/// The path of the reply to the kernel.
#[derive(Debug)]
pub(crate) enum Way {
    /// A write to the device from which the request was read.
    Device(Arc<OwnedFd>),
    /// The memory of a ring's entry, which the ring's thread commits.
    Ring(Arc<Home>, u16),
}

impl Ticket {
    pub(crate) fn new(unique: u64, way: Way) -> Ticket {
        Ticket { unique, way: Some(way) }
    }

    /// Answers with data.
    pub(crate) fn data(mut self, data: &[u8]) {
        self.tell(Ok(data));
    }

    /// Answers a write.
    pub(crate) fn written(mut self, len: u32) {
        self.tell(Ok(&wire::write_out(len)));
    }

    /// Answers with success.
    pub(crate) fn ok(mut self) {
        self.tell(Ok(&[]));
    }

    /// Answers with an error.
    pub(crate) fn fail(mut self, errno: Errno) {
        self.tell(Err(errno));
    }

    fn tell(&mut self, answer: Result<&[u8], Errno>) {
        match self.way.take() {
            None => {}
            Some(Way::Device(device)) => answer_by_device(&device, self.unique, answer),
            Some(Way::Ring(home, entry)) => home.answer(entry, self.unique, answer),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.tell(Err(Errno::EIO));
    }
}

/// Writes a reply to the device.
#[inline]
pub(crate) fn answer_by_device(device: &OwnedFd, unique: u64, answer: Result<&[u8], Errno>) {
    let (error, data) = match answer {
        Ok(data) => (0, data),
        Err(errno) => (errno.code(), &[][..]),
    };
    let header = wire::out_header(unique, error, data.len());
    let parts = [IoSlice::new(&header), IoSlice::new(data)];
    // The kernel accepts a reply completely. It no longer knows a request that was interrupted, or
    // one of a mount that has ended.
    if let Err(error) = rustix::io::writev(device, &parts)
        && !matches!(error, rustix::io::Errno::NOENT | rustix::io::Errno::NODEV)
    {
        let error = io::Error::from(error);
        tracing::warn!(unique, %error, "the kernel refused an answer");
    }
}

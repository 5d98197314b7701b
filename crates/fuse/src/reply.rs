//! Reply tokens: send the reply to a request, at any time and on any thread.
//!
//! A request that was read from `/dev/fuse` is answered by a write to it. A request in an entry of
//! a ring is answered by the ring's thread, because only one thread may submit to a ring. Workers
//! pass replies to that thread through a [`ReplyQueue`].

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use fuser::Errno;

use crate::ring::entries::EntryMemory;
use crate::wire;

/// The obligation to answer one request. Dropped unanswered, it answers `EIO`.
#[derive(Debug)]
pub(crate) struct ReplyToken {
    unique: u64,
    /// `None` once the request is answered.
    path: Option<ReplyPath>,
}

/// The path of the reply to the kernel.
#[derive(Debug)]
pub(crate) enum ReplyPath {
    /// A write to the device from which the request was read.
    Device(Arc<OwnedFd>),
    /// The memory of a ring's entry, which the ring's thread commits.
    Ring(Arc<ReplyQueue>, u16),
}

impl ReplyToken {
    pub(crate) fn new(unique: u64, path: ReplyPath) -> ReplyToken {
        ReplyToken { unique, path: Some(path) }
    }

    /// Answers with data.
    pub(crate) fn data(mut self, data: &[u8]) {
        self.reply(Ok(data));
    }

    /// Answers a write.
    pub(crate) fn written(mut self, len: u32) {
        self.reply(Ok(&wire::write_out(len)));
    }

    /// Answers with success.
    pub(crate) fn ok(mut self) {
        self.reply(Ok(&[]));
    }

    /// Answers with an error.
    pub(crate) fn fail(mut self, errno: Errno) {
        self.reply(Err(errno));
    }

    fn reply(&mut self, answer: Result<&[u8], Errno>) {
        match self.path.take() {
            None => {}
            Some(ReplyPath::Device(device)) => reply_by_device(&device, self.unique, answer),
            Some(ReplyPath::Ring(queue, entry)) => queue.answer(entry, self.unique, answer),
        }
    }
}

impl Drop for ReplyToken {
    fn drop(&mut self) {
        self.reply(Err(Errno::EIO));
    }
}

/// Writes a reply to the device.
#[inline]
pub(crate) fn reply_by_device(device: &OwnedFd, unique: u64, answer: Result<&[u8], Errno>) {
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

/// The queue to which workers send their replies.
#[derive(Debug)]
pub(crate) struct ReplyQueue {
    memory: EntryMemory,
    answered: Sender<u16>,
    /// The eventfd that wakes the thread that waits for its ring.
    event_fd: OwnedFd,
}

impl ReplyQueue {
    pub(crate) fn new(memory: EntryMemory, answered: Sender<u16>, event_fd: OwnedFd) -> ReplyQueue {
        ReplyQueue { memory, answered, event_fd }
    }

    pub(crate) fn event_fd(&self) -> &OwnedFd {
        &self.event_fd
    }

    /// Writes a reply into an entry and has the thread commit it.
    pub(crate) fn answer(&self, entry: u16, unique: u64, answer: Result<&[u8], Errno>) {
        self.memory.put(entry, unique, answer);
        // A thread that has ended has no connection for the reply.
        if self.answered.send(entry).is_ok() {
            // A full counter wakes the thread too.
            let _ = rustix::io::write(&self.event_fd, &1_u64.to_ne_bytes());
        }
    }

    /// Clears the eventfd.
    pub(crate) fn clear_event(&self) {
        let _ = rustix::io::read(&self.event_fd, &mut [0; 8]);
    }
}

//! Serving through `/dev/fuse`: a thread reads one request at a time, and writes its reply.
#![allow(unsafe_code)] // Messages are read into the region that devices read and write.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use blockyard_core::Region;

use crate::files::DEVICE;
use crate::memory::{self, BUFFER_BYTES};
use crate::reply::{ReplyPath, ReplyToken, reply_by_device};
use crate::server::{MountServer, Served, ThreadContext};
use crate::wire::{Call, Header, IN_HEADER_BYTES, Out, WRITE_IN_BYTES};

/// `FUSE_DEV_IOC_CLONE` of `linux/fuse.h`: `_IOR(229, 0, uint32_t)`.
const CLONE: libc::Ioctl = 0x8004_e500_u32 as libc::Ioctl;

/// The bytes that are read before the data of a write, so that the data begin where the region
/// does.
const HEAD_BYTES: usize = IN_HEADER_BYTES + WRITE_IN_BYTES;

/// The longest message that must be contiguous: a name and the headers before it.
const MESSAGE_BYTES_MAX: usize = 4096;

/// A further queue for the connection of another descriptor. `None` where the device cannot be
/// opened again, as some systems refuse it to users; then all threads share one queue.
pub(crate) fn clone_queue(of: &OwnedFd) -> Option<OwnedFd> {
    let queue: OwnedFd = OpenOptions::new().read(true).write(true).open(DEVICE).ok()?.into();
    let source: u32 = of.as_raw_fd() as u32;
    // SAFETY: the call reads one number through the pointer, which is valid for it.
    let result = unsafe { libc::ioctl(queue.as_raw_fd(), CLONE, &raw const source) };
    (result == 0).then_some(queue)
}

/// A serving thread.
pub(crate) struct DeviceThread {
    server: Arc<MountServer>,
    thread_no: usize,
    queue: Arc<OwnedFd>,
    region: Arc<Region>,
    out: Out,
}

impl DeviceThread {
    /// A thread with the number `thread_no` in the mount, which reads from the queue.
    ///
    /// # Errors
    /// If there is no memory.
    pub(crate) fn new(
        server: Arc<MountServer>,
        thread_no: usize,
        queue: Arc<OwnedFd>,
    ) -> io::Result<DeviceThread> {
        let region = blockyard_os::map_region(BUFFER_BYTES as usize)?;
        Ok(DeviceThread { server, thread_no, queue, region, out: Out::default() })
    }

    /// Serves until the mount ends.
    pub(crate) fn serve(mut self) {
        let mut head = [0; HEAD_BYTES];
        loop {
            // SAFETY: between two requests nothing is in flight in the region, and no worker reads
            // it: the data that a worker needs were copied when it got the request.
            let got = unsafe {
                let queue = self.queue.as_fd();
                memory::receive(queue, &mut head, &self.region, 0, BUFFER_BYTES)
            };
            match got {
                Ok(len) => self.answer(&head, len),
                Err(error) => match error.raw_os_error() {
                    // The program that made the request was interrupted, or a signal came.
                    Some(libc::ENOENT | libc::EINTR | libc::EAGAIN) => {}
                    Some(libc::ENODEV) => return,
                    _ => return tracing::error!(%error, "cannot read requests for files"),
                },
            }
        }
    }

    fn answer(&mut self, head: &[u8; HEAD_BYTES], len: usize) {
        let Some(header) = Header::parse(&head[..len.min(HEAD_BYTES)]) else { return };
        let data_len = len.saturating_sub(HEAD_BYTES) as u64;
        let mut message = [0; MESSAGE_BYTES_MAX];
        let body = if header.is_write() || data_len == 0 {
            &head[IN_HEADER_BYTES..len.min(HEAD_BYTES)]
        } else {
            // A longer message is of a call that is unknown here, so its rest does not matter.
            let more = data_len.min((MESSAGE_BYTES_MAX - HEAD_BYTES) as u64) as usize;
            message[..HEAD_BYTES].copy_from_slice(head);
            self.region.read(0, &mut message[HEAD_BYTES..HEAD_BYTES + more]);
            &message[IN_HEADER_BYTES..HEAD_BYTES + more]
        };
        let call = Call::of_body(&header, body);
        let context = ThreadContext { thread_no: self.thread_no, region: &self.region, at: 0 };
        self.out.clear();
        let token = || ReplyToken::new(header.unique, ReplyPath::Device(Arc::clone(&self.queue)));
        let served = self.server.serve(&context, &header, call, data_len, &mut self.out, token);
        let answer = match served {
            Served::Printed => Ok(self.out.bytes()),
            // SAFETY: the read into this range has completed, and nothing else is in flight in the
            // region.
            Served::Region(at, len) => Ok(unsafe { memory::bytes(&self.region, at, len) }),
            Served::Failed(errno) => Err(errno),
            Served::Later | Served::Silent => return,
        };
        reply_by_device(&self.queue, header.unique, answer);
    }
}

//! The handling of a request by a serving thread, common to both transports.
#![allow(unsafe_code)] // The data of a write are read where the kernel put them.
#![allow(clippy::disallowed_types)] // The lock of `SessionEnd` is control plane.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use blockyard_core::{Flags, Region};
use fuser::Errno;

use crate::file_system::FileSystem;
use crate::files::{DeviceHandle, InlineResult, ThreadHandles};
use crate::memory::{self, IO_BYTES_MAX};
use crate::reply::ReplyToken;
use crate::wire::{self, Call, Header, Out};
use crate::worker::FileOperation;

/// Whether the session has ended, and the threads that wait for it.
#[derive(Debug, Default)]
pub(crate) struct SessionEnd(Mutex<bool>, Condvar);

impl SessionEnd {
    pub(crate) fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.1.notify_all();
    }

    pub(crate) fn within(&self, time: Duration) -> bool {
        let ended = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.1.wait_timeout_while(ended, time, |ended| !*ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The state that the threads of a mount share. The last thread that ends drops it.
pub(crate) struct MountServer {
    pub(crate) file_system: FileSystem,
    pub(crate) handles: Arc<ThreadHandles>,
    pub(crate) ended: Arc<SessionEnd>,
}

impl Drop for MountServer {
    fn drop(&mut self) {
        self.ended.set();
    }
}

/// The result of handling a request.
pub(crate) enum Served {
    /// The printed bytes are the reply.
    Printed,
    /// The reply's data are in the thread's region: offset and length.
    Region(u64, u64),
    /// The error is the reply.
    Failed(Errno),
    /// A worker has the request's reply token.
    Later,
    /// The request needs no reply.
    Silent,
}

/// The handles and memory of a serving thread.
pub(crate) struct ThreadContext<'t> {
    /// The number of the thread in its mount.
    pub(crate) thread_no: usize,
    /// The thread's region.
    pub(crate) region: &'t Arc<Region>,
    /// The offset of the request's buffer in the region, for the data of a write or a read. It has
    /// room for the longest request and the blocks around it.
    pub(crate) at: u64,
}

impl MountServer {
    /// Answers a request, or passes it to a worker with a reply token. The call is `None` if it is
    /// invalid. For a write `data_len` bytes have been received.
    #[inline]
    pub(crate) fn serve(
        &self,
        context: &ThreadContext<'_>,
        header: &Header,
        call: Option<Call<'_>>,
        data_len: u64,
        out: &mut Out,
        token: impl FnOnce() -> ReplyToken,
    ) -> Served {
        match call {
            Some(Call::Read { offset, len }) => {
                self.execute(context, header.node, 0, token, |handle| {
                    handle.read(offset, len.into(), context.at)
                })
            }
            Some(Call::Write { offset, len, flags }) => {
                if u64::from(len) > data_len {
                    return Served::Failed(Errno::EINVAL);
                }
                let write = |handle: &mut DeviceHandle| {
                    // O_SYNC includes O_DSYNC.
                    let durable = flags & libc::O_DSYNC != 0;
                    let flags = if durable { Flags::FUA } else { Flags::NONE };
                    handle.write(offset, len.into(), flags, context.at)
                };
                match self.execute(context, header.node, len.into(), token, write) {
                    Served::Region(_, written) => {
                        out.raw(&wire::write_out(written as u32));
                        Served::Printed
                    }
                    other => other,
                }
            }
            Some(Call::Fsync) => self.execute(context, header.node, 0, token, |_| {
                InlineResult::Later(FileOperation::Flush)
            }),
            Some(Call::Fallocate { offset, len, mode }) => {
                self.execute(context, header.node, 0, token, |handle| {
                    handle.zero(offset, len, mode)
                })
            }
            Some(Call::Forget) => Served::Silent,
            Some(call) => match self.file_system.answer(header.node, &call, out) {
                Ok(()) => Served::Printed,
                Err(errno) => Served::Failed(errno),
            },
            None => Served::Failed(Errno::EINVAL),
        }
    }

    /// Executes an operation on the handle of a file.
    #[inline]
    fn execute(
        &self,
        context: &ThreadContext<'_>,
        ino: u64,
        data_len: u64,
        token: impl FnOnce() -> ReplyToken,
        f: impl FnOnce(&mut DeviceHandle) -> InlineResult,
    ) -> Served {
        self.handles.with_handle(context.thread_no, context.region, ino, |handle| {
            let handle = match handle {
                Ok(handle) => handle,
                Err(errno) => return Served::Failed(errno),
            };
            match f(handle) {
                InlineResult::Done(len, at) => Served::Region(at, len),
                InlineResult::Failed(errno) => Served::Failed(errno),
                InlineResult::Later(work) => {
                    let len = match work {
                        FileOperation::Write(span, _) => span.want.min(data_len),
                        _ => 0,
                    };
                    debug_assert!(len <= IO_BYTES_MAX, "ranges are clipped");
                    // SAFETY: nothing is in flight in the region between two requests of the
                    // thread, and the kernel does not change the buffer until the request is
                    // answered.
                    let data = unsafe { memory::bytes(context.region, context.at, len) };
                    handle.send_to_worker(work, token(), data);
                    Served::Later
                }
            }
        })
    }
}

//! The handling of a request by a serving thread, common to both transports.
#![allow(unsafe_code)] // What a write writes is read where the kernel put it.

use std::sync::Arc;

use blockyard_core::{Flags, Region};
use fuser::Errno;

use crate::fuse::file_system::FileSystem;
use crate::fuse::lane::Work;
use crate::fuse::memory::{self, IO_BYTES_MAX};
use crate::fuse::mount::Ended;
use crate::fuse::seat::{Carried, Door, Seats};
use crate::fuse::ticket::Ticket;
use crate::fuse::wire::{self, Call, Header, Out};

/// The state that the threads of a mount share. The last thread that ends drops it.
pub(crate) struct Server {
    pub(crate) file_system: FileSystem,
    pub(crate) seats: Arc<Seats>,
    pub(crate) ended: Arc<Ended>,
}

impl Drop for Server {
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
pub(crate) struct Place<'t> {
    /// The index of the thread's seat.
    pub(crate) seat: usize,
    /// The thread's region.
    pub(crate) region: &'t Arc<Region>,
    /// The offset of the request's buffer in the region, for the data of a write or a read. It has
    /// room for the longest request and the blocks around it.
    pub(crate) at: u64,
}

impl Server {
    /// Answers a request, or passes it to a worker with a reply token. The call is `None` if it is
    /// invalid. For a write `data_len` bytes have been received.
    #[inline]
    pub(crate) fn serve(
        &self,
        place: &Place<'_>,
        header: &Header,
        call: Option<Call<'_>>,
        data_len: u64,
        out: &mut Out,
        ticket: impl FnOnce() -> Ticket,
    ) -> Served {
        match call {
            Some(Call::Read { offset, len }) => self.carry(place, header.node, 0, ticket, |door| {
                door.read(offset, len.into(), place.at)
            }),
            Some(Call::Write { offset, len, flags }) => {
                if u64::from(len) > data_len {
                    return Served::Failed(Errno::EINVAL);
                }
                let write = |door: &mut Door| {
                    // O_SYNC includes O_DSYNC.
                    let durable = flags & libc::O_DSYNC != 0;
                    let flags = if durable { Flags::FUA } else { Flags::NONE };
                    door.write(offset, len.into(), flags, place.at)
                };
                match self.carry(place, header.node, len.into(), ticket, write) {
                    Served::Region(_, written) => {
                        out.raw(&wire::write_out(written as u32));
                        Served::Printed
                    }
                    other => other,
                }
            }
            Some(Call::Fsync) => {
                self.carry(place, header.node, 0, ticket, |_| Carried::Later(Work::Flush))
            }
            Some(Call::Fallocate { offset, len, mode }) => {
                self.carry(place, header.node, 0, ticket, |door| door.zero(offset, len, mode))
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
    fn carry(
        &self,
        place: &Place<'_>,
        ino: u64,
        data_len: u64,
        ticket: impl FnOnce() -> Ticket,
        f: impl FnOnce(&mut Door) -> Carried,
    ) -> Served {
        self.seats.with_door(place.seat, place.region, ino, |door| {
            let door = match door {
                Ok(door) => door,
                Err(errno) => return Served::Failed(errno),
            };
            match f(door) {
                Carried::Done(len, at) => Served::Region(at, len),
                Carried::Failed(errno) => Served::Failed(errno),
                Carried::Later(work) => {
                    let len = match work {
                        Work::Write(span, _) => span.want.min(data_len),
                        _ => 0,
                    };
                    debug_assert!(len <= IO_BYTES_MAX, "ranges are clipped");
                    // SAFETY: nothing is in flight in the region between two requests of the
                    // thread, and the kernel does not change the buffer until the request is
                    // answered.
                    let data = unsafe { memory::bytes(place.region, place.at, len) };
                    door.hand_over(work, ticket(), data);
                    Served::Later
                }
            }
        })
    }
}

//! A request in execution: which system call comes next, and what its result means.
//!
//! ```text
//! read, write    Transfer ─ all bytes ──────────────────────────────────▸ done
//! discard        Punch ─────────────────────────────────────────────────▸ done
//! write-zeroes   Punch ── not supported ──▸ Zero ── not supported ──▸ Fill
//!                └──────────────┬───────────┴──────────────┬──────────┘
//!                               └─ FUA ▸ Sync ▸ done       └─ no FUA ▸ done
//! flush          Sync ──────────────────────────────────────────────────▸ done
//! ```
//!
//! A write-zeroes that must not deallocate starts with `Zero`. Both ways to execute calls, io_uring
//! and blocking, drive this state machine.
#![allow(unsafe_code)] // Copies between the request's memory and a bounce buffer.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use blockyard_core::{Flags, Op, Region, SECTOR_SHIFT, Segment, Started, Status};
use blockyard_os::map_region;
use rustix::fs::FallocateFlags;

use crate::backing::Shared;

/// The requests whose failures latch a device, in messages.
pub(crate) const FLUSH: &str = "flush";
pub(crate) const FUA_WRITE: &str = "write with FUA";

/// How often an interrupted call is repeated before its request fails.
const INTERRUPTED_MAX: u8 = 100;

/// Whether a call has done nothing and is to be repeated. The kernel cancels calls that wait for a
/// worker when the thread that submitted them ends. Under a scheduler, another thread than the
/// channel's may have submitted a call.
///
/// A call that syncs reports a failed write-back once, with any error number that the disk or the
/// file system gave it. So a sync, or a write that syncs, is repeated only if it never began.
pub(crate) fn is_interrupted(result: i32, is_sync: bool) -> bool {
    match -result {
        libc::ECANCELED => true,
        libc::EINTR | libc::EAGAIN => !is_sync,
        _ => false,
    }
}

/// Bounce buffers of a queue, and their length in bytes: 1 MiB in total. A request that needs one
/// and finds none waits.
const BOUNCE_COUNT: u16 = 16;
pub(crate) const BOUNCE_BYTES: usize = 64 << 10;

/// A system call on the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileCall {
    Read {
        into: NonNull<u8>,
        len: u32,
        at: u64,
    },
    Write {
        from: NonNull<u8>,
        len: u32,
        at: u64,
        dsync: bool,
    },
    /// By the description that has a block device exclusively. For another one the kernel does not
    /// drop the page cache of the range, and fails with `EBUSY` while that has dirty pages.
    Fallocate {
        mode: FallocateFlags,
        at: u64,
        len: u64,
    },
}

/// What follows a completed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Another call.
    Again,
    /// A sync of the file.
    Sync,
    /// The request is complete.
    Done(Status),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExecutionStep {
    Transfer,
    Punch,
    Zero,
    Fill,
    Sync,
}

/// Memory for data whose address direct I/O does not accept.
#[derive(Debug)]
pub(crate) struct Bounces {
    /// None if the file takes data at any address.
    memory: Option<Arc<Region>>,
    free: Vec<u16>,
    align: usize,
}

impl Bounces {
    /// The memory is mapped, and taken from the system when a request first needs it.
    pub(crate) fn new(align: usize) -> io::Result<Bounces> {
        let count = if align > 1 { BOUNCE_COUNT } else { 0 };
        let bytes = usize::from(count) * BOUNCE_BYTES;
        let memory = (count > 0).then(|| map_region(bytes)).transpose()?;
        Ok(Bounces { memory, free: (0..count).rev().collect(), align })
    }

    fn address(&self, number: u16) -> NonNull<u8> {
        let memory = self.memory.as_ref().expect("a number exists only with memory");
        let at = u64::from(number) * BOUNCE_BYTES as u64;
        memory.range(at, BOUNCE_BYTES as u64).expect("numbers are below the count")
    }

    fn is_needed(&self, data: Segment) -> bool {
        !data.data.addr().get().is_multiple_of(self.align)
    }
}

/// A request in execution.
#[derive(Debug)]
pub(crate) struct Execution {
    started: Started,
    step: ExecutionStep,
    /// Bytes that the present step has completed.
    done: u64,
    bounce: Option<u16>,
    interrupted: u8,
}

impl Execution {
    /// Takes a request. Returns it if it needs a bounce buffer and none is free.
    pub(crate) fn new(started: Started, bounces: &mut Bounces) -> Result<Execution, Started> {
        let step = match started.op() {
            Op::Flush => ExecutionStep::Sync,
            Op::WriteZeroes if started.flags().contains(Flags::NOUNMAP) => ExecutionStep::Zero,
            Op::Discard | Op::WriteZeroes => ExecutionStep::Punch,
            _ => ExecutionStep::Transfer,
        };
        let mut bounce = None;
        if step == ExecutionStep::Transfer && bounces.is_needed(data(&started)) {
            bounce = bounces.free.pop();
            if bounce.is_none() {
                return Err(started);
            }
        }
        Ok(Execution { started, step, done: 0, bounce, interrupted: 0 })
    }

    /// Whether a sync comes next.
    pub(crate) fn wants_sync(&self) -> bool {
        self.step == ExecutionStep::Sync
    }

    /// The request, for its completion.
    pub(crate) fn into_started(self, bounces: &mut Bounces) -> Started {
        bounces.free.extend(self.bounce);
        self.started
    }

    fn len(&self) -> u64 {
        self.started.sectors() << SECTOR_SHIFT
    }

    /// The next system call. Its address is valid for its length until the caller passes the result
    /// to [`Execution::ended`].
    pub(crate) fn call(&self, shared: &Shared, bounces: &Bounces) -> FileCall {
        let (begin, left) = (self.started.sector().bytes(), self.len() - self.done);
        let at = begin + self.done;
        match self.step {
            ExecutionStep::Transfer => {
                // SAFETY: fewer bytes are done than the data have, so the address is inside them.
                let data = unsafe { data(&self.started).data.add(self.done as usize) };
                let is_read = self.started.op() == Op::Read;
                let (address, len) = match self.bounce {
                    None => (data, left),
                    Some(number) => {
                        let (bounce, len) =
                            (bounces.address(number), left.min(BOUNCE_BYTES as u64));
                        if !is_read {
                            // SAFETY: `data` has at least `left` bytes, and the bounce buffer of
                            // this request has at least `len`.
                            unsafe { bounce.copy_from_nonoverlapping(data, len as usize) };
                        }
                        (bounce, len)
                    }
                };
                let len = len as u32;
                if is_read {
                    return FileCall::Read { into: address, len, at };
                }
                let dsync = self.started.flags().contains(Flags::FUA);
                FileCall::Write { from: address, len, at, dsync }
            }
            ExecutionStep::Punch => {
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                FileCall::Fallocate { mode, at: begin, len: self.len() }
            }
            ExecutionStep::Zero => {
                let mode = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
                FileCall::Fallocate { mode, at: begin, len: self.len() }
            }
            ExecutionStep::Fill => {
                let len = left.min(shared.zeros.len_bytes() as u64);
                let from = shared.zeros.range(0, len).expect("it is no longer than the region");
                FileCall::Write { from, len: len as u32, at, dsync: false }
            }
            ExecutionStep::Sync => unreachable!("the caller asks `wants_sync` first"),
        }
    }

    /// Handles the result of a call: the number of bytes, or a negative error number.
    pub(crate) fn ended(&mut self, result: i32, bounces: &Bounces) -> Next {
        match result {
            _ if is_interrupted(result, self.is_fua_write())
                && self.interrupted < INTERRUPTED_MAX =>
            {
                self.interrupted += 1;
                Next::Again
            }
            ..0 => self.failed(-result),
            _ => match self.step {
                ExecutionStep::Punch | ExecutionStep::Zero => self.zeroed(),
                _ => self.transferred(result as u64, bounces),
            },
        }
    }

    fn failed(&mut self, errno: i32) -> Next {
        let is_unknown = [libc::EOPNOTSUPP, libc::EINVAL, libc::ENOSYS].contains(&errno);
        match self.step {
            ExecutionStep::Punch if is_unknown && self.started.op() == Op::WriteZeroes => {
                self.step = ExecutionStep::Zero;
                Next::Again
            }
            ExecutionStep::Zero if is_unknown => {
                self.step = ExecutionStep::Fill;
                Next::Again
            }
            ExecutionStep::Punch if is_unknown => Next::Done(Status::NotSupp),
            _ => Next::Done(status_of(errno)),
        }
    }

    /// Handles bytes that were read or written, maybe fewer than were asked for.
    fn transferred(&mut self, bytes: u64, bounces: &Bounces) -> Next {
        if bytes == 0 {
            // The file has been truncated, or its device has got smaller.
            return Next::Done(Status::IoErr);
        }
        if let (Op::Read, Some(number)) = (self.started.op(), self.bounce) {
            let bounce = bounces.address(number);
            // SAFETY: the call has filled `bytes` bytes of the bounce buffer, which only this
            // request uses, and the data have as many bytes left as the call asked for.
            unsafe {
                let into = data(&self.started).data.add(self.done as usize);
                into.copy_from_nonoverlapping(bounce, bytes as usize);
            }
        }
        self.done += bytes;
        match () {
            () if self.done < self.len() => Next::Again,
            () if self.step == ExecutionStep::Fill => self.zeroed(),
            () => Next::Done(Status::Ok),
        }
    }

    /// Ends a discard, or a write-zeroes whose range reads as zeros now.
    fn zeroed(&mut self) -> Next {
        if !self.started.flags().contains(Flags::FUA) {
            return Next::Done(Status::Ok);
        }
        self.step = ExecutionStep::Sync;
        Next::Sync
    }

    /// Whether a failure may have lost writes that completed before. A write with FUA that fails
    /// for want of space has not reached its sync.
    pub(crate) fn loses_writes(&self, status: Status) -> bool {
        self.is_fua_write() && !matches!(status, Status::Ok | Status::NoSpc)
    }

    /// Whether the present call is a write that syncs its data.
    fn is_fua_write(&self) -> bool {
        self.step == ExecutionStep::Transfer
            && self.started.op() == Op::Write
            && self.started.flags().contains(Flags::FUA)
    }
}

/// The data of a request. The device's limits allow one segment.
fn data(started: &Started) -> Segment {
    started.segments().next().expect("a read or a write has data")
}

/// The status for an error number of a call.
pub(crate) fn status_of(errno: i32) -> Status {
    match errno {
        libc::EDQUOT => Status::NoSpc,
        // The caller's requests are valid: these say that the file is not as it was at the opening.
        libc::EINVAL | libc::EAGAIN => Status::IoErr,
        _ => {
            let known = Status::ALL.iter().filter(|status| !status.is_ok());
            known.copied().find(|status| status.errno() == errno).unwrap_or(Status::IoErr)
        }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_core::blocking::Io;
    use blockyard_core::zone::ZoneInfo;
    use blockyard_core::{
        Batch, CompletionBatch, Device, DeviceError, DeviceQueue, Due, Geometry, Limits, Nanos,
        Sector,
    };
    use blockyard_testing::channel::channel;

    use super::*;

    /// A device whose system calls end with 0, as if its file had become shorter.
    struct Short(Geometry, Limits);

    impl Device for Short {
        type Queue = ShortQueue;

        fn geometry(&self) -> &Geometry {
            &self.0
        }

        fn limits(&self) -> &Limits {
            &self.1
        }

        fn open_queue(&self) -> Result<ShortQueue, DeviceError> {
            Ok(ShortQueue)
        }

        fn report_zones(
            &self,
            _: Sector,
            _: usize,
            _: &mut Vec<ZoneInfo>,
        ) -> Result<(), DeviceError> {
            Ok(())
        }
    }

    struct ShortQueue;

    impl DeviceQueue for ShortQueue {
        fn start(&mut self, _: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
            let mut bounces = Bounces::new(1).unwrap();
            while let Some(started) = batch.next() {
                let mut execution = Execution::new(started, &mut bounces).unwrap();
                let next = execution.ended(0, &bounces);
                let Next::Done(status) = next else { panic!("{next:?}") };
                // The test learns it by the status.
                let lost = if execution.loses_writes(status) { Status::Medium } else { status };
                done.complete(execution.into_started(&mut bounces), lost);
            }
        }

        fn poll(&mut self, _: Nanos, _: &mut CompletionBatch) {}

        fn room(&self) -> usize {
            1
        }

        fn due(&self) -> Due {
            Due::Never
        }
    }

    /// The bug: the number of an error was made of the result, and that of 0 says "Success".
    #[test]
    fn write_of_no_byte_fails_and_loses_writes_if_it_syncs() {
        let geometry = Geometry {
            sectors: 64,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            zones: None,
        };
        let limits = Limits { fua: true, write_cache: true, ..Limits::unlimited(8) };
        let mut io = Io::new(channel(&Arc::new(Short(geometry, limits))), 4096);
        let write = |io: &mut Io, flags| io.write(Sector(0), &[0; 512], flags).unwrap_err();
        assert_eq!(write(&mut io, Flags::NONE), Status::IoErr);
        assert_eq!(write(&mut io, Flags::FUA), Status::Medium);
        assert_eq!(io.read(Sector(0), &mut [0; 512]).unwrap_err(), Status::IoErr);
    }

    #[test]
    fn sync_is_repeated_only_if_it_never_began() {
        for (errno, is_repeated) in [
            (libc::ECANCELED, [true, true]),
            (libc::EINTR, [true, false]),
            (libc::EAGAIN, [true, false]),
            (libc::EIO, [false, false]),
            (0, [false, false]),
        ] {
            let found = [false, true].map(|is_sync| is_interrupted(-errno, is_sync));
            assert_eq!(found, is_repeated, "{errno}");
        }
    }

    #[test]
    fn error_numbers_keep_their_meaning() {
        for (errno, status) in [
            (libc::EIO, Status::IoErr),
            (libc::ENOSPC, Status::NoSpc),
            (libc::EDQUOT, Status::NoSpc),
            (libc::EOPNOTSUPP, Status::NotSupp),
            (libc::ENOMEM, Status::Resource),
            (libc::ENODEV, Status::Offline),
            (libc::EINVAL, Status::IoErr),
            (libc::EBADF, Status::IoErr),
        ] {
            assert_eq!(status_of(errno), status, "{errno}");
        }
    }
}

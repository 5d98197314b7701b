//! A queue by blocking calls, for systems that refuse io_uring. The thread of the channel executes
//! each request when it starts it.
#![allow(unsafe_code)] // The calls get memory by address.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use blockyard_core::{Batch, CompletionBatch, Op, Started, Status};
use blockyard_sync::rcu_cell::RcuReader;

use crate::backing::Shared;
use crate::execution::{Bounces, Execution, FLUSH, FUA_WRITE, FileCall, Next};

/// A queue by blocking calls.
#[derive(Debug)]
pub struct BlockingQueue {
    shared: Arc<Shared>,
    file: File,
    is_latched: RcuReader<bool>,
    bounces: Bounces,
}

impl BlockingQueue {
    pub(crate) fn new(shared: Arc<Shared>) -> io::Result<BlockingQueue> {
        Ok(BlockingQueue {
            file: shared.backing.reopen()?,
            is_latched: RcuReader::new(&shared.is_latched),
            bounces: Bounces::new(shared.backing.memory_align)?,
            shared,
        })
    }

    pub(crate) fn start(&mut self, batch: &mut Batch, done: &mut CompletionBatch) {
        while let Some(started) = batch.next() {
            let (started, status) = self.execute(started);
            done.complete(started, status);
        }
    }

    fn execute(&mut self, started: Started) -> (Started, Status) {
        if started.op() != Op::Read && **self.is_latched.get() {
            return (started, Status::IoErr);
        }
        if let Some(status) = self.shared.manage_zones(&started) {
            return (started, status);
        }
        let mut execution = match Execution::new(started, &mut self.bounces) {
            Ok(execution) => execution,
            // Not reached: one request at a time finds a free bounce buffer.
            Err(started) => return (started, Status::Resource),
        };
        let status = loop {
            if execution.wants_sync() {
                break self.sync();
            }
            let call = execution.call(&self.shared, &self.bounces);
            match execution.ended(self.execute_call(call), &self.bounces) {
                Next::Again | Next::Sync => {}
                Next::Done(status) => break status,
            }
        };
        if execution.loses_writes(status) {
            self.shared.latch(FUA_WRITE, status.errno());
        }
        (execution.into_started(&mut self.bounces), status)
    }

    fn execute_call(&self, call: FileCall) -> i32 {
        let file = self.file.as_raw_fd();
        let result = match call {
            FileCall::Read { into, len, at } => {
                // SAFETY: `Execution::call` promises `len` writable bytes at `into`, and the
                // descriptor is open.
                unsafe { libc::pread(file, into.as_ptr().cast(), len as usize, at as libc::off_t) }
            }
            FileCall::Write { from, len, at, dsync } => {
                let part = libc::iovec { iov_base: from.as_ptr().cast(), iov_len: len as usize };
                let flags = if dsync { libc::RWF_DSYNC } else { 0 };
                // SAFETY: the call reads one vector, which lives until it returns.
                // `Execution::call` promises `len` readable bytes at `from`, and the descriptor is
                // open.
                unsafe { libc::pwritev2(file, &raw const part, 1, at as libc::off_t, flags) }
            }
            FileCall::Fallocate { mode, at, len } => {
                return match rustix::fs::fallocate(self.shared.backing.locked(), mode, at, len) {
                    Ok(()) => 0,
                    Err(error) => -error.raw_os_error(),
                };
            }
        };
        match result {
            // A call transfers at most 1 MiB.
            0.. => result as i32,
            _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        }
    }

    fn sync(&mut self) -> Status {
        // Never repeated: the kernel reports a failed write-back once, with any error number.
        if let Err(error) = rustix::fs::fdatasync(&self.file) {
            self.shared.latch(FLUSH, error.raw_os_error());
        }
        // Another queue may have latched the device since.
        if **self.is_latched.get() { Status::IoErr } else { Status::Ok }
    }
}

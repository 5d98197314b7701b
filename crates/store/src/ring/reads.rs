//! Reads by io_uring: many in flight per queue, submitted and reaped with few system calls.
#![allow(unsafe_code)] // Submissions name memory by address.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::squeue::Entry;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode};

use super::{EventFd, Files, Owner, ReadRing, open};
use crate::PoolFile;
use crate::StoreFile;
use crate::buffer::Buffer;
use crate::file::Use;
use crate::reads::{FinishedRead, Reads};

/// Submission entries of the ring.
const ENTRIES: u32 = 128;

/// Registered files of the ring.
const FILES: u32 = 64;

/// How often an interrupted read is submitted again.
const INTERRUPTED_MAX: u32 = 100;

/// A read in flight.
struct InFlightRead {
    token: u32,
    file: Arc<PoolFile>,
    /// The descriptor, if the file is not registered: it stays open until the read has ended.
    open: Option<Arc<File>>,
    offset: u64,
    buffer: Buffer,
    /// Bytes that were read already.
    filled: usize,
    interrupted: u32,
}

/// The reads of one queue by io_uring.
pub struct RingReads {
    ring: IoUring,
    files: Files,
    shared: Arc<ReadRing>,
    /// Reads in flight, by the user data of their completions.
    slots: Vec<Option<InFlightRead>>,
    free: Vec<u32>,
    /// Entries that were pushed and not submitted.
    pushed: usize,
    /// Finished reads that were not taken.
    ended: VecDeque<FinishedRead>,
    /// The ring has failed, and the kernel may still write to the buffers: memory in flight is
    /// never freed.
    lost: bool,
}

impl RingReads {
    /// A ring for the calling thread; a finished read signals the eventfd.
    ///
    /// # Errors
    /// If the system refuses it.
    pub(crate) fn new(event_fd: &EventFd) -> io::Result<RingReads> {
        let ring = open(ENTRIES, Owner::AnyThread)?;
        ring.submitter().register_eventfd(event_fd.raw())?;
        Ok(RingReads {
            // Reads of a dead process do no harm, so they need not hold the locks.
            files: Files::new(&ring, FILES, Vec::new())?,
            shared: ReadRing::new(&ring),
            ring,
            slots: Vec::new(),
            free: Vec::new(),
            pushed: 0,
            ended: VecDeque::new(),
            lost: false,
        })
    }

    /// The ring, for the thread that closes the directory or disk.
    pub(crate) fn shared(&self) -> &Arc<ReadRing> {
        &self.shared
    }

    fn push(&mut self, entry: &Entry) -> io::Result<()> {
        // SAFETY: the buffer that the entry points to lives in its `InFlightRead`, kept until its
        // completion has come.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.ring.submitter().submit()?;
        }
        self.pushed += 1;
        Ok(())
    }

    /// Submits the remaining bytes of a read.
    fn push_read(&mut self, mut read: InFlightRead) {
        if !read.file.is_aligned(read.offset, read.buffer.len()) {
            let result = read.file.read_at(read.offset, &mut read.buffer);
            return self.end(read, result);
        }
        let known = self.files.known(&self.ring, &read.file).and_then(|known| {
            read.open =
                if known.is_none() { Some(read.file.source().get(Use::Read)?) } else { None };
            Ok(known)
        });
        let known = match known {
            Ok(known) => known,
            Err(error) => return self.end(read, Err(error)),
        };
        let descriptor = Fd(read.open.as_ref().map_or(-1, |open| open.as_raw_fd()));
        let rest = &mut read.buffer[read.filled..];
        let at = read.file.source_offset(read.offset) + read.filled as u64;
        let (into, len) = (rest.as_mut_ptr(), rest.len() as u32);
        let entry = match known {
            Some(number) => opcode::Read::new(number, into, len),
            // The read keeps the descriptor open.
            None => opcode::Read::new(descriptor, into, len),
        };
        let entry = entry.offset(at);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        match self.push(&entry.build().user_data(slot.into())) {
            Ok(()) => self.slots[slot as usize] = Some(read),
            Err(error) => {
                self.free.push(slot);
                self.end(read, Err(error));
            }
        }
    }

    fn end(&mut self, read: InFlightRead, result: io::Result<()>) {
        let InFlightRead { token, buffer, .. } = read;
        self.ended.push_back(FinishedRead { token, buffer: Some(buffer), result });
    }

    /// Takes completions from the ring.
    fn reap(&mut self) {
        loop {
            let Some(entry) = self.ring.completion().next() else { return };
            let slot = entry.user_data() as u32;
            let read = self.slots.get_mut(slot as usize).and_then(Option::take);
            let Some(mut read) = read else { continue };
            self.free.push(slot);
            match entry.result() {
                bytes @ 1.. => {
                    read.filled += bytes as usize;
                    if read.filled >= read.buffer.len() {
                        self.end(read, Ok(()));
                    } else {
                        self.push_read(read);
                    }
                }
                0 => self.end(read, Err(io::ErrorKind::UnexpectedEof.into())),
                code if [-libc::EINTR, -libc::EAGAIN].contains(&code)
                    && read.interrupted < INTERRUPTED_MAX =>
                {
                    read.interrupted += 1;
                    self.push_read(read);
                }
                code => self.end(read, Err(io::Error::from_raw_os_error(-code))),
            }
        }
    }

    /// Submits the pushed entries, and waits for `want` completions.
    fn enter(&mut self, want: usize, at_most: Option<Duration>) {
        let result = match at_most {
            None => self.ring.submitter().submit_and_wait(want),
            Some(at_most) => {
                let time = Timespec::new().sec(at_most.as_secs()).nsec(at_most.subsec_nanos());
                let args = SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(want, &args)
            }
        };
        self.pushed = 0;
        match result {
            Ok(_) => {}
            Err(error)
                if error.kind() == io::ErrorKind::Interrupted
                    || [Some(libc::ETIME), Some(libc::EBUSY), Some(libc::EAGAIN)]
                        .contains(&error.raw_os_error()) => {}
            Err(error) => self.lose(&error),
        }
    }

    /// Marks the ring as failed. The kernel may still write to the buffers.
    #[cold]
    fn lose(&mut self, error: &io::Error) {
        self.lost = true;
        for (slot, read) in (0..).zip(&mut self.slots) {
            let Some(read) = read.take() else { continue };
            self.free.push(slot);
            let result = Err(io::Error::new(error.kind(), error.to_string()));
            self.ended.push_back(FinishedRead { token: read.token, buffer: None, result });
            std::mem::forget(read);
        }
    }
}

impl Reads<PoolFile> for RingReads {
    fn begin(&mut self, token: u32, file: &Arc<PoolFile>, offset: u64, buffer: Buffer) {
        if self.lost {
            let result = Err(io::Error::other("the ring of this queue is lost"));
            return self.ended.push_back(FinishedRead { token, buffer: Some(buffer), result });
        }
        let file = Arc::clone(file);
        self.push_read(InFlightRead {
            token,
            file,
            open: None,
            offset,
            buffer,
            filled: 0,
            interrupted: 0,
        });
    }

    #[inline]
    fn submit(&mut self) {
        if self.pushed > 0 {
            self.enter(0, None);
        }
    }

    #[inline]
    fn take(&mut self) -> Option<FinishedRead> {
        if self.ended.is_empty() {
            self.is_any();
        }
        self.ended.pop_front()
    }

    #[inline]
    fn is_any(&mut self) -> bool {
        if self.ended.is_empty() && self.in_flight() > 0 {
            // The kernel posts deferred completions only when this thread enters it.
            if self.ring.submission().taskrun() || self.pushed > 0 {
                self.enter(0, None);
            }
            self.reap();
            // Reads that were short were pushed again, and nothing else may submit them.
            if self.ended.is_empty() && self.pushed > 0 {
                self.enter(0, None);
            }
        }
        !self.ended.is_empty()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len() + self.ended.len()
    }

    fn sleep(&mut self, at_most: Duration) {
        if !self.is_any() && self.in_flight() > 0 {
            self.enter(1, Some(at_most));
        }
    }
}

/// Waits for the reads in flight: the kernel writes to their memory.
impl Drop for RingReads {
    fn drop(&mut self) {
        while !self.lost && self.slots.iter().any(Option::is_some) {
            self.enter(1, None);
            self.reap();
        }
        self.shared.leave();
        self.files.leave(&self.ring, !self.lost);
    }
}

impl fmt::Debug for RingReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (in_flight, ring) = (self.in_flight(), self.ring.as_raw_fd());
        f.debug_struct("RingReads").field("in_flight", &in_flight).field("ring", &ring).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Memory;
    use blockyard_testing::capability::Capability;

    /// Regression: a queue whose ring had failed believed that reads were in flight, and gave new
    /// ones to the ring.
    #[test]
    fn a_ring_that_is_lost_answers_everything_with_an_error() {
        if let Err(error) = super::super::probe() {
            return Capability::Uring.is_missing(error);
        }
        let (memory, event_fd) = (Memory::new(1 << 20), EventFd::new().unwrap());
        let mut reads = RingReads::new(&event_fd).unwrap();
        let zero = Arc::new(PoolFile::of(std::fs::File::open("/dev/zero").unwrap()));
        let begin = |reads: &mut RingReads, token| {
            reads.begin(token, &zero, 0, memory.take_beyond(4096));
        };
        begin(&mut reads, 1);
        begin(&mut reads, 2);
        reads.lose(&io::ErrorKind::Other.into());
        begin(&mut reads, 3);
        for token in 1..=3 {
            let got = reads.take().unwrap();
            assert_eq!((got.token, got.result.is_err()), (token, true));
        }
        assert_eq!(reads.in_flight(), 0);
        assert!(reads.take().is_none());
    }
}

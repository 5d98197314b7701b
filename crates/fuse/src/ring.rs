//! Serving through io_uring: a thread with a ring that holds many requests at a time.
//!
//! The kernel has a queue for each processor. An *entry* is room for one request of a queue: a
//! header and a buffer, which the thread registers by a command. The command completes when the
//! kernel has put a request there. The thread writes the reply into the entry and commits it by the
//! next command, which waits for the next request. So one system call receives any number of
//! requests, and commits the replies to earlier ones.
//!
//! ```text
//! register ▸ kernel waits ▸ request here ─ serve ▸ commit and fetch ▸ kernel waits ...
//!                                        └▸ worker ▸ reply queue ─┘
//! ```
//!
//! - A request that waits for its device is at a worker with a reply token. The reply goes through
//!   the [`ReplyQueue`], which wakes the thread, because only one thread may submit to a ring.
//! - Whole blocks are read into the entry's buffer, and written from there.
//! - One thread still reads `/dev/fuse`, for messages that need no reply.
//! - Numbers and layouts are those of the public header `linux/fuse.h`, protocol 7.42, and of the
//!   kernel's documentation (`Documentation/filesystems/fuse-io-uring.rst`).
#![allow(unsafe_code)] // Submissions name memory by address, and one field by its offset.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use io_uring::opcode::{PollAdd, UringCmd80};
use io_uring::squeue::Entry128;
use io_uring::types::{Fd, Fixed};
use io_uring::{IoUring, cqueue};
use rustix::event::{EventfdFlags, eventfd};

use crate::memory;
use crate::reply::{ReplyPath, ReplyQueue, ReplyToken};
use crate::server::{MountServer, Served, ThreadContext};
use crate::wire::{Call, Out};

pub(crate) mod entries;

use entries::{Entries, EntryMemory};

/// The most requests of a queue, including those that wait for a slow device. More wait in the
/// kernel, for whatever device. An unused entry costs no memory except half a kilobyte in the
/// kernel.
const DEPTH: usize = 256;
/// The most entries of one ring: a quarter of the kernel's limit.
const ENTRIES_MAX: usize = 8192;
/// Room for commands other than those of entries: the eventfd's.
const SPARE: usize = 1;

/// The file with all possible processors.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// The longest list of processors that is read.
const POSSIBLE_BYTES_MAX: usize = 4096;

/// A ring whose commands have the length that FUSE needs.
pub(crate) type Ring = IoUring<Entry128, cqueue::Entry>;

/// A ring with its memory, before a thread serves it.
pub(crate) struct Prepared {
    ring: Ring,
    entries: Entries,
    replies: Arc<ReplyQueue>,
    returned: Receiver<u16>,
}

/// Makes the rings for `threads` threads, before the kernel is asked to use io_uring: afterwards it
/// waits for them.
///
/// # Errors
/// If the system refuses a ring, a descriptor or memory.
pub(crate) fn prepare(threads: usize) -> io::Result<Vec<Prepared>> {
    let text = fs::read_to_string(POSSIBLE)?;
    let queues = count_processors(&text)
        .ok_or_else(|| io::Error::other(format!("{POSSIBLE}: `{text}` is no list")))?;
    let threads = threads.clamp(1, queues);
    (0..threads).map(|thread| Prepared::new((thread..queues).step_by(threads))).collect()
}

impl Prepared {
    fn new(queues: impl Iterator<Item = usize>) -> io::Result<Prepared> {
        let queues: Vec<u16> = queues.map(|queue| queue as u16).collect();
        let depth = (ENTRIES_MAX / queues.len()).clamp(1, DEPTH);
        let entries = Entries::new(&queues, depth)?;
        let size = (entries.count() + SPARE).next_power_of_two() as u32;
        let ring = IoUring::builder()
            // The serving thread enables it; no other thread submits, and work is done when the
            // thread asks for completions.
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(size)?;
        let (sender, returned): (Sender<u16>, _) = channel();
        let replies = Arc::new(ReplyQueue::new(entries.memory(), sender, event_fd()?));
        Ok(Prepared { ring, entries, replies, returned })
    }

    /// The thread that will serve the ring.
    pub(crate) fn thread(
        self,
        server: Arc<MountServer>,
        thread_no: usize,
        device: OwnedFd,
    ) -> RingThread {
        RingThread::new(self, server, thread_no, device)
    }
}

/// Makes an eventfd: a write to it wakes the thread that polls it. Neither side blocks.
fn event_fd() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// The number of processors in a list: `0-3,8`.
fn count_processors(text: &str) -> Option<usize> {
    if text.len() > POSSIBLE_BYTES_MAX {
        return None;
    }
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
        Some(usize::from(last.checked_sub(first)?) + 1)
    };
    let counts = text.trim().split(',').map(count);
    counts.sum::<Option<usize>>().filter(|&count| count <= usize::from(u16::MAX))
}

/// The index of the device in the ring's own file table.
const DEVICE: Fixed = Fixed(0);

/// The user data of the eventfd's command; those of entries are their numbers.
const EVENT: u64 = u64::MAX;

/// A ring with the thread that serves it.
pub(crate) struct RingThread {
    // First, so that it is dropped before the memory.
    ring: Ring,
    entries: Entries,
    memory: EntryMemory,
    replies: Arc<ReplyQueue>,
    returned: Receiver<u16>,
    server: Arc<MountServer>,
    thread_no: usize,
    device: OwnedFd,
    /// For each entry, the number by which its request's reply is committed.
    commit_ids: Box<[u64]>,
    /// Entries that hold a new request.
    arrived: Vec<u16>,
    /// The number of entries that belong to the kernel.
    waiting: usize,
    /// Whether the connection has ended: then entries from the kernel are not returned to it.
    ending: bool,
    out: Out,
}

impl RingThread {
    fn new(
        prepared: Prepared,
        server: Arc<MountServer>,
        thread_no: usize,
        device: OwnedFd,
    ) -> RingThread {
        let Prepared { ring, entries, replies, returned } = prepared;
        let count = entries.count();
        RingThread {
            ring,
            memory: entries.memory(),
            entries,
            replies,
            returned,
            server,
            thread_no,
            device,
            commit_ids: vec![0; count].into(),
            arrived: Vec::with_capacity(count),
            waiting: 0,
            ending: false,
            out: Out::default(),
        }
    }

    /// Registers the entries; the calling thread must then serve.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn register(&mut self) -> io::Result<()> {
        let submitter = self.ring.submitter();
        submitter.register_enable_rings()?;
        submitter.register_files(&[self.device.as_raw_fd()])?;
        self.poll_event_fd()?;
        for entry in 0..self.entries.count() as u16 {
            let (queue, parts) = (self.entries.queue_of(entry), self.entries.parts_of(entry));
            let command = register(DEVICE, queue, parts).user_data(entry.into());
            self.submit(&command)?;
            self.waiting += 1;
        }
        self.ring.submit()?;
        // The kernel refuses a registration at once.
        match self.reap() {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }

    /// Serves until the mount ends.
    pub(crate) fn serve(mut self) {
        loop {
            self.answer_all();
            if self.ending && self.waiting == 0 {
                return;
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                    _ => return tracing::error!(%error, "a ring that serves files failed"),
                },
            }
            self.reap();
        }
    }

    /// Takes completions, and returns an error that occurred.
    fn reap(&mut self) -> Option<i32> {
        let mut refused = None;
        let mut event = None;
        for completion in self.ring.completion() {
            if completion.user_data() == EVENT {
                event = Some(cqueue::more(completion.flags()));
                continue;
            }
            self.waiting -= 1;
            match completion.result() {
                0.. => self.arrived.push(completion.user_data() as u16),
                error => {
                    let entry = completion.user_data();
                    match -error {
                        libc::ENOTCONN => self.ending = true,
                        error => tracing::warn!(entry, error, "the kernel refused a command"),
                    }
                    refused = Some(-error);
                }
            }
        }
        if let Some(is_armed) = event {
            self.replies.clear_event();
            if !is_armed && let Err(error) = self.poll_event_fd() {
                tracing::error!(%error, "a ring that serves files cannot poll for replies");
            }
        }
        refused
    }

    fn answer_all(&mut self) {
        while let Ok(entry) = self.returned.try_recv() {
            self.commit(entry);
        }
        for index in 0..self.arrived.len() {
            self.answer(self.arrived[index]);
        }
        self.arrived.clear();
    }

    fn answer(&mut self, entry: u16) {
        let Some(request) = self.memory.arrived(entry) else { return };
        let header = request.header;
        self.commit_ids[usize::from(entry)] = request.commit_id;
        // A name, for example. The data of a write stay where they are.
        let rest_len = if header.is_write() { 0 } else { request.data_len };
        // SAFETY: the entry belongs to this thread until it is committed, and nothing is in flight
        // on its buffer yet.
        let rest = unsafe { self.memory.data(entry, rest_len) };
        let call = Call::parse(header.opcode, &request.fixed, rest);
        let buffer = self.memory.buffer_of(entry);
        let context =
            ThreadContext { thread_no: self.thread_no, region: self.memory.region(), at: buffer };
        self.out.clear();
        let token =
            || ReplyToken::new(header.unique, ReplyPath::Ring(Arc::clone(&self.replies), entry));
        let data_len = request.data_len;
        match self.server.serve(&context, &header, call, data_len, &mut self.out, token) {
            Served::Printed => self.memory.put(entry, header.unique, Ok(self.out.bytes())),
            Served::Region(at, len) => {
                if at != buffer {
                    // SAFETY: the read has completed, and the buffer still belongs to this thread.
                    unsafe { memory::shift(self.memory.region(), at, buffer, len) };
                }
                self.memory.put_header(entry, header.unique, 0, len);
            }
            Served::Failed(errno) => self.memory.put(entry, header.unique, Err(errno)),
            // The kernel sends no request here that needs no reply.
            Served::Silent => self.memory.put(entry, header.unique, Ok(&[])),
            Served::Later => return,
        }
        self.commit(entry);
    }

    /// Has a reply committed with the next system call.
    fn commit(&mut self, entry: u16) {
        let queue = self.entries.queue_of(entry);
        let commit_id = self.commit_ids[usize::from(entry)];
        let command = commit(DEVICE, queue, commit_id).user_data(entry.into());
        match self.submit(&command) {
            Ok(()) => self.waiting += 1,
            Err(error) => tracing::error!(%error, "an answer could not be committed"),
        }
    }

    /// Submits a poll of the eventfd.
    fn poll_event_fd(&mut self) -> io::Result<()> {
        let event_fd = Fd(self.replies.event_fd().as_raw_fd());
        let poll = PollAdd::new(event_fd, libc::POLLIN as u32).multi(true).build();
        self.submit(&Entry128::from(poll).user_data(EVENT))
    }

    fn submit(&mut self, command: &Entry128) -> io::Result<()> {
        let mut queue = self.ring.submission();
        // SAFETY: the objects that a command names (an entry's parts, the device, the eventfd) live
        // until the ring is dropped, which is dropped before the rest of this thread.
        let pushed = unsafe { queue.push(command) };
        pushed.map_err(|_| io::Error::other("a ring has room for all its entries"))
    }
}

/// `FUSE_IO_URING_CMD_REGISTER`: registers an entry.
const REGISTER: u32 = 1;
/// `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`: commits a reply and makes its entry free for a request.
const COMMIT_AND_FETCH: u32 = 2;

/// The parts of an entry: its header and its buffer.
const PARTS: u32 = 2;

/// The offset of the length in a submission (`io_uring_sqe.len`).
const LEN_AT: usize = 24;

/// Registers an entry of a queue, whose parts are the [`PARTS`] vectors at `parts`.
fn register(device: Fixed, queue: u16, parts: *const libc::iovec) -> Entry128 {
    let mut command =
        UringCmd80::new(device, REGISTER).cmd(arguments(0, queue)).addr(Some(parts as u64)).build();
    let len = (&raw mut command).cast::<u8>();
    // SAFETY: the command has the layout of the kernel's `io_uring_sqe`, 128 bytes of plain
    // numbers, of which this is the length.
    unsafe { len.add(LEN_AT).cast::<u32>().write_unaligned(PARTS) };
    command
}

/// Commits the reply to a request and makes its entry free for the next one.
#[inline]
fn commit(device: Fixed, queue: u16, commit_id: u64) -> Entry128 {
    UringCmd80::new(device, COMMIT_AND_FETCH).cmd(arguments(commit_id, queue)).build()
}

/// `fuse_uring_cmd_req`: flags, request, queue.
#[inline]
fn arguments(commit_id: u64, queue: u16) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[8..16].copy_from_slice(&commit_id.to_ne_bytes());
    bytes[16..18].copy_from_slice(&queue.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted() {
        assert_eq!(count_processors("0\n"), Some(1));
        assert_eq!(count_processors("0-1\n"), Some(2));
        assert_eq!(count_processors("0-3,8,10-11"), Some(7));
        for text in ["", "\n", "a", "1-", "3-1", "0-65536", "0,,1", "0-65535", "-1"] {
            assert_eq!(count_processors(text), None, "{text}");
        }
    }

    #[test]
    fn a_command_is_laid_out_as_the_kernel_reads_it() {
        let parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2];
        let command = register(Fixed(0), 7, parts.as_ptr());
        assert_eq!(size_of::<Entry128>(), 128);
        // SAFETY: the entry is 128 bytes of plain numbers.
        let bytes = unsafe { *(&raw const command).cast::<[u8; 128]>() };
        assert_eq!(bytes[8..12], REGISTER.to_ne_bytes(), "cmd_op");
        assert_eq!(bytes[16..24], (parts.as_ptr() as u64).to_ne_bytes(), "addr");
        assert_eq!(bytes[24..28], PARTS.to_ne_bytes(), "len");
        assert_eq!(bytes[64..66], 7_u16.to_ne_bytes(), "queue");
    }
}

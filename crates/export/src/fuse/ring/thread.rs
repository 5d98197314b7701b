//! The thread that serves a ring.
#![allow(unsafe_code)] // Submissions name memory by address.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use io_uring::cqueue;
use io_uring::opcode::PollAdd;
use io_uring::squeue::Entry128;
use io_uring::types::{Fd, Fixed};

use crate::fuse::memory;
use crate::fuse::ring::entries::{Entries, Memory};
use crate::fuse::ring::home::Home;
use crate::fuse::ring::{Prepared, Ring, command};
use crate::fuse::server::{Place, Served, Server};
use crate::fuse::ticket::{Ticket, Way};
use crate::fuse::wire::{Call, Out};

/// The index of the device in the ring's own file table.
const DEVICE: Fixed = Fixed(0);

/// The user data of the eventfd's command; those of entries are their numbers.
const BELL: u64 = u64::MAX;

/// A ring with the thread that serves it.
pub(crate) struct RingThread {
    // First, so that it is dropped before the memory.
    ring: Ring,
    entries: Entries,
    memory: Memory,
    home: Arc<Home>,
    returned: Receiver<u16>,
    server: Arc<Server>,
    seat: usize,
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
    pub(super) fn new(
        prepared: Prepared,
        server: Arc<Server>,
        seat: usize,
        device: OwnedFd,
    ) -> RingThread {
        let Prepared { ring, entries, home, returned } = prepared;
        let count = entries.count();
        RingThread {
            ring,
            memory: entries.memory(),
            entries,
            home,
            returned,
            server,
            seat,
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
        self.listen()?;
        for entry in 0..self.entries.count() as u16 {
            let (queue, parts) = (self.entries.queue_of(entry), self.entries.parts_of(entry));
            let command = command::register(DEVICE, queue, parts).user_data(entry.into());
            self.submit(&command)?;
            self.waiting += 1;
        }
        self.ring.submit()?;
        // The kernel refuses a registration at once.
        match self.harvest() {
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
            self.harvest();
        }
    }

    /// Takes completions, and returns an error that occurred.
    fn harvest(&mut self) -> Option<i32> {
        let mut refused = None;
        let mut rung = None;
        for completion in self.ring.completion() {
            if completion.user_data() == BELL {
                rung = Some(cqueue::more(completion.flags()));
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
        if let Some(goes_on) = rung {
            self.home.hush();
            if !goes_on && let Err(error) = self.listen() {
                tracing::error!(%error, "a ring that serves files hears of no lanes any more");
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
        let place = Place { seat: self.seat, region: self.memory.region(), at: buffer };
        self.out.clear();
        let ticket = || Ticket::new(header.unique, Way::Ring(Arc::clone(&self.home), entry));
        let data_len = request.data_len;
        match self.server.serve(&place, &header, call, data_len, &mut self.out, ticket) {
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
        let command = command::commit(DEVICE, queue, commit_id).user_data(entry.into());
        match self.submit(&command) {
            Ok(()) => self.waiting += 1,
            Err(error) => tracing::error!(%error, "an answer could not be committed"),
        }
    }

    /// Submits a poll of the eventfd.
    fn listen(&mut self) -> io::Result<()> {
        let bell = Fd(self.home.bell().as_raw_fd());
        let poll = PollAdd::new(bell, libc::POLLIN as u32).multi(true).build();
        self.submit(&Entry128::from(poll).user_data(BELL))
    }

    fn submit(&mut self, command: &Entry128) -> io::Result<()> {
        let mut queue = self.ring.submission();
        // SAFETY: the objects that a command names (an entry's parts, the device, the eventfd) live
        // until the ring is dropped, which is dropped before the rest of this thread.
        let pushed = unsafe { queue.push(command) };
        pushed.map_err(|_| io::Error::other("a ring has room for all its entries"))
    }
}

//! A worker: a thread with a channel of its own, for requests to one device that must wait.
//!
//! A serving thread passes a request with its reply token to the worker and continues at once. The
//! worker keeps up to one request per slot in flight, and answers each when it completes, in any
//! order. More requests wait in the backlog, whose length the kernel bounds. Writes and holes with
//! an end inside a block go through the queue of [`blockyard_core::rmw`].
#![allow(unsafe_code)] // Replies are sent from the worker's region.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blockyard_core::channel::Waker;
use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::rmw::{self, Partial, RmwQueue, Span};
use blockyard_core::{Bio, BufRef, Channel, Completion, Due, Flags, Op, Region, RegionId, Status};
use blockyard_sync::rmw_lock::RmwLock;
use fuser::Errno;

use crate::memory::{self, BUFFER_BYTES};
use crate::reply::ReplyToken;
use crate::rules::{FileRules, Zeroing, errno_of};

/// The most requests that a worker has in flight.
const SLOTS: u16 = 32;
/// The longest sleep of a worker with requests in flight.
const POLL_INTERVAL_MAX: Duration = Duration::from_millis(50);
/// The operation of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FileOperation {
    Read(Span),
    Write(Span, Flags),
    Flush,
    Zero(Zeroing),
}

/// A request that was passed to the worker.
#[derive(Debug)]
struct WorkerRequest {
    work: FileOperation,
    token: ReplyToken,
}

enum Message {
    /// A request; the data of a write are in the slot's buffer.
    Job(u16, WorkerRequest),
    /// A request for which there was no free slot, with the data of a write.
    Backlog(WorkerRequest, Box<[u8]>),
    /// Another channel has made room for a request that waits here.
    Look,
    /// There will be no more requests.
    Close,
}

/// The serving thread's handle to a worker.
pub(crate) struct Worker {
    messages: Sender<Message>,
    free: Receiver<u16>,
    region: Arc<Region>,
    deadline: Arc<OnceLock<Instant>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a worker.
    ///
    /// # Errors
    /// If the system refuses memory or a thread.
    pub(crate) fn start(
        name: &str,
        mut channel: Box<dyn Channel>,
        rules: FileRules,
        lock: &Arc<RmwLock>,
    ) -> io::Result<Worker> {
        let region = blockyard_os::map_region(((u64::from(SLOTS) + 1) * BUFFER_BYTES) as usize)?;
        let region_id = channel.register(Arc::clone(&region));
        let (slots, data) = (usize::from(SLOTS) + 1, (Arc::clone(&region), region_id));
        let block_bytes = rules.block_bytes;
        let staging = blockyard_os::map_region(rmw::staging_bytes(block_bytes))?;
        let rmw = RmwQueue::new(channel.as_mut(), lock, block_bytes, slots, data, staging);
        let (messages, received) = mpsc::channel();
        let own = Sender::clone(&messages);
        // A worker that has ended has no waiting requests.
        channel.set_waker(Waker::new(move || _ = own.send(Message::Look)));
        let (give, free) = mpsc::sync_channel(usize::from(SLOTS));
        (0..SLOTS).for_each(|slot| give.send(slot).expect("there is room for all, and a receiver"));
        let deadline = Arc::new(OnceLock::new());
        let worker = WorkerLoop {
            channel,
            region: Arc::clone(&region),
            region_id,
            rules,
            rmw,
            messages: received,
            free: give,
            jobs: (0..=SLOTS).map(|_| None).collect(),
            bios: Vec::with_capacity(usize::from(SLOTS) + rmw::BIOS_MAX),
            backlog: VecDeque::new(),
            spare: vec![SLOTS],
            done: Vec::with_capacity(usize::from(SLOTS) + rmw::BIOS_MAX),
            reaped: 0,
            closed: false,
            deadline: Arc::clone(&deadline),
        };
        let thread = thread::Builder::new().name(format!("fuse-{name}"));
        let thread = thread.spawn(move || worker.serve())?;
        Ok(Worker { messages, free, region, deadline, thread: Some(thread) })
    }

    /// Passes a request to the worker; `data` are those of a write.
    pub(crate) fn send(&self, work: FileOperation, token: ReplyToken, data: &[u8]) {
        let job = WorkerRequest { work, token };
        let message = match self.free.try_recv() {
            Ok(slot) => {
                fill(&self.region, slot, &work, data);
                Message::Job(slot, job)
            }
            Err(_) => Message::Backlog(job, data.into()),
        };
        // The thread is gone, which can only be a panic, and would never answer.
        if let Err(refused) = self.messages.send(message)
            && let Message::Job(_, job) | Message::Backlog(job, _) = refused.0
        {
            job.token.fail(Errno::EIO);
        }
    }

    /// Lets requests in flight complete, fails those that have not by the deadline, and ends the
    /// worker.
    pub(crate) fn close(mut self, deadline: Instant) {
        self.end(deadline);
    }

    fn end(&mut self, deadline: Instant) {
        let Some(thread) = self.thread.take() else { return };
        // Not as a message: the thread receives none during a job of several steps. It is not set
        // yet, because the caller that sets it has taken the thread.
        let _ = self.deadline.set(deadline);
        // An error means that the thread has already ended.
        let _ = self.messages.send(Message::Close);
        // A panic of the thread was reported when it happened.
        let _ = thread.join();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end(Instant::now());
    }
}

/// The state of the worker's thread.
struct WorkerLoop {
    channel: Box<dyn Channel>,
    region: Arc<Region>,
    region_id: RegionId,
    rules: FileRules,
    /// Dropped after the channel, which waits for its writes.
    rmw: RmwQueue,
    messages: Receiver<Message>,
    free: SyncSender<u16>,
    /// The requests by slot.
    jobs: Vec<Option<WorkerRequest>>,
    /// Bios that are not pushed yet.
    bios: Vec<Bio>,
    /// Requests that wait for a slot, with the data of writes.
    backlog: VecDeque<(WorkerRequest, Box<[u8]>)>,
    /// Slots for the backlog. One is never given to the serving thread, so that the backlog makes
    /// progress even if that thread holds all the others and sends no request.
    spare: Vec<u16>,
    done: Vec<Completion>,
    /// The number of completions at the last look.
    reaped: usize,
    /// Whether no more requests come.
    closed: bool,
    /// The time at which requests in flight fail; set once the worker is closing.
    deadline: Arc<OnceLock<Instant>>,
}

impl WorkerLoop {
    fn serve(mut self) {
        blockyard_os::sharpen_timers();
        while self.receive() {
            self.start_backlog();
            self.submit();
            self.reap();
        }
        let waiting = self.backlog.drain(..).map(|(job, _)| job);
        // All messages are there, because they were sent before the close.
        let unseen = self.messages.try_iter().filter_map(|message| match message {
            Message::Job(_, job) | Message::Backlog(job, _) => Some(job),
            Message::Look | Message::Close => None,
        });
        for job in self.jobs.iter_mut().filter_map(Option::take).chain(waiting).chain(unseen) {
            job.token.fail(Errno::ENODEV);
        }
    }

    /// Whether the worker is closing and the deadline has passed.
    fn is_over(&self) -> bool {
        self.deadline.get().is_some_and(|deadline| Instant::now() >= *deadline)
    }

    fn is_idle(&self) -> bool {
        self.bios.is_empty() && self.channel.in_flight() == 0 && !self.rmw.has_startable()
    }

    /// Receives requests, and sleeps until there is work. `false` at the end.
    fn receive(&mut self) -> bool {
        if self.is_over() {
            return false;
        }
        if self.is_idle() && self.backlog.is_empty() {
            if self.closed {
                return false;
            }
            match self.messages.recv() {
                Ok(message) => self.accept(message),
                Err(_) => return false,
            }
        } else if self.reaped == 0 {
            self.sleep(Instant::now());
        }
        while let Ok(message) = self.messages.try_recv() {
            self.accept(message);
        }
        true
    }

    /// Sleeps until a completion is due, or until a message arrives if one can be handled.
    fn sleep(&mut self, now: Instant) {
        let mut wait = match self.channel.due() {
            Due::At(at) => Duration::from_nanos(at.since(Monotonic.now())).min(POLL_INTERVAL_MAX),
            Due::Never => POLL_INTERVAL_MAX,
        };
        if self.rmw.is_waiting() {
            wait = wait.min(rmw::POLL_INTERVAL);
        }
        if wait.is_zero() {
            return;
        }
        if self.closed && self.channel.in_flight() == 0 {
            return thread::sleep(wait);
        }
        if self.closed {
            return self.channel.wait(Some(now + wait));
        }
        match self.messages.recv_timeout(wait) {
            Ok(message) => self.accept(message),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.closed = true,
        }
    }

    fn accept(&mut self, message: Message) {
        match message {
            Message::Job(slot, job) => self.start_job(slot, job),
            Message::Backlog(job, data) => self.backlog.push_back((job, data)),
            Message::Look => {}
            Message::Close => self.closed = true,
        }
    }

    /// Starts requests from the backlog while there are slots.
    fn start_backlog(&mut self) {
        while !self.backlog.is_empty()
            && let Some(slot) = self.spare.pop()
            && let Some((job, data)) = self.backlog.pop_front()
        {
            fill(&self.region, slot, &job.work, &data);
            self.start_job(slot, job);
        }
    }

    fn start_job(&mut self, slot: u16, job: WorkerRequest) {
        let buffer = buffer_of(slot);
        let (op, flags, span) = match job.work {
            FileOperation::Read(span) => (Op::Read, Flags::NONE, span),
            FileOperation::Write(span, flags) => (Op::Write, flags, span),
            FileOperation::Flush => {
                (Op::Flush, Flags::NONE, Span::of(self.rules.block_bytes, 0, 0))
            }
            FileOperation::Zero(zeroing) => {
                (zeroing.op, zeroing.flags, self.rules.span(zeroing.offset, zeroing.len))
            }
        };
        self.jobs[usize::from(slot)] = Some(job);
        if op.is_write() && !span.is_whole() {
            let data = buffer + span.skip;
            return self.rmw.start(slot.into(), Partial { op, flags, span, data });
        }
        let buf = BufRef { region: self.region_id, offset: buffer };
        let bio = Bio::new(op, span.sector(), span.sectors()).with_flags(flags).with_buf(buf);
        let bio = bio.with_user_data(slot.into());
        if op.is_write() {
            self.rmw.publish(&bio);
        }
        self.bios.push(bio);
    }

    fn submit(&mut self) {
        self.rmw.advance(&mut self.bios);
        self.rmw.admit(&mut self.bios);
        if self.bios.is_empty() {
            return;
        }
        let taken = self.channel.push(&self.bios);
        self.bios.drain(..taken);
        self.channel.submit();
    }

    fn reap(&mut self) {
        self.done.clear();
        self.reaped = self.channel.reap(&mut self.done);
        for index in 0..self.done.len() {
            if let Some(end) = self.rmw.completed(self.done[index], &mut self.bios) {
                self.answer(end.user_data as u16, end.status);
            }
        }
    }

    /// Answers the request of a slot and frees the slot.
    fn answer(&mut self, slot: u16, status: Status) {
        let Some(job) = self.jobs[usize::from(slot)].take() else { return };
        let token = job.token;
        match job.work {
            _ if !status.is_ok() => token.fail(errno_of(status)),
            FileOperation::Read(span) => {
                let offset = buffer_of(slot) + span.skip;
                // SAFETY: the read into this slot's buffer has completed, and the slot is not
                // reused before the reply has been sent.
                token.data(unsafe { memory::bytes(&self.region, offset, span.want) });
            }
            FileOperation::Write(span, _) => token.written(span.want as u32),
            FileOperation::Flush | FileOperation::Zero(_) => token.ok(),
        }
        if self.spare.is_empty() || !self.backlog.is_empty() {
            self.spare.push(slot);
        } else {
            // When the worker is closing the receiver is gone, and the slot is not needed.
            let _ = self.free.try_send(slot);
        }
    }
}

/// Copies the data of a request into its slot's buffer, between the bytes of its blocks that stay.
fn fill(region: &Region, slot: u16, work: &FileOperation, data: &[u8]) {
    if let FileOperation::Write(span, _) = work {
        region.write(buffer_of(slot) + span.skip, data);
    }
}

fn buffer_of(slot: u16) -> u64 {
    u64::from(slot) * BUFFER_BYTES
}

//! The thread of a queue: requests of the kernel become bios, completions become commits.
//!
//! ```text
//! fetch all tags ▸ take requests ▸ plan ▸ copy data of writes ▸ push, submit ▸ reap
//!                  ▸ copy data of reads ▸ commit, and fetch the next with the tag ▸ sleep
//!
//! tag: UNUSED ─ fetch ▸ FETCHED ─ the kernel has a request ▸ BUSY ─ commit ▸ FETCHED
//!                          ├─ it has one; RELEASING or RELEASED ▸ WAITING ─ serve ▸ BUSY
//!                          │                                             └─ fail ▸ FETCHED
//!                          └─ the kernel cancels the fetch ▸ ENDED
//!
//! disk: SERVING ─ release ▸ RELEASING ─ no tag is busy ▸ RELEASED ─ serve ▸ SERVING
//!           ◂──── serve, fail ──┘                         └─ fail, or the disk cannot be opened ▸
//!                                                            FAILING ─ release ▸ RELEASED
//! ```
//!
//! A thread owns its ring, a channel of the device, and memory for the data of each tag. It takes
//! no lock and allocates nothing per request, except for what the device needs for a report of its
//! zones. It ends when the kernel has cancelled all fetches:
//! when the device is stopped. The kernel takes the commands of a tag from one thread only, so that
//! the thread stays while its disk is replaced.
#![allow(unsafe_code)] // Submissions name descriptors and memory.
#![allow(clippy::disallowed_types)] // The flag of a failure is written once.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blockyard_core::channel::ChannelGroup;
use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Bio, BufRef, Channel, Completion, Disk, Due, Op, Region, RegionId, Sector, Status,
};
use blockyard_os::map_region;
use blockyard_os::socket::Wake;
use blockyard_sync::atomics::{AtomicBool, Ordering};
use blockyard_sync::counter::Counter;
use io_uring::squeue::Entry;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode};

use crate::abi::{ABORTED, COMMIT_AND_FETCH, FETCH, io_command};
use crate::char_device::{CharDevice, DescriptorMap};
use crate::request::{Plan, zone_entry};
use crate::shape::{DeviceShape, ZONE_BYTES};

/// User data of the poll of the device's descriptor. Commands have their tag.
const POLL: u64 = u64::MAX;
/// User data of the poll of the wake, and of the removal of the poll of the device's descriptor.
const ORDERS: u64 = u64::MAX - 1;
const REMOVAL: u64 = u64::MAX - 2;
/// Entries of a ring in addition to one for each tag: the two polls and the removal.
const MORE_ENTRIES: u32 = 3;
/// The zones that a report reads at once.
const REPORT_ZONES: usize = 64;
/// The longest sleep while the device works, after which the thread looks for completions.
const COMPLETION_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How long a thread sleeps that has nothing to do before it returns the memory for data.
const IDLE_WAIT: Duration = Duration::from_secs(2);
/// The longest sleep of a thread that has returned its memory.
const LONG_WAIT: Duration = Duration::from_secs(60);
/// The wait before a submission that the system has refused is repeated.
const REFUSED_WAIT: Duration = Duration::from_millis(1);

/// The counts of a queue's requests. Its thread writes them, any thread reads them.
#[derive(Debug, Default)]
pub(crate) struct QueueCounts {
    /// Requests that were completed.
    pub(crate) requests: Counter,
    /// Requests that were completed with an error.
    pub(crate) errors: Counter,
    /// Bytes that were read.
    pub(crate) read_bytes: Counter,
    /// Bytes that were written.
    pub(crate) written_bytes: Counter,
}

/// What a thread needs to serve a queue.
pub(crate) struct QueueSetup {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) shape: Arc<DeviceShape>,
    pub(crate) queue: u16,
    pub(crate) depth: u16,
    pub(crate) counts: Arc<QueueCounts>,
    /// The channels of all queues of the device.
    pub(crate) channels: Arc<ChannelGroup>,
    /// Set by a thread that cannot fetch, so that the start of the device is not waited for.
    pub(crate) has_failed: Arc<AtomicBool>,
}

/// What the server tells the thread of a queue that serves.
enum QueueOrder {
    /// Complete the requests that were begun, and release the disk. Later requests wait.
    Release(OrderNumber),
    /// Serve this disk, or the one that is not released yet. Requests fail if it cannot be opened.
    Serve(OrderNumber, Arc<dyn Disk>, Arc<DeviceShape>),
    /// Fail the requests that wait for a disk, and later ones, unless there is a disk.
    Fail,
}

/// The number of an order to one thread. An answer names it, so that the server does not take the
/// answer to an order that it gave up for the answer to a later one.
type OrderNumber = u64;

/// The answer of the thread to an order: the disk is released or served, or cannot be served.
type OrderResult = (OrderNumber, io::Result<()>);

/// What became of an order.
#[derive(Debug)]
pub(crate) enum OrderState {
    /// The thread has not obeyed it yet.
    Pending,
    /// The thread has obeyed it.
    Done,
    /// The disk cannot be opened: requests fail.
    Failed(io::Error),
    /// The thread has ended: a process has stopped the device.
    Ended,
}

/// The thread's ends of what connects it with the server.
struct OrderQueue {
    orders: Receiver<QueueOrder>,
    answers: Sender<OrderResult>,
    /// Raised after an order was sent.
    wake: Arc<Wake>,
}

/// A queue whose thread has all that it needs, or serves.
pub(crate) struct QueueHandle {
    /// Gives the thread the device that it is to serve; `None` once it has it.
    go: Option<Sender<Arc<CharDevice>>>,
    orders: Sender<QueueOrder>,
    answers: Receiver<OrderResult>,
    wake: Arc<Wake>,
    /// The last order to release or to serve, and its answer, if there is one yet.
    last_order: OrderNumber,
    last_answer: Option<io::Result<()>>,
    thread: JoinHandle<()>,
}

impl QueueHandle {
    /// Starts the thread of a queue, which opens a channel, and a ring.
    ///
    /// # Errors
    /// If the device or the system refuses.
    pub(crate) fn prepare(setup: QueueSetup) -> io::Result<QueueHandle> {
        let name = format!("ublk-{}-{}", setup.disk.name(), setup.queue);
        let (go, device) = channel();
        let (ready, is_ready) = channel();
        let ((orders, taken), (given, answers)) = (channel(), channel());
        let wake = Arc::new(Wake::new()?);
        let queue = OrderQueue { orders: taken, answers: given, wake: Arc::clone(&wake) };
        let run = move || run(setup, queue, &ready, &device);
        let thread = thread::Builder::new().name(name).spawn(run)?;
        let prepared = is_ready.recv().unwrap_or_else(|_| Err(io::Error::other("it panicked")));
        let go = Some(go);
        let (last_order, last_answer) = (0, None);
        prepared.map(|()| QueueHandle {
            go,
            orders,
            answers,
            wake,
            last_order,
            last_answer,
            thread,
        })
    }

    fn order(&self, order: QueueOrder) {
        // A thread that has ended needs no order.
        let _ = self.orders.send(order);
        self.wake.raise();
    }

    fn next_order(&mut self) -> OrderNumber {
        self.last_answer = None;
        self.last_order += 1;
        self.last_order
    }

    /// Asks the thread to complete the requests that it has begun and to release its disk.
    pub(crate) fn begin_release(&mut self) {
        let number = self.next_order();
        self.order(QueueOrder::Release(number));
    }

    /// Asks the thread to serve a disk, or to go on with the one that it has not released yet.
    pub(crate) fn begin_serve(&mut self, disk: &Arc<dyn Disk>, shape: &Arc<DeviceShape>) {
        let number = self.next_order();
        self.order(QueueOrder::Serve(number, Arc::clone(disk), Arc::clone(shape)));
    }

    /// What became of the last order to release or to serve. Does not wait.
    pub(crate) fn answer(&mut self) -> OrderState {
        // Before the answers are read: a thread that answers and ends has answered.
        let has_ended = self.thread.is_finished();
        while let Ok((number, result)) = self.answers.try_recv() {
            if number == self.last_order {
                self.last_answer = Some(result);
            }
        }
        match &self.last_answer {
            Some(Ok(())) => OrderState::Done,
            Some(Err(error)) => OrderState::Failed(io::Error::new(error.kind(), error.to_string())),
            None if has_ended => OrderState::Ended,
            None => OrderState::Pending,
        }
    }

    /// Whether the thread could not open the disk that it was to serve: its requests fail.
    pub(crate) fn is_failing(&mut self) -> bool {
        matches!(self.answer(), OrderState::Failed(_))
    }

    /// Fails the requests that wait for a disk, and later ones, if the thread has none.
    pub(crate) fn fail_waiting(&self) {
        self.order(QueueOrder::Fail);
    }

    /// Lets the thread fetch requests of a device.
    pub(crate) fn serve(&mut self, device: Arc<CharDevice>) {
        if let Some(go) = self.go.take() {
            // A thread that panicked has said so.
            let _ = go.send(device);
        }
    }

    /// Whether the thread serves: no process has stopped the device.
    pub(crate) fn is_serving(&self) -> bool {
        !self.thread.is_finished()
    }

    /// A queue of a thread that exists.
    #[cfg(test)]
    pub(crate) fn of_thread(thread: JoinHandle<()>) -> QueueHandle {
        let ((orders, _), (_, answers)) = (channel(), channel());
        let wake = Arc::new(Wake::new().unwrap());
        let (last_order, last_answer) = (0, None);
        QueueHandle { go: None, orders, answers, wake, last_order, last_answer, thread }
    }

    /// A queue whose thread, while `is_stuck`, takes no order, as one within a call of a device;
    /// then it answers all: if it `can_open` a disk, with success. It ends with the handle, and
    /// returns the names of the orders.
    #[cfg(test)]
    pub(crate) fn of_fake(
        is_stuck: Receiver<()>,
        can_open: bool,
        names: Sender<&'static str>,
    ) -> QueueHandle {
        let ((orders, taken), (given, answers)) = (channel(), channel());
        let wake = Arc::new(Wake::new().unwrap());
        let thread = thread::spawn(move || {
            let _ = is_stuck.recv();
            for order in taken {
                let (name, number) = match order {
                    QueueOrder::Release(number) => ("release", Some(number)),
                    QueueOrder::Serve(number, ..) => ("serve", Some(number)),
                    QueueOrder::Fail => ("fail", None),
                };
                let _ = names.send(name);
                let is_done = can_open || name == "release";
                let result = || is_done.then_some(()).ok_or_else(|| io::Error::other("no disk"));
                let _ = number.map(|number| given.send((number, result())));
            }
        });
        let (last_order, last_answer) = (0, None);
        QueueHandle { go: None, orders, answers, wake, last_order, last_answer, thread }
    }

    /// Waits for the end of the thread: the device is stopped, or was never given.
    pub(crate) fn join(self) {
        drop(self.go);
        // A panic of the thread was reported when it happened.
        let _ = self.thread.join();
    }
}

fn run(
    setup: QueueSetup,
    orders: OrderQueue,
    ready: &Sender<io::Result<()>>,
    device: &Receiver<Arc<CharDevice>>,
) {
    // A yard that got its first block device at run time has not prepared the thread before.
    let prepared = crate::control::begin_io_flusher().and_then(|()| Prepared::new(setup, orders));
    let mut prepared = match prepared {
        Ok(prepared) => {
            // The other side waits for it.
            let _ = ready.send(Ok(()));
            prepared
        }
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let Ok(device) = device.recv() else { return };
    blockyard_os::sharpen_timers();
    match device.map(prepared.queue, prepared.depth()) {
        Ok(descriptors) => QueueThread { prepared: &mut prepared, device, descriptors }.serve(),
        Err(error) => {
            let Prepared { name, queue, has_failed, .. } = &prepared;
            tracing::error!(device = name, queue, %error, "cannot map the requests of a queue");
            // Release: pairs with the Acquire of the server, which waits for the start.
            has_failed.store(true, Ordering::Release);
        }
    }
}

/// The state of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tag {
    /// Not fetched yet.
    Unused,
    /// The kernel has the command, and returns it with a request.
    Fetched,
    /// The kernel has returned it with a request, which waits for the next disk.
    Waiting,
    /// A request is being executed: its operation, and the length of its data in bytes.
    Busy(Op, u32),
    /// The kernel has cancelled the command.
    Ended,
}

/// What becomes of the requests of the kernel; the diagram is in the head of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// They are executed.
    Serving,
    /// Those that were begun are completed, the others wait.
    Releasing,
    /// They wait.
    Released,
    /// They fail.
    Failing,
}

/// The disk that a thread serves.
struct ServedDisk {
    disk: Arc<dyn Disk>,
    shape: Arc<DeviceShape>,
    channel: Box<dyn Channel>,
    /// The descriptor of the channel, if it has one.
    wakes: Option<RawFd>,
    /// The memory of the thread in the channel.
    region: RegionId,
}

impl ServedDisk {
    fn open(
        disk: Arc<dyn Disk>,
        shape: Arc<DeviceShape>,
        channels: &ChannelGroup,
        memory: &Arc<Region>,
    ) -> io::Result<ServedDisk> {
        let mut channel = disk.open().map_err(|error| io::Error::other(error.to_string()))?;
        channels.add(channel.as_ref());
        let region = channel.register(Arc::clone(memory));
        Ok(ServedDisk { wakes: channel.descriptor(), disk, shape, channel, region })
    }
}

/// A thread that has all but the device.
struct Prepared {
    /// The name of the device.
    name: String,
    queue: u16,
    counts: Arc<QueueCounts>,
    channels: Arc<ChannelGroup>,
    has_failed: Arc<AtomicBool>,
    orders: OrderQueue,
    phase: Phase,
    /// The last order to release the disk.
    release: OrderNumber,
    /// `None` if the phase is `Released` or `Failing`.
    served: Option<ServedDisk>,
    ring: IoUring,
    /// Memory for the data of all tags, one after the other.
    memory: Arc<Region>,
    /// The length of a tag's data in the memory, in bytes.
    tag_bytes: u32,
    tags: Vec<Tag>,
    /// The number of tags that are fetched, waiting or busy.
    live: usize,
    /// Entries that were pushed and not submitted.
    pushed: usize,
    /// Whether the poll of the channel's descriptor is pushed or in flight.
    is_polling: bool,
    /// Whether that poll is being removed.
    is_removing: bool,
    /// Whether memory was used since it was returned to the system.
    has_data: bool,
    bios: Vec<Bio>,
    done: Vec<Completion>,
    zones: Vec<ZoneInfo>,
}

impl Prepared {
    fn new(setup: QueueSetup, orders: OrderQueue) -> io::Result<Prepared> {
        let QueueSetup { disk, shape, queue, counts, channels, has_failed, .. } = setup;
        let (name, tag_bytes) = (disk.name().to_owned(), shape.io_bytes_max);
        let depth = usize::from(setup.depth);
        let memory = map_region(depth * tag_bytes as usize)?;
        let served = ServedDisk::open(disk, shape, &channels, &memory)?;
        let mut builder = IoUring::builder();
        // One thread submits; what the kernel has to do in it waits until it enters the kernel.
        builder.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag();
        Ok(Prepared {
            name,
            queue,
            counts,
            channels,
            has_failed,
            orders,
            phase: Phase::Serving,
            release: 0,
            served: Some(served),
            ring: builder.build(u32::from(setup.depth) + MORE_ENTRIES)?,
            memory,
            tag_bytes,
            tags: vec![Tag::Unused; depth],
            live: 0,
            pushed: 0,
            is_polling: false,
            is_removing: false,
            has_data: false,
            bios: Vec::with_capacity(depth),
            done: Vec::with_capacity(depth),
            zones: Vec::with_capacity(REPORT_ZONES),
        })
    }

    /// The number of requests of the queue.
    fn depth(&self) -> u16 {
        self.tags.len() as u16 // As the setup says.
    }

    /// Polls a descriptor once; the completion has this user data.
    fn poll(&mut self, descriptor: RawFd, user_data: u64) {
        let poll = opcode::PollAdd::new(Fd(descriptor), libc::POLLIN as u32).build();
        self.push(&poll.user_data(user_data));
    }

    /// Polls the wake that tells of orders.
    fn poll_orders(&mut self) {
        self.poll(self.orders.wake.as_fd().as_raw_fd(), ORDERS);
    }

    /// Pushes an entry. The submission queue has space for one of each tag and for the polls.
    fn push(&mut self, entry: &Entry) {
        // SAFETY: an entry names the character device, which `QueueThread` holds, or a descriptor
        // of the channel or the wake, which `self` holds, and no memory.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("a tag has one command at a time, and there are as many entries as tags");
        self.pushed += 1;
    }

    /// Submits what was pushed, and waits for a completion for at most this time.
    fn enter(&mut self, timeout: Option<Duration>) {
        let entered = match timeout {
            None => self.ring.submitter().submit(),
            Some(timeout) => {
                let timeout = Timespec::from(timeout);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timeout))
            }
        };
        let code = entered.as_ref().err().and_then(io::Error::raw_os_error);
        // What the kernel did not take stays in the submission queue.
        self.pushed = self.ring.submission().len();
        if !matches!(code, None | Some(libc::EINTR | libc::ETIME | libc::EBUSY)) {
            thread::sleep(REFUSED_WAIT);
        }
    }
}

/// A thread that serves.
struct QueueThread<'p> {
    prepared: &'p mut Prepared,
    device: Arc<CharDevice>,
    descriptors: DescriptorMap,
}

impl QueueThread<'_> {
    /// Serves the queue until the kernel has cancelled all fetches and all requests are complete.
    fn serve(mut self) {
        for tag in 0..self.prepared.depth() {
            self.command(FETCH, tag, 0, 0);
        }
        self.prepared.poll_orders();
        self.prepared.live = self.prepared.tags.len();
        while self.prepared.live > 0 {
            let taken = self.take();
            let reaped = self.execute();
            if self.prepared.phase == Phase::Releasing {
                self.release();
            }
            if self.is_idle(taken + reaped) {
                self.wait();
            }
        }
    }

    /// Whether the thread may sleep, after it has taken or reaped a number of completions. What it
    /// began then may have completed at once. And nothing would wake it when the kernel has
    /// cancelled all fetches: the removal of the block device would wait until the sleep ends.
    fn is_idle(&mut self, completions: usize) -> bool {
        let is_new = completions > 0 && !self.prepared.ring.completion().is_empty();
        self.prepared.live > 0 && !is_new
    }

    /// Pushes a command for a tag, after which the kernel has the tag.
    fn command(&mut self, code: u32, tag: u16, result: i32, sector: u64) {
        let Prepared { queue, tags, .. } = &mut *self.prepared;
        tags[usize::from(tag)] = Tag::Fetched;
        let bytes = io_command(*queue, tag, result, sector);
        let entry = opcode::UringCmd16::new(Fd(self.device.descriptor()), code).cmd(bytes);
        self.prepared.push(&entry.build().user_data(tag.into()));
    }

    /// Completes a request; a negative result is an error number.
    fn commit(&mut self, tag: u16, result: i32, sector: u64) {
        let counts = &self.prepared.counts;
        counts.requests.add(1);
        counts.errors.add(u64::from(result < 0));
        self.command(COMMIT_AND_FETCH, tag, result, sector);
    }

    /// Takes the completions of the ring. Returns their number.
    fn take(&mut self) -> usize {
        let mut taken = 0;
        loop {
            let Some(entry) = self.prepared.ring.completion().next() else { return taken };
            taken += 1;
            match entry.user_data() {
                POLL => self.prepared.is_polling = false,
                ORDERS => self.obey(),
                REMOVAL => {}
                tag => self.arrived(tag as u16, entry.result()), // As `command` set it.
            }
        }
    }

    /// The kernel has returned the command of a tag.
    fn arrived(&mut self, tag: u16, result: i32) {
        let Some(state) = self.prepared.tags.get_mut(usize::from(tag)) else { return };
        if *state != Tag::Fetched {
            return;
        }
        if result == 0 {
            return self.begin(tag);
        }
        *state = Tag::Ended;
        self.prepared.live -= 1;
        if result != ABORTED {
            let Prepared { name, queue, has_failed, .. } = &*self.prepared;
            let error = io::Error::from_raw_os_error(-result);
            tracing::error!(device = name, queue, tag, %error, "the kernel refuses a tag");
            // Release: pairs with the Acquire of the server, which waits for the start.
            has_failed.store(true, Ordering::Release);
        }
    }

    /// Obeys the orders of the server.
    fn obey(&mut self) {
        self.prepared.orders.wake.lower();
        self.prepared.poll_orders();
        while let Ok(order) = self.prepared.orders.orders.try_recv() {
            match (order, self.prepared.phase) {
                // `release` answers, at once if there is no disk.
                (QueueOrder::Release(number), _) => {
                    self.prepared.release = number;
                    self.prepared.phase = Phase::Releasing;
                }
                (QueueOrder::Serve(number, disk, shape), _) => {
                    let opened = match &self.prepared.served {
                        Some(_) => Ok(()),
                        None => {
                            let Prepared { channels, memory, .. } = &*self.prepared;
                            let opened = ServedDisk::open(disk, shape, channels, memory);
                            opened.map(|served| self.prepared.served = Some(served))
                        }
                    };
                    if let Err(error) = &opened {
                        let Prepared { name, queue, .. } = &*self.prepared;
                        tracing::error!(device = name, queue, %error, "a queue fails: no disk");
                    }
                    let is_open = opened.is_ok();
                    self.prepared.phase = if is_open { Phase::Serving } else { Phase::Failing };
                    self.begin_waiting();
                    // Fails only if the server was dropped.
                    let _ = self.prepared.orders.answers.send((number, opened));
                }
                (QueueOrder::Fail, _) => {
                    let has_disk = self.prepared.served.is_some();
                    let phase = if has_disk { Phase::Serving } else { Phase::Failing };
                    self.prepared.phase = phase;
                    self.begin_waiting();
                }
            }
        }
    }

    /// Releases the disk, if none of its requests is in flight.
    fn release(&mut self) {
        let it = &mut *self.prepared;
        let is_busy = |served: &ServedDisk| served.channel.in_flight() > 0;
        if !it.bios.is_empty() || it.served.as_ref().is_some_and(is_busy) {
            return;
        }
        if it.is_polling {
            // The ring would keep the descriptor of the channel.
            if !it.is_removing {
                it.is_removing = true;
                it.push(&opcode::PollRemove::new(POLL).build().user_data(REMOVAL));
            }
            return;
        }
        it.served = None;
        it.phase = Phase::Released;
        // Fails only if the server was dropped.
        let _ = it.orders.answers.send((it.release, Ok(())));
    }

    /// Begins the requests that have waited for a disk.
    fn begin_waiting(&mut self) {
        for tag in 0..self.prepared.depth() {
            if self.prepared.tags[usize::from(tag)] == Tag::Waiting {
                self.begin(tag);
            }
        }
    }

    /// Begins the request of a tag.
    fn begin(&mut self, tag: u16) {
        let Prepared { phase, served, tags, .. } = &mut *self.prepared;
        let shape = match (*phase, served) {
            (Phase::Serving, Some(served)) => &served.shape,
            (Phase::Releasing | Phase::Released, _) => {
                tags[usize::from(tag)] = Tag::Waiting;
                return;
            }
            (Phase::Failing | Phase::Serving, _) => {
                return self.commit(tag, -Status::IoErr.errno(), 0);
            }
        };
        // The only read of the descriptor.
        let descriptor = self.descriptors.read(tag);
        match shape.plan(descriptor) {
            Ok(Plan::Io(bio)) => self.begin_io(tag, bio),
            Ok(Plan::Report { from, zones }) => {
                let result = self.report(tag, from, zones);
                self.commit(tag, result, 0);
            }
            Err(status) => self.commit(tag, -status.errno(), 0),
        }
    }

    /// The place of a tag's data in the memory.
    fn data_offset(&self, tag: u16) -> u64 {
        u64::from(tag) * u64::from(self.prepared.tag_bytes)
    }

    fn begin_io(&mut self, tag: u16, mut bio: Bio) {
        let offset = self.data_offset(tag);
        // `plan` bounds the length of data; other operations have no buffer.
        let bytes = if bio.op.has_data() { (bio.sectors * 512) as u32 } else { 0 };
        let is_write = bytes > 0 && bio.op != Op::Read;
        let Prepared { queue, served, memory, tags, bios, has_data, .. } = &mut *self.prepared;
        let Some(ServedDisk { region, .. }) = served else { return };
        if bytes > 0 {
            *has_data = true;
            bio = bio.with_buf(BufRef { region: *region, offset });
        }
        if is_write
            && let Err(error) = self.device.read_data((*queue, tag), memory, offset, bytes as usize)
        {
            return self.cannot_copy(tag, &error);
        }
        tags[usize::from(tag)] = Tag::Busy(bio.op, bytes);
        bios.push(bio.with_user_data(tag.into()));
    }

    #[cold]
    fn cannot_copy(&mut self, tag: u16, error: &io::Error) {
        let Prepared { name, queue, .. } = &*self.prepared;
        tracing::warn!(device = name, queue, tag, %error, "cannot copy the data of a request");
        self.commit(tag, -Status::IoErr.errno(), 0);
    }

    /// Reports zones. Returns the length of the answer, or an error number.
    fn report(&mut self, tag: u16, from: Sector, count: u32) -> i32 {
        let Prepared { name, queue, served, zones, .. } = &mut *self.prepared;
        let Some(ServedDisk { disk, shape, .. }) = served else { return -Status::IoErr.errno() };
        let mut entries = [[0; ZONE_BYTES]; REPORT_ZONES];
        let (mut next, mut done) = (from, 0);
        while done < count as usize && next.0 < shape.params.sectors {
            zones.clear();
            let wanted = (count as usize - done).min(REPORT_ZONES);
            if disk.report_zones(next, wanted, zones).is_err() || zones.is_empty() {
                return -Status::IoErr.errno();
            }
            for (entry, zone) in entries.iter_mut().zip(zones.iter()) {
                *entry = zone_entry(zone);
                next = zone.start + zone.sectors;
            }
            let bytes = entries[..zones.len().min(REPORT_ZONES)].as_flattened();
            let offset = (done * ZONE_BYTES) as u64;
            if let Err(error) = self.device.write_bytes((*queue, tag), offset, bytes) {
                tracing::warn!(device = name, queue, %error, "cannot copy a zone report");
                return -Status::IoErr.errno();
            }
            done += zones.len().min(REPORT_ZONES);
        }
        // The kernel has zeroed the rest, and asks again for what a shorter answer would lack.
        (count as usize * ZONE_BYTES) as i32 // At most 4 MiB.
    }

    /// Pushes and submits bios, and completes requests. Returns the number of completions.
    fn execute(&mut self) -> usize {
        let Prepared { served, bios, done, .. } = &mut *self.prepared;
        let Some(ServedDisk { channel, .. }) = served else { return 0 };
        if !bios.is_empty() {
            let pushed = channel.push(bios);
            bios.drain(..pushed);
            channel.submit();
        }
        if channel.in_flight() == 0 {
            return 0;
        }
        let mut done = std::mem::take(done);
        done.clear();
        let reaped = channel.reap(&mut done);
        done.iter().for_each(|completion| self.completed(completion));
        self.prepared.done = done;
        reaped
    }

    fn completed(&mut self, completion: &Completion) {
        let tag = completion.user_data as u16; // As `begin_io` set it.
        let Some(Tag::Busy(op, bytes)) = self.prepared.tags.get(usize::from(tag)).copied() else {
            return;
        };
        if !completion.status.is_ok() {
            return self.commit(tag, -completion.status.errno(), 0);
        }
        let Prepared { queue, counts, memory, .. } = &*self.prepared;
        match op {
            Op::Read => {
                let offset = self.data_offset(tag);
                let place = (*queue, tag);
                if let Err(error) = self.device.write_data(place, memory, offset, bytes as usize) {
                    return self.cannot_copy(tag, &error);
                }
                counts.read_bytes.add(bytes.into());
            }
            Op::Write | Op::ZoneAppend => counts.written_bytes.add(bytes.into()),
            _ => {}
        }
        let sector = if op == Op::ZoneAppend { completion.sector.0 } else { 0 };
        self.commit(tag, bytes as i32, sector); // At most io_bytes_max.
    }

    /// Submits what was pushed, and sleeps until the kernel or the device has something to do.
    fn wait(&mut self) {
        let it = &mut *self.prepared;
        let busy = it.served.as_mut().filter(|served| served.channel.in_flight() > 0);
        let Some(ServedDisk { channel, wakes, .. }) = busy else {
            let timeout = if it.has_data { IDLE_WAIT } else { LONG_WAIT };
            it.enter(Some(timeout));
            if it.has_data && it.ring.completion().is_empty() {
                blockyard_os::forget(&it.memory, 0, it.memory.len_bytes());
                it.has_data = false;
            }
            return;
        };
        let timeout = match channel.due() {
            Due::At(at) => Duration::from_nanos(at.since(Monotonic.now())),
            Due::Never if wakes.is_some() => LONG_WAIT,
            Due::Never => COMPLETION_POLL_INTERVAL,
        };
        let wakes = *wakes;
        if timeout.is_zero() || (wakes.is_some() && !channel.may_sleep()) {
            if it.pushed > 0 || it.ring.submission().taskrun() {
                it.enter(None);
            }
            return;
        }
        if let Some(wakes) = wakes.filter(|_| !it.is_polling) {
            (it.is_polling, it.is_removing) = (true, false);
            it.poll(wakes, POLL);
        }
        it.enter(Some(timeout));
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use blockyard_core::channel::{ChannelConfig, Stats};
    use blockyard_core::inject::Injection;
    use blockyard_core::{Composed, DeviceError, Extent, Geometry, Limits};
    use blockyard_null::{Null, NullConfig};
    use blockyard_testing::allocations::Counting;

    use super::*;
    use crate::abi::{DESCRIPTOR_BYTES, Descriptor, data_offset, io_flag, op};

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;

    const DEPTH: u16 = 4;
    /// A descriptor of a read of 8 sectors: operation and flags, sectors, first sector, address.
    const READ: [u32; 6] = [0, 8, 0, 0, 0, 0];

    fn disk() -> Arc<dyn Disk> {
        disk_of(NullConfig { size: 1 << 20, ..NullConfig::default() })
    }

    fn disk_of(config: NullConfig) -> Arc<dyn Disk> {
        let (null, config) = (Null::open(config).unwrap(), ChannelConfig { depth: DEPTH });
        Arc::new(Composed::new("d".to_owned(), "null", null, config))
    }

    /// A disk of which no channel can be opened.
    struct ClosedDisk(Arc<dyn Disk>);

    impl Disk for ClosedDisk {
        fn name(&self) -> &str {
            self.0.name()
        }

        fn kind(&self) -> &'static str {
            self.0.kind()
        }

        fn geometry(&self) -> &Geometry {
            self.0.geometry()
        }

        fn limits(&self) -> &Limits {
            self.0.limits()
        }

        fn open(&self) -> Result<Box<dyn Channel>, DeviceError> {
            Err(DeviceError::Gone)
        }

        fn report_zones(
            &self,
            from: Sector,
            zones_max: usize,
            out: &mut Vec<ZoneInfo>,
        ) -> Result<(), DeviceError> {
            self.0.report_zones(from, zones_max, out)
        }

        fn extent(&self, from: Sector, sectors: u64) -> Extent {
            self.0.extent(from, sectors)
        }

        fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
            self.0.inject(injection)
        }

        fn stats(&self) -> Stats {
            self.0.stats()
        }
    }

    /// The state of a queue without its thread. A file is the kernel: it has the descriptors, takes
    /// the data of reads, and refuses commands.
    struct Fixture {
        prepared: Prepared,
        kernel: File,
        device: Arc<CharDevice>,
        shape: Arc<DeviceShape>,
        orders: Sender<QueueOrder>,
        answers: Receiver<OrderResult>,
    }

    impl Fixture {
        fn new(disk: Arc<dyn Disk>) -> Fixture {
            let kernel = rustix::fs::memfd_create("ublk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            let kernel = File::from(kernel);
            let descriptors = READ.map(u32::to_ne_bytes).concat().repeat(DEPTH.into());
            assert_eq!(descriptors.len(), usize::from(DEPTH) * DESCRIPTOR_BYTES);
            kernel.write_all_at(&descriptors, 0).unwrap();
            // The data of writes are zeros.
            kernel.set_len(data_offset(0, DEPTH)).unwrap();
            let shape = Arc::new(DeviceShape::of(disk.as_ref()).unwrap());
            let ((orders, taken), (given, answers)) = (channel(), channel());
            let wake = Arc::new(Wake::new().unwrap());
            let setup = QueueSetup {
                disk,
                shape: Arc::clone(&shape),
                queue: 0,
                depth: DEPTH,
                counts: Arc::default(),
                channels: Arc::default(),
                has_failed: Arc::default(),
            };
            let queue = OrderQueue { orders: taken, answers: given, wake };
            let prepared = Prepared::new(setup, queue).unwrap();
            let device = Arc::new(CharDevice::of_file(kernel.try_clone().unwrap()));
            let mut fixture = Fixture { prepared, kernel, device, shape, orders, answers };
            fixture.with(|thread| (0..DEPTH).for_each(|tag| thread.command(FETCH, tag, 0, 0)));
            fixture
        }

        /// Does a part of the work of the thread, without the answers of the kernel.
        fn with(&mut self, work: impl FnOnce(&mut QueueThread<'_>)) {
            let device = Arc::clone(&self.device);
            let descriptors = device.map(0, DEPTH).unwrap();
            work(&mut QueueThread { prepared: &mut self.prepared, device, descriptors });
            self.prepared.enter(None);
            while self.prepared.ring.completion().next().is_some() {}
        }

        fn obey(&mut self, order: QueueOrder) {
            self.orders.send(order).unwrap();
            self.with(|thread| thread.obey());
        }

        fn serve(&mut self, number: OrderNumber, disk: &Arc<dyn Disk>) {
            self.obey(QueueOrder::Serve(number, Arc::clone(disk), Arc::clone(&self.shape)));
        }

        /// The kernel has a request with a tag.
        fn arrive(&mut self, tag: u16) -> Tag {
            self.with(|thread| thread.arrived(tag, 0));
            self.tag(tag)
        }

        /// The kernel describes the next request with tag 0.
        fn describe(&self, it: Descriptor) {
            let [low, high] = [it.sector as u32, (it.sector >> 32) as u32];
            let words = [u32::from(it.op) | it.flags, it.count, low, high, 0, 0];
            self.kernel.write_all_at(&words.map(u32::to_ne_bytes).concat(), 0).unwrap();
        }

        /// A round of the thread.
        fn go_on(&mut self) -> Phase {
            self.with(|thread| {
                thread.execute();
                if thread.prepared.phase == Phase::Releasing {
                    thread.release();
                }
            });
            self.prepared.phase
        }

        fn tag(&self, tag: u16) -> Tag {
            self.prepared.tags[usize::from(tag)]
        }

        /// The answers so far: the number, and whether the thread has succeeded.
        fn answers(&self) -> Vec<(OrderNumber, bool)> {
            self.answers.try_iter().map(|(number, result)| (number, result.is_ok())).collect()
        }

        /// Requests that were completed, and those of them with an error.
        fn counts(&self) -> (u64, u64) {
            (self.prepared.counts.requests.get(), self.prepared.counts.errors.get())
        }
    }

    /// Regression: the thread slept once more, for up to a minute, when the kernel had cancelled
    /// its last fetch, and the removal of the block device waited for it.
    #[test]
    fn a_queue_without_fetches_does_not_sleep() {
        let mut queue = Fixture::new(disk());
        queue.with(|thread| {
            thread.prepared.live = usize::from(DEPTH);
            thread.prepared.tags.fill(Tag::Fetched);
            assert!(thread.is_idle(0));
            for tag in 0..DEPTH {
                assert!(thread.is_idle(1), "tag {tag}");
                thread.arrived(tag, ABORTED);
            }
            assert!(!thread.is_idle(1));
        });
    }

    #[test]
    fn several_reads_at_once_allocate_nothing() {
        let mut queue = Fixture::new(disk());
        for round in 0..4 {
            queue.with(|thread| {
                let before = Counting::made();
                (0..DEPTH).for_each(|tag| thread.arrived(tag, 0));
                assert_eq!(thread.execute(), usize::from(DEPTH));
                assert_eq!(Counting::made() - before, 0, "round {round}");
            });
            assert_eq!(queue.counts(), ((round + 1) * u64::from(DEPTH), 0));
        }
    }

    /// Executes requests in turn, several times, and asserts that they succeed and that only the
    /// first time allocates.
    fn allocate_nothing(config: NullConfig, requests: &[Descriptor]) {
        let mut queue = Fixture::new(disk_of(config));
        let mut executed = 0;
        for round in 0..4 {
            for request in requests {
                queue.describe(*request);
                queue.with(|thread| {
                    let before = Counting::made();
                    thread.arrived(0, 0);
                    thread.execute();
                    let made = Counting::made() - before;
                    assert!(round == 0 || made == 0, "{made} by {request:?}");
                });
                executed += 1;
                assert_eq!(queue.counts(), (executed, 0), "{request:?}");
            }
        }
    }

    #[test]
    fn each_operation_allocates_nothing() {
        let it = |op, sector, count| Descriptor { op, flags: 0, count, sector };
        let with = |flags, it| Descriptor { flags, ..it };
        let memory = NullConfig {
            size: 8 << 20,
            memory_backed: true,
            cache_size: 1 << 20,
            discard: true,
            ..NullConfig::default()
        };
        let plain = [
            it(op::WRITE, 0, 8),
            with(io_flag::FUA, it(op::WRITE, 8, 8)),
            it(op::READ, 0, 16),
            it(op::FLUSH, 0, 0),
            it(op::WRITE_ZEROES, 0, 8),
            with(io_flag::NOUNMAP, it(op::WRITE_ZEROES, 8, 8)),
            it(op::DISCARD, 0, 16),
        ];
        allocate_nothing(memory.clone(), &plain);
        let zoned = NullConfig {
            zoned: true,
            zone_size: 1 << 20,
            zone_nr_conv: 1,
            cache_size: 0,
            discard: false,
            ..memory
        };
        let zone = 2048;
        let managed = [
            it(op::ZONE_OPEN, zone, zone as u32),
            it(op::WRITE, zone, 8),
            with(io_flag::FUA, it(op::WRITE, zone + 8, 8)),
            it(op::ZONE_APPEND, zone, 8),
            it(op::READ, zone, 24),
            it(op::ZONE_CLOSE, zone, zone as u32),
            it(op::ZONE_FINISH, zone, zone as u32),
            it(op::REPORT_ZONES, 0, 8),
            it(op::ZONE_RESET, zone, zone as u32),
            it(op::ZONE_RESET_ALL, 0, 0),
        ];
        allocate_nothing(zoned, &managed);
    }

    #[test]
    fn requests_wait_while_the_disk_is_replaced() {
        let (first, second) = (disk(), disk());
        let mut queue = Fixture::new(Arc::clone(&first));
        assert_eq!(queue.arrive(0), Tag::Busy(Op::Read, 4096));
        queue.obey(QueueOrder::Release(1));
        assert_eq!(queue.arrive(1), Tag::Waiting, "it was not begun");
        assert_eq!((queue.prepared.phase, queue.answers()), (Phase::Releasing, vec![]));
        // The request that was begun is completed first.
        assert_eq!(queue.go_on(), Phase::Released);
        assert_eq!((queue.counts(), queue.tag(0)), ((1, 0), Tag::Fetched));
        assert_eq!(queue.answers(), [(1, true)]);
        assert_eq!(Arc::strong_count(&first), 1, "the disk is closed");
        assert_eq!(queue.arrive(2), Tag::Waiting);
        // Released again, at once.
        queue.obey(QueueOrder::Release(2));
        assert_eq!((queue.go_on(), queue.answers()), (Phase::Released, vec![(2, true)]));
        queue.serve(3, &second);
        assert_eq!([1, 2].map(|tag| queue.tag(tag)), [Tag::Busy(Op::Read, 4096); 2]);
        assert_eq!((queue.go_on(), queue.answers()), (Phase::Serving, vec![(3, true)]));
        assert_eq!(queue.counts(), (3, 0));
        assert_eq!(second.stats().op(Op::Read).ops, 2);
        assert_eq!(queue.prepared.channels.sum().op(Op::Read).ops, 3, "of both disks");
    }

    #[test]
    fn a_queue_that_has_not_released_its_disk_goes_on_with_it() {
        let (first, second) = (disk(), disk());
        let mut queue = Fixture::new(Arc::clone(&first));
        // A server that gives up a release orders to serve, or to fail without a disk.
        for number in 0..2 {
            queue.obey(QueueOrder::Release(number));
            assert_eq!(queue.arrive(0), Tag::Waiting);
            match number {
                0 => queue.serve(7, &second),
                _ => queue.obey(QueueOrder::Fail),
            }
            assert_eq!(queue.tag(0), Tag::Busy(Op::Read, 4096));
            assert_eq!(queue.go_on(), Phase::Serving);
        }
        assert_eq!((queue.answers(), queue.counts()), (vec![(7, true)], (2, 0)));
        assert_eq!((first.stats().op(Op::Read).ops, Arc::strong_count(&second)), (2, 1));
    }

    #[test]
    fn requests_fail_without_a_disk_until_there_is_one() {
        let (first, second) = (disk(), disk());
        let closed: Arc<dyn Disk> = Arc::new(ClosedDisk(disk()));
        let mut queue = Fixture::new(first);
        queue.obey(QueueOrder::Release(1));
        assert_eq!((queue.go_on(), queue.arrive(0)), (Phase::Released, Tag::Waiting));
        queue.obey(QueueOrder::Fail);
        assert_eq!((queue.prepared.phase, queue.tag(0)), (Phase::Failing, Tag::Fetched));
        assert_eq!((queue.arrive(1), queue.counts()), (Tag::Fetched, (2, 2)));
        // Requests wait again.
        queue.obey(QueueOrder::Release(2));
        assert_eq!((queue.go_on(), queue.arrive(2)), (Phase::Released, Tag::Waiting));
        // The disk cannot be opened.
        queue.serve(3, &closed);
        assert_eq!((queue.prepared.phase, queue.tag(2)), (Phase::Failing, Tag::Fetched));
        assert_eq!(queue.counts(), (3, 3));
        queue.serve(4, &second);
        assert_eq!(queue.arrive(3), Tag::Busy(Op::Read, 4096));
        assert_eq!((queue.go_on(), queue.counts()), (Phase::Serving, (4, 3)));
        assert_eq!(queue.answers(), [(1, true), (2, true), (3, false), (4, true)]);
    }

    /// The ring keeps a polled descriptor open, also that of the channel of a disk.
    #[test]
    fn a_disk_is_released_after_the_poll_of_its_descriptor() {
        let mut queue = Fixture::new(disk());
        queue.prepared.is_polling = true;
        queue.obey(QueueOrder::Release(1));
        assert_eq!((queue.go_on(), queue.prepared.is_removing), (Phase::Releasing, true));
        // The poll is removed once.
        queue.with(|thread| {
            thread.release();
            assert_eq!(thread.prepared.pushed, 0);
        });
        assert!(queue.answers().is_empty());
        queue.prepared.is_polling = false;
        assert_eq!((queue.go_on(), queue.answers()), (Phase::Released, vec![(1, true)]));
    }
}

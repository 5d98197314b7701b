//! The thread of a queue: requests of the kernel become bios, completions become commits.
//!
//! ```text
//! fetch all tags ▸ take requests ▸ plan ▸ copy data of writes ▸ push, submit ▸ reap
//!                  ▸ copy data of reads ▸ commit, and fetch the next with the tag ▸ sleep
//!
//! tag: UNUSED ─ fetch ▸ FETCHED ─ the kernel has a request ▸ BUSY ─ commit ▸ FETCHED
//!                          └─ the kernel cancels the fetch ▸ ENDED
//! ```
//!
//! A thread owns its ring, a channel of the device, and memory for the data of each tag. It takes
//! no lock and allocates nothing per request. It ends when the kernel has cancelled all fetches:
//! when the device is stopped.
#![allow(unsafe_code)] // Submissions name descriptors and memory.
#![allow(clippy::disallowed_types)] // The flag of a failure is written once.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Bio, BufRef, Channel, Completion, Disk, Due, Op, Region, RegionId, Sector, Status,
};
use blockyard_os::map_region;
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
/// Entries of a ring in addition to one for each tag: the poll.
const MORE_ENTRIES: u32 = 1;
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
    /// Set by a thread that cannot fetch, so that the start of the device is not waited for.
    pub(crate) has_failed: Arc<AtomicBool>,
}

/// A queue whose thread has all that it needs, or serves.
pub(crate) struct QueueHandle {
    /// Gives the thread the device that it is to serve; `None` once it has it.
    go: Option<Sender<Arc<CharDevice>>>,
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
        let run = move || run(setup, &ready, &device);
        let thread = thread::Builder::new().name(name).spawn(run)?;
        let prepared = is_ready.recv().unwrap_or_else(|_| Err(io::Error::other("it panicked")));
        prepared.map(|()| QueueHandle { go: Some(go), thread })
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
        QueueHandle { go: None, thread }
    }

    /// Waits for the end of the thread: the device is stopped, or was never given.
    pub(crate) fn join(self) {
        drop(self.go);
        // A panic of the thread was reported when it happened.
        let _ = self.thread.join();
    }
}

fn run(setup: QueueSetup, ready: &Sender<io::Result<()>>, device: &Receiver<Arc<CharDevice>>) {
    // A yard that got its first block device at run time has not prepared the thread before.
    let prepared = crate::control::begin_io_flusher().and_then(|()| Prepared::new(setup));
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
    let (name, queue) = (prepared.setup.disk.name().to_owned(), prepared.setup.queue);
    let has_failed = Arc::clone(&prepared.setup.has_failed);
    match device.map(queue, prepared.setup.depth) {
        Ok(descriptors) => QueueThread { prepared: &mut prepared, device, descriptors }.serve(),
        Err(error) => {
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
    /// A request is being executed: its operation, and the length of its data in bytes.
    Busy(Op, u32),
    /// The kernel has cancelled the command.
    Ended,
}

/// A thread that has all but the device.
struct Prepared {
    setup: QueueSetup,
    ring: IoUring,
    channel: Box<dyn Channel>,
    /// The descriptor of the disk's channel, if it has one.
    wakes: Option<RawFd>,
    /// Memory for the data of all tags, one after the other.
    memory: Arc<Region>,
    region: RegionId,
    tags: Vec<Tag>,
    /// The number of tags that are fetched or busy.
    live: usize,
    /// Entries that were pushed and not submitted.
    pushed: usize,
    /// Whether the poll of `wakes` is pushed or in flight.
    is_polling: bool,
    /// Whether memory was used since it was returned to the system.
    has_data: bool,
    bios: Vec<Bio>,
    done: Vec<Completion>,
    zones: Vec<ZoneInfo>,
}

impl Prepared {
    fn new(setup: QueueSetup) -> io::Result<Prepared> {
        let mut channel = setup.disk.open().map_err(|error| io::Error::other(error.to_string()))?;
        let depth = usize::from(setup.depth);
        let memory = map_region(depth * setup.shape.io_bytes_max as usize)?;
        let region = channel.register(Arc::clone(&memory));
        let mut builder = IoUring::builder();
        // One thread submits; what the kernel has to do in it waits until it enters the kernel.
        builder.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag();
        Ok(Prepared {
            ring: builder.build(u32::from(setup.depth) + MORE_ENTRIES)?,
            wakes: channel.descriptor(),
            channel,
            memory,
            region,
            tags: vec![Tag::Unused; depth],
            live: 0,
            pushed: 0,
            is_polling: false,
            has_data: false,
            bios: Vec::with_capacity(depth),
            done: Vec::with_capacity(depth),
            zones: Vec::with_capacity(REPORT_ZONES),
            setup,
        })
    }

    /// Pushes an entry. The submission queue has space for one of each tag and for the poll.
    fn push(&mut self, entry: &Entry) {
        // SAFETY: an entry names the character device, which `QueueThread` holds, or the channel's
        // descriptor, which `self` holds, and no memory.
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
        for tag in 0..self.prepared.setup.depth {
            self.command(FETCH, tag, 0, 0);
        }
        self.prepared.live = self.prepared.tags.len();
        while self.prepared.live > 0 {
            let taken = self.take();
            let reaped = self.execute();
            // What was taken or reaped may have completed at once; look again before a sleep.
            if taken + reaped > 0 && !self.prepared.ring.completion().is_empty() {
                continue;
            }
            self.wait();
        }
    }

    /// Pushes a command for a tag, after which the kernel has the tag.
    fn command(&mut self, code: u32, tag: u16, result: i32, sector: u64) {
        let Prepared { setup, tags, .. } = &mut *self.prepared;
        tags[usize::from(tag)] = Tag::Fetched;
        let bytes = io_command(setup.queue, tag, result, sector);
        let entry = opcode::UringCmd16::new(Fd(self.device.descriptor()), code).cmd(bytes);
        self.prepared.push(&entry.build().user_data(tag.into()));
    }

    /// Completes a request; a negative result is an error number.
    fn commit(&mut self, tag: u16, result: i32, sector: u64) {
        let counts = &self.prepared.setup.counts;
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
            let QueueSetup { disk, queue, has_failed, .. } = &self.prepared.setup;
            let error = io::Error::from_raw_os_error(-result);
            tracing::error!(device = disk.name(), queue, tag, %error, "the kernel refuses a tag");
            // Release: pairs with the Acquire of the server, which waits for the start.
            has_failed.store(true, Ordering::Release);
        }
    }

    /// Begins the request of a tag.
    fn begin(&mut self, tag: u16) {
        // The only read of the descriptor.
        let descriptor = self.descriptors.read(tag);
        match self.prepared.setup.shape.plan(descriptor) {
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
        u64::from(tag) * u64::from(self.prepared.setup.shape.io_bytes_max)
    }

    fn begin_io(&mut self, tag: u16, mut bio: Bio) {
        let offset = self.data_offset(tag);
        // `plan` bounds the length of data; other operations have no buffer.
        let bytes = if bio.op.has_data() { (bio.sectors * 512) as u32 } else { 0 };
        let is_write = bytes > 0 && bio.op != Op::Read;
        let Prepared { setup, memory, region, tags, bios, has_data, .. } = &mut *self.prepared;
        if bytes > 0 {
            *has_data = true;
            bio = bio.with_buf(BufRef { region: *region, offset });
        }
        if is_write
            && let Err(error) =
                self.device.read_data((setup.queue, tag), memory, offset, bytes as usize)
        {
            return self.cannot_copy(tag, &error);
        }
        tags[usize::from(tag)] = Tag::Busy(bio.op, bytes);
        bios.push(bio.with_user_data(tag.into()));
    }

    #[cold]
    fn cannot_copy(&mut self, tag: u16, error: &io::Error) {
        let QueueSetup { disk, queue, .. } = &self.prepared.setup;
        let device = disk.name();
        tracing::warn!(device, queue, tag, %error, "cannot copy the data of a request");
        self.commit(tag, -Status::IoErr.errno(), 0);
    }

    /// Reports zones. Returns the length of the answer, or an error number.
    fn report(&mut self, tag: u16, from: Sector, count: u32) -> i32 {
        let Prepared { setup, zones, .. } = &mut *self.prepared;
        let mut entries = [[0; ZONE_BYTES]; REPORT_ZONES];
        let (mut next, mut done) = (from, 0);
        while done < count as usize && next.0 < setup.shape.params.sectors {
            zones.clear();
            let wanted = (count as usize - done).min(REPORT_ZONES);
            if setup.disk.report_zones(next, wanted, zones).is_err() || zones.is_empty() {
                return -Status::IoErr.errno();
            }
            for (entry, zone) in entries.iter_mut().zip(zones.iter()) {
                *entry = zone_entry(zone);
                next = zone.start + zone.sectors;
            }
            let bytes = entries[..zones.len().min(REPORT_ZONES)].as_flattened();
            let offset = (done * ZONE_BYTES) as u64;
            if let Err(error) = self.device.write_bytes((setup.queue, tag), offset, bytes) {
                let (device, queue) = (setup.disk.name(), setup.queue);
                tracing::warn!(device, queue, %error, "cannot copy a zone report");
                return -Status::IoErr.errno();
            }
            done += zones.len().min(REPORT_ZONES);
        }
        // The kernel has zeroed the rest, and asks again for what a shorter answer would lack.
        (count as usize * ZONE_BYTES) as i32 // At most 4 MiB.
    }

    /// Pushes and submits bios, and completes requests. Returns the number of completions.
    fn execute(&mut self) -> usize {
        let Prepared { channel, bios, done, .. } = &mut *self.prepared;
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
        let Prepared { setup, memory, .. } = &*self.prepared;
        match op {
            Op::Read => {
                let offset = self.data_offset(tag);
                let place = (setup.queue, tag);
                if let Err(error) = self.device.write_data(place, memory, offset, bytes as usize) {
                    return self.cannot_copy(tag, &error);
                }
                setup.counts.read_bytes.add(bytes.into());
            }
            Op::Write | Op::ZoneAppend => setup.counts.written_bytes.add(bytes.into()),
            _ => {}
        }
        let sector = if op == Op::ZoneAppend { completion.sector.0 } else { 0 };
        self.commit(tag, bytes as i32, sector); // At most io_bytes_max.
    }

    /// Submits what was pushed, and sleeps until the kernel or the device has something to do.
    fn wait(&mut self) {
        let it = &mut *self.prepared;
        if it.channel.in_flight() == 0 {
            let timeout = if it.has_data { IDLE_WAIT } else { LONG_WAIT };
            it.enter(Some(timeout));
            if it.has_data && it.ring.completion().is_empty() {
                blockyard_os::forget(&it.memory, 0, it.memory.len_bytes());
                it.has_data = false;
            }
            return;
        }
        let timeout = match it.channel.due() {
            Due::At(at) => Duration::from_nanos(at.since(Monotonic.now())),
            Due::Never if it.wakes.is_some() => LONG_WAIT,
            Due::Never => COMPLETION_POLL_INTERVAL,
        };
        let wakes = it.wakes;
        if timeout.is_zero() || (wakes.is_some() && !it.channel.may_sleep()) {
            if it.pushed > 0 || it.ring.submission().taskrun() {
                it.enter(None);
            }
            return;
        }
        if let Some(wakes) = wakes.filter(|_| !it.is_polling) {
            it.is_polling = true;
            let poll = opcode::PollAdd::new(Fd(wakes), libc::POLLIN as u32).build();
            it.push(&poll.user_data(POLL));
        }
        it.enter(Some(timeout));
    }
}

//! The device queue that one channel has of a volume: turns requests into reads and log records.
//!
//! A write that need not be durable completes when it is in memory, in its order among the other
//! writes. A write with FUA, and a flush, completes when the committer answers. A read completes
//! when the disk has delivered the data.
//!
//! **Reads.** A request is cut into runs of blocks that are contiguous on disk, and all runs are
//! read at once. Blocks that are in memory, or known to be zeros, are copied immediately. Of the
//! reads that have finished, a few are decoded at a time ([`READS_AT_ONCE`]).
//!
//! **Rate limits** of a volume say how many reads and writes, and how many of their bytes, all its
//! queues together may start per second. These limits, the compression and the sync mode can change
//! while the volume is used: a queue looks once a batch whether they have.
//!
//! **The lease** of a pool in remote storage: while it was not renewed in time, requests wait as
//! for a rate limit, because another opener may have the pool. They get an error when the pool is
//! lost.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::clock::Clock;
use blockyard_core::{
    Batch, CompletionBatch, DeviceQueue, Due, Flags, Nanos, Op, Pieces, SECTOR_SHIFT, Started,
    Status, Work,
};
use blockyard_store::buffer::Buffer;
use blockyard_store::remote;
use blockyard_store::{EventFd, LeaseTerm, PoolBacking, Reads, SegmentStore, Serving};
use blockyard_sync::rcu_cell::RcuReader;
use blockyard_volume_format::BLOCK_BYTES_MAX;
use blockyard_volume_format::entry::Entry;

use crate::config::SyncMode;
use crate::device::{DEPTH, Shared};
use crate::handle::{NO_REPLY, Outcome, VolumeHandle};
use crate::map::Lookup;
use crate::settings::{LiveSettings, Rates};

/// Most records that a queue has in the committer's completion queue.
pub(crate) const RECORDS: usize = 128;

/// Most records that a request needs: zeros in two spans, and a partial block at each end.
const RECORDS_EACH: usize = 4;

/// Shortest and longest wait before the queue checks for answers, in nanoseconds.
const CHECK_NS: (u64, u64) = (20_000, 1_000_000);

/// Longest sleeps. The committer and reads wake the owner, and `SLEEP_MAX` only bounds the sleep.
/// No thread wakes an owner that waits for memory, hence `SLEEP_BLOCKED`.
const SLEEP_MAX: Duration = Duration::from_millis(50);
const SLEEP_BLOCKED: Duration = Duration::from_micros(200);

/// Most finished reads that the queue takes at once. Decoding a block takes microseconds. The owner
/// can start other reads in between, so that the disk has some to do meanwhile. With 32 reads in
/// flight, bounds of 1 to 8 gave 1.2 to 1.7 times the reads that no bound gave
/// (docs/measurements/volume.md, "Finished reads taken at a time").
const READS_AT_ONCE: usize = 4;

/// How often a queue that waits for a rate limit looks whether the limit has changed, at least.
const LIMIT_CHECK_NS: u64 = 100_000_000;

/// A request that waits for the committer or for reads.
struct Waiting {
    started: Option<Started>,
    /// Records or reads that are not answered yet.
    left: u32,
    status: Status,
}

/// The device queue that one channel has of a volume.
pub struct VolumeQueue<D: SegmentStore = PoolBacking> {
    /// Dropped before `shared`, which marks the volume as served: the handle waits for its records.
    handle: VolumeHandle<D>,
    shared: Arc<Shared<D>>,
    settings: RcuReader<LiveSettings>,
    /// Copies of the present settings.
    sync: SyncMode,
    rates: Arc<Rates>,
    /// Made by the first read.
    reading: Option<Reading<D>>,
    /// Finished reads were left for the next call.
    has_reads: bool,
    /// The eventfd that the committer rings while the owner sleeps, and that finished reads ring.
    event_fd: Option<EventFd>,
    /// The owner's event loop polls the eventfd.
    listens: bool,
    /// The owner has slept, so the eventfd may have been rung.
    dozed: bool,
    waiting: Vec<Waiting>,
    free: Vec<u32>,
    /// The rest of the last request could not start for lack of memory.
    blocked: bool,
    /// Until when the pool may be used; `None`: without a limit.
    term: Option<Arc<LeaseTerm>>,
    /// The rate limits of the volume, or the lease of the pool, let no request start before this
    /// time.
    limited: Option<Nanos>,
    /// When the oldest request began to wait, and when to check next.
    since: Nanos,
    check_at: Nanos,
}

impl<D: SegmentStore> VolumeQueue<D> {
    pub(crate) fn new(shared: Arc<Shared<D>>, handle: VolumeHandle<D>) -> VolumeQueue<D> {
        let empty = || Waiting { started: None, left: 0, status: Status::Ok };
        let settings = RcuReader::new(&shared.settings);
        let now = shared.settings.get();
        let term = handle.pool().segments().directory().lease_term();
        VolumeQueue {
            handle,
            term,
            shared,
            settings,
            sync: now.sync,
            rates: Arc::clone(&now.rates),
            reading: None,
            has_reads: false,
            event_fd: None,
            listens: false,
            dozed: false,
            waiting: (0..DEPTH).map(|_| empty()).collect(),
            free: (0..u32::from(DEPTH)).rev().collect(),
            blocked: false,
            limited: None,
            since: Nanos(0),
            check_at: Nanos(0),
        }
    }

    fn in_flight(&self) -> usize {
        self.waiting.len() - self.free.len()
    }

    /// Takes over settings that have changed.
    #[cold]
    fn adopt(&mut self) {
        let now = Arc::clone(self.settings.get());
        (self.sync, self.rates) = (now.sync, Arc::clone(&now.rates));
        self.handle.set_compression(now.compress);
    }

    fn is_durable(&self, flags: Flags) -> bool {
        match self.sync {
            SyncMode::Standard => flags.contains(Flags::FUA),
            SyncMode::Always => true,
            SyncMode::Disabled => false,
        }
    }

    /// The eventfd, made at the first use; none if the system refuses it.
    fn event_fd(&mut self) -> Option<&EventFd> {
        if self.event_fd.is_none()
            && let Ok(event_fd) = EventFd::new()
        {
            self.handle.completion_queue().event_count().set_waker(event_fd.waker());
            self.event_fd = Some(event_fd);
        }
        self.event_fd.as_ref()
    }

    fn reading(&mut self) -> (&mut Reading<D>, &mut VolumeHandle<D>) {
        if self.reading.is_none() {
            self.event_fd();
        }
        let VolumeQueue { reading, handle, event_fd, .. } = self;
        let directory = handle.pool().segments();
        let make = || Reading::new(directory.directory().reads(event_fd.as_ref()));
        let reading = reading.get_or_insert_with(make);
        (reading, handle)
    }

    /// Reads synchronously.
    fn read_now(&mut self, work: &impl Work) -> Status {
        let len = (work.sectors() << SECTOR_SHIFT) as usize;
        let mut into = Pieces::new(work.segments());
        self.handle.read(work.sector().bytes(), len, |bytes| into.write(bytes))
    }

    /// Starts a read. Returns the request if no slot is free.
    fn read(
        &mut self,
        started: Started,
        now: Nanos,
        done: &mut CompletionBatch,
    ) -> Option<Started> {
        if self.in_flight() == 0 {
            self.since = now;
        }
        let Some(slot) = self.free.pop() else { return Some(started) };
        let (reading, handle) = self.reading();
        let (left, status) = reading.begin(handle, &started, slot);
        if left == 0 {
            self.free.push(slot);
            done.complete(started, status);
        } else {
            self.waiting[slot as usize] = Waiting { started: Some(started), left, status };
        }
        None
    }

    /// Takes finished reads, [`READS_AT_ONCE`] at most. Returns whether there were any.
    fn take_reads(&mut self, done: &mut CompletionBatch) -> bool {
        let VolumeQueue { reading: Some(reading), has_reads, handle, waiting, free, .. } = self
        else {
            return false;
        };
        let mut found = false;
        for _ in 0..READS_AT_ONCE {
            let Some(ended) = reading.take() else { break };
            found = true;
            let waits = &mut waiting[ended.slot as usize];
            let Some(started) = waits.started.take() else { continue };
            let slot = ended.slot;
            let status = reading.finish(handle, ended, &started);
            if !status.is_ok() {
                waits.status = status;
            }
            waits.left -= 1;
            if waits.left == 0 {
                done.complete(started, waits.status);
                free.push(slot);
            } else {
                waits.started = Some(started);
            }
        }
        *has_reads = reading.is_any();
        // Submit the reads that were short, for their remaining bytes.
        reading.submit();
        found
    }

    /// Ends the sleep: resets the eventcount and the eventfd.
    fn rise(&mut self) {
        if std::mem::take(&mut self.dozed)
            && let Some(event_fd) = &self.event_fd
        {
            self.handle.completion_queue().event_count().rise();
            event_fd.reset();
        }
    }

    /// Whether `poll` would find an answer or a finished read.
    fn is_any(&mut self) -> bool {
        self.handle.is_any() || self.reading.as_mut().is_some_and(Reading::is_any)
    }

    /// Sends the record of a write. Returns the number of records, and the outcome.
    fn write(&mut self, work: &impl Work, token: u32, durable: bool) -> (u32, Outcome) {
        let len = (work.sectors() << SECTOR_SHIFT) as usize;
        let fill = |from: usize, into: &mut [u8]| {
            let mut pieces = Pieces::new(work.segments());
            pieces.skip(from);
            pieces.read(into);
        };
        let outcome = self.handle.write(work.sector().bytes(), len, &fill, token, durable);
        (u32::from(outcome == Outcome::Taken), outcome)
    }

    /// Sends the records of a request for zeros: one for each span of whole blocks, and one for a
    /// partial block at each end.
    fn zero(&mut self, work: &impl Work, token: u32, durable: bool) -> (u32, Outcome) {
        // Reserve all places first: a record that was sent cannot be taken back.
        if !self.handle.reserve(RECORDS_EACH as u32) {
            return (0, Outcome::Full);
        }
        let sent = self.zero_parts(work, token, durable);
        self.handle.release();
        sent
    }

    fn zero_parts(&mut self, work: &impl Work, token: u32, durable: bool) -> (u32, Outcome) {
        let size = u64::from(self.shared.live.meta.block_bytes);
        let span = blockyard_volume_format::NODE_BLOCKS * size;
        let (mut at, end) = (work.sector().bytes(), work.end().bytes());
        let mut sent = 0;
        while at < end {
            let block_end = (at / size + 1) * size;
            let (to, outcome) = if at.is_multiple_of(size) && end >= block_end {
                let to = (end - end % size).min((at / span + 1) * span);
                (to, self.handle.zero(at, to - at, token, durable))
            } else {
                let to = block_end.min(end);
                let fill = |_: usize, into: &mut [u8]| into.fill(0);
                (to, self.handle.write(at, (to - at) as usize, &fill, token, durable))
            };
            if outcome != Outcome::Taken {
                return (sent, outcome);
            }
            sent += 1;
            at = to;
        }
        (sent, Outcome::Taken)
    }

    /// Whether a request begins and ends at block boundaries of the volume.
    fn is_whole_blocks(&self, work: &impl Work) -> bool {
        let size = u64::from(self.shared.live.meta.block_bytes);
        work.sector().bytes().is_multiple_of(size) && work.end().bytes().is_multiple_of(size)
    }

    /// Starts a request that changes data. Returns the request if there is no memory for it now.
    fn change(
        &mut self,
        started: Started,
        now: Nanos,
        done: &mut CompletionBatch,
    ) -> Option<Started> {
        if self.in_flight() == 0 {
            self.since = now;
        }
        let durable = self.is_durable(started.flags());
        // Zeros that cover partial blocks become several records, which are accepted together or
        // not at all. An early answer could be possible for some of them and refused for others.
        let is_one = started.op() == Op::Write || self.is_whole_blocks(&started);
        let mut early = !durable && is_one && self.handle.may_answer_early();
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => return Some(started),
        };
        let token = if early { NO_REPLY } else { slot };
        let (sent, outcome) = match started.op() {
            Op::Write => match self.write(&started, token, durable) {
                // The write may be impossible to answer early, yet possible to start.
                (0, Outcome::Full) if early => {
                    early = false;
                    self.write(&started, slot, durable)
                }
                begun => begun,
            },
            Op::Discard | Op::WriteZeroes => self.zero(&started, token, durable),
            Op::Flush if self.sync == SyncMode::Disabled => (0, Outcome::Ended(Status::Ok)),
            Op::Flush => {
                let outcome = self.handle.flush(slot);
                (u32::from(outcome == Outcome::Taken), outcome)
            }
            _ => (0, Outcome::Ended(Status::NotSupp)),
        };
        let early = early && started.op() != Op::Flush;
        if outcome == Outcome::Full && sent == 0 {
            self.free.push(slot);
            return Some(started);
        }
        let status = match outcome {
            Outcome::Taken => Status::Ok,
            // A part of the request is in flight, and the rest is refused.
            Outcome::Full => Status::Resource,
            Outcome::Ended(status) => status,
        };
        if sent == 0 || early {
            self.free.push(slot);
            done.complete(started, status);
        } else {
            self.waiting[slot as usize] = Waiting { started: Some(started), left: sent, status };
        }
        None
    }

    /// Sets the time of the next check: soon while the oldest request is young, later as it ages.
    fn plan(&mut self, now: Nanos) {
        let (first, last) = CHECK_NS;
        self.check_at = now + (now.since(self.since) / 8).clamp(first, last);
    }
}

impl<D: SegmentStore> DeviceQueue for VolumeQueue<D> {
    fn start(&mut self, now: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        self.blocked = false;
        if self.settings.unchanged().is_none() {
            self.adopt();
        }
        self.handle.hold();
        while let Some(started) = batch.next() {
            // Checked for each request: the one before may have waited for the storage.
            match self.term.as_ref().map_or(Serving::Yes, |term| term.serving()) {
                Serving::Yes => {}
                Serving::Held => {
                    self.limited = Some(Nanos(now.0 + LIMIT_CHECK_NS));
                    batch.requeue(started);
                    break;
                }
                Serving::Refused => {
                    done.complete(started, Status::IoErr);
                    continue;
                }
            }
            let bytes = limited_bytes(&started);
            if let Some(bytes) = bytes
                && let Err(at) = self.rates.take(now.0, bytes)
            {
                self.limited = Some(Nanos(at.min(now.0 + LIMIT_CHECK_NS)));
                batch.requeue(started);
                break;
            }
            if started.op() == Op::Read && started.is_merged() {
                // Merged reads of neighbouring sectors: one call reads them. If it fails, each is
                // read alone.
                let status = self.read_now(&started);
                if !status.is_ok() {
                    batch.break_up(started);
                    break;
                }
                done.complete(started, status);
                continue;
            }
            let left = if started.op() == Op::Read {
                self.read(started, now, done)
            } else if self.handle.out() + RECORDS_EACH > RECORDS {
                Some(started)
            } else {
                self.change(started, now, done)
            };
            if let Some(started) = left {
                bytes.inspect(|bytes| self.rates.give_back(*bytes));
                self.blocked = true;
                batch.requeue(started);
                break;
            }
        }
        self.handle.release_all();
        if let Some(reading) = &mut self.reading {
            reading.submit();
            self.take_reads(done);
        }
        self.plan(now);
    }

    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        self.rise();
        let mut found = self.take_reads(done);
        while let Some(reply) = self.handle.take() {
            found = true;
            let Some(waiting) = self.waiting.get_mut(reply.token as usize) else { continue };
            if !reply.status.is_ok() {
                waiting.status = reply.status;
            }
            waiting.left -= 1;
            if waiting.left == 0
                && let Some(started) = waiting.started.take()
            {
                done.complete(started, waiting.status);
                self.free.push(reply.token);
            }
        }
        if found {
            self.since = now;
        }
        // There may be memory now, so the caller offers the remaining requests again.
        self.blocked = false;
        self.limited.take_if(|at| *at <= now);
        self.plan(now);
    }

    fn room(&self) -> usize {
        if self.blocked || self.limited.is_some() { 0 } else { self.free.len() }
    }

    fn due(&self) -> Due {
        if self.handle.is_any() || self.has_reads {
            return Due::At(Nanos(0));
        }
        let looks = self.blocked || !self.listens;
        let look = (looks && self.waits_for_others()).then_some(self.check_at);
        match (look, self.limited) {
            (Some(look), Some(limited)) => Due::At(look.min(limited)),
            (Some(at), None) | (None, Some(at)) => Due::At(at),
            (None, None) => Due::Never,
        }
    }

    fn waits_for_others(&self) -> bool {
        self.in_flight() > 0 || self.blocked
    }

    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        if self.has_reads || (!self.waits_for_others() && self.limited.is_none()) {
            return;
        }
        let longest = if self.blocked { SLEEP_BLOCKED } else { SLEEP_MAX };
        let longest = match until {
            Due::At(at) => longest.min(Duration::from_nanos(at.since(clock.now()))),
            Due::Never => longest,
        };
        let reads = self.reading.as_ref().map_or(0, Reading::in_flight);
        if reads == 0 {
            self.handle.completion_queue().event_count().sleep(longest, || self.handle.is_any());
        } else if self.handle.out() == 0
            && let Some(reading) = &mut self.reading
        {
            reading.sleep(longest);
        } else if self.may_sleep()
            && let Some(event_fd) = &self.event_fd
        {
            event_fd.wait(longest);
        }
    }

    fn descriptor(&mut self) -> Option<RawFd> {
        let descriptor = self.event_fd().map(AsRawFd::as_raw_fd);
        self.listens = descriptor.is_some();
        descriptor
    }

    fn may_sleep(&mut self) -> bool {
        if self.is_any() {
            return false;
        }
        self.dozed = true;
        self.handle.completion_queue().event_count().doze(|| self.handle.is_any())
    }
}

/// The bytes of a request that the rate limits count; none for operations that are not limited.
fn limited_bytes(work: &impl Work) -> Option<u64> {
    matches!(work.op(), Op::Read | Op::Write).then(|| work.sectors() << SECTOR_SHIFT)
}

impl<D: SegmentStore> fmt::Debug for VolumeQueue<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeQueue").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// A block of zeros.
static ZEROS: [u8; BLOCK_BYTES_MAX as usize] = [0; BLOCK_BYTES_MAX as usize];

/// A run of blocks of one request that one read covers.
#[derive(Debug, Default)]
struct Row {
    /// The slot of the request.
    slot: u32,
    /// The first block of the run.
    first: u64,
    entries: Vec<Entry>,
}

/// The reads of one queue.
#[derive(Debug)]
struct Reading<D: SegmentStore> {
    reads: D::Reads,
    /// Runs, by the token of their read.
    rows: Vec<Row>,
    free: Vec<u32>,
    found: Vec<Lookup>,
}

/// Copies `bytes` into the buffers of a request, starting at byte `at`.
fn put_at(started: &Started, at: usize, bytes: &[u8]) {
    let mut pieces = Pieces::new(started.segments());
    pieces.skip(at);
    pieces.write(bytes);
}

/// Where a block lies in a request: the offset in the request, and the range in the block.
fn window(started: &Started, size: u64, block: u64) -> (usize, std::ops::Range<usize>) {
    let (at, end) = (started.sector().bytes(), started.end().bytes());
    let (start, stop) = (block * size, (block + 1) * size);
    let (from, to) = (at.max(start), end.min(stop));
    ((from - at) as usize, (from - start) as usize..(to - start) as usize)
}

impl<D: SegmentStore> Reading<D> {
    fn new(reads: D::Reads) -> Reading<D> {
        Reading { reads, rows: Vec::new(), free: Vec::new(), found: Vec::new() }
    }

    /// Starts the reads for a request. Returns how many runs are in flight, and the status of what
    /// has failed already.
    fn begin(
        &mut self,
        handle: &mut VolumeHandle<D>,
        started: &Started,
        slot: u32,
    ) -> (u32, Status) {
        let size = handle.block_bytes() as u64;
        let (mut block, end) =
            (started.sector().bytes() / size, started.end().bytes().div_ceil(size));
        let (mut rows, mut status) = (0, Status::Ok);
        let mut found = std::mem::take(&mut self.found);
        while block < end {
            handle.check_at(block, end - block, &mut found);
            let mut next = 0;
            while next < found.len() {
                let at = block + next as u64;
                let (place, part) = window(started, size, at);
                match &found[next] {
                    Lookup::Zero | Lookup::Cleared { .. } => {
                        put_at(started, place, &ZEROS[part]);
                        next += 1;
                    }
                    Lookup::Memory { payload, index, .. } => {
                        let bytes = handle.remember(at, payload, *index);
                        put_at(started, place, &bytes[part]);
                        next += 1;
                    }
                    // About one read in a thousand needs a map page from disk: read it
                    // synchronously.
                    Lookup::NotResident(_) => {
                        if let Err(error) = handle.fetch_for(at) {
                            status = error;
                            next += 1;
                        } else {
                            handle.check_at(at, end - at, &mut found);
                            (block, next) = (at, 0);
                        }
                    }
                    Lookup::Disk(_) => {
                        let (count, bytes) = handle.row(&found[next..]);
                        self.begin_row(handle, slot, at, &found[next..next + count], bytes);
                        rows += 1;
                        next += count;
                    }
                }
            }
            block += found.len() as u64;
        }
        found.clear();
        self.found = found;
        (rows, status)
    }

    fn begin_row(
        &mut self,
        handle: &mut VolumeHandle<D>,
        slot: u32,
        first: u64,
        found: &[Lookup],
        bytes: usize,
    ) {
        let number = self.free.pop().unwrap_or_else(|| {
            self.rows.push(Row::default());
            self.rows.len() as u32 - 1
        });
        let row = &mut self.rows[number as usize];
        (row.slot, row.first) = (slot, first);
        row.entries.clear();
        row.entries.extend(found.iter().filter_map(|found| match found {
            Lookup::Disk(entry) => Some(*entry),
            _ => None,
        }));
        // The memory in flight is bounded by the queue's requests and their length.
        let buffer = handle.pool().memory().take_beyond(bytes);
        match handle.place(&row.entries[0]) {
            Some((file, offset)) => self.reads.begin(number, &file, offset, buffer),
            // The segment has no such file. The second attempt in `finish` reports the damage.
            None => {
                let missing = Arc::clone(&handle.pool().segments().files()[0]);
                self.reads.begin(number, &missing, u64::MAX >> 1, buffer);
            }
        }
    }

    /// Submits the reads that were started.
    fn submit(&mut self) {
        self.reads.submit();
    }

    /// Takes a finished run.
    fn take(&mut self) -> Option<Ended> {
        let got = self.reads.take()?;
        let row = &self.rows[got.token as usize];
        let buffer = got.buffer.filter(|_| got.result.is_ok());
        let unanswered = got.result.err().filter(remote::is_unanswered);
        Some(Ended { slot: row.slot, number: got.token, buffer, unanswered })
    }

    /// Copies the data of a finished run into the request, and returns the status.
    fn finish(
        &mut self,
        handle: &mut VolumeHandle<D>,
        mut ended: Ended,
        started: &Started,
    ) -> Status {
        let row = std::mem::take(&mut self.rows[ended.number as usize]);
        let size = handle.block_bytes() as u64;
        let mut status = Status::Ok;
        let mut from = 0;
        // This thread does not ask again: it would wait as long, and with it its other devices.
        let repeated = match ended.unanswered.take() {
            None => &row.entries[..],
            Some(error) => {
                status = handle.is_bad(row.first, &row.entries[0], Ok(error));
                &[]
            }
        };
        for (block, entry) in (row.first..).zip(repeated) {
            let len = entry.stored_bytes() as usize;
            let (place, part) = window(started, size, block);
            let stored = ended.buffer.as_mut().map(|buffer| &mut buffer[from..from + len]);
            from += len;
            if let Some(plain) = stored.and_then(|stored| handle.unpack(block, entry, stored)) {
                put_at(started, place, &plain[part]);
                continue;
            }
            // The block may have moved meanwhile. If not, this read returns the error and logs it.
            let mut at = place;
            let bytes = started.sector().bytes() + place as u64;
            let read = handle.read(bytes, part.len(), |bytes| {
                put_at(started, at, bytes);
                at += bytes.len();
            });
            if !read.is_ok() {
                status = read;
            }
        }
        self.rows[ended.number as usize] = row;
        self.free.push(ended.number);
        status
    }

    /// Whether a run has finished.
    fn is_any(&mut self) -> bool {
        self.reads.is_any()
    }

    /// How many runs are in flight.
    fn in_flight(&self) -> usize {
        self.reads.in_flight()
    }

    /// Sleeps until a run has finished.
    fn sleep(&mut self, at_most: Duration) {
        self.reads.sleep(at_most);
    }
}

/// A finished run.
struct Ended {
    /// The slot of the request.
    slot: u32,
    number: u32,
    /// The data, if the read delivered all of it.
    buffer: Option<Buffer>,
    /// The error, if remote storage has not answered.
    unanswered: Option<io::Error>,
}

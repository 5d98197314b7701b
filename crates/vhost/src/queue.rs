//! The thread of a ring: it executes requests of the guest inline or as bios, and answers them.
//!
//! ```text
//! take chains ▸ plan ┬▸ execute inline ──────┬▸ answer ▸ show groups of answers ▸ call the guest
//!                    └▸ push, submit ▸ reap ─┘
//!       ▸ spin ▸ sleep until a kick, a completion, or the end
//! ```
//!
//! A read or a write of whole physical blocks, whose data are one piece of memory, is executed
//! inline if the channel does that. The others are pushed together, and the plug merges them.
//!
//! A thread owns its ring and a channel of the device, takes no lock, and allocates nothing per
//! request, except for what the device needs for a report of its zones. Bios point into the memory
//! of the guest. Data whose buffers do not consist of whole blocks, and the data of an append in
//! several buffers, are copied through a bounce buffer, which one request has at a time; the
//! requests after it wait.
//!
//! ```text
//! SERVING ── begin_stop ──▸ STOPPING ── what it took is answered ──▸ ENDED
//!    ◂───── cancel_stop ──────┘
//! SERVING, STOPPING ── the ring is malformed ──▸ FAILED
//! ```
#![allow(clippy::disallowed_types)] // The state of a thread is read once per batch.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blockyard_core::channel::ChannelGroup;
use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Bio, BufRef, Channel, Completion, Disk, Due, Flags, Nanos, Op, Region, RegionId, Sector, Status,
};
use blockyard_os::epoll::{Epoll, Events, Watch, Watched};
use blockyard_os::map_region;
use blockyard_os::socket::{self, Interest, Ready, Wake};
use blockyard_sync::atomics::{AtomicU32, Ordering, spin_hint};
use blockyard_sync::pad::Padded;

use crate::device::{
    BOUNCE_BYTES, DeviceShape, LogLimits, QUEUE_ENTRIES_MAX, QueueCounts, more_lines,
};
use crate::inflight::RingRecord;
use crate::latency_sampler::LatencySampler;
use crate::memory::{
    GuestMap, GuestPiece, REGIONS_MAX, for_each_head_piece, len_bytes, pop_byte, skip,
};
use crate::request::{
    BlkHeader, BlkStatus, HEADER_BYTES, Plan, RANGE_BYTES, ZONE_BYTES, report_header,
    zone_descriptor,
};
use crate::spin::SpinBudget;
use crate::virtqueue::{Chain, RingFault, RingPlace, Virtqueue};

/// The most pieces of a chain: its buffers, each of which may lie in several regions of memory.
const PIECES_MAX: usize = QUEUE_ENTRIES_MAX as usize + REGIONS_MAX;
/// The most bios of a request.
const BIOS_PER_REQUEST: usize = PIECES_MAX;
/// The bytes that are copied at once to or from the bounce buffer.
const COPY_BYTES: usize = 4096;
/// The length of a status, and of the sector that an append returns.
const STATUS_BYTES: u64 = 1;
const SECTOR_BYTES: u64 = 8;
/// The longest tail of a request: the sector of an append, and the status.
const TAIL_BYTES_MAX: usize = (SECTOR_BYTES + STATUS_BYTES) as usize;
/// The zones that a report reads at once.
const REPORT_ZONES: usize = 64;
/// The most requests that are executed inline before the guest is called. Those that are pushed are
/// one batch for the plug, as many as there is room for.
const BATCH_MAX: usize = 32;
/// The guest is shown the answer to a longer request at once, and called: the execution of others
/// would delay it noticeably.
const BATCHED_BYTES_MAX: u32 = 64 << 10;
/// The longest sleep while the device works, after which the thread looks for completions.
const COMPLETION_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Tokens of the epoll set: a kick of the guest, the wake of the thread, and the device.
const KICK: u64 = 0;
const WAKE: u64 = 1;
const DEVICE: u64 = 2;
/// The longest sleep of a thread that has nothing to do.
const IDLE_WAIT: Duration = Duration::from_secs(60);

/// What a thread needs to serve a ring.
pub(crate) struct QueueSetup {
    pub(crate) name: String,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) shape: Arc<DeviceShape>,
    pub(crate) map: Arc<GuestMap>,
    pub(crate) place: RingPlace,
    pub(crate) record: Option<RingRecord>,
    pub(crate) event_idx: bool,
    /// Whether each write has to be durable when it is answered.
    pub(crate) write_through: bool,
    pub(crate) kick: File,
    pub(crate) call: Option<File>,
    /// Told when the ring is malformed.
    pub(crate) error: Option<File>,
    pub(crate) counts: Arc<Padded<QueueCounts>>,
    /// The bounds on log lines about the device.
    pub(crate) log_limits: Arc<LogLimits>,
    /// The channels of the connection.
    pub(crate) channels: Arc<ChannelGroup>,
    /// The percentage of the time in which the thread may spin, besides the spins that save time.
    pub(crate) poll_percent: u32,
}

/// A ring that is being served.
pub(crate) struct RunningQueue {
    stop: Arc<StopState>,
    thread: JoinHandle<QueueEnd>,
}

/// How the thread of a ring ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueEnd {
    /// The index of the next available chain.
    pub(crate) next_available: u16,
    /// Whether the ring is malformed.
    pub(crate) is_malformed: bool,
}

/// Whether a thread serves its ring; the diagram is in the head of the module.
struct StopState {
    phase: AtomicU32,
    wake: Wake,
}

impl StopState {
    const SERVING: u32 = 0;
    const STOPPING: u32 = 1;
    const ENDED: u32 = 2;
    const FAILED: u32 = 3;

    /// Changes the phase, if it is the first one.
    fn enter(&self, from: u32, to: u32) -> bool {
        // AcqRel: the caller that ends the thread sees what the thread did, and the thread what was
        // done before.
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl RunningQueue {
    /// Starts the thread of a ring.
    ///
    /// # Errors
    /// If the ring is malformed, or the device or the system refuses.
    pub(crate) fn start(setup: QueueSetup) -> io::Result<RunningQueue> {
        let phase = AtomicU32::new(StopState::SERVING);
        let stop = Arc::new(StopState { phase, wake: Wake::new()? });
        let mut queue = QueueThread::new(setup, Arc::clone(&stop))?;
        let name = format!("vhost-{}", queue.setup.name);
        let run = move || {
            let is_malformed = !queue.run();
            QueueEnd { next_available: queue.ring.next_available(), is_malformed }
        };
        let thread = thread::Builder::new().name(name).spawn(run)?;
        Ok(RunningQueue { stop, thread })
    }

    /// Asks the thread to end when the requests that it took are answered.
    pub(crate) fn begin_stop(&self) {
        // Otherwise it is stopping already.
        let _ = self.stop.enter(StopState::SERVING, StopState::STOPPING);
        self.stop.wake.raise();
    }

    /// Lets a thread go on that may have been asked to end; `false` if it has ended, or is about
    /// to. One whose ring is malformed ends in any case.
    pub(crate) fn cancel_stop(&self) -> bool {
        // Acquire: as in `StopState::enter`.
        let phase = || self.stop.phase.load(Ordering::Acquire);
        self.stop.enter(StopState::STOPPING, StopState::SERVING)
            || matches!(phase(), StopState::SERVING | StopState::FAILED)
    }

    /// Whether the thread has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// A ring whose thread panicked.
    #[cfg(test)]
    pub(crate) fn panicked() -> RunningQueue {
        let phase = AtomicU32::new(StopState::SERVING);
        let stop = Arc::new(StopState { phase, wake: Wake::new().unwrap() });
        RunningQueue { stop, thread: thread::spawn(|| panic!("this test wants a panic")) }
    }

    /// Waits until the requests that the thread took are answered; `None` if it panicked.
    pub(crate) fn stop(self) -> Option<QueueEnd> {
        self.begin_stop();
        self.thread.join().ok()
    }
}

/// A request that was taken and is not answered.
#[derive(Clone, Copy, Debug)]
struct ActiveRequest {
    op: Op,
    /// The bios that have not completed.
    left: u32,
    /// The first bio that failed.
    failed: Option<(Sector, Status)>,
    /// The length of the data, in bytes.
    bytes: u32,
    uses_bounce: bool,
}

/// The place of what the device writes besides data: for an append the sector, and the status. 9
/// bytes have at most 9 pieces.
#[derive(Clone, Copy, Debug, Default)]
struct Tail {
    pieces: [GuestPiece; 9],
    count: u8,
}

impl Tail {
    fn push(&mut self, piece: GuestPiece) {
        self.pieces[usize::from(self.count)] = piece;
        self.count += 1;
    }

    fn pieces(&self) -> &[GuestPiece] {
        &self.pieces[..usize::from(self.count)]
    }
}

/// What became of a request that was to start.
#[derive(Clone, Copy, Debug)]
enum RequestStart {
    /// The bios are made.
    InFlight(ActiveRequest),
    /// It is executed, and not answered.
    Executed(ActiveRequest),
    /// It has to wait for the bounce buffer.
    Waits,
    /// It has ended without a bio; the device wrote this many bytes of data.
    Ended(BlkStatus, u32),
}

struct QueueThread {
    setup: QueueSetup,
    stop: Arc<StopState>,
    ring: Virtqueue,
    channel: Box<dyn Channel>,
    /// The descriptors that end a sleep. Kicks and the device's are watched for arrivals, so that
    /// the thread needs no call to read them.
    watched: Arc<Epoll>,
    events: Events,
    /// The device's descriptor, if it has one.
    device: Option<Watched>,
    /// The regions of the guest's memory in the channel, by their indexes.
    regions: Vec<RegionId>,
    /// The length of a physical block, less one, in sectors.
    physical_block_mask: u64,
    /// The chain that was taken last: its data, without the header and the tail.
    chain: Chain,
    /// The request of the chain, if it waits for the bounce buffer.
    held: Option<Plan>,
    bounce: Bounce,
    /// By the heads of chains.
    slots: Vec<Option<ActiveRequest>>,
    /// By the heads of chains too.
    tails: Vec<Tail>,
    in_flight: usize,
    /// `false` after the channel declined a bio of this batch; the rest of the batch is pushed.
    executes_inline: bool,
    /// Of reads, and of writes.
    samplers: [LatencySampler; 2],
    bios: Vec<Bio>,
    done: Vec<Completion>,
    zones: Vec<ZoneInfo>,
    budget: SpinBudget,
}

/// The bounce buffer.
struct Bounce {
    memory: Arc<Region>,
    region: RegionId,
    is_used: bool,
    /// Where the data of the read that uses it go.
    pieces: Vec<GuestPiece>,
}

impl QueueThread {
    fn new(mut setup: QueueSetup, stop: Arc<StopState>) -> io::Result<QueueThread> {
        let malformed = |fault: RingFault| io::Error::new(io::ErrorKind::InvalidData, fault.0);
        let (map, record) = (Arc::clone(&setup.map), setup.record.take());
        let ring = Virtqueue::new(&setup.place, map, record, setup.event_idx);
        let ring = ring.map_err(malformed)?;
        let mut channel = setup.disk.open().map_err(|error| io::Error::other(error.to_string()))?;
        setup.channels.add(channel.as_ref());
        let regions = setup.map.regions().map(|region| channel.register(Arc::clone(region)));
        let regions: Vec<_> = regions.collect();
        let memory = map_region(BOUNCE_BYTES as usize)?;
        let region = channel.register(Arc::clone(&memory));
        let pieces = Vec::with_capacity(PIECES_MAX);
        let entries = usize::from(setup.place.entries);
        let watched = Arc::new(Epoll::new()?);
        watched.add(&setup.kick, KICK, Watch::Arrivals)?;
        watched.add(&stop.wake, WAKE, Watch::Readable)?;
        let device =
            channel.descriptor().map(|fd| Watched::new(&watched, fd, DEVICE)).transpose()?;
        let physical_block_mask = setup.shape.physical_block_sectors.next_power_of_two() - 1;
        Ok(QueueThread {
            stop,
            ring,
            watched,
            events: Events::default(),
            device,
            regions,
            channel,
            physical_block_mask,
            chain: Chain::new(PIECES_MAX),
            held: None,
            bounce: Bounce { memory, region, is_used: false, pieces },
            slots: vec![None; entries],
            tails: vec![Tail::default(); entries],
            in_flight: 0,
            executes_inline: true,
            samplers: [LatencySampler::new(); 2],
            bios: Vec::with_capacity(2 * BIOS_PER_REQUEST),
            done: Vec::with_capacity(entries),
            zones: Vec::with_capacity(REPORT_ZONES),
            budget: SpinBudget::new(setup.poll_percent, Monotonic.now().0),
            setup,
        })
    }

    fn is_stopping(&self) -> bool {
        // Acquire: as in `StopState::enter`.
        self.stop.phase.load(Ordering::Acquire) != StopState::SERVING
    }

    /// Serves the ring until it is stopped, and then completes what it took. Returns `false` if the
    /// ring is malformed.
    fn run(&mut self) -> bool {
        blockyard_os::sharpen_timers();
        let served = self.serve();
        self.take_kicks();
        let Err(RingFault(text)) = served else { return true };
        // The answers that were given before the fault.
        self.call();
        // Release: as in `StopState::enter`.
        self.stop.phase.store(StopState::FAILED, Ordering::Release);
        self.setup.counts.faults.add(1);
        if let Some(count) = self.setup.log_limits.faults.due(1, Instant::now()) {
            let (queue, more) = (&self.setup.name, more_lines(count));
            tracing::warn!(queue, "the ring is not served any more: {text}{more}");
        }
        if let Some(error) = &self.setup.error {
            notify(error);
        }
        // The channel waits for what the device has started, so that it writes no memory later.
        false
    }

    fn serve(&mut self) -> Result<(), RingFault> {
        self.ring.request_kicks(false);
        // The guest may not know of answers that a killed server gave, or that were given before
        // the hypervisor told where to call.
        self.tell();
        self.take_unanswered()?;
        loop {
            while !self.is_stopping() {
                if self.serve_batch()? == 0 {
                    self.rest();
                }
            }
            self.drain();
            if !self.has_requests() && self.stop.enter(StopState::STOPPING, StopState::ENDED) {
                return Ok(());
            }
            // The end was cancelled.
        }
    }

    /// Executes what is available, and answers what is complete. Returns the number of requests
    /// that were taken and of bios that completed.
    #[inline(never)] // The bench counts its instructions.
    fn serve_batch(&mut self) -> Result<usize, RingFault> {
        let taken = self.take_requests()?;
        let reaped = self.execute();
        self.call();
        Ok(taken + reaped)
    }

    /// Whether a request that was taken is not answered.
    fn has_requests(&self) -> bool {
        self.in_flight > 0 || self.held.is_some()
    }

    /// Completes what was taken, and tells the guest, until the end is cancelled.
    fn drain(&mut self) {
        while self.has_requests() && self.is_stopping() {
            self.start_held();
            let reaped = self.execute();
            self.call();
            if reaped == 0 {
                self.channel.wait(Some(Instant::now() + COMPLETION_POLL_INTERVAL));
            }
        }
        self.call();
    }

    /// Takes the chains that are available, as many as there is room for. Returns their number.
    fn take_requests(&mut self) -> Result<usize, RingFault> {
        self.start_held();
        let mut taken = 0;
        self.executes_inline = true;
        while (taken < BATCH_MAX || !self.bios.is_empty())
            && self.has_room()
            && !self.is_stopping()
            && self.ring.take(&mut self.chain)?
        {
            let head = self.chain.head;
            if self.slots[usize::from(head)].is_some() || self.ring.is_unpublished(head) {
                return Err(RingFault("a chain is available again before it was answered"));
            }
            let planned = self.plan()?;
            self.begin(planned);
            taken += 1;
        }
        if taken > 0 {
            self.budget.took(taken);
        }
        Ok(taken)
    }

    /// Begins the requests again that were in flight when the server was killed. To execute one
    /// twice has the same effect as once, except in sequential zones. The segments of a discard or
    /// write-zeroes are not read here, so on a disk with zones it counts as one of those.
    fn take_unanswered(&mut self) -> Result<(), RingFault> {
        while self.ring.take_again(&mut self.chain)? {
            let planned = match self.plan()? {
                Ok(plan) if self.changes_sequential_zone(plan) => Err(BlkStatus::IoErr),
                planned => planned,
            };
            self.begin(planned);
            while !self.has_room() {
                self.start_held();
                let reaped = self.execute();
                self.call();
                if reaped == 0 {
                    self.channel.wait(Some(Instant::now() + COMPLETION_POLL_INTERVAL));
                }
            }
        }
        Ok(())
    }

    /// Whether a request may change a sequential zone.
    fn changes_sequential_zone(&self, plan: Plan) -> bool {
        let shape = &self.setup.shape;
        match plan {
            Plan::Io { op: Op::ZoneResetAll, .. } => true,
            Plan::Io { op, sector, .. } => op.is_write() && shape.is_sequential(sector.0),
            Plan::Ranges { .. } => shape.zones.is_some(),
            Plan::GetId | Plan::Report { .. } => false,
        }
    }

    /// Starts the request of the chain, or refuses it.
    fn begin(&mut self, planned: Result<Plan, BlkStatus>) {
        match planned {
            Ok(plan) => self.start(plan),
            Err(status) => self.answer(self.chain.head, status, None, 0),
        }
    }

    /// Plans the request of the chain, and cuts header and tail off.
    fn plan(&mut self) -> Result<Result<Plan, BlkStatus>, RingFault> {
        let QueueThread { setup, chain, tails, .. } = self;
        // The only read of the header: the guest may change it now.
        let Some(header) = setup.map.read_fixed::<HEADER_BYTES>(&chain.readable, 0) else {
            return Err(RingFault("a request is shorter than its header"));
        };
        let header = BlkHeader::parse(&header);
        skip(&mut chain.readable, HEADER_BYTES as u64);
        let no_status = RingFault("a request has no room for its status");
        let status = pop_byte(&mut chain.writable).ok_or(no_status)?;
        let tail = &mut tails[usize::from(chain.head)];
        tail.count = 0;
        if header.returns_sector() {
            if !for_each_head_piece(&chain.writable, SECTOR_BYTES, |piece| tail.push(piece)) {
                return Err(RingFault("an append has no room for its sector"));
            }
            chain.writable.clear();
        }
        tail.push(status);
        let (out_bytes, in_bytes) = (len_bytes(&chain.readable), len_bytes(&chain.writable));
        Ok(setup.shape.plan(header, out_bytes, in_bytes))
    }

    /// Starts the request that waits for the bounce buffer, if it is free.
    fn start_held(&mut self) {
        if let Some(plan) = self.held.take() {
            self.start(plan);
        }
    }

    /// Starts the request of the chain.
    fn start(&mut self, plan: Plan) {
        let head = self.chain.head;
        let started = match plan {
            Plan::Io { op, sector, sectors, flags } => {
                let bio = Bio::new(op, sector, sectors).with_flags(flags);
                self.start_io(bio.with_user_data(head.into()))
            }
            Plan::Ranges { op, count } => self.start_ranges(op, count),
            Plan::GetId => {
                let written = self.setup.map.write(&self.chain.writable, 0, &self.setup.shape.id);
                RequestStart::Ended(BlkStatus::Ok, written as u32) // At most ID_BYTES.
            }
            Plan::Report { from } => self.report(from),
        };
        match started {
            RequestStart::InFlight(request) => {
                self.slots[usize::from(head)] = Some(request);
                self.in_flight += 1;
            }
            RequestStart::Executed(request) => {
                self.finish(head, request, None);
                if request.bytes > BATCHED_BYTES_MAX {
                    self.call();
                }
            }
            RequestStart::Waits => self.held = Some(plan),
            RequestStart::Ended(status, written) => self.answer(head, status, None, written),
        }
    }

    /// Makes the bios of an operation.
    fn start_io(&mut self, mut bio: Bio) -> RequestStart {
        // VIRTIO 1.3, 2.7.4.2: a chain has less than 4 GiB.
        let bytes = u32::try_from(bio.sectors * 512).unwrap_or(u32::MAX);
        let request =
            ActiveRequest { op: bio.op, left: 0, failed: None, bytes, uses_bounce: false };
        let pieces = match bio.op {
            Op::Read => &self.chain.writable,
            Op::Write | Op::ZoneAppend => &self.chain.readable,
            _ => {
                self.bios.push(bio);
                return RequestStart::InFlight(ActiveRequest { left: 1, ..request });
            }
        };
        if bio.op != Op::Read && self.setup.write_through {
            bio = bio.with_flags(bio.flags | Flags::FUA);
        }
        let block_bytes = self.setup.shape.block_sectors * 512;
        let is_odd = pieces.iter().any(|piece| !piece.len.is_multiple_of(block_bytes));
        if is_odd || (bio.op == Op::ZoneAppend && pieces.len() > 1) {
            return self.start_bounced(bio, request);
        }
        if let [piece] = pieces[..]
            && let Some(status) = self.execute_inline(&bio, piece)
        {
            let failed = (!status.is_ok()).then_some((bio.sector, status));
            return RequestStart::Executed(ActiveRequest { failed, ..request });
        }
        let pieces = if bio.op == Op::Read { &self.chain.writable } else { &self.chain.readable };
        let mut sector = bio.sector;
        for piece in pieces {
            let sectors = piece.len / 512;
            let region = self.regions[usize::from(piece.region)];
            let buf = BufRef { region, offset: piece.offset };
            self.bios.push(Bio { sector, sectors, ..bio }.with_buf(buf));
            sector += sectors;
        }
        // At most PIECES_MAX.
        RequestStart::InFlight(ActiveRequest { left: pieces.len() as u32, ..request })
    }

    /// Executes a bio with one piece of data inline; `None` if it has to be pushed.
    #[inline]
    fn execute_inline(&mut self, bio: &Bio, piece: GuestPiece) -> Option<Status> {
        let Bio { op, sector, sectors, flags, .. } = *bio;
        // Bios that are made go first: those of a killed server must keep their order. A part of a
        // physical block costs the device the whole one, and the plug may merge it with others.
        if !self.executes_inline
            || !self.bios.is_empty()
            || op == Op::ZoneAppend
            || flags != Flags::NONE
            || (sector.0 | sectors) & self.physical_block_mask != 0
        {
            return None;
        }
        let region = self.regions[usize::from(piece.region)];
        let buf = BufRef { region, offset: piece.offset };
        let QueueThread { channel, samplers, .. } = self;
        let sampler = &mut samplers[usize::from(op != Op::Read)];
        let start = sampler.is_due().then(|| Monotonic.now());
        let Some(status) = channel.execute_inline(op, sector, sectors, buf) else {
            self.executes_inline = false;
            return None;
        };
        match start {
            Some(start) => {
                channel.note_latency(op, Monotonic.now().since(start), sampler.timed());
            }
            None => sampler.untimed(),
        }
        Some(status)
    }

    /// Makes the bio of an operation whose data go through the bounce buffer.
    fn start_bounced(&mut self, bio: Bio, request: ActiveRequest) -> RequestStart {
        let bytes = bio.sectors * 512;
        if bytes > BOUNCE_BYTES {
            return RequestStart::Ended(BlkStatus::IoErr, 0);
        }
        let QueueThread { setup, chain, bounce, .. } = self;
        if bounce.is_used {
            return RequestStart::Waits;
        }
        bounce.is_used = true;
        bounce.pieces.clear();
        if bio.op == Op::Read {
            bounce.pieces.extend_from_slice(&chain.writable);
        } else {
            let mut some = [0; COPY_BYTES];
            for at in (0..bytes).step_by(COPY_BYTES) {
                let some = &mut some[..COPY_BYTES.min((bytes - at) as usize)];
                setup.map.read(&chain.readable, at, some);
                bounce.memory.write(at, some);
            }
        }
        self.bios.push(bio.with_buf(BufRef { region: bounce.region, offset: 0 }));
        RequestStart::InFlight(ActiveRequest { left: 1, uses_bounce: true, ..request })
    }

    /// Makes the bios of a discard or write-zeroes, after all its segments are checked.
    fn start_ranges(&mut self, op: Op, count: u32) -> RequestStart {
        let first = self.bios.len();
        for index in 0..u64::from(count) {
            let at = index * RANGE_BYTES as u64;
            // The only read of the segment: the guest may change it now.
            let range = self.setup.map.read_fixed::<RANGE_BYTES>(&self.chain.readable, at);
            let range = range.ok_or(BlkStatus::IoErr);
            match range.and_then(|range| self.setup.shape.plan_range(op, &range)) {
                Ok(bio) => {
                    let is_through = self.setup.write_through && op == Op::WriteZeroes;
                    let fua = if is_through { Flags::FUA } else { Flags::NONE };
                    let bio = bio.with_flags(bio.flags | fua);
                    self.bios.push(bio.with_user_data(self.chain.head.into()));
                }
                Err(status) => {
                    self.bios.truncate(first);
                    return RequestStart::Ended(status, 0);
                }
            }
        }
        let (left, bytes, uses_bounce) = (count, 0, false);
        RequestStart::InFlight(ActiveRequest { op, left, failed: None, bytes, uses_bounce })
    }

    /// Reports zones, as many as there is room for: VIRTIO 1.3, 5.2.6. A report that ends early,
    /// because the device fails, has the zones before the failure; the driver asks for the others.
    fn report(&mut self, from: Sector) -> RequestStart {
        let QueueThread { setup, chain, zones, .. } = self;
        let into = &chain.writable;
        let room = (len_bytes(into) / ZONE_BYTES as u64).saturating_sub(1);
        let (mut next, mut count) = (from, 0);
        while count < room && next.0 < setup.shape.sectors {
            zones.clear();
            let wanted = (room - count).min(REPORT_ZONES as u64) as usize;
            if setup.disk.report_zones(next, wanted, zones).is_err() || zones.is_empty() {
                break;
            }
            for zone in zones.iter() {
                count += 1;
                setup.map.write(into, count * ZONE_BYTES as u64, &zone_descriptor(zone));
                next = zone.start + zone.sectors;
            }
        }
        if count == 0 && room > 0 {
            // Linux takes an empty report for the end of the disk.
            return RequestStart::Ended(BlkStatus::IoErr, 0);
        }
        setup.map.write(into, 0, &report_header(count));
        // A chain has less than 4 GiB.
        RequestStart::Ended(BlkStatus::Ok, ((count + 1) * ZONE_BYTES as u64) as u32)
    }

    /// Pushes and submits bios, and answers the requests that are complete. Returns the number of
    /// completions.
    fn execute(&mut self) -> usize {
        if !self.bios.is_empty() {
            let taken = self.channel.push(&self.bios);
            self.bios.drain(..taken);
            self.channel.submit();
        }
        if self.channel.in_flight() == 0 {
            return 0;
        }
        let mut done = std::mem::take(&mut self.done);
        done.clear();
        let reaped = self.channel.reap(&mut done);
        done.iter().for_each(|completion| self.completed(completion));
        self.done = done;
        reaped
    }

    fn completed(&mut self, completion: &Completion) {
        let head = completion.user_data as u16; // As `start` set it.
        let Some(slot) = &mut self.slots[usize::from(head)] else { return };
        slot.left -= 1;
        if !completion.status.is_ok() && slot.failed.is_none() {
            slot.failed = Some((completion.sector, completion.status));
        }
        if slot.left > 0 {
            return;
        }
        let request = *slot;
        self.slots[usize::from(head)] = None;
        self.in_flight -= 1;
        if request.uses_bounce {
            self.bounce.is_used = false;
        }
        let landed = (request.op == Op::ZoneAppend).then_some(completion.sector);
        self.finish(head, request, landed);
    }

    /// Answers a request that is executed; `landed` is the sector of an append.
    fn finish(&mut self, head: u16, request: ActiveRequest, landed: Option<Sector>) {
        let ActiveRequest { op, failed, bytes, uses_bounce, .. } = request;
        if let Some((sector, status)) = failed {
            let status = self.status_of(op, sector, status);
            return self.answer(head, status, None, 0);
        }
        let counts = &self.setup.counts;
        let written = if op == Op::Read { bytes } else { 0 };
        match op {
            Op::Read => counts.read_bytes.add(bytes.into()),
            Op::Write | Op::ZoneAppend => counts.written_bytes.add(bytes.into()),
            _ => {}
        }
        if uses_bounce && op == Op::Read {
            self.copy_from_bounce(bytes.into());
        }
        self.answer(head, BlkStatus::Ok, landed, written);
    }

    fn copy_from_bounce(&mut self, bytes: u64) {
        let Bounce { memory, pieces, .. } = &self.bounce;
        let mut some = [0; COPY_BYTES];
        for at in (0..bytes).step_by(COPY_BYTES) {
            let some = &mut some[..COPY_BYTES.min((bytes - at) as usize)];
            memory.read(at, some);
            self.setup.map.write(pieces, at, some);
        }
    }

    #[cold]
    fn status_of(&mut self, op: Op, sector: Sector, status: Status) -> BlkStatus {
        let QueueThread { setup, zones, .. } = self;
        zones.clear();
        if setup.shape.is_sequential(sector.0) {
            // Without the zone, the status says less.
            let _ = setup.disk.report_zones(sector, 1, zones);
        }
        setup.shape.status_of(op, sector, status, zones.first())
    }

    /// Answers a chain: writes the status, and for an append the sector, before the guest can see
    /// that the chain is used.
    fn answer(&mut self, head: u16, status: BlkStatus, sector: Option<Sector>, written: u32) {
        let counts = &self.setup.counts;
        counts.requests.add(1);
        counts.errors.add(u64::from(status != BlkStatus::Ok));
        let tail = &self.tails[usize::from(head)];
        if let ([place], None) = (tail.pieces(), sector) {
            self.setup.map.copy_to(*place, 0, [status as u8]);
            return self.ring.answer(head, written.saturating_add(STATUS_BYTES as u32));
        }
        let mut bytes = [0; TAIL_BYTES_MAX];
        bytes[..8].copy_from_slice(&sector.unwrap_or(Sector(0)).0.to_le_bytes());
        bytes[8] = status as u8;
        let len = len_bytes(tail.pieces()) as usize;
        self.setup.map.write(tail.pieces(), 0, &bytes[TAIL_BYTES_MAX - len..]);
        self.ring.answer(head, written.saturating_add(len as u32));
    }

    /// Shows the guest all answers, and tells it of them if it wants to know.
    fn call(&mut self) {
        self.ring.publish();
        if self.ring.wants_call() {
            self.tell();
        }
    }

    fn tell(&self) {
        if let Some(call) = &self.setup.call {
            self.setup.counts.calls.add(1);
            notify(call);
        }
    }

    /// Whether one more request may be taken.
    fn has_room(&self) -> bool {
        self.held.is_none() && self.bios.len() + BIOS_PER_REQUEST <= self.bios.capacity()
    }

    /// Waits for work: spins, or sleeps.
    fn rest(&mut self) {
        let start = Monotonic.now();
        // At zero, the thread sleeps at once.
        let window = self.budget.begin(start.0, self.channel.in_flight() > 0);
        if window > 0 {
            let (time, found) = self.spin(start, window);
            self.budget.spun(time, found);
            let counts = &self.setup.counts;
            counts.spin_ns.add(time);
            counts.spins_found.add(u64::from(found.is_some()));
            counts.spins_empty.add(u64::from(found.is_none()));
            if found.is_some() {
                return;
            }
        }
        self.sleep();
    }

    /// Spins for as long as the window allows. Returns the time in nanoseconds, at most the window,
    /// and the number of requests that it found; `None` if there is no work.
    fn spin(&mut self, start: Nanos, window: u64) -> (u64, Option<u16>) {
        loop {
            let now = Monotonic.now().since(start).min(window);
            // A request is taken at once: a guest that finds its first answers when it has made its
            // last request does not go to sleep.
            let waiting = if self.has_room() { self.ring.waiting() } else { 0 };
            if waiting > 0 {
                self.ring.prefetch();
                return (now, Some(waiting));
            }
            if self.execute() > 0 || self.is_stopping() {
                self.call();
                return (now, Some(1));
            }
            if now == window {
                return (now, None);
            }
            spin_hint();
        }
    }

    /// Sleeps until the guest kicks, the device has completed something, or the thread is to end.
    fn sleep(&mut self) {
        if self.has_room() && self.ring.request_kicks(true) {
            self.ring.request_kicks(false);
            return;
        }
        let is_busy = self.channel.in_flight() > 0;
        let timeout = match self.channel.due() {
            _ if !is_busy => None,
            Due::At(at) => Some(Duration::from_nanos(at.since(Monotonic.now()))),
            Due::Never if self.device.is_some() => None,
            Due::Never => Some(COMPLETION_POLL_INTERVAL),
        };
        let is_due = timeout.is_some_and(|time| time.is_zero());
        if !is_due && (!is_busy || self.device.is_none() || self.channel.may_sleep()) {
            let start = Monotonic.now();
            // Before the kick that ends it: a reader sees no kick without its sleep.
            self.setup.counts.sleeps.add(1);
            self.wait(timeout.unwrap_or(IDLE_WAIT));
            self.budget.slept(Monotonic.now().since(start), is_busy);
        }
        self.ring.request_kicks(false);
    }

    fn wait(&mut self, timeout: Duration) {
        let QueueThread { setup, stop, watched, events, .. } = self;
        // Without memory for it the thread looks for work at once.
        let _ = watched.wait(events, Some(timeout));
        for token in events.tokens() {
            match token {
                KICK => setup.counts.kicks.add(1),
                // The phase was changed before the wake was raised.
                WAKE => stop.wake.lower(),
                _ => {}
            }
        }
    }

    /// Resets the eventfd of kicks, so that the program that serves the ring next is not woken for
    /// requests that this thread took. If the ring has other requests, their kick stays.
    fn take_kicks(&self) {
        let kick = &self.setup.kick;
        let now = Some(Duration::ZERO);
        // The read of an eventfd without kicks may block.
        if matches!(socket::wait(kick, Interest::Readable, None, now), Ok(Ready::Yes)) {
            let _ = socket::read_slice(kick, &mut [0; 8]);
            // The guest makes a request available before it kicks, so a request whose kick was read
            // is visible here.
            if self.ring.waiting() > 0 {
                notify(kick);
            }
        }
    }
}

/// Tells the other side of an eventfd.
fn notify(file: &File) {
    // A full counter tells it too, and a closed one concerns the other side alone.
    let _ = socket::write_slice(file, &1_u64.to_ne_bytes());
}

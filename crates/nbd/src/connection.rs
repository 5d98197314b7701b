//! A connection in transmission: requests become bios, completions become replies.
//!
//! ```text
//! receive ▸ parse all that is there ▸ push, submit, reap ▸ send all replies ▸ receive ..
//! ```
//!
//! A connection has one thread and one channel, takes no lock, and allocates nothing per request.
//! While nothing is in flight the thread sleeps in the receive call itself. Requests in flight,
//! their memory and the replies of a batch are bounded. At a bound the connection stops reading,
//! and the client finds its socket full.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use blockyard_core::clock::{Clock, Monotonic};
use blockyard_core::rmw::{self, Partial, RmwQueue, Span};
use blockyard_core::{Bio, BufRef, Channel, Completion, Disk, Due, Flags, Op, RegionId};
use blockyard_os::map_region;
use blockyard_os::socket::{Ready, WaitMode};

use crate::buffers::{ArenaIndex, Buffers, OutSpan, RECEIVE_BYTES};
use crate::client::Client;
use crate::command::{CommandError, CommandPlan, ExportRules, error_of};
use crate::exports::Export;
use crate::pause::SkippedPayload;
use crate::transport::{AdaptiveBatching, Replies, Transport};
use crate::wire::{
    self, BASE_ALLOCATION_ID, EXTENDED_REQUEST_BYTES, NbdError, Origin, Request, STATE_HOLE,
    STATE_ZERO, StatusExtent,
};

/// The most requests in flight on a connection.
const REQUESTS_MAX: usize = 1024;
/// The most requests that are parsed before their bios are submitted.
const BATCH_REQUESTS: usize = 128;
/// The bytes of reads after which a batch is submitted.
const BATCH_BYTES: u64 = 1 << 20;
/// If a payload lacks this much, a receive call waits for all of it, [`RECEIVE_BYTES`] at most. A
/// client that sends less in [`MemoryBudget::blocked_max`] counts as blocked.
///
/// [`MemoryBudget::blocked_max`]: crate::memory::MemoryBudget::blocked_max
const WHOLE_BYTES: usize = 64 << 10;
/// The longest payload of a block status request: its length and one context id.
const STATUS_PAYLOAD_BYTES: usize = 12;
/// How long a connection is idle before it returns memory.
const IDLE_BEFORE_SHRINK: Duration = Duration::from_secs(1);
/// How long an ending connection waits for its requests in flight.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// The poll interval of a channel that does not report when completions are due.
const COMPLETION_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// The longest wait for the device before the next check whether the connection was cut.
const CUT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The refusal of a request that got no memory in time.
const NO_MEMORY: CommandError =
    CommandError { error: NbdError::NoMem, text: "the server's memory for NBD clients is in use" };

/// The memory that a request holds while it is in flight.
#[derive(Clone, Copy, Debug)]
enum RequestMemory {
    Nothing,
    /// A read's buffer.
    Out(OutSpan),
    /// A write's payload.
    In(ArenaIndex),
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct InFlightRequest {
    origin: Origin,
    len: u64,
    /// The bytes of a read's buffer before the requested ones.
    skip: u64,
    op: Op,
    held: RequestMemory,
    then_flush: bool,
}

/// The reason for which the parser stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// No reason: there may be more to parse.
    Nothing,
    /// A message of this many bytes must arrive completely.
    Bytes(usize),
    /// A request in flight must complete.
    Completions,
}

/// The end of [`Connection::serve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServeEnd {
    /// The client has left.
    Left,
    /// The client violated the protocol.
    Fault(wire::WireError),
    /// The connection was asked to pause: nothing is in flight and every reply is sent.
    Paused,
}

/// The refusal of a request whose payload another process had begun to discard.
const REFUSED_TEXT: &str = "the request was refused";

/// A payload that is discarded, and the reply that follows.
#[derive(Clone, Copy, Debug)]
struct Skipping {
    left: u64,
    origin: Origin,
    refusal: CommandError,
}

/// The counts of one batch, before they are added to the shared counters.
#[derive(Clone, Copy, Debug, Default)]
struct BatchCounts {
    requests: u64,
    read_bytes: u64,
    written_bytes: u64,
    errors: u64,
}

/// A client in transmission.
pub(crate) struct Connection {
    transport: Transport,
    client: Arc<Client>,
    export: Arc<Export>,
    channel: Box<dyn Channel>,
    /// The device's descriptor that is polled in addition to the transport, if it has one.
    descriptor: Option<RawFd>,
    region: RegionId,
    /// Dropped after the channel, which waits for its writes.
    rmw: RmwQueue,
    rules: ExportRules,
    buffers: Buffers,
    slots: Vec<InFlightRequest>,
    free: Vec<u16>,
    /// Bios that are not pushed yet.
    bios: Vec<Bio>,
    done: Vec<Completion>,
    /// Completions that were reaped while replies were sent, and that are not answered yet.
    early_completions: Vec<Completion>,
    replies: Replies,
    /// Buffers of reads whose replies are being sent.
    sending: Vec<OutSpan>,
    status_extents: BlockStatusExtents,
    skipping: Option<Skipping>,
    batching: AdaptiveBatching,
    tally: BatchCounts,
    /// Whether the next request is refused, because it got no memory in time.
    refuses: bool,
    /// Whether reading has stopped: only requests in flight complete.
    ending: bool,
    /// The time at which an ending connection stops waiting for its device.
    overdue_at: Option<Instant>,
    /// The protocol error, for the log.
    fault: Option<wire::WireError>,
}

impl Connection {
    /// A connection over a transport, with an open channel to the export's disk.
    pub(crate) fn new(
        transport: Transport,
        client: Arc<Client>,
        export: Arc<Export>,
        mut channel: Box<dyn Channel>,
        rules: ExportRules,
    ) -> io::Result<Connection> {
        let buffers = Buffers::new(Arc::clone(&client))?;
        let region = channel.register(Arc::clone(buffers.region()));
        let data = (Arc::clone(buffers.region()), region);
        let (lock, block_bytes) = (export.lock(), rules.block_bytes);
        let staging = map_region(rmw::staging_bytes(block_bytes))?;
        let rmw = RmwQueue::new(channel.as_mut(), lock, block_bytes, REQUESTS_MAX, data, staging);
        let unused = InFlightRequest {
            origin: Origin { cookie: 0, offset: 0 },
            len: 0,
            skip: 0,
            op: Op::Read,
            held: RequestMemory::Nothing,
            then_flush: false,
        };
        Ok(Connection {
            transport,
            client,
            export,
            descriptor: channel.descriptor(),
            channel,
            region,
            rmw,
            rules,
            buffers,
            slots: vec![unused; REQUESTS_MAX],
            free: (0..REQUESTS_MAX as u16).rev().collect(),
            bios: Vec::with_capacity(2 * REQUESTS_MAX + rmw::BIOS_MAX),
            done: Vec::with_capacity(REQUESTS_MAX + rmw::BIOS_MAX),
            early_completions: Vec::new(),
            replies: Replies::new(),
            sending: Vec::with_capacity(REQUESTS_MAX),
            status_extents: BlockStatusExtents::new(),
            skipping: None,
            batching: AdaptiveBatching::new(),
            tally: BatchCounts::default(),
            refuses: false,
            ending: false,
            overdue_at: None,
            fault: None,
        })
    }

    /// Appends bytes that arrived with the end of the handshake.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> bool {
        self.buffers.put(bytes)
    }

    /// The state of a connection between two requests, by which [`Connection::restore`] continues
    /// it.
    #[cold]
    pub(crate) fn unfinished(&self) -> (Vec<u8>, Option<SkippedPayload>) {
        let skipped = self.skipping.map(|skipping| SkippedPayload {
            left: skipping.left,
            cookie: skipping.origin.cookie,
            offset: skipping.origin.offset,
            error: skipping.refusal.error,
        });
        (self.buffers.unread_bytes(), skipped)
    }

    /// Continues a connection that was paused; `false` without memory for its bytes.
    pub(crate) fn restore(&mut self, unread: &[u8], skipped: Option<SkippedPayload>) -> bool {
        self.skipping = skipped.map(|skipped| Skipping {
            left: skipped.left,
            origin: Origin { cookie: skipped.cookie, offset: skipped.offset },
            refusal: CommandError { error: skipped.error, text: REFUSED_TEXT },
        });
        unread.is_empty() || self.buffers.put(unread)
    }

    /// Serves the client until it disconnects, is asked to leave or to pause, or violates the
    /// protocol.
    ///
    /// # Errors
    /// If the transport fails, or the connection is cut.
    pub(crate) fn serve(&mut self) -> io::Result<ServeEnd> {
        blockyard_os::sharpen_timers();
        let served = self.serve_requests();
        if served.is_err() {
            self.finish();
        }
        match self.client.lease.eviction() {
            Some(error) => Err(error),
            None => served,
        }
    }

    fn serve_requests(&mut self) -> io::Result<ServeEnd> {
        loop {
            let need = self.take_requests();
            let reaped = self.execute();
            self.send()?;
            if self.ending && self.in_flight() == 0 {
                self.transport.close();
                return Ok(self.fault.map_or(ServeEnd::Left, ServeEnd::Fault));
            }
            if self.client.is_pausing() && self.is_between_requests() {
                return Ok(ServeEnd::Paused);
            }
            if self.ending && self.is_overdue() {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "its last requests took too long",
                ));
            }
            if self.client.is_cut() {
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "it was cut off"));
            }
            // Remaining bios are flushes after completed changes, parts of read-modify-writes, or
            // bios for which the channel had no room before.
            let startable = reaped > 0 && (!self.bios.is_empty() || self.rmw.has_startable());
            if startable
                || !self.early_completions.is_empty()
                || (need == Need::Nothing && !self.ending)
            {
                continue;
            }
            self.receive(need, reaped)?;
        }
    }

    /// Waits for requests in flight of a client that can no longer be answered.
    fn finish(&mut self) {
        self.ending = true;
        while self.in_flight() > 0 && !self.client.is_cut() && !self.is_overdue() {
            let reaped = self.execute();
            self.replies.clear();
            self.sending.clear();
            self.wait_for_completions(reaped);
        }
    }

    /// Whether an ending connection has waited long enough for its device: a disconnected client
    /// takes a slot of the server that others may need.
    fn is_overdue(&mut self) -> bool {
        let now = Instant::now();
        now >= *self.overdue_at.get_or_insert(now + DRAIN_TIMEOUT)
    }

    /// Whether the connection can be paused here.
    #[cold]
    fn is_between_requests(&self) -> bool {
        let idle = self.in_flight() == 0 && self.bios.is_empty();
        idle && self.early_completions.is_empty() && !self.ending && self.client.can_pause()
    }

    fn in_flight(&self) -> usize {
        REQUESTS_MAX - self.free.len()
    }

    /// Parses the received requests, up to a bound.
    fn take_requests(&mut self) -> Need {
        if self.client.lease.is_wanted() {
            // Another connection waits for memory: complete the requests in flight, and return
            // memory.
            if self.in_flight() > 0 {
                return Need::Completions;
            }
            self.buffers.shrink();
        }
        if self.client.is_pausing() && self.client.can_pause() {
            return Need::Completions;
        }
        let mut bytes = 0;
        for _ in 0..BATCH_REQUESTS {
            if self.ending {
                return Need::Completions;
            }
            if self.replies.is_full() || bytes >= BATCH_BYTES {
                return Need::Nothing;
            }
            if self.skipping.is_some() {
                if !self.skip() {
                    return Need::Bytes(1);
                }
                continue;
            }
            let style = self.rules.style;
            let head_bytes = style.request_bytes();
            if self.buffers.unread_len() < head_bytes {
                return Need::Bytes(head_bytes);
            }
            let mut head = [0; EXTENDED_REQUEST_BYTES];
            let head = &mut head[..head_bytes];
            self.buffers.peek(head);
            match wire::parse_request(head, style) {
                Ok(request) => {
                    let need = self.take(&request, head_bytes);
                    if need != Need::Nothing {
                        return need;
                    }
                    bytes += if request.command == wire::command::READ { request.len } else { 0 };
                }
                Err(error) => {
                    // Without the magic the start of the next request cannot be found.
                    self.fault = Some(error);
                    self.ending = true;
                }
            }
        }
        Need::Nothing
    }

    /// Handles one request whose header has arrived. Skips it unless more bytes or completions are
    /// needed first.
    #[inline]
    fn take(&mut self, request: &Request, head_bytes: usize) -> Need {
        let payload = request.payload_bytes(self.rules.style);
        let plan = match std::mem::take(&mut self.refuses) {
            false => self.rules.plan(request),
            true => CommandPlan::Refuse(NO_MEMORY),
        };
        match plan {
            CommandPlan::Io { op, offset, len, flags, then_flush } => {
                if op == Op::Write {
                    // The length was checked against the greatest one.
                    let whole = head_bytes + payload as usize;
                    if self.buffers.unread_len() < whole {
                        return Need::Bytes(whole);
                    }
                }
                let span = Span::of(self.rules.block_bytes, offset, len);
                self.take_io(request, head_bytes, (op, flags, span), then_flush)
            }
            CommandPlan::BlockStatus { one } => self.take_status(request, head_bytes, payload, one),
            CommandPlan::Nothing => {
                self.take_head(head_bytes);
                self.answer_ok(request);
                Need::Nothing
            }
            CommandPlan::Disconnect => {
                self.take_head(head_bytes);
                self.ending = true;
                Need::Nothing
            }
            CommandPlan::Refuse(refusal) => {
                self.take_refused(request, head_bytes, payload, refusal);
                Need::Nothing
            }
        }
    }

    /// Skips a request's header.
    #[inline]
    fn take_head(&mut self, head_bytes: usize) {
        self.tally.requests += 1;
        self.buffers.skip(head_bytes);
    }

    /// Makes a bio, or a request for parts of blocks, if there is a slot and a buffer for it.
    #[inline]
    fn take_io(
        &mut self,
        request: &Request,
        head_bytes: usize,
        (op, flags, span): (Op, Flags, Span),
        then_flush: bool,
    ) -> Need {
        let Some(&index) = self.free.last() else { return Need::Completions };
        let (held, offset) = match op {
            Op::Read => {
                // The bytes before the range are for the reply's header.
                let reply_head = self.rules.style.read_head_bytes();
                let Some(out) = self.buffers.take_out(reply_head, span.len as usize) else {
                    return Need::Completions;
                };
                self.take_head(head_bytes);
                (RequestMemory::Out(out), out.data)
            }
            Op::Write => {
                self.take_head(head_bytes);
                let (offset, arena) = self.buffers.keep(span.want as usize);
                (RequestMemory::In(arena), offset)
            }
            _ => {
                self.take_head(head_bytes);
                (RequestMemory::Nothing, 0)
            }
        };
        self.free.pop();
        let (origin, len, skip) = (request.origin(), request.len, span.skip);
        self.slots[usize::from(index)] =
            InFlightRequest { origin, len, skip, op, held, then_flush };
        if op.is_write() && !span.is_whole() {
            self.rmw.start(index.into(), Partial { op, flags, span, data: offset });
            return Need::Nothing;
        }
        let buf = BufRef { region: self.region, offset };
        let bio = Bio::new(op, span.sector(), span.sectors()).with_flags(flags).with_buf(buf);
        let bio = bio.with_user_data(u64::from(index));
        if op.is_write() {
            self.rmw.publish(&bio);
        }
        self.bios.push(bio);
        Need::Nothing
    }

    fn take_status(
        &mut self,
        request: &Request,
        head_bytes: usize,
        payload: u64,
        one: bool,
    ) -> Need {
        let mut len = request.len;
        if payload > 0 {
            let refusal = CommandError {
                error: NbdError::Inval,
                text: "the payload must be a length and the id of the selected context",
            };
            if payload != STATUS_PAYLOAD_BYTES as u64 {
                self.take_refused(request, head_bytes, payload, refusal);
                return Need::Nothing;
            }
            let mut bytes = [0; EXTENDED_REQUEST_BYTES + STATUS_PAYLOAD_BYTES];
            let whole = head_bytes + STATUS_PAYLOAD_BYTES;
            if self.buffers.unread_len() < whole {
                return Need::Bytes(whole);
            }
            self.buffers.peek(&mut bytes[..whole]);
            self.take_head(whole);
            let parsed = wire::parse_status_payload(&bytes[head_bytes..whole]);
            let selected = parsed.and_then(|(effect, mut ids)| {
                ids.all(|id| id == BASE_ALLOCATION_ID).then_some(effect)
            });
            let refused = match selected {
                Some(effect) => self.rules.check_status(request.offset, effect),
                None => Some(refusal),
            };
            if let Some(refusal) = refused {
                self.answer_error(request.origin(), refusal.error, refusal.text);
                return Need::Nothing;
            }
            len = selected.unwrap_or(len);
        } else {
            self.take_head(head_bytes);
        }
        let disk = self.export.disk();
        let span = Span::of(self.rules.block_bytes, request.offset, len);
        let extents = self.status_extents.of(disk.as_ref(), &span, one);
        let (style, origin) = (self.rules.style, request.origin());
        self.replies.push(|out| wire::print_status(out, style, origin, extents));
        Need::Nothing
    }

    fn take_refused(
        &mut self,
        request: &Request,
        head_bytes: usize,
        payload: u64,
        refusal: CommandError,
    ) {
        self.take_head(head_bytes);
        let origin = request.origin();
        self.skipping = Some(Skipping { left: payload, origin, refusal });
        self.skip();
    }

    /// Discards a payload; `true` when it is discarded and the request answered.
    fn skip(&mut self) -> bool {
        let Some(mut skipping) = self.skipping else { return true };
        let left = usize::try_from(skipping.left).unwrap_or(usize::MAX);
        let now = self.buffers.unread_len().min(left);
        self.buffers.skip(now);
        skipping.left -= now as u64;
        if skipping.left > 0 {
            self.skipping = Some(skipping);
            return false;
        }
        self.skipping = None;
        self.answer_error(skipping.origin, skipping.refusal.error, skipping.refusal.text);
        true
    }

    fn answer_ok(&mut self, request: &Request) {
        let (style, origin) = (self.rules.style, request.origin());
        let read = request.command == wire::command::READ;
        self.replies.push(|out| {
            let head =
                if read { wire::read_head(style, origin, 0) } else { wire::ok_head(style, origin) };
            out.extend_from_slice(head.bytes());
        });
    }

    #[cold]
    fn answer_error(&mut self, origin: Origin, error: NbdError, text: &str) {
        self.tally.errors += 1;
        let style = self.rules.style;
        self.replies.push(|out| wire::print_error(out, style, origin, error, text));
    }

    /// Pushes and submits bios, and turns completions into replies. Returns the number of
    /// completions.
    fn execute(&mut self) -> usize {
        for completion in std::mem::take(&mut self.early_completions) {
            self.answer(&completion);
        }
        self.rmw.advance(&mut self.bios);
        self.rmw.admit(&mut self.bios);
        if !self.bios.is_empty() {
            let taken = self.channel.push(&self.bios);
            self.bios.drain(..taken);
            self.channel.submit();
        }
        if self.in_flight() == 0 {
            return 0;
        }
        self.done.clear();
        let reaped = self.channel.reap(&mut self.done);
        for index in 0..self.done.len() {
            if let Some(completion) = self.rmw.completed(self.done[index], &mut self.bios) {
                self.answer(&completion);
            }
        }
        reaped
    }

    /// Answers a request, or flushes first.
    #[inline]
    fn answer(&mut self, completion: &Completion) {
        let index = completion.user_data as usize;
        let slot = self.slots[index];
        let error = error_of(completion.status);
        if slot.then_flush && error.is_none() {
            self.slots[index].then_flush = false;
            self.bios.push(Bio::flush().with_user_data(completion.user_data));
            return;
        }
        self.free.push(index as u16);
        let style = self.rules.style;
        match slot.held {
            RequestMemory::Out(span) if error.is_none() => {
                let head = wire::read_head(style, slot.origin, slot.len);
                let region = self.buffers.region();
                let data = span.data + slot.skip;
                self.replies.push_data(region, head.bytes(), data, slot.len as usize);
                self.sending.push(span);
                self.tally.read_bytes += slot.len;
                return;
            }
            RequestMemory::Out(span) => self.buffers.give_out(span),
            RequestMemory::In(arena) => self.buffers.give_in(arena),
            RequestMemory::Nothing => {}
        }
        match error {
            Some(error) => self.answer_error(slot.origin, error, completion.status.name()),
            None => {
                if slot.op == Op::Write {
                    self.tally.written_bytes += slot.len;
                }
                let head = wire::ok_head(style, slot.origin);
                self.replies.push(|out| out.extend_from_slice(head.bytes()));
            }
        }
    }

    /// Sends all replies and frees their buffers.
    fn send(&mut self) -> io::Result<()> {
        let stats = &self.client.stats;
        let tally = std::mem::take(&mut self.tally);
        if tally.requests > 0 || self.buffers.unread_len() == 0 {
            // A part of a long message is no batch.
            self.batching.note_batch(tally.requests);
        }
        stats.requests.add(tally.requests);
        stats.read_bytes.add(tally.read_bytes);
        stats.written_bytes.add(tally.written_bytes);
        stats.errors.add(tally.errors);
        if self.replies.is_empty() {
            return Ok(());
        }
        stats.batches.add(1);
        let Connection { transport, client, channel, rmw, bios, early_completions, .. } = self;
        let client = &**client;
        let mut full =
            || complete_held_writes(client, channel.as_mut(), rmw, bios, early_completions);
        let (region, replies) = (self.buffers.region(), &mut self.replies);
        let sent = transport.send(region, replies, &mut full, &client.lease);
        for span in self.sending.drain(..) {
            self.buffers.give_out(span);
        }
        sent
    }

    /// Receives more, or waits for requests in flight.
    fn receive(&mut self, need: Need, reaped: usize) -> io::Result<()> {
        let Need::Bytes(message) = need else {
            self.wait_for_room(reaped);
            return Ok(());
        };
        let idle = self.in_flight() == 0;
        if idle
            && self.buffers.is_bloated()
            && self.buffers.unread_len() == 0
            && self.transport.wait(IDLE_BEFORE_SHRINK)? == Ready::No
        {
            self.buffers.shrink();
        }
        let Some((offset, room)) = self.buffers.room(message) else {
            self.wait_for_room(reaped);
            return Ok(());
        };
        if idle
            && self.buffers.unread_len() == 0
            && let Some(pause) = self.batching.pause()
        {
            thread::sleep(pause);
        }
        let missing = message - self.buffers.unread_len().min(message);
        let (len, mode) = if !idle {
            (missing.max(RECEIVE_BYTES), WaitMode::NonBlocking)
        } else if missing >= WHOLE_BYTES {
            (missing.min(RECEIVE_BYTES), WaitMode::AllBytes)
        } else {
            (RECEIVE_BYTES, WaitMode::AnyBytes)
        };
        if self.buffers.unread_len() > 0 {
            // The rest of a message is missing.
            self.client.lease.note_blocked();
        }
        let region = self.buffers.region();
        match self.transport.recv(region, offset, len.min(room), mode) {
            Ok(0) => self.ending = true,
            Ok(received) => {
                self.buffers.received(received);
                if received >= missing.min(WHOLE_BYTES) {
                    self.client.lease.note_moved();
                }
            }
            // A request to pause, or another signal.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The receive has waited for as long as the socket's timeout.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && idle => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for_either()?,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Waits until a request in flight completes, or for memory.
    fn wait_for_room(&mut self, reaped: usize) {
        // The connection does not wait for its client.
        self.client.lease.note_moved();
        if self.in_flight() > 0 || self.ending {
            self.wait_for_completions(reaped);
        } else if !self.buffers.wait_for_memory() {
            self.refuses = true;
        }
    }

    /// Sleeps until a request in flight completes, unless the last reap found completions; wakes
    /// often enough to see that the connection was cut.
    fn wait_for_completions(&mut self, reaped: usize) {
        if reaped > 0 {
            return;
        }
        let waits = self.rmw.is_waiting();
        if self.channel.in_flight() > 0 {
            let at_most = if waits { rmw::POLL_INTERVAL } else { CUT_CHECK_INTERVAL };
            self.channel.wait(Some(Instant::now() + at_most));
        } else if waits {
            thread::sleep(rmw::POLL_INTERVAL);
        }
    }

    /// Sleeps until a completion is due or bytes arrive.
    fn wait_for_either(&mut self) -> io::Result<()> {
        let mut timeout = match self.channel.due() {
            Due::At(at) => Duration::from_nanos(at.since(Monotonic.now())),
            Due::Never if self.descriptor.is_some() => CUT_CHECK_INTERVAL,
            Due::Never => COMPLETION_POLL_INTERVAL,
        };
        if self.rmw.is_waiting() {
            timeout = timeout.min(rmw::POLL_INTERVAL);
        }
        let sleeps = !timeout.is_zero() && (self.descriptor.is_none() || self.channel.may_sleep());
        if sleeps {
            self.transport.wait_either(self.descriptor, timeout)?;
        }
        Ok(())
    }
}

/// Completes all writes for which other channels may wait, before the connection sleeps because its
/// client does not read: a client must not delay others that write to the same block.
#[cold]
fn complete_held_writes(
    client: &Client,
    channel: &mut dyn Channel,
    rmw: &mut RmwQueue,
    bios: &mut Vec<Bio>,
    early_completions: &mut Vec<Completion>,
) {
    while rmw.holds_blocks() && !client.is_cut() {
        rmw.advance_begun(bios);
        rmw.admit(bios);
        let taken = channel.push(bios);
        bios.drain(..taken);
        channel.submit();
        let from = early_completions.len();
        let reaped = channel.reap(early_completions);
        let ends: Vec<_> = early_completions.drain(from..).collect();
        early_completions.extend(ends.into_iter().filter_map(|end| rmw.completed(end, bios)));
        if reaped == 0 && channel.in_flight() > 0 {
            channel.wait(Some(Instant::now() + rmw::POLL_INTERVAL));
        } else if reaped == 0 {
            thread::sleep(rmw::POLL_INTERVAL);
        }
    }
}

/// The most extents in one reply. A client asks again for the rest.
const EXTENTS_MAX: usize = 1024;
/// The most queries to the disk for one reply to a block status request.
const QUERIES_MAX: usize = 4096;

/// The extents of a reply to a block status request (`base:allocation`), as the disk reports them.
/// A connection keeps the buffer, so that a reply allocates nothing.
#[derive(Debug)]
pub(crate) struct BlockStatusExtents(Vec<StatusExtent>);

impl BlockStatusExtents {
    pub(crate) fn new() -> BlockStatusExtents {
        BlockStatusExtents(Vec::with_capacity(EXTENTS_MAX))
    }

    /// The extents of a range from its first byte on: at least one; neighbours of one state are
    /// joined. The range must not be empty, and must lie on the disk.
    pub(crate) fn of(&mut self, disk: &dyn Disk, span: &Span, one: bool) -> &[StatusExtent] {
        let extents = &mut self.0;
        extents.clear();
        let extents_max = if one { 1 } else { EXTENTS_MAX };
        let mut from = span.sector();
        let end = from + span.sectors();
        let range = span.range();
        for _ in 0..QUERIES_MAX {
            if from >= end {
                break;
            }
            let extent = disk.extent(from, end - from);
            // An empty extent means that the disk does not know.
            let sectors = match extent.sectors {
                0 => end - from,
                sectors => sectors.min(end - from),
            };
            let hole = if extent.allocated { 0 } else { STATE_HOLE };
            let state = hole | if extent.zero { STATE_ZERO } else { 0 };
            let covered = from.bytes().max(range.start)..(from + sectors).bytes().min(range.end);
            let bytes = covered.end.saturating_sub(covered.start);
            from += sectors;
            if bytes == 0 {
                continue;
            }
            match extents.last_mut() {
                Some(last) if last.state == state => last.len += bytes,
                _ => {
                    if extents.len() == extents_max {
                        break;
                    }
                    extents.push(StatusExtent { len: bytes, state });
                }
            }
        }
        extents
    }
}

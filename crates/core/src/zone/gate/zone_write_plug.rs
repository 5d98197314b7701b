//! The zone write plug: it sends the changes of a zone to the device one by one, and emulates
//! append by writes for devices without it.
//!
//! **Order.** Everything that changes a sequential zone passes here in the order of arrival, over
//! all channels: writes, and also reset, finish, open and close. A reset of all zones waits for the
//! earlier requests of its channel, and later requests wait for the reset. A write with a flush
//! before it has its place in the order from the flush on. The device judges each request. This
//! plug returns no status that the device would not have returned, so an outdated write pointer can
//! never fail a write.
//!
//! **Appends.** A native append bypasses the plug, unless the channel also writes to the zone. An
//! emulated append becomes a write at the write pointer of the ticket. After a failure the pointer
//! is unknown, and the next append queries it by a report of one zone. A write needs no pointer,
//! and sets a new one when it succeeds. If the device refuses the write of an append, the pointer
//! may have been outdated. The plug then queries it at once, and if it has moved, the append is
//! tried there.

use std::collections::TryReserveError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::wp_cache::{OFFSET_MAX, WpCache};
use blockyard_sync::zone_gate::{ChannelTickets, Entered, Waker, ZoneGate};

use super::pointers::{self, Pointers};
use super::tickets::{Refused, ZoneWriteTicket, ZoneWriteTickets};
use super::{Gate, GateMode, GateQueues, GateView, Gates};
use crate::bio::{Op, Status};
use crate::device::{Device, Due};
use crate::geometry::ZoneGeometry;
use crate::limits::Limits;
use crate::request::{CompletedRequest, Request};
use crate::request::{MergeRules, Ring};
use crate::units::{Nanos, Sector, ZoneNo};

/// How soon, in nanoseconds, a caller that waits for other events polls for its ticket. A caller
/// that sleeps in the channel is woken.
const LOOK_NS: u64 = 50_000;

/// How often an append is tried whose write is refused because the pointer is outdated.
const TRIES_MAX: u8 = 3;

/// The state that the gates of a device share.
pub struct ZoneWritePlugs<D> {
    device: Arc<D>,
    zones: ZoneGeometry,
    gate: Arc<ZoneGate>,
    /// The write pointers, for a device without native append.
    pointers: Option<Arc<WpCache>>,
    rules: MergeRules,
}

/// Why a device cannot have a zone write plug.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GateError {
    /// There is not enough memory for the write pointers.
    NoMemory(TryReserveError),
    /// The zones are too long for a write pointer of four bytes.
    LongZones {
        /// The length of a zone, in sectors.
        sectors: u64,
        /// The maximum length of a zone, in sectors.
        wanted_max: u64,
    },
}

impl fmt::Display for GateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GateError::NoMemory(error) => write!(f, "no memory for the write pointers: {error}"),
            GateError::LongZones { sectors, wanted_max } => {
                write!(
                    f,
                    "zones of {sectors} sectors are too long for append to be made of writes"
                )?;
                write!(f, ": expected at most {wanted_max}")
            }
        }
    }
}

impl std::error::Error for GateError {}

impl<D: Device> ZoneWritePlugs<D> {
    /// The zone write plug of a zoned device; `None` for a device without zones.
    ///
    /// # Errors
    /// If the device has no native append, and there is not enough memory for the write pointers or
    /// a zone is too long for one.
    pub fn new(device: Arc<D>) -> Result<Option<ZoneWritePlugs<D>>, GateError> {
        let Some(zones) = device.geometry().zones.clone() else { return Ok(None) };
        let gate = ZoneGate::new(zones.zone_count);
        let rules = MergeRules::new(device.limits());
        let pointers = match device.limits().zone_append_sectors_max {
            0 if zones.zone_sectors > u64::from(OFFSET_MAX) => {
                let wanted_max = 1 << OFFSET_MAX.ilog2();
                return Err(GateError::LongZones { sectors: zones.zone_sectors, wanted_max });
            }
            0 => {
                let cache = WpCache::new(zones.zone_count).map_err(GateError::NoMemory)?;
                pointers::fill(&cache, &*device, &zones);
                Some(Arc::new(cache))
            }
            _ => None,
        };
        Ok(Some(ZoneWritePlugs { device, zones, gate, pointers, rules }))
    }
}

impl<D: Device> Gates for ZoneWritePlugs<D> {
    type Gate = ZoneWritePlug<D>;

    fn open(&self, depth: u16) -> ZoneWritePlug<D> {
        let pointers = self.pointers.as_ref().map(|cache| {
            Pointers::new(Arc::clone(cache), Arc::clone(&self.device), self.zones.clone())
        });
        ZoneWritePlug {
            channel_tickets: ChannelTickets::new(&self.gate, depth),
            tickets: ZoneWriteTickets::new(depth),
            zones: self.zones.clone(),
            sectors: self.device.geometry().sectors,
            passes_appends: pointers.is_none() && self.device.limits().ordered,
            pointers,
            rules: self.rules,
            foreign: 0,
            look_at: Nanos(0),
            is_called: false,
            asking: Vec::with_capacity(depth.into()),
            reset_all: ResetAll::None,
            after_reset: Ring::with_capacity(depth.into()),
            closing: false,
        }
    }

    /// An emulated append is one write: no longer than one request or one zone.
    fn limits(&self, limits: &Limits) -> Limits {
        let mut limits = limits.clone();
        if self.pointers.is_some() {
            let longest = limits.sectors_max.min(self.zones.zone_capacity_sectors);
            let block = self.device.geometry().block_sectors();
            limits.zone_append_sectors_max = longest / block * block;
        }
        limits
    }

    fn view(&self) -> GateView {
        GateView { mode: GateMode::ZoneWritePlug, emulates_append: self.pointers.is_some() }
    }

    fn zones_changed(&self) {
        if let Some(cache) = &self.pointers {
            cache.invalidate_all();
        }
    }
}

impl<D> fmt::Debug for ZoneWritePlugs<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZoneWritePlugs").field("pointers", &self.pointers).finish_non_exhaustive()
    }
}

/// The state of a reset of all zones.
#[derive(Debug)]
enum ResetAll {
    /// There is no reset.
    None,
    /// The reset waits until the channel has no tickets.
    Waits(Request),
    /// The reset is in flight on the device.
    InFlight,
}

/// One channel's part of the zone write plug.
pub struct ZoneWritePlug<D> {
    channel_tickets: ChannelTickets,
    tickets: ZoneWriteTickets,
    zones: ZoneGeometry,
    /// The device's length in sectors: the last zone may be shorter than the others.
    sectors: u64,
    pointers: Option<Pointers<D>>,
    /// The device has native appends and starts later requests after them. Not so under a
    /// scheduler, which may first start a write to the sector where the append ends.
    passes_appends: bool,
    rules: MergeRules,
    /// Tickets that wait for another channel.
    foreign: u16,
    /// When to poll for those tickets again.
    look_at: Nanos,
    /// A registered waker is called when another channel releases a zone.
    is_called: bool,
    /// Tickets that have to query the device for a write pointer.
    asking: Vec<u16>,
    reset_all: ResetAll,
    /// Requests that came after a reset of all zones.
    after_reset: Ring<Request>,
    /// The channel is being dropped: no request is passed on.
    closing: bool,
}

/// What happens to the first request of a ticket.
enum Next {
    /// The device gets the request; an emulated append is written at this sector.
    Dispatch(Option<Sector>),
    /// The request fails: the zone has no space for it or its write pointer cannot be found, or the
    /// device has refused it.
    Fails(Status),
    /// The device has to be queried for the write pointer first.
    Waits,
}

impl Refused {
    /// Whether only the pointer was wrong: the zone's write pointer is elsewhere. If the pointer
    /// has moved by at most the length of the write, the device may have written a part. Only a
    /// device that blames its host (`TARGET`) has certainly written nothing.
    fn is_out_of_date(self, pointer: u32, sectors: u64) -> bool {
        let (at, pointer) = (u64::from(self.at), u64::from(pointer));
        pointer < at || pointer > at + sectors || (self.status == Status::Target && pointer != at)
    }
}

impl<D: Device> ZoneWritePlug<D> {
    #[inline]
    fn start_of(&self, zone: u32) -> Sector {
        self.zones.start_of(ZoneNo(zone))
    }

    /// The writable sectors of a zone.
    #[inline]
    fn capacity_of(&self, zone: u32) -> u64 {
        self.zones.zone_capacity_sectors.min(self.sectors - self.start_of(zone).0)
    }

    /// Passes on the requests of a ticket that may go; releases the ticket when it has no requests
    /// left.
    fn run(&mut self, number: u16, queues: &mut GateQueues) {
        let mut next = Some(number);
        while let Some(number) = next {
            next = self.run_turn(number, queues);
        }
    }

    /// Does one step of `run`. If the ticket ends, returns the next ticket of this channel in the
    /// zone.
    fn run_turn(&mut self, number: u16, queues: &mut GateQueues) -> Option<u16> {
        let ticket = self.tickets.at(number);
        if !ticket.granted || ticket.in_flight || ticket.asking {
            return None;
        }
        while let Some(first) = self.tickets.first(number) {
            let next = match &self.pointers {
                Some(_) if first.op() == Op::ZoneAppend => {
                    let sectors = first.sectors();
                    self.place(number, sectors)
                }
                _ => Next::Dispatch(None),
            };
            if matches!(next, Next::Waits) {
                return None;
            }
            let request = self.tickets.pop(number).expect("a request waits");
            let at = match next {
                Next::Dispatch(at) => at,
                Next::Waits => unreachable!("`Waits` returns above"),
                Next::Fails(status) => {
                    self.tickets.at(number).refused = None;
                    queues.refuse(request, status);
                    continue;
                }
            };
            let request = match at {
                Some(at) => request.append_at(at),
                None => request,
            };
            self.tickets.hold(number, &request);
            queues.forward(request);
            return None;
        }
        self.end(number, queues)
    }

    /// Finds the sector of an emulated append of `sectors` sectors.
    fn place(&mut self, number: u16, sectors: u64) -> Next {
        let zone = self.tickets.at(number).zone;
        let (start, capacity) = (self.start_of(zone), self.capacity_of(zone));
        let ticket = self.tickets.at(number);
        if self.pointers.as_ref().is_some_and(|pointers| pointers.is_disturbed(zone)) {
            (ticket.pointer, ticket.asked) = (None, false);
        }
        match (ticket.pointer, ticket.refused) {
            (Some(at), Some(refused)) if !refused.is_out_of_date(at, sectors) => {
                Next::Fails(refused.status)
            }
            (Some(at), _) if u64::from(at) + sectors <= capacity => {
                Next::Dispatch(Some(start + u64::from(at)))
            }
            // The zone has no space or no pointer. If the device itself gave a reason, that status
            // comes first.
            (Some(_), refused) => Next::Fails(refused.map_or(Status::IoErr, |it| it.status)),
            (None, refused) if ticket.asked => {
                Next::Fails(refused.map_or(ticket.unknown, |it| it.status))
            }
            (None, _) => {
                ticket.asking = true;
                self.asking.push(number);
                Next::Waits
            }
        }
    }

    /// Releases a ticket; returns the next ticket of this channel in the zone, if there is one.
    fn end(&mut self, number: u16, queues: &mut GateQueues) -> Option<u16> {
        let ZoneWriteTicket { zone, pointer, .. } = *self.tickets.at(number);
        if let Some(pointers) = &self.pointers {
            pointers.end(zone, pointer);
        }
        self.tickets.end(number);
        let next = self.channel_tickets.leave(number);
        if let Some(next) = next {
            self.grant(next);
        } else if self.tickets.are_over() {
            self.pass_reset_all(queues);
        }
        next
    }

    /// Records that a waiting ticket was granted.
    fn grant(&mut self, number: u16) {
        self.foreign -= 1;
        self.begin(number);
    }

    /// Begins to use a granted ticket.
    #[inline]
    fn begin(&mut self, number: u16) {
        let ticket = self.tickets.at(number);
        ticket.granted = true;
        if let Some(pointers) = &self.pointers {
            ticket.pointer = pointers.begin(ticket.zone);
        }
    }

    /// Adds a request to the queue of its zone.
    #[inline]
    fn queue(&mut self, zone: u32, request: Request, queues: &mut GateQueues) {
        let op = request.op();
        let number = match self.channel_tickets.enter(zone, self.tickets.spare()) {
            Entered::Joined(number) => number,
            Entered::First => {
                let number = self.tickets.open(zone);
                self.begin(number);
                number
            }
            Entered::Queued => {
                self.foreign += 1;
                self.tickets.open(zone)
            }
        };
        if self.tickets.push(number, request, self.rules) {
            queues.merged(op);
        } else {
            self.run(number, queues);
        }
    }

    /// Passes on a write whose flush has completed, under the ticket of the flush.
    #[cold]
    fn follow(&mut self, number: u16, request: Request, queues: &mut GateQueues) {
        self.tickets.release(request.index());
        self.tickets.push_front(number, request);
        self.run(number, queues);
    }

    /// Passes on a reset of all zones that has waited for the channel's tickets.
    fn pass_reset_all(&mut self, queues: &mut GateQueues) {
        match std::mem::replace(&mut self.reset_all, ResetAll::InFlight) {
            ResetAll::Waits(request) => queues.forward(request),
            other => self.reset_all = other,
        }
    }

    /// Handles the end of a reset of all zones, and admits the requests after it.
    fn left_reset_all(&mut self, queues: &mut GateQueues) {
        if let Some(pointers) = &self.pointers {
            pointers.forget_all();
        }
        self.reset_all = ResetAll::None;
        for _ in 0..self.after_reset.len() {
            let Some(request) = self.after_reset.pop_front() else { break };
            self.enter(request, queues);
        }
    }

    /// Whether an append was refused, possibly only because the pointer was outdated, and is to be
    /// tried again. Records the refusal.
    #[inline]
    fn is_to_be_tried_again(&mut self, number: u16, ended: &CompletedRequest) -> bool {
        let status = ended.status();
        let refused = matches!(status, Status::IoErr | Status::Target);
        if !refused || !ended.is_made_append() || self.closing {
            return false;
        }
        let ZoneWriteTicket { zone, refused, .. } = *self.tickets.at(number);
        let tries = refused.map_or(0, |refused| refused.tries) + 1;
        let at = (ended.sector() - self.start_of(zone)) as u32;
        self.tickets.at(number).refused = Some(Refused { at, status, tries });
        tries < TRIES_MAX
    }

    /// Updates the write pointer after a change of a zone completed.
    #[inline]
    fn learn(&mut self, number: u16, ended: &CompletedRequest) {
        let ZoneWriteTicket { zone, .. } = *self.tickets.at(number);
        let start = self.start_of(zone);
        let full = self.zones.zone_sectors as u32;
        let ticket = self.tickets.at(number);
        (ticket.asked, ticket.refused) = (false, None);
        ticket.pointer = match ended.op() {
            _ if !ended.status().is_ok() => None,
            Op::ZoneReset => Some(0),
            Op::ZoneFinish => Some(full),
            Op::Write | Op::WriteZeroes => Some((ended.sector() - start + ended.sectors()) as u32),
            _ => ticket.pointer,
        };
    }
}

impl<D: Device> Gate for ZoneWritePlug<D> {
    fn enter(&mut self, request: Request, queues: &mut GateQueues) {
        if let Some(number) = self.tickets.holder(request.index()) {
            return self.follow(number, request, queues);
        }
        // A flush before a write takes the place of the write in its zone.
        let (op, sector) = request.follower().unwrap_or((request.op(), request.sector()));
        if !op.is_write() || op == Op::Discard {
            return queues.forward(request);
        }
        let all = op == Op::ZoneResetAll;
        let zone = self.zones.zone_of(sector);
        if !all && self.zones.is_conventional(zone) {
            return match op {
                Op::ZoneAppend => queues.refuse(request, Status::IoErr),
                _ => queues.forward(request),
            };
        }
        if !matches!(self.reset_all, ResetAll::None) {
            self.after_reset.push_back(request);
        } else if all {
            self.reset_all = ResetAll::Waits(request);
            if self.tickets.are_over() {
                self.pass_reset_all(queues);
            }
        } else if op == Op::ZoneAppend && self.passes_appends && !self.tickets.may_have(zone.0) {
            queues.forward(request);
        } else {
            self.queue(zone.0, request, queues);
        }
    }

    #[inline]
    fn leave(&mut self, ended: CompletedRequest, queues: &mut GateQueues) {
        if let Some(number) = self.tickets.holder(ended.index()) {
            let flush = ended.op() == Op::Flush;
            if flush && ended.status().is_ok() && !self.closing {
                // The ticket keeps its state until the write follows, which is the next request.
                return queues.complete(ended);
            }
            if self.pointers.is_some() && !flush {
                if self.is_to_be_tried_again(number, &ended) {
                    return queues.again(ended);
                }
                self.learn(number, &ended);
            }
            self.tickets.release(ended.index());
            queues.complete(ended);
            self.run(number, queues);
        } else {
            let all = ended.op() == Op::ZoneResetAll;
            queues.complete(ended);
            if all {
                self.left_reset_all(queues);
            }
        }
    }

    fn requeue(&mut self, request: Request, queues: &mut GateQueues) {
        let number = self.tickets.release(request.index()).expect("it left from a ticket");
        self.tickets.push_front(number, request);
        let ticket = self.tickets.at(number);
        (ticket.pointer, ticket.asked) = (None, false);
        self.run(number, queues);
    }

    fn broken(&mut self, head: u16, single: Request) -> Option<Request> {
        match self.tickets.holder(head) {
            Some(number) => {
                self.tickets.push_front(number, single);
                None
            }
            None => Some(single),
        }
    }

    fn poll(&mut self, now: Nanos, queues: &mut GateQueues) {
        if self.foreign == 0 {
            return;
        }
        while let Some(number) = self.channel_tickets.granted() {
            self.grant(number);
            self.run(number, queues);
        }
        self.look_at = now + LOOK_NS;
    }

    fn catch_up(&mut self, queues: &mut GateQueues) -> bool {
        let Some(pointers) = &mut self.pointers else { return false };
        let Some(number) = self.asking.pop() else { return false };
        let ticket = self.tickets.at(number);
        (ticket.asking, ticket.asked) = (false, true);
        (ticket.pointer, ticket.unknown) = match pointers.ask(ticket.zone) {
            Ok(pointer) => (pointer, Status::IoErr),
            Err(status) => (None, status),
        };
        self.run(number, queues);
        true
    }

    fn waits(&self) -> bool {
        self.foreign > 0
    }

    fn due(&self) -> Due {
        if self.foreign > 0 && !self.is_called { Due::At(self.look_at) } else { Due::Never }
    }

    fn set_waker(&mut self, waker: Waker) {
        self.is_called = self.channel_tickets.set_waker(waker);
    }

    fn sleep(&self, at_most: Duration) {
        self.channel_tickets.sleep(at_most);
    }

    fn may_execute_inline(&self, op: Op, sector: Sector) -> bool {
        op == Op::Read || self.zones.is_conventional(self.zones.zone_of(sector))
    }

    fn close(&mut self) {
        self.closing = true;
        self.tickets.clear();
        self.asking.clear();
        self.reset_all = ResetAll::None;
        while self.after_reset.pop_front().is_some() {}
    }
}

impl<D> fmt::Debug for ZoneWritePlug<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZoneWritePlug").field("foreign", &self.foreign).finish_non_exhaustive()
    }
}

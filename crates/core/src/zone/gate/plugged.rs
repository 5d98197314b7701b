//! The gate itself: what changes a zone goes to the device one by one, and appends that the device
//! does not have become writes.
//!
//! **Order.** Everything that changes a sequential zone passes here in the order in which it came,
//! whichever channel it came through: writes, and a reset, a finish, an open or a close as well. A
//! reset of all zones waits for what the channel has sent before, and what follows waits for it.
//! A write that wants a flush before it has its place from the flush on. The device judges each;
//! this gate gives no answer that the device would not have given, so that
//! no pointer that is out of date can fail a write.
//!
//! **Appends.** One that the device has of its own goes past the gate, unless the channel writes to
//! the zone as well. One that it has not becomes a write at the pointer of the turn. After a
//! failure the pointer is unknown, and the next append asks for it by one report of one zone; a
//! write needs no pointer, and gives a new one when it succeeds. Where the device refuses the write
//! of an append, the pointer may have been an old one: it is asked at once, and if it is elsewhere
//! the append goes there.

use std::collections::TryReserveError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::wp_cache::{OFFSET_MAX, WpCache};
use blockyard_sync::zone_gate::{Caller, Entered, Seat, ZoneGate};

use super::pointers::{self, Pointers};
use super::turns::{Refused, Turn, Turns};
use super::{Gate, GateMode, GateView, Gates, Passage};
use crate::bio::Op;
use crate::channel::merge::MergeRules;
use crate::device::{Device, Due};
use crate::geometry::ZoneGeometry;
use crate::limits::Limits;
use crate::request::{Ended, Request};
use crate::ring::Ring;
use crate::status::Status;
use crate::units::{Nanos, Sector, ZoneNo};

/// After how many nanoseconds a caller that sleeps elsewhere looks whether it is its turn. One that
/// sleeps in the channel is woken.
const LOOK_NS: u64 = 50_000;

/// How often an append is tried whose write is refused for a pointer that is out of date.
const TRIES_MAX: u8 = 3;

/// What the gates of a device share.
pub struct ZoneGates<D> {
    device: Arc<D>,
    zones: ZoneGeometry,
    gate: Arc<ZoneGate>,
    /// The write pointers, for a device without an append of its own.
    pointers: Option<Arc<WpCache>>,
    rules: MergeRules,
}

/// Why a device cannot have a gate.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GateError {
    /// There is no memory for the write pointers.
    NoMemory(TryReserveError),
    /// A write pointer of a zone does not fit into its four bytes.
    LongZones {
        /// How long zones are, in sectors.
        sectors: u64,
        /// How long they may be, in sectors.
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
                write!(f, ": wanted at most {wanted_max}")
            }
        }
    }
}

impl std::error::Error for GateError {}

impl<D: Device> ZoneGates<D> {
    /// The gates of a zoned device; `None` for one without zones.
    ///
    /// # Errors
    /// If the device has no append of its own, and there is no memory for the write pointers, or a
    /// zone is too long for one.
    pub fn new(device: Arc<D>) -> Result<Option<ZoneGates<D>>, GateError> {
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
        Ok(Some(ZoneGates { device, zones, gate, pointers, rules }))
    }
}

impl<D: Device> Gates for ZoneGates<D> {
    type Gate = Plugged<D>;

    fn open(&self, depth: u16) -> Plugged<D> {
        let pointers = self.pointers.as_ref().map(|cache| {
            Pointers::new(Arc::clone(cache), Arc::clone(&self.device), self.zones.clone())
        });
        Plugged {
            seat: Seat::new(&self.gate, depth),
            turns: Turns::new(depth),
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
            behind: Ring::with_capacity(depth.into()),
            closing: false,
        }
    }

    /// An emulated append is one write: no longer than one request, nor than a zone.
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
        GateView { mode: GateMode::Plug, emulates_append: self.pointers.is_some() }
    }

    fn zones_changed(&self) {
        if let Some(cache) = &self.pointers {
            cache.invalidate_all();
        }
    }
}

impl<D> fmt::Debug for ZoneGates<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZoneGates").field("pointers", &self.pointers).finish_non_exhaustive()
    }
}

/// A reset of all zones on its way.
#[derive(Debug)]
enum ResetAll {
    /// There is none.
    None,
    /// It waits for the channel's turns to end.
    Waits(Request),
    /// The device has it.
    InFlight,
}

/// One channel's part of the gate.
pub struct Plugged<D> {
    seat: Seat,
    turns: Turns,
    zones: ZoneGeometry,
    /// The device's length in sectors: its last zone may be shorter than the others.
    sectors: u64,
    pointers: Option<Pointers<D>>,
    /// The device has appends of its own, and starts what comes later behind them. A scheduler may
    /// start a write first that is to go where the append ends.
    passes_appends: bool,
    rules: MergeRules,
    /// Turns that wait for another channel's to end.
    foreign: u16,
    /// When to look again for them.
    look_at: Nanos,
    /// Somebody is called when another channel makes way.
    is_called: bool,
    /// Turns that have to ask the device for a pointer.
    asking: Vec<u16>,
    reset_all: ResetAll,
    /// What came behind a reset of all zones.
    behind: Ring<Request>,
    /// Nothing goes any more.
    closing: bool,
}

/// What is to become of the first request of a turn.
enum Next {
    /// It goes to the device, to this sector if it is an append that becomes a write.
    Goes(Option<Sector>),
    /// It fails: there is no room for it, nobody knows where the zone is written, or the device has
    /// had a reason.
    Fails(Status),
    /// The device has to say first where the zone is written.
    Waits,
}

impl Refused {
    /// Whether nothing but the pointer was wrong: the zone is written elsewhere. If the pointer has
    /// moved by no more than the write's length, some of it may have been written after all; only a
    /// device that names the fault as its host's (`TARGET`) has not begun.
    fn is_out_of_date(self, pointer: u32, sectors: u64) -> bool {
        let (at, pointer) = (u64::from(self.at), u64::from(pointer));
        pointer < at || pointer > at + sectors || (self.status == Status::Target && pointer != at)
    }
}

impl<D: Device> Plugged<D> {
    #[inline]
    fn start_of(&self, zone: u32) -> Sector {
        self.zones.start_of(ZoneNo(zone))
    }

    /// How much of a zone can be written, in sectors.
    #[inline]
    fn capacity_of(&self, zone: u32) -> u64 {
        self.zones.zone_capacity_sectors.min(self.sectors - self.start_of(zone).0)
    }

    /// Passes on what may go of a turn; ends it when nothing is left.
    fn run(&mut self, number: u16, passage: &mut Passage) {
        let mut next = Some(number);
        while let Some(number) = next {
            next = self.run_turn(number, passage);
        }
    }

    /// The same; answers the turn of this channel that is next in the zone, if it ends.
    fn run_turn(&mut self, number: u16, passage: &mut Passage) -> Option<u16> {
        let turn = self.turns.at(number);
        if !turn.granted || turn.in_flight || turn.asking {
            return None;
        }
        while let Some(first) = self.turns.first(number) {
            let next = match &self.pointers {
                Some(_) if first.op() == Op::ZoneAppend => {
                    let sectors = first.sectors();
                    self.place(number, sectors)
                }
                _ => Next::Goes(None),
            };
            if matches!(next, Next::Waits) {
                return None;
            }
            let request = self.turns.pop(number).expect("a request waits");
            let at = match next {
                Next::Goes(at) => at,
                Next::Waits => unreachable!("that was asked before"),
                Next::Fails(status) => {
                    self.turns.at(number).refused = None;
                    passage.refuse(request, status);
                    continue;
                }
            };
            let request = match at {
                Some(at) => request.append_at(at),
                None => request,
            };
            self.turns.hold(number, &request);
            passage.pass(request);
            return None;
        }
        self.end(number, passage)
    }

    /// Where an append of so many sectors goes that becomes a write.
    fn place(&mut self, number: u16, sectors: u64) -> Next {
        let zone = self.turns.at(number).zone;
        let (start, capacity) = (self.start_of(zone), self.capacity_of(zone));
        let turn = self.turns.at(number);
        if self.pointers.as_ref().is_some_and(|pointers| pointers.is_disturbed(zone)) {
            (turn.pointer, turn.asked) = (None, false);
        }
        match (turn.pointer, turn.refused) {
            (Some(at), Some(refused)) if !refused.is_out_of_date(at, sectors) => {
                Next::Fails(refused.status)
            }
            (Some(at), _) if u64::from(at) + sectors <= capacity => {
                Next::Goes(Some(start + u64::from(at)))
            }
            // No room, or no pointer: what the device has said of it itself comes first.
            (Some(_), refused) => Next::Fails(refused.map_or(Status::IoErr, |it| it.status)),
            (None, refused) if turn.asked => {
                Next::Fails(refused.map_or(turn.unknown, |it| it.status))
            }
            (None, _) => {
                turn.asking = true;
                self.asking.push(number);
                Next::Waits
            }
        }
    }

    /// Ends a turn; answers the turn of this channel that is next in the zone.
    fn end(&mut self, number: u16, passage: &mut Passage) -> Option<u16> {
        let Turn { zone, pointer, .. } = *self.turns.at(number);
        if let Some(pointers) = &self.pointers {
            pointers.end(zone, pointer);
        }
        self.turns.end(number);
        let next = self.seat.leave(number);
        if let Some(next) = next {
            self.grant(next);
        } else if self.turns.are_over() {
            self.pass_reset_all(passage);
        }
        next
    }

    /// Notes that a turn has come that waited.
    fn grant(&mut self, number: u16) {
        self.foreign -= 1;
        self.begin(number);
    }

    /// Begins a turn.
    #[inline]
    fn begin(&mut self, number: u16) {
        let turn = self.turns.at(number);
        turn.granted = true;
        if let Some(pointers) = &self.pointers {
            turn.pointer = pointers.begin(turn.zone);
        }
    }

    /// Puts a request into the queue of its zone.
    #[inline]
    fn queue(&mut self, zone: u32, request: Request, passage: &mut Passage) {
        let op = request.op();
        let number = match self.seat.enter(zone, self.turns.spare()) {
            Entered::Joined(number) => number,
            Entered::First => {
                let number = self.turns.open(zone);
                self.begin(number);
                number
            }
            Entered::Behind => {
                self.foreign += 1;
                self.turns.open(zone)
            }
        };
        if self.turns.push(number, request, self.rules) {
            passage.merged(op);
        } else {
            self.run(number, passage);
        }
    }

    /// Lets a write go whose flush has come home, in the turn that the flush has had.
    #[cold]
    fn follow(&mut self, number: u16, request: Request, passage: &mut Passage) {
        self.turns.release(request.index());
        self.turns.push_front(number, request);
        self.run(number, passage);
    }

    /// Lets a reset of all zones go that has waited for the turns to end.
    fn pass_reset_all(&mut self, passage: &mut Passage) {
        match std::mem::replace(&mut self.reset_all, ResetAll::InFlight) {
            ResetAll::Waits(request) => passage.pass(request),
            other => self.reset_all = other,
        }
    }

    /// Takes the end of a reset of all zones, and lets in what came behind it.
    fn left_reset_all(&mut self, passage: &mut Passage) {
        if let Some(pointers) = &self.pointers {
            pointers.forget_all();
        }
        self.reset_all = ResetAll::None;
        for _ in 0..self.behind.len() {
            let Some(request) = self.behind.pop_front() else { break };
            self.enter(request, passage);
        }
    }

    /// Whether an append was refused, perhaps for no other reason than a pointer that is out of
    /// date. Notes what is to be known then.
    #[inline]
    fn is_to_be_tried_again(&mut self, number: u16, ended: &Ended) -> bool {
        let status = ended.status();
        let refused = matches!(status, Status::IoErr | Status::Target);
        if !refused || !ended.is_made_append() || self.closing {
            return false;
        }
        let Turn { zone, refused, .. } = *self.turns.at(number);
        let tries = refused.map_or(0, |refused| refused.tries) + 1;
        let at = (ended.sector() - self.start_of(zone)) as u32;
        self.turns.at(number).refused = Some(Refused { at, status, tries });
        tries < TRIES_MAX
    }

    /// What a completed change of a zone says of its pointer.
    #[inline]
    fn learn(&mut self, number: u16, ended: &Ended) {
        let Turn { zone, .. } = *self.turns.at(number);
        let start = self.start_of(zone);
        let full = self.zones.zone_sectors as u32;
        let turn = self.turns.at(number);
        (turn.asked, turn.refused) = (false, None);
        turn.pointer = match ended.op() {
            _ if !ended.status().is_ok() => None,
            Op::ZoneReset => Some(0),
            Op::ZoneFinish => Some(full),
            Op::Write | Op::WriteZeroes => Some((ended.sector() - start + ended.sectors()) as u32),
            _ => turn.pointer,
        };
    }
}

impl<D: Device> Gate for Plugged<D> {
    fn enter(&mut self, request: Request, passage: &mut Passage) {
        if let Some(number) = self.turns.holder(request.index()) {
            return self.follow(number, request, passage);
        }
        // A flush that goes before a write has the write's place in its zone.
        let (op, sector) = request.follower().unwrap_or((request.op(), request.sector()));
        if !op.is_write() || op == Op::Discard {
            return passage.pass(request);
        }
        let all = op == Op::ZoneResetAll;
        let zone = self.zones.zone_of(sector);
        if !all && self.zones.is_conventional(zone) {
            return match op {
                Op::ZoneAppend => passage.refuse(request, Status::IoErr),
                _ => passage.pass(request),
            };
        }
        if !matches!(self.reset_all, ResetAll::None) {
            self.behind.push_back(request);
        } else if all {
            self.reset_all = ResetAll::Waits(request);
            if self.turns.are_over() {
                self.pass_reset_all(passage);
            }
        } else if op == Op::ZoneAppend && self.passes_appends && !self.turns.may_have(zone.0) {
            passage.pass(request);
        } else {
            self.queue(zone.0, request, passage);
        }
    }

    #[inline]
    fn leave(&mut self, ended: Ended, passage: &mut Passage) {
        if let Some(number) = self.turns.holder(ended.index()) {
            let flush = ended.op() == Op::Flush;
            if flush && ended.status().is_ok() && !self.closing {
                // The turn stays as it is until the write follows, which is next.
                return passage.home(ended);
            }
            if self.pointers.is_some() && !flush {
                if self.is_to_be_tried_again(number, &ended) {
                    return passage.again(ended);
                }
                self.learn(number, &ended);
            }
            self.turns.release(ended.index());
            passage.home(ended);
            self.run(number, passage);
        } else {
            let all = ended.op() == Op::ZoneResetAll;
            passage.home(ended);
            if all {
                self.left_reset_all(passage);
            }
        }
    }

    fn take_back(&mut self, request: Request, passage: &mut Passage) {
        let number = self.turns.release(request.index()).expect("it left from a turn");
        self.turns.push_front(number, request);
        let turn = self.turns.at(number);
        (turn.pointer, turn.asked) = (None, false);
        self.run(number, passage);
    }

    fn broken(&mut self, head: u16, single: Request) -> Option<Request> {
        match self.turns.holder(head) {
            Some(number) => {
                self.turns.push_front(number, single);
                None
            }
            None => Some(single),
        }
    }

    fn poll(&mut self, now: Nanos, passage: &mut Passage) {
        if self.foreign == 0 {
            return;
        }
        while let Some(number) = self.seat.granted() {
            self.grant(number);
            self.run(number, passage);
        }
        self.look_at = now + LOOK_NS;
    }

    fn catch_up(&mut self, passage: &mut Passage) -> bool {
        let Some(pointers) = &mut self.pointers else { return false };
        let Some(number) = self.asking.pop() else { return false };
        let turn = self.turns.at(number);
        (turn.asking, turn.asked) = (false, true);
        (turn.pointer, turn.unknown) = match pointers.ask(turn.zone) {
            Ok(pointer) => (pointer, Status::IoErr),
            Err(status) => (None, status),
        };
        self.run(number, passage);
        true
    }

    fn waits(&self) -> bool {
        self.foreign > 0
    }

    fn due(&self) -> Due {
        if self.foreign > 0 && !self.is_called { Due::At(self.look_at) } else { Due::Never }
    }

    fn call(&mut self, caller: Caller) {
        self.is_called = self.seat.call(caller);
    }

    fn sleep(&self, at_most: Duration) {
        self.seat.sleep(at_most);
    }

    fn may_carry(&self, op: Op, sector: Sector) -> bool {
        op == Op::Read || self.zones.is_conventional(self.zones.zone_of(sector))
    }

    fn close(&mut self) {
        self.closing = true;
        self.turns.clear();
        self.asking.clear();
        self.reset_all = ResetAll::None;
        while self.behind.pop_front().is_some() {}
    }
}

impl<D> fmt::Debug for Plugged<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugged").field("foreign", &self.foreign).finish_non_exhaustive()
    }
}

//! What a channel keeps of the zones that it writes to: a turn for each ticket, and the requests
//! that wait under it. All places are made at open; there is one for each slot of the channel.

use crate::channel::merge::MergeRules;
use crate::request::Request;
use crate::status::Status;

/// No slot and no turn, where a number is expected.
const NONE: u16 = u16::MAX;

/// A write that a device has refused, though it is an append that lands anywhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refused {
    /// Where it was to go, in sectors from the zone's start.
    pub(super) at: u32,
    /// What the device answered.
    pub(super) status: Status,
    /// How often it was tried.
    pub(super) tries: u8,
}

/// One stay of this channel in a zone's queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    /// The zone.
    pub(super) zone: u32,
    /// First and last request that wait, by slot, or `NONE`.
    head: u16,
    tail: u16,
    /// A request was passed on and has not come home.
    pub(super) in_flight: bool,
    /// It is this channel's turn.
    pub(super) granted: bool,
    /// The device is to be asked for the pointer.
    pub(super) asking: bool,
    /// The device was asked for the pointer, and nothing has changed since.
    pub(super) asked: bool,
    /// What an append fails with whose zone's pointer stays unknown.
    pub(super) unknown: Status,
    /// Where the first append was refused, and how, if it is tried again.
    pub(super) refused: Option<Refused>,
    /// Where the zone will be written next, in sectors from its start, if that is known.
    pub(super) pointer: Option<u32>,
}

impl Turn {
    fn new(zone: u32) -> Turn {
        Turn {
            zone,
            head: NONE,
            tail: NONE,
            in_flight: false,
            granted: false,
            asking: false,
            asked: false,
            unknown: Status::IoErr,
            refused: None,
            pointer: None,
        }
    }
}

/// The turns of a channel.
#[derive(Debug)]
pub(super) struct Turns {
    turns: Box<[Turn]>,
    free: Vec<u16>,
    /// Requests that wait, by the number of their first slot, and the one behind each.
    waiting: Box<[Option<Request>]>,
    behind: Box<[u16]>,
    /// Under which turn the request in flight with this first slot is, or `NONE`.
    held: Box<[u16]>,
    /// How many turns there are in the zones of each remainder: nought says that a zone has none.
    zones: [u16; ZONES],
}

/// Remainders of zone numbers that are told apart.
const ZONES: usize = 64;

impl Turns {
    pub(super) fn new(depth: u16) -> Turns {
        let count = usize::from(depth);
        Turns {
            turns: vec![Turn::new(0); count].into_boxed_slice(),
            free: (0..depth).rev().collect(),
            waiting: (0..count).map(|_| None).collect(),
            behind: vec![NONE; count].into_boxed_slice(),
            held: vec![NONE; count].into_boxed_slice(),
            zones: [0; ZONES],
        }
    }

    /// The number that the next turn has.
    #[inline]
    pub(super) fn spare(&self) -> u16 {
        *self.free.last().expect("a turn has a request at least, and there is one for each slot")
    }

    /// Opens the turn with the spare number.
    pub(super) fn open(&mut self, zone: u32) -> u16 {
        let number = self.free.pop().expect("`spare` was asked");
        self.turns[usize::from(number)] = Turn::new(zone);
        self.zones[zone as usize % ZONES] += 1;
        number
    }

    /// Ends a turn.
    pub(super) fn end(&mut self, number: u16) {
        let zone = self.at(number).zone;
        self.zones[zone as usize % ZONES] -= 1;
        self.free.push(number);
    }

    /// Whether this channel has no turn at all.
    #[inline]
    pub(super) fn are_over(&self) -> bool {
        self.free.len() == self.turns.len()
    }

    /// Whether the channel may have a turn in the zone.
    #[inline]
    pub(super) fn may_have(&self, zone: u32) -> bool {
        self.zones[zone as usize % ZONES] > 0
    }

    #[inline]
    pub(super) fn at(&mut self, number: u16) -> &mut Turn {
        &mut self.turns[usize::from(number)]
    }

    /// Adds a request behind those of a turn; says whether it was merged into the last of them.
    #[inline]
    pub(super) fn push(&mut self, number: u16, request: Request, rules: MergeRules) -> bool {
        let turn = &mut self.turns[usize::from(number)];
        let index = request.index();
        if turn.tail != NONE {
            let tail = usize::from(turn.tail);
            let last = self.waiting[tail].as_mut().expect("a turn's last request is here");
            if last.end() == request.sector() && rules.allow(last, &request) {
                last.merge_back(request);
                return true;
            }
            self.behind[tail] = index;
        } else {
            turn.head = index;
        }
        turn.tail = index;
        self.behind[usize::from(index)] = NONE;
        self.waiting[usize::from(index)] = Some(request);
        false
    }

    /// Adds a request before those of a turn.
    pub(super) fn push_front(&mut self, number: u16, request: Request) {
        let turn = &mut self.turns[usize::from(number)];
        let index = request.index();
        self.behind[usize::from(index)] = std::mem::replace(&mut turn.head, index);
        if turn.tail == NONE {
            turn.tail = index;
        }
        self.waiting[usize::from(index)] = Some(request);
    }

    /// The first request that waits under a turn.
    #[inline]
    pub(super) fn first(&self, number: u16) -> Option<&Request> {
        let head = self.turns[usize::from(number)].head;
        self.waiting.get(usize::from(head))?.as_ref()
    }

    /// Takes the first request that waits under a turn.
    #[inline]
    pub(super) fn pop(&mut self, number: u16) -> Option<Request> {
        let turn = &mut self.turns[usize::from(number)];
        let request = self.waiting.get_mut(usize::from(turn.head))?.take()?;
        turn.head = self.behind[usize::from(turn.head)];
        if turn.head == NONE {
            turn.tail = NONE;
        }
        Some(request)
    }

    /// Notes that a request is in flight, the only one of its turn.
    #[inline]
    pub(super) fn hold(&mut self, number: u16, request: &Request) {
        self.held[usize::from(request.index())] = number;
        self.at(number).in_flight = true;
    }

    /// The turn of a request in flight, by its first slot.
    #[inline]
    pub(super) fn holder(&self, slot: u16) -> Option<u16> {
        let number = self.held[usize::from(slot)];
        (number != NONE).then_some(number)
    }

    /// Notes that a request has come home; answers its turn.
    #[inline]
    pub(super) fn release(&mut self, slot: u16) -> Option<u16> {
        let number = std::mem::replace(&mut self.held[usize::from(slot)], NONE);
        if number == NONE {
            return None;
        }
        self.at(number).in_flight = false;
        Some(number)
    }

    /// Forgets every request that waits.
    pub(super) fn clear(&mut self) {
        for turn in &mut self.turns {
            (turn.head, turn.tail) = (NONE, NONE);
        }
        self.waiting.fill_with(|| None);
    }
}

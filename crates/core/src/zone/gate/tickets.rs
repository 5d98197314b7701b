//! The zone write tickets of a channel, and the requests that wait under each. All memory is
//! allocated at open; there is one ticket for each slot of the channel.

use crate::bio::Status;
use crate::request::MergeRules;
use crate::request::Request;

/// A number that means no slot and no ticket.
const NONE: u16 = u16::MAX;

/// A refused write that emulates an append.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refused {
    /// The sector of the write, counted from the start of the zone.
    pub(super) at: u32,
    /// The status from the device.
    pub(super) status: Status,
    /// Number of attempts.
    pub(super) tries: u8,
}

/// One ticket: this channel's place in the queue of a zone.
#[derive(Clone, Copy, Debug)]
pub(super) struct ZoneWriteTicket {
    /// The zone.
    pub(super) zone: u32,
    /// First and last waiting request, by slot, or `NONE`.
    head: u16,
    tail: u16,
    /// A request was passed on and has not completed.
    pub(super) in_flight: bool,
    /// The ticket is granted: this channel may change the zone.
    pub(super) granted: bool,
    /// The device has to be queried for the write pointer.
    pub(super) asking: bool,
    /// The device was queried for the write pointer, and nothing has changed since.
    pub(super) asked: bool,
    /// The status for an append while the write pointer of the zone stays unknown.
    pub(super) unknown: Status,
    /// The refusal of the first append, if it is tried again.
    pub(super) refused: Option<Refused>,
    /// The write pointer, in sectors from the start of the zone, if it is known.
    pub(super) pointer: Option<u32>,
}

impl ZoneWriteTicket {
    fn new(zone: u32) -> ZoneWriteTicket {
        ZoneWriteTicket {
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

/// The tickets of a channel.
#[derive(Debug)]
pub(super) struct ZoneWriteTickets {
    tickets: Box<[ZoneWriteTicket]>,
    free: Vec<u16>,
    /// Waiting requests, by the number of their first slot, and the next request after each.
    waiting: Box<[Option<Request>]>,
    next: Box<[u16]>,
    /// The ticket of the request in flight with this first slot, or `NONE`.
    held: Box<[u16]>,
    /// Number of tickets by remainder of the zone number; 0 means that no zone with this remainder
    /// has one.
    zones: [u16; ZONES],
}

/// Number of remainders in `ZoneWriteTickets::zones`.
const ZONES: usize = 64;

impl ZoneWriteTickets {
    pub(super) fn new(depth: u16) -> ZoneWriteTickets {
        let count = usize::from(depth);
        ZoneWriteTickets {
            tickets: vec![ZoneWriteTicket::new(0); count].into_boxed_slice(),
            free: (0..depth).rev().collect(),
            waiting: (0..count).map(|_| None).collect(),
            next: vec![NONE; count].into_boxed_slice(),
            held: vec![NONE; count].into_boxed_slice(),
            zones: [0; ZONES],
        }
    }

    /// The number of the next ticket.
    #[inline]
    pub(super) fn spare(&self) -> u16 {
        *self.free.last().expect("a ticket has a request at least, and there is one for each slot")
    }

    /// Opens a ticket with the number that `spare` returned.
    #[inline]
    pub(super) fn open(&mut self, zone: u32) -> u16 {
        let number = self.free.pop().expect("`spare` was asked");
        self.tickets[usize::from(number)] = ZoneWriteTicket::new(zone);
        self.zones[zone as usize % ZONES] += 1;
        number
    }

    /// Closes a ticket.
    #[inline]
    pub(super) fn end(&mut self, number: u16) {
        let zone = self.at(number).zone;
        self.zones[zone as usize % ZONES] -= 1;
        self.free.push(number);
    }

    /// Whether this channel has no ticket.
    #[inline]
    pub(super) fn are_over(&self) -> bool {
        self.free.len() == self.tickets.len()
    }

    /// Whether the channel may have a ticket in the zone; a false positive is possible.
    #[inline]
    pub(super) fn may_have(&self, zone: u32) -> bool {
        self.zones[zone as usize % ZONES] > 0
    }

    #[inline]
    pub(super) fn at(&mut self, number: u16) -> &mut ZoneWriteTicket {
        &mut self.tickets[usize::from(number)]
    }

    /// Adds a request at the end of a ticket's queue; returns whether it was merged into the last
    /// one.
    #[inline]
    pub(super) fn push(&mut self, number: u16, request: Request, rules: MergeRules) -> bool {
        let ticket = &mut self.tickets[usize::from(number)];
        let index = request.index();
        if ticket.tail != NONE {
            let tail = usize::from(ticket.tail);
            let last = self.waiting[tail].as_mut().expect("a ticket's last request is here");
            if last.end() == request.sector() && rules.allow(last, &request) {
                last.merge_back(request);
                return true;
            }
            self.next[tail] = index;
        } else {
            ticket.head = index;
        }
        ticket.tail = index;
        self.next[usize::from(index)] = NONE;
        self.waiting[usize::from(index)] = Some(request);
        false
    }

    /// Adds a request at the front of a ticket's queue.
    pub(super) fn push_front(&mut self, number: u16, request: Request) {
        let ticket = &mut self.tickets[usize::from(number)];
        let index = request.index();
        self.next[usize::from(index)] = std::mem::replace(&mut ticket.head, index);
        if ticket.tail == NONE {
            ticket.tail = index;
        }
        self.waiting[usize::from(index)] = Some(request);
    }

    /// The first waiting request of a ticket.
    #[inline]
    pub(super) fn first(&self, number: u16) -> Option<&Request> {
        let head = self.tickets[usize::from(number)].head;
        self.waiting.get(usize::from(head))?.as_ref()
    }

    /// Removes the first waiting request of a ticket.
    #[inline]
    pub(super) fn pop(&mut self, number: u16) -> Option<Request> {
        let ticket = &mut self.tickets[usize::from(number)];
        let request = self.waiting.get_mut(usize::from(ticket.head))?.take()?;
        ticket.head = self.next[usize::from(ticket.head)];
        if ticket.head == NONE {
            ticket.tail = NONE;
        }
        Some(request)
    }

    /// Records that a request is in flight, the only one of its ticket.
    #[inline]
    pub(super) fn hold(&mut self, number: u16, request: &Request) {
        self.held[usize::from(request.index())] = number;
        self.at(number).in_flight = true;
    }

    /// The ticket of a request in flight, by its first slot.
    #[inline]
    pub(super) fn holder(&self, slot: u16) -> Option<u16> {
        let number = self.held[usize::from(slot)];
        (number != NONE).then_some(number)
    }

    /// Records that a request has completed; returns its ticket.
    #[inline]
    pub(super) fn release(&mut self, slot: u16) -> Option<u16> {
        let number = std::mem::replace(&mut self.held[usize::from(slot)], NONE);
        if number == NONE {
            return None;
        }
        self.at(number).in_flight = false;
        Some(number)
    }

    /// Discards all waiting requests.
    pub(super) fn clear(&mut self) {
        for ticket in &mut self.tickets {
            (ticket.head, ticket.tail) = (NONE, NONE);
        }
        self.waiting.fill_with(|| None);
    }
}

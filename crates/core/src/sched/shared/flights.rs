//! The requests that one device queue works on, by tag: what they were before they got it.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use super::Report;
use super::queued::{Queued, part_ended};
use crate::bio::{Op, Prio};
use crate::request::{Batch, Ended, Request, Slot};
use crate::sched::deadline::{Item, Kind};
use crate::units::Tag;

/// What is kept of a request in flight.
#[derive(Clone, Copy, Debug)]
struct Flight {
    /// The first bio; `None` if nothing flies under this tag.
    head: Option<NonNull<Slot>>,
    /// The last bio of the first request in its chain.
    first_tail: NonNull<Slot>,
    /// The tag that its channel gave the first request.
    tag: Tag,
    kind: Kind,
}

/// A chain that has ended, on its way home.
#[derive(Debug)]
pub(super) struct Landed {
    ended: Ended,
    first_tail: NonNull<Slot>,
}

// SAFETY: as for `Request`.
unsafe impl Send for Landed {}

impl Landed {
    /// Sends each request of the chain home.
    #[inline]
    pub(super) fn part(self, each: impl FnMut(u16, Ended)) {
        part_ended(self.ended, self.first_tail, each);
    }
}

/// The flights of a queue, and the tags that are free.
#[derive(Debug)]
pub(super) struct Flights {
    free: Vec<u16>,
    table: Box<[Flight]>,
}

// SAFETY: as for `Request`.
unsafe impl Send for Flights {}

impl Flights {
    /// Room for so many.
    pub(super) fn new(count: u16) -> Flights {
        let kind = Kind::of(Op::Read, Prio::BestEffort);
        let empty = Flight { head: None, first_tail: NonNull::dangling(), tag: Tag(0), kind };
        Flights { free: (0..count).rev().collect(), table: vec![empty; count.into()].into() }
    }

    /// How many more can start.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// How many have started.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// Gives a request a tag and puts it into the batch. There is room.
    #[inline]
    pub(super) fn launch(&mut self, queued: Queued, batch: &mut Batch) {
        let tag = self.free.pop().expect("the caller has asked for room");
        let mut request = queued.request();
        let flight = Flight {
            head: Some(request.head()),
            first_tail: queued.first_tail(),
            tag: request.exchange_tag(Tag(tag)),
            kind: queued.kind(),
        };
        self.table[usize::from(tag)] = flight;
        batch.start(request, Tag(tag));
    }

    /// Takes what the queue has completed: it is on its way home, and reported.
    ///
    /// # Errors
    /// The request itself, if it was not launched here.
    #[inline]
    pub(super) fn land(
        &mut self,
        ended: Ended,
        home: &mut Vec<Landed>,
        reports: &mut Vec<Report>,
    ) -> Result<(), Ended> {
        let tag = ended.tag().map_or(usize::MAX, |tag| usize::from(tag.0));
        let flight = match self.table.get_mut(tag) {
            Some(flight) if flight.head == Some(ended.head()) => flight,
            _ => return Err(ended),
        };
        flight.head = None;
        self.free.push(tag as u16);
        Report::add_completed(reports, flight.kind);
        let mut request = ended.into_request();
        request.exchange_tag(flight.tag);
        home.push(Landed { ended: request.into_ended(), first_tail: flight.first_tail });
        Ok(())
    }

    /// Whether nobody but the channel at this home has anything in flight.
    pub(super) fn are_of(&self, home: u16) -> bool {
        self.table.iter().filter_map(|flight| Some((flight.head?, flight.first_tail))).all(
            |(head, first_tail)| {
                // SAFETY: a slot in flight heads a request, which is only looked at.
                let request = unsafe { Request::from_raw(head) };
                request.tail() == first_tail && request.home() == home
            },
        )
    }

    /// Takes back what the queue did not start. Where it wants the first of them bio by bio, that
    /// one is parted; if there is nothing to part, it goes home to be parted there. Says whether.
    pub(super) fn take_leftovers(
        &mut self,
        batch: &mut Batch,
        reports: &mut Vec<Report>,
        home: &mut Vec<Landed>,
    ) -> bool {
        let broken = batch.take_broken();
        while let Some((mut request, tag)) = batch.unstart_last() {
            let flight = &mut self.table[usize::from(tag.0)];
            flight.head = None;
            self.free.push(tag.0);
            request.exchange_tag(flight.tag);
            let queued = Queued::again(request, flight.first_tail);
            if !(broken && batch.is_empty()) {
                reports.push(Report::Undone(queued));
                continue;
            }
            match queued.break_up() {
                (first, Some(rest)) => {
                    reports.push(Report::Rest(rest));
                    reports.push(Report::Undone(first));
                }
                (single, None) => {
                    Report::add_completed(reports, flight.kind);
                    let first_tail = single.first_tail();
                    home.push(Landed { ended: single.request().give_back(), first_tail });
                }
            }
        }
        broken
    }
}

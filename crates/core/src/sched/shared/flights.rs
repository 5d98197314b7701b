//! The table of requests in flight on one device queue, by tag, with what they were before the tag.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use super::Report;
use super::queued::{Queued, part_ended};
use crate::bio::{Op, Prio};
use crate::request::{Batch, Ended, Request, Slot};
use crate::sched::deadline::{Item, Kind};
use crate::units::Tag;

/// The record of a request in flight.
#[derive(Clone, Copy, Debug)]
struct Flight {
    /// The first bio; `None` if the tag is free.
    head: Option<NonNull<Slot>>,
    /// The last bio of the first request in its chain.
    first_tail: NonNull<Slot>,
    /// The tag that the channel gave the first request.
    tag: Tag,
    kind: Kind,
    /// The number of the channel that passed the request on the fast path, if one did.
    passer: Option<u16>,
}

/// A completed chain on its way to its channels.
#[derive(Debug)]
pub(super) struct Landed {
    ended: Ended,
    first_tail: NonNull<Slot>,
}

// SAFETY: as for `Request`.
unsafe impl Send for Landed {}

impl Landed {
    /// Hands each request of the chain to `each`, with its completion target.
    #[inline]
    pub(super) fn part(self, each: impl FnMut(u16, Ended)) {
        part_ended(self.ended, self.first_tail, each);
    }
}

/// The requests in flight on a queue, and the free tags.
#[derive(Debug)]
pub(super) struct Flights {
    free: Vec<u16>,
    table: Box<[Flight]>,
    /// Completed reads and writes that took the fast path.
    passed: [u32; 2],
}

// SAFETY: as for `Request`.
unsafe impl Send for Flights {}

impl Flights {
    /// A table for `count` requests.
    pub(super) fn new(count: u16) -> Flights {
        let kind = Kind::of(Op::Read, Prio::BestEffort);
        let empty =
            Flight { head: None, first_tail: NonNull::dangling(), tag: Tag(0), kind, passer: None };
        let table = vec![empty; count.into()].into();
        Flights { free: (0..count).rev().collect(), table, passed: [0; 2] }
    }

    /// How many more requests can start.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Number of requests in flight.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// Gives a request a tag and adds it to the batch. The caller has checked that a tag is free.
    /// `passer` is the channel that passed the request on the fast path, or `None` after a
    /// dispatch.
    #[inline]
    pub(super) fn launch(&mut self, queued: Queued, passer: Option<u16>, batch: &mut Batch) {
        let tag = self.free.pop().expect("the caller has asked for room");
        let mut request = queued.request();
        let flight = Flight {
            head: Some(request.head()),
            first_tail: queued.first_tail(),
            tag: request.exchange_tag(Tag(tag)),
            kind: queued.kind(),
            passer,
        };
        self.table[usize::from(tag)] = flight;
        batch.start(request, Tag(tag));
    }

    /// Counts or reports the completion of a request.
    #[inline]
    fn complete(&mut self, flight: Flight, reports: &mut Vec<Report>) {
        match flight.passer {
            None => Report::add_completed(reports, flight.kind),
            Some(_) => self.passed[flight.kind.direction as usize] += 1,
        }
    }

    /// Returns and resets the number of completed reads and writes that took the fast path; these
    /// are not reported.
    #[inline]
    pub(super) fn take_passed(&mut self) -> [u32; 2] {
        std::mem::take(&mut self.passed)
    }

    /// Takes a request that the queue has completed: reports it and adds it to `home`.
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
        let flight = *flight;
        self.free.push(tag as u16);
        self.complete(flight, reports);
        let mut request = ended.into_request();
        request.exchange_tag(flight.tag);
        home.push(Landed { ended: request.into_ended(), first_tail: flight.first_tail });
        Ok(())
    }

    /// Whether all requests in flight belong to the channel with this completion target.
    pub(super) fn are_of(&self, home: u16) -> bool {
        self.table.iter().filter_map(|flight| Some((flight.head?, flight.first_tail))).all(
            |(head, first_tail)| {
                // SAFETY: a slot in flight is the first of a request, which is only read.
                let request = unsafe { Request::from_raw(head) };
                request.tail() == first_tail && request.home() == home
            },
        )
    }

    /// Takes back requests that the queue did not start. If the queue wants the first of them bio
    /// by bio, that request is split into the requests it was merged from. If it was not merged
    /// here, its channel gets it back and splits it. Returns whether the queue wanted that.
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
            let flight = *flight;
            self.free.push(tag.0);
            request.exchange_tag(flight.tag);
            let queued = Queued::again(request, flight.first_tail);
            if !(broken && batch.is_empty()) {
                reports.push(Report::Undone(queued, flight.passer));
                continue;
            }
            match queued.break_up() {
                (first, Some(rest)) => {
                    reports.push(Report::Rest(rest));
                    reports.push(Report::Undone(first, flight.passer));
                }
                (single, None) => {
                    self.complete(flight, reports);
                    let first_tail = single.first_tail();
                    home.push(Landed { ended: single.request().give_back(), first_tail });
                }
            }
        }
        broken
    }
}

//! Requeues the requests that a device did not start. A merged request is requeued bio by bio if
//! the device would have to fail it because of only some of its bios.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use super::Stack;
use crate::bio::Flags;
use crate::clock::Clock;
use crate::device::DeviceQueue;
use crate::request::{Ended, Request, Slot};
use crate::sched::Scheduler;
use crate::zone::gate::Gate;

impl<S: Scheduler, Q: DeviceQueue, C: Clock, G: Gate> Stack<S, Q, C, G> {
    /// Returns the requests that the device did not start to the scheduler, in order. Returns
    /// whether one of them was broken up, so that another start makes sense now.
    #[cold]
    pub(super) fn take_leftovers(&mut self) -> bool {
        let broken = self.batch.take_broken();
        while let Some((request, tag)) = self.batch.unstart_last() {
            self.tags.put(tag);
            if broken && self.batch.is_empty() {
                self.requeue_bios(request);
            } else {
                self.sched.requeue(request);
            }
        }
        broken
    }

    /// Requeues the bios of a request that the device returned unexecuted. Its tag is free.
    #[cold]
    pub(super) fn take_returned(&mut self, ended: Ended) {
        self.requeue_bios(ended.into_undone());
    }

    /// Requeues the bios of a merged request one by one; they are never merged again.
    fn requeue_bios(&mut self, request: Request) {
        // Reverses the chain in place, because the request that is requeued last comes first.
        let first = request.head();
        let mut next = Some(first);
        let mut reversed: Option<NonNull<Slot>> = None;
        while let Some(mut slot) = next {
            // SAFETY: the chain belongs to a request that only this function holds.
            let slot_ref = unsafe { slot.as_mut() };
            next = slot_ref.next;
            slot_ref.next = reversed;
            reversed = Some(slot);
        }
        while let Some(mut slot) = reversed {
            let head = slot;
            // SAFETY: only this function holds the chain; the slot's new request is the only one
            // that refers to it.
            let single = unsafe {
                reversed = slot.as_mut().next.take();
                slot.as_mut().bio.flags = slot.as_ref().bio.flags | Flags::NOMERGE;
                Request::of(slot)
            };
            if G::ACTIVE && head != first {
                // SAFETY: the first bio's slot belongs to this channel; only its number is read.
                let index = unsafe { first.as_ref() }.index;
                if let Some(single) = self.gate.broken(index, single) {
                    self.sched.requeue(single);
                }
            } else {
                self.sched.requeue(single);
            }
        }
    }
}

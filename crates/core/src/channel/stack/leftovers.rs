//! What a device did not start: it goes back to the scheduler, and a merged request bio by bio if
//! the device would have to fail it because of some of its bios only.
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
    /// Gives what the device did not start back to the scheduler, in order; says whether a request
    /// was broken up, so that it is worth while to try again now.
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

    /// Takes a request that came home undone, to be offered again bio by bio. Its tag is free.
    #[cold]
    pub(super) fn take_returned(&mut self, ended: Ended) {
        self.requeue_bios(ended.into_undone());
    }

    /// Requeues a merged request as its single bios, which then stay single.
    fn requeue_bios(&mut self, request: Request) {
        // The chain is reversed in place, because what is requeued last comes first.
        let first = request.head();
        let mut next = Some(first);
        let mut reversed: Option<NonNull<Slot>> = None;
        while let Some(mut slot) = next {
            // SAFETY: the chain is that of a request which only this function holds.
            let slot_ref = unsafe { slot.as_mut() };
            next = slot_ref.next;
            slot_ref.next = reversed;
            reversed = Some(slot);
        }
        while let Some(mut slot) = reversed {
            let head = slot;
            // SAFETY: as above; the slot's new request is the only one that refers to it.
            let single = unsafe {
                reversed = slot.as_mut().next.take();
                slot.as_mut().bio.flags = slot.as_ref().bio.flags | Flags::NOMERGE;
                Request::of(slot)
            };
            if G::ACTIVE && head != first {
                // SAFETY: the first bio's slot is this channel's; only its number is looked at.
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

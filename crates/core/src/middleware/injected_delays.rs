//! The completions that a queue delays because a rule of the fault injector says so.
//!
//! ```text
//! start ─ note(tag, delay) ▸ device ▸ take_completed ─┬─ no delay ──────▸ done
//!                                                     └▸ held until due ▸ done
//! ```
//!
//! No thread waits: the queue reports the earliest time at which a completion is due, as a device
//! with a timer does. The memory grows to the highest tag and the number of requests in flight.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::device::Due;
use crate::request::{CompletedRequest, CompletionBatch};
use crate::units::{Nanos, Tag};

/// The delays of requests that the device has, and the completions that wait.
#[derive(Debug)]
pub(super) struct InjectedDelays {
    /// The delay of each started request by its tag, in nanoseconds; 0 for none.
    noted_ns: Vec<u64>,
    /// The entries of `noted_ns` that are not 0.
    noted: usize,
    held: BinaryHeap<Reverse<HeldCompletion>>,
    /// The number of completions that were held so far.
    count: u64,
    /// Completions of the device that have not been looked at.
    pub(super) fresh: CompletionBatch,
}

/// A completion that waits. The earliest is the least; of several for one time, the oldest.
#[derive(Debug)]
struct HeldCompletion {
    due: Nanos,
    number: u64,
    ended: CompletedRequest,
}

impl HeldCompletion {
    fn key(&self) -> (u64, u64) {
        (self.due.0, self.number)
    }
}

impl PartialEq for HeldCompletion {
    fn eq(&self, other: &HeldCompletion) -> bool {
        self.key() == other.key()
    }
}

impl Eq for HeldCompletion {}

impl PartialOrd for HeldCompletion {
    fn partial_cmp(&self, other: &HeldCompletion) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for HeldCompletion {
    fn cmp(&self, other: &HeldCompletion) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl InjectedDelays {
    /// For a queue of a device with this depth.
    pub(super) fn new(depth: usize) -> InjectedDelays {
        InjectedDelays {
            noted_ns: Vec::new(),
            noted: 0,
            held: BinaryHeap::new(),
            count: 0,
            fresh: CompletionBatch::with_capacity(depth),
        }
    }

    /// Whether no request is delayed, or will be when the device completes it.
    pub(super) fn is_empty(&self) -> bool {
        self.noted == 0 && self.held.is_empty()
    }

    /// Notes the delay of a request that goes to the device now; 0 for none.
    pub(super) fn note(&mut self, tag: Tag, delay_ns: u64) {
        let index = usize::from(tag.0);
        if index >= self.noted_ns.len() {
            if delay_ns == 0 {
                return;
            }
            self.noted_ns.resize(index + 1, 0);
        }
        let before_ns = std::mem::replace(&mut self.noted_ns[index], delay_ns);
        self.noted += usize::from(delay_ns > 0);
        self.noted -= usize::from(before_ns > 0);
    }

    /// Holds a completion for `delay_ns`.
    pub(super) fn hold(&mut self, now: Nanos, ended: CompletedRequest, delay_ns: u64) {
        let (due, number) = (now + delay_ns, self.count);
        self.count += 1;
        self.held.push(Reverse(HeldCompletion { due, number, ended }));
    }

    /// Moves the completions of the device to `done`, or holds them.
    pub(super) fn take_completed(&mut self, now: Nanos, done: &mut CompletionBatch) {
        while let Some(ended) = self.fresh.take() {
            let index = ended.tag().map(|tag| usize::from(tag.0));
            let noted_ns = index.and_then(|index| self.noted_ns.get_mut(index));
            match noted_ns.map_or(0, std::mem::take) {
                0 => done.put(ended),
                delay_ns => {
                    self.noted -= 1;
                    self.hold(now, ended, delay_ns);
                }
            }
        }
    }

    /// Moves the completions that are due to `done`.
    pub(super) fn release(&mut self, now: Nanos, done: &mut CompletionBatch) {
        while self.held.peek().is_some_and(|first| first.0.due <= now) {
            let Some(Reverse(first)) = self.held.pop() else { return };
            done.put(first.ended);
        }
    }

    /// Moves all completions to `done`, and delays no request that the device still has.
    pub(super) fn abort(&mut self, done: &mut CompletionBatch) {
        (self.noted, self.noted_ns) = (0, Vec::new());
        self.take_completed(Nanos(0), done);
        self.release(Nanos(u64::MAX), done);
    }

    /// When the next completion is due.
    pub(super) fn due(&self) -> Due {
        self.held.peek().map_or(Due::Never, |first| Due::At(first.0.due))
    }
}

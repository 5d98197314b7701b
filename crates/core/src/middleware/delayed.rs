//! A device that delays completions.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use super::forward_control_plane;
use crate::clock::Clock;
use crate::device::{Device, DeviceError, DeviceQueue, Due};
use crate::inject::Injection;
use crate::request::{Batch, CompletionBatch};
use crate::units::Nanos;

/// Delays every completion of `D` by a constant time.
#[derive(Debug)]
pub struct Delayed<D> {
    inner: D,
    delay_ns: u64,
}

impl<D: Device> Delayed<D> {
    /// `inner` with completions delayed by `delay_ns` nanoseconds.
    pub fn new(inner: D, delay_ns: u64) -> Delayed<D> {
        Delayed { inner, delay_ns }
    }
}

impl<D: Device> Device for Delayed<D> {
    type Queue = DelayedQueue<D::Queue>;

    forward_control_plane!();

    fn open_queue(&self) -> Result<Self::Queue, DeviceError> {
        let depth = usize::from(self.limits().queue_depth);
        Ok(DelayedQueue {
            inner: self.inner.open_queue()?,
            delay_ns: self.delay_ns,
            held: CompletionBatch::with_capacity(depth),
            due: VecDeque::with_capacity(depth),
        })
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.inner.inject(injection)
    }
}

/// A queue of a [`Delayed`] device.
#[derive(Debug)]
pub struct DelayedQueue<Q> {
    inner: Q,
    delay_ns: u64,
    /// Delayed completions, oldest first, and the due time of each; both have the same length.
    held: CompletionBatch,
    due: VecDeque<Nanos>,
}

impl<Q> DelayedQueue<Q> {
    /// Records the due times of completions that the device has just made.
    fn note_new(&mut self, now: Nanos) {
        while self.due.len() < self.held.len() {
            self.due.push_back(now + self.delay_ns);
        }
    }
}

impl<Q: DeviceQueue> DeviceQueue for DelayedQueue<Q> {
    fn start(&mut self, now: Nanos, batch: &mut Batch, _done: &mut CompletionBatch) {
        self.inner.start(now, batch, &mut self.held);
        self.note_new(now);
    }

    fn poll(&mut self, now: Nanos, done: &mut CompletionBatch) {
        self.inner.poll(now, &mut self.held);
        self.note_new(now);
        while self.due.front().is_some_and(|due| *due <= now) {
            self.due.pop_front();
            done.take_from(&mut self.held);
        }
    }

    fn room(&self) -> usize {
        self.inner.room()
    }

    fn due(&self) -> Due {
        let held = self.due.front().map_or(Due::Never, |due| Due::At(*due));
        held.earlier(self.inner.due())
    }

    fn waits_for_others(&self) -> bool {
        self.inner.waits_for_others()
    }

    fn descriptor(&mut self) -> Option<RawFd> {
        self.inner.descriptor()
    }

    fn may_sleep(&mut self) -> bool {
        self.inner.may_sleep()
    }

    fn sleep<C: Clock>(&mut self, until: Due, clock: &C) {
        let held = self.due.front().map_or(Due::Never, |due| Due::At(*due));
        self.inner.sleep(held.earlier(until), clock);
    }

    fn abort(&mut self, done: &mut CompletionBatch) {
        self.inner.abort(&mut self.held);
        self.due.clear();
        while done.take_from(&mut self.held) {}
    }
}

//! Primitive: the completion queue (MPSC queue).
//!
//! Protects   completions that other threads produced and the channel has not received yet.
//! Why        a request that another thread executed completes on the channel that pushed it. The
//!            channel belongs to one thread, so the other thread sends a message and does not
//!            access the channel.
//! States     a place is free for the value with its number. It holds that value once its number is
//!            one more, and is free again for the value that comes one round later.
//! Order      no lock. The number is written after the value and read before it.
//! Common     one addition posts any number of values at once; taking one is a load and a store
//!            without contention.
//! Cost       about 6 ns a post and 1 ns a value.
//! Before     a list under a lock.
//!
//! The queue cannot be full: it has as many places as its owner can have requests in flight.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::atomics::{AtomicU32, Ordering};
use crate::event_count::EventCount;
use crate::pad::Padded;
use crate::sync_cell::SyncCell;

/// The posting side, for any number of threads.
pub struct CompletionQueue<T> {
    places: Box<[QueueSlot<T>]>,
    /// The number of the next value.
    next: Padded<AtomicU32>,
    event_count: EventCount,
}

struct QueueSlot<T> {
    number: AtomicU32,
    value: SyncCell<MaybeUninit<T>>,
}

// SAFETY: the thread that drew its number writes a value, and the one owner reads it afterwards;
// the number of its place orders the two.
unsafe impl<T: Send> Sync for CompletionQueue<T> {}

/// The receiving side, for the owner.
#[derive(Debug)]
pub struct Receiver<T> {
    completion_queue: Arc<CompletionQueue<T>>,
    /// The number of the next value to take.
    next: u32,
}

impl<T> CompletionQueue<T> {
    /// An empty queue for `values` values at once; returns its receiving side.
    pub fn open(values: usize) -> Receiver<T> {
        let count = values.max(1).next_power_of_two();
        let place = |number| QueueSlot {
            number: AtomicU32::new(number as u32),
            value: SyncCell::new(MaybeUninit::uninit()),
        };
        let completion_queue = CompletionQueue {
            places: (0..count).map(place).collect(),
            next: Padded(AtomicU32::new(0)),
            event_count: EventCount::new(),
        };
        Receiver { completion_queue: Arc::new(completion_queue), next: 0 }
    }

    #[inline]
    fn place(&self, number: u32) -> &QueueSlot<T> {
        &self.places[number as usize & (self.places.len() - 1)]
    }

    /// Posts values. Does not wake the owner: [`CompletionQueue::eventcount`] does that.
    ///
    /// # Panics
    /// If there are more values than places: the bound is enforced where requests are accepted.
    #[inline]
    pub fn post(&self, values: impl ExactSizeIterator<Item = T>) {
        let first = self.next.fetch_add(values.len() as u32, Ordering::Relaxed);
        for (index, value) in values.enumerate() {
            let number = first.wrapping_add(index as u32);
            let place = self.place(number);
            // Acquire: pairs with the Release in `take`, so that the previous value has been read.
            let free = place.number.load(Ordering::Acquire) == number;
            assert!(free, "a completion queue has a place for every request of its owner");
            // SAFETY: the place is free for this number, which only this thread drew.
            unsafe { place.value.with_mut(|it| *it = MaybeUninit::new(value)) };
            // Release: pairs with the Acquire in `take`.
            place.number.store(number.wrapping_add(1), Ordering::Release);
        }
    }

    /// The eventcount on which the owner sleeps.
    #[inline]
    pub fn event_count(&self) -> &EventCount {
        &self.event_count
    }
}

impl<T> Receiver<T> {
    /// The posting side.
    #[inline]
    pub fn completion_queue(&self) -> &Arc<CompletionQueue<T>> {
        &self.completion_queue
    }

    /// Whether a value has arrived.
    #[inline]
    pub fn is_any(&self) -> bool {
        let place = self.completion_queue.place(self.next);
        // Acquire: pairs with the Release in `post`.
        place.number.load(Ordering::Acquire) == self.next.wrapping_add(1)
    }

    /// Takes the next value.
    #[inline]
    pub fn take(&mut self) -> Option<T> {
        if !self.is_any() {
            return None;
        }
        let place = self.completion_queue.place(self.next);
        // SAFETY: the number says that the value is there. It is read once: the number advances
        // below, and there is one owner.
        let value = unsafe { place.value.with_mut(|it| it.assume_init_read()) };
        let turn = self.completion_queue.places.len() as u32;
        // Release: pairs with the Acquire in `post`.
        place.number.store(self.next.wrapping_add(turn), Ordering::Release);
        self.next = self.next.wrapping_add(1);
        Some(value)
    }
}

/// Drops the values that were not taken.
impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        while self.take().is_some() {}
    }
}

impl<T> fmt::Debug for CompletionQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("event_count", &self.event_count)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn values_arrive_in_order_and_entries_are_reused() {
        let mut owner = CompletionQueue::open(3);
        for round in 0..10_u32 {
            owner.completion_queue().post([round, round + 100].into_iter());
            owner.completion_queue().post([round + 200].into_iter());
            let taken: Vec<u32> = std::iter::from_fn(|| owner.take()).collect();
            assert_eq!(taken, [round, round + 100, round + 200]);
            assert!(!owner.is_any());
        }
    }

    #[test]
    #[should_panic(expected = "a place for every request")]
    fn post_to_full_queue_panics() {
        let owner = CompletionQueue::open(2);
        owner.completion_queue().post([1, 2, 3].into_iter());
    }

    #[test]
    fn unreceived_values_are_dropped() {
        let value = Arc::new(());
        let owner = CompletionQueue::open(2);
        owner.completion_queue().post([Arc::clone(&value), Arc::clone(&value)].into_iter());
        drop(owner);
        assert_eq!(Arc::strong_count(&value), 1);
    }

    #[test]
    fn four_posting_threads_lose_no_value() {
        let mut owner = CompletionQueue::open(1 << 16);
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let completion_queue = Arc::clone(owner.completion_queue());
                scope.spawn(move || {
                    for value in 0..10_000 {
                        completion_queue.post([thread << 16 | value].into_iter());
                        completion_queue.event_count().notify();
                    }
                });
            }
            let mut next = [0; 4];
            while next != [10_000; 4] {
                let Some(value) = owner.take() else {
                    let at_most = std::time::Duration::from_secs(60);
                    owner.completion_queue().event_count().sleep(at_most, || owner.is_any());
                    continue;
                };
                let from = &mut next[(value >> 16) as usize];
                assert_eq!(value & 0xffff, *from, "a thread's values stay in order");
                *from += 1;
            }
        });
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use std::time::Duration;

    /// Two threads post to an owner that sleeps; places are used again.
    #[test]
    fn values_arrive_once_and_wake_receiver() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let mut owner = CompletionQueue::open(2);
            let post = |completion_queue: &Arc<CompletionQueue<u32>>, from: u32| {
                let completion_queue = Arc::clone(completion_queue);
                loom::thread::spawn(move || {
                    completion_queue.post([from].into_iter());
                    completion_queue.event_count().notify();
                })
            };
            owner.completion_queue().post([1].into_iter());
            assert_eq!(owner.take(), Some(1));
            let threads = [2, 4].map(|from| post(owner.completion_queue(), from));
            let mut sum = 0;
            while sum != 6 {
                match owner.take() {
                    Some(value) => sum += value,
                    None => {
                        let event_count = owner.completion_queue().event_count();
                        event_count.sleep(Duration::from_secs(60), || owner.is_any());
                    }
                }
            }
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(!owner.is_any());
        });
    }
}

//! Room: the completion queue (MPSC queue).
//!
//! Protects   completions that other threads produce for a channel, on their way to it.
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
use crate::bell::Bell;
use crate::cell::RoomCell;
use crate::pad::Padded;

/// The posting side, for any number of threads.
pub struct Mailbox<T> {
    places: Box<[Place<T>]>,
    /// The number of the next value.
    next: Padded<AtomicU32>,
    bell: Bell,
}

struct Place<T> {
    number: AtomicU32,
    letter: RoomCell<MaybeUninit<T>>,
}

// SAFETY: the thread that drew its number writes a value, and the one owner reads it afterwards;
// the number of its place orders the two.
unsafe impl<T: Send> Sync for Mailbox<T> {}

/// The receiving side, for the owner.
#[derive(Debug)]
pub struct Owner<T> {
    mailbox: Arc<Mailbox<T>>,
    /// The number of the next value to take.
    next: u32,
}

impl<T> Mailbox<T> {
    /// An empty queue for `letters` values at once; returns its receiving side.
    pub fn open(letters: usize) -> Owner<T> {
        let count = letters.max(1).next_power_of_two();
        let place = |number| Place {
            number: AtomicU32::new(number as u32),
            letter: RoomCell::new(MaybeUninit::uninit()),
        };
        let mailbox = Mailbox {
            places: (0..count).map(place).collect(),
            next: Padded(AtomicU32::new(0)),
            bell: Bell::new(),
        };
        Owner { mailbox: Arc::new(mailbox), next: 0 }
    }

    #[inline]
    fn place(&self, number: u32) -> &Place<T> {
        &self.places[number as usize & (self.places.len() - 1)]
    }

    /// Posts values. Does not wake the owner: [`Mailbox::bell`] does that.
    ///
    /// # Panics
    /// If there are more values than places: the bound is enforced where requests are accepted.
    #[inline]
    pub fn post(&self, letters: impl ExactSizeIterator<Item = T>) {
        let first = self.next.fetch_add(letters.len() as u32, Ordering::Relaxed);
        for (index, letter) in letters.enumerate() {
            let number = first.wrapping_add(index as u32);
            let place = self.place(number);
            // Acquire: pairs with the Release in `take`, so that the previous value has been read.
            let free = place.number.load(Ordering::Acquire) == number;
            assert!(free, "a mailbox has a place for every request of its owner");
            // SAFETY: the place is free for this number, which only this thread drew.
            unsafe { place.letter.with_mut(|it| *it = MaybeUninit::new(letter)) };
            // Release: pairs with the Acquire in `take`.
            place.number.store(number.wrapping_add(1), Ordering::Release);
        }
    }

    /// The eventcount on which the owner sleeps.
    #[inline]
    pub fn bell(&self) -> &Bell {
        &self.bell
    }
}

impl<T> Owner<T> {
    /// The posting side.
    #[inline]
    pub fn mailbox(&self) -> &Arc<Mailbox<T>> {
        &self.mailbox
    }

    /// Whether a value has arrived.
    #[inline]
    pub fn is_any(&self) -> bool {
        let place = self.mailbox.place(self.next);
        // Acquire: pairs with the Release in `post`.
        place.number.load(Ordering::Acquire) == self.next.wrapping_add(1)
    }

    /// Takes the next value.
    #[inline]
    pub fn take(&mut self) -> Option<T> {
        if !self.is_any() {
            return None;
        }
        let place = self.mailbox.place(self.next);
        // SAFETY: the number says that the value is there. It is read once: the number advances
        // below, and there is one owner.
        let letter = unsafe { place.letter.with_mut(|it| it.assume_init_read()) };
        let turn = self.mailbox.places.len() as u32;
        // Release: pairs with the Acquire in `post`.
        place.number.store(self.next.wrapping_add(turn), Ordering::Release);
        self.next = self.next.wrapping_add(1);
        Some(letter)
    }
}

/// Drops the values that were not taken.
impl<T> Drop for Owner<T> {
    fn drop(&mut self) {
        while self.take().is_some() {}
    }
}

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("bell", &self.bell).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn letters_come_in_the_order_of_their_numbers_and_places_are_used_again() {
        let mut owner = Mailbox::open(3);
        for round in 0..10_u32 {
            owner.mailbox().post([round, round + 100].into_iter());
            owner.mailbox().post([round + 200].into_iter());
            let taken: Vec<u32> = std::iter::from_fn(|| owner.take()).collect();
            assert_eq!(taken, [round, round + 100, round + 200]);
            assert!(!owner.is_any());
        }
    }

    #[test]
    #[should_panic(expected = "a place for every request")]
    fn a_full_mailbox_is_a_mistake() {
        let owner = Mailbox::open(2);
        owner.mailbox().post([1, 2, 3].into_iter());
    }

    #[test]
    fn letters_that_nobody_takes_are_dropped() {
        let letter = Arc::new(());
        let owner = Mailbox::open(2);
        owner.mailbox().post([Arc::clone(&letter), Arc::clone(&letter)].into_iter());
        drop(owner);
        assert_eq!(Arc::strong_count(&letter), 1);
    }

    #[test]
    fn four_threads_post_and_none_is_lost() {
        let mut owner = Mailbox::open(1 << 16);
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let mailbox = Arc::clone(owner.mailbox());
                scope.spawn(move || {
                    for letter in 0..10_000 {
                        mailbox.post([thread << 16 | letter].into_iter());
                        mailbox.bell().ring();
                    }
                });
            }
            let mut next = [0; 4];
            while next != [10_000; 4] {
                let Some(letter) = owner.take() else {
                    let at_most = std::time::Duration::from_secs(60);
                    owner.mailbox().bell().sleep(at_most, || owner.is_any());
                    continue;
                };
                let from = &mut next[(letter >> 16) as usize];
                assert_eq!(letter & 0xffff, *from, "a thread's letters stay in order");
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
    fn letters_arrive_once_and_wake_the_owner() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let mut owner = Mailbox::open(2);
            let post = |mailbox: &Arc<Mailbox<u32>>, from: u32| {
                let mailbox = Arc::clone(mailbox);
                loom::thread::spawn(move || {
                    mailbox.post([from].into_iter());
                    mailbox.bell().ring();
                })
            };
            owner.mailbox().post([1].into_iter());
            assert_eq!(owner.take(), Some(1));
            let threads = [2, 4].map(|from| post(owner.mailbox(), from));
            let mut sum = 0;
            while sum != 6 {
                match owner.take() {
                    Some(letter) => sum += letter,
                    None => {
                        let bell = owner.mailbox().bell();
                        bell.sleep(Duration::from_secs(60), || owner.is_any());
                    }
                }
            }
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(!owner.is_any());
        });
    }
}

//! Primitive: the trace ring (SPSC ring that drops).
//!
//! Protects   the trace events that a queue has recorded and the trace's writer has not taken yet.
//! Why        a queue that records must neither wait for the writer nor contend with other queues:
//!            each has a ring of its own, and values that do not fit are counted instead.
//! States     a ring holds the values between its head and its tail.
//! Order      no lock. The tail is written after the values and read before them; that the writer
//!            was dropped is written after its last tail and read before it.
//! Common     a load of the head and one release store publish a batch.
//! Cost       a copy of each value, a load and a store of words that the reader shares; the time
//!            has not been measured.
//! Before     a lock around a file, taken for each batch.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::atomics::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::pad::Padded;
use crate::sync_cell::SyncCell;

struct TraceRing<T> {
    /// The number of the next value to take; the reader writes it.
    head: Padded<AtomicU32>,
    /// The number of the next value to come; the writer writes it.
    tail: Padded<AtomicU32>,
    /// How many values did not fit; the writer writes it.
    lost: AtomicU64,
    /// Whether the writer was dropped.
    is_closed: AtomicBool,
    places: Box<[SyncCell<MaybeUninit<T>>]>,
}

// SAFETY: the one writer writes a place and the one reader reads it, never at the same time: head
// and tail order the two.
unsafe impl<T: Send> Sync for TraceRing<T> {}

impl<T> TraceRing<T> {
    #[inline]
    fn place(&self, number: u32) -> &SyncCell<MaybeUninit<T>> {
        &self.places[number as usize & (self.places.len() - 1)]
    }
}

/// Makes a ring for at least `values` values of plain data.
pub fn trace_ring<T: Copy + Send>(values: usize) -> (RingWriter<T>, RingReader<T>) {
    let count = values.max(1).next_power_of_two();
    let ring = Arc::new(TraceRing {
        head: Padded(AtomicU32::new(0)),
        tail: Padded(AtomicU32::new(0)),
        lost: AtomicU64::new(0),
        is_closed: AtomicBool::new(false),
        places: (0..count).map(|_| SyncCell::new(MaybeUninit::uninit())).collect(),
    });
    (RingWriter(Arc::clone(&ring)), RingReader(ring))
}

/// The end of a ring that one queue has.
pub struct RingWriter<T>(Arc<TraceRing<T>>);

impl<T: Copy + Send> RingWriter<T> {
    /// Publishes values, from the first on, while there is space, and counts the others as lost.
    /// Returns whether the ring is more than half full, so that its reader has to come soon.
    #[inline]
    pub fn publish(&mut self, values: &[T]) -> bool {
        let ring = &*self.0;
        // Acquire: pairs with the Release in `drain`, so that the old values have been read.
        let head = ring.head.load(Ordering::Acquire);
        // Relaxed: this thread wrote it.
        let tail = ring.tail.load(Ordering::Relaxed);
        let used = tail.wrapping_sub(head) as usize;
        let count = values.len().min(ring.places.len() - used);
        for (index, value) in values[..count].iter().enumerate() {
            let place = ring.place(tail.wrapping_add(index as u32));
            // SAFETY: the place lies after the tail, where the reader does not read, and is free.
            unsafe { place.with_mut(|it| *it = MaybeUninit::new(*value)) };
        }
        // Release: pairs with the Acquire in `drain`.
        ring.tail.store(tail.wrapping_add(count as u32), Ordering::Release);
        if count < values.len() {
            // Relaxed: this thread alone writes it, and it publishes nothing but itself.
            let lost = ring.lost.load(Ordering::Relaxed) + (values.len() - count) as u64;
            ring.lost.store(lost, Ordering::Relaxed);
        }
        used + count > ring.places.len() / 2
    }
}

impl<T> Drop for RingWriter<T> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `is_closed`, so that the reader finds the last tail
        // and the last count of lost values.
        self.0.is_closed.store(true, Ordering::Release);
    }
}

/// The end of a ring that the trace's writer has.
pub struct RingReader<T>(Arc<TraceRing<T>>);

impl<T: Copy + Send> RingReader<T> {
    /// Moves all values to `out`.
    pub fn drain(&mut self, out: &mut Vec<T>) {
        let ring = &*self.0;
        // Relaxed: this thread wrote it.
        let head = ring.head.load(Ordering::Relaxed);
        // Acquire: pairs with the Release in `publish`.
        let tail = ring.tail.load(Ordering::Acquire);
        for number in 0..tail.wrapping_sub(head) {
            let place = ring.place(head.wrapping_add(number));
            // SAFETY: the place lies between head and tail, so it was written and does not change.
            out.push(unsafe { place.with_mut(|it| it.assume_init_read()) });
        }
        // Release: pairs with the Acquire in `publish`.
        ring.head.store(tail, Ordering::Release);
    }

    /// How many values were lost since the ring was made.
    pub fn lost(&self) -> u64 {
        self.0.lost.load(Ordering::Relaxed)
    }

    /// Whether the writer's end was dropped, so that a drain after this call is the last one.
    pub fn is_closed(&self) -> bool {
        // Acquire: pairs with the Release in `RingWriter::drop`.
        self.0.is_closed.load(Ordering::Acquire)
    }
}

impl<T> fmt::Debug for RingWriter<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RingWriter").finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for RingReader<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RingReader").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn values_that_do_not_fit_are_counted() {
        let (mut writer, mut reader) = trace_ring(4);
        let mut out = Vec::new();
        for round in 0..5 {
            assert!(!writer.publish(&[round]));
            assert!(writer.publish(&[1, 2, 3, 4, 5]));
            reader.drain(&mut out);
            assert_eq!(out, [round, 1, 2, 3]);
            assert_eq!(reader.lost(), 2 * (round + 1));
            out.clear();
        }
        assert!(!reader.is_closed());
        writer.publish(&[9]);
        drop(writer);
        assert!(reader.is_closed());
        reader.drain(&mut out);
        assert_eq!(out, [9]);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;

    /// The drain after a ring is found closed takes the last values, and all lost ones are counted.
    #[test]
    fn drain_of_a_closed_ring_is_the_last_one() {
        loom::model(|| {
            let (mut writer, mut reader) = trace_ring(2);
            let thread = loom::thread::spawn(move || {
                writer.publish(&[1]);
                writer.publish(&[2, 3]);
            });
            let mut out = Vec::new();
            if reader.is_closed() {
                reader.drain(&mut out);
                assert_eq!((out.as_slice(), reader.lost()), (&[1, 2][..], 1));
            }
            thread.join().unwrap();
            assert!(reader.is_closed());
        });
    }

    /// The reader finds the values in order, each once, and the lost ones are counted.
    #[test]
    fn each_value_is_taken_once_or_counted() {
        loom::model(|| {
            let (mut writer, mut reader) = trace_ring(2);
            let thread = loom::thread::spawn(move || {
                writer.publish(&[1, 2]);
                writer.publish(&[3]);
            });
            let mut out = Vec::new();
            reader.drain(&mut out);
            reader.drain(&mut out);
            thread.join().unwrap();
            reader.drain(&mut out);
            match reader.lost() {
                0 => assert_eq!(out, [1, 2, 3]),
                lost => assert_eq!((out.as_slice(), lost), (&[1, 2][..], 1)),
            }
        });
    }
}

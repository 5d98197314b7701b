//! Primitive: the RCU cell, a value that is read all the time and rarely replaced.
//!
//! Protects   settings that the control plane changes while I/O runs (rules of the fault injector,
//!            the trace recorder).
//! Why        a queue reads them once a batch and must not contend with other queues.
//! States     a generation number next to the value: a reader's copy with this number is current.
//! Order      rank 90, a leaf: no other lock is taken while the value is replaced or fetched.
//! Common     one load of a cache line that no thread writes; the reader's own copy is current.
//! Cost       a load and a compare per batch; after a change one lock and one clone per reader.
//! Before     a reader/writer lock taken for every request.

use std::sync::Arc;

use crate::atomics::{AtomicU64, Mutex, Ordering};

/// The shared value.
#[derive(Debug)]
pub struct RcuCell<T> {
    generation: AtomicU64,
    value: Mutex<Arc<T>>,
}

impl<T> RcuCell<T> {
    /// Creates the cell with a first value.
    pub fn new(value: T) -> RcuCell<T> {
        RcuCell { generation: AtomicU64::new(1), value: Mutex::new(Arc::new(value)) }
    }

    /// Replaces the value by the result of `change`.
    pub fn update(&self, change: impl FnOnce(&T) -> T) {
        let mut value = self.value.lock().expect("no holder panics: `change` is ours");
        *value = Arc::new(change(&value));
        // Release: pairs with the Acquire in `RcuReader::get`. A reader that sees the number takes
        // the lock afterwards, and fetches this value or a later one.
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// The number of the present value, for a reader that keeps only what it derives from that one.
    /// Such a reader gets the value after the number: that may be a newer one.
    #[inline]
    pub fn generation(&self) -> u64 {
        // Acquire: pairs with the Release in `update`.
        self.generation.load(Ordering::Acquire)
    }

    /// The present value.
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.value.lock().expect("no holder panics: `change` is ours"))
    }
}

/// One reader's copy of the value.
#[derive(Debug)]
pub struct RcuReader<T> {
    shared: Arc<RcuCell<T>>,
    /// The generation of the copy.
    generation: u64,
    /// The generation that [`RcuReader::unchanged`] accepts: that of the copy, or none.
    accepted: u64,
    copy: Arc<T>,
}

/// Below every generation.
const NO_GENERATION: u64 = 0;

impl<T> RcuReader<T> {
    /// A reader of `shared`.
    pub fn new(shared: &Arc<RcuCell<T>>) -> RcuReader<T> {
        // The first `get` fetches the value.
        let (generation, accepted) = (NO_GENERATION, NO_GENERATION);
        RcuReader { shared: Arc::clone(shared), generation, accepted, copy: shared.get() }
    }

    /// The current value.
    #[inline]
    pub fn get(&mut self) -> &Arc<T> {
        // Acquire: pairs with the Release in `update`.
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.fetch(generation);
        }
        &self.copy
    }

    /// The value, if the copy is current. Otherwise fetches it for the next call and returns
    /// `None`; always `None` after [`RcuReader::hold`].
    #[inline]
    pub fn unchanged(&mut self) -> Option<&T> {
        // Acquire: pairs with the Release in `update`.
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation != self.accepted {
            self.refresh(generation);
            return None;
        }
        Some(&self.copy)
    }

    /// Makes [`RcuReader::unchanged`] return `None` until the value is fetched again, for a reader
    /// that has to look at this value each time: the check that finds a change finds that too, and
    /// costs nothing more.
    pub fn hold(&mut self) {
        self.accepted = NO_GENERATION;
    }

    /// Undoes [`RcuReader::hold`]: the copy is accepted again while it is current.
    pub fn release(&mut self) {
        self.accepted = self.generation;
    }

    #[cold]
    #[inline(never)]
    fn refresh(&mut self, generation: u64) {
        if generation != self.generation {
            self.fetch(generation);
        }
    }

    #[cold]
    fn fetch(&mut self, generation: u64) {
        // The value may be newer than the number read before it. The next `get` then fetches the
        // same value again, which is harmless.
        self.copy = self.shared.get();
        (self.generation, self.accepted) = (generation, generation);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn reader_sees_each_update() {
        let shared = Arc::new(RcuCell::new(1));
        let mut reader = RcuReader::new(&shared);
        // Regression: a reader that never called `get` saw a change forever, and never executed a
        // bio inline.
        assert_eq!(reader.unchanged(), None);
        assert_eq!(reader.unchanged(), Some(&1));
        assert_eq!(**reader.get(), 1);
        shared.update(|value| value + 1);
        assert_eq!(**reader.get(), 2);
        assert_eq!(reader.unchanged(), Some(&2));
        assert_eq!((shared.generation(), *shared.get()), (2, 2));
        reader.hold();
        assert_eq!(reader.unchanged(), None);
        assert_eq!(reader.unchanged(), None);
        assert_eq!(**reader.get(), 2);
        assert_eq!(reader.unchanged(), None);
        shared.update(|value| value + 1);
        assert_eq!(reader.unchanged(), None);
        assert_eq!(reader.unchanged(), Some(&3));
        reader.hold();
        assert_eq!(reader.unchanged(), None);
        reader.release();
        assert_eq!(reader.unchanged(), Some(&3));
        reader.hold();
        shared.update(|value| value + 1);
        reader.release();
        assert_eq!(reader.unchanged(), None, "the copy is old");
        assert_eq!(reader.unchanged(), Some(&4));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;

    /// A reader never sees an older value again, and sees a change that happened before it looked.
    #[test]
    fn reader_never_sees_older_value() {
        loom::model(|| {
            let shared = Arc::new(RcuCell::new(0));
            let writer = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    shared.update(|value| value + 1);
                    shared.update(|value| value + 1);
                })
            };
            let mut reader = RcuReader::new(&shared);
            let first = **reader.get();
            let second = **reader.get();
            assert!(first <= second);
            writer.join().unwrap();
            assert_eq!(**reader.get(), 2);
        });
    }
}

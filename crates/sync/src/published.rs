//! Room: a value that is replaced now and then and read all the time.
//!
//! Protects   settings that the control plane changes while I/O runs (rules of the error injector).
//! Why        a queue looks at them once a batch and must not meet other queues there.
//! States     a generation number beside the value: a reader whose copy has it is up to date.
//! Order      rank 90, a leaf: nothing else is taken while the value is replaced or fetched.
//! Common     one load of a line that nobody writes; the reader's own copy is current.
//! Cost       a load and a compare per batch; after a change one lock and one clone per reader.
//! Before     a reader/writer lock taken for every request.

use std::sync::Arc;

use crate::atomics::{AtomicU64, Mutex, Ordering};

/// The shared side.
#[derive(Debug)]
pub struct Published<T> {
    generation: AtomicU64,
    value: Mutex<Arc<T>>,
}

impl<T> Published<T> {
    /// Publishes a first value.
    pub fn new(value: T) -> Published<T> {
        Published { generation: AtomicU64::new(1), value: Mutex::new(Arc::new(value)) }
    }

    /// Replaces the value by what `change` makes of it.
    pub fn update(&self, change: impl FnOnce(&T) -> T) {
        let mut value = self.value.lock().expect("no holder panics: `change` is ours");
        *value = Arc::new(change(&value));
        // Release: pairs with the Acquire in `Reader::get`; who sees the number sees that the lock
        // has been taken for it, and fetches this value or a later one.
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// The value now.
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.value.lock().expect("no holder panics: `change` is ours"))
    }
}

/// One reader's copy.
#[derive(Debug)]
pub struct Reader<T> {
    shared: Arc<Published<T>>,
    generation: u64,
    copy: Arc<T>,
}

impl<T> Reader<T> {
    /// A reader of what `shared` publishes.
    pub fn new(shared: &Arc<Published<T>>) -> Reader<T> {
        // A number below every generation: the first `get` fetches.
        Reader { shared: Arc::clone(shared), generation: 0, copy: shared.get() }
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

    /// The value, if the last look found the current one. Otherwise the next look will.
    #[inline]
    pub fn unchanged(&mut self) -> Option<&T> {
        // Acquire: pairs with the Release in `update`.
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.fetch(generation);
            return None;
        }
        Some(&self.copy)
    }

    #[cold]
    fn fetch(&mut self, generation: u64) {
        // The value may be newer than the number read before it; the next `get` then fetches the
        // same value again, which is harmless.
        self.copy = self.shared.get();
        self.generation = generation;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_reader_sees_each_change() {
        let shared = Arc::new(Published::new(1));
        let mut reader = Reader::new(&shared);
        // Who never called `get` was told of a change for ever, and never carried anything.
        assert_eq!(reader.unchanged(), None);
        assert_eq!(reader.unchanged(), Some(&1));
        assert_eq!(**reader.get(), 1);
        shared.update(|value| value + 1);
        assert_eq!(**reader.get(), 2);
        assert_eq!(reader.unchanged(), Some(&2));
        assert_eq!(*shared.get(), 2);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;

    /// A reader never goes back in time, and sees a change that happened before it looked.
    #[test]
    fn readers_move_forward_only() {
        loom::model(|| {
            let shared = Arc::new(Published::new(0));
            let writer = {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    shared.update(|value| value + 1);
                    shared.update(|value| value + 1);
                })
            };
            let mut reader = Reader::new(&shared);
            let first = **reader.get();
            let second = **reader.get();
            assert!(first <= second);
            writer.join().unwrap();
            assert_eq!(**reader.get(), 2);
        });
    }
}

//! Room: a quota, which bounds how often an event may happen.
//!
//! Protects   how many more requests a fault rule may fail.
//! Why        queues on several threads share the bound of one rule.
//! States     the number of uses; spent when it has reached the bound.
//! Order      no lock.
//! Common     not reached: faults are rare.
//! Cost       one load while spent or not due; one exchange per use.
//! Before     a lock around a count.

use crate::atomics::{AtomicU64, Ordering};

/// A bounded number of uses.
#[derive(Debug)]
pub struct Ration {
    used: AtomicU64,
    bound: u64,
}

impl Ration {
    /// A quota of `bound` uses.
    pub fn new(bound: u64) -> Ration {
        Ration { used: AtomicU64::new(0), bound }
    }

    /// Takes one use; `false` if none is left.
    pub fn take(&self) -> bool {
        self.take_numbered().is_some()
    }

    /// Takes one use and returns its number, from 0; `None` if none is left.
    pub fn take_numbered(&self) -> Option<u64> {
        // Relaxed throughout: the count publishes nothing but itself.
        let mut used = self.used.load(Ordering::Relaxed);
        while used < self.bound {
            match self.used.compare_exchange_weak(
                used,
                used + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(used),
                Err(now) => used = now,
            }
        }
        None
    }

    /// Whether no use is left.
    pub fn is_spent(&self) -> bool {
        self.used() >= self.bound
    }

    /// Number of uses taken.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_bound() {
        let ration = Ration::new(2);
        assert!(ration.take() && !ration.is_spent() && ration.take());
        assert!(!ration.take() && ration.is_spent());
        assert_eq!(ration.used(), 2);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;

    /// Three threads share two uses: exactly two threads get one.
    #[test]
    fn shared_ration_is_never_overdrawn() {
        loom::model(|| {
            let ration = Arc::new(Ration::new(2));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let ration = Arc::clone(&ration);
                    loom::thread::spawn(move || u32::from(ration.take()))
                })
                .collect();
            let mine = u32::from(ration.take());
            let sum: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert_eq!(mine + sum, 2);
        });
    }
}

//! Room: a bounded number of times that something may happen.
//!
//! Protects   how often a fault may still strike.
//! Why        queues on several threads share the bound of one rule.
//! States     the number of times used; spent when it has reached the bound.
//! Order      no lock.
//! Common     not reached: faults are rare.
//! Cost       one load while spent or never due; one exchange per strike.
//! Before     a lock around a count.

use crate::atomics::{AtomicU64, Ordering};

/// So many times, and no more.
#[derive(Debug)]
pub struct Ration {
    used: AtomicU64,
    bound: u64,
}

impl Ration {
    /// `bound` times.
    pub fn new(bound: u64) -> Ration {
        Ration { used: AtomicU64::new(0), bound }
    }

    /// Uses one; `false` if none was left.
    pub fn take(&self) -> bool {
        self.take_numbered().is_some()
    }

    /// Uses one and says which one it is, from 0; `None` if none was left.
    pub fn take_numbered(&self) -> Option<u64> {
        // Relaxed throughout: the count guards nothing but itself.
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

    /// Whether none is left.
    pub fn is_spent(&self) -> bool {
        self.used() >= self.bound
    }

    /// How many were used.
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

    /// Three threads share two: exactly two get one.
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

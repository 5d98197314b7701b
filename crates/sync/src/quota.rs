//! Primitive: a quota, which bounds how often an event may happen.
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
pub struct Quota {
    used: AtomicU64,
    bound: u64,
}

impl Quota {
    /// A quota of `bound` uses.
    pub fn new(bound: u64) -> Quota {
        Quota { used: AtomicU64::new(0), bound }
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
    fn quota_ends_at_bound() {
        let quota = Quota::new(2);
        assert!(quota.take() && !quota.is_spent() && quota.take());
        assert!(!quota.take() && quota.is_spent());
        assert_eq!(quota.used(), 2);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;

    /// Three threads share two uses: exactly two threads get one.
    #[test]
    fn shared_quota_is_never_exceeded() {
        loom::model(|| {
            let quota = Arc::new(Quota::new(2));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let quota = Arc::clone(&quota);
                    loom::thread::spawn(move || u32::from(quota.take()))
                })
                .collect();
            let mine = u32::from(quota.take());
            let sum: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert_eq!(mine + sum, 2);
        });
    }
}

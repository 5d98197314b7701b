//! Primitive: the tag semaphore of a hardware queue that several channels share.
//!
//! Protects   how many more requests the queue may execute.
//! Why        if `submit_queues` is below the number of channels, `hw_queue_depth` bounds all
//!            channels of a queue together. Each channel has its own tags; this is the count above
//!            them.
//! States     `free` from 0 to the depth; `users` is the number of channels of the queue, each of
//!            which may have its share of the depth, so that none starves.
//! Order      no lock.
//! Common     one exchange to take tags for a batch, one addition to return those that completed.
//! Cost       two read-modify-writes a batch; none if each channel has its own queue.
//! Before     a shared bitmap of tags: two read-modify-writes a request.

use crate::atomics::{AtomicU32, Ordering};
use crate::pad::Padded;

/// A count of free tags.
#[derive(Debug)]
pub struct TagSemaphore {
    free: Padded<AtomicU32>,
    /// Changes when a channel opens or closes, so it has its own cache line.
    users: Padded<AtomicU32>,
    depth: u32,
}

impl TagSemaphore {
    /// A semaphore with `depth` free tags.
    pub fn new(depth: u32) -> TagSemaphore {
        let (free, users) = (Padded(AtomicU32::new(depth)), Padded(AtomicU32::new(0)));
        TagSemaphore { free, users, depth }
    }

    /// Adds a channel.
    pub fn join(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a channel that has joined before.
    pub fn leave(&self) {
        self.users.fetch_sub(1, Ordering::Relaxed);
    }

    /// Maximum number of tags for one channel: its share of the depth, at least one (the rule of
    /// blk-mq's shared tags).
    #[inline]
    pub fn share(&self) -> u32 {
        // Relaxed: the number publishes nothing; a thread that reads an old one uses the new share
        // later.
        (self.depth / self.users.load(Ordering::Relaxed).max(1)).max(1)
    }

    /// Takes up to `wanted` tags; returns how many it got.
    #[inline]
    pub fn take(&self, wanted: u32) -> u32 {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            let taken = wanted.min(free);
            if taken == 0 {
                return 0;
            }
            // Acquire: pairs with the Release in `give`, so that a request that gets a tag sees the
            // effects of the previous one.
            let taking = self.free.compare_exchange_weak(
                free,
                free - taken,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            match taking {
                Ok(_) => return taken,
                Err(now) => free = now,
            }
        }
    }

    /// Returns tags.
    #[inline]
    pub fn give(&self, tags: u32) {
        if tags > 0 {
            // Release: pairs with the Acquire in `take`.
            self.free.fetch_add(tags, Ordering::Release);
        }
    }

    /// Number of channels now, or a moment ago.
    pub fn users(&self) -> u32 {
        self.users.load(Ordering::Relaxed)
    }

    /// Number of free tags now, or a moment ago.
    #[inline]
    pub fn free(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn take_returns_available_tags() {
        let budget = TagSemaphore::new(5);
        assert_eq!((budget.take(3), budget.take(3), budget.take(3)), (3, 2, 0));
        budget.give(4);
        assert_eq!((budget.take(1), budget.free()), (1, 3));
    }

    #[test]
    fn each_channel_gets_its_share() {
        let budget = TagSemaphore::new(5);
        let shares = [0; 7].map(|_| {
            budget.join();
            budget.share()
        });
        assert_eq!(shares, [5, 2, 1, 1, 1, 1, 1]);
        (0..5).for_each(|_| budget.leave());
        assert_eq!(budget.share(), 2);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn tags_never_exceed_depth_and_none_is_lost() {
        loom::model(|| {
            let budget = Arc::new(TagSemaphore::new(3));
            let out = Arc::new(AtomicU32::new(0));
            let work = |budget: &TagSemaphore, out: &AtomicU32| {
                let taken = budget.take(2);
                assert!(out.fetch_add(taken, Ordering::Relaxed) + taken <= 3);
                out.fetch_sub(taken, Ordering::Relaxed);
                budget.give(taken);
            };
            let (other, other_out) = (Arc::clone(&budget), Arc::clone(&out));
            let thread = loom::thread::spawn(move || work(&other, &other_out));
            work(&budget, &out);
            thread.join().unwrap();
            assert_eq!(budget.free(), 3);
        });
    }
}

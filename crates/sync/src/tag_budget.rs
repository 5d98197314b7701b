//! Room: the tags of a hardware queue that several channels share.
//!
//! Protects   how many more requests the queue may work on.
//! Why        with `submit_queues` fewer than channels, `hw_queue_depth` bounds all of a queue's
//!            channels together. A channel's own tags are its own; this is the count above them.
//! States     `free` from 0 to the depth; `users` are the channels of the queue, each of which may
//!            have its share of the depth, so that none is starved.
//! Order      no lock.
//! Common     one exchange to take for a batch, one addition to give back what completed.
//! Cost       two read-modify-writes a batch; none where each channel has a queue of its own.
//! Before     a shared bitmap of tags: two read-modify-writes a request.

use crate::atomics::{AtomicU32, Ordering};
use crate::pad::Padded;

/// A count of free tags.
#[derive(Debug)]
pub struct TagBudget {
    free: Padded<AtomicU32>,
    /// Changes when a channel comes or goes, so on a line of its own.
    users: Padded<AtomicU32>,
    depth: u32,
}

impl TagBudget {
    /// A budget of `depth` free tags.
    pub fn new(depth: u32) -> TagBudget {
        let (free, users) = (Padded(AtomicU32::new(depth)), Padded(AtomicU32::new(0)));
        TagBudget { free, users, depth }
    }

    /// Counts a channel in.
    pub fn join(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a channel out, which has joined before.
    pub fn leave(&self) {
        self.users.fetch_sub(1, Ordering::Relaxed);
    }

    /// How many tags one channel may have: its part of the depth, and one at least (the rule of
    /// blk-mq's shared tags).
    #[inline]
    pub fn share(&self) -> u32 {
        // Relaxed: nothing is published with the number; who sees an old one shares a bit later.
        (self.depth / self.users.load(Ordering::Relaxed).max(1)).max(1)
    }

    /// Takes up to `wanted` tags and says how many it got.
    #[inline]
    pub fn take(&self, wanted: u32) -> u32 {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            let taken = wanted.min(free);
            if taken == 0 {
                return 0;
            }
            // Acquire: pairs with the Release in `give`, so that what a request left behind is
            // seen by the one that gets its tag.
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

    /// Gives tags back.
    #[inline]
    pub fn give(&self, tags: u32) {
        if tags > 0 {
            // Release: pairs with the Acquire in `take`.
            self.free.fetch_add(tags, Ordering::Release);
        }
    }

    /// How many channels there are now, or were a moment ago.
    pub fn users(&self) -> u32 {
        self.users.load(Ordering::Relaxed)
    }

    /// How many are free now, or were a moment ago.
    #[inline]
    pub fn free(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn gives_what_there_is() {
        let budget = TagBudget::new(5);
        assert_eq!((budget.take(3), budget.take(3), budget.take(3)), (3, 2, 0));
        budget.give(4);
        assert_eq!((budget.take(1), budget.free()), (1, 3));
    }

    #[test]
    fn each_channel_has_its_share() {
        let budget = TagBudget::new(5);
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
    fn never_more_than_the_depth_are_out_and_none_is_lost() {
        loom::model(|| {
            let budget = Arc::new(TagBudget::new(3));
            let out = Arc::new(AtomicU32::new(0));
            let work = |budget: &TagBudget, out: &AtomicU32| {
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

//! Room: the poll leader.
//!
//! Protects   the time at which a thread has to poll a device queue that many channels share.
//! Why        of many threads that sleep until a completion is due, only one should wake up for it;
//!            and it may be any thread, because each may go away.
//! States     free; kept by one of the threads that sleep while a completion is due. The leader
//!            sleeps until a time that it has announced, which is not after the due time.
//! Order      no lock. A thread that changes the due time checks whether the leader sleeps too
//!            long. A thread that announces a sleep checks the due time once more. A full fence
//!            separates the two steps on either side.
//! Common     a store and a fence by the thread that has polled the device queue.
//! Cost       about 6 ns a poll; for a sleeping thread an exchange to become the leader and a store
//!            to leave.
//! Before     every sleeping thread wakes up for every completion.

use crate::atomics::{AtomicU32, AtomicU64, Ordering, fence};
use crate::pad::Padded;

/// There is no leader.
const FREE: u32 = 0;

/// A time that never comes.
pub const NEVER: u64 = u64::MAX;

/// Which thread to wake for a changed due time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// No thread.
    Nobody,
    /// The leader, which sleeps beyond the due time.
    Keeper(u32),
    /// Any sleeping thread: there is no leader.
    Anybody,
}

/// The leader among sleeping threads, and the due time.
#[derive(Debug)]
pub struct Watch {
    /// The number of the leader plus one, or `FREE`.
    keeper: Padded<AtomicU32>,
    /// Until when the leader sleeps; 0 while it is awake.
    until: AtomicU64,
    /// When a thread has to poll; `NEVER` if nothing is in flight.
    due: Padded<AtomicU64>,
}

impl Default for Watch {
    fn default() -> Watch {
        Watch::new()
    }
}

impl Watch {
    /// No leader and no due time.
    pub fn new() -> Watch {
        let (keeper, due) = (Padded(AtomicU32::new(FREE)), Padded(AtomicU64::new(NEVER)));
        Watch { keeper, until: AtomicU64::new(0), due }
    }

    /// When a thread has to poll.
    #[inline]
    pub fn due(&self) -> u64 {
        self.due.load(Ordering::Relaxed)
    }

    /// Sets when a thread has to poll next; returns which thread to wake for it.
    #[inline]
    pub fn set_due(&self, at: u64) -> Wake {
        let before = self.due.load(Ordering::Relaxed);
        if at == NEVER && before == NEVER {
            return Wake::Nobody;
        }
        self.due.store(at, Ordering::Relaxed);
        // Full: pairs with the fence of the eventcounts on which the other threads sleep.
        fence(Ordering::SeqCst);
        match self.keeper.load(Ordering::Relaxed).checked_sub(1) {
            None if at < NEVER => Wake::Anybody,
            Some(keeper) if self.until.load(Ordering::Relaxed) > at => Wake::Keeper(keeper),
            _ => Wake::Nobody,
        }
    }

    /// Becomes the leader if a completion is due and there is no leader; returns whether it did.
    pub fn keep(&self, who: u32) -> bool {
        // Acquire: pairs with the Release in `leave`.
        let (wanted, acquire) = (self.is_wanted(), Ordering::Acquire);
        let exchange = || self.keeper.compare_exchange(FREE, who + 1, acquire, Ordering::Relaxed);
        wanted && exchange().is_ok()
    }

    /// Announces until when the leader sleeps. The leader then executes a full fence and checks the
    /// due time once more before it sleeps.
    pub fn plan(&self, until: u64) {
        self.until.store(until, Ordering::Relaxed);
    }

    /// Ends the leadership. The caller then checks whether another thread has to become the leader.
    pub fn leave(&self) {
        self.until.store(0, Ordering::Relaxed);
        // Release: pairs with the Acquire in `keep`, so that the next announcement comes later.
        self.keeper.store(FREE, Ordering::Release);
        // Full: pairs with the fence in `set_due`. Either that call finds no leader, or the check
        // that follows finds the due time.
        fence(Ordering::SeqCst);
    }

    /// Whether a completion is due and there is no leader.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.due() < NEVER && self.keeper.load(Ordering::Relaxed) == FREE
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn one_keeps_it_and_is_told_of_what_is_due_before_its_plan() {
        let watch = Watch::new();
        assert!(!watch.keep(3) && !watch.is_wanted(), "nothing is due");
        assert_eq!((watch.due(), watch.set_due(NEVER)), (NEVER, Wake::Nobody));
        assert_eq!(watch.set_due(7), Wake::Anybody);
        assert!(watch.keep(3) && !watch.keep(4) && !watch.is_wanted());
        watch.plan(100);
        assert_eq!(watch.set_due(100), Wake::Nobody);
        assert_eq!(watch.set_due(99), Wake::Keeper(3));
        watch.leave();
        assert!(watch.is_wanted());
        assert_eq!(watch.set_due(1), Wake::Anybody);
        assert!(watch.keep(4));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::bell::Bell;
    use loom::sync::Arc;
    use std::time::Duration;

    /// A thread sets a due time; the leader, which wanted to sleep forever, polls.
    #[test]
    fn the_keeper_does_not_sleep_beyond_what_is_due() {
        loom::model(|| {
            let shared = Arc::new((Watch::new(), Bell::new()));
            shared.0.set_due(9);
            assert!(shared.0.keep(0));
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                if other.0.set_due(5) == Wake::Keeper(0) {
                    other.1.ring();
                }
            });
            let (watch, bell) = (&shared.0, &shared.1);
            while watch.due() != 5 {
                watch.plan(9);
                bell.sleep(Duration::from_secs(60), || watch.due() < 9);
            }
            watch.leave();
            thread.join().unwrap();
        });
    }

    /// A leader that leaves wakes a sleeping thread, or that thread sees that there is no leader.
    #[test]
    fn the_watch_is_handed_on() {
        loom::model(|| {
            let shared = Arc::new((Watch::new(), Bell::new()));
            let other = Arc::clone(&shared);
            shared.0.set_due(9);
            assert!(shared.0.keep(0));
            let thread = loom::thread::spawn(move || {
                while !other.0.keep(1) {
                    other.1.sleep(Duration::from_secs(60), || other.0.is_wanted());
                }
            });
            shared.0.leave();
            Bell::ring_one(std::iter::once(&shared.1));
            thread.join().unwrap();
            assert!(!shared.0.is_wanted());
        });
    }

    /// A due time is set while the leader leaves: one of the two threads sees that there is no
    /// leader.
    #[test]
    fn what_becomes_due_while_the_watch_is_left_is_seen() {
        loom::model(|| {
            let watch = Arc::new(Watch::new());
            watch.set_due(9);
            assert!(watch.keep(0));
            watch.set_due(NEVER);
            let other = Arc::clone(&watch);
            let thread = loom::thread::spawn(move || other.set_due(5) == Wake::Anybody);
            watch.leave();
            let seen_by_leaver = watch.is_wanted();
            assert!(thread.join().unwrap() || seen_by_leaver, "due and kept by nobody");
        });
    }

    /// A due time is set while there is no leader: a sleeping thread is woken to become the leader.
    #[test]
    fn who_sleeps_while_nothing_is_due_is_found() {
        loom::model(|| {
            let shared = Arc::new((Watch::new(), Bell::new()));
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                while !other.0.keep(1) {
                    other.1.sleep(Duration::from_secs(60), || other.0.is_wanted());
                }
            });
            if shared.0.set_due(9) == Wake::Anybody {
                Bell::ring_one(std::iter::once(&shared.1));
            }
            thread.join().unwrap();
        });
    }
}

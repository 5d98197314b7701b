//! Primitive: the poll leader.
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
    NoThread,
    /// The leader, which sleeps beyond the due time.
    Leader(u32),
    /// Any sleeping thread: there is no leader.
    AnySleeper,
}

/// The leader among sleeping threads, and the due time.
#[derive(Debug)]
pub struct PollLeader {
    /// The number of the leader plus one, or `FREE`.
    leader: Padded<AtomicU32>,
    /// Until when the leader sleeps; 0 while it is awake.
    until: AtomicU64,
    /// When a thread has to poll; `NEVER` if nothing is in flight.
    due: Padded<AtomicU64>,
}

impl Default for PollLeader {
    fn default() -> PollLeader {
        PollLeader::new()
    }
}

impl PollLeader {
    /// No leader and no due time.
    pub fn new() -> PollLeader {
        let (leader, due) = (Padded(AtomicU32::new(FREE)), Padded(AtomicU64::new(NEVER)));
        PollLeader { leader, until: AtomicU64::new(0), due }
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
            return Wake::NoThread;
        }
        self.due.store(at, Ordering::Relaxed);
        // Full: pairs with the fence of the eventcounts on which the other threads sleep.
        fence(Ordering::SeqCst);
        match self.leader.load(Ordering::Relaxed).checked_sub(1) {
            None if at < NEVER => Wake::AnySleeper,
            Some(leader) if self.until.load(Ordering::Relaxed) > at => Wake::Leader(leader),
            _ => Wake::NoThread,
        }
    }

    /// Becomes the leader if a completion is due and there is no leader; returns whether it did.
    pub fn try_lead(&self, who: u32) -> bool {
        // Acquire: pairs with the Release in `leave`.
        let (wanted, acquire) = (self.is_wanted(), Ordering::Acquire);
        let exchange = || self.leader.compare_exchange(FREE, who + 1, acquire, Ordering::Relaxed);
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
        self.leader.store(FREE, Ordering::Release);
        // Full: pairs with the fence in `set_due`. Either that call finds no leader, or the check
        // that follows finds the due time.
        fence(Ordering::SeqCst);
    }

    /// Whether a completion is due and there is no leader.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.due() < NEVER && self.leader.load(Ordering::Relaxed) == FREE
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn leader_is_woken_for_earlier_due_time() {
        let watch = PollLeader::new();
        assert!(!watch.try_lead(3) && !watch.is_wanted(), "nothing is due");
        assert_eq!((watch.due(), watch.set_due(NEVER)), (NEVER, Wake::NoThread));
        assert_eq!(watch.set_due(7), Wake::AnySleeper);
        assert!(watch.try_lead(3) && !watch.try_lead(4) && !watch.is_wanted());
        watch.plan(100);
        assert_eq!(watch.set_due(100), Wake::NoThread);
        assert_eq!(watch.set_due(99), Wake::Leader(3));
        watch.leave();
        assert!(watch.is_wanted());
        assert_eq!(watch.set_due(1), Wake::AnySleeper);
        assert!(watch.try_lead(4));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::event_count::EventCount;
    use loom::sync::Arc;
    use std::time::Duration;

    /// A thread sets a due time; the leader, which wanted to sleep forever, polls.
    #[test]
    fn leader_does_not_oversleep_due_time() {
        loom::model(|| {
            let shared = Arc::new((PollLeader::new(), EventCount::new()));
            shared.0.set_due(9);
            assert!(shared.0.try_lead(0));
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                if other.0.set_due(5) == Wake::Leader(0) {
                    other.1.notify();
                }
            });
            let (watch, event_count) = (&shared.0, &shared.1);
            while watch.due() != 5 {
                watch.plan(9);
                event_count.sleep(Duration::from_secs(60), || watch.due() < 9);
            }
            watch.leave();
            thread.join().unwrap();
        });
    }

    /// A leader that leaves wakes a sleeping thread, or that thread sees that there is no leader.
    #[test]
    fn leadership_is_handed_over() {
        loom::model(|| {
            let shared = Arc::new((PollLeader::new(), EventCount::new()));
            let other = Arc::clone(&shared);
            shared.0.set_due(9);
            assert!(shared.0.try_lead(0));
            let thread = loom::thread::spawn(move || {
                while !other.0.try_lead(1) {
                    other.1.sleep(Duration::from_secs(60), || other.0.is_wanted());
                }
            });
            shared.0.leave();
            EventCount::notify_one(std::iter::once(&shared.1));
            thread.join().unwrap();
            assert!(!shared.0.is_wanted());
        });
    }

    /// A due time is set while the leader leaves: one of the two threads sees that there is no
    /// leader.
    #[test]
    fn due_time_set_during_resignation_is_seen() {
        loom::model(|| {
            let watch = Arc::new(PollLeader::new());
            watch.set_due(9);
            assert!(watch.try_lead(0));
            watch.set_due(NEVER);
            let other = Arc::clone(&watch);
            let thread = loom::thread::spawn(move || other.set_due(5) == Wake::AnySleeper);
            watch.leave();
            let seen_by_leaver = watch.is_wanted();
            assert!(
                thread.join().unwrap() || seen_by_leaver,
                "a completion is due and no thread polls for it"
            );
        });
    }

    /// A due time is set while there is no leader: a sleeping thread is woken to become the leader.
    #[test]
    fn sleeper_without_due_time_is_found() {
        loom::model(|| {
            let shared = Arc::new((PollLeader::new(), EventCount::new()));
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                while !other.0.try_lead(1) {
                    other.1.sleep(Duration::from_secs(60), || other.0.is_wanted());
                }
            });
            if shared.0.set_due(9) == Wake::AnySleeper {
                EventCount::notify_one(std::iter::once(&shared.1));
            }
            thread.join().unwrap();
        });
    }
}

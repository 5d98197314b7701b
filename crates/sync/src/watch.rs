//! Room: the watch.
//!
//! Protects   the time at which somebody has to look at a device queue that many channels share.
//! Why        of many threads that sleep until a completion is due one is to wake up for it, not
//!            all of them; and it may be any, because each may go away.
//! States     free; kept by one of those who sleep while something is due. Who keeps it sleeps
//!            until a time that it has planned, which is not after the time that is due.
//! Order      no lock. Who changes what is due looks whether the keeper sleeps for too long; who
//!            plans a sleep looks once more what is due, with a full fence between on either side.
//! Common     a store and a fence by who has looked at the device queue.
//! Cost       about 6 ns a look; for who sleeps an exchange to keep the watch and a store to leave.
//! Before     every sleeper wakes up for every completion.

use crate::atomics::{AtomicU32, AtomicU64, Ordering, fence};
use crate::pad::Padded;

/// Nobody keeps the watch.
const FREE: u32 = 0;

/// Never.
pub const NEVER: u64 = u64::MAX;

/// Who is to be woken for what is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Nobody.
    Nobody,
    /// The keeper, which sleeps for longer than that.
    Keeper(u32),
    /// Anybody who sleeps: nobody keeps the watch.
    Anybody,
}

/// Who sleeps until something is due, for all.
#[derive(Debug)]
pub struct Watch {
    /// The number of who keeps it, plus one, or `FREE`.
    keeper: Padded<AtomicU32>,
    /// Until when the keeper sleeps; 0 while it does not.
    until: AtomicU64,
    /// When somebody has to look; `NEVER` if nothing is under way.
    due: Padded<AtomicU64>,
}

impl Default for Watch {
    fn default() -> Watch {
        Watch::new()
    }
}

impl Watch {
    /// A free watch with nothing due.
    pub fn new() -> Watch {
        let (keeper, due) = (Padded(AtomicU32::new(FREE)), Padded(AtomicU64::new(NEVER)));
        Watch { keeper, until: AtomicU64::new(0), due }
    }

    /// When somebody has to look.
    #[inline]
    pub fn due(&self) -> u64 {
        self.due.load(Ordering::Relaxed)
    }

    /// Notes when somebody has to look next; answers who has to be woken for it.
    #[inline]
    pub fn set_due(&self, at: u64) -> Wake {
        let before = self.due.load(Ordering::Relaxed);
        if at == NEVER && before == NEVER {
            return Wake::Nobody;
        }
        self.due.store(at, Ordering::Relaxed);
        // Full: pairs with the fence of the bells by which the others sleep.
        fence(Ordering::SeqCst);
        match self.keeper.load(Ordering::Relaxed).checked_sub(1) {
            None if at < NEVER => Wake::Anybody,
            Some(keeper) if self.until.load(Ordering::Relaxed) > at => Wake::Keeper(keeper),
            _ => Wake::Nobody,
        }
    }

    /// Keeps the watch if something is due and it is free; says whether.
    pub fn keep(&self, who: u32) -> bool {
        // Acquire: pairs with the Release in `leave`.
        let (wanted, acquire) = (self.is_wanted(), Ordering::Acquire);
        let exchange = || self.keeper.compare_exchange(FREE, who + 1, acquire, Ordering::Relaxed);
        wanted && exchange().is_ok()
    }

    /// Plans the keeper's sleep. It looks at what is due once more before it sleeps, behind a full
    /// fence.
    pub fn plan(&self, until: u64) {
        self.until.store(until, Ordering::Relaxed);
    }

    /// Ends the keeper's watch. Whoever leaves looks then whether somebody is to keep it.
    pub fn leave(&self) {
        self.until.store(0, Ordering::Relaxed);
        // Release: pairs with the Acquire in `keep`, so that the next plan comes later.
        self.keeper.store(FREE, Ordering::Release);
        // Full: pairs with the fence in `set_due`. Either that finds the watch free, or the look
        // that follows finds what is due.
        fence(Ordering::SeqCst);
    }

    /// Whether something is due and nobody keeps it.
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

    /// Somebody notes that there is something to look at; the keeper, who had planned to sleep for
    /// ever, looks.
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

    /// Who leaves the watch wakes one who sleeps, or that one sees that it is free.
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

    /// Something becomes due while the keeper leaves: one of the two sees that nobody keeps it.
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

    /// Something becomes due while nobody keeps the watch: who sleeps is woken to keep it.
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

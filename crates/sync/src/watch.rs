//! Room: the watch.
//!
//! Protects   the time at which somebody has to look at a device queue that many channels share.
//! Why        of many threads that sleep until a completion is due one is to wake up for it, not
//!            all of them; and it may be any, because each may go away.
//! States     free; kept by one of those who sleep. Who keeps it sleeps until a time that it has
//!            planned, which is not after the time that is due.
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

    /// Notes when somebody has to look next; answers the keeper if it has to be rung, because it
    /// sleeps for longer than that.
    #[inline]
    pub fn set_due(&self, at: u64) -> Option<u32> {
        self.due.store(at, Ordering::Relaxed);
        // Full: pairs with the fence of the bell by which the keeper sleeps.
        fence(Ordering::SeqCst);
        if self.until.load(Ordering::Relaxed) <= at {
            return None;
        }
        self.keeper.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Keeps the watch if it is free; says whether.
    pub fn keep(&self, who: u32) -> bool {
        // Acquire: pairs with the Release in `leave`.
        self.keeper.compare_exchange(FREE, who + 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Plans the keeper's sleep. It looks at what is due once more before it sleeps, behind a full
    /// fence.
    pub fn plan(&self, until: u64) {
        self.until.store(until, Ordering::Relaxed);
    }

    /// Ends the keeper's watch.
    pub fn leave(&self) {
        self.until.store(0, Ordering::Relaxed);
        // Release: pairs with the Acquire in `keep`, so that the next plan comes later.
        self.keeper.store(FREE, Ordering::Release);
    }

    /// Whether nobody keeps it.
    #[inline]
    pub fn is_free(&self) -> bool {
        self.keeper.load(Ordering::Relaxed) == FREE
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn one_keeps_it_and_is_told_of_what_is_due_before_its_plan() {
        let watch = Watch::new();
        assert_eq!((watch.due(), watch.set_due(7)), (NEVER, None));
        assert!(watch.keep(3) && !watch.keep(4) && !watch.is_free());
        watch.plan(100);
        assert_eq!(watch.set_due(100), None);
        assert_eq!(watch.set_due(99), Some(3));
        watch.leave();
        assert!(watch.is_free());
        assert_eq!(watch.set_due(1), None);
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
            let other = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || {
                if other.0.set_due(5).is_some() {
                    other.1.ring();
                }
            });
            let (watch, bell) = (&shared.0, &shared.1);
            assert!(watch.keep(0));
            while watch.due() != 5 {
                watch.plan(NEVER);
                bell.sleep(Duration::from_secs(60), || watch.due() < NEVER);
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
            assert!(shared.0.keep(0));
            let thread = loom::thread::spawn(move || {
                while !other.0.keep(1) {
                    other.1.sleep(Duration::from_secs(60), || other.0.is_free());
                }
            });
            shared.0.leave();
            Bell::ring_one(std::iter::once(&shared.1));
            thread.join().unwrap();
            assert!(!shared.0.is_free());
        });
    }
}

//! Room: the tallies.
//!
//! Protects   how much each of many threads has done of what one of them keeps the books of.
//! Why        who completes something tells it to the one who counts, but that one need not hear of
//!            it before it wants to know. So each thread counts on a sheet of its own, which stays
//!            with its processor, and whoever keeps the books collects the sheets.
//! States     a sheet holds two counts since it was last collected, and whether it is awaited: the
//!            one who keeps the books has left something undone that the next count may allow.
//! Order      no lock. Who counts on an awaited sheet is told so by the addition itself.
//! Common     one addition on a line that nobody else looks at; a load and an exchange to collect.
//! Cost       about 6 ns a batch on either side.
//! Before     one counter for all, or a letter for each batch.
//!
//! The mark and the counts are in one word, and so in one order: a count comes before the exchange
//! that puts the mark there, and is collected by it, or behind it, and sees the mark.

use crate::atomics::{AtomicU64, Ordering};
use crate::pad::Padded;

/// The sheet is awaited.
const AWAITED: u64 = 1 << 63;
/// Where the second count begins.
const SECOND: u32 = 32;

/// A sheet for each of some threads.
#[derive(Debug)]
pub struct Tallies {
    sheets: Box<[Padded<AtomicU64>]>,
}

impl Tallies {
    /// So many empty sheets.
    pub fn new(sheets: usize) -> Tallies {
        Tallies { sheets: (0..sheets).map(|_| Padded(AtomicU64::new(0))).collect() }
    }

    /// Adds to the first count of a sheet, or to the second. Says whether the sheet is awaited:
    /// whoever keeps the books has to look again, and it is the caller's duty to see to it. No
    /// count comes to 2^31 before it is collected.
    #[inline]
    pub fn add(&self, sheet: usize, second: bool, count: u32) -> bool {
        let count = u64::from(count) << if second { SECOND } else { 0 };
        // Release: pairs with the Acquire in `collect`. Acquire: pairs with the Release there, so
        // that the caller finds what was left undone.
        self.sheets[sheet].fetch_add(count, Ordering::AcqRel) & AWAITED != 0
    }

    /// Takes what a sheet says: the first count and the second. With `awaits` the next one who
    /// counts there is told that it is awaited, else nobody is any more.
    #[inline]
    pub fn collect(&self, sheet: usize, awaits: bool) -> [usize; 2] {
        let sheet = &self.sheets[sheet];
        if !awaits && sheet.load(Ordering::Relaxed) == 0 {
            return [0; 2];
        }
        // Acquire and Release: pair with those in `add`.
        let word = sheet.swap(if awaits { AWAITED } else { 0 }, Ordering::AcqRel) & !AWAITED;
        [word as u32 as usize, (word >> SECOND) as usize]
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn counts_are_collected_once_and_who_counts_on_an_awaited_sheet_is_told() {
        let tallies = Tallies::new(2);
        assert!(!tallies.add(0, false, 3) && !tallies.add(0, true, 4) && !tallies.add(0, false, 1));
        assert_eq!((tallies.collect(1, true), tallies.collect(0, false)), ([0, 0], [4, 4]));
        assert_eq!(tallies.collect(0, false), [0, 0]);
        assert!(tallies.add(1, true, 2) && tallies.add(1, false, 1) && !tallies.add(0, false, 1));
        assert_eq!(tallies.collect(1, false), [1, 2]);
        assert!(!tallies.add(1, true, (1 << 31) - 1));
        assert_eq!(tallies.collect(1, false), [0, (1 << 31) - 1]);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::atomics::AtomicU32;
    use crate::bell::Bell;
    use crate::role::{Role, Round};
    use loom::sync::Arc;
    use std::time::Duration;

    /// Two threads count while a third one, which waits for two counts, collects and leaves: it has
    /// both, or somebody is told that it waits.
    #[test]
    fn what_is_awaited_is_collected_or_told() {
        loom::model(|| {
            let tallies = Arc::new(Tallies::new(2));
            let count = |sheet: usize| {
                let tallies = Arc::clone(&tallies);
                loom::thread::spawn(move || tallies.add(sheet, sheet == 1, 1))
            };
            let threads = [count(0), count(1)];
            let [first, second] = [0, 1].map(|sheet| tallies.collect(sheet, true));
            let told = threads.map(|thread| thread.join().unwrap());
            assert_eq!(
                (first, second),
                ([1 - usize::from(told[0]), 0], [0, 1 - usize::from(told[1])])
            );
        });
    }

    /// The books of a device that takes one request at a time.
    #[derive(Default)]
    struct Books {
        in_flight: usize,
        waits: bool,
    }

    struct Device {
        role: Role<Books>,
        tallies: Tallies,
        lane: AtomicU32,
        served: AtomicU32,
        bell: Bell,
    }

    impl Device {
        fn dispatch(&self) {
            let mut serves = false;
            let _ = self.role.run(|books| {
                loop {
                    books.in_flight -= self.tallies.collect(0, false)[0];
                    books.waits |= self.lane.swap(0, Ordering::Relaxed) == 1;
                    if books.waits && books.in_flight == 0 {
                        books.waits = false;
                        serves = true;
                    }
                    let count = if books.waits { self.tallies.collect(0, true)[0] } else { 0 };
                    books.in_flight -= count;
                    if count == 0 {
                        return Round::Whole;
                    }
                }
            });
            if serves {
                self.served.store(1, Ordering::Relaxed);
                self.bell.ring();
            }
        }
    }

    /// A request passes on while another one comes, which finds no room and sleeps. It is served
    /// by whoever of the two is the last to look.
    #[test]
    fn who_waits_for_what_has_passed_on_is_served() {
        loom::model(|| {
            let device = Arc::new(Device {
                role: Role::new(Books::default()),
                tallies: Tallies::new(1),
                lane: AtomicU32::new(0),
                served: AtomicU32::new(0),
                bell: Bell::new(),
            });
            let other = Arc::clone(&device);
            let thread = loom::thread::spawn(move || {
                let passed = other.role.brief(1, |books| {
                    let passes = !books.waits;
                    books.in_flight += usize::from(passes);
                    passes
                });
                if let Some((true, is_called)) = passed {
                    let is_awaited = other.tallies.add(0, false, 1);
                    if is_called || is_awaited {
                        other.dispatch();
                    }
                }
            });
            device.lane.store(1, Ordering::Relaxed);
            device.dispatch();
            let is_served = || device.served.load(Ordering::Relaxed) == 1;
            while !is_served() {
                device.bell.sleep(Duration::from_secs(60), is_served);
            }
            thread.join().unwrap();
        });
    }
}

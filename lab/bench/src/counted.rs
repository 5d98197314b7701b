//! A lock that counts: how often it is taken, how often it was held by another thread, how long it
//! is held, and how long threads wait for it.
//!
//! [`Counted`] wraps any lock of the product, as the type parameter of a device that only the lab
//! makes. Each thread counts for itself, so that counting makes no thread wait; a thread counts
//! between [`begin`] and [`end`].
//!
//! Counting costs two readings of [`crate::ticks`] per section, one of them inside, and some stores
//! after it: 20 to 40 ns, where a lock and its section alone take 5 to 10. Throughput is therefore
//! measured without counting, and the counts come from a window of their own. The share of
//! contended sections is, if anything, too high there, because every section is longer. Each hold
//! time includes about one reading (10 ns), and a section inside another counts for both.

mod shared;

use std::cell::RefCell;

use blockyard_sync::counter::{HISTOGRAM_BUCKETS, bucket_floor, bucket_of};
use blockyard_sync::lock::Lock;

use crate::sample::RoomCount;
use crate::ticks;

/// The names of the counted locks, by the number that [`Counted`] has as its parameter.
pub const ROOMS: [&str; 5] = ["zone_table", "zone_resources", "one lock", "table", "entries"];
/// The lock of a zone.
pub const ZONE_TABLE: usize = 0;
/// The lock around the counts of open and active zones.
pub const ZONE_RESOURCES: usize = 1;
/// The lock of the baseline that has only one.
pub const ONE_LOCK: usize = 2;
/// The lock over the table of the RAM disk's first baseline.
pub const TABLE: usize = 3;
/// The locks of entries of the RAM disk's other baselines.
pub const ENTRIES: usize = 4;

/// A counting lock, counted under the number `ROOM`.
#[derive(Debug)]
pub struct Counted<L, const ROOM: usize>(L);

impl<T, L: Lock<T>, const ROOM: usize> Lock<T> for Counted<L, ROOM> {
    fn new(value: T) -> Self {
        Counted(L::new(value))
    }

    #[inline]
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        match self.0.try_with(timed(f)) {
            Ok(section) => section.count(ROOM, None),
            Err(timed) => {
                let since = ticks::now();
                self.0.with(timed).count(ROOM, Some(since))
            }
        }
    }

    #[inline]
    fn try_with<R, F: FnOnce(&mut T) -> R>(&self, f: F) -> Result<R, F> {
        // `timed` would consume `f`, which must be returned on failure, so both reach it here.
        let mut f = Some(f);
        let section = self.0.try_with(timed(|value: &mut T| {
            let f = f.take().expect("a section runs once");
            f(value)
        }));
        match section.map_err(drop) {
            Ok(section) => Ok(section.count(ROOM, None)),
            Err(()) => Err(f.expect("it has not run")),
        }
    }
}

/// A finished section: its result, and the times of its start and end.
struct Section<R> {
    answer: R,
    from: u64,
    to: u64,
}

fn timed<T, R>(f: impl FnOnce(&mut T) -> R) -> impl FnOnce(&mut T) -> Section<R> {
    |value| {
        let from = ticks::now();
        let answer = f(value);
        Section { answer, from, to: ticks::now() }
    }
}

impl<R> Section<R> {
    /// Counts the section, with the time since which its thread waited for it.
    #[inline]
    fn count(self, room: usize, waited_since: Option<u64>) -> R {
        COUNTS.with_borrow_mut(|counts| {
            if let Some(counts) = counts {
                let count = &mut counts.0[room];
                count.hold.add(self.to.saturating_sub(self.from));
                if let Some(since) = waited_since {
                    count.wait.add(self.from.saturating_sub(since));
                }
            }
        });
        self.answer
    }
}

thread_local! {
    /// The counts of this thread; `None` while it does not count.
    static COUNTS: RefCell<Option<Counts>> = const { RefCell::new(None) };
}

/// Starts counting on this thread, from zero. The first call allocates.
pub fn begin() {
    COUNTS.with_borrow_mut(|counts| match counts {
        Some(counts) => counts.0.iter_mut().for_each(Count::clear),
        None => *counts = Some(Counts::default()),
    });
}

/// Returns the counts of this thread since [`begin`], and stops counting.
pub fn end() -> Counts {
    COUNTS.take().unwrap_or_default()
}

/// Counts by lock.
#[derive(Clone, Debug, Default)]
pub struct Counts([Count; ROOMS.len()]);

impl Counts {
    /// Adds the counts of another thread.
    pub fn add(&mut self, other: &Counts) {
        for (sum, other) in self.0.iter_mut().zip(&other.0) {
            sum.hold.merge(&other.hold);
            sum.wait.merge(&other.wait);
        }
    }

    /// A row for each lock that was taken.
    pub fn rooms(&self) -> Vec<RoomCount> {
        let row = |(name, count): (&&str, &Count)| RoomCount {
            room: (*name).to_owned(),
            acquisitions: count.hold.count,
            contended: count.wait.count,
            hold_ns: count.hold.summary_ns(),
            wait_ns: count.wait.summary_ns(),
        };
        let entered = |room: &(&&str, &Count)| room.1.hold.count > 0;
        ROOMS.iter().zip(&self.0).filter(entered).map(row).collect()
    }
}

/// The counts of one lock.
#[derive(Clone, Debug, Default)]
struct Count {
    hold: Times,
    wait: Times,
}

impl Count {
    fn clear(&mut self) {
        self.hold.clear();
        self.wait.clear();
    }
}

/// A log-linear histogram of ticks.
#[derive(Clone, Debug)]
struct Times {
    buckets: Box<[u64]>,
    count: u64,
    max: u64,
}

impl Default for Times {
    fn default() -> Times {
        Times { buckets: vec![0; HISTOGRAM_BUCKETS].into(), count: 0, max: 0 }
    }
}

impl Times {
    #[inline]
    fn add(&mut self, ticks: u64) {
        self.buckets[bucket_of(ticks)] += 1;
        self.count += 1;
        self.max = self.max.max(ticks);
    }

    fn merge(&mut self, other: &Times) {
        for (sum, other) in self.buckets.iter_mut().zip(&other.buckets) {
            *sum += other;
        }
        self.count += other.count;
        self.max = self.max.max(other.max);
    }

    fn clear(&mut self) {
        self.buckets.fill(0);
        (self.count, self.max) = (0, 0);
    }

    /// Median, 99th percentile and greatest, in nanoseconds; zeros without samples. The first two
    /// are exact to 1/16.
    fn summary_ns(&self) -> [f64; 3] {
        let at = |per_mille: u64| {
            let wanted = (self.count * per_mille).div_ceil(1000).max(1);
            let mut seen = 0;
            let bucket = self.buckets.iter().position(|count| {
                seen += count;
                seen >= wanted
            });
            bucket.map_or(0, bucket_floor)
        };
        let [median, p99] =
            [500, 990].map(|per_mille| if self.count == 0 { 0 } else { at(per_mille) });
        [median, p99, self.max].map(|ticks| ticks as f64 * ticks::tick_ns())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_sync::rank::ranks;
    use blockyard_sync::sleep_lock::SleepLock;
    use blockyard_sync::spin_lock::SpinLock;

    fn counts_what_happens<L: Lock<u64>>() {
        let lock = Counted::<L, ZONE_TABLE>::new(0);
        lock.with(|count| *count += 1);
        begin();
        for _ in 0..3 {
            lock.with(|count| *count += 1);
        }
        assert!(lock.try_with(|count| *count += 1).is_ok());
        let counts = end();
        lock.with(|count| assert_eq!(*count, 5));
        let rooms = counts.rooms();
        assert_eq!(rooms.len(), 1, "one room was entered");
        assert_eq!(rooms[0].room, "zone_table");
        assert_eq!((rooms[0].acquisitions, rooms[0].contended), (4, 0));
        assert!(rooms[0].hold_ns.is_sorted());
        assert_eq!(rooms[0].wait_ns, [0.0; 3]);
    }

    #[test]
    fn a_counted_lock_is_the_lock_and_counts() {
        counts_what_happens::<SpinLock<u64, { ranks::ZONE }>>();
        counts_what_happens::<SleepLock<u64, { ranks::ZONE }>>();
    }

    /// A lock that reports once, to the first thread that tries, that it is held.
    struct HeldOnce(SpinLock<bool, { ranks::ZONE }>, SpinLock<u64, { ranks::ZONE }>);

    impl Lock<u64> for HeldOnce {
        fn new(value: u64) -> Self {
            HeldOnce(Lock::new(true), Lock::new(value))
        }

        fn with<R>(&self, f: impl FnOnce(&mut u64) -> R) -> R {
            self.0.with(|held| *held = false);
            self.1.with(f)
        }

        fn try_with<R, F: FnOnce(&mut u64) -> R>(&self, f: F) -> Result<R, F> {
            if self.0.with(std::mem::take) { Err(f) } else { Ok(self.with(f)) }
        }
    }

    /// A thread that finds the lock held counts as contended, and one that only tries gets its
    /// closure back.
    #[test]
    fn a_meeting_is_counted_by_who_waits() {
        let lock = Counted::<HeldOnce, ONE_LOCK>::new(0);
        begin();
        lock.with(|count| *count += 1);
        lock.with(|count| *count += 1);
        lock.0.0.with(|held| *held = true);
        assert_eq!(lock.try_with(|_| ()).err().map(|_| "refused"), Some("refused"));
        let mut met = end();
        assert_eq!(lock.with(|count| *count), 2);
        let other = met.clone();
        met.add(&other);
        let rooms = met.rooms();
        assert_eq!((rooms.len(), rooms[0].room.as_str()), (1, "one lock"));
        // Two times two sections, of which the first was contended; a failed try takes no section.
        assert_eq!((rooms[0].acquisitions, rooms[0].contended), (4, 2));
    }

    #[test]
    fn percentiles_and_sums_are_those_of_the_values() {
        let mut times = Times::default();
        (1..=100).for_each(|ticks| times.add(ticks));
        let mut sum = Times::default();
        sum.merge(&times);
        sum.merge(&times);
        let tick = ticks::tick_ns();
        let [median, p99, max] = sum.summary_ns().map(|ns| (ns / tick).round() as u64);
        assert_eq!((sum.count, median, p99, max), (200, 50, 96, 100));
    }
}

//! Primitive: counters with one writer.
//!
//! Protects   a channel's statistics.
//! Why        a channel counts every I/O; a reader (metrics, `stats`) reads now and then.
//! States     of a counter none: each is an independent number, and a reader may see one I/O
//!            counted in one counter and not yet in the next. Of the end of counters: not reached,
//!            reached.
//! Order      no lock. A reader that sees the end sees all counts.
//! Common     a plain load, add and store: no read-modify-write, because there is one writer.
//! Cost       that of an ordinary variable; a reader makes the writer's cache line shared for a
//!            moment.
//! Before     a shared atomic that every thread adds to.

use crate::atomics::{AtomicBool, AtomicU64, Ordering};

/// A count that one thread increases and any thread reads.
#[derive(Debug)]
pub struct Counter(AtomicU64);

impl Default for Counter {
    fn default() -> Counter {
        Counter(AtomicU64::new(0))
    }
}

impl Counter {
    /// Adds `n`. Only the owning thread may call this: two writers would lose counts.
    #[inline]
    pub fn add(&self, n: u64) {
        // Relaxed: the one writer reads its own value, and readers need no order between counters.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// The count now, or a moment ago.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The end of the counters of one writer: no count follows. A reader that sees it may move their
/// counts to a sum, and drop the counters.
#[derive(Debug)]
pub struct CountersEnd(AtomicBool);

impl Default for CountersEnd {
    fn default() -> CountersEnd {
        CountersEnd(AtomicBool::new(false))
    }
}

impl CountersEnd {
    /// Notes the end. Only the owning thread may call this, after its last count.
    pub fn reach(&self) {
        // Release: pairs with the Acquire in `is_reached`.
        self.0.store(true, Ordering::Release);
    }

    /// Whether the end is reached: what the counters have from then on is their last count.
    pub fn is_reached(&self) -> bool {
        // Acquire: pairs with the Release in `reach`.
        self.0.load(Ordering::Acquire)
    }
}

/// Buckets of a [`Histogram`]: 64 powers of two, 16 steps each.
pub const HISTOGRAM_BUCKETS: usize = 64 * HISTOGRAM_STEPS;
/// Linear steps in each power of two: the relative error is at most 1/16.
pub const HISTOGRAM_STEPS: usize = 16;

/// A log-linear histogram that one thread fills and any thread reads.
#[derive(Debug)]
pub struct Histogram(Box<[Counter]>);

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram((0..HISTOGRAM_BUCKETS).map(|_| Counter::default()).collect())
    }
}

impl Histogram {
    /// Counts `n` values. Only the owning thread may call this.
    #[inline]
    pub fn add(&self, value: u64, n: u64) {
        self.0[bucket_of(value)].add(n);
    }

    /// The counts of all buckets; [`bucket_floor`] returns the smallest value of each.
    pub fn counts(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().map(Counter::get)
    }
}

/// The bucket of a value. Values below 16 have a bucket each.
#[inline]
pub fn bucket_of(value: u64) -> usize {
    if value < HISTOGRAM_STEPS as u64 {
        return value as usize;
    }
    let power = value.ilog2() as usize;
    let step = (value >> (power - 4)) as usize & (HISTOGRAM_STEPS - 1);
    (power - 3) * HISTOGRAM_STEPS + step
}

/// The smallest value of a bucket.
pub fn bucket_floor(bucket: usize) -> u64 {
    if bucket < HISTOGRAM_STEPS {
        return bucket as u64;
    }
    let (power, step) = (bucket / HISTOGRAM_STEPS + 3, bucket % HISTOGRAM_STEPS);
    if power > 63 {
        return u64::MAX;
    }
    (1 << power) + ((step as u64) << (power - 4))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_histogram_bucket() {
        let values = (0..4096).chain((12..64).flat_map(|power| {
            let base = 1u64 << power;
            [base - 1, base, base + 1, base + base / 16, base + base / 2]
        }));
        for value in values.chain([u64::MAX]) {
            let bucket = bucket_of(value);
            assert!(bucket < HISTOGRAM_BUCKETS, "{value}");
            assert!(bucket_floor(bucket) <= value, "{value} in {bucket}");
            assert!(value < bucket_floor(bucket + 1) || bucket_floor(bucket + 1) == u64::MAX);
        }
    }

    #[test]
    fn counts_add_up() {
        let histogram = Histogram::default();
        histogram.add(3, 2);
        histogram.add(1_000_000, 5);
        assert_eq!(histogram.counts().sum::<u64>(), 7);
        assert_eq!(histogram.counts().nth(3), Some(2));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    /// A reader never sees a count decrease, and sees all counts once the writer has finished.
    #[test]
    fn counts_only_grow() {
        loom::model(|| {
            let counter = Arc::new(Counter::default());
            let writer = Arc::clone(&counter);
            let thread = loom::thread::spawn(move || {
                writer.add(1);
                writer.add(2);
            });
            let (first, second) = (counter.get(), counter.get());
            assert!(first <= second && [0, 1, 3].contains(&second));
            thread.join().unwrap();
            assert_eq!(counter.get(), 3);
        });
    }

    /// Counters that a reader moves to a sum when their writer has ended.
    #[derive(Default)]
    struct Group {
        count: Counter,
        end: CountersEnd,
    }

    /// The sum of counters that were moved, and whether these were.
    type Moved = Mutex<(u64, bool)>;

    fn sum(group: &Group, moved: &Moved) -> u64 {
        let mut moved = moved.lock().unwrap();
        if !moved.1 && group.end.is_reached() {
            *moved = (group.count.get(), true);
        }
        moved.0 + if moved.1 { 0 } else { group.count.get() }
    }

    #[test]
    fn a_sum_loses_no_count_of_a_writer_that_ends() {
        loom::model(|| {
            let (group, moved) = (Arc::new(Group::default()), Arc::new(Mutex::new((0, false))));
            let writer = {
                let group = Arc::clone(&group);
                thread::spawn(move || {
                    group.count.add(1);
                    group.count.add(2);
                    group.end.reach();
                })
            };
            let reader = {
                let (group, moved) = (Arc::clone(&group), Arc::clone(&moved));
                thread::spawn(move || sum(&group, &moved))
            };
            let first = sum(&group, &moved);
            let second = sum(&group, &moved);
            assert!(first <= second, "a sum decreases");
            reader.join().unwrap();
            writer.join().unwrap();
            assert_eq!(sum(&group, &moved), 3);
        });
    }
}

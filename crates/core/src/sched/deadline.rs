//! The scheduler `deadline`: Linux's mq-deadline as a plain state machine.
//!
//! Requests wait in six rows, one per priority class and direction. Each row keeps them twice: by
//! sector, which is the order in which a disk likes them, and by age, so that none waits for ever.
//! A decision ([`Deadline::next`]) goes on in sorted order for a batch of `fifo_batch` requests,
//! and between batches looks at deadlines and at the other direction.
//!
//! Nothing here locks, allocates after [`Deadline::new`], looks at a clock or does I/O: time is
//! passed in, and whoever owns the order ([`crate::sched`]) sees to the rest.
//!
//! | rule | where |
//! | --- | --- |
//! | what waits merges with what comes, front and back, within the device's limits | `insert` |
//! | a request at the head goes before everything, the last one first | `insert`, `dispatch` |
//! | a class waits while one before it waits or is at the device, up to `prio_aging_expire` | `dispatch` |
//! | a deadline is looked at between batches only | `dispatch` |
//! | at the end of a sweep the next one starts at the oldest request | `dispatch` |
//! | writes to a sequential zone keep the order of their insertion | `lines` |
//! | what need not wait is passed on in one decision, the same as those above would make | `pass` |

mod dispatch;
mod entries;
mod insert;
mod item;
mod kind;
mod lines;
mod order;
mod pass;
mod stats;
mod tunables;

pub use item::Item;
pub use kind::{CLASSES, Direction, Kind};
pub use pass::Sweep;
pub use stats::{Counters, Stats};
pub use tunables::{Tunable, TunableError, Tunables};

use crate::bio::Prio;
use crate::channel::MergeRules;
use crate::geometry::ZoneGeometry;
use entries::{Entries, List};
use kind::{ROWS, row};
use lines::Lines;
use order::{Leaves, Order};

/// Bounds and settings of an order.
#[derive(Clone, Debug)]
pub struct DeadlineConfig {
    /// Most requests that wait: Linux's `nr_requests`, but without those at the device.
    pub capacity: usize,
    /// Most requests at the device, each of which may come back.
    pub in_flight_max: usize,
    /// What may become one request.
    pub rules: MergeRules,
    /// The zones, for a zoned device.
    pub zones: Option<ZoneGeometry>,
    /// What can be tuned.
    pub tunables: Tunables,
}

/// The requests of one class and direction.
#[derive(Clone, Debug)]
struct Row {
    /// By sector.
    order: Order,
    /// By age.
    fifo: List,
    /// The first sector of the request that was dispatched last.
    latest: u64,
    counters: Counters,
}

/// Requests that wait, in mq-deadline's order.
#[derive(Clone, Debug)]
pub struct Deadline<T> {
    entries: Entries<T>,
    leaves: Leaves,
    rows: [Row; ROWS],
    at_head: List,
    /// For a zoned device.
    lines: Option<Lines>,
    rules: MergeRules,
    in_flight_max: usize,
    tunables: Tunables,
    /// How long a request may wait, by direction, in nanoseconds.
    expire: [u64; 2],
    is_front_merging: bool,
    /// The direction of the batch, over all classes. As in Linux the first one may be of writes.
    last_direction: Direction,
    /// Requests of the batch so far.
    batching: u32,
    /// How often reads were preferred to writes that waited.
    starved: u32,
    /// Requests per class that wait or are at the device.
    queued: [usize; CLASSES.len()],
    /// Those among them that `async_depth` bounds, and the bound.
    throttled: usize,
    throttled_max: usize,
}

impl<T: Item> Deadline<T> {
    /// An empty order. This is the only place that allocates.
    pub fn new(config: DeadlineConfig) -> Deadline<T> {
        let places = config.capacity + config.in_flight_max;
        let row = |_| Row {
            order: Order::new(places),
            fifo: List::EMPTY,
            latest: 0,
            counters: Counters::default(),
        };
        let mut order = Deadline {
            entries: Entries::new(places),
            leaves: Leaves::new(places, ROWS),
            rows: std::array::from_fn(row),
            at_head: List::EMPTY,
            lines: config.zones.map(Lines::new),
            rules: config.rules,
            in_flight_max: config.in_flight_max,
            tunables: config.tunables,
            expire: [0; 2],
            is_front_merging: false,
            last_direction: Direction::Write,
            batching: 0,
            starved: 0,
            queued: [0; CLASSES.len()],
            throttled: 0,
            throttled_max: usize::MAX,
        };
        order.set(config.tunables);
        order
    }

    /// Changes what can be tuned. Deadlines of requests that wait stay as they are; their age,
    /// which is reckoned back from the deadline, shifts with the expiry time.
    pub fn set(&mut self, tunables: Tunables) {
        self.tunables = tunables;
        self.expire = [Tunable::ReadExpire, Tunable::WriteExpire].map(|t| tunables.nanos(t));
        self.is_front_merging = tunables.get(Tunable::FrontMerges) != 0;
        let async_depth = tunables.unsigned(Tunable::AsyncDepth) as usize;
        let is_bound = async_depth < self.entries.count() - self.in_flight_max;
        self.throttled_max = if is_bound { async_depth } else { usize::MAX };
    }

    /// What can be tuned, as it is.
    pub fn tunables(&self) -> &Tunables {
        &self.tunables
    }

    /// Counts a request as completed that [`Deadline::next`] gave out with this kind.
    #[inline]
    pub fn completed(&mut self, kind: Kind) {
        self.completed_many(kind, 1);
    }

    /// The same for several requests of one kind.
    #[inline]
    pub fn completed_many(&mut self, kind: Kind, count: usize) {
        self.rows[kind.row()].counters.completed += count as u64;
        self.queued[kind.prio as usize] -= count;
        if kind.is_throttled() {
            self.throttled -= count;
        }
    }

    /// What has become of the requests so far.
    pub fn stats(&self) -> Stats {
        Stats { rows: self.rows.each_ref().map(|row| row.counters) }
    }

    /// Whether no request waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.waiting() == 0
    }

    /// How many requests wait.
    #[inline]
    pub fn waiting(&self) -> usize {
        self.entries.count() - self.entries.free_count()
    }

    /// How many requests could be inserted yet, were none of them merged.
    #[inline]
    pub fn room(&self) -> usize {
        self.entries.free_count().saturating_sub(self.in_flight_max)
    }

    /// Whether a request waits whose class need not wait for another one.
    #[inline]
    pub fn is_ready(&self) -> bool {
        let waits = |prio: Prio| {
            Direction::ALL.iter().any(|direction| !self.rows[row(prio, *direction)].fifo.is_empty())
        };
        let first = CLASSES.into_iter().find(|prio| self.queued[*prio as usize] > 0);
        !self.at_head.is_empty() || first.is_some_and(waits)
    }

    /// How many requests of a class wait or are at the device.
    #[inline]
    pub fn queued(&self, prio: Prio) -> usize {
        self.queued[prio as usize]
    }

    /// The requests of a class and direction that wait, in sorted order.
    pub fn sorted(&self, prio: Prio, direction: Direction) -> impl Iterator<Item = &T> {
        let places = self.rows[row(prio, direction)].order.places(&self.leaves);
        places.filter_map(|place| self.entries[place].item.as_ref())
    }
}

//! The scheduler `deadline`: Linux's mq-deadline as a plain state machine.
//!
//! Requests wait in six rows, one per priority class and direction. Each row keeps its requests in
//! two orders: by sector, for few seeks, and by age, so that none waits forever. A decision
//! ([`Deadline::next`]) continues in sector order for a batch of `fifo_batch` requests. Between
//! batches it checks deadlines and the other direction.
//!
//! Nothing here locks, allocates after [`Deadline::new`], reads a clock or does I/O. The caller
//! passes the time in, and the owner of the order ([`crate::sched`]) does the rest.
//!
//! | rule | where |
//! | --- | --- |
//! | new requests merge with waiting ones, front and back, within the limits | `insert` |
//! | a request at the head goes before all others, the last inserted first | `insert`, `dispatch` |
//! | a class waits for the classes above it, for at most `prio_aging_expire` | `dispatch` |
//! | deadlines are checked only between batches | `dispatch` |
//! | at the end of a sweep the next sweep starts at the oldest request | `dispatch` |
//! | writes to a sequential zone keep the order of their insertion | `lines` |
//! | requests that need not wait go out at once, in the same order | `pass` |

mod dispatch;
mod entries;
mod insert;
mod item;
mod kind;
mod order;
mod sweep;
mod tunables;
mod zone_lists;

pub use item::Item;
pub use kind::{CLASSES, Counters, Direction, Kind, Stats};
pub use sweep::Sweep;
pub use tunables::{Tunable, TunableError, Tunables};

use crate::bio::Prio;
use crate::geometry::ZoneGeometry;
use crate::request::MergeRules;
use entries::{Entries, List};
use kind::{ROWS, row};
use order::{Leaves, Order};
use zone_lists::ZoneLists;

/// Bounds and settings of a [`Deadline`].
#[derive(Clone, Debug)]
pub struct DeadlineConfig {
    /// Maximum number of waiting requests: Linux's `nr_requests`, but without those in flight.
    pub capacity: usize,
    /// Maximum number of requests in flight, each of which may be requeued.
    pub in_flight_max: usize,
    /// The merge rules of the device.
    pub rules: MergeRules,
    /// The zones, for a zoned device.
    pub zones: Option<ZoneGeometry>,
    /// The tunable settings.
    pub tunables: Tunables,
}

/// The requests of one class and direction.
#[derive(Clone, Debug)]
struct ClassQueue {
    /// The requests by sector.
    order: Order,
    /// The requests by age.
    fifo: List,
    /// The first sector of the request that was dispatched last.
    latest: u64,
    counters: Counters,
}

/// Waiting requests in mq-deadline's order.
#[derive(Clone, Debug)]
pub struct Deadline<T> {
    entries: Entries<T>,
    leaves: Leaves,
    rows: [ClassQueue; ROWS],
    at_head: List,
    /// The per-zone lists of a zoned device.
    zone_lists: Option<ZoneLists>,
    rules: MergeRules,
    in_flight_max: usize,
    tunables: Tunables,
    /// The time until a request expires, by direction, in nanoseconds.
    expire: [u64; 2],
    is_front_merging: bool,
    /// The direction of the present batch, for all classes. As in Linux, the first batch may be of
    /// writes.
    last_direction: Direction,
    /// Requests dispatched in the present batch.
    batching: u32,
    /// How often reads were dispatched before waiting writes.
    starved: u32,
    /// Requests per class that wait or are in flight.
    queued: [usize; CLASSES.len()],
    /// The number of those requests that `async_depth` limits, and the limit.
    throttled: usize,
    throttled_max: usize,
}

impl<T: Item> Deadline<T> {
    /// An empty order. This is the only place that allocates.
    pub fn new(config: DeadlineConfig) -> Deadline<T> {
        let places = config.capacity + config.in_flight_max;
        let row = |_| ClassQueue {
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
            zone_lists: config.zones.map(ZoneLists::new),
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

    /// Changes the tunables. The deadlines of waiting requests do not change. Their age shifts with
    /// the expiry time, because it is computed from the deadline.
    pub fn set(&mut self, tunables: Tunables) {
        self.tunables = tunables;
        self.expire = [Tunable::ReadExpire, Tunable::WriteExpire].map(|t| tunables.nanos(t));
        self.is_front_merging = tunables.get(Tunable::FrontMerges) != 0;
        let async_depth = tunables.unsigned(Tunable::AsyncDepth) as usize;
        let is_bound = async_depth < self.entries.count() - self.in_flight_max;
        self.throttled_max = if is_bound { async_depth } else { usize::MAX };
    }

    /// The present tunables.
    pub fn tunables(&self) -> &Tunables {
        &self.tunables
    }

    /// Counts a request of this kind, which [`Deadline::next`] returned, as completed.
    #[inline]
    pub fn completed(&mut self, kind: Kind) {
        self.completed_many(kind, 1);
    }

    /// Counts several requests of one kind, which [`Deadline::next`] returned, as completed.
    #[inline]
    pub fn completed_many(&mut self, kind: Kind, count: usize) {
        self.rows[kind.row()].counters.completed += count as u64;
        self.queued[kind.prio as usize] -= count;
        if kind.is_throttled() {
            self.throttled -= count;
        }
    }

    /// The counters of requests so far.
    pub fn stats(&self) -> Stats {
        Stats { rows: self.rows.each_ref().map(|row| row.counters) }
    }

    /// Whether no request waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.waiting() == 0
    }

    /// Number of waiting requests.
    #[inline]
    pub fn waiting(&self) -> usize {
        self.entries.count() - self.entries.free_count()
    }

    /// How many more requests fit if none of them is merged.
    #[inline]
    pub fn room(&self) -> usize {
        self.entries.free_count().saturating_sub(self.in_flight_max)
    }

    /// Whether a request waits and its class need not wait for a higher one.
    #[inline]
    pub fn is_ready(&self) -> bool {
        let waits = |prio: Prio| {
            Direction::ALL.iter().any(|direction| !self.rows[row(prio, *direction)].fifo.is_empty())
        };
        let first = CLASSES.into_iter().find(|prio| self.queued[*prio as usize] > 0);
        !self.at_head.is_empty() || first.is_some_and(waits)
    }

    /// Number of requests of a class that wait or are in flight.
    #[inline]
    pub fn queued(&self, prio: Prio) -> usize {
        self.queued[prio as usize]
    }

    /// The waiting requests of a class and direction, by sector.
    pub fn sorted(&self, prio: Prio, direction: Direction) -> impl Iterator<Item = &T> {
        let places = self.rows[row(prio, direction)].order.places(&self.leaves);
        places.filter_map(|place| self.entries[place].item.as_ref())
    }
}

//! A scheduler that the channels of a device share: it orders and merges over all of them.
//!
//! ```text
//! channel ─ batch ▸ where nothing waits: sort, pass on ▸ the channel's own device queue
//! channel ─ batch ▸ lane ─┐                          ┌▸ device queue of whoever popped
//! channel ─ batch ▸ lane ─┼ drain, sort, merge ▸ pop ┤
//! channel ─ batch ▸ lane ─┘   (role: dispatcher)     └▸ one device queue (role: its starter)
//! channel ◂─ mailbox, bell ◂── each request goes home to the channel that pushed it ◂──┘
//! ```
//!
//! [`Scheduled`] is a device around a device, as middleware is: a channel over it is an ordinary
//! channel, and `none` is the way past all of this. A [`Front`] is how requests come in and are
//! taken out; the product's is [`Combiner`], others are to be compared with it.
//!
//! Nobody waits for a lock here, and no request waits for one particular thread to come by:
//! whatever can be done is done by whoever is awake and waits for something, and who leaves work
//! behind wakes somebody who sleeps. docs/decisions/0016-shared-scheduler.md has the invariants.

mod combiner;
mod engine;
mod flights;
mod homes;
mod queue;
mod queued;
mod scheduled;
mod sheaf;

use crate::channel::MergeRules;
use crate::geometry::ZoneGeometry;
use crate::sched::deadline::{Deadline, DeadlineConfig, Kind, Stats, Tunables};
use crate::units::Nanos;

pub use combiner::Combiner;
pub use queue::ScheduledQueue;
pub use queued::Queued;
pub use scheduled::Scheduled;
pub use sheaf::Sheaf;

/// Most requests of one channel that wait in the scheduler or are at the device.
pub const REQUESTS_MAX: u16 = 1024;

/// Most requests that the order holds; more wait in the lanes. Few where interleavings are drawn.
pub const ORDER_CAPACITY: usize = if cfg!(shuttle) { 8 } else { 2048 };

/// What a front has to know of its device.
#[derive(Clone, Debug)]
pub struct FrontConfig {
    /// Most requests that the device works on: the number of tags.
    pub depth: u16,
    /// Most requests that one thread takes at once, to carry them out one after the other.
    pub hand: u16,
    /// Most requests that wait in order.
    pub capacity: usize,
    /// What may become one request.
    pub rules: MergeRules,
    /// The zones of a zoned device.
    pub zones: Option<ZoneGeometry>,
    /// What can be tuned.
    pub tunables: Tunables,
}

impl FrontConfig {
    /// An empty order of these bounds.
    pub fn order(&self) -> Deadline<Queued> {
        Deadline::new(DeadlineConfig {
            capacity: self.capacity,
            in_flight_max: usize::from(self.depth),
            rules: self.rules,
            zones: self.zones.clone(),
            tunables: self.tunables,
        })
    }
}

/// What a [`Front::dispatch`] has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing that could be done.
    Nothing,
    /// Something, so that the caller has to come again or to [`Front::abandon`] it.
    Undone,
    /// The caller has as much as it has room for, and others could start more: that is noted, and
    /// the caller wakes somebody who sleeps before it starts what it has.
    More,
}

/// What becomes of a request that [`Front::dispatch`] gave out: each is reported once.
#[derive(Clone, Copy, Debug)]
pub enum Report {
    /// So many requests of this kind are complete.
    Completed(Kind, u32),
    /// The device did not start it, or its first part: it goes before everything else. It had been
    /// given out, or passed on by the channel of this number ([`Front::passer`]).
    Undone(Queued, Option<u16>),
    /// The rest of a request that the device wants in parts: it goes before everything else, too.
    Rest(Queued),
}

impl Report {
    /// Adds the completion of a request of this kind.
    #[inline]
    fn add_completed(reports: &mut Vec<Report>, kind: Kind) {
        match reports.last_mut() {
            Some(Report::Completed(last, count)) if *last == kind => *count += 1,
            _ => reports.push(Report::Completed(kind, 1)),
        }
    }
}

/// How requests pass on to the device that need not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passing {
    /// Something came in meanwhile that waits for a [`Front::dispatch`].
    pub is_called: bool,
}

/// Why requests do not pass on to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotPassing {
    /// Another thread works on the order, or all that the device takes is with others, who run it
    /// or wait for a processor to do so. It may be different soon.
    Busy,
    /// Something is to be dispatched first: who does that can ask again, but in any case the caller
    /// has to come to a [`Front::dispatch`].
    Behind,
    /// They are to be inserted.
    Unfit,
}

/// How requests of many threads come in, in which order they are, and how they are taken out.
///
/// What is inserted is given out once by a dispatch, of any thread, and reported once; what is
/// reported as not done is given out again.
pub trait Front: Send + Sync + Sized + 'static {
    /// The name in measurements.
    const NAME: &'static str;

    /// Whether [`Front::pass`] is worth asking.
    const PASSES: bool = false;

    /// What a channel holds of it.
    type Lane: Send + 'static;

    /// A front for a device.
    fn new(config: &FrontConfig) -> Self;

    /// What a new channel holds.
    fn open(&self) -> Self::Lane;

    /// How many requests could be inserted now.
    fn room(&self, lane: &Self::Lane) -> usize;

    /// Takes as many requests as there is room for, from the first on; says how many.
    fn insert(&self, lane: &mut Self::Lane, requests: &[Queued], now: Nanos) -> usize;

    /// Lets requests that nothing else waits with pass on to the device at once: inserts them and
    /// takes them out again, each of them or none. They are the caller's to start then, in the
    /// order that the sheaf has, and it tells [`Front::passed`] when they are complete; what the
    /// device does not start is reported as not done.
    ///
    /// # Errors
    /// Why they do not: a front need not know how.
    fn pass(
        &self,
        lane: &mut Self::Lane,
        sheaf: &mut Sheaf,
        now: Nanos,
    ) -> Result<Passing, NotPassing> {
        let _ = (lane, sheaf, now);
        Err(NotPassing::Unfit)
    }

    /// So many reads and writes that have passed on are complete. Says whether the caller has to
    /// call [`Front::dispatch`], because that may have made something possible.
    fn passed(&self, lane: &mut Self::Lane, counts: [u32; 2]) -> bool {
        let _ = (lane, counts);
        false
    }

    /// The number by which a channel reports what has passed on and was not started.
    fn passer(&self, lane: &Self::Lane) -> u16 {
        let _ = lane;
        0
    }

    /// Adds up to `room` requests whose turn it is to `out`, within its capacity. Where another
    /// thread is at it, it may leave them to that one. With no room it only looks after what has
    /// come in. Says what it has left.
    fn dispatch(
        &self,
        lane: &mut Self::Lane,
        now: Nanos,
        room: usize,
        out: &mut Vec<Queued>,
    ) -> Left;

    /// Takes the reports on requests that it gave out.
    fn report(&self, reports: &mut Vec<Report>);

    /// Whether somebody has to call [`Front::dispatch`]: there is something to do, and perhaps
    /// nobody is at it. Only looks.
    fn is_work(&self) -> bool;

    /// Sees to it that a thread which is at it now looks once more before it goes; says whether
    /// there is one.
    fn kick(&self) -> bool;

    /// Notes that work is left behind, so that [`Front::is_work`] says so until somebody comes.
    fn abandon(&self);

    /// Whether that is noted, so that somebody was woken for it or is to be. Only looks.
    fn is_abandoned(&self) -> bool {
        false
    }

    /// Works on the order, for the control plane; may wait for others. Work may be left behind.
    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<Queued>));
}

/// The scheduler of a device, as the control plane sees it.
pub trait SchedulerControl: Send + Sync {
    /// The names that [`SchedulerControl::switch`] takes.
    fn available(&self) -> &'static [&'static str];

    /// The name of the one at work.
    fn active(&self) -> &'static str;

    /// Lets another one work; what waits in the one before is still served by it.
    ///
    /// # Errors
    /// If there is none of this name.
    fn switch(&self, name: &str) -> Result<(), UnknownScheduler>;

    /// What can be tuned, as it is.
    fn tunables(&self) -> Tunables;

    /// Changes what can be tuned.
    fn set(&self, tunables: Tunables);

    /// What has become of the requests so far.
    fn stats(&self) -> Stats;

    /// How many requests wait in order.
    fn waiting(&self) -> usize;

    /// How many requests the device works on at once; its limits say how many a channel may send.
    fn depth(&self) -> u16;
}

/// There is no scheduler of this name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownScheduler {
    /// What was asked for.
    pub name: String,
}

impl std::fmt::Display for UnknownScheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "there is no scheduler `{}`: wanted `none` or `mq-deadline`", self.name)
    }
}

impl std::error::Error for UnknownScheduler {}

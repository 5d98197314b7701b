//! mq-deadline with buckets, as proposed for Linux in January 2024 and later withdrawn.
//!
//! One thread dispatches at a time, and other threads that want to dispatch return at once
//! (`dispatching`). A thread that inserts while another one dispatches puts its requests into one
//! of 32 buckets instead of waiting for the lock. The dispatcher empties the buckets before it
//! stops; a sequence number tells it whether requests have arrived meanwhile. Where no thread
//! dispatches, insertion takes the lock as before.
//!
//! A request in a bucket cannot be merged before it is moved into the order, and holds a tag while
//! it waits. There are as many tags as Linux gives a scheduler (`nr_requests`: twice the device's
//! depth, at most 256). A submitter without a tag waits in line for one, which is where sequential
//! writes lost 72.9 %. Here the submitter's number selects its bucket, in Linux the number of its
//! processor: with more submitters than processors, fewer share a bucket here than in Linux.
#![allow(clippy::disallowed_types)] // A baseline has locks and words of its own, by definition.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use blockyard_core::sched::deadline::Deadline;
use blockyard_core::sched::shared::{
    Left, QueuedRequest, REQUESTS_MAX, Report, SchedulerQueue, SchedulerQueueConfig,
};
use blockyard_core::units::Nanos;
use blockyard_sync::lock::Lock;
use blockyard_sync::pad::Padded;
use blockyard_sync::spin_lock::SpinLock;
use blockyard_sync::tag_semaphore::TagSemaphore;

use crate::sched_order::{Ledger, OrderState};

/// The baseline's name on a command line.
pub const NAME: &str = "sched-buckets";

/// The number of buckets in the published patch.
const BUCKETS: usize = 32;
/// The number of requests that a bucket holds before its memory has to grow.
const BUCKET_LEN: usize = 1024;
/// Linux's bound on the device depth in `nr_requests`, which is twice that depth.
const DEPTH_MAX: u16 = 128;

/// The rank of the scheduler's lock, under which the buckets are emptied.
const RANK: u8 = 60;
/// The rank of a bucket's lock, and of the queue for tags.
const RANK_BUCKET: u8 = 61;

type Bucket = SpinLock<Vec<QueuedRequest>, RANK_BUCKET>;

/// mq-deadline under one lock, with buckets for insertions during a dispatch.
pub struct Buckets {
    lock: SpinLock<OrderState, RANK>,
    ledger: Ledger,
    dispatching: Padded<AtomicBool>,
    /// Counts insertions into buckets.
    sequence: Padded<AtomicU64>,
    /// The value of `sequence` when the buckets were last emptied.
    emptied: AtomicU64,
    buckets: Box<[Padded<Bucket>]>,
    tags: TagSemaphore,
    /// Requests that wait for a tag, in the order of arrival.
    line: SpinLock<VecDeque<QueuedRequest>, RANK_BUCKET>,
    /// The number of requests in `line`.
    in_line: AtomicUsize,
    next_bucket: AtomicUsize,
}

impl fmt::Debug for Buckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buckets").field("ledger", &self.ledger).finish_non_exhaustive()
    }
}

impl Buckets {
    /// Inserts requests that have their tags.
    fn put(&self, bucket: usize, requests: &[QueuedRequest], now: Nanos) {
        // Relaxed: with either value the requests are found, below or by `is_work`.
        if self.dispatching.load(Ordering::Relaxed) {
            self.buckets[bucket].with(|bucket| bucket.extend_from_slice(requests));
            // Release: pairs with the Acquire in `dispatch`.
            self.sequence.fetch_add(1, Ordering::Release);
            self.ledger.change();
        } else {
            self.lock.with(|waiting| {
                self.take_in(waiting, requests, now);
                self.ledger.change();
                self.ledger.leave(waiting, None);
            });
        }
    }

    /// Moves requests into the order. Requests that are merged return their tags.
    fn take_in(&self, waiting: &mut OrderState, requests: &[QueuedRequest], now: Nanos) {
        let before = waiting.count();
        waiting.take_in(requests, now);
        let merged = (before + requests.len()).saturating_sub(waiting.count());
        self.tags.give(merged as u32);
    }

    /// Empties the buckets, under the lock; the caller has read `sequence` before.
    fn empty(&self, waiting: &mut OrderState, sequence: u64, now: Nanos) {
        if !self.is_anything_in_buckets() {
            return;
        }
        self.emptied.store(sequence, Ordering::Relaxed);
        for bucket in &self.buckets {
            bucket.with(|bucket| {
                if !bucket.is_empty() {
                    self.take_in(waiting, bucket, now);
                    bucket.clear();
                }
            });
        }
    }

    /// Gives free tags to the requests in line, and inserts those requests.
    fn advance_line(&self, now: Nanos) {
        const AT_ONCE: usize = 32;
        // Relaxed: a thread that joins the line looks for a tag afterwards.
        while self.in_line.load(Ordering::Relaxed) > 0 {
            let mut next = Vec::with_capacity(AT_ONCE);
            self.line.with(|line| {
                let tags = self.tags.take(line.len().min(AT_ONCE) as u32);
                next.extend(line.drain(..tags as usize));
                self.in_line.store(line.len(), Ordering::Relaxed);
            });
            if next.is_empty() {
                return;
            }
            self.put(0, &next, now);
        }
    }

    fn is_anything_in_buckets(&self) -> bool {
        self.sequence.load(Ordering::Relaxed) != self.emptied.load(Ordering::Relaxed)
    }
}

impl SchedulerQueue for Buckets {
    const NAME: &'static str = "buckets";

    /// The number of the submitter's bucket.
    type SubmitRing = usize;

    fn new(config: &SchedulerQueueConfig) -> Buckets {
        let bucket = || Padded(Bucket::new(Vec::with_capacity(BUCKET_LEN)));
        Buckets {
            lock: SpinLock::new(OrderState::new(config)),
            ledger: Ledger::new(),
            dispatching: Padded(AtomicBool::new(false)),
            sequence: Padded(AtomicU64::new(0)),
            emptied: AtomicU64::new(0),
            buckets: (0..BUCKETS).map(|_| bucket()).collect(),
            tags: TagSemaphore::new(2 * u32::from(config.depth.min(DEPTH_MAX))),
            line: SpinLock::new(VecDeque::with_capacity(BUCKETS * BUCKET_LEN)),
            in_line: AtomicUsize::new(0),
            next_bucket: AtomicUsize::new(0),
        }
    }

    fn open(&self) -> usize {
        self.next_bucket.fetch_add(1, Ordering::Relaxed) % BUCKETS
    }

    #[inline]
    fn room(&self, _: &usize) -> usize {
        usize::from(REQUESTS_MAX)
    }

    fn insert(&self, bucket: &mut usize, requests: &[QueuedRequest], now: Nanos) -> usize {
        let tags = match self.in_line.load(Ordering::Relaxed) {
            0 => self.tags.take(requests.len() as u32) as usize,
            _ => 0,
        };
        let (tagged, others) = requests.split_at(tags);
        if !tagged.is_empty() {
            self.put(*bucket, tagged, now);
        }
        if !others.is_empty() {
            self.line.with(|line| {
                line.extend(others);
                self.in_line.store(line.len(), Ordering::Relaxed);
            });
            // A tag may have become free before the releasing thread could see the line.
            self.advance_line(now);
        }
        requests.len()
    }

    fn dispatch(
        &self,
        _: &mut usize,
        now: Nanos,
        room: usize,
        out: &mut Vec<QueuedRequest>,
    ) -> Left {
        self.advance_line(now);
        let end = out.len() + room;
        loop {
            // Acquire: pairs with the Release below. Other threads return at once.
            if self.dispatching.swap(true, Ordering::Acquire) {
                break;
            }
            // Acquire: pairs with the Release in `put`.
            let sequence = self.sequence.load(Ordering::Acquire);
            let next = self.lock.with(|waiting| {
                let seen = self.ledger.settle(waiting);
                self.empty(waiting, sequence, now);
                let next = if out.len() < end { waiting.next(now) } else { None };
                self.ledger.leave(waiting, next.is_none().then_some(seen));
                next
            });
            // Release: pairs with the Acquire above.
            self.dispatching.store(false, Ordering::Release);
            match next {
                Some(request) => out.push(request),
                None if self.sequence.load(Ordering::Acquire) == sequence => break,
                None => continue,
            }
            if out.len() == end {
                break;
            }
        }
        if self.is_work() { Left::Undone } else { Left::Nothing }
    }

    fn report(&self, reports: &mut Vec<Report>) {
        if reports.is_empty() {
            return;
        }
        self.tags.give(self.ledger.note(reports) as u32);
        if !reports.is_empty() {
            self.lock.with(|waiting| {
                self.ledger.settle(waiting);
                reports.drain(..).for_each(|report| waiting.hear(report, Nanos(0)));
                self.ledger.change();
                self.ledger.leave(waiting, None);
            });
        }
    }

    fn is_work(&self) -> bool {
        self.ledger.is_work()
            || (self.ledger.has_changed()
                && (self.in_line.load(Ordering::Relaxed) > 0 || self.is_anything_in_buckets()))
    }

    /// The dispatcher itself checks whether requests have arrived.
    fn notify(&self) -> bool {
        false
    }

    fn abandon(&self) {
        self.ledger.change();
    }

    fn with_order(&self, work: &mut dyn FnMut(&mut Deadline<QueuedRequest>)) {
        self.lock.with(|waiting| {
            self.ledger.settle(waiting);
            work(waiting.order());
            self.ledger.change();
            self.ledger.leave(waiting, None);
        });
    }
}

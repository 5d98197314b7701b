//! The memory of all NBD connections together: one budget of bytes for the process.
//!
//! Every connection has a [`SHARE_BYTES`] of the budget from its first byte to its last, so that a
//! client with small requests never waits for another one. What a connection needs beyond its share
//! it leases in chunks, keeps while it is busy, and gives back when it rests or when another
//! connection waits. Connections wait in the order of their arrival, for [`WAIT_MAX`] at most.
//!
//! ```text
//!  limit = connections x share + leased chunks + free
//! ```
//!
//! The budget is touched when a connection comes, goes, grows beyond its share or gives back; never
//! for an I/O.
#![allow(clippy::disallowed_types)] // A queue that is entered only where memory is short.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_sync::atomics::{AtomicU32, Ordering};
use blockyard_sync::counter::Counter;
use blockyard_sync::tag_budget::TagBudget;

use crate::nbd::exports::REQUEST_BYTES_MAX;

/// Unit in which memory is leased, in bytes.
const CHUNK_BYTES: u64 = 64 << 10;

/// What each connection has for itself, in bytes: requests up to half of it need nothing else.
pub const SHARE_BYTES: u64 = 512 << 10;

/// Kept free of shares, in bytes: the longest request with what goes with it.
const LONGEST_BYTES: u64 = REQUEST_BYTES_MAX as u64 + (2 << 20);

/// Least budget, in bytes: the longest request and a dozen connections.
pub const LIMIT_BYTES_MIN: u64 = LONGEST_BYTES + 12 * SHARE_BYTES;

/// Budget of a process that has enough memory, in bytes.
const LIMIT_BYTES_DEFAULT: u64 = 256 << 20;

/// Longest wait of a request for memory before it is refused with `ENOMEM`.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(30);

/// How long a connection may hold leased memory for a client that does not read or send, while
/// another connection waits for memory, unless the owner of the budget says otherwise.
const STALL_MAX: Duration = Duration::from_secs(10);

/// A budget for the buffers of NBD connections.
#[derive(Debug)]
pub struct MemoryBudget {
    chunks: TagBudget,
    limit_chunks: u32,
    stall_max: Duration,
    /// How many wait; read without the lock to see whether any does.
    waiting: AtomicU32,
    queue: Mutex<Queue>,
    /// Told when chunks are given back.
    given: Condvar,
    waits: Counter,
    refused: Counter,
}

#[derive(Debug, Default)]
struct Queue {
    next: u64,
    tickets: VecDeque<u64>,
}

/// The budget as statistics show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Most bytes of all connections together.
    pub limit_bytes: u64,
    /// Bytes that connections have now: their shares, and what they leased.
    pub used_bytes: u64,
    /// How often a connection waited for memory.
    pub waits: u64,
    /// Connections and requests that were refused for want of memory.
    pub refused: u64,
}

impl MemoryBudget {
    /// A budget of so many bytes, [`LIMIT_BYTES_MIN`] at least.
    pub fn new(limit_bytes: u64) -> Arc<MemoryBudget> {
        MemoryBudget::with_stall_max(limit_bytes, STALL_MAX)
    }

    /// A budget as [`MemoryBudget::new`] makes it, from which a client is cut off that has held
    /// leased memory for `stall_max` without reading or sending, while another client waits.
    pub fn with_stall_max(limit_bytes: u64, stall_max: Duration) -> Arc<MemoryBudget> {
        let chunks = limit_bytes.max(LIMIT_BYTES_MIN) / CHUNK_BYTES;
        let limit_chunks = u32::try_from(chunks).unwrap_or(u32::MAX);
        Arc::new(MemoryBudget {
            chunks: TagBudget::new(limit_chunks),
            limit_chunks,
            stall_max,
            waiting: AtomicU32::new(0),
            queue: Mutex::default(),
            given: Condvar::new(),
            waits: Counter::default(),
            refused: Counter::default(),
        })
    }

    /// The budget of a process that may use so many bytes of memory: a quarter of them, 256 MiB at
    /// most.
    pub fn for_memory(bytes: u64) -> Arc<MemoryBudget> {
        MemoryBudget::new((bytes / 4).min(LIMIT_BYTES_DEFAULT))
    }

    /// Longest sleep of a thread in a send or a receive before it checks whether another client
    /// waits for the memory that the thread's connection holds. Never zero, which a socket takes
    /// for no limit at all.
    pub(crate) fn blocked_max(&self) -> Duration {
        (self.stall_max / 2).max(Duration::from_millis(1))
    }

    /// How it is used now.
    pub fn usage(&self) -> MemoryUse {
        let chunks = |chunks: u32| u64::from(chunks) * CHUNK_BYTES;
        MemoryUse {
            limit_bytes: chunks(self.limit_chunks),
            used_bytes: chunks(self.limit_chunks - self.chunks.free().min(self.limit_chunks)),
            waits: self.waits.get(),
            refused: self.refused.get(),
        }
    }

    /// The share of one more connection; `None` where there is none left.
    pub(crate) fn admit(self: &Arc<MemoryBudget>) -> Option<Lease> {
        let (share, longest) = (chunks_of(SHARE_BYTES), chunks_of(LONGEST_BYTES));
        // The longest request must fit however many connections there are.
        self.chunks.join();
        let shares = u64::from(self.chunks.users()) * u64::from(share);
        let fits = shares + u64::from(longest) <= u64::from(self.limit_chunks);
        if fits && self.take(share) {
            return Some(Lease { budget: Arc::clone(self), held: AtomicU32::new(share) });
        }
        self.chunks.leave();
        self.refused.add(1);
        None
    }

    /// All of so many chunks, or none.
    fn take(&self, chunks: u32) -> bool {
        let taken = self.chunks.take(chunks);
        if taken < chunks {
            self.chunks.give(taken);
        }
        taken == chunks
    }

    fn give(&self, chunks: u32) {
        self.chunks.give(chunks);
        if chunks > 0 && self.is_wanted() {
            // A waiter looks again every now and then, so one that enters just now misses little.
            self.given.notify_all();
        }
    }

    /// Whether a connection waits for memory.
    fn is_wanted(&self) -> bool {
        // Relaxed: only a hint; nothing is published with it.
        self.waiting.load(Ordering::Relaxed) > 0
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryBudget {
    fn default() -> MemoryBudget {
        Arc::into_inner(MemoryBudget::new(LIMIT_BYTES_DEFAULT)).expect("nothing shares a new one")
    }
}

/// Chunks that hold so many bytes.
fn chunks_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(CHUNK_BYTES)).unwrap_or(u32::MAX)
}

/// What one connection has of the budget. Its thread changes it, others look.
#[derive(Debug)]
pub(crate) struct Lease {
    budget: Arc<MemoryBudget>,
    held: AtomicU32,
}

impl Lease {
    fn held(&self) -> u32 {
        // Relaxed: the connection's own thread alone writes it.
        self.held.load(Ordering::Relaxed)
    }

    /// Bytes that the connection may use.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.held()) * CHUNK_BYTES
    }

    /// Makes the lease cover so many bytes, if chunks are free and no other connection waits.
    #[cold]
    pub(crate) fn grow_to(&self, bytes: u64) -> bool {
        let missing = chunks_of(bytes).saturating_sub(self.held());
        if missing > 0 && (self.budget.is_wanted() || !self.budget.take(missing)) {
            return false;
        }
        self.held.store(self.held() + missing, Ordering::Relaxed);
        true
    }

    /// Waits until the lease covers so many bytes; `false` if that took too long, or `is_over` says
    /// that nobody needs them any more.
    #[cold]
    pub(crate) fn wait_for(&self, bytes: u64, is_over: impl Fn() -> bool) -> bool {
        let (missing, budget) = (chunks_of(bytes).saturating_sub(self.held()), &*self.budget);
        let deadline = Instant::now() + WAIT_MAX;
        budget.waits.add(1);
        // Relaxed, here and below: a hint, as `is_wanted` says.
        budget.waiting.fetch_add(1, Ordering::Relaxed);
        let mut queue = budget.queue();
        let ticket = queue.next;
        queue.next += 1;
        queue.tickets.push_back(ticket);
        let got = loop {
            if queue.tickets.front() == Some(&ticket) && budget.take(missing) {
                break true;
            }
            if Instant::now() >= deadline || is_over() {
                break false;
            }
            let waited = budget.given.wait_timeout(queue, LOOK);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        queue.tickets.retain(|other| *other != ticket);
        drop(queue);
        budget.waiting.fetch_sub(1, Ordering::Relaxed);
        // The next in the queue may find what it needs.
        budget.given.notify_all();
        match got {
            true => self.held.store(self.held() + missing, Ordering::Relaxed),
            false => budget.refused.add(1),
        }
        got
    }

    /// Gives back what is beyond so many bytes and beyond the share.
    pub(crate) fn shrink_to(&self, bytes: u64) {
        let keep = chunks_of(bytes.max(SHARE_BYTES)).min(self.held());
        let given = self.held() - keep;
        self.held.store(keep, Ordering::Relaxed);
        self.budget.give(given);
    }

    /// Whether the connection holds more than its share while another one waits.
    pub(crate) fn is_wanted(&self) -> bool {
        self.held() > chunks_of(SHARE_BYTES) && self.budget.is_wanted()
    }

    /// As [`MemoryBudget::blocked_max`].
    pub(crate) fn blocked_max(&self) -> Duration {
        self.budget.blocked_max()
    }
}

/// Since when the client of a connection has not read or not sent.
#[derive(Debug, Default)]
pub(crate) struct Stall(Option<Instant>);

impl Stall {
    /// Notes that the client still does not read or send.
    ///
    /// # Errors
    /// If the connection must be cut off: it has held leased memory for so long, and another
    /// connection waits for memory.
    #[cold]
    pub(crate) fn note(&mut self, lease: &Lease) -> io::Result<()> {
        let since = *self.0.get_or_insert_with(Instant::now);
        if lease.is_wanted() && since.elapsed() >= lease.budget.stall_max {
            let what = "it held memory that another client waits for, and its client did not go on";
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        Ok(())
    }

    /// Notes that the client goes on.
    #[inline]
    pub(crate) fn end(&mut self) {
        self.0 = None;
    }
}

/// How often a waiter looks whether it is still to wait.
const LOOK: Duration = Duration::from_millis(50);

impl Drop for Lease {
    fn drop(&mut self) {
        self.budget.chunks.leave();
        self.budget.give(self.held());
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn every_connection_has_its_share_and_the_longest_request_fits() {
        let budget = MemoryBudget::new(0);
        let leases: Vec<_> = std::iter::from_fn(|| budget.admit()).collect();
        assert_eq!(leases.len(), 12);
        assert!(leases[0].grow_to(u64::from(REQUEST_BYTES_MAX) + (1 << 20)));
        assert_eq!(leases[1].bytes(), SHARE_BYTES);
        assert!(!leases[1].grow_to(u64::from(REQUEST_BYTES_MAX)));
        leases[0].shrink_to(0);
        assert!(leases[1].grow_to(u64::from(REQUEST_BYTES_MAX)));
        let usage = budget.usage();
        assert!(usage.used_bytes <= usage.limit_bytes && usage.refused == 1, "{usage:?}");
        drop(leases);
        assert_eq!(budget.usage().used_bytes, 0);
    }

    #[test]
    fn a_connection_that_waits_comes_before_one_that_grows() {
        let budget = MemoryBudget::new(0);
        let [holder, waiter, other] = [(); 3].map(|()| budget.admit().unwrap());
        let all = LIMIT_BYTES_MIN - 3 * SHARE_BYTES;
        assert!(holder.grow_to(all));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| waiter.wait_for(all, || false));
            while !holder.is_wanted() {
                thread::yield_now();
            }
            holder.shrink_to(all - CHUNK_BYTES);
            assert!(!other.grow_to(SHARE_BYTES + CHUNK_BYTES), "another one waits");
            holder.shrink_to(0);
            assert!(waiting.join().unwrap());
        });
        assert!(!budget.is_wanted() && budget.usage().waits == 1);
        waiter.shrink_to(0);
        assert!(!other.wait_for(u64::from(u32::MAX) * CHUNK_BYTES, || true), "it is over");
        assert!(other.grow_to(all));
    }
}

//! The memory of all NBD connections: one budget of bytes for the process.
//!
//! Every connection has [`SHARE_BYTES`] of the budget from its start to its end, so that a client
//! with small requests never waits for another one. A connection leases memory beyond its share in
//! chunks, keeps it while busy, and returns it when it is idle or another connection waits.
//! Connections wait in the order of their arrival, for at most [`WAIT_MAX`].
//!
//! ```text
//!  limit = connections x share + leased chunks + free
//! ```
//!
//! The budget changes when a connection starts, ends, grows beyond its share or returns memory;
//! never for an I/O.
#![allow(clippy::disallowed_types)] // A queue that is entered only where memory is short.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_sync::atomics::{AtomicU32, Ordering};
use blockyard_sync::counter::Counter;
use blockyard_sync::tag_budget::TagBudget;

use crate::nbd::exports::REQUEST_BYTES_MAX;

/// The unit of leases, in bytes.
const CHUNK_BYTES: u64 = 64 << 10;

/// The share of each connection, in bytes: requests up to half of it need no lease.
pub const SHARE_BYTES: u64 = 512 << 10;

/// The bytes that shares never take: the longest request with its overhead.
const LONGEST_BYTES: u64 = REQUEST_BYTES_MAX as u64 + (2 << 20);

/// The smallest budget, in bytes: the longest request and a dozen connections.
pub const LIMIT_BYTES_MIN: u64 = LONGEST_BYTES + 12 * SHARE_BYTES;

/// The budget of a process with enough memory, in bytes.
const LIMIT_BYTES_DEFAULT: u64 = 256 << 20;

/// The longest wait of a request for memory before it is refused with `ENOMEM`.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(30);

/// The default time for which a connection may hold leased memory for a client that does not read
/// or send, while another connection waits for memory.
const STALL_MAX: Duration = Duration::from_secs(10);

/// A budget for the buffers of NBD connections.
#[derive(Debug)]
pub struct MemoryBudget {
    chunks: TagBudget,
    limit_chunks: u32,
    stall_max: Duration,
    /// The number of waiting connections, readable without the lock.
    waiting: AtomicU32,
    queue: Mutex<Queue>,
    /// Notified when chunks are returned.
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
    /// The limit for all connections together, in bytes.
    pub limit_bytes: u64,
    /// The bytes that connections hold now: their shares and their leases.
    pub used_bytes: u64,
    /// How often a connection waited for memory.
    pub waits: u64,
    /// Connections and requests that were refused because of the limit.
    pub refused: u64,
}

impl MemoryBudget {
    /// A budget of `limit_bytes`, at least [`LIMIT_BYTES_MIN`].
    pub fn new(limit_bytes: u64) -> Arc<MemoryBudget> {
        MemoryBudget::with_stall_max(limit_bytes, STALL_MAX)
    }

    /// A budget as [`MemoryBudget::new`] makes it. A client is cut off if it has held leased memory
    /// for `stall_max` without reading or sending, while another client waits.
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

    /// The budget of a process that may use `bytes` of memory: a quarter of them, at most 256 MiB.
    pub fn for_memory(bytes: u64) -> Arc<MemoryBudget> {
        MemoryBudget::new((bytes / 4).min(LIMIT_BYTES_DEFAULT))
    }

    /// The longest sleep of a thread in a send or a receive before it checks whether another client
    /// waits for the memory of its connection. Never zero, which a socket takes for no timeout.
    pub(crate) fn blocked_max(&self) -> Duration {
        (self.stall_max / 2).max(Duration::from_millis(1))
    }

    /// The present use.
    pub fn usage(&self) -> MemoryUse {
        let chunks = |chunks: u32| u64::from(chunks) * CHUNK_BYTES;
        MemoryUse {
            limit_bytes: chunks(self.limit_chunks),
            used_bytes: chunks(self.limit_chunks - self.chunks.free().min(self.limit_chunks)),
            waits: self.waits.get(),
            refused: self.refused.get(),
        }
    }

    /// The share of one more connection; `None` if there is none left.
    pub(crate) fn admit(self: &Arc<MemoryBudget>) -> Option<Lease> {
        let (share, longest) = (chunks_of(SHARE_BYTES), chunks_of(LONGEST_BYTES));
        // The longest request must fit, however many connections there are.
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

    /// Takes this many chunks, or none.
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
            // Waiters check periodically too, so one that starts to wait just now misses little.
            self.given.notify_all();
        }
    }

    /// Whether a connection waits for memory.
    fn is_wanted(&self) -> bool {
        // Relaxed: a hint; it publishes no data.
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

/// The number of chunks for this many bytes.
fn chunks_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(CHUNK_BYTES)).unwrap_or(u32::MAX)
}

/// The memory of one connection. Its thread changes it, other threads read it.
#[derive(Debug)]
pub(crate) struct Lease {
    budget: Arc<MemoryBudget>,
    held: AtomicU32,
}

impl Lease {
    fn held(&self) -> u32 {
        // Relaxed: only the connection's own thread writes it.
        self.held.load(Ordering::Relaxed)
    }

    /// The bytes that the connection may use.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.held()) * CHUNK_BYTES
    }

    /// Extends the lease to this many bytes, if chunks are free and no other connection waits.
    #[cold]
    pub(crate) fn grow_to(&self, bytes: u64) -> bool {
        let missing = chunks_of(bytes).saturating_sub(self.held());
        if missing > 0 && (self.budget.is_wanted() || !self.budget.take(missing)) {
            return false;
        }
        self.held.store(self.held() + missing, Ordering::Relaxed);
        true
    }

    /// Waits until the lease covers this many bytes; `false` after a timeout, or if `is_over` says
    /// that they are no longer needed.
    #[cold]
    pub(crate) fn wait_for(&self, bytes: u64, is_over: impl Fn() -> bool) -> bool {
        let (missing, budget) = (chunks_of(bytes).saturating_sub(self.held()), &*self.budget);
        let deadline = Instant::now() + WAIT_MAX;
        budget.waits.add(1);
        // Relaxed, here and below: a hint, as in `is_wanted`.
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
        // The next waiter may find enough chunks.
        budget.given.notify_all();
        match got {
            true => self.held.store(self.held() + missing, Ordering::Relaxed),
            false => budget.refused.add(1),
        }
        got
    }

    /// Returns the chunks beyond this many bytes and beyond the share.
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

    /// The value of [`MemoryBudget::blocked_max`].
    pub(crate) fn blocked_max(&self) -> Duration {
        self.budget.blocked_max()
    }
}

/// The time since when a connection's client has not read or not sent.
#[derive(Debug, Default)]
pub(crate) struct Stall(Option<Instant>);

impl Stall {
    /// Notes that the client still does not read or send.
    ///
    /// # Errors
    /// If the connection must be cut off: it has held leased memory for the stall time, and another
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

    /// Notes that the client has read or sent.
    #[inline]
    pub(crate) fn end(&mut self) {
        self.0 = None;
    }
}

/// The interval at which a waiter checks whether to go on waiting.
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

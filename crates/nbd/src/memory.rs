//! The memory of all NBD connections: one budget of bytes for the process.
//!
//! ```text
//!  limit = reserved for shares + pool of leases
//!          every connection      what connections need beyond their shares,
//!          has SHARE_BYTES       in chunks of 64 KiB
//! ```
//!
//! A connection has its share from its start to its end, so a client with small requests never
//! waits for another one, and leases never keep a new client out. A connection leases memory
//! beyond its share, keeps it while busy, and returns it when it is idle or another one waits.
//!
//! The *fair share* of a connection is its share and an equal part of the pool:
//! `SHARE_BYTES + pool / connections`. A lease within the fair share may take the last free chunk;
//! a larger one leaves a reserve. A connection that does not get what it needs waits:
//!
//! ```text
//!                  grow_to                      shrink_to
//!   SHARE ONLY ───────────────────▸ LEASED ───────────────────▸ SHARE ONLY
//!      │                             ▴   │ note_blocked: the client does not read or send
//!      │ grow_to refused             │   ▾
//!      ▾          it is the first    │  BLOCKED ──▸ LEASED  (note_moved)
//!   WAITING ──────────────────────── ┘   │ evict: a waiter lacks memory
//!      │ WAIT_MAX: ENOMEM                ▾
//!      ▾                                EVICTED: disconnected, all memory returned
//!   SHARE ONLY
//! ```
//!
//! 1. Waiters within their fair share come first, in the order of arrival; larger ones after them,
//!    the smallest first. The first waiter alone takes memory and evicts.
//! 2. While a connection waits, no other lease grows, and connections return what they lease as
//!    soon as their requests are answered.
//! 3. A waiter within its fair share evicts connections that have been blocked for [`GRACE`], a
//!    larger one those that have been blocked for `stall_max`; the largest lease first, and no more
//!    than it needs. So a client that stalls delays a client within its fair share by [`GRACE`] at
//!    most.
//!
//! The budget changes when a connection starts, ends, grows beyond its share or returns memory;
//! never for an I/O.
#![allow(clippy::disallowed_types)] // A queue that is entered only where memory is short.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use blockyard_sync::atomics::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use blockyard_sync::counter::Counter;
use blockyard_sync::tag_semaphore::TagSemaphore;

use crate::wire::REQUEST_BYTES_MAX;

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
/// or send, while another connection waits for more than its fair share.
const STALL_MAX: Duration = Duration::from_secs(10);

/// The time for which a connection may do so while another one lacks even its fair share. Longer
/// than the round trip of any network, so that a client that reads is never taken for a stalled
/// one.
const GRACE: Duration = Duration::from_secs(1);

/// The longest sleep of a thread in a receive before it checks whether another connection waits for
/// the memory of its own.
const BLOCKED_MAX: Duration = Duration::from_secs(1);

/// The interval at which the first waiter looks for connections to evict.
const FIRST_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The interval at which other waiters check whether they were cut.
const CUT_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// A budget for the buffers of NBD connections.
#[derive(Debug)]
pub struct MemoryBudget {
    limit_chunks: u32,
    /// The most connections for which there are shares.
    connections_max: u32,
    /// The free chunks of the pool; its users are the connections.
    pool: TagSemaphore,
    pool_chunks: u32,
    /// The free chunks that a lease beyond the fair share leaves to others.
    reserve_chunks: u32,
    stall_max: Duration,
    /// The start of the time stamps of blocked connections.
    epoch: Instant,
    /// The number of waiting connections, readable without the lock.
    waiting: AtomicU32,
    queue: Mutex<Queue>,
    waits: Counter,
    refused: Counter,
}

#[derive(Debug, Default)]
struct Queue {
    /// The accounts of all connections.
    accounts: Vec<Arc<Account>>,
    waiters: Vec<Waiter>,
    next_ticket: u64,
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    /// The chunks that its connection will hold.
    wanted: u32,
    thread: Thread,
}

/// A connection as the waiters of other connections see it.
#[derive(Default)]
struct Account {
    /// The chunks that it holds, its share included. Only its own thread writes them.
    held: AtomicU32,
    /// The time since when its client has not read or sent, in milliseconds after the epoch; 0 if
    /// it is not blocked.
    blocked_since_ms: AtomicU64,
    evicted: AtomicBool,
    /// Disconnects the client.
    cut: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Account").field("held", &self.held).finish_non_exhaustive()
    }
}

impl Account {
    // Relaxed, here and below: each value stands alone and publishes no other data.
    fn held(&self) -> u32 {
        self.held.load(Ordering::Relaxed)
    }

    /// The chunks that it holds beyond its share.
    fn leased(&self) -> u32 {
        self.held().saturating_sub(SHARE_CHUNKS)
    }

    fn is_evicted(&self) -> bool {
        self.evicted.load(Ordering::Relaxed)
    }

    fn is_blocked_since(&self, before_ms: u64) -> bool {
        (1..=before_ms).contains(&self.blocked_since_ms.load(Ordering::Relaxed))
    }
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
    /// for `stall_max` without reading or sending, while another client waits; sooner if the other
    /// one lacks even its fair share.
    pub fn with_stall_max(limit_bytes: u64, stall_max: Duration) -> Arc<MemoryBudget> {
        let limit = u32::try_from(limit_bytes.max(LIMIT_BYTES_MIN) / CHUNK_BYTES);
        let limit_chunks = limit.unwrap_or(u32::MAX);
        let longest = chunks_of(LONGEST_BYTES);
        // Half of the budget at most, and what the longest request leaves.
        let connections_max = (limit_chunks - longest).min(limit_chunks / 2) / SHARE_CHUNKS;
        let pool_chunks = limit_chunks - connections_max * SHARE_CHUNKS;
        Arc::new(MemoryBudget {
            limit_chunks,
            connections_max,
            pool: TagSemaphore::new(pool_chunks),
            pool_chunks,
            // The longest request fits, however many connections there are.
            reserve_chunks: (pool_chunks / 4).min(pool_chunks - longest),
            stall_max,
            epoch: Instant::now(),
            waiting: AtomicU32::new(0),
            queue: Mutex::default(),
            waits: Counter::default(),
            refused: Counter::default(),
        })
    }

    /// The budget of a process that may use `bytes` of memory: a quarter of them, at most 256 MiB.
    pub fn for_memory(bytes: u64) -> Arc<MemoryBudget> {
        MemoryBudget::new((bytes / 4).min(LIMIT_BYTES_DEFAULT))
    }

    /// The longest sleep of a thread in a receive before it checks whether another client waits for
    /// the memory of its connection. Never zero, which a socket takes for no timeout.
    pub(crate) fn blocked_max(&self) -> Duration {
        (self.stall_max / 2).clamp(Duration::from_millis(1), BLOCKED_MAX)
    }

    /// The present use.
    pub fn usage(&self) -> MemoryUse {
        let shares = self.pool.users().min(self.connections_max) * SHARE_CHUNKS;
        let leased = self.pool_chunks - self.pool.free().min(self.pool_chunks);
        MemoryUse {
            limit_bytes: u64::from(self.limit_chunks) * CHUNK_BYTES,
            used_bytes: u64::from(shares + leased) * CHUNK_BYTES,
            waits: self.waits.get(),
            refused: self.refused.get(),
        }
    }

    /// The share of one more connection; `None` if there is none left.
    pub(crate) fn admit(self: &Arc<MemoryBudget>) -> Option<Lease> {
        self.pool.join();
        if self.pool.users() > self.connections_max {
            self.pool.leave();
            self.refused.add(1);
            return None;
        }
        let account = Account { held: AtomicU32::new(SHARE_CHUNKS), ..Account::default() };
        let account = Arc::new(account);
        self.queue().accounts.push(Arc::clone(&account));
        Some(Lease { budget: Arc::clone(self), account })
    }

    /// The chunks that each connection may hold while others wait.
    fn fair_chunks(&self) -> u32 {
        SHARE_CHUNKS + self.pool_chunks / self.pool.users().max(1)
    }

    /// The free chunks that a connection that is to hold this many leaves to others.
    fn reserve_for(&self, wanted: u32) -> u32 {
        if wanted > self.fair_chunks() { self.reserve_chunks } else { 0 }
    }

    /// Takes this many chunks for a connection that will then hold `wanted`, or none.
    fn take(&self, chunks: u32, wanted: u32) -> bool {
        let taken = self.pool.take(chunks);
        if taken == chunks && self.pool.free() >= self.reserve_for(wanted) {
            return true;
        }
        self.pool.give(taken);
        false
    }

    fn give(&self, chunks: u32) {
        self.pool.give(chunks);
        if chunks > 0 && self.is_wanted() {
            // The first waiter checks periodically too, so one that starts to wait just now misses
            // little.
            self.wake_first(&self.queue());
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

    /// The waiter that is served next.
    fn first<'a>(&self, queue: &'a Queue) -> Option<&'a Waiter> {
        let fair = self.fair_chunks();
        queue.waiters.iter().min_by_key(|waiter| (waiter.wanted.max(fair), waiter.ticket))
    }

    fn wake_first(&self, queue: &Queue) {
        if let Some(first) = self.first(queue) {
            first.thread.unpark();
        }
    }

    /// Marks the blocked connections whose leases the first waiter needs as evicted, and returns
    /// them. It lacks `missing` chunks until it holds `wanted`.
    fn evict(&self, queue: &Queue, missing: u32, wanted: u32) -> Vec<Arc<Account>> {
        let is_fair = wanted <= self.fair_chunks();
        let patience = if is_fair { self.stall_max.min(GRACE) } else { self.stall_max };
        let before_ms = self.now_ms().saturating_sub(patience.as_millis() as u64);
        let needed = missing.saturating_add(self.reserve_for(wanted));
        // Evicted connections return their memory when their threads end.
        let evicted = queue.accounts.iter().filter(|account| account.is_evicted());
        let mut coming = self.pool.free() + evicted.map(|account| account.leased()).sum::<u32>();
        let blocked = queue.accounts.iter().filter(|account| {
            account.leased() > 0 && !account.is_evicted() && account.is_blocked_since(before_ms)
        });
        let mut blocked: Vec<_> = blocked.cloned().collect();
        blocked.sort_by_key(|account| std::cmp::Reverse(account.leased()));
        blocked.retain(|account| {
            let is_needed = coming < needed;
            if is_needed {
                coming += account.leased();
                account.evicted.store(true, Ordering::Relaxed);
            }
            is_needed
        });
        blocked
    }

    /// The present time stamp, never 0.
    fn now_ms(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64 + 1
    }
}

impl Default for MemoryBudget {
    fn default() -> MemoryBudget {
        Arc::into_inner(MemoryBudget::new(LIMIT_BYTES_DEFAULT)).expect("nothing shares a new one")
    }
}

/// The share of each connection in chunks.
const SHARE_CHUNKS: u32 = (SHARE_BYTES / CHUNK_BYTES) as u32;

/// The number of chunks for this many bytes.
fn chunks_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(CHUNK_BYTES)).unwrap_or(u32::MAX)
}

/// The memory of one connection. Its thread changes it, other threads read it.
#[derive(Debug)]
pub(crate) struct Lease {
    budget: Arc<MemoryBudget>,
    account: Arc<Account>,
}

impl Lease {
    /// Sets the function that disconnects the client, for an eviction.
    pub(crate) fn cut_with(&self, cut: impl Fn() + Send + Sync + 'static) {
        // A connection has one client.
        let _ = self.account.cut.set(Box::new(cut));
    }

    fn add(&self, chunks: u32) {
        self.account.held.store(self.account.held() + chunks, Ordering::Relaxed);
    }

    /// The bytes that the connection may use.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.account.held()) * CHUNK_BYTES
    }

    /// Extends the lease to this many bytes, if chunks are free and no other connection waits.
    #[cold]
    pub(crate) fn grow_to(&self, bytes: u64) -> bool {
        let wanted = chunks_of(bytes);
        let missing = wanted.saturating_sub(self.account.held());
        if missing > 0 && (self.budget.is_wanted() || !self.budget.take(missing, wanted)) {
            return false;
        }
        self.add(missing);
        true
    }

    /// Waits until the lease covers this many bytes; `false` after a timeout, or if `is_over` says
    /// that they are no longer needed.
    #[cold]
    pub(crate) fn wait_for(&self, bytes: u64, is_over: impl Fn() -> bool) -> bool {
        let (wanted, budget) = (chunks_of(bytes), &*self.budget);
        let missing = wanted.saturating_sub(self.account.held());
        let deadline = Instant::now() + WAIT_MAX;
        budget.waits.add(1);
        // Relaxed, here and below: a hint, as in `is_wanted`.
        budget.waiting.fetch_add(1, Ordering::Relaxed);
        let mut queue = budget.queue();
        let ticket = queue.next_ticket;
        queue.next_ticket += 1;
        queue.waiters.push(Waiter { ticket, wanted, thread: thread::current() });
        let got = loop {
            let is_first = budget.first(&queue).is_some_and(|first| first.ticket == ticket);
            if is_first && budget.take(missing, wanted) {
                break true;
            }
            if Instant::now() >= deadline || is_over() {
                break false;
            }
            let evicted = if is_first { budget.evict(&queue, missing, wanted) } else { Vec::new() };
            drop(queue);
            // Without the lock: the last owner of a client returns its memory.
            evicted.iter().filter_map(|account| account.cut.get()).for_each(|cut| cut());
            drop(evicted);
            thread::park_timeout(if is_first { FIRST_CHECK_INTERVAL } else { CUT_CHECK_INTERVAL });
            queue = budget.queue();
        };
        queue.waiters.retain(|waiter| waiter.ticket != ticket);
        budget.waiting.fetch_sub(1, Ordering::Relaxed);
        // The next waiter may find enough chunks.
        budget.wake_first(&queue);
        drop(queue);
        match got {
            true => self.add(missing),
            false => budget.refused.add(1),
        }
        got
    }

    /// Returns the chunks beyond this many bytes and beyond the share.
    pub(crate) fn shrink_to(&self, bytes: u64) {
        let held = self.account.held();
        let keep = chunks_of(bytes.max(SHARE_BYTES)).min(held);
        self.account.held.store(keep, Ordering::Relaxed);
        self.budget.give(held - keep);
    }

    /// Whether the connection holds more than its share while another one waits.
    pub(crate) fn is_wanted(&self) -> bool {
        self.account.leased() > 0 && self.budget.is_wanted()
    }

    /// Notes that the thread is about to wait for a client that does not read or send.
    #[cold]
    pub(crate) fn note_blocked(&self) {
        let since = &self.account.blocked_since_ms;
        if self.account.leased() > 0 && since.load(Ordering::Relaxed) == 0 {
            since.store(self.budget.now_ms(), Ordering::Relaxed);
        }
    }

    /// Notes that the client has read or sent, or that the connection does not wait for it.
    #[inline]
    pub(crate) fn note_moved(&self) {
        let since = &self.account.blocked_since_ms;
        if since.load(Ordering::Relaxed) != 0 {
            since.store(0, Ordering::Relaxed);
        }
    }

    /// The error of a connection that was evicted.
    pub(crate) fn eviction(&self) -> Option<io::Error> {
        let what = "its client did not read or send, and another client waits for its memory";
        let is_evicted = self.account.is_evicted();
        is_evicted.then(|| io::Error::new(io::ErrorKind::TimedOut, what))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut queue = self.budget.queue();
        queue.accounts.retain(|account| !Arc::ptr_eq(account, &self.account));
        drop(queue);
        self.budget.pool.leave();
        self.budget.give(self.account.leased());
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
        let all = SHARE_BYTES + LONGEST_BYTES;
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

    #[test]
    fn large_leases_leave_a_reserve_and_never_keep_a_new_connection_out() {
        let budget = MemoryBudget::new(256 << 20);
        let first = budget.admit().unwrap();
        let mut others: Vec<_> = (1..200).map(|_| budget.admit().unwrap()).collect();
        let large = others.iter().filter(|lease| lease.grow_to(LONGEST_BYTES)).count();
        assert_eq!(large, 2);
        // The bytes of a read of 1 MiB with its overhead.
        assert!(first.grow_to((1 << 20) + CHUNK_BYTES));
        others.extend(std::iter::from_fn(|| budget.admit()));
        assert_eq!(others.len() + 1, 256);
    }

    /// The bug: waiters were served in the order of arrival, so a small read waited for the reads
    /// of 32 MiB of all clients before it.
    #[test]
    fn a_waiter_within_its_fair_share_comes_before_a_larger_one() {
        let budget = MemoryBudget::new(0);
        let [holder, large, small] = [(); 3].map(|()| budget.admit().unwrap());
        let all = SHARE_BYTES + LONGEST_BYTES;
        assert!(holder.grow_to(all));
        let waiters = |count| {
            while budget.queue().waiters.len() != count {
                thread::yield_now();
            }
        };
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| large.wait_for(all, || is_over.load(Ordering::Relaxed)));
            waiters(1);
            let served = scope.spawn(|| small.wait_for(SHARE_BYTES + CHUNK_BYTES, || false));
            waiters(2);
            holder.shrink_to(SHARE_BYTES + CHUNK_BYTES);
            assert!(served.join().unwrap(), "the larger one waits on");
            assert_eq!(budget.queue().waiters.len(), 1);
            is_over.store(true, Ordering::Relaxed);
            assert!(!waiting.join().unwrap());
        });
    }

    /// The bug: a read of 4 MiB, above the fair share of 60 clients, waited for 30 s, because the
    /// reads of 32 MiB of stalled clients came first.
    #[test]
    fn of_waiters_beyond_the_fair_share_the_smallest_is_served_first() {
        let budget = MemoryBudget::new(256 << 20);
        let fair = u64::from(budget.fair_chunks()) * CHUNK_BYTES;
        let waiter =
            |ticket, bytes| Waiter { ticket, wanted: chunks_of(bytes), thread: thread::current() };
        let (large, medium) = (waiter(0, 3 * fair), waiter(1, 2 * fair));
        let (first, small) = (waiter(2, fair), waiter(3, 1 << 20));
        let mut queue = Queue { waiters: vec![large, medium, first, small], ..Queue::default() };
        for ticket in [2, 3, 1, 0] {
            assert_eq!(budget.first(&queue).map(|waiter| waiter.ticket), Some(ticket));
            queue.waiters.retain(|waiter| waiter.ticket != ticket);
        }
    }

    #[test]
    fn a_waiter_within_its_fair_share_evicts_blocked_connections_and_no_others() {
        let budget = MemoryBudget::with_stall_max(0, Duration::ZERO);
        let [busy, blocked, waiter] = [(); 3].map(|()| budget.admit().unwrap());
        let half = SHARE_BYTES + LONGEST_BYTES / 2;
        assert!(busy.grow_to(half) && blocked.grow_to(half));
        blocked.note_blocked();
        let blocked = Mutex::new(Some(blocked));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| waiter.wait_for(SHARE_BYTES + CHUNK_BYTES, || false));
            let is_evicted = || {
                let blocked = blocked.lock().unwrap();
                blocked.as_ref().is_some_and(|lease| lease.eviction().is_some())
            };
            while !is_evicted() {
                thread::yield_now();
            }
            blocked.lock().unwrap().take();
            assert!(waiting.join().unwrap());
        });
        assert!(busy.eviction().is_none());
        busy.note_blocked();
        busy.note_moved();
        assert!(!busy.account.is_blocked_since(u64::MAX));
    }
}

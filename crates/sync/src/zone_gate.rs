//! Primitive: the ticket queues of the zone write plug.
//!
//! Protects   for each zone that is being written: which channel may write, and which tickets wait,
//!            in the order of arrival.
//! Why        a write must reach its zone after the previous one, and the two may come from
//!            different channels. A waiting request holds nothing that others need.
//! States     a zone without writers has no entry here. A channel enters with a *ticket*. The first
//!            ticket of a zone is granted, and each other one waits for the ticket before it. A
//!            channel whose ticket is the last of a zone adds its request to that ticket instead. A
//!            channel that leaves grants the next ticket by a message to its channel's *inbox*.
//! Order      rank GATE for a bucket of zones; the inbox has its own lock, a leaf, taken after the
//!            bucket is unlocked.
//! Common     one bucket lock to enter and one to leave, while no other channel writes to the zone;
//!            one load to check the inbox.
//! Cost       about 5 ns for either. A hand-over costs the inbox lock at both ends, and wakes the
//!            channel's thread if it sleeps.
//! Before     a bit per zone that is tried at dispatch, with the requests waiting in the scheduler
//!            and all of them checked again; in the lab.
//!
//! A channel's tickets are allocated at open and linked into the zones' queues in place. So nothing
//! is allocated later and no queue can be full: there are as many tickets as requests.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::atomics::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering};
pub use crate::event_count::Waker;
use crate::lock::Lock;
use crate::pad::Padded;
use crate::rank::ranks;
use crate::sync_cell::SyncCell;

/// The lock of a bucket in a model, where a spinning lock would add too many interleavings.
#[cfg(loom)]
type BucketLock = crate::sleep_lock::SleepLock<Bucket, { ranks::GATE }>;
/// The lock of a bucket.
#[cfg(not(loom))]
type BucketLock = crate::spin_lock::SpinLock<Bucket, { ranks::GATE }>;

/// Maximum number of buckets. Zones that are written concurrently seldom share one.
const BUCKETS_MAX: u32 = if cfg!(loom) { 1 } else { 256 };

/// The zone of a ticket that is in no queue.
const NO_ZONE: u32 = u32::MAX;

/// The queues of a device's zones.
#[derive(Debug)]
pub struct ZoneGate {
    buckets: Box<[Padded<BucketLock>]>,
}

/// The zones of one bucket that are being written: the first ticket of each, in a chain.
#[derive(Debug, Default)]
struct Bucket {
    first: Option<NonNull<Ticket>>,
}

// SAFETY: the pointers are followed only under the bucket's lock. They lead to tickets that do not
// move until they have been removed under that lock (`ChannelTickets::drop`).
unsafe impl Send for Bucket {}

/// A ticket: a place in the queue of at most one zone at a time.
#[derive(Debug)]
struct Ticket {
    inbox: Arc<Inbox>,
    number: u16,
    links: SyncCell<Links>,
}

// SAFETY: `links` is accessed only under the lock of the zone's bucket; the rest never changes.
unsafe impl Send for Ticket {}
// SAFETY: as for `Send`.
unsafe impl Sync for Ticket {}

/// The position of a ticket. Guarded by its zone's bucket.
#[derive(Clone, Copy, Debug)]
struct Links {
    zone: u32,
    /// The ticket after this one.
    next: Option<NonNull<Ticket>>,
    /// In a zone's first ticket: the last ticket of the zone.
    last: Option<NonNull<Ticket>>,
    /// In a zone's first ticket: the first ticket of the next zone in the bucket.
    chain: Option<NonNull<Ticket>>,
}

/// The result of entering a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entered {
    /// The zone was free: the ticket is granted.
    First,
    /// The ticket waits after others, until its inbox names it.
    Queued,
    /// The ticket was not needed: this one of the same channel is the zone's last.
    Joined(u16),
}

/// Tickets that were granted to a channel and not taken yet.
#[derive(Debug)]
struct Inbox {
    /// Whether the inbox holds tickets: a hint, so that an empty inbox costs a load.
    full: AtomicBool,
    numbers: Mutex<Vec<u16>>,
    posted: Condvar,
    /// Called without the lock, after the notification. Set before a ticket enters a queue.
    waker: OnceLock<Waker>,
}

impl Inbox {
    fn numbers(&self) -> MutexGuard<'_, Vec<u16>> {
        self.numbers.lock().expect("no holder panics: it pushes and pops within the capacity")
    }

    fn post(&self, number: u16) {
        let mut numbers = self.numbers();
        numbers.push(number);
        // Release: pairs with the Acquire in `take`.
        self.full.store(true, Ordering::Release);
        drop(numbers);
        self.posted.notify_one();
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    #[inline]
    fn take(&self) -> Option<u16> {
        // Acquire: pairs with the Release in `post`.
        if !self.full.load(Ordering::Acquire) {
            return None;
        }
        let mut numbers = self.numbers();
        let number = numbers.pop();
        // Relaxed: written under the lock, like the list itself.
        self.full.store(!numbers.is_empty(), Ordering::Relaxed);
        number
    }

    fn sleep(&self, at_most: Duration) {
        let numbers = self.numbers();
        if numbers.is_empty() {
            drop(self.posted.wait_timeout(numbers, at_most));
        }
    }
}

impl ZoneGate {
    /// Queues for `zones` zones, all of them free.
    pub fn new(zones: u32) -> Arc<ZoneGate> {
        let buckets = zones.clamp(1, BUCKETS_MAX).next_power_of_two();
        let bucket = |_| Padded(BucketLock::new(Bucket::default()));
        Arc::new(ZoneGate { buckets: (0..buckets).map(bucket).collect() })
    }

    #[inline]
    fn bucket(&self, zone: u32) -> &BucketLock {
        &self.buckets[zone as usize & (self.buckets.len() - 1)]
    }
}

/// Calls `f` with the links of a ticket.
///
/// # Safety
/// The ticket is alive, the caller holds its zone's bucket, and `f` accesses no other ticket.
#[inline]
unsafe fn links<R>(ticket: NonNull<Ticket>, f: impl FnOnce(&mut Links) -> R) -> R {
    // SAFETY: by this function's contract.
    unsafe { ticket.as_ref().links.with_mut(f) }
}

impl Bucket {
    /// The first ticket of a zone.
    ///
    /// # Safety
    /// This is the bucket of the zone, and the caller holds its lock.
    #[inline]
    unsafe fn find(&self, zone: u32) -> Option<NonNull<Ticket>> {
        let mut at = self.first;
        while let Some(ticket) = at {
            // SAFETY: a ticket in the chain is alive and belongs to this bucket.
            let found = unsafe { links(ticket, |links| *links) };
            if found.zone == zone {
                return at;
            }
            at = found.chain;
        }
        None
    }

    /// Replaces `ticket` in the chain by `other`.
    ///
    /// # Safety
    /// `ticket` is in the chain, and the caller holds the bucket's lock.
    unsafe fn replace(&mut self, ticket: NonNull<Ticket>, other: Option<NonNull<Ticket>>) {
        if self.first == Some(ticket) {
            self.first = other;
            return;
        }
        let mut at = self.first;
        while let Some(before) = at {
            // SAFETY: a ticket in the chain is alive and belongs to this bucket.
            at = unsafe {
                links(before, |links| {
                    let next = links.chain;
                    if next == Some(ticket) {
                        links.chain = other;
                        return None;
                    }
                    next
                })
            };
        }
    }

    /// Removes a zone's first ticket; returns the next one, which is now the first.
    ///
    /// # Safety
    /// `ticket` is the first of a zone of this bucket, and the caller holds the bucket's lock.
    #[inline]
    unsafe fn pop(&mut self, ticket: NonNull<Ticket>) -> Option<NonNull<Ticket>> {
        // SAFETY: by this function's contract; the tickets after the first one are alive, too.
        unsafe {
            let Links { next, last, chain, .. } = links(ticket, |links| *links);
            if let Some(next) = next {
                links(next, |links| (links.last, links.chain) = (last, chain));
            }
            self.replace(ticket, next.or(chain));
            next
        }
    }

    /// Removes a waiting ticket.
    ///
    /// # Safety
    /// `head` is the first ticket of the zone of `ticket`, `ticket` comes after it, and the caller
    /// holds the bucket's lock.
    unsafe fn unlink(&mut self, head: NonNull<Ticket>, ticket: NonNull<Ticket>) {
        let mut before = head;
        // SAFETY: the tickets between the first and the last are alive and belong to this bucket.
        unsafe {
            while let Some(next) = links(before, |links| links.next)
                && next != ticket
            {
                before = next;
            }
            let next = links(ticket, |links| links.next);
            links(before, |links| links.next = next);
            if next.is_none() {
                links(head, |links| links.last = Some(before));
            }
        }
    }
}

/// A channel's tickets and its inbox. It belongs to one thread at a time.
#[derive(Debug)]
pub struct ChannelTickets {
    gate: Arc<ZoneGate>,
    tickets: Arc<[Ticket]>,
    /// The zone of each ticket, or `NO_ZONE`.
    zones: Box<[u32]>,
    inbox: Arc<Inbox>,
}

impl ChannelTickets {
    /// Allocates `tickets` tickets for a channel.
    pub fn new(gate: &Arc<ZoneGate>, tickets: u16) -> ChannelTickets {
        let inbox = Arc::new(Inbox {
            full: AtomicBool::new(false),
            numbers: Mutex::new(Vec::with_capacity(tickets.into())),
            posted: Condvar::new(),
            waker: OnceLock::new(),
        });
        let ticket = |number| Ticket {
            inbox: Arc::clone(&inbox),
            number,
            links: SyncCell::new(Links { zone: NO_ZONE, next: None, last: None, chain: None }),
        };
        ChannelTickets {
            gate: Arc::clone(gate),
            tickets: (0..tickets).map(ticket).collect(),
            zones: vec![NO_ZONE; tickets.into()].into_boxed_slice(),
            inbox,
        }
    }

    #[inline]
    fn ticket(&self, number: u16) -> NonNull<Ticket> {
        NonNull::from(&self.tickets[usize::from(number)])
    }

    /// Enters the queue of a zone with `spare`, a ticket that is in no queue.
    #[inline]
    pub fn enter(&mut self, zone: u32, spare: u16) -> Entered {
        debug_assert_eq!(self.zones[usize::from(spare)], NO_ZONE, "ticket {spare} is in use");
        let (me, inbox) = (self.ticket(spare), &self.inbox);
        let entered = self.gate.bucket(zone).with(|bucket| {
            // SAFETY: the bucket is the zone's and its lock is held. `me` is in no queue, so that
            // only this thread accesses its links; tickets in queues are alive.
            unsafe {
                let Some(head) = bucket.find(zone) else {
                    let chain = bucket.first.replace(me);
                    let new = Links { zone, next: None, last: Some(me), chain };
                    links(me, |links| *links = new);
                    return Entered::First;
                };
                let last = links(head, |links| links.last).unwrap_or(head);
                if Arc::ptr_eq(&last.as_ref().inbox, inbox) {
                    return Entered::Joined(last.as_ref().number);
                }
                links(me, |links| *links = Links { zone, next: None, last: None, chain: None });
                links(last, |links| links.next = Some(me));
                links(head, |links| links.last = Some(me));
                Entered::Queued
            }
        });
        if !matches!(entered, Entered::Joined(_)) {
            self.zones[usize::from(spare)] = zone;
        }
        entered
    }

    /// Releases a granted ticket. Returns the next ticket if it belongs to this channel; notifies
    /// another channel.
    #[inline]
    pub fn leave(&mut self, number: u16) -> Option<u16> {
        let zone = std::mem::replace(&mut self.zones[usize::from(number)], NO_ZONE);
        let me = self.ticket(number);
        let next = self.gate.bucket(zone).with(|bucket| {
            // SAFETY: the bucket is the zone's and its lock is held; a granted ticket is the first.
            unsafe {
                debug_assert_eq!(bucket.find(zone), Some(me), "ticket {number} has no turn");
                bucket.pop(me).map(|next| heir(next))
            }
        });
        let (inbox, next) = next?;
        if Arc::ptr_eq(&inbox, &self.inbox) {
            return Some(next);
        }
        inbox.post(next);
        None
    }

    /// Takes a waiting ticket that has been granted.
    #[inline]
    pub fn granted(&mut self) -> Option<u16> {
        self.inbox.take()
    }

    /// Sets a waker that is called whenever a ticket is granted; returns `false` if one was set
    /// before.
    pub fn set_waker(&mut self, waker: Waker) -> bool {
        self.inbox.waker.set(waker).is_ok()
    }

    /// Sleeps until a ticket may have been granted, for `at_most` at most.
    pub fn sleep(&self, at_most: Duration) {
        self.inbox.sleep(at_most);
    }

    /// Removes a ticket from its queue, whether it is granted or waits.
    fn withdraw(&mut self, number: u16) {
        let zone = std::mem::replace(&mut self.zones[usize::from(number)], NO_ZONE);
        if zone == NO_ZONE {
            return;
        }
        let me = self.ticket(number);
        let next = self.gate.bucket(zone).with(|bucket| {
            // SAFETY: the bucket is the zone's and its lock is held; the ticket is in its queue, so
            // that there is a first one.
            unsafe {
                let head = bucket.find(zone)?;
                if head == me {
                    return bucket.pop(me).map(|next| heir(next));
                }
                bucket.unlink(head, me);
                None
            }
        });
        if let Some((inbox, number)) = next {
            inbox.post(number);
        }
    }
}

/// The inbox and number of a ticket that is now granted. Its owner may be dropped as soon as the
/// lock is released.
///
/// # Safety
/// The ticket is in a queue whose bucket's lock the caller holds.
unsafe fn heir(ticket: NonNull<Ticket>) -> (Arc<Inbox>, u16) {
    // SAFETY: a ticket in a queue is alive.
    let ticket = unsafe { ticket.as_ref() };
    (Arc::clone(&ticket.inbox), ticket.number)
}

/// Removes all tickets, so that no ticket waits for a channel that is gone.
impl Drop for ChannelTickets {
    fn drop(&mut self) {
        for number in 0..self.tickets.len() {
            self.withdraw(number as u16);
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn seats<const N: usize>() -> (Arc<ZoneGate>, [ChannelTickets; N]) {
        let gate = ZoneGate::new(1000);
        let seats = [(); N].map(|()| ChannelTickets::new(&gate, 4));
        (gate, seats)
    }

    #[test]
    fn tickets_are_granted_in_order_and_last_one_is_extended() {
        let (_gate, [mut a, mut b]) = seats();
        assert_eq!(a.enter(7, 0), Entered::First);
        assert_eq!(a.enter(7, 1), Entered::Joined(0));
        assert_eq!(b.enter(7, 3), Entered::Queued);
        assert_eq!(b.enter(7, 2), Entered::Joined(3));
        // It cannot join its own first ticket any more, because another channel entered in between.
        assert_eq!(a.enter(7, 1), Entered::Queued);
        assert_eq!(b.enter(7, 0), Entered::Queued);
        assert_eq!((a.granted(), b.granted()), (None, None));
        assert_eq!(a.leave(0), None);
        assert_eq!((b.granted(), b.granted()), (Some(3), None));
        assert_eq!(b.leave(3), None);
        assert_eq!(a.granted(), Some(1));
        assert_eq!(a.leave(1), None);
        assert_eq!(b.granted(), Some(0));
        assert_eq!(b.leave(0), None);
        assert_eq!(b.enter(7, 0), Entered::First);
    }

    #[test]
    fn waker_is_called_for_each_ticket_of_another_channel() {
        let (_gate, [mut a, mut b]) = seats();
        let (tell, told) = std::sync::mpsc::channel();
        assert!(b.set_waker(Waker::new(move || tell.send(()).unwrap())));
        assert!(!b.set_waker(Waker::new(|| ())), "the inbox already has a waker");
        for _ in 0..2 {
            assert_eq!(a.enter(7, 0), Entered::First);
            assert_eq!(b.enter(7, 0), Entered::Queued);
            assert!(told.try_recv().is_err());
            assert_eq!(a.leave(0), None);
            assert!(told.try_recv().is_ok());
            assert_eq!(b.granted(), Some(0));
            assert_eq!(b.leave(0), None);
            assert!(told.try_recv().is_err(), "its own turns are no news");
        }
    }

    #[test]
    fn zones_of_one_bucket_are_independent() {
        let (_gate, [mut a, mut b]) = seats();
        for (ticket, zone) in [3, 3 + 256, 3 + 512].into_iter().enumerate() {
            assert_eq!(a.enter(zone, ticket as u16), Entered::First);
            assert_eq!(b.enter(zone, ticket as u16), Entered::Queued);
        }
        for ticket in [1, 0, 2] {
            assert_eq!(a.leave(ticket), None);
            assert_eq!(b.granted(), Some(ticket));
        }
        for ticket in [2, 0, 1] {
            assert_eq!(b.leave(ticket), None);
        }
        assert_eq!(a.enter(3 + 256, 1), Entered::First);
    }

    #[test]
    fn dropped_channel_leaves_queue_intact() {
        let (_gate, [mut a, mut b, mut c]) = seats();
        assert_eq!(a.enter(1, 0), Entered::First);
        assert_eq!(b.enter(1, 0), Entered::Queued);
        assert_eq!(c.enter(1, 0), Entered::Queued);
        drop(b);
        assert_eq!(a.enter(1, 1), Entered::Queued);
        drop(a);
        assert_eq!(c.granted(), Some(0));
        assert_eq!(c.enter(1, 1), Entered::Joined(0));
        assert_eq!(c.leave(0), None);
        assert_eq!(c.enter(1, 1), Entered::First);
    }

    #[test]
    fn four_threads_all_get_their_tickets() {
        let (gate, []) = seats();
        let inside = crate::atomics::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut seat = ChannelTickets::new(&gate, 2);
                    for round in 0..2000 {
                        let zone = round % 3;
                        if seat.enter(zone, 0) == Entered::Queued {
                            while seat.granted().is_none() {
                                seat.sleep(Duration::from_secs(60));
                            }
                        }
                        let bit = 1 << zone;
                        assert_eq!(inside.fetch_xor(bit, Ordering::AcqRel) & bit, 0);
                        assert_eq!(inside.fetch_xor(bit, Ordering::AcqRel) & bit, bit);
                        assert_eq!(seat.leave(0), None);
                    }
                });
            }
        });
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;

    fn turn(seat: &mut ChannelTickets, inside: &SyncCell<u32>) {
        if seat.enter(0, 0) == Entered::Queued {
            while seat.granted().is_none() {
                seat.sleep(Duration::from_secs(60));
            }
        }
        // SAFETY: the granted ticket excludes others; loom checks it.
        unsafe { inside.with_mut(|count| *count += 1) };
        assert_eq!(seat.leave(0), None);
    }

    struct Shared(SyncCell<u32>);
    // SAFETY: only the holder of the granted ticket accesses it; loom checks it.
    unsafe impl Sync for Shared {}
    // SAFETY: as for `Sync`.
    unsafe impl Send for Shared {}

    /// Granted tickets exclude each other, and each is passed on.
    #[test]
    fn tickets_exclude_each_other_and_wake_all() {
        loom::model(|| {
            let gate = ZoneGate::new(1);
            let inside = Arc::new(Shared(SyncCell::new(0)));
            let other = {
                let (gate, inside) = (Arc::clone(&gate), Arc::clone(&inside));
                loom::thread::spawn(move || {
                    let mut seat = ChannelTickets::new(&gate, 1);
                    turn(&mut seat, &inside.0);
                    turn(&mut seat, &inside.0);
                })
            };
            turn(&mut ChannelTickets::new(&gate, 1), &inside.0);
            other.join().unwrap();
            // SAFETY: the other thread has ended.
            assert_eq!(unsafe { inside.0.with_mut(|count| *count) }, 3);
        });
    }

    /// A channel is dropped while it waits, concurrently with the channel that grants it the zone.
    #[test]
    fn dropped_channel_hands_over_granted_tickets() {
        loom::model(|| {
            let gate = ZoneGate::new(1);
            let mut first = ChannelTickets::new(&gate, 1);
            let mut leaving = ChannelTickets::new(&gate, 1);
            let mut last = ChannelTickets::new(&gate, 1);
            assert_eq!(first.enter(0, 0), Entered::First);
            assert_eq!(leaving.enter(0, 0), Entered::Queued);
            assert_eq!(last.enter(0, 0), Entered::Queued);
            let leaver = loom::thread::spawn(move || drop(first));
            drop(leaving);
            while last.granted().is_none() {
                last.sleep(Duration::from_secs(60));
            }
            leaver.join().unwrap();
            assert_eq!(last.leave(0), None);
            assert_eq!(last.enter(0, 0), Entered::First);
        });
    }
}

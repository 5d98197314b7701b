//! Primitive: the read-modify-write lock.
//!
//! Protects   the blocks of a device from a lost update: the read-modify-write of one writer must
//!            not write back contents that another writer has replaced.
//! Why        a write of whole blocks must not pay for clients that write parts of blocks: it takes
//!            no lock unless a read-modify-write of the device waits or runs.
//! States     a slot of a writer is free (its end is 0) or holds the range of a write in flight.
//!            The queue holds the ranges of all read-modify-writes, and of the writes that wait for
//!            one, the oldest first.
//! Order      the queue's mutex is a leaf; no lock is taken under it. Writers wait without it.
//! Common     a write of whole blocks: two stores to memory of its own thread, a fence and a load
//!            for a batch of writes; a store at its end.
//! Cost       about 8 ns a batch for the fence and 1 ns a write; a read-modify-write takes the
//!            mutex three times and scans all writes in flight.
//! Before     a lock per file among writers of parts, which did not exclude a write of whole
//!            blocks.
//!
//! # Why it is sound
//! | write of whole blocks | read-modify-write |
//! | --- | --- |
//! | stores its range in its slot | puts its range in the queue, and adds 1 to the count |
//! | full fence | full fence |
//! | loads the count: if 0, it starts; else it checks the queue | loads all slots |
//! | overlaps in the queue: clears its slot, queues | overlaps in a slot: checks again later |
//!
//! One of the two fences comes first. If it is the writer's, the read-modify-write sees the slot
//! and waits until it is cleared. If it is the other, the writer sees the count.
//!
//! The queue is fair: a request waits for every earlier one that it overlaps, so that neither kind
//! starves. A slot is cleared with Release and scanned with Acquire: the write has completed before
//! the read-modify-write reads.

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use crate::atomics::{AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, fence};
use crate::pad::Padded;

/// A request in the queue.
#[derive(Debug)]
struct QueuedRange {
    number: u64,
    writer: u64,
    range: Range<u64>,
}

#[derive(Debug, Default)]
struct Queue {
    /// The number of the next request and of the next writer.
    next: u64,
    /// The requests, oldest first.
    places: Vec<QueuedRange>,
    writers: Vec<(u64, Arc<[WriteSlot]>, Arc<AtomicUsize>)>,
}

impl Queue {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// A write of whole blocks; in flight if its end is not 0.
#[derive(Debug)]
struct WriteSlot {
    start: AtomicU64,
    end: AtomicU64,
}

/// The lock of a device's blocks. All writers use the same unit for ranges.
#[derive(Debug)]
pub struct RmwLock {
    /// Number of requests in the queue.
    count: Padded<AtomicU64>,
    queue: Mutex<Queue>,
}

impl Default for RmwLock {
    fn default() -> RmwLock {
        RmwLock { count: Padded(AtomicU64::new(0)), queue: Mutex::new(Queue::default()) }
    }
}

impl RmwLock {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A writer with `slots` slots, for one thread.
    pub fn writer(self: &Arc<RmwLock>, slots: usize) -> Writer {
        let slot = || WriteSlot { start: AtomicU64::new(0), end: AtomicU64::new(0) };
        let slots: Arc<[WriteSlot]> = (0..slots).map(|_| slot()).collect();
        let used = Arc::new(AtomicUsize::new(0));
        let mut queue = self.queue();
        let number = queue.number();
        queue.writers.push((number, Arc::clone(&slots), Arc::clone(&used)));
        drop(queue);
        Writer { lock: Arc::clone(self), number, slots, used }
    }
}

/// A request in the queue, to be removed by [`Writer::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Turn(u64);

/// One thread's access to the lock. Dropping it releases all its slots and its requests in the
/// queue: none of these writes may be in flight then.
#[derive(Debug)]
pub struct Writer {
    lock: Arc<RmwLock>,
    number: u64,
    slots: Arc<[WriteSlot]>,
    /// All slots that were ever used are below this number.
    used: Arc<AtomicUsize>,
}

impl Writer {
    /// Puts a write of whole blocks into a free slot. It may start after [`Writer::may_start`] or
    /// [`Writer::start_or_queue`] has permitted it.
    #[inline]
    pub fn publish(&mut self, slot: usize, range: Range<u64>) {
        // Relaxed: only this thread stores it, and the fence of `may_start` orders it.
        if slot >= self.used.load(Ordering::Relaxed) {
            self.used.store(slot + 1, Ordering::Relaxed);
        }
        let slot = &self.slots[slot];
        // Release: pairs with the Acquire in `is_turn`: the previous write in this slot has ended.
        // The fence in `may_start` orders the range itself.
        slot.start.store(range.start, Ordering::Release);
        slot.end.store(range.end, Ordering::Release);
    }

    /// Whether all writes in the slots may start, because the queue is empty. Otherwise the caller
    /// must call [`Writer::start_or_queue`] for each write that was not started.
    #[inline]
    #[must_use]
    pub fn may_start(&self) -> bool {
        // Full: pairs with the fence in `is_turn`; see the head of this file.
        fence(Ordering::SeqCst);
        // Acquire: pairs with the Release in `leave`: requests that have left the queue are
        // complete.
        self.lock.count.0.load(Ordering::Acquire) == 0
    }

    /// Whether the write in a slot overlaps no request in the queue and may start. Otherwise moves
    /// it from its slot into the queue.
    pub fn start_or_queue(&mut self, slot: usize) -> Result<(), Turn> {
        // Relaxed: only this thread stores them.
        let start = self.slots[slot].start.load(Ordering::Relaxed);
        let range = start..self.slots[slot].end.load(Ordering::Relaxed);
        let mut queue = self.lock.queue();
        if !queue.places.iter().any(|place| overlap(&place.range, &range)) {
            return Ok(());
        }
        let turn = self.enqueue(&mut queue, range);
        drop(queue);
        self.clear(slot);
        Err(turn)
    }

    /// Publishes one write; returns `true` if it may start. If it overlaps a request in the queue,
    /// frees its slot and returns `false`.
    #[inline]
    #[must_use]
    pub fn try_start(&mut self, slot: usize, range: Range<u64>) -> bool {
        self.publish(slot, range);
        self.may_start() || self.may_start_in_queue(slot)
    }

    #[cold]
    fn may_start_in_queue(&mut self, slot: usize) -> bool {
        match self.start_or_queue(slot) {
            Ok(()) => true,
            Err(turn) => {
                self.leave(turn);
                false
            }
        }
    }

    /// Whether a slot holds a write.
    #[inline]
    pub fn is_published(&self, slot: usize) -> bool {
        // Relaxed: only this thread stores it.
        self.slots[slot].end.load(Ordering::Relaxed) != 0
    }

    /// Frees a slot whose write has completed or was not started.
    #[inline]
    pub fn clear(&mut self, slot: usize) {
        // Release: pairs with the Acquire in `is_turn`: the write has completed before.
        self.slots[slot].end.store(0, Ordering::Release);
    }

    /// Queues a read-modify-write.
    pub fn enter(&mut self, range: Range<u64>) -> Turn {
        let lock = Arc::clone(&self.lock);
        self.enqueue(&mut lock.queue(), range)
    }

    fn enqueue(&self, queue: &mut Queue, range: Range<u64>) -> Turn {
        let number = queue.number();
        queue.places.push(QueuedRange { number, writer: self.number, range });
        // Relaxed: the mutex orders the threads that change it, and the fence in `is_turn` orders
        // the others.
        self.lock.count.0.fetch_add(1, Ordering::Relaxed);
        Turn(number)
    }

    /// Whether a request in the queue may start: no earlier one overlaps it, and, for a
    /// read-modify-write, no write in flight overlaps it. Once `true`, it stays so until the
    /// request leaves.
    pub fn is_turn(&self, turn: Turn, kind: Kind) -> bool {
        let queue = self.lock.queue();
        let Some(own) = queue.places.iter().position(|place| place.number == turn.0) else {
            return true;
        };
        let range = &queue.places[own].range;
        if queue.places[..own].iter().any(|place| overlap(&place.range, range)) {
            return false;
        }
        if kind == Kind::WholeBlocks {
            return true;
        }
        // Full: pairs with the fence in `may_start`; see the head of this file.
        fence(Ordering::SeqCst);
        !queue.writers.iter().any(|(_, slots, used)| {
            slots[..used.load(Ordering::Relaxed)].iter().any(|slot| {
                // Acquire: pairs with the Release in `clear` and in the next `publish`.
                let end = slot.end.load(Ordering::Acquire);
                let start = slot.start.load(Ordering::Acquire);
                overlap(&(start..end), range)
            })
        })
    }

    /// Removes a request from the queue: it has completed, or will never start.
    pub fn leave(&mut self, turn: Turn) {
        let mut queue = self.lock.queue();
        let before = queue.places.len();
        queue.places.retain(|place| place.number != turn.0);
        self.shrunk(before - queue.places.len());
    }

    /// Subtracts removed requests from the count. The caller has locked the queue.
    fn shrunk(&self, by: usize) {
        // Release: pairs with the Acquire in `may_start`.
        self.lock.count.0.fetch_sub(by as u64, Ordering::Release);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let mut queue = self.lock.queue();
        let before = queue.places.len();
        queue.places.retain(|place| place.writer != self.number);
        self.shrunk(before - queue.places.len());
        queue.writers.retain(|(number, ..)| *number != self.number);
    }
}

/// The effect of a request in the queue on its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Replaces the blocks. Other writes of whole blocks may overlap it.
    WholeBlocks,
    /// Reads some of the blocks and writes them back.
    ReadModifyWrite,
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn read_modify_write_waits_only_for_overlapping_writes() {
        let lock = Arc::new(RmwLock::default());
        let (mut one, mut other) = (lock.writer(4), lock.writer(4));
        assert!(one.try_start(0, 0..8) && one.try_start(3, 16..24));
        let turn = other.enter(8..16);
        assert!(other.is_turn(turn, Kind::ReadModifyWrite));
        let later = other.enter(17..18);
        assert!(!other.is_turn(later, Kind::ReadModifyWrite));
        one.clear(3);
        assert!(other.is_turn(later, Kind::ReadModifyWrite));
        // A write to another block starts although the queue is not empty.
        assert!(one.try_start(1, 0..8) && !one.try_start(2, 8..16));
        assert!(one.is_published(1) && !one.is_published(2));
        other.leave(turn);
        assert!(one.try_start(2, 8..16));
    }

    #[test]
    fn requests_of_one_block_keep_order() {
        let lock = Arc::new(RmwLock::default());
        let mut writer = lock.writer(2);
        let first = writer.enter(0..8);
        writer.publish(0, 0..16);
        assert!(!writer.may_start());
        let second = writer.start_or_queue(0).unwrap_err();
        let third = writer.enter(8..16);
        assert!(writer.is_turn(first, Kind::ReadModifyWrite));
        assert!(!writer.is_turn(second, Kind::WholeBlocks));
        assert!(!writer.is_turn(third, Kind::ReadModifyWrite));
        writer.leave(first);
        assert!(writer.is_turn(second, Kind::WholeBlocks));
        assert!(!writer.is_turn(third, Kind::ReadModifyWrite));
        writer.leave(second);
        assert!(writer.is_turn(third, Kind::ReadModifyWrite));
    }

    #[test]
    fn dropped_writer_releases_slots_and_requests() {
        let lock = Arc::new(RmwLock::default());
        let (mut one, mut other) = (lock.writer(1), lock.writer(1));
        let _ = one.enter(0..8);
        assert!(!other.try_start(0, 0..8));
        drop(one);
        assert!(other.try_start(0, 0..8));
        let turn = other.enter(0..8);
        assert!(!other.is_turn(turn, Kind::ReadModifyWrite));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::atomics::spin_hint;
    use crate::sync_cell::SyncCell;

    /// A block; loom checks that no other thread accesses it during a write.
    struct Shared {
        lock: Arc<RmwLock>,
        block: SyncCell<u32>,
    }

    // SAFETY: only the thread whose request may run accesses the cell; loom checks that.
    #[allow(unsafe_code)]
    unsafe impl Sync for Shared {}
    // SAFETY: as for `Sync`.
    #[allow(unsafe_code)]
    unsafe impl Send for Shared {}

    impl Shared {
        #[allow(unsafe_code)]
        fn change(&self) {
            // SAFETY: the lock lets one writer in; loom checks it.
            unsafe { self.block.with_mut(|value| *value += 1) };
        }

        fn modify(&self, mut writer: Writer) {
            let turn = writer.enter(0..1);
            while !writer.is_turn(turn, Kind::ReadModifyWrite) {
                spin_hint();
            }
            self.change();
            writer.leave(turn);
        }

        fn write(&self, mut writer: Writer) {
            writer.publish(0, 0..1);
            if !writer.may_start()
                && let Err(turn) = writer.start_or_queue(0)
            {
                while !writer.is_turn(turn, Kind::WholeBlocks) {
                    spin_hint();
                }
                self.change();
                return writer.leave(turn);
            }
            self.change();
            writer.clear(0);
        }
    }

    fn check(run: impl Fn(Arc<Shared>, Writer, Writer) + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let lock = Arc::new(RmwLock::default());
            let (one, other) = (lock.writer(1), lock.writer(1));
            run(Arc::new(Shared { lock, block: SyncCell::new(0) }), one, other);
        });
    }

    #[test]
    fn whole_block_write_excludes_read_modify_write() {
        check(|shared, one, other| {
            let there = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || there.modify(one));
            shared.write(other);
            thread.join().unwrap();
            let writer = shared.lock.writer(1);
            shared.modify(writer);
        });
    }

    #[test]
    fn reused_slot_still_excludes() {
        check(|shared, one, mut other| {
            let there = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || there.modify(one));
            assert!(other.try_start(0, 7..8));
            other.clear(0);
            shared.write(other);
            thread.join().unwrap();
        });
    }

    #[test]
    fn two_read_modify_writes_exclude_each_other() {
        check(|shared, one, other| {
            let there = Arc::clone(&shared);
            let thread = loom::thread::spawn(move || there.modify(one));
            shared.modify(other);
            thread.join().unwrap();
        });
    }
}

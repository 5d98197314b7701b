//! A ring of the guest: the requests that it makes available, and the answers to them.
//!
//! Crate virtio-queue has the indexes and events of a split ring (VIRTIO 1.3, 2.7). Chains are read
//! here, because they are read again by their heads after a restart, and because the crate ends a
//! malformed one early. A chain is read once, into pieces of the guest's memory. A malformed chain
//! ends the service of its ring: a guess about what the driver meant could write to memory that the
//! guest uses.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::device::QUEUE_ENTRIES_MAX;
use crate::inflight::RingRecord;
use crate::memory::{GuestMap, GuestPiece};

/// Where a ring lies, as the hypervisor sets it up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingPlace {
    /// The number of entries: a power of two.
    pub(crate) entries: u16,
    /// The address of the descriptors in the hypervisor's process.
    pub(crate) descriptors: u64,
    /// The address of the ring of available chains.
    pub(crate) available: u64,
    /// The address of the ring of used chains.
    pub(crate) used: u64,
    /// The index of the next available chain.
    pub(crate) next_available: u16,
}

/// Why a ring is not served any more, or cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingFault(pub(crate) &'static str);

/// The buffers of one chain of descriptors.
#[derive(Debug)]
pub(crate) struct Chain {
    /// The index of the first descriptor, which names the chain in the answer.
    pub(crate) head: u16,
    /// What the device reads.
    pub(crate) readable: Vec<GuestPiece>,
    /// What the device writes.
    pub(crate) writable: Vec<GuestPiece>,
}

impl Chain {
    /// A chain of up to `pieces_max` pieces of each kind.
    pub(crate) fn new(pieces_max: usize) -> Chain {
        let pieces = || Vec::with_capacity(pieces_max);
        Chain { head: 0, readable: pieces(), writable: pieces() }
    }
}

/// A ring of the guest.
pub(crate) struct Virtqueue {
    queue: Queue,
    map: Arc<GuestMap>,
    record: Option<RingRecord>,
    /// The chains that were taken and not answered when the server ended.
    unanswered: VecDeque<u16>,
}

impl Virtqueue {
    /// A ring in the memory of a guest.
    ///
    /// # Errors
    /// If the ring does not lie in the memory, or is malformed.
    pub(crate) fn new(
        place: &RingPlace,
        map: Arc<GuestMap>,
        mut record: Option<RingRecord>,
        event_idx: bool,
    ) -> Result<Virtqueue, RingFault> {
        let outside = || RingFault("the ring does not lie in the memory of the guest");
        let address = |user| map.guest_of_user(user).ok_or_else(outside);
        let mut queue = Queue::new(place.entries)
            .map_err(|_| RingFault("the number of its entries is no power of two"))?;
        let (descriptors, available) = (address(place.descriptors)?, address(place.available)?);
        let used = address(place.used)?;
        queue
            .try_set_desc_table_address(descriptors)
            .and_then(|()| queue.try_set_avail_ring_address(available))
            .and_then(|()| queue.try_set_used_ring_address(used))
            .map_err(|_| RingFault("the ring is not aligned"))?;
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        if !queue.is_valid(&map.memory) {
            return Err(outside());
        }
        queue.set_next_avail(place.next_available);
        let used = queue.used_idx(&map.memory, Ordering::Acquire).map_err(|_| outside())?;
        queue.set_next_used(used.0);
        let unanswered = record.as_mut().and_then(|record| record.recover(used.0));
        if let Some(unanswered) = &unanswered {
            // A chain is answered, recorded, or the next one to take. A hypervisor whose server has
            // ended does not know the index.
            queue.set_next_avail(used.0.wrapping_add(unanswered.len() as u16));
        }
        let unanswered = unanswered.unwrap_or_default().into();
        Ok(Virtqueue { queue, map, record, unanswered })
    }

    /// The index of the next available chain.
    pub(crate) fn next_available(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Whether a chain is available.
    ///
    /// # Errors
    /// If the ring lies outside the guest's memory.
    pub(crate) fn has_available(&self) -> Result<bool, RingFault> {
        let available = self.queue.avail_idx(&self.map.memory, Ordering::Acquire);
        let available = available.map_err(|_| RingFault("its index cannot be read"))?.0;
        Ok(available != self.queue.next_avail())
    }

    /// Takes the next chain that the guest made available, or returns `false` if there is none.
    ///
    /// # Errors
    /// If the ring or the chain is malformed.
    pub(crate) fn take(&mut self, chain: &mut Chain) -> Result<bool, RingFault> {
        let memory = &self.map.memory;
        let available = self.queue.avail_idx(memory, Ordering::Acquire);
        let available = available.map_err(|_| RingFault("its index cannot be read"))?.0;
        let next = self.queue.next_avail();
        let waiting = available.wrapping_sub(next);
        if waiting == 0 {
            return Ok(false);
        }
        if waiting > self.queue.size() {
            return Err(RingFault("more chains are available than the ring has entries"));
        }
        let slot = self.queue.avail_ring() + 4 + 2 * u64::from(next % self.queue.size());
        let head: Result<u16, _> = memory.load(GuestAddress(slot), Ordering::Relaxed);
        let head = head.map_err(|_| RingFault("the next chain cannot be read"))?;
        // The guest must not make the same chain available again before it is answered.
        self.walk(u16::from_le(head), chain)?;
        if let Some(record) = &mut self.record {
            record.taken(chain.head);
        }
        self.queue.set_next_avail(next.wrapping_add(1));
        Ok(true)
    }

    /// Takes the next chain that was taken and not answered when the server ended. Returns `false`
    /// if there is none.
    ///
    /// # Errors
    /// If the chain is malformed.
    pub(crate) fn take_again(&mut self, chain: &mut Chain) -> Result<bool, RingFault> {
        match self.unanswered.pop_front() {
            Some(head) => self.walk(head, chain).map(|()| true),
            None => Ok(false),
        }
    }

    /// Reads the descriptors of a chain: VIRTIO 1.3, 2.7.5.
    fn walk(&self, head: u16, chain: &mut Chain) -> Result<(), RingFault> {
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        const INDIRECT: u16 = 4;
        chain.head = head;
        chain.readable.clear();
        chain.writable.clear();
        let (mut table, mut entries) = (self.queue.desc_table(), u32::from(self.queue.size()));
        let (mut next, mut left, mut is_indirect) = (head, entries, false);
        loop {
            if u32::from(next) >= entries {
                return Err(RingFault("a chain has a descriptor that does not exist"));
            }
            let Some(rest) = left.checked_sub(1) else {
                return Err(RingFault("a chain has more descriptors than its table"));
            };
            left = rest;
            let at = table.checked_add(16 * u64::from(next)).map(GuestAddress);
            let bytes = at.and_then(|at| self.map.memory.read_obj::<[u8; 16]>(at).ok());
            let bytes = bytes.ok_or(RingFault("a descriptor does not lie in the memory"))?;
            let word16 = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
            let from = u64::from_le_bytes(std::array::from_fn(|at| bytes[at]));
            let len = u32::from_le_bytes(std::array::from_fn(|at| bytes[8 + at]));
            let flags = word16(12);
            if flags & INDIRECT != 0 {
                // VIRTIO 1.3, 2.7.5.3.1: no table in a table, and no descriptor after it.
                let entries_max = u32::from(QUEUE_ENTRIES_MAX);
                let is_table = len.is_multiple_of(16) && (1..=entries_max).contains(&(len / 16));
                if is_indirect || flags & NEXT != 0 || !is_table {
                    return Err(RingFault("a table of descriptors is malformed"));
                }
                (table, entries, is_indirect) = (from, len / 16, true);
                (next, left) = (0, entries);
                continue;
            }
            let pieces = match flags & WRITE != 0 {
                true => &mut chain.writable,
                // VIRTIO 1.3, 2.7.4.2: what the device writes comes last.
                false if chain.writable.is_empty() => &mut chain.readable,
                false => return Err(RingFault("a buffer to read follows one to write")),
            };
            if !self.map.pieces(from, len.into(), pieces) {
                return Err(RingFault(
                    "a buffer does not lie in the memory of the guest, or there are too many",
                ));
            }
            if flags & NEXT == 0 {
                return Ok(());
            }
            next = word16(14);
        }
    }

    /// Answers a chain: the device wrote this many bytes.
    ///
    /// # Errors
    /// If the ring cannot be written.
    pub(crate) fn answer(&mut self, head: u16, written: u32) -> Result<(), RingFault> {
        if let Some(record) = &self.record {
            record.answering(head);
        }
        let added = self.queue.add_used(&self.map.memory, head, written);
        added.map_err(|_| RingFault("its answers cannot be written"))?;
        if let Some(record) = &self.record {
            record.answered(head, self.queue.next_used());
        }
        Ok(())
    }

    /// Whether the guest wants to be told about the answers since the last call.
    ///
    /// # Errors
    /// If the ring cannot be read.
    pub(crate) fn wants_call(&mut self) -> Result<bool, RingFault> {
        let wants = self.queue.needs_notification(&self.map.memory);
        wants.map_err(|_| RingFault("its event index cannot be read"))
    }

    /// Requests no kicks, or requests one for the next chain. Returns whether a chain is available
    /// already.
    ///
    /// # Errors
    /// If the ring cannot be written.
    pub(crate) fn request_kicks(&mut self, wanted: bool) -> Result<bool, RingFault> {
        let memory = &self.map.memory;
        let done = match wanted {
            true => self.queue.enable_notification(memory),
            false => self.queue.disable_notification(memory).map(|()| false),
        };
        done.map_err(|_| RingFault("its flags cannot be written"))
    }
}

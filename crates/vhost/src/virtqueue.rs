//! A ring of the guest: the requests that it makes available, and the answers to them.
//!
//! A split ring (VIRTIO 1.3, 2.7) has three parts, each of which lies in one region of memory:
//!
//! ```text
//! descriptors  16 bytes each: address u64 │ length u32 │ flags u16 │ next u16
//! available    flags u16 │ index u16 │ head u16 for each entry │ used event u16
//! used         flags u16 │ index u16 │ head u32, length u32 for each entry │ available event u16
//! ```
//!
//! The guest writes the available part and the device the used part. A chain is read once, into
//! pieces of the guest's memory. A malformed chain ends the service of its ring: a guess about what
//! the driver meant could write to memory that the guest uses.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use crate::device::QUEUE_ENTRIES_MAX;
use crate::inflight::RingRecord;
use crate::memory::{GuestMap, GuestPiece};

/// The length of a descriptor, in bytes.
const DESCRIPTOR_BYTES: u64 = 16;
/// Offsets in the available and the used part.
const FLAGS_AT: u64 = 0;
const INDEX_AT: u64 = 2;
const ENTRIES_AT: u64 = 4;
/// The lengths of an entry of the available and of the used part, in bytes.
const AVAILABLE_BYTES: u64 = 2;
const USED_BYTES: u64 = 8;
/// The length of an event index, which follows the entries, in bytes.
const EVENT_BYTES: u64 = 2;
/// The flag of either part by which its writer wants no notification.
const NO_NOTIFICATION: u16 = 1;

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
    map: Arc<GuestMap>,
    entries: u16,
    descriptors: GuestPiece,
    available: GuestPiece,
    used: GuestPiece,
    event_idx: bool,
    /// The index of the next available chain.
    next_available: u16,
    /// The guest's index, as it was read last: chains before it are available.
    seen_available: u16,
    /// The index of the next answer.
    next_used: u16,
    /// The answers that [`Virtqueue::wants_call`] has not considered.
    answers: u16,
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
        let entries = place.entries;
        if !entries.is_power_of_two() || entries > QUEUE_ENTRIES_MAX {
            return Err(RingFault("the number of its entries is no power of two"));
        }
        let part = |user, entry_bytes, extra_bytes, align| {
            let len = entry_bytes * u64::from(entries) + extra_bytes;
            let run: Option<GuestPiece> = map.run_of_user(user, len);
            let run = run.ok_or(RingFault("the ring does not lie in the memory of the guest"))?;
            // A mapping begins at a page.
            match run.offset.is_multiple_of(align) {
                true => Ok(run),
                false => Err(RingFault("the ring is not aligned")),
            }
        };
        // VIRTIO 1.3, 2.7: lengths and alignment.
        let descriptors = part(place.descriptors, DESCRIPTOR_BYTES, 0, 16)?;
        let extra_bytes = ENTRIES_AT + EVENT_BYTES;
        let available = part(place.available, AVAILABLE_BYTES, extra_bytes, 2)?;
        let used = part(place.used, USED_BYTES, extra_bytes, 4)?;
        let next_used = map.load(used, INDEX_AT, Ordering::Acquire);
        let mut next_available = place.next_available;
        let unanswered = record.as_mut().and_then(|record| record.recover(next_used));
        if let Some(unanswered) = &unanswered {
            // A chain is answered, recorded, or the next one to take. A hypervisor whose server has
            // ended does not know the index.
            next_available = next_used.wrapping_add(unanswered.len() as u16);
        }
        Ok(Virtqueue {
            map,
            entries,
            descriptors,
            available,
            used,
            event_idx,
            next_available,
            seen_available: next_available,
            next_used,
            answers: 0,
            record,
            unanswered: unanswered.unwrap_or_default().into(),
        })
    }

    /// The index of the next available chain.
    pub(crate) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// The number of chains that are available.
    pub(crate) fn waiting(&self) -> u16 {
        // Relaxed: `take` reads the index again before it reads a chain.
        let available = self.map.load(self.available, INDEX_AT, Ordering::Relaxed);
        available.wrapping_sub(self.next_available)
    }

    /// Takes the next chain that the guest made available, or returns `false` if there is none.
    ///
    /// # Errors
    /// If the ring or the chain is malformed.
    pub(crate) fn take(&mut self, chain: &mut Chain) -> Result<bool, RingFault> {
        let next = self.next_available;
        if self.seen_available == next {
            // Acquire: pairs with the guest's release of the index. The chains before it, and their
            // descriptors, are complete.
            self.seen_available = self.map.load(self.available, INDEX_AT, Ordering::Acquire);
            let waiting = self.seen_available.wrapping_sub(next);
            if waiting == 0 {
                return Ok(false);
            }
            if waiting > self.entries {
                return Err(RingFault("more chains are available than the ring has entries"));
            }
        }
        let slot = ENTRIES_AT + AVAILABLE_BYTES * u64::from(next % self.entries);
        let head = self.map.load(self.available, slot, Ordering::Relaxed);
        // The guest must not make the same chain available again before it is answered.
        self.walk(head, chain)?;
        if let Some(record) = &mut self.record {
            record.taken(chain.head);
        }
        self.next_available = next.wrapping_add(1);
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
        let (mut table, mut entries) = (self.descriptors, u32::from(self.entries));
        let (mut next, mut left, mut is_indirect) = (head, entries, false);
        loop {
            if u32::from(next) >= entries {
                return Err(RingFault("a chain has a descriptor that does not exist"));
            }
            let Some(rest) = left.checked_sub(1) else {
                return Err(RingFault("a chain has more descriptors than its table"));
            };
            left = rest;
            let bytes: [u8; 16] = self.map.copy_from(table, DESCRIPTOR_BYTES * u64::from(next));
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
                let run = self.map.run(from, len.into());
                table = run.ok_or(RingFault("a descriptor does not lie in the memory"))?;
                (entries, is_indirect) = (len / 16, true);
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

    /// Answers a chain, which the ring has: the device wrote this many bytes.
    pub(crate) fn answer(&mut self, head: u16, written: u32) {
        if let Some(record) = &self.record {
            record.answering(head);
        }
        let slot = ENTRIES_AT + USED_BYTES * u64::from(self.next_used % self.entries);
        let mut entry = [0; USED_BYTES as usize];
        entry[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        entry[4..].copy_from_slice(&written.to_le_bytes());
        self.map.copy_to(self.used, slot, &entry);
        self.next_used = self.next_used.wrapping_add(1);
        self.answers = self.answers.saturating_add(1);
        // Release: the guest that sees the index sees the entry, the data and the status.
        self.map.store(self.used, INDEX_AT, self.next_used, Ordering::Release);
        if let Some(record) = &self.record {
            record.answered(head, self.next_used);
        }
    }

    /// Whether the guest wants to be told about the answers since the last time.
    pub(crate) fn wants_call(&mut self) -> bool {
        let answers = std::mem::take(&mut self.answers);
        // SeqCst: the guest writes its wish and then reads the index of the answers; here the index
        // was written before the wish is read. So one of the two sees the other's write.
        fence(Ordering::SeqCst);
        if !self.event_idx {
            let flags = self.map.load(self.available, FLAGS_AT, Ordering::Relaxed);
            return flags & NO_NOTIFICATION == 0;
        }
        // VIRTIO 1.3, 2.7.7.2: the call is for the answer with this index.
        let at = ENTRIES_AT + AVAILABLE_BYTES * u64::from(self.entries);
        let event = self.map.load(self.available, at, Ordering::Relaxed);
        self.next_used.wrapping_sub(event).wrapping_sub(1) < answers
    }

    /// Requests no kicks, or requests one for the next chain. Returns whether a chain is available
    /// already.
    pub(crate) fn request_kicks(&mut self, wanted: bool) -> bool {
        match (self.event_idx, wanted) {
            (true, true) => {
                let at = ENTRIES_AT + USED_BYTES * u64::from(self.entries);
                self.map.store(self.used, at, self.next_available, Ordering::Relaxed);
            }
            // The guest kicks once after the index was set.
            (true, false) => return false,
            (false, _) => {
                let flags = if wanted { 0 } else { NO_NOTIFICATION };
                self.map.store(self.used, FLAGS_AT, flags, Ordering::Relaxed);
            }
        }
        if !wanted {
            return false;
        }
        // SeqCst: as in `wants_call`, with the guest's index of available chains.
        fence(Ordering::SeqCst);
        self.waiting() > 0
    }
}

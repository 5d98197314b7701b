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

use blockyard_sync::atomics::{Ordering, fence};

use crate::device::QUEUE_ENTRIES_MAX;
use crate::inflight::RingRecord;
use crate::memory::{GuestMap, GuestPiece, REGIONS_MAX};

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
/// The most answers that the guest does not see yet. A guest that waits for an answer sleeps, and
/// its wake-up costs more than many requests. But each store to the index takes the cache line from
/// the guest's processor, which reads it all the time.
const UNPUBLISHED_MAX: usize = 4;
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
    /// The table that the first descriptor refers to, if it lies in several regions.
    table: Vec<GuestPiece>,
}

impl Chain {
    /// A chain of up to `pieces_max` pieces of each kind.
    pub(crate) fn new(pieces_max: usize) -> Chain {
        let pieces = || Vec::with_capacity(pieces_max);
        let table = Vec::with_capacity(REGIONS_MAX);
        Chain { head: 0, readable: pieces(), writable: pieces(), table }
    }

    /// Reads the descriptors of a chain of the table `ring`: VIRTIO 1.3, 2.7.5. Each is read once.
    fn walk(&mut self, map: &GuestMap, ring: GuestPiece, head: u16) -> Result<(), RingFault> {
        self.head = head;
        self.readable.clear();
        self.writable.clear();
        // `None` for a table in several regions, which is `self.table` then.
        let mut table = Some(ring);
        // A ring has at most QUEUE_ENTRIES_MAX.
        let mut entries = (ring.len / DESCRIPTOR_BYTES) as u32;
        let (mut next, mut left, mut is_indirect) = (head, entries, false);
        loop {
            if u32::from(next) >= entries {
                return Err(RingFault("a chain has a descriptor that does not exist"));
            }
            let Some(rest) = left.checked_sub(1) else {
                return Err(RingFault("a chain has more descriptors than its table"));
            };
            left = rest;
            let at = DESCRIPTOR_BYTES * u64::from(next);
            let outside = RingFault("a table of descriptors does not lie in the memory");
            let bytes = match table {
                Some(run) => map.copy_from(run, at),
                None => map.read_fixed(&self.table, at).ok_or(outside)?,
            };
            let descriptor = ChainDescriptor::parse(bytes);
            let ChainDescriptor { from, len, flags, .. } = descriptor;
            if flags & ChainDescriptor::INDIRECT != 0 {
                // VIRTIO 1.3, 2.7.5.3.1: no table in a table, and no descriptor after it.
                let entries_max = u32::from(QUEUE_ENTRIES_MAX);
                let is_table = len.is_multiple_of(16) && (1..=entries_max).contains(&(len / 16));
                if is_indirect || flags & ChainDescriptor::NEXT != 0 || !is_table {
                    return Err(RingFault("a table of descriptors is malformed"));
                }
                table = map.run(from, len.into());
                self.table.clear();
                if table.is_none() && !map.pieces(from, len.into(), &mut self.table) {
                    return Err(outside);
                }
                (entries, is_indirect) = (len / 16, true);
                (next, left) = (0, entries);
                continue;
            }
            let pieces = match flags & ChainDescriptor::WRITE != 0 {
                true => &mut self.writable,
                // VIRTIO 1.3, 2.7.4.2: what the device writes comes last.
                false if self.writable.is_empty() => &mut self.readable,
                false => return Err(RingFault("a buffer to read follows one to write")),
            };
            if !map.pieces(from, len.into(), pieces) {
                return Err(RingFault(
                    "a buffer does not lie in the memory of the guest, or there are too many",
                ));
            }
            if flags & ChainDescriptor::NEXT == 0 {
                return Ok(());
            }
            next = descriptor.next;
        }
    }
}

/// A descriptor of a buffer, or of a table of descriptors.
#[derive(Clone, Copy, Debug)]
struct ChainDescriptor {
    /// The address in the guest.
    from: u64,
    /// The length in bytes.
    len: u32,
    flags: u16,
    /// The index of the next descriptor of the chain.
    next: u16,
}

impl ChainDescriptor {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;

    fn parse(bytes: [u8; DESCRIPTOR_BYTES as usize]) -> ChainDescriptor {
        let word16 = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        ChainDescriptor {
            from: u64::from_le_bytes(std::array::from_fn(|at| bytes[at])),
            len: u32::from_le_bytes(std::array::from_fn(|at| bytes[8 + at])),
            flags: word16(12),
            next: word16(14),
        }
    }
}

/// The buffers of a chain, as addresses in the guest and lengths in bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct ChainBuffers {
    /// What the device reads.
    pub readable: Vec<(u64, u64)>,
    /// What the device writes.
    pub writable: Vec<(u64, u64)>,
}

/// Reads the chain of descriptors with this head as a ring does, for the fuzzer, in a guest whose
/// memory is this image. A table of `entries` descriptors lies at address 0. A second region of
/// memory, next to the first one, begins after `first_bytes`.
///
/// # Errors
/// If the chain is malformed, or the table does not lie in the first region.
pub fn walk_image(
    image: &[u8],
    first_bytes: usize,
    entries: u16,
    head: u16,
) -> Result<ChainBuffers, String> {
    let map = GuestMap::of_image(image, first_bytes).map_err(|error| error.to_string())?;
    let ring = map.run(0, DESCRIPTOR_BYTES * u64::from(entries));
    let ring = ring.ok_or("the table does not lie in the first region")?;
    let mut chain = Chain::new(usize::from(QUEUE_ENTRIES_MAX));
    chain.walk(&map, ring, head).map_err(|RingFault(text)| text)?;
    let of = |pieces: &[GuestPiece]| pieces.iter().map(|it| (map.address(it), it.len)).collect();
    Ok(ChainBuffers { readable: of(&chain.readable), writable: of(&chain.writable) })
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
    /// The head of the last answer.
    last_answered: u16,
    /// The heads of the answers that the guest does not see yet.
    unpublished_heads: [u16; UNPUBLISHED_MAX],
    unpublished_count: usize,
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
        if !entries.is_power_of_two() {
            return Err(RingFault("the number of the ring's entries is no power of two"));
        }
        if entries > QUEUE_ENTRIES_MAX {
            return Err(RingFault("the ring has more than 1,024 entries"));
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
            last_answered: 0,
            unpublished_heads: [0; UNPUBLISHED_MAX],
            unpublished_count: 0,
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
        // Relaxed: `take` reads chains only up to an index that it read with Acquire.
        let available = self.map.load(self.available, INDEX_AT, Ordering::Relaxed);
        available.wrapping_sub(self.next_available)
    }

    /// Prefetches what the next chain and its answer need, of which the guest has written a part:
    /// the entry of the chain, its first descriptors if it has the head of the last answer, as with
    /// a driver that has one request in flight, and the event for the next call. One after the
    /// other these lines would take the time of several transfers between processors.
    #[inline]
    pub(crate) fn prefetch(&self) {
        let entry = AVAILABLE_BYTES * u64::from(self.next_available % self.entries);
        self.map.prefetch(self.available, ENTRIES_AT + entry);
        let head = self.last_answered % self.entries;
        self.map.prefetch(self.descriptors, DESCRIPTOR_BYTES * u64::from(head));
        if self.event_idx {
            let event = AVAILABLE_BYTES * u64::from(self.entries);
            self.map.prefetch(self.available, ENTRIES_AT + event);
        }
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
            let seen = self.map.load(self.available, INDEX_AT, Ordering::Acquire);
            let waiting = seen.wrapping_sub(next);
            if waiting == 0 {
                return Ok(false);
            }
            if waiting > self.entries {
                return Err(RingFault("more chains are available than the ring has entries"));
            }
            self.seen_available = seen;
        }
        let slot = ENTRIES_AT + AVAILABLE_BYTES * u64::from(next % self.entries);
        let head = self.map.load(self.available, slot, Ordering::Relaxed);
        // The guest must not make the same chain available again before it is answered.
        chain.walk(&self.map, self.descriptors, head)?;
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
            Some(head) => chain.walk(&self.map, self.descriptors, head).map(|()| true),
            None => Ok(false),
        }
    }

    /// Answers a chain, which the ring has: the device wrote this many bytes. The guest sees the
    /// answer after [`Virtqueue::publish`], or as one of a group of [`UNPUBLISHED_MAX`].
    pub(crate) fn answer(&mut self, head: u16, written: u32) {
        let slot = ENTRIES_AT + USED_BYTES * u64::from(self.next_used % self.entries);
        // Made in a register: to load what two stores have just put together would wait for all
        // stores before, and some of those wait for a cache line of the guest's processor.
        let entry = u64::from(head) | u64::from(written) << 32;
        self.map.copy_to(self.used, slot, entry.to_le_bytes());
        self.next_used = self.next_used.wrapping_add(1);
        self.answers = self.answers.saturating_add(1);
        self.last_answered = head;
        self.unpublished_heads[self.unpublished_count] = head;
        self.unpublished_count += 1;
        if self.unpublished_count == UNPUBLISHED_MAX {
            self.publish();
        }
    }

    /// Whether a chain is answered, and the guest does not see the answer yet. It must not make the
    /// chain available again before.
    #[inline]
    pub(crate) fn is_unpublished(&self, head: u16) -> bool {
        self.unpublished_heads[..self.unpublished_count].contains(&head)
    }

    /// Lets the guest see all answers.
    pub(crate) fn publish(&mut self) {
        if self.unpublished_count == 0 {
            return;
        }
        let heads = &self.unpublished_heads[..self.unpublished_count];
        if let Some(record) = &self.record {
            record.answering(heads);
        }
        // Release: the guest that sees the index sees the entries, the data and the statuses.
        self.map.store(self.used, INDEX_AT, self.next_used, Ordering::Release);
        if let Some(record) = &self.record {
            record.answered(heads, self.next_used);
        }
        self.unpublished_count = 0;
    }

    /// Whether there are answers since the last time, and the guest wants to be told about them. It
    /// must see all of them: [`Virtqueue::publish`].
    pub(crate) fn wants_call(&mut self) -> bool {
        debug_assert_eq!(self.unpublished_count, 0, "the guest sees all answers");
        let answers = std::mem::take(&mut self.answers);
        if answers == 0 {
            return false;
        }
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::inflight;
    use crate::memory::tests::map;

    const ENTRIES: u16 = 8;
    const REGION_BYTES: u64 = 0x4000;
    /// Where the guest's memory begins in the hypervisor's process.
    const USER: u64 = 0x7000_0000;
    /// Where the three parts of the ring lie in the guest.
    const AVAILABLE: u64 = 0x100;
    const USED: u64 = 0x200;
    /// Where the two events lie in the guest: that of the driver, and that of the device.
    const USED_EVENT: u64 = AVAILABLE + 4 + 2 * ENTRIES as u64;
    const AVAILABLE_EVENT: u64 = USED + 4 + 8 * ENTRIES as u64;

    const PLACE: RingPlace = RingPlace {
        entries: ENTRIES,
        descriptors: USER,
        available: USER + AVAILABLE,
        used: USER + USED,
        next_available: 0,
    };

    /// The driver's side of a ring, in two adjacent regions of memory.
    struct Driver {
        map: Arc<GuestMap>,
    }

    impl Driver {
        fn new() -> Driver {
            let second = map(REGION_BYTES, USER + REGION_BYTES, REGION_BYTES);
            let map = GuestMap::new(&[map(0, USER, REGION_BYTES), second]);
            Driver { map: Arc::new(map.unwrap()) }
        }

        fn get(&self, at: u64) -> u16 {
            self.map.load(self.map.run(at, 2).unwrap(), 0, Ordering::Acquire)
        }

        fn set(&self, at: u64, value: u16) {
            self.map.store(self.map.run(at, 2).unwrap(), 0, value, Ordering::Release);
        }

        fn put_descriptor(&self, at: u64, from: u64, len: u32, flags: u16, next: u16) {
            let mut bytes = [0; DESCRIPTOR_BYTES as usize];
            bytes[..8].copy_from_slice(&from.to_le_bytes());
            bytes[8..12].copy_from_slice(&len.to_le_bytes());
            bytes[12..14].copy_from_slice(&flags.to_le_bytes());
            bytes[14..].copy_from_slice(&next.to_le_bytes());
            let mut pieces = Vec::with_capacity(2);
            assert!(self.map.pieces(at, DESCRIPTOR_BYTES, &mut pieces));
            assert_eq!(self.map.write(&pieces, 0, &bytes), bytes.len());
        }

        /// Sets up a ring whose indexes begin at `base`, with chains of one buffer each.
        fn ring(&self, base: u16, event_idx: bool) -> Virtqueue {
            self.recorded_ring(base, event_idx, None)
        }

        fn recorded_ring(
            &self,
            base: u16,
            event_idx: bool,
            record: Option<RingRecord>,
        ) -> Virtqueue {
            for head in 0..ENTRIES {
                let from = 0x1000 + 0x100 * u64::from(head);
                self.put_descriptor(16 * u64::from(head), from, 1, ChainDescriptor::WRITE, 0);
            }
            self.set(AVAILABLE + 2, base);
            self.set(USED + 2, base);
            let place = RingPlace { next_available: base, ..PLACE };
            Virtqueue::new(&place, Arc::clone(&self.map), record, event_idx).unwrap()
        }

        /// Makes a chain available.
        fn offer(&self, head: u16) {
            let index = self.get(AVAILABLE + 2);
            self.set(AVAILABLE + 4 + 2 * u64::from(index % ENTRIES), head);
            self.set(AVAILABLE + 2, index.wrapping_add(1));
        }

        /// The answer with this index: the head of its chain, and the number of written bytes.
        fn answer(&self, index: u16) -> (u32, u32) {
            let at = USED + 4 + 8 * u64::from(index % ENTRIES);
            let bytes: [u8; 8] = self.map.copy_from(self.map.run(at, 8).unwrap(), 0);
            let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
            (word(0), word(4))
        }
    }

    fn chain() -> Chain {
        Chain::new(64)
    }

    /// Takes and answers all chains that are available, and returns their number.
    fn serve(ring: &mut Virtqueue) -> u16 {
        let (mut chain, mut count) = (chain(), 0);
        while ring.take(&mut chain).unwrap() {
            ring.answer(chain.head, 1);
            count += 1;
        }
        ring.publish();
        count
    }

    #[test]
    fn indexes_wrap_after_16_bits() {
        let driver = Driver::new();
        let mut ring = driver.ring(65_530, true);
        let (mut index, mut chain) = (65_530_u16, chain());
        for round in 0..20_u16 {
            let (count, first) = (1 + round % ENTRIES, index);
            let group = UNPUBLISHED_MAX as u16;
            assert_eq!((ring.waiting(), ring.next_available()), (0, index));
            (0..count).for_each(|head| driver.offer(head));
            assert_eq!(ring.waiting(), count, "{index}");
            for head in 0..count {
                assert_eq!(ring.take(&mut chain), Ok(true));
                let buffer =
                    GuestPiece { region: 0, offset: 0x1000 + 0x100 * u64::from(head), len: 1 };
                assert_eq!((chain.head, &chain.writable[..]), (head, &[buffer][..]));
                assert!(chain.readable.is_empty());
                ring.answer(head, 100 + u32::from(round));
                assert_eq!(driver.answer(index), (head.into(), 100 + u32::from(round)));
                index = index.wrapping_add(1);
                // The guest sees groups of answers.
                let seen = driver.get(USED + 2).wrapping_sub(first);
                assert_eq!(seen, (head + 1) / group * group, "{index}");
            }
            assert_eq!(ring.take(&mut chain), Ok(false));
            assert!(!ring.request_kicks(true));
            assert_eq!(driver.get(AVAILABLE_EVENT), index);
            // The event of the last answer.
            driver.set(USED_EVENT, index.wrapping_sub(1));
            ring.publish();
            assert!(ring.wants_call(), "{index}");
            assert_eq!(driver.get(USED + 2), index, "all answers");
        }
        assert!(index < 65_530, "the indexes wrapped");
    }

    /// A server may be killed between any two stores: then each chain was answered, is found in the
    /// record, or is taken next, and that once.
    #[test]
    fn no_chain_is_lost_or_answered_twice_if_the_server_is_killed_between_two_stores() {
        const BASE: u16 = 65_533;
        let driver = Rc::new(Driver::new());
        let record = inflight::tests::map().ring(0, ENTRIES).unwrap();
        let mut ring = driver.recorded_ring(BASE, true, Some(record));
        let chains = [5, 2, 7, 0, 1, 4, 3];
        chains.iter().for_each(|head| driver.offer(*head));
        let states = Rc::new(RefCell::new(Vec::new()));
        let observer = {
            let (driver, states) = (Rc::clone(&driver), Rc::clone(&states));
            move |record: &RingRecord| {
                let used = driver.get(USED + 2);
                let answered = used.wrapping_sub(BASE);
                let unanswered = record.recover_copy(used).unwrap();
                let next = usize::from(answered) + unanswered.len();
                let answers = (0..answered).map(|index| driver.answer(BASE.wrapping_add(index)).0);
                let mut all: Vec<u16> = answers.map(|head| head as u16).collect();
                all.extend(unanswered);
                all.extend(&chains[next..]);
                all.sort_unstable();
                assert_eq!(all, [0, 1, 2, 3, 4, 5, 7], "{answered} answers");
                states.borrow_mut().push(answered);
            }
        };
        inflight::tests::observe(Box::new(observer), || {
            let mut chain = chain();
            (0..6).for_each(|_| assert_eq!(ring.take(&mut chain), Ok(true)));
            // A group, and the answers of a batch that ends.
            [7, 5, 1, 0, 4].iter().for_each(|head| ring.answer(*head, 1));
            ring.publish();
            assert_eq!(ring.take(&mut chain), Ok(true));
            [3, 2].iter().for_each(|head| ring.answer(*head, 1));
            ring.publish();
        });
        let states = states.borrow();
        let of = |answered| states.iter().filter(|state| **state == answered).count();
        // Two stores for each chain that is taken; for a group of `n` answers `n` before the index,
        // and `n + 1` after it.
        assert_eq!([of(0), of(4), of(5), of(7)], [16, 6, 6, 3]);
        assert_eq!(states.len(), 31);
    }

    #[test]
    fn a_call_is_wanted_for_an_event_among_the_answers_alone() {
        for base in [0, 100, 65_530, 65_533, 65_535] {
            for before in -3..=6_i16 {
                let driver = Driver::new();
                let mut ring = driver.ring(base, true);
                driver.set(USED_EVENT, base.wrapping_add_signed(before));
                assert!(!ring.wants_call(), "nothing is answered");
                (0..3).for_each(|head| driver.offer(head));
                assert_eq!(serve(&mut ring), 3);
                assert_eq!(ring.wants_call(), (0..3).contains(&before), "{base} {before}");
                assert!(!ring.wants_call(), "the answers were considered before");
            }
        }
    }

    #[test]
    fn without_event_indexes_the_flags_suppress_calls_and_kicks() {
        let driver = Driver::new();
        let mut ring = driver.ring(0, false);
        for (flags, wanted) in [(0, true), (NO_NOTIFICATION, false), (0, true)] {
            // VIRTIO 1.3, 2.7.7: the index of the event is not used.
            driver.set(USED_EVENT, 1000);
            driver.set(AVAILABLE, flags);
            assert!(!ring.wants_call(), "nothing is answered");
            driver.offer(0);
            assert_eq!(serve(&mut ring), 1);
            assert_eq!(ring.wants_call(), wanted);
            assert!(!ring.wants_call(), "the answers were considered before");
        }
        assert!(!ring.request_kicks(false));
        assert_eq!(driver.get(USED), NO_NOTIFICATION);
        assert!(!ring.request_kicks(true));
        assert_eq!(driver.get(USED), 0);
        driver.offer(1);
        assert!(ring.request_kicks(true), "a chain came before kicks were wanted");
        assert_eq!(driver.get(AVAILABLE_EVENT), 0);
    }

    #[test]
    fn with_event_indexes_a_kick_is_requested_by_the_event() {
        let driver = Driver::new();
        let mut ring = driver.ring(5, true);
        driver.offer(0);
        assert!(ring.request_kicks(true), "a chain is available");
        assert_eq!(driver.get(AVAILABLE_EVENT), 5);
        assert_eq!(serve(&mut ring), 1);
        assert!(!ring.request_kicks(false));
        assert_eq!((driver.get(AVAILABLE_EVENT), driver.get(USED)), (5, 0));
        assert!(!ring.request_kicks(true));
        assert_eq!(driver.get(AVAILABLE_EVENT), 6);
    }

    #[test]
    fn rings_that_are_misaligned_or_cross_a_border_are_refused() {
        let driver = Driver::new();
        let made = |place: RingPlace| {
            let ring = Virtqueue::new(&place, Arc::clone(&driver.map), None, true);
            ring.err().map(|RingFault(text)| text)
        };
        assert_eq!(made(PLACE), None);
        let (end, outside) =
            (USER + REGION_BYTES, Some("the ring does not lie in the memory of the guest"));
        let misaligned = Some("the ring is not aligned");
        for (descriptors, fault) in [
            (USER + 8, misaligned),
            (end - 16 * 8, None),
            (end - 16 * 7, outside),
            (end + REGION_BYTES - 16 * 7, outside),
            (USER - 16, outside),
        ] {
            assert_eq!(made(RingPlace { descriptors, ..PLACE }), fault, "{descriptors:#x}");
        }
        for (available, fault) in
            [(USER + 0x101, misaligned), (end - 22, None), (end - 20, outside), (u64::MAX, outside)]
        {
            assert_eq!(made(RingPlace { available, ..PLACE }), fault, "{available:#x}");
        }
        for (used, fault) in
            [(USER + 0x202, misaligned), (end - 72, None), (end - 68, outside), (0, outside)]
        {
            assert_eq!(made(RingPlace { used, ..PLACE }), fault, "{used:#x}");
        }
        let odd = Some("the number of the ring's entries is no power of two");
        let long = Some("the ring has more than 1,024 entries");
        for (entries, fault) in [(0, odd), (3, odd), (1, None), (2048, long)] {
            assert_eq!(made(RingPlace { entries, ..PLACE }), fault, "{entries}");
        }
    }

    #[test]
    fn more_chains_than_entries_are_a_fault() {
        let driver = Driver::new();
        let mut ring = driver.ring(65_530, true);
        driver.set(AVAILABLE + 2, 65_530_u16.wrapping_add(ENTRIES + 1));
        assert!(ring.take(&mut chain()).is_err());
        driver.set(AVAILABLE + 2, 65_529);
        assert!(ring.take(&mut chain()).is_err(), "the index went back");
    }

    #[test]
    fn a_table_may_lie_in_two_adjacent_regions() {
        let driver = Driver::new();
        let mut ring = driver.ring(0, true);
        for before in 0..=48 {
            let table = REGION_BYTES - before;
            let next = ChainDescriptor::NEXT;
            driver.put_descriptor(table, 0x1000, 16, next, 1);
            driver.put_descriptor(table + 16, 0x2000, 512, next | ChainDescriptor::WRITE, 2);
            driver.put_descriptor(table + 32, 0x3000, 1, ChainDescriptor::WRITE, 0);
            driver.put_descriptor(0, table, 48, ChainDescriptor::INDIRECT, 0);
            driver.offer(0);
            let mut chain = chain();
            assert_eq!(ring.take(&mut chain), Ok(true), "{before}");
            let piece = |offset, len| GuestPiece { region: 0, offset, len };
            assert_eq!(chain.readable, [piece(0x1000, 16)], "{before}");
            assert_eq!(chain.writable, [piece(0x2000, 512), piece(0x3000, 1)], "{before}");
        }
        // The table ends after the memory.
        driver.put_descriptor(0, 2 * REGION_BYTES - 32, 48, ChainDescriptor::INDIRECT, 0);
        driver.offer(0);
        assert!(ring.take(&mut chain()).is_err());
    }

    #[test]
    fn an_image_is_read_as_a_ring_is() {
        let mut image = [0; 64];
        image[0] = 40;
        image[8] = 20;
        image[12] = ChainDescriptor::WRITE as u8;
        let buffers = |writable: &[(u64, u64)]| {
            Ok(ChainBuffers { readable: Vec::new(), writable: writable.to_vec() })
        };
        assert_eq!(walk_image(&image, 64, 1, 0), buffers(&[(40, 20)]));
        assert_eq!(walk_image(&image, 50, 1, 0), buffers(&[(40, 10), (50, 10)]));
        assert!(walk_image(&image, 64, 1, 1).is_err());
        assert!(walk_image(&image, 15, 1, 0).is_err());
    }
}

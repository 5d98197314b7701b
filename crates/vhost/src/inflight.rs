//! The record of requests in flight, in memory that the hypervisor keeps when this process ends.
//!
//! A server that was killed and started again finds there which chains it had taken and not
//! answered: "Vhost-user Protocol", "Inflight I/O tracking", split virtqueue. Each ring has a head
//! of 16 bytes and 16 bytes for each descriptor:
//!
//! ```text
//! features u64 │ version u16 │ desc_num u16 │ last_batch_head u16 │ used_idx u16
//! inflight u8 │ 5 bytes │ next u16 │ counter u64        for each descriptor
//! ```
//!
//! `next` links the chains of one group of answers, which the guest is shown by one store: from the
//! last one, which is `last_batch_head`, to the first one, whose own `next` is stale. The length of
//! the list is the difference of the used index and `used_idx`.
//!
//! One thread writes the record of a ring, and a reader finds the stores in the order in which they
//! were made, because it comes after the process has ended.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::device::{QUEUE_ENTRIES_MAX, QUEUES_MAX};

/// The length of the head of a ring's record, and of the entry of a descriptor, in bytes.
const ENTRY_BYTES: usize = 16;
/// The records of rings begin at multiples of this, as those of QEMU's own servers.
const ALIGN: usize = 64;
const VERSION: u16 = 1;

// Offsets in the head of a record.
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_AT: usize = 12;
const USED_AT: usize = 14;
// Offsets in the entry of a descriptor.
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;

/// The length of the record of a ring, in bytes.
fn record_bytes(entries: u16) -> usize {
    (ENTRY_BYTES * (usize::from(entries) + 1)).next_multiple_of(ALIGN)
}

/// The records of all rings.
#[derive(Clone)]
pub(crate) struct InflightMap {
    mapping: Arc<MmapRegion>,
    queues: u16,
    entries: u16,
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

impl InflightMap {
    /// Makes the file for the records of some rings, and returns it with its length in bytes.
    ///
    /// # Errors
    /// If the numbers are invalid, or the system refuses.
    pub(crate) fn create(queues: u16, entries: u16) -> io::Result<(File, u64)> {
        if queues == 0 || usize::from(queues) > QUEUES_MAX {
            return Err(invalid("the number of rings is out of range"));
        }
        if entries == 0 || entries > QUEUE_ENTRIES_MAX {
            return Err(invalid("the number of entries is out of range"));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("blockyard-inflight", flags)?);
        let bytes = (usize::from(queues) * record_bytes(entries)) as u64;
        file.set_len(bytes)?;
        // A hypervisor that truncated it would end this process.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((file, bytes))
    }

    /// Maps the file of the records.
    ///
    /// # Errors
    /// If it is too short, or the system refuses.
    pub(crate) fn map(
        file: File,
        offset: u64,
        bytes: u64,
        queues: u16,
        entries: u16,
    ) -> io::Result<InflightMap> {
        let wanted = usize::from(queues) * record_bytes(entries);
        let end = offset.checked_add(bytes);
        let file_bytes = file.metadata()?.len();
        if bytes < wanted as u64 || end.is_none_or(|end| file_bytes < end) {
            return Err(invalid("the record of requests in flight is too short"));
        }
        let mapping = MmapRegion::from_file(FileOffset::new(file, offset), wanted);
        let mapping = Arc::new(mapping.map_err(io::Error::other)?);
        Ok(InflightMap { mapping, queues, entries })
    }

    /// The record of a ring with this many entries, if the map has room for it.
    pub(crate) fn ring(&self, index: usize, entries: u16) -> Option<RingRecord> {
        let fits = index < usize::from(self.queues) && entries <= self.entries;
        let base = index * record_bytes(self.entries);
        fits.then(|| RingRecord { mapping: Arc::clone(&self.mapping), base, entries, counter: 0 })
    }
}

/// The record of a ring.
pub(crate) struct RingRecord {
    mapping: Arc<MmapRegion>,
    base: usize,
    entries: u16,
    /// The number of the next chain that is taken.
    counter: u64,
}

impl RingRecord {
    fn get<T: vm_memory::AtomicAccess + Default>(&self, at: usize) -> T {
        let memory = self.mapping.as_volatile_slice();
        memory.load(self.base + at, Ordering::Acquire).unwrap_or_default()
    }

    fn put<T: vm_memory::AtomicAccess>(&self, at: usize, value: T) {
        #[cfg(test)]
        tests::before_store(self);
        let memory = self.mapping.as_volatile_slice();
        // The record lies in the mapping.
        let _ = memory.store(value, self.base + at, Ordering::Release);
    }

    fn entry(head: u16) -> usize {
        ENTRY_BYTES * (usize::from(head) + 1)
    }

    /// Reads the record when a ring starts whose next answer has the index `used`. Returns the
    /// heads of the chains that were taken and not answered, in the order in which they were taken;
    /// `None` if the record is new.
    pub(crate) fn recover(&mut self, used: u16) -> Option<Vec<u16>> {
        let is_new = self.get::<u16>(VERSION_AT) != VERSION;
        if is_new || self.get::<u16>(ENTRIES_AT) != self.entries {
            (0..self.entries).for_each(|head| self.put(Self::entry(head), 0_u8));
            self.put(ENTRIES_AT, self.entries);
            self.put(USED_AT, used);
            self.put(VERSION_AT, VERSION);
            return None;
        }
        // If the indexes differ, the process ended after it published these answers and before it
        // recorded them.
        let answers = used.wrapping_sub(self.get(USED_AT));
        let mut head = self.get::<u16>(LAST_AT);
        for _ in 0..answers.min(self.entries) {
            if head >= self.entries {
                break;
            }
            self.put(Self::entry(head), 0_u8);
            head = self.get(Self::entry(head) + NEXT_AT);
        }
        self.put(USED_AT, used);
        let is_taken = |head: &u16| self.get::<u8>(Self::entry(*head)) != 0;
        let counter = |head: &u16| self.get::<u64>(Self::entry(*head) + COUNTER_AT);
        let mut taken: Vec<u16> = (0..self.entries).filter(is_taken).collect();
        // Each counter is read once: the hypervisor can change them.
        taken.sort_by_cached_key(counter);
        self.counter = taken.iter().map(counter).max().map_or(0, |last| last.wrapping_add(1));
        Some(taken)
    }

    /// Records that a chain is taken.
    pub(crate) fn taken(&mut self, head: u16) {
        self.put(Self::entry(head) + COUNTER_AT, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.put(Self::entry(head), 1_u8);
    }

    /// Records that chains are being answered, before the guest can see it.
    pub(crate) fn answering(&self, heads: &[u16]) {
        for pair in heads.windows(2) {
            self.put(Self::entry(pair[1]) + NEXT_AT, pair[0]);
        }
        if let Some(&last) = heads.last() {
            self.put(LAST_AT, last);
        }
    }

    /// Records that chains are answered, and that the next answer has the index `used`.
    pub(crate) fn answered(&self, heads: &[u16], used: u16) {
        heads.iter().for_each(|&head| self.put(Self::entry(head), 0_u8));
        self.put(USED_AT, used);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;

    use super::*;

    type Observer = Box<dyn FnMut(&RingRecord)>;

    thread_local! {
        static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
    }

    /// Lets this thread call `observer` before each store to a record, except for the stores that
    /// the observer makes, while it runs `run`.
    pub(crate) fn observe<R>(observer: Observer, run: impl FnOnce() -> R) -> R {
        OBSERVER.set(Some(observer));
        let result = run();
        OBSERVER.set(None);
        result
    }

    pub(super) fn before_store(record: &RingRecord) {
        if let Some(mut observer) = OBSERVER.take() {
            observer(record);
            OBSERVER.set(Some(observer));
        }
    }

    /// New records of two rings with 8 entries each.
    pub(crate) fn map() -> InflightMap {
        let (file, bytes) = InflightMap::create(2, 8).unwrap();
        InflightMap::map(file, 0, bytes, 2, 8).unwrap()
    }

    impl RingRecord {
        /// What a server finds in a copy of the record if this one is killed now.
        pub(crate) fn recover_copy(&self, used: u16) -> Option<Vec<u16>> {
            let copy = map();
            let mut bytes = vec![0; copy.mapping.size()];
            self.mapping.as_volatile_slice().read_slice(&mut bytes, 0).unwrap();
            copy.mapping.as_volatile_slice().write_slice(&bytes, 0).unwrap();
            RingRecord { mapping: copy.mapping, ..*self }.recover(used)
        }
    }

    #[test]
    fn chains_that_were_not_answered_are_found_in_their_order() {
        let map = map();
        let record = || map.ring(1, 8).unwrap();
        let mut ring = record();
        assert_eq!(ring.recover(65_534), None, "a new record");
        for head in [5, 2, 7, 0] {
            ring.taken(head);
        }
        ring.answering(&[2]);
        ring.answered(&[2], 65_535);
        assert_eq!(record().recover(65_535), Some(vec![5, 7, 0]));
        // The process ends before the answer.
        ring.answering(&[7]);
        assert_eq!(record().recover(65_535), Some(vec![5, 7, 0]));
        // The process ends after the answer, before it is recorded.
        assert_eq!(record().recover(0), Some(vec![5, 0]));
        // What is taken later comes later.
        let mut ring = record();
        assert_eq!(ring.recover(0), Some(vec![5, 0]));
        ring.taken(1);
        assert_eq!(record().recover(0), Some(vec![5, 0, 1]));
        assert_eq!(map.ring(0, 8).unwrap().recover(0), None, "the other ring's is new");
    }

    #[test]
    fn a_group_of_answers_is_recorded_as_a_whole() {
        let map = map();
        let record = || map.ring(0, 8).unwrap();
        let mut ring = record();
        assert_eq!(ring.recover(65_535), None);
        for head in [5, 2, 7, 0, 1] {
            ring.taken(head);
        }
        // The process ends before the guest can see the group.
        ring.answering(&[7, 5, 1]);
        assert_eq!(record().recover(65_535), Some(vec![5, 2, 7, 0, 1]));
        // The process ends after the store, and before the group is recorded, or in between.
        ring.put(RingRecord::entry(7), 0_u8);
        assert_eq!(record().recover(2), Some(vec![2, 0]));
        // A link outside the ring ends the list.
        ring.taken(7);
        ring.put(RingRecord::entry(7) + NEXT_AT, 8_u16);
        ring.put(LAST_AT, 7_u16);
        assert_eq!(record().recover(5), Some(vec![2, 0]));
    }

    #[test]
    fn a_record_of_another_length_is_new() {
        let map = map();
        let mut ring = map.ring(0, 8).unwrap();
        assert_eq!(ring.recover(0), None);
        ring.taken(3);
        assert_eq!(map.ring(0, 4).unwrap().recover(0), None);
        assert_eq!(map.ring(0, 4).unwrap().recover(0), Some(vec![]));
        assert!(map.ring(2, 8).is_none() && map.ring(0, 16).is_none());
    }

    #[test]
    fn a_record_with_invalid_numbers_is_read_within_its_bounds() {
        let map = map();
        let bytes = map.mapping.as_volatile_slice();
        bytes.write_slice(&vec![0xff; bytes.len()], 0).unwrap();
        assert_eq!(map.ring(0, 8).unwrap().recover(0), None);
        let ring = map.ring(1, 8).unwrap();
        ring.put(VERSION_AT, VERSION);
        ring.put(ENTRIES_AT, 8_u16);
        assert_eq!(map.ring(1, 8).unwrap().recover(3).map(|all| all.len()), Some(8));
    }

    #[test]
    fn files_that_are_too_short_and_numbers_out_of_range_are_refused() {
        assert!(InflightMap::create(0, 8).is_err() && InflightMap::create(65, 8).is_err());
        assert!(InflightMap::create(1, 0).is_err() && InflightMap::create(1, 2048).is_err());
        let file = || InflightMap::create(2, 8).unwrap().0;
        assert!(InflightMap::map(file(), 0, 100, 2, 8).is_err());
        assert!(InflightMap::map(file(), 0, 1 << 20, 2, 8).is_err());
        assert!(InflightMap::map(file(), u64::MAX, 1 << 20, 2, 8).is_err());
    }
}

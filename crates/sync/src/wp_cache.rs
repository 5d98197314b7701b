//! Primitive: the write pointer cache, for a device that does not report where it wrote.
//!
//! Protects   the known write pointer of each zone, as an offset in sectors.
//! Why        a zone append on a device without it becomes a write, and a write needs its sector.
//!            Querying the device before each append would cost a command each.
//! States     an entry is an offset, INVALID (query the device), or UPDATING (the holder of the
//!            zone's ticket writes to the zone or queries its pointer). The holder of the ticket
//!            (`zone_gate`) takes the entry and puts an offset back; any thread may invalidate it.
//!            An offset that is put back over an INVALID is dropped, because the zone changed in
//!            between.
//! Order      no lock.
//! Common     one exchange when a ticket begins, one when it ends; a load for each append in
//!            between.
//! Cost       4 bytes a zone: 208624 for the 52156 zones of a 14 TB disk.
//! Before     a zone report before each write; in Linux 5.8 to 6.9 the same words under one lock.
//!
//! The cache only saves reports. The location of data does not depend on it, because the device
//! refuses a write that is not at its own write pointer.

use std::collections::TryReserveError;

use crate::atomics::{AtomicU32, Ordering};

/// The pointer is unknown: query the device.
const INVALID: u32 = u32::MAX;
/// The holder of the ticket has taken the entry.
const UPDATING: u32 = u32::MAX - 1;

/// Largest offset that an entry can hold, in sectors.
pub const OFFSET_MAX: u32 = u32::MAX - 2;

/// The write pointers of a device's zones.
#[derive(Debug)]
pub struct WpCache {
    entries: Box<[AtomicU32]>,
}

impl WpCache {
    /// A cache of `zones` zones without known pointers.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(zones: u32) -> Result<WpCache, TryReserveError> {
        let mut entries = Vec::new();
        entries.try_reserve_exact(zones as usize)?;
        entries.extend((0..zones).map(|_| AtomicU32::new(INVALID)));
        Ok(WpCache { entries: entries.into_boxed_slice() })
    }

    /// Memory of the cache, in bytes.
    pub fn len_bytes(&self) -> usize {
        size_of_val(&*self.entries)
    }

    /// Takes a zone's entry and returns the pointer if it is known. The caller holds the zone's
    /// ticket, and puts an entry back later.
    #[inline]
    pub fn take(&self, zone: u32) -> Option<u32> {
        // Acquire: pairs with the Release in `put`; the previous ticket has ended.
        let entry = self.entries[zone as usize].swap(UPDATING, Ordering::AcqRel);
        (entry <= OFFSET_MAX).then_some(entry)
    }

    /// Whether a taken entry was invalidated: the holder's pointer may be outdated.
    #[inline]
    pub fn is_disturbed(&self, zone: u32) -> bool {
        // Acquire: pairs with the Release in `invalidate`; a report after this is not older than
        // the change.
        self.entries[zone as usize].load(Ordering::Acquire) != UPDATING
    }

    /// Puts a taken entry back; `None` if the pointer is unknown. An entry that was invalidated in
    /// between stays invalid.
    #[inline]
    pub fn put(&self, zone: u32, offset: Option<u32>) {
        let entry = offset.filter(|offset| *offset <= OFFSET_MAX).unwrap_or(INVALID);
        // Release: pairs with the Acquire in `take`. If the exchange fails, the entry is INVALID
        // and must stay so.
        let _ = self.entries[zone as usize].compare_exchange(
            UPDATING,
            entry,
            Ordering::Release,
            Ordering::Relaxed,
        );
    }

    /// Stores the pointer of a report for a zone that no thread writes to yet.
    pub fn fill(&self, zone: u32, offset: u32) {
        if self.take(zone).is_none() {
            self.put(zone, Some(offset));
        }
    }

    /// Invalidates a zone that was changed by another path than its ticket.
    pub fn invalidate(&self, zone: u32) {
        // An exchange, so that it is ordered among those of `take` and `put`. Release: pairs with
        // the Acquire in `is_disturbed` and `take`; a thread that finds INVALID queries after the
        // change.
        self.entries[zone as usize].swap(INVALID, Ordering::AcqRel);
    }

    /// Invalidates all zones.
    pub fn invalidate_all(&self) {
        for zone in 0..self.entries.len() {
            self.invalidate(zone as u32);
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn cache_takes_four_bytes_a_zone() {
        assert_eq!(WpCache::new(52156).unwrap().len_bytes(), 208_624);
    }

    #[test]
    fn cached_pointer_is_returned_unless_invalidated() {
        let cache = WpCache::new(2).unwrap();
        assert_eq!(cache.take(0), None);
        cache.put(0, Some(8));
        assert_eq!(cache.take(0), Some(8));
        assert!(!cache.is_disturbed(0));
        cache.invalidate(0);
        assert!(cache.is_disturbed(0));
        cache.put(0, Some(16));
        assert_eq!(cache.take(0), None);
        cache.put(0, Some(16));
        cache.fill(1, 24);
        cache.invalidate_all();
        assert_eq!((cache.take(0), cache.take(1)), (None, None));
        // A pointer beyond all offsets is unknown.
        cache.put(0, Some(UPDATING));
        cache.put(1, None);
        assert_eq!((cache.take(0), cache.take(1)), (None, None));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;

    /// A zone on a device: accepts a write only at its pointer. Every command is an exchange,
    /// because a device executes commands one after the other and returns no outdated result.
    #[derive(Default)]
    struct Zone(AtomicU32);

    impl Zone {
        fn report(&self) -> u32 {
            self.0.fetch_add(0, Ordering::AcqRel)
        }

        fn reset(&self) {
            self.0.swap(0, Ordering::AcqRel);
        }

        fn write(&self, at: u32) -> bool {
            self.0.compare_exchange(at, at + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        }
    }

    /// One ticket with one append, as the zone write plug executes it.
    fn append(cache: &WpCache, zone: &Zone) -> Option<u32> {
        let known = cache.take(0);
        let at = known.unwrap_or_else(|| zone.report());
        let landed = zone.write(at).then_some(at);
        cache.put(0, landed.map(|at| at + 1));
        landed
    }

    /// After appends concurrent with an external reset, the entry is unknown or right, and the next
    /// append succeeds.
    #[test]
    fn cached_pointer_is_right_after_concurrent_changes() {
        loom::model(|| {
            let cache = Arc::new(WpCache::new(1).unwrap());
            let zone = Arc::new(Zone::default());
            cache.fill(0, 0);
            let outside = {
                let (cache, zone) = (Arc::clone(&cache), Arc::clone(&zone));
                loom::thread::spawn(move || {
                    zone.reset();
                    cache.invalidate(0);
                })
            };
            for _ in 0..2 {
                // The append may fail because of the reset, and for no other reason.
                let _ = append(&cache, &zone);
            }
            outside.join().unwrap();
            let pointer = zone.report();
            assert_eq!(append(&cache, &zone), Some(pointer));
            assert_eq!(cache.take(0), Some(pointer + 1));
        });
    }

    /// A write by an external writer, for example another host.
    #[test]
    fn outside_write_costs_at_most_one_failed_append() {
        loom::model(|| {
            let cache = Arc::new(WpCache::new(1).unwrap());
            let zone = Arc::new(Zone::default());
            cache.fill(0, 0);
            let outside = {
                let zone = Arc::clone(&zone);
                loom::thread::spawn(move || zone.write(0) || zone.write(1))
            };
            let first = append(&cache, &zone);
            let second = append(&cache, &zone);
            let wrote = outside.join().unwrap();
            let third = append(&cache, &zone);
            let fourth = append(&cache, &zone);
            let landed: Vec<u32> = [first, second, third, fourth].into_iter().flatten().collect();
            assert!(landed.len() >= 3 && wrote || landed.len() == 4, "{landed:?}");
            assert!(landed.windows(2).all(|pair| pair[0] < pair[1]));
        });
    }
}

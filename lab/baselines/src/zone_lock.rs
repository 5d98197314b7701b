//! Ordered zone writes by a lock per zone that is only tried, as in Linux 5.8 to 6.9.
//!
//! A thread that wants to write to a zone tries the zone's bit. If the bit is taken, the write is
//! requeued and tried again later, which repeats all work done for it so far; no thread is woken
//! when the bit is free. The bit stays taken until the write completes, so a zone has one write in
//! flight. The bit protects the position of the next write, which the kernel keeps in the file
//! system or in the disk's driver.
// The bits are this baseline's own; the product needs none.
#![allow(clippy::disallowed_types)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use blockyard_core::zone::ZoneInfo;
use blockyard_core::{DeviceError, Disk, Sector};
use blockyard_sync::pad::Padded;

/// The delay before a requeued write is tried again: the duration of the shortest write. The kernel
/// runs a queue again when any request of it completes, or after 3 ms.
const PUT_BACK: Duration = Duration::from_micros(10);

/// The zones of a disk, each with its bit.
#[derive(Debug)]
pub struct ZoneLocks {
    zones: Box<[Padded<BitLockedZone>]>,
}

#[derive(Debug)]
struct BitLockedZone {
    taken: AtomicBool,
    /// The number of sectors written; only the holder of the bit reads or changes it.
    written: AtomicU64,
}

/// A zone whose bit this thread has. Dropping it gives the bit back.
#[derive(Debug)]
pub struct ZoneGuard<'a>(&'a BitLockedZone);

impl ZoneLocks {
    /// The locks of a disk's zones, with the zones' present write pointers.
    ///
    /// # Errors
    /// If the disk reports no zones.
    pub fn new(disk: &dyn Disk) -> Result<ZoneLocks, DeviceError> {
        let mut zones: Vec<ZoneInfo> = Vec::new();
        disk.report_zones(Sector(0), usize::MAX, &mut zones)?;
        let line = |zone: ZoneInfo| {
            let written = AtomicU64::new(zone.wp.0.saturating_sub(zone.start.0));
            Padded(BitLockedZone { taken: AtomicBool::new(false), written })
        };
        Ok(ZoneLocks { zones: zones.into_iter().map(line).collect() })
    }

    /// Tries a zone's bit.
    pub fn try_take(&self, zone: usize) -> Option<ZoneGuard<'_>> {
        let line = &self.zones[zone].0;
        // Acquire: pairs with the Release in `ZoneGuard::drop`, for the position.
        let taken = line.taken.swap(true, Ordering::Acquire);
        // Built only where the bit was free, because dropping it releases the bit.
        (!taken).then(|| ZoneGuard(line))
    }

    /// Tries a zone's bit until it is free. Returns also the number of failed attempts.
    pub fn take(&self, zone: usize) -> (ZoneGuard<'_>, u64) {
        let mut put_back = 0;
        loop {
            if let Some(held) = self.try_take(zone) {
                return (held, put_back);
            }
            put_back += 1;
            thread::sleep(PUT_BACK);
        }
    }
}

impl ZoneGuard<'_> {
    /// The number of sectors of the zone that are written.
    pub fn written(&self) -> u64 {
        // Relaxed: the bit orders the accesses.
        self.0.written.load(Ordering::Relaxed)
    }

    /// Advances the position after a write has completed.
    pub fn advance(&self, sectors: u64) {
        self.0.written.store(self.written() + sectors, Ordering::Relaxed);
    }

    /// Sets the position to the start of an empty zone.
    pub fn reset(&self) {
        self.0.written.store(0, Ordering::Relaxed);
    }
}

impl Drop for ZoneGuard<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `try_take`.
        self.0.taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_yard::{stack, uri};

    #[test]
    fn a_bit_is_had_by_one_and_brings_the_position_along() {
        let spec = uri::parse("null:///z?size=4M&zoned=1&zone_size=1M").unwrap();
        let locks = ZoneLocks::new(&*stack::open(&spec).unwrap().disk).unwrap();
        let held = locks.try_take(1).unwrap();
        assert!(locks.try_take(1).is_none());
        assert!(locks.try_take(2).is_some());
        held.advance(8);
        drop(held);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        locks.take(1).0.advance(1);
                    }
                });
            }
        });
        assert_eq!(locks.take(1).0.written(), 408);
        locks.take(1).0.reset();
        assert_eq!(locks.take(1).0.written(), 0);
    }
}

//! Writes in order by a lock per zone that is only tried, as Linux kept them from 5.8 to 6.9.
//!
//! Who is to write to a zone tries its bit. Where it is taken the write is put back and tried again
//! later, with everything that was done for it so far done once more; nobody is woken when the bit
//! is free. It stays taken until the write is complete, so that a zone has one write in flight. The
//! bit protects the position that is written at, which the kernel keeps in the file system or in
//! the disk's driver.
// The bits are this baseline's own; the product needs none.
#![allow(clippy::disallowed_types)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use blockyard_core::Disk;
use blockyard_core::zone::ZoneInfo;
use blockyard_sync::pad::Padded;

use crate::error::LabError;

/// How long a write that was put back rests before it is tried again: as long as the shortest
/// write takes. The kernel runs a queue again when anything of it completes, or after 3 ms.
const PUT_BACK: Duration = Duration::from_micros(10);

/// The zones of a disk, each with its bit.
#[derive(Debug)]
pub struct ZoneLocks {
    zones: Box<[Padded<Line>]>,
}

#[derive(Debug)]
struct Line {
    taken: AtomicBool,
    /// How much is written, in sectors; who has the bit reads and changes it.
    written: AtomicU64,
}

/// A zone whose bit this thread has. Dropping it gives the bit back.
#[derive(Debug)]
pub struct Held<'a>(&'a Line);

impl ZoneLocks {
    /// Locks of the zones of a disk as they are now.
    ///
    /// # Errors
    /// If the disk reports no zones.
    pub fn new(disk: &dyn Disk) -> Result<ZoneLocks, LabError> {
        let mut zones: Vec<ZoneInfo> = Vec::new();
        let report = disk.report_zones(blockyard_core::Sector(0), usize::MAX, &mut zones);
        report.map_err(|error| LabError::failed(disk.name(), error))?;
        let line = |zone: ZoneInfo| {
            let written = AtomicU64::new(zone.wp.0.saturating_sub(zone.start.0));
            Padded(Line { taken: AtomicBool::new(false), written })
        };
        Ok(ZoneLocks { zones: zones.into_iter().map(line).collect() })
    }

    /// Tries a zone's bit.
    pub fn try_take(&self, zone: usize) -> Option<Held<'_>> {
        let line = &self.zones[zone].0;
        // Acquire: pairs with the Release in `Held::drop`, for the position.
        let taken = line.taken.swap(true, Ordering::Acquire);
        // Made only where the bit was free: dropping it gives the bit back.
        (!taken).then(|| Held(line))
    }

    /// Tries a zone's bit until it is free, and says how often that was in vain.
    pub fn take(&self, zone: usize) -> (Held<'_>, u64) {
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

impl Held<'_> {
    /// How much of the zone is written, in sectors.
    pub fn written(&self) -> u64 {
        // Relaxed: the bit orders it.
        self.0.written.load(Ordering::Relaxed)
    }

    /// Moves the position, once a write has come to its end.
    pub fn advance(&self, sectors: u64) {
        self.0.written.store(self.written() + sectors, Ordering::Relaxed);
    }

    /// The zone is empty again.
    pub fn reset(&self) {
        self.0.written.store(0, Ordering::Relaxed);
    }
}

impl Drop for Held<'_> {
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

//! Zone append for devices that have none: the write pointers that are kept beside the device, and
//! the one report of one zone that brings a lost one back.

use std::sync::Arc;

use blockyard_sync::wp_cache::WpCache;

use crate::device::Device;
use crate::geometry::ZoneGeometry;
use crate::status::Status;
use crate::units::{Sector, ZoneNo};
use crate::zone::{ZoneCond, ZoneInfo};

/// Reports that may fail, or be overtaken by a change, before what asked for the pointer fails.
const REPORTS_MAX: u32 = 3;

/// One channel's view of a device's write pointers.
pub(super) struct Pointers<D> {
    cache: Arc<WpCache>,
    device: Arc<D>,
    zones: ZoneGeometry,
    report: Vec<ZoneInfo>,
}

/// Where a zone is written next, in sectors from its start; `None` if it takes no more writes.
fn offset_of(zone: &ZoneInfo) -> Option<u32> {
    let offset = match zone.cond {
        ZoneCond::NotWp | ZoneCond::ReadOnly | ZoneCond::Offline => return None,
        // A finish leaves the pointer at the zone's end, beyond its capacity.
        ZoneCond::Full => zone.capacity_sectors,
        _ => zone.wp.0.checked_sub(zone.start.0)?,
    };
    u32::try_from(offset).ok()
}

/// Notes what the whole report says, as far as there is one; the rest is asked for when needed.
pub(super) fn fill<D: Device>(cache: &WpCache, device: &D, zones: &ZoneGeometry) {
    let mut report = Vec::with_capacity(zones.zone_count as usize);
    if device.report_zones(Sector(0), usize::MAX, &mut report).is_err() {
        return;
    }
    for (number, zone) in (0..zones.zone_count).zip(&report) {
        if let Some(offset) = offset_of(zone) {
            cache.fill(number, offset);
        }
    }
}

impl<D: Device> Pointers<D> {
    pub(super) fn new(cache: Arc<WpCache>, device: Arc<D>, zones: ZoneGeometry) -> Pointers<D> {
        Pointers { cache, device, zones, report: Vec::with_capacity(1) }
    }

    /// Begins a turn in a zone: what is known.
    #[inline]
    pub(super) fn begin(&self, zone: u32) -> Option<u32> {
        self.cache.take(zone)
    }

    /// Ends a turn in a zone.
    #[inline]
    pub(super) fn end(&self, zone: u32, pointer: Option<u32>) {
        self.cache.put(zone, pointer);
    }

    /// Whether the zone has changed in a way that did not come through the turn.
    #[inline]
    pub(super) fn is_disturbed(&self, zone: u32) -> bool {
        self.cache.is_disturbed(zone)
    }

    /// Forgets every zone: all of them may have changed.
    pub(super) fn forget_all(&self) {
        self.cache.invalidate_all();
    }

    /// Asks the device where a zone is written next, while nothing of the turn is in flight there.
    /// `None` if the zone takes no more writes.
    ///
    /// # Errors
    /// If it does not say: the status that its error stands for.
    #[cold]
    pub(super) fn ask(&mut self, zone: u32) -> Result<Option<u32>, Status> {
        let start = self.zones.start_of(ZoneNo(zone));
        let mut status = Status::IoErr;
        for _ in 0..REPORTS_MAX {
            // What is invalidated from now on makes the report an old one.
            self.cache.take(zone);
            self.report.clear();
            if let Err(error) = self.device.report_zones(start, 1, &mut self.report) {
                status = error.status();
                continue;
            }
            let offset = self.report.first().filter(|found| found.start == start);
            if !self.cache.is_disturbed(zone) {
                return Ok(offset.and_then(offset_of));
            }
        }
        Err(status)
    }
}

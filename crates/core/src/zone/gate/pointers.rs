//! Zone append for devices that have none: a cache of write pointers, and the report of one zone
//! that reloads a lost pointer.

use std::sync::Arc;

use blockyard_sync::wp_cache::WpCache;

use crate::bio::Status;
use crate::device::Device;
use crate::geometry::ZoneGeometry;
use crate::units::{Sector, ZoneNo};
use crate::zone::{ZoneCond, ZoneInfo};

/// How many reports may fail or become outdated before the append that needs the pointer fails.
const REPORTS_MAX: u32 = 3;

/// One channel's access to a device's write pointers.
pub(super) struct Pointers<D> {
    cache: Arc<WpCache>,
    device: Arc<D>,
    zones: ZoneGeometry,
    report: Vec<ZoneInfo>,
}

/// The write pointer of a zone, in sectors from its start; `None` if the zone accepts no writes.
fn offset_of(zone: &ZoneInfo) -> Option<u32> {
    let offset = match zone.cond {
        ZoneCond::NotWp | ZoneCond::ReadOnly | ZoneCond::Offline => return None,
        // A finish leaves the write pointer at the end of the zone, beyond its capacity.
        ZoneCond::Full => zone.capacity_sectors,
        _ => zone.wp.0.checked_sub(zone.start.0)?,
    };
    u32::try_from(offset).ok()
}

/// Fills the cache from a report of all zones, as far as it succeeds. Other pointers are queried
/// when needed.
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

    /// Begins a ticket in a zone: returns the pointer if it is known.
    #[inline]
    pub(super) fn begin(&self, zone: u32) -> Option<u32> {
        self.cache.take(zone)
    }

    /// Ends a ticket in a zone.
    #[inline]
    pub(super) fn end(&self, zone: u32, pointer: Option<u32>) {
        self.cache.put(zone, pointer);
    }

    /// Whether the zone was changed by another path since the ticket began.
    #[inline]
    pub(super) fn is_disturbed(&self, zone: u32) -> bool {
        self.cache.is_disturbed(zone)
    }

    /// Invalidates the pointers of all zones: any of them may have changed.
    pub(super) fn forget_all(&self) {
        self.cache.invalidate_all();
    }

    /// Queries the device for the write pointer of a zone, while no request of the ticket is in
    /// flight there. Returns `None` if the zone accepts no writes.
    ///
    /// # Errors
    /// If the query fails: the status of the device's error.
    #[cold]
    pub(super) fn ask(&mut self, zone: u32) -> Result<Option<u32>, Status> {
        let start = self.zones.start_of(ZoneNo(zone));
        let mut status = Status::IoErr;
        for _ in 0..REPORTS_MAX {
            // From here on an invalidation makes the report outdated.
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

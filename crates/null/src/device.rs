//! The device: created from a configuration, with reports and with faults injected at run time.
#![allow(clippy::disallowed_types)] // Injected faults are control plane.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_core::inject::{Injection, ZoneFault, parse_zone_fault};
use blockyard_core::zone::{AtomicZoneSet, ZoneCond, ZoneInfo, ZoneSet};
use blockyard_core::{Device, DeviceError, Extent, Geometry, Limits, Sector, ZoneNo};

use crate::config::NullConfig;
use crate::error::NullError;
use crate::queue::{Eraser, NullQueue};
use crate::shared::Shared;

/// A null device. `Z` guards its zones.
///
/// Faults that [`Device::inject`] can set, in addition to those of the fault injector:
///
/// | name | value | effect |
/// | --- | --- | --- |
/// | `badblocks` | `+START-END`, `-START-END` | 512-byte sectors, END inclusive, that fail |
/// | `badblocks_once` | `0`, `1` | a bad block becomes good after the first error |
/// | `badblocks_partial_io` | `0`, `1` | the data before a bad block are transferred |
/// | `zone_readonly`, `zone_offline` | `SECTOR`, `-SECTOR` | breaks the zone; repairs it, emptied |
/// | `timeout`, `requeue` | a [`crate::FaultAttr`], or empty for never | as null_blk's |
/// | `power_cut` | empty | loses the data in the write cache; zones keep their write pointers |
pub struct Null<Z: ZoneSet = AtomicZoneSet> {
    shared: Arc<Shared<Z>>,
    notes: Vec<String>,
    /// Serializes faults that change the condition of a zone.
    zone_faults: Mutex<()>,
}

impl Null {
    /// Creates a device.
    ///
    /// # Errors
    /// If a parameter is invalid, or there is not enough memory.
    pub fn open(config: NullConfig) -> Result<Arc<Null>, NullError> {
        Null::open_with(config).map(Arc::new)
    }
}

impl<Z: ZoneSet> Null<Z> {
    /// Creates a device whose zones are guarded by `Z`.
    ///
    /// # Errors
    /// As [`Null::open`].
    pub fn open_with(config: NullConfig) -> Result<Null<Z>, NullError> {
        let (shared, notes) = Shared::new(&config)?;
        Ok(Null { shared: Arc::new(shared), notes, zone_faults: Mutex::new(()) })
    }

    /// A sentence for each parameter that was corrected, by null_blk's rules.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The corrected configuration.
    pub fn config(&self) -> &NullConfig {
        &self.shared.config
    }

    /// The zones of a zoned device.
    pub fn zones(&self) -> Option<&Z> {
        self.shared.zones.as_ref()
    }

    fn check_sector(&self, sector: Sector) -> Result<(), DeviceError> {
        let sectors = self.shared.geometry.sectors;
        if sector.0 < sectors { Ok(()) } else { Err(DeviceError::OutOfRange { sector, sectors }) }
    }

    fn break_zone(
        &self,
        field: &'static str,
        value: &str,
        cond: ZoneCond,
    ) -> Result<(), DeviceError> {
        let invalid = |wanted: &str| {
            let (value, wanted) = (value.to_owned(), wanted.to_owned());
            DeviceError::Invalid { field, value, wanted }
        };
        let shared = &self.shared;
        let (Some(zones), Some(geometry)) = (&shared.zones, &shared.geometry.zones) else {
            return Err(invalid("a device with zones (zoned=1)"));
        };
        let (sector, fault) = parse_zone_fault(value)
            .ok_or_else(|| invalid("a sector, or -SECTOR for the zone to be repaired"))?;
        self.check_sector(sector)?;
        let zone = geometry.zone_of(sector);
        if geometry.is_conventional(zone) {
            return Err(invalid("a sector of a sequential zone"));
        }
        // `ZoneSet::break_zone` toggles, as null_blk does. Only faults enter or leave these
        // conditions, so under the lock a zone in the requested condition stays in it.
        let _held = self.zone_faults.lock().unwrap_or_else(PoisonError::into_inner);
        if (zones.info(zone).cond == cond) == (fault == ZoneFault::Repair) {
            zones.break_zone(zone, cond, &mut Eraser(shared.data.as_ref()));
        }
        Ok(())
    }
}

impl<Z: ZoneSet> Device for Null<Z> {
    type Queue = NullQueue<Z>;

    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    fn open_queue(&self) -> Result<NullQueue<Z>, DeviceError> {
        Ok(NullQueue::new(Arc::clone(&self.shared), self.shared.next_queue()))
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        self.check_sector(from)?;
        let shared = &self.shared;
        if let (Some(zones), Some(geometry)) = (&shared.zones, &shared.geometry.zones) {
            let first = geometry.zone_of(from).0;
            let numbers = first..geometry.zone_count;
            out.extend(numbers.take(zones_max).map(|number| zones.info(ZoneNo(number))));
        }
        Ok(())
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let shared = &self.shared;
        let sectors = sectors.min(shared.geometry.sectors.saturating_sub(from.0)).max(1);
        let nothing = |sectors| Extent { sectors, allocated: false, zero: false };
        let Some(data) = &shared.data else { return nothing(sectors) };
        if from.0 >= shared.geometry.sectors {
            return nothing(sectors);
        }
        let (Some(zones), Some(geometry)) = (&shared.zones, &shared.geometry.zones) else {
            return data.extent(from, sectors);
        };
        let zone = geometry.zone_of(from);
        let zone_end = geometry.start_of(zone) + geometry.zone_sectors;
        let sectors = sectors.min(zone_end - from);
        match zones.readable_end(zone) {
            // Above the write pointer a zone reads as 0xFF and has nothing allocated.
            Ok(end) if end > from => data.extent(from, sectors.min(end - from)),
            _ => nothing(sectors),
        }
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        let no_such_fault = || DeviceError::NoSuchFault { fault: injection.name().to_owned() };
        let Injection::Device { name, value } = injection else { return Err(no_such_fault()) };
        match name.as_str() {
            "zone_readonly" => self.break_zone("zone_readonly", value, ZoneCond::ReadOnly),
            "zone_offline" => self.break_zone("zone_offline", value, ZoneCond::Offline),
            "power_cut" => {
                if let Some(data) = &self.shared.data {
                    data.power_cut();
                }
                Ok(())
            }
            _ if self.shared.faults.set(name, value)? => Ok(()),
            _ => Err(no_such_fault()),
        }
    }
}

impl<Z: ZoneSet> fmt::Debug for Null<Z> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Null").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

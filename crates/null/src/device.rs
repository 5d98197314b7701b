//! The device: created from a configuration, with reports and with faults injected at run time.
#![allow(clippy::disallowed_types)] // Injected faults are control plane.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_core::inject::{Injection, parse_zone_fault};
use blockyard_core::zone::{AtomicZoneSet, ZoneCond, ZoneInfo, ZoneLayout, ZoneSet};
use blockyard_core::{Device, DeviceError, Extent, Geometry, Limits, SECTOR_BYTES, Sector, ZoneNo};
use blockyard_zone_media::{Media, MediaGeometry};

use crate::backend::Backend;
use crate::config::NullConfig;
use crate::data::Data;
use crate::error::NullError;
use crate::in_memory::InMemory;
use crate::on_media::OnMedia;
use crate::queue::NullQueue;
use crate::shape::Shape;
use crate::shared::Shared;

/// A null device; `B` is where it keeps its data and zones: [`Null`], [`NullOnMedia`].
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
/// | `power_cut` | empty | loses the write cache of a device in memory; write pointers stay |
pub struct NullDevice<B> {
    shared: Arc<Shared<B>>,
    notes: Vec<String>,
    /// Serializes faults that change the condition of a zone.
    zone_faults: Mutex<()>,
}

/// A null device in memory. `Z` guards its zones.
pub type Null<Z = AtomicZoneSet> = NullDevice<InMemory<Z>>;

/// A zoned null device whose data and zones are on a medium.
pub type NullOnMedia<M> = NullDevice<OnMedia<M>>;

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
        NullDevice::new(Shape::new(&config)?, |shape| {
            let Shape { geometry, config, .. } = shape;
            let make_zones = |zones| {
                let (sectors, full) = (geometry.sectors, config.zone_full);
                Z::new(ZoneLayout { zones, sectors, full, data: config.memory_backed })
                    .map_err(|_| NullError::no_memory("zone_size", config.zone_size))
            };
            let zones = geometry.zones.clone().map(make_zones).transpose()?;
            let data = match config.memory_backed {
                true => Some(Data::new(config.size, config.cache_size)?),
                false => None,
            };
            Ok(InMemory { zones, data })
        })
    }

    /// The zones of a zoned device.
    pub fn zones(&self) -> Option<&Z> {
        self.shared.backend.zones.as_ref()
    }
}

impl<M: Media + 'static> NullOnMedia<M> {
    /// Opens a zoned device on a medium of [`media_geometry`], with the zones that the medium
    /// records.
    ///
    /// # Errors
    /// If a parameter is invalid, or contradicts the medium.
    pub fn open_on(config: &NullConfig, media: M) -> Result<NullOnMedia<M>, NullError> {
        NullDevice::new(Shape::on_media(config)?, |shape| OnMedia::open(shape, media))
    }
}

/// Checks a configuration for a device on a medium; returns the geometry that its medium must have,
/// and a sentence for each parameter that would be corrected.
///
/// # Errors
/// If a parameter is invalid.
pub fn media_geometry(config: &NullConfig) -> Result<(MediaGeometry, Vec<String>), NullError> {
    let shape = Shape::on_media(config)?;
    let zones = shape.geometry.zones.as_ref().expect("a device on a medium is zoned");
    let geometry = MediaGeometry {
        bytes: shape.config.size,
        zone_bytes: shape.config.zone_size,
        zone_capacity_bytes: zones.zone_capacity_sectors * SECTOR_BYTES,
        conventional_zones: zones.conventional_count,
        block_bytes: shape.config.bs,
    };
    Ok((geometry, shape.notes))
}

#[expect(private_bounds, reason = "no other crate has a backend; all these are private")]
impl<B: Backend> NullDevice<B> {
    fn new(
        mut shape: Shape,
        make: impl FnOnce(&Shape) -> Result<B, NullError>,
    ) -> Result<NullDevice<B>, NullError> {
        let notes = std::mem::take(&mut shape.notes);
        let shared = Arc::new(Shared::new(shape, make)?);
        Ok(NullDevice { shared, notes, zone_faults: Mutex::new(()) })
    }

    fn check_sector(&self, sector: Sector) -> Result<(), DeviceError> {
        let sectors = self.shared.geometry.sectors;
        if sector.0 < sectors { Ok(()) } else { Err(DeviceError::OutOfRange { sector, sectors }) }
    }

    fn change_zone(
        &self,
        field: &'static str,
        value: &str,
        cond: ZoneCond,
    ) -> Result<(), DeviceError> {
        let invalid = |wanted: &str| {
            let (value, wanted) = (value.to_owned(), wanted.to_owned());
            DeviceError::Invalid { field, value, wanted }
        };
        let Some(geometry) = &self.shared.geometry.zones else {
            return Err(invalid("a device with zones (zoned=1)"));
        };
        let (sector, fault) = parse_zone_fault(value)
            .ok_or_else(|| invalid("a sector, or -SECTOR for the zone to be repaired"))?;
        self.check_sector(sector)?;
        let zone = geometry.zone_of(sector);
        if geometry.is_conventional(zone) {
            return Err(invalid("a sector of a sequential zone"));
        }
        let _held = self.zone_faults.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.backend.change_zone_fault(zone, cond, fault)
    }
}

impl<B> NullDevice<B> {
    /// A sentence for each parameter that was corrected, by null_blk's rules.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The corrected configuration.
    pub fn config(&self) -> &NullConfig {
        &self.shared.config
    }
}

impl<B: Backend> Device for NullDevice<B> {
    type Queue = NullQueue<B>;

    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    fn open_queue(&self) -> Result<NullQueue<B>, DeviceError> {
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
        if let Some(geometry) = &shared.geometry.zones {
            let first = geometry.zone_of(from).0;
            let numbers = (first..geometry.zone_count).take(zones_max);
            out.extend(numbers.filter_map(|number| shared.backend.zone(ZoneNo(number))));
        }
        Ok(())
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let shared = &self.shared;
        let sectors = sectors.min(shared.geometry.sectors.saturating_sub(from.0)).max(1);
        if from.0 >= shared.geometry.sectors {
            return Extent { sectors, allocated: false, zero: false };
        }
        B::extent(shared, from, sectors)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        let no_such_fault = || DeviceError::NoSuchFault { fault: injection.name().to_owned() };
        let Injection::Device { name, value } = injection else { return Err(no_such_fault()) };
        match name.as_str() {
            "zone_readonly" => self.change_zone("zone_readonly", value, ZoneCond::ReadOnly),
            "zone_offline" => self.change_zone("zone_offline", value, ZoneCond::Offline),
            "power_cut" if self.shared.backend.power_cut() => Ok(()),
            "power_cut" => {
                let wanted = "a device in memory: this one keeps its data".to_owned();
                Err(DeviceError::Invalid { field: "power_cut", value: value.clone(), wanted })
            }
            _ if self.shared.faults.set(name, value)? => Ok(()),
            _ => Err(no_such_fault()),
        }
    }
}

impl<B> fmt::Debug for NullDevice<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullDevice").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

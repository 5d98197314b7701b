//! Faults that can be injected into the emulated disk at run time.
//!
//! | name | value | effect |
//! | --- | --- | --- |
//! | `zone_readonly`, `zone_offline` | `SECTOR`, `-SECTOR` | breaks its zone; repairs it, emptied |

use blockyard_core::DeviceError;
use blockyard_core::inject::{Injection, ZoneFault, parse_zone_fault};
use blockyard_core::zone::ZoneCond;

use super::Disk;
use crate::layout::ZonePart;
use blockyard_zone_media::Media;

impl<M: Media> Disk<M> {
    /// Applies a fault.
    pub(super) fn fault(&self, injection: &Injection) -> Result<(), DeviceError> {
        match injection {
            Injection::Device { name, value } if name == "zone_readonly" => {
                self.break_zone_at("zone_readonly", value, ZoneCond::ReadOnly)
            }
            Injection::Device { name, value } if name == "zone_offline" => {
                self.break_zone_at("zone_offline", value, ZoneCond::Offline)
            }
            other => Err(DeviceError::NoSuchFault { fault: other.name().to_owned() }),
        }
    }

    fn break_zone_at(
        &self,
        field: &'static str,
        value: &str,
        cond: ZoneCond,
    ) -> Result<(), DeviceError> {
        let invalid = |wanted: &str| {
            let (value, wanted) = (value.to_owned(), wanted.to_owned());
            DeviceError::Invalid { field, value, wanted }
        };
        let (sector, fault) = parse_zone_fault(value)
            .ok_or_else(|| invalid("a sector, or -SECTOR for the zone to be repaired"))?;
        let sectors = self.layout().sectors();
        if sector.0 >= sectors {
            return Err(DeviceError::OutOfRange { sector, sectors });
        }
        let place = self.layout().place_of(sector);
        if place.part != ZonePart::Sequential {
            return Err(invalid("a sector of a sequential zone"));
        }
        let done = match fault {
            ZoneFault::Break => self.break_zone(place.slot, cond),
            ZoneFault::Repair => self.repair_zone(place.slot, cond),
        };
        done.map_err(|error| DeviceError::Os {
            what: "the medium does not keep the zone's state",
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DiskConfig;
    use crate::transport::ScsiTransport;
    use blockyard_zone_media::MemoryMedium;

    fn inject(disk: &Disk<MemoryMedium>, name: &str, value: &str) -> Result<(), DeviceError> {
        disk.inject(&Injection::Device { name: name.to_owned(), value: value.to_owned() })
    }

    #[test]
    fn zones_break_once_and_are_repaired() {
        let config = DiskConfig {
            size: 8 << 20,
            zone_size: 1 << 20,
            zone_nr_conv: 1,
            ..DiskConfig::default()
        };
        let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
        let disk = Disk::open(config, memory).unwrap();
        for (name, cond) in
            [("zone_readonly", ZoneCond::ReadOnly), ("zone_offline", ZoneCond::Offline)]
        {
            for _ in 0..2 {
                inject(&disk, name, "4097").unwrap();
                assert_eq!(disk.zone(2).cond, cond, "the fault again changes nothing");
            }
            for _ in 0..2 {
                inject(&disk, name, "-4097").unwrap();
                assert_eq!(disk.zone(2).cond, ZoneCond::Empty);
            }
            for (value, wanted) in [("x", "a sector"), ("0", "a sector of a sequential zone")] {
                let error = inject(&disk, name, value).unwrap_err().to_string();
                assert!(error.contains(wanted), "{error}");
            }
            let error = inject(&disk, name, "99999999").unwrap_err();
            assert!(matches!(error, DeviceError::OutOfRange { .. }));
        }
        let error = inject(&disk, "badblocks", "1").unwrap_err();
        assert!(matches!(error, DeviceError::NoSuchFault { .. }));
    }
}

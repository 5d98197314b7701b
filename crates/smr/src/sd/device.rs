//! The disk as a device: opened by probing, reported on by REPORT ZONES.

use std::fmt;
use std::sync::Arc;

use blockyard_core::inject::Injection;
use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};
use blockyard_core::{
    Device, DeviceError, Extent, Geometry, Limits, SECTOR_BYTES, Sector, ZoneGeometry,
};

use super::command;
use super::error::SdError;
use super::pages::{Inquiry, ZONE_DESCRIPTOR_LEN, ZoneDescriptor, ZoneReport, zone_type};
use super::probe::{Discard, Probed, execute, probe, report_bytes};
use super::queue::SdQueue;
use super::sense_decision::SenseDecision;
use crate::transport::ScsiTransport;

/// Length of a report of one zone: the header, the zone, and a gap zone after it.
const SHORT_REPORT_BYTES: usize = 3 * ZONE_DESCRIPTOR_LEN;

/// A host-managed disk that a transport reaches, driven as Linux's `sd` and `sd_zbc` do.
pub struct Sd<T: ScsiTransport> {
    shared: Arc<Shared<T>>,
}

/// State that the device and its queues share.
pub(super) struct Shared<T: ScsiTransport> {
    pub(super) transport: T,
    pub(super) inquiry: Inquiry,
    pub(super) geometry: Geometry,
    pub(super) limits: Limits,
    pub(super) discard: Discard,
    /// Log2 of the sectors in a logical block.
    pub(super) block_shift: u32,
}

impl<T: ScsiTransport> Sd<T> {
    /// Probes the disk.
    ///
    /// # Errors
    /// If the disk does not respond, or this driver does not support it.
    pub fn open(transport: T) -> Result<Sd<T>, SdError> {
        let Probed { inquiry, geometry, limits, discard } = probe(&transport)?;
        let block_shift = geometry.block_sectors().trailing_zeros();
        let shared = Shared { transport, inquiry, geometry, limits, discard, block_shift };
        Ok(Sd { shared: Arc::new(shared) })
    }

    /// The transport to the disk.
    pub fn transport(&self) -> &T {
        &self.shared.transport
    }

    /// The disk's INQUIRY data.
    pub fn inquiry(&self) -> &Inquiry {
        &self.shared.inquiry
    }
}

impl<T: ScsiTransport> Shared<T> {
    pub(super) fn zones(&self) -> &ZoneGeometry {
        self.geometry.zones.as_ref().expect("only disks with zones are probed")
    }

    pub(super) fn sectors_of(&self, blocks: u64) -> u64 {
        blocks << self.block_shift
    }

    /// Converts a zone descriptor as Linux's `sd_zbc_parse_report` does.
    fn info(&self, zone: &ZoneDescriptor) -> Option<ZoneInfo> {
        let start = Sector(self.sectors_of(zone.start));
        let capacity_sectors = self.sectors_of(zone.blocks);
        // The space after a short zone belongs to it: a gap, or the end of the disk.
        let sectors = self.zones().zone_sectors.min(self.geometry.sectors - start.0);
        let end = start + sectors;
        let kind = match zone.kind {
            zone_type::CONVENTIONAL => ZoneType::Conventional,
            _ => ZoneType::SequentialWriteRequired,
        };
        let cond = ZoneCond::ALL.into_iter().find(|cond| *cond as u8 == zone.cond)?;
        // Without a write pointer the field's value is undefined (ZBC-2 5.4.3).
        let wp = match cond {
            ZoneCond::NotWp | ZoneCond::Full => end,
            ZoneCond::ReadOnly | ZoneCond::Offline => Sector::NONE,
            _ => Sector(self.sectors_of(zone.wp)),
        };
        let inside = wp == Sector::NONE || (start..=end).contains(&wp);
        inside.then_some(ZoneInfo { start, sectors, capacity_sectors, wp, kind, cond })
    }
}

impl<T: ScsiTransport> Shared<T> {
    /// Appends up to `zones_max` zones, from the zone that contains `from` on.
    fn report(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        let zones = self.zones();
        let end = out.len().saturating_add(zones_max);
        let mut next = zones.start_of(zones.zone_of(from));
        // A report of one zone, which channels request on the data path, does not allocate.
        let (mut short, mut long) = ([0; SHORT_REPORT_BYTES], Vec::new());
        while out.len() < end && next.0 < self.geometry.sectors {
            // Twice the wanted number: each zone may be followed by a gap zone.
            let rows = (end - out.len()).saturating_mul(2).saturating_add(1);
            let len = rows.saturating_mul(ZONE_DESCRIPTOR_LEN).min(report_bytes(&self.transport));
            let buffer = if len <= short.len() {
                &mut short[..len]
            } else {
                long.resize(len, 0);
                &mut long[..]
            };
            buffer.fill(0);
            let before = out.len();
            for zone in self.descriptors(next, buffer)?.zones() {
                if zone.kind == zone_type::GAP || out.len() == end {
                    continue;
                }
                let info = Some(&zone).filter(|zone| self.sectors_of(zone.start) == next.0);
                let info = info.and_then(|zone| self.info(zone)).ok_or_else(bad_report)?;
                next = info.start + info.sectors;
                out.push(info);
            }
            if out.len() == before {
                return Err(bad_report());
            }
        }
        Ok(())
    }

    fn descriptors<'b>(
        &self,
        from: Sector,
        buffer: &'b mut [u8],
    ) -> Result<ZoneReport<'b>, DeviceError> {
        let len = u32::try_from(buffer.len()).expect("bounded by `report_bytes`");
        let command = command::report_zones(from.0 >> self.block_shift, len);
        let (decision, ended) = execute(&self.transport, &command, buffer);
        let transferred = match (decision, ended) {
            (SenseDecision::Done, Ok(outcome)) => outcome.transferred.min(buffer.len()),
            (
                SenseDecision::Failed(status)
                | SenseDecision::Retry(status)
                | SenseDecision::Later(status),
                _,
            ) => {
                return Err(DeviceError::Os { what: "REPORT ZONES", errno: status.errno() });
            }
            (SenseDecision::Done, Err(_)) => return Err(bad_report()),
        };
        ZoneReport::read(&buffer[..transferred]).ok_or_else(bad_report)
    }
}

/// Flushes a volatile cache before the disk is released, as Linux's `sd_shutdown` does. A failure
/// cannot be reported here.
impl<T: ScsiTransport> Drop for Shared<T> {
    fn drop(&mut self) {
        if self.limits.write_cache {
            let _ = execute(&self.transport, &command::synchronize_cache(), &mut []);
        }
    }
}

/// The disk reports zones that differ from those at its opening.
fn bad_report() -> DeviceError {
    DeviceError::Os { what: "the zone report makes no sense", errno: libc::EIO }
}

impl<T: ScsiTransport + 'static> Device for Sd<T> {
    type Queue = SdQueue<T>;

    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    fn open_queue(&self) -> Result<SdQueue<T>, DeviceError> {
        Ok(SdQueue::new(Arc::clone(&self.shared)))
    }

    fn report_zones(
        &self,
        from: Sector,
        zones_max: usize,
        out: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        let sectors = self.shared.geometry.sectors;
        if from.0 >= sectors {
            return Err(DeviceError::OutOfRange { sector: from, sectors });
        }
        self.shared.report(from, zones_max, out)
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        self.shared.transport.extent(from, sectors)
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.shared.transport.inject(injection)
    }
}

impl<T: ScsiTransport> fmt::Debug for Sd<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { inquiry, geometry, .. } = &*self.shared;
        f.debug_struct("Sd")
            .field("inquiry", inquiry)
            .field("geometry", geometry)
            .finish_non_exhaustive()
    }
}

impl<T: ScsiTransport> Shared<T> {
    /// Maximum data length of one command, in bytes.
    pub(super) fn request_bytes_max(&self) -> usize {
        (self.limits.sectors_max * SECTOR_BYTES) as usize
    }
}

//! `blockyard zone check`: compares a device's geometry with the limits of other systems, for a
//! device that is opened for this purpose or that a yard serves.

use blockyard_core::zone::check::{Check, Target, Verdict};
use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};
use blockyard_core::{Disk, Geometry, Limits, Sector, ZoneGeometry};
use serde::Serialize;

use crate::client::{Client, ClientError};
use crate::view::{DeviceView, ZoneView};

/// The number of zones that are read at once.
const PAGE: usize = 4096;

/// Checks a device; `None` if it has no zones.
///
/// # Panics
/// Never: a report from the device's start cannot be refused.
pub fn of_disk(target: Target, disk: &dyn Disk) -> Option<Verdict> {
    let mut check = Check::new(target, disk.geometry(), disk.limits())?;
    let (mut from, mut page) = (Sector(0), Vec::with_capacity(PAGE));
    while from.0 < disk.geometry().sectors {
        page.clear();
        disk.report_zones(from, PAGE, &mut page).expect("the sector lies on the device");
        page.iter().for_each(|zone| check.zone(zone));
        match page.last() {
            // A report without progress ends the loop.
            Some(last) if last.start + last.sectors > from => from = last.start + last.sectors,
            _ => break,
        }
    }
    Some(check.finish())
}

/// Checks a device of a running yard; `None` if it has no zones.
///
/// # Errors
/// If the yard does not answer, or has no such device.
pub fn of_served(
    target: Target,
    client: &Client,
    name: &str,
) -> Result<Option<Verdict>, ClientError> {
    let view = client.device(name)?;
    let (geometry, limits) = shape(&view);
    let Some(mut check) = Check::new(target, &geometry, &limits) else { return Ok(None) };
    let mut from = 0;
    loop {
        let page = client.zones(name, from, PAGE)?;
        page.zones.iter().for_each(|zone| check.zone(&info(zone)));
        match page.next {
            Some(next) if next > from => from = next,
            _ => return Ok(Some(check.finish())),
        }
    }
}

/// The geometry and limits of a device from its view, as far as a check needs them.
fn shape(view: &DeviceView) -> (Geometry, Limits) {
    let zones = view.zoned.as_ref().map(|zoned| ZoneGeometry {
        zone_sectors: zoned.zone_sectors,
        zone_capacity_sectors: zoned.zone_capacity_sectors,
        zone_count: zoned.zone_count,
        conventional_count: zoned.conventional_count,
        open_max: zoned.open_max,
        active_max: zoned.active_max,
    });
    let geometry = Geometry {
        sectors: Sector::containing(view.size_bytes).0,
        logical_block_bytes: view.logical_block_bytes,
        physical_block_bytes: view.physical_block_bytes,
        zones,
    };
    let limits = Limits {
        zone_append_sectors_max: view.limits.zone_append_sectors_max.unwrap_or(u64::MAX),
        discard_sectors_max: view.limits.discard_sectors_max.unwrap_or(u64::MAX),
        ..Limits::unlimited(view.limits.queue_depth)
    };
    (geometry, limits)
}

/// A zone from its view. An unknown condition counts as offline: no check depends on it.
fn info(view: &ZoneView) -> ZoneInfo {
    let cond = ZoneCond::ALL.into_iter().find(|cond| *cond as u8 == view.cond_code);
    ZoneInfo {
        start: Sector(view.start),
        sectors: view.len,
        capacity_sectors: view.cap,
        wp: view.wptr.map_or(Sector::NONE, |wptr| Sector(view.start.saturating_add(wptr))),
        kind: match view.kind.as_str() {
            "conventional" => ZoneType::Conventional,
            _ => ZoneType::SequentialWriteRequired,
        },
        cond: cond.unwrap_or(ZoneCond::Offline),
    }
}

/// The output of `--json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VerdictView {
    /// The device.
    pub device: String,
    /// The target, e.g. `linux-6.12`.
    pub target: String,
    /// Whether the target accepts the device.
    pub accepted: bool,
    /// The refusals, in the order in which they would occur.
    pub refusals: Vec<RefusalView>,
    /// Notes for an accepted device.
    pub notes: Vec<String>,
}

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RefusalView {
    /// The component that refuses the device, e.g. `Linux 6.12, block layer`.
    pub by: String,
    /// The error, e.g. `ENODEV`; `null` where only a document forbids it.
    pub error: Option<String>,
    /// The message that the target prints.
    pub message: String,
    /// The parts of the geometry that are refused.
    pub about: String,
}

impl VerdictView {
    /// The view of a verdict.
    pub fn new(device: &str, target: Target, verdict: Verdict) -> VerdictView {
        let refusals = verdict.refusals.into_iter().map(|refusal| RefusalView {
            by: refusal.by.to_owned(),
            error: Some(refusal.error.to_owned()).filter(|error| !error.is_empty()),
            message: refusal.message,
            about: refusal.about,
        });
        let refusals: Vec<_> = refusals.collect();
        VerdictView {
            device: device.to_owned(),
            target: target.name().to_owned(),
            accepted: refusals.is_empty(),
            refusals,
            notes: verdict.notes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{stack, uri};

    fn messages(target: Target, uri: &str) -> Option<Vec<String>> {
        let made = stack::open(&uri::parse(uri).unwrap()).unwrap();
        let verdict = of_disk(target, &*made.disk)?;
        Some(verdict.refusals.into_iter().map(|refusal| refusal.message).collect())
    }

    #[test]
    fn our_devices_are_what_linux_accepts() {
        for query in [
            "size=1G&zone_size=4M",
            "size=1G&zone_size=4M&zone_nr_conv=3&zone_max_open=4",
            "size=1026M&zone_size=4M",
            "size=1G&zone_size=4M&zone_capacity=3M&zone_max_active=9",
        ] {
            let uri = format!("null:///z?zoned=1&{query}");
            for target in [Target::Linux61, Target::Linux612] {
                assert_eq!(messages(target, &uri), Some(Vec::new()), "{query}, {target}");
            }
        }
    }

    #[test]
    fn a_zone_that_the_transport_cannot_express_is_refused() {
        let uri = "null:///z?zoned=1&size=30M&zone_size=4M&zone_nr_conv=1";
        let said = messages(Target::Zns, uri).unwrap();
        assert_eq!(said.len(), 2, "{said:?}");
        assert_eq!(said[1], "invalid zone type 0x1");
        assert_eq!(messages(Target::Virtio, uri), Some(Vec::new()));
        assert_eq!(messages(Target::Zbc, "null:///n?size=1M"), None);
    }

    /// The device has more zones than one page of the report.
    #[test]
    fn a_long_report_is_read_to_its_end() {
        let uri = "null:///z?zoned=1&size=10G&zone_size=1M";
        assert_eq!(messages(Target::Linux612, uri), Some(Vec::new()));
    }
}

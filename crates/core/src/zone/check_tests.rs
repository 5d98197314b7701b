//! A table of geometries with the result of each target.

use super::*;
use crate::zone::ZoneCond;

/// Zones of 64 sectors, blocks of 4 KiB.
const ZONE: u64 = 64;

/// A device that every target accepts: 8 sequential zones.
struct Device {
    geometry: Geometry,
    limits: Limits,
    report: Vec<ZoneInfo>,
}

fn row(start: u64, sectors: u64, capacity_sectors: u64, kind: ZoneType) -> ZoneInfo {
    let cond = match kind {
        ZoneType::Conventional => ZoneCond::NotWp,
        _ => ZoneCond::Empty,
    };
    let (start, wp) = (Sector(start), Sector(start));
    ZoneInfo { start, sectors, capacity_sectors, wp, kind, cond }
}

fn good() -> Device {
    let zones = ZoneGeometry {
        zone_sectors: ZONE,
        zone_capacity_sectors: ZONE,
        zone_count: 8,
        conventional_count: 0,
        open_max: 2,
        active_max: 0,
    };
    let geometry = Geometry {
        sectors: 8 * ZONE,
        logical_block_bytes: 4096,
        physical_block_bytes: 4096,
        zones: Some(zones),
    };
    let limits = Limits { zone_append_sectors_max: 64, ..Limits::unlimited(64) };
    let kind = ZoneType::SequentialWriteRequired;
    let report = (0..8).map(|zone| row(zone * ZONE, ZONE, ZONE, kind)).collect();
    Device { geometry, limits, report }
}

impl Device {
    /// The valid device with a change.
    fn with(change: impl FnOnce(&mut Device)) -> Device {
        let mut device = good();
        change(&mut device);
        device
    }

    fn zones(&mut self) -> &mut ZoneGeometry {
        self.geometry.zones.as_mut().expect("it is zoned")
    }

    fn check(&self, target: Target) -> Verdict {
        let mut check = Check::new(target, &self.geometry, &self.limits).expect("it is zoned");
        self.report.iter().for_each(|zone| check.zone(zone));
        check.finish()
    }

    /// The messages of a target.
    fn messages(&self, target: Target) -> Vec<String> {
        self.check(target).refusals.into_iter().map(|refusal| refusal.message).collect()
    }
}

#[test]
fn a_plain_geometry_is_accepted_everywhere() {
    for target in Target::ALL {
        assert_eq!(good().check(target).refusals, [], "{target}");
    }
}

#[test]
fn a_device_without_zones_is_not_checked() {
    let device = Device::with(|device| device.geometry.zones = None);
    assert!(Check::new(Target::Zns, &device.geometry, &device.limits).is_none());
}

/// A change of the valid device, and the message of each target in the order of [`Target::ALL`];
/// `-` means accepted.
type Case = (&'static str, Device, [&'static str; 5]);

/// Zones of other types and lengths.
fn kinds() -> Vec<Case> {
    let conventional = ZoneType::Conventional;
    vec![
        (
            "conventional zones",
            Device::with(|device| {
                device.zones().conventional_count = 1;
                device.report[0] = row(0, ZONE, ZONE, conventional);
            }),
            ["-", "-", "-", "invalid zone type 0x1", "-"],
        ),
        (
            "only conventional zones",
            Device::with(|device| {
                device.report.iter_mut().for_each(|zone| zone.kind = conventional);
            }),
            [
                "-",
                "Invalid number of conventional zones 8 / 8",
                "Invalid number of conventional zones 8 / 8",
                "invalid zone type 0x1; Invalid number of conventional zones 8 / 8",
                "Invalid number of conventional zones 8 / 8",
            ],
        ),
        (
            "a shorter last zone",
            Device::with(|device| {
                device.geometry.sectors -= 8;
                device.report[7] = row(7 * ZONE, 56, 56, ZoneType::SequentialWriteRequired);
            }),
            [
                "-",
                "-",
                "-",
                "a namespace is a whole number of zones: the shorter last one is lost",
                "-",
            ],
        ),
        (
            "a longer last zone",
            Device::with(|device| {
                device.geometry.sectors += 8;
                device.report[7] = row(7 * ZONE, 72, 64, ZoneType::SequentialWriteRequired);
            }),
            [
                "Invalid zoned device with non constant zone size",
                "Invalid zoned device with larger last zone size",
                "Invalid zoned device with larger last zone size",
                "a namespace is a whole number of zones: the shorter last one is lost; \
                 Invalid zoned device with larger last zone size",
                "Invalid zoned device with larger last zone size",
            ],
        ),
    ]
}

/// Inconsistent reports.
fn reports() -> Vec<Case> {
    vec![
        (
            "a gap in the report",
            Device::with(|device| device.report[3].start += 8),
            [
                "Zone gap at sectors 192..200",
                "Zone gap at sectors 192..200",
                "Zone 3 at LBA 24 is invalid: 25 + 8; Zone gap at sectors 192..200",
                "Zone gap at sectors 192..200",
                "Zone gap at sectors 192..200",
            ],
        ),
        (
            "a short report",
            Device::with(|device| device.report.truncate(6)),
            ["Missing zones from sector 384"; 5],
        ),
        ("an empty report", Device::with(|device| device.report.clear()), ["No zones reported"; 5]),
        (
            "zones of different sizes",
            Device::with(|device| {
                device.report[2].sectors = 56;
                device.report[3].start = Sector(2 * ZONE + 56);
                device.report[3].sectors = 72;
                device.report[3].capacity_sectors = 64;
                device.report[2].capacity_sectors = 56;
            }),
            [
                "Invalid zoned device with non constant zone size",
                "Invalid zoned device with non constant zone size; Invalid variable zone capacity",
                "Invalid zoned device with non constant zone size; Invalid variable zone capacity",
                "Invalid zoned device with non constant zone size; Invalid variable zone capacity",
                "Invalid zoned device with non constant zone size; Invalid variable zone capacity",
            ],
        ),
    ]
}

/// Limits and capacities.
fn limits() -> Vec<Case> {
    vec![
        (
            "no append",
            Device::with(|device| device.limits.zone_append_sectors_max = 0),
            [
                "-",
                "-",
                "-",
                "Zone Append not supported for zoned namespace:1. Forcing to read-only mode",
                "zero max_append_sectors reported",
            ],
        ),
        (
            "an append shorter than a block",
            Device::with(|device| device.limits.zone_append_sectors_max = 4),
            ["-", "-", "-", "-", "write granularity 4096 exceeds max_append_sectors 4 limit"],
        ),
        (
            "an active limit",
            Device::with(|device| device.zones().active_max = 4),
            ["-", "-", "ZBC has no limit of active zones, so no host can know of one", "-", "-"],
        ),
        (
            "capacities that differ",
            Device::with(|device| device.report[5].capacity_sectors = 32),
            [
                "-",
                "Invalid variable zone capacity",
                "Invalid variable zone capacity",
                "Invalid variable zone capacity",
                "Invalid variable zone capacity",
            ],
        ),
        (
            "a capacity of nothing",
            Device::with(|device| {
                device.report.iter_mut().for_each(|zone| zone.capacity_sectors = 0);
            }),
            [
                "-",
                "Invalid zone capacity",
                "Invalid zone capacity",
                "Invalid zone capacity",
                "Invalid zone capacity",
            ],
        ),
    ]
}

#[test]
fn each_target_refuses_with_its_own_message() {
    for (name, device, wanted) in [kinds(), reports(), limits()].into_iter().flatten() {
        for (target, wanted) in Target::ALL.into_iter().zip(wanted) {
            let said = device.messages(target).join("; ");
            let said = if said.is_empty() { "-" } else { &said };
            assert_eq!(said, wanted, "{name}, {target}");
        }
    }
}

#[test]
fn a_zone_size_that_is_no_power_of_two_is_refused_by_all() {
    let device = Device::with(|device| {
        device.zones().zone_sectors = 48;
        device.geometry.sectors = 8 * 48;
        for (number, zone) in device.report.iter_mut().enumerate() {
            *zone = row(number as u64 * 48, 48, 48, zone.kind);
        }
    });
    let plain = "Invalid non power of two zone size (48)";
    let wanted = [
        "Invalid zoned device with non power of two zone size (48)".to_owned(),
        plain.to_owned(),
        format!("Zone size 6 is not a power of two.; {plain}"),
        format!("invalid zone size: 6 for namespace: 1; {plain}"),
        format!("zoned device with non power of two zone size 48; {plain}"),
    ];
    for (target, wanted) in Target::ALL.into_iter().zip(wanted) {
        assert_eq!(device.messages(target).join("; "), wanted, "{target}");
    }
}

#[test]
fn refusal_names_target_and_reason() {
    let device = Device::with(|device| device.report[5].capacity_sectors = 32);
    let verdict = device.check(Target::Linux612);
    assert!(!verdict.is_accepted());
    let refusal = &verdict.refusals[0];
    assert_eq!((refusal.by, refusal.error), ("Linux 6.12, block layer", "ENODEV"));
    assert_eq!(refusal.about, "zone 5 at sector 320: capacity 32 of 64 sectors, others 64");
}

#[test]
fn accepted_geometry_may_carry_a_note() {
    let notes = |device: &Device, target| device.check(target).notes;
    assert_eq!(notes(&good(), Target::Linux612), Vec::<String>::new());
    let device = Device::with(|device| device.zones().open_max = 8);
    let wanted = "the limit of 8 open zones is shown as 0 (none): there are 8 sequential zones";
    assert_eq!(notes(&device, Target::Linux612), [wanted]);
    let device = Device::with(|device| {
        device.zones().zone_capacity_sectors = 48;
        device.report.iter_mut().for_each(|zone| zone.capacity_sectors = 48);
    });
    assert_eq!(device.messages(Target::Zbc), Vec::<String>::new());
    assert!(notes(&device, Target::Zbc)[0].contains("gap zone"));
    let device = Device::with(|device| device.limits.zone_append_sectors_max = 0);
    assert!(notes(&device, Target::Linux61)[0].contains("emulates zone append"));
}

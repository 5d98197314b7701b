//! The zones of a device by condition: `GET /v1/zones`, and metrics.

use std::collections::BTreeMap;

use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{Disk, Sector};
use serde::{Deserialize, Serialize};

/// The number of zones that are read at once to count them.
const ZONES_PAGE: usize = 4096;

/// The zones of a device by condition: `GET /v1/zones`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct ZoneCountsView {
    /// The device.
    pub device: String,
    /// The number of zones by the name of their condition; conditions without a zone are left out.
    pub zones: BTreeMap<String, u64>,
}

impl ZoneCountsView {
    /// The zones of a device; `None` if it has none.
    pub fn new(disk: &dyn Disk) -> Option<ZoneCountsView> {
        disk.geometry().zones.as_ref()?;
        let counts = count_by_condition(disk);
        let zones = counts.into_iter().filter(|(_, count)| *count > 0);
        Some(ZoneCountsView {
            device: disk.name().to_owned(),
            zones: zones.map(|(cond, count)| (cond.name().to_owned(), count)).collect(),
        })
    }
}

/// The number of zones by condition, with a row for each condition; empty without zones, and as far
/// as the device reports them.
pub fn count_by_condition(disk: &dyn Disk) -> Vec<(ZoneCond, u64)> {
    if disk.geometry().zones.is_none() {
        return Vec::new();
    }
    let mut counts = ZoneCond::ALL.map(|cond| (cond, 0));
    let mut page: Vec<ZoneInfo> = Vec::new();
    let mut from = Sector(0);
    while from.0 < disk.geometry().sectors {
        page.clear();
        let reported = disk.report_zones(from, ZONES_PAGE, &mut page);
        let Some(last) = page.last().filter(|_| reported.is_ok()) else { break };
        from = last.start + last.sectors;
        for zone in &page {
            let count = counts.iter_mut().find(|(cond, _)| *cond == zone.cond);
            count.expect("every condition has a row").1 += 1;
        }
    }
    counts.to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_are_counted_page_by_page_and_without_zones_nothing_is() {
        let devices = crate::devices::Devices::new();
        for uri in
            ["null:///plain?size=1M", "null:///z?size=10G&zoned=1&zone_size=1M&zone_nr_conv=2"]
        {
            devices.add(crate::uri::parse(uri).unwrap()).unwrap();
        }
        let disk = |name: &str| devices.find(name).unwrap().disk;
        assert_eq!(ZoneCountsView::new(disk("plain").as_ref()), None);
        assert!(count_by_condition(disk("plain").as_ref()).is_empty());
        let counts = ZoneCountsView::new(disk("z").as_ref()).unwrap();
        assert_eq!(counts.device, "z");
        let wanted = [("empty".to_owned(), 10_238), ("not-wp".to_owned(), 2)];
        assert_eq!(counts.zones, wanted.into());
    }
}

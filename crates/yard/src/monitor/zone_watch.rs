//! The zones of a device while clients watch them: read at a bounded rate, sent as runs.
//!
//! A drive may take long for a report of its zones. The next report begins no sooner than
//! [`REST_FACTOR`] times the duration of the last one after its end, so that reports take at most
//! 5 % of the time of one thread, whatever clients ask for.

use std::time::{Duration, Instant};

use axum::body::Bytes;
use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{DeviceError, Disk, Sector};
use serde::Serialize;

use super::event;

/// The time between two reports of a device that answers at once.
pub(super) const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// How many times as long as a report took there is none.
const REST_FACTOR: u32 = 20;

/// The number of zones that are read at once.
const ZONES_PAGE: usize = 4096;

/// The most zones of a device that is watched: 2 MiB of state, and at most about 16 MiB of text for
/// a client that sees them for the first time.
const ZONES_MAX: usize = 1 << 20;

/// Parts of a zone's capacity in which the written part is given.
const FILL_MAX: u64 = 255;

/// A zone as the map shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ZoneCell {
    /// The condition's number in a ZBC zone descriptor.
    cond: u8,
    /// The written part of the capacity, of 255.
    fill: u8,
}

impl From<&ZoneInfo> for ZoneCell {
    fn from(zone: &ZoneInfo) -> ZoneCell {
        let written = zone.wp.0.saturating_sub(zone.start.0).min(zone.capacity_sectors);
        let fill = match zone.cond {
            ZoneCond::Full => FILL_MAX,
            ZoneCond::Empty | ZoneCond::NotWp | ZoneCond::ReadOnly | ZoneCond::Offline => 0,
            // A zone that is written in part is neither empty nor full on the map.
            _ => {
                let parts = u128::from(written) * u128::from(FILL_MAX);
                let part = parts / u128::from(zone.capacity_sectors.max(1));
                (part as u64).clamp(u64::from(written > 0), FILL_MAX - 1)
            }
        };
        ZoneCell { cond: zone.cond as u8, fill: fill as u8 }
    }
}

/// The zones of a device, in order, and how they are divided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ZoneState {
    cells: Vec<ZoneCell>,
    zone_sectors: u64,
    /// Whether the device has more zones than are watched.
    has_more: bool,
}

/// Reads the zones of a device.
///
/// # Errors
/// If the device does not report them.
pub(super) fn read(disk: &dyn Disk) -> Result<ZoneState, DeviceError> {
    let Some(zones) = disk.geometry().zones.as_ref() else { return Ok(ZoneState::default()) };
    let count = zones.zone_count as usize;
    let zone_sectors = zones.zone_sectors;
    if count > ZONES_MAX {
        return Ok(ZoneState { cells: Vec::new(), zone_sectors, has_more: true });
    }
    let mut cells = Vec::with_capacity(count);
    let mut page: Vec<ZoneInfo> = Vec::new();
    let mut from = Sector(0);
    while from.0 < disk.geometry().sectors {
        page.clear();
        disk.report_zones(from, ZONES_PAGE, &mut page)?;
        let Some(last) = page.last() else { break };
        from = last.start + last.sectors;
        cells.extend(page.iter().map(ZoneCell::from));
    }
    Ok(ZoneState { cells, zone_sectors, has_more: false })
}

/// Zones in a row that look alike: the first one, their number, condition and written part.
type ZoneRun = (usize, usize, u8, u8);

/// An event of type `zones`.
#[derive(Serialize)]
struct ZonesEvent<'a> {
    device: &'a str,
    /// Whether this describes all zones; otherwise only those that have changed.
    full: bool,
    zone_count: usize,
    zone_sectors: u64,
    /// Whether the device has too many zones for the map.
    too_many: bool,
    runs: Vec<ZoneRun>,
}

/// The runs of the cells for which `is_wanted` holds.
fn runs(cells: &[ZoneCell], is_wanted: impl Fn(usize) -> bool) -> Vec<ZoneRun> {
    let mut runs: Vec<ZoneRun> = Vec::new();
    for (number, cell) in cells.iter().enumerate().filter(|(number, _)| is_wanted(*number)) {
        match runs.last_mut() {
            Some((first, count, cond, fill))
                if *first + *count == number && (*cond, *fill) == (cell.cond, cell.fill) =>
            {
                *count += 1;
            }
            _ => runs.push((number, 1, cell.cond, cell.fill)),
        }
    }
    runs
}

/// The zones of a device that clients watch.
#[derive(Debug, Default)]
pub(super) struct ZoneWatch {
    /// The zones as they were read last.
    state: Option<ZoneState>,
    /// The event with all zones, once a client has needed it.
    full: Option<Bytes>,
    /// Whether they are being read.
    is_busy: bool,
    /// The next report begins at this time.
    due: Option<Instant>,
}

impl ZoneWatch {
    /// Whether a report is to be made now; it is, from now on.
    pub(super) fn begin(&mut self, now: Instant) -> bool {
        let begins = !self.is_busy && self.is_due(now);
        self.is_busy |= begins;
        begins
    }

    fn is_due(&self, now: Instant) -> bool {
        self.due.is_none_or(|due| due <= now)
    }

    /// Whether the watch, which no client needs now, may be forgotten: a new one would make a
    /// report at once.
    pub(super) fn may_go(&self, now: Instant) -> bool {
        !self.is_busy && self.is_due(now)
    }

    /// Ends a report that took this long, without a result if the device gave none. Returns the
    /// event with what has changed, for clients that know the zones as they were.
    pub(super) fn end(
        &mut self,
        device: &str,
        read: Option<ZoneState>,
        took: Duration,
        now: Instant,
    ) -> Option<Bytes> {
        self.is_busy = false;
        self.due = Some(now + REPORT_INTERVAL.max(took * REST_FACTOR));
        let read = read?;
        let before = self.state.replace(read);
        let now = self.state.as_ref()?;
        if before.as_ref() == Some(now) {
            return None;
        }
        self.full = None;
        let is_same_shape = |before: &ZoneState| {
            (before.cells.len(), before.zone_sectors) == (now.cells.len(), now.zone_sectors)
        };
        let Some(before) = before.filter(is_same_shape) else { return self.full(device) };
        let changed = runs(&now.cells, |number| now.cells[number] != before.cells[number]);
        Some(zones_event(device, false, now, changed))
    }

    /// The event with all zones, if they have been read.
    pub(super) fn full(&mut self, device: &str) -> Option<Bytes> {
        let state = self.state.as_ref()?;
        let make = || zones_event(device, true, state, runs(&state.cells, |_| true));
        Some(self.full.get_or_insert_with(make).clone())
    }
}

fn zones_event(device: &str, full: bool, state: &ZoneState, runs: Vec<ZoneRun>) -> Bytes {
    event(
        "zones",
        &ZonesEvent {
            device,
            full,
            zone_count: state.cells.len(),
            zone_sectors: state.zone_sectors,
            too_many: state.has_more,
            runs,
        },
    )
}

#[cfg(test)]
mod tests {
    use blockyard_core::zone::ZoneType;

    use super::*;

    fn state(cells: &[(u8, u8)]) -> ZoneState {
        let cells = cells.iter().map(|(cond, fill)| ZoneCell { cond: *cond, fill: *fill });
        ZoneState { cells: cells.collect(), zone_sectors: 8, has_more: false }
    }

    fn data(event: &Bytes) -> serde_json::Value {
        let text = std::str::from_utf8(event).unwrap();
        let line = text.strip_prefix("event: zones\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
        serde_json::from_str(line).unwrap()
    }

    fn end(watch: &mut ZoneWatch, read: ZoneState) -> Option<serde_json::Value> {
        let event = watch.end("z", Some(read), Duration::ZERO, Instant::now());
        event.as_ref().map(data)
    }

    #[test]
    fn the_first_report_has_all_zones_and_the_next_ones_what_changed() {
        let mut watch = ZoneWatch::default();
        assert!(watch.full("z").is_none());
        let first = end(&mut watch, state(&[(1, 0), (1, 0), (14, 255), (1, 0)])).unwrap();
        assert_eq!(first["full"], true);
        assert_eq!(first["runs"], serde_json::json!([[0, 2, 1, 0], [2, 1, 14, 255], [3, 1, 1, 0]]));
        assert_eq!(end(&mut watch, state(&[(1, 0), (1, 0), (14, 255), (1, 0)])), None);
        let next = end(&mut watch, state(&[(2, 9), (1, 0), (14, 255), (2, 9)])).unwrap();
        assert_eq!(next["full"], false);
        assert_eq!(next["runs"], serde_json::json!([[0, 1, 2, 9], [3, 1, 2, 9]]));
        assert_eq!(data(&watch.full("z").unwrap())["runs"][0], serde_json::json!([0, 1, 2, 9]));
        // A device of another size was made under the same name.
        let other = end(&mut watch, state(&[(1, 0)])).unwrap();
        assert_eq!((&other["full"], &other["zone_count"]), (&true.into(), &1.into()));
    }

    #[test]
    fn a_slow_drive_is_asked_for_a_twentieth_of_the_time() {
        let (mut watch, start) = (ZoneWatch::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(watch.begin(start) && !watch.begin(start) && !watch.may_go(start));
        watch.end("z", None, Duration::from_secs(3), after(3));
        assert!(!watch.begin(after(62)) && !watch.may_go(after(62)));
        assert!(watch.may_go(after(63)) && watch.begin(after(63)));
        watch.end("z", None, Duration::from_millis(1), after(63));
        assert!(!watch.begin(after(63)) && watch.begin(after(64)));
    }

    #[test]
    fn zones_that_are_written_in_part_are_neither_empty_nor_full() {
        let cell = |wp, cond| {
            let (start, wp) = (Sector(1000), Sector(wp));
            let kind = ZoneType::SequentialWriteRequired;
            ZoneCell::from(&ZoneInfo {
                start,
                sectors: 1000,
                capacity_sectors: 800,
                wp,
                kind,
                cond,
            })
        };
        assert_eq!(cell(1000, ZoneCond::ExplicitOpen).fill, 0);
        assert_eq!(cell(1001, ZoneCond::ImplicitOpen), ZoneCell { cond: 2, fill: 1 });
        assert_eq!(cell(1400, ZoneCond::Closed), ZoneCell { cond: 4, fill: 127 });
        assert_eq!(cell(1799, ZoneCond::ImplicitOpen).fill, 254);
        assert_eq!(cell(u64::MAX, ZoneCond::Full).fill, 255);
        assert_eq!(cell(u64::MAX, ZoneCond::Offline).fill, 0);
    }

    #[test]
    fn every_zone_of_a_device_is_read() {
        let devices = crate::devices::Devices::new();
        let uri = "null:///z?size=10G&zoned=1&zone_size=1M&zone_nr_conv=2";
        let entry = devices.add(crate::uri::parse(uri).unwrap()).unwrap();
        let state = read(entry.disk.as_ref()).unwrap();
        assert_eq!((state.cells.len(), state.zone_sectors), (10_240, 2048));
        let found = runs(&state.cells, |_| true);
        assert_eq!(found, [(0, 2, 0, 0), (2, 10_238, 1, 0)]);
    }
}

//! The zones of a device while clients watch them: read at a bounded rate, sent as runs.
//!
//! A drive may take long for a report of its zones. The next report begins no sooner than
//! [`REST_FACTOR`] times the duration of the last one after its end, so that reports take at most
//! 5 % of the time of one thread, whatever clients ask for.
//!
//! The text of a million zones takes long to make. It is made from a shared state, so that the
//! thread that makes it holds no lock of the monitor.

use std::sync::Arc;
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

/// What is new in a report.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ZoneChange {
    /// Nothing.
    Nothing,
    /// Some zones: the event for clients that know the zones as they were.
    Some(Bytes),
    /// All zones: it is the first report, or the zones are those of another device.
    All,
}

/// Compares a report with the one before.
pub(super) fn compare(device: &str, before: Option<&ZoneState>, now: &ZoneState) -> ZoneChange {
    let is_same_shape = |before: &&ZoneState| {
        (before.cells.len(), before.zone_sectors) == (now.cells.len(), now.zone_sectors)
    };
    match before.filter(is_same_shape) {
        None => ZoneChange::All,
        Some(before) if before == now => ZoneChange::Nothing,
        Some(before) => {
            let changed = runs(&now.cells, |number| now.cells[number] != before.cells[number]);
            ZoneChange::Some(zones_event(device, false, now, changed))
        }
    }
}

/// The event with all zones of a device.
pub(super) fn all_zones(device: &str, now: &ZoneState) -> Bytes {
    zones_event(device, true, now, runs(&now.cells, |_| true))
}

/// The zones of a device that clients watch.
#[derive(Debug, Default)]
pub(super) struct ZoneWatch {
    /// The zones as they were read last.
    state: Option<Arc<ZoneState>>,
    /// The event with all of these zones, once a client has needed it.
    all: Option<Bytes>,
    /// Whether a thread makes this event.
    is_made: bool,
    /// Whether the zones are being read.
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
    pub(super) fn may_be_forgotten(&self, now: Instant) -> bool {
        !self.is_busy && !self.is_made && self.is_due(now)
    }

    /// The zones as they were read last. Only the thread that makes a report replaces them.
    pub(super) fn state(&self) -> Option<Arc<ZoneState>> {
        self.state.clone()
    }

    /// Ends a report that took this long. `changed` are the zones if they are not what they were.
    pub(super) fn end(&mut self, changed: Option<ZoneState>, took: Duration, now: Instant) {
        self.is_busy = false;
        self.due = Some(now + REPORT_INTERVAL.max(took * REST_FACTOR));
        if let Some(changed) = changed {
            (self.state, self.all) = (Some(Arc::new(changed)), None);
        }
    }

    /// The event with all zones, if it has been made.
    pub(super) fn all(&self) -> Option<Bytes> {
        self.all.clone()
    }

    /// The zones of which the caller is to make the event with all zones; `None` if none have been
    /// read, or if another thread makes it.
    pub(super) fn begin_all(&mut self) -> Option<Arc<ZoneState>> {
        let state = self.state.clone().filter(|_| !self.is_made)?;
        self.is_made = true;
        Some(state)
    }

    /// Keeps the event with all zones; `false` if the zones have changed while it was made.
    pub(super) fn end_all(&mut self, state: &Arc<ZoneState>, event: &Bytes) -> bool {
        self.is_made = false;
        let is_new = self.state.as_ref().is_some_and(|newest| Arc::ptr_eq(newest, state));
        if is_new {
            self.all = Some(event.clone());
        }
        is_new
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

    fn compared(before: Option<&ZoneState>, now: &ZoneState) -> serde_json::Value {
        match compare("z", before, now) {
            ZoneChange::Some(event) => data(&event),
            other => format!("{other:?}").into(),
        }
    }

    #[test]
    fn the_first_report_has_all_zones_and_the_next_ones_what_changed() {
        let first = state(&[(1, 0), (1, 0), (14, 255), (1, 0)]);
        assert_eq!(compared(None, &first), "All");
        let all = data(&all_zones("z", &first));
        assert_eq!(all["full"], true);
        assert_eq!(all["runs"], serde_json::json!([[0, 2, 1, 0], [2, 1, 14, 255], [3, 1, 1, 0]]));
        assert_eq!(compared(Some(&first), &first.clone()), "Nothing");
        let next = state(&[(2, 9), (1, 0), (14, 255), (2, 9)]);
        let changed = compared(Some(&first), &next);
        assert_eq!(changed["full"], false);
        assert_eq!(changed["runs"], serde_json::json!([[0, 1, 2, 9], [3, 1, 2, 9]]));
        // A device of another size was made under the same name.
        assert_eq!(compared(Some(&next), &state(&[(1, 0)])), "All");
    }

    #[test]
    fn one_thread_makes_the_event_with_all_zones_and_an_old_one_is_not_kept() {
        let mut watch = ZoneWatch::default();
        assert!(watch.begin_all().is_none(), "no zones have been read");
        let end = |watch: &mut ZoneWatch, zones| {
            watch.end(Some(state(zones)), Duration::ZERO, Instant::now());
        };
        end(&mut watch, &[(1, 0)]);
        let old = watch.begin_all().unwrap();
        let later = Instant::now() + Duration::from_secs(5);
        assert!(watch.begin_all().is_none() && !watch.may_be_forgotten(later));
        end(&mut watch, &[(2, 9)]);
        assert!(!watch.end_all(&old, &all_zones("z", &old)) && watch.all().is_none());
        let new = watch.begin_all().unwrap();
        assert!(watch.end_all(&new, &all_zones("z", &new)));
        assert_eq!(data(&watch.all().unwrap())["runs"], serde_json::json!([[0, 1, 2, 9]]));
        assert!(watch.may_be_forgotten(later));
        // A report without a change leaves the event as it is.
        watch.end(None, Duration::ZERO, Instant::now());
        assert!(watch.all().is_some());
    }

    #[test]
    fn a_slow_drive_is_asked_for_a_twentieth_of_the_time() {
        let (mut watch, start) = (ZoneWatch::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(watch.begin(start) && !watch.begin(start) && !watch.may_be_forgotten(start));
        watch.end(None, Duration::from_secs(3), after(3));
        assert!(!watch.begin(after(62)) && !watch.may_be_forgotten(after(62)));
        assert!(watch.may_be_forgotten(after(63)) && watch.begin(after(63)));
        watch.end(None, Duration::from_millis(1), after(63));
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

//! Zone reports and zone operations on a device, in requests of bounded size.

use std::time::{Duration, Instant};

use blockyard_core::blocking::Io;
use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{Bio, Disk, Op, Sector, Status, ZoneGeometry};

use crate::error::YardError;
use crate::param::shown;
use crate::suggestion::suggestion;
use crate::view::{ZoneDone, ZoneRequest, ZoneView, ZonesView};

/// The most zones of one response.
pub const REPORT_MAX: usize = 4096;

/// The most zones that one request changes.
pub const BATCH_MAX: u64 = 65_536;

/// The timeout of a zone; a request starts no further zone after this time either.
const DEADLINE: Duration = Duration::from_secs(30);

/// A zone operation, by the words of `blkzone`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verb {
    /// The word.
    pub word: &'static str,
    op: Op,
}

/// Every verb.
pub const VERBS: [Verb; 5] = [
    Verb { word: "open", op: Op::ZoneOpen },
    Verb { word: "close", op: Op::ZoneClose },
    Verb { word: "finish", op: Op::ZoneFinish },
    Verb { word: "reset", op: Op::ZoneReset },
    Verb { word: "reset-all", op: Op::ZoneResetAll },
];

impl Verb {
    /// The operation of a word.
    ///
    /// # Errors
    /// If there is none.
    pub fn from_word(word: &str) -> Result<Verb, YardError> {
        VERBS.into_iter().find(|verb| verb.word == word).ok_or_else(|| {
            let words = VERBS.map(|verb| verb.word);
            YardError::Argument {
                field: "verb",
                value: shown(word),
                wanted: format!("one of {}{}", words.join(", "), suggestion(word, words)),
            }
        })
    }
}

/// A page of a device's zones: at most `count` and at most [`REPORT_MAX`], starting with the one
/// that holds `from`.
///
/// # Errors
/// If the device has no zones, or `from` lies beyond it.
pub fn report(disk: &dyn Disk, from: u64, count: usize) -> Result<ZonesView, YardError> {
    zones_of(disk)?;
    let mut zones: Vec<ZoneInfo> = Vec::new();
    let count = count.min(REPORT_MAX);
    if count > 0 {
        disk.report_zones(Sector(from), count, &mut zones)?;
    }
    let end = zones.last().map_or(from, |zone| zone.start.0 + zone.sectors);
    let next = (end < disk.geometry().sectors).then_some(end);
    Ok(ZonesView { zones: zones.iter().map(ZoneView::from).collect(), next })
}

/// Executes a verb on the zones of a request, in order, up to [`BATCH_MAX`] of them. Blocks until
/// all are done, one refuses, or the time is up. A request for all zones to the end skips those
/// that the verb cannot change, as a reset of all does in Linux.
///
/// # Errors
/// If the device has no zones, the range is invalid, or a zone refuses or does not answer.
pub fn manage(disk: &dyn Disk, verb: Verb, request: &ZoneRequest) -> Result<ZoneDone, YardError> {
    let zones = zones_of(disk)?;
    let io = Io::new(disk.open()?, blockyard_core::SECTOR_BYTES as usize);
    let mut work = ZoneWork { disk, zones, verb, io: io.with_timeout(DEADLINE) };
    let whole = request.from.unwrap_or(0) == 0 && request.count.is_none();
    if verb.op == Op::ZoneResetAll || (verb.op == Op::ZoneReset && whole) {
        if !whole {
            let value = format!("from={}", request.from.unwrap_or(0));
            let wanted = "no range with reset-all; `reset` takes one".to_owned();
            return Err(YardError::Argument { field: "from", value, wanted });
        }
        work.run(Op::ZoneResetAll, 0, 0)?;
        return Ok(ZoneDone { zones: zones.zone_count.into(), next: None });
    }
    let (first, end) = range(disk, zones, request)?;
    let until = Instant::now() + DEADLINE;
    let (mut next, mut done) = (first, 0);
    while next < end && next - first < BATCH_MAX && Instant::now() < until {
        if !(request.count.is_none() && work.hindrance(next).is_some()) {
            work.run(verb.op, next, done)?;
            done += 1;
        }
        next += 1;
    }
    Ok(ZoneDone { zones: done, next: (next < end).then(|| next * zones.zone_sectors) })
}

/// The execution of a verb on the zones of a device.
struct ZoneWork<'d> {
    disk: &'d dyn Disk,
    zones: &'d ZoneGeometry,
    verb: Verb,
    io: Io,
}

impl ZoneWork<'_> {
    fn run(&mut self, op: Op, zone: u64, done: u64) -> Result<(), YardError> {
        let sector = zone * self.zones.zone_sectors;
        let Err(status) = self.io.run(Bio::new(op, Sector(sector), 0)) else { return Ok(()) };
        let reason = self.reason(status, zone);
        let zone = zone as u32; // A zone number, and those have 32 bits.
        Err(YardError::Zone { verb: self.verb.word, zone, sector, status, reason, done })
    }

    /// The end of a sentence with the reason for which a zone refused; empty if it is unknown.
    fn reason(&self, status: Status, zone: u64) -> String {
        let ZoneGeometry { open_max, active_max, .. } = self.zones;
        match status {
            Status::ZoneOpenResource => {
                format!(
                    ": {open_max} zones are open already, the most that this device allows; close, \
                     finish or reset one first"
                )
            }
            Status::ZoneActiveResource => {
                format!(
                    ": {active_max} zones are active already, the most that this device allows; \
                     finish or reset one first"
                )
            }
            Status::Timeout => {
                let seconds = DEADLINE.as_secs();
                format!(": the device gave no answer for {seconds} s, and may still carry it out")
            }
            // The status of the null device, and that of SMR disks.
            Status::IoErr | Status::Target => {
                let hindrance = self.hindrance(zone);
                let way_out = match hindrance {
                    Some("conventional") => "; name a range of sequential zones",
                    Some("full") => "; reset it first",
                    _ => "",
                };
                let reason = hindrance.map(|what| format!(": zone {zone} is {what}{way_out}"));
                reason.unwrap_or_default()
            }
            _ => String::new(),
        }
    }

    /// The state of a zone that prevents the verb.
    fn hindrance(&self, zone: u64) -> Option<&'static str> {
        let mut found: Vec<ZoneInfo> = Vec::new();
        let start = Sector(zone * self.zones.zone_sectors);
        self.disk.report_zones(start, 1, &mut found).ok()?;
        match (found.first()?.cond, self.verb.op) {
            (ZoneCond::NotWp, _) => Some("conventional"),
            (ZoneCond::ReadOnly, _) => Some("read-only"),
            (ZoneCond::Offline, _) => Some("offline"),
            (ZoneCond::Full, Op::ZoneOpen | Op::ZoneClose) => Some("full"),
            (ZoneCond::Empty, Op::ZoneClose) => Some("empty, not open"),
            _ => None,
        }
    }
}

/// The numbers of a request's zones: the first, and one past the last.
fn range(
    disk: &dyn Disk,
    zones: &ZoneGeometry,
    request: &ZoneRequest,
) -> Result<(u64, u64), YardError> {
    let from = request.from.unwrap_or(0);
    let argument = |field, value: u64, wanted| {
        Err(YardError::Argument { field, value: value.to_string(), wanted })
    };
    let sectors = disk.geometry().sectors;
    if from >= sectors {
        return argument("from", from, format!("a sector below {sectors}"));
    }
    if !from.is_multiple_of(zones.zone_sectors) {
        let wanted = format!("a zone's first sector, a multiple of {}", zones.zone_sectors);
        return argument("from", from, wanted);
    }
    let first = from / zones.zone_sectors;
    let left = u64::from(zones.zone_count) - first;
    let count = request.count.unwrap_or(left);
    if count == 0 || count > left {
        return argument("count", count, format!("1 to {left} zones from there"));
    }
    Ok((first, first + count))
}

fn zones_of(disk: &dyn Disk) -> Result<&ZoneGeometry, YardError> {
    let zones = disk.geometry().zones.as_ref();
    zones.ok_or_else(|| YardError::NotZoned { name: disk.name().to_owned() })
}

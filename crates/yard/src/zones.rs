//! Zone reports and zone operations on a device, in bounded pieces.

use blockyard_core::blocking::Io;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{Bio, Disk, Op, Sector, ZoneGeometry};

use crate::error::YardError;
use crate::nearest::suggestion;
use crate::param::shown;
use crate::view::{ZoneDone, ZoneRequest, ZoneView, ZonesView};

/// Most zones in one answer.
pub const REPORT_MAX: usize = 4096;

/// Most zones that one request works on.
pub const BATCH_MAX: u64 = 65_536;

/// What can be asked of zones, by the words of `blkzone`.
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
    /// The verb that a word means.
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

/// A page of a device's zones: at most `count` and at most [`REPORT_MAX`], from the one that holds
/// `from` on.
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

/// Carries a verb out on the zones that a request names, in order, up to [`BATCH_MAX`] of them.
/// Blocks until all are done or one refuses.
///
/// # Errors
/// If the device has no zones, the range does not fit it, or a zone refuses.
pub fn manage(disk: &dyn Disk, verb: Verb, request: &ZoneRequest) -> Result<ZoneDone, YardError> {
    let zones = zones_of(disk)?;
    let mut io = Io::new(disk.open()?, blockyard_core::SECTOR_BYTES as usize);
    // As in Linux, a reset of the whole device passes over zones that cannot be reset.
    let whole = request.from.unwrap_or(0) == 0 && request.count.is_none();
    if verb.op == Op::ZoneResetAll || (verb.op == Op::ZoneReset && whole) {
        if !whole {
            let value = format!("from={}", request.from.unwrap_or(0));
            let wanted = "no range with reset-all; `reset` takes one".to_owned();
            return Err(YardError::Argument { field: "from", value, wanted });
        }
        run(&mut io, zones, verb, Op::ZoneResetAll, 0, 0)?;
        return Ok(ZoneDone { zones: zones.zone_count.into(), next: None });
    }
    let (first, end) = range(disk, zones, request)?;
    let stop = end.min(first + BATCH_MAX);
    for zone in first..stop {
        run(&mut io, zones, verb, verb.op, zone, zone - first)?;
    }
    let next = (stop < end).then(|| stop * zones.zone_sectors);
    Ok(ZoneDone { zones: stop - first, next })
}

fn run(
    io: &mut Io,
    zones: &ZoneGeometry,
    verb: Verb,
    op: Op,
    zone: u64,
    done: u64,
) -> Result<(), YardError> {
    let sector = zone * zones.zone_sectors;
    let zone = zone as u32; // A zone number, and those have 32 bits.
    let failed = |status| YardError::Zone { verb: verb.word, zone, sector, status, done };
    io.run(Bio::new(op, Sector(sector), 0)).map(drop).map_err(failed)
}

/// The zones that a request names, as numbers from the first to behind the last.
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

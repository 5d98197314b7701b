//! The state of a disk's zones: one atomic word each, exchanged by the rules of ZBC.
//!
//! `blockyard_core::zone::zbc` decides the new state of a zone and `blockyard_sync::atomic_zones`
//! exchanges its word, so commands to different zones share no lock. A lock protects the number of
//! open zones; without a limit it is never taken.

use std::io;

use blockyard_core::inject::ZoneFault;
use blockyard_core::zone::{Zone, ZoneCond, ZoneInfo, ZoneOp, holding_of, zbc};
use blockyard_core::{SECTOR_SHIFT, Sector};
use blockyard_sync::atomic_zones::{AtomicZones, Change, UNREADABLE, ZoneView};
use blockyard_sync::zone_resources::{Holding, ZoneCounts, ZoneLimits};
use zbc::Refusal;

use crate::config::{DiskConfig, DiskError};
use crate::layout::Layout;
use crate::media::{Media, ZoneRecord};

/// The zones of a disk that have a state.
#[derive(Debug)]
pub(crate) struct Zones {
    words: AtomicZones<ZoneCond>,
    layout: Layout,
    physical_sectors: u64,
}

type View = ZoneView<ZoneCond>;

/// The part of a zone's state that its word holds.
#[inline]
fn view_of(zone: &Zone) -> View {
    let wp = zone.readable_end().map_or(UNREADABLE, |end| end - zone.start());
    ZoneView { cond: zone.cond(), wp }
}

/// The state of a zone after power on, from its record: ZBC-2 4.5.3.5, no zone is open.
fn restored(
    layout: &Layout,
    slot: u32,
    record: ZoneRecord,
    physical_sectors: u64,
) -> Result<View, DiskError> {
    let zone = layout.sequential(slot);
    let (len, written) = (zone.end() - zone.start(), record.written_sectors);
    let refused = |wanted: String| DiskError::Zone {
        zone: slot,
        cond: record.cond,
        written_sectors: written,
        wanted,
    };
    let zone = match record.cond {
        ZoneCond::Empty => zone,
        ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen | ZoneCond::Closed => {
            if written > len || !written.is_multiple_of(physical_sectors) {
                return Err(refused(format!("a multiple of {physical_sectors}, at most {len}")));
            }
            match written {
                0 => zone,
                _ if written == len => zone.restore(ZoneCond::Full, len),
                _ => zone.restore(ZoneCond::Closed, written),
            }
        }
        ZoneCond::Full | ZoneCond::ReadOnly | ZoneCond::Offline => zone.restore(record.cond, len),
        ZoneCond::NotWp => return Err(refused("a condition of a sequential zone".to_owned())),
    };
    Ok(view_of(&zone))
}

impl Zones {
    /// The zones of a validated configuration, from their records; empty without records.
    pub(crate) fn new(config: &DiskConfig, records: &[ZoneRecord]) -> Result<Zones, DiskError> {
        let layout = Layout::new(config);
        let slots = layout.slots();
        if !records.is_empty() && records.len() != slots as usize {
            return Err(DiskError::ZoneCount { found: records.len(), wanted: slots });
        }
        let physical_sectors = u64::from(config.physical_block) >> SECTOR_SHIFT;
        let mut views = Vec::new();
        views.try_reserve_exact(slots as usize).map_err(|_| DiskError::Memory { zones: slots })?;
        for slot in 0..slots {
            let record = records.get(slot as usize).copied().unwrap_or(ZoneRecord::EMPTY);
            views.push(if layout.is_conventional(slot) {
                let place = layout.first(slot);
                view_of(&Zone::conventional(place.start, place.end - place.start))
            } else {
                restored(&layout, slot, record, physical_sectors)?
            });
        }
        let limits = ZoneLimits { open_max: config.zone_max_open, active_max: 0 };
        let words = AtomicZones::new(views.into_iter(), limits, true)
            .map_err(|_| DiskError::Memory { zones: slots })?;
        Ok(Zones { words, layout, physical_sectors })
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of open zones; `None` without a limit.
    pub(crate) fn counts(&self) -> Option<ZoneCounts> {
        self.words.counts()
    }

    #[inline]
    fn zone(&self, slot: u32, view: View) -> Zone {
        self.layout.sequential(slot).restore(view.cond, view.wp)
    }

    /// Writes `sectors` at `at`, which lies in the sequential zone of the slot. `copy` moves the
    /// data after their place is reserved. Returns the result of `copy` and the zone's state at the
    /// reservation.
    #[inline]
    pub(crate) fn write<T>(
        &self,
        slot: u32,
        at: Sector,
        sectors: u64,
        copy: impl FnOnce() -> T,
    ) -> Result<(T, ZoneRecord), Refusal> {
        let mut to = ZoneView { cond: ZoneCond::Empty, wp: 0 };
        let reservation = self.words.reserve(slot, |view| {
            let mut zone = self.zone(slot, view);
            let cond = zbc::step_write(&zone, at, sectors)?;
            // ZBC-2 4.5.3.4.2: a write ends at the end of a physical block.
            if !(at.0 + sectors).is_multiple_of(self.physical_sectors) {
                return Err(Refusal::Unaligned);
            }
            zone.enter(cond);
            zone.advance(sectors);
            to = ZoneView { cond: zone.cond(), wp: view.wp + sectors };
            Ok(Change { through: holding_of(cond), to })
        })?;
        // No thread can reset the zone while there is a reservation.
        let erasures = self.words.erasures(slot);
        let copied = copy();
        drop(reservation);
        Ok((copied, ZoneRecord { cond: to.cond, written_sectors: to.wp, erasures }))
    }

    /// Opens, closes, finishes or resets the sequential zone of a slot, alone or as one of all
    /// zones, and records it on the medium. The inner result is that of the medium.
    pub(crate) fn manage(
        &self,
        slot: u32,
        op: ZoneOp,
        all: bool,
        media: &impl Media,
    ) -> Result<io::Result<()>, Refusal> {
        let step = |zone: &Zone| match all {
            true => Ok(zbc::step_all(zone, op)),
            false => zbc::step(zone, op),
        };
        let mut changed = None;
        let decide = |view: View| {
            let mut zone = self.zone(slot, view);
            let step = step(&zone)?;
            zone.enter(step.to);
            let to = view_of(&zone);
            changed = (to != view).then(|| self.record(slot, to));
            Ok(Change { through: step.through, to })
        };
        let erased = match op {
            ZoneOp::Finish | ZoneOp::Reset => self.replace(slot, decide, media)?,
            _ => {
                self.words.exchange(slot, decide)?;
                Ok(false)
            }
        };
        Ok(Zones::keep(slot, erased, changed, media))
    }

    /// Records a zone's new state on the medium, unless the medium's `reset` has recorded it.
    fn keep(
        slot: u32,
        erased: io::Result<bool>,
        changed: Option<ZoneRecord>,
        media: &impl Media,
    ) -> io::Result<()> {
        match (erased?, changed) {
            (false, Some(state)) => media.zone_changed(slot, state),
            _ => Ok(()),
        }
    }

    /// Exchanges a zone's word while no other thread changes it. Returns whether data were
    /// discarded; then the medium has the new state. If the new state shows more than was written,
    /// the medium makes room first; if that fails, the zone keeps its state.
    fn replace(
        &self,
        slot: u32,
        mut decide: impl FnMut(View) -> Result<Change<ZoneCond>, Refusal>,
        media: &impl Media,
    ) -> Result<io::Result<bool>, Refusal> {
        // `decide` runs once to see whether anything changes, and again when the zone is held.
        let mut is_held = false;
        let mut room = None;
        let mut erased = None;
        let prepared = |view: View| -> Result<_, Refusal> {
            let change = decide(view)?;
            if std::mem::replace(&mut is_held, true) && change.to.wp > view.wp {
                let room = room.get_or_insert_with(|| media.make_room(slot));
                if room.is_err() {
                    return Ok(Change { through: holding_of(view.cond), to: view });
                }
            }
            Ok(change)
        };
        self.words.replace(slot, prepared, || {
            let erasures = self.words.erasures(slot);
            erased = Some(media.reset(slot, ZoneRecord { erasures, ..ZoneRecord::EMPTY }));
        })?;
        Ok(room
            .unwrap_or(Ok(()))
            .and_then(|()| erased.map_or(Ok(false), |kept| kept.map(|()| true))))
    }

    /// The record of the state that a zone is about to enter. Computed before the exchange: another
    /// thread may reset the zone right after it, and this record must not look later than that
    /// reset.
    fn record(&self, slot: u32, view: View) -> ZoneRecord {
        let whole = {
            let place = self.layout.first(slot);
            place.end - place.start
        };
        let erasures = self.words.erasures(slot);
        ZoneRecord { cond: view.cond, written_sectors: view.wp.min(whole), erasures }
    }

    /// Makes a sequential zone read-only or offline, or empties a zone in that condition, and
    /// records the new condition on the medium. A zone that is already in the resulting state does
    /// not change.
    pub(crate) fn change_fault(
        &self,
        slot: u32,
        cond: ZoneCond,
        fault: ZoneFault,
        media: &impl Media,
    ) -> io::Result<()> {
        debug_assert!(!self.layout.is_conventional(slot), "they do not break");
        let mut last = None;
        let decide = |view| {
            let mut zone = self.zone(slot, view);
            let to_cond = match (fault, zone.cond() == cond) {
                (ZoneFault::Break, false) => cond,
                (ZoneFault::Repair, true) => ZoneCond::Empty,
                (ZoneFault::Break, true) | (ZoneFault::Repair, false) => {
                    last = None;
                    return Ok(Change { through: holding_of(view.cond), to: view });
                }
            };
            zone.enter(to_cond);
            let to = view_of(&zone);
            last = Some(self.record(slot, to));
            // The zone uses no open resource any more, so no limit can forbid the change.
            Ok(Change { through: Holding::Nothing, to })
        };
        let erased = self.replace(slot, decide, media).expect("nothing forbids it");
        Zones::keep(slot, erased, last, media)
    }

    /// End of the readable data of a slot's sequential zone; `None` if the zone is offline.
    #[inline]
    pub(crate) fn readable_end(&self, slot: u32) -> Option<Sector> {
        match self.words.readable(slot) {
            UNREADABLE => None,
            written => Some(self.layout.first(slot).start + written),
        }
    }

    /// How often the zone was emptied; see [`AtomicZones::erasures`].
    #[inline]
    pub(crate) fn erasures(&self, slot: u32) -> u64 {
        self.words.erasures(slot)
    }

    /// The zone of a slot, for a report.
    pub(crate) fn info(&self, slot: u32) -> ZoneInfo {
        let place = self.layout.first(slot);
        if self.layout.is_conventional(slot) {
            return Zone::conventional(place.start, place.end - place.start).info();
        }
        self.zone(slot, self.words.look(slot)).info()
    }

    /// The condition of a slot's zone.
    pub(crate) fn cond(&self, slot: u32) -> ZoneCond {
        self.words.look(slot).cond
    }
}

//! The zones of a device whose medium records them: one atomic word each, exchanged by the rules of
//! the device.
//!
//! The device's rules decide the new state of a zone (`blockyard_core::zone::zbc` for an SMR disk,
//! `blockyard_core::zone::Zone` for a ZNS namespace), `blockyard_sync::atomic_zones` exchanges its
//! word, and the medium records the state. So operations on different zones share no lock. A lock
//! protects the numbers of open and active zones; without a limit it is never taken.

use std::collections::TryReserveError;
use std::io;

use blockyard_core::inject::ZoneFault;
use blockyard_core::zone::{Step, Zone, ZoneCond, ZoneInfo, ZoneLayout, ZoneOp, holding_of};
use blockyard_core::{Sector, ZoneNo};
use blockyard_sync::atomic_zones::{AtomicZones, Change, UNREADABLE, ZoneView};
use blockyard_sync::zone_resources::{Holding, ResourceError, ZoneCounts, ZoneLimits};

use crate::medium::Media;
use crate::zone_word::ZoneRecord;

/// The numbered zones of a device, as far as their state machine needs them.
pub trait SequentialZones {
    /// Number of zones, conventional ones included.
    fn zone_count(&self) -> u32;

    /// Whether a zone is conventional: it has no state.
    fn is_conventional(&self, zone: u32) -> bool;

    /// The conventional zone with this number.
    fn conventional(&self, zone: u32) -> Zone;

    /// An empty sequential zone with this number.
    fn sequential(&self, zone: u32) -> Zone;
}

impl SequentialZones for ZoneLayout {
    fn zone_count(&self) -> u32 {
        self.zones.zone_count
    }

    #[inline]
    fn is_conventional(&self, zone: u32) -> bool {
        self.zones.is_conventional(ZoneNo(zone))
    }

    fn conventional(&self, zone: u32) -> Zone {
        let (start, end) = self.range(ZoneNo(zone));
        Zone::conventional(start, end - start)
    }

    #[inline]
    fn sequential(&self, zone: u32) -> Zone {
        ZoneLayout::sequential(self, ZoneNo(zone))
    }
}

/// Why a device cannot start with the recorded zones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// A record is impossible on this device.
    #[error(
        "the medium has zone {zone} as {cond} with {written_sectors} sectors written: \
         expected {wanted}"
    )]
    Zone {
        /// Zone number.
        zone: u32,
        /// The recorded condition.
        cond: ZoneCond,
        /// The recorded number of written sectors.
        written_sectors: u64,
        /// What is expected.
        wanted: String,
    },
    /// The medium belongs to a device with another number of zones.
    #[error("the medium has {found} zones, the device {wanted}: it belongs to another geometry")]
    Count {
        /// Zones on the medium.
        found: usize,
        /// Zones of the device.
        wanted: u32,
    },
    /// More zones are partly written than the device may have active.
    #[error("the medium has {active} partly written zones, which are active: more than {limit}")]
    Active {
        /// Number of partly written zones.
        active: u32,
        /// Maximum number of active zones.
        limit: u32,
    },
    /// There is not enough memory for the zones.
    #[error("no memory for the state of {zones} zones; a larger zone_size takes less")]
    Memory {
        /// Number of zones.
        zones: u32,
    },
}

/// The zones of a device that have a state, which a medium records.
#[derive(Debug)]
pub struct RecordedZones<L> {
    words: AtomicZones<ZoneCond>,
    layout: L,
}

type View = ZoneView<ZoneCond>;

/// A write that a zone permits.
#[derive(Clone, Copy, Debug)]
pub struct PermittedWrite {
    /// The first sector.
    pub at: Sector,
    /// Number of sectors.
    pub sectors: u64,
    /// The condition that the zone enters before the data are transferred.
    pub to: ZoneCond,
}

/// The part of a zone's state that its word holds.
#[inline]
fn view_of(zone: &Zone) -> View {
    let wp = zone.readable_end().map_or(UNREADABLE, |end| end - zone.start());
    ZoneView { cond: zone.cond(), wp }
}

/// The state of a zone after power on, from its record. No zone is open: ZBC-2 4.5.3.5, NVMe ZNS
/// 2.3. `unit` is the number of sectors of which writes are multiples.
fn restored(empty: Zone, number: u32, record: ZoneRecord, unit: u64) -> Result<View, RecordError> {
    let len = empty.end() - empty.start();
    let capacity = empty.info().capacity_sectors;
    let written = record.written_sectors;
    let refused = |wanted: String| RecordError::Zone {
        zone: number,
        cond: record.cond,
        written_sectors: written,
        wanted,
    };
    let zone = match record.cond {
        ZoneCond::Empty => empty,
        ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen | ZoneCond::Closed => {
            if written > capacity || !written.is_multiple_of(unit) {
                return Err(refused(format!("a multiple of {unit}, at most {capacity}")));
            }
            match written {
                0 => empty,
                _ if written == capacity => empty.restore(ZoneCond::Full, capacity),
                _ => empty.restore(ZoneCond::Closed, written),
            }
        }
        // A finished zone is readable to its end, a written one to its capacity.
        ZoneCond::Full if written < len => empty.restore(ZoneCond::Full, capacity),
        ZoneCond::Full | ZoneCond::ReadOnly | ZoneCond::Offline => empty.restore(record.cond, len),
        ZoneCond::NotWp => return Err(refused("a condition of a sequential zone".to_owned())),
    };
    Ok(view_of(&zone))
}

impl<L: SequentialZones> RecordedZones<L> {
    /// The zones of a layout, from their records; empty without records. `unit` is the number of
    /// sectors of which writes are multiples.
    ///
    /// # Errors
    /// If the records do not match the layout or the limits, or there is not enough memory.
    pub fn new(
        layout: L,
        limits: ZoneLimits,
        records: &[ZoneRecord],
        unit: u64,
    ) -> Result<RecordedZones<L>, RecordError> {
        let zones = layout.zone_count();
        if !records.is_empty() && records.len() != zones as usize {
            return Err(RecordError::Count { found: records.len(), wanted: zones });
        }
        let no_memory = |_: TryReserveError| RecordError::Memory { zones };
        let mut views = Vec::new();
        views.try_reserve_exact(zones as usize).map_err(no_memory)?;
        let mut active = 0;
        for number in 0..zones {
            let record = records.get(number as usize).copied().unwrap_or(ZoneRecord::EMPTY);
            // The word of a conventional zone is never used.
            let view = match layout.is_conventional(number) {
                true => ZoneView { cond: ZoneCond::NotWp, wp: 0 },
                false => restored(layout.sequential(number), number, record, unit)?,
            };
            active += u32::from(view.cond == ZoneCond::Closed);
            views.push(view);
        }
        if limits.active_max != 0 && active > limits.active_max {
            return Err(RecordError::Active { active, limit: limits.active_max });
        }
        let words = AtomicZones::new(views.into_iter(), limits, true).map_err(no_memory)?;
        Ok(RecordedZones { words, layout })
    }

    /// The layout of the zones.
    pub fn layout(&self) -> &L {
        &self.layout
    }

    /// Number of open and active zones; `None` without a limit.
    pub fn counts(&self) -> Option<ZoneCounts> {
        self.words.counts()
    }

    #[inline]
    fn zone(&self, number: u32, view: View) -> Zone {
        self.layout.sequential(number).restore(view.cond, view.wp)
    }

    /// Writes to a sequential zone, where and if `permit` allows it. `permit` may be called again
    /// if another thread changes the zone meanwhile. `copy` moves the data after their place is
    /// reserved. Returns the result of `copy` and the zone's state at the reservation, which the
    /// caller records with [`Media::zone_changed`], also if `copy` has failed: the write pointer
    /// has moved, and other threads may already have written after it.
    ///
    /// # Errors
    /// Those of `permit`, and the limits of the device.
    #[inline]
    pub fn write<T, E: From<ResourceError>>(
        &self,
        number: u32,
        mut permit: impl FnMut(&Zone) -> Result<PermittedWrite, E>,
        copy: impl FnOnce(PermittedWrite) -> T,
    ) -> Result<(T, ZoneRecord), E> {
        let mut write = PermittedWrite { at: Sector::NONE, sectors: 0, to: ZoneCond::Empty };
        let mut to = ZoneView { cond: ZoneCond::Empty, wp: 0 };
        let reservation = self.words.reserve(number, |view| {
            let mut zone = self.zone(number, view);
            write = permit(&zone)?;
            zone.enter(write.to);
            zone.advance(write.sectors);
            to = ZoneView { cond: zone.cond(), wp: view.wp + write.sectors };
            Ok::<_, E>(Change { through: holding_of(write.to), to })
        })?;
        // No thread can reset the zone while there is a reservation.
        let erasures = self.words.erasures(number);
        let copied = copy(write);
        drop(reservation);
        Ok((copied, ZoneRecord { cond: to.cond, written_sectors: to.wp, erasures }))
    }

    /// Lets a zone enter a condition without an effect on the medium, as a write does that opens
    /// its zone before it transfers data.
    ///
    /// # Errors
    /// Those of `decide`, and the limits of the device.
    pub fn enter<E: From<ResourceError>>(
        &self,
        number: u32,
        mut decide: impl FnMut(&Zone) -> Result<ZoneCond, E>,
    ) -> Result<(), E> {
        let change = |view| {
            let to = decide(&self.zone(number, view))?;
            Ok::<_, E>(Change { through: holding_of(to), to: ZoneView { cond: to, ..view } })
        };
        self.words.exchange(number, change).map(drop)
    }

    /// Opens, closes, finishes or resets a sequential zone as `decide` says, and records it on the
    /// medium. The inner result is that of the medium.
    ///
    /// # Errors
    /// Those of `decide`, and the limits of the device.
    pub fn manage<E: From<ResourceError>>(
        &self,
        number: u32,
        op: ZoneOp,
        decide: impl Fn(&Zone) -> Result<Step, E>,
        media: &impl Media,
    ) -> Result<io::Result<()>, E> {
        let mut changed = None;
        let change = |view: View| {
            let mut zone = self.zone(number, view);
            let step = decide(&zone)?;
            zone.enter(step.to);
            let to = view_of(&zone);
            changed = (to != view).then(|| self.record(number, to));
            Ok::<_, E>(Change { through: step.through, to })
        };
        let erased = match op {
            ZoneOp::Finish | ZoneOp::Reset | ZoneOp::ResetAll => {
                self.replace(number, change, media)?
            }
            _ => {
                self.words.exchange(number, change)?;
                Ok(false)
            }
        };
        Ok(keep(number, erased, changed, media))
    }

    /// Exchanges a zone's word while no other thread changes it. Returns whether data were
    /// discarded; then the medium has the new state. If the new state shows more than was written,
    /// the medium makes room first; if that fails, the zone keeps its state.
    fn replace<E: From<ResourceError>>(
        &self,
        number: u32,
        mut decide: impl FnMut(View) -> Result<Change<ZoneCond>, E>,
        media: &impl Media,
    ) -> Result<io::Result<bool>, E> {
        // `decide` runs once to see whether anything changes, and again when the zone is held.
        let mut is_held = false;
        let mut room = None;
        let mut erased = None;
        let prepared = |view: View| -> Result<_, E> {
            let change = decide(view)?;
            if std::mem::replace(&mut is_held, true) && change.to.wp > view.wp {
                let room = room.get_or_insert_with(|| media.make_room(number));
                if room.is_err() {
                    return Ok(Change { through: holding_of(view.cond), to: view });
                }
            }
            Ok(change)
        };
        self.words.replace(number, prepared, || {
            let erasures = self.words.erasures(number);
            erased = Some(media.reset(number, ZoneRecord { erasures, ..ZoneRecord::EMPTY }));
        })?;
        Ok(room
            .unwrap_or(Ok(()))
            .and_then(|()| erased.map_or(Ok(false), |kept| kept.map(|()| true))))
    }

    /// The record of the state that a zone is about to enter. Computed before the exchange: another
    /// thread may reset the zone right after it, and this record must not look later than that
    /// reset.
    fn record(&self, number: u32, view: View) -> ZoneRecord {
        let zone = self.layout.sequential(number);
        let whole = zone.end() - zone.start();
        let erasures = self.words.erasures(number);
        ZoneRecord { cond: view.cond, written_sectors: view.wp.min(whole), erasures }
    }

    /// Makes a sequential zone read-only or offline, or empties a zone in that condition, and
    /// records the new condition on the medium. A zone that is already in the resulting state does
    /// not change.
    pub fn change_fault(
        &self,
        number: u32,
        cond: ZoneCond,
        fault: ZoneFault,
        media: &impl Media,
    ) -> io::Result<()> {
        debug_assert!(!self.layout.is_conventional(number), "they do not break");
        let mut last = None;
        let decide = |view| {
            let mut zone = self.zone(number, view);
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
            last = Some(self.record(number, to));
            // The zone uses no open resource any more, so no limit can forbid the change.
            Ok(Change { through: Holding::Nothing, to })
        };
        // Without resources no limit refuses the change, and `decide` refuses nothing.
        let erased = self.replace::<ResourceError>(number, decide, media);
        keep(number, erased.expect("nothing forbids it"), last, media)
    }

    /// End of the readable data of a sequential zone; `None` if the zone is offline.
    #[inline]
    pub fn readable_end(&self, number: u32) -> Option<Sector> {
        match self.words.readable(number) {
            UNREADABLE => None,
            written => Some(self.layout.sequential(number).start() + written),
        }
    }

    /// How often the zone was emptied; see [`AtomicZones::erasures`].
    #[inline]
    pub fn erasures(&self, number: u32) -> u64 {
        self.words.erasures(number)
    }

    /// The zone as a zone report shows it.
    pub fn info(&self, number: u32) -> ZoneInfo {
        if self.layout.is_conventional(number) {
            return self.layout.conventional(number).info();
        }
        self.zone(number, self.words.look(number)).info()
    }

    /// The condition of a sequential zone.
    pub fn cond(&self, number: u32) -> ZoneCond {
        self.words.look(number).cond
    }
}

/// Records a zone's new state on the medium, unless the medium's `reset` has recorded it.
fn keep(
    number: u32,
    erased: io::Result<bool>,
    changed: Option<ZoneRecord>,
    media: &impl Media,
) -> io::Result<()> {
    match (erased?, changed) {
        (false, Some(state)) => media.zone_changed(number, state),
        _ => Ok(()),
    }
}

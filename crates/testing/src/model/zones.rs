//! The model's zones: a list, and rules that examine all of it each time.

use std::ops::Range;

use blockyard_core::Status;
use blockyard_core::geometry::ZoneGeometry;
use blockyard_core::units::Sector;
use blockyard_core::zone::{ZoneCond, ZoneInfo, ZoneType};

use ZoneCond::{Closed, Empty, ExplicitOpen, Full, ImplicitOpen, NotWp, Offline, ReadOnly};

/// The rules to follow where kinds of zoned devices differ.
///
/// | case | null_blk | ZBC, through Linux's `sd` |
/// | --- | --- | --- |
/// | what a zone refuses | IOERR | TARGET; of appends, which the host makes writes of, IOERR |
/// | open or close of a full zone, close of an empty one | refused | nothing to do |
/// | a write to a sequential zone ends | at a logical block | at a physical block |
/// | write pointer of a zone that was written full | its capacity | its end |
/// | reads above the write pointer | 0xFF | zeros |
/// | access beyond the capacity | 0xFF | refused: a gap |
/// | discard in a sequential zone | forgets | is a hint without effect |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZoneRules {
    /// The rules of null_blk, which are those of ZNS except for some status codes.
    #[default]
    NullBlk,
    /// The rules of ZBC-2.
    Zbc,
}

impl ZoneRules {
    /// The status of a bio that a zone refuses.
    pub fn refused(self) -> Status {
        match self {
            ZoneRules::NullBlk => Status::IoErr,
            ZoneRules::Zbc => Status::Target,
        }
    }
}

/// One zone.
#[derive(Clone, Debug)]
pub(super) struct ModelZone {
    start: u64,
    sectors: u64,
    capacity: u64,
    /// Undefined (all ones) in a read-only or offline zone.
    pub(super) wp: u64,
    pub(super) cond: ZoneCond,
    /// When it became implicitly open, by the count of such events.
    opened: u64,
}

impl ModelZone {
    pub(super) fn is_conventional(&self) -> bool {
        self.cond == NotWp
    }

    fn is_open(&self) -> bool {
        matches!(self.cond, ImplicitOpen | ExplicitOpen)
    }

    fn is_active(&self) -> bool {
        self.is_open() || self.cond == Closed
    }

    fn range(&self) -> Range<u64> {
        self.start..self.start + self.sectors
    }

    /// The first sector after the writable part.
    pub(super) fn limit(&self) -> u64 {
        self.start + self.capacity
    }

    /// Closes the zone; it becomes empty if nothing was written.
    fn shut(&mut self) {
        self.cond = if self.wp == self.start { Empty } else { Closed };
    }
}

/// All zones of a device.
#[derive(Clone, Debug)]
pub(super) struct ModelZones {
    zones: Vec<ModelZone>,
    pub(super) rules: ZoneRules,
    /// Writes to sequential zones end at multiples of this number of sectors.
    pub(super) write_sectors: u64,
    zone_sectors: u64,
    open_max: usize,
    active_max: usize,
    openings: u64,
}

impl ModelZones {
    pub(super) fn new(geometry: &ZoneGeometry, device_sectors: u64) -> ModelZones {
        let zones = (0..geometry.zone_count)
            .map(|number| {
                let start = u64::from(number) * geometry.zone_sectors;
                let sectors = geometry.zone_sectors.min(device_sectors - start);
                let conventional = number < geometry.conventional_count;
                let capacity = match conventional {
                    true => sectors,
                    false => sectors.min(geometry.zone_capacity_sectors),
                };
                ModelZone {
                    start,
                    sectors,
                    capacity,
                    wp: if conventional { start + sectors } else { start },
                    cond: if conventional { NotWp } else { Empty },
                    opened: 0,
                }
            })
            .collect();
        ModelZones {
            zones,
            rules: ZoneRules::NullBlk,
            write_sectors: 1,
            zone_sectors: geometry.zone_sectors,
            open_max: geometry.open_max as usize,
            active_max: geometry.active_max as usize,
            openings: 0,
        }
    }

    pub(super) fn index_at(&self, sector: u64) -> usize {
        (sector / self.zone_sectors) as usize
    }

    pub(super) fn at(&self, sector: u64) -> &ModelZone {
        &self.zones[self.index_at(sector)]
    }

    /// Checks that an empty or closed zone may become open. The active limit is checked first, then
    /// the open limit, at which the oldest implicitly open zone is closed.
    fn admit(&mut self, index: usize) -> Result<(), Status> {
        let active = self.zones.iter().filter(|zone| zone.is_active()).count();
        let newly_active = self.zones[index].cond == Empty;
        if self.active_max > 0 && newly_active && active >= self.active_max {
            return Err(Status::ZoneActiveResource);
        }
        let open = self.zones.iter().filter(|zone| zone.is_open()).count();
        if self.open_max > 0 && open >= self.open_max {
            let victim = self
                .zones
                .iter_mut()
                .filter(|zone| zone.cond == ImplicitOpen)
                .min_by_key(|zone| zone.opened);
            victim.ok_or(Status::ZoneOpenResource)?.shut();
        }
        Ok(())
    }

    /// Opens the zone for a write of `sectors` at `want` or, for an append, at the write pointer.
    /// Returns the sector of the data.
    pub(super) fn begin_write(
        &mut self,
        index: usize,
        want: Option<u64>,
        sectors: u64,
    ) -> Result<u64, Status> {
        let zone = &self.zones[index];
        // An append that the host makes a write of never reaches a zone that has no room for it.
        let refused = if want.is_some() { self.rules.refused() } else { Status::IoErr };
        if matches!(zone.cond, Full | ReadOnly | Offline | NotWp) {
            return Err(refused);
        }
        let at = want.unwrap_or(zone.wp);
        let end = at + sectors;
        if at != zone.wp || end > zone.start + zone.capacity {
            return Err(refused);
        }
        if !end.is_multiple_of(self.write_sectors) {
            return Err(self.rules.refused());
        }
        if matches!(zone.cond, Empty | Closed) {
            self.admit(index)?;
            self.openings += 1;
            self.zones[index].cond = ImplicitOpen;
            self.zones[index].opened = self.openings;
        }
        Ok(at)
    }

    /// Advances the write pointer by the written sectors.
    pub(super) fn end_write(&mut self, index: usize, sectors: u64) {
        let zone = &mut self.zones[index];
        zone.wp += sectors;
        if zone.wp == zone.start + zone.capacity {
            zone.cond = Full;
            if self.rules == ZoneRules::Zbc {
                zone.wp = zone.start + zone.sectors;
            }
        }
    }

    pub(super) fn open(&mut self, index: usize) -> Result<(), Status> {
        match self.zones[index].cond {
            Empty | Closed => self.admit(index)?,
            ImplicitOpen | ExplicitOpen => {}
            Full if self.rules == ZoneRules::Zbc => return Ok(()),
            Full | ReadOnly | Offline | NotWp => return Err(self.rules.refused()),
        }
        self.zones[index].cond = ExplicitOpen;
        Ok(())
    }

    pub(super) fn close(&mut self, index: usize) -> Result<(), Status> {
        match self.zones[index].cond {
            ImplicitOpen | ExplicitOpen => self.zones[index].shut(),
            Closed => {}
            Empty | Full if self.rules == ZoneRules::Zbc => {}
            Empty | Full | ReadOnly | Offline | NotWp => return Err(self.rules.refused()),
        }
        Ok(())
    }

    pub(super) fn finish(&mut self, index: usize) -> Result<(), Status> {
        match self.zones[index].cond {
            Empty | Closed => self.admit(index)?,
            ImplicitOpen | ExplicitOpen => {}
            Full => return Ok(()),
            ReadOnly | Offline | NotWp => return Err(self.rules.refused()),
        }
        let zone = &mut self.zones[index];
        zone.cond = Full;
        zone.wp = zone.start + zone.sectors;
        Ok(())
    }

    /// Resets a zone; returns the sectors whose data are lost.
    pub(super) fn reset(&mut self, index: usize) -> Result<Range<u64>, Status> {
        let zone = &mut self.zones[index];
        if matches!(zone.cond, ReadOnly | Offline | NotWp) {
            return Err(self.rules.refused());
        }
        zone.cond = Empty;
        zone.wp = zone.start;
        Ok(zone.range())
    }

    /// Resets every zone that can be reset.
    pub(super) fn reset_all(&mut self) -> Vec<Range<u64>> {
        (0..self.zones.len()).filter_map(|index| self.reset(index).ok()).collect()
    }

    /// Makes every sequential zone full.
    pub(super) fn fill(&mut self) {
        for zone in self.zones.iter_mut().filter(|zone| !zone.is_conventional()) {
            zone.cond = Full;
            zone.wp = zone.start + zone.capacity;
        }
    }

    /// Makes a zone read-only or offline, or empty if it has that condition already, in which case
    /// it returns the sectors whose data are lost. `None` for a conventional zone.
    pub(super) fn toggle(&mut self, index: usize, cond: ZoneCond) -> Option<Option<Range<u64>>> {
        let zone = &mut self.zones[index];
        if zone.is_conventional() {
            return None;
        }
        if zone.cond == cond {
            zone.cond = Empty;
            zone.wp = zone.start;
            return Some(Some(zone.range()));
        }
        zone.cond = cond;
        zone.wp = u64::MAX;
        Some(None)
    }

    pub(super) fn report(&self) -> Vec<ZoneInfo> {
        let row = |zone: &ModelZone| ZoneInfo {
            start: Sector(zone.start),
            sectors: zone.sectors,
            capacity_sectors: zone.capacity,
            wp: Sector(zone.wp),
            kind: match zone.is_conventional() {
                true => ZoneType::Conventional,
                false => ZoneType::SequentialWriteRequired,
            },
            cond: zone.cond,
        };
        self.zones.iter().map(row).collect()
    }
}

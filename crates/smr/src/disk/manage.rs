//! Zone management: open, close, finish and reset; ZBC-2 5.2 to 5.8.

use blockyard_core::Sector;
use blockyard_core::zone::{Zone, ZoneCond, ZoneOp, zbc};

use super::access::sense_of;
use super::{Disk, Stop};
use crate::cdb::ZoneAction;
use crate::layout::ZonePart;
use crate::sense::Sense;
use crate::transport::Outcome;
use blockyard_zone_media::Media;

/// Byte offset of the zone ID field in a command.
const ZONE_ID: u16 = 2;

fn op_of(action: ZoneAction) -> ZoneOp {
    match action {
        ZoneAction::Close => ZoneOp::Close,
        ZoneAction::Finish => ZoneOp::Finish,
        ZoneAction::Open => ZoneOp::Open,
        ZoneAction::Reset => ZoneOp::Reset,
    }
}

impl<M: Media> Disk<M> {
    /// Applies an action to one zone.
    pub(super) fn manage(&self, action: ZoneAction, zone_id: u64) -> Result<Outcome, Stop> {
        if zone_id >= self.blocks() {
            return Err(Sense::LBA_OUT_OF_RANGE.at(zone_id).into());
        }
        let start = Sector(zone_id << self.block_shift);
        let place = self.layout().place_of(start);
        if place.start != start || place.part != ZonePart::Sequential {
            return Err(Sense::invalid_field(ZONE_ID, None).into());
        }
        self.change(place.slot, op_of(action), false)?;
        self.settle()?;
        Ok(Outcome::good(0))
    }

    /// Applies an action to all zones (the ALL bit). It refuses only an open that would exceed the
    /// limit, and then opens no zone.
    pub(super) fn manage_all(&self, action: ZoneAction) -> Result<Outcome, Stop> {
        match action {
            ZoneAction::Open => self.open_all()?,
            _ => {
                for slot in self.sequential_slots() {
                    self.change(slot, op_of(action), true)?;
                }
            }
        }
        self.settle()?;
        Ok(Outcome::good(0))
    }

    fn sequential_slots(&self) -> std::ops::Range<u32> {
        self.layout().conventional_count()..self.layout().slots()
    }

    /// Opens the zones that are closed now. A zone that is implicitly closed to make room stays
    /// closed.
    fn open_all(&self) -> Result<(), Sense> {
        let closed: Vec<u32> = self
            .sequential_slots()
            .filter(|&slot| self.zones.cond(slot) == ZoneCond::Closed)
            .collect();
        if let Some(counts) = self.zones.counts()
            && counts.explicit as usize + closed.len() > self.config.zone_max_open as usize
        {
            return Err(Sense::INSUFFICIENT_ZONE_RESOURCES);
        }
        for (opened, &slot) in closed.iter().enumerate() {
            if let Err(sense) = self.change(slot, ZoneOp::Open, true) {
                // Other threads opened zones after they were counted.
                for &slot in &closed[..opened] {
                    self.change(slot, ZoneOp::Close, true)?;
                }
                return Err(sense);
            }
        }
        Ok(())
    }

    /// Changes the state of a zone and records it on the medium.
    fn change(&self, slot: u32, op: ZoneOp, all: bool) -> Result<(), Sense> {
        let step = |zone: &Zone| match all {
            true => Ok(zbc::step_all(zone, op)),
            false => zbc::step(zone, op),
        };
        let kept = self.zones.manage(slot, op, step, &self.media).map_err(sense_of)?;
        kept.map_err(|_| Sense::INTERNAL_TARGET_FAILURE)
    }
}

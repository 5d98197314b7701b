//! Seeded bios that target the places where devices fail: at the write pointer and one block next
//! to it, at a zone's capacity, across zones, at the device's end, misaligned, empty, too long.
//!
//! A workload reads the write pointers from a [`Model`]; the same seed and the same model give the
//! same bios.

use std::ops::Range;

use blockyard_core::bio::{Bio, Flags, Op, Prio};
use blockyard_core::units::Sector;
use blockyard_core::zone::{ZoneInfo, ZoneType};
use fastrand::Rng;

use crate::model::Model;
use crate::seed::Seed;

/// The frequencies of the kinds of bios.
#[derive(Clone, Debug)]
pub struct Mix {
    /// A weight for each operation, by `Op as usize`.
    pub weights: [u32; Op::COUNT],
    /// How many of 1000 bios are invalid, or just miss a valid place.
    pub odd_per_mille: u32,
    /// Longest bio with data, in sectors.
    pub data_sectors_max: u64,
    /// How many zones are used most of the time; with few zones, the limits are reached.
    pub hot_zones: u64,
}

impl Mix {
    /// All operations, with every kind of invalid bio.
    pub fn wild() -> Mix {
        let mut weights = [4; Op::COUNT];
        weights[Op::Read as usize] = 30;
        weights[Op::Write as usize] = 40;
        weights[Op::ZoneAppend as usize] = 15;
        weights[Op::Flush as usize] = 2;
        weights[Op::ZoneResetAll as usize] = 1;
        Mix { weights, odd_per_mille: 150, data_sectors_max: 256, hot_zones: 8 }
    }

    /// Valid reads and writes only, with flushes and discards.
    pub fn tame() -> Mix {
        let mut weights = [0; Op::COUNT];
        weights[Op::Read as usize] = 40;
        weights[Op::Write as usize] = 50;
        weights[Op::Flush as usize] = 2;
        weights[Op::Discard as usize] = 4;
        weights[Op::WriteZeroes as usize] = 4;
        Mix { weights, odd_per_mille: 0, data_sectors_max: 64, hot_zones: 8 }
    }
}

/// A stream of bios.
#[derive(Clone, Debug)]
pub struct Workload {
    rng: Rng,
    mix: Mix,
}

impl Workload {
    /// The stream of this number, from the seed.
    pub fn new(seed: Seed, stream: u64, mix: Mix) -> Workload {
        Workload { rng: seed.rng(stream), mix }
    }

    /// Fills `data` with random bytes, different in every sector of every call.
    pub fn fill(&mut self, data: &mut [u8]) {
        self.rng.fill(data);
    }

    /// A random number below `bound`, from this stream.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.rng.u64(0..bound)
    }

    /// The next bio for the model's device; the caller sets its buffer.
    pub fn next(&mut self, model: &Model) -> Bio {
        self.next_in(model, 0..model.geometry().sectors)
    }

    /// The next bio, with every valid one inside `area`, which starts and ends at a block.
    pub fn next_in(&mut self, model: &Model, area: Range<u64>) -> Bio {
        let op = self.op(model);
        let odd = self.rng.u32(0..1000) < self.mix.odd_per_mille;
        let (sector, sectors) = match model.geometry().zones {
            // A value that the operation ignores may be anything.
            _ if op == Op::Flush || op == Op::ZoneResetAll => match odd {
                true => (self.rng.u64(..), self.rng.u64(..)),
                false => (0, 0),
            },
            Some(_) if op.is_zone_mgmt() || op == Op::ZoneAppend => self.whole_zone(model, op, odd),
            Some(_) => self.zone_range(model, op, odd),
            None => self.flat_range(model, op, area, odd),
        };
        let flags = match self.rng.u32(0..10) {
            0 => Flags::FUA,
            1 => Flags::PREFLUSH,
            2 => Flags::SYNC,
            3 => Flags::FUA | Flags::PREFLUSH,
            _ => Flags::NONE,
        };
        let flags = if op.has_data() && op != Op::Read { flags } else { Flags::NONE };
        let prio = match self.rng.u32(0..8) {
            0 => Prio::RealTime,
            1 => Prio::Idle,
            _ => Prio::BestEffort,
        };
        Bio::new(op, Sector(sector), sectors).with_flags(flags).with_prio(prio)
    }

    fn op(&mut self, model: &Model) -> Op {
        let zoned = model.geometry().zones.is_some();
        loop {
            let total: u32 = self.mix.weights.iter().sum();
            let mut pick = self.rng.u32(0..total);
            let op = Op::ALL.into_iter().find(|op| {
                let weight = self.mix.weights[*op as usize];
                let here = pick < weight;
                pick = pick.wrapping_sub(if here { 0 } else { weight });
                here
            });
            let op = op.expect("the weights sum up to more than the pick");
            let needs_zones = op.is_zone_mgmt() || op == Op::ZoneAppend;
            // An operation that the device does not have is one kind of invalid bio.
            if zoned || !needs_zones || self.rng.u32(0..1000) < self.mix.odd_per_mille {
                return op;
            }
        }
    }

    /// A length in sectors: whole blocks, mostly short.
    fn length(&mut self, model: &Model, op: Op) -> u64 {
        let block = model.geometry().block_sectors();
        let max = self.mix.data_sectors_max / block;
        let blocks = match self.rng.u32(0..10) {
            0..=3 => 1,
            4..=7 => self.rng.u64(1..=max.min(8)),
            _ => self.rng.u64(1..=max),
        };
        // Operations without data may be much longer: they need no buffer.
        let stretch = if op.has_data() || self.rng.u32(0..4) > 0 { 1 } else { 16 };
        blocks * block * stretch
    }

    /// A range on a device without zones.
    fn flat_range(&mut self, model: &Model, op: Op, area: Range<u64>, odd: bool) -> (u64, u64) {
        let block = model.geometry().block_sectors();
        let sectors = self.length(model, op).min(area.end - area.start);
        let last = (area.end - sectors - area.start) / block;
        // Often near the start, so that ranges overlap or are adjacent.
        let near = last.min(4 * self.mix.data_sectors_max / block);
        let bound = if self.rng.u32(0..4) == 0 { last } else { near };
        let at = area.start + self.rng.u64(0..=bound) * block;
        if odd { self.spoil(model, at, sectors) } else { (at, sectors) }
    }

    /// One of the frequently used zones, or any.
    fn zone(&mut self, zones: &[ZoneInfo]) -> ZoneInfo {
        let count = zones.len() as u64;
        let first = zones.iter().position(|zone| zone.kind != ZoneType::Conventional);
        let hot = match self.rng.u32(0..16) {
            0 => self.rng.u64(0..count),
            1 => count - 1,
            2 => 0,
            _ => (first.unwrap_or(0) as u64 + self.rng.u64(0..self.mix.hot_zones)).min(count - 1),
        };
        zones[hot as usize]
    }

    /// A zone's start, for an operation on the whole zone or an append.
    fn whole_zone(&mut self, model: &Model, op: Op, odd: bool) -> (u64, u64) {
        let zone = self.zone(&model.report());
        let sectors = if op == Op::ZoneAppend { self.length(model, op) } else { 0 };
        match odd {
            true if op == Op::ZoneAppend => self.spoil(model, zone.start.0, sectors),
            true => {
                let block = model.geometry().block_sectors();
                let neighbours = [zone.start.0 + block, model.geometry().sectors, !0xfff];
                (neighbours[self.rng.usize(0..neighbours.len())], sectors)
            }
            false => (zone.start.0, sectors),
        }
    }

    /// A range on a zoned device.
    fn zone_range(&mut self, model: &Model, op: Op, odd: bool) -> (u64, u64) {
        let block = model.geometry().block_sectors();
        let zone = self.zone(&model.report());
        let sectors = self.length(model, op);
        let (start, end) = (zone.start.0, zone.start.0 + zone.sectors);
        // Most writes end at a valid sector.
        let unit = model.write_sectors();
        let sectors = match op == Op::Read || odd {
            true => sectors,
            false => sectors.next_multiple_of(unit),
        };
        let limit = start + zone.capacity_sectors;
        let writes = op != Op::Read && zone.kind == ZoneType::SequentialWriteRequired;
        let wp = if zone.wp == Sector::NONE { start } else { zone.wp.0 };
        if odd {
            let at = [wp.saturating_sub(block), wp + block, limit.saturating_sub(block), end];
            let at = at[self.rng.usize(0..at.len())];
            return match self.rng.u32(0..3) {
                0 => self.spoil(model, at, sectors),
                _ => (at, sectors),
            };
        }
        if writes {
            // Sometimes exactly to the capacity, so that zones become full.
            let left = limit.saturating_sub(wp);
            let to_the_end = left > 0 && left <= self.mix.data_sectors_max;
            let fits = sectors.min(left.max(block));
            return (wp, if to_the_end && self.rng.bool() { left } else { fits });
        }
        let at = match self.rng.u32(0..4) {
            // Across the write pointer, or across the end of the zone.
            0 => wp.saturating_sub(block * self.rng.u64(0..4)),
            1 => end.saturating_sub(block * self.rng.u64(0..4)),
            _ => start + self.rng.u64(0..zone.sectors / block) * block,
        };
        let at = at.max(start).min(model.geometry().sectors - block);
        (at, sectors.min(model.geometry().sectors - at))
    }

    /// Makes a range invalid: misaligned, empty, past the end, or overflowing.
    fn spoil(&mut self, model: &Model, at: u64, sectors: u64) -> (u64, u64) {
        let device = model.geometry().sectors;
        let block = model.geometry().block_sectors();
        match self.rng.u32(0..7) {
            0 if block > 1 => (at + 1, sectors),
            1 if block > 1 => (at, sectors + 1),
            2 => (at, 0),
            3 => (device - block, sectors + block),
            4 => (device, sectors),
            5 => (u64::MAX / block * block - block, sectors + block),
            _ => (device + (self.rng.u64(0..1 << 40) / block * block), sectors),
        }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_core::Status;
    use blockyard_core::geometry::{Geometry, ZoneGeometry};
    use blockyard_core::limits::Limits;

    use super::*;

    fn zoned() -> Model {
        let zones = ZoneGeometry {
            zone_sectors: 2048,
            zone_capacity_sectors: 1024,
            zone_count: 16,
            conventional_count: 2,
            open_max: 3,
            active_max: 5,
        };
        let geometry = Geometry {
            sectors: 16 * 2048,
            logical_block_bytes: 4096,
            physical_block_bytes: 4096,
            zones: Some(zones),
        };
        let mut limits = Limits::unlimited(64);
        limits.chunk_sectors = 2048;
        limits.zone_append_sectors_max = 128;
        Model::new(&geometry, &limits, false)
    }

    /// Statuses that a wild run of this seed gets from the model.
    fn statuses(seed: u64) -> Vec<Status> {
        let mut model = zoned();
        let mut workload = Workload::new(Seed(seed), 0, Mix::wild());
        (0..20_000)
            .map(|_| {
                let bio = workload.next(&model);
                let bytes = if bio.op.has_data() { bio.sectors.min(4096) * 512 } else { 0 };
                model.apply(&bio, &mut vec![0; bytes as usize]).status
            })
            .collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_run_and_meets_every_status() {
        let first = statuses(1);
        assert_eq!(first, statuses(1));
        assert_ne!(first, statuses(2));
        for wanted in [
            Status::Ok,
            Status::IoErr,
            Status::Inval,
            Status::ZoneOpenResource,
            Status::ZoneActiveResource,
        ] {
            assert!(first.contains(&wanted), "{wanted} never came");
        }
    }
}

//! The reference model: computes the answers of a device in the slow and obvious way.
//!
//! It has one thread, one operation at a time, a map of 512-byte sectors, and a list of zones.
//! Every count is computed again from all zones. It does not use the product's state machine: the
//! rules come from null_blk's documented behaviour, ZBC-2 and NVMe ZNS. Where the model and the
//! product disagree, a developer must find out which is right.
//!
//! The model, like the product, deliberately deviates from null_blk in two points. A closed zone
//! can be written again at the active limit. And the zone that is closed implicitly is the one that
//! has been implicitly open for longest, not the next one of a cursor.

mod bounds;
mod medium;
mod zones;

#[cfg(test)]
mod tests;

use blockyard_core::Status;
use blockyard_core::bio::{Bio, Op};
use blockyard_core::geometry::Geometry;
use blockyard_core::limits::Limits;
use blockyard_core::units::{SECTOR_BYTES, Sector, ZoneNo};
use blockyard_core::zone::{ZoneCond, ZoneInfo};

pub use medium::{BadBlocks, Medium};
use zones::ModelZones;
pub use zones::ZoneRules;

/// The expected result of a bio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedResult {
    /// The status.
    pub status: Status,
    /// The sector in the completion: for an append that succeeds, the place of the data.
    pub sector: Sector,
}

/// A model of a device.
#[derive(Clone, Debug)]
pub struct Model {
    geometry: Geometry,
    limits: Limits,
    medium: Medium,
    zones: Option<ModelZones>,
    bad: BadBlocks,
}

impl Model {
    /// A fresh device of this geometry. Without `memory_backed` it keeps no data, and the data of
    /// reads are undefined.
    pub fn new(geometry: &Geometry, limits: &Limits, memory_backed: bool) -> Model {
        Model {
            geometry: geometry.clone(),
            limits: limits.clone(),
            medium: Medium::new(memory_backed),
            zones: geometry.zones.as_ref().map(|zones| ModelZones::new(zones, geometry.sectors)),
            bad: BadBlocks::default(),
        }
    }

    /// Sets other zone rules.
    #[must_use]
    pub fn with_rules(mut self, rules: ZoneRules) -> Model {
        if let Some(zones) = &mut self.zones {
            zones.rules = rules;
            zones.write_sectors = match rules {
                ZoneRules::NullBlk => 1,
                ZoneRules::Zbc => u64::from(self.geometry.physical_block_bytes) / SECTOR_BYTES,
            };
        }
        self
    }

    /// The zone rules.
    pub fn rules(&self) -> ZoneRules {
        self.zones.as_ref().map_or(ZoneRules::NullBlk, |zones| zones.rules)
    }

    /// Alignment of the start and the end of writes to sequential zones, in sectors.
    pub fn write_sectors(&self) -> u64 {
        let zones = self.zones.as_ref().map_or(1, |zones| zones.write_sectors);
        zones.max(self.geometry.block_sectors())
    }

    /// The geometry of the device.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The limits of the device.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether the device keeps data, so that reads can be compared.
    pub fn keeps_data(&self) -> bool {
        self.medium.keeps_data()
    }

    /// The bad blocks, for the test to change.
    pub fn bad_blocks(&mut self) -> &mut BadBlocks {
        &mut self.bad
    }

    /// The whole zone report; empty without zones.
    pub fn report(&self) -> Vec<ZoneInfo> {
        self.zones.as_ref().map(ModelZones::report).unwrap_or_default()
    }

    /// Makes every sequential zone full, as null_blk's `zone_full` does at the start.
    pub fn fill_zones(&mut self) {
        if let Some(zones) = &mut self.zones {
            zones.fill();
        }
    }

    /// Makes a zone read-only or offline, or, if it has that condition already, empty again.
    /// Returns whether the zone can have that condition: a conventional zone cannot.
    pub fn toggle(&mut self, zone: ZoneNo, cond: ZoneCond) -> bool {
        let Some(zones) = &mut self.zones else { return false };
        match zones.toggle(zone.index(), cond) {
            Some(emptied) => {
                if let Some(range) = emptied {
                    self.medium.forget(range);
                }
                true
            }
            None => false,
        }
    }

    /// Executes one bio. `data` has the bytes of a write, or receives those of a read. Sectors that
    /// the device would not fill (it keeps no data, or the read fails there) stay unchanged.
    ///
    /// `data` is ignored by operations without data. Otherwise it has the bio's length, unless the
    /// bio is invalid anyway.
    pub fn apply(&mut self, bio: &Bio, data: &mut [u8]) -> ExpectedResult {
        let ignores_sector = matches!(bio.op, Op::Flush | Op::ZoneResetAll);
        let sector = if ignores_sector { Sector(0) } else { bio.sector };
        let mut outcome = ExpectedResult { status: Status::Ok, sector };
        if let Err(status) = self.check(bio) {
            outcome.status = status;
            return outcome;
        }
        match bio.op {
            Op::Flush => {}
            Op::ZoneAppend => match self.append(bio.sector.0, data) {
                Ok(sector) => outcome.sector = Sector(sector),
                Err(status) => outcome.status = status,
            },
            Op::Read | Op::Write | Op::Discard | Op::WriteZeroes => {
                outcome.status = self.in_pieces(bio, data);
            }
            Op::ZoneReset | Op::ZoneResetAll | Op::ZoneOpen | Op::ZoneClose | Op::ZoneFinish => {
                outcome.status = self.manage(bio)
            }
        }
        outcome
    }

    /// Splits as the block layer does, and executes every piece even if one fails. The bio's status
    /// is that of the first piece that failed.
    fn in_pieces(&mut self, bio: &Bio, data: &mut [u8]) -> Status {
        let mut status = Status::Ok;
        let mut at = bio.sector.0;
        let end = bio.sector.0 + bio.sectors;
        while at < end {
            let sectors = self.piece_sectors(bio.op, at, end - at);
            let piece = if bio.op.has_data() {
                let from = ((at - bio.sector.0) * SECTOR_BYTES) as usize;
                &mut data[from..from + (sectors * SECTOR_BYTES) as usize]
            } else {
                &mut []
            };
            let result = match bio.op {
                Op::Read => self.read(at, sectors, piece),
                Op::Write => self.write(at, sectors, Some(piece)),
                Op::WriteZeroes => self.write(at, sectors, None),
                _ => self.discard(at, sectors),
            };
            if let (Status::Ok, Err(error)) = (status, result) {
                status = error;
            }
            at += sectors;
        }
        status
    }

    fn read(&mut self, at: u64, sectors: u64, into: &mut [u8]) -> Result<(), Status> {
        let mut wp = u64::MAX;
        if let Some(zones) = &self.zones {
            let zone = zones.at(at);
            let gap = zones.rules == ZoneRules::Zbc && at + sectors > zone.limit();
            if zone.cond == ZoneCond::Offline || gap {
                return Err(zones.rules.refused());
            }
            if zones.rules == ZoneRules::NullBlk && !zone.is_conventional() {
                wp = zone.wp;
            }
        }
        let (clean, result) = self.bad.hit(at, sectors, self.geometry.block_sectors());
        self.medium.read(at, &mut into[..(clean * SECTOR_BYTES) as usize], wp);
        result
    }

    fn write(&mut self, at: u64, sectors: u64, from: Option<&[u8]>) -> Result<(), Status> {
        match &self.zones {
            Some(zones) if !zones.at(at).is_conventional() => {
                self.write_sequential(Some(at), at, sectors, from).map(|_| ())
            }
            _ => {
                let (clean, result) = self.bad.hit(at, sectors, self.geometry.block_sectors());
                self.medium.write(at, clean, from);
                result
            }
        }
    }

    fn append(&mut self, zone_start: u64, from: &[u8]) -> Result<u64, Status> {
        let sectors = from.len() as u64 / SECTOR_BYTES;
        self.write_sequential(None, zone_start, sectors, Some(from))
    }

    /// A write to a sequential zone: at `want`, or at the write pointer.
    ///
    /// The order of the checks is null_blk's: condition, write pointer, capacity, resources, bad
    /// blocks. A write that hits a bad block leaves the zone open.
    fn write_sequential(
        &mut self,
        want: Option<u64>,
        inside: u64,
        sectors: u64,
        from: Option<&[u8]>,
    ) -> Result<u64, Status> {
        let zones = self.zones.as_mut().expect("only zoned devices get here");
        let index = zones.index_at(inside);
        let at = zones.begin_write(index, want, sectors)?;
        let (clean, result) = self.bad.hit(at, sectors, self.geometry.block_sectors());
        zones.end_write(index, clean);
        self.medium.write(at, clean, from);
        result.map(|()| at)
    }

    fn discard(&mut self, at: u64, sectors: u64) -> Result<(), Status> {
        if let Some(zones) = self.zones.as_ref().filter(|zones| zones.rules == ZoneRules::Zbc) {
            let zone = zones.at(at);
            let broken = matches!(zone.cond, ZoneCond::ReadOnly | ZoneCond::Offline);
            if broken || at + sectors > zone.limit() {
                return Err(zones.rules.refused());
            }
            if !zone.is_conventional() {
                return Ok(());
            }
        }
        let (clean, result) = self.bad.hit(at, sectors, self.geometry.block_sectors());
        self.medium.forget(at..at + clean);
        result
    }

    fn manage(&mut self, bio: &Bio) -> Status {
        let zones = self.zones.as_mut().expect("checked: only zoned devices get here");
        let result = match bio.op {
            Op::ZoneResetAll => {
                for range in zones.reset_all() {
                    self.medium.forget(range);
                }
                Ok(())
            }
            op => {
                let index = zones.index_at(bio.sector.0);
                match op {
                    Op::ZoneOpen => zones.open(index),
                    Op::ZoneClose => zones.close(index),
                    Op::ZoneFinish => zones.finish(index),
                    _ => zones.reset(index).map(|range| self.medium.forget(range)),
                }
            }
        };
        result.err().unwrap_or(Status::Ok)
    }
}

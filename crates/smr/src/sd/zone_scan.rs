//! Examines every zone of a disk in order, to find their common geometry or the first zone that
//! does not fit it.

use blockyard_core::ZoneGeometry;

use super::error::SdError;
use super::pages::{ZoneDescriptor, ZonedCharacteristics, zone_type};

/// The zones examined so far. All lengths and positions are in blocks, including the geometry's.
#[derive(Debug)]
pub(super) struct ZoneScan {
    /// Distance between the starts of zones on a disk with gap zones; 0 without gaps.
    granularity: u64,
    open_max: u32,
    /// Distance between the starts of adjacent zones; 0 before the first.
    zone_blocks: u64,
    /// Writable length of a sequential zone; 0 before the first.
    capacity: u64,
    count: u32,
    conventional: u32,
    next: u64,
}

impl ZoneScan {
    pub(super) fn new(zoned: &ZonedCharacteristics) -> ZoneScan {
        ZoneScan {
            granularity: zoned.granularity_blocks,
            open_max: zoned.open_max.unwrap_or(0),
            zone_blocks: zoned.granularity_blocks,
            capacity: 0,
            count: 0,
            conventional: 0,
            next: 0,
        }
    }

    /// Where the next zone must start.
    pub(super) fn next_lba(&self) -> u64 {
        self.next
    }

    /// Examines the next zone of a disk of `disk_blocks`.
    pub(super) fn step(&mut self, zone: &ZoneDescriptor, disk_blocks: u64) -> Result<(), SdError> {
        let ZoneDescriptor { start, blocks, .. } = *zone;
        let end = start.checked_add(blocks).filter(|end| *end <= disk_blocks && blocks > 0);
        let Some(end) = end.filter(|_| start == self.next) else {
            return Err(SdError::unfit(format!(
                "zone {} at block {start}, of {blocks} blocks, is invalid: expected a zone at \
                 block {} that ends at {disk_blocks} or before",
                self.count, self.next
            )));
        };
        self.next = end;
        if zone.kind == zone_type::GAP {
            let message = "gap zone without constant starting LBA offsets";
            return if self.granularity > 0 { Ok(()) } else { Err(SdError::unfit(message)) };
        }
        if self.zone_blocks == 0 {
            self.zone_blocks = blocks;
        }
        self.check_place(start, blocks, end == disk_blocks)?;
        match zone.kind {
            zone_type::CONVENTIONAL if self.conventional == self.count => self.conventional += 1,
            zone_type::CONVENTIONAL => {
                return Err(SdError::unfit(format!(
                    "zone {} is conventional, and sequential ones come before it; conventional \
                     zones are driven at the start of a disk only",
                    self.count
                )));
            }
            zone_type::SEQUENTIAL_REQUIRED => self.check_capacity(blocks, end == disk_blocks)?,
            other => {
                return Err(SdError::unfit(format!(
                    "zone {} is of type {other}; expected conventional (1) or sequential write \
                     required (2)",
                    self.count
                )));
            }
        }
        self.count = self.count.checked_add(1).ok_or_else(|| SdError::unfit("too many zones"))?;
        Ok(())
    }

    fn check_place(&self, start: u64, blocks: u64, last: bool) -> Result<(), SdError> {
        let zone_blocks = self.zone_blocks;
        if !zone_blocks.is_power_of_two() {
            let what = format!("zone size {zone_blocks} (blocks) is not a power of two");
            return Err(SdError::unfit(what));
        }
        let wanted = u64::from(self.count).checked_mul(zone_blocks);
        // Without gaps only the last zone may be shorter than the others.
        let short = blocks < zone_blocks && self.granularity == 0 && !last;
        if wanted != Some(start) || blocks > zone_blocks || short {
            return Err(SdError::unfit(format!(
                "zoned device with non constant zone size: zone {} starts at block {start} and \
                 has {blocks} blocks, the others {zone_blocks}",
                self.count
            )));
        }
        Ok(())
    }

    fn check_capacity(&mut self, blocks: u64, last: bool) -> Result<(), SdError> {
        if self.capacity == 0 {
            // Without gaps a zone is writable to its end; a first sequential zone that is short is
            // the last zone.
            self.capacity = if self.granularity > 0 { blocks } else { self.zone_blocks };
        }
        if blocks == self.capacity || (last && blocks < self.capacity) {
            return Ok(());
        }
        Err(SdError::unfit(format!(
            "invalid variable zone capacity: zone {} has {blocks} blocks, others {}",
            self.count, self.capacity
        )))
    }

    /// The geometry, after all zones were examined.
    pub(super) fn geometry(self) -> Result<ZoneGeometry, SdError> {
        if self.conventional == self.count {
            let what = format!("none of its {} zones is sequential", self.count);
            return Err(SdError::unfit(what));
        }
        Ok(ZoneGeometry {
            zone_sectors: self.zone_blocks,
            zone_capacity_sectors: self.capacity,
            zone_count: self.count,
            conventional_count: self.conventional,
            open_max: self.open_max,
            active_max: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(granularity: u64, zones: &[Row], disk: u64) -> Result<ZoneGeometry, String> {
        let zoned = ZonedCharacteristics {
            unrestricted_reads: true,
            open_max: Some(4),
            granularity_blocks: granularity,
        };
        let mut scan = ZoneScan::new(&zoned);
        for &(kind, start, blocks) in zones {
            let zone = ZoneDescriptor { kind, cond: 1, blocks, start, wp: start };
            scan.step(&zone, disk).map_err(|error| error.to_string())?;
        }
        scan.geometry().map_err(|error| error.to_string())
    }

    #[test]
    fn a_runt_at_the_end_is_no_harm() {
        let zones = scan(0, &[(1, 0, 8), (2, 8, 8), (2, 16, 4)], 20).unwrap();
        assert_eq!((zones.zone_sectors, zones.zone_capacity_sectors), (8, 8));
        assert_eq!((zones.zone_count, zones.conventional_count, zones.open_max), (3, 1, 4));
    }

    #[test]
    fn gaps_make_the_zone_size() {
        let rows = [(1, 0, 6), (5, 6, 2), (2, 8, 6), (5, 14, 2), (2, 16, 6), (5, 22, 2)];
        let zones = scan(8, &rows, 24).unwrap();
        assert_eq!((zones.zone_sectors, zones.zone_capacity_sectors), (8, 6));
        assert_eq!(zones.zone_count, 3);
    }

    /// Type, first block and length of a zone.
    type Row = (u8, u64, u64);

    #[test]
    fn sense_that_linux_fails_is_failed() {
        let cases: [(&[Row], &str); 8] = [
            (&[(1, 0, 8), (1, 8, 8)], "none of its 2 zones is sequential"),
            (&[(2, 0, 6)], "not a power of two"),
            (&[(2, 0, 8), (2, 8, 4), (2, 12, 8)], "non constant zone size"),
            (&[(2, 0, 8), (2, 8, 16)], "non constant zone size"),
            (&[(2, 0, 8), (1, 8, 8)], "is conventional, and sequential ones come before"),
            (&[(2, 0, 8), (3, 8, 8)], "is of type 3"),
            (&[(2, 0, 8), (2, 16, 8)], "at block 16"),
            (&[(2, 0, 4), (5, 4, 4)], "gap zone without"),
        ];
        for (zones, want) in cases {
            let error = scan(0, zones, 64).unwrap_err();
            assert!(error.contains(want), "{zones:?}: {error}");
        }
        assert!(scan(0, &[(2, 0, 128)], 64).is_err());
        assert!(scan(8, &[(2, 0, 4), (5, 4, 4), (2, 8, 6), (5, 14, 50)], 64).is_err());
        assert!(scan(0, &[(2, u64::MAX, 8)], 64).is_err());
    }
}

//! The contents of the model's device: a map of sectors, and the bad blocks.

use std::collections::BTreeMap;
use std::ops::Range;

use blockyard_core::Status;
use blockyard_core::units::SECTOR_BYTES;

/// Length of a sector in bytes.
const SECTOR: usize = SECTOR_BYTES as usize;

/// The sectors that were written. All others are zeros.
#[derive(Clone, Debug)]
pub struct Medium {
    sectors: Option<BTreeMap<u64, Box<[u8; SECTOR]>>>,
}

impl Medium {
    /// An empty medium; without `memory_backed` it keeps no data.
    pub fn new(memory_backed: bool) -> Medium {
        Medium { sectors: memory_backed.then(BTreeMap::new) }
    }

    /// Whether it keeps data at all.
    pub fn keeps_data(&self) -> bool {
        self.sectors.is_some()
    }

    /// Reads; sectors from `wp` on have no data and read as 0xFF.
    pub fn read(&self, at: u64, into: &mut [u8], wp: u64) {
        let Some(sectors) = &self.sectors else { return };
        for (sector, into) in (at..).zip(into.chunks_exact_mut(SECTOR)) {
            match sectors.get(&sector) {
                _ if sector >= wp => into.fill(0xff),
                Some(bytes) => into.copy_from_slice(&bytes[..]),
                None => into.fill(0),
            }
        }
    }

    /// Writes `count` sectors, zeros without `from`.
    pub fn write(&mut self, at: u64, count: u64, from: Option<&[u8]>) {
        let Some(sectors) = &mut self.sectors else { return };
        let Some(from) = from else { return self.forget(at..at + count) };
        for (sector, bytes) in (at..at + count).zip(from.chunks_exact(SECTOR)) {
            let slot = sectors.entry(sector).or_insert_with(|| Box::new([0; SECTOR]));
            slot.copy_from_slice(bytes);
        }
    }

    /// Makes a range read as zeros again.
    pub fn forget(&mut self, range: Range<u64>) {
        let Some(sectors) = &mut self.sectors else { return };
        if !range.is_empty() {
            sectors.extract_if(range, |_, _| true).for_each(drop);
        }
    }
}

/// Sectors where transfers fail, as with null_blk's attributes `badblocks*`.
#[derive(Clone, Debug, Default)]
pub struct BadBlocks {
    /// The bad ranges, disjoint and sorted.
    ranges: Vec<Range<u64>>,
    /// A range becomes good when it is hit.
    pub once: bool,
    /// The sectors before the bad one are transferred anyway.
    pub partial_io: bool,
}

impl BadBlocks {
    /// Makes a range of sectors bad. It is merged with the ranges that it overlaps or touches,
    /// which matters when a hit clears the whole range.
    pub fn add(&mut self, mut range: Range<u64>) {
        self.ranges.retain(|bad| {
            let apart = bad.end < range.start || range.end < bad.start;
            if !apart {
                range = range.start.min(bad.start)..range.end.max(bad.end);
            }
            apart
        });
        self.ranges.push(range);
        self.ranges.sort_by_key(|range| range.start);
    }

    /// Makes a range of sectors good.
    pub fn clear(&mut self, range: Range<u64>) {
        let mut left = Vec::new();
        for bad in self.ranges.drain(..) {
            left.push(bad.start..bad.end.min(range.start));
            left.push(bad.start.max(range.end)..bad.end);
        }
        left.retain(|range| range.start < range.end);
        self.ranges = left;
    }

    /// How many sectors of the transfer take place, in whole blocks, and the result.
    pub(super) fn hit(&mut self, at: u64, sectors: u64, block: u64) -> (u64, Result<(), Status>) {
        let end = at + sectors;
        let hit = self.ranges.iter().find(|bad| bad.start < end && at < bad.end).cloned();
        let Some(hit) = hit else { return (sectors, Ok(())) };
        let clean = if self.partial_io { hit.start.saturating_sub(at) / block * block } else { 0 };
        if self.once {
            self.clear(hit);
        }
        (clean, Err(Status::IoErr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_come_back_and_are_forgotten_by_range() {
        let mut medium = Medium::new(true);
        medium.write(10, 3, Some(&[5; 3 * SECTOR]));
        medium.forget(11..12);
        let mut back = [1; 5 * SECTOR];
        medium.read(9, &mut back, 13);
        let firsts: Vec<u8> = back.chunks(SECTOR).map(|sector| sector[0]).collect();
        assert_eq!(firsts, [0, 5, 0, 5, 0xff]);
    }

    #[test]
    fn a_bad_range_is_cut_by_clearing_its_middle() {
        let mut bad = BadBlocks::default();
        bad.add(8..32);
        bad.clear(16..24);
        assert_eq!(bad.hit(16, 8, 8), (8, Ok(())));
        assert_eq!(bad.hit(0, 64, 8), (0, Err(Status::IoErr)));
        bad.partial_io = true;
        assert_eq!(bad.hit(0, 64, 8), (8, Err(Status::IoErr)));
        bad.once = true;
        assert_eq!(bad.hit(0, 64, 8), (8, Err(Status::IoErr)));
        assert_eq!(bad.hit(0, 64, 8), (24, Err(Status::IoErr)));
        assert_eq!(bad.hit(0, 64, 8), (64, Ok(())));
    }
}

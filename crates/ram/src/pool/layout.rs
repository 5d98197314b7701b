//! Where a place lies: shards have every n-th segment, so that the place alone says whose it is.

use super::memory::PAGE_BYTES;

/// What places count in: the grain of objects, and the step of size classes.
pub(super) const UNIT_BYTES: usize = blockyard_sync::entry_words::PLACE_BYTES as usize;
/// Units in a page.
pub(super) const PAGE_UNITS: u32 = (PAGE_BYTES / UNIT_BYTES) as u32;

/// The numbers that a pool is cut by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Units of the largest object.
    pub(super) units_max: u32,
    /// Units in a segment, whole pages.
    pub(super) segment_units: u32,
    /// Segments that a shard can have.
    pub(super) segments_max: u32,
    pub(super) shards: u32,
}

impl Layout {
    /// Units that an object takes.
    #[inline]
    pub(super) fn units_of(self, len_bytes: usize) -> u32 {
        len_bytes.div_ceil(UNIT_BYTES) as u32
    }

    /// Bytes of so many units.
    #[inline]
    pub(super) fn bytes(units: u32) -> usize {
        units as usize * UNIT_BYTES
    }

    /// Bytes of addresses that the pool needs.
    pub(super) fn len_bytes(self) -> u64 {
        let segments = u64::from(self.segments_max) * u64::from(self.shards);
        segments * Layout::bytes(self.segment_units) as u64
    }

    /// The segment of an offset in a shard.
    #[inline]
    pub(super) fn segment_of(self, at: u32) -> u32 {
        at / self.segment_units
    }

    /// The place of an offset in a shard.
    #[inline]
    pub(super) fn place(self, shard: u32, at: u32) -> u64 {
        let segment = u64::from(self.segment_of(at)) * u64::from(self.shards) + u64::from(shard);
        segment * u64::from(self.segment_units) + u64::from(at % self.segment_units)
    }

    /// The shard that a place belongs to.
    #[inline]
    pub(super) fn shard(self, place: u64) -> u32 {
        (place / u64::from(self.segment_units) % u64::from(self.shards)) as u32
    }

    /// A place's offset in its shard.
    #[inline]
    pub(super) fn offset(self, place: u64) -> u32 {
        let units = u64::from(self.segment_units);
        ((place / units / u64::from(self.shards)) * units + place % units) as u32
    }

    /// Where a shard's segment begins, in bytes.
    pub(super) fn segment_start(self, shard: u32, segment: u32) -> u64 {
        self.place(shard, segment * self.segment_units) * UNIT_BYTES as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_says_whose_it_is() {
        let layout = Layout { units_max: 256, segment_units: 512, segments_max: 9, shards: 3 };
        let mut places = Vec::new();
        for shard in 0..3 {
            for at in 0..9 * 512 {
                let place = layout.place(shard, at);
                assert_eq!((layout.shard(place), layout.offset(place)), (shard, at));
                places.push(place);
            }
        }
        places.sort_unstable();
        assert!(places.into_iter().eq(0..layout.len_bytes() / 16), "every place has one owner");
        assert_eq!(layout.segment_start(2, 1), (3 + 2) * 512 * 16);
    }
}

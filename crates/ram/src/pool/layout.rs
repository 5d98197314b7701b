//! Address layout of a pool. Stretches of segments are assigned to the shards in turn, so that a
//! place alone identifies its shard. A stretch is as long as a huge page; in a small pool it is one
//! segment. Also [`Object`]: the place and the length of stored contents.

use blockyard_sync::block_table::{Kind, OBJECT_BYTES_MAX, Word};

use super::memory::{HUGE_BYTES, PAGE_BYTES};

/// Unit of places in bytes: the alignment of objects, and the step between size classes.
pub(super) const UNIT_BYTES: usize = blockyard_sync::block_table::PLACE_BYTES as usize;
/// Units in a page.
pub(super) const PAGE_UNITS: u32 = (PAGE_BYTES / UNIT_BYTES) as u32;

/// The parameters of the layout. Numbers by which a place is divided, once per freed object, are
/// powers of two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Bytes of the largest object.
    pub(super) object_bytes_max: usize,
    /// Units of the largest object.
    pub(super) units_max: u32,
    /// Bytes before each object's own: those of its refcount, or 0.
    pub(super) head_bytes: usize,
    /// Maximum number of segments of a shard.
    pub(super) segments_max: u32,
    segment_shift: u32,
    /// Log2 of the number of segments in a stretch.
    stretch_shift: u32,
    shard_shift: u32,
}

impl Layout {
    /// The layout of a pool with `shards` shards, segments of `segment_units` units (whole pages),
    /// and stretches of `stretch` segments; all are powers of two. `segments_max` is rounded up to
    /// whole stretches.
    pub(super) fn new(
        shards: u32,
        segment_units: u32,
        stretch: u32,
        segments_max: u32,
        object_bytes_max: usize,
        head_bytes: usize,
    ) -> Layout {
        let units_max = (object_bytes_max + head_bytes).div_ceil(UNIT_BYTES) as u32;
        assert!(shards.is_power_of_two() && segment_units.is_power_of_two());
        assert!(segment_units >= PAGE_UNITS.max(units_max));
        assert!(stretch.is_power_of_two());
        Layout {
            object_bytes_max,
            units_max,
            head_bytes,
            segments_max: segments_max.next_multiple_of(stretch),
            segment_shift: segment_units.ilog2(),
            stretch_shift: stretch.ilog2(),
            shard_shift: shards.ilog2(),
        }
    }

    /// Number of shards.
    #[inline]
    pub(super) fn shards(self) -> u32 {
        1 << self.shard_shift
    }

    /// Units in a segment.
    #[inline]
    pub(super) fn segment_units(self) -> u32 {
        1 << self.segment_shift
    }

    /// Units that an object of `len_bytes` takes.
    #[inline]
    pub(super) fn units_of(self, len_bytes: usize) -> u32 {
        (len_bytes + self.head_bytes).div_ceil(UNIT_BYTES) as u32
    }

    /// Length of an object's own bytes; see [`Object::new`].
    #[inline]
    pub(super) fn object_bytes(self, object: Object) -> usize {
        match object.len_bytes() {
            OBJECT_BYTES_MAX => self.object_bytes_max.max(OBJECT_BYTES_MAX),
            shorter => shorter,
        }
    }

    /// Bytes of the largest object that takes `units`.
    pub(super) fn largest(self, units: u32) -> usize {
        (Layout::bytes(units) - self.head_bytes).min(self.object_bytes_max)
    }

    /// Address of an object's own bytes.
    #[inline]
    pub(super) fn start(self, place: u64) -> u64 {
        place * UNIT_BYTES as u64 + self.head_bytes as u64
    }

    /// Bytes of `units` units.
    #[inline]
    pub(super) fn bytes(units: u32) -> usize {
        units as usize * UNIT_BYTES
    }

    /// Length of the pool's address range in bytes.
    pub(super) fn len_bytes(self) -> u64 {
        let segments = u64::from(self.segments_max) << self.shard_shift;
        segments * Layout::bytes(self.segment_units()) as u64
    }

    /// The segment of an offset in a shard.
    #[inline]
    pub(super) fn segment_of(self, at: u32) -> u32 {
        at >> self.segment_shift
    }

    /// The number in the pool of the segment that contains a place.
    #[inline]
    pub(super) fn pool_segment(self, place: u64) -> u64 {
        place >> self.segment_shift
    }

    /// Mask of an offset within a stretch, in units.
    #[inline]
    fn within(self) -> u32 {
        (1 << (self.segment_shift + self.stretch_shift)) - 1
    }

    /// The place of an offset in a shard.
    #[inline]
    pub(super) fn place(self, shard: u32, at: u32) -> u64 {
        let shift = self.segment_shift + self.stretch_shift;
        let stretch = u64::from(at >> shift) << self.shard_shift | u64::from(shard);
        stretch << shift | u64::from(at & self.within())
    }

    /// The shard that a place belongs to.
    #[inline]
    pub(super) fn shard(self, place: u64) -> u32 {
        (self.pool_segment(place) >> self.stretch_shift) as u32 & (self.shards() - 1)
    }

    /// The offset of a place in its shard.
    #[inline]
    pub(super) fn offset(self, place: u64) -> u32 {
        let shift = self.segment_shift + self.stretch_shift;
        let stretch = (place >> (shift + self.shard_shift)) as u32;
        stretch << shift | place as u32 & self.within()
    }

    /// Segments in a stretch, if a stretch is as long as a huge page.
    pub(super) fn huge_stretch(self) -> Option<u32> {
        let bytes = Layout::bytes(self.segment_units()) << self.stretch_shift;
        (bytes == HUGE_BYTES).then_some(1 << self.stretch_shift)
    }

    /// The stretch of a shard that contains one of its segments.
    pub(super) fn stretch_of(self, segment: u32) -> u32 {
        segment >> self.stretch_shift
    }

    /// The segments of a stretch of a shard.
    pub(super) fn segments_of(self, stretch: u32) -> std::ops::Range<u32> {
        stretch << self.stretch_shift..(stretch + 1) << self.stretch_shift
    }

    /// Address of a shard's segment in bytes.
    pub(super) fn segment_start(self, shard: u32, segment: u32) -> u64 {
        self.place(shard, segment << self.segment_shift) * UNIT_BYTES as u64
    }
}

/// Size of a refcount in bytes.
pub(super) const COUNT_BYTES: usize = size_of::<u32>();

/// The place and length of a block's stored contents in the pool. It fits in a [`Word`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    place: u64,
    len_bytes: u32,
}

impl Object {
    /// A word's length field may be too small for the pool's longest object: the field's maximum
    /// stands for that length.
    pub(super) fn new(place: u64, len_bytes: usize) -> Object {
        Object { place, len_bytes: len_bytes.min(OBJECT_BYTES_MAX) as u32 }
    }

    /// The object that a word refers to.
    #[inline]
    pub fn of(word: Word) -> Option<Object> {
        let object = || Object { place: word.place(), len_bytes: word.len_bytes() as u32 };
        (word.kind() == Kind::Object).then(object)
    }

    /// A word that refers to this object.
    #[inline]
    pub fn word(self) -> Word {
        Word::object(self.place, self.len_bytes())
    }

    /// Place of the object, in units of 16 bytes.
    #[inline]
    pub fn place(self) -> u64 {
        self.place
    }

    /// Length of the object as its word records it, without padding.
    #[inline]
    pub fn len_bytes(self) -> usize {
        self.len_bytes as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_says_whose_it_is() {
        for (stretch, segments) in [(1, 9), (2, 10), (4, 12)] {
            let layout = Layout::new(4, 256, stretch, 9, 4096, 0);
            let mut places = Vec::new();
            for shard in 0..4 {
                for at in 0..segments * 256 {
                    let place = layout.place(shard, at);
                    assert_eq!((layout.shard(place), layout.offset(place)), (shard, at));
                    places.push(place);
                }
            }
            places.sort_unstable();
            assert!(places.into_iter().eq(0..layout.len_bytes() / 16), "every place has one owner");
        }
        let layout = Layout::new(4, 256, 1, 9, 4096, 0);
        assert_eq!(layout.segment_start(2, 1), (4 + 2) * 256 * 16);
        let layout = Layout::new(4, 256, 4, 9, 4096, 0);
        assert_eq!(layout.segment_start(2, 1), (2 * 4 + 1) * 256 * 16);
        assert_eq!((layout.stretch_of(3), layout.stretch_of(4)), (0, 1));
    }
}

//! The end of the log: where the next group goes.

use blockyard_store::SegmentStore;
use blockyard_volume_format::superblock::{LogPlace, SEGMENT_NONE};

use crate::segments::{AllocationClass, Segments};

/// The end of the log. Invariant: `next` is the segment that the last group names, or one taken
/// since. A group or a superblock names each segment in which the log continues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogEnd {
    pub(crate) place: LogPlace,
    pub(crate) epoch: u64,
    /// Groups up to this number are durable.
    pub(crate) durable: u64,
    /// Bytes of groups that the opening found after the checkpoint.
    pub(crate) found_bytes: u64,
}

impl LogEnd {
    /// Finds a place for a group of `len` bytes, and takes the next segment if none is named yet.
    /// `None` if there is no place: then a checkpoint must name a new segment for the log.
    pub(crate) fn reserve<D: SegmentStore>(
        &mut self,
        len: u32,
        segments: &Segments<D>,
        want: AllocationClass,
    ) -> Option<u64> {
        if len > segments.bytes() {
            return None;
        }
        if len > segments.bytes() - self.place.offset {
            if self.place.next == SEGMENT_NONE {
                return None;
            }
            self.place.segment = self.place.next;
            self.place.offset = 0;
            self.place.next = SEGMENT_NONE;
        }
        if self.place.next == SEGMENT_NONE {
            self.place.next = segments.take(want).unwrap_or(SEGMENT_NONE);
        }
        Some(segments.address(self.place.segment, self.place.offset))
    }

    /// Whether a group of `len` bytes can be placed.
    pub(crate) fn has_space<D: SegmentStore>(&self, len: u32, segments: &Segments<D>) -> bool {
        len <= segments.bytes() - self.place.offset || self.place.next != SEGMENT_NONE
    }

    /// The number of segments that a group of `len` bytes takes, such that the log can continue
    /// after it; `None` if the group cannot be placed.
    pub(crate) fn takes<D: SegmentStore>(&self, len: u32, segments: &Segments<D>) -> Option<usize> {
        if len > segments.bytes() {
            return None;
        }
        let fits = len <= segments.bytes() - self.place.offset;
        let has_next = self.place.next != SEGMENT_NONE;
        match (fits, has_next) {
            (true, true) => Some(0),
            (true, false) | (false, true) => Some(1),
            (false, false) => None,
        }
    }

    /// Moves the end of the log past a group of `len` bytes, whose header has the checksum `chain`.
    pub(crate) fn advance(&mut self, len: u32, chain: u64) {
        self.place.offset += len;
        self.place.number = self.place.number.saturating_add(1);
        self.place.chain = chain;
    }

    /// The number of the last group.
    pub(crate) fn last(&self) -> u64 {
        self.place.number.saturating_sub(1)
    }
}

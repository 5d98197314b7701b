//! The end of the log: where the next group goes.

use crate::format::superblock::{LogPlace, SEGMENT_NONE};
use crate::segments::{Segments, Want};
use crate::store::Directory;

/// The end of the log. Invariant: `next` is the segment that the last group names, or one that was
/// taken since; what the log goes on to is named by a group before it, or by a superblock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogEnd {
    pub(crate) place: LogPlace,
    pub(crate) epoch: u64,
    /// Groups up to this one are durable.
    pub(crate) durable: u64,
    /// Bytes of groups that were found behind the checkpoint when the pool was opened.
    pub(crate) found_bytes: u64,
}

impl LogEnd {
    /// Finds a place for a group of so many bytes, and names the segment after it. `None` if there
    /// is none: the log has to begin anew behind a checkpoint.
    pub(crate) fn reserve<D: Directory>(
        &mut self,
        len: u32,
        segments: &Segments<D>,
        want: Want,
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

    /// Whether a group of so many bytes finds a place.
    pub(crate) fn has_room<D: Directory>(&self, len: u32, segments: &Segments<D>) -> bool {
        len <= segments.bytes() - self.place.offset || self.place.next != SEGMENT_NONE
    }

    /// How many segments a group of so many bytes takes, so that the log can go on behind it;
    /// `None` if it finds no place.
    pub(crate) fn takes<D: Directory>(&self, len: u32, segments: &Segments<D>) -> Option<usize> {
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

    /// A group of so many bytes was written, and its head has this checksum.
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

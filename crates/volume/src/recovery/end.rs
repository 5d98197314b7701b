//! The end of the log, or damage in its middle? A group that was being written when the power was
//! cut looks like one that has rotted. What tells them apart is what was written later: a group is
//! durable before a later one says so.
//!
//! The last group of all has nothing behind it: that it was durable is known only if the pool has
//! been opened since.

use crate::buffer::Memory;
use crate::checkpoint::mark_of;
use crate::error::{FormatError, VolumeError};
use crate::format::group;
use crate::format::superblock::{LogPlace, SEGMENT_NONE, Superblock};
use crate::segments::Segments;
use crate::store::Directory;

/// What is read at once, in bytes.
const CHUNK_BYTES: usize = super::AHEAD_BYTES;

/// The place where no group follows.
pub(super) struct End<'a, D: Directory> {
    pub(super) segments: &'a Segments<D>,
    pub(super) superblock: &'a Superblock,
    pub(super) place: LogPlace,
    /// The copy that is looked at.
    pub(super) copy: usize,
}

impl<D: Directory> End<'_, D> {
    /// Refuses the end if the group that is missing there was durable: if groups up to `durable`
    /// were, or a group behind it, of this epoch or a later one, knows that.
    pub(super) fn check(&self, durable: u64, epoch: u64) -> Result<(), VolumeError> {
        let LogPlace { segment, offset, next, number, .. } = self.place;
        let known = number <= durable
            || self.is_behind(segment, offset, epoch)
            || self.is_behind(next, 0, epoch);
        if !known {
            return Ok(());
        }
        // Where it is, as far as that can be told: behind the last group if there is room.
        let is_full = segment == SEGMENT_NONE || offset >= self.segments.bytes();
        let (segment, offset) =
            if is_full && next != SEGMENT_NONE { (next, 0) } else { (segment, offset) };
        Err(FormatError::Log { segment, offset, number }.into())
    }

    /// Whether a segment has a group, from an offset on, that says that the missing one was
    /// durable.
    fn is_behind(&self, segment: u32, offset: u32, epoch: u64) -> bool {
        if segment as usize >= self.segments.files().len() {
            return false;
        }
        let align = self.superblock.align as usize;
        let end = self.segments.bytes() as usize;
        let chunk = CHUNK_BYTES.min(end);
        let mut bytes = Memory::new(chunk as u64).take_beyond(chunk);
        let mut at = offset as usize;
        while at < end {
            let len = chunk.min(end - at);
            self.read(segment, at, &mut bytes[..len]);
            for place in (0..len).step_by(align) {
                if group::head_len(&bytes[place..len], self.superblock.align).is_some()
                    && self.knows(segment, at + place, epoch)
                {
                    return true;
                }
            }
            at += len;
        }
        false
    }

    /// Reads a part of a segment; what cannot be read is zeros.
    fn read(&self, segment: u32, at: usize, into: &mut [u8]) {
        let files = self.segments.files();
        let address = self.segments.address(segment, at as u32);
        if self.segments.read_long(&files, self.copy, address, into).is_ok() {
            return;
        }
        let align = self.superblock.align as usize;
        // Direct I/O wants memory that begins at a page.
        let mut unit = Memory::new(align as u64).take_beyond(align);
        for (index, part) in (0..).zip(into.chunks_mut(align)) {
            let place = address + index * align as u64;
            match self.segments.read_copy(&files, self.copy, place, &mut unit) {
                Ok(()) => part.copy_from_slice(&unit[..part.len()]),
                Err(_) => part.fill(0),
            }
        }
    }

    /// Whether there is a whole head at a place, of this log, which says so.
    fn knows(&self, segment: u32, at: usize, epoch: u64) -> bool {
        let align = self.superblock.align;
        let memory = Memory::new(align.into());
        let mut first = memory.take_beyond(align as usize);
        self.read(segment, at, &mut first);
        let room = self.segments.bytes() as usize - at;
        let len = group::head_len(&first, align).filter(|len| *len <= room);
        let Some(len) = len else { return false };
        let mut bytes = memory.take_beyond(len);
        self.read(segment, at, &mut bytes);
        group::parse(&bytes, align).is_some_and(|(head, ..)| {
            head.pool == mark_of(self.superblock)
                && head.epoch >= epoch
                && head.number > self.place.number
                && head.durable >= self.place.number
        })
    }
}

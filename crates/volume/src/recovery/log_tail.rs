//! Tells the end of the log from damage in the middle of it. A group that was being written when
//! the power was cut looks like one that has rotted. A later group distinguishes them: its head
//! states up to which group the log was durable when that head was written.
//!
//! A later group that does not state it proves nothing: several groups are in flight at once, and
//! the disk may have written the later one alone.
//!
//! The last groups have no later one until the log is idle and records that they are durable, or
//! until the pool is opened again.

use std::collections::BTreeSet;

use blockyard_store::SegmentStore;
use blockyard_store::buffer::Memory;
use blockyard_volume_format::FormatError;
use blockyard_volume_format::group::{self, Head};
use blockyard_volume_format::superblock::{LogPlace, SEGMENT_NONE, Superblock};

use crate::checkpoint::mark_of;
use crate::error::VolumeError;
use crate::segments::Segments;

/// Length of one read, in bytes.
const CHUNK_BYTES: usize = super::AHEAD_BYTES;

/// The place where no group follows.
pub(super) struct LogTail<'a, D: SegmentStore> {
    pub(super) segments: &'a Segments<D>,
    pub(super) superblock: &'a Superblock,
    pub(super) place: LogPlace,
    /// The copy that is examined.
    pub(super) copy: usize,
}

impl<D: SegmentStore> LogTail<'_, D> {
    /// Returns an error if the group that is missing here was durable: groups up to `durable` were,
    /// or a later group of this epoch or a newer one says so. Otherwise returns how many later
    /// groups are intact.
    pub(super) fn check(&self, durable: u64, epoch: u64) -> Result<usize, VolumeError> {
        let LogPlace { segment, offset, next, number, .. } = self.place;
        if number > durable {
            let mut later = BTreeSet::new();
            if !self.is_stated(epoch, &mut later) {
                return Ok(later.len());
            }
        }
        // The likely place of the missing group: after the last group if there is space.
        let is_full = segment == SEGMENT_NONE || offset >= self.segments.bytes();
        let (segment, offset) =
            if is_full && next != SEGMENT_NONE { (next, 0) } else { (segment, offset) };
        Err(FormatError::Log { segment, offset, number }.into())
    }

    /// Whether a later group states that the missing one was durable. The search covers the rest of
    /// the segment, the segment in which the log continues, and those that later groups name. Each
    /// segment holds at least two groups, so one rotten group does not hide the next segment.
    ///
    /// Adds the numbers of the later groups to `later`.
    fn is_stated(&self, epoch: u64, later: &mut BTreeSet<u64>) -> bool {
        let LogPlace { segment, offset, next, .. } = self.place;
        let mut places = vec![(next, 0), (segment, offset)];
        let mut seen = BTreeSet::new();
        while let Some((segment, offset)) = places.pop() {
            let is_there = (segment as usize) < self.segments.files().len();
            if !is_there || !seen.insert(segment) {
                continue;
            }
            let mut named = BTreeSet::new();
            if self.look_through(segment, offset, epoch, &mut named, later) {
                return true;
            }
            places.extend(named.into_iter().map(|segment| (segment, 0)));
        }
        false
    }

    /// Whether a segment has, from `offset` on, a group that states that the missing one was
    /// durable. Adds the segments that later groups name to `named`, and their numbers to `later`.
    fn look_through(
        &self,
        segment: u32,
        offset: u32,
        epoch: u64,
        named: &mut BTreeSet<u32>,
        later: &mut BTreeSet<u64>,
    ) -> bool {
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
                    && let Some(head) = self.later(segment, at + place, epoch)
                {
                    if head.durable >= self.place.number {
                        return true;
                    }
                    later.insert(head.number);
                    named.extend(group::names_segment(head.next).then_some(head.next));
                }
            }
            at += len;
        }
        false
    }

    /// Reads a part of a segment; parts that cannot be read become zeros.
    fn read(&self, segment: u32, at: usize, into: &mut [u8]) {
        let files = self.segments.files();
        let address = self.segments.address(segment, at as u32);
        if self.segments.read_long(&files, self.copy, address, into).is_ok() {
            return;
        }
        let align = self.superblock.align as usize;
        // Direct I/O needs page-aligned memory.
        let mut unit = Memory::new(align as u64).take_beyond(align);
        for (index, part) in (0..).zip(into.chunks_mut(align)) {
            let place = address + index * align as u64;
            match self.segments.read_copy(&files, self.copy, place, &mut unit) {
                Ok(()) => part.copy_from_slice(&unit[..part.len()]),
                Err(_) => part.fill(0),
            }
        }
    }

    /// The head at a place, if it is valid and of a later group of this log than the missing one.
    fn later(&self, segment: u32, at: usize, epoch: u64) -> Option<Head> {
        let align = self.superblock.align;
        let memory = Memory::new(align.into());
        let mut first = memory.take_beyond(align as usize);
        self.read(segment, at, &mut first);
        let space = self.segments.bytes() as usize - at;
        let len = group::head_len(&first, align).filter(|len| *len <= space)?;
        let mut bytes = memory.take_beyond(len);
        self.read(segment, at, &mut bytes);
        let (head, ..) = group::parse(&bytes, align)?;
        let is_later = head.pool == mark_of(self.superblock)
            && head.epoch >= epoch
            && head.number > self.place.number;
        is_later.then_some(head)
    }
}

//! The groups of the log, one after the other, out of whichever copy has them.

use super::{AHEAD_BYTES, COPIES_MAX, Recovery};
use crate::buffer::Buffer;
use crate::bytes::crc;
use crate::checkpoint::mark_of;
use crate::error::VolumeError;
use crate::format::group::{self, Descriptor, Head};
use crate::format::superblock::{LogPlace, SEGMENT_NONE};
use crate::store::{Directory, StoreFile};

/// A group that was found.
pub(super) struct Group {
    pub(super) segment: u32,
    pub(super) offset: u32,
    pub(super) head: Head,
    pub(super) chain: u64,
    pub(super) descriptors: Vec<Descriptor>,
    /// All of it.
    pub(super) bytes: Buffer,
}

/// Whether one of two groups that both follow was written at an earlier opening.
fn is_older(group: &Group, other: &Group) -> bool {
    group.head.epoch < other.head.epoch
}

impl<D: Directory> Recovery<'_, D> {
    /// How many copies there are.
    pub(super) fn copies(&self) -> usize {
        let files = self.segments.files();
        files.first().map_or(1, |file| file.copies()).clamp(1, COPIES_MAX)
    }

    /// The group that follows, if there is one in any copy: the longest log is the one that counts.
    pub(super) fn next(&self) -> Result<Option<Group>, VolumeError> {
        let mut found: Option<Group> = None;
        let (mut failed, mut ends) = (None, false);
        for copy in 0..self.copies() {
            match self.next_in(copy) {
                Ok(Some(group)) if found.as_ref().is_none_or(|it| is_older(it, &group)) => {
                    if copy > 0 {
                        self.mend(&group)?;
                    }
                    found = Some(group);
                }
                Ok(_) => ends = true,
                Err(error) => failed = Some(error),
            }
            // Nothing is newer than what was written since the pool was opened last.
            if found.as_ref().is_some_and(|it| it.head.epoch >= self.superblock.epoch) {
                break;
            }
        }
        match (found, failed) {
            // What was durable is in each of them.
            (None, Some(error)) if !ends => Err(error),
            (found, _) => Ok(found),
        }
    }

    /// Writes a group again over the copies that do not have it.
    fn mend(&self, group: &Group) -> Result<(), VolumeError> {
        let Group { segment, offset, bytes, .. } = group;
        let files = self.segments.files();
        let Some(file) = files.get(*segment as usize) else { return Ok(()) };
        let doing = || VolumeError::io(format!("cannot mend segment {segment} offset {offset}"));
        file.mend(u64::from(*offset), bytes).map(drop).map_err(|error| doing()(error))
    }

    /// The same in one copy.
    fn next_in(&self, copy: usize) -> Result<Option<Group>, VolumeError> {
        let LogPlace { segment, offset, next, .. } = self.place;
        let mut found = match segment {
            SEGMENT_NONE => None,
            _ => self.group(copy, segment, offset)?,
        };
        let is_next = |number| number == self.place.number;
        if next != SEGMENT_NONE && self.first_number(copy, next).is_none_or(is_next) {
            // Of two the newer one: the other was torn when the pool was opened last.
            if let Some(group) = self.group(copy, next, 0)?
                && found.as_ref().is_none_or(|it| is_older(it, &group))
            {
                found = Some(group);
            }
        }
        Ok(found)
    }

    /// What the first group of a segment says that its number is, unless that cannot be read.
    fn first_number(&self, copy: usize, segment: u32) -> Option<u64> {
        if let Some((known, number)) = self.peeked[copy].get()
            && known == segment
        {
            return Some(number);
        }
        let align = self.superblock.align;
        let address = self.segments.address(segment, 0);
        let first = self.read(copy, address, align as usize, "the log").ok()?;
        let number = group::head_len(&first, align).map_or(0, |_| group::number(&first));
        self.peeked[copy].set(Some((segment, number)));
        Some(number)
    }

    /// The group at a place, if it is the one that follows.
    fn group(&self, copy: usize, segment: u32, offset: u32) -> Result<Option<Group>, VolumeError> {
        let align = self.superblock.align;
        let room = self.segments.bytes().saturating_sub(offset) as usize;
        if room < align as usize || segment as usize >= self.segments.files().len() {
            return Ok(None);
        }
        let address = self.segments.address(segment, offset);
        // What cannot be read is no end: it may be there the next time.
        let what = format!("the log, segment {segment} offset {offset},");
        let first = self.read_log(copy, address, align as usize, &what)?;
        let Some(len) = group::head_len(&first, align).filter(|len| *len <= room) else {
            return Ok(None);
        };
        let bytes = self.read_log(copy, address, len, &what)?;
        let Some((head, chain, descriptors)) = group::parse(&bytes, align) else { return Ok(None) };
        let follows = head.pool == mark_of(&self.superblock)
            && head.number == self.place.number
            && head.chain == self.place.chain
            && head.epoch >= self.epoch;
        let whole = len + head.payload_bytes as usize;
        if !follows || whole > room {
            return Ok(None);
        }
        let bytes = self.read_log(copy, address, whole, &what)?;
        let mut at = len;
        for descriptor in &descriptors {
            let len = descriptor.payload_bytes(align) as usize;
            if len > 0 && crc(&bytes[at..at + len]) != descriptor.crc {
                return Ok(None);
            }
            at += len;
        }
        Ok(Some(Group { segment, offset, head, chain, descriptors, bytes }))
    }

    /// Reads a part of the log, which is read in long pieces: groups may be short.
    fn read_log(
        &self,
        copy: usize,
        address: u64,
        len: usize,
        what: &str,
    ) -> Result<Buffer, VolumeError> {
        let mut ahead = self.ahead[copy].borrow_mut();
        let is_in = |(at, bytes): &(u64, Buffer)| {
            address >= *at && address + len as u64 <= at + bytes.len() as u64
        };
        if !ahead.as_ref().is_some_and(is_in) {
            let (_, offset) = self.segments.split(address);
            let left = u64::from(self.segments.bytes()) - offset;
            let long = left.min(AHEAD_BYTES as u64).max(len as u64) as usize;
            // Where the long piece cannot be read the short one may.
            let read = self.read(copy, address, long, what);
            let read = read.or_else(|_| self.read(copy, address, len, what));
            *ahead = Some((address, read?));
        }
        let (at, bytes) = ahead.as_ref().expect("it was read just now");
        let mut part = self.memory.take_beyond(len);
        part.copy_from_slice(&bytes[(address - at) as usize..][..len]);
        Ok(part)
    }
}

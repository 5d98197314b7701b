//! The groups of the log, one after the other, out of whichever copy has them.

use std::ops::Deref;
use std::sync::Arc;

use super::{AHEAD_BYTES, Recovery};
use crate::buffer::Buffer;
use crate::bytes::crc;
use crate::checkpoint::mark_of;
use crate::error::VolumeError;
use crate::format::group::{self, Descriptor, Head, Kind};
use crate::format::superblock::{LogPlace, SEGMENT_NONE, Superblock};
use crate::store::{Directory, GoodCopies, StoreFile};

/// A group that was found.
pub(super) struct Group {
    pub(super) segment: u32,
    pub(super) offset: u32,
    pub(super) head: Head,
    pub(super) chain: u64,
    pub(super) descriptors: Vec<Descriptor>,
    /// All of it, where that was looked at.
    pub(super) bytes: Option<Part>,
}

impl Group {
    /// Whether it is the one that follows at the end of the log, in this epoch or a later one.
    pub(super) fn follows(&self, superblock: &Superblock, end: &LogPlace, epoch: u64) -> bool {
        self.head.pool == mark_of(superblock)
            && self.head.number == end.number
            && self.head.chain == end.chain
            && self.head.epoch >= epoch
            && !self.is_late(superblock)
    }

    /// Whether it was written at an earlier opening than the one that has written the superblock,
    /// and was not there then: its write has landed since. Nobody was told of it, and the pool was
    /// used without it. What counts by that number is of that opening or a newer one.
    fn is_late(&self, superblock: &Superblock) -> bool {
        self.head.epoch < superblock.epoch && self.head.number > superblock.durable
    }

    /// The end of the log behind it.
    pub(super) fn end(&self) -> LogPlace {
        let Head { head_bytes, payload_bytes, next, number, .. } = self.head;
        LogPlace {
            segment: self.segment,
            offset: self.offset + head_bytes + payload_bytes,
            next,
            number: number.saturating_add(1),
            chain: self.chain,
        }
    }

    /// Whether what it says lies in it too, and has to be read.
    pub(super) fn changes_catalogue(&self) -> bool {
        self.descriptors.iter().any(|descriptor| descriptor.kind == Kind::Catalogue)
    }
}

/// Whether one of two groups that both follow was written at an earlier opening.
fn is_older(group: &Group, other: &Group) -> bool {
    group.head.epoch < other.head.epoch
}

impl<D: Directory> Recovery<'_, D> {
    /// The copies that hold all data now.
    pub(super) fn copies(&self) -> GoodCopies {
        self.segments.copies(&self.segments.files(), 0)
    }

    /// The group that follows, if there is one in any copy: the longest log is the one that counts.
    pub(super) fn next(&self) -> Result<Option<Group>, VolumeError> {
        let mut found: Option<Group> = None;
        let (mut failed, mut ends) = (None, false);
        let copies = self.copies();
        for copy in copies.numbers() {
            match self.next_in(copy) {
                Ok(Some(group)) if found.as_ref().is_none_or(|it| is_older(it, &group)) => {
                    if copy != copies.first() {
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
        let Some((file, bytes)) = files.get(*segment as usize).zip(bytes.as_ref()) else {
            return Ok(());
        };
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
        let mut group = Group { segment, offset, head, chain, descriptors, bytes: None };
        let whole = len + head.payload_bytes as usize;
        if !group.follows(&self.superblock, &self.place, self.epoch) || whole > room {
            return Ok(None);
        }
        let bytes = self.read_log(copy, address, whole, &what)?;
        let mut at = len;
        for descriptor in &group.descriptors {
            let len = descriptor.payload_bytes(align) as usize;
            if len > 0 && crc(&bytes[at..at + len]) != descriptor.crc {
                return Ok(None);
            }
            at += len;
        }
        group.bytes = Some(bytes);
        Ok(Some(group))
    }

    /// Reads a part of the log, which is read in long pieces: groups may be short, and a disk does
    /// several things at once.
    fn read_log(
        &self,
        copy: usize,
        address: u64,
        len: usize,
        what: &str,
    ) -> Result<Part, VolumeError> {
        let mut ahead = self.ahead[copy].borrow_mut();
        if let Some(part) = ahead.as_ref().and_then(|piece| piece.part(address, len)) {
            return Ok(part);
        }
        let (_, offset) = self.segments.split(address);
        let left = u64::from(self.segments.bytes()) - offset;
        let long = left.min(AHEAD_BYTES as u64).max(len as u64) as usize;
        // Where the long piece cannot be read the short one may.
        let read = self.read(copy, address, long, what);
        let bytes = read.or_else(|_| self.read(copy, address, len, what))?;
        let piece = ahead.insert(Piece { address, bytes: Arc::new(bytes) });
        Ok(piece.part(address, len).expect("so much was read just now"))
    }
}

/// A piece of the log that is in memory.
pub(super) struct Piece {
    address: u64,
    bytes: Arc<Buffer>,
}

impl Piece {
    fn part(&self, address: u64, len: usize) -> Option<Part> {
        let from = address.checked_sub(self.address)? as usize;
        let is_in = from + len <= self.bytes.len();
        is_in.then(|| Part { bytes: Arc::clone(&self.bytes), from, len })
    }
}

/// A part of one.
pub(super) struct Part {
    bytes: Arc<Buffer>,
    from: usize,
    len: usize,
}

impl Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.from..self.from + self.len]
    }
}

//! Reads the groups of the log in order, from any copy that has them.

use std::ops::Deref;
use std::sync::Arc;

use blockyard_store::buffer::Buffer;
use blockyard_store::{GoodCopies, SegmentStore, StoreFile};
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::group::{self, Descriptor, Head, Kind};
use blockyard_volume_format::superblock::{LogPlace, SEGMENT_NONE, Superblock};

use super::{AHEAD_BYTES, Recovery};
use crate::checkpoint::mark_of;
use crate::error::VolumeError;

/// A group that was found.
pub(super) struct Group {
    pub(super) segment: u32,
    pub(super) offset: u32,
    pub(super) head: Head,
    pub(super) chain: u64,
    pub(super) descriptors: Vec<Descriptor>,
    /// The bytes of the group, if it was read completely.
    pub(super) bytes: Option<Part>,
}

impl Group {
    /// Whether this group continues the log after `end`, in this epoch or a later one.
    pub(super) fn follows(&self, superblock: &Superblock, end: &LogPlace, epoch: u64) -> bool {
        self.head.pool == mark_of(superblock)
            && self.head.number == end.number
            && self.head.chain == end.chain
            && self.head.epoch >= epoch
            && !self.is_late(superblock)
    }

    /// Whether this group is of an earlier opening than the superblock, and was not there when that
    /// opening recovered the log: its write arrived afterwards. It was not acknowledged, and the
    /// pool was used without it. The valid group of this number is of that opening or a newer one.
    fn is_late(&self, superblock: &Superblock) -> bool {
        self.head.epoch < superblock.epoch && self.head.number > superblock.durable
    }

    /// The end of the log after this group.
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

    /// Whether the group contains changes of the catalogue, which must be read.
    pub(super) fn changes_catalogue(&self) -> bool {
        self.descriptors.iter().any(|descriptor| descriptor.kind == Kind::Catalogue)
    }
}

/// Whether `group` is of an earlier opening than `other`; both continue the log.
fn is_older(group: &Group, other: &Group) -> bool {
    group.head.epoch < other.head.epoch
}

impl<D: SegmentStore> Recovery<'_, D> {
    /// The copies that hold all data now.
    pub(super) fn copies(&self) -> GoodCopies {
        self.segments.copies(&self.segments.files(), 0)
    }

    /// The next group, if any copy has one: the copy with the longest log decides.
    pub(super) fn next(&self) -> Result<Option<Group>, VolumeError> {
        let mut found: Option<Group> = None;
        let (mut failed, mut ends) = (None, false);
        let copies = self.copies();
        for copy in copies.numbers() {
            match self.next_in(copy) {
                Ok(Some(group)) if found.as_ref().is_none_or(|it| is_older(it, &group)) => {
                    if copy != copies.first() {
                        self.repair(&group)?;
                    }
                    found = Some(group);
                }
                Ok(_) => ends = true,
                Err(error) => failed = Some(error),
            }
            // No group is newer than those written since the last opening.
            if found.as_ref().is_some_and(|it| it.head.epoch >= self.superblock.epoch) {
                break;
            }
        }
        match (found, failed) {
            // A durable group is in each copy, so a copy without it shows the end of the log.
            (None, Some(error)) if !ends => Err(error),
            (found, _) => Ok(found),
        }
    }

    /// Writes a group over the copies that do not have it.
    fn repair(&self, group: &Group) -> Result<(), VolumeError> {
        let Group { segment, offset, bytes, .. } = group;
        let files = self.segments.files();
        let Some((file, bytes)) = files.get(*segment as usize).zip(bytes.as_ref()) else {
            return Ok(());
        };
        let doing = || VolumeError::io(format!("cannot mend segment {segment} offset {offset}"));
        file.repair(u64::from(*offset), bytes).map(drop).map_err(|error| doing()(error))
    }

    /// The next group in one copy.
    fn next_in(&self, copy: usize) -> Result<Option<Group>, VolumeError> {
        let LogPlace { segment, offset, next, .. } = self.place;
        let mut found = match segment {
            SEGMENT_NONE => None,
            _ => self.group(copy, segment, offset)?,
        };
        let is_next = |number| number == self.place.number;
        if next != SEGMENT_NONE && self.first_number(copy, next).is_none_or(is_next) {
            // If two groups follow, the newer one is valid: the other was torn at the last opening.
            if let Some(group) = self.group(copy, next, 0)?
                && found.as_ref().is_none_or(|it| is_older(it, &group))
            {
                found = Some(group);
            }
        }
        Ok(found)
    }

    /// The number in the head of a segment's first group; none if it cannot be read.
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

    /// The group at a place, if it is the next one.
    fn group(&self, copy: usize, segment: u32, offset: u32) -> Result<Option<Group>, VolumeError> {
        let align = self.superblock.align;
        let space = self.segments.bytes().saturating_sub(offset) as usize;
        if space < align as usize || segment as usize >= self.segments.files().len() {
            return Ok(None);
        }
        let address = self.segments.address(segment, offset);
        // A read error does not prove the end of the log: the next read may succeed.
        let what = format!("the log, segment {segment} offset {offset},");
        let first = self.read_log(copy, address, align as usize, &what)?;
        let Some(len) = group::head_len(&first, align).filter(|len| *len <= space) else {
            return Ok(None);
        };
        let bytes = self.read_log(copy, address, len, &what)?;
        let Some((head, chain, descriptors)) = group::parse(&bytes, align) else { return Ok(None) };
        let mut group = Group { segment, offset, head, chain, descriptors, bytes: None };
        let whole = len + head.payload_bytes as usize;
        if !group.follows(&self.superblock, &self.place, self.epoch) || whole > space {
            return Ok(None);
        }
        let bytes = self.read_log(copy, address, whole, &what)?;
        let (payload, mut places) = (&bytes[len..], group::Places::default());
        for descriptor in &group.descriptors {
            let (at, len) = places.next(descriptor, align);
            if len > 0 && crc(&payload[at as usize..][..len as usize]) != descriptor.crc {
                return Ok(None);
            }
        }
        group.bytes = Some(bytes);
        Ok(Some(group))
    }

    /// Reads a part of the log, with read-ahead: groups may be short, and one long read is faster
    /// than many short ones.
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
        // The short read may succeed where the long one fails.
        let read = self.read(copy, address, long, what);
        let bytes = read.or_else(|_| self.read(copy, address, len, what))?;
        let piece = ahead.insert(Piece { address, bytes: Arc::new(bytes) });
        Ok(piece.part(address, len).expect("so much was read just now"))
    }
}

/// A part of the log in memory.
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

/// A range of a [`Piece`].
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

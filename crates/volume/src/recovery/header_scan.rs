//! Finds the heads of the log ahead of the replay.
//!
//! A head states up to which group all was durable when it was written, and has the checksum of the
//! head before it. So if a later head states that a group was durable, the head of that group is
//! enough: the group was written as its head says, and each block is compared with its checksum
//! when it is read. Only groups that may not have been durable are read completely; see
//! [`super::groups`].
//!
//! The place of a head follows from the head before it. But each segment is named before the log
//! continues there, so several segments are scanned at once.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};

use blockyard_store::SegmentStore;
use blockyard_store::buffer::{ALIGN, Buffer, Memory};
use blockyard_volume_format::group::{self, DESCRIPTORS_MAX};
use blockyard_volume_format::superblock::{LogPlace, SEGMENT_NONE, Superblock};

use super::groups::Group;
use super::workers::Workers;
use crate::checkpoint::mark_of;
use crate::segments::Segments;

/// Segments that are scanned at once.
const AHEAD: usize = 8;

/// Worker threads scan segments of at least this length.
const LONG_BYTES: u32 = 1 << 20;

/// After a group of at least this length only the next head is read: one more read costs as much as
/// reading this many bytes. After a shorter group, a whole window is read.
const FAR_BYTES: u32 = 32 << 10;

/// The scan of one segment.
struct Way {
    segment: u32,
    found: Receiver<Group>,
    /// The next group, if it was received already.
    next: Option<Group>,
}

impl Way {
    fn peek(&mut self) -> Option<&Group> {
        if self.next.is_none() {
            self.next = self.found.recv().ok();
        }
        self.next.as_ref()
    }
}

/// The heads of the log after a checkpoint, in order.
pub(super) struct HeaderScan<'scope, 'env: 'scope, 'workers, D: SegmentStore> {
    workers: &'workers Workers<'scope, 'env>,
    segments: &'scope Segments<D>,
    superblock: Superblock,
    /// The copy that is read; any good one if `None`.
    copy: Option<usize>,
    /// Scans in the order of the log.
    ways: VecDeque<Way>,
}

impl<'scope, 'env, 'workers, D: SegmentStore> HeaderScan<'scope, 'env, 'workers, D> {
    /// The heads of the log after the checkpoint of a superblock: those in one copy, or in any good
    /// one.
    pub(super) fn new(
        workers: &'workers Workers<'scope, 'env>,
        segments: &'scope Segments<D>,
        superblock: &Superblock,
        copy: Option<usize>,
    ) -> HeaderScan<'scope, 'env, 'workers, D> {
        HeaderScan { workers, segments, superblock: *superblock, copy, ways: VecDeque::new() }
    }

    /// The head of the next group after `end`, without its blocks; the newer one if two follow.
    /// `None` if none was found: a complete read ([`super::groups`]) may still find one.
    pub(super) fn next(&mut self, end: &LogPlace, epoch: u64) -> Option<Group> {
        let here = self.epoch_at(end.segment, end.offset, end, epoch);
        let there = self.epoch_at(end.next, 0, end, epoch);
        let segment = match (here, there) {
            (None, None) => return None,
            (Some(here), there) if there.is_none_or(|there| there <= here) => end.segment,
            _ => end.next,
        };
        self.ways.retain(|way| segment != end.next || way.segment != end.segment);
        let way = self.ways.iter_mut().find(|way| way.segment == segment)?;
        let found = way.next.take();
        self.look_ahead();
        found
    }

    /// The epoch of the group at a place, if it continues the log.
    fn epoch_at(&mut self, segment: u32, offset: u32, end: &LogPlace, epoch: u64) -> Option<u64> {
        let way = match self.ways.iter().position(|way| way.segment == segment) {
            Some(at) => at,
            None => self.begin(segment, offset)?,
        };
        let group = self.ways[way].peek()?;
        let follows = group.offset == offset && group.follows(&self.superblock, end, epoch);
        follows.then_some(group.head.epoch)
    }

    /// Starts scans of segments that are named already.
    fn look_ahead(&mut self) {
        while self.ways.len() < AHEAD {
            let last = self.ways.back_mut().and_then(Way::peek);
            let Some(next) = last.map(|group| group.head.next) else { return };
            if self.ways.iter().any(|way| way.segment == next) || self.begin(next, 0).is_none() {
                return;
            }
        }
    }

    /// Starts the scan of a segment, if the segment exists.
    fn begin(&mut self, segment: u32, offset: u32) -> Option<usize> {
        if segment == SEGMENT_NONE || segment as usize >= self.segments.files().len() {
            return None;
        }
        let (found, finds) = channel();
        let (segments, superblock, copy) = (self.segments, self.superblock, self.copy);
        let window = Window::new(segments, segment, superblock.align, copy);
        let walk = move || walk(window, &superblock, offset, &found);
        match self.segments.bytes() >= LONG_BYTES {
            true => self.workers.run(walk),
            false => walk(),
        }
        self.ways.push_back(Way { segment, found: finds, next: None });
        Some(self.ways.len() - 1)
    }
}

/// Scans a segment from head to head, as long as they form a chain and the receiver exists.
fn walk<D: SegmentStore>(
    mut window: Window<'_, D>,
    superblock: &Superblock,
    mut offset: u32,
    found: &Sender<Group>,
) {
    let (segments, segment, align) = (window.segments, window.segment, superblock.align);
    let mut last: Option<LogPlace> = None;
    // Length of a read after a short group, and at the beginning.
    let near = window.bytes.len();
    let mut wanted = FAR_BYTES as usize;
    loop {
        let space = segments.bytes().saturating_sub(offset) as usize;
        let Some(first) = window.read(offset, align as usize, wanted) else { return };
        let Some(len) = group::head_len(first, align).filter(|len| *len <= space) else { return };
        let Some(bytes) = window.read(offset, len, len) else { return };
        let Some((head, chain, descriptors)) = group::parse(bytes, align) else { return };
        let group = Group { segment, offset, head, chain, descriptors, bytes: None };
        // A head of an older use of the segment does not continue the chain.
        let follows = match &last {
            Some(end) => group.follows(superblock, end, 0),
            None => head.pool == mark_of(superblock) && head.number >= superblock.log.number,
        };
        let whole = u64::from(head.head_bytes) + u64::from(head.payload_bytes);
        if !follows || whole > space as u64 {
            return;
        }
        last = Some(group.end());
        wanted = if whole >= FAR_BYTES.into() { len } else { near };
        offset += whole as u32;
        if found.send(group).is_err() {
            return;
        }
    }
}

/// A part of a segment in memory.
struct Window<'a, D: SegmentStore> {
    segments: &'a Segments<D>,
    segment: u32,
    copy: Option<usize>,
    bytes: Buffer,
    /// Offset and length of the part.
    at: u32,
    len: usize,
}

impl<'a, D: SegmentStore> Window<'a, D> {
    fn new(
        segments: &'a Segments<D>,
        segment: u32,
        align: u32,
        copy: Option<usize>,
    ) -> Window<'a, D> {
        // Large enough for the longest head.
        let len = group::head_bytes(DESCRIPTORS_MAX, align).min(segments.bytes());
        let bytes = Memory::new(ALIGN as u64).take_beyond(len as usize);
        Window { segments, segment, copy, bytes, at: 0, len: 0 }
    }

    /// Returns `len` bytes of the segment. If they are not in memory, reads up to `wanted` bytes.
    /// `None` if the read fails.
    fn read(&mut self, offset: u32, len: usize, wanted: usize) -> Option<&[u8]> {
        let is_in = offset >= self.at && (offset - self.at) as usize + len <= self.len;
        if !is_in {
            let space = self.segments.bytes().saturating_sub(offset) as usize;
            let long = wanted.max(len).min(space).min(self.bytes.len());
            if long < len {
                return None;
            }
            (self.at, self.len) = (offset, 0);
            let address = self.segments.address(self.segment, offset);
            let (files, into) = (self.segments.files(), &mut self.bytes[..long]);
            let read = match self.copy {
                Some(copy) => self.segments.read_copy(&files, copy, address, into),
                None => self.segments.read(&files, address, into),
            };
            read.ok()?;
            self.len = long;
        }
        let from = (offset - self.at) as usize;
        Some(&self.bytes[from..from + len])
    }
}

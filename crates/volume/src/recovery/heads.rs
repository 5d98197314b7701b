//! The heads of the log, found before anybody asks for them.
//!
//! A head says up to which group all was durable when it was written, and has the checksum of the
//! head before it. So of a group that a later head says was durable the head is enough: it was
//! written as its head says, and a block is compared with its checksum when it is read. Only what
//! may not have been durable has to be looked at as a whole; see [`super::groups`].
//!
//! Where a head is is known from the one before it. But each segment is named before the log comes
//! there, so that the heads of several are found at once.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::crew::Crew;
use super::groups::Group;
use crate::buffer::{ALIGN, Buffer, Memory};
use crate::checkpoint::mark_of;
use crate::format::group::{self, DESCRIPTORS_MAX};
use crate::format::superblock::{LogPlace, SEGMENT_NONE, Superblock};
use crate::segments::Segments;
use crate::store::Directory;

/// Segments that are gone through at once.
const AHEAD: usize = 8;

/// In segments at least as long as this, by threads.
const LONG_BYTES: u32 = 1 << 20;

/// Behind a group at least as long as this only the next head is read: that takes as long as
/// reading so much. Behind a shorter one what comes is read as a whole.
const FAR_BYTES: u32 = 32 << 10;

/// The way through one segment.
struct Way {
    segment: u32,
    found: Receiver<Group>,
    /// The one that comes next, if somebody has looked.
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

/// The heads of one copy: see the module.
pub(super) struct Heads<'scope, 'env: 'scope, 'crew, D: Directory> {
    crew: &'crew Crew<'scope, 'env>,
    segments: &'scope Segments<D>,
    superblock: Superblock,
    /// In the order of the log.
    ways: VecDeque<Way>,
}

impl<'scope, 'env, 'crew, D: Directory> Heads<'scope, 'env, 'crew, D> {
    /// Those behind the checkpoint of a superblock.
    pub(super) fn new(
        crew: &'crew Crew<'scope, 'env>,
        segments: &'scope Segments<D>,
        superblock: &Superblock,
    ) -> Heads<'scope, 'env, 'crew, D> {
        Heads { crew, segments, superblock: *superblock, ways: VecDeque::new() }
    }

    /// The head of the group that follows at the end of the log, without what is behind it; of two
    /// the newer one. `None` if none is seen: one who looks closely may find it yet.
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

    /// The epoch of the group at a place, if it follows.
    fn epoch_at(&mut self, segment: u32, offset: u32, end: &LogPlace, epoch: u64) -> Option<u64> {
        let way = match self.ways.iter().position(|way| way.segment == segment) {
            Some(at) => at,
            None => self.begin(segment, offset)?,
        };
        let group = self.ways[way].peek()?;
        let follows = group.offset == offset && group.follows(&self.superblock, end, epoch);
        follows.then_some(group.head.epoch)
    }

    /// Goes on to segments that are named already.
    fn look_ahead(&mut self) {
        while self.ways.len() < AHEAD {
            let last = self.ways.back_mut().and_then(Way::peek);
            let Some(next) = last.map(|group| group.head.next) else { return };
            if self.ways.iter().any(|way| way.segment == next) || self.begin(next, 0).is_none() {
                return;
            }
        }
    }

    /// Begins with a segment, if there is such a one.
    fn begin(&mut self, segment: u32, offset: u32) -> Option<usize> {
        if segment == SEGMENT_NONE || segment as usize >= self.segments.files().len() {
            return None;
        }
        let (found, finds) = channel();
        let (segments, superblock) = (self.segments, self.superblock);
        let walk = move || walk(segments, &superblock, segment, offset, &found);
        match self.segments.bytes() >= LONG_BYTES {
            true => self.crew.ask(walk),
            false => walk(),
        }
        self.ways.push_back(Way { segment, found: finds, next: None });
        Some(self.ways.len() - 1)
    }
}

/// Goes from head to head through a segment, as long as one follows the other and somebody wants
/// to know.
fn walk<D: Directory>(
    segments: &Segments<D>,
    superblock: &Superblock,
    segment: u32,
    mut offset: u32,
    found: &Sender<Group>,
) {
    let align = superblock.align;
    let mut window = Window::new(segments, segment, align);
    let mut last: Option<LogPlace> = None;
    // What is read where nothing is known, and of groups that are short.
    let near = window.bytes.len();
    let mut wanted = FAR_BYTES as usize;
    loop {
        let room = segments.bytes().saturating_sub(offset) as usize;
        let Some(first) = window.read(offset, align as usize, wanted) else { return };
        let Some(len) = group::head_len(first, align).filter(|len| *len <= room) else { return };
        let Some(bytes) = window.read(offset, len, len) else { return };
        let Some((head, chain, descriptors)) = group::parse(bytes, align) else { return };
        let group = Group { segment, offset, head, chain, descriptors, bytes: None };
        // Of what is from another time nothing follows.
        let follows = match &last {
            Some(end) => group.follows(superblock, end, 0),
            None => head.pool == mark_of(superblock) && head.number >= superblock.log.number,
        };
        let whole = u64::from(head.head_bytes) + u64::from(head.payload_bytes);
        if !follows || whole > room as u64 {
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

/// A piece of a segment that is in memory.
struct Window<'a, D: Directory> {
    segments: &'a Segments<D>,
    segment: u32,
    bytes: Buffer,
    /// Where it begins, and how long it is.
    at: u32,
    len: usize,
}

impl<'a, D: Directory> Window<'a, D> {
    fn new(segments: &'a Segments<D>, segment: u32, align: u32) -> Window<'a, D> {
        // The longest head fits.
        let len = group::head_bytes(DESCRIPTORS_MAX, align).min(segments.bytes());
        let bytes = Memory::new(ALIGN as u64).take_beyond(len as usize);
        Window { segments, segment, bytes, at: 0, len: 0 }
    }

    /// So many bytes of the segment; where they are not in memory, up to `wanted` are read. `None`
    /// if they cannot be.
    fn read(&mut self, offset: u32, len: usize, wanted: usize) -> Option<&[u8]> {
        let is_in = offset >= self.at && (offset - self.at) as usize + len <= self.len;
        if !is_in {
            let room = self.segments.bytes().saturating_sub(offset) as usize;
            let long = wanted.max(len).min(room).min(self.bytes.len());
            if long < len {
                return None;
            }
            (self.at, self.len) = (offset, 0);
            let address = self.segments.address(self.segment, offset);
            let (files, into) = (self.segments.files(), &mut self.bytes[..long]);
            self.segments.read(&files, address, into).ok()?;
            self.len = long;
        }
        let from = (offset - self.at) as usize;
        Some(&self.bytes[from..from + len])
    }
}

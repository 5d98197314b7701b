//! The lane: the way of groups into files. One thread has it, the committer's.
//!
//! What is written is kept by the lane until it is written, so that the system may read it at any
//! time until then, and nobody has to wait for it meanwhile.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use blockyard_sync::bell::{Bell, Caller};

use super::StoreFile;
use crate::buffer::{Buffer, Memory};
use crate::record::Payload;

/// How much is to be durable when a parcel is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Nothing.
    Nothing,
    /// The parcel. Everything that was written to its file before is durable already.
    Itself,
    /// Everything that was written to its file before, and the parcel.
    File,
}

/// A part of a parcel.
#[derive(Debug)]
pub enum Part {
    /// Blocks that are written.
    Write(Arc<Payload>),
    /// Bytes of anything else.
    Bytes(Buffer),
}

impl Part {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Part::Write(payload) => payload.bytes(),
            Part::Bytes(bytes) => bytes,
        }
    }
}

/// A run of bytes in parts that nobody changes any more.
#[derive(Debug)]
pub struct Parcel {
    /// What comes first, of which so many bytes count.
    head: Buffer,
    head_bytes: usize,
    parts: Vec<Part>,
    range: Range<u64>,
}

impl Parcel {
    /// An empty one with room for a head.
    pub fn new(head: Buffer) -> Parcel {
        Parcel { head, head_bytes: 0, parts: Vec::new(), range: 0..0 }
    }

    /// Makes it empty.
    pub fn clear(&mut self) {
        self.head_bytes = 0;
        self.parts.clear();
        self.range = 0..0;
    }

    /// Which blocks it is about, if it is about one request; else none.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Says which blocks it is about.
    pub fn set_range(&mut self, range: Range<u64>) {
        self.range = range;
    }

    /// The room for the head, of which so many bytes will count.
    pub fn head(&mut self, bytes: usize) -> &mut [u8] {
        self.head_bytes = bytes;
        &mut self.head
    }

    /// The longest head.
    pub fn head_bytes_max(&self) -> usize {
        self.head.len()
    }

    /// Adds a part.
    pub fn push(&mut self, part: Part) {
        self.parts.push(part);
    }

    /// Its parts, none of them empty.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let head = &self.head[..self.head_bytes];
        let all = std::iter::once(head).chain(self.parts.iter().map(Part::bytes));
        all.filter(|part| !part.is_empty())
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.slices().map(<[u8]>::len).sum()
    }

    /// Puts the same bytes into another parcel: blocks by reference.
    pub(crate) fn copy_into(&self, twin: &mut Parcel, memory: &Arc<Memory>) {
        twin.clear();
        if twin.head.len() < self.head_bytes {
            twin.head = memory.take_beyond(self.head.len());
        }
        let head = twin.head(self.head_bytes);
        head[..self.head_bytes].copy_from_slice(&self.head[..self.head_bytes]);
        twin.range = self.range();
        twin.parts.extend(self.parts.iter().map(|part| match part {
            Part::Write(payload) => Part::Write(Arc::clone(payload)),
            Part::Bytes(bytes) => {
                let mut copy = memory.take_beyond(bytes.len());
                copy.copy_from_slice(bytes);
                Part::Bytes(copy)
            }
        }));
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A parcel that is not under way any more, and how it ended. It is not there where the system may
/// still be reading it.
pub type Ended = (Option<Parcel>, io::Result<()>);

/// See the module.
pub trait Lane<F>: fmt::Debug + Send + 'static {
    /// How many parcels may be under way at once.
    fn depth(&self) -> usize;

    /// Whether short parcels are to be under way together too.
    fn takes_short(&self) -> bool {
        false
    }

    /// Another lane has the same parcels: each is to be on its way when it has begun.
    fn run_beside(&mut self) {}

    /// Has the one who waits by this bell for parcels called also while [`Lane::wait`] sleeps.
    fn hear(&mut self, bell: &Bell) {
        if let Some(caller) = self.caller() {
            bell.call(caller);
        }
    }

    /// Who is to be called for that, where it sleeps by other means than the bell.
    fn caller(&self) -> Option<Caller> {
        None
    }

    /// Begins to write a parcel, inside the file's length.
    fn begin(&mut self, file: &Arc<F>, offset: u64, parcel: Parcel, durability: Durability);

    /// Sleeps until the oldest parcel has ended, or until something is there; says whether the
    /// oldest has ended. May return early.
    fn wait(&mut self, bell: &Bell, is_there: &dyn Fn() -> bool) -> bool {
        let _ = (bell, is_there);
        true
    }

    /// Waits until the oldest parcel has ended, which stays; says whether it has ended well.
    /// `false` where that is not known before [`Lane::end`].
    fn ripen(&mut self) -> bool {
        false
    }

    /// Waits until the oldest parcel has ended; `None` if nothing is under way. After an error
    /// nobody knows what of it is written.
    fn end(&mut self) -> Option<Ended>;
}

/// A lane that does everything at once.
#[derive(Debug, Default)]
pub struct Blocking(VecDeque<Ended>);

impl<F: StoreFile> Lane<F> for Blocking {
    fn depth(&self) -> usize {
        1
    }

    fn begin(&mut self, file: &Arc<F>, offset: u64, parcel: Parcel, durability: Durability) {
        let parts: Vec<&[u8]> = parcel.slices().collect();
        let mut result = file.write_at(offset, &parts);
        if result.is_ok() && durability != Durability::Nothing {
            result = file.sync();
        }
        self.0.push_back((Some(parcel), result));
    }

    fn end(&mut self) -> Option<Ended> {
        self.0.pop_front()
    }
}

//! The log writer (lane): writes log batches into files. One thread has it, the committer's.
//!
//! The lane owns the memory of a write until the write has ended. So the system may read the memory
//! at any time until then, and no thread has to wait meanwhile.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use blockyard_sync::bell::{Bell, Caller};

use super::StoreFile;
use crate::buffer::{Buffer, Memory};
use crate::record::Payload;

/// How much must be durable when a parcel is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Nothing.
    Nothing,
    /// The parcel. Everything that was written to its file before is durable already.
    Itself,
    /// The parcel, and everything that was written to its file before.
    File,
}

/// A part of a parcel.
#[derive(Debug)]
pub enum Part {
    /// The blocks of a write.
    Write(Arc<Payload>),
    /// Other bytes.
    Bytes(Buffer),
}

impl Part {
    /// The bytes of the part.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Part::Write(payload) => payload.bytes(),
            Part::Bytes(bytes) => bytes,
        }
    }
}

/// A write batch: immutable parts that are written contiguously.
#[derive(Debug)]
pub struct Parcel {
    /// The buffer of the head, of which the first `head_bytes` bytes are used.
    head: Buffer,
    head_bytes: usize,
    parts: Vec<Part>,
    range: Range<u64>,
}

impl Parcel {
    /// An empty parcel with this buffer for its head.
    pub fn new(head: Buffer) -> Parcel {
        Parcel { head, head_bytes: 0, parts: Vec::new(), range: 0..0 }
    }

    /// Makes the parcel empty.
    pub fn clear(&mut self) {
        self.head_bytes = 0;
        self.parts.clear();
        self.range = 0..0;
    }

    /// The blocks that the parcel changes, if it is of a single request; else empty.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Sets the blocks that the parcel changes.
    pub fn set_range(&mut self, range: Range<u64>) {
        self.range = range;
    }

    /// The buffer of the head, of which the first `bytes` bytes will be used.
    pub fn head(&mut self, bytes: usize) -> &mut [u8] {
        self.head_bytes = bytes;
        &mut self.head
    }

    /// Capacity of the head, in bytes.
    pub fn head_bytes_max(&self) -> usize {
        self.head.len()
    }

    /// Adds a part.
    pub fn push(&mut self, part: Part) {
        self.parts.push(part);
    }

    /// The parts of the parcel, without empty ones.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let head = &self.head[..self.head_bytes];
        let all = std::iter::once(head).chain(self.parts.iter().map(Part::bytes));
        all.filter(|part| !part.is_empty())
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.slices().map(<[u8]>::len).sum()
    }

    /// Copies the parcel into `twin`; blocks are copied by reference.
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

    /// Whether the parcel has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A parcel that is no longer in flight, and the result. The parcel is missing if the system may
/// still be reading it.
pub type Ended = (Option<Parcel>, io::Result<()>);

/// Writes parcels into files, in order.
pub trait Lane<F>: fmt::Debug + Send + 'static {
    /// How many parcels may be in flight at once.
    fn depth(&self) -> usize;

    /// Whether short parcels, too, should be in flight together.
    fn takes_short(&self) -> bool {
        false
    }

    /// Tells the lane that another one writes the same parcels: each parcel must be submitted
    /// immediately.
    fn run_beside(&mut self) {}

    /// Wakes the waiter of this bell also while it sleeps in [`Lane::wait`].
    fn hear(&mut self, bell: &Bell) {
        if let Some(caller) = self.caller() {
            bell.call(caller);
        }
    }

    /// The waker for that, if the lane sleeps by other means than the bell.
    fn caller(&self) -> Option<Caller> {
        None
    }

    /// Starts to write a parcel, within the file's length.
    fn begin(&mut self, file: &Arc<F>, offset: u64, parcel: Parcel, durability: Durability);

    /// Sleeps until the oldest parcel has ended, or `is_there` is true. Returns whether the oldest
    /// has ended. May return early.
    fn wait(&mut self, bell: &Bell, is_there: &dyn Fn() -> bool) -> bool {
        let _ = (bell, is_there);
        true
    }

    /// Waits until the oldest parcel has ended, without removing it. Returns whether it was
    /// successful; `false` if that is not known before [`Lane::end`].
    fn ripen(&mut self) -> bool {
        false
    }

    /// Waits until the oldest parcel has ended, and removes it; `None` if none is in flight. After
    /// an error it is unknown which parts of it were written.
    fn end(&mut self) -> Option<Ended>;
}

/// A lane that writes synchronously.
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

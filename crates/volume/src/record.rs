//! Records, which queues send to the committer, and their answers.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;

use blockyard_core::Status;
use blockyard_store::log_writer::Payload;
use blockyard_sync::completion_queue::CompletionQueue;
use blockyard_sync::counter::Counter;
use blockyard_volume_format::catalogue::{Change, VolumeMeta};
use blockyard_volume_format::entry::Entry;

use crate::map::{Coming, Map, What};

/// A volume or snapshot that is open in its pool.
#[derive(Debug)]
pub struct OpenVolume {
    /// Attributes of the volume when it was opened or renamed: name, size and so on. Use
    /// [`OpenVolume::listed`] for those that change.
    pub meta: VolumeMeta,
    /// The number of the volume from which it, and all that share blocks with it, descend.
    pub family: u32,
    /// The block map.
    pub map: Map,
    /// Lower bound of the blocks that only this volume refers to, as a signed number. The committer
    /// updates it.
    owned: Counter,
    /// The reservation in bytes. The committer changes it.
    reserved: Counter,
    /// The number of the volume or snapshot that it was copied from. The committer changes it.
    origin: Counter,
}

impl OpenVolume {
    /// A volume or snapshot that owns no block.
    pub(crate) fn new(meta: VolumeMeta, family: u32, map: Map) -> OpenVolume {
        let live = OpenVolume {
            meta,
            family,
            map,
            owned: Counter::default(),
            reserved: Counter::default(),
            origin: Counter::default(),
        };
        live.origin.add(live.meta.origin.into());
        live.reserved.add(live.meta.reserved_bytes);
        live
    }

    /// The current attributes.
    pub fn listed(&self) -> VolumeMeta {
        let (reserved_bytes, origin) = (self.reserved_bytes(), self.origin());
        VolumeMeta { reserved_bytes, origin, ..self.meta.clone() }
    }

    /// The number of the volume or snapshot that it was copied from; 0: none.
    pub fn origin(&self) -> u32 {
        self.origin.get() as u32
    }

    /// Sets the number of the volume or snapshot that it was copied from.
    pub(crate) fn set_origin(&self, id: u32) {
        self.origin.add(u64::from(id).wrapping_sub(self.origin.get()));
    }

    /// The reservation in bytes, before compression.
    pub fn reserved_bytes(&self) -> u64 {
        self.reserved.get()
    }

    /// Sets the reservation in bytes.
    pub(crate) fn reserve(&self, bytes: u64) {
        self.reserved.add(bytes.wrapping_sub(self.reserved.get()));
    }

    /// Lower bound of the blocks that only this volume refers to: those that were written since it
    /// was last copied.
    pub fn owned(&self) -> u64 {
        (self.owned.get() as i64).max(0) as u64
    }

    /// Sets the number of blocks that only this volume refers to.
    pub(crate) fn own(&self, blocks: u64) {
        self.owned.add(blocks.wrapping_sub(self.owned.get()));
    }

    /// Adds `blocks`, which may be negative, to the blocks that only this volume refers to.
    pub(crate) fn gain(&self, blocks: i64) {
        self.owned.add(blocks as u64);
    }

    /// Removes blocks of the write with this serial number from the pending writes.
    pub(crate) fn retire(&self, first: u64, blocks: u32, serial: u64) {
        let (number, from) = Map::place(first);
        self.map.with(number, |span| span.retire(from, from + blocks, serial));
    }
}

/// A block that cleaning has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The family of the volumes that may refer to the block.
    pub family: u32,
    /// The block number in these volumes.
    pub block: u64,
    /// The old place.
    pub from: Entry,
    /// The new place.
    pub to: Entry,
}

/// Blocks that cleaning has moved out of sparsely filled segments.
#[derive(Debug, Default)]
pub struct Relocation {
    /// The moved blocks.
    pub moves: Vec<Move>,
    /// Segments whose map pages are to be written again elsewhere.
    pub pages: Vec<u32>,
    /// Old places of map leaves that have rotted: the blocks that they named are lost.
    pub lost: HashSet<Entry>,
    /// The map spans that have pages in these segments: family and span number.
    pub spans: BTreeSet<(u32, usize)>,
    /// Most map pages that these moves modify.
    pub page_count: u64,
    /// How many checkpoints had begun when the blocks were written.
    pub round: u64,
}

/// The operation that a record requests from the committer.
#[derive(Debug)]
pub enum Body {
    /// Write blocks.
    Write(Arc<Payload>),
    /// Set this number of blocks to zero.
    Zero(u32),
    /// Update the maps for moved blocks.
    Move(Arc<Relocation>),
    /// Change the catalogue.
    Catalogue(Change),
    /// Make everything before it durable.
    Flush,
    /// Write a checkpoint.
    Checkpoint,
    /// Close the pool.
    Stop,
}

/// A record.
pub struct Record {
    /// What the committer is to do.
    pub body: Body,
    /// The volume, for records that change blocks.
    pub volume: Option<Arc<OpenVolume>>,
    /// The first block.
    pub first: u64,
    /// The serial number of this write in its span.
    pub serial: u64,
    /// For a write of partial blocks: serial numbers of the writes in its span from which it copied
    /// the rest of its first and last block, if these may still be refused. If one of them is
    /// refused, this write is refused too; otherwise bytes of a refused write would become durable.
    pub(crate) copied: [Option<u64>; 2],
    /// Whether the record must be durable when it is answered.
    pub durable: bool,
    /// A liveness scan was already made for this record.
    pub(crate) is_counted: bool,
    /// The completion queue that gets the answer.
    pub reply: Option<ReplyTo>,
}

impl Record {
    /// A record without blocks.
    pub fn of(body: Body, reply: Option<ReplyTo>) -> Record {
        let (volume, copied, is_counted) = (None, [None, None], false);
        Record { body, volume, first: 0, serial: 0, copied, durable: true, is_counted, reply }
    }

    /// How many blocks the record changes.
    pub(crate) fn blocks(&self) -> u32 {
        match &self.body {
            Body::Write(payload) => payload.blocks().len() as u32,
            Body::Zero(blocks) => *blocks,
            _ => 0,
        }
    }

    /// Whether both records change blocks of one span of one volume, where serial numbers define
    /// the order.
    fn is_in_same_span(&self, other: &Record) -> bool {
        let is_one_volume = match (&self.volume, &other.volume) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        let span = |record: &Record| Map::place(record.first).0;
        is_one_volume && self.blocks() > 0 && other.blocks() > 0 && span(self) == span(other)
    }

    /// Whether this record contains data that were copied from `other`, which may be refused.
    pub(crate) fn is_copy_of(&self, other: &Record) -> bool {
        self.is_in_same_span(other) && self.copied.contains(&Some(other.serial))
    }

    /// Removes the record's blocks from the pending writes, because there was no space for them. No
    /// later read or copy finds them. Where `waiting` has earlier records of these blocks, their
    /// data become visible again.
    pub(crate) fn withdraw<'a>(&self, waiting: impl Iterator<Item = &'a Record>) {
        let (Some(volume), blocks @ 1..) = (&self.volume, self.blocks()) else { return };
        let (number, from) = Map::place(self.first);
        let to = from + blocks;
        let earlier = waiting.filter(|it| it.is_in_same_span(self) && it.serial < self.serial);
        // Under one lock: a copy that began in between would take data from before both writes.
        volume.map.with(number, |span| {
            span.retire(from, to, self.serial);
            for record in earlier {
                let (_, first) = Map::place(record.first);
                let what = match &record.body {
                    Body::Write(payload) => What::Data { payload: Arc::clone(payload), index: 0 },
                    _ => What::Zero,
                };
                let (start, end) = (first.max(from), (first + record.blocks()).min(to));
                if start < end {
                    let (what, serial) = (what.from(start - first), record.serial);
                    let may_fail = record.reply.is_some();
                    span.restore(start, end, &Coming { serial, what, may_fail });
                }
            }
        });
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").field("body", &self.body).finish_non_exhaustive()
    }
}

/// The return path of one answer. An answer is always sent: dropping this without one answers with
/// an I/O error, because a client waits.
pub struct ReplyTo {
    to: Arc<CompletionQueue<Reply>>,
    token: u32,
    is_answered: bool,
}

impl ReplyTo {
    /// An answer to `to`, for the operation `token`.
    pub fn new(to: &Arc<CompletionQueue<Reply>>, token: u32) -> ReplyTo {
        ReplyTo { to: Arc::clone(to), token, is_answered: false }
    }

    /// Whether the answer goes into this completion queue.
    pub(crate) fn is_to(&self, completion_queue: &Arc<CompletionQueue<Reply>>) -> bool {
        Arc::ptr_eq(&self.to, completion_queue)
    }

    /// Puts the answer into the completion queue and returns the completion queue. The caller wakes
    /// the completion queue's owner.
    pub fn answer(&mut self, status: Status) -> &Arc<CompletionQueue<Reply>> {
        if !std::mem::replace(&mut self.is_answered, true) {
            self.to.post([Reply { token: self.token, status }].into_iter());
        }
        &self.to
    }
}

/// Answers with an error after a panic, or when the pool's thread is gone.
impl Drop for ReplyTo {
    fn drop(&mut self) {
        if !self.is_answered {
            self.answer(Status::IoErr).event_count().notify();
        }
    }
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Identifies the operation that is answered.
    pub token: u32,
    /// The result.
    pub status: Status,
}

//! A record: what a queue hands to the committer, and what comes back.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;

use blockyard_core::Status;
use blockyard_sync::counter::Counter;
use blockyard_sync::mailbox::Mailbox;

use crate::buffer::Buffer;
use crate::codec;
use crate::format::catalogue::{Change, Traits};
use crate::format::entry::{Codec, Entry};
use crate::map::{Coming, Map, What};

/// A volume or snapshot that is open in its pool.
#[derive(Debug)]
pub struct Live {
    /// What it is.
    pub traits: Traits,
    /// The number of the volume that it and all that share blocks with it come from.
    pub family: u32,
    /// Where its blocks are.
    pub map: Map,
    /// Blocks that are its alone, as a signed number: at least as many are. The committer counts.
    owned: Counter,
    /// Bytes that it is promised. The committer changes them.
    reserved: Counter,
}

impl Live {
    /// A volume or snapshot that owns no block.
    pub(crate) fn new(traits: Traits, family: u32, map: Map) -> Live {
        let live =
            Live { traits, family, map, owned: Counter::default(), reserved: Counter::default() };
        live.reserved.add(live.traits.reserved_bytes);
        live
    }

    /// What it is now.
    pub fn listed(&self) -> Traits {
        Traits { reserved_bytes: self.reserved_bytes(), ..self.traits.clone() }
    }

    /// Bytes that it is promised, before compression.
    pub fn reserved_bytes(&self) -> u64 {
        self.reserved.get()
    }

    /// Notes how many bytes it is promised.
    pub(crate) fn reserve(&self, bytes: u64) {
        self.reserved.add(bytes.wrapping_sub(self.reserved.get()));
    }

    /// Blocks that are its alone, at least: those that were written since it was copied last.
    pub fn owned(&self) -> u64 {
        (self.owned.get() as i64).max(0) as u64
    }

    /// Notes how many blocks are its alone.
    pub(crate) fn own(&self, blocks: u64) {
        self.owned.add(blocks.wrapping_sub(self.owned.get()));
    }

    /// So many more blocks, or fewer, are its alone.
    pub(crate) fn gain(&self, blocks: i64) {
        self.owned.add(blocks as u64);
    }

    /// Blocks of this number are not on their way any more.
    pub(crate) fn retire(&self, first: u64, blocks: u32, serial: u64) {
        let (number, from) = Map::place(first);
        self.map.with(number, |span| span.retire(from, from + blocks, serial));
    }
}

/// How a block is stored in a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Where it begins.
    pub offset: u32,
    /// How long it is, with its padding.
    pub len: u32,
    /// How it is compressed.
    pub codec: Codec,
    /// The checksum of what is stored.
    pub crc: u64,
}

/// The blocks of a write, as they go into the log.
#[derive(Debug)]
pub struct Payload {
    buffer: Buffer,
    blocks: Vec<Stored>,
}

impl Payload {
    /// Blocks that lie in a buffer one behind the other.
    pub fn new(buffer: Buffer, blocks: Vec<Stored>) -> Payload {
        Payload { buffer, blocks }
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer
    }

    /// How its blocks are stored.
    pub fn blocks(&self) -> &[Stored] {
        &self.blocks
    }

    /// What is stored of a block.
    pub fn stored(&self, index: u32) -> &[u8] {
        let Stored { offset, len, .. } = self.blocks[index as usize];
        &self.buffer[offset as usize..][..len as usize]
    }

    /// Reads a block.
    pub fn read(&self, index: u32, block: &mut [u8]) {
        let whole = codec::decode(self.blocks[index as usize].codec, self.stored(index), block);
        assert!(whole, "what was compressed here comes back");
    }
}

/// A block that lies elsewhere now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The family of the volumes that may have it.
    pub family: u32,
    /// Its number in them.
    pub block: u64,
    /// Where it was.
    pub from: Entry,
    /// Where it is.
    pub to: Entry,
}

/// Blocks that were moved out of segments with little in them.
#[derive(Debug, Default)]
pub struct Moved {
    /// The blocks.
    pub moves: Vec<Move>,
    /// Segments whose pages are to be written again, elsewhere.
    pub pages: Vec<u32>,
    /// Leaves of maps that have rotted, by where they are: what they named is given up.
    pub lost: HashSet<Entry>,
    /// The spans of maps that have some there: by family and number.
    pub spans: BTreeSet<(u32, usize)>,
    /// How many pages of maps that changes at most.
    pub page_count: u64,
    /// How many checkpoints had begun when they were written.
    pub round: u64,
}

/// What is to be done.
#[derive(Debug)]
pub enum Body {
    /// Blocks are written.
    Write(Arc<Payload>),
    /// Blocks become zeros: so many.
    Zero(u32),
    /// Blocks are moved.
    Move(Arc<Moved>),
    /// The catalogue changes.
    Catalogue(Change),
    /// Everything before is to be durable.
    Flush,
    /// A checkpoint is to be made.
    Checkpoint,
    /// The pool is closed.
    Stop,
}

/// A record.
pub struct Record {
    /// What is to be done.
    pub body: Body,
    /// To which volume, where blocks change.
    pub volume: Option<Arc<Live>>,
    /// The first block.
    pub first: u64,
    /// The number of this write in its span.
    pub serial: u64,
    /// The numbers of the writes in its span that a write of parts of blocks copied the rest of its
    /// first and last block from, where those may still be refused. If one of them is refused, so
    /// is this one: else bytes of a refused write would become durable.
    pub(crate) copied: [Option<u64>; 2],
    /// Whether it is to be durable when it is answered.
    pub durable: bool,
    /// Blocks were counted again for it.
    pub(crate) is_counted: bool,
    /// Where the answer goes.
    pub reply: Option<Return>,
}

impl Record {
    /// A record without blocks.
    pub fn of(body: Body, reply: Option<Return>) -> Record {
        let (volume, copied, is_counted) = (None, [None, None], false);
        Record { body, volume, first: 0, serial: 0, copied, durable: true, is_counted, reply }
    }

    /// How many blocks it changes.
    pub(crate) fn blocks(&self) -> u32 {
        match &self.body {
            Body::Write(payload) => payload.blocks().len() as u32,
            Body::Zero(blocks) => *blocks,
            _ => 0,
        }
    }

    /// Whether both change blocks of one span of one volume, in which their numbers are an order.
    fn is_beside(&self, other: &Record) -> bool {
        let is_one_volume = match (&self.volume, &other.volume) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        let span = |record: &Record| Map::place(record.first).0;
        is_one_volume && self.blocks() > 0 && other.blocks() > 0 && span(self) == span(other)
    }

    /// Whether it holds data copied out of another record, which may be refused.
    pub(crate) fn is_copy_of(&self, other: &Record) -> bool {
        self.is_beside(other) && self.copied.contains(&Some(other.serial))
    }

    /// Takes its blocks out of memory, because there was no space for them: no read and no copy
    /// finds them from now on. Where `waiting` has earlier records of the same blocks, these are
    /// found there again.
    pub(crate) fn take_back<'a>(&self, waiting: impl Iterator<Item = &'a Record>) {
        let (Some(volume), blocks @ 1..) = (&self.volume, self.blocks()) else { return };
        let (number, from) = Map::place(self.first);
        let to = from + blocks;
        let earlier = waiting.filter(|it| it.is_beside(self) && it.serial < self.serial);
        // One lock: a copy that begins in between would copy what was there before both.
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

/// Where an answer goes. One comes in any case: whoever drops this without one answers that it has
/// failed, because somebody waits.
pub struct Return {
    to: Arc<Mailbox<Reply>>,
    token: u32,
    is_answered: bool,
}

impl Return {
    /// Into a mailbox, about this.
    pub fn new(to: &Arc<Mailbox<Reply>>, token: u32) -> Return {
        Return { to: Arc::clone(to), token, is_answered: false }
    }

    /// Whether it goes into this mailbox.
    pub(crate) fn is_to(&self, mailbox: &Arc<Mailbox<Reply>>) -> bool {
        Arc::ptr_eq(&self.to, mailbox)
    }

    /// Puts the answer into its mailbox, whose owner is still to be woken.
    pub fn answer(&mut self, status: Status) -> &Arc<Mailbox<Reply>> {
        if !std::mem::replace(&mut self.is_answered, true) {
            self.to.post([Reply { token: self.token, status }].into_iter());
        }
        &self.to
    }
}

/// A panic on the way, or a pool whose thread is gone.
impl Drop for Return {
    fn drop(&mut self) {
        if !self.is_answered {
            self.answer(Status::IoErr).bell().ring();
        }
    }
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// What it was about.
    pub token: u32,
    /// How it ended.
    pub status: Status,
}

//! What the committer writes together.

use std::sync::Arc;

use blockyard_core::Status;

use crate::buffer::Buffer;
use crate::format::FAN;
use crate::format::catalogue::Change;
use crate::format::entry::Codec;
use crate::format::group::{Descriptor, Kind, head_bytes};
use crate::pool::{Pool, Volumes};
use crate::record::{Body, Moved, Record};
use crate::segments::Want;
use crate::store::Directory;

/// Records that are written together.
#[derive(Default)]
pub(super) struct Group {
    pub(super) records: Vec<Record>,
    pub(super) descriptors: Vec<Descriptor>,
    /// Bytes of changes of the catalogue, in the order of their descriptors.
    pub(super) changes: Vec<Buffer>,
    pub(super) payload_bytes: u32,
    /// Somebody waits for it to be durable.
    pub(super) durable: bool,
    /// Somebody wants a checkpoint.
    pub(super) checkpoint: bool,
    /// Something in it may make room.
    pub(super) frees: bool,
    /// What space is wanted for by that of its records which leaves most to others.
    pub(super) want: Option<Want>,
    /// Pages that it changes at most.
    pub(super) pages: u64,
    /// There was no space for it.
    pub(super) unchecked: bool,
    /// It has found room: what others take meanwhile is not its own.
    pub(super) admitted: bool,
    pub(super) stop: bool,
    /// A change of the catalogue is in it. Another one may not be: each is checked against what is
    /// there.
    pub(super) changes_catalogue: bool,
    /// Nothing more may come into it.
    pub(super) closed: bool,
}

/// Whether a record may be in a group that is on its way behind another one: what it does does not
/// depend on what that has done.
pub(super) fn may_follow(record: &Record) -> bool {
    matches!(record.body, Body::Write(_) | Body::Zero(_) | Body::Flush)
}

/// What a record wants space for, if it wants any.
pub(super) fn want<D: Directory>(record: &Record, pool: &Pool<D>) -> Option<Want> {
    match &record.body {
        Body::Write(_) if record.reply.is_some() => Some(Want::Write),
        Body::Write(_) | Body::Zero(_) => Some(Want::Free),
        Body::Move(_) => Some(Want::Move),
        Body::Catalogue(change) if frees(change, &pool.volumes()) => Some(Want::Free),
        Body::Catalogue(_) => Some(Want::Write),
        Body::Flush | Body::Checkpoint | Body::Stop => None,
    }
}

/// Whether a change of the catalogue may make room. What makes a volume longer does not, nor what
/// promises it more.
fn frees(change: &Change, volumes: &Volumes) -> bool {
    let live = |id: &u32| volumes.by_id.get(id);
    match change {
        Change::Create(_) | Change::Copy(_) => false,
        Change::Reserve { id, bytes } => live(id).is_some_and(|it| *bytes <= it.reserved_bytes()),
        Change::Resize { id, blocks } => live(id).is_some_and(|it| *blocks <= it.traits.blocks),
        Change::Destroy { .. } | Change::Rollback { .. } => true,
        Change::Several(changes) => changes.iter().all(|change| frees(change, volumes)),
    }
}

/// How many pages of maps and of the catalogue a record changes at most.
fn pages<D: Directory>(record: &Record, pool: &Pool<D>) -> u64 {
    match &record.body {
        // Leaves, their node, and a root.
        Body::Write(payload) => leaves(record.first, payload.blocks().len() as u64) + 2,
        // Those between the first and the last one go.
        Body::Zero(blocks) => leaves(record.first, u64::from(*blocks)).min(2) + 2,
        Body::Move(moved) => moved.page_count,
        Body::Catalogue(change) => pool.volumes().change_pages(change),
        Body::Flush | Body::Checkpoint | Body::Stop => 0,
    }
}

/// In how many leaves so many blocks are.
fn leaves(first: u64, blocks: u64) -> u64 {
    (first + blocks).div_ceil(FAN as u64) - first / FAN as u64
}

impl Group {
    /// How long it is in the log.
    pub(super) fn len(&self, align: u32) -> u32 {
        head_bytes(self.descriptors.len(), align) + self.payload_bytes
    }

    /// Makes it empty.
    pub(super) fn clear(&mut self) {
        self.records.clear();
        self.descriptors.clear();
        self.changes.clear();
        let Group { records, descriptors, changes, .. } = std::mem::take(self);
        *self = Group { records, descriptors, changes, ..Group::default() };
    }

    fn push(&mut self, descriptor: Descriptor) {
        self.descriptors.push(descriptor);
    }

    /// Counts what a record wants of the pool.
    fn count<D: Directory>(&mut self, record: &Record, pool: &Pool<D>) {
        self.want = self.want.max(want(record, pool));
        self.pages += pages(record, pool);
    }

    /// Takes a record in.
    pub(super) fn take<D: Directory>(&mut self, mut record: Record, pool: &Pool<D>, align: u32) {
        self.count(&record, pool);
        match &mut record.body {
            Body::Write(payload) => {
                let volume = record.volume.as_ref().map_or(0, |volume| volume.traits.id);
                let blocks = (record.first..).zip(payload.blocks());
                self.descriptors.extend(blocks.map(|(block, stored)| Descriptor {
                    kind: Kind::Data,
                    codec: stored.codec,
                    volume,
                    from: 0,
                    to: 0,
                    block,
                    len: stored.len,
                    crc: stored.crc,
                }));
                self.payload_bytes += payload.bytes().len() as u32;
            }
            Body::Zero(blocks) => {
                self.frees = true;
                let volume = record.volume.as_ref().map_or(0, |volume| volume.traits.id);
                let (kind, codec, block, len) = (Kind::Zero, Codec::Raw, record.first, *blocks);
                let (from, to, crc) = (0, 0, 0);
                self.push(Descriptor { kind, codec, volume, from, to, block, len, crc });
            }
            Body::Move(moved) => {
                self.closed = true;
                // After a checkpoint their place may be another's: they stay where they were.
                if pool.segments().round() > moved.round {
                    record.body = Body::Move(nothing_moved(moved));
                } else {
                    self.descriptors.extend(moved.moves.iter().map(|moved| Descriptor {
                        kind: Kind::Move,
                        codec: moved.to.codec(),
                        volume: moved.family,
                        from: moved.from.address(),
                        to: moved.to.address(),
                        block: moved.block,
                        len: moved.to.stored_bytes(),
                        crc: moved.to.crc(),
                    }));
                }
            }
            Body::Catalogue(change) => {
                self.frees = true;
                self.changes_catalogue = true;
                let checked = pool.volumes().check(change);
                match checked {
                    Ok(()) if !pool.affords(change) => {
                        record.durable = false;
                        record.serial = Status::NoSpc as u64;
                    }
                    Ok(()) => self.take_change(&change.print(), pool, align),
                    Err(status) => {
                        record.durable = false;
                        record.serial = status as u64;
                    }
                }
            }
            Body::Flush => {}
            Body::Checkpoint => self.checkpoint = true,
            Body::Stop => {
                self.stop = true;
                self.closed = true;
            }
        }
        self.durable |= record.durable;
        self.records.push(record);
    }

    fn take_change<D: Directory>(&mut self, change: &[u8], pool: &Pool<D>, align: u32) {
        let len = change.len() as u32;
        let mut bytes = pool.memory().take_beyond(len.next_multiple_of(align) as usize);
        bytes.fill(0);
        bytes[..change.len()].copy_from_slice(change);
        self.payload_bytes += bytes.len() as u32;
        let (kind, crc) = (Kind::Catalogue, crate::bytes::crc(&bytes));
        let (codec, volume, from, to, block) = (Codec::Raw, 0, 0, 0, 0);
        let descriptor = Descriptor { kind, codec, volume, from, to, block, len, crc };
        self.descriptors.push(descriptor);
        self.changes.push(bytes);
    }
}

/// The answer to a move that is not made.
fn nothing_moved(moved: &Moved) -> Arc<Moved> {
    Arc::new(Moved { round: moved.round, ..Moved::default() })
}

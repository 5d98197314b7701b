//! What the committer writes together.

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::format::entry::Codec;
use crate::format::group::{Descriptor, Kind};
use crate::pool::Pool;
use crate::record::{Body, Moved, Record};
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

impl Group {
    /// Makes it empty.
    pub(super) fn clear(&mut self) {
        self.records.clear();
        self.descriptors.clear();
        self.changes.clear();
        let Group { records, descriptors, changes, .. } = std::mem::take(self);
        *self = Group { records, descriptors, changes, ..Group::default() };
    }

    /// Takes a record in.
    pub(super) fn take<D: Directory>(&mut self, mut record: Record, pool: &Pool<D>, align: u32) {
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
                let (kind, codec, block) = (Kind::Zero, Codec::Raw, record.first);
                let (from, to, len, crc) = (0, 0, *blocks, 0);
                let descriptor = Descriptor { kind, codec, volume, from, to, block, len, crc };
                self.descriptors.push(descriptor);
            }
            Body::Move(moved) => {
                // After two checkpoints their place may be another's: they stay where they were.
                if pool.segments().round() >= moved.round + 2 {
                    record.body = Body::Move(nothing_moved(moved));
                    self.records.push(record);
                    return;
                }
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
            Body::Catalogue(change) => {
                self.frees = true;
                self.changes_catalogue = true;
                match pool.volumes().check(change) {
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

    /// Lets blocks that were to move stay where they are: checkpoints were made since the group was
    /// gathered, so their new places may be others' by now.
    pub(super) fn stay(&mut self) {
        self.descriptors.retain(|descriptor| descriptor.kind != Kind::Move);
        for record in &mut self.records {
            if let Body::Move(moved) = &mut record.body {
                *moved = nothing_moved(moved);
            }
        }
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
    Arc::new(Moved { moves: Vec::new(), pages: Vec::new(), round: moved.round })
}

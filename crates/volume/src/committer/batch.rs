//! A group: the records that the committer writes together.

use std::sync::Arc;

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_store::buffer::Buffer;
use blockyard_volume_format::FAN;
use blockyard_volume_format::catalogue::Change;
use blockyard_volume_format::entry::Codec;
use blockyard_volume_format::group::{Descriptor, Kind, head_bytes};

use crate::pool::{Pool, Volumes};
use crate::record::{Body, Record, Relocation};
use crate::segments::AllocationClass;

/// Records that are written together.
#[derive(Default)]
pub(super) struct LogBatch {
    pub(super) records: Vec<Record>,
    pub(super) descriptors: Vec<Descriptor>,
    /// Bytes of catalogue changes, in the order of their descriptors.
    pub(super) changes: Vec<Buffer>,
    pub(super) payload_bytes: u32,
    /// A record requests that the group is durable.
    pub(super) durable: bool,
    /// A record requests a checkpoint.
    pub(super) checkpoint: bool,
    /// A record may free space.
    pub(super) frees: bool,
    /// The allocation class of the record that leaves the most space to others.
    pub(super) want: Option<AllocationClass>,
    /// The most pages that the group changes.
    pub(super) pages: u64,
    /// A requested checkpoint found no space.
    pub(super) unchecked: bool,
    /// The group was admitted: space that others take meanwhile is not the group's.
    pub(super) admitted: bool,
    pub(super) stop: bool,
    /// The group contains a catalogue change, and may not contain another: each is checked against
    /// the current catalogue.
    pub(super) changes_catalogue: bool,
    /// No further record may be added.
    pub(super) closed: bool,
}

/// Whether a record may be in a group that starts while another is in flight: its effect must not
/// depend on that group.
pub(super) fn may_follow(record: &Record) -> bool {
    matches!(record.body, Body::Write(_) | Body::Zero(_) | Body::Flush)
}

/// The allocation class of a record, if it needs space.
pub(super) fn want<D: SegmentStore>(record: &Record, pool: &Pool<D>) -> Option<AllocationClass> {
    match &record.body {
        Body::Write(_) if record.reply.is_some() => Some(AllocationClass::Write),
        Body::Write(_) | Body::Zero(_) => Some(AllocationClass::Free),
        Body::Move(_) => Some(AllocationClass::Move),
        Body::Catalogue(change) if frees(change, &pool.volumes()) => Some(AllocationClass::Free),
        Body::Catalogue(_) => Some(AllocationClass::Write),
        Body::Flush | Body::Checkpoint | Body::Stop => None,
    }
}

/// Whether a catalogue change may free space. Growing a volume or its reservation does not.
fn frees(change: &Change, volumes: &Volumes) -> bool {
    let live = |id: &u32| volumes.by_id.get(id);
    match change {
        Change::Create(_) | Change::Copy(_) => false,
        Change::Reserve { id, bytes } => live(id).is_some_and(|it| *bytes <= it.reserved_bytes()),
        Change::Resize { id, blocks } => live(id).is_some_and(|it| *blocks <= it.meta.blocks),
        Change::Destroy { .. } | Change::Rollback { .. } => true,
        Change::Several(changes) => changes.iter().all(|change| frees(change, volumes)),
    }
}

/// The most pages of maps and of the catalogue that a record changes.
fn pages<D: SegmentStore>(record: &Record, pool: &Pool<D>) -> u64 {
    match &record.body {
        // The leaves, their node, and a root.
        Body::Write(payload) => leaves(record.first, payload.blocks().len() as u64) + 2,
        // The leaves between the first and the last are dropped as a whole.
        Body::Zero(blocks) => leaves(record.first, u64::from(*blocks)).min(2) + 2,
        Body::Move(moved) => moved.page_count,
        Body::Catalogue(change) => pool.volumes().change_pages(change),
        Body::Flush | Body::Checkpoint | Body::Stop => 0,
    }
}

/// The number of leaves that contain a range of blocks.
fn leaves(first: u64, blocks: u64) -> u64 {
    (first + blocks).div_ceil(FAN as u64) - first / FAN as u64
}

impl LogBatch {
    /// The length of the group in the log, in bytes.
    pub(super) fn len(&self, align: u32) -> u32 {
        head_bytes(self.descriptors.len(), align) + self.payload_bytes
    }

    /// Empties the group, but keeps its memory.
    pub(super) fn clear(&mut self) {
        self.records.clear();
        self.descriptors.clear();
        self.changes.clear();
        let LogBatch { records, descriptors, changes, .. } = std::mem::take(self);
        *self = LogBatch { records, descriptors, changes, ..LogBatch::default() };
    }

    fn push(&mut self, descriptor: Descriptor) {
        self.descriptors.push(descriptor);
    }

    /// Adds the space and pages that a record needs.
    fn count<D: SegmentStore>(&mut self, record: &Record, pool: &Pool<D>) {
        self.want = self.want.max(want(record, pool));
        self.pages += pages(record, pool);
    }

    /// Adds a record.
    pub(super) fn take<D: SegmentStore>(&mut self, mut record: Record, pool: &Pool<D>, align: u32) {
        self.count(&record, pool);
        match &mut record.body {
            Body::Write(payload) => {
                let volume = record.volume.as_ref().map_or(0, |volume| volume.meta.id);
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
                let volume = record.volume.as_ref().map_or(0, |volume| volume.meta.id);
                let (kind, codec, block, len) = (Kind::Zero, Codec::Raw, record.first, *blocks);
                let (from, to, crc) = (0, 0, 0);
                self.push(Descriptor { kind, codec, volume, from, to, block, len, crc });
            }
            Body::Move(moved) => {
                self.closed = true;
                // A checkpoint began since: other data may be at the new places, so the blocks stay
                // where they were.
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

    fn take_change<D: SegmentStore>(&mut self, change: &[u8], pool: &Pool<D>, align: u32) {
        let len = change.len() as u32;
        let mut bytes = pool.memory().take_beyond(len.next_multiple_of(align) as usize);
        bytes.fill(0);
        bytes[..change.len()].copy_from_slice(change);
        self.payload_bytes += bytes.len() as u32;
        let (kind, crc) = (Kind::Catalogue, blockyard_volume_format::bytes::crc(&bytes));
        let (codec, volume, from, to, block) = (Codec::Raw, 0, 0, 0, 0);
        let descriptor = Descriptor { kind, codec, volume, from, to, block, len, crc };
        self.descriptors.push(descriptor);
        self.changes.push(bytes);
    }
}

/// A move of nothing, in place of one that is not made.
fn nothing_moved(moved: &Relocation) -> Arc<Relocation> {
    Arc::new(Relocation { round: moved.round, ..Relocation::default() })
}

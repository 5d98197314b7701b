//! What a queue needs to read many blocks at once: where blocks are, and how to decode them.

use std::sync::Arc;

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_store::log_writer::Payload;
use blockyard_volume_format::NODE_BLOCKS;
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::entry::{Codec, Entry};

use super::{LOOKUP_MAX, SCRATCH_BYTES, VolumeHandle};
use crate::codec;
use crate::map::{Lookup, Map};
use crate::pool::Pool;

impl<D: SegmentStore> VolumeHandle<D> {
    /// Looks up the block `first` and those after it in its span, `count` at most.
    pub(crate) fn check_at(&self, first: u64, count: u64, found: &mut Vec<Lookup>) {
        let (span, from) = Map::place(first);
        let count = count.min(LOOKUP_MAX).min(NODE_BLOCKS - u64::from(from));
        found.clear();
        self.volume.map.with(span, |span| {
            found.extend((from..from + count as u32).map(|block| span.find(block)));
        });
    }

    /// Reads the leaf of the map that says where a block is.
    pub(crate) fn fetch_for(&mut self, block: u64) -> Result<(), Status> {
        match self.lookup(block) {
            Lookup::NotResident(leaf) => self.fetch(&leaf),
            _ => Ok(()),
        }
    }

    /// The file that contains an entry's bytes, and their offset in it.
    pub(crate) fn place(&mut self, entry: &Entry) -> Option<(Arc<D::File>, u64)> {
        let (segment, offset) = self.pool.segments().split(entry.address());
        let file = self.files.get().get(segment as usize)?;
        Some((Arc::clone(file), offset))
    }

    /// The number of found blocks, from the first on, that are consecutive in one segment, and
    /// their length in bytes.
    pub(crate) fn row(&self, found: &[Lookup]) -> (usize, usize) {
        let (mut count, mut bytes) = (0, 0);
        let mut next = None;
        for found in found {
            let Lookup::Disk(entry) = found else { break };
            let len = entry.stored_bytes() as usize;
            let (segment, _) = self.pool.segments().split(entry.address());
            let follows = next.is_none_or(|next| next == (segment, entry.address()));
            if !follows || (count > 0 && bytes + len > SCRATCH_BYTES) {
                break;
            }
            (count, bytes) = (count + 1, bytes + len);
            next = Some((segment, entry.address() + len as u64));
        }
        (count, bytes)
    }

    /// Decodes a block from its stored bytes, if their checksum is right.
    pub(crate) fn unpack<'a>(&'a mut self, entry: &Entry, stored: &'a [u8]) -> Option<&'a [u8]> {
        if crc(stored) != entry.crc() {
            return None;
        }
        let size = self.block_bytes();
        if entry.codec() == Codec::Raw {
            return (stored.len() == size).then_some(stored);
        }
        let plain = &mut self.plain[..size];
        codec::decode(entry.codec(), stored, plain).then_some(&*plain)
    }

    /// Reads a pending block from memory.
    pub(crate) fn remember(&mut self, payload: &Payload, index: u32) -> &[u8] {
        let size = self.block_bytes();
        codec::unpack(payload, index, &mut self.plain[..size]);
        &self.plain[..size]
    }

    /// The pool.
    pub(crate) fn pool(&self) -> &Arc<Pool<D>> {
        &self.pool
    }
}

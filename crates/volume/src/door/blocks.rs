//! What a queue needs of blocks to read many at once: where they are, and what is stored of them.

use std::sync::Arc;

use blockyard_core::Status;

use super::{Door, LOOK_MAX, SCRATCH_BYTES};
use crate::bytes::crc;
use crate::codec;
use crate::format::NODE_BLOCKS;
use crate::format::entry::{Codec, Entry};
use crate::map::{Found, Map};
use crate::pool::Pool;
use crate::record::Payload;
use crate::store::Directory;

impl<D: Directory> Door<D> {
    /// What is known of the first of some blocks, and of those behind them in its span: of so many
    /// at most.
    pub(crate) fn look_at(&self, first: u64, count: u64, found: &mut Vec<Found>) {
        let (span, from) = Map::place(first);
        let count = count.min(LOOK_MAX).min(NODE_BLOCKS - u64::from(from));
        found.clear();
        self.volume.map.with(span, |span| {
            found.extend((from..from + count as u32).map(|block| span.find(block)));
        });
    }

    /// Reads the page of the map that says where a block is.
    pub(crate) fn fetch_for(&mut self, block: u64) -> Result<(), Status> {
        match self.look(block) {
            Found::Away(leaf) => self.fetch(&leaf),
            _ => Ok(()),
        }
    }

    /// Where an entry's bytes are: the file and the place in it.
    pub(crate) fn place(&mut self, entry: &Entry) -> Option<(Arc<D::File>, u64)> {
        let (segment, offset) = self.pool.segments().split(entry.address());
        let file = self.files.get().get(segment as usize)?;
        Some((Arc::clone(file), offset))
    }

    /// How many of the blocks that were found, from the first on, lie one behind the other in one
    /// segment, and how many bytes these are.
    pub(crate) fn row(&self, found: &[Found]) -> (usize, usize) {
        let (mut count, mut bytes) = (0, 0);
        let mut next = None;
        for found in found {
            let Found::Disk(entry) = found else { break };
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

    /// A block as it is, out of what is stored of it, if that is what it should be.
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

    /// A block that is on its way into the log.
    pub(crate) fn remember(&mut self, payload: &Payload, index: u32) -> &[u8] {
        let size = self.block_bytes();
        payload.read(index, &mut self.plain[..size]);
        &self.plain[..size]
    }

    /// The pool.
    pub(crate) fn pool(&self) -> &Arc<Pool<D>> {
        &self.pool
    }
}

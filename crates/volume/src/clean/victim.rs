//! A segment that is being emptied: read as a whole, as most of it counts where it matters, and cut
//! into pieces that are written elsewhere.

use std::collections::HashSet;

use super::summary::Block;
use super::{MOVES_MAX, policy};
use crate::buffer::Buffer;
use crate::bytes::crc;
use crate::format::entry::STORED_MAX;
use crate::format::group::head_bytes;
use crate::format::{FAN, NODE_BLOCKS};
use crate::pool::Pool;
use crate::store::Directory;
use crate::thread::give_way;

/// What is read or written at once, in bytes.
const PIECE_BYTES: usize = 1 << 20;

/// See the module.
#[derive(Default)]
pub(super) struct Victim {
    image: Option<Buffer>,
}

/// Blocks that are moved at once.
pub(super) struct Piece<'a> {
    pub(super) blocks: Vec<Block>,
    /// Their bytes.
    pub(super) bytes: Buffer,
    /// How many pages of maps that changes at most.
    pub(super) pages: u64,
    /// The blocks behind them.
    pub(super) rest: &'a [Block],
}

/// Most bytes of a piece: a block at least, and a segment has room for two.
fn piece_bytes<D: Directory>(pool: &Pool<D>) -> usize {
    let segment = pool.segments().bytes() as usize;
    PIECE_BYTES.min(segment / 4).max(STORED_MAX as usize).min(segment / 2)
}

/// Most bytes of a piece that goes behind the last one: the end of a segment is filled, as these
/// are not cleaned before there is garbage in them. `None` if there is next to no room.
pub(super) fn open_room<D: Directory>(pool: &Pool<D>) -> Option<usize> {
    let most = piece_bytes(pool);
    let room = pool.cold()?.room(pool.segments().bytes()) as usize;
    let count = room / pool.align() as usize;
    let head = head_bytes(count.min(MOVES_MAX), pool.align()) as usize;
    let bound = if policy::is_close(pool) { most } else { PIECE_BYTES };
    let room = room.checked_sub(head)?.min(bound);
    (room >= most / 8).then_some(room)
}

impl Victim {
    /// Reads a segment. What cannot be read is zeros here, and read once more by whoever wants it.
    pub(super) fn read<D: Directory>(&mut self, pool: &Pool<D>, number: u32) {
        let (segments, files) = (pool.segments(), pool.segments().files());
        let bytes = segments.bytes() as usize;
        let image = self.image.get_or_insert_with(|| pool.memory().take_beyond(bytes));
        for (at, part) in (0..).step_by(PIECE_BYTES).zip(image.chunks_mut(PIECE_BYTES)) {
            if segments.read(&files, segments.address(number, at), part).is_err() {
                part.fill(0);
            }
        }
    }

    /// All of it.
    pub(super) fn bytes(&self) -> &[u8] {
        self.image.as_deref().unwrap_or_default()
    }

    /// The first of some blocks of this segment, which change no more than so many pages. A damaged
    /// block stays where it is, and its segment is left alone from then on: it would be the
    /// emptiest one for ever.
    pub(super) fn piece<'a, D: Directory>(
        &self,
        pool: &Pool<D>,
        blocks: &'a [Block],
        most: u64,
    ) -> Piece<'a> {
        let first = blocks.first().map_or(0, |block| block.entry.stored_bytes() as usize);
        let size = open_room(pool).filter(|size| *size >= first);
        let size = size.unwrap_or_else(|| piece_bytes(pool));
        let mut buffer = pool.memory().take_beyond(size);
        let (mut filled, mut done, mut pages) = (0, 0, 0);
        let (mut leaves, mut nodes) = (HashSet::new(), HashSet::new());
        let mut whole = Vec::new();
        for block in blocks {
            give_way();
            let len = block.entry.stored_bytes() as usize;
            if (filled + len > size && done > 0) || whole.len() >= MOVES_MAX {
                break;
            }
            let leaf = (block.family, block.number / FAN as u64);
            let node = (block.family, block.number / NODE_BLOCKS);
            let more = if leaves.contains(&leaf) { 0 } else { block.leaves };
            let more = more + if nodes.contains(&node) { 0 } else { block.nodes };
            if pages + more > most {
                break;
            }
            done += 1;
            if filled + len > size || !self.copy(pool, block, &mut buffer[filled..filled + len]) {
                continue;
            }
            filled += len;
            pages += more;
            leaves.insert(leaf);
            nodes.insert(node);
            whole.push(*block);
        }
        buffer.truncate(filled);
        Piece { blocks: whole, bytes: buffer, pages, rest: &blocks[done..] }
    }

    /// Copies a block; says whether it is whole. One that is not here is read from wherever it is.
    fn copy<D: Directory>(&self, pool: &Pool<D>, block: &Block, into: &mut [u8]) -> bool {
        let (number, address) = (block.number, block.entry.address());
        let (segment, offset) = pool.segments().split(address);
        let is_whole = |bytes: &[u8]| crc(bytes) == block.entry.crc();
        let here = self.bytes().get(offset as usize..offset as usize + into.len());
        if let Some(here) = here.filter(|here| is_whole(here)) {
            into.copy_from_slice(here);
            return true;
        }
        // Direct I/O wants memory that begins at a page.
        let mut stored = pool.memory().take_beyond(into.len());
        let files = pool.segments().files();
        let read = pool.segments().read_whole(&files, address, &mut stored, &is_whole);
        if read.is_ok() && is_whole(&stored) {
            into.copy_from_slice(&stored);
            return true;
        }
        tracing::error!("block {number}, at {address} of the pool, is damaged: not moved");
        if pool.segments().spoil(segment) {
            tracing::warn!("segment {segment} keeps its damage, and is not cleaned any more");
        }
        false
    }
}

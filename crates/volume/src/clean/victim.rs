//! A segment that is being emptied. It is read as a whole, because when cleaning is expensive most
//! of it is live, and divided into pieces that are written elsewhere.

use std::collections::HashSet;

use blockyard_store::SegmentStore;
use blockyard_store::buffer::Buffer;
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::entry::STORED_MAX;
use blockyard_volume_format::group::{Places, head_bytes};
use blockyard_volume_format::{FAN, NODE_BLOCKS};

use super::summary::Block;
use super::{MOVES_MAX, policy};
use crate::pool::Pool;
use crate::thread::yield_if_due;

/// Length of a read or write, in bytes.
const PIECE_BYTES: usize = 1 << 20;

/// The victim's contents; the buffer is reused for the next one.
#[derive(Default)]
pub(super) struct Victim {
    image: Option<Buffer>,
}

/// Blocks that are moved together.
pub(super) struct Piece<'a> {
    pub(super) blocks: Vec<Block>,
    /// The bytes of the blocks, as the payload of a group.
    pub(super) bytes: Buffer,
    /// The most map pages that the moves change.
    pub(super) pages: u64,
    /// The blocks that follow the piece.
    pub(super) rest: &'a [Block],
}

/// Most bytes of a piece: at least one block, and two pieces fit into a segment.
fn piece_bytes<D: SegmentStore>(pool: &Pool<D>) -> usize {
    let segment = pool.segments().bytes() as usize;
    PIECE_BYTES.min(segment / 4).max(STORED_MAX as usize).min(segment / 2)
}

/// Most bytes of a piece that goes to the open cold segment. The end of a segment is filled too,
/// because cold segments are not cleaned before they contain garbage. `None` if next to nothing is
/// left.
pub(super) fn open_space<D: SegmentStore>(pool: &Pool<D>) -> Option<usize> {
    let most = piece_bytes(pool);
    let space = pool.cold()?.free_bytes(pool.segments().bytes()) as usize;
    let count = space / pool.align() as usize;
    let head = head_bytes(count.min(MOVES_MAX), pool.align()) as usize;
    let bound = if policy::is_near_reserve(pool) { most } else { PIECE_BYTES };
    let space = space.checked_sub(head)?.min(bound);
    (space >= most / 8).then_some(space)
}

impl Victim {
    /// Reads a segment. Parts that cannot be read are zeros, and each block there is read again
    /// when it is needed.
    pub(super) fn read<D: SegmentStore>(&mut self, pool: &Pool<D>, number: u32) {
        let (segments, files) = (pool.segments(), pool.segments().files());
        let bytes = segments.bytes() as usize;
        let image = self.image.get_or_insert_with(|| pool.memory().take_beyond(bytes));
        for (at, part) in (0..).step_by(PIECE_BYTES).zip(image.chunks_mut(PIECE_BYTES)) {
            if segments.read(&files, segments.address(number, at), part).is_err() {
                part.fill(0);
            }
        }
    }

    /// The contents of the segment.
    pub(super) fn bytes(&self) -> &[u8] {
        self.image.as_deref().unwrap_or_default()
    }

    /// Takes the first blocks that change at most `most` pages. A damaged block stays where it is,
    /// and its segment is quarantined: otherwise cleaning would choose it again and again.
    pub(super) fn piece<'a, D: SegmentStore>(
        &self,
        pool: &Pool<D>,
        blocks: &'a [Block],
        most: u64,
    ) -> Piece<'a> {
        let first = blocks.first().map_or(0, |block| block.entry.stored_bytes());
        let first = first.next_multiple_of(pool.align()) as usize;
        let open = open_space(pool).filter(|size| *size >= first);
        // A batch of short blocks has a longer header than was assumed.
        let batch_max = pool.cold().filter(|_| open.is_some());
        let batch_max =
            batch_max.map_or(u64::MAX, |cold| cold.free_bytes(pool.segments().bytes()).into());
        let size = open.unwrap_or_else(|| piece_bytes(pool));
        let mut buffer = pool.memory().take_beyond(size);
        let align = pool.align();
        let (mut places, mut done, mut pages) = (Places::default(), 0, 0);
        let (mut leaves, mut nodes) = (HashSet::new(), HashSet::new());
        let mut whole = Vec::new();
        for block in blocks {
            yield_if_due();
            let len = block.entry.stored_bytes();
            let mut after = places;
            let at = after.add(block.entry.codec().is_sealed(), len, align) as usize;
            let head = u64::from(head_bytes(whole.len() + 1, align));
            let payload = after.payload_bytes(align);
            let fits = payload <= size as u64 && head + payload <= batch_max;
            if (!fits && done > 0) || whole.len() >= MOVES_MAX {
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
            if !fits || !self.copy(pool, block, &mut buffer[at..at + len as usize]) {
                continue;
            }
            buffer[places.end() as usize..at].fill(0);
            places = after;
            pages += more;
            leaves.insert(leaf);
            nodes.insert(node);
            whole.push(*block);
        }
        buffer.truncate(places.payload_bytes(align) as usize);
        buffer[places.end() as usize..].fill(0);
        Piece { blocks: whole, bytes: buffer, pages, rest: &blocks[done..] }
    }

    /// Copies a block and returns whether it is intact. A block that is not intact in the image is
    /// read again, from any copy.
    fn copy<D: SegmentStore>(&self, pool: &Pool<D>, block: &Block, into: &mut [u8]) -> bool {
        let (number, address) = (block.number, block.entry.address());
        let (segment, offset) = pool.segments().split(address);
        let is_whole = |bytes: &[u8]| crc(bytes) == block.entry.crc();
        let here = self.bytes().get(offset as usize..offset as usize + into.len());
        if let Some(here) = here.filter(|here| is_whole(here)) {
            into.copy_from_slice(here);
            return true;
        }
        // Direct I/O needs page-aligned memory.
        let mut stored = pool.memory().take_beyond(into.len());
        let files = pool.segments().files();
        let read = pool.segments().read_whole(&files, address, &mut stored, &is_whole);
        if read.is_ok() && is_whole(&stored) {
            into.copy_from_slice(&stored);
            return true;
        }
        tracing::error!("block {number}, at {address} of the pool, is damaged: not moved");
        if pool.segments().quarantine(segment) {
            tracing::warn!("segment {segment} keeps its damage, and is not cleaned any more");
        }
        false
    }
}

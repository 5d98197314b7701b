//! Writes moved blocks to cold segments. Blocks that outlived others are likely to stay live, so
//! cold segments stay full. New data go to other segments, in which many blocks soon become
//! garbage.
//!
//! A batch has a header like a group of the log, but with the pool's mark inverted. The header
//! names the blocks, and recovery ignores the batch. A batch is durable before the log states the
//! moves.

use std::io;

use blockyard_store::SegmentStore;
use blockyard_volume_format::entry::Entry;
use blockyard_volume_format::group::{self, Descriptor, Head, Kind, Places};
use blockyard_volume_format::superblock::SEGMENT_NONE;

use super::summary::Block;
use crate::maintenance::ColdWriter;
use crate::pool::Pool;
use crate::segments::AllocationClass;

/// Writes blocks whose bytes are in `bytes` at the places of a group's payload. Returns the
/// segment, which the caller must sync, and the blocks' new places, or `None` if there is no space.
pub(super) fn write<D: SegmentStore>(
    pool: &Pool<D>,
    blocks: &[Block],
    bytes: &[u8],
) -> io::Result<Option<(u32, Vec<Entry>)>> {
    let (segments, align) = (pool.segments(), pool.align());
    let head_bytes = group::head_bytes(blocks.len(), align);
    let len = head_bytes + bytes.len() as u32;
    let open = pool.cold().filter(|cold| len <= cold.free_bytes(segments.bytes()));
    let place = match open {
        Some(cold) => cold,
        None => match segments.take(AllocationClass::Move) {
            Some(segment) => ColdWriter { segment, offset: 0, number: 1 },
            None => return Ok(None),
        },
    };
    let head = Head {
        pool: !crate::checkpoint::pool_mark(pool),
        epoch: 0,
        number: place.number,
        chain: 0,
        durable: 0,
        next: SEGMENT_NONE,
        count: blocks.len() as u32,
        head_bytes,
        payload_bytes: bytes.len() as u32,
    };
    let descriptors: Vec<Descriptor> = blocks
        .iter()
        .map(|block| Descriptor {
            kind: Kind::Data,
            codec: block.entry.codec(),
            volume: block.family,
            from: 0,
            to: 0,
            block: block.number,
            len: block.entry.stored_bytes(),
            crc: block.entry.crc(),
        })
        .collect();
    let mut printed = pool.memory().take_beyond(head_bytes as usize);
    group::print(&head, &descriptors, &mut printed);
    let address = segments.address(place.segment, place.offset);
    segments.write(address, &[&printed, bytes])?;
    pool.meters().wrote_cold(u64::from(len));
    let (offset, number) = (place.offset + len, place.number + 1);
    pool.set_cold(Some(ColdWriter { offset, number, ..place }));
    let (payload, mut places) = (address + u64::from(head_bytes), Places::default());
    let entries = descriptors.iter().map(|block| {
        let (at, len) = places.next(block, align);
        Entry::new(payload + at, len, block.codec, block.crc)
    });
    Ok(Some((place.segment, entries.collect())))
}

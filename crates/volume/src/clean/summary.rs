//! The contents of a segment. Its group headers name every block in it, so the cleaner need not
//! search all maps. The maps say which of these blocks are live.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ptr;
use std::sync::Arc;

use blockyard_store::SegmentStore;
use blockyard_store::buffer::Memory;
use blockyard_volume_format::FAN;
use blockyard_volume_format::entry::Entry;
use blockyard_volume_format::group::{self, Kind, Places};

use crate::apply::first_block;
use crate::error::VolumeError;
use crate::map::{Leaf, Map, Node, Page};
use crate::pool::Pool;
use crate::thread::yield_if_due;

/// A block that is, or was, in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// The family of volumes that may contain the block; 0: any.
    pub(super) family: u32,
    /// The block number in these volumes.
    pub(super) number: u64,
    /// The address of the block.
    pub(super) entry: Entry,
    /// Number of leaves that contain one of the wanted blocks at this place, in all volumes and
    /// snapshots. Leaves that the next checkpoint writes anyway are not counted.
    pub(super) leaves: u64,
    /// Number of nodes above these leaves that the next checkpoint would not write anyway.
    pub(super) nodes: u64,
}

/// The blocks that the group headers in a segment name; `image` is the segment as it was read.
pub(super) fn named<D: SegmentStore>(pool: &Pool<D>, segment: u32, image: &[u8]) -> Vec<Block> {
    let (segments, align) = (pool.segments(), pool.align());
    let (files, mark) = (segments.files(), crate::checkpoint::pool_mark(pool));
    let families: HashMap<u32, u32> =
        pool.volumes().by_id.iter().map(|(id, live)| (*id, live.family)).collect();
    let memory = Memory::new(1 << 20);
    let mut blocks = Vec::new();
    let (mut offset, mut before) = (0, None);
    while offset + align <= segments.bytes() {
        let address = segments.address(segment, offset);
        let here = image.get(offset as usize..).unwrap_or_default();
        let space = here.len();
        let len = |first: &[u8]| group::head_len(first, align).filter(|len| *len <= space);
        let head = here.get(..align as usize).and_then(len);
        let head = head.and_then(|len| group::parse(&here[..len], align));
        // A header that is damaged in this copy may be intact in another one.
        let head = head.or_else(|| {
            segments.copies(&files, segment).numbers().skip(1).find_map(|copy| {
                let mut first = memory.take_beyond(align as usize);
                segments.read_copy(&files, copy, address, &mut first).ok()?;
                let mut head = memory.take_beyond(len(&first)?);
                segments.read_copy(&files, copy, address, &mut head).ok()?;
                group::parse(&head, align)
            })
        });
        let Some((head, _, descriptors)) = head else { break };
        // Groups that remain from an earlier use of the segment do not follow.
        let is_cold = head.pool == !mark;
        let follows = before.is_none_or(|before| before + 1 == head.number);
        if !follows || (!is_cold && head.pool != mark) {
            break;
        }
        let (payload, mut places) = (address + u64::from(head.head_bytes), Places::default());
        for descriptor in descriptors {
            let (at, stored) = places.next(&descriptor, align);
            if descriptor.kind == Kind::Data {
                let volume = descriptor.volume;
                let family = if is_cold { Some(volume) } else { families.get(&volume).copied() };
                let entry = Entry::new(payload + at, stored, descriptor.codec, descriptor.crc);
                let family = family.unwrap_or(0);
                let number = descriptor.block;
                blocks.push(Block { family, number, entry, leaves: 0, nodes: 0 });
            }
        }
        before = Some(head.number);
        let whole = u64::from(head.head_bytes) + u64::from(head.payload_bytes);
        offset = offset.saturating_add(whole.min(u32::MAX.into()) as u32);
    }
    blocks
}

/// The live blocks of `blocks` in the order of their addresses, each with its family. Also returns
/// whether all pages that may name them could be read.
pub(super) fn counting<D: SegmentStore>(pool: &Pool<D>, blocks: &[Block]) -> (Vec<Block>, bool) {
    let mut spans: BTreeMap<usize, BTreeMap<usize, Vec<&Block>>> = BTreeMap::new();
    for block in blocks {
        let (span, at) = Map::place(block.number);
        spans.entry(span).or_default().entry(at as usize / FAN).or_default().push(block);
    }
    let (mut found, mut is_read) = (Vec::new(), true);
    for (span, leaves) in spans {
        let nodes = nodes(pool, span);
        let round = pool.segments().round();
        let clean = nodes.iter().filter(|(_, node)| !node.is_dirty(round)).count() as u64;
        for (at, blocks) in leaves {
            yield_if_due();
            let pages = pages(pool, &nodes, (span, at), &blocks, &mut is_read);
            let has = |block: &Block, (family, page, _): &Found| {
                let slot = (block.number % FAN as u64) as usize;
                (block.family == 0 || block.family == *family)
                    && page.entries()[slot] == block.entry
            };
            let changes = |page: &&Found| page.2 && blocks.iter().any(|block| has(block, page));
            let leaves = pages.iter().filter(changes).count() as u64;
            for block in &blocks {
                if let Some((family, ..)) = pages.iter().find(|page| has(block, page)) {
                    found.push(Block { family: *family, leaves, nodes: clean, ..**block });
                }
            }
        }
    }
    found.sort_by_key(|block| block.entry.address());
    (found, is_read)
}

/// The distinct nodes of a span in all maps, each with its family.
fn nodes<D: SegmentStore>(pool: &Pool<D>, span: usize) -> Vec<(u32, Arc<Node>)> {
    let (mut seen, mut nodes) = (HashSet::new(), Vec::new());
    for live in pool.volumes().by_id.values().filter(|live| span < live.map.span_count()) {
        if let Some(node) = live.map.with(span, |span| span.node().cloned())
            && seen.insert(Arc::as_ptr(&node))
        {
            nodes.push((live.family, node));
        }
    }
    nodes
}

/// The family of a leaf, its contents, and whether it is clean.
type Found = (u32, Arc<Page>, bool);

/// The contents of the leaves at one place that may name one of the blocks. A leaf that cannot be
/// read is left out: its blocks are not moved.
fn pages<D: SegmentStore>(
    pool: &Pool<D>,
    nodes: &[(u32, Arc<Node>)],
    (span, at): (usize, usize),
    blocks: &[&Block],
    is_read: &mut bool,
) -> Vec<Found> {
    let round = pool.segments().round();
    let (mut seen, mut pages) = (HashSet::new(), Vec::new());
    for (family, node) in nodes {
        let wanted = |block: &&Block| block.family == 0 || block.family == *family;
        let Some(leaf) = node.leaf(at).filter(|_| blocks.iter().any(wanted)) else { continue };
        if !seen.insert(ptr::from_ref::<Leaf>(leaf)) {
            continue;
        }
        match pool.segments().load(leaf) {
            Ok(page) => pages.push((*family, page, !leaf.is_dirty(round))),
            Err(error) => {
                *is_read = false;
                log_unreadable(pool, (*family, span, at), &error);
            }
        }
    }
    pages
}

/// Logs which blocks cannot be moved because the leaf that names them cannot be read.
fn log_unreadable<D: SegmentStore>(
    pool: &Pool<D>,
    (family, span, at): (u32, usize, usize),
    error: &VolumeError,
) {
    let name = pool
        .volumes()
        .by_id
        .values()
        .find(|live| live.family == family)
        .map_or_else(|| format!("family {family}"), |live| live.meta.name.clone());
    let first = first_block(span, at);
    tracing::error!("{name}: {FAN} blocks from {first} on are not moved: {error}");
}

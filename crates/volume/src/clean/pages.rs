//! Moves map pages out of victims: pages there are given up, and the next checkpoint writes them
//! elsewhere.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use blockyard_store::SegmentStore;
use blockyard_volume_format::entry::Entry;

use crate::frozen::Frozen;
use crate::pool::Pool;
use crate::relocate::Spans;
use crate::segments::AllocationClass;
use crate::thread::yield_if_due;

/// Selects the segments whose pages the next checkpoint has space to rewrite. Rewriting a segment
/// takes its pages and each node that names one. Returns the segments and their number of pages.
pub(super) fn select<D: SegmentStore>(
    pool: &Pool<D>,
    frozen: &Frozen,
    mut segments: Vec<u32>,
) -> (Vec<u32>, u64) {
    if segments.is_empty() {
        return (segments, 0);
    }
    let mut counts: HashMap<u32, u64> = segments.iter().map(|number| (*number, 0)).collect();
    let (mut nodes, mut leaves) = (HashSet::new(), HashSet::new());
    let segment = |location: Entry| pool.segments().split(location.address()).0;
    for node in frozen.volumes.iter().flat_map(|(.., map)| map.iter().flatten()) {
        if !nodes.insert(Arc::as_ptr(node)) {
            continue;
        }
        yield_if_due();
        let mut left: HashSet<u32> = node.location().map(segment).into_iter().collect();
        for (_, leaf) in node.leaves() {
            let Some(number) = leaf.location().map(segment) else { continue };
            left.insert(number);
            if leaves.insert(Arc::as_ptr(leaf))
                && let Some(count) = counts.get_mut(&number)
            {
                *count += 1;
            }
        }
        for number in left {
            counts.entry(number).and_modify(|count| *count += 1);
        }
    }
    let most = pool.segments().pages_left(AllocationClass::Move, 0).unwrap_or(0);
    let mut page_count = 0;
    segments.retain(|number| {
        let count = counts.get(number).copied().unwrap_or(0);
        let fits = page_count + count <= most;
        page_count += if fits { count } else { 0 };
        fits
    });
    (segments, page_count)
}

/// Finds the spans that have pages in some segments, and reads their leaves into memory. The
/// committer is about to give these pages up, and has no time to search or read.
pub(super) fn prefetch<D: SegmentStore>(
    pool: &Pool<D>,
    frozen: &Frozen,
    segments: &[u32],
) -> Spans {
    let is_left = |location: Entry| segments.contains(&pool.segments().split(location.address()).0);
    let mut spans = Spans::new();
    for (_, copied, map) in &frozen.volumes {
        for (number, node) in map.iter().enumerate() {
            let Some(node) = node else { continue };
            yield_if_due();
            let left = node.leaves().filter(|(_, leaf)| leaf.location().is_some_and(is_left));
            let mut is_any = node.location().is_some_and(is_left);
            for (_, leaf) in left {
                is_any = true;
                if pool.is_running() && !pool.maintenance().must_finish() {
                    // A leaf that cannot be read stays where it is; the error is reported when it
                    // is moved.
                    _ = pool.segments().load(leaf);
                }
            }
            if is_any {
                spans.insert((copied.family, number));
            }
        }
    }
    spans
}

//! Counting again: how many bytes of blocks count in each segment, by a walk through all leaves of
//! all maps as they were at one moment. It comes when much of what is counted may not count any
//! more, and reads leaves without keeping them.
//!
//! A checkpoint that is due breaks it off once, and what was counted is of no use then. The next
//! time it has to wait: else there would be pools in which nothing is ever counted.

use std::collections::{BTreeMap, HashSet};
use std::ptr;
use std::sync::Arc;

use crate::checkpoint::{Frozen, Marks};
use crate::error::VolumeError;
use crate::format::FAN;
use crate::format::entry::Entry;
use crate::map::{Leaf, Node, Page};
use crate::pool::{Pool, Recount};
use crate::store::Directory;

/// Counts again if more bytes may not count than are bearable; says how many were found that do
/// not.
pub(super) fn again<D: Directory>(pool: &Pool<D>, frozen: &Frozen, bearable: u64) -> u64 {
    let whole = &frozen.whole;
    let counted: u64 = whole.live.iter().sum();
    if whole.unknown_bytes <= bearable {
        has_counted(pool, frozen);
        return 0;
    }
    let segments = pool.segments();
    let is_again = pool.recount() == Recount::Broken;
    pool.set_recount(if is_again { Recount::Again } else { Recount::First });
    let counted_now = count(pool, frozen);
    let is_broken = matches!(counted_now, Ok(None));
    pool.set_recount(if is_broken { Recount::Broken } else { Recount::None });
    if !is_broken {
        has_counted(pool, frozen);
    }
    match counted_now {
        Ok(Some(exact)) => {
            segments.recount(&exact, &whole.live, whole.unknown_bytes);
            counted.saturating_sub(exact.iter().sum())
        }
        // Somebody waits for this thread.
        Ok(None) => 0,
        Err(error) => {
            tracing::warn!("{}: space is not counted: {error}", segments.directory().title());
            0
        }
    }
}

/// Whoever waits until blocks are counted does so no longer, if it has asked for it before.
fn has_counted<D: Directory>(pool: &Pool<D>, frozen: &Frozen) {
    if pool.wanted_count().is_some_and(|round| frozen.round >= round) {
        pool.want_count(None);
    }
}

/// How many bytes of blocks count in each segment; `None` if somebody cannot wait for it.
fn count<D: Directory>(pool: &Pool<D>, frozen: &Frozen) -> Result<Option<Vec<u64>>, VolumeError> {
    let mut spans: BTreeMap<usize, Vec<&Arc<Node>>> = BTreeMap::new();
    for (.., map) in &frozen.volumes {
        for (number, node) in map.iter().enumerate() {
            let Some(node) = node else { continue };
            let nodes = spans.entry(number).or_default();
            if !nodes.iter().any(|known| Arc::ptr_eq(known, node)) {
                nodes.push(node);
            }
        }
    }
    let mut marks = Marks::new(pool.segments().bytes());
    let mut seen = HashSet::new();
    for nodes in spans.values() {
        for at in 0..FAN {
            if pool.is_hurried() {
                return Ok(None);
            }
            let leaves = nodes.iter().filter_map(|node| node.leaf(at));
            seen.clear();
            let leaves: Vec<&Arc<Leaf>> =
                leaves.filter(|leaf| seen.insert(ptr::from_ref::<Leaf>(leaf))).collect();
            let pages = leaves.iter().map(|leaf| pool.segments().page(leaf));
            let pages = pages.collect::<Result<Vec<Arc<Page>>, VolumeError>>()?;
            blocks(&pages, &mut marks);
        }
    }
    Ok(Some(marks.into_bytes()))
}

/// Counts the blocks of leaves in the same place of their maps. What they share counts once.
fn blocks(pages: &[Arc<Page>], marks: &mut Marks) {
    if let [page] = pages {
        page.entries().iter().for_each(|entry| marks.entry(entry));
        return;
    }
    let mut known: HashSet<Entry> = HashSet::with_capacity(pages.len());
    for at in 0..FAN {
        known.clear();
        for page in pages {
            let entry = page.entries()[at];
            if known.insert(entry) {
                marks.entry(&entry);
            }
        }
    }
}

//! Moves blocks and pages in all maps that refer to them. Shared blocks and pages stay shared: a
//! page is changed once, however many volumes and snapshots refer to it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ptr;
use std::sync::Arc;

use blockyard_store::SegmentStore;
use blockyard_volume_format::FAN;
use blockyard_volume_format::entry::Entry;

use crate::apply::Apply;
use crate::error::VolumeError;
use crate::map::{Leaf, Map, Node, Page, Tally};
use crate::pool::Volumes;
use crate::record::Move;

/// Spans of the maps of a family: the number of the family and of the span.
pub(crate) type Spans = BTreeSet<(u32, usize)>;

/// The moves in a node, by leaf: index in the leaf, old entry, new entry.
type NodeMoves = BTreeMap<usize, Vec<(usize, Entry, Entry)>>;

/// New versions of changed pages, by the old page.
#[derive(Default)]
struct Changed {
    nodes: HashMap<*const Node, Arc<Node>>,
    leaves: HashMap<*const Leaf, Arc<Leaf>>,
    /// Keeps the old nodes alive, so that their memory addresses are not used again as keys.
    kept: Vec<Arc<Node>>,
}

/// Updates the maps for moved blocks, except for blocks that have been overwritten since.
///
/// # Errors
/// If a leaf could not be read: its blocks stay where they were. A lost leaf is not an error.
pub(crate) fn blocks<D: SegmentStore>(
    volumes: &Volumes,
    moves: &[Move],
    maps: &mut Apply<'_, D>,
) -> Result<(), VolumeError> {
    let mut read = Ok(());
    if moves.is_empty() {
        return read;
    }
    let mut spans: BTreeMap<(u32, usize), NodeMoves> = BTreeMap::new();
    for Move { family, block, from, to } in moves {
        let (span, at) = Map::place(*block);
        let leaves = spans.entry((*family, span)).or_default();
        let leaf = leaves.entry(at as usize / FAN).or_default();
        leaf.push((at as usize % FAN, *from, *to));
    }
    for ((family, number), moves) in spans {
        let (mut done, mut kept) = (HashSet::new(), HashSet::new());
        each_node(volumes, &Spans::from([(family, number)]), |node, changed| {
            let mut copy: Option<Node> = None;
            for (at, moves) in &moves {
                let Some(leaf) = node.leaf(*at) else { continue };
                let known = changed.leaves.get(&ptr::from_ref::<Leaf>(leaf)).cloned();
                let moved = match known {
                    Some(known) => Some(known),
                    None => match maps.segments().load(leaf) {
                        Ok(page) => moved(leaf, &page, moves, changed, &mut done, maps.tally()),
                        // Maps that read the old place still need these blocks.
                        Err(error) => {
                            tracing::error!("blocks stay where they were: {error}");
                            kept.extend(moves.iter().map(|(_, from, _)| *from));
                            if !maps.segments().is_lost(&error) {
                                read = Err(error);
                            }
                            None
                        }
                    },
                };
                if let Some(moved) = moved {
                    copy.get_or_insert_with(|| node.clone()).put(*at, moved);
                }
            }
            soil(node, copy, maps.tally())
        });
        for (from, to) in done {
            maps.tally().born(&to);
            if !kept.contains(&from) {
                maps.tally().died(&from);
            }
        }
    }
    read
}

/// A copy of a leaf with the moved blocks; `None` if the leaf refers to none of them.
fn moved(
    leaf: &Arc<Leaf>,
    page: &Arc<Page>,
    moves: &[(usize, Entry, Entry)],
    changed: &mut Changed,
    done: &mut HashSet<(Entry, Entry)>,
    tally: &mut Tally,
) -> Option<Arc<Leaf>> {
    let is_there = |(at, from, _): &&(usize, Entry, Entry)| page.entries()[*at] == *from;
    moves.iter().find(is_there)?;
    tally.dirtied += u64::from(!leaf.is_dirty(tally.round));
    let mut copy = leaf.twin(page, tally.round);
    copy.change(|page| {
        for (at, from, to) in moves {
            if page.entries()[*at] == *from {
                page.set(*at, *to, page.is_fresh(*at));
                done.insert((*from, *to));
            }
        }
    });
    leaf.pin(page);
    let copy = Arc::new(copy);
    changed.leaves.insert(ptr::from_ref::<Leaf>(leaf), Arc::clone(&copy));
    Some(copy)
}

/// Drops the location of each page that lies where `is_left` says, so that the next checkpoint
/// writes it again. Only `spans` have such pages. A page that cannot be read stays, unless it has
/// rotted and is in `lost`.
pub(crate) fn pages<D: SegmentStore>(
    volumes: &Volumes,
    spans: &Spans,
    is_left: impl Fn(Entry) -> bool,
    lost: &HashSet<Entry>,
    maps: &mut Apply<'_, D>,
) {
    each_node(volumes, spans, |node, changed| {
        let mut copy = node.location().is_some_and(&is_left).then(|| node.clone());
        for (at, leaf) in node.leaves() {
            if !leaf.location().is_some_and(&is_left) {
                continue;
            }
            let key = ptr::from_ref::<Leaf>(leaf);
            let twin = match changed.leaves.get(&key) {
                Some(known) => Arc::clone(known),
                None => {
                    // A copy of the pool may have failed since the page was found lost.
                    let segments = maps.segments();
                    let stand_in = |error| match leaf.location() {
                        Some(location) if segments.is_lost(&error) && lost.contains(&location) => {
                            Ok(Arc::new(Page::lost(location)))
                        }
                        _ => Err(error),
                    };
                    match segments.page(leaf).or_else(stand_in) {
                        Ok(page) => {
                            maps.tally().dirtied += 1;
                            leaf.pin(&page);
                            let twin = Arc::new(leaf.twin(&page, maps.tally().round));
                            changed.leaves.insert(key, Arc::clone(&twin));
                            twin
                        }
                        Err(error) => {
                            tracing::error!("it stays where it is: {error}");
                            continue;
                        }
                    }
                }
            };
            copy.get_or_insert_with(|| node.clone()).put(at, twin);
        }
        soil(node, copy, maps.tally())
    });
    if !lost.is_empty() {
        count_owned(volumes, spans);
    }
}

/// Counts the owned blocks of the volumes with these spans again, because leaves were lost. The
/// search for them has read all other leaves, so the count is known.
fn count_owned(volumes: &Volumes, spans: &Spans) {
    let families: BTreeSet<u32> = spans.iter().map(|(family, _)| *family).collect();
    // A snapshot owns nothing.
    let owners = volumes.by_id.values().filter(|live| !live.meta.is_snapshot);
    for live in owners.filter(|live| families.contains(&live.family)) {
        live.own(live.map.owned());
    }
}

/// Marks a changed copy of a node as dirty, and counts a page for the next checkpoint unless the
/// node was dirty already.
fn soil(node: &Node, mut copy: Option<Node>, tally: &mut Tally) -> Option<Node> {
    if let Some(copy) = &mut copy {
        tally.dirtied += u64::from(!node.is_dirty(tally.round));
        copy.soil(tally.round);
    }
    copy
}

/// Calls `change` once for each distinct node in these spans, and puts the result into all maps
/// that have the node.
fn each_node(
    volumes: &Volumes,
    spans: &Spans,
    mut change: impl FnMut(&Node, &mut Changed) -> Option<Node>,
) {
    let mut changed = Changed::default();
    for live in volumes.by_id.values() {
        let (family, end) = (live.family, live.map.span_count());
        for (_, number) in spans.range((family, 0)..(family, end)).copied() {
            // Only the committer changes trees, and this runs on its thread.
            let Some(node) = live.map.with(number, |span| span.node().cloned()) else { continue };
            let key = Arc::as_ptr(&node);
            let new = match changed.nodes.get(&key) {
                Some(known) => Arc::clone(known),
                None => {
                    let new = change(&node, &mut changed).map(Arc::new);
                    let new = new.unwrap_or_else(|| Arc::clone(&node));
                    changed.nodes.insert(key, Arc::clone(&new));
                    changed.kept.push(Arc::clone(&node));
                    new
                }
            };
            if !Arc::ptr_eq(&new, &node) {
                live.map.replace(number, new);
            }
        }
    }
}

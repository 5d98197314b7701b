//! Counting again: how many bytes of blocks count in each segment, by a walk through all leaves of
//! all maps as they were at one moment. It comes when much of what is counted may not count any
//! more, and reads leaves without keeping them.
//!
//! A leaf that has rotted, in all copies, would keep anything from being counted for ever. It is
//! given up: the next checkpoint has another one in its place, of whose blocks none can be had, and
//! the count behind that is whole.
//!
//! A checkpoint that is due breaks it off once, and what was counted is of no use then. The next
//! time it has to wait: else there would be pools in which nothing is ever counted.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ptr;
use std::sync::{Arc, OnceLock};

use crate::apply::first_block;
use crate::checkpoint::{Frozen, Marks};
use crate::error::VolumeError;
use crate::format::FAN;
use crate::format::entry::Entry;
use crate::map::{self, Leaf, Node, Page};
use crate::pool::{Pool, Recount};
use crate::record::Moved;
use crate::recovery::crew::{Crew, THREADS};
use crate::store::Directory;

/// So many leaves of each map are looked at at once, and so many of all of them where these are
/// many.
const AT_ONCE: usize = 64;
const LEAVES_AT_ONCE: usize = 1024;

/// What a walk through all leaves has come to.
enum Counted {
    /// So many bytes count in each segment.
    Exact(Vec<u64>),
    /// Some leaves have rotted.
    Lost(Moved),
    /// Somebody cannot wait for it.
    Broken,
}

/// Counts again if more bytes may not count than are bearable; answers what is to be given up
/// before that is possible.
pub(super) fn again<D: Directory>(pool: &Pool<D>, frozen: &Frozen, bearable: u64) -> Option<Moved> {
    let whole = &frozen.whole;
    if whole.unknown_bytes <= bearable {
        has_counted(pool, frozen);
        return None;
    }
    let segments = pool.segments();
    let is_again = pool.recount() == Recount::Broken;
    pool.set_recount(if is_again { Recount::Again } else { Recount::First });
    let counted_now = count(pool, frozen);
    let is_broken = matches!(counted_now, Ok(Counted::Broken));
    pool.set_recount(if is_broken { Recount::Broken } else { Recount::None });
    match counted_now {
        Ok(Counted::Exact(exact)) => {
            segments.recount(&exact, &whole.live, whole.unknown_bytes);
            has_counted(pool, frozen);
            None
        }
        // Who waits for it waits for the next one.
        Ok(Counted::Lost(lost)) => Some(lost),
        Ok(Counted::Broken) => None,
        Err(error) => {
            tracing::warn!("{}: space is not counted: {error}", segments.directory().title());
            has_counted(pool, frozen);
            None
        }
    }
}

/// Whoever waits until blocks are counted does so no longer, if it has asked for it before.
fn has_counted<D: Directory>(pool: &Pool<D>, frozen: &Frozen) {
    if pool.wanted_count().is_some_and(|round| frozen.round >= round) {
        pool.want_count(None);
    }
}

/// The leaves in one place of some nodes; what these share once.
fn leaves<'a>(nodes: &[&'a Arc<Node>], at: usize) -> Vec<&'a Arc<Leaf>> {
    let mut seen = HashSet::new();
    let leaves = nodes.iter().filter_map(|node| node.leaf(at));
    leaves.filter(|leaf| seen.insert(ptr::from_ref::<Leaf>(leaf))).collect()
}

/// What became of a leaf that was read.
type Read = Result<Arc<Page>, VolumeError>;

/// Reads those of some leaves at once that are not in memory, if they are many.
fn read<'scope, 'a, D: Directory>(
    pool: &'scope Pool<D>,
    leaves: impl Iterator<Item = &'a &'a Arc<Leaf>>,
    crew: &Crew<'scope, '_>,
) -> Result<HashMap<*const Leaf, Read>, VolumeError> {
    let away: Vec<&Arc<Leaf>> = leaves.copied().filter(|leaf| !leaf.is_here()).collect();
    if away.len() < THREADS {
        return Ok(HashMap::new());
    }
    let slots: Vec<Arc<OnceLock<Read>>> = away.iter().map(|_| Arc::default()).collect();
    let parts = away.iter().map(|leaf| Arc::clone(leaf)).zip(slots.iter().cloned());
    crew.each(parts, |(leaf, slot)| {
        _ = slot.set(pool.segments().page(&leaf));
        Ok(())
    })?;
    let read = slots.into_iter().map(|slot| Arc::into_inner(slot).and_then(OnceLock::into_inner));
    let read =
        away.into_iter().zip(read).filter_map(|(leaf, read)| Some((Arc::as_ptr(leaf), read?)));
    Ok(read.collect())
}

/// Counts how many bytes of blocks count in each segment.
fn count<D: Directory>(pool: &Pool<D>, frozen: &Frozen) -> Result<Counted, VolumeError> {
    std::thread::scope(|scope| count_by(pool, frozen, &Crew::new(scope)))
}

fn count_by<'scope, D: Directory>(
    pool: &'scope Pool<D>,
    frozen: &Frozen,
    crew: &Crew<'scope, '_>,
) -> Result<Counted, VolumeError> {
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
    let mut lost = Moved { round: pool.segments().round(), ..Moved::default() };
    for (number, nodes) in &spans {
        let at_once = (LEAVES_AT_ONCE / nodes.len().max(1)).clamp(1, AT_ONCE);
        for from in (0..FAN).step_by(at_once) {
            if pool.is_hurried() {
                return Ok(Counted::Broken);
            }
            let places: Vec<_> = (from..FAN.min(from + at_once))
                .map(|at| (at, leaves(nodes, at)))
                .filter(|(_, leaves)| !leaves.is_empty())
                .collect();
            let mut read = read(pool, places.iter().flat_map(|(_, leaves)| leaves), crew)?;
            for (at, leaves) in places {
                let mut pages = Vec::with_capacity(leaves.len());
                for leaf in leaves {
                    let known = read.remove(&ptr::from_ref::<Leaf>(leaf));
                    match known.unwrap_or_else(|| pool.segments().page(leaf)) {
                        Ok(page) => pages.push(page),
                        Err(error) if pool.segments().is_lost(&error) => {
                            give_up(frozen, (*number, at), leaf, error, &mut lost)?;
                        }
                        Err(error) => return Err(error),
                    }
                }
                blocks(&pages, &mut marks);
            }
        }
    }
    Ok(match lost.lost.is_empty() {
        true => Counted::Exact(marks.into_bytes()),
        false => Counted::Lost(lost),
    })
}

/// Notes that a leaf has rotted, in this place of its maps.
fn give_up(
    frozen: &Frozen,
    (number, at): (usize, usize),
    leaf: &Arc<Leaf>,
    error: VolumeError,
    lost: &mut Moved,
) -> Result<(), VolumeError> {
    let has = |map: &map::Frozen| {
        let node = map.get(number).and_then(Option::as_ref);
        node.and_then(|node| node.leaf(at)).is_some_and(|it| Arc::ptr_eq(it, leaf))
    };
    let maps = frozen.volumes.iter().filter(|(.., map)| has(map));
    let names: Vec<&str> = maps.clone().map(|(traits, ..)| &*traits.name).collect();
    let (names, first) = (names.join(", "), first_block(number, at));
    tracing::error!("{names}: {FAN} blocks from {first} on: {error}");
    match leaf.home() {
        Some(home) => lost.lost.push(home),
        None => return Err(error),
    }
    lost.page_count += 1;
    for (_, copied, _) in maps {
        lost.page_count += 1;
        lost.spans.insert((copied.family, number));
    }
    Ok(())
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

//! The liveness scan: counts the live bytes of each segment exactly, by a walk through all leaves
//! of all maps as they were at one moment. It runs when many counted bytes may not be live any
//! more. It reads leaves without caching them.
//!
//! A leaf that has rotted in all copies would make every scan fail. It is given up: the next
//! checkpoint has another leaf in its place, none of whose blocks can be read, and the next scan is
//! complete.
//!
//! A checkpoint that is due interrupts a scan once, and the partial counts are discarded. It waits
//! for the second scan; otherwise some pools would never complete one.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ptr;
use std::sync::{Arc, OnceLock};

use blockyard_store::SegmentStore;
use blockyard_volume_format::FAN;
use blockyard_volume_format::entry::Entry;

use crate::apply::first_block;
use crate::error::VolumeError;
use crate::frozen::{Frozen, Marks};
use crate::maintenance::LivenessScan;
use crate::map::{self, Leaf, Node, Page};
use crate::pool::Pool;
use crate::record::Relocation;
use crate::recovery::workers::{THREADS, Workers};
use crate::thread::yield_if_due;

/// Leaves that are read together: this number of each map, and at most this number of all maps.
const AT_ONCE: usize = 64;
const LEAVES_AT_ONCE: usize = 1024;

/// Most map pages that one record for lost leaves changes. The next checkpoint must find space for
/// these pages, and all clients wait while they are changed. A large number of lost leaves
/// therefore takes several records.
const LOST_PAGES: u64 = 256;

/// The result of a liveness scan.
enum Counted {
    /// The live bytes of each segment.
    Exact(Vec<u64>),
    /// Records that give up leaves that have rotted.
    Lost(Vec<Relocation>),
    /// The scan was interrupted by a checkpoint that is due.
    Interrupted,
}

/// Does a liveness scan if more than `tolerated` bytes are unknown. Returns the records that drop
/// rotten leaves, which must be executed before a scan can succeed.
pub(super) fn scan<D: SegmentStore>(
    pool: &Pool<D>,
    frozen: &Frozen,
    tolerated: u64,
) -> Vec<Relocation> {
    let whole = &frozen.whole;
    if whole.unknown_bytes <= tolerated {
        pool.maintenance().end_scan_requests(frozen.round);
        return Vec::new();
    }
    let segments = pool.segments();
    let is_second = pool.maintenance().scan() == LivenessScan::Interrupted;
    let scan = if is_second { LivenessScan::Second } else { LivenessScan::First };
    pool.maintenance().set_scan(scan);
    let counted_now = count(pool, frozen);
    let is_interrupted = matches!(counted_now, Ok(Counted::Interrupted));
    let scan = if is_interrupted { LivenessScan::Interrupted } else { LivenessScan::Idle };
    pool.maintenance().set_scan(scan);
    match counted_now {
        Ok(Counted::Exact(exact)) => {
            segments.recount(&exact, &whole.live, whole.unknown_bytes);
            pool.maintenance().end_scan_requests(frozen.round);
            Vec::new()
        }
        // Changes that wait for a scan wait for the next one.
        Ok(Counted::Lost(lost)) => lost,
        Ok(Counted::Interrupted) => Vec::new(),
        Err(error) => {
            tracing::warn!("{}: the liveness scan failed: {error}", segments.directory().title());
            pool.maintenance().end_scan_requests(frozen.round);
            Vec::new()
        }
    }
}

/// The distinct leaves at one place of some nodes.
fn leaves<'a>(nodes: &[&'a Arc<Node>], at: usize) -> Vec<&'a Arc<Leaf>> {
    let mut seen = HashSet::new();
    let leaves = nodes.iter().filter_map(|node| node.leaf(at));
    leaves.filter(|leaf| seen.insert(ptr::from_ref::<Leaf>(leaf))).collect()
}

/// The result of reading a leaf.
type Read = Result<Arc<Page>, VolumeError>;

/// Reads in parallel those leaves that are not in memory, if there are enough of them.
fn read<'scope, 'a, D: SegmentStore>(
    pool: &'scope Pool<D>,
    leaves: impl Iterator<Item = &'a &'a Arc<Leaf>>,
    workers: &Workers<'scope, '_>,
) -> Result<HashMap<*const Leaf, Read>, VolumeError> {
    let away: Vec<&Arc<Leaf>> = leaves.copied().filter(|leaf| !leaf.is_resident()).collect();
    if away.len() < THREADS {
        return Ok(HashMap::new());
    }
    let slots: Vec<Arc<OnceLock<Read>>> = away.iter().map(|_| Arc::default()).collect();
    let parts = away.iter().map(|leaf| Arc::clone(leaf)).zip(slots.iter().cloned());
    workers.each(parts, |(leaf, slot)| {
        _ = slot.set(pool.segments().page(&leaf));
        Ok(())
    })?;
    let read = slots.into_iter().map(|slot| Arc::into_inner(slot).and_then(OnceLock::into_inner));
    let read =
        away.into_iter().zip(read).filter_map(|(leaf, read)| Some((Arc::as_ptr(leaf), read?)));
    Ok(read.collect())
}

/// Counts the live bytes of each segment, with worker threads.
fn count<D: SegmentStore>(pool: &Pool<D>, frozen: &Frozen) -> Result<Counted, VolumeError> {
    std::thread::scope(|scope| count_by(pool, frozen, &Workers::new(scope)))
}

fn count_by<'scope, D: SegmentStore>(
    pool: &'scope Pool<D>,
    frozen: &Frozen,
    workers: &Workers<'scope, '_>,
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
    let mut lost = Lost { round: pool.segments().round(), ..Lost::default() };
    for (number, nodes) in &spans {
        let at_once = (LEAVES_AT_ONCE / nodes.len().max(1)).clamp(1, AT_ONCE);
        for from in (0..FAN).step_by(at_once) {
            if pool.maintenance().must_finish() {
                return Ok(Counted::Interrupted);
            }
            let places: Vec<_> = (from..FAN.min(from + at_once))
                .map(|at| (at, leaves(nodes, at)))
                .filter(|(_, leaves)| !leaves.is_empty())
                .collect();
            let mut read = read(pool, places.iter().flat_map(|(_, leaves)| leaves), workers)?;
            for (at, leaves) in places {
                let mut pages = Vec::with_capacity(leaves.len());
                for leaf in leaves {
                    yield_if_due();
                    let known = read.remove(&ptr::from_ref::<Leaf>(leaf));
                    match known.unwrap_or_else(|| pool.segments().page(leaf)) {
                        Ok(page) => {
                            // If leaves are lost, the owned blocks of their volumes are counted
                            // from this.
                            leaf.note_fresh(&page);
                            pages.push(page);
                        }
                        Err(error) if pool.segments().is_lost(&error) => {
                            lost.add(frozen, (*number, at), leaf, error)?;
                        }
                        Err(error) => return Err(error),
                    }
                }
                blocks(&pages, &mut marks);
            }
        }
    }
    Ok(match lost.records.is_empty() {
        true => Counted::Exact(marks.into_bytes()),
        false => Counted::Lost(lost.records),
    })
}

/// Rotten leaves that the scan has found.
#[derive(Default)]
struct Lost {
    /// Number of checkpoints that had begun when the leaves were found.
    round: u64,
    records: Vec<Relocation>,
    /// Nodes that the last record changes. A node is one page, regardless of how many of its leaves
    /// are lost and how many maps contain it.
    nodes: HashSet<*const Node>,
}

impl Lost {
    /// Adds a rotten leaf at this place of its maps.
    fn add(
        &mut self,
        frozen: &Frozen,
        (number, at): (usize, usize),
        leaf: &Arc<Leaf>,
        error: VolumeError,
    ) -> Result<(), VolumeError> {
        let Some(location) = leaf.location() else { return Err(error) };
        let node = |map: &map::Frozen| {
            let node = map.get(number)?.as_ref()?;
            node.leaf(at).is_some_and(|it| Arc::ptr_eq(it, leaf)).then_some(Arc::as_ptr(node))
        };
        let maps = frozen
            .volumes
            .iter()
            .filter_map(|(meta, copied, map)| Some((&*meta.name, copied.family, node(map)?)));
        let names: Vec<&str> = maps.clone().map(|(name, ..)| name).collect();
        let (names, first) = (names.join(", "), first_block(number, at));
        tracing::error!("{names}: {FAN} blocks from {first} on: {error}");
        if self.records.last().is_none_or(|last| last.page_count >= LOST_PAGES) {
            self.records.push(Relocation { round: self.round, ..Relocation::default() });
            self.nodes.clear();
        }
        let last = self.records.last_mut().expect("there is one by now");
        last.lost.insert(location);
        last.page_count += 1;
        for (_, family, node) in maps {
            last.page_count += u64::from(self.nodes.insert(node));
            last.spans.insert((family, number));
        }
        Ok(())
    }
}

/// Counts the blocks of leaves at the same place of their maps; a shared block once.
fn blocks(pages: &[Arc<Page>], marks: &mut Marks) {
    if let [page] = pages {
        page.entries().iter().for_each(|entry| marks.block(entry));
        return;
    }
    let mut known: HashSet<Entry> = HashSet::with_capacity(pages.len());
    for at in 0..FAN {
        known.clear();
        for page in pages {
            let entry = page.entries()[at];
            if known.insert(entry) {
                marks.block(&entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use blockyard_core::Status;
    use blockyard_sync::counter::Counter;

    use super::*;
    use crate::clean::{Cleaner, Inline};
    use crate::maintenance::RoundCommand;
    use crate::stepped_pool::SteppedPool;

    /// Regression: each snapshot that contained a leaf was thought to need a page for each of its
    /// nodes. For many leaves there was never enough space, and none of them was given up.
    #[test]
    fn many_rotten_leaves_of_many_snapshots_are_given_up() {
        const LEAVES: u64 = 300;
        const ROTTEN: usize = 290;
        let mut stepped = SteppedPool::of("rotten", 100, 100);
        stepped.take("w", LEAVES * FAN as u64);
        (0..LEAVES).for_each(|leaf| stepped.write(leaf * FAN as u64, 1));
        for number in 0..10 {
            stepped.snapshot("w", &format!("w@{number}"));
            // The second node is a different one in each snapshot.
            stepped.write((LEAVES - 1) * FAN as u64, 1);
        }
        stepped.checkpoint();
        let map = stepped.pool.find("w").unwrap().map.freeze();
        let leaves: Vec<_> = map.iter().flatten().flat_map(|node| node.leaves()).collect();
        for (_, leaf) in &leaves[..ROTTEN] {
            stepped.rot(leaf);
        }
        let pool = Arc::clone(&stepped.pool);
        let count = |stepped: &mut SteppedPool| {
            pool.segments().add_unknown_bytes(1);
            let (frozen, marks) = stepped.checkpoint();
            pool.maintenance().send(RoundCommand::Scan { after: frozen.round });
            let mut pages = Vec::new();
            let execute = |moved: Relocation| {
                pages.push(moved.page_count);
                stepped.committer.move_blocks(moved)
            };
            let sink = Inline { execute, is_done: true };
            Cleaner::new(&pool, &frozen, &marks, sink).scan_liveness();
            pages
        };
        let pages = count(&mut stepped);
        // Two records contain the first node, one record contains the second nodes.
        assert_eq!(pages.iter().sum::<u64>(), ROTTEN as u64 + 2 + 11);
        assert_eq!((pages.len(), pages[0]), (2, LOST_PAGES));
        assert!(count(&mut stepped).is_empty());
        assert_eq!(pool.segments().unknown_bytes(), 0);
        let mut read = |leaf: usize| stepped.handle.read((leaf * FAN * 4096) as u64, 4096, |_| {});
        assert_eq!((read(0), read(ROTTEN - 1)), (Status::Protection, Status::Protection));
        assert_eq!(read(ROTTEN), Status::Ok);
    }

    /// Regression: a change that wanted a scan at the moment at which another scan ended went on
    /// without one.
    #[test]
    fn a_request_for_a_later_liveness_scan_waits_for_it() {
        const ROUNDS: u64 = 400_000;
        let mut stepped = SteppedPool::new("wanted");
        let mut frozen = stepped.committer.freeze();
        let (pool, counted) = (&stepped.pool, &Counter::default());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while frozen.round < ROUNDS {
                    frozen.round = counted.get();
                    _ = scan(pool, &frozen, u64::MAX);
                }
            });
            let mut missed = 0;
            for round in 1..=ROUNDS {
                pool.maintenance().send(RoundCommand::Scan { after: round });
                // No scan has completed since the request.
                missed += u64::from((0..8).any(|_| pool.requested_scan() != Some(round)));
                counted.add(1);
            }
            assert_eq!(missed, 0);
        });
        assert_eq!(pool.requested_scan(), None);
    }
}

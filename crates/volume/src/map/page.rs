//! The pages of a map: leaves with an entry for each block, and nodes with an entry for each leaf.
//!
//! Pages are shared by reference count and copied when they are changed (copy-on-write), so a map
//! at one moment costs one reference per node. A page that is unchanged on disk knows its address
//! there, its *location*. A copy that is to be changed has none.
//!
//! Nodes are always in memory. The contents of a leaf are read on demand, and evicted when memory
//! is short and the leaf has a location: see [`super::Cache`].
//!
//! A leaf has a *birth* epoch: the number of copies of maps (snapshots, clones, roll-backs) that
//! had been made when the leaf was made. A leaf born after the last copy of its map belongs to that
//! map alone. So do its *fresh* blocks, those written after its birth: when one is overwritten, its
//! old contents are garbage. Other blocks may be shared.

use std::sync::{Arc, OnceLock};

use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;
use blockyard_volume_format::bytes::{put_u64, u64_at};
use blockyard_volume_format::entry::{ENTRY_BYTES, Entry};
use blockyard_volume_format::{FAN, PAGE_BYTES};

const _: () = assert!(FAN * ENTRY_BYTES == PAGE_BYTES, "a page is full of entries");

/// Flag in the entry of a fresh block.
const FRESH: u64 = 1 << 52;

/// Position of a leaf's birth in its node's entry.
const BIRTH_SHIFT: u32 = 40;

/// The largest birth that can be stored; later births are equal to it.
pub const BIRTH_MAX: u32 = (1 << 23) - 1;

/// The contents of a leaf.
#[derive(Clone, Debug)]
pub struct Page {
    entries: [Entry; FAN],
    fresh: [u64; FAN / 64],
}

impl Default for Page {
    fn default() -> Page {
        Page { entries: [Entry::HOLE; FAN], fresh: [0; FAN / 64] }
    }
}

impl Page {
    /// The entries of the leaf's blocks.
    pub fn entries(&self) -> &[Entry; FAN] {
        &self.entries
    }

    /// The replacement of a leaf that has rotted: none of its blocks can be read.
    pub(crate) fn lost(location: Entry) -> Page {
        Page { entries: [Entry::lost(location.crc()); FAN], ..Page::default() }
    }

    /// The blocks that are stored.
    pub fn stored(&self) -> StoredBlocks {
        let is_there = |entry: &&Entry| !entry.is_hole() && !entry.is_lost();
        let add = |all: StoredBlocks, entry: &Entry| StoredBlocks {
            blocks: all.blocks + 1,
            bytes: all.bytes + entry.stored_bytes(),
        };
        self.entries.iter().filter(is_there).fold(StoredBlocks::default(), add)
    }

    /// Whether a block was written after the birth of its leaf.
    pub fn is_fresh(&self, at: usize) -> bool {
        self.fresh[at / 64] >> (at % 64) & 1 == 1
    }

    /// Number of fresh blocks.
    fn fresh_count(&self) -> u16 {
        self.fresh.iter().map(|word| word.count_ones() as u16).sum()
    }

    /// Sets an entry, and whether its block is fresh.
    pub fn set(&mut self, at: usize, entry: Entry, is_fresh: bool) {
        self.entries[at] = entry;
        let bit = 1 << (at % 64);
        if is_fresh && !entry.is_hole() {
            self.fresh[at / 64] |= bit;
        } else {
            self.fresh[at / 64] &= !bit;
        }
    }

    /// Encodes the page.
    pub fn print(&self, page: &mut [u8]) {
        print(&self.entries, page);
        for at in (0..FAN).filter(|at| self.is_fresh(*at)) {
            let place = at * ENTRY_BYTES;
            put_u64(page, place, u64_at(page, place) | FRESH);
        }
    }

    /// Parses a page; `None` if an entry is invalid.
    pub fn parse(bytes: &[u8]) -> Option<Page> {
        let mut page = Page::default();
        for (at, bytes) in bytes.chunks_exact(ENTRY_BYTES).take(FAN).enumerate() {
            let word = u64_at(bytes, 0);
            let is_fresh = word & FRESH != 0;
            let entry = Entry::of_words(word & !FRESH, u64_at(bytes, 8))?;
            if is_fresh && entry.is_hole() {
                return None;
            }
            page.set(at, entry, is_fresh);
        }
        Some(page)
    }
}

/// The stored blocks of a leaf: those that are neither zeros nor lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredBlocks {
    /// Number of blocks.
    pub blocks: u32,
    /// Bytes of these blocks as stored: 32 MiB at most.
    pub bytes: u32,
}

/// The part of a leaf that is in memory.
#[derive(Debug, Default)]
struct Content {
    page: Option<Arc<Page>>,
    /// Number of fresh blocks, if the leaf was in memory before.
    fresh: Option<u16>,
    /// The stored blocks, if they were counted.
    stored: Option<StoredBlocks>,
    /// The leaf was used since the cache examined it last.
    used: bool,
    /// The leaf's place on disk will soon be reused, so the contents stay in memory.
    pinned: bool,
}

/// The result of trying to evict a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evicted {
    /// The contents are no longer in memory, or the leaf does not belong to the cache.
    Gone,
    /// The leaf was used since the last try, and stays.
    Used,
}

/// A leaf, whose contents may be on disk only.
#[derive(Debug)]
pub struct Leaf {
    content: SleepLock<Content, { ranks::LEAF }>,
    birth: u32,
    /// Number of checkpoints that had begun when the leaf was last changed.
    round: u64,
    location: OnceLock<Entry>,
}

impl Leaf {
    /// Makes a leaf in memory.
    pub fn new(page: Arc<Page>, birth: u32) -> Leaf {
        let content =
            SleepLock::new(Content { page: Some(page), used: true, ..Content::default() });
        Leaf { content, birth: birth.min(BIRTH_MAX), round: 0, location: OnceLock::new() }
    }

    /// Makes a leaf that is on disk only.
    pub fn at(location: Entry, birth: u32) -> Leaf {
        let content = SleepLock::new(Content::default());
        Leaf { content, birth, round: 0, location: OnceLock::from(location) }
    }

    /// The number of copies of maps that had been made when the leaf was made.
    pub fn birth(&self) -> u32 {
        self.birth
    }

    /// The contents, if they are in memory.
    pub fn page(&self) -> Option<Arc<Page>> {
        self.content.with(|content| {
            content.used = true;
            content.page.clone()
        })
    }

    /// An entry, if the contents are in memory.
    #[inline]
    pub fn entry(&self, at: usize) -> Option<Entry> {
        self.content.with(|content| {
            content.used = true;
            content.page.as_ref().map(|page| page.entries[at])
        })
    }

    /// Whether the contents are in memory.
    pub fn is_resident(&self) -> bool {
        self.content.with(|content| content.page.is_some())
    }

    /// Number of fresh blocks, if known.
    pub(crate) fn fresh_count(&self) -> Option<u16> {
        let known = |content: &mut Content| match &content.page {
            Some(page) => Some(page.fresh_count()),
            None => content.fresh,
        };
        self.content.with(known)
    }

    /// Notes the number of fresh blocks, when the contents were read without caching them.
    pub(crate) fn note_fresh(&self, page: &Page) {
        self.content.with(|content| content.fresh = Some(page.fresh_count()));
    }

    /// The stored blocks, if they were counted since the leaf changed.
    pub fn stored(&self) -> Option<StoredBlocks> {
        self.content.with(|content| content.stored)
    }

    /// Keeps the number of stored blocks of `page`, which has the contents of the leaf.
    pub fn note_stored(&self, page: &Page) -> StoredBlocks {
        let stored = page.stored();
        self.content.with(|content| content.stored = Some(stored));
        stored
    }

    /// Stores contents that were read; returns whether there were none before.
    pub(crate) fn fill(&self, page: &Arc<Page>) -> bool {
        self.content.with(|content| {
            content.used = true;
            let is_news = content.page.is_none();
            content.page.get_or_insert_with(|| Arc::clone(page));
            is_news
        })
    }

    /// Keeps the contents in memory permanently, because the leaf's place on disk was given up and
    /// will be reused while readers may still hold this leaf.
    pub(crate) fn pin(&self, page: &Arc<Page>) {
        self.content.with(|content| {
            content.page.get_or_insert_with(|| Arc::clone(page));
            content.pinned = true;
        });
    }

    /// Drops the contents, unless the leaf was used since the last try, is pinned, or is not on
    /// disk.
    pub(crate) fn evict(&self) -> Evicted {
        if self.location().is_none() {
            return Evicted::Gone;
        }
        let dropped = self.content.with(|content| match std::mem::take(&mut content.used) {
            _ if content.pinned => Ok(None),
            true => Err(Evicted::Used),
            false => {
                let page = content.page.take();
                content.fresh = page.as_ref().map_or(content.fresh, |it| Some(it.fresh_count()));
                Ok(page)
            }
        });
        match dropped {
            Ok(_) => Evicted::Gone,
            Err(used) => used,
        }
    }

    /// A copy that is to be changed. With a new birth it has no fresh blocks.
    fn copy(&self, mut page: Arc<Page>, born_now: Option<u32>, round: u64) -> Leaf {
        if born_now.is_some() {
            Arc::make_mut(&mut page).fresh = [0; FAN / 64];
        }
        Leaf { round, ..Leaf::new(page, born_now.unwrap_or(self.birth)) }
    }

    /// A copy without a location, with these contents, that counts as changed in this round.
    pub(crate) fn twin(&self, page: &Arc<Page>, round: u64) -> Leaf {
        self.copy(Arc::clone(page), None, round)
    }

    /// Whether the leaf was changed in this round, so that the next checkpoint must write it and
    /// counts it.
    pub(crate) fn is_dirty(&self, round: u64) -> bool {
        self.location().is_none() && self.round == round
    }

    /// Changes the contents, which must be in memory.
    pub(crate) fn change<R>(&mut self, change: impl FnOnce(&mut Page) -> R) -> R {
        self.location.take();
        self.content.with(|content| {
            content.stored = None;
            let page = content.page.as_mut().expect("it was brought into memory to be changed");
            change(Arc::make_mut(page))
        })
    }

    /// The address on disk, if the leaf is there.
    pub fn location(&self) -> Option<Entry> {
        self.location.get().copied()
    }

    /// Sets the address at which a checkpoint wrote the leaf.
    pub fn settle(&self, location: Entry) {
        _ = self.location.set(location);
    }
}

/// Leaves of a node are shared in parts of this length. A copy of a node in which one leaf changes
/// then costs a reference for each part, and one for each leaf of one part.
const PART: usize = 16;
const PARTS: usize = FAN / PART;

type Part = [Option<Arc<Leaf>>; PART];

/// A node, which names up to 256 leaves.
#[derive(Debug, Default)]
pub struct Node {
    parts: [Option<Arc<Part>>; PARTS],
    /// Number of leaves.
    count: u16,
    /// Number of checkpoints that had begun when the node was last changed.
    round: u64,
    location: OnceLock<Entry>,
}

/// A copy that is to be changed has no location.
impl Clone for Node {
    fn clone(&self) -> Node {
        let Node { count, round, .. } = *self;
        Node { parts: self.parts.clone(), count, round, location: OnceLock::new() }
    }
}

/// Decides whether a map owns a leaf that is to be changed.
#[derive(Clone, Copy, Debug)]
pub struct Generation {
    /// The number of copies of maps that had been made when this map was last copied.
    pub copied: u32,
    /// The birth epoch of leaves made now.
    pub now: u32,
    /// Number of checkpoints that have begun.
    pub round: u64,
}

impl Generation {
    /// Whether a leaf belongs to this map alone.
    pub fn owns(&self, leaf: &Leaf) -> bool {
        leaf.birth > self.copied
    }
}

impl Node {
    /// A leaf, if any of its blocks exists.
    pub fn leaf(&self, at: usize) -> Option<&Arc<Leaf>> {
        self.parts[at / PART].as_ref()?[at % PART].as_ref()
    }

    /// The leaves, each with its place in the node.
    pub fn leaves(&self) -> impl Iterator<Item = (usize, &Arc<Leaf>)> {
        let parts = (0..).step_by(PART).zip(&self.parts);
        let parts = parts.filter_map(|(first, part)| Some((first, part.as_ref()?)));
        let leaves = parts.flat_map(|(first, part)| (first..).zip(part.iter()));
        leaves.filter_map(|(at, leaf)| Some((at, leaf.as_ref()?)))
    }

    /// The slot of a leaf, in a part that this node alone has.
    fn slot(&mut self, at: usize) -> &mut Option<Arc<Leaf>> {
        &mut Arc::make_mut(self.parts[at / PART].get_or_insert_default())[at % PART]
    }

    /// Number of leaves.
    pub(crate) fn count(&self) -> u64 {
        self.count.into()
    }

    /// Makes a leaf this map's own, copying it if needed, so that it can be changed. Returns
    /// whether that adds a page for the next checkpoint; `None` if the contents are not in memory.
    pub(crate) fn own(&mut self, at: usize, stamp: Generation) -> Option<bool> {
        let slot = self.slot(at);
        let (mut is_news, mut more) = (true, 0);
        match slot {
            None => {
                let leaf = Leaf::new(Arc::default(), stamp.now);
                *slot = Some(Arc::new(Leaf { round: stamp.round, ..leaf }));
                more = 1;
            }
            Some(leaf) if !stamp.owns(leaf) => {
                let page = leaf.page()?;
                *leaf = Arc::new(leaf.copy(page, Some(stamp.now), stamp.round));
            }
            Some(leaf) => {
                is_news = !leaf.is_dirty(stamp.round);
                // A checkpoint, the cache or cleaning holds a reference to the leaf.
                if is_news || Arc::get_mut(leaf).is_none() {
                    let page = leaf.page()?;
                    *leaf = Arc::new(leaf.copy(page, None, stamp.round));
                }
            }
        }
        self.count += more;
        self.location.take();
        Some(is_news)
    }

    /// The leaf that [`Node::own`] made this map's own.
    pub(crate) fn owned(&mut self, at: usize) -> &mut Leaf {
        let leaf = self.slot(at).as_mut().and_then(Arc::get_mut);
        leaf.expect("it was made this map's just now")
    }

    /// Sets a leaf.
    pub fn put(&mut self, at: usize, leaf: Arc<Leaf>) {
        self.location.take();
        let old = self.slot(at).replace(leaf);
        self.count += u16::from(old.is_none());
    }

    /// Removes a leaf.
    pub fn remove(&mut self, at: usize) {
        if self.leaf(at).is_some() {
            self.slot(at).take();
            self.count -= 1;
            self.location.take();
        }
    }

    /// The address on disk, if the node is there.
    pub fn location(&self) -> Option<Entry> {
        self.location.get().copied()
    }

    /// Sets the address at which a checkpoint wrote the node.
    pub fn settle(&self, location: Entry) {
        _ = self.location.set(location);
    }

    /// Whether the node was changed in this round, see [`Leaf::is_dirty`].
    pub(crate) fn is_dirty(&self, round: u64) -> bool {
        self.location().is_none() && self.round == round
    }

    /// Marks the node as changed in this round.
    pub(crate) fn soil(&mut self, round: u64) {
        self.location.take();
        self.round = round;
    }

    /// Encodes the page; `location` gives the address of each leaf.
    pub fn print(&self, page: &mut [u8], location: impl Fn(&Arc<Leaf>) -> Entry) {
        page.fill(0);
        for (at, leaf) in self.leaves() {
            let bytes = &mut page[at * ENTRY_BYTES..][..ENTRY_BYTES];
            print_leaf_home(location(leaf), leaf.birth, bytes);
        }
    }
}

/// Encodes the address and birth of a leaf. The birth takes the place of length and codec, which
/// are the same for all pages.
fn print_leaf_home(location: Entry, birth: u32, bytes: &mut [u8]) {
    location.print(bytes);
    let address = u64_at(bytes, 0) & (1 << 63 | ((1 << BIRTH_SHIFT) - 1));
    put_u64(bytes, 0, address | u64::from(birth) << BIRTH_SHIFT);
}

fn print(entries: &[Entry; FAN], page: &mut [u8]) {
    for (entry, bytes) in entries.iter().zip(page.chunks_exact_mut(ENTRY_BYTES)) {
        entry.print(bytes);
    }
}

/// Parses a node: the addresses and births of its leaves; `None` if one is invalid.
pub fn parse_node(page: &[u8]) -> Option<Vec<Option<(Entry, u32)>>> {
    let parts = page.chunks_exact(ENTRY_BYTES).take(FAN);
    parts
        .map(|bytes| {
            let (word, crc) = (u64_at(bytes, 0), u64_at(bytes, 8));
            if word == 0 && crc == 0 {
                return Some(None);
            }
            let birth = (word >> BIRTH_SHIFT) as u32 & BIRTH_MAX;
            let word = word & !(u64::from(BIRTH_MAX) << BIRTH_SHIFT);
            let len = (PAGE_BYTES as u64 / blockyard_volume_format::UNIT - 1) << BIRTH_SHIFT;
            let location = Entry::of_words(word | len, crc)?;
            (!location.is_hole()).then_some(Some((location, birth)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_volume_format::entry::Codec;

    const STAMP: Generation = Generation { copied: 0, now: 1, round: 1 };

    fn put(node: &mut Node, at: usize, block: usize, entry: Entry, stamp: Generation) {
        node.own(at, stamp).unwrap();
        node.owned(at).change(|page| page.set(block, entry, true));
    }

    #[test]
    fn a_changed_page_has_no_home_and_its_copy_neither() {
        let location = Entry::new(8192, 4096, Codec::Raw, 1);
        let mut node = Node::default();
        put(&mut node, 3, 7, location, STAMP);
        node.leaf(3).unwrap().settle(location);
        node.settle(location);
        let copy = node.clone();
        assert_eq!((node.location(), copy.location()), (Some(location), None));
        assert_eq!(copy.leaf(3).unwrap().location(), Some(location), "the leaf is shared");
        put(&mut node, 3, 8, location, STAMP);
        assert_eq!((node.location(), node.leaf(3).unwrap().location()), (None, None));
        assert_eq!(copy.leaf(3).unwrap().location(), Some(location));
    }

    #[test]
    fn a_page_is_fresh_only_for_its_generation() {
        let entry = Entry::new(8192, 4096, Codec::Raw, 1);
        let mut node = Node::default();
        put(&mut node, 0, 7, entry, STAMP);
        assert!(node.leaf(0).unwrap().page().unwrap().is_fresh(7));
        let snapshot = node.clone();
        put(&mut node, 0, 8, entry, Generation { copied: 1, now: 2, round: 1 });
        let page = node.leaf(0).unwrap().page().unwrap();
        assert!(!page.is_fresh(7) && page.is_fresh(8));
        assert_eq!(node.leaf(0).unwrap().birth(), 2);
        assert!(snapshot.leaf(0).unwrap().page().unwrap().is_fresh(7));
    }

    #[test]
    fn printing_and_parsing_round_trip() {
        let location = Entry::new(8192, 4096, Codec::Raw, 1);
        let mut page = Page::default();
        page.set(255, Entry::new(512, 1024, Codec::Lz4, 2), true);
        page.set(3, Entry::new(1024, 1024, Codec::Raw, 3), false);
        let mut bytes = [0; PAGE_BYTES];
        page.print(&mut bytes);
        let read = Page::parse(&bytes).unwrap();
        assert_eq!((read.entries, read.fresh), (page.entries, page.fresh));
        let mut node = Node::default();
        node.put(9, Arc::new(Leaf::at(location, 77)));
        let mut locations = [0; PAGE_BYTES];
        node.print(&mut locations, |leaf| leaf.location().unwrap());
        let read = parse_node(&locations).unwrap();
        assert_eq!((read[9], read[8]), (Some((location, 77)), None));
        bytes[0] = 1;
        locations[0] = 1;
        assert!(Page::parse(&bytes).is_none() && parse_node(&locations).is_none());
    }

    #[test]
    fn a_leaf_with_a_home_can_be_dropped_and_filled() {
        let leaf = Leaf::new(Arc::default(), 1);
        leaf.page();
        assert_eq!(leaf.evict(), Evicted::Gone, "not the cache's");
        assert!(leaf.is_resident());
        leaf.settle(Entry::new(8192, 4096, Codec::Raw, 1));
        assert_eq!((leaf.evict(), leaf.evict()), (Evicted::Used, Evicted::Gone));
        assert!(leaf.page().is_none() && leaf.fill(&Arc::default()) && leaf.is_resident());
    }
}

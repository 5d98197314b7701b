//! The pages of a map: leaves with an entry for each block, and nodes with one for each leaf.
//!
//! Pages are shared by reference count and copied when they are changed, so that a map at one
//! moment costs a reference for each node. A page knows where it is on disk, as long as it is what
//! is there: its *home*, which a copy does not have.
//!
//! Nodes are in memory. What a leaf contains is read when somebody looks, and dropped again where
//! memory is short, as long as the leaf has a home: see [`super::cache`].
//!
//! A leaf knows its *birth*: how many copies of maps (snapshots, clones, roll-backs) had been made
//! when it began. One that was born behind the last copy of its map belongs to that map alone, and
//! so do its *fresh* blocks, which were written behind its birth: when one of them is written
//! again, nobody needs what it was. Of other blocks that cannot be said.

use std::sync::{Arc, OnceLock};

use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;

use crate::bytes::{put_u64, u64_at};
use crate::format::entry::{ENTRY_BYTES, Entry};
use crate::format::{FAN, PAGE_BYTES};

const _: () = assert!(FAN * ENTRY_BYTES == PAGE_BYTES, "a page is full of entries");

/// Set in the entry of a fresh block.
const FRESH: u64 = 1 << 52;

/// Where the birth of a leaf stands in the entry of its node.
const BIRTH_SHIFT: u32 = 40;

/// The last birth that can be told from others.
pub const BIRTH_MAX: u32 = (1 << 23) - 1;

/// What a leaf contains.
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
    /// The entries of its blocks.
    pub fn entries(&self) -> &[Entry; FAN] {
        &self.entries
    }

    /// What stands in for a page that has rotted: none of its blocks can be had.
    pub(crate) fn lost(home: Entry) -> Page {
        Page { entries: [Entry::lost(home.crc()); FAN], ..Page::default() }
    }

    /// Whether a block was written behind the birth of its leaf.
    pub fn is_fresh(&self, at: usize) -> bool {
        self.fresh[at / 64] >> (at % 64) & 1 == 1
    }

    /// How many of its blocks are fresh.
    fn fresh_count(&self) -> u16 {
        self.fresh.iter().map(|word| word.count_ones() as u16).sum()
    }

    /// Changes an entry, and whether it is fresh.
    pub fn set(&mut self, at: usize, entry: Entry, is_fresh: bool) {
        self.entries[at] = entry;
        let bit = 1 << (at % 64);
        if is_fresh && !entry.is_hole() {
            self.fresh[at / 64] |= bit;
        } else {
            self.fresh[at / 64] &= !bit;
        }
    }

    /// Writes it.
    pub fn print(&self, page: &mut [u8]) {
        print(&self.entries, page);
        for at in (0..FAN).filter(|at| self.is_fresh(*at)) {
            let place = at * ENTRY_BYTES;
            put_u64(page, place, u64_at(page, place) | FRESH);
        }
    }

    /// Reads it; `None` if an entry is impossible.
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

/// What of a leaf is in memory.
#[derive(Debug, Default)]
struct Content {
    page: Option<Arc<Page>>,
    /// How many of its blocks are fresh, if it was in memory before.
    fresh: Option<u16>,
    /// Somebody has looked since the cache did.
    used: bool,
    /// Its place on disk is not its own for long: it stays in memory.
    pinned: bool,
}

/// What became of a leaf that the cache wanted to drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evicted {
    /// Its contents are not in memory any more, or it is none of the cache's.
    Gone,
    /// Somebody has looked: later.
    Used,
}

/// A leaf.
#[derive(Debug)]
pub struct Leaf {
    content: SleepLock<Content, { ranks::LEAF }>,
    birth: u32,
    /// How many checkpoints had begun when it was changed last.
    round: u64,
    home: OnceLock<Entry>,
}

impl Leaf {
    /// A leaf in memory.
    pub fn new(page: Arc<Page>, birth: u32) -> Leaf {
        let content =
            SleepLock::new(Content { page: Some(page), used: true, ..Content::default() });
        Leaf { content, birth: birth.min(BIRTH_MAX), round: 0, home: OnceLock::new() }
    }

    /// A leaf on disk.
    pub fn at(home: Entry, birth: u32) -> Leaf {
        let content = SleepLock::new(Content::default());
        Leaf { content, birth, round: 0, home: OnceLock::from(home) }
    }

    /// How many copies of maps had been made when it began.
    pub fn birth(&self) -> u32 {
        self.birth
    }

    /// What it contains, if that is in memory.
    pub fn page(&self) -> Option<Arc<Page>> {
        self.content.with(|content| {
            content.used = true;
            content.page.clone()
        })
    }

    /// An entry, if that is in memory.
    #[inline]
    pub fn entry(&self, at: usize) -> Option<Entry> {
        self.content.with(|content| {
            content.used = true;
            content.page.as_ref().map(|page| page.entries[at])
        })
    }

    /// Whether it is in memory.
    pub fn is_here(&self) -> bool {
        self.content.with(|content| content.page.is_some())
    }

    /// How many of its blocks are fresh, if that is known.
    pub(crate) fn fresh_count(&self) -> Option<u16> {
        let known = |content: &mut Content| match &content.page {
            Some(page) => Some(page.fresh_count()),
            None => content.fresh,
        };
        self.content.with(known)
    }

    /// What it contains was read by somebody who does not keep it: how many are fresh is known.
    pub(crate) fn note_fresh(&self, page: &Page) {
        self.content.with(|content| content.fresh = Some(page.fresh_count()));
    }

    /// What it contains was read; says whether it was not there.
    pub(crate) fn fill(&self, page: &Arc<Page>) -> bool {
        self.content.with(|content| {
            content.used = true;
            let is_news = content.page.is_none();
            content.page.get_or_insert_with(|| Arc::clone(page));
            is_news
        })
    }

    /// It is given up, and whoever still has it must not need its place on disk, which others will
    /// have: it stays in memory.
    pub(crate) fn pin(&self, page: &Arc<Page>) {
        self.content.with(|content| {
            content.page.get_or_insert_with(|| Arc::clone(page));
            content.pinned = true;
        });
    }

    /// Drops what it contains, unless somebody has looked since the last time, or nobody else has
    /// it.
    pub(crate) fn evict(&self) -> Evicted {
        if self.home().is_none() {
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

    /// A copy that is about to be changed. Born now, it has no fresh blocks.
    fn copy(&self, mut page: Arc<Page>, born_now: Option<u32>, round: u64) -> Leaf {
        if born_now.is_some() {
            Arc::make_mut(&mut page).fresh = [0; FAN / 64];
        }
        Leaf { round, ..Leaf::new(page, born_now.unwrap_or(self.birth)) }
    }

    /// The same without a home, changed in this round, of which this is what it contains.
    pub(crate) fn twin(&self, page: &Arc<Page>, round: u64) -> Leaf {
        self.copy(Arc::clone(page), None, round)
    }

    /// Whether it was changed in this round, and so is among the pages that the next checkpoint has
    /// to write.
    pub(crate) fn is_dirty(&self, round: u64) -> bool {
        self.home().is_none() && self.round == round
    }

    /// Changes what it contains, which is in memory.
    pub(crate) fn change<R>(&mut self, change: impl FnOnce(&mut Page) -> R) -> R {
        self.home.take();
        self.content.with(|content| {
            let page = content.page.as_mut().expect("it was brought into memory to be changed");
            change(Arc::make_mut(page))
        })
    }

    /// Where it is on disk, if it is.
    pub fn home(&self) -> Option<Entry> {
        self.home.get().copied()
    }

    /// It is on disk now.
    pub fn settle(&self, home: Entry) {
        _ = self.home.set(home);
    }
}

/// How many leaves of a node are shared as one, and how many such parts it has: a copy of a node in
/// which one leaf is to be changed costs a reference for each part and each leaf of one of them.
const PART: usize = 16;
const PARTS: usize = FAN / PART;

type Part = [Option<Arc<Leaf>>; PART];

/// A node.
#[derive(Debug, Default)]
pub struct Node {
    parts: [Option<Arc<Part>>; PARTS],
    /// How many leaves there are.
    count: u16,
    /// As a leaf's.
    round: u64,
    home: OnceLock<Entry>,
}

/// A copy is about to be changed.
impl Clone for Node {
    fn clone(&self) -> Node {
        let Node { count, round, .. } = *self;
        Node { parts: self.parts.clone(), count, round, home: OnceLock::new() }
    }
}

/// Whose a leaf is that is to be changed.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    /// How many copies of maps had been made when this one was copied last.
    pub copied: u32,
    /// How many have been made by now.
    pub now: u32,
    /// How many checkpoints have begun.
    pub round: u64,
}

impl Stamp {
    /// Whether a leaf belongs to this map alone.
    pub fn owns(&self, leaf: &Leaf) -> bool {
        leaf.birth > self.copied
    }
}

impl Node {
    /// A leaf, if it has any blocks.
    pub fn leaf(&self, at: usize) -> Option<&Arc<Leaf>> {
        self.parts[at / PART].as_ref()?[at % PART].as_ref()
    }

    /// Its leaves, each with its place.
    pub fn leaves(&self) -> impl Iterator<Item = (usize, &Arc<Leaf>)> {
        let parts = (0..).step_by(PART).zip(&self.parts);
        let parts = parts.filter_map(|(first, part)| Some((first, part.as_ref()?)));
        let leaves = parts.flat_map(|(first, part)| (first..).zip(part.iter()));
        leaves.filter_map(|(at, leaf)| Some((at, leaf.as_ref()?)))
    }

    /// Where a leaf is or will be, in a part that is this node's alone.
    fn slot(&mut self, at: usize) -> &mut Option<Arc<Leaf>> {
        &mut Arc::make_mut(self.parts[at / PART].get_or_insert_default())[at % PART]
    }

    /// How many leaves it has.
    pub(crate) fn count(&self) -> u64 {
        self.count.into()
    }

    /// Makes a leaf this map's alone, so that it can be changed; says whether that makes one more
    /// page for the next checkpoint. `None` if what it contains is not in memory.
    pub(crate) fn own(&mut self, at: usize, stamp: Stamp) -> Option<bool> {
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
                // A checkpoint looks at it, or the cache, or cleaning.
                if is_news || Arc::get_mut(leaf).is_none() {
                    let page = leaf.page()?;
                    *leaf = Arc::new(leaf.copy(page, None, stamp.round));
                }
            }
        }
        self.count += more;
        self.home.take();
        Some(is_news)
    }

    /// The leaf that [`Node::own`] has made this map's.
    pub(crate) fn owned(&mut self, at: usize) -> &mut Leaf {
        let leaf = self.slot(at).as_mut().and_then(Arc::get_mut);
        leaf.expect("it was made this map's just now")
    }

    /// Puts a leaf in.
    pub fn put(&mut self, at: usize, leaf: Arc<Leaf>) {
        self.home.take();
        let old = self.slot(at).replace(leaf);
        self.count += u16::from(old.is_none());
    }

    /// Takes a leaf out.
    pub fn remove(&mut self, at: usize) {
        if self.leaf(at).is_some() {
            self.slot(at).take();
            self.count -= 1;
            self.home.take();
        }
    }

    /// Where it is on disk, if it is.
    pub fn home(&self) -> Option<Entry> {
        self.home.get().copied()
    }

    /// It is on disk now.
    pub fn settle(&self, home: Entry) {
        _ = self.home.set(home);
    }

    /// As [`Leaf::is_dirty`].
    pub(crate) fn is_dirty(&self, round: u64) -> bool {
        self.home().is_none() && self.round == round
    }

    /// It is changed in this round.
    pub(crate) fn soil(&mut self, round: u64) {
        self.home.take();
        self.round = round;
    }

    /// Writes the page; `home` says where each leaf is.
    pub fn print(&self, page: &mut [u8], home: impl Fn(&Arc<Leaf>) -> Entry) {
        page.fill(0);
        for (at, leaf) in self.leaves() {
            let bytes = &mut page[at * ENTRY_BYTES..][..ENTRY_BYTES];
            print_leaf_home(home(leaf), leaf.birth, bytes);
        }
    }
}

/// Writes where a leaf is, and its birth, which takes the place of what is the same for all pages.
fn print_leaf_home(home: Entry, birth: u32, bytes: &mut [u8]) {
    home.print(bytes);
    let address = u64_at(bytes, 0) & (1 << 63 | ((1 << BIRTH_SHIFT) - 1));
    put_u64(bytes, 0, address | u64::from(birth) << BIRTH_SHIFT);
}

fn print(entries: &[Entry; FAN], page: &mut [u8]) {
    for (entry, bytes) in entries.iter().zip(page.chunks_exact_mut(ENTRY_BYTES)) {
        entry.print(bytes);
    }
}

/// Where the leaves of a node are, with their births; `None` if one is impossible.
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
            let len = (PAGE_BYTES as u64 / crate::format::UNIT - 1) << BIRTH_SHIFT;
            let home = Entry::of_words(word | len, crc)?;
            (!home.is_hole()).then_some(Some((home, birth)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::entry::Codec;

    const STAMP: Stamp = Stamp { copied: 0, now: 1, round: 1 };

    fn put(node: &mut Node, at: usize, block: usize, entry: Entry, stamp: Stamp) {
        node.own(at, stamp).unwrap();
        node.owned(at).change(|page| page.set(block, entry, true));
    }

    #[test]
    fn a_changed_page_has_no_home_and_its_copy_neither() {
        let home = Entry::new(8192, 4096, Codec::Raw, 1);
        let mut node = Node::default();
        put(&mut node, 3, 7, home, STAMP);
        node.leaf(3).unwrap().settle(home);
        node.settle(home);
        let copy = node.clone();
        assert_eq!((node.home(), copy.home()), (Some(home), None));
        assert_eq!(copy.leaf(3).unwrap().home(), Some(home), "the leaf is shared");
        put(&mut node, 3, 8, home, STAMP);
        assert_eq!((node.home(), node.leaf(3).unwrap().home()), (None, None));
        assert_eq!(copy.leaf(3).unwrap().home(), Some(home));
    }

    #[test]
    fn what_was_there_before_a_copy_is_not_fresh() {
        let entry = Entry::new(8192, 4096, Codec::Raw, 1);
        let mut node = Node::default();
        put(&mut node, 0, 7, entry, STAMP);
        assert!(node.leaf(0).unwrap().page().unwrap().is_fresh(7));
        let snapshot = node.clone();
        put(&mut node, 0, 8, entry, Stamp { copied: 1, now: 2, round: 1 });
        let page = node.leaf(0).unwrap().page().unwrap();
        assert!(!page.is_fresh(7) && page.is_fresh(8));
        assert_eq!(node.leaf(0).unwrap().birth(), 2);
        assert!(snapshot.leaf(0).unwrap().page().unwrap().is_fresh(7));
    }

    #[test]
    fn what_is_printed_is_read_back() {
        let home = Entry::new(8192, 4096, Codec::Raw, 1);
        let mut page = Page::default();
        page.set(255, Entry::new(512, 1024, Codec::Lz4, 2), true);
        page.set(3, Entry::new(1024, 1024, Codec::Raw, 3), false);
        let mut bytes = [0; PAGE_BYTES];
        page.print(&mut bytes);
        let read = Page::parse(&bytes).unwrap();
        assert_eq!((read.entries, read.fresh), (page.entries, page.fresh));
        let mut node = Node::default();
        node.put(9, Arc::new(Leaf::at(home, 77)));
        let mut homes = [0; PAGE_BYTES];
        node.print(&mut homes, |leaf| leaf.home().unwrap());
        let read = parse_node(&homes).unwrap();
        assert_eq!((read[9], read[8]), (Some((home, 77)), None));
        bytes[0] = 1;
        homes[0] = 1;
        assert!(Page::parse(&bytes).is_none() && parse_node(&homes).is_none());
    }

    #[test]
    fn a_leaf_with_a_home_can_be_dropped_and_filled() {
        let leaf = Leaf::new(Arc::default(), 1);
        leaf.page();
        assert_eq!(leaf.evict(), Evicted::Gone, "not the cache's");
        assert!(leaf.is_here());
        leaf.settle(Entry::new(8192, 4096, Codec::Raw, 1));
        assert_eq!((leaf.evict(), leaf.evict()), (Evicted::Used, Evicted::Gone));
        assert!(leaf.page().is_none() && leaf.fill(&Arc::default()) && leaf.is_here());
    }
}

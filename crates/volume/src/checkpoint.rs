//! A checkpoint: the changed pages of all maps, the catalogue, and the superblock that names them.
//! What the log has before it needs not be read again.
//!
//! It works on maps as they were at one moment, beside the writes; see [`crate::map::page`].

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::ptr;
use std::sync::{Arc, PoisonError};

use crate::buffer::Buffer;
use crate::bytes::crc;
use crate::error::VolumeError;
use crate::format::catalogue::{self, Listed, Traits, Whole};
use crate::format::entry::{Codec, ENTRY_BYTES, Entry};
use crate::format::superblock::{FILE, LogPlace, SEGMENT_NONE, SLOT_BYTES, SLOTS, Superblock};
use crate::format::{FAN, PAGE_BYTES};
use crate::map::{self, Leaf, Node};
use crate::pool::Pool;
use crate::roots::{self, Contents, Roots};
use crate::segments::{Segments, Want};
use crate::store::{Directory, StoreFile};
use crate::thread::give_way;

/// What is written at once, in bytes.
const WRITE_BYTES: usize = 256 << 10;

/// What a map has in common with others.
#[derive(Clone, Copy, Debug)]
pub struct Copied {
    /// The number of the volume that all of them come from.
    pub family: u32,
    /// How many copies of maps had been made when this one was copied last.
    pub last: u32,
    /// Blocks that are its alone, at least.
    pub owned: u64,
}

/// The maps of a pool at one moment, and the end of the log then.
#[derive(Debug)]
pub struct Frozen {
    /// Segments taken in this round or later are not looked at.
    pub round: u64,
    /// The end of the log.
    pub log: LogPlace,
    /// Of the pool as a whole.
    pub whole: Whole,
    /// The volumes and snapshots, each with the number of the last copy of its map.
    pub volumes: Vec<(Traits, Copied, Arc<map::Frozen>)>,
}

impl Frozen {
    /// Lets go of the maps, and of those of their pages that nobody else has.
    pub(crate) fn let_go(self) {
        let maps = self.volumes.into_iter().filter_map(|(.., map)| Arc::into_inner(map));
        for node in maps.flatten() {
            give_way();
            drop(node);
        }
    }
}

/// The segments that something needs, and how many bytes of it are there.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    bytes: Vec<u64>,
    segment_bytes: u64,
}

impl Marks {
    /// None, in segments of this length.
    pub fn new(segment_bytes: u32) -> Marks {
        Marks { bytes: Vec::new(), segment_bytes: segment_bytes.into() }
    }

    /// What an entry names is needed.
    pub fn entry(&mut self, entry: &Entry) {
        if !entry.is_hole() {
            self.segment((entry.address() / self.segment_bytes) as u32, entry.stored_bytes());
        }
    }

    /// A block is needed, unless it was lost.
    pub fn block(&mut self, entry: &Entry) {
        if !entry.is_lost() {
            self.entry(entry);
        }
    }

    /// So many bytes of a segment are needed.
    pub fn segment(&mut self, number: u32, bytes: u32) {
        let number = number as usize;
        if number >= self.bytes.len() {
            self.bytes.resize(number + 1, 0);
        }
        self.bytes[number] += u64::from(bytes);
    }

    /// How many bytes of a segment are needed.
    pub fn live_bytes(&self, number: u32) -> u64 {
        self.bytes.get(number as usize).copied().unwrap_or(0)
    }

    /// How many bytes of each segment are needed.
    pub fn into_bytes(self) -> Vec<u64> {
        self.bytes
    }

    /// Whether anything of a segment is needed.
    pub fn is_needed(&self, number: u32) -> bool {
        self.live_bytes(number) > 0
    }

    /// So many bytes of blocks count in each segment.
    pub fn blocks(&mut self, live: &[u64]) {
        for (number, bytes) in live.iter().enumerate().filter(|(_, bytes)| **bytes > 0) {
            if number >= self.bytes.len() {
                self.bytes.resize(number + 1, 0);
            }
            self.bytes[number] += bytes;
        }
    }

    /// The pages of maps; answers how many. What they share counts once.
    pub fn pages<'a>(&mut self, maps: impl Iterator<Item = &'a map::Frozen>) -> u64 {
        let (mut nodes, mut leaves) = (HashSet::new(), HashSet::new());
        for node in maps.flatten().flatten() {
            if !nodes.insert(ptr::from_ref::<Node>(node)) {
                continue;
            }
            give_way();
            node.home().iter().for_each(|home| self.entry(home));
            for (_, leaf) in node.leaves() {
                if leaves.insert(ptr::from_ref::<Leaf>(leaf)) {
                    leaf.home().iter().for_each(|home| self.entry(home));
                }
            }
        }
        (nodes.len() + leaves.len()) as u64
    }
}

/// The mark by which groups of a pool are told from those of another.
pub(crate) fn pool_mark<D: Directory>(pool: &Pool<D>) -> u64 {
    let superblock = pool.superblock.lock().unwrap_or_else(PoisonError::into_inner);
    mark_of(&superblock)
}

/// The same of a superblock.
pub(crate) fn mark_of(superblock: &Superblock) -> u64 {
    crate::bytes::u64_at(&superblock.id, 0)
}

/// Why there is no checkpoint.
enum Refused {
    NoSpace,
    Io(io::Error),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Refused {
        Refused::Io(error)
    }
}

/// Makes a checkpoint of maps whose blocks are durable; answers what it needs, if it is there.
pub fn run<D: Directory>(pool: &Pool<D>, frozen: &Frozen) -> Option<Marks> {
    let mut written = write(pool, frozen);
    // There is more room where the one before the last one is given up.
    if matches!(written, Err(Refused::NoSpace)) && repeat(pool) {
        written = write(pool, frozen);
    }
    pool.segments().end_round(written.is_ok());
    match written {
        Ok(marks) => {
            let LogPlace { segment, next, .. } = frozen.log;
            let pages = pool.page_place().map_or(SEGMENT_NONE, |(segment, _)| segment);
            let cold = pool.cold().map_or(SEGMENT_NONE, |cold| cold.segment);
            let is_open = |number| [segment, next, pages, cold].contains(&number);
            pool.segments().settle(frozen.round, |it| marks.is_needed(it) || is_open(it));
            pool.segments().unpin(frozen.round, is_open);
            Some(marks)
        }
        Err(Refused::NoSpace) => {
            tracing::warn!("{}: no space for a checkpoint", pool.segments().directory().title());
            None
        }
        Err(Refused::Io(error)) => {
            pool.poison_by(&format!("a checkpoint could not be written: {error}"));
            None
        }
    }
}

/// Lets both superblocks stand for the last checkpoint, so that what only the one before it needs
/// is free: where space is short. Says whether that frees anything. None is on its way.
pub fn repeat<D: Directory>(pool: &Pool<D>) -> bool {
    let frees = pool.segments().counts().idle > 0;
    if pool.is_poisoned() || (!frees && pool.segments().is_for_one()) {
        return false;
    }
    write_again(pool, 0) && frees
}

/// Writes a superblock that says that groups up to this number are durable, for the last
/// checkpoint; says whether it is durable. No thread may be writing a checkpoint.
pub(crate) fn state_durable<D: Directory>(pool: &Pool<D>, durable: u64) -> bool {
    !pool.is_poisoned() && write_again(pool, durable)
}

/// Writes the last checkpoint's superblock to the other slot too.
fn write_again<D: Directory>(pool: &Pool<D>, durable: u64) -> bool {
    let mut superblock = pool.superblock.lock().unwrap_or_else(PoisonError::into_inner);
    let sequence = superblock.sequence.saturating_add(1);
    let durable = superblock.durable.max(durable);
    let next = Superblock { sequence, durable, ..*superblock };
    if let Err(error) = write_superblock(pool.segments(), &next, Epochs::Of(next.epoch)) {
        pool.poison(&format!("a superblock could not be written: {error}"));
        return false;
    }
    *superblock = next;
    pool.segments().free_idle();
    true
}

fn write<D: Directory>(pool: &Pool<D>, frozen: &Frozen) -> Result<Marks, Refused> {
    let place = pool.page_place();
    let mut pages = Pages::new(pool);
    let (top, bytes) = match write_pages(frozen, &mut pages) {
        Ok(catalogue) => catalogue,
        Err(Refused::NoSpace) => {
            // Nothing durable and nothing in memory names what it has written.
            pages.taken.iter().for_each(|segment| pool.segments().put_back(*segment));
            pool.set_page_place(place);
            return Err(Refused::NoSpace);
        }
        Err(error) => return Err(error),
    };
    let roots = pages.finish()?;
    let mut marks = Marks::new(pool.segments().bytes());
    marks.blocks(&frozen.whole.live);
    let maps = frozen.volumes.iter().map(|(.., nodes)| &**nodes);
    let count = marks.pages(maps) + roots.count() as u64;
    roots.mark(&mut marks);
    pool.set_roots(roots);
    pool.segments().set_pages(count);
    // There is one checkpoint at a time; nobody has to wait for the sync of this one.
    let superblock = *pool.superblock.lock().unwrap_or_else(PoisonError::into_inner);
    let next = Superblock {
        sequence: superblock.sequence.saturating_add(1),
        log: frozen.log,
        durable: frozen.log.number.saturating_sub(1),
        catalogue: top,
        catalogue_bytes: bytes.len() as u64,
        catalogue_crc: crc(&bytes),
        ..superblock
    };
    write_superblock(pool.segments(), &next, Epochs::Of(next.epoch))?;
    // A log that was moved is named by no group: both slots have to say where it goes on.
    let next = match frozen.log.offset {
        0 => {
            let next = Superblock { sequence: next.sequence.saturating_add(1), ..next };
            write_superblock(pool.segments(), &next, Epochs::Of(next.epoch))?;
            next
        }
        _ => next,
    };
    *pool.superblock.lock().unwrap_or_else(PoisonError::into_inner) = next;
    Ok(marks)
}

/// Writes the pages that have changed, and the catalogue; answers what is at the top of that, and
/// its bytes.
fn write_pages<D: Directory>(
    frozen: &Frozen,
    pages: &mut Pages<'_, D>,
) -> Result<(Entry, Vec<u8>), Refused> {
    let mut listed = Vec::with_capacity(frozen.volumes.len());
    for (traits, copied, nodes) in &frozen.volumes {
        let roots = nodes.chunks(FAN).map(|nodes| pages.root(nodes));
        listed.push(Listed {
            traits: traits.clone(),
            family: copied.family,
            copied: copied.last,
            owned: copied.owned,
            roots: roots.collect::<Result<_, Refused>>()?,
        });
    }
    let bytes = catalogue::print(&frozen.whole, &listed);
    let top = pages.tree(&bytes)?;
    Ok((top, bytes))
}

/// The epochs that the slots of the superblock have if no other process has opened the pool.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Epochs {
    /// None later than this, which an opening has found: a power cut may have left older ones.
    UpTo(u64),
    /// This one in a slot at least, which this process has written to both, and none later.
    Of(u64),
}

/// Writes a superblock to its slot, durably, if the slots have these epochs.
///
/// # Errors
/// Also if another process has opened the pool, or an older superblock was put back.
pub(crate) fn write_superblock<D: Directory>(
    segments: &Segments<D>,
    superblock: &Superblock,
    epochs: Epochs,
) -> io::Result<()> {
    segments.directory().look()?;
    let file = segments.directory().open(FILE)?.ok_or(io::ErrorKind::NotFound)?;
    is_owned(&file, epochs)?;
    let memory = crate::buffer::Memory::new(SLOT_BYTES as u64);
    let mut bytes = memory.take_beyond(SLOT_BYTES);
    superblock.print(&mut bytes);
    file.write_at(superblock.slot(), &[&bytes])?;
    file.sync()
}

/// Checks the epochs of the slots of each copy. A slot that cannot be read says nothing. The locks
/// keep other processes out; this notices one that came in past them, and a superblock that was
/// restored.
fn is_owned<F: StoreFile>(file: &F, wanted: Epochs) -> io::Result<()> {
    let whole = SLOTS as usize * SLOT_BYTES;
    let mut bytes = crate::buffer::Memory::new(whole as u64).take_beyond(whole);
    for copy in file.copies().numbers() {
        if file.read_copy(copy, 0, &mut bytes).is_err() {
            continue;
        }
        let epochs = || bytes.chunks(SLOT_BYTES).flat_map(Superblock::parse).map(|it| it.epoch);
        let is_owned = match wanted {
            Epochs::UpTo(last) => epochs().all(|epoch| epoch <= last),
            Epochs::Of(own) => {
                epochs().all(|epoch| epoch <= own)
                    && (epochs().next().is_none() || epochs().any(|epoch| epoch == own))
            }
        };
        if !is_owned {
            return Err(io::Error::other(
                "the superblock is not the one that this process wrote: another process has opened \
                 the pool, or the superblock was restored",
            ));
        }
    }
    Ok(())
}

/// Writes pages into segments of their own, one behind the other.
struct Pages<'a, D: Directory> {
    pool: &'a Pool<D>,
    segment: Option<u32>,
    /// Where in the segment the buffer goes.
    offset: u32,
    buffer: Buffer,
    filled: usize,
    touched: BTreeSet<u32>,
    /// Segments that were free before.
    taken: Vec<u32>,
    /// Where pages will be found. They are told only when all of them are durable: after an error
    /// a page that is nowhere must not believe that it is.
    leaves: Homes<Leaf>,
    nodes: Homes<Node>,
    /// Roots and the pages of the catalogue, with those that were there before.
    roots: Roots,
}

/// Pages by address, which nobody else has while they are kept.
type Homes<T> = HashMap<*const T, (Arc<T>, Entry)>;

impl<'a, D: Directory> Pages<'a, D> {
    fn new(pool: &'a Pool<D>) -> Pages<'a, D> {
        let buffer = pool.memory().take_beyond(WRITE_BYTES);
        let place = pool.page_place();
        let (segment, offset) = place.map_or((None, 0), |(segment, at)| (Some(segment), at));
        // After an error nobody knows what is there.
        pool.set_page_place(None);
        let (leaves, nodes) = (HashMap::new(), HashMap::new());
        let touched = BTreeSet::new();
        Pages {
            pool,
            segment,
            offset,
            buffer,
            filled: 0,
            touched,
            taken: Vec::new(),
            leaves,
            nodes,
            roots: Roots::default(),
        }
    }

    /// Writes what is in the buffer.
    fn flush(&mut self) -> Result<(), Refused> {
        if let Some(segment) = self.segment
            && self.filled > 0
        {
            let address = self.pool.segments().address(segment, self.offset);
            self.pool.segments().write(address, &[&self.buffer[..self.filled]])?;
            self.touched.insert(segment);
            self.pool.meters().paged(self.filled as u64);
            self.offset += self.filled as u32;
            self.filled = 0;
        }
        Ok(())
    }

    /// Finds room for so many bytes in one segment.
    fn room(&mut self, len: usize) -> Result<(), Refused> {
        let bytes = self.pool.segments().bytes() as usize;
        if self.segment.is_none() || self.offset as usize + self.filled + len > bytes {
            self.flush()?;
            let segment = self.pool.segments().take(Want::Checkpoint).ok_or(Refused::NoSpace)?;
            self.taken.push(segment);
            self.segment = Some(segment);
            self.offset = 0;
        }
        Ok(())
    }

    fn next(&self) -> u64 {
        let segment = self.segment.expect("room was made in one");
        self.pool.segments().address(segment, self.offset + self.filled as u32)
    }

    /// Adds a page.
    fn page(&mut self, print: impl FnOnce(&mut [u8])) -> Result<Entry, Refused> {
        if self.filled + PAGE_BYTES > self.buffer.len() {
            self.flush()?;
        }
        self.room(PAGE_BYTES)?;
        give_way();
        let address = self.next();
        let bytes = &mut self.buffer[self.filled..self.filled + PAGE_BYTES];
        print(bytes);
        let crc = crc(bytes);
        self.filled += PAGE_BYTES;
        Ok(Entry::new(address, PAGE_BYTES as u32, Codec::Raw, crc))
    }

    /// Adds a node, and first those of its leaves that are not on disk; answers where it is.
    fn node(&mut self, node: &Arc<Node>) -> Result<Entry, Refused> {
        if let Some(home) =
            node.home().or_else(|| self.nodes.get(&Arc::as_ptr(node)).map(|it| it.1))
        {
            return Ok(home);
        }
        for (_, leaf) in node.leaves().filter(|(_, leaf)| leaf.home().is_none()) {
            if !self.leaves.contains_key(&Arc::as_ptr(leaf)) {
                let page = leaf.page().expect("what has no home is in memory");
                let home = self.page(|bytes| page.print(bytes))?;
                self.leaves.insert(Arc::as_ptr(leaf), (Arc::clone(leaf), home));
            }
        }
        let leaves = std::mem::take(&mut self.leaves);
        let home = self.page(|bytes| {
            node.print(bytes, |leaf| leaf.home().unwrap_or_else(|| leaves[&Arc::as_ptr(leaf)].1));
        });
        self.leaves = leaves;
        let home = home?;
        self.nodes.insert(Arc::as_ptr(node), (Arc::clone(node), home));
        Ok(home)
    }

    /// Adds a root that names nodes, and those that are not on disk.
    fn root(&mut self, nodes: &[Option<Arc<Node>>]) -> Result<Entry, Refused> {
        let mut root = roots::empty();
        for (node, into) in nodes.iter().zip(root.chunks_exact_mut(ENTRY_BYTES)) {
            if let Some(node) = node {
                self.node(node)?.print(into);
            }
        }
        match nodes.iter().any(Option::is_some) {
            true => self.known(root),
            false => Ok(Entry::HOLE),
        }
    }

    /// Adds bytes of any length, and a tree of pages above them; answers what is at its top.
    fn tree(&mut self, bytes: &[u8]) -> Result<Entry, Refused> {
        let mut level = Vec::new();
        for part in bytes.chunks(PAGE_BYTES) {
            let mut page = roots::empty();
            page[..part.len()].copy_from_slice(part);
            level.push(self.known(page)?);
        }
        while level.len() > 1 {
            let above = level.chunks(FAN).map(|entries| self.known(roots::of_entries(entries)));
            level = above.collect::<Result<_, Refused>>()?;
        }
        Ok(level.first().copied().unwrap_or(Entry::HOLE))
    }

    /// Adds a page, unless one with the same contents is there.
    fn known(&mut self, page: Contents) -> Result<Entry, Refused> {
        if let Some(home) = self.roots.find(&page) {
            return Ok(home);
        }
        let before = self.pool.roots().find(&page);
        let home = match before {
            Some(home) => home,
            None => self.page(|bytes| bytes.copy_from_slice(&page))?,
        };
        self.roots.put(page, home);
        Ok(home)
    }

    /// Makes all of it durable; answers the roots and the pages of the catalogue.
    fn finish(mut self) -> Result<Roots, Refused> {
        self.flush()?;
        for segment in &self.touched {
            self.pool.segments().sync(*segment)?;
        }
        let mut leaves: Vec<&(Arc<Leaf>, Entry)> = self.leaves.values().collect();
        leaves.sort_unstable_by_key(|(_, home)| home.address());
        for (leaf, home) in leaves {
            give_way();
            leaf.settle(*home);
            // It can be dropped from now on.
            self.pool.segments().leaves().keep(leaf);
        }
        self.nodes.values().for_each(|(node, home)| node.settle(*home));
        // The next checkpoint goes on behind it.
        let align = self.pool.align().max(PAGE_BYTES as u32);
        let place = self.segment.map(|segment| (segment, self.offset.next_multiple_of(align)));
        self.pool.set_page_place(place);
        Ok(self.roots)
    }
}

impl From<Refused> for VolumeError {
    fn from(refused: Refused) -> VolumeError {
        match refused {
            Refused::NoSpace => VolumeError::NoSpace,
            Refused::Io(error) => VolumeError::io("cannot write a checkpoint")(error),
        }
    }
}

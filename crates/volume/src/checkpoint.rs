//! A checkpoint: the changed pages of all maps, the catalogue, and the superblock that names them.
//! A later opening does not replay the log before it.
//!
//! A checkpoint writes maps as they were at one moment, concurrently with writes; see
//! [`crate::map::page`].

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::{Arc, PoisonError};

use blockyard_store::buffer::Buffer;
use blockyard_store::{SegmentStore, StoreFile};
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::catalogue::{self, Listed};
use blockyard_volume_format::entry::{Codec, ENTRY_BYTES, Entry};
use blockyard_volume_format::superblock::{
    FILE, LogPlace, SEGMENT_NONE, SLOT_BYTES, SLOTS, Superblock,
};
use blockyard_volume_format::{FAN, PAGE_BYTES};

use crate::error::VolumeError;
use crate::frozen::{Frozen, Marks};
use crate::map::{Leaf, Node};
use crate::pool::Pool;
use crate::roots::{self, Contents, Roots};
use crate::segments::{AllocationClass, Segments};
use crate::thread::yield_if_due;

/// Most bytes of pages per write.
const WRITE_BYTES: usize = 256 << 10;

/// The part of the pool's identity by which its groups are distinguished from those of other pools.
pub(crate) fn pool_mark<D: SegmentStore>(pool: &Pool<D>) -> u64 {
    let superblock = pool.superblock.lock().unwrap_or_else(PoisonError::into_inner);
    mark_of(&superblock)
}

/// The mark of the pool to which a superblock belongs, see [`pool_mark`].
pub(crate) fn mark_of(superblock: &Superblock) -> u64 {
    blockyard_volume_format::bytes::u64_at(&superblock.id, 0)
}

/// Why a checkpoint was not made.
enum Refused {
    NoSpace,
    Io(io::Error),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Refused {
        Refused::Io(error)
    }
}

/// Makes a checkpoint of maps whose blocks are durable. Returns the references from it, or `None`
/// if it failed.
pub fn run<D: SegmentStore>(pool: &Pool<D>, frozen: &Frozen) -> Option<Marks> {
    let mut written = write(pool, frozen);
    // Giving up the checkpoint before the last one frees space.
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
            pool.latch_if_removed();
            pool.latch(&format!("a checkpoint could not be written: {error}"));
            None
        }
    }
}

/// Writes the last checkpoint's superblock to the other slot too, where space is short. That frees
/// what only the checkpoint before needs. Returns whether it freed anything. No checkpoint may be
/// in progress.
pub fn repeat<D: SegmentStore>(pool: &Pool<D>) -> bool {
    let frees = pool.segments().counts().idle > 0;
    if pool.is_latched() || (!frees && pool.segments().is_for_one()) {
        return false;
    }
    write_again(pool, 0) && frees
}

/// Writes a superblock that states, for the last checkpoint, that groups up to `durable` are
/// durable. Returns whether it is durable. No other thread may be writing a checkpoint.
pub(crate) fn state_durable<D: SegmentStore>(pool: &Pool<D>, durable: u64) -> bool {
    !pool.is_latched() && write_again(pool, durable)
}

/// Writes the last checkpoint's superblock to the other slot.
fn write_again<D: SegmentStore>(pool: &Pool<D>, durable: u64) -> bool {
    let mut superblock = pool.superblock.lock().unwrap_or_else(PoisonError::into_inner);
    let sequence = superblock.sequence.saturating_add(1);
    let durable = superblock.durable.max(durable);
    let next = Superblock { sequence, durable, ..*superblock };
    if let Err(error) = write_superblock(pool.segments(), &next, Epochs::Of(next.epoch)) {
        pool.latch(&format!("a superblock could not be written: {error}"));
        return false;
    }
    *superblock = next;
    pool.segments().free_idle();
    true
}

fn write<D: SegmentStore>(pool: &Pool<D>, frozen: &Frozen) -> Result<Marks, Refused> {
    let place = pool.page_place();
    let mut pages = Pages::new(pool);
    let (top, bytes) = match write_pages(frozen, &mut pages) {
        Ok(catalogue) => catalogue,
        Err(Refused::NoSpace) => {
            // No durable page and no page in memory refers to what was written.
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
    // Only one checkpoint runs at a time: no thread waits for this lock while this one syncs.
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
    // If the log moved to a new segment, no group names that segment: both slots must say where the
    // log continues.
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

/// Writes the changed pages and the catalogue. Returns the top page of the catalogue and its bytes.
fn write_pages<D: SegmentStore>(
    frozen: &Frozen,
    pages: &mut Pages<'_, D>,
) -> Result<(Entry, Vec<u8>), Refused> {
    let mut listed = Vec::with_capacity(frozen.volumes.len());
    for (meta, copied, nodes) in &frozen.volumes {
        let roots = nodes.chunks(FAN).map(|nodes| pages.root(nodes));
        listed.push(Listed {
            meta: meta.clone(),
            family: copied.family,
            copied: copied.last,
            owned: copied.owned,
            holds: frozen.holds.get(&meta.id).cloned().unwrap_or_default(),
            properties: frozen.properties.get(&meta.id).copied().unwrap_or_default(),
            roots: roots.collect::<Result<_, Refused>>()?,
        });
    }
    let bytes = catalogue::print(&frozen.whole, &listed);
    let top = pages.tree(&bytes)?;
    Ok((top, bytes))
}

/// The epochs that the superblock slots may have if no other process has opened the pool.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Epochs {
    /// An opening: no epoch later than this one, which it found. After a power cut a slot may be
    /// older.
    UpTo(u64),
    /// A running process: at least one slot has this epoch, which it wrote to both, and none a
    /// later one.
    Of(u64),
}

/// Writes a superblock to its slot durably, if the slots have the expected epochs.
///
/// # Errors
/// If the I/O fails, or another process has opened the pool, or an older superblock was restored.
pub(crate) fn write_superblock<D: SegmentStore>(
    segments: &Segments<D>,
    superblock: &Superblock,
    epochs: Epochs,
) -> io::Result<()> {
    segments.directory().check_location()?;
    let file = segments.directory().open(FILE)?.ok_or(io::ErrorKind::NotFound)?;
    is_owned(&file, epochs)?;
    let memory = blockyard_store::buffer::Memory::new(SLOT_BYTES as u64);
    let mut bytes = memory.take_beyond(SLOT_BYTES);
    superblock.print(&mut bytes);
    file.write_at(superblock.slot(), &[&bytes])?;
    file.sync()
}

/// Checks that no other process has opened the pool since this one, whose epoch is `epoch`.
///
/// # Errors
/// If another process has opened the pool, or an older superblock was restored.
pub(crate) fn check_owner<D: SegmentStore>(segments: &Segments<D>, epoch: u64) -> io::Result<()> {
    match segments.directory().open(FILE) {
        Ok(Some(file)) => is_owned(&file, Epochs::Of(epoch)),
        // Other errors do not prove that another process has it.
        _ => Ok(()),
    }
}

/// Checks the epochs of the slots of each copy; a slot that cannot be read is ignored. The locks
/// keep other processes out. This check detects a process that bypassed them, and a superblock that
/// was restored.
fn is_owned<F: StoreFile>(file: &F, wanted: Epochs) -> io::Result<()> {
    let whole = SLOTS as usize * SLOT_BYTES;
    let mut bytes = blockyard_store::buffer::Memory::new(whole as u64).take_beyond(whole);
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

/// Writes pages into segments of their own, sequentially.
struct Pages<'a, D: SegmentStore> {
    pool: &'a Pool<D>,
    segment: Option<u32>,
    /// Offset in the segment at which the buffer will be written.
    offset: u32,
    buffer: Buffer,
    filled: usize,
    touched: BTreeSet<u32>,
    /// Segments that this checkpoint took; they were free before.
    taken: Vec<u32>,
    /// New addresses of pages. The pages learn them only when all are durable: after an error no
    /// page may refer to an address that was not written.
    leaves: Locations<Leaf>,
    nodes: Locations<Node>,
    /// Roots and catalogue pages, including those of the last checkpoint that did not change.
    roots: Roots,
}

/// New addresses of pages, by pointer. The `Arc` keeps the page alive, so that its pointer is not
/// reused.
type Locations<T> = HashMap<*const T, (Arc<T>, Entry)>;

impl<'a, D: SegmentStore> Pages<'a, D> {
    fn new(pool: &'a Pool<D>) -> Pages<'a, D> {
        let buffer = pool.memory().take_beyond(WRITE_BYTES);
        let place = pool.page_place();
        let (segment, offset) = place.map_or((None, 0), |(segment, at)| (Some(segment), at));
        // After an error it is unknown what the segment contains from here on.
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

    /// Writes the buffer to the segment.
    fn flush(&mut self) -> Result<(), Refused> {
        if let Some(segment) = self.segment
            && self.filled > 0
        {
            let address = self.pool.segments().address(segment, self.offset);
            self.pool.segments().write(address, &[&self.buffer[..self.filled]])?;
            self.touched.insert(segment);
            self.pool.meters().wrote_pages(self.filled as u64);
            self.offset += self.filled as u32;
            self.filled = 0;
        }
        Ok(())
    }

    /// Ensures that the segment has space for `len` bytes, or takes another segment.
    fn reserve(&mut self, len: usize) -> Result<(), Refused> {
        let bytes = self.pool.segments().bytes() as usize;
        if self.segment.is_none() || self.offset as usize + self.filled + len > bytes {
            self.flush()?;
            let segment =
                self.pool.segments().take(AllocationClass::Checkpoint).ok_or(Refused::NoSpace)?;
            self.taken.push(segment);
            self.segment = Some(segment);
            self.offset = 0;
        }
        Ok(())
    }

    fn next(&self) -> u64 {
        let segment = self.segment.expect("`reserve` took one");
        self.pool.segments().address(segment, self.offset + self.filled as u32)
    }

    /// Adds a page.
    fn page(&mut self, print: impl FnOnce(&mut [u8])) -> Result<Entry, Refused> {
        if self.filled + PAGE_BYTES > self.buffer.len() {
            self.flush()?;
        }
        self.reserve(PAGE_BYTES)?;
        yield_if_due();
        let address = self.next();
        let bytes = &mut self.buffer[self.filled..self.filled + PAGE_BYTES];
        print(bytes);
        let crc = crc(bytes);
        self.filled += PAGE_BYTES;
        Ok(Entry::new(address, PAGE_BYTES as u32, Codec::Raw, crc))
    }

    /// Adds a node, after those of its leaves that are not on disk. Returns where the node is.
    fn node(&mut self, node: &Arc<Node>) -> Result<Entry, Refused> {
        if let Some(location) =
            node.location().or_else(|| self.nodes.get(&Arc::as_ptr(node)).map(|it| it.1))
        {
            return Ok(location);
        }
        for (_, leaf) in node.leaves().filter(|(_, leaf)| leaf.location().is_none()) {
            if !self.leaves.contains_key(&Arc::as_ptr(leaf)) {
                let page = leaf.page().expect("what has no location is in memory");
                let location = self.page(|bytes| page.print(bytes))?;
                self.leaves.insert(Arc::as_ptr(leaf), (Arc::clone(leaf), location));
            }
        }
        let leaves = std::mem::take(&mut self.leaves);
        let location = self.page(|bytes| {
            node.print(bytes, |leaf| {
                leaf.location().unwrap_or_else(|| leaves[&Arc::as_ptr(leaf)].1)
            });
        });
        self.leaves = leaves;
        let location = location?;
        self.nodes.insert(Arc::as_ptr(node), (Arc::clone(node), location));
        Ok(location)
    }

    /// Adds a root that names these nodes, after those nodes that are not on disk.
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

    /// Adds a byte string of any length and the tree of pages above it. Returns the top page.
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

    /// Adds a page, unless a page with equal contents exists.
    fn known(&mut self, page: Contents) -> Result<Entry, Refused> {
        if let Some(location) = self.roots.find(&page) {
            return Ok(location);
        }
        let before = self.pool.roots().find(&page);
        let location = match before {
            Some(location) => location,
            None => self.page(|bytes| bytes.copy_from_slice(&page))?,
        };
        self.roots.put(&page, location);
        Ok(location)
    }

    /// Makes all pages durable. Returns the roots and the pages of the catalogue.
    fn finish(mut self) -> Result<Roots, Refused> {
        self.flush()?;
        for segment in &self.touched {
            self.pool.segments().sync(*segment)?;
        }
        let mut leaves: Vec<&(Arc<Leaf>, Entry)> = self.leaves.values().collect();
        leaves.sort_unstable_by_key(|(_, location)| location.address());
        for (leaf, location) in leaves {
            yield_if_due();
            leaf.settle(*location);
            // The leaf can be evicted from now on.
            self.pool.segments().leaves().keep(leaf);
        }
        self.nodes.values().for_each(|(node, location)| node.settle(*location));
        // The next checkpoint continues after this one's pages.
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

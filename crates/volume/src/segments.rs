//! The segments of a pool: files of one length that are made before they are needed, taken as a
//! whole and given back as a whole.
//!
//! A segment that a checkpoint does not need any more is *idle*, and free after the next one: each
//! of the two superblock slots stands for a checkpoint whose segments are all there.
#![allow(clippy::disallowed_types)] // Segments are taken and given back now and then.

mod growth;
mod reading;
mod table;

pub(crate) use reading::read_spare;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_sync::counter::Counter;
use blockyard_sync::published::{Published, Reader};

use crate::error::{FormatError, VolumeError};
use crate::format::PAGE_BYTES;
use crate::format::entry::{ADDRESS_END, Entry};
use crate::map::{Cache, Leaf, Map, Page, Tally};
use crate::repairs::Repairs;
use crate::store::descriptors::is_short;
use crate::store::{Directory, Pin, StoreFile};

pub(crate) use table::RESERVE;
pub use table::{Counts, Want};
use table::{State, Table};

/// The files, by number.
pub type Files<F> = Vec<Arc<F>>;

/// The segments of a pool.
pub struct Segments<D: Directory> {
    directory: D,
    bytes: u32,
    files: Arc<Published<Files<D::File>>>,
    table: Mutex<Table>,
    /// What keeps those open that are written: their descriptors are theirs until they are durable.
    pins: Mutex<HashMap<u32, Pin>>,
    /// Held while a file is made: two who made the same one would write over each other.
    making: Mutex<()>,
    /// Leaves of maps that are in memory.
    leaves: Cache,
    repairs: Repairs,
    /// How often somebody has begun to change maps, and has counted what became of segments by it.
    /// The committer alone does.
    changes: Counter,
}

/// See [`Segments::progress`].
pub(crate) type Progress = (usize, usize, Vec<u64>);

/// The name of a segment's file.
pub(crate) fn name(number: usize) -> String {
    format!("segment-{number:08x}")
}

/// Refuses a directory in which a segment is missing that has others behind it: what is in those
/// would be taken for new.
fn no_gap<D: Directory>(directory: &D, count: usize) -> Result<(), VolumeError> {
    let title = directory.title();
    let names = directory.names().map_err(VolumeError::io(format!("cannot list `{title}`")))?;
    let number = |name: &String| usize::from_str_radix(name.strip_prefix("segment-")?, 16).ok();
    match names.iter().filter_map(number).filter(|number| *number >= count).min() {
        None => Ok(()),
        Some(behind) => {
            let (missing, behind) = (name(count), name(behind));
            let error = io::Error::other(format!("it is missing, and `{behind}` is there"));
            Err(VolumeError::io(format!("cannot open `{title}/{missing}`"))(error))
        }
    }
}

/// So many segments are opened when the pool is.
const OPENED_FIRST: usize = 1024;

/// Memory for clean leaves of maps where nothing else is said, in bytes.
pub const MAP_CACHE_BYTES: u64 = 128 << 20;

impl<D: Directory> Segments<D> {
    /// The same with so much memory for leaves of maps.
    #[must_use]
    pub fn with_map_cache(self, bytes: u64) -> Segments<D> {
        Segments { leaves: Cache::new(bytes), ..self }
    }

    /// The leaves of maps that are in memory.
    pub fn leaves(&self) -> &Cache {
        &self.leaves
    }

    /// Brings what a leaf contains into memory, and keeps it there for a while.
    ///
    /// # Errors
    /// If it cannot be read, or is damaged.
    pub fn load(&self, leaf: &Arc<Leaf>) -> Result<Arc<Page>, VolumeError> {
        let page = self.page(leaf)?;
        if leaf.fill(&page) {
            self.leaves.keep(leaf);
        }
        Ok(page)
    }

    /// Finds out of leaves that go as a whole, where so many blocks from the first one on become
    /// zeros, how many of their blocks are their map's alone. Of one that cannot be read that stays
    /// unknown.
    pub(crate) fn count_owned(&self, map: &Map, first: u64, blocks: u64) {
        Map::each_span(first, blocks, |number, from, to| {
            for leaf in map.with(number, |span| span.uncounted(from, to)) {
                match self.page(&leaf) {
                    Ok(page) => leaf.note_fresh(&page),
                    Err(error) => tracing::warn!("its blocks are not counted: {error}"),
                }
            }
        });
    }

    /// What a leaf contains, for somebody who wants it once.
    ///
    /// # Errors
    /// As [`Segments::load`].
    pub fn page(&self, leaf: &Leaf) -> Result<Arc<Page>, VolumeError> {
        loop {
            if let Some(page) = leaf.page() {
                return Ok(page);
            }
            // What has no home is in memory.
            if let Some(home) = leaf.home() {
                return self.page_at(home);
            }
        }
    }

    fn page_at(&self, home: Entry) -> Result<Arc<Page>, VolumeError> {
        let bytes = self.read_page(home)?;
        let end = self.address(self.table().states.len() as u32, 0);
        let is_there = |page: &Page| page.entries().iter().all(|entry| entry.address() < end);
        let page = Page::parse(&bytes).filter(is_there).ok_or_else(|| FormatError::Field {
            what: "page of the map",
            field: "entry",
            value: home.address(),
            want: "a place in a segment that is there",
        })?;
        Ok(Arc::new(page))
    }

    /// Somebody changes maps: what counts in segments is told behind that.
    pub(crate) fn begin_changes(&self) {
        self.changes.add(1);
    }

    /// How many bytes of blocks count at most in a segment, by all that maps have become until now;
    /// `None` while somebody changes them.
    pub(crate) fn told_bytes(&self, segment: u32) -> Option<u64> {
        let before = self.changes.get();
        let bytes = self.live_bytes(segment);
        (before.is_multiple_of(2) && self.changes.get() == before).then_some(bytes)
    }

    /// What has become of segments since somebody has begun to change maps.
    pub(crate) fn end_changes(&self, tally: &Tally) {
        self.tally(tally);
        self.changes.add(1);
    }

    /// More or fewer bytes count.
    pub fn tally(&self, tally: &Tally) {
        let mut table = self.table();
        for (segment, change) in tally.changes() {
            let segment = segment as usize;
            // Of a log that names what is not there.
            if segment >= table.states.len() {
                continue;
            }
            if segment >= table.live.len() {
                table.live.resize(segment + 1, 0);
            }
            let live = &mut table.live[segment];
            debug_assert!(live.checked_add_signed(change).is_some(), "segment {segment}: {change}");
            *live = live.saturating_add_signed(change);
            table.counted = table.counted.saturating_add_signed(change);
        }
        table.unknown_bytes = table.unknown_bytes.saturating_add(tally.unknown_bytes);
        table.dirtied += tally.dirtied;
    }

    /// A group is on its way that changes so many pages at most and has so many bytes of blocks.
    pub(crate) fn take_off(&self, pages: u64, bytes: u32) {
        let coming = &mut self.table().coming;
        *coming = (coming.0 + pages, coming.1 + u64::from(bytes));
    }

    /// It is not any more: what it has changed is counted by [`Segments::tally`].
    pub(crate) fn touch_down(&self, pages: u64, bytes: u32) {
        let coming = &mut self.table().coming;
        *coming = (coming.0 - pages, coming.1 - u64::from(bytes));
    }

    /// How many bytes of leaves have changed since the last checkpoint began.
    pub fn dirty_bytes(&self) -> u64 {
        self.table().dirtied * PAGE_BYTES as u64
    }

    /// How many bytes of blocks count at most in a segment.
    pub fn live_bytes(&self, segment: u32) -> u64 {
        self.table().live.get(segment as usize).copied().unwrap_or(0)
    }

    /// Of each segment how many bytes of blocks count at most, and how many of all may not.
    pub fn live(&self) -> (Vec<u64>, u64) {
        let table = self.table();
        (table.live.clone(), table.unknown_bytes)
    }

    /// How many of the bytes that count may not.
    pub fn unknown_bytes(&self) -> u64 {
        self.table().unknown_bytes
    }

    /// So many more of the bytes that count may not.
    pub(crate) fn doubt(&self, bytes: u64) {
        let mut table = self.table();
        table.unknown_bytes = table.unknown_bytes.saturating_add(bytes);
    }

    /// Puts in how many bytes of blocks count.
    pub fn set_live(&self, live: Vec<u64>, unknown_bytes: u64) {
        let mut table = self.table();
        table.counted = live.iter().sum();
        (table.live, table.unknown_bytes) = (live, unknown_bytes);
    }

    /// Somebody has counted: of each segment so many bytes counted when the counts were `before`,
    /// with so many that were unknown.
    pub fn recount(&self, counted: &[u64], before: &[u64], unknown_bytes: u64) {
        let at = |counts: &[u64], number| counts.get(number).copied().unwrap_or(0);
        let few = |number: &usize| at(counted, *number) > at(before, *number);
        let few: Vec<usize> = (0..counted.len()).filter(few).collect();
        for number in &few {
            let (title, bytes) = (self.directory.title(), at(counted, *number));
            let before = at(before, *number);
            tracing::error!("{title}: {bytes} bytes of segment {number} count, and not {before}");
        }
        let mut table = self.table();
        // What could not be emptied may be empty now.
        table.spoiled.clear();
        table.unknown_bytes = table.unknown_bytes.saturating_sub(unknown_bytes);
        let len = table.live.len().max(counted.len().min(table.states.len()));
        table.live.resize(len, 0);
        for (number, live) in table.live.iter_mut().enumerate() {
            // What was too many then is too many now, and what was too few.
            *live = (*live + at(counted, number)).saturating_sub(at(before, number));
        }
        table.counted = table.live.iter().sum();
        table.keep_counted();
        table.raised += few.len();
    }

    /// In how many segments too little was counted, as far as was found since the opening.
    pub(crate) fn raised(&self) -> usize {
        self.table().raised
    }

    /// The segments that are there, all of them used.
    ///
    /// # Errors
    /// If one of them cannot be opened, or is missing.
    pub fn open(directory: D, bytes: u32, count_max: usize) -> Result<Segments<D>, VolumeError> {
        // What an entry can name.
        let count_max = count_max.min((ADDRESS_END / u64::from(bytes)) as usize);
        let count_max = count_max.min(directory.segments_max());
        let mut files = Vec::new();
        while files.len() < count_max {
            let name = name(files.len());
            let doing = || VolumeError::io(format!("cannot open `{}/{name}`", directory.title()));
            let Some(file) = directory.open(&name).map_err(|error| doing()(error))? else { break };
            if file.len().map_err(|error| doing()(error))? < u64::from(bytes) {
                let error = io::Error::other(format!("it is shorter than {bytes} bytes"));
                return Err(doing()(error));
            }
            // As many as usually are open at once, so that what is wrong with one is told now.
            if files.len() < OPENED_FIRST
                && let Err(error) = file.pin()
                && !is_short(&error)
            {
                return Err(doing()(error));
            }
            files.push(Arc::new(file));
        }
        no_gap(&directory, files.len())?;
        let table = Table::new(files.len(), count_max, bytes);
        let (files, making) = (Arc::new(Published::new(files)), Mutex::new(()));
        let (table, leaves) = (Mutex::new(table), Cache::new(MAP_CACHE_BYTES));
        let (changes, repairs) = (Counter::default(), Repairs::default());
        let pins = Mutex::default();
        let segments =
            Segments { directory, bytes, files, table, pins, making, leaves, repairs, changes };
        segments.look_outside();
        Ok(segments)
    }

    /// Refuses a pool of which the end is missing, files or a part of a disk that is shorter now:
    /// in the segment of this number there is something.
    ///
    /// # Errors
    /// If there is no such segment.
    pub fn want(&self, number: Option<usize>) -> Result<(), VolumeError> {
        let (title, count) = (self.directory.title(), self.counts().all);
        match number {
            Some(number) if number >= count => {
                let (bytes, last) = (self.bytes, count.saturating_sub(1));
                let error = io::Error::other(format!(
                    "it ends with segment {last} of {bytes} bytes, and there is something in \
                     segment {number}; wanted all of them"
                ));
                Err(VolumeError::io(format!("cannot open `{title}`"))(error))
            }
            _ => Ok(()),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The directory that they are in.
    pub fn directory(&self) -> &D {
        &self.directory
    }

    /// Length of a segment in bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Notes that so many copies of what lies at an address were written again.
    pub(crate) fn repaired(&self, count: usize, address: u64) {
        if count > 0 {
            self.repairs.add(count as u64, &self.directory.title(), address);
        }
    }

    /// Logs the repairs that are not in the log yet.
    pub(crate) fn log_repairs(&self) {
        self.repairs.log_rest(&self.directory.title());
    }

    /// Bytes of blocks and of pages of maps that are in use.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let table = self.table();
        table.counted + table.pages * PAGE_BYTES as u64
    }

    /// How many there are.
    pub fn counts(&self) -> Counts {
        let table = self.table();
        let (free, idle, hollow) = (table.free, table.idle, table.hollow);
        Counts { all: table.states.len(), free, idle, hollow, spoiled: table.spoiled.len() }
    }

    /// Something that changes where space is won: how many are free and idle, and how many bytes
    /// count in those that are cleaned.
    pub(crate) fn progress(&self) -> Progress {
        let counts = self.counts();
        (counts.free, counts.idle, self.live().0)
    }

    /// How many are free.
    pub fn free(&self) -> usize {
        self.table().free
    }

    /// How many are free beyond those that this use leaves to others.
    pub fn free_for(&self, want: Want) -> usize {
        let table = self.table();
        table.free.saturating_sub(table.left_by(want, 0))
    }

    /// How many have to be free so that writes go on when a checkpoint begins.
    pub fn beside(&self) -> usize {
        self.table().beside()
    }

    /// Bytes of segments beyond those that count.
    pub fn spare_bytes(&self) -> u64 {
        let table = self.table();
        (table.there() as u64 * u64::from(self.bytes)).saturating_sub(table.counted)
    }

    /// How many have to be free so that writes go on.
    pub fn reserved(&self) -> usize {
        self.table().left_by(Want::Write, 0)
    }

    /// Whether this use may change so many pages and take so many segments, of those that are free
    /// now.
    pub fn has(&self, want: Want, pages: u64, segments: usize) -> bool {
        let table = self.table();
        table.free >= table.left_by(want, pages) + segments
    }

    /// How many more pages may be changed by this use if it takes so many segments; `None`: it may
    /// not take as many.
    pub fn pages_left(&self, want: Want, taken: usize) -> Option<u64> {
        self.table().pages_left(want, taken)
    }

    /// Notes how many roots of maps and pages of the catalogue there are.
    pub fn set_upper(&self, count: usize) {
        self.table().upper = count as u64;
    }

    /// Notes how many pages the last checkpoint needs.
    pub fn set_pages(&self, count: u64) {
        self.table().pages = count;
    }

    /// Notes for how many bytes of pages there is room behind those of the last checkpoint.
    pub fn set_rest(&self, bytes: u32) {
        self.table().rest = u64::from(bytes) / PAGE_BYTES as u64;
    }

    /// The files now.
    pub fn files(&self) -> Arc<Files<D::File>> {
        self.files.get()
    }

    /// The files, for somebody who looks often.
    pub fn reader(&self) -> Reader<Files<D::File>> {
        Reader::new(&self.files)
    }

    /// A checkpoint begins: what is taken from now on is not looked at by it.
    pub fn begin_round(&self) -> u64 {
        self.table().begin_round()
    }

    /// The checkpoint that was on its way has ended; if it has failed its pages are still to be
    /// written.
    pub fn end_round(&self, is_written: bool) {
        self.table().end_round(is_written);
    }

    /// How many checkpoints have begun.
    pub fn round(&self) -> u64 {
        self.table().round
    }

    /// The checkpoint of this round is durable, and needs these segments. The disk is told which
    /// ones nobody needs any more, before anybody takes them.
    pub fn settle(&self, round: u64, is_needed: impl Fn(u32) -> bool) {
        let freed = self.freed();
        {
            let mut table = self.table();
            table.change_all(|number, state| match state {
                State::Used { round: taken } if taken < round && !is_needed(number) => State::Idle,
                State::Idle if is_needed(number) => State::Used { round: 0 },
                State::Idle => freed,
                other => other,
            });
            table.stand_for(round);
        }
        if freed == State::Discarded {
            self.discard();
        }
    }

    /// Both superblocks stand for one checkpoint: what only the one before it needed is free.
    pub fn free_idle(&self) {
        let freed = self.freed();
        {
            let mut table = self.table();
            table.change_all(|_, state| if state == State::Idle { freed } else { state });
            table.stand_for_one();
        }
        if freed == State::Discarded {
            self.discard();
        }
    }

    /// Whether both superblocks stand for one checkpoint.
    pub fn is_for_one(&self) -> bool {
        self.table().is_for_one()
    }

    /// What becomes of a segment that nobody needs.
    fn freed(&self) -> State {
        if self.directory.discards() { State::Discarded } else { State::Free }
    }

    /// Those of some segments of blocks are free in which nothing counts: the log that says so is
    /// durable, and does not go on in any of them behind a checkpoint for which a superblock
    /// stands. Says how many are.
    pub fn release(&self, numbers: &[u32]) -> usize {
        let freed = self.freed();
        let count = {
            let mut table = self.table();
            numbers.iter().filter(|number| table.release(**number, freed)).count()
        };
        if freed == State::Discarded && count > 0 {
            self.discard();
        }
        count
    }

    /// Discards what may be, one after the other: each can be taken at once.
    fn discard(&self) {
        let next = || self.table().states.iter().position(|state| *state == State::Discarded);
        while let Some(number) = next() {
            if let Some(file) = self.files.get().get(number) {
                self.directory.discard(file);
            }
            self.put_back(number as u32);
        }
    }

    /// Something in a segment is damaged: it stays as it is until nobody needs it. Says whether
    /// that is news.
    pub fn spoil(&self, number: u32) -> bool {
        self.table().spoiled.insert(number)
    }

    /// Those that were taken before this round and are in use, and can be read as far as is known.
    pub fn used_before(&self, round: u64) -> Vec<u32> {
        let is_used =
            |state: &State| matches!(state, State::Used { round: taken } if *taken < round);
        let table = self.table();
        let used = (0..).zip(&table.states).filter(|(_, state)| is_used(state));
        let used = used.map(|(number, _)| number);
        used.filter(|number| !table.spoiled.contains(number)).collect()
    }

    /// Frees at once what nobody needs: at an opening, when both slots stand for one checkpoint.
    pub fn free_all_but(&self, is_needed: impl Fn(u32) -> bool) {
        let files = self.files.get();
        let is_sparse = |number: u32| files.get(number as usize).is_some_and(|it| it.is_sparse());
        self.table().change_all(|number, _| match is_needed(number) {
            true => State::Used { round: 0 },
            false if is_sparse(number) => State::Hollow,
            false => State::Free,
        });
    }

    /// Gives a segment back to which nothing was written that counts.
    pub fn put_back(&self, number: u32) {
        self.table().put_back(number);
    }

    fn pins(&self) -> MutexGuard<'_, HashMap<u32, Pin>> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a segment open that is going to be written.
    ///
    /// # Errors
    /// If it cannot be opened, or is not there.
    pub(crate) fn pin(&self, number: u32) -> io::Result<()> {
        let files = self.files.get();
        let pin = files.get(number as usize).ok_or(io::ErrorKind::UnexpectedEof)?.pin()?;
        self.pins().insert(number, pin);
        Ok(())
    }

    /// Segments need not be kept open that were taken before this round, but for those that are
    /// written on: what is in them is durable.
    pub(crate) fn unpin(&self, round: u64, is_written_on: impl Fn(u32) -> bool) {
        let table = self.table();
        self.pins().retain(|number, _| match table.states.get(*number as usize) {
            Some(State::Used { round: taken }) => *taken >= round || is_written_on(*number),
            _ => false,
        });
    }

    /// The segment of an address, and the place in it.
    #[inline]
    pub fn split(&self, address: u64) -> (u32, u64) {
        let bytes = u64::from(self.bytes);
        ((address / bytes) as u32, address % bytes)
    }

    /// The address of a place.
    #[inline]
    pub fn address(&self, segment: u32, offset: u32) -> u64 {
        u64::from(segment) * u64::from(self.bytes) + u64::from(offset)
    }

    /// The file of a segment, and the place in it, of an address.
    ///
    /// # Errors
    /// If there is no such segment.
    pub fn place(&self, address: u64) -> io::Result<(Arc<D::File>, u64)> {
        let (segment, offset) = self.split(address);
        let files = self.files.get();
        let file = files.get(segment as usize).ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok((Arc::clone(file), offset))
    }

    /// The file of a free segment: to try things on, until somebody takes one.
    pub fn scratch(&self) -> Option<Arc<D::File>> {
        let number = self.table().states.iter().position(|state| *state == State::Free)?;
        self.files.get().get(number).cloned()
    }

    /// Writes into one segment.
    ///
    /// # Errors
    /// If some of it may not be written.
    pub fn write(&self, address: u64, parts: &[&[u8]]) -> io::Result<()> {
        let (segment, offset) = self.split(address);
        let files = self.files.get();
        files.get(segment as usize).ok_or(io::ErrorKind::UnexpectedEof)?.write_at(offset, parts)
    }

    /// Makes durable what was written into a segment.
    ///
    /// # Errors
    /// If some of it may not be.
    pub fn sync(&self, segment: u32) -> io::Result<()> {
        let files = self.files.get();
        files.get(segment as usize).ok_or(io::ErrorKind::UnexpectedEof)?.sync()
    }
}

impl<D: Directory> fmt::Debug for Segments<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.table();
        let counted = (table.counted, table.unknown_bytes, table.pages, table.upper);
        let kept = (table.left_by(Want::Move, 0), table.dirtied, table.rest);
        let mut fields = f.debug_struct("Segments");
        fields.field("counted", &counted).field("kept", &kept).field("full", &table.full);
        fields.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::store::RealDirectory;

    /// A pool kept the space of every segment that it ever had, also when all that was in it was
    /// gone.
    #[test]
    fn space_that_is_given_back_is_taken_again() {
        let path = std::env::temp_dir().join(format!("blockyard-given-{}", std::process::id()));
        // Of a process of this number that was killed.
        _ = std::fs::remove_dir_all(&path);
        let open = || Segments::open(RealDirectory::take(&path).unwrap(), 1 << 20, 12).unwrap();
        let space = || {
            let files = std::fs::read_dir(&path).unwrap();
            files.map(|it| it.unwrap().metadata().unwrap().blocks() * 512).sum::<u64>() >> 20
        };
        let segments = open();
        segments.prepare(12, 0);
        let used = segments.take(Want::Checkpoint).unwrap();
        assert_eq!((segments.counts().all, space()), (12, 12));
        segments.give_back(7);
        let counts = segments.counts();
        assert_eq!((counts.all, counts.free, counts.hollow, space()), (12, 4, 7, 5));
        // They can be had as those that are not made yet.
        assert_eq!(segments.available(), 4 + 7);
        assert!(!segments.has(Want::Checkpoint, 0, 5) && segments.may(Want::Checkpoint, 0, 5));
        assert_eq!((segments.counts().hollow, space()), (6, 6));
        drop(segments);
        // An opening finds which of those that nobody needs have no space.
        let segments = open();
        segments.free_all_but(|number| number == used);
        let counts = segments.counts();
        assert_eq!((counts.all, counts.free, counts.hollow), (12, 5, 6));
        let taken: Vec<u32> = std::iter::from_fn(|| segments.take(Want::Checkpoint)).collect();
        assert_eq!((taken.len(), space()), (11, 12));
        drop(segments);
        std::fs::remove_dir_all(&path).unwrap();
    }

    /// Two threads that needed a segment made the same file: one wrote zeros over what the other
    /// had in it, or put another file in its place.
    #[test]
    fn who_makes_segments_at_once_gets_different_ones() {
        let path = std::env::temp_dir().join(format!("blockyard-segments-{}", std::process::id()));
        let open = || Segments::open(RealDirectory::take(&path).unwrap(), 64 << 10, 64).unwrap();
        let segments = open();
        let take = |byte: u8, want| {
            let mut taken = Vec::new();
            while let Some(number) = segments.take(want) {
                let mut bytes = crate::buffer::Memory::new(4096).take_beyond(4096);
                bytes.fill(byte);
                segments.write(segments.address(number, 0), &[&bytes]).unwrap();
                taken.push((number, byte));
            }
            taken
        };
        let all: Vec<(u32, u8)> = std::thread::scope(|scope| {
            let threads = [(1, Want::Write), (2, Want::Checkpoint), (3, Want::Checkpoint)];
            let take = &take;
            let threads = threads.map(|(byte, want)| scope.spawn(move || take(byte, want)));
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(all.len(), 64);
        drop(segments);
        let segments = open();
        for (number, byte) in all {
            let mut bytes = crate::buffer::Memory::new(4096).take_beyond(4096);
            let address = segments.address(number, 0);
            segments.read(&segments.files(), address, &mut bytes).unwrap();
            assert!(bytes.iter().all(|it| *it == byte), "segment {number}");
        }
        drop(segments);
        std::fs::remove_file(path.join(name(9))).unwrap();
        let error = Segments::open(RealDirectory::take(&path).unwrap(), 64 << 10, 64);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("segment-00000009") && error.contains("missing"), "{error}");
        std::fs::remove_dir_all(&path).unwrap();
    }
}

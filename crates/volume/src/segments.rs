//! The segments of a pool: files of equal length that are made before they are needed, and are
//! allocated and freed as a whole.
//!
//! A segment that the newest checkpoint does not need is *idle*, and becomes free after the next
//! one: each of the two superblock slots stands for a checkpoint whose segments all exist.
//!
//! Reads are at the end: they return intact data from whichever copy has them. `segments/table.rs`
//! says which segments may be taken, and makes more.
#![allow(clippy::disallowed_types)] // Segments are allocated and freed rarely.

mod table;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_core::Bytes;
use blockyard_os::LogLimit;
use blockyard_store::buffer::{ALIGN, Buffer, Memory};
use blockyard_store::{
    GoodCopies, Mirror, Pin, SegmentStore, StoreFile, StoreLocation as _, is_short,
};
use blockyard_sync::counter::Counter;
use blockyard_sync::rcu_cell::{RcuCell, RcuReader};
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::entry::{ADDRESS_END, Entry};
use blockyard_volume_format::{FormatError, PAGE_BYTES, segment_name};

use crate::error::VolumeError;
use crate::map::{Cache, Leaf, Map, Page, Tally};
use crate::recovery::workers::Workers;
use crate::repairs::Repairs;

use table::{State, Table};

pub(crate) use table::RESERVE;
pub use table::{AllocationClass, Counts};

/// The files of the segments, by number.
pub type Files<F> = Vec<Arc<F>>;

/// The segments of a pool.
pub struct Segments<D: SegmentStore> {
    directory: D,
    bytes: u32,
    /// Most segments, whatever the size of the disks.
    count_limit: usize,
    files: Arc<RcuCell<Files<D::File>>>,
    table: Mutex<Table>,
    /// Keeps the segments open that are being written, so that they keep their descriptors until
    /// they are durable.
    pins: Mutex<HashMap<u32, Pin>>,
    /// Held while a file is made: two threads that made the same file would overwrite each other.
    making: Mutex<()>,
    /// Map leaves that are in memory.
    leaves: Cache,
    repairs: Repairs,
    /// Reads of damaged blocks.
    unreadable: LogLimit,
    /// Reads of damaged map pages.
    unreadable_pages: LogLimit,
    /// Incremented when the committer begins to change maps, and again when it has updated the
    /// usage table. Only the committer does so. An odd value means that a change is in progress.
    changes: Counter,
}

/// The free segments, the idle segments, and the live bytes of each segment.
pub(crate) type Progress = (usize, usize, Vec<u64>);

/// Refuses a directory in which a segment is missing before others: the later ones would be treated
/// as new.
fn no_gap<D: SegmentStore>(directory: &D, count: usize) -> Result<(), VolumeError> {
    let title = directory.title();
    let names = directory.names().map_err(VolumeError::io(format!("cannot list `{title}`")))?;
    let number = |name: &String| usize::from_str_radix(name.strip_prefix("segment-")?, 16).ok();
    match names.iter().filter_map(number).filter(|number| *number >= count).min() {
        None => Ok(()),
        Some(behind) => {
            let (missing, behind) = (segment_name(count), segment_name(behind));
            let path = format!("{title}/{missing}");
            let what =
                format!("it is missing, and the later segment `{behind}` exists; restore the file");
            Err(FormatError::Segment { path, what }.into())
        }
    }
}

/// The parts of a segment by which [`Segments::counts_by_live`] counts.
pub const LIVE_TENTHS: usize = 10;

/// Segments that are opened when the pool is.
const OPENED_FIRST: usize = 1024;

/// Default memory for clean map leaves, in bytes.
pub const MAP_CACHE_BYTES: u64 = 128 << 20;

impl<D: SegmentStore> Segments<D> {
    /// Sets the memory for map leaves, in bytes.
    #[must_use]
    pub fn with_map_cache(self, bytes: u64) -> Segments<D> {
        Segments { leaves: Cache::new(bytes), ..self }
    }

    /// The map leaves that are in memory.
    pub fn leaves(&self) -> &Cache {
        &self.leaves
    }

    /// Loads a leaf into memory and caches it.
    ///
    /// # Errors
    /// If the leaf cannot be read, or is damaged.
    pub fn load(&self, leaf: &Arc<Leaf>) -> Result<Arc<Page>, VolumeError> {
        let page = self.page(leaf)?;
        if leaf.fill(&page) {
            self.leaves.keep(leaf);
        }
        Ok(page)
    }

    /// For leaves that are zeroed as a whole, in the range of `blocks` blocks from `first` on:
    /// counts how many of their blocks only this map refers to. For a leaf that cannot be read, the
    /// number stays unknown.
    pub(crate) fn count_owned(&self, map: &Map, first: u64, blocks: u64) {
        Map::each_span(first, blocks, |number, from, to| {
            for leaf in map.with(number, |span| span.uncounted(from, to)) {
                match self.page(&leaf) {
                    Ok(page) => leaf.note_fresh(&page),
                    Err(error) => {
                        tracing::warn!("the blocks of a map page are not counted: {error}")
                    }
                }
            }
        });
    }

    /// The contents of a leaf, without caching them.
    ///
    /// # Errors
    /// As [`Segments::load`].
    pub fn page(&self, leaf: &Leaf) -> Result<Arc<Page>, VolumeError> {
        loop {
            if let Some(page) = leaf.page() {
                return Ok(page);
            }
            // A leaf without a location is in memory by now: try again.
            if let Some(location) = leaf.location() {
                return self.page_at(location);
            }
        }
    }

    fn page_at(&self, location: Entry) -> Result<Arc<Page>, VolumeError> {
        let bytes = self.read_page(location)?;
        let end = self.address(self.table().states.len() as u32, 0);
        let is_there = |page: &Page| page.entries().iter().all(|entry| entry.address() < end);
        let page = Page::parse(&bytes).filter(is_there).ok_or_else(|| FormatError::Field {
            what: "page of the map",
            field: "entry",
            value: location.address(),
            want: "a place in a segment that is there",
        })?;
        Ok(Arc::new(page))
    }

    /// Begins a change of maps; the usage table is updated when the change ends.
    pub(crate) fn begin_changes(&self) {
        self.changes.add(1);
    }

    /// Upper bound of the live bytes of blocks in a segment, after all changes of maps until now;
    /// `None` while a change is in progress.
    pub(crate) fn stable_live_bytes(&self, segment: u32) -> Option<u64> {
        let before = self.changes.get();
        let bytes = self.live_bytes(segment);
        (before.is_multiple_of(2) && self.changes.get() == before).then_some(bytes)
    }

    /// Ends a change of maps and updates the usage table.
    pub(crate) fn end_changes(&self, tally: &Tally) {
        self.tally(tally);
        self.changes.add(1);
    }

    /// Adds the changes of live bytes to the usage table.
    pub fn tally(&self, tally: &Tally) {
        let mut table = self.table();
        for (segment, change) in tally.changes() {
            let segment = segment as usize;
            // A damaged log may name a segment that does not exist.
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

    /// Counts a group in flight that changes at most `pages` pages and has `bytes` bytes of blocks.
    pub(crate) fn begin_in_flight(&self, pages: u64, bytes: u32) {
        let in_flight = &mut self.table().in_flight;
        *in_flight = (in_flight.0 + pages, in_flight.1 + u64::from(bytes));
    }

    /// Ends the accounting of a group in flight: its changes are now in the usage table, by
    /// [`Segments::tally`].
    pub(crate) fn end_in_flight(&self, pages: u64, bytes: u32) {
        let in_flight = &mut self.table().in_flight;
        *in_flight = (in_flight.0 - pages, in_flight.1 - u64::from(bytes));
    }

    /// Whether any block is live, or in a group in flight.
    pub(crate) fn has_blocks(&self) -> bool {
        let table = self.table();
        table.counted + table.in_flight.1 > 0
    }

    /// Bytes of the map pages that have changed since the last checkpoint began.
    pub fn dirty_bytes(&self) -> u64 {
        self.table().dirtied * PAGE_BYTES as u64
    }

    /// Upper bound of the live bytes of blocks in a segment.
    pub fn live_bytes(&self, segment: u32) -> u64 {
        self.table().live.get(segment as usize).copied().unwrap_or(0)
    }

    /// For each segment the upper bound of its live bytes, and how many of all these bytes are
    /// unknown.
    pub fn live(&self) -> (Vec<u64>, u64) {
        let table = self.table();
        (table.live.clone(), table.unknown_bytes)
    }

    /// The number of segments in use by the share of their bytes that is live blocks: from 0 % to
    /// less than 10 %, and so on; the last one has full segments too. Segments of map pages have no
    /// blocks.
    pub fn counts_by_live(&self) -> [u64; LIVE_TENTHS] {
        let mut counts = [0; LIVE_TENTHS];
        let table = self.table();
        let live = table.live.iter().chain(std::iter::repeat(&0));
        for (state, live) in table.states.iter().zip(live) {
            if matches!(state, State::Used { .. }) {
                let tenth = live * LIVE_TENTHS as u64 / u64::from(self.bytes);
                counts[(tenth as usize).min(LIVE_TENTHS - 1)] += 1;
            }
        }
        counts
    }

    /// How many of the live bytes are unknown: counted, but possibly garbage.
    pub fn unknown_bytes(&self) -> u64 {
        self.table().unknown_bytes
    }

    /// Adds `bytes` unknown bytes.
    pub(crate) fn add_unknown_bytes(&self, bytes: u64) {
        let mut table = self.table();
        table.unknown_bytes = table.unknown_bytes.saturating_add(bytes);
    }

    /// Sets the live bytes of each segment and the number of unknown bytes.
    pub fn set_live(&self, live: Vec<u64>, unknown_bytes: u64) {
        let mut table = self.table();
        table.counted = live.iter().sum();
        (table.live, table.unknown_bytes) = (live, unknown_bytes);
    }

    /// Applies the result of a liveness scan: it found `counted` live bytes per segment when the
    /// table had `before`, `unknown_bytes` of which were unknown.
    pub fn recount(&self, counted: &[u64], before: &[u64], unknown_bytes: u64) {
        let at = |counts: &[u64], number| counts.get(number).copied().unwrap_or(0);
        let few = |number: &usize| at(counted, *number) > at(before, *number);
        let few: Vec<usize> = (0..counted.len()).filter(few).collect();
        for number in &few {
            let (title, bytes) = (self.directory.title(), at(counted, *number));
            let before = at(before, *number);
            tracing::error!(
                "{title}: segment {number} has {bytes} live bytes, the usage table had {before}"
            );
        }
        let mut table = self.table();
        // Segments that could not be emptied before may be empty now.
        table.quarantined.clear();
        table.unknown_bytes = table.unknown_bytes.saturating_sub(unknown_bytes);
        let len = table.live.len().max(counted.len().min(table.states.len()));
        table.live.resize(len, 0);
        for (number, live) in table.live.iter_mut().enumerate() {
            // Corrects the table by the error that it had then; changes since stay.
            *live = (*live + at(counted, number)).saturating_sub(at(before, number));
        }
        table.counted = table.live.iter().sum();
        table.keep_counted();
        table.raised += few.len();
    }

    /// In how many segments the table had too little live data, as found since the opening.
    pub fn raised(&self) -> usize {
        self.table().raised
    }

    /// Opens the existing segments, all of which are in use at first.
    ///
    /// # Errors
    /// If a segment cannot be opened, or is missing.
    pub fn open(directory: D, bytes: u32, count_max: usize) -> Result<Segments<D>, VolumeError> {
        // Limit by the addresses that an entry can express.
        let count_limit = count_max.min((ADDRESS_END / u64::from(bytes)) as usize);
        let count_max = count_limit.min(directory.segments_max());
        let mut files = Vec::new();
        while files.len() < count_max {
            let name = segment_name(files.len());
            let doing = || VolumeError::io(format!("cannot open `{}/{name}`", directory.title()));
            let Some(file) = directory.open(&name).map_err(|error| doing()(error))? else { break };
            if file.len().map_err(|error| doing()(error))? < u64::from(bytes) {
                let path = format!("{}/{name}", directory.title());
                let what = format!("it is shorter than {bytes} bytes; restore the file");
                return Err(FormatError::Segment { path, what }.into());
            }
            // Open as many as are usually open at once, so that errors are reported now.
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
        let (files, making) = (Arc::new(RcuCell::new(files)), Mutex::new(()));
        let (table, leaves) = (Mutex::new(table), Cache::new(MAP_CACHE_BYTES));
        let (changes, repairs, unreadable, unreadable_pages) = Default::default();
        let pins = Mutex::default();
        let segments = Segments {
            directory,
            bytes,
            count_limit,
            files,
            table,
            pins,
            making,
            leaves,
            repairs,
            unreadable,
            unreadable_pages,
            changes,
        };
        segments.measure_outside_space();
        Ok(segments)
    }

    /// Refuses a pool whose end is missing (files, or a part of a disk that is shorter now),
    /// although segment `number` is in use.
    ///
    /// # Errors
    /// If there is no such segment.
    pub fn want(&self, number: Option<usize>) -> Result<(), VolumeError> {
        let (title, count) = (self.directory.title(), self.counts().all);
        match number {
            Some(number) if number >= count => {
                let bytes = Bytes(self.bytes.into());
                let what = format!(
                    "segment {number} is in use, but there are only {count} segments of {bytes}; \
                     expected all up to that one"
                );
                Err(FormatError::Segment { path: title, what }.into())
            }
            _ => Ok(()),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The directory of the segments.
    pub fn directory(&self) -> &D {
        &self.directory
    }

    /// Length of a segment in bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Notes that `count` copies of the data at an address were repaired.
    pub(crate) fn repaired(&self, count: usize, address: u64) {
        if count > 0 {
            self.repairs.add(count as u64, &self.directory.title(), address);
        }
    }

    /// Blocks and map pages that were repaired from the other copy since the pool was opened.
    pub fn repaired_count(&self) -> u64 {
        self.repairs.count()
    }

    /// Limits the log lines about reads of damaged blocks.
    pub(crate) fn unreadable(&self) -> &LogLimit {
        &self.unreadable
    }

    /// Limits the log lines about reads of damaged map pages.
    pub(crate) fn unreadable_pages(&self) -> &LogLimit {
        &self.unreadable_pages
    }

    /// Logs the repairs that are not in the log yet.
    pub fn log_repairs(&self) {
        self.repairs.log_rest(&self.directory.title());
    }

    /// Bytes of blocks and of map pages that are in use.
    pub fn stored_bytes(&self) -> u64 {
        let table = self.table();
        table.counted + table.pages * PAGE_BYTES as u64
    }

    /// How many segments there are of each kind.
    pub fn counts(&self) -> Counts {
        let table = self.table();
        let (free, idle, hollow) = (table.free, table.idle, table.hollow);
        Counts { all: table.states.len(), free, idle, hollow, quarantined: table.quarantined.len() }
    }

    /// A value that changes when space is gained: the free and idle segments, and the live bytes of
    /// all segments.
    pub(crate) fn progress(&self) -> Progress {
        let counts = self.counts();
        (counts.free, counts.idle, self.live().0)
    }

    /// How many segments have no live data, and are free after the next checkpoints.
    pub(crate) fn dead(&self) -> usize {
        self.table().dead()
    }

    /// How many segments are free.
    pub fn free(&self) -> usize {
        self.table().free
    }

    /// How many segments are free beyond the reserve of this allocation class.
    pub fn free_for(&self, want: AllocationClass) -> usize {
        let table = self.table();
        table.free.saturating_sub(table.left_by(want, 0))
    }

    /// How many segments must be free so that writes continue when a checkpoint begins.
    pub fn kept_for_checkpoint(&self) -> usize {
        self.table().kept_for_checkpoint()
    }

    /// Bytes of the existing segments minus the live bytes.
    pub fn spare_bytes(&self) -> u64 {
        let table = self.table();
        (table.existing_segments() as u64 * u64::from(self.bytes)).saturating_sub(table.counted)
    }

    /// How many segments must be free so that writes continue.
    pub fn reserved(&self) -> usize {
        self.table().left_by(AllocationClass::Write, 0)
    }

    /// Whether this allocation class may change `pages` pages and take `segments` segments, of
    /// those that are free now.
    pub fn has(&self, want: AllocationClass, pages: u64, segments: usize) -> bool {
        let table = self.table();
        table.free >= table.left_by(want, pages) + segments
    }

    /// How many more pages this class may change if it takes `taken` segments; `None` if it may not
    /// take these.
    pub fn pages_left(&self, want: AllocationClass, taken: usize) -> Option<u64> {
        self.table().pages_left(want, taken)
    }

    /// Sets the number of map roots and catalogue pages.
    pub fn set_upper(&self, count: usize) {
        self.table().upper = count as u64;
    }

    /// Sets the number of pages that the last checkpoint needs.
    pub fn set_pages(&self, count: u64) {
        self.table().pages = count;
    }

    /// Sets the free bytes after the pages of the last checkpoint in its segment.
    pub fn set_rest(&self, bytes: u32) {
        self.table().rest = u64::from(bytes) / PAGE_BYTES as u64;
    }

    /// The number of segments to which the pool may grow.
    pub fn count_max(&self) -> usize {
        self.table().count_max
    }

    /// The current files.
    pub fn files(&self) -> Arc<Files<D::File>> {
        self.files.get()
    }

    /// A reader of the files, for a thread that reads often.
    pub fn reader(&self) -> RcuReader<Files<D::File>> {
        RcuReader::new(&self.files)
    }

    /// Begins a checkpoint and returns its number. Segments that are taken from now on are not
    /// considered by it.
    pub fn begin_round(&self) -> u64 {
        self.table().begin_round()
    }

    /// Ends the running checkpoint. If it has failed, its pages are still to be written.
    pub fn end_round(&self, is_written: bool) {
        self.table().end_round(is_written);
    }

    /// How many checkpoints have begun.
    pub fn round(&self) -> u64 {
        self.table().round
    }

    /// Ends the use of segments that the checkpoint of this round, now durable, does not need.
    /// Discards unneeded segments on the disk before they become free.
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

    /// Frees the segments that only the older checkpoint needed, because both superblocks stand for
    /// one checkpoint.
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

    /// The state of a segment that is not needed any more: a disk discards it before it is free.
    fn freed(&self) -> State {
        if self.directory.discards() { State::Discarded } else { State::Free }
    }

    /// Frees those of the given block segments that have no live data. The log that says so is
    /// durable, and does not pass through any of them after a checkpoint that a superblock stands
    /// for. Returns how many were freed.
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

    /// Discards segments one by one, so that each is available immediately.
    fn discard(&self) {
        let next = || self.table().states.iter().position(|state| *state == State::Discarded);
        while let Some(number) = next() {
            if let Some(file) = self.files.get().get(number) {
                self.directory.discard(file);
            }
            self.put_back(number as u32);
        }
    }

    /// Excludes a segment with damaged data from cleaning until it is free. Returns whether it was
    /// not excluded before.
    pub fn quarantine(&self, number: u32) -> bool {
        self.table().quarantined.insert(number)
    }

    /// Segments in use that were taken before this round and are not excluded for damage.
    pub fn used_before(&self, round: u64) -> Vec<u32> {
        let is_used =
            |state: &State| matches!(state, State::Used { round: taken } if *taken < round);
        let table = self.table();
        let used = (0..).zip(&table.states).filter(|(_, state)| is_used(state));
        let used = used.map(|(number, _)| number);
        used.filter(|number| !table.quarantined.contains(number)).collect()
    }

    /// Frees all segments that are not needed. At an opening, when both slots stand for one
    /// checkpoint.
    pub fn free_all_but(&self, is_needed: impl Fn(u32) -> bool) {
        let files = self.files.get();
        let is_sparse = |number: u32| files.get(number as usize).is_some_and(|it| it.is_sparse());
        self.table().change_all(|number, _| match is_needed(number) {
            true => State::Used { round: 0 },
            false if is_sparse(number) => State::Hollow,
            false => State::Free,
        });
    }

    /// Frees a segment to which no live data were written.
    pub fn put_back(&self, number: u32) {
        self.table().put_back(number);
    }

    fn pins(&self) -> MutexGuard<'_, HashMap<u32, Pin>> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a segment open that will be written.
    ///
    /// # Errors
    /// If the segment cannot be opened, or does not exist.
    pub(crate) fn pin(&self, number: u32) -> io::Result<()> {
        let files = self.files.get();
        let pin = files.get(number as usize).ok_or(io::ErrorKind::UnexpectedEof)?.pin()?;
        self.pins().insert(number, pin);
        Ok(())
    }

    /// Lets segments be closed that were taken before this round, because their data are durable.
    /// Segments that are still being written stay open.
    pub(crate) fn unpin(&self, round: u64, is_written_on: impl Fn(u32) -> bool) {
        let table = self.table();
        self.pins().retain(|number, _| match table.states.get(*number as usize) {
            Some(State::Used { round: taken }) => *taken >= round || is_written_on(*number),
            _ => false,
        });
    }

    /// The segment of an address, and the offset in it.
    #[inline]
    pub fn split(&self, address: u64) -> (u32, u64) {
        let bytes = u64::from(self.bytes);
        ((address / bytes) as u32, address % bytes)
    }

    /// The address of an offset in a segment.
    #[inline]
    pub fn address(&self, segment: u32, offset: u32) -> u64 {
        u64::from(segment) * u64::from(self.bytes) + u64::from(offset)
    }

    /// The file of an address, and the offset in it.
    ///
    /// # Errors
    /// If there is no such segment.
    pub fn place(&self, address: u64) -> io::Result<(Arc<D::File>, u64)> {
        let (segment, offset) = self.split(address);
        let files = self.files.get();
        let file = files.get(segment as usize).ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok((Arc::clone(file), offset))
    }

    /// The file of a free segment, for trial writes until the segment is taken.
    pub fn scratch(&self) -> Option<Arc<D::File>> {
        let number = self.table().states.iter().position(|state| *state == State::Free)?;
        self.files.get().get(number).cloned()
    }

    /// Writes into one segment.
    ///
    /// # Errors
    /// If some of the bytes may not have been written.
    pub fn write(&self, address: u64, parts: &[&[u8]]) -> io::Result<()> {
        let (segment, offset) = self.split(address);
        let files = self.files.get();
        files.get(segment as usize).ok_or(io::ErrorKind::UnexpectedEof)?.write_at(offset, parts)
    }

    /// Syncs a segment.
    ///
    /// # Errors
    /// If some of its data may not be durable.
    pub fn sync(&self, segment: u32) -> io::Result<()> {
        let files = self.files.get();
        files.get(segment as usize).ok_or(io::ErrorKind::UnexpectedEof)?.sync()
    }
}

impl<S: SegmentStore> Segments<Mirror<S>> {
    /// Notes that a copy has left the pool: closes its files, and grows into larger disks if all
    /// that are left are larger.
    pub fn renew(&self) {
        self.files.update(|files| files.iter().map(|file| Arc::new(file.renewed())).collect());
        let files = self.files.get();
        for (number, pin) in self.pins().iter_mut() {
            // Without descriptors that are left, the old one stays.
            if let Some(Ok(new)) = files.get(*number as usize).map(|file| file.pin()) {
                *pin = new;
            }
        }
        self.table().grow(self.count_limit.min(self.directory.segments_max()));
        self.measure_outside_space();
    }
}

impl<D: SegmentStore> fmt::Debug for Segments<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.table();
        let counted = (table.counted, table.unknown_bytes, table.pages, table.upper);
        let kept = (table.left_by(AllocationClass::Move, 0), table.dirtied, table.rest);
        let mut fields = f.debug_struct("Segments");
        fields.field("counted", &counted).field("kept", &kept).field("full", &table.full);
        fields.finish_non_exhaustive()
    }
}

/// A long read is split into at most `PARTS` parts of at least `PART_BYTES` bytes.
const PARTS: usize = 16;
const PART_BYTES: usize = 256 << 10;

impl<D: SegmentStore> Segments<D> {
    /// Reads a map page and verifies its checksum.
    ///
    /// # Errors
    /// As [`Segments::load`].
    pub fn read_page(&self, location: Entry) -> Result<Buffer, VolumeError> {
        let mut bytes = Memory::new(PAGE_BYTES as u64).take_beyond(PAGE_BYTES);
        let (segment, offset) = self.split(location.address());
        let want = location.crc();
        let is_whole = |bytes: &[u8]| crc(bytes) == want;
        let files = self.files();
        let failed = || {
            let doing = format!("cannot read a page of the map, segment {segment} offset {offset}");
            VolumeError::io(doing)
        };
        let read = self.read_whole(&files, location.address(), &mut bytes, &is_whole);
        read.map(drop).map_err(failed())?;
        let found = crc(&bytes);
        if found != location.crc() {
            // The page is damaged only if it is so in each copy, not if one could not be read.
            let file = files.get(segment as usize);
            for copy in file.into_iter().flat_map(|file| file.copies().numbers()) {
                self.read_copy(&files, copy, location.address(), &mut bytes).map_err(failed())?;
                if is_whole(&bytes) {
                    return Ok(bytes);
                }
            }
            return Err(FormatError::Page { segment, offset, found, want: location.crc() }.into());
        }
        Ok(bytes)
    }

    /// The contents of a leaf, or of its current version. If the volume is written meanwhile, the
    /// page of an older version may have been replaced by other data.
    ///
    /// # Errors
    /// If the current version cannot be read.
    pub fn page_now(
        &self,
        map: &Map,
        (number, at): (usize, usize),
        leaf: &Arc<Leaf>,
    ) -> Result<Arc<Page>, VolumeError> {
        let mut leaf = Arc::clone(leaf);
        loop {
            let error = match self.page(&leaf) {
                Ok(page) => return Ok(page),
                Err(error) => error,
            };
            match map.with(number, |span| span.node().and_then(|node| node.leaf(at).cloned())) {
                Some(now) if Arc::ptr_eq(&now, &leaf) => return Err(error),
                Some(now) => leaf = now,
                None => return Ok(Arc::default()),
            }
        }
    }

    /// Whether a map page is permanently lost: it is damaged in every copy, and no copy is missing
    /// that may have it.
    pub(crate) fn is_lost(&self, error: &VolumeError) -> bool {
        error.is_rotten_page()
            && self.directory.copy_status().iter().all(|copy| copy.state.is_good())
    }

    /// Reads from one segment.
    ///
    /// # Errors
    /// If the read fails, or there is no such segment.
    #[inline]
    pub fn read(&self, files: &Files<D::File>, address: u64, into: &mut [u8]) -> io::Result<()> {
        let (segment, offset) = self.split(address);
        let file = files.get(segment as usize).ok_or(io::ErrorKind::UnexpectedEof)?;
        if offset + into.len() as u64 > u64::from(self.bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        file.read_at(offset, into)
    }

    /// The copies of a segment that hold all data now.
    #[inline]
    pub fn copies(&self, files: &Files<D::File>, segment: u32) -> GoodCopies {
        files.get(segment as usize).map_or(GoodCopies::ONE, |file| file.copies())
    }

    /// Reads one copy of a segment.
    ///
    /// # Errors
    /// As [`Segments::read`]; other copies are not tried.
    pub fn read_copy(
        &self,
        files: &Files<D::File>,
        copy: usize,
        address: u64,
        into: &mut [u8],
    ) -> io::Result<()> {
        let (segment, offset) = self.split(address);
        let file = files.get(segment as usize).ok_or(io::ErrorKind::UnexpectedEof)?;
        if offset + into.len() as u64 > u64::from(self.bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        file.read_copy(copy, offset, into)
    }

    /// Reads a long range of one copy in parallel parts.
    ///
    /// # Errors
    /// As [`Segments::read_copy`].
    pub fn read_long(
        &self,
        files: &Files<D::File>,
        copy: usize,
        address: u64,
        into: &mut [u8],
    ) -> io::Result<()> {
        let part_bytes = into.len().div_ceil(PARTS).max(PART_BYTES).next_multiple_of(ALIGN);
        if into.len() <= part_bytes {
            return self.read_copy(files, copy, address, into);
        }
        std::thread::scope(|scope| {
            let parts = (address..).step_by(part_bytes).zip(into.chunks_mut(part_bytes));
            let read = move |(place, part)| self.read_copy(files, copy, place, part);
            Workers::new(scope).all(parts, read)?.into_iter().collect()
        })
    }

    /// Reads from one segment, from the first copy whose data `is_whole` accepts, and writes these
    /// data over the copies that differ. Returns how many copies were repaired. Each copy that
    /// holds all data is tried, even if another one fails during the call. If `is_whole` accepts no
    /// copy, `into` holds the data of one that could be read.
    ///
    /// # Errors
    /// As [`Segments::read`], if no copy can be read.
    #[inline]
    pub fn read_whole(
        &self,
        files: &Files<D::File>,
        address: u64,
        into: &mut [u8],
        is_whole: &dyn Fn(&[u8]) -> bool,
    ) -> io::Result<usize> {
        // Taken once: another thread may mark a copy as failed while this one reads it.
        let copies = self.copies(files, self.split(address).0);
        let read = self.read_copy(files, copies.first(), address, into);
        if read.is_ok() && is_whole(into) {
            return Ok(0);
        }
        self.read_again(files, copies, address, into, is_whole, read)
    }

    #[cold]
    fn read_again(
        &self,
        files: &Files<D::File>,
        copies: GoodCopies,
        address: u64,
        into: &mut [u8],
        is_whole: &dyn Fn(&[u8]) -> bool,
        first: io::Result<()>,
    ) -> io::Result<usize> {
        let (segment, offset) = self.split(address);
        let Some(file) = files.get(segment as usize) else { return first.map(|()| 0) };
        if copies.count() < 2 {
            return match read_resyncing(&**file, offset, into, is_whole) {
                Some(repaired) => {
                    self.repaired(usize::from(repaired), address);
                    Ok(usize::from(repaired))
                }
                // Return the damaged data of the good copy, not those of the stale one.
                None => first.and_then(|()| file.read_at(offset, into)).map(|()| 0),
            };
        }
        let mut last = first;
        for copy in copies.numbers() {
            let read = self.read_copy(files, copy, address, into);
            if read.is_ok() && is_whole(into) {
                let repaired = file.repair(offset, into).unwrap_or_else(|error| {
                    tracing::error!("segment {segment} offset {offset} is not mended: {error}");
                    None
                });
                let repaired = repaired.unwrap_or(0);
                self.repaired(repaired, address);
                return Ok(repaired);
            }
            // Damaged data take precedence over a read error.
            last = last.or(read);
        }
        last.map(|()| 0)
    }
}

/// Reads damaged data from a copy that does not hold all data. If they are intact there, writes
/// them to the good copy. Returns whether the repair succeeded; none if the data are not intact
/// there either.
pub(crate) fn read_resyncing<F: StoreFile>(
    file: &F,
    offset: u64,
    into: &mut [u8],
    is_whole: &dyn Fn(&[u8]) -> bool,
) -> Option<bool> {
    let read = file.read_resyncing(offset, into);
    if read.is_err() || !is_whole(into) {
        return None;
    }
    let repaired = file.repair_from_resyncing(offset, into);
    Some(repaired.unwrap_or_else(|error| {
        tracing::error!("what is damaged at {offset} is not mended: {error}");
        false
    }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use blockyard_store::PoolStore;
    use blockyard_testing::temp_dir::TempDir;

    use super::*;
    use crate::stepped_pool::SteppedPool;

    /// Regression: a pool kept the space of every segment that it ever had, even if no data in it
    /// were live.
    #[test]
    fn space_of_a_hole_is_allocated_again() {
        let temp_dir = TempDir::new(&std::env::temp_dir(), "blockyard-given");
        let path = temp_dir.path();
        let open = || Segments::open(PoolStore::take(path).unwrap(), 1 << 20, 12).unwrap();
        let space = || {
            let files = std::fs::read_dir(path).unwrap();
            files.map(|it| it.unwrap().metadata().unwrap().blocks() * 512).sum::<u64>() >> 20
        };
        let segments = open();
        segments.prepare(12, 0);
        let used = segments.take(AllocationClass::Checkpoint).unwrap();
        assert_eq!((segments.counts().all, space()), (12, 12));
        segments.punch_holes(7);
        let counts = segments.counts();
        assert_eq!((counts.all, counts.free, counts.hollow, space()), (12, 4, 7, 5));
        // Hollow segments are as available as those that are not made yet.
        assert_eq!(segments.available(), 4 + 7);
        assert!(
            !segments.has(AllocationClass::Checkpoint, 0, 5)
                && segments.may(AllocationClass::Checkpoint, 0, 5)
        );
        assert_eq!((segments.counts().hollow, space()), (6, 6));
        drop(segments);
        // An opening finds which of the unneeded segments have no space.
        let segments = open();
        segments.free_all_but(|number| number == used);
        let counts = segments.counts();
        assert_eq!((counts.all, counts.free, counts.hollow), (12, 5, 6));
        let taken: Vec<u32> =
            std::iter::from_fn(|| segments.take(AllocationClass::Checkpoint)).collect();
        assert_eq!((taken.len(), space()), (11, 12));
    }

    #[test]
    fn segments_in_use_are_counted_by_tenth_of_live_bytes() {
        const FULL: u64 = 64 << 10;
        let temp_dir = TempDir::new(&std::env::temp_dir(), "blockyard-live");
        let store = PoolStore::take(temp_dir.path()).unwrap();
        let segments = Segments::open(store, FULL as u32, 8).unwrap();
        segments.prepare(8, 0);
        let taken: Vec<u32> =
            (0..7).map(|_| segments.take(AllocationClass::Checkpoint).unwrap()).collect();
        assert_eq!(taken, [0, 1, 2, 3, 4, 5, 6]);
        segments.set_live(Vec::new(), 0);
        assert_eq!(
            segments.counts_by_live(),
            [7, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            "no live bytes known"
        );
        // A tenth is 6,553.6 bytes. Segment 7 is free, so its bytes are in no count.
        segments.set_live(vec![0, 6553, 6554, FULL / 2, 58_982, 58_983, FULL, FULL], 0);
        assert_eq!(segments.counts_by_live(), [2, 1, 0, 0, 0, 1, 0, 0, 1, 2]);
        // The bound of the live bytes may be above the length.
        segments.set_live(vec![0, 0, 0, 0, 0, 0, 2 * FULL], 0);
        assert_eq!(segments.counts_by_live(), [6, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        segments.put_back(6);
        assert_eq!(segments.counts_by_live(), [6, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    /// Regression: two threads that needed a segment made the same file. One wrote zeros over the
    /// other's data, or replaced the file.
    #[test]
    fn concurrent_growth_makes_different_segments() {
        let temp_dir = TempDir::new(&std::env::temp_dir(), "blockyard-segments");
        let path = temp_dir.path();
        let open = || Segments::open(PoolStore::take(path).unwrap(), 64 << 10, 64).unwrap();
        let segments = open();
        let take = |byte: u8, want| {
            let mut taken = Vec::new();
            while let Some(number) = segments.take(want) {
                let mut bytes = blockyard_store::buffer::Memory::new(4096).take_beyond(4096);
                bytes.fill(byte);
                segments.write(segments.address(number, 0), &[&bytes]).unwrap();
                taken.push((number, byte));
            }
            taken
        };
        let all: Vec<(u32, u8)> = std::thread::scope(|scope| {
            let threads = [
                (1, AllocationClass::Write),
                (2, AllocationClass::Checkpoint),
                (3, AllocationClass::Checkpoint),
            ];
            let take = &take;
            let threads = threads.map(|(byte, want)| scope.spawn(move || take(byte, want)));
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(all.len(), 64);
        drop(segments);
        let segments = open();
        for (number, byte) in all {
            let mut bytes = blockyard_store::buffer::Memory::new(4096).take_beyond(4096);
            let address = segments.address(number, 0);
            segments.read(&segments.files(), address, &mut bytes).unwrap();
            assert!(bytes.iter().all(|it| *it == byte), "segment {number}");
        }
        drop(segments);
        std::fs::remove_file(path.join(segment_name(9))).unwrap();
        let error = Segments::open(PoolStore::take(path).unwrap(), 64 << 10, 64);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("segment-00000009") && error.contains("missing"), "{error}");
    }

    /// Regression: a leaf that was replaced during the count was reported as damaged, because its
    /// place had other data by then.
    #[test]
    fn a_page_that_has_gone_meanwhile_is_looked_for_where_it_is() {
        let mut stepped = SteppedPool::new("usage");
        stepped.write(0, 4);
        stepped.checkpoint();
        let live = stepped.pool.find("v").unwrap();
        let leaf = || live.map.with(0, |span| span.node().unwrap().leaf(0).cloned().unwrap());
        let old = leaf();
        let segments = stepped.pool.segments();
        let (file, offset) = segments.place(old.location().unwrap().address()).unwrap();
        let count = |leaf: &Arc<Leaf>| {
            let page = segments.page_now(&live.map, (0, 0), leaf);
            page.map(|page| page.entries().iter().filter(|entry| !entry.is_hole()).count())
        };
        let mut bytes = stepped.pool.memory().take_beyond(4096);
        bytes.fill(9);
        while old.is_resident() {
            old.evict();
        }
        file.write_at(offset, &[&bytes]).unwrap();
        assert!(count(&old).is_err(), "it is damaged");
        let (now, mut page) = (Page::default(), Page::default());
        page.set(
            3,
            blockyard_volume_format::entry::Entry::new(4096, 4096, Default::default(), 1),
            false,
        );
        for (contents, blocks) in [(now, 0), (page, 1)] {
            let now = Arc::new(Leaf::new(Arc::new(contents), 1));
            let mut node = crate::map::Node::default();
            node.put(0, now);
            live.map.replace(0, Arc::new(node));
            assert_eq!(count(&old).unwrap(), blocks);
        }
    }
}

//! Opening a pool: loads the newest checkpoint and replays the log after it.
//!
//! The log ends where no valid group follows: none has the next number, the right chain, and an
//! epoch that is not older. A group that is missing there was never acknowledged, unless a
//! superblock or a later group states that it was durable: then the log is damaged. Nothing is
//! appended before a superblock with a new epoch is durable.
//!
//! Of groups that are known to have been durable, the heads are enough; see [`header_scan`]. The
//! others, a few at the end, are read completely and made durable.

mod groups;
mod header_scan;
mod load;
mod log_tail;
pub(crate) mod workers;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::thread::Scope;

use blockyard_store::buffer::{ALIGN, Buffer, Memory};
use blockyard_store::disk::{SEGMENT_BYTES_MIN, SEGMENTS_WANTED, shorter};
use blockyard_store::{COPIES_MAX, Layout, SegmentStore, StoreFile};
use blockyard_volume_format::FormatError;
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::catalogue::Change;
use blockyard_volume_format::entry::{Codec, Entry};
use blockyard_volume_format::group::{Descriptor, Kind, Places};
use blockyard_volume_format::superblock::{
    self, FILE, LogPlace, SEGMENT_NONE, SLOT_BYTES, SLOTS, Superblock,
};

use crate::apply::Apply;
use crate::checkpoint::{Epochs, write_superblock};
use crate::error::VolumeError;
use crate::frozen::Marks;
use crate::log::LogEnd;
use crate::map::{Frozen, Leaf, Map, NotResident};
use crate::options::Options;
use crate::pool::Volumes;
use crate::record::Move;
use crate::relocate;
use crate::roots::Roots;
use crate::segments::Segments;

use groups::{Group, Part, Piece};
use header_scan::HeaderScan;
use log_tail::LogTail;
use workers::{THREADS, Workers};

/// Length of one read-ahead of the log, in bytes.
const AHEAD_BYTES: usize = 8 << 20;

/// Segments of a new pool.
const FIRST_SEGMENTS: usize = 3;

/// Number of segments that a new directory pool should have space for: with space for fewer, its
/// segments are shorter, down to [`DIRECTORY_SEGMENT_BYTES`]. More segments would make the usage
/// table, which each checkpoint writes, longer than 256 KiB.
const DIRECTORY_SEGMENTS_WANTED: u64 = 65_536;

/// Length of the segments of a new directory pool, in bytes, unless its file system has very much
/// or very little space. A new pool with a volume has eight segments. Shorter segments waste more
/// space at their end: writes of 1 MiB fill three quarters of a segment of 4 MiB.
const DIRECTORY_SEGMENT_BYTES: u32 = 16 << 20;

/// The state of a pool after recovery.
pub(crate) struct Recovered {
    pub(crate) superblock: Superblock,
    pub(crate) volumes: Volumes,
    pub(crate) log: LogEnd,
    pub(crate) roots: Roots,
    /// Where the next checkpoint writes its pages: segment and offset.
    pub(crate) page_place: Option<(u32, u32)>,
}

/// A pool that was opened for reading only.
pub struct ReadOnlyPool<D: SegmentStore> {
    pub(crate) volumes: Volumes,
    /// The last group of the log.
    pub(crate) number: u64,
    /// How many groups the log has after the checkpoint.
    pub(crate) groups: u64,
    /// How many intact groups follow the end of the log.
    pub(crate) unused_groups: usize,
    /// Addresses of the last groups, which are not known to be durable. The power may have been cut
    /// while they were written, so each copy may have any part of them. The next opening writes
    /// them again to all copies.
    pub(crate) loose: Vec<Range<u64>>,
    pub(crate) segments: Segments<D>,
}

/// Opens the pool of a directory, or creates one.
pub(crate) fn open<D: SegmentStore>(
    directory: D,
    options: &Options,
) -> Result<(Recovered, Segments<D>), VolumeError> {
    let slots = slots(&directory)?;
    let Some(newest) = slots.first() else { return make(directory, options) };
    let segments = segments(directory, newest, options)?;
    let recovered = Recovery::loaded(&segments, &slots)?.run()?;
    Ok((recovered, segments))
}

fn segments<D: SegmentStore>(
    directory: D,
    superblock: &Superblock,
    options: &Options,
) -> Result<Segments<D>, VolumeError> {
    let Superblock { align, segment_bytes, .. } = *superblock;
    directory.set_layout(Layout { align, segment_bytes }, false)?;
    let segments = Segments::open(directory, segment_bytes, options.segments_max)?;
    Ok(segments.with_map_cache(options.map_cache_bytes))
}

/// Reads a pool without changing it: the volumes, the number of groups in the log after the
/// checkpoint, and the segments.
pub(crate) fn look<D: SegmentStore>(
    directory: D,
    options: &Options,
) -> Result<ReadOnlyPool<D>, VolumeError> {
    let slots = slots(&directory)?;
    let superblock = *slots.first().ok_or(FormatError::Short { what: FILE, len: 0 })?;
    let segments = segments(directory, &superblock, options)?;
    let mut recovery = Recovery::loaded(&segments, &slots)?;
    recovery.replay()?;
    recovery.count_space();
    segments.want(recovery.marks.last_needed())?;
    let groups = recovery.place.number.saturating_sub(recovery.superblock.log.number);
    let number = recovery.place.number.saturating_sub(1);
    let unused_groups = recovery.unused_groups;
    let volumes = std::mem::take(&mut recovery.volumes);
    let place = |(_, address, bytes): &(u64, u64, Part)| *address..*address + bytes.len() as u64;
    let loose = recovery.loose.iter().map(place).collect();
    drop(recovery);
    Ok(ReadOnlyPool { volumes, number, groups, unused_groups, loose, segments })
}

/// Which of two copies was replaced by an earlier state of itself: it lacks a group of the log that
/// was durable, or, if it is the one with the older superblock (`behind`), the newest checkpoint;
/// and the other copy lacks nothing. Both are in both copies before they are relied on, so no crash
/// leaves this. A damaged page or head in one copy does, and a resync repairs it.
pub(crate) fn older_copy<D: SegmentStore>(
    directory: D,
    behind: Option<usize>,
) -> Result<Option<usize>, VolumeError> {
    let slots = slots(&directory)?;
    let Some(superblock) = slots.first() else { return Ok(None) };
    let segments = segments(directory, superblock, &Options::default())?;
    let copies = segments.copies(&segments.files(), 0);
    let ends: Vec<_> =
        copies.numbers().map(|it| (it, log_end(&segments, superblock, it))).collect();
    let durable = ends.iter().map(|(_, (_, durable))| *durable).max().unwrap_or(0);
    let lacks = |&(copy, (last, _)): &(usize, (u64, u64))| {
        last < durable || behind == Some(copy) && !has_catalogue(&segments, superblock, copy)
    };
    let mut lacking = ends.iter().filter(|it| lacks(it)).map(|(copy, _)| *copy);
    let first = lacking.next();
    Ok(first.filter(|_| lacking.next().is_none() && ends.len() > 1))
}

/// Whether one copy has the top page of the catalogue of a checkpoint. Its checksum depends on
/// all other pages of the checkpoint.
fn has_catalogue<D: SegmentStore>(
    segments: &Segments<D>,
    superblock: &Superblock,
    copy: usize,
) -> bool {
    let top = superblock.catalogue;
    if top.is_hole() {
        return true;
    }
    let mut page = Memory::new(ALIGN as u64).take_beyond(top.stored_bytes() as usize);
    let read = segments.read_copy(&segments.files(), copy, top.address(), &mut page);
    read.is_ok() && crc(&page) == top.crc()
}

/// The number of the last group that one copy has of the log, and up to which group all are known
/// to have been durable.
fn log_end<D: SegmentStore>(
    segments: &Segments<D>,
    superblock: &Superblock,
    copy: usize,
) -> (u64, u64) {
    std::thread::scope(|scope| {
        let workers = Workers::new(scope);
        let mut heads = HeaderScan::new(&workers, segments, superblock, Some(copy));
        let (mut end, mut epoch) = (superblock.log, 0);
        let mut durable = superblock.log.number.saturating_sub(1);
        while let Some(group) = heads.next(&end, epoch) {
            (end, epoch) = (group.end(), group.head.epoch);
            durable = durable.max(group.head.durable.min(group.head.number.saturating_sub(1)));
        }
        (end.number.saturating_sub(1), durable)
    })
}

/// The superblocks that can be read, the newest first; empty if there is no pool.
fn slots<D: SegmentStore>(directory: &D) -> Result<Vec<Superblock>, VolumeError> {
    let title = directory.title();
    let doing = |what: &str| VolumeError::io(format!("{what} `{title}/{FILE}`"));
    let file = directory.open(FILE).map_err(|error| doing("cannot open")(error))?;
    let Some(file) = file else { return Ok(Vec::new()) };
    let whole = SLOTS * SLOT_BYTES as u64;
    let memory = Memory::new(whole);
    let (mut copies, mut failed) = (Vec::new(), None);
    for copy in file.copies().numbers() {
        let mut bytes = memory.take_beyond(whole as usize);
        match superblock::read(&mut bytes, |into| file.read_copy(copy, 0, into)) {
            Ok(()) => copies.push(bytes),
            Err(error) => failed = Some(error),
        }
    }
    if let Some(error) = failed.filter(|_| copies.is_empty()) {
        return match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                let len = file.len().map_err(|error| doing("cannot look at")(error))?;
                Err(FormatError::Short { what: FILE, len }.into())
            }
            _ => Err(doing("cannot read")(error)),
        };
    }
    // Superblocks that are not the newest in both copies are written again at the end of the
    // opening.
    Ok(Superblock::all(&Superblock::best(copies.iter().map(|bytes| &bytes[..])))?)
}

/// An epoch for this opening: later than all before, by 1 and a random number below 2^32. If two
/// processes opened one state, which the locks prevent, their epochs would differ, and each would
/// notice by the superblock.
fn fresh_epoch<D: SegmentStore>(directory: &D, last: u64) -> Result<u64, VolumeError> {
    let id = directory.fresh_id().map_err(VolumeError::io("cannot draw an epoch"))?;
    let step = blockyard_volume_format::bytes::u32_at(&id, 0);
    Ok(last.saturating_add(1).saturating_add(step.into()))
}

/// Returns the segment length of a new directory pool whose file system has `space` free bytes. For
/// a disk, whose space is unlimited here, [`StoreLocation::set_layout`] chooses the length.
fn in_directory(segment_bytes: u32, space: u64) -> u32 {
    let (wanted, least) = (DIRECTORY_SEGMENTS_WANTED, DIRECTORY_SEGMENT_BYTES);
    let segment_bytes = shorter(segment_bytes, space, wanted, least);
    shorter(segment_bytes, space, SEGMENTS_WANTED, SEGMENT_BYTES_MIN)
}

/// Creates a pool.
fn make<D: SegmentStore>(
    directory: D,
    options: &Options,
) -> Result<(Recovered, Segments<D>), VolumeError> {
    let title = directory.title();
    let Options { align, segment_bytes, .. } = *options;
    let segment_bytes = in_directory(segment_bytes, directory.growth_bytes());
    let division = directory.set_layout(Layout { align, segment_bytes }, true)?;
    let Layout { align, segment_bytes } = directory.set_layout(division, false)?;
    let segments = Segments::open(directory, segment_bytes, options.segments_max)?;
    let segments = segments.with_map_cache(options.map_cache_bytes);
    let directory = segments.directory();
    let files = segments.files();
    let is_used = has_data(directory, &files);
    if is_used.map_err(VolumeError::io(format!("cannot read `{title}`")))? {
        return Err(FormatError::NoSuperblock { path: title }.into());
    }
    let made = fill(&segments, align, segment_bytes);
    if made.is_err() && files.is_empty() {
        // The next creation removes what this leaves.
        _ = directory.erase();
    }
    Ok((made?, segments))
}

/// Whether segments that exist without a superblock may have data. An interrupted creation leaves
/// no more than the first segments, which are empty. A disk has all of its segments, and data of
/// former pools in them: the first one is empty if the disk was prepared for this pool.
fn has_data<D: SegmentStore>(directory: &D, files: &[Arc<D::File>]) -> io::Result<bool> {
    let is_disk = directory.segments_max() != usize::MAX;
    if !is_disk && files.len() > FIRST_SEGMENTS {
        return Ok(true);
    }
    let memory = Memory::new(ALIGN as u64);
    let mut bytes = memory.take_beyond(ALIGN);
    for file in files.iter().take(if is_disk { 1 } else { FIRST_SEGMENTS }) {
        file.read_at(0, &mut bytes)?;
        if bytes.iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes the first segments of a new pool, and then its superblock.
fn fill<D: SegmentStore>(
    segments: &Segments<D>,
    align: u32,
    segment_bytes: u32,
) -> Result<Recovered, VolumeError> {
    let directory = segments.directory();
    let title = directory.title();
    while segments.counts().all < FIRST_SEGMENTS {
        if !segments.grow() {
            let wanted = u64::from(segment_bytes) * FIRST_SEGMENTS as u64;
            let error =
                io::Error::other(format!("expected space for {wanted} bytes, to begin with"));
            return Err(VolumeError::io(format!("cannot make a pool in `{title}`"))(error));
        }
    }
    let doing = || VolumeError::io(format!("cannot make `{title}/{FILE}`"));
    let next = SEGMENT_NONE;
    let superblock = Superblock {
        id: directory.fresh_id().map_err(|error| doing()(error))?,
        align,
        segment_bytes,
        sequence: 0,
        epoch: fresh_epoch(segments.directory(), 0)?,
        log: LogPlace { segment: 0, offset: 0, next, number: 1, chain: 0 },
        catalogue: Entry::HOLE,
        catalogue_bytes: 0,
        catalogue_crc: 0,
        durable: 0,
    };
    let whole = SLOTS * SLOT_BYTES as u64;
    let memory = Memory::new(whole);
    let mut bytes = memory.take_beyond(whole as usize);
    bytes.fill(0);
    superblock.print(&mut bytes[..SLOT_BYTES]);
    let new = format!("{FILE}.new");
    let made = (|| {
        let file = directory.create(&new, whole)?;
        file.write_at(0, &[&bytes])?;
        file.sync()?;
        directory.rename(&new, FILE)?;
        directory.sync_names()
    })();
    made.map_err(|error| doing()(error))?;
    segments.free_all_but(|number| number == 0);
    let (place, epoch) = (superblock.log, superblock.epoch);
    let log = LogEnd { place, epoch, durable: 0, found_bytes: 0 };
    let volumes = Volumes { next_id: 1, ..Volumes::default() };
    let (roots, page_place) = (Roots::default(), None);
    Ok(Recovered { superblock, volumes, log, roots, page_place })
}

/// The state of a recovery in progress.
struct Recovery<'a, D: SegmentStore> {
    segments: &'a Segments<D>,
    superblock: Superblock,
    /// The latest epoch of the superblocks that were found.
    newest_epoch: u64,
    memory: Arc<Memory>,
    volumes: Volumes,
    marks: Marks,
    /// Roots of maps and pages of the catalogue.
    roots: Roots,
    page_place: Option<(u32, u32)>,
    page_count: u64,
    place: LogPlace,
    epoch: u64,
    /// Groups up to this number are known to have been durable.
    durable: u64,
    /// Segments in which groups were found.
    used: BTreeSet<u32>,
    /// For each copy, the segment that was looked at last, and the number of its first group.
    peeked: [Cell<Option<(u32, u64)>>; COPIES_MAX],
    /// For each copy, a part of the log that was read ahead.
    ahead: [RefCell<Option<Piece>>; COPIES_MAX],
    /// Groups that may not be durable: number, address and bytes. They are part of the log, so they
    /// must become durable.
    loose: VecDeque<(u64, u64, Part)>,
    /// Bytes of the groups that were found.
    found_bytes: u64,
    /// How many intact groups follow the end of the log.
    unused_groups: usize,
}

impl<'a, D: SegmentStore> Recovery<'a, D> {
    fn new(segments: &'a Segments<D>, superblock: Superblock) -> Recovery<'a, D> {
        Recovery {
            segments,
            superblock,
            newest_epoch: superblock.epoch,
            memory: Memory::new(ALIGN as u64),
            volumes: Volumes { next_id: 1, ..Volumes::default() },
            marks: Marks::new(segments.bytes()),
            roots: Roots::default(),
            page_place: None,
            page_count: 0,
            place: superblock.log,
            epoch: 0,
            durable: superblock.log.number.saturating_sub(1),
            used: BTreeSet::new(),
            peeked: Default::default(),
            ahead: Default::default(),
            loose: VecDeque::new(),
            found_bytes: 0,
            unused_groups: 0,
        }
    }

    /// Loads the newest checkpoint, or the one before it if the newest is damaged.
    fn loaded(
        segments: &'a Segments<D>,
        slots: &[Superblock],
    ) -> Result<Recovery<'a, D>, VolumeError> {
        let mut first = None;
        for superblock in slots {
            let mut recovery = Recovery::new(segments, *superblock);
            match recovery.load() {
                Ok(()) if first.is_none() => return Ok(recovery),
                Ok(()) => {
                    // The next superblock must overwrite the slot of the damaged checkpoint.
                    if let Some(newest) = slots.first() {
                        recovery.superblock.sequence = newest.sequence.saturating_add(1);
                        recovery.newest_epoch = newest.epoch.max(superblock.epoch);
                        // The log must contain everything up to the damaged checkpoint.
                        let durable = newest.log.number.saturating_sub(1);
                        recovery.durable = recovery.durable.max(durable).max(newest.durable);
                    }
                    return Ok(recovery);
                }
                Err(error) => {
                    let title = segments.directory().title();
                    tracing::warn!("{title}: a checkpoint is damaged: {error}");
                    first.get_or_insert(error);
                }
            }
        }
        Err(first.unwrap_or_else(|| FormatError::Short { what: FILE, len: 0 }.into()))
    }

    fn run(mut self) -> Result<Recovered, VolumeError> {
        self.replay()?;
        self.fasten()?;
        let owned = self.newest_epoch;
        let epoch = fresh_epoch(self.segments.directory(), self.epoch.max(owned))?;
        let sequence = self.superblock.sequence.saturating_add(2);
        let durable = self.place.number.saturating_sub(1);
        let superblock = Superblock { epoch, sequence, durable, ..self.superblock };
        let title = self.segments.directory().title();
        // Write both slots: segments that only the older slot needed are free from now on, and the
        // newer slot may have been in memory only.
        let first = Superblock { sequence: sequence.saturating_sub(1), ..superblock };
        let written = write_superblock(self.segments, &first, Epochs::UpTo(owned))
            .and_then(|()| write_superblock(self.segments, &superblock, Epochs::Of(epoch)));
        written.map_err(VolumeError::io(format!("cannot write `{title}/{FILE}`")))?;
        self.count_space();
        let log = LogEnd { place: self.place, epoch, durable, found_bytes: self.found_bytes };
        let (volumes, roots, page_place) = (self.volumes, self.roots, self.page_place);
        Ok(Recovered { superblock, volumes, log, roots, page_place })
    }

    /// Counts the pages of the checkpoint, and frees the segments that are not needed: it keeps
    /// those that the checkpoint needs, those of the log after it, and those of the current maps.
    /// Changes nothing on disk.
    fn count_space(&mut self) {
        let maps: Vec<Frozen> = self.volumes.by_id.values().map(|live| live.map.freeze()).collect();
        self.marks.pages(maps.iter());
        self.marks.blocks(&self.segments.live().0);
        let (place, begin) = (self.place, self.superblock.log);
        self.segments.free_all_but(|number| {
            let log = [place.segment, place.next, begin.segment, begin.next].contains(&number);
            log || self.used.contains(&number) || self.marks.is_needed(number)
        });
        self.segments.set_upper(self.roots.count());
        self.segments.set_pages(self.page_count);
        let rest = |(_, offset): (u32, u32)| self.superblock.segment_bytes - offset;
        self.segments.set_rest(self.page_place.map_or(0, rest));
    }

    fn read(
        &self,
        copy: usize,
        address: u64,
        len: usize,
        what: &str,
    ) -> Result<Buffer, VolumeError> {
        let mut bytes = self.memory.take_beyond(len);
        let read = self.segments.read_long(&self.segments.files(), copy, address, &mut bytes);
        read.map_err(VolumeError::io(format!("cannot read {what} at {address} of the pool")))?;
        Ok(bytes)
    }

    /// Replays the log.
    fn replay(&mut self) -> Result<(), VolumeError> {
        std::thread::scope(|scope| self.replay_with_workers(scope))
    }

    /// Replays the log, with threads of `scope` that read concurrently.
    fn replay_with_workers<'scope>(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
    ) -> Result<(), VolumeError>
    where
        'a: 'scope,
    {
        let workers = Workers::new(scope);
        self.replay_durable(&workers)?;
        while let Some(group) = self.look_for_next()? {
            self.take(group, &workers)?;
        }
        // A segment exists before anything names it, so one that is missing was lost.
        for segment in [self.place.segment, self.place.next] {
            self.segments.want((segment != SEGMENT_NONE).then_some(segment as usize))?;
        }
        let (segments, superblock, place) = (self.segments, &self.superblock, self.place);
        for copy in self.copies().numbers() {
            let missing = LogTail { segments, superblock, place, copy };
            self.unused_groups = self.unused_groups.max(missing.check(self.durable, self.epoch)?);
        }
        if self.unused_groups > 0 {
            let (title, number) = (self.segments.directory().title(), self.place.number);
            tracing::warn!(
                "{title}: the log ends before group {number}, but {} later groups are intact: the \
                 power was cut while they were written, or group {number} is damaged; writes in \
                 these groups are lost",
                self.unused_groups
            );
        }
        Ok(())
    }

    /// Replays the groups of the log that are known to have been durable.
    fn replay_durable<'scope>(&mut self, workers: &Workers<'scope, '_>) -> Result<(), VolumeError>
    where
        'a: 'scope,
    {
        self.durable = self.durable.max(self.superblock.durable);
        let mut heads = HeaderScan::new(workers, self.segments, &self.superblock, None);
        let (mut end, mut epoch) = (self.place, self.epoch);
        // The group up to which later heads of this chain state that all groups were durable. The
        // superblock does not say of which chain, and there may be heads that an opening has cut
        // off.
        let mut vouched = 0;
        let mut seen = VecDeque::new();
        while let Some(group) = heads.next(&end, epoch) {
            (end, epoch) = (group.end(), group.head.epoch);
            // A head cannot state this about its own group.
            let before = group.head.number.saturating_sub(1);
            vouched = vouched.max(group.head.durable.min(before));
            self.durable = self.durable.max(vouched);
            seen.push_back(group);
            while let Some(group) = seen.pop_front_if(|group| group.head.number <= vouched) {
                let (chain, is_enough) = (group.chain, !group.changes_catalogue());
                let group = if is_enough { Some(group) } else { self.look_for_next()? };
                // A missing group that was durable is reported when the end of the log is checked.
                let Some(group) = group else { return Ok(()) };
                let is_same = group.chain == chain;
                self.take(group, workers)?;
                if !is_same {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The next group, read completely.
    fn look_for_next(&self) -> Result<Option<Group>, VolumeError> {
        if let Some(group) = self.next()? {
            return Ok(Some(group));
        }
        // Read again before concluding that no group follows: a read may have gone astray.
        self.ahead.iter().for_each(|ahead| _ = ahead.take());
        self.peeked.iter().for_each(|peeked| _ = peeked.take());
        self.next()
    }

    /// Applies a group, and moves the end of the log past it.
    fn take<'scope>(
        &mut self,
        group: Group,
        workers: &Workers<'scope, '_>,
    ) -> Result<(), VolumeError>
    where
        'a: 'scope,
    {
        self.prefetch(&group, workers)?;
        self.apply(&group)?;
        self.place = group.end();
        let Group { segment, offset, head, bytes, .. } = group;
        self.used.insert(segment);
        self.found_bytes += u64::from(head.head_bytes + head.payload_bytes);
        self.epoch = head.epoch;
        self.durable = self.durable.max(head.durable);
        let address = self.segments.address(segment, offset);
        self.loose.extend(bytes.map(|bytes| (head.number, address, bytes)));
        while self.loose.front().is_some_and(|(number, ..)| *number <= self.durable) {
            self.loose.pop_front();
        }
        Ok(())
    }

    /// Reads the leaves that a group changes, if there are many.
    fn prefetch<'scope>(
        &self,
        group: &Group,
        workers: &Workers<'scope, '_>,
    ) -> Result<(), VolumeError>
    where
        'a: 'scope,
    {
        let mut leaves: HashMap<*const Leaf, Arc<Leaf>> = HashMap::new();
        for Descriptor { kind, volume, block, .. } in &group.descriptors {
            let live = self.volumes.by_id.get(volume).filter(|_| *kind == Kind::Data);
            let Some(live) = live.filter(|live| *block < live.meta.blocks) else { continue };
            let (span, at) = Map::place(*block);
            if let Some(NotResident(leaf)) = live.map.with(span, |span| span.away(at, at + 1)) {
                leaves.insert(Arc::as_ptr(&leaf), leaf);
            }
        }
        if leaves.len() < THREADS {
            return Ok(());
        }
        let segments = self.segments;
        workers.each(leaves.into_values(), move |leaf| {
            // A read error is reported when the leaf is needed.
            _ = segments.load(&leaf);
            Ok(())
        })
    }

    /// Applies the descriptors of a group.
    fn apply(&mut self, group: &Group) -> Result<(), VolumeError> {
        let align = self.superblock.align;
        let impossible = |field, value| {
            let (what, want) = ("group of the log", "something that is there");
            VolumeError::Format(FormatError::Field { what, field, value, want })
        };
        let (head_bytes, mut places) = (group.head.head_bytes, Places::default());
        let mut moves: Vec<Move> = Vec::new();
        let segments = self.segments;
        let mut maps = Apply::new(segments, self.volumes.copies);
        for descriptor in &group.descriptors {
            // In log order: a move does not affect blocks that are written after it.
            if descriptor.kind != Kind::Move && !moves.is_empty() {
                relocate::blocks(&self.volumes, &moves, &mut maps)?;
                moves.clear();
            }
            let Descriptor { kind, codec, volume, block, len, crc, .. } = *descriptor;
            let (at, stored) = places.next(descriptor, align);
            let at = head_bytes + at as u32;
            let address = segments.address(group.segment, group.offset + at);
            if kind == Kind::Move {
                let end = segments.address(segments.counts().all as u32, 0);
                if descriptor.to.saturating_add(u64::from(len)) > end {
                    return Err(impossible("to", descriptor.to));
                }
                let place = |address| Entry::new(address, len, codec, crc);
                let (from, to) = (place(descriptor.from), place(descriptor.to));
                moves.push(Move { family: volume, block, from, to });
            } else if kind == Kind::Catalogue {
                let bytes = group.bytes.as_ref().expect("such a group is looked at as a whole");
                let change = Change::parse(&bytes[at as usize..][..len as usize])?;
                self.volumes.apply(&change, &mut maps)?;
            } else {
                let live = self.volumes.by_id.get(&volume);
                let live = live.ok_or_else(|| impossible("volume", volume.into()))?;
                let blocks = if kind == Kind::Zero { u64::from(len) } else { 1 };
                let end = block.checked_add(blocks).ok_or_else(|| impossible("block", block))?;
                if end > live.meta.blocks {
                    return Err(impossible("block", block));
                }
                if kind == Kind::Data && codec == Codec::Raw && stored != live.meta.block_bytes {
                    return Err(impossible("length of a block", stored.into()));
                }
                if kind == Kind::Zero {
                    maps.zero(live, block, blocks)?;
                } else {
                    maps.write(live, block, &[Entry::new(address, stored, codec, crc)])?;
                }
            }
        }
        // Apply the moves before the next group: their old addresses may be used again by then.
        relocate::blocks(&self.volumes, &moves, &mut maps)
    }

    /// Makes the found groups durable that may not be. After a kill or a failed sync they may be in
    /// memory only, and everything that is written from now on relies on them.
    fn fasten(&mut self) -> Result<(), VolumeError> {
        let segments = self.segments;
        let failed = || VolumeError::io("cannot write the end of the log again");
        let write = move |(_, address, bytes): &(u64, u64, Part)| {
            segments.write(*address, &[bytes]).map_err(|error| failed()(error))
        };
        let bytes: usize = self.loose.iter().map(|(.., bytes)| bytes.len()).sum();
        match bytes >= AHEAD_BYTES {
            true => std::thread::scope(|it| Workers::new(it).each(self.loose.iter(), write))?,
            false => self.loose.iter().try_for_each(write)?,
        }
        let touched = self.loose.iter().map(|(_, address, _)| segments.split(*address).0);
        let touched: BTreeSet<u32> = touched.collect();
        let mut synced = touched.into_iter().map(|segment| segments.sync(segment));
        synced.try_for_each(|synced| synced.map_err(|error| failed()(error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_of_a_new_pool_are_as_long_as_its_space_makes_worth_it() {
        const MIB: u32 = 1 << 20;
        let default = Options::default().segment_bytes;
        for (space, wanted) in [
            (0, 4 * MIB),
            (300 << 20, 4 * MIB),
            (600 << 20, 8 * MIB),
            (1 << 30, 16 * MIB),
            (1 << 40, 16 * MIB),
            ((2 << 40) - 1, 16 * MIB),
            (2 << 40, 32 * MIB),
            (u64::MAX, 32 * MIB),
        ] {
            assert_eq!(in_directory(default, space), wanted, "{space}");
            // Shorter ones that were asked for stay.
            assert_eq!(in_directory(MIB, space), MIB, "{space}");
        }
    }
}

//! Reads blocks and map pages and compares them with their checksums: to check a closed pool, and
//! to scrub an open one.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use blockyard_store::buffer::{Buffer, Memory};
use blockyard_store::mirror::{CopyStatus, VerifyPool};
use blockyard_store::{Mirror, SegmentStore, StoreError, StoreFile, StoreLocation as _};
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::entry::{Entry, STORED_MAX};
use blockyard_volume_format::sealed::encrypted_len;
use blockyard_volume_format::{BLOCK_BYTES_MAX, FAN, FormatError, NODE_BLOCKS, PAGE_BYTES, UNIT};

use crate::codec;
use crate::error::VolumeError;
use crate::map::page::parse_node;
use crate::map::{Frozen, Lookup, Map, Page};
use crate::options::Options;
use crate::record::OpenVolume;
use crate::recovery::{self, ReadOnlyPool};
use crate::segments::{Files, Segments, read_resyncing};

/// Most damaged blocks that the report lists individually.
const REPORTED_MAX: usize = 1000;

/// Most damaged blocks that are logged individually; the others are only in the report.
const LOGGED_MAX: usize = 20;

/// How often a repair is tried while pages of its range are being written.
const ATTEMPTS_MAX: usize = 1000;

/// The pause between two such attempts.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(1);

/// A block that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// One of the volumes or snapshots that contain the block.
    pub volume: String,
    /// The number of the block in that volume; for a damaged map page, the first block that the
    /// page maps.
    pub block: u64,
    /// The address in the pool, in bytes.
    pub address: u64,
    /// A description of the damage.
    pub what: String,
}

/// The result of verifying a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of volumes and snapshots.
    pub volumes: u64,
    /// Blocks that are stored; a shared block is counted once.
    pub blocks: u64,
    /// Bytes of these blocks, as stored.
    pub stored_bytes: u64,
    /// Groups in the log after the checkpoint; 0 for a pool that is in use, whose log is not read.
    pub groups: u64,
    /// Blocks and pages that are damaged in at least one copy.
    pub damaged: u64,
    /// Blocks and pages that were damaged in one of two copies and were repaired from the other.
    pub repaired: u64,
    /// How many blocks of the last groups of the log reached only one of two copies before a kill
    /// or a power cut. They are not damaged: the next opening writes them to the other copy.
    pub in_one_copy: u64,
    /// Intact groups after the end of the log. The power was cut while they were written, or the
    /// group before them is damaged: the next opening does not use them.
    pub unused_groups: u64,
    /// The state of each copy, if the pool has two.
    pub copies: Vec<CopyStatus>,
    /// The first damaged blocks and pages, described.
    pub damage: Vec<Damage>,
}

/// Verifies the pool in any [`SegmentStore`], without changing it. `progress` gets the number of
/// bytes that were verified.
///
/// # Errors
/// If the pool is too damaged to be opened.
pub fn verify<D: SegmentStore>(
    directory: Mirror<D>,
    progress: &mut dyn FnMut(u64),
) -> Result<Report, VolumeError> {
    let ReadOnlyPool { volumes, groups, unused_groups, loose, segments, .. } =
        recovery::look(directory, &Options::default())?;
    let mut verifier = Verifier::new(&segments, false).with_loose(loose);
    for live in volumes.by_id.values() {
        let (frozen, now) = (live.map.freeze(), || Some(Arc::clone(live)));
        verifier.volume(live.meta.block_bytes, (&frozen, 0), &now, &mut |step| {
            progress(step.bytes);
            true
        });
    }
    verifier.counts();
    // What the writer of the pool has removed meanwhile is no damage.
    let checked = segments.directory().check_location();
    checked.map_err(|source| StoreError::Io { doing: "cannot verify the pool".into(), source })?;
    let volumes = volumes.by_id.len() as u64;
    let copies = segments.directory().copy_status();
    let unused_groups = unused_groups as u64;
    Ok(Report { volumes, groups, unused_groups, copies, ..verifier.report })
}

/// Reads a pool when its copies are assembled.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolVerifier;

impl VerifyPool for PoolVerifier {
    type Error = VolumeError;

    fn check_opens<D: SegmentStore>(
        &self,
        copies: Mirror<D>,
        segments_max: usize,
    ) -> Result<(), VolumeError> {
        let options = Options::default();
        let segments_max = segments_max.min(options.segments_max);
        recovery::look(copies, &Options { segments_max, ..options }).map(drop)
    }

    fn older_copy<D: SegmentStore>(
        &self,
        copies: Mirror<D>,
        behind: Option<usize>,
    ) -> Result<Option<usize>, VolumeError> {
        recovery::older_copy(copies, behind)
    }
}

/// Verified addresses, so that shared data are read once. One bit per unit.
#[derive(Debug, Default)]
struct Seen(HashMap<u64, Box<[u64; 1024]>>);

impl Seen {
    /// Adds an address. Returns whether it is new.
    fn note(&mut self, address: u64) -> bool {
        let unit = address / UNIT;
        let (page, bit) = (unit / 65_536, unit % 65_536);
        let page = self.0.entry(page).or_insert_with(|| Box::new([0; 1024]));
        let (word, mask) = (&mut page[bit as usize / 64], 1 << (bit % 64));
        let is_new = *word & mask == 0;
        *word |= mask;
        is_new
    }
}

/// The intact blocks of a segment that maps refer to.
#[derive(Debug)]
struct Named {
    bytes: u64,
    /// The first of these blocks: a volume that has it, its number there, and its address.
    volume: String,
    block: u64,
    address: u64,
}

/// Verifies the data of volumes.
pub struct Verifier<'a, D: SegmentStore> {
    segments: &'a Segments<D>,
    stored: Buffer,
    plain: Buffer,
    seen: Seen,
    /// For blocks that were lost with a map page: which were reported already. The key is the entry
    /// of the lost page and the leaf's number in the map.
    lost: HashMap<(Entry, u64), [u64; FAN / 64]>,
    /// Whether data that are damaged in one copy and intact in another are repaired.
    mends: bool,
    /// Addresses of groups that may have reached one copy only.
    loose: Vec<Range<u64>>,
    /// Bytes of map pages that were verified.
    page_bytes: u64,
    /// The blocks that maps refer to, by segment.
    named: BTreeMap<u32, Named>,
    /// Upper bound of the live bytes of each segment at the times when volumes were examined.
    before: Vec<u64>,
    /// What was found so far.
    pub report: Report,
}

/// How far a verification has come.
#[derive(Clone, Copy, Debug)]
pub struct VerifyStep<'r> {
    /// What was found so far.
    pub report: &'r Report,
    /// The bytes of blocks and map pages that this verifier has verified.
    pub bytes: u64,
    /// The first block of the volume that is not verified.
    pub block: u64,
}

/// Finds the current state of a volume, if it exists. The caller does not keep a reference all the
/// time, because a volume that is referred to cannot be changed.
pub type Now<'a> = dyn Fn() -> Option<Arc<OpenVolume>> + 'a;

impl<'a, D: SegmentStore> Verifier<'a, D> {
    /// A verifier of a pool's data. With `mends`, it repairs one copy from the other.
    pub fn new(segments: &'a Segments<D>, mends: bool) -> Verifier<'a, D> {
        let memory = Memory::new(1 << 20);
        Verifier {
            segments,
            stored: memory.take_beyond(STORED_MAX as usize),
            plain: memory.take_beyond(BLOCK_BYTES_MAX as usize),
            seen: Seen::default(),
            lost: HashMap::new(),
            mends,
            loose: Vec::new(),
            page_bytes: 0,
            named: BTreeMap::new(),
            before: Vec::new(),
            report: Report::default(),
        }
    }

    /// Sets the addresses of groups that may have reached one copy only, which is not damage.
    pub fn with_loose(self, loose: Vec<Range<u64>>) -> Verifier<'a, D> {
        Verifier { loose, ..self }
    }

    /// Verifies a volume or snapshot by its map from a block on, except for data that earlier ones
    /// share. `now` finds its current state, unless it was removed. After each leaf, `goes_on` is
    /// called and returns whether to continue. Returns whether it did so to the end.
    pub fn volume(
        &mut self,
        block_bytes: u32,
        (frozen, from): (&Frozen, u64),
        now: &Now<'_>,
        goes_on: &mut dyn FnMut(&VerifyStep<'_>) -> bool,
    ) -> bool {
        // Blocks written since then are in segments that had fewer live bytes at that time.
        let live = self.segments.live().0;
        self.before.resize(self.before.len().max(live.len()), 0);
        let counts = self.before.iter_mut().zip(live);
        counts.for_each(|(before, now)| *before = now.max(*before));
        for (number, node) in (0..).zip(frozen) {
            let Some(node) = node.as_ref().filter(|_| (number + 1) * NODE_BLOCKS > from) else {
                continue;
            };
            if !self.page(now, number * NODE_BLOCKS, node.location(), What::Node) {
                continue;
            }
            for (at, leaf) in node.leaves() {
                let first = number * NODE_BLOCKS + (at * FAN) as u64;
                if first + FAN as u64 <= from {
                    continue;
                }
                if !self.page(now, first, leaf.location(), What::Leaf) {
                    continue;
                }
                // A leaf that cannot be read was reported by `page`, or has moved meanwhile.
                let page = self.segments.page(leaf).ok();
                let entries = page.iter().flat_map(|page| page.entries());
                for (block, entry) in (first..).zip(entries) {
                    if entry.is_lost() {
                        self.lost(now, block, entry);
                    } else if !entry.is_hole() && self.seen.note(entry.address()) {
                        self.block(now, block_bytes, block, entry);
                    }
                }
                let step = VerifyStep {
                    report: &self.report,
                    bytes: self.report.stored_bytes + self.page_bytes,
                    block: first + FAN as u64,
                };
                if !goes_on(&step) {
                    return false;
                }
            }
        }
        true
    }

    fn block(&mut self, now: &Now<'_>, block_bytes: u32, block: u64, entry: &Entry) {
        self.report.blocks += 1;
        self.report.stored_bytes += u64::from(entry.stored_bytes());
        let Some(what) = self.wrong(entry, What::Block(block_bytes)) else {
            self.name(now, block, entry);
            return;
        };
        if let Some(live) = self.still(now, block, entry) {
            self.report_block(&live, block, entry, what);
        }
    }

    /// Reports a block that was lost with the map page that named it.
    fn lost(&mut self, now: &Now<'_>, block: u64, entry: &Entry) {
        let (leaf, at) = (block / FAN as u64, block as usize % FAN);
        let is_reported = |reported: &[u64; FAN / 64]| reported[at / 64] >> (at % 64) & 1 == 1;
        if self.lost.get(&(*entry, leaf)).is_some_and(is_reported) {
            return;
        }
        if let Some(live) = self.still(now, block, entry) {
            self.lost.entry((*entry, leaf)).or_default()[at / 64] |= 1 << (at % 64);
            let what = "it was lost with the page of the map that named it".to_owned();
            self.report_block(&live, block, entry, what);
        }
    }

    /// The volume, if it still has this block there. The block may have moved, or been overwritten,
    /// since the map was read.
    fn still(&self, now: &Now<'_>, block: u64, entry: &Entry) -> Option<Arc<OpenVolume>> {
        let live = now()?;
        let (span, at) = Map::place(block);
        if span >= live.map.span_count() {
            return None;
        }
        let found = live.map.with(span, |span| span.find(at));
        let is_there = match found {
            Lookup::Disk(now) => now == *entry,
            Lookup::NotResident(leaf) => {
                let page = self.segments.page(&leaf);
                page.is_ok_and(|page| page.entries()[at as usize % FAN] == *entry)
            }
            _ => false,
        };
        is_there.then_some(live)
    }

    /// Adds an intact block.
    fn name(&mut self, now: &Now<'_>, block: u64, entry: &Entry) {
        let (segment, address) = (self.segments.split(entry.address()).0, entry.address());
        let named = self.named.entry(segment).or_insert_with(|| {
            let volume = now().map_or_else(String::new, |live| live.meta.name.clone());
            Named { bytes: 0, volume, block, address }
        });
        named.bytes += u64::from(entry.stored_bytes());
    }

    /// Compares the blocks that maps refer to with the usage table, while neither changes. A
    /// segment for which the table has too little could be taken for empty and overwritten.
    pub fn counts(&mut self) {
        for (segment, named) in std::mem::take(&mut self.named) {
            let Named { bytes, volume, block, address } = named;
            let counted = self.segments.live_bytes(segment);
            if counted >= bytes {
                continue;
            }
            let what = format!(
                "its segment {segment} has {bytes} bytes of blocks, and {counted} are counted"
            );
            self.note(volume, block, address, what);
        }
    }

    /// Whether the usage table may have too little for a segment, while maps change. A block that
    /// was found in a map may be garbage by now, but it was live when the scrub began, unless it
    /// was written later.
    pub fn is_too_little_counted(&self) -> bool {
        self.named.iter().any(|(segment, named)| {
            let before = self.before.get(*segment as usize).copied().unwrap_or(0);
            self.segments.live_bytes(*segment).max(before) < named.bytes
        })
    }

    /// Verifies a map page. Returns whether its entries still need to be verified: those of a page
    /// seen before do not.
    fn page(&mut self, now: &Now<'_>, first: u64, location: Option<Entry>, kind: What) -> bool {
        let Some(location) = location else { return true };
        if !self.seen.note(location.address()) {
            return false;
        }
        self.page_bytes += PAGE_BYTES as u64;
        let Some(what) = self.wrong(&location, kind) else { return true };
        let Some(live) = now() else { return true };
        let (span, at) = Map::place(first);
        if span >= live.map.span_count() {
            return true;
        }
        let is_there = live.map.with(span, |span| {
            let node = span.node();
            let leaf = node.and_then(|node| node.leaf(at as usize / FAN)?.location());
            node.and_then(|node| node.location()) == Some(location) || leaf == Some(location)
        });
        if is_there {
            self.report_block(&live, first, &location, what);
        }
        true
    }

    fn report_block(&mut self, live: &OpenVolume, block: u64, entry: &Entry, what: String) {
        self.note(live.meta.name.clone(), block, entry.address(), what);
    }

    fn note(&mut self, volume: String, block: u64, address: u64, what: String) {
        self.report.damaged += 1;
        let reported = self.report.damage.len();
        if reported < LOGGED_MAX {
            tracing::error!("{volume}: block {block}, at {address} of the pool: {what}");
        } else if reported == LOGGED_MAX {
            tracing::error!("more is damaged: the report names up to {REPORTED_MAX} blocks");
        }
        if reported < REPORTED_MAX {
            self.report.damage.push(Damage { volume, block, address, what });
        }
    }

    /// Describes the damage of the data at an entry, in all copies or in some.
    fn wrong(&mut self, entry: &Entry, kind: What) -> Option<String> {
        let files = self.segments.files();
        let (segment, offset) = self.segments.split(entry.address());
        let file = files.get(segment as usize);
        let copies = self.segments.copies(&files, segment);
        let (mut bad, mut good) = (Vec::new(), None);
        for copy in copies.numbers() {
            match self.wrong_in(copy, entry, kind) {
                Some(what) if copies.count() > 1 => {
                    let status = self.segments.directory().copy_status();
                    let status = status.iter().find(|it| it.number == copy);
                    let title = status.map_or("", |copy| &copy.path);
                    bad.push((copy, format!("{title}: {what}")));
                }
                Some(what) => return self.spared(entry).map_or(Some(what), |()| None),
                None => good = Some(copy),
            }
        }
        if good.is_some()
            && !bad.is_empty()
            && self.loose.iter().any(|group| group.contains(&entry.address()))
        {
            self.report.in_one_copy += 1;
            return None;
        }
        let (Some(good), Some(file)) = (good.filter(|_| self.mends && !bad.is_empty()), file)
        else {
            return self.in_use(bad, &files, segment);
        };
        // The buffer may have the data of a bad copy.
        let bytes = &mut self.stored[..entry.stored_bytes() as usize];
        let read = self.segments.read_copy(&files, good, entry.address(), bytes);
        if read.is_err() || crc(bytes) != entry.crc() {
            return self.in_use(bad, &files, segment);
        }
        let mut attempts = 0;
        let repaired = loop {
            match file.repair(offset, bytes) {
                // The write ends in any case. If one copy cannot be written, that marks it as
                // failed.
                Ok(None) if attempts < ATTEMPTS_MAX => {
                    attempts += 1;
                    std::thread::sleep(ATTEMPT_PAUSE);
                }
                other => break other,
            }
        };
        match repaired {
            Ok(Some(repaired @ 1..)) => {
                self.report.repaired += repaired as u64;
                let what = self.in_use(bad, &files, segment).unwrap_or_default();
                tracing::debug!("at {} of the pool: mended: {what}", entry.address());
                self.segments.repaired(repaired, entry.address());
                None
            }
            // A reader has repaired the data, they have moved or are still being written, or the
            // copy has failed.
            Ok(Some(0) | None) => {
                bad.retain(|(copy, _)| self.wrong_in(*copy, entry, kind).is_some());
                self.in_use(bad, &files, segment)
            }
            Err(error) => {
                let what = self.in_use(bad, &files, segment)?;
                Some(format!("{what}; it could not be mended: {error}"))
            }
        }
    }

    /// Describes the damage in the copies that are still in use; `None` if all of these have
    /// failed: then the remaining copy is intact.
    fn in_use(
        &self,
        bad: Vec<(usize, String)>,
        files: &Files<D::File>,
        segment: u32,
    ) -> Option<String> {
        let copies = self.segments.copies(files, segment);
        let is_used = |copy: usize| copies.numbers().any(|number| number == copy);
        let bad = bad.into_iter().filter(|(copy, _)| is_used(*copy));
        let bad: Vec<String> = bad.map(|(_, what)| what).collect();
        (!bad.is_empty()).then(|| bad.join("; "))
    }

    /// Repairs the data at an entry from a stale copy, if there is one and no other good copy.
    fn spared(&mut self, entry: &Entry) -> Option<()> {
        if !self.mends {
            return None;
        }
        let (segment, offset) = self.segments.split(entry.address());
        let files = self.segments.files();
        let bytes = &mut self.stored[..entry.stored_bytes() as usize];
        let is_whole = |bytes: &[u8]| crc(bytes) == entry.crc();
        let repaired = read_resyncing(&**files.get(segment as usize)?, offset, bytes, &is_whole)?;
        self.report.repaired += u64::from(repaired);
        self.segments.repaired(usize::from(repaired), entry.address());
        repaired.then_some(())
    }

    /// Describes the damage of the data at an entry in one copy.
    fn wrong_in(&mut self, copy: usize, entry: &Entry, kind: What) -> Option<String> {
        let bytes = &mut self.stored[..entry.stored_bytes() as usize];
        let read = self.segments.read_copy(&self.segments.files(), copy, entry.address(), bytes);
        if let Err(error) = read {
            return Some(error.to_string());
        }
        let (found, want) = (crc(bytes), entry.crc());
        if found != want {
            let what = if matches!(kind, What::Block(_)) { "block" } else { "page of the map" };
            return Some(FormatError::Checksum { what, found, want }.to_string());
        }
        let (whole, what) = match kind {
            What::Block(size) => {
                let plain = &mut self.plain[..size as usize];
                match entry.codec().is_sealed() {
                    // Without the key no more can be said of a block whose checksum is right.
                    true => (encrypted_len(bytes).is_some(), "it has an impossible length"),
                    false => (
                        codec::is_decodable(entry.codec(), bytes, plain),
                        "it cannot be decompressed",
                    ),
                }
            }
            What::Leaf => (Page::parse(bytes).is_some(), "it has an impossible entry"),
            What::Node => (parse_node(bytes).is_some(), "it has an impossible entry"),
        };
        (!whole).then(|| what.to_owned())
    }
}

/// The kind of data at an entry.
#[derive(Clone, Copy, Debug)]
enum What {
    /// A block of this number of bytes.
    Block(u32),
    Leaf,
    Node,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stepped_pool::SteppedPool;

    #[test]
    fn a_segment_with_too_small_a_usage_count_is_reported() {
        let mut stepped = SteppedPool::new("verify");
        stepped.write(3, 4);
        stepped.checkpoint();
        let live = stepped.pool.find("v").unwrap();
        let segments = stepped.pool.segments();
        let verify = || {
            let mut verifier = Verifier::new(segments, false);
            let (frozen, now) = (live.map.freeze(), || Some(Arc::clone(&live)));
            assert!(verifier.volume(live.meta.block_bytes, (&frozen, 0), &now, &mut |_| true));
            verifier.counts();
            verifier.report.damage
        };
        assert_eq!(verify(), []);
        let (mut counted, unknown) = segments.live();
        let segment = stepped.segment(3);
        counted[segment as usize] -= 4096;
        segments.set_live(counted, unknown);
        let [damage] = &verify()[..] else { panic!("it is missed") };
        assert_eq!((&*damage.volume, damage.block), ("v", 3));
        let what =
            format!("its segment {segment} has 16384 bytes of blocks, and 12288 are counted");
        assert_eq!(damage.what, what);
    }

    /// Regression: each scrub of a pool in use caused a liveness scan.
    #[test]
    fn blocks_freed_during_a_scrub_are_no_usage_error() {
        let mut stepped = SteppedPool::new("verify-gone");
        stepped.write(3, 4);
        stepped.checkpoint();
        let (pool, live) = (Arc::clone(&stepped.pool), stepped.pool.find("v").unwrap());
        let segments = pool.segments();
        let begin = || {
            let mut verifier = Verifier::new(segments, true);
            let (frozen, now) = (live.map.freeze(), || Some(Arc::clone(&live)));
            assert!(verifier.volume(live.meta.block_bytes, (&frozen, 0), &now, &mut |_| true));
            verifier
        };
        let verifier = begin();
        let before = segments.live_bytes(stepped.segment(3));
        stepped.discard(3, 1);
        assert_eq!(segments.live_bytes(stepped.segment(4)), before - 4096, "it went");
        assert!(!verifier.is_too_little_counted());
        let (mut counted, unknown) = segments.live();
        counted[stepped.segment(4) as usize] -= 4096;
        segments.set_live(counted, unknown);
        assert!(begin().is_too_little_counted());
    }
}

//! The test fixture: a volume on a simulated disk, driven step by step, and the history of its
//! requests, which is the model.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use blockyard_core::Status;
use blockyard_store::mirror::assemble::{NamedCopy, Terms};
use blockyard_store::mirror::{Mirror, Resync, Resynced};
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::simulated_store::SimulatedStore;
use blockyard_volume::committer::{Committer, Turn};
use blockyard_volume::encryption::VolumeKey;
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::record::Body;
use blockyard_volume::{Compression, Options, Pool, PoolVerifier, Secret, VolumeError};
use blockyard_volume_format::NODE_BLOCKS;
use blockyard_volume_format::catalogue::{Change, VolumeMeta};
use blockyard_volume_format::entry::Entry;

use crate::turns::{self, Turns};

/// The store of a rig: one copy or two.
pub(crate) type Store = Mirror<SimulatedStore>;

/// The contents of a volume: for each block the number of the step that wrote it, 0 for zeros.
pub(crate) type Blocks = Vec<u64>;

/// One request of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Write { first: u64, count: u64, fua: bool },
    Part { block: u64, fua: bool },
    Flush,
    Discard { first: u64, count: u64, fua: bool },
    Snapshot,
}

/// Parameters of a rig.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) block_bytes: u32,
    pub(crate) blocks: u64,
    pub(crate) options: Options,
    pub(crate) compression: Compression,
    /// Whether the volume is encrypted.
    pub(crate) encrypted: bool,
    /// Most groups in flight.
    pub(crate) depth: usize,
    /// Whether the pool has two copies.
    pub(crate) mirror: bool,
    /// Whether the blocks are spread over a long volume: at the edges of spans and roots of its
    /// map.
    pub(crate) spread: bool,
}

/// Number of consecutive blocks in a spread shape; no step crosses their end.
const TOGETHER: u64 = 4;

/// The spans that contain the blocks of a spread shape, alternately at the end and at the
/// beginning: the first two, the last span of the first root, and the first of the second.
const SPANS: [u64; 4] = [0, 1, 255, 256];

impl Shape {
    /// The smallest shape.
    pub(crate) fn tiny() -> Shape {
        let options = Options {
            align: 512,
            segment_bytes: 16 << 10,
            segments_max: 40,
            memory_bytes: 128 << 10,
            checkpoint_bytes: 12 << 10,
            sync_bytes: 8 << 10,
            records_max: 128,
            // The cache holds the least number of leaves; others are read on demand.
            map_cache_bytes: 4096,
            ..Options::default()
        };
        let compression = Compression::None;
        let (mirror, spread, encrypted) = (false, false, false);
        let block_bytes = 512;
        Shape { block_bytes, blocks: 3, options, compression, encrypted, depth: 1, mirror, spread }
    }

    /// The number of blocks from `first` on that one step may cover, at most `count`.
    pub(crate) fn together(&self, first: u64, count: u64) -> u64 {
        let most = if self.spread { TOGETHER - first % TOGETHER } else { self.blocks - first };
        count.min(most).min(self.blocks - first)
    }

    /// The number in the volume of one of the shape's blocks.
    fn place(&self, block: u64) -> u64 {
        if !self.spread {
            return block;
        }
        let (number, at) = ((block / TOGETHER) as usize, block % TOGETHER);
        let begin = SPANS[number] * NODE_BLOCKS;
        if number.is_multiple_of(2) { begin + NODE_BLOCKS - TOGETHER + at } else { begin + at }
    }

    /// Length of the volume in blocks.
    fn volume_blocks(&self) -> u64 {
        // The volume ends before the end of the last span.
        if self.spread { SPANS[3] * NODE_BLOCKS + TOGETHER } else { self.blocks }
    }
}

/// A step that was taken.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    /// The number of the step, from 1 on, which it writes into its blocks.
    number: u64,
    step: Step,
    /// The number of disk operations when it was answered; `None` if it was not answered, or with
    /// an error.
    answered: Option<usize>,
}

/// The steps that were taken on a volume, in log order.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    blocks: u64,
    taken: Vec<Taken>,
    /// Indices of the answered steps, in the order of the answers.
    answered: Vec<usize>,
    /// The moments at which the log stated all steps as durable: number of disk operations, number
    /// of steps.
    recorded: Vec<(usize, usize)>,
}

impl History {
    /// The state after the first `count` steps: the volume and its snapshots.
    fn after(&self, count: usize) -> (Blocks, Vec<(String, Blocks)>) {
        let mut now = vec![0; self.blocks as usize];
        let mut snapshots = Vec::new();
        for &Taken { number, ref step, .. } in &self.taken[..count] {
            match *step {
                Step::Write { first, count, .. } => {
                    now[first as usize..(first + count) as usize].fill(number);
                }
                // Half of the block is new: each half has the number of its step.
                Step::Part { block, .. } => {
                    let old = &mut now[block as usize];
                    *old = number << 32 | (*old & 0xffff_ffff);
                }
                Step::Flush => {}
                Step::Discard { first, count, .. } => {
                    now[first as usize..(first + count) as usize].fill(0);
                }
                Step::Snapshot => snapshots.push((format!("v@s{number}"), now.clone())),
            }
        }
        (now, snapshots)
    }

    /// The least number of steps that must be there after a crash at this disk operation.
    fn least(&self, moment: usize) -> usize {
        let durable = |taken: &Taken| {
            let asked = match taken.step {
                Step::Write { fua, .. } | Step::Part { fua, .. } => fua,
                Step::Discard { fua, .. } => fua,
                Step::Flush | Step::Snapshot => true,
            };
            asked && taken.answered.is_some_and(|answered| answered <= moment)
        };
        self.taken.iter().rposition(durable).map_or(0, |last| last + 1)
    }

    /// The number of steps that the log had stated as durable at this disk operation.
    pub(crate) fn recorded(&self, moment: usize) -> usize {
        let before = self.recorded.iter().take_while(|(changes, _)| *changes <= moment);
        before.last().map_or(0, |(_, steps)| *steps)
    }

    /// Checks that the readable blocks are the state after at least `least` steps, with its
    /// snapshots. `None` stands for a block that cannot be read.
    ///
    /// # Panics
    /// If they are not.
    pub(crate) fn check_some(&self, least: usize, found: &[Option<u64>], snapshots: &[String]) {
        let is_like = |count| {
            let (blocks, others) = self.after(count);
            let mut names = others.iter().map(|(name, _)| name);
            let is_same = found.iter().zip(&blocks).all(|(it, now)| it.is_none_or(|it| it == *now));
            is_same && names.len() == snapshots.len() && names.all(|name| snapshots.contains(name))
        };
        assert!(
            (least..=self.taken.len()).any(is_like),
            "found {found:?} and {snapshots:?}, expected the state after at least {least} of {:?}; \
             that is {:?}",
            self.taken,
            self.after(least)
        );
    }

    /// The least number of steps that must be there after a crash at this disk operation.
    pub(crate) fn durable(&self, moment: usize) -> usize {
        self.least(moment)
    }

    /// Checks that the contents are the state after an allowed number of steps.
    ///
    /// # Panics
    /// If they are not.
    pub(crate) fn check(&self, moment: usize, found: &(Blocks, Vec<(String, Blocks)>)) {
        let least = self.least(moment);
        let fits = (least..=self.taken.len()).any(|count| self.after(count) == *found);
        assert!(
            fits,
            "after {moment} changes of the disk: found {found:?}, expected the state after at \
             least {least} of {:?}; that is {:?}",
            self.taken,
            self.after(least)
        );
    }
}

/// A pool with one volume, its committer, and the model of its contents.
pub(crate) struct Fixture {
    pub(crate) pool: Arc<Pool<Store>>,
    pub(crate) committer: Committer<Store>,
    pub(crate) handle: VolumeHandle<Store>,
    pub(crate) directory: SimulatedDirectory,
    pub(crate) history: History,
    shape: Shape,
    /// The scheduler of the other threads, if there are any.
    turns: Option<Turns>,
    waiting: Vec<(u32, usize)>,
    snapshots:
        Vec<(blockyard_sync::completion_queue::Receiver<blockyard_volume::record::Reply>, usize)>,
}

/// Opens both copies, if there are two.
pub(crate) const USE: Terms = Terms::Use { degraded: false };

/// The two copies in a directory.
pub(crate) fn pair(directory: &SimulatedDirectory, depth: usize) -> [SimulatedStore; 2] {
    ["a/", "b/"].map(|side| SimulatedStore::new(directory).with_depth(depth).with_prefix(side))
}

/// Assembles copies, of which one may be missing.
pub(crate) fn assemble(
    pair: [Option<SimulatedStore>; 2],
    terms: Terms,
) -> Result<Store, VolumeError> {
    let [first, second] = pair;
    let given = [
        NamedCopy { directory: first, path: "a".into() },
        NamedCopy { directory: second, path: "b".into() },
    ];
    let mirror = Mirror::assemble(given, terms, &PoolVerifier)?;
    mirror.resume_stale(&PoolVerifier)?;
    Ok(mirror)
}

/// The resync to be done, whose cursor becomes durable often.
pub(crate) fn resync(fixture: &Fixture) -> Option<Resync<SimulatedStore>> {
    let resync = fixture.pool.segments().directory().resync_in_background()?;
    Some(resync.with_cursor_bytes(u64::from(fixture.pool.segments().bytes()) * 2))
}

/// Takes steps of a resync to its end, if one is to be done.
///
/// # Panics
/// If the copy fails.
pub(crate) fn finish_resync(fixture: &Fixture) {
    let Some(mut resync) = resync(fixture) else { return };
    loop {
        match resync.step(&fixture.pool.segments().files()).unwrap() {
            Resynced::Bytes(_) | Resynced::InFlight | Resynced::Repair => {}
            Resynced::Complete => return fixture.pool.segments().renew(),
            Resynced::Ended => panic!("the copy has failed"),
        }
    }
}

/// Takes steps of a resync to its end. Returns how many bytes it has compared, and how often the
/// good copies were to be repaired before.
///
/// # Panics
/// If none is to be done, or the copy fails.
pub(crate) fn compared_by_resync(fixture: &Fixture) -> (u64, usize) {
    let mut resync = resync(fixture).expect("a resync is to be done");
    let (mut compared, mut repairs) = (0, 0);
    loop {
        match resync.step(&fixture.pool.segments().files()).unwrap() {
            Resynced::Bytes(bytes) => compared += bytes,
            Resynced::Repair => repairs += 1,
            Resynced::Complete => break fixture.pool.segments().renew(),
            other => panic!("{other:?}: nothing is written meanwhile, and the copy is intact"),
        }
    }
    (compared, repairs)
}

/// The files whose names `is_wanted` names, with their bytes.
pub(crate) fn files(
    directory: &SimulatedDirectory,
    is_wanted: impl Fn(&str) -> bool,
) -> BTreeMap<String, Vec<u8>> {
    let names = directory.names().into_iter().filter(|name| is_wanted(name));
    let content = |name: String| {
        let file = directory.open(&name).unwrap();
        let mut bytes = vec![0; file.len() as usize];
        file.read_at(0, &mut bytes).unwrap();
        (name, bytes)
    };
    names.map(content).collect()
}

/// Replaces the files whose names `is_wanted` names by others.
pub(crate) fn replace_files(
    directory: &SimulatedDirectory,
    is_wanted: impl Fn(&str) -> bool,
    by: &BTreeMap<String, Vec<u8>>,
) {
    directory.names().iter().filter(|it| is_wanted(it)).for_each(|it| directory.remove(it));
    for (name, bytes) in by {
        directory.create(name, bytes.len() as u64, 512).write_at(0, bytes).unwrap();
    }
    directory.settle();
}

/// The store of a shape: one copy, or two assembled.
pub(crate) fn store(
    directory: &SimulatedDirectory,
    shape: &Shape,
    terms: Terms,
) -> Result<Store, VolumeError> {
    if shape.mirror {
        return assemble(pair(directory, shape.depth).map(Some), terms);
    }
    Ok(Mirror::single(SimulatedStore::new(directory).with_depth(shape.depth), "pool"))
}

/// Opens the pool on a store.
pub(crate) fn open_pool(
    store: Store,
    shape: &Shape,
) -> Result<(Arc<Pool<Store>>, Committer<Store>), VolumeError> {
    Pool::open(store, shape.options)
}

/// Makes a pool with an empty volume `v`.
pub(crate) fn format(directory: &SimulatedDirectory, shape: &Shape) {
    let store = store(directory, &Shape { depth: 1, ..*shape }, USE).unwrap();
    let (pool, mut committer) = open_pool(store, shape).unwrap();
    let meta = VolumeMeta {
        id: 0,
        name: "v".to_owned(),
        is_snapshot: false,
        guid: 0,
        reserved_bytes: 0,
        created: 0,
        key: 0,
        origin: 0,
        block_bytes: shape.block_bytes,
        blocks: shape.volume_blocks(),
    };
    let change = match shape.encrypted {
        false => Change::Create(meta),
        true => {
            let slot = VolumeKey::draw(5).unwrap().wrap(&secret()).unwrap();
            let meta = VolumeMeta { key: slot.id, ..meta };
            Change::Several(vec![Change::PutKey(slot), Change::Create(meta)])
        }
    };
    let mut answer = pool.submit_change(change);
    assert_eq!(committer.turn(), Turn::Worked);
    assert_eq!(answer.take().map(|reply| reply.status), Some(Status::Ok));
    directory.settle();
}

/// The secret of the volume of an encrypted shape.
pub(crate) fn secret() -> Secret {
    Secret::Key(vec![7; 32].into())
}

impl Fixture {
    /// Opens the pool of a directory.
    pub(crate) fn open(directory: &SimulatedDirectory, shape: &Shape) -> Fixture {
        let store = store(directory, shape, USE);
        store.and_then(|store| Fixture::of(store, directory, shape)).unwrap_or_else(|error| {
            panic!("the pool does not open: {error}");
        })
    }

    /// Opens the pool on a given simulated disk.
    pub(crate) fn on(
        store: SimulatedStore,
        directory: &SimulatedDirectory,
        shape: &Shape,
    ) -> Result<Fixture, VolumeError> {
        Fixture::of(Mirror::single(store, "pool"), directory, shape)
    }

    /// Opens the pool on a given store.
    pub(crate) fn of(
        store: Store,
        directory: &SimulatedDirectory,
        shape: &Shape,
    ) -> Result<Fixture, VolumeError> {
        let (pool, committer) = open_pool(store, shape)?;
        if shape.encrypted {
            pool.unlock("v", &secret())?;
        }
        let handle = VolumeHandle::open(&pool, pool.find("v")?, shape.compression, 64).unwrap();
        let history = History { blocks: shape.blocks, ..History::default() };
        let (directory, shape, turns) = (directory.clone(), *shape, None);
        let (waiting, snapshots) = (Vec::new(), Vec::new());
        Ok(Fixture {
            pool,
            committer,
            handle,
            directory,
            history,
            shape,
            turns,
            waiting,
            snapshots,
        })
    }

    /// Opens the pool with the threads other than the committer, which `turns` schedules.
    pub(crate) fn concurrent(
        directory: &SimulatedDirectory,
        shape: &Shape,
        turns: &Turns,
    ) -> Result<Fixture, VolumeError> {
        let store = SimulatedStore::new(directory).with_depth(shape.depth);
        store.set_hook(turns::hook(turns));
        let fixture = Fixture::on(store, directory, shape)?;
        fixture.pool.set_running(true);
        Ok(Fixture { turns: Some(turns.clone()), ..fixture })
    }

    /// The bytes of a block that step `number` wrote.
    pub(crate) fn bytes(&self, number: u64) -> Vec<u8> {
        number.to_le_bytes().repeat(self.shape.block_bytes as usize / 8)
    }

    /// Starts a step.
    pub(crate) fn begin(&mut self, step: Step) -> Status {
        let number = self.history.taken.len() as u64 + 1;
        let step = match step {
            // An earlier opening of the pool made this snapshot.
            Step::Snapshot if self.pool.find(&format!("v@s{number}")).is_ok() => Step::Flush,
            step => step,
        };
        let size = u64::from(self.shape.block_bytes);
        let token = number as u32;
        let outcome = match step {
            Step::Write { first, count, fua } => {
                let block = self.bytes(number);
                let fill = |_: usize, into: &mut [u8]| {
                    into.chunks_mut(block.len()).for_each(|part| part.copy_from_slice(&block));
                };
                let at = self.shape.place(first) * size;
                self.handle.write(at, (count * size) as usize, &fill, token, fua)
            }
            Step::Part { block, fua } => {
                let fill = |_: usize, into: &mut [u8]| {
                    let word = (number as u32).to_le_bytes();
                    into.chunks_mut(4).for_each(|part| part.copy_from_slice(&word));
                };
                let half = size as usize / 2;
                let at = self.shape.place(block) * size + half as u64;
                self.handle.write(at, half, &fill, token, fua)
            }
            Step::Flush => self.handle.flush(token),
            Step::Discard { first, count, fua } => {
                self.handle.zero(self.shape.place(first) * size, count * size, token, fua)
            }
            Step::Snapshot => {
                let live = self.pool.find("v").unwrap();
                let name = format!("v@s{number}");
                let origin = live.meta.id;
                let meta =
                    VolumeMeta { id: 0, name, is_snapshot: true, origin, ..live.meta.clone() };
                let answer = self.pool.submit_change(Change::Copy(meta));
                self.snapshots.push((answer, self.history.taken.len()));
                Outcome::Taken
            }
        };
        match outcome {
            Outcome::Taken => {
                if step != Step::Snapshot {
                    self.waiting.push((token, self.history.taken.len()));
                }
                self.history.taken.push(Taken { number, step, answered: None });
                Status::Ok
            }
            Outcome::Full => Status::Resource,
            Outcome::Ended(status) => status,
        }
    }

    /// Runs the committer and the other threads until none has work.
    pub(crate) fn run(&mut self) {
        while self.turn() {}
    }

    /// Runs the committer for one turn, or the other threads if it has no work. Returns whether
    /// anything was done.
    pub(crate) fn turn(&mut self) -> bool {
        let is_done = self.committer.turn() == Turn::Worked;
        match &self.turns {
            Some(turns) if is_done => turns.wake(),
            Some(turns) => return turns.idle(),
            None => {}
        }
        is_done
    }

    /// Runs until no thread has work; returns the first error.
    pub(crate) fn go_on(&mut self) -> Status {
        let mut end = Status::Ok;
        loop {
            let goes_on = self.turn();
            let status = self.collect();
            if end.is_ok() {
                end = status;
            }
            if !goes_on {
                break;
            }
        }
        assert!(self.waiting.is_empty() && self.snapshots.is_empty(), "everything is answered");
        end
    }

    /// Takes the answers; returns the first error.
    pub(crate) fn collect(&mut self) -> Status {
        let now = self.directory.change_count();
        let mut end = Status::Ok;
        while let Some(reply) = self.handle.take() {
            let at = self.waiting.iter().position(|(token, _)| *token == reply.token).unwrap();
            let (_, index) = self.waiting.swap_remove(at);
            if reply.status.is_ok() {
                self.history.answer(index, now);
                continue;
            }
            if reply.status == Status::NoSpc {
                self.history.forget(index);
            }
            if end.is_ok() {
                end = reply.status;
            }
        }
        for (mut answer, index) in std::mem::take(&mut self.snapshots) {
            let Some(status) = answer.take().map(|reply| reply.status) else {
                self.snapshots.push((answer, index));
                continue;
            };
            if status.is_ok() {
                self.history.answer(index, now);
                continue;
            }
            if status == Status::NoSpc {
                self.history.forget(index);
            }
            if end.is_ok() {
                end = status;
            }
        }
        end
    }

    /// Simulates a time without requests, in which the log becomes idle.
    pub(crate) fn rest(&mut self) {
        let status = self.go_on();
        assert!(status.is_ok() || status == Status::NoSpc, "{status}");
        self.committer.finish_idle_log();
        let activity = self.pool.activity();
        if activity.recorded == activity.number && !self.pool.is_latched() {
            let now = self.directory.change_count();
            self.history.recorded.push((now, self.history.taken.len()));
        }
    }

    /// Closes the pool.
    pub(crate) fn close(&mut self) {
        self.rest();
        let _answer = self.pool.submit(Body::Stop);
        while self.committer.turn() != Turn::Stopped {}
    }

    /// Starts a step and waits for its answer.
    pub(crate) fn take(&mut self, step: Step) -> Status {
        let begun = self.begin(step);
        if begun.is_ok() { self.go_on() } else { begun }
    }

    /// Checks that the live count of each segment is at least what the maps reference: a segment
    /// without live blocks is overwritten.
    ///
    /// # Panics
    /// If a count is too small.
    pub(crate) fn check_counts(&self) {
        let segments = self.pool.segments();
        let mut named: BTreeMap<u32, u64> = BTreeMap::new();
        let mut seen = HashSet::new();
        let is_somewhere = |entry: &&Entry| !entry.is_hole() && !entry.is_lost();
        for meta in self.pool.list() {
            let map = self.pool.find(&meta.name).unwrap().map.freeze();
            for (_, leaf) in map.iter().flatten().flat_map(|node| node.leaves()) {
                let page = segments.page(leaf).unwrap();
                for entry in page.entries().iter().filter(|entry| is_somewhere(entry)) {
                    if seen.insert(*entry) {
                        let (segment, _) = segments.split(entry.address());
                        *named.entry(segment).or_default() += u64::from(entry.stored_bytes());
                    }
                }
            }
        }
        for (segment, bytes) in named {
            let counted = segments.live_bytes(segment);
            assert!(counted >= bytes, "segment {segment}: {counted} of {bytes} bytes count");
        }
    }

    /// The contents of the volume and of its snapshots.
    pub(crate) fn contents(&mut self) -> (Blocks, Vec<(String, Blocks)>) {
        let volume = read(&mut self.handle, &self.shape).unwrap();
        let mut snapshots = Vec::new();
        for meta in self.pool.list().into_iter().filter(|meta| meta.is_snapshot) {
            let live = self.pool.find(&meta.name).unwrap();
            let mut handle = VolumeHandle::open(&self.pool, live, Compression::None, 1).unwrap();
            snapshots.push((meta.name, read(&mut handle, &self.shape).unwrap()));
        }
        (volume, snapshots)
    }
}

/// Reads a volume: the numbers in its blocks, or the status of the first read that failed.
pub(crate) fn read(handle: &mut VolumeHandle<Store>, shape: &Shape) -> Result<Blocks, Status> {
    let size = shape.block_bytes as usize;
    let mut bytes = Vec::new();
    let mut first = 0;
    while first < shape.blocks {
        let count = shape.together(first, shape.blocks);
        let (at, len) = (shape.place(first) * size as u64, size * count as usize);
        match handle.read(at, len, |part| bytes.extend_from_slice(part)) {
            Status::Ok => first += count,
            error => return Err(error),
        }
    }
    Ok(bytes.chunks(size).map(number).collect())
}

/// Reads each block of a volume separately; `None` stands for a damaged block.
pub(crate) fn read_each(handle: &mut VolumeHandle<Store>, shape: &Shape) -> Vec<Option<u64>> {
    let size = shape.block_bytes as usize;
    let read = |block| {
        let mut bytes = Vec::with_capacity(size);
        let at = shape.place(block) * size as u64;
        match handle.read(at, size, |part| bytes.extend_from_slice(part)) {
            Status::Ok => Some(number(&bytes)),
            status => {
                assert_eq!(status, Status::Protection);
                None
            }
        }
    };
    (0..shape.blocks).map(read).collect()
}

/// The number that a block contains.
fn number(block: &[u8]) -> u64 {
    let size = block.len();
    let (old, new) = block.split_at(size / 2);
    let word = |bytes: &[u8]| {
        let first = &bytes[..4];
        first.try_into().map(u32::from_le_bytes).unwrap()
    };
    let written = u64::from(word(old));
    let (whole, part) = (written.to_le_bytes().repeat(size / 16), word(new));
    // A block that was written as a whole repeats its number in units of eight bytes.
    if block[..size / 2] == whole && block[size / 2..] == whole {
        return written;
    }
    assert!(new.chunks(4).all(|chunk| chunk == part.to_le_bytes()), "a torn block: {block:?}");
    assert!(old == whole, "a torn block: {block:?}");
    u64::from(part) << 32 | written
}

impl History {
    /// Number of steps taken.
    pub(crate) fn len(&self) -> usize {
        self.taken.len()
    }

    /// Notes that a step was answered at this disk operation.
    fn answer(&mut self, index: usize, moment: usize) {
        self.taken[index].answered = Some(moment);
        self.answered.push(index);
    }

    /// The history in the order of the answers. That is the log order if some requests wait for
    /// space and others do not. All steps but those without space were answered.
    pub(crate) fn by_answers(&self) -> History {
        let taken = self.answered.iter().map(|index| self.taken[*index].clone());
        History { blocks: self.blocks, taken: taken.collect(), ..History::default() }
    }

    /// Notes that a step had no effect, because there was no space.
    fn forget(&mut self, index: usize) {
        // The step's number is not reused: numbers are indices.
        let number = self.taken[index].number;
        self.taken[index] = Taken { number, step: Step::Flush, answered: None };
    }

    /// Checks that the volume is in a state that it once had.
    pub(crate) fn check_volume(&self, found: &Blocks) {
        let fits = (0..=self.taken.len()).any(|count| self.after(count).0 == *found);
        assert!(fits, "found {found:?}, which never was");
    }
}

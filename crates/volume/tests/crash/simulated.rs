//! The simulated directory as that of a pool, with what may go wrong below it.
#![allow(clippy::disallowed_types)] // A test may.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex};

use blockyard_sim::directory::{self, SECTOR};
use blockyard_volume::store::lane::Ended;
use blockyard_volume::store::{
    BlockingReads, Directory, Doorbell, Durability, Lane, Parcel, StoreFile, Work,
};

use crate::turns::Turns;

/// What goes wrong, of what a pool does with segments from now on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    #[default]
    None,
    /// Syncs do nothing, though they say that all is well.
    NoSyncs,
    /// A write with this number is acknowledged and dropped.
    Lost(u64),
    /// A write with this number goes somewhere else in its file.
    Misdirected(u64),
    /// A read with this number, and every one so many behind it, is of somewhere else in its file.
    MisdirectedReads(u64),
    /// So many files more can be made.
    Full(u64),
    /// The next file cannot be made, and those behind it can.
    FullOnce,
    /// So many writes succeed, and none after them.
    FailingWrites(u64),
    /// So many syncs succeed, and none after them.
    FailingSyncs(u64),
    /// A read with this number, and every one so many behind it, fails.
    FailingReads(u64),
    /// A read with this number fails, and no other.
    FailingRead(u64),
    /// So many reads, writes and syncs succeed, and then the disk is gone: each operation fails.
    Gone(u64),
}

impl State {
    /// Counts an operation and returns whether the disk is gone.
    fn is_gone(&mut self) -> bool {
        self.operations += 1;
        matches!(self.fault, Fault::Gone(after) if self.operations > after)
    }
}

/// What a test does in the middle of a read that fails.
type Hook = Box<dyn Fn() + Send + Sync>;

#[derive(Debug, Default)]
struct State {
    fault: Fault,
    operations: u64,
    writes: u64,
    reads: u64,
    syncs: u64,
    created: u64,
    /// By the name of the thread.
    made: HashMap<String, u64>,
}

/// Threads of these names wait before they write: the pool's own, beside its committer.
#[derive(Debug, Default)]
struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn pass(&self) {
        let beside = ["volume-checkpoint", "volume-segments"];
        if std::thread::current().name().is_some_and(|name| beside.contains(&name)) {
            let closed = self.closed.lock().unwrap();
            drop(self.opened.wait_while(closed, |closed| *closed).unwrap());
        }
    }
}

/// A simulated directory.
#[derive(Clone)]
pub(crate) struct Simulated {
    directory: directory::Directory,
    /// What the names of its files begin with: two may be one directory, so that what is done to
    /// them has one order.
    prefix: &'static str,
    state: Arc<Mutex<State>>,
    /// How many bytes its file system has room for, beside what others have there.
    room: Arc<Mutex<Option<u64>>>,
    gate: Arc<Gate>,
    /// Groups on their way at once.
    depth: usize,
    /// Who syncs a file beside somebody else may not be told of an error.
    tells_one: bool,
    /// By which the threads of its pool go on one at a time.
    turns: Option<Turns>,
    failed_read: FailedRead,
}

/// Called once, in the middle of the next read that fails.
#[derive(Clone, Default)]
struct FailedRead(Arc<Mutex<Option<Hook>>>);

impl FailedRead {
    fn call(&self) {
        let hook = self.0.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
    }
}

/// The way of groups: written when they are begun, synced when they are waited for.
pub(crate) struct SimulatedLane {
    depth: usize,
    tells_one: bool,
    under_way: VecDeque<UnderWay>,
}

/// A group on its way.
struct UnderWay {
    file: Arc<SimulatedFile>,
    ended: Ended,
    /// What is to be durable yet.
    wanted: Synced,
}

/// What a sync makes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Synced {
    Nothing,
    All,
    /// So much from there on.
    Range(u64, u64),
    /// What was written when the file had seen so many writes.
    Through(u64),
}

impl UnderWay {
    /// Makes durable what is to be; says whether all went well until now.
    fn sync(&mut self) -> bool {
        let wanted = std::mem::replace(&mut self.wanted, Synced::Nothing);
        if self.ended.1.is_ok() && wanted != Synced::Nothing {
            self.ended.1 = self.file.sync_as(wanted);
        }
        self.ended.1.is_ok()
    }
}

impl fmt::Debug for SimulatedLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimulatedLane")
    }
}

impl Lane<SimulatedFile> for SimulatedLane {
    fn depth(&self) -> usize {
        self.depth
    }

    fn begin(&mut self, file: &Arc<SimulatedFile>, at: u64, parcel: Parcel, wanted: Durability) {
        assert!(!self.tells_one || self.under_way.is_empty(), "the older one's error may be lost");
        let parts: Vec<&[u8]> = parcel.slices().collect();
        let result = file.write_at(at, &parts);
        // No more than a disk has to: what is on its way behind it may be lost.
        let wanted = match wanted {
            Durability::Nothing => Synced::Nothing,
            Durability::Itself => Synced::Range(at, parcel.len() as u64),
            Durability::File => Synced::Through(file.file.writes()),
        };
        let ended = (Some(parcel), result);
        self.under_way.push_back(UnderWay { file: Arc::clone(file), ended, wanted });
    }

    fn ripen(&mut self) -> bool {
        self.under_way.front_mut().is_none_or(UnderWay::sync)
    }

    fn end(&mut self) -> Option<Ended> {
        let mut first = self.under_way.pop_front()?;
        first.sync();
        Some(first.ended)
    }
}

/// A file of it.
pub(crate) struct SimulatedFile {
    file: directory::File,
    state: Arc<Mutex<State>>,
    gate: Arc<Gate>,
    turns: Option<Turns>,
    failed_read: FailedRead,
}

impl SimulatedFile {
    fn sync_as(&self, what: Synced) -> io::Result<()> {
        self.turns.iter().for_each(Turns::step);
        let mut state = self.state.lock().unwrap();
        state.syncs += 1;
        if state.is_gone() {
            return Err(io::Error::from_raw_os_error(5)); // EIO
        }
        match (state.fault, what) {
            (Fault::NoSyncs, _) => Ok(()),
            (Fault::FailingSyncs(after), _) if state.syncs > after => {
                Err(io::Error::from_raw_os_error(5)) // EIO
            }
            (_, Synced::Nothing) => Ok(()),
            (_, Synced::All) => self.file.sync(),
            (_, Synced::Range(at, len)) => self.file.sync_range(at, len),
            (_, Synced::Through(writes)) => self.file.sync_through(writes),
        }
    }
}

impl Simulated {
    pub(crate) fn new(directory: &directory::Directory) -> Simulated {
        let (directory, state) = (directory.clone(), Arc::default());
        let (room, gate) = (Arc::default(), Arc::default());
        let (prefix, depth, tells_one, turns) = ("", 1, false, None);
        let failed_read = FailedRead::default();
        Simulated { directory, prefix, state, room, gate, depth, tells_one, turns, failed_read }
    }

    /// The same for one of two copies.
    pub(crate) fn with_prefix(self, prefix: &'static str) -> Simulated {
        Simulated { prefix, ..self }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The same, with so many groups on their way at once.
    pub(crate) fn with_depth(self, depth: usize) -> Simulated {
        Simulated { depth, ..self }
    }

    /// The same, where only one of several who sync a file at once is told of an error.
    pub(crate) fn telling_one(self) -> Simulated {
        Simulated { tells_one: true, ..self }
    }

    /// The same, where threads go on one at a time.
    pub(crate) fn with_turns(self, turns: &Turns) -> Simulated {
        Simulated { turns: Some(turns.clone()), ..self }
    }

    /// Others may do something before this one changes the directory.
    fn step(&self) {
        self.turns.iter().for_each(Turns::step);
    }

    /// Lets the threads beside the committer wait before they write, or go on.
    pub(crate) fn close_gate(&self, closed: bool) {
        *self.gate.closed.lock().unwrap() = closed;
        self.gate.opened.notify_all();
    }

    fn file(&self, file: directory::File) -> SimulatedFile {
        let (state, gate) = (Arc::clone(&self.state), Arc::clone(&self.gate));
        let (turns, failed_read) = (self.turns.clone(), self.failed_read.clone());
        SimulatedFile { file, state, gate, turns, failed_read }
    }

    /// How many files a thread of this name has made, or tried to.
    pub(crate) fn made_by(&self, name: &str) -> u64 {
        self.state.lock().unwrap().made.get(name).copied().unwrap_or(0)
    }

    /// Lets all files together have so many bytes from now on: others have the rest.
    pub(crate) fn limit(&self, bytes: u64) {
        *self.room.lock().unwrap() = Some(bytes);
    }

    /// How many reads there were since something was to go wrong.
    pub(crate) fn reads(&self) -> u64 {
        self.state.lock().unwrap().reads
    }

    /// Calls `hook` once, in the middle of the next read that fails.
    pub(crate) fn on_failed_read(&self, hook: impl Fn() + Send + Sync + 'static) {
        *self.failed_read.0.lock().unwrap() = Some(Box::new(hook));
    }

    /// Lets something go wrong from now on.
    pub(crate) fn fail(&self, fault: Fault) {
        *self.state.lock().unwrap() = State { fault, ..State::default() };
    }
}

impl fmt::Debug for Simulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Simulated")
    }
}

impl fmt::Debug for SimulatedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.file.fmt(f)
    }
}

impl Directory for Simulated {
    type File = SimulatedFile;
    type Lane = SimulatedLane;
    type Reads = BlockingReads;

    fn reads(&self, _: Option<&Doorbell>) -> BlockingReads {
        BlockingReads::default()
    }

    fn lane(&self, _: Option<&Arc<SimulatedFile>>) -> SimulatedLane {
        let Simulated { depth, tells_one, .. } = *self;
        SimulatedLane { depth, tells_one, under_way: VecDeque::new() }
    }

    fn tells_everybody(&self) -> bool {
        !self.tells_one
    }

    fn beside(&self, work: Work) -> Work {
        match &self.turns {
            Some(turns) => turns.beside(work),
            None => work,
        }
    }

    fn until(&self, is_so: &dyn Fn() -> bool) {
        self.turns.iter().for_each(|turns| turns.until(is_so));
    }

    fn look(&self) -> io::Result<()> {
        let state = self.state.lock().unwrap();
        match state.fault {
            Fault::Gone(after) if state.operations > after => Err(io::ErrorKind::NotFound.into()),
            _ => Ok(()),
        }
    }

    fn title(&self) -> String {
        format!("simulated{}", self.prefix)
    }

    fn open(&self, name: &str) -> io::Result<Option<SimulatedFile>> {
        let file = self.directory.open(&self.name(name));
        Ok(file.map(|file| self.file(file)))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<SimulatedFile> {
        self.gate.pass();
        self.step();
        let mut state = self.state.lock().unwrap();
        state.created += 1;
        let name_of = std::thread::current().name().unwrap_or_default().to_owned();
        *state.made.entry(name_of).or_default() += 1;
        let is_full = match state.fault {
            Fault::Full(after) => state.created > after,
            Fault::FullOnce => state.created == 1,
            _ => false,
        };
        if is_full || len > self.outside_bytes() {
            return Err(io::Error::from_raw_os_error(28)); // ENOSPC
        }
        let file = self.directory.create(&self.name(name), len, SECTOR);
        Ok(self.file(file))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.step();
        self.directory.rename(&self.name(from), &self.name(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.step();
        self.directory.remove(&self.name(name));
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.step();
        self.directory.sync_names();
        Ok(())
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let names = self.directory.names().into_iter();
        Ok(names.filter_map(|name| Some(name.strip_prefix(self.prefix)?.to_owned())).collect())
    }

    fn outside_bytes(&self) -> u64 {
        let room = *self.room.lock().unwrap();
        room.map_or(u64::MAX, |room| room.saturating_sub(self.directory.bytes()))
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        Ok(u128::from(self.directory.fresh_id()).to_le_bytes())
    }
}

impl StoreFile for SimulatedFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.len())
    }

    fn read_at(&self, mut offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.turns.iter().for_each(Turns::step_beside);
        let mut state = self.state.lock().unwrap();
        state.reads += 1;
        if let Fault::MisdirectedReads(every) = state.fault
            && state.reads.is_multiple_of(every)
        {
            offset = (offset + 4096) % (self.file.len() - into.len() as u64 + 1) / 512 * 512;
        }
        let fails = match state.fault {
            Fault::FailingReads(every) => state.reads.is_multiple_of(every),
            Fault::FailingRead(number) => state.reads == number,
            _ => false,
        };
        let fails = fails || state.is_gone();
        drop(state);
        if fails {
            self.failed_read.call();
            return Err(io::Error::from_raw_os_error(5)); // EIO
        }
        self.file.read_at(offset, into)
    }

    fn write_at(&self, mut offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        self.gate.pass();
        self.turns.iter().for_each(Turns::step);
        let bytes = parts.concat();
        let mut state = self.state.lock().unwrap();
        state.writes += 1;
        if state.is_gone() {
            return Err(io::Error::from_raw_os_error(5)); // EIO
        }
        match state.fault {
            Fault::FailingWrites(after) if state.writes > after => {
                return Err(io::Error::from_raw_os_error(5)); // EIO
            }
            Fault::Lost(number) if number == state.writes => return Ok(()),
            Fault::Misdirected(number) if number == state.writes => {
                offset = (offset + 4096) % (self.file.len() - bytes.len() as u64 + 1) / 512 * 512;
            }
            _ => {}
        }
        drop(state);
        self.file.write_at(offset, &bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_as(Synced::All)
    }
}

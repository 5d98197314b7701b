//! A simulated disk for a pool, with faults.
#![allow(clippy::disallowed_types)] // Test code.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex};

use blockyard_store::log_writer::Ended;
use blockyard_store::{
    BlockingReads, Durability, EventFd, LogWriter, SegmentFiles, SegmentStore, StoreFile,
    StoreLocation, WriteBatch,
};
use blockyard_testing::directory::{self, SECTOR};

use crate::turns::Turns;

/// A fault, which affects operations on segments from now on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No fault.
    #[default]
    None,
    /// Syncs do nothing, but report success.
    NoSyncs,
    /// The write with this number reports success and is lost.
    Lost(u64),
    /// The write with this number goes to another place in its file.
    Misdirected(u64),
    /// Every n-th read returns another place of its file.
    MisdirectedReads(u64),
    /// Only this number of further files can be made.
    Full(u64),
    /// The next file cannot be made; later ones can.
    FullOnce,
    /// All writes after this number fail.
    FailingWrites(u64),
    /// All syncs after this number fail.
    FailingSyncs(u64),
    /// Every n-th read fails.
    FailingReads(u64),
    /// Only the read with this number fails.
    FailingRead(u64),
    /// After this number of operations the disk is gone: each operation fails.
    Gone(u64),
}

impl State {
    /// Counts an operation and returns whether the disk is gone.
    fn is_gone(&mut self) -> bool {
        self.operations += 1;
        matches!(self.fault, Fault::Gone(after) if self.operations > after)
    }
}

/// Code of a test that runs in the middle of a failing read.
type Hook = Box<dyn Fn() + Send + Sync>;

#[derive(Debug, Default)]
struct State {
    fault: Fault,
    operations: u64,
    writes: u64,
    reads: u64,
    syncs: u64,
    created: u64,
    /// Number of files made, by the name of the thread.
    made: HashMap<String, u64>,
}

/// While closed, threads with these names wait before they write: those of the pool other than the
/// committer.
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

/// A simulated directory that implements the pool's [`SegmentStore`].
#[derive(Clone)]
pub(crate) struct Simulated {
    directory: directory::SimulatedDirectory,
    /// Prefix of the file names. Two stores may share one directory, so that their operations have
    /// one order.
    prefix: &'static str,
    state: Arc<Mutex<State>>,
    /// Bytes that the file system has for these files.
    room: Arc<Mutex<Option<u64>>>,
    gate: Arc<Gate>,
    /// Most groups in flight.
    depth: usize,
    /// If two threads sync a file at once, only one of them gets an error.
    tells_one: bool,
    /// Lets other threads of the pool run before each operation.
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

/// The lane for groups: writes a group when it begins, syncs it when it is awaited.
pub(crate) struct SimulatedLane {
    depth: usize,
    tells_one: bool,
    under_way: VecDeque<UnderWay>,
}

/// A group in flight.
struct UnderWay {
    file: Arc<SimulatedFile>,
    ended: Ended,
    /// What is still to be made durable.
    wanted: Synced,
}

/// What a sync makes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Synced {
    Nothing,
    All,
    /// A range: offset and length in bytes.
    Range(u64, u64),
    /// The writes up to this number of writes of the file.
    Through(u64),
}

impl UnderWay {
    /// Syncs what is still to be made durable; returns whether everything succeeded so far.
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

impl LogWriter<SimulatedFile> for SimulatedLane {
    fn depth(&self) -> usize {
        self.depth
    }

    fn begin(
        &mut self,
        file: &Arc<SimulatedFile>,
        at: u64,
        write_batch: WriteBatch,
        wanted: Durability,
    ) {
        assert!(!self.tells_one || self.under_way.is_empty(), "the older one's error may be lost");
        let parts: Vec<&[u8]> = write_batch.slices().collect();
        let result = file.write_at(at, &parts);
        // No more than a disk must make durable: groups in flight after this one may be lost.
        let wanted = match wanted {
            Durability::Nothing => Synced::Nothing,
            Durability::Itself => Synced::Range(at, write_batch.len() as u64),
            Durability::File => Synced::Through(file.file.writes()),
        };
        let ended = (Some(write_batch), result);
        self.under_way.push_back(UnderWay { file: Arc::clone(file), ended, wanted });
    }

    fn wait_written(&mut self) -> bool {
        self.under_way.front_mut().is_none_or(UnderWay::sync)
    }

    fn end(&mut self) -> Option<Ended> {
        let mut first = self.under_way.pop_front()?;
        first.sync();
        Some(first.ended)
    }
}

/// A file of the simulated directory.
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
    pub(crate) fn new(directory: &directory::SimulatedDirectory) -> Simulated {
        let (directory, state) = (directory.clone(), Arc::default());
        let (room, gate) = (Arc::default(), Arc::default());
        let (prefix, depth, tells_one, turns) = ("", 1, false, None);
        let failed_read = FailedRead::default();
        Simulated { directory, prefix, state, room, gate, depth, tells_one, turns, failed_read }
    }

    /// Sets the prefix of file names, for one of two copies.
    pub(crate) fn with_prefix(self, prefix: &'static str) -> Simulated {
        Simulated { prefix, ..self }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Sets the most groups in flight.
    pub(crate) fn with_depth(self, depth: usize) -> Simulated {
        Simulated { depth, ..self }
    }

    /// Makes only one of several concurrent syncs of a file report an error.
    pub(crate) fn telling_one(self) -> Simulated {
        Simulated { tells_one: true, ..self }
    }

    /// Lets `turns` choose which thread runs next before each operation.
    pub(crate) fn with_turns(self, turns: &Turns) -> Simulated {
        Simulated { turns: Some(turns.clone()), ..self }
    }

    /// Lets other threads run before this one changes the directory.
    fn step(&self) {
        self.turns.iter().for_each(Turns::step);
    }

    /// Makes the threads other than the committer wait before they write, or releases them.
    pub(crate) fn close_gate(&self, closed: bool) {
        *self.gate.closed.lock().unwrap() = closed;
        self.gate.opened.notify_all();
    }

    fn file(&self, file: directory::File) -> SimulatedFile {
        let (state, gate) = (Arc::clone(&self.state), Arc::clone(&self.gate));
        let (turns, failed_read) = (self.turns.clone(), self.failed_read.clone());
        SimulatedFile { file, state, gate, turns, failed_read }
    }

    /// Number of files that threads of this name made or tried to make.
    pub(crate) fn made_by(&self, name: &str) -> u64 {
        self.state.lock().unwrap().made.get(name).copied().unwrap_or(0)
    }

    /// Limits the bytes of all files together; other programs use the rest.
    pub(crate) fn limit(&self, bytes: u64) {
        *self.room.lock().unwrap() = Some(bytes);
    }

    /// Number of reads since the fault was set.
    pub(crate) fn reads(&self) -> u64 {
        self.state.lock().unwrap().reads
    }

    /// Number of operations since the fault was set.
    pub(crate) fn operations(&self) -> u64 {
        self.state.lock().unwrap().operations
    }

    /// Counts an operation on names. It fails if the disk is gone.
    fn count_name(&self) -> io::Result<()> {
        let is_gone = self.state.lock().unwrap().is_gone();
        if is_gone { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) } // EIO
    }

    /// Calls `hook` once, in the middle of the next read that fails.
    pub(crate) fn on_failed_read(&self, hook: impl Fn() + Send + Sync + 'static) {
        *self.failed_read.0.lock().unwrap() = Some(Box::new(hook));
    }

    /// Sets the fault from now on.
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

impl SegmentFiles for Simulated {
    type File = SimulatedFile;

    fn open(&self, name: &str) -> io::Result<Option<SimulatedFile>> {
        let file = self.directory.open(&self.name(name));
        Ok(file.map(|file| self.file(file)))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<SimulatedFile> {
        self.gate.pass();
        self.step();
        self.count_name()?;
        let mut state = self.state.lock().unwrap();
        state.created += 1;
        let name_of = std::thread::current().name().unwrap_or_default().to_owned();
        *state.made.entry(name_of).or_default() += 1;
        let is_full = match state.fault {
            Fault::Full(after) => state.created > after,
            Fault::FullOnce => state.created == 1,
            _ => false,
        };
        if is_full || len > self.growth_bytes() {
            return Err(io::Error::from_raw_os_error(28)); // ENOSPC
        }
        let file = self.directory.create(&self.name(name), len, SECTOR);
        Ok(self.file(file))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.step();
        self.count_name()?;
        self.directory.rename(&self.name(from), &self.name(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.step();
        self.count_name()?;
        self.directory.remove(&self.name(name));
        Ok(())
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let names = self.directory.names().into_iter();
        Ok(names.filter_map(|name| Some(name.strip_prefix(self.prefix)?.to_owned())).collect())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.step();
        self.count_name()?;
        self.directory.sync_names();
        Ok(())
    }
}

impl StoreLocation for Simulated {
    fn title(&self) -> String {
        format!("simulated{}", self.prefix)
    }

    fn growth_bytes(&self) -> u64 {
        let room = *self.room.lock().unwrap();
        room.map_or(u64::MAX, |room| room.saturating_sub(self.directory.bytes()))
    }

    fn check_location(&self) -> io::Result<()> {
        let state = self.state.lock().unwrap();
        match state.fault {
            Fault::Gone(after) if state.operations > after => Err(io::ErrorKind::NotFound.into()),
            _ => Ok(()),
        }
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        Ok(u128::from(self.directory.fresh_id()).to_le_bytes())
    }
}

impl SegmentStore for Simulated {
    type LogWriter = SimulatedLane;
    type Reads = BlockingReads;

    fn reports_sync_error_to_all(&self) -> bool {
        !self.tells_one
    }

    fn log_writer(&self, _: Option<&Arc<SimulatedFile>>) -> SimulatedLane {
        let Simulated { depth, tells_one, .. } = *self;
        SimulatedLane { depth, tells_one, under_way: VecDeque::new() }
    }

    fn reads(&self, _: Option<&EventFd>) -> BlockingReads {
        BlockingReads::default()
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

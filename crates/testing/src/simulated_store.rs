//! The simulated store of all tests: files in a [`SimulatedDirectory`], which a [`FaultPlan`] makes
//! fail or lie. A pool uses it as its [`SegmentStore`].
//!
//! The directory underneath has the faults that need no plan: power cuts, which tear and reorder
//! writes that were not synced ([`Medium::cut`](crate::directory::Medium::cut)), and rot
//! ([`SimulatedDirectory::rot`]).
#![allow(clippy::disallowed_types)] // In tests only.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockyard_store::log_writer::Ended;
use blockyard_store::remote::NoAnswer;
use blockyard_store::{
    BlockingReads, Durability, EventFd, LeaseTerm, LogWriter, Pin, SegmentFiles, SegmentStore,
    StoreFile, StoreLocation, WriteBatch,
};

use crate::directory::{self, SECTOR, SimulatedDirectory};

/// The error numbers of Linux.
const EIO: i32 = 5;
const EMFILE: i32 = 24;
const ENOSPC: i32 = 28;

/// Which operations of a kind have a fault. They are counted from 1 since the plan was set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum When {
    /// None.
    #[default]
    Never,
    /// Only the one with this number.
    Only(u64),
    /// All after this number.
    After(u64),
    /// Each whose number is a multiple of this.
    Every(u64),
}

impl When {
    fn is_due(self, number: u64) -> bool {
        match self {
            When::Never => false,
            When::Only(only) => number == only,
            When::After(count) => number > count,
            When::Every(every) => number.is_multiple_of(every),
        }
    }
}

/// The faults of a store. The default plan has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Reads that fail with `EIO`.
    pub failed_reads: When,
    /// Reads that remote storage does not answer.
    pub unanswered_reads: When,
    /// Writes that fail with `EIO` and change nothing.
    pub failed_writes: When,
    /// Punches of holes that fail with `EIO` and change nothing.
    pub failed_punches: When,
    /// Syncs that fail with `EIO`. The data stay in the page cache, and a later sync that succeeds
    /// makes them durable, as on Linux.
    pub failed_syncs: When,
    /// Operations of any kind that fail with `EIO`: the disk is gone.
    pub failed_operations: When,
    /// Creations of files that fail with `ENOSPC`.
    pub full: When,
    /// Opens, creations and pins of files that fail with `EMFILE`: the process has no descriptors.
    pub no_descriptors: When,
    /// Writes that report success and are lost.
    pub lost_writes: When,
    /// Writes that change another place of their file.
    pub misdirected_writes: When,
    /// Reads that return another place of their file.
    pub misdirected_reads: When,
    /// Beginnings of names. Syncs of these files do nothing and report success.
    pub ignored_syncs: &'static [&'static str],
}

/// An operation, before which the hook of a test is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A read of a file.
    Read,
    /// The hook is called again in the middle of a read that fails.
    FailedRead,
    /// A write to a file.
    Write,
    /// A punch of a hole.
    Punch,
    /// A sync of a file.
    Sync,
    /// The hook is called again after a sync that fails, before its caller gets the error.
    FailedSync,
    /// The creation of a file.
    Create,
    /// The renaming of a file.
    Rename,
    /// The removal of a file.
    Remove,
    /// A sync of the names.
    SyncNames,
    /// A check that the directory is still there.
    CheckLocation,
}

/// Code of a test that runs before each operation.
type Hook = Arc<dyn Fn(Operation) + Send + Sync>;

/// Numbers of operations since the plan was set.
#[derive(Debug, Default)]
struct OperationCounts {
    all: u64,
    reads: u64,
    writes: u64,
    punches: u64,
    syncs: u64,
    creations: u64,
    opens: u64,
}

#[derive(Default)]
struct State {
    plan: FaultPlan,
    counts: OperationCounts,
    bytes_max: Option<u64>,
    hook: Option<Hook>,
}

impl State {
    /// Counts an operation of any kind, which fails if the disk is gone.
    fn count(&mut self) -> io::Result<()> {
        self.counts.all += 1;
        if self.plan.failed_operations.is_due(self.counts.all) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        Ok(())
    }

    /// Counts the opening of a descriptor.
    fn open_descriptor(&mut self) -> io::Result<()> {
        self.counts.opens += 1;
        if self.plan.no_descriptors.is_due(self.counts.opens) {
            return Err(io::Error::from_raw_os_error(EMFILE));
        }
        Ok(())
    }
}

/// The faults of a store and of its files.
#[derive(Clone, Default)]
struct Faults(Arc<Mutex<State>>);

impl Faults {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call_hook(&self, operation: Operation) {
        let hook = self.state().hook.clone();
        if let Some(hook) = hook {
            hook(operation);
        }
    }
}

/// A simulated store. Clones are the same store. Two stores may share a directory, so that their
/// operations have one order; each has its own faults.
#[derive(Clone)]
pub struct SimulatedStore {
    directory: SimulatedDirectory,
    prefix: &'static str,
    faults: Faults,
    depth: usize,
    reports_to_one: bool,
    term: Option<Arc<LeaseTerm>>,
}

impl SimulatedStore {
    /// A store without faults and without a lease, with one log batch in flight.
    pub fn new(directory: &SimulatedDirectory) -> SimulatedStore {
        let (directory, faults) = (directory.clone(), Faults::default());
        let (prefix, depth, reports_to_one, term) = ("", 1, false, None);
        SimulatedStore { directory, prefix, faults, depth, reports_to_one, term }
    }

    /// Sets a prefix of all names in the directory.
    pub fn with_prefix(self, prefix: &'static str) -> SimulatedStore {
        SimulatedStore { prefix, ..self }
    }

    /// Sets the most log batches in flight.
    pub fn with_depth(self, depth: usize) -> SimulatedStore {
        SimulatedStore { depth, ..self }
    }

    /// Gives the pool a lease, which the test renews.
    pub fn with_lease(self, term: &Arc<LeaseTerm>) -> SimulatedStore {
        SimulatedStore { term: Some(Arc::clone(term)), ..self }
    }

    /// Makes only one of several concurrent syncs of a file report an error.
    pub fn with_error_reported_once(self) -> SimulatedStore {
        SimulatedStore { reports_to_one: true, ..self }
    }

    /// Sets the faults from now on, and counts operations from zero.
    pub fn set_faults(&self, plan: FaultPlan) {
        let mut state = self.faults.state();
        state.plan = plan;
        state.counts = OperationCounts::default();
    }

    /// Limits the bytes of all files of the directory together; other programs use the rest.
    pub fn set_bytes_max(&self, bytes: u64) {
        self.faults.state().bytes_max = Some(bytes);
    }

    /// Calls `hook` before each operation, in the thread of the operation. It replaces an earlier
    /// one.
    pub fn set_hook(&self, hook: impl Fn(Operation) + Send + Sync + 'static) {
        self.faults.state().hook = Some(Arc::new(hook));
    }

    /// Calls `hook` once, before the next operation of a kind.
    pub fn on_next(&self, next: Operation, hook: impl FnOnce() + Send + 'static) {
        let hook = Mutex::new(Some(hook));
        self.set_hook(move |operation| {
            if operation == next {
                let hook = hook.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(hook) = hook {
                    hook();
                }
            }
        });
    }

    /// The number of reads since the faults were set.
    pub fn reads(&self) -> u64 {
        self.faults.state().counts.reads
    }

    /// The number of operations since the faults were set.
    pub fn operations(&self) -> u64 {
        self.faults.state().counts.all
    }

    /// The directory underneath.
    pub fn directory(&self) -> &SimulatedDirectory {
        &self.directory
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn file(&self, name: &str, file: directory::File) -> SimulatedFile {
        SimulatedFile { file, name: name.to_owned(), faults: self.faults.clone() }
    }

    /// Makes a file of zeros, whose units of `unit` bytes are written atomically.
    ///
    /// # Errors
    /// As the plan says.
    pub fn create_with_unit(&self, name: &str, len: u64, unit: usize) -> io::Result<SimulatedFile> {
        self.faults.call_hook(Operation::Create);
        let mut state = self.faults.state();
        state.count()?;
        state.open_descriptor()?;
        state.counts.creations += 1;
        let is_full = state.plan.full.is_due(state.counts.creations);
        drop(state);
        if is_full || len > self.growth_bytes() {
            return Err(io::Error::from_raw_os_error(ENOSPC));
        }
        Ok(self.file(name, self.directory.create(&self.name(name), len, unit)))
    }

    /// Counts an operation on names.
    fn change_names(&self, operation: Operation) -> io::Result<()> {
        self.faults.call_hook(operation);
        self.faults.state().count()
    }
}

impl fmt::Debug for SimulatedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedStore").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl SegmentFiles for SimulatedStore {
    type File = SimulatedFile;

    fn open(&self, name: &str) -> io::Result<Option<SimulatedFile>> {
        let Some(file) = self.directory.open(&self.name(name)) else { return Ok(None) };
        self.faults.state().open_descriptor()?;
        Ok(Some(self.file(name, file)))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<SimulatedFile> {
        self.create_with_unit(name, len, SECTOR)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.change_names(Operation::Rename)?;
        self.directory.rename(&self.name(from), &self.name(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.change_names(Operation::Remove)?;
        self.directory.remove(&self.name(name));
        Ok(())
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let names = self.directory.names().into_iter();
        Ok(names.filter_map(|name| Some(name.strip_prefix(self.prefix)?.to_owned())).collect())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.change_names(Operation::SyncNames)?;
        self.directory.sync_names();
        Ok(())
    }
}

impl StoreLocation for SimulatedStore {
    fn title(&self) -> String {
        format!("simulated{}", self.prefix)
    }

    fn growth_bytes(&self) -> u64 {
        let bytes_max = self.faults.state().bytes_max;
        bytes_max.map_or(u64::MAX, |max| max.saturating_sub(self.directory.bytes()))
    }

    fn check_location(&self) -> io::Result<()> {
        self.faults.call_hook(Operation::CheckLocation);
        let state = self.faults.state();
        if state.plan.failed_operations.is_due(state.counts.all) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(())
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        Ok(u128::from(self.directory.fresh_id()).to_le_bytes())
    }
}

impl SegmentStore for SimulatedStore {
    type LogWriter = SimulatedLogWriter;
    type Reads = BlockingReads;

    fn reports_sync_error_to_all(&self) -> bool {
        !self.reports_to_one
    }

    fn log_writer(&self, _: Option<&Arc<SimulatedFile>>) -> SimulatedLogWriter {
        let SimulatedStore { depth, reports_to_one, .. } = *self;
        SimulatedLogWriter { depth, reports_to_one, in_flight: VecDeque::new() }
    }

    fn reads(&self, _: Option<&EventFd>) -> BlockingReads {
        BlockingReads::default()
    }

    fn lease_term(&self) -> Option<Arc<LeaseTerm>> {
        self.term.clone()
    }
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

/// A file of a simulated store.
pub struct SimulatedFile {
    file: directory::File,
    /// The name under which it was opened or made.
    name: String,
    faults: Faults,
}

impl SimulatedFile {
    /// Returns another place for an operation of `len` bytes at `offset`.
    fn misdirect(&self, offset: u64, len: usize) -> u64 {
        (offset + 4096) % (self.file.len() - len as u64 + 1) / 512 * 512
    }

    fn sync_as(&self, what: Synced) -> io::Result<()> {
        self.faults.call_hook(Operation::Sync);
        let mut state = self.faults.state();
        state.counts.syncs += 1;
        state.count()?;
        if state.plan.ignored_syncs.iter().any(|start| self.name.starts_with(start)) {
            return Ok(());
        }
        if state.plan.failed_syncs.is_due(state.counts.syncs) {
            drop(state);
            self.faults.call_hook(Operation::FailedSync);
            return Err(io::Error::from_raw_os_error(EIO));
        }
        match what {
            Synced::Nothing => {}
            Synced::All => self.file.sync(),
            Synced::Range(at, len) => self.file.sync_range(at, len),
            Synced::Through(writes) => self.file.sync_through(writes),
        }
        Ok(())
    }

    /// Sets a range to zero.
    ///
    /// # Errors
    /// If the file ends before, or as the plan says.
    pub fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.faults.call_hook(Operation::Punch);
        let mut state = self.faults.state();
        state.counts.punches += 1;
        state.count()?;
        if state.plan.failed_punches.is_due(state.counts.punches) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        drop(state);
        self.file.punch(offset, len)
    }
}

impl fmt::Debug for SimulatedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedFile").field("name", &self.name).finish_non_exhaustive()
    }
}

impl StoreFile for SimulatedFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.len())
    }

    fn read_at(&self, mut offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.faults.call_hook(Operation::Read);
        let mut state = self.faults.state();
        state.counts.reads += 1;
        let (plan, number) = (state.plan, state.counts.reads);
        let counted = state.count();
        drop(state);
        if plan.misdirected_reads.is_due(number) {
            offset = self.misdirect(offset, into.len());
        }
        if plan.unanswered_reads.is_due(number) {
            return Err(io::Error::other(NoAnswer("no answer".to_owned())));
        }
        if counted.is_err() || plan.failed_reads.is_due(number) {
            self.faults.call_hook(Operation::FailedRead);
            return Err(io::Error::from_raw_os_error(EIO));
        }
        self.file.read_at(offset, into)
    }

    fn write_at(&self, mut offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        self.faults.call_hook(Operation::Write);
        let bytes = parts.concat();
        let mut state = self.faults.state();
        state.counts.writes += 1;
        let (plan, number) = (state.plan, state.counts.writes);
        state.count()?;
        drop(state);
        if plan.failed_writes.is_due(number) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        if plan.lost_writes.is_due(number) {
            return Ok(());
        }
        if plan.misdirected_writes.is_due(number) {
            offset = self.misdirect(offset, bytes.len());
        }
        self.file.write_at(offset, &bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_as(Synced::All)
    }

    fn pin(&self) -> io::Result<Pin> {
        self.faults.state().open_descriptor()?;
        Ok(Pin::default())
    }
}

/// The log writer: writes a batch when it begins, and syncs it when it is awaited.
pub struct SimulatedLogWriter {
    depth: usize,
    reports_to_one: bool,
    in_flight: VecDeque<SimulatedBatch>,
}

/// A write batch in flight.
struct SimulatedBatch {
    file: Arc<SimulatedFile>,
    ended: Ended,
    /// What is still to be made durable.
    wanted: Synced,
}

impl SimulatedBatch {
    /// Syncs what is still to be made durable.
    fn sync(&mut self) {
        let wanted = std::mem::replace(&mut self.wanted, Synced::Nothing);
        if self.ended.1.is_ok() && wanted != Synced::Nothing {
            self.ended.1 = self.file.sync_as(wanted);
        }
    }
}

impl fmt::Debug for SimulatedLogWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedLogWriter").field("depth", &self.depth).finish_non_exhaustive()
    }
}

impl LogWriter<SimulatedFile> for SimulatedLogWriter {
    fn depth(&self) -> usize {
        self.depth
    }

    fn waits_for_clients(&self) -> bool {
        false
    }

    fn begin(
        &mut self,
        file: &Arc<SimulatedFile>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        let may_begin = !self.reports_to_one || self.in_flight.is_empty();
        assert!(may_begin, "the error of the older batch may be lost");
        let parts: Vec<&[u8]> = write_batch.slices().collect();
        let result = file.write_at(offset, &parts);
        // No more than a disk must make durable: batches in flight after this one may be lost.
        let wanted = match durability {
            Durability::Nothing => Synced::Nothing,
            Durability::Itself => Synced::Range(offset, write_batch.len() as u64),
            Durability::File => Synced::Through(file.file.writes()),
        };
        let ended = (Some(write_batch), result);
        self.in_flight.push_back(SimulatedBatch { file: Arc::clone(file), ended, wanted });
    }

    fn end(&mut self) -> Option<Ended> {
        let mut first = self.in_flight.pop_front()?;
        first.sync();
        Some(first.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(plan: FaultPlan) -> (SimulatedStore, SimulatedFile) {
        let store = SimulatedStore::new(&SimulatedDirectory::default());
        let file = store.create("a", 16 << 10).unwrap();
        file.write_at(0, &[&[1; 8192]]).unwrap();
        store.set_faults(plan);
        (store, file)
    }

    fn error(result: io::Result<()>) -> Option<i32> {
        result.err().and_then(|error| error.raw_os_error())
    }

    #[test]
    fn faults_are_counted_from_the_setting_of_the_plan() {
        for (when, want) in [
            (When::Never, [false; 5]),
            (When::Only(2), [false, true, false, false, false]),
            (When::After(3), [false, false, false, true, true]),
            (When::Every(2), [false, true, false, true, false]),
        ] {
            let (_store, file) = store(FaultPlan { failed_reads: when, ..FaultPlan::default() });
            let found = [(); 5].map(|()| file.read_at(0, &mut [0; 512]).is_err());
            assert_eq!(found, want, "{when:?}");
        }
    }

    #[test]
    fn a_fault_changes_only_its_kind_of_operation() {
        let always = When::After(0);
        let (_store, file) = store(FaultPlan { failed_writes: always, ..FaultPlan::default() });
        assert_eq!(error(file.write_at(0, &[&[2; 512]])), Some(EIO));
        assert!(file.sync().is_ok() && file.punch(4096, 512).is_ok());
        let mut found = [0; 512];
        file.read_at(0, &mut found).unwrap();
        assert_eq!(found, [1; 512], "a failed write changes nothing");
        let (_store, file) = store(FaultPlan { failed_punches: always, ..FaultPlan::default() });
        assert_eq!(error(file.punch(0, 512)), Some(EIO));
        let (store, file) = store(FaultPlan { failed_operations: always, ..FaultPlan::default() });
        assert_eq!(error(file.sync()), Some(EIO));
        assert_eq!(error(store.rename("a", "b")), Some(EIO));
        assert!(store.check_location().is_err());
    }

    #[test]
    fn false_data_are_returned_and_kept_by_the_plan() {
        let plan = FaultPlan { misdirected_reads: When::Only(1), ..FaultPlan::default() };
        let (_store, file) = store(plan);
        let mut found = [0; 512];
        file.read_at(4096, &mut found).unwrap();
        assert_eq!(found, [0; 512], "of another place");
        let plan = FaultPlan {
            lost_writes: When::Only(1),
            misdirected_writes: When::Only(2),
            ..FaultPlan::default()
        };
        let (_store, file) = store(plan);
        file.write_at(0, &[&[2; 512]]).unwrap();
        file.write_at(4096, &[&[3; 512]]).unwrap();
        for (offset, byte) in [(0, 1), (4096, 1), (8192, 3)] {
            file.read_at(offset, &mut found).unwrap();
            assert_eq!(found, [byte; 512], "at {offset}");
        }
    }

    #[test]
    fn a_full_store_and_missing_descriptors_refuse_files() {
        let (store, file) = store(FaultPlan { full: When::After(1), ..FaultPlan::default() });
        let create = |name| error(store.create(name, 512).map(drop));
        assert_eq!([create("b"), create("c")], [None, Some(ENOSPC)]);
        store.set_faults(FaultPlan::default());
        store.set_bytes_max(store.directory().bytes() + 512);
        assert_eq!([create("c"), create("d")], [None, Some(ENOSPC)]);
        store.set_faults(FaultPlan { no_descriptors: When::After(0), ..FaultPlan::default() });
        assert_eq!(error(store.open("a").map(drop)), Some(EMFILE));
        assert_eq!(error(file.pin().map(drop)), Some(EMFILE));
        assert!(store.open("none").unwrap().is_none());
    }

    #[test]
    fn ignored_and_failed_syncs_make_nothing_durable() {
        for plan in [
            FaultPlan { ignored_syncs: &["a"], ..FaultPlan::default() },
            FaultPlan { failed_syncs: When::After(0), ..FaultPlan::default() },
        ] {
            let (store, file) = store(plan);
            store.sync_names().unwrap();
            let count = store.directory().change_count();
            assert_eq!(file.sync().is_ok(), plan.failed_syncs == When::Never);
            assert_eq!(store.directory().change_count(), count, "{plan:?}");
        }
    }
}

//! The copies of a pool: one directory or disk, or several with the same files. Every write goes to
//! all of them, reads use one. Data that are damaged there are read from another copy and repaired.
//!
//! A pool has one copy or two, and one more while that one replaces another. Copies join and leave
//! while the pool is in use (`online.rs`).
//!
//! # States of a copy
//!
//! | state | data | read | written |
//! | --- | --- | --- | --- |
//! | [`Good`](CopyState::Good) | every acknowledged write | by clients | by clients |
//! | [`Stale`](CopyState::Stale) | lacks writes that the other copy has | never | never |
//! | [`Resyncing`](CopyState::Resyncing) | partly equal to the good copy | where the good copy is damaged | by clients, and by the resync |
//! | [`Failed`](CopyState::Failed) | unknown: missing, or it refused I/O | never | never |
//!
//! ```text
//!                                                   Shared::mark_failed
//!             ┌─ assemble: labels agree ─▸ Good ────────────────────────▸ Failed
//!             │                             ▴                              ▴  ▴
//!   opening ──┤                             │ Shared::finish               │  │
//!             │                             │                              │  │
//!             ├─ assemble: older ─▸ Stale ─▸ Resyncing ────────────────────┘  │
//!             │                   resume_stale  ▴ Shared::mark_failed         │
//!             ├─ assemble: it was resyncing ────┤                             │
//!             └─ assemble: missing, or its label cannot be read ─────────────┘
//!   Mirror::join of an empty copy ──────────────┘
//! ```
//!
//! [`Mirror::detach`](Mirror::detach) removes a copy from any state; the last good one stays.
//!
//! While a mirror is assembled, a good copy becomes stale if its log shows that it is older
//! (`Mirror::mark_stale`).
//!
//! A copy leaves `Failed` only by another opening. It is then stale if it is present, because the
//! other copy's label ([`blockyard_volume_format::label`]) says that only that one is good.
//!
//! # Invariants
//!
//! 1. At least one copy is good. If all refuse a write, the last one stays good, and the caller
//!    gets the error.
//! 2. Before a good copy becomes failed, the label of each other good copy records durably that
//!    that one is not good. The write that failed is answered afterwards. So the copy is recognised
//!    as stale when it comes back.
//! 3. A copy becomes good only at the end of a resync, when it has the same files as a good one and
//!    the labels say so.
//! 4. Clients read good copies only.
//! 5. A stale copy is resynced in the background ([`Mirror::resume_stale`]), unless the mirror is
//!    opened only for reading, or another copy joins.
//! 6. From the moment in which a copy is resyncing, every write goes to it too, to each file that
//!    it has. A write is answered, and stated as durable, when it is so there. So a part that the
//!    resync has copied stays equal.
//! 7. The cursor in the label of a resyncing copy states what is equal there durably. It is void
//!    once that copy has missed a write: the good copies' labels record that before the write is
//!    answered, by a higher generation, or because they do not name the copy any more.
//! 8. A copy that was detached says so in its label, if it can still be written. No opening takes
//!    it for a copy of the pool.
//!
//! # Opening
//!
//! | the labels say | result |
//! | --- | --- |
//! | both: both are good, of one generation | both are good, unless the superblocks or the log of one show that it is an earlier state of itself: then it is stale |
//! | one: only itself; the other: both, or not itself | the other one is stale: it is resynced from its beginning, in the background |
//! | each: only itself | both were written to, each without the other: refused |
//! | one: only itself; the other is missing | opened with one; the other one is failed |
//! | one: both; the other is missing | the other may be newer: refused without consent |
//! | one: not itself; the other is missing | refused |
//! | one: only itself; the other: not itself, a cursor, and the same generation | the resync continues in the background |
//! | one names a copy that joins, and that one has the identity that it names | the same |
#![allow(clippy::disallowed_types)] // Copies rarely fail, and labels are rarely written.

pub mod assemble;
mod attach;
mod file;
pub mod locations;
mod log_writer;
mod members;
mod online;
mod reads;
mod resync;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blockyard_sync::rcu_cell::RcuCell;
use blockyard_volume_format::label::{
    self, BYTES, FILE, Joining, Label, PATH_BYTES_MAX, SLOT_BYTES,
};
use blockyard_volume_format::superblock;

use crate::buffer::{ALIGN, Memory};
use crate::file::is_short;
use crate::{
    EventFd, GoodCopies, Layout, LeaseTerm, SegmentFiles, SegmentStore, StoreError, StoreFile,
    StoreLocation,
};

use assemble::NamedCopy;
use file::Writes;
use members::{CopyResults, FIRST_SLOTS, Member, Members};
use online::ResyncState;

pub use file::MirrorFile;
pub use log_writer::MirrorLogWriter;
pub use members::{SLOTS, Side};
pub use online::{Resync, ResyncStatus, Resynced};
pub use reads::MirrorReads;

/// The state of a copy; the head of this file has the diagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyState {
    /// Holds every acknowledged write.
    Good,
    /// Lacks writes that the other copy has.
    Stale,
    /// A resync is making it equal to the other copy.
    Resyncing,
    /// Missing, or it refused I/O. It is not used until the pool is opened again.
    Failed,
}

impl CopyState {
    /// Whether the copy holds every acknowledged write.
    #[inline]
    pub fn is_good(self) -> bool {
        self == CopyState::Good
    }

    /// Whether the copy gets every write.
    #[inline]
    pub(crate) fn is_written(self) -> bool {
        matches!(self, CopyState::Good | CopyState::Resyncing)
    }

    /// Whether the diagram has this transition.
    fn can_become(self, next: CopyState) -> bool {
        use CopyState::{Failed, Good, Resyncing, Stale};
        matches!(
            (self, next),
            (Good | Resyncing, Failed) | (Good, Stale) | (Stale, Resyncing) | (Resyncing, Good)
        )
    }
}

impl fmt::Display for CopyState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CopyState::Good => "good",
            CopyState::Stale => "stale",
            CopyState::Resyncing => "resyncing",
            CopyState::Failed => "failed",
        })
    }
}

/// The status of a copy, for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyStatus {
    /// The number of the copy in [`crate::StoreFile::copies`].
    pub number: usize,
    /// The path of the copy.
    pub path: String,
    /// The state.
    pub state: CopyState,
    /// Why the copy is not good.
    pub why: Option<String>,
    /// How often data of this copy were repaired from the other one.
    pub repaired: u64,
}

/// Reads the catalogue and the log of a pool. Storage knows neither: the caller that assembles
/// copies passes this.
pub trait VerifyPool {
    /// The caller's error.
    type Error: From<StoreError> + fmt::Display;

    /// Checks that the pool can be opened, and refers to no segment from `segments_max` on, without
    /// writing to a copy that is not good.
    ///
    /// # Errors
    /// Why not.
    fn check_opens<D: SegmentStore>(
        &self,
        copies: Mirror<D>,
        segments_max: usize,
    ) -> Result<(), Self::Error>;

    /// Which copy was replaced by an earlier state of itself: it lacks a part of the log that was
    /// durable, and the other copy has all of it. `None` if both have it, or neither has. `behind`
    /// is the copy with the older superblock; it may also lack the newest checkpoint.
    ///
    /// # Errors
    /// If the superblock or the segments cannot be read.
    fn older_copy<D: SegmentStore>(
        &self,
        copies: Mirror<D>,
        behind: Option<usize>,
    ) -> Result<Option<usize>, Self::Error>;
}

/// What changes when a copy changes its state or is repaired.
#[derive(Debug, Default)]
pub(super) struct MirrorState {
    /// Whether the copies have labels. The only copy of a pool that never had two has none.
    has_labels: bool,
    set: [u8; 16],
    generation: u64,
    /// The identity of the pair once the copy that joins has replaced another one.
    joining_set: [u8; 16],
    /// The copy that was to replace another one when the pool was closed, until it is opened or
    /// given up.
    pending: Option<Joining>,
    /// The generation of the label by which the pool was opened.
    opened_generation: u64,
    /// Why each copy is not good, by slot.
    why: [Option<String>; SLOTS],
    /// Repairs of each copy, by slot.
    repaired: [u64; SLOTS],
    /// The slot of the next copy that joins.
    next_slot: usize,
    /// Segments below this number are durable in the copy that is resyncing.
    cursor: u64,
}

/// State that a mirror and its files share.
pub(super) struct Shared<D: SegmentStore> {
    /// The copies. Changed with `state` locked.
    members: Arc<RcuCell<Members<D>>>,
    /// Set when a copy has joined, or if there were two from the beginning. Until then there is one
    /// copy, and readers need not ask for more.
    is_several: OnceLock<()>,
    /// A copy that cannot be used, locked to keep other processes out.
    aside: OnceLock<D>,
    state: Mutex<MirrorState>,
    /// Whether anything may be changed. A pool opened only for reading is left as it is.
    writes: bool,
    /// Memory for comparisons.
    memory: Arc<Memory>,
    /// The ranges of the superblock that are being written: the file is opened for each write.
    superblock_writing: Writes,
    /// The progress of the resync in the background.
    progress: ResyncState,
}

impl<D: SegmentStore> Shared<D> {
    fn state(&self) -> MutexGuard<'_, MirrorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slots of the good copies.
    #[inline]
    fn good(&self) -> GoodCopies {
        if self.is_several.get().is_none() {
            GoodCopies::ONE
        } else {
            self.members.get().good_slots()
        }
    }

    /// The copies.
    fn members(&self) -> Arc<Members<D>> {
        self.members.get()
    }

    /// Changes the state of a copy.
    fn set_copy(&self, state: &mut MirrorState, slot: usize, next: CopyState, why: Option<String>) {
        let members = self.members();
        let now = members.find(slot).map(|it| it.state);
        debug_assert!(members.good().any(|it| it.slot != slot), "invariant 1: no copy is good");
        debug_assert!(
            now.is_none_or(|now| now.can_become(next)),
            "a {now:?} copy cannot become {next} (invariant 3)"
        );
        state.why[slot] = why;
        self.members.update(|members| members.with_state(slot, next));
    }

    /// Combines the results of an operation on the copies. If at least one good copy has succeeded,
    /// marks those that have not as failed.
    ///
    /// # Errors
    /// If no good copy has succeeded.
    fn combine(&self, results: CopyResults) -> io::Result<()> {
        let CopyResults { succeeded, failed } = results;
        if !succeeded {
            let error = failed.into_iter().next().map(|(_, error)| error);
            return Err(error.unwrap_or_else(|| io::Error::other("no copy is left")));
        }
        failed.into_iter().try_for_each(|(slot, error)| self.mark_failed(slot, &error))
    }

    /// Marks a copy as failed. Returns when the labels of the good copies record that durably.
    ///
    /// # Errors
    /// If there is no other good copy, or it cannot record the failure.
    #[cold]
    fn mark_failed(&self, slot: usize, why: &io::Error) -> io::Result<()> {
        let mut state = self.state();
        let members = self.members();
        // A copy that was detached meanwhile is not missed.
        let Some(member) = members.find(slot) else { return Ok(()) };
        let Some(other) = members.good().find(|it| it.slot != slot) else {
            // Invariant 1: the last good copy stays good.
            return Err(io::Error::new(why.kind(), why.to_string()));
        };
        let (title, other_title) = (&member.side.title, &other.side.title);
        let what = match member.state {
            CopyState::Good => "this copy of the pool has failed",
            CopyState::Resyncing => "the resync of this copy has failed",
            CopyState::Stale | CopyState::Failed => return Ok(()),
        };
        // Invariants 2 and 7: the labels first.
        self.record_failure(&mut state, member)?;
        let again = match member.replaces {
            None => format!("When `{title}` works again, the next opening resyncs it"),
            Some(_) => format!(
                "`{title}` replaces no copy: remove it by `blockyard pool detach`, then try \
                 `blockyard pool replace` again"
            ),
        };
        tracing::error!("{title}: {why}: {what}; the pool continues with `{other_title}`. {again}");
        self.set_copy(&mut state, slot, CopyState::Failed, Some(why.to_string()));
        Ok(())
    }

    /// Records durably in the labels of the other good copies that a copy is not good, and that it
    /// does not join any more.
    fn record_failure(&self, state: &mut MirrorState, member: &Member<D>) -> io::Result<()> {
        if !self.writes {
            return Ok(());
        }
        if member.replaces.is_none() {
            state.generation = state.generation.saturating_add(1);
        }
        let without = self.members().with_state(member.slot, CopyState::Failed);
        self.record_all(state, &without)?;
        // Invariant 7: a copy that joins gets this generation too, or its cursor is void.
        for joining in without.resyncing() {
            let recorded = self.record(state, &without, joining, Some(state.cursor));
            recorded.unwrap_or_else(|error| tracing::warn!("{}: {error}", joining.side.title));
        }
        Ok(())
    }

    /// Writes durably to the labels of the good copies which copies are good.
    fn record_all(&self, state: &MirrorState, members: &Members<D>) -> io::Result<()> {
        members.good().try_for_each(|member| self.record(state, members, member, None))
    }

    /// Writes the label of a copy durably.
    fn record(
        &self,
        state: &MirrorState,
        members: &Members<D>,
        member: &Member<D>,
        cursor: Option<u64>,
    ) -> io::Result<()> {
        if !state.has_labels {
            return Ok(());
        }
        let directory = member.side.directory.as_ref().ok_or(io::ErrorKind::NotFound)?;
        write_label(directory, &members.label(state, member, cursor))
    }

    /// Counts a repair in a copy.
    fn repaired(&self, slot: usize) {
        self.state().repaired[slot] += 1;
    }
}

impl<D: SegmentStore> fmt::Debug for Shared<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirror").field("members", &self.members()).finish()
    }
}

/// The value of a label's `good` if only this copy is good.
fn only(number: usize) -> [bool; 2] {
    std::array::from_fn(|at| at == number)
}

/// Writes a label, slot by slot; makes the file if there is none.
fn write_label<D: SegmentStore>(directory: &D, label: &Label) -> io::Result<()> {
    if !label.fits() {
        let wanted = format!("the paths of the copies have more than {PATH_BYTES_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, wanted));
    }
    let mut bytes = Memory::new(BYTES as u64).take_beyond(BYTES);
    for slot in bytes.chunks_mut(SLOT_BYTES) {
        label.print(slot);
    }
    let write = |file: &D::File| {
        (0..label::SLOTS).try_for_each(|slot| {
            let at = slot * SLOT_BYTES;
            file.write_at(at as u64, &[&bytes[at..at + SLOT_BYTES]])?;
            file.sync()
        })
    };
    if let Some(file) = directory.open(FILE)?
        && file.len()? >= BYTES as u64
    {
        return write(&file);
    }
    let new = format!("{FILE}.new");
    let file = directory.create(&new, BYTES as u64)?;
    // A disk has no names: its label is complete when both slots are written.
    write(&file)?;
    directory.rename(&new, FILE)?;
    directory.sync_names()
}

/// The copies of a pool.
#[derive(Debug)]
pub struct Mirror<D: SegmentStore>(Arc<Shared<D>>);

impl<D: SegmentStore> Mirror<D> {
    /// The only copy of a pool that has no label. Another one may join.
    pub fn single(directory: D, path: impl Into<PathBuf>) -> Mirror<D> {
        let given = NamedCopy { directory: Some(directory), path: path.into() };
        let member = Member::new(0, 0, CopyState::Good, given);
        let state = MirrorState { next_slot: FIRST_SLOTS, ..MirrorState::default() };
        Mirror::of(Members::new(vec![member]), state, true)
    }

    fn of(members: Members<D>, state: MirrorState, writes: bool) -> Mirror<D> {
        let is_several = OnceLock::new();
        if members.list().len() > 1 {
            _ = is_several.set(());
        }
        Mirror(Arc::new(Shared {
            members: Arc::new(RcuCell::new(members)),
            is_several,
            aside: OnceLock::new(),
            state: Mutex::new(state),
            writes,
            memory: Memory::new(4 << 20),
            superblock_writing: Writes::default(),
            progress: ResyncState::default(),
        }))
    }

    /// The copies that are present, in the order of their slots.
    pub fn sides(&self) -> Vec<Arc<Side<D>>> {
        let members = self.0.members();
        let present = members.list().iter().filter(|it| it.side.directory.is_some());
        present.map(|it| Arc::clone(&it.side)).collect()
    }

    /// The paths of all copies, also of missing ones.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.0.members().list().iter().map(|it| it.side.path.clone()).collect()
    }

    /// The good copies.
    pub fn used(&self) -> Vec<Arc<Side<D>>> {
        self.0.members().good().map(|it| Arc::clone(&it.side)).collect()
    }

    /// Applies an operation to the directory of each copy that is written.
    fn each(&self, what: impl Fn(&D) -> io::Result<()>) -> io::Result<()> {
        let members = self.0.members();
        let mut results = CopyResults::default();
        for member in members.written() {
            results.add(member, what(member.directory()));
        }
        self.0.combine(results)
    }

    /// Applies an operation to the file of a name in each copy that is written. A copy that has
    /// joined may not have a file that was begun before; it gets that one by the resync, or when
    /// the file is opened.
    fn each_name(&self, what: impl Fn(&D) -> io::Result<()>) -> io::Result<()> {
        let members = self.0.members();
        let mut results = CopyResults::default();
        for member in members.written() {
            match what(member.directory()) {
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound
                        && (member.state == CopyState::Resyncing || member.has_joined()) => {}
                done => results.add(member, done),
            }
        }
        self.0.combine(results)
    }

    fn file(&self, name: &str, files: Vec<(usize, D::File)>) -> MirrorFile<D> {
        let name = name.strip_suffix(".new").unwrap_or(name);
        MirrorFile::new(&self.0, name, files)
    }
}

/// Whether an error says only that there is no space, or that no descriptor is left.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        || is_short(error)
}

impl<D: SegmentStore> SegmentFiles for Mirror<D> {
    type File = MirrorFile<D>;

    fn open(&self, name: &str) -> io::Result<Option<MirrorFile<D>>> {
        let members = self.0.members();
        let (mut files, mut results) = (Vec::new(), CopyResults::default());
        for member in members.good() {
            match member.directory().open(name) {
                // A missing descriptor says nothing about the copy.
                Err(error) if is_short(&error) => return Err(error),
                Ok(file) => {
                    files.extend(file.map(|file| (member.slot, file)));
                    results.add(member, Ok(()));
                }
                Err(error) => results.add(member, Err(error)),
            }
        }
        self.0.combine(results)?;
        if files.is_empty() {
            return Ok(None);
        }
        self.complete(name, &members, &mut files)?;
        for member in members.resyncing() {
            let found = member.directory().open(name).ok().flatten();
            files.extend(found.map(|file| (member.slot, file)));
        }
        Ok(Some(self.file(name, files)))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<MirrorFile<D>> {
        let members = self.0.members();
        let (mut files, mut results) = (Vec::new(), CopyResults::default());
        for member in members.written() {
            match member.directory().create(name, len) {
                // The file is made in all copies or in none: a full copy has not failed.
                Err(error) if is_full(&error) => {
                    _ = self.remove(name);
                    return Err(error);
                }
                Ok(file) => {
                    files.push((member.slot, file));
                    results.add(member, Ok(()));
                }
                Err(error) => results.add(member, Err(error)),
            }
        }
        self.0.combine(results)?;
        Ok(self.file(name, files))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.each_name(|directory| directory.rename(from, to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.each_name(|directory| directory.remove(name))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let members = self.0.members();
        let (mut names, mut results) = (BTreeSet::new(), CopyResults::default());
        for member in members.good() {
            results.add(member, member.directory().names().map(|own| names.extend(own)));
        }
        self.0.combine(results)?;
        Ok(names.into_iter().collect())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.each(SegmentFiles::sync_names)
    }

    fn erase(&self) -> io::Result<()> {
        let sides = self.sides();
        let copies = || sides.iter().filter_map(|side| side.directory.as_ref());
        // First none has a superblock any more: an interrupted removal must not look like a lost
        // copy. An error is found again when the copy is erased.
        for copy in copies().filter(|_| sides.len() > 1) {
            let new = format!("{}.new", superblock::FILE);
            _ = copy.rename(superblock::FILE, &new).and_then(|()| copy.sync_names());
        }
        // If one copy cannot be erased, the other ones still are.
        let erased: Vec<_> = copies().map(SegmentFiles::erase).collect();
        erased.into_iter().collect()
    }

    fn discards(&self) -> bool {
        self.0.members().good().any(|member| member.directory().discards())
    }

    fn discard(&self, file: &MirrorFile<D>) {
        let members = self.0.members();
        for member in members.good().filter(|it| it.directory().discards()) {
            if let Some(file) = file.side(member.slot) {
                member.directory().discard(file);
            }
        }
    }

    /// A copy that cannot give its space back keeps it, which does not affect its data. If any has
    /// given it back, the file needs space again before it is written.
    fn deallocate(&self, file: &MirrorFile<D>) -> io::Result<()> {
        let members = self.0.members();
        let given =
            members.good().filter_map(|it| Some(it.directory().deallocate(file.side(it.slot)?)));
        let given: Vec<_> = given.collect();
        match given.iter().any(Result::is_ok) {
            true => Ok(()),
            false => given.into_iter().collect(),
        }
    }

    fn allocate(&self, file: &MirrorFile<D>, len: u64) -> io::Result<()> {
        let members = self.0.members();
        let mut results = CopyResults::default();
        for member in members.written() {
            let Some(side) = file.side(member.slot) else { continue };
            match member.directory().allocate(side, len) {
                Err(error) if is_full(&error) => return Err(error),
                filled => results.add(member, filled),
            }
        }
        self.0.combine(results)
    }
}

impl<D: SegmentStore> StoreLocation for Mirror<D> {
    fn title(&self) -> String {
        let members = self.0.members();
        let titles: Vec<&str> = members.good().map(|it| it.side.title.as_str()).collect();
        titles.join(",")
    }

    fn set_layout(&self, wanted: Layout, is_new: bool) -> Result<Layout, StoreError> {
        let members = self.0.members();
        let mut written = members.written();
        written.try_fold(wanted, |wanted, member| member.directory().set_layout(wanted, is_new))
    }

    fn segments_max(&self) -> usize {
        let members = self.0.members();
        members.written().map(|it| it.directory().segments_max()).min().unwrap_or(usize::MAX)
    }

    fn growth_bytes(&self) -> u64 {
        let members = self.0.members();
        let growth = |it: &Member<D>| {
            let bytes = it.directory().growth_bytes();
            let needed = match it.state {
                CopyState::Resyncing => self.0.progress.left_bytes(),
                _ => 0,
            };
            bytes.saturating_sub(needed)
        };
        members.written().map(growth).min().unwrap_or(u64::MAX)
    }

    fn check_location(&self) -> io::Result<()> {
        self.each(StoreLocation::check_location)
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        let members = self.0.members();
        let mut good = members.good();
        good.next().ok_or_else(|| io::Error::other("no copy is left"))?.directory().fresh_id()
    }
}

impl<D: SegmentStore> SegmentStore for Mirror<D> {
    type LogWriter = MirrorLogWriter<D>;
    type Reads = MirrorReads<D>;

    fn copy_status(&self) -> Vec<CopyStatus> {
        let (state, members) = (self.0.state(), self.0.members());
        let status = |member: &Member<D>| CopyStatus {
            number: member.slot,
            path: member.side.title.clone(),
            state: member.state,
            why: state.why[member.slot].clone(),
            repaired: state.repaired[member.slot],
        };
        match members.list() {
            [_] => Vec::new(),
            list => list.iter().map(status).collect(),
        }
    }

    fn reports_sync_error_to_all(&self) -> bool {
        self.0.members().written().all(|it| it.directory().reports_sync_error_to_all())
    }

    fn io_align(&self) -> u32 {
        let members = self.0.members();
        let aligns = members.written().map(|it| it.directory().io_align());
        aligns.max().unwrap_or(ALIGN as u32)
    }

    fn lease_term(&self) -> Option<Arc<LeaseTerm>> {
        let members = self.0.members();
        members.written().find_map(|it| it.directory().lease_term())
    }

    fn log_writer(&self, scratch: Option<&Arc<MirrorFile<D>>>) -> MirrorLogWriter<D> {
        MirrorLogWriter::new(&self.0, scratch)
    }

    fn reads(&self, event_fd: Option<&EventFd>) -> MirrorReads<D> {
        MirrorReads::new(&self.0.members, event_fd)
    }
}

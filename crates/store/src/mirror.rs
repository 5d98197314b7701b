//! A mirror: two directories or disks with the same files. Every write goes to both, reads use one.
//! Data that are damaged there are read from the other copy and repaired.
//!
//! # States of a copy
//!
//! | state | data | read | written |
//! | --- | --- | --- | --- |
//! | [`Good`](CopyState::Good) | every acknowledged write | by clients | by clients |
//! | [`Stale`](CopyState::Stale) | lacks writes that the other copy has | never | never |
//! | [`Resyncing`](CopyState::Resyncing) | partly equal to the good copy | where the good copy is damaged | by the resync |
//! | [`Failed`](CopyState::Failed) | unknown: missing, or it refused I/O | never | never |
//!
//! ```text
//!                                                 Shared::mark_failed
//!             ┌─ assemble: labels agree ─▸ Good ──────────────────────▸ Failed
//!             │                             ▴                            ▴  ▴
//!   opening ──┤                             │ Mirror::end_resync         │  │
//!             │                             │                            │  │
//!             ├─ assemble: older ─▸ Stale ─▸ Resyncing ──────────────────┘  │
//!             │                    Mirror::begin_resync  Mirror::fail_resync │
//!             └─ assemble: missing, or its label cannot be read ────────────┘
//! ```
//!
//! While a mirror is assembled, a good copy becomes stale if its log shows that it is older
//! (`Mirror::mark_stale`).
//!
//! A copy leaves `Failed` only by another opening. It is then stale if it is present, because the
//! other copy's label ([`blockyard_volume_format::label`]) says that only that one is good.
//!
//! # Invariants
//!
//! 1. At least one copy is good. If both refuse a write, the second one stays good, and the caller
//!    gets the error.
//! 2. Before a good copy becomes failed, the label of the other copy records durably that only that
//!    one is good. The write that failed is answered afterwards. So the copy is recognised as stale
//!    when it comes back.
//! 3. A copy becomes good only at the end of a resync, when both have the same files and both
//!    labels say so.
//! 4. Clients read and write good copies only. A resync writes only to the copy that is resyncing.
//! 5. After the assembly of a mirror that may be written, each copy is good or failed. A mirror
//!    that is opened only for reading may have a stale copy.
//!
//! # Opening
//!
//! | the labels say | result |
//! | --- | --- |
//! | both: both are good, of one generation | both are good, unless the superblocks or the log of one show that it is an earlier state of itself: then it is stale |
//! | one: only itself; the other: both, or not itself | the other one is stale: it is resynced |
//! | each: only itself | both were written to, each without the other: refused |
//! | one: only itself; the other is missing | opened with one; the other one is failed |
//! | one: both; the other is missing | the other may be newer: refused without consent |
//! | one: not itself; the other is missing | refused |
#![allow(clippy::disallowed_types)] // Copies rarely fail, and labels are rarely written.

pub mod assemble;
pub mod attach;
mod file;
pub mod locations;
mod log_writer;
mod reads;
mod resync;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blockyard_sync::rcu_cell::{RcuCell, RcuReader};
use blockyard_volume_format::label::{BYTES, FILE, Label, SLOT_BYTES, SLOTS};
use blockyard_volume_format::superblock;

use crate::buffer::Memory;
use crate::file::is_short;
use crate::{
    Copies, EventFd, LogWriter, SegmentFiles, SegmentStore, StoreError, StoreFile, StoreLocation,
};

pub use file::MirrorFile;
pub use log_writer::MirrorLogWriter;
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
    /// The path of the copy.
    pub path: String,
    /// The state.
    pub state: CopyState,
    /// Why the copy is not good.
    pub why: Option<String>,
    /// How often data of this copy were repaired from the other one.
    pub repaired: u64,
}

/// What a verification of a pool has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Blocks and pages that were damaged in the good copy and were repaired from the stale one.
    pub repaired: u64,
    /// Blocks and pages that are damaged in both copies.
    pub damaged: u64,
}

/// Verifies a pool by the checksums in its maps. Storage knows no maps: the caller that assembles
/// copies passes this, and a resync calls it before it overwrites a stale copy.
pub trait VerifyPool {
    /// The caller's error.
    type Error: From<StoreError> + fmt::Display;

    /// Reads every block and page that the pool's maps refer to. Rewrites what is damaged in one
    /// copy and intact in the other. References to segments from `segments_max` on are refused.
    /// `should_continue` is called regularly, and returns whether to continue.
    ///
    /// # Errors
    /// If the pool cannot be opened, or `should_continue` ends the verification.
    fn verify<D: SegmentStore>(
        &self,
        copies: Copies<D>,
        segments_max: usize,
        should_continue: &mut dyn FnMut() -> bool,
    ) -> Result<Verified, Self::Error>;

    /// Which copy was replaced by an earlier state of itself: it lacks a part of the log that was
    /// durable, and the other copy has all of it. `None` if both have it, or neither has. `behind`
    /// is the copy with the older superblock; it may also lack the newest checkpoint.
    ///
    /// # Errors
    /// If the superblock or the segments cannot be read.
    fn older_copy<D: SegmentStore>(
        &self,
        copies: Copies<D>,
        behind: Option<usize>,
    ) -> Result<Option<usize>, Self::Error>;
}

/// One of the two copies.
#[derive(Debug)]
struct Side<D> {
    /// `None` if the copy is missing.
    directory: Option<D>,
    title: String,
    path: PathBuf,
}

/// What changes when a copy changes its state or is repaired.
#[derive(Debug)]
struct MirrorState {
    set: [u8; 16],
    generation: u64,
    /// Why each copy is not good.
    why: [Option<String>; 2],
    repaired: [u64; 2],
}

/// State that a mirror and its files share.
pub(super) struct Shared<D: SegmentStore> {
    sides: Arc<[Side<D>; 2]>,
    /// The state of each copy. Changed with `state` locked.
    copies: Arc<RcuCell<[CopyState; 2]>>,
    /// A copy that cannot be used, locked to keep other processes out.
    aside: OnceLock<D>,
    state: Mutex<MirrorState>,
    /// Whether anything may be changed. A pool opened only for reading is left as it is.
    writes: bool,
    /// Memory for comparisons.
    memory: Arc<Memory>,
}

impl<D: SegmentStore> Shared<D> {
    fn state(&self) -> MutexGuard<'_, MirrorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which copies are good.
    fn good(&self) -> [bool; 2] {
        self.copies.get().map(CopyState::is_good)
    }

    /// The directories of the good copies, with their numbers.
    fn good_ones(&self) -> impl Iterator<Item = (usize, &D)> {
        let good = self.good();
        let sides = (0..).zip(self.sides.iter()).filter(move |(number, _)| good[*number]);
        sides.filter_map(|(number, side)| Some((number, side.directory.as_ref()?)))
    }

    /// The copy that is resyncing.
    fn resyncing(&self) -> Option<usize> {
        self.copies.get().iter().position(|copy| *copy == CopyState::Resyncing)
    }

    /// Changes the state of a copy.
    fn set_copy(
        &self,
        state: &mut MirrorState,
        number: usize,
        next: CopyState,
        why: Option<String>,
    ) {
        let mut copies = *self.copies.get();
        debug_assert!(copies[1 - number].is_good(), "invariant 1: no copy is good");
        debug_assert!(
            copies[number].can_become(next),
            "a {} copy cannot become {next} (invariant 3)",
            copies[number]
        );
        copies[number] = next;
        state.why[number] = why;
        self.copies.update(|_| copies);
    }

    /// Combines the results of an operation on each good copy. If at least one has succeeded, marks
    /// those that have not as failed.
    ///
    /// # Errors
    /// If none has succeeded.
    fn combine(&self, results: [Option<io::Result<()>>; 2]) -> io::Result<()> {
        if !results.iter().any(|result| matches!(result, Some(Ok(())))) {
            let errors = results.into_iter().flatten().find_map(Result::err);
            return Err(errors.unwrap_or_else(|| io::Error::other("no copy is left")));
        }
        for (number, result) in results.into_iter().enumerate() {
            if let Some(Err(error)) = result {
                self.mark_failed(number, &error)?;
            }
        }
        Ok(())
    }

    /// Marks a copy as failed. Returns when the label of the other copy records that durably.
    ///
    /// # Errors
    /// If there is no other good copy, or it cannot record the failure.
    #[cold]
    fn mark_failed(&self, number: usize, why: &io::Error) -> io::Result<()> {
        let mut state = self.state();
        let good = self.good();
        let other = 1 - number;
        // Invariant 1: the last good copy stays good.
        if !good[other] {
            return Err(io::Error::new(why.kind(), why.to_string()));
        }
        if !good[number] {
            return Ok(());
        }
        // Invariant 2: the label first.
        if self.writes {
            state.generation = state.generation.saturating_add(1);
            self.record(&state, other, only(other))?;
        }
        let (title, other_title) = (&self.sides[number].title, &self.sides[other].title);
        tracing::error!(
            "{title}: {why}: this copy of the pool has failed; the pool continues with \
             `{other_title}` alone. When `{title}` works again, the next opening resyncs it"
        );
        self.set_copy(&mut state, number, CopyState::Failed, Some(why.to_string()));
        Ok(())
    }

    /// Writes durably to the label of a copy which copies are good.
    fn record(&self, state: &MirrorState, number: usize, good: [bool; 2]) -> io::Result<()> {
        let label = Label {
            set: state.set,
            number,
            generation: state.generation,
            good,
            other: self.sides[1 - number].path.clone(),
        };
        let directory = self.sides[number].directory.as_ref();
        write_label(directory.ok_or(io::ErrorKind::NotFound)?, &label)
    }

    /// Counts a repair in a copy.
    fn repaired(&self, number: usize) {
        self.state().repaired[number] += 1;
    }
}

impl<D: SegmentStore> fmt::Debug for Shared<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sides = [&self.sides[0].title, &self.sides[1].title];
        f.debug_struct("Mirror").field("sides", &sides).field("copies", &self.copies.get()).finish()
    }
}

/// The value of a label's `good` if only this copy is good.
fn only(number: usize) -> [bool; 2] {
    std::array::from_fn(|at| at == number)
}

/// Writes a label, slot by slot; makes the file if there is none.
fn write_label<D: SegmentStore>(directory: &D, label: &Label) -> io::Result<()> {
    let mut bytes = Memory::new(BYTES as u64).take_beyond(BYTES);
    for slot in bytes.chunks_mut(SLOT_BYTES) {
        label.print(slot);
    }
    let write = |file: &D::File| {
        (0..SLOTS).try_for_each(|slot| {
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

/// Two copies of a pool.
#[derive(Debug)]
pub struct Mirror<D: SegmentStore>(Arc<Shared<D>>);

impl<D: SegmentStore> Mirror<D> {
    /// The directories of the copies that are present, in the order in which they were named.
    pub fn directories(&self) -> impl Iterator<Item = &D> {
        self.0.sides.iter().filter_map(|side| side.directory.as_ref())
    }

    /// The directories of the good copies.
    pub fn used(&self) -> impl Iterator<Item = &D> {
        self.0.good_ones().map(|(_, directory)| directory)
    }

    /// Applies an operation to the directory of each good copy.
    fn each(&self, what: impl Fn(&D) -> io::Result<()>) -> io::Result<()> {
        let mut results = [None, None];
        for (number, directory) in self.0.good_ones() {
            results[number] = Some(what(directory));
        }
        self.0.combine(results)
    }

    fn file(&self, name: &str, files: [Option<D::File>; 2]) -> MirrorFile<D> {
        let name = name.strip_suffix(".new").unwrap_or(name);
        MirrorFile::new(&self.0, name, files.map(|file| file.map(Arc::new)))
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
        let (mut files, mut results) = ([None, None], [None, None]);
        for (number, directory) in self.0.good_ones() {
            match directory.open(name) {
                // A missing descriptor says nothing about the copy.
                Err(error) if is_short(&error) => return Err(error),
                opened => results[number] = Some(opened.map(|file| files[number] = file)),
            }
        }
        self.0.combine(results)?;
        if files.iter().all(Option::is_none) {
            return Ok(None);
        }
        self.complete(name, &mut files)?;
        if let Some(number) = self.0.resyncing()
            && let Some(directory) = &self.0.sides[number].directory
        {
            files[number] = directory.open(name).ok().flatten();
        }
        Ok(Some(self.file(name, files)))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<MirrorFile<D>> {
        let (mut files, mut results) = ([None, None], [None, None]);
        for (number, directory) in self.0.good_ones() {
            match directory.create(name, len) {
                // The file is made in both copies or in none: a full copy has not failed.
                Err(error) if is_full(&error) => {
                    _ = self.remove(name);
                    return Err(error);
                }
                made => results[number] = Some(made.map(|file| files[number] = Some(file))),
            }
        }
        self.0.combine(results)?;
        Ok(self.file(name, files))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.each(|directory| directory.rename(from, to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.each(|directory| directory.remove(name))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = BTreeSet::new();
        let (mut results, good) = ([None, None], self.0.good_ones());
        for (number, directory) in good {
            results[number] = Some(directory.names().map(|own| names.extend(own)));
        }
        self.0.combine(results)?;
        Ok(names.into_iter().collect())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.each(SegmentFiles::sync_names)
    }

    fn erase(&self) -> io::Result<()> {
        let copies = self.0.sides.iter().filter_map(|side| side.directory.as_ref());
        // First neither has a superblock any more: an interrupted removal must not look like a lost
        // copy. An error is found again when the copy is erased.
        for copy in copies.clone() {
            let new = format!("{}.new", superblock::FILE);
            _ = copy.rename(superblock::FILE, &new).and_then(|()| copy.sync_names());
        }
        // If one copy cannot be erased, the other one still is.
        let erased: Vec<_> = copies.map(SegmentFiles::erase).collect();
        erased.into_iter().collect()
    }

    fn discards(&self) -> bool {
        self.0.good_ones().any(|(_, directory)| directory.discards())
    }

    fn discard(&self, file: &MirrorFile<D>) {
        for (number, directory) in self.0.good_ones().filter(|(_, it)| it.discards()) {
            if let Some(file) = file.side(number) {
                directory.discard(file);
            }
        }
    }

    /// A copy that cannot give its space back keeps it, which does not affect its data.
    fn deallocate(&self, file: &MirrorFile<D>) -> io::Result<()> {
        let mut given = self
            .0
            .good_ones()
            .filter_map(|(number, directory)| Some(directory.deallocate(file.side(number)?)));
        given.try_for_each(|given| given)
    }

    fn allocate(&self, file: &MirrorFile<D>, len: u64) -> io::Result<()> {
        let mut results = [None, None];
        for (number, directory) in self.0.good_ones() {
            let Some(side) = file.side(number) else { continue };
            match directory.allocate(side, len) {
                Err(error) if is_full(&error) => return Err(error),
                filled => results[number] = Some(filled),
            }
        }
        self.0.combine(results)
    }
}

impl<D: SegmentStore> StoreLocation for Mirror<D> {
    fn title(&self) -> String {
        let good = self.0.good();
        let titles = self.0.sides.iter().zip(good).filter(|(_, good)| *good);
        titles.map(|(side, _)| side.title.as_str()).collect::<Vec<_>>().join(",")
    }

    fn check_location(&self) -> io::Result<()> {
        self.each(StoreLocation::check_location)
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        let mut good = self.0.good_ones();
        good.next().ok_or_else(|| io::Error::other("no copy is left"))?.1.fresh_id()
    }
}

impl<D: SegmentStore> SegmentStore for Mirror<D> {
    type LogWriter = MirrorLogWriter<D>;
    type Reads = MirrorReads<D>;

    fn copy_status(&self) -> Vec<CopyStatus> {
        let (state, copies) = (self.0.state(), self.0.copies.get());
        let status = |(number, side): (usize, &Side<D>)| CopyStatus {
            path: side.title.clone(),
            state: copies[number],
            why: state.why[number].clone(),
            repaired: state.repaired[number],
        };
        self.0.sides.iter().enumerate().map(status).collect()
    }

    fn reports_sync_error_to_all(&self) -> bool {
        self.0.good_ones().all(|(_, directory)| directory.reports_sync_error_to_all())
    }

    fn log_writer(&self, scratch: Option<&Arc<MirrorFile<D>>>) -> MirrorLogWriter<D> {
        let good = self.0.good();
        let log_writers = std::array::from_fn(|number| {
            let directory = self.0.sides[number].directory.as_ref().filter(|_| good[number])?;
            let mut log_writer = directory.log_writer(scratch.and_then(|file| file.side(number)));
            log_writer.submit_at_once();
            Some(log_writer)
        });
        MirrorLogWriter::new(&self.0, log_writers)
    }

    fn reads(&self, event_fd: Option<&EventFd>) -> MirrorReads<D> {
        let good = self.0.good();
        let reads = std::array::from_fn(|number| {
            let directory = self.0.sides[number].directory.as_ref().filter(|_| good[number])?;
            Some(directory.reads(event_fd))
        });
        MirrorReads::new(RcuReader::new(&self.0.copies), reads)
    }
}

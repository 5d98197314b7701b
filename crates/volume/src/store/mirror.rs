//! Two directories with the same files: everything is written to both, and read from one of them.
//! What is not whole there is read from the other one and written again.
//!
//! A copy that refuses a write or a sync is *given up*: the other one notes that in its label
//! ([`crate::format::label`]), durably, before the write is answered, and the pool goes on with it
//! alone. So a copy that was left behind is known when it comes back, and never read as if it had
//! everything; it is made equal first.
//!
//! | the labels say | at an opening |
//! | --- | --- |
//! | both: both have everything, of one generation | both are used |
//! | one: it alone; the other one: both, or not itself | the other one was left behind: made equal |
//! | each: it alone | both were written to, each without the other: refused |
//! | one: it alone; the other one is not there | opened with one |
//! | one: both; the other one is not there | it may be the newer one: refused without consent |
//! | one: not itself; the other one is not there | refused |
#![allow(clippy::disallowed_types)] // Copies are given up once, and labels rarely written.

pub mod assemble;
pub mod attach;
mod equal;
mod file;
mod lane;
pub mod places;
mod reads;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blockyard_sync::published::{Published, Reader};

use super::descriptors::is_short;
use super::{Directory, Doorbell, Lane, StoreFile};
use crate::buffer::Memory;
use crate::format::label::{BYTES, FILE, Label, SLOT_BYTES, SLOTS};

pub use file::MirrorFile;
pub use lane::MirrorLane;
pub use reads::MirrorReads;

/// How a copy is, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyStatus {
    /// Its directory.
    pub path: String,
    /// It has everything.
    pub is_good: bool,
    /// Why it has not.
    pub why: Option<String>,
    /// How often something in it was written again from the other one.
    pub mended: u64,
}

/// One of the two.
#[derive(Debug)]
struct Side<D> {
    /// `None` where it is not there.
    directory: Option<D>,
    title: String,
    path: PathBuf,
}

/// What changes now and then.
#[derive(Debug)]
struct State {
    set: [u8; 16],
    generation: u64,
    /// Why a copy has not everything.
    why: [Option<String>; 2],
    mended: [u64; 2],
}

/// What a pair and its files share.
pub(super) struct Shared<D: Directory> {
    sides: Arc<[Side<D>; 2]>,
    /// Which of them have everything. Changed with `state` locked.
    good: Arc<Published<[bool; 2]>>,
    /// One that has not, and is looked into where the other one is damaged.
    spare: Option<usize>,
    /// One that is of no use as it is, and that nobody else is to have meanwhile.
    aside: OnceLock<D>,
    state: Mutex<State>,
    /// Nothing is changed where this is not set: who only looks leaves everything as it is.
    writes: bool,
    /// For what is compared.
    memory: Arc<Memory>,
}

impl<D: Directory> Shared<D> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which copies have everything.
    fn good(&self) -> [bool; 2] {
        *self.good.get()
    }

    /// The directories that have everything, with their numbers.
    fn good_ones(&self) -> impl Iterator<Item = (usize, &D)> {
        let good = self.good();
        let sides = (0..).zip(self.sides.iter()).filter(move |(number, _)| good[*number]);
        sides.filter_map(|(number, side)| Some((number, side.directory.as_ref()?)))
    }

    /// What has come of something that was done to each copy that has everything: good if one has
    /// done it, and those that have not were given up.
    ///
    /// # Errors
    /// If none has done it.
    fn settle(&self, results: [Option<io::Result<()>>; 2]) -> io::Result<()> {
        if !results.iter().any(|result| matches!(result, Some(Ok(())))) {
            let errors = results.into_iter().flatten().find_map(Result::err);
            return Err(errors.unwrap_or_else(|| io::Error::other("no copy is left")));
        }
        for (number, result) in results.into_iter().enumerate() {
            if let Some(Err(error)) = result {
                self.give_up(number, &error)?;
            }
        }
        Ok(())
    }

    /// A copy has not everything any more. It returns when the other one has noted that, durably.
    ///
    /// # Errors
    /// If there is no other one, or it cannot note that.
    #[cold]
    fn give_up(&self, number: usize, why: &io::Error) -> io::Result<()> {
        let mut state = self.state();
        let good = self.good();
        let other = 1 - number;
        if !good[other] {
            return Err(io::Error::new(why.kind(), why.to_string()));
        }
        if !good[number] {
            return Ok(());
        }
        let (title, rest) = (&self.sides[number].title, &self.sides[other].title);
        if self.writes {
            state.generation = state.generation.saturating_add(1);
            let alone = std::array::from_fn(|at| at == other);
            self.note(other, &state, alone)?;
        }
        self.good.update(|_| std::array::from_fn(|at| at == other));
        tracing::error!(
            "{title}: {why}: this copy of the pool is given up; it goes on with `{rest}` alone. \
             Open the pool again when `{title}` is good, and it is made equal"
        );
        state.why[number] = Some(why.to_string());
        Ok(())
    }

    /// Writes the label of a copy.
    fn note(&self, number: usize, state: &State, good: [bool; 2]) -> io::Result<()> {
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

    /// Something in a copy was written again.
    fn mended(&self, number: usize) {
        self.state().mended[number] += 1;
    }
}

impl<D: Directory> fmt::Debug for Shared<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sides = [&self.sides[0].title, &self.sides[1].title];
        f.debug_struct("Mirror").field("sides", &sides).field("good", &self.good()).finish()
    }
}

/// Writes a label, slot by slot; makes the file if there is none.
fn write_label<D: Directory>(directory: &D, label: &Label) -> io::Result<()> {
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
    // A disk has no names: what is whole there has both slots.
    write(&file)?;
    directory.rename(&new, FILE)?;
    directory.sync_names()
}

/// See the module.
#[derive(Debug)]
pub struct Mirror<D: Directory>(Arc<Shared<D>>);

impl<D: Directory> Mirror<D> {
    /// The two of them, as far as they are there; the one that was named first comes first.
    pub fn directories(&self) -> impl Iterator<Item = &D> {
        self.0.sides.iter().filter_map(|side| side.directory.as_ref())
    }

    /// Those of them that have everything.
    pub fn used(&self) -> impl Iterator<Item = &D> {
        self.0.good_ones().map(|(_, directory)| directory)
    }

    /// How they are.
    pub fn status(&self) -> Vec<CopyStatus> {
        let (state, good) = (self.0.state(), self.0.good());
        let status = |(number, side): (usize, &Side<D>)| CopyStatus {
            path: side.title.clone(),
            is_good: good[number],
            why: state.why[number].clone().filter(|_| !good[number]),
            mended: state.mended[number],
        };
        self.0.sides.iter().enumerate().map(status).collect()
    }

    /// Does something to each directory that has everything.
    fn each(&self, what: impl Fn(&D) -> io::Result<()>) -> io::Result<()> {
        let mut results = [None, None];
        for (number, directory) in self.0.good_ones() {
            results[number] = Some(what(directory));
        }
        self.0.settle(results)
    }

    fn file(&self, name: &str, files: [Option<D::File>; 2]) -> MirrorFile<D> {
        let name = name.strip_suffix(".new").unwrap_or(name);
        MirrorFile::new(&self.0, name, files.map(|file| file.map(Arc::new)))
    }
}

/// Whether an error says that there is no room, or that no descriptor is left, and nothing else.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        || is_short(error)
}

impl<D: Directory> Directory for Mirror<D> {
    type File = MirrorFile<D>;
    type Lane = MirrorLane<D>;
    type Reads = MirrorReads<D>;

    fn title(&self) -> String {
        let good = self.0.good();
        let titles = self.0.sides.iter().zip(good).filter(|(_, good)| *good);
        titles.map(|(side, _)| side.title.as_str()).collect::<Vec<_>>().join(",")
    }

    fn copy_title(&self, copy: usize) -> String {
        self.0.sides.get(copy).map_or_else(|| self.title(), |side| side.title.clone())
    }

    fn tells_everybody(&self) -> bool {
        self.0.good_ones().all(|(_, directory)| directory.tells_everybody())
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

    /// One that could not give its space back has it still; that says nothing of what it has.
    fn give_back(&self, file: &MirrorFile<D>) -> io::Result<()> {
        let mut given = self
            .0
            .good_ones()
            .filter_map(|(number, directory)| Some(directory.give_back(file.side(number)?)));
        given.try_for_each(|given| given)
    }

    fn fill(&self, file: &MirrorFile<D>, len: u64) -> io::Result<()> {
        let mut results = [None, None];
        for (number, directory) in self.0.good_ones() {
            let Some(side) = file.side(number) else { continue };
            match directory.fill(side, len) {
                Err(error) if is_full(&error) => return Err(error),
                filled => results[number] = Some(filled),
            }
        }
        self.0.settle(results)
    }

    fn look(&self) -> io::Result<()> {
        self.each(Directory::look)
    }

    fn has_all_copies(&self) -> bool {
        self.0.good() == [true; 2]
    }

    fn lane(&self, scratch: Option<&Arc<MirrorFile<D>>>) -> MirrorLane<D> {
        let good = self.0.good();
        let lanes = std::array::from_fn(|number| {
            let directory = self.0.sides[number].directory.as_ref().filter(|_| good[number])?;
            let mut lane = directory.lane(scratch.and_then(|file| file.side(number)));
            lane.run_beside();
            Some(lane)
        });
        MirrorLane::new(&self.0, lanes)
    }

    fn reads(&self, doorbell: Option<&Doorbell>) -> MirrorReads<D> {
        let good = self.0.good();
        let reads = std::array::from_fn(|number| {
            let directory = self.0.sides[number].directory.as_ref().filter(|_| good[number])?;
            Some(directory.reads(doorbell))
        });
        MirrorReads::new(Reader::new(&self.0.good), reads)
    }

    fn open(&self, name: &str) -> io::Result<Option<MirrorFile<D>>> {
        let (mut files, mut results) = ([None, None], [None, None]);
        for (number, directory) in self.0.good_ones() {
            match directory.open(name) {
                // It says nothing of the copy.
                Err(error) if is_short(&error) => return Err(error),
                opened => results[number] = Some(opened.map(|file| files[number] = file)),
            }
        }
        self.0.settle(results)?;
        if files.iter().all(Option::is_none) {
            return Ok(None);
        }
        self.complete(name, &mut files)?;
        if let Some(number) = self.0.spare
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
                // Both of them, or none: a copy is not bad because it is full.
                Err(error) if is_full(&error) => {
                    _ = self.remove(name);
                    return Err(error);
                }
                made => results[number] = Some(made.map(|file| files[number] = Some(file))),
            }
        }
        self.0.settle(results)?;
        Ok(self.file(name, files))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.each(|directory| directory.rename(from, to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.each(|directory| directory.remove(name))
    }

    fn sync_names(&self) -> io::Result<()> {
        self.each(Directory::sync_names)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = BTreeSet::new();
        let (mut results, good) = ([None, None], self.0.good_ones());
        for (number, directory) in good {
            results[number] = Some(directory.names().map(|found| names.extend(found)));
        }
        self.0.settle(results)?;
        Ok(names.into_iter().collect())
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        let mut good = self.0.good_ones();
        good.next().ok_or_else(|| io::Error::other("no copy is left"))?.1.fresh_id()
    }
}

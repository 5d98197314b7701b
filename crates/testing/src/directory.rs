//! A simulated directory of files, which records every operation and can cut the power after each.
//! What a program finds after the cut is any mixture of the data that were not synced.
//!
//! After a power cut, of operations that were not made durable:
//! - each unit of a file (usually a sector) has any of its contents since the last sync of the
//!   file, whatever its neighbours have: writes are torn and reordered, within a file and across
//!   files;
//! - of creations, renames and removals, the first ones are kept, up to any one of them, as in the
//!   journal of a file system;
//! - a file whose name is not durable is lost, including everything that was synced of it.
//!
//! A kill of the process, in contrast, keeps everything.
//!
//! After a crash, data may rot before they are read again: bits and sectors of files change at
//! rest.
#![allow(clippy::disallowed_types)] // The record of operations, in tests only.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Length of a sector in bytes: the unit that a disk writes atomically.
pub const SECTOR: usize = 512;

/// One operation that changed something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A file of zeros was made under a name.
    Create {
        /// The file's number: files are numbered in the order of creation.
        file: usize,
        /// The name.
        name: String,
        /// Length in bytes.
        len: u64,
        /// Unit that is written atomically, in bytes.
        unit: usize,
    },
    /// Bytes were written.
    Write {
        /// The file.
        file: usize,
        /// The offset.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A range was set to zero.
    Punch {
        /// The file.
        file: usize,
        /// The offset.
        offset: u64,
        /// The length in bytes.
        len: u64,
    },
    /// A file was synced.
    Sync {
        /// The file.
        file: usize,
    },
    /// Only a range of a file was synced.
    SyncRange {
        /// The file.
        file: usize,
        /// The offset.
        offset: u64,
        /// The length in bytes.
        len: u64,
    },
    /// A file was synced in its state after a given number of writes.
    SyncThrough {
        /// The file.
        file: usize,
        /// The number of writes.
        writes: u64,
    },
    /// A file was renamed.
    Rename {
        /// The old name.
        from: String,
        /// The new name.
        to: String,
    },
    /// A name was removed.
    Remove {
        /// The name.
        name: String,
    },
    /// The names were synced.
    SyncNames,
}

/// Names and the numbers of their files; disks and images that have the same ones share them.
type Names = Arc<BTreeMap<String, usize>>;

/// The bytes of a file: an image of a disk that has the same ones shares them until either changes
/// them.
type FileBytes = Arc<Vec<u8>>;

#[derive(Debug, Default)]
struct State {
    names: Names,
    files: Vec<FileBytes>,
    units: Vec<usize>,
    /// Number of writes of each file.
    writes: Vec<u64>,
    changes: Vec<Change>,
    /// Counts the runs of the kernel: a power cut begins a new one.
    boot: u64,
    ids: u64,
}

/// A simulated directory. Clones are the same directory.
#[derive(Clone, Debug, Default)]
pub struct SimulatedDirectory(Arc<Mutex<State>>);

/// A file in a simulated directory.
#[derive(Clone, Debug)]
pub struct File {
    directory: SimulatedDirectory,
    number: usize,
}

impl SimulatedDirectory {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, change: Change) {
        self.state().changes.push(change);
    }

    /// The operations so far.
    pub fn changes(&self) -> Vec<Change> {
        self.state().changes.clone()
    }

    /// The number of operations so far.
    pub fn change_count(&self) -> usize {
        self.state().changes.len()
    }

    /// Clears the record of operations: the current state becomes the durable initial state.
    pub fn settle(&self) {
        self.state().changes.clear();
    }

    /// The current contents as a disk, all of it durable.
    pub fn medium(&self) -> Medium {
        let state = self.state();
        let files = state.files.iter().zip(&state.units).zip(&state.writes);
        let pages = |((bytes, unit), writes): ((&FileBytes, &usize), &u64)| FilePages {
            writes: *writes,
            ..FilePages::durable(Arc::clone(bytes), *unit)
        };
        let files = files.map(pages).collect();
        Medium {
            names: state.names.clone(),
            pending_names: Vec::new(),
            files,
            boot: state.boot,
            ids: state.ids,
        }
    }

    /// The total length of the files that have a name, in bytes.
    pub fn bytes(&self) -> u64 {
        let state = self.state();
        state.names.values().map(|file| state.files[*file].len() as u64).sum()
    }

    /// The number of this run of the kernel.
    pub fn boot(&self) -> u64 {
        self.state().boot
    }

    /// A unique number.
    pub fn fresh_id(&self) -> u64 {
        let mut state = self.state();
        state.ids += 1;
        state.ids
    }

    /// Opens a file, if there is one of this name.
    pub fn open(&self, name: &str) -> Option<File> {
        let number = *self.state().names.get(name)?;
        Some(File { directory: self.clone(), number })
    }

    /// Makes a file of zeros, whose units of `unit` bytes are written atomically: a sector, or less
    /// for files that are too small to be torn otherwise.
    pub fn create(&self, name: &str, len: u64, unit: usize) -> File {
        let mut state = self.state();
        let file = state.files.len();
        state.files.push(Arc::new(vec![0; len as usize]));
        state.units.push(unit);
        state.writes.push(0);
        Arc::make_mut(&mut state.names).insert(name.to_owned(), file);
        state.changes.push(Change::Create { file, name: name.to_owned(), len, unit });
        File { directory: self.clone(), number: file }
    }

    /// Renames a file.
    ///
    /// # Errors
    /// If there is none of the old name.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.state();
        let names = Arc::make_mut(&mut state.names);
        let file = names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        names.insert(to.to_owned(), file);
        state.changes.push(Change::Rename { from: from.to_owned(), to: to.to_owned() });
        Ok(())
    }

    /// Removes a name, if it exists.
    pub fn remove(&self, name: &str) {
        let mut state = self.state();
        if Arc::make_mut(&mut state.names).remove(name).is_some() {
            state.changes.push(Change::Remove { name: name.to_owned() });
        }
    }

    /// Makes the names durable.
    pub fn sync_names(&self) {
        self.state().changes.push(Change::SyncNames);
    }

    /// Simulates rot: flips the bits of `bits` in each byte of a range of a file. This is not an
    /// operation, and the result is durable. Returns whether the range exists.
    pub fn rot(&self, name: &str, offset: u64, len: usize, bits: u8) -> bool {
        let mut state = self.state();
        let Some(file) = state.names.get(name).copied() else { return false };
        let start = offset as usize;
        let file = Arc::make_mut(&mut state.files[file]);
        let bytes = start.checked_add(len).and_then(|end| file.get_mut(start..end));
        bytes.into_iter().flatten().map(|byte| *byte ^= bits).count() > 0
    }

    /// Calls `look` with the name and the bytes of each file that has a name, in order of names.
    pub fn each_file(&self, mut look: impl FnMut(&str, &[u8])) {
        let state = self.state();
        state.names.iter().for_each(|(name, file)| look(name, &state.files[*file]));
    }

    /// The names of all files.
    pub fn names(&self) -> Vec<String> {
        self.state().names.keys().cloned().collect()
    }
}

impl File {
    /// A range of bytes.
    fn range(offset: u64, len: usize) -> io::Result<Range<usize>> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        Ok(start..start.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?)
    }

    /// Changes the bytes of a range.
    fn change(
        &self,
        offset: u64,
        len: usize,
        f: impl FnOnce(&mut [u8]) -> Change,
    ) -> io::Result<()> {
        let mut state = self.directory.state();
        let range = File::range(offset, len)?;
        let file = &mut state.files[self.number];
        // Before the file is copied, if an image shares it.
        file.get(range.clone()).ok_or(io::ErrorKind::UnexpectedEof)?;
        let change = f(&mut Arc::make_mut(file)[range]);
        state.writes[self.number] += 1;
        state.changes.push(change);
        Ok(())
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "no test needs it")]
    pub fn len(&self) -> u64 {
        self.directory.state().files[self.number].len() as u64
    }

    /// Reads.
    ///
    /// # Errors
    /// If the file ends before.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let state = self.directory.state();
        let bytes = state.files[self.number].get(File::range(offset, into.len())?);
        into.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    /// Writes.
    ///
    /// # Errors
    /// If the file ends before.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.change(offset, from.len(), |bytes| {
            bytes.copy_from_slice(from);
            Change::Write { file: self.number, offset, bytes: from.to_vec() }
        })
    }

    /// The number of writes so far.
    pub fn writes(&self) -> u64 {
        self.directory.state().writes[self.number]
    }

    /// Sets a range to zero.
    ///
    /// # Errors
    /// If the file ends before.
    pub fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.change(offset, len as usize, |bytes| {
            bytes.fill(0);
            Change::Punch { file: self.number, offset, len }
        })
    }

    /// Makes all writes durable.
    pub fn sync(&self) {
        self.directory.record(Change::Sync { file: self.number });
    }

    /// Makes the writes to a range durable, as a write with `RWF_DSYNC` does with its own range.
    pub fn sync_range(&self, offset: u64, len: u64) {
        self.directory.record(Change::SyncRange { file: self.number, offset, len });
    }

    /// Makes the first `writes` writes of the file durable: later writes came too late for a sync
    /// that had begun.
    pub fn sync_through(&self, writes: u64) {
        self.directory.record(Change::SyncThrough { file: self.number, writes });
    }
}

/// The units of a file: the durable contents, and every content since.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct FilePages {
    unit: usize,
    bytes: FileBytes,
    /// The visible contents.
    now: FileBytes,
    /// The number of writes.
    writes: u64,
    /// For each unit, the contents since the last sync, oldest first, each with the number of its
    /// write.
    pending: BTreeMap<usize, Vec<(u64, Vec<u8>)>>,
}

impl FilePages {
    fn durable(bytes: FileBytes, unit: usize) -> FilePages {
        FilePages { unit, now: Arc::clone(&bytes), bytes, writes: 0, pending: BTreeMap::new() }
    }

    /// Changes the bytes of a range by `fill`.
    fn write(&mut self, offset: u64, len: usize, fill: impl FnOnce(&mut [u8])) {
        let start = offset as usize;
        self.writes += 1;
        fill(&mut Arc::make_mut(&mut self.now)[start..start + len]);
        for number in start / self.unit..(start + len).div_ceil(self.unit) {
            let range = number * self.unit..((number + 1) * self.unit).min(self.now.len());
            let now = &self.now[range.clone()];
            let last = self.pending.get(&number).and_then(|versions| versions.last());
            let last = last.map_or(&self.bytes[range], |(_, bytes)| bytes);
            if last != now {
                self.pending.entry(number).or_default().push((self.writes, now.to_vec()));
            }
        }
    }

    fn sync(&mut self) {
        self.bytes = Arc::clone(&self.now);
        self.pending.clear();
    }

    /// Makes the contents of some units durable as they were after `writes` writes.
    fn sync_units(&mut self, units: Range<usize>, writes: u64) {
        for (number, versions) in self.pending.range_mut(units) {
            let old = versions.partition_point(|(write, _)| *write <= writes);
            if let Some((_, last)) = versions.drain(..old).next_back() {
                let durable = Arc::make_mut(&mut self.bytes);
                durable[number * self.unit..][..last.len()].copy_from_slice(&last);
            }
        }
        self.pending.retain(|_, versions| !versions.is_empty());
    }
}

/// The disk below a directory: what is durable, and what may be.
#[derive(Clone, Debug)]
pub struct Medium {
    names: Names,
    pending_names: Vec<Names>,
    files: Vec<FilePages>,
    boot: u64,
    ids: u64,
}

impl Medium {
    /// An empty directory.
    pub fn new() -> Medium {
        SimulatedDirectory::default().medium()
    }

    /// The visible names.
    fn names_now(&self) -> Names {
        Arc::clone(self.pending_names.last().unwrap_or(&self.names))
    }

    /// Changes the visible names.
    fn change_names(&mut self, change: impl FnOnce(&mut BTreeMap<String, usize>)) {
        let mut names = self.names_now();
        change(Arc::make_mut(&mut names));
        self.pending_names.push(names);
    }

    /// Applies one operation.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Create { file, name, len, unit } => {
                assert_eq!(*file, self.files.len(), "files are counted by creation");
                let bytes = Arc::new(vec![0; *len as usize]);
                self.files.push(FilePages::durable(bytes, *unit));
                self.change_names(|names| _ = names.insert(name.clone(), *file));
            }
            Change::Write { file, offset, bytes } => {
                self.files[*file].write(*offset, bytes.len(), |into| into.copy_from_slice(bytes));
            }
            Change::Punch { file, offset, len } => {
                self.files[*file].write(*offset, *len as usize, |into| into.fill(0));
            }
            Change::Sync { file } => self.files[*file].sync(),
            Change::SyncRange { file, offset, len } => {
                let file = &mut self.files[*file];
                let (from, end) = (*offset as usize, (offset + len) as usize);
                let units = from / file.unit..end.div_ceil(file.unit);
                file.sync_units(units, file.writes);
            }
            Change::SyncThrough { file, writes } => {
                self.files[*file].sync_units(0..usize::MAX, *writes);
            }
            Change::Rename { from, to } => self.change_names(|names| {
                let file = names.remove(from).expect("what was renamed was there");
                names.insert(to.clone(), file);
            }),
            Change::Remove { name } => self.change_names(|names| _ = names.remove(name)),
            Change::SyncNames => {
                self.names = self.names_now();
                self.pending_names.clear();
            }
        }
    }

    /// The number of choices of a power cut now: one for the names, then one for each unit with
    /// contents that are not durable. 0 always means the durable version, the last choice the
    /// visible one.
    pub fn choices(&self) -> Vec<usize> {
        let sectors = self.files.iter().flat_map(|file| file.pending.values());
        let sectors = sectors.map(|versions| versions.len() + 1);
        std::iter::once(self.pending_names.len() + 1).chain(sectors).collect()
    }

    /// Cuts the power, and returns what is left. `choose` is called for each of `choices`.
    pub fn cut(&self, mut choose: impl FnMut(usize, usize) -> usize) -> SimulatedDirectory {
        let mut asked = 0;
        let mut next = |count: usize| {
            asked += 1;
            choose(asked - 1, count)
        };
        let names = match next(self.pending_names.len() + 1) {
            0 => Arc::clone(&self.names),
            kept => Arc::clone(&self.pending_names[kept - 1]),
        };
        let mut files: Vec<_> = self.files.iter().map(|file| Arc::clone(&file.bytes)).collect();
        for (bytes, file) in files.iter_mut().zip(&self.files) {
            for (number, versions) in &file.pending {
                let kept = next(versions.len() + 1);
                if kept > 0 {
                    let (_, version) = &versions[kept - 1];
                    let bytes = Arc::make_mut(bytes);
                    bytes[number * file.unit..][..version.len()].copy_from_slice(version);
                }
            }
        }
        self.directory(names, files, self.boot + 1)
    }

    /// Kills the process: everything that it did is kept.
    pub fn kill(&self) -> SimulatedDirectory {
        let files = self.files.iter().map(|file| Arc::clone(&file.now)).collect();
        self.directory(self.names_now(), files, self.boot)
    }

    fn directory(&self, names: Names, files: Vec<FileBytes>, boot: u64) -> SimulatedDirectory {
        let units = self.files.iter().map(|file| file.unit).collect();
        let writes = self.files.iter().map(|file| file.writes).collect();
        // The next process gets other numbers.
        let ids = self.ids + 1_000_000;
        let state = State { names, files, units, writes, boot, ids, ..State::default() };
        SimulatedDirectory(Arc::new(Mutex::new(state)))
    }
}

impl Default for Medium {
    fn default() -> Medium {
        Medium::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn medium(directory: &SimulatedDirectory) -> Medium {
        let mut medium = Medium::new();
        directory.changes().iter().for_each(|change| medium.apply(change));
        medium
    }

    fn content(directory: &SimulatedDirectory, name: &str) -> Option<Vec<u8>> {
        let file = directory.open(name)?;
        let mut bytes = vec![0; file.len() as usize];
        file.read_at(0, &mut bytes).unwrap();
        Some(bytes)
    }

    #[test]
    fn a_cut_keeps_what_was_synced_and_any_part_of_the_rest() {
        let directory = SimulatedDirectory::default();
        let file = directory.create("a", 1024, SECTOR);
        directory.sync_names();
        file.write_at(0, &[1; 1024]).unwrap();
        file.sync();
        file.write_at(256, &[2; 512]).unwrap();
        file.write_at(0, &[3; 4]).unwrap();
        let medium = medium(&directory);
        assert_eq!(medium.choices(), [1, 3, 2]);
        let mut found = std::collections::BTreeSet::new();
        for choice in 0..6 {
            let kept = [0, choice % 3, choice / 3];
            let after = medium.cut(|at, count| kept[at].min(count - 1));
            assert_eq!(after.boot(), 1);
            found.insert(content(&after, "a").unwrap());
        }
        assert_eq!(found.len(), 6);
        assert!(found.contains(&vec![1; 1024]));
        assert_eq!(content(&medium.kill(), "a"), content(&directory, "a"));
    }

    #[test]
    fn a_file_without_a_durable_name_is_gone() {
        let directory = SimulatedDirectory::default();
        directory.create("new", 512, SECTOR).sync();
        directory.rename("new", "old").unwrap();
        let medium = medium(&directory);
        let names: Vec<_> = (0..3).map(|kept| medium.cut(|_, _| kept).names()).collect();
        assert_eq!(names, [vec![], vec!["new".to_owned()], vec!["old".to_owned()]]);
        directory.sync_names();
        let medium = self::medium(&directory);
        assert_eq!(medium.choices(), [1]);
        assert_eq!(medium.cut(|_, _| 0).names(), ["old"]);
    }

    #[test]
    fn a_sync_of_a_part_leaves_the_rest() {
        let directory = SimulatedDirectory::default();
        let file = directory.create("a", 2048, SECTOR);
        directory.sync_names();
        file.write_at(0, &[1; 1024]).unwrap();
        let writes = file.writes();
        file.write_at(512, &[2; 1024]).unwrap();
        file.sync_range(1024, 512);
        let durable =
            |directory: &SimulatedDirectory| content(&medium(directory).cut(|_, _| 0), "a");
        let parts = |sectors: [u8; 4]| Some(sectors.map(|sector| [sector; 512]).concat());
        assert_eq!(durable(&directory), parts([0, 0, 2, 0]));
        file.sync_through(writes);
        assert_eq!(durable(&directory), parts([1, 1, 2, 0]));
        assert_eq!(medium(&directory).choices(), [1, 2], "what came later may be there");
        file.sync();
        assert_eq!(durable(&directory), parts([1, 2, 2, 0]));
    }

    #[test]
    fn rot_changes_what_a_crash_has_left_and_is_no_operation() {
        let directory = SimulatedDirectory::default();
        let file = directory.create("a", 1024, SECTOR);
        directory.sync_names();
        file.write_at(0, &[1; 1024]).unwrap();
        let (after, count) = (medium(&directory).kill(), directory.change_count());
        assert!(after.rot("a", 700, 2, 4));
        let found = content(&after, "a").unwrap();
        assert_eq!(found, [&[1; 700][..], &[5; 2], &[1; 322]].concat());
        assert_eq!(content(&after.medium().cut(|_, _| 0), "a"), Some(found), "it is durable");
        assert_eq!((after.change_count(), directory.change_count()), (0, count));
        assert!(!after.rot("a", 1023, 2, 1) && !after.rot("b", 0, 1, 1));
    }
}

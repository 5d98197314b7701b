//! A disk in memory that keeps apart what is durable and what is not: the files and folders of a
//! file system, what of them would be there after a power cut, and the cut.
//!
//! Nothing is durable but what POSIX promises. Bytes, and how long a file is, become so by a sync
//! of the file, or by a write through a descriptor that is open for synchronous writes; names by a
//! sync of their folder. A cut keeps any sectors of what was written and not synced, as if the
//! disk had written them in any order, and the changes of names up to some moment, as a file system
//! with a journal does.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};

use fastrand::Rng;
use fuser::Errno;

/// What a disk writes as a whole.
pub(crate) const SECTOR: usize = 512;

/// The folder that everything is in.
pub(crate) const ROOT: u64 = 1;

/// What goes wrong, from when it is asked for; but for the power, only with files that something
/// depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The power is cut at the write or sync that comes behind so many.
    Cut(u64),
    /// The sync behind so many fails, and drops what it should have made durable, though it can
    /// still be read, and later syncs succeed: what Linux did to PostgreSQL.
    Sync(u64),
    /// The write behind so many fails, and nothing of it is there.
    Write(u64),
    /// Reads fail.
    Read,
    /// No file grows.
    Full,
}

/// What becomes of a write or a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Goes,
    Fails,
    Cut,
}

/// What was asked of the disk, but for files that nothing depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) writes: u64,
    /// Writes that were to be durable when they were answered.
    pub(crate) durable_writes: u64,
    pub(crate) syncs: u64,
    pub(crate) folder_syncs: u64,
    /// Writes and syncs that have failed.
    pub(crate) failed: u64,
    /// Writes and syncs that came behind the first that failed.
    pub(crate) after_failed: u64,
}

#[derive(Clone, Debug, Default)]
struct File {
    bytes: Vec<u8>,
    /// What is durable of the sectors that were written since.
    old: BTreeMap<u64, Box<[u8; SECTOR]>>,
    /// The same of sectors whose sync has failed: no sync makes them durable any more.
    lost: BTreeMap<u64, Box<[u8; SECTOR]>>,
    /// Its durable length.
    len: u64,
    /// Its length is what it was when the sync failed, until it changes again.
    is_len_lost: bool,
}

#[derive(Clone, Debug)]
enum Change {
    Put { folder: u64, name: OsString, node: u64 },
    Remove { folder: u64, name: OsString },
    Rename { from: (u64, OsString), to: (u64, OsString) },
}

/// The names of each folder.
type Names = HashMap<u64, BTreeMap<OsString, u64>>;

impl Change {
    fn is_of(&self, wanted: u64) -> bool {
        match self {
            Change::Put { folder, .. } | Change::Remove { folder, .. } => *folder == wanted,
            Change::Rename { from, to } => from.0 == wanted || to.0 == wanted,
        }
    }

    fn apply(&self, names: &mut Names) {
        match self {
            Change::Put { folder, name, node } => {
                names.entry(*folder).or_default().insert(name.clone(), *node);
            }
            Change::Remove { folder, name } => {
                names.entry(*folder).or_default().remove(name);
            }
            Change::Rename { from, to } => {
                if let Some(node) = names.entry(from.0).or_default().remove(&from.1) {
                    names.entry(to.0).or_default().insert(to.1.clone(), node);
                }
            }
        }
    }
}

/// What is known of a file or a folder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    pub(crate) node: u64,
    pub(crate) is_folder: bool,
    pub(crate) len: u64,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    names: Names,
    durable: Names,
    /// What the names have and the durable ones do not.
    changes: Vec<Change>,
    files: HashMap<u64, File>,
    next: u64,
    random: Rng,
    is_off: bool,
    /// It passes over what a write says of being durable, and keeps to syncs.
    is_deaf: bool,
    fault: Option<Fault>,
    /// Writes and syncs since the fault was asked for.
    turns: u64,
    counts: Counts,
}

type Result<T> = std::result::Result<T, Errno>;

impl Disk {
    /// An empty one.
    pub(crate) fn new(seed: u64) -> Disk {
        let root: Names = HashMap::from([(ROOT, BTreeMap::new())]);
        Disk {
            names: root.clone(),
            durable: root,
            changes: Vec::new(),
            files: HashMap::new(),
            next: ROOT + 1,
            random: Rng::with_seed(seed),
            is_off: false,
            is_deaf: false,
            fault: None,
            turns: 0,
            counts: Counts::default(),
        }
    }

    /// Lets something go wrong, or nothing any more; counts from nought.
    pub(crate) fn fail(&mut self, fault: Option<Fault>) {
        self.fault = fault;
        self.turns = 0;
        self.counts = Counts::default();
    }

    /// From now on nothing is durable but by a sync: many programs that serve a file system pass
    /// writes on without their flags.
    pub(crate) fn deafen(&mut self) {
        self.is_deaf = true;
    }

    /// What was asked of it since.
    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether the power is off.
    pub(crate) fn is_off(&self) -> bool {
        self.is_off
    }

    /// Bytes that a cut might lose, but for files that nothing depends on.
    pub(crate) fn unsynced_bytes(&self) -> usize {
        let files = self.files.iter().filter(|(node, _)| !self.is_aside(**node));
        files.map(|(_, file)| file.old.len() * SECTOR).sum()
    }

    /// Whether every file has the bytes that it has there, but for those of one name.
    pub(crate) fn is_like(&self, other: &Disk, but: &str) -> bool {
        let names = self.names.values().flatten().filter(|(name, _)| *name != but);
        let is_same = |node| {
            let bytes = |disk: &Disk| disk.files.get(node).map(|file| file.bytes.clone());
            bytes(self) == bytes(other)
        };
        self.names == other.names && names.map(|(_, node)| node).all(is_same)
    }

    /// Cuts the power: only what is durable is left, and of the rest what the disk happened to
    /// write. Until it is switched on again everything fails.
    pub(crate) fn cut(&mut self) {
        self.is_off = true;
        let kept = self.random.usize(..=self.changes.len());
        for change in &self.changes[..kept] {
            change.apply(&mut self.durable);
        }
        self.changes.clear();
        self.names = self.durable.clone();
        let here: HashSet<u64> = self.names.values().flat_map(BTreeMap::values).copied().collect();
        self.files.retain(|node, _| here.contains(node));
        self.names.retain(|node, _| *node == ROOT || here.contains(node));
        self.durable = self.names.clone();
        let mut nodes: Vec<u64> = self.files.keys().copied().collect();
        nodes.sort_unstable();
        for node in nodes {
            // Nothing, nearly nothing, half, nearly all.
            let chance = [0.0, 0.0, 0.05, 0.5, 0.95][self.random.usize(..5)];
            let (file, random) = (self.files.get_mut(&node), &mut self.random);
            file.expect("it is one of them").cut(|| random.f64() < chance);
        }
    }

    /// Switches the power on again.
    pub(crate) fn switch_on(&mut self) {
        self.is_off = false;
        self.fail(None);
    }

    fn is_on(&self) -> Result<()> {
        if self.is_off { Err(Errno::EIO) } else { Ok(()) }
    }

    /// Whether nothing depends on a file: it is being made, which a pool does ahead at any moment,
    /// or it is there to be locked.
    fn is_aside(&self, node: u64) -> bool {
        let mut names = self.names.values().flatten().filter(|(_, of)| **of == node);
        names.any(|(name, _)| name == "lock" || name.as_encoded_bytes().ends_with(b".new"))
    }

    /// Counts a write (`false`) or a sync, and says what becomes of it.
    fn turn(&mut self, node: u64, is_sync: bool) -> Result<Turn> {
        self.is_on()?;
        let is_cut = matches!(self.fault, Some(Fault::Cut(before)) if self.turns >= before);
        self.turns += 1;
        if is_cut {
            return Ok(Turn::Cut);
        }
        if self.is_aside(node) {
            return Ok(Turn::Goes);
        }
        let counts = &mut self.counts;
        counts.after_failed += u64::from(counts.failed > 0);
        let count = if is_sync { &mut counts.syncs } else { &mut counts.writes };
        *count += 1;
        let before = *count - 1;
        let fails = match self.fault {
            Some(Fault::Sync(at)) => is_sync && before == at,
            Some(Fault::Write(at)) => !is_sync && before == at,
            _ => false,
        };
        counts.failed += u64::from(fails);
        Ok(if fails { Turn::Fails } else { Turn::Goes })
    }

    fn folder(&self, node: u64) -> Result<&BTreeMap<OsString, u64>> {
        self.is_on()?;
        self.names.get(&node).ok_or(Errno::ENOENT)
    }

    /// What is known of a node.
    pub(crate) fn look(&self, node: u64) -> Result<Look> {
        self.is_on()?;
        match self.files.get(&node) {
            Some(file) => Ok(Look { node, is_folder: false, len: file.bytes.len() as u64 }),
            None => self.folder(node).map(|_| Look { node, is_folder: true, len: 0 }),
        }
    }

    /// The node of a name.
    pub(crate) fn find(&self, folder: u64, name: &OsStr) -> Result<Look> {
        self.look(*self.folder(folder)?.get(name).ok_or(Errno::ENOENT)?)
    }

    /// The names in a folder.
    pub(crate) fn list(&self, folder: u64) -> Result<Vec<(OsString, Look)>> {
        let names = self.folder(folder)?.iter();
        names.map(|(name, node)| Ok((name.clone(), self.look(*node)?))).collect()
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.names);
        self.changes.push(change);
    }

    /// Makes a file or a folder.
    pub(crate) fn make(&mut self, folder: u64, name: &OsStr, is_folder: bool) -> Result<Look> {
        if self.folder(folder)?.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        let node = self.next;
        self.next += 1;
        if is_folder {
            self.names.insert(node, BTreeMap::new());
            self.durable.insert(node, BTreeMap::new());
        } else {
            self.files.insert(node, File::default());
        }
        self.change(Change::Put { folder, name: name.to_owned(), node });
        self.look(node)
    }

    /// Removes a file, or a folder that is empty. Who has it open keeps it, until the power is cut.
    pub(crate) fn remove(&mut self, folder: u64, name: &OsStr) -> Result<()> {
        let node = self.find(folder, name)?.node;
        if self.names.get(&node).is_some_and(|names| !names.is_empty()) {
            return Err(Errno::ENOTEMPTY);
        }
        self.change(Change::Remove { folder, name: name.to_owned() });
        Ok(())
    }

    /// Renames, over what is there.
    pub(crate) fn rename(&mut self, from: (u64, &OsStr), to: (u64, &OsStr)) -> Result<()> {
        self.find(from.0, from.1)?;
        self.folder(to.0)?;
        let [from, to] = [from, to].map(|(folder, name)| (folder, name.to_owned()));
        self.change(Change::Rename { from, to });
        Ok(())
    }

    /// Makes the names of a folder durable.
    pub(crate) fn sync_folder(&mut self, folder: u64) -> Result<()> {
        self.folder(folder)?;
        self.counts.folder_syncs += 1;
        let (of, others) =
            std::mem::take(&mut self.changes).into_iter().partition(|it| it.is_of(folder));
        self.changes = others;
        let of: Vec<Change> = of;
        of.iter().for_each(|change| change.apply(&mut self.durable));
        Ok(())
    }

    fn file(&mut self, node: u64) -> Result<&mut File> {
        self.is_on()?;
        self.files.get_mut(&node).ok_or(Errno::EBADF)
    }

    /// Reads; what lies behind the end is not there.
    pub(crate) fn read(&mut self, node: u64, offset: u64, len: usize) -> Result<&[u8]> {
        if self.fault == Some(Fault::Read) {
            return Err(Errno::EIO);
        }
        let file = self.file(node)?;
        let from = file.bytes.len().min(offset as usize);
        Ok(&file.bytes[from..file.bytes.len().min(from + len)])
    }

    /// Writes, and makes just that durable if it is asked for.
    pub(crate) fn write(
        &mut self,
        node: u64,
        offset: u64,
        bytes: &[u8],
        durable: bool,
    ) -> Result<()> {
        self.may_grow(node, offset + bytes.len() as u64)?;
        let turn = self.turn(node, false)?;
        if turn == Turn::Fails {
            return Err(Errno::EIO);
        }
        let file = self.file(node)?;
        file.resize(file.bytes.len().max(offset as usize + bytes.len()));
        file.write(offset as usize, bytes);
        if turn == Turn::Cut {
            // Some of its sectors may just have reached the disk.
            self.cut();
            return Err(Errno::EIO);
        }
        if durable && !self.is_deaf {
            let file = self.file(node)?;
            file.settle(sectors_of(offset as usize, bytes.len()));
            self.counts.durable_writes += 1;
        }
        Ok(())
    }

    /// Makes all of a file durable.
    pub(crate) fn sync(&mut self, node: u64) -> Result<()> {
        self.file(node)?;
        match self.turn(node, true)? {
            Turn::Goes => {
                let file = self.file(node)?;
                file.old.clear();
                file.settle(0..0);
                Ok(())
            }
            Turn::Fails => {
                let file = self.file(node)?;
                for (sector, bytes) in std::mem::take(&mut file.old) {
                    file.lost.entry(sector).or_insert(bytes);
                }
                file.is_len_lost = file.len != file.bytes.len() as u64;
                Err(Errno::EIO)
            }
            Turn::Cut => {
                self.cut();
                Err(Errno::EIO)
            }
        }
    }

    /// Gives a file another length.
    pub(crate) fn resize(&mut self, node: u64, len: u64) -> Result<()> {
        self.may_grow(node, len)?;
        self.file(node)?.resize(len as usize);
        Ok(())
    }

    /// Fills a range with zeros, inside the file's length.
    pub(crate) fn zero(&mut self, node: u64, offset: u64, len: u64) -> Result<()> {
        let has = self.file(node)?.bytes.len() as u64;
        let len = len.min(has.saturating_sub(offset));
        self.write(node, offset, &vec![0; len as usize], false)
    }

    fn may_grow(&mut self, node: u64, end: u64) -> Result<()> {
        let is_full = self.fault == Some(Fault::Full);
        let has = self.file(node)?.bytes.len() as u64;
        if is_full && end > has { Err(Errno::ENOSPC) } else { Ok(()) }
    }
}

fn sectors_of(offset: usize, len: usize) -> std::ops::Range<u64> {
    (offset / SECTOR) as u64..(offset + len).div_ceil(SECTOR) as u64
}

impl File {
    /// Notes that a sector is about to change.
    fn touch(&mut self, sector: u64) {
        let before = self.lost.remove(&sector).unwrap_or_else(|| {
            let at = sector as usize * SECTOR;
            let mut bytes = Box::new([0; SECTOR]);
            let has = &self.bytes[at.min(self.bytes.len())..self.bytes.len().min(at + SECTOR)];
            bytes[..has.len()].copy_from_slice(has);
            bytes
        });
        self.old.entry(sector).or_insert(before);
    }

    /// Writes inside its length.
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        for sector in sectors_of(offset, bytes.len()) {
            let at = sector as usize * SECTOR;
            let (from, to) = (at.max(offset), (at + SECTOR).min(offset + bytes.len()));
            let new = &bytes[from - offset..to - offset];
            // What does not change needs no memory; most of it is zeros of a new file.
            if self.bytes[from..to] != *new || self.lost.contains_key(&sector) {
                self.touch(sector);
                self.bytes[from..to].copy_from_slice(new);
            }
        }
    }

    fn resize(&mut self, len: usize) {
        if len == self.bytes.len() {
            return;
        }
        if len < self.bytes.len() {
            sectors_of(len, self.bytes.len() - len).for_each(|sector| self.touch(sector));
        }
        self.bytes.resize(len, 0);
        self.is_len_lost = false;
    }

    /// These sectors and the length are durable.
    fn settle(&mut self, sectors: std::ops::Range<u64>) {
        for sector in sectors {
            self.old.remove(&sector);
            self.lost.remove(&sector);
        }
        if !self.is_len_lost {
            self.len = self.bytes.len() as u64;
        }
    }

    /// The power is cut; `keeps` says whether the disk happened to write a sector.
    fn cut(&mut self, mut keeps: impl FnMut() -> bool) {
        if self.is_len_lost || !keeps() {
            self.bytes.resize(self.len as usize, 0);
        }
        let old: Vec<_> = std::mem::take(&mut self.old).into_iter().filter(|_| !keeps()).collect();
        // What a failed sync has dropped is older.
        for (sector, bytes) in old.into_iter().chain(std::mem::take(&mut self.lost)) {
            let at = sector as usize * SECTOR;
            let len = SECTOR.min(self.bytes.len().saturating_sub(at));
            if len > 0 {
                self.bytes[at..at + len].copy_from_slice(&bytes[..len]);
            }
        }
        self.len = self.bytes.len() as u64;
        self.is_len_lost = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(disk: &mut Disk, name: &str) -> u64 {
        disk.make(ROOT, OsStr::new(name), false).unwrap().node
    }

    fn restart(disk: &mut Disk) {
        disk.cut();
        assert!(disk.find(ROOT, OsStr::new("a")).is_err(), "the power is off");
        disk.switch_on();
    }

    /// What is in a file after a cut, by its first byte of each sector; `None` if it is gone.
    fn found(disk: &mut Disk, name: &str) -> Option<Vec<u8>> {
        let look = disk.find(ROOT, OsStr::new(name)).ok()?;
        let bytes = disk.read(look.node, 0, look.len as usize).unwrap();
        Some(bytes.chunks(SECTOR).map(|sector| sector[0]).collect())
    }

    #[test]
    fn what_is_synced_outlives_a_cut_and_of_the_rest_anything() {
        let (mut gone, mut torn, mut unnamed) = (0, 0, 0);
        for seed in 0..200 {
            let mut disk = Disk::new(seed);
            let a = file(&mut disk, "a");
            disk.write(a, 0, &[1; 4 * SECTOR], false).unwrap();
            disk.sync(a).unwrap();
            disk.sync_folder(ROOT).unwrap();
            disk.write(a, 0, &[2; SECTOR], true).unwrap();
            disk.write(a, SECTOR as u64, &[3; 2 * SECTOR], false).unwrap();
            let b = file(&mut disk, "b");
            disk.write(b, 0, &[4; SECTOR], true).unwrap();
            disk.rename((ROOT, OsStr::new("b")), (ROOT, OsStr::new("c"))).unwrap();
            restart(&mut disk);
            let a = found(&mut disk, "a").unwrap();
            assert!(a.len() == 4 && a[0] == 2 && a[3] == 1, "{a:?}");
            assert!(a[1..3].iter().all(|byte| [1, 3].contains(byte)), "{a:?}");
            gone += u32::from(a[1..3] == [1, 1]);
            torn += u32::from(a[1] != a[2]);
            // Under one name or under none, and then whole.
            let names = ["b", "c"].map(|name| found(&mut disk, name));
            let here: Vec<_> = names.into_iter().flatten().collect();
            assert!(here.is_empty() || here == [[4]], "{here:?}");
            unnamed += u32::from(here.is_empty());
        }
        assert!(gone > 50 && torn > 10 && unnamed > 30, "{gone} {torn} {unnamed}");
    }

    #[test]
    fn a_sync_that_fails_drops_what_later_syncs_do_not_bring_back() {
        let mut disk = Disk::new(1);
        let a = file(&mut disk, "a");
        disk.write(a, 0, &[1; 2 * SECTOR], false).unwrap();
        disk.sync(a).unwrap();
        disk.sync_folder(ROOT).unwrap();
        disk.write(a, 0, &[2; 2 * SECTOR], false).unwrap();
        disk.fail(Some(Fault::Sync(0)));
        assert!(disk.sync(a).is_err());
        assert_eq!(disk.read(a, 0, 1).unwrap(), [2], "it still can be read");
        // Written again, it is like any other.
        disk.write(a, SECTOR as u64, &[2; SECTOR], false).unwrap();
        disk.sync(a).unwrap();
        let counts = disk.counts();
        assert_eq!((counts.syncs, counts.failed, counts.after_failed), (2, 1, 2));
        restart(&mut disk);
        assert_eq!(found(&mut disk, "a").unwrap(), [1, 2]);
    }

    #[test]
    fn a_shorter_file_is_as_long_as_before_until_it_is_synced() {
        let mut lengths = HashSet::new();
        for seed in 0..50 {
            let mut disk = Disk::new(seed);
            let a = file(&mut disk, "a");
            disk.write(a, 0, &[1; 3 * SECTOR], true).unwrap();
            disk.sync_folder(ROOT).unwrap();
            disk.resize(a, SECTOR as u64).unwrap();
            restart(&mut disk);
            let a = found(&mut disk, "a").unwrap();
            assert!(a.len() == 1 || a.len() == 3, "{a:?}");
            lengths.insert(a.len());
        }
        assert_eq!(lengths.len(), 2);
    }

    #[test]
    fn the_power_is_cut_at_the_operation_that_is_named() {
        let mut disk = Disk::new(3);
        let a = file(&mut disk, "a");
        disk.fail(Some(Fault::Cut(2)));
        disk.write(a, 0, &[1; SECTOR], false).unwrap();
        disk.sync(a).unwrap();
        assert!(!disk.is_off());
        assert!(disk.write(a, 0, &[2; SECTOR], false).is_err());
        assert!(disk.is_off());
    }
}

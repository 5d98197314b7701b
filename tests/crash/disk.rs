//! A file system in memory that distinguishes durable from volatile state: files, folders, and the
//! power cuts that they survive.
//!
//! Only what POSIX promises is durable. Bytes and the length of a file become durable by a sync of
//! the file, or by a write through a descriptor that is open for synchronous writes. Names become
//! durable by a sync of their folder. A cut leaves, independently of each other:
//!
//! - of each sector any version that it had since its last sync, the durable one included;
//! - of each file any length that it had since its last sync;
//! - of the names those of some moment since the last sync, as a file system with a journal does,
//!   or for each name another moment. A rename is atomic.
//!
//! A file whose name is not durable may exist or not after a cut, with contents and a length by the
//! same rules.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};

use fastrand::Rng;
use fuser::Errno;

/// The unit that a disk writes atomically.
pub(crate) const SECTOR: usize = 512;

/// The root folder.
pub(crate) const ROOT: u64 = 1;

/// A fault to inject. Except for the power cut, faults affect only files that the pool depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The power is cut at the change or sync that comes after this many.
    Cut(u64),
    /// The sync after this many fails, and drops the data that it should have made durable. They
    /// can still be read, and later syncs succeed: this is what Linux did to PostgreSQL.
    Sync(u64),
    /// The sync of a folder after this many fails. Its names stay volatile.
    FolderSync(u64),
    /// The write after this many fails, and writes no byte.
    Write(u64),
    /// Reads fail.
    Read,
    /// No file grows.
    Full,
}

/// The result of a write or a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Executes,
    Fails,
    Cut,
}

/// Counts of requests to the disk, except for files that the pool does not depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) writes: u64,
    /// Synchronous writes.
    pub(crate) durable_writes: u64,
    pub(crate) syncs: u64,
    pub(crate) folder_syncs: u64,
    /// Writes and syncs that failed.
    pub(crate) failed: u64,
    /// Writes and syncs after the first that failed.
    pub(crate) after_failed: u64,
}

type Sector = Box<[u8; SECTOR]>;

#[derive(Clone, Debug, Default)]
struct File {
    bytes: Vec<u8>,
    /// Every version that a sector had since its last sync, except the one in `bytes`. The first
    /// one is durable.
    old: BTreeMap<u64, Vec<Sector>>,
    /// The durable version of sectors whose sync failed: later syncs do not write them until they
    /// change again.
    lost: BTreeMap<u64, Sector>,
    /// Every length since the last sync, except that of `bytes`. The first one is durable.
    lens: Vec<u64>,
    /// The sync of the length failed: `lens` holds the durable one until the length changes again.
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

    /// The names that the change affects.
    fn keys(&self) -> Vec<(u64, OsString)> {
        match self {
            Change::Put { folder, name, .. } | Change::Remove { folder, name } => {
                vec![(*folder, name.clone())]
            }
            Change::Rename { from, to } => vec![from.clone(), to.clone()],
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

/// Numbers the chains of changes: changes of one chain depend on each other, because they change
/// the same names.
fn chains(changes: &[Change]) -> Vec<usize> {
    let mut chain_of: HashMap<(u64, OsString), usize> = HashMap::new();
    let mut chains = Vec::new();
    for (number, change) in changes.iter().enumerate() {
        let keys = change.keys();
        let chain = keys.iter().find_map(|key| chain_of.get(key).copied()).unwrap_or(number);
        for key in keys {
            // A rename joins two chains.
            if let Some(other) = chain_of.insert(key, chain).filter(|other| *other != chain) {
                chain_of.values_mut().chain(&mut chains).for_each(|it| {
                    if *it == other {
                        *it = chain;
                    }
                });
            }
        }
        chains.push(chain);
    }
    chains
}

/// The attributes of a file or a folder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    pub(crate) node: u64,
    pub(crate) is_folder: bool,
    pub(crate) len: u64,
}

/// A file system in memory whose power can be cut.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    names: Names,
    durable: Names,
    /// The changes to names that are not durable.
    changes: Vec<Change>,
    files: HashMap<u64, File>,
    next: u64,
    random: Rng,
    is_off: bool,
    /// Whether the disk ignores O_DSYNC, so that only syncs make data durable.
    is_deaf: bool,
    fault: Option<Fault>,
    /// The most bytes of all files together.
    space: u64,
    /// Changes and syncs since the fault was set.
    turns: u64,
    counts: Counts,
}

/// The size of a file system that is never full, in bytes.
const SPACE: u64 = 1 << 40;

type Result<T> = std::result::Result<T, Errno>;

impl Disk {
    /// An empty disk.
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
            space: SPACE,
            turns: 0,
            counts: Counts::default(),
        }
    }

    /// Sets or clears the fault, and resets the counts.
    pub(crate) fn fail(&mut self, fault: Option<Fault>) {
        self.fault = fault;
        self.turns = 0;
        self.counts = Counts::default();
    }

    /// From now on only a sync makes data durable: many programs that serve a file system pass
    /// writes on without their flags.
    pub(crate) fn deafen(&mut self) {
        self.is_deaf = true;
    }

    /// From now on all files together have at most this many bytes; more is `ENOSPC`.
    pub(crate) fn bound(&mut self, bytes: u64) {
        self.space = bytes;
    }

    /// The size of the file system and its free space, in bytes.
    pub(crate) fn space(&self) -> (u64, u64) {
        let mut used: HashMap<u64, u64> = HashMap::new();
        for node in self.names.values().flat_map(BTreeMap::values) {
            used.insert(*node, self.files.get(node).map_or(0, |file| file.bytes.len() as u64));
        }
        (self.space, self.space.saturating_sub(used.values().sum()))
    }

    /// The counts since the last call of `fail`.
    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether the power is off.
    pub(crate) fn is_off(&self) -> bool {
        self.is_off
    }

    /// Whether a cut might lose a sector with a part of `data`, whatever file it is in.
    pub(crate) fn has_unsynced(&self, data: &[u8]) -> bool {
        let is_part = |sector: &[u8]| blockyard_testing::position(data, sector).is_some();
        self.files.values().any(|file| {
            let mut offsets = file.old.keys().map(|sector| *sector as usize * SECTOR);
            offsets.any(|from| file.bytes.get(from..from + SECTOR).is_some_and(is_part))
        })
    }

    /// Whether every file except one name has the bytes that it has in `other`.
    pub(crate) fn is_like(&self, other: &Disk, but: &str) -> bool {
        let names = self.names.values().flatten().filter(|(name, _)| *name != but);
        let is_same = |node| {
            let bytes = |disk: &Disk| disk.files.get(node).map(|file| file.bytes.clone());
            bytes(self) == bytes(other)
        };
        self.names == other.names && names.map(|(_, node)| node).all(is_same)
    }

    /// Cuts the power: leaves the durable state, and some of the rest as the head of this file
    /// describes. Until the power is switched on again every operation fails.
    pub(crate) fn cut(&mut self) {
        self.is_off = true;
        self.cut_names();
        // The files below one name of the root folder may be a disk of their own: the chance is
        // common to all of them, or separate for each file.
        let mut tops: BTreeMap<u64, f64> = BTreeMap::new();
        for top in self.names[&ROOT].values() {
            tops.insert(*top, chance(&mut self.random));
        }
        let is_alike = self.random.bool();
        let mut nodes: Vec<u64> = self.files.keys().copied().collect();
        nodes.sort_unstable();
        for node in nodes {
            let chance = if is_alike { tops[&self.top(node)] } else { chance(&mut self.random) };
            let (file, random) = (self.files.get_mut(&node), &mut self.random);
            file.expect("it is one of them").cut(|versions| match () {
                () if chance == 0.0 => 0,
                () if random.f64() < chance => versions - 1,
                () => random.usize(..versions - 1),
            });
        }
    }

    /// Leaves the names that survive a cut; files and folders without a name are removed.
    fn cut_names(&mut self) {
        let changes = std::mem::take(&mut self.changes);
        let chains = if self.random.bool() { vec![0; changes.len()] } else { chains(&changes) };
        let mut kept: BTreeMap<usize, usize> = BTreeMap::new();
        for chain in &chains {
            *kept.entry(*chain).or_default() += 1;
        }
        for count in kept.values_mut() {
            *count = self.random.usize(..=*count);
        }
        for (change, chain) in changes.iter().zip(&chains) {
            let left = kept.get_mut(chain).expect("each has a count");
            if *left > 0 {
                *left -= 1;
                change.apply(&mut self.durable);
            }
        }
        let mut here = HashSet::from([ROOT]);
        let mut folders = vec![ROOT];
        while let Some(folder) = folders.pop() {
            for node in self.durable[&folder].values().filter(|node| here.insert(**node)) {
                folders.extend(self.durable.contains_key(node).then_some(*node));
            }
        }
        self.durable.retain(|node, _| here.contains(node));
        self.files.retain(|node, _| here.contains(node));
        self.names = self.durable.clone();
    }

    /// The ancestor of a node in the root folder, which may be the node itself.
    fn top(&self, mut node: u64) -> u64 {
        loop {
            let has = |(_, names): &(&u64, &BTreeMap<_, u64>)| names.values().any(|it| *it == node);
            match self.names.iter().find(has).map(|(folder, _)| *folder) {
                Some(ROOT) | None => return node,
                Some(folder) => node = folder,
            }
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

    /// Whether the pool does not depend on a file: a segment that is being made, or the lock file.
    fn is_aside(&self, node: u64) -> bool {
        let mut names = self.names.values().flatten().filter(|(_, of)| **of == node);
        names.any(|(name, _)| name == "lock" || name.as_encoded_bytes().ends_with(b".new"))
    }

    /// Counts a change or a sync, and returns whether the power is cut at it.
    fn is_cut_now(&mut self) -> Result<bool> {
        self.is_on()?;
        let is_cut = matches!(self.fault, Some(Fault::Cut(before)) if self.turns >= before);
        self.turns += 1;
        Ok(is_cut)
    }

    /// Cuts the power if `is_cut`: the present operation may survive or not.
    fn cut_if(&mut self, is_cut: bool) -> Result<()> {
        if is_cut {
            self.cut();
        }
        self.is_on()
    }

    /// Counts a write (`false`) or a sync of a file, and returns its result.
    fn turn(&mut self, node: u64, is_sync: bool) -> Result<Turn> {
        if self.is_cut_now()? {
            return Ok(Turn::Cut);
        }
        if self.is_aside(node) {
            return Ok(Turn::Executes);
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
        Ok(if fails { Turn::Fails } else { Turn::Executes })
    }

    fn folder(&self, node: u64) -> Result<&BTreeMap<OsString, u64>> {
        self.is_on()?;
        self.names.get(&node).ok_or(Errno::ENOENT)
    }

    /// The attributes of a node.
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

    fn change(&mut self, change: Change) -> Result<()> {
        let is_cut = self.is_cut_now()?;
        change.apply(&mut self.names);
        self.changes.push(change);
        self.cut_if(is_cut)
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
        self.change(Change::Put { folder, name: name.to_owned(), node })?;
        self.look(node)
    }

    /// Removes a file, or an empty folder. A program that has the file open keeps it until the
    /// power is cut.
    pub(crate) fn remove(&mut self, folder: u64, name: &OsStr) -> Result<()> {
        let node = self.find(folder, name)?.node;
        if self.names.get(&node).is_some_and(|names| !names.is_empty()) {
            return Err(Errno::ENOTEMPTY);
        }
        self.change(Change::Remove { folder, name: name.to_owned() })
    }

    /// Renames, replacing an existing file.
    pub(crate) fn rename(&mut self, from: (u64, &OsStr), to: (u64, &OsStr)) -> Result<()> {
        self.find(from.0, from.1)?;
        self.folder(to.0)?;
        let [from, to] = [from, to].map(|(folder, name)| (folder, name.to_owned()));
        self.change(Change::Rename { from, to })
    }

    /// Makes the names of a folder durable.
    pub(crate) fn sync_folder(&mut self, folder: u64) -> Result<()> {
        self.folder(folder)?;
        let is_cut = self.is_cut_now()?;
        self.cut_if(is_cut)?;
        self.counts.folder_syncs += 1;
        if self.fault == Some(Fault::FolderSync(self.counts.folder_syncs - 1)) {
            self.counts.failed += 1;
            return Err(Errno::EIO);
        }
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

    /// Reads, up to the end of the file.
    pub(crate) fn read(&mut self, node: u64, offset: u64, len: usize) -> Result<&[u8]> {
        if self.fault == Some(Fault::Read) {
            return Err(Errno::EIO);
        }
        let file = self.file(node)?;
        let from = file.bytes.len().min(offset as usize);
        Ok(&file.bytes[from..file.bytes.len().min(from + len)])
    }

    /// Writes, and makes the written bytes durable if requested.
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
            // Some of the sectors may just have reached the disk.
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

    /// Makes the whole file durable.
    pub(crate) fn sync(&mut self, node: u64) -> Result<()> {
        self.file(node)?;
        match self.turn(node, true)? {
            Turn::Executes => {
                let file = self.file(node)?;
                file.old.clear();
                file.settle(0..0);
                Ok(())
            }
            Turn::Fails => {
                let file = self.file(node)?;
                for (sector, versions) in std::mem::take(&mut file.old) {
                    let durable = versions.into_iter().next().expect("the durable one is there");
                    file.lost.entry(sector).or_insert(durable);
                }
                file.lens.truncate(1);
                file.is_len_lost = !file.lens.is_empty();
                Err(Errno::EIO)
            }
            Turn::Cut => {
                self.cut();
                Err(Errno::EIO)
            }
        }
    }

    /// Changes the length of a file.
    pub(crate) fn resize(&mut self, node: u64, len: u64) -> Result<()> {
        self.may_grow(node, len)?;
        let is_cut = self.is_cut_now()?;
        self.file(node)?.resize(len as usize);
        self.cut_if(is_cut)
    }

    /// Fills a range with zeros, inside the file's length.
    pub(crate) fn zero(&mut self, node: u64, offset: u64, len: u64) -> Result<()> {
        let has = self.file(node)?.bytes.len() as u64;
        let len = len.min(has.saturating_sub(offset));
        self.write(node, offset, &vec![0; len as usize], false)
    }

    fn may_grow(&mut self, node: u64, end: u64) -> Result<()> {
        let is_full = self.fault == Some(Fault::Full);
        let more = end.saturating_sub(self.file(node)?.bytes.len() as u64);
        if more > 0 && (is_full || more > self.space().1) { Err(Errno::ENOSPC) } else { Ok(()) }
    }
}

/// The share of volatile data that a cut leaves in its last version: none, little, half, nearly
/// all.
fn chance(random: &mut Rng) -> f64 {
    [0.0, 0.0, 0.05, 0.5, 0.95][random.usize(..5)]
}

fn sectors_of(offset: usize, len: usize) -> std::ops::Range<u64> {
    (offset / SECTOR) as u64..(offset + len).div_ceil(SECTOR) as u64
}

impl File {
    /// Keeps the version of a sector that is about to change.
    fn touch(&mut self, sector: u64) {
        let before = self.lost.remove(&sector).unwrap_or_else(|| {
            let at = sector as usize * SECTOR;
            let mut bytes = Box::new([0; SECTOR]);
            let has = &self.bytes[at.min(self.bytes.len())..self.bytes.len().min(at + SECTOR)];
            bytes[..has.len()].copy_from_slice(has);
            bytes
        });
        self.old.entry(sector).or_default().push(before);
    }

    /// Writes inside the file's length.
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        for sector in sectors_of(offset, bytes.len()) {
            let at = sector as usize * SECTOR;
            let (from, to) = (at.max(offset), (at + SECTOR).min(offset + bytes.len()));
            let new = &bytes[from - offset..to - offset];
            // Unchanged sectors need no memory; most of them are zeros of a new file.
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
        if !std::mem::take(&mut self.is_len_lost) {
            self.lens.push(self.bytes.len() as u64);
        }
        self.bytes.resize(len, 0);
    }

    /// Marks these sectors and the length as durable.
    fn settle(&mut self, sectors: std::ops::Range<u64>) {
        for sector in sectors {
            self.old.remove(&sector);
            self.lost.remove(&sector);
        }
        if !self.is_len_lost {
            self.lens.clear();
        }
    }

    /// The power is cut; `choose` selects one of the given number of versions, from the oldest to
    /// the newest.
    fn cut(&mut self, mut choose: impl FnMut(usize) -> usize) {
        let versions = self.lens.len() + usize::from(!self.is_len_lost);
        let len = if versions > 1 { choose(versions) } else { 0 };
        if let Some(len) = self.lens.get(len) {
            self.bytes.resize(*len as usize, 0);
        }
        let old = std::mem::take(&mut self.old).into_iter().filter_map(|(sector, mut versions)| {
            let chosen = choose(versions.len() + 1);
            (chosen < versions.len()).then(|| (sector, versions.swap_remove(chosen)))
        });
        let old: Vec<_> = old.collect();
        for (sector, bytes) in old.into_iter().chain(std::mem::take(&mut self.lost)) {
            let at = sector as usize * SECTOR;
            let len = SECTOR.min(self.bytes.len().saturating_sub(at));
            if len > 0 {
                self.bytes[at..at + len].copy_from_slice(&bytes[..len]);
            }
        }
        self.lens.clear();
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
        assert!(disk.list(ROOT).is_err(), "the power is off");
        disk.switch_on();
    }

    /// The contents of a file after a cut, as the first byte of each sector; `None` if it is gone.
    fn found(disk: &mut Disk, name: &str) -> Option<Vec<u8>> {
        let look = disk.find(ROOT, OsStr::new(name)).ok()?;
        let bytes = disk.read(look.node, 0, look.len as usize).unwrap();
        Some(bytes.chunks(SECTOR).map(|sector| sector[0]).collect())
    }

    #[test]
    fn synced_sectors_survive_a_cut_and_others_may_be_lost() {
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
            // The file has one of the names or none, and is complete.
            let names = ["b", "c"].map(|name| found(&mut disk, name));
            let here: Vec<_> = names.into_iter().flatten().collect();
            assert!(here.is_empty() || here == [[4]], "{here:?}");
            unnamed += u32::from(here.is_empty());
        }
        assert!(gone > 50 && torn > 10 && unnamed > 30, "{gone} {torn} {unnamed}");
    }

    /// Runs a program on many disks and cuts their power; returns the states found, with their
    /// counts.
    fn outcomes<T: Ord>(
        program: impl Fn(&mut Disk),
        find: impl Fn(&mut Disk) -> T,
    ) -> BTreeMap<T, u32> {
        let mut outcomes = BTreeMap::new();
        for seed in 0..400 {
            let mut disk = Disk::new(seed);
            program(&mut disk);
            restart(&mut disk);
            *outcomes.entry(find(&mut disk)).or_default() += 1;
        }
        outcomes
    }

    fn names(disk: &mut Disk) -> String {
        let names = disk.list(ROOT).unwrap().into_iter();
        names.map(|(name, _)| name.into_string().unwrap()).collect()
    }

    /// An earlier model kept only two versions of a sector, the durable and the newest. It missed
    /// pools that confuse an older record of a slot with a newer one.
    #[test]
    fn a_cut_leaves_any_unsynced_version_of_each_sector() {
        let program = |disk: &mut Disk| {
            let a = file(disk, "a");
            disk.write(a, 0, &[1; 2 * SECTOR], false).unwrap();
            disk.sync(a).unwrap();
            disk.sync_folder(ROOT).unwrap();
            for version in 2..=4 {
                disk.write(a, 0, &[version; 2 * SECTOR], false).unwrap();
            }
            disk.zero(a, SECTOR as u64, SECTOR as u64).unwrap();
        };
        let found = outcomes(program, |disk| found(disk, "a").unwrap());
        let of = |at: usize| found.keys().map(|a| a[at]).collect::<HashSet<_>>();
        assert_eq!(of(0), HashSet::from([1, 2, 3, 4]));
        assert_eq!(of(1), HashSet::from([0, 1, 2, 3, 4]));
        assert!(found.len() > 12, "sectors have versions of their own: {found:?}");
    }

    #[test]
    fn a_cut_leaves_any_unsynced_length() {
        let program = |disk: &mut Disk| {
            let a = file(disk, "a");
            disk.write(a, 0, &[1; SECTOR], true).unwrap();
            disk.sync_folder(ROOT).unwrap();
            for sectors in [5, 2, 4] {
                disk.resize(a, sectors * SECTOR as u64).unwrap();
            }
        };
        let found = outcomes(program, |disk| found(disk, "a").unwrap());
        let all = [1, 2, 4, 5].map(|len| (0..len).map(|at| u8::from(at == 0)).collect::<Vec<_>>());
        assert_eq!(found.keys().cloned().collect::<Vec<_>>(), all);
    }

    /// The name becomes durable by chance; sectors and length follow the same rules as for other
    /// files.
    #[test]
    fn a_file_without_a_durable_name_has_any_contents() {
        let program = |disk: &mut Disk| {
            let a = file(disk, "a");
            disk.write(a, 0, &[1; SECTOR], false).unwrap();
            disk.write(a, SECTOR as u64, &[2; SECTOR], false).unwrap();
        };
        let found = outcomes(program, |disk| found(disk, "a"));
        let wanted: [Option<&[u8]>; 7] =
            [None, Some(&[]), Some(&[0]), Some(&[1]), Some(&[0, 0]), Some(&[1, 0]), Some(&[1, 2])];
        for wanted in wanted {
            let wanted = wanted.map(<[u8]>::to_vec);
            assert!(found.contains_key(&wanted), "{wanted:?} is not in {found:?}");
        }
    }

    #[test]
    fn a_cut_leaves_each_name_of_any_moment_and_renames_whole() {
        let program = |disk: &mut Disk| {
            file(disk, "a");
            disk.sync_folder(ROOT).unwrap();
            disk.rename((ROOT, OsStr::new("a")), (ROOT, OsStr::new("b"))).unwrap();
            disk.rename((ROOT, OsStr::new("b")), (ROOT, OsStr::new("c"))).unwrap();
            file(disk, "x");
            file(disk, "y");
            disk.remove(ROOT, OsStr::new("x")).unwrap();
        };
        let found = outcomes(program, names);
        // A renamed file has one name, and `y` may exist before the others.
        let mut wanted = Vec::new();
        for renamed in ["a", "b", "c"] {
            wanted.extend(["", "x", "xy", "y"].map(|others| format!("{renamed}{others}")));
        }
        assert_eq!(found.keys().cloned().collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn the_power_is_cut_at_changes_of_names_and_lengths_too() {
        for at in 0..5 {
            let mut disk = Disk::new(at);
            disk.fail(Some(Fault::Cut(at)));
            let done: Result<()> = (|| {
                let a = disk.make(ROOT, OsStr::new("a"), false)?.node;
                disk.resize(a, 1)?;
                disk.rename((ROOT, OsStr::new("a")), (ROOT, OsStr::new("b")))?;
                disk.sync_folder(ROOT)?;
                disk.remove(ROOT, OsStr::new("b"))
            })();
            assert!(done.is_err() && disk.is_off(), "{at}");
        }
    }

    #[test]
    fn a_full_disk_refuses_growth_until_a_file_goes() {
        let mut disk = Disk::new(1);
        disk.bound(4 * SECTOR as u64);
        let (a, b) = (file(&mut disk, "a"), file(&mut disk, "b"));
        disk.write(a, 0, &[1; 3 * SECTOR], false).unwrap();
        disk.resize(b, SECTOR as u64).unwrap();
        assert_eq!(disk.space(), (4 * SECTOR as u64, 0));
        assert_eq!(disk.write(b, SECTOR as u64, &[2], false), Err(Errno::ENOSPC));
        disk.write(b, 0, &[2; SECTOR], false).unwrap();
        disk.remove(ROOT, OsStr::new("a")).unwrap();
        disk.write(b, SECTOR as u64, &[2], false).unwrap();
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
        // Written again, the sector is like any other.
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

//! The simulated store as the store of a zoned device's medium.
#![allow(clippy::disallowed_types)] // Counts moments, in tests.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_store::{SegmentFiles as _, StoreFile as _};
use blockyard_zone_media::head::Id;
use blockyard_zone_media::store::{Store, StoreFile};

use crate::directory::{SECTOR, SimulatedDirectory};
use crate::simulated_store::{SimulatedFile, SimulatedStore};

/// Atomic unit of tables, journal and similar files in bytes: less than a sector, because those of
/// a small disk would fit in one.
const SMALL_UNIT: usize = 64;

/// A moment of a workload on a simulated store.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// Number of directory operations before it.
    pub changes: usize,
    /// Order among all moments: several may have the same number of operations before them.
    pub tick: u64,
}

impl Moment {
    /// A moment that never comes.
    pub const NEVER: Moment = Moment { changes: usize::MAX, tick: u64::MAX };
}

/// A simulated store of a zoned device's medium.
#[derive(Clone, Debug)]
pub struct SimulatedZoneStore {
    /// The store, for its faults and hooks.
    pub store: SimulatedStore,
    ticks: Arc<Mutex<u64>>,
}

/// A file of the store.
#[derive(Debug)]
pub struct ZoneStoreFile(SimulatedFile);

impl SimulatedZoneStore {
    /// A store in a directory.
    pub fn new(directory: &SimulatedDirectory) -> SimulatedZoneStore {
        SimulatedZoneStore { store: SimulatedStore::new(directory), ticks: Arc::default() }
    }

    /// The current moment.
    pub fn now(&self) -> Moment {
        let mut ticks = self.ticks.lock().unwrap_or_else(PoisonError::into_inner);
        *ticks += 1;
        Moment { changes: self.store.directory().change_count(), tick: *ticks }
    }
}

fn id(number: u64) -> Id {
    let mut id = *b"simulated.......";
    id[8..].copy_from_slice(&number.to_be_bytes());
    id
}

impl Store for SimulatedZoneStore {
    type File = ZoneStoreFile;

    fn title(&self) -> String {
        "simulated".to_owned()
    }

    fn open(&self, name: &str) -> io::Result<Option<ZoneStoreFile>> {
        Ok(self.store.open(name)?.map(ZoneStoreFile))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<ZoneStoreFile> {
        let unit = if name.starts_with("data") { SECTOR } else { SMALL_UNIT };
        self.store.create_with_unit(name, len, unit).map(ZoneStoreFile)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.store.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.store.remove(name)
    }

    fn sync_names(&self) -> io::Result<()> {
        self.store.sync_names()
    }

    fn names(&self) -> io::Result<Vec<String>> {
        self.store.names()
    }

    fn boot(&self) -> io::Result<Id> {
        Ok(id(self.store.directory().boot()))
    }

    fn fresh_id(&self) -> io::Result<Id> {
        Ok(id(self.store.directory().fresh_id()))
    }
}

impl StoreFile for ZoneStoreFile {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, into)
    }

    fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, &[from])
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.punch(offset, len)
    }

    fn first_data(&self) -> io::Result<Option<u64>> {
        let mut bytes = vec![0; self.0.len()? as usize];
        self.0.read_at(0, &mut bytes)?;
        Ok(bytes.iter().position(|byte| *byte != 0).map(|at| at as u64))
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
}

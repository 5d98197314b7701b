//! The simulated store of the tests as the store of a medium.

#![allow(clippy::disallowed_types, clippy::unwrap_used)] // Test code.

use std::io;
use std::sync::{Arc, Mutex};

use blockyard_smr::media::store::{Store, StoreFile};
use blockyard_smr::media::zone_word::Id;
use blockyard_store::{SegmentFiles as _, StoreFile as _};
use blockyard_testing::directory::{SECTOR, SimulatedDirectory};
use blockyard_testing::simulated_store::{SimulatedFile, SimulatedStore};

use crate::history::Moment;

/// Atomic unit of tables, journal and similar files in bytes: less than a sector, because those of
/// a small disk would fit in one.
const SMALL_UNIT: usize = 64;

/// A simulated store.
#[derive(Clone, Debug)]
pub(crate) struct Simulated {
    pub(crate) store: SimulatedStore,
    ticks: Arc<Mutex<u64>>,
}

/// A file of the store.
#[derive(Debug)]
pub(crate) struct File(SimulatedFile);

impl Simulated {
    pub(crate) fn new(directory: &SimulatedDirectory) -> Simulated {
        Simulated { store: SimulatedStore::new(directory), ticks: Arc::default() }
    }

    /// The current moment.
    pub(crate) fn now(&self) -> Moment {
        let mut ticks = self.ticks.lock().unwrap();
        *ticks += 1;
        Moment { changes: self.store.directory().change_count(), tick: *ticks }
    }
}

fn id(number: u64) -> Id {
    let mut id = *b"simulated.......";
    id[8..].copy_from_slice(&number.to_be_bytes());
    id
}

impl Store for Simulated {
    type File = File;

    fn title(&self) -> String {
        "simulated".to_owned()
    }

    fn open(&self, name: &str) -> io::Result<Option<File>> {
        Ok(self.store.open(name)?.map(File))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<File> {
        let unit = if name.starts_with("data") { SECTOR } else { SMALL_UNIT };
        self.store.create_with_unit(name, len, unit).map(File)
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

impl StoreFile for File {
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

    fn has_data(&self) -> io::Result<bool> {
        let mut bytes = vec![0; self.0.len()? as usize];
        self.0.read_at(0, &mut bytes)?;
        Ok(bytes.iter().any(|byte| *byte != 0))
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
}

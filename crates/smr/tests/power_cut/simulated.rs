//! A simulated directory as the store of a medium.

#![allow(clippy::disallowed_types, clippy::unwrap_used)] // Test code.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

use blockyard_smr::media::store::{Store, StoreFile};
use blockyard_smr::media::zone_word::Id;
use blockyard_testing::directory::{File, SECTOR, SimulatedDirectory};

use crate::history::Moment;

/// Atomic unit of tables, journal and similar files in bytes: less than a sector, because those of
/// a small disk would fit in one.
const SMALL_UNIT: usize = 64;

/// A function to call while a file is synced.
type Meanwhile = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// Prefixes of the names of files whose syncs do nothing and report success.
pub(crate) type Liars = &'static [&'static str];

/// A simulated directory.
#[derive(Clone)]
pub(crate) struct Simulated {
    directory: SimulatedDirectory,
    meanwhile: Meanwhile,
    liars: Liars,
    ticks: Arc<Mutex<u64>>,
}

/// A file of the directory.
pub(crate) struct SimulatedFile {
    file: File,
    meanwhile: Meanwhile,
    lies: bool,
}

impl Simulated {
    pub(crate) fn new(directory: &SimulatedDirectory) -> Simulated {
        Simulated::lying(directory, &[])
    }

    /// A directory with files whose syncs do nothing.
    pub(crate) fn lying(directory: &SimulatedDirectory, liars: Liars) -> Simulated {
        let directory = directory.clone();
        Simulated { directory, meanwhile: Arc::default(), liars, ticks: Arc::default() }
    }

    /// The current moment.
    pub(crate) fn now(&self) -> Moment {
        let mut ticks = self.ticks.lock().unwrap();
        *ticks += 1;
        Moment { changes: self.directory.change_count(), tick: *ticks }
    }

    /// Calls a function during the next sync of a file.
    pub(crate) fn meanwhile(&self, work: impl FnOnce() + Send + 'static) {
        *self.meanwhile.lock().unwrap() = Some(Box::new(work));
    }

    fn file(&self, name: &str, file: File) -> SimulatedFile {
        let lies = self.liars.iter().any(|start| name.starts_with(start));
        SimulatedFile { file, meanwhile: Arc::clone(&self.meanwhile), lies }
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

fn id(number: u64) -> Id {
    let mut id = *b"simulated.......";
    id[8..].copy_from_slice(&number.to_be_bytes());
    id
}

impl Store for Simulated {
    type File = SimulatedFile;

    fn title(&self) -> String {
        "simulated".to_owned()
    }

    fn open(&self, name: &str) -> io::Result<Option<SimulatedFile>> {
        Ok(self.directory.open(name).map(|file| self.file(name, file)))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<SimulatedFile> {
        let unit = if name.starts_with("data") { SECTOR } else { SMALL_UNIT };
        Ok(self.file(name, self.directory.create(name, len, unit)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.directory.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.directory.remove(name);
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.directory.sync_names();
        Ok(())
    }

    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.directory.names())
    }

    fn boot(&self) -> io::Result<Id> {
        Ok(id(self.directory.boot()))
    }

    fn fresh_id(&self) -> io::Result<Id> {
        Ok(id(self.directory.fresh_id()))
    }
}

impl StoreFile for SimulatedFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.len())
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_at(offset, into)
    }

    fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.file.write_at(offset, from)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.file.punch(offset, len)
    }

    fn sync(&self) -> io::Result<()> {
        let meanwhile = self.meanwhile.lock().unwrap().take();
        if let Some(work) = meanwhile {
            work();
        }
        if self.lies { Ok(()) } else { self.file.sync() }
    }
}

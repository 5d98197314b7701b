//! A medium in the files of a directory: durable, and true to what was flushed.
//!
//! ```text
//! write ▸ data.NN (page cache) ▸ live: the zone's word ▸ done
//! flush ▸ data.NN: sync ▸ journal: the words of what changed, sync ▸ done
//! reset ▸ live: empty ▸ done; before the zone is written again, or at a flush:
//!         journal: empty, for all that were reset, sync ▸ data.NN: punch
//! ```
//!
//! A kill of the process leaves the page cache, hence `live`; a power cut leaves what was synced,
//! hence the journal, which never runs ahead of the data. `docs/on-disk.md` has the formats.
//!
//! Several threads read and write at once, and nothing is locked for the whole disk but a flush: a
//! zone's state has a lock of its own, held for the eight bytes of its word.
#![allow(clippy::disallowed_types)] // Flush and log hold their locks during syncs of files.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blockyard_core::zone::ZoneCond;
use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;

use super::directory::Directory;
use super::error::MediaError;
use super::geometry::MediaGeometry;
use super::live::Share;
use super::log::{Log, Place};
use super::overlay::{Overlay, ZonePlace};
use super::store::{Store, StoreFile};
use super::word::{pack, settled};
use super::{Media, ZoneRecord};

/// What a kill of the process may lose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// Nothing that was completed.
    Through,
    /// What was not flushed: a volatile write cache, of so many bytes for conventional zones.
    Volatile {
        /// Bytes of the cache; beyond, it writes back of its own accord.
        bytes: u64,
    },
}

/// What a medium is opened with.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The disk's shape.
    pub geometry: MediaGeometry,
    /// What a kill may lose.
    pub cache: CacheMode,
    /// Room in the journal of a disk that is made now.
    pub journal_records: u32,
    /// Files that the data of a disk that is made now are spread over.
    pub data_files: u32,
}

impl Options {
    /// Of a shape, and as one usually wants it: a journal of 1 MiB, 16 data files.
    pub fn new(geometry: MediaGeometry) -> Options {
        let cache = CacheMode::Through;
        Options { geometry, cache, journal_records: 32_768, data_files: 16 }
    }
}

/// What is known of a zone.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) record: ZoneRecord,
    /// Something of it may not be durable; then its number is in the list of its data file.
    pub(crate) dirty: bool,
    /// What is durable of it may not be empty: its data are given up in two steps then.
    pub(crate) kept: bool,
    /// It was reset, and that is not durable: its data are still there, and must be until it is.
    /// Then its number is in the list of its data file.
    pub(crate) given_up: bool,
}

/// A zone's cell.
pub(crate) type CellLock = SleepLock<Cell, { ranks::MEDIA_ZONE }>;

/// One of the files that hold the data, with what has changed in it since the last flush.
#[derive(Debug)]
pub(crate) struct DataFile<F> {
    pub(crate) file: F,
    /// Zones that are dirty. A zone's number is added under its cell's lock.
    pub(crate) dirty: SleepLock<Vec<u32>, { ranks::MEDIA_DIRTY }>,
    /// Zones whose data are given up, likewise.
    pub(crate) given_up: SleepLock<Vec<u32>, { ranks::MEDIA_DIRTY }>,
    /// Set for a volatile cache.
    pub(crate) overlay: Option<Overlay>,
    /// The words that survive a kill; not with a volatile cache.
    pub(crate) live: Option<F>,
}

/// A medium in the files of a directory.
#[derive(Debug)]
pub struct Files<S: Store = Directory> {
    pub(crate) store: S,
    pub(crate) geometry: MediaGeometry,
    pub(crate) data: Box<[DataFile<S::File>]>,
    pub(crate) cells: Box<[CellLock]>,
    /// The four locks below are taken in this order, and cells after them. Held by the one flush of
    /// everything that goes on.
    pub(crate) flushing: Mutex<()>,
    /// Held by who gives up data, until their space is given back.
    pub(crate) giving_up: Mutex<()>,
    /// Held by who syncs the journal, for all who have written to it before.
    pub(crate) syncing: Mutex<()>,
    /// Held by who writes to the journal, not while it is synced.
    pub(crate) log: Mutex<Log<S::File>>,
    pub(crate) journal: Arc<S::File>,
    /// Why nothing can be written any more.
    pub(crate) broken: OnceLock<String>,
    pub(crate) found: Vec<ZoneRecord>,
}

/// A part of a request that lies in one zone.
struct Piece {
    zone: u32,
    /// From the zone's start, in bytes.
    offset: u64,
    /// In the request, in bytes.
    from: usize,
    to: usize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Files {
    /// Opens the disk in a directory, or makes one in an empty directory.
    ///
    /// # Errors
    /// If another process has it, if it holds something else or another shape of disk, or if it is
    /// damaged.
    pub fn open(path: &Path, options: &Options) -> Result<Files, MediaError> {
        let files = Files::open_in(Directory::take(path)?, options)?;
        files.store.narrow();
        Ok(files)
    }
}

impl<S: Store> Files<S> {
    /// Where a zone is.
    pub(crate) fn place(&self, zone: u32) -> ZonePlace<'_, S::File> {
        let files = self.data.len() as u32;
        ZonePlace {
            zone,
            file: &self.data[(zone % files) as usize].file,
            start: u64::from(zone / files) * self.geometry.zone_bytes,
            len: self.geometry.len_of(zone),
        }
    }

    fn data_of(&self, zone: u32) -> &DataFile<S::File> {
        &self.data[zone as usize % self.data.len()]
    }

    /// The zone's cache, if it has one.
    fn overlay_of(&self, zone: u32) -> Option<&Overlay> {
        let overlay = self.data_of(zone).overlay.as_ref();
        overlay.filter(|_| self.geometry.is_conventional(zone))
    }

    /// The parts of a request.
    fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece> + '_ {
        let mut next = offset;
        let end = offset + len;
        std::iter::from_fn(move || {
            (next < end).then(|| {
                let zone = self.geometry.zone_at(next);
                let start = self.geometry.start_of(zone);
                let from = next;
                next = end.min(start + self.geometry.zone_bytes);
                let place = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
                Piece { zone, offset: from - start, from: place(from), to: place(next) }
            })
        })
    }

    /// Refuses a range that is not on the disk.
    fn check_range(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.geometry.bytes => Ok(()),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{len} bytes at {offset} are not on a disk of {}", self.geometry.bytes),
            )),
        }
    }

    /// Refuses to go on after an error that left something undurable which may never be again.
    fn check_whole(&self) -> io::Result<()> {
        match self.broken.get() {
            None => Ok(()),
            Some(why) => Err(io::Error::other(why.clone())),
        }
    }

    /// Ends all writing: a failed sync is never tried again, because the system may have dropped
    /// the data by then and would say that all is well. Opening the disk anew finds what is
    /// durable, so the live file, which speaks of the page cache, goes.
    fn broken(&self, what: &str, error: &io::Error) -> io::Error {
        let text = format!(
            "{}: {what} failed ({error}); nothing more is written, open the disk again",
            self.store.title()
        );
        if self.broken.set(text.clone()).is_ok() {
            // It fails where nothing can be written at all; then nothing newer is durable either.
            let _ = self.remove_live();
        }
        io::Error::new(error.kind(), text)
    }

    fn sync_data(&self, data: &DataFile<S::File>) -> io::Result<()> {
        data.file.sync().map_err(|error| self.broken("a sync of the data", &error))
    }

    /// Notes that a zone has changed in a way that is not durable yet.
    fn mark(&self, zone: u32, cell: &mut Cell) {
        if !cell.dirty {
            cell.dirty = true;
            self.data_of(zone).dirty.with(|dirty| dirty.push(zone));
        }
    }

    /// Which zones have their words in one of the live files.
    pub(crate) fn share(&self, number: u32) -> Share {
        Share { number, files: self.data.len() as u32 }
    }

    /// Removes the live files.
    pub(crate) fn remove_live(&self) -> io::Result<()> {
        let mut files = 0..self.data.len() as u32;
        files.try_for_each(|number| self.store.remove(&self.share(number).name()))
    }

    /// Keeps a zone's state where a kill does not reach it.
    fn note_live(&self, zone: u32, state: ZoneRecord) -> io::Result<()> {
        let Some(live) = &self.data_of(zone).live else { return Ok(()) };
        let word = pack(state).to_le_bytes();
        let noted = live.write_at(self.share(0).place_of(zone), &word);
        noted.map_err(|error| self.broken("a write of the live file", &error))
    }

    /// Makes states of zones durable, whose data are so already. A zone that was reset since its
    /// state was looked at is left out: its data are gone. So is one of which another thread has
    /// made a later state durable meanwhile.
    fn log_states(&self, noted: &[(u32, ZoneRecord)]) -> io::Result<()> {
        let mut log = locked(&self.log);
        self.check_whole()?;
        let mut states = Vec::with_capacity(noted.len());
        for (zone, record) in noted {
            let word = pack(*record);
            let logged = log.word(*zone);
            let counts = self.cells[*zone as usize].with(|cell| {
                let counts = cell.record.erasures == record.erasures
                    && !cell.given_up
                    && logged != word
                    && logged >> 8 <= word >> 8;
                cell.kept |= counts;
                counts
            });
            if counts {
                states.push((*zone, word));
            }
        }
        let logged = log.append(&states);
        let place = log.place();
        drop(log);
        logged.map_err(|error| self.broken("a write of the journal", &error))?;
        self.sync_log(place)
    }

    /// Makes durable what was noted before a place of the log. Who waits for another's sync finds,
    /// as a rule, that the next one is for all who have waited.
    fn sync_log(&self, place: Place) -> io::Result<()> {
        let _syncing = locked(&self.syncing);
        self.check_whole()?;
        let log = locked(&self.log);
        if log.is_durable(place) {
            return Ok(());
        }
        let reached = log.place();
        drop(log);
        let is_there = self.store.look();
        is_there.map_err(|error| self.broken("a look at the superblock", &error))?;
        let synced = self.journal.sync();
        synced.map_err(|error| self.broken("a sync of the journal", &error))?;
        locked(&self.log).synced(reached);
        Ok(())
    }

    /// Makes durable that zones were reset, then gives their space back. All of them at once: after
    /// a reset of the whole disk, the first write makes one sync for all.
    fn give_up(&self) -> io::Result<()> {
        let _giving_up = locked(&self.giving_up);
        let mut log = locked(&self.log);
        self.check_whole()?;
        let zones = self.data.iter().flat_map(|data| data.given_up.with(std::mem::take));
        let zones: Vec<u32> = zones.collect();
        let word = pack(ZoneRecord::EMPTY);
        let states: Vec<_> = zones.iter().map(|zone| (*zone, word)).collect();
        let states: Vec<_> =
            states.into_iter().filter(|(zone, _)| log.word(*zone) != word).collect();
        let logged = log.append(&states);
        let place = log.place();
        drop(log);
        logged.map_err(|error| self.broken("a write of the journal", &error))?;
        self.sync_log(place)?;
        for zone in zones {
            // Whoever waits to write to the zone waits for this too.
            self.cells[zone as usize].with(|cell| {
                self.punch_whole(zone)?;
                (cell.given_up, cell.kept) = (false, false);
                Ok::<_, io::Error>(())
            })?;
        }
        Ok(())
    }

    /// Takes the data of a zone away, which are durably given up. Where that fails, nothing more is
    /// written: what lies there must not be shown again, and a disk that is opened removes it.
    fn punch_whole(&self, zone: u32) -> io::Result<()> {
        let place = self.place(zone);
        let punched = place.file.punch(place.start, place.len);
        punched.map_err(|error| self.broken("giving space back", &error))
    }

    /// Makes sure that a zone's data may be overwritten.
    fn may_overwrite(&self, zone: u32) -> io::Result<()> {
        match self.cells[zone as usize].with(|cell| cell.given_up) {
            false => Ok(()),
            true => self.give_up(),
        }
    }

    /// Moves what is cached of some zones to their file.
    fn write_back(
        &self,
        data: &DataFile<S::File>,
        zones: std::ops::RangeInclusive<u32>,
    ) -> io::Result<()> {
        let Some(overlay) = &data.overlay else { return Ok(()) };
        let written = overlay.write_back(&data.file, zones, |zone| self.place(zone).start);
        written.map_err(|error| self.broken("a write of cached data", &error))
    }

    /// Makes everything durable, and notes that the disk was closed in order.
    ///
    /// # Errors
    /// If some of it may not be.
    pub fn close(self) -> io::Result<()> {
        self.shut()
    }

    /// Nobody else uses it any more.
    fn shut(&self) -> io::Result<()> {
        self.flush()?;
        let closed = locked(&self.log).checkpoint(true);
        closed.map_err(|error| self.broken("a write of the tables", &error))?;
        let _ = self.broken.set(format!("{}: the disk is closed", self.store.title()));
        self.remove_live()
    }
}

impl<S: Store> Drop for Files<S> {
    fn drop(&mut self) {
        // Who wants to know whether it succeeds closes it. If not, it is found as after a kill.
        if self.broken.get().is_none() {
            let _ = self.shut();
        }
    }
}

impl<S: Store> Media for Files<S> {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.check_range(offset, into.len() as u64)?;
        for Piece { zone, offset, from, to } in self.pieces(offset, into.len() as u64) {
            let (place, into) = (self.place(zone), &mut into[from..to]);
            match self.overlay_of(zone) {
                None => place.file.read_at(place.start + offset, into)?,
                Some(overlay) => overlay.read(place, offset, into)?,
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.check_range(offset, bytes.len() as u64)?;
        self.check_whole()?;
        for Piece { zone, offset, from, to } in self.pieces(offset, bytes.len() as u64) {
            let (place, bytes) = (self.place(zone), &bytes[from..to]);
            if let Some(overlay) = self.overlay_of(zone) {
                overlay.write(place, offset, bytes)?;
                if overlay.is_over_full() {
                    self.write_back(self.data_of(zone), 0..=u32::MAX)?;
                }
            } else {
                self.may_overwrite(zone)?;
                place.file.write_at(place.start + offset, bytes)?;
            }
            // A sequential zone is marked when its write pointer moves.
            if self.geometry.is_conventional(zone) {
                self.cells[zone as usize].with(|cell| self.mark(zone, cell));
            }
        }
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_range(offset, len)?;
        self.check_whole()?;
        for Piece { zone, offset, from, to } in self.pieces(offset, len) {
            let (place, len) = (self.place(zone), (to - from) as u64);
            match self.overlay_of(zone) {
                None => {
                    self.may_overwrite(zone)?;
                    place.file.punch(place.start + offset, len)?;
                }
                Some(overlay) => overlay.zero(place, offset, len)?,
            }
            if self.geometry.is_conventional(zone) {
                self.cells[zone as usize].with(|cell| self.mark(zone, cell));
            }
        }
        Ok(())
    }

    fn zone_changed(&self, zone: u32, state: ZoneRecord) -> io::Result<()> {
        self.check_whole()?;
        // A zone that is finished without data shows what lies there.
        if settled(state).cond != ZoneCond::Empty {
            self.may_overwrite(zone)?;
        }
        self.cells[zone as usize].with(|cell| {
            if !state.follows(&cell.record) {
                return Ok(());
            }
            if settled(state) != settled(cell.record) {
                self.note_live(zone, state)?;
                self.mark(zone, cell);
            }
            cell.record = state;
            Ok(())
        })
    }

    fn make_room(&self, zone: u32) -> io::Result<()> {
        self.check_whole()?;
        self.may_overwrite(zone)
    }

    fn reset(&self, zone: u32, state: ZoneRecord) -> io::Result<()> {
        self.check_whole()?;
        self.cells[zone as usize].with(|cell| {
            self.note_live(zone, state)?;
            cell.record = state;
            self.mark(zone, cell);
            if !cell.kept {
                return self.punch_whole(zone);
            }
            if !cell.given_up {
                cell.given_up = true;
                self.data_of(zone).given_up.with(|zones| zones.push(zone));
            }
            Ok(())
        })
    }

    fn flush(&self) -> io::Result<()> {
        let _flushing = locked(&self.flushing);
        self.check_whole()?;
        let mut noted = Vec::new();
        for data in &self.data {
            let zones = data.dirty.with(std::mem::take);
            if zones.is_empty() {
                continue;
            }
            // First of all they are clean: who writes from here on marks them again.
            for zone in zones {
                let record = self.cells[zone as usize].with(|cell| {
                    cell.dirty = false;
                    cell.record
                });
                noted.push((zone, record));
            }
            self.write_back(data, 0..=u32::MAX)?;
            self.sync_data(data)?;
        }
        noted.retain(|(zone, _)| !self.geometry.is_conventional(*zone));
        self.log_states(&noted)?;
        self.give_up()
    }

    fn flush_range(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_range(offset, len)?;
        self.check_whole()?;
        let mut noted = Vec::new();
        // Zones of one file lie far from each other, so that a range of several syncs several.
        for Piece { zone, .. } in self.pieces(offset, len) {
            let data = self.data_of(zone);
            self.write_back(data, zone..=zone)?;
            if !self.geometry.is_conventional(zone) {
                self.may_overwrite(zone)?;
                noted.push((zone, self.cells[zone as usize].with(|cell| cell.record)));
            }
            self.sync_data(data)?;
        }
        if noted.is_empty() { Ok(()) } else { self.log_states(&noted) }
    }

    fn zones(&self) -> Vec<ZoneRecord> {
        self.found.clone()
    }
}

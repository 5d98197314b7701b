//! A medium in the files of a directory: durable, and never inconsistent with what was flushed.
//!
//! ```text
//! write ▸ data.NN (page cache) ▸ live: the zone's word ▸ done
//! flush ▸ data.NN: sync ▸ journal: the words of what changed, sync ▸ done
//! reset ▸ live: empty ▸ done; before the zone is written again, or at a flush:
//!         journal: empty, for all that were reset, sync ▸ data.NN: punch
//! ```
//!
//! After a kill of the process the page cache survives, so `live` is valid. After a power cut only
//! synced data survive, so the journal is valid; it is never ahead of the data. `docs/on-disk.md`
//! has the formats.
//!
//! Several threads read and write concurrently. Only a flush takes a lock for the whole disk. Each
//! zone has a lock for its state, which is held while the eight bytes of its word are written.
#![allow(clippy::disallowed_types)] // Flush and log hold their locks while files are synced.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use blockyard_core::provisional::Provisional;
use blockyard_core::zone::ZoneCond;
use blockyard_sync::lock::Lock;
use blockyard_sync::rank::ranks;
use blockyard_sync::sleep_lock::SleepLock;
use rustix::fs::Access;

use crate::directory::Directory;
use crate::error::MediaError;
use crate::geometry::MediaGeometry;
use crate::head::Id;
use crate::live::Share;
use crate::log::{Log, LogPosition};
use crate::medium::Media;
use crate::overlay::{Overlay, ZonePlace};
use crate::shared_sync::SharedSync;
use crate::store::{Store, StoreFile};
use crate::superblock::{self, Superblock};
use crate::zone_word::ZoneRecord;
use crate::zone_word::{pack, settled};

/// What a kill of the process may lose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// No completed write.
    Through,
    /// Unflushed writes: a volatile write cache for conventional zones.
    Volatile {
        /// Size of the cache in bytes; when it is full, data are written back.
        bytes: u64,
    },
}

/// Options for opening a medium.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The geometry of the disk.
    pub geometry: MediaGeometry,
    /// What a kill may lose.
    pub cache: CacheMode,
    /// Capacity of the journal in records, if the disk is created now.
    pub journal_records: u32,
    /// Number of data files, if the disk is created now.
    pub data_files: u32,
}

impl Options {
    /// Default options for a geometry: a journal of 1 MiB, 16 data files.
    pub fn new(geometry: MediaGeometry) -> Options {
        let cache = CacheMode::Through;
        Options { geometry, cache, journal_records: 32_768, data_files: 16 }
    }
}

/// The in-memory state of a zone.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) record: ZoneRecord,
    /// Whether something of the zone may not be durable; the zone is then in its data file's dirty
    /// list.
    pub(crate) dirty: bool,
    /// Whether the durable state of the zone may not be empty: its data are then given up in two
    /// steps.
    pub(crate) kept: bool,
    /// Whether the zone was reset and the reset is not durable yet. Its data must stay until it is.
    /// The zone is then in its data file's `given_up` list.
    pub(crate) given_up: bool,
}

/// The lock of a zone's cell.
pub(crate) type CellLock = SleepLock<Cell, { ranks::MEDIA_ZONE }>;

/// A data file, and what has changed in it since the last flush.
#[derive(Debug)]
pub(crate) struct DataFile<F> {
    pub(crate) file: F,
    /// Syncs `file`.
    pub(crate) sync: SharedSync,
    /// Dirty zones. A zone is added under its cell's lock.
    pub(crate) dirty: SleepLock<Vec<u32>, { ranks::MEDIA_DIRTY }>,
    /// Zones whose data are to be given up. A zone is added under its cell's lock.
    pub(crate) given_up: SleepLock<Vec<u32>, { ranks::MEDIA_DIRTY }>,
    /// The volatile cache; `None` without one.
    pub(crate) overlay: Option<Overlay>,
    /// The words that survive a kill; `None` with a volatile cache.
    pub(crate) live: Option<F>,
}

/// A medium in the files of a directory.
#[derive(Debug)]
pub struct Files<S: Store = Directory> {
    pub(crate) store: S,
    pub(crate) geometry: MediaGeometry,
    pub(crate) data: Box<[DataFile<S::File>]>,
    pub(crate) cells: Box<[CellLock]>,
    /// Serializes flushes of the whole disk. Lock order: `flushing`, `giving_up`, `syncing`, `log`,
    /// then cells. A flush that holds `flushing` may wait for a sync of a data file (`sync`), which
    /// takes no lock; the lock in `sync` is a leaf.
    pub(crate) flushing: Mutex<()>,
    /// Held by a thread that gives up data, until their space is freed.
    pub(crate) giving_up: Mutex<()>,
    /// Held by a thread that syncs the journal, on behalf of all earlier writers of the journal.
    pub(crate) syncing: Mutex<()>,
    /// Held by a thread that writes to the journal; not held during a sync.
    pub(crate) log: Mutex<Log<S::File>>,
    pub(crate) journal: Arc<S::File>,
    /// The error after which nothing can be written any more.
    pub(crate) broken: OnceLock<String>,
    pub(crate) found: Vec<ZoneRecord>,
}

/// The part of a request that lies in one zone.
struct FilePiece {
    zone: u32,
    /// Offset from the start of the zone, in bytes.
    offset: u64,
    /// Start and end in the request, in bytes.
    from: usize,
    to: usize,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Files {
    /// Opens the disk in a directory, or creates one in an empty directory.
    ///
    /// # Errors
    /// If another process uses the directory, or it holds other files, a disk with another
    /// geometry, or a damaged disk.
    pub fn open(path: &Path, options: &Options) -> Result<Files, MediaError> {
        let files = Files::open_provisional(path, options)?;
        files.provisional().keep();
        Ok(files)
    }

    /// Opens the disk in a directory. A disk that this creates is removed when it is closed, unless
    /// the caller keeps [`Files::provisional`].
    ///
    /// # Errors
    /// As [`Files::open`].
    pub fn open_provisional(path: &Path, options: &Options) -> Result<Files, MediaError> {
        let files = Files::open_in(Directory::take(path)?, options)?;
        files.store.narrow();
        Ok(files)
    }

    /// Identity of the disk in a directory, which another process may have open. Nothing is
    /// changed.
    ///
    /// # Errors
    /// If the directory holds no disk, or this process may not write there.
    pub fn existing_id(path: &Path) -> Result<Id, MediaError> {
        let file = path.join(superblock::FILE);
        let failed = || MediaError::io(format!("cannot read {}", file.display()));
        let (mut bytes, most) = (Vec::new(), superblock::BYTES as u64);
        File::open(&file)
            .and_then(|file| file.take(most).read_to_end(&mut bytes))
            .map_err(failed())?;
        rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK)
            .map_err(|error| failed()(error.into()))?;
        Ok(Superblock::parse(&bytes)?.id)
    }

    /// Identity of the disk, drawn when it was created.
    pub fn id(&self) -> Id {
        locked(&self.log).id
    }

    /// Whether the disk stays if this opening created it.
    pub fn provisional(&self) -> &Provisional {
        &self.store.provisional
    }
}

impl<S: Store> Files<S> {
    /// The location of a zone.
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

    /// The volatile cache of a zone, if it has one.
    fn overlay_of(&self, zone: u32) -> Option<&Overlay> {
        let overlay = self.data_of(zone).overlay.as_ref();
        overlay.filter(|_| self.geometry.is_conventional(zone))
    }

    /// Splits a request at zone boundaries.
    fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = FilePiece> + '_ {
        let mut next = offset;
        let end = offset + len;
        std::iter::from_fn(move || {
            (next < end).then(|| {
                let zone = self.geometry.zone_at(next);
                let start = self.geometry.start_of(zone);
                let from = next;
                next = end.min(start + self.geometry.zone_bytes);
                let place = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
                FilePiece { zone, offset: from - start, from: place(from), to: place(next) }
            })
        })
    }

    /// Refuses a range beyond the disk.
    fn check_range(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.geometry.bytes => Ok(()),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{len} bytes at {offset} are not on a disk of {}", self.geometry.bytes),
            )),
        }
    }

    /// Refuses an operation after an error that left data which may never become durable.
    fn check_whole(&self) -> io::Result<()> {
        match self.broken.get() {
            None => Ok(()),
            Some(why) => Err(io::Error::other(why.clone())),
        }
    }

    /// Whether an error was latched: no more is written until the disk is opened again.
    pub fn is_latched(&self) -> bool {
        self.broken.get().is_some()
    }

    /// Latches the first write error: no more is written. A failed sync is never retried, because
    /// the system may have dropped the data and would then report success. A later opening of the
    /// disk uses what is durable; so the live files, which describe the page cache, are removed.
    fn broken(&self, what: &str, error: &io::Error) -> io::Error {
        let text = format!(
            "{}: {what} failed ({error}); nothing more is written, open the disk again",
            self.store.title()
        );
        if self.broken.set(text.clone()).is_ok() {
            tracing::error!("{text}");
            // If the removal fails, nothing can be written at all, and nothing newer is durable
            // either.
            let _ = self.remove_live();
        }
        io::Error::new(error.kind(), text)
    }

    /// Syncs a data file. An error is latched before another thread syncs the file, because that
    /// thread gets no error for the same data.
    fn sync_data(&self, data: &DataFile<S::File>) -> io::Result<()> {
        data.sync.run(|| {
            self.check_whole()?;
            data.file.sync().map_err(|error| self.broken("a sync of the data", &error))
        })
    }

    /// Marks a zone as changed and not yet durable.
    fn mark(&self, zone: u32, cell: &mut Cell) {
        if !cell.dirty {
            cell.dirty = true;
            self.data_of(zone).dirty.with(|dirty| dirty.push(zone));
        }
    }

    /// Which zones have their words in this live file.
    pub(crate) fn share(&self, number: u32) -> Share {
        Share { number, files: self.data.len() as u32 }
    }

    /// Removes the live files.
    pub(crate) fn remove_live(&self) -> io::Result<()> {
        let mut files = 0..self.data.len() as u32;
        files.try_for_each(|number| self.store.remove(&self.share(number).name()))
    }

    /// Records a zone's state where it survives a kill.
    fn note_live(&self, zone: u32, state: ZoneRecord) -> io::Result<()> {
        let Some(live) = &self.data_of(zone).live else { return Ok(()) };
        let word = pack(state).to_le_bytes();
        let noted = live.write_at(self.share(0).place_of(zone), &word);
        noted.map_err(|error| self.broken("a write of the live file", &error))
    }

    /// Makes states of zones durable whose data are durable already. Leaves out a zone that was
    /// reset since its state was read, because its data are lost. Leaves out a zone for which
    /// another thread made a later state durable.
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
        let place = self.append(&mut log, &states)?;
        drop(log);
        self.sync_log(place)
    }

    /// Records states of zones, and returns the end of the log. An error is latched while the log
    /// is locked: it may be that of a sync of the tables, which no other thread gets.
    fn append(&self, log: &mut Log<S::File>, states: &[(u32, u64)]) -> io::Result<LogPosition> {
        let logged = log.append(states);
        logged.map_err(|error| self.broken("a write of the journal", &error))?;
        Ok(log.place())
    }

    /// Makes everything durable that was recorded before a place in the log. A thread that waits
    /// for another's sync usually finds that a single further sync covers all waiting threads.
    fn sync_log(&self, place: LogPosition) -> io::Result<()> {
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

    /// Makes all resets durable, then frees the zones' space. It handles all zones together: after
    /// a reset of the whole disk, the first write causes one sync for all zones.
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
        let place = self.append(&mut log, &states)?;
        drop(log);
        self.sync_log(place)?;
        for zone in zones {
            // A thread that waits to write to the zone also waits for this.
            self.cells[zone as usize].with(|cell| {
                self.punch_whole(zone)?;
                (cell.given_up, cell.kept) = (false, false);
                Ok::<_, io::Error>(())
            })?;
        }
        Ok(())
    }

    /// Frees the space of a zone whose reset is durable. If that fails, the disk is latched: the
    /// old data must not become visible again. The next opening removes them.
    fn punch_whole(&self, zone: u32) -> io::Result<()> {
        let place = self.place(zone);
        let punched = place.file.punch(place.start, place.len);
        punched.map_err(|error| self.broken("giving space back", &error))
    }

    /// Ensures that a zone's data may be overwritten.
    fn may_overwrite(&self, zone: u32) -> io::Result<()> {
        match self.cells[zone as usize].with(|cell| cell.given_up) {
            false => Ok(()),
            true => self.give_up(),
        }
    }

    /// Writes the cached pages of some zones to their file.
    fn write_back(
        &self,
        data: &DataFile<S::File>,
        zones: std::ops::RangeInclusive<u32>,
    ) -> io::Result<()> {
        let Some(overlay) = &data.overlay else { return Ok(()) };
        let written = overlay.write_back(&data.file, zones, |zone| self.place(zone).start);
        written.map_err(|error| self.broken("a write of cached data", &error))
    }

    /// Makes everything durable, and records a clean close.
    ///
    /// # Errors
    /// If something may not be durable.
    pub fn close(self) -> io::Result<()> {
        self.shut()
    }

    /// Closes the disk; no other thread uses it any more.
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
        // A caller that needs the result uses `close`. An error is logged; after it the disk opens
        // as after a power cut.
        if self.broken.get().is_none() {
            let _ = self.shut();
        }
    }
}

impl<S: Store> Media for Files<S> {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.check_range(offset, into.len() as u64)?;
        for FilePiece { zone, offset, from, to } in self.pieces(offset, into.len() as u64) {
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
        for FilePiece { zone, offset, from, to } in self.pieces(offset, bytes.len() as u64) {
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
        for FilePiece { zone, offset, from, to } in self.pieces(offset, len) {
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
        // A zone that is finished without being written exposes the old data.
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
            // Clear the marks first: a thread that writes from here on sets them again.
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
        // A data file has only distant zones, so a range of several zones needs several syncs.
        for FilePiece { zone, .. } in self.pieces(offset, len) {
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

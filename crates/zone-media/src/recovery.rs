//! Opening a disk: restores a consistent state after a kill or a power cut.
//!
//! Under the same boot the live files are valid; otherwise the tables and the journal are. All data
//! are synced, a checkpoint is written, and then data above the zones' written ends are discarded.
//! An interruption at any point leads to the same state at the next opening.
#![allow(clippy::disallowed_types)] // Creates the locks of `files`.

use std::sync::{Arc, Mutex, OnceLock};

use blockyard_core::SECTOR_BYTES;
use blockyard_core::zone::ZoneCond;
use blockyard_sync::lock::Lock;
use blockyard_sync::sleep_lock::SleepLock;

use crate::directory::LOCK;
use crate::error::MediaError;
use crate::files::{CacheMode, Cell, DataFile, Files, Options};
use crate::head::{Id, LABEL_BYTES};
use crate::live::Share;
use crate::log::Log;
use crate::overlay::Overlay;
use crate::shared_sync::SharedSync;
use crate::store::{Store, StoreFile, load};
use crate::superblock::{JOURNAL_RECORDS_MAX, Superblock};
use crate::zone_word::ZoneRecord;
use crate::zone_word::{pack, pristine};
use crate::{data, journal, live, superblock, tables};

/// Name of the superblock until the creation of the disk is complete, and again when the disk is
/// removed.
pub(super) const SUPERBLOCK_NEW: &str = "superblock.new";

/// An I/O error with the file and the operation.
fn about<S: Store>(
    store: &S,
    doing: &str,
    name: &str,
) -> impl FnOnce(std::io::Error) -> MediaError + use<S> {
    MediaError::io(format!("cannot {doing} {}/{name}", store.title()))
}

/// The recovered state of a disk.
struct Found {
    superblock: Superblock,
    checkpoint: u64,
    /// Whether the disk was closed cleanly: nothing lies above the zones' written ends.
    clean: bool,
    records: Vec<ZoneRecord>,
}

impl<S: Store> Files<S> {
    /// Opens the disk in a store, or creates one in an empty store.
    ///
    /// # Errors
    /// If the store holds other files, a disk with another geometry, or a damaged disk.
    pub fn open_in(store: S, options: &Options) -> Result<Files<S>, MediaError> {
        options.geometry.check("the configuration")?;
        let superblock = match load(&store, superblock::FILE, superblock::BYTES as u64) {
            Ok(Some(bytes)) => Superblock::parse(&bytes)?,
            Ok(None) => make(&store, options)?,
            Err(error) => return Err(about(&store, "read", superblock::FILE)(error)),
        };
        compare(&superblock, options)?;
        // A process that was killed while it created the disk may not have synced the names.
        store.sync_names().map_err(about(&store, "sync", ""))?;
        let found = find(&store, superblock)?;
        resume(store, found, options)
    }
}

/// Checks that the disk has the requested geometry.
fn compare(superblock: &Superblock, options: &Options) -> Result<(), MediaError> {
    let asked = options.geometry.fields();
    for ((field, kept), (_, asked)) in superblock.geometry.fields().into_iter().zip(asked) {
        if kept != asked {
            return Err(MediaError::Geometry { field, kept, asked });
        }
    }
    Ok(())
}

/// Creates a disk. The superblock gets its name last: before that, the creation is not complete.
fn make<S: Store>(store: &S, options: &Options) -> Result<Superblock, MediaError> {
    let names = store.names().map_err(about(store, "list", ""))?;
    let may_stay = |name: &String| is_ours(name) && (store.may_have_remains() || name == LOCK);
    if let Some(name) = names.iter().find(|name| !may_stay(name)) {
        return Err(MediaError::Stranger { name: name.clone() });
    }
    check_remains(store, &names)?;
    let geometry = options.geometry;
    let superblock = Superblock {
        id: store.fresh_id().map_err(MediaError::io("cannot draw an identity"))?,
        geometry,
        data_files: options.data_files.clamp(1, geometry.zone_count()),
        journal_records: options.journal_records.clamp(1, JOURNAL_RECORDS_MAX),
    };
    store.begin_disk();
    let zones = geometry.zone_count();
    for number in 0..superblock.data_files {
        let share = Share { number, files: superblock.data_files };
        let name = data::name(number);
        let file = store.create(&name, data::len_bytes(&geometry, share));
        let file = file.map_err(about(store, "make", &name))?;
        // Without hole punching a disk would only grow; detect that now.
        file.punch(0, geometry.zone_bytes).map_err(about(store, "punch holes into", &name))?;
        let label = data::label(&superblock.id, number).print();
        let written = file.write_at(data::label_offset(&geometry, share), &label);
        written.map_err(about(store, "write", &name))?;
        file.sync().map_err(about(store, "sync", &name))?;
    }
    // Written explicitly: a sync of a file with allocated blocks is faster.
    let mut log = journal::label(&superblock.id).print();
    log.resize(journal::len_bytes(superblock.journal_records) as usize, 0); // At most 32 MiB.
    write_new(store, journal::FILE, &log)?;
    let words: Vec<u64> = (0..zones).map(|zone| pack(pristine(zone, &geometry))).collect();
    let table = tables::print(&superblock.id, 1, true, &words);
    let mut slots = vec![0; 2 * tables::slot_bytes(&geometry) as usize];
    let start = tables::slot_of(1, &geometry) as usize;
    slots[start..start + table.len()].copy_from_slice(&table);
    write_new(store, tables::FILE, &slots)?;
    write_new(store, SUPERBLOCK_NEW, &superblock.print())?;
    store.sync_names().map_err(about(store, "sync", ""))?;
    let renamed = store.rename(SUPERBLOCK_NEW, superblock::FILE);
    renamed.map_err(about(store, "rename", SUPERBLOCK_NEW))?;
    Ok(superblock)
}

/// Refuses files that an interrupted creation or removal has not left: those of a disk whose
/// superblock was lost, or of another program.
fn check_remains<S: Store>(store: &S, names: &[String]) -> Result<(), MediaError> {
    let read = |name: &str, len_max: u64| {
        let found = load(store, name, len_max);
        found.map(Option::unwrap_or_default).map_err(about(store, "read", name))
    };
    let begun = read(SUPERBLOCK_NEW, superblock::BYTES as u64)?;
    // No client has written to this disk: its creation or its removal was interrupted.
    if Superblock::parse(&begun).is_ok() {
        return Ok(());
    }
    if !superblock::is_begun(&begun) {
        return Err(MediaError::Stranger { name: SUPERBLOCK_NEW.to_owned() });
    }
    // A creation has written nothing else than labels and the first checkpoint by now.
    let mut is_used = !journal::is_begun(&read(journal::FILE, 2 * LABEL_BYTES as u64)?);
    for name in names {
        is_used |= if name == tables::FILE {
            let bytes = load(store, name, tables::BYTES_MAX);
            let bytes = bytes.map_err(about(store, "read", name))?;
            bytes.is_some_and(|bytes| !tables::is_begun(&bytes))
        } else if name.starts_with(data::PREFIX) {
            let is_used = store.open(name).and_then(|it| it.map_or(Ok(false), data::is_used));
            is_used.map_err(about(store, "examine", name))?
        } else {
            name.starts_with("live.")
        };
    }
    if is_used { Err(MediaError::NoSuperblock) } else { Ok(()) }
}

/// Whether an interrupted creation may have left this file.
pub(super) fn is_ours(name: &str) -> bool {
    let numbered = [data::PREFIX, "live."].into_iter().filter_map(|start| name.strip_prefix(start));
    let is_number =
        |number: &str| number.len() == 2 && number.bytes().all(|digit| digit.is_ascii_hexdigit());
    let single = [LOCK, journal::FILE, tables::FILE, SUPERBLOCK_NEW].contains(&name);
    single || numbered.into_iter().any(is_number)
}

/// Creates a file with these bytes. The contents are durable, the name is not yet.
fn write_new<S: Store>(store: &S, name: &str, bytes: &[u8]) -> Result<(), MediaError> {
    let file = store.create(name, bytes.len() as u64).map_err(about(store, "make", name))?;
    file.write_at(0, bytes).map_err(about(store, "write", name))?;
    file.sync().map_err(about(store, "sync", name))
}

/// The state of a disk according to its files.
fn find<S: Store>(store: &S, superblock: Superblock) -> Result<Found, MediaError> {
    let Superblock { id, geometry, .. } = superblock;
    let bytes = |name: &str, len| match load(store, name, len) {
        Ok(bytes) => Ok(bytes.unwrap_or_default()),
        Err(error) => Err(about(store, "read", name)(error)),
    };
    let slots = bytes(tables::FILE, 2 * tables::slot_bytes(&geometry))?;
    let table = tables::newest(&slots, &id, &geometry)?;
    let log = bytes(journal::FILE, journal::len_bytes(superblock.journal_records))?;
    let changes = journal::replay(&log, &id, table.checkpoint, &geometry)?;
    let clean = table.clean && changes.is_empty();
    let mut records = table.records;
    for (zone, record) in changes {
        records[zone as usize] = record;
    }
    let boot =
        store.boot().map_err(MediaError::io("cannot tell which run of the kernel this is"))?;
    // A clean table is newer than the live files: a close writes the table, then removes them.
    let files = if clean { 0 } else { superblock.data_files };
    for number in 0..files {
        let share = Share { number, files };
        let live = bytes(&share.name(), share.len_bytes(&geometry))?;
        let found = live::parse(&live, &id, &boot, &geometry, share)?;
        for (zone, record) in share.zones(&geometry).zip(found.into_iter().flatten()) {
            records[zone as usize] = record;
        }
    }
    Ok(Found { superblock, checkpoint: table.checkpoint, clean, records })
}

/// Opens a file of a disk. The lengths never change: if one has, something durable is missing.
fn open_existing<S: Store>(store: &S, name: &str, want: u64) -> Result<S::File, MediaError> {
    let file = store.open(name).map_err(about(store, "open", name))?;
    let file = file.ok_or(std::io::ErrorKind::NotFound.into());
    let file = file.map_err(about(store, "find", name))?;
    match file.len().map_err(about(store, "examine", name))? {
        len if len == want => Ok(file),
        len => Err(MediaError::Length { name: name.to_owned(), len, want }),
    }
}

/// Opens a data file, whose label must be that of this file of the disk.
fn open_data<S: Store>(
    store: &S,
    superblock: &Superblock,
    number: u32,
) -> Result<S::File, MediaError> {
    let Superblock { id, geometry, data_files, .. } = superblock;
    let (name, share) = (data::name(number), Share { number, files: *data_files });
    let file = open_existing(store, &name, data::len_bytes(geometry, share))?;
    let mut label = [0; LABEL_BYTES];
    let read = file.read_at(data::label_offset(geometry, share), &mut label);
    read.map_err(about(store, "read", &name))?;
    data::label(id, number).check(&name, &label)?;
    Ok(file)
}

/// Continues with a disk in its recovered state.
fn resume<S: Store>(store: S, found: Found, options: &Options) -> Result<Files<S>, MediaError> {
    let Found { superblock, checkpoint, clean, records } = found;
    let Superblock { id, geometry, data_files, journal_records } = superblock;
    let open = |name: &str, len: u64| open_existing(&store, name, len);
    let mut data = Vec::with_capacity(data_files as usize);
    for number in 0..data_files {
        let overlay = match options.cache {
            CacheMode::Through => None,
            CacheMode::Volatile { bytes } => Some(Overlay::new(bytes / u64::from(data_files))),
        };
        let file = open_data(&store, &superblock, number)?;
        let sync = SharedSync::default();
        let (dirty, given_up) = (SleepLock::new(Vec::new()), SleepLock::new(Vec::new()));
        data.push(DataFile { file, sync, dirty, given_up, overlay, live: None });
    }
    let journal = Arc::new(open(journal::FILE, journal::len_bytes(journal_records))?);
    let log = Log {
        journal: Arc::clone(&journal),
        tables: open(tables::FILE, 2 * tables::slot_bytes(&geometry))?,
        id,
        slot_bytes: tables::slot_bytes(&geometry),
        image: records.iter().map(|record| pack(*record)).collect(),
        checkpoint,
        next: 0,
        durable: 0,
        room: journal_records,
    };
    let cells = records.iter().map(|record| {
        let kept = record.cond != ZoneCond::Empty;
        SleepLock::new(Cell { record: *record, dirty: false, kept, given_up: false })
    });
    let cells = cells.collect();
    let mut files = Files {
        store,
        geometry,
        data: data.into_boxed_slice(),
        cells,
        flushing: Mutex::new(()),
        giving_up: Mutex::new(()),
        syncing: Mutex::new(()),
        journal,
        log: Mutex::new(log),
        broken: OnceLock::new(),
        found: records,
    };
    if !clean {
        for data in &files.data {
            data.file.sync().map_err(about(&files.store, "sync", "data"))?;
        }
    }
    let log = files.log.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
    // Sync first: a killed process may have written the newer table without a sync. The checkpoint
    // overwrites the other slot, which is the durable one in that case.
    log.tables.sync().map_err(about(&files.store, "sync", tables::FILE))?;
    log.checkpoint(false).map_err(about(&files.store, "write", tables::FILE))?;
    if !clean {
        files.forget_beyond()?;
    }
    match options.cache {
        CacheMode::Through => files.start_live()?,
        CacheMode::Volatile { .. } => {
            files.remove_live().map_err(about(&files.store, "remove", live::FILE))?;
        }
    }
    Ok(files)
}

impl<S: Store> Files<S> {
    /// Discards data above the zones' written ends. The written data are durable by now. Under the
    /// same boot a zone may have less written than was durable before, as after a reset.
    fn forget_beyond(&self) -> Result<(), MediaError> {
        for (zone, record) in (0..).zip(&self.found) {
            if !matches!(record.cond, ZoneCond::Empty | ZoneCond::Closed) {
                continue;
            }
            let place = self.place(zone);
            let written = record.written_sectors * SECTOR_BYTES;
            let (offset, len) = (place.start + written, place.len.saturating_sub(written));
            let punched = place.file.punch(offset, len);
            punched.map_err(about(&self.store, "punch holes into", "data"))?;
        }
        Ok(())
    }

    /// Writes new live files: the words, then the head that makes them valid. The checkpoint with
    /// the same words is durable, so an incomplete file loses nothing.
    fn start_live(&mut self) -> Result<(), MediaError> {
        let store = &self.store;
        let id = locked_id(&mut self.log);
        let boot = store.boot();
        let boot = boot.map_err(MediaError::io("cannot tell which run of the kernel this is"))?;
        let files = self.data.len() as u32;
        for (number, data) in (0..).zip(&mut self.data) {
            let share = Share { number, files };
            let (name, zones) = (share.name(), share.zones(&self.geometry));
            let head = live::print_head(&id, &boot, &self.geometry, share);
            let words = zones.flat_map(|zone| pack(self.found[zone as usize]).to_le_bytes());
            let words: Vec<u8> = words.collect();
            let file = store.create(&name, share.len_bytes(&self.geometry));
            let file = file.map_err(about(store, "make", &name))?;
            let written = file.write_at(live::WORDS, &words).and_then(|()| file.write_at(0, &head));
            written.map_err(about(store, "write", &name))?;
            data.live = Some(file);
        }
        Ok(())
    }
}

/// The identity of the disk.
fn locked_id<F>(log: &mut Mutex<Log<F>>) -> Id {
    log.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).id
}

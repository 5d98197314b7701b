//! The local log: files on a disk of this machine with the batches that the object store lacks.
//!
//! A sync of a pool that is open with `ack=local` appends to the file of each batch what the batch
//! got since the sync before ([`format`](blockyard_volume_format::object::local_log)), and syncs
//! the file. When the object store has the batch and all batches before it, the file becomes a
//! *spare*, which a later batch uses again, or is removed. A sync of a file whose blocks were
//! written before changes nothing but its data: the file system has no journal to write.
//!
//! If the process ends before, the files stay. The next opening on this machine creates the batches
//! in the object store, under their names, before it takes a new epoch ([`upload_left`]). If
//! another opener has sealed the epoch meanwhile, the batches from the seal on are lost.
//!
//! # Invariants
//!
//! 1. The name of a file is durable before anything is written into the file, and all of its groups
//!    are synced before the next file is made. So an intact group proves that everything before it
//!    was durable, and the head of a file says where the file before it ends.
//! 2. All batches of the epoch before the first file are in the object store.
//! 3. After an error nothing is appended any more. From then on syncs wait for the object store.
//! 4. A file is only used again by the opener that made it, for a later batch. An opening removes
//!    the spares of earlier ones.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::mem::take;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use blockyard_core::owner_only;
use blockyard_os::{AtomicFile, Replace};
use blockyard_store::StoreError;
use blockyard_store::remote::LostWrites;
use blockyard_volume_format::object::batch::{BatchRecord, LaterBatches};
use blockyard_volume_format::object::local_log::{
    self as format, GroupsEnd, HEAD_BYTES, LogFile, LogHead,
};
use blockyard_volume_format::object::manifest::Manifest;
use blockyard_volume_format::object::{ObjectHeader, ObjectId, ObjectKind};
use bytes::Bytes;

use crate::bucket_error::BucketError;
use crate::client::{Created, ObjectClient};

/// What the name of a file begins with whose batch is lost.
const LOST: &str = "lost-";

/// What the name of a spare begins with.
const SPARE: &str = "spare-";

/// Most spares. The number of batches that are being uploaded changes by a few.
const SPARES_MAX: usize = 4;

/// Most bytes of memory that a group keeps for the next one. One with more is rare.
const KEPT_BYTES: usize = 1 << 20;

/// What a batch got since its group before.
#[derive(Debug)]
pub(crate) struct LogGroup {
    /// The number of the batch.
    pub(crate) number: u64,
    /// What the groups of the batch before have.
    pub(crate) before: GroupsEnd,
    pub(crate) records: Vec<BatchRecord>,
    pub(crate) payload: Bytes,
}

impl LogGroup {
    /// What the groups of the batch have with this one.
    fn end(&self) -> GroupsEnd {
        GroupsEnd {
            records: self.before.records + self.records.len(),
            payload_bytes: self.before.payload_bytes + self.payload.len(),
        }
    }
}

/// The log of an open pool.
#[derive(Debug)]
pub(crate) struct LocalLog {
    directory: PathBuf,
    /// The header of the batches of this opener, but the number.
    header: ObjectHeader,
    /// The file that was written last.
    last: Option<OpenFile>,
    /// How far the batches are in the log: the number of a batch, and what its groups have.
    end: (u64, GroupsEnd),
    /// The memory of a group that is being written.
    bytes: Vec<u8>,
    /// Batches below this number have no file.
    removed: u64,
    /// The number of spares, which are numbered from 0.
    spares: usize,
    has_failed: bool,
}

#[derive(Debug)]
struct OpenFile {
    number: u64,
    file: File,
    /// The bytes of its head and groups.
    len_bytes: u64,
}

impl LocalLog {
    /// The log of an opener in a directory without files of earlier ones, but this number of spares
    /// ([`make_first_spare`]).
    pub(crate) fn new(directory: &Path, header: ObjectHeader, spares: usize) -> LocalLog {
        LocalLog {
            directory: directory.to_owned(),
            header,
            last: None,
            end: (0, GroupsEnd::default()),
            bytes: Vec::new(),
            removed: 0,
            spares,
            has_failed: false,
        }
    }

    /// How far the batches are in the log: the number of a batch, and what its groups have. `None`
    /// after an error.
    pub(crate) fn end(&self) -> Option<(u64, GroupsEnd)> {
        (!self.has_failed).then_some(self.end)
    }

    /// Makes groups durable, each after the one before it. Returns whether they are.
    pub(crate) fn append(&mut self, groups: &[LogGroup], title: &str) -> bool {
        for group in groups {
            if self.has_failed {
                break;
            }
            let mut bytes = take(&mut self.bytes);
            let header = ObjectHeader { number: group.number, ..self.header };
            format::append(&mut bytes, &header, group.before, (&group.records, &group.payload));
            match self.write_group(group.number, &bytes) {
                Ok(()) => self.end = (group.number, group.end()),
                Err(error) => {
                    self.has_failed = true;
                    tracing::error!(
                        "{title}: cannot write the local log `{}`: {error}; each sync waits for \
                         the object store until the pool is opened again",
                        self.directory.display()
                    );
                }
            }
            bytes.clear();
            bytes.shrink_to(KEPT_BYTES);
            self.bytes = bytes;
        }
        !self.has_failed
    }

    fn write_group(&mut self, number: u64, bytes: &[u8]) -> io::Result<()> {
        let mut open = match self.last.take() {
            Some(open) if open.number == number => open,
            _ => self.begin_file(number)?,
        };
        open.file.write_all_at(bytes, open.len_bytes)?;
        open.file.sync_data()?;
        open.len_bytes += bytes.len() as u64;
        self.last = Some(open);
        Ok(())
    }

    /// Begins the file of a batch: a spare if there is one.
    fn begin_file(&mut self, number: u64) -> io::Result<OpenFile> {
        let path = self.directory.join(format::name(self.header.epoch, number));
        let file = match self.use_spare(&path)? {
            Some(file) => file,
            None => owner_only::make_options().create_new(true).open(&path)?,
        };
        owner_only::sync_directory(&self.directory)?;
        let header = ObjectHeader { number, ..self.header };
        let head = LogHead { header, before: self.end }.print();
        file.write_all_at(&head, 0)?;
        Ok(OpenFile { number, file, len_bytes: head.len() as u64 })
    }

    /// Gives a spare this name, if there is one.
    fn use_spare(&mut self, path: &Path) -> io::Result<Option<File>> {
        let Some(last) = self.spares.checked_sub(1) else { return Ok(None) };
        if path.try_exists()? {
            return Err(ErrorKind::AlreadyExists.into());
        }
        self.spares = last;
        match std::fs::rename(spare(&self.directory, last), path) {
            // Another program has removed it.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            renamed => renamed.and_then(|()| File::options().write(true).open(path)).map(Some),
        }
    }

    /// Removes the files of batches below a number, which the object store has, or makes them
    /// spares.
    pub(crate) fn remove_below(&mut self, number: u64) {
        while self.removed < number {
            let path = self.directory.join(format::name(self.header.epoch, self.removed));
            let is_wanted = self.spares < SPARES_MAX && !self.has_failed;
            let spare = spare(&self.directory, self.spares);
            if is_wanted && std::fs::rename(&path, spare).is_ok() {
                self.spares += 1;
            } else if let Err(error) = std::fs::remove_file(&path)
                && error.kind() != ErrorKind::NotFound
            {
                // Not every batch has a file. A file that stays is tried again with the next one.
                break;
            }
            self.removed += 1;
        }
    }

    /// Removes the spares: the pool is closed.
    pub(crate) fn remove_spares(&mut self) {
        remove_spares(&self.directory);
        self.spares = 0;
    }
}

fn spare(directory: &Path, number: usize) -> PathBuf {
    directory.join(format!("{SPARE}{number}"))
}

/// Makes the first spare in a directory, for batches of this length. Returns the number of spares.
pub(crate) fn make_first_spare(directory: &Path, batch_bytes: usize) -> usize {
    // The heads of groups and the last write of a batch come on top.
    match make_spare(&spare(directory, 0), batch_bytes + batch_bytes / 8) {
        Ok(()) => 1,
        Err(error) => {
            remove_spares(directory);
            tracing::warn!(
                "cannot prepare a file of the local log in `{}`: {error}; syncs take longer until \
                 the first batches are uploaded",
                directory.display()
            );
            0
        }
    }
}

/// Makes a file of zeros whose blocks are written.
fn make_spare(path: &Path, len_bytes: usize) -> io::Result<()> {
    let mut file = owner_only::make_options().truncate(true).open(path)?;
    io::copy(&mut io::repeat(0).take(len_bytes as u64), &mut file)?;
    file.sync_data()
}

/// Removes the spares in a directory. One that cannot be removed takes space, and nothing else.
pub(crate) fn remove_spares(directory: &Path) {
    for number in 0..SPARES_MAX {
        _ = std::fs::remove_file(spare(directory, number));
    }
}

fn failed(directory: &Path) -> impl Fn(io::Error) -> BucketError {
    let doing = format!("cannot use the local log `{}`", directory.display());
    move |source| StoreError::Io { doing: doing.clone(), source }.into()
}

/// Makes the directory of a log if there is none, `STATE/object/POOL/log`. The names of all four
/// become durable: an earlier opening may have made some of them.
pub(crate) fn make_directory(directory: &Path) -> Result<(), BucketError> {
    let made = owner_only::create_dir_all_durably(directory);
    made.and_then(|()| owner_only::sync_names_above(directory, 4)).map_err(failed(directory))
}

/// The file with the random numbers of the last openers with this directory, a line for each, in 32
/// hexadecimal digits. There are several if openings were interrupted.
const OPENERS: &str = "id";

/// The random numbers of the last openers with a directory; none if there was no opener yet.
pub(crate) fn identities(directory: &Path) -> Result<Vec<WriterId>, BucketError> {
    match std::fs::read_to_string(directory.join(OPENERS)) {
        // What a damaged line stood for may be missing.
        Ok(text) => Ok(text
            .lines()
            .filter_map(|line| u128::from_str_radix(line, 16).ok().map(u128::to_be_bytes))
            .collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed(directory)(error)),
    }
}

/// Replaces the numbers of the last openers, durably. An opener adds its own before it takes an
/// epoch, and removes the others when it has it, or its own if it has not: at any moment the file
/// has the number of the last opener with this directory that has taken one.
pub(crate) fn set_identities(directory: &Path, ids: &[WriterId]) -> Result<(), BucketError> {
    let make = || {
        let file = AtomicFile::create(&directory.join(OPENERS), Replace::Any, &[])?;
        for id in ids {
            writeln!(file.file(), "{:032x}", u128::from_be_bytes(*id))?;
        }
        file.commit()
    };
    make().map_err(failed(directory))
}

/// Leaves a directory after an opening that failed: without spares, and with the numbers of the
/// last openers. What cannot be removed, or a longer list, takes space, and nothing else.
pub(crate) fn leave(directory: &Path, ids: &[WriterId]) {
    remove_spares(directory);
    _ = set_identities(directory, ids);
}

/// The files of lost batches in a directory. One that cannot be read is none.
pub(crate) fn lost(directory: &Path) -> LostWrites {
    let mut lost = LostWrites::default();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(LOST)) {
            lost.files += 1;
            lost.bytes += entry.metadata().map_or(0, |found| found.len());
        }
    }
    lost
}

/// The epochs and numbers of the batches that have files in a directory, in ascending order.
fn list(directory: &Path) -> Result<Vec<(u64, u64)>, BucketError> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed(directory))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed(directory))?.file_name();
        found.extend(name.to_str().and_then(format::parse_name));
    }
    found.sort_unstable();
    Ok(found)
}

/// Whether a directory has batches that the object store may lack.
pub(crate) fn has_batches(directory: &Path) -> Result<bool, BucketError> {
    Ok(!list(directory)?.is_empty())
}

/// The batches of an epoch that an opener of this machine has logged and the object store lacks: it
/// has those below `first`. A process that only reads the pool replays them after those.
pub(crate) fn left_after(
    directory: &Path,
    manifest: &Manifest,
    (epoch, first): (u64, u64),
) -> Result<Vec<(u64, Bytes)>, BucketError> {
    let files = list(directory)?;
    let files: Vec<(u64, u64)> =
        files.into_iter().filter(|file| file.0 == epoch && file.1 >= first).collect();
    let place = LogPlace { manifest, directory, epoch };
    let numbers: Vec<u64> = files.iter().map(|file| file.1).collect();
    let writer = place.check_writer(&numbers)?;
    let mut batches = Vec::new();
    for (index, number) in numbers.iter().copied().enumerate() {
        if number != first + index as u64 {
            return Err(place.damaged(first + index as u64, "is missing"));
        }
        if let Some((file, _)) = place.read(number, &numbers[index + 1..], writer)? {
            batches.push((number, file.batch(LaterBatches::Ignored).into()));
        }
    }
    Ok(batches)
}

/// The object in the place of a batch.
enum ObjectFound {
    /// A batch of the opener of the log.
    Batch,
    Seal,
    None,
}

/// The random number of an opener.
type WriterId = [u8; 16];

/// Creates the batches of the log of an earlier opener of this machine in the object store, and
/// removes the log. A crash in between repeats it.
///
/// If another machine opens the pool meanwhile, the name of each batch has either the batch, which
/// that machine replays, or its seal.
pub(crate) async fn upload_left(
    client: &ObjectClient,
    manifest: &Manifest,
    directory: &Path,
) -> Result<(), BucketError> {
    let files = list(directory)?;
    for epoch in files.chunk_by(|one, next| one.0 == next.0) {
        let numbers: Vec<u64> = epoch.iter().map(|(_, number)| *number).collect();
        let place = LogPlace { manifest, directory, epoch: epoch[0].0 };
        let left = Left { client, place };
        left.upload(&numbers).await?;
    }
    Ok(())
}

/// The files of one epoch.
#[derive(Clone, Copy)]
struct LogPlace<'a> {
    manifest: &'a Manifest,
    directory: &'a Path,
    epoch: u64,
}

impl LogPlace<'_> {
    fn path(&self, number: u64) -> PathBuf {
        self.directory.join(format::name(self.epoch, number))
    }

    /// The opener of the log, as the first intact head names it. The manifest names it too if the
    /// epoch is the newest one, or its batches are still to be replayed.
    fn check_writer(&self, numbers: &[u64]) -> Result<Option<WriterId>, BucketError> {
        let is_newest = self.epoch == self.manifest.epoch;
        for number in numbers {
            if let Some(LogHead { header, .. }) = self.head(*number)? {
                return match is_newest && header.writer != self.manifest.writer {
                    true => Err(self.foreign(*number)),
                    false => Ok(Some(header.writer)),
                };
            }
        }
        let mark = || self.manifest.logs.iter().find(|mark| mark.epoch == self.epoch);
        let newest = is_newest.then_some(self.manifest.writer);
        Ok(newest.or_else(|| mark().map(|mark| mark.log)))
    }

    /// The head of the file of a batch; `None` if it is not intact, or that of another batch.
    fn head(&self, number: u64) -> Result<Option<LogHead>, BucketError> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES);
        let read = File::open(self.path(number))
            .and_then(|file| file.take(HEAD_BYTES as u64).read_to_end(&mut bytes));
        read.map_err(failed(self.directory))?;
        let id = (self.epoch, number);
        Ok(LogHead::parse(&bytes).ok().filter(|it| (it.header.epoch, it.header.number) == id))
    }

    /// The file of a batch, and the bytes in it that are of no use. `None` if nothing of it was
    /// durable.
    fn parse(
        &self,
        number: u64,
        writer: Option<WriterId>,
    ) -> Result<(Option<LogFile>, usize), BucketError> {
        let bytes = std::fs::read(self.path(number)).map_err(failed(self.directory))?;
        let file = LogFile::parse(&bytes, (self.epoch, number), writer);
        let file = file.map_err(|error| self.damaged(number, &error.to_string()))?;
        if file.as_ref().is_some_and(|file| file.head.header.pool != self.manifest.mark()) {
            return Err(self.damaged(number, "belongs to another pool"));
        }
        let torn_bytes = match &file {
            Some(file) => file.torn_bytes,
            None if LogHead::parse(&bytes).is_ok() => 0,
            None if bytes.iter().take(HEAD_BYTES).all(|byte| *byte == 0) => 0,
            None => bytes.len(),
        };
        Ok((file, torn_bytes))
    }

    /// The file of a batch that the object store lacks, and what its batch says of later ones;
    /// `None` if nothing of it was durable. `later` are the files after it. Each of them was begun
    /// when all of the file before it was durable.
    fn read(
        &self,
        number: u64,
        later: &[u64],
        writer: Option<WriterId>,
    ) -> Result<Option<(LogFile, LaterBatches)>, BucketError> {
        let (file, torn_bytes) = self.parse(number, writer)?;
        let is_last = match *later {
            [] => true,
            [last] => file.is_some() && self.parse(last, writer)?.0.is_none(),
            _ => false,
        };
        let is_damaged =
            || self.damaged(number, "is damaged at its end, and a later file is there");
        if !is_last {
            let Some(LogHead { before, .. }) = self.head(later[0])? else {
                return Err(self.damaged(later[0], "is damaged at its beginning"));
            };
            if file.as_ref().is_none_or(|file| (number, file.end()) != before) {
                return Err(is_damaged());
            }
        } else if torn_bytes > 0 && !later.is_empty() {
            // The last file has nothing, but it was named when all of this one was durable.
            return Err(is_damaged());
        } else if torn_bytes > 0 {
            // Nothing tells a write that was interrupted from damage of the last one.
            tracing::warn!(
                "`{}`: {torn_bytes} bytes at the end of the local log are not used: a write that \
                 was interrupted, and not acknowledged, unless the disk has damaged them",
                self.path(number).display()
            );
        }
        // The last file may lack what its batch got after the last sync. A later batch of the ended
        // process may still arrive, and must not be replayed without that.
        let replayed = if is_last { LaterBatches::Ignored } else { LaterBatches::Replayed };
        Ok(file.filter(|file| !file.records.is_empty()).map(|file| (file, replayed)))
    }

    /// The error for the log of an opener of a copy of the pool.
    fn foreign(&self, number: u64) -> BucketError {
        self.damaged(number, "is of another opener than the one that had this epoch of the pool")
    }

    fn damaged(&self, number: u64, why: &str) -> BucketError {
        let path = self.path(number).display().to_string();
        BucketError::LocalLog { path, why: why.to_owned() }
    }
}

/// The files of one epoch that an earlier opener has left.
struct Left<'a> {
    client: &'a ObjectClient,
    place: LogPlace<'a>,
}

impl Left<'_> {
    async fn upload(&self, numbers: &[u64]) -> Result<(), BucketError> {
        let replay =
            self.place.manifest.replays.iter().find(|replay| replay.epoch == self.place.epoch);
        let lost_from = match replay {
            Some(replay) => self.create(numbers, replay.first).await?,
            // A later opener has sealed the epoch, and a compaction has removed its batches.
            None => self.find_seal(numbers).await?,
        };
        let lost = numbers.partition_point(|number| lost_from.is_none_or(|from| *number < from));
        let (there, lost) = numbers.split_at(lost);
        for number in there {
            std::fs::remove_file(self.place.path(*number)).map_err(failed(self.place.directory))?;
        }
        self.set_aside(lost)
    }

    /// Creates the batches, of which the manifest's table has those below `first`. Returns the
    /// number of the seal, if the epoch has one.
    async fn create(&self, numbers: &[u64], first: u64) -> Result<Option<u64>, BucketError> {
        let numbers = &numbers[numbers.partition_point(|number| *number < first)..];
        let Some(lowest) = numbers.first().copied() else { return Ok(None) };
        let writer = self.place.check_writer(numbers)?;
        if lowest > first {
            match self.find(lowest - 1, writer).await? {
                ObjectFound::Batch => {}
                ObjectFound::Seal => return Ok(Some(lowest - 1)),
                ObjectFound::None => return Err(self.place.damaged(lowest - 1, "is missing")),
            }
        }
        let mut expected = lowest;
        for (index, number) in numbers.iter().copied().enumerate() {
            // The file of an uploaded batch before may not have been removed.
            for missing in expected..number {
                match self.find(missing, writer).await? {
                    ObjectFound::Batch => {}
                    ObjectFound::Seal => return Ok(Some(missing)),
                    ObjectFound::None => return Err(self.place.damaged(missing, "is missing")),
                }
            }
            expected = number + 1;
            let mut found = self.find(number, writer).await?;
            if let ObjectFound::None = found
                && let Some((file, later)) =
                    self.place.read(number, &numbers[index + 1..], writer)?
            {
                found = self.create_batch(number, (file.batch(later).into(), writer)).await?;
            }
            if let ObjectFound::Seal = found {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    async fn create_batch(
        &self,
        number: u64,
        (bytes, writer): (Bytes, Option<WriterId>),
    ) -> Result<ObjectFound, BucketError> {
        let name = ObjectId::batch(self.place.epoch, number).to_string();
        match self.client.create(&name, &bytes).await? {
            Created::New { .. } => {
                tracing::info!("{}: uploaded `{name}` from the local log", self.client.title());
                Ok(ObjectFound::Batch)
            }
            Created::Taken(other) => self.identify(number, &other.bytes, writer),
        }
    }

    /// The number of the seal of an epoch whose batches may be removed. A seal is never removed. If
    /// files are lost, it is at the number of the first of them. That file has another name already
    /// if an earlier opening was interrupted, so the number before the first file is asked, too.
    async fn find_seal(&self, numbers: &[u64]) -> Result<Option<u64>, BucketError> {
        if self.place.epoch > self.place.manifest.epoch {
            return Err(self
                .place
                .damaged(numbers[0], "is newer than the pool in the object store"));
        }
        let before = numbers[0].checked_sub(1);
        for number in before.into_iter().chain(numbers.iter().copied()) {
            if let ObjectFound::Seal = self.find(number, None).await? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    async fn find(
        &self,
        number: u64,
        writer: Option<WriterId>,
    ) -> Result<ObjectFound, BucketError> {
        let name = ObjectId::batch(self.place.epoch, number).to_string();
        match self.client.get(&name, None).await? {
            Some(object) => self.identify(number, &object.bytes, writer),
            None => Ok(ObjectFound::None),
        }
    }

    fn identify(
        &self,
        number: u64,
        bytes: &[u8],
        writer: Option<WriterId>,
    ) -> Result<ObjectFound, BucketError> {
        let name = ObjectId::batch(self.place.epoch, number).to_string();
        let (header, _) = ObjectHeader::parse(bytes).map_err(BucketError::of_object(&name))?;
        let is_ours = header.pool == self.place.manifest.mark()
            && (header.epoch, header.number) == (self.place.epoch, number);
        match header.kind {
            ObjectKind::Batch if is_ours && writer.is_some_and(|it| it != header.writer) => {
                Err(self.place.foreign(number))
            }
            ObjectKind::Batch if is_ours => Ok(ObjectFound::Batch),
            ObjectKind::Seal if is_ours => Ok(ObjectFound::Seal),
            _ => Err(BucketError::Foreign { name }),
        }
    }

    /// Says what is lost, and keeps the files of lost batches under other names. The first file is
    /// renamed last, so that a repetition after a crash finds the seal at its number.
    fn set_aside(&self, lost: &[u64]) -> Result<(), BucketError> {
        let (mut batches, mut bytes) = (0, 0);
        let writer = self.place.check_writer(lost).unwrap_or_default();
        for number in lost {
            let path = self.place.path(*number);
            let contents = std::fs::read(&path).map_err(failed(self.place.directory))?;
            match LogFile::parse(&contents, (self.place.epoch, *number), writer) {
                Ok(Some(file)) => {
                    batches += u64::from(!file.records.is_empty());
                    bytes += file.payload.len();
                    // What an earlier batch has left in the file is not lost.
                    let used_bytes = (file.len_bytes + file.torn_bytes) as u64;
                    let open = File::options().write(true).open(&path);
                    let cut = open.and_then(|file| file.set_len(used_bytes));
                    cut.map_err(failed(self.place.directory))?;
                }
                Ok(None) => {}
                Err(_) => batches += 1,
            }
        }
        if batches > 0 {
            tracing::error!(
                "{}: another machine has taken over the pool: {batches} batches with {bytes} bytes \
                 of writes, which were in the local log of this machine alone, are lost; their \
                 files are kept as `{}`",
                self.client.title(),
                self.place.directory.join(format!("{LOST}{:016x}-*", self.place.epoch)).display()
            );
        }
        for number in lost.iter().rev() {
            let name = format!("{LOST}{}", format::name(self.place.epoch, *number));
            let renamed =
                std::fs::rename(self.place.path(*number), self.place.directory.join(name));
            renamed.map_err(failed(self.place.directory))?;
        }
        Ok(())
    }
}

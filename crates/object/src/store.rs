//! A pool in an object store as a [`SegmentStore`]: its files, its location, the log writer and the
//! reads.

#![allow(clippy::disallowed_types)] // A request to an object store takes far longer than a lock.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockyard_store::disk::{SEGMENT_BYTES_MIN, SEGMENTS_WANTED, shorter};
use blockyard_store::log_writer::Ended;
use blockyard_store::remote::UploadStatus;
use blockyard_store::{
    Durability, EventFd, Layout, LeaseTerm, LogWriter, SegmentFiles, SegmentStore, Serving,
    StoreError, StoreFile, StoreLocation, WriteBatch,
};
use blockyard_sync::event_count::{EventCount, Waker};
use blockyard_volume_format::object::batch::{
    BatchOperation, BatchRecord, SUPERBLOCK, SUPERBLOCK_BYTES_MAX,
};
use blockyard_volume_format::object::manifest::Manifest;
use blockyard_volume_format::object::{FOLDERS, LEASE, ObjectHeader};
use blockyard_volume_format::{segment_name, superblock};
use tokio::runtime::Runtime;
use tokio::sync::Notify;

use crate::BucketSettings;
use crate::bucket_error::BucketError;
use crate::cache::ObjectCache;
use crate::client::ObjectClient;
use crate::journal::{Journal, Lag, State, SyncPoint};
use crate::lease::{self, Earlier, LeaseKeeper};
use crate::local_log::{self, LocalLog};
use crate::preflight::preflight;
use crate::reads::{BucketReads, ReadThreads};
use crate::recovery::{self, Look, OwnLog};
use crate::requests::Requests;

/// Fewest segments of a pool. A smaller capacity is refused.
const SEGMENTS_MIN: u64 = 16;

/// Most write batches in flight, of which all but the last are long: the committer begins no other
/// one while a short one is in flight.
const DEPTH: usize = 16;

/// The number of a file of this name.
fn number_of(name: &str) -> Option<u32> {
    if name == superblock::FILE {
        return Some(SUPERBLOCK);
    }
    let number = u32::from_str_radix(name.strip_prefix("segment-")?, 16).ok()?;
    (segment_name(number as usize) == name).then_some(number)
}

/// A file that was made and has no permanent name yet: nothing of it is in the journal.
#[derive(Debug, Default)]
struct NewFile {
    len: u64,
    writes: Vec<(u64, Vec<u8>)>,
}

type NewFiles = Arc<Mutex<BTreeMap<String, NewFile>>>;

/// Whether there is a pool.
///
/// # Errors
/// If the object store does not say so.
pub(crate) fn has_pool(
    client: &Arc<ObjectClient>,
    keep_bytes: usize,
    runtime: &Runtime,
) -> Result<bool, BucketError> {
    runtime.block_on(async {
        match recovery::manifest(client).await? {
            Some((manifest, _)) => Ok(!recovery::is_empty(client, &manifest, keep_bytes).await?),
            None => Ok(false),
        }
    })
}

/// The ID of the pool, if there is one.
///
/// # Errors
/// If the object store does not say so.
pub(crate) fn pool_id(
    client: &ObjectClient,
    runtime: &Runtime,
) -> Result<Option<[u8; 16]>, BucketError> {
    Ok(runtime.block_on(recovery::manifest(client))?.map(|(manifest, _)| manifest.id))
}

fn no_pool(client: &ObjectClient) -> BucketError {
    BucketError::NoPool { place: client.title().to_owned() }
}

/// Refuses a place that has objects of a pool whose manifest is missing. Other objects are none of
/// the pool's: those of a preflight, another pool below this place, or files of other programs.
async fn check_unused(client: &ObjectClient) -> Result<(), BucketError> {
    let mut found = lease::get(client).await?.map(|_| LEASE.to_owned());
    for folder in FOLDERS {
        if found.is_none() {
            found = client.first_in(folder).await?;
        }
    }
    match found {
        // Another opener may have made a pool meanwhile.
        Some(name) if recovery::manifest(client).await?.is_none() => {
            Err(BucketError::NoManifest { place: client.title().to_owned(), name })
        }
        _ => Ok(()),
    }
}

/// Refuses an object store whose conditional writes do not keep a second opener out.
async fn check_fence(client: &ObjectClient) -> Result<(), BucketError> {
    let report = preflight(client).await?;
    match report.failure() {
        None => Ok(()),
        Some(failure) => {
            let (place, failure) = (client.title().to_owned(), failure.to_owned());
            Err(BucketError::Unfenced { place, failure })
        }
    }
}

/// How a pool is opened for use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Opening<'a> {
    /// The ID of the pool that was found, or of the one that this opening makes; `None`: any.
    pub id: Option<[u8; 16]>,
    /// The directory of the cache.
    pub cache: Option<&'a Path>,
    /// The directory of the local log. What an earlier opener has left there is uploaded first.
    /// Without it the object store acknowledges each sync.
    pub log: Option<&'a Path>,
    /// Most bytes of a pool that this opening makes; `None`: an existing pool is expected.
    pub capacity_bytes: Option<u64>,
    /// Take over a pool that another process may have open. Without it such a pool is refused.
    pub take_over: bool,
    /// The epoch of the opener whose lease this process has claimed, or in which this machine had
    /// the pool last: no other opener may have come after it.
    pub after: Option<u64>,
    /// Without a lease of its own, this opener keeps that of the opener before.
    pub keeps_lease: bool,
}

impl Opening<'_> {
    /// The capacity of the pool to be made.
    fn capacity(&self, client: &ObjectClient) -> Result<u64, BucketError> {
        let capacity = self.capacity_bytes.ok_or_else(|| no_pool(client))?;
        check_capacity(capacity)?;
        Ok(capacity)
    }

    /// Replays the epochs before the one that this opener has taken. Renews the lease meanwhile.
    async fn replay(
        &self,
        client: &Arc<ObjectClient>,
        (new, look): ((Manifest, String), Option<Look>),
        mut settings: BucketSettings,
    ) -> Result<(State, OwnLease), BucketError> {
        let header = recovery::header_of(&new.0);
        if settings.lease.is_none() {
            let earlier = if self.keeps_lease { Earlier::Kept } else { Earlier::Withdrawn };
            settings.lease = lease::inherit(client, &header, earlier).await?;
        }
        let mut lease = OwnLease::new(client, header, settings);
        let replay = recovery::replay(client, new, look, settings.keep_bytes);
        let state = match &mut lease.keeping {
            None => replay.await?,
            Some(keeping) => tokio::select! {
                biased;
                why = keeping => return Err(BucketError::Lost { why }),
                state = replay => state?,
            },
        };
        lease.wait_until_confirmed(client.title()).await?;
        Ok((state, lease))
    }

    /// Finds the pool, or makes it. Returns its manifest, and the entity tag of it.
    async fn find(
        &self,
        client: &Arc<ObjectClient>,
        (id, writer): ([u8; 16], [u8; 16]),
        keep_bytes: usize,
    ) -> Result<(Manifest, String), BucketError> {
        let found = match recovery::manifest(client).await? {
            Some(found) => found,
            None => {
                let capacity = self.capacity(client)?;
                check_unused(client).await?;
                check_fence(client).await?;
                let made = recovery::make(client, (id, writer), capacity).await?;
                if made.0.id == id {
                    return Ok(made);
                }
                // Another opener made a pool meanwhile.
                made
            }
        };
        // This process has locked another pool.
        if self.id.is_some_and(|id| id != found.0.id) {
            return Err(BucketError::Replaced { place: client.title().to_owned() });
        }
        let is_same = self.capacity_bytes.is_none_or(|bytes| bytes == found.0.capacity_bytes);
        if self.take_over && is_same {
            return Ok(found);
        }
        // The remains of an interrupted creation are no pool.
        if recovery::seal_if_empty(client, &found.0, writer, keep_bytes).await? {
            let capacity_bytes = self.capacity(client)?;
            return Ok((Manifest { capacity_bytes, ..found.0 }, found.1));
        }
        match self.take_over {
            true => Ok(found),
            false => Err(BucketError::MayBeOpen { place: client.title().to_owned() }),
        }
    }
}

/// The lease of an opener.
struct OwnLease {
    /// The length; `None` without a lease.
    length: Option<Duration>,
    term: Arc<LeaseTerm>,
    /// Signalled when the opener may serve again, and when it refuses requests.
    changed: Arc<Notify>,
    /// Renews it; ends when the pool is lost, with what to say.
    keeping: Option<Pin<Box<dyn Future<Output = String> + Send>>>,
}

impl OwnLease {
    fn none() -> OwnLease {
        let term = Arc::new(LeaseTerm::unlimited());
        OwnLease { length: None, term, changed: Arc::default(), keeping: None }
    }

    fn new(client: &Arc<ObjectClient>, header: ObjectHeader, settings: BucketSettings) -> OwnLease {
        let Some(length) = settings.lease else { return OwnLease::none() };
        let (term, changed) = (Arc::new(LeaseTerm::held()), Arc::<Notify>::default());
        let keeper = LeaseKeeper {
            client: Arc::clone(client),
            header,
            length,
            term: Arc::clone(&term),
            changed: Arc::clone(&changed),
            outage_max: settings.outage_max,
        };
        OwnLease { length: Some(length), term, changed, keeping: Some(Box::pin(keeper.run())) }
    }

    /// Waits until the object store has confirmed the lease.
    async fn wait_until_confirmed(&mut self, place: &str) -> Result<(), BucketError> {
        let Some(keeping) = &mut self.keeping else { return Ok(()) };
        loop {
            let changed = self.changed.notified();
            match self.term.serving() {
                Serving::Yes => return Ok(()),
                Serving::Held => {}
                Serving::Refused => {
                    return Err(BucketError::Unconfirmed { place: place.to_owned() });
                }
            }
            tokio::select! {
                biased;
                why = &mut *keeping => return Err(BucketError::Lost { why }),
                () = changed => {}
            }
        }
    }
}

fn check_capacity(capacity: u64) -> Result<(), StoreError> {
    let least = SEGMENTS_MIN * u64::from(SEGMENT_BYTES_MIN);
    match capacity >= least {
        true => Ok(()),
        false => Err(StoreError::Invalid {
            field: "pool_size",
            value: capacity.to_string(),
            wanted: format!("{least} bytes or more"),
        }),
    }
}

/// A pool in an object store. This process has it until another one opens it.
#[derive(Debug)]
pub struct BucketStore {
    journal: Arc<Journal>,
    runtime: Arc<Runtime>,
    read_threads: Arc<ReadThreads>,
    /// Whether the pool was opened for use.
    writes: bool,
    new: NewFiles,
}

impl BucketStore {
    /// Opens a pool for use, or makes one where there is none. Older openers are fenced: none of
    /// their writes is acknowledged after that.
    ///
    /// # Errors
    /// If the object store refuses a request, an object is damaged, or another opener is faster. If
    /// there is no pool and no capacity, or there is one that may not be taken over.
    pub fn open(
        client: Arc<ObjectClient>,
        settings: BucketSettings,
        request: Opening<'_>,
        runtime: &Arc<Runtime>,
    ) -> Result<BucketStore, BucketError> {
        let fresh = || {
            let failed = |source| StoreError::Io { doing: "cannot draw a number".into(), source };
            blockyard_os::fresh_id().map_err(failed)
        };
        let (id, writer) = (request.id.map_or_else(fresh, Ok)?, fresh()?);
        let find = request.find(&client, (id, writer), settings.keep_bytes);
        let found = runtime.block_on(find)?;
        let has = found.0.capacity_bytes;
        if let Some(wanted) = request.capacity_bytes
            && wanted != has
        {
            let (field, value) = ("pool_size", wanted.to_string());
            let wanted = format!("{has}, which the pool has");
            return Err(StoreError::Invalid { field, value, wanted }.into());
        }
        // A cache that cannot be used must not end the pool of another machine.
        let open = |path: &Path| ObjectCache::open(path, settings.cache_bytes, found.0.mark());
        let cache = request.cache.map(open).transpose()?;
        if let Some(directory) = request.log {
            local_log::make_directory(directory)?;
            runtime.block_on(local_log::upload_left(&client, &found.0, directory))?;
            local_log::remove_spares(directory);
        }
        // If this opener could not use the pool, another machine keeps it.
        let look = recovery::look_first(&client, found.clone(), settings.keep_bytes);
        let look = runtime.block_on(look)?;
        let (mut openers, mut spares) = (Vec::new(), 0);
        let mut own = OwnLog { earlier: Vec::new(), acknowledges: settings.local.is_some() };
        if let Some(directory) = request.log {
            own.earlier = local_log::identities(directory)?;
            openers = [&own.earlier[..], &[writer]].concat();
            local_log::set_identities(directory, &openers)?;
            // Before the lease is taken: it takes as long as the disk needs.
            if own.acknowledges {
                spares = local_log::make_first_spare(directory, settings.batch_bytes);
            }
        }
        let leave_log = |openers: &[[u8; 16]]| {
            request.log.inspect(|it| local_log::leave(it, openers));
        };
        let taking = recovery::take_epoch(&client, found, (writer, &own), request.after);
        let new = runtime.block_on(taking).inspect_err(|error| match error {
            // It may have taken the epoch, or take it late.
            BucketError::Request(_) => leave_log(&openers),
            _ => leave_log(&own.earlier),
        })?;
        let replaying = request.replay(&client, (new, look), settings);
        let replayed = runtime.block_on(replaying).inspect_err(|_| leave_log(&[writer]));
        let (state, lease) = replayed?;
        if let Some(directory) = request.log {
            // The longer list does no harm.
            _ = local_log::set_identities(directory, &[writer]);
        }
        let log = request.log.filter(|_| settings.local.is_some());
        let log = log.map(|it| LocalLog::new(it, state.header, spares));
        let mut store = BucketStore::of(client, settings, (cache, log), state, runtime, &lease);
        store.writes = true;
        if let Some(keeping) = lease.keeping {
            let journal = Arc::clone(&store.journal);
            store.journal.spawn(async move { journal.fail(&keeping.await) });
        }
        store.journal.begin(runtime);
        Ok(store)
    }

    /// Opens a pool for reading only; nothing changes, and its writer is not fenced.
    ///
    /// # Errors
    /// As [`BucketStore::open`], or if there is no pool.
    pub fn open_read_only(
        client: Arc<ObjectClient>,
        settings: BucketSettings,
        runtime: &Arc<Runtime>,
    ) -> Result<BucketStore, BucketError> {
        BucketStore::open_read_only_with(client, settings, None, runtime)
    }

    /// As [`BucketStore::open_read_only`]. Reads also what only the local log in a directory has.
    ///
    /// # Errors
    /// As [`BucketStore::open_read_only`], or if the log is damaged.
    pub fn open_read_only_with(
        client: Arc<ObjectClient>,
        settings: BucketSettings,
        log: Option<&Path>,
        runtime: &Arc<Runtime>,
    ) -> Result<BucketStore, BucketError> {
        let opened = runtime.block_on(recovery::look(&client, settings.keep_bytes, log))?;
        let state = opened.ok_or_else(|| no_pool(&client))?;
        Ok(BucketStore::of(client, settings, (None, None), state, runtime, &OwnLease::none()))
    }

    /// A pool that is open for reading only.
    fn of(
        client: Arc<ObjectClient>,
        settings: BucketSettings,
        (cache, log): (Option<ObjectCache>, Option<LocalLog>),
        state: State,
        runtime: &Arc<Runtime>,
        lease: &OwnLease,
    ) -> BucketStore {
        let settings = BucketSettings { lease: lease.length, ..settings };
        let title = client.title().to_owned();
        let handle = runtime.handle().clone();
        let serving = (Arc::clone(&lease.term), Arc::clone(&lease.changed));
        let journal = Journal::new(client, settings, (title, cache), log, state, serving, handle);
        BucketStore {
            journal: Arc::new(journal),
            runtime: Arc::clone(runtime),
            read_threads: Arc::default(),
            writes: false,
            new: NewFiles::default(),
        }
    }

    /// The epoch of this opener.
    pub fn epoch(&self) -> u64 {
        self.journal.state().header.epoch
    }

    /// Until when this opener serves requests.
    pub fn term(&self) -> Arc<LeaseTerm> {
        Arc::clone(&self.journal.term)
    }

    /// The requests that this process has sent since the client was made.
    pub fn requests(&self) -> Requests {
        self.journal.client.requests()
    }

    /// How many chunks of objects were found in the cache, and how many were not.
    pub fn cache_hits_and_misses(&self) -> (u64, u64) {
        self.journal.cache.as_ref().map_or((0, 0), ObjectCache::hits_and_misses)
    }

    /// The bytes of write batches in memory: those that the object store has not acknowledged, and
    /// short ones that no compaction has copied yet.
    pub fn batch_bytes_in_memory(&self) -> u64 {
        self.journal.state().bodies_bytes()
    }

    /// What the object store lacks of the writes to this pool.
    pub fn lag(&self) -> Lag {
        self.journal.lag()
    }

    /// How syncs are acknowledged, and what the object store lacks.
    pub fn upload_status(&self) -> UploadStatus {
        self.journal.upload_status()
    }

    /// Objects that compactions since the opening left in the object store permanently, because the
    /// list of objects to remove was full.
    pub fn left_objects(&self) -> u64 {
        self.journal.state().left_objects
    }

    /// Refuses a change of a pool that is open for reading only.
    pub(crate) fn check_writes(&self) -> io::Result<()> {
        match self.writes {
            true => Ok(()),
            false => Err(ErrorKind::ReadOnlyFilesystem.into()),
        }
    }

    fn new_files(&self) -> MutexGuard<'_, BTreeMap<String, NewFile>> {
        self.new.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, place: FilePlace, len: u64) -> BucketFile {
        let (journal, runtime) = (Arc::clone(&self.journal), Arc::clone(&self.runtime));
        BucketFile { journal, runtime, new: Arc::clone(&self.new), place, len, writes: self.writes }
    }

    fn append(&self, file: u32, operation: BatchOperation, parts: &[&[u8]]) -> io::Result<()> {
        self.journal.append(&self.runtime, BatchRecord { file, operation }, parts)
    }

    fn sync(&self) -> io::Result<()> {
        self.check_writes()?;
        let point = self.journal.begin_sync();
        self.journal.end_sync(&self.runtime, point)
    }
}

impl Drop for BucketStore {
    /// A compaction would keep the cache, and replace the manifest under the next opener.
    fn drop(&mut self) {
        self.journal.close(&self.runtime);
    }
}

impl SegmentFiles for BucketStore {
    type File = BucketFile;

    fn open(&self, name: &str) -> io::Result<Option<BucketFile>> {
        let new = self.new_files().get(name).map(|new| new.len);
        if let Some(len) = new {
            return Ok(Some(self.file(FilePlace::New(name.to_owned()), len)));
        }
        let Some(number) = number_of(name) else { return Ok(None) };
        let state = self.journal.state();
        let len = match number {
            SUPERBLOCK => state.current.superblock.as_ref().map(|it| it.len() as u64),
            number if state.current.has_segment(number) => Some(state.current.segment_bytes.into()),
            _ => None,
        };
        drop(state);
        Ok(len.map(|len| self.file(FilePlace::Named(number), len)))
    }

    fn create(&self, name: &str, len: u64) -> io::Result<BucketFile> {
        self.check_writes()?;
        let new = NewFile { len, writes: Vec::new() };
        self.new_files().insert(name.to_owned(), new);
        Ok(self.file(FilePlace::New(name.to_owned()), len))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.check_writes()?;
        let number = number_of(to).ok_or(ErrorKind::InvalidInput)?;
        let new = self.new_files().remove(from).ok_or(ErrorKind::NotFound)?;
        let too_long = || io::Error::other(format!("`{to}` is too long for an object store"));
        let most = if number == SUPERBLOCK { SUPERBLOCK_BYTES_MAX } else { u32::MAX };
        let len = u32::try_from(new.len).ok().filter(|len| *len <= most).ok_or_else(too_long)?;
        self.append(number, BatchOperation::Make { len }, &[])?;
        for (offset, bytes) in &new.writes {
            let (offset, len) = (*offset as u32, bytes.len() as u32);
            self.append(number, BatchOperation::Write { offset, len }, &[bytes])?;
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.check_writes()?;
        if self.new_files().remove(name).is_some() {
            return Ok(());
        }
        match number_of(name) {
            Some(number) => self.append(number, BatchOperation::Remove, &[]),
            None => Ok(()),
        }
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let new: Vec<String> = self.new_files().keys().cloned().collect();
        let state = self.journal.state();
        let superblock = state.current.superblock.iter().map(|_| superblock::FILE.to_owned());
        let segments = 0..state.current.segment_count();
        let segments = segments.filter(|number| state.current.has_segment(*number as u32));
        Ok(superblock.chain(segments.map(segment_name)).chain(new).collect())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.sync()
    }

    /// A segment that is not needed gives its objects back.
    fn discards(&self) -> bool {
        true
    }

    fn discard(&self, file: &BucketFile) {
        file.clear();
    }
}

impl StoreLocation for BucketStore {
    fn title(&self) -> String {
        self.journal.title.clone()
    }

    fn set_layout(&self, wanted: Layout, is_new: bool) -> Result<Layout, StoreError> {
        if !is_new {
            self.journal.state().layout_segment_bytes = wanted.segment_bytes;
            return Ok(wanted);
        }
        let capacity = self.journal.state().manifest.capacity_bytes;
        check_capacity(capacity)?;
        let wanted_bytes = wanted.segment_bytes.min(self.journal.settings.segment_bytes);
        let segment_bytes = shorter(wanted_bytes, capacity, SEGMENTS_WANTED, SEGMENT_BYTES_MIN);
        Ok(Layout { segment_bytes, ..wanted })
    }

    fn segments_max(&self) -> usize {
        let state = self.journal.state();
        let segment_bytes = u64::from(state.layout_segment_bytes.max(1));
        (state.manifest.capacity_bytes / segment_bytes) as usize
    }

    fn check_location(&self) -> io::Result<()> {
        self.journal.failure().map_or(Ok(()), Err)
    }

    fn fresh_id(&self) -> io::Result<[u8; 16]> {
        blockyard_os::fresh_id()
    }
}

impl SegmentStore for BucketStore {
    type LogWriter = BucketLogWriter;
    type Reads = BucketReads;

    fn lease_term(&self) -> Option<Arc<LeaseTerm>> {
        Some(self.term())
    }

    fn log_writer(&self, _: Option<&Arc<BucketFile>>) -> BucketLogWriter {
        let (journal, runtime) = (Arc::clone(&self.journal), Arc::clone(&self.runtime));
        BucketLogWriter { journal, runtime, in_flight: VecDeque::new() }
    }

    fn reads(&self, event_fd: Option<&EventFd>) -> BucketReads {
        BucketReads::new(self.runtime.handle(), &self.read_threads, event_fd)
    }
}

/// Where the bytes of a file are.
#[derive(Debug)]
enum FilePlace {
    /// A file without a permanent name.
    New(String),
    /// A segment or the superblock.
    Named(u32),
}

/// A file of a pool in an object store.
#[derive(Debug)]
pub struct BucketFile {
    journal: Arc<Journal>,
    runtime: Arc<Runtime>,
    new: NewFiles,
    place: FilePlace,
    len: u64,
    writes: bool,
}

impl BucketFile {
    /// Makes the contents zeros.
    pub(crate) fn clear(&self) {
        if let FilePlace::Named(file) = self.place
            && self.writes
        {
            let record = BatchRecord { file, operation: BatchOperation::Clear };
            // After an error nothing is acknowledged any more, so the pool is not used on.
            _ = self.journal.append(&self.runtime, record, &[]);
        }
    }

    /// Checks that a range is within the file, and returns its offset.
    fn offset(&self, offset: u64, len: usize) -> io::Result<u32> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len => Ok(offset as u32),
            _ => Err(ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Reads a new file, whose writes are in memory.
    fn read_new(&self, name: &str, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let new = self.new.lock().unwrap_or_else(PoisonError::into_inner);
        let file = new.get(name).ok_or(ErrorKind::NotFound)?;
        let mut all = vec![0; file.len as usize];
        for (offset, bytes) in &file.writes {
            all[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        into.copy_from_slice(&all[offset as usize..][..into.len()]);
        Ok(())
    }
}

impl StoreFile for BucketFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let at = self.offset(offset, into.len())?;
        match &self.place {
            FilePlace::New(name) => self.read_new(name, offset, into),
            FilePlace::Named(SUPERBLOCK) => {
                let state = self.journal.state();
                let all = state.current.superblock.as_deref().ok_or(ErrorKind::NotFound)?;
                let range = at as usize..at as usize + into.len();
                into.copy_from_slice(all.get(range).ok_or(ErrorKind::UnexpectedEof)?);
                Ok(())
            }
            FilePlace::Named(segment) => {
                self.journal.read_segment(&self.runtime, (*segment, at), into)
            }
        }
    }

    fn write_at(&self, offset: u64, parts: &[&[u8]]) -> io::Result<()> {
        let len = parts.iter().map(|part| part.len()).sum();
        let at = self.offset(offset, len)?;
        if !self.writes {
            return Err(ErrorKind::ReadOnlyFilesystem.into());
        }
        match &self.place {
            FilePlace::New(name) => {
                let mut new = self.new.lock().unwrap_or_else(PoisonError::into_inner);
                let file = new.get_mut(name).ok_or(ErrorKind::NotFound)?;
                file.writes.push((offset, parts.concat()));
                Ok(())
            }
            FilePlace::Named(file) => {
                let operation = BatchOperation::Write { offset: at, len: len as u32 };
                self.journal.append(&self.runtime, BatchRecord { file: *file, operation }, parts)
            }
        }
    }

    /// Makes all writes of the pool durable, not only those of this file.
    fn sync(&self) -> io::Result<()> {
        if !self.writes {
            return Ok(());
        }
        let point = self.journal.begin_sync();
        self.journal.end_sync(&self.runtime, point)
    }
}

/// The log writer: appends write batches to the journal. Several uploads are in flight, and each
/// write batch ends when all before it have ended.
#[derive(Debug)]
pub struct BucketLogWriter {
    journal: Arc<Journal>,
    runtime: Arc<Runtime>,
    in_flight: VecDeque<InFlight>,
}

#[derive(Debug)]
struct InFlight {
    write_batch: WriteBatch,
    /// What has to happen before it ends, or why it failed.
    begun: io::Result<SyncPoint>,
}

impl BucketLogWriter {
    /// Whether the oldest write batch has ended.
    fn is_oldest_done(&self) -> bool {
        self.in_flight.front().is_none_or(|oldest| {
            oldest.begun.as_ref().map_or(true, |point| self.journal.is_ended(*point))
        })
    }
}

impl<F: StoreFile> LogWriter<F> for BucketLogWriter {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn waker(&self) -> Option<Waker> {
        let journal = Arc::clone(&self.journal);
        Some(Waker::new(move || journal.signal()))
    }

    /// A PUT takes milliseconds. The local log, if there is one, acknowledges faster.
    fn waits_for_clients(&self) -> bool {
        self.journal.settings.local.is_none()
    }

    fn begin(
        &mut self,
        file: &Arc<F>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        let parts: Vec<&[u8]> = write_batch.slices().collect();
        let begun = file.write_at(offset, &parts).map(|()| match durability {
            Durability::Nothing => SyncPoint::NOTHING,
            Durability::Itself | Durability::File => self.journal.begin_sync(),
        });
        self.in_flight.push_back(InFlight { write_batch, begun });
    }

    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        if !self.is_oldest_done() && event_count.doze(is_there) {
            let is_over = || (self.is_oldest_done() || is_there()).then_some(());
            self.journal.wait_until(&self.runtime, is_over);
            event_count.rise();
        }
        self.is_oldest_done()
    }

    fn end(&mut self) -> Option<Ended> {
        let InFlight { write_batch, begun } = self.in_flight.pop_front()?;
        let result = begun.and_then(|point| self.journal.end_sync(&self.runtime, point));
        Some((Some(write_batch), result))
    }
}

//! The sequence of all writes of an open pool: the open batch, the batches that are being uploaded,
//! and the two states of the files that result ([`PoolImage`]).
//!
//! ```text
//!  write ─▸ open batch ─ sync, or long enough ─▸ uploading ─ all before it are there ─▸ durable
//!           └──────────── `current`: what reads return ──────┘                          `durable`
//! ```
//!
//! With a local log a sync does not end the open batch. It appends what the batch got to the log,
//! and returns if what the object store lacks is within the limits ([`Lag`]). The batch ends after
//! a delay, when it is long enough, or when a write or a sync waits.
//!
//! # Invariants
//!
//! 1. A batch is acknowledged when the object store has it and all batches before it. A sync
//!    returns when its batches are acknowledged, or are in the local log, the lag is within its
//!    limits, and the lease was renewed in time.
//! 2. A batch is created only if there is no object of its name. A later opener puts a seal in the
//!    place of the first batch that it does not find. So the writer of an earlier epoch cannot
//!    create that batch, and acknowledges neither that batch nor a later one.
//! 3. Once a batch was found taken, nothing is acknowledged any more ([`State::failed`]).
//! 4. `durable` is `current` without the writes of batches that are not acknowledged. Extents of
//!    `durable` refer only to objects that the object store has.
#![allow(clippy::disallowed_types)] // A request to an object store takes far longer than a lock.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockyard_store::remote::{Acknowledge, LostWrites, UploadStatus};
use blockyard_store::{LeaseTerm, Serving};
use blockyard_volume_format::object::batch::{
    self, BatchOperation, BatchRecord, LaterBatches, PAYLOAD_AT, SUPERBLOCK, payload_bytes,
};
use blockyard_volume_format::object::local_log::GroupsEnd;
use blockyard_volume_format::object::manifest::Manifest;
use blockyard_volume_format::object::{ObjectHeader, ObjectId, ObjectKind};
use bytes::Bytes;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::bucket_error::taken_over;
use crate::cache::ObjectCache;
use crate::client::{Created, ObjectClient};
use crate::compaction;
use crate::image::PoolImage;
use crate::local_log::{LocalLog, LogGroup};
use crate::object_reader::ObjectReader;
use crate::read_ahead::{Fetches, ReadStreams};
use crate::requests::Requests;
use crate::{BucketSettings, LocalAcknowledgement, ObjectError};

/// An opener that finds more epochs to replay compacts the pool before it uses it.
const REPLAYS_WANTED: usize = 8;

/// What the journal of a pool needs of its surroundings.
#[derive(Debug)]
pub(crate) struct Journal {
    pub(crate) client: Arc<ObjectClient>,
    pub(crate) settings: BucketSettings,
    /// The name of the pool in messages.
    pub(crate) title: String,
    pub(crate) cache: Option<ObjectCache>,
    pub(crate) reader: ObjectReader,
    pub(crate) streams: ReadStreams,
    pub(crate) fetches: Fetches,
    /// The local log and its limits, if it acknowledges syncs. It is locked before the state.
    log: Option<(Mutex<LocalLog>, LocalAcknowledgement)>,
    state: Mutex<State>,
    /// Until when requests are served.
    pub(crate) term: Arc<LeaseTerm>,
    /// Signalled at each acknowledgement, failure and end of a compaction, when the lease is
    /// renewed, and when the log writer has work.
    changed: Arc<Notify>,
    /// When the pool was opened, and the requests until then, which a month does not repeat.
    opened: (std::time::Instant, Requests),
    handle: Handle,
    /// The uploads and the compaction that run. Each has this journal, and so the cache.
    tasks: Mutex<JoinSet<()>>,
}

/// The batch that takes writes.
#[derive(Debug)]
struct OpenBatch {
    bytes: Vec<u8>,
    records: Vec<BatchRecord>,
    /// When the first record was added.
    since: Option<Instant>,
}

impl OpenBatch {
    fn new() -> OpenBatch {
        OpenBatch { bytes: vec![0; PAYLOAD_AT], records: Vec::new(), since: None }
    }
}

/// What has to happen before a sync returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SyncPoint {
    /// This number of batches is acknowledged.
    batches: u64,
    /// Or the lag is within its limits: the local log has the batches.
    is_logged: bool,
}

impl SyncPoint {
    /// Nothing has to happen.
    pub(crate) const NOTHING: SyncPoint = SyncPoint { batches: 0, is_logged: false };
}

/// What the object store lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lag {
    /// The bytes of the batches.
    pub bytes: u64,
    /// The number of batches.
    pub batches: u64,
    /// The age of the oldest write.
    pub time: Duration,
}

/// A warning that writes wait comes at most once in this time.
const WARNING_PERIOD: Duration = Duration::from_secs(60);

/// A batch that is being uploaded, or waits for that.
#[derive(Debug)]
struct Upload {
    bytes: Bytes,
    records: Vec<BatchRecord>,
    state: UploadState,
    /// When its first record was added.
    since: Option<Instant>,
    /// When it ended, in milliseconds since 1970.
    ended_ms: u64,
}

/// The state of an upload.
///
/// ```text
///  Waiting ─ start_uploads ─▸ Running ─ uploaded ─▸ Done ─ all before it are done ─▸ acknowledged
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UploadState {
    Waiting,
    Running,
    Done,
}

/// The state of a journal.
#[derive(Debug)]
pub(crate) struct State {
    /// The header of the objects of this opener, but kind and number.
    pub(crate) header: ObjectHeader,
    open: OpenBatch,
    /// Batches that are not acknowledged, the oldest first.
    uploads: VecDeque<Upload>,
    /// The number of the first batch that is not acknowledged.
    pub(crate) acknowledged: u64,
    /// When the last acknowledged batch ended, in milliseconds since 1970; 0 without one.
    pub(crate) acknowledged_ms: u64,
    /// Since when writes may be missing that an earlier opener acknowledged by a log that this
    /// opener does not have, in milliseconds since 1970.
    pub(crate) missing_since_ms: Option<u64>,
    /// Every write.
    pub(crate) current: PoolImage,
    /// Every acknowledged write.
    pub(crate) durable: PoolImage,
    /// Batches in memory: those that are not acknowledged, and short ones until a compaction has
    /// copied them into segments.
    pub(crate) bodies: BTreeMap<ObjectId, Bytes>,
    /// The bytes of the bodies.
    bodies_bytes: u64,
    /// The bytes of the bodies that are not acknowledged.
    uploads_bytes: u64,
    /// The bytes of the acknowledged batches that the manifest's table lacks.
    pub(crate) behind_bytes: u64,
    /// Objects without use that are never removed.
    pub(crate) left_objects: u64,
    /// Why nothing is acknowledged any more.
    failed: Option<Arc<str>>,
    /// The manifest that this opener wrote last, and its entity tag.
    pub(crate) manifest: Manifest,
    pub(crate) e_tag: String,
    /// The number of the next segment or part of the table.
    pub(crate) next_object: u64,
    is_compacting: bool,
    /// How often writes and syncs have waited because of the lag.
    lag_waits: u64,
    /// How many writes wait now.
    waiting: u64,
    /// When a log line said last that they wait.
    warned: Option<Instant>,
    /// Whether the local log could not be written.
    has_log_failed: bool,
    /// The length of segments, as the superblock has it; 0 until that was read or made.
    pub(crate) layout_segment_bytes: u32,
}

impl State {
    /// The state of a pool of which everything is durable.
    pub(crate) fn new(
        header: ObjectHeader,
        durable: PoolImage,
        manifest: Manifest,
        e_tag: String,
    ) -> State {
        State {
            header,
            open: OpenBatch::new(),
            uploads: VecDeque::new(),
            acknowledged: 0,
            acknowledged_ms: 0,
            missing_since_ms: None,
            current: durable.clone(),
            durable,
            bodies: BTreeMap::new(),
            bodies_bytes: 0,
            uploads_bytes: 0,
            behind_bytes: 0,
            left_objects: 0,
            failed: None,
            manifest,
            e_tag,
            next_object: 0,
            is_compacting: false,
            lag_waits: 0,
            waiting: 0,
            warned: None,
            has_log_failed: false,
            layout_segment_bytes: 0,
        }
    }

    /// The number of the open batch.
    fn open_number(&self) -> u64 {
        self.acknowledged + self.uploads.len() as u64
    }

    /// Keeps a batch in memory.
    pub(crate) fn keep_body(&mut self, object: ObjectId, bytes: Bytes) {
        self.bodies_bytes += bytes.len() as u64;
        self.bodies.insert(object, bytes);
    }

    /// Removes a batch from memory.
    pub(crate) fn drop_body(&mut self, object: ObjectId) {
        if let Some(bytes) = self.bodies.remove(&object) {
            self.bodies_bytes -= bytes.len() as u64;
        }
    }

    /// A new object of this opener.
    pub(crate) fn new_object(&mut self, kind: ObjectKind) -> (ObjectId, ObjectHeader) {
        let number = self.next_object;
        self.next_object += 1;
        let header = ObjectHeader { kind, number, ..self.header };
        (ObjectId { kind, epoch: header.epoch, number }, header)
    }

    fn failure(&self) -> Option<io::Error> {
        self.failed.as_ref().map(|why| io::Error::other(why.to_string()))
    }

    /// Adds a write to the open batch at the time `now`; the bytes are the parts together.
    fn add(&mut self, record: BatchRecord, parts: &[&[u8]], now: Instant) {
        self.open.since.get_or_insert(now);
        let object = ObjectId::batch(self.header.epoch, self.open_number());
        let at = self.open.bytes.len();
        parts.iter().for_each(|part| self.open.bytes.extend_from_slice(part));
        let written: &[u8] = if record.file == SUPERBLOCK { &self.open.bytes[at..] } else { &[] };
        self.current.apply(&record, (object, at as u32), written);
        self.open.records.push(record);
    }

    /// Ends the open batch, if it has records.
    fn close_batch(&mut self) {
        if self.open.records.is_empty() {
            return;
        }
        let number = self.open_number();
        let object = ObjectId::batch(self.header.epoch, number);
        let OpenBatch { mut bytes, records, since } =
            std::mem::replace(&mut self.open, OpenBatch::new());
        let header = ObjectHeader { kind: ObjectKind::Batch, number, ..self.header };
        let ended_ms = now_ms();
        batch::complete(&mut bytes, &header, (LaterBatches::Replayed, ended_ms), &records);
        let bytes = Bytes::from(bytes);
        self.keep_body(object, bytes.clone());
        self.uploads_bytes += bytes.len() as u64;
        let state = UploadState::Waiting;
        self.uploads.push_back(Upload { bytes, records, state, since, ended_ms });
    }

    /// What the object store lacks, at the time `now`.
    pub(crate) fn lag(&self, now: Instant) -> Lag {
        let oldest = self.uploads.front().map_or(self.open.since, |upload| upload.since);
        Lag {
            bytes: self.lag_bytes(),
            batches: self.uploads.len() as u64 + u64::from(!self.open.records.is_empty()),
            time: oldest.map_or(Duration::ZERO, |since| now.saturating_duration_since(since)),
        }
    }

    /// The bytes of the batches that the object store lacks.
    fn lag_bytes(&self) -> u64 {
        let OpenBatch { bytes, records, .. } = &self.open;
        let open_bytes = match records.len() {
            0 => 0,
            count => batch::len_bytes(bytes.len(), count) as u64,
        };
        self.uploads_bytes + open_bytes
    }

    /// What the batches got that the local log does not have: its end is `end`.
    fn groups_after(&self, (logged, end): (u64, GroupsEnd)) -> Vec<LogGroup> {
        let mut groups = Vec::new();
        for number in logged.max(self.acknowledged)..=self.open_number() {
            let before = if number == logged { end } else { GroupsEnd::default() };
            let upload = self.uploads.get((number - self.acknowledged) as usize);
            let records = upload.map_or(&self.open.records, |upload| &upload.records);
            let records = records[before.records..].to_vec();
            let from = PAYLOAD_AT + before.payload_bytes;
            let range = from..from + payload_bytes(&records) as usize;
            // Only the open batch is copied: every request waits for this lock.
            let payload = match upload {
                Some(upload) => upload.bytes.slice(range),
                None => Bytes::copy_from_slice(&self.open.bytes[range]),
            };
            if !records.is_empty() {
                groups.push(LogGroup { number, before, records, payload });
            }
        }
        groups
    }

    /// Acknowledges the oldest batches if they are there.
    fn acknowledge(&mut self, keep_bytes: usize) {
        while self.failed.is_none()
            && self.uploads.front().is_some_and(|upload| upload.state == UploadState::Done)
        {
            let Some(upload) = self.uploads.pop_front() else { return };
            let object = ObjectId::batch(self.header.epoch, self.acknowledged);
            self.acknowledged += 1;
            self.acknowledged_ms = upload.ended_ms;
            self.uploads_bytes -= upload.bytes.len() as u64;
            self.behind_bytes += upload.bytes.len() as u64;
            self.durable.references.add(object, 0);
            apply_all(&mut self.durable, object, &upload.bytes, &upload.records);
            if upload.bytes.len() >= keep_bytes {
                self.drop_body(object);
            }
        }
    }

    /// Whether a compaction is needed: enough was acknowledged since the last one, the next opener
    /// would have too many epochs to replay, or writes wait for memory that a compaction frees.
    fn is_compaction_due(&self, settings: &BucketSettings) -> bool {
        let after = self.manifest.replays.last().map_or(0, |replay| replay.first);
        let lacking = self.acknowledged.saturating_sub(after);
        let frees_memory = self.bodies_bytes > self.uploads_bytes;
        self.behind_bytes >= settings.compact_bytes
            || lacking >= settings.compact_batches
            || self.manifest.replays.len() > REPLAYS_WANTED
            || frees_memory && self.bodies_bytes >= settings.memory_bytes
    }

    /// The bytes of the batches in memory, except the open one.
    pub(crate) fn bodies_bytes(&self) -> u64 {
        self.bodies_bytes
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Whether what the object store lacks is within the limits, so that the local log acknowledges a
/// sync. The creation of a pool is acknowledged by the object store: an opener elsewhere takes a
/// pool without a superblock for the remains of an interrupted creation.
fn is_within(state: &State, limits: &LocalAcknowledgement, now: Instant) -> bool {
    let lag = state.lag(now);
    state.durable.superblock.is_some()
        && lag.bytes <= limits.lag_bytes_max
        && lag.time <= limits.lag_time_max
}

/// Executes the records of a batch.
pub(crate) fn apply_all(
    space: &mut PoolImage,
    object: ObjectId,
    bytes: &[u8],
    records: &[BatchRecord],
) {
    let mut at = PAYLOAD_AT;
    for record in records {
        let len = match record.operation {
            BatchOperation::Write { len, .. } => len as usize,
            _ => 0,
        };
        space.apply(record, (object, at as u32), &bytes[at..at + len]);
        at += len;
    }
}

/// Where the bytes of a piece are.
pub(crate) enum Located {
    /// Zeros of this length.
    Zeros(usize),
    /// In memory.
    Memory(Bytes),
    /// In the open batch, copied.
    Copied(Vec<u8>),
    /// In an object: the offset and the length in bytes.
    Object(ObjectId, u32, usize),
}

impl Journal {
    /// A journal that continues a pool.
    pub(crate) fn new(
        client: Arc<ObjectClient>,
        settings: BucketSettings,
        (title, cache): (String, Option<ObjectCache>),
        log: Option<LocalLog>,
        state: State,
        (term, changed): (Arc<LeaseTerm>, Arc<Notify>),
        handle: Handle,
    ) -> Journal {
        let opened = (std::time::Instant::now(), client.requests());
        let reader = ObjectReader::new(Arc::clone(&client), state.header.pool);
        Journal {
            client,
            reader,
            streams: ReadStreams::default(),
            fetches: Fetches::default(),
            settings,
            title,
            cache,
            log: log.zip(settings.local).map(|(log, limits)| (Mutex::new(log), limits)),
            state: Mutex::new(state),
            term,
            changed,
            opened,
            handle,
            tasks: Mutex::default(),
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error that ended the journal.
    pub(crate) fn failure(&self) -> Option<io::Error> {
        self.state().failure()
    }

    /// Ends the journal: nothing is acknowledged from now on.
    pub(crate) fn fail(&self, why: &str) {
        let mut state = self.state();
        if state.failed.is_none() {
            tracing::error!("{}: {why}", self.title);
            state.failed = Some(why.into());
        }
        drop(state);
        self.term.end();
        self.signal();
    }

    /// Ends the uploads and the compaction, as if the process had ended. Then the pool can be
    /// opened again. What only the local log has is uploaded before, if that takes no longer than
    /// the limit.
    pub(crate) fn close(self: &Arc<Self>, runtime: &Runtime) {
        if let Some((_, limits)) = &self.log
            && !limits.close_time.is_zero()
        {
            self.upload_all(runtime, limits.close_time);
        }
        let mut state = self.state();
        let is_complete = state.failed.is_none() && state.lag_bytes() == 0;
        state.failed.get_or_insert_with(|| "the pool is closed".into());
        drop(state);
        self.signal();
        let mut tasks = std::mem::take(&mut *self.tasks());
        runtime.block_on(tasks.shutdown());
        if let Some((_, limits)) = &self.log
            && is_complete
            && !limits.close_time.is_zero()
        {
            let removal = compaction::remove_marks(self);
            _ = runtime.block_on(async { tokio::time::timeout(limits.close_time, removal).await });
        }
    }

    /// Uploads all batches, and removes the spares of the log. Says what is left after `time_max`.
    fn upload_all(self: &Arc<Self>, runtime: &Runtime, time_max: Duration) {
        let mut state = self.state();
        if state.failed.is_some() {
            drop(state);
            self.remove_spares();
            return;
        }
        state.close_batch();
        self.start_uploads(&mut state);
        drop(state);
        let uploaded = self.until(|| {
            let state = self.state();
            (state.uploads.is_empty() || state.failed.is_some()).then_some(())
        });
        _ = runtime.block_on(async { tokio::time::timeout(time_max, uploaded).await });
        let lag = self.lag();
        if lag.batches > 0 {
            tracing::warn!(
                "{}: the object store lacks {} batches with {} bytes; the next opening on this \
                 machine uploads what its local log has of them",
                self.title,
                lag.batches,
                lag.bytes
            );
        }
        self.remove_spares();
    }

    /// Removes what the local log needs no more when the pool is closed.
    fn remove_spares(&self) {
        if let Some((log, _)) = &self.log {
            let acknowledged = self.state().acknowledged;
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            log.remove_below(acknowledged);
            log.remove_spares();
        }
    }

    /// What the object store lacks.
    pub(crate) fn lag(&self) -> Lag {
        let now = self.now();
        self.state().lag(now)
    }

    /// The state of the uploads.
    pub(crate) fn upload_status(&self) -> UploadStatus {
        let now = self.now();
        let state = self.state();
        let lag = state.lag(now);
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let limits = self.log.as_ref().map(|(_, limits)| *limits);
        let is_late = limits.is_some_and(|limits| !is_within(&state, &limits, now));
        let (opened, before) = &self.opened;
        UploadStatus {
            acknowledge: limits.map_or(Acknowledge::Object, |_| Acknowledge::Local),
            lag_bytes: lag.bytes,
            lag_batches: lag.batches,
            lag_ms: millis(lag.time),
            max_lag_bytes: limits.map_or(0, |limits| limits.lag_bytes_max),
            max_lag_ms: limits.map_or(0, |limits| millis(limits.lag_time_max)),
            lease_ms: self.settings.lease.map_or(0, millis),
            requests: self.client.requests().since(before).totals(opened.elapsed()),
            waits: state.lag_waits,
            is_waiting: limits.is_some() && (state.waiting > 0 || is_late),
            is_held: state.failed.is_none() && self.is_held(),
            has_failed: state.failed.is_some(),
            has_log_failed: state.has_log_failed,
            missing_since_ms: state.missing_since_ms,
            lost: LostWrites::default(),
        }
    }

    /// The time on the clock of the runtime.
    fn now(&self) -> Instant {
        let _context = self.handle.enter();
        Instant::now()
    }

    fn tasks(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks();
        while tasks.try_join_next().is_some() {}
        tasks.spawn_on(task, &self.handle);
    }

    /// Wakes all threads that wait for a change.
    pub(crate) fn signal(&self) {
        self.changed.notify_waiters();
    }

    /// Waits until `check` returns a value.
    fn wait<T>(&self, runtime: &Runtime, mut check: impl FnMut(&mut State) -> Option<T>) -> T {
        self.wait_until(runtime, || check(&mut self.state()))
    }

    /// Waits until `check`, which may lock the state, returns a value. Executes tasks of the
    /// runtime meanwhile, if it has one thread and no other thread does.
    pub(crate) fn wait_until<T>(&self, runtime: &Runtime, check: impl FnMut() -> Option<T>) -> T {
        runtime.block_on(self.until(check))
    }

    async fn until<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        loop {
            let mut changed = pin!(self.changed.notified());
            // From here on a signal is not missed.
            changed.as_mut().enable();
            if let Some(value) = check() {
                return value;
            }
            changed.await;
        }
    }

    /// Appends an operation with its bytes; waits while too many bytes are in memory, or the object
    /// store lacks too many.
    pub(crate) fn append(
        self: &Arc<Self>,
        runtime: &Runtime,
        record: BatchRecord,
        parts: &[&[u8]],
    ) -> io::Result<()> {
        let len = parts.iter().map(|part| part.len()).sum();
        let mut now = self.now();
        let mut state = self.state();
        if state.failed.is_none() && !self.has_space(&state, len) {
            if self.log.is_some() {
                self.tell_of_wait(&mut state, now);
            }
            state.waiting += 1;
            drop(state);
            self.wait(runtime, |state| {
                self.start_compaction(state);
                if self.log.is_some() {
                    state.close_batch();
                    self.start_uploads(state);
                }
                (state.failed.is_some() || self.has_space(state, len)).then_some(())
            });
            now = self.now();
            state = self.state();
            state.waiting -= 1;
        }
        if let Some(error) = state.failure() {
            return Err(error);
        }
        let is_first = state.open.records.is_empty();
        state.add(record, parts, now);
        if state.open.bytes.len() >= self.settings.batch_bytes {
            state.close_batch();
            self.start_uploads(&mut state);
        } else if let Some((_, limits)) = &self.log
            && is_first
        {
            self.close_later(state.open_number(), limits.upload_delay);
        }
        Ok(())
    }

    /// Whether a write of this length may be added.
    fn has_space(&self, state: &State, len: usize) -> bool {
        let is_within = self.log.as_ref().is_none_or(|(_, limits)| {
            // A write that is longer than the limit is added if nothing else is lacking.
            let OpenBatch { bytes, records, .. } = &state.open;
            let open_bytes = batch::len_bytes(bytes.len() + len, records.len() + 1) as u64;
            state.lag_bytes() == 0 || state.uploads_bytes + open_bytes <= limits.lag_bytes_max
        });
        is_within && state.bodies_bytes < self.settings.memory_bytes
    }

    /// Counts a write or sync that waits for the object store, and says so.
    fn tell_of_wait(&self, state: &mut State, now: Instant) {
        state.lag_waits += 1;
        let last = state.warned;
        if last.is_none_or(|last| now.saturating_duration_since(last) >= WARNING_PERIOD) {
            state.warned = Some(now);
            let lag = state.lag(now);
            tracing::warn!(
                "{}: writes wait for the object store, which lacks {} bytes, the oldest for {} s",
                self.title,
                lag.bytes,
                lag.time.as_secs()
            );
        }
    }

    /// Ends the open batch, which has this number, after a time.
    fn close_later(self: &Arc<Self>, number: u64, delay: Duration) {
        let journal = Arc::clone(self);
        self.spawn(async move {
            tokio::time::sleep(delay).await;
            let mut state = journal.state();
            if state.open_number() == number {
                state.close_batch();
                journal.start_uploads(&mut state);
            }
        });
    }

    /// Begins to make everything durable that was appended before.
    pub(crate) fn begin_sync(self: &Arc<Self>) -> SyncPoint {
        if let Some((log, limits)) = &self.log {
            return self.begin_logged_sync(log, limits);
        }
        let mut state = self.state();
        state.close_batch();
        self.start_uploads(&mut state);
        SyncPoint { batches: state.open_number(), is_logged: false }
    }

    /// As [`Journal::begin_sync`], by the local log. What other threads append meanwhile comes into
    /// the group of the next caller.
    fn begin_logged_sync(
        self: &Arc<Self>,
        log: &Mutex<LocalLog>,
        limits: &LocalAcknowledgement,
    ) -> SyncPoint {
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.state();
        let groups = log.end().map_or_else(Vec::new, |end| state.groups_after(end));
        let batches = state.open_number() + u64::from(!state.open.records.is_empty());
        let acknowledged = state.acknowledged;
        drop(state);
        log.remove_below(acknowledged);
        let is_logged = log.append(&groups, &self.title);
        drop(log);
        let now = self.now();
        let mut state = self.state();
        state.has_log_failed |= !is_logged;
        // A sync that waits for the object store does not wait for the end of the delay.
        if !is_logged || !is_within(&state, limits, now) || self.is_held() {
            if is_logged && state.durable.superblock.is_some() {
                self.tell_of_wait(&mut state, now);
            }
            state.close_batch();
            self.start_uploads(&mut state);
        }
        SyncPoint { batches, is_logged }
    }

    /// How a sync ended, if it has.
    fn ended(&self, state: &State, point: SyncPoint) -> Option<io::Result<()>> {
        if state.acknowledged >= point.batches {
            return Some(Ok(()));
        }
        if let Some(error) = state.failure() {
            return Some(Err(error));
        }
        let limits = self.log.as_ref().map(|(_, limits)| limits);
        let is_over = point.is_logged && limits.is_some_and(|it| is_within(state, it, self.now()));
        (is_over && !self.is_held()).then_some(Ok(()))
    }

    /// Whether the lease was not renewed in time: another opener may have the pool, and does not
    /// have what only the local log has.
    fn is_held(&self) -> bool {
        self.term.serving() != Serving::Yes
    }

    /// Whether a sync has ended.
    pub(crate) fn is_ended(&self, point: SyncPoint) -> bool {
        self.ended(&self.state(), point).is_some()
    }

    /// Waits until a sync ends.
    ///
    /// # Errors
    /// If the journal ends before.
    pub(crate) fn end_sync(&self, runtime: &Runtime, point: SyncPoint) -> io::Result<()> {
        self.wait(runtime, |state| self.ended(state, point))
    }

    /// Starts to upload batches that wait, as many as may be in flight.
    fn start_uploads(self: &Arc<Self>, state: &mut State) {
        let first = state.acknowledged;
        let header = state.header;
        for (index, upload) in state.uploads.iter_mut().enumerate().take(self.settings.uploads_max)
        {
            if upload.state == UploadState::Waiting && state.failed.is_none() {
                upload.state = UploadState::Running;
                let number = first + index as u64;
                let (journal, bytes) = (Arc::clone(self), upload.bytes.clone());
                let object = ObjectId::batch(header.epoch, number);
                self.spawn(async move { journal.upload(object, bytes).await });
            }
        }
    }

    /// Uploads a batch, until the object store has it, or an object of another writer.
    async fn upload(self: Arc<Self>, object: ObjectId, bytes: Bytes) {
        let _ends = EndsByPanic(&self);
        let name = object.to_string();
        let mut outage = Outage::default();
        loop {
            match self.client.create(&name, &bytes).await {
                Ok(Created::New { .. }) => break,
                Ok(Created::Taken(other)) => {
                    return self.fail(&taken_over(&name, Some(&other.bytes)));
                }
                Err(error) => {
                    if !outage.wait(&self, &error).await {
                        return;
                    }
                }
            }
        }
        outage.end(&self);
        let mut state = self.state();
        let index = object.number.saturating_sub(state.acknowledged) as usize;
        if let Some(upload) = state.uploads.get_mut(index) {
            upload.state = UploadState::Done;
        }
        state.acknowledge(self.settings.keep_bytes);
        self.start_uploads(&mut state);
        self.start_compaction(&mut state);
        let acknowledged = state.acknowledged;
        drop(state);
        self.signal();
        // A sync that has the log removes the files after it.
        if let Some((log, _)) = &self.log
            && let Ok(mut log) = log.try_lock()
        {
            log.remove_below(acknowledged);
        }
        // No write waits for the cache.
        if bytes.len() >= self.settings.keep_bytes
            && let Some(cache) = &self.cache
        {
            cache.insert(object, 0, &bytes);
        }
    }

    /// Compacts the pool if the opener that has just opened it has to. If that ends the journal,
    /// the first use of the pool gets the error.
    pub(crate) fn begin(self: &Arc<Self>, runtime: &Runtime) {
        let mut state = self.state();
        let has_many = state.manifest.replays.len() > REPLAYS_WANTED;
        self.start_compaction(&mut state);
        drop(state);
        if has_many {
            self.wait(runtime, |state| {
                (!state.is_compacting || state.failed.is_some()).then_some(())
            });
        }
    }

    /// Starts a compaction, if one is due and none runs.
    fn start_compaction(self: &Arc<Self>, state: &mut State) {
        if state.failed.is_some() || state.is_compacting || !state.is_compaction_due(&self.settings)
        {
            return;
        }
        state.is_compacting = true;
        let journal = Arc::clone(self);
        self.spawn(async move {
            let _ends = EndsByPanic(&journal);
            compaction::run(&journal).await;
            let mut state = journal.state();
            state.is_compacting = false;
            drop(state);
            journal.signal();
        });
    }

    /// Locates the bytes of a range of a segment.
    ///
    /// # Errors
    /// If the journal has ended: the data may be stale.
    pub(crate) fn locate(&self, segment: u32, offset: u32, len: u32) -> io::Result<Vec<Located>> {
        let state = self.state();
        if let Some(error) = state.failure() {
            return Err(error);
        }
        let map = state.current.segment(segment).ok_or(io::ErrorKind::NotFound)?;
        let open = ObjectId::batch(state.header.epoch, state.open_number());
        let located = map.pieces(offset, len).into_iter().map(|piece| {
            let len = piece.len as usize;
            let Some((object, at)) = piece.source else { return Located::Zeros(len) };
            let range = at as usize..at as usize + len;
            // A pool that is open for reading only has no open batch, and the object store may have
            // a batch of that number.
            if object == open && !state.open.records.is_empty() {
                return Located::Copied(state.open.bytes[range].to_vec());
            }
            match state.bodies.get(&object) {
                Some(bytes) => Located::Memory(bytes.slice(range)),
                None => Located::Object(object, at, len),
            }
        });
        Ok(located.collect())
    }
}

/// Ends the journal if a task panics, which is a bug: nothing may wait for the task.
struct EndsByPanic<'a>(&'a Journal);

impl Drop for EndsByPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("a task of the object store has panicked");
        }
    }
}

/// A time in which the object store does not answer requests.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    since: Option<Instant>,
    tries: u32,
}

/// The first wait before a request is sent again.
const RETRY_FIRST: Duration = Duration::from_millis(50);

impl Outage {
    /// Waits before a request is repeated. Returns false if a repetition is of no use, the outage
    /// is too long, or the journal has ended. It has ended in each of these cases.
    pub(crate) async fn wait(&mut self, journal: &Journal, error: &ObjectError) -> bool {
        if journal.failure().is_some() {
            return false;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.tries == 0 {
            tracing::warn!("{}: {error}; trying again", journal.title);
        }
        if !error.is_transient() || since.elapsed() >= journal.settings.outage_max {
            journal.fail(&error.to_string());
            return false;
        }
        let delay = RETRY_FIRST * 2_u32.pow(self.tries.min(6));
        self.tries += 1;
        tokio::time::sleep(delay).await;
        true
    }

    /// Ends the outage.
    pub(crate) fn end(self, journal: &Journal) {
        if self.tries > 0 {
            tracing::info!("{}: the object store answers again", journal.title);
        }
    }
}

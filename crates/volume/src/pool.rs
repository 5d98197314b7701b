//! A pool: segments, a log, and the volumes and snapshots whose blocks the segments hold.
//!
//! All volumes of a pool share one log and one committer. So a snapshot has a defined position
//! among the writes, and a clone shares blocks with its origin. Each log batch (group) contains the
//! waiting records of all volumes.
//!
//! The states that all threads of a pool share, and the functions that change them:
//!
//! ```text
//! ErrorLatch        not set ── Pool::latch, Pool::latch_if_removed ──▸ set, until the next opening
//!
//! CommitterThread   None ◂── Pool::set_running, of Running::start and of its end ──▸ Running
//!
//! WriteAck          InLog ◂── Committer::update_write_ack, by the free space ──▸ InMemory
//!
//! Maintenance       commands and report of the checkpoint thread: see `maintenance.rs`
//! ```
//!
//! **Reservations.** A volume may reserve space before it is written. The *unused* part of a
//! reservation is what the volume has not written since it was last copied; the pool keeps that
//! much space free for it. Blocks that a snapshot or a clone shares need additional space when they
//! are overwritten. So a snapshot needs that much more space, and is refused if the space is
//! missing. Bytes are counted before compression, so a reservation suffices for incompressible data
//! too.
#![allow(clippy::disallowed_types)] // The table of volumes changes when one is made or removed.

mod fits;
mod volumes;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_store::buffer::Memory;
use blockyard_sync::completion_queue::{CompletionQueue, Receiver};
use blockyard_sync::rcu_cell::{RcuCell, RcuReader};
use blockyard_sync::tag_semaphore::TagSemaphore;
use blockyard_volume_format::UNIT;
use blockyard_volume_format::catalogue::{Change, VOLUMES_MAX, VolumeMeta};
use blockyard_volume_format::superblock::Superblock;

use crate::activity::{Activity, Meters};
use crate::error::{ErrorLatch, VolumeError};
use crate::keyring::Keyring;
use crate::maintenance::{ColdWriter, Maintenance, RoundCommand, Stage};
use crate::options::Options;
use crate::record::{Body, OpenVolume, Record, Reply, ReplyTo};
use crate::roots::Roots;
use crate::segments::{Counts, Segments};
use crate::thread::Thread;

pub use volumes::{FrozenVolume, Volumes};

/// First character of the name of a hidden volume or snapshot: a volume that is being received and
/// is not complete, or a snapshot that exists only while it is sent. No other name begins with it.
/// Clients do not see these volumes, and an opening removes them, except those of a resumable
/// receive that was interrupted.
pub const HIDDEN_PREFIX: char = '%';

/// First characters of the name of a hidden volume that contains the position of a resumable
/// receive; the name of the volume that is received follows. It belongs to the hidden volume with
/// the data, and an opening keeps either both or none.
pub const RECEIVE_STATE_PREFIX: &str = "%%+";

/// Records of the control plane that may be in the committer's record queue at once.
const OWN_RECORDS: u32 = 64;

/// Threads of the control plane that may wait for the committer at once. The remaining places are
/// for records that have no thread of their own.
const WAITING_MAX: u32 = OWN_RECORDS / 2;

/// How long a control-plane thread waits before it tries again what another thread prevents.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// How long a volume may be in use by a reader of its metadata before a change of the volume is
/// refused. A thread that uses it only briefly may be preempted for this long while it does.
const IN_USE_MAX: Duration = Duration::from_secs(2);

/// Free segments up to this multiple of those that are kept ready keep their space.
const SURPLUS_FACTOR: usize = 2;

/// Fewest segments that are kept ready in addition to those that writes leave free.
const BEYOND_MIN: usize = 3;

/// Longest sleep of a control-plane thread before it checks again whether the committer still runs.
const ANSWER_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The thread that runs the committer. Without one, the caller of [`crate::committer::Committer`]
/// runs it step by step, and long operations run on the caller's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommitterThread {
    None,
    Running,
}

/// When a write is acknowledged that need not be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteAck {
    /// As soon as it is in memory.
    InMemory,
    /// When it is in the log, because space is low: a lack of space could not be reported later.
    InLog,
}

/// A pool.
pub struct Pool<D: SegmentStore> {
    options: Options,
    /// The length to a multiple of which new encrypted blocks are padded, in bytes.
    seal_align: u32,
    segments: Segments<D>,
    memory: Arc<Memory>,
    records: Arc<CompletionQueue<Record>>,
    admitted: TagSemaphore,
    waiting: TagSemaphore,
    latch: ErrorLatch,
    write_ack: Arc<RcuCell<WriteAck>>,
    committer: RcuCell<CommitterThread>,
    maintenance: Maintenance,
    volumes: Mutex<Volumes>,
    /// The superblock that was written last.
    pub(crate) superblock: Mutex<Superblock>,
    /// Where the next checkpoint writes its pages: segment and offset.
    pages: Mutex<Option<(u32, u32)>>,
    /// Roots of maps and pages of the catalogue that the last checkpoint has.
    roots: Mutex<Roots>,
    /// Where cleaning writes the next blocks that it moves.
    cold: Mutex<Option<ColdWriter>>,
    meters: Meters,
    /// The thread that makes segments before they are needed.
    maker: Mutex<Option<Thread>>,
    /// Completion queues of the volume handles that are being closed.
    leaving: Mutex<Vec<Arc<CompletionQueue<Reply>>>>,
    /// The keys of encrypted volumes that are in memory.
    keys: Arc<Keyring>,
}

impl<D: SegmentStore> Pool<D> {
    /// A pool that was opened. `records` is the committer's record queue, and `pages` is where the
    /// next checkpoint writes its pages.
    pub(crate) fn new(
        options: Options,
        segments: Segments<D>,
        records: &Receiver<Record>,
        superblock: Superblock,
        volumes: Volumes,
        pages: Option<(u32, u32)>,
        roots: Roots,
    ) -> Pool<D> {
        let (align, segment_bytes) = (superblock.align, superblock.segment_bytes);
        let seal_align = segments.directory().io_align().max(UNIT as u32);
        Pool {
            options: Options { align, segment_bytes, ..options },
            seal_align,
            segments,
            memory: Memory::new(options.memory_bytes),
            records: Arc::clone(records.completion_queue()),
            admitted: TagSemaphore::new(options.records_max - OWN_RECORDS),
            waiting: TagSemaphore::new(WAITING_MAX),
            latch: ErrorLatch::default(),
            // Until the free space has been measured.
            write_ack: Arc::new(RcuCell::new(WriteAck::InLog)),
            committer: RcuCell::new(CommitterThread::None),
            maintenance: Maintenance::default(),
            volumes: Mutex::new(volumes),
            superblock: Mutex::new(superblock),
            pages: Mutex::new(pages),
            roots: Mutex::new(roots),
            cold: Mutex::new(None),
            meters: Meters::default(),
            maker: Mutex::new(None),
            leaving: Mutex::default(),
            keys: Arc::default(),
        }
    }

    /// The counters of this pool since it was opened.
    pub fn activity(&self) -> Activity {
        self.meters.activity()
    }

    /// The counters of the committer.
    pub(crate) fn meters(&self) -> &Meters {
        &self.meters
    }

    /// Options of the pool, with the alignment and the segment length that it has on disk.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Alignment in bytes: the places and lengths on disk are multiples of it, except those of
    /// encrypted blocks.
    pub fn align(&self) -> u32 {
        self.options.align
    }

    /// The length to a multiple of which new encrypted blocks are padded, in bytes: the alignment
    /// that the storage had when the pool was opened.
    pub(crate) fn seal_align(&self) -> usize {
        self.seal_align as usize
    }

    /// The segments of the pool.
    pub fn segments(&self) -> &Segments<D> {
        &self.segments
    }

    /// The keys of encrypted volumes that are in memory.
    pub fn keys(&self) -> &Arc<Keyring> {
        &self.keys
    }

    /// The memory for data in flight of the pool.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The committer's record queue.
    pub(crate) fn records(&self) -> &CompletionQueue<Record> {
        &self.records
    }

    /// Sends a record to the committer and wakes it.
    pub(crate) fn send(&self, record: Record) {
        self.records.post([record].into_iter());
        self.records.event_count().notify();
    }

    /// Reserves a place in the committer's record queue, if one is free.
    #[inline]
    pub(crate) fn admit(&self) -> bool {
        self.admitted.take(1) == 1
    }

    /// Reserves `count` places in the committer's record queue, or none.
    pub(crate) fn admit_all(&self, count: u32) -> bool {
        let got = self.admitted.take(count);
        if got < count {
            self.admitted.give(got);
        }
        got == count
    }

    /// Gives one reserved place back.
    #[inline]
    pub(crate) fn dismiss(&self) {
        self.admitted.give(1);
    }

    /// Gives `count` reserved places back.
    pub(crate) fn dismiss_all(&self, count: u32) {
        self.admitted.give(count);
    }

    /// Whether the pool is latched: a write or a sync has failed, so nothing more is written.
    #[inline]
    pub fn is_latched(&self) -> bool {
        self.latch.is_set()
    }

    /// Latches the pool: nothing more is written to it. Logs `cause` if it is the first.
    pub(crate) fn latch(&self, cause: &str) {
        if self.latch.set(cause) {
            let title = self.segments.directory().title();
            tracing::error!("{title}: {cause}: read-only until it is opened again");
        }
    }

    /// Checks whether the pool was removed or replaced. If so, latches it, so that no more writes
    /// are acknowledged as durable.
    pub(crate) fn latch_if_removed(&self) {
        if let Err(error) = self.segments.directory().check_location() {
            self.latch(&format!("it was removed or replaced while it was open ({error})"));
        }
    }

    /// When a write is acknowledged that need not be durable.
    pub(crate) fn write_ack(&self) -> RcuReader<WriteAck> {
        RcuReader::new(&self.write_ack)
    }

    /// Sets when a write is acknowledged that need not be durable.
    pub(crate) fn set_write_ack(&self, write_ack: WriteAck) {
        if *self.write_ack.get() != write_ack {
            self.write_ack.update(|_| write_ack);
        }
    }

    /// Bytes that must fit into the segments while writes are answered before they are in the log:
    /// the whole memory for data in flight, and a quarter more for the unused ends of segments.
    pub(crate) fn early_bytes(&self) -> u64 {
        self.options.memory_bytes + self.options.memory_bytes / 4
    }

    /// Whether a thread of its own runs the committer.
    pub fn is_running(&self) -> bool {
        *self.committer.get() == CommitterThread::Running
    }

    /// Sets whether a thread runs the committer. If so, long operations run concurrently with it.
    pub fn set_running(&self, running: bool) {
        let state = if running { CommitterThread::Running } else { CommitterThread::None };
        self.committer.update(|_| state);
    }

    /// The commands to the checkpoint thread, and its report.
    pub(crate) fn maintenance(&self) -> &Maintenance {
        &self.maintenance
    }

    /// Sets what the checkpoint thread does now, and wakes the committer, because throttled writes
    /// may be able to continue.
    pub(crate) fn set_stage(&self, stage: Stage) {
        self.maintenance.set_stage(stage);
        self.records.event_count().notify();
    }

    /// The checkpoint after which a liveness scan is requested.
    pub fn requested_scan(&self) -> Option<u64> {
        self.maintenance.scan_after()
    }

    /// Requests a liveness scan after the next checkpoint, even if there are no unknown bytes.
    pub fn request_scan(&self) {
        self.segments.add_unknown_bytes(1);
        self.maintenance.send(RoundCommand::Scan { after: self.segments.round() + 1 });
        self.records.event_count().notify();
    }

    /// Starts a thread that makes segments if fewer than `needed`, or fewer than the pool keeps,
    /// are ready. Making a segment takes as long as writing it. Before the first write of a block
    /// the pool keeps none, so that a pool without data is small.
    pub(crate) fn prepare(self: &Arc<Self>, needed: usize) {
        let (ready, bytes) = match self.segments.has_blocks() {
            true => (self.ready().max(needed), self.early_bytes()),
            false => (needed, 0),
        };
        if !self.is_running() || !self.segments.wants_more(ready, bytes) {
            return;
        }
        self.make(move |segments| segments.prepare(ready, bytes));
    }

    /// How many segments are kept ready: the reserve and [`Pool::beyond`].
    fn ready(&self) -> usize {
        self.segments.reserved() + self.beyond()
    }

    /// How many segments are kept ready for writes in addition to the reserve: at least
    /// [`Pool::early_bytes`], because with fewer no write is acknowledged before it is in the log.
    pub(crate) fn beyond(&self) -> usize {
        let segments = self.early_bytes().div_ceil(self.segments.bytes().into());
        BEYOND_MIN.max(segments as usize)
    }

    /// How many free segments may lose their space, if at least `least_free` have been free for a
    /// while. The pool keeps twice the segments that are kept ready, and twice the bytes of
    /// [`Pool::early_bytes`], so a steady load never makes a segment again.
    pub(crate) fn surplus(&self, least_free: usize) -> usize {
        let spare =
            self.segments.left_there().saturating_sub(SURPLUS_FACTOR as u64 * self.early_bytes());
        let by_bytes = spare / u64::from(self.segments.bytes());
        least_free.saturating_sub(SURPLUS_FACTOR * self.ready()).min(by_bytes as usize)
    }

    /// Starts a thread that returns the space of `count` free segments to the file system.
    pub(crate) fn punch_holes(self: &Arc<Self>, count: usize) {
        self.make(move |segments| segments.punch_holes(count));
    }

    /// Starts a thread that tries to make a segment again after that has failed. Returns whether
    /// the thread was started.
    pub(crate) fn try_again(self: &Arc<Self>) -> bool {
        self.make(|segments| segments.try_again())
    }

    /// Starts a thread that works on the segments, unless one runs. Returns whether it was started.
    fn make(self: &Arc<Self>, work: impl FnOnce(&Segments<D>) + Send + 'static) -> bool {
        let mut maker = self.maker.lock().unwrap_or_else(PoisonError::into_inner);
        if maker.as_ref().is_some_and(|thread| !thread.is_ended()) {
            return false;
        }
        let pool = Arc::downgrade(self);
        let make = move || {
            if let Some(pool) = pool.upgrade() {
                work(&pool.segments);
            }
        };
        match Thread::start("volume-segments", make) {
            Ok(thread) => *maker = Some(thread),
            Err(error) => {
                tracing::warn!("no thread to make segments: {error}");
                return false;
            }
        }
        true
    }

    /// Whether a thread makes segments.
    pub(crate) fn is_preparing(&self) -> bool {
        let maker = self.maker.lock().unwrap_or_else(PoisonError::into_inner);
        maker.as_ref().is_some_and(|thread| !thread.is_ended())
    }

    /// Waits for the thread that makes segments.
    pub(crate) fn end_preparing(&self) {
        let maker = self.maker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if maker.is_some_and(|thread| !thread.join()) {
            self.latch("making a segment has panicked");
        }
    }

    /// Where the next checkpoint writes its pages: segment and offset.
    pub(crate) fn page_place(&self) -> Option<(u32, u32)> {
        *self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets where the next checkpoint writes its pages.
    pub(crate) fn set_page_place(&self, place: Option<(u32, u32)>) {
        self.segments.set_rest(place.map_or(0, |(_, offset)| self.segments.bytes() - offset));
        *self.pages.lock().unwrap_or_else(PoisonError::into_inner) = place;
    }

    /// Locks the roots of maps and pages of the catalogue that the last checkpoint has.
    pub(crate) fn roots(&self) -> MutexGuard<'_, Roots> {
        self.roots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the roots and catalogue pages that the last checkpoint has.
    pub(crate) fn set_roots(&self, roots: Roots) {
        self.segments.set_upper(roots.count());
        *self.roots() = roots;
    }

    /// Where cleaning writes the next blocks that it moves.
    pub(crate) fn cold(&self) -> Option<ColdWriter> {
        *self.cold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets where cleaning writes the next blocks that it moves.
    pub(crate) fn set_cold(&self, cold: Option<ColdWriter>) {
        *self.cold.lock().unwrap_or_else(PoisonError::into_inner) = cold;
    }

    /// Locks the table of volumes and snapshots.
    pub fn volumes(&self) -> MutexGuard<'_, Volumes> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds a volume or snapshot by name.
    ///
    /// # Errors
    /// If the pool has none of this name.
    pub fn find(&self, name: &str) -> Result<Arc<OpenVolume>, VolumeError> {
        let found = self.volumes().find(name).cloned();
        found.ok_or_else(|| VolumeError::NoSuchVolume { name: name.to_owned() })
    }

    /// The volumes and snapshots of the pool, without hidden ones.
    pub fn list(&self) -> Vec<VolumeMeta> {
        self.volumes().list()
    }

    /// The first volume or snapshot, hidden ones too, whose number is at least `number`, with its
    /// number. New ones get higher numbers: a caller that continues after the one it got sees all.
    pub fn next_volume(&self, number: u32) -> Option<(u32, Arc<OpenVolume>)> {
        let volumes = self.volumes();
        let (number, live) = volumes.by_id.range(number..).next()?;
        Some((*number, Arc::clone(live)))
    }

    /// How many segments there are of each kind.
    pub fn counts(&self) -> Counts {
        self.segments.counts()
    }

    /// Sends a change of the catalogue to the committer. The answer arrives in the returned
    /// completion queue.
    pub fn submit_change(&self, change: Change) -> Receiver<Reply> {
        self.submit(Body::Catalogue(change))
    }

    /// Sends `body` to the committer. The answer arrives in the returned completion queue.
    pub fn submit(&self, body: Body) -> Receiver<Reply> {
        let owner = CompletionQueue::open(1);
        let reply = ReplyTo::new(owner.completion_queue(), 0);
        self.send(Record::of(body, Some(reply)));
        owner
    }

    /// Waits until all writes that were acknowledged are in the maps, and durable. Another thread
    /// runs the committer.
    pub fn flush(&self) -> Status {
        self.submit_and_wait(Body::Flush)
    }

    /// As [`Pool::flush`]. Errors are ignored here: the clients of the failed writes get them.
    pub fn settle(&self) {
        _ = self.flush();
    }

    /// Waits for a checkpoint and returns its status.
    pub fn checkpoint(&self) -> Status {
        self.submit_and_wait(Body::Checkpoint)
    }

    /// Sends `body` to the committer and waits for the answer. At most [`WAITING_MAX`] threads do
    /// so at once, so the completion queue has a place for each.
    fn submit_and_wait(&self, body: Body) -> Status {
        while self.waiting.take(1) == 0 {
            std::thread::sleep(RETRY_INTERVAL);
        }
        let status = self.wait(self.submit(body));
        self.waiting.give(1);
        status
    }

    /// Waits for an answer of the committer, which another thread runs.
    pub fn wait(&self, mut owner: Receiver<Reply>) -> Status {
        loop {
            let is_running = self.is_running();
            match owner.take() {
                Some(reply) => return reply.status,
                // No thread is left that could answer.
                None if !is_running => return Status::IoErr,
                None => owner
                    .completion_queue()
                    .event_count()
                    .sleep(ANSWER_CHECK_INTERVAL, || owner.is_any()),
            }
        }
    }

    /// Changes the catalogue, and waits until the change is durable.
    ///
    /// # Errors
    /// The reason why the catalogue was not changed.
    pub fn change(&self, name: &str, change: Change) -> Result<(), VolumeError> {
        let made = match &change {
            Change::Create(meta) | Change::Copy(meta) => Some(meta.name.clone()),
            _ => None,
        };
        let name = name.to_owned();
        let until = Instant::now() + IN_USE_MAX;
        let status = loop {
            let status = self.submit_and_wait(Body::Catalogue(change.clone()));
            // The volume is not served as a device, but another thread may be reading its metadata.
            if status != Status::DevResource || Instant::now() >= until {
                break status;
            }
            std::thread::sleep(RETRY_INTERVAL);
        };
        // Free the maps here: the committer would delay all writers, and the lock all threads that
        // need the table.
        let gone = std::mem::take(&mut self.volumes().gone);
        drop(gone);
        self.keys.keep(&self.volumes().keys);
        match status {
            Status::Ok => Ok(()),
            Status::NoSpc => Err(VolumeError::NoSpace),
            Status::DevResource => {
                Err(VolumeError::Busy { name, why: "in use; close it first".to_owned() })
            }
            Status::Inval => Err(self.impossible(name, made)),
            _ => Err(VolumeError::Latched),
        }
    }

    /// The reason why a change of the catalogue was impossible: it was to make `made`, or to change
    /// `name`.
    fn impossible(&self, name: String, made: Option<String>) -> VolumeError {
        match made {
            Some(made) if self.find(&made).is_ok() => VolumeError::Exists { name },
            Some(_) if self.volumes().by_id.len() >= VOLUMES_MAX => {
                let wanted = format!("a pool with fewer than {VOLUMES_MAX} volumes and snapshots");
                VolumeError::Invalid { field: "name", value: name, wanted }
            }
            // The origin of the new volume, or the volume to change, was removed meanwhile.
            _ => VolumeError::NoSuchVolume { name },
        }
    }
}

impl<D: SegmentStore> fmt::Debug for Pool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("segments", &self.segments).finish_non_exhaustive()
    }
}

/// Marks the owner of a completion queue, a volume handle, as closing until this is dropped.
/// Closing waits for the answers to the handle's own records only, and its writes no longer wait
/// for space.
pub(crate) struct Leaving<'a, D: SegmentStore> {
    pool: &'a Pool<D>,
    completion_queue: Arc<CompletionQueue<Reply>>,
}

impl<D: SegmentStore> Pool<D> {
    /// Marks the owner of this completion queue as closing.
    pub(crate) fn leave(&self, completion_queue: &Arc<CompletionQueue<Reply>>) -> Leaving<'_, D> {
        let completion_queue = Arc::clone(completion_queue);
        self.leaving
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::clone(&completion_queue));
        self.records.event_count().notify();
        Leaving { pool: self, completion_queue }
    }

    /// Whether any volume handle is closing.
    pub(crate) fn is_any_leaving(&self) -> bool {
        !self.leaving.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Whether the receiver of a record's answer is closing.
    pub(crate) fn is_leaving(&self, record: &Record) -> bool {
        let leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = record.reply.as_ref();
        reply.is_some_and(|reply| leaving.iter().any(|it| reply.is_to(it)))
    }
}

impl<D: SegmentStore> Drop for Leaving<'_, D> {
    fn drop(&mut self) {
        let mut leaving = self.pool.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        leaving.retain(|it| !Arc::ptr_eq(it, &self.completion_queue));
    }
}

impl<D: SegmentStore> fmt::Debug for Leaving<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaving").finish_non_exhaustive()
    }
}

impl OpenVolume {
    /// Bytes of its reservation that the volume has not written yet.
    pub fn unused_reserved_bytes(&self) -> u64 {
        self.unused_of(self.reserved_bytes())
    }

    /// Bytes of its reservation that the volume has written, as they may be stored.
    fn used_reserved_bytes(&self) -> u64 {
        let all = self.meta.stored_max(self.reserved_bytes());
        all.saturating_sub(self.unused_reserved_bytes())
    }

    /// The unused part of a reservation of `reserved` bytes.
    fn unused_of(&self, reserved: u64) -> u64 {
        let owned = self.owned().saturating_mul(self.meta.block_bytes.into());
        self.meta.stored_max(reserved.saturating_sub(owned))
    }
}

impl Volumes {
    /// Bytes that volumes have reserved and not written, in total.
    pub fn unused_reserved_bytes(&self) -> u64 {
        let live = self.reserving().map(OpenVolume::unused_reserved_bytes);
        live.fold(0, u64::saturating_add)
    }

    /// Bytes that a change of the catalogue reserves in addition.
    fn newly_reserved(&self, change: &Change) -> u64 {
        let live = |id: &u32| self.by_id.get(id);
        match change {
            Change::Create(meta) => meta.stored_max(meta.reserved_bytes),
            // After the copy, the volume must be able to write its own blocks again.
            Change::Copy(meta) => live(&meta.origin).map_or(0, |live| live.used_reserved_bytes()),
            Change::Reserve { id, bytes } => live(id).map_or(0, |live| {
                live.unused_of(*bytes).saturating_sub(live.unused_reserved_bytes())
            }),
            Change::SnapshotAll { .. } => {
                let used = self.only_volumes().map(|live| live.used_reserved_bytes());
                used.fold(0, u64::saturating_add)
            }
            Change::Several(changes) => changes.iter().map(|it| self.newly_reserved(it)).sum(),
            Change::Destroy { .. }
            | Change::Rollback { .. }
            | Change::Resize { .. }
            | Change::Rename { .. }
            | Change::Promote { .. }
            | Change::Hold { .. }
            | Change::Release { .. }
            | Change::Scrubbed(_)
            | Change::Set { .. }
            | Change::PutKey(_) => 0,
        }
    }
}

impl<D: SegmentStore> Pool<D> {
    /// Free bytes that are not reserved for any volume.
    pub fn unreserved_bytes(&self) -> u64 {
        let unused = self.volumes().unused_reserved_bytes();
        self.segments().left_bytes().saturating_sub(unused)
    }

    /// Whether the pool has the space that a change of the catalogue reserves.
    pub(crate) fn affords(&self, change: &Change) -> bool {
        let more = self.volumes().newly_reserved(change);
        more == 0 || more <= self.unreserved_bytes()
    }

    /// Whether a liveness scan could find the space that a change of the catalogue reserves.
    pub(crate) fn may_afford(&self, change: &Change) -> bool {
        let (more, unused) = {
            let volumes = self.volumes();
            (volumes.newly_reserved(change), volumes.unused_reserved_bytes())
        };
        let segments = self.segments();
        let (left, unknown) = (segments.left_bytes(), segments.unknown_bytes());
        unknown > 0 && more <= left.saturating_add(unknown).saturating_sub(unused)
    }

    /// Whether volumes without a reservation have less than `bytes` bytes left.
    pub(crate) fn reserves_all_but(&self, bytes: u64) -> bool {
        self.volumes().reserving().next().is_some() && self.unreserved_bytes() < bytes
    }

    /// Whether these records, of `bytes` bytes in all, fit without taking reserved space. A volume
    /// may write, and overwrite, its own reservation. All other records use only space that is not
    /// reserved.
    pub(crate) fn affords_writes(&self, records: &[Record], bytes: u64) -> bool {
        // A volume that has written its whole reservation counts as one without a reservation.
        let within = |live: &&OpenVolume| live.unused_of(live.reserved_bytes() + 1) > 0;
        let (unused, any): (BTreeMap<u32, u64>, bool) = {
            let volumes = self.volumes();
            let any = volumes.reserving().next().is_some();
            let within = volumes.reserving().filter(within);
            (within.map(|live| (live.meta.id, live.unused_reserved_bytes())).collect(), any)
        };
        if !any {
            return bytes <= self.segments().left_bytes();
        }
        let all = unused.values().fold(0_u64, |all, bytes| all.saturating_add(*bytes));
        let others =
            records.iter().filter_map(|Record { body, volume, .. }| match (body, volume) {
                (Body::Write(payload), Some(live)) if !unused.contains_key(&live.meta.id) => {
                    Some(payload.bytes().len() as u64)
                }
                // Making a volume or snapshot takes pages only.
                (Body::Catalogue(_), _) => Some(1),
                _ => None,
            });
        let taken: u64 = others.sum();
        taken == 0 || taken.saturating_add(all) <= self.segments().left_bytes()
    }
}

#[cfg(test)]
mod tests {
    use crate::stepped_pool::SteppedPool;

    /// Regression: a thread that had just failed to make a segment was taken for one that tries
    /// again. No thread tried, and a write was refused although there was space by then.
    #[test]
    fn a_busy_preparation_thread_is_no_new_attempt_to_make_a_segment() {
        let stepped = SteppedPool::new("tries");
        let (end, ends) = std::sync::mpsc::channel::<()>();
        assert!(stepped.pool.make(move |_| _ = ends.recv()));
        assert!(!stepped.pool.try_again() && stepped.pool.is_preparing());
        drop(end);
        stepped.pool.end_preparing();
        assert!(stepped.pool.try_again());
        stepped.pool.end_preparing();
    }
}

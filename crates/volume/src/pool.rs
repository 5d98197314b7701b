//! A pool: segments, a log, and the volumes and snapshots whose blocks are there.
//!
//! All volumes of a pool share its log and its committer, so that a snapshot has a place among the
//! writes, a clone shares the blocks of what it was made from, and groups are as large as can be.
#![allow(clippy::disallowed_types)] // The table of volumes changes when one is made or removed.

mod fits;
mod leaving;
mod volumes;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blockyard_core::Status;
use blockyard_sync::mailbox::{Mailbox, Owner};
use blockyard_sync::published::{Published, Reader};
use blockyard_sync::tag_budget::TagBudget;

use crate::activity::Meters;
use crate::buffer::Memory;
use crate::clean::{Cold, Pace, Phase};
use crate::committer::Committer;
use crate::error::VolumeError;
use crate::format::catalogue::{Change, Traits, VOLUMES_MAX};
use crate::format::superblock::{LogPlace, SEGMENT_NONE, Superblock};
use crate::options::Options;
use crate::record::{Body, Live, Record, Reply, Return};
use crate::recovery;
use crate::roots::Roots;
use crate::segments::{Counts, Segments};
use crate::store::Directory;
use crate::thread::Thread;

pub use volumes::Volumes;

/// What the name of a volume begins with that is received and not complete, and that of a snapshot
/// that is made to be sent and nothing else. No other name does. Nobody sees them, and an opening
/// removes them.
pub(crate) const ON_ITS_WAY: char = '%';

/// Records of the control plane at once.
const OWN_RECORDS: u32 = 64;

/// Threads of the control plane that wait for the committer at once; the rest is for what has no
/// thread of its own.
const ASKING_MAX: u32 = OWN_RECORDS / 2;

/// How often one that has to wait for others looks again.
const TURN_LOOK: Duration = Duration::from_millis(1);

/// How long somebody may look at a volume before whoever wants to change it is refused: as long as
/// a thread that looks for an instant may have to wait for a processor in the middle of it.
const LOOKED_AT_MAX: Duration = Duration::from_secs(2);

/// Segments that are kept ready, so that the committer finds one and does not make it.
const READY: usize = 6;

/// Of those that are free so many times as many as are kept ready are not given back.
const KEPT: usize = 2;

/// The same beyond those that writes leave.
const BEYOND: usize = 3;

/// Longest sleep of the control plane before it looks again.
const LOOK: Duration = Duration::from_millis(50);

/// What is done about bytes that may not count any more: see [`crate::clean`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recount {
    /// Nothing.
    None,
    /// It is counted what counts.
    First,
    /// That was broken off, as a checkpoint was due.
    Broken,
    /// It is counted once more, and not broken off for that.
    Again,
}

/// A pool.
pub struct Pool<D: Directory> {
    options: Options,
    segments: Segments<D>,
    memory: Arc<Memory>,
    mail: Arc<Mailbox<Record>>,
    admitted: TagBudget,
    asking: TagBudget,
    poisoned: Arc<Published<bool>>,
    tight: Arc<Published<bool>>,
    running: Arc<Published<bool>>,
    hurried: Arc<Published<bool>>,
    cleaning: Arc<Published<bool>>,
    recount: Arc<Published<Recount>>,
    wanted: Arc<Published<Option<u64>>>,
    pace: Pace,
    volumes: Mutex<Volumes>,
    /// The one that was written last.
    pub(crate) superblock: Mutex<Superblock>,
    /// Where the next checkpoint writes its pages.
    pages: Mutex<Option<(u32, u32)>>,
    /// Roots of maps and pages of the catalogue that the last one has.
    roots: Mutex<Roots>,
    /// Where the next blocks go that are moved.
    cold: Mutex<Option<Cold>>,
    meters: Meters,
    /// Who makes segments before they are needed.
    maker: Mutex<Option<Thread>>,
    /// Where the answers go of those who are leaving.
    leaving: Mutex<Vec<Arc<Mailbox<Reply>>>>,
}

impl<D: Directory> Pool<D> {
    /// Opens the pool of a directory, or makes one; its committer is the caller's to run.
    ///
    /// # Errors
    /// If there is something that cannot be read, or that the system refuses to write.
    pub fn open(
        directory: D,
        options: Options,
    ) -> Result<(Arc<Pool<D>>, Committer<D>), VolumeError> {
        let (mut recovered, segments) = recovery::open(directory, &options)?;
        recovered.volumes.gone.clear();
        let mail: Owner<Record> = Mailbox::open(options.records_max as usize);
        let superblock = recovered.superblock;
        segments.set_upper(recovered.roots.count());
        segments.set_pages(recovered.page_count);
        // What is written on: the rest is opened when it is taken.
        let LogPlace { segment, next, .. } = recovered.log.place;
        let pages = recovered.page_place.map(|(segment, _)| segment);
        for number in [segment, next].into_iter().filter(|it| *it != SEGMENT_NONE).chain(pages) {
            let failed = VolumeError::io(format!("cannot open segment {number}"));
            segments.pin(number).map_err(failed)?;
        }
        let rest = |(_, offset): (u32, u32)| superblock.segment_bytes - offset;
        segments.set_rest(recovered.page_place.map_or(0, rest));
        let (align, segment_bytes) = (superblock.align, superblock.segment_bytes);
        let pool = Pool {
            options: Options { align, segment_bytes, ..options },
            segments,
            memory: Memory::new(options.memory_bytes),
            mail: Arc::clone(mail.mailbox()),
            admitted: TagBudget::new(options.records_max - OWN_RECORDS),
            asking: TagBudget::new(ASKING_MAX),
            poisoned: Arc::new(Published::new(false)),
            // Until somebody has looked.
            tight: Arc::new(Published::new(true)),
            running: Arc::new(Published::new(false)),
            hurried: Arc::new(Published::new(false)),
            cleaning: Arc::new(Published::new(false)),
            recount: Arc::new(Published::new(Recount::None)),
            wanted: Arc::new(Published::new(None)),
            pace: Pace::default(),
            volumes: Mutex::new(recovered.volumes),
            superblock: Mutex::new(superblock),
            pages: Mutex::new(recovered.page_place),
            roots: Mutex::new(recovered.roots),
            cold: Mutex::new(None),
            meters: Meters::default(),
            maker: Mutex::new(None),
            leaving: Mutex::default(),
        };
        pool.meters.recovered(recovered.log.found_bytes);
        let pool = Arc::new(pool);
        let committer = Committer::new(Arc::clone(&pool), mail, recovered.log);
        Ok((pool, committer))
    }

    /// Where the committer counts.
    pub(crate) fn meters(&self) -> &Meters {
        &self.meters
    }

    /// Its bounds.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// What everything on disk is a multiple of, in bytes.
    pub fn align(&self) -> u32 {
        self.options.align
    }

    /// Its segments.
    pub fn segments(&self) -> &Segments<D> {
        &self.segments
    }

    /// Its memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The committer's mailbox.
    pub(crate) fn mail(&self) -> &Mailbox<Record> {
        &self.mail
    }

    /// Sends a record to the committer.
    pub(crate) fn send(&self, record: Record) {
        self.mail.post([record].into_iter());
        self.mail.bell().ring();
    }

    /// Reserves a place in the committer's mailbox, if there is one.
    #[inline]
    pub(crate) fn admit(&self) -> bool {
        self.admitted.take(1) == 1
    }

    /// Reserves so many places, or none.
    pub(crate) fn admit_all(&self, count: u32) -> bool {
        let got = self.admitted.take(count);
        if got < count {
            self.admitted.give(got);
        }
        got == count
    }

    /// Gives a place back.
    #[inline]
    pub(crate) fn dismiss(&self) {
        self.admitted.give(1);
    }

    /// Gives so many places back.
    pub(crate) fn dismiss_all(&self, count: u32) {
        self.admitted.give(count);
    }

    /// Whether nothing is written any more, because a write or a sync has failed.
    pub fn poisoned(&self) -> Reader<bool> {
        Reader::new(&self.poisoned)
    }

    /// See [`Pool::poisoned`].
    pub fn is_poisoned(&self) -> bool {
        *self.poisoned.get()
    }

    /// Nothing is written any more.
    pub(crate) fn poison(&self, why: &str) {
        if !self.is_poisoned() {
            let title = self.segments.directory().title();
            tracing::error!("{title}: {why}: read-only until it is opened again");
            self.poisoned.update(|_| true);
        }
    }

    /// The same, unless there is a better reason: that the pool was removed.
    pub(crate) fn poison_by(&self, why: &str) {
        self.look();
        self.poison(why);
    }

    /// Looks whether the pool is still there: nothing more is said to be durable then.
    pub(crate) fn look(&self) {
        if let Err(error) = self.segments.directory().look() {
            self.poison(&format!("it was removed or replaced while it was open ({error})"));
        }
    }

    /// Whether space is so short that nothing is answered before it is in the log.
    pub(crate) fn tight(&self) -> Reader<bool> {
        Reader::new(&self.tight)
    }

    /// What has to find a place where writes are answered before they are in the log: all that is
    /// in memory, and a quarter more for what is left empty at the ends of segments.
    pub(crate) fn early_bytes(&self) -> u64 {
        self.options.memory_bytes + self.options.memory_bytes / 4
    }

    /// Notes whether space is short.
    pub(crate) fn set_tight(&self, tight: bool) {
        if *self.tight.get() != tight {
            self.tight.update(|_| tight);
        }
    }

    /// Whether a thread of its own runs the committer.
    pub fn is_running(&self) -> bool {
        *self.running.get()
    }

    /// Whether the committer waits for the checkpoint that is on its way.
    pub(crate) fn is_hurried(&self) -> bool {
        *self.hurried.get()
    }

    /// Notes whether the committer waits for the checkpoint that is on its way.
    pub(crate) fn set_hurried(&self, hurried: bool) {
        self.hurried.update(|_| hurried);
        self.pace.ask();
    }

    /// The pace of writes where space is short.
    pub(crate) fn pace(&self) -> &Pace {
        &self.pace
    }

    /// The thread of a checkpoint does something else: who was held back may go on.
    pub(crate) fn set_phase(&self, phase: Phase) {
        self.pace.set(phase);
        self.mail.bell().ring();
    }

    /// Whether the checkpoint that was begun last is durable, and segments are cleaned behind it.
    pub(crate) fn is_cleaning(&self) -> bool {
        *self.cleaning.get()
    }

    /// Notes whether segments are cleaned.
    pub(crate) fn set_cleaning(&self, cleaning: bool) {
        self.cleaning.update(|_| cleaning);
    }

    /// What is done about bytes that may not count any more.
    pub(crate) fn recount(&self) -> Recount {
        *self.recount.get()
    }

    /// Notes that.
    pub(crate) fn set_recount(&self, recount: Recount) {
        self.recount.update(|_| recount);
    }

    /// Behind which checkpoint blocks are to be counted again, or a later one, because somebody
    /// waits for it.
    pub(crate) fn wanted_count(&self) -> Option<u64> {
        *self.wanted.get()
    }

    /// Notes that.
    pub(crate) fn want_count(&self, round: Option<u64>) {
        if self.wanted_count() != round {
            self.wanted.update(|_| round);
        }
    }

    /// Somebody wants them counted behind the next one, whatever is known of them.
    pub(crate) fn want_count_anyhow(&self) {
        self.segments.doubt(1);
        let round = self.segments.round() + 1;
        self.wanted.update(|wanted| (*wanted).max(Some(round)));
        self.mail.bell().ring();
    }

    /// Blocks were counted behind this checkpoint: whoever waits for that does so no longer, unless
    /// it has asked for it since.
    pub(crate) fn has_counted(&self, round: u64) {
        self.wanted.update(|wanted| wanted.filter(|wanted| *wanted > round));
    }

    /// Notes whether a thread runs the committer: what takes long is done beside it then.
    pub fn set_running(&self, running: bool) {
        self.running.update(|_| running);
    }

    /// Lets a thread make segments where few are ready, or fewer than somebody needs: it takes as
    /// long as writing them.
    pub(crate) fn prepare(self: &Arc<Self>, needed: usize) {
        let ready = self.ready().max(needed);
        let bytes = self.early_bytes();
        if !self.is_running() || !self.segments.wants_more(ready, bytes) {
            return;
        }
        self.make(move |segments| segments.prepare(ready, bytes));
    }

    /// How many segments are kept ready.
    fn ready(&self) -> usize {
        READY.max(self.segments.reserved() + BEYOND)
    }

    /// How many free segments may be given back, if at least so many have been free for a while.
    /// Twice as many as are kept ready are not, nor is room for twice as many bytes: no segment is
    /// made again for a steady load.
    pub(crate) fn surplus(&self, least_free: usize) -> usize {
        let spare = self.segments.left_there().saturating_sub(KEPT as u64 * self.early_bytes());
        let by_bytes = spare / u64::from(self.segments.bytes());
        least_free.saturating_sub(KEPT * self.ready()).min(by_bytes as usize)
    }

    /// Lets a thread give the space of so many free segments back.
    pub(crate) fn give_back(self: &Arc<Self>, count: usize) {
        self.make(move |segments| segments.give_back(count));
    }

    /// Lets a thread try again to make a segment where one could not be made; says whether it has
    /// begun to.
    pub(crate) fn try_again(self: &Arc<Self>) -> bool {
        self.make(|segments| segments.try_again())
    }

    /// Lets a thread make segments, unless one does; says whether it has begun to.
    fn make(self: &Arc<Self>, what: impl FnOnce(&Segments<D>) + Send + 'static) -> bool {
        let mut maker = self.maker.lock().unwrap_or_else(PoisonError::into_inner);
        if maker.as_ref().is_some_and(|thread| !thread.is_ended()) {
            return false;
        }
        let pool = Arc::downgrade(self);
        let make = move || {
            if let Some(pool) = pool.upgrade() {
                what(&pool.segments);
            }
        };
        match Thread::start(self.segments.directory(), "volume-segments", make) {
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
        if maker.is_some_and(|thread| !thread.join(self.segments.directory())) {
            self.poison("making a segment has panicked");
        }
    }

    /// Where the next checkpoint writes its pages: segment and offset.
    pub(crate) fn page_place(&self) -> Option<(u32, u32)> {
        *self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes where the next checkpoint writes its pages.
    pub(crate) fn set_page_place(&self, place: Option<(u32, u32)>) {
        self.segments.set_rest(place.map_or(0, |(_, offset)| self.segments.bytes() - offset));
        *self.pages.lock().unwrap_or_else(PoisonError::into_inner) = place;
    }

    /// Roots of maps and pages of the catalogue, under their lock.
    pub(crate) fn roots(&self) -> MutexGuard<'_, Roots> {
        self.roots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes which of them the last checkpoint has.
    pub(crate) fn set_roots(&self, roots: Roots) {
        self.segments.set_upper(roots.count());
        *self.roots() = roots;
    }

    /// Where the next blocks go that are moved.
    pub(crate) fn cold(&self) -> Option<Cold> {
        *self.cold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes where the next blocks go that are moved.
    pub(crate) fn set_cold(&self, cold: Option<Cold>) {
        *self.cold.lock().unwrap_or_else(PoisonError::into_inner) = cold;
    }

    /// The volumes and snapshots, under their lock.
    pub(crate) fn volumes(&self) -> MutexGuard<'_, Volumes> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A volume or snapshot.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn find(&self, name: &str) -> Result<Arc<Live>, VolumeError> {
        let found = self.volumes().find(name).cloned();
        found.ok_or_else(|| VolumeError::NoSuchVolume { name: name.to_owned() })
    }

    /// What there is, but for what is on its way in.
    pub fn list(&self) -> Vec<Traits> {
        self.volumes().list()
    }

    /// How many segments there are of each kind.
    pub fn counts(&self) -> Counts {
        self.segments.counts()
    }

    /// Asks the committer for a change of the catalogue; the answer comes to the mailbox.
    pub fn ask(&self, change: Change) -> Owner<Reply> {
        self.ask_for(Body::Catalogue(change))
    }

    /// Asks the committer for something.
    pub fn ask_for(&self, body: Body) -> Owner<Reply> {
        let owner = Mailbox::open(1);
        let reply = Return::new(owner.mailbox(), 0);
        self.send(Record::of(body, Some(reply)));
        owner
    }

    /// Waits until what was answered to anybody is in the maps too, and durable; another thread
    /// runs the committer. What has failed others are told.
    pub(crate) fn settle(&self) {
        _ = self.demand(Body::Flush);
    }

    /// Waits for a checkpoint; says how it has ended.
    pub(crate) fn checkpoint(&self) -> Status {
        self.demand(Body::Checkpoint)
    }

    /// Asks the committer for something and waits for the answer, in turn: there is a place in its
    /// mailbox for each.
    fn demand(&self, body: Body) -> Status {
        while self.asking.take(1) == 0 {
            std::thread::sleep(TURN_LOOK);
        }
        let status = self.wait(self.ask_for(body));
        self.asking.give(1);
        status
    }

    /// Waits for an answer of the committer, which another thread runs.
    pub fn wait(&self, mut owner: Owner<Reply>) -> Status {
        loop {
            let is_running = self.is_running();
            match owner.take() {
                Some(reply) => return reply.status,
                // Nobody is left who could give one.
                None if !is_running => return Status::IoErr,
                None => owner.mailbox().bell().sleep(LOOK, || owner.is_any()),
            }
        }
    }

    /// Changes the catalogue, and waits until that is durable.
    ///
    /// # Errors
    /// Why it was not.
    pub fn change(&self, name: &str, change: Change) -> Result<(), VolumeError> {
        let made = match &change {
            Change::Create(traits) | Change::Copy(traits) => Some(traits.name.clone()),
            _ => None,
        };
        let name = name.to_owned();
        let until = Instant::now() + LOOKED_AT_MAX;
        let status = loop {
            let status = self.demand(Body::Catalogue(change.clone()));
            // It is no device: somebody may be looking at it just now.
            if status != Status::DevResource || Instant::now() >= until {
                break status;
            }
            std::thread::sleep(TURN_LOOK);
        };
        // Not by the committer, for which all writers wait, nor under the lock.
        let gone = std::mem::take(&mut self.volumes().gone);
        drop(gone);
        match status {
            Status::Ok => Ok(()),
            Status::NoSpc => Err(VolumeError::NoSpace),
            Status::DevResource => {
                Err(VolumeError::Busy { name, why: "in use; close it first".to_owned() })
            }
            Status::Inval => Err(self.impossible(name, made)),
            _ => Err(VolumeError::Poisoned),
        }
    }

    /// Why a change was impossible that was to make something of a name, or to change what is
    /// there.
    fn impossible(&self, name: String, made: Option<String>) -> VolumeError {
        match made {
            Some(made) if self.find(&made).is_ok() => VolumeError::Exists { name },
            Some(_) if self.volumes().by_id.len() >= VOLUMES_MAX => {
                let wanted = format!("a pool with fewer than {VOLUMES_MAX} volumes and snapshots");
                VolumeError::Invalid { field: "name", value: name, wanted }
            }
            // What it was to be made of, or what was to be changed, has gone meanwhile.
            _ => VolumeError::NoSuchVolume { name },
        }
    }
}

impl<D: Directory> fmt::Debug for Pool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("segments", &self.segments).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use crate::hand::Hand;

    /// A thread that had just failed to make a segment was taken for one that tries again, and none
    /// did: a write was refused though there was room by then.
    #[test]
    fn who_is_there_already_does_not_try_again() {
        let hand = Hand::new("tries");
        let (end, ends) = std::sync::mpsc::channel::<()>();
        assert!(hand.pool.make(move |_| _ = ends.recv()));
        assert!(!hand.pool.try_again() && hand.pool.is_preparing());
        drop(end);
        hand.pool.end_preparing();
        assert!(hand.pool.try_again());
        hand.pool.end_preparing();
    }
}

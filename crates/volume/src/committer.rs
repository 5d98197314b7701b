//! The committer: takes what waits, writes it as one group, makes it durable if anybody wants that,
//! and tells everybody.
//!
//! It does not wait for more to come: what comes while a group is on its way is the next one. It is
//! the only one that writes to the log and that changes the trees of maps.
//!
//! A group is on its way from when it is begun until it has *landed*: it is durable then if it is
//! to be, its blocks are in the maps, and everybody is told. Groups land in the order of the log.
//! Others are begun behind a long one, where they fill the disk's time. Behind a short one the next
//! is begun when that one is written, before anybody is told: the disk has to do meanwhile.

mod count;
mod flight;
mod group;
mod idle;
mod pace;
mod publish;
mod search;
mod space;

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Status;
use blockyard_sync::mailbox::Owner;

use crate::checkpoint::{self, Copied, Frozen};
use crate::clean::{self, Cleaning, Phase};
use crate::format::catalogue::{CHANGE_BYTES_MAX, Whole};
use crate::format::group as format;
use crate::format::superblock::SEGMENT_NONE;
use crate::log::LogEnd;
use crate::pool::{Pool, Recount};
use crate::record::{Body, Moved, Record};
use crate::segments::Want;
use crate::store::tasks::Chosen;
use crate::store::{Commit, Directory, Parcel};
use crate::thread::{self, Thread};

use flight::Flight;
use group::{Group, may_follow};
use idle::QUIET;
use publish::Names;
use search::{Room, Search};

/// Longest group, unless a single write is longer. One large write is as fast as several, and where
/// the disk is slow to answer it is faster.
const GROUP_BYTES_MAX: u32 = 4 << 20;

/// Groups that a segment holds at least, unless a single write is longer: every head in it names
/// the segment that the log goes on in, and one of them may rot.
const SEGMENT_GROUPS: u32 = 2;

/// Most records in a group: the kernel takes 1024 parts in a call.
const RECORDS_MAX: usize = 1000;

/// Changed pages of maps that are not worth a checkpoint, in bytes.
const DIRTY_BYTES_MIN: u64 = 256 << 10;

/// When what nobody has asked to be durable is made so, and how often is looked whether the pool is
/// still there.
const SETTLE: Duration = Duration::from_secs(1);

/// The space of free segments is given back that were free at each of so many looks.
const LOOKS: u32 = 60;

/// Most segments whose space is given back at once.
const GIVEN_MAX: usize = 32;

/// In an idle pool blocks are counted again if one in so many of the bytes that are used, or a
/// segment, may not be live any more.
const UNKNOWN_PART: u64 = 32;

/// Longest sleep of one for whom space is looked for beside.
const SEARCH_LOOK: Duration = Duration::from_millis(2);

/// How often space is looked for where there is none, by a checkpoint and cleaning each time.
const ROOM_TRIES: usize = 64;

/// So many groups are refused without looking for space again, after it was in vain.
const VAIN_MAX: u32 = 16;

/// A checkpoint that has come to nothing is tried again behind such a part of the log that there is
/// between two.
const TRY_PART: u64 = 8;

/// What a turn has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// There was something to do.
    Worked,
    /// There was nothing.
    Idle,
    /// The pool is closed.
    Stopped,
}

/// See the module.
pub struct Committer<D: Directory> {
    pool: Arc<Pool<D>>,
    /// By which groups of this pool are told from those of another.
    mark: u64,
    mail: Owner<Record>,
    /// Taken out, and too much for the last group.
    held: VecDeque<Record>,
    /// So many of the next ones have a group each.
    singly: usize,
    group: Group,
    /// Made by the thread that runs the committer, which alone uses it.
    lane: Option<Chosen<D::File, D::Lane>>,
    /// The oldest first.
    flights: VecDeque<Flight>,
    /// To be used again.
    groups: Vec<Group>,
    parcels: Vec<Parcel>,
    log: LogEnd,
    /// Segments with groups that have landed and are not durable.
    unsynced: BTreeSet<u32>,
    unsynced_bytes: u64,
    /// The last group when it was recorded that all groups are durable.
    recorded: u64,
    /// Bytes of log since the last checkpoint began.
    since_checkpoint: u64,
    /// The same when that began.
    frozen_bytes: u64,
    /// The last one has come to nothing: the next one begins behind so many bytes.
    next_try: u64,
    checkpoint: Option<Thread>,
    /// How many of them there were when cleaning behind it began.
    cleaning_since: Option<u64>,
    /// What writes have had of what cleaning wins, in bytes.
    spent: u64,
    /// So many times more nobody looks for space: there was none.
    in_vain: u32,
    search: Search,
    /// Changes of the catalogue for which blocks are counted again, and how often that was begun.
    uncounted: VecDeque<Record>,
    count_tries: u32,
    head_bytes_max: usize,
    /// Volumes of which a write was answered and then found no space: their next flush says so.
    lost: BTreeSet<u32>,
    /// Who is to be woken.
    names: Names,
    /// The pool is being closed: nothing comes any more.
    stopping: bool,
    /// The last group at the last look, and that at which an idle pool had blocks counted again.
    seen: u64,
    counted_at: Option<u64>,
    /// The least number of segments that were free at the looks since space was given back, and how
    /// many looks that is.
    least_free: usize,
    looks: u32,
}

impl<D: Directory> Committer<D> {
    pub(crate) fn new(pool: Arc<Pool<D>>, mail: Owner<Record>, log: LogEnd) -> Committer<D> {
        let head = format::head_bytes(format::DESCRIPTORS_MAX, pool.align()) as usize;
        Committer {
            mark: checkpoint::pool_mark(&pool),
            head_bytes_max: head.min(pool.segments().bytes() as usize),
            pool,
            mail,
            held: VecDeque::new(),
            singly: 0,
            group: Group::default(),
            lane: None,
            flights: VecDeque::new(),
            groups: Vec::new(),
            parcels: Vec::new(),
            log,
            unsynced: BTreeSet::new(),
            unsynced_bytes: 0,
            // Opening the pool has written it to both superblocks.
            recorded: log.last(),
            // A pool that is killed again and again makes checkpoints too.
            since_checkpoint: log.found_bytes,
            frozen_bytes: 0,
            next_try: 0,
            checkpoint: None,
            cleaning_since: None,
            spent: 0,
            in_vain: 0,
            search: Search::default(),
            uncounted: VecDeque::new(),
            count_tries: 0,
            lost: BTreeSet::new(),
            names: Names::new(),
            stopping: false,
            seen: 0,
            counted_at: None,
            least_free: usize::MAX,
            looks: 0,
        }
    }

    /// Runs until the pool is closed.
    pub fn run(&mut self) {
        self.lane();
        // When the oldest group came that is not durable, as far as that was seen.
        let mut loose: Option<Instant> = None;
        let mut looked = Instant::now();
        loop {
            if looked.elapsed() >= SETTLE {
                looked = Instant::now();
                self.look();
            }
            match self.turn() {
                Turn::Worked => self.settle_late(&mut loose),
                Turn::Stopped => return,
                // Whoever stopped it has panicked.
                Turn::Idle if self.stopping => return,
                Turn::Idle => {
                    let bell = self.mail.mailbox().bell();
                    let looks = self.search.is_on || !self.uncounted.is_empty();
                    let is_waiting = self.unsynced.is_empty() && !self.is_recorded();
                    let most = match (looks, is_waiting) {
                        (true, _) => SEARCH_LOOK,
                        (false, true) => QUIET,
                        (false, false) => SETTLE,
                    };
                    bell.sleep(most, || self.mail.is_any());
                    if self.mail.is_any() || self.search.is_on {
                        self.settle_late(&mut loose);
                    } else {
                        if looks {
                            self.settle()
                        } else {
                            self.rest()
                        }
                        loose = None;
                    }
                }
            }
        }
    }

    /// Makes durable what nobody has asked to be if that has waited for long, since `loose`.
    fn settle_late(&mut self, loose: &mut Option<Instant>) {
        if self.unsynced.is_empty() {
            *loose = None;
        } else if loose.get_or_insert_with(Instant::now).elapsed() >= SETTLE {
            self.settle();
            *loose = None;
        }
    }

    /// Notices that the pool was removed: nothing more is said to be durable then. And how much its
    /// file system has left, of which others have their part. What the pool does not need it gives
    /// back to them.
    fn look(&mut self) {
        self.pool.segments().look_outside();
        self.pool.look();
        if self.pool.is_poisoned() {
            return;
        }
        let last = self.log.last();
        let is_idle = std::mem::replace(&mut self.seen, last) == last;
        self.count_if_idle(is_idle);
        self.least_free = self.least_free.min(self.pool.segments().free());
        self.looks += 1;
        if self.looks < LOOKS {
            return;
        }
        self.looks = 0;
        let least = std::mem::replace(&mut self.least_free, usize::MAX);
        let surplus = self.pool.surplus(least).min(GIVEN_MAX);
        if surplus > 0 {
            self.pool.give_back(surplus);
        } else if self.pool.segments().may_try_again() {
            self.pool.try_again();
        }
    }

    /// Has blocks counted again where much may not count any more, as after a snapshot was
    /// destroyed, and nothing else is to be done: what is said to be free is free then. Once, until
    /// something is written.
    fn count_if_idle(&mut self, is_idle: bool) {
        let segments = self.pool.segments();
        let unknown = segments.unknown_bytes();
        let (used, _) = segments.used_and_left_bytes();
        let is_much = unknown >= u64::from(segments.bytes()).min(used / UNKNOWN_PART).max(1);
        if !is_idle || !is_much || self.counted_at == Some(self.log.last()) {
            return;
        }
        self.counted_at = Some(self.log.last());
        if self.pool.wanted_count().is_none() {
            self.pool.want_count(Some(segments.round() + 1));
        }
    }

    /// Makes durable what nobody has asked to be.
    pub fn settle(&mut self) {
        self.land_all();
        if !self.pool.is_poisoned() {
            self.sync();
        }
    }

    /// Writes one group, or waits for one.
    pub fn turn(&mut self) -> Turn {
        self.end_search();
        self.count_for_them();
        self.hold_back();
        if !self.flights.is_empty() {
            if !self.may_overlap() {
                if !self.may_relay() || !self.relay() {
                    self.land();
                }
                return Turn::Worked;
            }
            self.gather();
            if !self.may_go_behind() {
                self.wait();
                return Turn::Worked;
            }
        } else {
            self.gather();
        }
        if self.group.records.is_empty() && self.uncounted.is_empty() {
            return Turn::Idle;
        }
        if self.group.records.is_empty() {
            self.count_for_them();
            let waits = self.held.is_empty() && self.pool.is_running();
            return if waits { Turn::Idle } else { Turn::Worked };
        }
        self.carry_out()
    }

    /// Carries the group out.
    fn carry_out(&mut self) -> Turn {
        let (stop, wants_checkpoint) = (self.group.stop, self.group.checkpoint);
        match self.finds_room() {
            Room::Found => {}
            Room::None => {
                self.part();
                return Turn::Worked;
            }
            Room::Later => return Turn::Worked,
        }
        match self.commit() {
            // Told when it has landed.
            None if !wants_checkpoint => {
                if !self.may_overlap() && !self.may_relay() {
                    self.land();
                }
            }
            status => {
                let status = status.unwrap_or_else(|| self.land_alone());
                self.group.unchecked = wants_checkpoint && !self.look_after(true);
                let failed = wants_checkpoint && status.is_ok() && self.pool.is_poisoned();
                self.answer(if failed { Status::IoErr } else { status });
            }
        }
        self.look_after(false);
        if stop {
            self.close();
            return Turn::Stopped;
        }
        Turn::Worked
    }

    /// Takes records out of the mailbox, as many as fit.
    fn gather(&mut self) {
        let align = self.pool.align();
        let bytes_max = GROUP_BYTES_MAX.min(self.pool.segments().bytes() / SEGMENT_GROUPS);
        let alone = self.flights.is_empty();
        let changes_under_way = self.is_change_under_way();
        let options = self.pool.options();
        let records_max = match options.commit {
            _ if self.singly > 0 => 1,
            Commit::Group => options.group_records.clamp(1, RECORDS_MAX),
            Commit::TaskQueue(_) => 1,
        };
        while self.group.records.len() < records_max && !self.group.closed {
            let Some(record) = self.next() else { return };
            let Some(record) = self.keep_uncounted(record) else { continue };
            let group = &mut self.group;
            let (count, bytes) = match &record.body {
                Body::Write(payload) => (payload.blocks().len(), payload.bytes().len() as u32),
                Body::Zero(_) => (1, 0),
                Body::Move(moved) => (moved.moves.len(), 0),
                Body::Catalogue(_) => (1, (CHANGE_BYTES_MAX as u32).next_multiple_of(align)),
                Body::Flush | Body::Checkpoint | Body::Stop => (0, 0),
            };
            let count = group.descriptors.len() + count;
            let head = format::head_bytes(count, align);
            let fits = count <= format::DESCRIPTORS_MAX
                && head as usize <= self.head_bytes_max
                && u64::from(head + group.payload_bytes) + u64::from(bytes) <= bytes_max.into();
            let follows = match record.body {
                // Writes go on beside it: a snapshot is a record as theirs are.
                Body::Catalogue(_) => !group.changes_catalogue && !changes_under_way,
                _ => alone || may_follow(&record),
            };
            // A move is alone: it does not look for space.
            let fits = fits && !matches!(record.body, Body::Move(_));
            if (!fits && !group.records.is_empty()) || !follows {
                self.held.push_front(record);
                return;
            }
            self.singly = self.singly.saturating_sub(1);
            group.take(record, &self.pool, align);
        }
    }

    /// Begins to write the group; answers how it has ended if it is not on its way then.
    fn commit(&mut self) -> Option<Status> {
        if self.pool.is_poisoned() {
            self.land_all();
            return Some(Status::IoErr);
        }
        if self.group.descriptors.is_empty() {
            self.land_all();
            // A flush is answered by what it has synced, also where what is beside it is refused.
            if (self.group.durable && !self.sync()) || self.pool.is_poisoned() {
                return Some(Status::IoErr);
            }
            if !self.keeps_enough() {
                return Some(Status::NoSpc);
            }
            // Pages that are to be written again are in no group.
            publish::group(&self.pool, &self.group, 0);
            return Some(Status::Ok);
        }
        match self.write() {
            Ok(()) => None,
            Err(status) => {
                self.land_all();
                // Others who only wait for what was before must not suffer from it.
                let synced = !self.group.durable || self.sync();
                self.unpublish();
                Some(if synced { status } else { Status::IoErr })
            }
        }
    }

    /// Finds a place for the group and begins to write it there.
    fn write(&mut self) -> Result<(), Status> {
        if !self.group.admitted && !self.is_admitted() {
            return Err(Status::NoSpc);
        }
        let len = self.group.len(self.pool.align());
        let much = self.unsynced_bytes + u64::from(len) >= self.pool.options().sync_bytes;
        self.group.durable |= much;
        self.append()
    }

    /// Makes every group durable that was written; says whether they are. It is never tried again.
    /// None is on its way.
    fn sync(&mut self) -> bool {
        debug_assert!(self.flights.is_empty(), "what is on its way would not be durable");
        if !self.sync_segments() {
            return false;
        }
        self.log.durable = self.log.last();
        true
    }

    /// Tells everybody in the group how it has ended, and makes it empty.
    fn answer(&mut self, status: Status) {
        publish::answer(&self.pool, &mut self.group, status, &mut self.lost, &mut self.names);
        self.wake();
        self.group.clear();
    }

    /// Wakes those who were told something.
    fn wake(&mut self) {
        self.names.drain(..).for_each(|name| _ = name.bell().ring());
    }

    /// Begins a checkpoint if it is time for one, and says whether space is short. One that is to
    /// be made at once is waited for; answers whether it is there.
    fn look_after(&mut self, at_once: bool) -> bool {
        if self.checkpoint.as_ref().is_some_and(Thread::is_ended) {
            self.join();
        }
        // Pages that are only in memory are bounded, too.
        let dirty_max = self.dirty_max();
        let is_cleaned = self.checkpoint.is_some() && self.pool.is_cleaning();
        let round_bytes = clean::round_bytes(&self.pool, is_cleaned);
        let dirty = self.pool.segments().dirty_bytes() >= dirty_max;
        let is_long = self.since_checkpoint >= round_bytes.max(self.next_try);
        let much = dirty || is_long || self.pool.segments().is_soiled();
        if self.pool.is_poisoned() {
            return false;
        }
        if at_once {
            self.join();
            return self.checkpoint_now(Cleaning::Nothing);
        }
        // While its pages are written it is needed as it is.
        if self.cleaning_since.is_none() && is_cleaned {
            self.cleaning_since = Some(self.since_checkpoint);
        }
        let is_overdue = |from| dirty || self.since_checkpoint >= from + round_bytes;
        let overdue = self.cleaning_since.is_some_and(is_overdue);
        if much && self.checkpoint.is_none() {
            self.checkpoint_beside();
        } else if overdue && !self.pool.is_hurried() && self.pool.recount() != Recount::Again {
            // Cleaning behind the last one has had its time. Counting that had been broken off
            // before goes on to its end.
            self.pool.set_hurried(true);
        } else if is_cleaned && clean::is_scarce(&self.pool) {
            self.pool.pace().ask();
        }
        self.pool.prepare(0);
        // What is answered early is in memory, and has to find a place in files that exist. None
        // that could be made counts: the file system may be full.
        let free = self.pool.segments().free_for(Want::Write);
        let next = usize::from(self.log.place.next != SEGMENT_NONE);
        let bytes = (free + next) as u64 * u64::from(self.pool.segments().bytes());
        let wanted = self.pool.early_bytes();
        let left = self.pool.segments().left_bytes();
        let is_tight = bytes.min(left) < wanted || self.pool.promises_all_but(wanted);
        self.pool.set_tight(is_tight || self.is_overrun());
        true
    }

    /// The maps as they are now, with the end of the log.
    pub(crate) fn freeze(&mut self) -> Frozen {
        self.frozen_bytes = std::mem::take(&mut self.since_checkpoint);
        self.next_try = 0;
        self.pool.meters().checkpointed();
        let round = self.pool.segments().begin_round();
        let volumes = self.pool.volumes();
        let maps = volumes.by_id.values();
        let maps = maps.map(|live| {
            let (family, last, owned) = (live.family, live.map.copied(), live.owned());
            let copied = Copied { family, last, owned };
            // Nobody writes to a snapshot.
            let map = match live.traits.is_snapshot {
                true => live.map.whole(),
                false => Arc::new(live.map.freeze()),
            };
            (live.listed(), copied, map)
        });
        let (live, unknown_bytes) = self.pool.segments().live();
        let (next_id, copies) = (volumes.next_id, volumes.copies);
        let whole = Whole { next_id, copies, live, unknown_bytes };
        Frozen { round, log: self.log.place, whole, volumes: maps.collect() }
    }

    /// A checkpoint that this thread waits for, and cleaning behind it. It says whether
    /// the checkpoint is durable.
    fn checkpoint_now(&mut self, cleaning: Cleaning) -> bool {
        // What the checkpoint says is to be behind everything that it refers to.
        self.land_all();
        if self.pool.is_poisoned() || !self.sync() {
            return false;
        }
        let (frozen, pool) = (self.freeze(), Arc::clone(&self.pool));
        let Some(marks) = checkpoint::run(&pool, &frozen) else {
            self.put_off();
            return false;
        };
        clean::each(&pool, &frozen, &marks, cleaning, |moved| self.move_blocks(moved));
        true
    }

    /// Writes and publishes a group of blocks that are moved, durably; says whether there was
    /// space. Nothing else is on its way.
    pub(crate) fn move_blocks(&mut self, moved: Moved) -> bool {
        let others = std::mem::take(&mut self.group);
        let align = self.pool.align();
        let record = Record::of(Body::Move(Arc::new(moved)), None);
        self.group.take(record, &self.pool, align);
        let is_written = match self.group.descriptors.is_empty() {
            true if self.keeps_enough() && self.sync() => {
                publish::group(&self.pool, &self.group, 0);
                true
            }
            true => false,
            false => self.is_admitted() && self.append().is_ok() && self.land_alone().is_ok(),
        };
        self.group = others;
        is_written
    }

    /// A checkpoint beside the writes, where there are threads.
    fn checkpoint_beside(&mut self) {
        if !self.pool.is_running() {
            self.checkpoint_now(Cleaning::Due);
            return;
        }
        self.land_all();
        if self.pool.is_poisoned() || !self.sync() {
            return;
        }
        let (frozen, pool) = (self.freeze(), Arc::clone(&self.pool));
        let run = move || {
            let of = Arc::downgrade(&pool);
            let is_waited_for = |pool: Arc<Pool<D>>| pool.is_hurried() || clean::is_scarce(&pool);
            thread::be_patient(move || of.upgrade().is_none_or(is_waited_for));
            if let Some(marks) = checkpoint::run(&pool, &frozen) {
                pool.set_cleaning(true);
                clean::beside(&pool, &frozen, &marks);
            }
            frozen.let_go();
            pool.set_phase(Phase::Rests);
        };
        self.pool.set_cleaning(false);
        self.pool.set_phase(Phase::Writes);
        self.cleaning_since = None;
        let directory = self.pool.segments().directory();
        match Thread::start(directory, "volume-checkpoint", run) {
            Ok(thread) => self.checkpoint = Some(thread),
            Err(error) => {
                tracing::warn!("no thread for a checkpoint: {error}");
                self.pool.set_phase(Phase::Rests);
                self.pool.segments().end_round(false);
                self.put_off();
            }
        }
    }

    /// The last checkpoint has come to nothing: the log behind the one before is as long as it is.
    fn put_off(&mut self) {
        self.since_checkpoint += std::mem::take(&mut self.frozen_bytes);
        self.next_try = self.since_checkpoint + self.pool.options().checkpoint_bytes / TRY_PART;
    }

    /// Waits for the checkpoint that is on its way. The cleaning behind it waits for this thread,
    /// and is told to leave that.
    fn join(&mut self) {
        let Some(thread) = self.checkpoint.take() else { return };
        self.pool.set_hurried(true);
        if !thread.join(self.pool.segments().directory()) {
            self.pool.poison("a checkpoint has panicked");
        }
        self.pool.set_hurried(false);
        if !self.pool.is_cleaning() {
            self.put_off();
        }
    }

    /// The last thing: everything is durable, and the next opening has nothing to do.
    fn close(&mut self) {
        self.land_all();
        self.join();
        self.pool.end_preparing();
        let is_behind = self.since_checkpoint > 0 || !self.unsynced.is_empty();
        if !self.pool.is_poisoned() && (is_behind || !self.is_recorded()) {
            // If the superblock that is written now is lost, the other one has the log to rely on.
            self.rest();
            self.checkpoint_now(Cleaning::Nothing);
        }
    }
}

impl<D: Directory> fmt::Debug for Committer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Committer").field("log", &self.log).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

//! The committer: takes what waits, writes it as one group, makes it durable if anybody wants that,
//! and tells everybody.
//!
//! It does not wait for more to come: what comes while a group is on its way is the next one. It is
//! the only one that writes to the log and that changes the trees of maps.

mod group;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_core::Status;
use blockyard_sync::mailbox::{Mailbox, Owner};

use crate::buffer::Buffer;
use crate::checkpoint::{self, Frozen};
use crate::clean;
use crate::format::catalogue::CHANGE_BYTES_MAX;
use crate::format::entry::Entry;
use crate::format::group::{self as format, DESCRIPTORS_MAX, Head};
use crate::format::superblock::SEGMENT_NONE;
use crate::log::LogEnd;
use crate::map::Map;
use crate::pool::Pool;
use crate::record::{Body, Moved, Record, Reply};
use crate::relocate::{self, Moves};
use crate::segments::{RESERVE, Want};
use crate::store::Directory;

use group::Group;

/// Longest group, unless a single write is longer. One large write is as fast as several, and where
/// the disk is slow to answer it is faster.
const GROUP_BYTES_MAX: u32 = 4 << 20;

/// Most records in a group: the kernel takes 1024 parts in a call.
const RECORDS_MAX: usize = 1000;

/// When what nobody has asked to be durable is made so.
const SETTLE: Duration = Duration::from_secs(1);

/// How often space is looked for where there is none, by a checkpoint and cleaning each time.
const ROOM_TRIES: usize = 5;

/// So many groups are refused without looking for space again, after it was in vain.
const VAIN_MAX: u32 = 16;

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
    held: Option<Record>,
    group: Group,
    log: LogEnd,
    /// Segments with groups that are not durable.
    unsynced: BTreeSet<u32>,
    unsynced_bytes: u64,
    /// Bytes of log since the last checkpoint began.
    since_checkpoint: u64,
    checkpoint: Option<JoinHandle<()>>,
    /// So many times more nobody looks for space: there was none.
    in_vain: u32,
    head: Buffer,
}

impl<D: Directory> Committer<D> {
    pub(crate) fn new(pool: Arc<Pool<D>>, mail: Owner<Record>, log: LogEnd) -> Committer<D> {
        let head = format::head_bytes(DESCRIPTORS_MAX, pool.align()) as usize;
        let head = pool.memory().take_beyond(head.min(pool.segments().bytes() as usize));
        Committer {
            mark: checkpoint::pool_mark(&pool),
            pool,
            mail,
            held: None,
            group: Group::default(),
            log,
            unsynced: BTreeSet::new(),
            unsynced_bytes: 0,
            since_checkpoint: 0,
            checkpoint: None,
            in_vain: 0,
            head,
        }
    }

    /// Runs until the pool is closed.
    pub fn run(mut self) {
        loop {
            match self.turn() {
                Turn::Worked => {}
                Turn::Stopped => return,
                Turn::Idle => {
                    let bell = self.mail.mailbox().bell();
                    bell.sleep(SETTLE, || self.mail.is_any());
                    if !self.mail.is_any() {
                        self.settle();
                    }
                }
            }
        }
    }

    /// Makes durable what nobody has asked to be.
    pub fn settle(&mut self) {
        if !self.pool.is_poisoned() {
            self.sync();
        }
    }

    /// Writes one group.
    pub fn turn(&mut self) -> Turn {
        self.gather();
        if self.group.records.is_empty() {
            return Turn::Idle;
        }
        let status = self.commit();
        let stop = self.group.stop;
        let wants_checkpoint = self.group.checkpoint;
        if !wants_checkpoint {
            self.answer(status);
        }
        self.look_after(wants_checkpoint);
        if wants_checkpoint {
            let failed = status.is_ok() && self.pool.is_poisoned();
            self.answer(if failed { Status::IoErr } else { status });
        }
        if stop {
            self.close();
            return Turn::Stopped;
        }
        Turn::Worked
    }

    /// Takes records out of the mailbox, as many as fit.
    fn gather(&mut self) {
        let align = self.pool.align();
        let bytes_max = GROUP_BYTES_MAX.min(self.pool.segments().bytes());
        let group = &mut self.group;
        while group.records.len() < RECORDS_MAX {
            let Some(record) = self.held.take().or_else(|| self.mail.take()) else { return };
            let (count, bytes) = match &record.body {
                Body::Write(payload) => (payload.blocks().len(), payload.bytes().len() as u32),
                Body::Zero(_) => (1, 0),
                Body::Move(moved) => (moved.from.len(), moved.payload.bytes().len() as u32),
                Body::Catalogue(_) => (1, (CHANGE_BYTES_MAX as u32).next_multiple_of(align)),
                Body::Flush | Body::Checkpoint | Body::Stop => (0, 0),
            };
            let count = group.descriptors.len() + count;
            let head = format::head_bytes(count, align);
            let fits = head as usize <= self.head.len()
                && u64::from(head + group.payload_bytes) + u64::from(bytes) <= bytes_max.into();
            if !fits && !group.records.is_empty() {
                self.held = Some(record);
                return;
            }
            if !group.take(record, &self.pool, align) {
                return;
            }
        }
    }

    /// Writes the group, makes it durable if anybody wants that, and publishes its blocks.
    fn commit(&mut self) -> Status {
        if self.pool.is_poisoned() {
            return Status::IoErr;
        }
        let mut address = 0;
        if !self.group.descriptors.is_empty() {
            match self.write() {
                Ok(place) => address = place,
                Err(status) => {
                    // Others who only wait for what was before must not suffer from it.
                    let synced = !self.group.durable || self.sync();
                    self.unpublish();
                    return if synced { status } else { Status::IoErr };
                }
            }
        }
        let much = self.unsynced_bytes >= self.pool.options().sync_bytes;
        if (self.group.durable || much) && !self.sync() {
            return Status::IoErr;
        }
        self.publish(address);
        if self.group.frees {
            self.in_vain = 0;
        }
        Status::Ok
    }

    /// Writes the group; answers the address of its first block.
    fn write(&mut self) -> Result<u64, Status> {
        let align = self.pool.align();
        let len =
            format::head_bytes(self.group.descriptors.len(), align) + self.group.payload_bytes;
        if !self.log.has_room(len, self.pool.segments()) {
            self.make_room(len);
        }
        self.append(Want::Log)
    }

    /// Writes the group behind the last one.
    fn append(&mut self, want: Want) -> Result<u64, Status> {
        let align = self.pool.align();
        let count = self.group.descriptors.len();
        let head_bytes = format::head_bytes(count, align);
        let len = head_bytes + self.group.payload_bytes;
        let address = self.log.reserve(len, self.pool.segments(), want).ok_or(Status::NoSpc)?;
        let head = Head {
            pool: self.mark,
            epoch: self.log.epoch,
            number: self.log.place.number,
            chain: self.log.place.chain,
            durable: self.log.durable,
            next: self.log.place.next,
            count: count as u32,
            head_bytes,
            payload_bytes: self.group.payload_bytes,
        };
        let chain = format::print(&head, &self.group.descriptors, &mut self.head);
        let mut parts: Vec<&[u8]> = Vec::with_capacity(1 + self.group.records.len());
        parts.push(&self.head[..head_bytes as usize]);
        let mut changes = self.group.changes.iter();
        for record in &self.group.records {
            match &record.body {
                Body::Write(payload) => parts.push(payload.bytes()),
                Body::Move(moved) => parts.push(moved.payload.bytes()),
                Body::Catalogue(_) if record.durable => {
                    parts.extend(changes.next().map(|bytes| &bytes[..]));
                }
                _ => {}
            }
        }
        if let Err(error) = self.pool.segments().write(address, &parts) {
            self.pool.poison(&format!("a write to the log failed: {error}"));
            return Err(Status::IoErr);
        }
        self.unsynced.insert(self.log.place.segment);
        self.unsynced_bytes += u64::from(len);
        self.since_checkpoint += u64::from(len);
        self.log.advance(len, chain);
        Ok(address + u64::from(head_bytes))
    }

    /// Makes every group durable that was written; says whether they are. It is never tried again.
    fn sync(&mut self) -> bool {
        while let Some(segment) = self.unsynced.pop_first() {
            if let Err(error) = self.pool.segments().sync(segment) {
                self.pool.poison(&format!("a sync of the log failed: {error}"));
                return false;
            }
        }
        self.unsynced_bytes = 0;
        self.log.durable = self.log.last();
        true
    }

    /// Puts the group's blocks into the maps.
    fn publish(&mut self, mut address: u64) {
        let align = self.pool.align();
        for record in &self.group.records {
            match (&record.body, &record.volume) {
                (Body::Write(payload), Some(volume)) => {
                    let (number, from) = Map::place(record.first);
                    let to = from + payload.blocks().len() as u32;
                    volume.map.with(number, |span| {
                        for (block, stored) in (from..to).zip(payload.blocks()) {
                            let place = address + u64::from(stored.offset);
                            let entry = Entry::new(place, stored.len, stored.codec, stored.crc);
                            span.set(block, entry);
                        }
                        span.retire(from, to, record.serial);
                    });
                    address += payload.bytes().len() as u64;
                }
                (Body::Zero(blocks), Some(volume)) => {
                    let (number, from) = Map::place(record.first);
                    volume.map.with(number, |span| {
                        span.clear(from, from + blocks);
                        span.retire(from, from + blocks, record.serial);
                    });
                }
                (Body::Move(moved), _) => {
                    let stored = moved.payload.blocks();
                    let moves: Moves = (moved.from.iter().zip(stored))
                        .map(|((block, from), stored)| {
                            let place = address + u64::from(stored.offset);
                            let to = Entry::new(place, stored.len, stored.codec, stored.crc);
                            (*block, *from, to)
                        })
                        .collect();
                    let segments = self.pool.segments();
                    let is_left =
                        |home: Entry| moved.pages.contains(&segments.split(home.address()).0);
                    let volumes = self.pool.volumes();
                    relocate::blocks(&volumes, moves);
                    if !moved.pages.is_empty() {
                        relocate::pages(&volumes, is_left);
                    }
                    address += moved.payload.bytes().len() as u64;
                }
                (Body::Catalogue(change), _) if record.durable => {
                    let applied = self.pool.volumes().apply(change);
                    assert!(applied.is_some(), "{change:?} was checked");
                    let len = change.print().len() as u64;
                    address += len.next_multiple_of(align.into());
                }
                _ => {}
            }
        }
    }

    /// Takes the group's blocks back, because there was no space for them.
    fn unpublish(&mut self) {
        if self.pool.is_poisoned() {
            return;
        }
        for record in &self.group.records {
            let Some(volume) = &record.volume else { continue };
            let (number, from) = Map::place(record.first);
            let blocks = match &record.body {
                Body::Write(payload) => payload.blocks().len() as u32,
                Body::Zero(blocks) => *blocks,
                _ => continue,
            };
            volume.map.with(number, |span| span.retire(from, from + blocks, record.serial));
        }
    }

    /// Tells everybody how the group has ended.
    fn answer(&mut self, status: Status) {
        let mut rung: Option<Arc<Mailbox<Reply>>> = None;
        for record in self.group.records.drain(..) {
            let Some(reply) = record.reply else { continue };
            let status = match &record.body {
                // What was refused before it came into the group.
                Body::Catalogue(_) if !record.durable => {
                    Status::from_u8(record.serial as u8).expect("it was put there as a status")
                }
                Body::Flush | Body::Checkpoint | Body::Stop if status == Status::NoSpc => {
                    Status::Ok
                }
                _ => status,
            };
            reply.to.post([Reply { token: reply.token, status }].into_iter());
            if let Some(before) = rung.take_if(|before| !Arc::ptr_eq(before, &reply.to)) {
                before.bell().ring();
            }
            rung = Some(reply.to);
        }
        if let Some(last) = rung {
            last.bell().ring();
        }
        self.group = Group { records: std::mem::take(&mut self.group.records), ..Group::default() };
    }

    /// Begins a checkpoint if it is time for one, and says whether space is short.
    fn look_after(&mut self, at_once: bool) {
        if self.checkpoint.as_ref().is_some_and(JoinHandle::is_finished) {
            self.join();
        }
        let much = self.since_checkpoint >= self.pool.options().checkpoint_bytes;
        if self.pool.is_poisoned() {
            return;
        }
        if at_once {
            self.join();
            self.checkpoint_now(false);
        } else if much && self.checkpoint.is_none() {
            self.checkpoint_beside();
        }
        self.pool.prepare();
        let available = self.pool.segments().available() as u64;
        let bytes = available.saturating_sub(3) * u64::from(self.pool.segments().bytes());
        self.pool.set_tight(bytes < 2 * self.pool.options().memory_bytes);
    }

    /// The maps as they are now, with the end of the log.
    fn freeze(&mut self) -> Frozen {
        self.since_checkpoint = 0;
        let round = self.pool.segments().begin_round();
        let volumes = self.pool.volumes();
        let maps = volumes.by_id.values().map(|live| (live.traits.clone(), live.map.freeze()));
        Frozen { round, log: self.log.place, next_id: volumes.next_id, volumes: maps.collect() }
    }

    /// A checkpoint that this thread waits for, and cleaning if it is asked for. It says whether
    /// the checkpoint is durable.
    fn checkpoint_now(&mut self, cleans: bool) -> bool {
        // What the checkpoint says is to be behind everything that it refers to.
        if !self.sync() {
            return false;
        }
        let (frozen, pool) = (self.freeze(), Arc::clone(&self.pool));
        let Some(marks) = checkpoint::run(&pool, &frozen) else { return false };
        if cleans {
            clean::each(&pool, &frozen, &marks, |moved| self.move_blocks(moved));
        }
        true
    }

    /// Writes and publishes a group of blocks that are moved; says whether there was space.
    fn move_blocks(&mut self, moved: Moved) -> bool {
        let others = std::mem::take(&mut self.group);
        let align = self.pool.align();
        let record = Record { durable: false, ..Record::of(Body::Move(Arc::new(moved)), None) };
        self.group.take(record, &self.pool, align);
        let written = match self.group.descriptors.is_empty() {
            true => Ok(0),
            false => self.append(Want::Reserve),
        };
        if let Ok(address) = written {
            self.publish(address);
        }
        self.group = others;
        written.is_ok()
    }

    /// A checkpoint beside the writes, where there are threads.
    fn checkpoint_beside(&mut self) {
        if !self.pool.is_running() {
            self.checkpoint_now(true);
            return;
        }
        if !self.sync() {
            return;
        }
        let (frozen, pool) = (self.freeze(), Arc::clone(&self.pool));
        let builder = std::thread::Builder::new().name("volume-checkpoint".to_owned());
        let run = move || {
            if let Some(marks) = checkpoint::run(&pool, &frozen) {
                clean::beside(&pool, &frozen, &marks);
            }
        };
        match builder.spawn(run) {
            Ok(thread) => self.checkpoint = Some(thread),
            Err(error) => tracing::warn!("no thread for a checkpoint: {error}"),
        }
    }

    /// Waits for the checkpoint that is on its way. The cleaning behind it waits for this thread,
    /// and is told to leave that.
    fn join(&mut self) {
        let Some(thread) = self.checkpoint.take() else { return };
        self.pool.set_hurried(true);
        if thread.join().is_err() {
            self.pool.poison("a checkpoint has panicked");
        }
        self.pool.set_hurried(false);
    }

    /// Looks for space where there is none for the next group: what two checkpoints do not need any
    /// more, and what cleaning wins back. The log moves there.
    fn make_room(&mut self, len: u32) {
        // Where it was in vain, only now and then again.
        self.in_vain = self.in_vain.saturating_sub(1);
        if self.in_vain > 0 {
            return;
        }
        self.join();
        self.pool.segments().try_again();
        for _ in 0..ROOM_TRIES {
            let before = self.log.place;
            let mut moved = None;
            if !self.log.has_room(len, self.pool.segments()) {
                // The last group names nothing behind it: only a checkpoint can say where to go.
                let segments = self.pool.segments();
                moved = segments.take(Want::Log).or_else(|| segments.take(Want::Reserve));
            }
            if let Some(segment) = moved {
                self.log.place.segment = segment;
                self.log.place.offset = 0;
                self.log.place.next = SEGMENT_NONE;
            }
            if !self.checkpoint_now(true) {
                // Nothing was written there, unless by cleaning behind a checkpoint.
                self.log.place = before;
                moved.inspect(|segment| self.pool.segments().put_back(*segment));
                break;
            }
            let is_free = self.pool.segments().available() > RESERVE;
            if is_free && self.log.has_room(len, self.pool.segments()) {
                return;
            }
        }
        self.in_vain = VAIN_MAX;
    }

    /// The last thing: everything is durable, and the next opening has nothing to do.
    fn close(&mut self) {
        self.join();
        self.pool.end_preparing();
        if !self.pool.is_poisoned() && (self.since_checkpoint > 0 || !self.unsynced.is_empty()) {
            self.checkpoint_now(false);
        }
    }
}

impl<D: Directory> fmt::Debug for Committer<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Committer").field("log", &self.log).finish_non_exhaustive()
    }
}

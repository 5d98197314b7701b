//! The log writer of a mirror. Each copy that is written has its own log writer, and a write batch
//! has ended when it has ended in all of them.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use blockyard_sync::event_count::{EventCount, Waker};
use blockyard_sync::rcu_cell::RcuReader;

use super::members::{CopyResults, Members, SLOTS};
use super::{MirrorFile, Shared};
use crate::log_writer::{Durability, Ended, LogWriter, WriteBatch};
use crate::{GoodCopies, SegmentStore};

/// A write batch in flight.
struct MirrorBatch<D: SegmentStore> {
    file: Arc<MirrorFile<D>>,
    range: Range<u64>,
    /// The copies to which it is written.
    targets: GoodCopies,
    /// The copies that were good.
    good: GoodCopies,
    /// The copies in which the file could not be opened, by slot.
    unopened: Vec<(usize, io::Error)>,
}

/// The wakers of the log writers, by slot.
type Wakers = Arc<[OnceLock<Waker>; SLOTS]>;

/// The log writer of a mirror.
pub struct MirrorLogWriter<D: SegmentStore> {
    shared: Arc<Shared<D>>,
    members: RcuReader<Members<D>>,
    /// By slot. That of a copy which has joined is made for the first batch that goes there.
    log_writers: [Option<D::LogWriter>; SLOTS],
    wakers: Wakers,
    /// Write batches in flight, the oldest first.
    in_flight: VecDeque<MirrorBatch<D>>,
    /// Write batches for other copies than the first, to be reused.
    spare: Vec<WriteBatch>,
}

impl<D: SegmentStore> MirrorLogWriter<D> {
    pub(super) fn new(
        shared: &Arc<Shared<D>>,
        scratch: Option<&Arc<MirrorFile<D>>>,
    ) -> MirrorLogWriter<D> {
        let mut log_writer = MirrorLogWriter {
            shared: Arc::clone(shared),
            members: RcuReader::new(&shared.members),
            log_writers: std::array::from_fn(|_| None),
            wakers: Arc::new(std::array::from_fn(|_| OnceLock::new())),
            in_flight: VecDeque::new(),
            spare: Vec::new(),
        };
        let members = shared.members();
        let is_several = members.list().len() > 1;
        for member in members.written() {
            let scratch = scratch.and_then(|file| file.side(member.slot));
            let own = member.directory().log_writer(scratch);
            log_writer.add(member.slot, own, is_several);
        }
        log_writer
    }

    fn add(&mut self, slot: usize, mut log_writer: D::LogWriter, is_several: bool) {
        if is_several {
            log_writer.submit_at_once();
        }
        if let Some(waker) = log_writer.waker() {
            _ = self.wakers[slot].set(waker);
        }
        self.log_writers[slot] = Some(log_writer);
    }

    /// Makes the log writers of copies that have joined, and drops those of copies that were
    /// detached.
    #[cold]
    fn follow(&mut self, members: &Members<D>) {
        for member in members.written().filter(|it| !self.has(it.slot)).cloned().collect::<Vec<_>>()
        {
            self.log_writers.iter_mut().flatten().for_each(LogWriter::submit_at_once);
            let own = member.directory().log_writer(None);
            self.add(member.slot, own, true);
        }
        let in_flight = |slot| self.in_flight.iter().any(|batch| batch.targets.has(slot));
        let gone = |slot: &usize| members.find(*slot).is_none() && !in_flight(*slot);
        let gone: Vec<usize> = (0..SLOTS).filter(|slot| self.has(*slot)).filter(gone).collect();
        gone.into_iter().for_each(|slot| self.log_writers[slot] = None);
    }

    fn has(&self, slot: usize) -> bool {
        self.log_writers[slot].is_some()
    }

    /// The copies; the log writers follow them.
    fn members(&mut self) -> Arc<Members<D>> {
        let members = Arc::clone(self.members.get());
        let is_gone = |slot| self.has(slot) && members.find(slot).is_none();
        let is_new = |slot| !self.has(slot);
        if members.written_slots().numbers().any(is_new) || (0..SLOTS).any(is_gone) {
            self.follow(&members);
        }
        members
    }

    /// Duplicates a write batch for another copy.
    fn duplicate(&mut self, write_batch: &WriteBatch) -> WriteBatch {
        let memory = &self.shared.memory;
        let spare = self.spare.pop();
        let mut duplicate = spare
            .unwrap_or_else(|| WriteBatch::new(memory.take_beyond(write_batch.head_bytes_max())));
        write_batch.copy_into(&mut duplicate, memory);
        duplicate
    }
}

impl<D: SegmentStore> LogWriter<MirrorFile<D>> for MirrorLogWriter<D> {
    fn depth(&self) -> usize {
        let depths = self.log_writers.iter().flatten().map(LogWriter::depth);
        depths.min().unwrap_or(1)
    }

    /// A write batch takes as long as in the slowest copy.
    fn waits_for_clients(&self) -> bool {
        self.log_writers.iter().flatten().any(LogWriter::waits_for_clients)
    }

    /// Wakes all log writers: when a copy fails, the committer sleeps in another one.
    fn waker(&self) -> Option<Waker> {
        let wakers = Arc::clone(&self.wakers);
        let call = move || wakers.iter().filter_map(OnceLock::get).for_each(Waker::wake);
        Some(Waker::new(call))
    }

    fn renew(&mut self) {
        self.members();
    }

    fn begin(
        &mut self,
        file: &Arc<MirrorFile<D>>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        let range = offset..offset + write_batch.len() as u64;
        // Invariant 6: first the range, then which copies get it. A resync waits for the range.
        file.begin(range.clone());
        let members = self.members();
        let mut unopened = Vec::new();
        let targets =
            GoodCopies::of(members.written().filter_map(|it| match file.written_side(it) {
                Ok(side) => side.map(|_| it.slot),
                Err(error) => {
                    unopened.push((it.slot, error));
                    None
                }
            }));
        let good = members.good_slots();
        let mut rest = targets.numbers();
        let first = rest.next();
        for slot in rest {
            let duplicate = self.duplicate(&write_batch);
            if let (Some(log_writer), Some(file)) = (&mut self.log_writers[slot], file.side(slot)) {
                log_writer.begin(file, offset, duplicate, durability);
            }
        }
        if let Some(slot) = first
            && let (Some(log_writer), Some(file)) = (&mut self.log_writers[slot], file.side(slot))
        {
            log_writer.begin(file, offset, write_batch, durability);
        }
        let file = Arc::clone(file);
        self.in_flight.push_back(MirrorBatch { file, range, targets, good, unopened });
    }

    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        let Some(oldest) = self.in_flight.front() else { return true };
        // The other log writers end at about the same time.
        let first = oldest.targets.numbers().next();
        let log_writer = first.and_then(|slot| self.log_writers[slot].as_mut());
        log_writer.is_none_or(|it| it.wait(event_count, is_there))
    }

    fn end(&mut self) -> Option<Ended> {
        let MirrorBatch { file, range, targets, good, unopened } = self.in_flight.pop_front()?;
        let mut results = CopyResults::default();
        for (slot, error) in unopened {
            results.add_slot(slot, good.has(slot), Err(error));
        }
        let mut write_batch = None;
        let first = targets.numbers().next();
        for slot in targets.numbers() {
            let ended = self.log_writers[slot].as_mut().and_then(LogWriter::end);
            let Some((back, result)) = ended else { continue };
            results.add_slot(slot, good.has(slot), result);
            match back {
                Some(back) if Some(slot) == first => write_batch = Some(back),
                Some(mut duplicate) => {
                    duplicate.clear();
                    self.spare.push(duplicate);
                }
                None => {}
            }
        }
        // Record the failure of a copy before a repair may write to this range.
        let result = self.shared.combine(results);
        file.end(&range);
        Some((write_batch, result))
    }
}

impl<D: SegmentStore> fmt::Debug for MirrorLogWriter<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_flight = self.in_flight.len();
        f.debug_struct("MirrorLogWriter").field("in_flight", &in_flight).finish_non_exhaustive()
    }
}

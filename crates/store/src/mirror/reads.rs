//! Reads from the first good copy. The caller that finds damaged data reads again
//! from the other copy ([`crate::segments::Segments::read_whole`]).

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::rcu_cell::RcuCell;

use super::MirrorFile;
use super::members::{Members, SLOTS};
use crate::buffer::Buffer;
use crate::reads::{FinishedRead, Reads};
use crate::{EventFd, GoodCopies, SegmentStore};

/// Longest sleep while reads of several copies are in flight, which happens only shortly after one
/// has failed or was detached.
const BOTH: Duration = Duration::from_millis(1);

/// Reads from a mirror.
pub struct MirrorReads<D: SegmentStore> {
    /// Only looked into: an idle reader must not keep a copy open that has left the pool.
    members: Arc<RcuCell<Members<D>>>,
    /// The generation of `members` that `good` and `reads` follow.
    generation: u64,
    good: GoodCopies,
    /// A copy has left, and reads of it are in flight.
    is_leaving: bool,
    event_fd: Option<EventFd>,
    /// By slot.
    reads: [Option<D::Reads>; SLOTS],
    /// The slots of which there are reads.
    opened: GoodCopies,
    /// Reads that could not start.
    refused: Vec<FinishedRead>,
}

impl<D: SegmentStore> MirrorReads<D> {
    pub(super) fn new(
        members: &Arc<RcuCell<Members<D>>>,
        event_fd: Option<&EventFd>,
    ) -> MirrorReads<D> {
        let none = GoodCopies::of(std::iter::empty());
        let mut all = MirrorReads {
            members: Arc::clone(members),
            generation: 0,
            good: none,
            is_leaving: false,
            event_fd: event_fd.cloned(),
            reads: std::array::from_fn(|_| None),
            opened: none,
            refused: Vec::new(),
        };
        all.renew(members.generation());
        all
    }

    /// Makes the reads of good copies that have none yet. Those of a copy that was detached are
    /// dropped when none is in flight.
    #[cold]
    fn renew(&mut self, generation: u64) {
        let members = self.members.get();
        (self.generation, self.good) = (generation, members.good_slots());
        for member in members.good().filter(|it| !self.opened.has(it.slot)) {
            self.reads[member.slot] = Some(member.directory().reads(self.event_fd.as_ref()));
        }
        for (slot, reads) in self.reads.iter_mut().enumerate() {
            if members.find(slot).is_none() && reads.as_ref().is_some_and(|it| it.in_flight() == 0)
            {
                *reads = None;
            }
        }
        let opened = self.reads.iter().enumerate().filter(|(_, reads)| reads.is_some());
        self.opened = GoodCopies::of(opened.map(|(slot, _)| slot));
        self.is_leaving = self.opened.numbers().any(|slot| members.find(slot).is_none());
    }

    #[inline]
    fn each(&mut self) -> impl Iterator<Item = &mut D::Reads> {
        let opened = self.opened;
        let reads = self.reads.iter_mut().enumerate().take(opened.end());
        reads.filter_map(|(_, reads)| reads.as_mut())
    }
}

impl<D: SegmentStore> Reads<MirrorFile<D>> for MirrorReads<D> {
    fn begin(&mut self, token: u32, file: &Arc<MirrorFile<D>>, offset: u64, buffer: Buffer) {
        let generation = self.members.generation();
        if generation != self.generation || self.is_leaving {
            self.renew(generation);
        }
        let slot = self.good.numbers().find(|slot| file.side(*slot).is_some());
        let found = slot.and_then(|slot| Some((self.reads[slot].as_mut()?, file.side(slot)?)));
        match found {
            Some((reads, file)) => reads.begin(token, file, offset, buffer),
            None => {
                let result = Err(io::Error::other("no copy is left"));
                self.refused.push(FinishedRead { token, buffer: Some(buffer), result });
            }
        }
    }

    fn submit(&mut self) {
        self.each().for_each(Reads::submit);
    }

    fn take(&mut self) -> Option<FinishedRead> {
        self.refused.pop().or_else(|| self.each().find_map(Reads::take))
    }

    fn is_any(&mut self) -> bool {
        !self.refused.is_empty() || self.each().any(Reads::is_any)
    }

    fn in_flight(&self) -> usize {
        let reads = self.reads[..self.opened.end()].iter().flatten();
        self.refused.len() + reads.map(Reads::in_flight).sum::<usize>()
    }

    fn sleep(&mut self, at_most: Duration) {
        if !self.refused.is_empty() {
            return;
        }
        let both = self.reads.iter().flatten().filter(|reads| reads.in_flight() > 0).count() > 1;
        let at_most = if both { at_most.min(BOTH) } else { at_most };
        if let Some(reads) = self.each().find(|reads| reads.in_flight() > 0) {
            reads.sleep(at_most);
        }
    }
}

impl<D: SegmentStore> fmt::Debug for MirrorReads<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MirrorReads").field("reads", &self.reads).finish_non_exhaustive()
    }
}

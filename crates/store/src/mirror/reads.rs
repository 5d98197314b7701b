//! Reads from the first good copy. The caller that finds damaged data reads again
//! from the other copy ([`crate::segments::Segments::read_whole`]).

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::rcu_cell::RcuReader;

use super::{CopyState, MirrorFile};
use crate::SegmentStore;
use crate::buffer::Buffer;
use crate::reads::{FinishedRead, Reads};

/// Longest sleep while reads of both copies are in flight, which happens only shortly after one has
/// failed.
const BOTH: Duration = Duration::from_millis(1);

/// Reads from a mirror.
pub struct MirrorReads<D: SegmentStore> {
    copies: RcuReader<[CopyState; 2]>,
    reads: [Option<D::Reads>; 2],
    /// Reads that could not start.
    refused: Vec<FinishedRead>,
}

impl<D: SegmentStore> MirrorReads<D> {
    pub(super) fn new(
        copies: RcuReader<[CopyState; 2]>,
        reads: [Option<D::Reads>; 2],
    ) -> MirrorReads<D> {
        MirrorReads { copies, reads, refused: Vec::new() }
    }

    fn each(&mut self) -> impl Iterator<Item = &mut D::Reads> {
        self.reads.iter_mut().flatten()
    }
}

impl<D: SegmentStore> Reads<MirrorFile<D>> for MirrorReads<D> {
    fn begin(&mut self, token: u32, file: &Arc<MirrorFile<D>>, offset: u64, buffer: Buffer) {
        let copies = **self.copies.get();
        let sides = self.reads.iter_mut().enumerate();
        let sides = sides.filter(|(number, _)| copies[*number].is_good());
        let mut sides =
            sides.filter_map(|(number, reads)| Some((reads.as_mut()?, file.side(number)?)));
        match sides.next() {
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
        let reads = self.reads.iter().flatten();
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

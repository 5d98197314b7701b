//! The log writer of a mirror. Each copy has its own log writer, and a write batch has ended when
//! it has ended in both.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use blockyard_sync::event_count::{EventCount, Waker};

use super::{MirrorFile, Shared};
use crate::SegmentStore;
use crate::log_writer::{Durability, Ended, LogWriter, WriteBatch};

/// A write batch in flight.
struct Flight<D: SegmentStore> {
    file: Arc<MirrorFile<D>>,
    range: Range<u64>,
    /// The copies to which it is written.
    goes: [bool; 2],
}

/// The log writer of a mirror.
pub struct MirrorLogWriter<D: SegmentStore> {
    shared: Arc<Shared<D>>,
    log_writers: [Option<D::LogWriter>; 2],
    /// Write batches in flight, the oldest first.
    flights: VecDeque<Flight<D>>,
    /// Write batches for the second copy, to be reused.
    spare: Vec<WriteBatch>,
}

impl<D: SegmentStore> MirrorLogWriter<D> {
    pub(super) fn new(
        shared: &Arc<Shared<D>>,
        log_writers: [Option<D::LogWriter>; 2],
    ) -> MirrorLogWriter<D> {
        let (flights, spare) = (VecDeque::new(), Vec::new());
        MirrorLogWriter { shared: Arc::clone(shared), log_writers, flights, spare }
    }

    /// Duplicates a write batch for the second copy.
    fn twin(&mut self, write_batch: &WriteBatch) -> WriteBatch {
        let memory = &self.shared.memory;
        let spare = self.spare.pop();
        let mut twin = spare
            .unwrap_or_else(|| WriteBatch::new(memory.take_beyond(write_batch.head_bytes_max())));
        write_batch.copy_into(&mut twin, memory);
        twin
    }
}

impl<D: SegmentStore> LogWriter<MirrorFile<D>> for MirrorLogWriter<D> {
    fn depth(&self) -> usize {
        let depths = self.log_writers.iter().flatten().map(LogWriter::depth);
        depths.min().unwrap_or(1)
    }

    /// Wakes both log writers: when a copy fails, the committer sleeps in the other log writer.
    fn waker(&self) -> Option<Waker> {
        let wakers: Vec<Waker> =
            self.log_writers.iter().flatten().filter_map(LogWriter::waker).collect();
        let call = move || wakers.iter().for_each(Waker::wake);
        Some(Waker::new(call))
    }

    fn begin(
        &mut self,
        file: &Arc<MirrorFile<D>>,
        offset: u64,
        write_batch: WriteBatch,
        durability: Durability,
    ) {
        let range = offset..offset + write_batch.len() as u64;
        file.begin(range.clone());
        let good = self.shared.good();
        let goes = std::array::from_fn(|at| {
            good[at] && file.side(at).is_some() && self.log_writers[at].is_some()
        });
        let both = goes == [true, true];
        let twin = both.then(|| self.twin(&write_batch));
        let first = usize::from(!goes[0]);
        if let (true, Some(log_writer), Some(file)) =
            (goes[first], &mut self.log_writers[first], file.side(first))
        {
            log_writer.begin(file, offset, write_batch, durability);
        }
        if let (Some(twin), Some(log_writer), Some(file)) =
            (twin, &mut self.log_writers[1], file.side(1))
        {
            log_writer.begin(file, offset, twin, durability);
        }
        self.flights.push_back(Flight { file: Arc::clone(file), range, goes });
    }

    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        let Some(flight) = self.flights.front() else { return true };
        let log_writers = self.log_writers.iter_mut().zip(flight.goes).filter(|(_, goes)| *goes);
        // The other log writer ends at about the same time.
        log_writers
            .filter_map(|(log_writer, _)| log_writer.as_mut())
            .next()
            .is_none_or(|it| it.wait(event_count, is_there))
    }

    fn end(&mut self) -> Option<Ended> {
        let Flight { file, range, goes } = self.flights.pop_front()?;
        let mut results: [Option<io::Result<()>>; 2] = [None, None];
        let mut write_batch = None;
        let first = usize::from(!goes[0]);
        for number in 0..2 {
            let log_writer = self.log_writers[number].as_mut().filter(|_| goes[number]);
            let Some((back, result)) = log_writer.and_then(LogWriter::end) else { continue };
            results[number] = Some(result);
            match back {
                Some(back) if number == first => write_batch = Some(back),
                Some(mut twin) => {
                    twin.clear();
                    self.spare.push(twin);
                }
                None => {}
            }
        }
        // Record the failure of a copy before a repair may write to this range.
        let settled = self.shared.settle(results);
        file.end(&range);
        Some((write_batch, settled))
    }
}

impl<D: SegmentStore> fmt::Debug for MirrorLogWriter<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flights = self.flights.len();
        f.debug_struct("MirrorLane").field("flights", &flights).finish_non_exhaustive()
    }
}

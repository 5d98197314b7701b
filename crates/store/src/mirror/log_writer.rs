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
struct MirrorBatch<D: SegmentStore> {
    file: Arc<MirrorFile<D>>,
    range: Range<u64>,
    /// Which copies it is written to.
    targets: [bool; 2],
}

/// The log writer of a mirror.
pub struct MirrorLogWriter<D: SegmentStore> {
    shared: Arc<Shared<D>>,
    log_writers: [Option<D::LogWriter>; 2],
    /// Write batches in flight, the oldest first.
    in_flight: VecDeque<MirrorBatch<D>>,
    /// Write batches for the second copy, to be reused.
    spare: Vec<WriteBatch>,
}

impl<D: SegmentStore> MirrorLogWriter<D> {
    pub(super) fn new(
        shared: &Arc<Shared<D>>,
        log_writers: [Option<D::LogWriter>; 2],
    ) -> MirrorLogWriter<D> {
        let (in_flight, spare) = (VecDeque::new(), Vec::new());
        MirrorLogWriter { shared: Arc::clone(shared), log_writers, in_flight, spare }
    }

    /// Duplicates a write batch for the second copy.
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
        let targets = std::array::from_fn(|at| {
            good[at] && file.side(at).is_some() && self.log_writers[at].is_some()
        });
        let both = targets == [true, true];
        let duplicate = both.then(|| self.duplicate(&write_batch));
        let first = usize::from(!targets[0]);
        if let (true, Some(log_writer), Some(file)) =
            (targets[first], &mut self.log_writers[first], file.side(first))
        {
            log_writer.begin(file, offset, write_batch, durability);
        }
        if let (Some(duplicate), Some(log_writer), Some(file)) =
            (duplicate, &mut self.log_writers[1], file.side(1))
        {
            log_writer.begin(file, offset, duplicate, durability);
        }
        self.in_flight.push_back(MirrorBatch { file: Arc::clone(file), range, targets });
    }

    fn wait(&mut self, event_count: &EventCount, is_there: &dyn Fn() -> bool) -> bool {
        let Some(oldest) = self.in_flight.front() else { return true };
        let log_writers =
            self.log_writers.iter_mut().zip(oldest.targets).filter(|(_, is_target)| *is_target);
        // The other log writer ends at about the same time.
        log_writers
            .filter_map(|(log_writer, _)| log_writer.as_mut())
            .next()
            .is_none_or(|it| it.wait(event_count, is_there))
    }

    fn end(&mut self) -> Option<Ended> {
        let MirrorBatch { file, range, targets } = self.in_flight.pop_front()?;
        let mut results: [Option<io::Result<()>>; 2] = [None, None];
        let mut write_batch = None;
        let first = usize::from(!targets[0]);
        for number in 0..2 {
            let log_writer = self.log_writers[number].as_mut().filter(|_| targets[number]);
            let Some((back, result)) = log_writer.and_then(LogWriter::end) else { continue };
            results[number] = Some(result);
            match back {
                Some(back) if number == first => write_batch = Some(back),
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

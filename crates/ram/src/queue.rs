//! The per-channel queue of a RAM disk: splits requests into blocks and executes them in place.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use blockyard_core::{
    Batch, DeviceQueue, Done, Due, Flags, Nanos, Op, Pieces, SECTOR_SHIFT, Segment, Single, Status,
    Work,
};

use crate::blocks::Hand;
use crate::counters::Count;
use crate::device::Shared;
use crate::fetch::fetch_ahead;
use crate::parts::{Part, parts};

/// The part of a RAM disk that one channel owns.
pub struct RamQueue {
    shared: Arc<Shared>,
    hand: Hand,
}

impl RamQueue {
    pub(crate) fn new(shared: Arc<Shared>, hand: Hand) -> RamQueue {
        RamQueue { shared, hand }
    }

    #[inline]
    fn carry_out(&mut self, work: &impl Work) -> Status {
        match work.op() {
            Op::Read => self.read(work),
            Op::Write => self.write(work),
            Op::Discard => self.zero(work),
            Op::WriteZeroes if work.flags().contains(Flags::NOUNMAP) => self.fill_with_zeros(work),
            Op::WriteZeroes => self.zero(work),
            // A completed write is already where it stays; a flush has nothing to do.
            Op::Flush => Status::Ok,
            _ => Status::NotSupp,
        }
    }

    /// Counts a failed request once. A request that will be retried bio by bio is not counted yet.
    #[inline]
    fn count(&self, op: Op, status: Status) {
        if status.is_ok() || status == Status::NotSupp {
            return;
        }
        let count = if op == Op::Read { Count::FailedReads } else { Count::FailedWrites };
        self.hand.tally.add(count, 1);
    }

    /// Prefetches what the execution of a request accesses first.
    #[inline]
    fn fetch(&self, soon: &impl Work) {
        let unit = self.shared.blocks.unit();
        match soon.op() {
            Op::Read => {
                let block = soon.sector().bytes() >> unit.trailing_zeros();
                self.shared.blocks.store.fetch(block);
            }
            Op::Write => {
                if let Some(Segment { data, len_bytes }) = soon.segments().next() {
                    fetch_ahead(data.as_ptr(), len_bytes.min(unit));
                }
            }
            _ => {}
        }
    }

    #[inline]
    fn parts<W: Work>(&self, work: &W) -> impl Iterator<Item = Part> + use<W> {
        let unit = self.shared.blocks.unit();
        parts(work.sector().bytes(), work.sectors() << SECTOR_SHIFT, unit.trailing_zeros())
    }

    #[inline]
    fn read(&mut self, work: &impl Work) -> Status {
        let mut parts = self.parts(work).peekable();
        let RamQueue { shared, hand } = self;
        let unit = shared.blocks.unit();
        let mut pieces = Pieces::new(work.segments());
        while let Some(part) = parts.next() {
            // Fetch the next block's data while this one is decompressed.
            if let Some(soon) = parts.peek() {
                shared.blocks.store.fetch(soon.block);
            }
            let buffer = if part.len == unit { pieces.take_whole(unit) } else { None };
            let status = match buffer {
                // SAFETY: the request's buffer is valid for a block until the request completes.
                Some(buffer) => unsafe { shared.blocks.read(hand, part.block, buffer) },
                None => match shared.blocks.read_here(hand, part.block) {
                    Ok(block) => {
                        pieces.write(&block[part.offset..part.offset + part.len]);
                        Status::Ok
                    }
                    Err(status) => status,
                },
            };
            if !status.is_ok() {
                return status;
            }
        }
        Status::Ok
    }

    #[inline]
    fn write(&mut self, work: &impl Work) -> Status {
        let parts = self.parts(work);
        let RamQueue { shared, hand } = self;
        let unit = shared.blocks.unit();
        let mut pieces = Pieces::new(work.segments());
        for Part { block, offset, len } in parts {
            let status = if len < unit {
                pieces.read(hand.patch(len));
                shared.blocks.patch(hand, block, offset, len)
            } else {
                // The word is exchanged at the end of the write.
                shared.blocks.store.fetch_word(block);
                // The client may change its buffer meanwhile; the compressor needs a stable copy.
                pieces.read(hand.block());
                // Prefetch the next block's data while this one is compressed.
                let (next, left) = pieces.ahead();
                fetch_ahead(next, left.min(unit));
                shared.blocks.write(hand, block)
            };
            if !status.is_ok() {
                return status;
            }
        }
        Status::Ok
    }

    /// Makes a range read as zeros, and frees the blocks that it covers completely.
    fn zero(&mut self, work: &impl Work) -> Status {
        let parts = self.parts(work);
        let RamQueue { shared, hand } = self;
        let mut status = Status::Ok;
        for Part { block, offset, len } in parts {
            if len == shared.blocks.unit() {
                shared.blocks.discard(hand, block);
            } else if !shared.blocks.is_zero(block) {
                hand.patch(len).fill(0);
                // The following blocks are freed in any case: that may free the memory that was
                // missing.
                let patched = shared.blocks.patch(hand, block, offset, len);
                status = if status.is_ok() { patched } else { status };
            }
        }
        status
    }

    /// Writes zeros to a range, and accounts for them as for any write.
    fn fill_with_zeros(&mut self, work: &impl Work) -> Status {
        let parts = self.parts(work);
        let RamQueue { shared, hand } = self;
        for Part { block, offset, len } in parts {
            let status = if len == shared.blocks.unit() {
                hand.block().fill(0);
                shared.blocks.write(hand, block)
            } else {
                hand.patch(len).fill(0);
                shared.blocks.patch(hand, block, offset, len)
            };
            if !status.is_ok() {
                return status;
            }
        }
        Status::Ok
    }
}

impl DeviceQueue for RamQueue {
    #[inline]
    fn start(&mut self, _: Nanos, batch: &mut Batch, done: &mut Done) {
        while let Some(started) = batch.next() {
            if let Some(soon) = batch.get(0) {
                self.fetch(soon);
            }
            let status = self.carry_out(&started);
            // Retry bio by bio: some may have found memory, and may find it again.
            if !status.is_ok() && started.is_merged() {
                return batch.break_up(started);
            }
            self.count(started.op(), status);
            done.complete(started, status);
        }
    }

    #[inline]
    fn carry(&mut self, single: Single) -> Option<Status> {
        let status = self.carry_out(&single);
        self.count(single.op(), status);
        Some(status)
    }

    #[inline]
    fn poll(&mut self, _: Nanos, _: &mut Done) {}

    #[inline]
    fn room(&self) -> usize {
        usize::from(self.shared.limits.queue_depth)
    }

    fn due(&self) -> Due {
        Due::Never
    }

    #[inline]
    fn is_immediate(&mut self) -> bool {
        true
    }
}

impl fmt::Debug for RamQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RamQueue").finish_non_exhaustive()
    }
}

//! The per-channel queue of a RAM disk: splits requests into blocks and executes them in place.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use blockyard_core::{
    Batch, CompletionBatch, DeviceQueue, Due, Flags, InlineRequest, Nanos, Op, Pieces,
    SECTOR_SHIFT, Segment, Status, Work,
};

use crate::blocks::Workspace;
use crate::counters::Count;
use crate::device::Shared;
use crate::prefetch::prefetch_ahead;

/// The part of a RAM disk that one channel owns.
pub struct RamQueue {
    shared: Arc<Shared>,
    workspace: Workspace,
}

impl RamQueue {
    pub(crate) fn new(shared: Arc<Shared>, workspace: Workspace) -> RamQueue {
        RamQueue { shared, workspace }
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
        self.workspace.tally.add(count, 1);
        if status == Status::NoSpc {
            self.workspace.tally.add(Count::WritesRefused, 1);
        }
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
                    prefetch_ahead(data.as_ptr(), len_bytes.min(unit));
                }
            }
            _ => {}
        }
    }

    #[inline]
    fn parts<W: Work>(&self, work: &W) -> impl Iterator<Item = BlockPart> + use<W> {
        let unit = self.shared.blocks.unit();
        split_at_blocks(
            work.sector().bytes(),
            work.sectors() << SECTOR_SHIFT,
            unit.trailing_zeros(),
        )
    }

    #[inline]
    fn read(&mut self, work: &impl Work) -> Status {
        let mut parts = self.parts(work).peekable();
        let RamQueue { shared, workspace } = self;
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
                Some(buffer) => unsafe { shared.blocks.read(workspace, part.block, buffer) },
                None => match shared.blocks.read_here(workspace, part.block) {
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
        let RamQueue { shared, workspace } = self;
        let unit = shared.blocks.unit();
        let mut pieces = Pieces::new(work.segments());
        for BlockPart { block, offset, len } in parts {
            let status = if len < unit {
                pieces.read(workspace.patch(len));
                shared.blocks.patch(workspace, block, offset, len)
            } else {
                // The word is exchanged at the end of the write.
                shared.blocks.store.fetch_word(block);
                // The client may change its buffer meanwhile; the compressor needs a stable copy.
                pieces.read(workspace.block());
                // Prefetch the next block's data while this one is compressed.
                let (next, left) = pieces.ahead();
                prefetch_ahead(next, left.min(unit));
                shared.blocks.write(workspace, block)
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
        let RamQueue { shared, workspace } = self;
        let mut status = Status::Ok;
        for BlockPart { block, offset, len } in parts {
            if len == shared.blocks.unit() {
                shared.blocks.discard(workspace, block);
            } else if !shared.blocks.is_zero(block) {
                workspace.patch(len).fill(0);
                // The following blocks are freed in any case: that may free the memory that was
                // missing.
                let patched = shared.blocks.patch(workspace, block, offset, len);
                status = if status.is_ok() { patched } else { status };
            }
        }
        status
    }

    /// Writes zeros to a range, and accounts for them as for any write.
    fn fill_with_zeros(&mut self, work: &impl Work) -> Status {
        let parts = self.parts(work);
        let RamQueue { shared, workspace } = self;
        for BlockPart { block, offset, len } in parts {
            let status = if len == shared.blocks.unit() {
                workspace.block().fill(0);
                shared.blocks.write(workspace, block)
            } else {
                workspace.patch(len).fill(0);
                shared.blocks.patch(workspace, block, offset, len)
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
    fn start(&mut self, _: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
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
    fn execute_inline(&mut self, single: InlineRequest) -> Option<Status> {
        let status = self.carry_out(&single);
        self.count(single.op(), status);
        Some(status)
    }

    #[inline]
    fn poll(&mut self, _: Nanos, _: &mut CompletionBatch) {}

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

/// The part of a request that lies in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPart {
    /// The block number.
    pub block: u64,
    /// Offset in the block, in bytes.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// Splits a range of bytes into parts, in order. A part that covers a whole block replaces it, and
/// any other part modifies the block. Blocks are `1 << shift` bytes.
#[inline]
pub fn split_at_blocks(at: u64, len_bytes: u64, shift: u32) -> impl Iterator<Item = BlockPart> {
    let (unit, end) = (1 << shift, at + len_bytes);
    let mut next = at;
    std::iter::from_fn(move || {
        (next < end).then(|| {
            let offset = next & (unit - 1);
            let len = (unit - offset).min(end - next);
            let block = next >> shift;
            next += len;
            BlockPart { block, offset: offset as usize, len: len as usize }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_at_blocks() {
        let cut = |at, len| -> Vec<(u64, usize, usize)> {
            split_at_blocks(at, len, 12)
                .map(|BlockPart { block, offset, len }| (block, offset, len))
                .collect()
        };
        assert_eq!(cut(0, 4096), [(0, 0, 4096)]);
        assert_eq!(cut(512, 512), [(0, 512, 512)]);
        assert_eq!(cut(7680, 5120), [(1, 3584, 512), (2, 0, 4096), (3, 0, 512)]);
        assert_eq!(cut(4096, 0), []);
    }
}

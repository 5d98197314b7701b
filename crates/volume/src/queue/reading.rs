//! Reads of one queue. A request is cut into runs of blocks that are contiguous on disk, and all
//! runs are read at once. Blocks that are in memory, or known to be zeros, are copied immediately.

use std::sync::Arc;
use std::time::Duration;

use blockyard_core::{Pieces, Started, Status};
use blockyard_store::buffer::Buffer;
use blockyard_store::{Reads, SegmentStore};
use blockyard_volume_format::BLOCK_BYTES_MAX;
use blockyard_volume_format::entry::Entry;

use crate::handle::VolumeHandle;
use crate::map::Lookup;

/// A block of zeros.
static ZEROS: [u8; BLOCK_BYTES_MAX as usize] = [0; BLOCK_BYTES_MAX as usize];

/// A run of blocks of one request that one read covers.
#[derive(Debug, Default)]
struct Row {
    /// The slot of the request.
    slot: u32,
    /// The first block of the run.
    first: u64,
    entries: Vec<Entry>,
}

/// The reads of one queue.
#[derive(Debug)]
pub(super) struct Reading<D: SegmentStore> {
    reads: D::Reads,
    /// Runs, by the token of their read.
    rows: Vec<Row>,
    free: Vec<u32>,
    found: Vec<Lookup>,
}

/// Copies `bytes` into the buffers of a request, starting at byte `at`.
fn put_at(started: &Started, at: usize, bytes: &[u8]) {
    let mut pieces = Pieces::new(started.segments());
    pieces.skip(at);
    pieces.write(bytes);
}

/// Where a block lies in a request: the offset in the request, and the range in the block.
fn window(started: &Started, size: u64, block: u64) -> (usize, std::ops::Range<usize>) {
    let (at, end) = (started.sector().bytes(), started.end().bytes());
    let (start, stop) = (block * size, (block + 1) * size);
    let (from, to) = (at.max(start), end.min(stop));
    ((from - at) as usize, (from - start) as usize..(to - start) as usize)
}

impl<D: SegmentStore> Reading<D> {
    pub(super) fn new(reads: D::Reads) -> Reading<D> {
        Reading { reads, rows: Vec::new(), free: Vec::new(), found: Vec::new() }
    }

    /// Starts the reads for a request. Returns how many runs are in flight, and the status of what
    /// has failed already.
    pub(super) fn begin(
        &mut self,
        handle: &mut VolumeHandle<D>,
        started: &Started,
        slot: u32,
    ) -> (u32, Status) {
        let size = handle.block_bytes() as u64;
        let (mut block, end) =
            (started.sector().bytes() / size, started.end().bytes().div_ceil(size));
        let (mut rows, mut status) = (0, Status::Ok);
        let mut found = std::mem::take(&mut self.found);
        while block < end {
            handle.check_at(block, end - block, &mut found);
            let mut next = 0;
            while next < found.len() {
                let at = block + next as u64;
                let (place, part) = window(started, size, at);
                match &found[next] {
                    Lookup::Zero | Lookup::Cleared { .. } => {
                        put_at(started, place, &ZEROS[part]);
                        next += 1;
                    }
                    Lookup::Memory { payload, index, .. } => {
                        let bytes = handle.remember(payload, *index);
                        put_at(started, place, &bytes[part]);
                        next += 1;
                    }
                    // About one read in a thousand needs a map page from disk: read it
                    // synchronously.
                    Lookup::NotResident(_) => {
                        if let Err(error) = handle.fetch_for(at) {
                            status = error;
                            next += 1;
                        } else {
                            handle.check_at(at, end - at, &mut found);
                            (block, next) = (at, 0);
                        }
                    }
                    Lookup::Disk(_) => {
                        let (count, bytes) = handle.row(&found[next..]);
                        self.begin_row(handle, slot, at, &found[next..next + count], bytes);
                        rows += 1;
                        next += count;
                    }
                }
            }
            block += found.len() as u64;
        }
        found.clear();
        self.found = found;
        (rows, status)
    }

    fn begin_row(
        &mut self,
        handle: &mut VolumeHandle<D>,
        slot: u32,
        first: u64,
        found: &[Lookup],
        bytes: usize,
    ) {
        let number = self.free.pop().unwrap_or_else(|| {
            self.rows.push(Row::default());
            self.rows.len() as u32 - 1
        });
        let row = &mut self.rows[number as usize];
        (row.slot, row.first) = (slot, first);
        row.entries.clear();
        row.entries.extend(found.iter().filter_map(|found| match found {
            Lookup::Disk(entry) => Some(*entry),
            _ => None,
        }));
        // The memory in flight is bounded by the queue's requests and their length.
        let buffer = handle.pool().memory().take_beyond(bytes);
        match handle.place(&row.entries[0]) {
            Some((file, offset)) => self.reads.begin(number, &file, offset, buffer),
            // The segment has no such file. The second attempt in `finish` reports the damage.
            None => {
                let missing = Arc::clone(&handle.pool().segments().files()[0]);
                self.reads.begin(number, &missing, u64::MAX >> 1, buffer);
            }
        }
    }

    /// Submits the reads that were started.
    pub(super) fn submit(&mut self) {
        self.reads.submit();
    }

    /// Takes a finished run.
    pub(super) fn take(&mut self) -> Option<Ended> {
        let got = self.reads.take()?;
        let row = &self.rows[got.token as usize];
        let buffer = got.buffer.filter(|_| got.result.is_ok());
        Some(Ended { slot: row.slot, number: got.token, buffer })
    }

    /// Copies the data of a finished run into the request, and returns the status.
    pub(super) fn finish(
        &mut self,
        handle: &mut VolumeHandle<D>,
        ended: &Ended,
        started: &Started,
    ) -> Status {
        let row = std::mem::take(&mut self.rows[ended.number as usize]);
        let size = handle.block_bytes() as u64;
        let mut status = Status::Ok;
        let mut from = 0;
        for (block, entry) in (row.first..).zip(&row.entries) {
            let len = entry.stored_bytes() as usize;
            let (place, part) = window(started, size, block);
            let stored = ended.buffer.as_ref().map(|buffer| &buffer[from..from + len]);
            from += len;
            if let Some(plain) = stored.and_then(|stored| handle.unpack(entry, stored)) {
                put_at(started, place, &plain[part]);
                continue;
            }
            // The block may have moved meanwhile. If not, this read returns the error and logs it.
            let mut at = place;
            let bytes = started.sector().bytes() + place as u64;
            let read = handle.read(bytes, part.len(), |bytes| {
                put_at(started, at, bytes);
                at += bytes.len();
            });
            if !read.is_ok() {
                status = read;
            }
        }
        self.rows[ended.number as usize] = row;
        self.free.push(ended.number);
        status
    }

    /// Whether a run has finished.
    pub(super) fn is_any(&mut self) -> bool {
        self.reads.is_any()
    }

    /// How many runs are in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.reads.in_flight()
    }

    /// Sleeps until a run has finished.
    pub(super) fn sleep(&mut self, at_most: Duration) {
        self.reads.sleep(at_most);
    }
}

/// A finished run.
pub(super) struct Ended {
    /// The slot of the request.
    pub(super) slot: u32,
    number: u32,
    /// The data, if the read delivered all of it.
    buffer: Option<Buffer>,
}

//! Reads of objects by the cache: how much a miss reads from the object store, and which reads
//! share a request.
//!
//! A miss of a random read fetches 128 KiB. Reads that follow each other in a segment, in any order
//! of up to 4 MiB, are a *stream*. A miss of a stream fetches as many bytes as the stream has read,
//! 4 MiB at most: so of a stream at most twice as many bytes are fetched as are read. A read whose
//! bytes another thread is fetching waits for those.
#![allow(clippy::disallowed_types)] // A request to an object store takes far longer than a lock.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_volume_format::object::ObjectId;
use blockyard_volume_format::object::sums::CHUNK_BYTES;
use bytes::Bytes;
use tokio::sync::OnceCell;

use crate::object_reader::ReadError;

/// Bytes that are read from the object store at once, at least: the time of a request hardly
/// depends on less.
const FETCH_BYTES_MIN: u64 = 4 * CHUNK_BYTES as u64;

/// Bytes that are read from the object store at once, at most, unless a single read is longer.
const FETCH_BYTES_MAX: u64 = 4 << 20;

/// How far apart reads of one stream may be: clients and threads do not keep their order.
const STREAM_DISTANCE_MAX: u64 = FETCH_BYTES_MAX;

/// Streams that are remembered. Of more, the one that was read first is forgotten.
const STREAMS_MAX: usize = 32;

/// Reads of a segment that follow each other.
#[derive(Clone, Copy, Debug)]
struct ReadStream {
    segment: u32,
    /// The greatest end of its reads.
    end: u64,
    /// The bytes that they have read.
    bytes: u64,
}

/// The streams that were read last, the newest at the end.
#[derive(Debug, Default)]
pub(crate) struct ReadStreams(Mutex<VecDeque<ReadStream>>);

impl ReadStreams {
    /// Adds a read. Returns how many bytes its stream has read, this read included.
    pub(crate) fn add(&self, segment: u32, offset: u32, len: usize) -> u64 {
        let (offset, len) = (u64::from(offset), len as u64);
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = streams.iter().rposition(|stream| {
            stream.segment == segment && stream.end.abs_diff(offset) <= STREAM_DISTANCE_MAX
        });
        let before = at.and_then(|at| streams.remove(at));
        let ReadStream { end, bytes, .. } =
            before.unwrap_or(ReadStream { segment, end: 0, bytes: 0 });
        let stream = ReadStream { segment, end: end.max(offset + len), bytes: bytes + len };
        if streams.len() == STREAMS_MAX {
            streams.pop_front();
        }
        streams.push_back(stream);
        stream.bytes
    }
}

/// A range of an object that a thread reads from the object store.
#[derive(Debug)]
pub(crate) struct Fetch {
    object: ObjectId,
    pub(crate) range: Range<u64>,
    /// The offset of the first byte, and the bytes.
    pub(crate) read: OnceCell<Result<(u64, Bytes), ReadError>>,
}

/// The fetches in flight.
#[derive(Debug, Default)]
pub(crate) struct Fetches(Mutex<Vec<Arc<Fetch>>>);

impl Fetches {
    /// The fetch that has a range of an object, or a new one of the range and what follows, if its
    /// stream has read `stream_bytes`. With `None` nothing beyond the range is of use.
    pub(crate) fn join(
        &self,
        object: ObjectId,
        range: Range<u64>,
        stream_bytes: Option<u64>,
    ) -> Arc<Fetch> {
        let Some(stream_bytes) = stream_bytes else {
            let end = range.end;
            return self.join_until(object, range, end);
        };
        let len = stream_bytes.min(FETCH_BYTES_MAX).max(range.end - range.start);
        let end = range.start + len;
        let needed = match len <= FETCH_BYTES_MIN {
            true => {
                let first = range.start / FETCH_BYTES_MIN * FETCH_BYTES_MIN;
                first..range.end.next_multiple_of(FETCH_BYTES_MIN)
            }
            false => range,
        };
        self.join_until(object, needed, end)
    }

    /// The fetch that has the bytes `needed`, or a new one of these and up to `end`, but of no
    /// bytes after them that another one has.
    fn join_until(&self, object: ObjectId, needed: Range<u64>, end: u64) -> Arc<Fetch> {
        let mut fetches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_object = || fetches.iter().filter(move |fetch| fetch.object == object);
        let has = |range: &Range<u64>| range.start <= needed.start && needed.end <= range.end;
        if let Some(fetch) = of_object().find(|fetch| has(&fetch.range)) {
            return Arc::clone(fetch);
        }
        let after = of_object().map(|fetch| fetch.range.start).filter(|at| *at >= needed.end);
        let end = after.min().map_or(end, |next| next.min(end)).max(needed.end);
        let fetch = Fetch { object, range: needed.start..end, read: OnceCell::new() };
        fetches.push(Arc::new(fetch));
        Arc::clone(&fetches[fetches.len() - 1])
    }

    /// Removes a fetch that has ended.
    pub(crate) fn remove(&self, ended: &Arc<Fetch>) {
        let mut fetches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        fetches.retain(|fetch| !Arc::ptr_eq(fetch, ended));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u32 = 1 << 20;

    #[test]
    fn reads_that_follow_each_other_in_any_order_are_a_stream() {
        let streams = ReadStreams::default();
        let mut bytes = Vec::new();
        // Two streams in turns, one of which is not in order.
        for (first, second) in [(0, 9), (1, 10), (3, 12), (2, 11)] {
            bytes.push(streams.add(1, first * MIB, MIB as usize) / u64::from(MIB));
            bytes.push(streams.add(1, second * MIB, MIB as usize) / u64::from(MIB));
        }
        assert_eq!(bytes, [1, 1, 2, 2, 3, 3, 4, 4]);
        assert_eq!(streams.add(2, 4 * MIB, 4096), 4096, "another segment");
        // Random reads are streams of one read each, and push the others out.
        for segment in 10..10 + STREAMS_MAX as u32 {
            assert_eq!(streams.add(segment, 0, 4096), 4096);
        }
        assert_eq!(streams.add(1, 4 * MIB, 4096), 4096);
    }

    #[test]
    fn a_read_joins_the_fetch_that_has_its_bytes() {
        let fetches = Fetches::default();
        let object = |number| ObjectId::batch(1, number);
        let first = fetches.join_until(object(1), 100..200, 1000);
        assert_eq!(first.range, 100..1000);
        assert!(Arc::ptr_eq(&first, &fetches.join_until(object(1), 500..1000, 4000)));
        // A fetch ends where the next one begins, but has what is needed.
        assert_eq!(fetches.join_until(object(1), 20..50, 400).range, 20..100);
        assert_eq!(fetches.join_until(object(1), 900..1100, 1200).range, 900..1200);
        assert_eq!(fetches.join_until(object(2), 500..600, 700).range, 500..700);
        fetches.remove(&first);
        assert_eq!(fetches.join_until(object(1), 500..600, 700).range, 500..700);
    }

    #[test]
    fn a_fetch_is_as_long_as_its_stream_within_limits() {
        let range = |from: u64, to: u64, stream_bytes| {
            Fetches::default().join(ObjectId::batch(1, 1), from..to, stream_bytes).range.clone()
        };
        let kib = |from: u64, to: u64| from << 10..to << 10;
        assert_eq!(range(5, 600, None), 5..600);
        assert_eq!(range(130 << 10, 134 << 10, Some(4 << 10)), kib(128, 256));
        assert_eq!(range(127 << 10, 129 << 10, Some(4 << 10)), kib(0, 256));
        assert_eq!(range(100 << 10, 164 << 10, Some(512 << 10)), kib(100, 612));
        assert_eq!(range(100 << 10, 164 << 10, Some(1 << 30)), kib(100, 4196));
        assert_eq!(range(0, 8 << 20, Some(1 << 30)), kib(0, 8192));
    }
}

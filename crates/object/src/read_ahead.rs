//! Reads of objects by the cache: how much a miss reads from the object store, and which reads
//! share a request.
//!
//! A miss fetches 128 KiB at least. Reads that follow each other in a segment, in any order of up
//! to 4 MiB, are a *stream*, which has a budget: twice the bytes that it has read, without those
//! that it has fetched. A miss fetches up to 4 MiB, as far as the budget goes. So of a stream at
//! most twice as many bytes are fetched as are read, unless its misses are of less than 64 KiB
//! each. A read whose bytes another thread is fetching waits for those.
//!
//! Random reads of a few segments look like streams. They read only a part of the bytes between the
//! first and the last one, or read bytes again: a stream has not read more than lies between.
#![allow(clippy::disallowed_types)] // A request to an object store takes far longer than a lock.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_volume_format::object::ObjectId;
use blockyard_volume_format::object::sums::CHUNK_BYTES;
use tokio::sync::OnceCell;

use crate::object_reader::{ObjectPart, ReadError};

/// Bytes that are read from the object store at once, at least: the time of a request hardly
/// depends on less.
const FETCH_BYTES_MIN: u64 = 4 * CHUNK_BYTES as u64;

/// Bytes that are read from the object store at once, at most, unless a single read is longer.
const FETCH_BYTES_MAX: u64 = 4 << 20;

/// How far apart reads of one stream may be: clients and threads do not keep their order.
const STREAM_DISTANCE_MAX: u64 = FETCH_BYTES_MAX;

/// Streams that are remembered. Of more, the one that was read first is forgotten.
const STREAMS_MAX: usize = 32;

/// The number of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId(u64);

/// Reads of a segment that follow each other.
#[derive(Clone, Copy, Debug)]
struct ReadStream {
    id: StreamId,
    segment: u32,
    /// The least start of its reads.
    start: u64,
    /// The greatest end of its reads.
    end: u64,
    /// The bytes of its reads.
    bytes: u64,
    /// The bytes that were fetched for it.
    fetched: u64,
}

#[derive(Debug, Default)]
struct StreamList {
    /// The streams that were read last, the newest at the end.
    list: VecDeque<ReadStream>,
    /// The number of streams so far.
    count: u64,
}

/// The streams of a pool.
#[derive(Debug, Default)]
pub(crate) struct ReadStreams(Mutex<StreamList>);

impl ReadStreams {
    /// Adds a read. Returns its stream.
    pub(crate) fn add(&self, segment: u32, offset: u32, len: usize) -> StreamId {
        let (start, len) = (u64::from(offset), len as u64);
        let end = start + len;
        let mut guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let StreamList { list, count } = &mut *guard;
        let at = list.iter().rposition(|stream| {
            stream.segment == segment && stream.end.abs_diff(start) <= STREAM_DISTANCE_MAX
        });
        let stream = match at.and_then(|at| list.remove(at)) {
            Some(it) => ReadStream {
                start: it.start.min(start),
                end: it.end.max(end),
                bytes: it.bytes + len,
                ..it
            },
            None => {
                *count += 1;
                let id = StreamId(*count);
                ReadStream { id, segment, start, end, bytes: len, fetched: 0 }
            }
        };
        if list.len() == STREAMS_MAX {
            list.pop_front();
        }
        list.push_back(stream);
        stream.id
    }

    /// Calls a function with a stream, unless it was forgotten.
    fn with<T>(&self, id: StreamId, call: impl FnOnce(&mut ReadStream) -> T) -> Option<T> {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        streams.list.iter_mut().rfind(|stream| stream.id == id).map(call)
    }

    /// The bytes that may be fetched for a stream.
    pub(crate) fn budget(&self, id: StreamId) -> u64 {
        let budget =
            |it: &mut ReadStream| (2 * it.bytes.min(it.end - it.start)).saturating_sub(it.fetched);
        self.with(id, budget).unwrap_or_default()
    }

    /// Counts bytes that are being fetched for a stream.
    pub(crate) fn spend(&self, id: StreamId, bytes: u64) {
        self.with(id, |stream| stream.fetched += bytes);
    }

    /// Counts bytes that were to be fetched, and were not.
    pub(crate) fn give_back(&self, id: StreamId, bytes: u64) {
        self.with(id, |stream| stream.fetched -= bytes);
    }
}

/// A range of an object that a thread reads from the object store.
#[derive(Debug)]
pub(crate) struct Fetch {
    object: ObjectId,
    pub(crate) range: Range<u64>,
    pub(crate) read: OnceCell<Result<ObjectPart, ReadError>>,
}

/// The fetches in flight.
#[derive(Debug, Default)]
pub(crate) struct Fetches(Mutex<Vec<Arc<Fetch>>>);

impl Fetches {
    /// The fetch that has a range of an object, or a new one of the range and what follows, if its
    /// stream has the budget `ahead`. With `None` nothing beyond the range is of use.
    pub(crate) fn join(
        &self,
        object: ObjectId,
        range: Range<u64>,
        ahead: Option<u64>,
    ) -> Arc<Fetch> {
        let Some(ahead) = ahead else {
            let end = range.end;
            return self.join_until(object, range, end);
        };
        let len = ahead.min(FETCH_BYTES_MAX).max(range.end - range.start);
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
        let add = |segment, first: u32| streams.add(segment, first * MIB, MIB as usize);
        // Two streams in turns, one of which is not in order.
        let (one, other) = (add(1, 0), add(1, 9));
        for (first, second) in [(1, 10), (3, 12), (2, 11)] {
            assert_eq!((add(1, first), add(1, second)), (one, other));
        }
        assert!(one != other && add(2, 4) != one, "another segment");
        assert_eq!(streams.budget(one), 8 << 20);
        // Random reads are streams of one read each, and push the others out.
        (10..10 + STREAMS_MAX as u32).for_each(|segment| _ = add(segment, 0));
        assert_eq!(streams.budget(one), 0);
        assert_ne!(add(1, 4), one);
    }

    #[test]
    fn a_stream_fetches_no_more_than_twice_what_it_has_read() {
        let streams = ReadStreams::default();
        let stream = streams.add(1, 0, 100);
        assert_eq!(streams.budget(stream), 200);
        streams.spend(stream, 150);
        assert_eq!(streams.add(1, 100, 50), stream);
        assert_eq!(streams.budget(stream), 150);
        streams.spend(stream, 500);
        assert_eq!(streams.budget(stream), 0);
        // The object has ended.
        streams.give_back(stream, 450);
        assert_eq!(streams.budget(stream), 100);
        // Bytes that are read again do not count.
        (0..100).for_each(|_| assert_eq!(streams.add(1, 100, 50), stream));
        assert_eq!(streams.budget(stream), 100);
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
    fn a_fetch_is_as_long_as_its_budget_within_limits() {
        let range = |from: u64, to: u64, ahead| {
            Fetches::default().join(ObjectId::batch(1, 1), from..to, ahead).range.clone()
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

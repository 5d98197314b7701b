//! The memory of a replay for reads in flight: one budget for all channels.
#![allow(clippy::disallowed_types)] // A replay is a client: its lock delays no other client.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use blockyard_core::Region;

/// Memory for the reads in flight of all channels of a replay, in bytes.
pub(super) const READ_BYTES: usize = 64 << 20;

/// Ranges are multiples of this, in bytes: the alignment that a file with O_DIRECT may require.
const RANGE_BYTES: usize = 4096;

/// Memory for reads in flight. Each read takes the lowest free range that is long enough, so that
/// no more of the memory is resident than was in flight at once.
///
/// A channel that finds no range is next in turn: until it has one, the others take none, so that
/// short reads cannot keep a long one waiting.
#[derive(Debug)]
pub(super) struct ReadMemory {
    pub(super) region: Arc<Region>,
    ranges: Mutex<Ranges>,
}

#[derive(Debug)]
struct Ranges {
    /// The free ranges in order, start and end; between two of them is a used one.
    free: Vec<(usize, usize)>,
    /// The channels that wait for memory, the first in turn first.
    waiting: VecDeque<usize>,
}

impl ReadMemory {
    /// The memory, if the system has it.
    pub(super) fn new() -> Option<ReadMemory> {
        let region = Region::try_alloc(READ_BYTES)?;
        let ranges = Ranges { free: vec![(0, READ_BYTES)], waiting: VecDeque::new() };
        Some(ReadMemory { region, ranges: Mutex::new(ranges) })
    }

    /// Takes a range for a read of a channel; returns its start, or `None` if the channel has to
    /// try again later.
    pub(super) fn take(&self, channel: usize, len: usize) -> Option<usize> {
        self.with(|ranges| ranges.take(channel, len))
    }

    /// Frees ranges, each of which was taken with this length.
    pub(super) fn free(&self, taken: impl IntoIterator<Item = (usize, usize)>) {
        let mut taken = taken.into_iter().peekable();
        if taken.peek().is_some() {
            self.with(|ranges| taken.for_each(|(start, len)| ranges.free(start, len)));
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Ranges) -> T) -> T {
        // No operation below panics between two changes.
        work(&mut self.ranges.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Ranges {
    fn take(&mut self, channel: usize, len: usize) -> Option<usize> {
        let len = len.next_multiple_of(RANGE_BYTES);
        let is_first = self.waiting.front().is_none_or(|first| *first == channel);
        let found = self.free.iter().position(|(start, end)| end - start >= len);
        let Some(index) = found.filter(|_| is_first) else {
            if !self.waiting.contains(&channel) {
                self.waiting.push_back(channel);
            }
            return None;
        };
        // Only the first may be in the queue here.
        self.waiting.pop_front();
        let (start, end) = self.free[index];
        match start + len == end {
            true => drop(self.free.remove(index)),
            false => self.free[index].0 = start + len,
        }
        Some(start)
    }

    fn free(&mut self, start: usize, len: usize) {
        let end = start + len.next_multiple_of(RANGE_BYTES);
        let index = self.free.partition_point(|range| range.0 < start);
        let joins_next = self.free.get(index).is_some_and(|next| next.0 == end);
        let joins_previous = index > 0 && self.free[index - 1].1 == start;
        match (joins_previous, joins_next) {
            (true, true) => self.free[index - 1].1 = self.free.remove(index).1,
            (true, false) => self.free[index - 1].1 = end,
            (false, true) => self.free[index].0 = start,
            (false, false) => self.free.insert(index, (start, end)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges() -> Ranges {
        Ranges { free: vec![(0, READ_BYTES)], waiting: VecDeque::new() }
    }

    #[test]
    fn the_lowest_free_range_is_taken() {
        let mut ranges = ranges();
        let starts = [512, 4096, 8192, 4096].map(|len| ranges.take(0, len));
        assert_eq!(starts, [Some(0), Some(4096), Some(8192), Some(16384)]);
        ranges.free(4096, 4096);
        assert_eq!(ranges.take(0, 8192), Some(20480));
        assert_eq!(ranges.take(0, 512), Some(4096));
        for (start, len) in [(8192, 8192), (0, 512), (20480, 8192), (16384, 4096), (4096, 512)] {
            ranges.free(start, len);
        }
        assert_eq!(ranges.free, [(0, READ_BYTES)]);
    }

    #[test]
    fn a_long_read_is_next_in_turn() {
        let mut ranges = ranges();
        assert_eq!(ranges.take(0, 4096), Some(0));
        assert_eq!(ranges.take(1, READ_BYTES), None);
        assert_eq!(ranges.take(0, 4096), None, "channel 1 waits for all of it");
        ranges.free(0, 4096);
        assert_eq!(ranges.take(0, 4096), None);
        assert_eq!(ranges.take(1, READ_BYTES), Some(0));
        assert_eq!(ranges.take(0, 4096), None);
        ranges.free(0, READ_BYTES);
        assert_eq!(ranges.take(0, 4096), Some(0));
    }
}

//! Sequential streams that several threads write together, each one block at a time.
//!
//! The thread that asks first gets the stream's next block, so that neighbours are in flight
//! together on different channels: a scheduler can merge them, and no layer above it can.
#![allow(clippy::disallowed_types)] // Where a stream stands is the load's own, shared by design.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_core::channel::Channel;
use blockyard_core::{Bio, BufRef, Completion, Disk, Region, RegionId, SECTOR_BYTES, Sector};
use blockyard_sync::pad::Padded;

use super::BLOCK_BYTES;
use super::workers::Work;
use crate::error::LabError;

/// Streams over equal parts of a disk.
#[derive(Debug)]
pub struct Streams {
    /// The number of blocks of each stream that were given out.
    given: Vec<Padded<AtomicU64>>,
    /// The number of blocks of each stream; after the last comes the first again.
    blocks: u64,
}

impl Streams {
    /// `count` streams on a disk, each at its start.
    pub fn new(disk: &dyn Disk, count: usize) -> Arc<Streams> {
        let blocks = disk.geometry().sectors / (BLOCK_BYTES / SECTOR_BYTES) / count as u64;
        let given = (0..count).map(|_| Padded::default()).collect();
        Arc::new(Streams { given, blocks })
    }

    /// The first sector of the next block of a stream.
    fn next(&self, stream: usize) -> Sector {
        // Relaxed: the counter publishes no data; it only gives out each block once.
        let block = self.given[stream].fetch_add(1, Ordering::Relaxed) % self.blocks;
        Sector((stream as u64 * self.blocks + block) * (BLOCK_BYTES / SECTOR_BYTES))
    }
}

/// One thread that writes to a stream, one block at a time.
pub struct StreamWriter {
    channel: Box<dyn Channel>,
    region: RegionId,
    streams: Arc<Streams>,
    stream: usize,
    out: Vec<Completion>,
}

impl fmt::Debug for StreamWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamWriter").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl StreamWriter {
    /// Thread `number`; threads take the streams in turn.
    ///
    /// # Errors
    /// If the disk opens no channel.
    pub fn open(
        disk: &dyn Disk,
        streams: &Arc<Streams>,
        number: usize,
    ) -> Result<StreamWriter, LabError> {
        let channel = disk.open();
        let mut channel =
            channel.map_err(|error| LabError::failed(format!("opening {}", disk.name()), error))?;
        let region = channel.register(Region::alloc(BLOCK_BYTES as usize));
        let stream = number % streams.given.len();
        let (streams, out) = (Arc::clone(streams), Vec::with_capacity(1));
        Ok(StreamWriter { channel, region, streams, stream, out })
    }
}

impl Work for StreamWriter {
    fn turn(&mut self) -> Result<u64, LabError> {
        let buf = BufRef { region: self.region, offset: 0 };
        let bio = Bio::write(self.streams.next(self.stream), BLOCK_BYTES / SECTOR_BYTES, buf);
        self.out.clear();
        while self.channel.push(&[bio]) == 0 {
            self.channel.submit();
            self.channel.wait(None);
        }
        self.channel.submit();
        while self.channel.reap(&mut self.out) == 0 {
            self.channel.wait(None);
        }
        match self.out[0].status {
            status if status.is_ok() => Ok(1),
            status => Err(LabError::failed("a write to a stream", status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use blockyard_core::Op;
    use blockyard_yard::{stack, uri};

    use super::super::workers;
    use super::*;
    use crate::sample::Round;
    use crate::stop::Stop;

    #[test]
    fn threads_of_a_stream_write_each_block_once() {
        let disk = stack::open(&uri::parse("null:///s?size=1G").unwrap()).unwrap().disk;
        let streams = Streams::new(&*disk, 2);
        let writers = (0..5).map(|number| StreamWriter::open(&*disk, &streams, number));
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(5));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        let outcome =
            workers::run(writers.collect::<Result<_, _>>().unwrap(), &round, || ()).unwrap();
        let given: u64 = streams.given.iter().map(|given| given.load(Ordering::Relaxed)).sum();
        assert_eq!(disk.stats().op(Op::Write).ops, given);
        assert!(outcome.ios > 0 && outcome.ios <= given);
        let block = streams.next(1).0 / 8;
        let given = streams.given[1].load(Ordering::Relaxed) - 1;
        assert_eq!(block, streams.blocks + given % streams.blocks);
    }
}

//! I/Os of one length that a channel keeps in flight, like those of a database or a restore: each
//! durable when it completes, or a stream with a flush now and then.

use std::fmt;
use std::time::Instant;

use blockyard_core::channel::Channel;
use blockyard_core::{
    Bio, BufRef, Completion, Disk, Flags, Op, Region, RegionId, SECTOR_BYTES, Sector,
};
use fastrand::Rng;
use hdrhistogram::Histogram;

use super::latencies;
use super::workers::Work;
use crate::error::LabError;

/// The user data of a flush; that of an I/O is its slot.
const FLUSH: u64 = u64::MAX;

/// The kind of I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Reads at random offsets.
    Read,
    /// Sequential reads.
    SequentialRead,
    /// Writes at random offsets, each durable when it completes.
    DurableWrite,
    /// Writes at random offsets, without FUA or flush.
    Write,
    /// Sequential writes, with a flush after every this many of them.
    Stream(u32),
}

/// The I/Os that one thread keeps in flight.
#[derive(Clone, Copy, Debug)]
pub struct Ios {
    /// The kind of the I/Os.
    pub ask: Ask,
    /// Length of each, in bytes.
    pub len: u64,
    /// The number in flight.
    pub depth: usize,
}

/// When an I/O began and ended.
pub type IoSpan = (Instant, Instant);

/// A thread that keeps I/Os in flight.
pub struct Durable {
    channel: Box<dyn Channel>,
    region: RegionId,
    ios: Ios,
    rng: Rng,
    /// The number of offsets for an I/O of this length, and the next one of a stream.
    blocks: u64,
    next: u64,
    since: Vec<Instant>,
    free: Vec<u64>,
    /// The writes that ended since the last flush began.
    unflushed: u32,
    flushing: bool,
    bios: Vec<Bio>,
    out: Vec<Completion>,
    latency: Histogram<u64>,
    spans: Option<Vec<IoSpan>>,
}

impl fmt::Debug for Durable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Durable").field("ios", &self.ios).finish_non_exhaustive()
    }
}

impl Durable {
    /// A thread with a channel of its own.
    ///
    /// # Errors
    /// If the disk opens no channel, or is too short.
    pub fn open(disk: &dyn Disk, ios: Ios, seed: u64) -> Result<Durable, LabError> {
        let name = || format!("opening {}", disk.name());
        let mut channel = disk.open().map_err(|error| LabError::failed(name(), error))?;
        let blocks = disk.geometry().sectors * SECTOR_BYTES / ios.len;
        if blocks == 0 {
            return Err(LabError::failed(name(), format!("shorter than {} bytes", ios.len)));
        }
        // The contents do not matter, so all I/Os share one buffer. It is noise, so that a device
        // that compresses gains nothing.
        let mut rng = Rng::with_seed(seed);
        let region = Region::alloc(ios.len as usize);
        let noise: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(ios.len as usize).collect();
        region.write(0, &noise);
        let region = channel.register(region);
        let next = rng.u64(..blocks);
        Ok(Durable {
            channel,
            region,
            ios,
            rng,
            blocks,
            next,
            since: vec![Instant::now(); ios.depth],
            free: (0..ios.depth as u64).collect(),
            unflushed: 0,
            flushing: false,
            bios: Vec::with_capacity(ios.depth + 1),
            out: Vec::with_capacity(ios.depth + 1),
            latency: latencies(),
            spans: None,
        })
    }

    /// Also keeps the start and end of up to `most` I/Os of the window.
    pub fn with_spans(mut self, most: usize) -> Durable {
        self.spans = Some(Vec::with_capacity(most));
        self
    }

    /// The latencies of the I/Os that ended in the window, in nanoseconds.
    pub fn latency(&self) -> &Histogram<u64> {
        &self.latency
    }

    /// The kept start and end times of I/Os of the window.
    pub fn spans(&self) -> &[IoSpan] {
        self.spans.as_deref().unwrap_or_default()
    }

    fn place(&mut self) -> Sector {
        let block = match self.ios.ask {
            Ask::Stream(_) | Ask::SequentialRead => {
                self.next = (self.next + 1) % self.blocks;
                self.next
            }
            _ => self.rng.u64(..self.blocks),
        };
        Sector(block * self.ios.len / SECTOR_BYTES)
    }

    /// Replaces the I/Os that have ended, as far as the channel accepts new ones.
    fn fill(&mut self) {
        self.bios.clear();
        if let Ask::Stream(every) = self.ios.ask
            && self.unflushed >= every
            && !self.flushing
        {
            self.bios.push(Bio::flush().with_user_data(FLUSH));
        }
        let (buf, sectors) =
            (BufRef { region: self.region, offset: 0 }, self.ios.len / SECTOR_BYTES);
        while let Some(slot) = self.free.pop() {
            let at = self.place();
            let bio = match self.ios.ask {
                Ask::Read | Ask::SequentialRead => Bio::read(at, sectors, buf),
                Ask::DurableWrite => Bio::write(at, sectors, buf).with_flags(Flags::FUA),
                Ask::Write | Ask::Stream(_) => Bio::write(at, sectors, buf),
            };
            self.bios.push(bio.with_user_data(slot));
        }
        if self.bios.is_empty() {
            return;
        }
        let now = Instant::now();
        let taken = self.channel.push(&self.bios);
        for (number, bio) in self.bios.iter().enumerate() {
            match (bio.user_data, number < taken) {
                (FLUSH, true) => (self.flushing, self.unflushed) = (true, 0),
                (FLUSH, false) => {}
                (slot, true) => self.since[slot as usize] = now,
                (slot, false) => self.free.push(slot),
            }
        }
        self.channel.submit();
    }
}

impl Work for Durable {
    fn turn(&mut self) -> Result<u64, LabError> {
        self.fill();
        self.out.clear();
        if self.channel.reap(&mut self.out) == 0 {
            self.channel.wait(None);
            return Ok(0);
        }
        let now = Instant::now();
        let mut ios = 0;
        for completion in &self.out {
            if !completion.status.is_ok() {
                let what = match (completion.user_data, self.ios.ask) {
                    (FLUSH, _) => Op::Flush,
                    (_, Ask::Read | Ask::SequentialRead) => Op::Read,
                    _ => Op::Write,
                };
                return Err(LabError::failed(format!("a {}", what.name()), completion.status));
            }
            if completion.user_data == FLUSH {
                self.flushing = false;
                continue;
            }
            let since = self.since[completion.user_data as usize];
            self.latency.saturating_record((now - since).as_nanos() as u64);
            if let Some(spans) = self.spans.as_mut().filter(|spans| spans.len() < spans.capacity())
            {
                spans.push((since, now));
            }
            self.free.push(completion.user_data);
            self.unflushed += 1;
            ios += 1;
        }
        Ok(ios)
    }

    fn begin(&mut self) {
        self.latency.reset();
        if let Some(spans) = &mut self.spans {
            spans.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use blockyard_yard::{stack, uri};

    use super::super::workers;
    use super::*;
    use crate::sample::Round;
    use crate::stop::Stop;

    #[test]
    fn each_kind_is_kept_in_flight() {
        let uri = "null:///d?size=64M&irqmode=timer&completion_nsec=1000&cache_size=16M";
        let disk = stack::open(&uri::parse(uri).unwrap()).unwrap().disk;
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(10));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        for (ask, op) in [
            (Ask::Read, Op::Read),
            (Ask::SequentialRead, Op::Read),
            (Ask::DurableWrite, Op::Write),
            (Ask::Write, Op::Write),
            (Ask::Stream(8), Op::Write),
            (Ask::Stream(8), Op::Flush),
        ] {
            let before = disk.stats().op(op).ops;
            let ios = Ios { ask, len: 16 << 10, depth: 4 };
            let work = Durable::open(&*disk, ios, 7).unwrap().with_spans(10);
            let outcome = workers::run(vec![work], &round, || ()).unwrap();
            assert!(outcome.ios > 0 && disk.stats().op(op).ops > before, "{ask:?}");
            let work = &outcome.workers[0];
            assert!(work.latency().min() >= 1000 && !work.spans().is_empty());
        }
    }
}

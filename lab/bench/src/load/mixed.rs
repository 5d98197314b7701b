//! Reads concurrent with writes: a channel that keeps a number of writes in flight and one read at
//! a time, whose latency is taken from push to reap.

use std::fmt;
use std::time::Instant;

use blockyard_core::channel::Channel;
use blockyard_core::{Bio, BufRef, Completion, Disk, Prio, Region, RegionId, SECTOR_BYTES, Sector};
use fastrand::Rng;
use hdrhistogram::Histogram;

use super::workers::Work;
use super::{BLOCK_BYTES, latencies};
use crate::error::LabError;

/// The length of an I/O in sectors.
const SECTORS: u64 = BLOCK_BYTES / SECTOR_BYTES;
/// The user data of a read and of a write.
const READ: u64 = 0;
const WRITE: u64 = 1;

/// The I/Os that one thread keeps in flight on its channel, at random offsets.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Writes in flight.
    pub writes: usize,
    /// Whether a read is in flight too, one at a time, and its priority class.
    pub read: Option<Prio>,
}

/// A thread with its mix of I/Os.
pub struct Mixed {
    channel: Box<dyn Channel>,
    region: RegionId,
    rng: Rng,
    blocks: u64,
    mix: Mix,
    /// The number of writes in flight, and the start of the read in flight.
    writes: usize,
    read: Option<Instant>,
    bios: Vec<Bio>,
    out: Vec<Completion>,
    latency: Histogram<u64>,
}

impl fmt::Debug for Mixed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mixed").field("mix", &self.mix).finish_non_exhaustive()
    }
}

impl Mixed {
    /// A thread with a channel of its own.
    ///
    /// # Errors
    /// If the disk opens no channel.
    pub fn open(disk: &dyn Disk, mix: Mix, seed: u64) -> Result<Mixed, LabError> {
        let channel = disk.open();
        let mut channel =
            channel.map_err(|error| LabError::failed(format!("opening {}", disk.name()), error))?;
        // The contents do not matter: all I/Os share one block.
        let region = channel.register(Region::alloc(BLOCK_BYTES as usize));
        Ok(Mixed {
            channel,
            region,
            rng: Rng::with_seed(seed),
            blocks: disk.geometry().sectors / SECTORS,
            mix,
            writes: 0,
            read: None,
            bios: Vec::with_capacity(mix.writes + 1),
            out: Vec::with_capacity(mix.writes + 1),
            latency: latencies(),
        })
    }

    /// Latencies of the reads that ended in the window, in nanoseconds.
    pub fn latency(&self) -> &Histogram<u64> {
        &self.latency
    }

    /// Replaces the I/Os that have ended, as far as the channel accepts new ones.
    fn fill(&mut self) {
        let buf = BufRef { region: self.region, offset: 0 };
        let mut at = || Sector(self.rng.u64(..self.blocks) * SECTORS);
        self.bios.clear();
        if let (Some(class), None) = (self.mix.read, self.read) {
            let bio = Bio::read(at(), SECTORS, buf).with_user_data(READ).with_prio(class);
            self.bios.push(bio);
        }
        for _ in self.writes..self.mix.writes {
            self.bios.push(Bio::write(at(), SECTORS, buf).with_user_data(WRITE));
        }
        if self.bios.is_empty() {
            return;
        }
        let now = Instant::now();
        let taken = self.channel.push(&self.bios);
        for bio in &self.bios[..taken] {
            match bio.user_data {
                READ => self.read = Some(now),
                _ => self.writes += 1,
            }
        }
        self.channel.submit();
    }
}

impl Work for Mixed {
    fn turn(&mut self) -> Result<u64, LabError> {
        self.fill();
        self.out.clear();
        if self.channel.reap(&mut self.out) == 0 {
            self.channel.wait(None);
            return Ok(0);
        }
        for completion in &self.out {
            if !completion.status.is_ok() {
                return Err(LabError::failed("a mixed load", completion.status));
            }
            match completion.user_data {
                READ => {
                    let since = self.read.take().expect("one read is in flight");
                    self.latency.saturating_record(since.elapsed().as_nanos() as u64);
                }
                _ => self.writes -= 1,
            }
        }
        Ok(self.out.len() as u64)
    }

    fn begin(&mut self) {
        self.latency.reset();
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
    fn reads_are_timed_and_writes_are_kept_in_flight() {
        let uri = "null:///m?size=1G&irqmode=timer&completion_nsec=1000";
        let disk = stack::open(&uri::parse(uri).unwrap()).unwrap().disk;
        let mixes = [
            Mix { writes: 300, read: Some(Prio::BestEffort) },
            Mix { writes: 0, read: Some(Prio::Idle) },
            Mix { writes: 3, read: None },
        ];
        let works = mixes.map(|mix| Mixed::open(&*disk, mix, 3).unwrap());
        let stop = Stop::new();
        let (warm_up, duration) = (Duration::ZERO, Duration::from_millis(20));
        let round = Round { warm_up, duration, number: 0, seed: 1, stop: &stop };
        let outcome = workers::run(works.into(), &round, || ()).unwrap();
        assert!(!outcome.workers[1].latency().is_empty());
        assert!(outcome.workers[2].latency().is_empty());
        assert!(outcome.workers[1].latency().min() >= 1000);
        let ops = |op| disk.stats().op(op).ops;
        assert!(ops(Op::Read) + ops(Op::Write) >= outcome.ios);
    }
}

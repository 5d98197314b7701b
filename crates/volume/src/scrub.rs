//! Scrubbing: every block of a pool that is in use is read and compared with its checksum, as fast
//! as is allowed, so that damage is found before somebody needs the block. Where there are two
//! copies both are read, and what is damaged in one of them is written again from the other one.

use std::time::{Duration, Instant};

use crate::check::Report;
use crate::error::VolumeError;
use crate::running::Running;
use crate::store::Directory;
use crate::verify::Verifier;

/// Longest sleep for the sake of a rate.
const SLEEP_MAX: Duration = Duration::from_millis(500);

/// So many bytes at once, whatever the rate.
const BURST_BYTES: u64 = 4 << 20;

/// How often is looked whether blocks are counted.
const COUNT_LOOK: Duration = Duration::from_millis(5);

/// A rate that is kept by sleeping.
struct Pace {
    bytes_per_second: u64,
    /// From here on, and from so many bytes on, the rate counts.
    since: Instant,
    from: u64,
}

impl Pace {
    /// Waits until so many bytes may have been read.
    fn keep(&mut self, bytes: u64) {
        if self.bytes_per_second == 0 {
            return;
        }
        let read = (bytes - self.from).saturating_sub(BURST_BYTES);
        let due = Duration::from_secs_f64(read as f64 / self.bytes_per_second as f64);
        let mut left = due.saturating_sub(self.since.elapsed());
        // Time in which nothing was read is not made up for.
        if left.is_zero() && self.since.elapsed() > due + SLEEP_MAX {
            (self.since, self.from) = (Instant::now(), bytes);
        }
        while !left.is_zero() {
            std::thread::sleep(left.min(SLEEP_MAX));
            left = due.saturating_sub(self.since.elapsed());
        }
    }
}

impl<D: Directory> Running<D> {
    /// Reads every block of every volume and snapshot, what they share once, and the pages of their
    /// maps. What is written meanwhile may be left out. Where less of a segment is counted than was
    /// found in it, blocks are counted again, which mends that. `rate` is in bytes a second, 0 for
    /// as fast as can be. `progress` is told the bytes that were verified and how many there are
    /// about, and says whether to go on; at the end the two are equal.
    ///
    /// # Errors
    /// If `progress` wants no more.
    pub fn scrub(
        &self,
        rate: u64,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Report, VolumeError> {
        let pool = self.pool();
        let mut pace = Pace { bytes_per_second: rate, since: Instant::now(), from: 0 };
        let (mut verifier, mut verified) = (Verifier::new(pool.segments(), true), 0);
        pool.settle();
        let total = pool.segments().stored_bytes();
        let names: Vec<String> = pool.list().into_iter().map(|traits| traits.name).collect();
        for name in &names {
            // It may have been removed meanwhile, or made anew.
            let Ok(live) = pool.find(name) else { continue };
            let (frozen, id, block_bytes) =
                (live.map.freeze(), live.traits.id, live.traits.block_bytes);
            drop(live);
            let now = || pool.volumes().by_id.get(&id).cloned();
            let goes_on = verifier.volume(block_bytes, &frozen, &now, &mut |bytes| {
                verified = bytes;
                pace.keep(bytes);
                progress(bytes, total.max(bytes))
            });
            if !goes_on {
                return Err(VolumeError::Stopped);
            }
            verifier.report.volumes += 1;
        }
        if verifier.is_too_little_counted() {
            self.count_again(&mut || progress(verified, total.max(verified)))?;
        }
        pool.segments().log_repairs();
        // What was removed meanwhile, or is free, was not read: all that there is was.
        if !progress(verified, verified) {
            return Err(VolumeError::Stopped);
        }
        Ok(verifier.report)
    }

    /// Has blocks counted again: of some segments less counts than they have, or seems to. Who is
    /// asked says whether to go on.
    fn count_again(&self, goes_on: &mut dyn FnMut() -> bool) -> Result<(), VolumeError> {
        let pool = self.pool();
        let raised = pool.segments().raised();
        pool.want_count_anyhow();
        while pool.wanted_count().is_some() && pool.is_running() {
            if !goes_on() {
                return Err(VolumeError::Stopped);
            }
            std::thread::sleep(COUNT_LOOK);
        }
        // An opening is to know it, too.
        if pool.segments().raised() > raised && !pool.checkpoint().is_ok() {
            let title = pool.segments().directory().title();
            tracing::warn!("{title}: what was counted again is in no checkpoint yet");
        }
        Ok(())
    }
}

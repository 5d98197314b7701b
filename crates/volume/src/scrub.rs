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
    /// maps. What is written meanwhile may be left out. `rate` is in bytes a second, 0 for as fast
    /// as can be. `progress` is told the bytes that were verified and how many there are about, and
    /// says whether to go on.
    ///
    /// # Errors
    /// If `progress` wants no more.
    pub fn scrub(
        &self,
        rate: u64,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Report, VolumeError> {
        let pool = self.pool();
        let used = pool.segments().counts();
        let total = (used.all - used.free - used.idle) as u64 * u64::from(pool.segments().bytes());
        let mut pace = Pace { bytes_per_second: rate, since: Instant::now(), from: 0 };
        let mut verifier = Verifier::new(pool.segments(), true);
        pool.settle();
        let names: Vec<String> = pool.list().into_iter().map(|traits| traits.name).collect();
        for name in &names {
            // It may have been removed meanwhile, or made anew.
            let Ok(live) = pool.find(name) else { continue };
            let (frozen, id, block_bytes) =
                (live.map.freeze(), live.traits.id, live.traits.block_bytes);
            drop(live);
            let now = || pool.volumes().by_id.get(&id).cloned();
            let goes_on = verifier.volume(block_bytes, &frozen, &now, &mut |bytes| {
                pace.keep(bytes);
                progress(bytes, total.max(bytes))
            });
            if !goes_on {
                return Err(VolumeError::Stopped);
            }
            verifier.report.volumes += 1;
        }
        Ok(verifier.report)
    }
}

//! Scrubbing: reads every block in use and compares it with its checksum, at a limited rate, so
//! that damage is found before a client needs the block. With two copies it reads both, and repairs
//! the damaged one from the other.

use std::time::{Duration, Instant};

use blockyard_store::SegmentStore;
use blockyard_volume::admin::now;
use blockyard_volume::verify::{Report, Verifier, VerifyStep};
use blockyard_volume::{Running, VolumeError};
use blockyard_volume_format::catalogue::{Change, ScrubRecord};

/// Longest sleep for the rate limit.
const SLEEP_MAX: Duration = Duration::from_millis(500);

/// Bytes that may be read at once, whatever the rate.
const BURST_BYTES: u64 = 4 << 20;

/// How often the thread checks whether the liveness scan has ended.
const COUNT_LOOK: Duration = Duration::from_millis(5);

/// A rate limit that is enforced by sleeping.
struct Throttle {
    bytes_per_second: u64,
    /// Start of the measured interval, and the bytes read before it.
    since: Instant,
    from: u64,
}

impl Throttle {
    /// Sleeps until `bytes` bytes may have been read in total, as long as `should_continue`.
    fn keep(&mut self, bytes: u64, should_continue: &mut dyn FnMut() -> bool) -> bool {
        if self.bytes_per_second == 0 {
            return true;
        }
        let read = (bytes - self.from).saturating_sub(BURST_BYTES);
        let due = Duration::from_secs_f64(read as f64 / self.bytes_per_second as f64);
        let mut left = due.saturating_sub(self.since.elapsed());
        // Do not catch up on time in which nothing was read.
        if left.is_zero() && self.since.elapsed() > due + SLEEP_MAX {
            (self.since, self.from) = (Instant::now(), bytes);
        }
        while !left.is_zero() {
            if !should_continue() {
                return false;
            }
            std::thread::sleep(left.min(SLEEP_MAX));
            left = due.saturating_sub(self.since.elapsed());
        }
        true
    }
}

/// Where a scrub stopped, so that another one continues there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubPosition {
    /// The number of the next volume or snapshot; those with smaller numbers are verified.
    pub volume: u32,
    /// The first block of it that is not verified.
    pub block: u64,
    /// The bytes of blocks and map pages that were verified.
    pub verified_bytes: u64,
    /// The time that it took so far.
    pub elapsed: Duration,
    /// What was found so far.
    pub report: Report,
}

/// How far a scrub has come.
#[derive(Clone, Copy, Debug)]
pub struct ScrubStep<'r> {
    /// The number of the volume or snapshot that is being verified.
    pub volume: u32,
    /// The first block of it that is not verified.
    pub block: u64,
    /// The bytes of blocks and map pages that were verified.
    pub verified_bytes: u64,
    /// The most bytes that are to be verified, about; at the end as many as were verified.
    pub total_bytes: u64,
    /// The time that it took so far.
    pub elapsed: Duration,
    /// What was found so far.
    pub report: &'r Report,
}

impl ScrubStep<'_> {
    /// The position at which another scrub would continue.
    pub fn position(&self) -> ScrubPosition {
        let ScrubStep { volume, block, verified_bytes, elapsed, report, .. } = *self;
        ScrubPosition { volume, block, verified_bytes, elapsed, report: report.clone() }
    }
}

/// Reads every block of every volume and snapshot, hidden ones too, shared blocks once, and the
/// pages of the maps. Blocks that are written meanwhile may be left out. If the usage table has
/// less live data for a segment than was found in it, a liveness scan corrects it. `rate` is in
/// bytes per second; 0 is unlimited. `progress` is called with the bytes verified and the
/// approximate total, and returns whether to continue; at the end the two are equal. The pool
/// records a scrub that was completed.
///
/// # Errors
/// If `progress` stops the scrub.
pub fn scrub<D: SegmentStore>(
    running: &Running<D>,
    rate: u64,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Report, VolumeError> {
    continue_scrub(running, rate, ScrubPosition::default(), &mut |step| {
        progress(step.verified_bytes, step.total_bytes)
    })
}

/// Continues a scrub at a position, as by [`scrub`]. Blocks that earlier volumes share are read
/// again, because the position does not say which these are.
///
/// # Errors
/// If `progress` stops the scrub.
pub fn continue_scrub<D: SegmentStore>(
    running: &Running<D>,
    rate: u64,
    from: ScrubPosition,
    progress: &mut dyn FnMut(&ScrubStep<'_>) -> bool,
) -> Result<Report, VolumeError> {
    let (pool, began) = (running.pool(), Instant::now());
    let mut verifier = Verifier::new(pool.segments(), true);
    // The verifier counts the blocks of its report again.
    let base_bytes = from.verified_bytes.saturating_sub(from.report.stored_bytes);
    let mut verified_bytes = from.verified_bytes;
    let mut pace = Throttle { bytes_per_second: rate, since: Instant::now(), from: verified_bytes };
    verifier.report = from.report;
    pool.settle();
    let total_bytes = pool.segments().stored_bytes();
    // By numbers: a volume may get another name meanwhile, and hidden ones have blocks too.
    let mut next = from.volume;
    while let Some((id, live)) = pool.next_volume(next) {
        next = id + 1;
        let (frozen, block_bytes) = (live.map.freeze(), live.meta.block_bytes);
        drop(live);
        let now = || pool.volumes().by_id.get(&id).cloned();
        let first = if id == from.volume { from.block } else { 0 };
        let should_continue =
            verifier.volume(block_bytes, (&frozen, first), &now, &mut |at: &VerifyStep<'_>| {
                verified_bytes = base_bytes + at.bytes;
                let step = ScrubStep {
                    volume: id,
                    block: at.block,
                    verified_bytes,
                    total_bytes: total_bytes.max(verified_bytes),
                    elapsed: from.elapsed + began.elapsed(),
                    report: at.report,
                };
                pace.keep(verified_bytes, &mut || progress(&step)) && progress(&step)
            });
        if !should_continue {
            return Err(VolumeError::Stopped);
        }
        verifier.report.volumes += 1;
    }
    let is_too_little_counted = verifier.is_too_little_counted();
    let report = verifier.report;
    // After the last volume: a scrub that continues here has nothing left to read.
    let mut step = ScrubStep {
        volume: u32::MAX,
        block: 0,
        verified_bytes,
        total_bytes: total_bytes.max(verified_bytes),
        elapsed: from.elapsed + began.elapsed(),
        report: &report,
    };
    if is_too_little_counted {
        scan_liveness(running, &mut || progress(&step))?;
    }
    pool.segments().log_repairs();
    // Volumes removed meanwhile and free space were not read: everything in use was.
    step.total_bytes = verified_bytes;
    if !progress(&step) {
        return Err(VolumeError::Stopped);
    }
    record(running, &report, from.elapsed + began.elapsed());
    Ok(report)
}

/// Records a completed scrub in the pool.
fn record<D: SegmentStore>(running: &Running<D>, report: &Report, duration: Duration) {
    let scrub = ScrubRecord {
        ended: now(),
        duration_ms: duration.as_millis() as u64,
        verified_bytes: report.stored_bytes,
        damaged: report.damaged,
        repaired: report.repaired,
    };
    if let Err(error) = running.pool().change("", Change::Scrubbed(scrub)) {
        let title = running.pool().segments().directory().title();
        tracing::warn!("{title}: the scrub is not recorded: {error}");
    }
}

/// Requests a liveness scan, because the usage table has, or seems to have, too little for some
/// segments. `should_continue` returns whether to continue.
fn scan_liveness<D: SegmentStore>(
    running: &Running<D>,
    should_continue: &mut dyn FnMut() -> bool,
) -> Result<(), VolumeError> {
    let pool = running.pool();
    let raised = pool.segments().raised();
    pool.request_scan();
    while pool.requested_scan().is_some() && pool.is_running() {
        if !should_continue() {
            return Err(VolumeError::Stopped);
        }
        std::thread::sleep(COUNT_LOOK);
    }
    // Write a checkpoint, so that the next opening has the corrected table too.
    if pool.segments().raised() > raised && !pool.checkpoint().is_ok() {
        let title = pool.segments().directory().title();
        tracing::warn!("{title}: what was counted again is in no checkpoint yet");
    }
    Ok(())
}

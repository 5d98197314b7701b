//! The copies of a pool in use: attaching, detaching and replacing one, and the thread that resyncs
//! a copy which has joined or come back.
//!
//! The thread runs while a copy is resyncing. It copies a piece, then pauses as long as the rate
//! limit wants. Before it overwrites a copy that has come back, the thread repairs the good copy
//! from that one; before a copy replaces one of two good ones, it repairs these from each other:
//! the copy that is overwritten, or leaves, may have the only intact version of a block. The thread
//! ends when no copy is resyncing, or the pool is closed: the next opening continues.
//!
//! ```text
//!           start, or another copy joins             the resync has ended
//!   none ────────────────────────────────▸ running ─────────────────────────▸ none
//!                                           │   ▴
//!                                     pause ▾   │ resume
//!                                          paused
//! ```
#![allow(clippy::disallowed_types)] // Copies join rarely, and the thread looks once for each piece.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockyard_store::mirror::locations;
use blockyard_store::mirror::{Resync, ResyncStatus, Resynced};
use blockyard_store::remote::is_remote;
use blockyard_store::{Mirror, SegmentStore, StoreError, StoreLocation as _};

use crate::error::VolumeError;
use crate::pool::Pool;
use crate::running::Running;
use crate::verify::{Report, Verifier};

/// How long the thread waits for a write of a client to the range that is next.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(1);

/// Longest sleep before the thread looks whether it is to stop, or whether the rate has changed.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// How long the thread waits after an error of the last good copy, which keeps the pool from
/// recording the state of the new one.
const RETRY_PAUSE: Duration = Duration::from_secs(60);

/// The thread that resyncs a copy, and its settings.
#[derive(Debug, Default)]
pub(crate) struct Background {
    thread: Mutex<Option<JoinHandle<()>>>,
    control: Arc<ResyncControl>,
}

/// The settings of the thread, and when it began.
#[derive(Debug, Default)]
struct ResyncControl {
    is_stopping: AtomicBool,
    is_paused: AtomicBool,
    /// Whether the thread looks for a copy that is resyncing. It finds none and clears this, or a
    /// copy joins and this is set, never both at once.
    is_running: Mutex<bool>,
    /// Bytes per second; 0 for no limit.
    rate: AtomicU64,
    /// When the thread began to copy, and the bytes that were equal then.
    began: Mutex<Option<(Instant, u64)>>,
    /// While the good copies are repaired: the bytes that were verified, plus 1; else 0.
    verified: AtomicU64,
    /// The error of the last step. The thread tries that step again after [`RETRY_PAUSE`].
    error: Mutex<Option<String>>,
}

/// The progress of the resync of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResyncProgress {
    /// The path of the copy that is resyncing.
    pub path: PathBuf,
    /// Bytes of the pool that are equal there.
    pub done_bytes: u64,
    /// Bytes of the pool.
    pub total_bytes: u64,
    /// Bytes that were written because they differed, since the pool was opened.
    pub written_bytes: u64,
    /// While the good copies are verified and repaired, before anything is copied or before a copy
    /// leaves: the bytes that were verified, and how many there are.
    pub verified_bytes: Option<(u64, u64)>,
    /// The mean rate since the pool was opened, the copy joined, or the last pause ended, in bytes
    /// per second.
    pub rate_bytes: u64,
    /// The limit, in bytes per second; 0 for none.
    pub limit_bytes: u64,
    /// Whether it is paused.
    pub is_paused: bool,
    /// The path of the copy that leaves the pool when this one is good.
    pub replaces: Option<PathBuf>,
    /// Why the resync does not continue: no good copy can be used. It is tried again each minute.
    pub error: Option<String>,
}

impl ResyncProgress {
    /// The time until the end at this rate, in seconds; `None` if it is unknown.
    pub fn left_s(&self) -> Option<u64> {
        let left = self.total_bytes.saturating_sub(self.done_bytes);
        let is_known = self.rate_bytes > 0 && !self.is_paused && self.verified_bytes.is_none();
        is_known.then(|| left.div_ceil(self.rate_bytes))
    }
}

impl ResyncControl {
    // Relaxed, here and below: each value publishes nothing but itself.
    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// While the good copies are repaired: the bytes that were verified, and how many there are.
    fn verified_bytes(&self, stored_bytes: u64) -> Option<(u64, u64)> {
        let verified = self.verified.load(Ordering::Relaxed).checked_sub(1)?;
        Some((verified, stored_bytes.max(verified)))
    }

    /// Pauses after a piece of this length that took `took`, as the rate limit wants. Ends early if
    /// the copy is not `wanted` any more.
    fn keep(&self, bytes: u64, took: Duration, wanted: &dyn Fn() -> bool) {
        let began = Instant::now();
        loop {
            let rate = self.rate.load(Ordering::Relaxed);
            let due = match rate {
                0 => Duration::ZERO,
                rate => Duration::from_secs_f64(bytes as f64 / rate as f64),
            };
            let left = due.saturating_sub(took + began.elapsed());
            let is_paused = self.is_paused.load(Ordering::Relaxed);
            if self.is_stopping() || !wanted() || (left.is_zero() && !is_paused) {
                return;
            }
            std::thread::sleep(if is_paused { LOOK_INTERVAL } else { left.min(LOOK_INTERVAL) });
        }
    }

    /// Sleeps, unless the thread is to stop or the copy is not `wanted` any more.
    fn sleep(&self, time: Duration, wanted: &dyn Fn() -> bool) {
        let until = Instant::now() + time;
        while !self.is_stopping() && wanted() && Instant::now() < until {
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    fn is_running(&self) -> MutexGuard<'_, bool> {
        self.is_running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self) -> MutexGuard<'_, Option<String>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn began(&self) -> MutexGuard<'_, Option<(Instant, u64)>> {
        self.began.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Background {
    /// Ends the thread. The resync continues at the next opening.
    pub(crate) fn stop(&self) {
        self.control.is_stopping.store(true, Ordering::Relaxed);
        self.join();
    }

    fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of a resync has panicked");
        }
    }
}

/// Resyncs copies until none is resyncing, or the pool is closed.
fn run<S: SegmentStore>(pool: &Pool<Mirror<S>>, control: &ResyncControl) {
    while !control.is_stopping() {
        let mut is_running = control.is_running();
        let Some(mut resync) = pool.segments().directory().resync_in_background() else {
            *is_running = false;
            return;
        };
        drop(is_running);
        *control.began() = None;
        *control.error() = None;
        while !control.is_stopping() {
            match step(pool, &mut resync, control) {
                Ok(true) => *control.error() = None,
                Ok(false) => break,
                Err(error) => {
                    let title = pool.segments().directory().title();
                    tracing::error!("{title}: {error}; trying again in a minute");
                    *control.error() = Some(error.to_string());
                    control.sleep(RETRY_PAUSE, &|| resync.is_wanted());
                }
            }
        }
        if let Err(error) = resync.record_cursor() {
            tracing::warn!("the next opening compares up to 256 MiB again: {error}");
        }
    }
}

/// Copies a piece. Returns whether the copy is still resyncing.
fn step<S: SegmentStore>(
    pool: &Pool<Mirror<S>>,
    resync: &mut Resync<S>,
    control: &ResyncControl,
) -> Result<bool, StoreError> {
    let began = Instant::now();
    match resync.step(&pool.segments().files())? {
        Resynced::Bytes(bytes) => {
            let done = pool.segments().directory().resync_status();
            let done = done.map_or(0, |status| status.done_bytes);
            control.began().get_or_insert((began, done));
            control.keep(bytes, began.elapsed(), &|| resync.is_wanted());
        }
        Resynced::InFlight => {
            std::thread::sleep(IN_FLIGHT_PAUSE);
            control.keep(0, Duration::ZERO, &|| resync.is_wanted());
        }
        Resynced::Repair => repair(pool, control, &|| resync.is_wanted()),
        Resynced::Complete => {
            pool.segments().renew();
            return Ok(false);
        }
        Resynced::Ended => return Ok(false),
    }
    Ok(true)
}

/// Repairs the good copies at the rate of the resync, and tells how far that is, while the copy is
/// `wanted`.
fn repair<D: SegmentStore>(pool: &Pool<D>, control: &ResyncControl, wanted: &dyn Fn() -> bool) {
    let mut verified = 0;
    control.verified.store(1, Ordering::Relaxed);
    repair_all(pool, &mut |bytes, took| {
        verified += bytes;
        control.verified.store(verified + 1, Ordering::Relaxed);
        control.keep(bytes, took, wanted);
        wanted() && !control.is_stopping()
    });
    control.verified.store(0, Ordering::Relaxed);
}

/// Reads all blocks and map pages of a pool in use, and repairs those that are damaged in one copy
/// and intact in another. `keep` gets the bytes that were read and the time that took, and returns
/// whether to continue.
fn repair_all<D: SegmentStore>(pool: &Pool<D>, keep: &mut dyn FnMut(u64, Duration) -> bool) {
    let mut verifier = Verifier::new(pool.segments(), true);
    let (mut at, mut began) = (0, Instant::now());
    let mut next = 0;
    // By numbers: a volume may get another name meanwhile, and hidden ones have blocks too.
    while let Some((id, live)) = pool.next_volume(next) {
        next = id + 1;
        let (frozen, block_bytes) = (live.map.freeze(), live.meta.block_bytes);
        drop(live);
        let now = || pool.volumes().by_id.get(&id).cloned();
        let goes_on = verifier.volume(block_bytes, (&frozen, 0), &now, &mut |step| {
            let bytes = step.bytes - std::mem::replace(&mut at, step.bytes);
            let goes_on = keep(bytes, began.elapsed());
            began = Instant::now();
            goes_on
        });
        if !goes_on {
            return;
        }
    }
    pool.segments().log_repairs();
    let Report { repaired, damaged, .. } = verifier.report;
    if repaired > 0 || damaged > 0 {
        let title = pool.segments().directory().title();
        tracing::warn!(
            "{title}: before a copy is overwritten or leaves: repaired {repaired} blocks and \
             pages; {damaged} are damaged in each copy"
        );
    }
}

impl<S: SegmentStore> Running<Mirror<S>> {
    /// Starts the thread that resyncs, if a copy is resyncing and the thread does not run.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn start_resync(&self) -> Result<(), VolumeError> {
        let Background { thread, control } = self.background();
        let mut thread = thread.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_running = control.is_running();
        let is_there = thread.as_ref().is_some_and(|thread| !thread.is_finished());
        let is_wanted = self.pool().segments().directory().resync_status().is_some();
        if !is_wanted || *is_running && is_there {
            return Ok(());
        }
        let before = thread.take();
        let (pool, shared) = (Arc::clone(self.pool()), Arc::clone(control));
        let run = move || run(&pool, &shared);
        let started = std::thread::Builder::new().name("volume-resync".to_owned()).spawn(run);
        *thread = Some(started.map_err(VolumeError::io("cannot start the thread of a resync"))?);
        *is_running = true;
        drop(is_running);
        // That one has found no copy to resync, and ends.
        _ = before.map(JoinHandle::join);
        Ok(())
    }

    /// The progress of the resync, if one is to be done.
    pub fn resync_progress(&self) -> Option<ResyncProgress> {
        let status = self.pool().segments().directory().resync_status()?;
        let ResyncStatus { path, replaces, done_bytes, total_bytes, written_bytes } = status;
        let control = &self.background().control;
        let rate = control.began().map(|(at, from)| {
            let elapsed = at.elapsed().as_secs_f64().max(0.001);
            (done_bytes.saturating_sub(from) as f64 / elapsed) as u64
        });
        Some(ResyncProgress {
            path,
            done_bytes,
            total_bytes,
            written_bytes,
            verified_bytes: control.verified_bytes(self.pool().segments().stored_bytes()),
            rate_bytes: rate.unwrap_or(0),
            limit_bytes: control.rate.load(Ordering::Relaxed),
            is_paused: control.is_paused.load(Ordering::Relaxed),
            replaces,
            error: control.error().clone(),
        })
    }

    /// Waits until the resync has ended, if one runs: the copy is good then, or has failed.
    pub fn wait_for_resync(&self) {
        self.background().join();
    }

    /// Limits the rate of the resync, also of one that runs: bytes per second; 0 for no limit.
    pub fn set_resync_rate(&self, bytes_per_second: u64) {
        self.background().control.rate.store(bytes_per_second, Ordering::Relaxed);
    }

    /// Pauses the resync, or lets it continue. An opening of the pool, and a copy that joins, ends
    /// the pause.
    pub fn pause_resync(&self, is_paused: bool) {
        let control = &self.background().control;
        control.is_paused.store(is_paused, Ordering::Relaxed);
        // The mean rate is that since the pause.
        *control.began() = None;
    }

    /// Removes the copy at a path from the pool.
    ///
    /// # Errors
    /// If there is no such copy, it is the last good one, or the labels cannot be written.
    pub fn detach(&self, path: &Path) -> Result<(), VolumeError> {
        self.pool().segments().directory().detach(path)?;
        self.pool().segments().renew();
        self.add_left(path.canonicalize().unwrap_or_else(|_| path.to_owned()));
        Ok(())
    }
}

impl Running {
    /// Makes an empty directory or an empty disk a copy of the pool, which resyncs in the
    /// background. With `replaces`, the copy at that path leaves the pool when the new one is good.
    /// With `consent`, other data on a disk are overwritten.
    ///
    /// # Errors
    /// If the new copy is in use, not empty or too small, or the pool cannot get one now.
    pub fn attach(
        &self,
        new: &Path,
        replaces: Option<&Path>,
        consent: bool,
    ) -> Result<(), VolumeError> {
        let segments = self.pool().segments();
        let mirror = segments.directory();
        if is_remote(&mirror.path()) {
            let value = mirror.path().display().to_string();
            let wanted = "a pool on a disk or in a directory: one in an object store has one copy";
            return Err(VolumeError::Invalid { field: "pool", value, wanted: wanted.to_owned() });
        }
        mirror.check_join(new, replaces)?;
        let bytes = |count: usize| (count as u64).saturating_mul(u64::from(segments.bytes()));
        let (used_bytes, count_max) = (bytes(segments.counts().all), segments.count_max());
        let kind = self.pool().options().store;
        let given = locations::take_new(mirror, new, consent, kind, used_bytes, count_max)?;
        let path = given.path.clone();
        mirror.join(given, replaces)?;
        // A configuration names the old copy until it is changed.
        if let Some(old) = replaces {
            self.add_left(old.canonicalize().unwrap_or_else(|_| old.to_owned()));
        }
        self.add_place(path);
        self.pause_resync(false);
        self.start_resync()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stepped_pool::SteppedPool;

    #[test]
    fn the_verification_before_a_resync_shows_its_progress() {
        let mut stepped = SteppedPool::new("resync-verified");
        stepped.write(0, 8);
        stepped.checkpoint();
        let (pool, control) = (&*stepped.pool, ResyncControl::default());
        let progress = || control.verified_bytes(pool.segments().stored_bytes());
        assert_eq!(progress(), None);
        // It waits after the first leaf.
        control.is_paused.store(true, Ordering::Relaxed);
        let paused = std::thread::scope(|scope| {
            let repairing = scope.spawn(|| repair(pool, &control, &|| true));
            let is_begun = || progress().is_some_and(|(verified, _)| verified > 0);
            while !is_begun() && !repairing.is_finished() {
                std::thread::yield_now();
            }
            let paused = progress();
            control.is_paused.store(false, Ordering::Relaxed);
            paused
        });
        let (verified, all) = paused.unwrap();
        assert!(verified >= 8 * 4096 && all >= verified, "{verified} of {all}");
        assert_eq!(progress(), None, "it has ended");
    }
}

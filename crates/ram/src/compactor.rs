//! Background compaction: once a second a thread of the device checks what share of the pool is
//! lost to free space, and compacts if the share exceeds a threshold.
//!
//! Then the thread asks the system for huge pages in place of small ones that are full of objects.
//!
//! The data path is not involved. A check costs a few instructions. A round moves at most
//! [`ROUND_BYTES`], and any write that races with a move wins. After a round that gained little,
//! the thread does not try again before the pool has changed.
#![allow(clippy::disallowed_types)] // Starting, triggering and stopping a thread is control plane.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::pool::Load;
use crate::store::Access;

/// Time between checks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum bytes of objects that a round moves: 64 MiB take about 20 ms.
const ROUND_BYTES: u64 = 64 << 20;
/// Maximum number of huge pages that a round asks for: 64 MiB, which also take about 20 ms.
const ROUND_HUGE_PAGES: u64 = 32;
/// A round gained little if it freed less than 1/8 of the lost bytes.
const GAIN_PART: u64 = 8;
/// After such a round, wait until this share of the stored bytes was written again, in percent.
const CHANGED_PERCENT: u64 = 5;

/// The compaction thread and its control block.
#[derive(Debug)]
pub(crate) struct Compactor {
    control: Arc<CompactorControl>,
    thread: Option<JoinHandle<()>>,
}

/// State that the thread and the device share.
#[derive(Debug)]
struct CompactorControl {
    state: Mutex<ControlState>,
    changed: Condvar,
}

#[derive(Debug)]
struct ControlState {
    /// Threshold: lost bytes in percent of the stored bytes.
    percent: u8,
    /// Number of rounds that have begun; the next field counts those that have ended.
    begun: u64,
    over: u64,
    /// Rounds up to this one start at once and do not wait for the interval.
    wanted: u64,
    /// The device is closing: ends a round early.
    stopped: bool,
}

impl Compactor {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system cannot create a thread.
    pub(crate) fn start(access: Access, percent: u8) -> io::Result<Compactor> {
        let state = ControlState { percent, begun: 0, over: 0, wanted: 0, stopped: false };
        let control =
            Arc::new(CompactorControl { state: Mutex::new(state), changed: Condvar::new() });
        let of_thread = Arc::clone(&control);
        let thread = std::thread::Builder::new().name("ram-compactor".to_owned());
        let thread = thread.spawn(move || run(&of_thread, access))?;
        Ok(Compactor { control, thread: Some(thread) })
    }

    /// The threshold, in percent of the stored bytes.
    pub(crate) fn percent(&self) -> u8 {
        self.control.state().percent
    }

    /// Sets the threshold.
    pub(crate) fn set_percent(&self, percent: u8) {
        self.control.state().percent = percent;
    }

    /// Runs a round at once and waits until it has ended.
    pub(crate) fn run_round(&self) {
        let mut state = self.control.state();
        let run_round = state.begun + 1;
        state.wanted = state.wanted.max(run_round);
        self.control.changed.notify_all();
        while state.over < run_round && !state.stopped {
            state = self.control.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Compactor {
    fn drop(&mut self) {
        self.control.stop();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was already printed and has left the pool consistent.
            let _ = thread.join();
        }
    }
}

impl CompactorControl {
    fn state(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the thread to end, and releases every thread that waits for a round.
    fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        self.changed.notify_all();
    }

    /// Waits for the next round and returns its threshold; `None` after a stop.
    fn next_round(&self) -> Option<u8> {
        let waiting = |state: &mut ControlState| state.wanted <= state.begun && !state.stopped;
        let waited = self.changed.wait_timeout_while(self.state(), INTERVAL, waiting);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.begun += 1;
        (!state.stopped).then_some(state.percent)
    }

    fn end_round(&self) {
        let mut state = self.state();
        state.over = state.begun;
        self.changed.notify_all();
    }
}

fn run(control: &CompactorControl, mut access: Access) {
    /// Releases the waiting threads, even if the compaction thread panics.
    struct End<'d>(&'d CompactorControl);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.stop();
        }
    }
    let _end = End(control);
    let mut rounds = Rounds::default();
    while let Some(percent) = control.next_round() {
        let stopped = || control.state().stopped;
        rounds.run_round(&mut access, percent, stopped);
        access.store().pool().gather(ROUND_HUGE_PAGES, stopped);
        control.end_round();
    }
}

/// State that is kept between rounds.
#[derive(Debug, Default)]
struct Rounds {
    /// The pool's load after a round that gained little.
    fruitless: Option<Load>,
}

impl Rounds {
    /// Compacts if more than `percent` of the stored bytes are lost.
    fn run_round(&mut self, access: &mut Access, percent: u8, stop: impl FnMut() -> bool) {
        let before = access.store().pool().load();
        let is_little = before.lost_bytes() * 100 <= before.stored_bytes * u64::from(percent);
        if is_little || self.is_fruitless(before) {
            return;
        }
        access.compact_some(ROUND_BYTES, stop);
        access.reclaim();
        let after = access.store().pool().load();
        let (lost, left) = (before.lost_bytes(), after.lost_bytes());
        self.fruitless = (left + lost / GAIN_PART > lost).then_some(after);
    }

    /// Whether too little was stored since a round that gained little.
    fn is_fruitless(&self, now: Load) -> bool {
        self.fruitless.is_some_and(|then| {
            (now.placed_bytes - then.placed_bytes) * 100 <= then.stored_bytes * CHANGED_PERCENT
        })
    }
}

//! State of cleaning that the pool keeps for the committer and the maintenance thread: what the
//! thread does, the liveness scan, the open cold segment, and the throttle of writes.
//!
//! The throttle works while space is short: writes may use the bytes that cleaning frees, and a
//! little more. Each write waits a little, instead of all for a whole round of cleaning.

use std::time::Duration;

use blockyard_sync::counter::Counter;
use blockyard_sync::event_count::EventCount;

/// What the checkpoint thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The thread does not exist, or has nothing to do.
    Rests,
    /// The thread writes pages.
    Writes,
    /// The thread cleans.
    Cleans,
}

/// State of the liveness scan, which finds how many of the unknown bytes are live: see
/// [`super::liveness_scan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LivenessScan {
    /// No scan runs.
    None,
    /// A scan runs for the first time.
    First,
    /// The scan was interrupted, because a checkpoint was due.
    Broken,
    /// A scan runs for the second time, and a due checkpoint waits for it.
    Again,
}

/// The cold segment that is open, and where its next batch goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ColdWriter {
    pub(crate) segment: u32,
    pub(super) offset: u32,
    pub(super) number: u64,
}

impl ColdWriter {
    /// Bytes left in a segment of this length.
    pub(super) fn room(&self, segment_bytes: u32) -> u32 {
        segment_bytes - self.offset
    }
}

/// State shared by the checkpoint thread and the committer.
#[derive(Debug, Default)]
pub(crate) struct Throttle {
    /// The [`Phase`] as a number. The committer writes it before it starts the thread, the thread
    /// as long as it runs.
    phase: Counter,
    /// Bytes freed for writes. Only the thread that cleans increments it.
    won: Counter,
    /// Number of times the committer asked for cleaning. Only the committer increments it.
    asked: Counter,
    event_count: EventCount,
}

impl Throttle {
    /// Sets the phase.
    pub(crate) fn set(&self, phase: Phase) {
        self.phase.add((phase as u64).wrapping_sub(self.phase.get()));
    }

    /// The current phase.
    pub(crate) fn phase(&self) -> Phase {
        let all = [Phase::Writes, Phase::Cleans];
        let phase = self.phase.get();
        all.into_iter().find(|it| *it as u64 == phase).unwrap_or(Phase::Rests)
    }

    /// Adds bytes that writes may use.
    pub(super) fn win(&self, bytes: u64) {
        self.won.add(bytes);
    }

    /// Bytes freed for writes so far.
    pub(crate) fn won(&self) -> u64 {
        self.won.get()
    }

    /// The committer asks the thread to clean, or to stop cleaning; this wakes the thread.
    pub(crate) fn ask(&self) {
        self.asked.add(1);
        self.event_count.notify();
    }

    /// Number of times the committer asked.
    pub(super) fn asked(&self) -> u64 {
        self.asked.get()
    }

    /// Sleeps until the committer has asked more than `asked` times, `at_most` long. Returns the
    /// number of times it asked by then.
    pub(super) fn sleep(&self, at_most: Duration, asked: u64) -> u64 {
        self.event_count.sleep(at_most, || self.asked.get() != asked);
        self.asked.get()
    }
}

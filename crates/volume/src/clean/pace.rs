//! Throttles writes while space is short: writes may use the bytes that cleaning frees, and a
//! little more. Each write waits a little, instead of all for a whole round of cleaning.

use std::time::Duration;

use blockyard_sync::bell::Bell;
use blockyard_sync::counter::Counter;

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

/// State shared by the checkpoint thread and the committer.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// The [`Phase`] as a number. The committer writes it before it starts the thread, the thread
    /// as long as it runs.
    phase: Counter,
    /// Bytes freed for writes. Only the thread that cleans increments it.
    won: Counter,
    /// Number of times the committer asked for cleaning. Only the committer increments it.
    asked: Counter,
    bell: Bell,
}

impl Pace {
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
        self.bell.ring();
    }

    /// Number of times the committer asked.
    pub(super) fn asked(&self) -> u64 {
        self.asked.get()
    }

    /// Sleeps until the committer has asked more than `asked` times, `at_most` long. Returns the
    /// number of times it asked by then.
    pub(super) fn sleep(&self, at_most: Duration, asked: u64) -> u64 {
        self.bell.sleep(at_most, || self.asked.get() != asked);
        self.asked.get()
    }
}

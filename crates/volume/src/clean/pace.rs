//! The pace of writes where space is short: they may have what cleaning wins, and a little more. So
//! each waits for a little of it, instead of all for the whole.

use std::time::Duration;

use blockyard_sync::bell::Bell;
use blockyard_sync::counter::Counter;

/// What the thread of a checkpoint does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// There is none, or it has nothing to do.
    Rests,
    /// It writes pages.
    Writes,
    /// It cleans.
    Cleans,
}

/// What is shared by that thread and the committer.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// The phase, as a number. The committer changes it before there is the thread, and the thread
    /// as long as it is there.
    phase: Counter,
    /// Bytes that were won for writes. Whoever cleans counts.
    won: Counter,
    /// So many times the committer has asked for cleaning. It alone counts.
    asked: Counter,
    bell: Bell,
}

impl Pace {
    /// Something else is done from now on.
    pub(crate) fn set(&self, phase: Phase) {
        self.phase.add((phase as u64).wrapping_sub(self.phase.get()));
    }

    /// What is done.
    pub(crate) fn phase(&self) -> Phase {
        let all = [Phase::Writes, Phase::Cleans];
        let phase = self.phase.get();
        all.into_iter().find(|it| *it as u64 == phase).unwrap_or(Phase::Rests)
    }

    /// So many bytes more are for writes.
    pub(super) fn win(&self, bytes: u64) {
        self.won.add(bytes);
    }

    /// How many bytes were won for writes.
    pub(crate) fn won(&self) -> u64 {
        self.won.get()
    }

    /// The committer wants something to be cleaned, or that it ends.
    pub(crate) fn ask(&self) {
        self.asked.add(1);
        self.bell.ring();
    }

    /// How many times it has asked.
    pub(super) fn asked(&self) -> u64 {
        self.asked.get()
    }

    /// Sleeps until it has asked more often than so many times, but not for longer; answers how
    /// often it has then.
    pub(super) fn sleep(&self, at_most: Duration, asked: u64) -> u64 {
        self.bell.sleep(at_most, || self.asked.get() != asked);
        self.asked.get()
    }
}

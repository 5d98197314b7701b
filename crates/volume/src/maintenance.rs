//! The protocol between the committer and the checkpoint thread: commands go to the thread, and its
//! report goes back.
//!
//! The committer starts a checkpoint thread when a checkpoint is due, and joins it before it starts
//! the next one. The thread writes the checkpoint, then cleans until the next one is due: that is a
//! *round*. If a pool runs no threads, the committer does the same work itself, and only the state
//! of the liveness scan is used.
//!
//! ```text
//! Stage        start_checkpoint            start_checkpoint: it is durable
//!        Idle ─────────────────▸ Writing ──────────────────────────────▸ Scanning
//!         ▴                       ▴   │                                     │
//!         └───────────────────────┼───┘ start_checkpoint: it failed         │ clean::concurrent
//!                start_checkpoint │                                         ▾
//!                                 └────────── Resting ◂─────────────▸ Cleaning
//!                                                    clean::concurrent
//!
//! LivenessScan    liveness_scan::scan, and its count is complete or has failed
//!        Idle ◂──────────────────────────────────────────────▸ First
//!         ▴                                                      │ Finish interrupts it
//!         └────── Second ◂─────────────────── Interrupted ◂──────┘
//! ```
//!
//! A thread that panics leaves the stage as it was; the committer finds that the thread has ended,
//! and latches the pool when it joins it.
//!
//! A command is a member of a set, not an entry of a queue: each states a wish that holds until it
//! is met or withdrawn, sending one twice means the same as once, and a set needs no bound. The set
//! is an RCU cell and not one atomic word: a scan is requested by the number of a checkpoint.

use std::time::Duration;

use blockyard_sync::counter::Counter;
use blockyard_sync::event_count::EventCount;
use blockyard_sync::rcu_cell::RcuCell;

/// What the checkpoint thread does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No thread has run yet, or the checkpoint of the last one failed.
    #[default]
    Idle,
    /// The thread writes the pages of a checkpoint.
    Writing,
    /// The checkpoint is durable. The thread does a liveness scan, if that is worth its cost.
    Scanning,
    /// The thread cleans.
    Cleaning,
    /// The thread waits until cleaning is needed again, or it has ended.
    Resting,
}

impl Stage {
    /// Whether the checkpoint of this round is durable.
    pub(crate) fn is_durable(self) -> bool {
        matches!(self, Stage::Scanning | Stage::Cleaning | Stage::Resting)
    }

    /// Whether the thread does not exist, or has nothing to do.
    pub(crate) fn is_at_rest(self) -> bool {
        matches!(self, Stage::Idle | Stage::Resting)
    }

    /// Whether the diagram has this transition. A thread that panicked is in any stage when the
    /// next one starts.
    fn may_become(self, next: Stage) -> bool {
        match next {
            Stage::Writing => true,
            Stage::Idle | Stage::Scanning => self == Stage::Writing,
            Stage::Cleaning => matches!(self, Stage::Scanning | Stage::Resting),
            Stage::Resting => matches!(self, Stage::Cleaning | Stage::Resting),
        }
    }
}

/// State of the liveness scan, which finds how many of the unknown bytes are live: see
/// `clean/liveness_scan.rs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LivenessScan {
    /// No scan runs.
    #[default]
    Idle,
    /// A scan runs for the first time.
    First,
    /// A due checkpoint interrupted the scan. The next one is the second.
    Interrupted,
    /// A scan runs for the second time, and a due checkpoint waits for it.
    Second,
}

impl LivenessScan {
    /// Whether a scan runs.
    pub(crate) fn is_running(self) -> bool {
        matches!(self, LivenessScan::First | LivenessScan::Second)
    }
}

/// The cold segment that is open, and where its next batch goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ColdWriter {
    pub(crate) segment: u32,
    pub(crate) offset: u32,
    pub(crate) number: u64,
}

impl ColdWriter {
    /// Bytes left in a segment of this length.
    pub(crate) fn free_bytes(&self, segment_bytes: u32) -> u32 {
        segment_bytes - self.offset
    }
}

/// A command to the checkpoint thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundCommand {
    /// Space is short: clean. Wakes a thread that waits until cleaning is needed.
    Clean,
    /// End the round, because a checkpoint is due or the committer waits for the thread: stop
    /// cleaning, and interrupt a scan. Holds until [`Maintenance::withdraw_finish`].
    Finish,
    /// Do a liveness scan after this checkpoint or a later one. Holds until a scan has ended, see
    /// [`Maintenance::end_scan_requests`].
    Scan {
        /// Number of the checkpoint.
        after: u64,
    },
}

/// The commands that hold.
#[derive(Clone, Copy, Debug, Default)]
struct RoundCommands {
    finish: bool,
    scan_after: Option<u64>,
}

/// What the checkpoint thread reports.
#[derive(Clone, Copy, Debug, Default)]
struct RoundReport {
    stage: Stage,
    scan: LivenessScan,
}

/// The commands to the checkpoint thread, its report, and the bytes that it has freed for writes.
#[derive(Debug)]
pub(crate) struct Maintenance {
    commands: RcuCell<RoundCommands>,
    /// Number of the commands `Clean` and `Finish` that were sent. Only the committer sends them.
    sent: Counter,
    /// Wakes the checkpoint thread.
    event_count: EventCount,
    /// The thread writes it as long as it runs, and the committer before it starts the thread.
    report: RcuCell<RoundReport>,
    /// Bytes freed for writes. Only the thread that cleans increments it.
    freed_bytes: Counter,
}

impl Default for Maintenance {
    fn default() -> Maintenance {
        Maintenance {
            commands: RcuCell::new(RoundCommands::default()),
            sent: Counter::default(),
            event_count: EventCount::new(),
            report: RcuCell::new(RoundReport::default()),
            freed_bytes: Counter::default(),
        }
    }
}

impl Maintenance {
    /// Sends a command. [`RoundCommand::Clean`] and [`RoundCommand::Finish`] wake the thread; only
    /// the committer sends them.
    pub(crate) fn send(&self, command: RoundCommand) {
        match command {
            RoundCommand::Clean => {}
            RoundCommand::Finish => {
                self.commands.update(|commands| RoundCommands { finish: true, ..*commands });
            }
            RoundCommand::Scan { after } => {
                let later = |now: Option<u64>| now.max(Some(after));
                if self.scan_after() != later(self.scan_after()) {
                    self.commands.update(|commands| RoundCommands {
                        scan_after: later(commands.scan_after),
                        ..*commands
                    });
                }
                return;
            }
        }
        self.sent.add(1);
        self.event_count.notify();
    }

    /// Whether the thread is to end the round, because [`RoundCommand::Finish`] holds.
    pub(crate) fn must_finish(&self) -> bool {
        self.commands.get().finish
    }

    /// Withdraws [`RoundCommand::Finish`].
    pub(crate) fn withdraw_finish(&self) {
        self.commands.update(|commands| RoundCommands { finish: false, ..*commands });
    }

    /// The checkpoint after which a liveness scan is requested.
    pub(crate) fn scan_after(&self) -> Option<u64> {
        self.commands.get().scan_after
    }

    /// Notes that a liveness scan after checkpoint `round` has ended. This ends all requests for
    /// it, but not those for a later checkpoint.
    pub(crate) fn end_scan_requests(&self, round: u64) {
        self.commands.update(|commands| RoundCommands {
            scan_after: commands.scan_after.filter(|after| *after > round),
            ..*commands
        });
    }

    /// Number of commands that the committer has sent to the thread.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.get()
    }

    /// Sleeps until the committer has sent more than `sent` commands, `at_most` long. Returns their
    /// number by then.
    pub(crate) fn sleep(&self, at_most: Duration, sent: u64) -> u64 {
        self.event_count.sleep(at_most, || self.sent.get() != sent);
        self.sent.get()
    }

    /// What the thread does.
    pub(crate) fn stage(&self) -> Stage {
        self.report.get().stage
    }

    /// Sets what the thread does. The caller wakes the committer: see
    /// [`crate::pool::Pool::set_stage`].
    pub(crate) fn set_stage(&self, stage: Stage) {
        debug_assert!(self.stage().may_become(stage), "from {:?} to {stage:?}", self.stage());
        self.report.update(|report| RoundReport { stage, ..*report });
    }

    /// State of the liveness scan.
    pub(crate) fn scan(&self) -> LivenessScan {
        self.report.get().scan
    }

    /// Sets the state of the liveness scan.
    pub(crate) fn set_scan(&self, scan: LivenessScan) {
        self.report.update(|report| RoundReport { scan, ..*report });
    }

    /// Adds bytes that writes may use.
    pub(crate) fn add_freed_bytes(&self, bytes: u64) {
        self.freed_bytes.add(bytes);
    }

    /// Bytes freed for writes so far.
    pub(crate) fn freed_bytes(&self) -> u64 {
        self.freed_bytes.get()
    }
}

//! The intake of the committer: the records of all volumes, in the order in which they go into
//! groups.
//!
//! ```text
//! Accepting ── Intake::take, of `Body::Stop` ──▸ Stopping
//! ```

use std::collections::VecDeque;

use blockyard_sync::completion_queue::Receiver;

use crate::record::{Body, Record};

/// Whether the pool is being closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IntakeState {
    /// Records are accepted.
    Accepting,
    /// The record that closes the pool was taken. No record waits any more: those that waited
    /// precede it.
    Stopping,
}

/// The records that are not in a group yet: first the held ones, then those in the record queue.
pub(super) struct Intake {
    queue: Receiver<Record>,
    /// Records that were taken out of the queue and did not go into a group yet.
    held: VecDeque<Record>,
    /// Number of next records that get a group each, because their group found no space.
    single: usize,
    state: IntakeState,
}

impl Intake {
    pub(super) fn new(queue: Receiver<Record>) -> Intake {
        Intake { queue, held: VecDeque::new(), single: 0, state: IntakeState::Accepting }
    }

    /// The record queue.
    pub(super) fn queue(&self) -> &Receiver<Record> {
        &self.queue
    }

    /// Takes the next record.
    pub(super) fn take(&mut self) -> Option<Record> {
        let record = self.held.pop_front().or_else(|| self.queue.take())?;
        if matches!(record.body, Body::Stop) {
            self.state = IntakeState::Stopping;
        }
        Some(record)
    }

    /// Whether the pool is being closed.
    pub(super) fn is_stopping(&self) -> bool {
        self.state == IntakeState::Stopping
    }

    /// Puts a record before all others.
    pub(super) fn hold(&mut self, record: Record) {
        self.held.push_front(record);
    }

    /// Puts records before all others, in their order.
    pub(super) fn hold_all(&mut self, records: impl DoubleEndedIterator<Item = Record>) {
        records.rev().for_each(|record| self.hold(record));
    }

    /// Takes all records out of the queue and holds them.
    pub(super) fn empty_queue(&mut self) {
        while let Some(record) = self.queue.take() {
            self.held.push_back(record);
        }
    }

    /// The held records.
    pub(super) fn held(&mut self) -> &mut VecDeque<Record> {
        &mut self.held
    }

    /// Whether no record is held.
    pub(super) fn holds_none(&self) -> bool {
        self.held.is_empty()
    }

    /// Gives each of the next `count` records a group of its own, in addition to those that get one
    /// already.
    pub(super) fn add_single(&mut self, count: usize) {
        self.single += count;
    }

    /// Whether the next record gets a group of its own.
    pub(super) fn is_single(&self) -> bool {
        self.single > 0
    }

    /// Notes that a record went into a group.
    pub(super) fn count_grouped(&mut self) {
        self.single = self.single.saturating_sub(1);
    }
}

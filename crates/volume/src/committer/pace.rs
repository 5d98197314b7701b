//! Writes wait for cleaning where space is short: for their part of it. And they wait for a count
//! that no checkpoint breaks off, where what that checkpoint is to write grows too long.

use super::{Committer, DIRTY_BYTES_MIN};
use crate::clean::{self, Phase};
use crate::pool::Recount;
use crate::segments::Want;
use crate::store::Directory;
use crate::thread::Thread;

/// What writes may have beyond what cleaning has won since space is short, in bytes.
const AHEAD_BYTES: u64 = 256 << 10;

/// Writes wait where fewer segments than these are left for them.
const LEFT_MIN: usize = 2;

/// As many times as much as a checkpoint is begun for there may be of changed pages and of log,
/// while it has to wait until blocks are counted.
const OVERRUN_DIRTY: u64 = 2;
const OVERRUN_LOG: u64 = 4;

impl<D: Directory> Committer<D> {
    /// Changed pages that are worth a checkpoint, in bytes: they are only in memory.
    pub(super) fn dirty_max(&self) -> u64 {
        (2 * self.pool.segments().leaves().limit_bytes()).max(DIRTY_BYTES_MIN)
    }

    /// Whether so much is to be written by a checkpoint that cannot begin before blocks are counted
    /// that there must not be more.
    pub(super) fn is_overrun(&self) -> bool {
        // One that has ended, in whatever way, is joined soon.
        let is_over = self.checkpoint.as_ref().is_some_and(Thread::is_ended);
        let waits = self.pool.recount() == Recount::Again && !is_over;
        if !waits || self.stopping || self.pool.is_poisoned() {
            return false;
        }
        let log =
            self.cleaning_since.unwrap_or(0) + OVERRUN_LOG * self.pool.options().checkpoint_bytes;
        self.pool.segments().dirty_bytes() >= OVERRUN_DIRTY * self.dirty_max()
            || self.since_checkpoint >= log
    }

    /// Whether writes have to wait: for what is being cleaned, or the checkpoint before that.
    pub(super) fn is_held_back(&mut self) -> bool {
        if self.is_overrun() {
            return true;
        }
        let (pool, pace) = (&self.pool, self.pool.pace());
        let phase = pace.phase();
        let is_over = self.checkpoint.as_ref().is_none_or(Thread::is_ended);
        let goes_on = is_over || self.stopping || pool.is_hurried() || pool.is_poisoned();
        if goes_on || phase != Phase::Cleans || !clean::is_scarce(pool) {
            self.spent = pace.won();
        }
        if goes_on || phase == Phase::Rests || !clean::is_scarce(pool) {
            return false;
        }
        let left = pool.segments().free_for(Want::Write);
        left < LEFT_MIN || self.spent >= pace.won() + AHEAD_BYTES
    }

    /// Lets writes wait if they have to; what is in a group already goes on.
    pub(super) fn hold_back(&mut self) {
        if !self.search.is_on && self.group.records.is_empty() && self.is_held_back() {
            self.pool.meters().held_back();
            self.search.pace();
        }
    }
}

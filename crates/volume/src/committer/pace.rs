//! Writes wait for cleaning where space is short: for their part of it.

use super::Committer;
use crate::clean::{self, Phase};
use crate::segments::Want;
use crate::store::Directory;
use crate::thread::Thread;

/// What writes may have beyond what cleaning has won since space is short, in bytes.
const AHEAD_BYTES: u64 = 256 << 10;

/// Writes wait where fewer segments than these are left for them.
const LEFT_MIN: usize = 2;

impl<D: Directory> Committer<D> {
    /// Whether writes have to wait: for what is being cleaned, or the checkpoint before that.
    pub(super) fn is_held_back(&mut self) -> bool {
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

//! The claim of one holder to a disk, as a mount under Linux claims its block device: a mounted
//! file system, a replay of writes, or a request that changes zones or replaces the device.
//!
//! Exporters give a claimed disk to no new client that could write. An exporter counts a client
//! first and then reads the state; a holder claims the disk first and then reads the counts. So a
//! holder and a client that begin at once do not miss each other.
#![allow(clippy::disallowed_types)] // Control plane: read when a client opens the disk.

use std::sync::Arc;

use blockyard_sync::atomics::{AtomicBool, Ordering};

/// Whether a disk is claimed.
#[derive(Debug, Default)]
pub struct ClaimState(AtomicBool);

impl ClaimState {
    /// Claims the disk until the claim is dropped; `None` if it is claimed.
    pub fn claim(self: &Arc<ClaimState>) -> Option<DiskClaim> {
        // Relaxed, here and below: the counts of clients are read and changed under a lock, which
        // orders the state too.
        let is_claimed = self.0.swap(true, Ordering::Relaxed);
        (!is_claimed).then(|| DiskClaim(Arc::clone(self)))
    }

    /// Whether the disk is claimed.
    pub fn is_claimed(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The claim to a disk, until it is dropped.
#[derive(Debug)]
pub struct DiskClaim(Arc<ClaimState>);

impl Drop for DiskClaim {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_one_claim_until_that_is_dropped() {
        let state = Arc::new(ClaimState::default());
        assert!(!state.is_claimed());
        let claim = state.claim();
        assert!(claim.is_some() && state.is_claimed());
        assert!(state.claim().is_none());
        drop(claim);
        assert!(!state.is_claimed() && state.claim().is_some());
    }
}

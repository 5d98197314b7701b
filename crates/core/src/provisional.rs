//! New data on disk that stay only if the device that they are for is accepted.
#![allow(clippy::disallowed_types)] // A flag of the control plane.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the files, the pool or the volume that the opening of a device made stay. They are
/// removed when the device closes, unless [`Provisional::keep`] was called before. All clones share
/// one decision.
#[derive(Clone, Debug)]
pub struct Provisional {
    keep: Arc<AtomicBool>,
}

impl Provisional {
    /// What was made is removed at the close, until `keep` is called.
    pub fn removed_at_close() -> Provisional {
        Provisional { keep: Arc::default() }
    }

    /// Nothing was made, or what was made stays.
    pub fn kept() -> Provisional {
        Provisional { keep: Arc::new(true.into()) }
    }

    /// What is made from now on is removed at the close, until `keep` is called.
    pub fn remove_at_close(&self) {
        self.keep.store(false, Ordering::Relaxed);
    }

    /// Keeps what was made.
    pub fn keep(&self) {
        // A flag alone: it publishes no other data.
        self.keep.store(true, Ordering::Relaxed);
    }

    /// Whether what was made stays.
    pub fn is_kept(&self) -> bool {
        self.keep.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_the_decision() {
        let made = Provisional::removed_at_close();
        let device = made.clone();
        assert!(!device.is_kept());
        made.keep();
        assert!(device.is_kept() && Provisional::kept().is_kept());
        device.remove_at_close();
        assert!(!made.is_kept());
    }
}

//! The flag that Ctrl-C sets and every measurement looks at.
#![allow(clippy::disallowed_types, reason = "between measurements, not on the data path")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the run is to end. Clones are the same flag.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    set: Arc<AtomicBool>,
}

impl Stop {
    /// A flag that is not set.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// Asks everybody to end.
    pub fn set(&self) {
        // Relaxed: nothing is handed over with the flag.
        self.set.store(true, Ordering::Relaxed);
    }

    /// Whether everybody is asked to end.
    pub fn is_set(&self) -> bool {
        // Relaxed: nothing is handed over with the flag.
        self.set.load(Ordering::Relaxed)
    }
}

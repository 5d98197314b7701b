//! The flag that Ctrl-C sets and every measurement looks at.
#![allow(clippy::disallowed_types, reason = "between measurements, not on the data path")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::signal;

/// Whether the run is to end. Clones are the same flag.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    set: Arc<AtomicBool>,
    by_signal: bool,
}

impl Stop {
    /// A flag that is not set, and that only [`Stop::set`] sets.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// A flag that Ctrl-C sets too. A second Ctrl-C ends the program.
    ///
    /// # Errors
    /// If the system refuses to send it here.
    pub fn by_signal() -> io::Result<Stop> {
        signal::catch()?;
        Ok(Stop { by_signal: true, ..Stop::default() })
    }

    /// Asks everybody to end.
    pub fn set(&self) {
        // Relaxed: nothing is handed over with the flag.
        self.set.store(true, Ordering::Relaxed);
    }

    /// Whether everybody is asked to end.
    pub fn is_set(&self) -> bool {
        // Relaxed: nothing is handed over with the flag.
        self.set.load(Ordering::Relaxed) || (self.by_signal && signal::is_caught())
    }
}

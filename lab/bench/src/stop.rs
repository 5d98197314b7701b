//! The flag that Ctrl-C sets and that every measurement checks.
#![allow(clippy::disallowed_types, reason = "between measurements, not on the data path")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::signal;

/// Whether the run is to end. Clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    set: Arc<AtomicBool>,
    by_signal: bool,
}

impl Stop {
    /// A cleared flag that only [`Stop::set`] sets.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// A flag that Ctrl-C sets too. A second Ctrl-C ends the program.
    ///
    /// # Errors
    /// If the system refuses the signal handler.
    pub fn by_signal() -> io::Result<Stop> {
        signal::catch()?;
        Ok(Stop { by_signal: true, ..Stop::default() })
    }

    /// Asks all threads of the run to end.
    pub fn set(&self) {
        // Relaxed: the flag publishes no data.
        self.set.store(true, Ordering::Relaxed);
    }

    /// Whether the run is to end.
    pub fn is_set(&self) -> bool {
        // Relaxed: the flag publishes no data.
        self.set.load(Ordering::Relaxed) || (self.by_signal && signal::is_caught())
    }
}

//! The flag that ends a run, which every measurement checks. The first Ctrl-C sets it, the second
//! one ends the program.
#![allow(unsafe_code)] // A signal handler can only be set by a system call.
#![allow(clippy::disallowed_types, reason = "between measurements, not on the data path")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether Ctrl-C was pressed since [`catch`].
static CAUGHT: AtomicBool = AtomicBool::new(false);

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
        catch()?;
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
        self.set.load(Ordering::Relaxed) || (self.by_signal && CAUGHT.load(Ordering::Relaxed))
    }
}

extern "C" fn caught(_signal: libc::c_int) {
    CAUGHT.store(true, Ordering::Relaxed);
}

/// Catches SIGINT once, so that the next one ends the program as by default. Catches SIGTERM
/// always, because timeout(1) sends it twice, to its child and to the group.
///
/// # Errors
/// If the system refuses.
fn catch() -> io::Result<()> {
    CAUGHT.store(false, Ordering::Relaxed);
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: all bytes zero is a valid sigaction: no flags, an empty mask, the default action.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = caught as *const () as libc::sighandler_t;
        // RESETHAND: the second signal has the default action. RESTART: system calls continue, and
        // the measurement sees the flag.
        let once = if signal == libc::SIGINT { libc::SA_RESETHAND } else { 0 };
        action.sa_flags = libc::SA_RESTART | once;
        // SAFETY: the action is initialised, and its handler only stores to an atomic, which is
        // async-signal-safe; no pointer for the old action is passed.
        if unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

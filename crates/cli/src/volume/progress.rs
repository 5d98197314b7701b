//! Progress on a terminal: how far it is, and how fast.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use blockyard_yard::size::{Bytes, rounded};

/// Shown no more often than this.
const EACH: Duration = Duration::from_millis(200);

/// A line on standard error that is written again and again. Nothing, if that is no terminal.
pub(crate) struct ProgressLine {
    verb: &'static str,
    shows: bool,
    since: Instant,
    last: Option<Instant>,
}

impl ProgressLine {
    pub(crate) fn new(verb: &'static str) -> ProgressLine {
        let shows = std::io::stderr().is_terminal();
        ProgressLine { verb, shows, since: Instant::now(), last: None }
    }

    /// Bytes done, and bytes in all where that is known.
    pub(crate) fn tell(&mut self, done: u64, total: Option<u64>) {
        if !self.is_due(total == Some(done)) {
            return;
        }
        let seconds = self.since.elapsed().as_secs_f64().max(0.001);
        let rate = done as f64 / seconds / f64::from(1 << 20);
        let whole = |bytes: u64| Bytes(bytes >> 20 << 20);
        let of = total.map_or_else(String::new, |total| format!(" of {}", whole(total)));
        eprint!("\r{} {}{of}, {rate:.0} MiB/s\x1b[K", self.verb, whole(done));
        // It is only for looking at.
        let _ = std::io::stderr().flush();
    }

    /// Bytes that remain, where others do the work.
    pub(crate) fn wait(&mut self, remaining: u64) {
        if self.is_due(false) {
            eprint!("\r{}: {}\x1b[K", self.verb, rounded(remaining));
            let _ = std::io::stderr().flush();
        }
    }

    /// Whether the line is to be written again, as it then is.
    fn is_due(&mut self, is_end: bool) -> bool {
        let now = Instant::now();
        let is_early = !is_end && self.last.is_some_and(|last| now - last < EACH);
        if self.shows && !is_early {
            self.last = Some(now);
        }
        self.shows && !is_early
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.last.is_some() {
            eprint!("\r\x1b[K");
        }
    }
}

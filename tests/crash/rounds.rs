//! The number of rounds, and their seeds: few in `make test`, more by `make crash`, and one to
//! repeat a failure.

use std::fmt;
use std::ops::Range;

use crate::secret::{ENCRYPTED, is_encrypted};

/// The variable that sets the number of rounds.
const ROUNDS: &str = "BLOCKYARD_CRASH_ROUNDS";
/// The variable that sets the first seed.
const SEED: &str = "BLOCKYARD_CRASH_SEED";

fn number(name: &str, unless: u64) -> u64 {
    let Ok(text) = std::env::var(name) else { return unless };
    text.parse().unwrap_or_else(|_| panic!("{name}: `{text}` is no number"))
}

/// The number of rounds that the variable sets; `few` by default.
pub(crate) fn rounds(few: u64) -> u64 {
    number(ROUNDS, few)
}

/// The seeds of all rounds.
pub(crate) fn seeds(few: u64) -> Range<u64> {
    let first = number(SEED, 1);
    first..first + rounds(few)
}

/// The seed of a round. If the test panics while this lives, it prints how to run the round again.
pub(crate) struct Seed(pub(crate) u64);

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let encrypted = if is_encrypted(false) { format!("{ENCRYPTED}=1 ") } else { String::new() };
        write!(f, "{encrypted}{SEED}={} {ROUNDS}=1", self.0)
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The thread of a test has its name.
            let thread = std::thread::current();
            let name = thread.name().unwrap_or_default();
            eprintln!(
                "to run the round that failed: {self} cargo test --locked -p blockyard \
                 --test crash -- --nocapture --exact {name}"
            );
        }
    }
}

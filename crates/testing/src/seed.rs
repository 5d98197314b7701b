//! Seeds of random tests: read from the environment for a replay, and printed when a test fails.
//!
//! ```text
//! BLOCKYARD_SEED=0x1234 cargo test -p blockyard-testing the_name_of_the_test
//! ```
//!
//! A run without the variable uses a fixed seed, so that a failing build keeps failing.
//! `BLOCKYARD_SEED=random` takes a new one each time, to search further.

use std::fmt;

/// The default seed.
const DEFAULT: u64 = 0xb10c_6a4d;

/// A seed. [`Seed::watch`] prints it, and how to replay it, if the test panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(pub u64);

impl Seed {
    /// The seed in `BLOCKYARD_SEED`, in decimal or as `0x...`, or `random`.
    ///
    /// # Panics
    /// If the variable holds anything else: a replay that silently used another seed would mislead.
    pub fn from_env() -> Seed {
        match std::env::var("BLOCKYARD_SEED") {
            Ok(text) if text == "random" => Seed(fastrand::u64(..)),
            Ok(text) => match parse(&text) {
                Some(seed) => Seed(seed),
                None => panic!("BLOCKYARD_SEED is `{text}`: want a number, 0x... or `random`"),
            },
            Err(_) => Seed(DEFAULT),
        }
    }

    /// A generator from this seed, independent of those with another `stream` number.
    pub fn rng(self, stream: u64) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.0 ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// Guards a test: if it panics while the result lives, the seed is printed.
    #[must_use = "the seed is printed when this is dropped by a panic"]
    pub fn watch(self, what: &str) -> Watch {
        Watch { seed: self, what: what.to_owned() }
    }
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

fn parse(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Prints the seed if it is dropped by a panic; see [`Seed::watch`].
#[derive(Debug)]
pub struct Watch {
    seed: Seed,
    what: String,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: failed; replay with BLOCKYARD_SEED={}", self.what, self.seed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_in_both_forms() {
        assert_eq!(parse("17"), Some(17));
        assert_eq!(parse("0xff"), Some(255));
        assert_eq!(parse("seed"), None);
    }

    #[test]
    fn streams_of_one_seed_differ_and_repeat() {
        let seed = Seed(42);
        assert_eq!(seed.rng(1).u64(..), seed.rng(1).u64(..));
        assert_ne!(seed.rng(1).u64(..), seed.rng(2).u64(..));
    }
}

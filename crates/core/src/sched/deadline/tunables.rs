//! The tunables, with Linux's names, defaults and ranges (`queue/iosched/`).
//!
//! Linux clamps a value that is out of range; here it is refused with an error that names the
//! range.

use std::error::Error;
use std::fmt;

/// A tunable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tunable {
    /// The time after which a waiting read expires, in milliseconds.
    ReadExpire,
    /// The time after which a waiting write expires, in milliseconds.
    WriteExpire,
    /// How many batches of reads may go before waiting writes. A negative number means always.
    WritesStarved,
    /// Whether a request may merge with one that starts where it ends.
    FrontMerges,
    /// Maximum number of requests that are not reads, waiting or in flight.
    AsyncDepth,
    /// Number of requests dispatched in sector order before deadlines are checked.
    FifoBatch,
    /// How long a class may wait for higher classes, in milliseconds.
    PrioAgingExpire,
}

/// Maximum of a C `int`, the type that Linux keeps all tunables in.
const INT_MAX: i32 = i32::MAX;

impl Tunable {
    /// All tunables, in the order of Linux's source.
    pub const ALL: [Tunable; 7] = [
        Tunable::ReadExpire,
        Tunable::WriteExpire,
        Tunable::WritesStarved,
        Tunable::FrontMerges,
        Tunable::AsyncDepth,
        Tunable::FifoBatch,
        Tunable::PrioAgingExpire,
    ];

    /// Linux's name, e.g. `read_expire`.
    pub const fn name(self) -> &'static str {
        match self {
            Tunable::ReadExpire => "read_expire",
            Tunable::WriteExpire => "write_expire",
            Tunable::WritesStarved => "writes_starved",
            Tunable::FrontMerges => "front_merges",
            Tunable::AsyncDepth => "async_depth",
            Tunable::FifoBatch => "fifo_batch",
            Tunable::PrioAgingExpire => "prio_aging_expire",
        }
    }

    /// The tunable with this name.
    pub fn from_name(name: &str) -> Option<Tunable> {
        Tunable::ALL.into_iter().find(|tunable| tunable.name() == name)
    }

    /// The unit of the value; empty for a plain number.
    pub const fn unit(self) -> &'static str {
        match self {
            Tunable::ReadExpire | Tunable::WriteExpire | Tunable::PrioAgingExpire => "ms",
            Tunable::AsyncDepth | Tunable::FifoBatch => "requests",
            Tunable::WritesStarved | Tunable::FrontMerges => "",
        }
    }

    /// The minimum and the maximum value.
    pub const fn range(self) -> (i32, i32) {
        match self {
            Tunable::ReadExpire | Tunable::WriteExpire | Tunable::PrioAgingExpire => (0, INT_MAX),
            Tunable::WritesStarved => (i32::MIN, INT_MAX),
            Tunable::FrontMerges => (0, 1),
            Tunable::AsyncDepth => (1, INT_MAX),
            Tunable::FifoBatch => (0, INT_MAX),
        }
    }
}

impl fmt::Display for Tunable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A value for each tunable, each within its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunables {
    values: [i32; Tunable::ALL.len()],
}

impl Tunables {
    /// Linux's defaults for a scheduler with `nr_requests`, which is also the default of
    /// `async_depth`: no request is limited.
    pub const fn new(nr_requests: u32) -> Tunables {
        let async_depth = match nr_requests {
            0 => 1,
            1..=0x7fff_ffff => nr_requests as i32,
            _ => INT_MAX,
        };
        Tunables { values: [500, 5000, 2, 1, async_depth, 16, 10_000] }
    }

    /// The value of a tunable.
    #[inline]
    pub const fn get(&self, tunable: Tunable) -> i32 {
        self.values[tunable as usize]
    }

    /// Sets a tunable.
    ///
    /// # Errors
    /// If the value is out of range; then nothing changes.
    pub fn set(&mut self, tunable: Tunable, value: i64) -> Result<(), TunableError> {
        let (least, most) = tunable.range();
        match i32::try_from(value) {
            Ok(value) if (least..=most).contains(&value) => {
                self.values[tunable as usize] = value;
                Ok(())
            }
            _ => Err(TunableError::Value { tunable, value: value.to_string() }),
        }
    }

    /// Sets the tunable of this name to a decimal number.
    ///
    /// # Errors
    /// If there is no such tunable, or the text is not an integer in its range; then nothing
    /// changes.
    pub fn set_text(&mut self, name: &str, value: &str) -> Result<(), TunableError> {
        let tunable = Tunable::from_name(name)
            .ok_or_else(|| TunableError::Unknown { name: name.to_owned() })?;
        match value.parse() {
            Ok(number) => self.set(tunable, number),
            Err(_) => Err(TunableError::Value { tunable, value: value.to_owned() }),
        }
    }

    /// Each tunable with its value.
    pub fn iter(&self) -> impl Iterator<Item = (Tunable, i32)> {
        Tunable::ALL.into_iter().map(|tunable| (tunable, self.get(tunable)))
    }

    /// The value of a tunable in milliseconds, converted to nanoseconds.
    pub(super) const fn nanos(&self, tunable: Tunable) -> u64 {
        self.get(tunable) as u64 * 1_000_000
    }

    /// A tunable as Linux compares it: as an unsigned number, so that a negative one is very large.
    pub(super) const fn unsigned(&self, tunable: Tunable) -> u32 {
        self.get(tunable) as u32
    }
}

/// Why a tunable was not set.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TunableError {
    /// There is no tunable of this name.
    Unknown {
        /// The requested name.
        name: String,
    },
    /// The value is not a number, or out of range.
    Value {
        /// The tunable to set.
        tunable: Tunable,
        /// The refused value.
        value: String,
    },
}

impl fmt::Display for TunableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TunableError::Unknown { name } => {
                write!(f, "`{name}` is no tunable of the deadline scheduler: there are ")?;
                for (at, tunable) in Tunable::ALL.into_iter().enumerate() {
                    let comma = if at == 0 { "" } else { ", " };
                    write!(f, "{comma}{tunable}")?;
                }
                Ok(())
            }
            TunableError::Value { tunable, value } => {
                let (least, most) = tunable.range();
                let space = if tunable.unit().is_empty() { "" } else { " " };
                write!(f, "{tunable} cannot be `{value}`: a whole number from {least} to {most}")?;
                write!(f, "{space}{}", tunable.unit())
            }
        }
    }
}

impl Error for TunableError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_and_names_are_those_of_linux() {
        let tunables = Tunables::new(256);
        let shown: Vec<_> = tunables.iter().map(|(t, v)| format!("{t}={v}")).collect();
        assert_eq!(
            shown.join(" "),
            "read_expire=500 write_expire=5000 writes_starved=2 front_merges=1 async_depth=256 \
             fifo_batch=16 prio_aging_expire=10000"
        );
        for tunable in Tunable::ALL {
            assert_eq!(Tunable::from_name(tunable.name()), Some(tunable));
        }
        assert_eq!(Tunables::new(0).get(Tunable::AsyncDepth), 1, "within its range");
        assert_eq!(Tunables::new(u32::MAX).get(Tunable::AsyncDepth), i32::MAX);
    }

    #[test]
    fn range_bounds_are_accepted_and_values_outside_refused() {
        for tunable in Tunable::ALL {
            let (least, most) = tunable.range();
            let (least, most) = (i64::from(least), i64::from(most));
            let mut tunables = Tunables::new(64);
            for right in [least, most] {
                tunables.set(tunable, right).unwrap();
                assert_eq!(i64::from(tunables.get(tunable)), right);
            }
            let before = tunables;
            for wrong in [least - 1, most + 1, i64::MAX, i64::MIN] {
                let error = tunables.set(tunable, wrong).unwrap_err().to_string();
                for part in [tunable.name(), &wrong.to_string(), &most.to_string()] {
                    assert!(error.contains(part), "{error}");
                }
                assert_eq!(tunables, before, "nothing has changed");
            }
        }
    }

    #[test]
    fn text_with_trailing_characters_is_refused() {
        let mut tunables = Tunables::new(64);
        tunables.set_text("writes_starved", "-3").unwrap();
        assert_eq!(tunables.get(Tunable::WritesStarved), -3);
        for wrong in ["", " 1", "1 ", "1\n", "0x10", "1e3", "four", "99999999999999999999", "é"] {
            let error = tunables.set_text("fifo_batch", wrong).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "fifo_batch cannot be `{wrong}`: a whole number from 0 to 2147483647 requests"
                )
            );
        }
        let error = tunables.set_text("fifo_bach", "4").unwrap_err().to_string();
        assert!(error.starts_with("`fifo_bach` is no tunable"), "{error}");
        assert!(error.contains("prio_aging_expire"), "{error}");
    }
}

//! Faults that an administrator can inject at run time, in the fault injector or in a device.

use crate::bio::{Op, Status};
use crate::units::Sector;

mod latency;

pub use latency::{LATENCY_NS_MAX, Latency};

/// A fault to inject, or a change of the fault rules.
#[derive(Clone, Debug, PartialEq)]
pub enum Injection {
    /// Add a rule: requests that match fail and never reach the device, or complete later than the
    /// device completes them. The newest rule is checked first. The syntax follows Linux's
    /// `error_injection` file.
    AddRule(Rule),
    /// Remove all rules.
    RemoveRules,
    /// A fault of the device itself: a name (`badblocks`, `zone_readonly`) and a value.
    Device {
        /// Name of the fault.
        name: String,
        /// The value, in the form that the device documents.
        value: String,
    },
}

impl Injection {
    /// The name for messages.
    pub fn name(&self) -> &str {
        match self {
            Injection::AddRule(_) => "add",
            Injection::RemoveRules => "removeall",
            Injection::Device { name, .. } => name,
        }
    }
}

/// Parses the value of a zone fault: `SECTOR` breaks the zone of that sector, `-SECTOR` repairs it.
/// Returns `None` if the value has neither form.
pub fn parse_zone_fault(value: &str) -> Option<(Sector, ZoneFault)> {
    let value = value.trim();
    let (digits, fault) = match value.strip_prefix('-') {
        Some(digits) => (digits, ZoneFault::Repair),
        None => (value, ZoneFault::Break),
    };
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_plain).map(|sector| (Sector(sector), fault))
}

/// The effect of a zone fault on its zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneFault {
    /// The zone enters the fault's condition. A zone already in it does not change.
    Break,
    /// A zone in the fault's condition becomes empty. Any other zone does not change.
    Repair,
}

/// One rule of the fault injector.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The matching operation; `None` matches all operations.
    pub op: Option<Op>,
    /// First sector of the matching range.
    pub start: Sector,
    /// Length of the range in sectors.
    pub sectors: u64,
    /// The status of a request that the rule fails; `Ok` if it only delays requests.
    pub status: Status,
    /// By how much the rule delays a completion.
    pub latency: Option<Latency>,
    /// The probability that the rule applies to a matching request.
    pub chance: Chance,
    /// Maximum number of requests to which the rule applies; `None` means no bound.
    pub times: Option<u64>,
    /// Determines the random decisions and latencies; `None` derives it from the device and the
    /// number of the rule.
    pub seed: Option<u64>,
}

impl Rule {
    /// A rule for every request, with this status.
    pub fn new(status: Status) -> Rule {
        Rule {
            op: None,
            start: Sector(0),
            sectors: u64::MAX,
            status,
            latency: None,
            chance: Chance::OneIn(1),
            times: None,
            seed: None,
        }
    }
}

/// A probability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chance {
    /// One request in this number; 0 and 1 mean every one.
    OneIn(u32),
    /// This number of requests in a million.
    PerMillion(u32),
}

impl Chance {
    /// Whether a uniformly random number is a hit.
    pub fn hits(self, random: u64) -> bool {
        match self {
            Chance::OneIn(n) => n <= 1 || random.is_multiple_of(u64::from(n)),
            Chance::PerMillion(n) => random % 1_000_000 < u64::from(n),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zone_fault_parses_sector_and_minus_repairs() {
        assert_eq!(parse_zone_fault("7"), Some((Sector(7), ZoneFault::Break)));
        assert_eq!(parse_zone_fault(" -7\n"), Some((Sector(7), ZoneFault::Repair)));
        for value in ["", "-", "+7", "--7", "- 7", "x", "7-8", "99999999999999999999"] {
            assert_eq!(parse_zone_fault(value), None, "{value}");
        }
    }
}

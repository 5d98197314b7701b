//! Faults that can be asked for at run time: one small language for the injector and the devices.

use crate::bio::Op;
use crate::status::Status;
use crate::units::Sector;

/// A fault to carry out.
#[derive(Clone, Debug, PartialEq)]
pub enum Injection {
    /// Add a rule: requests that match complete with an error and never reach the device. Newest
    /// rule first. The syntax follows Linux's `error_injection` file.
    AddRule(Rule),
    /// Remove all rules.
    RemoveRules,
    /// A fault of the device's own: its name (`badblocks`, `zone_readonly`) and its value.
    Device {
        /// Name of the fault.
        name: String,
        /// Its value, in the form that the device documents.
        value: String,
    },
}

impl Injection {
    /// The name in messages.
    pub fn name(&self) -> &str {
        match self {
            Injection::AddRule(_) => "add",
            Injection::RemoveRules => "removeall",
            Injection::Device { name, .. } => name,
        }
    }
}

/// Reads the value of a zone fault: `SECTOR` breaks the zone of that sector, `-SECTOR` repairs it.
/// `None` if the value has neither form.
pub fn parse_zone_fault(value: &str) -> Option<(Sector, ZoneFault)> {
    let value = value.trim();
    let (digits, fault) = match value.strip_prefix('-') {
        Some(digits) => (digits, ZoneFault::Repair),
        None => (value, ZoneFault::Break),
    };
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_plain).map(|sector| (Sector(sector), fault))
}

/// What a zone fault does to its zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneFault {
    /// The zone enters the fault's condition. A zone that is in it already stays as it is.
    Break,
    /// A zone in the fault's condition becomes empty. Any other zone stays as it is.
    Repair,
}

/// One rule of the error injector.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Operation that it matches; any if `None`.
    pub op: Option<Op>,
    /// First sector of the range that it matches.
    pub start: Sector,
    /// Length of the range in sectors.
    pub sectors: u64,
    /// What a matching request completes with.
    pub status: Status,
    /// One in so many matching requests fails, at random; 1 means every one.
    pub chance: u32,
    /// At most so many requests fail; `None` means no bound.
    pub times: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_fault_is_a_sector_that_a_minus_takes_back() {
        assert_eq!(parse_zone_fault("7"), Some((Sector(7), ZoneFault::Break)));
        assert_eq!(parse_zone_fault(" -7\n"), Some((Sector(7), ZoneFault::Repair)));
        for value in ["", "-", "+7", "--7", "- 7", "x", "7-8", "99999999999999999999"] {
            assert_eq!(parse_zone_fault(value), None, "{value}");
        }
    }
}

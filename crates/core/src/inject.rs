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

//! Zoned null devices on a medium: the contract of all devices, a closed device that is opened
//! again, kills of a process, power cuts, and damaged files.
#![allow(clippy::disallowed_types, clippy::unwrap_used)] // Test code.

mod contract;
mod fixture;
mod history;
mod kill;
mod power_cut;
mod reopened;

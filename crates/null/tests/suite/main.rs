//! The null device: its parameters, faults, zones and scheduling.
#![allow(clippy::disallowed_types, clippy::unwrap_used)] // Test code.

#[path = "../common/mod.rs"]
mod common;

mod atomic_zone_set;
mod contract;
mod execute_inline;
mod faults;
mod gate;
mod modes;
mod scheduled;
mod threads;
mod zones_document;

//! The driver for a host-managed disk: it identifies the disk and turns requests into commands and
//! sense data into statuses, as Linux's `sd` and `sd_zbc` do.
//!
//! ```text
//! SdQueue ─ Command (bytes) ▸ ScsiTransport ▸ disk
//! SdQueue ◂─ SenseDecision ◂─ status, sense data ◂─┘
//! ```
//!
//! The driver knows a disk only by what the disk reports; the transport hides whether the disk is
//! emulated or real.

mod buffer;
mod command;
mod device;
mod error;
pub mod pages;
mod probe;
mod queue;
mod sense_decision;
mod zone_scan;

pub use device::Sd;
pub use error::SdError;
pub use queue::SdQueue;
pub use sense_decision::{SenseDecision, decide, decide_by_sense};

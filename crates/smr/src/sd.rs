//! The driver for a host-managed disk: it identifies the disk and turns requests into commands and
//! sense data into statuses, as Linux's `sd` and `sd_zbc` do.
//!
//! ```text
//! SdQueue ─ Command (bytes) ▸ ScsiTransport ▸ disk
//! SdQueue ◂─ Verdict ◂─ status, sense data ◂─┘
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
mod verdict;
mod walk;

pub use device::Sd;
pub use error::SdError;
pub use queue::SdQueue;
pub use verdict::{Verdict, of_sense, verdict};

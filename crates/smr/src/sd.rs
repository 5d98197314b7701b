//! The driver's side of a host-managed disk: it finds out what the disk is, turns requests into
//! commands, and sense data into statuses, as Linux's `sd` and `sd_zbc` do.
//!
//! ```text
//! SdQueue ─ Command (bytes) ▸ ScsiTransport ▸ disk
//! SdQueue ◂─ Verdict ◂─ status, sense data ◂─┘
//! ```
//!
//! It knows a disk by what the disk says of itself and by nothing else; whether it is emulated or
//! real is the transport's business.

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

//! Traces of block devices in the binary format of blktrace: parsed, printed, recorded, replayed.
//!
//! ```text
//! Recorder (core) ─ events ▸ record.rs: sort ▸ print ▸ file ▸ format.rs: parse ─┐
//! channels ◂─ replay.rs ◂─ operations ◂─ operation.rs ◂─────────────────────────┘
//! ```
//!
//! It is a client of the block layer, as an exporter is: recording drains what a device has
//! recorded, and a replay pushes bios into channels. docs/trace.md is the manual.

pub mod format;
pub mod operation;
pub mod record;
pub mod replay;

pub use format::{TraceError, TraceReader, TraceRecord};
pub use operation::{Operations, Select, TraceOperation, TraceScope};
pub use record::{RecordLimits, SOURCE, TraceEnd, TraceTally, write_trace};
pub use replay::{ReplayError, ReplayOptions, ReplayStop, ReplayView, Speed, replay};

//! An external ioengine: stock fio drives Blockyard's devices in its own process.
//!
//! ```text
//! fio ─ hooks ▸ shim.c ─ plain functions ▸ exports ▸ job ▸ handle ─ bios ▸ channel of core
//! ```
//!
//! `shim.c` knows fio's structures, and is compiled only where `FIO_SRC` names a fio source tree
//! (`make fio`). The rest is here: how `dev=` is resolved ([`source`], [`scheduler`]; the baselines
//! of `before=` are the lab's), the devices of the process ([`devices`]), and a job's handles to
//! them (`job`, `file_handle`). docs/fio.md is the manual.

pub mod devices;
mod error;
mod exports;
mod file_handle;
mod job;
pub mod scheduler;
pub mod source;

pub use error::EngineError;

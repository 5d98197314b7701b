//! A reference that the project did not write: decisions of a running kernel's own scheduler,
//! recorded and replayed.
//!
//! [`mod@record`] runs fio on a loop device with mq-deadline and stores the block events of tracefs
//! as a [`trace::Trace`], a short text that [`file`] stores compressed. [`mod@replay`] feeds the
//! requests at their recorded times to the product's policy and compares each decision with the
//! kernel's. docs/lab.md has the format and the rules by which a difference is explained.

pub mod command;
pub mod file;
pub mod parse;
pub mod policy;
pub mod raw;
pub mod record;
pub mod replay;
pub mod steps;
pub mod ticks;
pub mod trace;
pub mod verdict;
pub mod workloads;

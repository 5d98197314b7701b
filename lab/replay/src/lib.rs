//! Replays the decisions of a running kernel's own scheduler: a reference that the project did not
//! write.
//!
//! [`workloads`] lists what `blockyard-lab` records: fio on a loop device with mq-deadline, while
//! tracefs prints the block events. [`raw`] parses that text into a [`trace::Trace`], which
//! [`mod@file`] packs into a short compressed text and [`parse`] reads back. [`mod@replay`] submits
//! the requests at their recorded times to the product's policy and compares each decision with
//! the kernel's. docs/lab.md has the format and the rules by which a difference is explained.
//!
//! The crate takes bytes and returns traces and results. It does no I/O.

pub mod file;
pub mod parse;
pub mod policy;
pub mod raw;
pub mod replay;
pub mod steps;
pub mod ticks;
pub mod trace;
pub mod verdict;
pub mod workloads;

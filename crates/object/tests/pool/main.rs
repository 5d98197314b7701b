//! The volume engine on an object store in memory: recovery on another machine, openers that race,
//! and a deterministic simulation of connections that lose requests and answers.
//!
//! A machine is a runtime of one thread with a clock of its own, which requests run only while a
//! call of the pool waits for them. So a seed reproduces the order of all requests.
#![allow(clippy::disallowed_types, clippy::unwrap_used)] // Test code.

mod connection;
mod grouping;
mod lease;
mod local;
mod local_log;
mod machine;
mod races;
mod recovery;
mod storage;
mod tampered;

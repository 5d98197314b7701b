//! Channels, middleware and the scheduler.
#![allow(clippy::disallowed_types, clippy::unwrap_used)] // Test code.

#[path = "../common/mod.rs"]
mod common;

mod adapters;
mod channel;
mod channel_ends;
mod middleware;
#[cfg(not(any(loom, shuttle)))]
mod scheduler_at_once;
#[cfg(not(any(loom, shuttle)))]
mod scheduler_bypass;

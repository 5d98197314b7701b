//! Concurrency primitives. Every lock and every atomic of the data path is in this crate, one file
//! per technique, each with a loom model (`RUSTFLAGS="--cfg loom"`).
//!
//! The head of each primitive (marked `Room:`) has the same parts. *Protects* names the shared
//! data, *Why* the reason, *States* the states, and *Order* the place in the lock order. *Common*
//! is the common case, *Cost* its cost, and *Before* the coarse solution that it replaces.
//! docs/locks.md lists the order of all locks.
#![allow(clippy::disallowed_types)]

pub mod atomics;
pub mod bell;
pub mod cell;
pub mod counter;
pub mod entry_words;
pub mod hints;
pub mod lanes;
pub mod lock;
pub mod mailbox;
pub mod pad;
pub mod page_bitmap;
pub mod permits;
pub mod pins;
pub mod published;
pub mod range_lock;
pub mod rank;
pub mod ration;
pub mod rmw_lock;
pub mod role;
pub mod sleep_lock;
pub mod spin_lock;
pub mod tag_budget;
pub mod task_queue;
pub mod token_bucket;
pub mod turn_lock;
pub mod watch;
pub mod wp_cache;
pub mod zone_gate;
pub mod zone_resources;
pub mod zone_words;

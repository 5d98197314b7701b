//! Concurrency primitives. Every lock and every atomic of the data path is in this crate, one file
//! per technique, each with a loom model (`RUSTFLAGS="--cfg loom"`).
//!
//! The head of each primitive (marked `Primitive:`) has the same parts. *Protects* names the shared
//! data, *Why* the reason, *States* the states, and *Order* the place in the lock order. *Common*
//! is the common case, *Cost* its cost, and *Before* the coarse solution that it replaces.
//! docs/locks.md lists the order of all locks.
#![allow(clippy::disallowed_types)]

pub mod atomic_zones;
pub mod atomics;
pub mod block_table;
pub mod combining_lock;
pub mod completion_queue;
pub mod counter;
pub mod dedup_hints;
pub mod event_count;
pub mod hazard_pointers;
pub mod leases;
pub mod lock;
pub mod pad;
pub mod page_bitmap;
pub mod poll_leader;
pub mod quota;
pub mod range_lock;
pub mod rank;
pub mod rcu_cell;
pub mod rmw_lock;
pub mod sleep_lock;
pub mod spin_lock;
pub mod submit_rings;
pub mod sync_cell;
pub mod tag_semaphore;
pub mod task_queue;
pub mod ticket_lock;
pub mod token_bucket;
pub mod trace_ring;
pub mod wake_flag;
pub mod wp_cache;
pub mod zone_gate;
pub mod zone_resources;

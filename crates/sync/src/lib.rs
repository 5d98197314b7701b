//! The rooms: the places where threads meet. Every lock and every atomic of the data path is here,
//! one file per technique, each with a loom model (`RUSTFLAGS="--cfg loom"`).
//!
//! A room opens with the same head: *Protects, Why, States, Order, Common case, Cost, Before*. The
//! order of all locks stands in docs/locks.md.
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

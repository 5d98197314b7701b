//! Work on a pool of volumes other than I/O: sending, receiving and comparing snapshots, exporting
//! and importing images, scrubbing, checking, pruning, and counting what a volume uses.
//!
//! This crate uses the public interface of the engine (`blockyard_volume`): an open pool
//! ([`blockyard_volume::Running`]) with its maps and segments, or a closed one that it opens for
//! reading only.

mod changes;
pub mod check;
pub mod diff;
pub mod image;
pub mod import;
pub mod incoming;
pub mod prune;
pub mod receive;
pub mod scrub;
pub mod send;
pub mod space;

//! Durable volumes: what a zvol does, in user space. Volumes are thin and checksummed, and are
//! written to a log that makes many sync writes durable together (group commit).
//!
//! ```text
//! queue ─ checksum, compress ▸ record ─ mailbox ▸ committer ─ one vectored write, one sync ▸ files
//! queue ◂─ mailbox ◂─ map: the blocks are there now ◂───────────────────────────────────────┘
//! ```
//!
//! The log is the data: a block stays where its record was written, and the map says where that is.
//! docs/format.md has the on-disk format, docs/volume.md the manual.

pub mod activity;
mod address_space;
pub mod admin;
mod apply;
pub mod buffer;
pub mod bytes;
mod changes;
pub mod check;
pub mod checkpoint;
mod clean;
mod codec;
pub mod committer;
pub mod config;
pub mod device;
pub mod door;
pub mod error;
pub mod format;
#[cfg(test)]
mod hand;
pub mod holder;
pub mod image;
mod log;
pub mod map;
pub mod options;
pub mod pool;
mod promise;
pub mod queue;
mod rates;
pub mod receive;
pub mod record;
pub mod recovery;
mod relocate;
mod repairs;
mod roots;
pub mod running;
pub mod scrub;
pub mod segments;
pub mod send;
pub mod store;
mod thread;
pub mod usage;
mod verify;

pub use config::{Compression, SyncMode, VolumeConfig};
pub use device::Volume;
pub use error::{FormatError, VolumeError};
pub use holder::Holder;
pub use options::Options;
pub use pool::Pool;
pub use queue::VolumeQueue;
pub use running::Running;
pub use store::mirror::places::Places;

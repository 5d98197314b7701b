//! Durable volumes: what a zvol does, in user space. Volumes are thin and checksummed, and are
//! written to a log that makes many sync writes durable together (group commit).
//!
//! ```text
//! queue ─ compress, encrypt, checksum ▸ record ─ completion queue ▸ committer ─ one vectored
//! write, one sync ▸ files queue ◂─ completion queue ◂─ map: the blocks are there now
//! ◂───────────────────────────────────────┘
//! ```
//!
//! The log is the data: a block stays where its record was written, and the map says where that is.
//! docs/format.md has the on-disk format, docs/volume.md the manual.

pub mod activity;
pub mod address_space;
pub mod admin;
mod apply;
pub mod checkpoint;
mod clean;
mod codec;
pub mod committer;
pub mod config;
pub mod device;
pub mod encryption;
pub mod error;
pub mod frozen;
pub mod handle;
pub mod keyring;
mod keys;
mod log;
mod maintenance;
pub mod map;
pub mod names;
mod open;
pub mod options;
pub mod pool;
pub mod queue;
pub mod record;
pub mod recovery;
mod relocate;
mod repairs;
pub mod resync;
mod roots;
pub mod running;
pub mod segments;
mod settings;
pub mod status;
#[cfg(test)]
mod stepped_pool;
pub mod thread;
pub mod verify;

pub use codec::Compression;
pub use config::{SecretFile, SyncMode, VolumeConfig};
pub use device::Volume;
pub use encryption::Secret;
pub use error::VolumeError;
pub use options::Options;
pub use pool::Pool;
pub use queue::VolumeQueue;
pub use recovery::ReadOnlyPool;
pub use running::Running;
pub use status::PoolStatus;
pub use verify::PoolVerifier;

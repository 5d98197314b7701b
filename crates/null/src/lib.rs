//! The null device: Linux's null_blk in user space, zoned or not, memory-backed or not.
//!
//! Parameters have null_blk's names and meanings ([`NullConfig`]); faults can be injected at run
//! time ([`Null`]). Without memory it completes requests as fast as possible, and the rest of the
//! stack is measured against it. With memory it stores written data and does nothing else.
//!
//! ```text
//! NullQueue ─ batch ▸ faults, limits ▸ InMemory: ZoneSet (condition, write pointer) ▸ Data (cache,
//!                                               memory)
//!                                      OnMedia:  RecordedZones ▸ Media (files, records of zones)
//! ```
//!
//! The type parameter of [`Null`] determines how zones are guarded: a [`ZoneSet`], by default
//! [`AtomicZoneSet`]. A zoned device on a medium ([`NullOnMedia`]) keeps data and zones when it is
//! closed; it has the medium of the SMR disks.
//!
//! [`AtomicZoneSet`]: blockyard_core::zone::AtomicZoneSet
//! [`ZoneSet`]: blockyard_core::zone::ZoneSet

mod backend;
mod bad_blocks;
mod cache;
mod config;
mod copy;
mod data;
mod device;
mod error;
mod fault_attr;
mod faults;
mod in_memory;
mod on_media;
mod queue;
mod shape;
mod shared;
mod storage;

pub use config::{IrqMode, NullConfig};
pub use device::{Null, NullDevice, NullOnMedia, media_geometry};
pub use error::NullError;
pub use fault_attr::FaultAttr;
pub use in_memory::InMemory;
pub use on_media::OnMedia;
pub use queue::NullQueue;

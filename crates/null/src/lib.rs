//! The null device: Linux's null_blk in user space, zoned or not, with memory behind it or without.
//!
//! Parameters have null_blk's names and meanings ([`NullConfig`]); faults can be asked for while it
//! runs ([`Null`]). Without memory it does nothing as fast as it can, which is what the rest of the
//! stack is measured against; with memory it keeps what was written and no more.
//!
//! ```text
//! NullQueue ─ batch ▸ faults, limits ▸ ZoneSet (condition, write pointer) ▸ Data (cache, memory)
//! ```
//!
//! How zones are guarded is the type parameter of [`Null`]: a [`ZoneSet`], [`WordZones`] if nothing
//! else is said.
//!
//! [`WordZones`]: blockyard_core::zone::WordZones
//! [`ZoneSet`]: blockyard_core::zone::ZoneSet

mod bad_blocks;
mod cache;
mod config;
mod copy;
mod data;
mod device;
mod error;
mod fault_attr;
mod faults;
mod queue;
mod shape;
mod storage;
mod transfer;

pub use config::{IrqMode, NullConfig};
pub use device::Null;
pub use error::NullError;
pub use fault_attr::FaultAttr;
pub use queue::NullQueue;

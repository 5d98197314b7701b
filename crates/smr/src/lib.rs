//! A host-managed SMR disk: an emulated disk that speaks SCSI ZBC, and a driver for such disks.
//!
//! ```text
//! bios ─ driver ▸ CDB ▸ ScsiTransport ▸ Disk (zones, sense data) ▸ Media (bytes, zone records)
//! ```

mod capacity;
pub mod cdb;
pub mod config;
pub mod disk;
mod inquiry;
pub mod layout;
pub mod mode;
mod opcodes;
pub mod sd;
pub mod sense;
pub mod sg;
pub mod timed;
pub mod timing;
pub mod transport;
pub mod vpd;

pub use config::{DiskConfig, DiskError};
pub use disk::Disk;
pub use inquiry::HOST_MANAGED;
pub use sd::Sd;
pub use sg::Sg;
pub use transport::ScsiTransport;

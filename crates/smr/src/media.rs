//! The medium of an emulated disk: stores the data and the state of the zones.
//!
//! Zones are numbered from 0: zone `n` starts at `n` times the zone size. A gap after a zone that
//! is shorter than the zone size belongs to that zone's number.

mod directory;
pub mod error;
mod files;
mod geometry;
pub mod journal;
pub mod live;
mod log;
mod medium;
mod memory;
mod overlay;
mod recovery;
pub mod store;
pub mod superblock;
pub mod tables;
pub mod zone_word;

pub use directory::Directory;
pub use error::{FormatError, MediaError};
pub use files::{CacheMode, Files, Options};
pub use geometry::MediaGeometry;
pub use medium::Media;
pub use memory::MemoryMedium;
pub use zone_word::ZoneRecord;

//! The medium of a zoned device: stores the data and the state of the zones, in memory or in the
//! files of a directory. SMR disks and null devices with zones use it; docs/on-disk.md has the
//! format.
//!
//! [`Media`] is the interface, [`Files`] a medium in files. [`RecordedZones`] is the state of a
//! device's zones, which it records on a medium in the right order.
//!
//! Zones are numbered from 0: zone `n` starts at `n` times the zone size. A gap after a zone that
//! is shorter than the zone size belongs to that zone's number.

pub mod data;
mod directory;
pub mod error;
mod files;
mod geometry;
pub mod head;
pub mod journal;
pub mod live;
mod log;
mod medium;
mod memory;
mod overlay;
mod recovery;
mod shared_sync;
pub mod store;
pub mod superblock;
pub mod tables;
pub mod zone_word;
mod zones;

pub use directory::Directory;
pub use error::{FormatError, MediaError};
pub use files::{CacheMode, Files, Options};
pub use geometry::MediaGeometry;
pub use medium::Media;
pub use memory::MemoryMedium;
pub use zone_word::ZoneRecord;
pub use zones::{PermittedWrite, RecordError, RecordedZones, SequentialZones};

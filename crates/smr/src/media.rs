//! What an emulated disk keeps its bytes and the state of its zones on.
//!
//! Zones are numbered from 0 by their place: zone `n` starts at `n` times the zone size, and what
//! follows a zone that is shorter than that (a gap) belongs to its number.

mod directory;
pub mod error;
mod files;
mod geometry;
pub mod journal;
pub mod live;
mod log;
mod memory;
mod overlay;
mod recovery;
pub mod store;
pub mod superblock;
pub mod tables;
pub mod word;

use std::io;

use blockyard_core::zone::ZoneCond;

pub use directory::Directory;
pub use error::{FormatError, MediaError};
pub use files::{CacheMode, Files, Options};
pub use geometry::MediaGeometry;
pub use memory::Memory;

/// The state of a zone as a medium keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneRecord {
    /// Its condition.
    pub cond: ZoneCond,
    /// How much of it has been written, in sectors from its start; its whole length where it is
    /// full or read-only.
    pub written_sectors: u64,
    /// How often it was made empty since the disk was opened. Of two records of one zone the one
    /// with more erasures is the later; of two with as many, the one with more written.
    pub erasures: u64,
}

impl ZoneRecord {
    /// An empty zone.
    pub const EMPTY: ZoneRecord =
        ZoneRecord { cond: ZoneCond::Empty, written_sectors: 0, erasures: 0 };

    /// Whether it is the later one of two records of a zone, or says the same.
    pub fn follows(&self, other: &ZoneRecord) -> bool {
        (self.erasures, self.written_sectors) >= (other.erasures, other.written_sectors)
    }
}

/// A medium. All offsets and lengths are bytes from the start of the disk, and multiples of 512;
/// callers have checked that they lie on the disk.
///
/// Several threads call at once. Nobody reads what another thread writes at the same time, but in
/// conventional zones, and beside a reset: such a read may find any of the bytes that were there
/// before or are there after.
pub trait Media: Send + Sync {
    /// Reads. What was never written, or was zeroed since, reads as zeros. What a reset has taken
    /// away may be there until its zone is written or finished again: nobody reads above the end of
    /// what is written.
    ///
    /// # Errors
    /// If the bytes cannot be had.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes; durable by the next flush.
    ///
    /// # Errors
    /// If the bytes cannot be kept.
    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()>;

    /// Makes a range read as zeros, and gives its space back where that is possible; durable by the
    /// next flush. Of sequential zones it is asked only for what is being written.
    ///
    /// # Errors
    /// If it cannot be.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Notes the state that a zone has come to; durable by the next flush, and not before the data
    /// that the record counts as written. Records of one zone may come out of order where several
    /// threads write to it: see [`ZoneRecord::erasures`]. Nobody tells of a zone that is closed to
    /// make room for another: open zones are found closed anyway.
    ///
    /// # Errors
    /// If it cannot be kept.
    fn zone_changed(&self, zone: u32, state: ZoneRecord) -> io::Result<()>;

    /// Sees to it that what a reset has taken away of a zone reads as zeros from now on. Asked
    /// before a zone comes to show more than was written; nobody else changes it meanwhile.
    ///
    /// # Errors
    /// If it cannot be; the zone stays as it is then.
    fn make_room(&self, zone: u32) -> io::Result<()> {
        let _ = zone;
        Ok(())
    }

    /// Makes a zone empty: its data are gone. Nobody writes to it meanwhile, and `state`, which is
    /// that of an empty zone, is to be kept as by [`Media::zone_changed`].
    ///
    /// # Errors
    /// If it cannot be.
    fn reset(&self, zone: u32, state: ZoneRecord) -> io::Result<()>;

    /// Makes everything durable that was done before.
    ///
    /// # Errors
    /// If some of it may not be.
    fn flush(&self) -> io::Result<()>;

    /// Makes everything durable that was done to the zones of a range before; perhaps more.
    ///
    /// # Errors
    /// If some of it may not be.
    fn flush_range(&self, offset: u64, len: u64) -> io::Result<()> {
        let _ = (offset, len);
        self.flush()
    }

    /// The zones as they were found when the medium was opened, by number; conventional ones have a
    /// record that nobody looks at. Nothing for a new medium.
    fn zones(&self) -> Vec<ZoneRecord>;
}

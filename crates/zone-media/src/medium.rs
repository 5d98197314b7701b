//! The interface of a medium.

use std::io;
use std::sync::Arc;

use blockyard_core::{Extent, Sector};

use crate::zone_word::ZoneRecord;

/// A medium. All offsets and lengths are in bytes from the start of the disk and are multiples of
/// 512. Callers have checked that they lie on the disk.
///
/// Several threads call concurrently. A read overlaps a concurrent write only in conventional
/// zones, and may overlap a reset: it then returns any mixture of the bytes before and after.
pub trait Media: Send + Sync {
    /// Reads bytes. Bytes that were never written, or were zeroed since, read as zeros. Data of a
    /// reset zone may remain until the zone is written or finished again: callers never read above
    /// the written end.
    ///
    /// # Errors
    /// If the bytes cannot be read.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes bytes; they are durable after the next flush.
    ///
    /// # Errors
    /// If the bytes cannot be written.
    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()>;

    /// Zeroes a range and frees its space if possible; durable after the next flush. In sequential
    /// zones it is called only for a range that is being written.
    ///
    /// # Errors
    /// If the range cannot be zeroed.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()>;

    /// The allocation state of a range: the extent that starts at `from`, at most `sectors` long. A
    /// medium without this information reports the whole range as data.
    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let _ = from;
        Extent { sectors, allocated: true, zero: false }
    }

    /// Records the new state of a zone; durable after the next flush, and never before the data
    /// that the record counts as written. If several threads write to a zone, its records may
    /// arrive out of order: see [`ZoneRecord::erasures`]. An implicit close that makes room for
    /// another zone is not recorded: open zones are found closed anyway.
    ///
    /// # Errors
    /// If the state cannot be recorded.
    fn zone_changed(&self, zone: u32, state: ZoneRecord) -> io::Result<()>;

    /// Ensures that the data of a reset zone read as zeros from now on. Called before the zone
    /// shows more than was written since; the caller excludes other changes of the zone.
    ///
    /// # Errors
    /// If that is impossible; the zone then keeps its state.
    fn make_room(&self, zone: u32) -> io::Result<()> {
        let _ = zone;
        Ok(())
    }

    /// Empties a zone: its data are lost. The caller excludes concurrent writes. `state`, the
    /// record of an empty zone, is recorded as by [`Media::zone_changed`].
    ///
    /// # Errors
    /// If the zone cannot be emptied.
    fn reset(&self, zone: u32, state: ZoneRecord) -> io::Result<()>;

    /// Makes all earlier operations durable.
    ///
    /// # Errors
    /// If some of them may not be durable.
    fn flush(&self) -> io::Result<()>;

    /// Makes all earlier operations on the zones of a range durable, and perhaps more.
    ///
    /// # Errors
    /// If some of them may not be durable.
    fn flush_range(&self, offset: u64, len: u64) -> io::Result<()> {
        let _ = (offset, len);
        self.flush()
    }

    /// The records of the zones by number, as of the opening of the medium. Those of conventional
    /// zones are ignored. Empty for a new medium.
    fn zones(&self) -> Vec<ZoneRecord>;
}

impl<M: Media> Media for Arc<M> {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        (**self).read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        (**self).write(offset, from)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        (**self).zero(offset, len)
    }

    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        (**self).extent(from, sectors)
    }

    fn zone_changed(&self, zone: u32, state: ZoneRecord) -> io::Result<()> {
        (**self).zone_changed(zone, state)
    }

    fn make_room(&self, zone: u32) -> io::Result<()> {
        (**self).make_room(zone)
    }

    fn reset(&self, zone: u32, state: ZoneRecord) -> io::Result<()> {
        (**self).reset(zone, state)
    }

    fn flush(&self) -> io::Result<()> {
        (**self).flush()
    }

    fn flush_range(&self, offset: u64, len: u64) -> io::Result<()> {
        (**self).flush_range(offset, len)
    }

    fn zones(&self) -> Vec<ZoneRecord> {
        (**self).zones()
    }
}

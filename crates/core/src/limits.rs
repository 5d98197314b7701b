//! The limits of one request. Upper layers read them and never ask what kind of device is below.

/// Limits of a device, as Linux's `queue_limits`. Lengths are in sectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest read or write.
    pub sectors_max: u64,
    /// Maximum number of bios (buffer pieces) in one request.
    pub segments_max: u16,
    /// The channel splits reads and writes at multiples of this, and merges none across one. For a
    /// zoned device it is the zone size. A power of two; 0 means no boundary.
    pub chunk_sectors: u64,
    /// Longest discard; 0 means that discard is not supported.
    pub discard_sectors_max: u64,
    /// Longest write-zeroes; 0 means that write-zeroes is not supported.
    pub write_zeroes_sectors_max: u64,
    /// Longest zone append; 0 means that the device has no zone append.
    pub zone_append_sectors_max: u64,
    /// The device may keep writes in a volatile cache until a flush.
    pub write_cache: bool,
    /// The device executes FUA itself. Otherwise a flush follows the write.
    pub fua: bool,
    /// The device refuses all changes.
    pub read_only: bool,
    /// The requests that one queue starts reach their zone in that order, so that several writes to
    /// a zone may be in flight.
    pub ordered: bool,
    /// Maximum number of requests that one queue of the device executes at once: the number of
    /// tags.
    pub queue_depth: u16,
}

impl Limits {
    /// Limits of a device without cache and boundaries, with long requests.
    pub fn unlimited(queue_depth: u16) -> Limits {
        Limits {
            sectors_max: 1 << 22,
            segments_max: 128,
            chunk_sectors: 0,
            discard_sectors_max: u64::MAX,
            write_zeroes_sectors_max: u64::MAX,
            zone_append_sectors_max: 0,
            write_cache: false,
            fua: false,
            read_only: false,
            ordered: true,
            queue_depth,
        }
    }

    /// The bits of a sector that identify its chunk: two sectors with equal bits lie in one chunk.
    /// 0 without chunks.
    pub fn chunk_mask(&self) -> u64 {
        match self.chunk_sectors {
            0 => 0,
            chunk => !(chunk - 1),
        }
    }
}

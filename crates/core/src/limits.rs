//! What a device can take in one request. Upper floors read these and never ask what kind it is.

/// Limits of a device, as Linux's `queue_limits`. Lengths in sectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest read or write.
    pub sectors_max: u64,
    /// Most bios (buffer pieces) in one request.
    pub segments_max: u16,
    /// Reads and writes are split at multiples of this, and never merged across one: the zone
    /// size of a zoned device. A power of two; 0 means no boundary.
    pub chunk_sectors: u64,
    /// Longest discard; 0 means that discard is not supported.
    pub discard_sectors_max: u64,
    /// Longest write-zeroes; 0 means that it is not supported.
    pub write_zeroes_sectors_max: u64,
    /// Longest zone append; 0 means that the device has none of its own.
    pub zone_append_sectors_max: u64,
    /// Writes may stay in a volatile cache until a flush.
    pub write_cache: bool,
    /// The device obeys FUA itself. Where it does not, a flush follows the write.
    pub fua: bool,
    /// All changes are refused.
    pub read_only: bool,
    /// Requests that one queue starts reach their zone in the order in which they are started, so
    /// that several writes to a zone may be in flight.
    pub ordered: bool,
    /// Most requests that one queue of the device works on at once: the number of tags.
    pub queue_depth: u16,
}

impl Limits {
    /// Limits of a device that takes everything: no cache, no boundaries, long requests.
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

    /// The bits of a sector that name its chunk: two sectors that agree in them lie in one chunk.
    /// 0 without chunks.
    pub fn chunk_mask(&self) -> u64 {
        match self.chunk_sectors {
            0 => 0,
            chunk => !(chunk - 1),
        }
    }
}

//! Statistics with zram's names, meanings and text format.

use std::fmt;

/// `io_stat`: failures, and blocks freed on request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoStat {
    /// Reads that failed.
    pub failed_reads: u64,
    /// Writes that failed, usually for lack of memory.
    pub failed_writes: u64,
    /// I/O that is not block-aligned. Always 0: the channel refuses such I/O before the device sees
    /// it and counts it among its own errors.
    pub invalid_io: u64,
    /// Blocks freed by discard and write-zeroes.
    pub notify_free: u64,
}

/// `mm_stat`: stored data and the memory it takes. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MmStat {
    /// Uncompressed size of the blocks that hold data, including same-filled ones.
    pub orig_data_size: u64,
    /// Compressed size of these blocks; same-filled ones take nothing.
    pub compr_data_size: u64,
    /// Memory taken from the system for data, including fragmentation and retired objects.
    pub mem_used_total: u64,
    /// The memory limit; 0: no limit.
    pub mem_limit: u64,
    /// Maximum of `mem_used_total` so far.
    pub mem_used_max: u64,
    /// Same-filled blocks.
    pub same_pages: u64,
    /// Pages that compaction has freed.
    pub pages_compacted: u64,
    /// Blocks stored uncompressed because compression gains too little.
    pub huge_pages: u64,
    /// Blocks that were stored uncompressed since the device was created.
    pub huge_pages_since: u64,
}

/// `bd_stat`: the backing file, in units of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BdStat {
    /// Data in the backing file that was not overwritten since.
    pub bd_count: u64,
    /// Reads from the backing file.
    pub bd_reads: u64,
    /// Writes to the backing file.
    pub bd_writes: u64,
}

/// `debug_stat`, version 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DebugStat {
    /// Writes that waited for memory. Always 0: they fail at once, as they do in current zram.
    pub writestall: u64,
    /// Frees that were lost because a lock was taken. Always 0: a free needs no such lock.
    pub miss_free: u64,
}

/// Deduplication, by the names of a zram patch series that was not merged. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DedupStat {
    /// By how much `compr_data_size` would be larger without sharing.
    pub dup_data_size: u64,
    /// Memory that the hints take. It is part of `mem_used_total`.
    pub meta_data_size: u64,
}

/// All statistics, taken at nearly the same time: I/O continues meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RamStats {
    /// `io_stat`.
    pub io: IoStat,
    /// `mm_stat`.
    pub mm: MmStat,
    /// `bd_stat`.
    pub bd: BdStat,
    /// `debug_stat`.
    pub debug: DebugStat,
    /// Deduplication; zeros if it is off.
    pub dedup: DedupStat,
    /// Size of the table of words in bytes: memory in addition to `mem_used_total`.
    pub table_bytes: u64,
    /// Sub-block writes that were repeated because another write replaced the block first.
    pub patch_retries: u64,
    /// Writes that failed for lack of memory.
    pub writes_refused: u64,
}

impl fmt::Display for IoStat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let IoStat { failed_reads, failed_writes, invalid_io, notify_free } = self;
        write!(f, "{failed_reads:8} {failed_writes:8} {invalid_io:8} {notify_free:8}")
    }
}

impl fmt::Display for MmStat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MmStat { orig_data_size, compr_data_size, mem_used_total, mem_limit, .. } = self;
        let MmStat { mem_used_max, same_pages, pages_compacted, .. } = self;
        let MmStat { huge_pages, huge_pages_since, .. } = self;
        write!(f, "{orig_data_size:8} {compr_data_size:8} {mem_used_total:8} {mem_limit:8} ")?;
        write!(f, "{mem_used_max:8} {same_pages:8} {pages_compacted:8} ")?;
        write!(f, "{huge_pages:8} {huge_pages_since:8}")
    }
}

impl fmt::Display for BdStat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:8} {:8} {:8}", self.bd_count, self.bd_reads, self.bd_writes)
    }
}

impl fmt::Display for DebugStat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "version: 1\n{:8} {:8}", self.writestall, self.miss_free)
    }
}

/// What a writeback did, and which selected blocks it skipped, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBack {
    /// Blocks that this writeback moved to the backing file.
    pub blocks: u64,
    /// Bytes that these blocks take in the file. Their memory is freed unless other blocks share
    /// it.
    pub bytes: u64,
    /// Blocks that a client was writing.
    pub skipped_written: u64,
    /// Blocks that a client accessed after the selection, so that they are no longer idle or no
    /// longer match it.
    pub skipped_used: u64,
    /// Blocks longer than the rest of the limit.
    pub skipped_limit: u64,
    /// Blocks for which the file has no free place: it has 2^40 bytes at most.
    pub skipped_no_place: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formats of zram_drv.c: programs split these lines by columns.
    #[test]
    fn lines_look_as_zrams() {
        let io = IoStat { failed_reads: 1, failed_writes: 2, invalid_io: 0, notify_free: 40 };
        assert_eq!(io.to_string(), "       1        2        0       40");
        let mm = MmStat { orig_data_size: 123_456_789, huge_pages_since: 7, ..MmStat::default() };
        let line = mm.to_string();
        assert_eq!(line.split_whitespace().count(), 9);
        assert!(line.starts_with("123456789        0 ") && line.ends_with("        0        7"));
        assert_eq!(BdStat::default().to_string(), "       0        0        0");
        assert_eq!(DebugStat::default().to_string(), "version: 1\n       0        0");
    }
}

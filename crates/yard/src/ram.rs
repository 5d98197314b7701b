//! What the control API says of RAM disks: zram's statistics by zram's names.

use blockyard_ram::RamStats;
use serde::{Deserialize, Serialize};

use crate::error::YardError;
use crate::size::Bytes;
use crate::spec::DeviceSpec;
use crate::yard::Entry;

/// The statistics of a RAM disk: `GET /v1/devices/{name}/ram`. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct RamView {
    /// Failures, and blocks freed on request.
    pub io_stat: IoStatView,
    /// What is stored, and the memory that it takes.
    pub mm_stat: MmStatView,
    /// The backing file, in units of 4 KiB.
    pub bd_stat: BdStatView,
    /// What zram keeps for its developers.
    pub debug_stat: DebugStatView,
    /// The table of a word per block: memory beside `mem_used_total`.
    pub table_bytes: u64,
    /// Sub-block writes that met another writer and were made anew.
    pub patch_retries: u64,
}

macro_rules! group {
    ($(#[$doc:meta])* $name:ident from $stat:ident: $($(#[$field_doc:meta])* $field:ident,)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: u64,)*
        }

        impl $name {
            /// Names and values, in zram's order.
            pub fn fields(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field)),*]
            }
        }

        impl From<blockyard_ram::$stat> for $name {
            fn from(stat: blockyard_ram::$stat) -> $name {
                $name { $($field: stat.$field),* }
            }
        }
    };
}

group! {
    /// `io_stat`.
    IoStatView from IoStat:
    /// Reads that failed.
    failed_reads,
    /// Writes that failed.
    failed_writes,
    /// Misaligned I/O; always 0, the channel refuses it.
    invalid_io,
    /// Blocks freed by discard and write-zeroes.
    notify_free,
}

group! {
    /// `mm_stat`.
    MmStatView from MmStat:
    /// What is stored, uncompressed.
    orig_data_size,
    /// The same, compressed.
    compr_data_size,
    /// Memory taken for it.
    mem_used_total,
    /// Most memory that may be taken; 0: no limit.
    mem_limit,
    /// Most memory that was taken so far.
    mem_used_max,
    /// Blocks that are one word repeated.
    same_pages,
    /// Pages that compaction has freed.
    pages_compacted,
    /// Blocks stored raw.
    huge_pages,
    /// The same, since the device was made.
    huge_pages_since,
}

group! {
    /// `bd_stat`.
    BdStatView from BdStat:
    /// Written there and not yet overwritten.
    bd_count,
    /// Reads of it.
    bd_reads,
    /// Writes to it.
    bd_writes,
}

group! {
    /// `debug_stat`, version 1.
    DebugStatView from DebugStat:
    /// Writes that waited for memory; always 0.
    writestall,
    /// Frees that were lost; always 0.
    miss_free,
}

impl From<RamStats> for RamView {
    fn from(stats: RamStats) -> RamView {
        RamView {
            io_stat: stats.io.into(),
            mm_stat: stats.mm.into(),
            bd_stat: stats.bd.into(),
            debug_stat: stats.debug.into(),
            table_bytes: stats.table_bytes,
            patch_retries: stats.patch_retries,
        }
    }
}

impl RamView {
    /// The statistics of a device now; `None` if it is no RAM disk.
    pub fn of(entry: &Entry) -> Option<RamView> {
        entry.ram.as_ref().map(|ram| ram.stats().into())
    }

    /// The groups with zram's names, in the order of its manual.
    pub fn groups(&self) -> [(&'static str, Vec<(&'static str, u64)>); 4] {
        [
            ("io_stat", self.io_stat.fields()),
            ("mm_stat", self.mm_stat.fields()),
            ("bd_stat", self.bd_stat.fields()),
            ("debug_stat", self.debug_stat.fields()),
        ]
    }
}

/// The statistics of a RAM disk.
///
/// # Errors
/// If it is none.
pub fn view(entry: &Entry) -> Result<RamView, YardError> {
    RamView::of(entry).ok_or_else(|| YardError::NotRam { name: entry.spec.name().to_owned() })
}

/// What a RAM disk's parameters say about it, for people; `None` if it is none.
pub(crate) fn described(spec: &DeviceSpec) -> Option<String> {
    if spec.kind().name != "ram" {
        return None;
    }
    let mut text = ", compressed by ".to_owned() + ["lz4", "lz4hc", "zstd"][spec.choice("algo")];
    if spec.number("unit") != 4096 {
        text += &format!(" in units of {}", Bytes(spec.number("unit")));
    }
    if spec.number("mem_limit") != 0 {
        text += &format!(", {} of memory at most", Bytes(spec.number("mem_limit")));
    }
    Some(text)
}

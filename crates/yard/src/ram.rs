//! RAM disks in the control API: zram's statistics by zram's names, and maintenance operations.

mod histograms;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use blockyard_ram::snapshot;
use blockyard_ram::{BlockState, Ram, RamStats, Replace, Selection, Settings, StatesPage, Which};
use serde::{Deserialize, Serialize};

use crate::api_paths::ApiPaths;
use crate::entry::DeviceEntry;
use crate::error::YardError;
use crate::param::shown;

pub use histograms::{HistogramsView, SizeView};

/// The statistics of a RAM disk: `GET /v1/devices/{name}/ram`. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct RamView {
    /// Failures, and blocks freed on request.
    pub io_stat: IoStatView,
    /// The stored data, and the memory for them.
    pub mm_stat: MmStatView,
    /// The backing file, in units of 4 KiB.
    pub bd_stat: BdStatView,
    /// Statistics that zram keeps for its developers.
    pub debug_stat: DebugStatView,
    /// Deduplication; zeros without it.
    #[serde(default)]
    pub dedup_stat: DedupStatView,
    /// The table of a word per block, in bytes; not part of `mem_used_total`.
    pub table_bytes: u64,
    /// Sub-block writes that were repeated because another thread had changed the block.
    pub patch_retries: u64,
    /// Writes that failed for lack of memory; 0 from an older daemon.
    #[serde(default)]
    pub writes_refused: u64,
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
    /// The uncompressed length of the stored data.
    orig_data_size,
    /// The compressed length of the stored data.
    compr_data_size,
    /// The memory for the stored data.
    mem_used_total,
    /// The limit of that memory; 0: no limit.
    mem_limit,
    /// The most memory that was in use so far.
    mem_used_max,
    /// Same-filled blocks: one repeated word.
    same_pages,
    /// Pages that compaction has freed.
    pages_compacted,
    /// Blocks that are stored uncompressed now.
    huge_pages,
    /// Blocks that were stored uncompressed since the device was opened.
    huge_pages_since,
}

group! {
    /// `bd_stat`.
    BdStatView from BdStat:
    /// Units in the backing file that are not yet overwritten.
    bd_count,
    /// Reads of the backing file.
    bd_reads,
    /// Writes to the backing file.
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

group! {
    /// `dedup_stat`, with the names of patches that zram did not accept.
    DedupStatView from DedupStat:
    /// The bytes by which `compr_data_size` would be greater without deduplication.
    dup_data_size,
    /// The memory of the index of equal blocks; part of `mem_used_total`.
    meta_data_size,
}

impl From<RamStats> for RamView {
    fn from(stats: RamStats) -> RamView {
        RamView {
            io_stat: stats.io.into(),
            mm_stat: stats.mm.into(),
            bd_stat: stats.bd.into(),
            debug_stat: stats.debug.into(),
            dedup_stat: stats.dedup.into(),
            table_bytes: stats.table_bytes,
            patch_retries: stats.patch_retries,
            writes_refused: stats.writes_refused,
        }
    }
}

impl RamView {
    /// The present statistics of a device; `None` if it is no RAM disk.
    pub fn of(entry: &DeviceEntry) -> Option<RamView> {
        entry.ram.as_ref().map(|ram| ram.stats().into())
    }

    /// The groups with zram's names, in the order of its manual, then the statistics that zram
    /// lacks.
    pub fn groups(&self) -> [(&'static str, Vec<(&'static str, u64)>); 6] {
        let own = [("table_bytes", self.table_bytes), ("patch_retries", self.patch_retries)];
        [
            ("io_stat", self.io_stat.fields()),
            ("mm_stat", self.mm_stat.fields()),
            ("bd_stat", self.bd_stat.fields()),
            ("debug_stat", self.debug_stat.fields()),
            ("dedup_stat", self.dedup_stat.fields()),
            ("own", own.to_vec()),
        ]
    }
}

/// The statistics of a RAM disk.
///
/// # Errors
/// If the device is no RAM disk.
pub fn view(entry: &DeviceEntry) -> Result<RamView, YardError> {
    ram_of(entry).map(|ram| ram.stats().into())
}

/// `POST /v1/devices/{name}/ram/{verb}`. A field that the verb does not use is refused.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RamRequest {
    /// `recompress`, `writeback`: `all`, `idle`, `huge`, `huge_idle`, `incompressible`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub which: Option<String>,
    /// The idle age from which a block counts as idle, 1 to 7; 1 by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age: Option<u8>,
    /// Only objects of at least this many stored bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold_bytes: Option<u64>,
    /// Most blocks that are changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks_max: Option<u64>,
    /// `recompress`: only by the algorithm of this priority, 1 to 3; by default each in turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
    /// `writeback`: the most bytes that are written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// `save`, `train`: the absolute path of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// `save`, `train`: replace the file whatever it contains.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// `set`: most memory for data; 0 for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_limit: Option<u64>,
    /// `set`: 0 restarts the measurement of the most memory in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_used_max: Option<u64>,
    /// `set`: the overhead in percent above which the pool is compacted in the background; 0 for
    /// never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compact: Option<u8>,
}

/// The results of an operation: numbers by name.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct RamDone {
    /// In alphabetical order.
    pub done: BTreeMap<String, u64>,
}

/// The query for a page of blocks.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct BlocksQuery {
    from: u64,
    count: Option<usize>,
}

/// A page of blocks that hold data, as zram's `block_state` lists them.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct BlocksView {
    /// The blocks in order. The list may be empty although `next` is not `null`.
    pub blocks: Vec<BlockView>,
    /// The block at which the next page begins; `null` after the last page.
    pub next: Option<u64>,
}

/// A block that holds data.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct BlockView {
    /// The block's number.
    pub block: u64,
    /// The idle age: rounds of idle tracking since the last access.
    pub age: u8,
    /// Stored bytes; 0 if it takes no memory.
    pub stored_bytes: u32,
    /// zram's flags: `s` same, `w` written back, `h` huge, `i` idle, `r` recompressed, `n`
    /// incompressible; a dot for each flag that is not set.
    pub flags: String,
}

/// The header of a dictionary's response with the number of blocks on which it was trained.
pub const SAMPLES: &str = "blockyard-samples";

/// The most blocks of a response.
pub const BLOCKS_MAX: usize = 4096;

/// The RAM disk of a device.
pub(crate) fn ram_of(entry: &DeviceEntry) -> Result<&Arc<Ram>, YardError> {
    let name = || entry.spec.name().to_owned();
    entry.ram.as_ref().ok_or_else(|| YardError::NotRam { name: name() })
}

fn argument(field: &'static str, value: impl ToString, wanted: impl Into<String>) -> YardError {
    YardError::Argument { field, value: value.to_string(), wanted: wanted.into() }
}

impl RamRequest {
    /// The names of the fields that are set.
    fn given(&self) -> Vec<&'static str> {
        let given = [
            ("type", self.which.is_some()),
            ("age", self.age.is_some()),
            ("threshold_bytes", self.threshold_bytes.is_some()),
            ("blocks_max", self.blocks_max.is_some()),
            ("priority", self.priority.is_some()),
            ("limit_bytes", self.limit_bytes.is_some()),
            ("file", self.file.is_some()),
            ("force", self.force),
            ("mem_limit", self.mem_limit.is_some()),
            ("mem_used_max", self.mem_used_max.is_some()),
            ("compact", self.compact.is_some()),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    fn selection(&self) -> Result<Selection, YardError> {
        let mut selection = Selection::default();
        if let Some(name) = &self.which {
            let found = Which::ALL.into_iter().find(|(_, known)| known == name);
            let known = Which::ALL.map(|(_, known)| known).join(", ");
            selection.which =
                found.ok_or_else(|| argument("type", shown(name), format!("one of {known}")))?.0;
        }
        if let Some(age) = self.age {
            if !(1..=7).contains(&age) {
                return Err(argument("age", age, "1 to 7 rounds"));
            }
            selection.age = age;
        }
        let threshold = self.threshold_bytes.unwrap_or(0);
        selection.threshold = usize::try_from(threshold).unwrap_or(usize::MAX);
        selection.blocks_max = self.blocks_max.unwrap_or(u64::MAX);
        selection.priority = self.priority;
        Ok(selection)
    }

    /// The file, if the yard's configuration allows it, and which existing files it may replace.
    fn file(&self, paths: &ApiPaths) -> Result<(PathBuf, Replace), YardError> {
        let file = self.file.as_deref().unwrap_or_default();
        let replace = if self.force { Replace::Any } else { Replace::Own };
        Ok((paths.check("file", Path::new(file))?, replace))
    }
}

/// The verbs, and the fields that each uses.
const VERBS: [(&str, &[&str]); 7] = [
    ("compact", &[]),
    ("idle", &[]),
    ("recompress", &["type", "age", "threshold_bytes", "blocks_max", "priority"]),
    ("writeback", &["type", "age", "threshold_bytes", "blocks_max", "limit_bytes"]),
    ("save", &["file", "force"]),
    ("train", &["file", "force"]),
    ("set", &SETTINGS),
];

/// The settings that can change while the device is in use.
const SETTINGS: [&str; 3] = ["mem_limit", "mem_used_max", "compact"];

/// Executes a maintenance operation on a RAM disk.
///
/// # Errors
/// If the device is no RAM disk, the verb is unknown, it does not use a given field, the
/// configuration does not allow the file, or the operation fails.
pub fn work(
    entry: &DeviceEntry,
    verb: &str,
    request: &RamRequest,
    paths: &ApiPaths,
) -> Result<RamDone, YardError> {
    let ram = ram_of(entry)?;
    let known = VERBS.iter().find(|(known, _)| *known == verb);
    let Some((_, takes)) = known else {
        let verbs = VERBS.map(|(known, _)| known).join(", ");
        return Err(argument("verb", shown(verb), format!("one of {verbs}")));
    };
    if let Some(other) = request.given().into_iter().find(|field| !takes.contains(field)) {
        return Err(argument("field", other, format!("none of this name with `{verb}`")));
    }
    let done: Vec<(&str, u64)> = match verb {
        "compact" => {
            let done = ram.compact()?;
            vec![("blocks_moved", done.objects_moved), ("pages_freed", done.pages_freed)]
        }
        "idle" => {
            ram.idle();
            Vec::new()
        }
        "recompress" => {
            let done = ram.recompress(&request.selection()?)?;
            vec![
                ("tried", done.tried),
                ("replaced", done.replaced),
                ("saved_bytes", done.saved_bytes),
                ("incompressible", done.incompressible),
                ("no_memory", done.no_memory),
                ("skipped_shared", done.skipped_shared),
            ]
        }
        "writeback" => {
            let limit = request.limit_bytes.unwrap_or(u64::MAX);
            let done = ram.write_back(&request.selection()?, limit)?;
            vec![
                ("blocks", done.blocks),
                ("bytes", done.bytes),
                ("skipped_written", done.skipped_written),
                ("skipped_used", done.skipped_used),
                ("skipped_limit", done.skipped_limit),
                ("skipped_no_place", done.skipped_no_place),
            ]
        }
        "save" => {
            let (file, replace) = request.file(paths)?;
            let done = ram.save(&file, replace)?;
            vec![("blocks", done.blocks), ("bytes", done.bytes)]
        }
        "set" => set(ram, request)?,
        _ => {
            let (file, replace) = request.file(paths)?;
            let done = ram.train(&file, replace)?;
            vec![("samples", done.samples), ("bytes", done.bytes)]
        }
    };
    let done = done.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Ok(RamDone { done })
}

/// Changes all given settings or none, and returns the present settings.
fn set(ram: &Ram, request: &RamRequest) -> Result<Vec<(&'static str, u64)>, YardError> {
    if request.given().is_empty() {
        let wanted = format!("one of {}", SETTINGS.join(", "));
        return Err(YardError::Missing { field: "field", wanted });
    }
    if let Some(bytes) = request.mem_used_max.filter(|bytes| *bytes > 0) {
        return Err(argument("mem_used_max", bytes, "0, which resets the peak to the present use"));
    }
    ram.set(&Settings {
        mem_limit: request.mem_limit,
        compact: request.compact,
        resets_mem_used_max: request.mem_used_max.is_some(),
    })?;
    let mm = ram.stats().mm;
    Ok(vec![
        ("mem_limit", mm.mem_limit),
        ("mem_used_max", mm.mem_used_max),
        ("compact", ram.compact_percent().into()),
    ])
}

/// The histograms of a RAM disk.
///
/// # Errors
/// If the device is no RAM disk.
pub fn histograms(entry: &DeviceEntry) -> Result<HistogramsView, YardError> {
    ram_of(entry).map(|ram| HistogramsView::new(ram))
}

/// A page of a RAM disk's blocks.
///
/// # Errors
/// If the device is no RAM disk, the page is too long, or begins beyond the device.
pub(crate) fn blocks(entry: &DeviceEntry, asked: &BlocksQuery) -> Result<BlocksView, YardError> {
    let count = asked.count.unwrap_or(BLOCKS_MAX);
    if !(1..=BLOCKS_MAX).contains(&count) {
        return Err(argument("count", count, format!("1 to {BLOCKS_MAX}")));
    }
    let ram = ram_of(entry)?;
    let blocks = ram.config().block_count();
    if asked.from >= blocks {
        let wanted = format!("a block below {blocks}, which is how many it has");
        return Err(argument("from", asked.from, wanted));
    }
    let StatesPage { states, next } = ram.states(asked.from, count);
    let view = |state: BlockState| BlockView {
        block: state.block,
        age: state.age,
        stored_bytes: state.stored_bytes,
        flags: state.flags.map(char::from).into_iter().collect(),
    };
    Ok(BlocksView { blocks: states.into_iter().map(view).collect(), next })
}

//! A compressed RAM disk: what zram does, in user space.
//!
//! The contents of a block are an *object*: compressed and never changed in place. One word per
//! block ([`BlockTable`]) says where the object lies. A write makes a new object and exchanges the
//! word. A read pins the object and decompresses it where it lies, so a reader never blocks another
//! thread.
//!
//! ```text
//! RamQueue ▸ blocks ▸ Codec ▸ Store: BlockTable (a word each) ▸ Pool (objects, back to back)
//! ```
//!
//! [`Pool`] allocates the objects. [`Store`] joins pool and words and enforces who may free which
//! object, so that code above it needs no unsafe. [`Codec`] compresses blocks. [`Ram`] is the
//! device. docs/ram.md is the manual.
//!
//! [`BlockTable`]: blockyard_sync::block_table::BlockTable

pub mod background;
mod backing;
mod blocks;
pub mod codec;
mod compactor;
mod config;
mod counters;
mod dedup;
mod device;
mod error;
pub mod fill;
mod form;
pub mod pool;
mod prefetch;
mod queue;
pub mod snapshot;
mod stats;
pub mod store;

pub use background::{
    BlockState, Recompressed, Replace, SaveError, Saved, Selection, StatesPage, Trained, Which,
    WrittenBack,
};
pub use codec::{Algo, Codec, CodecConfig};
pub use config::RamConfig;
pub use device::{Ram, Settings};
pub use error::RamError;
pub use pool::{
    Cache, Compacted, Load, NoSpace, Object, Pool, PoolConfig, PoolError, SizeClass, Usage,
};
pub use queue::{BlockPart, RamQueue, split_at_blocks};
pub use stats::{BdStat, DebugStat, DedupStat, IoStat, MmStat, RamStats};
pub use store::{Access, Made, Maker, New, ReplacedContents, Store};

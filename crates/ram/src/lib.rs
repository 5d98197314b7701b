//! A compressed RAM disk: zram's job in user space.
//!
//! A block's contents are an *object*, compressed and never changed where they lie. One word per
//! block ([`Entries`]) says where; a write makes a new object and exchanges the word; a read pins
//! the object and decompresses it in place. So readers exclude nobody.
//!
//! ```text
//! RamQueue ▸ blocks ▸ Codec ▸ Store: Entries (a word each) ▸ Pool (objects, back to back)
//! ```
//!
//! [`Pool`] keeps the objects; [`Store`] is both together, with the rules of who may give back what
//! kept inside, so that what stands on it needs no unsafe code. [`Codec`] makes fewer bytes of a
//! block, [`Ram`] is the device. docs/ram.md is the manual.
//!
//! [`Entries`]: blockyard_sync::entry_words::Entries

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
mod fetch;
pub mod fill;
mod form;
pub mod parts;
pub mod pool;
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
pub use queue::RamQueue;
pub use stats::{BdStat, DebugStat, DedupStat, IoStat, MmStat, RamStats};
pub use store::{Access, Made, Maker, New, Store, Taken};

//! A compressed RAM disk: zram's job in user space.
//!
//! A block's contents are an *object*, compressed and never changed where they lie. One word per
//! block ([`Entries`]) says where; a write makes a new object and exchanges the word; a read pins
//! the object and decompresses it in place. So readers exclude nobody.
//!
//! ```text
//! block ▸ Entries (a word each) ▸ Pool (objects, back to back) ▸ pages of the system
//! ```
//!
//! [`Pool`] keeps the objects; [`Store`] is both together, with the rules of who may give back what
//! kept inside, so that what stands on it needs no unsafe code.
//!
//! [`Entries`]: blockyard_sync::entry_words::Entries

pub mod pool;
pub mod store;

pub use pool::{Cache, Compacted, NoSpace, Object, Pool, PoolConfig, PoolError, SizeClass, Usage};
pub use store::{Access, Made, Maker, New, Store};

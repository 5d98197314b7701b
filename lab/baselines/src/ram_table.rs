//! The former tables of zram: an entry of two words per block, and the locks around them.
//!
//! | name | the lock | an entry |
//! | --- | --- | --- |
//! | `ram-table-lock` | one reader/writer lock over the table, to Linux 3.15 | 16 bytes |
//! | `ram-cas` | a state per entry, taken by compare-and-swap | 24 bytes |
//! | `ram-spin` | a spin lock per entry | 24 bytes |
//! | `ram-rwlock` | a reader/writer lock per entry | 24 bytes |
//! | `ram-bit-spin` | a bit of the entry's own second word, since Linux 3.16 | 16 bytes |
//!
//! The first is the published *before*; the last is the one that Linux adopted. A reader holds its
//! lock until the block is decompressed, because a writer frees an object as soon as it has changed
//! the object's entry.
#![allow(unsafe_code)]
#![allow(clippy::disallowed_types, reason = "the bit is this baseline's own; no product has it")]

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicU64, Ordering};

use blockyard_ram::Object;
use blockyard_sync::block_table::Word;
use blockyard_sync::spin_lock::SpinLock;
use blockyard_sync::sync_cell::SyncCell;

use crate::shared_lock::{CasLock, SharedLock, SpinRwLock, spin};

/// The rank of a lock around entries: a write to a part of a block takes the pool's locks under it.
const RANK: u8 = 10;

/// The published "before": one lock over the table.
pub type TableLock = WholeTable<SpinRwLock<Box<[Entry]>>>;
/// A state per entry, taken by compare-and-swap.
pub type CasEntries = LockPerEntry<CasLock<Entry>>;
/// An entry protected by a spin lock.
pub type SpinEntry = SpinLock<Entry, RANK>;
/// A spin lock per entry.
pub type SpinEntries = LockPerEntry<SpinEntry>;
/// A reader/writer lock per entry.
pub type RwEntries = LockPerEntry<SpinRwLock<Entry>>;
/// The published "after": a lock bit in each entry.
pub type BitEntries = LockPerEntry<BitEntry>;

/// The bits of an entry's second word that hold the length, which is at most 65536 bytes.
const LEN_MASK: u64 = (1 << 17) - 1;
/// The block is one repeated word, and the handle is that word.
const SAME: u64 = 1 << 17;
/// The object is the uncompressed block.
const RAW: u64 = 1 << 18;
/// A thread holds the entry's lock.
const LOCKED: u64 = 1 << 63;

/// A block's entry in the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The handle of the object, or the word that is repeated.
    handle: u64,
    /// Length and flags; 0 for a block that was never written.
    value: u64,
}

/// The decoded meaning of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// The block reads as zeros.
    Nothing,
    /// The block is one repeated word.
    Same(u64),
    /// The block is a compressed object.
    Packed(Object),
    /// The block is an uncompressed object.
    Raw(Object),
}

impl Entry {
    /// Encodes `contents` as an entry.
    #[inline]
    pub fn new(contents: Contents) -> Entry {
        let of = |object: Object, flags| Entry {
            handle: object.place(),
            value: object.len_bytes() as u64 | flags,
        };
        match contents {
            Contents::Nothing => Entry::default(),
            Contents::Same(word) => Entry { handle: word, value: SAME },
            Contents::Packed(object) => of(object, 0),
            Contents::Raw(object) => of(object, RAW),
        }
    }

    /// Decodes the entry.
    #[inline]
    pub fn contents(self) -> Contents {
        match (self.object(), self.value & SAME, self.value & RAW) {
            (Some(object), _, 0) => Contents::Packed(object),
            (Some(object), ..) => Contents::Raw(object),
            (None, 0, _) => Contents::Nothing,
            (None, ..) => Contents::Same(self.handle),
        }
    }

    /// The object that the entry refers to.
    #[inline]
    pub fn object(self) -> Option<Object> {
        let len = (self.value & LEN_MASK) as usize;
        if len == 0 { None } else { Object::of(Word::object(self.handle, len)) }
    }
}

/// A table of entries, protected by locks of some kind.
pub trait Table: Sized + Send + Sync + 'static {
    /// A table for `blocks` blocks that were never written.
    ///
    /// # Errors
    /// If there is no memory for the table.
    fn new(blocks: u64) -> Result<Self, TryReserveError>;

    /// Calls `f` with an entry, which no other thread changes until `f` returns.
    fn read<R>(&self, block: u64, f: impl FnOnce(Entry) -> R) -> R;

    /// Calls `f` to change an entry, which no other thread reads until `f` returns.
    fn change<R>(&self, block: u64, f: impl FnOnce(&mut Entry) -> R) -> R;

    /// The memory that the table takes, in bytes.
    fn len_bytes(&self) -> u64;
}

fn collect<T>(blocks: u64, entry: impl Fn() -> T) -> Result<Box<[T]>, TryReserveError> {
    let count = usize::try_from(blocks).unwrap_or(usize::MAX);
    let mut entries = Vec::new();
    entries.try_reserve_exact(count)?;
    entries.extend((0..count).map(|_| entry()));
    Ok(entries.into_boxed_slice())
}

/// A table with one lock over all entries.
#[derive(Debug)]
pub struct WholeTable<L>(L);

impl<L: SharedLock<Box<[Entry]>> + 'static> Table for WholeTable<L> {
    fn new(blocks: u64) -> Result<Self, TryReserveError> {
        Ok(WholeTable(L::new(collect(blocks, Entry::default)?)))
    }

    #[inline]
    fn read<R>(&self, block: u64, f: impl FnOnce(Entry) -> R) -> R {
        self.0.read(|entries| f(entries[block as usize]))
    }

    #[inline]
    fn change<R>(&self, block: u64, f: impl FnOnce(&mut Entry) -> R) -> R {
        self.0.write(|entries| f(&mut entries[block as usize]))
    }

    fn len_bytes(&self) -> u64 {
        self.0.read(|entries| size_of_val(&**entries) as u64)
    }
}

/// A table with a lock per entry.
#[derive(Debug)]
pub struct LockPerEntry<L>(Box<[L]>);

impl<L: SharedLock<Entry> + 'static> Table for LockPerEntry<L> {
    fn new(blocks: u64) -> Result<Self, TryReserveError> {
        Ok(LockPerEntry(collect(blocks, || L::new(Entry::default()))?))
    }

    #[inline]
    fn read<R>(&self, block: u64, f: impl FnOnce(Entry) -> R) -> R {
        self.0[block as usize].read(|entry| f(*entry))
    }

    #[inline]
    fn change<R>(&self, block: u64, f: impl FnOnce(&mut Entry) -> R) -> R {
        self.0[block as usize].write(f)
    }

    fn len_bytes(&self) -> u64 {
        size_of_val(&*self.0) as u64
    }
}

/// An entry whose lock is a bit of its second word, so that the lock takes no memory.
#[derive(Debug)]
pub struct BitEntry {
    handle: SyncCell<u64>,
    value: AtomicU64,
}

// SAFETY: only the thread that has set the bit reaches the handle.
unsafe impl Sync for BitEntry {}

/// A locked entry. Dropping it stores the entry and clears the lock bit.
struct EntryGuard<'a> {
    home: &'a BitEntry,
    entry: Entry,
}

impl Drop for EntryGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let Entry { handle, value } = self.entry;
        // SAFETY: this thread has set the bit, and clears it below.
        unsafe { self.home.handle.with_mut(|home| *home = handle) };
        // Release: pairs with the Acquire of the next holder's `fetch_or`.
        self.home.value.store(value, Ordering::Release);
    }
}

impl BitEntry {
    #[inline]
    fn try_hold(&self) -> Option<EntryGuard<'_>> {
        // Acquire: pairs with the Release in `EntryGuard`.
        let value = self.value.fetch_or(LOCKED, Ordering::Acquire);
        if value & LOCKED != 0 {
            return None;
        }
        // SAFETY: this thread has just set the bit.
        let handle = unsafe { self.handle.with_mut(|handle| *handle) };
        Some(EntryGuard { home: self, entry: Entry { handle, value } })
    }

    #[inline]
    fn hold(&self) -> EntryGuard<'_> {
        let mut held = self.try_hold();
        if held.is_none() {
            spin(|| {
                // Relaxed: only a hint that the next attempt may succeed.
                if self.value.load(Ordering::Relaxed) & LOCKED == 0 {
                    held = self.try_hold();
                }
                held.is_some()
            });
        }
        held.expect("spinning ends when it is there")
    }
}

impl SharedLock<Entry> for BitEntry {
    fn new(entry: Entry) -> BitEntry {
        let Entry { handle, value } = entry;
        BitEntry { handle: SyncCell::new(handle), value: AtomicU64::new(value) }
    }

    #[inline]
    fn read<R>(&self, f: impl FnOnce(&Entry) -> R) -> R {
        f(&self.hold().entry)
    }

    #[inline]
    fn write<R>(&self, f: impl FnOnce(&mut Entry) -> R) -> R {
        f(&mut self.hold().entry)
    }

    #[inline]
    fn try_read<R, F: FnOnce(&Entry) -> R>(&self, f: F) -> Result<R, F> {
        match self.try_hold() {
            Some(held) => Ok(f(&held.entry)),
            None => Err(f),
        }
    }

    #[inline]
    fn try_write<R, F: FnOnce(&mut Entry) -> R>(&self, f: F) -> Result<R, F> {
        match self.try_hold() {
            Some(mut held) => Ok(f(&mut held.entry)),
            None => Err(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_says_what_it_was_made_of() {
        let object = |len| Object::of(Word::object(77, len)).unwrap();
        for contents in [
            Contents::Nothing,
            Contents::Same(0),
            Contents::Same(u64::MAX),
            Contents::Packed(object(1)),
            Contents::Raw(object(65_536)),
        ] {
            assert_eq!(Entry::new(contents).contents(), contents);
        }
        assert_eq!(Entry::default().contents(), Contents::Nothing);
    }

    fn counts<T: Table>(entry_bytes: u64) {
        let table = T::new(8).unwrap();
        assert_eq!(table.len_bytes(), 8 * entry_bytes);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for turn in 0..1000 {
                        table.change(turn % 2, |entry| entry.handle += 1);
                        table.read(turn % 2, |entry| assert_eq!(entry.value, 0));
                    }
                });
            }
        });
        assert_eq!([0, 1, 2].map(|block| table.read(block, |entry| entry.handle)), [2000, 2000, 0]);
    }

    #[test]
    fn every_table_loses_no_change_and_is_as_large_as_it_says() {
        counts::<TableLock>(16);
        counts::<CasEntries>(24);
        counts::<SpinEntries>(24);
        counts::<RwEntries>(24);
        counts::<BitEntries>(16);
    }
}

//! The store: joins the table of words and the pool, and holds the contents of all blocks as
//! compressed bytes.
//!
//! The store enforces the rules that table and pool leave to their callers. An object is published
//! in one word, or in several that are marked as shared. The thread that takes out its last word
//! retires it. A reader pins it. So safe code cannot misuse the store, and the codecs, the optional
//! features and the device need no unsafe code to use it.
//!
//! The caller chooses what a *word* records about the contents (codec, huge, incompressible, age).
//! It passes a template, [`Word::NOTHING`] with flags, and finds the flags in the word later.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use blockyard_sync::block_table::{BlockTable, Kind, Word};
use blockyard_sync::hazard_pointers::{HazardGuard, HazardSlot};

use crate::pool::{Cache, Compacted, NoSpace, Object, Pool};
use crate::prefetch::prefetch;

/// The contents of a device's blocks.
#[derive(Debug)]
pub struct Store {
    entries: BlockTable,
    pool: Arc<Pool>,
}

/// The new contents of a block.
#[derive(Clone, Copy, Debug)]
pub enum New<'b> {
    /// These bytes, with codec, huge, incompressible and age from the word.
    Bytes(&'b [u8], Word),
    /// A word that refers to no object: nothing, a same-filled value, or a place in the backing
    /// file.
    Word(Word),
}

/// The previous contents of a block that a background worker replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplacedContents {
    /// The previous word.
    pub word: Word,
    /// Whether replacing it freed its object: no other word refers to the object.
    pub frees: bool,
}

impl ReplacedContents {
    /// Stored bytes that were freed.
    pub fn freed_bytes(&self) -> i64 {
        if self.frees { self.word.len_bytes() as i64 } else { 0 }
    }
}

impl Store {
    /// Creates a store in which all blocks are empty.
    pub fn new(entries: BlockTable, pool: Arc<Pool>) -> Arc<Store> {
        Arc::new(Store { entries, pool })
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        self.entries.blocks()
    }

    /// The pool, for its statistics and its limit.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Memory that the words take when all blocks are written, in bytes.
    pub fn entries_bytes(&self) -> usize {
        self.entries.len_bytes()
    }

    /// A block's word now, for listings and for selecting blocks. Its object may be freed at any
    /// moment.
    #[inline]
    pub fn word(&self, block: u64) -> Word {
        self.entries.load(block)
    }

    /// A block's word, after any write of a part of the block has finished: sleeps until then.
    pub fn settled_word(&self, block: u64) -> Word {
        self.entries.settled(block)
    }

    /// Prefetches the object that a block's word refers to, for a thread that reads the block next.
    #[inline]
    pub fn fetch(&self, block: u64) {
        if let Some(object) = Object::of(self.entries.load(block)) {
            self.pool.fetch(object);
        }
    }

    /// Prefetches a block's word for a thread that writes the block next.
    #[inline]
    pub fn fetch_word(&self, block: u64) {
        prefetch(self.entries.address(block), size_of::<Word>());
    }

    /// Prefetches the object that a block's word refers to, for a thread that replaces it after
    /// other work. The object leaves a hole, to which a later object is copied soon. The exchange
    /// that publishes that object would otherwise wait until all its lines are in the cache.
    #[inline]
    pub fn fetch_to_replace(&self, block: u64) {
        let word = self.entries.load(block);
        if !word.is_shared()
            && let Some(object) = Object::of(word)
        {
            self.pool.fetch_to_free(object);
        }
    }

    /// One round of idle tracking for one block.
    pub fn grow_older(&self, block: u64) {
        self.entries.grow_older(block);
    }

    /// Creates the access of one channel or worker; `None` if the maximum number of them exists.
    pub fn access(self: &Arc<Store>) -> Option<Access> {
        let seat = self.pool.pins().slot()?;
        Some(Access { cache: self.pool.cache(), store: Arc::clone(self), seat })
    }
}

/// One thread's access to the contents.
#[derive(Debug)]
pub struct Access {
    store: Arc<Store>,
    seat: HazardSlot,
    cache: Cache,
}

/// The bytes that a pinned word refers to; empty if it refers to no object.
///
/// # Safety
/// The guard comes from the store's entries and a hazard-pointer slot of its pool.
#[inline]
unsafe fn pinned<'g>(store: &'g Store, guard: &'g HazardGuard<'_>) -> &'g [u8] {
    // SAFETY: the guard pins what its word refers to, by this function's contract.
    Object::of(guard.word()).map_or(&[], |object| unsafe { store.pool.bytes(object, guard) })
}

impl Access {
    /// The store of this access.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Calls `f` with a block's word and, if it refers to an object, the object's bytes. They are
    /// neither changed nor freed until `f` returns. Other threads do not wait for it. Counts as an
    /// access for idle tracking.
    #[inline]
    pub fn read<R>(&mut self, block: u64, f: impl FnOnce(Word, &[u8]) -> R) -> R {
        let store = &*self.store;
        // Before the pin: its fence does not wait for prefetches.
        store.fetch(block);
        let guard = self.seat.pin(&store.entries, block);
        store.entries.touch(block, guard.word());
        // SAFETY: pinned through the store's own entries and a slot of its pool.
        f(guard.word(), unsafe { pinned(store, &guard) })
    }

    /// Like [`Access::read`] for a background worker: does not count as an access for idle
    /// tracking.
    #[inline]
    pub fn peek<R>(&mut self, block: u64, f: impl FnOnce(Word, &[u8]) -> R) -> R {
        let store = &*self.store;
        let guard = self.seat.pin(&store.entries, block);
        // SAFETY: as in `read`.
        f(guard.word(), unsafe { pinned(store, &guard) })
    }

    /// How many words refer to a block's object; 0 if it has none.
    pub fn sharers(&mut self, block: u64) -> u64 {
        let store = &*self.store;
        let guard = self.seat.pin(&store.entries, block);
        match Object::of(guard.word()) {
            None => 0,
            Some(_) if !guard.word().is_shared() => 1,
            // SAFETY: as in `read`.
            Some(object) => unsafe { store.pool.parts(object, &guard) },
        }
    }

    /// Replaces a block's contents unconditionally, and returns the old word. If the old word
    /// refers to a place in the backing file, the caller frees that place when no reader has it
    /// pinned.
    ///
    /// # Errors
    /// If there is no memory for the bytes: the old contents stay.
    #[inline]
    pub fn replace(&mut self, block: u64, new: New<'_>) -> Result<Word, NoSpace> {
        let made = Maker::of(&mut self.cache).make(new).map(Made::take);
        let made = match made {
            Ok(word) => word,
            Err(NoSpace) => self.make_after_compaction(new)?,
        };
        let old = self.store.entries.replace(block, made);
        self.retire(old);
        Ok(old)
    }

    /// Retries after the limit was reached: overwritten contents may have left holes that nothing
    /// fits in.
    #[cold]
    fn make_after_compaction(&mut self, new: New<'_>) -> Result<Word, NoSpace> {
        if !self.make_room() {
            return Err(NoSpace);
        }
        Maker::of(&mut self.cache).make(new).map(Made::take)
    }

    /// Compacts a little if that could help an allocation that was refused. Returns whether to try
    /// again. [`Access::replace`] and [`Access::update`] call it themselves; [`Access::remake`],
    /// for background workers, leaves it to its caller.
    pub fn make_room(&mut self) -> bool {
        // SAFETY: the store's entries refer to its pool, and the slot is one of that pool's.
        unsafe { self.cache.make_room(&self.store.entries, &mut self.seat) }
    }

    /// Changes the flags of a block's word if it is still `old`, and returns whether it was.
    ///
    /// # Panics
    /// If `change` changes anything but flags, or changes the flag that marks a shared object.
    pub fn mark(&mut self, block: u64, old: Word, change: impl FnOnce(Word) -> Word) -> bool {
        let new = change(old);
        assert!(new.differs_in_flags_only(old), "{old:?} to {new:?} is not a mark");
        self.store.entries.exchange(block, old, new).is_ok()
    }

    /// Replaces a block's contents by what `f` makes of them, for recompression and writeback.
    /// Returns the old contents; `None` if nothing was replaced, because a client's write came
    /// first or `f` made nothing.
    ///
    /// What `f` makes may use a part of the space that is reserved for compaction: it must not be
    /// larger than what it replaces, which is freed.
    ///
    /// # Errors
    /// Those of `f`: the old contents stay.
    pub fn remake<E>(
        &mut self,
        block: u64,
        f: impl for<'m> FnOnce(Word, &[u8], Maker<'m>) -> Result<Option<Made<'m>>, E>,
    ) -> Result<Option<ReplacedContents>, E> {
        let store = &*self.store;
        let guard = self.seat.pin(&store.entries, block);
        let old = guard.word();
        // SAFETY: as in `read`.
        let bytes = unsafe { pinned(store, &guard) };
        let Some(made) = f(old, bytes, Maker::in_place(&mut self.cache))? else {
            return Ok(None);
        };
        let word = made.take();
        let exchanged = store.entries.exchange(block, old, word).is_ok();
        drop(guard);
        if exchanged {
            return Ok(Some(ReplacedContents { word: old, frees: self.retire(old) }));
        }
        drop_made(&mut self.cache, word);
        Ok(None)
    }

    /// Replaces a block's contents by what `f` makes of them, for a write of a part of the block.
    /// If another write came first, calls `f` again. Returns the old word.
    ///
    /// # Errors
    /// Those of `f`: the old contents stay.
    pub fn update<E>(
        &mut self,
        block: u64,
        mut f: impl for<'m> FnMut(Word, &[u8], Maker<'m>) -> Result<Made<'m>, E>,
    ) -> Result<Word, E> {
        let refused = Cell::new(false);
        let mut done = self.update_once(block, &mut f, &refused);
        // The block is unlocked now, so this thread can compact.
        if done.is_err() && refused.get() && self.make_room() {
            done = self.update_once(block, &mut f, &refused);
        }
        let old = done?;
        self.retire(old);
        Ok(old)
    }

    fn update_once<E>(
        &mut self,
        block: u64,
        f: &mut impl for<'m> FnMut(Word, &[u8], Maker<'m>) -> Result<Made<'m>, E>,
        refused: &Cell<bool>,
    ) -> Result<Word, E> {
        let store = &*self.store;
        // Both closures allocate, but neither runs inside the other.
        let cache = RefCell::new(&mut self.cache);
        store.entries.update(
            block,
            &mut self.seat,
            |guard| {
                // SAFETY: as in `read`.
                let bytes = unsafe { pinned(store, guard) };
                let mut cache = cache.borrow_mut();
                let maker = Maker { refused: Some(refused), ..Maker::of(&mut cache) };
                f(guard.word(), bytes, maker).map(Made::take)
            },
            |word| drop_made(&mut cache.borrow_mut(), word),
        )
    }

    /// Compacts the pool until little is left to gain or `stop` returns true. Reads and writes
    /// continue meanwhile.
    pub fn compact(&mut self, stop: impl FnMut() -> bool) -> Compacted {
        // SAFETY: the store's entries refer to its pool, and the slot is one of that pool's.
        unsafe { self.cache.compact(&self.store.entries, &mut self.seat, stop) }
    }

    /// Compacts the pool, but moves objects of at most about `bytes_max` bytes.
    pub fn compact_some(&mut self, bytes_max: u64, stop: impl FnMut() -> bool) -> Compacted {
        // SAFETY: as in `compact`.
        unsafe { self.cache.compact_some(&self.store.entries, &mut self.seat, bytes_max, stop) }
    }

    /// Frees the retired objects that no thread is reading, so that statistics do not include them.
    pub fn reclaim(&mut self) {
        self.cache.reclaim_all();
    }

    /// Frees what a word that was taken out refers to. Returns whether that was an object and this
    /// was its last word.
    #[inline]
    fn retire(&mut self, old: Word) -> bool {
        let Some(object) = Object::of(old) else { return false };
        if old.is_shared() {
            // SAFETY: the word was just taken out of the entries, and with it its part.
            unsafe { self.cache.give_up(object) }
        } else {
            // SAFETY: the word was just taken out of the entries, the only place where its object
            // was published: `Maker` makes words, and each is published once or marked as shared.
            unsafe { self.cache.retire(object) };
            true
        }
    }

    /// Makes a block share the object of block `of`, if `same` accepts that block's word and bytes;
    /// for a write of a whole block whose contents are already stored. Returns the old and the new
    /// word of the block; `None` if it was not changed.
    ///
    /// Allocates no memory. A pool without refcounts shares nothing.
    pub fn share(
        &mut self,
        block: u64,
        of: u64,
        same: impl FnOnce(Word, &[u8]) -> bool,
    ) -> Option<(Word, Word)> {
        let store = &*self.store;
        let joined = {
            let guard = self.seat.pin(&store.entries, of);
            let word = guard.word();
            // SAFETY: as in `read`.
            let bytes = unsafe { pinned(store, &guard) };
            if word.kind() != Kind::Object || word.is_locked() || !same(word, bytes) {
                return None;
            }
            if block == of {
                // The block had these contents when it was pinned: the write takes effect at that
                // moment.
                store.entries.touch(block, word);
                return Some((word, word));
            }
            // SAFETY: pinned through the store's own entries and a slot of its pool.
            unsafe { store.pool.join(&store.entries, of, &guard)? }
        };
        let new = joined.with_age(0).with_under_writeback(false);
        let old = store.entries.replace(block, new);
        self.retire(old);
        Some((old, new))
    }

    /// Makes a block share the object of block `of`, for recompression: if `same` accepts the words
    /// and bytes of both, first the block's and then those of `of`, and no client's write comes
    /// first.
    pub fn share_remade(
        &mut self,
        block: u64,
        of: u64,
        same: impl FnOnce((Word, &[u8]), (Word, &[u8])) -> bool,
    ) -> Option<(ReplacedContents, Word)> {
        let store = &*self.store;
        let joined = {
            let guard = self.seat.pin(&store.entries, of);
            // SAFETY: as in `share`.
            unsafe { store.pool.join(&store.entries, of, &guard)? }
        };
        let object = Object::of(joined)?;
        let guard = self.seat.pin(&store.entries, block);
        let old = guard.word();
        // SAFETY: a part in the object was just taken.
        let theirs = unsafe { store.pool.bytes_of_part(object) };
        // SAFETY: as in `read`.
        let ours = unsafe { pinned(store, &guard) };
        let other = old.kind() == Kind::Object && old.reference() != joined.reference();
        let new = joined.with_age(old.age()).with_under_writeback(false);
        let done = other
            && same((old, ours), (joined, theirs))
            && store.entries.exchange(block, old, new).is_ok();
        drop(guard);
        if done {
            return Some((ReplacedContents { word: old, frees: self.retire(old) }, new));
        }
        // SAFETY: the part was taken above, and no word received it.
        unsafe { self.cache.give_up(object) };
        None
    }
}

/// Frees an object that was made and not published.
fn drop_made(cache: &mut Cache, word: Word) {
    if let Some(object) = Object::of(word) {
        // SAFETY: `Maker` made the object and its exchange failed, so no other thread has seen it.
        unsafe { cache.free(object) };
    }
}

/// Makes new contents for one block, once.
#[derive(Debug)]
pub struct Maker<'m> {
    cache: &'m mut Cache,
    /// Set if an allocation was refused.
    refused: Option<&'m Cell<bool>>,
    /// Whether the new contents replace an object that is at least as large and will be freed.
    in_place: bool,
}

/// Contents that a [`Maker`] made. They are freed if they are dropped unused.
#[derive(Debug)]
#[must_use]
pub struct Made<'m> {
    word: Word,
    cache: &'m mut Cache,
}

impl Made<'_> {
    /// The word, which the caller publishes or frees.
    #[inline]
    fn take(self) -> Word {
        let word = self.word;
        std::mem::forget(self);
        word
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        drop_made(self.cache, self.word);
    }
}

impl<'m> Maker<'m> {
    fn of(cache: &'m mut Cache) -> Maker<'m> {
        Maker { cache, refused: None, in_place: false }
    }

    fn in_place(cache: &'m mut Cache) -> Maker<'m> {
        Maker { cache, refused: None, in_place: true }
    }

    /// Stores bytes, or takes a word as it is.
    ///
    /// # Errors
    /// If there is no memory for the bytes.
    ///
    /// # Panics
    /// If the word refers to an object: objects are made of bytes only.
    #[inline]
    pub fn make(self, new: New<'_>) -> Result<Made<'m>, NoSpace> {
        let word = match new {
            New::Bytes(bytes, flags) => {
                let object = match self.in_place {
                    true => self.cache.alloc_smaller(bytes),
                    false => self.cache.alloc(bytes),
                };
                let object = object.inspect_err(|NoSpace| {
                    if let Some(refused) = self.refused {
                        refused.set(true);
                    }
                })?;
                object.word().with_flags_of(flags)
            }
            New::Word(word) => {
                assert!(word.kind() != Kind::Object && !word.is_locked(), "{word:?} was not made");
                word
            }
        };
        Ok(Made { word, cache: self.cache })
    }
}

//! Entries and pool together: the contents of all blocks, as bytes that somebody has compressed.
//!
//! Here is kept what both leave to their callers: an object is shown by one word, or by several
//! that are marked as shared, retired by who has taken the last one out, and read while it is
//! pinned. So nothing in here can be misused from safe code, and codecs, features and the device
//! stand on top without any other.
//!
//! What a *word* says of the contents (codec, huge, incompressible, age) is up to the caller: it is
//! given as a template, [`Word::NOTHING`] with flags, and comes back with the word.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use blockyard_sync::entry_words::{Entries, Kind, Word};
use blockyard_sync::pins::{Guard, Seat};

use crate::fetch::fetch;
use crate::pool::{Cache, Compacted, NoSpace, Object, Pool};

/// The contents of a device's blocks.
#[derive(Debug)]
pub struct Store {
    entries: Entries,
    pool: Arc<Pool>,
}

/// What a block is to become.
#[derive(Clone, Copy, Debug)]
pub enum New<'b> {
    /// These bytes, with codec, huge, incompressible and age of the word.
    Bytes(&'b [u8], Word),
    /// A word that refers to no object: nothing, a value, a place on the backing file.
    Word(Word),
}

/// What stood for a block before somebody replaced it in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Its word.
    pub word: Word,
    /// Whether it took its object along: no other word refers to that.
    pub frees: bool,
}

impl Taken {
    /// Stored bytes that went with it.
    pub fn freed_bytes(&self) -> i64 {
        if self.frees { self.word.len_bytes() as i64 } else { 0 }
    }
}

impl Store {
    /// All blocks empty.
    pub fn new(entries: Entries, pool: Arc<Pool>) -> Arc<Store> {
        Arc::new(Store { entries, pool })
    }

    /// How many blocks there are.
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

    /// A block's word now, for listings and for choosing; its object may be gone in the next
    /// moment.
    #[inline]
    pub fn word(&self, block: u64) -> Word {
        self.entries.load(block)
    }

    /// The same, once no writer of a part of the block has it for himself: waits for him, asleep.
    pub fn settled_word(&self, block: u64) -> Word {
        self.entries.settled(block)
    }

    /// Fetches what a block's word refers to into the cache, for who is going to read the block.
    #[inline]
    pub fn fetch(&self, block: u64) {
        if let Some(object) = Object::of(self.entries.load(block)) {
            self.pool.fetch(object);
        }
    }

    /// Fetches a block's word into the cache, for who is going to write the block.
    #[inline]
    pub fn fetch_word(&self, block: u64) {
        fetch(self.entries.address(block), size_of::<Word>());
    }

    /// Fetches what a block's word refers to into the cache, for who is going to replace it, but
    /// has other work to do before: what it leaves is a hole soon, which one of the next objects is
    /// copied to. The exchange that shows that one would wait until all of its lines are there.
    #[inline]
    pub fn fetch_to_replace(&self, block: u64) {
        let word = self.entries.load(block);
        if !word.is_shared()
            && let Some(object) = Object::of(word)
        {
            self.pool.fetch_to_free(object);
        }
    }

    /// A turn of idle tracking for one block.
    pub fn grow_older(&self, block: u64) {
        self.entries.grow_older(block);
    }

    /// A way in for one channel, or one worker; `None` if there are as many as the pool was made
    /// for.
    pub fn access(self: &Arc<Store>) -> Option<Access> {
        let seat = self.pool.pins().seat()?;
        Some(Access { cache: self.pool.cache(), store: Arc::clone(self), seat })
    }
}

/// One thread's way to the contents.
#[derive(Debug)]
pub struct Access {
    store: Arc<Store>,
    seat: Seat,
    cache: Cache,
}

/// The bytes that a pinned word refers to; none if it is no object.
///
/// # Safety
/// The guard comes from the store's entries and a seat of its pool.
#[inline]
unsafe fn pinned<'g>(store: &'g Store, guard: &'g Guard<'_>) -> &'g [u8] {
    // SAFETY: the guard pins what its word refers to, by this function's contract.
    Object::of(guard.word()).map_or(&[], |object| unsafe { store.pool.bytes(object, guard) })
}

impl Access {
    /// The store that it leads to.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Lets `f` at a block's word and, if that refers to an object, at its bytes, which nobody
    /// changes or gives back until it returns. Excludes nobody. Notes the access.
    #[inline]
    pub fn read<R>(&mut self, block: u64, f: impl FnOnce(Word, &[u8]) -> R) -> R {
        let store = &*self.store;
        // Before the pin, whose fence waits for nothing that is only fetched.
        store.fetch(block);
        let guard = self.seat.pin(&store.entries, block);
        store.entries.touch(block, guard.word());
        // SAFETY: pinned through the store's own entries and a seat of its pool.
        f(guard.word(), unsafe { pinned(store, &guard) })
    }

    /// The same for who works in the background: the access is not noted.
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

    /// Replaces a block's contents, whatever they are, and says what its word was. A place on the
    /// backing file that the old word refers to is the caller's to free, once nobody has it pinned.
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

    /// The limit was met: contents that were overwritten may have left holes that nothing fits in.
    #[cold]
    fn make_after_compaction(&mut self, new: New<'_>) -> Result<Word, NoSpace> {
        if !self.make_room() {
            return Err(NoSpace);
        }
        Maker::of(&mut self.cache).make(new).map(Made::take)
    }

    /// Compacts a little if that could help somebody who was refused, and says whether it is worth
    /// another try. [`Access::replace`] and [`Access::update`] have done so; [`Access::remake`],
    /// which works in the background, leaves it to its caller.
    pub fn make_room(&mut self) -> bool {
        // SAFETY: the store's entries refer to its pool, and the seat is one of that pool's.
        unsafe { self.cache.make_room(&self.store.entries, &mut self.seat) }
    }

    /// Changes the flags of a block's word if it is still `old`, and says whether it was.
    ///
    /// # Panics
    /// If the change is of more than flags, or of the one that says that an object is shared.
    pub fn mark(&mut self, block: u64, old: Word, change: impl FnOnce(Word) -> Word) -> bool {
        let new = change(old);
        assert!(new.differs_in_flags_only(old), "{old:?} to {new:?} is not a mark");
        self.store.entries.exchange(block, old, new).is_ok()
    }

    /// Replaces a block's contents by what `f` makes of them, unless a writer is faster; for
    /// recompression and writeback. Says what was there, or nothing if nothing was replaced,
    /// because of a writer or because `f` has made nothing.
    ///
    /// What is made may take a part of what the limit leaves to compaction: it is to be no larger
    /// than what it replaces, which is given back.
    ///
    /// # Errors
    /// Whatever `f` says: the old contents stay.
    pub fn remake<E>(
        &mut self,
        block: u64,
        f: impl for<'m> FnOnce(Word, &[u8], Maker<'m>) -> Result<Option<Made<'m>>, E>,
    ) -> Result<Option<Taken>, E> {
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
            return Ok(Some(Taken { word: old, frees: self.retire(old) }));
        }
        drop_made(&mut self.cache, word);
        Ok(None)
    }

    /// Replaces a block's contents by what `f` makes of them, for a write of a part. It is called
    /// again when a writer was faster. Says what the word was.
    ///
    /// # Errors
    /// Whatever `f` says: the old contents stay.
    pub fn update<E>(
        &mut self,
        block: u64,
        mut f: impl for<'m> FnMut(Word, &[u8], Maker<'m>) -> Result<Made<'m>, E>,
    ) -> Result<Word, E> {
        let refused = Cell::new(false);
        let mut done = self.update_once(block, &mut f, &refused);
        // The block is let go of, so room can be made.
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
        // Both closures allocate; they are never called within each other.
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

    /// Moves objects together and gives pages back, until there is little left to win or `stop`
    /// says so. Everybody else goes on meanwhile.
    pub fn compact(&mut self, stop: impl FnMut() -> bool) -> Compacted {
        // SAFETY: the store's entries refer to its pool, and the seat is one of that pool's.
        unsafe { self.cache.compact(&self.store.entries, &mut self.seat, stop) }
    }

    /// The same, but not more than objects of so many bytes are moved.
    pub fn compact_some(&mut self, bytes_max: u64, stop: impl FnMut() -> bool) -> Compacted {
        // SAFETY: as in `compact`.
        unsafe { self.cache.compact_some(&self.store.entries, &mut self.seat, bytes_max, stop) }
    }

    /// Gives back what is retired and not read by anybody, so that statistics show what is left.
    pub fn reclaim(&mut self) {
        self.cache.reclaim_all();
    }

    /// Gives back what a word refers to that was taken out, and says whether that was an object and
    /// its last word.
    #[inline]
    fn retire(&mut self, old: Word) -> bool {
        let Some(object) = Object::of(old) else { return false };
        if old.is_shared() {
            // SAFETY: we have just taken the word out of the entries, and with it its part.
            unsafe { self.cache.give_up(object) }
        } else {
            // SAFETY: we have just taken the word out of the entries, which is where its object was
            // shown, and only there: words are made by `Maker`, and shown once, or marked.
            unsafe { self.cache.retire(object) };
            true
        }
    }

    /// Has a block refer to the object of block `of`, if `same` says yes to that one's word and
    /// bytes; for a write of a whole block whose contents are there already. Says what the block's
    /// word was and what it is, or nothing if it was left alone.
    ///
    /// Takes no memory. A pool that was not made for it shares nothing.
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
                // It was so when it was pinned: that is when it is written.
                store.entries.touch(block, word);
                return Some((word, word));
            }
            // SAFETY: pinned through the store's own entries and a seat of its pool.
            unsafe { store.pool.join(&store.entries, of, &guard)? }
        };
        let new = joined.with_age(0).with_under_writeback(false);
        let old = store.entries.replace(block, new);
        self.retire(old);
        Some((old, new))
    }

    /// The same unless a writer of the block is faster, and if `same` says yes to the words and
    /// bytes of both: first of the block, then of block `of`; for recompression.
    pub fn share_remade(
        &mut self,
        block: u64,
        of: u64,
        same: impl FnOnce((Word, &[u8]), (Word, &[u8])) -> bool,
    ) -> Option<(Taken, Word)> {
        let store = &*self.store;
        let joined = {
            let guard = self.seat.pin(&store.entries, of);
            // SAFETY: as in `share`.
            unsafe { store.pool.join(&store.entries, of, &guard)? }
        };
        let object = Object::of(joined)?;
        let guard = self.seat.pin(&store.entries, block);
        let old = guard.word();
        // SAFETY: we have just taken a part in it.
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
            return Some((Taken { word: old, frees: self.retire(old) }, new));
        }
        // SAFETY: the part that we have taken, which no word has got.
        unsafe { self.cache.give_up(object) };
        None
    }
}

/// Frees what was made in vain.
fn drop_made(cache: &mut Cache, word: Word) {
    if let Some(object) = Object::of(word) {
        // SAFETY: it was made by `Maker` and its exchange has failed, so nobody has seen it.
        unsafe { cache.free(object) };
    }
}

/// Makes contents for one block, once.
#[derive(Debug)]
pub struct Maker<'m> {
    cache: &'m mut Cache,
    /// Where it is noted that there was no memory.
    refused: Option<&'m Cell<bool>>,
    /// Whether it takes the place of something that is not smaller, and gives that back.
    in_place: bool,
}

/// What a [`Maker`] has made. It is freed again if it goes nowhere.
#[derive(Debug)]
#[must_use]
pub struct Made<'m> {
    word: Word,
    cache: &'m mut Cache,
}

impl Made<'_> {
    /// The word, which somebody else is going to show or to free.
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
    /// If the word refers to an object: those are made of bytes.
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

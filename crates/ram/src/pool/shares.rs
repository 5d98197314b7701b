//! Objects that several words refer to: equal blocks, stored once.
//!
//! Before such an object's own bytes lies a count: of the words that refer to it, less one. It is
//! read and changed under the lock of the object's shard. Each word, and whoever works on the
//! object without a word, has a *part* in it.
//!
//! | who joins | who takes a word out |
//! | --- | --- |
//! | has pinned the object, by some block's word | exchanges that word |
//! | under the lock: the word is still there, and marked as shared from now on | saw it marked as shared? |
//! | under the lock: one more | yes: under the lock: one less, or if there was no other, retires it |
//! | | no: retires it |
//!
//! The mark is set by an exchange. If that comes before the other's, he sees the mark; his lock
//! comes after the joiner's, or the joiner would not have found the word under it, and so he finds
//! the count. If it comes after, it fails. So an object is retired once, by whoever takes out the
//! last word: all words of an object that has several are marked, and the mark stays until they go.
#![allow(unsafe_code)]

use blockyard_sync::entry_words::{Entries, Word};
use blockyard_sync::lock::Lock;
use blockyard_sync::pins::Guard;

use super::layout::UNIT_BYTES;
use super::{Cache, Object, Pool};

/// Bytes of a count.
pub(super) const COUNT_BYTES: usize = size_of::<u32>();

impl Pool {
    fn is_counted(&self) -> bool {
        self.layout.head_bytes == COUNT_BYTES
    }

    /// Notes of a new object that it has one word.
    ///
    /// # Safety
    /// The object was allocated to the caller, and nobody else knows it.
    #[inline]
    pub(super) unsafe fn begin_count(&self, object: Object) {
        if self.is_counted() {
            // SAFETY: by this function's contract.
            unsafe { self.set_count(object, 0) };
        }
    }

    fn count_at(object: Object) -> u64 {
        object.place() * UNIT_BYTES as u64
    }

    /// # Safety
    /// The object is there, and the caller has its shard's lock.
    unsafe fn count(&self, object: Object) -> u32 {
        // SAFETY: it was written when the object was allocated, and is changed under the lock only.
        let bytes = unsafe { self.memory.bytes(Pool::count_at(object), COUNT_BYTES) };
        u32::from_ne_bytes(bytes.try_into().expect("so many were asked for"))
    }

    /// # Safety
    /// The object is there, and the caller has its shard's lock or is the only one who knows it.
    unsafe fn set_count(&self, object: Object, count: u32) {
        // SAFETY: no reader's bytes overlap the count, and nobody else is at it.
        unsafe { self.memory.write(Pool::count_at(object), &count.to_ne_bytes()) };
    }

    /// How many parts there are in an object of a counted pool.
    ///
    /// # Safety
    /// As for [`Pool::bytes`].
    pub unsafe fn parts(&self, object: Object, _pinned: &Guard<'_>) -> u64 {
        let shard = &self.shards[self.layout.shard(object.place()) as usize];
        // SAFETY: it is pinned, and this is its shard's lock.
        shard.with(|_| u64::from(unsafe { self.count(object) }) + 1)
    }

    /// An object's bytes, as long as the caller has a part in it.
    ///
    /// # Safety
    /// The caller has a part in it for as long as the bytes are used.
    pub unsafe fn bytes_of_part(&self, object: Object) -> &[u8] {
        // SAFETY: it was written before anybody could have a part in it, and stays meanwhile.
        unsafe {
            self.memory.bytes(self.layout.start(object.place()), self.layout.object_bytes(object))
        }
    }

    /// Makes one part of an object two.
    ///
    /// # Safety
    /// The caller has a part in it; the pool is a counted one, and there are few parts.
    pub(super) unsafe fn add_part(&self, object: Object) {
        let shard = &self.shards[self.layout.shard(object.place()) as usize];
        shard.with(|shard| {
            // SAFETY: it stays because of the part, and this is its shard's lock.
            unsafe { self.set_count(object, self.count(object) + 1) };
            shard.joined(object);
        });
    }

    /// Takes a part in the object that the guard has pinned by a block's word, and says what that
    /// word is; `None` if the word has been exchanged for that of another object, or there are as
    /// many parts as there can be.
    ///
    /// # Safety
    /// As for [`Pool::bytes`]; `entries` and `block` are those that were pinned.
    pub unsafe fn join(&self, entries: &Entries, block: u64, guard: &Guard<'_>) -> Option<Word> {
        let object = Object::of(guard.word()).filter(|_| self.is_counted())?;
        let shard = &self.shards[self.layout.shard(object.place()) as usize];
        shard.with(|shard| {
            let mut word = entries.load(block);
            loop {
                if word.is_locked() || word.reference() != guard.word().reference() {
                    return None;
                }
                if word.is_shared() {
                    break;
                }
                let marked = word.with_shared(true);
                match entries.exchange(block, word, marked) {
                    Ok(()) => word = marked,
                    Err(found) => word = found,
                }
            }
            // SAFETY: it is pinned, and this is its shard's lock.
            let count = unsafe { self.count(object) }.checked_add(1)?;
            // SAFETY: as above.
            unsafe { self.set_count(object, count) };
            shard.joined(object);
            Some(word)
        })
    }
}

impl Cache {
    /// Gives up a part of an object whose words are marked as shared. The last part retires it:
    /// says whether it was that.
    ///
    /// # Safety
    /// It comes from this pool, and the caller has a part in it, or has just taken its word out,
    /// which was marked as shared; that part is given up once.
    pub unsafe fn give_up(&mut self, object: Object) -> bool {
        let pool = &*self.pool;
        let is_last = pool.shards[pool.layout.shard(object.place()) as usize].with(|shard| {
            // SAFETY: it stays because of the part, and this is its shard's lock.
            let Some(count) = unsafe { pool.count(object) }.checked_sub(1) else { return true };
            // SAFETY: as above.
            unsafe { pool.set_count(object, count) };
            shard.left(object);
            false
        });
        if is_last {
            // SAFETY: no other part is left: no word refers to it, and nobody can join.
            unsafe { self.retire(object) };
        }
        is_last
    }
}

//! Shared objects: objects that several words refer to, since equal blocks are stored once.
//!
//! A refcount precedes the object's own bytes: the number of *parts* in the object, less one. Each
//! word that refers to the object has a part in it, and so does a thread that works on it without a
//! word. The count is read and changed under the lock of the object's shard.
//!
//! | thread J joins | thread T takes a word out |
//! | --- | --- |
//! | pins the object, by some block's word | exchanges that word |
//! | under the lock: checks that the word is unchanged, and marks it | was the old word marked? |
//! | under the lock: increments the count | yes: under the lock, decrements it; retires at 0 |
//! | | no: retires the object |
//!
//! J sets the mark by an exchange of the word. If J's exchange comes first, T sees the mark. T then
//! takes the lock after J, since J found the word unchanged under it, and so T sees J's count. If
//! T's exchange comes first, J's fails. So an object is retired exactly once, by the thread that
//! takes out the last word: every word of a shared object is marked, and keeps the mark as long as
//! it exists.
#![allow(unsafe_code)]

use blockyard_sync::block_table::{BlockTable, Word};
use blockyard_sync::hazard_pointers::HazardGuard;
use blockyard_sync::lock::Lock;

use super::layout::{COUNT_BYTES, UNIT_BYTES};
use super::{Cache, Object, Pool};

impl Pool {
    fn is_counted(&self) -> bool {
        self.layout.head_bytes == COUNT_BYTES
    }

    /// Sets the refcount of a new object to one word.
    ///
    /// # Safety
    /// The object was allocated to the caller, and no other thread knows it.
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

    /// The stored count: parts less one.
    ///
    /// # Safety
    /// The object exists, and the caller holds its shard's lock.
    unsafe fn count(&self, object: Object) -> u32 {
        // SAFETY: it was written when the object was allocated, and changes only under the lock.
        let bytes = unsafe { self.memory.bytes(Pool::count_at(object), COUNT_BYTES) };
        u32::from_ne_bytes(bytes.try_into().expect("a count has COUNT_BYTES bytes"))
    }

    /// Sets the stored count.
    ///
    /// # Safety
    /// The object exists, and the caller holds its shard's lock or no other thread knows the
    /// object.
    unsafe fn set_count(&self, object: Object, count: u32) {
        // SAFETY: no reader's bytes overlap the count, and no other thread accesses it.
        unsafe { self.memory.write(Pool::count_at(object), &count.to_ne_bytes()) };
    }

    /// The number of parts in an object of a pool with refcounts.
    ///
    /// # Safety
    /// As for [`Pool::bytes`].
    pub unsafe fn parts(&self, object: Object, _pinned: &HazardGuard<'_>) -> u64 {
        let shard = &self.shards[self.layout.shard(object.place()) as usize];
        // SAFETY: the object is pinned, and this is its shard's lock.
        shard.with(|_| u64::from(unsafe { self.count(object) }) + 1)
    }

    /// An object's bytes, valid while the caller has a part in it.
    ///
    /// # Safety
    /// The caller has a part in the object for as long as the bytes are used.
    pub unsafe fn bytes_of_part(&self, object: Object) -> &[u8] {
        // SAFETY: it was written before any thread had a part in it, and the caller's part keeps
        // it.
        unsafe {
            self.memory.bytes(self.layout.start(object.place()), self.layout.object_bytes(object))
        }
    }

    /// Adds a part to an object in which the caller has one.
    ///
    /// # Safety
    /// The caller has a part in the object, and the pool has refcounts. The count cannot overflow,
    /// since there are few parts.
    pub(super) unsafe fn add_part(&self, object: Object) {
        let shard = &self.shards[self.layout.shard(object.place()) as usize];
        shard.with(|shard| {
            // SAFETY: the caller's part keeps the object, and this is its shard's lock.
            unsafe { self.set_count(object, self.count(object) + 1) };
            shard.joined(object);
        });
    }

    /// Takes a part in the object that the guard pins by a block's word. Returns that word with the
    /// mark; `None` if the word refers to another object by now, or the refcount is at its maximum.
    ///
    /// # Safety
    /// As for [`Pool::bytes`]; the guard pins the word of `block` in `entries`.
    pub unsafe fn join(
        &self,
        entries: &BlockTable,
        block: u64,
        guard: &HazardGuard<'_>,
    ) -> Option<Word> {
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
            // SAFETY: the object is pinned, and this is its shard's lock.
            let count = unsafe { self.count(object) }.checked_add(1)?;
            // SAFETY: as above.
            unsafe { self.set_count(object, count) };
            shard.joined(object);
            Some(word)
        })
    }
}

impl Cache {
    /// Gives up a part of an object whose words are marked as shared. Giving up the last part
    /// retires the object; returns whether it was the last.
    ///
    /// # Safety
    /// The object comes from this pool. The caller has a part in it, or has just taken out a word
    /// of it that was marked as shared. That part is given up once.
    pub unsafe fn give_up(&mut self, object: Object) -> bool {
        let pool = &*self.pool;
        let is_last = pool.shards[pool.layout.shard(object.place()) as usize].with(|shard| {
            // SAFETY: the caller's part keeps the object, and this is its shard's lock.
            let Some(count) = unsafe { pool.count(object) }.checked_sub(1) else { return true };
            // SAFETY: as above.
            unsafe { pool.set_count(object, count) };
            shard.left(object);
            false
        });
        if is_last {
            // SAFETY: no other part is left: no word refers to the object, and no thread can join.
            unsafe { self.retire(object) };
        }
        is_last
    }
}

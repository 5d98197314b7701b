//! The cache of objects in a directory: chunks of a fixed length, each with a checksum. It survives
//! restarts, and is bounded; CLOCK chooses what is evicted.
//!
//! Objects never change, so a chunk is valid as long as its checksum is right. A damaged or missing
//! chunk is read from the object store again. Nothing is synced: after a power cut, chunks whose
//! checksums are wrong are missing.
//!
//! | file | contents |
//! | --- | --- |
//! | `chunks` | slot n at n * 32 KiB: a chunk of an object |
//! | `index` | entry n at n * 64: the chunk that slot n has, and checksums of chunk and entry |
//! | `lock` | locked by the process that uses the directory |
#![allow(clippy::disallowed_types)] // A read of a file takes longer than a lock.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use blockyard_store::{LockOwner, StoreError};
use blockyard_volume_format::bytes::{crc, put_u32, put_u64, u32_at, u64_at};
use blockyard_volume_format::object::sums::CHUNK_BYTES;
use blockyard_volume_format::object::{ObjectId, ObjectKind};

/// Length of an entry of the index in bytes.
const ENTRY_BYTES: usize = 64;

/// A chunk of an object.
type Key = (ObjectId, u32);

/// A slot that has a chunk.
#[derive(Clone, Copy, Debug)]
struct Slot {
    key: Key,
    len: u32,
    crc: u64,
    /// Whether the chunk was read since the hand of the clock has passed.
    is_used: bool,
}

#[derive(Debug)]
struct Index {
    /// The slots that were used so far. There are more when a chunk needs one.
    slots: Vec<Option<Slot>>,
    /// Most slots.
    slots_max: usize,
    by_key: HashMap<Key, usize>,
    /// The next slot that the clock looks at.
    hand: usize,
    hits: u64,
    misses: u64,
}

/// A cache in a directory that this process has exclusively.
#[derive(Debug)]
pub(crate) struct ObjectCache {
    chunks: File,
    index_file: File,
    index: Mutex<Index>,
    /// The mark of the pool whose objects these are.
    pool: u64,
    _lock: File,
}

impl ObjectCache {
    /// Opens the cache of a pool in a directory, which is made if there is none.
    pub(crate) fn open(path: &Path, bytes: u64, pool: u64) -> Result<ObjectCache, StoreError> {
        let failed = |doing: &str| {
            let doing = format!("cannot {doing} the cache `{}`", path.display());
            move |source| StoreError::Io { doing, source }
        };
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(failed("make"))?;
        let open = |name: &str| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            options.open(path.join(name)).map_err(failed("open"))
        };
        let lock = open("lock")?;
        lock.try_lock().map_err(|_| StoreError::InUse {
            path: PathBuf::from(path),
            lock_owner: LockOwner::read(&path.join("lock")),
        })?;
        LockOwner::this(None).write(&lock).map_err(failed("lock"))?;
        let slots = usize::try_from(bytes / CHUNK_BYTES as u64).unwrap_or(usize::MAX).max(1);
        let (chunks, index_file) = (open("chunks")?, open("index")?);
        let index = read_index(&index_file, slots, pool).map_err(failed("read"))?;
        // A smaller cache than before gives space back.
        let keep = |file: &File, most: u64| match file.metadata()?.len() > most {
            true => file.set_len(most),
            false => Ok(()),
        };
        keep(&chunks, slots as u64 * CHUNK_BYTES as u64).map_err(failed("shorten"))?;
        keep(&index_file, slots as u64 * ENTRY_BYTES as u64).map_err(failed("shorten"))?;
        Ok(ObjectCache { chunks, index_file, index: Mutex::new(index), pool, _lock: lock })
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a range of an object, if all of it is there and intact.
    pub(crate) fn read(&self, object: ObjectId, at: u32, into: &mut [u8]) -> bool {
        let (mut at, mut rest) = (at as usize, into);
        let mut chunk = vec![0; CHUNK_BYTES];
        while !rest.is_empty() {
            let (number, from) = (at / CHUNK_BYTES, at % CHUNK_BYTES);
            let len = rest.len().min(CHUNK_BYTES - from);
            let Some(found) = self.chunk((object, number as u32), &mut chunk) else { return false };
            if found < from + len {
                return false;
            }
            rest[..len].copy_from_slice(&chunk[from..from + len]);
            rest = &mut rest[len..];
            at += len;
        }
        true
    }

    /// Reads a chunk; returns its length if it is there and intact.
    fn chunk(&self, key: Key, into: &mut [u8]) -> Option<usize> {
        let mut index = self.index();
        let Some(number) = index.by_key.get(&key).copied() else {
            index.misses += 1;
            return None;
        };
        let slot = index.slots[number].as_mut()?;
        slot.is_used = true;
        let Slot { len, crc: want, .. } = *slot;
        index.hits += 1;
        drop(index);
        let bytes = &mut into[..len as usize];
        let read = self.chunks.read_exact_at(bytes, (number * CHUNK_BYTES) as u64);
        // Another chunk may have the slot by now, or its bytes were not on disk at a power cut.
        if read.is_ok() && crc(bytes) == want {
            return Some(len as usize);
        }
        let mut index = self.index();
        if index.slots[number].is_some_and(|slot| slot.key == key && slot.crc == want) {
            index.slots[number] = None;
            index.by_key.remove(&key);
        }
        None
    }

    /// Adds a part of an object, which begins at the chunk `first`. Its last chunk may be short if
    /// the object ends there.
    pub(crate) fn insert(&self, object: ObjectId, first: u32, bytes: &[u8]) {
        for (number, chunk) in (first..).zip(bytes.chunks(CHUNK_BYTES)) {
            if let Err(error) = self.insert_chunk((object, number), chunk) {
                tracing::debug!("the cache cannot be written: {error}");
                return;
            }
        }
    }

    fn insert_chunk(&self, key: Key, bytes: &[u8]) -> io::Result<()> {
        let slot = Slot { key, len: bytes.len() as u32, crc: crc(bytes), is_used: false };
        let mut index = self.index();
        if let Some(number) = index.by_key.get(&key).copied()
            && index.slots[number].is_some_and(|old| (old.len, old.crc) == (slot.len, slot.crc))
        {
            return Ok(());
        }
        let number = index.evict();
        if let Some(old) = index.by_key.insert(key, number) {
            index.slots[old] = None;
        }
        index.slots[number] = Some(slot);
        drop(index);
        // A reader that comes first finds another checksum, and reads from the object store.
        self.chunks.write_all_at(bytes, (number * CHUNK_BYTES) as u64)?;
        self.index_file.write_all_at(&print(&slot, self.pool), (number * ENTRY_BYTES) as u64)
    }

    /// How many chunks were found and not found.
    pub(crate) fn hits_and_misses(&self) -> (u64, u64) {
        let index = self.index();
        (index.hits, index.misses)
    }
}

impl Index {
    /// A slot without a chunk: the clock passes slots that were read since it passed them before.
    fn evict(&mut self) -> usize {
        if self.slots.len() < self.slots_max {
            self.slots.push(None);
            return self.slots.len() - 1;
        }
        loop {
            let number = self.hand;
            self.hand = (number + 1) % self.slots.len();
            match &mut self.slots[number] {
                Some(slot) if slot.is_used => slot.is_used = false,
                Some(slot) => {
                    let key = slot.key;
                    if self.by_key.get(&key) == Some(&number) {
                        self.by_key.remove(&key);
                    }
                    self.slots[number] = None;
                    return number;
                }
                None => return number,
            }
        }
    }
}

fn print(slot: &Slot, pool: u64) -> [u8; ENTRY_BYTES] {
    let mut bytes = [0; ENTRY_BYTES];
    let (object, chunk) = slot.key;
    put_u64(&mut bytes, 8, pool);
    put_u32(&mut bytes, 16, object.kind.code().into());
    put_u32(&mut bytes, 20, chunk);
    put_u64(&mut bytes, 24, object.epoch);
    put_u64(&mut bytes, 32, object.number);
    put_u32(&mut bytes, 40, slot.len);
    put_u64(&mut bytes, 48, slot.crc);
    let crc = crc(&bytes[8..]);
    put_u64(&mut bytes, 0, crc);
    bytes
}

fn parse(bytes: &[u8], pool: u64) -> Option<Slot> {
    let is_ours = u64_at(bytes, 0) == crc(&bytes[8..]) && u64_at(bytes, 8) == pool;
    let code = u32_at(bytes, 16);
    let kind = [ObjectKind::Batch, ObjectKind::Segment]
        .into_iter()
        .find(|it| u32::from(it.code()) == code)?;
    let object = ObjectId { kind, epoch: u64_at(bytes, 24), number: u64_at(bytes, 32) };
    let (chunk, len, crc) = (u32_at(bytes, 20), u32_at(bytes, 40), u64_at(bytes, 48));
    let slot = Slot { key: (object, chunk), len, crc, is_used: false };
    (is_ours && len as usize <= CHUNK_BYTES).then_some(slot)
}

fn read_index(file: &File, slots: usize, pool: u64) -> io::Result<Index> {
    let mut bytes = Vec::new();
    file.take((slots * ENTRY_BYTES) as u64).read_to_end(&mut bytes)?;
    let mut found: Vec<Option<Slot>> =
        bytes.chunks_exact(ENTRY_BYTES).map(|entry| parse(entry, pool)).collect();
    let mut by_key = HashMap::new();
    for (number, slot) in found.iter_mut().enumerate() {
        if let Some(Slot { key, .. }) = *slot
            && by_key.insert(key, number).is_some()
        {
            // The chunk was written to another slot before: either entry may be the old one, and
            // the checksum of a wrong one does not fit.
            *slot = None;
            by_key.remove(&key);
        }
    }
    Ok(Index { slots: found, slots_max: slots, by_key, hand: 0, hits: 0, misses: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(number: u64) -> ObjectId {
        ObjectId { kind: ObjectKind::Segment, epoch: 1, number }
    }

    fn bytes(number: u8, len: usize) -> Vec<u8> {
        (0..len).map(|at| number ^ (at / 7) as u8).collect()
    }

    fn has(cache: &ObjectCache, number: u64, len: usize) -> bool {
        let mut into = vec![0; len];
        let found = cache.read(object(number), 0, &mut into);
        assert!(!found || into == bytes(number as u8, len), "wrong data of {number}");
        found
    }

    const CHUNK: u64 = CHUNK_BYTES as u64;

    #[test]
    fn chunks_survive_a_restart_and_belong_to_one_pool() {
        let place = tempfile::tempdir().unwrap();
        let open = |pool, slots| ObjectCache::open(place.path(), slots * CHUNK, pool).unwrap();
        let cache = open(1, 8);
        let error = ObjectCache::open(place.path(), CHUNK, 1).unwrap_err().to_string();
        assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        let len = 2 * CHUNK_BYTES + 100;
        cache.insert(object(3), 0, &bytes(3, len));
        assert!(has(&cache, 3, len) && has(&cache, 3, 5) && !has(&cache, 4, 5));
        assert!(!has(&cache, 3, len + 1), "the object ends before");
        drop(cache);
        assert!(!has(&open(2, 8), 3, len));
        let cache = open(1, 8);
        assert!(has(&cache, 3, len));
        drop(cache);
        let small = open(1, 1);
        assert!(has(&small, 3, CHUNK_BYTES) && !has(&small, 3, len));
    }

    /// The bug: the index had an entry for each chunk of the greatest length at once, and a great
    /// length that is valid ended the daemon for want of memory.
    #[test]
    fn memory_grows_with_the_chunks_and_not_with_the_greatest_length() {
        let place = tempfile::tempdir().unwrap();
        let cache = ObjectCache::open(place.path(), 1 << 50, 1).unwrap();
        cache.insert(object(1), 0, &bytes(1, 3 * CHUNK_BYTES));
        assert!(has(&cache, 1, 3 * CHUNK_BYTES));
        assert_eq!(cache.index().slots.len(), 3);
        assert!(cache.index().slots.capacity() < 1000);
        drop(cache);
        let cache = ObjectCache::open(place.path(), 1 << 50, 1).unwrap();
        assert!(has(&cache, 1, 3 * CHUNK_BYTES));
        assert_eq!(cache.index().slots.len(), 3);
    }

    #[test]
    fn a_damaged_chunk_and_a_damaged_entry_are_missing() {
        let place = tempfile::tempdir().unwrap();
        for (file, at) in [("chunks", 5), ("index", 20)] {
            let cache = ObjectCache::open(place.path(), 4 * CHUNK, 1).unwrap();
            cache.insert(object(1), 0, &bytes(1, 1000));
            drop(cache);
            let open = OpenOptions::new().write(true).open(place.path().join(file)).unwrap();
            open.write_all_at(&[0xee], at).unwrap();
            let cache = ObjectCache::open(place.path(), 4 * CHUNK, 1).unwrap();
            assert!(!has(&cache, 1, 1000), "{file}");
            cache.insert(object(1), 0, &bytes(1, 1000));
            assert!(has(&cache, 1, 1000));
        }
    }

    #[test]
    fn the_clock_keeps_what_is_read() {
        let place = tempfile::tempdir().unwrap();
        let cache = ObjectCache::open(place.path(), 4 * CHUNK, 1).unwrap();
        cache.insert(object(0), 0, &bytes(0, 10));
        for number in 1..50 {
            assert!(has(&cache, 0, 10), "{number}");
            cache.insert(object(number), 0, &bytes(number as u8, 10));
        }
        let left = (1..50).filter(|number| has(&cache, *number, 10)).count();
        assert_eq!(left, 3);
    }

    /// Random insertions and reads never return wrong bytes.
    #[test]
    fn chunks_are_those_of_their_objects() {
        let place = tempfile::tempdir().unwrap();
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..4 {
            let cache = ObjectCache::open(place.path(), 6 * CHUNK, 1).unwrap();
            for _ in 0..100 {
                let number = random.u64(0..5);
                let len = CHUNK_BYTES * (1 + number as usize) / 2;
                if random.bool() {
                    cache.insert(object(number), 0, &bytes(number as u8, len));
                }
                has(&cache, number, len);
            }
        }
    }
}

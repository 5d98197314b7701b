//! A test fixture: a pool without threads, which tests drive step by step.
#![allow(clippy::disallowed_types, clippy::unwrap_used)] // For tests.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use blockyard_store::PoolStore;
use blockyard_volume_format::PAGE_BYTES;
use blockyard_volume_format::catalogue::{Change, VolumeMeta};

use crate::Compression;
use crate::checkpoint;
use crate::committer::{Committer, Turn};
use crate::encryption::{Secret, VolumeKey};
use crate::frozen::{Frozen, Marks};
use crate::handle::{Outcome, VolumeHandle};
use crate::map::Leaf;
use crate::options::Options;
use crate::pool::Pool;

pub(crate) const BLOCK: u64 = 4096;

/// Number of blocks that fill a segment together with the header of their group.
pub(crate) const FULL: u64 = 14;

/// A pool of short segments without threads, with one volume handle.
pub(crate) struct SteppedPool {
    path: PathBuf,
    pub(crate) pool: Arc<Pool<PoolStore>>,
    pub(crate) committer: Committer<PoolStore>,
    pub(crate) handle: VolumeHandle<PoolStore>,
}

/// Makes a volume.
fn create(
    pool: &Arc<Pool<PoolStore>>,
    committer: &mut Committer<PoolStore>,
    name: &str,
    (blocks, reserved_bytes): (u64, u64),
) {
    let meta = VolumeMeta { blocks, reserved_bytes, ..meta(name) };
    change(pool, committer, Change::Create(meta));
}

/// A volume of one block without a reservation.
fn meta(name: &str) -> VolumeMeta {
    VolumeMeta {
        id: 0,
        name: name.to_owned(),
        is_snapshot: false,
        guid: 0,
        reserved_bytes: 0,
        created: 0,
        key: 0,
        origin: 0,
        block_bytes: BLOCK as u32,
        blocks: 1,
    }
}

/// Applies a catalogue change.
fn change(pool: &Arc<Pool<PoolStore>>, committer: &mut Committer<PoolStore>, change: Change) {
    let mut answer = pool.submit_change(change);
    while committer.turn() == Turn::Worked {}
    assert!(answer.take().unwrap().status.is_ok());
}

impl SteppedPool {
    pub(crate) fn new(name: &str) -> SteppedPool {
        SteppedPool::of(name, 60, 60)
    }

    /// Makes a pool with `made` segments, which can grow to `segments_max`.
    pub(crate) fn of(name: &str, made: usize, segments_max: usize) -> SteppedPool {
        SteppedPool::by(name, made, Options { segments_max, ..Options::default() })
    }

    /// Makes a pool by options; the segment length and the memory are the fixture's.
    pub(crate) fn by(name: &str, made: usize, options: Options) -> SteppedPool {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("blockyard-{name}-{process}-{next}"));
        // A killed process with the same ID may have left this directory.
        _ = std::fs::remove_dir_all(&path);
        let options = Options { segment_bytes: 64 << 10, memory_bytes: 256 << 10, ..options };
        let directory = PoolStore::take(&path).unwrap();
        let (pool, mut committer) = Pool::open(directory, options).unwrap();
        while pool.segments().counts().all < made && pool.segments().grow() {}
        create(&pool, &mut committer, "v", (14 * FULL, 0));
        let handle =
            VolumeHandle::open(&pool, pool.find("v").unwrap(), Compression::None, 8).unwrap();
        SteppedPool { path, pool, committer, handle }
    }

    /// Makes a volume of this size with a reservation of all of it.
    pub(crate) fn reserve(&mut self, name: &str, bytes: u64) {
        create(&self.pool, &mut self.committer, name, (bytes / BLOCK, bytes));
    }

    /// Makes a volume of this number of blocks; later writes go to it.
    pub(crate) fn take(&mut self, name: &str, blocks: u64) {
        create(&self.pool, &mut self.committer, name, (blocks, 0));
        let live = self.pool.find(name).unwrap();
        self.handle = VolumeHandle::open(&self.pool, live, Compression::None, 8).unwrap();
    }

    /// Makes an encrypted volume of this number of blocks; later writes go to it.
    pub(crate) fn encrypt(&mut self, name: &str, blocks: u64) {
        let secret = Secret::Key(vec![7; 32].into());
        let slot = VolumeKey::draw(9).unwrap().wrap(&secret).unwrap();
        let meta = VolumeMeta { blocks, key: slot.id, ..meta(name) };
        self.change(Change::Several(vec![Change::PutKey(slot), Change::Create(meta)]));
        self.pool.unlock(name, &secret).unwrap();
        let live = self.pool.find(name).unwrap();
        self.handle = VolumeHandle::open(&self.pool, live, Compression::None, 8).unwrap();
    }

    /// Makes a snapshot.
    pub(crate) fn snapshot(&mut self, of: &str, name: &str) {
        let meta = self.pool.find(of).unwrap().listed();
        let (origin, name, is_snapshot) = (meta.id, name.to_owned(), true);
        self.change(Change::Copy(VolumeMeta { origin, name, is_snapshot, ..meta }));
    }

    /// Applies a catalogue change.
    pub(crate) fn change(&mut self, what: Change) {
        change(&self.pool, &mut self.committer, what);
    }

    /// Overwrites a leaf on disk with damage, and evicts it from memory.
    pub(crate) fn rot(&self, leaf: &Leaf) {
        let mut page = self.pool.memory().take_beyond(PAGE_BYTES);
        page.fill(0xff);
        self.pool.segments().write(leaf.location().unwrap().address(), &[&page]).unwrap();
        while leaf.is_resident() {
            leaf.evict();
        }
    }

    /// Starts a request, and waits until it has completed.
    pub(crate) fn submit(&mut self, begin: impl FnOnce(&mut VolumeHandle<PoolStore>) -> Outcome) {
        assert!(begin(&mut self.handle) == Outcome::Taken);
        while self.committer.turn() == Turn::Worked {}
        assert!(self.handle.take().unwrap().status.is_ok());
    }

    pub(crate) fn write(&mut self, first: u64, count: u64) {
        let fill = |_: usize, into: &mut [u8]| into.fill(first as u8);
        let (at, len) = (first * BLOCK, (count * BLOCK) as usize);
        self.submit(|handle| handle.write(at, len, &fill, 1, true));
    }

    /// Discards blocks, not durably.
    pub(crate) fn discard(&mut self, first: u64, count: u64) {
        self.submit(|handle| handle.zero(first * BLOCK, count * BLOCK, 1, false));
    }

    /// The segment that contains a block.
    pub(crate) fn segment(&self, block: u64) -> u32 {
        let live = self.pool.find("v").unwrap();
        let entry = live.map.with(0, |span| span.entry(block as u32)).unwrap();
        self.pool.segments().split(entry.address()).0
    }

    pub(crate) fn checkpoint(&mut self) -> (Frozen, Marks) {
        let frozen = self.committer.freeze();
        let marks = checkpoint::run(&self.pool, &frozen).unwrap();
        checkpoint::repeat(&self.pool);
        (frozen, marks)
    }
}

impl Drop for SteppedPool {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.path);
    }
}

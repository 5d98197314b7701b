//! Writeback: moves blocks to the backing file, compressed as they are.
//!
//! A batch of blocks is marked, copied, written and synced. Then each word is exchanged for the
//! place in the file, if its mark is still set: a client that wrote the block meanwhile has cleared
//! the mark. Memory is freed only after the sync. If the kernel's own writeback failed later, the
//! data would be lost and no caller could be told.

use std::io;

use blockyard_sync::block_table::{Kind, PLACE_BYTES, Word};
use blockyard_sync::hazard_pointers::Pinned;

use super::Selection;
use crate::backing::{Backing, FreeSpace};
use crate::blocks::{Blocks, Workspace};
use crate::counters::Count;
use crate::error::RamError;
use crate::form::said_bytes;
use crate::stats::WrittenBack;
use crate::store::New;

/// Maximum bytes of a batch: written and synced together.
const BATCH_BYTES: usize = 1 << 20;

/// Why a block stays in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Skip {
    Written,
    Used,
    Limit,
    NoPlace,
}

impl WrittenBack {
    fn skip(&mut self, why: Skip) {
        *match why {
            Skip::Written => &mut self.skipped_written,
            Skip::Used => &mut self.skipped_used,
            Skip::Limit => &mut self.skipped_limit,
            Skip::NoPlace => &mut self.skipped_no_place,
        } += 1;
    }
}

/// Blocks that are being written to the file.
#[derive(Default)]
struct WritebackBatch {
    blocks: Vec<Copied>,
    bytes: Vec<u8>,
}

/// A block of a batch.
struct Copied {
    block: u64,
    place: u64,
    /// Offset and length of the block's bytes in the batch.
    at: usize,
    len: usize,
}

impl Blocks {
    /// Writes back the selected blocks until none is left or `limit_bytes` have been written.
    pub(crate) fn write_back(
        &self,
        selection: &Selection,
        limit_bytes: u64,
    ) -> Result<WrittenBack, RamError> {
        let Some(backing) = &self.form.backing else {
            let verb = "write blocks back";
            return Err(RamError::Lacks { verb, field: "backing", form: "FILE" });
        };
        let (mut workspace, mut room) = (self.workspace()?, self.room());
        let (mut done, mut batch) = (WrittenBack::default(), WritebackBatch::default());
        let (mut planned, mut left) = (0, limit_bytes);
        for block in self.targets(selection)? {
            if planned >= selection.blocks_max {
                break;
            }
            if batch.bytes.len() >= BATCH_BYTES {
                self.commit(backing, &mut workspace, &mut batch, &mut done)?;
            }
            match self.copy(&mut workspace, block, selection, left, &mut room, &mut batch) {
                Ok(len) => {
                    planned += 1;
                    // The write wears the medium even if the block is not moved in the end.
                    left = left.saturating_sub(len as u64);
                }
                Err(why) => done.skip(why),
            }
        }
        self.commit(backing, &mut workspace, &mut batch, &mut done)?;
        workspace.access.reclaim();
        Ok(done)
    }

    /// The free space of the file: not referred to by a word, nor pinned by a reader.
    fn room(&self) -> Places {
        let words = (0..self.store.blocks()).map(|block| self.store.word(block));
        let taken = words.filter(|word| word.kind() == Kind::Backing);
        let room =
            FreeSpace::outside(taken.map(|word| (word.place(), self.form.stored_bytes(word))));
        // Ordering: scan the pins after the words. A reader pins a place before it leaves its word.
        let mut pinned = Pinned::default();
        self.store.pool().pins().look(&mut pinned);
        Places { room, pinned, longest: self.form.stored_bytes_max() }
    }

    /// Marks a block and copies it into the batch, unless it is no longer selected or too long.
    /// Returns its length.
    fn copy(
        &self,
        workspace: &mut Workspace,
        block: u64,
        selection: &Selection,
        left: u64,
        room: &mut Places,
        batch: &mut WritebackBatch,
    ) -> Result<usize, Skip> {
        let word = self.store.word(block);
        if word.kind() != Kind::Object || word.is_locked() {
            return Err(Skip::Written);
        }
        if !selection.takes(word) {
            return Err(Skip::Used);
        }
        if self.form.stored_bytes(word) as u64 > left {
            return Err(Skip::Limit);
        }
        if !workspace.access.mark(block, word, |word| word.with_under_writeback(true)) {
            return Err(self.overtaken_by(block, word));
        }
        let at = batch.bytes.len();
        let len = workspace.access.peek(block, |word, stored| {
            let ours = word.is_under_writeback() && word.kind() == Kind::Object;
            ours.then(|| {
                batch.bytes.extend_from_slice(stored);
                stored.len()
            })
        });
        let Some(len) = len else { return Err(Skip::Written) };
        let Some(place) = room.take(len) else {
            batch.bytes.truncate(at);
            self.unmark(workspace, block);
            return Err(Skip::NoPlace);
        };
        batch.blocks.push(Copied { block, place, at, len });
        Ok(len)
    }

    /// Why a block's word changed: a reader changes only its age.
    fn overtaken_by(&self, block: u64, was: Word) -> Skip {
        let read = self.store.word(block).with_age(was.age()) == was;
        if read { Skip::Used } else { Skip::Written }
    }

    /// Writes the batch and then exchanges the words. If the write or sync fails, all blocks stay
    /// in memory.
    fn commit(
        &self,
        backing: &Backing,
        workspace: &mut Workspace,
        batch: &mut WritebackBatch,
        done: &mut WrittenBack,
    ) -> Result<(), RamError> {
        if let Err(source) = batch.write(backing) {
            for copied in batch.blocks.drain(..) {
                self.unmark(workspace, copied.block);
            }
            let path = backing.path().display().to_string();
            return Err(RamError::WriteBack { path, done: *done, source });
        }
        for Copied { block, place, len, .. } in batch.blocks.drain(..) {
            let (mut made, mut was) = (Word::NOTHING, Word::NOTHING);
            let shown = workspace.access.remake(block, |word, stored, maker| {
                was = word;
                let ours = word.is_under_writeback() && word.kind() == Kind::Object;
                if !ours || stored.len() != len {
                    return Ok(None);
                }
                let there = Word::backing(place, said_bytes(len)).with_flags_of(word);
                made = there.with_under_writeback(false);
                maker.make(New::Word(made)).map(Some)
            });
            if let Some(old) = shown.expect("a place in the file takes no memory") {
                self.form.replaced(&workspace.tally, old.word, made);
                workspace.tally.add(Count::BackedWrites, 1);
                done.blocks += 1;
                done.bytes += len as u64;
            } else {
                // The block stays in memory until the next writeback.
                let is_ours = was.is_under_writeback() && was.kind() == Kind::Object;
                done.skip(if is_ours { self.overtaken_by(block, was) } else { Skip::Written });
                self.unmark(workspace, block);
            }
        }
        batch.bytes.clear();
        Ok(())
    }

    /// Clears the writeback mark, unless a write has cleared it. If a client is writing a part of
    /// the block, this waits for that write, which also clears the mark if it succeeds.
    fn unmark(&self, workspace: &mut Workspace, block: u64) {
        loop {
            let word = self.store.settled_word(block);
            let unmark = |word: Word| word.with_under_writeback(false);
            if !word.is_under_writeback() || workspace.access.mark(block, word, unmark) {
                return;
            }
        }
    }
}

impl WritebackBatch {
    /// Writes each contiguous run of the file with one write, then syncs the file.
    fn write(&self, backing: &Backing) -> io::Result<()> {
        let mut run: Vec<u8> = Vec::with_capacity(self.bytes.len());
        let mut start = 0;
        for Copied { place, at, len, .. } in &self.blocks {
            let end = start + run.len() as u64;
            let gap = (place * PLACE_BYTES).checked_sub(end).filter(|gap| *gap < 64);
            match gap {
                Some(gap) if !run.is_empty() => run.resize(run.len() + gap as usize, 0),
                _ => {
                    if !run.is_empty() {
                        backing.write(start / PLACE_BYTES, &run)?;
                    }
                    run.clear();
                    start = place * PLACE_BYTES;
                }
            }
            run.extend_from_slice(&self.bytes[*at..at + len]);
        }
        if run.is_empty() {
            return Ok(());
        }
        backing.write(start / PLACE_BYTES, &run)?;
        backing.sync()
    }
}

/// Free space of the file that no reader has pinned.
struct Places {
    room: FreeSpace,
    pinned: Pinned,
    longest: usize,
}

impl Places {
    fn take(&mut self, len: usize) -> Option<u64> {
        loop {
            let place = self.room.take(len)?;
            // A pin has the start of a stored block, not its end.
            let before = (self.longest as u64).div_ceil(PLACE_BYTES);
            let starts = place.saturating_sub(before)..place + (len as u64).div_ceil(PLACE_BYTES);
            let mut starts = starts.map(|start| Word::backing(start, 1));
            if !starts.any(|word| self.pinned.contains(word)) {
                return Some(place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::background::Which;
    use crate::config::RamConfig;

    const BLOCK: usize = 4096;

    /// Test fixture: blocks with a backing file. The first 16 blocks hold noise and have age 1.
    struct Bench {
        blocks: Blocks,
        workspace: Workspace,
        path: PathBuf,
    }

    impl Bench {
        fn new(name: &str) -> Bench {
            let name = format!("blockyard-writeback-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let backing = Some(path.clone());
            let config = RamConfig { size: 1 << 20, backing, ..RamConfig::default() };
            let blocks = Blocks::new(&config).unwrap();
            let workspace = blocks.workspace().unwrap();
            let mut bench = Bench { blocks, workspace, path };
            (0..16).for_each(|block| bench.write(block));
            bench.blocks.grow_older();
            bench
        }

        fn write(&mut self, block: u64) {
            fastrand::Rng::with_seed(block).fill(self.workspace.block());
            assert!(self.blocks.write(&mut self.workspace, block).is_ok());
        }

        /// Writes back two blocks; `meanwhile` runs after their copy and before the exchange of
        /// their words.
        fn write_back(&mut self, meanwhile: impl FnOnce(&mut Bench)) -> WrittenBack {
            let (mut done, mut batch) = (WrittenBack::default(), WritebackBatch::default());
            let mut room = self.blocks.room();
            for block in [0, 1] {
                let copied = self.copy(block, &IDLE, u64::MAX, &mut room, &mut batch);
                assert_eq!(copied, Ok(BLOCK));
            }
            meanwhile(self);
            let Bench { blocks, workspace, .. } = self;
            let backing = blocks.form.backing.as_ref().unwrap();
            blocks.commit(backing, workspace, &mut batch, &mut done).unwrap();
            done
        }

        fn copy(
            &mut self,
            block: u64,
            selection: &Selection,
            left: u64,
            room: &mut Places,
            batch: &mut WritebackBatch,
        ) -> Result<usize, Skip> {
            self.blocks.copy(&mut self.workspace, block, selection, left, room, batch)
        }
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    const IDLE: Selection = Selection {
        which: Which::Idle,
        age: 1,
        threshold: 0,
        blocks_max: u64::MAX,
        priority: None,
    };

    #[test]
    fn a_block_that_is_written_meanwhile_stays_and_is_counted() {
        let mut bench = Bench::new("written");
        let none = WrittenBack::default();
        let done = bench.write_back(|bench| bench.write(0));
        assert_eq!(done, WrittenBack { blocks: 1, bytes: 4096, skipped_written: 1, ..none });
        let mut bench = Bench::new("discarded");
        let done = bench.write_back(|bench| {
            let Bench { blocks, workspace, .. } = bench;
            (0..2).for_each(|block| blocks.discard(workspace, block));
        });
        assert_eq!(done, WrittenBack { skipped_written: 2, ..none });
        // A block that was read still has the contents that were copied.
        let mut bench = Bench::new("read");
        let done = bench.write_back(|bench| {
            assert_eq!(bench.blocks.read_here(&mut bench.workspace, 1).map(<[u8]>::len), Ok(BLOCK));
        });
        assert_eq!(done, WrittenBack { blocks: 2, bytes: 8192, ..none });
    }

    #[test]
    fn a_block_that_writeback_skips_has_a_reason() {
        let mut bench = Bench::new("reasons");
        let (mut room, mut batch) = (bench.blocks.room(), WritebackBatch::default());
        bench.blocks.read_here(&mut bench.workspace, 3).unwrap();
        let Bench { blocks, workspace, .. } = &mut bench;
        blocks.discard(workspace, 4);
        for (block, left, why) in
            [(3, u64::MAX, Skip::Used), (4, u64::MAX, Skip::Written), (5, 4095, Skip::Limit)]
        {
            let copied = bench.copy(block, &IDLE, left, &mut room, &mut batch);
            assert_eq!(copied, Err(why), "block {block}");
        }
        // A file with no free place: even the last place is taken.
        room.room = FreeSpace::outside(std::iter::once((256, 1 << 40)));
        let copied = bench.copy(6, &IDLE, u64::MAX, &mut room, &mut batch);
        assert_eq!(copied, Err(Skip::NoPlace));
        assert!(!bench.blocks.store.word(6).is_under_writeback());
        assert!(batch.blocks.is_empty() && batch.bytes.is_empty());
        let mut done = WrittenBack::default();
        for why in [Skip::Written, Skip::Used, Skip::Used, Skip::Limit, Skip::NoPlace] {
            done.skip(why);
        }
        let counts = [done.skipped_written, done.skipped_used, done.skipped_limit];
        assert_eq!((counts, done.skipped_no_place), ([1, 2, 1], 1));
    }

    /// A slow reader has pinned a block's place in the file. Meanwhile the block is written, so
    /// that no word refers to the place, and other blocks are written back.
    #[test]
    fn place_is_not_reused_while_it_is_read() {
        let mut bench = Bench::new("place");
        assert_eq!(bench.write_back(|_| ()).blocks, 2);
        let taken = bench.blocks.store.word(0).place();
        let mut reader = bench.blocks.access().unwrap();
        reader.read(0, |word, _| {
            assert_eq!((word.kind(), word.place()), (Kind::Backing, taken));
            bench.write(0);
            let others = Selection { which: Which::Huge, blocks_max: 4, ..Selection::default() };
            assert_eq!(bench.blocks.write_back(&others, u64::MAX).unwrap().blocks, 4);
            for block in 0..16 {
                let word = bench.blocks.store.word(block);
                assert!(word.kind() != Kind::Backing || word.place() != taken, "block {block}");
            }
        });
        // After the reader has finished, the place is used again.
        assert!(bench.blocks.write_back(&Selection::default(), u64::MAX).unwrap().blocks > 4);
        let again = (0..16).map(|block| bench.blocks.store.word(block));
        let mut again = again.filter(|word| word.kind() == Kind::Backing);
        assert!(again.any(|word| word.place() == taken));
    }

    #[test]
    fn a_reader_is_distinguished_from_a_writer() {
        let mut bench = Bench::new("told");
        let was = bench.blocks.store.word(2);
        bench.blocks.read_here(&mut bench.workspace, 2).unwrap();
        assert_eq!(bench.blocks.overtaken_by(2, was), Skip::Used);
        bench.write(2);
        assert_eq!(bench.blocks.overtaken_by(2, was), Skip::Written);
    }
}

//! Writeback: blocks go to the backing file, compressed as they are.
//!
//! A batch of blocks is marked, copied, written and synced, and then each word is exchanged for the
//! place in the file if its mark is still there: whoever has written the block meanwhile has taken
//! it away. Memory is given back only for what the file has: an error that comes when the system
//! writes its cache out would have nobody to be told to later.

use std::io;

use blockyard_sync::entry_words::{Kind, PLACE_BYTES, Word};
use blockyard_sync::pins::Pinned;

use super::Selection;
use crate::backing::{Backing, Room};
use crate::blocks::{Blocks, Hand};
use crate::counters::Count;
use crate::error::RamError;
use crate::form::said_bytes;
use crate::store::New;

/// Bytes that are written and synced at once.
const BATCH_BYTES: usize = 1 << 20;

/// What a writeback has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBack {
    /// Blocks that are on the backing file now and were not before.
    pub blocks: u64,
    /// Bytes that they take there, and no longer in memory.
    pub bytes: u64,
}

/// Blocks on their way to the file.
#[derive(Default)]
struct Batch {
    blocks: Vec<Copied>,
    bytes: Vec<u8>,
}

/// One of them.
struct Copied {
    block: u64,
    place: u64,
    /// Where its bytes begin in the batch, and how many they are.
    at: usize,
    len: usize,
}

impl Blocks {
    /// Writes blocks back until all that are selected are, or `limit_bytes` have been written.
    pub(crate) fn write_back(
        &self,
        selection: &Selection,
        limit_bytes: u64,
    ) -> Result<WrittenBack, RamError> {
        let Some(backing) = &self.form.backing else {
            let wanted = "a device that was made with backing=FILE";
            return Err(RamError::invalid("backing", "none", wanted));
        };
        let (mut hand, mut room) = (self.hand()?, self.room());
        let (mut done, mut batch) = (WrittenBack::default(), Batch::default());
        let mut planned = 0;
        for block in self.targets(selection)? {
            if planned >= selection.blocks_max {
                break;
            }
            if batch.bytes.len() >= BATCH_BYTES {
                self.commit(backing, &mut hand, &mut batch, &mut done)?;
            }
            let left = limit_bytes - done.bytes - batch.bytes.len() as u64;
            if self.copy(&mut hand, block, selection, left, &mut room, &mut batch) {
                planned += 1;
            }
        }
        self.commit(backing, &mut hand, &mut batch, &mut done)?;
        hand.access.reclaim();
        Ok(done)
    }

    /// Room in the file beside all that a word refers to, or a reader has pinned.
    fn room(&self) -> Places {
        let words = (0..self.store.blocks()).map(|block| self.store.word(block));
        let taken = words.filter(|word| word.kind() == Kind::Backing);
        let room = Room::beside(taken.map(|word| (word.place(), self.form.stored_bytes(word))));
        // After the words: whoever reads a place that is in no word has pinned it before.
        let mut pinned = Pinned::default();
        self.store.pool().pins().look(&mut pinned);
        Places { room, pinned, longest: self.form.stored_bytes_max() }
    }

    /// Marks a block and copies it into the batch, if it is still selected and short enough.
    fn copy(
        &self,
        hand: &mut Hand,
        block: u64,
        selection: &Selection,
        left: u64,
        room: &mut Places,
        batch: &mut Batch,
    ) -> bool {
        let word = self.store.word(block);
        if !selection.takes(word) || self.form.stored_bytes(word) as u64 > left {
            return false;
        }
        if !hand.access.mark(block, word, |word| word.with_under_writeback(true)) {
            return false;
        }
        let at = batch.bytes.len();
        let len = hand.access.peek(block, |word, stored| {
            let ours = word.is_under_writeback() && word.kind() == Kind::Object;
            ours.then(|| {
                batch.bytes.extend_from_slice(stored);
                stored.len()
            })
        });
        let Some(len) = len else { return false };
        let Some(place) = room.take(len) else {
            batch.bytes.truncate(at);
            self.unmark(hand, block);
            return false;
        };
        batch.blocks.push(Copied { block, place, at, len });
        true
    }

    /// Writes the batch and shows it. If the file does not get it, all of it stays in memory.
    fn commit(
        &self,
        backing: &Backing,
        hand: &mut Hand,
        batch: &mut Batch,
        done: &mut WrittenBack,
    ) -> Result<(), RamError> {
        if let Err(source) = batch.write(backing) {
            for copied in batch.blocks.drain(..) {
                self.unmark(hand, copied.block);
            }
            let path = backing.path().display().to_string();
            return Err(RamError::WriteBack { path, done: *done, source });
        }
        for Copied { block, place, len, .. } in batch.blocks.drain(..) {
            let mut made = Word::NOTHING;
            let shown = hand.access.remake(block, |word, stored, maker| {
                let ours = word.is_under_writeback() && word.kind() == Kind::Object;
                if !ours || stored.len() != len {
                    return Ok(None);
                }
                let there = Word::backing(place, said_bytes(len)).with_flags_of(word);
                made = there.with_under_writeback(false);
                maker.make(New::Word(made)).map(Some)
            });
            if let Some(old) = shown.expect("a place in the file takes no memory") {
                self.form.replaced(&hand.tally, old.word, made);
                hand.tally.add(Count::BackedWrites, 1);
                done.blocks += 1;
                done.bytes += len as u64;
            } else {
                // A reader may have made it younger in between; it stays for the next time.
                self.unmark(hand, block);
            }
        }
        batch.bytes.clear();
        Ok(())
    }

    /// Takes the mark away, unless a writer has. Who writes a part of the block is waited for, and
    /// takes it away himself if he does not fail.
    fn unmark(&self, hand: &mut Hand, block: u64) {
        loop {
            let word = self.store.settled_word(block);
            let unmark = |word: Word| word.with_under_writeback(false);
            if !word.is_under_writeback() || hand.access.mark(block, word, unmark) {
                return;
            }
        }
    }
}

impl Batch {
    /// Writes what lies side by side in the file at once, and waits until the file has all of it.
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

/// Room in the file that no reader looks at.
struct Places {
    room: Room,
    pinned: Pinned,
    longest: usize,
}

impl Places {
    fn take(&mut self, len: usize) -> Option<u64> {
        loop {
            let place = self.room.take(len)?;
            // A pin says where something begins and not where it ends.
            let before = (self.longest as u64).div_ceil(PLACE_BYTES);
            let starts = place.saturating_sub(before)..place + (len as u64).div_ceil(PLACE_BYTES);
            let mut starts = starts.map(|start| Word::backing(start, 1));
            if !starts.any(|word| self.pinned.contains(word)) {
                return Some(place);
            }
        }
    }
}

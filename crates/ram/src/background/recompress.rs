//! Recompression: blocks are compressed anew by algorithms that take longer and make them smaller.
//!
//! As zram, the algorithms of higher priority than a block's own are tried in turn until one makes
//! it smaller by what the pool counts in. An object that several blocks refer to is recompressed
//! for the first of them, and the others take a part in what was made, if it is equal to theirs. If
//! some of them are not meant it is left alone: it would stay, beside what was made of it.

use std::collections::HashMap;

use blockyard_core::Status;
use blockyard_sync::entry_words::Word;

use super::{GRAIN_BYTES, Selection, Which};
use crate::blocks::{Blocks, Hand};
use crate::error::RamError;
use crate::form::{Packer, word_of};
use crate::pool::NoSpace;
use crate::store::New;

/// What a recompression has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompressed {
    /// Blocks that were tried.
    pub tried: u64,
    /// Blocks that are smaller now.
    pub replaced: u64,
    /// Bytes that they take less. An object that other blocks refer to is still there.
    pub saved_bytes: u64,
    /// Blocks that were found to be incompressible.
    pub incompressible: u64,
    /// Blocks for whose smaller form there was no memory beside the larger one.
    pub no_memory: u64,
    /// Blocks that share an object with others, not all of which were to be recompressed.
    pub skipped_shared: u64,
}

/// A recompression that goes on.
struct Work<'b> {
    blocks: &'b Blocks,
    selection: &'b Selection,
    hand: Hand,
    /// The algorithms that are tried, lowest priority first.
    packers: Vec<Packer>,
    /// Whether these are all that there are but the device's own.
    is_all: bool,
    /// By the places of objects that several blocks refer to: how many of these are to be
    /// recompressed; `None` if all are.
    meant: Option<HashMap<u64, u64>>,
    /// By the places of such objects: a block that has a smaller one now.
    remade: HashMap<u64, u64>,
    /// Bytes that were given back, less those that were taken.
    saved_bytes: i64,
    done: Recompressed,
}

impl Blocks {
    /// Compresses blocks by further codecs, where that makes them smaller.
    pub(crate) fn recompress(&self, selection: &Selection) -> Result<Recompressed, RamError> {
        let count = self.form.codecs.len();
        if count < 2 {
            let wanted = "a device that was made with recomp_algo";
            return Err(RamError::invalid("recomp_algo", "none", wanted));
        }
        let numbers = match selection.priority {
            None => 1..count,
            Some(priority) if (1..count).contains(&usize::from(priority)) => {
                usize::from(priority)..usize::from(priority) + 1
            }
            Some(priority) => {
                let wanted = format!("1 to {}, as many as the device was made with", count - 1);
                return Err(RamError::invalid("priority", priority, wanted));
            }
        };
        let is_all = numbers.len() == count - 1;
        let packers = numbers.map(|number| self.form.packer(number)).collect::<Result<_, _>>()?;
        let mut work = Work {
            blocks: self,
            selection,
            hand: self.hand()?,
            packers,
            is_all,
            meant: None,
            remade: HashMap::new(),
            saved_bytes: 0,
            done: Recompressed::default(),
        };
        let targets = self.targets(selection)?;
        work.meant = self.meant(selection, &targets)?;
        for block in targets {
            if work.done.replaced >= selection.blocks_max {
                break;
            }
            if work.share(block) {
                continue;
            }
            if work.is_in_part(block) {
                work.done.skipped_shared += 1;
                continue;
            }
            if work.recompress(block) {
                continue;
            }
            // At the limit there may be room, but not where it is wanted.
            let tried = work.done.tried;
            if !work.hand.access.make_room() || !work.recompress(block) {
                work.done.no_memory += 1;
            }
            work.done.tried = tried;
        }
        work.hand.access.reclaim();
        // Less than none, if the others that share an object were not replaced.
        work.done.saved_bytes = u64::try_from(work.saved_bytes).unwrap_or(0);
        Ok(work.done)
    }
}

impl Blocks {
    /// How many of the blocks that share each object are targets; `None` if that is all of them.
    /// All words of an object say how long it is, and each how old it is and what was tried.
    fn meant(
        &self,
        selection: &Selection,
        targets: &[u64],
    ) -> Result<Option<HashMap<u64, u64>>, RamError> {
        let takes_all = matches!(selection.which, Which::All | Which::Huge);
        if self.hints.is_none() || (takes_all && selection.blocks_max == u64::MAX) {
            return Ok(None);
        }
        let mut meant: HashMap<u64, u64> = HashMap::new();
        let words = targets.iter().map(|block| self.store.word(*block));
        for word in words.filter(|word| word.is_shared()) {
            let refused = |_| RamError::no_memory("type", "a list of blocks");
            meant.try_reserve(1).map_err(refused)?;
            *meant.entry(word.place()).or_default() += 1;
        }
        Ok(Some(meant))
    }
}

impl Work<'_> {
    /// Whether there is something to try with a block of this word.
    fn tries(&self, word: Word) -> bool {
        let further = self.packers.iter().any(|packer| packer.codec() > word.codec());
        self.selection.takes(word) && !word.is_incompressible() && further
    }

    /// Whether a block would be tried, but shares its object with some that are not to be
    /// recompressed. If the object was moved meanwhile nobody knows.
    fn is_in_part(&mut self, block: u64) -> bool {
        let word = self.blocks.store.word(block);
        if !word.is_shared() || !self.tries(word) {
            return false;
        }
        let Some(meant) = &self.meant else { return false };
        let sharers = self.hand.access.sharers(block);
        let left = self.selection.blocks_max - self.done.replaced;
        sharers > left || meant.get(&word.place()).is_none_or(|meant| *meant < sharers)
    }

    /// `false` if there was no memory for the smaller form.
    fn recompress(&mut self, block: u64) -> bool {
        let Work { blocks, selection, hand, packers, saved_bytes, done, .. } = self;
        let form = &blocks.form;
        let (mut made, mut in_vain) = (Word::NOTHING, None);
        let Hand { access, plain, unpacker, .. } = hand;
        let replaced = access.remake(block, |word, stored, maker| {
            let further = |packer: &&mut Packer| packer.codec() > word.codec();
            let mut further = packers.iter_mut().filter(further).peekable();
            if !selection.takes(word) || word.is_incompressible() || further.peek().is_none() {
                return Ok(None);
            }
            done.tried += 1;
            form.unpack_here(unpacker, word, stored, plain)?;
            let len_max = stored.len().saturating_sub(GRAIN_BYTES);
            let Some(new) = further.find_map(|packer| packer.shrink(form, plain, len_max)) else {
                in_vain = Some(word);
                return Ok(None);
            };
            made = word_of(&new);
            let new = match new {
                New::Bytes(bytes, flags) => New::Bytes(bytes, flags.with_age(word.age())),
                other => other,
            };
            maker.make(new).map(Some).map_err(|NoSpace| Status::NoSpc)
        });
        match (replaced, in_vain) {
            (Ok(Some(old)), _) => {
                form.replaced(&hand.tally, old.word, made);
                done.replaced += 1;
                *saved_bytes += old.freed_bytes() - made.len_bytes() as i64;
                if !old.frees && self.remade.try_reserve(1).is_ok() {
                    self.remade.insert(old.word.place(), block);
                }
            }
            (Ok(None), Some(word)) if word.is_huge() && self.is_all => {
                // A writer that is faster has put something else there.
                let mark = |word: Word| word.with_incompressible(true);
                done.incompressible += u64::from(hand.access.mark(block, word, mark));
            }
            (Ok(None), _) => {}
            (Err(Status::NoSpc), _) => return false,
            // A reader will be told; here there is nothing to make smaller.
            (Err(_), _) => {}
        }
        true
    }

    /// Has a block refer to what was made of the object that it shares with a block before.
    fn share(&mut self, block: u64) -> bool {
        let word = self.blocks.store.word(block);
        let Some(&of) = self.remade.get(&word.place()).filter(|_| word.is_shared()) else {
            return false;
        };
        let Hand { access, plain, other, unpacker, tally, .. } = &mut self.hand;
        let form = &self.blocks.form;
        let shared = access.share_remade(block, of, |(word, stored), (made, theirs)| {
            let same = made.codec() > word.codec() && made.len_bytes() < word.len_bytes();
            same && form.unpack_here(unpacker, word, stored, plain).is_ok()
                && form.unpack_here(unpacker, made, theirs, other).is_ok()
                && plain == other
        });
        if let Some((old, new)) = shared {
            form.replaced(tally, old.word, new);
            self.saved_bytes += old.freed_bytes();
            self.done.replaced += 1;
        }
        shared.is_some()
    }
}

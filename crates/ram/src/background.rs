//! What is done with blocks that nobody asks for: idle tracking, recompression, compaction, and a
//! listing. Each is a worker beside the channels, and loses to any of them.

mod keep;
mod writeback;

use blockyard_core::Status;
use blockyard_sync::entry_words::{AGE_MAX, Kind, Word};

use crate::blocks::Blocks;
use crate::error::RamError;
use crate::form::word_of;
use crate::pool::{Compacted, NoSpace};
use crate::store::New;

pub use keep::{Saved, Trained};
pub use writeback::WrittenBack;

/// Sizes of objects are taken for equal within so many bytes, as in zram's post-processing.
const BUCKET_BYTES: usize = 64;
/// An object is replaced only by one that takes less in the pool, whose grain this is.
const GRAIN_BYTES: usize = 16;

/// Which blocks are worked on, by zram's words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// All of them.
    #[default]
    All,
    /// Those that were not accessed for a while.
    Idle,
    /// Those stored raw.
    Huge,
    /// Those that are both.
    HugeIdle,
    /// Those that no algorithm makes smaller.
    Incompressible,
}

impl Which {
    /// Every choice, with its name.
    pub const ALL: [(Which, &'static str); 5] = [
        (Which::All, "all"),
        (Which::Idle, "idle"),
        (Which::Huge, "huge"),
        (Which::HugeIdle, "huge_idle"),
        (Which::Incompressible, "incompressible"),
    ];
}

/// Which blocks are worked on, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Which.
    pub which: Which,
    /// Turns of idle tracking after which a block is idle: 1 to 7.
    pub age: u8,
    /// Only objects of at least so many stored bytes.
    pub threshold: usize,
    /// Most blocks that are changed.
    pub blocks_max: u64,
}

impl Default for Selection {
    fn default() -> Selection {
        Selection { which: Which::All, age: 1, threshold: 0, blocks_max: u64::MAX }
    }
}

impl Selection {
    /// Whether it means the block of this word.
    fn takes(&self, word: Word) -> bool {
        let idle = word.age() >= self.age;
        let which = match self.which {
            Which::All => true,
            Which::Idle => idle,
            Which::Huge => word.is_huge(),
            Which::HugeIdle => word.is_huge() && idle,
            Which::Incompressible => word.is_incompressible(),
        };
        // A word that is repeated takes no less anywhere else.
        let repeated = word.is_huge() && word.len_bytes() <= GRAIN_BYTES;
        let object = word.kind() == Kind::Object && !repeated;
        which && object && word.len_bytes() >= self.threshold
    }
}

/// What a recompression has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompressed {
    /// Blocks that were tried.
    pub tried: u64,
    /// Blocks that are smaller now.
    pub replaced: u64,
    /// Bytes that they take less.
    pub saved_bytes: u64,
    /// Blocks that were found to be incompressible.
    pub incompressible: u64,
    /// Blocks for whose smaller form there was no memory beside the larger one.
    pub no_memory: u64,
}

/// A block, as zram's `block_state` lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockState {
    /// Its number.
    pub block: u64,
    /// Turns of idle tracking since its last access.
    pub age: u8,
    /// Stored bytes; 0 if it takes no memory.
    pub stored_bytes: u32,
    /// zram's flags: `s` same, `w` written back, `h` huge, `i` idle, `r` recompressed, `n`
    /// incompressible; a dot for each that it has not.
    pub flags: [u8; 6],
}

impl BlockState {
    fn of(block: u64, word: Word, unit: usize) -> BlockState {
        let stored = matches!(word.kind(), Kind::Object | Kind::Backing);
        let short = word.is_huge() && word.len_bytes() < unit;
        let flags = [
            (b's', word.kind() == Kind::Same || (stored && short)),
            (b'w', word.kind() == Kind::Backing),
            (b'h', stored && word.is_huge() && !short),
            (b'i', word.age() > 0),
            (b'r', stored && word.codec() > 0),
            (b'n', word.is_incompressible()),
        ];
        BlockState {
            block,
            age: word.age(),
            stored_bytes: if stored { word.len_bytes() as u32 } else { 0 },
            flags: flags.map(|(flag, set)| if set { flag } else { b'.' }),
        }
    }
}

impl Blocks {
    /// The blocks that a selection means now, the largest first: they are worth most.
    fn targets(&self, selection: &Selection) -> Vec<u64> {
        let words = (0..self.store.blocks()).map(|block| (block, self.store.word(block)));
        let taken = words.filter(|(_, word)| selection.takes(*word));
        let bucket = |word: Word| (word.len_bytes() / BUCKET_BYTES) as u32;
        let mut targets: Vec<(u32, u64)> =
            taken.map(|(block, word)| (bucket(word), block)).collect();
        targets.sort_unstable_by_key(|(bucket, block)| (std::cmp::Reverse(*bucket), *block));
        targets.into_iter().map(|(_, block)| block).collect()
    }

    /// A turn of idle tracking: all blocks are one older that were not accessed since the last.
    pub(crate) fn grow_older(&self) {
        (0..self.store.blocks()).for_each(|block| self.store.grow_older(block));
    }

    /// How many blocks that hold something have each age.
    pub(crate) fn ages(&self) -> [u64; AGE_MAX as usize + 1] {
        let mut ages = [0; AGE_MAX as usize + 1];
        for block in 0..self.store.blocks() {
            let word = self.store.word(block);
            if word.kind() != Kind::Nothing {
                ages[usize::from(word.age())] += 1;
            }
        }
        ages
    }

    /// Up to `count` blocks that hold something, from `first` on.
    pub(crate) fn states(&self, first: u64, count: usize) -> Vec<BlockState> {
        let words = (first..self.store.blocks()).map(|block| (block, self.store.word(block)));
        let stored = words.filter(|(_, word)| word.kind() != Kind::Nothing);
        let unit = self.form.unit;
        stored.take(count).map(|(block, word)| BlockState::of(block, word, unit)).collect()
    }

    /// Moves objects together, and gives back what becomes free.
    pub(crate) fn compact(&self) -> Result<Compacted, RamError> {
        let mut hand = self.hand()?;
        let done = hand.access.compact(|| false);
        hand.access.reclaim();
        Ok(done)
    }

    /// Compresses blocks by the second codec, where that makes them smaller.
    pub(crate) fn recompress(&self, selection: &Selection) -> Result<Recompressed, RamError> {
        if self.form.codecs.len() < 2 {
            let wanted = "a device that was made with recomp_algo";
            return Err(RamError::invalid("recomp_algo", "none", wanted));
        }
        let (mut hand, mut packer) = (self.hand()?, self.form.packer(1)?);
        let mut done = Recompressed::default();
        for block in self.targets(selection) {
            if done.replaced >= selection.blocks_max {
                break;
            }
            let (mut made, mut in_vain) = (Word::NOTHING, None);
            let (plain, unpacker) = (&mut hand.plain, &mut hand.unpacker);
            let replaced = hand.access.remake(block, |word, stored, maker| {
                if !selection.takes(word) || word.is_incompressible() || word.codec() > 0 {
                    return Ok(None);
                }
                done.tried += 1;
                self.form.unpack_here(unpacker, word, stored, plain)?;
                let len_max = stored.len().saturating_sub(GRAIN_BYTES);
                let Some(new) = packer.shrink(&self.form, plain, len_max) else {
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
                    self.form.replaced(&hand.tally, old, made);
                    done.replaced += 1;
                    done.saved_bytes += (old.len_bytes() - made.len_bytes()) as u64;
                }
                (Ok(None), Some(word)) if word.is_huge() => {
                    // A writer that is faster has put something else there.
                    let mark = |word: Word| word.with_incompressible(true);
                    done.incompressible += u64::from(hand.access.mark(block, word, mark));
                }
                (Ok(None), _) => {}
                (Err(Status::NoSpc), _) => done.no_memory += 1,
                // A reader will be told; here there is nothing to make smaller.
                (Err(_), _) => {}
            }
        }
        hand.access.reclaim();
        Ok(done)
    }
}

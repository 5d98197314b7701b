//! What is done with blocks that nobody asks for: idle tracking, recompression, compaction, and a
//! listing. Each is a worker beside the channels, and loses to any of them.

mod keep;
mod recompress;
mod unfinished;
mod writeback;

use blockyard_sync::entry_words::{AGE_MAX, Kind, Word};

use crate::blocks::Blocks;
use crate::error::RamError;
use crate::pool::Compacted;

pub use keep::{SaveError, Saved, Trained};
pub use recompress::Recompressed;
pub use unfinished::Replace;
pub use writeback::WrittenBack;

/// Sizes of objects are taken for equal within so many bytes, as in zram's post-processing.
const BUCKET_BYTES: usize = 64;
/// Bits of a block's number: of the largest device there are 2^34.
const BLOCK_BITS: u32 = 48;
/// An object is replaced only by one that takes less in the pool, whose grain this is.
const GRAIN_BYTES: usize = 16;

/// Words that are looked at for a page of a listing, at most: half a MiB of a table that may be
/// sparse, or empty.
const PAGE_WORDS: u64 = 1 << 16;

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
    /// Recompression: only by the algorithm of this priority, 1 to 3; `None` for each in turn.
    pub priority: Option<u8>,
}

impl Default for Selection {
    fn default() -> Selection {
        Selection { which: Which::All, age: 1, threshold: 0, blocks_max: u64::MAX, priority: None }
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

/// A page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatesPage {
    /// Blocks that hold something, in order; maybe none, though there are more behind them.
    pub states: Vec<BlockState>,
    /// The block that the next page begins with; `None` if there is none.
    pub next: Option<u64>,
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
    fn targets(&self, selection: &Selection) -> Result<Vec<u64>, RamError> {
        let words = (0..self.store.blocks()).map(|block| (block, self.store.word(block)));
        let taken = words.filter(|(_, word)| selection.takes(*word));
        // One word each, which sorts as they are to come: there may be very many.
        let most = (self.form.stored_bytes_max() / BUCKET_BYTES) as u64;
        let mut targets: Vec<u64> = Vec::new();
        for (block, word) in taken {
            let bucket = (word.len_bytes() / BUCKET_BYTES) as u64;
            targets.try_reserve(1).map_err(|_| RamError::no_memory("type", "a list of blocks"))?;
            targets.push((most - bucket) << BLOCK_BITS | block);
        }
        targets.sort_unstable();
        targets.iter_mut().for_each(|target| *target &= (1 << BLOCK_BITS) - 1);
        Ok(targets)
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
    pub(crate) fn states(&self, first: u64, count: usize) -> StatesPage {
        let (blocks, unit) = (self.store.blocks(), self.form.unit);
        let last = first.saturating_add(PAGE_WORDS).min(blocks);
        let mut page =
            StatesPage { states: Vec::new(), next: Some(last).filter(|it| *it < blocks) };
        for block in first..last {
            if page.states.len() == count {
                page.next = Some(block);
                break;
            }
            let word = self.store.word(block);
            if word.kind() != Kind::Nothing {
                page.states.push(BlockState::of(block, word, unit));
            }
        }
        page
    }

    /// Moves objects together, and gives back what becomes free.
    pub(crate) fn compact(&self) -> Result<Compacted, RamError> {
        let mut hand = self.hand()?;
        let done = hand.access.compact(|| false);
        hand.access.reclaim();
        Ok(done)
    }
}

//! Background work on blocks: idle tracking, recompression, writeback, compaction, and a listing of
//! block states. A worker runs concurrently with the channels; if a client changes a block first,
//! the worker gives that block up.

mod recompress;
mod save;
mod writeback;

use blockyard_sync::block_table::{AGE_MAX, Kind, Word};

use crate::blocks::Blocks;
use crate::error::RamError;
use crate::pool::Compacted;

pub use crate::stats::WrittenBack;
pub use blockyard_os::Replace;
pub use recompress::Recompressed;
pub use save::{SaveError, Saved, Trained};

/// Post-processing treats object sizes within the same 64 bytes as equal, as zram does.
const BUCKET_BYTES: usize = 64;
/// Bits of a block number in a sort key: the largest device has 2^34 blocks.
const BLOCK_BITS: u32 = 48;
/// Allocation unit of the pool in bytes: replacing an object gains nothing unless it saves a unit.
const GRAIN_BYTES: usize = 16;

/// Words that a page of a listing examines at most: half a MiB of a table that may be sparse or
/// empty.
const PAGE_WORDS: u64 = 1 << 16;

/// Which blocks to process, by the names that zram uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// All blocks.
    #[default]
    All,
    /// Blocks that were not accessed for the selection's `age`.
    Idle,
    /// Blocks that are stored uncompressed.
    Huge,
    /// Blocks that are both idle and huge.
    HugeIdle,
    /// Blocks that no configured algorithm makes smaller.
    Incompressible,
}

impl Which {
    /// Every variant with its name.
    pub const ALL: [(Which, &'static str); 5] = [
        (Which::All, "all"),
        (Which::Idle, "idle"),
        (Which::Huge, "huge"),
        (Which::HugeIdle, "huge_idle"),
        (Which::Incompressible, "incompressible"),
    ];
}

/// Which blocks to process, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// The category of blocks.
    pub which: Which,
    /// Idle age, in rounds of idle tracking, from which a block is idle: 1 to 7.
    pub age: u8,
    /// Minimum stored size of an object in bytes.
    pub threshold: usize,
    /// Maximum number of blocks to change.
    pub blocks_max: u64,
    /// Recompression: use only the algorithm of this priority, 1 to 3; `None` tries each in turn.
    pub priority: Option<u8>,
}

impl Default for Selection {
    fn default() -> Selection {
        Selection { which: Which::All, age: 1, threshold: 0, blocks_max: u64::MAX, priority: None }
    }
}

impl Selection {
    /// Whether the selection includes the block of this word.
    fn takes(&self, word: Word) -> bool {
        let idle = word.age() >= self.age;
        let which = match self.which {
            Which::All => true,
            Which::Idle => idle,
            Which::Huge => word.is_huge(),
            Which::HugeIdle => word.is_huge() && idle,
            Which::Incompressible => word.is_incompressible(),
        };
        // An object that holds one repeated word already takes the minimum.
        let repeated = word.is_huge() && word.len_bytes() <= GRAIN_BYTES;
        let object = word.kind() == Kind::Object && !repeated;
        which && object && word.len_bytes() >= self.threshold
    }
}

/// The state of a block, as zram's `block_state` lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockState {
    /// Block number.
    pub block: u64,
    /// Rounds of idle tracking since the last access of the block.
    pub age: u8,
    /// Stored bytes; 0 if the block takes no memory.
    pub stored_bytes: u32,
    /// zram's flags: `s` same, `w` written back, `h` huge, `i` idle, `r` recompressed, `n`
    /// incompressible. A dot stands for each flag that is not set.
    pub flags: [u8; 6],
}

/// A page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatesPage {
    /// Blocks that hold data, in ascending order; may be empty although later pages have some.
    pub states: Vec<BlockState>,
    /// The first block of the next page; `None` after the last page.
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
    /// The blocks that a selection includes now, largest first, since those can save most.
    fn targets(&self, selection: &Selection) -> Result<Vec<u64>, RamError> {
        let words = (0..self.store.blocks()).map(|block| (block, self.store.word(block)));
        let taken = words.filter(|(_, word)| selection.takes(*word));
        // One word per block, in sort order: a device can have very many blocks.
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

    /// One round of idle tracking: ages every block that was not accessed since the last round.
    pub(crate) fn grow_older(&self) {
        (0..self.store.blocks()).for_each(|block| self.store.grow_older(block));
    }

    /// How many blocks that hold data have each age.
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

    /// Lists up to `count` blocks that hold data, starting at block `first`.
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

    /// Compacts the pool and returns the freed pages to the system.
    pub(crate) fn compact(&self) -> Result<Compacted, RamError> {
        let mut workspace = self.workspace()?;
        let done = workspace.access.compact(|| false);
        workspace.access.reclaim();
        Ok(done)
    }
}

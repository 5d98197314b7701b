//! Recompression: compresses blocks again with slower algorithms that make them smaller.
//!
//! As in zram, the algorithms of higher priority than the block's own are tried in turn until one
//! saves at least one allocation unit of the pool. A shared object is recompressed for the first of
//! its blocks; the other blocks then share the new object if its contents equal theirs. A shared
//! object is skipped unless all its blocks are selected: otherwise the old object would stay in
//! memory next to the new one.

use std::collections::HashMap;

use blockyard_core::Status;
use blockyard_sync::block_table::Word;

use super::{GRAIN_BYTES, Selection, Which};
use crate::blocks::{Blocks, Workspace};
use crate::error::RamError;
use crate::form::{Packer, word_of};
use crate::pool::NoSpace;
use crate::store::New;

/// What a recompression did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompressed {
    /// Blocks that were tried.
    pub tried: u64,
    /// Blocks that are smaller now.
    pub replaced: u64,
    /// Bytes saved. A shared object that other blocks still refer to is not freed and does not
    /// count.
    pub saved_bytes: u64,
    /// Blocks that were found to be incompressible.
    pub incompressible: u64,
    /// Blocks whose smaller object found no memory while the larger one was still stored.
    pub no_memory: u64,
    /// Blocks that were skipped because not all blocks that share their object were selected.
    pub skipped_shared: u64,
}

/// A recompression in progress.
struct RecompressWork<'b> {
    blocks: &'b Blocks,
    selection: &'b Selection,
    workspace: Workspace,
    /// The algorithms to try, lowest priority first.
    packers: Vec<Packer>,
    /// Whether `packers` has all recompression algorithms of the device.
    is_all: bool,
    /// For each shared object, by place: how many of its blocks are selected; `None` if all blocks
    /// are.
    meant: Option<HashMap<u64, u64>>,
    /// For each shared object that was recompressed, by place: a block that has the new object.
    remade: HashMap<u64, u64>,
    /// Bytes freed minus bytes allocated.
    saved_bytes: i64,
    done: Recompressed,
}

impl Blocks {
    /// Compresses the selected blocks with further codecs where that makes them smaller.
    pub(crate) fn recompress(&self, selection: &Selection) -> Result<Recompressed, RamError> {
        let count = self.form.codecs.len();
        if count < 2 {
            let (verb, field) = ("recompress blocks", "recomp_algo");
            return Err(RamError::Lacks { verb, field, form: "zstd (or lz4, lz4hc)" });
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
        let mut work = RecompressWork {
            blocks: self,
            selection,
            workspace: self.workspace()?,
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
            // There may be free space below the limit that is not usable here: compact first.
            let tried = work.done.tried;
            if !work.workspace.access.make_room() || !work.recompress(block) {
                work.done.no_memory += 1;
            }
            work.done.tried = tried;
        }
        work.workspace.access.reclaim();
        // Negative if other blocks that share an object were not replaced.
        work.done.saved_bytes = u64::try_from(work.saved_bytes).unwrap_or(0);
        Ok(work.done)
    }
}

impl Blocks {
    /// For each shared object, counts the targets that refer to it; `None` if all blocks are
    /// targets. All words of a shared object have the same length, but each has its own age and
    /// flags.
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

impl RecompressWork<'_> {
    /// Whether some algorithm is left to try for a block with this word.
    fn tries(&self, word: Word) -> bool {
        let further = self.packers.iter().any(|packer| packer.codec() > word.codec());
        self.selection.takes(word) && !word.is_incompressible() && further
    }

    /// Whether the block would be tried, but shares its object with blocks that are not selected or
    /// exceed the block limit. If compaction moved the object meanwhile, the selection is unknown
    /// and this returns `true`.
    fn is_in_part(&mut self, block: u64) -> bool {
        let word = self.blocks.store.word(block);
        if !word.is_shared() || !self.tries(word) {
            return false;
        }
        let Some(meant) = &self.meant else { return false };
        let sharers = self.workspace.access.sharers(block);
        let left = self.selection.blocks_max - self.done.replaced;
        sharers > left || meant.get(&word.place()).is_none_or(|meant| *meant < sharers)
    }

    /// Recompresses one block. Returns `false` if there was no memory for the smaller object.
    fn recompress(&mut self, block: u64) -> bool {
        let RecompressWork { blocks, selection, workspace, packers, saved_bytes, done, .. } = self;
        let form = &blocks.form;
        let (mut made, mut in_vain) = (Word::NOTHING, None);
        let Workspace { access, plain, unpacker, .. } = workspace;
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
                form.replaced(&workspace.tally, old.word, made);
                done.replaced += 1;
                *saved_bytes += old.freed_bytes() - made.len_bytes() as i64;
                if !old.frees && self.remade.try_reserve(1).is_ok() {
                    self.remade.insert(old.word.place(), block);
                }
            }
            (Ok(None), Some(word)) if word.is_huge() && self.is_all => {
                // A client's write that came first has replaced the word; then the mark fails.
                let mark = |word: Word| word.with_incompressible(true);
                done.incompressible += u64::from(workspace.access.mark(block, word, mark));
            }
            (Ok(None), _) => {}
            (Err(Status::NoSpc), _) => return false,
            // A client that reads the block gets the error; there is nothing to recompress here.
            (Err(_), _) => {}
        }
        true
    }

    /// Makes a block refer to the object that replaced the one it shares with an earlier block.
    fn share(&mut self, block: u64) -> bool {
        let word = self.blocks.store.word(block);
        let Some(&of) = self.remade.get(&word.place()).filter(|_| word.is_shared()) else {
            return false;
        };
        let Workspace { access, plain, other, unpacker, tally, .. } = &mut self.workspace;
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

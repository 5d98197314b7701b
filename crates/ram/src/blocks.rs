//! The blocks of a device: turns words and stored bytes into contents, and contents into both.
//!
//! ```text
//! read     pin ▸ word ▸ decompress from the pool into the reader's buffer
//! write    buffer ▸ workspace ▸ same-filled? ▸ compress ▸ pool ▸ exchange ▸ retire the old object
//! part     pin ▸ word ▸ workspace, patched ▸ compress ▸ pool ▸ exchange; repeat if it fails
//! ```
//!
//! No function here takes a lock. Each thread works with a [`Workspace`] of its own: its buffers,
//! its access to the store, and its counters.
#![allow(unsafe_code)]

use std::sync::Arc;

use blockyard_core::{Extent, Status};
use blockyard_sync::block_table::{BlockTable, Kind, Word};
use blockyard_sync::dedup_hints::DedupHints;

use crate::config::RamConfig;
use crate::counters::{Count, CounterHandle, CounterRegistry, Sum};
use crate::error::RamError;
use crate::form::{Form, Packer, Unpacker, is_zero, word_of};
use crate::pool::{NoSpace, Pool, PoolConfig, PoolError};
use crate::store::{Access, New, Store};

/// What the hints leave of the memory limit for the pool; `None` if there is no limit.
fn pool_limit(mem_limit: u64, hints: Option<&DedupHints>) -> Option<u64> {
    let hints = hints.map_or(0, DedupHints::len_bytes);
    (mem_limit > 0).then(|| mem_limit.saturating_sub(hints))
}

/// Maximum number of threads that work on one device at once: channels and background workers.
const WORKSPACES_MAX: u32 = 1024;

/// The blocks of a device.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) form: Form,
    pub(crate) store: Arc<Store>,
    pub(crate) counters: Arc<CounterRegistry>,
    /// Finds equal blocks; `None` unless the device deduplicates.
    pub(crate) hints: Option<DedupHints>,
}

/// Per-thread working state: buffers, store access and counters of one channel or worker.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) access: Access,
    pub(crate) unpacker: Unpacker,
    /// A decompressed block.
    pub(crate) plain: Box<[u8]>,
    /// The new bytes for a part of a block.
    patch: Box<[u8]>,
    /// Another decompressed block to compare with; empty without deduplication.
    pub(crate) other: Box<[u8]>,
    pub(crate) packer: Packer,
    pub(crate) tally: CounterHandle,
}

impl Workspace {
    /// The buffer from which [`Blocks::write`] stores a block; the caller fills it.
    #[inline]
    pub(crate) fn block(&mut self) -> &mut [u8] {
        &mut self.plain
    }

    /// The buffer whose bytes [`Blocks::patch`] puts into a block; the caller fills it.
    #[inline]
    pub(crate) fn patch(&mut self, len: usize) -> &mut [u8] {
        &mut self.patch[..len]
    }
}

impl Blocks {
    /// Creates the blocks of a device, none of them written.
    pub(crate) fn new(config: &RamConfig) -> Result<Blocks, RamError> {
        let form = Form::new(config)?;
        let entries = BlockTable::new(config.block_count())
            .map_err(|_| RamError::no_memory("size", config.size))?;
        let hints = match config.hint_slots() {
            0 => None,
            slots => {
                let refused = || RamError::no_memory("dedup", "1");
                Some(DedupHints::new(slots).ok_or_else(refused)?)
            }
        };
        let pool = PoolConfig {
            limit_bytes: pool_limit(config.mem_limit, hints.as_ref()),
            counted: config.dedup,
            slots_max: WORKSPACES_MAX,
            ..PoolConfig::new(config.size, form.stored_bytes_max())
        };
        let pool = Pool::new(&pool).map_err(|error| match error {
            PoolError::Addresses { errno, .. } => {
                RamError::Memory { field: "size", value: config.size.to_string(), errno }
            }
            other => RamError::invalid("unit", config.unit, other.to_string()),
        })?;
        Ok(Blocks { form, store: Store::new(entries, pool), counters: Arc::default(), hints })
    }

    /// Creates the working state for one thread.
    pub(crate) fn workspace(&self) -> Result<Workspace, RamError> {
        let block = || vec![0; self.form.unit].into_boxed_slice();
        Ok(Workspace {
            access: self.access()?,
            unpacker: self.form.unpacker()?,
            plain: block(),
            patch: block(),
            other: if self.hints.is_some() { block() } else { Box::default() },
            packer: self.form.packer(0)?,
            tally: self.counters.open(),
        })
    }

    /// Access to the stored contents only, for a thread that neither compresses nor decompresses.
    pub(crate) fn access(&self) -> Result<Access, RamError> {
        self.store.access().ok_or(RamError::Crowded { max: WORKSPACES_MAX })
    }

    /// Size of a block in bytes.
    #[inline]
    pub(crate) fn unit(&self) -> usize {
        self.form.unit
    }

    /// Memory that the deduplication hints take, in bytes.
    pub(crate) fn hints_bytes(&self) -> u64 {
        self.hints.as_ref().map_or(0, DedupHints::len_bytes)
    }

    /// Sets the memory limit in bytes, deduplication hints included; 0 means no limit.
    pub(crate) fn set_mem_limit(&self, bytes: u64) {
        self.store.pool().set_limit(pool_limit(bytes, self.hints.as_ref()));
    }

    /// The store, for statistics.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The counters now, summed over all threads.
    pub(crate) fn counts(&self) -> Sum {
        self.counters.sum()
    }

    /// Reads a block.
    ///
    /// # Safety
    /// `into` must be valid for reads and writes of a block. Other threads or processes may access
    /// these bytes concurrently, as they may any buffer under I/O.
    #[inline]
    pub(crate) unsafe fn read(
        &self,
        workspace: &mut Workspace,
        block: u64,
        into: *mut u8,
    ) -> Status {
        let Workspace { access, unpacker, tally, .. } = workspace;
        let read = access.read(block, |word, stored| {
            // SAFETY: this function's own contract.
            unsafe { self.form.unpack(unpacker, word, stored, into) }
        });
        unpacker.settle(tally);
        read.err().unwrap_or(Status::Ok)
    }

    /// Reads a block into `workspace.plain` and returns it.
    pub(crate) fn read_here<'h>(
        &self,
        workspace: &'h mut Workspace,
        block: u64,
    ) -> Result<&'h [u8], Status> {
        let into = workspace.plain.as_mut_ptr();
        // SAFETY: `plain` is a block long and only this thread uses it.
        let done = unsafe { self.read(workspace, block, into) };
        if done.is_ok() { Ok(&workspace.plain) } else { Err(done) }
    }

    /// Stores the block in `workspace.plain`. If there is no memory, the old contents stay.
    #[inline]
    pub(crate) fn write(&self, workspace: &mut Workspace, block: u64) -> Status {
        match &self.hints {
            None => self.write_alone(workspace, block),
            Some(hints) => self.write_once(hints, workspace, block),
        }
    }

    /// Stores the block in `workspace.plain` without searching for an equal one.
    #[inline]
    pub(crate) fn write_alone(&self, workspace: &mut Workspace, block: u64) -> Status {
        let Workspace { access, plain, packer, tally, .. } = workspace;
        self.store.fetch_to_replace(block);
        let new = packer.pack(&self.form, plain);
        let Ok(old) = access.replace(block, new) else { return Status::NoSpc };
        self.form.replaced(tally, old, word_of(&new));
        Status::Ok
    }

    /// Replaces `len` bytes of a block from `offset` on by the bytes in `workspace.patch`.
    pub(crate) fn patch(
        &self,
        workspace: &mut Workspace,
        block: u64,
        offset: usize,
        len: usize,
    ) -> Status {
        let Workspace { access, unpacker, plain, patch, packer, tally, .. } = workspace;
        let (mut turns, mut made) = (0u64, Word::NOTHING);
        let changed = access.update(block, |word, stored, maker| {
            turns += 1;
            self.form.unpack_here(unpacker, word, stored, plain)?;
            plain[offset..offset + len].copy_from_slice(&patch[..len]);
            let new = packer.pack(&self.form, plain);
            made = word_of(&new);
            maker.make(new).map_err(|NoSpace| Status::NoSpc)
        });
        unpacker.settle(tally);
        tally.add(Count::PatchRetries, turns.saturating_sub(1));
        match changed {
            Ok(old) => {
                self.form.replaced(tally, old, made);
                Status::Ok
            }
            Err(status) => status,
        }
    }

    /// Frees a block, which then reads as zeros.
    pub(crate) fn discard(&self, workspace: &mut Workspace, block: u64) {
        if self.store.word(block).kind() == Kind::Nothing {
            return;
        }
        let nothing = New::Word(Word::NOTHING);
        let old = workspace.access.replace(block, nothing).expect("nothing takes no memory");
        if old.kind() != Kind::Nothing {
            self.form.replaced(&workspace.tally, old, Word::NOTHING);
            workspace.tally.add(Count::NotifyFree, 1);
        }
    }

    /// Whether the block's word alone shows that it reads as zeros.
    pub(crate) fn is_zero(&self, block: u64) -> bool {
        is_zero(self.store.word(block))
    }

    /// Returns how many of `count` blocks from `first` on are of the same kind as the first, and
    /// that kind. The caller sets the length of the extent.
    pub(crate) fn run(&self, first: u64, count: u64) -> (u64, Extent) {
        let kind = |block| {
            let word = self.store.word(block);
            (word.kind() != Kind::Nothing, is_zero(word))
        };
        let (allocated, zero) = kind(first);
        let more = first + 1..first + count;
        let same = more.take_while(|block| kind(*block) == (allocated, zero)).count();
        (1 + same as u64, Extent { sectors: 0, allocated, zero })
    }
}

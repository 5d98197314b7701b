//! The blocks of a device: what a word says becomes bytes, and bytes contents.
//!
//! ```text
//! read     pin ▸ word ▸ decompress from the pool into the reader's buffer
//! write    buffer ▸ hand ▸ same-filled? ▸ compress ▸ pool ▸ exchange the word ▸ retire the old one
//! part     pin ▸ word ▸ hand, patched ▸ compress ▸ pool ▸ exchange, again if a writer was faster
//! ```
//!
//! Nothing here is locked. Each thread works with a [`Hand`] of its own: what it compresses in, its
//! way into the store, its counts.
#![allow(unsafe_code)]

use std::sync::Arc;

use blockyard_core::{Extent, Status};
use blockyard_sync::entry_words::{Entries, Kind, Word};

use crate::codec::{Algo, Codec, Decoder, Encoder, packed_bytes_max};
use crate::config::RamConfig;
use crate::counters::{Count, Counters, Sum, Tally};
use crate::error::RamError;
use crate::fill::{fill, repeated_word};
use crate::pool::{NoSpace, Pool, PoolConfig, PoolError};
use crate::store::{Access, New, Store};

/// Threads that work on one device at once: channels, and what runs in the background.
const HANDS_MAX: u32 = 1024;
/// What a count changes by; tallies wrap.
const MORE: u64 = 1;
const LESS: u64 = MORE.wrapping_neg();

/// The blocks of a device.
#[derive(Debug)]
pub(crate) struct Blocks {
    form: Form,
    store: Arc<Store>,
    counters: Arc<Counters>,
}

/// How blocks are stored.
#[derive(Debug)]
struct Form {
    unit: usize,
    codec: Codec,
}

/// What one thread works with.
#[derive(Debug)]
pub(crate) struct Hand {
    access: Access,
    decoder: Decoder,
    /// A block as it is.
    plain: Box<[u8]>,
    /// What is to replace a part of a block.
    patch: Box<[u8]>,
    packer: Packer,
    tally: Tally,
}

/// What makes contents of a block.
#[derive(Debug)]
struct Packer {
    encoder: Encoder,
    /// A block as compressed.
    packed: Box<[u8]>,
}

/// A word of 64 bits that is twice the same value.
const fn doubled(value: u32) -> u64 {
    value as u64 | (value as u64) << 32
}

/// Whether a word says that its block reads as zeros.
fn is_zero(word: Word) -> bool {
    word.kind() == Kind::Nothing || (word.kind() == Kind::Same && word.value() == 0)
}

impl Packer {
    /// What the block is to be stored as.
    #[inline]
    fn pack<'b>(&'b mut self, form: &Form, plain: &'b [u8]) -> New<'b> {
        let stored_raw = Word::NOTHING.with_huge(true);
        if let Some(word) = repeated_word(plain) {
            let value = word as u32;
            if word == doubled(value) {
                return New::Word(Word::same(value));
            }
            self.packed[..8].copy_from_slice(&word.to_ne_bytes());
            return New::Bytes(&self.packed[..8], stored_raw);
        }
        // Less than a sixteenth is not worth a decompression at every read.
        let len_max = form.unit - form.unit / 16;
        match form.codec.compress(&mut self.encoder, plain, &mut self.packed, len_max) {
            Some(len) => New::Bytes(&self.packed[..len], Word::NOTHING),
            None => New::Bytes(plain, stored_raw),
        }
    }
}

impl Form {
    /// Makes a block of what a word says and refers to.
    ///
    /// # Safety
    /// `into` must be valid for reads and writes of a block; others may touch it meanwhile, as they
    /// may any buffer under I/O.
    #[inline]
    unsafe fn unpack(
        &self,
        decoder: &mut Decoder,
        word: Word,
        stored: &[u8],
        into: *mut u8,
    ) -> Result<(), Status> {
        match word.kind() {
            // SAFETY: the caller's contract.
            Kind::Nothing => unsafe { fill(into, self.unit, 0) },
            // SAFETY: the caller's contract.
            Kind::Same => unsafe { fill(into, self.unit, doubled(word.value())) },
            Kind::Object if !word.is_huge() => {
                // SAFETY: the caller's contract.
                let done = unsafe { self.codec.decompress(decoder, stored, into, self.unit) };
                return done.map_err(|_| Status::Medium);
            }
            Kind::Object if stored.len() == self.unit => {
                // SAFETY: the caller's contract; an object in the pool is nobody's buffer.
                unsafe { into.copy_from_nonoverlapping(stored.as_ptr(), self.unit) };
            }
            Kind::Object => {
                let bytes = stored.first_chunk().ok_or(Status::Medium)?;
                // SAFETY: the caller's contract.
                unsafe { fill(into, self.unit, u64::from_ne_bytes(*bytes)) };
            }
            Kind::Backing => return Err(Status::Medium),
        }
        Ok(())
    }

    /// Counts what a word stands for, once more or once less.
    #[inline]
    fn count(&self, tally: &Tally, word: Word, by: u64) {
        match word.kind() {
            Kind::Nothing => return,
            Kind::Same => tally.add(Count::Same, by),
            Kind::Backing => tally.add(Count::Backed, by),
            Kind::Object => {
                let len = word.len_bytes();
                tally.add(Count::Compressed, by.wrapping_mul(len as u64));
                match (word.is_huge(), len == self.unit) {
                    (true, true) => tally.add(Count::Huge, by),
                    (true, false) => tally.add(Count::Same, by),
                    (false, _) => {}
                }
            }
        }
        tally.add(Count::Stored, by);
    }

    /// Counts that contents took the place of those of a word.
    #[inline]
    fn replaced(&self, tally: &Tally, old: Word, new: Word) {
        self.count(tally, old, LESS);
        self.count(tally, new, MORE);
        if new.kind() == Kind::Object && new.len_bytes() == self.unit {
            tally.add(Count::HugeSince, 1);
        }
    }
}

/// A word like the one that contents will have, for counting.
#[inline]
fn word_of(new: &New<'_>) -> Word {
    match new {
        New::Word(word) => *word,
        New::Bytes(bytes, flags) => Word::object(0, bytes.len()).with_huge(flags.is_huge()),
    }
}

impl Hand {
    /// The block that [`Blocks::write`] stores, to be filled by the caller.
    #[inline]
    pub(crate) fn block(&mut self) -> &mut [u8] {
        &mut self.plain
    }

    /// The bytes that [`Blocks::patch`] puts into a block, to be filled by the caller.
    #[inline]
    pub(crate) fn patch(&mut self, len: usize) -> &mut [u8] {
        &mut self.patch[..len]
    }
}

impl Blocks {
    /// Blocks that were never written.
    pub(crate) fn new(config: &RamConfig) -> Result<Blocks, RamError> {
        let codec = Codec::new(&config.codec, "algo")?;
        let unit = config.unit as usize;
        let entries = Entries::new(config.block_count())
            .map_err(|_| RamError::no_memory("size", config.size))?;
        let limit_bytes = (config.mem_limit > 0).then_some(config.mem_limit);
        let pool =
            PoolConfig { limit_bytes, seats_max: HANDS_MAX, ..PoolConfig::new(config.size, unit) };
        let pool = Pool::new(&pool).map_err(|error| match error {
            PoolError::Addresses { errno, .. } => {
                RamError::Memory { field: "size", value: config.size.to_string(), errno }
            }
            other => RamError::invalid("unit", config.unit, other.to_string()),
        })?;
        let store = Store::new(entries, pool);
        Ok(Blocks { form: Form { unit, codec }, store, counters: Arc::default() })
    }

    /// What a thread needs to work on blocks.
    pub(crate) fn hand(&self) -> Result<Hand, RamError> {
        let Form { unit, codec } = &self.form;
        let block = |len| vec![0; len].into_boxed_slice();
        Ok(Hand {
            access: self.store.access().ok_or(RamError::Crowded { max: HANDS_MAX })?,
            decoder: Decoder::new(*unit, codec.algo() == Algo::Zstd)?,
            plain: block(*unit),
            patch: block(*unit),
            packer: Packer {
                encoder: codec.encoder(*unit)?,
                packed: block(packed_bytes_max(*unit)),
            },
            tally: self.counters.open(),
        })
    }

    /// Bytes of a block.
    #[inline]
    pub(crate) fn unit(&self) -> usize {
        self.form.unit
    }

    /// The contents, for their statistics.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The counts now.
    pub(crate) fn counts(&self) -> Sum {
        self.counters.sum()
    }

    /// Reads a block.
    ///
    /// # Safety
    /// `into` must be valid for reads and writes of a block; others may touch it meanwhile, as they
    /// may any buffer under I/O.
    #[inline]
    pub(crate) unsafe fn read(&self, hand: &mut Hand, block: u64, into: *mut u8) -> Status {
        let Hand { access, decoder, .. } = hand;
        let read = access.read(block, |word, stored| {
            // SAFETY: this function's own contract.
            unsafe { self.form.unpack(decoder, word, stored, into) }
        });
        match read {
            Ok(()) => Status::Ok,
            Err(status) => hand.failed_to_read(status),
        }
    }

    /// Reads a block into the hand, where the caller finds it.
    pub(crate) fn read_here<'h>(&self, hand: &'h mut Hand, block: u64) -> Result<&'h [u8], Status> {
        let into = hand.plain.as_mut_ptr();
        // SAFETY: `plain` is a block long and the hand's alone.
        let done = unsafe { self.read(hand, block, into) };
        if done.is_ok() { Ok(&hand.plain) } else { Err(done) }
    }

    /// Stores the block that is in the hand. If there is no memory, what was stored stays.
    #[inline]
    pub(crate) fn write(&self, hand: &mut Hand, block: u64) -> Status {
        let Hand { access, plain, packer, tally, .. } = hand;
        let new = packer.pack(&self.form, plain);
        let Ok(old) = access.replace(block, new) else { return hand.out_of_space() };
        self.form.replaced(tally, old, word_of(&new));
        Status::Ok
    }

    /// Puts what is in the hand's patch into a block, from `offset` on.
    pub(crate) fn patch(&self, hand: &mut Hand, block: u64, offset: usize, len: usize) -> Status {
        let Hand { access, decoder, plain, patch, packer, tally } = hand;
        let (mut turns, mut made) = (0u64, Word::NOTHING);
        let changed = access.update(block, |word, stored, maker| {
            turns += 1;
            // SAFETY: `plain` is a block long and the hand's alone.
            unsafe { self.form.unpack(decoder, word, stored, plain.as_mut_ptr()) }?;
            plain[offset..offset + len].copy_from_slice(&patch[..len]);
            let new = packer.pack(&self.form, plain);
            made = word_of(&new);
            maker.make(new).map_err(|NoSpace| Status::NoSpc)
        });
        tally.add(Count::PatchRetries, turns.saturating_sub(1));
        match changed {
            Ok(old) => {
                self.form.replaced(tally, old, made);
                Status::Ok
            }
            Err(Status::NoSpc) => hand.out_of_space(),
            Err(status) => hand.failed_to_read(status),
        }
    }

    /// Makes a block read as zeros, and holds nothing for it.
    pub(crate) fn discard(&self, hand: &mut Hand, block: u64) {
        if self.store.word(block).kind() == Kind::Nothing {
            return;
        }
        let nothing = New::Word(Word::NOTHING);
        let old = hand.access.replace(block, nothing).expect("nothing takes no memory");
        if old.kind() != Kind::Nothing {
            self.form.replaced(&hand.tally, old, Word::NOTHING);
            hand.tally.add(Count::NotifyFree, 1);
        }
    }

    /// Whether a block is known to read as zeros.
    pub(crate) fn is_zero(&self, block: u64) -> bool {
        is_zero(self.store.word(block))
    }

    /// How many of `count` blocks from `first` on are of the first one's kind, and that kind. The
    /// extent's length is left to the caller.
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

impl Hand {
    #[cold]
    fn out_of_space(&self) -> Status {
        self.tally.add(Count::FailedWrites, 1);
        Status::NoSpc
    }

    #[cold]
    fn failed_to_read(&self, status: Status) -> Status {
        self.tally.add(Count::FailedReads, 1);
        status
    }
}

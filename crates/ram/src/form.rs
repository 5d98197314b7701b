//! The stored form of blocks: what a word and its stored bytes mean, and how a block becomes both.
//!
//! | word | stored bytes | contents of the block |
//! | --- | --- | --- |
//! | nothing | none | zeros |
//! | same-filled | none | the word's 32-bit value, repeated |
//! | an object | output of a codec | the decompressed bytes |
//! | an object, huge | a whole block | the stored bytes |
//! | an object, huge | 8 | the stored bytes, repeated |
//! | on the backing file | as an object's, in the file | as an object's |
//!
//! With checksums, a CRC-32 of the stored bytes follows them: four more bytes.
#![allow(unsafe_code)]

use blockyard_core::Status;
use blockyard_sync::block_table::{Kind, OBJECT_BYTES_MAX, Word};

use crate::backing::Backing;
use crate::codec::{Algo, Codec, Decoder, Encoder, packed_bytes_max};
use crate::config::{RECOMPRESS_FIELDS, RamConfig};
use crate::counters::{Count, CounterHandle};
use crate::error::RamError;
use crate::fill::{fill, repeated_word};
use crate::store::New;

/// Bytes of a checksum.
pub(crate) const CHECKSUM_BYTES: usize = 4;
/// Bytes of a repeated word.
const WORD_BYTES: usize = 8;
/// Increment of a counter; `LESS` is the decrement, since counters wrap.
const MORE: u64 = 1;
const LESS: u64 = MORE.wrapping_neg();

/// How a device stores its blocks.
#[derive(Debug)]
pub(crate) struct Form {
    /// Bytes of a block.
    pub(crate) unit: usize,
    /// Codecs by their index in words: the device's own first, then those for recompression.
    pub(crate) codecs: Box<[Codec]>,
    /// Bytes that follow each object's own: those of the checksum, or 0.
    pub(crate) tail: usize,
    /// The backing file for writeback.
    pub(crate) backing: Option<Backing>,
}

/// Compresses blocks into their stored form; belongs to one thread.
#[derive(Debug)]
pub(crate) struct Packer {
    codec: u8,
    encoder: Encoder,
    packed: Box<[u8]>,
}

/// Decompresses stored bytes into blocks; belongs to one thread.
#[derive(Debug)]
pub(crate) struct Unpacker {
    decoder: Decoder,
    /// Buffer for stored bytes read from the backing file.
    fetched: Box<[u8]>,
    /// Reads of the backing file that are not yet in the counters.
    fetches: u64,
}

/// A 64-bit word that repeats a 32-bit value.
const fn doubled(value: u32) -> u64 {
    value as u64 | (value as u64) << 32
}

/// Whether this word alone shows that its block reads as zeros.
pub(crate) fn is_zero(word: Word) -> bool {
    word.kind() == Kind::Nothing || (word.kind() == Kind::Same && word.value() == 0)
}

/// A word with the kind and length that these contents will have, for counting.
#[inline]
pub(crate) fn word_of(new: &New<'_>) -> Word {
    match new {
        New::Word(word) => *word,
        New::Bytes(bytes, flags) => {
            Word::object(0, said_bytes(bytes.len())).with_huge(flags.is_huge())
        }
    }
}

/// The length that a word records for `len` stored bytes. An uncompressed block of 64 KiB with its
/// checksum exceeds the field; the field's maximum stands for it and for no other length.
#[inline]
pub(crate) fn said_bytes(len: usize) -> usize {
    len.min(OBJECT_BYTES_MAX)
}

impl Form {
    pub(crate) fn new(config: &RamConfig) -> Result<Form, RamError> {
        let mut codecs = vec![Codec::new(&config.codec, "algo")?];
        for (recompress, field) in config.recompress.iter().zip(RECOMPRESS_FIELDS) {
            codecs.push(Codec::new(recompress, field)?);
        }
        Ok(Form {
            unit: config.unit as usize,
            codecs: codecs.into(),
            tail: if config.checksum { CHECKSUM_BYTES } else { 0 },
            backing: config.backing.as_deref().map(Backing::open).transpose()?,
        })
    }

    /// Maximum stored bytes of a block.
    pub(crate) fn stored_bytes_max(&self) -> usize {
        self.unit + self.tail
    }

    /// The number of stored bytes that a word refers to.
    #[inline]
    pub(crate) fn stored_bytes(&self, word: Word) -> usize {
        match word.len_bytes() {
            OBJECT_BYTES_MAX => self.stored_bytes_max().max(OBJECT_BYTES_MAX),
            shorter => shorter,
        }
    }

    /// Maximum compressed size that is worth storing: a gain below 1/16 does not justify a
    /// decompression at every read.
    #[inline]
    fn worth_max(&self) -> usize {
        self.unit - self.unit / 16
    }

    /// Creates a packer for the codec with this index.
    pub(crate) fn packer(&self, codec: usize) -> Result<Packer, RamError> {
        Ok(Packer {
            codec: codec as u8,
            encoder: self.codecs[codec].encoder(self.unit)?,
            packed: vec![0; packed_bytes_max(self.unit)].into(),
        })
    }

    pub(crate) fn unpacker(&self) -> Result<Unpacker, RamError> {
        let zstd = self.codecs.iter().any(|codec| codec.algo() == Algo::Zstd);
        let fetched = if self.backing.is_some() { self.stored_bytes_max() } else { 0 };
        Ok(Unpacker {
            decoder: Decoder::new(self.unit, zstd)?,
            fetched: vec![0; fetched].into(),
            fetches: 0,
        })
    }

    /// Whether the stored bytes of this word are the uncompressed block.
    fn is_raw(&self, word: Word) -> bool {
        word.is_huge() && self.stored_bytes(word) == self.stored_bytes_max()
    }

    /// Verifies the checksum and returns the stored bytes without it.
    #[inline]
    pub(crate) fn checked<'b>(&self, stored: &'b [u8]) -> Result<&'b [u8], Status> {
        if self.tail == 0 {
            return Ok(stored);
        }
        let (bytes, checksum) = stored.split_last_chunk().ok_or(Status::Protection)?;
        let right = crc32fast::hash(bytes) == u32::from_le_bytes(*checksum);
        if right { Ok(bytes) } else { Err(Status::Protection) }
    }

    /// Restores a block from its word and stored bytes.
    ///
    /// # Safety
    /// `into` must be valid for reads and writes of a block. Other threads or processes may access
    /// these bytes concurrently, as they may any buffer under I/O.
    #[inline]
    pub(crate) unsafe fn unpack(
        &self,
        unpacker: &mut Unpacker,
        word: Word,
        stored: &[u8],
        into: *mut u8,
    ) -> Result<(), Status> {
        let Unpacker { decoder, fetched, fetches } = unpacker;
        let stored = match word.kind() {
            Kind::Nothing => {
                // SAFETY: the caller's contract.
                unsafe { fill(into, self.unit, 0) };
                return Ok(());
            }
            Kind::Same => {
                // SAFETY: the caller's contract.
                unsafe { fill(into, self.unit, doubled(word.value())) };
                return Ok(());
            }
            Kind::Object => stored,
            Kind::Backing => {
                *fetches += 1;
                self.fetch(word, fetched)?
            }
        };
        let stored = self.checked(stored)?;
        if !word.is_huge() {
            let codec = self.codecs.get(usize::from(word.codec())).ok_or(Status::Medium)?;
            // SAFETY: the caller's contract.
            let done = unsafe { codec.decompress(decoder, stored, into, self.unit) };
            return done.map_err(|_| Status::Medium);
        }
        if stored.len() == self.unit {
            // SAFETY: the caller's contract; stored bytes never overlap a client's buffer.
            unsafe { into.copy_from_nonoverlapping(stored.as_ptr(), self.unit) };
            return Ok(());
        }
        let word = stored.first_chunk::<WORD_BYTES>().ok_or(Status::Medium)?;
        // SAFETY: the caller's contract.
        unsafe { fill(into, self.unit, u64::from_ne_bytes(*word)) };
        Ok(())
    }

    /// Restores a block into a slice of the caller, a block long.
    pub(crate) fn unpack_here(
        &self,
        unpacker: &mut Unpacker,
        word: Word,
        stored: &[u8],
        into: &mut [u8],
    ) -> Result<(), Status> {
        assert_eq!(into.len(), self.unit, "a block is made as a whole");
        // SAFETY: the slice is a block long, and only the caller can access it.
        unsafe { self.unpack(unpacker, word, stored, into.as_mut_ptr()) }
    }

    /// Decompresses bytes of the codec in this word, without their checksum, into a block.
    ///
    /// # Panics
    /// If `into` is not a block long, or the word says that the bytes are not compressed.
    pub(crate) fn decode(
        &self,
        unpacker: &mut Unpacker,
        word: Word,
        bytes: &[u8],
        into: &mut [u8],
    ) -> Result<(), Status> {
        assert!(into.len() == self.unit && !word.is_huge(), "a block is made as a whole");
        let codec = self.codecs.get(usize::from(word.codec())).ok_or(Status::Medium)?;
        let done = codec.decompress_here(&mut unpacker.decoder, bytes, into);
        done.map_err(|_| Status::Medium)
    }

    /// Reads the stored bytes of a word from the backing file.
    #[cold]
    pub(crate) fn fetch<'b>(&self, word: Word, into: &'b mut [u8]) -> Result<&'b [u8], Status> {
        let backing = self.backing.as_ref().ok_or(Status::Medium)?;
        let stored = into.get_mut(..self.stored_bytes(word)).ok_or(Status::Medium)?;
        backing.read(word.place(), stored).map_err(|_| Status::IoErr)?;
        Ok(stored)
    }

    /// Adds what a word stands for to the counters, or subtracts it.
    #[inline]
    fn count(&self, tally: &CounterHandle, word: Word, by: u64) {
        match word.kind() {
            Kind::Nothing => return,
            Kind::Same => tally.add(Count::Same, by),
            Kind::Backing => tally.add(Count::Backed, by),
            Kind::Object => {
                tally.add(Count::Compressed, by.wrapping_mul(word.len_bytes() as u64));
                if word.is_huge() {
                    let kind = if self.is_raw(word) { Count::Huge } else { Count::Same };
                    tally.add(kind, by);
                }
            }
        }
        tally.add(Count::Stored, by);
    }

    /// Updates the counters after contents replaced those of a word.
    #[inline]
    pub(crate) fn replaced(&self, tally: &CounterHandle, old: Word, new: Word) {
        self.count(tally, old, LESS);
        self.count(tally, new, MORE);
        if new.kind() == Kind::Object && self.is_raw(new) {
            tally.add(Count::HugeSince, 1);
        }
    }
}

impl Unpacker {
    /// Adds the reads of the backing file to the counters.
    #[inline]
    pub(crate) fn settle(&mut self, tally: &CounterHandle) {
        if self.fetches > 0 {
            tally.add(Count::BackedReads, std::mem::take(&mut self.fetches));
        }
    }
}

impl Packer {
    /// The index of the codec in words.
    pub(crate) fn codec(&self) -> u8 {
        self.codec
    }

    /// Chooses the stored form of a block: same-filled, compressed or uncompressed.
    #[inline]
    pub(crate) fn pack<'b>(&'b mut self, form: &Form, plain: &'b [u8]) -> New<'b> {
        let raw = Word::NOTHING.with_huge(true);
        if let Some(word) = repeated_word(plain) {
            let value = word as u32;
            if word == doubled(value) {
                return New::Word(Word::same(value));
            }
            self.packed[..WORD_BYTES].copy_from_slice(&word.to_ne_bytes());
            return New::Bytes(self.sealed(form, WORD_BYTES), raw);
        }
        match self.compress(form, plain, form.worth_max()) {
            Some(len) => {
                let word = Word::NOTHING.with_codec(self.codec);
                New::Bytes(self.sealed(form, len), word)
            }
            None => self.keep(form, plain),
        }
    }

    /// The stored form of a block that no codec makes smaller.
    #[inline]
    fn keep<'b>(&'b mut self, form: &Form, plain: &'b [u8]) -> New<'b> {
        let raw = Word::NOTHING.with_huge(true);
        if form.tail == 0 {
            return New::Bytes(plain, raw);
        }
        self.packed[..form.unit].copy_from_slice(plain);
        New::Bytes(self.sealed(form, form.unit), raw)
    }

    /// Compresses a block into less than `len_max` stored bytes; `None` if this codec cannot.
    pub(crate) fn shrink(&mut self, form: &Form, plain: &[u8], len_max: usize) -> Option<New<'_>> {
        let len = self.compress(form, plain, len_max.checked_sub(form.tail)?)?;
        let word = Word::NOTHING.with_codec(self.codec);
        Some(New::Bytes(self.sealed(form, len), word))
    }

    /// Takes over bytes that the codec with this index compressed before.
    ///
    /// # Panics
    /// If `bytes` is longer than a block.
    pub(crate) fn adopt(&mut self, form: &Form, bytes: &[u8], codec: u8) -> New<'_> {
        assert!(bytes.len() <= form.unit, "{} bytes of a block", bytes.len());
        self.packed[..bytes.len()].copy_from_slice(bytes);
        New::Bytes(self.sealed(form, bytes.len()), Word::NOTHING.with_codec(codec))
    }

    #[inline]
    fn compress(&mut self, form: &Form, plain: &[u8], len_max: usize) -> Option<usize> {
        let codec = &form.codecs[usize::from(self.codec)];
        codec.compress(&mut self.encoder, plain, &mut self.packed, len_max)
    }

    /// The first `len` packed bytes, followed by their checksum if the device has checksums.
    #[inline]
    fn sealed(&mut self, form: &Form, len: usize) -> &[u8] {
        if form.tail > 0 {
            let checksum = crc32fast::hash(&self.packed[..len]).to_le_bytes();
            self.packed[len..len + CHECKSUM_BYTES].copy_from_slice(&checksum);
        }
        &self.packed[..len + form.tail]
    }
}

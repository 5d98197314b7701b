//! The form in which blocks are stored: what a word and its bytes mean, what is made of a block.
//!
//! | word | stored bytes | the block |
//! | --- | --- | --- |
//! | nothing | none | zeros |
//! | same-filled | none | its 32-bit value, repeated |
//! | an object | of a codec | decompressed by that codec |
//! | an object, huge | a unit | as it is |
//! | an object, huge | 8 | repeated |
//! | on the backing file | as an object's, in the file | as an object's |
//!
//! With checksums the stored bytes have four more: a CRC-32 of those before them.
#![allow(unsafe_code)]

use blockyard_core::Status;
use blockyard_sync::entry_words::{Kind, OBJECT_BYTES_MAX, Word};

use crate::backing::Backing;
use crate::codec::{Algo, Codec, Decoder, Encoder, packed_bytes_max};
use crate::config::{RECOMPRESS_FIELDS, RamConfig};
use crate::counters::{Count, Tally};
use crate::error::RamError;
use crate::fill::{fill, repeated_word};
use crate::store::New;

/// Bytes of a checksum.
pub(crate) const CHECKSUM_BYTES: usize = 4;
/// Bytes of a word that is repeated.
const WORD_BYTES: usize = 8;
/// What a count changes by; tallies wrap.
const MORE: u64 = 1;
const LESS: u64 = MORE.wrapping_neg();

/// How a device stores its blocks.
#[derive(Debug)]
pub(crate) struct Form {
    /// Bytes of a block.
    pub(crate) unit: usize,
    /// By their numbers in words: the device's own, and those that it recompresses by.
    pub(crate) codecs: Box<[Codec]>,
    /// Bytes behind each object's own: those of its checksum, or none.
    pub(crate) tail: usize,
    /// Where blocks can be written back to.
    pub(crate) backing: Option<Backing>,
}

/// What makes contents of a block; belongs to one thread.
#[derive(Debug)]
pub(crate) struct Packer {
    codec: u8,
    encoder: Encoder,
    packed: Box<[u8]>,
}

/// What makes a block of contents; belongs to one thread.
#[derive(Debug)]
pub(crate) struct Unpacker {
    decoder: Decoder,
    /// What was read from the backing file.
    fetched: Box<[u8]>,
    /// How often that was done since it was counted.
    fetches: u64,
}

/// A word of 64 bits that is twice the same value.
const fn doubled(value: u32) -> u64 {
    value as u64 | (value as u64) << 32
}

/// Whether a word says that its block reads as zeros.
pub(crate) fn is_zero(word: Word) -> bool {
    word.kind() == Kind::Nothing || (word.kind() == Kind::Same && word.value() == 0)
}

/// A word like the one that contents will have, for counting.
#[inline]
pub(crate) fn word_of(new: &New<'_>) -> Word {
    match new {
        New::Word(word) => *word,
        New::Bytes(bytes, flags) => {
            Word::object(0, said_bytes(bytes.len())).with_huge(flags.is_huge())
        }
    }
}

/// What a word says of so many stored bytes. Those of a raw block of 64 KiB with its checksum are
/// more than it can say: the most that it can stands for them, and for nothing else.
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

    /// Most stored bytes of a block.
    pub(crate) fn stored_bytes_max(&self) -> usize {
        self.unit + self.tail
    }

    /// How many stored bytes a word stands for.
    #[inline]
    pub(crate) fn stored_bytes(&self, word: Word) -> usize {
        match word.len_bytes() {
            OBJECT_BYTES_MAX => self.stored_bytes_max().max(OBJECT_BYTES_MAX),
            shorter => shorter,
        }
    }

    /// The most that a codec may make of a block: less than a sixteenth is not worth a
    /// decompression at every read.
    #[inline]
    fn worth_max(&self) -> usize {
        self.unit - self.unit / 16
    }

    /// A packer by the codec of this number.
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

    /// Whether stored bytes of this word are the block itself.
    fn is_raw(&self, word: Word) -> bool {
        word.is_huge() && self.stored_bytes(word) == self.stored_bytes_max()
    }

    /// The stored bytes without their checksum, which is right.
    #[inline]
    pub(crate) fn checked<'b>(&self, stored: &'b [u8]) -> Result<&'b [u8], Status> {
        if self.tail == 0 {
            return Ok(stored);
        }
        let (bytes, checksum) = stored.split_last_chunk().ok_or(Status::Protection)?;
        let right = crc32fast::hash(bytes) == u32::from_le_bytes(*checksum);
        if right { Ok(bytes) } else { Err(Status::Protection) }
    }

    /// Makes a block of what a word says and refers to.
    ///
    /// # Safety
    /// `into` must be valid for reads and writes of a block; others may touch it meanwhile, as they
    /// may any buffer under I/O.
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
            // SAFETY: the caller's contract; stored bytes are nobody's buffer.
            unsafe { into.copy_from_nonoverlapping(stored.as_ptr(), self.unit) };
            return Ok(());
        }
        let word = stored.first_chunk::<WORD_BYTES>().ok_or(Status::Medium)?;
        // SAFETY: the caller's contract.
        unsafe { fill(into, self.unit, u64::from_ne_bytes(*word)) };
        Ok(())
    }

    /// The same into memory of the caller's own, a block long.
    pub(crate) fn unpack_here(
        &self,
        unpacker: &mut Unpacker,
        word: Word,
        stored: &[u8],
        into: &mut [u8],
    ) -> Result<(), Status> {
        assert_eq!(into.len(), self.unit, "a block is made as a whole");
        // SAFETY: the slice is a block long and the caller's alone.
        unsafe { self.unpack(unpacker, word, stored, into.as_mut_ptr()) }
    }

    /// Makes a block of bytes that the codec of this word has made, without their checksum.
    ///
    /// # Panics
    /// If `into` is not a block long, or the word says that they are as the block is.
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

    /// Reads what a word refers to on the backing file.
    #[cold]
    pub(crate) fn fetch<'b>(&self, word: Word, into: &'b mut [u8]) -> Result<&'b [u8], Status> {
        let backing = self.backing.as_ref().ok_or(Status::Medium)?;
        let stored = into.get_mut(..self.stored_bytes(word)).ok_or(Status::Medium)?;
        backing.read(word.place(), stored).map_err(|_| Status::IoErr)?;
        Ok(stored)
    }

    /// Counts what a word stands for, once more or once less.
    #[inline]
    fn count(&self, tally: &Tally, word: Word, by: u64) {
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

    /// Counts that contents took the place of those of a word.
    #[inline]
    pub(crate) fn replaced(&self, tally: &Tally, old: Word, new: Word) {
        self.count(tally, old, LESS);
        self.count(tally, new, MORE);
        if new.kind() == Kind::Object && self.is_raw(new) {
            tally.add(Count::HugeSince, 1);
        }
    }
}

impl Unpacker {
    /// Counts what was read from the backing file.
    #[inline]
    pub(crate) fn settle(&mut self, tally: &Tally) {
        if self.fetches > 0 {
            tally.add(Count::BackedReads, std::mem::take(&mut self.fetches));
        }
    }
}

impl Packer {
    /// The number of its codec in words.
    pub(crate) fn codec(&self) -> u8 {
        self.codec
    }

    /// What the block is to be stored as.
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

    /// What a block is to be stored as that no codec makes smaller.
    #[inline]
    fn keep<'b>(&'b mut self, form: &Form, plain: &'b [u8]) -> New<'b> {
        let raw = Word::NOTHING.with_huge(true);
        if form.tail == 0 {
            return New::Bytes(plain, raw);
        }
        self.packed[..form.unit].copy_from_slice(plain);
        New::Bytes(self.sealed(form, form.unit), raw)
    }

    /// Contents that take less than `len_max` stored bytes, if this codec can make them.
    pub(crate) fn shrink(&mut self, form: &Form, plain: &[u8], len_max: usize) -> Option<New<'_>> {
        let len = self.compress(form, plain, len_max.checked_sub(form.tail)?)?;
        let word = Word::NOTHING.with_codec(self.codec);
        Some(New::Bytes(self.sealed(form, len), word))
    }

    /// Contents of bytes that the codec of this number has compressed before.
    ///
    /// # Panics
    /// If they are more than a block.
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

    /// The first bytes of what was packed, with their checksum if there is to be one.
    #[inline]
    fn sealed(&mut self, form: &Form, len: usize) -> &[u8] {
        if form.tail > 0 {
            let checksum = crc32fast::hash(&self.packed[..len]).to_le_bytes();
            self.packed[len..len + CHECKSUM_BYTES].copy_from_slice(&checksum);
        }
        &self.packed[..len + form.tail]
    }
}

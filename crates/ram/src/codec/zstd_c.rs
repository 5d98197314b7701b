//! Zstandard by its author's C library, with levels and dictionaries.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use zstd_safe::{CCtx, CParameter, DCtx, DDict, WriteBuf};

use super::Codec;
use crate::error::{Damaged, RamError};

/// A dictionary for both directions. All decompressors share one digested form. Each compressor
/// digests the dictionary itself, because the result depends on the block size.
pub(super) struct Dictionary {
    bytes: Arc<[u8]>,
    back: DDict<'static>,
}

impl Dictionary {
    /// Digests a dictionary. `field` is the parameter that an error names.
    pub(super) fn new(bytes: &Arc<[u8]>, field: &'static str) -> Result<Dictionary, RamError> {
        let refused = || RamError::invalid(field, format!("{} bytes", bytes.len()), WANTED);
        if bytes.len() < 8 {
            return Err(refused());
        }
        let back = DDict::try_create(bytes).ok_or_else(refused)?;
        Ok(Dictionary { bytes: Arc::clone(bytes), back })
    }
}

/// What an error says is expected of a dictionary.
const WANTED: &str = "a dictionary of `zstd --train`, or at least 8 bytes that blocks begin with";

impl fmt::Debug for Dictionary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Dictionary")
    }
}

/// Trains a dictionary of at most `len_max` bytes; `None` if the samples are unsuitable.
pub(super) fn train(samples: &[u8], lengths: &[usize], len_max: usize) -> Option<Vec<u8>> {
    let mut dictionary = Vec::with_capacity(len_max);
    zstd_safe::train_from_buffer(&mut dictionary, samples, lengths).ok()?;
    Some(dictionary)
}

/// Memory that others may access: only written, never borrowed as a slice.
struct Raw {
    at: *mut u8,
    len_bytes: usize,
}

// SAFETY: the creator of a `Raw` guarantees that `as_mut_ptr` is valid for writes of `capacity`
// bytes. `as_slice` reports no initialised bytes, so zstd never makes a reference to this memory.
unsafe impl WriteBuf for Raw {
    fn as_slice(&self) -> &[u8] {
        &[]
    }

    fn capacity(&self) -> usize {
        self.len_bytes
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.at
    }

    unsafe fn filled_until(&mut self, _: usize) {}
}

/// A compression context with its parameters set.
pub(super) struct Compressor(CCtx<'static>);

impl Compressor {
    pub(super) fn new(codec: &Codec) -> Result<Compressor, RamError> {
        let no_memory = || RamError::no_memory("algo", "zstd");
        let mut context = CCtx::try_create().ok_or_else(no_memory)?;
        let wrong = |code| RamError::invalid("level", codec.level, zstd_safe::get_error_name(code));
        context.set_parameter(CParameter::CompressionLevel(codec.level)).map_err(wrong)?;
        // Save 4 bytes per object: a device has one dictionary, so its ID is never read.
        context.set_parameter(CParameter::DictIdFlag(false)).map_err(wrong)?;
        if let Some(dictionary) = &codec.dictionary {
            context.load_dictionary(&dictionary.bytes).map_err(wrong)?;
        }
        Ok(Compressor(context))
    }

    pub(super) fn compress(
        &mut self,
        block: &[u8],
        into: &mut [u8],
        len_max: usize,
    ) -> Option<usize> {
        // The only possible error is a lack of output space: the context has all its memory.
        let room = len_max.min(into.len());
        self.0.compress2(&mut into[..room], block).ok()
    }
}

impl fmt::Debug for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Compressor")
    }
}

/// A decompression context.
pub(super) struct Decompressor(DCtx<'static>);

impl Decompressor {
    pub(super) fn new() -> Result<Decompressor, RamError> {
        DCtx::try_create().map(Decompressor).ok_or_else(|| RamError::no_memory("algo", "zstd"))
    }

    /// Decompresses `packed` to exactly `len_bytes`.
    ///
    /// # Safety
    /// `into` must be valid for reads and writes of `len_bytes`. Other threads or processes may
    /// access these bytes concurrently, as they may a buffer under I/O: the library copies literals
    /// and matches within them, and their values do not affect its control flow.
    pub(super) unsafe fn decompress(
        &mut self,
        dictionary: Option<&Dictionary>,
        packed: &[u8],
        into: *mut u8,
        len_bytes: usize,
    ) -> Result<(), Damaged> {
        let mut raw = Raw { at: into, len_bytes };
        let answer = match dictionary {
            None => self.0.decompress(&mut raw, packed),
            Some(dictionary) => self.0.decompress_using_ddict(&mut raw, packed, &dictionary.back),
        };
        if answer == Ok(len_bytes) { Ok(()) } else { Err(Damaged) }
    }
}

impl fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Decompressor")
    }
}

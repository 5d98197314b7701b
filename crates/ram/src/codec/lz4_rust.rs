//! LZ4 in Rust, for a build without C codecs. It writes and reads the same format.
#![allow(unsafe_code)]

use std::fmt;

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into};

use crate::error::Damaged;

/// The fast compressor. It has no acceleration: only the C library implements levels.
pub(super) struct Fast(Box<CompressTable>);

impl fmt::Debug for Fast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fast").finish_non_exhaustive()
    }
}

impl Fast {
    pub(super) fn new() -> Fast {
        Fast(Box::default())
    }

    #[inline]
    pub(super) fn compress(
        &mut self,
        block: &[u8],
        into: &mut [u8],
        len_max: usize,
        _: i32,
    ) -> Option<usize> {
        let len = compress_into_with_table(block, into, &mut self.0).ok()?;
        (len <= len_max).then_some(len)
    }
}

/// Decompressor with a private block buffer: memory that others may access cannot be a Rust slice.
#[derive(Debug)]
pub(super) struct Unpacker(Box<[u8]>);

impl Unpacker {
    pub(super) fn new(unit: usize) -> Unpacker {
        Unpacker(vec![0; unit].into_boxed_slice())
    }

    /// Decompresses `packed` to exactly `len_bytes`.
    ///
    /// # Safety
    /// `into` must be valid for writes of `len_bytes`.
    #[inline]
    pub(super) unsafe fn decompress(
        &mut self,
        packed: &[u8],
        into: *mut u8,
        len_bytes: usize,
    ) -> Result<(), Damaged> {
        let block = self.0.get_mut(..len_bytes).ok_or(Damaged)?;
        if decompress_into(packed, block).map_err(|_| Damaged)? != len_bytes {
            return Err(Damaged);
        }
        // SAFETY: `into` is valid by the caller's contract, and the private block does not overlap
        // it.
        unsafe { into.copy_from_nonoverlapping(block.as_ptr(), len_bytes) };
        Ok(())
    }
}

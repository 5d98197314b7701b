//! Decompression of LZ4 in Rust, for a build without codecs in C.
#![allow(unsafe_code)]

use lz4_flex::block::decompress_into;

use super::Damaged;

/// A block of memory of its own: what others may touch cannot be a Rust slice.
#[derive(Debug)]
pub(super) struct Unpacker(Box<[u8]>);

impl Unpacker {
    pub(super) fn new(unit: usize) -> Unpacker {
        Unpacker(vec![0; unit].into_boxed_slice())
    }

    /// Makes exactly `len_bytes` of `packed`.
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
        // SAFETY: the caller's contract; the block is ours and apart from it.
        unsafe { into.copy_from_nonoverlapping(block.as_ptr(), len_bytes) };
        Ok(())
    }
}

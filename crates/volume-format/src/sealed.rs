//! An encrypted block as it is stored, and the encrypted blocks of a raw stream. `blockyard-volume`
//! encrypts and decrypts.
//!
//! | at | bytes | field |
//! | --- | --- | --- |
//! | 0 | 16 | salt |
//! | 16 | 8 | number: the nonce, followed by four zero bytes |
//! | 24 | 4 | `len`: length of the encrypted bytes |
//! | 28 | `len` | the encrypted bytes |
//! | 28 + `len` | 16 | authentication tag |
//!
//! In a pool, zeros pad the block to 512 bytes, or to the sectors of a disk with longer ones. In a
//! raw stream a byte with its codec precedes each block, and nothing pads it.

use crate::PAGE_BYTES;
use crate::bytes::u32_at;
use crate::entry::Codec;

/// Offset of the number.
pub const NUMBER: usize = 16;
/// Offset of the length of the encrypted bytes.
pub const LEN: usize = NUMBER + 8;
/// Offset of the encrypted bytes.
pub const DATA: usize = LEN + 4;
/// Length of an authentication tag in bytes.
pub const TAG_BYTES: usize = 16;
/// Bytes that a stored block has besides the encrypted ones and the padding.
pub const OVERHEAD: usize = DATA + TAG_BYTES;

/// Bytes that an encrypted block has in a raw stream besides the encrypted ones.
pub const STREAM_OVERHEAD: usize = 1 + OVERHEAD;

/// The length of the encrypted bytes of a block as a pool stores it; `None` if it is malformed.
///
/// The padding has to be zeros: the tag does not cover it, and with other bytes there an older
/// block could be given the checksum that the map has of the newer one.
pub fn encrypted_len(stored: &[u8]) -> Option<usize> {
    let len = u32_at(stored.get(..DATA)?, LEN) as usize;
    let padding = stored.get(OVERHEAD.checked_add(len)?..)?;
    // Without an early exit the compiler compares several bytes at once.
    let is_zero = padding.iter().fold(0, |all, byte| all | byte) == 0;
    let is_padding = padding.len() < PAGE_BYTES && is_zero;
    is_padding.then_some(len)
}

/// An encrypted block without padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedBlock<'a> {
    codec: Codec,
    bytes: &'a [u8],
}

impl<'a> SealedBlock<'a> {
    /// A block of `block_bytes` bytes as a pool stores it; `None` if it is malformed.
    pub fn of_stored(codec: Codec, stored: &'a [u8], block_bytes: u32) -> Option<SealedBlock<'a>> {
        let len = encrypted_len(stored).filter(|len| is_len(codec, *len, block_bytes))?;
        Some(SealedBlock { codec, bytes: &stored[..OVERHEAD + len] })
    }

    /// Takes the next block out of a record of a raw stream.
    fn take(rest: &mut &'a [u8], block_bytes: u32) -> Option<SealedBlock<'a>> {
        let (number, after) = rest.split_first()?;
        let codec = Codec::from_number(*number)?;
        let len = u32_at(after.get(..DATA)?, LEN) as usize;
        if !is_len(codec, len, block_bytes) {
            return None;
        }
        let (bytes, after) = after.split_at_checked(OVERHEAD + len)?;
        *rest = after;
        Some(SealedBlock { codec, bytes })
    }

    /// The codec, which is one of encrypted blocks.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// The bytes from the salt to the tag.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Appends the block to the payload of a record of a raw stream.
    pub fn print(&self, out: &mut Vec<u8>) {
        out.push(self.codec as u8);
        out.extend_from_slice(self.bytes);
    }
}

/// Whether an encrypted block of this codec has `len` encrypted bytes: an uncompressed block all,
/// and another one fewer, as compression saves space where it is used.
fn is_len(codec: Codec, len: usize, block_bytes: u32) -> bool {
    match codec {
        Codec::SealedRaw => len == block_bytes as usize,
        codec => codec.is_sealed() && (1..block_bytes as usize).contains(&len),
    }
}

/// The blocks of a record of a raw stream. It ends at the end of the payload, or before a block
/// that is malformed.
#[derive(Clone, Debug)]
pub struct SealedBlocks<'a> {
    rest: &'a [u8],
    block_bytes: u32,
}

impl<'a> SealedBlocks<'a> {
    /// The blocks of a payload, of a volume with blocks of `block_bytes` bytes.
    pub fn new(payload: &'a [u8], block_bytes: u32) -> SealedBlocks<'a> {
        SealedBlocks { rest: payload, block_bytes }
    }

    /// Counts the blocks; `None` if one is malformed.
    pub fn check(mut self) -> Option<u64> {
        let count = self.by_ref().count() as u64;
        self.rest.is_empty().then_some(count)
    }
}

impl<'a> Iterator for SealedBlocks<'a> {
    type Item = SealedBlock<'a>;

    fn next(&mut self) -> Option<SealedBlock<'a>> {
        SealedBlock::take(&mut self.rest, self.block_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::put_u32;

    const BLOCK: u32 = 4096;

    fn stored(len: usize, padding: usize) -> Vec<u8> {
        let mut bytes = vec![7; OVERHEAD + len];
        put_u32(&mut bytes, LEN, len as u32);
        bytes.resize(OVERHEAD + len + padding, 0);
        bytes
    }

    #[test]
    fn blocks_of_a_record_come_back_without_padding() {
        let (whole, packed) = (stored(4096, 468), stored(100, 368));
        let whole = SealedBlock::of_stored(Codec::SealedRaw, &whole, BLOCK).unwrap();
        let packed = SealedBlock::of_stored(Codec::SealedLz4, &packed, BLOCK).unwrap();
        assert_eq!((whole.bytes().len(), packed.bytes().len()), (OVERHEAD + 4096, OVERHEAD + 100));
        let mut payload = Vec::new();
        [whole, packed, whole].iter().for_each(|block| block.print(&mut payload));
        assert_eq!(payload.len(), 3 * STREAM_OVERHEAD + 2 * 4096 + 100);
        let blocks = SealedBlocks::new(&payload, BLOCK);
        assert_eq!(blocks.clone().check(), Some(3));
        assert_eq!(blocks.collect::<Vec<_>>(), [whole, packed, whole]);
        for cut in [1, 29, 100, STREAM_OVERHEAD + 4096 + 30, payload.len() - 1] {
            assert_eq!(SealedBlocks::new(&payload[..cut], BLOCK).check(), None, "cut at {cut}");
        }
        assert_eq!(SealedBlocks::new(&[], BLOCK).check(), Some(0));
    }

    #[test]
    fn a_malformed_block_is_refused() {
        let of = |codec, stored: &[u8]| SealedBlock::of_stored(codec, stored, BLOCK).is_some();
        assert!(of(Codec::SealedRaw, &stored(4096, 0)) && of(Codec::SealedZstd, &stored(4095, 0)));
        for (codec, len, padding) in [
            (Codec::SealedRaw, 4095, 0),
            (Codec::SealedRaw, 8192, 0),
            (Codec::SealedLz4, 4096, 0),
            (Codec::SealedLz4, 0, 0),
            (Codec::SealedLz4, 100, PAGE_BYTES),
            (Codec::Raw, 4096, 0),
            (Codec::Lz4, 100, 0),
        ] {
            assert!(!of(codec, &stored(len, padding)), "{codec:?}, {len}, {padding}");
        }
        let mut padded = stored(100, 20);
        padded[OVERHEAD + 110] = 1;
        assert!(!of(Codec::SealedLz4, &padded));
        // A codec of the future, and one of a block that is not encrypted.
        for number in [0, 1, 11] {
            let mut payload = vec![number];
            payload.extend(stored(4096, 0));
            assert_eq!(SealedBlocks::new(&payload, BLOCK).check(), None, "{number}");
        }
    }
}

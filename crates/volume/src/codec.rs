//! How a block is stored: as it is, or compressed where that saves at least one unit of the disk.

use crate::format::BLOCK_BYTES_MAX;
use crate::format::entry::Codec;

/// What stands before an LZ4 block: its length in bytes.
const LEN_BYTES: usize = 4;

/// What a compressed block may take while it is made, in bytes.
pub(crate) const PACKED_MAX: usize =
    LEN_BYTES + lz4_flex::block::get_maximum_output_size(BLOCK_BYTES_MAX as usize);

/// Compresses a block into memory of [`PACKED_MAX`] bytes; answers how long it became, with its
/// padding, which is zeros. `None` if that saves nothing.
pub(crate) fn compress(block: &[u8], into: &mut [u8], align: usize) -> Option<usize> {
    let len = lz4_flex::block::compress_into(block, &mut into[LEN_BYTES..]).ok()?;
    into[..LEN_BYTES].copy_from_slice(&(len as u32).to_le_bytes());
    let end = (LEN_BYTES + len).next_multiple_of(align);
    if end >= block.len() {
        return None;
    }
    into[LEN_BYTES + len..end].fill(0);
    Some(end)
}

/// Makes a block of what is stored; `false` if it is none.
#[must_use]
pub(crate) fn decode(codec: Codec, stored: &[u8], block: &mut [u8]) -> bool {
    match codec {
        Codec::Raw => {
            let whole = stored.len() == block.len();
            if whole {
                block.copy_from_slice(stored);
            }
            whole
        }
        Codec::Lz4 => {
            let Some((len, rest)) = stored.split_first_chunk::<LEN_BYTES>() else { return false };
            let Some(packed) = rest.get(..u32::from_le_bytes(*len) as usize) else { return false };
            let len = lz4_flex::block::decompress_into(packed, block);
            len.is_ok_and(|len| len == block.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_back_and_what_does_not_shrink_stays() {
        let mut into = vec![9; PACKED_MAX];
        let text: Vec<u8> = b"all work and no play ".iter().copied().cycle().take(16_384).collect();
        let len = compress(&text, &mut into, 4096).unwrap();
        assert_eq!(len, 4096);
        let mut back = vec![0; text.len()];
        assert!(decode(Codec::Lz4, &into[..len], &mut back));
        assert_eq!(back, text);
        assert!(!decode(Codec::Lz4, &into[..3], &mut back), "cut short");
        assert!(!decode(Codec::Lz4, &[0xff; 64], &mut back), "no length");
        assert!(!decode(Codec::Raw, &text[1..], &mut back));
        let mut noise = vec![0; 16_384];
        fastrand::Rng::with_seed(1).fill(&mut noise);
        assert_eq!(compress(&noise, &mut into, 4096), None);
        assert_eq!(compress(&text[..4096], &mut into, 4096), None, "a unit cannot be saved");
        assert_eq!(compress(&text[..4096], &mut into, 512), Some(512));
    }
}

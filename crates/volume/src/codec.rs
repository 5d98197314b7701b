//! Stores a block raw, or compressed if that saves at least one unit of the disk (`align`).

use std::fmt;
use std::ops::Range;

use blockyard_store::buffer::ScratchBuffer;
use blockyard_volume_format::entry::Codec;
use blockyard_volume_format::sealed::{DATA, encrypted_len};
use lz4_flex::block::{CompressTable, compress_into_with_table};

use crate::encryption::{BlockCipher, Undecodable, sealed_bytes};

/// Length of the header of a compressed block, which contains the compressed length in bytes.
const LEN_BYTES: usize = 4;

/// Most bytes that a block of `len` bytes takes while it is compressed, header included.
const fn packed_max(len: usize) -> usize {
    LEN_BYTES + lz4_flex::block::get_maximum_output_size(len)
}

/// How blocks are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// No compression.
    None,
    /// LZ4, where it saves space.
    #[default]
    Lz4,
    /// Zstandard at a level of 1 to 19, where it saves space.
    Zstd(u8),
}

impl Compression {
    /// The code in [`Properties`](blockyard_volume_format::properties::Properties).
    pub fn code(self) -> u8 {
        match self {
            Compression::None => 0,
            Compression::Lz4 => 1,
            Compression::Zstd(level) => level + 1,
        }
    }

    /// The compression of a code.
    pub fn of_code(code: u8) -> Compression {
        match code {
            0 => Compression::None,
            1 => Compression::Lz4,
            code => Compression::Zstd(code - 1),
        }
    }
}

/// Compresses blocks one at a time.
pub(crate) struct Packer {
    compression: Compression,
    /// The encoder's table. Allocating one costs more than clearing it.
    lz4: CompressTable,
    #[cfg(feature = "c-codecs")]
    zstd: Option<zstd_safe::CCtx<'static>>,
}

impl Packer {
    pub(crate) fn new(compression: Compression) -> Packer {
        Packer {
            compression,
            lz4: CompressTable::default(),
            #[cfg(feature = "c-codecs")]
            zstd: matches!(compression, Compression::Zstd(_)).then(zstd_safe::CCtx::create),
        }
    }

    /// How blocks are compressed.
    pub(crate) fn compression(&self) -> Compression {
        self.compression
    }

    /// Whether all blocks stay uncompressed.
    pub(crate) fn is_idle(&self) -> bool {
        self.compression == Compression::None
    }

    /// Compresses a block. Returns the codec and the stored length, including padding with zeros;
    /// `None` if compression saves nothing.
    pub(crate) fn compress(
        &mut self,
        block: &[u8],
        into: &mut ScratchBuffer,
        align: usize,
    ) -> Option<(Codec, usize)> {
        let (codec, len) = self.pack(block, into)?;
        let end = (LEN_BYTES + len).next_multiple_of(align);
        if end >= block.len() {
            return None;
        }
        into.first(end)[LEN_BYTES + len..].fill(0);
        Some((codec, end))
    }

    /// Compresses a block to be encrypted. Returns the codec and the compressed bytes; `None` if
    /// compression saves nothing in a stored block.
    pub(crate) fn compress_for_sealing<'a>(
        &mut self,
        block: &[u8],
        into: &'a mut ScratchBuffer,
        align: usize,
    ) -> Option<(Codec, &'a [u8])> {
        let (codec, len) = self.pack(block, into)?;
        let saves = sealed_bytes(len, align) < sealed_bytes(block.len(), align);
        saves.then(|| (codec, &into[LEN_BYTES..LEN_BYTES + len]))
    }

    /// Compresses a block into `into`, after its length. Returns the codec and the length.
    fn pack(&mut self, block: &[u8], into: &mut ScratchBuffer) -> Option<(Codec, usize)> {
        let into = into.first(packed_max(block.len()));
        let rest = &mut into[LEN_BYTES..];
        let (codec, len) = match self.compression {
            Compression::None => return None,
            Compression::Lz4 => {
                (Codec::Lz4, compress_into_with_table(block, rest, &mut self.lz4).ok()?)
            }
            Compression::Zstd(level) => (Codec::Zstd, self.zstd(block, rest, level)?),
        };
        into[..LEN_BYTES].copy_from_slice(&(len as u32).to_le_bytes());
        Some((codec, len))
    }

    #[cfg(feature = "c-codecs")]
    fn zstd(&mut self, block: &[u8], into: &mut [u8], level: u8) -> Option<usize> {
        // Compressed data as long as the block would save nothing.
        let space = into.len().min(block.len());
        self.zstd.as_mut()?.compress(&mut into[..space], block, level.into()).ok()
    }

    #[cfg(not(feature = "c-codecs"))]
    fn zstd(&mut self, _: &[u8], _: &mut [u8], _: u8) -> Option<usize> {
        None
    }
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer").field("compression", &self.compression).finish_non_exhaustive()
    }
}

/// Whether these are the stored bytes of a block that is not encrypted. If the block is compressed,
/// it is decompressed into `block`.
#[must_use]
pub(crate) fn is_decodable(codec: Codec, stored: &[u8], block: &mut [u8]) -> bool {
    if codec == Codec::Raw {
        return stored.len() == block.len();
    }
    let Some((len, rest)) = stored.split_first_chunk::<LEN_BYTES>() else { return false };
    let packed = rest.get(..u32::from_le_bytes(*len) as usize);
    packed.is_some_and(|packed| decompress(codec, packed, block))
}

/// Decompresses a block. Returns `false` if the compressed bytes are invalid.
#[must_use]
fn decompress(codec: Codec, packed: &[u8], block: &mut [u8]) -> bool {
    let len = match codec {
        Codec::Lz4 => lz4_flex::block::decompress_into(packed, block).ok(),
        Codec::Zstd => unpack_zstd(packed, block),
        _ => None,
    };
    len == Some(block.len())
}

/// Decodes a stored block, after decryption in place if it is encrypted. `number` is that of the
/// block in its volume. Returns where in `stored` the block is; `None` if it was compressed, and is
/// in `block`.
pub(crate) fn decode_block(
    cipher: Option<&mut BlockCipher>,
    (number, codec): (u64, Codec),
    stored: &mut [u8],
    block: &mut [u8],
) -> Result<Option<Range<usize>>, Undecodable> {
    if !codec.is_sealed() {
        // A block that is not encrypted was not written by a handle of an encrypted volume.
        if cipher.is_some() {
            return Err(Undecodable::NotAuthentic);
        }
        let is_whole = is_decodable(codec, stored, block);
        return is_whole
            .then(|| (codec == Codec::Raw).then_some(0..block.len()))
            .ok_or(Undecodable::Damaged);
    }
    let cipher = cipher.ok_or(Undecodable::NotAuthentic)?;
    let len = encrypted_len(stored).ok_or(Undecodable::Damaged)?;
    let place = (number, codec, block.len());
    if codec == Codec::SealedRaw {
        if len != block.len() {
            return Err(Undecodable::Damaged);
        }
        cipher.open(place, len, stored)?;
        return Ok(Some(DATA..DATA + len));
    }
    let packed = cipher.open(place, len, stored)?;
    if decompress(codec.opened(), packed, block) { Ok(None) } else { Err(Undecodable::Damaged) }
}

#[cfg(feature = "c-codecs")]
fn unpack_zstd(packed: &[u8], block: &mut [u8]) -> Option<usize> {
    use std::cell::RefCell;

    thread_local! {
        /// Creating a context costs more than decompressing a block.
        static BACK: RefCell<zstd_safe::DCtx<'static>> = RefCell::new(zstd_safe::DCtx::create());
    }
    BACK.with_borrow_mut(|back| back.decompress(block, packed).ok())
}

#[cfg(not(feature = "c-codecs"))]
fn unpack_zstd(_: &[u8], _: &mut [u8]) -> Option<usize> {
    tracing::error!("a block is compressed by zstd, which this build does not have");
    None
}

#[cfg(test)]
mod tests {
    use blockyard_store::buffer::Memory;

    use super::*;

    #[test]
    fn blocks_come_back_and_what_does_not_shrink_stays() {
        let mut into = ScratchBuffer::new(&Memory::new(1));
        into.first(packed_max(16_384)).fill(9);
        let text: Vec<u8> = b"all work and no play ".iter().copied().cycle().take(16_384).collect();
        let mut noise = vec![0; 16_384];
        fastrand::Rng::with_seed(1).fill(&mut noise);
        let mut all = vec![Compression::Lz4];
        if cfg!(feature = "c-codecs") {
            all.extend([Compression::Zstd(1), Compression::Zstd(19)]);
        }
        for compression in all {
            let mut packer = Packer::new(compression);
            let (codec, len) = packer.compress(&text, &mut into, 4096).unwrap();
            assert_eq!(len, 4096);
            let mut back = vec![0; text.len()];
            assert!(is_decodable(codec, &into[..len], &mut back));
            assert_eq!(back, text);
            assert!(!is_decodable(codec, &into[..len], &mut back[1..]), "another length");
            assert!(!is_decodable(codec, &into[..3], &mut back), "cut short");
            assert!(!is_decodable(codec, &[0xff; 64], &mut back), "no length");
            assert_eq!(packer.compress(&noise, &mut into, 4096), None);
            assert_eq!(packer.compress(&text[..4096], &mut into, 4096), None, "no unit is saved");
            assert_eq!(packer.compress(&text[..4096], &mut into, 512), Some((codec, 512)));
        }
        assert!(!is_decodable(Codec::Raw, &text[1..], &mut vec![0; text.len()]));
        assert_eq!(Packer::new(Compression::None).compress(&text, &mut into, 512), None);
    }
}

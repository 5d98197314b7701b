//! An entry of 16 bytes refers to something on disk: address, length, codec and checksum. Leaves
//! refer to blocks by entries, nodes to pages, and the superblock to the catalogue.

use crate::bytes::{put_u64, u64_at};
use crate::{PAGE_BYTES, UNIT};

/// Length of an entry on disk, in bytes.
pub const ENTRY_BYTES: usize = 16;

/// Set if the entry refers to something.
const PRESENT: u64 = 1 << 63;
/// Number of bits of the address, in units.
const ADDRESS_BITS: u32 = 40;
/// Position of the length, which is stored in units less one.
const LEN_SHIFT: u32 = ADDRESS_BITS;
/// Number of bits of the length.
const LEN_BITS: u32 = 8;
/// Position of the codec.
const CODEC_SHIFT: u32 = LEN_SHIFT + LEN_BITS;
/// Number of bits of the codec.
const CODEC_BITS: u32 = 4;

/// Most bytes that an entry refers to.
pub const STORED_MAX: u32 = (1 << LEN_BITS) * UNIT as u32;
/// The first address beyond those that an entry can refer to.
pub const ADDRESS_END: u64 = (1 << ADDRESS_BITS) * UNIT;

/// How stored bytes become a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// The stored bytes are the block.
    #[default]
    Raw = 0,
    /// An LZ4 block after four bytes with its length.
    Lz4 = 1,
    /// A Zstandard frame after four bytes with its length.
    Zstd = 2,
    /// The block, encrypted.
    SealedRaw = 8,
    /// An LZ4 block, encrypted.
    SealedLz4 = 9,
    /// A Zstandard frame, encrypted.
    SealedZstd = 10,
}

impl Codec {
    /// The codec of a number.
    #[inline]
    pub fn from_number(number: u8) -> Option<Codec> {
        match number {
            0 => Some(Codec::Raw),
            1 => Some(Codec::Lz4),
            2 => Some(Codec::Zstd),
            8 => Some(Codec::SealedRaw),
            9 => Some(Codec::SealedLz4),
            10 => Some(Codec::SealedZstd),
            _ => None,
        }
    }

    /// Whether the stored bytes are encrypted.
    #[inline]
    pub fn is_sealed(self) -> bool {
        self as u8 >= Codec::SealedRaw as u8
    }

    /// The codec of the same bytes when they are encrypted.
    #[inline]
    pub fn sealed(self) -> Codec {
        match self {
            Codec::Raw | Codec::SealedRaw => Codec::SealedRaw,
            Codec::Lz4 | Codec::SealedLz4 => Codec::SealedLz4,
            Codec::Zstd | Codec::SealedZstd => Codec::SealedZstd,
        }
    }

    /// The codec of the bytes after decryption.
    #[inline]
    pub fn opened(self) -> Codec {
        match self {
            Codec::Raw | Codec::SealedRaw => Codec::Raw,
            Codec::Lz4 | Codec::SealedLz4 => Codec::Lz4,
            Codec::Zstd | Codec::SealedZstd => Codec::Zstd,
        }
    }
}

/// A reference to something on disk, with its checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Entry {
    word: u64,
    crc: u64,
}

impl Entry {
    /// No reference: a block that reads as zeros, or a page that does not exist.
    pub const HOLE: Entry = Entry { word: 0, crc: 0 };

    /// Refers to the bytes at this address.
    ///
    /// # Panics
    /// If address or length is not a multiple of the unit, or too large: callers bound both.
    #[inline]
    pub fn new(address: u64, stored_bytes: u32, codec: Codec, crc: u64) -> Entry {
        let whole = address.is_multiple_of(UNIT) && u64::from(stored_bytes).is_multiple_of(UNIT);
        assert!(whole && (1..=STORED_MAX).contains(&stored_bytes) && address < ADDRESS_END);
        let len = u64::from(stored_bytes) / UNIT - 1;
        let units = address / UNIT;
        let word = PRESENT | units | len << LEN_SHIFT | (codec as u64) << CODEC_SHIFT;
        Entry { word, crc }
    }

    /// Whether the entry refers to nothing.
    #[inline]
    pub fn is_hole(&self) -> bool {
        self.word & PRESENT == 0
    }

    /// The entry of a block that was lost with the leaf that named it; `page_crc` is that leaf's
    /// checksum. Its address is 0, where the pool has a group header or a page, and never a block.
    #[inline]
    pub fn lost(page_crc: u64) -> Entry {
        Entry::new(0, PAGE_BYTES as u32, Codec::Raw, !page_crc)
    }

    /// Whether this entry of a block marks a lost block.
    #[inline]
    pub fn is_lost(&self) -> bool {
        !self.is_hole() && self.address() == 0
    }

    /// The address in the pool, in bytes.
    #[inline]
    pub fn address(&self) -> u64 {
        (self.word & ((1 << ADDRESS_BITS) - 1)) * UNIT
    }

    /// The stored length, in bytes.
    #[inline]
    pub fn stored_bytes(&self) -> u32 {
        ((self.word >> LEN_SHIFT & ((1 << LEN_BITS) - 1)) as u32 + 1) * UNIT as u32
    }

    /// The codec of the stored bytes.
    #[inline]
    pub fn codec(&self) -> Codec {
        let number = self.word >> CODEC_SHIFT & ((1 << CODEC_BITS) - 1);
        Codec::from_number(number as u8).expect("it was checked when it was read")
    }

    /// The checksum of the stored bytes.
    #[inline]
    pub fn crc(&self) -> u64 {
        self.crc
    }

    /// Writes the entry.
    #[inline]
    pub fn print(&self, into: &mut [u8]) {
        put_u64(into, 0, self.word);
        put_u64(into, 8, self.crc);
    }

    /// Parses an entry; `None` if it is invalid.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Option<Entry> {
        Entry::of_words(u64_at(bytes, 0), u64_at(bytes, 8))
    }

    /// Makes an entry of its two words; `None` if it is invalid.
    #[inline]
    pub fn of_words(word: u64, crc: u64) -> Option<Entry> {
        let entry = Entry { word, crc };
        let used = PRESENT | ((1 << (CODEC_SHIFT + CODEC_BITS)) - 1);
        let codec = (entry.word >> CODEC_SHIFT & ((1 << CODEC_BITS) - 1)) as u8;
        let known = Codec::from_number(codec).is_some() && entry.word & !used == 0;
        (entry == Entry::HOLE || (!entry.is_hole() && known)).then_some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printing_and_parsing_round_trip() {
        let mut bytes = [0; ENTRY_BYTES];
        for (address, len) in [(0, 512), (512, 4096), (ADDRESS_END - 512, STORED_MAX)] {
            let plain = [Codec::Raw, Codec::Lz4, Codec::Zstd];
            for codec in plain.into_iter().chain(plain.map(Codec::sealed)) {
                assert_eq!(codec.sealed().opened(), codec.opened());
                assert_eq!(codec.is_sealed(), codec == codec.sealed());
                let entry = Entry::new(address, len, codec, 0x1234);
                entry.print(&mut bytes);
                let read = Entry::parse(&bytes).unwrap();
                assert_eq!(read, entry);
                assert_eq!((read.address(), read.stored_bytes()), (address, len));
                assert_eq!((read.codec(), read.crc(), read.is_hole()), (codec, 0x1234, false));
            }
        }
    }

    #[test]
    fn what_is_impossible_is_refused() {
        let parse = |word: u64| {
            let mut bytes = [0; ENTRY_BYTES];
            put_u64(&mut bytes, 0, word);
            Entry::parse(&bytes)
        };
        assert_eq!(parse(0), Some(Entry::HOLE));
        assert_eq!(parse(1), None, "something that is not there");
        assert_eq!(parse(PRESENT | 3 << CODEC_SHIFT), None, "a codec of the future");
        assert_eq!(parse(PRESENT | 1 << 60), None, "a bit that means nothing");
        let mut hole = [0; ENTRY_BYTES];
        hole[9] = 1;
        assert_eq!(Entry::parse(&hole), None, "a checksum of nothing");
    }
}

//! Where something is, how long it is, how it is compressed, and its checksum: 16 bytes. A block in
//! a leaf of the map, a page in a node, and the catalogue in the superblock are named alike.

use super::{PAGE_BYTES, UNIT};
use crate::bytes::{put_u64, u64_at};

/// Length of an entry on disk.
pub const ENTRY_BYTES: usize = 16;

/// Set where there is something.
const PRESENT: u64 = 1 << 63;
/// Bits of the address, in units.
const ADDRESS_BITS: u32 = 40;
/// Where the length stands, in units less one.
const LEN_SHIFT: u32 = ADDRESS_BITS;
/// Bits of the length.
const LEN_BITS: u32 = 8;
/// Where the codec stands.
const CODEC_SHIFT: u32 = LEN_SHIFT + LEN_BITS;
/// Bits of the codec.
const CODEC_BITS: u32 = 4;

/// Longest thing that an entry names, in bytes.
pub const STORED_MAX: u32 = (1 << LEN_BITS) * UNIT as u32;
/// The first address beyond what an entry can name.
pub const ADDRESS_END: u64 = (1 << ADDRESS_BITS) * UNIT;

/// How stored bytes become a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// They are the block.
    #[default]
    Raw = 0,
    /// An LZ4 block behind four bytes that say how long it is.
    Lz4 = 1,
    /// The same by Zstandard.
    Zstd = 2,
}

impl Codec {
    /// The codec of a number.
    pub fn from_number(number: u8) -> Option<Codec> {
        match number {
            0 => Some(Codec::Raw),
            1 => Some(Codec::Lz4),
            2 => Some(Codec::Zstd),
            _ => None,
        }
    }
}

/// An entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Entry {
    word: u64,
    crc: u64,
}

impl Entry {
    /// Nothing: a block that reads as zeros, a page that does not exist.
    pub const HOLE: Entry = Entry { word: 0, crc: 0 };

    /// What lies at this address.
    ///
    /// # Panics
    /// If address or length is no multiple of the unit, or beyond what can be named: both come from
    /// our own bounds.
    pub fn new(address: u64, stored_bytes: u32, codec: Codec, crc: u64) -> Entry {
        let whole = address.is_multiple_of(UNIT) && u64::from(stored_bytes).is_multiple_of(UNIT);
        assert!(whole && (1..=STORED_MAX).contains(&stored_bytes) && address < ADDRESS_END);
        let len = u64::from(stored_bytes) / UNIT - 1;
        let units = address / UNIT;
        let word = PRESENT | units | len << LEN_SHIFT | (codec as u64) << CODEC_SHIFT;
        Entry { word, crc }
    }

    /// Whether there is nothing.
    #[inline]
    pub fn is_hole(&self) -> bool {
        self.word & PRESENT == 0
    }

    /// A block that was lost with the page of the map that named it, of this checksum: at the
    /// beginning of all, where there is a head of a group or a page, and never a block.
    pub(crate) fn lost(page_crc: u64) -> Entry {
        Entry::new(0, PAGE_BYTES as u32, Codec::Raw, !page_crc)
    }

    /// Whether this, which names a block, is one that was lost.
    #[inline]
    pub fn is_lost(&self) -> bool {
        !self.is_hole() && self.address() == 0
    }

    /// Where it is, in bytes from the pool's beginning.
    #[inline]
    pub fn address(&self) -> u64 {
        (self.word & ((1 << ADDRESS_BITS) - 1)) * UNIT
    }

    /// How long it is, in bytes.
    #[inline]
    pub fn stored_bytes(&self) -> u32 {
        ((self.word >> LEN_SHIFT & ((1 << LEN_BITS) - 1)) as u32 + 1) * UNIT as u32
    }

    /// How it is compressed.
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

    /// Writes it.
    pub fn print(&self, into: &mut [u8]) {
        put_u64(into, 0, self.word);
        put_u64(into, 8, self.crc);
    }

    /// Reads it; `None` if it is impossible.
    pub fn parse(bytes: &[u8]) -> Option<Entry> {
        Entry::of_words(u64_at(bytes, 0), u64_at(bytes, 8))
    }

    /// The same of its two words.
    pub(crate) fn of_words(word: u64, crc: u64) -> Option<Entry> {
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
    fn what_is_printed_is_read_back() {
        let mut bytes = [0; ENTRY_BYTES];
        for (address, len) in [(0, 512), (512, 4096), (ADDRESS_END - 512, STORED_MAX)] {
            for codec in [Codec::Raw, Codec::Lz4, Codec::Zstd] {
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

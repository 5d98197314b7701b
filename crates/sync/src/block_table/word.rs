//! The fields of a word of the block table; the head of `block_table` has the table of its bits.

use std::fmt;

/// The unit of a place, in bytes.
pub const PLACE_BYTES: u64 = 16;
/// Maximum number of places in a pool: 2^36, which is 1 TiB.
pub const PLACES_MAX: u64 = 1 << PLACE_BITS;
/// Maximum length of an object, in bytes.
pub const OBJECT_BYTES_MAX: usize = 1 << LEN_BITS;
/// Highest age.
pub const AGE_MAX: u8 = 7;
/// Highest number of a codec.
pub const CODEC_MAX: u8 = 3;

const PLACE_BITS: u32 = 36;
const LEN_SHIFT: u32 = PLACE_BITS;
const LEN_BITS: u32 = 16;
const KIND_SHIFT: u32 = 52;
const HUGE: u64 = 1 << 54;
const INCOMPRESSIBLE: u64 = 1 << 55;
const CODEC_SHIFT: u32 = 56;
const AGE_SHIFT: u32 = 58;
const UNDER_WRITEBACK: u64 = 1 << 61;
const SHARED: u64 = 1 << 62;
pub(super) const LOCKED: u64 = 1 << 63;

const PLACE_MASK: u64 = PLACES_MAX - 1;
const AGE_MASK: u64 = (AGE_MAX as u64) << AGE_SHIFT;
const KIND_MASK: u64 = 3 << KIND_SHIFT;
/// The fields that describe the contents and do not depend on their place.
const FLAGS: u64 = HUGE | INCOMPRESSIBLE | (CODEC_MAX as u64) << CODEC_SHIFT | AGE_MASK;

/// The kind of a block's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Never written, or discarded: zeros.
    Nothing,
    /// An object in the pool.
    Object,
    /// One 32-bit value, repeated.
    Same,
    /// On the backing file.
    Backing,
}

/// A word of the block table; the head of `block_table` has the table of its bits.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Word(pub(super) u64);

impl Word {
    /// The word of a block that was never written.
    pub const NOTHING: Word = Word(0);

    /// The word of a block that is stored as an object of `len_bytes` at `place`.
    #[inline]
    pub fn object(place: u64, len_bytes: usize) -> Word {
        Word::at(Kind::Object, place, len_bytes)
    }

    /// The word of a block that is stored on the backing file, `len_bytes` at `place`.
    #[inline]
    pub fn backing(place: u64, len_bytes: usize) -> Word {
        Word::at(Kind::Backing, place, len_bytes)
    }

    /// The word of a same-filled block, which repeats one value.
    #[inline]
    pub fn same(value: u32) -> Word {
        Word((Kind::Same as u64) << KIND_SHIFT | u64::from(value))
    }

    #[inline]
    fn at(kind: Kind, place: u64, len_bytes: usize) -> Word {
        debug_assert!(place < PLACES_MAX && (1..=OBJECT_BYTES_MAX).contains(&len_bytes));
        Word((kind as u64) << KIND_SHIFT | (len_bytes as u64 - 1) << LEN_SHIFT | place)
    }

    /// The word as a number, for listings.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The kind of the contents.
    #[inline]
    pub fn kind(self) -> Kind {
        match self.0 >> KIND_SHIFT & 3 {
            0 => Kind::Nothing,
            1 => Kind::Object,
            2 => Kind::Same,
            _ => Kind::Backing,
        }
    }

    /// The place of an object or of a block on the backing file, in units of [`PLACE_BYTES`].
    #[inline]
    pub fn place(self) -> u64 {
        self.0 & PLACE_MASK
    }

    /// The stored bytes of an object or of a block on the backing file.
    #[inline]
    pub fn len_bytes(self) -> usize {
        (self.0 >> LEN_SHIFT & (OBJECT_BYTES_MAX as u64 - 1)) as usize + 1
    }

    /// The value of a same-filled block.
    #[inline]
    pub fn value(self) -> u32 {
        self.0 as u32
    }

    /// The reference that a pin protects: kind and place; 0 if the word refers to nothing that
    /// could be freed.
    #[inline]
    pub fn reference(self) -> u64 {
        match self.kind() {
            Kind::Nothing | Kind::Same => 0,
            Kind::Object | Kind::Backing => self.0 & (KIND_MASK | PLACE_MASK),
        }
    }

    /// Whether the block is stored uncompressed.
    #[inline]
    pub fn is_huge(self) -> bool {
        self.0 & HUGE != 0
    }

    /// Returns the word with the huge flag set or cleared.
    #[inline]
    pub fn with_huge(self, huge: bool) -> Word {
        self.with(HUGE, huge)
    }

    /// Whether no algorithm makes the block smaller.
    #[inline]
    pub fn is_incompressible(self) -> bool {
        self.0 & INCOMPRESSIBLE != 0
    }

    /// Returns the word with the incompressible flag set or cleared.
    #[inline]
    pub fn with_incompressible(self, incompressible: bool) -> Word {
        self.with(INCOMPRESSIBLE, incompressible)
    }

    /// The algorithm that compressed the block.
    #[inline]
    pub fn codec(self) -> u8 {
        (self.0 >> CODEC_SHIFT) as u8 & CODEC_MAX
    }

    /// Returns the word with another algorithm.
    #[inline]
    pub fn with_codec(self, codec: u8) -> Word {
        debug_assert!(codec <= CODEC_MAX);
        let cleared = self.0 & !(u64::from(CODEC_MAX) << CODEC_SHIFT);
        Word(cleared | u64::from(codec & CODEC_MAX) << CODEC_SHIFT)
    }

    /// Rounds of idle tracking since the last access.
    #[inline]
    pub fn age(self) -> u8 {
        (self.0 >> AGE_SHIFT) as u8 & AGE_MAX
    }

    /// Returns the word with another age, at most [`AGE_MAX`].
    #[inline]
    pub fn with_age(self, age: u8) -> Word {
        Word(self.0 & !AGE_MASK | u64::from(age.min(AGE_MAX)) << AGE_SHIFT)
    }

    /// Whether a thread copies the block to the backing file.
    #[inline]
    pub fn is_under_writeback(self) -> bool {
        self.0 & UNDER_WRITEBACK != 0
    }

    /// Returns the word with the writeback flag set or cleared.
    #[inline]
    pub fn with_under_writeback(self, under: bool) -> Word {
        self.with(UNDER_WRITEBACK, under)
    }

    /// Whether other words may refer to the same object, which is retired with the last of them.
    #[inline]
    pub fn is_shared(self) -> bool {
        self.0 & SHARED != 0
    }

    /// Returns the word with the shared flag set or cleared.
    #[inline]
    pub fn with_shared(self, shared: bool) -> Word {
        self.with(SHARED, shared)
    }

    /// Whether a writer of a part has the block locked.
    #[inline]
    pub fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// Returns the word of the same object after a move to another place.
    #[inline]
    pub fn moved_to(self, place: u64) -> Word {
        debug_assert!(place < PLACES_MAX && self.kind() == Kind::Object);
        Word(self.0 & !PLACE_MASK | place)
    }

    /// Returns the word with codec, huge, incompressible and age of another word.
    #[inline]
    pub fn with_flags_of(self, other: Word) -> Word {
        Word(self.0 & !FLAGS | other.0 & FLAGS)
    }

    /// Whether both words have the same contents, and agree in the shared and the locked flag.
    #[inline]
    pub fn differs_in_flags_only(self, other: Word) -> bool {
        (self.0 ^ other.0) & !(FLAGS | UNDER_WRITEBACK) == 0
    }

    pub(crate) fn unlocked(self) -> Word {
        self.with(LOCKED, false)
    }

    #[inline]
    fn with(self, flag: u64, set: bool) -> Word {
        Word(if set { self.0 | flag } else { self.0 & !flag })
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind() {
            Kind::Nothing => f.write_str("Nothing")?,
            Kind::Same => write!(f, "Same({:#x})", self.value())?,
            kind => write!(f, "{kind:?}({:#x}, {} bytes)", self.place(), self.len_bytes())?,
        }
        let flags = [
            (self.is_huge(), "huge"),
            (self.is_incompressible(), "incompressible"),
            (self.is_under_writeback(), "under writeback"),
            (self.is_shared(), "shared"),
            (self.is_locked(), "locked"),
        ];
        flags.iter().filter(|(set, _)| *set).try_for_each(|(_, name)| write!(f, " {name}"))?;
        write!(f, " codec {} age {}", self.codec(), self.age())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn word_keeps_all_fields() {
        let word = Word::object(PLACES_MAX - 1, OBJECT_BYTES_MAX).with_codec(3).with_age(9);
        assert_eq!((word.kind(), word.place()), (Kind::Object, PLACES_MAX - 1));
        assert_eq!((word.len_bytes(), word.codec(), word.age()), (OBJECT_BYTES_MAX, 3, AGE_MAX));
        assert!(!word.is_huge() && !word.is_shared() && !word.is_locked());
        let flags = word.with_huge(true).with_shared(true).with_incompressible(true);
        let flags = flags.with_under_writeback(true);
        assert!(flags.is_huge() && flags.is_shared() && flags.is_incompressible());
        assert!(flags.is_under_writeback() && !flags.is_locked());
        assert_eq!(flags.reference(), word.reference());
        assert_eq!((flags.len_bytes(), flags.codec(), flags.age()), (OBJECT_BYTES_MAX, 3, 7));
        assert_ne!(Word::object(0, 1).reference(), 0, "an object at place 0 can be pinned");
        assert_ne!(Word::object(5, 1).reference(), Word::backing(5, 1).reference());
        assert_eq!(Word::same(u32::MAX).value(), u32::MAX);
        assert_eq!((Word::same(7).reference(), Word::NOTHING.reference()), (0, 0));
        assert_eq!(Word::same(0).kind(), Kind::Same);
        assert!(format!("{flags:?}").contains("huge incompressible under writeback shared"));
    }
}

//! A reference to a stored object: place and length.

use blockyard_sync::entry_words::{Kind, OBJECT_BYTES_MAX, Word};

/// The place and length of a block's stored contents in the pool. It fits in a [`Word`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    place: u64,
    len_bytes: u32,
}

impl Object {
    /// A word's length field may be too small for the pool's longest object: the field's maximum
    /// stands for that length.
    pub(super) fn new(place: u64, len_bytes: usize) -> Object {
        Object { place, len_bytes: len_bytes.min(OBJECT_BYTES_MAX) as u32 }
    }

    /// The object that a word refers to.
    #[inline]
    pub fn of(word: Word) -> Option<Object> {
        let object = || Object { place: word.place(), len_bytes: word.len_bytes() as u32 };
        (word.kind() == Kind::Object).then(object)
    }

    /// A word that refers to this object.
    #[inline]
    pub fn word(self) -> Word {
        Word::object(self.place, self.len_bytes())
    }

    /// Place of the object, in units of 16 bytes.
    #[inline]
    pub fn place(self) -> u64 {
        self.place
    }

    /// Length of the object as its word records it, without padding.
    #[inline]
    pub fn len_bytes(self) -> usize {
        self.len_bytes as usize
    }
}

//! A stored object: where it is and how long.

use blockyard_sync::entry_words::{Kind, OBJECT_BYTES_MAX, Word};

/// What a block's contents were made into, somewhere in the pool. It fits a [`Word`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    place: u64,
    len_bytes: u32,
}

impl Object {
    /// The longest objects of a pool may be longer than a word can say: that they are as long as
    /// it can say stands for it.
    pub(super) fn new(place: u64, len_bytes: usize) -> Object {
        Object { place, len_bytes: len_bytes.min(OBJECT_BYTES_MAX) as u32 }
    }

    /// The object that a word refers to.
    #[inline]
    pub fn of(word: Word) -> Option<Object> {
        let object = || Object { place: word.place(), len_bytes: word.len_bytes() as u32 };
        (word.kind() == Kind::Object).then(object)
    }

    /// A word that refers to it.
    #[inline]
    pub fn word(self) -> Word {
        Word::object(self.place, self.len_bytes())
    }

    /// Where it lies, in units of 16 bytes.
    #[inline]
    pub fn place(self) -> u64 {
        self.place
    }

    /// Its bytes as its word says, without what is lost to the grain.
    #[inline]
    pub fn len_bytes(self) -> usize {
        self.len_bytes as usize
    }
}

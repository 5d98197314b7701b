//! Equal blocks are stored once, where that is asked for.
//!
//! A write of a whole block looks up where blocks like it may be ([`Hints`]), by a key of its
//! bytes. It compares with what is stored there, byte by byte, and if that is the same it takes a
//! part in the object ([`crate::pool`]) instead of compressing and storing its own. A key alone
//! never decides.
//!
//! A hint names a block and not an object, so it stays right when that is moved or recompressed. It
//! may be overwritten by another's, and is of no use any more when its block is written: then the
//! next one of its like is stored anew. Same-filled blocks take no memory and are not looked for,
//! nor are those on the backing file; a write of a part of a block is not compared.

use blockyard_core::Status;
use blockyard_sync::hints::Hints;

use crate::blocks::{Blocks, Hand};
use crate::fill::repeated_word;

/// What equal blocks have in common, and few others.
pub(crate) fn key(plain: &[u8]) -> u64 {
    let (one, two) = plain.split_at(plain.len() / 2);
    let both = u64::from(crc32fast::hash(one)) << 32 | u64::from(crc32fast::hash(two));
    // Blocks of which only a half differs differ in all bits.
    let mixed = (both ^ both >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 29
}

impl Blocks {
    /// Stores the block that is in the hand, unless it is stored already.
    pub(crate) fn write_once(&self, hints: &Hints, hand: &mut Hand, block: u64) -> Status {
        if repeated_word(&hand.plain).is_some() {
            return self.write_alone(hand, block);
        }
        let key = key(&hand.plain);
        if self.share(hints, hand, block, key) {
            return Status::Ok;
        }
        let status = self.write_alone(hand, block);
        if status.is_ok() {
            hints.note(key, block);
        }
        status
    }

    /// Has the block refer to an object that has what is in the hand, if one is found.
    pub(crate) fn share(&self, hints: &Hints, hand: &mut Hand, block: u64, key: u64) -> bool {
        let Hand { access, unpacker, plain, other, tally, .. } = hand;
        for of in hints.find(key) {
            let mut differs = false;
            let shared = access.share(block, of, |word, stored| {
                // What is damaged is no equal.
                let unpacked = self.form.unpack_here(unpacker, word, stored, other);
                differs = unpacked.is_err() || other != plain;
                !differs
            });
            if let Some((old, new)) = shared {
                self.form.replaced(tally, old, new);
                return true;
            }
            if differs {
                hints.forget(key, of);
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_in_both_halves() {
        let mut keys = Vec::new();
        for at in [0, 1, 2047, 2048, 4095] {
            for value in 0..=255 {
                let mut block = vec![7; 4096];
                block[at] = value;
                keys.push(key(&block));
            }
        }
        let tags = |keys: &[u64], shift: u32| {
            let mut tags: Vec<u32> = keys.iter().map(|key| (key >> shift) as u32).collect();
            tags.sort_unstable();
            tags.dedup();
            tags.len()
        };
        // The block of sevens is there five times.
        assert_eq!((tags(&keys, 0), tags(&keys, 32)), (5 * 255 + 1, 5 * 255 + 1));
    }
}

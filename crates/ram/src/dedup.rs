//! Deduplication: equal blocks are stored once if the device is configured so.
//!
//! A write of a whole block computes a key of its bytes and looks up where equal blocks may be
//! ([`DedupHints`]). It compares its bytes with those stored there. If they are equal, the block
//! shares that object ([`crate::pool`]) and nothing is compressed or stored. A key alone never
//! decides.
//!
//! A hint names a block and not an object, so it stays valid when the object moves or is
//! recompressed. Another hint may overwrite it, and it becomes useless when its block is written;
//! then the next equal block is stored separately. Same-filled blocks take no memory, so they are
//! not deduplicated. Blocks on the backing file are not deduplicated either, nor are writes of a
//! part of a block.

use blockyard_core::Status;
use blockyard_sync::dedup_hints::DedupHints;

use crate::blocks::{Blocks, Workspace};
use crate::fill::repeated_word;

/// A hash of a block, under which its hint is stored: equal blocks have equal keys.
pub(crate) fn key(plain: &[u8]) -> u64 {
    let (one, two) = plain.split_at(plain.len() / 2);
    let both = u64::from(crc32fast::hash(one)) << 32 | u64::from(crc32fast::hash(two));
    // Mixes the bits, so that blocks that differ in only one half differ in all bits of the key.
    let mixed = (both ^ both >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 29
}

impl Blocks {
    /// Stores the block in `workspace.plain`, or shares an equal one.
    pub(crate) fn write_once(
        &self,
        hints: &DedupHints,
        workspace: &mut Workspace,
        block: u64,
    ) -> Status {
        if repeated_word(&workspace.plain).is_some() {
            return self.write_alone(workspace, block);
        }
        let key = key(&workspace.plain);
        if self.share(hints, workspace, block, key) {
            return Status::Ok;
        }
        let status = self.write_alone(workspace, block);
        if status.is_ok() {
            hints.note(key, block);
        }
        status
    }

    /// Makes the block refer to an object that equals `workspace.plain`, if a hint leads to one.
    pub(crate) fn share(
        &self,
        hints: &DedupHints,
        workspace: &mut Workspace,
        block: u64,
        key: u64,
    ) -> bool {
        let Workspace { access, unpacker, plain, other, tally, .. } = workspace;
        for of in hints.find(key) {
            let mut differs = false;
            let shared = access.share(block, of, |word, stored| {
                // A damaged object equals nothing.
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
        // The block of sevens is stored five times.
        assert_eq!((tags(&keys, 0), tags(&keys, 32)), (5 * 255 + 1, 5 * 255 + 1));
    }
}

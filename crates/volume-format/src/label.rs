//! The label of a mirror copy: to which pair it belongs, and which of the two copies were good when
//! it was written. It distinguishes a stale copy from one that can be read.
//!
//! The label has two slots with the same contents. On a change the first slot is written, and the
//! second when the first is durable.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::bytes::{BlockHeader, put_u32, put_u64, u32_at, u64_at};
use crate::error::FormatError;

/// Name of the label's file.
pub const FILE: &str = "copy";

/// Length of a slot, in bytes.
pub const SLOT_BYTES: usize = 4096;

/// Number of slots.
pub const SLOTS: usize = 2;

/// Length of the file, in bytes.
pub const BYTES: usize = SLOTS * SLOT_BYTES;

/// Most bytes of the path of the other copy and of that of the copy that joins, together.
pub const PATH_BYTES_MAX: usize = 4000;

/// Whether bytes begin with a label's magic number; the rest is not checked.
pub fn is_marked(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// The newest version that this program writes and reads. A label without a resync is of version 1,
/// so that older programs read it.
pub const VERSION: u32 = 2;

const WHAT: &str = "label of a copy";
const MAGIC: [u8; 8] = *b"BLKYCPY\n";
const SEAL: BlockHeader = BlockHeader { what: WHAT, magic: MAGIC, version: VERSION, oldest: 1 };
/// Offset of the path; the bytes after it are zero, or the path of the copy that joins.
const PATH: usize = 56;
/// Offset of the length of the path of the copy that joins.
const JOINING_LEN: usize = 4056;
/// Offset of the cursor plus 1; 0 if the copy does not join.
const CURSOR: usize = 4064;
/// Offset of the identity that the pair gets when the copy has joined.
const JOINING_SET: usize = 4072;
/// End of the fields of version 2.
const END: usize = JOINING_SET + 16;

/// A copy that is being made equal while the pool is in use, and then replaces another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joining {
    /// The path of the copy.
    pub path: PathBuf,
    /// The identity of the pair of which it will be a copy.
    pub set: [u8; 16],
}

/// The label of one mirror copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// Random identity of the pair, drawn when the pair was made.
    pub set: [u8; 16],
    /// Which of the two copies this is: 0 or 1.
    pub number: usize,
    /// Counts the changes of `good`.
    pub generation: u64,
    /// Which of the two copies are good, as far as this copy knows.
    pub good: [bool; 2],
    /// The path at which the other copy is, or was; empty if there is none. In the label of a copy
    /// that was detached, the path of one that still belongs to the pool.
    pub other: PathBuf,
    /// The copy that will replace one of these two.
    pub joining: Option<Joining>,
    /// In a copy that is being made equal while the pool is in use: segments below this number are
    /// equal, provided that the generation is that of the good copy.
    pub cursor: Option<u64>,
}

impl Label {
    /// Whether the copy was detached: no copy is good, as far as it knows.
    pub fn is_detached(&self) -> bool {
        self.good == [false, false]
    }

    /// Whether this copy is good, as far as it knows.
    pub fn is_good(&self) -> bool {
        self.good[self.number]
    }

    /// Whether the other copy is good, as far as this copy knows.
    pub fn is_other_good(&self) -> bool {
        self.good[1 - self.number]
    }

    /// Whether a slot has space for the paths.
    pub fn fits(&self) -> bool {
        let joining = self.joining.as_ref().map_or(0, |it| it.path.as_os_str().len());
        self.other.as_os_str().len() + joining <= PATH_BYTES_MAX
    }

    /// Writes the label as one slot.
    ///
    /// # Panics
    /// If `bytes` is shorter than a slot, or the paths do not fit; callers check that.
    pub fn print(&self, bytes: &mut [u8]) {
        let path = self.other.as_os_str().as_bytes();
        let joining = self.joining.as_ref().map(|it| it.path.as_os_str().as_bytes());
        let joining_len = joining.map_or(0, <[u8]>::len);
        assert!(self.fits(), "the paths are too long");
        let bytes = &mut bytes[..SLOT_BYTES];
        bytes.fill(0);
        put_u32(bytes, 20, self.number as u32);
        bytes[24..40].copy_from_slice(&self.set);
        put_u64(bytes, 40, self.generation);
        put_u32(bytes, 48, u32::from(self.good[0]) | u32::from(self.good[1]) << 1);
        put_u32(bytes, 52, path.len() as u32);
        bytes[PATH..PATH + path.len()].copy_from_slice(path);
        if let Some(Joining { path: joining, set }) = &self.joining {
            let at = PATH + path.len();
            bytes[at..at + joining_len].copy_from_slice(joining.as_os_str().as_bytes());
            put_u32(bytes, JOINING_LEN, joining_len as u32);
            bytes[JOINING_SET..END].copy_from_slice(set);
        }
        put_u64(bytes, CURSOR, self.cursor.map_or(0, |cursor| cursor.saturating_add(1)));
        let is_plain = self.joining.is_none() && self.cursor.is_none();
        BlockHeader { version: if is_plain { 1 } else { VERSION }, ..SEAL }.put(bytes);
    }

    /// Parses a slot.
    ///
    /// # Errors
    /// If the bytes are not a label that this program knows.
    pub fn parse(bytes: &[u8]) -> Result<Label, FormatError> {
        if bytes.len() < SLOT_BYTES {
            return Err(FormatError::Short { what: WHAT, len: bytes.len() as u64 });
        }
        let bytes = &bytes[..SLOT_BYTES];
        SEAL.check(bytes)?;
        let impossible =
            |field, value: u64, want| FormatError::Field { what: WHAT, field, value, want };
        let (number, good, len) = (u32_at(bytes, 20), u32_at(bytes, 48), u32_at(bytes, 52));
        if number > 1 {
            return Err(impossible("number", number.into(), "0 or 1"));
        }
        if good > 3 {
            return Err(impossible("good", good.into(), "a bit for each of two copies"));
        }
        if len as usize > PATH_BYTES_MAX {
            return Err(impossible("path length", len.into(), "4000 at most"));
        }
        let (path, rest) = bytes[PATH..].split_at(len as usize);
        // Version 1 has zeros in the place of the other fields.
        let joining_len = u32_at(bytes, JOINING_LEN);
        let is_new = u32_at(bytes, 16) > 1;
        if is_new && joining_len as usize > PATH_BYTES_MAX - path.len() {
            return Err(impossible("path length", joining_len.into(), "4000 at most, of both"));
        }
        let (joining, rest) = rest.split_at(if is_new { joining_len as usize } else { 0 });
        let (rest, fields) = rest.split_at(rest.len() - (SLOT_BYTES - JOINING_LEN));
        let reserved = rest.iter().chain(&fields[4..8]).chain(&fields[END - JOINING_LEN..]);
        let reserved = reserved.chain(if is_new { &[] } else { fields });
        if let Some(byte) = reserved.copied().find(|byte| *byte != 0) {
            return Err(impossible("a reserved byte", byte.into(), "0"));
        }
        let joining = (!joining.is_empty()).then(|| Joining {
            path: OsString::from_vec(joining.to_vec()).into(),
            set: bytes[JOINING_SET..END].try_into().expect("sixteen bytes are sixteen bytes"),
        });
        Ok(Label {
            set: bytes[24..40].try_into().expect("sixteen bytes are sixteen bytes"),
            number: number as usize,
            generation: u64_at(bytes, 40),
            good: [good & 1 != 0, good & 2 != 0],
            other: OsString::from_vec(path.to_vec()).into(),
            joining,
            cursor: u64_at(bytes, CURSOR).checked_sub(1),
        })
    }

    /// Parses both slots. Returns the newer one, and whether the other is equal.
    ///
    /// # Errors
    /// If neither slot is valid: the error of the first. If a slot is of a newer version, the error
    /// says so.
    pub fn newest(bytes: &[u8]) -> Result<(Label, bool), FormatError> {
        let slot = |number: usize| Label::parse(bytes.get(number * SLOT_BYTES..).unwrap_or(&[]));
        match (slot(0), slot(1)) {
            (Err(error @ FormatError::Version { .. }), _)
            | (_, Err(error @ FormatError::Version { .. })) => Err(error),
            (Ok(first), Ok(second)) if second.generation > first.generation => Ok((second, false)),
            (Ok(first), Ok(second)) => {
                let same = first == second;
                Ok((first, same))
            }
            (Ok(one), Err(_)) | (Err(_), Ok(one)) => Ok((one, false)),
            (Err(error), Err(_)) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(generation: u64) -> Label {
        Label {
            set: *b"0123456789abcdef",
            number: 1,
            generation,
            good: [true, false],
            other: "/srv/a".into(),
            joining: None,
            cursor: None,
        }
    }

    fn printed(generation: u64) -> Vec<u8> {
        let mut bytes = vec![0; SLOT_BYTES];
        label(generation).print(&mut bytes);
        bytes
    }

    #[test]
    fn printing_and_parsing_round_trip() {
        assert_eq!(Label::parse(&printed(7)), Ok(label(7)));
        assert!(!label(7).is_good() && label(7).is_other_good());
    }

    #[test]
    fn a_resync_makes_the_label_a_newer_version() {
        let mut bytes = vec![0; SLOT_BYTES];
        let mut round_trip = |label: &Label| {
            label.print(&mut bytes);
            (Label::parse(&bytes), u32_at(&bytes, 16))
        };
        let joining = Joining { path: "/srv/c".into(), set: *b"fedcba9876543210" };
        for (joining, cursor) in [(Some(joining.clone()), None), (None, Some(0)), (None, Some(9))] {
            let label = Label { joining, cursor, ..label(3) };
            assert_eq!(round_trip(&label), (Ok(label.clone()), 2));
        }
        assert_eq!(round_trip(&label(3)).1, 1);
        let longest = PathBuf::from("x".repeat(PATH_BYTES_MAX - 6));
        let label = Label { other: longest, joining: Some(joining), ..label(3) };
        assert_eq!(round_trip(&label), (Ok(label.clone()), 2));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = printed(6);
        for bit in (0..SLOT_BYTES * 8).step_by(7).chain(0..512) {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Label::parse(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn the_newer_slot_counts_and_one_is_enough() {
        let both = |first, second| [printed(first), printed(second)].concat();
        assert_eq!(Label::newest(&both(6, 6)), Ok((label(6), true)));
        assert_eq!(Label::newest(&both(7, 6)), Ok((label(7), false)));
        assert_eq!(Label::newest(&both(6, 7)), Ok((label(7), false)));
        for slot in 0..2 {
            let mut torn = both(6, 6);
            torn[slot * SLOT_BYTES + 100] ^= 1;
            assert_eq!(Label::newest(&torn), Ok((label(6), false)));
        }
        assert!(Label::newest(&[]).is_err() && Label::newest(&[0; BYTES]).is_err());
    }
}

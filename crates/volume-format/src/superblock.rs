//! The superblock: the identity and geometry of a pool, its newest checkpoint, and where the log
//! continues after it. Two slots are written alternately, so that one is intact after any power
//! cut.

use std::io;

use crate::bytes::{BlockHeader, put_u32, put_u64, u32_at, u64_at};
use crate::entry::{ENTRY_BYTES, Entry};
use crate::error::FormatError;
use crate::{VERSION, VERSION_OLDEST};

/// Name of the superblock's file.
pub const FILE: &str = "superblock";

/// Length of a slot in bytes, of which the first [`BYTES`] are used.
pub const SLOT_BYTES: usize = 4096;

/// Length of the checksummed part of a slot, in bytes.
pub const BYTES: usize = 512;

/// Number of slots.
pub const SLOTS: u64 = 2;

const WHAT: &str = "superblock";
const MAGIC: [u8; 8] = *b"BLKYVOL\n";
const SEAL: BlockHeader =
    BlockHeader { what: WHAT, magic: MAGIC, version: VERSION, oldest: VERSION_OLDEST };
/// Offset of the format version in a slot, in bytes.
const VERSION_AT: usize = 16;
/// Offset of the end of the last field; the bytes after it are zero.
const END: usize = 136;

/// Whether bytes begin with a superblock's magic number; the rest is not checked.
pub fn is_marked(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// The segment number that stands for none.
pub const SEGMENT_NONE: u32 = u32::MAX;

/// The place from which the log is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPlace {
    /// The segment that contains the next group, unless `next` does.
    pub segment: u32,
    /// Offset of the next group in `segment`, in bytes.
    pub offset: u32,
    /// The segment at whose beginning the next group is, if it is not in `segment`.
    pub next: u32,
    /// Number of the next group.
    pub number: u64,
    /// The checksum of the header of the group before.
    pub chain: u64,
}

/// The contents of a superblock slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Random identity of the pool, drawn when it was made.
    pub id: [u8; 16],
    /// Alignment of log groups, map pages and unencrypted blocks, in bytes: 512 to 4096.
    pub align: u32,
    /// Length of a segment in bytes.
    pub segment_bytes: u32,
    /// Number of superblocks written so far; its parity selects the slot.
    pub sequence: u64,
    /// The opening of the pool that wrote it. Later openings have higher numbers, with random steps
    /// between them.
    pub epoch: u64,
    /// The place from which the log is read after the checkpoint.
    pub log: LogPlace,
    /// The catalogue of the checkpoint: the top page of its tree.
    pub catalogue: Entry,
    /// Length of the catalogue in bytes.
    pub catalogue_bytes: u64,
    /// The checksum of the whole catalogue.
    pub catalogue_crc: u64,
    /// Groups up to this number were durable when the superblock was written.
    pub durable: u64,
}

/// Reads both slots. `read` fills a buffer from the beginning of the file. If the file ends after
/// the first slot, the second slot is zeros.
///
/// # Errors
/// As `read`.
pub fn read(into: &mut [u8], read: impl Fn(&mut [u8]) -> io::Result<()>) -> io::Result<()> {
    match read(into) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            into.fill(0);
            read(&mut into[..SLOT_BYTES])
        }
        all => all,
    }
}

impl Superblock {
    /// The offset in the file of the slot to which it is written, in bytes.
    pub fn slot(&self) -> u64 {
        self.sequence % SLOTS * SLOT_BYTES as u64
    }

    /// Writes the superblock.
    ///
    /// # Panics
    /// If `bytes` is too short.
    pub fn print(&self, bytes: &mut [u8]) {
        bytes.fill(0);
        put_u32(bytes, 20, self.align);
        bytes[24..40].copy_from_slice(&self.id);
        put_u32(bytes, 40, self.segment_bytes);
        put_u64(bytes, 48, self.sequence);
        put_u64(bytes, 56, self.epoch);
        put_u32(bytes, 64, self.log.segment);
        put_u32(bytes, 68, self.log.offset);
        put_u32(bytes, 72, self.log.next);
        put_u64(bytes, 80, self.log.number);
        put_u64(bytes, 88, self.log.chain);
        self.catalogue.print(&mut bytes[96..96 + ENTRY_BYTES]);
        put_u64(bytes, 112, self.catalogue_bytes);
        put_u64(bytes, 120, self.catalogue_crc);
        put_u64(bytes, 128, self.durable);
        SEAL.put(&mut bytes[..BYTES]);
    }

    /// Parses a superblock.
    ///
    /// # Errors
    /// If the bytes are not a superblock that this program knows.
    pub fn parse(bytes: &[u8]) -> Result<Superblock, FormatError> {
        if bytes.len() < BYTES {
            return Err(FormatError::Short { what: WHAT, len: bytes.len() as u64 });
        }
        SEAL.check(&bytes[..BYTES])?;
        let impossible =
            |field, value: u64, want| FormatError::Field { what: WHAT, field, value, want };
        let superblock = Superblock {
            id: bytes[24..40].try_into().expect("sixteen bytes are sixteen bytes"),
            align: u32_at(bytes, 20),
            segment_bytes: u32_at(bytes, 40),
            sequence: u64_at(bytes, 48),
            epoch: u64_at(bytes, 56),
            log: LogPlace {
                segment: u32_at(bytes, 64),
                offset: u32_at(bytes, 68),
                next: u32_at(bytes, 72),
                number: u64_at(bytes, 80),
                chain: u64_at(bytes, 88),
            },
            catalogue: Entry::parse(&bytes[96..96 + ENTRY_BYTES])
                .ok_or_else(|| impossible("catalogue", u64_at(bytes, 96), "a place on disk"))?,
            catalogue_bytes: u64_at(bytes, 112),
            catalogue_crc: u64_at(bytes, 120),
            durable: u64_at(bytes, 128),
        };
        let Superblock { align, segment_bytes, log, .. } = superblock;
        if !align.is_power_of_two() || !(512..=4096).contains(&align) {
            return Err(impossible("align", align.into(), "512, 1024, 2048 or 4096"));
        }
        if !segment_bytes.is_multiple_of(4096) || !(1 << 13..=1 << 30).contains(&segment_bytes) {
            return Err(impossible("segment_bytes", segment_bytes.into(), "8k to 1G"));
        }
        if log.offset > segment_bytes || !log.offset.is_multiple_of(align) {
            return Err(impossible("log.offset", log.offset.into(), "a place in a segment"));
        }
        match bytes[END..BYTES].iter().find(|byte| **byte != 0) {
            None => Ok(superblock),
            Some(byte) => Err(impossible("a reserved byte", u64::from(*byte), "0")),
        }
    }

    /// The format version of the newest valid slot.
    ///
    /// # Errors
    /// As [`Superblock::all`].
    pub fn newest_version(bytes: &[u8]) -> Result<u32, FormatError> {
        let newest = Superblock::newest(bytes)?.slot() as usize;
        Ok(u32_at(bytes, newest + VERSION_AT))
    }

    /// Rejects a superblock in the other slot's place: it is a misdirected write or read.
    fn in_slot(superblock: Superblock, slot: u64) -> Result<Superblock, FormatError> {
        let Superblock { sequence, .. } = superblock;
        match sequence % SLOTS == slot {
            true => Ok(superblock),
            false => {
                let want = "an even number in the first slot, an odd one in the second";
                Err(FormatError::Field { what: WHAT, field: "sequence", value: sequence, want })
            }
        }
    }

    /// For each slot, the newest valid version among several copies, or some version if none is
    /// valid. A slot of a newer format version takes precedence.
    pub fn best<'a>(copies: impl Iterator<Item = &'a [u8]> + Clone) -> Vec<u8> {
        let mut best = Vec::with_capacity(SLOTS as usize * SLOT_BYTES);
        for number in 0..SLOTS {
            let slots = copies.clone().filter_map(|copy| {
                let slot = copy.chunks(SLOT_BYTES).nth(number as usize)?;
                let parsed = Superblock::parse(slot);
                let rank = match parsed.and_then(|it| Superblock::in_slot(it, number)) {
                    Err(FormatError::Version { .. }) => (2, 0),
                    Ok(superblock) => (1, superblock.sequence),
                    Err(_) => (0, 0),
                };
                Some((rank, slot))
            });
            // Of equal slots, the first.
            let slot = slots.reduce(|best, other| if other.0 > best.0 { other } else { best });
            best.extend_from_slice(slot.map_or(&[], |(_, slot)| slot));
        }
        best
    }

    /// The newest valid slot.
    ///
    /// # Errors
    /// As [`Superblock::all`].
    pub fn newest(bytes: &[u8]) -> Result<Superblock, FormatError> {
        Ok(Superblock::all(bytes)?[0])
    }

    /// All valid slots, newest first; at least one.
    ///
    /// # Errors
    /// If no slot is valid: the error of the first. If a slot is of a newer version, the error says
    /// so.
    pub fn all(bytes: &[u8]) -> Result<Vec<Superblock>, FormatError> {
        let slots = bytes.chunks(SLOT_BYTES).take(SLOTS as usize).map(Superblock::parse);
        let slots: Vec<_> =
            (0..).zip(slots).map(|(slot, it)| Superblock::in_slot(it?, slot)).collect();
        let version = |slot: &&Result<Superblock, FormatError>| {
            matches!(slot, Err(FormatError::Version { .. }))
        };
        if let Some(Err(error)) = slots.iter().find(version) {
            return Err(error.clone());
        }
        let mut all: Vec<Superblock> = slots.iter().flatten().copied().collect();
        all.sort_by_key(|slot| std::cmp::Reverse(slot.sequence));
        match slots.into_iter().next() {
            _ if !all.is_empty() => Ok(all),
            Some(Err(error)) => Err(error),
            _ => Err(FormatError::Short { what: WHAT, len: bytes.len() as u64 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::crc;
    use crate::entry::Codec;

    fn superblock(sequence: u64) -> Superblock {
        Superblock {
            id: *b"0123456789abcdef",
            align: 4096,
            segment_bytes: 32 << 20,
            sequence,
            epoch: 3,
            log: LogPlace { segment: 1, offset: 8192, next: 2, number: 77, chain: 5 },
            catalogue: Entry::new(4096, 4096, Codec::Raw, 9),
            catalogue_bytes: 100,
            catalogue_crc: 7,
            durable: 76,
        }
    }

    fn printed(sequence: u64) -> Vec<u8> {
        let mut bytes = vec![0; SLOT_BYTES];
        superblock(sequence).print(&mut bytes);
        bytes
    }

    #[test]
    fn printing_and_parsing_round_trip() {
        assert_eq!(Superblock::parse(&printed(6)), Ok(superblock(6)));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = printed(6);
        for bit in 0..BYTES * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::parse(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn the_newer_of_two_counts_and_one_is_enough() {
        let both = [printed(6), printed(7)].concat();
        assert_eq!(Superblock::newest(&both).map(|it| it.sequence), Ok(7));
        let mut torn = both.clone();
        torn[SLOT_BYTES + 100] ^= 1;
        assert_eq!(Superblock::newest(&torn).map(|it| it.sequence), Ok(6));
        torn[100] ^= 1;
        assert!(matches!(Superblock::newest(&torn), Err(FormatError::Checksum { .. })));
        assert!(Superblock::newest(&[]).is_err());
        let astray = [printed(7), printed(7)].concat();
        assert_eq!(Superblock::newest(&astray).map(|it| it.sequence), Ok(7));
        let text = Superblock::newest(&[printed(7), printed(6)].concat()).unwrap_err().to_string();
        assert!(text.contains("sequence = 7"), "{text}");
    }

    #[test]
    fn of_two_copies_the_best_slots_count() {
        let (old, new) = ([printed(6), printed(7)].concat(), [printed(8), printed(7)].concat());
        let best = |first: &[u8], second: &[u8]| {
            Superblock::newest(&Superblock::best([first, second].into_iter()))
        };
        assert_eq!(best(&old, &new).map(|it| it.sequence), Ok(8));
        assert_eq!(best(&new, &old).map(|it| it.sequence), Ok(8));
        let mut torn = new.clone();
        torn[100] ^= 1;
        assert_eq!(best(&torn, &new).map(|it| it.sequence), Ok(8));
        assert_eq!(best(&torn, &torn).map(|it| it.sequence), Ok(7));
        assert_eq!(best(&vec![0; 8192], &old).map(|it| it.sequence), Ok(7));
        assert!(best(&[], &[]).is_err());
    }

    #[test]
    fn a_newer_version_is_refused_by_name() {
        let mut bytes = [printed(6), printed(7)].concat();
        put_u32(&mut bytes, 16, VERSION + 1);
        let crc = crc(&bytes[16..BYTES]);
        put_u64(&mut bytes, 8, crc);
        let text = Superblock::newest(&bytes).unwrap_err().to_string();
        assert_eq!(text, "`superblock` is of version 6; this program knows version 5");
    }

    #[test]
    fn older_versions_are_read_down_to_the_oldest() {
        let slot = |version: u32| {
            let mut bytes = printed(6);
            put_u32(&mut bytes, 16, version);
            let crc = crc(&bytes[16..BYTES]);
            put_u64(&mut bytes, 8, crc);
            Superblock::newest(&bytes)
        };
        assert_eq!(slot(VERSION_OLDEST), Ok(superblock(6)));
        let both = |old: u32| {
            let mut bytes = [printed(6), printed(7)].concat();
            put_u32(&mut bytes, 16, old);
            let crc = crc(&bytes[16..BYTES]);
            put_u64(&mut bytes, 8, crc);
            bytes
        };
        assert_eq!(Superblock::newest_version(&both(VERSION_OLDEST)), Ok(VERSION));
        let old = [&both(VERSION_OLDEST)[..SLOT_BYTES], &[0; SLOT_BYTES]].concat();
        assert_eq!(Superblock::newest_version(&old), Ok(VERSION_OLDEST));
        let text = slot(VERSION_OLDEST - 1).unwrap_err().to_string();
        assert_eq!(text, "`superblock` is of version 2; this program knows version 5");
    }
}

//! The superblock: identifies the disk in a backing directory. Written once, when the disk is
//! created.

use crate::error::FormatError;
use crate::geometry::MediaGeometry;
use crate::head::{self, Id, id_at, u32_at, u64_at};

/// Name of the superblock file.
pub const FILE: &str = "superblock";

/// Length of the file in bytes, in every version.
pub const BYTES: usize = 4096;

const MAGIC: [u8; 8] = *b"BLKYSMR\n";

/// End of the last field; all later bytes must be zero.
const END: usize = 72;

/// Whether these may be the bytes of a superblock that was not written completely.
pub(crate) fn is_begun(bytes: &[u8]) -> bool {
    head::is_begun(bytes, MAGIC)
}

/// Maximum number of data files.
pub const DATA_FILES_MAX: u32 = 256;

/// Maximum number of records of a journal.
pub const JOURNAL_RECORDS_MAX: u32 = 1 << 20;

/// The superblock of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Random identity from the creation of the disk. Every file but `lock` contains it.
    pub id: Id,
    /// The geometry of the disk.
    pub geometry: MediaGeometry,
    /// Number of data files: zone `n` is in file `n % data_files`.
    pub data_files: u32,
    /// Capacity of the journal in records.
    pub journal_records: u32,
}

impl Superblock {
    /// The bytes of the file.
    pub fn print(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        let geometry = &self.geometry;
        bytes[32..40].copy_from_slice(&geometry.bytes.to_le_bytes());
        bytes[40..48].copy_from_slice(&geometry.zone_bytes.to_le_bytes());
        bytes[48..56].copy_from_slice(&geometry.zone_capacity_bytes.to_le_bytes());
        bytes[56..60].copy_from_slice(&geometry.conventional_zones.to_le_bytes());
        bytes[60..64].copy_from_slice(&geometry.block_bytes.to_le_bytes());
        bytes[64..68].copy_from_slice(&self.data_files.to_le_bytes());
        bytes[68..72].copy_from_slice(&self.journal_records.to_le_bytes());
        head::seal(&mut bytes, MAGIC, &self.id);
        bytes
    }

    /// Parses the bytes of the file.
    ///
    /// # Errors
    /// If they are not a superblock that this program knows.
    pub fn parse(bytes: &[u8]) -> Result<Superblock, FormatError> {
        head::check(FILE, bytes, BYTES, MAGIC)?;
        let superblock = Superblock {
            id: id_at(bytes, 16),
            geometry: MediaGeometry {
                bytes: u64_at(bytes, 32),
                zone_bytes: u64_at(bytes, 40),
                zone_capacity_bytes: u64_at(bytes, 48),
                conventional_zones: u32_at(bytes, 56),
                block_bytes: u32_at(bytes, 60),
            },
            data_files: u32_at(bytes, 64),
            journal_records: u32_at(bytes, 68),
        };
        superblock.geometry.check(FILE)?;
        let bounded = |field, value: u32, max, want| match (1..=max).contains(&value) {
            true => Ok(()),
            false => Err(FormatError::field(FILE, field, u64::from(value), want)),
        };
        bounded("data_files", superblock.data_files, DATA_FILES_MAX, "1 to 256")?;
        let records = superblock.journal_records;
        bounded("journal_records", records, JOURNAL_RECORDS_MAX, "1 to 1048576")?;
        match bytes[END..BYTES].iter().find(|byte| **byte != 0) {
            None => Ok(superblock),
            Some(byte) => Err(FormatError::reserved(FILE, *byte)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        let geometry = MediaGeometry {
            bytes: 14 << 40,
            zone_bytes: 256 << 20,
            zone_capacity_bytes: 255 << 20,
            conventional_zones: 524,
            block_bytes: 4096,
        };
        Superblock { id: *b"0123456789abcdef", geometry, data_files: 16, journal_records: 32_768 }
    }

    /// A superblock with one byte changed and a correct checksum.
    fn forged(at: usize, byte: u8) -> Vec<u8> {
        let mut bytes = superblock().print();
        bytes[at] = byte;
        let crc = head::crc(&bytes[12..]);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    #[test]
    fn printed_values_parse_back() {
        assert_eq!(Superblock::parse(&superblock().print()), Ok(superblock()));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = superblock().print();
        for bit in 0..BYTES * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::parse(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn an_invalid_superblock_field_is_named() {
        let text = |bytes: &[u8]| Superblock::parse(bytes).unwrap_err().to_string();
        assert!(text(&forged(12, 1)).contains("version 1; this program knows version 2"));
        assert!(text(&forged(100, 1)).contains("a reserved byte = 1"));
        assert!(text(&forged(64, 0)).contains("data_files = 0"));
        assert!(text(&superblock().print()[..4095]).contains("has 4095 bytes, not 4096"));
        assert!(text(&[0; BYTES]).contains("does not begin with the mark"));
    }
}

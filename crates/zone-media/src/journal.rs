//! The journal: the changes of zones since the last checkpoint, in records of 32 bytes, after a
//! label that identifies the disk.
//!
//! A record is valid if its checksum matches, its checkpoint is that of the table, its index is its
//! position, and all earlier records are valid. A power cut during a write leaves invalid records
//! at the end, which were never reported as durable. A record also contains how many records were
//! durable when it was written. If one of those is invalid, the journal was damaged later, which is
//! an error.

use crate::error::FormatError;
use crate::geometry::MediaGeometry;
use crate::head::{self, Id, LABEL_BYTES, Label, crc, is_zero, u32_at, u64_at};
use crate::zone_word::{ZoneRecord, unpack};

/// Name of the journal file.
pub const FILE: &str = "journal";

/// Length of a record in bytes.
pub const RECORD_BYTES: usize = 32;

const MAGIC: [u8; 8] = *b"BLKYJRN\n";

/// The label of a disk's journal, with which it begins.
pub fn label(id: &Id) -> Label {
    Label { magic: MAGIC, id: *id, number: 0 }
}

/// Length in bytes of a journal with this many records.
pub fn len_bytes(records: u32) -> u64 {
    offset_of(records)
}

/// Offset of the record at a place, in bytes.
pub fn offset_of(index: u32) -> u64 {
    LABEL_BYTES as u64 + u64::from(index) * RECORD_BYTES as u64
}

/// Whether these may be the first bytes of a journal that the creation of a disk has written,
/// completely or not: without a record.
pub(crate) fn is_begun(bytes: &[u8]) -> bool {
    let (label, records) = bytes.split_at(bytes.len().min(LABEL_BYTES));
    head::is_begun(label, MAGIC) && is_zero(records)
}

/// A journal record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalRecord {
    /// Position of the record: the first one after a checkpoint is 0.
    pub index: u32,
    /// The preceding checkpoint.
    pub checkpoint: u64,
    /// Zone number.
    pub zone: u32,
    /// Number of records that were durable when this one was written.
    pub durable: u32,
    /// The state of the zone.
    pub word: u64,
}

impl JournalRecord {
    /// The bytes of the record.
    pub fn print(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[4..8].copy_from_slice(&self.index.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.checkpoint.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.zone.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.durable.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.word.to_le_bytes());
        let crc = crc(&bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Parses a record; `None` if its checksum is wrong.
    pub fn parse(bytes: &[u8; RECORD_BYTES]) -> Option<JournalRecord> {
        let record = JournalRecord {
            index: u32_at(bytes, 4),
            checkpoint: u64_at(bytes, 8),
            zone: u32_at(bytes, 16),
            durable: u32_at(bytes, 20),
            word: u64_at(bytes, 24),
        };
        (crc(&bytes[4..]) == u32_at(bytes, 0)).then_some(record)
    }
}

/// The changes that the journal adds to a checkpoint's table, in order.
///
/// # Errors
/// If it is the journal of another disk, a valid record contains something impossible, or something
/// durable is missing.
pub fn replay(
    bytes: &[u8],
    id: &Id,
    checkpoint: u64,
    geometry: &MediaGeometry,
) -> Result<Vec<(u32, ZoneRecord)>, FormatError> {
    label(id).check(FILE, bytes)?;
    let mut changes = Vec::new();
    let mut counting = true;
    for (place, chunk) in bytes[LABEL_BYTES..].as_chunks::<RECORD_BYTES>().0.iter().enumerate() {
        let record = JournalRecord::parse(chunk);
        let counts = |record: &JournalRecord| {
            record.checkpoint == checkpoint && record.index as usize == place
        };
        match record {
            Some(record) if counting && counts(&record) => {
                changes.push(state(&record, geometry)?);
            }
            record => {
                counting = false;
                if let Some(record) = record {
                    check_nothing_lost(&record, checkpoint, changes.len())?;
                }
            }
        }
    }
    Ok(changes)
}

/// The zone of a record, and its state.
fn state(
    record: &JournalRecord,
    geometry: &MediaGeometry,
) -> Result<(u32, ZoneRecord), FormatError> {
    let JournalRecord { zone, word, .. } = *record;
    let known = (zone < geometry.zone_count()).then(|| unpack(word, zone, geometry)).flatten();
    match known {
        Some(state) => Ok((zone, state)),
        None => Err(FormatError::zone(FILE, zone, word)),
    }
}

/// Checks whether a record after the end shows that something durable was lost.
fn check_nothing_lost(
    record: &JournalRecord,
    checkpoint: u64,
    count: usize,
) -> Result<(), FormatError> {
    if record.checkpoint > checkpoint {
        // A checkpoint is durable before its first record is written.
        let what = format!("the table of checkpoint {}", record.checkpoint);
        return Err(FormatError::lost(super::tables::FILE, what));
    }
    if record.checkpoint == checkpoint && record.durable as usize > count {
        return Err(FormatError::lost(FILE, format!("record {count}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::fixture::GEOMETRY;
    use crate::head::fixture::ID;
    use blockyard_core::zone::ZoneCond;

    const START: usize = LABEL_BYTES;

    fn record(index: u32, checkpoint: u64, durable: u32) -> JournalRecord {
        JournalRecord {
            index,
            checkpoint,
            zone: 3 + index,
            durable,
            word: u64::from(index + 1) << 8 | 4,
        }
    }

    fn file(records: &[JournalRecord]) -> Vec<u8> {
        let records = records.iter().flat_map(JournalRecord::print);
        label(&ID).print().into_iter().chain(records).collect()
    }

    fn zones(bytes: &[u8], checkpoint: u64) -> Vec<u32> {
        let changes = replay(bytes, &ID, checkpoint, &GEOMETRY).unwrap();
        changes.into_iter().map(|(zone, _)| zone).collect()
    }

    #[test]
    fn records_count_until_one_does_not() {
        let old = JournalRecord { zone: 9, ..record(2, 6, 2) };
        let bytes = file(&[record(0, 7, 0), record(1, 7, 0), old]);
        assert_eq!(zones(&bytes, 7), [3, 4]);
        assert_eq!(zones(&bytes[..START + 33], 7), [3], "a record that was cut");
        let changes = replay(&bytes, &ID, 7, &GEOMETRY).unwrap();
        assert_eq!(changes[1].1.cond, ZoneCond::Closed);
        assert_eq!(changes[1].1.written_sectors, 2);
    }

    /// Sectors of a file reach the disk in any order: a record may be present and an earlier one
    /// missing.
    #[test]
    fn records_after_a_gap_are_ignored() {
        let mut bytes = file(&[record(0, 7, 0), record(1, 7, 0), record(2, 7, 0)]);
        bytes[START + 32..START + 64].fill(0);
        assert_eq!(zones(&bytes, 7), [3]);
    }

    #[test]
    fn damage_to_what_was_durable_is_an_error() {
        let mut bytes = file(&[record(0, 7, 0), record(1, 7, 0), record(2, 7, 2)]);
        bytes[START + 40] ^= 4;
        let lost = replay(&bytes, &ID, 7, &GEOMETRY).unwrap_err();
        assert_eq!(
            lost.to_string(),
            "`journal` is damaged: record 1 was durable and is not there any more"
        );
        let bytes = file(&[record(0, 8, 0)]);
        let lost = replay(&bytes, &ID, 7, &GEOMETRY).unwrap_err();
        assert!(lost.to_string().contains("the table of checkpoint 8"));
    }

    #[test]
    fn the_journal_of_another_disk_is_refused() {
        let refused = replay(&file(&[record(0, 7, 0)]), b"fedcba9876543210", 7, &GEOMETRY);
        assert!(matches!(refused, Err(FormatError::Foreign { .. })));
    }

    #[test]
    fn invalid_records_are_refused() {
        for (zone, word) in [(16, 0x104), (3, 0x100), (1, 0x104), (3, 2049 << 8 | 4)] {
            let bytes = file(&[JournalRecord { zone, word, ..record(0, 7, 0) }]);
            assert!(matches!(replay(&bytes, &ID, 7, &GEOMETRY), Err(FormatError::Zone { .. })));
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = record(1, 7, 1).print();
        for bit in 0..RECORD_BYTES * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(JournalRecord::parse(&flipped), None, "bit {bit}");
        }
    }
}

//! The full table of zones, in two slots: a checkpoint overwrites the older slot, so that the newer
//! one and its journal stay valid until the checkpoint is durable.

use crate::error::FormatError;
use crate::geometry::{MediaGeometry, ZONES_MAX};
use crate::head::{self, Id, is_zero, u32_at, u64_at};
use crate::zone_word::{ZoneRecord, unpack};

/// Name of the tables file.
pub const FILE: &str = "tables";

const MAGIC: [u8; 8] = *b"BLKYTAB\n";

/// Length of a slot's head in bytes; the words of the zones follow.
const HEAD: usize = 64;

/// Alignment of a slot in bytes.
const ALIGN: u64 = 4096;

/// The bit in `flags` of a table that was written by a clean close.
const CLEAN: u32 = 1;

/// A full table of zones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneTable {
    /// Checkpoint number. Each is used once; the journal records that follow contain it.
    pub checkpoint: u64,
    /// Whether the disk was closed with this table.
    pub clean: bool,
    /// The zones by number.
    pub records: Vec<ZoneRecord>,
}

/// Maximum length of the file in bytes.
pub(crate) const BYTES_MAX: u64 = 2 * (8 * ZONES_MAX + ALIGN);

/// Length of a slot in bytes.
pub fn slot_bytes(geometry: &MediaGeometry) -> u64 {
    (HEAD as u64 + 8 * u64::from(geometry.zone_count())).next_multiple_of(ALIGN)
}

/// Offset of a checkpoint's slot in the file.
pub fn slot_of(checkpoint: u64, geometry: &MediaGeometry) -> u64 {
    checkpoint % 2 * slot_bytes(geometry)
}

/// The bytes of a slot.
pub fn print(id: &Id, checkpoint: u64, clean: bool, words: &[u64]) -> Vec<u8> {
    let mut bytes = vec![0; HEAD + 8 * words.len()];
    bytes[32..40].copy_from_slice(&checkpoint.to_le_bytes());
    let zones = u32::try_from(words.len()).expect("a medium's zones are bounded");
    bytes[40..44].copy_from_slice(&zones.to_le_bytes());
    bytes[44..48].copy_from_slice(&if clean { CLEAN } else { 0 }.to_le_bytes());
    for (chunk, word) in bytes[HEAD..].chunks_exact_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    head::seal(&mut bytes, MAGIC, id);
    bytes
}

/// Whether these may be the bytes of a file that the creation of a disk has written, completely or
/// not: nothing but the first checkpoint.
pub(crate) fn is_begun(bytes: &[u8]) -> bool {
    let (even, odd) = bytes.split_at(bytes.len() / 2);
    let is_first = odd.starts_with(&MAGIC) && odd.len() >= HEAD && u64_at(odd, 32) == 1;
    (bytes.len() as u64).is_multiple_of(2 * ALIGN)
        && is_zero(even)
        && (is_first || is_zero(&odd[..HEAD.min(odd.len())]))
}

/// Parses the bytes of a slot.
///
/// # Errors
/// If they are not a table of this disk.
pub fn parse(bytes: &[u8], id: &Id, geometry: &MediaGeometry) -> Result<ZoneTable, FormatError> {
    let zones = geometry.zone_count();
    let len = HEAD + 8 * zones as usize;
    head::check(FILE, bytes, len, MAGIC)?;
    head::check_id(FILE, bytes, id)?;
    let field = |field, value, want| Err(FormatError::field(FILE, field, value, want));
    let (found, flags) = (u32_at(bytes, 40), u32_at(bytes, 44));
    if found != zones {
        return field("zones", u64::from(found), "as many as in `superblock`");
    }
    if flags & !CLEAN != 0 {
        return field("flags", u64::from(flags), "0 or 1; a newer program may have written it");
    }
    let checkpoint = u64_at(bytes, 32);
    if checkpoint == 0 || checkpoint == u64::MAX {
        return field("checkpoint", checkpoint, "1 or more, with one to come");
    }
    let words = bytes[HEAD..len].chunks_exact(8).map(|chunk| u64_at(chunk, 0));
    let records = (0..zones).zip(words).map(|(zone, word)| {
        unpack(word, zone, geometry).ok_or(FormatError::zone(FILE, zone, word))
    });
    let records = records.collect::<Result<Vec<_>, _>>()?;
    Ok(ZoneTable { checkpoint, clean: flags & CLEAN != 0, records })
}

/// The newer one of the two slots in the file.
///
/// # Errors
/// If both are invalid: the error of the slot that looks less like a torn write.
pub fn newest(bytes: &[u8], id: &Id, geometry: &MediaGeometry) -> Result<ZoneTable, FormatError> {
    let slot = |number: u64| {
        let start = usize::try_from(slot_of(number, geometry)).unwrap_or(usize::MAX);
        parse(bytes.get(start..).unwrap_or_default(), id, geometry)
    };
    match (slot(0), slot(1)) {
        (Ok(even), Ok(odd)) => Ok(if even.checkpoint > odd.checkpoint { even } else { odd }),
        (Ok(table), Err(_)) | (Err(_), Ok(table)) => Ok(table),
        (Err(even), Err(odd)) => match odd {
            FormatError::Magic { .. } | FormatError::Short { .. } => Err(even),
            _ => Err(odd),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::fixture::GEOMETRY;
    use crate::head::fixture::ID;
    use crate::zone_word::{pack, pristine};
    use blockyard_core::zone::ZoneCond;

    fn words() -> Vec<u64> {
        let mut words: Vec<u64> = (0..16).map(|zone| pack(pristine(zone, &GEOMETRY))).collect();
        let closed = ZoneRecord { cond: ZoneCond::Closed, written_sectors: 100, erasures: 0 };
        words[5] = pack(closed);
        words
    }

    fn file(slots: &[Vec<u8>]) -> Vec<u8> {
        let slot = slot_bytes(&GEOMETRY) as usize;
        let mut file = vec![0; 2 * slot];
        for (at, bytes) in slots.iter().enumerate() {
            file[at * slot..at * slot + bytes.len()].copy_from_slice(bytes);
        }
        file
    }

    #[test]
    fn the_newer_slot_counts() {
        let older = print(&ID, 8, true, &words());
        let newer = print(&ID, 9, false, &words());
        let table = newest(&file(&[older.clone(), newer.clone()]), &ID, &GEOMETRY).unwrap();
        assert_eq!((table.checkpoint, table.clean), (9, false));
        assert_eq!(table.records[5].written_sectors, 100);
        let torn = newer[..newer.len() - 1].to_vec();
        let mut torn = [torn, vec![0xee]].concat();
        let table = newest(&file(&[older.clone(), torn.clone()]), &ID, &GEOMETRY).unwrap();
        assert_eq!((table.checkpoint, table.clean), (8, true));
        torn[70] ^= 1;
        let both = file(&[torn.clone(), torn]);
        assert!(matches!(newest(&both, &ID, &GEOMETRY), Err(FormatError::Checksum { .. })));
    }

    #[test]
    fn a_table_of_another_disk_or_an_impossible_zone_is_refused() {
        let bytes = print(&ID, 1, false, &words());
        let other = *b"0123456789abcdeF";
        let refused = parse(&bytes, &other, &GEOMETRY);
        assert!(matches!(refused, Err(FormatError::Foreign { .. })));
        let mut wrong = words();
        wrong[7] = 2049 << 8 | 4;
        let refused = parse(&print(&ID, 1, false, &wrong), &ID, &GEOMETRY);
        assert!(matches!(refused, Err(FormatError::Zone { zone: 7, .. })));
        let refused = parse(&print(&ID, 1, false, &words()[..15]), &ID, &GEOMETRY);
        assert!(matches!(refused, Err(FormatError::Short { .. })));
    }
}

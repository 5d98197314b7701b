//! The live files: the current state of every zone, one word each, in the kernel's page cache.
//! There is one live file per data file, for the same zones, so that writers of different zones
//! rarely contend for the kernel's lock of a file.
//!
//! The live files survive a kill of the process: each change is written here before its command
//! completes, and is never synced. At a power cut, pages reach the disk in any order, so a word may
//! describe data that are lost. So a live file is valid only during the boot under which it was
//! written. Its head contains the identity of that boot.

use crate::error::FormatError;
use crate::geometry::MediaGeometry;
use crate::head::{self, Id, id_at, u32_at, u64_at};
use crate::zone_word::{ZoneRecord, unpack};

/// Prefix of the file names.
pub const FILE: &str = "live";

const MAGIC: [u8; 8] = *b"BLKYLIV\n";

/// Length of the head in bytes. The words start a page later, so that none shares a sector with it.
const HEAD: usize = 64;

/// Offset of the words in bytes.
pub const WORDS: u64 = 4096;

/// Which zones a file holds: those with `zone % files == number`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Number of the file.
    pub number: u32,
    /// How many files there are.
    pub files: u32,
}

impl Share {
    /// Name of the file.
    pub fn name(self) -> String {
        format!("{FILE}.{:02x}", self.number)
    }

    /// The zones, in the order of their words.
    pub fn zones(
        self,
        geometry: &MediaGeometry,
    ) -> impl ExactSizeIterator<Item = u32> + Clone + use<> {
        let count = (geometry.zone_count().saturating_sub(self.number)).div_ceil(self.files);
        (0..count).map(move |place| self.number + place * self.files)
    }

    /// Length of the file in bytes.
    pub fn len_bytes(self, geometry: &MediaGeometry) -> u64 {
        WORDS + 8 * self.zones(geometry).len() as u64
    }

    /// Offset of the word of one of the file's zones, in bytes.
    pub fn place_of(self, zone: u32) -> u64 {
        WORDS + 8 * u64::from(zone / self.files)
    }
}

/// The head of a file, under this boot.
pub fn print_head(id: &Id, boot: &Id, geometry: &MediaGeometry, share: Share) -> Vec<u8> {
    let mut bytes = vec![0; HEAD];
    bytes[32..48].copy_from_slice(boot);
    let zones = share.zones(geometry).len() as u32; // At most those of the disk.
    bytes[48..52].copy_from_slice(&zones.to_le_bytes());
    bytes[52..56].copy_from_slice(&share.number.to_le_bytes());
    head::seal(&mut bytes, MAGIC, id);
    bytes
}

/// The zones of a file; `None` if it was written under another boot or is incomplete.
///
/// # Errors
/// If the file is complete, was written under this boot, and contains something impossible.
pub fn parse(
    bytes: &[u8],
    id: &Id,
    boot: &Id,
    geometry: &MediaGeometry,
    share: Share,
) -> Result<Option<Vec<ZoneRecord>>, FormatError> {
    // The head is written last, and there was no power cut during this boot. So an unreadable head
    // means that the file was being created: the checkpoint before it has the same states.
    let file = &share.name();
    if head::check(file, bytes, HEAD, MAGIC).is_err() || id_at(bytes, 32) != *boot {
        return Ok(None);
    }
    head::check_id(file, bytes, id)?;
    head::check_number(file, u32_at(bytes, 52), share.number)?;
    let (zones, found) = (share.zones(geometry), u32_at(bytes, 48));
    if found as usize != zones.len() {
        let (field, value) = ("zones", u64::from(found));
        let want = "as many as its data file has";
        return Err(FormatError::field(file, field, value, want));
    }
    let want = share.len_bytes(geometry);
    let Some(words) = bytes.get(WORDS as usize..).filter(|_| bytes.len() as u64 >= want) else {
        return Err(FormatError::Short { file: file.clone(), len: bytes.len() as u64, want });
    };
    let records = zones.zip(words.chunks_exact(8)).map(|(zone, chunk)| {
        let word = u64_at(chunk, 0);
        unpack(word, zone, geometry).ok_or(FormatError::zone(file, zone, word))
    });
    Ok(Some(records.collect::<Result<Vec<_>, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::fixture::GEOMETRY;
    use crate::head::fixture::ID;
    use crate::zone_word::{pack, pristine};

    const SHARE: Share = Share { number: 1, files: 3 };
    const BOOT: Id = *b"this run of it..";

    fn file() -> Vec<u8> {
        let mut bytes = print_head(&ID, &BOOT, &GEOMETRY, SHARE);
        bytes.resize(WORDS as usize, 0);
        for zone in [1, 4, 7, 10, 13] {
            bytes.extend(pack(pristine(zone, &GEOMETRY)).to_le_bytes());
        }
        bytes
    }

    #[test]
    fn it_counts_under_its_own_kernel_only() {
        let found = parse(&file(), &ID, &BOOT, &GEOMETRY, SHARE).unwrap().unwrap();
        assert_eq!(found.len(), 5);
        assert_eq!(SHARE.place_of(13), WORDS + 32);
        assert_eq!(SHARE.name(), "live.01");
        assert_eq!(parse(&file(), &ID, b"another run.....", &GEOMETRY, SHARE), Ok(None));
        assert_eq!(parse(&[0; 8192], &ID, &BOOT, &GEOMETRY, SHARE), Ok(None));
        assert_eq!(parse(&[], &ID, &BOOT, &GEOMETRY, SHARE), Ok(None));
    }

    #[test]
    fn an_impossible_state_is_refused() {
        let mut bytes = file();
        bytes[WORDS as usize + 8 * 3] = 0x77;
        let refused = parse(&bytes, &ID, &BOOT, &GEOMETRY, SHARE);
        assert!(matches!(refused, Err(FormatError::Zone { zone: 10, .. })));
        let refused = parse(&file()[..4130], &ID, &BOOT, &GEOMETRY, SHARE);
        assert!(matches!(refused, Err(FormatError::Short { .. })));
        let refused = parse(&file(), b"fedcba9876543210", &BOOT, &GEOMETRY, SHARE);
        assert!(matches!(refused, Err(FormatError::Foreign { .. })));
        let other = Share { number: 2, ..SHARE };
        let refused = parse(&file(), &ID, &BOOT, &GEOMETRY, other).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "`live.02` is another file of the disk: expected number 2, found 1"
        );
    }
}

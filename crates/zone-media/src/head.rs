//! What the files of a disk begin with, and helpers for numbers and checksums.
//!
//! ```text
//! 0 mark, 8 bytes   8 checksum of all from byte 12 on   12 version   16 identity of the disk
//! ```
//!
//! The superblock, the tables, the live files, and the labels of the journal and of the data files
//! ([`Label`]) have that head. So each file says which disk it belongs to.

use crate::error::FormatError;

/// Version of the format of all files.
pub const VERSION: u32 = 2;

/// Identity of a disk or of a boot.
pub type Id = [u8; 16];

/// Length of a label in bytes: a page, so that no write of zones or records shares one with it.
pub const LABEL_BYTES: usize = 4096;

/// The CRC-32 of IEEE 802.3.
pub(crate) fn crc(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// The little-endian number at an offset, which must be in range.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The little-endian number at an offset, which must be in range.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The identity at an offset, which must be in range.
pub(crate) fn id_at(bytes: &[u8], at: usize) -> Id {
    bytes[at..at + 16].try_into().expect("sixteen bytes")
}

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// Whether these may be the first bytes of a file that was not written completely.
pub(crate) fn is_begun(bytes: &[u8], magic: [u8; 8]) -> bool {
    bytes.starts_with(&magic) || is_zero(&bytes[..bytes.len().min(magic.len())])
}

/// Writes the head of a file whose other bytes are complete.
pub(crate) fn seal(bytes: &mut [u8], magic: [u8; 8], id: &Id) {
    bytes[..8].copy_from_slice(&magic);
    bytes[12..16].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..32].copy_from_slice(id);
    let crc = crc(&bytes[12..]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
}

/// Checks mark, checksum and version of the first `len` bytes of a file.
pub(crate) fn check(
    file: &str,
    bytes: &[u8],
    len: usize,
    magic: [u8; 8],
) -> Result<(), FormatError> {
    let file = || file.to_owned();
    if bytes.len() < len {
        return Err(FormatError::Short { file: file(), len: bytes.len() as u64, want: len as u64 });
    }
    if bytes[..8] != magic {
        return Err(FormatError::Magic { file: file() });
    }
    let (found, want) = (crc(&bytes[12..len]), u32_at(bytes, 8));
    if found != want {
        return Err(FormatError::Checksum { file: file(), found, want });
    }
    match u32_at(bytes, 12) {
        VERSION => Ok(()),
        found => Err(FormatError::Version { file: file(), found, known: VERSION }),
    }
}

/// Checks that a file, whose head is valid, belongs to this disk.
pub(crate) fn check_id(file: &str, bytes: &[u8], id: &Id) -> Result<(), FormatError> {
    match id_at(bytes, 16) {
        found if found == *id => Ok(()),
        found => {
            let (found, want) = (hexadecimal(&found), hexadecimal(id));
            Err(FormatError::Foreign { file: file.to_owned(), found, want })
        }
    }
}

/// Checks the number of a file among those of its kind.
pub(crate) fn check_number(file: &str, found: u32, want: u32) -> Result<(), FormatError> {
    match found {
        found if found == want => Ok(()),
        found => Err(FormatError::Exchanged { file: file.to_owned(), found, want }),
    }
}

/// An identity in hexadecimal digits.
pub fn hexadecimal(id: &Id) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Identifies a file whose other bytes have no identity: the journal and the data files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The mark of the kind of file.
    pub magic: [u8; 8],
    /// Identity of the disk.
    pub id: Id,
    /// Number of the file among those of its kind.
    pub number: u32,
}

impl Label {
    /// The bytes of the label.
    pub fn print(&self) -> Vec<u8> {
        let mut bytes = vec![0; LABEL_BYTES];
        bytes[32..36].copy_from_slice(&self.number.to_le_bytes());
        seal(&mut bytes, self.magic, &self.id);
        bytes
    }

    /// Checks that bytes of a file are this label.
    ///
    /// # Errors
    /// If they are damaged, or the label of another disk or of another file.
    pub fn check(&self, file: &str, bytes: &[u8]) -> Result<(), FormatError> {
        check(file, bytes, LABEL_BYTES, self.magic)?;
        check_id(file, bytes, &self.id)?;
        check_number(file, u32_at(bytes, 32), self.number)?;
        match bytes[36..LABEL_BYTES].iter().find(|byte| **byte != 0) {
            None => Ok(()),
            Some(byte) => Err(FormatError::reserved(file, *byte)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LABEL: Label = Label { magic: *b"BLKYDAT\n", id: *b"0123456789abcdef", number: 3 };

    /// The standard check value of CRC-32.
    #[test]
    fn the_checksum_is_the_known_one() {
        assert_eq!(crc(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn a_label_of_another_disk_or_file_is_refused_with_both() {
        assert_eq!(LABEL.check("data.03", &LABEL.print()), Ok(()));
        let text = |label: Label| LABEL.check("data.03", &label.print()).unwrap_err().to_string();
        assert_eq!(
            text(Label { id: *b"fedcba9876543210", ..LABEL }),
            "`data.03` belongs to another disk: expected 30313233343536373839616263646566, as in \
             `superblock`, found 66656463626139383736353433323130"
        );
        assert_eq!(
            text(Label { number: 1, ..LABEL }),
            "`data.03` is another file of the disk: expected number 3, found 1"
        );
        assert!(text(Label { magic: *b"BLKYJRN\n", ..LABEL }).contains("with the mark"));
    }

    #[test]
    fn every_flipped_bit_of_a_label_is_noticed() {
        let bytes = LABEL.print();
        for bit in 0..LABEL_BYTES * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(LABEL.check("data.03", &flipped).is_err(), "bit {bit}");
        }
        assert!(LABEL.check("data.03", &bytes[..4095]).is_err());
    }
}

/// An identity for the tests of the crate.
#[cfg(test)]
pub(crate) mod fixture {
    use super::Id;

    pub(crate) const ID: Id = *b"0123456789abcdef";
}

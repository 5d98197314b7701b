//! What all formats share: little-endian fields, the checksum (CRC-64/NVMe), and the first bytes of
//! each stand-alone object on disk.

use crate::error::FormatError;

/// CRC-64/NVMe of `bytes`.
#[inline]
pub fn crc(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// CRC-64/NVMe of parts that follow each other.
pub(super) fn crc_of(parts: &[&[u8]]) -> u64 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize()
}

/// The 32-bit number at an offset.
///
/// # Panics
/// If the bytes end before the field does: callers check lengths before they read fields.
#[inline]
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes are four bytes"))
}

/// The 64-bit number at an offset.
///
/// # Panics
/// As [`u32_at`].
#[inline]
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes are eight bytes"))
}

/// Writes a 32-bit number.
#[inline]
pub fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// Writes a 64-bit number.
#[inline]
pub fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Reads fields of a byte string from front to back.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// A reader of these bytes.
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader(bytes)
    }

    /// The next `len` bytes, or `None` if fewer are left.
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    /// The next byte.
    pub fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> Option<u16> {
        self.take(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.take(4).map(|bytes| u32_at(bytes, 0))
    }

    /// The next eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.take(8).map(|bytes| u64_at(bytes, 0))
    }

    /// The number of bytes left.
    pub fn left(&self) -> usize {
        self.0.len()
    }
}

/// The first 20 bytes of superblocks, labels and streams: a magic number, the checksum of
/// everything after it, and the version.
pub(super) struct BlockHeader {
    /// Name of the object, for errors.
    pub(super) what: &'static str,
    /// The magic number of the object.
    pub(super) magic: [u8; 8],
    /// The version that is written, and the newest that is read.
    pub(super) version: u32,
    /// The oldest version that is read.
    pub(super) oldest: u32,
}

impl BlockHeader {
    /// Writes magic number, version and checksum into `bytes`, whose other fields are set already.
    ///
    /// # Panics
    /// If there are fewer than 20 bytes.
    pub(super) fn put(&self, bytes: &mut [u8]) {
        bytes[..8].copy_from_slice(&self.magic);
        put_u32(bytes, 16, self.version);
        let crc = crc(&bytes[16..]);
        put_u64(bytes, 8, crc);
    }

    /// Checks magic number, checksum and version.
    ///
    /// # Errors
    /// If one of them is wrong.
    ///
    /// # Panics
    /// If there are fewer than 20 bytes.
    pub(super) fn check(&self, bytes: &[u8]) -> Result<(), FormatError> {
        let what = self.what;
        if bytes[..8] != self.magic {
            return Err(FormatError::Magic { what });
        }
        let (found, want) = (crc(&bytes[16..]), u64_at(bytes, 8));
        if found != want {
            return Err(FormatError::Checksum { what, found, want });
        }
        let found = u32_at(bytes, 16);
        if !(self.oldest..=self.version).contains(&found) {
            return Err(FormatError::Version { what, found, known: self.version });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_one_that_it_says() {
        // The check value of CRC-64/NVME in the catalogue of parametrised CRC algorithms.
        assert_eq!(crc(b"123456789"), 0xae8b_1486_0a79_9888);
        assert_eq!(crc_of(&[b"1234", b"", b"56789"]), 0xae8b_1486_0a79_9888);
    }

    #[test]
    fn fields_are_read_back_and_an_end_is_seen() {
        let mut bytes = [0; 12];
        put_u64(&mut bytes, 0, 0x0102_0304_0506_0708);
        put_u32(&mut bytes, 8, 9);
        assert_eq!((bytes[0], u64_at(&bytes, 0), u32_at(&bytes, 8)), (8, 0x0102_0304_0506_0708, 9));
        let mut reader = Reader::new(&bytes);
        assert_eq!(
            (reader.u64(), reader.u16(), reader.u8()),
            (Some(0x0102_0304_0506_0708), Some(9), Some(0))
        );
        assert_eq!((reader.left(), reader.u32(), reader.left()), (1, None, 1));
    }
}

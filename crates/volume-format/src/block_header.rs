//! The first bytes of each stand-alone object on disk: a magic number, the checksum of everything
//! after it, and the version.

use crate::bytes::{crc, put_u32, put_u64, u32_at, u64_at};
use crate::error::FormatError;

/// The first 20 bytes of superblocks, labels and streams: magic number, checksum, version.
pub(super) struct BlockHeader {
    /// Name of the object, for errors.
    pub(super) what: &'static str,
    /// The magic number of the object.
    pub(super) magic: [u8; 8],
    /// The only version that is written and read.
    pub(super) version: u32,
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
        if found != self.version {
            return Err(FormatError::Version { what, found, known: self.version });
        }
        Ok(())
    }
}

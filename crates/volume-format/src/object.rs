//! The objects of a pool in an object store: their names, and the header with which each begins.
//!
//! | object | name | changed |
//! | --- | --- | --- |
//! | manifest | `manifest` | by compare-and-swap |
//! | batch of writes, or seal | `batch/EPOCH/NUMBER` | never: created if there is none |
//! | contents of a segment | `segment/EPOCH/NUMBER` | never |
//! | part of the extent table | `table/EPOCH/NUMBER` | never |
//! | lease | `lease` | by compare-and-swap |
//!
//! The header names the writer, a random number that each opener of the pool draws. So an opener
//! whose request was answered ambiguously reads the object and knows whether it wrote it.

pub mod batch;
pub mod local_log;
pub mod manifest;
pub mod sums;
pub mod table;

use std::fmt;

use crate::bytes::{crc, put_u32, put_u64, u32_at, u64_at};
use crate::error::FormatError;

/// Length of the header of an object, in bytes.
pub const HEADER_BYTES: usize = 64;

/// The name of the manifest.
pub const MANIFEST: &str = "manifest";

/// The name of the lease.
pub const LEASE: &str = "lease";

/// Length of a lease, in bytes.
pub const LEASE_BYTES: usize = HEADER_BYTES + 8;

/// Longest head of an object (its header and what the checksum of the header covers), in bytes.
pub const HEAD_BYTES_MAX: usize = 1 << 30;

const WHAT: &str = "object";
const MAGIC: [u8; 8] = *b"BLKYOBJ\n";

/// The kind of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectKind {
    /// Writes of the pool in their order.
    Batch,
    /// The end of an epoch, in the place of its next batch.
    Seal,
    /// Contents of a segment.
    Segment,
    /// A part of the extent table.
    Table,
    /// The manifest.
    Manifest,
    /// A file of the local log, which no object store has.
    LocalLog,
    /// What the opener of a pool renews as long as it lives.
    Lease,
}

impl ObjectKind {
    /// The number of the kind in an object.
    pub fn code(self) -> u16 {
        match self {
            ObjectKind::Batch => 1,
            ObjectKind::Seal => 2,
            ObjectKind::Segment => 3,
            ObjectKind::Table => 4,
            ObjectKind::Manifest => 5,
            ObjectKind::LocalLog => 6,
            ObjectKind::Lease => 7,
        }
    }

    /// The version of the objects of this kind that this program writes, and the only one that it
    /// reads. A lease of version 1 did not have its length. A file of the local log of version 1
    /// ended with its last group.
    pub fn version(self) -> u16 {
        match self {
            ObjectKind::Lease | ObjectKind::LocalLog => 2,
            _ => 1,
        }
    }

    fn of(code: u16) -> Option<ObjectKind> {
        [
            ObjectKind::Batch,
            ObjectKind::Seal,
            ObjectKind::Segment,
            ObjectKind::Table,
            ObjectKind::Manifest,
            ObjectKind::LocalLog,
            ObjectKind::Lease,
        ]
        .into_iter()
        .find(|kind| kind.code() == code)
    }
}

/// The identity of an immutable object: a batch, a segment or a part of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId {
    /// The kind; [`ObjectKind::Batch`] also for a seal.
    pub kind: ObjectKind,
    /// The epoch of the opener that wrote the object.
    pub epoch: u64,
    /// The number of the object in its epoch, counted for each kind.
    pub number: u64,
}

impl ObjectId {
    /// A batch.
    pub fn batch(epoch: u64, number: u64) -> ObjectId {
        ObjectId { kind: ObjectKind::Batch, epoch, number }
    }

    /// Length of an identity in other objects, in bytes.
    pub const BYTES: usize = 20;

    fn put(self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&u32::from(self.kind.code()).to_le_bytes());
        bytes.extend_from_slice(&self.epoch.to_le_bytes());
        bytes.extend_from_slice(&self.number.to_le_bytes());
    }

    fn parse(bytes: &[u8], what: &'static str) -> Result<ObjectId, FormatError> {
        let code = u32_at(bytes, 0);
        let kind = u16::try_from(code).ok().and_then(ObjectKind::of);
        let is_known = |kind: &ObjectKind| {
            matches!(kind, ObjectKind::Batch | ObjectKind::Segment | ObjectKind::Table)
        };
        let kind = kind.filter(is_known);
        let want = "a batch, a segment or a part of the table";
        let wrong = FormatError::Field { what, field: "kind", value: code.into(), want };
        let (epoch, number) = (u64_at(bytes, 4), u64_at(bytes, 12));
        Ok(ObjectId { kind: kind.ok_or(wrong)?, epoch, number })
    }
}

/// The folders of batches, of segments and of parts of the table, below the prefix of a pool.
pub const FOLDERS: [&str; 3] = ["batch", "segment", "table"];

/// The name of the object below the prefix of its pool.
impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [batch, segment, table] = FOLDERS;
        let folder = match self.kind {
            ObjectKind::Batch | ObjectKind::Seal | ObjectKind::LocalLog => batch,
            ObjectKind::Segment => segment,
            ObjectKind::Table => table,
            ObjectKind::Manifest => return f.write_str(MANIFEST),
            ObjectKind::Lease => return f.write_str(LEASE),
        };
        write!(f, "{folder}/{:016x}/{:016x}", self.epoch, self.number)
    }
}

/// The header of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectHeader {
    /// The kind.
    pub kind: ObjectKind,
    /// The first eight bytes of the pool's identity.
    pub pool: u64,
    /// The random number of the opener that wrote the object.
    pub writer: [u8; 16],
    /// The epoch of the opener.
    pub epoch: u64,
    /// The number of the object in its epoch; of a manifest the number of its changes.
    pub number: u64,
}

impl ObjectHeader {
    /// Completes an object whose first `head_bytes` bytes, after the header, are set already. The
    /// checksum covers them; what follows the head has a checksum in the head.
    ///
    /// # Panics
    /// If the head is shorter than a header or longer than [`HEAD_BYTES_MAX`].
    pub fn put(&self, bytes: &mut [u8], head_bytes: usize) {
        assert!((HEADER_BYTES..=HEAD_BYTES_MAX).contains(&head_bytes), "{head_bytes}");
        let bytes = &mut bytes[..head_bytes];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[16..18].copy_from_slice(&self.kind.version().to_le_bytes());
        bytes[18..20].copy_from_slice(&self.kind.code().to_le_bytes());
        put_u32(bytes, 20, head_bytes as u32);
        put_u64(bytes, 24, self.pool);
        bytes[32..48].copy_from_slice(&self.writer);
        put_u64(bytes, 48, self.epoch);
        put_u64(bytes, 56, self.number);
        let crc = crc(&bytes[16..]);
        put_u64(bytes, 8, crc);
    }

    /// The header of an object, and its whole head.
    ///
    /// # Errors
    /// If the bytes do not begin with an intact head that this program knows.
    pub fn parse(bytes: &[u8]) -> Result<(ObjectHeader, &[u8]), FormatError> {
        let len = bytes.len() as u64;
        if bytes.len() < HEADER_BYTES {
            return Err(FormatError::Short { what: WHAT, len });
        }
        if bytes[..8] != MAGIC {
            return Err(FormatError::Magic { what: WHAT });
        }
        let (code, head_bytes) = (u32_at(bytes, 16), u32_at(bytes, 20) as usize);
        let (version, code) = (code as u16, (code >> 16) as u16);
        let kind = ObjectKind::of(code);
        // A kind that this program does not know is one of a newer program.
        let known = kind.map_or(1, ObjectKind::version);
        if version != known {
            let (found, known) = (version.into(), known.into());
            return Err(FormatError::Version { what: WHAT, found, known });
        }
        if !(HEADER_BYTES..=HEAD_BYTES_MAX).contains(&head_bytes) || head_bytes > bytes.len() {
            return Err(FormatError::Short { what: WHAT, len });
        }
        let head = &bytes[..head_bytes];
        let (found, want) = (crc(&head[16..]), u64_at(head, 8));
        if found != want {
            return Err(FormatError::Checksum { what: WHAT, found, want });
        }
        let want = "a kind that this program knows";
        let unknown = FormatError::Field { what: WHAT, field: "kind", value: code.into(), want };
        let header = ObjectHeader {
            kind: kind.ok_or(unknown)?,
            pool: u64_at(head, 24),
            writer: head[32..48].try_into().expect("sixteen bytes are sixteen bytes"),
            epoch: u64_at(head, 48),
            number: u64_at(head, 56),
        };
        Ok((header, head))
    }

    /// Parses the head of an object that must be of this kind.
    ///
    /// # Errors
    /// As [`ObjectHeader::parse`], or if the object is of another kind.
    pub fn parse_as(bytes: &[u8], kind: ObjectKind) -> Result<(ObjectHeader, &[u8]), FormatError> {
        let (header, head) = ObjectHeader::parse(bytes)?;
        if header.kind != kind {
            let (value, want) = (header.kind.code().into(), "the kind that its name says");
            return Err(FormatError::Field { what: WHAT, field: "kind", value, want });
        }
        Ok((header, head))
    }

    /// A seal: an object of a header alone.
    pub fn seal(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        ObjectHeader { kind: ObjectKind::Seal, ..*self }.put(&mut bytes, HEADER_BYTES);
        bytes
    }

    /// A lease of a length in milliseconds; the number says how often it was renewed. A length of 0
    /// says that the opener keeps no lease.
    pub fn lease(&self, length_ms: u64) -> Vec<u8> {
        let mut bytes = vec![0; LEASE_BYTES];
        put_u64(&mut bytes, HEADER_BYTES, length_ms);
        ObjectHeader { kind: ObjectKind::Lease, ..*self }.put(&mut bytes, LEASE_BYTES);
        bytes
    }

    /// Parses a lease. Returns its header, and its length in milliseconds.
    ///
    /// # Errors
    /// As [`ObjectHeader::parse_as`].
    pub fn parse_lease(bytes: &[u8]) -> Result<(ObjectHeader, u64), FormatError> {
        let (header, head) = ObjectHeader::parse_as(bytes, ObjectKind::Lease)?;
        match head.len() {
            LEASE_BYTES => Ok((header, u64_at(head, HEADER_BYTES))),
            len => Err(FormatError::Short { what: WHAT, len: len as u64 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> ObjectHeader {
        ObjectHeader {
            kind: ObjectKind::Seal,
            pool: 7,
            writer: *b"0123456789abcdef",
            epoch: 3,
            number: 9,
        }
    }

    #[test]
    fn a_seal_is_read_back_and_each_changed_byte_is_noticed() {
        let seal = header().seal();
        assert_eq!(ObjectHeader::parse(&seal), Ok((header(), &seal[..])));
        for at in 0..seal.len() {
            let mut bad = seal.clone();
            bad[at] ^= 0x20;
            assert!(ObjectHeader::parse(&bad).is_err(), "byte {at}");
        }
        for len in 0..seal.len() {
            assert!(ObjectHeader::parse(&seal[..len]).is_err(), "{len} bytes");
        }
        assert!(ObjectHeader::parse_as(&seal, ObjectKind::Batch).is_err());
    }

    #[test]
    fn a_header_of_another_version_is_named_as_such() {
        let mut seal = header().seal();
        seal[16] = 2;
        assert!(ObjectHeader::parse(&seal).unwrap_err().is_of_newer());
    }

    #[test]
    fn a_lease_is_read_back_and_one_without_a_length_is_of_another_version() {
        let lease = header().lease(10_000);
        let expected = ObjectHeader { kind: ObjectKind::Lease, ..header() };
        assert_eq!(ObjectHeader::parse_lease(&lease), Ok((expected, 10_000)));
        for at in 0..lease.len() {
            let mut bad = lease.clone();
            bad[at] ^= 0x20;
            assert!(ObjectHeader::parse_lease(&bad).is_err(), "byte {at}");
        }
        let mut old = lease;
        old[16] = 1;
        let error = ObjectHeader::parse_lease(&old).unwrap_err();
        assert!(matches!(error, FormatError::Version { found: 1, known: 2, .. }), "{error}");
        assert!(ObjectHeader::parse_lease(&header().seal()).is_err());
    }

    #[test]
    fn names_sort_by_epoch_and_number() {
        let id = ObjectId::batch(0x1f, 2);
        assert_eq!(id.to_string(), "batch/000000000000001f/0000000000000002");
        let mut bytes = Vec::new();
        id.put(&mut bytes);
        assert_eq!((bytes.len(), ObjectId::parse(&bytes, WHAT)), (ObjectId::BYTES, Ok(id)));
        bytes[0] = ObjectKind::Manifest.code() as u8;
        assert!(ObjectId::parse(&bytes, WHAT).is_err());
    }
}

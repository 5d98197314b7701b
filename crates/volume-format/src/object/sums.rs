//! The checksums at the end of a batch and of a segment's object: one for each chunk. So a reader
//! of a part of an object verifies what it has read.
//!
//! ```text
//! body: header ▪ ... ▪ checksums of the chunks of the body ▪ footer
//! ```

use crate::bytes::{Reader, crc};
use crate::error::FormatError;

use super::{ObjectHeader, ObjectId};

/// Length of a chunk in bytes.
pub const CHUNK_BYTES: usize = 32 << 10;

/// Bytes at the end of an object that have the checksums of a body of up to 31 MiB.
pub const END_BYTES: usize = 8 << 10;

/// Length of the footer in bytes.
const FOOTER_BYTES: usize = 48;

/// Longest body in bytes: extents have offsets of 32 bits.
const BODY_BYTES_MAX: u64 = 1 << 32;

const WHAT: &str = "checksums of an object";

/// The checksums of the chunks of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkSums {
    body_bytes: u64,
    sums: Vec<u64>,
}

impl ChunkSums {
    /// Appends the checksums of the present bytes of an object, which has this header.
    pub fn append(bytes: &mut Vec<u8>, header: &ObjectHeader) {
        let (body_bytes, sums) = (bytes.len(), sums_of(bytes).collect::<Vec<_>>());
        sums.iter().for_each(|sum| bytes.extend_from_slice(&sum.to_le_bytes()));
        bytes.extend_from_slice(&u32::from(header.kind.code()).to_le_bytes());
        bytes.extend_from_slice(&(sums.len() as u32).to_le_bytes());
        for field in [header.pool, header.epoch, header.number, body_bytes as u64] {
            bytes.extend_from_slice(&field.to_le_bytes());
        }
        let sum = crc(&bytes[body_bytes..]);
        bytes.extend_from_slice(&sum.to_le_bytes());
    }

    /// The length of an object whose body has this length in bytes.
    pub fn len_with(body_bytes: usize) -> usize {
        body_bytes + body_bytes.div_ceil(CHUNK_BYTES) * 8 + FOOTER_BYTES
    }

    /// The length of the checksums and the footer in bytes; `end` are the last bytes of the object.
    ///
    /// # Errors
    /// If there is no footer.
    pub fn len_of(end: &[u8]) -> Result<usize, FormatError> {
        let short = FormatError::Short { what: WHAT, len: end.len() as u64 };
        let footer = end.last_chunk::<FOOTER_BYTES>().ok_or_else(|| short.clone())?;
        let mut reader = Reader::new(footer);
        let fields = (|| {
            let (_, count) = (reader.u32()?, reader.u32()?);
            reader.take(24)?;
            Some((count as usize, reader.u64()?))
        })();
        let (count, body_bytes) = fields.ok_or(short)?;
        if body_bytes > BODY_BYTES_MAX || body_bytes.div_ceil(CHUNK_BYTES as u64) != count as u64 {
            let (field, want) = ("length", "that of as many chunks as there are checksums");
            return Err(FormatError::Field { what: WHAT, field, value: body_bytes, want });
        }
        Ok(count * 8 + FOOTER_BYTES)
    }

    /// Parses the checksums of an object of the pool with this mark. `end` are the last bytes of
    /// the object, at least [`ChunkSums::len_of`].
    ///
    /// # Errors
    /// If they are damaged, or those of another object.
    pub fn parse(end: &[u8], pool: u64, object: ObjectId) -> Result<ChunkSums, FormatError> {
        let len = ChunkSums::len_of(end)?;
        let short = FormatError::Short { what: WHAT, len: end.len() as u64 };
        let at = end.len().checked_sub(len).ok_or_else(|| short.clone())?;
        let (covered, sum) = end[at..].split_last_chunk::<8>().ok_or_else(|| short.clone())?;
        let (found, want) = (crc(covered), u64::from_le_bytes(*sum));
        if found != want {
            return Err(FormatError::Checksum { what: WHAT, found, want });
        }
        let mut reader = Reader::new(covered);
        let fields = (|| {
            let sums = reader.take(len - FOOTER_BYTES)?;
            let (kind, _) = (reader.u32()?, reader.u32()?);
            let identity = (kind, reader.u64()?, reader.u64()?, reader.u64()?);
            Some((sums, identity, reader.u64()?))
        })();
        let (sums, (kind, found_pool, epoch, number), body_bytes) = fields.ok_or(short)?;
        let is_kind = kind == u32::from(object.kind.code());
        if !is_kind || (found_pool, epoch, number) != (pool, object.epoch, object.number) {
            let (field, want) = ("number", "that of the object's name");
            return Err(FormatError::Field { what: WHAT, field, value: number, want });
        }
        let (sums, _) = sums.as_chunks::<8>();
        Ok(ChunkSums { body_bytes, sums: sums.iter().map(|it| u64::from_le_bytes(*it)).collect() })
    }

    /// Parses the checksums of a whole object, and verifies its body. Returns the body.
    ///
    /// # Errors
    /// As [`ChunkSums::parse`], or if the body is damaged.
    pub fn check_all<'a>(bytes: &'a [u8], header: &ObjectHeader) -> Result<&'a [u8], FormatError> {
        let ObjectHeader { kind, epoch, number, .. } = *header;
        let object = ObjectId { kind, epoch, number };
        let sums = ChunkSums::parse(bytes, header.pool, object)?;
        let body = &bytes[..bytes.len() - ChunkSums::len_of(bytes)?];
        if body.len() as u64 != sums.body_bytes {
            return Err(FormatError::Short { what: WHAT, len: body.len() as u64 });
        }
        sums.check(0, body)?;
        Ok(body)
    }

    /// The length of the body in bytes.
    pub fn body_bytes(&self) -> u64 {
        self.body_bytes
    }

    /// Verifies a part of the body: whole chunks from the chunk `first` on. The last chunk of the
    /// body may be short.
    ///
    /// # Errors
    /// If a checksum is wrong.
    pub fn check(&self, first: usize, bytes: &[u8]) -> Result<(), FormatError> {
        for (at, found) in (first..).zip(sums_of(bytes)) {
            let want = self.sums.get(at).copied().unwrap_or_default();
            if found != want {
                return Err(FormatError::Checksum { what: "chunk of an object", found, want });
            }
        }
        Ok(())
    }
}

fn sums_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks(CHUNK_BYTES).map(crc)
}

#[cfg(test)]
mod tests {
    use super::super::ObjectKind;
    use super::*;

    const ID: ObjectId = ObjectId { kind: ObjectKind::Segment, epoch: 3, number: 9 };

    fn object(len: usize) -> (ObjectHeader, Vec<u8>) {
        let (kind, pool, epoch, number) = (ID.kind, 7, ID.epoch, ID.number);
        let header = ObjectHeader { kind, pool, writer: [1; 16], epoch, number };
        let mut bytes: Vec<u8> = (0..len).map(|at| (at / 5) as u8).collect();
        ChunkSums::append(&mut bytes, &header);
        (header, bytes)
    }

    #[test]
    fn parts_of_an_object_are_verified_by_its_end() {
        for len in [1, CHUNK_BYTES, 3 * CHUNK_BYTES + 100] {
            let (header, bytes) = object(len);
            let end = &bytes[bytes.len().saturating_sub(END_BYTES)..];
            let sums = ChunkSums::parse(end, 7, ID).unwrap();
            assert_eq!(sums.body_bytes(), len as u64);
            assert_eq!(ChunkSums::check_all(&bytes, &header), Ok(&bytes[..len]));
            for (at, chunk) in bytes[..len].chunks(CHUNK_BYTES).enumerate() {
                assert_eq!(sums.check(at, chunk), Ok(()));
                let mut bad = chunk.to_vec();
                bad[0] ^= 1;
                assert!(sums.check(at, &bad).is_err() && sums.check(at + 1, chunk).is_err());
                assert!(sums.check(at, &chunk[..chunk.len() - 1]).is_err() || chunk.len() == 1);
            }
        }
    }

    #[test]
    fn each_changed_byte_and_another_object_are_noticed() {
        let (header, bytes) = object(CHUNK_BYTES + 10);
        let end = &bytes[CHUNK_BYTES + 10..];
        for at in 0..end.len() {
            let mut bad = end.to_vec();
            bad[at] ^= 4;
            assert!(ChunkSums::parse(&bad, 7, ID).is_err(), "byte {at}");
            assert!(ChunkSums::parse(&end[at + 1..], 7, ID).is_err(), "from byte {at}");
        }
        assert!(ChunkSums::parse(end, 8, ID).is_err());
        assert!(ChunkSums::parse(end, 7, ObjectId { epoch: 4, ..ID }).is_err());
        assert!(ChunkSums::parse(end, 7, ObjectId { number: 8, ..ID }).is_err());
        assert!(ChunkSums::parse(end, 7, ObjectId { kind: ObjectKind::Batch, ..ID }).is_err());
        let longer = [&[0], &bytes[..]].concat();
        assert!(ChunkSums::check_all(&longer, &header).is_err());
    }
}

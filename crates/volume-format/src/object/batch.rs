//! A batch: writes of a pool in their order, as one object. The batches of an epoch are numbered
//! without a gap, so the batches up to a missing one are a prefix of all writes.
//!
//! ```text
//! header ▪ lengths, checksums ▪ payload (the bytes of all writes) ▪ records ▪ checksums of chunks
//! ```
//!
//! The payload comes before the records, so that its place in the object is known when a write
//! arrives. Extents refer to it after that ([`super::table`]).

use crate::bytes::{Reader, crc, put_u32, put_u64, u32_at, u64_at};
use crate::error::FormatError;

use super::sums::ChunkSums;
use super::{HEADER_BYTES, ObjectHeader, ObjectKind};

/// Offset of the payload in a batch, in bytes.
pub const PAYLOAD_AT: usize = HEADER_BYTES + 40;

/// Length of a record in bytes.
pub(super) const RECORD_BYTES: usize = 16;

/// The number of the file that contains the superblock.
pub const SUPERBLOCK: u32 = u32::MAX;

/// Longest superblock file, in bytes.
pub const SUPERBLOCK_BYTES_MAX: u32 = 64 << 10;

/// Most segments of a pool: their numbers are below this.
pub const SEGMENTS_MAX: u32 = 1 << 24;

const WHAT: &str = "batch";

/// An operation on a file of the pool: a segment, by its number, or [`SUPERBLOCK`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchOperation {
    /// Bytes were written; they are the next ones of the payload.
    Write {
        /// The offset in the file.
        offset: u32,
        /// The number of bytes.
        len: u32,
    },
    /// The file was made, of `len` zeros.
    Make {
        /// The length in bytes.
        len: u32,
    },
    /// The contents became zeros.
    Clear,
    /// The file was removed.
    Remove,
}

/// A record of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRecord {
    /// The file.
    pub file: u32,
    /// What was done.
    pub operation: BatchOperation,
}

impl BatchRecord {
    pub(super) fn print(&self, bytes: &mut Vec<u8>) {
        let (code, offset, len) = match self.operation {
            BatchOperation::Write { offset, len } => (1, offset, len),
            BatchOperation::Make { len } => (2, 0, len),
            BatchOperation::Clear => (3, 0, 0),
            BatchOperation::Remove => (4, 0, 0),
        };
        for field in [code, self.file, offset, len] {
            bytes.extend_from_slice(&u32::to_le_bytes(field));
        }
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<BatchRecord, FormatError> {
        let field = |at| u32_at(bytes, at);
        let (code, file, offset, len) = (field(0), field(4), field(8), field(12));
        let impossible = |field, value: u32, want| FormatError::Field {
            what: WHAT,
            field,
            value: value.into(),
            want,
        };
        if file != SUPERBLOCK && file >= SEGMENTS_MAX {
            return Err(impossible("file", file, "the number of a segment, or the superblock"));
        }
        let operation = match code {
            1 => BatchOperation::Write { offset, len },
            2 => BatchOperation::Make { len },
            3 => BatchOperation::Clear,
            4 => BatchOperation::Remove,
            code => return Err(impossible("operation", code, "1 to 4")),
        };
        let end_max = if file == SUPERBLOCK { SUPERBLOCK_BYTES_MAX } else { u32::MAX };
        if offset.checked_add(len).is_none_or(|end| end > end_max) {
            return Err(impossible("length", len, "an end within the file"));
        }
        Ok(BatchRecord { file, operation })
    }
}

/// The bytes that the writes among records have in the payload.
pub fn payload_bytes(records: &[BatchRecord]) -> u64 {
    let written = records.iter().map(|record| match record.operation {
        BatchOperation::Write { len, .. } => u64::from(len),
        _ => 0,
    });
    written.sum()
}

/// The length of a batch that is completed with a number of records when it has this length in
/// bytes: header and payload.
pub fn len_bytes(len: usize, records: usize) -> usize {
    ChunkSums::len_with(len + records * RECORD_BYTES)
}

/// Whether a replay continues after a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaterBatches {
    /// The replay continues with the batch or the seal of the next number.
    Replayed,
    /// The batch ends its epoch, as a seal does. Objects of higher numbers are ignored.
    Ignored,
}

/// Turns a payload, which begins at [`PAYLOAD_AT`], into a batch that ends at a time, in
/// milliseconds since 1970 by the clock of its writer; 0 if that is unknown.
pub fn complete(
    bytes: &mut Vec<u8>,
    header: &ObjectHeader,
    (later, ended_ms): (LaterBatches, u64),
    records: &[BatchRecord],
) {
    let payload_bytes = bytes.len() - PAYLOAD_AT;
    for record in records {
        record.print(bytes);
    }
    let (payload, printed) = bytes[PAYLOAD_AT..].split_at(payload_bytes);
    let crcs = [crc(payload), crc(printed)];
    put_u64(bytes, 64, ended_ms);
    put_u64(bytes, 72, crcs[0]);
    put_u64(bytes, 80, crcs[1]);
    put_u32(bytes, 88, payload_bytes as u32);
    put_u32(bytes, 92, records.len() as u32);
    put_u64(bytes, 96, u64::from(later == LaterBatches::Ignored));
    let header = ObjectHeader { kind: ObjectKind::Batch, ..*header };
    header.put(bytes, PAYLOAD_AT);
    ChunkSums::append(bytes, &header);
}

/// A parsed batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The header.
    pub header: ObjectHeader,
    /// Whether a replay continues after it.
    pub later: LaterBatches,
    /// When it ended, in milliseconds since 1970 by the clock of its writer; 0 if that is unknown.
    pub ended_ms: u64,
    /// The records.
    pub records: Vec<BatchRecord>,
}

impl Batch {
    /// Parses a whole batch.
    ///
    /// # Errors
    /// If it is damaged, or of another kind.
    pub fn parse(bytes: &[u8]) -> Result<Batch, FormatError> {
        let (header, head) = ObjectHeader::parse_as(bytes, ObjectKind::Batch)?;
        let short = FormatError::Short { what: WHAT, len: bytes.len() as u64 };
        if head.len() != PAYLOAD_AT {
            return Err(short);
        }
        let body = ChunkSums::check_all(bytes, &header)?;
        let mut rest = Reader::new(body.get(PAYLOAD_AT..).unwrap_or_default());
        let payload = rest.take(u32_at(head, 88) as usize).ok_or(short.clone())?;
        let printed = rest.take(rest.left()).ok_or(short.clone())?;
        let wanted = (u32_at(head, 92) as usize).checked_mul(RECORD_BYTES);
        if wanted != Some(printed.len()) {
            return Err(short);
        }
        for (part, at) in [(payload, 72), (printed, 80)] {
            let (found, want) = (crc(part), u64_at(head, at));
            if found != want {
                return Err(FormatError::Checksum { what: WHAT, found, want });
            }
        }
        let records: Vec<BatchRecord> =
            printed.chunks_exact(RECORD_BYTES).map(BatchRecord::parse).collect::<Result<_, _>>()?;
        if payload_bytes(&records) != payload.len() as u64 {
            let (field, value) = ("payload", payload.len() as u64);
            let want = "the lengths of all writes together";
            return Err(FormatError::Field { what: WHAT, field, value, want });
        }
        let later = match u64_at(head, 96) {
            0 => LaterBatches::Replayed,
            1 => LaterBatches::Ignored,
            value => {
                let (field, want) = ("end of the epoch", "0 or 1");
                return Err(FormatError::Field { what: WHAT, field, value, want });
            }
        };
        Ok(Batch { header, later, ended_ms: u64_at(head, 64), records })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> ObjectHeader {
        ObjectHeader { kind: ObjectKind::Batch, pool: 1, writer: [2; 16], epoch: 3, number: 4 }
    }

    fn records() -> Vec<BatchRecord> {
        let write = |offset, len| BatchOperation::Write { offset, len };
        let of = |file, operation| BatchRecord { file, operation };
        vec![
            of(0, BatchOperation::Make { len: 1 << 20 }),
            of(0, write(4096, 512)),
            of(SUPERBLOCK, write(0, 100)),
            of(7, BatchOperation::Clear),
            of(8, BatchOperation::Remove),
        ]
    }

    fn printed() -> Vec<u8> {
        let mut bytes = vec![0; PAYLOAD_AT];
        bytes.extend_from_slice(&[5; 612]);
        complete(&mut bytes, &header(), (LaterBatches::Ignored, 1_700_000_000_123), &records());
        bytes
    }

    #[test]
    fn the_length_of_a_batch_is_known_before_it_is_complete() {
        for len in [0, 1, 612, 32 << 10, (64 << 10) - PAYLOAD_AT - 16, 1 << 20] {
            let mut bytes = vec![0; PAYLOAD_AT + len];
            let write = BatchOperation::Write { offset: 0, len: len as u32 };
            let records = [BatchRecord { file: 0, operation: write }];
            let expected = len_bytes(bytes.len(), records.len());
            complete(&mut bytes, &header(), (LaterBatches::Replayed, 0), &records);
            assert_eq!(bytes.len(), expected);
        }
    }

    #[test]
    fn a_batch_is_read_back() {
        let batch = Batch::parse(&printed()).unwrap();
        assert_eq!(
            batch,
            Batch {
                header: header(),
                later: LaterBatches::Ignored,
                ended_ms: 1_700_000_000_123,
                records: records()
            }
        );
        let mut empty = vec![0; PAYLOAD_AT];
        complete(&mut empty, &header(), (LaterBatches::Replayed, 0), &[]);
        assert_eq!(Batch::parse(&empty).unwrap().records, []);
    }

    #[test]
    fn each_changed_byte_and_each_missing_end_is_noticed() {
        let bytes = printed();
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(Batch::parse(&bad).is_err(), "byte {at}");
        }
        for len in 0..bytes.len() {
            assert!(Batch::parse(&bytes[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn impossible_records_are_refused() {
        let write = |offset, len| BatchOperation::Write { offset, len };
        for (file, operation) in [
            (SEGMENTS_MAX, BatchOperation::Clear),
            (0, write(u32::MAX, 612)),
            (SUPERBLOCK, write(SUPERBLOCK_BYTES_MAX, 612)),
            (0, write(0, 611)),
        ] {
            let mut bytes = vec![0; PAYLOAD_AT];
            bytes.extend_from_slice(&[5; 612]);
            complete(
                &mut bytes,
                &header(),
                (LaterBatches::Replayed, 0),
                &[BatchRecord { file, operation }],
            );
            assert!(Batch::parse(&bytes).is_err(), "{file} {operation:?}");
        }
    }
}

//! A file of the local log: the operations of one batch that were durable on a disk of the machine
//! before the object store had the batch.
//!
//! ```text
//! header ▪ group ▪ group ▪ ...        group: head ▪ records ▪ payload
//! ```
//!
//! A group has what a batch got since its group before. It is appended by one write, and synced. So
//! only the last group can be incomplete: an intact group proves that all before it was durable.
//! The groups of a complete file give the bytes of the batch again.

use crate::bytes::{crc, put_u32, put_u64, u32_at, u64_at};
use crate::error::FormatError;

use super::batch::{self, BatchRecord, LaterBatches, PAYLOAD_AT, RECORD_BYTES, payload_bytes};
use super::{HEADER_BYTES, ObjectHeader, ObjectKind};

/// Length of the head of a group, in bytes.
pub const GROUP_HEAD_BYTES: usize = 48;

const WHAT: &str = "local log";
const MAGIC: [u8; 8] = *b"BLKYGRP\n";

/// The name of the file of a batch.
pub fn name(epoch: u64, number: u64) -> String {
    format!("{epoch:016x}-{number:016x}")
}

/// The epoch and the number in the name of a file; `None` if it is not the file of a batch.
pub fn parse_name(file_name: &str) -> Option<(u64, u64)> {
    let (epoch, number) = file_name.split_once('-')?;
    let parse = |digits: &str| u64::from_str_radix(digits, 16).ok();
    let (epoch, number) = (parse(epoch)?, parse(number)?);
    (name(epoch, number) == file_name).then_some((epoch, number))
}

/// The beginning of the file of a batch with this header.
pub fn begin(header: &ObjectHeader) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    ObjectHeader { kind: ObjectKind::LocalLog, ..*header }.put(&mut bytes, HEADER_BYTES);
    bytes
}

/// The number of records and the bytes of the payload that the groups of a batch have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupsEnd {
    /// The number of records.
    pub records: usize,
    /// The bytes of the payload.
    pub payload_bytes: usize,
}

/// Appends a group to the bytes of a file: `records` and their `payload`, after those of `before`.
pub fn append(
    bytes: &mut Vec<u8>,
    (epoch, number): (u64, u64),
    before: GroupsEnd,
    (records, payload): (&[BatchRecord], &[u8]),
) {
    let at = bytes.len();
    bytes.resize(at + GROUP_HEAD_BYTES, 0);
    records.iter().for_each(|record| record.print(bytes));
    bytes.extend_from_slice(payload);
    let group = &mut bytes[at..];
    group[..8].copy_from_slice(&MAGIC);
    put_u64(group, 16, epoch);
    put_u64(group, 24, number);
    put_u32(group, 32, before.records as u32);
    put_u32(group, 36, before.payload_bytes as u32);
    put_u32(group, 40, records.len() as u32);
    put_u32(group, 44, payload.len() as u32);
    let sum = crc(&group[16..]);
    put_u64(group, 8, sum);
}

/// A parsed file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFile {
    /// The header of the batch.
    pub header: ObjectHeader,
    /// The records of all groups.
    pub records: Vec<BatchRecord>,
    /// The payload of all groups.
    pub payload: Vec<u8>,
    /// The bytes after the last intact group: a group whose write was interrupted.
    pub torn_bytes: usize,
}

impl LogFile {
    /// Parses the file of the batch of this name; `None` if the file was made and nothing in it was
    /// durable.
    ///
    /// # Errors
    /// If the file is of another batch, or a group is damaged and an intact one follows.
    pub fn parse(bytes: &[u8], id: (u64, u64)) -> Result<Option<LogFile>, FormatError> {
        let header = match ObjectHeader::parse_as(bytes, ObjectKind::LocalLog) {
            Ok((header, head)) if head.len() == HEADER_BYTES => header,
            Ok(_) => return Err(FormatError::Short { what: WHAT, len: bytes.len() as u64 }),
            Err(error) if error.is_of_newer() || follows(bytes, id) => return Err(error),
            Err(_) => return Ok(None),
        };
        if (header.epoch, header.number) != id {
            let (value, want) = (header.number, "the epoch and the number in the name of the file");
            return Err(FormatError::Field { what: WHAT, field: "number", value, want });
        }
        let header = ObjectHeader { kind: ObjectKind::Batch, ..header };
        let (records, payload) = (Vec::new(), Vec::new());
        let mut file = LogFile { header, records, payload, torn_bytes: 0 };
        let mut rest = &bytes[HEADER_BYTES..];
        while !rest.is_empty() {
            match IntactGroup::parse(rest, id) {
                Ok(group) => {
                    file.add(&group)?;
                    rest = &rest[group.len()..];
                }
                Err(error) if follows(&rest[1..], id) => return Err(error),
                Err(_) => {
                    file.torn_bytes = rest.len();
                    break;
                }
            }
        }
        Ok(Some(file))
    }

    fn add(&mut self, group: &IntactGroup<'_>) -> Result<(), FormatError> {
        let before = GroupsEnd { records: self.records.len(), payload_bytes: self.payload.len() };
        if group.before != before {
            let (value, want) = (group.before.records as u64, "the records of the groups before");
            return Err(FormatError::Field { what: WHAT, field: "records", value, want });
        }
        let records = group.records.chunks_exact(RECORD_BYTES).map(BatchRecord::parse);
        let records: Vec<BatchRecord> = records.collect::<Result<_, _>>()?;
        if payload_bytes(&records) != group.payload.len() as u64 {
            let (field, value) = ("payload", group.payload.len() as u64);
            let want = "the lengths of all writes together";
            return Err(FormatError::Field { what: WHAT, field, value, want });
        }
        self.records.extend(records);
        self.payload.extend_from_slice(group.payload);
        Ok(())
    }

    /// The batch. If the file is complete and `later` is [`LaterBatches::Replayed`], it is the one
    /// that the writer of the file sends to the object store, but for the time of its end, which
    /// the file does not have.
    pub fn batch(&self, later: LaterBatches) -> Vec<u8> {
        let mut bytes = vec![0; PAYLOAD_AT];
        bytes.extend_from_slice(&self.payload);
        batch::complete(&mut bytes, &self.header, (later, 0), &self.records);
        bytes
    }
}

/// A group with a right checksum.
struct IntactGroup<'a> {
    before: GroupsEnd,
    records: &'a [u8],
    payload: &'a [u8],
}

impl<'a> IntactGroup<'a> {
    /// The group with which bytes begin.
    fn parse(bytes: &'a [u8], (epoch, number): (u64, u64)) -> Result<IntactGroup<'a>, FormatError> {
        let short = || FormatError::Short { what: WHAT, len: bytes.len() as u64 };
        let head = bytes.get(..GROUP_HEAD_BYTES).ok_or_else(short)?;
        if head[..8] != MAGIC {
            return Err(FormatError::Magic { what: WHAT });
        }
        if (u64_at(head, 16), u64_at(head, 24)) != (epoch, number) {
            let (value, want) = (u64_at(head, 24), "the epoch and the number of the batch");
            return Err(FormatError::Field { what: WHAT, field: "number", value, want });
        }
        let field = |at| u32_at(head, at) as usize;
        let records_end = field(40).checked_mul(RECORD_BYTES).map(|len| GROUP_HEAD_BYTES + len);
        let end = records_end.and_then(|end| end.checked_add(field(44)));
        let (Some(records_end), Some(end)) = (records_end, end) else { return Err(short()) };
        let group = bytes.get(..end).ok_or_else(short)?;
        let (found, want) = (crc(&group[16..]), u64_at(group, 8));
        if found != want {
            return Err(FormatError::Checksum { what: WHAT, found, want });
        }
        Ok(IntactGroup {
            before: GroupsEnd { records: field(32), payload_bytes: field(36) },
            records: &group[GROUP_HEAD_BYTES..records_end],
            payload: &group[records_end..],
        })
    }

    fn len(&self) -> usize {
        GROUP_HEAD_BYTES + self.records.len() + self.payload.len()
    }
}

/// Most places at which an intact group is looked for after a damaged one. The data of a volume may
/// contain the magic number again and again, and each place can cost a checksum of the whole file.
const PLACES_MAX: usize = 1024;

/// Whether an intact group of the batch begins anywhere in the bytes.
fn follows(bytes: &[u8], id: (u64, u64)) -> bool {
    let places = bytes.windows(MAGIC.len()).enumerate().filter(|(_, it)| **it == MAGIC);
    places.take(PLACES_MAX).any(|(at, _)| IntactGroup::parse(&bytes[at..], id).is_ok())
}

#[cfg(test)]
mod tests {
    use super::super::batch::{Batch, BatchOperation, SUPERBLOCK};
    use super::*;

    const ID: (u64, u64) = (3, 9);

    fn header() -> ObjectHeader {
        let (epoch, number) = ID;
        ObjectHeader { kind: ObjectKind::Batch, pool: 7, writer: [5; 16], epoch, number }
    }

    /// The groups of a file: records with their payload.
    fn groups() -> Vec<(Vec<BatchRecord>, Vec<u8>)> {
        let write = |file, len| {
            let operation = BatchOperation::Write { offset: 4096, len };
            BatchRecord { file, operation }
        };
        let make = BatchRecord { file: 2, operation: BatchOperation::Make { len: 1 << 20 } };
        vec![
            (vec![make, write(2, 300)], vec![1; 300]),
            (vec![write(SUPERBLOCK, 20)], vec![2; 20]),
            (vec![BatchRecord { file: 4, operation: BatchOperation::Clear }], Vec::new()),
        ]
    }

    /// A file, and its length after the header and after each group.
    fn printed() -> (Vec<u8>, Vec<usize>) {
        let mut bytes = begin(&header());
        let (mut before, mut ends) = (GroupsEnd::default(), vec![bytes.len()]);
        for (records, payload) in groups() {
            append(&mut bytes, ID, before, (&records, &payload));
            before.records += records.len();
            before.payload_bytes += payload.len();
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    fn expected(count: usize, torn_bytes: usize) -> LogFile {
        let (mut records, mut payload) = (Vec::new(), Vec::new());
        for (group, bytes) in &groups()[..count] {
            records.extend_from_slice(group);
            payload.extend_from_slice(bytes);
        }
        LogFile { header: header(), records, payload, torn_bytes }
    }

    #[test]
    fn a_file_that_ends_anywhere_has_the_groups_that_were_complete() {
        let (bytes, ends) = printed();
        for len in 0..=bytes.len() {
            let found = LogFile::parse(&bytes[..len], ID).unwrap();
            let Some(count) = ends.iter().rposition(|end| *end <= len) else {
                assert_eq!(found, None, "{len} bytes");
                continue;
            };
            assert_eq!(found, Some(expected(count, len - ends[count])), "{len} bytes");
        }
        // A file system may extend the file before it writes the bytes.
        let mut zeros = bytes[..ends[2]].to_vec();
        zeros.resize(bytes.len(), 0);
        assert_eq!(LogFile::parse(&zeros, ID).unwrap(), Some(expected(2, bytes.len() - ends[2])));
    }

    #[test]
    fn each_changed_byte_before_an_intact_group_is_damage() {
        let (bytes, ends) = printed();
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            match LogFile::parse(&bad, ID) {
                // Of the last group it cannot be told whether it was ever durable.
                Ok(found) => {
                    assert!(at >= ends[2], "byte {at}");
                    assert_eq!(found, Some(expected(2, bytes.len() - ends[2])));
                }
                Err(_) => assert!(at < ends[2], "byte {at}"),
            }
        }
    }

    #[test]
    fn a_file_gives_the_batch_of_the_object_store() {
        let (bytes, _) = printed();
        let file = LogFile::parse(&bytes, ID).unwrap().unwrap();
        let (mut batch, all) = (vec![0; PAYLOAD_AT], expected(3, 0));
        batch.extend_from_slice(&all.payload);
        batch::complete(&mut batch, &header(), (LaterBatches::Replayed, 0), &all.records);
        assert_eq!(file.batch(LaterBatches::Replayed), batch);
        let last = Batch::parse(&file.batch(LaterBatches::Ignored)).unwrap();
        assert_eq!((last.records, last.later), (all.records, LaterBatches::Ignored));
    }

    #[test]
    fn a_file_of_another_batch_is_refused_by_name() {
        let (bytes, _) = printed();
        let error = LogFile::parse(&bytes, (3, 8)).unwrap_err().to_string();
        assert!(error.starts_with("`local log` has number = 9; expected the epoch"), "{error}");
        let seal = header().seal();
        assert_eq!(LogFile::parse(&seal, ID), Ok(None));
        let mut newer = bytes;
        newer[16] = 2;
        assert!(LogFile::parse(&newer, ID).unwrap_err().is_of_newer());
        assert_eq!(parse_name(&name(3, 9)), Some((3, 9)));
        for other in ["lost-0000000000000003-0000000000000009", "3-9", "lock", ""] {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }
}

//! A file of the local log: the operations of one batch that were durable on a disk of the machine
//! before the object store had the batch.
//!
//! ```text
//! head ▪ group ▪ group ▪ ... ▪ rest        group: head ▪ records ▪ payload
//! ```
//!
//! A group has what a batch got since its group before. It is appended by one write, and synced. So
//! only the last group can be incomplete: an intact group proves that all before it was durable.
//! The groups of a complete file give the bytes of the batch again.
//!
//! A file can be one that an earlier batch had. So the rest, which is what follows the last group,
//! is zeros or what the earlier batch left. That includes data of volumes, which can look like
//! groups. The checksum of a group therefore begins with the random number of the opener, which no
//! client of a volume knows. The head of a file says where the groups of the file before it end:
//! the length of that file does not.

use std::ops::Range;

use crate::bytes::{crc_of, put_u32, put_u64, u32_at, u64_at};
use crate::error::FormatError;

use super::batch::{self, BatchRecord, LaterBatches, PAYLOAD_AT, RECORD_BYTES, payload_bytes};
use super::{HEADER_BYTES, ObjectHeader, ObjectKind};

/// Length of the head of a file, in bytes. With the head of the first group it is in one sector.
pub const HEAD_BYTES: usize = HEADER_BYTES + 16;

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

/// The number of records and the bytes of the payload that the groups of a batch have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupsEnd {
    /// The number of records.
    pub records: usize,
    /// The bytes of the payload.
    pub payload_bytes: usize,
}

/// The head of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogHead {
    /// The header of the batch.
    pub header: ObjectHeader,
    /// The number of the batch that the log had last when the file was begun, and what its groups
    /// have; zeros if the file is the first one.
    pub before: (u64, GroupsEnd),
}

impl LogHead {
    /// The bytes of the head.
    pub fn print(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEAD_BYTES];
        let (number, end) = self.before;
        put_u64(&mut bytes, HEADER_BYTES, number);
        put_u32(&mut bytes, HEADER_BYTES + 8, end.records as u32);
        put_u32(&mut bytes, HEADER_BYTES + 12, end.payload_bytes as u32);
        ObjectHeader { kind: ObjectKind::LocalLog, ..self.header }.put(&mut bytes, HEAD_BYTES);
        bytes
    }

    /// Parses the head with which bytes begin, of whatever batch.
    ///
    /// # Errors
    /// If the bytes do not begin with an intact head.
    pub fn parse(bytes: &[u8]) -> Result<LogHead, FormatError> {
        let (header, head) = ObjectHeader::parse_as(bytes, ObjectKind::LocalLog)?;
        if head.len() != HEAD_BYTES {
            return Err(FormatError::Short { what: WHAT, len: head.len() as u64 });
        }
        let field = |at| u32_at(head, HEADER_BYTES + at) as usize;
        let end = GroupsEnd { records: field(8), payload_bytes: field(12) };
        let header = ObjectHeader { kind: ObjectKind::Batch, ..header };
        Ok(LogHead { header, before: (u64_at(head, HEADER_BYTES), end) })
    }
}

/// Appends a group to bytes: `records` of the batch with this header and their `payload`, after
/// those of `before`.
pub fn append(
    bytes: &mut Vec<u8>,
    header: &ObjectHeader,
    before: GroupsEnd,
    (records, payload): (&[BatchRecord], &[u8]),
) {
    let at = bytes.len();
    bytes.resize(at + GROUP_HEAD_BYTES, 0);
    records.iter().for_each(|record| record.print(bytes));
    bytes.extend_from_slice(payload);
    let group = &mut bytes[at..];
    group[..8].copy_from_slice(&MAGIC);
    put_u64(group, 16, header.epoch);
    put_u64(group, 24, header.number);
    put_u32(group, 32, before.records as u32);
    put_u32(group, 36, before.payload_bytes as u32);
    put_u32(group, 40, records.len() as u32);
    put_u32(group, 44, payload.len() as u32);
    let sum = checksum(header, group);
    put_u64(group, 8, sum);
}

/// The checksum of a group: of the number of the opener, and the group from byte 16 on.
fn checksum(header: &ObjectHeader, group: &[u8]) -> u64 {
    crc_of(&[&header.writer, &group[16..]])
}

/// A parsed file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFile {
    /// The head.
    pub head: LogHead,
    /// The records of all groups.
    pub records: Vec<BatchRecord>,
    /// The payload of all groups.
    pub payload: Vec<u8>,
    /// The length of the head and all groups.
    pub len_bytes: usize,
    /// The length of the group after these, if its write was interrupted.
    pub torn_bytes: usize,
}

impl LogFile {
    /// Parses the file of the batch with this epoch and number; `None` if the file was made, or
    /// renamed, and nothing that was written then was durable. `writer` is the number of the
    /// opener if the caller knows it; it is needed if the head is damaged.
    ///
    /// # Errors
    /// If the file is of another batch, or the head or a group is damaged and an intact group
    /// follows.
    pub fn parse(
        bytes: &[u8],
        (epoch, number): (u64, u64),
        writer: Option<[u8; 16]>,
    ) -> Result<Option<LogFile>, FormatError> {
        let (writer, error) = match LogHead::parse(bytes) {
            Ok(head) if (head.header.epoch, head.header.number) == (epoch, number) => {
                return LogFile::parse_groups(bytes, head).map(Some);
            }
            Ok(LogHead { header, .. }) => {
                let value = header.number;
                let want = "the epoch and the number in the name of the file";
                let error = FormatError::Field { what: WHAT, field: "number", value, want };
                // An opener only uses files of its own earlier batches again.
                if header.epoch != epoch || header.number > number {
                    return Err(error);
                }
                (Some(header.writer), error)
            }
            Err(error) if error.is_of_newer() => return Err(error),
            Err(error) => (writer, error),
        };
        let header =
            |writer| ObjectHeader { kind: ObjectKind::Batch, pool: 0, writer, epoch, number };
        match writer.is_some_and(|writer| follows(bytes, &header(writer), 0)) {
            true => Err(error),
            false => Ok(None),
        }
    }

    fn parse_groups(bytes: &[u8], head: LogHead) -> Result<LogFile, FormatError> {
        let (records, payload) = (Vec::new(), Vec::new());
        let mut file = LogFile { head, records, payload, len_bytes: HEAD_BYTES, torn_bytes: 0 };
        while let Some(rest @ [_, later @ ..]) = bytes.get(file.len_bytes..) {
            match IntactGroup::parse(rest, &head.header) {
                Ok(group) => file.add(&group)?,
                Err(error) if follows(later, &head.header, file.records.len()) => {
                    return Err(error);
                }
                Err(_) => {
                    file.torn_bytes = torn_bytes(rest, &head.header);
                    break;
                }
            }
        }
        Ok(file)
    }

    /// What the groups have.
    pub fn end(&self) -> GroupsEnd {
        GroupsEnd { records: self.records.len(), payload_bytes: self.payload.len() }
    }

    fn add(&mut self, group: &IntactGroup<'_>) -> Result<(), FormatError> {
        if group.before != self.end() {
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
        self.len_bytes += GROUP_HEAD_BYTES + group.records.len() + group.payload.len();
        Ok(())
    }

    /// The batch. If the file is complete and `later` is [`LaterBatches::Replayed`], it is the one
    /// that the writer of the file sends to the object store, but for the time of its end, which
    /// the file does not have.
    pub fn batch(&self, later: LaterBatches) -> Vec<u8> {
        let mut bytes = vec![0; PAYLOAD_AT];
        bytes.extend_from_slice(&self.payload);
        batch::complete(&mut bytes, &self.head.header, (later, 0), &self.records);
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
    /// The group of this batch with which bytes begin.
    fn parse(bytes: &'a [u8], header: &ObjectHeader) -> Result<IntactGroup<'a>, FormatError> {
        let short = || FormatError::Short { what: WHAT, len: bytes.len() as u64 };
        let head = bytes.get(..GROUP_HEAD_BYTES).ok_or_else(short)?;
        if head[..8] != MAGIC {
            return Err(FormatError::Magic { what: WHAT });
        }
        if (u64_at(head, 16), u64_at(head, 24)) != (header.epoch, header.number) {
            let (value, want) = (u64_at(head, 24), "the epoch and the number of the batch");
            return Err(FormatError::Field { what: WHAT, field: "number", value, want });
        }
        let field = |at| u32_at(head, at) as usize;
        let (records_end, end) = ends(head).ok_or_else(short)?;
        let group = bytes.get(..end).ok_or_else(short)?;
        let (found, want) = (checksum(header, group), u64_at(group, 8));
        if found != want {
            return Err(FormatError::Checksum { what: WHAT, found, want });
        }
        Ok(IntactGroup {
            before: GroupsEnd { records: field(32), payload_bytes: field(36) },
            records: &group[GROUP_HEAD_BYTES..records_end],
            payload: &group[records_end..],
        })
    }
}

/// The ends of the records and of the payload of a group with this head.
fn ends(head: &[u8]) -> Option<(usize, usize)> {
    let records_len = (u32_at(head, 40) as usize).checked_mul(RECORD_BYTES)?;
    let records_end = GROUP_HEAD_BYTES.checked_add(records_len)?;
    Some((records_end, records_end.checked_add(u32_at(head, 44) as usize)?))
}

/// Whether bytes begin as a group of this batch does, or as a part of it.
fn begins(bytes: &[u8], header: &ObjectHeader) -> bool {
    let mut head = [0; 32];
    head[..8].copy_from_slice(&MAGIC);
    put_u64(&mut head, 16, header.epoch);
    put_u64(&mut head, 24, header.number);
    let is_same = |range: Range<usize>| {
        let to = range.end.min(bytes.len());
        range.start >= to || bytes[range.start..to] == head[range.start..to]
    };
    is_same(0..8) && is_same(16..32)
}

/// The length of a group whose write was interrupted, with which bytes begin; 0 if they do not.
fn torn_bytes(bytes: &[u8], header: &ObjectHeader) -> usize {
    if !begins(bytes, header) {
        return 0;
    }
    let end = bytes.get(..GROUP_HEAD_BYTES).and_then(ends).map_or(bytes.len(), |(_, end)| end);
    end.min(bytes.len())
}

/// Most places at which an intact group is looked for after a damaged one. The data of a volume may
/// contain the beginning of a group again and again, and each place can cost a checksum of the
/// whole file.
const PLACES_MAX: usize = 1024;

/// Whether a group of the batch that comes after `records` records begins anywhere in the bytes.
fn follows(bytes: &[u8], header: &ObjectHeader, records: usize) -> bool {
    let has_magic = |place: &usize| bytes[*place..].starts_with(&MAGIC);
    let places = (0..bytes.len()).filter(has_magic).filter(|at| begins(&bytes[*at..], header));
    places.take(PLACES_MAX).any(|at| {
        // A client that copies the file into a volume has groups of the past in its data.
        let group = IntactGroup::parse(&bytes[at..], header);
        group.is_ok_and(|group| group.before.records >= records)
    })
}

#[cfg(test)]
mod tests {
    use super::super::batch::{Batch, BatchOperation, SUPERBLOCK};
    use super::*;

    const ID: (u64, u64) = (3, 9);

    /// Where the log ended when the file was begun.
    const BEFORE: (u64, GroupsEnd) = (7, GroupsEnd { records: 5, payload_bytes: 99 });

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

    /// The file of the batch with this header, and its length after the head and after each group.
    fn printed_with(header: &ObjectHeader) -> (Vec<u8>, Vec<usize>) {
        let mut bytes = LogHead { header: *header, before: BEFORE }.print();
        let (mut before, mut ends) = (GroupsEnd::default(), vec![bytes.len()]);
        for (records, payload) in groups() {
            append(&mut bytes, header, before, (&records, &payload));
            before.records += records.len();
            before.payload_bytes += payload.len();
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    fn printed() -> (Vec<u8>, Vec<usize>) {
        printed_with(&header())
    }

    fn expected(count: usize, torn_bytes: usize) -> LogFile {
        let (mut records, mut payload) = (Vec::new(), Vec::new());
        for (group, bytes) in &groups()[..count] {
            records.extend_from_slice(group);
            payload.extend_from_slice(bytes);
        }
        let (head, len_bytes) = (LogHead { header: header(), before: BEFORE }, printed().1[count]);
        LogFile { head, records, payload, len_bytes, torn_bytes }
    }

    fn parse(bytes: &[u8]) -> Result<Option<LogFile>, FormatError> {
        LogFile::parse(bytes, ID, Some(header().writer))
    }

    /// Checks what a file has that had these bytes, and into which the first `len` were written.
    fn check_interrupted(len: usize, old: &[u8]) {
        let (bytes, ends) = printed();
        let file = [&bytes[..len], old.get(len..).unwrap_or_default()].concat();
        // The old bytes can be equal to those that were to be written.
        let is_there = |end: &usize| file.get(..*end) == Some(&bytes[..*end]);
        let count = ends.iter().rposition(is_there).unwrap();
        let found = parse(&file).unwrap().unwrap();
        assert_eq!(found, expected(count, found.torn_bytes), "{len} bytes");
        assert!(len > ends[count] || found.torn_bytes == 0, "{len} bytes: {}", found.torn_bytes);
    }

    #[test]
    fn a_file_that_ends_anywhere_has_the_groups_that_were_complete() {
        let (bytes, ends) = printed();
        for len in 0..=bytes.len() {
            let found = parse(&bytes[..len]).unwrap();
            let Some(count) = ends.iter().rposition(|end| *end <= len) else {
                assert_eq!(found, None, "{len} bytes");
                continue;
            };
            assert_eq!(found, Some(expected(count, len - ends[count])), "{len} bytes");
            // The rest of a file that was written before is zeros.
            check_interrupted(len, &[0; 2000]);
        }
        assert_eq!(parse(&[0; 1000]), Ok(None));
    }

    /// The file was that of an earlier batch, whose groups end at the same places.
    #[test]
    fn remains_of_an_earlier_batch_are_not_taken_for_groups() {
        let (bytes, ends) = printed();
        let (old, _) = printed_with(&ObjectHeader { number: 8, ..header() });
        for len in HEAD_BYTES..=bytes.len() {
            check_interrupted(len, &old);
            check_interrupted(len, &[&old[..], &old[..]].concat());
        }
        // An interrupted write is reported with its length, not with that of the rest.
        let cut = [&bytes[..ends[1] + 60], &[7; 5000]].concat();
        assert_eq!(parse(&cut), Ok(Some(expected(1, ends[2] - ends[1]))));
    }

    /// A client of a volume wrote what looks like the next groups, with the right epoch and number.
    /// It does not know the number of the opener.
    #[test]
    fn remains_that_a_client_has_forged_are_not_taken_for_groups() {
        let (bytes, ends) = printed();
        for writer in [[0; 16], [6; 16]] {
            let (forged, _) = printed_with(&ObjectHeader { writer, ..header() });
            for count in 0..3 {
                let file = [&bytes[..ends[count]], &forged[ends[count]..]].concat();
                let torn_bytes = ends[count + 1] - ends[count];
                assert_eq!(parse(&file), Ok(Some(expected(count, torn_bytes))));
                // They do not make an interrupted write before them damage.
                let torn = &bytes[ends[count]..ends[count] + 50];
                let file = [&bytes[..ends[count]], torn, &forged[ends[0]..]].concat();
                let found = parse(&file).unwrap().unwrap();
                assert_eq!(found, expected(count, found.torn_bytes));
            }
            // Without a head, too.
            let file = [&[0; HEAD_BYTES], &forged[HEAD_BYTES..]].concat();
            assert_eq!(parse(&file), Ok(None));
        }
    }

    /// A back-up of the directory of the log into a volume of the pool has groups that are intact.
    #[test]
    fn a_copy_of_earlier_groups_in_the_data_of_a_volume_is_no_later_group() {
        let (mut bytes, ends) = printed();
        let copy = bytes[ends[0]..ends[2]].to_vec();
        let operation = BatchOperation::Write { offset: 0, len: copy.len() as u32 };
        let records = [BatchRecord { file: 3, operation }];
        append(&mut bytes, &header(), expected(3, 0).end(), (&records, &copy));
        assert_eq!(parse(&bytes).unwrap().unwrap().records.len(), expected(3, 0).records.len() + 1);
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        assert_eq!(parse(&bytes), Ok(Some(expected(3, bytes.len() - ends[3]))));
    }

    #[test]
    fn each_changed_byte_before_an_intact_group_is_damage() {
        let (bytes, ends) = printed();
        let mut used = bytes.clone();
        used.extend_from_slice(&printed_with(&ObjectHeader { number: 8, ..header() }).0);
        for (at, file) in (0..bytes.len()).flat_map(|at| [(at, &bytes), (at, &used)]) {
            let mut bad = file.clone();
            bad[at] ^= 0x10;
            match parse(&bad) {
                // Of the last group it cannot be told whether it was ever durable.
                Ok(found) => {
                    assert!(at >= ends[2], "byte {at}");
                    let found = found.unwrap();
                    assert_eq!(found, expected(2, found.torn_bytes));
                }
                Err(_) => assert!(at < ends[2], "byte {at}"),
            }
        }
    }

    #[test]
    fn a_file_gives_the_batch_of_the_object_store() {
        let (bytes, _) = printed();
        let file = parse(&bytes).unwrap().unwrap();
        let (mut batch, all) = (vec![0; PAYLOAD_AT], expected(3, 0));
        batch.extend_from_slice(&all.payload);
        batch::complete(&mut batch, &header(), (LaterBatches::Replayed, 0), &all.records);
        assert_eq!(file.batch(LaterBatches::Replayed), batch);
        let last = Batch::parse(&file.batch(LaterBatches::Ignored)).unwrap();
        assert_eq!((last.records, last.later), (all.records, LaterBatches::Ignored));
    }

    /// The file was renamed for a batch, and the write of its head was not durable.
    #[test]
    fn a_file_with_the_head_of_an_earlier_batch_has_nothing() {
        let (bytes, ends) = printed();
        for number in [10, 11, u64::MAX] {
            assert_eq!(LogFile::parse(&bytes, (3, number), None), Ok(None));
        }
        // An intact group of the batch says that the head is damage.
        let (old, _) = printed_with(&ObjectHeader { number: 8, ..header() });
        let bad = [&old[..ends[1]], &bytes[ends[1]..]].concat();
        assert!(LogFile::parse(&bad, ID, None).is_err());
        let zeros = [&[0; HEAD_BYTES], &bytes[HEAD_BYTES..]].concat();
        assert!(parse(&zeros).is_err());
        // Without the number of the opener nothing tells it from what a client wrote.
        assert_eq!(LogFile::parse(&zeros, ID, None), Ok(None));
    }

    #[test]
    fn a_file_of_another_batch_is_refused_by_name() {
        let (bytes, _) = printed();
        // A later batch, and other epochs.
        for id in [(3, 8), (2, 9), (4, 10)] {
            let error = LogFile::parse(&bytes, id, None).unwrap_err().to_string();
            assert!(error.starts_with("`local log` has number = 9; expected the epoch"), "{error}");
        }
        assert_eq!(parse(&header().seal()), Ok(None));
        for version in [1, 3] {
            let mut other = bytes.clone();
            other[16] = version;
            assert!(parse(&other).unwrap_err().is_of_newer());
        }
        assert_eq!(parse_name(&name(3, 9)), Some((3, 9)));
        for other in ["lost-0000000000000003-0000000000000009", "spare-0", "3-9", "lock", ""] {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }
}

//! The manifest: what a pool in an object store consists of. It is the only object that changes, by
//! compare-and-swap.

use crate::bytes::{Reader, crc};
use crate::error::FormatError;

use super::batch::{SEGMENTS_MAX, SUPERBLOCK_BYTES_MAX};
use super::table::PART_SEGMENTS;
use super::{HEADER_BYTES, ObjectHeader, ObjectId, ObjectKind};

/// Most epochs whose batches are still to be replayed.
pub const REPLAYS_MAX: usize = 1 << 16;

/// Most ranges of objects that wait for their removal. A manifest with all of them has 8 MiB.
pub const REMOVALS_MAX: usize = 1 << 18;

const WHAT: &str = "manifest";

/// Batches of an epoch that the table does not contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replay {
    /// The epoch.
    pub epoch: u64,
    /// The number of the first batch that the table lacks.
    pub first: u64,
    /// The number of batches before the first one.
    pub through: u64,
}

/// An epoch whose opener acknowledges syncs by a local log, and has not closed the pool in order.
/// An opener without the log may lack writes that were acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogMark {
    /// The epoch.
    pub epoch: u64,
    /// The random number of the opener, which the directory with the log has, too.
    pub log: [u8; 16],
    /// The object store has what was written before this time, in milliseconds since 1970 by the
    /// clock of the opener, also without the batches that are to be replayed.
    pub since_ms: u64,
}

/// Objects with consecutive numbers that the manifest does not use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removal {
    /// The object with the lowest number.
    pub first: ObjectId,
    /// The number of objects; not 0.
    pub count: u32,
    /// When they left the manifest, in seconds since 1970 (UTC).
    pub since: u64,
}

impl Removal {
    /// The ranges of objects that left the manifest at the same time.
    pub fn ranges(mut objects: Vec<ObjectId>, since: u64) -> Vec<Removal> {
        objects.sort_unstable();
        objects.dedup();
        let mut ranges: Vec<Removal> = Vec::new();
        for object in objects {
            match ranges.last_mut() {
                Some(range) if range.next() == Some(object) => range.count += 1,
                _ => ranges.push(Removal { first: object, count: 1, since }),
            }
        }
        ranges
    }

    /// The object that the range would have in addition, if it were longer by one.
    fn next(&self) -> Option<ObjectId> {
        self.count.checked_add(1)?;
        let number = self.first.number.checked_add(self.count.into())?;
        Some(ObjectId { number, ..self.first })
    }

    /// The objects.
    pub fn objects(&self) -> impl Iterator<Item = ObjectId> + use<> {
        let (first, count) = (self.first, self.count);
        (0..count).map(move |at| ObjectId { number: first.number + u64::from(at), ..first })
    }

    fn put(&self, bytes: &mut Vec<u8>) {
        self.first.put(bytes);
        bytes.extend_from_slice(&self.count.to_le_bytes());
        bytes.extend_from_slice(&self.since.to_le_bytes());
    }

    /// Parses a range; `None` if the bytes end before.
    fn parse(reader: &mut Reader<'_>) -> Option<Result<Removal, FormatError>> {
        let first = ObjectId::parse(reader.take(ObjectId::BYTES)?, WHAT);
        let (count, since) = (reader.u32()?, reader.u64()?);
        Some(first.and_then(|first| {
            let last = u64::from(count).checked_sub(1).and_then(|it| first.number.checked_add(it));
            let want = "one or more objects to remove";
            let wrong =
                FormatError::Field { what: WHAT, field: "count", value: count.into(), want };
            last.map(|_| Removal { first, count, since }).ok_or(wrong)
        }))
    }
}

/// The manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The random identity of the pool.
    pub id: [u8; 16],
    /// The writer of this manifest.
    pub writer: [u8; 16],
    /// The epoch of the newest opener.
    pub epoch: u64,
    /// Counts the changes of the manifest.
    pub changes: u64,
    /// Most bytes of all segments together.
    pub capacity_bytes: u64,
    /// The length of a segment in bytes; 0 while there is none.
    pub segment_bytes: u32,
    /// The number of segments.
    pub segments: u32,
    /// The contents of the file `superblock`; `None` if there is no such file.
    pub superblock: Option<Vec<u8>>,
    /// The epochs to replay, the oldest first; the last one is the newest opener's.
    pub replays: Vec<Replay>,
    /// The marks of epochs to replay whose openers have a local log, the oldest first.
    pub logs: Vec<LogMark>,
    /// The parts of the table; `None` for a part of zeros.
    pub parts: Vec<Option<ObjectId>>,
    /// The objects that wait for their removal, in the order in which they left the manifest.
    pub removals: Vec<Removal>,
}

impl Manifest {
    /// The mark of the pool in the headers of its objects.
    pub fn mark(&self) -> u64 {
        crate::bytes::u64_at(&self.id, 0)
    }

    /// Prints the manifest.
    pub fn print(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes.extend_from_slice(&self.id);
        bytes.extend_from_slice(&self.capacity_bytes.to_le_bytes());
        let superblock = self.superblock.as_deref().unwrap_or_default();
        let counts = [
            self.segment_bytes,
            self.segments,
            u32::from(self.superblock.is_some()),
            superblock.len() as u32,
            self.replays.len() as u32,
            self.logs.len() as u32,
            self.parts.len() as u32,
            self.removals.len() as u32,
        ];
        counts.iter().for_each(|count| bytes.extend_from_slice(&count.to_le_bytes()));
        bytes.extend_from_slice(superblock);
        for Replay { epoch, first, through } in &self.replays {
            [epoch, first, through]
                .iter()
                .for_each(|it| bytes.extend_from_slice(&it.to_le_bytes()));
        }
        for LogMark { epoch, log, since_ms } in &self.logs {
            bytes.extend_from_slice(&epoch.to_le_bytes());
            bytes.extend_from_slice(log);
            bytes.extend_from_slice(&since_ms.to_le_bytes());
        }
        for part in &self.parts {
            match part {
                Some(object) => object.put(&mut bytes),
                None => bytes.extend_from_slice(&[0; ObjectId::BYTES]),
            }
        }
        self.removals.iter().for_each(|removal| removal.put(&mut bytes));
        let (kind, pool, writer) = (ObjectKind::Manifest, self.mark(), self.writer);
        let header = ObjectHeader { kind, pool, writer, epoch: self.epoch, number: self.changes };
        // A long manifest must not depend on the limit of a head.
        let crc = crc(&bytes[HEADER_BYTES..]);
        bytes.splice(HEADER_BYTES..HEADER_BYTES, crc.to_le_bytes());
        header.put(&mut bytes, HEADER_BYTES + 8);
        bytes
    }

    /// Parses a manifest.
    ///
    /// # Errors
    /// If it is damaged, or of a version that this program does not know.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, FormatError> {
        let (header, head) = ObjectHeader::parse_as(bytes, ObjectKind::Manifest)?;
        let short = || FormatError::Short { what: WHAT, len: bytes.len() as u64 };
        if head.len() != HEADER_BYTES + 8 {
            return Err(short());
        }
        let body = &bytes[head.len()..];
        let (found, want) = (crc(body), crate::bytes::u64_at(head, HEADER_BYTES));
        if found != want {
            return Err(FormatError::Checksum { what: WHAT, found, want });
        }
        let mut reader = Reader::new(body);
        let ObjectHeader { writer, epoch, number: changes, .. } = header;
        let manifest = fields(&mut reader, (writer, epoch, changes)).ok_or_else(short)??;
        if reader.left() > 0 {
            return Err(short());
        }
        manifest.check(&header)?;
        Ok(manifest)
    }

    fn check(&self, header: &ObjectHeader) -> Result<(), FormatError> {
        let wrong = |field, value, want| Err(FormatError::Field { what: WHAT, field, value, want });
        if header.pool != self.mark() {
            return wrong("pool", header.pool, "the beginning of its identity");
        }
        if self.segments > 0 && self.segment_bytes == 0 || self.segments > SEGMENTS_MAX {
            return wrong("segments", self.segments.into(), "16777216 at most, that are not empty");
        }
        if self.parts.len() != (self.segments as usize).div_ceil(PART_SEGMENTS) {
            return wrong("parts", self.parts.len() as u64, "one for 1024 segments");
        }
        let epochs: Vec<u64> = self.replays.iter().map(|replay| replay.epoch).collect();
        if epochs.last() != Some(&self.epoch) || !epochs.is_sorted_by(|one, next| one < next) {
            return wrong("epoch", self.epoch, "epochs in order, the newest last");
        }
        let is_of_replay = |mark: &LogMark| epochs.binary_search(&mark.epoch).is_ok();
        if !self.logs.iter().all(is_of_replay)
            || !self.logs.is_sorted_by(|one, next| one.epoch < next.epoch)
        {
            return wrong("logs", self.logs.len() as u64, "epochs to replay, in order");
        }
        Ok(())
    }
}

/// Reads all fields; `None` if the bytes end before.
fn fields(
    reader: &mut Reader<'_>,
    (writer, epoch, changes): ([u8; 16], u64, u64),
) -> Option<Result<Manifest, FormatError>> {
    let id = reader.take(16)?.try_into().ok()?;
    let capacity_bytes = reader.u64()?;
    let (segment_bytes, segments) = (reader.u32()?, reader.u32()?);
    let (has_superblock, superblock_bytes) = (reader.u32()?, reader.u32()?);
    let (replay_count, log_count) = (reader.u32()?, reader.u32()?);
    let (part_count, removal_count) = (reader.u32()?, reader.u32()?);
    let limits = [
        (has_superblock, 1),
        (superblock_bytes, if has_superblock == 0 { 0 } else { SUPERBLOCK_BYTES_MAX }),
        (replay_count, REPLAYS_MAX as u32),
        (log_count, REPLAYS_MAX as u32),
        (part_count, SEGMENTS_MAX / PART_SEGMENTS as u32),
        (removal_count, REMOVALS_MAX as u32),
    ];
    if let Some((value, _)) = limits.iter().find(|(value, limit)| value > limit) {
        let (field, value) = ("count", u64::from(*value));
        return Some(Err(FormatError::Field { what: WHAT, field, value, want: "a lower one" }));
    }
    let superblock = reader.take(superblock_bytes as usize)?.to_vec();
    let mut replays = Vec::new();
    for _ in 0..replay_count {
        let (epoch, first, through) = (reader.u64()?, reader.u64()?, reader.u64()?);
        replays.push(Replay { epoch, first, through });
    }
    let mut logs = Vec::new();
    for _ in 0..log_count {
        let (epoch, log) = (reader.u64()?, reader.take(16)?.try_into().ok()?);
        logs.push(LogMark { epoch, log, since_ms: reader.u64()? });
    }
    let mut parts = Vec::new();
    for _ in 0..part_count {
        let bytes = reader.take(ObjectId::BYTES)?;
        if bytes.iter().all(|byte| *byte == 0) {
            parts.push(None);
            continue;
        }
        match ObjectId::parse(bytes, WHAT) {
            Ok(object) => parts.push(Some(object)),
            Err(error) => return Some(Err(error)),
        }
    }
    let mut removals = Vec::new();
    for _ in 0..removal_count {
        match Removal::parse(reader)? {
            Ok(removal) => removals.push(removal),
            Err(error) => return Some(Err(error)),
        }
    }
    let superblock = (has_superblock == 1).then_some(superblock);
    Some(Ok(Manifest {
        id,
        writer,
        epoch,
        changes,
        capacity_bytes,
        segment_bytes,
        segments,
        superblock,
        replays,
        logs,
        parts,
        removals,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(epoch: u64) -> LogMark {
        LogMark { epoch, log: [7; 16], since_ms: 1_700_000_000_123 }
    }

    fn manifest() -> Manifest {
        let part = ObjectId { kind: ObjectKind::Table, epoch: 2, number: 1 };
        Manifest {
            id: *b"0123456789abcdef",
            writer: *b"fedcba9876543210",
            epoch: 9,
            changes: 4,
            capacity_bytes: 1 << 40,
            segment_bytes: 16 << 20,
            segments: 2000,
            superblock: Some(vec![3; 100]),
            replays: vec![
                Replay { epoch: 8, first: 5, through: 6 },
                Replay { epoch: 9, first: 0, through: 0 },
            ],
            logs: vec![mark(8), mark(9)],
            parts: vec![None, Some(part)],
            removals: vec![Removal {
                first: ObjectId::batch(1, 2),
                count: 7,
                since: 1_700_000_000,
            }],
        }
    }

    #[test]
    fn a_manifest_is_read_back_and_each_changed_byte_is_noticed() {
        for superblock in [None, Some(vec![]), manifest().superblock] {
            let manifest = Manifest { superblock, ..manifest() };
            let bytes = manifest.print();
            assert_eq!(Manifest::parse(&bytes), Ok(manifest));
            for at in 0..bytes.len() {
                let mut bad = bytes.clone();
                bad[at] ^= 1;
                assert!(Manifest::parse(&bad).is_err(), "byte {at}");
            }
            for len in 0..bytes.len() {
                assert!(Manifest::parse(&bytes[..len]).is_err(), "{len} bytes");
            }
        }
    }

    #[test]
    fn consecutive_objects_are_one_range() {
        let table = |number| ObjectId { kind: ObjectKind::Table, epoch: 1, number };
        let mut objects: Vec<ObjectId> = (5..1000).map(|it| ObjectId::batch(1, it)).collect();
        objects.extend([ObjectId::batch(2, 1000), table(4), table(3), table(6), table(4)]);
        let ranges = Removal::ranges(objects.clone(), 9);
        let counts: Vec<_> = ranges.iter().map(|it| (it.first.number, it.count)).collect();
        assert_eq!(counts, [(5, 995), (1000, 1), (3, 2), (6, 1)]);
        objects.sort_unstable();
        objects.dedup();
        let found: Vec<ObjectId> = ranges.iter().flat_map(Removal::objects).collect();
        assert_eq!(found, objects);
        let last = ObjectId::batch(1, u64::MAX);
        assert_eq!(Removal::ranges(vec![last], 9), [Removal { first: last, count: 1, since: 9 }]);
    }

    #[test]
    fn a_manifest_with_the_most_ranges_to_remove_is_read_back() {
        let range =
            |number: u64| Removal { first: ObjectId::batch(1, 2 * number), count: 1, since: 0 };
        let removals: Vec<Removal> = (0..REMOVALS_MAX as u64).map(range).collect();
        let full = Manifest { removals, ..manifest() };
        assert_eq!(Manifest::parse(&full.print()), Ok(full));
    }

    #[test]
    fn impossible_fields_are_refused() {
        let replay = |epoch| Replay { epoch, first: 0, through: 0 };
        let removal =
            |number, count| Removal { first: ObjectId::batch(1, number), count, since: 0 };
        for bad in [
            Manifest { removals: vec![removal(1, 0)], ..manifest() },
            Manifest { removals: vec![removal(u64::MAX, 2)], ..manifest() },
            Manifest { removals: vec![removal(0, 1); REMOVALS_MAX + 1], ..manifest() },
            Manifest { segments: 10_000, ..manifest() },
            Manifest { segment_bytes: 0, ..manifest() },
            Manifest { epoch: 7, ..manifest() },
            Manifest { replays: vec![], ..manifest() },
            Manifest { logs: vec![mark(7)], ..manifest() },
            Manifest { logs: vec![mark(9), mark(8)], ..manifest() },
            Manifest { logs: vec![mark(8), mark(8)], ..manifest() },
            Manifest { replays: vec![replay(9), replay(9)], ..manifest() },
        ] {
            assert!(Manifest::parse(&bad.print()).is_err(), "{bad:?}");
        }
    }
}

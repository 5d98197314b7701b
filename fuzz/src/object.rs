//! The objects of a pool in an object store: as the product prints them with any fields, or any
//! bytes. An accepted object is consistent, and no byte of it can change unnoticed.

use blockyard_volume_format::object::batch::{
    self, Batch, BatchOperation, BatchRecord, LaterBatches, PAYLOAD_AT, SUPERBLOCK,
};
use blockyard_volume_format::object::local_log::{self, GroupsEnd, HEAD_BYTES, LogFile, LogHead};
use blockyard_volume_format::object::manifest::{LogMark, Manifest, Removal, Replay};
use blockyard_volume_format::object::table::{self, TableExtent};
use blockyard_volume_format::object::{ObjectHeader, ObjectId, ObjectKind};

use crate::input::Input;

/// Interprets the bytes as every object.
///
/// # Panics
/// If an inconsistent object is accepted, or a printed one does not parse to the same values.
pub fn object(bytes: &[u8]) {
    _ = ObjectHeader::parse(bytes);
    if let Ok(found) = Batch::parse(bytes) {
        assert!(PAYLOAD_AT as u64 + batch::payload_bytes(&found.records) <= bytes.len() as u64);
    }
    _ = table::parse(bytes);
    _ = Manifest::parse(bytes);
    let mut input = Input::new(bytes);
    batch(&mut input);
    part(&mut input);
    manifest(&mut input);
}

/// Interprets the bytes as a file of the local log, prints groups with any fields into a file that
/// another batch had, and cuts and damages the file.
///
/// # Panics
/// If an inconsistent file is accepted, what is no group of the batch is taken for one, a group
/// that was durable is lost without an error, or a printed file does not give the batch of its
/// records.
pub fn local_log(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let header = header(&mut input, ObjectKind::Batch);
    let (id, writer) = ((header.epoch, header.number), Some(header.writer));
    let before = (input.word(), GroupsEnd { records: 1, payload_bytes: 2 });
    let head = LogHead { header, before };
    for start in [Vec::new(), head.print()] {
        if let Ok(Some(file)) = LogFile::parse(&[&start, bytes].concat(), id, writer) {
            assert_eq!(batch::payload_bytes(&file.records), file.payload.len() as u64);
            assert!(file.len_bytes + file.torn_bytes <= start.len() + bytes.len());
        }
    }
    let mut file = head.print();
    let (mut all, mut payload, mut ends) = (Vec::new(), Vec::new(), vec![(file.len(), 0)]);
    for _ in 0..input.below(5) {
        let (records, bytes) = group(&mut input);
        let before = GroupsEnd { records: all.len(), payload_bytes: payload.len() };
        local_log::append(&mut file, &header, before, (&records, &bytes));
        all.extend(records);
        payload.extend(bytes);
        ends.push((file.len(), all.len()));
    }
    let whole = LogFile::parse(&file, id, writer)
        .expect("groups that were printed are intact")
        .expect("the head is intact");
    assert_eq!((&whole.records, &whole.payload, whole.torn_bytes), (&all, &payload, 0));
    assert_eq!((whole.head, whole.len_bytes), (head, file.len()));
    let found =
        Batch::parse(&whole.batch(LaterBatches::Replayed)).expect("a whole file gives a batch");
    assert_eq!((found.header, found.records), (header, all.clone()));
    // A write of the last group was interrupted, and the file ends or had another batch before.
    let len = input.word() as usize % (file.len() + 1);
    for old in [Vec::new(), remains(&mut input, &header)] {
        // A disk writes the sector with the head as a whole.
        let rest = if len < HEAD_BYTES { &[] } else { old.get(len..).unwrap_or_default() };
        let cut = [&file[..len], rest].concat();
        // The remains can be equal to what was to be written.
        let is_there = |end: usize| cut.get(..end) == Some(&file[..end]);
        let complete = ends.iter().rev().find(|(end, _)| is_there(*end)).map(|(_, count)| *count);
        let cut = LogFile::parse(&cut, id, writer).expect("a file may end anywhere");
        assert_eq!(cut.map(|file| file.records), complete.map(|count| all[..count].to_vec()));
    }
    // A group that is damaged before the last one is not lost silently.
    let at = input.word() as usize % file.len();
    file[at] ^= input.byte().max(1);
    let last = ends.len().checked_sub(2).map_or(0, |index| ends[index].0);
    match LogFile::parse(&file, id, writer) {
        Err(_) => {}
        Ok(found) => assert!(at >= last, "a changed byte {at} is not noticed: {found:?}"),
    }
}

/// Records of a group, and their payload.
fn group(input: &mut Input<'_>) -> (Vec<BatchRecord>, Vec<u8>) {
    let records: Vec<BatchRecord> = (0..input.below(4))
        .map(|_| {
            let (file, len) = (input.choose(&[0, 7, SUPERBLOCK]), input.below(60) as u32);
            let write = BatchOperation::Write { offset: 4096, len };
            let operation = input.choose(&[write, BatchOperation::Clear]);
            BatchRecord { file, operation }
        })
        .collect();
    let payload = vec![input.byte(); batch::payload_bytes(&records) as usize];
    (records, payload)
}

/// What is in a file before the batch gets it: an earlier batch of the same opener, or what a
/// client that does not know the number of the opener lets it look like.
fn remains(input: &mut Input<'_>, header: &ObjectHeader) -> Vec<u8> {
    let mut other = *header;
    match input.below(2) {
        0 => other.number = other.number.wrapping_sub(1),
        _ => other.writer[0] ^= input.byte().max(1),
    }
    let before = GroupsEnd { records: input.below(5) as usize, payload_bytes: 0 };
    let mut bytes = vec![0; HEAD_BYTES];
    for _ in 0..input.below(5) {
        let (records, payload) = group(input);
        local_log::append(&mut bytes, &other, before, (&records, &payload));
    }
    bytes
}

fn header(input: &mut Input<'_>, kind: ObjectKind) -> ObjectHeader {
    let writer = [input.byte(); 16];
    ObjectHeader { kind, pool: input.word(), writer, epoch: input.word(), number: input.word() }
}

fn id(input: &mut Input<'_>) -> ObjectId {
    let kind = input.choose(&[ObjectKind::Batch, ObjectKind::Segment, ObjectKind::Table]);
    ObjectId { kind, epoch: input.word(), number: input.word() }
}

/// Changes a byte, and checks that `parse` refuses the result.
fn damage(input: &mut Input<'_>, bytes: &mut [u8], accepts: impl Fn(&[u8]) -> bool) {
    let at = input.word() as usize % bytes.len();
    bytes[at] ^= input.byte().max(1);
    assert!(!accepts(bytes), "a changed byte {at} is not noticed");
}

fn batch(input: &mut Input<'_>) {
    let mut bytes = vec![0; PAYLOAD_AT];
    let mut records = Vec::new();
    for _ in 0..input.below(6) {
        let file = input.choose(&[0, 1, SUPERBLOCK, u32::MAX - 1]);
        let len = input.below(100) as u32;
        let operation = match input.below(4) {
            0 => BatchOperation::Make { len },
            1 => BatchOperation::Clear,
            2 => BatchOperation::Remove,
            _ => BatchOperation::Write { offset: input.choose(&[0, 4096, u32::MAX]), len },
        };
        if let BatchOperation::Write { len, .. } = operation {
            bytes.resize(bytes.len() + len as usize, input.byte());
        }
        records.push(BatchRecord { file, operation });
    }
    let (header, later) = (
        header(input, ObjectKind::Batch),
        input.choose(&[LaterBatches::Replayed, LaterBatches::Ignored]),
    );
    let ended_ms = input.word();
    batch::complete(&mut bytes, &header, (later, ended_ms), &records);
    match Batch::parse(&bytes) {
        Ok(found) => assert_eq!(found, Batch { header, later, ended_ms, records }),
        Err(error) => assert!(error.to_string().starts_with("`batch`"), "{error}"),
    }
    damage(input, &mut bytes, |bytes| Batch::parse(bytes).is_ok());
}

fn part(input: &mut Input<'_>) {
    let mut segments = Vec::new();
    for _ in 0..input.below(4) {
        let extents = (0..input.below(4)).map(|_| TableExtent {
            offset: input.choose(&[0, 512, 4096, u32::MAX]),
            len: input.choose(&[0, 512, 1, u32::MAX]),
            object: id(input),
            at: input.choose(&[64, 0, u32::MAX]),
        });
        segments.push(extents.collect::<Vec<_>>());
    }
    let (header, index) = (header(input, ObjectKind::Table), input.word() as u32);
    let mut bytes = table::print(&header, index, &segments);
    if let Ok((found_header, found_index, found)) = table::parse(&bytes) {
        assert_eq!((found_header, found_index, &found), (header, index, &segments));
        for extents in &found {
            let ends = extents.iter().map(|it| it.offset + it.len);
            let begins = extents.iter().skip(1).map(|it| it.offset);
            assert!(ends.zip(begins).all(|(end, begin)| end <= begin), "{extents:?}");
        }
    }
    damage(input, &mut bytes, |bytes| table::parse(bytes).is_ok());
}

fn manifest(input: &mut Input<'_>) {
    let replay = |input: &mut Input<'_>| Replay {
        epoch: input.choose(&[1, 2, 3, u64::MAX]),
        first: input.word(),
        through: input.word(),
    };
    let replays: Vec<Replay> = (0..input.below(4)).map(|_| replay(input)).collect();
    let log = |input: &mut Input<'_>| LogMark {
        epoch: input.choose(&[1, 2, 3, u64::MAX]),
        log: [input.byte(); 16],
        since_ms: input.word(),
    };
    let logs: Vec<LogMark> = (0..input.below(3)).map(|_| log(input)).collect();
    let part = |input: &mut Input<'_>| (input.below(2) == 0).then(|| id(input));
    let manifest = Manifest {
        id: [input.byte(); 16],
        writer: [input.byte(); 16],
        epoch: input.choose(&[1, 2, 3, u64::MAX]),
        changes: input.word(),
        capacity_bytes: input.word(),
        segment_bytes: input.choose(&[0, 4096, u32::MAX]),
        segments: input.choose(&[0, 1, 1024, 1025, u32::MAX]),
        superblock: (input.below(2) == 0).then(|| vec![input.byte(); input.below(200) as usize]),
        replays,
        logs,
        parts: (0..input.below(3)).map(|_| part(input)).collect(),
        removals: (0..input.below(3))
            .map(|_| Removal {
                first: id(input),
                count: input.choose(&[1, 0, 7, u32::MAX]),
                since: input.word(),
            })
            .collect(),
    };
    let mut bytes = manifest.print();
    match Manifest::parse(&bytes) {
        Ok(found) => assert_eq!(found, manifest),
        Err(error) => assert!(error.to_string().starts_with('`'), "{error}"),
    }
    damage(input, &mut bytes, |bytes| Manifest::parse(bytes).is_ok());
}

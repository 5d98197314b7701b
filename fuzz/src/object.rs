//! The objects of a pool in an object store: as the product prints them with any fields, or any
//! bytes. An accepted object is consistent, and no byte of it can change unnoticed.

use blockyard_volume_format::object::batch::{
    self, Batch, BatchOperation, BatchRecord, PAYLOAD_AT, SUPERBLOCK,
};
use blockyard_volume_format::object::manifest::{Manifest, Removal, Replay};
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
        let writes = found.records.iter().map(|record| match record.operation {
            BatchOperation::Write { len, .. } => len as usize,
            _ => 0,
        });
        assert!(PAYLOAD_AT + writes.sum::<usize>() <= bytes.len());
    }
    _ = table::parse(bytes);
    _ = Manifest::parse(bytes);
    let mut input = Input::new(bytes);
    batch(&mut input);
    part(&mut input);
    manifest(&mut input);
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
    let (header, through) = (header(input, ObjectKind::Batch), input.word());
    batch::complete(&mut bytes, &header, through, &records);
    match Batch::parse(&bytes) {
        Ok(found) => assert_eq!(found, Batch { header, through, records }),
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

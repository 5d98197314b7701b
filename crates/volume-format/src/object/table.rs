//! A part of the extent table: where the contents of [`PART_SEGMENTS`] consecutive segments are.
//! What no extent covers is zeros.

use crate::bytes::{Reader, put_u32};
use crate::error::FormatError;

use super::{HEADER_BYTES, ObjectHeader, ObjectId, ObjectKind};

/// Segments of a part.
pub const PART_SEGMENTS: usize = 1024;

const WHAT: &str = "part of the extent table";

/// A range of a segment whose contents are in an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableExtent {
    /// The offset in the segment.
    pub offset: u32,
    /// The length in bytes; not 0.
    pub len: u32,
    /// The object.
    pub object: ObjectId,
    /// The offset in the object.
    pub at: u32,
}

/// The extents of the segments of a part, each segment's by offset and without overlap.
pub type TablePart = Vec<Vec<TableExtent>>;

/// Prints a part: `index` says which, counted from the first segment.
pub fn print(header: &ObjectHeader, index: u32, part: &[Vec<TableExtent>]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    bytes.extend_from_slice(&index.to_le_bytes());
    bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
    for extents in part {
        bytes.extend_from_slice(&(extents.len() as u32).to_le_bytes());
        for extent in extents {
            let at = bytes.len();
            bytes.resize(at + 12, 0);
            put_u32(&mut bytes, at, extent.offset);
            put_u32(&mut bytes, at + 4, extent.len);
            put_u32(&mut bytes, at + 8, extent.at);
            extent.object.put(&mut bytes);
        }
    }
    let head_bytes = bytes.len();
    ObjectHeader { kind: ObjectKind::Table, ..*header }.put(&mut bytes, head_bytes);
    bytes
}

/// Parses a part: its header, its index and its segments.
///
/// # Errors
/// If it is damaged.
pub fn parse(bytes: &[u8]) -> Result<(ObjectHeader, u32, TablePart), FormatError> {
    let (header, head) = ObjectHeader::parse_as(bytes, ObjectKind::Table)?;
    let short = || FormatError::Short { what: WHAT, len: head.len() as u64 };
    let mut reader = Reader::new(&head[HEADER_BYTES..]);
    let index = reader.u32().ok_or_else(short)?;
    let count = reader.u32().ok_or_else(short)? as usize;
    if count > PART_SEGMENTS {
        let want = "1024 at most";
        let (field, value) = ("number of segments", count as u64);
        return Err(FormatError::Field { what: WHAT, field, value, want });
    }
    let mut part = Vec::with_capacity(count);
    for _ in 0..count {
        let extents = reader.u32().ok_or_else(short)?;
        part.push(segment(&mut reader, extents as usize)?);
    }
    match reader.left() {
        0 => Ok((header, index, part)),
        _ => Err(short()),
    }
}

fn segment(reader: &mut Reader<'_>, count: usize) -> Result<Vec<TableExtent>, FormatError> {
    let short = || FormatError::Short { what: WHAT, len: 0 };
    let (mut extents, mut end) = (Vec::new(), 0);
    for _ in 0..count {
        let mut field = || reader.u32().ok_or_else(short);
        let (offset, len, at) = (field()?, field()?, field()?);
        let object = ObjectId::parse(reader.take(ObjectId::BYTES).ok_or_else(short)?, WHAT)?;
        let ends = [offset.checked_add(len), at.checked_add(len)];
        let [Some(new_end), Some(_)] = ends else {
            let want = "an end within segment and object";
            return Err(FormatError::Field {
                what: WHAT,
                field: "length",
                value: len.into(),
                want,
            });
        };
        if len == 0 || offset < end || object.kind == ObjectKind::Table {
            let want = "extents by offset, without overlap, that are not empty";
            let (field, value) = ("offset", offset.into());
            return Err(FormatError::Field { what: WHAT, field, value, want });
        }
        end = new_end;
        extents.push(TableExtent { offset, len, object, at });
    }
    Ok(extents)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> ObjectHeader {
        ObjectHeader { kind: ObjectKind::Table, pool: 1, writer: [2; 16], epoch: 3, number: 4 }
    }

    fn extent(offset: u32, len: u32) -> TableExtent {
        let object = ObjectId { kind: ObjectKind::Segment, epoch: 5, number: 6 };
        TableExtent { offset, len, object, at: 64 }
    }

    #[test]
    fn a_part_is_read_back_and_each_changed_byte_is_noticed() {
        let part = vec![vec![], vec![extent(0, 512), extent(4096, 100)], vec![]];
        let bytes = print(&header(), 9, &part);
        assert_eq!(parse(&bytes), Ok((header(), 9, part)));
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 4;
            assert!(parse(&bad).is_err(), "byte {at}");
        }
        assert_eq!(parse(&print(&header(), 0, &[])), Ok((header(), 0, vec![])));
    }

    #[test]
    fn impossible_extents_are_refused() {
        let table = TableExtent {
            object: ObjectId { kind: ObjectKind::Table, ..extent(0, 1).object },
            ..extent(0, 1)
        };
        for extents in [
            vec![extent(0, 0)],
            vec![extent(512, 512), extent(0, 512)],
            vec![extent(0, 513), extent(512, 512)],
            vec![extent(u32::MAX, 2)],
            vec![TableExtent { at: u32::MAX, ..extent(0, 2) }],
            vec![table],
        ] {
            assert!(
                parse(&print(&header(), 0, std::slice::from_ref(&extents))).is_err(),
                "{extents:?}"
            );
        }
        assert!(parse(&print(&header(), 0, &vec![vec![]; PART_SEGMENTS + 1])).is_err());
    }
}

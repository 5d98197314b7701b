//! The files of a pool as they are at one point in the sequence of its writes: for each segment the
//! extents that say which object has which bytes, and the superblock's contents.
//!
//! Two such states exist: one contains every write, and is read; the other one contains the batches
//! that are durable, and goes into the manifest.

use std::collections::{BTreeMap, BTreeSet};

use blockyard_volume_format::object::ObjectId;
use blockyard_volume_format::object::batch::{BatchOperation, BatchRecord, SUPERBLOCK};
use blockyard_volume_format::object::table::{PART_SEGMENTS, TableExtent};

/// The extents of a segment by their offsets.
#[derive(Clone, Debug, Default)]
pub(crate) struct SegmentMap(BTreeMap<u32, TableExtent>);

/// A range of a segment, and where its bytes are; `None` for zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentPiece {
    /// The length in bytes.
    pub(crate) len: u32,
    /// The object and the offset in it.
    pub(crate) source: Option<(ObjectId, u32)>,
}

/// How many bytes of each object are referred to. An object of which no byte is, is kept with 0
/// until it is taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct References(BTreeMap<ObjectId, u64>);

impl References {
    /// Adds an object, of which no byte may be referred to.
    pub(crate) fn add(&mut self, object: ObjectId, bytes: u32) {
        *self.0.entry(object).or_default() += u64::from(bytes);
    }

    fn subtract(&mut self, object: ObjectId, bytes: u32) {
        let count = self.0.entry(object).or_default();
        debug_assert!(*count >= u64::from(bytes), "{object}: {count} - {bytes}");
        *count = count.saturating_sub(bytes.into());
    }

    /// Whether a byte of the object is referred to.
    pub(crate) fn has(&self, object: ObjectId) -> bool {
        self.0.get(&object).is_some_and(|bytes| *bytes > 0)
    }

    /// Takes the objects out of which no byte is referred to.
    pub(crate) fn take_unused(&mut self) -> Vec<ObjectId> {
        let unused = self.0.iter().filter(|(_, bytes)| **bytes == 0);
        let unused: Vec<ObjectId> = unused.map(|(object, _)| *object).collect();
        unused.iter().for_each(|object| _ = self.0.remove(object));
        unused
    }
}

impl SegmentMap {
    /// A segment with these extents, which are by offset and do not overlap.
    pub(crate) fn of(extents: &[TableExtent]) -> SegmentMap {
        SegmentMap(extents.iter().map(|extent| (extent.offset, *extent)).collect())
    }

    /// The extents by offset.
    pub(crate) fn extents(&self) -> impl Iterator<Item = &TableExtent> {
        self.0.values()
    }

    /// The number of extents.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Makes a range zeros.
    fn remove(&mut self, offset: u32, len: u32, references: &mut References) {
        let end = offset + len;
        // At most one extent begins before the range and reaches into it.
        let before = self.0.range(..offset).next_back().map(|(_, extent)| *extent);
        let before = before.filter(|extent| extent.offset + extent.len > offset);
        let within = self.0.range(offset..end).map(|(_, extent)| *extent);
        for extent in before.into_iter().chain(within).collect::<Vec<_>>() {
            self.0.remove(&extent.offset);
            references.subtract(extent.object, extent.len);
            let extent_end = extent.offset + extent.len;
            if extent.offset < offset {
                self.put(TableExtent { len: offset - extent.offset, ..extent }, references);
            }
            if extent_end > end {
                let skipped = end - extent.offset;
                let (at, len) = (extent.at + skipped, extent_end - end);
                self.put(TableExtent { offset: end, len, at, ..extent }, references);
            }
        }
    }

    /// Adds an extent where there are zeros; joins it with the one before if they are contiguous.
    fn put(&mut self, extent: TableExtent, references: &mut References) {
        references.add(extent.object, extent.len);
        let before = self.0.range_mut(..extent.offset).next_back().map(|(_, before)| before);
        if let Some(before) = before
            && before.object == extent.object
            && before.offset + before.len == extent.offset
            && before.at + before.len == extent.at
        {
            before.len += extent.len;
            return;
        }
        self.0.insert(extent.offset, extent);
    }

    /// Replaces the contents of a range.
    pub(crate) fn write(&mut self, extent: TableExtent, references: &mut References) {
        if extent.len > 0 {
            self.remove(extent.offset, extent.len, references);
            self.put(extent, references);
        }
    }

    /// Where `old` is still the contents of its range, or of parts of it: refers to the same bytes
    /// at `at` of `object` instead.
    pub(crate) fn replace(
        &mut self,
        old: &TableExtent,
        (object, at): (ObjectId, u32),
        references: &mut References,
    ) {
        let end = old.offset + old.len;
        let before = self.0.range(..old.offset).next_back().map(|(_, extent)| *extent);
        let within = self.0.range(old.offset..end).map(|(_, extent)| *extent);
        for extent in before.into_iter().chain(within).collect::<Vec<_>>() {
            let (from, to) = (extent.offset.max(old.offset), (extent.offset + extent.len).min(end));
            // The same byte of the object at the same offset of the segment.
            let is_same = extent.object == old.object
                && u64::from(extent.at) + u64::from(old.offset)
                    == u64::from(old.at) + u64::from(extent.offset);
            if from < to && is_same {
                let at = at + (from - old.offset);
                self.write(TableExtent { offset: from, len: to - from, object, at }, references);
            }
        }
    }

    /// Where the bytes of a range are.
    pub(crate) fn pieces(&self, offset: u32, len: u32) -> Vec<SegmentPiece> {
        let (mut pieces, mut next, end) = (Vec::new(), offset, offset + len);
        let before = self.0.range(..offset).next_back().map(|(_, extent)| extent);
        for extent in before.into_iter().chain(self.0.range(offset..end).map(|(_, it)| it)) {
            let (from, to) = (extent.offset.max(offset), (extent.offset + extent.len).min(end));
            if from >= to {
                continue;
            }
            if from > next {
                pieces.push(SegmentPiece { len: from - next, source: None });
            }
            let source = Some((extent.object, extent.at + (from - extent.offset)));
            pieces.push(SegmentPiece { len: to - from, source });
            next = to;
        }
        if next < end {
            pieces.push(SegmentPiece { len: end - next, source: None });
        }
        pieces
    }
}

/// The files of a pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolImage {
    /// The length of a segment; 0 while there is none.
    pub(crate) segment_bytes: u32,
    /// The segments by number; `None` for one that was removed.
    segments: Vec<Option<SegmentMap>>,
    /// The contents of the superblock file, if it exists.
    pub(crate) superblock: Option<Vec<u8>>,
    /// How much of each object the segments refer to.
    pub(crate) references: References,
    /// Segments that have changed since [`PoolImage::retain_changed`] has forgotten them.
    changed: BTreeSet<u32>,
}

impl PoolImage {
    /// The number of segments.
    pub(crate) fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// Whether there is a segment of this number.
    pub(crate) fn has_segment(&self, number: u32) -> bool {
        self.segment(number).is_some()
    }

    /// A segment.
    pub(crate) fn segment(&self, number: u32) -> Option<&SegmentMap> {
        self.segments.get(number as usize)?.as_ref()
    }

    /// Adds a segment at the end.
    pub(crate) fn push_segment(&mut self, extents: &[TableExtent]) {
        extents.iter().for_each(|extent| self.references.add(extent.object, extent.len));
        self.segments.push(Some(SegmentMap::of(extents)));
    }

    /// Executes an operation. The bytes of a write begin at `at` of a batch; those of the
    /// superblock are `bytes`.
    pub(crate) fn apply(&mut self, record: &BatchRecord, batch: (ObjectId, u32), bytes: &[u8]) {
        match record.file {
            SUPERBLOCK => self.apply_superblock(record.operation, bytes),
            number => self.apply_segment(number, record.operation, batch),
        }
    }

    fn apply_superblock(&mut self, operation: BatchOperation, bytes: &[u8]) {
        match operation {
            BatchOperation::Write { offset, .. } => {
                let (from, to) = (offset as usize, offset as usize + bytes.len());
                let contents = self.superblock.get_or_insert_default();
                contents.resize(contents.len().max(to), 0);
                contents[from..to].copy_from_slice(bytes);
            }
            BatchOperation::Make { len } => self.superblock = Some(vec![0; len as usize]),
            BatchOperation::Clear => self.superblock.iter_mut().for_each(|it| it.fill(0)),
            BatchOperation::Remove => self.superblock = None,
        }
    }

    fn apply_segment(&mut self, number: u32, operation: BatchOperation, batch: (ObjectId, u32)) {
        self.changed.insert(number);
        let at = number as usize;
        if let BatchOperation::Make { len } = operation {
            self.segment_bytes = len;
            let count = self.segments.len().max(at + 1);
            self.segments.resize(count, None);
        }
        let Some(segment) = self.segments.get_mut(at) else { return };
        let clear = |segment: &mut SegmentMap, references: &mut References| {
            segment.extents().for_each(|it| references.subtract(it.object, it.len));
            segment.0.clear();
        };
        match operation {
            BatchOperation::Write { offset, len } => {
                let (object, at) = batch;
                if let Some(segment) = segment {
                    segment.write(TableExtent { offset, len, object, at }, &mut self.references);
                }
            }
            BatchOperation::Make { .. } | BatchOperation::Clear => {
                clear(segment.get_or_insert_default(), &mut self.references);
            }
            BatchOperation::Remove => {
                segment.iter_mut().for_each(|it| clear(it, &mut self.references));
                *segment = None;
                while self.segments.last().is_some_and(Option::is_none) {
                    self.segments.pop();
                }
            }
        }
    }

    /// Refers to the bytes of an extent of a segment at `at` of `object`, where it is still there.
    pub(crate) fn replace(&mut self, number: u32, old: &TableExtent, new: (ObjectId, u32)) {
        self.references.add(new.0, 0);
        if let Some(Some(segment)) = self.segments.get_mut(number as usize) {
            segment.replace(old, new, &mut self.references);
            self.changed.insert(number);
        }
    }

    /// The segments that have changed, in the order of their numbers.
    pub(crate) fn changed(&self) -> &BTreeSet<u32> {
        &self.changed
    }

    /// Forgets the changes, except of segments for which `is_kept` holds.
    pub(crate) fn retain_changed(&mut self, is_kept: impl Fn(&SegmentMap) -> bool) {
        let segments = &self.segments;
        self.changed.retain(|number| match segments.get(*number as usize) {
            Some(Some(segment)) => is_kept(segment),
            _ => false,
        });
    }

    /// The extents of the segments of a part of the table.
    pub(crate) fn part(&self, index: usize) -> Vec<Vec<TableExtent>> {
        let first = index * PART_SEGMENTS;
        let segments = self.segments.iter().skip(first).take(PART_SEGMENTS);
        let extents = |it: &Option<SegmentMap>| {
            it.iter().flat_map(SegmentMap::extents).copied().collect::<Vec<TableExtent>>()
        };
        segments.map(extents).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model: for each byte its object's number and the offset in it.
    type Model = Vec<Option<(u64, u32)>>;

    fn found(map: &SegmentMap, len: u32) -> Model {
        let mut bytes = Vec::new();
        for piece in map.pieces(0, len) {
            for at in 0..piece.len {
                bytes.push(piece.source.map(|(object, first)| (object.number, first + at)));
            }
        }
        bytes
    }

    /// Random writes, clearings and replacements do what they do to an array of bytes, and the
    /// references are the bytes that the array has of each object.
    #[test]
    fn extents_are_an_array_of_bytes() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..300 {
            const LEN: u32 = 24;
            let mut map = SegmentMap::default();
            let (mut references, mut model) = (References::default(), vec![None; LEN as usize]);
            for number in 0..30_u64 {
                let offset = random.u32(0..LEN);
                let len = random.u32(1..=LEN - offset);
                let object = ObjectId::batch(1, number);
                let range = offset as usize..(offset + len) as usize;
                let extents: Vec<TableExtent> = map.extents().copied().collect();
                match random.u8(0..4) {
                    0 if !extents.is_empty() => {
                        let old = extents[random.usize(0..extents.len())];
                        // Another write may have replaced a part of it meanwhile.
                        let object_between = ObjectId::batch(1, number + 100);
                        let writes = TableExtent { offset, len: 1, object: object_between, at: 3 };
                        map.write(writes, &mut references);
                        model[offset as usize] = Some((number + 100, 3));
                        map.replace(&old, (object, 100), &mut references);
                        for at in old.offset..old.offset + old.len {
                            let was = Some((old.object.number, old.at + at - old.offset));
                            if model[at as usize] == was {
                                model[at as usize] = Some((number, 100 + at - old.offset));
                            }
                        }
                    }
                    _ => {
                        map.write(TableExtent { offset, len, object, at: 50 }, &mut references);
                        for (index, byte) in model[range].iter_mut().enumerate() {
                            *byte = Some((number, 50 + index as u32));
                        }
                    }
                }
                assert_eq!(found(&map, LEN), model);
                let bytes: u64 = references.0.values().sum();
                assert_eq!(bytes, model.iter().flatten().count() as u64);
            }
        }
    }

    #[test]
    fn removed_segments_at_the_end_are_gone() {
        let mut space = PoolImage::default();
        let batch = (ObjectId::batch(1, 0), 100);
        let mut apply = |file, operation| {
            space.apply(&BatchRecord { file, operation }, batch, &[]);
            space.segment_count()
        };
        assert_eq!(apply(0, BatchOperation::Make { len: 4096 }), 1);
        assert_eq!(apply(1, BatchOperation::Make { len: 4096 }), 2);
        assert_eq!(apply(0, BatchOperation::Write { offset: 0, len: 512 }), 2);
        assert_eq!(apply(0, BatchOperation::Remove), 2);
        assert_eq!(apply(1, BatchOperation::Remove), 0);
        assert_eq!(space.references.take_unused(), [batch.0]);
    }
}

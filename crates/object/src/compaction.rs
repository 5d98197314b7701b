//! Compaction: copies short batches from memory into objects of their segments, and writes the
//! table and the manifest. After that the batches need not be replayed, and are removed later.
//!
//! A segment whose extents are many is copied as a whole. Long batches stay: extents refer to them.
//!
//! Each object is written before the manifest names it, and leaves the manifest before it is
//! removed. It is removed after a delay, because a process that only reads may have an older
//! manifest.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use blockyard_volume_format::object::manifest::{Manifest, REMOVALS_MAX, Removal, Replay};
use blockyard_volume_format::object::sums::ChunkSums;
use blockyard_volume_format::object::table::{self, PART_SEGMENTS, TableExtent};
use blockyard_volume_format::object::{HEADER_BYTES, MANIFEST, ObjectHeader, ObjectId, ObjectKind};
use bytes::Bytes;

use crate::bucket_error::taken_over;
use crate::client::Swapped;
use crate::journal::{Journal, Outage, State};
use crate::object_reader::ReadError;

/// A segment with more extents than this is copied as a whole.
const EXTENTS_MAX: usize = 64;

/// Objects that are removed by one request.
const REMOVALS_AT_ONCE: usize = 1000;

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Makes a compaction. If the journal ends, it returns early.
pub(crate) async fn run(journal: &Arc<Journal>) {
    _ = compact(journal).await;
}

/// As [`run`]; `None` if the journal has ended.
async fn compact(journal: &Arc<Journal>) -> Option<()> {
    let segments: Vec<u32> = journal.state().durable.changed().iter().copied().collect();
    for segment in segments {
        let extents = wanted(&journal.state(), segment);
        if !extents.is_empty() {
            copy(journal, segment, &extents).await?;
        }
    }
    let removed = remove_due(journal).await;
    let (manifest, parts) = next_manifest(journal, &removed);
    for (object, bytes) in parts {
        put(journal, object, bytes.into()).await?;
    }
    swap(journal, manifest).await
}

/// The extents of a segment that are to be copied: all if they are many, else those in batches in
/// memory.
fn wanted(state: &State, segment: u32) -> Vec<TableExtent> {
    let Some(map) = state.durable.segment(segment) else { return Vec::new() };
    let are_many = map.count() > EXTENTS_MAX;
    let is_wanted = |it: &&TableExtent| are_many || state.bodies.contains_key(&it.object);
    map.extents().filter(is_wanted).copied().collect()
}

/// Copies extents of a segment into a new object, and refers to that. An extent that cannot be read
/// stays as it is: reads of it get the error.
async fn copy(journal: &Arc<Journal>, segment: u32, extents: &[TableExtent]) -> Option<()> {
    let mut bytes = vec![0; HEADER_BYTES];
    let mut moved = Vec::with_capacity(extents.len());
    for extent in extents {
        let at = bytes.len() as u32;
        let body = journal.state().bodies.get(&extent.object).cloned();
        let range = extent.at as usize..(extent.at + extent.len) as usize;
        match body {
            Some(body) => bytes.extend_from_slice(&body[range]),
            None => match get(journal, extent).await? {
                Some(read) => bytes.extend_from_slice(&read),
                None => continue,
            },
        }
        moved.push((extent, at));
    }
    if moved.is_empty() {
        return Some(());
    }
    let (object, header) = journal.state().new_object(ObjectKind::Segment);
    header.put(&mut bytes, HEADER_BYTES);
    ChunkSums::append(&mut bytes, &header);
    let bytes = Bytes::from(bytes);
    put(journal, object, bytes.clone()).await?;
    if let Some(cache) = &journal.cache {
        cache.insert(object, 0, &bytes);
    }
    let mut state = journal.state();
    for (extent, at) in moved {
        state.durable.replace(segment, extent, (object, at));
        state.current.replace(segment, extent, (object, at));
    }
    Some(())
}

/// Removes the objects whose delay has passed. Returns the first objects of the ranges that are
/// removed completely.
async fn remove_due(journal: &Arc<Journal>) -> BTreeSet<ObjectId> {
    let delay = journal.settings.removal_delay.as_secs();
    let due: Vec<Removal> = {
        let (state, now) = (journal.state(), now());
        let is_due = |it: &&Removal| it.since.saturating_add(delay) <= now;
        state.manifest.removals.iter().filter(is_due).copied().collect()
    };
    let (mut removed, mut complete, mut names) = (BTreeSet::new(), Vec::new(), Vec::new());
    for range in due {
        for object in range.objects() {
            names.push(object.to_string());
            if names.len() == REMOVALS_AT_ONCE {
                if !remove(journal, &mut names).await {
                    return removed;
                }
                removed.extend(complete.drain(..));
            }
        }
        complete.push(range.first);
    }
    if remove(journal, &mut names).await {
        removed.extend(complete);
    }
    removed
}

/// Removes objects, and their names from the list. Returns false if some may be left; the next
/// compaction tries again.
async fn remove(journal: &Arc<Journal>, names: &mut Vec<String>) -> bool {
    match journal.client.delete(names).await {
        Ok(()) => {
            names.clear();
            true
        }
        Err(error) => {
            tracing::warn!("{}: {error}", journal.title);
            false
        }
    }
}

/// The manifest of everything that is acknowledged, and the parts of the table that it names and
/// that are to be written before.
fn next_manifest(
    journal: &Journal,
    removed: &BTreeSet<ObjectId>,
) -> (Manifest, Vec<(ObjectId, Vec<u8>)>) {
    let mut guard = journal.state();
    let state = &mut *guard;
    let mut manifest = state.manifest.clone();
    manifest.writer = state.header.writer;
    manifest.changes += 1;
    let ObjectHeader { epoch, .. } = state.header;
    let (first, through) = (state.acknowledged, state.acknowledged);
    manifest.replays = vec![Replay { epoch, first, through }];
    manifest.logs.retain(|mark| mark.epoch == epoch);
    for mark in &mut manifest.logs {
        mark.since_ms = mark.since_ms.max(state.acknowledged_ms);
    }
    let changed: BTreeSet<usize> =
        state.durable.changed().iter().map(|it| *it as usize / PART_SEGMENTS).collect();
    // Batches that were acknowledged during this compaction are not copied. The next compaction
    // copies them, so that their memory is freed.
    let bodies = &state.bodies;
    state.durable.retain_changed(|map| map.extents().any(|it| bodies.contains_key(&it.object)));
    state.behind_bytes = 0;
    manifest.segment_bytes = state.durable.segment_bytes;
    manifest.segments = state.durable.segment_count() as u32;
    manifest.superblock = state.durable.superblock.clone();
    let count = state.durable.segment_count().div_ceil(PART_SEGMENTS);
    let mut unused = state.durable.references.take_unused();
    let (mut parts, mut printed) = (Vec::new(), Vec::new());
    for index in 0..count.max(manifest.parts.len()) {
        let old = manifest.parts.get(index).copied().flatten();
        if index < count && !changed.contains(&index) {
            parts.push(old);
            continue;
        }
        unused.extend(old);
        if index < count {
            let (object, header) = state.new_object(ObjectKind::Table);
            printed.push((object, table::print(&header, index as u32, &state.durable.part(index))));
            parts.push(Some(object));
        }
    }
    manifest.parts = parts;
    let since = now();
    manifest.removals.retain(|it| !removed.contains(&it.first));
    manifest.removals.extend(Removal::ranges(unused, since));
    let left = limit(&mut manifest.removals, REMOVALS_MAX);
    if left > 0 {
        state.left_objects += left;
        tracing::warn!(
            "{}: {left} objects stay in the object store without use, {} since the opening: the \
             list of objects to remove has its most entries, {REMOVALS_MAX}",
            journal.title,
            state.left_objects
        );
    }
    (manifest, printed)
}

/// Shortens a list of objects to remove to `most` ranges. Returns how many objects are not in it
/// any more: they are never removed. Without a limit the manifest would become unreadable.
fn limit(removals: &mut Vec<Removal>, most: usize) -> u64 {
    let excess = removals.split_off(most.min(removals.len()));
    excess.iter().map(|it| u64::from(it.count)).sum()
}

/// Replaces the manifest, and forgets the batches that are not needed in memory any more.
async fn swap(journal: &Arc<Journal>, manifest: Manifest) -> Option<()> {
    let bytes = Bytes::from(manifest.print());
    let e_tag = journal.state().e_tag.clone();
    let mut outage = Outage::default();
    let e_tag = loop {
        match journal.client.swap(MANIFEST, &bytes, &e_tag).await {
            Ok(Swapped::New { etag }) => break etag,
            Ok(Swapped::Changed(other)) => {
                let other = other.as_ref().map(|it| &it.bytes[..]);
                journal.fail(&taken_over(MANIFEST, other));
                return None;
            }
            Err(error) => {
                if !outage.wait(journal, &error).await {
                    return None;
                }
            }
        }
    };
    outage.end(journal);
    let mut state = journal.state();
    state.e_tag = e_tag;
    state.manifest = manifest;
    let end = ObjectId::batch(state.header.epoch, state.acknowledged);
    let needed = |state: &State, object: ObjectId| {
        state.current.references.has(object) || state.durable.references.has(object)
    };
    let unneeded = state.bodies.range(..end).map(|(object, _)| *object);
    let unneeded: Vec<ObjectId> = unneeded.filter(|object| !needed(&state, *object)).collect();
    unneeded.into_iter().for_each(|object| state.drop_body(object));
    // `current` is never written to the store; only the counts of live objects are of use.
    state.current.references.take_unused();
    state.current.retain_changed(|_| false);
    drop(state);
    Some(())
}

/// Removes the marks of local logs from the manifest of a journal that has ended: the object store
/// has everything. An opener elsewhere may be faster, and a mark that stays costs a warning alone.
pub(crate) async fn remove_marks(journal: &Journal) {
    let (writer, mut e_tag, mut manifest) = {
        let state = journal.state();
        (state.header.writer, state.e_tag.clone(), state.manifest.clone())
    };
    // A compaction that was stopped may have replaced the manifest.
    for _ in 0..2 {
        manifest.logs.clear();
        manifest.changes += 1;
        let swapped = journal.client.swap(MANIFEST, &manifest.print().into(), &e_tag).await;
        let Ok(Swapped::Changed(Some(other))) = swapped else { return };
        match Manifest::parse(&other.bytes) {
            Ok(found) if found.writer == writer => (manifest, e_tag) = (found, other.etag),
            _ => return,
        }
    }
}

/// Writes an object whose name no other writer uses, until the object store has it.
async fn put(journal: &Arc<Journal>, object: ObjectId, bytes: Bytes) -> Option<()> {
    let name = object.to_string();
    let mut outage = Outage::default();
    while let Err(error) = journal.client.put(&name, &bytes).await {
        if !outage.wait(journal, &error).await {
            return None;
        }
    }
    outage.end(journal);
    Some(())
}

/// Reads the bytes of an extent, until the object store returns them; `Some(None)` if they are
/// damaged or missing.
async fn get(journal: &Arc<Journal>, extent: &TableExtent) -> Option<Option<Bytes>> {
    let range = extent.at.into()..u64::from(extent.at) + u64::from(extent.len);
    let mut outage = Outage::default();
    let read = loop {
        match journal.reader.read(extent.object, range.clone()).await {
            Err(ReadError::Request(error)) => {
                if !outage.wait(journal, &error).await {
                    return None;
                }
            }
            read => break read,
        }
    };
    outage.end(journal);
    let read = read.and_then(|part| part.get(range));
    if let Err(error) = &read {
        tracing::error!("{}: {error}", journal.title);
    }
    Some(read.ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_removals_beyond_its_limit_loses_the_newest_ranges() {
        let range = |number, count| Removal { first: ObjectId::batch(1, number), count, since: 0 };
        let mut removals = vec![range(0, 5), range(10, 1), range(20, 7), range(30, 2)];
        assert_eq!(limit(&mut removals, 4), 0);
        assert_eq!(limit(&mut removals, 2), 9);
        assert_eq!(removals, [range(0, 5), range(10, 1)]);
    }
}

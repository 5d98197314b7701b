//! Opening a pool: takes a new epoch, seals the older ones, and replays their batches.
//!
//! 1. Read the manifest, the table and the batches ([`look_first`]). If one of them cannot be used,
//!    the opening fails, and the pool stays with the opener that has it.
//! 2. Replace the manifest by one that names a new epoch. If another opener takes an epoch first,
//!    this one gets an error. If the manifest changes otherwise, it tries again.
//! 3. Seal each older epoch that the manifest names: create the seal in the place of the first
//!    batch that is not there. If a batch is there, replay it, and try the next place. Batches that
//!    were read in step 1 are not read again, unless the manifest has changed since.
//! 4. The own batches begin at number 0 of the new epoch.
//!
//! From step 2 on the opener renews the lease ([`crate::lease`]): a standby must not take an opener
//! that replays for long for one that has died.
//!
//! The manifest alone does not stop the writer of an older epoch, because it does not read the
//! manifest before it acknowledges a write. The seal does: the name of its next batch is taken.
//! Batches after the seal were never acknowledged. A seal is never removed.
//!
//! If an earlier opener of this machine has left batches in its local log, they are uploaded before
//! step 1 ([`crate::local_log`]). The last of them may end its epoch in place of a seal.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use blockyard_volume_format::object::batch::{Batch, LaterBatches};
use blockyard_volume_format::object::manifest::{LogMark, Manifest, REPLAYS_MAX, Replay};
use blockyard_volume_format::object::{MANIFEST, ObjectHeader, ObjectId, ObjectKind, table};
use bytes::Bytes;
use tokio::task::JoinHandle;

use crate::bucket_error::BucketError;
use crate::client::{Created, Object, ObjectClient, Swapped};
use crate::image::PoolImage;
use crate::journal::{State, apply_all, now_ms};
use crate::local_log;
use crate::{ObjectError, UPLOADS_MAX};

/// Batches and parts of the table that are read at once: a batch, and those after it that say
/// whether it was there ([`says_that_it_was_there`]).
const AHEAD: usize = UPLOADS_MAX + 1;

/// How often a reader begins, while the writer removes what the reader needs.
const LOOKS_MAX: usize = 10;

/// Bytes of batches after which a look of [`look_first`] ends: the opener that has the pool may
/// write faster than they are read. One that has ended leaves fewer, in general.
const FIRST_LOOK_BYTES_MAX: u64 = 256 << 20;

/// Most looks of [`look_first`]. The second one follows if the writer has compacted the pool, and
/// removed what the first one needed.
const FIRST_LOOKS_MAX: usize = 2;

/// The manifest and its entity tag; `None` if there is no pool.
pub(crate) async fn manifest(
    client: &ObjectClient,
) -> Result<Option<(Manifest, String)>, BucketError> {
    match client.get(MANIFEST, None).await? {
        Some(found) => Ok(Some((parse_manifest(&found.bytes)?, found.etag))),
        None => Ok(None),
    }
}

fn parse_manifest(bytes: &[u8]) -> Result<Manifest, BucketError> {
    Manifest::parse(bytes).map_err(BucketError::of_object(MANIFEST))
}

/// Makes the manifest of an empty pool, unless there is one meanwhile. Returns the one that is
/// there.
pub(crate) async fn make(
    client: &Arc<ObjectClient>,
    (id, writer): ([u8; 16], [u8; 16]),
    capacity_bytes: u64,
) -> Result<(Manifest, String), BucketError> {
    let new = Manifest {
        id,
        writer,
        epoch: 1,
        changes: 0,
        capacity_bytes,
        segment_bytes: 0,
        segments: 0,
        superblock: None,
        replays: vec![Replay { epoch: 1, first: 0, through: 0 }],
        logs: Vec::new(),
        parts: Vec::new(),
        removals: Vec::new(),
    };
    match client.create(MANIFEST, &new.print().into()).await? {
        Created::New { etag } => Ok((new, etag)),
        Created::Taken(other) => Ok((parse_manifest(&other.bytes)?, other.etag)),
    }
}

/// Whether a pool has neither a superblock nor a segment: its creation was interrupted.
pub(crate) async fn is_empty(
    client: &Arc<ObjectClient>,
    manifest: &Manifest,
    keep_bytes: usize,
) -> Result<bool, BucketError> {
    // A manifest of a later compaction says it without a look at the batches.
    if manifest.superblock.is_some() {
        return Ok(false);
    }
    let found = look_with_ends(client, keep_bytes).await?;
    Ok(found.is_some_and(|look| has_no_files(&look.state)))
}

fn has_no_files(state: &State) -> bool {
    let image = &state.current;
    let count = image.segment_count() as u32;
    image.superblock.is_none() && !(0..count).any(|number| image.has_segment(number))
}

/// Seals a pool that has neither a superblock nor a segment, so that its maker, if it still runs,
/// can add none. Returns whether the pool is sealed and empty.
///
/// The seal takes the name of the next batch: if the maker was faster, its batch is there, and the
/// pool is left alone.
pub(crate) async fn seal_if_empty(
    client: &Arc<ObjectClient>,
    manifest: &Manifest,
    writer: [u8; 16],
    keep_bytes: usize,
) -> Result<bool, BucketError> {
    if manifest.superblock.is_some() {
        return Ok(false);
    }
    let found = look_with_ends(client, keep_bytes).await?;
    let Some(Look { state, ends }) = found else { return Ok(false) };
    if !has_no_files(&state) || state.manifest.id != manifest.id {
        return Ok(false);
    }
    for EpochEnd { epoch, number, .. } in ends.iter().filter(|end| !end.is_sealed) {
        let header = ObjectHeader { writer, epoch: *epoch, number: *number, ..state.header };
        let name = ObjectId::batch(*epoch, *number).to_string();
        if let Created::Taken(other) = client.create(&name, &header.seal().into()).await? {
            let parsed = ObjectHeader::parse(&other.bytes);
            if parsed.map_err(BucketError::of_object(&name))?.0.kind != ObjectKind::Seal {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// The local log of an opener.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OwnLog {
    /// The random numbers of earlier openers with this log. The object store has what they left
    /// there.
    pub(crate) earlier: Vec<[u8; 16]>,
    /// Whether it acknowledges syncs.
    pub(crate) acknowledges: bool,
}

/// A pool as it was read from one manifest.
#[derive(Debug)]
pub(crate) struct Look {
    state: State,
    /// Where the epochs end, in the order of the manifest.
    ends: Vec<EpochEnd>,
}

impl Look {
    /// Whether a replay by the next manifest may go on from here. A batch of an epoch that has no
    /// seal yet would have to precede those of the epochs after it.
    fn is_before(&self, new: &Manifest) -> bool {
        let last = self.ends.len().saturating_sub(1);
        self.state.manifest.changes + 1 == new.changes
            && self.ends.len() + 1 == new.replays.len()
            && self.ends[..last].iter().all(|end| end.is_sealed)
    }
}

/// Reads the pool of a manifest before this opener takes it over: the table and the batches, up to
/// a limit. `None` if the opener that has it compacts it too often.
///
/// This reads [`FIRST_LOOKS_MAX`] times at most: the table, [`FIRST_LOOK_BYTES_MAX`] of batches,
/// and what is read ahead ([`AHEAD`]).
///
/// # Errors
/// If an object is missing or damaged, so that this opener could not use the pool.
pub(crate) async fn look_first(
    client: &Arc<ObjectClient>,
    mut found: (Manifest, String),
    keep_bytes: usize,
) -> Result<Option<Look>, BucketError> {
    for _ in 0..FIRST_LOOKS_MAX {
        let changes = found.0.changes;
        // Where the epochs end need not be certain: the replay goes on from here only if the
        // manifest has not changed, and then no batch was removed.
        let error = match look_once(client, found, (keep_bytes, FIRST_LOOK_BYTES_MAX)).await {
            Ok(look) => return Ok(Some(look)),
            Err(error) => error,
        };
        found = match (error, manifest(client).await?) {
            (BucketError::Missing { .. }, Some(now)) if now.0.changes != changes => now,
            (error, _) => return Err(error),
        };
    }
    Ok(None)
}

/// Replays a pool for use, with the manifest in which this opener has taken its epoch, and the
/// entity tag of that: seals the epochs of older openers, and replays their batches. `keep_bytes`
/// is the length of batches that are not kept in memory. `look` is the result of [`look_first`].
pub(crate) async fn replay(
    client: &Arc<ObjectClient>,
    (new, e_tag): (Manifest, String),
    look: Option<Look>,
    keep_bytes: usize,
) -> Result<State, BucketError> {
    let header = header_of(&new);
    let older = new.replays[..new.replays.len() - 1].to_vec();
    let (mut state, ends) = match look.filter(|look| look.is_before(&new)) {
        Some(Look { mut state, ends }) => {
            (state.header, state.manifest, state.e_tag) = (header, new, e_tag);
            (state, ends)
        }
        None => {
            let space = table(client, &new).await?;
            (State::new(header, space, new, e_tag), older.iter().map(EpochEnd::before).collect())
        }
    };
    for mut end in ends {
        if !end.is_sealed {
            let limits = (keep_bytes, u64::MAX);
            end = replay_epoch(client, &mut state, end, Some(header), limits).await?;
        }
        tell_of_missing(client.title(), &mut state, &end);
    }
    state.current = state.durable.clone();
    Ok(state)
}

/// The header of the objects of the opener that a manifest names.
pub(crate) fn header_of(manifest: &Manifest) -> ObjectHeader {
    let Manifest { writer, epoch, .. } = *manifest;
    ObjectHeader { kind: ObjectKind::Batch, pool: manifest.mark(), writer, epoch, number: 0 }
}

/// Says that writes may be missing, if the opener of an epoch has acknowledged syncs by a local log
/// that this opener does not have.
fn tell_of_missing(title: &str, state: &mut State, end: &EpochEnd) {
    let Some(mark) = state.manifest.logs.iter().find(|mark| mark.epoch == end.epoch) else {
        return;
    };
    let since_ms = mark.since_ms.max(end.ended_ms);
    tracing::error!(
        "{title}: the opener of epoch {} acknowledged syncs by a local log that this process does \
         not have, and did not close the pool in order: writes that it acknowledged within the \
         last {} s, after its batch {}, may be missing",
        end.epoch,
        now_ms().saturating_sub(since_ms).div_ceil(1000),
        end.number
    );
    let before = state.missing_since_ms.unwrap_or(u64::MAX);
    state.missing_since_ms = Some(since_ms.min(before));
}

/// Replaces the manifest by one with a new epoch. Returns it and its entity tag.
///
/// The writer that has the pool open replaces the manifest too, at the end of each compaction, and
/// keeps the epoch. Then this opener tries again with the new manifest.
///
/// An opener that has claimed the lease of the epoch `after`, or had the pool last in it, gets an
/// error if another one came after that: neither says anything of it.
pub(crate) async fn take_epoch(
    client: &ObjectClient,
    (mut old, mut e_tag): (Manifest, String),
    (writer, log): ([u8; 16], &OwnLog),
    after: Option<u64>,
) -> Result<(Manifest, String), BucketError> {
    let (id, epoch) = (old.id, old.epoch.checked_add(1));
    if after.is_some_and(|after| after != old.epoch) {
        return Err(BucketError::Raced { epoch: old.epoch });
    }
    // A caller that takes over an empty pool changes its capacity.
    let capacity_bytes = old.capacity_bytes;
    let epoch = epoch.ok_or(BucketError::Exhausted { what: "epochs" })?;
    loop {
        let mut new = Manifest { writer, epoch, changes: old.changes + 1, capacity_bytes, ..old };
        new.replays.push(Replay { epoch, first: 0, through: 0 });
        new.logs.retain(|mark| !log.earlier.contains(&mark.log));
        if log.acknowledges {
            new.logs.push(LogMark { epoch, log: writer, since_ms: now_ms() });
        }
        if new.replays.len() > REPLAYS_MAX {
            return Err(BucketError::Exhausted { what: "epochs to replay" });
        }
        let other = match client.swap(MANIFEST, &new.print().into(), &e_tag).await? {
            Swapped::New { etag } => return Ok((new, etag)),
            Swapped::Changed(other) => other,
        };
        let name = MANIFEST.to_owned();
        let other = other.ok_or(BucketError::Missing { name: name.clone() })?;
        (old, e_tag) = (parse_manifest(&other.bytes)?, other.etag);
        if old.id != id {
            return Err(BucketError::Foreign { name });
        }
        if old.epoch >= epoch {
            return Err(BucketError::Raced { epoch });
        }
    }
}

/// Opens a pool for reading only: replays the batches that are there, and changes nothing. `None`:
/// there is no pool.
///
/// The writer of the pool may compact it meanwhile, and remove a batch or a part of the table that
/// was still to be read. Then this begins again with the new manifest.
///
/// `log` is the directory of a local log. If no other opener came after the opener of it, the
/// batches are replayed that only it has.
pub(crate) async fn look(
    client: &Arc<ObjectClient>,
    keep_bytes: usize,
    log: Option<&Path>,
) -> Result<Option<State>, BucketError> {
    let Some(Look { mut state, ends }) = look_with_ends(client, keep_bytes).await? else {
        return Ok(None);
    };
    if let Some(directory) = log
        && let Some((&EpochEnd { epoch, number, is_sealed: false, .. }, before)) = ends.split_last()
    {
        let batches = local_log::left_after(directory, &state.manifest, (epoch, number))?;
        // The opener of the log has sealed the epochs before, after this reader has read them.
        if !batches.is_empty() && before.iter().any(|end| !end.is_sealed) {
            return Err(BucketError::Changing);
        }
        for (number, bytes) in batches {
            let object = ObjectId::batch(epoch, number);
            // The object store does not have it, so its bytes stay in memory.
            replay_batch(&mut state, object, bytes, usize::MAX)?;
        }
        state.current = state.durable.clone();
    }
    Ok(Some(state))
}

/// As [`look`], without a local log.
async fn look_with_ends(
    client: &Arc<ObjectClient>,
    keep_bytes: usize,
) -> Result<Option<Look>, BucketError> {
    let Some(mut found) = manifest(client).await? else { return Ok(None) };
    for _ in 0..LOOKS_MAX {
        let changes = found.0.changes;
        let read = look_once(client, found, (keep_bytes, u64::MAX)).await;
        let Some(now) = manifest(client).await? else { return Ok(None) };
        match read {
            Ok(look) if look.ends.iter().all(|end| end.is_certain(&now.0)) => {
                return Ok(Some(look));
            }
            Err(error) if now.0.changes == changes => return Err(error),
            Err(BucketError::Missing { .. }) | Ok(_) => found = now,
            Err(error) => return Err(error),
        }
    }
    Err(BucketError::Changing)
}

/// Reads the pool of one manifest. The limits are the length of batches that are not kept in
/// memory, and the bytes of batches that are read.
async fn look_once(
    client: &Arc<ObjectClient>,
    (manifest, e_tag): (Manifest, String),
    limits: (usize, u64),
) -> Result<Look, BucketError> {
    let header = ObjectHeader { writer: [0; 16], ..header_of(&manifest) };
    let space = table(client, &manifest).await?;
    let mut ends: Vec<EpochEnd> = manifest.replays.iter().map(EpochEnd::before).collect();
    let mut state = State::new(header, space, manifest, e_tag);
    for index in 0..ends.len() {
        ends[index] = replay_epoch(client, &mut state, ends[index], None, limits).await?;
        let Some(next) = ends.get(index + 1).filter(|_| !ends[index].is_sealed) else { continue };
        // An opener creates a batch after it has sealed all epochs before its own. Without an
        // object of the next epoch there was no later batch when this reader found the end of this
        // one. With one, this epoch is sealed by now, and may have got batches before the seal.
        let first = ObjectId::batch(next.epoch, next.number).to_string();
        if client.get(&first, None).await?.is_none() {
            break;
        }
        ends[index] = replay_epoch(client, &mut state, ends[index], None, limits).await?;
    }
    state.current = state.durable.clone();
    Ok(Look { state, ends })
}

/// How far an epoch is replayed.
#[derive(Clone, Copy, Debug)]
struct EpochEnd {
    epoch: u64,
    /// The number of the seal, or of the first batch that was not replayed.
    number: u64,
    is_sealed: bool,
    /// When the last batch ended whose end is known, in milliseconds since 1970; 0 without one.
    ended_ms: u64,
}

impl EpochEnd {
    /// Nothing is replayed.
    fn before(replay: &Replay) -> EpochEnd {
        EpochEnd { epoch: replay.epoch, number: replay.first, is_sealed: false, ended_ms: 0 }
    }

    /// Whether all batches of the epoch were found. `now` is a manifest that was read after them:
    /// what was removed before is a batch below the first one of it.
    fn is_certain(&self, now: &Manifest) -> bool {
        let mut replays = now.replays.iter();
        let first = replays.find(|it| it.epoch == self.epoch).map(|it| it.first);
        self.is_sealed || first.is_some_and(|first| first <= self.number)
    }
}

/// Reads the extent table.
async fn table(client: &Arc<ObjectClient>, manifest: &Manifest) -> Result<PoolImage, BucketError> {
    let mut space = PoolImage::default();
    space.segment_bytes = manifest.segment_bytes;
    space.superblock.clone_from(&manifest.superblock);
    let mut reads = VecDeque::new();
    let mut names = manifest.parts.iter().enumerate();
    loop {
        while reads.len() < AHEAD
            && let Some((index, object)) = names.next()
        {
            let (client, object) = (client.clone(), *object);
            let read = async move {
                match object {
                    Some(object) => Some((object, client.get(&object.to_string(), None).await)),
                    None => None,
                }
            };
            reads.push_back((index, tokio::spawn(read)));
        }
        let Some((index, read)) = reads.pop_front() else { break };
        let count =
            (manifest.segments as usize - index * table::PART_SEGMENTS).min(table::PART_SEGMENTS);
        let part = match read.await.map_err(|_| BucketError::Stopped)? {
            None => vec![Vec::new(); count],
            Some((object, got)) => {
                let name = object.to_string();
                let got = got?;
                let got = got.ok_or(BucketError::Missing { name: name.clone() })?;
                let parsed = table::parse(&got.bytes).map_err(BucketError::of_object(&name));
                let (header, number, part) = parsed?;
                let is_ours = header.pool == manifest.mark()
                    && (header.epoch, header.number) == (object.epoch, object.number);
                if !is_ours || number as usize != index || part.len() != count {
                    return Err(BucketError::Foreign { name });
                }
                part
            }
        };
        part.iter().for_each(|extents| space.push_segment(extents));
    }
    Ok(space)
}

/// Replays the batches of an epoch up to its end, or until `bytes_max` were replayed. With `seal`,
/// the end is sealed by an object of this writer.
async fn replay_epoch(
    client: &Arc<ObjectClient>,
    state: &mut State,
    from: EpochEnd,
    seal: Option<ObjectHeader>,
    (keep_bytes, bytes_max): (usize, u64),
) -> Result<EpochEnd, BucketError> {
    let EpochEnd { epoch, mut number, ended_ms: mut last_ms, .. } = from;
    let (mut reads, mut next) = (BatchReads::new(), number);
    let is_sealed = loop {
        if state.behind_bytes >= bytes_max {
            break false;
        }
        while reads.len() < AHEAD {
            let (client, object) = (client.clone(), ObjectId::batch(epoch, next));
            reads.push_back(tokio::spawn(
                async move { client.get(&object.to_string(), None).await },
            ));
            next += 1;
        }
        let object = ObjectId::batch(epoch, number);
        let name = object.to_string();
        let read = reads.pop_front().ok_or(BucketError::Stopped)?;
        let read = read.await.map_err(|_| BucketError::Stopped)?;
        let mut found = read?.map(|got| got.bytes);
        if found.is_none() {
            let was_there = says_that_it_was_there(&mut reads).await?;
            // If the epoch goes on, these objects are read again.
            next = number + 1;
            if was_there {
                // It may have been created after it was read.
                found = client.get(&name, None).await?.map(|got| got.bytes);
                if found.is_none() {
                    return Err(BucketError::Missing { name });
                }
            }
        }
        if found.is_none()
            && let Some(header) = seal
        {
            // The header of a seal names the epoch that it ends.
            let header = ObjectHeader { epoch, number, ..header };
            let created = client.create(&name, &header.seal().into()).await;
            match created? {
                Created::New { .. } => break true,
                Created::Taken(other) => found = Some(other.bytes),
            }
        }
        let Some(bytes) = found else { break false };
        let Some(batch) = replay_batch(state, object, bytes, keep_bytes)? else { break true };
        last_ms = last_ms.max(batch.ended_ms);
        if batch.later == LaterBatches::Ignored {
            break true;
        }
        number += 1;
    };
    reads.iter().for_each(tokio::task::JoinHandle::abort);
    Ok(EpochEnd { epoch, number, is_sealed, ended_ms: last_ms })
}

/// Reads of consecutive batches.
type BatchReads = VecDeque<JoinHandle<Result<Option<Object>, ObjectError>>>;

/// Whether the objects after a missing batch say that the object store had it: then it was removed
/// or lost, and the epoch does not end there. Takes the reads of these objects out.
///
/// - A writer creates a batch only after the one [`UPLOADS_MAX`] before it was acknowledged.
/// - A seal is created in the place of the first batch that is not there. The last batch that an
///   opener uploads from a local log is created after all before it.
///
/// Without such an object the batch may never have been there, and none after it was acknowledged;
/// or one of the last batches of the epoch is lost, which nothing tells.
async fn says_that_it_was_there(reads: &mut BatchReads) -> Result<bool, BucketError> {
    let mut was_there = false;
    for (distance, read) in (1..).zip(std::mem::take(reads)) {
        let Some(found) = read.await.map_err(|_| BucketError::Stopped)?? else { continue };
        let is_seal = matches!(
            ObjectHeader::parse(&found.bytes),
            Ok((header, _)) if header.kind == ObjectKind::Seal
        );
        let is_last =
            Batch::parse(&found.bytes).is_ok_and(|batch| batch.later == LaterBatches::Ignored);
        was_there |= distance >= UPLOADS_MAX || is_seal || is_last;
    }
    Ok(was_there)
}

/// Replays a batch, and returns it; `None` for a seal.
fn replay_batch(
    state: &mut State,
    object: ObjectId,
    bytes: Bytes,
    keep_bytes: usize,
) -> Result<Option<Batch>, BucketError> {
    let name = object.to_string();
    let parsed = ObjectHeader::parse(&bytes);
    let (header, _) = parsed.map_err(BucketError::of_object(&name))?;
    let is_ours = header.pool == state.header.pool
        && (header.epoch, header.number) == (object.epoch, object.number);
    if !is_ours {
        return Err(BucketError::Foreign { name });
    }
    if header.kind == ObjectKind::Seal {
        return Ok(None);
    }
    let batch = Batch::parse(&bytes).map_err(BucketError::of_object(&name))?;
    state.durable.references.add(object, 0);
    state.behind_bytes += bytes.len() as u64;
    apply_all(&mut state.durable, object, &bytes, &batch.records);
    if bytes.len() < keep_bytes {
        state.keep_body(object, bytes);
    }
    Ok(Some(batch))
}

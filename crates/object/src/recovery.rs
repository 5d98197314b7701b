//! Opening a pool: takes a new epoch, seals the older ones, and replays their batches.
//!
//! 1. Read the manifest, and replace it by one that names a new epoch. If another opener replaces
//!    it first, this one gets an error.
//! 2. Seal each older epoch that the manifest names: create the seal in the place of the first
//!    batch that is not there. If a batch is there, replay it, and try the next place.
//! 3. The own batches begin at number 0 of the new epoch.
//!
//! The manifest alone does not stop the writer of an older epoch, because it does not read the
//! manifest before it acknowledges a write. The seal does: the name of its next batch is taken.
//! Batches after the seal were never acknowledged. A seal is never removed.

use std::collections::VecDeque;
use std::sync::Arc;

use blockyard_volume_format::object::batch::Batch;
use blockyard_volume_format::object::manifest::{Manifest, REPLAYS_MAX, Replay};
use blockyard_volume_format::object::{MANIFEST, ObjectHeader, ObjectId, ObjectKind, table};
use bytes::Bytes;

use crate::bucket_error::BucketError;
use crate::client::{Created, ObjectClient, Swapped};
use crate::image::PoolImage;
use crate::journal::{State, apply_all};

/// Batches and parts of the table that are read at once.
const AHEAD: usize = 16;

/// The manifest and its entity tag; `None` if there is no pool.
pub(crate) async fn manifest(
    client: &ObjectClient,
) -> Result<Option<(Manifest, String)>, BucketError> {
    match client.get(MANIFEST, None).await? {
        Some(found) => Ok(Some((Manifest::parse(&found.bytes)?, found.etag))),
        None => Ok(None),
    }
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
        parts: Vec::new(),
        removals: Vec::new(),
    };
    client.create(MANIFEST, &new.print().into()).await?;
    manifest(client).await?.ok_or_else(|| BucketError::Missing { name: MANIFEST.to_owned() })
}

/// Opens a pool for use: fences the older openers, and replays their batches. `keep_bytes` is the
/// length of batches that are not kept in memory.
pub(crate) async fn open(
    client: &Arc<ObjectClient>,
    (old, e_tag): (Manifest, String),
    writer: [u8; 16],
    keep_bytes: usize,
) -> Result<State, BucketError> {
    let epoch = old.epoch.checked_add(1).ok_or(BucketError::Exhausted { what: "epochs" })?;
    let mut new = Manifest { writer, epoch, changes: old.changes + 1, ..old };
    new.replays.push(Replay { epoch, first: 0, through: 0 });
    if new.replays.len() > REPLAYS_MAX {
        return Err(BucketError::Exhausted { what: "epochs to replay" });
    }
    let swapped = client.swap(MANIFEST, &new.print().into(), &e_tag).await;
    let e_tag = match swapped? {
        Swapped::New { etag } => etag,
        Swapped::Changed(_) => return Err(BucketError::Raced { epoch }),
    };
    let header =
        ObjectHeader { kind: ObjectKind::Batch, pool: new.mark(), writer, epoch, number: 0 };
    let space = table(client, &new).await?;
    let mut state = State::new(header, space, new, e_tag);
    let older = state.manifest.replays.clone();
    for replay in &older[..older.len() - 1] {
        replay_epoch(client, &mut state, replay, Some(header), keep_bytes).await?;
    }
    state.current = state.durable.clone();
    Ok(state)
}

/// Opens a pool for reading only: replays the batches that are there, and changes nothing.
pub(crate) async fn look(
    client: &Arc<ObjectClient>,
    (manifest, e_tag): (Manifest, String),
    keep_bytes: usize,
) -> Result<State, BucketError> {
    let (pool, epoch) = (manifest.mark(), manifest.epoch);
    let header = ObjectHeader { kind: ObjectKind::Batch, pool, writer: [0; 16], epoch, number: 0 };
    let space = table(client, &manifest).await?;
    let mut state = State::new(header, space, manifest, e_tag);
    for replay in state.manifest.replays.clone() {
        replay_epoch(client, &mut state, &replay, None, keep_bytes).await?;
    }
    state.current = state.durable.clone();
    Ok(state)
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
                let (number, part) = table::parse(&got.bytes)?;
                if number as usize != index || part.len() != count {
                    return Err(BucketError::Foreign { name });
                }
                part
            }
        };
        part.iter().for_each(|extents| space.push_segment(extents));
    }
    Ok(space)
}

/// Replays the batches of an epoch up to its end. With `seal`, the end is sealed by an object of
/// this writer.
async fn replay_epoch(
    client: &Arc<ObjectClient>,
    state: &mut State,
    replay: &Replay,
    seal: Option<ObjectHeader>,
    keep_bytes: usize,
) -> Result<(), BucketError> {
    let mut reads = VecDeque::new();
    let mut next = replay.first;
    for number in replay.first.. {
        while reads.len() < AHEAD {
            let (client, object) = (client.clone(), ObjectId::batch(replay.epoch, next));
            reads.push_back(tokio::spawn(
                async move { client.get(&object.to_string(), None).await },
            ));
            next += 1;
        }
        let object = ObjectId::batch(replay.epoch, number);
        let name = object.to_string();
        let read = reads.pop_front().ok_or(BucketError::Stopped)?;
        let read = read.await.map_err(|_| BucketError::Stopped)?;
        let mut found = read?.map(|got| got.bytes);
        if found.is_none()
            && let Some(header) = seal
        {
            // The header of a seal names the epoch that it ends.
            let header = ObjectHeader { epoch: replay.epoch, number, ..header };
            let created = client.create(&name, &header.seal().into()).await;
            match created? {
                Created::New { .. } => break,
                Created::Taken(other) => found = Some(other.bytes),
            }
        }
        let Some(bytes) = found else { break };
        if !replay_batch(state, object, bytes, keep_bytes)? {
            break;
        }
    }
    reads.iter().for_each(tokio::task::JoinHandle::abort);
    Ok(())
}

/// Replays a batch. Returns false for a seal.
fn replay_batch(
    state: &mut State,
    object: ObjectId,
    bytes: Bytes,
    keep_bytes: usize,
) -> Result<bool, BucketError> {
    let (header, _) = ObjectHeader::parse(&bytes)?;
    let is_ours = header.pool == state.header.pool
        && (header.epoch, header.number) == (object.epoch, object.number);
    if !is_ours {
        return Err(BucketError::Foreign { name: object.to_string() });
    }
    if header.kind == ObjectKind::Seal {
        return Ok(false);
    }
    let batch = Batch::parse(&bytes)?;
    state.durable.references.add(object, 0);
    state.behind_bytes += bytes.len() as u64;
    apply_all(&mut state.durable, object, &bytes, &batch.records);
    if bytes.len() < keep_bytes {
        state.keep_body(object, bytes);
    }
    Ok(true)
}

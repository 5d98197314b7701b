//! Receiving snapshots: a stream of [`crate::send`] becomes a snapshot and its volume. They appear
//! completely or not at all. Until the stream was read to its end and everything is durable, the
//! data are in a hidden volume; then one change of the catalogue puts it in destination.
//!
//! A resumable receive that is interrupted keeps the hidden volume `%NAME`. A second hidden volume
//! `%%+NAME` of one block says what it contains: the head of the stream that continues it, whose
//! `start` is the first block that may be missing. It is written after the data before that block
//! are durable.
#![allow(clippy::disallowed_types)] // Receives begin rarely.

use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blockyard_core::Status;
use blockyard_store::{PoolBacking, SegmentStore};
use blockyard_volume::admin::now;
use blockyard_volume::config::SIZE_MAX;
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::map::{Leaf, Map};
use blockyard_volume::names::{
    invalid, new_volume_name, receive_state_name, received_name, snapshot_name, volume_name,
};
use blockyard_volume::pool::{Pool, RECEIVE_STATE_PREFIX};
use blockyard_volume::record::OpenVolume;
use blockyard_volume::running::Held;
use blockyard_volume::{Compression, Running, VolumeError};
use blockyard_volume_format::catalogue::{Change, VolumeMeta};
use blockyard_volume_format::key_slot::KeySlot;
use blockyard_volume_format::sealed::SealedBlock;
use blockyard_volume_format::stream::{HEAD_BYTES, Head};
use blockyard_volume_format::{BLOCK_BYTES_MAX, NODE_BLOCKS};

use crate::changes::Changes;
use crate::incoming::{Incoming, Part};

/// Records that are in flight to the log at once.
const RECORDS: usize = 16;

/// Longest write, in bytes.
const WRITE_BYTES: u64 = 256 << 10;

/// Longest sleep before the thread checks again whether memory is free.
const LOOK: Duration = Duration::from_millis(5);

/// How much of a stream a resumable receive reads before it makes its data durable and records its
/// position: a process that is killed loses at most this much. A sync takes milliseconds.
const POSITION_INTERVAL_BYTES: u64 = 16 << 20;

/// Held while a receive looks for hidden volumes of an earlier one, and makes its own.
static BEGIN: Mutex<()> = Mutex::new(());

/// What streams become.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReceiveTarget<'a> {
    /// The volume, or `VOLUME@SNAPSHOT` for a single stream; without it each volume and snapshot
    /// gets the name that it had.
    pub name: Option<&'a str>,
    /// Whether a receive that is interrupted keeps what it has, to be continued.
    pub is_resumable: bool,
}

/// The result of receiving streams.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// The names of the new snapshots, in the order of the streams.
    pub snapshots: Vec<String>,
    /// Blocks whose contents were in the streams.
    pub blocks: u64,
    /// Length of the streams in bytes.
    pub bytes: u64,
    /// Snapshots of raw streams whose key the pool had already, encrypted for another passphrase or
    /// key than the sender's: they open by the one of this pool.
    pub other_secret: Vec<String>,
}

/// Reads the head of a stream that is to become the first volume of a pool, before the pool is
/// created. Checks the head and the name, so that a refused stream does not leave a pool. Returns
/// the bytes that were read: the head, and the key slot of a raw stream.
///
/// # Errors
/// If the head cannot be read, or the stream is incremental or continues another one.
pub fn begin_new(name: Option<&str>, input: &mut dyn Read) -> Result<Vec<u8>, VolumeError> {
    match name {
        Some(name) if name.contains('@') => _ = snapshot_name(name)?,
        Some(name) => volume_name(name)?,
        None => {}
    }
    let mut kept = KeptInput { input, bytes: Vec::new() };
    let head = Incoming::begin(&mut kept)?.head;
    let volume = name.unwrap_or(&head.name).split('@').next().unwrap_or_default().to_owned();
    match head.base {
        None if head.start > 0 => nothing_to_continue(&head, &volume),
        None => Ok(kept.bytes),
        Some((_, base)) => Err(VolumeError::NoBase { stream: head.name, base, volume }),
    }
}

/// An input that keeps a copy of what is read.
struct KeptInput<'a> {
    input: &'a mut dyn Read,
    bytes: Vec<u8>,
}

impl Read for KeptInput<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let len = self.input.read(into)?;
        self.bytes.extend_from_slice(&into[..len]);
        Ok(len)
    }
}

/// Refuses a stream that continues another one, of which nothing is there.
fn nothing_to_continue<T>(head: &Head, volume: &str) -> Result<T, VolumeError> {
    let value = format!("{} from block {} on", head.name, head.start);
    let wanted = format!("a stream from its beginning: nothing of `{volume}` was received before");
    invalid("stream", &value, &wanted)
}

/// Receives one stream, or several that follow one another, as what `target` says. An incremental
/// stream needs its base snapshot here, and a volume that is unchanged since then. `progress` is
/// called with the number of bytes read.
///
/// # Errors
/// If a stream is damaged, cut, or does not fit the pool, or its snapshot is there already: then
/// that stream has changed nothing. The end of a stream whose snapshot is there is accepted. The
/// snapshots of the streams before it stay. What a resumable receive has of the stream is kept if
/// the error is [`VolumeError::Interrupted`].
pub fn receive(
    running: &Running,
    target: &ReceiveTarget<'_>,
    input: &mut dyn Read,
    progress: &mut dyn FnMut(u64),
) -> Result<Received, VolumeError> {
    let mut received = Received::default();
    let mut incoming = Incoming::begin(input)?;
    let first = snapshot_name(&incoming.head.name)?.0.to_owned();
    loop {
        let (volume, snapshot) = snapshot_name(&incoming.head.name)?;
        let name = match target.name {
            None => volume.to_owned(),
            Some(name) if name.contains('@') && incoming.head.is_followed => {
                return invalid("name", name, "a volume, as the input has several snapshots");
            }
            Some(name) if volume != first => {
                let wanted = format!(
                    "no name, as the input has several volumes: `{first}`, `{volume}`; each gets \
                     the name that it had"
                );
                return invalid("name", name, &wanted);
            }
            Some(name) => name.to_owned(),
        };
        let name = if name.contains('@') { name } else { format!("{name}@{snapshot}") };
        if has_other_secret(running, incoming.slot.as_ref()) {
            received.other_secret.push(name.clone());
        }
        received.blocks += match has_arrived(running, &name, &incoming.head) {
            true => end_of_arrived(&name, &mut incoming)?,
            false => receive_one(running, &name, target, &mut incoming, progress)?,
        };
        received.snapshots.push(name);
        received.bytes = incoming.bytes();
        match incoming.following()? {
            Some(next) => incoming = next,
            None => return Ok(received),
        }
    }
}

/// Whether the pool has the key of a raw stream, encrypted for another passphrase or key.
fn has_other_secret(running: &Running, slot: Option<&KeySlot>) -> bool {
    let volumes = running.pool().volumes();
    slot.is_some_and(|slot| volumes.keys.get(&slot.id).is_some_and(|known| known != slot))
}

/// Whether the pool has the snapshot of a stream under this name. Then its sender did not learn
/// that the stream had arrived.
fn has_arrived(running: &Running, name: &str, head: &Head) -> bool {
    let meta = running.pool().find(name).map(|live| live.meta.clone());
    meta.is_ok_and(|it| {
        it.is_snapshot
            && it.guid == head.guid
            && (it.block_bytes, it.blocks) == (head.block_bytes, head.blocks)
            && (!head.is_raw() || it.key == head.key)
    })
}

/// Reads the end of a stream that has arrived. Refuses its beginning with the token of its end, so
/// that a sender that knows tokens goes on without sending the blocks again.
fn end_of_arrived(name: &str, incoming: &mut Incoming<'_>) -> Result<u64, VolumeError> {
    let end = Head { start: incoming.head.blocks, ..incoming.head.clone() };
    if incoming.head.start < end.start {
        let why = format!(
            "here already, with all blocks of the stream; to end a stream whose sender does not \
             know this, send `volume send --resume {}`",
            end.token()
        );
        return Err(VolumeError::Busy { name: name.to_owned(), why });
    }
    // The parser accepts nothing but the end record after the last block.
    incoming.part().map(|_| 0)
}

/// Receives a stream as this snapshot. Returns the number of blocks with contents.
fn receive_one(
    running: &Running,
    snapshot: &str,
    target: &ReceiveTarget<'_>,
    incoming: &mut Incoming<'_>,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, VolumeError> {
    let head = incoming.head.clone();
    let destination = Destination::find(running, snapshot, &head)?;
    // Hold the volume before it is checked, so that no client writes to it afterwards.
    let present = destination.present.as_ref();
    let _held = present.map(|volume| running.hold(volume)).transpose()?;
    destination.check(running.pool())?;
    let slot = incoming.slot.as_ref();
    let mut hidden = destination.begin(running, (&head, slot), target.is_resumable)?;
    let done = take(&mut hidden, incoming, progress).and_then(|blocks| {
        let change = destination.end(&hidden, &head)?;
        running.pool().change(&destination.volume, change)?;
        Ok(blocks)
    });
    done.map_err(|error| hidden.interrupted(error))
}

/// The volume and snapshot that a stream makes.
struct Destination {
    volume: String,
    snapshot: String,
    /// The volume that exists and is updated.
    present: Option<VolumeMeta>,
    /// The snapshot that the stream builds on.
    base: Option<VolumeMeta>,
}

impl Destination {
    fn find(running: &Running, snapshot: &str, head: &Head) -> Result<Destination, VolumeError> {
        let Head { block_bytes, blocks, .. } = *head;
        if !(4096..=BLOCK_BYTES_MAX).contains(&block_bytes) || block_bytes < running.pool().align()
        {
            let wanted = "blocks of 4k, 8k, 16k, 32k or 64k";
            return invalid("stream", &format!("blocks of {block_bytes} bytes"), wanted);
        }
        if blocks.saturating_mul(block_bytes.into()) > SIZE_MAX {
            return invalid("stream", &format!("{blocks} blocks of {block_bytes} bytes"), "1P");
        }
        let volume = snapshot_name(snapshot)?.0.to_owned();
        running.is_free(snapshot)?;
        let snapshot = snapshot.to_owned();
        let pool = running.pool();
        let list = pool.list();
        let Some((guid, base)) = &head.base else {
            new_volume_name(&volume)?;
            running.is_free(&volume)?;
            return Ok(Destination { volume, snapshot, present: None, base: None });
        };
        let is_base = |it: &&VolumeMeta| it.is_snapshot && it.guid == *guid;
        let no_base = |volume: &str| {
            let (stream, base, volume) = (head.name.clone(), base.clone(), volume.to_owned());
            VolumeError::NoBase { stream, base, volume }
        };
        let Ok(meta) = pool.find(&volume).map(|live| live.meta.clone()) else {
            if !head.is_clone {
                return Err(no_base(&volume));
            }
            new_volume_name(&volume)?;
            let found = list.iter().find(is_base).ok_or_else(|| no_base(&volume))?.clone();
            same_blocks(&found, head)?;
            same_key(&found, head)?;
            return Ok(Destination { volume, snapshot, present: None, base: Some(found) });
        };
        let prefix = format!("{volume}@");
        let mut snapshots = list.iter().filter(|it| it.name.starts_with(&prefix));
        let Some(found) = snapshots.clone().find(is_base).cloned() else {
            let wanted = format!(
                "`{base}` among the snapshots of `{volume}`, on which the stream builds; receive \
                 that first"
            );
            let had: Vec<_> = snapshots.map(|it| it.name.as_str()).collect();
            return invalid("stream", &format!("{} on {}", head.name, had.join(", ")), &wanted);
        };
        if let Some(same) = snapshots.find(|it| it.guid == head.guid) {
            return Err(VolumeError::Exists { name: same.name.clone() });
        }
        same_blocks(&meta, head)?;
        same_key(&meta, head)?;
        Ok(Destination { volume, snapshot, present: Some(meta), base: Some(found) })
    }

    /// Checks that the volume is in the state that the stream expects.
    fn check<D: SegmentStore>(&self, pool: &Arc<Pool<D>>) -> Result<(), VolumeError> {
        let (Some(meta), Some(base)) = (&self.present, &self.base) else { return Ok(()) };
        let busy = |why: String| Err(VolumeError::Busy { name: self.volume.clone(), why });
        if pool.find(&self.volume)?.meta != *meta {
            return busy("being changed; try again".to_owned());
        }
        if has_changed(pool, &self.volume, &base.name)? {
            return busy(format!("no longer as it was in `{0}`; roll it back to that", base.name));
        }
        Ok(())
    }

    /// Creates the hidden volume, or continues that of a receive that was interrupted.
    fn begin<'a>(
        &self,
        running: &'a Running,
        (head, slot): (&Head, Option<&KeySlot>),
        is_resumable: bool,
    ) -> Result<Hidden<'a>, VolumeError> {
        let _begin = BEGIN.lock().unwrap_or_else(PoisonError::into_inner);
        let name = received_name(&self.volume);
        if let Ok(meta) = running.pool().find(&name).map(|live| live.meta.clone()) {
            let busy = |why: String| VolumeError::Busy { name: self.volume.clone(), why };
            let held = running.hold(&meta);
            let held = held.map_err(|_| busy("being received already".to_owned()))?;
            let shape = |meta: &VolumeMeta| (meta.key, meta.block_bytes);
            if self.present.as_ref().is_some_and(|present| shape(present) != shape(&meta)) {
                let why = "partly received, for another volume that had this name; drop that with \
                           `volume receive --abort`";
                return Err(busy(why.to_owned()));
            }
            let kept = read_state(running.pool(), &self.volume).map_err(|error| {
                busy(format!(
                    "partly received, and how far cannot be read: {error}; `volume receive \
                     --abort` drops it"
                ))
            })?;
            match kept {
                Some(kept) if is_continued(&kept, head) => {
                    let volume = self.volume.clone();
                    return Ok(Hidden { running, volume, name, kept: Some(kept), _held: held });
                }
                Some(kept) => {
                    return Err(busy(format!(
                        "partly received: it has `{}` up to block {}; continue that with `volume \
                         send --resume {}`, or drop it with `volume receive --abort`",
                        kept.name,
                        kept.start,
                        kept.token()
                    )));
                }
                // The process ended before the receive had begun.
                None => running.forget(&name),
            }
        }
        if head.start > 0 {
            return nothing_to_continue(head, &self.volume);
        }
        running.forget(&receive_state_name(&self.volume));
        let created = self.create(running, &name, head, slot).and_then(|meta| {
            let kept = match is_resumable {
                true => Some(create_state(running, &self.volume, head)?),
                false => None,
            };
            Ok((running.hold(&meta)?, kept))
        });
        match created {
            Ok((held, kept)) => {
                Ok(Hidden { running, volume: self.volume.clone(), name, kept, _held: held })
            }
            Err(error) => {
                running.forget(&receive_state_name(&self.volume));
                running.forget(&name);
                Err(error)
            }
        }
    }

    /// Creates the hidden volume.
    fn create(
        &self,
        running: &Running,
        name: &str,
        head: &Head,
        slot: Option<&KeySlot>,
    ) -> Result<VolumeMeta, VolumeError> {
        let pool = running.pool();
        let Head { block_bytes, blocks, .. } = *head;
        let meta = VolumeMeta {
            id: 0,
            name: name.to_owned(),
            is_snapshot: false,
            origin: self.base.as_ref().map_or(0, |base| base.id),
            block_bytes,
            blocks,
            guid: 0,
            reserved_bytes: 0,
            created: now(),
            key: head.key,
        };
        match (&self.base, slot) {
            (None, None) => pool.change(&self.volume, Change::Create(meta))?,
            (None, Some(slot)) => {
                let changes = vec![Change::PutKey(slot.clone()), Change::Create(meta)];
                pool.change(&self.volume, Change::Several(changes))?;
            }
            // A copy has the key of its origin.
            (Some(base), _) => {
                let copy = VolumeMeta { blocks: base.blocks, ..meta };
                pool.change(&self.volume, Change::Copy(copy))?;
                if base.blocks != blocks {
                    let id = pool.find(name)?.meta.id;
                    pool.change(&self.volume, Change::Resize { id, blocks })?;
                }
            }
        }
        Ok(pool.find(name)?.meta.clone())
    }

    /// The change of the catalogue that puts the hidden volume in destination.
    fn end(&self, hidden: &Hidden<'_>, head: &Head) -> Result<Change, VolumeError> {
        let pool = hidden.running.pool();
        let meta = pool.find(&hidden.name)?.meta.clone();
        let origin = meta.id;
        let created = if head.created == 0 { now() } else { head.created };
        let (name, guid, is_snapshot) = (self.snapshot.clone(), head.guid, true);
        let snapshot = VolumeMeta { name, origin, guid, is_snapshot, created, ..meta };
        let mut changes = match &self.present {
            None => {
                let rename = Change::Rename { id: origin, name: self.volume.clone() };
                vec![Change::Copy(snapshot), rename]
            }
            Some(volume) => {
                let mut changes = Vec::new();
                if volume.blocks != head.blocks {
                    changes.push(Change::Resize { id: volume.id, blocks: head.blocks });
                }
                changes.push(Change::Rollback { id: volume.id, to: origin });
                changes.push(Change::Copy(snapshot));
                changes.push(Change::Destroy { id: origin });
                changes
            }
        };
        if hidden.kept.is_some() {
            let id = pool.find(&receive_state_name(&self.volume))?.meta.id;
            changes.push(Change::Destroy { id });
        }
        Ok(Change::Several(changes))
    }
}

/// Refuses a stream whose blocks have another length than those of a volume or snapshot.
fn same_blocks(meta: &VolumeMeta, head: &Head) -> Result<(), VolumeError> {
    match meta.block_bytes == head.block_bytes {
        true => Ok(()),
        false => {
            let wanted = format!("blocks of {} bytes, as `{}` has", meta.block_bytes, meta.name);
            invalid("stream", &head.block_bytes.to_string(), &wanted)
        }
    }
}

/// Refuses a raw stream whose blocks are encrypted by another key than those of a volume or
/// snapshot.
fn same_key(meta: &VolumeMeta, head: &Head) -> Result<(), VolumeError> {
    if !head.is_raw() || head.key == meta.key {
        return Ok(());
    }
    let wanted = match meta.key {
        0 => format!(
            "one that is not raw, as `{}` is not encrypted here; send it without --raw, or receive \
             a complete raw stream as another volume",
            meta.name
        ),
        _ => format!(
            "one that is encrypted by the key of `{}`; receive a complete stream as another volume",
            meta.name
        ),
    };
    invalid("stream", &format!("{} (raw)", head.name), &wanted)
}

/// A hidden volume that is being received.
struct Hidden<'a> {
    running: &'a Running,
    /// The volume that it will be, or update.
    volume: String,
    name: String,
    /// The head of the stream that continues the receive, as it was recorded last; `None` if an
    /// interrupted receive leaves nothing.
    kept: Option<Head>,
    _held: Held<'a, PoolBacking>,
}

impl Hidden<'_> {
    /// Records that all blocks before `start` are durable.
    fn record(&mut self, start: u64) -> Result<(), VolumeError> {
        // A stream may repeat blocks that were received before.
        if let Some(kept) = &self.kept
            && start > kept.start
        {
            let kept = Head { start, ..kept.clone() };
            write_state(self.running.pool(), &self.volume, &kept)?;
            self.kept = Some(kept);
        }
        Ok(())
    }

    /// Adds to an error how the receive is continued; removes the hidden volume if it is not kept.
    fn interrupted(&self, error: VolumeError) -> VolumeError {
        let Some(kept) = &self.kept else {
            self.running.forget(&self.name);
            return error;
        };
        let (volume, token) = (self.volume.clone(), kept.token().to_string());
        VolumeError::Interrupted { volume, token, source: Box::new(error) }
    }
}

/// Whether a stream continues a receive that has kept `kept`. A stream from its beginning does not
/// once there are blocks: it would send them again, and its sender learns the token by the refusal.
fn is_continued(kept: &Head, head: &Head) -> bool {
    let what = |head: &Head| {
        let base = head.base.as_ref().map(|(guid, _)| *guid);
        (head.guid, base, head.block_bytes, head.blocks, head.is_clone, head.key)
    };
    let is_start = head.start <= kept.start && (head.start > 0 || kept.start == 0);
    what(kept) == what(head) && is_start
}

/// Creates the hidden volume with the position of a receive.
fn create_state(running: &Running, volume: &str, head: &Head) -> Result<Head, VolumeError> {
    let pool = running.pool();
    let meta = VolumeMeta {
        id: 0,
        name: receive_state_name(volume),
        is_snapshot: false,
        origin: 0,
        block_bytes: pool.align().max(4096),
        blocks: 1,
        guid: 0,
        reserved_bytes: 0,
        created: now(),
        key: 0,
    };
    pool.change(volume, Change::Create(meta))?;
    let kept = Head { start: 0, is_followed: false, ..head.clone() };
    write_state(pool, volume, &kept)?;
    Ok(kept)
}

/// Writes the position of a receive durably.
fn write_state<D: SegmentStore>(
    pool: &Arc<Pool<D>>,
    volume: &str,
    kept: &Head,
) -> Result<(), VolumeError> {
    let live = pool.find(&receive_state_name(volume))?;
    let mut block = kept.print().to_vec();
    block.resize(live.meta.block_bytes as usize, 0);
    let mut filler = Filler::new(pool, live)?;
    filler.write(0, &block)?;
    filler.sync()
}

/// Reads the position of a receive; `None` if it was not written yet.
///
/// # Errors
/// If it cannot be read, or is of a format that this program does not know.
fn read_state<D: SegmentStore>(
    pool: &Arc<Pool<D>>,
    volume: &str,
) -> Result<Option<Head>, VolumeError> {
    let name = receive_state_name(volume);
    let Ok(live) = pool.find(&name) else { return Ok(None) };
    let len = live.meta.block_bytes as usize;
    let mut handle = VolumeHandle::open(pool, live, Compression::None, 1)?;
    let mut block = Vec::with_capacity(len);
    let status = handle.read(0, len, |bytes| block.extend_from_slice(bytes));
    if status != Status::Ok {
        return Err(VolumeError::Unreadable { name, first: 0, count: 1, status });
    }
    match block.first_chunk::<HEAD_BYTES>() {
        Some(head) if head.iter().any(|byte| *byte != 0) => {
            let head = Head::parse(head);
            head.map(Some).map_err(|source| VolumeError::Stream { offset: 0, source })
        }
        _ => Ok(None),
    }
}

/// A receive that was interrupted, and can be continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialReceive {
    /// The volume that it makes or updates.
    pub volume: String,
    /// The head of the stream that continues it.
    pub head: Head,
}

/// The receives of a pool that were interrupted, or that are in progress and resumable.
pub fn interrupted(running: &Running) -> Vec<PartialReceive> {
    let names: Vec<String> = {
        let volumes = running.pool().volumes();
        volumes.by_id.values().map(|live| live.meta.name.clone()).collect()
    };
    let volumes = names.iter().filter_map(|name| name.strip_prefix(RECEIVE_STATE_PREFIX));
    let partial = |volume: &str| {
        let head = read_state(running.pool(), volume).unwrap_or_else(|error| {
            tracing::warn!("how far `{volume}` was received cannot be read: {error}");
            None
        })?;
        Some(PartialReceive { volume: volume.to_owned(), head })
    };
    volumes.filter_map(partial).collect()
}

/// Drops what an interrupted receive of a volume has kept.
///
/// # Errors
/// If there is nothing, or it is being received.
pub fn abort(running: &Running, volume: &str) -> Result<(), VolumeError> {
    volume_name(volume)?;
    let _begin = BEGIN.lock().unwrap_or_else(PoisonError::into_inner);
    let name = received_name(volume);
    let Ok(meta) = running.pool().find(&name).map(|live| live.meta.clone()) else {
        return invalid("name", volume, "a volume that was partly received");
    };
    let _held = running.hold(&meta).map_err(|_| {
        let (name, why) = (volume.to_owned(), "being received; stop that first".to_owned());
        VolumeError::Busy { name, why }
    })?;
    running.forget(&name);
    running.forget(&receive_state_name(volume));
    Ok(())
}

/// Whether a volume differs from its snapshot.
///
/// # Errors
/// If one of them does not exist, or a page of a map cannot be read.
pub fn has_changed<D: SegmentStore>(
    pool: &Arc<Pool<D>>,
    volume: &str,
    snapshot: &str,
) -> Result<bool, VolumeError> {
    let (volume, snapshot) = (pool.find(volume)?, pool.find(snapshot)?);
    pool.settle();
    let (new, old) = {
        let _volumes = pool.volumes();
        (volume.map.freeze(), snapshot.map.freeze())
    };
    let blocks = volume.meta.blocks;
    let reads = Arc::clone(pool);
    let read = move |leaf: &Leaf| reads.segments().page(leaf);
    let mut changes = Changes::between(Some(old), new, blocks, read);
    Ok(blocks != snapshot.meta.blocks || changes.next().transpose()?.is_some())
}

/// Writes the stream into the hidden volume and makes it durable. Returns the number of blocks with
/// contents.
fn take(
    hidden: &mut Hidden<'_>,
    incoming: &mut Incoming<'_>,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, VolumeError> {
    let pool = hidden.running.pool();
    let live = pool.find(&hidden.name)?;
    let size = u64::from(live.meta.block_bytes);
    let mut filler = match incoming.head.is_raw() {
        false => Filler::new(pool, live)?,
        true => Filler::sealed(pool, live)?,
    };
    let (mut blocks, mut recorded) = (0, incoming.bytes());
    let read = loop {
        match incoming.part() {
            Ok(Part::Data { first, bytes }) => {
                filler.write(first, bytes)?;
                blocks += bytes.len() as u64 / size;
            }
            Ok(Part::Sealed { first, count, blocks: sealed }) => {
                filler.write_sealed(first, &sealed.collect::<Vec<_>>())?;
                blocks += count;
            }
            Ok(Part::Zeros { first, count }) => filler.zero(first, count)?,
            Ok(Part::End) => break Ok(blocks),
            Err(error) => break Err(error),
        }
        progress(incoming.bytes());
        if hidden.kept.is_some() && incoming.bytes() - recorded >= POSITION_INTERVAL_BYTES {
            filler.sync()?;
            hidden.record(incoming.next_block())?;
            recorded = incoming.bytes();
        }
    };
    if read.is_ok() || hidden.kept.is_some() {
        filler.sync()?;
    }
    progress(incoming.bytes());
    if read.is_err() {
        hidden.record(incoming.next_block())?;
    }
    read
}

/// Writes into a volume, with several records in flight.
struct Filler<D: SegmentStore> {
    handle: VolumeHandle<D>,
    size: u64,
    /// Most blocks of one write.
    part_blocks: u64,
}

impl<D: SegmentStore> Filler<D> {
    fn new(pool: &Arc<Pool<D>>, live: Arc<OpenVolume>) -> Result<Filler<D>, VolumeError> {
        let compression = Compression::default();
        let handle = VolumeHandle::open(pool, Arc::clone(&live), compression, RECORDS)?;
        Ok(Filler::with(pool, &live, handle))
    }

    /// For encrypted blocks, without the key of the volume.
    fn sealed(pool: &Arc<Pool<D>>, live: Arc<OpenVolume>) -> Result<Filler<D>, VolumeError> {
        let handle = VolumeHandle::open_sealed(pool, Arc::clone(&live), RECORDS)?;
        Ok(Filler::with(pool, &live, handle))
    }

    fn with(pool: &Pool<D>, live: &OpenVolume, handle: VolumeHandle<D>) -> Filler<D> {
        let size = u64::from(live.meta.block_bytes);
        let part_bytes = WRITE_BYTES.min(u64::from(pool.segments().bytes()) / 4).max(size);
        Filler { handle, size, part_blocks: part_bytes / size }
    }

    /// Writes `count` blocks from block `first` on, in parts of one span. `write` starts the write
    /// of a part, from its number among the blocks on.
    fn parts(
        &mut self,
        first: u64,
        count: u64,
        write: impl Fn(&mut VolumeHandle<D>, u64, std::ops::Range<usize>) -> Outcome,
    ) -> Result<(), VolumeError> {
        let mut parts = Vec::new();
        Map::each_span(first, count, |span, from, to| parts.push((span, from, to)));
        let mut done = 0;
        for (span, from, to) in parts {
            let mut block = span as u64 * NODE_BLOCKS + u64::from(from);
            let mut left = u64::from(to - from);
            while left > 0 {
                let part = left.min(self.part_blocks);
                let range = done..done + part as usize;
                self.until_taken(|handle| write(handle, block, range.clone()))?;
                (block, left, done) = (block + part, left - part, range.end);
            }
        }
        Ok(())
    }

    fn write(&mut self, first: u64, bytes: &[u8]) -> Result<(), VolumeError> {
        let size = self.size;
        self.parts(first, bytes.len() as u64 / size, |handle, block, part| {
            let part = &bytes[part.start * size as usize..part.end * size as usize];
            let fill = |from: usize, into: &mut [u8]| {
                into.copy_from_slice(&part[from..from + into.len()]);
            };
            handle.write(block * size, part.len(), &fill, 0, false)
        })
    }

    fn write_sealed(&mut self, first: u64, blocks: &[SealedBlock<'_>]) -> Result<(), VolumeError> {
        self.parts(first, blocks.len() as u64, |handle, block, part| {
            handle.write_sealed(block, &blocks[part], 0)
        })
    }

    fn zero(&mut self, first: u64, count: u64) -> Result<(), VolumeError> {
        let (mut first, end) = (first, first + count);
        while first < end {
            let next = ((first / NODE_BLOCKS + 1) * NODE_BLOCKS).min(end);
            let (at, len) = (first * self.size, (next - first) * self.size);
            self.until_taken(|handle| handle.zero(at, len, 0, false))?;
            first = next;
        }
        Ok(())
    }

    /// Makes all writes durable.
    fn sync(&mut self) -> Result<(), VolumeError> {
        self.wait_below(1)?;
        self.until_taken(|handle| handle.flush(0))?;
        self.wait_below(1)
    }

    fn until_taken(
        &mut self,
        mut operation: impl FnMut(&mut VolumeHandle<D>) -> Outcome,
    ) -> Result<(), VolumeError> {
        loop {
            self.wait_below(RECORDS)?;
            match operation(&mut self.handle) {
                Outcome::Taken => return Ok(()),
                Outcome::Ended(status) => return ended(status),
                // Other writers, or this one, have all the memory.
                Outcome::Full => match self.handle.out() {
                    0 => std::thread::sleep(LOOK),
                    out => self.wait_below(out)?,
                },
            }
        }
    }

    /// Waits until fewer than `records` records are in flight.
    fn wait_below(&mut self, records: usize) -> Result<(), VolumeError> {
        while self.handle.out() >= records {
            match self.handle.take() {
                Some(reply) => ended(reply.status)?,
                None => {
                    let handle = &self.handle;
                    handle.completion_queue().event_count().sleep(LOOK, || handle.is_any());
                }
            }
        }
        Ok(())
    }
}

fn ended(status: Status) -> Result<(), VolumeError> {
    match status {
        Status::Ok => Ok(()),
        Status::NoSpc => Err(VolumeError::NoSpace),
        _ => Err(VolumeError::Latched),
    }
}

//! Sends snapshots, or their differences from older ones, as streams of bytes. docs/format.md
//! describes the stream.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::{Arc, Weak};

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_volume::handle::VolumeHandle;
use blockyard_volume::map::Leaf;
use blockyard_volume::names::invalid;
use blockyard_volume::pool::Volumes;
use blockyard_volume::record::OpenVolume;
use blockyard_volume::{Compression, Pool, Running, VolumeError};
use blockyard_volume_format::key_slot::{KEY_SLOT_BYTES, KeySlot};
use blockyard_volume_format::sealed::STREAM_OVERHEAD;
use blockyard_volume_format::stream::{
    HEAD_BYTES, Head, Kind, PAYLOAD_MAX, RECORD_BYTES, Record, ResumeToken,
};

use crate::changes::{Changes, Run};

/// The level of Zstandard: about 300 MB/s on one processor.
#[cfg(feature = "c-codecs")]
const ZSTD_LEVEL: i32 = 3;

/// What is sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendOptions<'a> {
    /// The snapshot, `VOLUME@SNAPSHOT`; with `replicate` also `@SNAPSHOT`.
    pub snapshot: &'a str,
    /// The older snapshot on which the stream builds: `VOLUME@SNAPSHOT` or `@SNAPSHOT`.
    pub base: Option<&'a str>,
    /// Whether the snapshots between the base and the snapshot are sent too.
    pub intermediate: bool,
    /// Whether all snapshots up to this one are sent, from the base on if there is one; with
    /// `@SNAPSHOT` those of all volumes that have a snapshot of this name.
    pub replicate: bool,
    /// Whether blocks are compressed by Zstandard, where that saves space. Raw streams are not.
    pub is_compressed: bool,
    /// Whether encrypted volumes are sent as they are stored, without their keys. Other volumes are
    /// sent as without it.
    pub is_raw: bool,
}

/// The result of sending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Blocks whose contents were sent.
    pub blocks: u64,
    /// Length of the streams in bytes.
    pub bytes: u64,
}

/// Sends a snapshot; with `base`, an older snapshot of the same volume, only the changes since.
/// `progress` is called with the number of bytes sent.
///
/// # Errors
/// If there is no such snapshot, a block of it cannot be read, or the receiver is gone.
pub fn send(
    running: &Running,
    snapshot: &str,
    base: Option<&str>,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> Result<Sent, VolumeError> {
    let options = SendOptions { snapshot, base, ..SendOptions::default() };
    Sending::begin(running, &options)?.run(out, progress)
}

/// Snapshots that are ready to be sent. Neither they nor their bases can be removed meanwhile.
pub struct Sending<D: SegmentStore> {
    pool: Arc<Pool<D>>,
    streams: Vec<Outgoing>,
    is_compressed: bool,
    /// Removes the snapshot afterwards. Dropped after the fields that use the snapshot.
    passing: Option<Passing<D>>,
}

/// The stream of one snapshot.
struct Outgoing {
    live: Arc<OpenVolume>,
    base: Option<Arc<OpenVolume>>,
    head: Head,
    /// The key slot of a raw stream.
    slot: Option<KeySlot>,
}

/// A temporary snapshot, which is removed when this is dropped. If the pool is closed before, the
/// next opening removes it.
pub(crate) struct Passing<D: SegmentStore> {
    running: Weak<Running<D>>,
    /// The name of the snapshot, which no list shows.
    pub(crate) name: String,
}

impl<D: SegmentStore> Passing<D> {
    /// Makes a snapshot of a volume.
    ///
    /// # Errors
    /// If there is no such volume, or no space for the snapshot.
    pub(crate) fn of(running: &Arc<Running<D>>, volume: &str) -> Result<Self, VolumeError> {
        let name = running.snapshot_unseen(volume)?;
        Ok(Passing { running: Arc::downgrade(running), name })
    }
}

impl<D: SegmentStore> Drop for Passing<D> {
    fn drop(&mut self) {
        if let Some(running) = self.running.upgrade() {
            running.forget(&self.name);
        }
    }
}

impl Sending<blockyard_store::PoolBacking> {
    /// Prepares to send the current state of a volume. Its temporary snapshot is removed, however
    /// the sending ends.
    ///
    /// # Errors
    /// If there is no such volume, or no space for the snapshot.
    pub fn begin_now(running: &Arc<Running>, volume: &str) -> Result<Self, VolumeError> {
        let passing = Passing::of(running, volume)?;
        let options = SendOptions { snapshot: &passing.name, ..SendOptions::default() };
        let mut sending = Sending::of(running.pool(), &options)?;
        sending.streams[0].head.name = format!("{volume}@now");
        sending.passing = Some(passing);
        Ok(sending)
    }

    /// Prepares to send.
    ///
    /// # Errors
    /// If there is no such snapshot, or it does not build on the base.
    pub fn begin(running: &Running, options: &SendOptions<'_>) -> Result<Self, VolumeError> {
        Sending::of(running.pool(), options)
    }

    /// Prepares to continue a stream whose receive was interrupted. Of `options`, `snapshot` says
    /// which one is sent if the pool has several with the identity that the token names, received
    /// from another pool; it can be empty. `is_raw` refuses the token of a stream that has the
    /// contents of an encrypted volume. `is_compressed` applies, and the other options do not.
    ///
    /// # Errors
    /// If the pool has not the snapshots that the token names.
    pub fn resume(
        running: &Running,
        token: &ResumeToken,
        options: &SendOptions<'_>,
    ) -> Result<Self, VolumeError> {
        let SendOptions { snapshot, is_compressed, is_raw, .. } = *options;
        let pool = running.pool();
        let outgoing = {
            let volumes = pool.volumes();
            let is = |guid: u64| {
                move |it: &&Arc<OpenVolume>| it.meta.is_snapshot && it.meta.guid == guid
            };
            let snapshots = volumes.by_id.values().filter(is(token.guid));
            let snapshots = snapshots.filter(|it| snapshot.is_empty() || it.meta.name == *snapshot);
            let is_sealed = |live: &&Arc<OpenVolume>| !token.is_raw || live.meta.key != 0;
            let with_base = |live: &Arc<OpenVolume>| {
                let Some(guid) = token.base else { return Some(Outgoing::new(live, None)) };
                let bases = volumes.by_id.values().filter(is(guid));
                let mut bases = bases.filter(|base| base.meta.id < live.meta.id);
                let own = bases.clone().find(|base| volume_of(base) == volume_of(live));
                let base = own.or_else(|| bases.next())?;
                Some(Outgoing::new(live, Some(base)))
            };
            let sealed = snapshots.clone().filter(is_sealed).find_map(with_base);
            sealed.or_else(|| snapshots.clone().find_map(with_base))
        };
        let wanted = "that of a snapshot, and of its base, that this pool has";
        let text = token.to_string();
        let Some(mut outgoing) = outgoing else { return invalid("token", &text, wanted) };
        if token.start > outgoing.head.blocks {
            return invalid("token", &text, "a block of the snapshot as the start");
        }
        if token.is_raw && outgoing.live.meta.key == 0 {
            return invalid("token", &text, "that of an encrypted volume, as the stream is raw");
        }
        if is_raw && !token.is_raw && outgoing.live.meta.key != 0 {
            let wanted =
                "that of a raw stream, as this one has the contents of an encrypted volume";
            return invalid("token", &text, wanted);
        }
        outgoing.head.start = token.start;
        outgoing.check_key(pool, token.is_raw)?;
        let (pool, streams, passing) = (Arc::clone(pool), vec![outgoing], None);
        Ok(Sending { pool, streams, is_compressed, passing })
    }
}

impl Outgoing {
    fn new(live: &Arc<OpenVolume>, base: Option<&Arc<OpenVolume>>) -> Outgoing {
        let head = Head {
            block_bytes: live.meta.block_bytes,
            blocks: live.meta.blocks,
            guid: live.meta.guid,
            name: live.meta.name.clone(),
            base: base.map(|it| (it.meta.guid, it.meta.name.clone())),
            created: live.meta.created,
            start: 0,
            is_followed: false,
            is_clone: base.is_some_and(|base| volume_of(base) != volume_of(live)),
            key: 0,
        };
        Outgoing { live: Arc::clone(live), base: base.cloned(), head, slot: None }
    }

    /// Makes the stream raw if the volume is encrypted and `is_raw` asks for that; otherwise
    /// refuses a volume that is locked.
    fn check_key<D: SegmentStore>(
        &mut self,
        pool: &Pool<D>,
        is_raw: bool,
    ) -> Result<(), VolumeError> {
        let meta = &self.live.meta;
        if !is_raw || meta.key == 0 {
            return pool.keys().of(meta).map(drop);
        }
        self.slot = Some(pool.key_slot(meta)?);
        self.head.key = meta.key;
        Ok(())
    }

    /// The most bytes that a block takes in the stream.
    fn block_bytes_max(&self) -> u64 {
        let more = if self.slot.is_some() { STREAM_OVERHEAD as u64 } else { 0 };
        u64::from(self.head.block_bytes) + more
    }
}

impl<D: SegmentStore> Sending<D> {
    fn of(pool: &Arc<Pool<D>>, options: &SendOptions<'_>) -> Result<Self, VolumeError> {
        let SendOptions { is_compressed, is_raw, .. } = *options;
        if is_compressed && !cfg!(feature = "c-codecs") {
            let wanted = "an uncompressed stream, as this build has no zstd";
            return invalid("compressed", "true", wanted);
        }
        let mut streams = {
            let volumes = pool.volumes();
            match options.snapshot.strip_prefix('@') {
                Some(snapshot) if options.replicate => all_volumes(&volumes, snapshot, options)?,
                _ => one_volume(&volumes, options)?,
            }
        };
        // A locked volume is refused before anything is sent.
        for outgoing in &mut streams {
            outgoing.check_key(pool, is_raw)?;
        }
        let last = streams.len() - 1;
        streams[..last].iter_mut().for_each(|outgoing| outgoing.head.is_followed = true);
        Ok(Sending { pool: Arc::clone(pool), streams, is_compressed, passing: None })
    }

    /// Whether [`Sending::stream_bytes`] is exact.
    pub fn is_exact(&self) -> bool {
        !self.is_compressed && self.streams.iter().all(|outgoing| outgoing.slot.is_none())
    }

    /// Counts the bytes of the streams, from the maps alone: exactly, or, if blocks are compressed
    /// or a stream is raw, an upper bound.
    ///
    /// # Errors
    /// If a page of a map cannot be read.
    pub fn stream_bytes(&self) -> Result<u64, VolumeError> {
        let mut bytes = 0;
        for outgoing in &self.streams {
            let size = outgoing.block_bytes_max();
            let most = PAYLOAD_MAX as u64 / size;
            bytes += (HEAD_BYTES + RECORD_BYTES) as u64;
            if outgoing.slot.is_some() {
                bytes += (RECORD_BYTES + KEY_SLOT_BYTES) as u64;
            }
            for run in self.changes(outgoing) {
                let Some(Run { count, is_hole, .. }) = clipped(run?, outgoing.head.start) else {
                    continue;
                };
                bytes += match is_hole {
                    true => RECORD_BYTES as u64,
                    false => count * size + count.div_ceil(most) * RECORD_BYTES as u64,
                };
            }
        }
        Ok(bytes)
    }

    /// The blocks in which a snapshot differs from its base.
    fn changes(&self, outgoing: &Outgoing) -> Changes<'static> {
        let Outgoing { live, base, head, .. } = outgoing;
        let (blocks, freezes) = (live.meta.blocks, Arc::clone(&self.pool));
        let (live, base) = (Arc::clone(live), base.clone());
        // Freeze both maps at one moment: cleaning moves blocks of both.
        let freeze = move || {
            let _volumes = freezes.volumes();
            (base.as_ref().map(|base| base.map.freeze()), live.map.freeze())
        };
        let (old, new) = freeze();
        let pool = Arc::clone(&self.pool);
        let read = move |leaf: &Leaf| pool.segments().page(leaf);
        let changes = Changes::between(old, new, blocks, read).freezing_again(freeze);
        changes.starting_at(head.start)
    }

    /// Sends the streams.
    ///
    /// # Errors
    /// If a block cannot be read, or the receiver is gone.
    pub fn run(
        mut self,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Sent, VolumeError> {
        // Declared first, so that it is dropped last.
        let _passing = self.passing.take();
        let mut sent = Sent::default();
        for outgoing in std::mem::take(&mut self.streams) {
            self.send_one(outgoing, out, &mut sent, progress)?;
        }
        out.flush().map_err(VolumeError::stream())?;
        Ok(sent)
    }

    fn send_one(
        &self,
        outgoing: Outgoing,
        out: &mut dyn Write,
        sent: &mut Sent,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), VolumeError> {
        let (changes, most) =
            (self.changes(&outgoing), PAYLOAD_MAX as u64 / outgoing.block_bytes_max());
        let Outgoing { live, base: _base, head, slot } = outgoing;
        let mut handle = match &slot {
            None => VolumeHandle::open(&self.pool, live, Compression::None, 1)?,
            Some(_) => VolumeHandle::open_sealed(&self.pool, live, 1)?,
        };
        let mut stream = StreamPrinter::begin(out, &head, self.is_compressed)?;
        let mut payload = Vec::with_capacity(PAYLOAD_MAX);
        if let Some(slot) = &slot {
            slot.print(&mut payload);
            stream.record(Kind::Key, head.start, 0, &payload)?;
        }
        for run in changes {
            let Some(run) = clipped(run?, head.start) else { continue };
            let Run { first, count, is_hole } = run;
            if is_hole {
                stream.record(Kind::Zeros, first, count, &[])?;
                continue;
            }
            let mut at = first;
            while at < first + count {
                let part = most.min(first + count - at);
                payload.clear();
                let read = match &slot {
                    None => read_contents(&mut handle, &head, at, part, &mut payload),
                    Some(_) => read_sealed(&mut handle, at, part, &mut payload),
                };
                if let Err((first, count, status)) = read {
                    let name = head.name.clone();
                    return Err(VolumeError::Unreadable { name, first, count, status });
                }
                match &slot {
                    None => stream.data(at, part, &payload)?,
                    Some(_) => stream.record(Kind::Sealed, at, part, &payload)?,
                }
                at += part;
                sent.blocks += part;
                progress(sent.bytes + stream.bytes);
            }
        }
        stream.record(Kind::End, head.blocks, 0, &[])?;
        sent.bytes += stream.bytes;
        Ok(())
    }
}

/// The blocks that could not be read: the first, their number, and why.
type Unread = (u64, u64, Status);

/// Appends the contents of `count` blocks from block `at` on.
fn read_contents<D: SegmentStore>(
    handle: &mut VolumeHandle<D>,
    head: &Head,
    at: u64,
    count: u64,
    payload: &mut Vec<u8>,
) -> Result<(), Unread> {
    let size = u64::from(head.block_bytes);
    let len = (count * size) as usize;
    match handle.read(at * size, len, |bytes| payload.extend_from_slice(bytes)) {
        Status::Ok => Ok(()),
        status => Err((at, count, status)),
    }
}

/// Appends `count` encrypted blocks from block `at` on.
fn read_sealed<D: SegmentStore>(
    handle: &mut VolumeHandle<D>,
    at: u64,
    count: u64,
    payload: &mut Vec<u8>,
) -> Result<(), Unread> {
    for block in at..at + count {
        let sealed = handle.read_sealed(block).map_err(|status| (block, 1, status))?;
        sealed.print(payload);
    }
    Ok(())
}

/// The part of a run from the block `start` on.
fn clipped(run: Run, start: u64) -> Option<Run> {
    let Run { first, count, is_hole } = run;
    let skipped = start.saturating_sub(first);
    (skipped < count).then(|| Run { first: first + skipped, count: count - skipped, is_hole })
}

/// The name of the volume of a snapshot.
fn volume_of(live: &OpenVolume) -> &str {
    live.meta.name.split('@').next().unwrap_or_default()
}

/// Finds a snapshot by the value of this parameter.
fn find<'a>(
    volumes: &'a Volumes,
    field: &'static str,
    name: &str,
) -> Result<&'a Arc<OpenVolume>, VolumeError> {
    let none = || VolumeError::NoSuchVolume { name: name.to_owned() };
    let live = volumes.find(name).ok_or_else(none)?;
    match live.meta.is_snapshot {
        true => Ok(live),
        false => invalid(field, name, "VOLUME@SNAPSHOT"),
    }
}

/// The streams of the snapshots of one volume.
fn one_volume(volumes: &Volumes, options: &SendOptions<'_>) -> Result<Vec<Outgoing>, VolumeError> {
    let SendOptions { snapshot, base, intermediate, replicate, .. } = *options;
    let live = find(volumes, "name", snapshot)?;
    let older = match base {
        Some(base) if base.starts_with('@') => {
            Some(find(volumes, "from", &format!("{}{base}", volume_of(live)))?)
        }
        Some(base) => Some(find(volumes, "from", base)?),
        None if intermediate => {
            return invalid("from", "", "the snapshot on which the first stream builds");
        }
        None => None,
    };
    if let Some(older) = older {
        let fits = volume_of(older) == volume_of(live)
            && older.meta.id < live.meta.id
            && older.meta.block_bytes == live.meta.block_bytes;
        if !fits {
            let wanted = format!("an older snapshot of the volume of `{snapshot}`");
            return invalid("from", base.unwrap_or_default(), &wanted);
        }
    }
    match intermediate || replicate {
        false => Ok(vec![Outgoing::new(live, older)]),
        true => Ok(chain(volumes, live, older)),
    }
}

/// The streams of the snapshots of a volume after `base`, or of all, up to `live`, each on the one
/// before.
fn chain<'a>(
    volumes: &'a Volumes,
    live: &Arc<OpenVolume>,
    base: Option<&'a Arc<OpenVolume>>,
) -> Vec<Outgoing> {
    // The origin of a clone is older than all snapshots of the clone.
    let first = base.map_or(0, |base| base.meta.id);
    let snapshots = volumes.snapshots_of(volume_of(live));
    let snapshots = snapshots.filter(|it| it.meta.id > first && it.meta.id <= live.meta.id);
    let mut base = base;
    let outgoing = |live| Outgoing::new(live, base.replace(live));
    snapshots.map(outgoing).collect()
}

/// The streams of all volumes that have a snapshot of this name: of each its snapshots after the
/// base, or all, up to that one. A clone of a snapshot that is sent, or that is a base, builds on
/// that snapshot and comes after it.
fn all_volumes(
    volumes: &Volumes,
    snapshot: &str,
    options: &SendOptions<'_>,
) -> Result<Vec<Outgoing>, VolumeError> {
    let base_name = options.base.map(|base| match base.strip_prefix('@') {
        Some(name) => Ok(name),
        None => invalid("from", base, "`@SNAPSHOT`, as the name of what is sent"),
    });
    let base_name = base_name.transpose()?;
    let all = volumes.by_id.values();
    let by_name: BTreeMap<&str, _> = all.clone().map(|it| (it.meta.name.as_str(), it)).collect();
    let of = |volume: &OpenVolume, snapshot: &str| {
        by_name.get(format!("{}@{snapshot}", volume.meta.name).as_str()).copied()
    };
    // By their numbers: the volumes, and of each the snapshot up to which it is sent.
    let sent = all.filter(|it| !it.meta.is_snapshot);
    let sent = sent.filter_map(|it| Some((it.meta.id, (it, of(it, snapshot)?))));
    let mut waiting: BTreeMap<u32, (&Arc<OpenVolume>, &Arc<OpenVolume>)> = sent.collect();
    if waiting.is_empty() {
        return Err(VolumeError::NoSuchVolume { name: format!("@{snapshot}") });
    }
    let origin = |volume: &OpenVolume| {
        volumes.by_id.get(&volume.origin()).filter(|origin| origin.meta.is_snapshot)
    };
    let (mut streams, mut there) = (Vec::new(), BTreeSet::new());
    while let Some(first) = waiting.keys().next().copied() {
        let waits = |id: &u32, volume: &OpenVolume| {
            let owner = origin(volume).and_then(|it| by_name.get(volume_of(it)));
            owner.is_some_and(|owner| owner.meta.id != *id && waiting.contains_key(&owner.meta.id))
        };
        let ready = waiting.iter().filter(|(id, (volume, _))| !waits(id, volume));
        let mut ready: Vec<u32> = ready.map(|(id, _)| *id).collect();
        if ready.is_empty() {
            // Origins form a tree, so one of them is ready.
            ready.push(first);
        }
        for (volume, live) in ready.iter().filter_map(|id| waiting.remove(id)) {
            // A volume without the base is new since then, and is sent from its beginning.
            let base = base_name.and_then(|base| of(volume, base));
            if let Some(base) = base.filter(|base| base.meta.id >= live.meta.id) {
                let wanted = format!("a snapshot that is older than `{}`", live.meta.name);
                return invalid("from", &base.meta.name, &wanted);
            }
            there.extend(base.map(|base| base.meta.id));
            let base = base.or(origin(volume).filter(|origin| there.contains(&origin.meta.id)));
            let chain = chain(volumes, live, base);
            there.extend(chain.iter().map(|outgoing| outgoing.live.meta.id));
            streams.extend(chain);
        }
    }
    Ok(streams)
}

/// Writes the records of a stream.
pub(crate) struct StreamPrinter<'a> {
    out: &'a mut dyn Write,
    chain: u64,
    number: u64,
    bytes: u64,
    #[cfg(feature = "c-codecs")]
    zstd: Option<(zstd_safe::CCtx<'static>, Vec<u8>)>,
}

impl<'a> StreamPrinter<'a> {
    /// Writes the head.
    pub(crate) fn begin(
        out: &'a mut dyn Write,
        head: &Head,
        is_compressed: bool,
    ) -> Result<StreamPrinter<'a>, VolumeError> {
        let bytes = head.print();
        out.write_all(&bytes).map_err(VolumeError::stream())?;
        let (chain, len) = (Head::chain(&bytes), bytes.len() as u64);
        #[cfg(not(feature = "c-codecs"))]
        let _ = is_compressed;
        Ok(StreamPrinter {
            out,
            chain,
            number: 0,
            bytes: len,
            #[cfg(feature = "c-codecs")]
            zstd: is_compressed.then(|| (zstd_safe::CCtx::create(), vec![0; PAYLOAD_MAX])),
        })
    }

    /// Writes blocks, compressed if that saves space.
    fn data(&mut self, first: u64, count: u64, payload: &[u8]) -> Result<(), VolumeError> {
        #[cfg(feature = "c-codecs")]
        if let Some((mut zstd, mut space)) = self.zstd.take() {
            let most = payload.len() - 1;
            let len = zstd.compress(&mut space[..most], payload, ZSTD_LEVEL).ok();
            let written = match len {
                Some(len) => self.record(Kind::Compressed, first, count, &space[..len]),
                None => self.record(Kind::Data, first, count, payload),
            };
            self.zstd = Some((zstd, space));
            return written;
        }
        self.record(Kind::Data, first, count, payload)
    }

    /// Writes a record.
    pub(crate) fn record(
        &mut self,
        kind: Kind,
        first: u64,
        count: u64,
        payload: &[u8],
    ) -> Result<(), VolumeError> {
        let record = Record { kind, len: payload.len() as u32, first, count, number: self.number };
        let mut bytes = [0; RECORD_BYTES];
        self.chain = record.print(self.chain, payload, &mut bytes);
        self.number += 1;
        self.bytes += (bytes.len() + payload.len()) as u64;
        let written = self.out.write_all(&bytes).and_then(|()| self.out.write_all(payload));
        written.map_err(VolumeError::stream())
    }
}

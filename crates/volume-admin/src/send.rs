//! Sends a snapshot, or its difference from an older one, as a stream of bytes. docs/format.md
//! describes the stream.

use std::io::Write;
use std::sync::{Arc, Weak};

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_volume::handle::VolumeHandle;
use blockyard_volume::map::Leaf;
use blockyard_volume::record::OpenVolume;
use blockyard_volume::{Compression, Pool, Running, VolumeError};
use blockyard_volume_format::stream::{Head, Kind, PAYLOAD_MAX, RECORD_BYTES, Record};

use crate::changes::{Changes, Run};

/// The result of sending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Blocks whose contents were sent.
    pub blocks: u64,
    /// Length of the stream in bytes.
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
    Sending::begin(running, snapshot, base)?.run(out, progress)
}

/// A snapshot that is ready to be sent. Neither it nor its base can be removed meanwhile.
pub struct Sending<D: SegmentStore> {
    pool: Arc<Pool<D>>,
    live: Arc<OpenVolume>,
    _base: Option<Arc<OpenVolume>>,
    head: Head,
    changes: Changes<'static>,
    /// Removes the snapshot afterwards. Dropped after the fields that use the snapshot.
    passing: Option<Passing<D>>,
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
        let mut sending = Sending::of(running.pool(), &passing.name, None)?;
        sending.head.name = format!("{volume}@now");
        sending.passing = Some(passing);
        Ok(sending)
    }

    /// Prepares to send as [`send`] does.
    ///
    /// # Errors
    /// If there is no such snapshot, or it does not build on the base.
    pub fn begin(
        running: &Running,
        snapshot: &str,
        base: Option<&str>,
    ) -> Result<Self, VolumeError> {
        Sending::of(running.pool(), snapshot, base)
    }
}

impl<D: SegmentStore> Sending<D> {
    fn of(pool: &Arc<Pool<D>>, snapshot: &str, base: Option<&str>) -> Result<Self, VolumeError> {
        let live = find(pool, "name", snapshot)?;
        // A locked volume is refused before anything is sent.
        pool.keys().of(&live.meta)?;
        let older = base.map(|base| find(pool, "from", base)).transpose()?;
        if let (Some(older), Some(base)) = (&older, base) {
            let volume = |name: &str| name.split('@').next().map(str::to_owned);
            let fits = volume(base) == volume(snapshot)
                && older.meta.id < live.meta.id
                && older.meta.block_bytes == live.meta.block_bytes;
            if !fits {
                let wanted = format!("an older snapshot of the volume of `{snapshot}`");
                let (field, value) = ("from", base.to_owned());
                return Err(VolumeError::Invalid { field, value, wanted });
            }
        }
        let head = Head {
            block_bytes: live.meta.block_bytes,
            blocks: live.meta.blocks,
            guid: live.meta.guid,
            name: snapshot.to_owned(),
            base: older.as_ref().map(|it| (it.meta.guid, it.meta.name.clone())),
        };
        let changes = {
            let (freezes, older, live) = (Arc::clone(pool), older.clone(), Arc::clone(&live));
            let blocks = live.meta.blocks;
            // Freeze both maps at one moment: cleaning moves blocks of both.
            let freeze = move || {
                let _volumes = freezes.volumes();
                (older.as_ref().map(|older| older.map.freeze()), live.map.freeze())
            };
            let (base, new) = freeze();
            let pool = Arc::clone(pool);
            let read = move |leaf: &Leaf| pool.segments().page(leaf);
            Changes::between(base, new, blocks, read).freezing_again(freeze)
        };
        let pool = Arc::clone(pool);
        Ok(Sending { pool, live, _base: older, head, changes, passing: None })
    }

    /// Sends the stream.
    ///
    /// # Errors
    /// If a block cannot be read, or the receiver is gone.
    pub fn run(
        self,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Sent, VolumeError> {
        // `_passing` is declared first, so that it is dropped last.
        let Sending { passing: _passing, pool, live, head, changes, .. } = self;
        let size = u64::from(head.block_bytes);
        let mut handle = VolumeHandle::open(&pool, Arc::clone(&live), Compression::None, 1)?;
        let mut stream = Printer::begin(out, &head)?;
        let mut payload = Vec::with_capacity(PAYLOAD_MAX);
        let mut sent = Sent::default();
        let most = PAYLOAD_MAX as u64 / size;
        for run in changes {
            let Run { first, count, is_hole } = run?;
            if is_hole {
                stream.record(Kind::Zeros, first, count, &[])?;
                continue;
            }
            let mut at = first;
            while at < first + count {
                let part = most.min(first + count - at);
                payload.clear();
                let len = (part * size) as usize;
                let status = handle.read(at * size, len, |bytes| payload.extend_from_slice(bytes));
                if status != Status::Ok {
                    let name = head.name.clone();
                    return Err(VolumeError::Unreadable { name, first: at, count: part, status });
                }
                stream.record(Kind::Data, at, part, &payload)?;
                at += part;
                sent.blocks += part;
                progress(stream.bytes);
            }
        }
        stream.record(Kind::End, head.blocks, 0, &[])?;
        stream.out.flush().map_err(VolumeError::stream())?;
        Ok(Sent { bytes: stream.bytes, ..sent })
    }
}

fn find<D: SegmentStore>(
    pool: &Pool<D>,
    field: &'static str,
    name: &str,
) -> Result<Arc<OpenVolume>, VolumeError> {
    let live = pool.find(name)?;
    if !live.meta.is_snapshot {
        let (value, wanted) = (name.to_owned(), "VOLUME@SNAPSHOT".to_owned());
        return Err(VolumeError::Invalid { field, value, wanted });
    }
    Ok(live)
}

/// Writes the records of a stream.
struct Printer<'a> {
    out: &'a mut dyn Write,
    chain: u64,
    number: u64,
    bytes: u64,
}

impl<'a> Printer<'a> {
    fn begin(out: &'a mut dyn Write, head: &Head) -> Result<Printer<'a>, VolumeError> {
        let bytes = head.print();
        out.write_all(&bytes).map_err(VolumeError::stream())?;
        let (chain, len) = (Head::chain(&bytes), bytes.len() as u64);
        Ok(Printer { out, chain, number: 0, bytes: len })
    }

    fn record(
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

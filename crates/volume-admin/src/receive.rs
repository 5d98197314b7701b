//! Receiving a snapshot: a stream of [`crate::send`] becomes a snapshot and its volume. They appear
//! completely or not at all. Until the stream was read to its end and everything is durable, the
//! data are in a hidden volume; then one change of the catalogue puts it in destination.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_volume::admin::now;
use blockyard_volume::config::SIZE_MAX;
use blockyard_volume::handle::{Outcome, VolumeHandle};
use blockyard_volume::map::{Leaf, Map};
use blockyard_volume::names::{invalid, new_volume_name, snapshot_name, volume_name};
use blockyard_volume::pool::{HIDDEN_PREFIX, Pool};
use blockyard_volume::record::OpenVolume;
use blockyard_volume::{Compression, Running, VolumeError};
use blockyard_volume_format::catalogue::{Change, VolumeMeta};
use blockyard_volume_format::stream::{HEAD_BYTES, Head, Kind, MAGIC, RECORD_BYTES, Record};
use blockyard_volume_format::{BLOCK_BYTES_MAX, FormatError, NODE_BLOCKS};

use crate::changes::Changes;

/// Records that are in flight to the log at once.
const RECORDS: usize = 16;

/// Longest write, in bytes.
const WRITE_BYTES: u64 = 256 << 10;

/// Longest sleep before the thread checks again whether memory is free.
const LOOK: Duration = Duration::from_millis(5);

/// The result of receiving a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The name of the new snapshot.
    pub snapshot: String,
    /// Blocks whose contents were in the stream.
    pub blocks: u64,
    /// Length of the stream in bytes.
    pub bytes: u64,
}

/// A stream that is read record by record.
pub struct Incoming<'a> {
    input: &'a mut dyn Read,
    /// The head of the stream.
    pub head: Head,
    chain: u64,
    number: u64,
    /// The next record must begin at this block or a later one.
    from: u64,
    bytes: u64,
    payload: Vec<u8>,
}

/// The next part of a stream.
#[derive(Debug)]
pub enum Part<'a> {
    /// Blocks with contents.
    Data {
        /// The first block.
        first: u64,
        /// Contents of all blocks.
        bytes: &'a [u8],
    },
    /// Blocks that are zeros.
    Zeros {
        /// The first block.
        first: u64,
        /// Number of blocks.
        count: u64,
    },
    /// The end of the stream.
    End,
}

impl<'a> Incoming<'a> {
    /// Reads the head.
    ///
    /// # Errors
    /// If the head cannot be read, or has a format that this program does not know.
    pub fn begin(input: &'a mut dyn Read) -> Result<Incoming<'a>, VolumeError> {
        let mut bytes = [0; HEAD_BYTES];
        fill(input, &mut bytes, 0)?;
        let head = parse_head(&bytes)?;
        let (chain, len) = (Head::chain(&bytes), HEAD_BYTES as u64);
        let payload = Vec::new();
        Ok(Incoming { input, head, chain, number: 0, from: 0, bytes: len, payload })
    }

    /// Reads the next record.
    ///
    /// # Errors
    /// If the record cannot be read or is damaged, or the input ends before the end record.
    pub fn part(&mut self) -> Result<Part<'_>, VolumeError> {
        let mut bytes = [0; RECORD_BYTES];
        let offset = self.bytes;
        fill(self.input, &mut bytes, self.bytes)?;
        self.bytes += bytes.len() as u64;
        let invalid = |source| VolumeError::Stream { offset, source };
        let record = Record::parse(&bytes, &self.head, self.number, self.from);
        let record = record.map_err(invalid)?;
        self.payload.resize(record.len as usize, 0);
        fill(self.input, &mut self.payload, self.bytes)?;
        self.bytes += u64::from(record.len);
        self.chain = Record::verify(&bytes, self.chain, &self.payload).map_err(invalid)?;
        self.number += 1;
        self.from = record.first + record.count;
        let Record { kind, first, count, .. } = record;
        Ok(match kind {
            Kind::Data => Part::Data { first, bytes: &self.payload },
            Kind::Zeros => Part::Zeros { first, count },
            Kind::End => Part::End,
        })
    }

    /// How many bytes were read.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Reads the head of a stream that is to become the first volume of a pool, before the pool is
/// created. Checks the head and the name, so that a refused stream does not leave a pool. Returns
/// the bytes of the head.
///
/// # Errors
/// If the head cannot be read, or the stream is incremental.
pub fn begin_new(name: &str, input: &mut dyn Read) -> Result<Vec<u8>, VolumeError> {
    match name.contains('@') {
        true => _ = snapshot_name(name)?,
        false => volume_name(name)?,
    }
    let mut bytes = [0; HEAD_BYTES];
    fill(input, &mut bytes, 0)?;
    let head = parse_head(&bytes)?;
    match head.base {
        None => Ok(bytes.to_vec()),
        Some((_, base)) => {
            let volume = name.split('@').next().unwrap_or_default().to_owned();
            Err(VolumeError::NoBase { stream: head.name, base, volume })
        }
    }
}

fn parse_head(bytes: &[u8; HEAD_BYTES]) -> Result<Head, VolumeError> {
    Head::parse(bytes).map_err(|source| match source {
        FormatError::Magic { .. } => VolumeError::NotAStream,
        source => VolumeError::Stream { offset: 0, source },
    })
}

/// Fills `bytes` from the input, of which `before` bytes were read earlier.
fn fill(input: &mut dyn Read, bytes: &mut [u8], before: u64) -> Result<(), VolumeError> {
    let mut at = 0;
    while at < bytes.len() {
        match input.read(&mut bytes[at..]) {
            Ok(0) => {
                let is_other = bytes[..at].iter().zip(&MAGIC).any(|(byte, magic)| byte != magic);
                return Err(match before == 0 && is_other {
                    true => VolumeError::NotAStream,
                    false => VolumeError::StreamEnds { offset: before + at as u64 },
                });
            }
            Ok(len) => at += len,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(VolumeError::Pipe(error)),
        }
    }
    Ok(())
}

/// Receives a stream as the volume `name`, with a snapshot of the name that it had, or as
/// `VOLUME@SNAPSHOT`. An incremental stream needs its base snapshot here, and a volume that is
/// unchanged since then. `progress` is called with the number of bytes read.
///
/// # Errors
/// If the stream is damaged, cut, or does not fit the pool: then nothing has changed.
pub fn receive(
    running: &Running,
    name: &str,
    input: &mut dyn Read,
    progress: &mut dyn FnMut(u64),
) -> Result<Received, VolumeError> {
    let mut incoming = Incoming::begin(input)?;
    let destination = Destination::find(running, name, &incoming.head)?;
    // Hold the volume before it is checked, so that no client writes to it afterwards.
    let _held = destination.present.as_ref().map(|(volume, _)| running.hold(volume)).transpose()?;
    destination.check(running.pool())?;
    let hidden = destination.begin(running, &incoming.head)?;
    let done = (|| {
        let blocks = take(running.pool(), &hidden, &mut incoming, progress)?;
        running.pool().change(
            &destination.volume,
            destination.end(running.pool(), &hidden, &incoming.head)?,
        )?;
        Ok(blocks)
    })();
    match done {
        Ok(blocks) => {
            Ok(Received { snapshot: destination.snapshot, blocks, bytes: incoming.bytes() })
        }
        Err(error) => {
            running.forget(&hidden);
            Err(error)
        }
    }
}

/// The volume and snapshot that a stream makes.
struct Destination {
    volume: String,
    snapshot: String,
    /// The volume that exists, and its snapshot that the stream builds on.
    present: Option<(VolumeMeta, VolumeMeta)>,
}

impl Destination {
    fn find(running: &Running, name: &str, head: &Head) -> Result<Destination, VolumeError> {
        let Head { block_bytes, blocks, .. } = *head;
        if !(4096..=BLOCK_BYTES_MAX).contains(&block_bytes) || block_bytes < running.pool().align()
        {
            let wanted = "blocks of 4k, 8k, 16k, 32k or 64k";
            return invalid("stream", &format!("blocks of {block_bytes} bytes"), wanted);
        }
        if blocks.saturating_mul(block_bytes.into()) > SIZE_MAX {
            return invalid("stream", &format!("{blocks} blocks of {block_bytes} bytes"), "1P");
        }
        let (volume, snapshot) = match name.split_once('@') {
            Some((volume, snapshot)) => (volume, snapshot),
            None => (name, snapshot_name(&head.name)?.1),
        };
        volume_name(volume)?;
        let snapshot = format!("{volume}@{snapshot}");
        snapshot_name(&snapshot)?;
        running.is_free(&snapshot)?;
        let volume = volume.to_owned();
        let Some((guid, base)) = &head.base else {
            new_volume_name(&volume)?;
            running.is_free(&volume)?;
            return Ok(Destination { volume, snapshot, present: None });
        };
        let pool = running.pool();
        let Ok(meta) = pool.find(&volume).map(|live| live.meta.clone()) else {
            let (stream, base) = (head.name.clone(), base.clone());
            return Err(VolumeError::NoBase { stream, base, volume });
        };
        let prefix = format!("{volume}@");
        let list = pool.list();
        let mut snapshots = list.iter().filter(|it| it.name.starts_with(&prefix));
        let found = snapshots.clone().find(|it| it.guid == *guid).cloned();
        let Some(found) = found else {
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
        if meta.block_bytes != head.block_bytes {
            let wanted = format!("blocks of {} bytes, as `{volume}` has", meta.block_bytes);
            return invalid("stream", &head.block_bytes.to_string(), &wanted);
        }
        Ok(Destination { volume, snapshot, present: Some((meta, found)) })
    }

    /// Checks that the volume is in the state that the stream expects.
    fn check<D: SegmentStore>(&self, pool: &Arc<Pool<D>>) -> Result<(), VolumeError> {
        let Some((meta, base)) = &self.present else { return Ok(()) };
        let busy = |why: String| Err(VolumeError::Busy { name: self.volume.clone(), why });
        if pool.find(&self.volume)?.meta != *meta {
            return busy("being changed; try again".to_owned());
        }
        if has_changed(pool, &self.volume, &base.name)? {
            return busy(format!("no longer as it was in `{0}`; roll it back to that", base.name));
        }
        Ok(())
    }

    fn hidden(&self) -> String {
        format!("{HIDDEN_PREFIX}{}", self.volume)
    }

    /// Creates the hidden volume and returns its name.
    fn begin(&self, running: &Running, head: &Head) -> Result<String, VolumeError> {
        let pool = running.pool();
        let name = self.hidden();
        if pool.find(&name).is_ok() {
            let why = "being received already".to_owned();
            return Err(VolumeError::Busy { name: self.volume.clone(), why });
        }
        let Head { block_bytes, blocks, .. } = *head;
        let origin = self.present.as_ref().map_or(0, |(_, base)| base.id);
        let is_snapshot = false;
        let meta = VolumeMeta {
            id: 0,
            name: name.clone(),
            is_snapshot,
            origin,
            block_bytes,
            blocks,
            guid: 0,
            reserved_bytes: 0,
            created: now(),
            key: 0,
        };
        let Some((_, base)) = &self.present else {
            pool.change(&self.volume, Change::Create(meta))?;
            return Ok(name);
        };
        pool.change(&self.volume, Change::Copy(VolumeMeta { blocks: base.blocks, ..meta }))?;
        if base.blocks != blocks {
            let id = pool.find(&name)?.meta.id;
            if let Err(error) = pool.change(&self.volume, Change::Resize { id, blocks }) {
                running.forget(&name);
                return Err(error);
            }
        }
        Ok(name)
    }

    /// The change of the catalogue that puts the hidden volume in destination.
    fn end<D: SegmentStore>(
        &self,
        pool: &Pool<D>,
        hidden: &str,
        head: &Head,
    ) -> Result<Change, VolumeError> {
        let meta = pool.find(hidden)?.meta.clone();
        let origin = meta.id;
        let mut changes = Vec::new();
        match &self.present {
            None => {
                let name = self.volume.clone();
                changes.push(Change::Copy(VolumeMeta { name, origin, ..meta.clone() }));
            }
            Some((volume, _)) => {
                if volume.blocks != head.blocks {
                    changes.push(Change::Resize { id: volume.id, blocks: head.blocks });
                }
                changes.push(Change::Rollback { id: volume.id, to: origin });
            }
        }
        let (name, guid) = (self.snapshot.clone(), head.guid);
        let is_snapshot = true;
        changes.push(Change::Copy(VolumeMeta { name, origin, guid, is_snapshot, ..meta }));
        changes.push(Change::Destroy { id: origin });
        Ok(Change::Several(changes))
    }
}

/// Whether a volume differs from its snapshot.
fn has_changed<D: SegmentStore>(
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
fn take<D: SegmentStore>(
    pool: &Arc<Pool<D>>,
    hidden: &str,
    incoming: &mut Incoming<'_>,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, VolumeError> {
    let live = pool.find(hidden)?;
    let size = u64::from(live.meta.block_bytes);
    let mut filler = Filler::new(pool, live)?;
    let mut blocks = 0;
    loop {
        match incoming.part()? {
            Part::Data { first, bytes } => {
                filler.write(first, bytes)?;
                blocks += bytes.len() as u64 / size;
            }
            Part::Zeros { first, count } => filler.zero(first, count)?,
            Part::End => break,
        }
        progress(incoming.bytes());
    }
    filler.finish()?;
    progress(incoming.bytes());
    Ok(blocks)
}

/// Writes into a volume, with several records in flight.
struct Filler<D: SegmentStore> {
    handle: VolumeHandle<D>,
    size: u64,
    part_bytes: u64,
}

impl<D: SegmentStore> Filler<D> {
    fn new(pool: &Arc<Pool<D>>, live: Arc<OpenVolume>) -> Result<Filler<D>, VolumeError> {
        let size = u64::from(live.meta.block_bytes);
        let part_bytes = WRITE_BYTES.min(u64::from(pool.segments().bytes()) / 4).max(size);
        let handle = VolumeHandle::open(pool, live, Compression::default(), RECORDS)?;
        Ok(Filler { handle, size, part_bytes })
    }

    fn write(&mut self, first: u64, bytes: &[u8]) -> Result<(), VolumeError> {
        let count = bytes.len() as u64 / self.size;
        let mut parts = Vec::new();
        Map::each_span(first, count, |span, from, to| parts.push((span, from, to)));
        let mut bytes = bytes;
        for (span, from, to) in parts {
            let mut at = (span as u64 * NODE_BLOCKS + u64::from(from)) * self.size;
            let mut left = u64::from(to - from) * self.size;
            while left > 0 {
                let len = left.min(self.part_bytes / self.size * self.size);
                let (part, rest) = bytes.split_at(len as usize);
                let fill = |from: usize, into: &mut [u8]| {
                    into.copy_from_slice(&part[from..from + into.len()]);
                };
                self.until_taken(|handle| handle.write(at, part.len(), &fill, 0, false))?;
                (at, left, bytes) = (at + len, left - len, rest);
            }
        }
        Ok(())
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

    fn finish(mut self) -> Result<(), VolumeError> {
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

//! A handle is one thread's handle to a volume: it reads and writes blocks. The layer above handles
//! requests, the layer below records and map entries.
//!
//! A write of part of a block reads the rest of the block, and takes effect only if the block has
//! not changed since; otherwise it starts again. So no range is ever locked.
//!
//! After the writes come the leaves that clients' threads read into memory before a write, so that
//! the committer need not read them when it changes the map; and what a queue needs to read many
//! blocks at once: where blocks are, and how to decode them.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Status;
use blockyard_store::SegmentStore;
use blockyard_store::buffer::{Buffer, ScratchBuffer};
use blockyard_store::log_writer::{Payload, Stored};
use blockyard_sync::completion_queue::{CompletionQueue, Receiver};
use blockyard_sync::rcu_cell::RcuReader;
use blockyard_volume_format::bytes::crc;
use blockyard_volume_format::entry::{Codec, Entry};
use blockyard_volume_format::sealed::{DATA, SealedBlock};
use blockyard_volume_format::{FAN, NODE_BLOCKS};

use crate::codec::{self, Compression, Packer};
use crate::encryption::{BadBlock, BlockCipher, Undecodable, sealed_bytes};
use crate::error::VolumeError;
use crate::map::{Leaf, Lookup, Map, NotResident, What};
use crate::pool::{Pool, WriteAck};
use crate::record::{Body, OpenVolume, Record, Reply, ReplyTo};
use crate::segments::Files;

/// Bytes per read.
const SCRATCH_BYTES: usize = 256 << 10;

/// Most blocks looked up while the map's lock is held.
const LOOKUP_MAX: u64 = 64;

/// Longest sleep of a handle that is being closed, until it checks for answers again.
const CLOSE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The token of a write that is answered early: no request waits for the committer's reply.
pub const NO_REPLY: u32 = u32::MAX;

/// The first and last block of a write, if it covers only a part of them, as they were when the
/// rest was read.
type Edges = [Option<(u64, Lookup)>; 2];

/// The result of starting a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request is in flight; its token will be returned.
    Taken,
    /// The request cannot start now: there is no memory for it, or it would be answered early but
    /// copies the rest of a block from a write that may still be refused.
    Full,
    /// The request has completed.
    Ended(Status),
}

/// Fills the part of block `index` of a write that is in `part`.
fn fill_part(index: usize, block: &mut [u8], part: &Range<usize>, fill: &dyn Fn(usize, &mut [u8])) {
    let start = index * block.len();
    let (from, to) = (part.start.max(start), part.end.min(start + block.len()));
    fill(from - part.start, &mut block[from - start..to - start]);
}

/// One thread's handle to a volume.
pub struct VolumeHandle<D: SegmentStore> {
    pool: Arc<Pool<D>>,
    volume: Arc<OpenVolume>,
    packer: Packer,
    /// Of an encrypted volume.
    cipher: Option<BlockCipher>,
    /// Whether the volume is encrypted and this handle has no cipher: it passes blocks on as they
    /// are stored, and refuses everything else.
    is_sealed: bool,
    files: RcuReader<Files<D::File>>,
    write_ack: RcuReader<WriteAck>,
    replies: Receiver<Reply>,
    /// Number of records without an answer.
    out: usize,
    /// While set, the committer is woken once for a whole batch.
    holds: bool,
    wakes: bool,
    /// Places in the committer's completion queue that are reserved for the parts of the request
    /// being started.
    reserved: Option<u32>,
    found: Vec<Lookup>,
    /// Stored bytes, as they are read or pending. Encrypted ones are decrypted in place.
    stored: ScratchBuffer,
    /// One uncompressed block.
    plain: ScratchBuffer,
    /// One block while it is compressed.
    packing: ScratchBuffer,
}

impl<D: SegmentStore> VolumeHandle<D> {
    /// Opens a handle with space for this number of records in flight.
    ///
    /// # Errors
    /// If the volume is encrypted, and the pool does not have its key.
    pub fn open(
        pool: &Arc<Pool<D>>,
        volume: Arc<OpenVolume>,
        compression: Compression,
        records: usize,
    ) -> Result<VolumeHandle<D>, VolumeError> {
        let cipher = pool.keys().of(&volume.meta)?.map(BlockCipher::new).transpose()?;
        Ok(VolumeHandle::with_cipher(pool, volume, compression, records, cipher))
    }

    /// Opens a handle to an encrypted volume, for [`VolumeHandle::read_sealed`] and
    /// [`VolumeHandle::write_sealed`], without the key of the volume. Raw streams use it; devices
    /// have no such handle.
    ///
    /// # Errors
    /// If the volume is not encrypted.
    pub fn open_sealed(
        pool: &Arc<Pool<D>>,
        volume: Arc<OpenVolume>,
        records: usize,
    ) -> Result<VolumeHandle<D>, VolumeError> {
        if volume.meta.key == 0 {
            return Err(VolumeError::NotEncrypted { name: volume.meta.name.clone() });
        }
        Ok(VolumeHandle::with_cipher(pool, volume, Compression::None, records, None))
    }

    /// A handle with the cipher of an encrypted volume, or without one.
    fn with_cipher(
        pool: &Arc<Pool<D>>,
        volume: Arc<OpenVolume>,
        compression: Compression,
        records: usize,
        cipher: Option<BlockCipher>,
    ) -> VolumeHandle<D> {
        VolumeHandle {
            is_sealed: cipher.is_none() && volume.meta.key != 0,
            cipher,
            files: pool.segments().reader(),
            write_ack: pool.write_ack(),
            replies: CompletionQueue::open(records),
            out: 0,
            holds: false,
            wakes: false,
            reserved: None,
            found: Vec::with_capacity(LOOKUP_MAX as usize),
            stored: ScratchBuffer::new(pool.memory()),
            plain: ScratchBuffer::new(pool.memory()),
            packing: ScratchBuffer::new(pool.memory()),
            pool: Arc::clone(pool),
            volume,
            packer: Packer::new(compression),
        }
    }

    /// Compresses later writes in this way.
    pub(crate) fn set_compression(&mut self, compression: Compression) {
        if self.packer.compression() != compression {
            self.packer = Packer::new(compression);
        }
    }

    /// Number of records without an answer.
    pub fn out(&self) -> usize {
        self.out
    }

    /// Takes an answer out of the completion queue.
    pub fn take(&mut self) -> Option<Reply> {
        let reply = self.replies.take()?;
        self.pool.dismiss();
        self.out -= 1;
        Some(reply)
    }

    /// Whether an answer is waiting.
    pub fn is_any(&self) -> bool {
        self.replies.is_any()
    }

    /// The completion queue in which answers arrive.
    pub fn completion_queue(&self) -> &Arc<CompletionQueue<Reply>> {
        self.replies.completion_queue()
    }

    /// From now on [`VolumeHandle::release_all`] wakes the committer, rather than each record.
    pub(crate) fn hold(&mut self) {
        self.holds = true;
    }

    /// Wakes the committer if records were posted since [`VolumeHandle::hold`].
    pub(crate) fn release_all(&mut self) {
        self.holds = false;
        if std::mem::take(&mut self.wakes) {
            self.pool.records().event_count().notify();
        }
    }

    fn wake(&mut self) {
        if self.holds {
            self.wakes = true;
        } else {
            self.pool.records().event_count().notify();
        }
    }

    pub(crate) fn block_bytes(&self) -> usize {
        self.volume.meta.block_bytes as usize
    }

    fn reply(&self, token: u32) -> Option<ReplyTo> {
        (token != NO_REPLY).then(|| ReplyTo::new(self.replies.completion_queue(), token))
    }

    /// Whether a write may be answered before it is in the log. Not while space is low: a later
    /// lack of space could not be reported for that write.
    pub fn may_answer_early(&mut self) -> bool {
        **self.write_ack.get() == WriteAck::InMemory
    }

    /// Reads a range of bytes, in order.
    pub fn read(&mut self, at: u64, len: usize, mut sink: impl FnMut(&[u8])) -> Status {
        if self.is_sealed {
            return Status::NotSupp;
        }
        let size = self.block_bytes() as u64;
        let (mut at, end) = (at, at + len as u64);
        while at < end {
            let first = at / size;
            let (span, from) = Map::place(first);
            let most = (end.div_ceil(size) - first).min(LOOKUP_MAX);
            let count = most.min(blockyard_volume_format::NODE_BLOCKS - u64::from(from));
            let mut found = std::mem::take(&mut self.found);
            self.volume.map.with(span, |span| {
                found.extend((from..from + count as u32).map(|block| span.find(block)));
            });
            let mut next = 0;
            let mut status = Status::Ok;
            while next < found.len() && status.is_ok() {
                let block = first + next as u64;
                let window = |index: u64| {
                    let (start, stop) = ((block + index) * size, (block + index + 1) * size);
                    (at.max(start) - start) as usize..(end.min(stop) - start) as usize
                };
                match self.read_some(block, &found[next..], window, &mut sink) {
                    Ok(count) => next += count,
                    Err(error) => status = error,
                }
                at = at.max((first + next as u64) * size);
            }
            found.clear();
            self.found = found;
            if !status.is_ok() {
                return status;
            }
        }
        Status::Ok
    }

    /// Reads the first of the found blocks, and those after it that follow it on disk. Returns
    /// their number.
    fn read_some(
        &mut self,
        block: u64,
        found: &[Lookup],
        window: impl Fn(u64) -> Range<usize>,
        sink: &mut impl FnMut(&[u8]),
    ) -> Result<usize, Status> {
        let size = self.block_bytes();
        let run = match &found[0] {
            Lookup::Disk(entry) if entry.codec() == Codec::Raw && self.cipher.is_none() => {
                self.run(entry, &found[1..])
            }
            _ => 1,
        };
        if run > 1
            && let Lookup::Disk(entry) = &found[0]
        {
            let files = self.files.get();
            let stored = self.stored.first(run * size);
            let read = self.pool.segments().read(files, entry.address(), stored).is_ok();
            let whole = |(bytes, found): (&[u8], &Lookup)| match found {
                Lookup::Disk(entry) => crc(bytes) == entry.crc(),
                _ => false,
            };
            if read && stored.chunks(size).zip(found).all(whole) {
                for (index, bytes) in stored.chunks(size).enumerate() {
                    sink(&bytes[window(index as u64)]);
                }
                return Ok(run);
            }
        }
        self.load(block, found[0].clone())?;
        sink(&self.plain[window(0)]);
        Ok(1)
    }

    /// The number of uncompressed blocks, from the first on, that are consecutive on disk.
    fn run(&self, first: &Entry, rest: &[Lookup]) -> usize {
        let size = self.block_bytes() as u64;
        let (segment, _) = self.pool.segments().split(first.address());
        let follows = |(index, found): &(u64, &Lookup)| match found {
            Lookup::Disk(entry) => {
                let address = first.address() + index * size;
                entry.codec() == Codec::Raw
                    && entry.address() == address
                    && self.pool.segments().split(address).0 == segment
            }
            _ => false,
        };
        let most = SCRATCH_BYTES / size as usize - 1;
        1 + (1..).zip(rest).take(most).take_while(follows).count()
    }

    /// Reads a block into `plain` and returns what the map said of it.
    fn load(&mut self, block: u64, found: Lookup) -> Result<Lookup, Status> {
        let decode = |handle: &mut Self, codec: Codec, len: usize| {
            let place = handle.decode((block, codec), len)?;
            handle.move_to_plain(place);
            Ok(())
        };
        let found = self.load_stored(block, found, decode)?;
        match &found {
            Lookup::Zero | Lookup::Cleared { .. } => {
                let size = self.block_bytes();
                self.plain.first(size).fill(0);
            }
            Lookup::Memory { payload, index, .. } => {
                let place = self.decode_pending(block, payload, *index);
                self.move_to_plain(place);
            }
            Lookup::Disk(_) | Lookup::NotResident(_) => {}
        }
        Ok(found)
    }

    /// Finds a block, and reads it into `stored` if it is on disk, where `decode` has to accept
    /// its codec and this number of its bytes. Returns what the map said of it.
    ///
    /// A block that is not intact may have moved meanwhile: it is looked up again, until the map
    /// names the place that was read.
    fn load_stored(
        &mut self,
        block: u64,
        mut found: Lookup,
        decode: impl Fn(&mut Self, Codec, usize) -> Result<(), Undecodable>,
    ) -> Result<Lookup, Status> {
        let mut failed: Option<(Entry, BadBlock)> = None;
        loop {
            let entry = match &found {
                Lookup::Zero | Lookup::Cleared { .. } | Lookup::Memory { .. } => return Ok(found),
                Lookup::Disk(entry) => *entry,
                Lookup::NotResident(leaf) => {
                    let fetched = self.fetch(leaf);
                    let now = self.lookup(block);
                    // Another page may name the block by now, and its old bytes may be gone from
                    // the disk.
                    let same = matches!(&now, Lookup::NotResident(now) if Arc::ptr_eq(now, leaf));
                    if same {
                        fetched?;
                    }
                    found = now;
                    continue;
                }
            };
            if let Some((known, error)) = failed.take()
                && known == entry
            {
                return Err(self.is_bad(block, &entry, error));
            }
            let files = self.files.get();
            let stored = self.stored.first(entry.stored_bytes() as usize);
            let is_whole = |bytes: &[u8]| crc(bytes) == entry.crc();
            let segments = self.pool.segments();
            let read = segments.read_whole(files, entry.address(), stored, &is_whole);
            if let Ok(1..) = read {
                let (name, address) = (&self.volume.meta.name, entry.address());
                tracing::debug!("{name}: block {block}, at {address} of the pool, was mended");
            }
            let mut wrong = Undecodable::Damaged;
            if read.is_ok() && is_whole(stored) {
                let len = stored.len();
                match decode(self, entry.codec(), len) {
                    Ok(()) => return Ok(found),
                    Err(why) => wrong = why,
                }
            }
            failed = Some((entry, read.err().ok_or(wrong)));
            found = self.lookup(block);
        }
    }

    /// Logs that a block cannot be read, and returns the status: damaged, or a read error.
    #[cold]
    pub(crate) fn is_bad(&self, block: u64, entry: &Entry, error: BadBlock) -> Status {
        let (name, address) = (&self.volume.meta.name, entry.address());
        let (what, status) = match error {
            Err(Undecodable::Damaged) => (", is damaged".to_owned(), Status::Protection),
            Err(Undecodable::NotAuthentic) => (
                ", is not authentic: it was not written there with this key".to_owned(),
                Status::Protection,
            ),
            Ok(error) => (format!(": {error}"), Status::Medium),
        };
        match self.pool.segments().unreadable().due(1, Instant::now()) {
            Some(1) => tracing::error!("{name}: block {block}, at {address} of the pool{what}"),
            Some(count) => tracing::error!(
                "{name}: block {block}, at {address} of the pool{what}; {count} reads of blocks \
                 failed since the last line, and `blockyard volume scrub` lists the damage"
            ),
            None => tracing::debug!("{name}: block {block}, at {address} of the pool{what}"),
        }
        status
    }

    /// Reserves places for the records of one request, if there are enough. Until
    /// [`VolumeHandle::release`] none of them is refused for lack of a place or of memory, so a
    /// request in parts starts as a whole or not at all.
    pub fn reserve(&mut self, records: u32) -> bool {
        debug_assert!(self.reserved.is_none(), "one request is begun at a time");
        let all = self.pool.admit_all(records);
        if all {
            self.reserved = Some(records);
        }
        all
    }

    /// Releases the reserved places that were not needed.
    pub fn release(&mut self) {
        self.pool.dismiss_all(self.reserved.take().unwrap_or(0));
    }

    fn admit(&mut self) -> bool {
        match &mut self.reserved {
            Some(left) if *left > 0 => {
                *left -= 1;
                true
            }
            _ => self.pool.admit(),
        }
    }

    /// Memory for the blocks of a write. A part of a request that is already in flight gets it
    /// regardless of the limit: it is one block.
    fn memory(&self, len: usize) -> Option<Buffer> {
        let memory = self.pool.memory();
        memory.take(len).or_else(|| self.reserved.map(|_| memory.take_beyond(len)))
    }

    /// Writes a range of bytes in one span. `fill` writes the bytes from an offset on, block by
    /// block; it may be called more than once.
    pub fn write(
        &mut self,
        at: u64,
        len: usize,
        fill: &dyn Fn(usize, &mut [u8]),
        token: u32,
        durable: bool,
    ) -> Outcome {
        if self.is_sealed {
            return Outcome::Ended(Status::NotSupp);
        }
        if self.pool.is_latched() {
            return Outcome::Ended(Status::IoErr);
        }
        let size = self.block_bytes() as u64;
        let (first, end) = (at / size, (at + len as u64).div_ceil(size));
        let offset = (at % size) as usize;
        if !self.admit() {
            return Outcome::Full;
        }
        let outcome = self.attempt(first, end, offset, len, fill, token, durable);
        if outcome != Outcome::Taken {
            self.pool.dismiss();
        }
        outcome
    }

    /// Retries until no edge block changes during the attempt.
    #[expect(clippy::too_many_arguments, reason = "the one loop of its caller")]
    fn attempt(
        &mut self,
        first: u64,
        end: u64,
        offset: usize,
        len: usize,
        fill: &dyn Fn(usize, &mut [u8]),
        token: u32,
        durable: bool,
    ) -> Outcome {
        let size = self.block_bytes() as u64;
        // A block is encrypted where `fill` writes it, after its salt, number and length.
        let (distance, lead) = match self.cipher {
            Some(_) => (sealed_bytes(size as usize, self.pool.seal_align()), DATA),
            None => (size as usize, 0),
        };
        if let Err(status) = self.prefetch(first, end) {
            return Outcome::Ended(status);
        }
        loop {
            let Some(mut raw) = self.memory((end - first) as usize * distance) else {
                return Outcome::Full;
            };
            let mut edges = [None, None];
            let is_cut = ((offset + len) as u64) < (end - first) * size;
            let mut partial = [(first, offset > 0), (end - 1, is_cut)];
            if end - first == 1 {
                partial = [(first, partial[0].1 || partial[1].1), (first, false)];
            }
            for (edge, (block, _)) in edges.iter_mut().zip(partial).filter(|(_, it)| it.1) {
                match self.load_now(block) {
                    Ok(found) => *edge = Some((block, found)),
                    Err(status) => return Outcome::Ended(status),
                }
                let at = (block - first) as usize * distance + lead;
                raw[at..at + size as usize].copy_from_slice(&self.plain[..size as usize]);
            }
            let copied = [0, 1].map(|at| edges[at].as_ref().and_then(|(_, it)| it.unsettled()));
            // A write that was answered could not be refused later together with the write that it
            // copies from.
            if token == NO_REPLY && copied != [None, None] {
                return Outcome::Full;
            }
            let part = offset..offset + len;
            let payload = match &self.cipher {
                None => self.seal(raw, &part, fill),
                Some(_) => match self.encrypt(raw, first, &part, fill) {
                    Ok(payload) => Some(payload),
                    Err(error) => {
                        tracing::error!("{}: {error}", self.volume.meta.name);
                        return Outcome::Ended(Status::IoErr);
                    }
                },
            };
            let Some(payload) = payload else { return Outcome::Full };
            let what = What::Data { payload: Arc::clone(&payload), index: 0 };
            let body = Body::Write(payload);
            if self.begin(first, end, what, body, (&edges, copied), token, durable) {
                return Outcome::Taken;
            }
        }
    }

    fn load_now(&mut self, block: u64) -> Result<Lookup, Status> {
        let found = self.lookup(block);
        self.load(block, found)
    }

    /// Looks up a block in the map.
    fn lookup(&self, block: u64) -> Lookup {
        let (span, at) = Map::place(block);
        self.volume.map.with(span, |span| span.find(at))
    }

    /// Fills a part of some blocks, compresses and checksums them. It handles one block after the
    /// other, while the block is in the CPU's cache.
    fn seal(
        &mut self,
        mut raw: Buffer,
        part: &Range<usize>,
        fill: &dyn Fn(usize, &mut [u8]),
    ) -> Option<Arc<Payload>> {
        let size = self.block_bytes();
        let mut blocks = Vec::with_capacity(raw.len() / size);
        if self.packer.is_idle() {
            for (index, block) in raw.chunks_mut(size).enumerate() {
                fill_part(index, block, part, fill);
                let (offset, len) = ((index * size) as u32, size as u32);
                blocks.push(Stored { offset, len, codec: Codec::Raw, crc: crc(block) });
            }
            return Some(Arc::new(Payload::new(raw, blocks)));
        }
        let align = self.pool.align() as usize;
        let mut packed = self.memory(raw.len())?;
        let mut at = 0;
        for (index, block) in raw.chunks_mut(size).enumerate() {
            fill_part(index, block, part, fill);
            let (codec, stored) = match self.packer.compress(block, &mut self.packing, align) {
                Some((codec, len)) => (codec, &self.packing[..len]),
                None => (Codec::Raw, &*block),
            };
            let (len, crc) = (stored.len(), crc(stored));
            packed[at..at + len].copy_from_slice(stored);
            blocks.push(Stored { offset: at as u32, len: len as u32, codec, crc });
            at += len;
        }
        packed.truncate(at);
        Some(Arc::new(Payload::new(packed, blocks)))
    }

    /// Fills a part of some blocks from block `first` on, compresses, encrypts and checksums them,
    /// one after the other in `stored`. Each begins where it would be if none were compressed, with
    /// [`DATA`] bytes before it.
    fn encrypt(
        &mut self,
        mut stored: Buffer,
        first: u64,
        part: &Range<usize>,
        fill: &dyn Fn(usize, &mut [u8]),
    ) -> Result<Arc<Payload>, VolumeError> {
        let (size, align) = (self.block_bytes(), self.pool.seal_align());
        let longest = sealed_bytes(size, align);
        let count = stored.len() / longest;
        let cipher = self.cipher.as_mut().expect("the caller has seen it");
        let mut blocks = Vec::with_capacity(count);
        let mut at = 0;
        for index in 0..count {
            let from = index * longest + DATA;
            let block = &mut stored[from..from + size];
            fill_part(index, block, part, fill);
            let packed = self.packer.compress_for_sealing(block, &mut self.packing, align);
            let (codec, len) = match packed {
                Some((codec, packed)) => {
                    stored[at + DATA..at + DATA + packed.len()].copy_from_slice(packed);
                    (codec, packed.len())
                }
                None => {
                    // Earlier blocks of this write were compressed, so this one moves forward.
                    if at + DATA < from {
                        stored.copy_within(from..from + size, at + DATA);
                    }
                    (Codec::Raw, size)
                }
            };
            let codec = codec.sealed();
            let place = (first + index as u64, codec, size);
            let len = cipher.seal(place, len, &mut stored[at..], align)?;
            let crc = crc(&stored[at..at + len]);
            blocks.push(Stored { offset: at as u32, len: len as u32, codec, crc });
            at += len;
        }
        stored.truncate(at);
        Ok(Arc::new(Payload::new(stored, blocks)))
    }

    /// Makes a range of whole blocks in one span zeros.
    pub fn zero(&mut self, at: u64, len: u64, token: u32, durable: bool) -> Outcome {
        if self.pool.is_latched() {
            return Outcome::Ended(Status::IoErr);
        }
        let size = self.block_bytes() as u64;
        debug_assert!(at.is_multiple_of(size) && len.is_multiple_of(size));
        let (first, end) = (at / size, (at + len) / size);
        if let Err(status) = self.prefetch_edges(first, end) {
            return Outcome::Ended(status);
        }
        if !self.admit() {
            return Outcome::Full;
        }
        let body = Body::Zero((end - first) as u32);
        let none = (&[None, None], [None, None]);
        let begun = self.begin(first, end, What::Zero, body, none, token, durable);
        debug_assert!(begun, "there is nothing that could have changed");
        Outcome::Taken
    }

    /// Makes blocks visible to readers as pending, and posts their record to the committer, in the
    /// same order; unless an edge block has changed since it was read. `copied` has the numbers of
    /// the writes from which the edges were copied, if these may still be refused.
    #[expect(clippy::too_many_arguments, reason = "one place, called by two")]
    fn begin(
        &mut self,
        first: u64,
        end: u64,
        what: What,
        body: Body,
        (edges, copied): (&Edges, [Option<u64>; 2]),
        token: u32,
        durable: bool,
    ) -> bool {
        let (number, from) = Map::place(first);
        let to = from + (end - first) as u32;
        let pool = Arc::clone(&self.pool);
        let records = pool.records();
        let volume = Arc::clone(&self.volume);
        let begun = self.volume.map.with(number, |span| {
            let is_same =
                |(block, found): &(u64, Lookup)| span.find(Map::place(*block).1).is_same(found);
            if !edges.iter().flatten().all(is_same) {
                return false;
            }
            let serial = span.begin(from, to, what, token != NO_REPLY);
            let reply = self.reply(token);
            let volume = Some(volume);
            let other = Record::of(body, reply);
            let record = Record { volume, first, serial, copied, durable, ..other };
            records.post([record].into_iter());
            true
        });
        if begun {
            self.out += usize::from(token != NO_REPLY);
            self.wake();
        }
        begun
    }

    /// Makes all writes durable that were answered before.
    pub fn flush(&mut self, token: u32) -> Outcome {
        if self.pool.is_latched() {
            return Outcome::Ended(Status::IoErr);
        }
        if !self.pool.admit() {
            return Outcome::Full;
        }
        let volume = Some(Arc::clone(&self.volume));
        let record = Record { volume, ..Record::of(Body::Flush, self.reply(token)) };
        self.pool.records().post([record].into_iter());
        self.wake();
        self.out += 1;
        Outcome::Taken
    }
}

/// Encrypted blocks as they are stored, for raw streams.
impl<D: SegmentStore> VolumeHandle<D> {
    /// Reads an encrypted block as it is stored.
    ///
    /// # Errors
    /// If it cannot be read, is damaged, is not encrypted, or is not there.
    pub fn read_sealed(&mut self, block: u64) -> Result<SealedBlock<'_>, Status> {
        let block_bytes = self.volume.meta.block_bytes;
        let decode = |handle: &mut Self, codec: Codec, len: usize| {
            let sealed = SealedBlock::of_stored(codec, &handle.stored[..len], block_bytes);
            let wrong = match codec.is_sealed() {
                true => Undecodable::Damaged,
                false => Undecodable::NotAuthentic,
            };
            sealed.map(|_| ()).ok_or(wrong)
        };
        let found = self.lookup(block);
        let (codec, len) = match self.load_stored(block, found, decode)? {
            Lookup::Disk(entry) => (entry.codec(), entry.stored_bytes() as usize),
            Lookup::Memory { payload, index, .. } => {
                let stored = payload.stored(index);
                self.stored.first(stored.len()).copy_from_slice(stored);
                (payload.blocks()[index as usize].codec, stored.len())
            }
            Lookup::Zero | Lookup::Cleared { .. } | Lookup::NotResident(_) => {
                return Err(Status::Protection);
            }
        };
        let sealed = SealedBlock::of_stored(codec, &self.stored[..len], block_bytes);
        sealed.ok_or(Status::Protection)
    }

    /// Writes blocks of one span that were encrypted by the volume's key under the same numbers, in
    /// this pool or another one. Nothing here can tell whether they were: a block that was not is
    /// refused when it is read.
    pub fn write_sealed(&mut self, first: u64, blocks: &[SealedBlock<'_>], token: u32) -> Outcome {
        if !self.is_sealed {
            return Outcome::Ended(Status::NotSupp);
        }
        if self.pool.is_latched() {
            return Outcome::Ended(Status::IoErr);
        }
        let end = first + blocks.len() as u64;
        if let Err(status) = self.prefetch(first, end) {
            return Outcome::Ended(status);
        }
        let align = self.pool.seal_align();
        let len = blocks.iter().map(|block| block.bytes().len().next_multiple_of(align)).sum();
        if !self.admit() {
            return Outcome::Full;
        }
        let Some(mut bytes) = self.memory(len) else {
            self.pool.dismiss();
            return Outcome::Full;
        };
        let (mut stored, mut at) = (Vec::with_capacity(blocks.len()), 0);
        for block in blocks {
            let len = block.bytes().len();
            let into = &mut bytes[at..at + len.next_multiple_of(align)];
            into[..len].copy_from_slice(block.bytes());
            into[len..].fill(0);
            let (offset, len, crc) = (at as u32, into.len() as u32, crc(into));
            stored.push(Stored { offset, len, codec: block.codec(), crc });
            at += into.len();
        }
        let payload = Arc::new(Payload::new(bytes, stored));
        let what = What::Data { payload: Arc::clone(&payload), index: 0 };
        let none = (&[None, None], [None, None]);
        let begun = self.begin(first, end, what, Body::Write(payload), none, token, false);
        debug_assert!(begun, "there is nothing that could have changed");
        Outcome::Taken
    }
}

/// Waits until the committer has answered all records of this handle, which frees their places in
/// the completion queue for other handles. Writes that wait for space are refused.
impl<D: SegmentStore> Drop for VolumeHandle<D> {
    fn drop(&mut self) {
        let pool = Arc::clone(&self.pool);
        let _leaving = (self.out > 0).then(|| pool.leave(self.replies.completion_queue()));
        while self.out > 0 && self.pool.is_running() {
            if self.take().is_none() {
                self.replies
                    .completion_queue()
                    .event_count()
                    .sleep(CLOSE_CHECK_INTERVAL, || self.replies.is_any());
            }
        }
    }
}

impl<D: SegmentStore> fmt::Debug for VolumeHandle<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.volume.meta.name;
        f.debug_struct("VolumeHandle")
            .field("volume", name)
            .field("out", &self.out)
            .finish_non_exhaustive()
    }
}

impl<D: SegmentStore> VolumeHandle<D> {
    /// Reads a leaf of the map into memory.
    fn fetch(&self, leaf: &Arc<Leaf>) -> Result<(), Status> {
        match self.pool.segments().load(leaf) {
            Ok(_) => Ok(()),
            Err(error) => {
                self.log_unreadable(&error);
                Err(match error {
                    VolumeError::Io { .. } => Status::Medium,
                    _ => Status::Protection,
                })
            }
        }
    }

    /// Logs that a leaf cannot be read: the first such read at once, later ones by their number.
    #[cold]
    fn log_unreadable(&self, error: &VolumeError) {
        let name = &self.volume.meta.name;
        match self.pool.segments().unreadable_pages().due(1, Instant::now()) {
            Some(1) => tracing::error!("{name}: {error}; its {FAN} blocks cannot be read"),
            Some(count) => tracing::error!(
                "{name}: {error}; {count} reads of map pages failed since the last line, and \
                 `blockyard volume scrub` lists the damage"
            ),
            None => tracing::debug!("{name}: {error}; its {FAN} blocks cannot be read"),
        }
    }

    /// Reads the leaves of some blocks of one span into memory, so that a damaged leaf is found
    /// before the write is in the log. Each leaf is read once. If the cache is too small to keep
    /// all of them, the committer reads those that were evicted.
    fn prefetch(&self, first: u64, end: u64) -> Result<(), Status> {
        let (number, from) = Map::place(first);
        let to = from + (end - first) as u32;
        let mut block = from;
        while block < to {
            let next = to.min((block / FAN as u32 + 1) * FAN as u32);
            let away = || self.volume.map.with(number, |span| span.away(block, next));
            while let Some(NotResident(leaf)) = away() {
                match self.fetch(&leaf) {
                    Ok(()) => break,
                    Err(status)
                        if away().is_some_and(|NotResident(now)| Arc::ptr_eq(&now, &leaf)) =>
                    {
                        return Err(status);
                    }
                    // The leaf was replaced meanwhile.
                    Err(_) => {}
                }
            }
            block = next;
        }
        Ok(())
    }

    /// Reads the leaves that a range of zeros changes only in part. Leaves that are dropped as a
    /// whole are not read, but counted if the volume has a reservation.
    fn prefetch_edges(&self, first: u64, end: u64) -> Result<(), Status> {
        let fan = FAN as u64;
        let edges = [(first, first % fan), (end - 1, end % fan)];
        for (edge, _) in edges.into_iter().filter(|(_, part)| *part > 0) {
            self.prefetch(edge, edge + 1)?;
        }
        if self.volume.reserved_bytes() > 0 {
            self.pool.segments().count_owned(&self.volume.map, first, end - first);
        }
        Ok(())
    }
}

impl<D: SegmentStore> VolumeHandle<D> {
    /// Looks up the block `first` and those after it in its span, `count` at most.
    pub(crate) fn check_at(&self, first: u64, count: u64, found: &mut Vec<Lookup>) {
        let (span, from) = Map::place(first);
        let count = count.min(LOOKUP_MAX).min(NODE_BLOCKS - u64::from(from));
        found.clear();
        self.volume.map.with(span, |span| {
            found.extend((from..from + count as u32).map(|block| span.find(block)));
        });
    }

    /// Reads the leaf of the map that says where a block is.
    pub(crate) fn fetch_for(&mut self, block: u64) -> Result<(), Status> {
        match self.lookup(block) {
            Lookup::NotResident(leaf) => self.fetch(&leaf),
            _ => Ok(()),
        }
    }

    /// The file that contains an entry's bytes, and their offset in it.
    pub(crate) fn place(&mut self, entry: &Entry) -> Option<(Arc<D::File>, u64)> {
        let (segment, offset) = self.pool.segments().split(entry.address());
        let file = self.files.get().get(segment as usize)?;
        Some((Arc::clone(file), offset))
    }

    /// The number of found blocks, from the first on, that are consecutive in one segment, and
    /// their length in bytes.
    pub(crate) fn row(&self, found: &[Lookup]) -> (usize, usize) {
        let (mut count, mut bytes) = (0, 0);
        let mut next = None;
        for found in found {
            let Lookup::Disk(entry) = found else { break };
            let len = entry.stored_bytes() as usize;
            let (segment, _) = self.pool.segments().split(entry.address());
            let follows = next.is_none_or(|next| next == (segment, entry.address()));
            if !follows || (count > 0 && bytes + len > SCRATCH_BYTES) {
                break;
            }
            (count, bytes) = (count + 1, bytes + len);
            next = Some((segment, entry.address() + len as u64));
        }
        (count, bytes)
    }

    /// Decodes a block from its stored bytes, in place where it is not compressed. `None` if their
    /// checksum is wrong or, in an encrypted volume, they are not authentic.
    pub(crate) fn unpack<'a>(
        &'a mut self,
        block: u64,
        entry: &Entry,
        stored: &'a mut [u8],
    ) -> Option<&'a [u8]> {
        if crc(stored) != entry.crc() {
            return None;
        }
        let size = self.block_bytes();
        let (number, plain) = ((block, entry.codec()), self.plain.first(size));
        let place = codec::decode_block(self.cipher.as_mut(), number, stored, plain).ok()?;
        Some(match place {
            Some(place) => &stored[place],
            None => plain,
        })
    }

    /// Reads a pending block from memory.
    pub(crate) fn remember(&mut self, block: u64, payload: &Payload, index: u32) -> &[u8] {
        match self.decode_pending(block, payload, index) {
            Some(place) => &self.stored[place],
            None => &self.plain[..self.block_bytes()],
        }
    }

    fn decode_pending(
        &mut self,
        block: u64,
        payload: &Payload,
        index: u32,
    ) -> Option<Range<usize>> {
        let (bytes, codec) = (payload.stored(index), payload.blocks()[index as usize].codec);
        self.stored.first(bytes.len()).copy_from_slice(bytes);
        self.decode((block, codec), bytes.len()).expect("what was encoded here comes back")
    }

    /// Decodes the first `len` bytes of `stored`. Returns where in `stored` the block is; `None` if
    /// it is in `plain`.
    fn decode(
        &mut self,
        number: (u64, Codec),
        len: usize,
    ) -> Result<Option<Range<usize>>, Undecodable> {
        let size = self.block_bytes();
        let (stored, plain) = (self.stored.first(len), self.plain.first(size));
        codec::decode_block(self.cipher.as_mut(), number, stored, plain)
    }

    /// Copies a block that is in `stored` to `plain`.
    fn move_to_plain(&mut self, place: Option<Range<usize>>) {
        if let Some(place) = place {
            self.plain.first(place.len()).copy_from_slice(&self.stored[place]);
        }
    }

    /// The pool.
    pub(crate) fn pool(&self) -> &Arc<Pool<D>> {
        &self.pool
    }
}

#[cfg(test)]
mod tests {
    use blockyard_core::Status;
    use blockyard_volume_format::bytes::crc;
    use blockyard_volume_format::entry::{Codec, Entry};

    use super::{Outcome, VolumeHandle};
    use crate::Options;
    use crate::apply::Apply;
    use crate::stepped_pool::{BLOCK, SteppedPool};

    /// A map that names a block under another number, or a block that is not encrypted, as who can
    /// change the disk may make one: checksums do not prevent that.
    #[test]
    fn a_block_of_another_place_or_in_plain_is_refused_in_an_encrypted_volume() {
        let mut stepped = SteppedPool::new("moved-block");
        stepped.encrypt("secret", 256);
        stepped.write(1, 1);
        stepped.write(2, 1);
        let live = stepped.pool.find("secret").unwrap();
        let entry = |block: u32| live.map.with(0, |span| span.entry(block)).unwrap();
        let read = |stepped: &mut SteppedPool, block: u64| {
            let mut found = Vec::new();
            let status = stepped.handle.read(block * BLOCK, 512, |bytes| found.extend(bytes));
            (status, found.first().copied())
        };
        assert_eq!(read(&mut stepped, 1), (Status::Ok, Some(1)));
        let put = |stepped: &SteppedPool, block, entry| {
            let mut maps = Apply::new(stepped.pool.segments(), 0);
            maps.write(&live, block, &[entry]).unwrap();
        };
        let (one, two) = (entry(1), entry(2));
        put(&stepped, 1, two);
        assert_eq!(read(&mut stepped, 1), (Status::Protection, None), "moved");
        put(&stepped, 1, one);
        assert_eq!(read(&mut stepped, 1), (Status::Ok, Some(1)));
        let mut plain = stepped.pool.memory().take_beyond(BLOCK as usize);
        plain.fill(9);
        stepped.pool.segments().write(one.address(), &[&plain]).unwrap();
        put(&stepped, 1, Entry::new(one.address(), BLOCK as u32, Codec::Raw, crc(&plain)));
        assert_eq!(read(&mut stepped, 1), (Status::Protection, None), "in plain");
        assert_eq!(read(&mut stepped, 2), (Status::Ok, Some(2)));
    }

    #[test]
    fn a_handle_without_the_key_passes_blocks_on_and_refuses_contents() {
        let mut stepped = SteppedPool::new("sealed-handle");
        stepped.encrypt("secret", 256);
        stepped.write(1, 1);
        let live = stepped.pool.find("secret").unwrap();
        let mut sealed = VolumeHandle::open_sealed(&stepped.pool, live, 4).unwrap();
        assert_eq!(sealed.read(BLOCK, 512, |_| {}), Status::NotSupp);
        let refused = Outcome::Ended(Status::NotSupp);
        assert_eq!(sealed.write(BLOCK, 512, &|_, _| {}, 0, false), refused);
        assert_eq!(stepped.handle.write_sealed(1, &[], 0), refused, "it has the key");
        assert!(sealed.read_sealed(1).unwrap().codec().is_sealed());
        assert_eq!(sealed.read_sealed(2).map(|_| ()), Err(Status::Protection), "it is not there");
    }

    /// Regression: a write of blocks in two leaves never ended, because reading one leaf evicted
    /// the other.
    #[test]
    fn a_cache_of_least_length_is_enough_for_a_write_of_two_leaves() {
        let options = Options { map_cache_bytes: 4096, ..Options::default() };
        let mut stepped = SteppedPool::by("one-leaf", 60, options);
        stepped.take("w", 40 * 256);
        for number in 1..40 {
            stepped.write(number * 256 - 4, 8);
        }
        for number in 1..40 {
            stepped.checkpoint();
            stepped.write(number * 256 - 4, 8);
        }
        // Parts of two blocks, whose rest must be read.
        for number in 1..40 {
            stepped.checkpoint();
            let at = number * 256 * 4096 - 512;
            stepped.submit(|handle| handle.write(at, 1024, &|_, bytes| bytes.fill(7), 1, true));
        }
        let live = stepped.pool.find("w").unwrap();
        assert!(live.map.with(0, |span| span.away(0, 40 * 256)).is_some(), "it caches two leaves");
    }
}

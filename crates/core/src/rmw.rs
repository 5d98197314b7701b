//! Sub-block writes: read-modify-write for exporters whose clients address bytes.
//!
//! An exporter turns a request for whole blocks into one bio and only publishes it here. A request
//! that begins or ends inside a block goes through the queue:
//!
//! ```text
//! start ▸ staging free ▸ its turn ▸ read first and last block ▸ merge ▸ write ▸ done
//! ```
//!
//! The queue does no I/O: it makes bios, which its owner pushes, and handles their completions. It
//! locks the blocks of a request from its turn until the last write has completed. So a
//! read-modify-write is atomic for all writers of the device that share a [`RmwLock`].

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use blockyard_sync::rmw_lock::{Kind, RmwLock, Turn, Writer};

use crate::claim::ClaimState;
use crate::{
    Bio, BufRef, Channel, Completion, Disk, Flags, Geometry, Op, Region, RegionId, SECTOR_SHIFT,
    Sector, Status, ZoneGeometry,
};

/// The most requests of a channel that have staging memory at once: each needs two blocks. More
/// wait.
const STAGED_MAX: u16 = 32;
/// The most bios that the queue makes between two pushes, for sub-block requests.
pub const BIOS_MAX: usize = 3 * STAGED_MAX as usize;
/// Marks the user data of a bio whose completion belongs to the queue.
const QUEUED: u64 = 1 << 32;
/// The poll interval of a request that waits for another channel. That channel waits for its
/// device, and two channels rarely write to one block at once.
pub const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// A disk, and the lock that all its exporters share.
#[derive(Clone)]
pub struct SharedDisk {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// The lock of its blocks.
    pub lock: Arc<RmwLock>,
    /// Whether a file system has claimed the disk.
    pub claim: Arc<ClaimState>,
}

impl From<Arc<dyn Disk>> for SharedDisk {
    fn from(disk: Arc<dyn Disk>) -> SharedDisk {
        SharedDisk { disk, lock: Arc::default(), claim: Arc::default() }
    }
}

impl<D: Disk + 'static> From<Arc<D>> for SharedDisk {
    fn from(disk: Arc<D>) -> SharedDisk {
        SharedDisk::from(disk as Arc<dyn Disk>)
    }
}

/// A range of bytes and the blocks that hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte of the first block.
    pub start: u64,
    /// Length of the blocks.
    pub len: u64,
    /// The bytes of the first block before the range.
    pub skip: u64,
    /// Length of the range.
    pub want: u64,
}

impl Span {
    /// The blocks that hold a range, which must not be empty and must lie on a device of whole
    /// blocks. `block_bytes` is a power of two.
    #[inline]
    pub fn of(block_bytes: u64, offset: u64, want: u64) -> Span {
        let mask = block_bytes - 1;
        let start = offset & !mask;
        let end = (offset + want + mask) & !mask;
        Span { start, len: end - start, skip: offset - start, want }
    }

    /// Whether the range consists of whole blocks.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.len == self.want
    }

    /// The first sector of the blocks.
    #[inline]
    pub fn sector(&self) -> Sector {
        Sector::containing(self.start)
    }

    /// The number of sectors of the blocks.
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.len >> SECTOR_SHIFT
    }

    /// The range in bytes.
    pub fn range(&self) -> Range<u64> {
        self.start + self.skip..self.start + self.skip + self.want
    }

    /// The whole blocks in the range, if any.
    pub fn inner(&self, block_bytes: u64) -> Range<u64> {
        let mask = block_bytes - 1;
        let Range { start, end } = self.range();
        let first = (start + mask) & !mask;
        first..(end & !mask).max(first)
    }
}

/// The offset in bytes at which sequential zones begin, which are written at their write pointers
/// only, so that no part of a block can be written there. The end of a device without such zones.
pub fn sequential_from(geometry: &Geometry) -> u64 {
    let conventional = |zones: &ZoneGeometry| {
        Sector(u64::from(zones.conventional_count) * zones.zone_sectors).bytes()
    };
    geometry.zones.as_ref().map_or(geometry.len_bytes(), conventional)
}

/// A write, write-zeroes or discard with an end inside a block.
#[derive(Clone, Copy, Debug)]
pub struct Partial {
    /// The operation on whole blocks. The parts of blocks at its ends are written: with the data of
    /// a write, otherwise with zeros.
    pub op: Op,
    /// The flags of the operation.
    pub flags: Flags,
    /// The bytes that it covers.
    pub span: Span,
    /// The offset of a write's first byte in the exporter's region.
    pub data: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It waits in the queue of the lock.
    Waiting,
    /// The blocks at its ends are being read.
    Reading,
    Writing,
}

#[derive(Clone, Copy, Debug)]
enum RmwWork {
    /// Whole blocks that overlap a read-modify-write, for which they wait.
    Whole(Bio),
    /// A sub-block request, with the number of its staging memory.
    Partial(Partial, u16),
}

#[derive(Clone, Copy, Debug)]
struct RmwRequest {
    /// The exporter's number of the request.
    slot: u32,
    work: RmwWork,
    turn: Turn,
    state: State,
    /// The number of bios that have not completed.
    left: u8,
    /// The first failure.
    status: Status,
}

/// Length in bytes of the staging memory of an [`RmwQueue`].
pub fn staging_bytes(block_bytes: u64) -> usize {
    (2 * block_bytes * u64::from(STAGED_MAX)) as usize
}

/// The writes of one channel that need the lock.
pub struct RmwQueue {
    writer: Writer,
    /// The number of published whole-block writes that have not completed.
    published: usize,
    /// Whether a write was published and not yet admitted.
    fresh: bool,
    block_bytes: u64,
    /// The exporter's memory, with the data of writes.
    data: (Arc<Region>, RegionId),
    /// The staging memory: two blocks for each request.
    staging: (Arc<Region>, RegionId),
    free: Vec<u16>,
    /// Requests that wait for staging memory. They are not in the lock's queue yet, because a
    /// request there must be able to proceed.
    backlog: VecDeque<(u32, Partial)>,
    requests: Vec<RmwRequest>,
    /// A block of memory in which data are merged.
    scratch: Vec<u8>,
}

impl RmwQueue {
    /// A queue for a channel. The exporter numbers its requests below `slots`, and has their data
    /// in the region `data`, which is registered with the channel. The queue registers `staging`,
    /// [`staging_bytes`] of memory.
    pub fn new(
        channel: &mut dyn Channel,
        lock: &Arc<RmwLock>,
        block_bytes: u64,
        slots: usize,
        data: (Arc<Region>, RegionId),
        staging: Arc<Region>,
    ) -> RmwQueue {
        debug_assert!(staging.len_bytes() >= staging_bytes(block_bytes));
        let staging_id = channel.register(Arc::clone(&staging));
        RmwQueue {
            writer: lock.writer(slots),
            published: 0,
            fresh: false,
            block_bytes,
            data,
            staging: (staging, staging_id),
            free: (0..STAGED_MAX).rev().collect(),
            backlog: VecDeque::new(),
            requests: Vec::new(),
            scratch: vec![0; block_bytes as usize],
        }
    }

    /// Publishes a bio that writes whole blocks and will be pushed. Its user data is the slot.
    #[inline]
    pub fn publish(&mut self, bio: &Bio) {
        self.writer.publish(bio.user_data as usize, bytes_of(bio));
        self.published += 1;
        self.fresh = true;
    }

    /// Removes the bios that overlap a read-modify-write and keeps them until it is done. Must be
    /// called before published bios are pushed.
    #[inline]
    pub fn admit(&mut self, bios: &mut Vec<Bio>) {
        if std::mem::take(&mut self.fresh) && !self.writer.may_start() {
            self.admit_each(bios);
        }
    }

    #[cold]
    fn admit_each(&mut self, bios: &mut Vec<Bio>) {
        bios.retain(|bio| {
            let slot = bio.user_data as usize;
            if bio.user_data & QUEUED != 0 || !self.writer.is_published(slot) {
                return true;
            }
            let Err(turn) = self.writer.start_or_queue(slot) else { return true };
            self.published -= 1;
            self.requests.push(RmwRequest::new(slot as u32, RmwWork::Whole(*bio), turn));
            false
        });
    }

    /// Accepts a request with an end inside a block. It makes bios at the next
    /// [`RmwQueue::advance`].
    pub fn start(&mut self, slot: u32, partial: Partial) {
        self.backlog.push_back((slot, partial));
    }

    /// Makes the bios of requests whose turn it is.
    #[inline]
    pub fn advance(&mut self, bios: &mut Vec<Bio>) {
        if self.backlog.is_empty() && self.requests.is_empty() {
            return;
        }
        while !self.backlog.is_empty()
            && let Some(place) = self.free.pop()
            && let Some((slot, partial)) = self.backlog.pop_front()
        {
            let span = &partial.span;
            let turn = self.writer.enter(span.start..span.start + span.len);
            self.requests.push(RmwRequest::new(slot, RmwWork::Partial(partial, place), turn));
        }
        self.advance_begun(bios);
    }

    /// Makes the bios of requests whose turn it is, without starting a new request.
    pub fn advance_begun(&mut self, bios: &mut Vec<Bio>) {
        for index in 0..self.requests.len() {
            let request = self.requests[index];
            if request.state == State::Waiting && self.writer.is_turn(request.turn, request.kind())
            {
                self.begin(index, bios);
            }
        }
    }

    /// Whether a request waits for others, maybe of another channel, which do not wake this one.
    #[inline]
    pub fn is_waiting(&self) -> bool {
        self.requests.iter().any(|request| request.state == State::Waiting)
    }

    /// Whether a request can start after one of this channel has completed.
    #[inline]
    pub fn has_startable(&self) -> bool {
        !self.backlog.is_empty() || self.is_waiting()
    }

    /// Whether other channels may wait for a request of this one.
    pub fn holds_blocks(&self) -> bool {
        self.published > 0 || !self.requests.is_empty()
    }

    /// Handles a completion; returns the completion for the exporter if it ends one of its
    /// requests. May make more bios.
    #[inline]
    pub fn completed(&mut self, completion: Completion, bios: &mut Vec<Bio>) -> Option<Completion> {
        if completion.user_data & QUEUED != 0 {
            return self.bio_completed(completion, bios);
        }
        let slot = completion.user_data as usize;
        if self.writer.is_published(slot) {
            self.writer.clear(slot);
            self.published -= 1;
        }
        Some(completion)
    }

    #[cold]
    fn bio_completed(&mut self, end: Completion, bios: &mut Vec<Bio>) -> Option<Completion> {
        let slot = end.user_data as u32;
        let index = self.requests.iter().position(|request| request.slot == slot)?;
        let request = &mut self.requests[index];
        request.left -= 1;
        if request.status.is_ok() {
            request.status = end.status;
        }
        if request.left > 0 {
            return None;
        }
        if request.state == State::Reading && request.status.is_ok() {
            self.merge_and_write(index, bios);
            return None;
        }
        let request = self.requests.swap_remove(index);
        self.writer.leave(request.turn);
        if let RmwWork::Partial(_, place) = request.work {
            self.free.push(place);
        }
        Some(Completion { user_data: u64::from(slot), status: request.status, ..end })
    }

    fn begin(&mut self, index: usize, bios: &mut Vec<Bio>) {
        let request = &mut self.requests[index];
        let (partial, place) = match request.work {
            RmwWork::Whole(bio) => {
                (request.state, request.left) = (State::Writing, 1);
                return bios.push(bio.with_user_data(bio.user_data | QUEUED));
            }
            RmwWork::Partial(partial, place) => (partial, place),
        };
        request.state = State::Reading;
        for (end, at) in self.ends(&partial, place) {
            let bio = self.block_bio(Op::Read, &end, at);
            self.push(index, bio, bios);
        }
    }

    /// Merges the data to be written into the blocks that were read, and writes everything.
    fn merge_and_write(&mut self, index: usize, bios: &mut Vec<Bio>) {
        self.requests[index].state = State::Writing;
        let RmwWork::Partial(partial, place) = self.requests[index].work else { return };
        let Partial { op, flags, span, data } = partial;
        let from = span.start + span.skip;
        let is_write = op == Op::Write;
        for (end, at) in self.ends(&partial, place) {
            let bytes = &mut self.scratch[..end.want as usize];
            bytes.fill(0);
            if is_write {
                self.data.0.read(data + (end.start + end.skip - from), bytes);
            }
            self.staging.0.write(at + end.skip, bytes);
            let flags = if is_write { flags } else { Flags::NONE };
            let bio = self.block_bio(Op::Write, &end, at).with_flags(flags);
            self.push(index, bio, bios);
        }
        let inner = span.inner(self.block_bytes);
        if !inner.is_empty() {
            let sectors = (inner.end - inner.start) >> SECTOR_SHIFT;
            let buf = BufRef { region: self.data.1, offset: data + (inner.start - from) };
            let bio = Bio::new(op, Sector::containing(inner.start), sectors).with_flags(flags);
            self.push(index, if is_write { bio.with_buf(buf) } else { bio }, bios);
        }
    }

    /// The parts of blocks at the ends of a request, one or two, with the offsets of their blocks
    /// in the staging region.
    fn ends(&self, partial: &Partial, place: u16) -> impl Iterator<Item = (Span, u64)> + use<> {
        let block = self.block_bytes;
        let Range { start, end } = partial.span.range();
        let inner = partial.span.inner(block);
        let (head, tail) = if inner.start > end {
            // The range lies inside one block.
            (start..end, end..end)
        } else {
            (start..inner.start, inner.end..end)
        };
        let at = u64::from(place) * 2 * block;
        [(head, at), (tail, at + block)]
            .into_iter()
            .filter(|(range, _)| !range.is_empty())
            .map(move |(range, at)| (Span::of(block, range.start, range.end - range.start), at))
    }

    fn block_bio(&self, op: Op, end: &Span, at: u64) -> Bio {
        let buf = BufRef { region: self.staging.1, offset: at };
        Bio::new(op, end.sector(), end.sectors()).with_buf(buf)
    }

    fn push(&mut self, index: usize, bio: Bio, bios: &mut Vec<Bio>) {
        let request = &mut self.requests[index];
        request.left += 1;
        bios.push(bio.with_user_data(u64::from(request.slot) | QUEUED));
    }
}

impl RmwRequest {
    fn new(slot: u32, work: RmwWork, turn: Turn) -> RmwRequest {
        RmwRequest { slot, work, turn, state: State::Waiting, left: 0, status: Status::Ok }
    }

    fn kind(&self) -> Kind {
        match self.work {
            RmwWork::Whole(_) => Kind::WholeBlocks,
            RmwWork::Partial(..) => Kind::ReadModifyWrite,
        }
    }
}

/// The bytes that a bio covers.
#[inline]
fn bytes_of(bio: &Bio) -> Range<u64> {
    bio.sector.bytes()..bio.end().bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NoChannel;

    impl Channel for NoChannel {
        fn register(&mut self, _: Arc<Region>) -> RegionId {
            RegionId(1)
        }
        fn unregister(&mut self, _: RegionId) -> bool {
            false
        }
        fn push(&mut self, _: &[Bio]) -> usize {
            0
        }
        fn submit(&mut self) {}
        fn reap(&mut self, _: &mut Vec<Completion>) -> usize {
            0
        }
        fn wait(&mut self, _: Option<std::time::Instant>) {}
        fn due(&self) -> crate::Due {
            crate::Due::Never
        }
        fn in_flight(&self) -> usize {
            0
        }
    }

    fn queue(lock: &Arc<RmwLock>) -> RmwQueue {
        let data = (Region::alloc(64 << 10), RegionId(0));
        RmwQueue::new(&mut NoChannel, lock, 4096, 64, data, Region::alloc(staging_bytes(4096)))
    }

    fn partial(op: Op, offset: u64, len: u64) -> Partial {
        Partial { op, flags: Flags::NONE, span: Span::of(4096, offset, len), data: 512 }
    }

    fn ends(bio: &Bio) -> Completion {
        Completion { user_data: bio.user_data, status: Status::Ok, sector: bio.sector }
    }

    /// Completes all bios; returns the queue's results for each.
    fn complete(queue: &mut RmwQueue, bios: &mut Vec<Bio>) -> Vec<u64> {
        let done = std::mem::take(bios);
        done.iter()
            .filter_map(|bio| queue.completed(ends(bio), bios))
            .map(|end| end.user_data)
            .collect()
    }

    fn seen(bios: &[Bio]) -> Vec<(Op, u64, u64)> {
        bios.iter().map(|bio| (bio.op, bio.sector.0, bio.sectors)).collect()
    }

    #[test]
    fn only_the_blocks_at_the_ends_are_read() {
        let mut queue = queue(&Arc::default());
        let mut bios = Vec::new();
        for (op, offset, len, reads, writes) in [
            (Op::Write, 512, 512, vec![(0, 8)], vec![(Op::Write, 0, 8)]),
            (
                Op::Write,
                512,
                12_288,
                vec![(0, 8), (24, 8)],
                vec![(Op::Write, 0, 8), (Op::Write, 24, 8), (Op::Write, 8, 16)],
            ),
            (Op::Write, 4095, 2, vec![(0, 8), (8, 8)], vec![(Op::Write, 0, 8), (Op::Write, 8, 8)]),
            (Op::Discard, 4096, 4097, vec![(16, 8)], vec![(Op::Write, 16, 8), (Op::Discard, 8, 8)]),
            (
                Op::WriteZeroes,
                100,
                8092,
                vec![(0, 8)],
                vec![(Op::Write, 0, 8), (Op::WriteZeroes, 8, 8)],
            ),
        ] {
            queue.start(7, partial(op, offset, len));
            queue.advance(&mut bios);
            let wanted: Vec<_> = reads.iter().map(|&(at, len)| (Op::Read, at, len)).collect();
            assert_eq!(seen(&bios), wanted, "{op} {offset} {len}");
            assert!(complete(&mut queue, &mut bios).is_empty());
            assert_eq!(seen(&bios), writes, "{op} {offset} {len}");
            assert_eq!(complete(&mut queue, &mut bios), [7]);
            assert!(bios.is_empty() && !queue.holds_blocks());
        }
    }

    #[test]
    fn a_failed_read_ends_the_request_and_frees_its_blocks() {
        let mut queue = queue(&Arc::default());
        let mut bios = Vec::new();
        queue.start(7, partial(Op::Write, 4095, 2));
        queue.advance(&mut bios);
        let [first, second] = bios[..] else { panic!("{bios:?}") };
        bios.clear();
        let failed = Completion { status: Status::Medium, ..ends(&first) };
        assert!(queue.completed(failed, &mut bios).is_none());
        let end = queue.completed(ends(&second), &mut bios).unwrap();
        assert_eq!((end.user_data, end.status), (7, Status::Medium));
        assert!(bios.is_empty() && !queue.holds_blocks());
    }

    #[test]
    fn a_write_of_a_block_that_is_being_changed_is_held_back() {
        let lock = Arc::default();
        let (mut one, mut other) = (queue(&lock), queue(&lock));
        let mut bios = Vec::new();
        one.start(1, partial(Op::Write, 512, 512));
        one.advance(&mut bios);
        let mut others = vec![
            Bio::new(Op::Write, Sector(0), 8).with_user_data(5),
            Bio::new(Op::Write, Sector(8), 8).with_user_data(6),
        ];
        others.iter().for_each(|bio| other.publish(bio));
        other.admit(&mut others);
        assert_eq!(seen(&others), [(Op::Write, 8, 8)]);
        assert!(other.is_waiting());
        assert!(complete(&mut one, &mut bios).is_empty());
        other.advance(&mut others);
        assert_eq!(others.len(), 1);
        assert_eq!(complete(&mut one, &mut bios), [1]);
        other.advance(&mut others);
        assert_eq!(seen(&others), [(Op::Write, 8, 8), (Op::Write, 0, 8)]);
        assert_eq!(complete(&mut other, &mut others), [6, 5]);
        assert!(!other.holds_blocks());
    }

    #[test]
    fn more_requests_than_staging_all_end() {
        let mut queue = queue(&Arc::default());
        let mut bios = Vec::new();
        let mut done = Vec::new();
        (0..60).for_each(|slot| queue.start(slot, partial(Op::Write, u64::from(slot) * 512, 512)));
        while done.len() < 60 {
            queue.advance(&mut bios);
            assert!(!bios.is_empty() && bios.len() <= BIOS_MAX);
            done.extend(complete(&mut queue, &mut bios));
        }
        done.sort_unstable();
        assert!(done.iter().copied().eq(0..60));
    }
}

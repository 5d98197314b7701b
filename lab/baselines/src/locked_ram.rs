//! A RAM disk whose table has a lock, as zram's had. Codec, pool and the path of a block through
//! them are the product's; only the protection of an entry differs.
//!
//! ```text
//! read     lock the entry ▸ decompress from the pool into the reader's buffer ▸ unlock
//! write    same-filled? ▸ compress ▸ pool ▸ lock the entry, change it, unlock ▸ free the old one
//! part     lock the entry ▸ decompress ▸ patch ▸ compress ▸ pool ▸ change it, unlock
//! ```
//!
//! zram did the same, except that zram also frees the old object under the lock. This device has no
//! compaction, limit, second algorithm, checksum or backing file.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{
    Batch, CompletionBatch, Device, DeviceError, DeviceQueue, Disk, Due, Flags, Geometry,
    InlineRequest, Limits, Nanos, Op, Pieces, SECTOR_BYTES, SECTOR_SHIFT, Sector, Segment, Status,
    Work,
};
use blockyard_ram::codec::{Decoder, Encoder, packed_bytes_max};
use blockyard_ram::fill::{fill, repeated_word};
use blockyard_ram::{Algo, Cache, Codec, Object, Pool, PoolConfig, RamConfig};
use blockyard_ram::{BlockPart, split_at_blocks};
use blockyard_yard::error::StackError;
use blockyard_yard::spec::DeviceSpec;
use blockyard_yard::stack::{self, Made};

use crate::ram_table::{
    BitEntries, CasEntries, Contents, Entry, RwEntries, SpinEntries, Table, TableLock,
};

/// The published "before": one reader/writer lock over the table.
pub const TABLE_LOCK: &str = "ram-table-lock";
/// A state per entry, taken by compare-and-swap.
pub const CAS: &str = "ram-cas";
/// One spin lock per entry.
pub const SPIN: &str = "ram-spin";
/// One reader/writer lock per entry.
pub const RWLOCK: &str = "ram-rwlock";
/// The published "after": a bit of the entry.
pub const BIT_SPIN: &str = "ram-bit-spin";

/// The system's error number for lack of memory.
const ENOMEM: i32 = 12;
/// The unit in which the data of a loaded snapshot are copied, in bytes.
const COPY_BYTES: u64 = 64 << 10;

/// A RAM disk whose entries are in the table `T`.
pub struct LockedRam<T: Table>(Arc<Shared<T>>);

struct Shared<T> {
    table: T,
    pool: Arc<Pool>,
    codec: Codec,
    geometry: Geometry,
    limits: Limits,
    unit: usize,
}

/// The queue of one channel.
pub struct LockedRamQueue<T: Table> {
    shared: Arc<Shared<T>>,
    hand: Hand,
}

/// The caches and buffers of one channel.
struct Hand {
    cache: Cache,
    encoder: Encoder,
    decoder: Decoder,
    /// An uncompressed block.
    plain: Box<[u8]>,
    /// The bytes that replace a part of a block.
    patch: Box<[u8]>,
    packed: Box<[u8]>,
}

impl<T: Table> LockedRam<T> {
    /// Makes a device that reads as zeros.
    ///
    /// # Errors
    /// If `config` asks for a feature that the baseline lacks, or there is no memory for the table.
    pub fn open(config: &RamConfig) -> Result<LockedRam<T>, StackError> {
        refuse_features(config)?;
        let refused = |field, error: &dyn fmt::Display| StackError::Refused {
            field,
            message: error.to_string(),
        };
        config.check().map_err(|error| refused(error.field(), &error))?;
        let unit = config.unit as usize;
        let pool = Pool::new(&PoolConfig::new(config.size, unit));
        let codec = Codec::new(&config.codec, "algo");
        Ok(LockedRam(Arc::new(Shared {
            table: T::new(config.block_count()).map_err(|error| refused("size", &error))?,
            pool: pool.map_err(|error| refused("size", &error))?,
            codec: codec.map_err(|error| refused(error.field(), &error))?,
            geometry: config.geometry(),
            limits: config.limits(),
            unit,
        })))
    }

    /// The memory that the table takes, in bytes.
    pub fn table_bytes(&self) -> u64 {
        self.0.table.len_bytes()
    }
}

/// Refuses features of the product that the baseline lacks, so that none is ignored silently.
fn refuse_features(config: &RamConfig) -> Result<(), StackError> {
    let RamConfig { size, bs, unit, codec, load, .. } = config.clone();
    let plain = RamConfig { size, bs, unit, codec, load, ..RamConfig::default() };
    // The baseline has no compaction, so a parameter that turns compaction off is valid.
    if plain == *config || (RamConfig { compact: 0, ..plain }) == *config {
        return Ok(());
    }
    Err(StackError::Refused {
        field: "before",
        message: "before: a baseline of the RAM disk has size, bs, unit, algo, level, dict, \
                  load and compact=0; leave the other parameters out"
            .to_owned(),
    })
}

impl<T: Table> Shared<T> {
    /// Writes the block that `entry` describes into `into`.
    ///
    /// # Safety
    /// The caller holds the lock under which it read `entry`. `into` is valid for reads and writes
    /// of a block.
    #[inline]
    unsafe fn unpack(&self, decoder: &mut Decoder, entry: Entry, into: *mut u8) -> Status {
        let bytes = |object: Object| {
            // SAFETY: an object is freed only by the thread that has taken it out of its entry
            // under the entry's lock, and this thread holds that lock.
            unsafe { self.pool.bytes_kept(object) }
        };
        match entry.contents() {
            // SAFETY: the caller's contract.
            Contents::Nothing => unsafe { fill(into, self.unit, 0) },
            // SAFETY: the caller's contract.
            Contents::Same(word) => unsafe { fill(into, self.unit, word) },
            Contents::Raw(object) => {
                // SAFETY: raw objects are a block long, and no request's buffer lies in the pool.
                unsafe { into.copy_from_nonoverlapping(bytes(object).as_ptr(), self.unit) };
            }
            Contents::Packed(object) => {
                let packed = bytes(object);
                // SAFETY: the caller's contract.
                let done = unsafe { self.codec.decompress(decoder, packed, into, self.unit) };
                if done.is_err() {
                    return Status::Medium;
                }
            }
        }
        Status::Ok
    }

    /// Reads a block.
    ///
    /// # Safety
    /// `into` must be valid for reads and writes of a block.
    #[inline]
    unsafe fn read(&self, decoder: &mut Decoder, block: u64, into: *mut u8) -> Status {
        self.table.read(block, |entry| {
            // Fetches the whole object into the cache at once, as the product does.
            if let Some(object) = entry.object() {
                self.pool.fetch(object);
            }
            // SAFETY: this thread holds the entry's lock; the rest is the caller's contract.
            unsafe { self.unpack(decoder, entry, into) }
        })
    }

    /// Compresses and stores the block in `hand.plain`. Returns `None` if there is no memory.
    #[inline]
    fn pack(&self, hand: &mut Hand) -> Option<Entry> {
        let Hand { cache, encoder, plain, packed, .. } = hand;
        if let Some(word) = repeated_word(plain) {
            return Some(Entry::new(Contents::Same(word)));
        }
        // As in the product: saving less than a sixteenth is not worth a decompression.
        let contents = match self.codec.compress(encoder, plain, packed, self.unit - self.unit / 16)
        {
            Some(len) => Contents::Packed(cache.alloc(&packed[..len]).ok()?),
            None => Contents::Raw(cache.alloc(plain).ok()?),
        };
        Some(Entry::new(contents))
    }

    /// Stores the block in `hand.plain`. Without memory for it, the block keeps its old data.
    #[inline]
    fn write(&self, hand: &mut Hand, block: u64) -> Status {
        let Some(new) = self.pack(hand) else { return Status::NoSpc };
        let old = self.table.change(block, |entry| std::mem::replace(entry, new));
        Self::free(hand, old);
        Status::Ok
    }

    /// Writes the bytes in `hand.patch` into a part of a block, under the entry's lock.
    fn write_part(&self, hand: &mut Hand, part: BlockPart) -> Status {
        let BlockPart { block, offset, len } = part;
        let changed = self.table.change(block, |entry| {
            let into = hand.plain.as_mut_ptr();
            // SAFETY: this thread holds the entry's lock; `plain` is a block long and belongs to
            // `hand` alone.
            let read = unsafe { self.unpack(&mut hand.decoder, *entry, into) };
            if !read.is_ok() {
                return Err(read);
            }
            hand.plain[offset..offset + len].copy_from_slice(&hand.patch[..len]);
            let new = self.pack(hand).ok_or(Status::NoSpc)?;
            Ok(std::mem::replace(entry, new))
        });
        match changed {
            Ok(old) => {
                Self::free(hand, old);
                Status::Ok
            }
            Err(status) => status,
        }
    }

    fn discard(&self, hand: &mut Hand, block: u64) {
        let old = self.table.change(block, std::mem::take);
        Self::free(hand, old);
    }

    #[inline]
    fn free(hand: &mut Hand, old: Entry) {
        if let Some(object) = old.object() {
            // SAFETY: the object is from this pool. It was taken out of its entry under the lock
            // under which other threads read it, so no entry refers to it.
            unsafe { hand.cache.free(object) };
        }
    }
}

impl<T: Table> LockedRamQueue<T> {
    #[inline]
    fn carry_out(&mut self, work: &impl Work) -> Status {
        let (at, len_bytes) = (work.sector().bytes(), work.sectors() << SECTOR_SHIFT);
        let parts = split_at_blocks(at, len_bytes, self.shared.unit.trailing_zeros());
        match work.op() {
            Op::Read => self.read(parts, Pieces::new(work.segments())),
            Op::Write => self.write(parts, Pieces::new(work.segments())),
            Op::Discard => self.zero(parts, false),
            Op::WriteZeroes => self.zero(parts, work.flags().contains(Flags::NOUNMAP)),
            Op::Flush => Status::Ok,
            _ => Status::NotSupp,
        }
    }

    #[inline]
    fn read(
        &mut self,
        parts: impl Iterator<Item = BlockPart>,
        mut pieces: Pieces<impl Iterator<Item = Segment>>,
    ) -> Status {
        let LockedRamQueue { shared, hand } = self;
        for BlockPart { block, offset, len } in parts {
            let whole = if len == shared.unit { pieces.take_whole(len) } else { None };
            let into = whole.unwrap_or(hand.plain.as_mut_ptr());
            // SAFETY: `into` is the request's buffer, which is valid for a block until the request
            // completes, or it is `plain`, which is a block long and belongs to `hand` alone.
            let status = unsafe { shared.read(&mut hand.decoder, block, into) };
            if !status.is_ok() {
                return status;
            }
            if whole.is_none() {
                pieces.write(&hand.plain[offset..offset + len]);
            }
        }
        Status::Ok
    }

    #[inline]
    fn write(
        &mut self,
        parts: impl Iterator<Item = BlockPart>,
        mut pieces: Pieces<impl Iterator<Item = Segment>>,
    ) -> Status {
        let LockedRamQueue { shared, hand } = self;
        for part in parts {
            let status = if part.len == shared.unit {
                pieces.read(&mut hand.plain);
                shared.write(hand, part.block)
            } else {
                pieces.read(&mut hand.patch[..part.len]);
                shared.write_part(hand, part)
            };
            if !status.is_ok() {
                return status;
            }
        }
        Status::Ok
    }

    /// Makes a range read as zeros. Blocks that lie wholly in the range take no memory afterwards,
    /// unless `written` says that zeros are to be stored.
    fn zero(&mut self, parts: impl Iterator<Item = BlockPart>, written: bool) -> Status {
        let LockedRamQueue { shared, hand } = self;
        for part in parts {
            let status = if part.len < shared.unit {
                hand.patch[..part.len].fill(0);
                shared.write_part(hand, part)
            } else if written {
                hand.plain.fill(0);
                shared.write(hand, part.block)
            } else {
                shared.discard(hand, part.block);
                Status::Ok
            };
            if !status.is_ok() {
                return status;
            }
        }
        Status::Ok
    }
}

impl<T: Table> Device for LockedRam<T> {
    type Queue = LockedRamQueue<T>;

    fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    fn limits(&self) -> &Limits {
        &self.0.limits
    }

    fn open_queue(&self) -> Result<LockedRamQueue<T>, DeviceError> {
        let shared = Arc::clone(&self.0);
        let unit = shared.unit;
        let refused = |_| DeviceError::Os { what: "memory for compressing", errno: ENOMEM };
        let block = |len_bytes: usize| vec![0; len_bytes].into_boxed_slice();
        let hand = Hand {
            cache: shared.pool.cache(),
            encoder: shared.codec.encoder(unit).map_err(refused)?,
            decoder: Decoder::new(unit, shared.codec.algo() == Algo::Zstd).map_err(refused)?,
            plain: block(unit),
            patch: block(unit),
            packed: block(packed_bytes_max(unit)),
        };
        Ok(LockedRamQueue { shared, hand })
    }

    fn report_zones(
        &self,
        from: Sector,
        _: usize,
        _: &mut Vec<ZoneInfo>,
    ) -> Result<(), DeviceError> {
        let sectors = self.0.geometry.sectors;
        match from.0 < sectors {
            true => Ok(()),
            false => Err(DeviceError::OutOfRange { sector: from, sectors }),
        }
    }
}

impl<T: Table> DeviceQueue for LockedRamQueue<T> {
    #[inline]
    fn start(&mut self, _: Nanos, batch: &mut Batch, done: &mut CompletionBatch) {
        while let Some(started) = batch.next() {
            let status = self.carry_out(&started);
            if !status.is_ok() && started.is_merged() {
                return batch.break_up(started);
            }
            done.complete(started, status);
        }
    }

    #[inline]
    fn execute_inline(&mut self, single: InlineRequest) -> Option<Status> {
        Some(self.carry_out(&single))
    }

    #[inline]
    fn poll(&mut self, _: Nanos, _: &mut CompletionBatch) {}

    #[inline]
    fn room(&self) -> usize {
        usize::from(self.shared.limits.queue_depth)
    }

    fn due(&self) -> Due {
        Due::Never
    }

    #[inline]
    fn is_immediate(&mut self) -> bool {
        true
    }
}

impl<T: Table> fmt::Debug for LockedRam<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockedRam").field("geometry", &self.0.geometry).finish_non_exhaustive()
    }
}

impl<T: Table> fmt::Debug for LockedRamQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockedRamQueue").finish_non_exhaustive()
    }
}

/// Opens the device that `spec` describes, through the product's own stack.
///
/// # Errors
/// As for [`LockedRam::open`], or if the stack refuses the device.
pub fn made<T: Table>(spec: &DeviceSpec) -> Result<Made, StackError> {
    let config = stack::ram_config(spec)?;
    let disk = stack::over(spec, LockedRam::<T>::open(&config)?)?;
    if config.load.is_some() {
        // Only the product can read the snapshot file, so a product's device loads it and is
        // copied.
        copy(&*stack::open(spec)?.disk, &*disk).map_err(|why| StackError::Refused {
            field: "load",
            message: format!("load: what it holds cannot be copied: {why}"),
        })?;
    }
    Ok(Made::without_files(disk))
}

/// Copies the data of one disk to another disk of equal size.
fn copy(from: &dyn Disk, to: &dyn Disk) -> Result<(), String> {
    let open = |disk: &dyn Disk| disk.open().map_err(|error| error.to_string());
    let len = COPY_BYTES as usize;
    let (mut from_io, mut to_io) = (Io::new(open(from)?, len), Io::new(open(to)?, len));
    let mut buffer = vec![0; len];
    let (sectors, step) = (from.geometry().sectors, COPY_BYTES / SECTOR_BYTES);
    for at in (0..sectors).step_by(step as usize) {
        let len = (step.min(sectors - at) * SECTOR_BYTES) as usize;
        let extent = from.extent(Sector(at), len as u64 / SECTOR_BYTES);
        if !extent.allocated && extent.sectors * SECTOR_BYTES >= len as u64 {
            continue;
        }
        let failed = |status: Status| format!("{status:?} at sector {at}");
        from_io.read(Sector(at), &mut buffer[..len]).map_err(failed)?;
        to_io.write(Sector(at), &buffer[..len], Flags::NONE).map_err(failed)?;
    }
    Ok(())
}

/// Opens the baseline [`TABLE_LOCK`].
pub(crate) fn table_lock(spec: &DeviceSpec) -> Result<Made, StackError> {
    made::<TableLock>(spec)
}

/// Opens the baseline [`CAS`].
pub(crate) fn cas(spec: &DeviceSpec) -> Result<Made, StackError> {
    made::<CasEntries>(spec)
}

/// Opens the baseline [`SPIN`].
pub(crate) fn spin(spec: &DeviceSpec) -> Result<Made, StackError> {
    made::<SpinEntries>(spec)
}

/// Opens the baseline [`RWLOCK`].
pub(crate) fn rwlock(spec: &DeviceSpec) -> Result<Made, StackError> {
    made::<RwEntries>(spec)
}

/// Opens the baseline [`BIT_SPIN`].
pub(crate) fn bit_spin(spec: &DeviceSpec) -> Result<Made, StackError> {
    made::<BitEntries>(spec)
}

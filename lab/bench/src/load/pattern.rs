//! The access patterns of a load thread: an endless stream of bios.

use blockyard_core::bio::Flags;
use blockyard_core::zone::ZoneInfo;
use blockyard_core::{Bio, BufRef, Completion, Disk, Op, RegionId, SECTOR_BYTES, Sector, Status};
use fastrand::Rng;

use super::Load;
use crate::error::LabError;

/// Length of an I/O in bytes.
pub const BLOCK_BYTES: u64 = 4096;
/// The length of an I/O in sectors.
const BLOCK_SECTORS: u64 = BLOCK_BYTES / SECTOR_BYTES;

/// An access pattern, in blocks of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Reads at random offsets of the device.
    RandomRead,
    /// Writes at the write pointer of a random zone. Each thread has zones of its own, one in
    /// `threads`, because a thread cannot write at a write pointer that other threads move. A full
    /// zone is reset in its turn. Writes do not merge.
    RandomWrite,
    /// Appends to any zone of the device, shared by all threads. A thread that finds a zone full
    /// resets it.
    RandomAppend,
    /// Appends to random zones, each thread to zones of its own.
    OwnAppend,
}

impl Pattern {
    /// Checks that a disk has the zones that the pattern needs.
    ///
    /// # Errors
    /// If it lacks zones for this many threads.
    pub(super) fn check(self, disk: &dyn Disk, threads: usize) -> Result<(), LabError> {
        let zones = disk.geometry().zones.as_ref();
        let sequential = zones.map_or(0, |zones| zones.zone_count - zones.conventional_count);
        let wanted = match self {
            Pattern::RandomRead => 0,
            Pattern::RandomWrite | Pattern::OwnAppend => threads,
            Pattern::RandomAppend => 1,
        };
        if (sequential as usize) < wanted {
            let why = format!("it has {sequential} sequential zones, {self:?} needs {wanted}");
            return Err(LabError::failed(disk.name().to_owned(), why));
        }
        Ok(())
    }
}

/// A zone that a stream writes to.
#[derive(Clone, Copy, Debug)]
struct StreamZone {
    start: Sector,
    capacity_sectors: u64,
    /// Written sectors; valid only where the zone belongs to this stream alone.
    written: u64,
}

/// A thread's stream of bios, a batch at a time.
#[derive(Debug)]
pub(super) struct Stream {
    pattern: Pattern,
    rng: Rng,
    /// Blocks of the device, for reads.
    blocks: u64,
    /// The zones of the stream, for writes and appends.
    zones: Vec<StreamZone>,
    region: RegionId,
    depth: usize,
    bios: Vec<Bio>,
    /// The zones that the batch found full; the next batch resets them.
    full: Vec<Sector>,
}

impl Stream {
    pub(super) fn new(
        disk: &dyn Disk,
        load: &Load,
        number: usize,
        region: RegionId,
        seed: u64,
    ) -> Stream {
        let zones = match load.pattern {
            Pattern::RandomRead => Vec::new(),
            Pattern::RandomWrite | Pattern::OwnAppend => {
                zones(disk).skip(number).step_by(load.threads).collect()
            }
            Pattern::RandomAppend => zones(disk).collect(),
        };
        Stream {
            pattern: load.pattern,
            rng: Rng::with_seed(seed),
            blocks: disk.geometry().sectors / BLOCK_SECTORS,
            zones,
            region,
            depth: load.depth,
            bios: Vec::with_capacity(load.depth),
            full: Vec::with_capacity(load.depth),
        }
    }

    /// The next batch.
    #[inline]
    pub(super) fn fill(&mut self) -> &[Bio] {
        self.bios.clear();
        for zone in self.full.drain(..) {
            self.bios.push(Bio::new(Op::ZoneReset, zone, 0));
        }
        for slot in self.bios.len()..self.depth {
            let buf = BufRef { region: self.region, offset: slot as u64 * BLOCK_BYTES };
            let bio = match self.pattern {
                Pattern::RandomRead => {
                    let block = self.rng.u64(..self.blocks);
                    Bio::read(Sector(block * BLOCK_SECTORS), BLOCK_SECTORS, buf)
                }
                Pattern::RandomWrite => self.write(buf),
                Pattern::RandomAppend | Pattern::OwnAppend => {
                    let zone = self.rng.usize(..self.zones.len());
                    Bio::append(self.zones[zone].start, BLOCK_SECTORS, buf)
                        .with_user_data(zone as u64)
                }
            };
            self.bios.push(bio);
        }
        &self.bios
    }

    /// A write at a write pointer, or the reset of the zone that is full.
    #[inline]
    fn write(&mut self, buf: BufRef) -> Bio {
        let zone = self.rng.usize(..self.zones.len());
        let zone = &mut self.zones[zone];
        if zone.written + BLOCK_SECTORS > zone.capacity_sectors {
            zone.written = 0;
            return Bio::new(Op::ZoneReset, zone.start, 0);
        }
        let at = zone.start + zone.written;
        zone.written += BLOCK_SECTORS;
        Bio::write(at, BLOCK_SECTORS, buf).with_flags(Flags::NOMERGE)
    }

    /// Evaluates the completions of the batch, and returns its number of I/Os, without resets.
    #[inline]
    pub(super) fn settle(&mut self, done: &[Completion]) -> Result<u64, Status> {
        let failed = done.iter().any(|completion| !completion.status.is_ok());
        if failed {
            self.settle_failed(done)?;
        }
        let resets = self.bios.iter().filter(|bio| bio.op == Op::ZoneReset).count();
        Ok((done.len() - resets - self.full.len()) as u64)
    }

    /// An append fails if its zone is full; any other failure is an error.
    #[cold]
    fn settle_failed(&mut self, done: &[Completion]) -> Result<(), Status> {
        for completion in done.iter().filter(|completion| !completion.status.is_ok()) {
            let (status, zone) = (completion.status, completion.user_data as usize);
            let appends = matches!(self.pattern, Pattern::RandomAppend | Pattern::OwnAppend);
            if !appends || status != Status::IoErr {
                return Err(status);
            }
            self.full.push(self.zones[zone].start);
        }
        Ok(())
    }
}

/// The sequential zones of a disk, taken as empty.
fn zones(disk: &dyn Disk) -> impl Iterator<Item = StreamZone> {
    let mut report: Vec<ZoneInfo> = Vec::new();
    disk.report_zones(Sector(0), usize::MAX, &mut report).expect("a disk has a sector 0");
    let sequential = report
        .into_iter()
        .filter(|zone| zone.kind == blockyard_core::zone::ZoneType::SequentialWriteRequired);
    sequential.map(|zone| StreamZone {
        start: zone.start,
        capacity_sectors: zone.capacity_sectors,
        written: 0,
    })
}

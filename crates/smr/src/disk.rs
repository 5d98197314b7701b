//! The emulated disk: executes commands on a medium, and reports failures as sense data.
//!
//! ```text
//! CDB ▸ Command ▸ what the disk reports (inquiry, vpd, mode, opcodes), or
//!                 blocks (access), or zones (manage, report) ▸ Zones (words) ▸ Media
//! ```
//!
//! Any number of threads may send commands. Commands for different zones share no lock; concurrent
//! writes to one zone copy their data in parallel. There is one logical unit, and it never reports
//! unit attentions: its only user causes everything that happens to it.

mod access;
mod fault;
mod manage;
mod report;

use std::io;

use blockyard_core::inject::{Injection, ZoneFault};
use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{DeviceError, Extent, SECTOR_SHIFT, Sector};
use blockyard_sync::zone_resources::{ZoneCounts, ZoneLimits};

use crate::cdb::{Blocks, CdbError, Command};
use crate::config::{DiskConfig, DiskError};
use crate::layout::Layout;
use crate::sense::{Sense, SenseFormat};
use crate::transport::{Data, Outcome, ScsiTransport, TransportError};
use crate::{capacity, inquiry, mode, opcodes, vpd};
use blockyard_zone_media::{Media, RecordedZones};

/// A host-managed SMR disk on a medium.
#[derive(Debug)]
pub struct Disk<M> {
    config: DiskConfig,
    zones: RecordedZones<Layout>,
    media: M,
    /// Sectors of a physical block.
    physical_sectors: u64,
    /// Log2 of the sectors in a logical block.
    block_shift: u32,
}

/// Why a command ends early.
enum Stop {
    /// The disk refuses the command.
    Refused(Sense),
    /// The command cannot be executed.
    Transport(TransportError),
}

impl From<Sense> for Stop {
    fn from(sense: Sense) -> Stop {
        Stop::Refused(sense)
    }
}

impl From<TransportError> for Stop {
    fn from(error: TransportError) -> Stop {
        Stop::Transport(error)
    }
}

impl<M: Media> Disk<M> {
    /// Opens a disk, with the zones recorded on the medium; on a new medium all zones are empty.
    ///
    /// # Errors
    /// If the configuration is invalid, or the medium's records do not match it.
    pub fn open(config: DiskConfig, media: M) -> Result<Disk<M>, DiskError> {
        config.check()?;
        let limits = ZoneLimits { open_max: config.zone_max_open, active_max: 0 };
        let physical_sectors = u64::from(config.physical_block) >> SECTOR_SHIFT;
        let layout = Layout::new(&config);
        let zones = RecordedZones::new(layout, limits, &media.zones(), physical_sectors)?;
        let block_shift = config.logical_block.trailing_zeros() - SECTOR_SHIFT;
        Ok(Disk { config, zones, media, physical_sectors, block_shift })
    }

    /// The configuration of the disk.
    pub fn config(&self) -> &DiskConfig {
        &self.config
    }

    /// The layout of the zones.
    pub fn layout(&self) -> &Layout {
        self.zones.layout()
    }

    /// The medium of the disk.
    pub fn media(&self) -> &M {
        &self.media
    }

    /// Number of open zones; `None` without a limit.
    pub fn counts(&self) -> Option<ZoneCounts> {
        self.zones.counts()
    }

    /// The current state of the conventional or sequential zone in a slot.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn zone(&self, slot: u32) -> ZoneInfo {
        self.zones.info(slot)
    }

    /// Makes a sequential zone read-only or offline, as a fault of the disk would. A zone that
    /// already has the condition does not change.
    ///
    /// # Errors
    /// If the medium cannot record it, the zone does not exist, or the zone cannot have that
    /// condition.
    pub fn break_zone(&self, slot: u32, cond: ZoneCond) -> io::Result<()> {
        self.check_fault(slot, cond)?;
        self.zones.change_fault(slot, cond, ZoneFault::Break, &self.media)
    }

    /// Empties a sequential zone that has this condition, read-only or offline. Any other zone does
    /// not change.
    ///
    /// # Errors
    /// As [`Disk::break_zone`].
    pub fn repair_zone(&self, slot: u32, cond: ZoneCond) -> io::Result<()> {
        self.check_fault(slot, cond)?;
        self.zones.change_fault(slot, cond, ZoneFault::Repair, &self.media)
    }

    /// Refuses a zone that does not exist or cannot have this fault condition.
    fn check_fault(&self, slot: u32, cond: ZoneCond) -> io::Result<()> {
        let layout = self.layout();
        let exists = slot < layout.slots() && !layout.is_conventional(slot);
        if !exists || !matches!(cond, ZoneCond::ReadOnly | ZoneCond::Offline) {
            let text = format!(
                "invalid state {cond} of zone {slot}: expected a sequential zone ({} to {}), \
                 read-only or offline",
                layout.conventional_count(),
                layout.slots() - 1
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(())
    }

    /// Executes a command.
    fn run(&self, cdb: &[u8], data: Data<'_>) -> Result<Outcome, Stop> {
        let command = Command::parse(cdb).map_err(|error| match error {
            CdbError::Refused(sense) => Stop::Refused(sense),
            CdbError::Length(len) => Stop::Transport(TransportError::CdbLength(len)),
        })?;
        if !opcodes::is_supported(&self.config, command.operation()) {
            return Err(Sense::INVALID_OPERATION_CODE.into());
        }
        let config = &self.config;
        match command {
            Command::TestUnitReady => Ok(Outcome::good(0)),
            Command::Read { form, blocks, fua } => self.read(form, blocks, fua, data),
            Command::Write { form, blocks, fua } => self.write(form, blocks, fua, data),
            Command::WriteSame { form, blocks, unmap, no_data } => {
                self.write_same(form, blocks, unmap, no_data, data)
            }
            Command::SynchronizeCache { blocks, .. } => self.synchronize(blocks),
            Command::Unmap { list_bytes } => self.unmap(list_bytes, data),
            Command::ReportZones { lba, allocation, partial, option } => {
                self.report_zones(lba, allocation, partial, option, data)
            }
            Command::Zones { action, all: true, .. } => self.manage_all(action),
            Command::Zones { action, zone_id, all: false } => self.manage(action, zone_id),
            Command::RequestSense { descriptors, allocation } => {
                let format = if descriptors { SenseFormat::Descriptor } else { SenseFormat::Fixed };
                answer(data, allocation.into(), &Sense::NO_SENSE.print(format))
            }
            Command::Inquiry { page: None, allocation } => {
                answer(data, allocation.into(), &inquiry::standard())
            }
            Command::Inquiry { page: Some(page), allocation } => {
                answer(data, allocation.into(), &vpd::page(config, page)?)
            }
            Command::ModeSense { form, request, allocation } => {
                answer(data, allocation.into(), &mode::sense(config, form, request)?)
            }
            Command::ReadCapacity10 => answer(data, u32::MAX, &capacity::ten(config)),
            Command::ReadCapacity16 { allocation } => {
                answer(data, allocation, &capacity::sixteen(config))
            }
            Command::ReportLuns { select, allocation } => {
                answer(data, allocation, &inquiry::luns(select)?)
            }
            Command::ReportSupportedOperationCodes { filter, timeouts, allocation } => {
                answer(data, allocation, &opcodes::report(config, filter, timeouts)?)
            }
        }
    }

    /// Number of logical blocks.
    fn blocks(&self) -> u64 {
        self.config.size >> self.config.logical_block.trailing_zeros()
    }

    /// The first sector and the number of sectors of a block range; refuses a range beyond the
    /// disk.
    fn range(&self, blocks: Blocks) -> Result<(Sector, u64), Sense> {
        let Blocks { lba, count } = blocks;
        let capacity = self.blocks();
        if lba > capacity || u64::from(count) > capacity - lba {
            return Err(Sense::LBA_OUT_OF_RANGE.at(lba));
        }
        Ok((Sector(lba << self.block_shift), u64::from(count) << self.block_shift))
    }

    /// Address of the block that contains a sector.
    fn lba(&self, sector: Sector) -> u64 {
        sector.0 >> self.block_shift
    }
}

impl<M: Media> ScsiTransport for Disk<M> {
    fn execute(&self, cdb: &[u8], data: Data<'_>) -> Result<Outcome, TransportError> {
        match self.run(cdb, data) {
            Ok(outcome) => Ok(outcome),
            Err(Stop::Refused(sense)) => Ok(Outcome::check(sense)),
            Err(Stop::Transport(error)) => Err(error),
        }
    }

    /// Of conventional zones the medium knows it. For data of sequential zones the write pointer
    /// says where they end.
    fn extent(&self, from: Sector, sectors: u64) -> Extent {
        let end = self.layout().first(self.layout().conventional_count()).start;
        match end.0.saturating_sub(from.0) {
            0 => Extent { sectors, allocated: true, zero: false },
            conventional => self.media.extent(from, sectors.min(conventional)),
        }
    }

    fn inject(&self, injection: &Injection) -> Result<(), DeviceError> {
        self.fault(injection)
    }
}

/// Copies a response to the host, truncated to the allocation length and the buffer.
fn answer(data: Data<'_>, allocation: u32, bytes: &[u8]) -> Result<Outcome, Stop> {
    let room = room_for_answer(data)?;
    let len = bytes.len().min(allocation as usize).min(room.len());
    room[..len].copy_from_slice(&bytes[..len]);
    Ok(Outcome::good(len))
}

/// The buffer for a response; empty if the host gave none.
fn room_for_answer(data: Data<'_>) -> Result<&mut [u8], TransportError> {
    match data {
        Data::In(room) => Ok(room),
        Data::None | Data::Out([]) => Ok(&mut []),
        Data::Out(_) => Err(TransportError::Direction { wanted: "from the device" }),
    }
}

/// A buffer of exactly `wanted` bytes; fails if the given one is shorter.
fn room_for(data: Data<'_>, wanted: u64) -> Result<&mut [u8], TransportError> {
    let room = room_for_answer(data)?;
    let given = room.len() as u64;
    if given < wanted {
        return Err(TransportError::Buffer { wanted, given });
    }
    Ok(&mut room[..wanted as usize])
}

/// Exactly `wanted` bytes of data from the host.
fn sent(data: Data<'_>, wanted: u64) -> Result<&[u8], TransportError> {
    let bytes = match data {
        Data::Out(bytes) => bytes,
        Data::None => &[],
        Data::In([]) => &[],
        Data::In(_) => return Err(TransportError::Direction { wanted: "to the device" }),
    };
    let given = bytes.len() as u64;
    if given < wanted {
        return Err(TransportError::Buffer { wanted, given });
    }
    Ok(&bytes[..wanted as usize])
}

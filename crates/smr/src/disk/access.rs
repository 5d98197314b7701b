//! Block access: reads, and all commands that write.

use std::io;

use blockyard_core::zone::zbc::{self, Refusal};
use blockyard_core::zone::{Zone, ZoneCond};
use blockyard_core::{SECTOR_SHIFT, Sector};

use super::{Disk, Stop, room_for, sent};
use crate::cdb::{Blocks, Form};
use crate::layout::{ZonePart, ZonePlace};
use crate::opcodes;
use crate::sense::Sense;
use crate::transport::{Data, Outcome};
use crate::vpd::{TRANSFER_BYTES_MAX, UNMAP_BYTES_MAX, UNMAP_RANGES_MAX, WRITE_SAME_BYTES_MAX};
use blockyard_zone_media::{Media, PermittedWrite};

/// Bytes of a repeated block that are written to the medium at once.
const FILL_BYTES: usize = 64 << 10;
/// Bytes of the header of an UNMAP parameter list.
const UNMAP_HEAD_BYTES: usize = 8;
/// Bytes of each block descriptor in the list.
const UNMAP_RANGE_BYTES: usize = 16;

/// Bytes of a number of sectors.
fn bytes_of(sectors: u64) -> u64 {
    sectors << SECTOR_SHIFT
}

/// Refuses a command with an invalid number of blocks.
fn invalid_count(form: Form) -> Sense {
    let byte = match form {
        Form::Six => 4,
        Form::Ten => 7,
        Form::Twelve => 6,
        Form::Sixteen => 10,
    };
    Sense::invalid_field(byte, None)
}

/// Sense data of a refused write or zone operation: ZBC-2 4.5.3.4.
pub(super) fn sense_of(refusal: Refusal) -> Sense {
    match refusal {
        Refusal::Conventional | Refusal::Full => Sense::INVALID_FIELD_IN_CDB,
        Refusal::ReadOnly => Sense::ZONE_IS_READ_ONLY,
        Refusal::Offline => Sense::ZONE_IS_OFFLINE,
        Refusal::Unaligned => Sense::UNALIGNED_WRITE,
        Refusal::Boundary => Sense::WRITE_BOUNDARY_VIOLATION,
        Refusal::OpenLimit => Sense::INSUFFICIENT_ZONE_RESOURCES,
    }
}

/// The data that a write puts on the medium.
enum Content<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// This block, repeated.
    Repeated(&'a [u8]),
    /// Zeros.
    Zeros,
}

impl<M: Media> Disk<M> {
    /// READ.
    pub(super) fn read(
        &self,
        form: Form,
        blocks: Blocks,
        fua: bool,
        data: Data<'_>,
    ) -> Result<Outcome, Stop> {
        let (start, sectors) = self.range(blocks)?;
        let len = bytes_of(sectors);
        if len > TRANSFER_BYTES_MAX {
            return Err(invalid_count(form).into());
        }
        let room = room_for(data, len)?;
        if len == 0 {
            return Ok(Outcome::good(0));
        }
        self.may_read(start, start + sectors)?;
        if fua && self.config.write_cache {
            // SBC-4 4.16: such a read returns what the medium holds.
            let flushed = self.media.flush_range(start.bytes(), len);
            flushed.map_err(|_| Sense::WRITE_ERROR)?;
        }
        let mut at = start;
        let mut rest = &mut *room;
        while !rest.is_empty() {
            let place = self.layout().place_of(at);
            // Conventional zones have no state: their part of a read needs only one access.
            let part_sectors = match place.part {
                ZonePart::Conventional => start + sectors - at,
                _ => (start + sectors).min(place.end) - at,
            };
            let (part, after) = rest.split_at_mut(bytes_of(part_sectors) as usize);
            match place.part {
                ZonePart::Sequential => self.read_sequential(place, at, part)?,
                _ => self.read_media(at, part)?,
            }
            rest = after;
            at += part_sectors;
        }
        Ok(Outcome::good(room.len()))
    }

    /// Whether a range may be read, as far as the layout decides it.
    fn may_read(&self, start: Sector, end: Sector) -> Result<(), Sense> {
        let first = self.layout().place_of(start);
        let mut place = first;
        loop {
            let at = self.lba(place.start.max(start));
            if place.part == ZonePart::Gap {
                return Err(Sense::GAP_ZONE_ACCESS.at(at));
            }
            if place.part != first.part {
                return Err(Sense::READ_BOUNDARY_VIOLATION.at(at));
            }
            let again = place != first && place.part == ZonePart::Sequential;
            if again && !self.config.unrestricted_reads {
                return Err(Sense::READ_BOUNDARY_VIOLATION.at(at));
            }
            if place.end >= end {
                return Ok(());
            }
            place = self.layout().place_of(place.end);
        }
    }

    /// Reads from one sequential zone. Sectors above the write pointer read as zeros.
    fn read_sequential(&self, place: ZonePlace, at: Sector, into: &mut [u8]) -> Result<(), Sense> {
        let offline = || Sense::ZONE_IS_OFFLINE.at(self.lba(at));
        let erasures = self.zones.erasures(place.slot);
        let readable_end = self.zones.readable_end(place.slot).ok_or_else(offline)?;
        let readable = bytes_of(readable_end.0.saturating_sub(at.0)).min(into.len() as u64);
        let restricted = !self.config.unrestricted_reads;
        let (written, unwritten) = into.split_at_mut(readable as usize);
        if restricted && !unwritten.is_empty() {
            return Err(Sense::READ_INVALID_DATA.at(self.lba(readable_end.max(at))));
        }
        self.read_media(at, written)?;
        unwritten.fill(0);
        // The zone was reset during the read; answer as of the moment when it was empty.
        if self.zones.erasures(place.slot) != erasures {
            if restricted {
                return Err(Sense::READ_INVALID_DATA.at(self.lba(at)));
            }
            into.fill(0);
        }
        Ok(())
    }

    fn read_media(&self, at: Sector, into: &mut [u8]) -> Result<(), Sense> {
        if into.is_empty() {
            return Ok(());
        }
        let read = self.media.read(at.bytes(), into);
        read.map_err(|_| Sense::UNRECOVERED_READ_ERROR.at(self.lba(at)))
    }

    /// WRITE.
    pub(super) fn write(
        &self,
        form: Form,
        blocks: Blocks,
        fua: bool,
        data: Data<'_>,
    ) -> Result<Outcome, Stop> {
        let (start, sectors) = self.range(blocks)?;
        let len = bytes_of(sectors);
        if len > TRANSFER_BYTES_MAX {
            return Err(invalid_count(form).into());
        }
        let bytes = sent(data, len)?;
        if len > 0 {
            self.put(start, sectors, &Content::Bytes(bytes))?;
            if fua || !self.config.write_cache {
                let flushed = self.media.flush_range(start.bytes(), len);
                flushed.map_err(|_| Sense::WRITE_ERROR)?;
            }
        }
        Ok(Outcome::good(bytes.len()))
    }

    /// WRITE SAME. A disk may ignore the UNMAP bit (SBC-4 4.7.3.4.3): in sequential zones it makes
    /// no difference.
    pub(super) fn write_same(
        &self,
        form: Form,
        blocks: Blocks,
        unmap: bool,
        no_data: bool,
        data: Data<'_>,
    ) -> Result<Outcome, Stop> {
        if unmap && !opcodes::unmaps(&self.config) {
            return Err(Sense::invalid_field(1, Some(3)).into());
        }
        let (start, sectors) = self.range(blocks)?;
        // SBC-4 6.6.4: 0 blocks mean all blocks to the end of the disk; WSNZ says that this is
        // unsupported.
        if sectors == 0 || bytes_of(sectors) > WRITE_SAME_BYTES_MAX {
            return Err(invalid_count(form).into());
        }
        let block_bytes = if no_data { 0 } else { u64::from(self.config.logical_block) };
        let block = sent(data, block_bytes)?;
        let content = match block.iter().all(|&byte| byte == 0) {
            true => Content::Zeros,
            false => Content::Repeated(block),
        };
        self.put(start, sectors, &content)?;
        self.settle()?;
        Ok(Outcome::good(block.len()))
    }

    /// Writes if the zone's state permits it.
    fn put(&self, start: Sector, sectors: u64, content: &Content<'_>) -> Result<(), Sense> {
        let at = self.lba(start);
        let place = self.layout().place_of(start);
        match place.part {
            ZonePart::Gap => Err(Sense::GAP_ZONE_ACCESS.at(at)),
            ZonePart::Conventional => {
                // Conventional zones are contiguous from the start of the disk.
                let end = self.layout().first(self.layout().conventional_count()).start;
                if start + sectors > end {
                    return Err(Sense::WRITE_BOUNDARY_VIOLATION.at(self.lba(end)));
                }
                self.copy(start, sectors, content).map_err(|_| Sense::WRITE_ERROR.at(at))
            }
            ZonePart::Sequential => {
                let permit = |zone: &Zone| {
                    let to = zbc::step_write(zone, start, sectors)?;
                    // ZBC-2 4.5.3.4.2: a write ends at the end of a physical block.
                    match (start.0 + sectors).is_multiple_of(self.physical_sectors) {
                        true => Ok(PermittedWrite { at: start, sectors, to }),
                        false => Err(Refusal::Unaligned),
                    }
                };
                let copy = |_| self.copy(start, sectors, content);
                let (copied, state) = self
                    .zones
                    .write(place.slot, permit, copy)
                    .map_err(|refusal| sense_of(refusal).at(at))?;
                // The write pointer has moved even if the copy failed, and other threads may
                // already have written after it. So the medium records the new state in any case.
                let kept = self.media.zone_changed(place.slot, state);
                copied.and(kept).map_err(|_| Sense::WRITE_ERROR.at(at))
            }
        }
    }

    fn copy(&self, at: Sector, sectors: u64, content: &Content<'_>) -> io::Result<()> {
        match *content {
            Content::Bytes(bytes) => self.media.write(at.bytes(), bytes),
            Content::Zeros => self.media.zero(at.bytes(), bytes_of(sectors)),
            Content::Repeated(block) => {
                let len = bytes_of(sectors).min(FILL_BYTES as u64) as usize;
                let fill: Vec<u8> = block.iter().copied().cycle().take(len).collect();
                let (mut at, end) = (at.bytes(), (at + sectors).bytes());
                while at < end {
                    let part = &fill[..(end - at).min(len as u64) as usize];
                    self.media.write(at, part)?;
                    at += part.len() as u64;
                }
                Ok(())
            }
        }
    }

    /// Makes a command's changes durable before it completes, if there is no write cache.
    pub(super) fn settle(&self) -> Result<(), Sense> {
        if !self.config.write_cache {
            self.media.flush().map_err(|_| Sense::WRITE_ERROR)?;
        }
        Ok(())
    }

    /// SYNCHRONIZE CACHE: flushes everything, whatever the range.
    pub(super) fn synchronize(&self, blocks: Blocks) -> Result<Outcome, Stop> {
        self.range(blocks)?;
        self.media.flush().map_err(|_| Sense::WRITE_ERROR)?;
        Ok(Outcome::good(0))
    }

    /// UNMAP: deallocates in conventional zones and leaves sequential zones unchanged.
    pub(super) fn unmap(&self, list_bytes: u16, data: Data<'_>) -> Result<Outcome, Stop> {
        let list = sent(data, list_bytes.into())?;
        if list.is_empty() {
            return Ok(Outcome::good(0));
        }
        let ranges = unmap_ranges(list)?;
        let mut total = 0u64;
        for blocks in unmapped(ranges) {
            let (start, sectors) = self.range(blocks)?;
            total = total.saturating_add(bytes_of(sectors));
            if total > UNMAP_BYTES_MAX {
                return Err(Sense::INVALID_FIELD_IN_PARAMETER_LIST.into());
            }
            self.may_unmap(start, start + sectors)?;
        }
        let end = self.layout().first(self.layout().conventional_count()).start;
        for blocks in unmapped(ranges) {
            let (start, sectors) = self.range(blocks)?;
            let conventional = (start + sectors).min(end).0.saturating_sub(start.0);
            let zeroed = self.media.zero(start.bytes(), bytes_of(conventional));
            zeroed.map_err(|_| Sense::WRITE_ERROR.at(blocks.lba))?;
        }
        self.settle()?;
        Ok(Outcome::good(list.len()))
    }

    /// Whether every part of a range may be unmapped.
    fn may_unmap(&self, start: Sector, end: Sector) -> Result<(), Sense> {
        let mut at = start;
        while at < end {
            let place = self.layout().place_of(at);
            let lba = self.lba(at);
            match place.part {
                ZonePart::Conventional => {}
                ZonePart::Gap => return Err(Sense::GAP_ZONE_ACCESS.at(lba)),
                ZonePart::Sequential => match self.zones.cond(place.slot) {
                    ZoneCond::ReadOnly => return Err(Sense::ZONE_IS_READ_ONLY.at(lba)),
                    ZoneCond::Offline => return Err(Sense::ZONE_IS_OFFLINE.at(lba)),
                    _ => {}
                },
            }
            at = place.end;
        }
        Ok(())
    }
}

/// The block descriptors of an UNMAP parameter list, SBC-4 5.35.2.
fn unmap_ranges(list: &[u8]) -> Result<&[u8], Sense> {
    if list.len() < UNMAP_HEAD_BYTES {
        return Err(Sense::PARAMETER_LIST_LENGTH_ERROR);
    }
    let len = usize::from(u16::from_be_bytes([list[2], list[3]]));
    let ranges = &list[UNMAP_HEAD_BYTES..];
    if len > ranges.len() {
        return Err(Sense::PARAMETER_LIST_LENGTH_ERROR);
    }
    if len / UNMAP_RANGE_BYTES > UNMAP_RANGES_MAX as usize {
        return Err(Sense::invalid_parameter(2));
    }
    Ok(&ranges[..len])
}

fn unmapped(ranges: &[u8]) -> impl Iterator<Item = Blocks> {
    ranges.chunks_exact(UNMAP_RANGE_BYTES).map(|range| {
        let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        Blocks { lba: number(&range[..8]), count: number(&range[8..12]) as u32 }
    })
}

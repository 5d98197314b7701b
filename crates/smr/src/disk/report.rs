//! REPORT ZONES: ZBC-2 5.7.

use blockyard_core::Sector;
use blockyard_core::zone::{ZoneCond, ZoneInfo};

use super::{Disk, Stop, room_for_answer};
use crate::layout::{ZonePart, ZonePlace};
use crate::sense::Sense;
use crate::transport::{Data, Outcome};
use blockyard_zone_media::Media;

/// Bytes of the header, and of each zone descriptor.
pub(super) const REPORT_UNIT_BYTES: usize = 64;
/// The reporting options field of the command: byte and highest bit.
const OPTIONS: (u16, u8) = (14, 5);
/// The write pointer value of a zone that has none.
const NO_WP: u64 = u64::MAX;

/// Which zones to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filter {
    All,
    Cond(ZoneCond),
    /// No zone: the conditions "reset recommended" and "non-sequential write resources active"
    /// never occur on this disk.
    None,
    NotGap,
    NoWritePointer,
}

impl Filter {
    /// Parses a reporting option, ZBC-2 table 27.
    fn of(option: u8) -> Result<Filter, Sense> {
        Ok(match option {
            0x00 => Filter::All,
            0x01 => Filter::Cond(ZoneCond::Empty),
            0x02 => Filter::Cond(ZoneCond::ImplicitOpen),
            0x03 => Filter::Cond(ZoneCond::ExplicitOpen),
            0x04 => Filter::Cond(ZoneCond::Closed),
            0x05 => Filter::Cond(ZoneCond::Full),
            0x06 => Filter::Cond(ZoneCond::ReadOnly),
            0x07 => Filter::Cond(ZoneCond::Offline),
            0x10 | 0x11 => Filter::None,
            0x3e => Filter::NotGap,
            0x3f => Filter::NoWritePointer,
            _ => return Err(Sense::invalid_field(OPTIONS.0, Some(OPTIONS.1))),
        })
    }

    fn takes(self, part: ZonePart, cond: ZoneCond) -> bool {
        match self {
            Filter::All => true,
            Filter::Cond(wanted) => part == ZonePart::Sequential && cond == wanted,
            Filter::None => false,
            Filter::NotGap => part != ZonePart::Gap,
            // ZBC-2 4.5.3.2.9: conventional zones and gap zones.
            Filter::NoWritePointer => part != ZonePart::Sequential,
        }
    }
}

impl<M: Media> Disk<M> {
    /// REPORT ZONES. Zones that do not fit in the buffer are counted unless the host asked for a
    /// partial report.
    pub(super) fn report_zones(
        &self,
        lba: u64,
        allocation: u32,
        partial: bool,
        option: u8,
        data: Data<'_>,
    ) -> Result<Outcome, Stop> {
        let filter = Filter::of(option)?;
        if lba >= self.blocks() {
            return Err(Sense::LBA_OUT_OF_RANGE.at(lba).into());
        }
        let room = room_for_answer(data)?;
        let room_len = room.len().min(allocation as usize);
        let (head, list) = room[..room_len].split_at_mut(room_len.min(REPORT_UNIT_BYTES));
        let mut descriptors = list.chunks_exact_mut(REPORT_UNIT_BYTES);
        let (mut found, mut filled) = (0u32, 0usize);
        let first = self.layout().place_of(Sector(lba << self.block_shift));
        'slots: for slot in first.slot..self.layout().slots() {
            let zones = [Some(self.layout().first(slot)), self.layout().gap(slot)];
            for place in zones.into_iter().flatten().filter(|place| place.start >= first.start) {
                let zone = (place.part != ZonePart::Gap).then(|| self.zones.info(slot));
                if !filter.takes(place.part, zone.map_or(ZoneCond::NotWp, |zone| zone.cond)) {
                    continue;
                }
                match descriptors.next() {
                    Some(bytes) => {
                        self.describe(place, zone, bytes);
                        filled += 1;
                    }
                    None if partial => break 'slots,
                    None => {}
                }
                found += 1;
            }
        }
        let mut bytes = [0; REPORT_UNIT_BYTES];
        let list_bytes = found * REPORT_UNIT_BYTES as u32;
        bytes[..4].copy_from_slice(&list_bytes.to_be_bytes());
        // SAME stays 0: types and lengths may differ between zones.
        bytes[8..16].copy_from_slice(&(self.blocks() - 1).to_be_bytes());
        if self.layout().has_gaps() {
            let granularity = self.layout().slot_sectors() >> self.block_shift;
            bytes[16..24].copy_from_slice(&granularity.to_be_bytes());
        }
        head.copy_from_slice(&bytes[..head.len()]);
        Ok(Outcome::good(head.len() + filled * REPORT_UNIT_BYTES))
    }

    /// Prints a zone descriptor, ZBC-2 5.7.3. A gap zone has no state.
    fn describe(&self, place: ZonePlace, zone: Option<ZoneInfo>, bytes: &mut [u8]) {
        let kind = match place.part {
            ZonePart::Conventional => 0x1,
            ZonePart::Sequential => 0x2,
            ZonePart::Gap => 0x5,
        };
        let cond = zone.map_or(ZoneCond::NotWp, |zone| zone.cond);
        let wp = match zone {
            Some(zone) if has_write_pointer(cond) => self.lba(zone.wp),
            _ => NO_WP,
        };
        bytes.fill(0);
        bytes[0] = kind;
        bytes[1] = (cond as u8) << 4;
        bytes[8..16].copy_from_slice(&self.lba(Sector(place.end - place.start)).to_be_bytes());
        bytes[16..24].copy_from_slice(&self.lba(place.start).to_be_bytes());
        bytes[24..32].copy_from_slice(&wp.to_be_bytes());
    }
}

/// Whether the write pointer is valid in this condition, ZBC-2 table 31.
fn has_write_pointer(cond: ZoneCond) -> bool {
    use ZoneCond::{Closed, Empty, ExplicitOpen, ImplicitOpen};
    matches!(cond, Empty | ImplicitOpen | ExplicitOpen | Closed)
}

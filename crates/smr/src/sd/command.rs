//! The commands that the driver sends: the newest form of each operation, with the options that
//! Linux sets.

use crate::cdb::{Blocks, Command, Form, ModeRequest, OperationFilter, PageControl, ZoneAction};

/// INQUIRY: the standard data, or a page of vital product data.
pub(super) fn inquiry(page: Option<u8>, allocation: u16) -> Command {
    Command::Inquiry { page, allocation }
}

/// MODE SENSE(6) of the current values of one page, without block descriptors.
pub(super) fn mode_sense(page: u8, allocation: u8) -> Command {
    let request = ModeRequest {
        without_blocks: true,
        long_lba: false,
        control: PageControl::Current,
        page,
        subpage: 0,
    };
    Command::ModeSense { form: Form::Six, request, allocation: allocation.into() }
}

/// REPORT SUPPORTED OPERATION CODES for a command without service actions.
pub(super) fn report_opcode(opcode: u8, allocation: u32) -> Command {
    let filter = OperationFilter::Opcode(opcode);
    Command::ReportSupportedOperationCodes { filter, timeouts: false, allocation }
}

/// READ(16).
pub(super) fn read(blocks: Blocks) -> Command {
    Command::Read { form: Form::Sixteen, blocks, fua: false }
}

/// WRITE(16).
pub(super) fn write(blocks: Blocks, fua: bool) -> Command {
    Command::Write { form: Form::Sixteen, blocks, fua }
}

/// WRITE SAME(16) of one block of data. `unmap` lets the disk deallocate.
pub(super) fn write_same(blocks: Blocks, unmap: bool) -> Command {
    Command::WriteSame { form: Form::Sixteen, blocks, unmap, no_data: false }
}

/// SYNCHRONIZE CACHE(16) of the whole disk.
pub(super) fn synchronize_cache() -> Command {
    let blocks = Blocks { lba: 0, count: 0 };
    Command::SynchronizeCache { form: Form::Sixteen, blocks, immediate: false }
}

/// REPORT ZONES from the zone that contains `lba` on, as many zones as fit.
pub(super) fn report_zones(lba: u64, allocation: u32) -> Command {
    Command::ReportZones { lba, allocation, partial: true, option: 0 }
}

/// A ZBC OUT command on the zone that starts at `zone_id`.
pub(super) fn zone(action: ZoneAction, zone_id: u64) -> Command {
    Command::Zones { action, zone_id, all: false }
}

/// RESET WRITE POINTER of all zones.
pub(super) fn reset_all() -> Command {
    Command::Zones { action: ZoneAction::Reset, zone_id: 0, all: true }
}

/// Length of the parameter list of UNMAP with one descriptor, in bytes.
pub(super) const UNMAP_LIST_LEN: usize = 24;

/// The parameter list of UNMAP with one descriptor (SBC-4 5.35.2).
pub(super) fn unmap_list(blocks: Blocks) -> [u8; UNMAP_LIST_LEN] {
    let mut list = [0; UNMAP_LIST_LEN];
    // A length field counts neither itself nor earlier bytes.
    list[0..2].copy_from_slice(&(UNMAP_LIST_LEN as u16 - 2).to_be_bytes());
    list[2..4].copy_from_slice(&(UNMAP_LIST_LEN as u16 - 8).to_be_bytes());
    list[8..16].copy_from_slice(&blocks.lba.to_be_bytes());
    list[16..20].copy_from_slice(&blocks.count.to_be_bytes());
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compared with the tables of the standards, byte by byte.
    #[test]
    fn fields_stand_where_the_standards_have_them() {
        let blocks = Blocks { lba: 0x0102_0304_0506_0708, count: 9 };
        let cases: [(Command, &[u8]); 11] = [
            (inquiry(None, 0x1234), &[0x12, 0, 0, 0x12, 0x34, 0]),
            (inquiry(Some(0xb6), 64), &[0x12, 1, 0xb6, 0, 64, 0]),
            (mode_sense(8, 192), &[0x1a, 8, 8, 0, 192, 0]),
            (report_opcode(0x93, 512), &[0xa3, 0x0c, 1, 0x93, 0, 0, 0, 0, 2, 0, 0, 0]),
            (read(blocks), &[0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0, 0]),
            (write(blocks, true), &[0x8a, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0, 0]),
            (write_same(blocks, true), &[0x93, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9, 0, 0]),
            (synchronize_cache(), &[0x91, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            (
                report_zones(blocks.lba, 0x10000),
                &[0x95, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0, 0, 0x80, 0],
            ),
            (
                zone(ZoneAction::Finish, blocks.lba),
                &[0x94, 2, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0],
            ),
            (reset_all(), &[0x94, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]),
        ];
        for (command, bytes) in cases {
            assert_eq!(&command.print()[..], bytes, "{command:?}");
        }
    }

    #[test]
    fn an_unmap_list_has_one_descriptor() {
        let list = unmap_list(Blocks { lba: 0x0102, count: 0x0304 });
        assert_eq!(list[..8], [0, 22, 0, 16, 0, 0, 0, 0]);
        assert_eq!(list[8..], [0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 3, 4, 0, 0, 0, 0]);
    }
}

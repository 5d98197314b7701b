//! SCSI commands as bytes: parsing and printing.
//!
//! A parsed command is well-formed: every bit that [`operations`] does not list is 0, and fields
//! with few valid values have one of them. The disk may still refuse it.

pub mod operations;

use std::fmt;
use std::ops::Deref;

use crate::sense::Sense;
use operations::{Operation, SERVICE_ACTION};

/// Length of the longest command.
pub const CDB_BYTES_MAX: usize = 16;

/// A printed command.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cdb {
    bytes: [u8; CDB_BYTES_MAX],
    len: usize,
}

impl Deref for Cdb {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl fmt::Debug for Cdb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.iter() {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// The form of a command that has several, by its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// 6 bytes.
    Six,
    /// 10 bytes: a block address has 32 bits, a length 16.
    Ten,
    /// 12 bytes: addresses and lengths have 32 bits.
    Twelve,
    /// 16 bytes: an address has 64 bits, a length 32.
    Sixteen,
}

/// A range of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Address of the first block.
    pub lba: u64,
    /// Number of blocks.
    pub count: u32,
}

/// A zone management action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ZoneAction {
    /// CLOSE ZONE.
    Close = 0x01,
    /// FINISH ZONE.
    Finish = 0x02,
    /// OPEN ZONE.
    Open = 0x03,
    /// RESET WRITE POINTER.
    Reset = 0x04,
}

impl ZoneAction {
    fn of(service_action: u8) -> Result<ZoneAction, Sense> {
        match service_action {
            0x01 => Ok(ZoneAction::Close),
            0x02 => Ok(ZoneAction::Finish),
            0x03 => Ok(ZoneAction::Open),
            0x04 => Ok(ZoneAction::Reset),
            _ => Err(Sense::invalid_field(1, Some(4))),
        }
    }
}

/// Which values of mode parameters are requested, SPC-5 6.13: page control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageControl {
    /// The current values.
    Current = 0,
    /// A mask of the changeable bits.
    Changeable = 1,
    /// The default values.
    Default = 2,
    /// The saved values.
    Saved = 3,
}

/// What MODE SENSE requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModeRequest {
    /// Omit block descriptors.
    pub without_blocks: bool,
    /// The block descriptor may be the long one.
    pub long_lba: bool,
    /// Which values of the parameters.
    pub control: PageControl,
    /// The page; 3Fh for all.
    pub page: u8,
    /// The subpage; FFh for all.
    pub subpage: u8,
}

/// Which commands REPORT SUPPORTED OPERATION CODES asks about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationFilter {
    /// All commands.
    All,
    /// A command without service actions.
    Opcode(u8),
    /// A command with this service action.
    ServiceAction(u8, u16),
    /// A command with this service action; if the operation code has none, the command without.
    Either(u8, u16),
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are the standards' own; units stand at the variants")]
pub enum Command {
    /// TEST UNIT READY, SPC-5 6.47.
    TestUnitReady,
    /// REQUEST SENSE, SPC-5 6.39. `allocation` is the size of the response buffer in bytes, here
    /// and below.
    RequestSense { descriptors: bool, allocation: u8 },
    /// INQUIRY, SPC-5 6.7; `page` is the requested page of vital product data.
    Inquiry { page: Option<u8>, allocation: u16 },
    /// MODE SENSE, SPC-5 6.13 and 6.14.
    ModeSense { form: Form, request: ModeRequest, allocation: u16 },
    /// READ CAPACITY(10), SBC-4 5.20.
    ReadCapacity10,
    /// READ CAPACITY(16), SBC-4 5.21.
    ReadCapacity16 { allocation: u32 },
    /// REPORT LUNS, SPC-5 6.33.
    ReportLuns { select: u8, allocation: u32 },
    /// REPORT SUPPORTED OPERATION CODES, SPC-5 6.35.
    ReportSupportedOperationCodes { filter: OperationFilter, timeouts: bool, allocation: u32 },
    /// READ, SBC-4 5.15 and following.
    Read { form: Form, blocks: Blocks, fua: bool },
    /// WRITE, SBC-4 5.40 and following.
    Write { form: Form, blocks: Blocks, fua: bool },
    /// WRITE SAME, SBC-4 5.51 and 5.52.
    WriteSame { form: Form, blocks: Blocks, unmap: bool, no_data: bool },
    /// SYNCHRONIZE CACHE, SBC-4 5.31 and 5.32.
    SynchronizeCache { form: Form, blocks: Blocks, immediate: bool },
    /// UNMAP, SBC-4 5.35; `list_bytes` is the length of the parameter list.
    Unmap { list_bytes: u16 },
    /// REPORT ZONES, ZBC-2 5.7; `option` selects the zones.
    ReportZones { lba: u64, allocation: u32, partial: bool, option: u8 },
    /// CLOSE ZONE, FINISH ZONE, OPEN ZONE and RESET WRITE POINTER, ZBC-2 5.2 to 5.8.
    Zones { action: ZoneAction, zone_id: u64, all: bool },
}

/// Why bytes are not a valid command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CdbError {
    /// There are fewer bytes than the operation code requires.
    Length(usize),
    /// The disk must refuse the command.
    Refused(Sense),
}

impl From<Sense> for CdbError {
    fn from(sense: Sense) -> CdbError {
        CdbError::Refused(sense)
    }
}

fn u16_at(cdb: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([cdb[at], cdb[at + 1]])
}

fn u32_at(cdb: &[u8], at: usize) -> u32 {
    u32::from(u16_at(cdb, at)) << 16 | u32::from(u16_at(cdb, at + 2))
}

fn u64_at(cdb: &[u8], at: usize) -> u64 {
    u64::from(u32_at(cdb, at)) << 32 | u64::from(u32_at(cdb, at + 4))
}

/// The operation of a command; checks that the command is complete and has only known bits.
fn operation_of(cdb: &[u8]) -> Result<&'static Operation, CdbError> {
    let opcode = *cdb.first().ok_or(CdbError::Length(0))?;
    let action = cdb.get(1).map_or(0, |byte| byte & SERVICE_ACTION);
    let mut known = Operation::with_opcode(opcode).peekable();
    if known.peek().is_none() {
        return Err(Sense::INVALID_OPERATION_CODE.into());
    }
    let operation = known
        .find(|operation| operation.service_action.is_none_or(|known| known == action))
        .ok_or(Sense::invalid_field(1, Some(4)))?;
    if cdb.len() < operation.usage.len() {
        return Err(CdbError::Length(cdb.len()));
    }
    for (at, (byte, usage)) in cdb.iter().zip(operation.usage).enumerate().skip(1) {
        let unknown = byte & !usage;
        if unknown != 0 {
            return Err(Sense::invalid_field(at as u16, Some(unknown.ilog2() as u8)).into());
        }
    }
    Ok(operation)
}

impl Form {
    /// The blocks of a command whose address and length are at READ's offsets for this form.
    fn blocks(self, cdb: &[u8]) -> Blocks {
        match self {
            Form::Six | Form::Ten => {
                Blocks { lba: u32_at(cdb, 2).into(), count: u16_at(cdb, 7).into() }
            }
            Form::Twelve => Blocks { lba: u32_at(cdb, 2).into(), count: u32_at(cdb, 6) },
            Form::Sixteen => Blocks { lba: u64_at(cdb, 2), count: u32_at(cdb, 10) },
        }
    }

    /// The form of an operation code.
    fn of(opcode: u8) -> Form {
        match opcode >> 5 {
            0 => Form::Six,
            1 | 2 => Form::Ten,
            5 => Form::Twelve,
            _ => Form::Sixteen,
        }
    }
}

impl Command {
    /// Parses a command. Bytes after its end are ignored.
    ///
    /// # Errors
    /// If there are too few bytes, or with the sense data of the refusal.
    pub fn parse(cdb: &[u8]) -> Result<Command, CdbError> {
        let operation = operation_of(cdb)?;
        let form = Form::of(operation.opcode);
        let bit = |at: usize, bit: u8| cdb[at] >> bit & 1 != 0;
        Ok(match operation.opcode {
            0x00 => Command::TestUnitReady,
            0x03 => Command::RequestSense { descriptors: bit(1, 0), allocation: cdb[4] },
            0x12 => parse_inquiry(cdb)?,
            0x1a | 0x5a => parse_mode_sense(form, cdb),
            0x25 => Command::ReadCapacity10,
            0x28 | 0x88 | 0xa8 => Command::Read { form, blocks: form.blocks(cdb), fua: bit(1, 3) },
            0x2a | 0x8a | 0xaa => Command::Write { form, blocks: form.blocks(cdb), fua: bit(1, 3) },
            0x35 | 0x91 => {
                let blocks = form.blocks(cdb);
                Command::SynchronizeCache { form, blocks, immediate: bit(1, 1) }
            }
            0x41 | 0x93 => Command::WriteSame {
                form,
                blocks: form.blocks(cdb),
                unmap: bit(1, 3),
                no_data: form == Form::Sixteen && bit(1, 0),
            },
            0x42 => Command::Unmap { list_bytes: u16_at(cdb, 7) },
            0x94 => Command::Zones {
                action: ZoneAction::of(cdb[1] & SERVICE_ACTION)?,
                zone_id: u64_at(cdb, 2),
                all: bit(14, 0),
            },
            0x95 => Command::ReportZones {
                lba: u64_at(cdb, 2),
                allocation: u32_at(cdb, 10),
                partial: bit(14, 7),
                option: cdb[14] & 0x3f,
            },
            0x9e => Command::ReadCapacity16 { allocation: u32_at(cdb, 10) },
            0xa0 => Command::ReportLuns { select: cdb[2], allocation: u32_at(cdb, 6) },
            0xa3 => parse_operation_filter(cdb)?,
            _ => return Err(Sense::INVALID_OPERATION_CODE.into()),
        })
    }

    /// The operation of this command.
    pub fn operation(&self) -> &'static Operation {
        match *self {
            Command::TestUnitReady => &operations::TEST_UNIT_READY,
            Command::RequestSense { .. } => &operations::REQUEST_SENSE,
            Command::Inquiry { .. } => &operations::INQUIRY,
            Command::ModeSense { form: Form::Six, .. } => &operations::MODE_SENSE_6,
            Command::ModeSense { .. } => &operations::MODE_SENSE_10,
            Command::ReadCapacity10 => &operations::READ_CAPACITY_10,
            Command::ReadCapacity16 { .. } => &operations::READ_CAPACITY_16,
            Command::ReportLuns { .. } => &operations::REPORT_LUNS,
            Command::ReportSupportedOperationCodes { .. } => {
                &operations::REPORT_SUPPORTED_OPERATION_CODES
            }
            Command::Read { form, .. } => match form {
                Form::Six | Form::Ten => &operations::READ_10,
                Form::Twelve => &operations::READ_12,
                Form::Sixteen => &operations::READ_16,
            },
            Command::Write { form, .. } => match form {
                Form::Six | Form::Ten => &operations::WRITE_10,
                Form::Twelve => &operations::WRITE_12,
                Form::Sixteen => &operations::WRITE_16,
            },
            Command::WriteSame { form: Form::Sixteen, .. } => &operations::WRITE_SAME_16,
            Command::WriteSame { .. } => &operations::WRITE_SAME_10,
            Command::SynchronizeCache { form: Form::Sixteen, .. } => {
                &operations::SYNCHRONIZE_CACHE_16
            }
            Command::SynchronizeCache { .. } => &operations::SYNCHRONIZE_CACHE_10,
            Command::Unmap { .. } => &operations::UNMAP,
            Command::ReportZones { .. } => &operations::REPORT_ZONES,
            Command::Zones { action, .. } => match action {
                ZoneAction::Close => &operations::CLOSE_ZONE,
                ZoneAction::Finish => &operations::FINISH_ZONE,
                ZoneAction::Open => &operations::OPEN_ZONE,
                ZoneAction::Reset => &operations::RESET_WRITE_POINTER,
            },
        }
    }

    /// Prints the command. An address or a length that does not fit in its form is truncated: the
    /// caller chooses a form that fits.
    pub fn print(&self) -> Cdb {
        let operation = self.operation();
        let mut cdb = Printer::new(operation);
        match *self {
            Command::TestUnitReady | Command::ReadCapacity10 => {}
            Command::RequestSense { descriptors, allocation } => {
                cdb.bit(1, 0, descriptors).put(4, &[allocation]);
            }
            Command::Inquiry { page, allocation } => {
                cdb.bit(1, 0, page.is_some()).put(2, &[page.unwrap_or(0)]);
                cdb.put(3, &allocation.to_be_bytes());
            }
            Command::ModeSense { form, request, allocation } => {
                let ModeRequest { without_blocks, long_lba, control, page, subpage } = request;
                cdb.bit(1, 3, without_blocks)
                    .put(2, &[(control as u8) << 6 | page & 0x3f, subpage]);
                if form == Form::Six {
                    cdb.put(4, &[allocation as u8]);
                } else {
                    cdb.bit(1, 4, long_lba).put(7, &allocation.to_be_bytes());
                }
            }
            Command::ReadCapacity16 { allocation } => {
                cdb.put(10, &allocation.to_be_bytes());
            }
            Command::ReportLuns { select, allocation } => {
                cdb.put(2, &[select]).put(6, &allocation.to_be_bytes());
            }
            Command::ReportSupportedOperationCodes { filter, timeouts, allocation } => {
                let (option, opcode, action) = match filter {
                    OperationFilter::All => (0, 0, 0),
                    OperationFilter::Opcode(opcode) => (1, opcode, 0),
                    OperationFilter::ServiceAction(opcode, action) => (2, opcode, action),
                    OperationFilter::Either(opcode, action) => (3, opcode, action),
                };
                cdb.put(2, &[option, opcode]).bit(2, 7, timeouts);
                cdb.put(4, &action.to_be_bytes()).put(6, &allocation.to_be_bytes());
            }
            Command::Read { form, blocks, fua } | Command::Write { form, blocks, fua } => {
                cdb.bit(1, 3, fua).blocks(form, blocks);
            }
            Command::WriteSame { form, blocks, unmap, no_data } => {
                cdb.bit(1, 3, unmap).blocks(form, blocks);
                cdb.bit(1, 0, no_data && form == Form::Sixteen);
            }
            Command::SynchronizeCache { form, blocks, immediate } => {
                cdb.bit(1, 1, immediate).blocks(form, blocks);
            }
            Command::Unmap { list_bytes } => {
                cdb.put(7, &list_bytes.to_be_bytes());
            }
            Command::ReportZones { lba, allocation, partial, option } => {
                cdb.put(2, &lba.to_be_bytes()).put(10, &allocation.to_be_bytes());
                cdb.put(14, &[option & 0x3f]).bit(14, 7, partial);
            }
            Command::Zones { zone_id, all, .. } => {
                cdb.put(2, &zone_id.to_be_bytes()).bit(14, 0, all);
            }
        }
        cdb.0
    }
}

/// Builds the bytes of a command.
struct Printer(Cdb);

impl Printer {
    fn new(operation: &Operation) -> Printer {
        let mut bytes = [0; CDB_BYTES_MAX];
        bytes[0] = operation.opcode;
        bytes[1] = operation.service_action.unwrap_or(0);
        Printer(Cdb { bytes, len: operation.usage.len() })
    }

    fn put(&mut self, at: usize, field: &[u8]) -> &mut Printer {
        self.0.bytes[at..at + field.len()].copy_from_slice(field);
        self
    }

    fn bit(&mut self, at: usize, bit: u8, set: bool) -> &mut Printer {
        self.0.bytes[at] |= u8::from(set) << bit;
        self
    }

    fn blocks(&mut self, form: Form, Blocks { lba, count }: Blocks) -> &mut Printer {
        match form {
            Form::Six | Form::Ten => {
                self.put(2, &(lba as u32).to_be_bytes()).put(7, &(count as u16).to_be_bytes())
            }
            Form::Twelve => self.put(2, &(lba as u32).to_be_bytes()).put(6, &count.to_be_bytes()),
            Form::Sixteen => self.put(2, &lba.to_be_bytes()).put(10, &count.to_be_bytes()),
        }
    }
}

fn parse_inquiry(cdb: &[u8]) -> Result<Command, Sense> {
    let vital = cdb[1] & 1 != 0;
    // SPC-5 6.7.1: a page code without EVPD is refused.
    if !vital && cdb[2] != 0 {
        return Err(Sense::invalid_field(2, None));
    }
    Ok(Command::Inquiry { page: vital.then_some(cdb[2]), allocation: u16_at(cdb, 3) })
}

fn parse_mode_sense(form: Form, cdb: &[u8]) -> Command {
    let control = match cdb[2] >> 6 {
        0 => PageControl::Current,
        1 => PageControl::Changeable,
        2 => PageControl::Default,
        _ => PageControl::Saved,
    };
    let request = ModeRequest {
        without_blocks: cdb[1] & 0x08 != 0,
        long_lba: cdb[1] & 0x10 != 0,
        control,
        page: cdb[2] & 0x3f,
        subpage: cdb[3],
    };
    let allocation = if form == Form::Six { cdb[4].into() } else { u16_at(cdb, 7) };
    Command::ModeSense { form, request, allocation }
}

fn parse_operation_filter(cdb: &[u8]) -> Result<Command, Sense> {
    let (opcode, action) = (cdb[3], u16_at(cdb, 4));
    let filter = match cdb[2] & 0x07 {
        0 => OperationFilter::All,
        1 => OperationFilter::Opcode(opcode),
        2 => OperationFilter::ServiceAction(opcode, action),
        3 => OperationFilter::Either(opcode, action),
        _ => return Err(Sense::invalid_field(2, Some(2))),
    };
    let (timeouts, allocation) = (cdb[2] & 0x80 != 0, u32_at(cdb, 6));
    Ok(Command::ReportSupportedOperationCodes { filter, timeouts, allocation })
}

#[cfg(test)]
mod tests {
    use super::operations::OPERATIONS;
    use super::*;
    use crate::sense::SenseKey;
    use proptest::prelude::*;

    #[test]
    fn fields_are_where_the_standards_have_them() {
        let read = [0x88, 0x08, 0, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 0, 0];
        let blocks = Blocks { lba: 0x0102_0304_0506, count: 0x1_0203 };
        let command = Command::Read { form: Form::Sixteen, blocks, fua: true };
        assert_eq!(Command::parse(&read), Ok(command));
        assert_eq!(command.print()[..], read);
        let report = [0x95, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 2, 0, 0x80 | 0x3f, 0];
        let command =
            Command::ReportZones { lba: 0x1_0000, allocation: 512, partial: true, option: 0x3f };
        assert_eq!(Command::parse(&report), Ok(command));
        assert_eq!(command.print()[..], report);
        let write = [0x2a, 0, 1, 2, 3, 4, 0, 5, 6, 0];
        let blocks = Blocks { lba: 0x0102_0304, count: 0x0506 };
        let command = Command::Write { form: Form::Ten, blocks, fua: false };
        assert_eq!(Command::parse(&write), Ok(command));
    }

    #[test]
    fn unknown_field_is_reported_by_its_pointer() {
        let refused = |cdb: &[u8]| match Command::parse(cdb) {
            Err(CdbError::Refused(sense)) => sense,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&[0xff; 16]), Sense::INVALID_OPERATION_CODE);
        assert_eq!(
            refused(&[0x28, 0x20, 0, 0, 0, 0, 0, 0, 0, 0]),
            Sense::invalid_field(1, Some(5))
        );
        // An unknown service action.
        let sense = refused(&[0x94, 0x05, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(sense, Sense::invalid_field(1, Some(4)));
        // A page code without EVPD.
        assert_eq!(refused(&[0x12, 0, 0x80, 0, 0, 0]), Sense::invalid_field(2, None));
        assert_eq!(Command::parse(&[0x28, 0, 0]), Err(CdbError::Length(3)));
        assert_eq!(Command::parse(&[]), Err(CdbError::Length(0)));
    }

    proptest! {
        #[test]
        fn bytes_are_a_command_or_refused(mut cdb in proptest::collection::vec(any::<u8>(), 0..20),
                                          pick in any::<prop::sample::Index>(), masked: bool) {
            if masked {
                let operation = &OPERATIONS[pick.index(OPERATIONS.len())];
                cdb.resize(16, 0);
                for (at, byte) in cdb.iter_mut().enumerate() {
                    *byte &= operation.usage.get(at).copied().unwrap_or(0);
                }
                cdb[0] = operation.opcode;
                if let Some(action) = operation.service_action {
                    cdb[1] = cdb[1] & !SERVICE_ACTION | action;
                }
            }
            match Command::parse(&cdb) {
                Ok(command) => {
                    let printed = command.print();
                    prop_assert_eq!(Command::parse(&printed), Ok(command));
                    prop_assert_eq!(printed.len(), command.operation().usage.len());
                }
                Err(CdbError::Refused(sense)) => {
                    prop_assert_eq!(sense.key, SenseKey::IllegalRequest);
                }
                Err(CdbError::Length(len)) => prop_assert_eq!(len, cdb.len()),
            }
        }
    }
}

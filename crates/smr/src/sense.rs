//! SCSI status and sense data, with the terms of SPC-5 4.4 and the codes of its annex F.

use std::fmt;

/// Status byte of a command, SAM-5 5.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ScsiStatus {
    /// The command succeeded.
    Good = 0x00,
    /// Sense data describe the result.
    CheckCondition = 0x02,
    /// The logical unit cannot take the command now.
    Busy = 0x08,
    /// Another initiator holds a reservation.
    ReservationConflict = 0x18,
    /// The logical unit's queue is full.
    TaskSetFull = 0x28,
    /// An auto-contingent allegiance is in effect.
    AcaActive = 0x30,
    /// Another initiator aborted the command.
    TaskAborted = 0x40,
}

impl ScsiStatus {
    /// The status for a byte value.
    pub const fn from_byte(byte: u8) -> Option<ScsiStatus> {
        match byte {
            0x00 => Some(ScsiStatus::Good),
            0x02 => Some(ScsiStatus::CheckCondition),
            0x08 => Some(ScsiStatus::Busy),
            0x18 => Some(ScsiStatus::ReservationConflict),
            0x28 => Some(ScsiStatus::TaskSetFull),
            0x30 => Some(ScsiStatus::AcaActive),
            0x40 => Some(ScsiStatus::TaskAborted),
            _ => None,
        }
    }
}

/// Sense key, SPC-5 4.4.8: four bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum SenseKey {
    /// Nothing to report.
    NoSense = 0x0,
    /// The command succeeded after recovery actions.
    RecoveredError = 0x1,
    /// The logical unit cannot be used now.
    NotReady = 0x2,
    /// A defect of the medium.
    MediumError = 0x3,
    /// A hardware failure.
    HardwareError = 0x4,
    /// The command or its parameters are wrong.
    IllegalRequest = 0x5,
    /// An event occurred at the logical unit.
    UnitAttention = 0x6,
    /// The blocks must not be read or written.
    DataProtect = 0x7,
    /// Unwritten medium.
    BlankCheck = 0x8,
    /// Vendor specific.
    VendorSpecific = 0x9,
    /// A copy command failed.
    CopyAborted = 0xa,
    /// The command was aborted.
    AbortedCommand = 0xb,
    /// Obsolete or reserved.
    Reserved = 0xc,
    /// The medium cannot take data that are left in a buffer.
    VolumeOverflow = 0xd,
    /// The data differ from those on the medium.
    Miscompare = 0xe,
    /// The command completed with information for the host.
    Completed = 0xf,
}

impl SenseKey {
    const ALL: [SenseKey; 16] = [
        SenseKey::NoSense,
        SenseKey::RecoveredError,
        SenseKey::NotReady,
        SenseKey::MediumError,
        SenseKey::HardwareError,
        SenseKey::IllegalRequest,
        SenseKey::UnitAttention,
        SenseKey::DataProtect,
        SenseKey::BlankCheck,
        SenseKey::VendorSpecific,
        SenseKey::CopyAborted,
        SenseKey::AbortedCommand,
        SenseKey::Reserved,
        SenseKey::VolumeOverflow,
        SenseKey::Miscompare,
        SenseKey::Completed,
    ];

    /// The sense key in the low four bits of a byte.
    pub const fn from_bits(bits: u8) -> SenseKey {
        SenseKey::ALL[(bits & 0xf) as usize]
    }
}

/// The invalid field of a command, SPC-5 4.4.2.4.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldPointer {
    /// Whether the field is in the command; otherwise it is in the parameter data.
    pub in_cdb: bool,
    /// The first byte of the field.
    pub byte: u16,
    /// The highest bit of the field in that byte; `None` for the whole byte.
    pub bit: Option<u8>,
}

/// Sense data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// The category of the error.
    pub key: SenseKey,
    /// Additional sense code.
    pub asc: u8,
    /// Additional sense code qualifier.
    pub ascq: u8,
    /// The block address that the error concerns.
    pub information: Option<u64>,
    /// The invalid field.
    pub field: Option<FieldPointer>,
}

macro_rules! codes {
    ($(
        $(#[$doc:meta])* $name:ident = $key:ident, $asc:literal, $ascq:literal, $text:literal;
    )*) => {
        impl Sense {
            $($(#[$doc])* pub const $name: Sense = Sense::new(SenseKey::$key, $asc, $ascq);)*

            /// SPC's name of the additional sense code, if the emulated disk uses it.
            pub fn text(&self) -> Option<&'static str> {
                match (self.asc, self.ascq) {
                    $(($asc, $ascq) => Some($text),)*
                    _ => None,
                }
            }
        }

        impl Sense {
            /// Every code that the emulated disk uses, with SPC's name.
            pub const NAMED: &[(Sense, &str)] = &[$((Sense::$name, $text)),*];
        }
    };
}

codes! {
    /// Nothing to report.
    NO_SENSE = NoSense, 0x00, 0x00, "NO ADDITIONAL SENSE INFORMATION";
    /// The medium failed to store data.
    WRITE_ERROR = MediumError, 0x0c, 0x00, "WRITE ERROR";
    /// The medium failed to return data.
    UNRECOVERED_READ_ERROR = MediumError, 0x11, 0x00, "UNRECOVERED READ ERROR";
    /// The parameter list is too short.
    PARAMETER_LIST_LENGTH_ERROR = IllegalRequest, 0x1a, 0x00, "PARAMETER LIST LENGTH ERROR";
    /// Unknown command.
    INVALID_OPERATION_CODE = IllegalRequest, 0x20, 0x00, "INVALID COMMAND OPERATION CODE";
    /// The address is beyond the last block.
    LBA_OUT_OF_RANGE = IllegalRequest, 0x21, 0x00, "LOGICAL BLOCK ADDRESS OUT OF RANGE";
    /// The write does not start at the write pointer, or does not end at a physical block boundary.
    UNALIGNED_WRITE = IllegalRequest, 0x21, 0x04, "UNALIGNED WRITE COMMAND";
    /// The write crosses the end of a zone.
    WRITE_BOUNDARY_VIOLATION = IllegalRequest, 0x21, 0x05, "WRITE BOUNDARY VIOLATION";
    /// The read reaches above the write pointer, on a disk that does not allow that.
    READ_INVALID_DATA = IllegalRequest, 0x21, 0x06, "ATTEMPT TO READ INVALID DATA";
    /// The read crosses the end of a zone, on a disk that does not allow that.
    READ_BOUNDARY_VIOLATION = IllegalRequest, 0x21, 0x07, "READ BOUNDARY VIOLATION";
    /// The range lies in a gap zone.
    GAP_ZONE_ACCESS = IllegalRequest, 0x21, 0x09, "ATTEMPT TO ACCESS GAP ZONE";
    /// A field of the command has an invalid value.
    INVALID_FIELD_IN_CDB = IllegalRequest, 0x24, 0x00, "INVALID FIELD IN CDB";
    /// A field of the parameter list has an invalid value.
    INVALID_FIELD_IN_PARAMETER_LIST = IllegalRequest, 0x26, 0x00,
        "INVALID FIELD IN PARAMETER LIST";
    /// The zone is read-only.
    ZONE_IS_READ_ONLY = DataProtect, 0x27, 0x08, "ZONE IS READ ONLY";
    /// The zone is offline.
    ZONE_IS_OFFLINE = DataProtect, 0x2c, 0x0e, "ZONE IS OFFLINE";
    /// Mode parameters cannot be saved.
    SAVING_PARAMETERS_NOT_SUPPORTED = IllegalRequest, 0x39, 0x00,
        "SAVING PARAMETERS NOT SUPPORTED";
    /// The device failed.
    INTERNAL_TARGET_FAILURE = HardwareError, 0x44, 0x00, "INTERNAL TARGET FAILURE";
    /// The maximum number of zones is explicitly open.
    INSUFFICIENT_ZONE_RESOURCES = DataProtect, 0x55, 0x0e, "INSUFFICIENT ZONE RESOURCES";
}

/// The format of sense data, SPC-5 4.4.1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SenseFormat {
    /// Response code 72h: a list of descriptors.
    #[default]
    Descriptor,
    /// Response code 70h: fields at fixed offsets; block addresses have 32 bits.
    Fixed,
}

/// Response codes, SPC-5 4.4.1; deferred errors are parsed as current ones.
const FIXED: u8 = 0x70;
const DESCRIPTOR: u8 = 0x72;
/// Descriptor types.
const INFORMATION: u8 = 0x00;
const SENSE_KEY_SPECIFIC: u8 = 0x02;
/// The information field, or the sense-key specific field, is valid.
const VALID: u8 = 0x80;
/// The field pointer points into the command.
const COMMAND_DATA: u8 = 0x40;
/// The bit pointer is valid.
const BIT_POINTER_VALID: u8 = 0x08;
/// Length of fixed sense data with all fields that we set.
const FIXED_BYTES: usize = 18;
/// Maximum length of sense data, SPC-5 4.4.1.
pub const SENSE_BYTES_MAX: usize = 252;

impl Sense {
    /// Sense data that consist of the codes only.
    pub const fn new(key: SenseKey, asc: u8, ascq: u8) -> Sense {
        Sense { key, asc, ascq, information: None, field: None }
    }

    /// Adds the block address that the error concerns.
    #[must_use]
    pub const fn at(self, lba: u64) -> Sense {
        Sense { information: Some(lba), ..self }
    }

    /// Sense data for an invalid field of the command.
    pub const fn invalid_field(byte: u16, bit: Option<u8>) -> Sense {
        let field = Some(FieldPointer { in_cdb: true, byte, bit });
        Sense { field, ..Sense::INVALID_FIELD_IN_CDB }
    }

    /// Sense data for an invalid field of the parameter list.
    pub const fn invalid_parameter(byte: u16) -> Sense {
        let field = Some(FieldPointer { in_cdb: false, byte, bit: None });
        Sense { field, ..Sense::INVALID_FIELD_IN_PARAMETER_LIST }
    }

    /// Whether key and codes equal those of `other`, regardless of other fields.
    pub fn is(&self, other: Sense) -> bool {
        self.code() == other.code()
    }

    /// Sense key, additional sense code and qualifier.
    pub const fn code(&self) -> (SenseKey, u8, u8) {
        (self.key, self.asc, self.ascq)
    }

    /// Encodes the sense data.
    pub fn print(&self, format: SenseFormat) -> Vec<u8> {
        match format {
            SenseFormat::Descriptor => self.print_descriptors(),
            SenseFormat::Fixed => self.print_fixed(),
        }
    }

    fn print_descriptors(&self) -> Vec<u8> {
        let mut bytes = vec![DESCRIPTOR, self.key as u8, self.asc, self.ascq, 0, 0, 0, 0];
        if let Some(lba) = self.information {
            bytes.extend([INFORMATION, 0x0a, VALID, 0]);
            bytes.extend(lba.to_be_bytes());
        }
        if let Some(field) = self.field {
            bytes.extend([SENSE_KEY_SPECIFIC, 0x06, 0, 0]);
            bytes.extend(field.print());
            bytes.push(0);
        }
        bytes[7] = (bytes.len() - 8) as u8;
        bytes
    }

    fn print_fixed(&self) -> Vec<u8> {
        let mut bytes = vec![0; FIXED_BYTES];
        bytes[0] = FIXED;
        bytes[2] = self.key as u8;
        // SPC-5 4.4.3: an address that does not fit is marked invalid.
        if let Some(lba) = self.information.and_then(|lba| u32::try_from(lba).ok()) {
            bytes[0] |= VALID;
            bytes[3..7].copy_from_slice(&lba.to_be_bytes());
        }
        bytes[7] = (FIXED_BYTES - 8) as u8;
        bytes[12] = self.asc;
        bytes[13] = self.ascq;
        if let Some(field) = self.field {
            bytes[15..18].copy_from_slice(&field.print());
        }
        bytes
    }

    /// Parses sense data of either format; `None` if they are neither, or too short for a key.
    pub fn parse(bytes: &[u8]) -> Option<Sense> {
        let byte = |at: usize| bytes.get(at).copied();
        match byte(0)? & 0x7f {
            0x72 | 0x73 => {
                let key = SenseKey::from_bits(byte(1)?);
                let mut sense = Sense::new(key, byte(2)?, byte(3)?);
                let end = 8 + usize::from(byte(7).unwrap_or(0));
                sense.parse_descriptors(bytes.get(8..end.min(bytes.len())).unwrap_or(&[]));
                Some(sense)
            }
            0x70 | 0x71 => {
                let key = SenseKey::from_bits(byte(2)?);
                // Missing bytes read as 0, SPC-5 4.4.3.
                let mut sense = Sense::new(key, byte(12).unwrap_or(0), byte(13).unwrap_or(0));
                if byte(0)? & VALID != 0
                    && let Some(lba) = bytes.get(3..7)
                {
                    let lba = lba.iter().fold(0, |lba, &byte| lba << 8 | u64::from(byte));
                    sense.information = Some(lba);
                }
                sense.field = bytes.get(15..18).and_then(|field| sense.parse_field(field));
                Some(sense)
            }
            _ => None,
        }
    }

    fn parse_descriptors(&mut self, mut bytes: &[u8]) {
        while let [kind, len, rest @ ..] = bytes {
            let (body, after) = rest.split_at(usize::from(*len).min(rest.len()));
            match *kind {
                INFORMATION if body.len() >= 10 && body[0] & VALID != 0 => {
                    let lba = body[2..10].iter().fold(0, |lba, &byte| lba << 8 | u64::from(byte));
                    self.information = Some(lba);
                }
                SENSE_KEY_SPECIFIC if body.len() >= 5 => {
                    self.field = self.parse_field(&body[2..5]);
                }
                _ => {}
            }
            bytes = after;
        }
    }

    /// Parses the field pointer, which only ILLEGAL REQUEST has.
    fn parse_field(&self, bytes: &[u8]) -> Option<FieldPointer> {
        let [flags, high, low] = *bytes else { return None };
        if self.key != SenseKey::IllegalRequest || flags & VALID == 0 {
            return None;
        }
        let bit = (flags & BIT_POINTER_VALID != 0).then_some(flags & 0x07);
        let byte = u16::from_be_bytes([high, low]);
        Some(FieldPointer { in_cdb: flags & COMMAND_DATA != 0, byte, bit })
    }
}

impl FieldPointer {
    /// The three bytes of the sense-key specific field.
    fn print(self) -> [u8; 3] {
        let mut flags = VALID;
        if self.in_cdb {
            flags |= COMMAND_DATA;
        }
        if let Some(bit) = self.bit {
            flags |= BIT_POINTER_VALID | bit & 0x07;
        }
        let [high, low] = self.byte.to_be_bytes();
        [flags, high, low]
    }
}

impl fmt::Display for Sense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02X}/{:02X}/{:02X}", self.key as u8, self.asc, self.ascq)?;
        if let Some(text) = self.text() {
            write!(f, " {text}")?;
        }
        if let Some(lba) = self.information {
            write!(f, " at block {lba}")?;
        }
        if let Some(field) = self.field {
            let place = if field.in_cdb { "the command" } else { "the parameter list" };
            write!(f, ", byte {} of {place}", field.byte)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_has_one_text() {
        for (index, (sense, text)) in Sense::NAMED.iter().enumerate() {
            assert_eq!(sense.text(), Some(*text));
            for (other, _) in &Sense::NAMED[..index] {
                assert_ne!((sense.asc, sense.ascq), (other.asc, other.ascq), "{text}");
            }
        }
    }

    #[test]
    fn printed_values_parse_back() {
        let senses = [
            Sense::NO_SENSE,
            Sense::UNALIGNED_WRITE.at(0x1_2345_6789_abcd),
            Sense::invalid_field(14, Some(5)),
            Sense::invalid_field(2, None).at(7),
            Sense::invalid_parameter(8),
            Sense::INSUFFICIENT_ZONE_RESOURCES,
        ];
        for sense in senses {
            let bytes = sense.print(SenseFormat::Descriptor);
            assert_eq!(Sense::parse(&bytes), Some(sense), "{bytes:02x?}");
            let bytes = sense.print(SenseFormat::Fixed);
            let short = sense.information.filter(|&lba| lba <= u64::from(u32::MAX));
            let fixed = Sense { information: short, ..sense };
            assert_eq!(Sense::parse(&bytes), Some(fixed), "{bytes:02x?}");
        }
    }

    #[test]
    fn anything_can_be_parsed() {
        let bytes = Sense::invalid_field(14, Some(5)).at(9).print(SenseFormat::Descriptor);
        for end in 0..bytes.len() {
            assert_eq!(Sense::parse(&bytes[..end]).is_some(), end >= 4, "{end}");
        }
        assert_eq!(Sense::parse(&[0x70, 0, 5]), Some(Sense::new(SenseKey::IllegalRequest, 0, 0)));
        assert_eq!(Sense::parse(&[0x7f; 252]), None);
        assert_eq!(
            Sense::parse(&[0x72, 5, 0x24, 0, 0, 0, 0, 255, 0, 255, 0x80]).unwrap().field,
            None
        );
    }

    #[test]
    fn every_status_is_its_byte() {
        let known = (0..=255).filter_map(ScsiStatus::from_byte).count();
        assert_eq!(known, 7);
        for byte in 0..=255 {
            assert!(ScsiStatus::from_byte(byte).is_none_or(|status| status as u8 == byte));
        }
    }
}

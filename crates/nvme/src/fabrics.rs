//! Fabrics commands: Connect and the properties of a controller (NVM Express Base Specification
//! 2.0, 6.3 to 6.5 and 3.1.3).

use crate::command::{Sqe, StatusCode};
use crate::identify::{KEEP_ALIVE_UNIT_MS, QUEUE_ENTRIES_MAX, VERSION};
use crate::wire::{u16_at, u32_at};

/// The bytes of a Connect's data.
pub const CONNECT_BYTES: u32 = 1024;
/// The name of every discovery subsystem.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// The longest NQN.
pub const NQN_LEN_MAX: usize = 223;
/// The controller id of a Connect that asks for a new controller.
pub const NEW_CONTROLLER: u16 = 0xffff;

/// The host of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostIdentity {
    /// The host identifier.
    pub id: [u8; 16],
    /// The NQN of the host.
    pub nqn: String,
}

/// A Connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The queue; 0 is the admin queue.
    pub queue: u16,
    /// The entries of the submission queue.
    pub entries: u16,
    /// Whether the host does not want the flow control of submission queues.
    pub no_flow_control: bool,
    /// The keep-alive time-out, in milliseconds; 0 for none.
    pub keep_alive_ms: u32,
    /// The controller.
    pub controller: u16,
    /// The subsystem.
    pub subsystem: String,
    /// The host.
    pub host: HostIdentity,
}

/// A refused Connect: the status, and the place of the wrong parameter as the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRefusal {
    /// The status.
    pub status: StatusCode,
    /// The completion's result.
    pub result: u64,
}

impl ConnectRefusal {
    /// A refusal without a place.
    pub const fn new(status: StatusCode) -> ConnectRefusal {
        ConnectRefusal { status, result: 0 }
    }

    /// A wrong parameter in the command.
    pub const fn in_command(offset: u64) -> ConnectRefusal {
        ConnectRefusal { status: StatusCode::CONNECT_INVALID, result: offset }
    }

    /// A wrong parameter in the data.
    pub const fn in_data(offset: u64) -> ConnectRefusal {
        ConnectRefusal { status: StatusCode::CONNECT_INVALID, result: offset | 1 << 16 }
    }
}

/// The bit of a Connect's result by which the controller asks the host to authenticate.
pub(crate) const AUTH_REQUESTED: u64 = 1 << 17;

/// Offsets in a Connect's data.
pub(crate) const CONTROLLER_OFFSET: u64 = 16;
pub(crate) const SUBSYSTEM_OFFSET: u64 = 256;
pub(crate) const HOST_OFFSET: u64 = 512;

impl ConnectRequest {
    /// Parses a Connect and its data, [`CONNECT_BYTES`] of them.
    ///
    /// # Errors
    /// If a parameter is invalid in itself.
    pub fn parse(sqe: &Sqe, data: &[u8]) -> Result<ConnectRequest, ConnectRefusal> {
        let bytes = sqe.bytes();
        if data.len() != CONNECT_BYTES as usize {
            return Err(ConnectRefusal::new(StatusCode::SGL_LENGTH_INVALID));
        }
        if u16_at(bytes, 40) != 0 {
            return Err(ConnectRefusal::new(StatusCode::CONNECT_FORMAT));
        }
        let entries = u16_at(bytes, 44);
        if entries == 0 || entries >= QUEUE_ENTRIES_MAX {
            return Err(ConnectRefusal::in_command(44));
        }
        let subsystem = nqn(&data[256..512]).ok_or(ConnectRefusal::in_data(SUBSYSTEM_OFFSET))?;
        let host = nqn(&data[512..768]).ok_or(ConnectRefusal::in_data(HOST_OFFSET))?;
        Ok(ConnectRequest {
            queue: u16_at(bytes, 42),
            entries: entries + 1,
            no_flow_control: bytes[46] & 4 != 0,
            keep_alive_ms: u32_at(bytes, 48),
            controller: u16_at(data, CONTROLLER_OFFSET as usize),
            subsystem,
            host: HostIdentity {
                id: *data.first_chunk().expect("the length is checked"),
                nqn: host,
            },
        })
    }
}

/// An NQN that ends with NUL.
fn nqn(field: &[u8]) -> Option<String> {
    let len = field.iter().position(|byte| *byte == 0)?;
    let text = std::str::from_utf8(&field[..len]).ok()?;
    let is_plain = !text.is_empty() && !text.chars().any(char::is_control);
    (is_plain && len <= NQN_LEN_MAX).then(|| text.to_owned())
}

/// Properties by their offset.
pub mod property {
    /// Controller capabilities.
    pub const CAP: u32 = 0x00;
    /// Version.
    pub const VS: u32 = 0x08;
    /// Controller configuration.
    pub const CC: u32 = 0x14;
    /// Controller status.
    pub const CSTS: u32 = 0x1c;
    /// Subsystem reset.
    pub const NSSR: u32 = 0x20;
    /// Controller ready time-outs.
    pub const CRTO: u32 = 0x68;
}

/// A Property Get or Set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PropertyRequest {
    /// The offset.
    pub offset: u32,
    /// Whether the property has 8 bytes instead of 4.
    pub is_long: bool,
    /// The value of a set.
    pub value: u64,
}

impl PropertyRequest {
    /// Parses a Property Get or Set.
    ///
    /// # Errors
    /// If the size is neither 4 nor 8 bytes.
    pub fn parse(sqe: &Sqe) -> Result<PropertyRequest, StatusCode> {
        let is_long = match sqe.bytes()[40] & 7 {
            0 => false,
            1 => true,
            _ => return Err(StatusCode::INVALID_FIELD),
        };
        let value = u64::from(sqe.dword(12)) | u64::from(sqe.dword(13)) << 32;
        Ok(PropertyRequest { offset: sqe.dword(11), is_long, value })
    }
}

/// The controller capabilities.
pub fn capabilities() -> u64 {
    let entries = u64::from(QUEUE_ENTRIES_MAX - 1);
    // Contiguous queues; ready within 10 s, in units of 500 ms; the NVM command set, and others.
    entries | 1 << 16 | 20 << 24 | 1 << 37 | 1 << 43
}

/// The controller configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Configuration(pub u32);

impl Configuration {
    /// EN.
    pub fn is_enabled(self) -> bool {
        self.0 & 1 != 0
    }

    /// CSS: all I/O command sets, not the NVM command set alone.
    pub fn has_all_sets(self) -> bool {
        self.0 >> 4 & 7 == 6
    }

    /// SHN: the host asks for a shutdown.
    pub fn asks_shutdown(self) -> bool {
        self.0 >> 14 & 3 != 0
    }

    /// Whether a controller can be enabled with these settings.
    pub fn is_supported(self, is_discovery: bool) -> bool {
        let (set, page, arbitration) = (self.0 >> 4 & 7, self.0 >> 7 & 15, self.0 >> 11 & 7);
        let (submission, completion) = (self.0 >> 16 & 15, self.0 >> 20 & 15);
        let sizes = is_discovery || (submission == 6 && completion == 4);
        matches!(set, 0 | 6) && page == 0 && arbitration == 0 && sizes
    }
}

/// The version as a property.
pub fn version() -> u64 {
    VERSION.into()
}

/// A keep-alive time-out as the controller keeps it: whole units, rounded up.
pub fn keep_alive_rounded(ms: u32) -> u32 {
    ms.div_ceil(KEEP_ALIVE_UNIT_MS).saturating_mul(KEEP_ALIVE_UNIT_MS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::SQE_BYTES;

    fn parts() -> ([u8; SQE_BYTES], Vec<u8>) {
        let mut sqe = [0; SQE_BYTES];
        sqe[42] = 1;
        sqe[44] = 31;
        sqe[46] = 4;
        sqe[48..52].copy_from_slice(&5000u32.to_le_bytes());
        let mut data = vec![0; 1024];
        data[..16].fill(9);
        data[16..18].fill(0xff);
        data[256..256 + 5].copy_from_slice(b"nqn.a");
        data[512..512 + 5].copy_from_slice(b"nqn.h");
        (sqe, data)
    }

    fn parse(sqe: &[u8], data: &[u8]) -> Result<ConnectRequest, ConnectRefusal> {
        ConnectRequest::parse(&Sqe::parse(sqe).unwrap(), data)
    }

    #[test]
    fn connect_has_its_fields_where_the_standard_has_them() {
        let (sqe, data) = parts();
        let wanted = ConnectRequest {
            queue: 1,
            entries: 32,
            no_flow_control: true,
            keep_alive_ms: 5000,
            controller: NEW_CONTROLLER,
            subsystem: "nqn.a".to_owned(),
            host: HostIdentity { id: [9; 16], nqn: "nqn.h".to_owned() },
        };
        assert_eq!(parse(&sqe, &data), Ok(wanted));
    }

    #[test]
    fn a_refusal_names_the_parameter() {
        let (mut sqe, mut data) = parts();
        let length = ConnectRefusal::new(StatusCode::SGL_LENGTH_INVALID);
        assert_eq!(parse(&sqe, &data[1..]), Err(length));
        sqe[40] = 1;
        assert_eq!(parse(&sqe, &data).unwrap_err().status, StatusCode::CONNECT_FORMAT);
        sqe[40] = 0;
        for entries in [0, 128, 0xffff_u16] {
            sqe[44..46].copy_from_slice(&entries.to_le_bytes());
            assert_eq!(parse(&sqe, &data), Err(ConnectRefusal::in_command(44)), "{entries}");
        }
        sqe[44..46].copy_from_slice(&127u16.to_le_bytes());
        assert!(parse(&sqe, &data).is_ok());
        data[512..768].fill(b'x');
        assert_eq!(parse(&sqe, &data).unwrap_err().result, 0x10200, "no NUL");
        data[256] = 0;
        assert_eq!(parse(&sqe, &data).unwrap_err().result, 0x10100, "an empty name");
    }

    #[test]
    fn capabilities_and_configuration_have_the_bits_of_linux() {
        let cap = capabilities();
        assert_eq!((cap & 0xffff, cap >> 16 & 1, cap >> 24 & 0xff), (127, 1, 20));
        assert_eq!(cap >> 37 & 0xff, 1 << 6 | 1);
        let enabled = Configuration(0x46_0061);
        assert!(enabled.is_enabled() && enabled.has_all_sets() && enabled.is_supported(false));
        assert!(!Configuration(0x46_0001).has_all_sets());
        assert!(Configuration(0x46_4001).asks_shutdown());
        assert!(!Configuration(0x46_0011).is_supported(false), "a command set that is none");
        assert!(!Configuration(0x1).is_supported(false) && Configuration(0x1).is_supported(true));
        assert_eq!((keep_alive_rounded(5001), keep_alive_rounded(0)), (5100, 0));
    }
}

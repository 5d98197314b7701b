//! Log pages (NVM Express Base Specification 2.0, 5.16), and the part of a page that a command asks
//! for.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use blockyard_core::SECTOR_SHIFT;

use crate::command::{NSID_ALL, Sqe, StatusCode, admin_opcode, io_opcode};
use crate::fabrics::DISCOVERY_NQN;
use crate::host_link::CommandTotals;
use crate::identify::{self, CSI_NVM, CSI_ZONED, ControllerFeatures};
use crate::namespace::DATA_BYTES_MAX;

/// The bytes of the header of the discovery log, and of each of its entries.
pub const DISCOVERY_ENTRY_BYTES: usize = 1024;

/// Log pages by their number (LID).
pub mod log_id {
    /// Supported log pages.
    pub const SUPPORTED: u8 = 0x00;
    /// Errors.
    pub const ERRORS: u8 = 0x01;
    /// SMART: health.
    pub const HEALTH: u8 = 0x02;
    /// Firmware slots.
    pub const FIRMWARE: u8 = 0x03;
    /// Changed namespaces.
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    /// Commands supported and their effects.
    pub const EFFECTS: u8 = 0x05;
    /// Discovery.
    pub const DISCOVERY: u8 = 0x70;
    /// Changed zones.
    pub const CHANGED_ZONES: u8 = 0xbf;
}

/// A Get Log Page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRequest {
    /// The page.
    pub id: u8,
    /// Whether the event that the page explains stays (RAE).
    pub retain: bool,
    /// The command set, for pages that depend on it.
    pub command_set: u8,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes, at most [`DATA_BYTES_MAX`].
    pub len: u32,
}

impl LogRequest {
    /// Parses a Get Log Page.
    ///
    /// # Errors
    /// If the offset is no multiple of 4, or the part is longer than the longest data of a command.
    pub fn parse(sqe: &Sqe) -> Result<LogRequest, StatusCode> {
        let dwords = u64::from(sqe.dword(10) >> 16) | u64::from(sqe.dword(11) & 0xffff) << 16;
        let len = (dwords + 1) * 4;
        let offset = u64::from(sqe.dword(12)) | u64::from(sqe.dword(13)) << 32;
        if len > u64::from(DATA_BYTES_MAX) || !offset.is_multiple_of(4) {
            return Err(StatusCode::INVALID_FIELD);
        }
        let command_set = (sqe.dword(14) >> 24) as u8;
        let (id, retain) = (sqe.dword(10) as u8, sqe.dword(10) & 1 << 15 != 0);
        Ok(LogRequest { id, retain, command_set, offset, len: len as u32 })
    }

    /// The requested part of a page, with zeros after its end.
    ///
    /// # Errors
    /// If the part begins after the end.
    pub fn part(&self, page: &[u8]) -> Result<Vec<u8>, StatusCode> {
        let offset = usize::try_from(self.offset).ok().filter(|offset| *offset <= page.len());
        let rest = &page[offset.ok_or(StatusCode::INVALID_FIELD)?..];
        let mut part = rest[..rest.len().min(self.len as usize)].to_vec();
        part.resize(self.len as usize, 0);
        Ok(part)
    }
}

/// The most namespaces in the list of changed ones.
const CHANGED_MAX: usize = 1024;

/// A page of an I/O controller but [`health`]. `changed` are the namespaces, in order, that have
/// changed since the host last read of them.
///
/// # Errors
/// If there is no such page.
pub fn page(
    request: &LogRequest,
    features: &ControllerFeatures,
    changed: &BTreeSet<u32>,
) -> Result<Vec<u8>, StatusCode> {
    match request.id {
        log_id::SUPPORTED => Ok(supported(features)),
        // One entry without an error.
        log_id::ERRORS => Ok(vec![0; 64]),
        log_id::FIRMWARE => Ok(firmware()),
        // More than the list can have: one entry that stands for them.
        log_id::CHANGED_NAMESPACES if changed.len() > CHANGED_MAX => {
            Ok(identify::namespace_list([NSID_ALL].into_iter(), 0))
        }
        log_id::CHANGED_NAMESPACES => Ok(identify::namespace_list(changed.iter().copied(), 0)),
        log_id::EFFECTS => effects(request.command_set, features),
        // The target does not watch for zones that a device changes by itself.
        log_id::CHANGED_ZONES if features.append_exponent.is_some() => Ok(vec![0; 4096]),
        _ => Err(StatusCode::INVALID_LOG),
    }
}

/// Page 00h: which pages there are.
fn supported(features: &ControllerFeatures) -> Vec<u8> {
    let mut page = vec![0; 1024];
    let mut ids = vec![
        log_id::SUPPORTED,
        log_id::ERRORS,
        log_id::HEALTH,
        log_id::FIRMWARE,
        log_id::CHANGED_NAMESPACES,
        log_id::EFFECTS,
    ];
    if features.append_exponent.is_some() {
        ids.push(log_id::CHANGED_ZONES);
    }
    for id in ids {
        page[4 * usize::from(id)] = 1;
    }
    page
}

/// Page 02h: healthy devices of 20 °C, with the sum of their commands.
pub fn health(devices: &[CommandTotals]) -> Vec<u8> {
    let mut page = vec![0; 512];
    page[1..3].copy_from_slice(&293u16.to_le_bytes());
    // The spare that is left, and its threshold, in per cent.
    page[3] = 100;
    page[4] = 10;
    let sum = |count: fn(&CommandTotals) -> u64| devices.iter().map(count).sum::<u64>();
    // In thousands of sectors, rounded up.
    let read_units = sum(|it| it.read_sectors).div_ceil(1000);
    let written_units = (sum(|it| it.written_bytes) >> SECTOR_SHIFT).div_ceil(1000);
    let counts = [read_units, written_units, sum(|it| it.reads), sum(|it| it.writes)];
    for (at, count) in (32..).step_by(16).zip(counts) {
        page[at..at + 8].copy_from_slice(&count.to_le_bytes());
    }
    page
}

/// Page 03h: one slot, which is active.
fn firmware() -> Vec<u8> {
    let mut page = vec![0; 512];
    page[0] = 1;
    page[8..16].fill(b' ');
    let revision = env!("CARGO_PKG_VERSION").as_bytes();
    let len = revision.len().min(8);
    page[8..8 + len].copy_from_slice(&revision[..len]);
    page
}

/// An effect: the command is supported.
const SUPPORTED: u8 = 1;
/// An effect: the command changes data.
const CHANGES_DATA: u8 = 2;

/// Page 05h: the commands of a command set.
fn effects(command_set: u8, features: &ControllerFeatures) -> Result<Vec<u8>, StatusCode> {
    let has_zones = features.append_exponent.is_some();
    if command_set != CSI_NVM && (command_set != CSI_ZONED || !has_zones) {
        return Err(StatusCode::INVALID_FIELD);
    }
    let mut page = vec![0; 4096];
    for opcode in [
        admin_opcode::GET_LOG_PAGE,
        admin_opcode::IDENTIFY,
        admin_opcode::ABORT,
        admin_opcode::SET_FEATURES,
        admin_opcode::GET_FEATURES,
        admin_opcode::ASYNC_EVENT,
        admin_opcode::KEEP_ALIVE,
    ] {
        page[4 * usize::from(opcode)] = SUPPORTED;
    }
    let mut io = |opcode: u8, effects: u8| page[1024 + 4 * usize::from(opcode)] = effects;
    io(io_opcode::FLUSH, SUPPORTED);
    io(io_opcode::READ, SUPPORTED);
    io(io_opcode::COMPARE, SUPPORTED);
    io(io_opcode::VERIFY, SUPPORTED);
    io(io_opcode::WRITE, SUPPORTED | CHANGES_DATA);
    if features.write_zeroes {
        io(io_opcode::WRITE_ZEROES, SUPPORTED | CHANGES_DATA);
    }
    if features.discards {
        io(io_opcode::DATASET_MANAGEMENT, SUPPORTED | CHANGES_DATA);
    }
    if command_set == CSI_ZONED {
        io(io_opcode::ZONE_RECEIVE, SUPPORTED);
        io(io_opcode::ZONE_SEND, SUPPORTED | CHANGES_DATA);
        io(io_opcode::ZONE_APPEND, SUPPORTED | CHANGES_DATA);
    }
    Ok(page)
}

/// The requested part of page 70h, and no more: the discovery subsystem at the address at which the
/// host is connected, `here`, and the subsystems of devices at the address at which it reaches
/// them, if it reaches them.
///
/// # Errors
/// If the part begins after the end.
pub fn discovery(
    request: &LogRequest,
    generation: u64,
    nqns: &[&str],
    (devices, here): (Option<SocketAddr>, SocketAddr),
) -> Result<Vec<u8>, StatusCode> {
    let nqns = if devices.is_some() { nqns } else { &[] };
    let entries = 1 + nqns.len();
    let page_len = (DISCOVERY_ENTRY_BYTES * (1 + entries)) as u64;
    if request.offset > page_len {
        return Err(StatusCode::INVALID_FIELD);
    }
    let end = page_len.min(request.offset + u64::from(request.len));
    let mut part = Vec::with_capacity(request.len as usize);
    let mut at = request.offset;
    while at < end {
        let mut entry = [0; DISCOVERY_ENTRY_BYTES];
        match (at / DISCOVERY_ENTRY_BYTES as u64, devices) {
            (0, _) => {
                entry[..8].copy_from_slice(&generation.to_le_bytes());
                entry[8..16].copy_from_slice(&(entries as u64).to_le_bytes());
            }
            (1, _) => print_entry(&mut entry, DISCOVERY_NQN, 3, here),
            (index, Some(address)) => print_entry(&mut entry, nqns[index as usize - 2], 2, address),
            (_, None) => {}
        }
        let start = (at % DISCOVERY_ENTRY_BYTES as u64) as usize;
        let len = (DISCOVERY_ENTRY_BYTES - start).min((end - at) as usize);
        part.extend_from_slice(&entry[start..start + len]);
        at += len as u64;
    }
    part.resize(request.len as usize, 0);
    Ok(part)
}

fn print_entry(
    entry: &mut [u8; DISCOVERY_ENTRY_BYTES],
    nqn: &str,
    subsystem_type: u8,
    address: SocketAddr,
) {
    let ip = address.ip().to_canonical();
    // TRTYPE: TCP. ADRFAM. SUBTYPE. TREQ: a secure channel is not required.
    entry[..4].copy_from_slice(&[3, if ip.is_ipv4() { 1 } else { 2 }, subsystem_type, 2]);
    // PORTID, and CNTLID: the controller is made by the connection.
    entry[4..8].copy_from_slice(&[1, 0, 0xff, 0xff]);
    entry[8..10].copy_from_slice(&32u16.to_le_bytes());
    if subsystem_type == 3 {
        // EFLAGS: the information is the same at each address of the subsystem, and a host may stay
        // connected.
        entry[10] = 1 | 2;
    }
    let mut text = |at: usize, len: usize, text: &str| {
        entry[at..at + len].fill(b' ');
        let used = text.len().min(len);
        entry[at..at + used].copy_from_slice(&text.as_bytes()[..used]);
    };
    text(32, 32, &address.port().to_string());
    text(512, 256, &ip.to_string());
    entry[256..256 + nqn.len()].copy_from_slice(nqn.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::SQE_BYTES;
    use crate::wire::u64_at;

    fn request(dwords: [u32; 5]) -> Result<LogRequest, StatusCode> {
        let mut bytes = [0; SQE_BYTES];
        for (index, dword) in dwords.into_iter().enumerate() {
            bytes[40 + 4 * index..44 + 4 * index].copy_from_slice(&dword.to_le_bytes());
        }
        LogRequest::parse(&Sqe::parse(&bytes).unwrap())
    }

    fn features() -> ControllerFeatures {
        ControllerFeatures {
            nsid_max: 1,
            namespaces_max: 1,
            discards: true,
            write_zeroes: false,
            write_cache: false,
            append_exponent: None,
        }
    }

    /// SPDK and nvmet have both allocated, or read, by the length and offset that a host claimed.
    #[test]
    fn lengths_and_offsets_of_a_host_are_bounded() {
        let wanted = LogRequest { id: 0x70, retain: false, command_set: 0, offset: 1024, len: 20 };
        assert_eq!(request([0x70 | 4 << 16, 0, 1024, 0, 0]), Ok(wanted));
        // The bit for retaining events is no part of the page's number.
        let retained = LogRequest { retain: true, ..wanted };
        assert_eq!(request([0x8070 | 4 << 16, 0, 1024, 0, 0]), Ok(retained));
        let refused = Err(StatusCode::INVALID_FIELD);
        assert_eq!(request([0x70 | 0xffff << 16, 0xffff, 0, 0, 0]), refused, "16 GiB");
        assert_eq!(request([0x70, 0, 2, 0, 0]), refused, "an offset within a dword");
        let after_end = request([0x70, 0, 0, 1, 0]).unwrap();
        assert_eq!(after_end.part(&[1; 2048]), Err(StatusCode::INVALID_FIELD));
        let across = LogRequest { offset: 2044, len: 8, ..wanted };
        assert_eq!(across.part(&[1; 2048]).unwrap(), [1, 1, 1, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn the_effects_of_a_command_set_name_its_commands() {
        let request =
            |command_set| LogRequest { id: 5, retain: false, command_set, offset: 0, len: 4096 };
        let page_of = |set| page(&request(set), &features(), &BTreeSet::new());
        let plain = page_of(CSI_NVM).unwrap();
        assert_eq!((plain[1024 + 4], plain[1024 + 4 * 9], plain[1024 + 4 * 8]), (3, 3, 0));
        assert_eq!(plain[1024 + 4 * 0x7d], 0);
        assert_eq!(page_of(CSI_ZONED), Err(StatusCode::INVALID_FIELD));
        let none = LogRequest { id: 0x0c, ..request(0) };
        assert_eq!(page(&none, &features(), &BTreeSet::new()), Err(StatusCode::INVALID_LOG));
    }

    #[test]
    fn health_sums_the_commands_of_all_devices() {
        let of = |sectors: u64, reads, writes| CommandTotals {
            read_sectors: sectors,
            written_bytes: sectors << 9,
            reads,
            writes,
            ..CommandTotals::default()
        };
        let page = health(&[of(999, 3, 1 << 40), of(2, 5, 1)]);
        let counts = [32, 48, 64, 80].map(|at| (u64_at(&page, at), u64_at(&page, at + 8)));
        assert_eq!(counts, [(2, 0), (2, 0), (8, 0), ((1 << 40) + 1, 0)]);
        assert_eq!(health(&[])[32..], [0; 480]);
    }

    #[test]
    fn the_list_of_changed_namespaces_says_when_there_are_too_many() {
        let request = LogRequest { id: 4, retain: false, command_set: 0, offset: 0, len: 4096 };
        let list = |count: u32| page(&request, &features(), &(1..=count).collect()).unwrap();
        assert_eq!(list(2)[..12], [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(list(1024)[4092..], [0, 4, 0, 0]);
        assert_eq!(list(1025)[..8], [255, 255, 255, 255, 0, 0, 0, 0]);
    }

    #[test]
    fn discovery_has_the_address_of_the_connection() {
        let nqns = ["nqn.2026-11.io.blockyard:a"];
        let addresses = ("127.0.0.1:4420".parse().ok(), "127.0.0.1:8009".parse().unwrap());
        let whole = LogRequest { id: 0x70, retain: true, command_set: 0, offset: 0, len: 3 * 1024 };
        let page = discovery(&whole, 5, &nqns, addresses).unwrap();
        assert_eq!(page.len(), 3 * 1024);
        // Each part is that of the page, with zeros after its end.
        for (offset, len) in [(0, 16), (8, 1020), (1020, 1032), (2044, 2048), (3072, 4), (3068, 4)]
        {
            let request = LogRequest { offset, len, ..whole };
            let part = discovery(&request, 5, &nqns, addresses);
            assert_eq!(part, request.part(&page), "{offset} {len}");
        }
        let after_end = LogRequest { offset: 3076, ..whole };
        let refused = Err(StatusCode::INVALID_FIELD);
        assert_eq!(discovery(&after_end, 5, &nqns, addresses), refused);
        let itself = &page[1024..];
        assert_eq!(
            (&itself[..11], &itself[32..38]),
            (&[3, 1, 3, 2, 1, 0, 255, 255, 32, 0, 3][..], &b"8009  "[..])
        );
        assert_eq!((u64_at(&page, 0), u64_at(&page, 8), page[16]), (5, 2, 0));
        let entry = &page[2048..];
        assert_eq!(entry[..8], [3, 1, 2, 2, 1, 0, 0xff, 0xff]);
        assert_eq!(&entry[32..38], b"4420  ");
        assert_eq!(&entry[256..283], b"nqn.2026-11.io.blockyard:a\0");
        assert_eq!(&entry[512..523], b"127.0.0.1  ");
        let here = "[::1]:4420".parse().unwrap();
        let page = discovery(&whole, 5, &nqns, (None, here)).unwrap();
        assert_eq!((page[1024 + 1], &page[1024 + 512..1024 + 516]), (2, b"::1 ".as_slice()));
        assert_eq!((u64_at(&page, 8), &page[2048..]), (1, &[0; 1024][..]), "no address of devices");
    }
}

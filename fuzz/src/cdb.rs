//! SCSI commands: any bytes, mostly well-formed, to a small shingled disk. The response must stay
//! within its buffer, a refused command must change nothing, and the zones must always keep their
//! rules.

use blockyard_core::Sector;
use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_smr::cdb::Command;
use blockyard_smr::cdb::operations::{self, OPERATIONS, Operation};
use blockyard_smr::sense::{ScsiStatus, Sense, SenseFormat};
use blockyard_smr::transport::{Data, Outcome, ScsiTransport, TransportError};
use blockyard_smr::{Disk, DiskConfig};
use blockyard_zone_media::MemoryMedium;

use crate::input::Input;

/// The longest buffer of a command.
const DATA_BYTES_MAX: usize = 192 << 10;
/// The contents of a buffer before a command fills it.
const UNTOUCHED: u8 = 0xc3;
/// The most commands of one input.
const COMMANDS_MAX: u32 = 200;

/// Interprets the bytes as a disk and a stream of commands.
///
/// # Panics
/// If a response or a zone is wrong.
pub fn cdb(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let config = config(&mut input);
    let memory = MemoryMedium::new(config.size, config.zone_size).expect("a little memory");
    let disk = Disk::open(config, memory).expect("configurations in here are right");
    let mut room = vec![UNTOUCHED; DATA_BYTES_MAX];
    for _ in 0..COMMANDS_MAX {
        if input.is_empty() {
            break;
        }
        let cdb = command(&mut input, &disk);
        let way = input.byte();
        let len = match way {
            0..8 => 0,
            8..32 => input.below(256) as usize,
            _ => DATA_BYTES_MAX,
        };
        execute(&disk, &cdb, u64::from(way) % 16, &mut room[..len]);
    }
}

/// A small disk of any kind.
fn config(input: &mut Input<'_>) -> DiskConfig {
    let bits = input.byte();
    let logical_block = input.choose(&[512, 512, 4096]);
    DiskConfig {
        size: 512 << 10 | input.choose(&[0, 4096, 32 << 10]),
        zone_size: 64 << 10,
        zone_capacity: input.choose(&[0, 0, 40 << 10]),
        zone_nr_conv: input.choose(&[2, 1, 0]),
        zone_max_open: input.choose(&[2, 0, 3, 1]),
        logical_block,
        physical_block: if bits & 1 == 0 { 4096 } else { logical_block },
        unrestricted_reads: bits & 2 == 0,
        write_cache: bits & 4 == 0,
        ..DiskConfig::default()
    }
}

/// A command: raw bytes, a known one with any fields, or (mostly) a known one near a zone's
/// boundary or write pointer. The last kind consumes few bytes, so that a short input has many
/// commands.
fn command(input: &mut Input<'_>, disk: &Disk<MemoryMedium>) -> Vec<u8> {
    let kind = input.byte();
    if kind < 8 {
        return input.take(17).to_vec();
    }
    let operation = match kind {
        8..64 => &OPERATIONS[input.below(OPERATIONS.len() as u64) as usize],
        _ => USUAL[usize::from(kind) % USUAL.len()],
    };
    let mut cdb = vec![0; operation.usage.len()];
    if kind < 24 {
        cdb = (0..cdb.len()).map(|at| operation.usage[at] & input.byte()).collect();
    }
    cdb[0] = operation.opcode;
    cdb[1] = operation.usage_byte(1) & (cdb[1] | operation.service_action.unwrap_or(0));
    place(input, disk, operation, &mut cdb);
    if (8..12).contains(&kind) {
        cdb.truncate(input.below(17) as usize);
    }
    cdb
}

/// The most frequent commands, mostly ones that change state.
const USUAL: [&Operation; 12] = [
    &operations::WRITE_16,
    &operations::WRITE_16,
    &operations::WRITE_16,
    &operations::WRITE_10,
    &operations::WRITE_12,
    &operations::WRITE_SAME_16,
    &operations::READ_16,
    &operations::OPEN_ZONE,
    &operations::CLOSE_ZONE,
    &operations::FINISH_ZONE,
    &operations::RESET_WRITE_POINTER,
    &operations::REPORT_ZONES,
];

/// Gives a command an address near a zone's start, end or write pointer, and a short length.
fn place(input: &mut Input<'_>, disk: &Disk<MemoryMedium>, operation: &Operation, cdb: &mut [u8]) {
    let block = u64::from(disk.config().logical_block);
    let zone = disk.zone(input.below(disk.layout().slots().into()) as u32);
    let wp = if zone.wp == Sector::NONE { zone.start } else { zone.wp };
    let end = Sector(zone.start.0 + zone.sectors);
    let at = if operation.opcode == 0x94 { zone.start } else { wp };
    let choice = input.byte();
    let lba = match choice {
        0..200 => at.bytes() / block,
        200..215 => zone.start.bytes() / block,
        215..225 => end.bytes() / block,
        225..235 => (wp.bytes() / block).saturating_sub(input.below(20)),
        235..250 => wp.bytes() / block + input.below(20),
        _ => return,
    };
    // Mostly whole physical blocks of either size.
    let count = [8, 16, 1, 80, 128, 8, 3, 0][usize::from(choice) % 8];
    match operation.usage.len() {
        10 if operation.usage[2] == 0xff && operation.usage[5] == 0xff => {
            cdb[2..6].copy_from_slice(&(lba as u32).to_be_bytes());
            cdb[7..9].copy_from_slice(&(count as u16).to_be_bytes());
        }
        12 if operation.usage[1] == 0x18 => {
            cdb[2..6].copy_from_slice(&(lba as u32).to_be_bytes());
            cdb[6..10].copy_from_slice(&u32::to_be_bytes(count));
        }
        16 if operation.usage[2] == 0xff => {
            cdb[2..10].copy_from_slice(&lba.to_be_bytes());
            if operation.usage[10] == 0xff {
                cdb[10..14].copy_from_slice(&u32::to_be_bytes(count * 64));
                if operation.opcode != 0x95 {
                    cdb[10..14].copy_from_slice(&u32::to_be_bytes(count));
                }
            }
        }
        _ => {}
    }
}

/// The zones of a disk.
fn zones(disk: &Disk<MemoryMedium>) -> Vec<ZoneInfo> {
    (0..disk.layout().slots()).map(|slot| disk.zone(slot)).collect()
}

/// Executes a command, and checks the disk's state.
fn execute(disk: &Disk<MemoryMedium>, cdb: &[u8], direction: u64, room: &mut [u8]) {
    let before = zones(disk);
    // Mostly the right direction.
    let sends =
        cdb.first().is_some_and(|opcode| matches!(opcode, 0x2a | 0x8a | 0xaa | 0x41 | 0x93 | 0x42));
    let answer = match (direction, sends) {
        (0, _) => disk.execute(cdb, Data::None),
        (1, true) | (2.., false) => {
            room.fill(UNTOUCHED);
            disk.execute(cdb, Data::In(room))
        }
        _ => disk.execute(cdb, Data::Out(room)),
    };
    match answer {
        Ok(ref outcome) => check_outcome(cdb, outcome, room, (direction, sends)),
        Err(ref error) => {
            assert!(!matches!(error, TransportError::Io(_)), "{error}");
            assert_eq!(zones(disk), before, "what is not carried out changes nothing: {cdb:02x?}");
        }
    }
    if let Ok(Outcome { sense: Some(sense), .. }) = answer {
        assert_eq!(zones(disk), before, "a refusal changes nothing: {cdb:02x?}, {sense}");
    }
    check_zones(disk);
}

fn check_outcome(cdb: &[u8], outcome: &Outcome, room: &[u8], direction: (u64, bool)) {
    assert!(outcome.transferred <= room.len(), "{cdb:02x?}: {outcome:?}");
    if matches!(direction, (1, true) | (2.., false)) && outcome.sense.is_none() {
        let rest = &room[outcome.transferred..];
        assert!(rest.iter().all(|&byte| byte == UNTOUCHED), "{cdb:02x?} writes too far");
    }
    match outcome.sense {
        None => {
            assert_eq!(outcome.status, ScsiStatus::Good);
            let command = Command::parse(cdb).expect("what was carried out was read");
            assert_eq!(Command::parse(&command.print()), Ok(command));
        }
        Some(sense) => {
            assert_eq!(outcome.status, ScsiStatus::CheckCondition);
            let printed = sense.print(SenseFormat::Descriptor);
            assert_eq!(Sense::parse(&printed), Some(sense));
            assert!(sense.text().is_some(), "{sense} has a name");
        }
    }
}

/// The rules of zones, and the counts of open ones.
fn check_zones(disk: &Disk<MemoryMedium>) {
    let (mut open, mut explicit) = (0, 0);
    let physical = u64::from(disk.config().physical_block) / 512;
    for zone in zones(disk) {
        let written = zone.wp.0.wrapping_sub(zone.start.0);
        let fits = match zone.cond {
            ZoneCond::NotWp | ZoneCond::Full => written == zone.sectors,
            ZoneCond::Empty => written == 0,
            ZoneCond::ImplicitOpen | ZoneCond::Closed => (1..zone.sectors).contains(&written),
            ZoneCond::ExplicitOpen => written < zone.sectors,
            ZoneCond::ReadOnly | ZoneCond::Offline => false,
        };
        assert!(fits && written.is_multiple_of(physical), "{zone:?}");
        open += u32::from(matches!(zone.cond, ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen));
        explicit += u32::from(zone.cond == ZoneCond::ExplicitOpen);
    }
    if let Some(counts) = disk.counts() {
        assert_eq!((counts.open, counts.explicit), (open, explicit));
        assert!(open <= disk.config().zone_max_open);
    }
}

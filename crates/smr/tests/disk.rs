//! Cases that libzbc's suite does not cover: gap zones, broken zones, a failing medium, what must
//! be durable when a command ends, and disks that are opened again.
#![allow(clippy::unwrap_used, clippy::disallowed_types)] // Test code.

use std::io;
use std::sync::Mutex;

use blockyard_core::zone::ZoneCond;
use blockyard_smr::cdb::{Blocks, Command, Form, OperationFilter, ZoneAction};
use blockyard_smr::config::DiskError;
use blockyard_smr::sense::Sense;
use blockyard_smr::transport::{Data, TransportError};
use blockyard_smr::{Disk, DiskConfig, ScsiTransport};
use blockyard_zone_media::{Media, MemoryMedium, ZoneRecord};

const ZONE_BYTES: u64 = 64 << 10;
/// Blocks of a zone, including its gap.
const ZONE: u64 = ZONE_BYTES / 512;

/// The calls that a medium received, one string each.
#[derive(Debug, Default)]
struct Log {
    asked: Vec<String>,
    fails: Option<&'static str>,
    records: Vec<ZoneRecord>,
}

/// A medium in memory that logs its calls and fails on request.
#[derive(Debug)]
struct Watched {
    memory: MemoryMedium,
    log: Mutex<Log>,
}

impl Watched {
    fn note(&self, word: &'static str, text: String) -> io::Result<()> {
        let mut log = self.log.lock().unwrap();
        log.asked.push(text);
        match log.fails {
            Some(failing) if failing == word => Err(io::Error::other("as told")),
            _ => Ok(()),
        }
    }

    /// The calls since the last time.
    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap().asked)
    }

    fn fail(&self, word: Option<&'static str>) {
        self.log.lock().unwrap().fails = word;
    }
}

impl Media for Watched {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.note("read", format!("read {offset}+{}", into.len()))?;
        self.memory.read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.note("write", format!("write {offset}+{}", from.len()))?;
        self.memory.write(offset, from)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.note("zero", format!("zero {offset}+{len}"))?;
        self.memory.zero(offset, len)
    }

    fn zone_changed(&self, zone: u32, state: ZoneRecord) -> io::Result<()> {
        let ZoneRecord { cond, written_sectors, erasures } = state;
        self.note("zone", format!("zone {zone} {cond} {written_sectors} {erasures}"))
    }

    fn make_room(&self, _: u32) -> io::Result<()> {
        match self.log.lock().unwrap().fails {
            Some("room") => Err(io::Error::other("as told")),
            _ => Ok(()),
        }
    }

    fn reset(&self, zone: u32, state: ZoneRecord) -> io::Result<()> {
        let ZoneRecord { cond, written_sectors, erasures } = state;
        self.note("reset", format!("reset {zone} {cond} {written_sectors} {erasures}"))?;
        self.memory.reset(zone, state)
    }

    fn flush(&self) -> io::Result<()> {
        self.note("flush", "flush".to_owned())
    }

    fn zones(&self) -> Vec<ZoneRecord> {
        self.log.lock().unwrap().records.clone()
    }
}

fn config(change: impl FnOnce(&mut DiskConfig)) -> DiskConfig {
    let mut config = DiskConfig {
        size: 8 * ZONE_BYTES,
        zone_size: ZONE_BYTES,
        zone_nr_conv: 2,
        zone_max_open: 2,
        ..DiskConfig::default()
    };
    change(&mut config);
    config
}

fn open_with(config: DiskConfig, records: Vec<ZoneRecord>) -> Result<Disk<Watched>, DiskError> {
    let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
    let log = Mutex::new(Log { records, ..Log::default() });
    Disk::open(config, Watched { memory, log })
}

fn disk(change: impl FnOnce(&mut DiskConfig)) -> Disk<Watched> {
    open_with(config(change), Vec::new()).unwrap()
}

fn send(disk: &Disk<Watched>, command: Command, data: Data<'_>) -> Result<usize, Sense> {
    let outcome = disk.execute(&command.print(), data).unwrap();
    outcome.sense.map_or(Ok(outcome.transferred), Err)
}

fn blocks(lba: u64, count: u64) -> Blocks {
    Blocks { lba, count: count as u32 }
}

fn read(disk: &Disk<Watched>, lba: u64, count: u64) -> Result<Vec<u8>, Sense> {
    let mut room = vec![0xee; count as usize * 512];
    let command = Command::Read { form: Form::Sixteen, blocks: blocks(lba, count), fua: false };
    send(disk, command, Data::In(&mut room)).map(|_| room)
}

fn write_fua(disk: &Disk<Watched>, lba: u64, count: u64, fua: bool) -> Result<usize, Sense> {
    let bytes = vec![7; count as usize * 512];
    let command = Command::Write { form: Form::Sixteen, blocks: blocks(lba, count), fua };
    send(disk, command, Data::Out(&bytes))
}

fn write(disk: &Disk<Watched>, lba: u64, count: u64) -> Result<(), Sense> {
    write_fua(disk, lba, count, false).map(drop)
}

fn act(disk: &Disk<Watched>, action: ZoneAction, slot: u64) -> Result<(), Sense> {
    send(disk, Command::Zones { action, zone_id: slot * ZONE, all: false }, Data::None).map(drop)
}

const ACTIONS: [ZoneAction; 4] =
    [ZoneAction::Close, ZoneAction::Finish, ZoneAction::Open, ZoneAction::Reset];

#[test]
fn nothing_is_in_a_gap() {
    let disk = disk(|config| config.zone_capacity = 48 << 10);
    let gap = 2 * ZONE + 96;
    // Regression: docs/smr.md gave two results for a READ that runs into a gap zone: this one, and
    // that of a READ across the end of a zone.
    let restricted = self::disk(|config| {
        (config.zone_capacity, config.unrestricted_reads) = (48 << 10, false);
    });
    for disk in [&disk, &restricted] {
        for (lba, count) in [(gap, 8), (gap - 8, 16), (gap, ZONE)] {
            let first = lba.max(gap);
            let answer = read(disk, lba, count);
            assert_eq!(answer, Err(Sense::GAP_ZONE_ACCESS.at(first)), "{lba} {count}");
        }
    }
    assert_eq!(write(&disk, gap, 8), Err(Sense::GAP_ZONE_ACCESS.at(gap)));
    for action in ACTIONS {
        let command = Command::Zones { action, zone_id: gap, all: false };
        assert_eq!(send(&disk, command, Data::None), Err(Sense::invalid_field(2, None)));
    }
    // A write that would end in the gap crosses the end of its zone.
    assert_eq!(write(&disk, 2 * ZONE, 88), Ok(()));
    let at = 2 * ZONE + 88;
    assert_eq!(write(&disk, at, 16), Err(Sense::WRITE_BOUNDARY_VIOLATION.at(at)));
    assert_eq!(write(&disk, at, 8), Ok(()));
    assert_eq!(disk.zone(2).cond, ZoneCond::Full);
    // Conventional zones have no gap.
    assert_eq!(write(&disk, ZONE - 8, 16), Ok(()));
}

#[test]
fn a_broken_zone_says_how() {
    let disk = disk(|_| {});
    let (read_only, offline) = (3 * ZONE, 4 * ZONE);
    for lba in [read_only, offline] {
        assert_eq!(write(&disk, lba, 8), Ok(()));
    }
    disk.media().asked();
    disk.break_zone(3, ZoneCond::ReadOnly).unwrap();
    disk.break_zone(4, ZoneCond::Offline).unwrap();
    assert_eq!(disk.media().asked(), ["zone 3 read-only 128 0", "zone 4 offline 128 0"]);
    assert_eq!(disk.counts().unwrap().open, 0, "they are not open any more");
    assert_eq!(read(&disk, read_only, 8).unwrap()[0], 7);
    assert_eq!(read(&disk, read_only + 8, 8).unwrap()[0], 0);
    assert_eq!(read(&disk, offline, 8), Err(Sense::ZONE_IS_OFFLINE.at(offline)));
    assert_eq!(read(&disk, read_only, ZONE + 1), Err(Sense::ZONE_IS_OFFLINE.at(offline)));
    let at = read_only + 8;
    assert_eq!(write(&disk, at, 8), Err(Sense::ZONE_IS_READ_ONLY.at(at)));
    assert_eq!(write(&disk, offline, 8), Err(Sense::ZONE_IS_OFFLINE.at(offline)));
    for action in ACTIONS {
        assert_eq!(act(&disk, action, 3), Err(Sense::ZONE_IS_READ_ONLY));
        assert_eq!(act(&disk, action, 4), Err(Sense::ZONE_IS_OFFLINE));
        let all = Command::Zones { action, zone_id: 0, all: true };
        assert_eq!(send(&disk, all, Data::None), Ok(0));
    }
    assert_eq!((disk.zone(3).cond, disk.zone(4).cond), (ZoneCond::ReadOnly, ZoneCond::Offline));
    // Repeating the fault, or repairing the other one, changes nothing, and nothing is recorded.
    disk.media().asked();
    disk.break_zone(3, ZoneCond::ReadOnly).unwrap();
    disk.repair_zone(4, ZoneCond::ReadOnly).unwrap();
    assert_eq!((disk.zone(3).cond, disk.zone(4).cond), (ZoneCond::ReadOnly, ZoneCond::Offline));
    assert!(disk.media().asked().is_empty());
    disk.repair_zone(3, ZoneCond::ReadOnly).unwrap();
    disk.repair_zone(4, ZoneCond::Offline).unwrap();
    for slot in [3, 4] {
        assert_eq!(disk.zone(slot).cond, ZoneCond::Empty);
        assert_eq!(write(&disk, u64::from(slot) * ZONE, 8), Ok(()));
    }
    for (slot, cond) in [(0, ZoneCond::Offline), (8, ZoneCond::Offline), (3, ZoneCond::Full)] {
        let error = disk.break_zone(slot, cond).unwrap_err();
        assert!(error.to_string().contains("2 to 7"), "{error}");
    }
}

#[test]
fn fua_write_is_durable_when_its_command_completes() {
    let cached = disk(|_| {});
    assert_eq!(write(&cached, 2 * ZONE, 8), Ok(()));
    assert_eq!(cached.media().asked(), ["write 131072+4096", "zone 2 implicit-open 8 0"]);
    write_fua(&cached, 2 * ZONE + 8, 8, true).unwrap();
    let asked = cached.media().asked();
    assert_eq!(asked, ["write 135168+4096", "zone 2 implicit-open 16 0", "flush"]);
    assert_eq!(act(&cached, ZoneAction::Reset, 2), Ok(()));
    assert_eq!(cached.media().asked(), ["reset 2 empty 0 1"]);
    let command =
        Command::SynchronizeCache { form: Form::Ten, blocks: blocks(0, 0), immediate: true };
    assert_eq!(send(&cached, command, Data::None), Ok(0));
    assert_eq!(cached.media().asked(), ["flush"]);

    let through = disk(|config| config.write_cache = false);
    assert_eq!(write(&through, 0, 1), Ok(()));
    assert_eq!(through.media().asked(), ["write 0+512", "flush"]);
    assert_eq!(act(&through, ZoneAction::Open, 2), Ok(()));
    assert_eq!(through.media().asked(), ["zone 2 explicit-open 0 0", "flush"]);
}

#[test]
fn medium_errors_are_reported_with_sense_data() {
    let disk = disk(|_| {});
    let at = 2 * ZONE;
    disk.media().fail(Some("write"));
    assert_eq!(write(&disk, 0, 8), Err(Sense::WRITE_ERROR.at(0)));
    assert_eq!(write(&disk, at, 8), Err(Sense::WRITE_ERROR.at(at)));
    disk.media().fail(Some("read"));
    assert_eq!(read(&disk, 5, 1), Err(Sense::UNRECOVERED_READ_ERROR.at(5)));
    disk.media().fail(Some("flush"));
    assert_eq!(write_fua(&disk, 0, 8, true), Err(Sense::WRITE_ERROR));
    disk.media().fail(Some("reset"));
    assert_eq!(act(&disk, ZoneAction::Reset, 2), Err(Sense::INTERNAL_TARGET_FAILURE));
    disk.media().fail(Some("zone"));
    assert_eq!(act(&disk, ZoneAction::Open, 2), Err(Sense::INTERNAL_TARGET_FAILURE));
}

/// A write that fails on the medium still moves the write pointer and changes the condition. The
/// medium records that, and the disk has the same state when it is opened again.
#[test]
fn failed_write_moves_the_write_pointer_permanently() {
    let disk = disk(|_| {});
    let at = 2 * ZONE;
    let state = |disk: &Disk<Watched>| (disk.zone(2).cond, disk.zone(2).wp.0 - at);
    disk.media().fail(Some("write"));
    assert_eq!(write(&disk, at, 8), Err(Sense::WRITE_ERROR.at(at)));
    assert_eq!(disk.media().asked(), ["write 131072+4096", "zone 2 implicit-open 8 0"]);
    assert_eq!(state(&disk), (ZoneCond::ImplicitOpen, 8));
    disk.media().fail(None);
    assert_eq!(write(&disk, at, 8), Err(Sense::UNALIGNED_WRITE.at(at)));
    assert_eq!(read(&disk, at, 8).unwrap(), [0; 8 * 512], "here nothing of it has come");
    let again = open_with(config(|_| {}), records(2, ZoneCond::ImplicitOpen, 8)).unwrap();
    assert_eq!(state(&again), (ZoneCond::Closed, 8));
    // This holds for the last write of a zone, too.
    disk.media().fail(Some("write"));
    assert_eq!(write(&disk, at + 8, ZONE - 8), Err(Sense::WRITE_ERROR.at(at + 8)));
    assert_eq!(disk.zone(2).cond, ZoneCond::Full);
    assert_eq!(disk.media().asked().last().unwrap(), "zone 2 full 128 0");
}

#[test]
fn a_zone_that_cannot_be_made_ready_is_not_finished() {
    let disk = disk(|_| {});
    write(&disk, 2 * ZONE, 8).unwrap();
    disk.media().asked();
    disk.media().fail(Some("room"));
    assert_eq!(act(&disk, ZoneAction::Finish, 2), Err(Sense::INTERNAL_TARGET_FAILURE));
    assert!(disk.break_zone(2, ZoneCond::ReadOnly).is_err());
    assert_eq!((disk.zone(2).cond, disk.zone(2).wp.0), (ZoneCond::ImplicitOpen, 2 * ZONE + 8));
    assert_eq!(disk.counts().unwrap().open, 1);
    assert!(disk.media().asked().is_empty(), "nothing has changed");
    disk.media().fail(None);
    assert_eq!(act(&disk, ZoneAction::Finish, 2), Ok(()));
    assert_eq!(disk.zone(2).cond, ZoneCond::Full);
}

/// Records of eight zones, one of which has this state.
fn records(slot: usize, cond: ZoneCond, written_sectors: u64) -> Vec<ZoneRecord> {
    let mut records = vec![ZoneRecord::EMPTY; 8];
    records[slot] = ZoneRecord { cond, written_sectors, erasures: 5 };
    records
}

#[test]
fn a_disk_that_is_opened_again_has_no_open_zone() {
    use ZoneCond::{Closed, Empty, ExplicitOpen, Full, ImplicitOpen, NotWp, Offline, ReadOnly};
    let found = |cond, written| {
        let disk = open_with(config(|_| {}), records(3, cond, written)).unwrap();
        assert_eq!(disk.counts().unwrap().open, 0);
        let zone = disk.zone(3);
        (zone.cond, zone.wp.0.wrapping_sub(zone.start.0))
    };
    for open in [ImplicitOpen, ExplicitOpen, Closed] {
        assert_eq!(found(open, 0), (Empty, 0));
        assert_eq!(found(open, 16), (Closed, 16));
        assert_eq!(found(open, ZONE), (Full, ZONE));
    }
    assert_eq!(found(Full, ZONE).0, Full);
    assert_eq!(found(ReadOnly, 0).0, ReadOnly);
    assert_eq!(found(Offline, 0).0, Offline);
    // Data written before can be read, and writes continue after them.
    let disk = open_with(config(|_| {}), records(3, Closed, 16)).unwrap();
    assert_eq!(write(&disk, 3 * ZONE + 16, 8), Ok(()));
    let refused = |records| open_with(config(|_| {}), records).unwrap_err().to_string();
    let text = refused(records(3, Closed, 17));
    assert!(text.contains("zone 3 as closed with 17 sectors written"), "{text}");
    assert!(refused(records(3, Closed, ZONE + 8)).contains("at most 128"));
    assert!(refused(records(3, NotWp, 0)).contains("a condition of a sequential zone"));
    assert!(refused(vec![ZoneRecord::EMPTY; 7]).contains("has 7 zones, the device 8"));
    assert!(open_with(config(|_| {}), records(0, NotWp, 0)).is_ok());
}

/// Sends an UNMAP of these ranges.
fn unmap(disk: &Disk<Watched>, ranges: &[(u64, u32)]) -> Result<usize, Sense> {
    let mut list = vec![0; 8];
    for (lba, count) in ranges {
        list.extend(lba.to_be_bytes());
        list.extend(count.to_be_bytes());
        list.extend([0; 4]);
    }
    let len = list.len() as u16;
    list[..2].copy_from_slice(&(len - 2).to_be_bytes());
    list[2..4].copy_from_slice(&(len - 8).to_be_bytes());
    send(disk, Command::Unmap { list_bytes: len }, Data::Out(&list))
}

#[test]
fn unmapped_blocks_of_conventional_zones_are_zeros() {
    let disk = disk(|_| {});
    write(&disk, 0, 16).unwrap();
    write(&disk, 2 * ZONE, 16).unwrap();
    disk.media().asked();
    assert_eq!(unmap(&disk, &[(8, 4), (2 * ZONE - 8, 16)]), Ok(40));
    assert_eq!(disk.media().asked()[..2], ["zero 4096+2048", "zero 126976+4096"]);
    assert_eq!(read(&disk, 7, 2).unwrap()[511..514], [7, 0, 0]);
    assert_eq!(read(&disk, 2 * ZONE, 8).unwrap()[0], 7, "a sequential zone keeps its data");
    let end = 8 * ZONE;
    assert_eq!(unmap(&disk, &[(0, 1), (end, 1)]), Err(Sense::LBA_OUT_OF_RANGE.at(end)));
    assert_eq!(read(&disk, 0, 1).unwrap()[0], 7, "a refusal changes nothing");
    assert_eq!(unmap(&disk, &[(0, 1); 257]), Err(Sense::invalid_parameter(2)));
    let short = Command::Unmap { list_bytes: 7 };
    let refused = send(&disk, short, Data::Out(&[0; 7]));
    assert_eq!(refused, Err(Sense::PARAMETER_LIST_LENGTH_ERROR));
    let long = Command::Unmap { list_bytes: 8 };
    let refused = send(&disk, long, Data::Out(&[0, 22, 0, 16, 0, 0, 0, 0]));
    assert_eq!(refused, Err(Sense::PARAMETER_LIST_LENGTH_ERROR));
    assert_eq!(send(&disk, Command::Unmap { list_bytes: 0 }, Data::None), Ok(0));
    let sequential = open_with(config(|config| config.zone_nr_conv = 0), vec![]).unwrap();
    assert_eq!(unmap(&sequential, &[(0, 1)]), Err(Sense::INVALID_OPERATION_CODE));
}

#[test]
fn write_same_fills_and_keeps_the_zones_rules() {
    let disk = disk(|_| {});
    let same = |lba, count, byte: u8, unmap| {
        let block = [byte; 512];
        let blocks = blocks(lba, count);
        let command = Command::WriteSame { form: Form::Ten, blocks, unmap, no_data: false };
        send(&disk, command, Data::Out(&block))
    };
    assert_eq!(same(3, 200, 9, false), Ok(512));
    assert!(read(&disk, 3, 200).unwrap().iter().all(|&byte| byte == 9));
    assert_eq!(same(2 * ZONE, 16, 9, true), Ok(512));
    assert_eq!(disk.zone(2).wp.0, 2 * ZONE + 16);
    assert_eq!(same(2 * ZONE, 16, 9, true), Err(Sense::UNALIGNED_WRITE.at(2 * ZONE)));
    assert_eq!(same(2 * ZONE + 16, 0, 9, true), Err(Sense::invalid_field(7, None)));
    disk.media().asked();
    assert_eq!(same(3, 8, 0, true), Ok(512));
    assert_eq!(disk.media().asked(), ["zero 1536+4096"]);
}

#[test]
fn transfers_have_bounds() {
    let large = DiskConfig { size: 1 << 30, zone_size: 128 << 20, ..config(|_| {}) };
    let disk = open_with(large, vec![]).unwrap();
    let mut room = vec![0; 4096];
    // Longer than the limit in VPD page B0h.
    for (form, byte) in [(Form::Twelve, 6), (Form::Sixteen, 10)] {
        let blocks = blocks(0, 32_769);
        let command = Command::Read { form, blocks, fua: false };
        let refused = send(&disk, command, Data::In(&mut room));
        assert_eq!(refused, Err(Sense::invalid_field(byte, None)));
        let command = Command::Write { form, blocks, fua: false };
        let refused = send(&disk, command, Data::Out(&room));
        assert_eq!(refused, Err(Sense::invalid_field(byte, None)));
    }
    let same = Command::WriteSame {
        form: Form::Sixteen,
        blocks: blocks(0, (256 << 11) + 1),
        unmap: false,
        no_data: true,
    };
    assert_eq!(send(&disk, same, Data::None), Err(Sense::invalid_field(10, None)));
    // A buffer that does not fit is a transport error, not sense data.
    let read = Command::Read { form: Form::Sixteen, blocks: blocks(0, 9), fua: false }.print();
    let wrong = disk.execute(&read, Data::In(&mut room)).unwrap_err();
    assert_eq!(wrong.to_string(), "the command transfers 4608 bytes, the buffer has 4096");
    let wrong = disk.execute(&read, Data::Out(&room)).unwrap_err();
    assert!(matches!(wrong, TransportError::Direction { .. }), "{wrong}");
    assert!(matches!(disk.execute(&[0x28, 0], Data::None), Err(TransportError::CdbLength(2))));
    assert!(disk.media().asked().is_empty(), "nothing was carried out");
    // A transfer of 0 blocks is no error, not even at the end of the disk.
    let end = (1 << 30) / 512;
    for (lba, wanted) in [(end, Ok(0)), (end + 1, Err(Sense::LBA_OUT_OF_RANGE.at(end + 1)))] {
        let command = Command::Read { form: Form::Sixteen, blocks: blocks(lba, 0), fua: false };
        assert_eq!(send(&disk, command, Data::None), wanted);
    }
}

#[test]
fn answers_are_cut_off_where_there_is_no_room() {
    let disk = disk(|_| {});
    let commands = |allocation: u8| {
        let (short, long) = (u16::from(allocation), u32::from(allocation));
        [
            Command::Inquiry { page: None, allocation: short },
            Command::Inquiry { page: Some(0xb0), allocation: short },
            Command::RequestSense { descriptors: false, allocation },
            Command::ReadCapacity16 { allocation: long },
            Command::ReportLuns { select: 0, allocation: long },
            Command::ReportZones { lba: 0, allocation: long, partial: false, option: 0 },
            Command::ReportSupportedOperationCodes {
                filter: OperationFilter::All,
                timeouts: true,
                allocation: long,
            },
        ]
    };
    let mut whole = [0; 255];
    let whole: Vec<Vec<u8>> = commands(255)
        .map(|command| {
            let len = send(&disk, command, Data::In(&mut whole)).unwrap();
            whole[..len].to_vec()
        })
        .into();
    for allocation in [0, 1, 7, 15] {
        for (command, whole) in commands(allocation).into_iter().zip(&whole) {
            let mut room = [0xee; 64];
            let len = send(&disk, command, Data::In(&mut room)).unwrap();
            assert_eq!(len, usize::from(allocation), "{command:?}");
            assert_eq!(room[..len], whole[..len], "{command:?}");
            assert!(room[len..].iter().all(|&byte| byte == 0xee), "{command:?}");
            assert_eq!(send(&disk, command, Data::None), Ok(0), "{command:?}");
        }
    }
}

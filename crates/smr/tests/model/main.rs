//! The emulated disk compared with a plain model: command by command, and with several threads.
//! These have their own zones, or all write to one zone, or read while zones are reset.
#![allow(clippy::unwrap_used)] // A test that cannot continue panics.

mod ledger;
mod plain;
mod threads;

use blockyard_core::zone::ZoneCond;
use blockyard_smr::cdb::{Blocks, Command, Form, ZoneAction};
use blockyard_smr::transport::{Data, ScsiTransport};
use blockyard_smr::{Disk, DiskConfig};
use blockyard_testing::seed::Seed;
use blockyard_zone_media::MemoryMedium;
use fastrand::Rng;
use plain::{Action, BLOCK, Code, Cond, PHYSICAL, Plain};

/// Blocks of a large command.
const LARGE: u64 = 96;
/// Zone size in bytes: the next power of two.
const ZONE_BYTES: u64 = 64 << 10;

/// A disk with conventional and sequential zones and a shorter last one.
fn disk(zones: u64, conventional: u32, open_max: u32, unrestricted: bool) -> Disk<MemoryMedium> {
    let config = DiskConfig {
        size: zones * ZONE_BYTES - (16 << 10),
        zone_size: ZONE_BYTES,
        zone_nr_conv: conventional,
        zone_max_open: open_max,
        unrestricted_reads: unrestricted,
        ..DiskConfig::default()
    };
    let memory = MemoryMedium::new(config.size, config.zone_size).unwrap();
    Disk::open(config, memory).unwrap()
}

fn model(disk: &Disk<MemoryMedium>) -> Plain {
    let config = disk.config();
    Plain::new(
        config.size / BLOCK as u64,
        config.zone_size / BLOCK as u64,
        config.zone_nr_conv as usize,
        config.zone_max_open as usize,
        config.unrestricted_reads,
    )
}

fn send(disk: &Disk<MemoryMedium>, command: Command, data: Data<'_>) -> Result<(), Code> {
    let outcome = disk.execute(&command.print(), data).unwrap();
    match outcome.sense {
        None => Ok(()),
        Some(sense) => Err((sense.key as u8, sense.asc, sense.ascq)),
    }
}

fn read(disk: &Disk<MemoryMedium>, form: Form, lba: u64, count: u64) -> Result<Vec<u8>, Code> {
    let mut room = vec![0xee; count as usize * BLOCK];
    let blocks = Blocks { lba, count: count as u32 };
    send(disk, Command::Read { form, blocks, fua: count == 3 }, Data::In(&mut room))?;
    Ok(room)
}

fn write(disk: &Disk<MemoryMedium>, form: Form, lba: u64, bytes: &[u8]) -> Result<(), Code> {
    let blocks = Blocks { lba, count: (bytes.len() / BLOCK) as u32 };
    send(disk, Command::Write { form, blocks, fua: bytes.len() == BLOCK }, Data::Out(bytes))
}

fn write_same(disk: &Disk<MemoryMedium>, lba: u64, count: u64, byte: u8) -> Result<(), Code> {
    let blocks = Blocks { lba, count: count as u32 };
    let no_data = byte == 0;
    let command = Command::WriteSame { form: Form::Sixteen, blocks, unmap: no_data, no_data };
    let block = [byte; BLOCK];
    send(disk, command, if no_data { Data::None } else { Data::Out(&block) })
}

fn act(disk: &Disk<MemoryMedium>, action: Action, zone_id: u64, all: bool) -> Result<(), Code> {
    let action = match action {
        Action::Close => ZoneAction::Close,
        Action::Finish => ZoneAction::Finish,
        Action::Open => ZoneAction::Open,
        Action::Reset => ZoneAction::Reset,
    };
    send(disk, Command::Zones { action, zone_id, all }, Data::None)
}

fn cond_of(cond: ZoneCond) -> Cond {
    match cond {
        ZoneCond::NotWp => Cond::NotWp,
        ZoneCond::Empty => Cond::Empty,
        ZoneCond::ImplicitOpen => Cond::Implicit,
        ZoneCond::ExplicitOpen => Cond::Explicit,
        ZoneCond::Closed => Cond::Closed,
        ZoneCond::Full => Cond::Full,
        other => panic!("{other}"),
    }
}

/// Compares a zone's condition and write pointer.
fn same_zone(disk: &Disk<MemoryMedium>, model: &Plain, zone: usize) {
    let found = disk.zone(zone as u32);
    let wanted = &model.zones[zone];
    assert_eq!(cond_of(found.cond), wanted.cond, "zone {zone}");
    if !matches!(wanted.cond, Cond::NotWp | Cond::Full) {
        assert_eq!(found.wp.0 - found.start.0, wanted.written, "zone {zone}");
    }
}

/// A random place for a command, and a random length.
fn place(rng: &mut Rng, model: &Plain) -> (u64, u64) {
    let zone = rng.usize(..model.zones.len());
    let (start, len) = (model.start(zone), model.len(zone));
    let wp = start + model.zones[zone].written;
    let lba = match rng.u8(..20) {
        0..14 => wp,
        14 => start,
        15 => start + len,
        16 => (start + len).saturating_sub(PHYSICAL),
        17 => wp.saturating_sub(PHYSICAL),
        18 => wp + rng.u64(..PHYSICAL),
        _ => rng.u64(..model.blocks() + 4),
    };
    let count = match rng.u8(..20) {
        0..14 => PHYSICAL * rng.u64(1..=6),
        14 => (start + len).saturating_sub(lba).max(1),
        15 => 0,
        16 => LARGE,
        _ => rng.u64(1..20),
    };
    (lba, count)
}

fn actions(rng: &mut Rng) -> Action {
    [Action::Close, Action::Finish, Action::Open, Action::Reset][rng.usize(..4)]
}

/// Sends one random command to disk and model.
fn step(rng: &mut Rng, disk: &Disk<MemoryMedium>, model: &mut Plain) {
    let form = [Form::Ten, Form::Twelve, Form::Sixteen][rng.usize(..3)];
    match rng.u8(..32) {
        0..8 => {
            let (lba, count) = place(rng, model);
            let lba = lba.saturating_sub(rng.u64(..16));
            let (found, wanted) = (read(disk, form, lba, count), model.read(lba, count));
            assert_eq!(found.as_ref().err(), wanted.as_ref().err(), "read {lba}+{count}");
            assert!(found == wanted, "data at {lba}+{count}");
        }
        8..20 => {
            let (lba, count) = place(rng, model);
            let bytes: Vec<u8> = (0..count as usize * BLOCK).map(|_| rng.u8(..)).collect();
            let wanted = model.write(lba, &bytes);
            assert_eq!(write(disk, form, lba, &bytes), wanted, "write {lba}+{count}");
        }
        20..23 => {
            let (lba, count) = place(rng, model);
            let (count, byte) = (count.max(1), rng.u8(..3));
            let wanted = model.write(lba, &vec![byte; count as usize * BLOCK]);
            let found = write_same(disk, lba, count, byte);
            assert_eq!(found, wanted, "write same {lba}+{count}");
        }
        23..30 => {
            let action = actions(rng);
            let zone = model.start(rng.usize(..model.zones.len()));
            let zone_id = if rng.u8(..10) == 0 { rng.u64(..model.blocks() + 4) } else { zone };
            let wanted = model.act(action, zone_id);
            assert_eq!(act(disk, action, zone_id, false), wanted, "{action:?} of {zone_id}");
        }
        30 => {
            let action = actions(rng);
            assert_eq!(act(disk, action, 0, true), model.act_all(action), "{action:?} all");
        }
        _ => send(disk, Command::TestUnitReady, Data::None).unwrap(),
    }
}

#[test]
fn one_thread_agrees_command_by_command() {
    let seed = Seed::from_env();
    let _watch = seed.watch("one_thread_agrees_command_by_command");
    for stream in 0..16 {
        let mut rng = seed.rng(stream);
        let open_max = [0, 1, 2, 3][stream as usize % 4];
        let disk = disk(8, 2, open_max, stream / 4 % 2 == 0);
        let mut model = model(&disk);
        for _ in 0..1500 {
            step(&mut rng, &disk, &mut model);
            for zone in 0..model.zones.len() {
                same_zone(&disk, &model, zone);
            }
        }
        for zone in 0..model.zones.len() {
            let written = match model.zones[zone].cond {
                Cond::NotWp | Cond::Full => model.len(zone),
                _ => model.zones[zone].written,
            };
            let lba = model.start(zone);
            let same = read(&disk, Form::Sixteen, lba, written) == model.read(lba, written);
            assert!(same, "data of zone {zone}");
        }
    }
}

//! Zoned devices: untrusted images of zones, and directories of untrusted files that a zoned device
//! opens and works on.

use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{Bio, Disk, Flags, Sector};
use blockyard_null::{NullConfig, NullOnMedia, media_geometry};
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::zone_store::SimulatedZoneStore;
use blockyard_yard::{stack, uri, zone_image};
use blockyard_zone_media::journal::JournalRecord;
use blockyard_zone_media::live::Share;
use blockyard_zone_media::store::Store as _;
use blockyard_zone_media::superblock::Superblock;
use blockyard_zone_media::{
    Files, MediaGeometry, Options, data, journal, live, superblock, tables,
};

use crate::input::Input;

/// Sectors of a zone, and how many of them can be written.
const ZONE: u64 = 8;
const CAPACITY: u64 = 6;
/// Zones of a device; the first one is conventional.
const ZONES: u64 = 6;

const ID: [u8; 16] = *b"0123456789abcdef";
const DATA_FILES: u32 = 2;
const JOURNAL_RECORDS: u32 = 7;

/// Interprets the bytes as an image, and loads it into a small device. An image is the raw bytes, a
/// description of random fields with valid checksums, or a valid image with changed bytes.
///
/// # Panics
/// If a loaded image does not save as an equal one, an error has no text, or a refused image leaves
/// data on the device.
pub fn image(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let limits = input.choose(&["", "&zone_max_open=1", "&zone_max_open=1&zone_max_active=2"]);
    let kind = match input.below(4) {
        0 => "smr:///z?bs=512&physical_bs=512".to_owned(),
        _ => format!("null:///z?zoned=1&memory_backed=1{limits}"),
    };
    let uri = format!("{kind}&size=24k&zone_size=4k&zone_capacity=3k&zone_nr_conv=1");
    let made = || stack::open(&uri::parse(&uri).expect("it is valid")).expect("it is valid").disk;
    let disk = made();
    let file = match input.below(3) {
        0 => input.take(usize::MAX).to_vec(),
        1 => described(&mut input),
        _ => changed(&mut input),
    };
    match zone_image::load(&*disk, &mut &file[..], false) {
        Ok(_) => {
            let first = saved(&*disk);
            let again = made();
            zone_image::load(&*again, &mut &first[..], false).expect("it was saved just now");
            assert!(saved(&*again) == first, "an image that was loaded saves as another one");
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert!(saved(&*disk) == saved(&*made()), "a refused image leaves data: {error}");
        }
    }
}

fn saved(disk: &dyn Disk) -> Vec<u8> {
    let mut image = Vec::new();
    zone_image::save(disk, &mut image).expect("memory takes it");
    image
}

/// A description with a valid checksum, and data with mostly valid ones.
fn described(input: &mut Input<'_>) -> Vec<u8> {
    let mut zones = Vec::new();
    let mut data = Vec::new();
    let mut number = 0;
    for _ in 0..input.below(8) {
        number += input.below(3);
        let cond = match number {
            0 => "not-wp",
            _ => input.choose(&["closed", "full", "implicit-open", "read-only", "offline", "x"]),
        };
        let sectors = input.below(9);
        zones.push(format!("{{\"zone\":{number},\"cond\":\"{cond}\",\"sectors\":{sectors}}}"));
        let bytes = vec![input.byte(); (sectors * 512) as usize];
        let crc = crc(&bytes) ^ u32::from(input.below(8) == 7);
        data.extend(bytes);
        data.extend(crc.to_le_bytes());
        number += 1;
    }
    let version = input.choose(&[1, 1, 1, 1, 1, 1, 1, 0, 2]);
    let line = format!(
        "{{\"blockyard_zones\":{version},\"size_bytes\":24576,\"block_bytes\":512,\
         \"zone_bytes\":4096,\"zone_capacity_bytes\":3072,\"conventional\":1,\"zones\":[{}]}}\n",
        zones.join(",")
    );
    let crc = crc(line.as_bytes()).to_le_bytes();
    [line.as_bytes(), &crc, &data, b"BLKYZEND"].concat()
}

/// A valid image with some bytes changed, or cut short.
fn changed(input: &mut Input<'_>) -> Vec<u8> {
    let mut valid = Input::new(&[5, 0, 0, 5, 9, 0, 0, 3, 7, 0, 1, 4, 1]);
    let mut file = described(&mut valid);
    for _ in 0..input.below(4) {
        let at = input.word() as usize % file.len();
        file[at] ^= input.byte();
    }
    if input.below(4) == 0 {
        file.truncate(input.word() as usize % (file.len() + 1));
    }
    file
}

/// The CRC-32 of IEEE 802.3, bit by bit: not the product's.
fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

fn config() -> NullConfig {
    NullConfig {
        size: ZONES * ZONE * 512,
        zoned: true,
        zone_size: ZONE * 512,
        zone_capacity: CAPACITY * 512,
        zone_nr_conv: 1,
        ..NullConfig::default()
    }
}

/// Opens a device on a directory whose files hold random states with valid checksums, mostly, and
/// some changed bytes. A device that opens can be read, written and opened again.
///
/// # Panics
/// If an accepted directory does not work as a device, or an error has no text.
pub fn files(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (geometry, _) = media_geometry(&config()).expect("it is valid");
    let directory = SimulatedDirectory::default();
    write_files(&mut input, &directory, &geometry);
    let Some(before) = opened(&directory, &geometry) else { return };
    let zones = work(&before);
    // After an orderly end, and after a kill.
    match input.below(2) {
        0 => drop(before),
        _ => std::mem::forget(before),
    }
    let after = opened(&directory, &geometry).expect("it was open just now");
    let mut found = Vec::new();
    after.report_zones(Sector(0), 64, &mut found).expect("a device with zones");
    for (then, now) in zones.iter().zip(&found) {
        let settled = match then.cond {
            ZoneCond::ImplicitOpen => ZoneCond::Closed,
            cond => cond,
        };
        assert_eq!((settled, then.wp), (now.cond, now.wp));
    }
}

/// Reads all zones, and appends a sector to each that takes one.
fn work(disk: &Arc<dyn Disk>) -> Vec<ZoneInfo> {
    let mut io = Io::new(disk.open().expect("a channel"), 4096);
    let report = || {
        let mut zones = Vec::new();
        disk.report_zones(Sector(0), 64, &mut zones).expect("a device with zones");
        zones
    };
    for zone in report() {
        let mut bytes = vec![0; (ZONE * 512) as usize];
        let read = io.read(zone.start, &mut bytes);
        assert_eq!(read.is_err(), zone.cond == ZoneCond::Offline, "{zone:?}");
        let wp = match zone.cond {
            ZoneCond::NotWp | ZoneCond::Full | ZoneCond::ReadOnly | ZoneCond::Offline => {
                assert!(io.append(zone.start, &[7; 512]).is_err(), "{zone:?}");
                continue;
            }
            ZoneCond::Empty => zone.start,
            _ => zone.wp,
        };
        assert!(wp.0 < zone.start.0 + CAPACITY, "{zone:?}");
        assert_eq!(io.append(zone.start, &[7; 512]), Ok(wp));
    }
    io.write(Sector(0), &[9; 512], Flags::FUA).expect("conventional zones take any write");
    io.run(Bio::flush()).expect("nothing fails");
    report()
}

fn opened(directory: &SimulatedDirectory, geometry: &MediaGeometry) -> Option<Arc<dyn Disk>> {
    let options = Options { data_files: DATA_FILES, ..Options::new(*geometry) };
    let files = match Files::open_in(SimulatedZoneStore::new(directory), &options) {
        Ok(files) => files,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return None;
        }
    };
    match NullOnMedia::open_on(&config(), files) {
        Ok(null) => {
            let depth = ChannelConfig::default();
            Some(Arc::new(Composed::new("z".to_owned(), "null", Arc::new(null), depth)))
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            None
        }
    }
}

/// A zone's word, valid mostly.
fn word(input: &mut Input<'_>, zone: u32) -> u64 {
    let (cond, written) = match (zone, input.below(16)) {
        (_, 15) => (input.below(16), input.below(12)),
        (0, _) => (0, ZONE),
        (_, 0..3) => (1, 0),
        (_, 3..10) => (4, 1 + input.below(CAPACITY)),
        (_, 10..13) => (0xe, input.choose(&[CAPACITY, ZONE])),
        (_, 13) => (0xd, ZONE),
        _ => (0xf, ZONE),
    };
    written << 8 | cond
}

fn write_files(input: &mut Input<'_>, directory: &SimulatedDirectory, geometry: &MediaGeometry) {
    let superblock = Superblock {
        id: ID,
        geometry: *geometry,
        data_files: DATA_FILES,
        journal_records: JOURNAL_RECORDS,
    };
    let words = |input: &mut Input<'_>| -> Vec<u64> {
        (0..ZONES as u32).map(|zone| word(input, zone)).collect()
    };
    let checkpoint = 1 + input.below(3);
    let slot = tables::slot_bytes(geometry) as usize;
    let mut table = vec![0; 2 * slot];
    for number in checkpoint..checkpoint + input.choose(&[1, 2]) {
        let bytes = tables::print(&ID, number, input.below(2) == 0, &words(input));
        let start = tables::slot_of(number, geometry) as usize;
        table[start..start + bytes.len()].copy_from_slice(&bytes);
    }
    let mut log = journal::label(&ID).print();
    for index in 0..input.below(u64::from(JOURNAL_RECORDS) + 1) as u32 {
        let zone = 1 + input.below(ZONES - 1) as u32;
        let checkpoint = checkpoint + input.below(2);
        let record = JournalRecord { index, checkpoint, zone, durable: 0, word: word(input, zone) };
        log.extend(record.print());
    }
    log.resize(journal::len_bytes(JOURNAL_RECORDS) as usize, 0);
    let mut all = vec![
        (superblock::FILE.to_owned(), superblock.print()),
        (tables::FILE.to_owned(), table),
        (journal::FILE.to_owned(), log),
    ];
    let boot = SimulatedZoneStore::new(directory).boot().expect("it is simulated");
    for number in 0..DATA_FILES {
        let share = Share { number, files: DATA_FILES };
        let zones = share.zones(geometry);
        let mut bytes = vec![input.byte(); data::label_offset(geometry, share) as usize];
        bytes.extend(data::label(&ID, number).print());
        all.push((data::name(number), bytes));
        if input.below(2) == 0 {
            let mut bytes = live::print_head(&ID, &boot, geometry, share);
            bytes.resize(live::WORDS as usize, 0);
            bytes.extend(zones.flat_map(|zone| word(input, zone).to_le_bytes()));
            all.push((share.name(), bytes));
        }
    }
    for _ in 0..input.below(3) {
        let file = input.below(all.len() as u64) as usize;
        let bytes = &mut all[file].1;
        let at = input.word() as usize % bytes.len();
        match input.below(8) {
            0 => bytes.truncate(at),
            _ => bytes[at] ^= input.byte(),
        }
        if bytes.is_empty() {
            all.remove(file);
        }
    }
    for (name, bytes) in all {
        directory.create(&name, bytes.len() as u64, 512).write_at(0, &bytes).expect("it fits");
    }
}

//! The files of an SMR disk's directory: as the product prints them with any fields, or any bytes.
//! An accepted file must be within bounds and consistent; any other is refused with a text.

use blockyard_zone_media::head::LABEL_BYTES;
use blockyard_zone_media::journal::{self, JournalRecord, RECORD_BYTES};
use blockyard_zone_media::live::Share;
use blockyard_zone_media::superblock::{JOURNAL_RECORDS_MAX, Superblock};
use blockyard_zone_media::zone_word::{UNREADABLE, pack, unpack};
use blockyard_zone_media::{FormatError, MediaGeometry, ZoneRecord, live, tables};

use crate::input::Input;

const ID: [u8; 16] = *b"0123456789abcdef";
const BOOT: [u8; 16] = *b"this run of it..";

/// The most zones of a disk whose tables are made.
const ZONES_MAX: u32 = 64;

/// Interprets the bytes as fields of all four files.
///
/// # Panics
/// If an inconsistent file is accepted, or a printed one does not parse to the same values.
pub fn media(bytes: &[u8]) {
    // The raw bytes as a superblock.
    refused(Superblock::parse(bytes).err());
    let mut input = Input::new(bytes);
    superblock(&mut input);
    let geometry = geometry(&mut input);
    if geometry.check("the input").is_err() {
        return;
    }
    refused(tables::newest(bytes, &ID, &geometry).err());
    refused(live::parse(bytes, &ID, &BOOT, &geometry, Share { number: 0, files: 1 }).err());
    refused(journal::replay(bytes, &ID, 1, &geometry).err());
    let zones = geometry.zone_count().min(ZONES_MAX);
    if zones == geometry.zone_count() {
        words(&mut input, &geometry);
    }
    records(&mut input, &geometry);
}

/// Asserts that an error names a value.
fn refused(error: Option<FormatError>) {
    assert!(error.is_none_or(|error| error.to_string().starts_with('`')));
}

/// A disk of any shape, mostly of a small one.
fn geometry(input: &mut Input<'_>) -> MediaGeometry {
    let zone_bytes = input.choose(&[65_536, 4096, 1 << 20, 512, 0, 12_288]);
    MediaGeometry {
        bytes: input.below(70) * zone_bytes + input.choose(&[0, 0, 4096, 512]),
        zone_bytes,
        zone_capacity_bytes: input.choose(&[zone_bytes, zone_bytes / 2, zone_bytes + 512]),
        conventional_zones: input.choose(&[0, 1, 3, 70]),
        block_bytes: input.choose(&[512, 4096, 520]),
    }
}

fn superblock(input: &mut Input<'_>) {
    let superblock = Superblock {
        id: ID,
        geometry: MediaGeometry {
            bytes: input.word(),
            zone_bytes: input.word(),
            zone_capacity_bytes: input.word(),
            conventional_zones: input.word() as u32,
            block_bytes: input.choose(&[512, 4096, 0, 513]),
        },
        data_files: input.choose(&[16, 1, 256, 0, 257]),
        journal_records: input.choose(&[32_768, 1, 0, JOURNAL_RECORDS_MAX, u32::MAX]),
    };
    let mut bytes = superblock.print();
    match Superblock::parse(&bytes) {
        Ok(read) => {
            assert_eq!(read, superblock);
            let last = read.geometry.zone_count() - 1;
            assert!(read.geometry.len_of(last) > 0);
            assert_eq!(read.geometry.zone_at(read.geometry.bytes - 1), last);
        }
        Err(error) => refused(Some(error)),
    }
    let at = input.word() as usize % bytes.len();
    bytes[at] ^= input.byte().max(1);
    assert!(Superblock::parse(&bytes).is_err(), "a changed byte {at} is not noticed");
}

/// A random state, valid or not.
fn word(input: &mut Input<'_>) -> u64 {
    let cond = input.choose(&[1, 4, 0xe, 0, 0xd, 0xf, 2, 3, 5, 0xff]);
    let written = input.choose(&[0, 1, 8, 128, u64::MAX >> 8, 2048]);
    written << 8 | cond
}

/// Tables and the live file with such states.
fn words(input: &mut Input<'_>, geometry: &MediaGeometry) {
    let words: Vec<u64> = (0..geometry.zone_count()).map(|_| word(input)).collect();
    let known: Option<Vec<ZoneRecord>> =
        (0..).zip(&words).map(|(zone, word)| unpack(*word, zone, geometry)).collect();
    for (zone, record) in (0..).zip(known.iter().flatten()) {
        assert_eq!(pack(*record), words[zone as usize]);
        let fits = record.written_sectors << 9 <= geometry.len_of(zone);
        assert!(fits || record.written_sectors == UNREADABLE, "zone {zone}: {record:?}");
    }
    let checkpoint = input.word();
    let table = tables::parse(&tables::print(&ID, checkpoint, false, &words), &ID, geometry);
    match (&known, table) {
        (Some(known), Ok(table)) => {
            assert_eq!((&table.records, table.checkpoint), (known, checkpoint))
        }
        (_, Err(error)) => refused(Some(error)),
        (None, Ok(_)) => panic!("an impossible zone is taken"),
    }
    let share = Share { number: input.below(3) as u32, files: 3 };
    let zones = share.zones(geometry);
    let mut file = live::print_head(&ID, &BOOT, geometry, share);
    file.resize(live::WORDS as usize, input.byte());
    file.extend(zones.clone().flat_map(|zone| words[zone as usize].to_le_bytes()));
    let known: Option<Vec<ZoneRecord>> =
        zones.map(|zone| unpack(words[zone as usize], zone, geometry)).collect();
    let found = live::parse(&file, &ID, &BOOT, geometry, share);
    assert_eq!(known.map(Some), found.ok());
}

/// A journal with occasional errors.
fn records(input: &mut Input<'_>, geometry: &MediaGeometry) {
    let mut bytes = journal::label(&ID).print();
    let mut count = 0;
    let mut whole = true;
    for place in 0..input.below(40) as u32 {
        let record = JournalRecord {
            index: place + u32::from(input.below(16) == 15),
            checkpoint: input.choose(&[7, 7, 7, 7, 7, 7, 6, 8]),
            zone: input.choose(&[0, 1, 2, 3, u32::MAX]),
            durable: input.choose(&[0, 0, 1, place, place + 1]),
            word: word(input),
        };
        whole &= record.index == place && record.checkpoint == 7;
        count += usize::from(whole);
        bytes.extend(record.print());
    }
    if input.below(4) == 0 {
        bytes.truncate(input.word() as usize % (bytes.len() + 1));
        count = count.min(bytes.len().saturating_sub(LABEL_BYTES) / RECORD_BYTES);
    }
    match journal::replay(&bytes, &ID, 7, geometry) {
        Ok(changes) => {
            assert_eq!(changes.len(), count);
            assert!(changes.iter().all(|(zone, _)| *zone < geometry.zone_count()));
        }
        Err(error) => refused(Some(error)),
    }
}

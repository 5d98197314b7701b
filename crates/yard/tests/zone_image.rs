//! Images of zoned devices: between devices in memory, in files and SMR disks; damaged ones.
#![allow(clippy::unwrap_used)] // Test code.

use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::inject::Injection;
use blockyard_core::zone::ZoneCond;
use blockyard_core::{Bio, Disk, Flags, Op, Sector};
use blockyard_testing::temp_dir::TempDir;
use blockyard_yard::zone_image::{MAGIC, ZoneImage, load, save};
use blockyard_yard::{stack, uri};

const NULL: &str = "null:///z?zoned=1&memory_backed=1&size=8M&zone_size=512k\
                    &zone_capacity=384k&zone_nr_conv=2";
const SMR: &str = "smr:///z?size=8M&bs=512&physical_bs=512&zone_size=512k&zone_capacity=384k\
                   &zone_nr_conv=2&zone_max_open=0";
/// Sectors of a zone, and how many of them can be written.
const ZONE: u64 = 1024;
const CAPACITY: u64 = 768;

fn made(uri: &str) -> Arc<dyn Disk> {
    stack::open(&uri::parse(uri).unwrap()).unwrap().disk
}

/// A device with zones in every condition.
fn worked(uri: &str) -> Arc<dyn Disk> {
    let disk = made(uri);
    let mut io = Io::new(disk.open().unwrap(), 1 << 20);
    let mut write = |zone: u64, from: u64, sectors: u64, byte: u8| {
        let bytes = vec![byte; sectors as usize * 512];
        io.write(Sector(zone * ZONE + from), &bytes, Flags::NONE).unwrap();
    };
    write(0, 5, 3, 1);
    for (zone, sectors) in [(2, 8), (3, 700), (6, 9), (8, 100)] {
        write(zone, 0, sectors, zone as u8);
    }
    // Full, with zeros at the end that were written.
    write(5, 0, 600, 5);
    write(5, 600, CAPACITY - 600, 0);
    // Finished, with zeros that were written and zeros that were not.
    write(6, 9, 4, 0);
    let mut run = |zone: u64, op| io.run(Bio::new(op, Sector(zone * ZONE), 0)).map(drop).unwrap();
    run(2, Op::ZoneClose);
    run(4, Op::ZoneOpen);
    run(6, Op::ZoneFinish);
    run(7, Op::ZoneFinish);
    for (name, zone) in [("zone_readonly", 8), ("zone_offline", 9)] {
        let (name, value) = (name.to_owned(), (zone * ZONE).to_string());
        disk.inject(&Injection::Device { name, value }).unwrap();
    }
    disk
}

/// The zones as after power on, and what can be read of them.
fn contents(disk: &dyn Disk) -> Vec<(ZoneCond, Sector, Vec<u8>)> {
    let mut io = Io::new(disk.open().unwrap(), 1 << 20);
    let mut zones = Vec::new();
    disk.report_zones(Sector(0), 64, &mut zones).unwrap();
    let zones = zones.into_iter().map(|zone| {
        let cond = match zone.cond {
            ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen if zone.wp == zone.start => {
                ZoneCond::Empty
            }
            ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen => ZoneCond::Closed,
            cond => cond,
        };
        let mut bytes = vec![0; CAPACITY as usize * 512];
        if cond != ZoneCond::Offline {
            io.read(zone.start, &mut bytes).unwrap();
        }
        (cond, zone.wp, bytes)
    });
    zones.collect()
}

fn image_of(disk: &dyn Disk) -> Vec<u8> {
    let mut image = Vec::new();
    let done = save(disk, &mut image).unwrap();
    assert!(done.bytes < image.len() as u64);
    image
}

fn refused(disk: &dyn Disk, mut image: &[u8], force: bool) -> String {
    load(disk, &mut image, force).unwrap_err().to_string()
}

#[test]
fn an_image_restores_every_condition_and_all_data() {
    let place = TempDir::new(&std::env::temp_dir(), "blockyard-zone-image");
    let backed = format!(
        "{}&backing={}",
        NULL.replace("&memory_backed=1", ""),
        place.path().join("zones").display()
    );
    for uri in [NULL, &backed, SMR] {
        let expected = {
            let disk = worked(uri);
            let image = image_of(&*disk);
            assert!(image.starts_with(MAGIC));
            (contents(&*disk), image)
        };
        let (before, image) = expected;
        let again = made(&uri.replace("/zones", "/again"));
        load(&*again, &mut &image[..], false).unwrap();
        assert!(contents(&*again) == before, "{uri}");
        assert!(image_of(&*again).len() <= image.len());
        // What a device holds is replaced by request only.
        let error = refused(&*again, &image, false);
        assert!(error.contains("holds data; --force"), "{error}");
        load(&*again, &mut &image[..], true).unwrap();
        assert!(contents(&*again) == before, "{uri}, twice");
    }
}

/// The bug: an SMR disk in memory did not know its extents. Its conventional zones were saved, and
/// later read, in full, so that clients waited for seconds while a yard with one was upgraded.
#[test]
fn zeros_at_the_end_of_conventional_zones_take_no_place() {
    for uri in [NULL, SMR] {
        let disk = made(uri);
        let saved = || save(&*disk, &mut Vec::new()).unwrap();
        assert_eq!((saved().zones, saved().bytes), (0, 0), "{uri}");
        let mut io = Io::new(disk.open().unwrap(), 1 << 20);
        io.write(Sector(ZONE), &[0; 4096], Flags::NONE).unwrap();
        io.write(Sector(ZONE + 8), &[1; 4096], Flags::NONE).unwrap();
        io.write(Sector(ZONE + 16), &[0; 4096], Flags::NONE).unwrap();
        assert_eq!((saved().zones, saved().bytes), (1, 8192), "{uri}");
        let extents = [0, ZONE, ZONE + 24].map(|at| disk.extent(Sector(at), ZONE - 24));
        let holes = extents.map(|extent| (extent.sectors, extent.zero));
        assert_eq!(holes, [(ZONE - 24, true), (24, false), (ZONE - 24, true)], "{uri}");
    }
}

/// Zones that were partly written came first, and left no active zone for one that is full.
#[test]
fn an_image_is_loaded_by_a_device_with_as_many_active_zones_as_it_needs() {
    let disk = worked(NULL);
    let exact = made(&NULL.replacen("size=8M", "size=8M&zone_max_active=2", 1));
    load(&*exact, &mut &image_of(&*disk)[..], false).unwrap();
    assert!(contents(&*exact) == contents(&*disk));
}

#[test]
fn an_image_moves_between_kinds_of_devices() {
    let disk = worked(NULL);
    let smr = made(SMR);
    load(&*smr, &mut &image_of(&*disk)[..], false).unwrap();
    let conds = |disk: &dyn Disk| contents(disk).into_iter().map(|it| it.0).collect::<Vec<_>>();
    assert_eq!(conds(&*smr), conds(&*disk));
    let physical = made(&SMR.replace("physical_bs=512", "physical_bs=4k"));
    let error = refused(&*physical, &image_of(&*disk), false);
    assert!(error.starts_with("zone 6 of the image has 9 sectors: expected"), "{error}");
}

#[test]
fn another_geometry_and_too_low_limits_are_refused_by_name() {
    let image = image_of(&*worked(NULL));
    for (from, to, want) in [
        ("size=8M", "size=4M", "the image has size=8388608, the device size=4194304"),
        ("zone_size=512k", "zone_size=1M", "zone_size=524288, the device zone_size=1048576"),
        ("=384k", "=256k", "zone_capacity=393216, the device zone_capacity=262144"),
        ("zone_nr_conv=2", "zone_nr_conv=1", "zone_nr_conv=2, the device zone_nr_conv=1"),
        ("size=8M", "size=8M&bs=4k", "bs=512, the device bs=4096"),
        ("size=8M", "size=8M&zone_max_active=1", "2 partly written zones, which would be"),
    ] {
        let disk = made(&NULL.replacen(from, to, 1));
        let error = refused(&*disk, &image, false);
        assert!(error.contains(want), "{error}");
    }
    let plain = made("null:///p?size=8M&memory_backed=1");
    assert!(refused(&*plain, &image, false).contains("is not a zoned device"));
    assert!(save(&*plain, &mut Vec::new()).is_err());
}

#[test]
fn a_device_with_more_zones_takes_an_image() {
    let disk = worked(NULL);
    let larger = made(&NULL.replace("size=8M", "size=12M"));
    load(&*larger, &mut &image_of(&*disk)[..], false).unwrap();
    let (zones, before) = (contents(&*larger), contents(&*disk));
    assert_eq!((before.len(), zones.len()), (16, 24));
    assert!(zones[..16] == before && zones[16..].iter().all(|zone| zone.0 == ZoneCond::Empty));
    // The last zone of this device is shorter, and would become a whole one.
    let runt = NULL.replace("size=8M", "size=7936k").replace("&zone_capacity=384k", "");
    let larger = made(&runt.replace("size=7936k", "size=12M"));
    let error = refused(&*larger, &image_of(&*made(&runt)), false);
    assert!(error.contains("the image has size=8126464, the device size=12582912"), "{error}");
}

/// A changed byte or an early end anywhere is an error, and leaves nothing on the device.
#[test]
fn damage_anywhere_is_an_error_and_leaves_the_device_empty() {
    let image = image_of(&*worked(NULL));
    let disk = made(NULL);
    let empty = contents(&*disk);
    let near = |at: usize| (0..200).chain((200..at).step_by(9973)).chain(at - 20..at);
    for at in near(image.len()) {
        let mut damaged = image.clone();
        damaged[at] ^= 0x20;
        assert!(!refused(&*disk, &damaged, false).is_empty(), "byte {at}");
        assert!(contents(&*disk) == empty, "byte {at}");
        assert!(!refused(&*disk, &image[..at], false).is_empty(), "end at {at}");
        assert!(contents(&*disk) == empty, "end at {at}");
    }
}

/// A description with a correct checksum.
fn described(line: &str) -> Vec<u8> {
    let line = format!("{line}\n").into_bytes();
    let crc = crc32fast::hash(&line).to_le_bytes();
    [&line[..], &crc].concat()
}

#[test]
fn impossible_descriptions_are_refused_with_the_reason() {
    let whole = "{\"blockyard_zones\":1,\"size_bytes\":8388608,\"block_bytes\":512,\
                 \"zone_bytes\":524288,\"zone_capacity_bytes\":393216,\"conventional\":2,\
                 \"zones\":[ZONES]}";
    for (zones, want) in [
        ("{\"zone\":16,\"cond\":\"full\",\"sectors\":0}", "zone 16 lies beyond the device"),
        ("{\"zone\":4294967295,\"cond\":\"full\",\"sectors\":0}", "lies beyond"),
        ("{\"zone\":3,\"cond\":\"closed\",\"sectors\":769}", "more than it can hold"),
        ("{\"zone\":3,\"cond\":\"empty\",\"sectors\":0}", "is `empty` with 0 sectors, which no"),
        ("{\"zone\":1,\"cond\":\"full\",\"sectors\":0}", "is `full` with 0 sectors, which no"),
        ("{\"zone\":3,\"cond\":\"not-wp\",\"sectors\":0}", "is `not-wp` with 0 sectors, which"),
        ("{\"zone\":3,\"cond\":\"open\",\"sectors\":0}", "is `open` with 0 sectors, which no"),
        ("{\"zone\":3,\"cond\":\"closed\",\"sectors\":0}", "is `closed` with 0 sectors"),
        ("{\"zone\":3,\"cond\":\"closed\",\"sectors\":768}", "is `closed` with 768 sectors"),
        ("{\"zone\":3,\"cond\":\"offline\",\"sectors\":8}", "is `offline` with 8 sectors"),
        (
            "{\"zone\":3,\"cond\":\"full\",\"sectors\":0},\
             {\"zone\":3,\"cond\":\"full\",\"sectors\":0}",
            "zone 3 follows zone 3",
        ),
        ("{\"zone\":3,\"cond\":\"full\",\"sectors\":-1}", "invalid value"),
        ("{\"zone\":3,\"cond\":\"full\",\"sectors\":0,\"wp\":1}", "unknown field `wp`"),
    ] {
        let image = described(&whole.replace("ZONES", zones));
        let error = ZoneImage::read(&mut &image[..], 16).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
    let newer = described(&whole.replace("zones\":1", "zones\":2").replace("ZONES", ""));
    let error = ZoneImage::read(&mut &newer[..], 16).unwrap_err().to_string();
    assert!(error.contains("version 2; this program knows version 1"), "{error}");
    assert!(ZoneImage::read(&mut &described("[]")[..], 16).is_err());
}

/// Regression: the description of an image was read up to 64 MiB, whatever the device.
#[test]
fn a_description_longer_than_the_zones_of_the_device_need_is_not_read() {
    /// The start of a description, and then spaces without an end.
    struct Endless(u64);
    impl std::io::Read for Endless {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let start = blockyard_yard::zone_image::MAGIC;
            for byte in &mut *into {
                *byte = start.get(self.0 as usize).copied().unwrap_or(b' ');
                self.0 += 1;
            }
            Ok(into.len())
        }
    }
    let disk = made(NULL);
    let mut image = Endless(0);
    let error = load(&*disk, &mut image, false).unwrap_err().to_string();
    assert!(error.contains("description has more than 2048 bytes, the most that a device with 16"));
    assert_eq!(image.0, 2048, "no more is read");
}

/// The bug: an intact image of a larger device, with more written zones than the device needs to
/// describe its own, was called damaged.
#[test]
fn an_intact_image_of_a_device_with_more_zones_is_not_called_damaged() {
    let large =
        made("null:///z?zoned=1&memory_backed=1&size=64M&zone_size=512k&zone_capacity=384k");
    let mut io = Io::new(large.open().unwrap(), 4096);
    for zone in 0..128 {
        io.write(Sector(zone * ZONE), &[1; 4096], Flags::NONE).unwrap();
    }
    let mut image = Vec::new();
    save(&*large, &mut image).unwrap();
    let small = made("null:///z?zoned=1&memory_backed=1&size=8M&zone_size=512k&zone_capacity=384k");
    let error = load(&*small, &mut &image[..], true).unwrap_err().to_string();
    let wanted = "the image describes more zones than the device has: 128, the device has 16;";
    assert!(error.starts_with(wanted), "{error}");
    // A description that is too long although its device has no more zones is damaged.
    let end = image.iter().position(|byte| *byte == b'\n').unwrap();
    let line = String::from_utf8(image[..end].to_vec()).unwrap();
    let line = line.replace("\"size_bytes\":67108864,", "\"size_bytes\":8388608,");
    let error = load(&*small, &mut &described(&line)[..], true).unwrap_err().to_string();
    assert!(error.contains("it is damaged: its description has more than 2048 bytes"), "{error}");
}

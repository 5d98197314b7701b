//! A device that is closed and opened again: other limits, other parameters, damaged files.

use std::path::Path;

use blockyard_core::zone::ZoneCond;
use blockyard_core::{Bio, Flags, Op, Sector, Status};
use blockyard_null::{NullConfig, NullError, media_geometry};
use blockyard_testing::temp_dir::TempDir;
use blockyard_zone_media::{Files, MediaError, Options};

use crate::fixture::Fixture;

/// Sectors of a zone, and how many of them can be written.
const ZONE: u64 = 128;
const CAPACITY: u64 = 96;

fn config() -> NullConfig {
    NullConfig {
        size: 1 << 20,
        zoned: true,
        zone_size: ZONE * 512,
        zone_capacity: CAPACITY * 512,
        zone_nr_conv: 1,
        zone_max_open: 4,
        zone_max_active: 6,
        ..NullConfig::default()
    }
}

fn files(path: &Path, config: &NullConfig) -> Result<Files, MediaError> {
    let (geometry, _) = media_geometry(config).unwrap();
    Files::open(path, &Options { journal_records: 64, data_files: 3, ..Options::new(geometry) })
}

fn open(path: &Path, config: &NullConfig) -> Fixture {
    Fixture::open(config, files(path, config).unwrap()).unwrap()
}

fn manage(device: &mut Fixture, op: Op, zone: u64) -> Result<(), Status> {
    device.io.run(Bio::new(op, Sector(zone * ZONE), 0)).map(drop)
}

fn append(device: &mut Fixture, zone: u64, sectors: u64, byte: u8) -> Result<Sector, Status> {
    device.io.append(Sector(zone * ZONE), &vec![byte; sectors as usize * 512])
}

/// Conditions and write pointers, these from the start of their zone.
fn states(device: &Fixture) -> Vec<(ZoneCond, u64)> {
    let zones = device.zones().into_iter();
    zones.map(|zone| (zone.cond, zone.wp.0.wrapping_sub(zone.start.0))).collect()
}

#[test]
fn zones_and_data_survive_restarts_with_changed_limits() {
    let place = TempDir::new(&std::env::temp_dir(), "blockyard-null-limits");
    let path = place.path().join("device");
    let mut device = open(&path, &config());
    device.io.write(Sector(5), &[9; 1024], Flags::NONE).unwrap();
    for zone in 1..=4 {
        append(&mut device, zone, 8, zone as u8).unwrap();
    }
    manage(&mut device, Op::ZoneClose, 1).unwrap();
    manage(&mut device, Op::ZoneOpen, 5).unwrap();
    append(&mut device, 6, CAPACITY, 6).unwrap();
    append(&mut device, 7, 8, 7).unwrap();
    manage(&mut device, Op::ZoneFinish, 7).unwrap();
    append(&mut device, 8, 8, 8).unwrap();
    manage(&mut device, Op::ZoneReset, 8).unwrap();
    drop(device);

    let closed = (ZoneCond::Closed, 8);
    let expected = [
        (ZoneCond::NotWp, ZONE),
        closed,
        closed,
        closed,
        closed,
        // It was open and empty.
        (ZoneCond::Empty, 0),
        (ZoneCond::Full, CAPACITY),
        (ZoneCond::Full, ZONE),
        (ZoneCond::Empty, 0),
    ];
    // Four zones are active, so a lower limit is refused, and the directory stays as it is.
    let low = NullConfig { zone_max_open: 1, zone_max_active: 3, ..config() };
    let refused = Fixture::open(&low, files(&path, &low).unwrap()).err().unwrap();
    assert_eq!(
        refused.to_string(),
        "invalid zone_max_active `3`: expected 0, or at least 4, the partly written zones in the \
         backing"
    );
    assert!(matches!(refused, NullError::Invalid { .. }));

    let tight = NullConfig { zone_max_open: 1, zone_max_active: 4, ..config() };
    let mut device = open(&path, &tight);
    assert_eq!(states(&device)[..9], expected);
    assert_eq!(append(&mut device, 9, 8, 9), Err(Status::ZoneActiveResource));
    append(&mut device, 1, 8, 1).unwrap();
    append(&mut device, 2, 8, 2).unwrap();
    assert_eq!(states(&device)[1..3], [(ZoneCond::Closed, 16), (ZoneCond::ImplicitOpen, 16)]);
    drop(device);

    let wide = NullConfig { zone_max_open: 0, zone_max_active: 0, ..config() };
    let mut device = open(&path, &wide);
    for zone in 8..16 {
        append(&mut device, zone, 8, zone as u8).unwrap();
    }
    assert_eq!(states(&device)[1..3], [(ZoneCond::Closed, 16), (ZoneCond::Closed, 16)]);
    let holds = |device: &mut Fixture, zone: u64, from: u64, sectors: u64, byte: u8| {
        let bytes = device.read(Sector(zone * ZONE + from), sectors);
        assert!(bytes.iter().all(|found| *found == byte), "zone {zone} from {from}");
    };
    for (zone, written) in [(1, 16), (2, 16), (3, 8), (4, 8), (8, 8), (15, 8)] {
        holds(&mut device, zone, 0, written, zone as u8);
        holds(&mut device, zone, written, ZONE - written, 0xff);
    }
    holds(&mut device, 0, 5, 2, 9);
    holds(&mut device, 6, 0, CAPACITY, 6);
    holds(&mut device, 6, CAPACITY, ZONE - CAPACITY, 0xff);
    holds(&mut device, 7, 0, 8, 7);
    holds(&mut device, 7, 8, ZONE - 8, 0);
}

#[test]
fn a_broken_zone_stays_broken() {
    use blockyard_core::inject::Injection;
    let place = TempDir::new(&std::env::temp_dir(), "blockyard-null-broken");
    let mut device = open(place.path(), &config());
    let inject = |device: &Fixture, name: &str, value: &str| {
        let (name, value) = (name.to_owned(), value.to_owned());
        device.disk.inject(&Injection::Device { name, value })
    };
    append(&mut device, 2, 8, 2).unwrap();
    append(&mut device, 3, 8, 3).unwrap();
    inject(&device, "zone_readonly", &format!("{}", 2 * ZONE)).unwrap();
    inject(&device, "zone_offline", &format!("{}", 3 * ZONE)).unwrap();
    let refused = inject(&device, "power_cut", "").unwrap_err().to_string();
    assert!(refused.contains("expected a device in memory"), "{refused}");
    drop(device);
    let mut device = open(place.path(), &config());
    let conds = |device: &Fixture| [states(device)[2].0, states(device)[3].0];
    assert_eq!(conds(&device), [ZoneCond::ReadOnly, ZoneCond::Offline]);
    assert!(device.read(Sector(2 * ZONE), 8).iter().all(|byte| *byte == 2));
    assert_eq!(append(&mut device, 2, 8, 2), Err(Status::IoErr));
    assert_eq!(device.io.read(Sector(3 * ZONE), &mut [0; 512]), Err(Status::IoErr));
    for (name, zone) in [("zone_readonly", 2), ("zone_offline", 3)] {
        inject(&device, name, &format!("-{}", zone * ZONE)).unwrap();
    }
    assert_eq!(conds(&device), [ZoneCond::Empty; 2]);
    assert!(device.read(Sector(2 * ZONE), 8).iter().all(|byte| *byte == 0xff));
}

/// A write that hits a bad block moves the write pointer to the block, if partial I/O is on.
#[test]
fn bad_blocks_cut_writes_short() {
    let place = TempDir::new(&std::env::temp_dir(), "blockyard-null-bad");
    let bad = NullConfig {
        badblocks: format!("+{0}-{0}", 2 * ZONE + 5),
        badblocks_partial_io: true,
        ..config()
    };
    let mut device = open(place.path(), &bad);
    assert_eq!(append(&mut device, 2, 8, 2), Err(Status::IoErr));
    assert_eq!(states(&device)[2], (ZoneCond::ImplicitOpen, 5));
    drop(device);
    let mut device = open(place.path(), &config());
    assert_eq!(states(&device)[2], (ZoneCond::Closed, 5));
    assert!(device.read(Sector(2 * ZONE), 5).iter().all(|byte| *byte == 2));
}

/// The files of a device whose process was killed, to be damaged.
struct Remains {
    place: TempDir,
    names: Vec<String>,
    /// The zones' states at the kill, as they are found without damage.
    killed: Vec<(ZoneCond, u64)>,
}

impl Remains {
    fn new(name: &str) -> Remains {
        let place = TempDir::new(&std::env::temp_dir(), &format!("blockyard-null-{name}"));
        let path = place.path().join("device");
        let mut device = open(&path, &config());
        for zone in 1..=6 {
            append(&mut device, zone, 8 * zone, zone as u8).unwrap();
            device.io.run(Bio::flush()).unwrap();
        }
        manage(&mut device, Op::ZoneFinish, 6).unwrap();
        let settled = |(cond, wp)| match cond {
            ZoneCond::ImplicitOpen => (ZoneCond::Closed, wp),
            cond => (cond, wp),
        };
        let killed = states(&device).into_iter().map(settled).collect();
        // The copies of files of an open device are what a kill leaves.
        let left = place.path().join("left");
        std::fs::create_dir(&left).unwrap();
        let entries = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name());
        let names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
        for name in &names {
            std::fs::copy(path.join(name), left.join(name)).unwrap();
        }
        Remains { place, names, killed }
    }

    /// A fresh copy; `reboot` leaves out the files that are valid until the kernel ends.
    fn restore(&self, reboot: bool) -> std::path::PathBuf {
        let copy = self.place.path().join("copy");
        _ = std::fs::remove_dir_all(&copy);
        std::fs::create_dir(&copy).unwrap();
        for name in self.names.iter().filter(|name| !(reboot && name.starts_with("live"))) {
            std::fs::copy(self.place.path().join("left").join(name), copy.join(name)).unwrap();
        }
        copy
    }
}

/// Changes bytes in every region of the files that have checksums. The directory is refused with a
/// text that names the file, or each zone is found as it was at the kill or, after a power cut, at
/// a flush.
#[test]
fn damaged_files_are_refused_or_hold_nothing_new() {
    let remains = Remains::new("damage");
    let is_checked = |name: &&String| !["lock", "data", "live"].contains(&&name[..4]);
    let mut refused = 0;
    for (name, reboot) in
        remains.names.iter().filter(is_checked).flat_map(|name| [(name, false), (name, true)])
    {
        let len = remains.restore(reboot).join(name).metadata().unwrap().len() as usize;
        for at in (0..len.min(256)).step_by(3).chain((256..len).step_by((len / 32).max(1))) {
            let copy = remains.restore(reboot);
            let mut bytes = std::fs::read(copy.join(name)).unwrap();
            bytes[at] ^= 0x5a;
            std::fs::write(copy.join(name), &bytes).unwrap();
            let files = match files(&copy, &config()) {
                Ok(files) => files,
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().contains(&format!("`{name}`")), "{at}: {error}");
                    continue;
                }
            };
            let found = states(&Fixture::open(&config(), files).unwrap());
            if !reboot {
                assert_eq!(found, remains.killed, "{name} {at}");
                continue;
            }
            for (zone, found) in (1..=6).zip(&found[1..]) {
                let flushed = (ZoneCond::Closed, 8 * zone);
                let may_be = [(ZoneCond::Empty, 0), flushed];
                assert!(may_be.contains(found), "{name} {at}: zone {zone}: {found:?}");
            }
        }
    }
    assert!(refused > 100, "{refused} changes were refused");
}

/// The words of zones that count until the kernel ends have no checksum: a writer changes them one
/// by one. An impossible one is refused, and a damaged head makes the flushed states count.
#[test]
fn damaged_words_of_zones_are_refused_or_are_states_of_zones() {
    let remains = Remains::new("words");
    let mut refused = 0;
    for name in remains.names.iter().filter(|name| name.starts_with("live")) {
        let len = remains.restore(false).join(name).metadata().unwrap().len() as usize;
        for (at, bit) in (0..64).chain(4096..len).flat_map(|at| [(at, 1), (at, 0x80)]) {
            let copy = remains.restore(false);
            let mut bytes = std::fs::read(copy.join(name)).unwrap();
            bytes[at] ^= bit;
            std::fs::write(copy.join(name), &bytes).unwrap();
            let opened = files(&copy, &config()).map_err(|error| error.to_string());
            let opened = opened.and_then(|files| {
                Fixture::open(&config(), files).map_err(|error| error.to_string())
            });
            match opened {
                Err(error) => {
                    refused += 1;
                    assert!(error.contains("zone"), "{name} {at}: {error}");
                }
                Ok(mut device) => {
                    let zones = device.zones().into_iter();
                    for zone in zones.filter(|zone| zone.cond != ZoneCond::Offline) {
                        device.read(zone.start, ZONE);
                    }
                }
            }
        }
    }
    assert!(refused > 100, "{refused} changes were refused");
}

/// A file of another device of the same geometry, or of the same device under another name.
#[test]
fn an_exchanged_file_is_refused_by_name() {
    let (remains, other) = (Remains::new("exchanged"), Remains::new("exchanged-other"));
    let has_identity = |name: &&String| !["lock", "superblock"].contains(&&name[..]);
    let refusal = |copy: &Path| files(copy, &config()).unwrap_err().to_string();
    for name in remains.names.iter().filter(has_identity) {
        let copy = remains.restore(false);
        std::fs::copy(other.place.path().join("left").join(name), copy.join(name)).unwrap();
        let error = refusal(&copy);
        let expected = format!("`{name}` belongs to another disk: expected ");
        assert!(error.starts_with(&expected) && error.contains(", found "), "{error}");
    }
    for (name, number) in [("data.01", 2), ("data.02", 1), ("live.01", 2)] {
        let copy = remains.restore(false);
        let from = format!("{}.{number:02x}", &name[..4]);
        std::fs::copy(remains.place.path().join("left").join(&from), copy.join(name)).unwrap();
        let (error, want) = (refusal(&copy), 3 - number);
        let expected =
            format!("`{name}` is another file of the disk: expected number {want}, found {number}");
        assert_eq!(error, expected);
    }
    // The refused copies were not changed: with the file of the device it opens.
    let copy = remains.restore(false);
    let own = std::fs::read(copy.join("data.01")).unwrap();
    std::fs::copy(other.place.path().join("left/data.01"), copy.join("data.01")).unwrap();
    refusal(&copy);
    std::fs::write(copy.join("data.01"), own).unwrap();
    assert_eq!(states(&open(&copy, &config())), remains.killed);
}

#[test]
fn a_missing_or_short_file_is_refused_by_name() {
    let remains = Remains::new("lengths");
    for name in remains.names.iter().filter(|name| *name != "lock" && !name.starts_with("live")) {
        for len in [None, Some(0), Some(100)] {
            let file = remains.restore(true).join(name);
            match len {
                None => std::fs::remove_file(&file).unwrap(),
                Some(len) => {
                    std::fs::File::options().write(true).open(&file).unwrap().set_len(len).unwrap();
                }
            }
            let error = files(file.parent().unwrap(), &config()).unwrap_err().to_string();
            assert!(error.contains(name), "{name} {len:?}: {error}");
        }
    }
}

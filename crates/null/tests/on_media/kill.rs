//! Kills a process with `kill -9` while its threads append, finish and reset zones of a device in
//! files, many times on one directory. Nothing that the process had reported as completed may be
//! missing, and no write pointer may be ahead of its data. In another test all threads append to
//! one zone.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use blockyard_core::blocking::Io;
use blockyard_core::channel::ChannelConfig;
use blockyard_core::composed::Composed;
use blockyard_core::zone::{ZoneCond, ZoneInfo};
use blockyard_core::{Bio, Device, Disk, Op, Sector};
use blockyard_null::{NullConfig, NullOnMedia, media_geometry};
use blockyard_testing::temp_dir::TempDir;
use blockyard_zone_media::{Files, MediaError, Options};

/// Environment variable with the directory of the victim process.
const DIRECTORY: &str = "BLOCKYARD_NULL_KILL_DIRECTORY";
/// Environment variable with the number of the round.
const ROUND: &str = "BLOCKYARD_NULL_KILL_ROUND";

/// Sectors of a zone, and how many of them can be written.
const ZONE: u64 = 512;
const CAPACITY: u64 = 384;
/// Sectors of an append.
const APPEND: u64 = 8;
const THREADS: u64 = 4;
/// Zones of each thread.
const ZONES_EACH: u64 = 3;

/// The device of a round: the limits change, the geometry does not.
fn config(round: u64) -> NullConfig {
    NullConfig {
        size: 64 << 20,
        zoned: true,
        zone_size: ZONE * 512,
        zone_capacity: CAPACITY * 512,
        zone_max_open: THREADS as u32 + round as u32 % 3,
        zone_max_active: (THREADS * ZONES_EACH) as u32 + round as u32 % 2,
        ..NullConfig::default()
    }
}

fn open(directory: &Path, round: u64) -> Result<Arc<NullOnMedia<Files>>, MediaError> {
    let config = config(round);
    let (geometry, _) = media_geometry(&config).unwrap();
    let options = Options { journal_records: 64, ..Options::new(geometry) };
    let files = Files::open(directory, &options)?;
    Ok(Arc::new(NullOnMedia::open_on(&config, files).unwrap()))
}

/// The contents of a sector: its place in the zone, and how often the zone was reset in this test.
fn sector(zone: u64, number: u64, generation: u64) -> Vec<u8> {
    (zone << 48 | number << 32 | generation).to_le_bytes().repeat(64)
}

/// What a killed process reported about a zone: generation, written sectors, and whether it was
/// finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Said {
    generation: u64,
    sectors: u64,
    finished: bool,
}

/// The victim process: works until it is killed.
#[test]
fn victim() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let round: u64 = std::env::var(ROUND).unwrap().parse().unwrap();
    let null = open(Path::new(&directory), round).unwrap();
    let disk: Arc<dyn Disk> =
        Arc::new(Composed::new("z".to_owned(), "null", null, ChannelConfig::default()));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let disk = Arc::clone(&disk);
            scope.spawn(move || {
                let mut io = Io::new(disk.open().unwrap(), 1 << 20);
                for lap in 1.. {
                    for zone in thread * ZONES_EACH..(thread + 1) * ZONES_EACH {
                        fill(&mut io, zone, round << 16 | lap);
                    }
                }
            });
        }
    });
}

/// One write of a whole line, which no other thread's line can cut.
fn say(verb: &str, zone: u64, generation: u64, sectors: u64) {
    let line = format!("\n{verb} {zone} {generation} {sectors}\n");
    std::io::stdout().write_all(line.as_bytes()).unwrap();
}

/// Resets a zone and appends to it; finishes every other one before it is full.
fn fill(io: &mut Io, zone: u64, generation: u64) {
    let start = Sector(zone * ZONE);
    io.run(Bio::new(Op::ZoneReset, start, 0)).unwrap();
    say("reset", zone, generation, 0);
    let end = if generation.is_multiple_of(2) { CAPACITY } else { CAPACITY / 2 };
    for number in (0..end).step_by(APPEND as usize) {
        let sectors = (number..number + APPEND).flat_map(|at| sector(zone, at, generation));
        let landed = io.append(start, &sectors.collect::<Vec<_>>()).unwrap();
        assert_eq!(landed, start + number);
        say("wrote", zone, generation, number + APPEND);
        if number % 64 == 56 && zone.is_multiple_of(2) {
            io.run(Bio::flush()).unwrap();
        }
    }
    if end < CAPACITY {
        io.run(Bio::new(Op::ZoneFinish, start, 0)).unwrap();
        say("finished", zone, generation, end);
    }
}

/// Starts a victim, and kills it after `count` reports. Returns verbs and numbers of all reports.
fn kill_after(victim: &str, directory: &Path, round: u64, count: usize) -> Vec<(String, [u64; 3])> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", victim, "--nocapture", "--test-threads=1"]);
    command.env(DIRECTORY, directory).env(ROUND, round.to_string()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut reports = Vec::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Option<Vec<u64>> = words[1..].iter().map(|word| word.parse().ok()).collect();
        // Ignore an incomplete line and the output of the test harness.
        let Some(Ok(numbers)) = numbers.map(<[u64; 3]>::try_from) else { continue };
        reports.push((words[0].to_owned(), numbers));
        if reports.len() == count {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(reports.len() >= count, "the victim has died of something else");
    reports
}

/// The last report of each zone.
fn last_of_zones(reports: Vec<(String, [u64; 3])>) -> HashMap<u64, Said> {
    let said = reports.into_iter().map(|(verb, [zone, generation, sectors])| {
        (zone, Said { generation, sectors, finished: verb == "finished" })
    });
    said.collect()
}

/// The zones that a killed process may have reset without a report: of each thread at most one, its
/// first zone or the one after the last zone that it reported as full or finished.
fn unreported_resets(reports: &[(String, [u64; 3])]) -> Vec<u64> {
    let of_thread = |thread: u64| {
        let first = thread * ZONES_EACH;
        let is_own = |zone: u64| (first..first + ZONES_EACH).contains(&zone);
        match reports.iter().rfind(|(_, [zone, ..])| is_own(*zone)) {
            None => Some(first),
            Some((verb, [zone, _, sectors])) => {
                let is_whole = verb == "finished" || *sectors == CAPACITY;
                is_whole.then_some(first + (zone - first + 1) % ZONES_EACH)
            }
        }
    };
    (0..THREADS).filter_map(of_thread).collect()
}

/// What is in a zone; checks that all of its sectors agree.
fn found(io: &mut Io, zone: &ZoneInfo) -> Said {
    let number = zone.start.0 / ZONE;
    let mut bytes = vec![0; ZONE as usize * 512];
    io.read(zone.start, &mut bytes).unwrap();
    let wp = zone.wp - zone.start;
    let finished = wp == ZONE;
    let blank = if finished { 0 } else { 0xff };
    let is_written = |bytes: &[u8]| bytes.iter().any(|byte| *byte != blank);
    let sectors = match finished {
        true => bytes.chunks(512).take_while(|bytes| is_written(bytes)).count() as u64,
        false => wp,
    };
    let generation = match sectors {
        0 => 0,
        _ => u64::from(u32::from_le_bytes(bytes[..4].try_into().unwrap())),
    };
    for (at, chunk) in (0..).zip(bytes.chunks(512)) {
        match at < sectors {
            true => assert!(chunk == sector(number, at, generation), "{zone:?}: sector {at}"),
            false => assert!(!is_written(chunk), "{zone:?}: something is left at {at}"),
        }
    }
    Said { generation, sectors, finished }
}

/// Rounds of the test.
fn rounds() -> u64 {
    std::env::var("BLOCKYARD_CRASH_ROUNDS").map_or(12, |text| text.parse().unwrap())
}

#[test]
fn kills_lose_nothing_that_was_completed() {
    let place = TempDir::new(&std::env::temp_dir(), "blockyard-null-kill");
    let path = place.path().join("device");
    let mut before = HashMap::new();
    for round in 1..=rounds() {
        let count = fastrand::usize(1..if round % 4 == 0 { 3000 } else { 300 });
        let reports = kill_after("kill::victim", &path, round, count);
        let resets = unreported_resets(&reports);
        let said = last_of_zones(reports);
        let null = open(&path, round + 1).unwrap();
        let mut zones = Vec::new();
        null.report_zones(Sector(0), usize::MAX, &mut zones).unwrap();
        let disk = Composed::new("z".to_owned(), "null", null, ChannelConfig::default());
        let mut io = Io::new(disk.open().unwrap(), 1 << 20);
        for (number, zone) in (0..).zip(&zones) {
            let is_open = matches!(zone.cond, ZoneCond::ImplicitOpen | ZoneCond::ExplicitOpen);
            assert!(!is_open, "{zone:?} in round {round}");
            let found = found(&mut io, zone);
            let least = said.get(&number).or_else(|| before.get(&number)).copied();
            let least = least.unwrap_or_default();
            let may_be_empty = least.sectors == 0 || resets.contains(&number);
            assert!(
                found >= least || (found == Said::default() && may_be_empty),
                "zone {number}, round {round}: {found:?} {least:?}"
            );
            before.insert(number, found);
        }
    }
}

/// Sectors of a zone to which all threads append, and how many of them can be written: more than an
/// appending victim writes before it is killed.
const SHARED_ZONE: u64 = 32_768;
const SHARED_CAPACITY: u64 = 24_576;
/// Zones of the device with shared zones; each round has another one.
const SHARED_ZONES: u64 = 4;

fn open_shared(directory: &Path) -> Arc<NullOnMedia<Files>> {
    let config = NullConfig {
        size: SHARED_ZONES * SHARED_ZONE * 512,
        zoned: true,
        zone_size: SHARED_ZONE * 512,
        zone_capacity: SHARED_CAPACITY * 512,
        ..NullConfig::default()
    };
    let (geometry, _) = media_geometry(&config).unwrap();
    let options = Options { journal_records: 64, ..Options::new(geometry) };
    let files = Files::open(directory, &options).unwrap();
    Arc::new(NullOnMedia::open_on(&config, files).unwrap())
}

fn shared_disk(directory: &Path) -> Arc<dyn Disk> {
    let null = open_shared(directory);
    Arc::new(Composed::new("z".to_owned(), "null", null, ChannelConfig::default()))
}

/// An append to a shared zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Append {
    round: u64,
    thread: u64,
    serial: u64,
    sectors: u64,
}

impl Append {
    fn drawn(round: u64, thread: u64, serial: u64) -> Append {
        Append { round, thread, serial, sectors: 8 * (1 + (serial + thread) % 3) }
    }

    /// The contents of one of its sectors.
    fn sector(self, number: u64) -> Vec<u8> {
        let Append { round, thread, serial, .. } = self;
        (round << 48 | thread << 40 | serial << 8 | number).to_le_bytes().repeat(64)
    }

    /// The append whose first sector has these contents.
    fn of(sector: &[u8]) -> Append {
        let word = u64::from_le_bytes(sector[..8].try_into().unwrap());
        Append::drawn(word >> 48, word >> 40 & 0xff, word >> 8 & 0xffff_ffff)
    }
}

/// The victim process whose threads append to one zone until it is killed.
#[test]
fn appending_victim() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let round: u64 = std::env::var(ROUND).unwrap().parse().unwrap();
    let disk = shared_disk(Path::new(&directory));
    let start = Sector(round % SHARED_ZONES * SHARED_ZONE);
    Io::new(disk.open().unwrap(), 4096).run(Bio::new(Op::ZoneReset, start, 0)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let disk = Arc::clone(&disk);
            scope.spawn(move || {
                let mut io = Io::new(disk.open().unwrap(), 1 << 20);
                for serial in 0.. {
                    let append = Append::drawn(round, thread, serial);
                    let bytes: Vec<u8> =
                        (0..append.sectors).flat_map(|number| append.sector(number)).collect();
                    let landed = io.append(start, &bytes).unwrap();
                    say("appended", thread, serial, landed - start);
                    if serial % 8 == 7 {
                        io.run(Bio::flush()).unwrap();
                        say("flushed", thread, serial, 0);
                    }
                }
            });
        }
    });
}

/// Threads append to one zone at the same time, 50 times. Every append that was reported is where
/// it was reported, whole; none overlaps another one, and those of a thread are in their order.
#[test]
fn kills_lose_and_overlap_no_append_of_several_threads_to_one_zone() {
    const ROUNDS: u64 = 50;
    let place = TempDir::new(&std::env::temp_dir(), "blockyard-null-kill-shared");
    let path = place.path().join("device");
    let (mut ends, mut flushes) = (HashMap::new(), 0);
    for round in 1..=ROUNDS {
        let count = fastrand::usize(1..400);
        let reports = kill_after("kill::appending_victim", &path, round, count);
        let disk = shared_disk(&path);
        let mut zones = Vec::new();
        disk.report_zones(Sector(0), usize::MAX, &mut zones).unwrap();
        let number = round % SHARED_ZONES;
        let zone = &zones[number as usize];
        let written = zone.wp - zone.start;
        let mut bytes = vec![0; written as usize * 512];
        let mut io = Io::new(disk.open().unwrap(), 1 << 20);
        for (part, at) in bytes.chunks_mut(1 << 20).zip((0..).step_by(2048)) {
            io.read(zone.start + at, part).unwrap();
        }
        let sector = |at: u64| &bytes[at as usize * 512..][..512];
        let (mut at, mut next, mut found) = (0, [0; THREADS as usize], HashMap::new());
        while at < written {
            let append = Append::of(sector(at));
            assert_eq!(append.round, round, "sector {at}: {append:?}");
            assert!(at + append.sectors <= written, "sector {at}: {append:?} is cut");
            for number in 0..append.sectors {
                let is_own = sector(at + number) == append.sector(number);
                assert!(is_own, "round {round}: sector {number} of {append:?} at {at}");
            }
            let next = &mut next[append.thread as usize];
            assert_eq!(append.serial, *next, "sector {at}: {append:?} is missing or there twice");
            *next += 1;
            found.insert((append.thread, append.serial), at);
            at += append.sectors;
        }
        for (verb, [thread, serial, reported]) in reports {
            match verb.as_str() {
                "appended" => {
                    let landed = found.get(&(thread, serial));
                    assert_eq!(landed, Some(&reported), "thread {thread}, append {serial}");
                }
                _ => {
                    flushes += 1;
                    assert!(serial < next[thread as usize], "it was flushed");
                }
            }
        }
        ends.insert(number, written);
        for (zone, written) in &ends {
            let zone = &zones[*zone as usize];
            assert_eq!(zone.wp - zone.start, *written, "round {round}: {zone:?}");
        }
    }
    assert!(flushes > 0, "the victims have flushed");
}

#[test]
fn two_processes_do_not_share_a_device() {
    let place = TempDir::new(&std::env::temp_dir(), "blockyard-null-shared");
    let _null = open(place.path(), 0).unwrap();
    let refused = open(place.path(), 0).unwrap_err();
    assert!(matches!(refused, MediaError::InUse { .. }), "{refused}");
}

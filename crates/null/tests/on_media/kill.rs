//! Kills a process with `kill -9` while its threads append, finish and reset zones of a device in
//! files, many times on one directory. Nothing that the process had reported as completed may be
//! missing, and no write pointer may be ahead of its data.

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

/// Starts the victim, kills it after `count` reports, and collects the reports.
fn kill_after(directory: &Path, round: u64, count: usize) -> HashMap<u64, Said> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "kill::victim", "--nocapture", "--test-threads=1"]);
    command.env(DIRECTORY, directory).env(ROUND, round.to_string()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (mut said, mut lines) = (HashMap::<u64, Said>::new(), 0);
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Option<Vec<u64>> = words[1..].iter().map(|word| word.parse().ok()).collect();
        // Ignore an incomplete line and the output of the test harness.
        let Some([zone, generation, sectors]) = numbers.as_deref() else { continue };
        let finished = words[0] == "finished";
        said.insert(*zone, Said { generation: *generation, sectors: *sectors, finished });
        lines += 1;
        if lines == count {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(lines >= count, "the victim has died of something else");
    said
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
        let said = kill_after(&path, round, count);
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
            // Empty, or reset again by an operation that was not reported.
            let was_whole = least.finished || least.sectors == CAPACITY || least.sectors == 0;
            let is_reset = found == Said::default() && (was_whole || !said.contains_key(&number));
            assert!(
                found >= least || is_reset,
                "zone {number}, round {round}: {found:?} {least:?}"
            );
            before.insert(number, found);
        }
    }
}

#[test]
fn two_processes_do_not_share_a_device() {
    let place = TempDir::new(&std::env::temp_dir(), "blockyard-null-shared");
    let _null = open(place.path(), 0).unwrap();
    let refused = open(place.path(), 0).unwrap_err();
    assert!(matches!(refused, MediaError::InUse { .. }), "{refused}");
}

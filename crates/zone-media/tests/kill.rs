//! Kills a process with `kill -9` while it writes, and checks the contents of its disk.
//!
//! The test starts itself as the victim process: its threads write zone by zone and report
//! completed operations on standard output. None of these may be missing afterwards. With a
//! volatile cache, no flushed data may be missing, and data that were never flushed are gone.
#![allow(clippy::unwrap_used)] // Test code.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use blockyard_core::zone::ZoneCond;
use blockyard_zone_media::{
    CacheMode, Files, Media, MediaError, MediaGeometry, Options, ZoneRecord,
};

/// Environment variable with the directory of the victim process.
const DIRECTORY: &str = "BLOCKYARD_ZONE_MEDIA_KILL_DIRECTORY";
/// Set if the victim uses a volatile cache.
const VOLATILE: &str = "BLOCKYARD_ZONE_MEDIA_KILL_VOLATILE";
/// Set if the victim never flushes.
const UNFLUSHED: &str = "BLOCKYARD_ZONE_MEDIA_KILL_UNFLUSHED";

const BLOCK: u64 = 4096;
const ZONE: u64 = 1 << 20;
const CONVENTIONAL: u32 = 2;
const THREADS: u32 = 4;
/// Zones that each thread writes, repeatedly.
const ZONES_EACH: u32 = 3;

fn options(cache: CacheMode) -> Options {
    let geometry = MediaGeometry {
        // A disk far larger than any file system on which the test runs.
        bytes: 14 << 40,
        zone_bytes: 1 << 30,
        zone_capacity_bytes: ZONE,
        conventional_zones: CONVENTIONAL,
        block_bytes: 4096,
    };
    Options { cache, journal_records: 64, ..Options::new(geometry) }
}

/// The contents of a block: its position and its zone's erasure count.
fn block(zone: u32, number: u64, erasures: u64) -> Vec<u8> {
    let word = u64::from(zone) << 48 | number << 32 | erasures;
    word.to_le_bytes().repeat(BLOCK as usize / 8)
}

fn record(blocks: u64, erasures: u64) -> ZoneRecord {
    let cond = match blocks {
        0 => ZoneCond::Empty,
        _ if blocks == ZONE / BLOCK => ZoneCond::Full,
        _ => ZoneCond::ImplicitOpen,
    };
    ZoneRecord { cond, written_sectors: blocks * BLOCK / 512, erasures }
}

/// What a killed process reported about a zone.
#[derive(Clone, Copy, Debug, Default)]
struct Said {
    erasures: u64,
    blocks: u64,
    flushed: Option<(u64, u64)>,
}

/// The victim process: writes until it is killed.
#[test]
fn victim() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let volatile = std::env::var_os(VOLATILE).is_some();
    let cache = match volatile {
        true => CacheMode::Volatile { bytes: 1 << 20 },
        false => CacheMode::Through,
    };
    let files = Files::open(Path::new(&directory), &options(cache)).unwrap();
    let flushes = std::env::var_os(UNFLUSHED).is_none();
    let say = |text: String| std::io::stdout().write_all(text.as_bytes()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (files, say) = (&files, &say);
            scope.spawn(move || {
                for erasures in 1.. {
                    for zone in (0..ZONES_EACH).map(|at| CONVENTIONAL + thread * ZONES_EACH + at) {
                        write_zone(files, zone, erasures, flushes, say);
                    }
                }
            });
        }
    });
}

/// Resets a zone and fills it. With `flushes`, zones with odd numbers are flushed from time to
/// time.
fn write_zone(files: &Files, zone: u32, erasures: u64, flushes: bool, say: &impl Fn(String)) {
    files.reset(zone, record(0, erasures)).unwrap();
    say(format!("\nreset {zone} {erasures} 0\n"));
    let start = u64::from(zone) * (1 << 30);
    for number in 0..ZONE / BLOCK {
        files.write(start + number * BLOCK, &block(zone, number, erasures)).unwrap();
        files.zone_changed(zone, record(number + 1, erasures)).unwrap();
        say(format!("\nwrote {zone} {erasures} {}\n", number + 1));
        if flushes && zone % 2 == 1 && number % 16 == 15 {
            match number % 64 == 63 {
                true => files.flush().unwrap(),
                false => files.flush_range(start, BLOCK).unwrap(),
            }
            say(format!("\nflushed {zone} {erasures} {}\n", number + 1));
        }
    }
}

fn start(directory: &Path, settings: &[&str]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "victim", "--nocapture", "--test-threads=1"]);
    command.env(DIRECTORY, directory).stdout(Stdio::piped());
    command.envs(settings.iter().map(|setting| (setting, "1")));
    command.spawn().unwrap()
}

/// Starts the victim, kills it after `count` reports, and collects the reports.
fn kill_after(directory: &Path, settings: &[&str], count: usize) -> HashMap<u32, Said> {
    let mut child = start(directory, settings);
    let mut said: HashMap<u32, Said> = HashMap::new();
    let mut lines = 0;
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Option<Vec<u64>> = words[1..].iter().map(|word| word.parse().ok()).collect();
        // Ignore an incomplete line and the output of the test harness.
        let (verb, Some([zone, erasures, blocks])) = (words[0], numbers.as_deref()) else {
            continue;
        };
        let said = said.entry(*zone as u32).or_default();
        match verb {
            "reset" | "wrote" => (said.erasures, said.blocks) = (*erasures, *blocks),
            "flushed" => said.flushed = Some((*erasures, *blocks)),
            _ => continue,
        }
        lines += 1;
        if lines == count {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(lines >= count, "the victim has died of something else");
    said
}

/// The erasure count in the first blocks of a zone; checks that all blocks agree.
fn erasures_of(files: &Files, zone: u32, blocks: u64) -> u64 {
    let start = u64::from(zone) * (1 << 30);
    let mut bytes = vec![0; (blocks * BLOCK) as usize];
    files.read(start, &mut bytes).unwrap();
    let erasures = u64::from(u32::from_le_bytes(bytes[..4].try_into().unwrap()));
    for (number, found) in (0..).zip(bytes.chunks(BLOCK as usize)) {
        assert!(found == block(zone, number, erasures), "block {number} of zone {zone}");
    }
    let mut above = vec![1; BLOCK as usize];
    if blocks < ZONE / BLOCK {
        files.read(start + blocks * BLOCK, &mut above).unwrap();
        assert!(above.iter().all(|byte| *byte == 0), "zone {zone} has something above its end");
    }
    erasures
}

/// A temporary directory, removed on drop.
struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("blockyard-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_kill_loses_nothing_that_was_completed() {
    let scratch = Scratch::new("kill-through");
    for count in [1, 7, 300, 2000, 5000] {
        let said = kill_after(&scratch.0, &[], count);
        let files = Files::open(&scratch.0, &options(CacheMode::Through)).unwrap();
        let zones = files.zones();
        for (zone, said) in said {
            let blocks = zones[zone as usize].written_sectors * 512 / BLOCK;
            if blocks == 0 {
                // Empty, or reset again by an operation that was not reported.
                assert!(said.blocks == 0 || said.blocks == ZONE / BLOCK, "zone {zone}: {said:?}");
                continue;
            }
            let found = (erasures_of(&files, zone, blocks), blocks);
            assert!(found >= (said.erasures, said.blocks), "zone {zone}: {found:?}, {said:?}");
        }
    }
}

#[test]
fn a_kill_with_a_volatile_cache_loses_nothing_that_was_flushed() {
    let scratch = Scratch::new("kill-volatile");
    for count in [1, 300, 3000, 5000] {
        let said = kill_after(&scratch.0, &[VOLATILE], count);
        let cache = CacheMode::Volatile { bytes: 1 << 20 };
        let files = Files::open(&scratch.0, &options(cache)).unwrap();
        let zones = files.zones();
        for (zone, said) in said {
            let blocks = zones[zone as usize].written_sectors * 512 / BLOCK;
            // A flush of all zones by another thread may have covered any zone.
            let found = match blocks {
                0 => None,
                _ => Some((erasures_of(&files, zone, blocks), blocks)),
            };
            let flushed = said.flushed.filter(|(erasures, _)| *erasures == said.erasures);
            let emptied = said.blocks == ZONE / BLOCK;
            assert!(
                found >= flushed || (found.is_none() && emptied),
                "zone {zone}: {found:?}, {said:?}"
            );
        }
    }
}

/// Unflushed data are lost, so the kill tests do exercise a volatile cache.
#[test]
fn a_kill_with_a_volatile_cache_loses_what_was_never_flushed() {
    let scratch = Scratch::new("kill-unflushed");
    for count in [1, 3000] {
        kill_after(&scratch.0, &[VOLATILE, UNFLUSHED], count);
        let cache = CacheMode::Volatile { bytes: 1 << 20 };
        let files = Files::open(&scratch.0, &options(cache)).unwrap();
        let zones = files.zones();
        for zone in CONVENTIONAL..CONVENTIONAL + THREADS * ZONES_EACH {
            assert_eq!(zones[zone as usize].cond, ZoneCond::Empty, "zone {zone}");
            let mut bytes = vec![1; ZONE as usize];
            files.read(u64::from(zone) * (1 << 30), &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0), "zone {zone} has data");
        }
    }
}

#[test]
fn two_processes_do_not_share_a_disk() {
    let scratch = Scratch::new("kill-shared");
    let mut child = start(&scratch.0, &[]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.find(|line| line.as_ref().unwrap().starts_with("reset")).unwrap().unwrap();
    let refused = Files::open(&scratch.0, &options(CacheMode::Through)).unwrap_err();
    assert!(matches!(refused, MediaError::InUse { .. }), "{refused}");
    assert!(refused.to_string().ends_with("stop it, or give another backing"), "{refused}");
    child.kill().unwrap();
    child.wait().unwrap();
    Files::open(&scratch.0, &options(CacheMode::Through)).unwrap();
}

#[test]
fn clean_close_is_recognised_and_takes_little_space() {
    use std::os::unix::fs::MetadataExt;
    let scratch = Scratch::new("kill-closed");
    let mut options = options(CacheMode::Volatile { bytes: 1 << 20 });
    let files = Files::open(&scratch.0, &options).unwrap();
    write_zone(&files, 5, 1, true, &|_| {});
    files.write(BLOCK, &[9; 512]).unwrap();
    files.close().unwrap();
    let used = std::fs::read_dir(&scratch.0).unwrap();
    let used: u64 = used.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum();
    assert!(used < 8 << 20, "14 TB take {used} bytes");
    assert!(!scratch.0.join("live.00").exists());
    let files = Files::open(&scratch.0, &options).unwrap();
    assert_eq!(files.zones()[5], ZoneRecord { erasures: 0, ..record(ZONE / BLOCK, 0) });
    assert_eq!(erasures_of(&files, 5, ZONE / BLOCK), 1);
    let mut bytes = [0; 1024];
    files.read(BLOCK, &mut bytes).unwrap();
    assert_eq!((bytes[..512] == [9; 512], bytes[512..] == [0; 512]), (true, true));
    drop(files);
    options.geometry.zone_bytes = 2 << 30;
    let refused = Files::open(&scratch.0, &options).unwrap_err().to_string();
    let want = "the backing holds a disk with zone_size=1073741824, not zone_size=2147483648; ask \
                for zone_size=1073741824, or give another backing";
    assert_eq!(refused, want);
    let strange = Scratch::new("kill-strange");
    std::fs::create_dir_all(&strange.0).unwrap();
    std::fs::write(strange.0.join("thesis.tex"), "x").unwrap();
    let refused = Files::open(&strange.0, &options).unwrap_err().to_string();
    assert!(refused.starts_with("the backing holds `thesis.tex` and no zoned disk"), "{refused}");
}

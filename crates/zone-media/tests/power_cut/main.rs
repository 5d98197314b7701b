//! Cuts the power of a medium after every write, sync and change of a name, and checks the disk
//! when it is opened again. Each zone has a prefix of its operations, with at least those that a
//! flush covered. A kill of the process preserves all completed operations; with a volatile cache,
//! exactly the flushed ones.
//!
//! The workload runs once, on a simulated directory that records every operation. Then the test
//! ends the record after each of its operations.
#![allow(clippy::unwrap_used)] // Test code.

mod history;

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};

use blockyard_core::zone::{Zone, ZoneCond, ZoneLayout, ZoneOp};
use blockyard_core::{Sector, Status, ZoneGeometry};
use blockyard_sync::zone_resources::ZoneLimits;
use blockyard_testing::directory::{Medium, SimulatedDirectory};
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::{FaultPlan, Operation, When};
use blockyard_testing::zone_store::{Moment, SimulatedZoneStore};
use blockyard_zone_media::{
    CacheMode, Files, Media, MediaGeometry, Options, PermittedWrite, RecordedZones, ZoneRecord,
};

use history::{BLOCK, Done, Durable, History, Step, ZONE_BLOCKS};

/// Zones of the disk: two conventional ones; the last zone is shorter.
const ZONES: u32 = 6;

/// With more combinations of undurable choices than this, the test samples them at random.
const EXHAUSTIVE_MAX: usize = 64;

/// Number of random samples per moment.
const SAMPLES: usize = 12;

fn options(cache: CacheMode) -> Options {
    let zone_bytes = ZONE_BLOCKS * BLOCK;
    let geometry = MediaGeometry {
        bytes: u64::from(ZONES) * zone_bytes - 2 * BLOCK,
        zone_bytes,
        zone_capacity_bytes: zone_bytes,
        conventional_zones: 2,
        block_bytes: BLOCK as u32,
    };
    // A small journal, so that checkpoints are frequent.
    Options { cache, journal_records: 7, data_files: 2, ..Options::new(geometry) }
}

fn open(directory: &SimulatedDirectory, cache: CacheMode) -> Files<SimulatedZoneStore> {
    open_store(SimulatedZoneStore::new(directory), cache)
}

fn open_store(store: SimulatedZoneStore, cache: CacheMode) -> Files<SimulatedZoneStore> {
    let opened = Files::open_in(store, &options(cache));
    opened.unwrap_or_else(|error| panic!("the disk does not open: {error}"))
}

/// Random steps on an existing disk in two sessions: the first ends with a clean close, or with a
/// kill if that loses nothing. The history records which operations each step took.
fn work(store: &SimulatedZoneStore, cache: CacheMode, seed: Seed, stream: u64) -> History {
    let mut random = seed.rng(stream);
    let mut history = History::new(&options(cache).geometry);
    let files = open_store(store.clone(), cache);
    steps(&files, store, &mut history, &mut random, 1..=35);
    if stream.is_multiple_of(2) || cache != CacheMode::Through {
        let begun = store.now();
        files.close().unwrap();
        history.note(Step::Flush, Done { begun, ended: store.now() });
    } else {
        std::mem::forget(files);
    }
    let files = open_store(store.clone(), cache);
    steps(&files, store, &mut history, &mut random, 36..=70);
    std::mem::forget(files);
    history
}

fn steps(
    files: &Files<SimulatedZoneStore>,
    store: &SimulatedZoneStore,
    history: &mut History,
    random: &mut fastrand::Rng,
    serials: std::ops::RangeInclusive<u8>,
) {
    for serial in serials {
        let begun = store.now();
        let step = history.draw(random, serial);
        history.carry_out(files, &step).unwrap();
        history.note(step, Done { begun, ended: store.now() });
    }
}

/// Calls `check` with every directory that a power cut may leave, or with a random sample.
fn each_cut(
    medium: &Medium,
    random: &mut fastrand::Rng,
    mut check: impl FnMut(SimulatedDirectory),
) {
    let choices = medium.choices();
    let all = choices.iter().try_fold(1usize, |product, count| product.checked_mul(*count));
    match all.filter(|all| *all <= EXHAUSTIVE_MAX) {
        Some(all) => {
            for mut number in 0..all {
                check(medium.cut(|_, count| {
                    let choice = number % count;
                    number /= count;
                    choice
                }));
            }
        }
        None => {
            check(medium.cut(|_, _| 0));
            check(medium.cut(|_, count| count - 1));
            for _ in 0..SAMPLES {
                check(medium.cut(|_, count| random.usize(..count)));
            }
        }
    }
}

/// A hash of the contents of a directory.
fn fingerprint(directory: &SimulatedDirectory) -> u64 {
    let mut hasher = DefaultHasher::new();
    for name in directory.names() {
        let file = directory.open(&name).expect("it has just been named");
        let mut bytes = vec![0; file.len() as usize];
        file.read_at(0, &mut bytes).expect("it is as long as it says");
        (name, bytes).hash(&mut hasher);
    }
    hasher.finish()
}

/// Cuts the power after every operation of a workload; with `again`, also during the recovery.
fn cut_everywhere(cache: CacheMode, stream: u64, again: bool) {
    let _watch = Seed::from_env().watch("cut_everywhere");
    cut_everywhere_in(cache, stream, again, &[]);
}

fn cut_everywhere_in(
    cache: CacheMode,
    stream: u64,
    again: bool,
    ignored_syncs: &'static [&'static str],
) {
    let seed = Seed::from_env();
    let directory = SimulatedDirectory::default();
    drop(open(&directory, cache));
    directory.settle();
    let mut medium = directory.medium();
    let store = SimulatedZoneStore::new(&directory);
    store.store.set_faults(FaultPlan { ignored_syncs, ..FaultPlan::default() });
    let history = work(&store, cache, seed, stream);
    let changes = directory.changes();
    let mut random = seed.rng(stream + 1000);
    let mut images = 0;
    for moment in 0..=changes.len() {
        let mut seen = HashSet::new();
        each_cut(&medium, &mut random, |found| {
            if !seen.insert(fingerprint(&found)) {
                return;
            }
            images += 1;
            if again {
                cut_again(&history, moment, &found, cache);
            } else {
                let base = found.medium();
                let files = open(&found, cache);
                history.check(&files, moment, Durable::Flushed);
                go_on(files, &found, base, cache);
            }
        });
        if let Some(change) = changes.get(moment) {
            medium.apply(change);
        }
    }
    assert!(images > changes.len(), "{images} images of {} moments", changes.len());
}

/// Cuts the power after every operation of a recovery: the outcome is the same.
fn cut_again(history: &History, moment: usize, found: &SimulatedDirectory, cache: CacheMode) {
    let mut medium = found.medium();
    let first = open(found, cache);
    let zones = first.zones();
    let changes = found.changes();
    std::mem::forget(first);
    for change in changes {
        medium.apply(&change);
        let second = open(&medium.cut(|at, count| (at + moment) % count), cache);
        assert_eq!(zones, second.zones(), "recovery cut after {change:?}");
        history.check(&second, moment, Durable::Flushed);
        std::mem::forget(second);
    }
}

/// Continues with a reopened disk: what is written and flushed now survives another power cut.
/// `base` is what was durable when the disk was opened.
fn go_on(
    files: Files<SimulatedZoneStore>,
    found: &SimulatedDirectory,
    mut base: Medium,
    cache: CacheMode,
) {
    let writable = |record: &ZoneRecord| !matches!(record.cond, ZoneCond::NotWp | ZoneCond::Full);
    let zones = files.zones();
    let Some(zone) = zones.iter().position(writable) else { return };
    let written = zones[zone].written_sectors * 512;
    let start = zone as u64 * ZONE_BLOCKS * BLOCK;
    let mut above = [7; BLOCK as usize];
    files.read(start + written, &mut above).unwrap();
    assert_eq!(above, [0; BLOCK as usize], "nothing is left above the write pointer");
    files.write(start + written, &[0xee; BLOCK as usize]).unwrap();
    let written_sectors = (written + BLOCK) / 512;
    let state = ZoneRecord { cond: ZoneCond::ImplicitOpen, written_sectors, erasures: 0 };
    files.zone_changed(zone as u32, state).unwrap();
    files.flush().unwrap();
    std::mem::forget(files);
    found.changes().iter().for_each(|change| base.apply(change));
    let files = open(&base.cut(|_, _| 0), cache);
    assert_eq!(files.zones()[zone].written_sectors, written_sectors);
    let mut bytes = [0; BLOCK as usize];
    files.read(start + written, &mut bytes).unwrap();
    assert_eq!(bytes, [0xee; BLOCK as usize]);
}

#[test]
fn a_power_cut_leaves_a_prefix_that_respects_flushes() {
    for stream in 0..5 {
        cut_everywhere(CacheMode::Through, stream, false);
    }
}

#[test]
fn a_power_cut_with_a_volatile_cache_leaves_a_prefix_that_respects_flushes() {
    for stream in 100..105 {
        cut_everywhere(CacheMode::Volatile { bytes: 16 << 10 }, stream, false);
    }
}

#[test]
fn a_power_cut_during_recovery_changes_nothing() {
    for stream in 200..202 {
        cut_everywhere(CacheMode::Through, stream, true);
        cut_everywhere(CacheMode::Volatile { bytes: 1 << 20 }, stream, true);
    }
}

/// Threads share syncs of the journal, and a flush covers what other threads have completed before.
#[test]
fn a_power_cut_under_several_threads_respects_the_flushes_of_each() {
    let seed = Seed::from_env();
    let _watch = seed.watch("a_power_cut_under_several_threads (and how they were scheduled)");
    for stream in 500..503 {
        let cache = CacheMode::Through;
        let directory = SimulatedDirectory::default();
        drop(open(&directory, cache));
        directory.settle();
        let mut medium = directory.medium();
        let store = SimulatedZoneStore::new(&directory);
        let files = open_store(store.clone(), cache);
        let mut history = History::new(&options(cache).geometry);
        let thread = |own: u32| {
            let mut random = seed.rng(stream * 100 + u64::from(own));
            let mut history = History::new(&options(cache).geometry);
            for serial in 1..=40 {
                let begun = store.now();
                let step = history.draw_of(&mut random, serial, own);
                history.carry_out(&files, &step).unwrap();
                history.note(step, Done { begun, ended: store.now() });
            }
            history
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (2..ZONES)
                .map(|own| {
                    let thread = &thread;
                    scope.spawn(move || thread(own))
                })
                .collect();
            threads.into_iter().for_each(|thread| history.merge(thread.join().unwrap()));
        });
        let changes = directory.changes();
        std::mem::forget(files);
        let mut random = seed.rng(stream);
        for moment in 0..=changes.len() {
            let found = medium.kill();
            let files = open(&found, cache);
            history.check(&files, moment, Durable::Completed);
            std::mem::forget(files);
            each_cut(&medium, &mut random, |found| {
                let files = open(&found, cache);
                history.check(&files, moment, Durable::Flushed);
                std::mem::forget(files);
            });
            if let Some(change) = changes.get(moment) {
                medium.apply(change);
            }
        }
    }
}

/// Checks the checker: it must detect syncs that do nothing.
#[test]
fn a_disk_without_syncs_does_not_pass() {
    let all: [(&[&str], CacheMode); 4] = [
        (&["data"], CacheMode::Through),
        (&["data"], CacheMode::Volatile { bytes: 16 << 10 }),
        (&["journal"], CacheMode::Through),
        (&["tables"], CacheMode::Through),
    ];
    for (ignored_syncs, cache) in all {
        let passed = std::panic::catch_unwind(|| cut_everywhere_in(cache, 1, false, ignored_syncs));
        assert!(passed.is_err(), "{cache:?}: syncs of {ignored_syncs:?} did nothing unnoticed");
    }
}

/// A flush reads the zones' states, syncs the data, then writes the journal. A reset after that
/// reading has its record before the flush's: the zone must stay empty.
#[test]
fn a_reset_during_a_flush_is_not_undone_by_it() {
    for cache in [CacheMode::Through, CacheMode::Volatile { bytes: 4096 }] {
        let directory = SimulatedDirectory::default();
        let mut medium = Medium::new();
        let store = SimulatedZoneStore::new(&directory);
        let files = Arc::new(open_store(store.clone(), cache));
        let state =
            |cond, written_sectors, erasures| ZoneRecord { cond, written_sectors, erasures };
        files.write(3 * ZONE_BLOCKS * BLOCK, &[1; 1024]).unwrap();
        files.zone_changed(3, state(ZoneCond::ImplicitOpen, 2, 0)).unwrap();
        files.flush().unwrap();
        files.write(3 * ZONE_BLOCKS * BLOCK + 1024, &[2; 512]).unwrap();
        files.zone_changed(3, state(ZoneCond::ImplicitOpen, 3, 0)).unwrap();
        let other = Arc::clone(&files);
        store.store.on_next(Operation::Sync, move || {
            other.reset(3, state(ZoneCond::Empty, 0, 1)).unwrap();
            other.write(3 * ZONE_BLOCKS * BLOCK, &[9; 512]).unwrap();
            other.zone_changed(3, state(ZoneCond::ImplicitOpen, 1, 1)).unwrap();
        });
        files.flush().unwrap();
        directory.changes().iter().for_each(|change| medium.apply(change));
        let found = open(&medium.cut(|_, _| 0), cache);
        assert_eq!(found.zones()[3], state(ZoneCond::Empty, 0, 0));
        // Data written meanwhile are covered by the next flush.
        files.flush().unwrap();
        let mut medium = Medium::new();
        directory.changes().iter().for_each(|change| medium.apply(change));
        let found = open(&medium.cut(|_, _| 0), cache);
        assert_eq!(found.zones()[3], state(ZoneCond::Closed, 1, 0));
        // The hook no longer holds the medium.
        assert!(Arc::into_inner(files).is_some());
    }
}

/// Between the steps of a long flush, another thread flushes one zone. Regression: the long flush
/// then wrote its older state after the newer one, which a power cut lost. A killed process showed
/// it.
#[test]
fn a_flush_does_not_take_back_what_another_has_made_durable() {
    let cache = CacheMode::Volatile { bytes: 4096 };
    let directory = SimulatedDirectory::default();
    let store = SimulatedZoneStore::new(&directory);
    let files = Arc::new(open_store(store.clone(), cache));
    let at = 2 * ZONE_BLOCKS * BLOCK;
    let state = |cond, written_sectors| ZoneRecord { cond, written_sectors, erasures: 0 };
    // Zones of both data files: the flush has synced that of zone 2 before it syncs the other one.
    for zone in [2, 3] {
        files.write(u64::from(zone) * ZONE_BLOCKS * BLOCK, &[1; 512]).unwrap();
        files.zone_changed(zone, state(ZoneCond::ImplicitOpen, 1)).unwrap();
    }
    let (other, again) = (Arc::clone(&files), store.store.clone());
    store.store.on_next(Operation::Sync, move || {
        again.on_next(Operation::Sync, move || {
            other.write(at + 512, &[2; 1024]).unwrap();
            other.zone_changed(2, state(ZoneCond::ImplicitOpen, 3)).unwrap();
            other.flush_range(at, BLOCK).unwrap();
        });
    });
    files.flush().unwrap();
    let mut medium = Medium::new();
    directory.changes().iter().for_each(|change| medium.apply(change));
    let found = open(&medium.cut(|_, _| 0), cache);
    assert_eq!(found.zones()[2], state(ZoneCond::Closed, 3));
}

/// Kills the process after every operation.
fn kill_everywhere(cache: CacheMode, stream: u64, durable: Durable) {
    let seed = Seed::from_env();
    let _watch = seed.watch("kill_everywhere");
    let directory = SimulatedDirectory::default();
    drop(open(&directory, cache));
    directory.settle();
    let mut medium = directory.medium();
    let history = work(&SimulatedZoneStore::new(&directory), cache, seed, stream);
    let changes = directory.changes();
    let mut random = seed.rng(stream + 1000);
    for moment in 0..=changes.len() {
        let found = medium.kill();
        let files = open(&found, cache);
        history.check(&files, moment, durable);
        go_on(files, &found, medium.clone(), cache);
        // Another kill or a power cut during the opening: the files as they were found were not
        // durable, so a power cut leaves what it would have left without the opening.
        let found = medium.kill();
        let mut second = medium.clone();
        std::mem::forget(open(&found, cache));
        for change in found.changes() {
            second.apply(&change);
            let files = open(&second.kill(), cache);
            history.check(&files, moment, durable);
            std::mem::forget(files);
            for cut in [second.cut(|_, _| 0), second.cut(|_, count| random.usize(..count))] {
                let files = open(&cut, cache);
                history.check(&files, moment, Durable::Flushed);
                std::mem::forget(files);
            }
        }
        if let Some(change) = changes.get(moment) {
            medium.apply(change);
        }
    }
}

#[test]
fn a_kill_loses_nothing_that_was_completed() {
    for stream in 300..304 {
        kill_everywhere(CacheMode::Through, stream, Durable::Completed);
    }
}

#[test]
fn a_kill_with_a_volatile_cache_loses_what_was_not_flushed_and_only_that() {
    for stream in 400..404 {
        kill_everywhere(CacheMode::Volatile { bytes: 1 << 20 }, stream, Durable::FlushedOnly);
    }
}

/// A disk whose creation was interrupted is created again; an incomplete one is never opened.
#[test]
fn a_power_cut_while_a_disk_is_made_leaves_one_or_none() {
    let seed = Seed::from_env();
    let _watch = seed.watch("a_power_cut_while_a_disk_is_made_leaves_one_or_none");
    let mut random = seed.rng(50);
    let directory = SimulatedDirectory::default();
    let mut medium = Medium::new();
    std::mem::forget(open(&directory, CacheMode::Through));
    for change in directory.changes() {
        medium.apply(&change);
        each_cut(&medium, &mut random, |found| {
            let files = open(&found, CacheMode::Through);
            assert!(files.zones().iter().skip(2).all(|zone| zone.cond == ZoneCond::Empty));
        });
        let found = medium.kill();
        let files = open(&found, CacheMode::Through);
        assert_eq!(files.zones().len(), ZONES as usize);
        go_on(files, &found, medium.clone(), CacheMode::Through);
    }
}

/// A failed sync is not retried: the system has dropped the data by then and would report success.
#[test]
fn after_a_failed_sync_nothing_more_is_acknowledged() {
    for done in 0..60 {
        let failed_syncs = When::After(done);
        fail_in_a_workload(FaultPlan { failed_syncs, ..FaultPlan::default() }, done, true);
    }
}

/// Regression: the kernel reports a failed write-back to one of several threads that sync a file.
/// Another thread's durable write was acknowledged before the first one had latched its error.
#[test]
fn of_two_syncs_of_a_file_none_is_acknowledged_after_the_first_has_failed() {
    let store = SimulatedZoneStore::new(&SimulatedDirectory::default());
    let files = Arc::new(open_store(store.clone(), CacheMode::Through));
    let zone_bytes = ZONE_BLOCKS * BLOCK;
    // Zones of the same data file.
    for zone in [2, 4] {
        let state = ZoneRecord { cond: ZoneCond::ImplicitOpen, written_sectors: 1, erasures: 0 };
        files.write(zone * zone_bytes, &[1; BLOCK as usize]).unwrap();
        files.zone_changed(zone as u32, state).unwrap();
    }
    let failed_syncs = When::Only(1);
    store.store.set_faults(FaultPlan { failed_syncs, ..FaultPlan::default() });
    let (other, second) = (Arc::clone(&files), Arc::new(OnceLock::new()));
    let begun = Arc::clone(&second);
    store.store.on_next(Operation::FailedSync, move || {
        let thread = std::thread::spawn(move || other.flush_range(4 * zone_bytes, BLOCK).is_ok());
        // The other thread gets the chance to sync before this one has its error.
        for _ in 0..100_000 {
            if thread.is_finished() {
                break;
            }
            std::thread::yield_now();
        }
        begun.set(thread).unwrap();
    });
    files.flush_range(2 * zone_bytes, BLOCK).unwrap_err();
    let second = Arc::into_inner(second).and_then(OnceLock::into_inner);
    let is_acknowledged = second.expect("the sync has failed").join().unwrap();
    assert!(!is_acknowledged, "the second sync has reported success");
}

/// After a hole cannot be punched, no flush may report success.
#[test]
fn after_a_failed_punch_no_flush_lies() {
    for done in 0..12 {
        let failed_punches = When::After(done);
        fail_in_a_workload(FaultPlan { failed_punches, ..FaultPlan::default() }, done, false);
    }
}

/// The underlying disk is full, for data, journal, tables or live files.
#[test]
fn after_a_failed_write_no_flush_lies() {
    for done in (0..120).step_by(3) {
        let failed_writes = When::After(done);
        fail_in_a_workload(FaultPlan { failed_writes, ..FaultPlan::default() }, done, false);
    }
}

/// The punch of one zone fails, and another zone that was reset with it is written and flushed.
#[test]
fn a_failed_punch_costs_no_other_zone_its_data() {
    let directory = SimulatedDirectory::default();
    let store = SimulatedZoneStore::new(&directory);
    let files = open_store(store.clone(), CacheMode::Through);
    let zone_bytes = ZONE_BLOCKS * BLOCK;
    let record = |erasures, written_sectors| {
        let cond = if written_sectors == 0 { ZoneCond::Empty } else { ZoneCond::ImplicitOpen };
        ZoneRecord { cond, written_sectors, erasures }
    };
    let write = |zone: u32, erasures, byte| {
        files.write(u64::from(zone) * zone_bytes, &[byte; BLOCK as usize])?;
        files.zone_changed(zone, record(erasures, BLOCK / 512))
    };
    for zone in [2, 3] {
        write(zone, 0, 1).unwrap();
    }
    files.flush().unwrap();
    for zone in [2, 3] {
        files.reset(zone, record(1, 0)).unwrap();
    }
    let failed_punches = When::After(0);
    store.store.set_faults(FaultPlan { failed_punches, ..FaultPlan::default() });
    assert!(write(2, 1, 2).is_err());
    store.store.set_faults(FaultPlan::default());
    let kept = write(3, 1, 3).and_then(|()| files.flush()).is_ok();
    std::mem::forget(files);
    let mut medium = Medium::new();
    directory.changes().iter().for_each(|change| medium.apply(change));
    let files = open(&medium.cut(|_, _| 0), CacheMode::Through);
    assert!(!kept || files.zones()[3].written_sectors == BLOCK / 512, "a flush has lied");
    let mut bytes = [1; BLOCK as usize];
    files.read(2 * zone_bytes, &mut bytes).unwrap();
    assert_eq!(bytes, [0; BLOCK as usize], "what was given up is gone");
}

/// While a finish of a reset zone waits for the journal, no read may return the old data.
#[test]
fn finish_shows_nothing_from_before_a_reset() {
    let geometry = MediaGeometry {
        bytes: 512 << 10,
        zone_bytes: 64 << 10,
        zone_capacity_bytes: 64 << 10,
        ..options(CacheMode::Through).geometry
    };
    let store = SimulatedZoneStore::new(&SimulatedDirectory::default());
    let files = Arc::new(Files::open_in(store.clone(), &Options::new(geometry)).unwrap());
    let layout = ZoneLayout {
        zones: ZoneGeometry {
            zone_sectors: 128,
            zone_capacity_sectors: 128,
            zone_count: 8,
            conventional_count: 2,
            open_max: 0,
            active_max: 0,
        },
        sectors: 1024,
        full: false,
        data: true,
    };
    let zones = RecordedZones::new(layout, ZoneLimits::default(), &files.zones(), 1).unwrap();
    let zones = Arc::new(zones);
    let start = Sector(2 * 128);
    let permit = |zone: &Zone| {
        let to = zone.step_write(start, 1)?;
        Ok::<_, Status>(PermittedWrite { at: start, sectors: 1, to })
    };
    let copy = |write: PermittedWrite| files.write(write.at.bytes(), &[7; BLOCK as usize]);
    let (copied, state) = zones.write(2, permit, copy).unwrap();
    copied.and_then(|()| files.zone_changed(2, state)).unwrap();
    files.flush().unwrap();
    let manage = |op| zones.manage(2, op, |zone| zone.step(op), &*files).unwrap().unwrap();
    manage(ZoneOp::Reset);
    let (reader, seen) = (Arc::clone(&zones), Arc::new(OnceLock::new()));
    let found = Arc::clone(&seen);
    store.store.on_next(Operation::Sync, move || found.set(reader.readable_end(2)).unwrap());
    manage(ZoneOp::Finish);
    assert_eq!(seen.get(), Some(&Some(start)), "the finish has waited for no sync, or lied");
    let mut room = [1; BLOCK as usize];
    files.read(start.bytes(), &mut room).unwrap();
    assert_eq!(room, [0; BLOCK as usize]);
    assert_eq!(zones.cond(2), ZoneCond::Full);
}

/// Makes one operation of a kind fail, and all later ones of that kind. Data flushed by then
/// survive a power cut; with `all`, no operation succeeds after the failure.
fn fail_in_a_workload(faults: FaultPlan, done: u64, all: bool) {
    let seed = Seed::from_env();
    let _watch = seed.watch(&format!("{faults:?}"));
    for cache in [CacheMode::Through, CacheMode::Volatile { bytes: 4096 }] {
        let directory = SimulatedDirectory::default();
        let store = SimulatedZoneStore::new(&directory);
        let files = open_store(store.clone(), cache);
        directory.settle();
        let mut medium = directory.medium();
        store.store.set_faults(faults);
        let mut random = seed.rng(60 + done);
        let mut history = History::new(&options(cache).geometry);
        let mut failed = false;
        for serial in 1..=60 {
            let begun = store.now();
            let step = history.draw(&mut random, serial);
            let done = history.carry_out(&files, &step);
            let refused = done.is_err() || step.is_free();
            assert!(!all || !failed || refused, "{step:?} after a failure");
            failed |= done.is_err();
            let ended = if done.is_ok() { store.now() } else { Moment::NEVER };
            history.note(step, Done { begun, ended });
            // After a failed write a host would ask for the write pointer; this one does not.
            if failed && (!all || serial % 7 == 0) {
                break;
            }
        }
        let _ = files.flush();
        let changes = directory.changes();
        drop(files);
        changes.iter().for_each(|change| medium.apply(change));
        let mut random = seed.rng(61 + done);
        each_cut(&medium, &mut random, |found| {
            let files = open(&found, cache);
            history.check(&files, changes.len(), Durable::Flushed);
        });
    }
}

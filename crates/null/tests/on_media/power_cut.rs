//! Cycles of work and a power cut. Each cycle opens the directory that the cut before it left,
//! works, and cuts the power after any operation on the directory, also while the device is being
//! opened: of what was not synced, each sector may be there or not.

use blockyard_core::Status;
use blockyard_null::{NullConfig, media_geometry};
use blockyard_testing::directory::SimulatedDirectory;
use blockyard_testing::seed::Seed;
use blockyard_testing::simulated_store::{FaultPlan, When};
use blockyard_testing::zone_store::{Moment, SimulatedZoneStore};
use blockyard_zone_media::{Files, Options};

use crate::fixture::Fixture;
use crate::history::{Contents, Durable, History, Step, config};

/// Cycles of the test.
const CYCLES: u32 = 60;

fn open(store: SimulatedZoneStore, config: &NullConfig) -> Fixture {
    let (geometry, _) = media_geometry(config).unwrap();
    // A small journal, so that checkpoints are frequent.
    let options = Options { journal_records: 7, data_files: 2, ..Options::new(geometry) };
    let files = Files::open_in(store, &options).unwrap_or_else(|error| panic!("{error}"));
    Fixture::open(config, files).unwrap_or_else(|error| panic!("{error}"))
}

/// Executes random steps, until one fails or all are done.
fn work(
    device: &mut Fixture,
    store: &SimulatedZoneStore,
    history: &mut History,
    random: &mut fastrand::Rng,
    steps: u32,
) -> Result<(), Status> {
    for _ in 0..steps {
        let step = history.draw(random);
        let begun = store.now();
        match history.carry_out(device, &step) {
            Ok(()) => history.note(step, begun, store.now()),
            // Nothing has happened.
            Err(Status::ZoneOpenResource | Status::ZoneActiveResource) => {}
            Err(status) => {
                history.note(step, begun, Moment::NEVER);
                return Err(status);
            }
        }
    }
    Ok(())
}

fn cycles(seed: Seed, stream: u64, count: u32, ignored_syncs: &'static [&'static str]) {
    let mut random = seed.rng(stream);
    let mut directory = SimulatedDirectory::default();
    drop(open(SimulatedZoneStore::new(&directory), &config()));
    directory.settle();
    let mut contents = Contents::new();
    for cycle in 0..count {
        let mut medium = directory.medium();
        let store = SimulatedZoneStore::new(&directory);
        store.store.set_faults(FaultPlan { ignored_syncs, ..FaultPlan::default() });
        // The limits change with every cycle.
        let config = NullConfig { zone_max_open: 1 + cycle % 3, ..config() };
        let mut device = open(store.clone(), &config);
        let mut history = History::new(contents);
        let steps = random.u32(1..60);
        work(&mut device, &store, &mut history, &mut random, steps).unwrap();
        let changes = directory.changes();
        drop(device);
        let moment = random.usize(..=changes.len());
        changes[..moment].iter().for_each(|change| medium.apply(change));
        let mut killed = open(SimulatedZoneStore::new(&medium.kill()), &config);
        history.check(&mut killed, moment, Durable::Completed);
        directory = match cycle % 3 {
            0 => medium.cut(|_, _| 0),
            _ => medium.cut(|_, choices| random.usize(..choices)),
        };
        let left = directory.medium().cut(|_, _| 0);
        let mut found = open(SimulatedZoneStore::new(&left), &config);
        contents = history.check(&mut found, moment, Durable::Flushed);
    }
}

#[test]
fn cycles_with_power_cuts_lose_nothing_that_was_flushed() {
    let seed = Seed::from_env();
    let _watch = seed.watch("cycles_with_power_cuts_lose_nothing_that_was_flushed");
    for stream in 0..4 {
        cycles(seed, stream, CYCLES, &[]);
    }
}

/// Checks the checker: it must detect syncs that do nothing.
#[test]
fn a_device_without_syncs_does_not_pass() {
    for ignored_syncs in [&["data"][..], &["journal"], &["tables"]] {
        let passed = std::panic::catch_unwind(|| {
            (10..20).for_each(|stream| cycles(Seed::from_env(), stream, 30, ignored_syncs));
        });
        let panic = passed.expect_err("syncs that do nothing must be noticed");
        let text = panic.downcast_ref::<String>().expect("the panics of the checker are formatted");
        // A zone, a block, or a file of which a durable part is missing.
        let notices = [" is no state from ", ": none of ", "is damaged: "];
        let is_noticed = notices.iter().any(|notice| text.contains(notice));
        assert!(is_noticed, "{ignored_syncs:?}: not by a check of this test: {text}");
    }
}

/// Some write, sync or hole punch of the directory fails, and all later ones of the kind. Then a
/// flush may not succeed unless everything that it covers survives a power cut.
#[test]
fn after_a_failed_operation_no_flush_lies() {
    let seed = Seed::from_env();
    let _watch = seed.watch("after_a_failed_operation_no_flush_lies");
    let none = FaultPlan::default;
    for done in 0..40 {
        let after = When::After(done);
        for (faults, is_sync) in [
            (FaultPlan { failed_syncs: after, ..none() }, true),
            (FaultPlan { failed_writes: after, ..none() }, false),
            (FaultPlan { failed_punches: after, ..none() }, false),
        ] {
            let mut random = seed.rng(100 + done);
            let directory = SimulatedDirectory::default();
            let store = SimulatedZoneStore::new(&directory);
            let mut device = open(store.clone(), &config());
            directory.settle();
            let mut medium = directory.medium();
            store.store.set_faults(faults);
            let mut history = History::new(Contents::new());
            let failed = work(&mut device, &store, &mut history, &mut random, 80);
            if is_sync && failed.is_err() {
                // The kernel may have dropped the data, and would call the next sync a success.
                store.store.set_faults(none());
                assert!(history.carry_out(&mut device, &Step::Flush).is_err(), "{faults:?}");
            }
            let changes = directory.changes();
            drop(device);
            changes.iter().for_each(|change| medium.apply(change));
            for _ in 0..4 {
                let left = medium.cut(|_, choices| random.usize(..choices));
                let mut found = open(SimulatedZoneStore::new(&left), &config());
                history.check(&mut found, changes.len(), Durable::Flushed);
            }
        }
    }
}

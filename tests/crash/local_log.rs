//! The disk that has the local log of a pool in an object store: its power is cut at any change or
//! sync, also while the pool is opened, or it fails. The object store is in memory and has no
//! fault.
//!
//! What the machine was told is durable must be there when it opens the pool again with this log.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockyard_volume_format::object::local_log::{LogFile, parse_name};
use fastrand::Rng;
use object_store::memory::InMemory;

use crate::connection::Connection;
use crate::disk::Fault;
use crate::machine::{Blocks, History, Machine, Step, draw, formatted, log_folder};
use crate::mounted::Mounted;
use crate::rounds::{Seed, seeds};

/// The disks of `make test`, and how often the power of each is cut.
const FEW: u64 = 30;
const CUTS: u64 = 6;

/// The power is cut before this many changes and syncs of the disk.
const OPERATIONS: u64 = 40;

/// Most steps of a machine, of which up to three are in flight.
const STEPS: u32 = 30;

/// The directory of the log, four levels below one that is there, as in a state directory.
fn log(mounted: &Mounted) -> PathBuf {
    mounted.file("state/object/pool/log").into()
}

/// Opens the pool on the machine with this disk, which ends with the power of the disk.
fn open(mounted: &Mounted, store: &Arc<InMemory>) -> Result<Machine, String> {
    let connection = Connection::new(store);
    connection.plan().is_off = Some(mounted.power_off());
    Machine::open_with(&connection, None, Some(&log(mounted)))
}

/// What a machine without the log would find.
fn elsewhere(store: &Arc<InMemory>) -> Blocks {
    let (copy, folder) = (Arc::new(store.fork()), log_folder());
    let machine = Machine::open_with(&Connection::new(&copy), None, Some(folder.path()));
    machine.unwrap().history.base
}

/// Takes random steps until one fails.
fn run(machine: &mut Machine, random: &mut Rng) {
    for _ in 0..STEPS {
        for _ in 0..random.u32(1..4) {
            machine.begin(draw(random));
        }
        if !machine.run() {
            return;
        }
    }
}

/// How many files of the log have an incomplete last write, and how many have what an earlier batch
/// left in them.
fn torn_and_used_again(log: &Path) -> (usize, usize) {
    let names = fs::read_dir(log).into_iter().flatten().map(|it| it.unwrap().file_name());
    let (mut torn, mut used_again) = (0, 0);
    for name in names.map(|name| name.into_string().unwrap()) {
        let Some(id) = parse_name(&name) else { continue };
        let bytes = fs::read(log.join(name)).unwrap();
        let file = LogFile::parse(&bytes, id, None).unwrap();
        let (len, torn_bytes) = file.map_or((0, 0), |file| (file.len_bytes, file.torn_bytes));
        torn += usize::from(torn_bytes > 0);
        used_again += usize::from(bytes[len + torn_bytes..].iter().any(|byte| *byte != 0));
    }
    (torn, used_again)
}

/// What the cuts of all disks have left.
#[derive(Debug, Default)]
struct Seen {
    /// Machines whose last durable step only the log had.
    by_log: usize,
    torn_files: usize,
    files_used_again: usize,
    /// Openings that the cut ended.
    openings: usize,
}

fn cuts(seed: &Seed, seen: &mut Seen) {
    let mut random = Rng::with_seed(seed.0);
    let (mounted, store) = (Mounted::new(seed.0), formatted());
    let mut before: Option<History> = None;
    let mut first = 1;
    for _ in 0..CUTS {
        let (cut, is_early) = (Fault::Cut(random.u64(..OPERATIONS)), random.bool());
        mounted.disk().fail(is_early.then_some(cut));
        match open(&mounted, &store) {
            Ok(mut machine) => {
                if let Some(history) = before.take() {
                    history.check(history.durable, &machine.history.base);
                }
                machine.history.first = first;
                if !is_early {
                    mounted.disk().fail(Some(cut));
                }
                run(&mut machine, &mut random);
                first += machine.history.steps.len() as u64;
                before = Some(machine.history.clone());
                // The process ends with the power: it uploads nothing more.
                if !mounted.disk().is_off() {
                    mounted.disk().cut();
                }
            }
            Err(error) => {
                assert!(mounted.disk().is_off(), "{error}");
                seen.openings += 1;
            }
        }
        mounted.disk().switch_on();
        let (torn, used_again) = torn_and_used_again(&log(&mounted));
        seen.torn_files += torn;
        seen.files_used_again += used_again;
        if let Some(history) = &before {
            let found = elsewhere(&store);
            let has_durable =
                (history.durable..=history.steps.len()).any(|count| history.after(count) == found);
            seen.by_log += usize::from(!has_durable);
        }
    }
    let machine = open(&mounted, &store).unwrap();
    if let Some(history) = before {
        history.check(history.durable, &machine.history.base);
    }
}

#[test]
fn a_power_cut_below_the_log_loses_no_acknowledged_sync() {
    let mut seen = Seen::default();
    for seed in seeds(FEW).map(Seed) {
        cuts(&seed, &mut seen);
    }
    let Seen { by_log, torn_files, files_used_again, openings } = seen;
    assert!(by_log > 0 && torn_files > 0 && files_used_again > 0 && openings > 0, "{seen:?}");
}

fn remove_spares(log: &Path) {
    for entry in fs::read_dir(log).unwrap().map(Result::unwrap) {
        if entry.file_name().to_str().unwrap().starts_with("spare-") {
            fs::remove_file(entry.path()).unwrap();
        }
    }
}

/// A disk with the log fails: nothing is lost, the object store acknowledges from then on, and the
/// status says so. Then the power is cut.
fn fails(seed: &Seed, fault: Fault) {
    let mut random = Rng::with_seed(seed.0);
    let (mounted, store) = (Mounted::new(seed.0), formatted());
    let mut machine = open(&mounted, &store).unwrap();
    machine.history.first = 1;
    run(&mut machine, &mut random);
    assert!(!machine.store().upload_status().has_log_failed);
    mounted.disk().fail(Some(fault));
    run(&mut machine, &mut random);
    while fault == Fault::Full && !machine.store().upload_status().has_log_failed {
        // A file without growth suffices for a batch, and so do the spares.
        assert!(machine.take(Step::Write { first: 0, count: 12, fua: true }), "{fault:?}");
        remove_spares(&log(&mounted));
    }
    assert!(machine.take(Step::Write { first: 0, count: 1, fua: true }), "{fault:?}");
    assert!(machine.store().upload_status().has_log_failed, "{fault:?}");
    assert_eq!(elsewhere(&store), machine.contents().unwrap(), "{fault:?}");
    let (torn, _) = torn_and_used_again(&log(&mounted));
    run(&mut machine, &mut random);
    assert!(torn_and_used_again(&log(&mounted)).0 <= torn, "the log is written after an error");
    assert!(machine.take(Step::Flush), "{fault:?}");
    let history = machine.history.clone();
    assert_eq!(history.durable, history.steps.len(), "{fault:?}");
    mounted.disk().cut();
    drop(machine);
    mounted.disk().switch_on();
    let machine = open(&mounted, &store).unwrap();
    history.check(history.durable, &machine.history.base);
}

#[test]
fn a_log_that_cannot_be_written_is_reported_and_loses_nothing() {
    for seed in seeds(4).map(Seed) {
        let number = seed.0 % 4;
        for fault in
            [Fault::Full, Fault::Write(number), Fault::Sync(number), Fault::FolderSync(number)]
        {
            fails(&seed, fault);
        }
    }
}

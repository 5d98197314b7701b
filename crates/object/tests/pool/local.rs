//! Acknowledgements by a local log: what a machine was told is durable is there when it opens the
//! pool again. Another machine finds a prefix, and what it lacks is within the limits.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use object_store::memory::InMemory;

use crate::connection::{Connection, Moment};
use crate::machine::{Blocks, History, LAG_BYTES, Machine, Step, draw, formatted, log_folder};
use crate::recovery::each_round;

/// A machine that stopped at some moment.
#[derive(Clone, Debug)]
struct Stopped {
    history: History,
    /// How many steps the object store had at least.
    uploaded: usize,
}

/// Runs random steps on a machine. Returns what it was told, and what the object store had.
fn run(machine: &mut Machine, random: &mut fastrand::Rng) -> Stopped {
    let mut uploaded = 0;
    for _ in 0..random.u32(0..40) {
        for _ in 0..random.u32(1..4) {
            machine.begin(draw(random));
        }
        if !machine.run() {
            break;
        }
        if random.u8(0..4) == 0 {
            machine.pass(Duration::from_millis(random.u64(0..300)));
        }
        let lag = machine.store().lag();
        assert!(lag.bytes <= LAG_BYTES, "{lag:?}");
        if lag.batches == 0 {
            uploaded = machine.history.steps.len();
        }
    }
    Stopped { history: machine.history.clone(), uploaded }
}

/// Machines open the pool one after the other, each with its own log, and stop at any moment.
fn chain(random: &mut fastrand::Rng, has_faults: bool) -> usize {
    let store = formatted();
    let folders: Vec<_> = (0..2).map(|_| log_folder()).collect();
    let mut before: Option<(usize, Stopped)> = None;
    let (mut first, mut losses) = (1, 0);
    for _ in 0..6 {
        let connection = Connection::new(&store);
        if has_faults {
            connection.plan().random = Some(fastrand::Rng::with_seed(random.u64(..)));
        }
        let number = random.usize(0..2);
        let folder = folders[number].path();
        let (cache, log) = (folder.join("cache"), folder.join("log"));
        let mut machine = Machine::open_with(&connection, Some(&cache), Some(&log)).unwrap();
        let base = machine.history.base.clone();
        if let Some((last, Stopped { history, uploaded })) = before.take() {
            let is_told = machine.store().upload_status().missing_since_ms.is_some();
            assert!(is_told || last == number, "writes may be missing, and nothing says so");
            if last == number {
                history.check(history.durable, &base);
            } else {
                history.check(uploaded, &base);
                losses += usize::from(history.after(history.durable) != base);
            }
        }
        machine.history.first = first;
        let stopped = run(&mut machine, random);
        first += stopped.history.steps.len() as u64;
        before = Some((number, stopped));
    }
    losses
}

#[test]
fn a_machine_finds_what_its_log_has_and_another_one_a_prefix() {
    let mut losses = 0;
    each_round(20, |random| losses += chain(random, false));
    assert!(losses > 0, "the object store never lacks anything: the test has no lag");
}

#[test]
fn a_machine_finds_what_its_log_has_although_requests_fail() {
    each_round(10, |random| _ = chain(random, true));
}

/// A workload that fills batches, compacts and discards, with pauses in which uploads go on.
fn workload(machine: &mut Machine) -> usize {
    let mut uploaded = 0;
    for round in 0..6 {
        machine.begin(Step::Write { first: round, count: 8, fua: round % 2 == 0 });
        machine.begin(Step::Write { first: 20 - round, count: 2, fua: true });
        if !machine.run() {
            break;
        }
        machine.pass(Duration::from_millis(60));
        machine.begin(Step::Discard { first: round, count: 1 });
        machine.begin(Step::Write { first: 23, count: 1, fua: false });
        machine.begin(Step::Flush);
        if !machine.run() {
            break;
        }
        if machine.store().lag().batches == 0 {
            uploaded = machine.history.steps.len();
        }
    }
    uploaded
}

/// A machine with a log in `log` that is cut off from the object store after this number of
/// requests, and stops. `None` if it could not open the pool.
fn stopped(store: &Arc<InMemory>, log: &Path, cut_after: u64) -> Option<Stopped> {
    let connection = Connection::new(store);
    connection.plan().cut_after = cut_after;
    let mut machine = Machine::open_with(&connection, None, Some(log)).ok()?;
    machine.history.first = 1;
    let uploaded = workload(&mut machine);
    Some(Stopped { history: machine.history.clone(), uploaded })
}

fn opened(store: &Arc<InMemory>, log: &Path) -> Blocks {
    let connection = Connection::new(store);
    Machine::open_with(&connection, None, Some(log)).unwrap().history.base.clone()
}

#[test]
fn a_machine_that_stops_at_any_request_loses_nothing_of_its_own() {
    let (mut count, mut with_lag) = (0, 0);
    for cut_after in 0..120 {
        let (store, folder) = (formatted(), log_folder());
        let Some(Stopped { history, uploaded }) = stopped(&store, folder.path(), cut_after) else {
            continue;
        };
        count += 1;
        // What another machine would find.
        let copy = Arc::new(store.fork());
        let [of_copy, elsewhere] = [(); 2].map(|()| log_folder());
        let other = opened(&copy, of_copy.path());
        history.check(uploaded, &other);
        let own = opened(&store, folder.path());
        history.check(history.durable, &own);
        with_lag += usize::from(own != other);
        // The log of the first opener is gone, and another machine finds what it had.
        let left = std::fs::read_dir(folder.path()).unwrap();
        let names = left.map(|it| it.unwrap().file_name().into_string().unwrap());
        let mut epochs: Vec<String> =
            names.filter(|name| name != "id").map(|name| name[..16].to_owned()).collect();
        epochs.dedup();
        assert!(epochs.len() <= 1, "{epochs:?}");
        assert_eq!(opened(&store, elsewhere.path()), own);
    }
    assert!(count > 40 && with_lag > 10, "{count} machines opened the pool, {with_lag} had a lag");
}

/// The opening that uploads the log stops at any of its requests, and is repeated.
#[test]
fn an_opening_that_stops_at_any_request_loses_nothing() {
    let mut count = 0;
    for cut_after in [50, 54, 60, 70] {
        for stops_after in 0..60 {
            let (store, folder) = (formatted(), log_folder());
            let first = stopped(&store, folder.path(), cut_after).unwrap();
            let connection = Connection::new(&store);
            connection.plan().cut_after = stops_after;
            let is_open = Machine::open_with(&connection, None, Some(folder.path())).is_ok();
            count += usize::from(!is_open);
            let connection = Connection::new(&store);
            let next = Machine::open_with(&connection, None, Some(folder.path())).unwrap();
            first.history.check(first.history.durable, &next.history.base);
            assert_eq!(next.store().upload_status().missing_since_ms, None);
        }
    }
    assert!(count > 40, "{count} openings stopped");
}

/// The bug: the directory of a log kept its identity, so that one that was restored from a copy
/// passed for the log of the last opener, and nothing said that writes were missing.
#[test]
fn a_log_that_is_restored_from_a_copy_is_not_that_of_a_later_opener() {
    let (store, folder, copy) = (formatted(), log_folder(), log_folder());
    opened(&store, folder.path());
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    stopped(&store, folder.path(), 80).unwrap();
    let connection = Connection::new(&store);
    let machine = Machine::open_with(&connection, None, Some(copy.path())).unwrap();
    assert!(machine.store().upload_status().missing_since_ms.is_some());
}

/// The second machine opens the pool at each request of the first one, which uploads its log or is
/// used already. Then the first one opens the pool again.
#[test]
fn a_machine_that_was_taken_over_does_not_replay_its_log() {
    let (mut count, mut taken_over) = (0, 0);
    for number in 1.. {
        let (store, folder) = (formatted(), log_folder());
        let before = stopped(&store, folder.path(), 50).unwrap();
        let elsewhere = log_folder();
        let second: Arc<Mutex<Option<(History, u64)>>> = Arc::default();
        let (result, other) = (Arc::clone(&second), Arc::clone(&store));
        let log = elsewhere.path().to_owned();
        let run = move || {
            let connection = Connection::new(&other);
            let mut machine = Machine::open_with(&connection, None, Some(&log)).unwrap();
            machine.history.first = 1000;
            assert!(machine.take(Step::Write { first: 3, count: 1, fua: true }));
            *result.lock().unwrap() = Some((machine.history.clone(), machine.epoch()));
        };
        let connection = Connection::new(&store);
        connection.plan().hook = Some((Moment::Before(number), Box::new(run)));
        let first = Machine::open_with(&connection, None, Some(folder.path()));
        let first = first.ok().map(|mut machine| {
            machine.history.first = 100;
            workload(&mut machine);
            (machine.history.clone(), machine.epoch())
        });
        let Some((second, epoch)) = second.lock().unwrap().take() else { break };
        count += 1;
        let second_end = second.after(second.steps.len());
        match first {
            // The second machine came first: its log is not uploaded by any other machine.
            Some((history, own)) if own > epoch => {
                let is_there = history.base == second_end || history.base == second.base;
                assert!(is_there, "request {number}: {history:?} after {second:?}");
                let found = opened(&store, folder.path());
                history.check(history.durable, &found);
            }
            first => {
                taken_over += 1;
                match first {
                    Some((history, _)) => history.check(0, &second.base),
                    None => before.history.check(before.uploaded, &second.base),
                }
                // The second machine opens its pool again, and the first one after it.
                assert_eq!(opened(&store, elsewhere.path()), second_end, "request {number}");
                assert_eq!(opened(&store, folder.path()), second_end, "request {number}");
            }
        }
    }
    assert!(count > 20 && taken_over > 10, "{count} moments, {taken_over} times taken over");
}

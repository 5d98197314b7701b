//! Openers that race: at most one machine has its writes acknowledged.

use std::sync::{Arc, Barrier, Mutex};

use blockyard_object::BucketError;
use blockyard_store::{SegmentFiles as _, StoreError, StoreFile as _};
use object_store::memory::InMemory;

use crate::connection::{Connection, Moment};
use crate::machine::{BLOCKS, Blocks, History, Machine, Step, formatted, open_store};
use crate::recovery::rounds;
use crate::storage::{make_superblock, open_alone, open_read_only};

/// The workload of the first machine: it fills batches, compacts, and discards.
fn workload(machine: &mut Machine) {
    for round in 0..6 {
        machine.begin(Step::Write { first: round, count: 8, fua: round % 2 == 0 });
        machine.begin(Step::Write { first: 20 - round, count: 2, fua: true });
        if !machine.run() {
            return;
        }
        machine.begin(Step::Discard { first: round, count: 1 });
        machine.begin(Step::Flush);
        if !machine.run() {
            return;
        }
    }
}

/// The epoch of the second machine, and what it found and did.
type Second = Arc<Mutex<Option<(u64, Blocks, History)>>>;

/// The second machine: it opens the pool, reads it and writes a block. Its connection is cut after
/// this number of requests.
fn second(store: &Arc<InMemory>, cut_after: u64, found: &Second) {
    let connection = Connection::new(store);
    connection.plan().cut_after = cut_after;
    let Ok(mut machine) = Machine::open(&connection, None) else {
        return;
    };
    machine.history.first = 1000;
    machine.take(Step::Write { first: 3, count: 1, fua: true });
    let (base, history) = (machine.history.base.clone(), machine.history.clone());
    *found.lock().unwrap() = Some((machine.epoch(), base, history));
}

/// Runs the first machine, and the second one at a moment of it. Returns whether that moment came.
fn race(moment: Moment) -> bool {
    let store = formatted();
    let connection = Connection::new(&store);
    let found: Second = Arc::default();
    let (other, result) = (Arc::clone(&store), Arc::clone(&found));
    let run = move || second(&other, u64::MAX, &result);
    connection.plan().hook = Some((moment, Box::new(run)));
    let history = match Machine::open(&connection, None) {
        Ok(mut first) => {
            first.history.first = 1;
            workload(&mut first);
            let own = first.epoch();
            let is_newest = || {
                let other = found.lock().unwrap().as_ref().map(|(epoch, ..)| *epoch);
                other.is_none_or(|other| other < own)
            };
            // The older one learns that it is fenced, however often it tries.
            let was_newest = is_newest();
            let write = Step::Write { first: 0, count: 1, fua: true };
            let written = [write, Step::Flush].map(|step| first.take(step));
            if was_newest == is_newest() {
                assert_eq!(written, [was_newest; 2], "{moment:?}");
            }
            Some((first.epoch(), first.history))
        }
        Err(_) => None,
    };
    let Some((epoch, base, second)) = found.lock().unwrap().take() else { return false };
    let second_end = second.after(second.steps.len());
    let third = Machine::open(&Connection::new(&store), None).unwrap().history.base;
    match history {
        // The second machine came before the first one had a new epoch.
        Some((first_epoch, history)) if first_epoch > epoch => {
            assert_eq!(history.base, second_end, "{moment:?}");
            assert_eq!(third, history.after(history.steps.len()), "{moment:?}");
        }
        // What the first machine was told is durable, then or later, the second one has found.
        Some((_, history)) => {
            history.check(history.durable, &base);
            assert_eq!(third, second_end, "{moment:?}");
        }
        None => assert_eq!(third, second_end, "{moment:?}"),
    }
    true
}

#[test]
fn a_second_opener_at_any_request_ends_the_first_one() {
    let mut count = 0;
    for number in 1.. {
        let came = [Moment::Before(number), Moment::After(number)].map(race);
        if came == [false; 2] {
            break;
        }
        count += 1;
    }
    assert!(count > 30, "the workload has only {count} requests");
}

/// The second machine stops at any of its requests. Whether the first one was fenced or not, what
/// it was told is durable is there.
#[test]
fn an_opener_that_dies_loses_nothing() {
    for number in [5, 20, 40] {
        for cut_after in 0..40 {
            let store = formatted();
            let connection = Connection::new(&store);
            let found: Second = Arc::default();
            let (other, result) = (Arc::clone(&store), Arc::clone(&found));
            let run = move || second(&other, cut_after, &result);
            connection.plan().hook = Some((Moment::Before(number), Box::new(run)));
            let first = Machine::open(&connection, None).map(|mut first| {
                first.history.first = 1;
                workload(&mut first);
                first.history
            });
            let third = Machine::open(&Connection::new(&store), None).unwrap();
            let second = found.lock().unwrap().take();
            match (first, second) {
                (Ok(history), None) => history.check(history.durable, &third.history.base),
                // The second one has opened the pool, and its write may be there or not.
                (Ok(history), Some((_, base, second))) => {
                    history.check(history.durable, &base);
                    second.check(second.durable, &third.history.base);
                }
                (Err(_), Some((.., second))) => second.check(second.durable, &third.history.base),
                (Err(_), None) => assert_eq!(third.history.base, vec![0; BLOCKS as usize]),
            }
        }
    }
}

/// Openers at once.
const OPENERS: usize = 32;

/// Runs a function for each opener, each on a thread of its own, all at once.
fn at_once<T: Send + 'static>(run: impl Fn() -> T + Clone + Send + 'static) -> Vec<T> {
    let start = Arc::new(Barrier::new(OPENERS));
    let threads: Vec<_> = (0..OPENERS)
        .map(|_| {
            let (run, start) = (run.clone(), Arc::clone(&start));
            std::thread::spawn(move || {
                start.wait();
                run()
            })
        })
        .collect();
    threads.into_iter().map(|it| it.join().unwrap()).collect()
}

#[test]
fn of_many_openers_at_once_the_losers_are_told_so() {
    let mut refused = 0;
    for _ in 0..rounds(20) {
        let store = formatted();
        let shared = Arc::clone(&store);
        let opened = at_once(move || {
            let connection = Connection::new(&shared);
            connection.plan().yields = true;
            open_store(&connection, None)
        });
        let mut epochs: Vec<u64> = opened.iter().flatten().map(|store| store.epoch()).collect();
        let newest = epochs.iter().copied().max().unwrap();
        epochs.sort_unstable();
        assert!(epochs.is_sorted_by(|one, next| one < next), "an epoch has two owners: {epochs:?}");
        for error in opened.iter().filter_map(|store| store.as_ref().err()) {
            assert!(error.to_string().contains("another process has just opened"), "{error}");
            refused += 1;
        }
        // Only the newest may write.
        for store in opened.into_iter().flatten() {
            let is_newest = store.epoch() == newest;
            let file = store.open("superblock").unwrap().unwrap();
            match file.write_at(0, &[&[0; 512]]).and_then(|()| file.sync()) {
                Ok(()) => assert!(is_newest, "{} of {newest}", store.epoch()),
                Err(error) => {
                    let expected = "another opener has taken over the pool: ";
                    assert!(!is_newest && error.to_string().starts_with(expected), "{error}");
                }
            }
        }
    }
    assert!(refused > 0, "no two openers wanted the same epoch");
}

/// Until the superblock is there, an opener takes a pool for the remains of an interrupted
/// creation. So several can make it one after the other, and one of them makes its superblock
/// durable.
#[test]
fn of_many_makers_at_once_one_makes_the_pool() {
    for _ in 0..rounds(2) {
        let store = Arc::new(InMemory::new());
        let shared = Arc::clone(&store);
        let made = at_once(move || {
            let pool = open_alone(&Connection::new(&shared), 64 << 20)?;
            make_superblock(&pool).map(|()| pool.epoch()).map_err(|source| {
                let doing = "cannot make the superblock".to_owned();
                BucketError::Store(StoreError::Io { doing, source })
            })
        });
        let errors = made.iter().filter_map(|made| made.as_ref().err());
        for error in errors {
            let text = error.to_string();
            let expected = [
                "another process has just opened the pool",
                "another process has just made a pool in `pool`",
                "another process may have the pool in `pool` open",
                "another opener has taken over the pool: ",
            ];
            assert!(expected.iter().any(|it| text.contains(it)), "{text}");
        }
        let winners: Vec<u64> = made.into_iter().flatten().collect();
        assert_eq!(winners.len(), 1, "{winners:?}");
        assert!(open_read_only(&store).is_ok());
    }
}

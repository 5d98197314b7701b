//! What one machine was told is durable, another machine reads.

use std::collections::BTreeMap;
use std::sync::Arc;

use blockyard_testing::seed::Seed;
use futures::StreamExt;
use object_store::ObjectStore;
use object_store::memory::InMemory;

use crate::connection::Connection;
use crate::machine::{History, Machine, draw, formatted, runtime};

/// Rounds of each test; `BLOCKYARD_OBJECT_ROUNDS` sets another number.
pub(crate) fn rounds(default: u64) -> u64 {
    std::env::var("BLOCKYARD_OBJECT_ROUNDS").map_or(default, |rounds| rounds.parse().unwrap())
}

/// Runs rounds, each with its own random numbers.
pub(crate) fn each_round(default: u64, mut run: impl FnMut(&mut fastrand::Rng)) {
    let seed = Seed::from_env();
    for round in 0..rounds(default) {
        let _watch = seed.watch(&format!("round {round}"));
        run(&mut seed.rng(round));
    }
}

/// Machines open the pool one after the other, each with its own cache directory or none, and stop
/// at any moment without closing. Each finds everything that was durable, and a prefix of the rest.
fn chain(random: &mut fastrand::Rng, has_faults: bool) {
    let store: Arc<InMemory> = formatted();
    let mut first = 1;
    let caches: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    let mut before: Option<(History, usize)> = None;
    for _ in 0..5 {
        let connection = Connection::new(&store);
        if has_faults {
            connection.plan().random = Some(fastrand::Rng::with_seed(random.u64(..)));
        }
        let cache = random.choice([None, Some(caches[0].path()), Some(caches[1].path())]);
        let mut machine = Machine::open(&connection, cache.unwrap()).unwrap();
        let base = machine.history.base.clone();
        if let Some((history, least)) = before.take() {
            history.check(least, &base);
        }
        machine.history.first = first;
        for _ in 0..random.u32(0..40) {
            // Several steps are in flight at once.
            for _ in 0..random.u32(1..4) {
                machine.begin(draw(random));
            }
            assert!(machine.run());
        }
        let now = machine.history.steps.len();
        assert_eq!(machine.contents(), Ok(machine.history.after(now)));
        first += now as u64;
        let history = machine.history.clone();
        match random.bool() {
            true => {
                machine.close();
                before = Some((history, now));
            }
            false => before = Some((history.clone(), history.durable)),
        }
    }
}

/// The number of objects of each folder.
pub(crate) fn objects(store: &InMemory) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    let list = runtime().block_on(store.list(None).collect::<Vec<_>>());
    for object in list {
        let name = object.unwrap().location.to_string();
        *counts.entry(name.split('/').nth(1).unwrap().to_owned()).or_default() += 1;
    }
    counts
}

/// Compactions replace batches by segments, and what is not used any more is removed: a volume that
/// is overwritten again and again takes no more objects than its segments need.
#[test]
fn objects_that_nothing_needs_are_removed() {
    let store = formatted();
    let mut random = Seed::from_env().rng(1);
    let mut machine = Machine::open(&Connection::new(&store), None).unwrap();
    let mut most = BTreeMap::new();
    for _ in 0..400 {
        assert!(machine.take(draw(&mut random)));
        for (kind, count) in objects(&store) {
            let most = most.entry(kind).or_insert(0);
            *most = count.max(*most);
        }
    }
    // There are 40 segments, and a compaction after 6 batches removes what the one before freed.
    assert!(most["segment"] > 3 && most["segment"] < 200, "{most:?}");
    assert!(most["batch"] > 6 && most["batch"] < 60, "{most:?}");
    assert!(most["table"] < 10 && most["manifest"] == 1, "{most:?}");
}

#[test]
fn another_machine_finds_what_was_durable() {
    each_round(20, |random| chain(random, false));
}

#[test]
fn another_machine_finds_what_was_durable_although_requests_fail() {
    each_round(20, |random| chain(random, true));
}

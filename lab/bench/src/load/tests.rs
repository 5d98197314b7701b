//! Loads on small devices: the lab's counts equal the device's.

use std::sync::Arc;

use blockyard_core::Op;
use blockyard_core::channel::Stats;
use blockyard_yard::{stack, uri};

use super::*;
use crate::stop::Stop;

fn round(stop: &Stop) -> Round<'_> {
    let (warm_up, duration) = (Duration::from_millis(1), Duration::from_millis(30));
    Round { warm_up, duration, number: 0, seed: 7, stop }
}

fn disk(query: &str) -> Arc<dyn Disk> {
    stack::open(&uri::parse(&format!("null:///load?{query}")).unwrap()).unwrap().disk
}

/// Small zones, so that they fill up within the window.
const ZONES: &str = "size=64M&zoned=1&zone_size=1M&bs=4096";

fn load(query: &str, load: Load) -> (LoadResult, Stats) {
    let disk = disk(query);
    let outcome = run(&*disk, &load, &round(&Stop::new())).unwrap();
    (outcome, disk.stats())
}

#[test]
fn every_pattern_does_what_it_says_and_nothing_fails() {
    let patterns = [
        (Pattern::RandomRead, Op::Read),
        (Pattern::RandomWrite, Op::Write),
        (Pattern::RandomAppend, Op::ZoneAppend),
    ];
    for (pattern, op) in patterns {
        for (threads, depth) in [(1, 1), (2, 8), (5, 32)] {
            let (outcome, stats) = load(ZONES, Load { pattern, threads, depth });
            assert!(outcome.ios > 0 && outcome.ios <= stats.op(op).ops, "{pattern:?}");
            assert!(outcome.cpu > Duration::ZERO && outcome.wall >= Duration::from_millis(30));
            if op != Op::ZoneAppend {
                let errors: u64 = stats.ops.iter().map(|op| op.errors).sum();
                assert_eq!(errors, 0, "{pattern:?}, {threads} threads of {depth}");
            }
            // Neighbours on a small device merge by chance when they are read.
            assert!(op == Op::Read || stats.op(op).merges == 0, "{pattern:?} merges");
            let others = stats.ops.iter().map(|op| op.ops).sum::<u64>() - stats.op(op).ops;
            assert_eq!(others, stats.op(Op::ZoneReset).ops, "{pattern:?} does nothing else");
        }
    }
}

#[test]
fn more_threads_than_processors_get_through() {
    let (outcome, stats) = load(
        "size=1G&zoned=1&zone_size=4M",
        Load { pattern: Pattern::RandomWrite, threads: 96, depth: 1 },
    );
    assert!(outcome.ios > 0);
    assert_eq!(stats.op(Op::Write).errors, 0);
}

#[test]
fn a_sample_says_throughput_and_cpu_time() {
    let load = Load { pattern: Pattern::RandomRead, threads: 1, depth: 4 };
    let (outcome, _) = self::load(ZONES, load);
    let sample = outcome.sample(1);
    let value = |metric| sample.values.iter().find(|value| value.0 == metric).unwrap().1;
    assert!(value(Metric::IOPS) > 0.0 && value(Metric::CPU_PER_IO) > 0.0);
    assert_eq!(sample.rooms, []);
    assert!(outcome.slices.iter().all(|slice| slice.wall_ns >= 5e5));
    // CPU time alone tells a starved run from one that is not.
    let given = LoadResult { threads: 2, cpu: outcome.wall * 2, ..outcome };
    assert_eq!(given.sample(8).limit, None);
    let starved = LoadResult { cpu: given.wall, ..given };
    assert_eq!(starved.sample(8).limit.as_deref(), Some("machine"));
    assert_eq!(starved.sample(1).limit, None);
    // A slice with a third of its time on other work is discarded; four undisturbed ones count.
    let slice = |ops, cpu_ns| Slice { wall_ns: 1e6, cpu_ns, ops, turns: 0 };
    let slices = vec![slice(90, 6e5), slice(10, 1e6), slice(20, 1e6), slice(20, 1e6)];
    let values = LoadResult { slices, ..starved }.sample(1).values;
    assert_eq!(values.last(), Some(&(UNDISTURBED_IOPS, 20_000.0)));
}

#[test]
fn an_impossible_load_is_refused() {
    let refused = |query: &str, pattern, threads| {
        let load = Load { pattern, threads, depth: 1 };
        run(&*disk(query), &load, &round(&Stop::new())).unwrap_err().to_string()
    };
    let text = refused("size=1M", Pattern::RandomAppend, 1);
    assert_eq!(text, "load: it has 0 sequential zones, RandomAppend needs 1");
    let text = refused("size=4M&zoned=1&zone_size=1M", Pattern::RandomWrite, 5);
    assert_eq!(text, "load: it has 4 sequential zones, RandomWrite needs 5");
    // Reads fail on a zone that is offline: the status ends the measurement.
    let disk = disk("size=4M&zoned=1&zone_size=4M");
    let injection = blockyard_core::inject::Injection::Device {
        name: "zone_offline".to_owned(),
        value: "0".to_owned(),
    };
    disk.inject(&injection).unwrap();
    let load = Load { pattern: Pattern::RandomRead, threads: 2, depth: 2 };
    let error = run(&*disk, &load, &round(&Stop::new())).unwrap_err().to_string();
    assert!(error.starts_with("RandomRead on load: "), "{error}");
}

#[test]
fn a_run_that_is_to_stop_stops() {
    let stop = Stop::new();
    stop.set();
    let load = Load { pattern: Pattern::RandomRead, threads: 2, depth: 2 };
    let error = run(&*disk("size=1M"), &load, &round(&stop)).unwrap_err();
    assert!(matches!(error, LabError::Interrupted));
}

//! Compares the product's deadline policy with the decisions of a kernel's mq-deadline: replays
//! every recording in `tests/recordings`. `blockyard-lab kernel-replay deadline record` makes
//! new ones.

#![allow(clippy::unwrap_used)] // The functions that the tests share are tests too.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use blockyard_replay::file;
use blockyard_replay::replay::replay;
use blockyard_replay::trace::{EventKind, KernelTunables, Trace};
use blockyard_replay::verdict::{ReplayResult, SHARE_MIN};
use blockyard_replay::workloads::{self, WORKLOADS};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings")
}

fn recorded(workload: &str) -> Trace {
    let bytes = std::fs::read(folder().join(format!("{workload}.trace.gz"))).unwrap();
    file::trace(&file::text(&bytes).unwrap()).unwrap()
}

fn verdicts() -> BTreeMap<&'static str, ReplayResult> {
    let judged = |name| (name, replay(&recorded(name)).unwrap());
    WORKLOADS.iter().map(|workload| judged(workload.name)).collect()
}

#[test]
fn the_policy_decides_as_the_kernel_did() {
    let verdicts = verdicts();
    let bad: Vec<_> = verdicts.iter().filter(|(_, verdict)| !verdict.is_good(SHARE_MIN)).collect();
    assert!(bad.is_empty(), "{bad:#?}");
    let decisions: usize = verdicts.values().map(|verdict| verdict.decisions).sum();
    let equal: usize = verdicts.values().map(|verdict| verdict.equal).sum();
    assert!(equal as f64 >= 0.998 * decisions as f64, "{equal} of {decisions}");
    // A recording in which nothing happens would prove nothing.
    for (name, verdict) in &verdicts {
        assert!(verdict.decisions >= 1000, "{name}: {}", verdict.decisions);
    }
    assert!(verdicts["read-expiry"].expired >= 100);
    assert!(verdicts["write-expiry"].expired >= 100);
    assert!(verdicts["at-once"].expired >= 500);
    assert!(verdicts["aging"].aged >= 50);
    assert_eq!(verdicts["classes"].aged, 0);
    for name in ["sequential", "backward", "no-front-merges"] {
        assert!(verdicts[name].joins >= 100, "{name}: {}", verdicts[name].joins);
    }
    assert_eq!(verdicts["no-merges"].joins, 0);
}

/// Whether a recording still matches with another tunable than the kernel had.
fn is_good_with(workload: &str, tunable: &str, value: u32) -> bool {
    let mut trace = recorded(workload);
    *trace.header.tunables.value_mut(tunable).unwrap() = value;
    replay(&trace).unwrap().is_good(SHARE_MIN)
}

#[test]
fn another_rule_would_be_noticed() {
    for (workload, tunable, value) in [
        ("mixed", "fifo_batch", 15),
        ("mixed", "writes_starved", 1),
        ("starved-1", "writes_starved", 0),
        ("starved-5", "writes_starved", 4),
        ("batch-64", "fifo_batch", 63),
        ("batch-4", "fifo_batch", 5),
        ("read-expiry", "read_expire", 500),
        ("write-expiry", "write_expire", 5000),
        ("at-once", "read_expire", 500),
        ("aging", "prio_aging_expire", 10_000),
        ("classes", "prio_aging_expire", 0),
    ] {
        assert!(!is_good_with(workload, tunable, value), "{workload} with {tunable}={value}");
    }
}

#[test]
fn a_swapped_decision_is_found_and_none_after_it() {
    let mut trace = recorded("mixed");
    let issues: Vec<usize> = (0..trace.events.len())
        .filter(|at| trace.events[*at].what == EventKind::Issue)
        .skip(1000)
        .take(40)
        .collect();
    // Two requests of one batch that are far enough apart, both of which waited before.
    let pair = issues.windows(6).find(|window| {
        window[5] - window[0] == 5
            && window.iter().all(|at| trace.events[*at].kind == trace.events[window[0]].kind)
    });
    let (first, second) = (pair.unwrap()[1], pair.unwrap()[4]);
    let (mut one, mut other) = (trace.events[first], trace.events[second]);
    std::mem::swap(&mut one.at_us, &mut other.at_us);
    (trace.events[first], trace.events[second]) = (other, one);
    let verdict = replay(&trace).unwrap();
    assert!(verdict.unexplained >= 1, "{verdict:#?}");
    assert!(verdict.unexplained + verdict.explained_all() <= 40, "{verdict:#?}");
    assert_eq!(verdict.differences[0].event, first + 1);
}

#[test]
fn every_recording_is_of_its_workload() {
    let files = std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap());
    let mut bytes = 0;
    for file in files {
        bytes += file.metadata().unwrap().len();
        let name = file.file_name().into_string().unwrap();
        let workload = workloads::find(name.strip_suffix(".trace.gz").unwrap()).unwrap();
        let header = recorded(workload.name).header;
        assert_eq!((header.workload.as_str(), header.nomerges), (workload.name, workload.nomerges));
        let jobs: Vec<&str> = workload.jobs.split_whitespace().collect();
        assert!(header.fio.ends_with(&jobs.join(" ")), "{}", header.fio);
        let mut wanted = KernelTunables::default();
        for (name, value) in workload.tunables {
            *wanted.value_mut(name).unwrap() = *value;
        }
        for (name, (had, wanted)) in KernelTunables::NAMES
            .into_iter()
            .zip(header.tunables.values().into_iter().zip(wanted.values()))
        {
            // The kernel rounds times to its ticks.
            let same = match name.ends_with("_expire") {
                true => header.tick.of_ms(had) == header.tick.of_ms(wanted),
                false => had == wanted,
            };
            assert!(same, "{}: {name} was {had}", workload.name);
        }
    }
    assert!(bytes < 600_000, "{bytes} bytes of recordings");
}

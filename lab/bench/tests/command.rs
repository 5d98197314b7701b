//! `blockyard-lab` as users start it, on its smallest experiment.
#![allow(clippy::unwrap_used)] // A test that cannot go on ends where it stands.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use blockyard_lab::scratch::Scratch;
use serde_json::Value;

fn lab(directory: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard-lab"));
    command.current_dir(directory).args(args).stdin(Stdio::null());
    command
}

fn run(directory: &Path, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = lab(directory, args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap_or(-1), text(stdout), text(stderr))
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn a_run_is_printed_kept_and_reported() {
    let scratch = Scratch::new().unwrap();
    let dir = scratch.path();
    let (code, out, error) = run(dir, &["run", "clock", "--seconds", "0.01", "--json"]);
    assert_eq!(code, 0, "{error}");
    let results = json(&out);
    assert_eq!(results["schema"], 2);
    let row = &results["rows"][0];
    assert_eq!((&row["variant"], &row["rounds"]), (&"wall".into(), &5.into()), "{row}");
    assert_eq!(row["values"].as_array().unwrap().len(), 5);
    assert!(error.contains("clock: round 5 of 5"), "{error}");

    let index = json(&std::fs::read_to_string(dir.join("lab-results/latest.json")).unwrap());
    let file = dir.join("lab-results").join(index["latest"]["clock"].as_str().unwrap());
    assert_eq!(json(&std::fs::read_to_string(file).unwrap()), results);

    let (code, out, error) = run(dir, &["report"]);
    assert_eq!((code, out.as_str()), (0, "lab-results/report.html\nlab-results/report.md\n"));
    assert_eq!(error, "");
    for page in out.lines() {
        let page = std::fs::read_to_string(dir.join(page)).unwrap();
        assert!(page.contains("the cost of reading the clock"));
    }
}

#[test]
fn a_first_look_at_one_cell_is_a_table() {
    let scratch = Scratch::new().unwrap();
    let args = ["run", "clock", "--quick", "--seconds", "0.01", "--only", "wall/", "--out", "o"];
    let (code, out, error) = run(scratch.path(), &args);
    assert_eq!(code, 0, "{error}");
    assert!(out.contains("3 rounds, a first look"), "{out}");
    assert!(out.contains("ns per op") && out.contains("\nwall "), "{out}");
    assert!(!out.contains("\nthread "), "{out}");
}

#[test]
fn wrong_words_are_answered_with_the_right_ones() {
    let scratch = Scratch::new().unwrap();
    let cases: [(&[&str], i32, &str); 6] = [
        (&["run", "clok"], 2, "did you mean `clock`?"),
        (&["run", "clock", "--only", "wal/"], 2, "did you mean `wall`?"),
        (&["run", "clock", "--only", "wall"], 2, "VARIANT/WORKLOAD"),
        (&["run", "clock", "--rounds", "4"], 2, "at least 5"),
        (&["run", "clock", "--engine", "none.so"], 2, "none.so"),
        (&["report"], 1, "blockyard-lab run"),
    ];
    for (args, wanted, said) in cases {
        let (code, out, error) = run(scratch.path(), args);
        assert_eq!((code, out.as_str()), (wanted, ""), "{args:?}: {error}");
        assert!(error.contains(said), "{args:?}: {error}");
    }
    let left: Vec<_> = std::fs::read_dir(scratch.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn every_experiment_is_listed_with_what_it_measures() {
    let scratch = Scratch::new().unwrap();
    let (code, out, error) = run(scratch.path(), &["list", "--json"]);
    assert_eq!(code, 0, "{error}");
    let list = json(&out);
    assert!(!list.as_array().unwrap().is_empty());
    for experiment in list.as_array().unwrap() {
        assert!(experiment["cells"].as_u64() > Some(0), "{experiment}");
        assert!(!experiment["variants"].as_array().unwrap().is_empty(), "{experiment}");
    }
    let (_, out, _) = run(scratch.path(), &["list"]);
    assert!(out.starts_with("NAME ") && out.contains("\nclock "), "{out}");
}

#[test]
fn ctrl_c_keeps_the_rounds_that_are_complete() {
    let scratch = Scratch::new().unwrap();
    let args = ["run", "clock", "--seconds", "0.01", "--rounds", "1000"];
    let mut command = lab(scratch.path(), &args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(errors.any(|line| line.unwrap().contains("round 3 of 1000")));
    let kill = format!("kill -INT {}", child.id());
    assert!(Command::new("/bin/sh").args(["-c", &kill]).status().unwrap().success());
    let last = errors.map(Result::unwrap).last().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{last}");
    assert!(last.contains("interrupted; what was measured is in lab-results/run-"), "{last}");
    let (code, _, error) = run(scratch.path(), &["report"]);
    assert_eq!(code, 0, "{error}");
    let kept = last.rsplit(' ').next().unwrap();
    let results = json(&std::fs::read_to_string(scratch.path().join(kept)).unwrap());
    assert_eq!(results["interrupted"], true);
    assert!(results["rows"][0]["rounds"].as_u64() >= Some(2), "{}", results["rows"][0]);
}

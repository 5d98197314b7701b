//! The table of headline figures is that of the stored results.
#![allow(clippy::unwrap_used)] // A test that cannot go on ends where it stands.

use std::fs;
use std::path::{Path, PathBuf};

use blockyard_lab::headlines;
use blockyard_lab::results::Results;

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

fn stored() -> Vec<Results> {
    headlines::read_stored(&docs().join("measurements/headlines.json")).unwrap()
}

fn page() -> String {
    fs::read_to_string(docs().join("measuring.md")).unwrap()
}

#[test]
fn the_table_is_made_from_the_stored_results() {
    let (shown, made) = (page(), headlines::page(&stored(), &page()).unwrap());
    assert!(shown == made, "`blockyard-lab headlines` writes the table");
}

#[test]
fn each_figure_of_the_table_is_a_median_of_the_results() {
    let mut runs = stored();
    let ratio = &mut runs[0].ratios[0];
    ratio.median = 7.77;
    let made = headlines::page(&runs, &page()).unwrap();
    assert!(made.contains("7.77 (") && !page().contains("7.77 ("), "{made}");
}

/// Results are stored without the place of their files on the machine that measured.
#[test]
fn results_are_stored_without_where_they_were() {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stored-headlines");
    fs::create_dir_all(place.join("measurements")).unwrap();
    fs::write(place.join("measuring.md"), page()).unwrap();
    let mut files = Vec::new();
    for (number, mut run) in (0..).zip(stored()) {
        run.command = format!("{} --out /srv/results --quick", run.command);
        files.push(place.join(format!("{number}.json")));
        fs::write(files.last().unwrap(), serde_json::to_vec(&run).unwrap()).unwrap();
    }
    headlines::update(&files, &place).unwrap();
    let made = headlines::read_stored(&place.join("measurements/headlines.json")).unwrap();
    for (made, before) in made.iter().zip(stored()) {
        assert_eq!(made.command, format!("{} --quick", before.command));
        assert!(!before.command.contains("--out"), "{}", before.command);
    }
    assert_eq!(made.len(), files.len());
}

#[test]
fn a_comparison_that_is_missing_or_was_measured_twice_is_refused() {
    let mut runs = stored();
    runs.extend(stored());
    let error = headlines::page(&runs, &page()).unwrap_err().to_string();
    assert!(error.contains("more than one comparison"), "{error}");
    let mut runs = stored();
    let first = runs[0].ratios[0].clone();
    let is_other = |workload: &str| workload != first.workload;
    runs.iter_mut().for_each(|run| run.ratios.retain(|ratio| is_other(&ratio.workload)));
    let error = headlines::page(&runs, &page()).unwrap_err().to_string();
    assert!(error.contains("no comparison") && error.contains(&first.workload), "{error}");
    assert!(headlines::page(&stored(), "no marks").is_err());
}

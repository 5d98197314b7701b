//! A report's numbers are those of its results, and a browser draws it.
#![allow(clippy::unwrap_used)] // A test that cannot go on ends where it stands.

use std::path::{Path, PathBuf};
use std::process::Command;

use blockyard_lab::quantity::{self, read_back};
use blockyard_lab::report::{self, html, markdown};
use blockyard_lab::results::Results;
use serde_json::Value;

fn sample() -> Vec<Results> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sample.json");
    report::runs(&[file], Path::new("")).unwrap()
}

/// The text between two marks, and the text after it.
fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<(&'a str, &'a str)> {
    let text = &text[text.find(start)? + start.len()..];
    let at = text.find(end)?;
    Some((&text[..at], &text[at..]))
}

/// The JSON in a page.
fn embedded(page: &str) -> Value {
    let start = "<script type=\"application/json\" id=\"results\">";
    serde_json::from_str(between(page, start, "</script>").unwrap().0).unwrap()
}

#[test]
fn every_number_of_the_page_is_in_its_json() {
    let runs = sample();
    let page = html::page(&runs).unwrap();
    let json = embedded(&page);
    assert_eq!(json["runs"][0], serde_json::to_value(&runs[0]).unwrap());
    let (mut rest, mut count) = (page.as_str(), 0);
    while let Some((path, after)) = between(rest, "data-path=\"", "\"") {
        let (unit, after) = between(after, "data-unit=\"", "\"").unwrap();
        let (text, after) = between(after, ">", "</span>").unwrap();
        let value = json.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path}"));
        let wanted = match unit {
            "ratio" => quantity::ratio(value),
            "count" => quantity::count(value as u64),
            "percent" => format!("{:.0} %", value * 100.0),
            "deviation" => format!("{:+.1} %", value * 100.0),
            unit => quantity::quantity(value, unit),
        };
        assert_eq!(text, wanted, "{path}");
        // A duration in seconds has no prefix to get wrong, and a deviation no ratio.
        if !matches!(unit, "deviation" | "percent" | "s") {
            let back = read_back(text).unwrap();
            let off = if value == 0.0 { back } else { back / value - 1.0 };
            assert!(off.abs() < 0.006, "{path}: {text} is not {value}");
        }
        (rest, count) = (after, count + 1);
    }
    assert!(count > 500, "{count} numbers");
}

#[test]
fn every_cell_of_numbers_says_where_they_are_from() {
    let page = html::page(&sample()).unwrap();
    for class in ["number", "spread"] {
        let mut rest = page.as_str();
        while let Some((cell, after)) = between(rest, &format!("<td class=\"{class}\">"), "</td>") {
            let mut text = String::new();
            let mut markup = cell;
            // The text outside of the numbers' own elements.
            while let Some(at) = markup.find("<span data-path=") {
                text.push_str(&markup[..at]);
                markup = &markup[at..];
                markup = &markup[markup.find("</span>").unwrap() + "</span>".len()..];
            }
            text.push_str(markup);
            assert!(!text.contains(|c: char| c.is_ascii_digit()), "{cell}");
            rest = after;
        }
        assert!(rest.len() < page.len(), "{class}: no such cells");
    }
}

#[test]
fn every_measured_row_is_in_the_markdown() {
    let runs = sample();
    let text = markdown::text(&runs);
    let run = &runs[0];
    let mut count = 0;
    for info in &run.experiments {
        let section = text.split("\n## ").find(|part| part.starts_with(&format!("{}:", info.name)));
        for table in section.unwrap().split("\n### ") {
            let workload = table.lines().next().unwrap();
            let mut lines = table.lines().filter(|line| line.starts_with('|'));
            let cells = |line: &str| -> Vec<String> {
                line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
            };
            let Some(headings) = lines.next().map(cells) else { continue };
            for line in lines.map(cells).filter(|line| !line[0].contains("---")) {
                for row in run.rows.iter().filter(|row| {
                    row.experiment == info.name
                        && row.workload == workload
                        && row.variant == line[0]
                        && row.jobs.to_string() == line[1]
                }) {
                    let name = row.metric.replace('_', " ");
                    let at = headings.iter().position(|heading| *heading == name).unwrap();
                    let numbers = line[at].trim_end_matches(')').replace(" (", " to ");
                    let numbers: Vec<f64> =
                        numbers.split(" to ").map(|number| read_back(number).unwrap()).collect();
                    for (shown, value) in numbers.iter().zip([row.median, row.min, row.max]) {
                        assert!((shown / value - 1.0).abs() < 0.006, "{line:?}: {row:?}");
                    }
                    assert_eq!(numbers.len(), 3);
                    count += 1;
                }
            }
        }
    }
    assert_eq!(count, run.rows.len());
}

#[test]
fn names_from_a_file_are_no_markup() {
    let mut runs = sample();
    let evil = "</script><img src=x onerror=alert(1)>\"'|`";
    runs[0].machine.cpu = evil.to_owned();
    runs[0].experiments[0].title = evil.to_owned();
    runs[0].notes[0].text = evil.to_owned();
    let page = html::page(&runs).unwrap();
    assert!(!page.contains("<img"), "markup came through");
    assert_eq!(embedded(&page)["runs"][0]["machine"]["cpu"], evil);
    assert!(!markdown::text(&runs).contains(" <img"));
}

#[test]
fn the_page_contains_the_vendored_script() {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/yard/assets/uplot");
    let said = std::fs::read_to_string(assets.join("README.md")).unwrap();
    for file in ["uPlot-1.6.32.iife.min.js", "uPlot-1.6.32.min.css"] {
        let output = Command::new("sha256sum").arg(assets.join(file)).output().unwrap();
        let sum = String::from_utf8(output.stdout).unwrap();
        let sum = sum.split(' ').next().unwrap().to_owned();
        let row = said.lines().find(|line| line.contains(&format!("`{file}`"))).unwrap();
        assert!(row.contains(&sum), "{file}: {sum}");
    }
}

/// Runs the browser on a page with these arguments, and returns its standard output.
fn browse(page: &Path, arguments: &[&str]) -> String {
    let profile = page.with_extension("profile");
    let browser = "chromium-headless-shell";
    let output = Command::new(browser)
        .args(["--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .output();
    let output =
        output.unwrap_or_else(|error| panic!("{browser}: {error}; `make deps` installs it"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{browser}: {}\n{errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Writes a page and takes a screenshot of 1280 x 4000.
fn picture(directory: &Path, name: &str, page: &str) -> (PathBuf, Vec<u8>) {
    let file = directory.join(format!("{name}.html"));
    std::fs::write(&file, page).unwrap();
    let png = directory.join(format!("{name}.png"));
    let screenshot = format!("--screenshot={}", png.display());
    browse(&file, &["--window-size=1280,4000", &screenshot]);
    (file, std::fs::read(&png).unwrap())
}

/// For a comparison whose rounds scattered over eight orders of magnitude the report once said
/// `11.7x (95 %: 0.0011x to 124000x)`, and the scale reduced all other intervals to points.
#[test]
fn a_ratio_whose_interval_says_nothing_is_no_figure() {
    let mut runs = sample();
    let ratio = &mut runs[0].ratios[0];
    (ratio.median, ratio.low, ratio.high) = (11.7, 0.0011, 124_000.0);
    let (page, text) = (html::page(&runs).unwrap(), markdown::text(&runs));
    for report in [&page, &text] {
        assert!(report.contains("no figure"));
        assert!(!report.contains("124000x") && !report.contains("0.0011x"));
    }
    assert!(!page.contains("data-path=\"/runs/0/ratios/0/median\""));
    assert!(page.contains("data-path=\"/runs/0/ratios/1/median\""));
    assert!(!html::page(&sample()).unwrap().contains("no figure"));
}

/// A script that reports the faults of a drawn page, a word for each, and the number of checked
/// items.
const LOOK: &str = "<script>(() => {\n\
    const runs = JSON.parse(document.getElementById('results').textContent).runs;\n\
    const wrong = [];\n\
    let [tables, plots] = [0, 0];\n\
    for (const wide of document.querySelectorAll('.wide')) {\n\
      tables += 1;\n\
      if (wide.scrollWidth > wide.clientWidth) wrong.push('cut:' + wide.scrollWidth);\n\
    }\n\
    for (const figure of document.querySelectorAll('figure[data-plot]')) {\n\
      const { drawn } = figure.querySelector('.canvas');\n\
      const { plot, workload, metric, run, experiment } = figure.dataset;\n\
      const { min, max } = drawn.scales.y;\n\
      const expected = Object.entries({ experiment, workload, metric });\n\
      const is = (row) => expected.every(([name, value]) => row[name] === value);\n\
      const axis = getComputedStyle(figure.querySelector('.u-legend .u-series'));\n\
      if (axis.display !== 'none') wrong.push('axis');\n\
      if (plot === 'jobs') {\n\
        plots += 1;\n\
        const rows = runs[run].rows.filter(is);\n\
        if (rows.some((row) => row.min < min || row.max > max)) wrong.push('outside:' + metric);\n\
      }\n\
    }\n\
    const root = document.documentElement;\n\
    root.dataset.wrong = wrong.join(' ');\n\
    root.dataset.looked = `${tables > 5} ${plots}`;\n\
    })()</script>";

/// A report once had three faults. Error bars ended outside of the plot, and tables were cut at the
/// right. The axis was in the legend as if it were a series.
#[test]
fn the_plots_fit_their_area_and_show_the_data() {
    let directory = blockyard_lab::scratch::Scratch::new().unwrap();
    let mut runs = sample();
    // Rounds that differ widely, as on a busy machine.
    for row in runs[0].rows.iter_mut().filter(|row| row.metric == "iops") {
        (row.min, row.max) = (row.min / 40.0, row.max * 6.0);
    }
    let page = html::page(&runs).unwrap().replace("</body>", &format!("{LOOK}</body>"));
    let (file, _) = picture(directory.path(), "look", &page);
    let dom = browse(&file, &["--window-size=1000,4000", "--dump-dom"]);
    let root = between(&dom, "<html", ">").unwrap().0;
    assert!(root.contains("data-wrong=\"\""), "{root}");
    assert!(root.contains("data-looked=\"true 2\""), "{root}");
}

#[test]
fn a_browser_draws_the_page() {
    let directory = blockyard_lab::scratch::Scratch::new().unwrap();
    let page = html::page(&sample()).unwrap();
    let (file, png) = picture(directory.path(), "report", &page);
    let (_, blank) = picture(directory.path(), "blank", "<!doctype html><p>.");
    for png in [&png, &blank] {
        assert_eq!(png[..8], *b"\x89PNG\r\n\x1a\n");
        // IHDR: width and height.
        assert_eq!(png[16..24], [0, 0, 0x05, 0, 0, 0, 0x0f, 0xa0]);
    }
    // A blank page compresses to a small file; text and plots do not.
    let (drawn, blank) = (png.len(), blank.len());
    assert!(drawn > 10 * blank, "{drawn} bytes, a blank page has {blank}");

    let dom = browse(&file, &["--dump-dom"]);
    let root = between(&dom, "<html", ">").unwrap().0;
    assert!(!root.contains("data-error"), "the script failed: {root}");
    let figures = page.matches("<figure data-plot=").count();
    assert!(figures > 5);
    assert!(root.contains(&format!("data-plots=\"{figures}\"")), "{figures} figures: {root}");
    assert_eq!(dom.matches("<canvas").count(), figures);
}

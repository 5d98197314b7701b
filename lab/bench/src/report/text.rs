//! Results on a terminal: a compact table per workload, then the comparisons.

use std::io::{self, Write};

use blockyard_yard::table::Table;

use super::reference_rows::tables;
use super::view::{Grid, IndexedValue, Section, heading, percent, sentence, spread_percent};
use crate::quantity::{count, quantity};
use crate::results::Results;

/// Prints what a run measured.
///
/// # Errors
/// Those of `out`.
pub fn print(results: &Results, out: &mut impl Write) -> io::Result<()> {
    let runs = std::slice::from_ref(results);
    let load = |load: Option<f64>| load.map_or("?".to_owned(), |load| format!("{load:.2}"));
    let machine = &results.machine;
    writeln!(
        out,
        "{}, {} processors, Linux {}, load {} before and {} after",
        machine.cpu,
        machine.processors,
        machine.kernel,
        load(results.load_before),
        load(results.load_after),
    )?;
    for section in Section::all(runs) {
        print_section(&section, out)?;
    }
    Ok(())
}

fn print_section(section: &Section<'_>, out: &mut impl Write) -> io::Result<()> {
    let (info, results) = (section.info, section.results);
    let marks = [
        (results.quick, ", a first look"),
        (!results.only.is_empty(), ", only some of its cells"),
        (info.interrupted, ", interrupted"),
    ];
    let marks: String = marks.iter().filter(|(is, _)| *is).map(|(_, text)| *text).collect();
    writeln!(out, "\n{}: {} ({} rounds{marks})", info.name, info.title, info.rounds)?;
    if let Some(others) = section.others() {
        writeln!(out, "{others}")?;
    }
    for grid in section.grids() {
        let about = if grid.about.is_empty() { "" } else { ": " };
        writeln!(out, "\n{}{about}{}", grid.workload, grid.about)?;
        print_grid(&grid, out)?;
        for (_, ratio) in section.ratios().filter(|(_, ratio)| ratio.workload == grid.workload) {
            let noun = if ratio.jobs == 1 { "job" } else { "jobs" };
            writeln!(out, "  {} {noun}: {}", ratio.jobs, sentence(ratio))?;
        }
    }
    print_published(section, out)?;
    print_fractions(section, out)?;
    print_rooms(section, out)?;
    for (_, cell) in section.part(&results.not_measured, |cell| &cell.experiment) {
        let rounds = match cell.rounds {
            0 => String::new(),
            rounds => format!(" after {rounds} rounds"),
        };
        let place = format!("{}/{}/{}", cell.variant, cell.workload, cell.jobs);
        writeln!(out, "not measured{rounds}: {place}: {}", cell.why)?;
    }
    for (_, note) in section.part(&results.notes, |note| &note.experiment) {
        writeln!(out, "note: {}", note.text)?;
    }
    Ok(())
}

fn print_grid(grid: &Grid<'_>, out: &mut impl Write) -> io::Result<()> {
    let is_limited = grid.lines.iter().any(|line| line.limited_by.is_some());
    let metrics = grid.metrics.iter().map(|(name, _)| heading(name));
    let limit = is_limited.then(|| "limited by".to_owned());
    let mut table = Table::new(
        ["variant".to_owned(), "jobs".to_owned()].into_iter().chain(metrics).chain(limit),
    );
    for line in &grid.lines {
        let mark = if line.source.is_some() { " (published)" } else { "" };
        let values = line.values.iter().map(|value| match value {
            Some(IndexedValue::Measured(_, row)) => {
                format!("{} ±{:.0}%", quantity(row.median, &row.unit), spread_percent(row))
            }
            Some(IndexedValue::Published(_, row)) => quantity(row.value, &row.unit),
            None => "-".to_owned(),
        });
        let limit = is_limited.then(|| line.limited_by.unwrap_or("-").to_owned());
        let first = [format!("{}{mark}", line.variant), line.jobs.to_string()];
        table.row(first.into_iter().chain(values).chain(limit));
    }
    table.print(&[], out)
}

fn print_published(section: &Section<'_>, out: &mut impl Write) -> io::Result<()> {
    for table in tables(section) {
        writeln!(
            out,
            "\n{}, {} jobs, compared with {}",
            heading(table.metric),
            table.jobs,
            table.source
        )?;
        let first = ["workload", ""].into_iter();
        let mut columns = Table::new(first.chain(table.variants.iter().copied()));
        for (workload, published, values) in &table.lines {
            let first = if *published { ["", "published"] } else { [*workload, "here"] };
            columns.row(first.into_iter().chain(values.iter().map(String::as_str)));
        }
        columns.print(&[""], out)?;
    }
    Ok(())
}

fn print_fractions(section: &Section<'_>, out: &mut impl Write) -> io::Result<()> {
    let mut fractions = section.fractions().peekable();
    if fractions.peek().is_none() {
        return Ok(());
    }
    writeln!(out, "\nof what the machine can do at best")?;
    let mut table = Table::new(["variant", "workload", "metric", "of", "jobs", "best", "reached"]);
    for (_, fraction) in fractions {
        table.row([
            fraction.variant.clone(),
            fraction.workload.clone(),
            heading(&fraction.metric),
            fraction.limit.clone(),
            fraction.jobs.to_string(),
            quantity(fraction.best, &fraction.unit),
            percent(fraction.fraction),
        ]);
    }
    table.print(&["workload", "metric", "of"], out)
}

fn print_rooms(section: &Section<'_>, out: &mut impl Write) -> io::Result<()> {
    let mut rooms = section.part(&section.results.rooms, |room| &room.experiment).peekable();
    if rooms.peek().is_none() {
        return Ok(());
    }
    writeln!(out, "\nrooms")?;
    let headings = [
        "variant",
        "workload",
        "room",
        "jobs",
        "entered",
        "contended",
        "hold p50, p99",
        "wait p50, p99",
    ];
    let mut table = Table::new(headings);
    for (_, room) in rooms {
        let times = |ns: [f64; 3]| format!("{}, {}", quantity(ns[0], "ns"), quantity(ns[1], "ns"));
        table.row([
            room.variant.clone(),
            room.workload.clone(),
            room.count.room.clone(),
            room.jobs.to_string(),
            count(room.count.acquisitions),
            count(room.count.contended),
            times(room.count.hold_ns),
            times(room.count.wait_ns),
        ]);
    }
    table.print(&["workload", "room"], out)
}

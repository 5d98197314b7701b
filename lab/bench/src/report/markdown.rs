//! The report as Markdown: the tables of the page, without its plots.

use std::fmt::{self, Write};

use super::reference_rows::tables;
use super::view::{IndexedValue, Section, heading, percent, sentence};
use crate::quantity::{count, quantity};
use crate::results::Results;

/// The report of some runs.
pub fn text(runs: &[Results]) -> String {
    let mut text = String::from("# Blockyard lab\n");
    write(&mut text, runs).expect("a string takes all");
    text
}

fn write(out: &mut String, runs: &[Results]) -> fmt::Result {
    for run in runs {
        let machine = &run.machine;
        let load = |load: Option<f64>| load.map_or("?".to_owned(), |load| quantity(load, ""));
        let memory = machine.memory_bytes.map(|bytes| format!(", {}", memory(bytes)));
        writeln!(
            out,
            "\nBegan {}: {}, {} processors{}{}, Linux {}, governor {}, load {} before and {} \
             after; {}.",
            run.started,
            plain(&machine.cpu),
            machine.processors,
            if machine.is_virtual { ", virtual" } else { "" },
            memory.unwrap_or_default(),
            plain(&machine.kernel),
            plain(machine.governor.as_deref().unwrap_or("not shown")),
            load(run.load_before),
            load(run.load_after),
            plain(&run.program),
        )?;
        writeln!(out, "\n    {}", run.command.replace('\n', " "))?;
    }
    for section in Section::all(runs) {
        write_section(out, &section)?;
    }
    Ok(())
}

fn memory(bytes: u64) -> String {
    quantity(bytes as f64, "B")
}

fn write_section(out: &mut String, section: &Section<'_>) -> fmt::Result {
    let (info, results) = (section.info, section.results);
    writeln!(
        out,
        "\n## {}: {}\n\n{}\n",
        plain(&info.name),
        plain(&info.title),
        plain(&info.about)
    )?;
    let marks = [
        (results.quick, "; a first look"),
        (!results.only.is_empty(), "; only some of its cells"),
        (info.interrupted, "; interrupted"),
    ];
    let marks: String = marks.iter().filter(|(is, _)| *is).map(|(_, mark)| *mark).collect();
    let each = quantity(info.seconds * 1e9, "ns");
    writeln!(out, "{} rounds, {each} each{marks}.\n", info.rounds)?;
    if let Some(others) = section.others() {
        writeln!(out, "{others}\n")?;
    }
    for variant in &info.variants {
        let (name, kind) = (plain(&variant.name), plain(&variant.kind));
        writeln!(out, "- **{name}** ({kind}): {}", plain(&variant.about))?;
    }
    write_grids(out, section)?;
    write_published(out, section)?;
    write_ratios(out, section)?;
    write_fractions(out, section)?;
    write_rooms(out, section)?;
    let cells = section.part(&results.not_measured, |cell| &cell.experiment);
    let rows: Vec<_> = cells
        .map(|(_, cell)| {
            let (jobs, rounds) = (cell.jobs.to_string(), cell.rounds.to_string());
            vec![plain(&cell.variant), plain(&cell.workload), jobs, rounds, plain(&cell.why)]
        })
        .collect();
    let headings = ["variant", "workload", "jobs", "rounds before", "why"];
    titled(out, "Not measured", &headings, &rows)?;
    for (_, note) in section.part(&results.notes, |note| &note.experiment) {
        writeln!(out, "\nNote: {}", plain(&note.text))?;
    }
    Ok(())
}

fn write_grids(out: &mut String, section: &Section<'_>) -> fmt::Result {
    for grid in section.grids() {
        let mut headings = vec!["variant".to_owned(), "jobs".to_owned()];
        headings.extend(grid.metrics.iter().map(|(metric, _)| heading(metric)));
        headings.push("limited by or from".to_owned());
        let rows = grid.lines.iter().map(|line| {
            let mark = if line.source.is_some() { " (published)" } else { "" };
            let mut row = vec![format!("{}{mark}", plain(line.variant)), line.jobs.to_string()];
            row.extend(line.values.iter().map(|value| match value {
                Some(IndexedValue::Measured(_, row)) => {
                    let of = |value| quantity(value, &row.unit);
                    format!("{} ({} to {})", of(row.median), of(row.min), of(row.max))
                }
                Some(IndexedValue::Published(_, row)) => quantity(row.value, &row.unit),
                None => String::new(),
            }));
            row.push(plain(line.source.or(line.limited_by).unwrap_or_default()));
            row
        });
        let rows: Vec<_> = rows.collect();
        let title = format!("{}\n\n{}", plain(grid.workload), plain(grid.about));
        let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
        titled(out, title.trim_end(), &headings, &rows)?;
    }
    Ok(())
}

fn write_published(out: &mut String, section: &Section<'_>) -> fmt::Result {
    for table in tables(section) {
        let (metric, jobs, source) = (heading(table.metric), table.jobs, plain(table.source));
        let title = format!("As published: {metric}, {jobs} jobs, compared with {source}");
        let headings: Vec<&str> =
            ["workload", "from"].into_iter().chain(table.variants.iter().copied()).collect();
        let rows = table.lines.iter().map(|(workload, published, values)| {
            let from = if *published { "published" } else { "here" };
            let first = [plain(workload), from.to_owned()].into_iter();
            first.chain(values.iter().cloned()).collect()
        });
        let rows: Vec<Vec<String>> = rows.collect();
        titled(out, &title, &headings, &rows)?;
    }
    Ok(())
}

fn write_ratios(out: &mut String, section: &Section<'_>) -> fmt::Result {
    let mut ratios = section.ratios().peekable();
    if ratios.peek().is_some() {
        writeln!(out, "\n### What it says\n")?;
    }
    for (_, ratio) in ratios {
        let noun = if ratio.jobs == 1 { "job" } else { "jobs" };
        let (workload, jobs) = (plain(&ratio.workload), ratio.jobs);
        writeln!(out, "- {workload}, {jobs} {noun}: {}", plain(&sentence(ratio)))?;
    }
    Ok(())
}

fn write_fractions(out: &mut String, section: &Section<'_>) -> fmt::Result {
    let rows = section.fractions().map(|(_, fraction)| {
        vec![
            plain(&fraction.variant),
            plain(&fraction.workload),
            fraction.jobs.to_string(),
            heading(&fraction.metric),
            plain(&fraction.limit),
            quantity(fraction.best, &fraction.unit),
            percent(fraction.fraction),
        ]
    });
    let rows: Vec<_> = rows.collect();
    let headings = ["variant", "workload", "jobs", "metric", "of", "best", "reached"];
    titled(out, "Of what the machine can do at best", &headings, &rows)
}

fn write_rooms(out: &mut String, section: &Section<'_>) -> fmt::Result {
    let rooms = section.part(&section.results.rooms, |room| &room.experiment);
    let times = |ns: [f64; 3]| ns.map(|ns| quantity(ns, "ns")).join(", ");
    let rows = rooms.map(|(_, room)| {
        vec![
            plain(&room.count.room),
            plain(&room.variant),
            plain(&room.workload),
            room.jobs.to_string(),
            count(room.count.acquisitions),
            count(room.count.contended),
            times(room.count.hold_ns),
            times(room.count.wait_ns),
        ]
    });
    let rows: Vec<_> = rows.collect();
    let headings = [
        "room",
        "variant",
        "workload",
        "jobs",
        "entered",
        "contended",
        "hold p50, p99, max",
        "wait p50, p99, max",
    ];
    titled(out, "Rooms", &headings, &rows)
}

/// A table under a heading; empty if it has no rows.
fn titled(out: &mut String, title: &str, headings: &[&str], rows: &[Vec<String>]) -> fmt::Result {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n### {title}\n\n| {} |", headings.join(" | "))?;
    writeln!(out, "|{}", " --- |".repeat(headings.len()))?;
    rows.iter().try_for_each(|row| writeln!(out, "| {} |", row.join(" | ")))
}

/// Text with escaped markup, on one line.
fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\r' => out.push(' '),
            '|' | '<' | '*' | '`' | '[' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out
}

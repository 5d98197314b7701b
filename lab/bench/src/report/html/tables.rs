//! The tables of the page.

use super::{colour, escaped, number, push};
use crate::report::view::{Grid, GridLine, IndexedValue, Section, heading};
use crate::results::Results;

/// The time and machine of the runs.
pub(super) fn runs(page: &mut String, runs: &[Results]) {
    page.push_str(
        "<section id=\"runs\">\n<h2>Runs</h2>\n<div class=\"wide\"><table>\n<tr><th>began</th>\
         <th>experiments</th><th>machine</th><th class=\"number\">processors</th>\
         <th class=\"number\">memory</th><th>kernel</th><th>governor</th>\
         <th class=\"number\">load before</th><th class=\"number\">load after</th>\
         <th class=\"number\">took</th></tr>\n",
    );
    for (at, run) in runs.iter().enumerate() {
        let machine = &run.machine;
        let names: Vec<&str> = run.experiments.iter().map(|info| info.name.as_str()).collect();
        let kind = if machine.is_virtual { ", virtual" } else { "" };
        let optional = |field: &str, value: Option<f64>, unit: &str| {
            let path = format!("/runs/{at}/{field}");
            value.map_or("?".to_owned(), |value| number(&path, value, unit))
        };
        push(
            page,
            format_args!(
                "<tr><td class=\"time\">{}</td><td>{}</td><td>{}{kind}</td>\
                 <td class=\"number\">{}</td>\
                 <td class=\"number\">{}</td><td>{}</td><td>{}</td><td class=\"number\">{}</td>\
                 <td class=\"number\">{}</td><td class=\"number\">{}</td></tr>\n",
                escaped(&run.started),
                escaped(&names.join(", ")),
                escaped(&machine.cpu),
                optional("machine/processors", Some(machine.processors as f64), "count"),
                optional("machine/memory_bytes", machine.memory_bytes.map(|n| n as f64), "B"),
                escaped(&machine.kernel),
                escaped(machine.governor.as_deref().unwrap_or("not shown")),
                optional("load_before", run.load_before, ""),
                optional("load_after", run.load_after, ""),
                optional("seconds", Some(run.seconds), "s"),
            ),
        );
    }
    page.push_str("</table></div>\n");
    for run in runs {
        push(page, format_args!("<p class=\"soft\"><code>{}</code></p>\n", escaped(&run.command)));
    }
    page.push_str("</section>\n");
}

/// The table of variants.
pub(super) fn variants(page: &mut String, section: &Section<'_>) {
    page.push_str("<div class=\"wide\"><table>\n<tr><th>variant</th><th>is</th><th></th></tr>\n");
    for variant in &section.info.variants {
        let (swatch, name) = (swatch(section, &variant.name), escaped(&variant.name));
        let (kind, about) = (escaped(&variant.kind), escaped(&variant.about));
        push(
            page,
            format_args!("<tr><td>{swatch}{name}</td><td>{kind}</td><td>{about}</td></tr>\n"),
        );
    }
    page.push_str("</table></div>\n");
}

fn swatch(section: &Section<'_>, variant: &str) -> String {
    let colour = colour(section, variant);
    format!("<span class=\"swatch\" style=\"background:{colour}\"></span>")
}

/// The measured and published values under one workload.
pub(super) fn grid(page: &mut String, section: &Section<'_>, grid: &Grid<'_>) {
    let (name, about) = (escaped(grid.workload), escaped(grid.about));
    push(page, format_args!("<h3>{name}</h3>\n<p class=\"soft\">{about}</p>\n"));
    page.push_str(
        "<div class=\"wide\"><table>\n<tr><th>variant</th><th class=\"number\">jobs</th>",
    );
    for (metric, _) in &grid.metrics {
        let name = escaped(&heading(metric));
        push(page, format_args!("<th class=\"number\">{name}</th><th>least to greatest</th>"));
    }
    let is_limited = grid.lines.iter().any(|line| line.limited_by.is_some());
    let last = if is_limited { "limited by" } else { "" };
    push(page, format_args!("<th>{last}</th></tr>\n"));
    let mut jobs = None;
    for line in &grid.lines {
        let first = jobs.replace(line.jobs).is_some_and(|jobs| jobs != line.jobs);
        grid_line(page, section, line, first);
    }
    page.push_str("</table></div>\n");
}

fn grid_line(page: &mut String, section: &Section<'_>, line: &GridLine<'_>, first: bool) {
    let class = match (first, line.source.is_some()) {
        (true, true) => "first published",
        (true, false) => "first",
        (false, true) => "published",
        (false, false) => "",
    };
    let mark = if line.source.is_some() { ", published" } else { "" };
    let value = line.values.iter().flatten().next();
    let jobs = value.map_or(String::new(), |value| {
        number(&place(section, value, "jobs"), f64::from(line.jobs), "count")
    });
    push(
        page,
        format_args!(
            "<tr class=\"{class}\"><td>{}{}{mark}</td><td class=\"number\">{jobs}</td>",
            swatch(section, line.variant),
            escaped(line.variant),
        ),
    );
    for value in &line.values {
        match value {
            Some(value @ IndexedValue::Measured(_, row)) => {
                let of = |field: &str, number_of: f64| {
                    number(&place(section, value, field), number_of, &row.unit)
                };
                let (median, min, max) =
                    (of("median", row.median), of("min", row.min), of("max", row.max));
                let cell = format_args!(
                    "<td class=\"number\">{median}</td><td class=\"spread\">{min} to {max}</td>"
                );
                push(page, cell);
            }
            Some(value @ IndexedValue::Published(_, row)) => {
                let value = number(&place(section, value, "value"), row.value, &row.unit);
                push(page, format_args!("<td class=\"number\">{value}</td><td></td>"));
            }
            None => page.push_str("<td></td><td></td>"),
        }
    }
    let last = line.source.or(line.limited_by).unwrap_or_default();
    push(page, format_args!("<td>{}</td></tr>\n", escaped(last)));
}

/// The measured values as fractions of limits.
pub(super) fn fractions(page: &mut String, section: &Section<'_>) {
    if section.fractions().next().is_none() {
        return;
    }
    page.push_str(
        "<h3>Of what the machine can do at best</h3>\n<div class=\"wide\"><table>\n\
         <tr><th>variant</th><th>workload</th><th class=\"number\">jobs</th><th>metric</th>\
         <th>of</th><th class=\"number\">best</th><th class=\"number\">reached</th></tr>\n",
    );
    for (at, fraction) in section.fractions() {
        let path = |field: &str| format!("/runs/{}/fractions/{at}/{field}", section.run);
        push(
            page,
            format_args!(
                "<tr><td>{}{}</td><td>{}</td><td class=\"number\">{}</td><td>{}</td><td>{}</td>\
                 <td class=\"number\">{}</td><td class=\"number\">{}</td></tr>\n",
                swatch(section, &fraction.variant),
                escaped(&fraction.variant),
                escaped(&fraction.workload),
                number(&path("jobs"), f64::from(fraction.jobs), "count"),
                escaped(&heading(&fraction.metric)),
                escaped(&fraction.limit),
                number(&path("best"), fraction.best, &fraction.unit),
                number(&path("fraction"), fraction.fraction, "percent"),
            ),
        );
    }
    page.push_str("</table></div>\n");
}

/// The JSON pointer of a field of a value.
pub(super) fn place(section: &Section<'_>, value: &IndexedValue<'_>, field: &str) -> String {
    let (list, at) = match value {
        IndexedValue::Measured(at, _) => ("rows", at),
        IndexedValue::Published(at, _) => ("published", at),
    };
    format!("/runs/{}/{list}/{at}/{field}", section.run)
}

/// The counts of the counting locks.
pub(super) fn rooms(page: &mut String, section: &Section<'_>) {
    let rooms: Vec<_> = section.part(&section.results.rooms, |room| &room.experiment).collect();
    if rooms.is_empty() {
        return;
    }
    page.push_str(
        "<h3>Rooms</h3>\n<p class=\"soft\">Lock contention: how often a lock was taken, how often \
         another thread held it already, for how long it was held and waited for.</p>\n\
         <div class=\"wide\"><table>\n<tr><th>room</th><th>variant</th><th>workload</th>\
         <th class=\"number\">jobs</th><th class=\"number\">entered</th>\
         <th class=\"number\">contended</th><th class=\"number\">hold p50</th>\
         <th class=\"number\">p99</th><th class=\"number\">max</th>\
         <th class=\"number\">wait p50</th><th class=\"number\">p99</th>\
         <th class=\"number\">max</th></tr>\n",
    );
    for (at, room) in rooms {
        let place = |field: &str| format!("/runs/{}/rooms/{at}/{field}", section.run);
        let names = [&room.count.room, &room.variant, &room.workload].map(|name| escaped(name));
        push(page, format_args!("<tr><td>{}</td>", names.join("</td><td>")));
        let counts = [
            ("jobs", u64::from(room.jobs)),
            ("acquisitions", room.count.acquisitions),
            ("contended", room.count.contended),
        ];
        let counts = counts.map(|(field, count)| number(&place(field), count as f64, "count"));
        let times = |field: &str, ns: [f64; 3]| {
            [0, 1, 2].map(|at| number(&place(&format!("{field}/{at}")), ns[at], "ns"))
        };
        let (hold, wait) =
            (times("hold_ns", room.count.hold_ns), times("wait_ns", room.count.wait_ns));
        for cell in counts.iter().chain(&hold).chain(&wait) {
            push(page, format_args!("<td class=\"number\">{cell}</td>"));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n");
}

/// The cells that were not measured, and the reasons.
pub(super) fn not_measured(page: &mut String, section: &Section<'_>) {
    let cells = section.part(&section.results.not_measured, |cell| &cell.experiment);
    let cells: Vec<_> = cells.collect();
    if cells.is_empty() {
        return;
    }
    page.push_str(
        "<h3>Not measured</h3>\n<div class=\"wide\"><table>\n<tr><th>variant</th><th>workload</th>\
         <th class=\"number\">jobs</th><th class=\"number\">rounds before</th><th>why</th></tr>\n",
    );
    for (at, cell) in cells {
        let of = |field: &str, count: u32| {
            let path = format!("/runs/{}/not_measured/{at}/{field}", section.run);
            number(&path, f64::from(count), "count")
        };
        push(
            page,
            format_args!(
                "<tr><td>{}</td><td>{}</td><td class=\"number\">{}</td>\
                 <td class=\"number\">{}</td><td>{}</td></tr>\n",
                escaped(&cell.variant),
                escaped(&cell.workload),
                of("jobs", cell.jobs),
                of("rounds", cell.rounds),
                escaped(&cell.why),
            ),
        );
    }
    page.push_str("</table></div>\n");
}

/// The notes of the cells.
pub(super) fn notes(page: &mut String, section: &Section<'_>) {
    let mut notes = section.part(&section.results.notes, |note| &note.experiment).peekable();
    if notes.peek().is_none() {
        return;
    }
    page.push_str("<h3>Notes</h3>\n<ul>\n");
    for (_, note) in notes {
        push(page, format_args!("<li>{}</li>\n", escaped(&note.text)));
    }
    page.push_str("</ul>\n");
}

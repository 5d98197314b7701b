//! Bars: a value as a length, ours full, published ones hatched, the spread as a line.

use super::tables::place;
use super::{colour, escaped, number, push};
use crate::report::view::{Grid, IndexedValue, Section};

/// The longest bar, in percent of the track; the rest is for the spread.
const FULL: f64 = 94.0;
/// How many times longer the longest bar may be than the longest of another group on one scale.
const SHARED_MAX: f64 = 20.0;

/// Bars of one metric, a group per workload and number of jobs. Empty if there is no value.
pub(super) fn bars(page: &mut String, section: &Section<'_>, grids: &[Grid<'_>], metric: &str) {
    let mut groups: Vec<(String, Vec<(String, IndexedValue<'_>)>)> = Vec::new();
    for grid in grids {
        let Some(column) = grid.metrics.iter().position(|(name, _)| *name == metric) else {
            continue;
        };
        for jobs in shown_jobs(grid, column) {
            let lines = grid.lines.iter().filter(|line| line.jobs == jobs);
            let values = lines.filter_map(|line| {
                let value = line.values.get(column).copied().flatten()?;
                let mark = if line.source.is_some() { ", published" } else { "" };
                Some((format!("{}{mark}", line.variant), value))
            });
            let noun = if jobs == 1 { "job" } else { "jobs" };
            groups.push((format!("{}, {jobs} {noun}", grid.workload), values.collect()));
        }
    }
    let ends: Vec<f64> = groups.iter().map(|(_, values)| greatest(values)).collect();
    let most = ends.iter().copied().fold(0.0, f64::max);
    if most <= 0.0 {
        return;
    }
    // If one scale would leave some group without a visible bar, each group has its own scale.
    let is_shared = ends.iter().all(|end| end * SHARED_MAX >= most);
    if !is_shared {
        page.push_str("<p class=\"soft\">Each group has a scale of its own.</p>\n");
    }
    page.push_str("<div class=\"bars\">\n");
    for ((title, values), end) in groups.iter().zip(&ends) {
        push(page, format_args!("<div class=\"group\">{}</div>\n", escaped(title)));
        for (name, value) in values {
            bar(page, section, name, value, if is_shared { most } else { *end });
        }
    }
    page.push_str("</div>\n");
}

/// The greatest value or end of a range.
fn greatest(values: &[(String, IndexedValue<'_>)]) -> f64 {
    let ends = values.iter().map(|(_, value)| match value {
        IndexedValue::Measured(_, row) => row.max,
        IndexedValue::Published(_, row) => row.value,
    });
    ends.fold(0.0, f64::max)
}

/// All numbers of jobs if there is only one; otherwise the published ones, and the greatest.
fn shown_jobs(grid: &Grid<'_>, column: usize) -> Vec<u32> {
    let with_value = |line: &&crate::report::view::GridLine<'_>| line.values[column].is_some();
    let lines = grid.lines.iter().filter(with_value);
    let most = lines.clone().filter(|line| line.source.is_none()).map(|line| line.jobs).max();
    let published = lines.filter(|line| line.source.is_some()).map(|line| line.jobs);
    let mut jobs: Vec<u32> = published.chain(most).collect();
    jobs.sort_unstable();
    jobs.dedup();
    jobs
}

fn bar(
    page: &mut String,
    section: &Section<'_>,
    name: &str,
    value: &IndexedValue<'_>,
    greatest: f64,
) {
    let percent = |value: f64| value.max(0.0) / greatest.max(f64::MIN_POSITIVE) * FULL;
    let (field, variant, class, range) = match value {
        IndexedValue::Measured(_, row) => {
            let (left, width) = (percent(row.min), percent(row.max) - percent(row.min));
            let range = format!(
                "<span class=\"range\" style=\"left:{left:.2}%;width:{width:.2}%\"></span>"
            );
            ("median", &row.variant, "fill", range)
        }
        IndexedValue::Published(_, row) => ("value", &row.variant, "fill theirs", String::new()),
    };
    push(
        page,
        format_args!(
            "<div>{}</div><div class=\"track\"><span class=\"{class}\" \
             style=\"width:{:.2}%;background-color:{}\"></span>{range}</div>\
             <div class=\"value\">{}</div>\n",
            escaped(name),
            percent(value.median()),
            colour(section, variant),
            number(&place(section, value, field), value.median(), value.unit()),
        ),
    );
}

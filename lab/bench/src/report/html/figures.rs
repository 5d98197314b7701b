//! The figures of the page: bars as markup, and elements in which the script draws its plots.

use std::collections::BTreeSet;

use super::{bars, escaped, push};
use crate::report::view::{Grid, Section, heading};

/// Bars and plots of an experiment.
pub(super) fn figures(page: &mut String, section: &Section<'_>) {
    let grids = section.grids();
    page.push_str("<div class=\"figures\">\n");
    for metric in &section.info.plots {
        let columns = grids.iter().flat_map(|grid| &grid.metrics);
        let Some((_, unit)) = columns.clone().find(|(name, _)| name == metric) else { continue };
        let rows = || section.rows().filter(|(_, row)| row.metric == *metric);
        let is_more = rows().all(|(_, row)| row.more_is_better);
        let better = if is_more { "longer is better" } else { "shorter is better" };
        let unit = if unit.is_empty() { String::new() } else { format!(" ({unit})") };
        push(
            page,
            format_args!(
                "<figure>\n<figcaption><b>{}</b>{} <span class=\"soft\">{better}; the dark line \
                 is the spread of the rounds</span></figcaption>\n",
                escaped(&heading(metric)),
                escaped(&unit),
            ),
        );
        bars::bars(page, section, &grids, metric);
        page.push_str("</figure>\n");
        for grid in grids.iter().filter(|grid| has_many_jobs(grid, metric)) {
            let caption = format!("{} by jobs, {}", heading(metric), grid.workload);
            let of = [("workload", grid.workload), ("metric", metric)];
            plot(page, section, "jobs", &caption, &of);
        }
    }
    latency(page, section);
    page.push_str("</div>\n");
}

fn has_many_jobs(grid: &Grid<'_>, metric: &str) -> bool {
    let column = grid.metrics.iter().position(|(name, _)| *name == metric);
    let jobs = column.into_iter().flat_map(|column| {
        let lines = grid.lines.iter().filter(move |line| line.values[column].is_some());
        lines.filter(|line| line.source.is_none()).map(|line| line.jobs)
    });
    jobs.collect::<BTreeSet<u32>>().len() > 1
}

/// For each workload, the least and the greatest number of jobs that have latencies.
fn latency(page: &mut String, section: &Section<'_>) {
    let entries = || section.part(&section.results.latency, |entry| &entry.experiment);
    let mut workloads: Vec<&str> = Vec::new();
    for (_, entry) in entries() {
        if !workloads.contains(&entry.workload.as_str()) {
            workloads.push(&entry.workload);
        }
    }
    for workload in workloads {
        let of_it = entries().filter(|(_, entry)| entry.workload == workload);
        let jobs: BTreeSet<u32> = of_it.map(|(_, entry)| entry.jobs).collect();
        let ends: BTreeSet<u32> = jobs.first().into_iter().chain(jobs.last()).copied().collect();
        for jobs in ends {
            let noun = if jobs == 1 { "job" } else { "jobs" };
            let caption = format!("latency by percentile, {workload}, {jobs} {noun}");
            let of = [("workload", workload), ("jobs", &jobs.to_string())];
            plot(page, section, "latency", &caption, &of);
        }
    }
}

/// An element for a plot, with text for browsers without a script.
fn plot(page: &mut String, section: &Section<'_>, kind: &str, caption: &str, of: &[(&str, &str)]) {
    let experiment = escaped(&section.info.name);
    let run = section.run;
    push(
        page,
        format_args!(
            "<figure data-plot=\"{kind}\" data-run=\"{run}\" data-experiment=\"{experiment}\""
        ),
    );
    for (name, value) in of {
        push(page, format_args!(" data-{name}=\"{}\"", escaped(value)));
    }
    push(
        page,
        format_args!(
            ">\n<figcaption><b>{}</b></figcaption>\n<div class=\"canvas\"><noscript>drawn by the \
             page's script; the table below has the values</noscript></div>\n</figure>\n",
            escaped(caption),
        ),
    );
}

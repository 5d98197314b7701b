//! Published tables in their own form: a line per workload, a column per variant, and our line
//! above the published one.
//!
//! Only for figures that others published as a table: at least three workloads of at least three
//! variants, by one metric and number of jobs. The grids show these figures too.

use super::view::Section;
use crate::quantity::quantity;

/// The least number of workloads and of variants of a table.
const TABLE_MIN: usize = 3;

/// A published table, with our measurements.
#[derive(Debug, PartialEq)]
pub struct ReferenceRows<'a> {
    /// The metric.
    pub metric: &'a str,
    /// Threads or processes.
    pub jobs: u32,
    /// The author.
    pub source: &'a str,
    /// The columns.
    pub variants: Vec<&'a str>,
    /// The workload, whether the line was published, and a value for each variant.
    pub lines: Vec<(&'a str, bool, Vec<String>)>,
}

/// The tables that others published, in the order in which they are first named.
pub fn tables<'a>(section: &Section<'a>) -> Vec<ReferenceRows<'a>> {
    let mut keys: Vec<(&str, u32, &str)> = Vec::new();
    for (_, row) in section.published() {
        let key = (row.metric.as_str(), row.jobs, row.source.as_str());
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let tables = keys.into_iter().map(|key| table(section, key));
    tables.filter(|table| table.lines.len() >= 2 * TABLE_MIN).collect()
}

fn table<'a>(section: &Section<'a>, key: (&'a str, u32, &'a str)) -> ReferenceRows<'a> {
    let (metric, jobs, source) = key;
    let published = || {
        section.published().map(|(_, row)| row).filter(move |row| {
            (row.metric.as_str(), row.jobs, row.source.as_str()) == (metric, jobs, source)
        })
    };
    let measured = |workload: &str, variant: &str| {
        let mut rows = section.rows().map(|(_, row)| row);
        let found = rows.find(|row| {
            (row.workload.as_str(), row.variant.as_str()) == (workload, variant)
                && (row.metric.as_str(), row.jobs) == (metric, jobs)
        });
        found.map(|row| quantity(row.median, &row.unit))
    };
    let mut workloads: Vec<&str> = Vec::new();
    for row in published() {
        if !workloads.contains(&row.workload.as_str()) {
            workloads.push(&row.workload);
        }
    }
    // The variants that were published or measured under any of these workloads, so that the
    // product has one column.
    let names = section.info.variants.iter().map(|variant| variant.name.as_str());
    let variants: Vec<&str> = names
        .filter(|name| {
            published().any(|row| row.variant == *name)
                || workloads.iter().any(|workload| measured(workload, name).is_some())
        })
        .collect();
    let mut lines = Vec::new();
    for workload in workloads {
        let here: Vec<Option<String>> =
            variants.iter().map(|variant| measured(workload, variant)).collect();
        let theirs: Vec<Option<String>> = variants
            .iter()
            .map(|variant| {
                let mut rows =
                    published().filter(|row| row.workload == workload && row.variant == *variant);
                rows.next().map(|row| quantity(row.value, &row.unit))
            })
            .collect();
        let count = theirs.iter().flatten().count();
        if count < TABLE_MIN || here.iter().all(Option::is_none) {
            continue;
        }
        let shown = |values: Vec<Option<String>>| -> Vec<String> {
            values.into_iter().map(|value| value.unwrap_or("-".to_owned())).collect()
        };
        lines.push((workload, false, shown(here)));
        lines.push((workload, true, shown(theirs)));
    }
    ReferenceRows { metric, jobs, source, variants, lines }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{ExperimentInfo, PublishedRow, Results, Row, VariantInfo};

    fn results(workloads: &[&str]) -> Results {
        let mut results = Results::new(String::new(), false);
        let variant = |name: &str| VariantInfo {
            name: name.to_owned(),
            kind: String::new(),
            about: String::new(),
        };
        results.experiments.push(ExperimentInfo {
            name: "e".to_owned(),
            variants: ["base", "cas", "bit", "ours", "idle"].map(variant).to_vec(),
            ..ExperimentInfo::default()
        });
        for workload in workloads {
            for (variant, value) in [("base", 1e6), ("cas", 2e6), ("bit", 3e6)] {
                results.published.push(PublishedRow {
                    experiment: "e".to_owned(),
                    variant: variant.to_owned(),
                    workload: (*workload).to_owned(),
                    jobs: 4,
                    metric: "bandwidth".to_owned(),
                    unit: "B/s".to_owned(),
                    value,
                    source: "a paper".to_owned(),
                });
            }
            for (variant, jobs, median) in [("base", 4, 5e6), ("ours", 4, 7e6), ("ours", 2, 1.0)] {
                results.rows.push(Row {
                    experiment: "e".to_owned(),
                    variant: variant.to_owned(),
                    workload: (*workload).to_owned(),
                    jobs,
                    metric: "bandwidth".to_owned(),
                    unit: "B/s".to_owned(),
                    more_is_better: true,
                    rounds: 1,
                    median,
                    min: median,
                    max: median,
                    values: vec![median],
                });
            }
        }
        results
    }

    #[test]
    fn a_table_has_ours_above_theirs() {
        let runs = [results(&["read", "write", "mixed"])];
        let tables = tables(&Section::all(&runs)[0]);
        assert_eq!(tables.len(), 1);
        assert_eq!(tables[0].variants, ["base", "cas", "bit", "ours"]);
        assert_eq!(tables[0].lines.len(), 6);
        let values = |values: [&str; 4]| values.map(str::to_owned).to_vec();
        let here = values(["5.00 MB/s", "-", "-", "7.00 MB/s"]);
        assert_eq!(tables[0].lines[0], ("read", false, here));
        let theirs = values(["1.00 MB/s", "2.00 MB/s", "3.00 MB/s", "-"]);
        assert_eq!(tables[0].lines[1], ("read", true, theirs));
    }

    #[test]
    fn few_rows_are_no_table() {
        let runs = [results(&["read", "write"])];
        assert_eq!(tables(&Section::all(&runs)[0]), []);
    }
}

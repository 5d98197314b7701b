//! `--only VARIANT/WORKLOAD[/JOBS]`: a filter for the cells that run.

use std::fmt;
use std::str::FromStr;

use blockyard_yard::suggestion::suggestion;

use crate::experiment::{Cell, Experiment};

/// A filter for cells. A part that is left out matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowFilter {
    variant: Option<String>,
    workload: Option<String>,
    jobs: Option<u32>,
}

impl FromStr for RowFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<RowFilter, String> {
        let wanted = "expected VARIANT/WORKLOAD or VARIANT/WORKLOAD/JOBS; empty parts take all";
        let mut parts = text.split('/').map(|part| match part {
            "" | "*" => None,
            part => Some(part.to_owned()),
        });
        let variant = parts.next().flatten();
        let workload = parts.next().ok_or(wanted)?;
        let jobs = parts.next().flatten().map(|jobs| jobs.parse::<u32>()).transpose();
        let jobs = jobs.map_err(|_| wanted)?;
        match parts.next() {
            Some(_) => Err(wanted.to_owned()),
            None => Ok(RowFilter { variant, workload, jobs }),
        }
    }
}

impl fmt::Display for RowFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_all = |name: &Option<String>| name.clone().unwrap_or("*".to_owned());
        write!(f, "{}/{}", or_all(&self.variant), or_all(&self.workload))?;
        self.jobs.map_or(Ok(()), |jobs| write!(f, "/{jobs}"))
    }
}

impl RowFilter {
    /// Whether the filter matches a cell.
    pub fn takes(&self, cell: &Cell) -> bool {
        self.variant.as_deref().is_none_or(|variant| variant == cell.variant)
            && self.workload.as_deref().is_none_or(|workload| workload == cell.workload)
            && self.jobs.is_none_or(|jobs| jobs == cell.jobs)
    }

    /// Fails if the filter matches no cell of these experiments.
    ///
    /// # Errors
    /// The unknown name, and similar ones.
    pub(crate) fn check(&self, experiments: &[Experiment]) -> Result<(), String> {
        let cells = || experiments.iter().flat_map(|experiment| &experiment.cells);
        if cells().any(|cell| self.takes(cell)) {
            return Ok(());
        }
        let variants: Vec<&str> = cells().map(|cell| cell.variant).collect();
        let workloads: Vec<&str> = cells().map(|cell| cell.workload).collect();
        for (what, name, mut known) in
            [("variant", &self.variant, variants), ("workload", &self.workload, workloads)]
        {
            let Some(name) = name.as_deref().filter(|name| !known.contains(name)) else { continue };
            let near = suggestion(name, known.iter().copied());
            known.sort_unstable();
            known.dedup();
            let known = known.join(", ");
            return Err(format!("--only: no {what} is called `{name}`{near}; there are: {known}"));
        }
        Err("--only: no experiment that was named has such a cell".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Sample;

    #[test]
    fn a_filter_without_match_suggests_similar_names() {
        let experiments = [crate::experiments::clock::build(&crate::Settings {
            quick: false,
            engine: None,
            program: "".into(),
            lab: "blockyard-lab".into(),
            scratch: "".into(),
            processors: 2,
            peers: Default::default(),
        })];
        let check = |text: &str| text.parse::<RowFilter>().unwrap().check(&experiments);
        assert_eq!(check("wall/"), Ok(()));
        assert!(check("wal/").unwrap_err().contains("did you mean `wall`?"));
        assert!(check("/lok").unwrap_err().contains("did you mean `look`?"));
        assert!(check("wall/look/7").unwrap_err().contains("such a cell"));
    }

    fn cell(variant: &'static str, workload: &'static str, jobs: u32) -> Cell {
        Cell::new(variant, workload, jobs, |_| Ok(Sample::default()))
    }

    #[test]
    fn a_missing_filter_takes_all_rows() {
        let only = |text: &str| text.parse::<RowFilter>().unwrap();
        let read = cell("one-lock", "read", 8);
        for text in ["one-lock/", "/read", "one-lock/read", "/", "*/read/8", "//8"] {
            assert!(only(text).takes(&read), "{text}");
        }
        for text in ["product/", "/write", "one-lock/write", "/read/2"] {
            assert!(!only(text).takes(&read), "{text}");
        }
        for text in ["", "read", "a/b/c", "a/b/1/2", "a/b/-1"] {
            assert!(text.parse::<RowFilter>().is_err(), "{text}");
        }
    }
}

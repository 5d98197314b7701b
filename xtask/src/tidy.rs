//! Tidy: STYLE.md, as far as a program can check it.
//!
//! A rule reads the whole [`Tree`] and returns findings; each finding names the line and what
//! to write instead. The rules run as a test of this crate, and by hand with `tidy`.

mod cycles;
mod dead;
mod dependencies;
mod primitives;
mod readme;
mod source;
mod tests_rules;
mod tree;
mod type_names;
mod words;

use std::error::Error;
use std::fmt;
use std::path::Path;

use tree::Tree;

/// One place where the tree breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    path: String,
    /// Counted from 1.
    line: usize,
    rule: &'static str,
    /// What is wrong and what to write instead.
    text: String,
}

impl Finding {
    fn new(path: &str, line: usize, rule: &'static str, text: impl Into<String>) -> Finding {
        Finding { path: path.into(), line, rule, text: text.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {} [{}]", self.path, self.line, self.text, self.rule)
    }
}

/// Every rule over the tree below `root`: an error that lists the findings, if there are any.
pub(crate) fn run(root: &Path) -> Result<(), Box<dyn Error>> {
    let findings = check(&Tree::read(root)?);
    if findings.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
    Err(format!("{}\ntidy: {} findings", lines.join("\n"), lines.len()).into())
}

/// Lines, files and the longest import cycle of each crate below `root`, as a table.
pub(crate) fn shapes(root: &Path) -> Result<String, Box<dyn Error>> {
    let tree = Tree::read(root)?;
    let mut text = format!(
        "{:<24} {:>6} {:>6} {:>6}  FILES OF THE CYCLE\n",
        "CRATE", "LINES", "FILES", "CYCLE"
    );
    for cycles::CrateShape { folder, lines, files, cycle } in cycles::shapes(&tree) {
        let short = |path: &String| path[folder.len() + "/src/".len()..].to_owned();
        let names = cycle.iter().map(short).collect::<Vec<_>>().join(" ");
        text += &format!("{folder:<24} {lines:>6} {files:>6} {:>6}  {names}\n", cycle.len());
    }
    Ok(text)
}

fn check(tree: &Tree) -> Vec<Finding> {
    let rules: [fn(&Tree) -> Vec<Finding>; 11] = [
        source::check,
        source::small,
        primitives::check,
        words::check,
        cycles::check,
        type_names::check,
        tests_rules::check,
        dead::files,
        dead::pages,
        readme::check,
        dependencies::check,
    ];
    let mut findings: Vec<Finding> = rules.iter().flat_map(|rule| rule(tree)).collect();
    findings.sort();
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_tidy() {
        if let Err(findings) = run(crate::root()) {
            panic!("{findings}");
        }
    }

    #[test]
    fn a_finding_names_the_place_the_sin_and_the_rule() {
        let finding = Finding::new("a.rs", 3, "columns", "101 columns; break the line at 100");
        assert_eq!(finding.to_string(), "a.rs:3: 101 columns; break the line at 100 [columns]");
    }
}

//! Rules about dependencies: each has a line in docs/decisions/dependencies.md, and each line there
//! has a dependency.

use std::collections::BTreeMap;

use super::Finding;
use super::tree::Tree;

const PAGE: &str = "docs/decisions/dependencies.md";

/// All manifests against the page.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut used: BTreeMap<String, String> = BTreeMap::new();
    for (path, file) in tree.ending("Cargo.toml") {
        match file.text.parse::<toml::Table>() {
            Ok(table) => collect(&table, path, &mut used),
            Err(error) => findings.push(Finding::new(path, 1, "manifest", error.to_string())),
        }
    }
    let page = tree.get(PAGE).map_or("", |file| &file.text);
    let rows: Vec<(usize, &str)> = rows(page).collect();
    for (name, path) in &used {
        if !rows.iter().any(|(_, row)| row == name) {
            let text = format!("`{name}` has no line in {PAGE}; say there why it and not our own");
            findings.push(Finding::new(path, 1, "dependency", text));
        }
    }
    for (at, row) in rows.iter().filter(|(_, row)| !used.contains_key(*row)) {
        let text = format!("nothing depends on `{row}`; remove the line");
        findings.push(Finding::new(PAGE, *at, "dependency", text));
    }
    findings
}

/// The first cells of the table's rows, with their lines.
fn rows(page: &str) -> impl Iterator<Item = (usize, &str)> {
    page.lines().enumerate().filter_map(|(at, line)| {
        let cell = line.strip_prefix('|')?.split('|').next()?.trim().trim_matches('`');
        let is_rule = cell.starts_with("---") || cell.starts_with(":-");
        (!is_rule && !matches!(cell, "" | "crate")).then_some((at + 1, cell))
    })
}

/// The outside crates that one manifest names, in whatever table.
fn collect(table: &toml::Table, path: &str, used: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let Some(inner) = value.as_table() else { continue };
        if key.ends_with("dependencies") {
            for (name, spec) in inner {
                let own = spec.get("path").is_some() || name.starts_with("blockyard");
                // The root's list is not a use; it only fixes the versions.
                let is_use = path != "Cargo.toml";
                if is_use && !own {
                    let package = spec.get("package").and_then(toml::Value::as_str);
                    used.entry(package.unwrap_or(name).into()).or_insert_with(|| path.into());
                }
            }
        } else {
            collect(inner, path, used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(manifest: &str, page: &str) -> Vec<String> {
        let tree = Tree::of(&[("crates/a/Cargo.toml", manifest), (PAGE, page)]);
        check(&tree).into_iter().map(|f| f.path).collect()
    }

    #[test]
    fn a_dependency_with_a_line_passes() {
        let page = "| crate | why |\n| --- | --- |\n| loom | models |\n| `libc` | calls |\n";
        let manifest = "[dependencies]\nlibc = '1'\nblockyard-core.workspace = true\n\
                        [target.'cfg(loom)'.dependencies]\nloom = '1'\n";
        assert_eq!(found(manifest, page), Vec::<String>::new());
    }

    #[test]
    fn a_dependency_without_a_line_is_found_in_every_table() {
        for table in ["dependencies", "dev-dependencies", "target.'cfg(unix)'.build-dependencies"] {
            let manifest = format!("[{table}]\nlibc = {{ version = '1' }}\n");
            assert_eq!(found(&manifest, ""), ["crates/a/Cargo.toml"], "{table}");
        }
    }

    #[test]
    fn a_line_without_a_dependency_is_found() {
        assert_eq!(found("[dependencies]\n", "| libc | calls |\n"), [PAGE]);
    }
}

//! Rules about dependencies: each has a line in docs/decisions/dependencies.md, and each line there
//! has a dependency; no crate of the product depends on the lab, and only its tests on
//! `crates/testing`.

use std::collections::BTreeMap;

use super::Finding;
use super::tree::{SourceFile, Tree};

const PAGE: &str = "docs/decisions/dependencies.md";

/// All manifests against the page.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut used: BTreeMap<String, String> = BTreeMap::new();
    let lab: Vec<String> = tree.ending("Cargo.toml").filter_map(package_of_lab).collect();
    for (path, file) in tree.ending("Cargo.toml") {
        match file.text.parse::<toml::Table>() {
            Ok(table) => {
                collect(&table, path, &mut used);
                if path.starts_with("crates/") {
                    layers(&table, path, &lab, &mut findings);
                }
            }
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

/// The name of the package, if the manifest is one of the lab.
fn package_of_lab((path, file): (&str, &SourceFile)) -> Option<String> {
    let table = file.text.parse::<toml::Table>().ok().filter(|_| path.starts_with("lab/"))?;
    Some(table.get("package")?.get("name")?.as_str()?.to_owned())
}

/// The dependencies of one manifest of the product that are above it.
fn layers(manifest: &toml::Table, path: &str, lab: &[String], findings: &mut Vec<Finding>) {
    for table in ["dependencies", "dev-dependencies", "build-dependencies"] {
        let Some(dependencies) = manifest.get(table).and_then(toml::Value::as_table) else {
            continue;
        };
        for name in dependencies.keys() {
            let is_test_only = name == "blockyard-testing" && table == "dependencies";
            if is_test_only || lab.contains(name) {
                let text = format!(
                    "`{name}` is not in the product's binary; the product may not \
                                    depend on it ({table})"
                );
                findings.push(Finding::new(path, 1, "layers", text));
            }
        }
    }
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

    #[test]
    fn a_product_that_depends_on_the_lab_or_on_test_code_is_found() {
        let rules = |manifest: &str| {
            let lab = ("lab/a/Cargo.toml", "[package]\nname = 'blockyard-a'\n");
            let tree = Tree::of(&[("crates/b/Cargo.toml", manifest), lab]);
            check(&tree).into_iter().map(|f| f.rule).collect::<Vec<_>>()
        };
        assert_eq!(rules("[dependencies]\nblockyard-a.workspace = true\n"), ["layers"]);
        assert_eq!(rules("[dev-dependencies]\nblockyard-a.workspace = true\n"), ["layers"]);
        assert_eq!(rules("[dependencies]\nblockyard-testing.workspace = true\n"), ["layers"]);
        assert!(rules("[dev-dependencies]\nblockyard-testing.workspace = true\n").is_empty());
    }
}

//! Rules about dead things: a source file that no crate holds, a link that leads nowhere, a page
//! that the manual does not list.

use std::collections::BTreeSet;

use syn::Item;

use super::Finding;
use super::tree::{Tree, folder_of, join};

/// Source files that no `mod` reaches from the root of a crate.
pub(crate) fn files(tree: &Tree) -> Vec<Finding> {
    let mut alive = BTreeSet::new();
    let mut open: Vec<String> =
        tree.ending("Cargo.toml").flat_map(|(p, f)| roots(tree, p, &f.text)).collect();
    let crate_roots: BTreeSet<String> = open.iter().cloned().collect();
    while let Some(path) = open.pop() {
        if !alive.insert(path.clone()) {
            continue;
        }
        let Some(syntax) = tree.get(&path).and_then(|file| file.syntax.as_ref()) else { continue };
        let owns_folder = crate_roots.contains(&path) || path.ends_with("/mod.rs");
        let folder = if owns_folder { folder_of(&path) } else { path.trim_end_matches(".rs") };
        modules(tree, &syntax.items, folder_of(&path), folder, &mut open);
    }
    let dead = tree.ending(".rs").filter(|(path, _)| !alive.contains(*path));
    let text = "no crate holds this file; name it in a `mod`, or remove it";
    dead.map(|(path, _)| Finding::new(path, 1, "dead-file", text)).collect()
}

/// The files at which the crates of one manifest begin.
fn roots(tree: &Tree, manifest: &str, text: &str) -> Vec<String> {
    let folder = folder_of(manifest);
    let Ok(table) = text.parse::<toml::Table>() else { return Vec::new() };
    let mut roots: Vec<String> = Vec::new();
    if table.contains_key("package") {
        roots.extend(["src/lib.rs", "src/main.rs", "build.rs"].map(|path| join(folder, path)));
        for place in ["src/bin", "tests", "benches", "examples"] {
            let place = format!("{}/", join(folder, place));
            roots.extend(tree.ending(".rs").map(|(path, _)| path).filter_map(|path| {
                let rest = path.strip_prefix(&place)?;
                let is_root = !rest.contains('/') || rest.split_once('/')?.1 == "main.rs";
                is_root.then(|| path.to_string())
            }));
        }
    }
    let targets = ["bin", "test", "bench", "example"].into_iter().filter_map(|key| table.get(key));
    let targets = targets.filter_map(toml::Value::as_array).flatten().chain(table.get("lib"));
    let paths = targets.filter_map(|target| target.get("path")?.as_str());
    roots.extend(paths.map(|path| join(folder, path)));
    roots.retain(|path| tree.get(path).is_some());
    roots
}

/// The files that the `mod` items of one file name. `beside` is the file's folder, `below` the
/// one where its modules are.
fn modules(tree: &Tree, items: &[Item], beside: &str, below: &str, open: &mut Vec<String>) {
    for item in items {
        let Item::Mod(module) = item else { continue };
        let name = module.ident.to_string();
        let name = name.trim_start_matches("r#");
        if let Some((_, inner)) = &module.content {
            modules(tree, inner, beside, &join(below, name), open);
        } else if let Some(path) = path_attribute(&module.attrs) {
            open.push(join(beside, &path));
        } else {
            let file = join(below, &format!("{name}.rs"));
            let folder = join(below, &format!("{name}/mod.rs"));
            open.push(if tree.get(&file).is_some() { file } else { folder });
        }
    }
}

fn path_attribute(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().filter(|a| a.path().is_ident("path")).find_map(|a| {
        let syn::Meta::NameValue(pair) = &a.meta else { return None };
        let syn::Expr::Lit(literal) = &pair.value else { return None };
        let syn::Lit::Str(path) = &literal.lit else { return None };
        Some(path.value())
    })
}

/// The manual's table of contents.
const SUMMARY: &str = "docs/SUMMARY.md";

/// Links that lead to no file or to no heading, and pages below docs/ that the manual does not
/// list.
pub(crate) fn pages(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut listed = BTreeSet::new();
    for (path, file) in tree.ending(".md") {
        for (at, line) in prose(&file.text) {
            for link in links(line) {
                let (target, heading) = link.split_once('#').unwrap_or((link, ""));
                let target =
                    if target.is_empty() { path.into() } else { join(folder_of(path), target) };
                if !tree.holds(&target) {
                    let text = format!("there is no file `{target}`; link to one that exists");
                    findings.push(Finding::new(path, at, "dead-link", text));
                } else if !heading.is_empty() && !has_heading(tree, &target, heading) {
                    let text =
                        format!("`{target}` has no heading `#{heading}`; link to one of its");
                    findings.push(Finding::new(path, at, "dead-link", text));
                } else if path == SUMMARY {
                    listed.insert(target);
                }
            }
        }
    }
    let pages = tree.ending(".md").map(|(path, _)| path).filter(|path| path.starts_with("docs/"));
    for path in pages.filter(|path| *path != SUMMARY && !listed.contains(*path)) {
        let text = format!("{SUMMARY} does not list this page; add a line there");
        findings.push(Finding::new(path, 1, "dead-page", text));
    }
    findings
}

/// The lines outside of blocks of code, counted from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (!is_code && !is_fence).then_some((at + 1, line))
    })
}

/// The targets of a line's links into the tree.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| {
        let target = rest.split(')').next()?;
        (!target.is_empty() && !target.contains("://")).then_some(target)
    })
}

/// Whether a page has the heading that GitHub and mdBook call `wanted`. A file that is not Markdown
/// has no headings to check: true.
fn has_heading(tree: &Tree, path: &str, wanted: &str) -> bool {
    let Some(file) = tree.get(path).filter(|_| path.ends_with(".md")) else { return true };
    let headings = prose(&file.text).filter(|(_, line)| line.starts_with('#'));
    headings.map(|(_, line)| anchor(line.trim_start_matches('#'))).any(|name| name == wanted)
}

/// A heading's name in links: letters and digits in lower case, spaces as dashes, nothing else.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead(files: &[(&str, &str)]) -> Vec<String> {
        super::files(&Tree::of(files)).into_iter().map(|f| f.path).collect()
    }

    #[test]
    fn files_are_reached_through_every_kind_of_module() {
        let tree = [
            ("a/Cargo.toml", "[package]\nname = 'a'\n[[test]]\nname='t'\npath='../t/whole.rs'\n"),
            ("a/src/lib.rs", "mod one; mod two { mod three; } #[path = 'x'] mod no;"),
            ("a/src/one.rs", "mod below;"),
            ("a/src/one/below.rs", ""),
            ("a/src/two/three/mod.rs", "mod four;"),
            ("a/src/two/three/four.rs", ""),
            ("a/benches/b.rs", "mod common;"),
            ("a/benches/common/mod.rs", ""),
            ("t/whole.rs", "#[cfg(unix)] mod part;"),
            ("t/part.rs", ""),
        ];
        let mut tree = tree.to_vec();
        tree[1].1 = "mod one; mod two { mod three; }\n#[path = \"odd/name.rs\"] mod odd;";
        tree.push(("a/src/odd/name.rs", ""));
        assert_eq!(dead(&tree), Vec::<String>::new());
    }

    #[test]
    fn a_file_without_a_module_is_found() {
        let tree = [
            ("a/Cargo.toml", "[package]\nname = 'a'\n"),
            ("a/src/lib.rs", "mod one;"),
            ("a/src/one.rs", ""),
            ("a/src/left.rs", ""),
            ("a/src/below.rs", "mod one;"),
        ];
        assert_eq!(dead(&tree), ["a/src/below.rs", "a/src/left.rs"]);
    }

    fn page_findings(files: &[(&str, &str)]) -> Vec<(String, &'static str)> {
        pages(&Tree::of(files)).into_iter().map(|f| (f.path, f.rule)).collect()
    }

    #[test]
    fn a_page_that_the_manual_does_not_list_and_a_link_to_no_file_are_found() {
        let found = page_findings(&[
            ("README.md", "See [a](docs/a.md), [b](docs/b.md), [c](docs/no.md), [d](https://d)."),
            ("docs/SUMMARY.md", "- [A](a.md)\n"),
            ("docs/a.md", "See [itself](a.md) and [the code](../src).\n```\n[1](2)\n```\n"),
            ("docs/b.md", ""),
            ("src/lib.rs", ""),
        ]);
        let want = [("README.md", "dead-link"), ("docs/b.md", "dead-page")];
        assert_eq!(found, want.map(|(path, rule)| (path.to_string(), rule)));
    }

    #[test]
    fn a_link_to_no_heading_is_found() {
        let found = page_findings(&[
            ("a.md", "# The `a` of B, in part\n[1](#the-a-of-b-in-part) [2](b.md#own)\n"),
            ("b.md", "```\n# own\n```\n"),
        ]);
        assert_eq!(found, [("a.md".to_string(), "dead-link")]);
    }
}

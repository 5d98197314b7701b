//! Rules about dead things: a source file that no crate holds, a page that no page leads to.

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

/// Pages below docs/ that no other page links to, and links that lead nowhere.
pub(crate) fn pages(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut linked = BTreeSet::new();
    for (path, file) in tree.ending(".md") {
        for (at, line) in file.text.lines().enumerate() {
            for target in links(line) {
                let target = join(folder_of(path), target);
                if !tree.holds(&target) {
                    let text = format!("the link to `{target}` leads nowhere; name a file here");
                    findings.push(Finding::new(path, at + 1, "dead-link", text));
                } else if target != path {
                    linked.insert(target);
                }
            }
        }
    }
    let pages = tree.ending(".md").map(|(path, _)| path).filter(|path| path.starts_with("docs/"));
    for path in pages.filter(|path| !linked.contains(*path)) {
        let text = "no page leads here; link it from README.md, ARCHITECTURE.md or a page of docs/";
        findings.push(Finding::new(path, 1, "dead-page", text));
    }
    findings
}

/// The targets of a line's links into the tree, without their fragments.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| {
        let target = rest.split(')').next()?.split('#').next()?;
        (!target.is_empty() && !target.contains("://")).then_some(target)
    })
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

    #[test]
    fn a_page_without_a_link_and_a_link_without_a_page_are_found() {
        let tree = Tree::of(&[
            ("README.md", "See [a](docs/a.md#part), [b](docs/no.md), [c](https://c)."),
            ("docs/a.md", "See [itself](a.md) and [the code](../src)."),
            ("docs/b.md", "See [itself](b.md)."),
            ("src/lib.rs", ""),
        ]);
        let found: Vec<_> = pages(&tree).into_iter().map(|f| (f.path, f.rule)).collect();
        let want = [("README.md", "dead-link"), ("docs/b.md", "dead-page")];
        assert_eq!(found, want.map(|(path, rule)| (path.to_string(), rule)));
    }
}

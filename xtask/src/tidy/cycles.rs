//! A rule about imports: the files of a crate form layers, so that a reader can start at the
//! bottom. No cycle of imports has more than three files.
//!
//! An import is a `use` of a file outside of its tests. A file that names another one only by a
//! full path in its code, or that declares it with `mod`, does not import it.

use std::collections::{BTreeMap, BTreeSet};

use syn::{Item, UseTree};

use super::Finding;
use super::tree::{Tree, folder_of};

/// Most files of a cycle.
const FILES_MAX: usize = 3;

/// Crates with a longer cycle than that, and its length: it must not grow. A crate whose cycle has
/// been cut leaves the list.
const KNOWN: [(&str, usize); 0] = [];

/// The figures of one crate.
pub(crate) struct CrateShape {
    /// The folder of the crate.
    pub(crate) folder: String,
    pub(crate) files: usize,
    pub(crate) lines: usize,
    /// The files of the longest cycle; one file is none.
    pub(crate) cycle: Vec<String>,
}

/// Crates with a cycle of too many files.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let known = |folder: &str| KNOWN.iter().find(|(name, _)| *name == folder).map(|(_, len)| *len);
    let mut findings = Vec::new();
    for CrateShape { folder, cycle, .. } in shapes(tree) {
        let most = known(&folder).unwrap_or(FILES_MAX);
        if cycle.len() > most {
            let text = format!(
                "{} files import one another in a cycle (at most {most}): {}; move what they share \
                 into a file below them",
                cycle.len(),
                cycle.join(", ")
            );
            findings.push(Finding::new(&cycle[0], 1, "import-cycle", text));
        } else if cycle.len() < most && most > FILES_MAX {
            let text = format!("the cycle of {folder} has {} files; lower it here", cycle.len());
            findings.push(Finding::new("xtask/src/tidy/cycles.rs", 1, "import-cycle", text));
        }
    }
    findings
}

/// All crates of the tree with source files.
pub(crate) fn shapes(tree: &Tree) -> Vec<CrateShape> {
    let manifests = tree.ending("Cargo.toml").map(|(path, _)| folder_of(path));
    manifests.filter_map(|folder| shape(tree, folder)).collect()
}

fn shape(tree: &Tree, folder: &str) -> Option<CrateShape> {
    let src = if folder.is_empty() { "src/".to_owned() } else { format!("{folder}/src/") };
    let files: BTreeMap<Vec<String>, (&str, &super::tree::SourceFile)> = tree
        .ending(".rs")
        .filter(|(path, _)| path.starts_with(&src))
        .map(|(path, file)| (module(&path[src.len()..]), (path, file)))
        .collect();
    if files.is_empty() {
        return None;
    }
    let names: Vec<&Vec<String>> = files.keys().collect();
    let mut edges = vec![BTreeSet::new(); names.len()];
    for (from, (name, (_, file))) in files.iter().enumerate() {
        let Some(syntax) = &file.syntax else { continue };
        for path in syntax.items.iter().flat_map(|item| imports(item, name)) {
            // The longest prefix that is a file. The root is imported by every file that names a
            // re-export of it, so it is no layer.
            let found = (1..=path.len())
                .rev()
                .find_map(|len| names.binary_search(&&path[..len].to_vec()).ok());
            edges[from].extend(found.filter(|to| *to != from));
        }
    }
    let cycle = longest_cycle(&edges).into_iter();
    Some(CrateShape {
        folder: folder.to_owned(),
        files: files.len(),
        lines: files.values().map(|(_, file)| file.text.lines().count()).sum(),
        cycle: cycle.map(|at| files[names[at]].0.to_owned()).collect(),
    })
}

/// The module of a file below `src/`: `a/b.rs` is `a::b`, the root is empty.
fn module(path: &str) -> Vec<String> {
    let path = path.trim_end_matches(".rs").trim_end_matches("/mod");
    if matches!(path, "lib" | "main") {
        return Vec::new();
    }
    path.split('/').map(str::to_owned).collect()
}

/// The paths from the root of the crate that an item of the module `name` imports.
fn imports(item: &Item, name: &[String]) -> Vec<Vec<String>> {
    let Item::Use(item) = item else { return Vec::new() };
    let is_test = item.attrs.iter().any(|attribute| attribute.path().is_ident("cfg"));
    let mut found = Vec::new();
    if !is_test {
        paths(&item.tree, &mut Vec::new(), &mut found);
    }
    found.into_iter().filter_map(|path| from_root(&path, name)).collect()
}

/// A path from the root of the crate; none for a path into another crate.
fn from_root(path: &[String], name: &[String]) -> Option<Vec<String>> {
    let supers = path.iter().take_while(|part| *part == "super").count();
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some([name, &path[1..]].concat()),
        "super" => Some([&name[..name.len().checked_sub(supers)?], &path[supers..]].concat()),
        _ => None,
    }
}

fn paths(tree: &UseTree, prefix: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    match tree {
        UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            paths(&path.tree, prefix, found);
            prefix.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| paths(tree, prefix, found)),
        UseTree::Name(name) => found.push([&prefix[..], &[name.ident.to_string()]].concat()),
        UseTree::Rename(name) => found.push([&prefix[..], &[name.ident.to_string()]].concat()),
        UseTree::Glob(_) => found.push(prefix.clone()),
    }
}

/// The largest set of nodes that all reach one another.
fn longest_cycle(edges: &[BTreeSet<usize>]) -> Vec<usize> {
    let reach: Vec<BTreeSet<usize>> = (0..edges.len()).map(|from| reached(edges, from)).collect();
    let cycles = (0..edges.len()).map(|from| {
        let together = reach[from].iter().copied().filter(|to| reach[*to].contains(&from));
        together.collect::<Vec<usize>>()
    });
    cycles.max_by_key(Vec::len).unwrap_or_default()
}

fn reached(edges: &[BTreeSet<usize>], from: usize) -> BTreeSet<usize> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(at) = open.pop() {
        open.extend(edges[at].iter().copied().filter(|to| seen.insert(*to)));
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycle(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> = files.iter().chain([&("a/Cargo.toml", "")]).copied().collect();
        shapes(&Tree::of(&files)).remove(0).cycle
    }

    #[test]
    fn a_cycle_has_all_files_that_import_one_another() {
        let files = [
            ("a/src/lib.rs", "use crate::x::X;"),
            ("a/src/x.rs", "use super::y::{Y, z::Z};"),
            ("a/src/y.rs", "use crate::w;"),
            ("a/src/y/z.rs", "use crate::x::X; use std::fmt; use super::super::w::W;"),
            ("a/src/w.rs", "use self::part::P; #[cfg(test)] use crate::x::X;"),
            ("a/src/w/part.rs", "fn f() {}\n#[cfg(test)]\nmod tests { use crate::x::X; }"),
        ];
        assert_eq!(cycle(&files), ["a/src/x.rs", "a/src/y/z.rs"]);
    }

    #[test]
    fn a_cycle_of_four_files_is_a_finding() {
        let four = [
            ("a/Cargo.toml", ""),
            ("a/src/p.rs", "use crate::q::Q;"),
            ("a/src/q.rs", "use crate::r::R;"),
            ("a/src/r.rs", "use crate::s::S;"),
            ("a/src/s.rs", "use crate::p::P;"),
        ];
        assert_eq!(check(&Tree::of(&four)).len(), 1);
        let three = [four[0], four[1], four[2], ("a/src/r.rs", "use crate::p::P;")];
        assert_eq!(check(&Tree::of(&three)), []);
    }
}

//! A rule about the names of types: a name has one meaning in the workspace. At most two types
//! have the same name, unless the name is an idiom.
//!
//! A definition is a struct, an enum, a trait or a type alias at the top of a file under `src/`.
//! Associated types implement a trait and are none; neither are the types of tests.

use std::collections::BTreeMap;

use syn::Item;

use super::Finding;
use super::tree::Tree;

/// Most definitions of a name.
const DEFINITIONS_MAX: usize = 2;

/// Names that Rust programs give to a type of each module.
const IDIOMS: [&str; 8] =
    ["Args", "Config", "Error", "Inner", "Options", "Shared", "State", "Stats"];

/// Names with more definitions than that, and their number: it must not grow. A name that has
/// become rare leaves the list.
const KNOWN: [(&str, usize); 16] = [
    ("Answer", 3),
    ("Change", 3),
    ("Disk", 3),
    ("Entry", 4),
    ("File", 3),
    ("Files", 4),
    ("Head", 3),
    ("Job", 3),
    ("Kind", 5),
    ("Layout", 3),
    ("Part", 5),
    ("Superblock", 3),
    ("Table", 5),
    ("Turn", 3),
    ("Way", 3),
    ("Work", 3),
];

/// Names that too many types have.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = check_against(tree, &KNOWN);
    for (name, _) in KNOWN.iter().filter(|(name, _)| IDIOMS.contains(name)) {
        findings.push(own_finding(format!("`{name}` is an idiom; remove it from KNOWN")));
    }
    findings
}

fn check_against(tree: &Tree, known: &[(&str, usize)]) -> Vec<Finding> {
    let places = definitions(tree);
    let mut findings = Vec::new();
    for (name, paths) in places.iter().filter(|(name, _)| !IDIOMS.contains(&name.as_str())) {
        let listed = known.iter().find(|(listed, _)| listed == name).map(|(_, count)| *count);
        let most = listed.unwrap_or(DEFINITIONS_MAX);
        if paths.len() > most {
            let text = format!(
                "{} types are called `{name}` (at most {most}): {}; say in the name what each is",
                paths.len(),
                paths.join(", ")
            );
            findings.push(Finding::new(paths[0], 1, "type-name", text));
        }
    }
    for (name, count) in known {
        let found = places.get(*name).map_or(0, Vec::len);
        if found < *count {
            findings.push(own_finding(format!(
                "{found} types are called `{name}`, not {count}; lower the number in KNOWN, or \
                 remove the name if {DEFINITIONS_MAX} or fewer are left"
            )));
        }
    }
    findings
}

fn own_finding(text: String) -> Finding {
    Finding::new("xtask/src/tidy/type_names.rs", 1, "type-name", text)
}

/// The files that define each name, once for each definition.
fn definitions(tree: &Tree) -> BTreeMap<String, Vec<&str>> {
    let mut places: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (path, file) in tree.ending(".rs").filter(|(path, _)| path.contains("/src/")) {
        for name in file.syntax.iter().flat_map(|syntax| syntax.items.iter().filter_map(name_of)) {
            places.entry(name).or_default().push(path);
        }
    }
    places
}

fn name_of(item: &Item) -> Option<String> {
    match item {
        Item::Struct(item) => Some(item.ident.to_string()),
        Item::Enum(item) => Some(item.ident.to_string()),
        Item::Trait(item) => Some(item.ident.to_string()),
        Item::Type(item) => Some(item.ident.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREE: [(&str, &str); 3] = [
        ("crates/a/src/lib.rs", "struct Door;"),
        ("crates/b/src/lib.rs", "enum Door {}"),
        ("lab/c/src/lib.rs", "pub trait Door {}"),
    ];

    #[test]
    fn a_third_type_of_a_name_is_a_finding() {
        assert!(check_against(&Tree::of(&THREE[..2]), &[]).is_empty());
        let findings = check_against(&Tree::of(&THREE), &[]);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].to_string().contains("3 types are called `Door`"), "{}", findings[0]);
    }

    #[test]
    fn a_known_name_must_not_grow_and_its_number_is_lowered() {
        let tree = Tree::of(&THREE);
        assert!(check_against(&tree, &[("Door", 3)]).is_empty());
        assert_eq!(check_against(&tree, &[("Door", 4)]).len(), 1);
        assert_eq!(check_against(&Tree::of(&THREE[..2]), &[("Door", 3)]).len(), 1);
    }

    #[test]
    fn idioms_associated_types_and_types_of_tests_do_not_count() {
        let idioms = ["crates/a/src/a.rs", "crates/a/src/b.rs", "crates/a/src/c.rs"];
        let files = idioms.map(|path| (path, "enum Error {}"));
        assert!(check_against(&Tree::of(&files), &[]).is_empty());
        let files = idioms.map(|path| (path, "impl A for B { type Queue = C; }"));
        assert!(check_against(&Tree::of(&files), &[]).is_empty());
        let files = idioms.map(|path| (path, "mod tests { struct Fixture; }"));
        assert!(check_against(&Tree::of(&files), &[]).is_empty());
    }
}

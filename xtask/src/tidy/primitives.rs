//! Rules about the primitives of crates/sync: each has the same head, a loom model, and a row in
//! docs/locks.md.

use super::Finding;
use super::source::has_word;
use super::tree::{SourceFile, Tree};

/// The folder of the primitives.
const PRIMITIVES: &str = "crates/sync/src/";
/// The lines of a primitive's head, in this order.
const HEAD: [&str; 7] = ["Protects", "Why", "States", "Order", "Common", "Cost", "Before"];
/// Files of crates/sync that name shared memory but are no primitives: they select between the
/// types of the standard library and those of loom.
const SHIMS: [&str; 2] = ["crates/sync/src/atomics.rs", "crates/sync/src/sync_cell.rs"];
/// The table of the order in which locks are taken.
const LOCKS: &str = "docs/locks.md";
/// Types that only a primitive may use.
const SHARED: [&str; 5] = ["AtomicU", "AtomicI", "AtomicBool", "AtomicPtr", "UnsafeCell"];

/// Every file of crates/sync.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let locks = tree.get(LOCKS).map_or("", |file| &file.text);
    for (path, file) in tree.ending(".rs").filter(|(path, _)| path.starts_with(PRIMITIVES)) {
        let name = path[PRIMITIVES.len()..].trim_end_matches(".rs");
        if is_primitive(file) {
            head(path, file, &mut findings);
            model(tree, path, file, &mut findings);
            if !locks.contains(&format!("`{name}`")) {
                let text = format!("{LOCKS} has no row for `{name}`; say there where it ranks");
                findings.push(Finding::new(path, 1, "lock-table", text));
            }
        } else if !SHIMS.contains(&path) && !name.contains('/') && holds_shared(file) {
            let text = "the file shares memory between threads but is no primitive; open its head \
                        with `//! Primitive: ...`";
            findings.push(Finding::new(path, 1, "primitive", text));
        }
    }
    findings
}

fn is_primitive(file: &SourceFile) -> bool {
    heads(file).any(|line| line.starts_with("Primitive:"))
}

fn holds_shared(file: &SourceFile) -> bool {
    file.text.lines().any(|line| {
        !line.trim_start().starts_with("//") && SHARED.iter().any(|word| line.contains(word))
    })
}

/// The lines of a file's head, without the marks.
fn heads(file: &SourceFile) -> impl Iterator<Item = &str> {
    let lines = file.text.lines().take_while(|line| line.starts_with("//!"));
    lines.map(|line| line.trim_start_matches("//!").trim_start())
}

fn head(path: &str, file: &SourceFile, findings: &mut Vec<Finding>) {
    let has = |key: &str| heads(file).position(|line| line.split_whitespace().next() == Some(key));
    let mut last = 0;
    for key in HEAD {
        match has(key) {
            None => {
                let text =
                    format!("the primitive's head has no line `{key}`; it has {}", HEAD.join(", "));
                findings.push(Finding::new(path, 1, "primitive-head", text));
            }
            Some(at) if at < last => {
                let text =
                    format!("`{key}` stands too early in the head; it is {}", HEAD.join(", "));
                findings.push(Finding::new(path, at + 1, "primitive-head", text));
            }
            Some(at) => last = at,
        }
    }
}

fn model(tree: &Tree, path: &str, file: &SourceFile, findings: &mut Vec<Finding>) {
    let name = path[PRIMITIVES.len()..].trim_end_matches(".rs");
    let has_model = |file: &SourceFile| file.text.contains("loom::model");
    // A primitive that is only used by another one may be covered by the other one's model.
    let mut others = tree.ending(".rs").filter(|(path, _)| path.starts_with(PRIMITIVES));
    let elsewhere = others.any(|(_, other)| has_model(other) && has_word(&other.text, name));
    if !has_model(file) && !elsewhere {
        let text = "no loom model uses the primitive; add one under `#[cfg(all(test, loom))]`";
        findings.push(Finding::new(path, 1, "primitive-model", text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "//! Primitive: a lamp.\n//!\n//! Protects   light.\n//! Why  dark.\n\
        //! States  on.\n//! Order none.\n//! Common  off.\n//! Cost  none.\n//! Before  candle.\n\
        fn a() { loom::model(|| {}) }\n";

    fn rules(text: &str, locks: &str) -> Vec<&'static str> {
        let tree = Tree::of(&[("crates/sync/src/lamp.rs", text), ("docs/locks.md", locks)]);
        check(&tree).iter().map(|f| f.rule).collect()
    }

    #[test]
    fn a_complete_primitive_passes() {
        assert!(rules(GOOD, "| `lamp` | 1 |").is_empty());
        assert!(rules("//! No primitive, no atomics.\n", "").is_empty());
    }

    #[test]
    fn each_missing_line_of_the_head_is_found() {
        for key in HEAD {
            let bad = GOOD.replace(&format!("//! {key}"), "//! Else");
            assert_eq!(rules(&bad, "`lamp`"), ["primitive-head"], "{key}");
        }
        let swapped = GOOD.replace("Why", "?").replace("Protects", "Why").replace('?', "Protects");
        assert_eq!(rules(&swapped, "`lamp`"), ["primitive-head"]);
    }

    #[test]
    fn a_primitive_without_a_row_or_a_model_is_found() {
        assert_eq!(rules(GOOD, "`lantern`"), ["lock-table"]);
        assert_eq!(rules(&GOOD.replace("loom::model", "model"), "`lamp`"), ["primitive-model"]);
    }

    #[test]
    fn a_primitive_may_be_modelled_in_the_one_that_uses_it() {
        let inner = GOOD.replace("loom::model", "model");
        let found = |outer: &str| {
            let files = [
                ("crates/sync/src/lamp.rs", inner.as_str()),
                ("crates/sync/src/hall.rs", outer),
                ("docs/locks.md", "`lamp`"),
            ];
            check(&Tree::of(&files)).len()
        };
        assert_eq!(found("//! A hall.\nuse crate::lamp; fn a() { loom::model(|| {}) }"), 0);
        assert_eq!(found("//! A hall.\nuse crate::lamp;"), 1);
    }

    #[test]
    fn an_atomic_outside_a_primitive_is_found() {
        assert_eq!(rules("//! A lamp.\nuse crate::atomics::AtomicU32;\n", ""), ["primitive"]);
    }
}

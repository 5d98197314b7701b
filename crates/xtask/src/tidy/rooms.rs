//! Rules about rooms: each has the same head and a loom model, and docs/locks.md knows it.

use super::Finding;
use super::source::has_word;
use super::tree::{File, Tree};

/// Where the rooms are.
const ROOMS: &str = "crates/sync/src/";
/// The lines of a room's head, in this order.
const HEAD: [&str; 7] = ["Protects", "Why", "States", "Order", "Common", "Cost", "Before"];
/// The files of crates/sync that are no rooms although they name what threads share: the doors to
/// the standard library's, or loom's.
const DOORS: [&str; 2] = ["crates/sync/src/atomics.rs", "crates/sync/src/cell.rs"];
/// The table of the order in which locks are taken.
const LOCKS: &str = "docs/locks.md";
/// What only a room may hold.
const SHARED: [&str; 5] = ["AtomicU", "AtomicI", "AtomicBool", "AtomicPtr", "UnsafeCell"];

/// Every file of crates/sync.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let locks = tree.get(LOCKS).map_or("", |file| &file.text);
    for (path, file) in tree.ending(".rs").filter(|(path, _)| path.starts_with(ROOMS)) {
        let name = path[ROOMS.len()..].trim_end_matches(".rs");
        if is_room(file) {
            head(path, file, &mut findings);
            model(tree, path, file, &mut findings);
            if !locks.contains(&format!("`{name}`")) {
                let text = format!("{LOCKS} has no row for `{name}`; say there where it ranks");
                findings.push(Finding::new(path, 1, "lock-table", text));
            }
        } else if !DOORS.contains(&path) && !name.contains('/') && holds_shared(file) {
            let text = "the file shares memory between threads but is no room; open its head with \
                        `//! Room: ...`";
            findings.push(Finding::new(path, 1, "room", text));
        }
    }
    findings
}

fn is_room(file: &File) -> bool {
    heads(file).any(|line| line.starts_with("Room:"))
}

fn holds_shared(file: &File) -> bool {
    file.text.lines().any(|line| {
        !line.trim_start().starts_with("//") && SHARED.iter().any(|word| line.contains(word))
    })
}

/// The lines of a file's head, without the marks.
fn heads(file: &File) -> impl Iterator<Item = &str> {
    let lines = file.text.lines().take_while(|line| line.starts_with("//!"));
    lines.map(|line| line.trim_start_matches("//!").trim_start())
}

fn head(path: &str, file: &File, findings: &mut Vec<Finding>) {
    let has = |key: &str| heads(file).position(|line| line.split_whitespace().next() == Some(key));
    let mut last = 0;
    for key in HEAD {
        match has(key) {
            None => {
                let text =
                    format!("the room's head has no line `{key}`; it has {}", HEAD.join(", "));
                findings.push(Finding::new(path, 1, "room-head", text));
            }
            Some(at) if at < last => {
                let text =
                    format!("`{key}` stands too early in the head; it is {}", HEAD.join(", "));
                findings.push(Finding::new(path, at + 1, "room-head", text));
            }
            Some(at) => last = at,
        }
    }
}

fn model(tree: &Tree, path: &str, file: &File, findings: &mut Vec<Finding>) {
    let name = path[ROOMS.len()..].trim_end_matches(".rs");
    let has_model = |file: &File| file.text.contains("loom::model");
    // A room that is only ever entered from another may be modelled there.
    let mut others = tree.ending(".rs").filter(|(path, _)| path.starts_with(ROOMS));
    let elsewhere = others.any(|(_, other)| has_model(other) && has_word(&other.text, name));
    if !has_model(file) && !elsewhere {
        let text = "no loom model enters the room; add one under `#[cfg(all(test, loom))]`";
        findings.push(Finding::new(path, 1, "room-model", text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "//! Room: a lamp.\n//!\n//! Protects   light.\n//! Why  dark.\n\
        //! States  on.\n//! Order none.\n//! Common  off.\n//! Cost  none.\n//! Before  candle.\n\
        fn a() { loom::model(|| {}) }\n";

    fn rules(room: &str, locks: &str) -> Vec<&'static str> {
        let tree = Tree::of(&[("crates/sync/src/lamp.rs", room), ("docs/locks.md", locks)]);
        check(&tree).iter().map(|f| f.rule).collect()
    }

    #[test]
    fn a_whole_room_passes() {
        assert!(rules(GOOD, "| `lamp` | 1 |").is_empty());
        assert!(rules("//! No room, no atomics.\n", "").is_empty());
    }

    #[test]
    fn each_missing_line_of_the_head_is_found() {
        for key in HEAD {
            let bad = GOOD.replace(&format!("//! {key}"), "//! Else");
            assert_eq!(rules(&bad, "`lamp`"), ["room-head"], "{key}");
        }
        let swapped = GOOD.replace("Why", "?").replace("Protects", "Why").replace('?', "Protects");
        assert_eq!(rules(&swapped, "`lamp`"), ["room-head"]);
    }

    #[test]
    fn a_room_without_a_row_or_a_model_is_found() {
        assert_eq!(rules(GOOD, "`lantern`"), ["lock-table"]);
        assert_eq!(rules(&GOOD.replace("loom::model", "model"), "`lamp`"), ["room-model"]);
    }

    #[test]
    fn a_room_may_be_modelled_in_the_one_that_leads_to_it() {
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
    fn an_atomic_outside_a_room_is_found() {
        assert_eq!(rules("//! A lamp.\nuse crate::atomics::AtomicU32;\n", ""), ["room"]);
    }
}

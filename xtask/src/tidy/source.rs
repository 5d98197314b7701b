//! Rules about the shape of a source file: its head, its length, its functions, its columns.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::Finding;
use super::tree::{SourceFile, Tree};

/// Lines of a file before its tests.
const FILE_LINES_MAX: usize = 1_000;
/// Lines of a function, from its name to its closing brace.
const FUNCTION_LINES_MAX: usize = 70;
/// A shorter file needs a reason.
const SMALL_FILE_LINES: usize = 60;
/// Columns of a line, as rustfmt.toml has it; rustfmt leaves comments and strings alone.
const COLUMNS_MAX: usize = 100;

/// Small files, each with its reason.
const SMALL_FILES: [(&str, &str); 24] = [
    ("crates/core/src/claim.rs", "shared by the disks of the crate and by exporters"),
    ("crates/core/src/limits.rs", "the limits of a device, which all layers read and none changes"),
    ("crates/core/src/provisional.rs", "shared by the devices that make files, and by the daemon"),
    ("crates/core/src/zone/document.rs", "test code that two crates include by its path"),
    ("crates/os/src/identity.rs", "one facility of the system a file"),
    (
        "crates/smr/src/capacity.rs",
        "the answers to one command a file, by the clauses of the standard",
    ),
    ("crates/smr/src/sd/error.rs", "the error of a driver whose files form layers"),
    ("crates/testing/src/channel.rs", "one fixture a file"),
    ("crates/testing/src/temp_dir.rs", "one fixture a file"),
    ("crates/volume-admin/src/check.rs", "one operation on a pool a file"),
    (
        "crates/volume/src/open.rs",
        "above pool, committer and recovery, which may not import one another",
    ),
    ("crates/volume/src/repairs.rs", "one log of all operations that repair"),
    ("crates/volume/src/options.rs", "plain data, below everything that has an option"),
    ("crates/yard/src/api/ublk.rs", "the requests about one protocol a file"),
    ("crates/yard/src/event.rs", "shared by the daemon, the control plane and a standby"),
    ("crates/yard/src/suggestion.rs", "shared by URIs, the configuration and the lab"),
    ("lab/bench/src/clock.rs", "the calendar, which only names of results need"),
    ("lab/bench/src/error.rs", "the error of the lab"),
    ("lab/bench/src/experiments/cached.rs", "shared by experiments"),
    ("lab/bench/src/limits/fio.rs", "one limit of the machine a file"),
    ("lab/bench/src/metric.rs", "the names and units of the results"),
    ("lab/bench/src/serve.rs", "one command of the lab a file"),
    ("lab/bench/src/tools/copy.rs", "one program a file"),
    ("lab/bench/src/tools/resident.rs", "one measure of a process a file"),
];

/// Every source file by every rule of this page.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in tree.ending(".rs") {
        head(path, file, &mut findings);
        length(path, file, &mut findings);
        columns(path, file, &mut findings);
        functions(path, file, &mut findings);
        allowances(path, file, &mut findings);
    }
    for (path, file) in tree.ending(".md") {
        page_columns(path, file, &mut findings);
    }
    findings
}

/// The line, counted from 0, at which a file's tests begin; its end if it has none.
pub(crate) fn tests_start(path: &str, text: &str) -> usize {
    if path.starts_with("tests/") || path.contains("/tests/") || path.ends_with("/tests.rs") {
        return 0;
    }
    let lines: Vec<&str> = text.lines().collect();
    let opens_tests = |at: usize| {
        let is_test = lines[at].starts_with("#[cfg(") && has_word(lines[at], "test");
        let next = lines[at + 1..].iter().find(|line| !line.starts_with('#'));
        is_test && next.is_some_and(|line| line.trim_start_matches("pub ").starts_with("mod "))
    };
    (0..lines.len()).find(|&at| opens_tests(at)).unwrap_or(lines.len())
}

/// Whether `word` stands in `text` as a word of its own.
pub(crate) fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part)
    })
}

fn head(path: &str, file: &SourceFile, findings: &mut Vec<Finding>) {
    let first = file.text.lines().next().unwrap_or_default();
    if !first.starts_with("//! ") {
        let text = "the file has no head; begin it with `//!` and what it is and why it is here";
        findings.push(Finding::new(path, 1, "head", text));
    }
}

fn length(path: &str, file: &SourceFile, findings: &mut Vec<Finding>) {
    let lines = tests_start(path, &file.text);
    if lines > FILE_LINES_MAX {
        let text = format!(
            "{lines} lines before the tests; cut the file where a second noun begins \
             (at most {FILE_LINES_MAX})"
        );
        findings.push(Finding::new(path, FILE_LINES_MAX + 1, "file-length", text));
    }
}

/// Every file of a crate that is too short and has no reason.
pub(crate) fn small(tree: &Tree) -> Vec<Finding> {
    small_files(tree, &SMALL_FILES)
}

/// Files of crates that are too short without a reason. These have one by their kind: the root of a
/// crate, the head of a folder of modules, a file of `crates/sync`, which has one technique a file,
/// tests, and a file that allows unsafe code, which is allowed per file.
fn small_files(tree: &Tree, reasons: &[(&str, &str)]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut small = Vec::new();
    for (path, file) in tree.ending(".rs") {
        let is_of_a_crate = path.starts_with("crates/") || path.starts_with("lab/");
        let is_of_sync = path.starts_with("crates/sync/");
        let is_root = ["/src/lib.rs", "/src/main.rs"].iter().any(|root| path.ends_with(root));
        let is_test = tests_start(path, &file.text) == 0 || path.ends_with("_tests.rs");
        let lines = file.text.lines().count();
        let has_kind = is_root || is_test || is_of_sync || is_head(file) || allows_unsafe(file);
        if !is_of_a_crate || !path.contains("/src/") || has_kind || lines >= SMALL_FILE_LINES {
            continue;
        }
        small.push(path);
        if !reasons.iter().any(|(known, _)| *known == path) {
            let text = format!(
                "{lines} lines; a file under {SMALL_FILE_LINES} lines needs a reason: merge it \
                 into a neighbour of the same concept, or add it to SMALL_FILES with the reason"
            );
            findings.push(Finding::new(path, 1, "small-file", text));
        }
    }
    for (path, _) in reasons.iter().filter(|(path, _)| !small.contains(path)) {
        let text = format!("`{path}` is no small file; remove it from SMALL_FILES");
        findings.push(Finding::new("xtask/src/tidy/source.rs", 1, "small-file", text));
    }
    findings
}

fn allows_unsafe(file: &SourceFile) -> bool {
    file.text.lines().any(|line| line.starts_with("#![allow(unsafe_code"))
}

/// Whether a file declares modules that are files.
fn is_head(file: &SourceFile) -> bool {
    let mut items = file.syntax.iter().flat_map(|syntax| &syntax.items);
    items.any(|item| matches!(item, syn::Item::Mod(module) if module.content.is_none()))
}

fn columns(path: &str, file: &SourceFile, findings: &mut Vec<Finding>) {
    for (at, line) in file.text.lines().enumerate() {
        let columns = line.chars().count();
        // Neither an address nor a row of a table can be broken.
        let is_row = line.trim_start().trim_start_matches(['/', '!', ' ']).starts_with('|');
        if columns > COLUMNS_MAX && !line.contains("://") && !is_row {
            let text = format!("{columns} columns; break the line at {COLUMNS_MAX}");
            findings.push(Finding::new(path, at + 1, "columns", text));
        }
    }
}

/// The columns of a page's prose. Code, rows of tables, headings and addresses cannot be broken;
/// archived measurements and the table of contents stay as they are.
fn page_columns(path: &str, file: &SourceFile, findings: &mut Vec<Finding>) {
    if path.starts_with("docs/measurements/") || path == "docs/SUMMARY.md" {
        return;
    }
    let mut is_code = false;
    for (at, line) in file.text.lines().enumerate() {
        is_code ^= line.trim_start().starts_with("```");
        let columns = line.chars().count();
        let is_one_word = line.trim().starts_with('`') && line.matches('`').count() == 2;
        let is_fixed = is_code || is_one_word || line.starts_with("    ") || line.contains("://");
        if columns > COLUMNS_MAX && !is_fixed && !line.trim_start().starts_with(['|', '#']) {
            let text = format!("{columns} columns; break the line at {COLUMNS_MAX}");
            findings.push(Finding::new(path, at + 1, "columns", text));
        }
    }
}

fn functions(path: &str, file: &SourceFile, findings: &mut Vec<Finding>) {
    let Some(syntax) = &file.syntax else {
        let text = "the file does not parse as Rust; `cargo check` says why";
        findings.push(Finding::new(path, 1, "parse", text));
        return;
    };
    let mut lengths = Lengths { path, findings };
    lengths.visit_file(syntax);
}

/// Visits a file and measures every function.
struct Lengths<'a> {
    path: &'a str,
    findings: &'a mut Vec<Finding>,
}

impl Lengths<'_> {
    fn measure(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let first = signature.fn_token.span.start().line;
        let lines = block.span().end().line + 1 - first;
        if lines > FUNCTION_LINES_MAX {
            let text = format!(
                "`{}` has {lines} lines; give its parts names of their own (at most \
                 {FUNCTION_LINES_MAX})",
                signature.ident
            );
            self.findings.push(Finding::new(self.path, first, "function-length", text));
        }
    }
}

impl<'ast> Visit<'ast> for Lengths<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.measure(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.measure(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.measure(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

/// A file that uses standard locks or atomics says why, next to the allowance.
fn allowances(path: &str, file: &SourceFile, findings: &mut Vec<Finding>) {
    let lines: Vec<&str> = file.text.lines().map(str::trim).collect();
    for (at, line) in lines.iter().enumerate() {
        let allows = line.starts_with("#![allow") || line.starts_with("#[allow");
        if !allows || !line.contains("disallowed_") || path.starts_with("crates/sync/") {
            continue;
        }
        let above = at > 0 && lines[at - 1].starts_with("//");
        if !above && !line.contains("//") && !line.contains("reason") {
            let text = "the allowance gives no reason; say above it why a standard lock or atomic \
                        is sufficient here, or move what is shared into a primitive of crates/sync";
            findings.push(Finding::new(path, at + 1, "allowance", text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Vec<&'static str> {
        check(&Tree::of(&[("crates/a/src/lib.rs", text)])).iter().map(|f| f.rule).collect()
    }

    #[test]
    fn a_good_file_passes() {
        assert!(rules("//! A thing, because.\n\npub fn one() {}\n").is_empty());
    }

    #[test]
    fn a_file_without_a_head_is_found() {
        assert_eq!(rules("#![allow(unused)]\n//! Too late.\n"), ["head"]);
        assert_eq!(rules(""), ["head"]);
    }

    #[test]
    fn a_long_file_is_found_and_its_tests_do_not_count() {
        let lines = |n: usize| "const _: () = ();\n".repeat(n);
        let file = |n: usize| format!("//! Head.\n{}", lines(n));
        assert_eq!(rules(&file(1_000)), ["file-length"]);
        assert!(rules(&file(999)).is_empty());
        for open in
            ["#[cfg(test)]", "#[cfg(all(test, not(loom)))]", "#[cfg(test)]\n#[rustfmt::skip]"]
        {
            let tests = format!("{}{open}\nmod tests {{\n{}}}\n", file(999), lines(100));
            assert!(rules(&tests).is_empty(), "{open}");
        }
        // A single item for tests does not open them.
        let early = format!("//! Head.\n#[cfg(test)]\nuse a::b;\n{}", lines(1_000));
        assert_eq!(rules(&early), ["file-length"]);
    }

    #[test]
    fn a_long_function_is_found_wherever_it_stands() {
        let body = |n: usize| format!("{{\n{}}}", "a();\n".repeat(n));
        for (open, close) in [("", ""), ("impl A {\n", "\n}"), ("trait A {\n", "\n}")] {
            let function = |n| format!("//! Head.\n{open}fn long() {}{close}\n", body(n));
            assert_eq!(rules(&function(69)), ["function-length"], "{open}");
            assert!(rules(&function(68)).is_empty(), "{open}");
        }
    }

    #[test]
    fn a_long_line_is_found_unless_it_cannot_be_broken() {
        assert_eq!(rules(&format!("//! {}\n", "é".repeat(97))), ["columns"]);
        assert!(rules(&format!("//! {}\n", "é".repeat(96))).is_empty());
        assert!(rules(&format!("//! https://{}\n", "a".repeat(100))).is_empty());
        assert!(rules(&format!("//! | {} |\n", "a".repeat(100))).is_empty());
    }

    #[test]
    fn an_allowance_without_a_reason_is_found() {
        let allow = "#![allow(clippy::disallowed_types)]";
        assert_eq!(rules(&format!("//! Head.\n\n{allow}\n")), ["allowance"]);
        assert!(rules(&format!("//! Head.\n\n{allow} // Control plane only.\n")).is_empty());
        assert!(rules(&format!("//! Head.\n\n// Control plane only.\n{allow}\n")).is_empty());
    }

    #[test]
    fn a_small_file_without_a_reason_is_found() {
        let found = |path: &str, text: &str| small_files(&Tree::of(&[(path, text)]), &[]).len();
        let path = "crates/a/src/b.rs";
        assert_eq!(found(path, "//! Head.\n"), 1);
        assert_eq!(found(path, &"//! Head.\n".repeat(SMALL_FILE_LINES)), 0);
        for text in ["//! Head.\nmod c;\n", "//! Head.\n#![allow(unsafe_code)] // A call.\n"] {
            assert_eq!(found(path, text), 0, "{text}");
        }
        for path in ["crates/a/src/lib.rs", "crates/sync/src/b.rs", "crates/a/tests/b.rs"] {
            assert_eq!(found(path, "//! Head.\n"), 0, "{path}");
        }
        let tree = Tree::of(&[(path, "//! Head.\n")]);
        assert!(small_files(&tree, &[(path, "a reason")]).is_empty());
        assert_eq!(small_files(&Tree::of(&[]), &[(path, "a reason")]).len(), 1);
    }

    #[test]
    fn a_file_that_does_not_parse_is_found() {
        assert_eq!(rules("//! Head.\nfn (\n"), ["parse"]);
    }

    #[test]
    fn long_lines_of_prose_are_found_in_pages() {
        let long = "word ".repeat(21);
        let found = |text: &str| check(&Tree::of(&[("docs/a.md", text)])).len();
        assert_eq!(found(&long), 1);
        assert_eq!(found(&format!("```\n{long}\n```\n| {long} |\n# {long}\n    {long}\n")), 0);
        assert_eq!(check(&Tree::of(&[("docs/measurements/a.md", &long)])), []);
    }
}

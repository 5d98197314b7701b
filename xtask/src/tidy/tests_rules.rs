//! Rules about tests: none is ignored, none sleeps, none asserts on the clock, and none is in a doc
//! comment, where `make test` does not run it.

use super::Finding;
use super::source::tests_start;
use super::tree::Tree;

/// Test code that may sleep, each with its reason.
const SLEEPERS: [(&str, &str); 0] = [];

/// What puts a thread to sleep for a time.
const SLEEPS: [&str; 3] = ["thread::sleep", "time::sleep", "sleep_ms"];

/// Every source file's test code.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in tree.ending(".rs") {
        let start = tests_start(path, &file.text);
        let mut is_example = false;
        for (at, line) in file.text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let mut find = |rule, text: &str| findings.push(Finding::new(path, at + 1, rule, text));
            if let Some(language) = fence(line) {
                is_example = !is_example;
                if is_example && language != "text" {
                    find("doc-test", "no test runs it; mark it as text, or write a unit test");
                }
            }
            if code.trim_start().starts_with("#[ignore") {
                find("ignored-test", "a test that never runs tests nothing; mend or remove it");
            }
            if at < start {
                continue;
            }
            let may_sleep = SLEEPERS.iter().any(|(allowed, _)| *allowed == path);
            if !may_sleep && SLEEPS.iter().any(|sleep| has_code(code, sleep)) {
                find(
                    "sleeping-test",
                    "a test that sleeps is slow on a good day and wrong on a bad one; wait for \
                     the event, or turn a clock of your own",
                );
            }
            if has_code(code, "assert") && has_code(code, "elapsed()") {
                find("timed-test", "a loaded machine fails it; count what happened instead");
            }
        }
    }
    findings.extend(stale(tree));
    findings
}

/// What a doc comment's line says after the marks that begin or end a block of code.
fn fence(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("///").or(line.strip_prefix("//!"))?.trim().strip_prefix("```")
}

/// Whether `code` holds `word` outside a string.
fn has_code(code: &str, word: &str) -> bool {
    code.split('"').step_by(2).any(|part| part.contains(word))
}

/// Allowances for files that are gone.
fn stale(tree: &Tree) -> Vec<Finding> {
    let gone = SLEEPERS.iter().filter(|(path, _)| tree.get(path).is_none());
    gone.map(|(path, _)| Finding::new(path, 1, "sleeping-test", "gone; take it off the list"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, text: &str) -> Vec<&'static str> {
        let tree = Tree::of(&[(path, text)]);
        check(&tree).iter().filter(|f| f.path == path).map(|f| f.rule).collect()
    }

    #[test]
    fn an_ignored_test_is_found() {
        let ignored = concat!("#[ign", "ore]\nfn a() {}\n");
        assert_eq!(rules("crates/a/src/lib.rs", ignored), ["ignored-test"]);
    }

    #[test]
    fn a_sleeping_test_is_found_and_a_sleeping_product_is_not() {
        let sleep = "fn a() { std::thread::sleep(b) }\n";
        assert!(rules("crates/a/src/lib.rs", sleep).is_empty());
        let tests = format!("#[cfg(test)]\nmod tests {{\n{sleep}}}\n");
        assert_eq!(rules("crates/a/src/lib.rs", &tests), ["sleeping-test"]);
        assert_eq!(rules("tests/interop.rs", sleep), ["sleeping-test"]);
        assert_eq!(rules("crates/a/tests/b.rs", sleep), ["sleeping-test"]);
    }

    #[test]
    fn an_example_that_would_not_run_is_found() {
        let block = |language: &str| format!("//! ```{language}\n//! f();\n//! ```\n");
        let found = |text: String| rules("crates/a/src/lib.rs", &text);
        assert!(found(block("text")).is_empty());
        assert_eq!(found(block("")), ["doc-test"]);
        assert_eq!(found(block("text") + &block("ignore")), ["doc-test"]);
        assert_eq!(
            found("    /// ```rust\n    /// f();\n    /// ```\nfn a() {}\n".to_owned()),
            ["doc-test"]
        );
    }

    #[test]
    fn a_timed_assertion_is_found() {
        let timed = "fn a() { assert!(start.elapsed() < b) }\n";
        assert_eq!(rules("tests/interop.rs", timed), ["timed-test"]);
    }
}

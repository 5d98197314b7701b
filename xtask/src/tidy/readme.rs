//! Rules about README.md: it is short, and every command and path in it exists.

use std::collections::BTreeSet;

use syn::visit::{self, Visit};

use super::Finding;
use super::tree::{SourceFile, Tree};

const PATH: &str = "README.md";
const LINES_MAX: usize = 120;
/// The crate whose command line the README teaches.
const CLI: &str = "crates/cli/src/";

/// README.md against the tree.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some(readme) = tree.get(PATH) else {
        return vec![Finding::new(PATH, 1, "readme", "there is none; write it")];
    };
    let lines = readme.text.lines().count();
    if lines >= LINES_MAX {
        let text = format!("{lines} lines; move the rest to docs/ (under {LINES_MAX})");
        findings.push(Finding::new(PATH, LINES_MAX, "readme", text));
    }
    let known = Known::of(tree);
    for (at, snippet) in snippets(&readme.text) {
        // Text in quotes is for another program.
        let snippet: String = snippet.split('\'').step_by(2).collect();
        for command in snippet.split(['|', ';', '&']) {
            if let Some(text) = known.doubt(tree, command) {
                findings.push(Finding::new(PATH, at, "readme", text));
            }
        }
    }
    findings
}

/// Pieces of code in the page, with their lines: spans, commands at a prompt, other blocks' lines.
fn snippets(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut block: Option<&str> = None;
    for (at, line) in text.lines().enumerate() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            block = if block.is_some() { None } else { Some(language) };
            continue;
        }
        match (block, line.strip_prefix("$ ")) {
            (Some(_), Some(command)) => found.push((at + 1, command.to_string())),
            // What a program printed is not a command.
            (Some("console"), None) => {}
            (Some(_), None) => {
                // The first column of a map of folders.
                let first = line.split_whitespace().next().unwrap_or_default();
                let whole = if first.contains('/') { first } else { line };
                found.push((at + 1, whole.to_string()));
            }
            (None, _) => {
                let spans = line.split('`').skip(1).step_by(2);
                found.extend(spans.map(|span| (at + 1, span.to_string())));
            }
        }
    }
    found
}

/// What a command may name.
struct Known {
    targets: BTreeSet<String>,
    packages: BTreeSet<String>,
    cli: CommandLine,
}

impl Known {
    fn of(tree: &Tree) -> Known {
        let makefile = tree.get("Makefile").map_or("", |file| &file.text);
        let rules = makefile.lines().filter(|l| !l.starts_with(['\t', '#', '.', ' ']));
        let rules = rules.filter_map(|l| l.split_once(':')).filter(|(_, r)| !r.starts_with('='));
        let targets = rules.flat_map(|(names, _)| names.split_whitespace().map(String::from));
        let packages = tree.ending("Cargo.toml").filter_map(|(_, file)| {
            let table = file.text.parse::<toml::Table>().ok()?;
            Some(table.get("package")?.get("name")?.as_str()?.to_string())
        });
        let mut cli = CommandLine::default();
        for (_, file) in tree.files().filter(|(path, _)| path.starts_with(CLI)) {
            cli.read(file);
        }
        Known { targets: targets.collect(), packages: packages.collect(), cli }
    }

    /// What is wrong with a command or a path, if anything is.
    fn doubt(&self, tree: &Tree, command: &str) -> Option<String> {
        let words: Vec<&str> = command.split_whitespace().collect();
        let first = *words.first()?;
        let program = first.rsplit('/').next().unwrap_or(first);
        match program {
            "make" => {
                let mut targets =
                    words[1..].iter().filter(|w| !w.contains(['=', '-']) || w.contains("fuzz"));
                let target = targets.find(|target| !self.targets.contains(**target))?;
                Some(format!("the Makefile has no target `{target}`; name one that it has"))
            }
            "blockyard" => self.cli.doubt(&words[1..]),
            "cargo" => {
                let package = words.iter().skip_while(|word| **word != "-p").nth(1)?;
                let known = self.packages.contains(*package);
                (!known)
                    .then(|| format!("no package is called `{package}`; name one of the workspace"))
            }
            _ => {
                let foreign = first.starts_with(['/', '-', '$', '~', '<']) || first.contains(':');
                let is_path =
                    first.contains('/') || first.ends_with(".md") || first.ends_with(".rs");
                let outside = foreign || !is_path || words.len() > 1;
                (!outside && !first.starts_with("target/") && !tree.holds(first)).then(|| {
                    format!("the tree has no `{first}`; name a file or folder that exists")
                })
            }
        }
    }
}

/// The sub-commands and options that the binary's clap types define.
#[derive(Default)]
struct CommandLine {
    commands: BTreeSet<String>,
    options: BTreeSet<String>,
}

impl CommandLine {
    fn read(&mut self, file: &SourceFile) {
        if let Some(syntax) = &file.syntax {
            self.visit_file(syntax);
        }
    }

    fn doubt(&self, words: &[&str]) -> Option<String> {
        let word = words.iter().find(|word| !word.starts_with('-'));
        if let Some(word) = word.filter(|word| !self.commands.contains(**word)) {
            return Some(format!("blockyard has no command `{word}`; name one that it has"));
        }
        let names = words.iter().filter_map(|word| word.strip_prefix("--"));
        let names = names.map(|name| name.split('=').next().unwrap_or(name));
        let mut names = names.filter(|name| !matches!(*name, "" | "help" | "version"));
        let name = names.find(|name| !self.options.contains(*name))?;
        Some(format!("blockyard has no option `--{name}`; name one that it has"))
    }
}

impl<'ast> Visit<'ast> for CommandLine {
    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        if derives(&item.attrs, "Subcommand") {
            self.commands.extend(item.variants.iter().map(|v| kebab(&v.ident.to_string())));
            self.commands.insert("help".into());
        }
        visit::visit_item_enum(self, item);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        let Some(ident) = &field.ident else { return };
        for text in field.attrs.iter().filter(|a| a.path().is_ident("arg")).map(tokens) {
            let Some((_, rest)) = text.split_once("long") else { continue };
            let named = rest.trim_start().strip_prefix('=').and_then(|r| r.split('"').nth(1));
            self.options.insert(named.map_or_else(|| kebab(&ident.to_string()), String::from));
        }
    }
}

fn derives(attributes: &[syn::Attribute], name: &str) -> bool {
    let derives = attributes.iter().filter(|a| a.path().is_ident("derive"));
    derives.map(tokens).any(|text| super::source::has_word(&text, name))
}

/// An attribute's arguments as text.
fn tokens(attribute: &syn::Attribute) -> String {
    attribute.meta.require_list().map_or(String::new(), |list| list.tokens.to_string())
}

/// A name as clap prints it: `ResetAll` and `reset_all` become `reset-all`.
fn kebab(name: &str) -> String {
    let mut out = String::new();
    for letter in name.trim_start_matches("r#").chars() {
        if (letter == '_' || letter.is_uppercase()) && !out.is_empty() {
            out.push('-');
        }
        out.extend(letter.to_lowercase().filter(|l| *l != '_'));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAP: &str = "
        #[derive(Debug, clap::Subcommand)]
        enum Command { Serve(Serve), ResetAll }
        struct Serve {
            #[arg(long)] exit_with_parent: bool,
            #[arg(short, long = \"nbd\")] on: String,
        }";

    fn found(readme: &str) -> Vec<String> {
        let tree = Tree::of(&[
            ("README.md", readme),
            ("Makefile", "VAR := 1\n.PHONY: x\nrun test: deps\n\tmake no\nfuzz-smoke:\n"),
            ("crates/cli/Cargo.toml", "[package]\nname = 'blockyard'\n"),
            ("crates/cli/src/main.rs", CLAP),
        ]);
        check(&tree).into_iter().map(|f| f.text).collect()
    }

    #[test]
    fn a_true_readme_passes() {
        let page = "`make run`, `make fuzz-smoke SECONDS=60`\n\
            `blockyard serve --exit-with-parent`\n\
            ```console\n$ blockyard reset-all | sort && make test\nmake believe\n```\n\
            `crates/cli/`, `Makefile`, `/dev/null`, `null:///x?size=1G`, `cargo run -p blockyard`\n\
            ```text\ncrates/cli/src  the program\n```\n\
            `target/release/blockyard serve --nbd=stdio`\n\
            ```console\n$ blockyard serve --nbd stdio 'a; make no | blockyard --wings'\n```\n";
        assert_eq!(found(page), Vec::<String>::new());
    }

    #[test]
    fn each_false_command_or_path_is_found() {
        let bad = [
            ("`make nonsense`", "target `nonsense`"),
            ("`blockyard fly`", "command `fly`"),
            ("`blockyard serve --wings`", "option `--wings`"),
            ("```console\n$ true && blockyard fly\n```", "command `fly`"),
            ("```sh\nblockyard fly\n```", "command `fly`"),
            ("`cargo run -p nothing`", "package is called `nothing`"),
            ("`crates/nothing`", "no `crates/nothing`"),
            ("```text\ncrates/nothing/   not there\n```", "no `crates/nothing/`"),
            ("`NOTHING.md`", "no `NOTHING.md`"),
        ];
        for (page, want) in bad {
            let found = found(page);
            assert_eq!(found.len(), 1, "{page}: {found:?}");
            assert!(found[0].contains(want), "{page}: {found:?}");
        }
    }

    #[test]
    fn a_long_readme_is_found() {
        assert_eq!(found(&"line\n".repeat(120)).len(), 1);
        assert_eq!(found(&"line\n".repeat(119)).len(), 0);
    }
}

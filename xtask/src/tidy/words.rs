//! Rules about words: those that say nothing, and those that mean nothing to a later reader.
//!
//! This file holds the lists, so it is the one file that they do not bind.

use proc_macro2::{TokenStream, TokenTree};

use super::Finding;
use super::source::has_word;
use super::tree::Tree;

const OWN_PATH: &str = "xtask/src/tidy/words.rs";

/// Parts of names that hide what the thing is.
const NAME_PARTS: [&str; 8] =
    ["manager", "helper", "helpers", "util", "utils", "utility", "utilities", "misc"];

/// Words and what to do about each.
const WORDS: [(&str, &str); 13] = [
    ("todo!", "write it, or refuse with an error that says so"),
    ("unimplemented!", "write it, or refuse with an error that says so"),
    ("dbg!", "remove it, or trace"),
    ("TODO", "do it, or leave it out"),
    ("FIXME", "mend it, or say what the limit is"),
    ("XXX", "mend it, or say what the limit is"),
    ("HACK", "mend it, or say why it must be so"),
    ("simply", "leave the word out"),
    ("obviously", "leave the word out, or say why it is so"),
    ("basically", "leave the word out"),
    ("seamlessly", "say what happens"),
    ("blazing", "give the figure and its command"),
    ("leverage", "use"),
];

/// Phrases of comments, string literals and pages for which the field has a plain term, and that
/// term.
const PHRASES: [(&str, &str); 27] = [
    ("will do", "say `is sufficient`, or `invalid ...: expected ...`"),
    ("would do", "say `would be sufficient`, or what to write instead"),
    ("will not do", "say `invalid ...: expected ...`"),
    ("anew", "again"),
    ("beside", "while, concurrently with, in addition to, or next to"),
    ("behind", "after"),
    ("whoever", "name the thread, the client or the program"),
    ("somebody", "name the thread, the client or the program"),
    ("someone", "name the thread, the client or the program"),
    ("anybody", "any thread, client or program"),
    ("anyone", "any thread, client or program"),
    ("nobody", "no thread, no client, or no program"),
    ("everybody", "every thread, client or user"),
    ("everyone", "every thread, client or user"),
    ("in vain", "failed"),
    ("for good", "permanently"),
    ("counts no more", "is dead, or is invalid"),
    ("count no more", "are dead, or are invalid"),
    ("so many", "name the number"),
    ("is told", "gets, or is notified"),
    ("are told", "get, or are notified"),
    ("on its way", "say where the thing is: queued, in flight, or not yet received"),
    ("on their way", "say where the things are: queued, in flight, or not yet received"),
    ("it goes", "it is removed, dispatched or written; or name the thing"),
    ("one goes", "one is removed, dispatched or written; or name the thing"),
    ("goes with", "is removed with, or is part of"),
    ("goes away", "is removed, or leaves"),
];

/// Beginnings of a doc comment that say nothing where the comment is read alone.
const BEGINNINGS: [&str; 3] = ["Its ", "The same", "See the module."];

/// The style guide quotes what it forbids.
const STYLE_PATH: &str = "STYLE.md";

/// Every text file by every rule of this page.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in tree.files().filter(|(path, _)| *path != OWN_PATH && is_prose(path)) {
        for (at, line) in file.text.lines().enumerate() {
            words(path, at + 1, line, &mut findings);
            place(path, at + 1, line, &mut findings);
            if path.ends_with(".rs") {
                names(path, at + 1, line, &mut findings);
            }
        }
    }
    for (path, file) in tree.files().filter(|(path, _)| is_plain(path)) {
        phrases(path, &file.text, &mut findings);
    }
    for (path, file) in tree.files().filter(|(path, _)| path.ends_with(".rs") && is_plain(path)) {
        beginnings(path, &file.text, &mut findings);
        literals(path, &file.text, &mut findings);
    }
    // A doc comment is a comment and a literal.
    findings.sort();
    findings.dedup();
    findings
}

/// Whether the rule of phrases binds this file.
fn is_plain(path: &str) -> bool {
    path != OWN_PATH && path != STYLE_PATH
}

/// The comment of a line of Rust, or a whole line of a page.
fn prose<'a>(path: &str, line: &'a str) -> Option<&'a str> {
    if path.ends_with(".md") {
        return Some(line);
    }
    let start = line.find("//").filter(|_| path.ends_with(".rs"))?;
    // `scheme://` in a string is no comment.
    (!line[..start].ends_with(':')).then(|| &line[start..])
}

/// The phrases of comments and pages. A phrase may begin at the end of a line and end in the next.
fn phrases(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let lines: Vec<&str> = text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let Some(first) = prose(path, line) else { continue };
        let next = lines.get(at + 1).map(|line| line.trim_start());
        let next = next.filter(|next| path.ends_with(".md") || next.starts_with("//"));
        let next = next.map_or("", |next| next.trim_start_matches(['/', '!', ' ']));
        let both = format!("{first} {next}");
        for (phrase, instead) in PHRASES {
            if has_phrase(&both, phrase) && !has_phrase(next, phrase) {
                findings.push(phrase_finding(path, at + 1, phrase, instead));
            }
        }
    }
}

/// The phrases of string literals, those in the arguments of macros included. A finding is at the
/// first line of its literal.
fn literals(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let mut open = vec![text.parse::<TokenStream>().unwrap_or_default()];
    while let Some(tokens) = open.pop() {
        for token in tokens {
            match token {
                TokenTree::Group(group) => open.push(group.stream()),
                TokenTree::Literal(literal) => {
                    let line = literal.span().start().line;
                    let syn::Lit::Str(string) = syn::Lit::new(literal) else { continue };
                    for (phrase, instead) in PHRASES {
                        if has_phrase(&string.value(), phrase) {
                            findings.push(phrase_finding(path, line, phrase, instead));
                        }
                    }
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
            }
        }
    }
}

fn phrase_finding(path: &str, line: usize, phrase: &str, instead: &str) -> Finding {
    Finding::new(path, line, "phrases", format!("`{phrase}`: {instead}"))
}

/// Whether the phrase stands in a text. What is in backquotes or in braces, or has a `-`, `/` or
/// `~` next to it, is a name.
fn has_phrase(text: &str, phrase: &str) -> bool {
    let plain: String = text.split('`').step_by(2).collect::<Vec<_>>().join("``").to_lowercase();
    let is_part = |c: char| c.is_alphanumeric() || "_-/~{}".contains(c);
    plain.match_indices(phrase).any(|(at, _)| {
        !plain[..at].ends_with(is_part) && !plain[at + phrase.len()..].starts_with(is_part)
    })
}

/// The first lines of doc comments.
fn beginnings(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let mut is_inside = false;
    for (at, line) in text.lines().enumerate() {
        let doc = line.trim_start().strip_prefix("/// ");
        if let Some(begin) = doc
            .filter(|_| !is_inside)
            .and_then(|doc| BEGINNINGS.into_iter().find(|begin| doc.starts_with(begin)))
        {
            let text = format!("a doc comment that begins with `{begin}` does not stand alone");
            findings.push(Finding::new(path, at + 1, "phrases", text));
        }
        is_inside = line.trim_start().starts_with("///");
    }
}

fn is_prose(path: &str) -> bool {
    let ends = [".rs", ".md", ".toml", ".sh", ".yml", ".yaml", "Makefile", ".ci/run"];
    ends.iter().any(|end| path.ends_with(end))
}

fn words(path: &str, at: usize, line: &str, findings: &mut Vec<Finding>) {
    for (word, instead) in WORDS {
        let found = if word.ends_with('!') {
            has_word(line, word.trim_end_matches('!')) && line.contains(word)
        } else {
            has_word(line, word) || has_word(line, &capitalised(word))
        };
        if found {
            findings.push(Finding::new(path, at, "words", format!("`{word}`: {instead}")));
        }
    }
}

fn capitalised(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// A line that speaks of the place where it was written and not of the thing.
fn place(path: &str, at: usize, line: &str, findings: &mut Vec<Finding>) {
    let lower = line.to_lowercase();
    let numbered = lower.match_indices("issue").any(|(at, word)| {
        let rest = lower[at + word.len()..].trim_start_matches([' ', '#']);
        rest.starts_with(|c: char| c.is_ascii_digit())
    });
    if numbered {
        let text = "a number of a tracker says nothing here; say what it is about";
        findings.push(Finding::new(path, at, "place", text));
    }
    for folder in ["root", "home"] {
        let prefix = format!("/{folder}/");
        let outside = |c: char| c.is_whitespace() || "\"'`(=:".contains(c);
        let starts =
            lower.match_indices(&prefix).any(|(i, _)| i == 0 || lower[..i].ends_with(outside));
        if starts {
            let text = format!("`{prefix}` is a path of one machine; name it from the root here");
            findings.push(Finding::new(path, at, "place", text));
        }
    }
}

/// Names of Rust things; in running text the words are only words.
fn names(path: &str, at: usize, line: &str, findings: &mut Vec<Finding>) {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    for word in line.split(|c| !is_part(c)).filter(|word| !word.is_empty()) {
        let is_name = word.contains('_') || word.starts_with(|c: char| c.is_uppercase());
        let is_module = has_word(line, "mod") && !line.trim_start().starts_with("//");
        if !is_name && !is_module {
            continue;
        }
        // Options of other programs have the names that those gave them.
        if word.starts_with("do_") && !line.contains(&format!("--{word}")) {
            let text = format!("`{word}`: name what it does, without `do_`");
            findings.push(Finding::new(path, at, "names", text));
        }
        if let Some(part) = parts(word).find(|part| NAME_PARTS.contains(&part.as_str())) {
            let text = format!("`{word}`: `{part}` says nothing; name the thing it is");
            findings.push(Finding::new(path, at, "names", text));
        }
    }
}

/// The words of a name, in small letters: `ZoneManager` and `zone_manager` have two.
fn parts(name: &str) -> impl Iterator<Item = String> {
    let mut words = vec![String::new()];
    for letter in name.chars() {
        if letter == '_' || letter.is_uppercase() {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| letter != '_') {
            word.extend(letter.to_lowercase());
        }
    }
    words.into_iter().filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, line: &str) -> Vec<&'static str> {
        check(&Tree::of(&[(path, line)])).iter().map(|f| f.rule).collect()
    }

    #[test]
    fn each_banned_word_is_found() {
        for (word, _) in WORDS {
            assert_eq!(rules("a.rs", &format!("// see {word}() here")), ["words"], "{word}");
        }
        assert_eq!(rules("a.md", "Simply run it."), ["words"]);
        assert_eq!(rules(".ci/run", "# TODO later"), ["words"]);
        for line in ["mktemp /tmp/a.XXXXXX", "// do not", "let todo = 1;", "the leverages"] {
            assert!(rules("a.rs", line).is_empty(), "{line}");
        }
    }

    #[test]
    fn each_phrase_with_a_plain_term_is_found_in_comments_literals_and_pages() {
        for (phrase, _) in PHRASES {
            for (path, text) in [
                ("a.rs", format!("const X: u8 = 1; // that {phrase} here")),
                ("a.rs", format!("/// That {phrase} here.\nconst X: u8 = 1;")),
                ("a.rs", format!("const X: &str = \"that {phrase} here\";")),
                ("a.rs", format!("fn f() {{ assert!(true, \"{{}}: that {phrase} here\"); }}")),
                ("a.md", format!("That {phrase} here.")),
            ] {
                assert_eq!(rules(path, &text), ["phrases"], "{text}");
            }
        }
        assert_eq!(rules("a.rs", "/// Its length."), ["phrases"]);
        assert_eq!(rules("a.rs", "/// The same for a read."), ["phrases"]);
        for line in [
            "let nobody = 1;",
            "// the token `NOBODY`",
            "/// The length.\n/// Its unit is a byte.",
            "const URI: &str = \"null:///beside\";",
            "const VARIANT: &str = \"volume-beside-writes\";",
            "const HOME: &str = \"~nobody\";",
            "const GOOD: &str = \"for goodness\";",
            "// a reply goes to a client",
            "fn f() { assert!(true, \"{nobody}\"); }",
        ] {
            assert!(rules("a.rs", line).is_empty(), "{line}");
        }
        assert!(rules("STYLE.md", "| anew | again |").is_empty());
    }

    #[test]
    fn a_phrase_across_two_lines_is_found_at_the_first() {
        let found = |path: &str, text: &str| {
            let findings = check(&Tree::of(&[(path, text)]));
            findings.iter().map(|finding| finding.line).collect::<Vec<_>>()
        };
        assert_eq!(found("a.rs", "/// A bio on its\n/// way.\nconst X: u8 = 1;"), [1]);
        assert_eq!(found("a.rs", "const X: u8 = 1; // on its\nconst Y: u8 = 2; // way"), [0; 0]);
        assert_eq!(found("a.rs", "\nconst X: &str = \"on its \\\n  way\";"), [2]);
        assert_eq!(found("a.md", "one\non its\nway"), [2]);
    }

    #[test]
    fn names_that_hide_the_thing_are_found() {
        let bad = [
            "struct ZoneManager;",
            "struct HelperThread;",
            "fn test_helper() {}",
            "mod utils;",
            "mod helper;",
            "fn do_read() {}",
        ];
        for line in bad {
            assert_eq!(rules("a.rs", line), ["names"], "{line}");
        }
        let good = [
            "// helpers below",
            "fn utilisation() {}",
            "struct Redo_;",
            "let managed = 1;",
            r#"let option = "--do_verify=0";"#,
        ];
        for line in good {
            assert!(rules("a.rs", line).is_empty(), "{line}");
        }
    }

    #[test]
    fn words_of_one_place_are_found() {
        let bad = [
            "// as issue 12 asks",
            "// Issue #3",
            "// issue#3",
            "// see /root/notes.md",
            "// see `/home/me/notes.md`",
        ];
        for line in bad {
            assert_eq!(rules("a.rs", line), ["place"], "{line}");
        }
        for line in ["// an issue of order", "// /dev/root/x", "crates/work/a"] {
            assert!(rules("a.rs", line).is_empty(), "{line}");
        }
    }
}

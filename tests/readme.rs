//! The session in README.md, run as it is written there.

use std::fs;

use crate::place::Place;
use crate::run::{bounded, finish};
use crate::yard::{BLOCKYARD, Yard};

const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");

/// The socket in the page. The test serves in a directory of its own instead.
const SOCKET: &str = "/run/blockyard/nbd.sock";

/// A command at a prompt, and its output by the page.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) command: String,
    pub(crate) printed: Vec<String>,
}

/// The steps of all terminal blocks, except those that build the project.
pub(crate) fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let blocks = page.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
    for block in blocks.filter(|block| !block.starts_with("$ make")) {
        for line in block.lines() {
            match (line.strip_prefix("$ "), steps.last_mut()) {
                (Some(command), _) => {
                    steps.push(Step { command: command.into(), printed: Vec::new() });
                }
                (None, Some(step)) => step.printed.push(line.into()),
                (None, None) => panic!("a block begins with what is printed: {line}"),
            }
        }
    }
    steps
}

/// Whether an output matches the page, line by line. If a line of the page has `...`, the columns
/// of the output may have other widths than on the page.
pub(crate) fn are_like(printed: &[&str], said: &[String]) -> bool {
    let is_exact = !said.iter().any(|said| said.contains("..."));
    let is_same = |(line, said): (&&str, &String)| match is_exact {
        true => expanded(line).trim_end() == said.trim_end(),
        false => is_like(line, said),
    };
    printed.len() == said.len() && printed.iter().zip(said).all(is_same)
}

/// A line with its tabs as a terminal shows them.
fn expanded(line: &str) -> String {
    line.chars().fold(String::new(), |mut shown, letter| {
        match letter {
            '\t' => shown.extend(std::iter::repeat_n(' ', 8 - shown.chars().count() % 8)),
            letter => shown.push(letter),
        }
        shown
    })
}

/// Whether a line matches the page: `...` stands for anything, and runs of spaces for one space.
fn is_like(line: &str, said: &str) -> bool {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (line, said) = (words(line), words(said));
    let Some((start, rest)) = said.split_once("...") else { return line == said };
    let Some(mut line) = line.strip_prefix(start) else { return false };
    let mut said = rest;
    while let Some((part, rest)) = said.split_once("...") {
        let Some((_, after)) = line.split_once(part) else { return false };
        (line, said) = (after, rest);
    }
    line.ends_with(said)
}

#[test]
fn the_session_prints_what_the_page_says() {
    let page = fs::read_to_string(README).unwrap();
    let steps = steps(&page);
    assert!(steps.len() >= 4, "{steps:?}");
    let place = Place::new();
    // The default path, in the runtime directory that `Yard::start` sets for the server.
    let socket = place.file("blockyard/nbd.sock");
    let yard = Yard::start(place, &["serve"]);
    let folder = std::path::Path::new(BLOCKYARD).parent().unwrap();
    for step in steps {
        let script = step.command.replace(SOCKET, &socket);
        // The state directory is there too.
        let state = yard.place.path().display().to_string();
        let script = script.replace("~/.local/state", &state);
        let line = ["sh", "-c", &script];
        let mut command = bounded(&line);
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .env("PATH", format!("{}:/usr/bin:/usr/sbin:/bin:/sbin:{path}", folder.display()))
            .env("XDG_RUNTIME_DIR", yard.place.path())
            .current_dir(yard.place.path());
        let run = finish(&line, &mut command).ok();
        let printed: Vec<&str> = run.out.lines().chain(run.err.lines()).collect();
        assert!(are_like(&printed, &step.printed), "the page says {:#?}, but {run}", step.printed);
    }
}

/// A table in the README had its last column aligned to the right, as no command prints it.
#[test]
fn spacing_is_compared_in_an_output_without_dots() {
    let said = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
    let page = said(&["NAME  ORIGIN", "v0         -"]);
    assert!(!are_like(&["NAME  ORIGIN", "v0    -"], &page));
    assert!(are_like(&["NAME  ORIGIN", "v0         -  "], &page), "spaces at the end of a line");
    assert!(are_like(&["db@tuesday\t0", "v0\t1"], &said(&["db@tuesday      0", "v0      1"])));
    let page = said(&["NAME  FREE", "v0    ..."]);
    assert!(are_like(&["NAME      FREE", "v0    6.5 TiB"], &page));
    assert!(!are_like(&["NAME      FREE", "v1    6.5 TiB"], &page));
    assert!(!are_like(&["NAME      FREE"], &page), "a line is missing");
}

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

/// Whether a line matches the page: `...` stands for anything, and runs of spaces for one space.
pub(crate) fn is_like(line: &str, said: &str) -> bool {
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
        let same = printed.len() == step.printed.len()
            && printed.iter().zip(&step.printed).all(|(line, said)| is_like(line, said));
        assert!(same, "the page says {:#?}, but {run}", step.printed);
    }
}

//! Runs a program to its end, with a time limit; a failure prints its command line and output.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

/// The time limit, far above what any client here needs on any machine.
const SECONDS_MAX: u32 = 120;
/// The exit codes of `timeout` when the limit was reached, after TERM or KILL.
const OUT_OF_TIME: [i32; 2] = [124, 137];

/// A program that has ended.
#[derive(Debug)]
pub(crate) struct Run {
    line: String,
    /// The exit code; `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    /// Standard output.
    pub(crate) out: String,
    /// Standard error.
    pub(crate) err: String,
}

/// A command with the time limit, not yet started, for callers that set more.
pub(crate) fn bounded(line: &[&str]) -> Command {
    bounded_by(SECONDS_MAX, line)
}

/// A command with another time limit.
pub(crate) fn bounded_by(seconds: u32, line: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", &seconds.to_string()]).args(line).stdin(Stdio::null());
    // The system's own clients first: nbdsh needs the Python of its package. Debian has the tools
    // of file systems in sbin, which is not in the path of ordinary users.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("/usr/bin:/usr/sbin:/bin:/sbin:{path}"));
    command
}

/// Runs a program, which may fail.
pub(crate) fn run(line: &[&str]) -> Run {
    finish(line, &mut bounded(line))
}

/// Runs a program with a longer time limit, which may fail.
pub(crate) fn within(seconds: u32, line: &[&str]) -> Run {
    finish(line, &mut bounded_by(seconds, line))
}

/// Runs a command made by [`bounded`].
pub(crate) fn finish(line: &[&str], command: &mut Command) -> Run {
    let output = command.output().unwrap_or_else(|error| panic!("{line:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Run {
        line: line.join(" "),
        code: output.status.code(),
        out: text(&output.stdout),
        err: text(&output.stderr),
    }
}

/// Runs a program that must succeed, and returns its output.
pub(crate) fn ok(line: &[&str]) -> String {
    run(line).ok().out
}

/// Runs a script of libnbd's shell that must succeed, and returns its output. The handle `h` is
/// connected to `uri`.
pub(crate) fn nbdsh(uri: &str, script: &str) -> String {
    ok(&["nbdsh", "--uri", uri, "--command", script])
}

/// Runs a Python script that must succeed and has no connection yet.
pub(crate) fn python(script: &str, args: &[&str]) -> String {
    let line = ["python3", "-"];
    let mut command = bounded(&line);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("timeout is part of coreutils");
    let mut stdin = child.stdin.take().expect("it was asked to be piped");
    stdin.write_all(script.as_bytes()).expect("python reads its script");
    drop(stdin);
    let output = child.wait_with_output().expect("it was started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    Run { line: script.into(), code: output.status.code(), out, err }.ok().out
}

impl Run {
    /// Asserts success.
    #[track_caller]
    pub(crate) fn ok(self) -> Run {
        assert_eq!(self.code, Some(0), "{self}");
        self
    }

    /// Asserts a failure by exit code: not by a signal, the time limit or a panic of ours.
    #[track_caller]
    pub(crate) fn fails(self) -> Run {
        let code = self.code.unwrap_or_else(|| panic!("ended by a signal: {self}"));
        assert!(code != 0 && code != 101 && !OUT_OF_TIME.contains(&code), "{self}");
        self
    }

    /// Asserts that standard error contains each of these.
    #[track_caller]
    pub(crate) fn says(self, words: &[&str]) -> Run {
        for word in words {
            assert!(self.err.contains(word), "no `{word}`: {self}");
        }
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self}"))
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Run { line, code, out, err } = self;
        write!(f, "{line}\nended with {code:?}\nprinted: {out}\ncomplained: {err}")
    }
}

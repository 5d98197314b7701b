//! `serve --run`: a command that lives while it is served, and the other way round.
#![allow(unsafe_code)] // What a command does between fork and exec is named once, below.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::Sender;

use blockyard_yard::control::Event;
use blockyard_yard::paths::CONTROL_VARIABLE;
use blockyard_yard::ublk::end_io_flusher;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};

use crate::failure::{Code, Failure};

/// What `run` tells the command about the server.
#[derive(Debug, Default)]
pub(crate) struct Told<'a> {
    /// The NBD URI of the first device.
    pub(crate) uri: Option<String>,
    /// The first device.
    pub(crate) export: &'a str,
    /// Where NBD is served: `unix:PATH` or `tcp:HOST:PORT`.
    pub(crate) address: &'a str,
    /// The control socket.
    pub(crate) control: Option<&'a Path>,
}

/// The command.
#[derive(Debug)]
pub(crate) struct RunningCommand {
    pid: Pid,
}

impl RunningCommand {
    /// Starts it by `sh -c`, with the limit of open files that this process had at first: programs
    /// that use `select`, or close every descriptor there could be, want no more. Its end is sent
    /// as an event.
    pub(crate) fn start(
        command: &str,
        told: &Told<'_>,
        files: Rlimit,
        events: Sender<Event>,
    ) -> Result<RunningCommand, Failure> {
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(command);
        for (name, value) in variables(told) {
            shell.env(name, value);
        }
        if let Some(control) = told.control {
            shell.env(CONTROL_VARIABLE, control);
        }
        let restore = move || {
            setrlimit(Resource::Nofile, files)?;
            // A yard that serves ublk starts no I/O to get memory; its command may.
            end_io_flusher()
        };
        // SAFETY: after the fork of a process with threads only what is async-signal-safe may be
        // called; these are two system calls.
        unsafe { shell.pre_exec(restore) };
        let failed = |what: &str| Failure::new(Code::Failed, format!("run: {what}"));
        let mut child = shell.spawn().map_err(|error| failed(&format!("/bin/sh: {error}")))?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| failed("the command has no process id"))?;
        let wait = move || {
            let code = child.wait().map_or(1, exit_code);
            // A daemon that no longer listens is ending already.
            let _ = events.send(Event::CommandDone(code));
        };
        std::thread::Builder::new()
            .name("run-wait".to_owned())
            .spawn(wait)
            .map_err(|error| failed(&error.to_string()))?;
        Ok(RunningCommand { pid })
    }

    /// Asks it to end. To be called only while its end has not been heard of.
    pub(crate) fn terminate(&self) {
        // It may have ended just now; then there is nothing to do.
        let _ = kill_process(self.pid, Signal::TERM);
    }
}

/// The variables that nbdkit's `--run` has, with its names.
fn variables(told: &Told<'_>) -> Vec<(&'static str, String)> {
    let (mut nbd, mut socket, mut port) = (String::new(), String::new(), String::new());
    if let Some(path) = told.address.strip_prefix("unix:") {
        nbd = format!("nbd:unix:{path}:exportname={}", told.export);
        socket = path.to_owned();
    } else if let Some((host, number)) =
        told.address.strip_prefix("tcp:").and_then(|address| address.rsplit_once(':'))
    {
        nbd = format!("nbd:{host}:{number}:exportname={}", told.export);
        port = number.to_owned();
    }
    vec![
        ("uri", told.uri.clone().unwrap_or_default()),
        ("nbd", nbd),
        ("unixsocket", socket),
        ("port", port),
        ("exportname", told.export.to_owned()),
    ]
}

/// The exit code that a shell would give.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_are_those_of_nbdkit() {
        let told = Told {
            uri: Some("nbd+unix:///d?socket=/tmp/s".to_owned()),
            export: "d",
            address: "unix:/tmp/s",
            control: None,
        };
        let variables = variables(&told);
        assert!(variables.contains(&("nbd", "nbd:unix:/tmp/s:exportname=d".to_owned())));
        assert!(variables.contains(&("unixsocket", "/tmp/s".to_owned())));
        let told = Told { address: "tcp:127.0.0.1:99", export: "d", ..Told::default() };
        let variables = super::variables(&told);
        assert!(variables.contains(&("port", "99".to_owned())));
        assert!(variables.contains(&("nbd", "nbd:127.0.0.1:99:exportname=d".to_owned())));
    }
}

//! A child process: with a time limit, under the stop flag, and with its CPU time.
#![allow(unsafe_code)] // A child that dies with its parent must ask for it between fork and exec.

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};

use crate::error::LabError;
use crate::stop::Stop;
use crate::tools::{cpu, resident};

/// The interval at which the stop flag is checked while a child runs.
const LOOK: Duration = Duration::from_millis(50);
/// The time after which a server that is not ready has failed.
const READY_MAX: Duration = Duration::from_secs(20);
/// The interval at which a server's readiness is checked.
const READY_LOOK: Duration = Duration::from_millis(2);
/// The most bytes of a child's output that are read.
const OUTPUT_MAX: usize = 16 << 20;
/// The most characters of a line of a child's output that are quoted.
const QUOTED_MAX: usize = 300;

/// A command line as data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// The program and its arguments.
    pub words: Vec<String>,
    /// The Debian package that has the program; empty if none does.
    pub package: &'static str,
}

impl CommandLine {
    /// A line of words that are separated by blanks.
    pub fn new(package: &'static str, line: &str) -> CommandLine {
        CommandLine { words: line.split_whitespace().map(String::from).collect(), package }
    }

    /// Replaces placeholder words by values.
    pub fn with(mut self, values: &[(&str, &dyn Display)]) -> CommandLine {
        for word in &mut self.words {
            for (name, value) in values {
                *word = word.replace(name, &value.to_string());
            }
        }
        self
    }

    /// The line as typed in a shell, except for quotes.
    pub fn text(&self) -> String {
        self.words.join(" ")
    }

    /// Starts the program. `folder` is the directory for its files while it runs.
    ///
    /// # Errors
    /// If there is no such program, or the system refuses to start it.
    pub fn start(&self, folder: Option<&Path>) -> Result<RunningChild, LabError> {
        let program = self.words.first().map_or("", String::as_str);
        let output = || -> Result<(File, Stdio), LabError> {
            let file = memfd_create("output", MemfdFlags::CLOEXEC).map(File::from);
            let file = file.map_err(|error| LabError::io("memfd_create")(error.into()))?;
            let same = file.try_clone().map_err(LabError::io("output"))?;
            Ok((file, same.into()))
        };
        let ((out, stdout), (err, stderr)) = (output()?, output()?);
        let mut command = Command::new(program);
        command.args(self.words.get(1..).unwrap_or_default());
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        if let Some(folder) = folder {
            command.env("XDG_RUNTIME_DIR", folder);
        }
        // However this process ends, no server and no fio survives it.
        let die_with_parent =
            || set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from);
        // SAFETY: between fork and exec the closure makes one system call, which is
        // async-signal-safe, and touches no memory of the parent.
        unsafe { command.pre_exec(die_with_parent) };
        let child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => self.missing(program),
            _ => LabError::io(self.text())(error),
        })?;
        let began = Instant::now();
        let mut running = RunningChild { child, pidfd: None, line: self.text(), out, err, began };
        running.pidfd = Some(running.watch()?);
        Ok(running)
    }

    fn missing(&self, program: &str) -> LabError {
        match self.package {
            "" => LabError::missing(program, "build it: make build"),
            package => LabError::missing(program, format!("apt-get install {package}")),
        }
    }
}

/// A running child. Dropping it kills the child.
#[derive(Debug)]
pub struct RunningChild {
    child: Child,
    pidfd: Option<OwnedFd>,
    line: String,
    out: File,
    err: File,
    began: Instant,
}

/// The results of a child that has ended.
#[derive(Debug)]
pub struct ChildResult {
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
    /// The CPU time of all its threads.
    pub cpu: Duration,
    /// From its start to its end.
    pub wall: Duration,
}

impl RunningChild {
    fn watch(&self) -> Result<OwnedFd, LabError> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| LabError::failed(&self.line, "it has no process id"))?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty());
        pidfd.map_err(|error| LabError::io(self.line.clone())(error.into()))
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The CPU time of all its threads until now.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn cpu(&self) -> Result<Duration, LabError> {
        cpu::of_process(self.child.id())
            .map_err(LabError::io(format!("CPU time of `{}`", self.line)))
    }

    /// The CPU time until now of its threads whose name `selects`.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn cpu_of_threads(&self, selects: impl Fn(&str) -> bool) -> Result<Duration, LabError> {
        cpu::of_threads(self.child.id(), selects)
            .map_err(LabError::io(format!("CPU time of the threads of `{}`", self.line)))
    }

    /// The anonymous memory of the process in bytes.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn memory(&self) -> Result<u64, LabError> {
        resident::anonymous_bytes(self.child.id())
            .map_err(LabError::io(format!("memory of `{}`", self.line)))
    }

    /// The greatest physical memory that it had until now in bytes, with its program.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn memory_peak(&self) -> Result<u64, LabError> {
        resident::peak_bytes(self.child.id())
            .map_err(LabError::io(format!("memory of `{}`", self.line)))
    }

    /// Waits for the child's end for at most `time`; returns whether it has ended.
    ///
    /// # Errors
    /// If the system refuses to wait.
    pub fn ends_within(&self, time: Duration) -> Result<bool, LabError> {
        let Some(pidfd) = &self.pidfd else { return Ok(false) };
        let time = Timespec::try_from(time).map_err(|error| LabError::failed("wait", error))?;
        // Readable from the end of the process on, also before and after it is waited for.
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&time)) {
            Ok(count) => Ok(count > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(LabError::io(self.line.clone())(error.into())),
        }
    }

    /// Waits until the child is ready: until `lacks` returns nothing that is missing.
    ///
    /// # Errors
    /// If it ends, is not ready in time, or the run is to stop.
    pub fn until_ready(
        &mut self,
        stop: &Stop,
        mut lacks: impl FnMut() -> Option<String>,
    ) -> Result<(), LabError> {
        while let Some(lack) = lacks() {
            if stop.is_set() {
                return Err(LabError::Interrupted);
            }
            if self.ends_within(READY_LOOK)? {
                return Err(self.ended());
            }
            if self.began.elapsed() >= READY_MAX {
                let why = format!("after {READY_MAX:?} {lack}");
                return Err(LabError::failed(self.line.clone(), why));
            }
        }
        Ok(())
    }

    /// Waits for the child's end, at most `limit` from its start.
    ///
    /// # Errors
    /// If it fails, does not end within the limit, or the run is to stop; the child is dead then.
    pub fn finish(mut self, limit: Duration, stop: &Stop) -> Result<ChildResult, LabError> {
        while !self.ends_within(LOOK)? {
            if stop.is_set() {
                return Err(LabError::Interrupted);
            }
            if self.began.elapsed() >= limit {
                let why = format!("it had not ended after {limit:.1?} and was killed");
                return Err(self.failed(&why));
            }
        }
        let (wall, cpu) = (self.began.elapsed(), self.cpu()?);
        let status = self.child.wait().map_err(LabError::io(self.line.clone()))?;
        if !status.success() {
            return Err(self.failure(status));
        }
        Ok(ChildResult { out: text(&self.out)?, err: text(&self.err)?, cpu, wall })
    }

    /// The error for a child that has ended, with its last message.
    pub(crate) fn ended(&mut self) -> LabError {
        match self.child.wait() {
            Ok(status) => self.failure(status),
            Err(error) => LabError::io(self.line.clone())(error),
        }
    }

    fn failure(&self, status: ExitStatus) -> LabError {
        let said = match text(&self.err) {
            Ok(said) => complaint(&said),
            Err(error) => error.to_string(),
        };
        self.failed(&format!("{status}: {said}"))
    }

    /// The reason comes first, because command lines are long.
    fn failed(&self, why: &str) -> LabError {
        let program = self.line.split(' ').next().unwrap_or_default();
        LabError::failed(program, format!("{why}; the line was `{}`", self.line))
    }
}

impl Drop for RunningChild {
    fn drop(&mut self) {
        // The child may have ended already; no error matters here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The line of a program's error output that explains the failure: the first that calls itself an
/// error, otherwise the first.
pub(crate) fn complaint(said: &str) -> String {
    let mut lines = said.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines.clone().find(|line| line.contains("error")).or_else(|| lines.next());
    line.map_or_else(|| "it said nothing".into(), |line| line.chars().take(QUOTED_MAX).collect())
}

fn text(file: &File) -> Result<String, LabError> {
    let size = file.metadata().map_err(LabError::io("output"))?.len();
    let len = usize::try_from(size).unwrap_or(OUTPUT_MAX).min(OUTPUT_MAX);
    let mut bytes = vec![0; len];
    // The child shares the file's position, so this reads by offset.
    file.read_exact_at(&mut bytes, 0).map_err(LabError::io("output"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn run(words: &[&str], limit: Duration, stop: &Stop) -> Result<ChildResult, LabError> {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        CommandLine { words, package: "coreutils" }.start(None)?.finish(limit, stop)
    }

    #[test]
    fn the_output_and_cpu_time_of_a_child_are_kept() {
        let script = "n=0; while [ $n -lt 20000 ]; do n=$((n+1)); done; echo out; echo err >&2";
        let ended = run(&["sh", "-c", script], LONG, &Stop::new()).unwrap();
        assert_eq!((ended.out.as_str(), ended.err.as_str()), ("out\n", "err\n"));
        assert!(ended.cpu > Duration::ZERO && ended.wall > Duration::ZERO);
    }

    #[test]
    fn a_failure_quotes_the_child() {
        let error = run(&["ls", "/no/such"], LONG, &Stop::new()).unwrap_err().to_string();
        assert!(error.starts_with("ls: exit status: 2: "), "{error}");
        let want = "No such file or directory; the line was `ls /no/such`";
        assert!(error.ends_with(want), "{error}");
        assert_eq!(complaint("note\n\n fio: error=5 \n"), "fio: error=5");
        assert_eq!(complaint("first\nsecond\n"), "first");
        assert_eq!(complaint("\n"), "it said nothing");
    }

    #[test]
    fn a_program_that_is_not_there_says_what_brings_it() {
        let error = CommandLine::new("nbdkit", "no-such-program x").start(None).unwrap_err();
        assert_eq!(error.to_string(), "no-such-program is missing; apt-get install nbdkit");
    }

    #[test]
    fn a_child_is_killed_at_its_limit_and_by_the_stop() {
        let error = run(&["sleep", "1000"], Duration::ZERO, &Stop::new()).unwrap_err();
        assert!(error.to_string().contains("had not ended after 0.0ns"), "{error}");
        let stop = Stop::new();
        stop.set();
        let error = run(&["sleep", "1000"], LONG, &stop).unwrap_err();
        assert!(matches!(error, LabError::Interrupted), "{error}");
    }
}

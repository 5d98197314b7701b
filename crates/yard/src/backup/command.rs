//! The command that receives the streams of a backup: bounded in time, killed with the processes of
//! its group, and with the end of its error output kept for the log.
#![allow(clippy::disallowed_types)] // A command starts and ends rarely.

use std::fmt;
use std::io::{ErrorKind, PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockyard_store::SegmentStore;
use blockyard_volume::VolumeError;
use blockyard_volume_admin::send::Sending;
use blockyard_volume_format::stream::ResumeToken;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open};

/// The part of a command's error output that is kept, in bytes.
const TAIL_BYTES: usize = 1024;

/// Most reads of a command's error output before the clock is looked at.
const READS_MAX: usize = 16;

/// How long the command may take to end after it was killed: a process that sleeps in the kernel,
/// on a network file system that hangs, does not end, nor does one of another user.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a wait for the command looks whether the daemon ends.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Stops the command in progress, and every later one.
#[derive(Debug, Default)]
pub(super) struct TargetStop(Mutex<Stopping>);

#[derive(Debug, Default)]
struct Stopping {
    is_set: bool,
    /// The process of the command in progress, which leads its process group.
    child: Option<Pid>,
}

impl TargetStop {
    fn lock(&self) -> MutexGuard<'_, Stopping> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_set(&self) -> bool {
        self.lock().is_set
    }

    /// Kills the command in progress.
    pub(super) fn set(&self) {
        let mut stopping = self.lock();
        stopping.is_set = true;
        if let Some(child) = stopping.child {
            kill(child);
        }
    }

    /// Registers a command that was started; kills it if the stop is set already.
    fn begin(&self, child: Pid) {
        let mut stopping = self.lock();
        stopping.child = Some(child);
        if stopping.is_set {
            kill(child);
        }
    }

    /// Removes the command before its process is waited for, after which the kernel may use its
    /// number again.
    fn end(&self) {
        self.lock().child = None;
    }
}

/// Kills a command and its process group.
fn kill(child: Pid) {
    // It fails if all processes of the group have ended.
    let _ = kill_process_group(child, Signal::KILL);
    // The command may have left its group.
    let _ = kill_process(child, Signal::KILL);
}

/// Why a stream did not reach its destination.
#[derive(Debug)]
pub(super) enum TargetError {
    /// The program cannot be started.
    Start { program: String, source: std::io::Error },
    /// It took too long, and was killed.
    TimedOut { program: String, seconds: u64, said: String },
    /// It was killed and does not end.
    Unkillable { program: String, child: Pid },
    /// It failed.
    Failed { program: String, status: ExitStatus, said: String },
    /// The daemon ends.
    Stopped,
    /// The snapshot cannot be sent.
    Send(VolumeError),
}

/// The option before the token in the error of `volume receive -s` about a stream of which it has a
/// part.
const TOKEN_OPTION: &str = "--resume ";

impl TargetError {
    /// Whether the target is likely to hang with the next stream, too.
    pub(super) fn is_hang(&self) -> bool {
        matches!(self, TargetError::TimedOut { .. } | TargetError::Unkillable { .. })
    }

    /// The token in the error output of a target that has a part of the stream.
    pub(super) fn token(&self) -> Option<ResumeToken> {
        let TargetError::Failed { said, .. } = self else { return None };
        let (_, rest) = said.rsplit_once(TOKEN_OPTION)?;
        // The token has a checksum.
        rest.split(|end: char| !end.is_ascii_hexdigit() && end != '-').next()?.parse().ok()
    }
}

impl fmt::Display for TargetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quoted = |said: &str| match said.trim() {
            "" => String::new(),
            said => format!(": {said}"),
        };
        match self {
            TargetError::Start { program, source } => {
                write!(f, "cannot start the target `{program}`: {source}")
            }
            TargetError::TimedOut { program, seconds, said } => {
                let said = quoted(said);
                write!(
                    f,
                    "the target `{program}` took longer than {seconds} s and was killed{said}"
                )
            }
            TargetError::Unkillable { program, child } => {
                write!(f, "the target `{program}` was killed and does not end: process {child}")
            }
            TargetError::Failed { program, status, said } => {
                write!(f, "the target `{program}` failed with {status}{}", quoted(said))
            }
            TargetError::Stopped => write!(f, "the daemon ends"),
            TargetError::Send(error) => error.fmt(f),
        }
    }
}

/// What a command has done that ended with success.
#[derive(Debug)]
pub(super) struct TargetDone {
    /// The length of the stream.
    pub(super) bytes: u64,
    /// The end of its error output, such as a warning.
    pub(super) said: String,
}

/// The command of a policy for one volume.
pub(super) struct BackupTarget {
    pub(super) argv: Vec<String>,
    pub(super) timeout: Duration,
}

impl BackupTarget {
    /// Runs the command with the stream on its standard input.
    pub(super) fn send<D: SegmentStore>(
        &self,
        sending: Sending<D>,
        stop: &TargetStop,
    ) -> Result<TargetDone, TargetError> {
        let program = self.argv.first().cloned().unwrap_or_default();
        let start = |source| TargetError::Start { program: program.clone(), source };
        let (errors, errors_end) = std::io::pipe().map_err(start)?;
        let (done, done_end) = std::io::pipe().map_err(start)?;
        let mut child = Command::new(&program)
            .args(&self.argv[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(errors_end)
            .process_group(0)
            .spawn()
            .map_err(start)?;
        let pid = Pid::from_child(&child);
        stop.begin(pid);
        let until = Instant::now() + self.timeout;
        let watch = CommandWatch { errors, done, child: pid, until }.start();
        let pipe = child.stdin.take().expect("the input is a pipe");
        let sent = match set_nonblocking(&pipe).and(watch.as_ref().map(|_| ()).map_err(copied)) {
            Ok(()) => sending.run(&mut TargetInput { pipe, until, stop }, &mut |_| {}),
            Err(error) => {
                kill(pid);
                Err(VolumeError::Pipe(error))
            }
        };
        let has_ended = wait(pid, until, stop);
        // The thread sees that the pipe is closed, and ends.
        drop(done_end);
        let watched = watch.map_err(start).map(|watch| watch.join().unwrap_or_default());
        stop.end();
        if !has_ended.map_err(start)? {
            return Err(TargetError::Unkillable { program, child: pid });
        }
        // From here on the kernel may use the number of the process again.
        let status = child.wait();
        let Watched { said, timed_out } = watched?;
        let status = status.map_err(start)?;
        // The command may have ended, and a process that it left kept the pipe open.
        let is_late = |error: &std::io::Error| error.kind() == ErrorKind::TimedOut;
        let timed_out =
            timed_out || matches!(&sent, Err(VolumeError::Pipe(error)) if is_late(error));
        match sent {
            // The target has stored the stream, even if its time ended or the daemon ends now.
            Ok(sent) if status.success() => Ok(TargetDone { bytes: sent.bytes, said }),
            _ if stop.is_set() => Err(TargetError::Stopped),
            _ if timed_out => {
                let seconds = self.timeout.as_secs();
                Err(TargetError::TimedOut { program, seconds, said })
            }
            // The stream was complete, or the command did not read it to its end.
            Ok(_) | Err(VolumeError::Pipe(_)) => Err(TargetError::Failed { program, status, said }),
            Err(error) => Err(TargetError::Send(error)),
        }
    }
}

/// An equal error, as the error itself is needed later.
fn copied(error: &std::io::Error) -> std::io::Error {
    error.kind().into()
}

/// Waits for the end of the command, whose input is closed, without reaping it, so that its number
/// stays its own while it may be killed. Returns whether it has ended: one that was killed may not
/// end.
fn wait(child: Pid, until: Instant, stop: &TargetStop) -> std::io::Result<bool> {
    let process = pidfd_open(child, PidfdFlags::empty()).inspect_err(|_| kill(child))?;
    let mut until = until + KILL_TIMEOUT;
    let mut is_stopped = false;
    loop {
        if stop.is_set() && !is_stopped {
            is_stopped = true;
            until = until.min(Instant::now() + KILL_TIMEOUT);
        }
        let left = until.saturating_duration_since(Instant::now());
        let mut events = [PollFd::new(&process, PollFlags::IN)];
        match poll(&mut events, Some(&timespec(left.min(STOP_CHECK_INTERVAL)))) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The standard input of a command. A write fails when the time is over, even if a process that has
/// left the group keeps the pipe open.
struct TargetInput<'a> {
    pipe: ChildStdin,
    until: Instant,
    stop: &'a TargetStop,
}

impl Write for TargetInput<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        loop {
            match self.pipe.write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                written => return written,
            }
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.stop.is_set() {
                return Err(ErrorKind::TimedOut.into());
            }
            let mut events = [PollFd::new(&self.pipe, PollFlags::OUT)];
            match poll(&mut events, Some(&timespec(left.min(STOP_CHECK_INTERVAL)))) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

fn set_nonblocking(file: impl AsFd) -> std::io::Result<()> {
    let flags = fcntl_getfl(&file)?;
    Ok(fcntl_setfl(&file, flags | OFlags::NONBLOCK)?)
}

/// Reads the error output of a command, and kills it when its time is over.
struct CommandWatch {
    errors: PipeReader,
    /// It is closed when the command has ended.
    done: PipeReader,
    child: Pid,
    until: Instant,
}

/// What [`CommandWatch`] has seen.
#[derive(Default)]
struct Watched {
    said: String,
    timed_out: bool,
}

impl CommandWatch {
    fn start(self) -> std::io::Result<JoinHandle<Watched>> {
        set_nonblocking(&self.errors)?;
        std::thread::Builder::new().name("backup-watch".to_owned()).spawn(move || self.run())
    }

    fn run(mut self) -> Watched {
        let (mut tail, mut timed_out, mut is_open) = (Vec::new(), false, true);
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() && !timed_out {
                timed_out = true;
                kill(self.child);
            }
            // After the kill only the end is waited for.
            let left = timespec(left);
            let time = (!timed_out).then_some(&left);
            let mut events = vec![PollFd::new(&self.done, PollFlags::IN)];
            if is_open {
                events.push(PollFd::new(&self.errors, PollFlags::IN));
            }
            let polled = poll(&mut events, time);
            let is_done = !events[0].revents().is_empty();
            if polled.is_err_and(|error| error != Errno::INTR) {
                kill(self.child);
                break;
            }
            is_open &= self.read(&mut tail);
            if is_done {
                break;
            }
        }
        let said = String::from_utf8_lossy(&tail).trim().to_owned();
        Watched { said, timed_out }
    }

    /// Reads some of what there is. Returns whether there can be more.
    fn read(&mut self, tail: &mut Vec<u8>) -> bool {
        let mut part = [0; 4096];
        // A command that writes all the time must not keep the clock from being looked at.
        for _ in 0..READS_MAX {
            match self.errors.read(&mut part) {
                Ok(0) => return false,
                Ok(len) => {
                    tail.extend_from_slice(&part[..len]);
                    let surplus = tail.len().saturating_sub(TAIL_BYTES);
                    tail.drain(..surplus);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
        true
    }
}

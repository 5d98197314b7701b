//! The connection to a yard that may be silent: a notice after a while, and an end to the wait.
//!
//! A yard that is stopped (SIGSTOP) still lets clients connect, as its socket has a backlog, and
//! then says nothing.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Tells a person that a yard does not answer.
#[derive(Clone, Copy, Debug)]
pub struct Notice(pub fn(&Path));

impl Notice {
    /// How long a yard is silent before the notice.
    pub const AFTER: Duration = Duration::from_secs(3);
}

/// How long a yard may be silent.
#[derive(Clone, Debug)]
pub(super) struct Patience {
    pub(super) path: PathBuf,
    pub(super) silence_max: Duration,
    pub(super) notice: Option<Notice>,
}

/// Whether an error says that the time is up.
pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// A connection to a yard.
#[derive(Debug)]
pub(super) struct Line {
    stream: UnixStream,
    patience: Patience,
}

impl Line {
    pub(super) fn connect(mut patience: Patience) -> io::Result<Line> {
        // A full backlog makes a connect sleep, and nothing ends that: a thread of its own does.
        let (connected, answer) = mpsc::channel();
        let path = patience.path.clone();
        let work = move || _ = connected.send(UnixStream::connect(path));
        thread::Builder::new().name("connect".to_owned()).spawn(work)?;
        let stream = patience.wait(|wait| {
            answer.recv_timeout(wait).map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
        })?;
        Ok(Line::new(stream, patience))
    }

    pub(super) fn new(stream: UnixStream, patience: Patience) -> Line {
        Line { stream, patience }
    }

    /// Sends no more.
    pub(super) fn end(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }
}

impl Patience {
    /// Does something that waits for the yard at most as long as it is told; again after the
    /// notice.
    fn wait<T>(&mut self, mut work: impl FnMut(Duration) -> io::Result<T>) -> io::Result<T> {
        let Some(notice) = self.notice.filter(|_| self.silence_max > Notice::AFTER) else {
            return work(self.silence_max);
        };
        match work(Notice::AFTER) {
            Err(error) if is_timeout(&error) => {
                // Once for a connection.
                self.notice = None;
                (notice.0)(&self.path);
                work(self.silence_max - Notice::AFTER)
            }
            done => done,
        }
    }
}

impl Read for Line {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut stream = &self.stream;
        self.patience.wait(|wait| {
            stream.set_read_timeout(Some(wait))?;
            stream.read(into)
        })
    }
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stream = &self.stream;
        self.patience.wait(|wait| {
            stream.set_write_timeout(Some(wait))?;
            stream.write(bytes)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

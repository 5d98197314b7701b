//! The connection to a yard, with a notice after a delay and with a timeout.
//!
//! A yard that is stopped (SIGSTOP) still accepts connections, because its socket has a backlog,
//! and then sends nothing.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// A function that tells the user that a yard does not answer.
#[derive(Clone, Copy, Debug)]
pub struct Notice(pub fn(&Path));

impl Notice {
    /// How long a yard may send nothing before the notice.
    pub const AFTER: Duration = Duration::from_secs(3);
}

/// The timeout of a yard.
#[derive(Clone, Debug)]
pub(super) struct Patience {
    pub(super) path: PathBuf,
    pub(super) silence_max: Duration,
    pub(super) notice: Option<Notice>,
}

/// Whether an error is a timeout.
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
        // With a full backlog connect blocks without a timeout, so a thread of its own connects.
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

    /// Ends the sending direction.
    pub(super) fn end(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }
}

impl Patience {
    /// Calls `work`, which waits for the yard for at most the given time; calls it again after the
    /// notice.
    fn wait<T>(&mut self, mut work: impl FnMut(Duration) -> io::Result<T>) -> io::Result<T> {
        let Some(notice) = self.notice.filter(|_| self.silence_max > Notice::AFTER) else {
            return work(self.silence_max);
        };
        match work(Notice::AFTER) {
            Err(error) if is_timeout(&error) => {
                // Only once per connection.
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

//! The transport of a connection: a socket, a pair of pipes, or TLS on a socket.
//!
//! It is one enum, so that the connection's loop exists once. The plain socket is the fast path:
//! one system call receives, one sends a batch.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Region;

use crate::nbd::memory::{Lease, Stall};
use crate::nbd::reply::{self, Replies};
use crate::nbd::sys::{self, Interest, Patience, Piece, Ready, SendMode, Wake};
use crate::nbd::tls::TlsLink;

/// The connection to a client.
pub(crate) enum Link {
    /// A stream socket in clear text.
    Socket(Arc<OwnedFd>),
    /// Two pipes or other descriptors: standard input and output.
    Pipes(Pipes),
    /// TLS on a stream socket.
    Tls(Box<TlsLink>),
}

/// The bytes that a writable pipe accepts without blocking: a page.
const PIPE_BYTES: usize = 4096;

/// A pair of pipes. Another thread cannot shut a pipe down, so the connection's thread polls two
/// wakes.
pub(crate) struct Pipes {
    pub(crate) input: OwnedFd,
    pub(crate) output: OwnedFd,
    /// Stops reading after the bytes that have arrived.
    pub(crate) drain: Arc<Wake>,
    /// Stops writing.
    pub(crate) cut: Arc<Wake>,
}

impl Pipes {
    /// Waits for input; `Woken` only when there is none.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<Ready> {
        match sys::wait(&self.input, Interest::Readable, Some(&self.drain), timeout)? {
            Ready::Woken => {
                let now = Some(Duration::ZERO);
                match sys::wait(&self.input, Interest::Readable, None, now)? {
                    Ready::Yes => Ok(Ready::Yes),
                    Ready::No | Ready::Woken => Ok(Ready::Woken),
                }
            }
            ready => Ok(ready),
        }
    }

    /// Sleeps until the output accepts a page; calls `full` before it sleeps.
    fn wait_writable(&self, full: &mut dyn FnMut()) -> io::Result<()> {
        let now = Some(Duration::ZERO);
        if sys::wait(&self.output, Interest::Writable, Some(&self.cut), now)? == Ready::No {
            full();
        }
        loop {
            match sys::wait(&self.output, Interest::Writable, Some(&self.cut), None)? {
                Ready::Yes => return Ok(()),
                Ready::Woken => return Err(io::ErrorKind::BrokenPipe.into()),
                Ready::No => {}
            }
        }
    }

    fn send(
        &self,
        region: &Region,
        replies: &mut Replies,
        full: &mut dyn FnMut(),
    ) -> io::Result<()> {
        let (bytes, mut pieces) = replies.parts();
        while let Some(&first) = pieces.first() {
            self.wait_writable(full)?;
            let page = Piece { len: first.len.min(PIPE_BYTES), ..first };
            let sent = sys::send(&self.output, SendMode::Pipe, region, bytes, &[page])?;
            let gone = reply::advance(pieces, sent);
            pieces = &mut pieces[gone..];
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.wait_writable(&mut || {})?;
        sys::write_slice(&self.output, &bytes[..bytes.len().min(PIPE_BYTES)])
    }
}

fn timed_out(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, what)
}

/// The time left until a deadline.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Reads from a socket into ordinary memory, before the deadline if there is one.
pub(crate) fn read_socket(
    socket: &OwnedFd,
    into: &mut [u8],
    deadline: Option<Instant>,
) -> io::Result<usize> {
    if let Some(deadline) = deadline
        && sys::wait(socket, Interest::Readable, None, Some(left(deadline)))? != Ready::Yes
        && left(deadline).is_zero()
    {
        return Err(timed_out("the client said nothing for too long"));
    }
    sys::read_slice(socket, into)
}

/// Writes to a socket from ordinary memory, before the deadline if there is one; calls `full`
/// before it sleeps.
pub(crate) fn write_socket(
    socket: &OwnedFd,
    bytes: &[u8],
    deadline: Option<Instant>,
    full: &mut dyn FnMut(),
) -> io::Result<usize> {
    loop {
        match sys::send_slice(socket, bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => full(),
            result => return result,
        }
        if deadline.is_some_and(|deadline| left(deadline).is_zero()) {
            return Err(timed_out("the client did not read for too long"));
        }
        sys::wait(socket, Interest::Writable, None, deadline.map(left))?;
    }
}

impl Link {
    /// Receives into a region. 0 is the end of the stream.
    #[inline]
    pub(crate) fn recv(
        &mut self,
        region: &Region,
        offset: u64,
        len: usize,
        patience: Patience,
    ) -> io::Result<usize> {
        match self {
            Link::Socket(socket) => sys::recv(socket.as_ref(), region, offset, len, patience),
            Link::Pipes(pipes) => {
                let timeout = (patience == Patience::None).then_some(Duration::ZERO);
                match pipes.wait(timeout)? {
                    Ready::Yes => sys::read(&pipes.input, region, offset, len),
                    Ready::Woken => Ok(0),
                    Ready::No => Err(io::ErrorKind::WouldBlock.into()),
                }
            }
            Link::Tls(tls) => tls.recv(region, offset, len, patience),
        }
    }

    /// Sleeps until there are bytes to receive, at most for `timeout`.
    pub(crate) fn wait(&mut self, timeout: Duration) -> io::Result<Ready> {
        match self {
            Link::Socket(socket) => {
                sys::wait(socket.as_ref(), Interest::Readable, None, Some(timeout))
            }
            Link::Pipes(pipes) => pipes.wait(Some(timeout)),
            Link::Tls(tls) => tls.wait(timeout),
        }
    }

    /// Sleeps until there are bytes to receive, or another descriptor is readable, at most for
    /// `timeout`.
    pub(crate) fn wait_either(
        &mut self,
        other: Option<RawFd>,
        timeout: Duration,
    ) -> io::Result<Ready> {
        match self {
            Link::Socket(socket) => sys::wait_either(socket.as_ref(), other, None, timeout),
            Link::Pipes(pipes) => {
                sys::wait_either(&pipes.input, other, Some(&pipes.drain), timeout)
            }
            Link::Tls(tls) => tls.wait_either(other, timeout),
        }
    }

    /// Sends all replies and clears them. Calls `full` before it sleeps because the client reads
    /// slowly. A client that does not read is disconnected when another one waits for the memory
    /// that `lease` holds.
    pub(crate) fn send(
        &mut self,
        region: &Region,
        replies: &mut Replies,
        full: &mut dyn FnMut(),
        lease: &Lease,
    ) -> io::Result<()> {
        let result = match self {
            Link::Socket(socket) => send_all(socket, region, replies, full, lease),
            Link::Pipes(pipes) => pipes.send(region, replies, full),
            Link::Tls(tls) => tls.send(region, replies, full, lease),
        };
        replies.clear();
        result
    }

    /// Receives into ordinary memory, for the handshake. 0 is the end of the stream.
    pub(crate) fn read(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<usize> {
        match self {
            Link::Socket(socket) => read_socket(socket, into, Some(deadline)),
            Link::Pipes(pipes) => match pipes.wait(Some(left(deadline)))? {
                Ready::Yes => sys::read_slice(&pipes.input, into),
                Ready::Woken => Ok(0),
                Ready::No => Err(timed_out("the client said nothing for too long")),
            },
            Link::Tls(tls) => tls.read(into, deadline),
        }
    }

    /// Sends from ordinary memory, for the handshake.
    pub(crate) fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = match self {
                Link::Socket(socket) => write_socket(socket, bytes, Some(deadline), &mut || {})?,
                Link::Pipes(pipes) => pipes.write(bytes)?,
                Link::Tls(tls) => tls.write(bytes, deadline)?,
            };
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Ends the transport's protocol: TLS sends a close alert.
    pub(crate) fn close(&mut self) {
        if let Link::Tls(tls) = self {
            tls.close();
        }
    }
}

fn send_all(
    socket: &OwnedFd,
    region: &Region,
    replies: &mut Replies,
    full: &mut dyn FnMut(),
    lease: &Lease,
) -> io::Result<()> {
    let (bytes, mut pieces) = replies.parts();
    let mut how = SendMode::SocketNow;
    let mut stall = Stall::default();
    while !pieces.is_empty() {
        match sys::send(socket, how, region, bytes, pieces) {
            Ok(sent) => {
                let gone = reply::advance(pieces, sent);
                pieces = &mut pieces[gone..];
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if how == SendMode::SocketNow {
                    full();
                    how = SendMode::Socket;
                }
                // Otherwise the timeout of the socket's send has passed.
            }
            Err(error) => return Err(error),
        }
        if how == SendMode::Socket && !pieces.is_empty() {
            stall.note(lease)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::nbd::client::tests::client_with;

    fn pipes() -> (Pipes, io::PipeWriter, io::PipeReader) {
        let (input, to) = io::pipe().unwrap();
        let (from, output) = io::pipe().unwrap();
        let wake = || Arc::new(Wake::new().unwrap());
        let pipes =
            Pipes { input: input.into(), output: output.into(), drain: wake(), cut: wake() };
        (pipes, to, from)
    }

    #[test]
    fn a_pipe_is_drained_to_its_end_and_then_says_that_it_ended() {
        let (pipes, mut to, _from) = pipes();
        pipes.drain.raise();
        io::Write::write_all(&mut to, b"rest").unwrap();
        let mut link = Link::Pipes(pipes);
        let region = Region::alloc(4096);
        assert_eq!(link.recv(&region, 0, 4096, Patience::Some).unwrap(), 4);
        assert_eq!(link.recv(&region, 0, 4096, Patience::Some).unwrap(), 0);
    }

    #[test]
    fn a_pipe_that_nobody_reads_can_be_cut() {
        let (pipes, _to, from) = pipes();
        let cut = Arc::clone(&pipes.cut);
        let mut link = Link::Pipes(pipes);
        let sending = thread::spawn(move || {
            let region = Region::alloc(1 << 20);
            let mut replies = Replies::new();
            replies.push_data(&region, &[0; 16], 64, (1 << 20) - 64);
            link.send(&region, &mut replies, &mut || {}, &client_with(0).lease)
        });
        cut.raise();
        let error = sending.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        drop(from);
    }
}

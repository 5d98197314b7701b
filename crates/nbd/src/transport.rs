//! The transport of a connection: a socket, a pair of pipes, or TLS on a socket; and the replies of
//! a batch, which it sends by as few system calls as possible.
//!
//! The transport is one enum, so that the connection's loop exists once. The plain socket is the
//! fast path: one system call receives, one sends a batch.
//!
//! The data of reads are in the connection's region with their headers right before them, one piece
//! each. All other replies are short and are gathered in a byte vector, where neighbours are one
//! piece.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockyard_core::Region;
use blockyard_os::socket::{
    self, Interest, PieceSource, Ready, SendMode, SendPiece, WaitMode, Wake, left, read_socket,
    timed_out, write_socket,
};

use crate::memory::Lease;
use crate::tls::TlsTransport;

/// The connection to a client.
pub(crate) enum Transport {
    /// A stream socket in clear text.
    Socket(Arc<OwnedFd>),
    /// Two pipes or other descriptors: standard input and output.
    Pipes(Pipes),
    /// TLS on a stream socket.
    Tls(Box<TlsTransport>),
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
        match socket::wait(&self.input, Interest::Readable, Some(&self.drain), timeout)? {
            Ready::Woken => {
                let now = Some(Duration::ZERO);
                match socket::wait(&self.input, Interest::Readable, None, now)? {
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
        if socket::wait(&self.output, Interest::Writable, Some(&self.cut), now)? == Ready::No {
            full();
        }
        loop {
            match socket::wait(&self.output, Interest::Writable, Some(&self.cut), None)? {
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
            let page = SendPiece { len: first.len.min(PIPE_BYTES), ..first };
            let sent = socket::send(&self.output, SendMode::Pipe, region, bytes, &[page])?;
            let gone = advance(pieces, sent);
            pieces = &mut pieces[gone..];
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.wait_writable(&mut || {})?;
        socket::write_slice(&self.output, &bytes[..bytes.len().min(PIPE_BYTES)])
    }
}

impl Transport {
    /// Receives into a region. 0 is the end of the stream.
    #[inline]
    pub(crate) fn recv(
        &mut self,
        region: &Region,
        offset: u64,
        len: usize,
        mode: WaitMode,
    ) -> io::Result<usize> {
        match self {
            Transport::Socket(socket) => socket::recv(socket.as_ref(), region, offset, len, mode),
            Transport::Pipes(pipes) => {
                let timeout = (mode == WaitMode::NonBlocking).then_some(Duration::ZERO);
                match pipes.wait(timeout)? {
                    Ready::Yes => socket::read(&pipes.input, region, offset, len),
                    Ready::Woken => Ok(0),
                    Ready::No => Err(io::ErrorKind::WouldBlock.into()),
                }
            }
            Transport::Tls(tls) => tls.recv(region, offset, len, mode),
        }
    }

    /// Sleeps until there are bytes to receive, at most for `timeout`.
    pub(crate) fn wait(&mut self, timeout: Duration) -> io::Result<Ready> {
        match self {
            Transport::Socket(socket) => {
                socket::wait(socket.as_ref(), Interest::Readable, None, Some(timeout))
            }
            Transport::Pipes(pipes) => pipes.wait(Some(timeout)),
            Transport::Tls(tls) => tls.wait(timeout),
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
            Transport::Socket(socket) => socket::wait_either(socket.as_ref(), other, None, timeout),
            Transport::Pipes(pipes) => {
                socket::wait_either(&pipes.input, other, Some(&pipes.drain), timeout)
            }
            Transport::Tls(tls) => tls.wait_either(other, timeout),
        }
    }

    /// Sends all replies and clears them. Calls `full` before it sleeps because the client reads
    /// slowly. A client that does not read is disconnected when another one waits for the memory
    /// that `lease` holds; then the send fails.
    pub(crate) fn send(
        &mut self,
        region: &Region,
        replies: &mut Replies,
        full: &mut dyn FnMut(),
        lease: &Lease,
    ) -> io::Result<()> {
        let result = match self {
            Transport::Socket(socket) => send_all(socket, region, replies, full, lease),
            Transport::Pipes(pipes) => pipes.send(region, replies, full),
            Transport::Tls(tls) => tls.send(region, replies, full, lease),
        };
        replies.clear();
        result
    }

    /// Receives into ordinary memory, for the handshake. 0 is the end of the stream.
    pub(crate) fn read(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<usize> {
        match self {
            Transport::Socket(socket) => read_socket(socket, into, Some(deadline)),
            Transport::Pipes(pipes) => match pipes.wait(Some(left(deadline)))? {
                Ready::Yes => socket::read_slice(&pipes.input, into),
                Ready::Woken => Ok(0),
                Ready::No => Err(timed_out("the client said nothing for too long")),
            },
            Transport::Tls(tls) => tls.read(into, deadline),
        }
    }

    /// Sends from ordinary memory, for the handshake.
    pub(crate) fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = match self {
                Transport::Socket(socket) => {
                    write_socket(socket, bytes, Some(deadline), &mut || {})?
                }
                Transport::Pipes(pipes) => pipes.write(bytes)?,
                Transport::Tls(tls) => tls.write(bytes, deadline)?,
            };
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Ends the transport's protocol: TLS sends a close alert.
    pub(crate) fn close(&mut self) {
        if let Transport::Tls(tls) = self {
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
    let mut has_slept = false;
    while !pieces.is_empty() {
        match socket::send(socket, SendMode::SocketNow, region, bytes, pieces) {
            Ok(sent) => {
                lease.note_moved();
                let gone = advance(pieces, sent);
                pieces = &mut pieces[gone..];
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !has_slept {
                    full();
                    has_slept = true;
                }
                lease.note_blocked();
                // Without a timeout: a cut shuts the socket down, which ends the wait.
                socket::wait(socket, Interest::Writable, None, None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Above this many bytes of short replies, the batch is sent before more are made.
const BYTES_FULL: usize = 64 << 10;
/// Above this many pieces, the batch is sent before more are made.
const PIECES_FULL: usize = 256;

/// Replies that wait to be sent, in order.
#[derive(Debug)]
pub(crate) struct Replies {
    bytes: Vec<u8>,
    pieces: Vec<SendPiece>,
}

impl Replies {
    pub(crate) fn new() -> Replies {
        Replies {
            bytes: Vec::with_capacity(2 * BYTES_FULL),
            pieces: Vec::with_capacity(2 * PIECES_FULL),
        }
    }

    /// Appends a reply whose header and data are contiguous in the region: writes the header before
    /// the data, which begin at `data`.
    #[inline]
    pub(crate) fn push_data(&mut self, region: &Region, head: &[u8], data: u64, len: usize) {
        let offset = data - head.len() as u64;
        region.write(offset, head);
        self.pieces.push(SendPiece { source: PieceSource::Region, offset, len: head.len() + len });
    }

    /// Appends the bytes that `print` prints.
    #[inline]
    pub(crate) fn push(&mut self, print: impl FnOnce(&mut Vec<u8>)) {
        let offset = self.bytes.len();
        print(&mut self.bytes);
        let len = self.bytes.len() - offset;
        if let Some(last) = self.pieces.last_mut()
            && last.source == PieceSource::Bytes
        {
            last.len += len;
            return;
        }
        self.pieces.push(SendPiece { source: PieceSource::Bytes, offset: offset as u64, len });
    }

    /// Whether it is time to send.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.bytes.len() >= BYTES_FULL || self.pieces.len() >= PIECES_FULL
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The pieces, in order, which the sender shortens.
    pub(crate) fn parts(&mut self) -> (&[u8], &mut [SendPiece]) {
        (&self.bytes, &mut self.pieces)
    }

    /// Clears all replies, sent or not.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.pieces.clear();
    }
}

/// Removes the first `sent` bytes from the pieces, and returns the number of pieces sent
/// completely.
pub(crate) fn advance(pieces: &mut [SendPiece], mut sent: usize) -> usize {
    for (index, piece) in pieces.iter_mut().enumerate() {
        if sent < piece.len {
            piece.offset += sent as u64;
            piece.len -= sent;
            return index;
        }
        sent -= piece.len;
    }
    pieces.len()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::client::tests::client_with;

    fn pipes() -> (Pipes, io::PipeWriter, io::PipeReader) {
        let (input, to) = io::pipe().unwrap();
        let (from, output) = io::pipe().unwrap();
        let wake = || Arc::new(Wake::new().unwrap());
        let pipes =
            Pipes { input: input.into(), output: output.into(), drain: wake(), cut: wake() };
        (pipes, to, from)
    }

    #[test]
    fn drained_pipe_returns_its_bytes_and_then_end_of_stream() {
        let (pipes, mut to, _from) = pipes();
        pipes.drain.raise();
        io::Write::write_all(&mut to, b"rest").unwrap();
        let mut transport = Transport::Pipes(pipes);
        let region = Region::alloc(4096);
        assert_eq!(transport.recv(&region, 0, 4096, WaitMode::AnyBytes).unwrap(), 4);
        assert_eq!(transport.recv(&region, 0, 4096, WaitMode::AnyBytes).unwrap(), 0);
    }

    #[test]
    fn send_to_a_full_pipe_ends_when_cut() {
        let (pipes, _to, from) = pipes();
        let cut = Arc::clone(&pipes.cut);
        let mut transport = Transport::Pipes(pipes);
        let sending = thread::spawn(move || {
            let region = Region::alloc(1 << 20);
            let mut replies = Replies::new();
            replies.push_data(&region, &[0; 16], 64, (1 << 20) - 64);
            transport.send(&region, &mut replies, &mut || {}, &client_with(0).lease)
        });
        cut.raise();
        let error = sending.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        drop(from);
    }

    #[test]
    fn short_replies_share_a_piece() {
        let region = Region::alloc(4096);
        let mut replies = Replies::new();
        replies.push(|out| out.extend_from_slice(b"one"));
        replies.push(|out| out.extend_from_slice(b"two"));
        replies.push_data(&region, b"head", 64, 512);
        replies.push(|out| out.extend_from_slice(b"three"));
        let (bytes, pieces) = replies.parts();
        assert_eq!(bytes, b"onetwothree");
        let lens: Vec<_> = pieces.iter().map(|piece| (piece.source, piece.len)).collect();
        let wanted = [(PieceSource::Bytes, 6), (PieceSource::Region, 516), (PieceSource::Bytes, 5)];
        assert_eq!(lens, wanted);
        let mut head = [0; 4];
        region.read(60, &mut head);
        assert_eq!(&head, b"head");
    }

    #[test]
    fn advancing_cuts_in_the_middle_of_a_piece() {
        let piece = |len| SendPiece { source: PieceSource::Bytes, offset: 0, len };
        let mut pieces = [piece(10), piece(20), piece(30)];
        assert_eq!(advance(&mut pieces, 15), 1);
        assert_eq!((pieces[1].offset, pieces[1].len), (5, 15));
        assert_eq!(advance(&mut pieces[1..], 15), 1);
        assert_eq!(advance(&mut pieces[2..], 30), 1);
    }
}

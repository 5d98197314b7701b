//! PDUs that wait to be sent: a batch leaves by as few system calls as possible. Headers and short
//! data are gathered in a byte vector, where neighbours are one piece; the data of reads are sent
//! from the region.

use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use blockyard_core::Region;
use blockyard_os::socket::{self, Interest, PieceSource, Ready, SendMode, SendPiece};

/// Above this many bytes of headers and short data, the batch is sent before more are made.
const BYTES_FULL: usize = 64 << 10;
/// Above this many pieces, the batch is sent before more are made.
const PIECES_FULL: usize = 256;

/// The time after which a host that accepts no byte is disconnected.
const STALL_MAX: Duration = Duration::from_secs(30);

/// How long a connection waits for the host to close it.
const LINGER: Duration = Duration::from_secs(1);

/// PDUs that wait to be sent, in order.
#[derive(Debug)]
pub(crate) struct Outbox {
    bytes: Vec<u8>,
    pieces: Vec<SendPiece>,
}

impl Outbox {
    pub(crate) fn new() -> Outbox {
        Outbox {
            bytes: Vec::with_capacity(2 * BYTES_FULL),
            pieces: Vec::with_capacity(2 * PIECES_FULL),
        }
    }

    /// Appends the bytes that `print` prints.
    pub(crate) fn push(&mut self, print: impl FnOnce(&mut Vec<u8>)) {
        let offset = self.bytes.len();
        print(&mut self.bytes);
        let len = self.bytes.len() - offset;
        match self.pieces.last_mut() {
            Some(last) if last.source == PieceSource::Bytes => last.len += len,
            _ => {
                let (source, offset) = (PieceSource::Bytes, offset as u64);
                self.pieces.push(SendPiece { source, offset, len });
            }
        }
    }

    /// Appends data in the region.
    pub(crate) fn push_region(&mut self, offset: u64, len: usize) {
        self.pieces.push(SendPiece { source: PieceSource::Region, offset, len });
    }

    /// Whether it is time to send.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes.len() >= BYTES_FULL || self.pieces.len() >= PIECES_FULL
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Sends all PDUs and clears them.
    ///
    /// # Errors
    /// If the connection fails, or the host accepts nothing for too long.
    pub(crate) fn send(&mut self, to: &TcpStream, region: &Region) -> io::Result<()> {
        let sent = send_all(to, region, &self.bytes, &mut self.pieces);
        self.bytes.clear();
        self.pieces.clear();
        // A log page may be longer than all else.
        self.bytes.shrink_to(2 * BYTES_FULL);
        sent
    }
}

fn send_all(
    to: &TcpStream,
    region: &Region,
    bytes: &[u8],
    mut pieces: &mut [SendPiece],
) -> io::Result<()> {
    while !pieces.is_empty() {
        match socket::send(to, SendMode::SocketNow, region, bytes, pieces) {
            Ok(sent) => {
                let gone = advance(pieces, sent);
                pieces = &mut pieces[gone..];
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // A cut shuts the socket down, which ends the wait.
                if socket::wait(to, Interest::Writable, None, Some(STALL_MAX))? == Ready::No {
                    return Err(socket::timed_out("the host did not read for 30 s"));
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// After a TermReq or a failed authentication: lets the host read it before the socket is closed,
/// which would reset the connection if the host has sent more.
pub(crate) fn linger(mut to: &TcpStream) {
    socket::shutdown(to, Shutdown::Write);
    let deadline = Instant::now() + LINGER;
    let mut bytes = [0; 4096];
    while !socket::left(deadline).is_zero() {
        match to.read(&mut bytes) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let left = Some(socket::left(deadline));
                if socket::wait(to, Interest::Readable, None, left).is_err() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

/// Removes the first `sent` bytes from the pieces, and returns the number of pieces sent
/// completely.
fn advance(pieces: &mut [SendPiece], mut sent: usize) -> usize {
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
    use super::*;

    #[test]
    fn short_pdus_share_a_piece() {
        let mut outbox = Outbox::new();
        outbox.push(|out| out.extend_from_slice(b"one"));
        outbox.push(|out| out.extend_from_slice(b"two"));
        outbox.push_region(4096, 512);
        outbox.push(|out| out.extend_from_slice(b"three"));
        let lens: Vec<_> = outbox.pieces.iter().map(|it| (it.source, it.offset, it.len)).collect();
        let wanted = [
            (PieceSource::Bytes, 0, 6),
            (PieceSource::Region, 4096, 512),
            (PieceSource::Bytes, 6, 5),
        ];
        assert_eq!(lens, wanted);
        assert_eq!(advance(&mut outbox.pieces, 7), 1);
        assert_eq!((outbox.pieces[1].offset, outbox.pieces[1].len), (4097, 511));
    }
}

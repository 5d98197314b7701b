//! PDUs that wait to be sent: a batch leaves by as few system calls as possible. Headers and short
//! data are gathered in a byte vector, where neighbours are one piece; the data of reads are sent
//! from the region.

use std::io;

use blockyard_core::Region;
use blockyard_os::socket::{PieceSource, SendPiece};

use crate::host_stream::HostStream;
use crate::identify::QUEUE_ENTRIES_MAX;

/// Above this many bytes of headers and short data, the batch is sent before more are made.
const BYTES_FULL: usize = 64 << 10;
/// Above this many pieces, the batch is sent before more are made.
const PIECES_FULL: usize = 256;
/// The most pieces of a command: header, data, and digest or completion.
const COMMAND_PIECES_MAX: usize = 3;
/// The most pieces: commands in flight complete while the host does not read.
const PIECES_MAX: usize = PIECES_FULL + COMMAND_PIECES_MAX * QUEUE_ENTRIES_MAX as usize;

/// PDUs that wait to be sent, in order.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    bytes: Vec<u8>,
    pieces: Vec<SendPiece>,
    /// The number of pieces that are sent completely.
    sent: usize,
}

impl Outbox {
    /// Makes the memory, which is returned by [`Outbox::shrink`].
    fn grow(&mut self) {
        if self.pieces.capacity() < PIECES_MAX {
            self.pieces.reserve(PIECES_MAX);
            self.bytes.reserve(2 * BYTES_FULL);
        }
    }

    /// Returns the memory, if all PDUs are sent.
    pub(crate) fn shrink(&mut self) {
        if self.is_empty() {
            *self = Outbox::default();
        }
    }

    /// Appends the bytes that `print` prints.
    pub(crate) fn push(&mut self, print: impl FnOnce(&mut Vec<u8>)) {
        self.grow();
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

    /// Drops all PDUs.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.pieces.clear();
        self.sent = 0;
        // A log page may be longer than all else.
        self.bytes.shrink_to(2 * BYTES_FULL);
    }

    /// Sends as many PDUs as the host accepts; returns whether it accepted any byte. The outbox is
    /// empty once all are sent.
    ///
    /// # Errors
    /// If the connection fails.
    pub(crate) fn send(&mut self, to: &mut impl HostStream, region: &Region) -> io::Result<bool> {
        let mut is_any = false;
        while self.sent < self.pieces.len() {
            let pieces = &mut self.pieces[self.sent..];
            match to.send(region, &self.bytes, pieces) {
                Ok(sent) => self.sent += advance(pieces, sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(is_any),
                Err(error) => return Err(error),
            }
            is_any = true;
        }
        self.clear();
        Ok(is_any)
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
        let mut outbox = Outbox::default();
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

//! Replies of a batch, gathered to be sent by as few system calls as possible.
//!
//! The data of reads are in the connection's region with their headers right before them, one piece
//! each. All other replies are short and are gathered in a byte vector, where neighbours are one
//! piece.

use blockyard_core::Region;

use crate::nbd::sys::{Piece, Source};

/// Above this many bytes of short replies, the batch is sent before more are made.
const BYTES_FULL: usize = 64 << 10;
/// Above this many pieces, the batch is sent before more are made.
const PIECES_FULL: usize = 256;

/// Replies that wait to be sent, in order.
#[derive(Debug)]
pub(crate) struct Replies {
    bytes: Vec<u8>,
    pieces: Vec<Piece>,
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
        self.pieces.push(Piece { source: Source::Region, offset, len: head.len() + len });
    }

    /// Appends the bytes that `print` prints.
    #[inline]
    pub(crate) fn push(&mut self, print: impl FnOnce(&mut Vec<u8>)) {
        let offset = self.bytes.len();
        print(&mut self.bytes);
        let len = self.bytes.len() - offset;
        if let Some(last) = self.pieces.last_mut()
            && last.source == Source::Bytes
        {
            last.len += len;
            return;
        }
        self.pieces.push(Piece { source: Source::Bytes, offset: offset as u64, len });
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
    pub(crate) fn parts(&mut self) -> (&[u8], &mut [Piece]) {
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
pub(crate) fn advance(pieces: &mut [Piece], mut sent: usize) -> usize {
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
        let wanted = [(Source::Bytes, 6), (Source::Region, 516), (Source::Bytes, 5)];
        assert_eq!(lens, wanted);
        let mut head = [0; 4];
        region.read(60, &mut head);
        assert_eq!(&head, b"head");
    }

    #[test]
    fn advancing_cuts_in_the_middle_of_a_piece() {
        let piece = |len| Piece { source: Source::Bytes, offset: 0, len };
        let mut pieces = [piece(10), piece(20), piece(30)];
        assert_eq!(advance(&mut pieces, 15), 1);
        assert_eq!((pieces[1].offset, pieces[1].len), (5, 15));
        assert_eq!(advance(&mut pieces[1..], 15), 1);
        assert_eq!(advance(&mut pieces[2..], 30), 1);
    }
}

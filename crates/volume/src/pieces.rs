//! A request's data as one run of bytes, whatever pieces of memory they lie in.
//!
//! The memory belongs to whoever asked for the I/O, and others may touch it meanwhile. Bytes are
//! copied in and out through raw pointers; no reference to them is made.
#![allow(unsafe_code)]

use blockyard_core::Segment;

/// Copies a request's data out of its pieces.
pub(crate) fn gather(pieces: impl Iterator<Item = Segment>, mut into: &mut [u8]) {
    for Segment { data, len_bytes } in pieces {
        let len = len_bytes.min(into.len());
        // SAFETY: the piece is readable for its length until the request is completed, and `into`,
        // which has `len` bytes, is ours and no part of a request's memory.
        unsafe { into.as_mut_ptr().copy_from_nonoverlapping(data.as_ptr(), len) };
        into = &mut into[len..];
    }
    assert!(into.is_empty(), "a request has as many bytes as its range");
}

/// Where the next bytes of a request's data go.
pub(crate) struct Scatter<I> {
    pieces: I,
    at: *mut u8,
    left: usize,
}

impl<I: Iterator<Item = Segment>> Scatter<I> {
    pub(crate) fn new(pieces: I) -> Scatter<I> {
        Scatter { pieces, at: std::ptr::null_mut(), left: 0 }
    }

    /// Copies bytes into the request.
    pub(crate) fn put(&mut self, mut from: &[u8]) {
        while !from.is_empty() {
            while self.left == 0 {
                let piece = self.pieces.next().expect("a request has as many bytes as its range");
                (self.at, self.left) = (piece.data.as_ptr(), piece.len_bytes);
            }
            let len = self.left.min(from.len());
            // SAFETY: the piece is writable for what is left of it until the request is completed,
            // and `from` is no part of a request's memory.
            unsafe {
                self.at.copy_from_nonoverlapping(from.as_ptr(), len);
                self.at = self.at.add(len);
            }
            self.left -= len;
            from = &from[len..];
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use super::*;

    #[test]
    fn bytes_come_in_order_whatever_the_pieces() {
        let mut memory: Vec<u8> = (0..60).collect();
        let base = memory.as_mut_ptr();
        let piece = |at: usize, len_bytes| {
            // SAFETY: it lies in the vector.
            let data = NonNull::new(unsafe { base.add(at) }).unwrap();
            Segment { data, len_bytes }
        };
        let pieces = || [piece(40, 8), piece(0, 4), piece(20, 12)].into_iter();
        let mut all = [0; 24];
        gather(pieces(), &mut all);
        let wanted: Vec<u8> = (40..48).chain(0..4).chain(20..32).collect();
        assert_eq!(all[..], wanted);
        let mut scatter = Scatter::new(pieces());
        scatter.put(&[100; 10]);
        scatter.put(&[101; 3]);
        assert_eq!(memory[40..48], [100; 8]);
        assert_eq!((&memory[..5], &memory[20..22]), (&[100, 100, 101, 101, 4][..], &[101, 21][..]));
    }
}

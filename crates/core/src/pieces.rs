//! A request's data as one run of bytes, regardless of how many pieces of memory hold it.
//!
//! The memory belongs to the submitter of the I/O, and other threads may access it concurrently.
//! Bytes are copied in and out through raw pointers; no reference to them is made.
#![allow(unsafe_code)]

use crate::Segment;

/// The data of a request, consumed from the front.
#[derive(Debug)]
pub struct Pieces<I> {
    segments: I,
    at: *mut u8,
    left: usize,
}

impl<I: Iterator<Item = Segment>> Pieces<I> {
    /// All data of a request.
    #[inline]
    pub fn new(segments: I) -> Pieces<I> {
        Pieces { segments, at: std::ptr::null_mut(), left: 0 }
    }

    /// Advances to the next piece if the current one is used up.
    #[inline]
    fn settle(&mut self) {
        while self.left == 0 {
            let Some(segment) = self.segments.next() else { return };
            (self.at, self.left) = (segment.data.as_ptr(), segment.len_bytes);
        }
    }

    /// Takes the next `len_bytes` if they lie in one piece. The pointer is valid for reads and
    /// writes of `len_bytes` until the request is completed.
    #[inline]
    pub fn take_whole(&mut self, len_bytes: usize) -> Option<*mut u8> {
        self.settle();
        if self.left < len_bytes {
            return None;
        }
        let at = self.at;
        self.advance(len_bytes);
        Some(at)
    }

    /// The address of the next bytes and how many of them lie in the current piece, for
    /// prefetching. Does not advance to the next piece.
    #[inline]
    pub fn ahead(&self) -> (*const u8, usize) {
        (self.at, self.left)
    }

    /// Skips bytes of the current piece.
    #[inline]
    fn advance(&mut self, len_bytes: usize) {
        self.left -= len_bytes;
        // SAFETY: the piece was at least that long, so the result is inside or one past its end.
        self.at = unsafe { self.at.add(len_bytes) };
    }

    /// Skips `len_bytes` bytes.
    ///
    /// # Panics
    /// If fewer bytes remain.
    #[inline]
    pub fn skip(&mut self, mut len_bytes: usize) {
        while len_bytes > 0 {
            self.settle();
            let len = self.left.min(len_bytes);
            assert!(len > 0, "a request has as many bytes as its range");
            self.advance(len);
            len_bytes -= len;
        }
    }

    /// Copies the next bytes out of the request.
    ///
    /// # Panics
    /// If fewer bytes remain.
    #[inline]
    pub fn read(&mut self, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            self.settle();
            let len = self.left.min(into.len() - done);
            assert!(len > 0, "a request has as many bytes as its range");
            // SAFETY: the piece has `len` bytes, and so has the rest of `into`, which is ours and
            // no part of a request's memory.
            unsafe { into.as_mut_ptr().add(done).copy_from_nonoverlapping(self.at, len) };
            self.advance(len);
            done += len;
        }
    }

    /// Copies bytes into the request.
    ///
    /// # Panics
    /// If less space remains.
    #[inline]
    pub fn write(&mut self, from: &[u8]) {
        let mut done = 0;
        while done < from.len() {
            self.settle();
            let len = self.left.min(from.len() - done);
            assert!(len > 0, "a request has as many bytes as its range");
            // SAFETY: the piece has `len` bytes, and so has the rest of `from`, which is no part of
            // a request's memory.
            unsafe { self.at.copy_from_nonoverlapping(from.as_ptr().add(done), len) };
            self.advance(len);
            done += len;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use super::*;

    #[test]
    fn bytes_are_in_order_for_any_piece_lengths() {
        let mut memory: Vec<u8> = (0..60).collect();
        let base = memory.as_mut_ptr();
        let piece = |at: usize, len_bytes| {
            // SAFETY: it lies in the vector.
            let data = NonNull::new(unsafe { base.add(at) }).unwrap();
            Segment { data, len_bytes }
        };
        let pieces = || Pieces::new([piece(40, 8), piece(0, 4), piece(20, 12)].into_iter());
        let mut all = [0; 24];
        pieces().read(&mut all);
        let wanted: Vec<u8> = (40..48).chain(0..4).chain(20..32).collect();
        assert_eq!(all[..], wanted);
        let mut some = pieces();
        assert_eq!(some.take_whole(8).map(|at| at as usize), Some(base as usize + 40));
        assert!(some.take_whole(5).is_none());
        some.write(&[200, 201, 202, 203, 204]);
        let (ahead, left) = some.ahead();
        assert_eq!((ahead as usize, left), (base as usize + 21, 11));
        assert_eq!(some.take_whole(11).map(|at| at as usize), Some(base as usize + 21));
        assert!(some.take_whole(1).is_none());
        let mut last = pieces();
        last.skip(13);
        assert_eq!(last.take_whole(2).map(|at| at as usize), Some(base as usize + 21));
        assert_eq!((&memory[..4], memory[20]), (&[200, 201, 202, 203][..], 204));
    }
}

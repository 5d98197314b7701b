//! One run of bytes for the data of one command at a time, page-aligned, made when a queue opens.
//!
//! A request's data lie in several pieces that may be a guest's memory and change at any time, so
//! they are copied through raw pointers, and what a transport sees is this buffer.
#![allow(unsafe_code)]

use blockyard_core::Segment;

/// Drives' host adapters want their memory aligned, or copy it themselves.
const ALIGN: usize = 4096;

/// See the module.
pub(super) struct Buffer {
    memory: Vec<u8>,
    /// Where the aligned part begins.
    start: usize,
}

impl Buffer {
    /// A buffer of so many bytes. Pages of it that are never used cost nothing.
    pub(super) fn new(len_bytes: usize) -> Buffer {
        let memory = vec![0; len_bytes + ALIGN];
        let start = memory.as_ptr().align_offset(ALIGN);
        // `align_offset` may give up, but only on addresses that are not numbers yet.
        Buffer { start: if start < ALIGN { start } else { 0 }, memory }
    }

    /// The first `len_bytes` of it.
    pub(super) fn bytes(&mut self, len_bytes: usize) -> &mut [u8] {
        &mut self.memory[self.start..self.start + len_bytes]
    }

    /// Copies the segments in, one behind the other, and gives what they fill.
    pub(super) fn gather(&mut self, segments: impl Iterator<Item = Segment>) -> &[u8] {
        let mut filled = 0;
        for Segment { data, len_bytes } in segments {
            let into = &mut self.memory[self.start + filled..][..len_bytes];
            // SAFETY: a segment is readable for its length until its request is completed, which
            // is later; `into` is as long, and is memory of this buffer's own, which no region is.
            unsafe { data.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), len_bytes) };
            filled += len_bytes;
        }
        &self.memory[self.start..self.start + filled]
    }

    /// Copies what was read out to the segments, one behind the other.
    pub(super) fn scatter(&self, segments: impl Iterator<Item = Segment>) {
        let mut taken = 0;
        for Segment { data, len_bytes } in segments {
            let from = &self.memory[self.start + taken..][..len_bytes];
            // SAFETY: a segment is writable for its length until its request is completed, which
            // is later; `from` is as long, and is memory of this buffer's own, which no region is.
            unsafe { data.as_ptr().copy_from_nonoverlapping(from.as_ptr(), len_bytes) };
            taken += len_bytes;
        }
    }
}

//! A contiguous page-aligned buffer for the data of one command at a time, allocated with its
//! queue.
//!
//! The segments of a request may be a guest's memory, which can change at any time. So they are
//! copied through raw pointers, and the transport sees only this buffer.
#![allow(unsafe_code)]

use blockyard_core::Segment;

/// Alignment in bytes: host adapters need aligned memory or copy the data themselves.
const ALIGN: usize = 4096;

/// The data buffer of a queue.
pub(super) struct Buffer {
    memory: Vec<u8>,
    /// Offset of the aligned part.
    start: usize,
}

impl Buffer {
    /// Allocates a buffer of `len_bytes`. Pages that are never used take no memory.
    pub(super) fn new(len_bytes: usize) -> Buffer {
        let memory = vec![0; len_bytes + ALIGN];
        let start = memory.as_ptr().align_offset(ALIGN);
        // `align_offset` may fail, but only in const evaluation.
        Buffer { start: if start < ALIGN { start } else { 0 }, memory }
    }

    /// The first `len_bytes` of the buffer.
    pub(super) fn bytes(&mut self, len_bytes: usize) -> &mut [u8] {
        &mut self.memory[self.start..self.start + len_bytes]
    }

    /// Copies the segments into the buffer, concatenated, and returns the filled part.
    pub(super) fn gather(&mut self, segments: impl Iterator<Item = Segment>) -> &[u8] {
        let mut filled = 0;
        for Segment { data, len_bytes } in segments {
            let into = &mut self.memory[self.start + filled..][..len_bytes];
            // SAFETY: a segment is readable for its length until its request completes, which is
            // later; `into` has that length and lies in this buffer, which is in no region.
            unsafe { data.as_ptr().copy_to_nonoverlapping(into.as_mut_ptr(), len_bytes) };
            filled += len_bytes;
        }
        &self.memory[self.start..self.start + filled]
    }

    /// Copies the buffer to the segments, in order.
    pub(super) fn scatter(&self, segments: impl Iterator<Item = Segment>) {
        let mut taken = 0;
        for Segment { data, len_bytes } in segments {
            let from = &self.memory[self.start + taken..][..len_bytes];
            // SAFETY: a segment is writable for its length until its request completes, which is
            // later; `from` has that length and lies in this buffer, which is in no region.
            unsafe { data.as_ptr().copy_from_nonoverlapping(from.as_ptr(), len_bytes) };
            taken += len_bytes;
        }
    }
}

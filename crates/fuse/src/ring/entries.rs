//! The memory of a ring's entries: a header and a buffer for each.
//!
//! A header is `fuse_uring_req_header` of `linux/fuse.h`. It has 128 bytes for the header of the
//! request and later of its reply, and 128 for the fixed part of the call. Its last 32 bytes are
//! the ring's own, with the length of the data in the buffer.
#![allow(unsafe_code)] // The kernel writes there, and it is read in context.

use std::io;
use std::sync::Arc;

use blockyard_core::Region;
use fuser::Errno;

use crate::memory::{self, BUFFER_BYTES, IO_BYTES_MAX};
use crate::wire::{self, Header};

/// The length of a header.
const HEAD_BYTES: usize = 288;
/// The offset of the fixed part in a header.
const FIXED_AT: usize = 128;
/// The offset of the number by which the reply is committed.
const COMMIT_ID_AT: usize = 264;
/// The offset of the length of the data.
const LEN_AT: usize = 272;
/// The distance between two headers.
const HEAD_STRIDE: u64 = 512;

/// The memory of the entries, for a thread that writes a reply.
#[derive(Clone, Debug)]
pub(crate) struct EntryMemory {
    region: Arc<Region>,
    /// The offset at which the buffers begin, after all headers.
    buffers_at: u64,
}

/// The entries of some queues.
pub(crate) struct Entries {
    memory: EntryMemory,
    queues: Box<[u16]>,
    depth: usize,
    /// The addresses of headers and buffers, for commands. The kernel reads them during
    /// registration.
    parts: Box<[[libc::iovec; 2]]>,
}

// SAFETY: the vectors point into the region, which may be sent, and only the kernel dereferences
// them.
unsafe impl Send for Entries {}

/// A request in an entry.
pub(crate) struct Arrived {
    pub(crate) header: Header,
    pub(crate) fixed: [u8; HEAD_BYTES - FIXED_AT - 32],
    /// The number by which its reply is committed.
    pub(crate) commit_id: u64,
    /// The length of the data in the buffer.
    pub(crate) data_len: u64,
}

impl EntryMemory {
    fn head_of(entry: u16) -> u64 {
        u64::from(entry) * HEAD_STRIDE
    }

    /// The offset of the entry's buffer in the region.
    #[inline]
    pub(crate) fn buffer_of(&self, entry: u16) -> u64 {
        self.buffers_at + u64::from(entry) * BUFFER_BYTES
    }

    /// The region.
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The request in an entry; `None` if it is invalid.
    #[inline]
    pub(crate) fn arrived(&self, entry: u16) -> Option<Arrived> {
        let mut head = [0; HEAD_BYTES];
        self.region.read(EntryMemory::head_of(entry), &mut head);
        let (mut commit_id, mut len) = ([0; 8], [0; 4]);
        commit_id.copy_from_slice(&head[COMMIT_ID_AT..COMMIT_ID_AT + 8]);
        len.copy_from_slice(&head[LEN_AT..LEN_AT + 4]);
        let mut fixed = [0; HEAD_BYTES - FIXED_AT - 32];
        fixed.copy_from_slice(&head[FIXED_AT..HEAD_BYTES - 32]);
        Some(Arrived {
            header: Header::parse(&head)?,
            fixed,
            commit_id: u64::from_ne_bytes(commit_id),
            data_len: u64::from(u32::from_ne_bytes(len)).min(IO_BYTES_MAX),
        })
    }

    /// The data in the entry's buffer.
    ///
    /// # Safety
    /// The entry does not belong to the kernel now, and no bio is in flight on its buffer.
    pub(crate) unsafe fn data(&self, entry: u16, len: u64) -> &[u8] {
        // SAFETY: by this function's contract.
        unsafe { memory::bytes(&self.region, self.buffer_of(entry), len) }
    }

    /// Writes the header of a reply whose data are already at the start of the entry's buffer.
    #[inline]
    pub(crate) fn put_header(&self, entry: u16, unique: u64, error: i32, len: u64) {
        let at = EntryMemory::head_of(entry);
        self.region.write(at, &wire::out_header(unique, error, len as usize));
        self.region.write(at + LEN_AT as u64, &(len as u32).to_ne_bytes());
    }

    /// Writes a reply into the entry.
    #[inline]
    pub(crate) fn put(&self, entry: u16, unique: u64, answer: Result<&[u8], Errno>) {
        match answer {
            Ok(data) => {
                self.region.write(self.buffer_of(entry), data);
                self.put_header(entry, unique, 0, data.len() as u64);
            }
            Err(errno) => self.put_header(entry, unique, errno.code(), 0),
        }
    }
}

impl Entries {
    /// `depth` entries for each of the queues.
    pub(crate) fn new(queues: &[u16], depth: usize) -> io::Result<Entries> {
        let count = queues.len() * depth;
        let buffers_at = (count as u64 * HEAD_STRIDE).next_multiple_of(4096);
        let region = blockyard_os::map_region((buffers_at + count as u64 * BUFFER_BYTES) as usize)?;
        let memory = EntryMemory { region, buffers_at };
        let part = |at: u64, len: u64| {
            let base = memory.region.range(at, len).expect("it was made for all entries");
            libc::iovec { iov_base: base.as_ptr().cast(), iov_len: len as usize }
        };
        let parts = (0..count as u16).map(|entry| {
            let head = part(EntryMemory::head_of(entry), HEAD_BYTES as u64);
            [head, part(memory.buffer_of(entry), IO_BYTES_MAX)]
        });
        let parts = parts.collect();
        Ok(Entries { parts, memory, queues: queues.into(), depth })
    }

    pub(crate) fn count(&self) -> usize {
        self.parts.len()
    }

    /// The queue of an entry.
    #[inline]
    pub(crate) fn queue_of(&self, entry: u16) -> u16 {
        self.queues[usize::from(entry) / self.depth]
    }

    /// The vectors with the addresses of an entry's parts.
    pub(crate) fn parts_of(&self, entry: u16) -> *const libc::iovec {
        self.parts[usize::from(entry)].as_ptr()
    }

    pub(crate) fn memory(&self) -> EntryMemory {
        self.memory.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_do_not_overlap() {
        let entries = Entries::new(&[0, 2], 3).unwrap();
        let memory = entries.memory();
        assert_eq!(entries.count(), 6);
        let queues: Vec<_> = (0..6).map(|entry| entries.queue_of(entry)).collect();
        assert_eq!(queues, [0, 0, 0, 2, 2, 2]);
        for entry in 0..6 {
            memory.put(entry, u64::from(entry) + 100, Ok(&[entry as u8; 4096]));
        }
        for entry in 0..6 {
            let mut data = [0; 4096];
            memory.region.read(memory.buffer_of(entry), &mut data);
            assert_eq!(data, [entry as u8; 4096]);
            let arrived = memory.arrived(entry).unwrap();
            // The reply's header has its number at the offset of the request's.
            assert_eq!(arrived.header.unique, u64::from(entry) + 100);
            assert_eq!(arrived.data_len, 4096);
        }
        memory.put(3, 1, Err(Errno::EIO));
        assert_eq!(memory.arrived(3).unwrap().data_len, 0);
    }
}

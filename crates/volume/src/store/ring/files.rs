//! The files that a ring knows by number, so that it does not look them up for each operation.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::IoUring;
use io_uring::types::Fixed;

use crate::store::RealFile;

/// The files, of which the ring knows so many at a time.
pub(crate) struct Files {
    slots: Box<[Option<Arc<RealFile>>]>,
    /// The one to be given away next.
    next: usize,
}

impl Files {
    /// None, with room for so many.
    pub(crate) fn new(ring: &IoUring, count: u32) -> io::Result<Files> {
        ring.submitter().register_files_sparse(count)?;
        Ok(Files { slots: (0..count).map(|_| None).collect(), next: 0 })
    }

    /// The number of a file, which the ring knows from now on.
    pub(crate) fn number(&mut self, ring: &IoUring, file: &Arc<RealFile>) -> io::Result<Fixed> {
        let is_it = |slot: &Option<Arc<RealFile>>| {
            slot.as_ref().is_some_and(|known| Arc::ptr_eq(known, file))
        };
        if let Some(at) = self.slots.iter().position(is_it) {
            return Ok(Fixed(at as u32));
        }
        let at = self.next;
        self.next = (at + 1) % self.slots.len();
        // What was submitted keeps the file that it was submitted with; the rest is submitted now.
        ring.submitter().submit()?;
        ring.submitter().register_files_update(at as u32, &[file.as_raw_fd()])?;
        self.slots[at] = Some(Arc::clone(file));
        Ok(Fixed(at as u32))
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.slots.iter().flatten().count();
        f.debug_struct("Files").field("known", &known).finish_non_exhaustive()
    }
}

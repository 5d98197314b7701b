//! The registered files of a ring, which the kernel need not resolve for each operation.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::IoUring;
use io_uring::types::Fixed;

use crate::PoolFile;
use crate::descriptors::Use;
use crate::file::Source;
use crate::lock::Lock;

/// The registered files, of which there is a fixed number at a time.
///
/// The kernel keeps a registered file open, and it needs no descriptor of this process.
pub(crate) struct Files {
    slots: Box<[Option<Source>]>,
    /// The slot to be replaced next.
    next: usize,
    /// For each slot, the unregistered file that was last asked for and would use this slot.
    asked: Box<[Option<Source>]>,
    /// Locks that are registered while the ring has operations, in the slots after the others.
    locks: Vec<Arc<Lock>>,
}

impl Files {
    /// Registers no file yet, with `count` slots. If the ring writes, it holds the locks of the
    /// pool's directory or disk while any write is in flight, even if the process dies. The kernel
    /// closes a ring, and its registered files, only when its last operation has ended.
    pub(crate) fn new(ring: &IoUring, count: u32, locks: Vec<Arc<Lock>>) -> io::Result<Files> {
        ring.submitter().register_files_sparse(count + locks.len() as u32)?;
        let descriptors: Vec<RawFd> = locks.iter().map(|lock| lock.as_raw_fd()).collect();
        if !descriptors.is_empty() {
            ring.submitter().register_files_update(count, &descriptors)?;
        }
        let (slots, asked) =
            ((0..count).map(|_| None).collect(), (0..count).map(|_| None).collect());
        Ok(Files { slots, next: 0, asked, locks })
    }

    /// Called before the ring is closed. `is_idle` says whether it surely has no operation in
    /// flight.
    pub(crate) fn leave(&mut self, ring: &IoUring, is_idle: bool) {
        let locks = std::mem::take(&mut self.locks);
        if is_idle {
            // The kernel closes a ring up to 50 ms later. Until then its files would keep their
            // file system busy for umount, and hold the locks against another opening. If this call
            // is refused, unlocking frees the locks anyway.
            _ = ring.submitter().unregister_files();
        } else {
            // Writes may be in flight, so this process must never release the locks.
            std::mem::forget(locks);
        }
    }

    /// The slot of a file, if it is registered. A file is registered when it is asked for the
    /// second time, without a request for another file of that slot in between. Registering costs
    /// more than one lookup.
    pub(crate) fn known(
        &mut self,
        ring: &IoUring,
        file: &Arc<PoolFile>,
    ) -> io::Result<Option<Fixed>> {
        let source = file.source();
        let is_it = |slot: &Option<Source>| slot.as_ref().is_some_and(|known| known.is(source));
        let at = source.number() % self.slots.len();
        if is_it(&self.slots[at]) {
            return Ok(Some(Fixed(at as u32)));
        }
        if !is_it(&self.asked[at]) {
            self.asked[at] = Some(source.clone());
            return Ok(None);
        }
        self.put(ring, at, file)?;
        Ok(Some(Fixed(at as u32)))
    }

    /// The slot of a file, which is registered if necessary.
    pub(crate) fn number(&mut self, ring: &IoUring, file: &Arc<PoolFile>) -> io::Result<Fixed> {
        let is_it =
            |slot: &Option<Source>| slot.as_ref().is_some_and(|known| known.is(file.source()));
        if let Some(at) = self.slots.iter().position(is_it) {
            return Ok(Fixed(at as u32));
        }
        let at = self.next;
        self.next = (at + 1) % self.slots.len();
        self.put(ring, at, file)?;
        Ok(Fixed(at as u32))
    }

    /// Registers a file in a slot.
    fn put(&mut self, ring: &IoUring, at: usize, file: &Arc<PoolFile>) -> io::Result<()> {
        let open = file.source().get(Use::Read)?;
        // Submitted operations keep their file, so submit the pending ones before the slot changes.
        ring.submitter().submit()?;
        ring.submitter().register_files_update(at as u32, &[open.as_raw_fd()])?;
        self.slots[at] = Some(file.source().clone());
        Ok(())
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.slots.iter().flatten().count();
        f.debug_struct("Files").field("known", &known).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use crate::buffer::Memory;
    use crate::ring::reads::RingReads;
    use crate::{EventFd, PoolStore, Reads, SegmentFiles, StoreFile};
    use blockyard_testing::capability::Capability;

    use super::*;

    /// With more files than slots, each read still gets the data of its own file.
    #[test]
    fn any_number_of_files_is_read() {
        if let Err(error) = crate::ring::probe() {
            return Capability::Uring.is_missing(error);
        }
        let path = std::env::temp_dir().join(format!("blockyard-files-{}", std::process::id()));
        let directory = PoolStore::take(&path).unwrap();
        let memory = Memory::new(1 << 20);
        let make = |number: u8| {
            let file = directory.create(&number.to_string(), 4096).unwrap();
            let mut bytes = memory.take_beyond(4096);
            bytes.fill(number);
            file.write_at(0, &[&bytes]).unwrap();
            Arc::new(file)
        };
        let files: Vec<_> = (0..150).map(make).collect();
        let mut random = fastrand::Rng::with_seed(3);
        let mut reads = RingReads::new(&EventFd::new().unwrap()).unwrap();
        for _ in 0..100 {
            let some: Vec<usize> = (0..8).map(|_| random.usize(..files.len())).collect();
            for number in some.iter().chain(&some) {
                reads.begin(*number as u32, &files[*number], 0, memory.take_beyond(4096));
            }
            reads.submit();
            for _ in 0..2 * some.len() {
                let got = loop {
                    match reads.take() {
                        Some(got) => break got,
                        None => reads.sleep(std::time::Duration::from_secs(1)),
                    }
                };
                let bytes = got.buffer.filter(|_| got.result.is_ok()).unwrap();
                assert!(bytes.iter().all(|byte| *byte == got.token as u8), "{}", got.token);
            }
        }
        drop(reads);
        std::fs::remove_dir_all(&path).unwrap();
    }
}

//! `/dev/ublkcN`: descriptors in mapped memory of the kernel, data by reads and writes.
#![allow(unsafe_code)] // Maps memory of the kernel, and lets it write to memory of requests.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;

use blockyard_core::Region;

use crate::abi::{DESCRIPTOR_BYTES, Descriptor, MAPPED_DEPTH, char_path, data_offset};

/// The length of a page of the kernel, in bytes: on arm64, for example, 4, 16 or 64 KiB.
fn page_bytes() -> io::Result<usize> {
    // SAFETY: the call accesses no memory of this process.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}

/// The length of the descriptors of a queue in the mapped memory, and their offset, in bytes. The
/// driver gives each queue whole pages for as many descriptors as a queue can have, and refuses a
/// mapping of another length than the pages of those that the queue has.
fn place_of_descriptors(queue: u16, depth: u16, page_bytes: usize) -> (usize, i64) {
    let pages = |depth: usize| (depth * DESCRIPTOR_BYTES).next_multiple_of(page_bytes);
    let queue_bytes = pages(MAPPED_DEPTH as usize);
    (pages(depth.into()), (usize::from(queue) * queue_bytes) as i64) // At most 4,096 queues.
}

/// An open `/dev/ublkcN`. The kernel lets one process at a time open it.
#[derive(Debug)]
pub(crate) struct CharDevice {
    file: File,
}

impl CharDevice {
    /// Opens the character device.
    ///
    /// # Errors
    /// `ResourceBusy` if another process has it open; any error of the system.
    pub(crate) fn open(id: u32) -> io::Result<CharDevice> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).custom_flags(libc::O_CLOEXEC).open(char_path(id));
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot open {}: {error}", char_path(id)))
        };
        Ok(CharDevice { file: file.map_err(named)? })
    }

    /// A file in the place of the kernel's device.
    #[cfg(test)]
    pub(crate) fn of_file(file: File) -> CharDevice {
        CharDevice { file }
    }

    /// The descriptor for commands.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Maps the descriptors of a queue.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn map(&self, queue: u16, depth: u16) -> io::Result<DescriptorMap> {
        let (len, offset) = place_of_descriptors(queue, depth, page_bytes()?);
        // SAFETY: a new read-only mapping at an address of the system's choice affects no other
        // memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                self.file.as_raw_fd(),
                offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("the system mapped memory at address 0"))?;
        Ok(DescriptorMap { base, len, depth })
    }

    /// Copies the data of a write from the kernel into a region.
    ///
    /// # Errors
    /// If the kernel refuses, or has fewer bytes.
    pub(crate) fn read_data(
        &self,
        (queue, tag): (u16, u16),
        region: &Region,
        offset: u64,
        len: usize,
    ) -> io::Result<()> {
        self.copy((queue, tag), region, offset, len, |file, memory, len, at| {
            // SAFETY: `copy` checked that the memory has `len` bytes; no reference to it exists, as
            // regions demand.
            unsafe { libc::pread(file, memory.cast(), len, at) }
        })
    }

    /// Copies the data of a read from a region to the kernel.
    ///
    /// # Errors
    /// If the kernel refuses, or takes fewer bytes.
    pub(crate) fn write_data(
        &self,
        (queue, tag): (u16, u16),
        region: &Region,
        offset: u64,
        len: usize,
    ) -> io::Result<()> {
        self.copy((queue, tag), region, offset, len, |file, memory, len, at| {
            // SAFETY: `copy` checked that the memory has `len` bytes, which the kernel reads only.
            unsafe { libc::pwrite(file, memory.cast_const().cast(), len, at) }
        })
    }

    fn copy(
        &self,
        (queue, tag): (u16, u16),
        region: &Region,
        offset: u64,
        len: usize,
        call: impl Fn(RawFd, *mut u8, usize, i64) -> isize,
    ) -> io::Result<()> {
        let memory = region.range(offset, len as u64).ok_or(io::ErrorKind::InvalidInput)?;
        let mut done = 0;
        while done < len {
            let at = (data_offset(queue, tag) + done as u64) as i64; // Below 2^53.
            // SAFETY: `done` is below `len`, so the address stays inside the range.
            let memory = unsafe { memory.add(done) };
            match call(self.file.as_raw_fd(), memory.as_ptr(), len - done, at) {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                copied if copied > 0 => done += copied.unsigned_abs(),
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies bytes to the data of a request of the kernel's own, as a zone report.
    ///
    /// # Errors
    /// If the kernel refuses, or takes fewer bytes.
    pub(crate) fn write_bytes(
        &self,
        (queue, tag): (u16, u16),
        offset: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        self.file.write_all_at(bytes, data_offset(queue, tag) + offset)
    }
}

/// The descriptors of a queue, which the kernel writes.
pub(crate) struct DescriptorMap {
    base: NonNull<u8>,
    len: usize,
    depth: u16,
}

// SAFETY: the mapping belongs to the process; only its owner unmaps it.
unsafe impl Send for DescriptorMap {}

impl DescriptorMap {
    /// Copies the descriptor of a tag once. The kernel has written it before the completion of the
    /// fetch, and does not write it again before the next fetch.
    ///
    /// # Panics
    /// If the queue has no such tag.
    pub(crate) fn read(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "the caller checks the tags of completions");
        let mut bytes = [0; DESCRIPTOR_BYTES];
        for (at, byte) in bytes.iter_mut().enumerate() {
            // SAFETY: the tag is below the depth, so the byte lies in the mapping.
            *byte = unsafe {
                self.base.add(usize::from(tag) * DESCRIPTOR_BYTES + at).as_ptr().read_volatile()
            };
        }
        Descriptor::parse(&bytes)
    }
}

impl Drop for DescriptorMap {
    fn drop(&mut self) {
        // SAFETY: the range is the one that was mapped, and nothing else refers to it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bug: pages had 4 KiB, so a kernel with longer ones refused the mapping.
    #[test]
    fn descriptors_of_a_queue_are_mapped_in_whole_pages_of_any_length() {
        for (page_bytes, len, queue_bytes) in [
            (4 << 10, 4 << 10, 96 << 10),
            (16 << 10, 16 << 10, 96 << 10),
            (64 << 10, 64 << 10, 128 << 10),
        ] {
            assert_eq!(place_of_descriptors(0, 128, page_bytes), (len, 0));
            assert_eq!(place_of_descriptors(3, 128, page_bytes), (len, 3 * queue_bytes));
        }
        assert_eq!(place_of_descriptors(1, 200, 4 << 10), (8 << 10, 96 << 10));
        assert!(page_bytes().unwrap().is_power_of_two());
    }
}

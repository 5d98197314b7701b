//! The commands of FUSE over io_uring, as bytes of a submission.
//!
//! Layouts and numbers are those of the public headers `linux/fuse.h` (`fuse_uring_cmd_req`) and
//! `linux/io_uring.h`.
#![allow(unsafe_code)] // The crate has no name for one field of a command.

use io_uring::opcode::UringCmd80;
use io_uring::squeue::Entry128;
use io_uring::types::Fixed;

/// `FUSE_IO_URING_CMD_REGISTER`: registers an entry.
const REGISTER: u32 = 1;
/// `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`: commits a reply and makes its entry free for a request.
const COMMIT_AND_FETCH: u32 = 2;

/// The parts of an entry: its header and its buffer.
pub(super) const PARTS: u32 = 2;

/// The offset of the length in a submission (`io_uring_sqe.len`).
const LEN_AT: usize = 24;

/// Registers an entry of a queue, whose parts are the [`PARTS`] vectors at `parts`.
pub(super) fn register(device: Fixed, queue: u16, parts: *const libc::iovec) -> Entry128 {
    let mut command =
        UringCmd80::new(device, REGISTER).cmd(arguments(0, queue)).addr(Some(parts as u64)).build();
    let len = (&raw mut command).cast::<u8>();
    // SAFETY: the command has the layout of the kernel's `io_uring_sqe`, 128 bytes of plain
    // numbers, of which this is the length.
    unsafe { len.add(LEN_AT).cast::<u32>().write_unaligned(PARTS) };
    command
}

/// Commits the reply to a request and makes its entry free for the next one.
#[inline]
pub(super) fn commit(device: Fixed, queue: u16, commit_id: u64) -> Entry128 {
    UringCmd80::new(device, COMMIT_AND_FETCH).cmd(arguments(commit_id, queue)).build()
}

/// `fuse_uring_cmd_req`: flags, request, queue.
#[inline]
fn arguments(commit_id: u64, queue: u16) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[8..16].copy_from_slice(&commit_id.to_ne_bytes());
    bytes[16..18].copy_from_slice(&queue.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_laid_out_as_the_kernel_reads_it() {
        let parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2];
        let command = register(Fixed(0), 7, parts.as_ptr());
        assert_eq!(size_of::<Entry128>(), 128);
        // SAFETY: the entry is 128 bytes of plain numbers.
        let bytes = unsafe { *(&raw const command).cast::<[u8; 128]>() };
        assert_eq!(bytes[8..12], REGISTER.to_ne_bytes(), "cmd_op");
        assert_eq!(bytes[16..24], (parts.as_ptr() as u64).to_ne_bytes(), "addr");
        assert_eq!(bytes[24..28], PARTS.to_ne_bytes(), "len");
        assert_eq!(bytes[64..66], 7_u16.to_ne_bytes(), "queue");
    }
}

//! Buffers of serving threads and workers: sizes, and slices of a region for a reply.
#![allow(unsafe_code)] // A reply is sent from where the device put the data.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use blockyard_core::Region;

/// The longest read or write that the kernel may send, in bytes.
pub(crate) const IO_BYTES_MAX: u64 = 1 << 20;

/// The largest logical block of a device with a file, in bytes.
pub(crate) const BLOCK_BYTES_MAX: u64 = 64 << 10;

/// The size of a buffer for the blocks around any request.
pub(crate) const BUFFER_BYTES: u64 = IO_BYTES_MAX + 2 * BLOCK_BYTES_MAX;

/// Bytes of a region, to be sent.
///
/// # Safety
/// While the slice lives no bio on these bytes may be in flight and no thread may write to them.
///
/// # Panics
/// If the range does not lie inside the region.
pub(crate) unsafe fn bytes(region: &Region, offset: u64, len: u64) -> &[u8] {
    let start = region.range(offset, len).expect("buffers are cut by our own rules");
    // SAFETY: `range` checked that the bytes lie in the region's memory, which lives as long as the
    // region and has been written or zeroed; by the contract no thread changes it meanwhile.
    unsafe { std::slice::from_raw_parts(start.as_ptr(), len as usize) }
}

/// Moves bytes inside a region; the ranges may overlap.
///
/// # Safety
/// No bio on these bytes may be in flight, and no other thread may read or write them meanwhile.
///
/// # Panics
/// If a range does not lie inside the region.
pub(crate) unsafe fn shift(region: &Region, from: u64, to: u64, len: u64) {
    let cut = |at| region.range(at, len).expect("buffers are cut by our own rules");
    // SAFETY: `range` checked both ranges, and by the contract no other thread accesses them.
    unsafe { std::ptr::copy(cut(from).as_ptr(), cut(to).as_ptr(), len as usize) };
}

/// Reads a message: its first bytes into `head`, the rest into the region. Returns its length.
///
/// # Safety
/// No bio or reference may use the range of the region meanwhile.
///
/// # Errors
/// Those of the system.
///
/// # Panics
/// If the range does not lie inside the region.
pub(crate) unsafe fn receive(
    fd: BorrowedFd<'_>,
    head: &mut [u8],
    region: &Region,
    offset: u64,
    len: u64,
) -> io::Result<usize> {
    let rest = region.range(offset, len).expect("buffers are cut by our own rules");
    let parts = [
        libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: head.len() },
        libc::iovec { iov_base: rest.as_ptr().cast(), iov_len: len as usize },
    ];
    // SAFETY: both parts are writable for their lengths: one is borrowed, the other lies in the
    // region, which by the contract no bio and no reference uses meanwhile.
    let got = unsafe { libc::readv(fd.as_raw_fd(), parts.as_ptr(), parts.len() as i32) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

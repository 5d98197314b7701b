//! Tells a block device that nobody needs what a part of it has.
#![allow(unsafe_code)] // There is a system call for it, and no safe wrapper.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `BLKDISCARD` of linux/fs.h: `_IO(0x12, 119)`.
const BLKDISCARD: libc::Ioctl = 0x1277;

/// Discards a part of a device. What is read there afterwards may be anything.
///
/// # Errors
/// If the device does not, or the part is not one of whole sectors.
pub(super) fn discard(device: &File, at: u64, len: u64) -> io::Result<()> {
    let range = [at, len];
    // SAFETY: the call reads two numbers of 64 bits, which are there until it returns, and the
    // descriptor is open as long as the file is borrowed.
    match unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD, range.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

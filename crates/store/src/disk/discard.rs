//! Discards a part of a block device.
#![allow(unsafe_code)] // There is a system call for it, and no safe wrapper.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `BLKDISCARD` of linux/fs.h: `_IO(0x12, 119)`.
const BLKDISCARD: libc::Ioctl = 0x1277;

/// Discards a part of a device. Reads return arbitrary data afterwards.
///
/// # Errors
/// If the device refuses, or the part does not consist of whole sectors.
pub(super) fn discard(device: &File, at: u64, len: u64) -> io::Result<()> {
    let range = [at, len];
    // SAFETY: the call reads two 64-bit numbers, which live until it returns. The descriptor stays
    // open because the file is borrowed.
    match unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD, range.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

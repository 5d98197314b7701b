//! Reads and writes of a file or a block device past the page cache, from and to registered memory.
#![allow(unsafe_code)] // The system's calls take addresses, because regions give no references.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use blockyard_core::Region;

/// Writes a range of a region, from `offset` on, to the file at offset `at`.
///
/// # Errors
/// Those of the system, and a short write.
///
/// # Panics
/// If the range does not lie inside the region.
#[inline]
pub fn write(file: &File, from: &Region, offset: u64, len: usize, at: u64) -> io::Result<()> {
    let bytes = from.range(offset, len as u64).expect("a range inside the region");
    // SAFETY: the range lies in the region, which outlives the call; the system only reads it.
    let done = unsafe {
        libc::pwrite64(file.as_raw_fd(), bytes.as_ptr().cast_const().cast(), len, at as i64)
    };
    whole(done, len)
}

/// Reads into a range of a region, from `offset` on.
///
/// # Errors
/// As [`write`].
///
/// # Panics
/// As [`write`].
#[inline]
pub fn read(file: &File, into: &Region, offset: u64, len: usize, at: u64) -> io::Result<()> {
    let bytes = into.range(offset, len as u64).expect("a range inside the region");
    // SAFETY: the range lies in the region, which outlives the call; any thread may change the
    // bytes of a region at any time.
    let done = unsafe { libc::pread64(file.as_raw_fd(), bytes.as_ptr().cast(), len, at as i64) };
    whole(done, len)
}

fn whole(done: isize, len: usize) -> io::Result<()> {
    match usize::try_from(done) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(done) if done == len => Ok(()),
        Ok(done) => Err(io::Error::other(format!("{done} of {len} bytes"))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn written_data_are_read_and_a_short_read_is_an_error() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().join("file");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        let region = Region::alloc(8192);
        region.write(4096, &[5; 4096]);
        write(&file, &region, 4096, 4096, 512).unwrap();
        let mut found = [0; 4096];
        file.read_exact_at(&mut found, 512).unwrap();
        assert_eq!(found, [5; 4096]);
        read(&file, &region, 0, 4096, 512).unwrap();
        region.read(0, &mut found);
        assert_eq!(found, [5; 4096]);
        let error = read(&file, &region, 0, 4096, 1024).unwrap_err().to_string();
        assert_eq!(error, "3584 of 4096 bytes");
    }
}

//! What exporters ask of the system for their data path: memory that costs nothing until it is
//! touched, and timers that go off when they should.
#![allow(unsafe_code)] // The standard library offers neither.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use blockyard_core::Region;

/// Mapped memory, unmapped when its region goes.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process; only its owner unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: it gives no access to the memory.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the one that was mapped, and its region, which is going, was the
        // only way to it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A region of fresh memory that costs nothing until it is touched.
pub(crate) fn map_region(len: usize) -> io::Result<Arc<Region>> {
    // SAFETY: a new private mapping at an address of the system's choice disturbs nobody.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let base = NonNull::new(base.cast::<u8>())
        .ok_or_else(|| io::Error::other("the system mapped memory at address 0"))?;
    let owner = Box::new(Mapping { base, len });
    // SAFETY: the mapping is readable and writable until `owner` is dropped, and nobody makes
    // references to what a bio is in flight on.
    Ok(unsafe { Region::foreign(base, len, owner) })
}

/// Gives the memory of a page-aligned range back to the system; it reads as zeros afterwards. No
/// I/O may be in flight on it.
pub(crate) fn forget(region: &Region, offset: u64, len: usize) {
    let Some(base) = region.range(offset, len as u64) else { return };
    // SAFETY: the range lies in a private anonymous mapping, so dropping its pages only zeroes
    // it; the caller has no I/O on it. Failure leaves the memory as it was.
    let _ = unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTNEED) };
}

/// Lets this thread's timers go off within a microsecond of their time; the system's own slack is
/// longer than what is waited for here.
pub(crate) fn sharpen_timers() {
    let slack_ns: libc::c_ulong = 1000;
    // SAFETY: no memory is involved. Failure leaves naps longer than meant.
    let _ = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, slack_ns, 0, 0, 0) };
}

/// A bell: what is written to it wakes who polls it. Neither side waits.
pub(crate) fn bell() -> io::Result<OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

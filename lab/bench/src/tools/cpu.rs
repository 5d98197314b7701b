//! The CPU time of another process, to the nanosecond, and of this thread.
//!
//! /proc/PID/stat counts ticks of 10 ms, too coarse for measurements of a fraction of a second.
#![allow(unsafe_code)] // The clock of another process has no safe door.

use std::io;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The greatest process id of Linux (PID_MAX_LIMIT).
const PID_MAX: u32 = 1 << 22;

/// The CPU time of all threads of a process until now, in user space and in the kernel. It is
/// available until the process has been waited for, even if it has ended.
pub(crate) fn of_process(pid: u32) -> io::Result<Duration> {
    if pid == 0 || pid > PID_MAX {
        // A clock id cannot hold this number: the clock would be that of another process.
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    let mut clock: libc::clockid_t = 0;
    // SAFETY: the call writes one clock id to a valid pointer.
    let error = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec to a valid pointer.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = u64::try_from(time.tv_sec).map_err(io::Error::other)?;
    let ns = u32::try_from(time.tv_nsec).map_err(io::Error::other)?;
    Ok(Duration::new(seconds, ns))
}

/// CPU time of the calling thread.
pub(crate) fn of_thread() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_this_process_goes_on() {
        let before = of_process(std::process::id()).unwrap();
        let mut sum = 0_u64;
        (0..1_000_000).for_each(|n| sum = std::hint::black_box(sum.wrapping_add(n)));
        assert!(of_process(std::process::id()).unwrap() > before);
    }

    #[test]
    fn a_process_that_is_none_is_refused() {
        assert!(of_process(0).is_err());
        assert!(of_process(1 << 30).is_err());
        assert!(of_process(u32::MAX).is_err());
    }
}

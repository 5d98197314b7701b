//! The CPU time of another process, to the nanosecond, and of this thread.
//!
//! /proc/PID/stat counts ticks of 10 ms, too coarse for measurements of a fraction of a second.
#![allow(unsafe_code)] // The clock of another process has no safe door.

use std::fs;
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

/// The CPU time until now of those threads of a process whose name `selects`, by
/// `/proc/PID/task/TID/schedstat`, whose first field is in ns (the kernel's
/// Documentation/scheduler/sched-stats.rst). Threads that have ended are not in it.
pub(crate) fn of_threads(pid: u32, selects: impl Fn(&str) -> bool) -> io::Result<Duration> {
    let mut sum = Duration::ZERO;
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = entry?.path();
        let texts =
            [fs::read_to_string(thread.join("comm")), fs::read_to_string(thread.join("schedstat"))];
        let [Ok(name), Ok(times)] = texts else {
            // The thread has ended since it was listed.
            continue;
        };
        if selects(name.trim_end()) {
            let ns = times.split(' ').next().and_then(|ns| ns.parse().ok());
            let ns = ns.ok_or_else(|| io::Error::other(format!("invalid schedstat {times:?}")))?;
            sum += Duration::from_nanos(ns);
        }
    }
    Ok(sum)
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
    fn the_time_of_threads_is_that_of_the_named_ones() {
        let (tell, told) = std::sync::mpsc::channel();
        let burn = move || {
            let mut sum = 0_u64;
            (0..1_000_000).for_each(|n| sum = std::hint::black_box(sum.wrapping_add(n)));
            told.recv().unwrap();
        };
        let thread = std::thread::Builder::new().name("burns-cpu".to_owned()).spawn(burn).unwrap();
        let pid = std::process::id();
        let named = || of_threads(pid, |name| name == "burns-cpu").unwrap();
        while named() == Duration::ZERO {
            std::thread::yield_now();
        }
        assert_eq!(of_threads(pid, |name| name == "no-such-name").unwrap(), Duration::ZERO);
        tell.send(()).unwrap();
        thread.join().unwrap();
        assert!(of_threads(0, |_| true).is_err());
    }

    #[test]
    fn a_process_that_is_none_is_refused() {
        assert!(of_process(0).is_err());
        assert!(of_process(1 << 30).is_err());
        assert!(of_process(u32::MAX).is_err());
    }
}

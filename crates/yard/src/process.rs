//! What the daemon itself uses: `GET /v1/process`.

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// The daemon's process.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct ProcessView {
    /// The id of the process.
    pub pid: u32,
    /// Nanoseconds since the system started, of this sample: two samples give an interval.
    pub sampled_ns: u64,
    /// CPU time of all threads since the process began, user and system together, in nanoseconds.
    pub cpu_ns: u64,
    /// Resident memory in bytes; 0 where the system does not tell.
    pub resident_bytes: u64,
}

impl ProcessView {
    /// The present use of this process.
    pub fn new() -> ProcessView {
        ProcessView {
            pid: std::process::id(),
            sampled_ns: clock_ns(ClockId::Monotonic),
            cpu_ns: clock_ns(ClockId::ProcessCPUTime),
            resident_bytes: resident_bytes(),
        }
    }
}

fn clock_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// `VmRSS` in `/proc/self/status`, which is in units of 1024 bytes: proc_pid_status(5).
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_cpu_time_and_memory_is_resident() {
        let before = ProcessView::new();
        let mut sum = 0_u64;
        while clock_ns(ClockId::ProcessCPUTime) < before.cpu_ns + 1_000_000 {
            sum = std::hint::black_box(sum + 1);
        }
        let after = ProcessView::new();
        assert!(after.cpu_ns - before.cpu_ns >= 1_000_000);
        assert!(after.sampled_ns > before.sampled_ns);
        assert!(after.resident_bytes > 100_000, "{after:?}");
        assert_eq!(after.pid, std::process::id());
    }
}

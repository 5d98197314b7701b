//! Compares the address space that an open pool needs with the process's limit (`RLIMIT_AS`,
//! `ulimit -v`). Without this check an allocation could fail later, which aborts the process.

use std::io;

use rustix::process::{Resource, getrlimit};

use crate::error::VolumeError;
use crate::options::Options;

/// Address space that threads reserve in addition to the memory that the options bound, in bytes.
/// An opening starts up to 34 threads, each with a stack of 2 MiB. On two processors the C
/// library's allocator reserves an arena of 64 MiB for each of the first 16.
const THREADS_BYTES: u64 = 2 << 30;

/// Refuses to open a pool if the process's limit leaves too little address space.
///
/// # Errors
/// If the limit leaves too little.
pub fn check(options: &Options) -> Result<(), VolumeError> {
    match getrlimit(Resource::As).current {
        Some(limit) => enough(limit, used_bytes().unwrap_or(0), options),
        None => Ok(()),
    }
}

/// The address space that the process has mapped, in bytes, if the system reports it.
fn used_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("VmSize:")?.strip_suffix("kB"))?;
    Some(kib.trim().parse::<u64>().ok()?.saturating_mul(1024))
}

fn enough(limit: u64, used: u64, options: &Options) -> Result<(), VolumeError> {
    let needed = THREADS_BYTES + options.memory_bytes + options.map_cache_bytes;
    let left = limit.saturating_sub(used);
    if left >= needed {
        return Ok(());
    }
    let (left, needed) = (left >> 20, needed.div_ceil(1 << 20));
    let error = io::Error::other(format!(
        "the limit of address space (RLIMIT_AS, `ulimit -v`) leaves {left} MiB, and a pool takes \
         up to {needed} MiB; raise the limit, or bound the memory by a cgroup instead"
    ));
    Err(VolumeError::io("cannot open the pool")(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a start under `ulimit -v 300000` panicked because a thread could not be created.
    /// Under `ulimit -v 600000` an allocation of 8 MiB failed and the process aborted.
    #[test]
    fn a_limit_below_what_a_pool_takes_is_an_error_that_names_it() {
        let options = Options::default();
        for limit in [0, 100 << 20, 600 << 20, 2 << 30] {
            let error = enough(limit, 64 << 20, &options).unwrap_err().to_string();
            assert!(error.contains("RLIMIT_AS") && error.contains("2240 MiB"), "{error}");
        }
        assert!(enough(4 << 30, 64 << 20, &options).is_ok());
        assert!(used_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}

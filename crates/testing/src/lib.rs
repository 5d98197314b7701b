//! Models and fixtures for the tests of every device: a reference model, seeded workloads, a manual
//! clock, and the contract that all devices must pass.
//!
//! Nothing here is in the product. The model is written from the standards and from null_blk's
//! documented behaviour, not from the product's state machine, so that the two can disagree.

pub mod allocations;
pub mod capability;
pub mod channel;
pub mod clock;
pub mod contract;
pub mod deadline;
pub mod directory;
pub mod fuse_parameter;
pub mod http_proxy;
pub mod log_lines;
pub mod model;
pub mod reference;
pub mod refusing;
pub mod s3_server;
pub mod s3_witness;
pub mod seed;
pub mod simulated_store;
pub mod temp_dir;
pub mod terminal_picture;
pub mod watched_disk;
pub mod workload;
pub mod zone_store;

/// Where the first range of bytes equal to `part`, which is not empty, begins. It is here because
/// test builds optimise this crate: elsewhere a search of the files of a pool takes seconds.
pub fn position(bytes: &[u8], part: &[u8]) -> Option<usize> {
    let first = part.first()?;
    bytes.windows(part.len()).position(|window| window[0] == *first && window == part)
}

#[cfg(test)]
mod tests {
    use super::position;

    #[test]
    fn position_finds_the_first_of_equal_ranges() {
        assert_eq!(position(b"abcabcab", b"bca"), Some(1));
        assert_eq!(position(b"abcabcab", b"cab"), Some(2));
        assert_eq!(position(b"abcabcab", b"abd"), None);
        assert_eq!(position(b"ab", b"abc"), None);
    }
}

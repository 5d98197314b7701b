//! READ CAPACITY: SBC-4 5.20 and 5.21.

use crate::config::DiskConfig;
use crate::opcodes;

/// The reported capacity is that of the whole disk, not of its conventional zones: ZBC-2 5.6,
/// RC_BASIS.
const WHOLE_DISK: u8 = 0x10;
/// Blocks can be unmapped and then read as zeros.
const UNMAPS: u8 = 0xc0;

fn last_block(config: &DiskConfig) -> u64 {
    config.size / u64::from(config.logical_block) - 1
}

/// READ CAPACITY(10): all ones mean that the host must use READ CAPACITY(16).
pub(crate) fn ten(config: &DiskConfig) -> Vec<u8> {
    let last = u32::try_from(last_block(config)).unwrap_or(u32::MAX);
    let mut bytes = last.to_be_bytes().to_vec();
    bytes.extend(config.logical_block.to_be_bytes());
    bytes
}

/// READ CAPACITY(16).
pub(crate) fn sixteen(config: &DiskConfig) -> Vec<u8> {
    let mut bytes = last_block(config).to_be_bytes().to_vec();
    bytes.extend(config.logical_block.to_be_bytes());
    bytes.resize(32, 0);
    bytes[12] = WHOLE_DISK;
    bytes[13] = (config.physical_block / config.logical_block).trailing_zeros() as u8;
    if opcodes::unmaps(config) {
        bytes[14] = UNMAPS;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_disk_asks_for_the_long_form() {
        let config = DiskConfig::default();
        assert_eq!(ten(&config)[..4], [0xff; 4]);
        let bytes = sixteen(&config);
        assert_eq!(bytes[..8], ((14u64 << 40) / 512 - 1).to_be_bytes());
        assert_eq!(bytes[8..16], [0, 0, 2, 0, 0x10, 3, 0xc0, 0]);
        let small = DiskConfig { size: 1 << 40, logical_block: 4096, ..config };
        assert_eq!(ten(&small), [0x0f, 0xff, 0xff, 0xff, 0, 0, 0x10, 0]);
    }
}

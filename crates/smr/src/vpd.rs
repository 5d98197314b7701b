//! Pages of vital product data: identification of the disk (80h, 83h), and its features (B0h to
//! B6h). SPC-5 7.7, SBC-4 6.6, ZBC-2 6.5.

use crate::config::DiskConfig;
use crate::inquiry::{HOST_MANAGED, PRODUCT, VENDOR};
use crate::opcodes;
use crate::sense::Sense;

/// Maximum bytes of a READ or WRITE.
pub const TRANSFER_BYTES_MAX: u64 = 16 << 20;
/// Optimal bytes of a READ or WRITE.
pub const TRANSFER_BYTES_BEST: u64 = 1 << 20;
/// Maximum bytes of a WRITE SAME.
pub const WRITE_SAME_BYTES_MAX: u64 = 256 << 20;
/// Maximum bytes of an UNMAP.
pub const UNMAP_BYTES_MAX: u64 = 1 << 30;
/// Maximum number of ranges of an UNMAP.
pub const UNMAP_RANGES_MAX: u32 = 256;

/// Supported VPD pages.
pub const SUPPORTED: u8 = 0x00;
/// Unit serial number.
pub const SERIAL: u8 = 0x80;
/// Device identification.
pub const IDENTIFICATION: u8 = 0x83;
/// Block limits.
pub const BLOCK_LIMITS: u8 = 0xb0;
/// Block device characteristics.
pub const CHARACTERISTICS: u8 = 0xb1;
/// Logical block provisioning.
pub const PROVISIONING: u8 = 0xb2;
/// Zoned block device characteristics.
pub const ZONED: u8 = 0xb6;

/// All pages.
pub const PAGES: [u8; 7] =
    [SUPPORTED, SERIAL, IDENTIFICATION, BLOCK_LIMITS, CHARACTERISTICS, PROVISIONING, ZONED];

/// No limit, or not reported.
const NONE: u32 = u32::MAX;

/// A page with its header.
pub(crate) fn page(config: &DiskConfig, page: u8) -> Result<Vec<u8>, Sense> {
    let body = match page {
        SUPPORTED => PAGES.to_vec(),
        SERIAL => config.serial.as_bytes().to_vec(),
        IDENTIFICATION => identification(config),
        BLOCK_LIMITS => block_limits(config),
        CHARACTERISTICS => characteristics(),
        PROVISIONING => provisioning(config),
        ZONED => zoned(config),
        _ => return Err(Sense::invalid_field(2, None)),
    };
    let mut bytes = vec![HOST_MANAGED, page];
    bytes.extend((body.len() as u16).to_be_bytes());
    bytes.extend(body);
    Ok(bytes)
}

/// Puts a field at its offset, which the standards count from the start of the header.
fn put(body: &mut [u8], at: usize, field: &[u8]) {
    body[at - 4..at - 4 + field.len()].copy_from_slice(field);
}

/// A number of bytes in logical blocks, saturated to 32 bits.
fn blocks(config: &DiskConfig, bytes: u64) -> u32 {
    u32::try_from(bytes / u64::from(config.logical_block)).unwrap_or(u32::MAX)
}

/// A vendor-specific name of the disk, and a locally assigned identifier.
fn identification(config: &DiskConfig) -> Vec<u8> {
    let mut name = VENDOR.to_vec();
    name.extend(PRODUCT);
    name.extend(config.serial.as_bytes());
    // SPC-5 7.7.6.5: code set ASCII, type T10 vendor ID.
    let mut body = vec![0x02, 0x01, 0, name.len() as u8];
    body.extend(name);
    // SPC-5 7.7.6.6.4: code set binary, type NAA, format 3 in the first four bits.
    body.extend([0x01, 0x03, 0, 8]);
    let number = 0x3 << 60 | fingerprint(config.serial.as_bytes()) >> 4;
    body.extend(number.to_be_bytes());
    body
}

/// The FNV-1a hash, which is the same on every machine.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The page Block Limits, SBC-4 6.6.4.
fn block_limits(config: &DiskConfig) -> Vec<u8> {
    let mut body = vec![0; 60];
    let physical = blocks(config, config.physical_block.into());
    // WSNZ: WRITE SAME of 0 blocks is refused.
    put(&mut body, 4, &[0x01]);
    put(&mut body, 6, &(physical as u16).to_be_bytes());
    put(&mut body, 8, &blocks(config, TRANSFER_BYTES_MAX).to_be_bytes());
    put(&mut body, 12, &blocks(config, TRANSFER_BYTES_BEST).to_be_bytes());
    if opcodes::unmaps(config) {
        put(&mut body, 20, &blocks(config, UNMAP_BYTES_MAX).to_be_bytes());
        put(&mut body, 24, &UNMAP_RANGES_MAX.to_be_bytes());
        put(&mut body, 28, &physical.to_be_bytes());
        // UGAVALID, and an alignment of 0.
        put(&mut body, 32, &[0x80]);
    }
    put(&mut body, 36, &u64::from(blocks(config, WRITE_SAME_BYTES_MAX)).to_be_bytes());
    body
}

/// The page Block Device Characteristics, SBC-4 6.6.2. ZONED is 0: ZBC-2 6.5.2 expresses
/// host-managed by the device type.
fn characteristics() -> Vec<u8> {
    let mut body = vec![0; 60];
    put(&mut body, 4, &7200u16.to_be_bytes());
    // 3.5 inches.
    put(&mut body, 7, &[0x02]);
    body
}

/// The page Logical Block Provisioning, SBC-4 6.6.6: UNMAP, WRITE SAME(16) and (10) unmap; unmapped
/// blocks read as zeros; thin provisioning.
fn provisioning(config: &DiskConfig) -> Vec<u8> {
    let mut body = vec![0; 4];
    if opcodes::unmaps(config) {
        put(&mut body, 5, &[0xe0 | 0x04, 0x02]);
    }
    body
}

/// The page Zoned Block Device Characteristics, ZBC-2 6.5.3.
fn zoned(config: &DiskConfig) -> Vec<u8> {
    let mut body = vec![0; 60];
    put(&mut body, 4, &[u8::from(config.unrestricted_reads)]);
    put(&mut body, 8, &NONE.to_be_bytes());
    put(&mut body, 12, &NONE.to_be_bytes());
    let open_max = if config.zone_max_open == 0 { NONE } else { config.zone_max_open };
    put(&mut body, 16, &open_max.to_be_bytes());
    if config.sequential_bytes() == config.zone_size {
        // Zones are aligned to their length.
        put(&mut body, 23, &[0x01]);
    } else {
        // Zones start at multiples of a granularity.
        put(&mut body, 23, &[0x08]);
        let granularity = config.zone_size / u64::from(config.logical_block);
        put(&mut body, 24, &granularity.to_be_bytes());
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_says_how_long_it_is() {
        let config = DiskConfig::default();
        for number in PAGES {
            let bytes = page(&config, number).unwrap();
            assert_eq!(bytes[..2], [0x14, number]);
            assert_eq!(usize::from(u16::from_be_bytes([bytes[2], bytes[3]])) + 4, bytes.len());
        }
        assert_eq!(page(&config, 0xb3), Err(Sense::invalid_field(2, None)));
        assert_eq!(page(&config, SUPPORTED).unwrap()[4..], PAGES);
        assert!(PAGES.is_sorted());
    }

    #[test]
    fn limits_are_in_blocks() {
        let config = DiskConfig { logical_block: 4096, ..DiskConfig::default() };
        let bytes = page(&config, BLOCK_LIMITS).unwrap();
        assert_eq!(bytes.len(), 64);
        assert_eq!(bytes[8..12], 4096u32.to_be_bytes());
        assert_eq!(bytes[36..44], 65536u64.to_be_bytes());
        let config = DiskConfig { zone_nr_conv: 0, ..config };
        assert_eq!(page(&config, BLOCK_LIMITS).unwrap()[20..36], [0; 16]);
        assert_eq!(page(&config, PROVISIONING).unwrap()[4..], [0; 4]);
    }

    #[test]
    fn gap_zones_are_recognised_by_the_granularity() {
        let config = DiskConfig { zone_capacity: 200 << 20, ..DiskConfig::default() };
        let bytes = page(&config, ZONED).unwrap();
        assert_eq!(bytes[23], 8);
        assert_eq!(bytes[24..32], (524_288u64).to_be_bytes());
        let bytes = page(&DiskConfig { zone_max_open: 0, ..DiskConfig::default() }, ZONED).unwrap();
        assert_eq!((bytes[4], bytes[23]), (1, 1));
        assert_eq!(bytes[16..20], [0xff; 4]);
    }
}

//! Pages of vital product data: who the disk is (80h, 83h), and what it can do (B0h to B6h).
//! SPC-5 7.7, SBC-4 6.6, ZBC-2 6.5.

use crate::config::DiskConfig;
use crate::inquiry::{HOST_MANAGED, PRODUCT, VENDOR};
use crate::opcodes;
use crate::sense::Sense;

/// Most bytes that one READ or WRITE transfers.
pub const TRANSFER_BYTES_MAX: u64 = 16 << 20;
/// How many bytes of a READ or WRITE are best.
pub const TRANSFER_BYTES_BEST: u64 = 1 << 20;
/// Most bytes that one WRITE SAME writes.
pub const WRITE_SAME_BYTES_MAX: u64 = 256 << 20;
/// Most bytes that one UNMAP takes.
pub const UNMAP_BYTES_MAX: u64 = 1 << 30;
/// Most ranges of one UNMAP.
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

/// A limit that there is not, or that is not told.
const NONE: u32 = u32::MAX;

/// A page with its head.
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

/// Puts a field in its place, which the standards count from the start of the page's head.
fn put(body: &mut [u8], at: usize, field: &[u8]) {
    body[at - 4..at - 4 + field.len()].copy_from_slice(field);
}

/// In logical blocks, cut off where the field is too small.
fn blocks(config: &DiskConfig, bytes: u64) -> u32 {
    u32::try_from(bytes / u64::from(config.logical_block)).unwrap_or(u32::MAX)
}

/// A vendor's name for the disk, and a number of the kind that is assigned locally.
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

/// FNV-1a, which is the same on every machine.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// SBC-4 6.6.4.
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

/// SBC-4 6.6.2. ZONED is 0: ZBC-2 6.5.2, that it is host-managed stands in the device type.
fn characteristics() -> Vec<u8> {
    let mut body = vec![0; 60];
    put(&mut body, 4, &7200u16.to_be_bytes());
    // 3.5 inches.
    put(&mut body, 7, &[0x02]);
    body
}

/// SBC-4 6.6.6: UNMAP, WRITE SAME(16) and (10) unmap; what is unmapped reads as zeros; thin.
fn provisioning(config: &DiskConfig) -> Vec<u8> {
    let mut body = vec![0; 4];
    if opcodes::unmaps(config) {
        put(&mut body, 5, &[0xe0 | 0x04, 0x02]);
    }
    body
}

/// ZBC-2 6.5.3.
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
    fn gaps_are_told_by_the_granularity() {
        let config = DiskConfig { zone_capacity: 200 << 20, ..DiskConfig::default() };
        let bytes = page(&config, ZONED).unwrap();
        assert_eq!(bytes[23], 8);
        assert_eq!(bytes[24..32], (524_288u64).to_be_bytes());
        let bytes = page(&DiskConfig { zone_max_open: 0, ..DiskConfig::default() }, ZONED).unwrap();
        assert_eq!((bytes[4], bytes[23]), (1, 1));
        assert_eq!(bytes[16..20], [0xff; 4]);
    }
}

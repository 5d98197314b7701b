//! Parsers for what a disk reports about itself. The bytes may be short, long or wrong: every
//! parser accepts any input, and a field beyond the end reads as 0, as the standards require (SPC-5
//! 4.2.5.6).

/// A big-endian number in a page; missing bytes read as zeros.
fn number(page: &[u8], at: usize, len: usize) -> u64 {
    (at..at + len).fold(0, |number, at| number << 8 | u64::from(byte(page, at)))
}

fn byte(page: &[u8], at: usize) -> u8 {
    page.get(at).copied().unwrap_or(0)
}

fn bit(page: &[u8], at: usize, bit: u8) -> bool {
    byte(page, at) >> bit & 1 != 0
}

/// Standard INQUIRY data (SPC-5 6.6.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inquiry {
    /// Peripheral qualifier and device type: 0x14 for a connected host-managed disk.
    pub peripheral: u8,
    /// Vendor.
    pub vendor: String,
    /// Product.
    pub product: String,
    /// Revision.
    pub revision: String,
}

impl Inquiry {
    /// Parses the data.
    pub fn read(data: &[u8]) -> Inquiry {
        let text = |from: usize, to: usize| -> String {
            let plain = |at| match byte(data, at) {
                shown @ 0x20..=0x7e => char::from(shown),
                _ => ' ',
            };
            (from..to).map(plain).collect::<String>().trim().to_owned()
        };
        Inquiry {
            peripheral: byte(data, 0),
            vendor: text(8, 16),
            product: text(16, 32),
            revision: text(32, 36),
        }
    }
}

/// A page of vital product data, without its header of four bytes; `None` if the data are another
/// page.
pub fn vital_product_data(data: &[u8], page: u8) -> Option<&[u8]> {
    if data.len() < 4 || data[1] != page {
        return None;
    }
    let len = usize::from(u16::from_be_bytes([data[2], data[3]]));
    Some(&data[..data.len().min(4 + len)])
}

/// The page Block Limits, B0h (SBC-4 6.6.4). 0 means that the disk reports no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockLimits {
    /// Longest transfer, in blocks.
    pub transfer_blocks_max: u32,
    /// Longest UNMAP, in blocks.
    pub unmap_blocks_max: u32,
    /// Most descriptors of an UNMAP.
    pub unmap_descriptors_max: u32,
    /// Longest WRITE SAME, in blocks.
    pub write_same_blocks_max: u64,
}

impl BlockLimits {
    /// Parses the page, including its header.
    pub fn read(page: &[u8]) -> BlockLimits {
        BlockLimits {
            transfer_blocks_max: number(page, 8, 4) as u32,
            unmap_blocks_max: number(page, 20, 4) as u32,
            unmap_descriptors_max: number(page, 24, 4) as u32,
            write_same_blocks_max: number(page, 36, 8),
        }
    }
}

/// The page Logical Block Provisioning, B2h (SBC-4 6.6.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Provisioning {
    /// UNMAP is supported.
    pub unmap: bool,
    /// WRITE SAME(16) with the UNMAP bit is supported.
    pub write_same: bool,
}

impl Provisioning {
    /// Parses the page, including its header.
    pub fn read(page: &[u8]) -> Provisioning {
        Provisioning { unmap: bit(page, 5, 7), write_same: bit(page, 5, 6) }
    }
}

/// The page Zoned Block Device Characteristics, B6h (ZBC-2 6.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZonedCharacteristics {
    /// Reads above the write pointer are allowed (URSWRZ).
    pub unrestricted_reads: bool,
    /// Maximum number of open zones; `None` if there is no limit.
    pub open_max: Option<u32>,
    /// Zones start at multiples of this number of blocks, whatever their length; 0: each zone
    /// starts at the end of the previous one.
    pub granularity_blocks: u64,
}

impl ZonedCharacteristics {
    /// Parses the page, including its header.
    pub fn read(page: &[u8]) -> ZonedCharacteristics {
        let open_max = number(page, 16, 4) as u32;
        let constant_offsets = byte(page, 23) & 0x0f == 0x8;
        ZonedCharacteristics {
            unrestricted_reads: bit(page, 4, 0),
            open_max: Some(open_max).filter(|max| ![0, u32::MAX].contains(max)),
            granularity_blocks: if constant_offsets { number(page, 24, 8) } else { 0 },
        }
    }
}

/// READ CAPACITY(16) parameter data (SBC-4 5.20.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The last block.
    pub lba_last: u64,
    /// Length of a logical block, in bytes.
    pub block_bytes: u32,
    /// Log2 of the logical blocks in a physical block.
    pub physical_exponent: u8,
    /// Whether blocks can be unmapped (LBPME).
    pub provisioned: bool,
    /// Whether `lba_last` is that of the whole disk and not of its conventional zones (RC BASIS 1).
    pub whole_disk: bool,
}

impl Capacity {
    /// Length of the READ CAPACITY(16) parameter data, in bytes.
    pub const LEN: usize = 32;

    /// Parses the data; `None` if they are too short.
    pub fn read(data: &[u8]) -> Option<Capacity> {
        (data.len() >= 16).then(|| Capacity {
            lba_last: number(data, 0, 8),
            block_bytes: number(data, 8, 4) as u32,
            physical_exponent: byte(data, 13) & 0x0f,
            provisioned: bit(data, 14, 7),
            whole_disk: byte(data, 12) >> 4 & 3 == 1,
        })
    }
}

/// The result of MODE SENSE(6) for the caching page (SPC-5 7.5.4, SBC-4 6.5.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caching {
    /// The disk is write-protected.
    pub write_protected: bool,
    /// FUA is supported (DPOFUA).
    pub fua: bool,
    /// Writes may stay in a volatile cache (WCE).
    pub write_cache: bool,
}

impl Caching {
    /// Page code.
    pub const PAGE: u8 = 0x08;

    /// Parses the header and the page that follows it. Without the page there is no cache.
    pub fn read(data: &[u8]) -> Caching {
        let page_at = 4 + usize::from(byte(data, 3));
        let is_page = byte(data, page_at) & 0x3f == Caching::PAGE;
        Caching {
            write_protected: bit(data, 2, 7),
            fua: bit(data, 2, 4),
            write_cache: is_page && bit(data, page_at + 2, 2),
        }
    }
}

/// Whether a response to REPORT SUPPORTED OPERATION CODES says that the command is supported, in
/// conformance with a standard or vendor-specific (SPC-5 6.35.3).
pub fn is_supported(data: &[u8]) -> bool {
    matches!(byte(data, 1) & 0x07, 3 | 5)
}

/// Length of the header of a zone report, and of each descriptor, in bytes.
pub const ZONE_DESCRIPTOR_LEN: usize = 64;

/// Types of zones as drives number them (ZBC-2, table 3).
pub mod zone_type {
    /// Random writes.
    pub const CONVENTIONAL: u8 = 0x1;
    /// Written only at the write pointer.
    pub const SEQUENTIAL_REQUIRED: u8 = 0x2;
    /// Holds no data: fills the space up to the next zone.
    pub const GAP: u8 = 0x5;
}

/// A zone as a drive describes it (ZBC-2 5.4.3). Positions and lengths are in logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneDescriptor {
    /// The zone type, see [`zone_type`].
    pub kind: u8,
    /// The zone condition, 0 to 15.
    pub cond: u8,
    /// Length.
    pub blocks: u64,
    /// First block.
    pub start: u64,
    /// The write pointer, if the condition has one.
    pub wp: u64,
}

/// The response to REPORT ZONES (ZBC-2 5.4.2).
#[derive(Clone, Copy, Debug)]
pub struct ZoneReport<'a> {
    /// The last block of the disk.
    pub lba_last: u64,
    /// Zones start at multiples of this number of blocks; 0: not reported.
    pub granularity_blocks: u64,
    descriptors: &'a [u8],
}

impl<'a> ZoneReport<'a> {
    /// Parses the header; `None` if it is incomplete.
    pub fn read(data: &'a [u8]) -> Option<ZoneReport<'a>> {
        let (header, rest) = data.split_at_checked(ZONE_DESCRIPTOR_LEN)?;
        let listed = usize::try_from(number(header, 0, 4)).unwrap_or(usize::MAX);
        Some(ZoneReport {
            lba_last: number(header, 8, 8),
            granularity_blocks: number(header, 16, 8),
            descriptors: &rest[..rest.len().min(listed)],
        })
    }

    /// The complete zone descriptors in the data.
    pub fn zones(&self) -> impl Iterator<Item = ZoneDescriptor> + use<'a> {
        self.descriptors.chunks_exact(ZONE_DESCRIPTOR_LEN).map(|row| ZoneDescriptor {
            kind: row[0] & 0x0f,
            cond: row[1] >> 4,
            blocks: number(row, 8, 8),
            start: number(row, 16, 8),
            wp: number(row, 24, 8),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_bytes_read_as_zero() {
        assert_eq!(
            BlockLimits::read(&[0, 0xb0, 0, 12, 0, 0, 0, 0, 0, 1]).transfer_blocks_max,
            1 << 16
        );
        assert_eq!(Inquiry::read(&[0x14]).vendor, "");
        assert_eq!(
            Caching::read(&[3, 0, 0x90, 0]),
            Caching { write_protected: true, fua: true, write_cache: false }
        );
        assert_eq!(Capacity::read(&[0; 15]), None);
        assert!(ZoneReport::read(&[0; 63]).is_none());
        assert_eq!(vital_product_data(&[0, 0xb0, 0], 0xb0), None);
        assert_eq!(vital_product_data(&[0, 0xb1, 0, 0], 0xb0), None);
        assert_eq!(vital_product_data(&[0, 0xb0, 0, 1, 7, 8], 0xb0), Some(&[0, 0xb0, 0, 1, 7][..]));
    }

    #[test]
    fn a_report_gives_whole_descriptors_only() {
        let mut data = [0; 64 + 64 + 63];
        data[3] = 0xff;
        data[15] = 9;
        data[64] = 0x02;
        data[65] = 0x41;
        data[64 + 15] = 8;
        data[64 + 31] = 5;
        let report = ZoneReport::read(&data).unwrap();
        assert_eq!((report.lba_last, report.granularity_blocks), (9, 0));
        let zones: Vec<_> = report.zones().collect();
        assert_eq!(zones, [ZoneDescriptor { kind: 2, cond: 4, blocks: 8, start: 0, wp: 5 }]);
    }

    #[test]
    fn the_caching_page_is_found_after_block_descriptors() {
        let mut data = [0; 4 + 8 + 20];
        data[3] = 8;
        data[12] = 0x88;
        data[14] = 0x04;
        assert!(Caching::read(&data).write_cache);
        data[12] = 0x0a;
        assert!(!Caching::read(&data).write_cache);
    }

    #[test]
    fn no_limit_has_two_spellings() {
        let mut page = [0; 64];
        page[4] = 1;
        assert_eq!(
            ZonedCharacteristics::read(&page),
            ZonedCharacteristics {
                unrestricted_reads: true,
                open_max: None,
                granularity_blocks: 0,
            }
        );
        page[16..20].fill(0xff);
        page[23] = 8;
        page[31] = 4;
        let read = ZonedCharacteristics::read(&page);
        assert_eq!((read.open_max, read.granularity_blocks), (None, 4));
    }
}

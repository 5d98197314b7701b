//! Standard INQUIRY data (SPC-5 6.7.2) and the list of logical units.

use crate::sense::Sense;

/// Peripheral device type: a host-managed zoned block device, ZBC-2 4.2.
pub const HOST_MANAGED: u8 = 0x14;
/// T10 vendor identification.
pub(crate) const VENDOR: &[u8; 8] = b"BLKYARD ";
/// Product identification.
pub(crate) const PRODUCT: &[u8; 16] = b"SMR disk        ";
/// Product revision level.
const REVISION: &[u8; 4] = b"0001";
/// Bytes of standard INQUIRY data.
const STANDARD_BYTES: usize = 96;
/// The version field: SPC-5.
const VERSION: u8 = 0x07;
/// HISUP (hierarchical addressing) and the response data format 2.
const FORMAT: u8 = 0x12;
/// The CMDQUE bit: commands are queued.
const CMDQUE: u8 = 0x02;
/// Version descriptors, with no specific version: SAM-5, SPC-5, SBC-4, ZBC.
const STANDARDS: [u16; 4] = [0x00a0, 0x05c0, 0x0600, 0x0620];

/// Standard INQUIRY data.
pub(crate) fn standard() -> Vec<u8> {
    let mut bytes = vec![0; STANDARD_BYTES];
    bytes[0] = HOST_MANAGED;
    bytes[2] = VERSION;
    bytes[3] = FORMAT;
    bytes[4] = (STANDARD_BYTES - 5) as u8;
    bytes[7] = CMDQUE;
    bytes[8..16].copy_from_slice(VENDOR);
    bytes[16..32].copy_from_slice(PRODUCT);
    bytes[32..36].copy_from_slice(REVISION);
    for (at, standard) in STANDARDS.iter().enumerate() {
        bytes[58 + 2 * at..60 + 2 * at].copy_from_slice(&standard.to_be_bytes());
    }
    bytes
}

/// REPORT LUNS, SPC-5 6.33: there is logical unit 0 and no well-known logical unit.
pub(crate) fn luns(select: u8) -> Result<Vec<u8>, Sense> {
    let list_bytes: u32 = match select {
        0x00 | 0x02 => 8,
        0x01 => 0,
        _ => return Err(Sense::invalid_field(2, None)),
    };
    let mut bytes = list_bytes.to_be_bytes().to_vec();
    bytes.resize(8 + list_bytes as usize, 0);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_host_managed_disk() {
        let bytes = standard();
        assert_eq!(bytes[0] & 0x1f, HOST_MANAGED);
        assert_eq!(usize::from(bytes[4]) + 5, bytes.len());
        assert_eq!(&bytes[8..24], b"BLKYARD SMR disk");
    }

    #[test]
    fn there_is_one_logical_unit() {
        assert_eq!(luns(0).unwrap(), [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(luns(1).unwrap(), [0; 8]);
        assert_eq!(luns(3), Err(Sense::invalid_field(2, None)));
    }
}

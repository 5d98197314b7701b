//! The data files: the bytes of the zones, and after them a label. The label says which file of
//! which disk it is, because the bytes of zones may be anything.

use std::io;

use crate::geometry::MediaGeometry;
use crate::head::{self, Id, LABEL_BYTES, Label, is_zero};
use crate::live::Share;
use crate::store::StoreFile;

/// Prefix of the file names.
pub(crate) const PREFIX: &str = "data.";

const MAGIC: [u8; 8] = *b"BLKYDAT\n";

/// The longest part of a file before its label that a file system may show as data although nothing
/// was written there, in bytes: a block.
const BLOCK_BYTES_MAX: u64 = 64 << 10;

/// Name of a file.
pub fn name(number: u32) -> String {
    format!("{PREFIX}{number:02x}")
}

/// The label of a file.
pub fn label(id: &Id, number: u32) -> Label {
    Label { magic: MAGIC, id: *id, number }
}

/// Offset of a file's label in bytes: after its zones, at a page of its own.
pub fn label_offset(geometry: &MediaGeometry, share: Share) -> u64 {
    let zones = share.zones(geometry).len() as u64;
    (zones * geometry.zone_bytes).next_multiple_of(LABEL_BYTES as u64)
}

/// Length of a file in bytes.
pub fn len_bytes(geometry: &MediaGeometry, share: Share) -> u64 {
    label_offset(geometry, share) + LABEL_BYTES as u64
}

/// Whether a file has more than the label, or a part of it, that the creation of a disk has
/// written.
pub(crate) fn is_used(file: impl StoreFile) -> io::Result<bool> {
    let Some(first) = file.first_data()? else { return Ok(false) };
    let len = file.len()?;
    let label = len.saturating_sub(LABEL_BYTES as u64);
    if label.saturating_sub(first) > BLOCK_BYTES_MAX {
        return Ok(true);
    }
    let from = first.min(label);
    let mut bytes = vec![0; (len - from) as usize]; // A block and a label at most.
    file.read_at(from, &mut bytes)?;
    let (before, label) = bytes.split_at((label - from) as usize);
    Ok(!is_zero(before) || !head::is_begun(label, MAGIC))
}

#[cfg(test)]
mod tests {
    use blockyard_testing::temp_dir::TempDir;

    use super::*;

    const GEOMETRY: MediaGeometry = MediaGeometry {
        bytes: 10 * 3584,
        zone_bytes: 3584,
        zone_capacity_bytes: 3584,
        conventional_zones: 0,
        block_bytes: 512,
    };

    #[test]
    fn the_label_follows_the_zones_at_a_page() {
        let share = Share { number: 1, files: 3 };
        assert_eq!(label_offset(&GEOMETRY, share), 12_288, "of three zones, 10,752 bytes");
        assert_eq!(len_bytes(&GEOMETRY, share), 16_384);
        assert_eq!(name(17), "data.11");
    }

    #[test]
    fn a_label_alone_is_no_use_of_a_file() {
        let temp_dir = TempDir::new(&std::env::temp_dir(), "blockyard-zone-media-used");
        let path = temp_dir.path().join("data.00");
        let used = |offset: u64, bytes: &[u8]| {
            let mut options = std::fs::File::options();
            let file = options.read(true).write(true).create(true).truncate(true).open(&path);
            let file = file.unwrap();
            file.set_len(1 << 20).unwrap();
            file.write_at(offset, bytes).unwrap();
            is_used(file).unwrap()
        };
        let (id, label_at) = (*b"0123456789abcdef", (1 << 20) - 4096);
        assert!(!used(0, &[]));
        assert!(!used(label_at, &label(&id, 0).print()));
        assert!(!used(label_at, &label(&id, 0).print()[..40]), "a part of it");
        assert!(used(label_at, b"mine"));
        assert!(used(label_at - 1, b"1"));
        assert!(used(0, b"1"));
    }
}

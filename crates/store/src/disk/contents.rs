//! Finds data on a disk before a pool is made there. File systems, partitions and parts of other
//! devices have marks at the beginning or the end. Any byte there that is not zero counts as data;
//! the marks only serve to name it. Some blocks in between are checked too: a disk may have lost
//! its beginning by mistake, for example that of an older pool.

use std::io;
use std::ops::Range;

use crate::buffer::Memory;
use crate::{PoolFile, StoreFile};

/// Bytes that are checked at the beginning and at the end.
const EDGE_BYTES: u64 = 2 << 20;

/// Probes between the edges: `PROBE_BYTES` at each multiple of `PROBE_STEP`, where a segment may
/// begin. Large disks have a larger step, for at most `PROBES_MAX` probes.
const PROBE_BYTES: usize = 4096;
const PROBE_STEP: u64 = 4 << 20;
const PROBES_MAX: u64 = 4096;

/// Marks at the beginning: offset, bytes, and owner, from the public descriptions of the formats.
const MARKS: &[(usize, &[u8], &str)] = &[
    (0, b"XFSB", "an XFS file system"),
    (0, b"LUKS\xba\xbe", "a LUKS container"),
    (0, b"hsqs", "a squashfs"),
    (0, b"BLKYSND\n", "a stream of `volume send`"),
    (0, b"QFI\xfb", "a qcow2 image"),
    (0, b"-FVE-FS-", "a BitLocker volume"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT", "a FAT file system"),
    (82, b"FAT32", "a FAT file system"),
    (512, b"EFI PART", "a GPT with partitions"),
    (4096, b"EFI PART", "a GPT with partitions"),
    (512, b"LABELONE", "a physical volume of LVM"),
    (0, b"LABELONE", "a physical volume of LVM"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of an MD array"),
    (0, b"\xfc\x4e\x2b\xa9", "a member of an MD array"),
    (4096 - 10, b"SWAPSPACE2", "swap space"),
    (4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "a bcache"),
    (32_769, b"CD001", "an ISO 9660 file system"),
    (65_600, b"_BHRfS_M", "a btrfs file system"),
    (510, b"\x55\xaa", "a table of partitions, or something that boots"),
];

/// Names the data on a disk of `len` bytes, if there are any. The ranges `ours` are ignored if they
/// begin with the given bytes.
///
/// # Errors
/// If the disk cannot be read.
pub(super) fn find(
    disk: &PoolFile,
    len: u64,
    ours: &[(Range<u64>, &[u8])],
) -> io::Result<Option<String>> {
    let edge = EDGE_BYTES.min(len);
    let mut bytes = Memory::new(EDGE_BYTES).take_beyond(edge as usize);
    disk.read_at(0, &mut bytes)?;
    for (range, begin) in ours {
        if let Some(part) = bytes.get_mut(range.start as usize..range.end as usize)
            && part.starts_with(begin)
        {
            part.fill(0);
        }
    }
    if let Some(at) = bytes.iter().position(|byte| *byte != 0) {
        let marked = |mark: &&(usize, &[u8], &str)| {
            bytes.get(mark.0..).is_some_and(|bytes| bytes.starts_with(mark.1))
        };
        let name = MARKS.iter().find(marked).map(|mark| mark.2.to_owned());
        return Ok(Some(name.unwrap_or_else(|| format!("data, at byte {at}"))));
    }
    let at = end(len, edge);
    let mut bytes = Memory::new(EDGE_BYTES).take_beyond((len - at) as usize);
    disk.read_at(at, &mut bytes)?;
    if let Some(place) = bytes.iter().position(|byte| *byte != 0) {
        return Ok(Some(format!("data near its end, at byte {}", at + place as u64)));
    }
    between(disk, at)
}

/// Probes blocks between the beginning and the end.
fn between(disk: &PoolFile, end: u64) -> io::Result<Option<String>> {
    let mut bytes = Memory::new(PROBE_BYTES as u64).take_beyond(PROBE_BYTES);
    for at in probes(end) {
        disk.read_at(at, &mut bytes)?;
        if bytes.iter().any(|byte| *byte != 0) {
            return Ok(Some(format!("data, at byte {at}")));
        }
    }
    Ok(None)
}

/// The offsets of the probes between the beginning and `end`.
fn probes(end: u64) -> impl Iterator<Item = u64> {
    let step = PROBE_STEP * (end / PROBE_STEP / PROBES_MAX + 1);
    (super::SEGMENTS_AT..end.saturating_sub(PROBE_BYTES as u64)).step_by(step as usize)
}

/// Where the checked end begins; direct I/O needs an aligned offset.
fn end(len: u64, edge: u64) -> u64 {
    (len - edge) / 4096 * 4096
}

/// Overwrites what [`find`] reads of a disk of `len` bytes with zeros: the beginning, the end, and
/// the probes between them.
///
/// # Errors
/// If the disk cannot be written.
pub(super) fn wipe(disk: &PoolFile, len: u64) -> io::Result<()> {
    let edge = EDGE_BYTES.min(len);
    let mut zeros = Memory::new(EDGE_BYTES).take_beyond(edge as usize);
    zeros.fill(0);
    disk.write_at(0, &[&zeros])?;
    let at = end(len, edge);
    for probe in probes(at) {
        disk.write_at(probe, &[&zeros[..PROBE_BYTES]])?;
    }
    let mut zeros = Memory::new(EDGE_BYTES).take_beyond((len - at) as usize);
    zeros.fill(0);
    disk.write_at(at, &[&zeros])?;
    disk.sync()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 8 << 20;

    fn disk(name: &str, fill: impl FnOnce(&std::fs::File)) -> PoolFile {
        let name = format!("blockyard-contents-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(LEN).unwrap();
        fill(&file);
        PoolFile::of(file)
    }

    #[test]
    fn data_of_other_programs_are_found_and_named_if_known() {
        use std::os::unix::fs::FileExt;
        let found = |at: u64, bytes: &[u8]| {
            let disk = disk("one", |file| file.write_all_at(bytes, at).unwrap());
            find(&disk, LEN, &[(8192..12_288, &b"pid "[..])]).unwrap()
        };
        assert_eq!(found(0, &[0; 4096]), None);
        assert_eq!(found(8192, b"pid 7\n"), None);
        for (at, bytes, name) in MARKS {
            assert_eq!(found(*at as u64, bytes).as_deref(), Some(*name), "{at}");
        }
        assert_eq!(found(100_000, b"x").unwrap(), "data, at byte 100000");
        assert_eq!(
            found(LEN - 1, b"x").unwrap(),
            format!("data near its end, at byte {}", LEN - 1)
        );
        assert_eq!(found(5 << 20, b"x").unwrap(), "data, at byte 5242880");
        assert_eq!(found(4 << 20, b"x"), None);
    }

    #[test]
    fn a_wiped_disk_is_empty() {
        use std::os::unix::fs::FileExt;
        let disk = disk("two", |file| {
            file.write_all_at(b"XFSB", 0).unwrap();
            file.write_all_at(b"EFI PART", LEN - 512).unwrap();
            file.write_all_at(b"segment", 5 << 20).unwrap();
        });
        assert!(find(&disk, LEN, &[]).unwrap().is_some());
        wipe(&disk, LEN).unwrap();
        assert_eq!(find(&disk, LEN, &[]).unwrap(), None);
    }
}

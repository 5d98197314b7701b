//! zonefs: untrusted superblocks, and options from users. They must be refused with a reason, or
//! print to the same bytes.

use blockyard_zonefs::superblock::SUPERBLOCK_BYTES;
use blockyard_zonefs::{FormatOptions, Hyphenated, MountOptions, Superblock, Uuid};

/// The offsets of the checksum.
const CHECKSUM: std::ops::Range<usize> = 4..8;

/// Overwrites a part of a valid superblock with the input, from any byte on. Half of the inputs get
/// a valid checksum, because random inputs would hardly pass it otherwise.
pub fn superblock(bytes: &[u8]) {
    let [mend, low, high, rest @ ..] = bytes else { return };
    let mut block = Superblock::new(Uuid::from_bytes([3; 16])).encode();
    let from = usize::from(u16::from_le_bytes([*low, *high])) % SUPERBLOCK_BYTES;
    let len = rest.len().min(SUPERBLOCK_BYTES - from);
    block[from..from + len].copy_from_slice(&rest[..len]);
    if mend % 2 == 0 {
        block[CHECKSUM].fill(0);
        let checksum = checksum(&block);
        block[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
    }
    match Superblock::decode(&block) {
        Ok(superblock) => {
            let again = superblock.encode();
            assert_eq!(Superblock::decode(&again), Ok(superblock.clone()));
            assert!(superblock.permissions.is_none_or(|bits| bits <= 0o777));
            assert!(!superblock.label_text().contains('\0'));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// CRC-32 without the last inversion, bit by bit.
fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 }
        })
    })
}

/// Options: valid, almost valid, and invalid.
const WORDS: &[&str] = &[
    "errors=remount-ro",
    "errors=zone-ro",
    "errors=zone-offline",
    "errors=repair",
    "errors=",
    "explicit-open",
    "explicit-open=1",
    "ro",
    "rw",
    "allow_other",
    "",
    "aggr_cnv",
    "uid=0",
    "uid=4294967295",
    "gid=-1",
    "perm=777",
    "perm=1000",
    "00112233-4455-6677-8899-aabbccddeeff",
    "é=",
];

/// Accepted options print to themselves, and so do UUIDs.
pub fn options(bytes: &[u8]) {
    let text = match bytes.split_first() {
        Some((first, rest)) if first % 2 == 0 => {
            let words = rest.iter().take(8).map(|byte| WORDS[usize::from(*byte) % WORDS.len()]);
            words.collect::<Vec<_>>().join(",")
        }
        _ => String::from_utf8_lossy(bytes).into_owned(),
    };
    match text.parse::<MountOptions>() {
        Ok(options) => assert_eq!(options.to_string().parse(), Ok(options)),
        Err(error) => assert!(error.to_string().contains("invalid ")),
    }
    if let Ok(options) = text.parse::<FormatOptions>() {
        assert!(options.permissions.is_none_or(|bits| bits <= 0o777));
        assert!(options.uid != Some(u32::MAX) && options.gid != Some(u32::MAX));
    }
    if let Ok(uuid) = text.parse::<Hyphenated>() {
        assert!(uuid.to_string().eq_ignore_ascii_case(&text));
    }
}

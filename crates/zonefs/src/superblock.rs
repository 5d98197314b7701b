//! The superblock: 4096 bytes at the start of the device, written once and never changed.
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 4 | magic |
//! | 4 | 4 | checksum |
//! | 8 | 64 | label |
//! | 72 | 16 | UUID |
//! | 88 | 8 | features |
//! | 96, 100, 104 | 4 each | uid, gid, permissions |
//! | 108 | 3988 | zeros |
//!
//! All fields are little-endian. The checksum is the reflected CRC-32 with an initial value of all
//! ones and without the final inversion, over all 4096 bytes with the checksum field zero.

use uuid::Uuid;

/// Length of the superblock in bytes.
pub const SUPERBLOCK_BYTES: usize = 4096;

/// `ZOFS`, as a little-endian number.
pub const MAGIC: u32 = 0x5a4f_4653;

/// Permissions of files unless the superblock has others.
pub const PERMISSIONS: u16 = 0o640;

/// Length of the label in bytes.
pub const LABEL_BYTES: usize = 64;

/// Bits of the features field.
mod feature {
    /// Contiguous conventional zones are one file.
    pub(super) const AGGREGATE_CONVENTIONAL: u64 = 1;
    /// The superblock has the owner of the files.
    pub(super) const UID: u64 = 2;
    /// The superblock has the group of the files.
    pub(super) const GID: u64 = 4;
    /// The superblock has the permissions of the files.
    pub(super) const PERMISSIONS: u64 = 8;
    /// All known bits.
    pub(super) const ALL: u64 = 15;
}

/// Offsets of the fields.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const CHECKSUM: usize = 4;
    pub(super) const LABEL: usize = 8;
    pub(super) const UUID: usize = 72;
    pub(super) const FEATURES: usize = 88;
    pub(super) const UID: usize = 96;
    pub(super) const GID: usize = 100;
    pub(super) const PERMISSIONS: usize = 104;
    pub(super) const RESERVED: usize = 108;
}

/// Why bytes are not a valid superblock. The texts are those of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SuperblockError {
    /// The magic number is wrong: the device holds no zonefs.
    #[error("the device holds no zonefs: magic 0x{0:08x}, not 0x5a4f4653; `mkzonefs` makes one")]
    Magic(u32),
    /// The checksum does not match.
    #[error("Invalid checksum (Expected 0x{expected:08x}, got 0x{got:08x})")]
    Checksum {
        /// The checksum of the bytes.
        expected: u32,
        /// The stored checksum.
        got: u32,
    },
    /// Unknown feature bits: a newer format.
    #[error("Unknown features set 0x{0:x}")]
    Features(u64),
    /// The owner is not a valid user ID.
    #[error("Invalid UID feature")]
    Uid,
    /// The group is not a valid group ID.
    #[error("Invalid GID feature")]
    Gid,
    /// Reserved bytes are not zero.
    #[error("Reserved area is being used")]
    Reserved,
}

/// The contents of a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Label for users, padded with zeros.
    pub label: [u8; LABEL_BYTES],
    /// Unique identifier.
    pub uuid: Uuid,
    /// Whether contiguous conventional zones are one file.
    pub aggregate_conventional: bool,
    /// Owner of the files, if set. Never all ones.
    pub uid: Option<u32>,
    /// Group of the files, if set. Never all ones.
    pub gid: Option<u32>,
    /// Permissions of the files, if set.
    pub permissions: Option<u16>,
}

impl Superblock {
    /// Creates a superblock without label and features.
    pub fn new(uuid: Uuid) -> Superblock {
        Superblock {
            label: [0; LABEL_BYTES],
            uuid,
            aggregate_conventional: false,
            uid: None,
            gid: None,
            permissions: None,
        }
    }

    /// Encodes the superblock.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        let mut features = 0;
        if self.aggregate_conventional {
            features |= feature::AGGREGATE_CONVENTIONAL;
        }
        let optional = [
            (self.uid, feature::UID, at::UID),
            (self.gid, feature::GID, at::GID),
            (self.permissions.map(u32::from), feature::PERMISSIONS, at::PERMISSIONS),
        ];
        for (value, bit, offset) in optional {
            if let Some(value) = value {
                features |= bit;
                put(&mut bytes, offset, value.to_le_bytes());
            }
        }
        put(&mut bytes, at::MAGIC, MAGIC.to_le_bytes());
        put(&mut bytes, at::LABEL, self.label);
        put(&mut bytes, at::UUID, self.uuid.into_bytes());
        put(&mut bytes, at::FEATURES, features.to_le_bytes());
        let checksum = checksum(&bytes);
        put(&mut bytes, at::CHECKSUM, checksum.to_le_bytes());
        bytes
    }

    /// Decodes a superblock, with Linux's checks in the same order.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn decode(bytes: &[u8; SUPERBLOCK_BYTES]) -> Result<Superblock, SuperblockError> {
        let magic = u32::from_le_bytes(get(bytes, at::MAGIC));
        if magic != MAGIC {
            return Err(SuperblockError::Magic(magic));
        }
        let (expected, got) = (checksum(bytes), u32::from_le_bytes(get(bytes, at::CHECKSUM)));
        if expected != got {
            return Err(SuperblockError::Checksum { expected, got });
        }
        let features = u64::from_le_bytes(get(bytes, at::FEATURES));
        if features & !feature::ALL != 0 {
            return Err(SuperblockError::Features(features));
        }
        let optional =
            |bit, offset| (features & bit != 0).then(|| u32::from_le_bytes(get(bytes, offset)));
        // -1 is not a valid user or group: system calls interpret it as "do not change".
        let uid = optional(feature::UID, at::UID);
        if uid == Some(u32::MAX) {
            return Err(SuperblockError::Uid);
        }
        let gid = optional(feature::GID, at::GID);
        if gid == Some(u32::MAX) {
            return Err(SuperblockError::Gid);
        }
        if bytes[at::RESERVED..].iter().any(|byte| *byte != 0) {
            return Err(SuperblockError::Reserved);
        }
        // Linux uses the field unchanged; a file has only these mode bits.
        let permissions = optional(feature::PERMISSIONS, at::PERMISSIONS);
        Ok(Superblock {
            label: get(bytes, at::LABEL),
            uuid: Uuid::from_bytes(get(bytes, at::UUID)),
            aggregate_conventional: features & feature::AGGREGATE_CONVENTIONAL != 0,
            uid,
            gid,
            permissions: permissions.map(|bits| (bits & 0o777) as u16),
        })
    }

    /// The label as text, up to its first zero.
    pub fn label_text(&self) -> String {
        let end = self.label.iter().position(|byte| *byte == 0).unwrap_or(LABEL_BYTES);
        String::from_utf8_lossy(&self.label[..end]).into_owned()
    }
}

/// The checksum of the bytes with a zero checksum field.
fn checksum(bytes: &[u8; SUPERBLOCK_BYTES]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..at::CHECKSUM]);
    hasher.update(&[0; 4]);
    hasher.update(&bytes[at::LABEL..]);
    // The usual CRC-32 inverts the result at the end; this one does not.
    !hasher.finalize()
}

fn put<const N: usize>(bytes: &mut [u8; SUPERBLOCK_BYTES], offset: usize, value: [u8; N]) {
    bytes[offset..offset + N].copy_from_slice(&value);
}

fn get<const N: usize>(bytes: &[u8; SUPERBLOCK_BYTES], offset: usize) -> [u8; N] {
    bytes[offset..offset + N].try_into().expect("the range has the array's length")
}

#[cfg(test)]
mod tests {
    use uuid::fmt::Hyphenated;

    use super::*;

    #[test]
    fn uuid_text_is_32_digits_with_dashes() {
        let text = "00112233-4455-6677-8899-aabbccddeeff";
        assert_eq!(text.parse::<Hyphenated>().unwrap().to_string(), text);
        let random = Uuid::new_v4();
        assert_eq!(random.to_string().parse().map(Hyphenated::into_uuid), Ok(random));
        let plain = "00112233445566778899aabbccddeeff";
        for wrong in ["", "00112233", plain, &format!("{{{text}}}"), &format!("{text}0"), "é"] {
            assert!(wrong.parse::<Hyphenated>().is_err(), "{wrong}");
        }
    }

    /// CRC-32 as the format's documentation defines it, bit by bit.
    fn plain_checksum(bytes: &[u8]) -> u32 {
        bytes.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 }
            })
        })
    }

    fn full() -> Superblock {
        let mut label = [0; LABEL_BYTES];
        label[..4].copy_from_slice(b"logs");
        Superblock {
            label,
            uuid: Uuid::from_bytes([0x11; 16]),
            aggregate_conventional: true,
            uid: Some(1000),
            gid: Some(100),
            permissions: Some(0o600),
        }
    }

    #[test]
    fn the_bytes_are_the_documented_ones() {
        let mut wanted = vec![0u8; SUPERBLOCK_BYTES];
        wanted[0..4].copy_from_slice(&[0x53, 0x46, 0x4f, 0x5a]);
        wanted[8..12].copy_from_slice(b"logs");
        wanted[72..88].fill(0x11);
        wanted[88] = 0x0f;
        wanted[96..98].copy_from_slice(&[0xe8, 0x03]);
        wanted[100] = 100;
        wanted[104..106].copy_from_slice(&[0x80, 0x01]);
        let crc = plain_checksum(&wanted);
        wanted[4..8].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(full().encode().as_slice(), wanted);
    }

    #[test]
    fn superblock_round_trips() {
        let plain = Superblock::new(Uuid::from_bytes([7; 16]));
        for superblock in [full(), plain] {
            assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
        }
        assert_eq!(full().label_text(), "logs");
    }

    /// The error for a superblock with one byte changed and a correct checksum.
    fn changed(offset: usize, value: u8) -> SuperblockError {
        let mut bytes = full().encode();
        bytes[offset] = value;
        let checksum = checksum(&bytes);
        put(&mut bytes, at::CHECKSUM, checksum.to_le_bytes());
        Superblock::decode(&bytes).unwrap_err()
    }

    #[test]
    fn errors_have_the_texts_of_linux() {
        let mut bytes = full().encode();
        bytes[8] ^= 1;
        let text = Superblock::decode(&bytes).unwrap_err().to_string();
        assert!(text.starts_with("Invalid checksum (Expected 0x"), "{text}");
        assert_eq!(changed(88, 0x1f).to_string(), "Unknown features set 0x1f");
        assert_eq!(changed(at::RESERVED, 1), SuperblockError::Reserved);
        assert_eq!(changed(SUPERBLOCK_BYTES - 1, 1), SuperblockError::Reserved);
        let uid = Superblock { uid: Some(u32::MAX), ..full() };
        assert_eq!(Superblock::decode(&uid.encode()), Err(SuperblockError::Uid));
        let gid = Superblock { gid: Some(u32::MAX), ..full() };
        assert_eq!(Superblock::decode(&gid.encode()), Err(SuperblockError::Gid));
        assert_eq!(Superblock::decode(&[0; SUPERBLOCK_BYTES]), Err(SuperblockError::Magic(0)));
    }

    #[test]
    fn fields_without_their_feature_bit_are_ignored() {
        let mut bytes = Superblock::new(Uuid::from_bytes([1; 16])).encode();
        bytes[at::UID] = 5;
        let checksum = checksum(&bytes);
        put(&mut bytes, at::CHECKSUM, checksum.to_le_bytes());
        assert_eq!(Superblock::decode(&bytes).unwrap().uid, None);
    }
}

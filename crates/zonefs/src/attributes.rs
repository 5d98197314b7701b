//! The nodes of the file tree and their attributes.

use std::time::SystemTime;

/// The two kinds of files, each in a directory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// One or more conventional zones: random writes.
    Conventional,
    /// A sequential zone: written at its end only.
    Sequential,
}

impl FileKind {
    /// Both, in the order of their inode numbers.
    pub const ALL: [FileKind; 2] = [FileKind::Conventional, FileKind::Sequential];

    /// The name of the directory.
    pub const fn directory(self) -> &'static str {
        match self {
            FileKind::Conventional => "cnv",
            FileKind::Sequential => "seq",
        }
    }

    /// The kind as an index into a table.
    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// A node of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TreeNode {
    /// The root.
    Root,
    /// `cnv` or `seq`.
    Directory(FileKind),
    /// The file with this number in its directory.
    File(FileKind, u32),
}

/// The attributes that `stat` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Inode number. A file has the number of its first zone; the root has the zone count, and the
    /// directories the next two numbers.
    pub ino: u64,
    /// Whether it is a directory.
    pub is_directory: bool,
    /// Permissions.
    pub permissions: u16,
    /// Link count: two for a directory, plus one per subdirectory.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size: bytes of a file; number of files in a directory; for the root, its directories plus
    /// two.
    pub size: u64,
    /// Capacity in 512-byte blocks.
    pub blocks: u64,
    /// Unit of writes in bytes.
    pub block_bytes: u32,
    /// Time of the last change, or of the mount if there was none.
    pub modified: SystemTime,
}

/// The values that `statfs` returns; sizes in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Length of a block in bytes.
    pub block_bytes: u32,
    /// Total capacity of the files.
    pub blocks: u64,
    /// Unwritten capacity.
    pub free: u64,
    /// Number of files and directories.
    pub files: u64,
}

/// Maximum length of a name in bytes.
pub(crate) const NAME_BYTES_MAX: u32 = 16;

/// Parses a file name: decimal digits without leading zeros.
pub(crate) fn parse_name(name: &[u8]) -> Option<u32> {
    let plain = match name {
        [b'0'] => true,
        [b'0', ..] | [] => false,
        digits => digits.iter().all(u8::is_ascii_digit),
    };
    std::str::from_utf8(name).ok().filter(|_| plain)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_numbers() {
        assert_eq!(parse_name(b"0"), Some(0));
        assert_eq!(parse_name(b"4294967295"), Some(u32::MAX));
        for name in ["", "00", "01", "+1", "-1", "1 ", "a", "4294967296", "\u{661}"] {
            assert_eq!(parse_name(name.as_bytes()), None, "{name}");
        }
    }
}

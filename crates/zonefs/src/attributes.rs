//! What is in the tree and what `stat` says of it.

use std::time::SystemTime;

/// The two kinds of files: a directory each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// One or more conventional zones: written anywhere.
    Conventional,
    /// A sequential zone: written at its end.
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

/// Something in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// The root.
    Root,
    /// `cnv` or `seq`.
    Directory(FileKind),
    /// The file of this number in its directory.
    File(FileKind, u32),
}

/// What `stat` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Inode number: a file's first zone; the zone count for the root, and one and two more for
    /// the directories.
    pub ino: u64,
    /// Whether it is a directory.
    pub is_directory: bool,
    /// Permissions.
    pub permissions: u16,
    /// Links: two for a directory and one more for each directory in it.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes of a file; files of a directory; directories of the root and two.
    pub size: u64,
    /// Capacity in 512-byte blocks.
    pub blocks: u64,
    /// Unit of writes in bytes.
    pub block_bytes: u32,
    /// When it was last changed; when it was mounted, if it was not changed since.
    pub modified: SystemTime,
}

/// What `statfs` says, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Length of a block in bytes.
    pub block_bytes: u32,
    /// What all files can hold.
    pub blocks: u64,
    /// What can still be written.
    pub free: u64,
    /// Files and directories.
    pub files: u64,
}

/// Longest name.
pub(crate) const NAME_BYTES_MAX: u32 = 16;

/// The number that a file name means: decimal, without leading zeros or anything else.
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

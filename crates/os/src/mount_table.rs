//! The system's mount table: what is mounted at a directory.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The mount table of this process.
const TABLE: &str = "/proc/self/mountinfo";

/// Maximum length of the table in bytes; the rest is ignored.
const TABLE_BYTES_MAX: u64 = 16 << 20;

/// Major and minor number of a mount's device: unique among mounted file systems.
pub type DeviceNumber = (u32, u32);

/// A line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// The device number. FUSE's control directory is named after the minor number.
    pub device: DeviceNumber,
    /// The file system type, such as `fuse.zonefs`.
    pub kind: String,
    /// The source of the mount.
    pub source: String,
}

impl Mounted {
    /// Whether it is a FUSE file system.
    pub fn is_fuse(&self) -> bool {
        self.kind == "fuse" || self.kind.starts_with("fuse.")
    }
}

/// The topmost mount exactly at a path, which must not contain symbolic links.
///
/// # Errors
/// If the table cannot be read.
pub fn topmost(path: &Path) -> io::Result<Option<Mounted>> {
    let mut table = Vec::new();
    File::open(TABLE)?.take(TABLE_BYTES_MAX).read_to_end(&mut table)?;
    let mut lines = table.split(|&byte| byte == b'\n').filter_map(parse);
    // Later mounts cover earlier ones.
    Ok(lines.rfind(|(point, _)| point == path).map(|(_, mounted)| mounted))
}

/// Where a source, such as a block device, is mounted; the mount point that covers the others.
///
/// # Errors
/// If the table cannot be read.
pub fn mount_point(source: &str) -> io::Result<Option<PathBuf>> {
    let mut table = Vec::new();
    File::open(TABLE)?.take(TABLE_BYTES_MAX).read_to_end(&mut table)?;
    let mut lines = table.split(|&byte| byte == b'\n').filter_map(parse);
    Ok(lines.rfind(|(_, mounted)| mounted.source == source).map(|(point, _)| point))
}

/// Parses a line into mount point and mount; `None` if the line is invalid.
///
/// proc(5): `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`.
fn parse(line: &[u8]) -> Option<(PathBuf, Mounted)> {
    let mut words = line.split(|&byte| byte == b' ');
    let device = std::str::from_utf8(words.nth(2)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let point = unescape(words.nth(1)?);
    words.find(|word| *word == b"-")?;
    let text = |word: &[u8]| String::from_utf8_lossy(&unescape(word)).into_owned();
    let (kind, source) = (text(words.next()?), text(words.next()?));
    Some((PathBuf::from(OsString::from_vec(point)), Mounted { device, kind, source }))
}

/// Decodes the kernel's octal escapes, such as `\040` for a space.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| first == b'\\');
        let byte = digits.and_then(|digits| {
            let text = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(text, 8).ok()
        });
        match byte {
            Some(byte) => {
                plain.push(byte);
                rest = &after[3..];
            }
            None => {
                plain.push(first);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_says_where_and_what() {
        let line = b"36 35 0:98 / /mnt/a\\040b\\134 rw,noatime shared:1 master:2 - fuse.zonefs \
                     /dev/blockyard/z rw,user_id=0";
        let (point, mounted) = parse(line).unwrap();
        assert_eq!(point, Path::new("/mnt/a b\\"));
        assert_eq!(mounted.device, (0, 98));
        assert!(mounted.is_fuse());
        assert_eq!(
            (mounted.kind.as_str(), mounted.source.as_str()),
            ("fuse.zonefs", "/dev/blockyard/z")
        );
        let root = b"22 1 8:20 / / rw - ext4 /dev/sda rw";
        assert!(!parse(root).unwrap().1.is_fuse());
        for broken in [
            "",
            "a b c",
            "1 2 x /",
            "1 2 0:1 / /x rw fuse blockyard",
            "1 2 0:1 / /x - a",
            "1 2 0:x / /m - a b",
            "1 2 :1 / /m - a b",
        ] {
            assert_eq!(parse(broken.as_bytes()), None, "{broken}");
        }
        assert_eq!(unescape(b"\\04\\999\\"), b"\\04\\999\\");
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(topmost(Path::new("/")).unwrap().is_some());
        assert_eq!(topmost(Path::new("/no/such/place")).unwrap(), None);
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(line in proptest::collection::vec(any::<u8>(), 0..120)) {
            let _ = parse(&line);
        }

        #[test]
        fn escapes_are_undone(path in "[ -~]{0,40}") {
            let escaped: String = path
                .bytes()
                .map(|byte| match byte {
                    b' ' | b'\\' => format!("\\{byte:03o}"),
                    plain => char::from(plain).to_string(),
                })
                .collect();
            prop_assert_eq!(unescape(escaped.as_bytes()), path.as_bytes());
        }
    }
}

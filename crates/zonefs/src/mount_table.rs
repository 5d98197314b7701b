//! What the system's table of mounts says of a directory: whether what is seen there is ours.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The table, as this process sees it.
const TABLE: &str = "/proc/self/mountinfo";

/// Longest table that is read, in bytes.
const TABLE_BYTES_MAX: u64 = 16 << 20;

/// Major and minor number of a mount's device: no two file systems that are mounted share one.
pub(crate) type DeviceNumber = (u32, u32);

/// The device of the mount that is seen at a path without links, if one is right there.
pub(crate) fn topmost(path: &Path) -> io::Result<Option<DeviceNumber>> {
    let mut table = Vec::new();
    File::open(TABLE)?.take(TABLE_BYTES_MAX).read_to_end(&mut table)?;
    // Later lines are mounted over earlier ones.
    let mut lines = table.split(|&byte| byte == b'\n').filter_map(parse);
    Ok(lines.rfind(|(point, _)| point == path).map(|(_, device)| device))
}

/// Where a line's mount is, and its device; `None` for a line that is none.
///
/// proc(5): `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`.
fn parse(line: &[u8]) -> Option<(PathBuf, DeviceNumber)> {
    let mut words = line.split(|&byte| byte == b' ');
    let device = std::str::from_utf8(words.nth(2)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let point = unescape(words.nth(1)?);
    Some((PathBuf::from(OsString::from_vec(point)), (major.parse().ok()?, minor.parse().ok()?)))
}

/// Undoes the kernel's `\040` for a blank and the like.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(word.len());
    let mut rest = word;
    while let [first, after @ ..] = rest {
        let octal = after.get(..3).filter(|_| *first == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[3..] } else { after };
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_where_and_which_device() {
        let line = b"36 35 0:98 / /mnt/a\\040b\\134 rw shared:1 - fuse.zonefs /dev/blockyard/z rw";
        assert_eq!(parse(line), Some((PathBuf::from("/mnt/a b\\"), (0, 98))));
        for broken in ["", "a b c", "1 2 x / /m", "1 2 0:x / /m", "1 2 0:1 /", "1 2 :1 / /m"] {
            assert_eq!(parse(broken.as_bytes()), None, "{broken}");
        }
        assert_eq!(unescape(b"\\04\\999\\"), b"\\04\\999\\");
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(topmost(Path::new("/")).unwrap().is_some());
        assert_eq!(topmost(Path::new("/no/such/place")).unwrap(), None);
    }
}

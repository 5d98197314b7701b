//! Where a mount goes: what is there, what is wrong with it, and what a daemon that died left.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::fuse::sys::{self, MOUNTER};

/// What our mounts are called in the table of mounts.
pub(crate) const SOURCE: &str = "blockyard";

/// The system's table of mounts, as this process sees it.
const TABLE: &str = "/proc/self/mountinfo";

/// Longest table of mounts that is read, in bytes.
const TABLE_BYTES_MAX: u64 = 16 << 20;

/// Most dead mounts of yards on top of each other that are taken away.
const DEAD_MAX: usize = 16;

/// Why a directory cannot become a mount.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// There is no such directory, or it cannot be looked at.
    #[error("{}: {source}; wanted an empty directory", dir.display())]
    Directory {
        /// What was named.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is something else.
    #[error("{}: it is no directory; wanted an empty one", .0.display())]
    NotADirectory(PathBuf),
    /// There is something in it.
    #[error("{}: the directory is not empty; what is in it would be hidden", .0.display())]
    NotEmpty(PathBuf),
    /// Another daemon serves there.
    #[error("{}: another yard is mounted there", .0.display())]
    InUse(PathBuf),
    /// What a file system that died left there cannot be taken away.
    #[error(
        "{}: a mount is there whose program has died, and it cannot be taken away: {source}; try \
         `fusermount3 -u -z {}`, or `umount` as root",
        dir.display(), dir.display()
    )]
    Stale {
        /// The directory.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is no FUSE here.
    #[error(
        "/dev/fuse is missing: this kernel has no FUSE, or its module is not loaded (modprobe fuse)"
    )]
    NoFuse,
    /// The program that mounts for users is missing.
    #[error("{MOUNTER} is missing, and only root mounts without it; install the package fuse3")]
    NoMounter,
    /// Others may not be let in.
    #[error(
        "{}: users may let others in only if /etc/fuse.conf has a line `user_allow_other`; without \
         it leave out --fuse-allow-other, or serve as root", .0.display()
    )]
    AllowOther(PathBuf),
    /// The kernel offered io_uring and then refused it.
    #[error("{}: FUSE over io_uring failed: {source}", dir.display())]
    Ring {
        /// The directory.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system refused to mount.
    #[error("{}: mounting failed: {source}", dir.display())]
    Mount {
        /// The directory.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Checks a directory, and takes away what a yard that died left there. Its path without links.
pub(crate) fn prepare(dir: &Path) -> Result<PathBuf, MountError> {
    let failed = |source| MountError::Directory { dir: dir.to_owned(), source };
    let real = match std::fs::canonicalize(dir) {
        Err(error) if is_dead(&error) => canonical_of_dead(dir),
        real => real,
    };
    let real = real.map_err(failed)?;
    for _ in 0..DEAD_MAX {
        if !topmost(&real).map_err(failed)?.is_some_and(|mount| mount.is_ours()) {
            break;
        }
        // What the kernel remembers of a dead mount it still tells; opening it fails.
        match std::fs::read_dir(&real) {
            Err(error) if is_dead(&error) => {
                let stale = |source| MountError::Stale { dir: real.clone(), source };
                sys::detach(&real).map_err(stale)?;
                let dir = real.display();
                tracing::warn!(%dir, "took away the mount of a yard that had died");
            }
            _ => return Err(MountError::InUse(real)),
        }
    }
    let metadata = std::fs::metadata(&real).map_err(failed)?;
    if !metadata.is_dir() {
        return Err(MountError::NotADirectory(real));
    }
    match std::fs::read_dir(&real) {
        Err(source) if is_dead(&source) => Err(MountError::Stale { dir: real, source }),
        Err(source) => Err(MountError::Directory { dir: real, source }),
        Ok(mut entries) => match entries.next() {
            Some(_) => Err(MountError::NotEmpty(real)),
            None => Ok(real),
        },
    }
}

/// Whether the program behind a mount has died.
fn is_dead(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOTCONN)
}

/// The path without links of a directory that cannot be looked at itself.
fn canonical_of_dead(dir: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(dir)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => Ok(std::fs::canonicalize(parent)?.join(name)),
        _ => Ok(absolute),
    }
}

/// A line of the table of mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// The number of its device below major 0, as FUSE's control files are called.
    pub(crate) device: u64,
    kind: String,
    source: String,
}

impl Mounted {
    pub(crate) fn is_ours(&self) -> bool {
        let is_fuse = self.kind == "fuse" || self.kind.starts_with("fuse.");
        is_fuse && self.source == SOURCE
    }
}

/// The mount that is seen at a path, if one is right there.
pub(crate) fn topmost(real: &Path) -> io::Result<Option<Mounted>> {
    let mut table = Vec::new();
    let file = std::fs::File::open(TABLE)?;
    io::Read::read_to_end(&mut io::Read::take(file, TABLE_BYTES_MAX), &mut table)?;
    let mut lines = table.split(|&byte| byte == b'\n').filter_map(parse);
    // Later lines are mounted over earlier ones.
    Ok(lines.rfind(|(point, _)| point == real).map(|(_, mounted)| mounted))
}

/// Where a line's mount is, and what it is; `None` for a line that is none.
///
/// proc(5): `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`.
fn parse(line: &[u8]) -> Option<(PathBuf, Mounted)> {
    let mut words = line.split(|&byte| byte == b' ');
    let device = std::str::from_utf8(words.nth(2)?).ok()?;
    let (_, device) = device.split_once(':')?;
    let device = device.parse().ok()?;
    let point = unescape(words.nth(1)?);
    words.find(|word| *word == b"-")?;
    let text = |word: &[u8]| String::from_utf8_lossy(&unescape(word)).into_owned();
    let (kind, source) = (text(words.next()?), text(words.next()?));
    Some((PathBuf::from(OsString::from_vec(point)), Mounted { device, kind, source }))
}

/// Undoes the kernel's `\040` for a blank and the like.
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
        let line = b"36 35 0:98 / /mnt/a\\040b\\134 rw,noatime shared:1 master:2 - fuse.blockyard \
                     blockyard rw,user_id=0";
        let (point, mounted) = parse(line).unwrap();
        assert_eq!(point, Path::new("/mnt/a b\\"));
        assert_eq!(mounted.device, 98);
        assert!(mounted.is_ours());
        let root = b"22 1 0:20 / / rw - fuse blockyard rw";
        assert!(parse(root).unwrap().1.is_ours());
        let other = b"22 1 0:20 / / rw - fuse.sshfs host: rw";
        assert!(!parse(other).unwrap().1.is_ours());
        for broken in ["", "a b c", "1 2 x /", "1 2 0:1 / /x rw fuse blockyard", "1 2 0:1 / /x - a"]
        {
            assert_eq!(parse(broken.as_bytes()), None, "{broken}");
        }
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(topmost(Path::new("/")).unwrap().is_some_and(|mount| !mount.is_ours()));
        assert_eq!(topmost(Path::new("/no/such/place")).unwrap(), None);
    }

    #[test]
    fn what_will_not_do_is_named() {
        let base = std::env::temp_dir().join(format!("blockyard-point-{}", std::process::id()));
        std::fs::create_dir(&base).unwrap();
        let (file, full) = (base.join("file"), base.join("full"));
        std::fs::write(&file, "x").unwrap();
        std::fs::create_dir(&full).unwrap();
        std::fs::write(full.join("x"), "x").unwrap();
        assert!(matches!(prepare(&base.join("none")), Err(MountError::Directory { .. })));
        assert!(matches!(prepare(&file), Err(MountError::NotADirectory(_))));
        assert!(matches!(prepare(&full), Err(MountError::NotEmpty(_))));
        std::fs::remove_file(full.join("x")).unwrap();
        assert_eq!(prepare(&full).unwrap(), std::fs::canonicalize(&full).unwrap());
        std::fs::remove_dir_all(&base).unwrap();
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

//! The mount point: checks the directory, explains errors, and removes the mounts of dead daemons.

use std::io;
use std::path::{Path, PathBuf};

use blockyard_os::{MOUNTER, Mounted, detach, topmost};

/// The source name of our mounts in the mount table.
pub(crate) const SOURCE: &str = "blockyard";

/// The most stacked mounts of dead daemons that are removed.
const DEAD_MAX: usize = 16;

/// The reason for which a directory cannot be mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The directory does not exist, or cannot be accessed.
    #[error("{}: {source}; expected an empty directory", dir.display())]
    Directory {
        /// The named path.
        dir: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The path is no directory.
    #[error("{}: it is no directory; expected an empty one", .0.display())]
    NotADirectory(PathBuf),
    /// The directory is not empty.
    #[error("{}: the directory is not empty; what is in it would be hidden", .0.display())]
    NotEmpty(PathBuf),
    /// Another daemon has a mount there.
    #[error("{}: another yard is mounted there", .0.display())]
    InUse(PathBuf),
    /// The mount of a dead file system cannot be removed.
    #[error(
        "{}: a mount is there whose program has died, and it cannot be taken away: {source}; try \
         `fusermount3 -u -z {}`, or `umount` as root",
        dir.display(), dir.display()
    )]
    Stale {
        /// The directory.
        dir: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The kernel has no FUSE.
    #[error(
        "/dev/fuse is missing: this kernel has no FUSE, or its module is not loaded (modprobe fuse)"
    )]
    NoFuse,
    /// The program that mounts for users is missing.
    #[error("{MOUNTER} is missing, and only root mounts without it; install the package fuse3")]
    NoMounter,
    /// Other users cannot be allowed.
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
        /// The system's error.
        source: io::Error,
    },
    /// The system refused to mount.
    #[error("{}: mounting failed: {source}{}", dir.display(), missing_right(source))]
    Mount {
        /// The directory.
        dir: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The right that the process lacks for a mount that the system has refused: the end of an error
/// text, empty if it lacks none.
fn missing_right(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            "; a mount needs read and write access to /dev/fuse, and CAP_SYS_ADMIN or fusermount3"
        }
        _ => "",
    }
}

/// Checks a directory, and removes mounts of dead daemons there. Returns its path with links
/// resolved.
pub(crate) fn prepare(dir: &Path) -> Result<PathBuf, MountError> {
    let failed = |source| MountError::Directory { dir: dir.to_owned(), source };
    let real = match std::fs::canonicalize(dir) {
        Err(error) if is_dead(&error) => canonical_of_dead(dir),
        real => real,
    };
    let real = real.map_err(failed)?;
    for _ in 0..DEAD_MAX {
        if !topmost(&real).map_err(failed)?.is_some_and(|mount| is_ours(&mount)) {
            break;
        }
        // The kernel still answers from its cache for a dead mount; opening it fails.
        match std::fs::read_dir(&real) {
            Err(error) if is_dead(&error) => {
                let stale = |source| MountError::Stale { dir: real.clone(), source };
                detach(&real).map_err(stale)?;
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

/// Whether the error means that a mount's program has died. `ECONNABORTED` is the kernel's error
/// for a request that the program had not answered when it died: the kernel closes the program's
/// descriptors some time after its end, if io_uring uses them.
fn is_dead(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
}

/// The path with links resolved, for a directory that cannot be accessed itself.
fn canonical_of_dead(dir: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(dir)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => Ok(std::fs::canonicalize(parent)?.join(name)),
        _ => Ok(absolute),
    }
}

/// Whether a mount belongs to a yard.
pub(crate) fn is_ours(mount: &Mounted) -> bool {
    mount.is_fuse() && mount.source == SOURCE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_mount_names_the_right_that_it_needs() {
        let text = |kind: io::ErrorKind| {
            MountError::Mount { dir: "/srv/files".into(), source: kind.into() }.to_string()
        };
        assert!(text(io::ErrorKind::PermissionDenied).contains("CAP_SYS_ADMIN"));
        assert!(!text(io::ErrorKind::NotFound).contains("CAP_SYS_ADMIN"));
    }

    #[test]
    fn our_mounts_are_recognised_by_their_source() {
        let mounted = |kind: &str, source: &str| Mounted {
            device: (0, 98),
            kind: kind.to_owned(),
            source: source.to_owned(),
        };
        assert!(is_ours(&mounted("fuse.blockyard", SOURCE)));
        assert!(is_ours(&mounted("fuse", SOURCE)));
        assert!(!is_ours(&mounted("fuse.sshfs", "host:")));
        assert!(!is_ours(&mounted("tmpfs", SOURCE)));
    }

    #[test]
    fn an_unsuitable_mount_point_is_named_in_the_error() {
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
}

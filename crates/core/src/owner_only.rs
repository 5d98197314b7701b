//! Files and directories that only their owner may use: pools, backing files, saves, traces.
//!
//! A file gets its mode when it is created, so that other users cannot open it at any moment. The
//! umask can only remove permissions.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Mode of a file: its owner reads and writes it.
pub const FILE_MODE: u32 = 0o600;

/// Mode of a directory: its owner lists, changes and enters it.
pub const DIRECTORY_MODE: u32 = 0o700;

/// The permission bits of the group and of others.
const OTHERS: u32 = 0o077;

/// Options that create a file with [`FILE_MODE`] if it does not exist, and otherwise open it
/// unchanged for reading and writing.
pub fn make_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(FILE_MODE);
    options
}

/// The directories that [`create_dir_all`] would create for `path`, a directory before its parent.
pub fn missing_directories(path: &Path) -> Vec<PathBuf> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    absolute.ancestors().take_while(|path| !path.exists()).map(Path::to_owned).collect()
}

/// Creates a directory, and missing parent directories, with [`DIRECTORY_MODE`].
///
/// # Errors
/// If a directory cannot be created.
pub fn create_dir_all(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path)
}

/// Creates a directory as [`create_dir_all`] does, and makes its name durable, and those of the
/// parents that were created.
///
/// # Errors
/// If a directory cannot be created, or its name may not be durable.
pub fn create_dir_all_durably(path: &Path) -> io::Result<()> {
    let missing = missing_directories(path).len();
    create_dir_all(path)?;
    // The name may have been made just before, or before a power cut.
    sync_names_above(path, missing.max(1))
}

/// Makes the name of `path` durable, and those of its parents, `count` in all: syncs the directory
/// above each.
///
/// # Errors
/// If a name may not be durable.
pub fn sync_names_above(path: &Path, count: usize) -> io::Result<()> {
    let path = path.canonicalize()?;
    path.ancestors().skip(1).take(count).try_for_each(sync_directory)
}

/// Makes the names in a directory durable, where the system can: some file systems do not sync a
/// directory, and one may be writable but not readable.
///
/// # Errors
/// If they may not be durable.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    use ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    match File::open(path).and_then(|directory| directory.sync_all()) {
        Err(error) if [InvalidInput, PermissionDenied, Unsupported].contains(&error.kind()) => {
            Ok(())
        }
        synced => synced,
    }
}

/// Removes the permissions of the group and of others from an open file or directory. Returns
/// whether it had any.
///
/// # Errors
/// If the process does not own the file.
pub fn narrow(file: &File) -> io::Result<bool> {
    let mode = file.metadata()?.mode() & 0o7777;
    if mode & OTHERS == 0 {
        return Ok(false);
    }
    file.set_permissions(Permissions::from_mode(mode & !OTHERS))?;
    Ok(true)
}

/// Narrows a directory and the regular files in it. Returns how many of them, the directory
/// included, had permissions for the group or for others.
///
/// # Errors
/// If one of them belongs to another user; the files before it are narrowed.
pub fn narrow_directory(path: &Path) -> io::Result<usize> {
    // The directory comes first: after that no other user can replace a file in it by a link.
    let mut narrowed = usize::from(narrow(&File::open(path)?)?);
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        // Another thread may have removed the file since it was listed.
        let Ok(found) = entry.metadata() else { continue };
        if found.is_file() && found.mode() & OTHERS != 0 {
            let mode = found.mode() & 0o7777 & !OTHERS;
            std::fs::set_permissions(entry.path(), Permissions::from_mode(mode))?;
            narrowed += 1;
        }
    }
    Ok(narrowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn directory_with_wide_mode_is_narrowed() {
        let place = std::env::temp_dir().join(format!("blockyard-narrow-{}", std::process::id()));
        let (above, inner) = (place.clone(), place.join("pool"));
        create_dir_all_durably(&inner).unwrap();
        assert_eq!((mode(&above), mode(&inner)), (0o700, 0o700));
        let (ours, link) = (inner.join("segment"), inner.join("link"));
        drop(make_options().open(&ours).unwrap());
        assert_eq!(mode(&ours), 0o600);
        std::fs::write(place.join("elsewhere"), "").unwrap();
        std::os::unix::fs::symlink(place.join("elsewhere"), &link).unwrap();
        for path in [&place.join("elsewhere"), &ours] {
            std::fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
        }
        std::fs::set_permissions(&inner, Permissions::from_mode(0o755)).unwrap();
        assert_eq!(narrow_directory(&inner).unwrap(), 2);
        assert_eq!((mode(&inner), mode(&ours)), (0o700, 0o600));
        assert_eq!(mode(&place.join("elsewhere")), 0o644, "no link is followed");
        assert_eq!(narrow_directory(&inner).unwrap(), 0);
        let absent = sync_directory(&place.join("absent")).unwrap_err();
        assert_eq!(absent.kind(), ErrorKind::NotFound);
        std::fs::remove_dir_all(&place).unwrap();
    }
}

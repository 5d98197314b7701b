//! Files and directories that only their owner may use: pools, backing files, saves, traces.
//!
//! The modes are given when a file is made, so that no moment exists in which others may open it.
//! The umask can only take rights away.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Mode of a file: its owner reads and writes it.
pub const FILE_MODE: u32 = 0o600;

/// Mode of a directory: its owner lists, changes and enters it.
pub const DIRECTORY_MODE: u32 = 0o700;

/// The rights of the group and of others.
const OTHERS: u32 = 0o077;

/// Options that make a file with [`FILE_MODE`] where none exists, and open it for reading and
/// writing as it is otherwise.
pub fn make_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(FILE_MODE);
    options
}

/// Makes a directory, and the missing ones above it, with [`DIRECTORY_MODE`].
///
/// # Errors
/// If one of them cannot be made.
pub fn create_dir_all(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path)
}

/// Takes the rights of the group and of others away from an open file or directory. Says whether
/// it had any.
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

/// Narrows a directory and the regular files in it. Says how many had rights for the group or for
/// others, the directory included.
///
/// # Errors
/// If one of them belongs to another user; those before it are narrowed.
pub fn narrow_directory(path: &Path) -> io::Result<usize> {
    // First the directory: then no other user can put a link in the place of a file below.
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
    fn a_directory_made_before_the_modes_were_fixed_is_narrowed() {
        let place = std::env::temp_dir().join(format!("blockyard-narrow-{}", std::process::id()));
        let (above, inner) = (place.clone(), place.join("pool"));
        create_dir_all(&inner).unwrap();
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
        std::fs::remove_dir_all(&place).unwrap();
    }
}

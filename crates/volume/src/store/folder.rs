//! Makes the directory of a pool so that it outlives a power cut: its name is in the directory
//! above, which has to be synced for that.

use std::fs::File;
use std::io;
use std::path::Path;

/// Makes a directory, and those above it that are missing. One that is there may have been made an
/// instant before the power was cut the last time, so the one above it is synced in any case.
pub(crate) fn make(path: &Path) -> io::Result<()> {
    let missing = path.ancestors().take_while(|path| !path.exists()).count();
    std::fs::create_dir_all(path)?;
    let path = path.canonicalize()?;
    for above in path.ancestors().skip(1).take(missing.max(1)) {
        match File::open(above).and_then(|above| above.sync_all()) {
            // Who may not read it did not make anything in it either.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            synced => synced?,
        }
    }
    Ok(())
}

//! A setting of the kernel in a sysfs file, which is restored.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::LabError;

/// A changed setting. Dropping it restores the old value.
#[derive(Debug)]
pub(super) struct Setting {
    path: PathBuf,
    before: String,
}

impl Setting {
    /// Writes another value to the file.
    ///
    /// # Errors
    /// If it cannot be read, or refuses the value.
    pub(super) fn new(path: PathBuf, value: &str) -> Result<Setting, LabError> {
        let before = chosen(&read(&path)?).to_owned();
        write(&path, value)?;
        Ok(Setting { path, before })
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        // If the write is refused now, the device is gone, and its setting too.
        let _ = fs::write(&self.path, &self.before);
    }
}

/// The value in brackets, for a line that lists several values; otherwise the line.
pub(super) fn chosen(line: &str) -> &str {
    let inside = line.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or(line, |(inside, _)| inside).trim()
}

/// Reads a file of the kernel.
pub(super) fn read(path: &Path) -> Result<String, LabError> {
    let text = fs::read_to_string(path).map_err(LabError::io(path.display().to_string()))?;
    Ok(text.trim().to_owned())
}

/// Writes a value into a file of the kernel.
pub(super) fn write(path: &Path, value: &str) -> Result<(), LabError> {
    use io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem};
    let what = || format!("writing `{value}` to {}", path.display());
    fs::write(path, value).map_err(|error| match error.kind() {
        NotFound | PermissionDenied | ReadOnlyFilesystem => {
            let how = format!("it takes root on the machine itself: {error}");
            LabError::missing(format!("leave for {}", what()), how)
        }
        _ => LabError::io(what())(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn the_value_in_brackets_counts() {
        assert_eq!(chosen("none [mq-deadline] kyber\n"), "mq-deadline");
        assert_eq!(chosen("256\n"), "256");
    }

    #[test]
    fn the_previous_setting_is_restored() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().join("scheduler");
        fs::write(&path, "[none] mq-deadline\n").unwrap();
        let setting = Setting::new(path.clone(), "mq-deadline").unwrap();
        assert_eq!(read(&path).unwrap(), "mq-deadline");
        drop(setting);
        assert_eq!(read(&path).unwrap(), "none");
        let error = Setting::new("/no/such/file".into(), "1").unwrap_err();
        assert!(error.to_string().contains("/no/such/file"), "{error}");
    }
}

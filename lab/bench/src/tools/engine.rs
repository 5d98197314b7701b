//! Our engine for stock fio: selects the library that fits the installed fio.
//!
//! A library has the number of the fio interface for which it was built in its name, and fio
//! refuses one with another number. fio's version does not say which number it expects. So fio is
//! asked: it shows the options of a library that it accepts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The library's name, with any number.
pub(crate) const NAME: &str = "libblockyard_fio-*.so";
/// The text before and after the number.
const AROUND: [&str; 2] = ["libblockyard_fio-", ".so"];

/// The libraries in these folders, in the order of the folders, in each the highest number first.
/// An unreadable folder has none.
fn found(folders: &[&Path]) -> Vec<PathBuf> {
    let number = |path: &Path| {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix(AROUND[0])?.strip_suffix(AROUND[1])?.parse::<u32>().ok()
    };
    let within = |folder: &&Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path()).filter(|path| path.is_file());
        let mut engines: Vec<(u32, PathBuf)> =
            paths.filter_map(|path| Some((number(&path)?, path))).collect();
        engines.sort_by_key(|engine| std::cmp::Reverse(engine.0));
        engines.into_iter().map(|engine| engine.1)
    };
    folders.iter().flat_map(within).collect()
}

/// The first library in these folders that the installed fio accepts. Without a fio it is the first
/// of all, and the cells then report that fio is missing.
///
/// # Errors
/// A sentence, if there are libraries and fio accepts none of them.
pub(crate) fn fitting(folders: &[&Path]) -> Result<Option<PathBuf>, String> {
    let engines = found(folders);
    let mut said = String::new();
    for engine in &engines {
        let asked = Command::new("fio")
            .arg(format!("--enghelp={}", absolute(engine).display()))
            .stdin(Stdio::null())
            .output();
        match asked {
            Ok(answer) if answer.status.success() => return Ok(Some(absolute(engine))),
            Ok(answer) => said = String::from_utf8_lossy(&answer.stderr).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Some(absolute(engine)));
            }
            Err(error) => said = error.to_string(),
        }
    }
    if engines.is_empty() {
        return Ok(None);
    }
    let names: Vec<String> = engines.iter().map(|engine| engine.display().to_string()).collect();
    let said = said.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("nothing");
    Err(format!(
        "fio takes none of the engines that are here ({}); of the last it said: {said}; `make fio` \
         builds one for Debian's fio, `make fio FIO_SRC=...` for another",
        names.join(", ")
    ))
}

/// fio runs in another directory, and searches the linker's path for a name without a slash.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn libraries_are_found_by_number() {
        let (one, other) = (Scratch::new().unwrap(), Scratch::new().unwrap());
        for name in ["libblockyard_fio-31.so", "libblockyard_fio-39.so", "libblockyard_fio-9.so"] {
            fs::write(one.path().join(name), "").unwrap();
        }
        for name in ["libblockyard_fio.so", "libblockyard_fio-x.so", "libblockyard_fio-40.so"] {
            fs::write(other.path().join(name), "").unwrap();
        }
        let nowhere = one.path().join("nowhere");
        let found = found(&[one.path(), &nowhere, other.path()]);
        let numbers: Vec<&str> =
            found.iter().map(|path| path.to_str().unwrap().rsplit_once('-').unwrap().1).collect();
        assert_eq!(numbers, ["39.so", "31.so", "9.so", "40.so"]);
    }

    /// Needs an installed fio, as the tests of command lines do.
    #[test]
    fn an_error_of_fio_is_reported() {
        let folder = Scratch::new().unwrap();
        assert_eq!(fitting(&[folder.path()]), Ok(None));
        fs::write(folder.path().join("libblockyard_fio-31.so"), "no library").unwrap();
        let error = fitting(&[folder.path()]).unwrap_err();
        assert!(error.contains("libblockyard_fio-31.so); of the last it said: "), "{error}");
        assert!(error.contains("FIO_SRC"), "{error}");
    }
}

//! The paths that clients of the control API may name.
//!
//! A request is executed with the daemon's privileges, and the daemon may run as root. A path in a
//! request is therefore confined to the directories that the configuration names; by default there
//! are none. Commands that write a file open it themselves, with the privileges of their own user.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use blockyard_store::remote::is_remote;

use crate::error::YardError;
use crate::spec::DeviceSpec;

/// The directories below which a request may name a file or directory.
#[derive(Debug, Default)]
pub struct ApiPaths {
    /// The directories with links resolved; not set means none.
    directories: OnceLock<Vec<PathBuf>>,
}

impl ApiPaths {
    /// Sets the directories, once, before the API is served.
    ///
    /// # Errors
    /// If one of them does not exist or is no directory.
    pub fn allow(&self, directories: &[PathBuf]) -> Result<(), YardError> {
        let resolved = directories.iter().map(|directory| {
            let found = directory.canonicalize().ok().filter(|found| found.is_dir());
            found.ok_or_else(|| YardError::Argument {
                field: "api_directories",
                value: directory.display().to_string(),
                wanted: "a directory that exists".to_owned(),
            })
        });
        // It is still empty: only the daemon sets it, at its start.
        let _ = self.directories.set(resolved.collect::<Result<_, _>>()?);
        Ok(())
    }

    /// The path that a request names, with links resolved.
    ///
    /// # Errors
    /// If it is relative, has `..`, or leads out of the directories.
    pub fn check(&self, field: &'static str, path: &Path) -> Result<PathBuf, YardError> {
        let refused = |wanted: String| {
            let value = path.display().to_string();
            YardError::Argument { field, value, wanted }
        };
        if !path.is_absolute() {
            return Err(refused("a path from the root on".to_owned()));
        }
        if path.components().any(|part| part == Component::ParentDir) {
            return Err(refused("a path without `..`".to_owned()));
        }
        let directories = self.directories.get().map_or(&[][..], Vec::as_slice);
        let resolved = resolve(path).map_err(|error| refused(format!("a usable path: {error}")))?;
        if directories.iter().any(|directory| resolved.starts_with(directory)) {
            return Ok(resolved);
        }
        let allowed = match directories {
            [] => "requests may name no path".to_owned(),
            some => {
                let names = some.iter().map(|directory| directory.display().to_string());
                format!("requests may name paths below {}", names.collect::<Vec<_>>().join(", "))
            }
        };
        Err(refused(format!(
            "a path that the yard allows: {allowed}; `serve --api-directory DIR`, or \
             api_directories in [serve], allows paths below DIR, this one with `serve \
             --api-directory {}`",
            directory_of(&resolved).display()
        )))
    }

    /// Checks every path among the parameters of a device that a request adds. A pool that the yard
    /// already has open may be anywhere.
    ///
    /// # Errors
    /// As [`ApiPaths::check`].
    pub fn check_device(
        &self,
        spec: &DeviceSpec,
        is_open_pool: impl Fn(&str) -> bool,
    ) -> Result<(), YardError> {
        let paths = spec.kind().params().filter(|param| param.is_path());
        for param in paths {
            let may_be_pool = spec.kind().name == "volume" && param.name == "path";
            match spec.text(param.name) {
                Some(text) if may_be_pool && is_open_pool(&text) => {}
                // The daemon's credentials may be valid for more than this pool.
                Some(text) if may_be_pool && is_remote(Path::new(&text)) => {
                    let wanted = "a pool that the yard has open: requests open no other pool in \
                                  an object store";
                    let (value, wanted) = (text, wanted.to_owned());
                    return Err(YardError::Argument { field: "path", value, wanted });
                }
                Some(text) => {
                    self.check(param.name, Path::new(&text))?;
                }
                None => {}
            }
        }
        Ok(())
    }
}

/// The directory that has to be allowed for a path: the path itself, or the first above it that
/// exists.
fn directory_of(path: &Path) -> &Path {
    path.ancestors().find(|above| above.is_dir()).unwrap_or(path)
}

/// Resolves the links of a path as far as it exists; the rest is appended.
fn resolve(path: &Path) -> std::io::Result<PathBuf> {
    let mut missing: Vec<OsString> = Vec::new();
    let mut at = path;
    loop {
        match at.canonicalize() {
            Ok(mut found) => {
                found.extend(missing.iter().rev());
                return Ok(found);
            }
            // A dangling link could later lead anywhere, so it is refused.
            Err(error) if error.kind() == ErrorKind::NotFound && !at.is_symlink() => {}
            Err(error) => return Err(error),
        }
        let (Some(parent), Some(name)) = (at.parent(), at.file_name()) else {
            return Err(ErrorKind::NotFound.into());
        };
        missing.push(name.to_owned());
        at = parent;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::TempDir;
    use crate::uri;

    /// The bug: `{"file": "/etc/passwd"}` to `ram/save` replaced that file.
    #[test]
    fn a_request_names_no_path_outside_the_directories_of_the_configuration() {
        let temp = TempDir::new().unwrap();
        let root = temp.path().canonicalize().unwrap();
        let (inside, outside) = (root.join("in"), root.join("out"));
        std::fs::create_dir(&inside).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, inside.join("link")).unwrap();
        std::os::unix::fs::symlink(root.join("nowhere"), inside.join("dangling")).unwrap();
        let none = ApiPaths::default();
        let error = none.check("file", &inside.join("x")).unwrap_err().to_string();
        assert!(error.contains("may name no path; `serve --api-directory DIR`"), "{error}");
        let exact = format!("`serve --api-directory {}`", inside.display());
        assert!(error.ends_with(&exact), "{error}");
        let paths = ApiPaths::default();
        paths.allow(std::slice::from_ref(&inside)).unwrap();
        for valid in ["x", "a/b/c", ""] {
            assert_eq!(paths.check("file", &inside.join(valid)).unwrap(), inside.join(valid));
        }
        let escapes = [
            outside.join("x"),
            inside.join("../out/x"),
            inside.join("link/x"),
            inside.join("link"),
            inside.join("dangling"),
            inside.join("dangling/x"),
            PathBuf::from("relative"),
            root.join("inner"),
        ];
        for path in escapes {
            assert!(paths.check("file", &path).is_err(), "{}", path.display());
        }
        let device = |path: &Path| {
            let uri = format!("null:///d?size=1M&trace={}", path.display());
            paths.check_device(&uri::parse(&uri).unwrap(), |_| false)
        };
        device(&inside.join("trace")).unwrap();
        let error = device(Path::new("/etc/passwd")).unwrap_err().to_string();
        assert!(error.starts_with("invalid trace `/etc/passwd`"), "{error}");
        assert!(ApiPaths::default().allow(&[root.join("missing")]).is_err());
    }
}

//! What tells the data of a device from other data at the same place. It is compared when a device
//! is opened in place of one that clients use: by the new process of an upgrade, and by the old one
//! if that fails.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use blockyard_zone_media::{Files, head};

use super::{backing_refused, file, volume};
use crate::error::StackError;
use crate::spec::DeviceSpec;

/// Checks that what a device is to be opened from is there, may be opened by this process, and has
/// this identity, as far as that can be said while another process has it open. Nothing is made or
/// changed.
///
/// # Errors
/// If it is not there, may not be opened, or is another one.
pub(crate) fn check_existing(spec: &DeviceSpec, wanted: &str) -> Result<(), StackError> {
    let (found, wanted) = match spec.kind().name {
        // The number of the volume is known once its pool is open.
        "volume" => (volume::existing_pool(spec)?, wanted.split('/').next().unwrap_or("")),
        "file" => (file::existing(spec)?, wanted),
        "null" | "smr" => match (spec.text("backing"), drive_of(spec)) {
            (_, Some(path)) => (drive(&path)?, wanted),
            (Some(path), None) => {
                let id = Files::existing_id(Path::new(&path)).map_err(backing_refused)?;
                (head::hexadecimal(&id), wanted)
            }
            (None, None) => return Ok(()),
        },
        _ => return Ok(()),
    };
    compare(spec, &found, wanted)
}

/// Checks that an open device has this identity; none is empty.
///
/// # Errors
/// If it has another one.
pub(crate) fn compare(spec: &DeviceSpec, found: &str, wanted: &str) -> Result<(), StackError> {
    if found == wanted {
        return Ok(());
    }
    let (field, what) = match spec.kind().name {
        "volume" => ("path", "pool with the volume"),
        "file" => ("path", "file"),
        _ if drive_of(spec).is_some() => ("device", "drive"),
        _ => ("backing", "disk"),
    };
    let value = match spec.kind().name {
        "volume" => super::pool_path(spec).display().to_string(),
        _ => spec.text(field).unwrap_or_default(),
    };
    let wanted = format!("the {what} that clients have used; another one is there now");
    Err(StackError::Invalid { field, value, wanted })
}

/// The real drive that the device is, if it is one.
fn drive_of(spec: &DeviceSpec) -> Option<String> {
    spec.kind().param("device").ok().and_then(|param| spec.text(param.name))
}

/// The identity of a real drive: the number of its device node.
pub(super) fn drive(path: &str) -> Result<String, StackError> {
    let found = std::fs::metadata(path).map_err(|error| StackError::Refused {
        field: "device",
        message: format!("device: cannot examine `{path}`: {error}"),
    })?;
    Ok(format!("device {}", found.rdev()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::TempDir;
    use crate::stack::open;
    use crate::uri;

    #[test]
    fn other_data_at_the_place_of_a_device_are_refused() {
        let place = TempDir::new().unwrap();
        let at = |name: &str| place.path().join(name).display().to_string();
        let zoned = "size=16M&zone_size=1M";
        for (uri, field, path) in [
            (format!("volume:///v?size=16M&path={}", at("pool")), "path", at("pool")),
            (format!("file:///f?size=1M&path={}", at("file")), "path", at("file")),
            (format!("null:///z?zoned=1&{zoned}&backing={}", at("null")), "backing", at("null")),
            (format!("smr:///s?{zoned}&backing={}", at("smr")), "backing", at("smr")),
        ] {
            let spec = uri::parse(&uri).unwrap();
            let refused = |identity: &str| {
                let error = check_existing(&spec, identity).unwrap_err();
                assert!(error.to_string().contains(&path), "{uri}: {error}");
                error.to_string()
            };
            refused("");
            assert!(!Path::new(&path).exists(), "{uri}: the check has made it");
            let made = open(&spec).unwrap();
            let identity = made.identity.clone();
            // Also while it is open.
            check_existing(&spec, &identity).unwrap();
            drop(made);
            check_existing(&spec, &identity).unwrap();
            std::fs::rename(&path, at("moved")).unwrap();
            refused(&identity);
            let other = open(&spec).unwrap();
            assert!(compare(&spec, &other.identity, &identity).is_err(), "{uri}");
            let begin = format!("invalid {field} `{path}`: expected the ");
            assert!(refused(&identity).starts_with(&begin), "{uri}");
            let moved = std::fs::metadata(at("moved")).unwrap().is_dir();
            drop(other);
            match moved {
                true => std::fs::remove_dir_all(at("moved")).unwrap(),
                false => std::fs::remove_file(at("moved")).unwrap(),
            }
        }
        let null = uri::parse("null:///n?size=1M").unwrap();
        check_existing(&null, "").unwrap();
        assert_eq!(drive("/dev/null").unwrap(), format!("device {}", (1 << 8) | 3));
    }
}

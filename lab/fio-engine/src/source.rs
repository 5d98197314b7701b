//! The option `dev=`: a device URI, or a device of a configuration in TOML.
//!
//! | `dev=` | device |
//! | --- | --- |
//! | `null:///n0?size=10G` | the device of the URI |
//! | `yard.toml` | its only device, or the one whose name the filename is or ends with |
//! | `yard.toml#zoned0` | the one with this name |

use std::fs::File;
use std::io::{self, Read};

use blockyard_yard::param::shown;
use blockyard_yard::spec::DeviceSpec;
use blockyard_yard::{config, uri};

use crate::error::EngineError;

/// Parses `dev=` for the job's file of this name.
///
/// # Errors
/// If it is neither a device URI nor a readable configuration that has the device.
pub fn spec(dev: &str, file: Option<&str>) -> Result<DeviceSpec, EngineError> {
    if dev.is_empty() {
        return Err(EngineError::Missing);
    }
    if dev.contains("://") {
        return Ok(uri::parse(dev)?);
    }
    let (path, name) = match dev.rsplit_once('#') {
        Some((path, name)) => (path, Some(name)),
        None => (dev, None),
    };
    pick(path, devices(path)?, name, file)
}

/// The devices of a configuration file.
fn devices(path: &str) -> Result<Vec<DeviceSpec>, EngineError> {
    let text = read(path).map_err(|error| EngineError::Read { path: shown(path), error })?;
    match config::parse(&text) {
        Ok(config) => Ok(config.devices),
        Err(errors) => {
            let error = errors.first().map_or_else(String::new, ToString::to_string);
            Err(EngineError::Yard { path: shown(path), error })
        }
    }
}

/// Reads a text file up to one byte more than the bound of configurations, so that a longer file is
/// refused as too long.
fn read(path: &str) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(config::LEN_MAX as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

fn pick(
    path: &str,
    mut devices: Vec<DeviceSpec>,
    name: Option<&str>,
    file: Option<&str>,
) -> Result<DeviceSpec, EngineError> {
    let at = match (name, file) {
        (Some(name), _) => devices.iter().position(|device| device.name() == name),
        (None, _) if devices.len() == 1 => Some(0),
        (None, Some(file)) => {
            let last = file.rsplit('/').next().unwrap_or(file);
            let named = |name: &str| devices.iter().position(|device| device.name() == name);
            named(file).or_else(|| named(last))
        }
        (None, None) => None,
    };
    if let Some(at) = at {
        return Ok(devices.swap_remove(at));
    }
    let what = match (name, file) {
        (Some(name), _) => format!("has no device `{}`", shown(name)),
        (None, Some(file)) => {
            format!("has several devices or none, and filename `{}` names none", shown(file))
        }
        (None, None) => "has several devices or none, and none was picked".to_owned(),
    };
    let names: Vec<&str> = devices.iter().map(DeviceSpec::name).collect();
    let known = if names.is_empty() { "no device".to_owned() } else { names.join(", ") };
    Err(EngineError::Pick { path: shown(path), what, known })
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_yard::config::TEMPLATE;

    fn picked(name: Option<&str>, file: Option<&str>) -> Result<String, String> {
        let devices = config::parse(TEMPLATE).unwrap().devices;
        pick("y.toml", devices, name, file)
            .map(|spec| spec.name().to_owned())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_uri_is_itself() {
        let spec = spec("null:///n0?size=10G&zoned=1", Some("/dev/x")).unwrap();
        assert_eq!(spec.to_string(), "null:///n0?size=10G&zoned=1");
    }

    #[test]
    fn a_yard_is_picked_from_by_name_or_by_filename() {
        assert_eq!(picked(Some("mem0"), Some("zoned0")).as_deref(), Ok("mem0"));
        assert_eq!(picked(None, Some("zoned0")).as_deref(), Ok("zoned0"));
        assert_eq!(picked(None, Some("/dev/null0")).as_deref(), Ok("null0"));
        let error = picked(None, Some("/dev/nullb0")).unwrap_err();
        assert!(
            error.contains("`/dev/nullb0`")
                && error.contains("zoned0, null0, mem0, smr0, ram0, vol0"),
            "{error}"
        );
        let error = picked(Some("nope"), None).unwrap_err();
        assert!(error.contains("no device `nope`"), "{error}");
        let one = uri::parse("null:///only").unwrap();
        assert_eq!(pick("y", vec![one], None, Some("z")).unwrap().name(), "only");
    }

    #[test]
    fn an_unsuitable_value_is_named_in_the_error() {
        for (dev, want) in [
            ("", "dev: is missing"),
            ("null//n0", "dev: `null//n0` cannot be read"),
            ("nul:///n0", "dev: `nul` is not a kind of device"),
            ("null:///n0?sise=1G", "sise"),
        ] {
            let error = spec(dev, None).unwrap_err().to_string();
            assert!(error.contains(want) && !error.contains('\n'), "{error}");
        }
    }
}

//! Existing files and block devices.

use blockyard_core::Device;
use blockyard_file::{Direct, FileConfig, FileDevice, FileDeviceError, IoEngine};

use super::{Conventional, Made, Zoned, as_given, with_delay};
use crate::error::StackError;
use crate::spec::DeviceSpec;

/// Opens the device.
pub(super) fn open(spec: &DeviceSpec) -> Result<Made, StackError> {
    let opened = FileDevice::open_provisional(&config(spec));
    let device = opened.map_err(|error| refused(spec, error))?;
    let (provisional, identity) = (device.provisional().clone(), device.identity());
    let file = Some(device.status());
    let disk = match device.geometry().zones {
        Some(_) => with_delay::<Zoned, _>(spec, device)?,
        None => with_delay::<Conventional, _>(spec, device)?,
    };
    Ok(Made { file, provisional, identity, ..Made::without_files(disk) })
}

/// The identity of an existing file.
pub(super) fn existing(spec: &DeviceSpec) -> Result<String, StackError> {
    FileDevice::existing(&config(spec)).map_err(|error| refused(spec, error))
}

/// Checks the parameters without accessing the file.
pub(super) fn check(spec: &DeviceSpec) -> Result<Vec<String>, StackError> {
    config(spec).check().map_err(|error| refused(spec, error))?;
    Ok(Vec::new())
}

fn refused(spec: &DeviceSpec, error: FileDeviceError) -> StackError {
    let (by, message) = (error.field(), error.to_string());
    let error = match error {
        FileDeviceError::Invalid { field, value, wanted } => {
            StackError::Invalid { field, value, wanted }
        }
        FileDeviceError::NoPath => StackError::Missing { field: by, message },
        FileDeviceError::InUse { .. } => StackError::InUse { field: by, message },
        _ => StackError::Refused { field: by, message },
    };
    as_given(spec, error)
}

fn config(spec: &DeviceSpec) -> FileConfig {
    FileConfig {
        path: spec.text("path").unwrap_or_default().into(),
        size: spec.number("size"),
        direct: [Direct::Auto, Direct::On, Direct::Off][spec.choice("direct")],
        io: [IoEngine::Auto, IoEngine::Uring, IoEngine::Blocking][spec.choice("io")],
        read_only: spec.switch("read_only"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{check, open};
    use crate::paths::TempDir;
    use crate::uri;

    #[test]
    fn refused_file_is_blamed_by_field_and_left_alone() {
        let place = TempDir::new().unwrap();
        let path = place.path().join("image");
        let spec =
            |query: &str| uri::parse(&format!("file:///f?path={}{query}", path.display())).unwrap();
        let refused = |query: &str| match open(&spec(query)) {
            Err(error) => (error.field(), error.to_string()),
            Ok(_) => panic!("{query} was opened"),
        };
        let none = uri::parse("file:///f").unwrap();
        assert_eq!(check(&none).unwrap_err().field(), "path");
        let (field, text) = refused("");
        assert!(field == "path" && text.ends_with("; size=SIZE creates the file"), "{text}");
        assert!(check(&spec("&size=1M")).is_ok() && !path.exists());
        drop(super::super::open_provisional(&spec("&size=1M")).unwrap());
        assert!(!path.exists(), "the yard has not accepted the device");
        drop(open(&spec("&size=1M")).unwrap());
        let (field, text) = refused("&size=2M");
        assert!(
            field == "size" && text.starts_with("invalid size `2M`: expected 1048576"),
            "{text}"
        );
        assert_eq!(path.metadata().unwrap().len(), 1 << 20);
    }

    /// Connections sleep on the descriptor of the ring, without which they would poll. Every layer
    /// above the device must pass it on.
    #[test]
    fn a_layer_above_a_file_passes_its_descriptor_on() {
        let place = TempDir::new().unwrap();
        let path = place.path().join("image");
        for query in ["", "&delay_nsec=1000", "&trace=/dev/null", "&scheduler=mq-deadline"] {
            let text = format!("file:///f?path={}&size=1M&io=uring{query}", path.display());
            let made = open(&uri::parse(&text).unwrap()).unwrap();
            let mut channel = made.disk.open().unwrap();
            assert!(channel.descriptor().is_some(), "{text}");
            assert!(channel.may_sleep(), "nothing is in flight: {text}");
        }
    }
}

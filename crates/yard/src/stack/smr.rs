//! SMR disks: the emulated one in memory or in files, or a real drive.

use std::path::Path;
use std::sync::Arc;

use blockyard_smr::config::{DiskConfig, DiskError};
use blockyard_smr::disk::Disk;
use blockyard_smr::sd::{Sd, SdError};
use blockyard_smr::sg::Sg;
use blockyard_smr::timed::Timed;
use blockyard_smr::timing::DriveTimes;
use blockyard_smr::transport::ScsiTransport;
use blockyard_zone_media::{CacheMode, Files, Media, MediaGeometry, MemoryMedium, Options, head};

use super::{Made, Zoned, as_given, backing_refused, with_delay};
use crate::error::StackError;
use crate::spec::DeviceSpec;

/// Indices of the choices of `cache`.
const NONE: usize = 1;
const VOLATILE: usize = 2;

/// The most data of conventional zones that a volatile cache holds in memory, in bytes.
const CACHE_BYTES: u64 = 64 << 20;

/// Opens the device.
pub(super) fn open(spec: &DeviceSpec) -> Result<Made, StackError> {
    let notes = check(spec)?;
    if let Some(path) = spec.text("device") {
        let refused = |error: String| StackError::Refused {
            field: "device",
            message: format!("device: {error}"),
        };
        let drive = Sg::open(Path::new(&path)).map_err(|error| refused(error.to_string()))?;
        let drive: Arc<dyn ScsiTransport> = Arc::new(drive);
        let sd = Sd::open(drive).map_err(|error| refused(format!("`{path}`: {error}")))?;
        let disk = with_delay::<Zoned, _>(spec, sd)?;
        let identity = super::identity::drive(&path)?;
        return Ok(Made { notes, identity, ..Made::without_files(disk) });
    }
    let config = disk_config(spec);
    if let Some(path) = spec.text("backing") {
        let files = Files::open_provisional(Path::new(&path), &backing(spec, &config));
        let files = files.map_err(backing_refused)?;
        let (provisional, identity) = (files.provisional().clone(), head::hexadecimal(&files.id()));
        let files = Arc::new(files);
        let zone_files = Some(Arc::downgrade(&files));
        let made = on(spec, config, files, notes)?;
        return Ok(Made { zone_files, provisional, identity, ..made });
    }
    let refused = |error: std::io::Error| StackError::Refused {
        field: "size",
        message: format!("size: no memory for {} bytes: {error}", config.size),
    };
    let memory = MemoryMedium::new(config.size, config.zone_size).map_err(refused)?;
    on(spec, config, memory, notes)
}

/// The options for the files of a disk's medium.
fn backing(spec: &DeviceSpec, config: &DiskConfig) -> Options {
    let geometry = MediaGeometry {
        bytes: config.size,
        zone_bytes: config.zone_size,
        zone_capacity_bytes: config.sequential_bytes(),
        conventional_zones: config.zone_nr_conv,
        block_bytes: config.logical_block,
    };
    let cache = match spec.choice("cache") {
        VOLATILE => CacheMode::Volatile { bytes: CACHE_BYTES },
        _ => CacheMode::Through,
    };
    Options { cache, ..Options::new(geometry) }
}

/// Checks that the parameters do not conflict, without creating files.
pub(super) fn check(spec: &DeviceSpec) -> Result<Vec<String>, StackError> {
    if spec.text("device").is_some() {
        return Ok(idle(spec));
    }
    disk_config(spec).check().map_err(|error| invalid(spec, error))?;
    Ok(Vec::new())
}

/// A note for each given parameter that a real drive determines itself.
fn idle(spec: &DeviceSpec) -> Vec<String> {
    let own =
        |name: &str| spec.kind().params.iter().any(|param| param.name == name) && name != "device";
    let given =
        spec.given().filter(|(param, value)| own(param.name) && **value != param.default_value());
    given.map(|(param, _)| format!("{}: ignored with device", param.name)).collect()
}

/// The emulated disk on a medium.
fn on<M: Media + 'static>(
    spec: &DeviceSpec,
    config: DiskConfig,
    media: M,
    notes: Vec<String>,
) -> Result<Made, StackError> {
    let disk = Disk::open(config.clone(), media).map_err(|error| invalid(spec, error))?;
    if spec.switch("timing") {
        return drive(spec, Timed::new(disk, &config, DriveTimes::HC620), notes);
    }
    drive(spec, disk, notes)
}

fn drive<T: ScsiTransport + 'static>(
    spec: &DeviceSpec,
    transport: T,
    notes: Vec<String>,
) -> Result<Made, StackError> {
    // One type for all transports, because the layers above are compiled for each type. A SCSI
    // command takes microseconds, so an indirect call does not matter.
    let transport: Arc<dyn ScsiTransport> = Arc::new(transport);
    let sd = Sd::open(transport).map_err(|error: SdError| StackError::Refused {
        field: "size",
        message: error.to_string(),
    })?;
    Ok(Made { notes, ..Made::without_files(with_delay::<Zoned, _>(spec, sd)?) })
}

/// A disk's error, with the names that the parameters have here.
fn invalid(spec: &DeviceSpec, error: DiskError) -> StackError {
    let error = match error {
        DiskError::Invalid { field, value, wanted } => {
            let field = match field {
                "logical_block" => "bs",
                "physical_block" => "physical_bs",
                other => other,
            };
            StackError::Invalid { field, value, wanted }
        }
        other => StackError::Refused { field: "backing", message: other.to_string() },
    };
    as_given(spec, error)
}

fn disk_config(spec: &DeviceSpec) -> DiskConfig {
    DiskConfig {
        size: spec.number("size"),
        zone_size: spec.number("zone_size"),
        zone_capacity: spec.number("zone_capacity"),
        zone_nr_conv: spec.small("zone_nr_conv"),
        zone_max_open: spec.small("zone_max_open"),
        logical_block: spec.small("bs"),
        physical_block: spec.small("physical_bs"),
        // Files are in the kernel's page cache until they are synced; memory has no cache.
        write_cache: match spec.choice("cache") {
            NONE => false,
            VOLATILE => true,
            _ => spec.text("backing").is_some(),
        },
        ..DiskConfig::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{check, open};
    use crate::uri;

    fn refused(uri: &str) -> String {
        match open(&uri::parse(uri).unwrap()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{uri} was made"),
        }
    }

    #[test]
    fn conflicting_parameters_are_refused_by_field() {
        for (query, want) in [
            ("zone_size=3M", "invalid zone_size `3M`"),
            ("bs=4k&physical_bs=512", "invalid physical_bs `512`"),
            ("size=1G&zone_nr_conv=4", "invalid zone_nr_conv `4`"),
            ("size=1000001k", "invalid size `1000001k`"),
            ("zone_capacity=1G", "invalid zone_capacity `1G`"),
            ("device=/no/such/drive", "device: `/no/such/drive` cannot be opened"),
            ("device=/dev/null", "device: `/dev/null` takes no SCSI commands"),
        ] {
            let error = refused(&format!("smr:///s?{query}"));
            assert!(error.starts_with(want), "{query}: {error}");
        }
    }

    #[test]
    fn the_disk_of_the_size_of_a_real_one_is_made() {
        let uri = "smr:///s0?size=14T&zone_size=256M&zone_nr_conv=524";
        let made = open(&uri::parse(uri).unwrap()).unwrap();
        let zones = made.disk.geometry().zones.clone().unwrap();
        assert_eq!((zones.zone_count, zones.conventional_count), (57_344, 524));
        assert_eq!(made.notes, Vec::<String>::new());
    }

    #[test]
    fn a_real_drive_has_a_shape_of_its_own() {
        let spec = uri::parse("smr:///s?device=/dev/null&size=1T&zone_max_open=128").unwrap();
        assert_eq!(check(&spec).unwrap(), ["size: ignored with device"]);
    }
}

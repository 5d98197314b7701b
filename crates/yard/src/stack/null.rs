//! Null devices, in memory or, if they are zoned, in the files of a directory.

use std::path::Path;
use std::sync::Arc;

use blockyard_core::zone::ZoneSet;
use blockyard_null::{IrqMode, Null, NullConfig, NullError, NullOnMedia, media_geometry};
use blockyard_zone_media::{Files, Options, head};

use super::{Made, Zoned, as_given, backing_refused, null_config, with_delay};
use crate::error::StackError;
use crate::spec::DeviceSpec;

impl From<NullError> for StackError {
    fn from(error: NullError) -> StackError {
        match error {
            NullError::Invalid { field, value, wanted } => {
                StackError::Invalid { field, value, wanted }
            }
            NullError::Zones(error) => {
                StackError::Refused { field: "backing", message: format!("backing: {error}") }
            }
            other => StackError::Refused { field: "size", message: other.to_string() },
        }
    }
}

/// Opens the device. `Z` guards the zones of a device in memory.
pub(super) fn open<Z: ZoneSet>(spec: &DeviceSpec) -> Result<Made, StackError> {
    if let Some(path) = spec.text("backing") {
        return on_files(spec, Path::new(&path)).map_err(|error| as_given(spec, error));
    }
    let null = in_memory::<Z>(spec)?;
    let notes = null.notes().iter().cloned().chain(idle(spec)).collect();
    Ok(Made { notes, ..Made::without_files(with_delay::<Zoned, _>(spec, null)?) })
}

/// Checks that the parameters do not conflict, without creating files.
pub(super) fn check<Z: ZoneSet>(spec: &DeviceSpec) -> Result<Vec<String>, StackError> {
    let notes = match spec.text("backing") {
        Some(_) => {
            let checked = null_config(spec).and_then(|config| Ok(media_geometry(&config)?));
            checked.map_err(|error| as_given(spec, error))?.1
        }
        None => in_memory::<Z>(spec)?.notes().to_vec(),
    };
    Ok(notes.into_iter().chain(idle(spec)).collect())
}

fn in_memory<Z: ZoneSet>(spec: &DeviceSpec) -> Result<Arc<Null<Z>>, StackError> {
    let made = null_config(spec).and_then(|config| Ok(Null::open_with(config)?));
    made.map(Arc::new).map_err(|error| as_given(spec, error))
}

/// A zoned device in the files of a directory, which is made if there is none.
fn on_files(spec: &DeviceSpec, path: &Path) -> Result<Made, StackError> {
    let config: NullConfig = null_config(spec)?;
    let (geometry, _) = media_geometry(&config)?;
    let files = Files::open_provisional(path, &Options::new(geometry));
    let files = files.map_err(backing_refused)?;
    let (provisional, identity) = (files.provisional().clone(), head::hexadecimal(&files.id()));
    let files = Arc::new(files);
    let zone_files = Some(Arc::downgrade(&files));
    let null = NullOnMedia::open_on(&config, files)?;
    let notes = null.notes().iter().cloned().chain(idle(spec)).collect();
    let disk = with_delay::<Zoned, _>(spec, Arc::new(null))?;
    Ok(Made { notes, zone_files, provisional, identity, ..Made::without_files(disk) })
}

/// A note for each given parameter that has no effect without another one.
fn idle(spec: &DeviceSpec) -> Vec<String> {
    let timer = spec.choice("irqmode") == IrqMode::Timer as usize;
    let notes = spec.given().filter_map(|(param, value)| {
        let given = *value != param.default_value();
        let needs = match param.name {
            "completion_nsec" if !timer => "irqmode=timer",
            name if (name.starts_with("zone_") || name == "gate") && !spec.switch("zoned") => {
                "zoned=1"
            }
            _ => return None,
        };
        given.then(|| format!("{}: ignored without {needs}", param.name))
    });
    notes.collect()
}

#[cfg(test)]
mod tests {
    use super::super::{check, open, open_provisional};
    use crate::paths::TempDir;
    use crate::uri;

    const ZONED: &str = "null:///z?zoned=1&size=16M&zone_size=1M&zone_capacity=768k";

    fn refused(uri: &str) -> (&'static str, String) {
        match open(&uri::parse(uri).unwrap()) {
            Err(error) => (error.field(), error.to_string()),
            Ok(_) => panic!("{uri} was made"),
        }
    }

    #[test]
    fn what_does_not_go_with_a_backing_is_refused_by_field() {
        let place = TempDir::new().unwrap();
        let path = place.path().join("z");
        for (query, want) in [
            ("size=1M", "invalid zoned `0`: expected 1 with backing"),
            ("zoned=1&memory_backed=1", "invalid memory_backed `1`: expected 0 with backing"),
            ("zoned=1&cache_size=1M", "invalid cache_size `1M`: expected 0 with backing"),
            ("zoned=1&zone_full=1", "invalid zone_full `1`: expected 0 with backing"),
            ("zoned=1&size=1G&zone_size=3M", "invalid zone_size `3M`"),
        ] {
            let uri = format!("null:///z?{query}&backing={}", path.display());
            let (field, error) = refused(&uri);
            assert!(error.starts_with(want), "{query}: {error}");
            assert!(error.contains(field), "{query}: {field}");
            assert!(check(&uri::parse(&uri).unwrap()).is_err());
        }
        let (field, error) = refused(&format!("{ZONED}&badblocks=x&backing={}", path.display()));
        assert_eq!(field, "badblocks", "{error}");
        assert!(!path.exists(), "a refused device leaves nothing");
        let file = place.path().join("file");
        std::fs::write(&file, "mine").unwrap();
        let (field, error) = refused(&format!("{ZONED}&backing={}", file.display()));
        assert!(field == "backing" && error.contains("is no directory"), "{error}");
        assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    }

    #[test]
    fn limits_may_change_and_the_geometry_may_not() {
        let place = TempDir::new().unwrap();
        let path = place.path().join("z");
        let uri = format!("{ZONED}&backing={}", path.display());
        drop(open_provisional(&uri::parse(&uri).unwrap()).unwrap());
        assert!(!path.exists(), "the yard has not accepted the device");
        let made = open(&uri::parse(&uri).unwrap()).unwrap();
        assert!(made.disk.limits().write_cache && made.disk.limits().fua);
        let (field, error) = refused(&uri);
        assert!(field == "backing" && error.contains("in use by another process"), "{error}");
        drop(made);
        for (from, to, want) in [
            ("size=16M", "size=17M", "size=16777216, not size=17825792"),
            ("zone_size=1M", "zone_size=2M", "zone_size=1048576, not zone_size=2097152"),
            ("=768k", "=512k", "zone_capacity=786432, not zone_capacity=524288"),
            ("zoned=1", "zoned=1&bs=4k", "bs=512, not bs=4096"),
            ("zoned=1", "zoned=1&zone_nr_conv=1", "zone_nr_conv=0, not zone_nr_conv=1"),
        ] {
            let (field, error) = refused(&uri.replacen(from, to, 1));
            assert!(field == "backing" && error.contains(want), "{error}");
        }
        let limits = format!("{uri}&zone_max_open=2&zone_max_active=3");
        let zones = open(&uri::parse(&limits).unwrap()).unwrap().disk.geometry().zones.clone();
        assert_eq!(zones.map(|zones| (zones.open_max, zones.active_max)), Some((2, 3)));
    }
}

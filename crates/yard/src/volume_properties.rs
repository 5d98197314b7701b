//! The properties of volumes: their values as texts, for `volume set`, `volume get` and the control
//! API. The names and values are those of the parameters of a volume device.

use std::collections::BTreeMap;
use std::sync::Arc;

use blockyard_volume::config::{Given, VolumeConfig};
use blockyard_volume::{Compression, Running};
use blockyard_volume_format::catalogue::VolumeMeta;
use blockyard_volume_format::properties::Properties;
use serde::{Deserialize, Serialize};

use crate::devices::Devices;
use crate::error::YardError;
use crate::param::{DeviceKind, KINDS, Value, shown};
use crate::spec::DeviceSpec;
use crate::stack::compression;
use crate::uri::UriError;
use crate::volumes::{VolumeDone, VolumeRequest, work};

/// The property with the bytes that are reserved for a volume; 0 for none.
pub const RESERVATION: &str = "reservation";

/// The properties that can be set, in the order in which they are shown.
pub const PROPERTIES: [&str; 6] =
    ["compress", "sync", "iops", "bandwidth", RESERVATION, "read_only"];

/// Where the value of a property comes from.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PropertySource {
    /// It was not set.
    Default,
    /// It is stored in the pool.
    Pool,
    /// The device was opened with it.
    Device,
}

impl PropertySource {
    /// The name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            PropertySource::Default => "default",
            PropertySource::Pool => "pool",
            PropertySource::Device => "device",
        }
    }
}

/// A property of a volume.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct PropertyView {
    /// The name.
    pub name: String,
    /// The value, as `volume set` takes it.
    pub value: String,
    /// Where it comes from.
    pub source: PropertySource,
}

fn kind() -> &'static DeviceKind {
    let kind = KINDS.iter().find(|kind| kind.name == "volume");
    kind.expect("the table has the kind `volume`")
}

/// The properties of a volume. `device` has the present parameters if it is a device.
pub(crate) fn views(
    meta: &VolumeMeta,
    stored: &Properties,
    device: Option<&VolumeConfig>,
) -> Vec<PropertyView> {
    if meta.is_snapshot {
        return Vec::new();
    }
    let given = device.map_or(NONE, |config| config.given);
    let source = |is_given: bool, is_stored: bool| match (is_given, is_stored) {
        (true, _) => PropertySource::Device,
        (false, true) => PropertySource::Pool,
        (false, false) => PropertySource::Default,
    };
    let default = VolumeConfig::new("", "");
    let compress = match device {
        Some(config) => config.compress.code(),
        None => stored.compress.unwrap_or(default.compress.code()),
    };
    let sync = match device {
        Some(config) => config.sync.code(),
        None => stored.sync.unwrap_or(default.sync.code()),
    };
    let number = |of_device: Option<u64>, stored: Option<u64>| of_device.or(stored).unwrap_or(0);
    let iops = number(device.map(|config| config.iops), stored.iops);
    let bandwidth = number(device.map(|config| config.bandwidth), stored.bandwidth);
    let read_only = device.map(|config| config.read_only).or(stored.read_only).unwrap_or(false);
    let values = [
        (Value::Choice(choice_of(compress)), source(given.compress, stored.compress.is_some())),
        (Value::Choice(sync.into()), source(given.sync, stored.sync.is_some())),
        (Value::Count(iops), source(given.iops, stored.iops.is_some())),
        (Value::Size(bandwidth), source(given.bandwidth, stored.bandwidth.is_some())),
        (Value::Size(meta.reserved_bytes), source(false, meta.reserved_bytes > 0)),
        (Value::Switch(read_only), source(given.read_only, stored.read_only.is_some())),
    ];
    let view = |(name, (value, source)): (&str, (Value, PropertySource))| {
        let param = kind().param(name).expect("each property is a parameter");
        PropertyView { name: name.to_owned(), value: param.print(&value), source }
    };
    PROPERTIES.into_iter().zip(values).map(view).collect()
}

/// No parameter was given.
const NONE: Given =
    Given { compress: false, sync: false, iops: false, bandwidth: false, read_only: false };

/// The index of a compression in the parameter's list of words, in which the levels of zstd come
/// after the plain names.
fn choice_of(code: u8) -> usize {
    match Compression::of_code(code) {
        Compression::None => 0,
        Compression::Lz4 => 1,
        Compression::Zstd(level) => usize::from(level) + 2,
    }
}

/// What a request sets.
#[derive(Debug, PartialEq, Eq)]
struct PropertyChange {
    properties: Properties,
    reservation: Option<u64>,
}

/// Checks the properties of a request.
fn parse(given: &BTreeMap<String, String>) -> Result<PropertyChange, YardError> {
    let known = PROPERTIES.join(", ");
    if given.is_empty() {
        let wanted = format!("at least one of {known}");
        return Err(YardError::Missing { field: "properties", wanted });
    }
    let mut spec = DeviceSpec::new(kind(), "v").expect("`v` is a name");
    for (key, value) in given {
        if !PROPERTIES.contains(&key.as_str()) {
            let wanted = format!("one of {known}");
            return Err(YardError::Argument { field: "property", value: shown(key), wanted });
        }
        spec.set_text(key, value).map_err(UriError::from)?;
    }
    let number = |key: &str| spec.is_set(key).then(|| spec.number(key));
    let compress = spec.is_set("compress").then(|| compression(spec.choice("compress")));
    if let Some(compress) = compress {
        // This build may not have it.
        VolumeConfig { compress, ..VolumeConfig::new("/", "v") }.check()?;
    }
    let properties = Properties {
        compress: compress.map(Compression::code),
        sync: spec.is_set("sync").then(|| spec.choice("sync") as u8),
        iops: number("iops"),
        bandwidth: number("bandwidth"),
        read_only: spec.is_set("read_only").then(|| spec.switch("read_only")),
    };
    Ok(PropertyChange { properties, reservation: number("reservation") })
}

/// Sets properties of a volume, all or none. Returns a sentence about it.
pub(crate) fn set(running: &Running, request: &VolumeRequest) -> Result<String, YardError> {
    let PropertyChange { properties, reservation } = parse(&request.properties)?;
    running.set(&request.name, properties, reservation)?;
    let pairs: Vec<String> =
        request.properties.iter().map(|(key, value)| format!("{key}={value}")).collect();
    Ok(format!("set {} of {}", pairs.join(" "), request.name))
}

/// Sets properties of a volume of a pool that is open in a yard. If the clients of its device could
/// not learn of the change, it must have none: the device is opened again.
pub(crate) fn set_in(
    devices: &Devices,
    pool: &Arc<Running>,
    request: &VolumeRequest,
) -> Result<VolumeDone, YardError> {
    let PropertyChange { properties, .. } = parse(&request.properties)?;
    let _setting = pool.setting();
    let Some(entry) = devices.device_of(pool, &request.name) else {
        return work(pool, "set", request);
    };
    let mut spec = entry.spec.clone();
    drop(entry);
    // From now on the property takes effect, also if the device is opened again.
    let is_given = |key: &&String| spec.is_set(key);
    let given: Vec<String> = request.properties.keys().filter(is_given).cloned().collect();
    given.iter().for_each(|key| spec.unset(key));
    let id = pool.pool().find(&request.name)?.meta.id;
    let done = if pool.needs_closing(id, &properties) {
        devices.rework(spec, false, || work(pool, "set", request))?
    } else {
        let done = work(pool, "set", request)?;
        devices.replace_spec(spec);
        done
    };
    if given.is_empty() {
        return Ok(done);
    }
    let given = given.join(", ");
    let done_text = &done.done;
    let text =
        format!("{done_text}; at the next start the device has {given} of its configuration");
    Ok(VolumeDone { done: text, ..done })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::TempDir;
    use crate::uri;

    fn parsed(given: &[(&str, &str)]) -> Result<PropertyChange, String> {
        let given = given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        parse(&given.collect()).map_err(|error| error.to_string())
    }

    #[test]
    fn unknown_properties_and_bad_values_are_refused_by_name() {
        for (given, text) in [
            (
                &[("size", "1G")][..],
                "invalid property `size`: expected one of compress, sync, iops",
            ),
            (&[("iops", "many")], "invalid iops `many`: expected a number from 0"),
            (&[("compress", "zstd:99")], "invalid compress `zstd:99`: expected one of none, lz4"),
            (&[("iops", "5"), ("sync", "never")], "invalid sync `never`: expected one of standard"),
            (&[], "properties is missing"),
        ] {
            let error = parsed(given).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }

    /// Regression: a request waited for those to all pools, also to one whose storage does not
    /// answer.
    #[test]
    fn a_request_for_one_pool_does_not_wait_for_another_pool() {
        let (place, devices) = (TempDir::new().unwrap(), Devices::new());
        for name in ["one", "two"] {
            let path = place.path().join(name);
            let spec = format!("volume:///{name}?size=16M&path={}", path.display());
            devices.add(uri::parse(&spec).unwrap()).unwrap();
        }
        let pool = |name: &str| devices.pool(place.path().join(name).to_str()).unwrap();
        let (one, two) = (pool("one"), pool("two"));
        let request = VolumeRequest {
            name: "two".to_owned(),
            properties: BTreeMap::from([("iops".to_owned(), "500".to_owned())]),
            ..VolumeRequest::default()
        };
        let is_being_set = one.setting();
        set_in(&devices, &two, &request).unwrap();
        drop(is_being_set);
        let id = two.pool().find("two").unwrap().meta.id;
        assert_eq!(two.pool().volumes().properties_of(id).iops, Some(500));
    }

    #[test]
    fn values_are_shown_as_they_are_set() {
        let values = [
            ("compress", "zstd:5"),
            ("sync", "disabled"),
            ("iops", "500"),
            ("bandwidth", "10M"),
            ("reservation", "1G"),
            ("read_only", "1"),
        ];
        let PropertyChange { properties, reservation } = parsed(&values).unwrap();
        let meta = VolumeMeta {
            id: 1,
            name: "v".to_owned(),
            is_snapshot: false,
            origin: 0,
            block_bytes: 4096,
            blocks: 1 << 20,
            guid: 0,
            reserved_bytes: reservation.unwrap(),
            created: 0,
            key: 0,
        };
        let texts = |views: Vec<PropertyView>| -> Vec<(String, String, PropertySource)> {
            views.into_iter().map(|it| (it.name, it.value, it.source)).collect()
        };
        let of = |(name, value): (&str, &str), source| (name.to_owned(), value.to_owned(), source);
        let wanted = values.map(|pair| of(pair, PropertySource::Pool));
        assert_eq!(texts(views(&meta, &properties, None)), wanted);
        let defaults = [
            ("compress", "lz4"),
            ("sync", "standard"),
            ("iops", "0"),
            ("bandwidth", "0"),
            ("reservation", "0"),
            ("read_only", "0"),
        ];
        let wanted = defaults.map(|pair| of(pair, PropertySource::Default));
        let plain = VolumeMeta { reserved_bytes: 0, ..meta.clone() };
        assert_eq!(texts(views(&plain, &Properties::default(), None)), wanted);
        let config = VolumeConfig { iops: 7, ..VolumeConfig::new("/p", "v") };
        let shown = texts(views(&meta, &properties, Some(&config)));
        assert_eq!(shown[2], of(("iops", "7"), PropertySource::Device));
        assert_eq!(shown[4], of(("reservation", "1G"), PropertySource::Pool));
        let snapshot = VolumeMeta { is_snapshot: true, ..meta };
        assert_eq!(views(&snapshot, &properties, None), []);
    }
}

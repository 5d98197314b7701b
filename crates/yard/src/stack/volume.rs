//! Durable volumes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockyard_store::remote::{Acknowledge, MAX_LAG, RemoteParameters, is_remote};
use blockyard_store::{Commit, StoreError, StoreKind};
use blockyard_volume::config::{Given, ZSTD_LEVEL};
use blockyard_volume::{
    Compression, Running, SecretFile, SyncMode, Volume, VolumeConfig, VolumeError,
};

use super::{Conventional, Made, TakeOver, as_given, with_delay};
use crate::error::StackError;
use crate::param::shown;
use crate::paths;
use crate::scrubs::parse_schedule;
use crate::spec::DeviceSpec;

/// Opens the device.
pub(super) fn open(spec: &DeviceSpec, take_over: TakeOver) -> Result<Made, StackError> {
    let opened = config(spec).and_then(|mut config| {
        config.remote.take_over = take_over == TakeOver::Wanted;
        Volume::open_provisional(config, blockyard_volume::Options::default())
    });
    let volume = opened.map_err(|error| refused(spec, error))?;
    let (pool, provisional) = (Some(Arc::clone(volume.running())), volume.provisional().clone());
    if spec.is_set("resync_rate") {
        volume.running().set_resync_rate(spec.number("resync_rate"));
    }
    let (mark, id) = volume.identity();
    let identity = format!("{}/{id}", pool_identity(mark));
    let disk = with_delay::<Conventional, _>(spec, volume)?;
    Ok(Made { pool, provisional, identity, ..Made::without_files(disk) })
}

/// The identity of a pool: what the identity of its volumes begins with.
pub(crate) fn pool_identity(mark: u64) -> String {
    format!("{mark:016x}")
}

/// The identity of an existing pool, which another process may have open.
pub(super) fn existing_pool(spec: &DeviceSpec) -> Result<String, StackError> {
    let mark = config(spec).and_then(|config| Volume::existing_pool(&config));
    mark.map(pool_identity).map_err(|error| refused(spec, error))
}

/// Checks that the file which the line of an open device names has the secret of its volume.
///
/// # Errors
/// If the file cannot be read, or has another secret.
pub(crate) fn check_secret(spec: &DeviceSpec, running: &Running) -> Result<(), StackError> {
    let checked = secret(spec).and_then(|file| {
        let meta = running.pool().find(spec.name())?.meta.clone();
        file.map_or(Ok(()), |file| running.pool().check_secret(&meta, &file))
    });
    checked.map_err(|error| refused(spec, error))
}

/// Checks that the parameters do not conflict, without accessing the pool.
pub(super) fn check(spec: &DeviceSpec) -> Result<Vec<String>, StackError> {
    config(spec).and_then(|config| config.check()).map_err(|error| refused(spec, error))?;
    Ok(Vec::new())
}

fn refused(spec: &DeviceSpec, error: VolumeError) -> StackError {
    let error = match error {
        VolumeError::Invalid { field, value, wanted }
        | VolumeError::Store(StoreError::Invalid { field, value, wanted }) => {
            StackError::Invalid { field, value, wanted }
        }
        error @ VolumeError::NoSize { .. } => {
            StackError::Missing { field: "size", message: error.to_string() }
        }
        other => StackError::Volume(other),
    };
    as_given(spec, error)
}

/// The pool's directory; by default one with the volume's name in the state directory.
pub(crate) fn pool_path(spec: &DeviceSpec) -> PathBuf {
    let given = spec.text("path").map(PathBuf::from);
    given.unwrap_or_else(|| paths::state_dir().join(spec.name()))
}

/// The path and the length of the lease of the pool of a volume, if an object store has it.
pub(crate) fn remote_pool(spec: &DeviceSpec) -> Option<(String, Duration)> {
    spec.kind().param("lease").ok()?;
    let path = spec.text("path").filter(|path| is_remote(Path::new(path)))?;
    Some((path, Duration::from_millis(spec.number("lease"))))
}

/// The parameters that all volumes of a pool in an object store share. For each: its name; its
/// value, if it is given and not the default; and what a pool has that is opened with it.
pub(crate) fn shared_parameters(spec: &DeviceSpec) -> [(&'static str, Option<String>, u64); 4] {
    let is_local = spec.choice("ack") == 2;
    let of = |field: &'static str, default: u64| {
        let given = spec.given().find(|(param, _)| param.name == field);
        let given = given.filter(|(param, value)| **value != param.default_value());
        let number = match field {
            "ack" => u64::from(is_local),
            _ => Some(spec.number(field)).filter(|number| *number > 0).unwrap_or(default),
        };
        (field, given.map(|(param, value)| param.print(value)), number)
    };
    let (bytes, ms) = if is_local { MAX_LAG } else { (0, 0) };
    [of("ack", 0), of("max_lag", bytes), of("max_lag_time", ms), of("lease", 0)]
}

/// The commit mode, if it is given.
fn commit(spec: &DeviceSpec) -> Result<Option<Commit>, VolumeError> {
    let Some(text) = spec.text("commit") else { return Ok(None) };
    match Commit::parse(&text) {
        Some(commit) => Ok(Some(commit)),
        None => Err(VolumeError::Invalid {
            field: "commit",
            value: text,
            wanted: "`group`, or `taskq:N` with 1 to 256 workers".to_owned(),
        }),
    }
}

fn config(spec: &DeviceSpec) -> Result<VolumeConfig, VolumeError> {
    let scrub = spec.text("scrub").unwrap_or_default();
    parse_schedule(&scrub).map_err(|wanted| VolumeError::Invalid {
        field: "scrub",
        value: shown(&scrub),
        wanted: wanted.to_owned(),
    })?;
    Ok(VolumeConfig {
        path: pool_path(spec),
        path2: spec.text("path2").map(PathBuf::from),
        copies: spec.number("copies") as u8,
        degraded: spec.switch("degraded"),
        name: spec.name().to_owned(),
        size: spec.number("size"),
        volblocksize: spec.small("volblocksize"),
        compress: compression(spec.choice("compress")),
        sync: [SyncMode::Standard, SyncMode::Always, SyncMode::Disabled][spec.choice("sync")],
        iops: spec.number("iops"),
        bandwidth: spec.number("bandwidth"),
        read_only: spec.switch("read_only"),
        given: Given {
            compress: spec.is_set("compress"),
            sync: spec.is_set("sync"),
            iops: spec.is_set("iops"),
            bandwidth: spec.is_set("bandwidth"),
            read_only: spec.is_set("read_only"),
        },
        reservation: spec.number("reservation"),
        map_cache: spec.number("map_cache"),
        commit: commit(spec)?,
        store: [None, Some(StoreKind::Uring), Some(StoreKind::Threads)][spec.choice("store")],
        remote: RemoteParameters {
            cache: spec.text("cache").map(PathBuf::from),
            cache_bytes: spec.number("cache_size"),
            capacity_bytes: spec.number("pool_size"),
            acknowledge: [None, Some(Acknowledge::Object), Some(Acknowledge::Local)]
                [spec.choice("ack")],
            max_lag_bytes: spec.number("max_lag"),
            max_lag_ms: spec.number("max_lag_time"),
            lease_ms: Some(spec.number("lease")),
            take_over: false,
        },
        secret: secret(spec)?,
    })
}

/// The file with the secret of an encrypted volume, if one is given.
fn secret(spec: &DeviceSpec) -> Result<Option<SecretFile>, VolumeError> {
    let file = |field| spec.text(field).map(PathBuf::from);
    match (file("key_file"), file("passphrase_file")) {
        (Some(key), Some(_)) => Err(VolumeError::Invalid {
            field: "key_file",
            value: key.display().to_string(),
            wanted: "either key_file or passphrase_file".to_owned(),
        }),
        (Some(path), None) => Ok(Some(SecretFile::Key(path))),
        (None, path) => Ok(path.map(SecretFile::Passphrase)),
    }
}

/// The compression of a choice's index in the table of parameters: the levels of zstd come after
/// the plain names.
pub(crate) fn compression(choice: usize) -> Compression {
    match choice {
        0 => Compression::None,
        1 => Compression::Lz4,
        2 => Compression::Zstd(ZSTD_LEVEL),
        level => Compression::Zstd(level as u8 - 2),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{check, open};
    use crate::paths::TempDir;
    use crate::uri;

    #[test]
    fn conflicting_parameters_are_refused_by_field() {
        let pool = TempDir::new().unwrap();
        let path = pool.path().join("pool");
        let odd = uri::parse("volume:///v?path=/p&size=100001k").unwrap();
        let error = check(&odd).unwrap_err().to_string();
        assert!(error.starts_with("invalid size `100001k`: expected a multiple of"), "{error}");
        let spec = uri::parse("volume:///v?path=/p&size=1G&scrub=yearly").unwrap();
        let error = check(&spec).unwrap_err().to_string();
        assert!(error.starts_with("invalid scrub `yearly`: expected never, daily"), "{error}");
        for text in ["taskq:0", "taskq:257", "serial"] {
            let spec = uri::parse(&format!("volume:///v?path=/p&size=1G&commit={text}")).unwrap();
            let error = check(&spec).unwrap_err().to_string();
            let begin = format!("invalid commit `{text}`: expected `group`, or `taskq:N`");
            assert!(error.starts_with(&begin), "{error}");
        }
        let spec = |query: &str| {
            uri::parse(&format!("volume:///v?path={}{query}", path.display())).unwrap()
        };
        let refused = |query: &str| match open(&spec(query)) {
            Err(error) => (error.field(), error.to_string()),
            Ok(_) => panic!("{query} was made"),
        };
        assert_eq!(refused("").0, "size");
        let made = open(&spec("&size=1G&volblocksize=8k")).unwrap();
        assert_eq!(made.disk.geometry().len_bytes(), 1 << 30);
        assert_eq!(made.disk.geometry().physical_block_bytes, 8192);
        let (field, text) = refused("&size=1G");
        assert_eq!((field, text.as_str()), ("path", "`v` is a device of this process already"));
        drop(made);
        let (field, text) = refused("&size=2G");
        assert!(field == "size" && text.starts_with("invalid size `2G`"), "{text}");
        assert_eq!(open(&spec("")).unwrap().disk.geometry().len_bytes(), 1 << 30);
    }

    /// Connections sleep on the volume's descriptor, without which they would poll. Every layer
    /// above the volume must pass it on.
    #[test]
    fn a_layer_above_a_volume_passes_its_descriptor_on() {
        let pool = TempDir::new().unwrap();
        let path = pool.path().join("pool");
        for query in ["", "&delay_nsec=1000", "&trace=/dev/null", "&scheduler=mq-deadline"] {
            let text = format!("volume:///v?path={}&size=1G{query}", path.display());
            let made = open(&uri::parse(&text).unwrap()).unwrap();
            let mut channel = made.disk.open().unwrap();
            assert!(channel.descriptor().is_some(), "{text}");
            assert!(channel.may_sleep(), "nothing is in flight: {text}");
        }
    }

    /// The bug: a second volume silently got the pool parameters of the first one.
    #[test]
    fn volumes_of_a_pool_that_want_it_otherwise_are_refused() {
        let pool = TempDir::new().unwrap();
        let path = pool.path().join("pool");
        let of = |name: &str, query: &str| {
            let path = path.display();
            open(&uri::parse(&format!("volume:///{name}?path={path}&size=1G{query}")).unwrap())
        };
        let first = of("first", "&commit=taskq:3&store=threads").unwrap();
        for (query, field, value, is) in [
            ("&commit=group", "commit", "group", "taskq:3"),
            ("&commit=taskq:4", "commit", "taskq:4", "taskq:3"),
            ("&store=uring", "store", "uring", "threads"),
        ] {
            let Err(error) = of("second", query) else { panic!("{query} was made") };
            let begin = format!("invalid {field} `{value}`: expected `{is}`, as `");
            assert!(error.field() == field && error.to_string().starts_with(&begin), "{error}");
        }
        for query in ["&commit=taskq:3&store=threads", "&store=auto", ""] {
            drop(of("second", query).unwrap());
        }
        drop(first);
        drop(of("second", "&commit=group").unwrap());
    }
}

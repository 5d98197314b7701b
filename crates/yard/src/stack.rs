//! From a [`DeviceSpec`] to a [`Disk`]: the only file that knows every type of device.
//!
//! Each step matches one choice and calls the next with one more type, so that the code grows with
//! the sum of the choices and not with their product:
//!
//! ```text
//! kind ▸ delay ▸ error injector and trace ▸ scheduler ▸ gate ▸ Arc<dyn Disk>
//! ```
#![allow(clippy::disallowed_types)] // A device is opened on the control plane.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use blockyard_core::channel::ChannelConfig;
use blockyard_core::middleware::{Delayed, Faulty};
use blockyard_core::provisional::Provisional;
use blockyard_core::sched::shared::Scheduled;
use blockyard_core::zone::gate::{GateMode, Gates, Ungated, ZoneWritePlugs};
use blockyard_core::zone::{AtomicZoneSet, ZoneSet};
use blockyard_core::{Composed, Device, Disk};
use blockyard_file::FileStatus;
use blockyard_null::{IrqMode, NullConfig};
use blockyard_ram::{Ram, RamConfig};
use blockyard_volume::Running;
use blockyard_zone_media::{Files, MediaError};

use crate::error::StackError;
use crate::param::ValueForm;
use crate::scheduler::{self, is_tunable};
use crate::spec::DeviceSpec;

mod file;
pub(crate) mod identity;
mod null;
mod ram;
mod smr;
mod trace_file;
mod volume;

pub(crate) use trace_file::trace_title;
pub(crate) use volume::{
    check_secret, compression, pool_identity, pool_path, remote_pool, shared_parameters,
};

use trace_file::TraceFile;

/// An open device, and notes on corrected parameters.
pub struct Made {
    /// The device.
    pub disk: Arc<dyn Disk>,
    /// A sentence for each parameter that was corrected.
    pub notes: Vec<String>,
    /// The RAM disk, if the device is one, for operations that only RAM disks have.
    pub ram: Option<Arc<Ram>>,
    /// The pool that the device is in, if it is a volume.
    pub pool: Option<Arc<Running>>,
    /// How the device accesses its file, if it is a `file` device.
    pub file: Option<FileStatus>,
    /// The files that keep the data and zones of the device, if it is zoned and has such files.
    pub zone_files: Option<Weak<Files>>,
    /// Whether what this opening made on disk stays when the device is closed.
    pub provisional: Provisional,
    /// What tells the data of this device from those of one that was made again at the same place;
    /// empty if they have no identity.
    pub identity: String,
    /// The trace file, until `keep` is called: until then it has the trace of an earlier device.
    trace: Mutex<Option<TraceFile>>,
}

impl Made {
    /// A device that keeps nothing on disk.
    pub fn without_files(disk: Arc<dyn Disk>) -> Made {
        Made {
            disk,
            notes: Vec::new(),
            ram: None,
            pool: None,
            file: None,
            zone_files: None,
            provisional: Provisional::kept(),
            identity: String::new(),
            trace: Mutex::new(None),
        }
    }

    /// The device in place of which its users get `disk`, a wrapper of it.
    #[must_use]
    pub fn with_disk(self, disk: Arc<dyn Disk>) -> Made {
        Made { disk, ..self }
    }

    /// Keeps what this opening made on disk, and begins the trace. Called once, before the first
    /// I/O: until then a refused opening has changed nothing.
    pub(crate) fn keep(&self) {
        self.provisional.keep();
        let trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner).take();
        trace.into_iter().for_each(|trace| trace.begin(&self.disk));
    }
}

/// The error with a size as it was given, instead of in bytes.
fn as_given(spec: &DeviceSpec, error: StackError) -> StackError {
    let StackError::Invalid { field, wanted, value } = error else { return error };
    StackError::Invalid { field, value: given_as(spec, field).unwrap_or(value), wanted }
}

/// A size as it was given; `None` if the parameter is no size, or was not given.
fn given_as(spec: &DeviceSpec, field: &str) -> Option<String> {
    let (param, given) = spec.given().find(|(param, _)| param.name == field)?;
    matches!(param.form, ValueForm::Size { .. }).then(|| param.print(given))
}

/// A note for each given tunable of a scheduler that the device does not use yet.
fn untuned(spec: &DeviceSpec) -> impl Iterator<Item = String> {
    let given = spec
        .given()
        .filter(|(param, value)| is_tunable(param.name) && **value != param.default_value());
    let is_none = spec.choice("scheduler") == 0;
    let notes =
        given.map(|(param, _)| format!("{}: no effect while the scheduler is none", param.name));
    notes.filter(move |_| is_none)
}

/// Whether a pool in an object store is taken over from a machine that may have it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TakeOver {
    /// Such a pool is refused.
    Refused,
    /// The daemon serves the pool.
    Wanted,
}

/// Opens the device for a command. A pool in an object store is refused, because the daemon of
/// another machine may have it open.
///
/// # Errors
/// If its parameters conflict, or the system refuses an operation that they need. Then nothing that
/// this made on disk is left.
pub fn open(spec: &DeviceSpec) -> Result<Made, StackError> {
    open_with_zones::<AtomicZoneSet>(spec)
}

/// Opens the device for the daemon, which takes over a pool in an object store.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_to_serve(spec: &DeviceSpec) -> Result<Made, StackError> {
    let made = open_provisional(spec)?;
    made.keep();
    Ok(made)
}

/// Opens the device for the daemon, as [`open_to_serve`]. What this makes on disk is removed when
/// the device is closed, unless the caller calls [`Made::keep`].
///
/// # Errors
/// As [`open`].
pub(crate) fn open_provisional(spec: &DeviceSpec) -> Result<Made, StackError> {
    open_with::<AtomicZoneSet>(spec, TakeOver::Wanted)
}

/// Opens the device with zones of type `Z`, to compare ways of locking them.
///
/// # Errors
/// As [`open`].
pub fn open_with_zones<Z: ZoneSet>(spec: &DeviceSpec) -> Result<Made, StackError> {
    let made = open_with::<Z>(spec, TakeOver::Refused)?;
    made.keep();
    Ok(made)
}

fn open_with<Z: ZoneSet>(spec: &DeviceSpec, take_over: TakeOver) -> Result<Made, StackError> {
    let mut made = match spec.kind().name {
        "null" => null::open::<Z>(spec)?,
        "smr" => smr::open(spec)?,
        "ram" => ram::open(spec)?,
        "volume" => volume::open(spec, take_over)?,
        "file" => file::open(spec)?,
        other => unreachable!("the table has the kind `{other}`, and nothing makes it"),
    };
    made.notes.extend(untuned(spec));
    let trace = spec.text("trace").map(|path| TraceFile::open(&path)).transpose()?;
    made.trace = Mutex::new(trace);
    Ok(made)
}

/// A disk over a device that the caller has opened from this specification, with all layers above
/// it that the product's own has.
///
/// # Errors
/// As [`open`].
pub fn over<D: Device>(spec: &DeviceSpec, device: D) -> Result<Arc<dyn Disk>, StackError> {
    let trace = spec.text("trace").map(|path| TraceFile::open(&path)).transpose()?;
    let disk = with_delay::<Zoned, _>(spec, device)?;
    trace.into_iter().for_each(|trace| trace.begin(&disk));
    Ok(disk)
}

/// Checks that the parameters do not conflict, without creating files.
///
/// # Errors
/// As [`open`], except for files that could not be written.
pub fn check(spec: &DeviceSpec) -> Result<Vec<String>, StackError> {
    let mut notes = match spec.kind().name {
        "smr" => smr::check(spec)?,
        "ram" => ram::check(spec)?,
        "volume" => volume::check(spec)?,
        "file" => file::check(spec)?,
        _ => null::check::<AtomicZoneSet>(spec)?,
    };
    notes.extend(untuned(spec));
    Ok(notes)
}

/// The refusal of a directory for the data and zones of a device.
fn backing_refused(error: MediaError) -> StackError {
    let (field, message) = ("backing", format!("backing: {error}"));
    match error {
        MediaError::InUse { .. } => StackError::InUse { field, message },
        _ => StackError::Refused { field, message },
    }
}

/// Whether devices of a kind can be zoned. A kind that cannot compiles no layers for zones.
trait Zones {
    /// Puts the layers above the fault injector.
    fn finish<D: Device>(spec: &DeviceSpec, device: D) -> Result<Arc<dyn Disk>, StackError>;
}

/// The devices may be zoned.
struct Zoned;

impl Zones for Zoned {
    fn finish<D: Device>(spec: &DeviceSpec, device: D) -> Result<Arc<dyn Disk>, StackError> {
        with_scheduler(spec, device)
    }
}

/// The devices are not zoned.
struct Conventional;

impl Zones for Conventional {
    fn finish<D: Device>(spec: &DeviceSpec, device: D) -> Result<Arc<dyn Disk>, StackError> {
        let depth = device.limits().queue_depth;
        let device = scheduled(spec, device)?;
        Ok(composed(spec, device, Ungated, depth))
    }
}

fn with_delay<Z: Zones, D: Device>(
    spec: &DeviceSpec,
    device: D,
) -> Result<Arc<dyn Disk>, StackError> {
    // The fault injector, which records traces, is above the delay, so that a trace shows it.
    match spec.number("delay_nsec") {
        0 => with_faults::<Z, _>(spec, device),
        delay_ns => with_faults::<Z, _>(spec, Delayed::new(device, delay_ns)),
    }
}

fn with_faults<Z: Zones, D: Device>(
    spec: &DeviceSpec,
    device: D,
) -> Result<Arc<dyn Disk>, StackError> {
    Z::finish(spec, Faulty::new(device, seed(spec.name())))
}

/// Puts the device under a scheduler that can be switched on and off, unless that would break the
/// order of writes above it. If only the device keeps the writes to a zone in order, a scheduler
/// above it would reorder them; then a scheduler must be requested when the device is opened.
fn with_scheduler<D: Device>(spec: &DeviceSpec, device: D) -> Result<Arc<dyn Disk>, StackError> {
    let depth = device.limits().queue_depth;
    let is_zoned = device.geometry().zones.is_some();
    let is_asked = spec.choice("scheduler") != 0;
    if is_zoned && !is_asked && gate_mode(spec, &device)? == GateMode::Pipeline {
        return Ok(composed(spec, Arc::new(device), Ungated, depth));
    }
    with_gate(spec, scheduled(spec, device)?, depth)
}

/// The device under a scheduler, which is active if it was requested.
fn scheduled<D: Device>(spec: &DeviceSpec, device: D) -> Result<Arc<Scheduled<D>>, StackError> {
    let scheduled = Scheduled::new(device, false).map_err(|error| StackError::Refused {
        field: "scheduler",
        message: format!("scheduler: {error}"),
    })?;
    scheduler::begin(spec, &scheduled)?;
    Ok(Arc::new(scheduled))
}

/// The mode of the zone write plug; `auto` depends on the device.
fn gate_mode<D: Device>(spec: &DeviceSpec, device: &D) -> Result<GateMode, StackError> {
    if device.geometry().zones.is_none() {
        return Ok(GateMode::Pipeline);
    }
    let limits = device.limits();
    let why = match (limits.ordered, limits.zone_append_sectors_max) {
        (false, _) if spec.choice("scheduler") != 0 => {
            Some("the scheduler does not keep the order of writes")
        }
        (false, _) => Some("the device does not keep the order of writes"),
        (true, 0) => Some("the device has no append of its own, and what it is made of needs that"),
        (true, _) => None,
    };
    match (spec.choice("gate"), why) {
        (1, Some(why)) => Err(StackError::Invalid {
            field: "gate",
            value: "pipeline".to_owned(),
            wanted: format!("plug: {why}"),
        }),
        (0 | 1, None) => Ok(GateMode::Pipeline),
        _ => Ok(GateMode::ZoneWritePlug),
    }
}

fn with_gate<D: Device>(
    spec: &DeviceSpec,
    device: Arc<D>,
    depth: u16,
) -> Result<Arc<dyn Disk>, StackError> {
    if gate_mode(spec, &*device)? == GateMode::Pipeline {
        return Ok(composed(spec, device, Ungated, depth));
    }
    let gates = ZoneWritePlugs::new(Arc::clone(&device)).map_err(|error| StackError::Refused {
        field: "zone_size",
        message: format!("zone_size: {error}"),
    })?;
    Ok(match gates {
        Some(gates) => composed(spec, device, gates, depth),
        None => composed(spec, device, Ungated, depth),
    })
}

/// The disk. Each of its channels has room for twice the device's own depth, so that the plug has
/// requests to merge while the device is busy.
fn composed<D: Device, W: Gates>(
    spec: &DeviceSpec,
    device: Arc<D>,
    gates: W,
    depth: u16,
) -> Arc<dyn Disk> {
    let (name, kind) = (spec.name().to_owned(), spec.kind().name);
    let config = ChannelConfig { depth: 2 * depth.clamp(128, 16_384) };
    let disk = Composed::new(name, kind, device, config).with_gates(gates);
    if spec.switch("read_only") { Arc::new(disk.read_only()) } else { Arc::new(disk) }
}

/// The seed of the fault injector, equal for equal names: FNV-1a.
fn seed(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The configuration of a RAM disk from its specification.
///
/// # Errors
/// If a value is invalid, or a file that it names cannot be read.
pub fn ram_config(spec: &DeviceSpec) -> Result<RamConfig, StackError> {
    ram::config(spec)
}

/// The configuration of a null device from its specification.
///
/// # Errors
/// If a value is invalid.
pub fn null_config(spec: &DeviceSpec) -> Result<NullConfig, StackError> {
    let irqmode = [IrqMode::None, IrqMode::Softirq, IrqMode::Timer][spec.choice("irqmode")];
    let queues = spec.small("submit_queues");
    Ok(NullConfig {
        size: spec.number("size"),
        bs: spec.small("bs"),
        max_sectors: spec.small("max_sectors"),
        submit_queues: (queues != 0).then_some(queues),
        hw_queue_depth: u16::try_from(spec.small("hw_queue_depth"))
            .expect("the table bounds it by 32768"),
        irqmode,
        completion_nsec: spec.number("completion_nsec"),
        memory_backed: spec.switch("memory_backed"),
        discard: spec.switch("discard"),
        fua: spec.switch("fua"),
        cache_size: spec.number("cache_size"),
        mbps: spec.small("mbps"),
        zoned: spec.switch("zoned"),
        zone_size: spec.number("zone_size"),
        zone_capacity: spec.number("zone_capacity"),
        zone_nr_conv: spec.small("zone_nr_conv"),
        zone_max_open: spec.small("zone_max_open"),
        zone_max_active: spec.small("zone_max_active"),
        zone_append_max_sectors: spec.small("zone_append_max_sectors"),
        zone_full: spec.switch("zone_full"),
        badblocks: spec.text("badblocks").unwrap_or_default(),
        badblocks_once: spec.switch("badblocks_once"),
        badblocks_partial_io: spec.switch("badblocks_partial_io"),
        timeout: fault_attr(spec, "timeout")?,
        requeue: fault_attr(spec, "requeue")?,
        request_timeout_ms: spec.number("request_timeout_ms"),
    })
}

fn fault_attr(
    spec: &DeviceSpec,
    field: &'static str,
) -> Result<Option<blockyard_null::FaultAttr>, StackError> {
    spec.text(field)
        .map(|value| value.parse().map_err(|wanted| StackError::Invalid { field, value, wanted }))
        .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{TEMPLATE, parse};
    use crate::param::{DeviceKind, KINDS};
    use crate::paths::TempDir;
    use crate::uri;
    use blockyard_core::zone::gate::GateView;

    fn refused(uri: &str) -> String {
        match open(&uri::parse(uri).unwrap()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{uri} was made"),
        }
    }

    /// A specification of each kind; a volume needs a pool and a size, and a file a path.
    fn example(kind: &'static DeviceKind, place: &TempDir) -> DeviceSpec {
        let mut spec = DeviceSpec::new(kind, "d").unwrap();
        if kind.name == "volume" {
            let path = place.path().join("pool");
            spec.set_text("path", &path.display().to_string()).unwrap();
            spec.set_text("size", "1G").unwrap();
        }
        if kind.name == "file" {
            let path = place.path().join("image");
            std::fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).unwrap();
            spec.set_text("path", &path.display().to_string()).unwrap();
        }
        spec
    }

    #[test]
    fn every_kind_of_the_table_is_made() {
        let pool = TempDir::new().unwrap();
        for kind in KINDS {
            let spec = example(kind, &pool);
            let made = open(&spec).unwrap();
            assert_eq!((made.disk.name(), made.disk.kind()), ("d", kind.name));
            assert!(made.disk.open().is_ok());
        }
    }

    #[test]
    fn the_table_has_the_defaults_of_the_device() {
        let spec = DeviceSpec::new(DeviceKind::find("null").unwrap(), "d").unwrap();
        assert_eq!(null_config(&spec).unwrap(), NullConfig::default());
    }

    #[test]
    fn the_default_yard_is_made_without_corrections() {
        let state = TempDir::new().unwrap();
        for mut spec in parse(TEMPLATE).unwrap().devices {
            if spec.kind().name == "volume" {
                let pool = state.path().join(spec.name());
                spec.set_text("path", &pool.display().to_string()).unwrap();
            }
            let made = open(&spec).unwrap();
            assert_eq!(made.notes, Vec::<String>::new());
            let zoned = match spec.kind().name {
                "null" => spec.switch("zoned"),
                kind => kind == "smr",
            };
            assert_eq!(made.disk.geometry().zones.is_some(), zoned);
        }
    }

    #[test]
    fn conflicting_parameters_are_refused_by_field() {
        let error = refused("null:///d?zoned=1&zone_size=3M");
        assert!(error.starts_with("invalid zone_size `3M`"), "{error}");
        let error = refused("null:///d?timeout=1,2");
        assert!(error.starts_with("invalid timeout `1,2`"), "{error}");
        let error = refused("null:///d?trace=/no/such/place");
        assert!(error.starts_with("trace: `/no/such/place` cannot be written"), "{error}");
    }

    #[test]
    fn a_gate_is_there_when_it_is_needed_or_asked_for() {
        let gate = |query: &str| {
            let uri = format!("null:///d?size=1G&{query}");
            open(&uri::parse(&uri).unwrap()).unwrap().disk.gate()
        };
        let view = |mode, emulates_append| Some(GateView { mode, emulates_append });
        let zoned = "zoned=1&zone_size=1M";
        assert_eq!(gate("zoned=0"), None);
        assert_eq!(gate(zoned), view(GateMode::Pipeline, false));
        assert_eq!(gate(&format!("{zoned}&gate=pipeline")), view(GateMode::Pipeline, false));
        assert_eq!(gate(&format!("{zoned}&gate=plug")), view(GateMode::ZoneWritePlug, false));
        let appendless = "zoned=1&zone_size=1M&zone_append_max_sectors=0";
        assert_eq!(gate(appendless), view(GateMode::ZoneWritePlug, true));
        let error = refused(&format!("null:///d?size=1G&{appendless}&gate=pipeline"));
        assert!(error.starts_with("invalid gate `pipeline`: expected plug"), "{error}");
        let error = refused("null:///d?size=8P&zoned=1&zone_size=4T&zone_append_max_sectors=0");
        assert!(
            error.starts_with("zone_size: zones of 8589934592 sectors are too long"),
            "{error}"
        );
        assert_eq!(
            check(&uri::parse("null:///d?gate=plug").unwrap()).unwrap(),
            ["gate: ignored without zoned=1"]
        );
    }

    #[test]
    fn a_parameter_without_effect_is_reported() {
        for (query, want) in [
            ("zone_size=1M", "zone_size: ignored without zoned=1"),
            ("completion_nsec=5", "completion_nsec: ignored without irqmode=timer"),
            ("cache_size=1M", "cache_size: ignored without memory_backed"),
            ("fifo_batch=1", "fifo_batch: no effect while the scheduler is none"),
        ] {
            let spec = uri::parse(&format!("null:///d?{query}")).unwrap();
            assert_eq!(open(&spec).unwrap().notes, [want]);
            assert_eq!(check(&spec).unwrap(), [want]);
        }
        let uri = "null:///d?irqmode=timer&completion_nsec=5&zoned=1&zone_size=1M";
        assert_eq!(check(&uri::parse(uri).unwrap()).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn the_table_has_the_faults_of_the_device() {
        use blockyard_core::DeviceError::NoSuchFault;
        use blockyard_core::inject::Injection;
        let pool = TempDir::new().unwrap();
        for kind in KINDS {
            let made = open(&example(kind, &pool)).unwrap();
            for fault in kind.faults {
                let injection =
                    Injection::Device { name: (*fault).to_owned(), value: "?".to_owned() };
                let end = made.disk.inject(&injection);
                assert!(!matches!(end, Err(NoSuchFault { .. })), "{fault}");
            }
        }
    }

    #[test]
    fn middleware_is_there_when_it_is_asked_for() {
        let path = std::env::temp_dir().join(format!("blockyard-trace-{}", std::process::id()));
        let uri = format!("null:///d?size=1M&delay_nsec=1&trace={}", path.display());
        let made = open(&uri::parse(&uri).unwrap()).unwrap();
        let mut io = blockyard_core::blocking::Io::new(made.disk.open().unwrap(), 4096);
        io.read(blockyard_core::Sector(8), &mut [0; 4096]).unwrap();
        drop(io);
        drop(made);
        let trace = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let all = blockyard_trace::Operations::new(&trace[..], blockyard_trace::Select::Issue);
        let all: Vec<_> = all.map(|operation| operation.unwrap()).collect();
        assert_eq!((all.len(), all[0].sector.0, all[0].sectors), (1, 8, 8));
    }

    #[test]
    fn a_trace_has_one_writer() {
        // The bug: a second device with the same trace file truncated the first one's trace.
        let temp = TempDir::new().unwrap();
        let path = temp.path().join("trace");
        let spec = |name: &str| {
            uri::parse(&format!("null:///{name}?size=1M&trace={}", path.display())).unwrap()
        };
        let has = |text: &str| {
            let trace = std::fs::read(&path).unwrap();
            trace.windows(text.len()).any(|window| window == text.as_bytes())
        };
        let first = open(&spec("a")).unwrap();
        let error = refused(&spec("b").to_string());
        assert!(error.ends_with("is being written by another device; expected a file of its own"));
        drop(first);
        assert!(has("null device a of 2048 sectors") && has("the device was closed"));
        drop(open_provisional(&spec("b")).unwrap());
        assert!(has("device a"), "the device was not kept");
        drop(open(&spec("b")).unwrap());
        assert!(has("device b") && !has("device a"));
        std::fs::remove_file(&path).unwrap();
        for name in ["a", "b"] {
            assert!(open(&uri::parse(&format!("null:///{name}?trace=/dev/null")).unwrap()).is_ok());
        }
    }

    /// The bug: `trace=/etc/passwd` emptied that file, and a trace was readable to every local
    /// user.
    #[test]
    fn a_trace_replaces_nothing_but_a_trace() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let temp = TempDir::new().unwrap();
        let path = temp.path().join("notes");
        std::fs::write(&path, "precious\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        let uri = format!("null:///d?size=1M&trace={}", path.display());
        let error = refused(&uri);
        assert!(error.contains("holds something else than a trace; remove it"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious\n");
        std::fs::write(&path, "").unwrap();
        drop(open(&uri::parse(&uri).unwrap()).unwrap());
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_read_only_device_says_so_and_refuses() {
        let made = open(&uri::parse("null:///d?size=1M&read_only=1").unwrap()).unwrap();
        assert!(made.disk.limits().read_only);
        let mut io = blockyard_core::blocking::Io::new(made.disk.open().unwrap(), 4096);
        let flags = blockyard_core::Flags::NONE;
        assert!(io.write(blockyard_core::Sector(0), &[0; 4096], flags).is_err());
        assert!(io.read(blockyard_core::Sector(0), &mut [0; 4096]).is_ok());
    }
}

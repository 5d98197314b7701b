//! The errors of the yard, common to the control API, the commands and the log.

use std::path::PathBuf;

use blockyard_core::{DeviceError, Status};
use blockyard_fuse::FileError;
use blockyard_nbd::ExportError;
use blockyard_nbd::ListenError;
use blockyard_nbd::endpoint::missing_right;
use blockyard_nvme::SubsystemError;
use blockyard_ram::RamError;
use blockyard_store::StoreError;
use blockyard_trace::ReplayError;
use blockyard_ublk::UblkError;
use blockyard_volume::VolumeError;
use blockyard_zonefs::{MountError, ZoneFsError};

use crate::inject::InjectError;
use crate::param::{DeviceKind, ParamError, shown};
use crate::spec::NameError;
use crate::uri::UriError;
use crate::zone_image::ZoneImageError;

/// A count with its noun: `1 zone`, `2 zones`.
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// The clients that use a device, as the end of a sentence: `1 client (ADDRESS) and its block
/// file is open`.
fn used(clients: u64, peers: &[String], opens: u64) -> String {
    let clients = match clients {
        0 => None,
        count => Some(format!("it has {}{}", counted(count, "client"), listed(peers))),
    };
    let opens = match opens {
        0 => None,
        1 => Some("its block file is open".to_owned()),
        count => Some(format!("its block file is open {count} times")),
    };
    let parts: Vec<_> = clients.into_iter().chain(opens).collect();
    parts.join(", and ")
}

/// The first few of the clients that use a device.
fn listed(peers: &[String]) -> String {
    const SHOWN_MAX: usize = 3;
    let more = if peers.len() > SHOWN_MAX { ", ..." } else { "" };
    match peers {
        [] => String::new(),
        peers => format!(" ({}{more})", peers[..peers.len().min(SHOWN_MAX)].join(", ")),
    }
}

/// A device that this process had and cannot open again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostDevice {
    /// The name of the device.
    pub name: String,
    /// Why it cannot be opened.
    pub error: String,
}

/// The devices that a failed upgrade has lost, as the end of a sentence.
fn without(lost: &[LostDevice]) -> String {
    let one = |it: &LostDevice| format!("`{}` ({})", it.name, it.error);
    match lost {
        [] => String::new(),
        lost => {
            let all = lost.iter().map(one).collect::<Vec<_>>().join(", ");
            format!(" WITHOUT these devices, which it cannot open again: {all}")
        }
    }
}

/// The reason for which a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StackError {
    /// A parameter conflicts with the others.
    #[error("invalid {field} `{value}`: expected {wanted}")]
    Invalid {
        /// The parameter.
        field: &'static str,
        /// The given value.
        value: String,
        /// What is expected.
        wanted: String,
    },
    /// A parameter that is needed was not given.
    #[error("{message}")]
    Missing {
        /// The parameter.
        field: &'static str,
        /// What it is needed for.
        message: String,
    },
    /// The system refused an operation.
    #[error("{message}")]
    Refused {
        /// The parameter that needs the operation.
        field: &'static str,
        /// The operation and the error.
        message: String,
    },
    /// Another process has the file that a device is made of.
    #[error("{message}")]
    InUse {
        /// The parameter that names the file.
        field: &'static str,
        /// The file, and the process.
        message: String,
    },
    /// The pool of a volume cannot be opened.
    #[error(transparent)]
    Volume(VolumeError),
}

impl StackError {
    /// The invalid parameter.
    pub fn field(&self) -> &'static str {
        match self {
            StackError::Invalid { field, .. }
            | StackError::Missing { field, .. }
            | StackError::Refused { field, .. }
            | StackError::InUse { field, .. } => field,
            StackError::Volume(error) => error.field(),
        }
    }
}

/// Why a text is no scenario of faults, or does not fit the devices of a yard.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct ScenarioError {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong there.
    pub message: String,
}

/// Why a request about injected faults is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultError {
    /// A scenario is invalid.
    #[error("{0}")]
    Scenario(#[from] ScenarioError),
    /// Too many scenarios run.
    #[error("{max} scenarios run, which is the limit; try again when one has ended")]
    Scenarios {
        /// The most scenarios of a yard.
        max: usize,
    },
    /// The fault injector of a device has no rule of this number.
    #[error("`{name}` has no fault rule {id}; `blockyard inject list {name}` lists its rules")]
    NoSuchRule {
        /// The device.
        name: String,
        /// The number.
        id: u64,
    },
}

impl FaultError {
    /// The error's code, for programs.
    fn code(&self) -> &'static str {
        match self {
            FaultError::Scenario(_) => "invalid",
            FaultError::Scenarios { .. } => "overloaded",
            FaultError::NoSuchRule { .. } => "no_such_rule",
        }
    }
}

/// The reason for which the yard refused a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum YardError {
    /// There is no device of this name.
    #[error("there is no device `{name}`{advice}")]
    NoSuchDevice {
        /// The requested name, shortened.
        name: String,
        /// A suggestion: begins with a semicolon, or is empty.
        advice: String,
    },
    /// The name is taken.
    #[error("name: `{name}` is taken already; remove that device first or choose another name")]
    Taken {
        /// The name.
        name: String,
    },
    /// The yard is ending.
    #[error("the yard is ending, and opens no device any more")]
    Ending,
    /// There are too many devices.
    #[error(
        "cannot add a device: {max} devices, the most allowed, exist already; remove one first"
    )]
    Full {
        /// The greatest number of devices.
        max: usize,
    },
    /// The daemon cannot be upgraded while it runs as it does.
    #[error("cannot upgrade: {}", .whys.join("; "))]
    NotUpgradable {
        /// The reasons.
        whys: Vec<String>,
    },
    /// A daemon that is no standby was promoted.
    #[error("cannot promote: this yard is no standby, or it has been promoted already")]
    NotStandby,
    /// An upgrade failed; this process serves on, but without the devices that it has lost.
    #[error(
        "cannot upgrade: {what}; process {pid} serves on{}", without(lost),
        pid = std::process::id()
    )]
    Upgrade {
        /// The reason.
        what: String,
        /// The devices that it cannot open again.
        lost: Vec<LostDevice>,
    },
    /// Clients use the device.
    #[error(
        "cannot remove `{name}`: {}; disconnect and close first, or use --force (`?force=true`), \
         which disconnects them",
        used(*clients, peers, *opens)
    )]
    Busy {
        /// The device.
        name: String,
        /// The number of clients.
        clients: u64,
        /// The clients' addresses, as far as the servers know them.
        peers: Vec<String>,
        /// How many times its file is open.
        opens: u64,
    },
    /// Clients use the device, and could not learn of the change, of its data for example.
    #[error(
        "cannot change `{name}`: {}; disconnect and close first, because clients could not learn \
         of the change",
        used(*clients, &[], *opens)
    )]
    Used {
        /// The device.
        name: String,
        /// The number of clients.
        clients: u64,
        /// How many times its file is open.
        opens: u64,
    },
    /// Other requests have the device open, which the operation would replace.
    #[error("cannot change `{name}`: another request still has it open; try again later")]
    Held {
        /// The device.
        name: String,
    },
    /// Clients use the device, and the operation would change its zones or data.
    #[error(
        "cannot {change} `{name}`: {}; disconnect and close first, or use --force \
         (`\"force\": true`)",
        used(*clients, &[], *opens)
    )]
    ChangesUsed {
        /// The operation, up to the name of the device.
        change: &'static str,
        /// The device.
        name: String,
        /// The number of clients.
        clients: u64,
        /// How many times its file is open.
        opens: u64,
    },
    /// Clients use the device, and a mounted file system needs it for itself.
    #[error(
        "cannot mount `{name}`: {}; disconnect and close first, or use --force \
         (`\"force\": true`)",
        used(*clients, &[], *opens)
    )]
    MountUsed {
        /// The device.
        name: String,
        /// The number of clients.
        clients: u64,
        /// How many times its file is open.
        opens: u64,
    },
    /// The device has a trace.
    #[error("`{name}` is traced already; a device has one trace at a time")]
    Traced {
        /// The device.
        name: String,
    },
    /// The device has no trace.
    #[error("`{name}` is not traced")]
    NotTraced {
        /// The device.
        name: String,
    },
    /// Another request has claimed the device, so that no client that writes is admitted.
    #[error("`{name}` is in use by {by}; try again when that has ended")]
    Claimed {
        /// The device.
        name: String,
        /// What has claimed it.
        by: &'static str,
    },
    /// A trace cannot be replayed.
    #[error(transparent)]
    Replay(ReplayError),
    /// Too many requests wait for the device.
    #[error("`{name}` works on {max} requests already; ask again when one of them is done")]
    Overloaded {
        /// The device.
        name: String,
        /// The most requests that may wait for it.
        max: usize,
    },
    /// Too many replays of traces are in progress on all devices together.
    #[error("{max} replays are in progress, which is the limit; try again when one has ended")]
    Replays {
        /// The most replays of a yard.
        max: usize,
    },
    /// A request about injected faults is refused.
    #[error(transparent)]
    Fault(#[from] FaultError),
    /// The URI is invalid.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// The device could not be opened.
    #[error(transparent)]
    Stack(#[from] StackError),
    /// The fault is invalid.
    #[error(transparent)]
    Inject(#[from] InjectError),
    /// The device has no such fault.
    #[error("`{name}` has no fault `{fault}`; it has {known}{advice}")]
    NoSuchFault {
        /// The device.
        name: String,
        /// The requested fault, shortened.
        fault: String,
        /// The known faults.
        known: String,
        /// A suggestion: begins with a semicolon, or is empty.
        advice: String,
    },
    /// A scheduler has no such parameter.
    #[error("`{name}` is no parameter of a scheduler; there are {known}{advice}")]
    NoSuchTunable {
        /// The requested name, shortened.
        name: String,
        /// The known parameters.
        known: String,
        /// A suggestion: begins with a semicolon, or is empty.
        advice: String,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The export table refused.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The table of block files refused.
    #[error(transparent)]
    File(#[from] FileError),
    /// The table of NVMe subsystems refused.
    #[error(transparent)]
    Subsystem(#[from] SubsystemError),
    /// A listener cannot be started.
    #[error(
        "cannot listen at `{place}`: {source}{}; name another place",
        missing_right(place, source)
    )]
    Listen {
        /// The place.
        place: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The device has a vhost-user socket.
    #[error("`{name}` is served to a hypervisor at {at}; a device has one vhost-user socket")]
    VhostServed {
        /// The device.
        name: String,
        /// The socket.
        at: String,
    },
    /// The device has no vhost-user socket.
    #[error("`{name}` has no vhost-user socket")]
    NoVhost {
        /// The device.
        name: String,
    },
    /// The device executes requests of a hypervisor for too long.
    #[error(
        "cannot change how `{name}` is served to hypervisors: requests of one take too long; try \
         again"
    )]
    VhostBusy {
        /// The device.
        name: String,
    },
    /// A hypervisor uses the device.
    #[error(
        "a hypervisor uses `{name}` at {at}; end it first, or use --force (`?force=true`), which \
         disconnects it"
    )]
    VhostUsed {
        /// The device.
        name: String,
        /// The socket.
        at: String,
    },
    /// The device is a block device of the kernel.
    #[error("`{name}` is {path} already; a device is one block device at most")]
    UblkServed {
        /// The device.
        name: String,
        /// The path of the block device.
        path: String,
    },
    /// A device of this name was removed or could not be opened again, and its block device is
    /// still there.
    #[error(
        "cannot add `{name}`: {path} is still the block device of an earlier device of this name; \
         unmount it, and remove it by `blockyard ublk remove {name}`"
    )]
    UblkLeft {
        /// The device.
        name: String,
        /// The path of the block device.
        path: String,
    },
    /// The device is no block device of the kernel.
    #[error("`{name}` is no block device of the kernel; `blockyard ublk list` lists those")]
    NoUblk {
        /// The device.
        name: String,
    },
    /// Another request makes or removes the block device of the device.
    #[error("cannot change the block device of `{name}`: another request changes it; try again")]
    UblkBusy {
        /// The device.
        name: String,
    },
    /// The kernel does not let the device become larger while it is a block device.
    #[error(
        "cannot resize `{name}` while it is {path}: {source}; unmount the block device, remove it \
         by `blockyard ublk remove {name}`, and add it again after the resize"
    )]
    UblkFixed {
        /// The device.
        name: String,
        /// The path of the block device.
        path: String,
        /// What the kernel lacks.
        source: UblkError,
    },
    /// The device executes requests of its block device for too long.
    #[error(
        "cannot replace the disk of `{name}`: it executes requests of its block device for longer \
         than 5 s; try again"
    )]
    UblkSlow {
        /// The device.
        name: String,
    },
    /// The block device did not take over a device that was opened again.
    #[error(
        "`{name}` was opened again, but {path} keeps its size or fails: {source}; repeat the \
         resize with the same size to try again, or unmount the block device, remove it by \
         `blockyard ublk remove {name}`, and add it again"
    )]
    UblkOutdated {
        /// The device.
        name: String,
        /// The path of the block device.
        path: String,
        /// Why.
        source: UblkError,
    },
    /// The block device is mounted.
    #[error(
        "{path} is mounted or used by another part of the kernel; unmount it first, or use --force \
         (`?force=true`), after which programs get errors"
    )]
    UblkUsed {
        /// The path of the block device.
        path: String,
    },
    /// A socket for a hypervisor cannot be made.
    #[error(transparent)]
    VhostListen(#[from] ListenError),
    /// There is no NVMe listener at this place.
    #[error("there is no NVMe listener at `{place}`; {known}")]
    NoSuchListener {
        /// The requested place, shortened.
        place: String,
        /// The places of the listeners.
        known: String,
    },
    /// Hosts use devices through an NVMe listener.
    #[error(
        "cannot stop the NVMe listener at `{place}`: {} connected; disconnect first, or use \
         --force (`?force=true`), which disconnects them",
        match hosts {
            1 => "1 host is".to_owned(),
            hosts => format!("{hosts} hosts are"),
        }
    )]
    ListenerUsed {
        /// The place.
        place: String,
        /// The number of hosts.
        hosts: u64,
    },
    /// A file system is mounted on the device.
    #[error(
        "`{name}` is mounted at {}; unmount it first",
        dir.as_deref().map_or("the moment".into(), |dir| dir.to_string_lossy())
    )]
    Mounted {
        /// The device.
        name: String,
        /// The mount point; unknown while the mount is in progress.
        dir: Option<PathBuf>,
    },
    /// No file system is mounted on the device.
    #[error("`{name}` is not mounted")]
    NotMounted {
        /// The device.
        name: String,
    },
    /// The file system cannot be opened or made.
    #[error(transparent)]
    ZoneFs(#[from] ZoneFsError),
    /// The file system cannot be mounted or unmounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// A device cannot be a block device of the kernel.
    #[error(transparent)]
    Ublk(#[from] UblkError),
    /// The device has no zones.
    #[error(
        "`{name}` is not a zoned device; `zoned=1` of a null device, or an smr device, makes one"
    )]
    NotZoned {
        /// The device.
        name: String,
    },
    /// The zones of a device cannot be saved or loaded.
    #[error(transparent)]
    ZoneImage(ZoneImageError),
    /// A device is latched, and its clients would not learn of it.
    #[error(
        "`{name}` cannot be opened again: {by} has failed, so completed writes may be lost, and a \
         later flush would succeed; {again}"
    )]
    Latched {
        /// The device.
        name: String,
        /// What has failed.
        by: &'static str,
        /// The way out.
        again: &'static str,
    },
    /// The length of a file cannot be read again.
    #[error("cannot rescan `{name}`: {why}")]
    Rescan {
        /// The device.
        name: String,
        /// The reason, with a way out.
        why: String,
    },
    /// The device is no RAM disk.
    #[error("`{name}` is not a RAM disk; `kind = \"ram\"` makes one")]
    NotRam {
        /// The device.
        name: String,
    },
    /// The RAM disk refused the operation.
    #[error(transparent)]
    Ram(RamError),
    /// The yard has no such pool of volumes open.
    #[error("pool: `{path}` is none that this yard has open; expected one of: {known}")]
    NoSuchPool {
        /// The requested path, shortened.
        path: String,
        /// The open pools.
        known: String,
    },
    /// A pool of volumes refused the operation.
    #[error(transparent)]
    Volume(VolumeError),
    /// An argument of a request is invalid.
    #[error("invalid {field} `{value}`: expected {wanted}")]
    Argument {
        /// The argument.
        field: &'static str,
        /// The value, shortened.
        value: String,
        /// What is expected.
        wanted: String,
    },
    /// An argument that a request needs is missing.
    #[error("{field} is missing: expected {wanted}")]
    Missing {
        /// The argument.
        field: &'static str,
        /// What is expected.
        wanted: String,
    },
    /// A zone operation failed.
    #[error(
        "zone {zone} at sector {sector}: {verb} failed with {status} ({}){reason}; {} done \
         before it",
        status.errno_name(),
        counted(*done, "zone")
    )]
    Zone {
        /// The requested operation.
        verb: &'static str,
        /// The number of the zone that refused.
        zone: u32,
        /// The zone's first sector.
        sector: u64,
        /// The zone's status.
        status: Status,
        /// The reason if it is known: begins with a colon, or is empty.
        reason: String,
        /// The number of zones that were changed before.
        done: u64,
    },
}

/// The code of what a device refused.
fn device_code(error: &DeviceError) -> &'static str {
    match error {
        DeviceError::NoSuchFault { .. } => "no_such_fault",
        DeviceError::OutOfRange { .. } => "out_of_range",
        DeviceError::Gone => "gone",
        DeviceError::Os { .. } => "refused",
        _ => "invalid",
    }
}

/// The code of what a pool of volumes refused for no reason that other operations have too.
fn volume_code(error: &VolumeError) -> &'static str {
    match error {
        VolumeError::NoSuchVolume { .. } | VolumeError::NoBase { .. } => "no_such_volume",
        VolumeError::Exists { .. } => "taken",
        VolumeError::Shrinks { .. } => "needs_force",
        VolumeError::NoSpace => "no_space",
        VolumeError::Locked { .. } => "locked",
        VolumeError::WrongKey { .. } => "wrong_key",
        VolumeError::NotEncrypted { .. } => "not_encrypted",
        VolumeError::NotCopied { .. } => "not_copied",
        VolumeError::KeyChanged { .. } => "key_changed",
        VolumeError::Latched => "latched",
        _ => "volume_failed",
    }
}

impl From<ZoneImageError> for YardError {
    fn from(error: ZoneImageError) -> YardError {
        match error {
            ZoneImageError::NotZoned { name } => YardError::NotZoned { name },
            other => YardError::ZoneImage(other),
        }
    }
}

impl From<RamError> for YardError {
    fn from(error: RamError) -> YardError {
        match error {
            RamError::Invalid { field, value, wanted } => {
                YardError::Argument { field, value, wanted }
            }
            other => YardError::Ram(other),
        }
    }
}

impl From<StoreError> for YardError {
    fn from(error: StoreError) -> YardError {
        VolumeError::from(error).into()
    }
}

impl From<VolumeError> for YardError {
    fn from(error: VolumeError) -> YardError {
        match error {
            VolumeError::Invalid { field, value, wanted }
            | VolumeError::Store(StoreError::Invalid { field, value, wanted }) => {
                YardError::Argument { field, value, wanted }
            }
            other => YardError::Volume(other),
        }
    }
}

impl YardError {
    /// The error for an unknown device `name`; `known` are the names of all devices.
    pub fn no_such_device<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> YardError {
        let advice = crate::suggestion::suggestion(name, known);
        YardError::NoSuchDevice { name: shown(name), advice }
    }

    /// The error for a place at which no NVMe listener is; `known` are the places of all.
    pub(crate) fn no_such_listener(place: &str, known: Vec<String>) -> YardError {
        let known = match known.is_empty() {
            true => "there is none".to_owned(),
            false => format!("expected one of: {}", known.join(", ")),
        };
        YardError::NoSuchListener { place: shown(place), known }
    }

    /// The error for an unknown fault of the device `name`.
    pub fn no_such_fault(name: &str, kind: &DeviceKind, fault: &str) -> YardError {
        let advice = crate::suggestion::suggestion(fault, kind.faults.iter().copied());
        let (fault, known) = (shown(fault), kind.faults.join(", "));
        YardError::NoSuchFault { name: name.to_owned(), fault, known, advice }
    }

    /// The error's code, for programs.
    pub fn code(&self) -> &'static str {
        match self {
            YardError::NoSuchDevice { .. } => "no_such_device",
            YardError::Taken { .. }
            | YardError::VhostServed { .. }
            | YardError::UblkServed { .. }
            | YardError::UblkLeft { .. }
            | YardError::Export(ExportError::Taken { .. }) => "taken",
            YardError::Full { .. } => "full",
            YardError::Listen { .. } | YardError::VhostListen(_) => "listen_failed",
            YardError::NoSuchListener { .. }
            | YardError::NoVhost { .. }
            | YardError::NoUblk { .. } => "no_such_listener",
            YardError::VhostBusy { .. }
            | YardError::UblkBusy { .. }
            | YardError::UblkFixed { .. }
            | YardError::UblkSlow { .. }
            | YardError::UblkUsed { .. }
            | YardError::VhostUsed { .. }
            | YardError::Busy { .. }
            | YardError::Ending
            | YardError::Used { .. }
            | YardError::Held { .. }
            | YardError::ChangesUsed { .. }
            | YardError::Traced { .. }
            | YardError::Claimed { .. }
            | YardError::MountUsed { .. }
            | YardError::ListenerUsed { .. }
            | YardError::Subsystem(_)
            | YardError::Volume(
                VolumeError::Busy { .. } | VolumeError::Store(StoreError::InUse { .. }),
            ) => "busy",
            YardError::NotUpgradable { .. } => "not_upgradable",
            YardError::Upgrade { .. } => "upgrade_failed",
            YardError::NotStandby => "not_standby",
            YardError::NoSuchPool { .. }
            | YardError::Volume(VolumeError::Store(StoreError::NoPool { .. })) => "no_such_pool",
            YardError::ZoneImage(ZoneImageError::NotEmpty { .. }) => "needs_force",
            YardError::Volume(error) => volume_code(error),
            YardError::Overloaded { .. } | YardError::Replays { .. } => "overloaded",
            YardError::Fault(error) => error.code(),
            YardError::Uri(UriError::UnknownKind { .. }) => "unknown_kind",
            YardError::Uri(UriError::Param(ParamError::UnknownKey { .. }))
            | YardError::NoSuchTunable { .. } => "unknown_key",
            YardError::NotZoned { .. } => "not_zoned",
            YardError::NotRam { .. } => "not_ram",
            YardError::Rescan { .. } => "rescan_failed",
            YardError::Latched { .. } => "latched",
            YardError::ZoneImage(_) => "zone_image_failed",
            YardError::Ram(_) => "ram_failed",
            YardError::Mounted { .. } => "mounted",
            YardError::NotMounted { .. } => "not_mounted",
            YardError::NotTraced { .. } | YardError::Replay(_) => "trace_failed",
            YardError::ZoneFs(_) => "zonefs",
            YardError::Mount(_) => "mount_failed",
            YardError::Ublk(_) | YardError::UblkOutdated { .. } => "ublk_failed",
            YardError::Zone { .. } => "zone_operation_failed",
            YardError::NoSuchFault { .. } => "no_such_fault",
            YardError::Device(error) => device_code(error),
            YardError::Stack(
                StackError::Refused { .. } | StackError::InUse { .. } | StackError::Volume(_),
            ) => "refused",
            YardError::Export(_) | YardError::File(_) => "export_failed",
            YardError::Uri(_)
            | YardError::Stack(_)
            | YardError::Inject(_)
            | YardError::Argument { .. }
            | YardError::Missing { .. } => "invalid",
        }
    }

    /// The invalid argument or parameter, and its value, if there is one.
    pub fn blame(&self) -> (Option<String>, Option<String>) {
        if let YardError::Volume(error) = self
            && let Some(name) = name_of_volume(error)
        {
            return (Some("name".to_owned()), Some(name.to_owned()));
        }
        let (field, value): (&str, &str) = match self {
            YardError::NoSuchDevice { name, .. }
            | YardError::Taken { name }
            | YardError::NotZoned { name }
            | YardError::NotRam { name }
            | YardError::Rescan { name, .. }
            | YardError::Latched { name, .. }
            | YardError::Mounted { name, .. }
            | YardError::NotMounted { name }
            | YardError::Busy { name, .. }
            | YardError::Used { name, .. }
            | YardError::Held { name }
            | YardError::VhostServed { name, .. }
            | YardError::NoVhost { name }
            | YardError::UblkServed { name, .. }
            | YardError::UblkLeft { name, .. }
            | YardError::NoUblk { name }
            | YardError::UblkBusy { name }
            | YardError::UblkFixed { name, .. }
            | YardError::UblkSlow { name }
            | YardError::UblkOutdated { name, .. }
            | YardError::VhostBusy { name }
            | YardError::VhostUsed { name, .. }
            | YardError::ChangesUsed { name, .. }
            | YardError::Traced { name }
            | YardError::NotTraced { name }
            | YardError::Claimed { name, .. }
            | YardError::MountUsed { name, .. }
            | YardError::Overloaded { name, .. }
            | YardError::Fault(FaultError::NoSuchRule { name, .. })
            | YardError::Uri(UriError::Name(NameError { name })) => ("name", name),
            Self::Uri(UriError::Param(ParamError::BadValue { key, value, .. })) => (key, value),
            YardError::Uri(UriError::Param(ParamError::UnknownKey { key, .. })) => (key, ""),
            YardError::NoSuchTunable { name, .. } => (name, ""),
            YardError::NoSuchPool { path, .. } => ("pool", path),
            YardError::Listen { place, .. }
            | YardError::NoSuchListener { place, .. }
            | YardError::ListenerUsed { place, .. } => ("place", place),
            YardError::Missing { field, .. } => (field, ""),
            YardError::Uri(UriError::Twice { key }) => (key, ""),
            YardError::Uri(UriError::UnknownKind { kind, .. }) => ("kind", kind),
            YardError::Uri(UriError::Form { uri, .. }) => ("uri", uri),
            YardError::Stack(StackError::Invalid { field, value, .. })
            | YardError::Argument { field, value, .. }
            | YardError::Device(DeviceError::Invalid { field, value, .. }) => (field, value),
            YardError::Stack(
                error @ (StackError::Missing { .. }
                | StackError::Refused { .. }
                | StackError::InUse { .. }
                | StackError::Volume(_)),
            ) => (error.field(), ""),
            YardError::Inject(InjectError { field, value, .. }) => (field, value),
            YardError::ZoneImage(ZoneImageError::Geometry { field, .. }) => (field, ""),
            YardError::NoSuchFault { fault, .. }
            | YardError::Device(DeviceError::NoSuchFault { fault }) => ("fault", fault),
            _ => return self.blame_sector(),
        };
        (Some(field.to_owned()), Some(value.to_owned()).filter(|value| !value.is_empty()))
    }

    /// What is wrong at a sector, and the sector, if the error has one.
    fn blame_sector(&self) -> (Option<String>, Option<String>) {
        match self {
            YardError::Zone { status, sector, .. } => {
                (Some(status.name().to_owned()), Some(sector.to_string()))
            }
            YardError::Device(DeviceError::OutOfRange { sector, .. }) => {
                (Some("from".to_owned()), Some(sector.0.to_string()))
            }
            _ => (None, None),
        }
    }
}

/// The volume that an error is about, if it names one.
fn name_of_volume(error: &VolumeError) -> Option<&str> {
    match error {
        VolumeError::NoSuchVolume { name }
        | VolumeError::Exists { name }
        | VolumeError::Busy { name, .. }
        | VolumeError::NotCopied { name, .. }
        | VolumeError::KeyChanged { name }
        | VolumeError::Locked { name }
        | VolumeError::WrongKey { name }
        | VolumeError::NotEncrypted { name }
        | VolumeError::Shrinks { name, .. } => Some(name),
        _ => None,
    }
}

//! A daemon: devices, NBD servers, block files and the control plane, started and ended in order.

use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use blockyard_fuse::{Mount, MountError, MountOptions};
pub use blockyard_nbd::ServerError;
use blockyard_nbd::endpoint::missing_right;
use blockyard_nbd::{
    ACTIVATED, Adopted, BoundServer, Endpoint, Exports, ListenError, MemoryBudget, Server,
    ServerOptions, TlsConfig, TlsMode, UnixPlace,
};
use blockyard_store::StoreError;
use sd_notify::NotifyState;

use crate::activation;
use crate::api::Control;
use crate::backup::BackupThreads;
use crate::cleanup_registry::CleanupRegistry;
use crate::config;
use crate::control::{ControlError, ControlPlaces, ControlServer, Event};
use crate::devices::Devices;
use crate::error::YardError;
use crate::nvme_listeners::{self, DRAIN, NvmeListeners, NvmeSockets};
use crate::spec::DeviceSpec;
use crate::stack::{self, Made};
use crate::standby::{self, WatchedPool};
use crate::ublk::{self, UblkError, UblkPlace};
use crate::upgrade::Upgrade;
use crate::upgrade::incoming::{Inherited, InheritedDevice, TakeOverError};
use crate::upgrade::message::ListenerKind;
use crate::vhost::{BoundVhost, VhostPlace};

/// Options with endpoints of NVMe.
const NVME: &str = "nvme";
const NVME_DISCOVERY: &str = "nvme-discovery";

/// The options of a daemon.
#[derive(Clone, Debug, Default)]
pub struct DaemonOptions {
    /// The devices.
    pub devices: Vec<DeviceSpec>,
    /// The endpoints of NBD.
    pub nbd: Vec<Endpoint>,
    /// The endpoints of NVMe: TCP ports.
    pub nvme: Vec<Endpoint>,
    /// The endpoints of NVMe discovery alone: TCP ports.
    pub nvme_discovery: Vec<Endpoint>,
    /// The sockets at which hypervisors find devices.
    pub vhost: Vec<VhostPlace>,
    /// The devices that are block devices of the kernel.
    pub ublk: Vec<UblkPlace>,
    /// The access of NVMe hosts.
    pub nvme_access: config::NvmeSettings,
    /// Whether NBD is also served on the sockets that systemd passed.
    pub activated: bool,
    /// The directory where the devices are mounted as files, if there is one.
    pub fuse: Option<PathBuf>,
    /// Whether users other than the daemon's can access those files.
    pub fuse_allow_other: bool,
    /// The control socket; none if `None`.
    pub control: Option<UnixPlace>,
    /// The directories below which requests of the control API may name files.
    pub api_directories: Vec<PathBuf>,
    /// The endpoint for metrics, in addition to the control socket.
    pub metrics: Option<Endpoint>,
    /// The endpoint for the dashboard; none if `None`.
    pub web: Option<Endpoint>,
    /// The file with the token that clients of the dashboard have to show.
    pub web_token_file: Option<PathBuf>,
    /// TLS for NBD.
    pub tls: config::TlsSettings,
    /// The most bytes for the buffers of all NBD connections together; `None` derives it from the
    /// memory that the process may use.
    pub nbd_memory: Option<u64>,
    /// The percentage of the time in which the thread of each ring of a virtual machine may poll.
    pub vhost_poll: u32,
    /// The backup policies.
    pub backups: Vec<config::BackupSettings>,
    /// Whether the daemon is a standby: it opens and serves the devices when it is promoted, or
    /// when the lease of a pool has run out.
    pub standby: bool,
    /// What an earlier process has handed over.
    pub inherited: Option<Arc<Inherited>>,
}

impl DaemonOptions {
    /// Whether a place is one where this daemon listens by a protocol.
    pub fn has_place(&self, kind: ListenerKind, place: &str) -> bool {
        let is_it = |it: Option<String>| it.as_deref() == Some(place);
        match kind {
            ListenerKind::Nbd => self.nbd.iter().any(|it| it.to_string() == place),
            ListenerKind::Control => is_it(self.control.as_ref().map(ToString::to_string)),
            ListenerKind::Metrics => is_it(self.metrics.as_ref().map(ToString::to_string)),
            ListenerKind::Web => is_it(self.web.as_ref().map(ToString::to_string)),
            // Requests may have started it.
            ListenerKind::Nvme | ListenerKind::NvmeDiscovery | ListenerKind::Vhost => true,
        }
    }

    /// The places of the options for a kind of listeners that requests may start too.
    fn places(&self, kind: ListenerKind) -> Vec<String> {
        match kind {
            ListenerKind::Nvme => self.nvme.iter().map(ToString::to_string).collect(),
            ListenerKind::NvmeDiscovery => {
                self.nvme_discovery.iter().map(ToString::to_string).collect()
            }
            ListenerKind::Vhost => self.vhost.iter().map(ToString::to_string).collect(),
            _ => Vec::new(),
        }
    }

    /// Warns of each listener of an earlier process that goes on and is not in the options.
    fn warn_of_others(&self, inherited: &Inherited) {
        for kind in [ListenerKind::Nvme, ListenerKind::NvmeDiscovery, ListenerKind::Vhost] {
            let wanted = self.places(kind);
            for place in inherited.offered(kind).filter(|it| !wanted.iter().any(|of| of == it)) {
                let option = kind.option();
                tracing::warn!(
                    option,
                    place,
                    "the yard goes on listening at a place that the configuration does not have"
                );
            }
        }
    }

    /// Where the control plane listens.
    fn control_places(&self) -> ControlPlaces<'_> {
        ControlPlaces {
            control: self.control.as_ref(),
            metrics: self.metrics.as_ref(),
            web: self.web.as_ref(),
            web_token: self.web_token_file.as_deref(),
        }
    }
}

/// The reason for which a daemon could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// A device could not be opened.
    #[error("device `{name}`: {source}")]
    Device {
        /// The name of the device.
        name: String,
        /// The error.
        source: YardError,
    },
    /// A directory for requests of the control API is invalid.
    #[error(transparent)]
    ApiDirectory(YardError),
    /// The control plane could not start.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// An NBD endpoint cannot be bound.
    #[error(
        "nbd: {0}{advice}",
        advice = match .0 {
            ListenError::Unknown { .. } => "",
            _ => "; --nbd names another place",
        }
    )]
    Place(ListenError),
    /// The NBD server cannot be configured.
    #[error("nbd: {0}")]
    Nbd(ServerError),
    /// An NVMe endpoint cannot be bound, or the NVMe server cannot be started.
    #[error(
        "{option}: {endpoint}: cannot listen: {source}{}; --{option} names another place",
        missing_right(endpoint, source)
    )]
    Nvme {
        /// The option that has the endpoint.
        option: &'static str,
        /// The endpoint.
        endpoint: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The yard refuses an NVMe listener.
    #[error("{option}: {source}")]
    NvmeListener {
        /// The option that has the endpoint.
        option: &'static str,
        /// The reason.
        source: YardError,
    },
    /// A socket for hypervisors cannot be bound.
    #[error("vhost: {0}; --vhost names another place")]
    VhostPlace(ListenError),
    /// A device cannot be served to hypervisors.
    #[error("vhost: invalid device `{device}`: {source}")]
    Vhost {
        /// The device.
        device: String,
        /// The reason.
        source: YardError,
    },
    /// The kernel has no ublk driver for this process.
    #[error("ublk: {0}")]
    UblkMissing(UblkError),
    /// A device cannot be a block device of the kernel.
    #[error("ublk: invalid device `{device}`: {source}")]
    Ublk {
        /// The device.
        device: String,
        /// The reason.
        source: YardError,
    },
    /// The settings of NVMe are invalid.
    #[error("nvme: {0}")]
    NvmeSettings(#[from] config::NvmeSettingsError),
    /// An earlier process keeps what it was to hand over.
    #[error(transparent)]
    TakeOver(#[from] TakeOverError),
    /// Standard input is named twice.
    #[error("nbd: stdio can be served once")]
    StdioTwice,
    /// The sockets that systemd passed are invalid.
    #[error("LISTEN_FDS: {0}")]
    Activation(std::io::Error),
    /// The files cannot be mounted.
    #[error("fuse: {0}")]
    Fuse(#[from] MountError),
    /// A standby has no pool that another machine could serve.
    #[error(
        "standby: no device is a volume of a pool in an object store; expected one with \
         path=s3://BUCKET/PREFIX"
    )]
    StandbyWithoutPool,
    /// A standby cannot read a pool, and waiting would not change that.
    #[error("standby: {0}")]
    StandbyPool(StoreError),
    /// A signal ended a standby.
    #[error("{0} ended the standby")]
    Ended(&'static str),
    /// The system refused a thread.
    #[error("starting a thread: {0}")]
    Thread(std::io::Error),
}

/// Sockets of places that no earlier process has, bound before that pauses its clients.
struct NewPlaces {
    /// In the order of the options; `None` for those of the earlier process.
    nbd: Vec<Option<BoundServer>>,
    vhost: Vec<BoundVhost>,
    nvme: Vec<NvmeSockets>,
}

/// An NBD server that accepts no client yet.
struct BoundNbd {
    server: BoundServer,
    /// Whether it serves the client on standard input and output.
    is_stdio: bool,
    /// The index of its listener in what an earlier process has handed over.
    inherited: Option<u32>,
}

/// Sockets that listen, and at which no client is served yet.
struct BoundPlaces {
    nbd: Vec<BoundNbd>,
    vhost: Vec<BoundVhost>,
    /// Of the inherited ones and of the new ones, those for discovery are last.
    nvme: Vec<NvmeSockets>,
}

/// A running daemon. Dropping it ends it, in order.
pub struct Daemon {
    devices: Arc<Devices>,
    control: Option<ControlServer>,
    servers: Vec<Arc<Server>>,
    nvme: Arc<NvmeListeners>,
    /// The memory budget of all servers' connections.
    memory: Arc<MemoryBudget>,
    mount: Option<Mount>,
    /// The state that requests of the control API read and change.
    shared: Arc<Control>,
    cleanup: Arc<CleanupRegistry>,
    /// The thread that waits for the client on standard input.
    stdio: Option<JoinHandle<()>>,
    /// The thread that runs the backup policies.
    backups: Option<BackupThreads>,
    /// Whether this daemon was a standby, so that its control plane runs already.
    is_promoted: bool,
    events: Receiver<Event>,
    sender: Sender<Event>,
}

impl Daemon {
    /// Binds all endpoints, opens the devices and serves them. When this returns, clients can
    /// connect; a client that connects earlier waits.
    ///
    /// # Errors
    /// If an endpoint cannot be bound, before a device is made and before an earlier process pauses
    /// its clients; or if a device cannot be opened.
    pub fn start(options: &DaemonOptions) -> Result<Daemon, DaemonError> {
        if options.nbd.iter().filter(|place| **place == Endpoint::Stdio).count() > 1 {
            return Err(DaemonError::StdioTwice);
        }
        check_ublk(options)?;
        let access = options.nvme_access.load()?;
        let control = Arc::new(Control::default());
        control.paths.allow(&options.api_directories).map_err(DaemonError::ApiDirectory)?;
        let devices = Arc::clone(&control.devices);
        devices.make_subsystems(access, options.nvme_access.subsystem.clone());
        control.nvme.set_resources(&options.nvme_access);
        if let Some(place) = &options.control {
            devices.set_control(&place.path);
        }
        let (sender, events) = channel();
        let inherited = options.inherited.as_deref();
        let plane = ControlServer::bind(Arc::clone(&control), options.control_places(), inherited)?;
        let memory = match options.nbd_memory {
            Some(bytes) => MemoryBudget::new(bytes),
            None => MemoryBudget::for_memory(crate::memory::available_bytes()),
        };
        // It is still empty: only the daemon sets it.
        let _ = control.memory.set(Arc::clone(&memory));
        let cleanup = Arc::clone(&control.cleanup);
        let (control, shared) = (Some(plane), control);
        let mut daemon = Daemon {
            devices,
            control,
            servers: Vec::new(),
            nvme: Arc::clone(&shared.nvme),
            memory,
            mount: None,
            shared,
            cleanup,
            stdio: None,
            backups: None,
            is_promoted: false,
            events,
            sender,
        };
        if let Some(dir) = &options.fuse {
            daemon.mount(dir, options.fuse_allow_other)?;
        }
        daemon.devices.vhost().set_poll_percent(options.vhost_poll);
        if options.standby && options.inherited.is_none() {
            daemon.stand_by(options)?;
        }
        if options.standby {
            daemon.shared.standby.end_after_loss(&daemon.sender);
        }
        let new = daemon.bind_new(options)?;
        if let Some(inherited) = options.inherited.as_deref() {
            inherited.receive()?;
            daemon.devices.keep_namespace_numbers(inherited.numbers().clone());
            let plane = daemon.control.as_mut().expect("it ends with the daemon");
            plane.inherit(&daemon.shared, &options.control_places(), inherited)?;
            options.warn_of_others(inherited);
        }
        let bound = daemon.bind_all(options, new)?;
        daemon.add_devices(options)?;
        daemon.serve_all(options, bound)?;
        warn_of_open_control(options);
        daemon.share_servers();
        daemon.start_backups(options)?;
        daemon.shared.standby.serve();
        Ok(daemon)
    }

    /// Checks what would be refused at the take-over: by then another machine has lost its pools.
    fn check_standby(options: &DaemonOptions, pools: &[WatchedPool]) -> Result<(), DaemonError> {
        if pools.is_empty() {
            return Err(DaemonError::StandbyWithoutPool);
        }
        for spec in &options.devices {
            stack::check(spec).map_err(|error| DaemonError::Device {
                name: spec.name().to_owned(),
                source: error.into(),
            })?;
        }
        standby::check_agreement(&options.devices)
            .map_err(|(name, error)| DaemonError::Device { name, source: error.into() })?;
        options.vhost.iter().try_for_each(|place| find_vhost(options, &place.device))?;
        tls_config(&options.tls).check().map_err(|error| nbd_failure(error.into()))?;
        pools.iter().try_for_each(|pool| pool.check().map_err(DaemonError::StandbyPool))
    }

    /// Waits until this standby is to serve. Nothing listens but the control plane, so clients find
    /// the daemon that serves.
    fn stand_by(&mut self, options: &DaemonOptions) -> Result<(), DaemonError> {
        let pools = standby::watched_pools(&options.devices);
        Daemon::check_standby(options, &pools)?;
        self.run_control(None)?;
        self.is_promoted = true;
        let names: Vec<&str> = pools.iter().map(|pool| pool.path.as_str()).collect();
        let status = format!("standby of {}", names.join(", "));
        tracing::info!("{status}");
        // A missing service manager is no error.
        let _ = sd_notify::notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
        let known = &self.devices.warnings().known;
        let event = self.shared.standby.wait(pools, known, (&self.sender, &self.events));
        match event.map_err(DaemonError::Thread)? {
            Event::Promoted => tracing::info!("promoted"),
            Event::WasLast => tracing::info!("this machine had a pool last: taking the pools over"),
            Event::LeaseRanOut => {}
            Event::Signal(name) => return Err(DaemonError::Ended(name)),
            // No other event comes before the devices are served.
            Event::StdioDone
            | Event::Unmounted
            | Event::CommandDone(_)
            | Event::Upgraded
            | Event::PoolLost => {}
        }
        Ok(())
    }

    /// Starts the threads that run the backup policies, if there are any.
    fn start_backups(&mut self, options: &DaemonOptions) -> Result<(), DaemonError> {
        self.shared.backups.set(&options.backups);
        if !options.backups.is_empty() {
            let backups = self.shared.backups.start(&self.devices);
            self.backups = Some(backups.map_err(DaemonError::Thread)?);
        }
        Ok(())
    }

    /// Serves the devices at all places. After an earlier process has given everything up, nothing
    /// that fails ends this one: what is new in its configuration may be missing then.
    fn serve_all(
        &mut self,
        options: &DaemonOptions,
        mut bound: BoundPlaces,
    ) -> Result<(), DaemonError> {
        let inherited = options.inherited.as_deref();
        let adopted = self.adopt(inherited, &mut bound.nbd)?;
        let is_inherited = |it: &mut BoundVhost| it.is_inherited();
        for bound in bound.vhost.extract_if(.., is_inherited) {
            self.serve_vhost(bound)?;
        }
        for bound in bound.nvme.extract_if(.., |it| it.is_inherited) {
            self.start_nvme(bound)?;
        }
        if !self.is_promoted {
            self.run_control(inherited)?;
        }
        for BoundNbd { server, is_stdio, .. } in bound.nbd {
            self.serve(server, is_stdio, &options.tls)?;
        }
        adopted.into_iter().for_each(Adopted::start);
        let or_without = |served: Result<(), DaemonError>| match served {
            Err(error) if inherited.is_some() => {
                tracing::error!(%error, "a place of the configuration is not served");
                Ok(())
            }
            served => served,
        };
        for bound in bound.vhost {
            or_without(self.serve_vhost(bound))?;
        }
        for bound in bound.nvme {
            or_without(self.start_nvme(bound))?;
        }
        for place in &options.ublk {
            or_without(self.serve_ublk(place))?;
        }
        Ok(())
    }

    /// Prepares to serve NBD, so that nothing of it can fail later. Gives the devices that an
    /// earlier process has handed over their data and schedulers, and opens the exports of its
    /// connections, which continue when the servers run.
    fn adopt(
        &self,
        inherited: Option<&Inherited>,
        bound: &mut [BoundNbd],
    ) -> Result<Vec<Adopted>, DaemonError> {
        for device in inherited.map_or(&[][..], Inherited::devices) {
            let name = device.spec.name();
            let failed = |source| DaemonError::Device { name: name.to_owned(), source };
            let entry = self.devices.find(name).map_err(failed)?;
            device.restore(&entry).map_err(failed)?;
        }
        let adopt = |BoundNbd { server, inherited: index, .. }: &mut BoundNbd| {
            server.prepare().map_err(nbd_failure)?;
            let connections = inherited.zip(*index).map(|(it, index)| it.take_connections(index));
            server.adopt(connections.unwrap_or_default()).map_err(DaemonError::Nbd)
        };
        bound.iter_mut().map(adopt).collect()
    }

    /// Starts the control plane. If there is an earlier process, waits until that has given
    /// everything up: until then no request is answered, and no file of it is removed. Requests are
    /// answered after all inherited servers proceed: one may take a server out of its table.
    fn run_control(&mut self, inherited: Option<&Inherited>) -> Result<(), DaemonError> {
        let plane = self.control.as_mut().expect("it ends with the daemon");
        self.shared.upgrade.hold(inherited.is_some());
        let files = self.cleanup.take();
        plane.run(self.sender.clone(), Arc::clone(&self.cleanup))?;
        if let Some(inherited) = inherited {
            inherited.wait_for_go()?;
            plane.own_sockets();
            self.devices.vhost().proceed();
            self.nvme.proceed();
        }
        self.cleanup.put(files);
        self.shared.upgrade.hold(false);
        Ok(())
    }

    /// Gives the control plane the servers, whose connections it lists.
    fn share_servers(&self) {
        let servers: Vec<Weak<Server>> = self.servers.iter().map(Arc::downgrade).collect();
        // It is still empty: only this function sets it.
        let _ = self.shared.servers.set(servers);
    }

    /// What an upgrade needs to know of this process.
    pub fn upgrade(&self) -> &Upgrade {
        &self.shared.upgrade
    }

    fn mount(&mut self, dir: &Path, allow_other: bool) -> Result<(), DaemonError> {
        let options = MountOptions { allow_other, ..MountOptions::default() };
        let mount = Mount::start(Arc::clone(self.devices.files()), dir, &options)?;
        let (dir, transport) = (mount.dir().display(), mount.transport().name());
        tracing::info!(%dir, threads = options.threads, transport, "files mounted");
        self.cleanup.add_mount(mount.dir());
        self.mount = Some(mount);
        Ok(())
    }

    /// Opens the devices. One that the kernel cannot have as a block device is refused before
    /// anything that the start has made on disk stays.
    fn add_devices(&self, options: &DaemonOptions) -> Result<(), DaemonError> {
        let inherited = options.inherited.as_ref();
        let devices = inherited.map_or(&[][..], |inherited| inherited.devices());
        let find = |spec: &DeviceSpec| devices.iter().find(|device| device.spec == *spec);
        for device in devices {
            // Right before they are opened, which makes what is not there.
            device.check_existing().map_err(|source| DaemonError::Device {
                name: device.spec.name().to_owned(),
                source,
            })?;
        }
        let check = |spec: &DeviceSpec, made: &Made| {
            find(spec).map_or(Ok(()), |device| device.check_opened(made))?;
            let place = options.ublk.iter().find(|place| place.device == spec.name());
            let check = |place| ublk::check(&*made.disk, place, spec, &made.identity);
            place.map_or(Ok(()), check)
        };
        let opened_as =
            |spec: &DeviceSpec| find(spec).map_or_else(|| spec.clone(), InheritedDevice::opened_as);
        self.devices.add_all(&options.devices, opened_as, check).map_err(|(name, source)| {
            match source {
                YardError::Ublk(_) => DaemonError::Ublk { device: name, source },
                _ => DaemonError::Device { name, source },
            }
        })
    }

    /// Binds the sockets of all places that no earlier process has, and loads the certificates of
    /// the others.
    fn bind_new(&self, options: &DaemonOptions) -> Result<NewPlaces, DaemonError> {
        let inherited = options.inherited.as_deref();
        if inherited.is_some() && (options.activated || !options.nbd.is_empty()) {
            tls_config(&options.tls).check().map_err(|error| nbd_failure(error.into()))?;
        }
        let bind = |endpoint: &Endpoint| {
            let place = endpoint.to_string();
            match inherited.is_some_and(|it| it.offers(ListenerKind::Nbd, &place)) {
                true => Ok(None),
                false => self.bind_nbd(options, endpoint).map(Some),
            }
        };
        Ok(NewPlaces {
            nbd: options.nbd.iter().map(bind).collect::<Result<_, _>>()?,
            vhost: self.bind_vhost(options)?,
            nvme: bind_nvme(options)?,
        })
    }

    fn bind_nbd(
        &self,
        options: &DaemonOptions,
        endpoint: &Endpoint,
    ) -> Result<BoundServer, DaemonError> {
        let bind = |exports, options| Server::bind(exports, endpoint.clone(), options);
        let server = self.bind_by(&options.tls, bind)?;
        if let Endpoint::Unix(place) = endpoint {
            self.cleanup.add(&place.path);
        }
        Ok(server)
    }

    /// Adds the sockets of an earlier process to the new ones.
    fn bind_all(
        &self,
        options: &DaemonOptions,
        new: NewPlaces,
    ) -> Result<BoundPlaces, DaemonError> {
        let NewPlaces { nbd, mut vhost, mut nvme } = new;
        let nbd = self.inherit_nbd(options, nbd)?;
        if let Some(inherited) = options.inherited.as_deref() {
            vhost.extend(self.inherit_vhost(inherited)?);
            nvme.extend(inherit_nvme(inherited)?);
        }
        Ok(BoundPlaces { nbd, vhost, nvme })
    }

    /// All NBD servers: the new ones, and those with the sockets of an earlier process or of
    /// systemd.
    fn inherit_nbd(
        &self,
        options: &DaemonOptions,
        new: Vec<Option<BoundServer>>,
    ) -> Result<Vec<BoundNbd>, DaemonError> {
        let mut bound = Vec::new();
        let take = |place: &str| {
            let inherited = options.inherited.as_ref();
            inherited.and_then(|inherited| inherited.take_sockets(ListenerKind::Nbd, place))
        };
        for (endpoint, new) in options.nbd.iter().zip(new) {
            let taken = if new.is_none() { take(&endpoint.to_string()) } else { None };
            let (inherited, sockets) = taken.unzip();
            let server = match (new, sockets) {
                (Some(server), _) => server,
                (None, Some(sockets)) => {
                    if let Endpoint::Unix(place) = endpoint {
                        self.cleanup.add(&place.path);
                    }
                    self.bind_by(&options.tls, |exports, options| {
                        Server::inherit(exports, Some(endpoint.clone()), sockets, options)
                    })?
                }
                // The options name it once more than the earlier process has it.
                (None, None) => self.bind_nbd(options, endpoint)?,
            };
            bound.push(BoundNbd { server, is_stdio: *endpoint == Endpoint::Stdio, inherited });
        }
        while let Some((index, sockets)) = take(ACTIVATED) {
            let inherit = |exports, options| Server::inherit(exports, None, sockets, options);
            let server = self.bind_by(&options.tls, inherit)?;
            bound.push(BoundNbd { server, is_stdio: false, inherited: Some(index) });
        }
        if options.activated && options.inherited.is_none() {
            for socket in activation::sockets().map_err(DaemonError::Activation)? {
                let adopt = |exports, options| Server::adopt(exports, socket, options);
                let server = self.bind_by(&options.tls, adopt)?;
                bound.push(BoundNbd { server, is_stdio: false, inherited: None });
            }
        }
        Ok(bound)
    }

    /// Binds the sockets at which hypervisors find devices that an earlier process does not serve
    /// to them.
    fn bind_vhost(&self, options: &DaemonOptions) -> Result<Vec<BoundVhost>, DaemonError> {
        let mut bound = Vec::new();
        for place in &options.vhost {
            let device = &place.device;
            let is_its = |it: &str| it.split_once('=').is_some_and(|(name, _)| name == device);
            let inherited = options.inherited.as_deref();
            if inherited.is_some_and(|it| it.offered(ListenerKind::Vhost).any(is_its)) {
                continue;
            }
            let found = find_vhost(options, device);
            if found.is_err() && options.inherited.is_some() {
                tracing::warn!(device, "not served to hypervisors: the device was removed");
                continue;
            }
            found?;
            bound.push(BoundVhost::bind(place).map_err(DaemonError::VhostPlace)?);
            self.cleanup.add(&place.place.path);
        }
        Ok(bound)
    }

    /// The sockets of an earlier process at which hypervisors find devices.
    fn inherit_vhost(&self, inherited: &Inherited) -> Result<Vec<BoundVhost>, DaemonError> {
        let mut bound = Vec::new();
        for text in inherited.offered(ListenerKind::Vhost) {
            let place = VhostPlace::parse(text).map_err(|_| TakeOverError::invalid_place(text))?;
            let sockets = inherited.take_sockets(ListenerKind::Vhost, text);
            for socket in sockets.into_iter().flat_map(|(_, sockets)| sockets) {
                bound.push(BoundVhost::inherit(place.clone(), socket));
            }
            self.cleanup.add(&place.place.path);
        }
        Ok(bound)
    }

    /// Serves a device to hypervisors.
    fn serve_vhost(&self, bound: BoundVhost) -> Result<(), DaemonError> {
        let device = bound.device().to_owned();
        let served = self.devices.serve_vhost(bound);
        served.map_err(|source| DaemonError::Vhost { device, source })
    }

    /// Serves a device to the kernel, which uses it at once: it reads partition tables.
    fn serve_ublk(&self, place: &UblkPlace) -> Result<(), DaemonError> {
        let served = self.devices.serve_ublk(place);
        served.map_err(|source| DaemonError::Ublk { device: place.device.clone(), source })
    }

    /// Binds the sockets of an NBD server by `bind`.
    fn bind_by(
        &self,
        tls: &config::TlsSettings,
        bind: impl FnOnce(Arc<Exports>, ServerOptions) -> Result<BoundServer, ServerError>,
    ) -> Result<BoundServer, DaemonError> {
        let options = ServerOptions {
            drain_timeout: DRAIN,
            tls: tls_config(tls),
            memory: Arc::clone(&self.memory),
            ..ServerOptions::default()
        };
        bind(Arc::clone(self.devices.exports()), options).map_err(nbd_failure)
    }

    /// Starts an NBD server. The daemon ends when the client on standard input has left.
    fn serve(
        &mut self,
        server: BoundServer,
        is_stdio: bool,
        tls: &config::TlsSettings,
    ) -> Result<(), DaemonError> {
        let server = Arc::new(server.start().map_err(nbd_failure)?);
        for address in server.local_addrs() {
            tracing::info!(address, "serving NBD");
            warn_of_reach(address, tls);
        }
        self.servers.push(Arc::clone(&server));
        if is_stdio {
            let sender = self.sender.clone();
            let wait = move || {
                server.wait();
                // A daemon without a receiver is ending already.
                let _ = sender.send(Event::StdioDone);
            };
            let thread = std::thread::Builder::new().name("stdio-wait".to_owned()).spawn(wait);
            self.stdio = Some(thread.map_err(DaemonError::Thread)?);
        }
        Ok(())
    }

    /// Starts an NVMe listener with sockets that listen.
    fn start_nvme(&self, bound: NvmeSockets) -> Result<(), DaemonError> {
        let option = nvme_option(bound.is_discovery);
        match self.nvme.start(&self.devices, bound) {
            Ok(_) => Ok(()),
            Err(YardError::Listen { place: endpoint, source }) => {
                Err(DaemonError::Nvme { option, endpoint, source })
            }
            Err(source) => Err(DaemonError::NvmeListener { option, source }),
        }
    }

    /// The devices.
    pub fn devices(&self) -> &Arc<Devices> {
        &self.devices
    }

    /// The NBD servers, in the order of the options.
    pub fn servers(&self) -> &[Arc<Server>] {
        &self.servers
    }

    /// The NVMe listeners.
    pub fn nvme(&self) -> &NvmeListeners {
        &self.nvme
    }

    /// The directory with the devices as files, if they are mounted.
    pub fn mount_dir(&self) -> Option<&Path> {
        self.mount.as_ref().map(Mount::dir)
    }

    /// The transport of requests for these files: `/dev/fuse` or io_uring.
    pub fn mount_transport(&self) -> Option<&'static str> {
        self.mount.as_ref().map(|mount| mount.transport().name())
    }

    /// The control plane.
    pub fn control(&self) -> Option<&ControlServer> {
        self.control.as_ref()
    }

    /// The registry of files that an immediate exit must remove.
    pub fn cleanup(&self) -> &CleanupRegistry {
        &self.cleanup
    }

    /// A sender for events from other threads.
    pub fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }

    /// Waits for the next event.
    pub fn next_event(&self) -> Event {
        self.events.recv().expect("the daemon itself holds a sender")
    }

    /// Answers the requests in flight, disconnects all clients and removes the sockets.
    pub fn shutdown(self) {
        drop(self);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The control plane runs until the end, because a second signal ends a shutdown that hangs.
        drop(self.backups.take());
        // All servers begin to shut down before any is waited for, so their clients share one drain
        // time.
        self.servers.iter().for_each(|server| server.begin_shutdown());
        let nvme = self.nvme.close();
        if let Some(mount) = self.mount.take() {
            mount.stop(DRAIN);
        }
        self.servers.drain(..).for_each(|server| server.stop());
        nvme.stop();
        self.devices.close_all(DRAIN);
        if let Some(stdio) = self.stdio.take() {
            // A panic of the thread was reported when it happened.
            let _ = stdio.join();
        }
        drop(self.control.take());
    }
}

/// Refuses a socket for hypervisors whose device is not there.
fn find_vhost(options: &DaemonOptions, device: &str) -> Result<(), DaemonError> {
    if options.devices.iter().any(|spec| spec.name() == device) {
        return Ok(());
    }
    let names = options.devices.iter().map(DeviceSpec::name);
    let (device, source) = (device.to_owned(), YardError::no_such_device(device, names));
    Err(DaemonError::Vhost { device, source })
}

/// Checks the options of ublk and that the kernel has it, before anything is made, and prepares the
/// process for it.
fn check_ublk(options: &DaemonOptions) -> Result<(), DaemonError> {
    for (index, UblkPlace { device, id }) in options.ublk.iter().enumerate() {
        let refused = |source| Err(DaemonError::Ublk { device: device.clone(), source });
        if !options.devices.iter().any(|spec| spec.name() == device) {
            let names = options.devices.iter().map(DeviceSpec::name);
            return refused(YardError::no_such_device(device, names));
        }
        let before = &options.ublk[..index];
        let is_twice = |it: &UblkPlace| it.device == *device || (id.is_some() && it.id == *id);
        if before.iter().any(is_twice) {
            let value = id.map_or_else(|| device.clone(), |id| format!("{device}={id}"));
            let wanted = "each device and each number once".to_owned();
            return refused(YardError::Argument { field: "ublk", value, wanted });
        }
    }
    if options.ublk.is_empty() {
        return Ok(());
    }
    ublk::check_kernel().map_err(DaemonError::UblkMissing)?;
    // Before the daemon and devices start threads.
    ublk::begin_io_flusher().map_err(|error| DaemonError::UblkMissing(error.into()))
}

/// The option that has the endpoints of NVMe, or those of discovery alone.
fn nvme_option(is_discovery: bool) -> &'static str {
    if is_discovery { NVME_DISCOVERY } else { NVME }
}

/// Listens at every address of the endpoints of NVMe at which an earlier process does not.
fn bind_nvme(options: &DaemonOptions) -> Result<Vec<NvmeSockets>, DaemonError> {
    let mut bound = Vec::new();
    for (is_discovery, endpoints, kind) in [
        (false, &options.nvme, ListenerKind::Nvme),
        (true, &options.nvme_discovery, ListenerKind::NvmeDiscovery),
    ] {
        let inherited = options.inherited.as_deref();
        for place in endpoints {
            if inherited.is_some_and(|it| it.offers(kind, &place.to_string())) {
                continue;
            }
            let sockets = nvme_listeners::bind(place).map_err(|source| DaemonError::Nvme {
                option: nvme_option(is_discovery),
                endpoint: place.to_string(),
                source,
            })?;
            let place = place.clone();
            bound.push(NvmeSockets { place, sockets, is_discovery, is_inherited: false });
        }
    }
    Ok(bound)
}

/// The sockets of all NVMe listeners of an earlier process, also of those that requests have
/// started.
fn inherit_nvme(inherited: &Inherited) -> Result<Vec<NvmeSockets>, DaemonError> {
    let mut bound = Vec::new();
    for (is_discovery, kind) in [(false, ListenerKind::Nvme), (true, ListenerKind::NvmeDiscovery)] {
        for text in inherited.offered(kind) {
            let place = text.parse().map_err(|_| TakeOverError::invalid_place(text))?;
            let Some((_, sockets)) = inherited.take_sockets(kind, text) else { continue };
            let sockets = sockets.into_iter().map(TcpListener::from).collect();
            bound.push(NvmeSockets { place, sockets, is_discovery, is_inherited: true });
        }
    }
    Ok(bound)
}

fn nbd_failure(error: ServerError) -> DaemonError {
    match error {
        ServerError::Listen(error) => DaemonError::Place(error),
        other => DaemonError::Nbd(other),
    }
}

/// Warns about an NBD endpoint that lets other users connect without authentication.
fn warn_of_reach(address: &str, tls: &config::TlsSettings) {
    if !is_open(address) || (tls.mode == config::TlsMode::Require && tls.verify_peer) {
        return;
    }
    tracing::warn!(
        address,
        "any client that reaches this address can read and write every device: clients show no \
         certificate; use a unix socket of mode 0600, or TLS with mode require and verify_peer"
    );
}

/// Warns about a control socket, or an address for metrics, that lets other users connect.
fn warn_of_open_control(options: &DaemonOptions) {
    let control = options.control.as_ref().map(|place| format!("unix:{}", place.path.display()));
    if let Some(address) = control.filter(|address| is_open(address)) {
        tracing::warn!(
            address,
            "every user can connect to the control socket, and add, change and remove devices; \
             use mode=0600, or mode=0660 with a group"
        );
    }
    let metrics = options.metrics.as_ref().map(Endpoint::to_string);
    if let Some(address) = metrics.filter(|address| is_open(address)) {
        tracing::warn!(address, "any client that reaches this address can read the metrics");
    }
}

/// Whether users other than the owner can connect to an address. The owner has named the group of a
/// socket, so members of the group do not count.
fn is_open(address: &str) -> bool {
    match address.strip_prefix("unix:") {
        // A socket made by systemd may have no path that is visible here.
        Some(path) => {
            let path = path.split_once('?').map_or(path, |(path, _)| path);
            std::fs::symlink_metadata(path).is_ok_and(|found| found.mode() & 0o002 != 0)
        }
        None => address.starts_with("tcp:"),
    }
}

fn tls_config(tls: &config::TlsSettings) -> TlsConfig {
    TlsConfig {
        mode: match tls.mode {
            config::TlsMode::Off => TlsMode::Off,
            config::TlsMode::On => TlsMode::On,
            config::TlsMode::Require => TlsMode::Require,
        },
        certificates: tls.certificates.clone().unwrap_or_default(),
        verify_peer: tls.verify_peer,
        allow: tls.allow.clone(),
    }
}

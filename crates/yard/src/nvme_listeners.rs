//! The NVMe listeners of a yard: those of its options, and those that requests start and stop.
//!
//! ```text
//! OPEN ── start, stop a listener ──▸ OPEN ── close: the daemon ends ──▸ CLOSED
//!   │
//!   └── pause: an upgrade ──▸ PAUSED ── resume: it has failed ──▸ OPEN
//!                               └── dropped: another process serves
//! ```
//!
//! Every listener applies the access rules of the table of subsystems, whenever it is started.
#![allow(clippy::disallowed_types)] // The table of listeners is control plane.

use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blockyard_core::channel::Stats;
use blockyard_nbd::{Endpoint, listen_tcp};
use blockyard_nvme::fabrics::DISCOVERY_NQN;
use blockyard_nvme::{
    CONNECTIONS_MAX, ConnectionThreads, HostAccess, LinkInfo, TargetOptions, TargetServer,
};

use crate::config::NvmeSettings;
use crate::devices::Devices;
use crate::error::YardError;
use crate::upgrade::message::ListenerKind;
use crate::view::ListenerView;

/// The most NVMe listeners of a yard. Each has a thread that accepts connections.
const LISTENERS_MAX: usize = 64;

/// How long hosts may take to get their answers when a listener stops.
pub(crate) const DRAIN: Duration = Duration::from_secs(5);

/// How long the threads of connections may take to end after the listeners: a thread
/// without connections ends at once, so one that takes longer is held by a device.
const THREADS_GRACE: Duration = Duration::from_secs(2);

/// A listener.
#[derive(Debug)]
struct NvmeListener {
    /// The place, as it was given.
    place: String,
    is_discovery: bool,
    server: TargetServer,
}

#[derive(Debug)]
enum ListenerTable {
    /// In the order in which they were started.
    Open(Vec<NvmeListener>),
    Closed,
}

impl ListenerTable {
    fn listeners(&self) -> &[NvmeListener] {
        match self {
            ListenerTable::Open(listeners) => listeners,
            ListenerTable::Closed => &[],
        }
    }
}

/// The NVMe listeners of a yard.
#[derive(Debug)]
pub struct NvmeListeners {
    table: Mutex<ListenerTable>,
    /// What all listeners share; set before the first one is started.
    resources: OnceLock<NvmeResources>,
}

/// What serves the connections of all listeners.
#[derive(Debug)]
struct NvmeResources {
    threads: Arc<ConnectionThreads>,
    /// The most connections of a listener.
    connections_max: usize,
}

impl NvmeResources {
    fn new(settings: &NvmeSettings) -> NvmeResources {
        let threads = settings.threads.unwrap_or_else(ConnectionThreads::default_threads);
        let connections_max = settings.connections.map_or(CONNECTIONS_MAX, NonZeroUsize::get);
        NvmeResources { threads: ConnectionThreads::new(threads), connections_max }
    }
}

/// The listeners of a yard that ends.
#[derive(Debug)]
pub(crate) struct EndingListeners {
    listeners: Vec<NvmeListener>,
    threads: Option<Arc<ConnectionThreads>>,
}

impl EndingListeners {
    /// Waits until all listeners have stopped, and then for the threads of their connections. A
    /// thread that a device holds is left to itself, so that the yard ends.
    pub(crate) fn stop(self) {
        let servers: Vec<_> = self.listeners.iter().map(|listener| &listener.server).collect();
        TargetServer::stop_all(&servers, Instant::now() + DRAIN);
        if let Some(threads) = self.threads {
            threads.stop(Instant::now() + THREADS_GRACE);
        }
    }
}

/// Listeners that accept no host, and whose hosts have left. Dropping it closes the sockets of this
/// process.
#[derive(Debug)]
pub(crate) struct PausedNvme {
    listeners: Vec<NvmeListener>,
    /// Those of each listener.
    sockets: Vec<Vec<OwnedFd>>,
    had_hosts: bool,
    since: Instant,
}

impl PausedNvme {
    /// The kind, the place and the sockets of each listener.
    pub(crate) fn listeners(
        &self,
    ) -> impl Iterator<Item = (ListenerKind, &str, Vec<BorrowedFd<'_>>)> {
        self.listeners.iter().zip(&self.sockets).map(|(listener, sockets)| {
            let sockets = sockets.iter().map(OwnedFd::as_fd).collect();
            (listener.kind(), listener.place.as_str(), sockets)
        })
    }

    /// Whether hosts were disconnected.
    pub(crate) fn had_hosts(&self) -> bool {
        self.had_hosts
    }

    /// The time from which on no host was accepted; `None` without listeners.
    pub(crate) fn since(&self) -> Option<Instant> {
        (!self.listeners.is_empty()).then_some(self.since)
    }
}

/// Sockets at which a listener is started.
pub(crate) struct NvmeSockets {
    /// The place, as it was given.
    pub(crate) place: Endpoint,
    pub(crate) sockets: Vec<TcpListener>,
    pub(crate) is_discovery: bool,
    /// Whether an earlier process has handed them over: hosts wait until
    /// [`NvmeListeners::proceed`].
    pub(crate) is_inherited: bool,
}

impl Default for NvmeListeners {
    fn default() -> NvmeListeners {
        let table = Mutex::new(ListenerTable::Open(Vec::new()));
        NvmeListeners { table, resources: OnceLock::new() }
    }
}

/// Listens at every address of a place.
///
/// # Errors
/// If the system refuses, or the place is no TCP port.
pub(crate) fn bind(place: &Endpoint) -> io::Result<Vec<TcpListener>> {
    match place {
        Endpoint::Tcp { host, port } => listen_tcp(host, *port),
        Endpoint::Unix(_) | Endpoint::Stdio => Err(io::ErrorKind::Unsupported.into()),
    }
}

impl NvmeListeners {
    fn table(&self) -> MutexGuard<'_, ListenerTable> {
        // Every change of the table is one call: a holder that panicked has left it consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the resources of the listeners, before the first one is started.
    pub(crate) fn set_resources(&self, settings: &NvmeSettings) {
        self.resources.get_or_init(|| NvmeResources::new(settings));
    }

    fn resources(&self) -> &NvmeResources {
        self.resources.get_or_init(|| NvmeResources::new(&NvmeSettings::default()))
    }

    /// Starts a listener at a place, for a request.
    ///
    /// # Errors
    /// If the place is no TCP port or cannot be used, hosts would discover devices that no listener
    /// serves, or there are as many listeners as may be. Then nothing listens at the place.
    pub fn listen(
        &self,
        devices: &Devices,
        place: &str,
        is_discovery: bool,
    ) -> Result<ListenerView, YardError> {
        let endpoint = match place.parse() {
            Ok(endpoint @ Endpoint::Tcp { .. }) => endpoint,
            Ok(Endpoint::Unix(_) | Endpoint::Stdio) | Err(_) => {
                let (field, value) = ("place", place.chars().take(80).collect());
                let wanted = "tcp:HOST:PORT".to_owned();
                return Err(YardError::Argument { field, value, wanted });
            }
        };
        let refused = |source| YardError::Listen { place: endpoint.to_string(), source };
        // Outside the lock: it may look a name up.
        let sockets = bind(&endpoint).map_err(refused)?;
        let bound = NvmeSockets { place: endpoint, sockets, is_discovery, is_inherited: false };
        self.start(devices, bound)
    }

    /// Starts a listener with sockets that listen.
    ///
    /// # Errors
    /// If hosts would discover devices that no listener serves, there are as many listeners as may
    /// be, or the system refuses.
    pub(crate) fn start(
        &self,
        devices: &Devices,
        bound: NvmeSockets,
    ) -> Result<ListenerView, YardError> {
        let NvmeSockets { place, sockets, is_discovery, is_inherited } = bound;
        let place = place.to_string();
        let refused = |source| YardError::Listen { place: place.clone(), source };
        let other = |text: String| refused(io::Error::other(text));
        let mut table = self.table();
        let ListenerTable::Open(open) = &mut *table else {
            return Err(other("the yard is shutting down".to_owned()));
        };
        let is_alone = open.iter().all(|listener| listener.is_discovery);
        if is_discovery && is_alone && !is_inherited {
            return Err(YardError::Argument {
                field: "discovery",
                value: "true".to_owned(),
                wanted: "an NVMe listener that serves the devices; start that one first".to_owned(),
            });
        }
        if open.len() >= LISTENERS_MAX {
            return Err(other(format!("there are {LISTENERS_MAX} NVMe listeners already")));
        }
        let Some(subsystems) = devices.subsystems() else {
            return Err(other("the yard has no NVMe subsystems".to_owned()));
        };
        let NvmeResources { threads, connections_max } = self.resources();
        let options = TargetOptions {
            connections_max: *connections_max,
            drain_timeout: DRAIN,
            discovery_only: is_discovery,
            holds: is_inherited,
        };
        let is_first = !subsystems.is_served();
        let server =
            TargetServer::start_on(Arc::clone(threads), subsystems.clone(), sockets, options)
                .map_err(refused)?;
        for address in server.local_addrs() {
            match is_discovery {
                true => tracing::info!(%address, "serving NVMe discovery"),
                false => tracing::info!(%address, "serving NVMe"),
            }
        }
        let listener = NvmeListener { place, is_discovery, server };
        let view = listener.view(subsystems.access());
        view.warnings.iter().for_each(|warning| tracing::warn!(place = view.place, "{warning}"));
        open.push(listener);
        drop(table);
        if is_first && !is_discovery {
            devices.list().iter().for_each(|entry| entry.warn_of_nvme());
        }
        Ok(view)
    }

    /// Stops a listener, named by its place or by an address at which it listens. Its hosts'
    /// commands in flight are completed, and the hosts disconnected.
    ///
    /// # Errors
    /// If there is no such listener, or hosts use devices through it and `force` is not given.
    pub fn unlisten(
        &self,
        devices: &Devices,
        place: &str,
        force: bool,
    ) -> Result<ListenerView, YardError> {
        let mut table = self.table();
        let Some(at) = table.listeners().iter().position(|it| it.is_at(place)) else {
            let known = table.listeners().iter().map(|listener| listener.place.clone());
            return Err(YardError::no_such_listener(place, known.collect()));
        };
        let access = devices.subsystems().map(|subsystems| subsystems.access().clone());
        let view = table.listeners()[at].view(&access.unwrap_or_default());
        if view.hosts > 0 && !force {
            return Err(YardError::ListenerUsed { place: view.place, hosts: view.hosts });
        }
        let ListenerTable::Open(open) = &mut *table else { return Ok(view) };
        let listener = open.remove(at);
        drop(table);
        // Outside the lock: it waits for hosts.
        listener.server.stop();
        tracing::info!(place = view.place, "NVMe listener stopped");
        Ok(view)
    }

    /// The listeners, in the order in which they were started.
    pub fn list(&self, devices: &Devices) -> Vec<ListenerView> {
        let access = devices.subsystems().map(|subsystems| subsystems.access().clone());
        let access = access.unwrap_or_default();
        self.table().listeners().iter().map(|listener| listener.view(&access)).collect()
    }

    /// The kind, the place and the number of sockets of each listener.
    pub(crate) fn places(&self) -> Vec<(ListenerKind, String, usize)> {
        let place =
            |it: &NvmeListener| (it.kind(), it.place.clone(), it.server.local_addrs().len());
        self.table().listeners().iter().map(place).collect()
    }

    /// The addresses of the listeners that serve devices, or of those for discovery alone.
    pub fn addresses(&self, is_discovery: bool) -> Vec<SocketAddr> {
        let table = self.table();
        let listeners = table.listeners().iter().filter(|it| it.is_discovery == is_discovery);
        listeners.flat_map(|listener| listener.server.local_addrs()).copied().collect()
    }

    /// The connections of all listeners.
    pub fn connections(&self) -> Vec<LinkInfo> {
        let table = self.table();
        table.listeners().iter().flat_map(|listener| listener.server.connections()).collect()
    }

    /// The counters of the channels of a connection; `None` without this connection.
    pub(crate) fn channel_stats(&self, id: u64, peer: &str) -> Option<Stats> {
        let table = self.table();
        table.listeners().iter().find_map(|listener| listener.server.channel_stats(id, peer))
    }

    /// Accepts no more hosts at any listener, and disconnects all hosts when they have their
    /// answers: hosts that connect again wait in the queues of the sockets.
    ///
    /// # Errors
    /// If the system refuses descriptors. Then no host was disconnected.
    pub(crate) fn pause(&self) -> io::Result<PausedNvme> {
        let mut table = self.table();
        let listeners = match &mut *table {
            ListenerTable::Open(listeners) => std::mem::take(listeners),
            ListenerTable::Closed => Vec::new(),
        };
        drop(table);
        let since = Instant::now();
        let mut paused = PausedNvme { listeners, sockets: Vec::new(), had_hosts: false, since };
        let servers = || paused.listeners.iter().map(|listener| &listener.server);
        servers().for_each(TargetServer::hold);
        match servers().map(TargetServer::sockets).collect() {
            Ok(sockets) => {
                let had_hosts = servers().any(|server| !server.connections().is_empty());
                TargetServer::disconnect_all(&servers().collect::<Vec<_>>(), since + DRAIN);
                paused.had_hosts = had_hosts;
                paused.sockets = sockets;
                Ok(paused)
            }
            Err(error) => {
                self.resume(paused);
                Err(error)
            }
        }
    }

    /// Accepts hosts again after a pause.
    pub(crate) fn resume(&self, paused: PausedNvme) {
        if let ListenerTable::Open(listeners) = &mut *self.table() {
            *listeners = paused.listeners;
        }
        self.proceed();
    }

    /// Accepts hosts at the sockets of an earlier process, or after a pause.
    pub(crate) fn proceed(&self) {
        self.table().listeners().iter().for_each(|listener| listener.server.proceed());
    }

    /// Begins to stop all listeners, and starts no other one.
    pub(crate) fn close(&self) -> EndingListeners {
        let closed = std::mem::replace(&mut *self.table(), ListenerTable::Closed);
        let listeners = match closed {
            ListenerTable::Open(listeners) => listeners,
            ListenerTable::Closed => Vec::new(),
        };
        listeners.iter().for_each(|listener| listener.server.begin_shutdown());
        let threads = self.resources.get().map(|resources| Arc::clone(&resources.threads));
        EndingListeners { listeners, threads }
    }
}

impl NvmeListener {
    fn kind(&self) -> ListenerKind {
        match self.is_discovery {
            true => ListenerKind::NvmeDiscovery,
            false => ListenerKind::Nvme,
        }
    }

    fn is_at(&self, place: &str) -> bool {
        let is_its =
            |address: &SocketAddr| place.strip_prefix("tcp:") == Some(&address.to_string());
        self.place == place || self.server.local_addrs().iter().any(is_its)
    }

    fn view(&self, access: &HostAccess) -> ListenerView {
        let addresses = self.server.local_addrs();
        let warning = |address: &SocketAddr| match self.is_discovery {
            true => None,
            false => access_warning(*address, access),
        };
        let mut warnings: Vec<_> = addresses.iter().filter_map(warning).collect();
        warnings.dedup();
        let connections = self.server.connections();
        let is_of_device = |link: &&LinkInfo| link.subsystem.as_deref() != Some(DISCOVERY_NQN);
        // The admin queue of a controller may be at another listener than its I/O queues.
        let of_devices = connections.iter().filter(is_of_device);
        let controllers: BTreeSet<u16> = of_devices.filter_map(|link| link.controller).collect();
        ListenerView {
            place: self.place.clone(),
            addresses: addresses.iter().map(|address| format!("tcp:{address}")).collect(),
            discovery: self.is_discovery,
            hosts: controllers.len() as u64,
            warnings: warnings.into_iter().map(str::to_owned).collect(),
        }
    }
}

/// The warning about an address at which hosts connect without authentication.
fn access_warning(address: SocketAddr, access: &HostAccess) -> Option<&'static str> {
    if access.authentication.is_some() {
        return None;
    }
    if access.allowed.is_empty() {
        return Some(
            "any NVMe host that reaches this address can read and write every device: require \
             secrets (--nvme-secrets), list the hosts of each device (--nvme-allow), or restrict \
             the address by a firewall",
        );
    }
    (!address.ip().is_loopback()).then_some(
        "an NVMe host that reaches this address is not asked to prove the NQN that it claims: \
         require secrets (--nvme-secrets)",
    )
}

#[cfg(test)]
#[allow(dead_code)] // Tests of another crate use the rest.
#[path = "../../nvme/tests/initiator/host.rs"]
mod host;

#[cfg(test)]
mod tests {
    use super::host::Initiator;
    use super::*;
    use crate::paths::TempDir;
    use crate::uri;
    use crate::volumes::VolumeRequest;

    const PLACE: &str = "tcp:127.0.0.1:0";

    fn devices_with(uri: &str) -> Arc<Devices> {
        let devices = Devices::new();
        devices.make_subsystems(HostAccess::default(), None);
        devices.add(uri::parse(uri).unwrap()).unwrap();
        devices
    }

    /// A queue of a subsystem, and its controller.
    fn queue(address: SocketAddr, nqn: &str, number: u16, controller: u16) -> (Initiator, u16) {
        let mut queue = Initiator::connect_to(address);
        queue.initialize(0);
        let done = queue.connect(nqn, number, controller, 31, 0);
        assert_eq!(done.status, 0);
        if number == 0 {
            queue.enable();
        }
        (queue, done.result as u16)
    }

    /// The bug: `unlisten` disconnected a host without `--force` whose admin queue was at another
    /// listener.
    #[test]
    fn a_listener_with_io_queues_alone_is_in_use() {
        let devices = devices_with("null:///n?size=1M");
        let listeners = NvmeListeners::default();
        let listen = || listeners.listen(&devices, PLACE, false).unwrap();
        let places = [listen(), listen()].map(|view| view.addresses[0].clone());
        let [of_admin, of_io] =
            places.clone().map(|it| it.strip_prefix("tcp:").unwrap().parse().unwrap());
        let nqn = "nqn.2026-11.io.blockyard:n";
        let (_admin, controller) = queue(of_admin, nqn, 0, 0xffff);
        let _io = queue(of_io, nqn, 1, controller);
        for place in &places {
            let refused = listeners.unlisten(&devices, place, false).unwrap_err();
            assert!(matches!(refused, YardError::ListenerUsed { hosts: 1, .. }), "{refused}");
        }
        assert_eq!(listeners.unlisten(&devices, &places[1], true).unwrap().hosts, 1);
    }

    /// The identity of a volume reaches the hosts: they do not take one that was rolled back for
    /// what they knew.
    #[test]
    fn a_host_finds_another_namespace_after_a_rollback() {
        let place = TempDir::new().unwrap();
        let path = place.path().join("pool").display().to_string();
        let devices = devices_with(&format!("volume:///v?size=16M&path={path}"));
        let listeners = NvmeListeners::default();
        let address = listeners.listen(&devices, PLACE, false).unwrap().addresses[0].clone();
        let address = address.strip_prefix("tcp:").unwrap().parse().unwrap();
        let seen = || {
            let (mut admin, _) = queue(address, "nqn.2026-11.io.blockyard:v", 0, 0xffff);
            let list = admin.identify(2, 0, 0).data;
            let nsid = u32::from_le_bytes(list[..4].try_into().unwrap());
            let uuid = admin.identify(3, nsid, 0).data[4..20].to_vec();
            drop(admin);
            let subsystems = devices.subsystems().unwrap();
            while subsystems.find_info("v").unwrap().controllers > 0 {
                std::thread::yield_now();
            }
            (nsid, uuid)
        };
        let work = |verb: &str| {
            let request = VolumeRequest { name: "v@a".to_owned(), ..VolumeRequest::default() };
            devices.work_on_volume(verb, &request).unwrap();
        };
        work("snapshot");
        let first = seen();
        assert_eq!(seen(), first);
        work("rollback");
        let second = seen();
        assert!(second.0 != first.0 && second.1 != first.1, "{first:?} {second:?}");
        assert!([first.0, second.0].iter().all(|nsid| (1..=4096).contains(nsid)));
    }
}

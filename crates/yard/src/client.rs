//! The client side of the control API: HTTP/1.1 over the control socket, one request at a time.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::Method;
use blockyard_trace::ReplayView;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::UPGRADED;
use crate::backup::BackupView;
use crate::paths;
use crate::process::ProcessView;
use crate::ram::{BlocksView, HistogramsView, RamDone, RamRequest};
use crate::scheduler::{SchedulerRequest, SchedulerView};
use crate::trace::{ReplayQuery, ReplayStopped, TraceRequest, TraceStopped};
use crate::upgrade::{UpgradeRequest, UpgradeView};
use crate::uri::encode;
use crate::view::{
    AddRequest, ConnectionView, DeviceView, ErrorBody, ErrorView, FaultsRemoved, FormatRequest,
    FormatView, InjectRequest, Injected, ListenRequest, ListenerView, MountRequest, MountView,
    NbdMemoryView, StatsView, UblkRequest, UblkView, VersionView, VhostRequest, VhostView,
    ZoneDone, ZoneRequest, ZonesView,
};
use crate::volume_properties::RESERVATION;
use crate::volumes::{PoolView, ReceivedView, VolumeDone, VolumeRequest, VolumeView};
use crate::warnings::StatusView;
use crate::zone_counts::ZoneCountsView;
use crate::zone_image::ZoneImageDone;

mod connection;

pub use connection::{Answer, Notice};

use connection::{Connection, Timeout};

/// The longest response that is read, in bytes.
const ANSWER_MAX: u64 = 64 << 20;

/// How long the daemon may send nothing. Longer than the time that a removed device's clients get
/// to disconnect.
const TIMEOUT: Duration = Duration::from_secs(90);

/// The longest wait for an operation on a whole RAM disk, or for the space of volumes.
const TIMEOUT_LONG: Duration = Duration::from_secs(3600);

/// The wait for a change of a pool: the ten minutes for which a pool waits for its object store,
/// and a minute for the work itself.
const TIMEOUT_CHANGE: Duration = Duration::from_secs(660);

/// The wait for what may last as long as it wants, and send nothing meanwhile: ten years.
const TIMEOUT_NONE: Duration = Duration::from_secs(10 * 366 * 86_400);

/// The reason for which a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No daemon listens on the socket.
    #[error(
        "no yard answers on {}: {source}; start one with `blockyard serve`, or name its socket \
         with --control PATH or BLOCKYARD_CONTROL",
        path.display()
    )]
    Unreachable {
        /// The path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The socket exists and cannot be used.
    #[error(
        "cannot use the control socket {}: {source}; run the command as the user of the yard, or \
         name another socket with --control PATH or BLOCKYARD_CONTROL",
        path.display()
    )]
    Socket {
        /// The path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The daemon sent nothing for longer than the timeout.
    #[error(
        "the yard on {} has not answered for {seconds} s; it is stopped or overloaded, and may \
         still do what was asked",
        path.display()
    )]
    TimedOut {
        /// The path of the socket.
        path: PathBuf,
        /// The timeout, in seconds.
        seconds: u64,
    },
    /// The daemon closed the connection before the response was complete.
    #[error(
        "the yard on {} closed the connection before it answered: {source}; it may have done what \
         was asked",
        path.display()
    )]
    Closed {
        /// The path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The daemon's response is invalid.
    #[error("the yard on {} sent an invalid response: {what}", path.display())]
    Nonsense {
        /// The path of the socket.
        path: PathBuf,
        /// The reason for which it is invalid.
        what: String,
    },
    /// The request cannot be sent, or the data to send cannot be read.
    #[error("cannot send the request: {0}")]
    Unsent(io::Error),
    /// The daemon refused the request.
    #[error("{}", .0.message)]
    Refused(ErrorView),
}

impl ClientError {
    /// The code of a refusal, for programs.
    pub fn code(&self) -> Option<&str> {
        match self {
            ClientError::Refused(refusal) => Some(&refusal.code),
            _ => None,
        }
    }
}

/// The control API of one yard.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
    timeout: Option<Duration>,
    notice: Option<Notice>,
}

impl Client {
    /// The yard whose control socket is at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Client {
        Client { path: path.into(), timeout: None, notice: None }
    }

    /// Sets the timeout after which a yard that sends nothing is given up.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Option<Duration>) -> Client {
        self.timeout = timeout;
        self
    }

    /// Sets a function that is called once if a request is not answered within [`Notice::AFTER`].
    #[must_use]
    pub fn with_notice(mut self, notice: Notice) -> Client {
        self.notice = Some(notice);
        self
    }

    /// Calls no function while a request waits.
    #[must_use]
    pub fn without_notice(mut self) -> Client {
        self.notice = None;
        self
    }

    /// The path of the control socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The program that answers, and its version.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn version(&self) -> Result<VersionView, ClientError> {
        self.get("/v1/version")
    }

    /// Has the daemon hand everything over to a new process.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses, or the new process fails.
    pub fn upgrade(&self, request: &UpgradeRequest) -> Result<UpgradeView, ClientError> {
        let body = serde_json::to_vec(request).expect("requests are plain data");
        self.parse(self.exchange_within(TIMEOUT_LONG, Method::POST, "/v1/upgrade", body)?)
    }

    /// Has a standby open and serve its devices. The status that this returns is `promoting` until
    /// they are open.
    ///
    /// # Errors
    /// If the yard cannot be reached, or is no standby.
    pub fn promote(&self) -> Result<StatusView, ClientError> {
        self.parse(self.exchange(Method::POST, "/v1/promote", Vec::new())?)
    }

    /// All devices.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn devices(&self) -> Result<Vec<DeviceView>, ClientError> {
        self.get("/v1/devices")
    }

    /// One device.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such device.
    pub fn device(&self, name: &str) -> Result<DeviceView, ClientError> {
        self.get(&device_path(name, ""))
    }

    /// Adds a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn add(&self, uri: &str) -> Result<DeviceView, ClientError> {
        self.json(Method::POST, "/v1/devices", &AddRequest { uri: uri.to_owned() })
    }

    /// Opens a `file` device with the length that its file has now.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn rescan(&self, name: &str) -> Result<DeviceView, ClientError> {
        self.parse(self.exchange(Method::POST, &device_path(name, "/rescan"), Vec::new())?)
    }

    /// Removes a device; with `force` even if clients use it.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn remove(&self, name: &str, force: bool) -> Result<DeviceView, ClientError> {
        let query = if force { "?force=true" } else { "" };
        self.parse(self.exchange(Method::DELETE, &device_path(name, query), Vec::new())?)
    }

    /// A page of a device's zones.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn zones(&self, name: &str, from: u64, count: usize) -> Result<ZonesView, ClientError> {
        self.get(&device_path(name, &format!("/zones?from={from}&count={count}")))
    }

    /// Executes a zone operation.
    ///
    /// # Errors
    /// If the yard cannot be reached, or it or a zone refuses.
    pub fn manage(
        &self,
        name: &str,
        verb: &str,
        request: &ZoneRequest,
    ) -> Result<ZoneDone, ClientError> {
        self.json(Method::POST, &device_path(name, &format!("/zones/{verb}")), request)
    }

    /// Statistics of all devices.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn stats(&self) -> Result<Vec<StatsView>, ClientError> {
        self.get("/v1/stats")
    }

    /// The warnings of the yard.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn status(&self) -> Result<StatusView, ClientError> {
        self.get("/v1/status")
    }

    /// The zones of all zoned devices by condition.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn zone_counts(&self) -> Result<Vec<ZoneCountsView>, ClientError> {
        self.get("/v1/zones")
    }

    /// What the daemon itself uses.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn process(&self) -> Result<ProcessView, ClientError> {
        self.get("/v1/process")
    }

    /// Statistics of one device.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such device.
    pub fn stats_of(&self, name: &str) -> Result<StatsView, ClientError> {
        self.get(&device_path(name, "/stats"))
    }

    /// The scheduler of a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such device.
    pub fn scheduler(&self, name: &str) -> Result<SchedulerView, ClientError> {
        self.get(&device_path(name, "/scheduler"))
    }

    /// Changes the scheduler of a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn set_scheduler(
        &self,
        name: &str,
        request: &SchedulerRequest,
    ) -> Result<SchedulerView, ClientError> {
        self.json(Method::POST, &device_path(name, "/scheduler"), request)
    }

    /// The memory for the buffers of all NBD connections.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn nbd_memory(&self) -> Result<NbdMemoryView, ClientError> {
        self.get("/v1/nbd-memory")
    }

    /// NBD connections.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn connections(&self) -> Result<Vec<ConnectionView>, ClientError> {
        self.get("/v1/connections")
    }

    /// The NVMe listeners.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn listeners(&self) -> Result<Vec<ListenerView>, ClientError> {
        self.get("/v1/nvme/listeners")
    }

    /// Starts an NVMe listener.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn listen(&self, request: &ListenRequest) -> Result<ListenerView, ClientError> {
        self.json(Method::POST, "/v1/nvme/listeners", request)
    }

    /// Stops an NVMe listener; with `force` even if hosts use devices through it.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn unlisten(&self, place: &str, force: bool) -> Result<ListenerView, ClientError> {
        // In a query string a plus means a space.
        let place = encode(place).replace('+', "%2B");
        let path = format!("/v1/nvme/listeners?place={place}&force={force}");
        self.parse(self.exchange(Method::DELETE, &path, Vec::new())?)
    }

    /// The sockets at which hypervisors find devices.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn vhost(&self) -> Result<Vec<VhostView>, ClientError> {
        self.get("/v1/vhost")
    }

    /// Serves a device to a hypervisor at a socket.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn listen_vhost(&self, request: &VhostRequest) -> Result<VhostView, ClientError> {
        self.json(Method::POST, "/v1/vhost", request)
    }

    /// Serves a device to hypervisors no longer; with `force` even if one uses it.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn unlisten_vhost(&self, device: &str, force: bool) -> Result<VhostView, ClientError> {
        let path = format!("/v1/vhost?device={}&force={force}", encode(device));
        self.parse(self.exchange(Method::DELETE, &path, Vec::new())?)
    }

    /// The devices of the yard that are block devices of the kernel.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn ublk(&self) -> Result<Vec<UblkView>, ClientError> {
        self.get("/v1/ublk")
    }

    /// Makes a device a block device of the kernel.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn add_ublk(&self, request: &UblkRequest) -> Result<UblkView, ClientError> {
        self.json(Method::POST, "/v1/ublk", request)
    }

    /// Removes the block device of a device; with `force` even if it is mounted.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn remove_ublk(&self, device: &str, force: bool) -> Result<UblkView, ClientError> {
        let path = format!("/v1/ublk?device={}&force={force}", encode(device));
        self.parse(self.exchange(Method::DELETE, &path, Vec::new())?)
    }

    /// An image of the zones of a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn zone_image(&self, name: &str) -> Result<Answer, ClientError> {
        self.stream_of(Method::GET, &device_path(name, "/zones/image"), Vec::new())
    }

    /// Sends an image to a device, which gets its state. With `force` a device that clients use or
    /// that holds data is taken too.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses, or the image cannot be read.
    pub fn load_zone_image(
        &self,
        name: &str,
        force: bool,
        input: &mut dyn Read,
    ) -> Result<ZoneImageDone, ClientError> {
        let path = device_path(name, &format!("/zones/image?force={force}"));
        let connection = self.connect(TIMEOUT_LONG)?;
        self.parse(self.whole(connection.send_stream(&path, input, &mut |_| {}))?)
    }

    /// Executes an operation on a RAM disk.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn ram(
        &self,
        name: &str,
        verb: &str,
        request: &RamRequest,
    ) -> Result<RamDone, ClientError> {
        let body = serde_json::to_vec(request).expect("requests are plain data");
        let path = device_path(name, &format!("/ram/{verb}"));
        self.parse(self.exchange_within(TIMEOUT_LONG, Method::POST, &path, body)?)
    }

    /// A page of a RAM disk's blocks.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn blocks(&self, name: &str, from: u64, count: usize) -> Result<BlocksView, ClientError> {
        self.get(&device_path(name, &format!("/blocks?from={from}&count={count}")))
    }

    /// The sizes of a RAM disk's objects, and the ages of its blocks.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn histograms(&self, name: &str) -> Result<HistogramsView, ClientError> {
        self.get(&device_path(name, "/histograms"))
    }

    /// The pools that the yard has open.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn pools(&self) -> Result<Vec<PoolView>, ClientError> {
        self.get("/v1/pools")
    }

    /// The volumes and snapshots of a pool that the yard has open, without their space.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such pool.
    pub fn volumes(&self, pool: Option<&Path>) -> Result<Vec<VolumeView>, ClientError> {
        self.volumes_of(pool, None)
    }

    /// The volumes and snapshots of a pool that the yard has open, or one of them, with their
    /// space.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such pool or volume.
    pub fn space(&self, pool: &Path, name: Option<&str>) -> Result<Vec<VolumeView>, ClientError> {
        self.volumes_of(Some(pool), Some(name.map_or(("space", "true"), |name| ("name", name))))
    }

    /// The volumes and snapshots of a pool that the yard has open, with origins, holds and
    /// properties, and without their space.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such pool.
    pub fn volume_details(&self, pool: &Path) -> Result<Vec<VolumeView>, ClientError> {
        self.volumes_of(Some(pool), Some(("details", "true")))
    }

    fn volumes_of(
        &self,
        pool: Option<&Path>,
        more: Option<(&str, &str)>,
    ) -> Result<Vec<VolumeView>, ClientError> {
        // The space is counted by reading the maps.
        let counts = more.is_some_and(|(key, _)| key != "details");
        let timeout = if counts { TIMEOUT_LONG } else { TIMEOUT };
        let mut path = "/v1/volumes".to_owned();
        let pool = pool.map(|pool| pool.display().to_string());
        let asked = pool.as_deref().map(|pool| ("pool", pool)).into_iter().chain(more);
        for (index, (key, value)) in asked.enumerate() {
            let mark = if index == 0 { '?' } else { '&' };
            // In a query string a plus means a space.
            path += &format!("{mark}{key}={}", encode(value).replace('+', "%2B"));
        }
        self.parse(self.exchange_within(timeout, Method::GET, &path, Vec::new())?)
    }

    /// Executes an operation on a volume of a pool that the yard has open. A pool in an object
    /// store waits up to ten minutes for the store.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn volume(&self, verb: &str, request: &VolumeRequest) -> Result<VolumeDone, ClientError> {
        let body = serde_json::to_vec(request).expect("requests are plain data");
        let path = format!("/v1/volumes/{}", encode(verb).replace('/', "%2F"));
        self.parse(self.exchange_within(timeout_of(verb, request), Method::POST, &path, body)?)
    }

    /// The stream of a snapshot.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn send(&self, request: &VolumeRequest) -> Result<Answer, ClientError> {
        self.stream("/v1/volumes/send", request)
    }

    /// The ranges in which a volume differs from a snapshot: lines of JSON, each a
    /// [`crate::volume_diff::DiffLine`].
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn diff(&self, request: &VolumeRequest) -> Result<Answer, ClientError> {
        self.stream("/v1/volumes/diff", request)
    }

    /// The stream of a volume in its present state, or of a snapshot.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn export(&self, request: &VolumeRequest) -> Result<Answer, ClientError> {
        self.stream("/v1/volumes/export", request)
    }

    /// The backup policies, with their last results.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn backups(&self) -> Result<Vec<BackupView>, ClientError> {
        self.get("/v1/backups")
    }

    /// The contents of a RAM disk, `snapshot`, or a `dictionary` trained on it.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn ram_content(&self, name: &str, what: &str) -> Result<Answer, ClientError> {
        self.stream_of(Method::GET, &device_path(name, &format!("/ram/{what}")), Vec::new())
    }

    /// Scrubs a pool: lines of JSON, each a [`crate::volumes::ScrubLine`].
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn scrub(&self, request: &VolumeRequest) -> Result<Answer, ClientError> {
        self.stream("/v1/volumes/scrub", request)
    }

    /// Sends the streams of snapshots to a pool. Without `name` each gets the name that it had;
    /// `resumable` keeps what was received if the stream is interrupted. `progress` receives the
    /// number of bytes sent.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses, or the stream cannot be read.
    pub fn receive(
        &self,
        pool: &str,
        name: Option<&str>,
        resumable: bool,
        input: &mut dyn Read,
        progress: &mut dyn FnMut(u64),
    ) -> Result<ReceivedView, ClientError> {
        let part = |text: &str| encode(text).replace('+', "%2B");
        let mut path = format!("/v1/volumes/receive?pool={}&resumable={resumable}", part(pool));
        if let Some(name) = name {
            path += &format!("&name={}", part(name));
        }
        let connection = self.connect(TIMEOUT_LONG)?;
        self.parse(self.whole(connection.send_stream(&path, input, progress))?)
    }

    /// Records a trace of a device: a stream in blktrace's format, which lasts until the trace
    /// ends.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn trace(&self, name: &str, request: &TraceRequest) -> Result<Answer, ClientError> {
        let body = serde_json::to_vec(request).expect("requests are plain data");
        let connection = self.connect(TIMEOUT_NONE)?;
        self.accept(connection.send(Method::POST, &device_path(name, "/trace"), body))
    }

    /// Ends the trace of a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or the device has no trace.
    pub fn stop_trace(&self, name: &str) -> Result<TraceStopped, ClientError> {
        self.parse(self.exchange(Method::DELETE, &device_path(name, "/trace"), Vec::new())?)
    }

    /// Replays a trace on a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses, or the trace cannot be read.
    pub fn replay(
        &self,
        name: &str,
        query: &ReplayQuery,
        input: &mut dyn Read,
    ) -> Result<ReplayView, ClientError> {
        let ReplayQuery { speed, queue_depth, duration_max_ms, id, write, force } = query;
        let mut path = device_path(name, &format!("/replay?write={write}&force={force}"));
        if let Some(speed) = speed {
            path += &format!("&speed={}", encode(speed));
        }
        let numbers =
            [("queue_depth", queue_depth), ("duration_max_ms", duration_max_ms), ("id", id)];
        for (name, number) in numbers {
            if let Some(number) = number {
                path += &format!("&{name}={number}");
            }
        }
        let connection = self.connect(TIMEOUT_NONE)?;
        self.parse(self.whole(connection.send_stream(&path, input, &mut |_| {}))?)
    }

    /// Stops the replay of this number on a device, if it is in progress.
    ///
    /// # Errors
    /// If the yard cannot be reached or has no such device.
    pub fn stop_replay(&self, name: &str, id: u64) -> Result<ReplayStopped, ClientError> {
        let path = device_path(name, &format!("/replay?id={id}"));
        self.parse(self.exchange(Method::DELETE, &path, Vec::new())?)
    }

    /// Injects a fault; returns its number if it is a rule.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn inject(&self, name: &str, fault: &str) -> Result<Option<u64>, ClientError> {
        let request = InjectRequest { fault: fault.to_owned() };
        let done: Injected = self.json(Method::POST, &device_path(name, "/inject"), &request)?;
        Ok(done.id)
    }

    /// Removes the rule of this number from a device's fault injector, or all rules.
    ///
    /// # Errors
    /// If the yard cannot be reached, or there is no such device or rule.
    pub fn remove_faults(&self, name: &str, id: Option<u64>) -> Result<FaultsRemoved, ClientError> {
        let query = id.map_or(String::new(), |id| format!("?id={id}"));
        let path = device_path(name, &format!("/inject{query}"));
        self.parse(self.exchange(Method::DELETE, &path, Vec::new())?)
    }

    /// Runs a scenario: lines of JSON, each a [`crate::scenario::ScenarioLine`]. It ends when the
    /// answer is dropped, and by [`Client::stop_scenario`] with the same number.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn run_scenario(
        &self,
        text: &str,
        device: Option<&str>,
        id: u64,
    ) -> Result<Answer, ClientError> {
        let device = device.map_or(String::new(), |name| format!("&device={}", encode(name)));
        let path = format!("/v1/scenario?id={id}{device}");
        let connection = self.connect(TIMEOUT_NONE)?;
        self.accept(connection.send(Method::POST, &path, text.as_bytes().to_vec()))
    }

    /// Stops the scenario of this number, if it runs.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn stop_scenario(&self, id: u64) -> Result<(), ClientError> {
        let path = format!("/v1/scenario?id={id}");
        self.exchange(Method::DELETE, &path, Vec::new()).map(drop)
    }

    /// Makes a zonefs on a device.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn format_zonefs(
        &self,
        name: &str,
        request: &FormatRequest,
    ) -> Result<FormatView, ClientError> {
        self.json(Method::POST, &device_path(name, "/mkzonefs"), request)
    }

    /// Mounts a device's zonefs, in the daemon, at a directory that the daemon sees.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn mount_zonefs(
        &self,
        name: &str,
        request: &MountRequest,
    ) -> Result<MountView, ClientError> {
        self.json(Method::POST, &device_path(name, "/zonefs"), request)
    }

    /// Unmounts a device's zonefs.
    ///
    /// # Errors
    /// If the yard cannot be reached or refuses.
    pub fn unmount_zonefs(&self, name: &str) -> Result<MountView, ClientError> {
        self.parse(self.exchange(Method::DELETE, &device_path(name, "/zonefs"), Vec::new())?)
    }

    /// Every zonefs that is mounted.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn zonefs_mounts(&self) -> Result<Vec<MountView>, ClientError> {
        self.get("/v1/zonefs")
    }

    /// The metrics in the text format of Prometheus.
    ///
    /// # Errors
    /// If the yard cannot be reached.
    pub fn metrics(&self) -> Result<String, ClientError> {
        let body = self.exchange(Method::GET, "/metrics", Vec::new())?;
        String::from_utf8(body).map_err(|error| self.nonsense(error.to_string()))
    }

    /// Connects; the timeout is `longest`, unless the caller has set one.
    fn connect(&self, longest: Duration) -> Result<Connection, ClientError> {
        let refused = |source| ClientError::Socket { path: self.path.clone(), source };
        paths::check_control_socket(&self.path).map_err(refused)?;
        let timeout = Timeout {
            path: self.path.clone(),
            silence_max: self.timeout.unwrap_or(longest),
            notice: self.notice,
        };
        Connection::open(timeout).map_err(|source| self.unanswered(source))
    }

    /// Sends a request whose response is read while it arrives.
    fn stream(&self, path: &str, request: &impl Serialize) -> Result<Answer, ClientError> {
        let body = serde_json::to_vec(request).expect("requests are plain data");
        self.stream_of(Method::POST, path, body)
    }

    fn stream_of(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Answer, ClientError> {
        self.accept(self.connect(TIMEOUT_LONG)?.send(method, path, body))
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.parse(self.exchange(Method::GET, path, Vec::new())?)
    }

    fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_vec(request).expect("requests are plain data");
        self.parse(self.exchange(method, path, body)?)
    }

    /// Sends one request; returns the body of a successful response.
    fn exchange(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Vec<u8>, ClientError> {
        self.exchange_within(TIMEOUT, method, path, body)
    }

    /// Sends one request, with another default timeout.
    fn exchange_within(
        &self,
        timeout: Duration,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Vec<u8>, ClientError> {
        let sent = self.connect(timeout)?.send(method.clone(), path, body.clone());
        match self.whole(sent) {
            // The daemon was upgraded meanwhile, and has not executed it.
            Err(ClientError::Refused(refusal)) if refusal.code == UPGRADED => {
                self.whole(self.connect(timeout)?.send(method, path, body))
            }
            answer => answer,
        }
    }

    /// Returns a successful response, or the reason for which the daemon refused.
    fn accept(&self, answer: io::Result<Answer>) -> Result<Answer, ClientError> {
        let answer = answer.map_err(|source| self.failed(source))?;
        if answer.is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        match serde_json::from_slice(&self.read(answer)?) {
            Ok(ErrorBody { error }) => Err(ClientError::Refused(error)),
            Err(_) => Err(self.nonsense(format!("status {status} without an explanation"))),
        }
    }

    /// The whole body of a successful response.
    fn whole(&self, answer: io::Result<Answer>) -> Result<Vec<u8>, ClientError> {
        self.read(self.accept(answer)?)
    }

    fn read(&self, answer: Answer) -> Result<Vec<u8>, ClientError> {
        let mut body = Vec::new();
        let read = answer.take(ANSWER_MAX + 1).read_to_end(&mut body);
        match read.map_err(|source| self.failed(source))? as u64 {
            0..=ANSWER_MAX => Ok(body),
            _ => Err(self.nonsense(format!("it has more than {ANSWER_MAX} bytes"))),
        }
    }

    fn parse<T: DeserializeOwned>(&self, body: Vec<u8>) -> Result<T, ClientError> {
        serde_json::from_slice(&body).map_err(|error| self.nonsense(error.to_string()))
    }

    /// The error for a request without a valid response.
    fn failed(&self, source: io::Error) -> ClientError {
        match source.kind() {
            io::ErrorKind::InvalidInput => ClientError::Unsent(source),
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                self.nonsense(source.to_string())
            }
            _ => self.unanswered(source),
        }
    }

    /// The error for a missing response.
    fn unanswered(&self, source: io::Error) -> ClientError {
        let path = self.path.clone();
        match (source.kind(), self.timeout) {
            (io::ErrorKind::TimedOut, Some(timeout)) => {
                ClientError::TimedOut { path, seconds: timeout.as_secs() }
            }
            (
                io::ErrorKind::NotFound
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::TimedOut,
                _,
            ) => ClientError::Unreachable { path, source },
            (io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe, _) => {
                ClientError::Closed { path, source }
            }
            _ => ClientError::Socket { path, source },
        }
    }

    fn nonsense(&self, what: impl Into<String>) -> ClientError {
        ClientError::Nonsense { path: self.path.clone(), what: what.into() }
    }
}

fn device_path(name: &str, rest: &str) -> String {
    // `encode` leaves slashes as they are, but a name with a slash must not become a path.
    format!("/v1/devices/{}{rest}", encode(name).replace('/', "%2F"))
}

/// The wait for an operation on a volume.
fn timeout_of(verb: &str, request: &VolumeRequest) -> Duration {
    let reads_maps = match verb {
        "estimate" => true,
        "destroy" | "prune" => request.count_freed || !request.copied.is_empty(),
        "set" => request.properties.contains_key(RESERVATION),
        "resize" => request.reservation_bytes.is_some(),
        _ => false,
    };
    match verb {
        _ if reads_maps => TIMEOUT_LONG,
        // They need nothing of the pool's storage.
        "receives" | "lock" | "unlock" => TIMEOUT,
        _ => TIMEOUT_CHANGE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: each command waited an hour for a yard that hung.
    #[test]
    fn only_changes_of_a_pool_wait_for_an_outage_of_its_object_store() {
        let request = VolumeRequest::default();
        assert_eq!(timeout_of("receives", &request), TIMEOUT);
        for verb in ["destroy", "prune", "set", "resize"] {
            let change = timeout_of(verb, &request);
            assert!(change > Duration::from_secs(600) && change < TIMEOUT_LONG, "{change:?}");
        }
    }

    /// Regression: a command gave up while the yard counted the blocks of a large volume.
    #[test]
    fn requests_that_read_the_maps_of_volumes_wait_for_an_hour() {
        let (copied, reservation_bytes) = (vec!["0123456789abcdef".to_owned()], Some(1 << 30));
        let properties = [(RESERVATION.to_owned(), "1G".to_owned())].into();
        let request = VolumeRequest::default();
        let counts = VolumeRequest { count_freed: true, ..VolumeRequest::default() };
        for (verb, request) in [
            ("estimate", request),
            ("destroy", VolumeRequest { copied, ..VolumeRequest::default() }),
            ("destroy", counts.clone()),
            ("prune", counts),
            ("set", VolumeRequest { properties, ..VolumeRequest::default() }),
            ("resize", VolumeRequest { reservation_bytes, ..VolumeRequest::default() }),
        ] {
            assert_eq!(timeout_of(verb, &request), TIMEOUT_LONG, "{verb}");
        }
    }
}

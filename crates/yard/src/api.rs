//! The control API: HTTP and JSON under `/v1`, and `/metrics`. docs/control-api.md describes it.
//!
//! A request that waits for a device or for its clients runs on a blocking thread. Each device has
//! a bounded number of them, so that a slow device delays only the requests for it. A request that
//! only reads state takes short locks and is answered at once.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use blockyard_core::DeviceError;
use blockyard_core::channel::Stats;
use blockyard_nbd::{MemoryBudget, MemoryUse, Server};
use blockyard_nvme::NQN_PREFIX;
use blockyard_store::StoreError;
use blockyard_ublk::block_path;
use blockyard_volume::VolumeError;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

use crate::api_paths::ApiPaths;
use crate::backup::Backups;
use crate::cleanup_registry::CleanupRegistry;
use crate::devices::Devices;
use crate::error::{FaultError, YardError};
use crate::metrics::{self, ClientMetrics, MetricsFormat};
use crate::monitor::Monitor;
use crate::nvme_listeners::NvmeListeners;
use crate::process::ProcessView;
use crate::ram::{self, BlocksQuery, BlocksView, HistogramsView, RamDone, RamRequest, RamView};
use crate::scenario::ScenarioRuns;
use crate::scheduler::{self, SchedulerRequest, SchedulerView};
use crate::standby::Standby;
use crate::streams::Streams;
use crate::upgrade::Upgrade;
use crate::view::{
    AddRequest, ConnectionView, DeviceView, ErrorBody, ErrorView, FormatRequest, FormatView,
    ListenRequest, ListenerView, MountRequest, MountView, NbdMemoryView, RootView, StatsView,
    VersionView, ZoneDone, ZoneRequest, ZonesView, sparse,
};
use crate::warnings::{BackupStatusView, StatusView};
use crate::web_access::WebAccess;
use crate::zone_counts::ZoneCountsView;
use crate::zone_image::{self, ZoneImageDone, ZoneImageError};
use crate::zonefs;
use crate::zones::{self, Verb};

use request::RequestError;

pub(crate) use upgrade::UPGRADED;

mod faults;
mod monitor;
mod request;
mod stream;
mod trace;
mod ublk;
mod upgrade;
mod vhost;
mod volumes;
pub(crate) mod web;

/// The API version in the paths.
pub const VERSION: u32 = 1;

/// The longest body of a request, in bytes.
const BODY_MAX: usize = 64 << 10;

/// The default time in which a removed device's clients may disconnect, in ms.
const DRAIN_MS: u64 = 5_000;

/// The longest time that a request may ask to wait for clients, in ms.
const DRAIN_MS_MAX: u64 = 60_000;

/// The state that API requests read and change.
#[derive(Default)]
pub struct Control {
    /// The devices.
    pub devices: Arc<Devices>,
    /// The files that an immediate exit must remove.
    pub cleanup: Arc<CleanupRegistry>,
    /// The paths that a request may name.
    pub paths: ApiPaths,
    /// The memory budget of NBD connections.
    pub memory: OnceLock<Arc<MemoryBudget>>,
    /// The NBD servers, once they run. The daemon owns them.
    pub servers: OnceLock<Vec<Weak<Server>>>,
    /// The NVMe listeners.
    pub nvme: Arc<NvmeListeners>,
    /// The clients of the stream, and the history.
    pub monitor: Monitor,
    /// The streams that are being produced.
    pub streams: Streams,
    /// The upgrade of the daemon.
    pub upgrade: Upgrade,
    /// Whether the daemon waits as a standby.
    pub standby: Standby,
    /// The scenarios of faults that run.
    pub(crate) scenarios: ScenarioRuns,
    /// The backup policies and their results.
    pub backups: Arc<Backups>,
    /// Wakes the thread that looks for scrubs which are to run.
    pub(crate) upkeep: Notify,
}

type Shared = State<Arc<Control>>;
type Answer<T> = Result<axum::Json<T>, ErrorResponse>;

/// The protocol of a connection of the NBD server.
const NBD: &str = "nbd";
/// The protocol of a queue of an NVMe host.
const NVME: &str = "nvme";
/// That of a hypervisor.
const VHOST: &str = "vhost";
/// That of the kernel.
const UBLK: &str = "ublk";

/// Every path of the control socket, as `GET /v1` lists them.
pub const PATHS: [&str; 44] = [
    "/v1",
    "/v1/version",
    "/v1/devices",
    "/v1/devices/{name}",
    "/v1/devices/{name}/stats",
    "/v1/devices/{name}/scheduler",
    "/v1/devices/{name}/zones",
    "/v1/devices/{name}/zones/{verb}",
    "/v1/devices/{name}/zones/image",
    "/v1/devices/{name}/inject",
    "/v1/devices/{name}/rescan",
    "/v1/devices/{name}/trace",
    "/v1/devices/{name}/replay",
    "/v1/devices/{name}/ram",
    "/v1/devices/{name}/ram/{verb}",
    "/v1/devices/{name}/blocks",
    "/v1/devices/{name}/histograms",
    "/v1/devices/{name}/mkzonefs",
    "/v1/devices/{name}/zonefs",
    "/v1/zonefs",
    "/v1/backups",
    "/v1/pools",
    "/v1/volumes",
    "/v1/volumes/{verb}",
    "/v1/volumes/send",
    "/v1/volumes/diff",
    "/v1/volumes/export",
    "/v1/volumes/receive",
    "/v1/volumes/scrub",
    "/v1/scenario",
    "/v1/status",
    "/v1/stats",
    "/v1/zones",
    "/v1/process",
    "/v1/connections",
    "/v1/nvme/listeners",
    "/v1/vhost",
    "/v1/ublk",
    "/v1/nbd-memory",
    "/v1/upgrade",
    "/v1/promote",
    "/v1/stream",
    "/v1/history",
    "/metrics",
];

/// All routes, for the control socket.
pub fn routes(control: Arc<Control>) -> Router {
    Router::new()
        .route("/v1", get(root))
        .route("/v1/version", get(version))
        .route("/v1/devices", get(list).post(add))
        .route("/v1/devices/{name}", get(show).delete(remove))
        .route("/v1/devices/{name}/stats", get(stats_of))
        .route("/v1/devices/{name}/scheduler", get(scheduler).post(set_scheduler))
        .route("/v1/devices/{name}/zones", get(report))
        .route("/v1/devices/{name}/zones/{verb}", post(manage))
        .route("/v1/devices/{name}/zones/image", get(save_zones).post(load_zones))
        .route("/v1/devices/{name}/inject", post(faults::inject).delete(faults::remove))
        .route("/v1/devices/{name}/rescan", post(rescan))
        .route("/v1/devices/{name}/trace", post(trace::record).delete(trace::stop))
        .route("/v1/devices/{name}/replay", post(trace::replay).delete(trace::stop_replay))
        .route("/v1/devices/{name}/ram", get(ram_stats))
        .route("/v1/devices/{name}/ram/{verb}", get(ram_content).post(ram_work))
        .route("/v1/devices/{name}/blocks", get(ram_blocks))
        .route("/v1/devices/{name}/histograms", get(ram_histograms))
        .route("/v1/devices/{name}/mkzonefs", post(format_zonefs))
        .route("/v1/devices/{name}/zonefs", post(mount_zonefs).delete(unmount_zonefs))
        .route("/v1/zonefs", get(zonefs_mounts))
        .route("/v1/backups", get(volumes::backups))
        .route("/v1/pools", get(volumes::pools))
        .route("/v1/volumes", get(volumes::list))
        .route("/v1/volumes/{verb}", post(volumes::work))
        .route("/v1/volumes/send", post(volumes::send))
        .route("/v1/volumes/diff", post(volumes::diff))
        .route("/v1/volumes/export", post(volumes::export))
        .route("/v1/volumes/receive", post(volumes::receive))
        .route("/v1/volumes/scrub", post(volumes::scrub))
        .route("/v1/scenario", post(faults::run).delete(faults::stop))
        .route("/v1/status", get(status))
        .route("/v1/stats", get(stats))
        .route("/v1/zones", get(zone_counts))
        .route("/v1/process", get(process))
        .route("/v1/connections", get(connections))
        .route("/v1/nvme/listeners", get(listeners).post(listen).delete(unlisten))
        .route("/v1/vhost", get(vhost::list).post(vhost::listen).delete(vhost::unlisten))
        .route("/v1/ublk", get(ublk::list).post(ublk::add).delete(ublk::remove))
        .route("/v1/nbd-memory", get(nbd_memory))
        .route("/v1/promote", post(promote))
        .route("/v1/stream", get(monitor::stream))
        .route("/v1/history", get(monitor::history))
        .route("/metrics", get(metrics))
        .layer(middleware::from_fn_with_state(Arc::clone(&control), upgrade::share))
        // Not below the layer: it waits until all other requests have ended.
        .route("/v1/upgrade", post(upgrade::upgrade))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(control)
}

/// Only `/metrics`, for a listener that other users can reach. With `access`, requests have to name
/// a host of the listener: a browser on this machine may send requests for a page of another site.
pub(crate) fn metrics_routes(control: Arc<Control>, access: Option<Arc<WebAccess>>) -> Router {
    let routes = Router::new().route("/metrics", get(metrics)).fallback(no_such_path);
    let routes = match access {
        Some(access) => routes.layer(middleware::from_fn_with_state(access, web::check_host)),
        None => routes,
    };
    routes.with_state(control)
}

/// An error response.
pub struct ErrorResponse(StatusCode, ErrorView);

impl ErrorResponse {
    fn new(status: StatusCode, code: &str, message: impl Into<String>) -> ErrorResponse {
        let (code, message) = (code.to_owned(), message.into());
        ErrorResponse(status, ErrorView { code, field: None, value: None, message })
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let ErrorResponse(status, error) = self;
        (status, axum::Json(ErrorBody { error })).into_response()
    }
}

/// The status of an answer with this error.
fn status_of(error: &YardError) -> StatusCode {
    match error {
        YardError::NoSuchDevice { .. }
        | YardError::Fault(FaultError::NoSuchRule { .. })
        | YardError::NoSuchPool { .. }
        | YardError::NoSuchListener { .. }
        | YardError::NoVhost { .. }
        | YardError::NoUblk { .. }
        | YardError::Volume(
            VolumeError::NoSuchVolume { .. }
            | VolumeError::NoBase { .. }
            | VolumeError::Store(StoreError::NoPool { .. }),
        ) => StatusCode::NOT_FOUND,
        YardError::Taken { .. }
        | YardError::Ending
        | YardError::Full { .. }
        | YardError::Listen { .. }
        | YardError::ListenerUsed { .. }
        | YardError::VhostServed { .. }
        | YardError::VhostListen(_)
        | YardError::VhostBusy { .. }
        | YardError::VhostUsed { .. }
        | YardError::Ublk(_)
        | YardError::UblkOutdated { .. }
        | YardError::UblkServed { .. }
        | YardError::UblkLeft { .. }
        | YardError::UblkBusy { .. }
        | YardError::UblkUsed { .. }
        | YardError::Busy { .. }
        | YardError::Used { .. }
        | YardError::Held { .. }
        | YardError::ChangesUsed { .. }
        | YardError::MountUsed { .. }
        | YardError::Traced { .. }
        | YardError::NotTraced { .. }
        | YardError::Claimed { .. }
        | YardError::Volume(_)
        | YardError::Export(_)
        | YardError::File(_)
        | YardError::NotZoned { .. }
        | YardError::NotRam { .. }
        | YardError::Rescan { .. }
        | YardError::Ram(_)
        | YardError::Mounted { .. }
        | YardError::NotMounted { .. }
        | YardError::ZoneFs(_)
        | YardError::Mount(_)
        | YardError::Zone { .. }
        | YardError::ZoneImage(
            ZoneImageError::NotEmpty { .. }
            | ZoneImageError::Geometry { .. }
            | ZoneImageError::Active { .. }
            | ZoneImageError::Unit { .. }
            | ZoneImageError::Zone { .. },
        )
        | YardError::NotUpgradable { .. }
        | YardError::NotStandby
        | YardError::Device(DeviceError::Gone) => StatusCode::CONFLICT,
        YardError::Overloaded { .. }
        | YardError::Replays { .. }
        | YardError::Fault(FaultError::Scenarios { .. }) => StatusCode::SERVICE_UNAVAILABLE,
        YardError::Upgrade { .. } | YardError::Device(DeviceError::Os { .. }) => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
        _ => StatusCode::BAD_REQUEST,
    }
}

impl From<YardError> for ErrorResponse {
    fn from(error: YardError) -> ErrorResponse {
        let (field, value) = error.blame();
        let view =
            ErrorView { code: error.code().to_owned(), field, value, message: error.to_string() };
        ErrorResponse(status_of(&error), view)
    }
}

/// Runs work that may wait for a device on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, YardError> + Send + 'static,
) -> Answer<T> {
    waited_for(work).await.map(axum::Json)
}

/// Runs work whose result is no JSON on a blocking thread.
async fn waited_for<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, YardError> + Send + 'static,
) -> Result<T, ErrorResponse> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(ErrorResponse::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "the request failed inside the daemon; its log says where",
        )),
    }
}

/// Reads a JSON body.
fn read<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>) -> Result<T, ErrorResponse> {
    request::read_body(&whole(body)?).map_err(|error| malformed("bad_body", error))
}

/// A body of any form.
fn whole(body: Result<Bytes, BytesRejection>) -> Result<Bytes, ErrorResponse> {
    body.map_err(|rejection| {
        let message = match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => {
                format!("the body is too long: expected at most {BODY_MAX} bytes")
            }
            _ => "cannot read the body".to_owned(),
        };
        ErrorResponse::new(rejection.status(), "bad_body", message)
    })
}

/// The pairs of a query, or why they cannot be read.
type Asked = Result<Query<Vec<(String, String)>>, QueryRejection>;

fn query<T: DeserializeOwned>(query: Asked) -> Result<T, ErrorResponse> {
    let Ok(Query(pairs)) = query else {
        let message = "the query is not KEY=VALUE&KEY=VALUE with percent-encoding";
        return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, "bad_query", message));
    };
    request::read_query(&pairs).map_err(|error| malformed("bad_query", error))
}

fn malformed(code: &str, error: RequestError) -> ErrorResponse {
    let (code, message) = (code.to_owned(), error.to_string());
    let RequestError { field, value, .. } = error;
    ErrorResponse(StatusCode::BAD_REQUEST, ErrorView { code, field, value, message })
}

fn path<T>(path: Result<Path<T>, PathRejection>) -> Result<T, ErrorResponse> {
    path.map(|Path(value)| value).map_err(|_| {
        let message = "the path has a part that is not percent-encoded UTF-8";
        ErrorResponse::new(StatusCode::BAD_REQUEST, "bad_path", message)
    })
}

type Name = Result<Path<String>, PathRejection>;

async fn root() -> axum::Json<RootView> {
    let paths = PATHS.map(str::to_owned).to_vec();
    axum::Json(RootView { version: env!("CARGO_PKG_VERSION").to_owned(), paths })
}

async fn version() -> axum::Json<VersionView> {
    axum::Json(VersionView {
        name: "blockyard".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        api: VERSION,
        pid: std::process::id(),
    })
}

async fn list(State(control): Shared) -> Answer<Vec<DeviceView>> {
    let devices = control.devices.list();
    let views = devices.iter().map(|entry| DeviceView::new(entry, &control.devices));
    Ok(axum::Json(views.collect()))
}

async fn show(State(control): Shared, name: Name) -> Answer<DeviceView> {
    let name = path(name)?;
    Ok(axum::Json(DeviceView::new(&control.devices.find(&name)?, &control.devices)))
}

async fn add(
    State(control): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, axum::Json<DeviceView>), ErrorResponse> {
    let AddRequest { uri } = read(body)?;
    let made = blocking(move || {
        let spec = crate::uri::parse(&uri)?;
        let is_open = |pool: &str| control.devices.pool(Some(pool)).is_ok();
        control.paths.check_device(&spec, is_open)?;
        let entry = control.devices.add(spec)?;
        tracing::info!(device = entry.spec.name(), uri = %entry.spec, "device added");
        Ok(DeviceView::new(&entry, &control.devices))
    });
    Ok((StatusCode::CREATED, made.await?))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RemoveQuery {
    force: bool,
    drain_ms: Option<u64>,
}

async fn remove(State(control): Shared, name: Name, asked: Asked) -> Answer<DeviceView> {
    let (name, asked): (String, RemoveQuery) = (path(name)?, query(asked)?);
    let drain_ms = asked.drain_ms.unwrap_or(DRAIN_MS);
    if drain_ms > DRAIN_MS_MAX {
        return Err(YardError::Argument {
            field: "drain_ms",
            value: drain_ms.to_string(),
            wanted: format!("at most {DRAIN_MS_MAX}"),
        }
        .into());
    }
    blocking(move || {
        let before = DeviceView::new(&control.devices.find(&name)?, &control.devices);
        let DeviceView { clients, opens, .. } = before;
        if clients + opens > 0 && !asked.force {
            let connections = all_connections(&control).into_iter();
            // Of an NVMe host, each queue is a connection.
            let is_client =
                |it: &ConnectionView| it.protocol != NVME && it.device.as_ref() == Some(&name);
            let clients_of = connections.filter(is_client).map(|it| it.peer);
            let hosts = control.devices.hosts(&name).into_iter().map(|it| it.peer);
            let replays = (0..control.devices.replays().count(&name)).map(|_| "replay".to_owned());
            let peers = clients_of.chain(hosts).chain(replays).collect();
            return Err(YardError::Busy { name, clients, peers, opens });
        }
        if let Some(dir) = control.devices.zonefs_place(&name).filter(|_| !asked.force) {
            return Err(YardError::Mounted { name, dir: Some(dir) });
        }
        control.devices.remove(&name, Duration::from_millis(drain_ms))?;
        tracing::info!(device = name, "device removed");
        Ok(before)
    })
    .await
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ReportQuery {
    from: u64,
    count: Option<usize>,
}

async fn report(State(control): Shared, name: Name, asked: Asked) -> Answer<ZonesView> {
    let (name, asked): (String, ReportQuery) = (path(name)?, query(asked)?);
    let ReportQuery { from, count } = asked;
    let entry = control.devices.find(&name)?;
    let count = count.unwrap_or(zones::REPORT_MAX);
    Ok(axum::Json(zones::report(entry.disk.as_ref(), from, count)?))
}

async fn manage(
    State(control): Shared,
    names: Result<Path<(String, String)>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<ZoneDone> {
    let (name, verb) = path(names)?;
    let request: ZoneRequest = read(body)?;
    let verb = Verb::from_word(&verb)?;
    let entry = control.devices.find(&name)?;
    let place = entry.begin_work()?;
    blocking(move || {
        let _place = place;
        if entry.disk.geometry().zones.is_some() {
            control.devices.may_change_zones(entry.spec.name(), request.force)?;
        }
        zones::manage(entry.disk.as_ref(), verb, &request)
    })
    .await
}

/// An image of the zones of a device, as a stream.
async fn save_zones(State(control): Shared, name: Name) -> Result<Response, ErrorResponse> {
    let name = path(name)?;
    let entry = control.devices.find(&name)?;
    if entry.disk.geometry().zones.is_none() {
        return Err(YardError::NotZoned { name }.into());
    }
    let place = entry.begin_work()?;
    let (answer, mut out) = stream::outgoing();
    let open = control.streams.begin(format!("the zones of `{name}` are being saved"));
    tokio::task::spawn_blocking(move || {
        let _place = place;
        match zone_image::save(entry.disk.as_ref(), &mut out) {
            Ok(done) => tracing::info!(device = name, zones = done.zones, "zones sent"),
            Err(error) => out.fail(&name, std::io::Error::other(error)),
        }
        drop((entry, open));
    });
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], answer).into_response())
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LoadQuery {
    force: bool,
}

/// Brings a device into the state of an image, which is the body.
async fn load_zones(
    State(control): Shared,
    name: Name,
    asked: Asked,
    body: Body,
) -> Answer<ZoneImageDone> {
    let (name, LoadQuery { force }): (String, LoadQuery) = (path(name)?, query(asked)?);
    let entry = control.devices.find(&name)?;
    let place = entry.begin_work()?;
    let (sender, mut input) = stream::incoming();
    let loaded = blocking(move || {
        let _place = place;
        // No client and no other load comes meanwhile.
        let claim = entry.shared.claim.claim();
        let _claim = claim.ok_or_else(|| control.devices.claimed(&name))?;
        if entry.disk.geometry().zones.is_some() {
            control.devices.may_change_zones(&name, force)?;
        }
        let done = zone_image::load(entry.disk.as_ref(), &mut input, force)?;
        tracing::info!(device = name, zones = done.zones, "zones loaded");
        Ok(done)
    });
    let (loaded, _) = tokio::join!(loaded, stream::pass_on(body, sender));
    loaded
}

async fn format_zonefs(
    State(control): Shared,
    name: Name,
    body: Result<Bytes, BytesRejection>,
) -> Answer<FormatView> {
    let (name, request): (String, FormatRequest) = (path(name)?, read(body)?);
    let place = control.devices.find(&name)?.begin_work()?;
    blocking(move || {
        let _place = place;
        let view = control.devices.format_zonefs(&name, &request)?;
        tracing::info!(device = name, uuid = view.uuid, "zonefs made");
        Ok(view)
    })
    .await
}

async fn mount_zonefs(
    State(control): Shared,
    name: Name,
    body: Result<Bytes, BytesRejection>,
) -> Answer<MountView> {
    let (name, request): (String, MountRequest) = (path(name)?, read(body)?);
    let options = zonefs::read_mount_options(&request.options)?;
    let dir = control.paths.check("dir", std::path::Path::new(&request.dir))?;
    let place = control.devices.find(&name)?.begin_work()?;
    blocking(move || {
        let _place = place;
        let view = control.devices.mount_zonefs(&name, &dir, options, request.force, || {})?;
        tracing::info!(device = name, dir = view.dir, "zonefs mounted");
        Ok(view)
    })
    .await
}

async fn unmount_zonefs(State(control): Shared, name: Name) -> Answer<MountView> {
    let name = path(name)?;
    let place = control.devices.find(&name)?.begin_work()?;
    blocking(move || {
        let _place = place;
        let view = control.devices.unmount_zonefs(&name)?;
        tracing::info!(device = name, dir = view.dir, "zonefs unmounted");
        Ok(view)
    })
    .await
}

async fn zonefs_mounts(State(control): Shared) -> Answer<Vec<MountView>> {
    Ok(axum::Json(control.devices.zonefs_mounts()))
}

async fn stats(State(control): Shared) -> Answer<Vec<StatsView>> {
    let devices = &control.devices;
    let stats = devices.list();
    let stats = stats.iter().map(|entry| StatsView::with_hosts(entry, devices));
    Ok(axum::Json(stats.collect()))
}

async fn stats_of(State(control): Shared, name: Name) -> Answer<StatsView> {
    let name = path(name)?;
    let devices = &control.devices;
    Ok(axum::Json(StatsView::with_hosts(&devices.find(&name)?, devices)))
}

async fn zone_counts(State(control): Shared) -> Answer<Vec<ZoneCountsView>> {
    // A block device of the kernel is asked for its zones.
    blocking(move || {
        let disks = control.devices.zoned_disks();
        Ok(disks.iter().filter_map(|disk| ZoneCountsView::new(disk.as_ref())).collect())
    })
    .await
}

async fn process() -> axum::Json<ProcessView> {
    axum::Json(ProcessView::new())
}

async fn ram_stats(State(control): Shared, name: Name) -> Answer<RamView> {
    Ok(axum::Json(ram::view(&control.devices.find(&path(name)?)?)?))
}

async fn scheduler(State(control): Shared, name: Name) -> Answer<SchedulerView> {
    let entry = control.devices.find(&path(name)?)?;
    // This waits for the thread that is dispatching.
    blocking(move || Ok(SchedulerView::new(entry.disk.as_ref()))).await
}

async fn set_scheduler(
    State(control): Shared,
    name: Name,
    body: Result<Bytes, BytesRejection>,
) -> Answer<SchedulerView> {
    let (name, request): (String, SchedulerRequest) = (path(name)?, read(body)?);
    let entry = control.devices.find(&name)?;
    let place = entry.begin_work()?;
    blocking(move || {
        let _place = place;
        let view = scheduler::change(entry.disk.as_ref(), entry.spec.kind(), &request)?;
        let (chosen, tunables) = (&view.scheduler, &view.tunables);
        tracing::info!(device = name, scheduler = chosen, ?tunables, "scheduler set");
        Ok(view)
    })
    .await
}

async fn ram_work(
    State(control): Shared,
    names: Result<Path<(String, String)>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<RamDone> {
    let ((name, verb), request): (_, RamRequest) = (path(names)?, read(body)?);
    let entry = control.devices.find(&name)?;
    let place = entry.begin_work()?;
    blocking(move || {
        let _place = place;
        let done = ram::work(&entry, &verb, &request, &control.paths)?;
        tracing::info!(device = name, verb, "RAM disk worked on");
        Ok(done)
    })
    .await
}

/// The contents of a RAM disk, or a dictionary trained on it, as a stream, which the client writes
/// to a file of its own.
async fn ram_content(
    State(control): Shared,
    names: Result<Path<(String, String)>, PathRejection>,
) -> Result<Response, ErrorResponse> {
    let (name, what) = path(names)?;
    let entry = control.devices.find(&name)?;
    let ram = Arc::clone(ram::ram_of(&entry)?);
    let place = entry.begin_work()?;
    let content = [(header::CONTENT_TYPE, "application/octet-stream")];
    match what.as_str() {
        "snapshot" => {
            let (answer, mut out) = stream::outgoing();
            let open = control.streams.begin(format!("the data of `{name}` are being saved"));
            tokio::task::spawn_blocking(move || {
                let _place = place;
                match ram.save_to(&mut out) {
                    Ok(blocks) => tracing::info!(device = name, blocks, "RAM disk sent"),
                    Err(error) => out.fail(&name, std::io::Error::other(error)),
                }
                drop((ram, open));
            });
            Ok((content, answer).into_response())
        }
        "dictionary" => {
            let trained = waited_for(move || {
                let _place = place;
                Ok(ram.dictionary()?)
            });
            let (dictionary, samples) = trained.await?;
            Ok((content, [(ram::SAMPLES, samples.to_string())], dictionary).into_response())
        }
        _ => Err(no_such_path().await),
    }
}

async fn ram_blocks(State(control): Shared, name: Name, asked: Asked) -> Answer<BlocksView> {
    let (name, asked): (String, BlocksQuery) = (path(name)?, query(asked)?);
    let entry = control.devices.find(&name)?;
    // Reads a table that may not be in memory yet.
    blocking(move || ram::blocks(&entry, &asked)).await
}

async fn ram_histograms(State(control): Shared, name: Name) -> Answer<HistogramsView> {
    let entry = control.devices.find(&path(name)?)?;
    // Reads a table of many words.
    blocking(move || ram::histograms(&entry)).await
}

async fn rescan(State(control): Shared, name: Name) -> Answer<DeviceView> {
    let name = path(name)?;
    blocking(move || Ok(DeviceView::new(&control.devices.rescan(&name)?, &control.devices))).await
}

/// The connections of all clients.
pub(crate) fn all_connections(control: &Control) -> Vec<ConnectionView> {
    let servers = control.servers.get().into_iter().flatten().filter_map(Weak::upgrade);
    let infos = servers.flat_map(|server| {
        let at = server.local_addr().to_owned();
        server.connections().into_iter().map(move |info| (at.clone(), info))
    });
    let clients = infos.map(|(server, info)| ConnectionView {
        protocol: NBD.to_owned(),
        server: Some(server),
        id: info.id,
        peer: info.peer,
        device: info.export,
        tls: info.tls,
        requests: info.requests,
        read_bytes: info.read_bytes,
        written_bytes: info.written_bytes,
        errors: info.errors,
        memory_bytes: info.memory_bytes,
        ..ConnectionView::default()
    });
    let infos = control.nvme.connections().into_iter();
    let all = control.devices.subsystems().and_then(|subsystems| subsystems.all_nqn());
    let device = |nqn: &str| {
        let name = nqn.strip_prefix(NQN_PREFIX).filter(|_| all != Some(nqn));
        name.map(str::to_owned)
    };
    let hosts = infos.map(|info| ConnectionView {
        protocol: NVME.to_owned(),
        id: info.id,
        peer: info.peer,
        device: info.subsystem.as_deref().and_then(device),
        subsystem: info.subsystem,
        host: info.host,
        controller: info.controller,
        queue: info.queue,
        requests: info.commands,
        read_bytes: info.read_bytes,
        written_bytes: info.written_bytes,
        errors: info.errors,
        ..ConnectionView::default()
    });
    clients.chain(hosts).chain(hypervisors(control)).chain(block_devices(control)).collect()
}

/// The connections of all clients, with the latency of their reads and writes.
pub(crate) fn connections_with_latency(control: &Control) -> Vec<ConnectionView> {
    let mut connections = all_connections(control);
    // One without a request has no channel that has counted.
    for it in connections.iter_mut().filter(|it| it.requests > 0) {
        if let Some(stats) = channel_stats(control, it) {
            it.read_latency = sparse(&stats.read_latency);
            it.write_latency = sparse(&stats.write_latency);
        }
    }
    connections
}

/// The counters of the channels of a connection: of its operations on devices. `None` if it has
/// ended.
fn channel_stats(control: &Control, it: &ConnectionView) -> Option<Stats> {
    let device = it.device.as_deref();
    match it.protocol.as_str() {
        NBD => {
            let servers = control.servers.get().into_iter().flatten().filter_map(Weak::upgrade);
            let is_of = |server: &Arc<Server>| it.server.as_deref() == Some(server.local_addr());
            servers.filter(is_of).find_map(|server| server.channel_stats(it.id))
        }
        NVME => control.nvme.channel_stats(it.id, &it.peer),
        VHOST => control.devices.vhost().channel_stats(device?, it.id),
        UBLK => control.devices.ublk().channel_stats(device?, it.id),
        _ => None,
    }
}

fn hypervisors(control: &Control) -> impl Iterator<Item = ConnectionView> {
    let servers = control.devices.vhost().list().into_iter();
    servers.filter(|(_, info)| info.is_connected).map(|(place, info)| ConnectionView {
        protocol: VHOST.to_owned(),
        id: info.connection,
        peer: info.pid.map_or_else(|| "unknown".to_owned(), |pid| format!("process {pid}")),
        device: Some(place.device),
        requests: info.requests,
        read_bytes: info.read_bytes,
        written_bytes: info.written_bytes,
        errors: info.errors,
        ..ConnectionView::default()
    })
}

fn block_devices(control: &Control) -> impl Iterator<Item = ConnectionView> {
    control.devices.ublk().list().into_iter().map(|(device, info)| ConnectionView {
        protocol: UBLK.to_owned(),
        id: info.id.into(),
        peer: block_path(info.id),
        device: Some(device),
        requests: info.requests,
        read_bytes: info.read_bytes,
        written_bytes: info.written_bytes,
        errors: info.errors,
        ..ConnectionView::default()
    })
}

/// The memory of NBD connections.
pub(crate) fn memory_use(control: &Control) -> MemoryUse {
    control.memory.get().map(|memory| memory.usage()).unwrap_or_default()
}

async fn nbd_memory(State(control): Shared) -> axum::Json<NbdMemoryView> {
    axum::Json(memory_use(&control).into())
}

async fn connections(State(control): Shared) -> Answer<Vec<ConnectionView>> {
    blocking(move || Ok(connections_with_latency(&control))).await
}

async fn listeners(State(control): Shared) -> axum::Json<Vec<ListenerView>> {
    axum::Json(control.nvme.list(&control.devices))
}

async fn listen(
    State(control): Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, axum::Json<ListenerView>), ErrorResponse> {
    let ListenRequest { place, discovery } = read(body)?;
    // It may look a name up.
    let started = blocking(move || control.nvme.listen(&control.devices, &place, discovery));
    Ok((StatusCode::CREATED, started.await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UnlistenQuery {
    place: String,
    #[serde(default)]
    force: bool,
}

async fn unlisten(State(control): Shared, asked: Asked) -> Answer<ListenerView> {
    let UnlistenQuery { place, force } = query(asked)?;
    blocking(move || control.nvme.unlisten(&control.devices, &place, force)).await
}

/// Ends the wait of a standby.
async fn promote(State(control): Shared) -> Answer<StatusView> {
    control.standby.promote()?;
    status(State(control)).await
}

/// The warnings as they are now.
async fn status(State(control): Shared) -> Answer<StatusView> {
    blocking(move || {
        let (devices, pools) = (&control.devices, control.devices.pool_views());
        let backups = control.backups.views();
        devices.look_for_warnings(&pools, &backups, blockyard_volume::admin::now());
        let warnings = devices.warnings().list();
        let mut status = StatusView::new(devices.list().len(), pools.len(), warnings);
        status.standby = control.standby.is_waiting();
        status.promoting = control.standby.is_promoting();
        Ok(status.with_backups(backups.iter().map(BackupStatusView::from).collect()))
    })
    .await
}

async fn metrics(State(control): Shared, headers: HeaderMap) -> Result<Response, ErrorResponse> {
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let format = MetricsFormat::of_accept(&accepts.collect::<Vec<_>>().join(","));
    // This reads every scheduler, and waits for threads that are dispatching.
    let text = waited_for(move || {
        let connections = all_connections(&control);
        let backups = control.backups.views();
        let memory = memory_use(&control);
        let peaks = control.monitor.peaks();
        let stats_of = |it: &ConnectionView| channel_stats(&control, it);
        let clients = ClientMetrics::new(connections, stats_of);
        Ok(metrics::encode(&control.devices, clients, memory, backups, peaks, format))
    });
    let types = [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "accept")];
    Ok((types, text.await?).into_response())
}

async fn no_such_path() -> ErrorResponse {
    let message = "there is nothing here; docs/control-api.md lists the paths";
    ErrorResponse::new(StatusCode::NOT_FOUND, "no_such_path", message)
}

async fn no_such_method() -> ErrorResponse {
    let message = "this path has no such method; docs/control-api.md lists them";
    ErrorResponse::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

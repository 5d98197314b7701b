//! The control plane's thread: one small tokio runtime for the API, signals and the watchdog.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use blockyard_nbd::{Endpoint, ListenError, UnixPlace, listen_tcp, listen_unix};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::api::{self, Control};
use crate::cleanup_registry::CleanupRegistry;
pub use crate::event::Event;
use crate::http::{self, CLIENTS_MAX, Waits};
use crate::monitor::{self, STREAMS_MAX};
use crate::upgrade::incoming::Inherited;
use crate::upgrade::message::ListenerKind;
use crate::upkeep;
use crate::web_access::{TokenError, WebAccess};

/// The number of threads for requests that wait for a device or for its clients: as many as both
/// classes of clients can send at the control socket and at one metrics listener, and those of the
/// dashboard, so that no request waits for a thread. Threads are started when needed.
const BLOCKING_THREADS: usize = 4 * CLIENTS_MAX + MONITOR_THREADS;

/// The threads for samples, for reports of zones that streams ask for, and for requests at the web
/// listener.
const MONITOR_THREADS: usize = 1 + STREAMS_MAX + CLIENTS_MAX;

/// The reason for which the control plane could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// Another daemon listens on this socket.
    #[error(
        "control: another yard answers on {}; stop it or give this one --control PATH",
        .0.display()
    )]
    InUse(PathBuf),
    /// A file that is no socket exists at the path.
    #[error(
        "control: {} is there and is no socket; remove it or give --control PATH",
        .0.display()
    )]
    NotASocket(PathBuf),
    /// The socket cannot be bound.
    #[error("control: {0}")]
    Listen(ListenError),
    /// The token for the dashboard cannot be used.
    #[error("web-token-file: {0}")]
    Token(#[from] TokenError),
    /// Other machines could see the dashboard without a token.
    #[error(
        "web: {0} can be reached from other machines; add --web-token-file FILE, or listen at \
         127.0.0.1"
    )]
    WebWithoutToken(std::net::SocketAddr),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: String,
        /// The system's error.
        source: io::Error,
    },
}

/// From where a TCP listener may be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    Any,
    /// This machine alone.
    Loopback,
}

fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> ControlError {
    let what = what.into();
    move |source| ControlError::System { what, source }
}

/// The control plane. Its sockets listen; requests are answered from [`ControlServer::run`] on, and
/// wait until then. Dropping it stops it and removes its sockets.
#[derive(Debug)]
pub struct ControlServer {
    stop: watch::Sender<bool>,
    /// Runs the listeners; `None` once the thread has it.
    runtime: Option<tokio::runtime::Runtime>,
    thread: Option<JoinHandle<()>>,
    /// The files to remove at the end.
    sockets: Vec<PathBuf>,
    /// Those of an earlier process, until that has given them up.
    inherited: Vec<PathBuf>,
    metrics: Option<String>,
    web: Option<String>,
}

/// Where the control plane listens.
#[derive(Clone, Copy, Debug, Default)]
pub struct ControlPlaces<'p> {
    /// The control socket.
    pub control: Option<&'p UnixPlace>,
    /// The listener for metrics.
    pub metrics: Option<&'p Endpoint>,
    /// The listener for the dashboard.
    pub web: Option<&'p Endpoint>,
    /// The file with the token for the dashboard.
    pub web_token: Option<&'p Path>,
}

/// The file descriptors that a runtime opens, with some margin: an epoll, a waker, and a socket
/// pair for signals with a duplicate of one end.
const RUNTIME_DESCRIPTORS: usize = 8;

/// Fails if the process cannot open the file descriptors that a runtime needs: tokio panics if the
/// socket pair for signals cannot be created.
fn probe_descriptors() -> io::Result<()> {
    let first = std::fs::File::open("/dev/null")?;
    let more = (1..RUNTIME_DESCRIPTORS).map(|_| first.try_clone());
    more.collect::<io::Result<Vec<_>>>().map(drop)
}

/// The hosts that requests to a listener for metrics may name, if it is for this machine alone.
/// Prometheus on another machine may use any name of this one.
fn local_access(place: &Endpoint) -> Result<Option<Arc<WebAccess>>, ControlError> {
    let Endpoint::Tcp { host, .. } = place else { return Ok(None) };
    let is_loopback = host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback());
    match is_loopback || host.eq_ignore_ascii_case("localhost") {
        true => Ok(Some(Arc::new(WebAccess::load(Some(host), None)?))),
        false => Ok(None),
    }
}

impl ControlServer {
    /// Listens for the API, for metrics and for the dashboard, each where a place is given; on the
    /// sockets of an earlier process, if it had one there.
    ///
    /// # Errors
    /// If a socket cannot be bound, or the token cannot be used or is missing.
    pub fn bind(
        control: Arc<Control>,
        places: ControlPlaces<'_>,
        inherited: Option<&Inherited>,
    ) -> Result<ControlServer, ControlError> {
        probe_descriptors().map_err(system("control: starting a runtime"))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("control-work")
            .build()
            .map_err(system("control: starting a runtime"))?;
        let (stop, stopped) = watch::channel(false);
        let (thread, sockets) = (None, Vec::new());
        let (metrics, web) = (None, None);
        let (runtime_of_thread, paths) = (None, Vec::new());
        let mut server = ControlServer {
            stop,
            runtime: runtime_of_thread,
            thread,
            sockets,
            inherited: paths,
            metrics,
            web,
        };
        let shared = Shared { control: &control, inherited, stopped: &stopped, is_new: true };
        {
            let _inside = runtime.enter();
            server.serve_places(&places, &shared)?;
            // The page shows the history, and metrics have the peaks of the last minute.
            if places.web.is_some() || places.metrics.is_some() {
                control.monitor.keep_history();
            }
            tokio::spawn(upkeep::run(Arc::clone(&control)));
            tokio::spawn(monitor::run(control));
        }
        server.runtime = Some(runtime);
        Ok(server)
    }

    /// Serves the places of an earlier process, whose sockets were received.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn inherit(
        &mut self,
        control: &Arc<Control>,
        places: &ControlPlaces<'_>,
        inherited: &Inherited,
    ) -> Result<(), ControlError> {
        let Some(runtime) = self.runtime.take() else { return Ok(()) };
        let stopped = self.stop.subscribe();
        let inherited = Some(inherited);
        let shared = Shared { control, inherited, stopped: &stopped, is_new: false };
        let served = {
            let _inside = runtime.enter();
            self.serve_places(places, &shared)
        };
        self.runtime = Some(runtime);
        served
    }

    /// Serves the places that are new, or those of an earlier process.
    fn serve_places(
        &mut self,
        places: &ControlPlaces<'_>,
        shared: &Shared<'_>,
    ) -> Result<(), ControlError> {
        let is_due = |kind, place: String| shared.is_new != shared.offers(kind, &place);
        let control = places.control.filter(|it| is_due(ListenerKind::Control, it.to_string()));
        if let Some(place) = control {
            let routes = api::routes(Arc::clone(shared.control));
            self.serve_unix(ListenerKind::Control, place, &routes, shared)?;
        }
        let metrics = places.metrics.filter(|it| is_due(ListenerKind::Metrics, it.to_string()));
        if let Some(place) = metrics {
            let access = local_access(place)?;
            let routes = api::metrics_routes(Arc::clone(shared.control), access);
            let addresses =
                self.serve(ListenerKind::Metrics, place, Reach::Any, &routes, shared)?;
            self.metrics = addresses.map(|address| match place {
                Endpoint::Unix(_) => address,
                _ => format!("{address}/metrics"),
            });
        }
        if let Some(place) = places.web {
            let host = match place {
                Endpoint::Tcp { host, .. } => Some(host.as_str()),
                _ => None,
            };
            // Also while the place is not due: its token may be unreadable.
            let access = WebAccess::load(host, places.web_token)?;
            if is_due(ListenerKind::Web, place.to_string()) {
                self.serve_web(place, access, shared)?;
            }
        }
        Ok(())
    }

    /// Makes the sockets of an earlier process this one's, which removes their files at its end.
    pub(crate) fn own_sockets(&mut self) {
        self.sockets.append(&mut self.inherited);
    }

    /// Starts answering requests. Sends signals as [`Event`]s; on a second signal, ends the process
    /// and removes what `cleanup` names.
    ///
    /// # Errors
    /// If signals cannot be caught, or the system refuses a thread.
    pub fn run(
        &mut self,
        events: Sender<Event>,
        cleanup: Arc<CleanupRegistry>,
    ) -> Result<(), ControlError> {
        let Some(runtime) = self.runtime.take() else { return Ok(()) };
        {
            let _inside = runtime.enter();
            watch_signals(events, cleanup).map_err(system("control: catching signals"))?;
            spawn_watchdog();
        }
        let mut stopped = self.stop.subscribe();
        let thread = std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || {
                // An error means that the sender is gone: the server has been dropped.
                let _ = runtime.block_on(stopped.wait_for(|stop| *stop));
                // Requests on blocking threads get some time to end.
                runtime.shutdown_timeout(Duration::from_secs(2));
            })
            .map_err(system("control: starting a thread"))?;
        self.thread = Some(thread);
        Ok(())
    }

    /// Serves the dashboard.
    fn serve_web(
        &mut self,
        place: &Endpoint,
        access: WebAccess,
        shared: &Shared<'_>,
    ) -> Result<(), ControlError> {
        let access = Arc::new(access);
        let reach = if access.has_token() { Reach::Any } else { Reach::Loopback };
        let routes = api::web::routes(Arc::clone(shared.control), access);
        let address = self.serve(ListenerKind::Web, place, reach, &routes, shared)?;
        self.web = address.map(|address| match place {
            Endpoint::Unix(_) => address,
            _ => format!("{address}/"),
        });
        Ok(())
    }

    /// Serves routes at a place. Returns its address, the first of several.
    fn serve(
        &mut self,
        kind: ListenerKind,
        place: &Endpoint,
        reach: Reach,
        routes: &Router,
        shared: &Shared<'_>,
    ) -> Result<Option<String>, ControlError> {
        let what = kind.option();
        match place {
            Endpoint::Unix(unix) => {
                self.serve_unix(kind, unix, routes, shared)?;
                Ok(Some(format!("unix:{}", unix.path.display())))
            }
            Endpoint::Tcp { host, port } => {
                let refused = || system(format!("{what}: {place}"));
                let listeners = match shared.take(kind, &place.to_string()) {
                    Some(sockets) => sockets.into_iter().map(TcpListener::from).collect(),
                    None => listen_tcp(host, *port).map_err(refused())?,
                };
                for listener in &listeners {
                    let ip = listener.local_addr().map_err(refused())?.ip();
                    if reach == Reach::Loopback && !ip.to_canonical().is_loopback() {
                        return Err(ControlError::WebWithoutToken((ip, *port).into()));
                    }
                }
                shared.note(kind, place.to_string(), &listeners).map_err(refused())?;
                let mut first = None;
                for listener in listeners {
                    listener.set_nonblocking(true).map_err(refused())?;
                    let listener = tokio::net::TcpListener::from_std(listener).map_err(refused())?;
                    let address = listener.local_addr().map_err(refused())?;
                    first.get_or_insert_with(|| format!("http://{address}"));
                    shared.spawn(listener, routes);
                }
                Ok(first)
            }
            Endpoint::Stdio => unreachable!("the configuration refuses {what} on stdio"),
        }
    }

    /// The address of the dashboard; the first of several.
    pub fn web_address(&self) -> Option<&str> {
        self.web.as_deref()
    }

    /// The address of the metrics listener, in addition to the control socket; the first of
    /// several.
    pub fn metrics_address(&self) -> Option<&str> {
        self.metrics.as_deref()
    }

    /// Serves routes at a path, which is removed when the server is dropped.
    fn serve_unix(
        &mut self,
        kind: ListenerKind,
        place: &UnixPlace,
        routes: &Router,
        shared: &Shared<'_>,
    ) -> Result<(), ControlError> {
        let path = &place.path;
        let refused = || system(format!("control: {}", path.display()));
        // The place as a listener of metrics has it, and the control socket.
        let name = match kind {
            ListenerKind::Control => place.to_string(),
            _ => Endpoint::Unix(place.clone()).to_string(),
        };
        let listener = match shared.take(kind, &name).and_then(|it| it.into_iter().next()) {
            Some(socket) => {
                self.inherited.push(path.to_owned());
                UnixListener::from(socket)
            }
            None => {
                let listener = bind_unix(place)?;
                self.sockets.push(path.to_owned());
                listener
            }
        };
        shared.control.cleanup.add(path);
        shared.note(kind, name, std::slice::from_ref(&listener)).map_err(refused())?;
        listener.set_nonblocking(true).map_err(refused())?;
        let listener = tokio::net::UnixListener::from_std(listener).map_err(refused())?;
        shared.spawn(listener, routes);
        Ok(())
    }
}

/// What the listeners of a control plane share while they are made.
struct Shared<'s> {
    control: &'s Arc<Control>,
    inherited: Option<&'s Inherited>,
    stopped: &'s watch::Receiver<bool>,
    /// Whether the places are served that the earlier process does not have.
    is_new: bool,
}

impl Shared<'_> {
    /// Whether an earlier process has a listener at a place.
    fn offers(&self, kind: ListenerKind, place: &str) -> bool {
        self.inherited.is_some_and(|inherited| inherited.offers(kind, place))
    }

    /// The sockets that an earlier process had at a place.
    fn take(&self, kind: ListenerKind, place: &str) -> Option<Vec<OwnedFd>> {
        let inherited = self.inherited.filter(|_| !self.is_new)?;
        inherited.take_sockets(kind, place).map(|(_, sockets)| sockets)
    }

    /// Notes listeners for an upgrade.
    fn note(&self, kind: ListenerKind, place: String, all: &[impl AsFd]) -> io::Result<()> {
        let sockets = all.iter().map(|listener| listener.as_fd().try_clone_to_owned());
        self.control.upgrade.add_listener(kind, place, sockets.collect::<Result<_, _>>()?);
        Ok(())
    }

    /// Answers requests at a listener, within the runtime.
    fn spawn<L>(&self, listener: L, routes: &Router)
    where
        L: axum::serve::Listener,
        L::Io: http::Peer,
    {
        let ends =
            http::Ends { stopped: self.stopped.clone(), holding: self.control.upgrade.holding() };
        tokio::spawn(http::serve(listener, routes.clone(), Waits::default(), ends));
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        // Without a receiver the thread has ended already.
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
        for socket in &self.sockets {
            // The socket may have been removed already.
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// Listens at a path. The socket of a daemon that has ended is replaced.
fn bind_unix(place: &UnixPlace) -> Result<UnixListener, ControlError> {
    listen_unix(place).map_err(|error| match error {
        ListenError::InUse(path) => ControlError::InUse(path),
        ListenError::NotASocket(path) => ControlError::NotASocket(path),
        error => ControlError::Listen(error),
    })
}

/// Sends the first signal as an event. A second one ends the process at once, after removing the
/// registered files.
fn watch_signals(events: Sender<Event>, cleanup: Arc<CleanupRegistry>) -> io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        let mut seen = false;
        loop {
            let (name, number) = tokio::select! {
                _ = interrupt.recv() => ("SIGINT", 2),
                _ = terminate.recv() => ("SIGTERM", 15),
                _ = hangup.recv() => ("SIGHUP", 1),
            };
            // A daemon without a receiver is ending already.
            if seen || events.send(Event::Signal(name)).is_err() {
                cleanup.remove();
                std::process::exit(128 + number);
            }
            seen = true;
        }
    });
    Ok(())
}

/// Notifies systemd's watchdog at the interval that systemd requests.
fn spawn_watchdog() {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    tokio::spawn(async move {
        let mut tick = tokio::time::interval(limit / 2);
        loop {
            tick.tick().await;
            if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]) {
                tracing::warn!(%error, "systemd's watchdog cannot be told");
            }
        }
    });
}

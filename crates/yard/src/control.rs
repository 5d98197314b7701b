//! The control plane's thread: one small tokio runtime for the API, signals and the watchdog.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use blockyard_export::nbd::{Endpoint, ListenError, UnixPlace, listen_tcp, listen_unix};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::api::{self, Control};
use crate::http::{self, CLIENTS_MAX, Waits};
use crate::litter::Litter;

/// Threads for requests that wait for a device or for its clients: as many as requests of both
/// classes of clients at the control socket and at one place for metrics, so that none waits for a
/// thread. They are made when they are needed.
const BLOCKING_THREADS: usize = 4 * CLIENTS_MAX;

/// What the daemon is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A signal that asks it to end: its name.
    Signal(&'static str),
    /// The client on standard input has left.
    StdioDone,
    /// The file system that it serves is no longer mounted.
    Unmounted,
    /// The command that it ran for has ended, with this exit code.
    CommandDone(u8),
}

/// Why the control plane could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// Another daemon answers on this socket.
    #[error(
        "control: another yard answers on {}; stop it or give this one --control PATH",
        .0.display()
    )]
    InUse(PathBuf),
    /// There is a file at the path that is no socket.
    #[error(
        "control: {} is there and is no socket; remove it or give --control PATH",
        .0.display()
    )]
    NotASocket(PathBuf),
    /// It cannot listen.
    #[error("control: {0}")]
    Listen(ListenError),
    /// The system refused.
    #[error("{what}: {source}")]
    System {
        /// What was being done.
        what: String,
        /// What the system said.
        source: io::Error,
    },
}

fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> ControlError {
    let what = what.into();
    move |source| ControlError::System { what, source }
}

/// The running control plane. Dropping it stops it and removes its sockets.
#[derive(Debug)]
pub struct ControlServer {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    sockets: Vec<PathBuf>,
    metrics: Option<String>,
}

/// File descriptors that a runtime opens, and some more: an epoll, a waker, and a pair of sockets
/// for signals with a copy of one of them.
const RUNTIME_DESCRIPTORS: usize = 8;

/// Fails if the process may not open as many file descriptors as a runtime needs: tokio panics
/// where the pair of sockets for signals is refused.
fn probe_descriptors() -> io::Result<()> {
    let first = std::fs::File::open("/dev/null")?;
    let more = (1..RUNTIME_DESCRIPTORS).map(|_| first.try_clone());
    more.collect::<io::Result<Vec<_>>>().map(drop)
}

impl ControlServer {
    /// Starts it: the API on a unix socket at `place` if there is one, metrics at `metrics`, and
    /// signals and the end of standard input sent as [`Event`]s.
    ///
    /// # Errors
    /// If a socket cannot be listened at, or the system refuses a thread.
    pub fn start(
        control: Arc<Control>,
        place: Option<&UnixPlace>,
        metrics: Option<&Endpoint>,
        events: Sender<Event>,
    ) -> Result<ControlServer, ControlError> {
        probe_descriptors().map_err(system("control: starting a runtime"))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("control-work")
            .build()
            .map_err(system("control: starting a runtime"))?;
        let litter = Arc::clone(&control.litter);
        let (stop, mut stopped) = watch::channel(false);
        let mut server = ControlServer { stop, thread: None, sockets: Vec::new(), metrics: None };
        {
            let _inside = runtime.enter();
            if let Some(place) = place {
                let routes = api::routes(Arc::clone(&control));
                let waits = Waits::default();
                tokio::spawn(http::serve(
                    server.bind(place, &control)?,
                    routes,
                    waits,
                    stopped.clone(),
                ));
            }
            if let Some(place) = metrics {
                server.serve_metrics(place, control, stopped.clone())?;
            }
            watch_signals(events, litter).map_err(system("control: catching signals"))?;
            spawn_watchdog();
        }
        let thread = std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || {
                // An error means that the sender is gone: the server has been dropped.
                let _ = runtime.block_on(stopped.wait_for(|stop| *stop));
                // Requests under way on blocking threads are given a moment to end.
                runtime.shutdown_timeout(Duration::from_secs(2));
            })
            .map_err(system("control: starting a thread"))?;
        server.thread = Some(thread);
        Ok(server)
    }

    fn serve_metrics(
        &mut self,
        place: &Endpoint,
        control: Arc<Control>,
        stopped: watch::Receiver<bool>,
    ) -> Result<(), ControlError> {
        match place {
            Endpoint::Unix(unix) => {
                let listener = self.bind(unix, &control)?;
                let (routes, waits) = (api::metrics_routes(control), Waits::default());
                tokio::spawn(http::serve(listener, routes, waits, stopped));
                self.metrics = Some(format!("unix:{}", unix.path.display()));
            }
            Endpoint::Tcp { host, port } => {
                let refused = || system(format!("metrics: {place}"));
                for listener in listen_tcp(host, *port).map_err(refused())? {
                    listener.set_nonblocking(true).map_err(refused())?;
                    let listener = tokio::net::TcpListener::from_std(listener).map_err(refused())?;
                    let address = listener.local_addr().map_err(refused())?;
                    self.metrics.get_or_insert_with(|| format!("http://{address}/metrics"));
                    let routes = api::metrics_routes(Arc::clone(&control));
                    let waits = Waits::default();
                    tokio::spawn(http::serve(listener, routes, waits, stopped.clone()));
                }
            }
            Endpoint::Stdio => unreachable!("the configuration refuses metrics on stdio"),
        }
        Ok(())
    }

    /// Where metrics are served beside the control socket: the first of several addresses.
    pub fn metrics_address(&self) -> Option<&str> {
        self.metrics.as_deref()
    }

    /// Listens at a path, which is removed in the end.
    fn bind(
        &mut self,
        place: &UnixPlace,
        control: &Control,
    ) -> Result<tokio::net::UnixListener, ControlError> {
        let listener = bind_unix(place)?;
        let path = &place.path;
        control.litter.add(path);
        self.sockets.push(path.to_owned());
        let refused = system(format!("control: {}", path.display()));
        tokio::net::UnixListener::from_std(listener).map_err(refused)
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        // Nobody listening means that the thread has ended already.
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
        for socket in &self.sockets {
            // It may be gone already; then there is nothing to do.
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// Listens at a path. The file of a daemon that is gone is replaced.
fn bind_unix(place: &UnixPlace) -> Result<UnixListener, ControlError> {
    let listener = listen_unix(place).map_err(|error| match error {
        ListenError::InUse(path) => ControlError::InUse(path),
        ListenError::NotASocket(path) => ControlError::NotASocket(path),
        error => ControlError::Listen(error),
    })?;
    let refused = system(format!("control: {}", place.path.display()));
    listener.set_nonblocking(true).map_err(refused)?;
    Ok(listener)
}

/// Passes the first signal on as an event; a second one ends the process at once, and takes away
/// what it leaves.
fn watch_signals(events: Sender<Event>, litter: Arc<Litter>) -> io::Result<()> {
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
            // A daemon that no longer listens is ending already.
            if seen || events.send(Event::Signal(name)).is_err() {
                litter.remove();
                std::process::exit(128 + number);
            }
            seen = true;
        }
    });
    Ok(())
}

/// Tells systemd that the daemon lives, as often as it wants to be told.
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

//! An HTTP server for clients that may be silent, slow or many.
//!
//! Every wait for a client has a timeout. The clients of a listener are bounded in two classes:
//! those of the daemon's own user and root, and all others; neither class takes connections from
//! the other. If a class is full, the next client replaces the oldest one without a request in
//! progress, so that silent connections never block a request. A request is in progress from the
//! end of its body, or from its header if the body is a stream, to the end of its response. If each
//! client has one, the next client gets status 503.
#![allow(clippy::disallowed_types)] // Control plane: a flag that is set once a request.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::Request;
use axum::serve::Listener;
use blockyard_sync::atomics::{AtomicBool, Ordering};
use http_body::Frame;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_tokio::rt::{TokioIo, TokioTimer};
use hyper_tokio::service::TowerToHyperService;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep, sleep};

use crate::view::{ErrorBody, ErrorView};

/// The most clients of one listener at once, for each class.
pub(crate) const CLIENTS_MAX: usize = 64;

/// The timeouts for a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waits {
    /// For the header of a request: from the connection, or from the response before it.
    pub(crate) head: Duration,
    /// From the header of a request to the end of its body, which has at most 64 KiB.
    pub(crate) body: Duration,
    /// For the next part of a stream, whose sender may have to search for it.
    pub(crate) stream: Duration,
    /// For the client to read a part of its response.
    pub(crate) stall: Duration,
    /// For a client of the daemon's own user to do so, which may pass a stream on to a slow
    /// consumer.
    pub(crate) owner_stall: Duration,
}

impl Default for Waits {
    fn default() -> Waits {
        Waits {
            head: Duration::from_secs(30),
            body: Duration::from_secs(30),
            stream: Duration::from_secs(600),
            stall: Duration::from_secs(30),
            owner_stall: Duration::from_secs(600),
        }
    }
}

/// The response to a client for which there is no room. Its body is an
/// [`ErrorBody`](crate::view::ErrorBody).
static OVERLOADED: LazyLock<String> = LazyLock::new(|| {
    let error = ErrorView {
        code: "overloaded".to_owned(),
        field: None,
        value: None,
        message: format!("{CLIENTS_MAX} requests are in progress, which is the limit: try again"),
    };
    let body = serde_json::to_string(&ErrorBody { error }).expect("an error is plain data");
    format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
});

/// Whether the body of a request to this path is a stream, of any length.
fn takes_stream(path: &str) -> bool {
    path == "/v1/volumes/receive"
        || (path.starts_with("/v1/devices/")
            && (path.ends_with("/zones/image") || path.ends_with("/replay")))
}

/// The states that a listener follows.
#[derive(Clone, Debug)]
pub(crate) struct Ends {
    /// Whether the listener ends.
    pub(crate) stopped: watch::Receiver<bool>,
    /// Whether it accepts no client.
    pub(crate) holding: watch::Receiver<bool>,
}

/// A request of the daemon's own user, or of root.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FromOwner;

/// A connection that may know its peer's user.
pub(crate) trait Peer: AsFd {
    /// Whether the peer's user is the daemon's own, or root.
    fn is_owner(&self) -> bool;
}

impl Peer for UnixStream {
    fn is_owner(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        self.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
    }
}

impl Peer for TcpStream {
    fn is_owner(&self) -> bool {
        false
    }
}

/// The connection of a request, in the extensions of the request: whether the client has closed it.
/// hyper finds that out only while it reads or writes, so not while a route leaves a part of the
/// body unread.
#[derive(Clone, Debug)]
pub(crate) struct PeerWatch(Arc<OwnedFd>);

impl PeerWatch {
    /// A second descriptor of a connection, because hyper owns the first.
    fn new(connection: &impl AsFd) -> io::Result<PeerWatch> {
        let descriptor = connection.as_fd().try_clone_to_owned()?;
        Ok(PeerWatch(Arc::new(descriptor)))
    }

    /// Whether the client has closed the connection in both directions. A client that has only
    /// ended its request still waits for the response.
    pub(crate) fn has_closed(&self) -> bool {
        // POLLHUP and POLLERR are reported without being asked for (poll(2)).
        let mut entry = [PollFd::new(&*self.0, PollFlags::empty())];
        let polled = poll(&mut entry, Some(&Timespec::default()));
        polled.is_ok() && entry[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }
}

/// A client that is connected.
#[derive(Debug)]
struct OpenConnection {
    task: AbortHandle,
    /// Whether a request of the client is in progress.
    busy: Arc<AtomicBool>,
}

/// The clients of one class, the oldest first.
#[derive(Debug, Default)]
struct ConnectionClass(Vec<OpenConnection>);

impl ConnectionClass {
    /// Makes room for one more; `false` if each client has a request in progress.
    fn make_room(&mut self) -> bool {
        self.0.retain(|client| !client.task.is_finished());
        if self.0.len() < CLIENTS_MAX {
            return true;
        }
        // Relaxed: a request that begins just now loses its connection, as any idle client could.
        let idle = self.0.iter().position(|client| !client.busy.load(Ordering::Relaxed));
        idle.map(|index| self.0.remove(index).task.abort()).is_some()
    }
}

/// Serves routes at a listener until `stopped`.
pub(crate) async fn serve<L>(mut listener: L, routes: Router, waits: Waits, ends: Ends)
where
    L: Listener,
    L::Io: Peer,
{
    let [mut owners, mut others] = [ConnectionClass::default(), ConnectionClass::default()];
    let Ends { mut stopped, mut holding } = ends;
    loop {
        let io = tokio::select! {
            biased;
            // An error means that the sender is gone: the server has been dropped.
            _ = stopped.wait_for(|stop| *stop) => return,
            is_over = accept(&mut listener, &mut holding) => match is_over {
                Some(io) => io,
                None => return,
            },
        };
        let is_owner = io.is_owner();
        let (class, stall) = match is_owner {
            true => (&mut owners, waits.owner_stall),
            false => (&mut others, waits.stall),
        };
        if !class.make_room() {
            tracing::warn!(
                "control: a client was refused: {CLIENTS_MAX} requests are in progress, which is \
                 the limit"
            );
            refuse(io).await;
            continue;
        }
        let watch = match PeerWatch::new(&io) {
            Ok(watch) => watch,
            Err(error) => {
                tracing::warn!("control: a client was refused: {error}");
                continue;
            }
        };
        let busy = Arc::new(AtomicBool::new(false));
        let io = StallTimeout::new(io, stall);
        let peer = (watch, is_owner);
        let conversation = converse(io, peer, routes.clone(), waits, Arc::clone(&busy));
        class.0.push(OpenConnection { task: tokio::spawn(conversation).abort_handle(), busy });
    }
}

/// The next client, while no upgrade holds clients back; they wait in the queue of the socket.
/// `None` if the daemon has ended.
async fn accept<L: Listener>(
    listener: &mut L,
    holding: &mut watch::Receiver<bool>,
) -> Option<L::Io> {
    loop {
        // Before each accept: one that has begun is given up when clients are to be held back.
        holding.wait_for(|holds| !*holds).await.ok()?;
        tokio::select! {
            biased;
            held = holding.wait_for(|holds| *holds) => { held.ok()?; }
            (io, _) = listener.accept() => return Some(io),
        }
    }
}

/// Answers the requests of one client.
async fn converse<I>(
    io: StallTimeout<I>,
    (watch, is_owner): (PeerWatch, bool),
    routes: Router,
    waits: Waits,
    busy: Arc<AtomicBool>,
) where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let routes = TowerToHyperService::new(routes);
    let service = service_fn(move |request: Request<Incoming>| {
        let in_progress = InProgress(Arc::clone(&busy));
        let is_stream = takes_stream(request.uri().path());
        let wait = if is_stream { waits.stream } else { waits.body };
        if is_stream || request.body().is_end_stream() {
            in_progress.begin();
        }
        let mut request =
            request.map(|body| Body::new(TimedBody::new(body, wait, is_stream, Arc::clone(&busy))));
        request.extensions_mut().insert(watch.clone());
        if is_owner {
            request.extensions_mut().insert(FromOwner);
        }
        let answer = routes.call(request);
        async move {
            let answer = answer.await?;
            // The route may have left the end of the body unread.
            in_progress.begin();
            let answer = answer.map(|body| TrackedBody { body, _in_progress: in_progress });
            Ok::<_, std::convert::Infallible>(answer)
        }
    });
    let mut server = http1::Builder::new();
    let served = server.timer(TokioTimer::new()).header_read_timeout(waits.head);
    if let Err(error) = served.serve_connection(TokioIo::new(io), service).await {
        tracing::debug!(%error, "a client of the control API is lost");
    }
}

/// Sends [`OVERLOADED`] to a client, as far as the socket takes it at once.
async fn refuse(mut io: impl AsyncWrite + Unpin) {
    let _ = std::future::poll_fn(|context| {
        Poll::Ready(Pin::new(&mut io).poll_write(context, OVERLOADED.as_bytes()))
    })
    .await;
}

/// A request. Once it has begun, its client is busy until this is dropped.
struct InProgress(Arc<AtomicBool>);

impl InProgress {
    fn begin(&self) {
        // Relaxed: the flag publishes no data.
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        // Relaxed: as above.
        self.0.store(false, Ordering::Relaxed);
    }
}

/// The body of a response; the request is in progress until it is sent.
struct TrackedBody {
    body: Body,
    _in_progress: InProgress,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

/// The body of a request, with a timeout.
struct TimedBody {
    body: Incoming,
    timer: Pin<Box<Sleep>>,
    wait: Duration,
    /// Whether each part restarts the timeout.
    is_stream: bool,
    /// Whether the request is in progress, which it is from the end of this body.
    busy: Arc<AtomicBool>,
}

impl TimedBody {
    fn new(body: Incoming, wait: Duration, is_stream: bool, busy: Arc<AtomicBool>) -> TimedBody {
        TimedBody { body, timer: Box::pin(sleep(wait)), wait, is_stream, busy }
    }
}

impl HttpBody for TimedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(part) = pin!(&mut self.body).poll_frame(context) {
            if self.is_stream {
                let end = Instant::now() + self.wait;
                self.timer.as_mut().reset(end);
            }
            if part.is_none() || self.body.is_end_stream() {
                // Relaxed: as in `InProgress`.
                self.busy.store(true, Ordering::Relaxed);
            }
            return Poll::Ready(part.map(|part| part.map_err(axum::Error::new)));
        }
        self.timer.as_mut().poll(context).map(|()| Some(Err(axum::Error::new(timed_out()))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the client was silent for too long")
}

/// A connection whose client must read what is sent to it.
struct StallTimeout<I> {
    io: I,
    stall_max: Duration,
    /// The timeout, which runs while the client reads nothing.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<I> StallTimeout<I> {
    fn new(io: I, stall_max: Duration) -> StallTimeout<I> {
        StallTimeout { io, stall_max, stalled: None }
    }

    /// Returns the result of a write, or an error after the timeout.
    fn timed<T>(
        &mut self,
        context: &mut Context<'_>,
        went: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if went.is_ready() {
            self.stalled = None;
            return went;
        }
        let stall_max = self.stall_max;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(sleep(stall_max)));
        timer.as_mut().poll(context).map(|()| Err(timed_out()))
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for StallTimeout<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, into)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for StallTimeout<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let went = Pin::new(&mut self.io).poll_write(context, from);
        self.timed(context, went)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let went = Pin::new(&mut self.io).poll_flush(context);
        self.timed(context, went)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let went = Pin::new(&mut self.io).poll_shutdown(context);
        self.timed(context, went)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::{Path, PathBuf};
    use std::thread::JoinHandle;

    use axum::routing::{get, post};
    use blockyard_sync::atomics::AtomicUsize;

    use super::*;
    use crate::paths::TempDir;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

    /// More than a socket buffers.
    const BIG_BYTES: usize = 8 << 20;

    /// A server of three routes on a thread of its own.
    struct Server {
        path: PathBuf,
        stop: watch::Sender<bool>,
        thread: Option<JoinHandle<()>>,
        /// How many requests have reached the route that never answers.
        waiting: Arc<AtomicUsize>,
        _temp: TempDir,
    }

    impl Server {
        fn start(waits: Waits) -> Server {
            let temp = TempDir::new().unwrap();
            let path = temp.path().join("socket");
            let listener = UnixListener::bind(&path).unwrap();
            listener.set_nonblocking(true).unwrap();
            let waiting = Arc::new(AtomicUsize::new(0));
            let reached = Arc::clone(&waiting);
            let wait = async move || {
                reached.fetch_add(1, Ordering::Relaxed);
                std::future::pending::<&str>().await
            };
            let routes = Router::new()
                .route("/", get(async || "here"))
                .route("/big", get(async || vec![7_u8; BIG_BYTES]))
                .route("/body", post(async |body: Bytes| body.len().to_string()))
                .route("/wait", get(wait));
            let (stop, stopped) = watch::channel(false);
            let serve = move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.unwrap().block_on(async {
                    let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                    let hold = watch::Sender::new(false);
                    let ends = Ends { stopped, holding: hold.subscribe() };
                    serve(listener, routes, waits, ends).await;
                });
            };
            let thread = Some(std::thread::spawn(serve));
            Server { path, stop, thread, waiting, _temp: temp }
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.stop.send(true);
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }

    fn answer(mut client: UnixStream) -> String {
        client.write_all(REQUEST).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    }

    fn connect(path: &Path) -> UnixStream {
        UnixStream::connect(path).unwrap()
    }

    /// The bug: 64 connections that sent nothing blocked `/metrics` and the control socket
    /// permanently.
    #[test]
    fn silent_connections_block_no_request() {
        let server = Server::start(Waits::default());
        let mut silent: Vec<_> = (0..3 * CLIENTS_MAX).map(|_| connect(&server.path)).collect();
        assert!(answer(connect(&server.path)).ends_with("here"));
        // The oldest was disconnected; the youngest are still connected.
        assert!(answer(silent.pop().unwrap()).ends_with("here"));
        assert_eq!(silent[0].read(&mut [0]).unwrap_or(0), 0, "the oldest is gone");
    }

    /// The bug: 64 requests whose bodies never ended blocked the control socket for 30 s.
    #[test]
    fn requests_with_incomplete_bodies_block_no_other_request() {
        let server = Server::start(Waits::default());
        let mut incomplete: Vec<_> = (0..2 * CLIENTS_MAX)
            .map(|_| {
                let mut client = connect(&server.path);
                // The server may have disconnected the client already.
                let _ = client
                    .write_all(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab");
                client
            })
            .collect();
        assert!(answer(connect(&server.path)).ends_with("here"));
        assert_eq!(incomplete[0].read(&mut [0]).unwrap_or(0), 0, "the oldest is disconnected");
        // The body of the youngest ends, and it is answered.
        let mut youngest = incomplete.pop().unwrap();
        youngest.write_all(b"cdefghi").unwrap();
        let mut start = [0; 12];
        youngest.read_exact(&mut start).unwrap();
        assert_eq!(&start, b"HTTP/1.1 200");
    }

    #[test]
    fn a_client_beyond_the_limit_gets_503_while_requests_are_in_progress() {
        let server = Server::start(Waits::default());
        let begun: Vec<_> = (0..CLIENTS_MAX)
            .map(|_| {
                let mut client = connect(&server.path);
                client.write_all(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
                client
            })
            .collect();
        while server.waiting.load(Ordering::Relaxed) < CLIENTS_MAX {
            std::thread::yield_now();
        }
        let mut refused = String::new();
        connect(&server.path).read_to_string(&mut refused).unwrap();
        assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
        let body = refused.split_once("\r\n\r\n").unwrap().1;
        let body: ErrorBody = serde_json::from_str(body).unwrap();
        assert_eq!(body.error.code, "overloaded");
        assert!(body.error.message.contains("64 requests are in progress"), "{refused}");
        drop(begun);
        loop {
            let mut client = connect(&server.path);
            let mut served = String::new();
            let _ = client.write_all(REQUEST);
            let _ = client.read_to_string(&mut served);
            if served.ends_with("here") {
                break;
            }
        }
    }

    #[test]
    fn a_client_that_stalls_in_its_header_or_body_is_disconnected() {
        let starts: [&[u8]; 3] = [
            b"",
            b"GET / HTTP/1.1\r\nHost:",
            b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab",
        ];
        let short = Duration::from_millis(1);
        let server = Server::start(Waits { head: short, body: short, ..Waits::default() });
        for start in starts {
            let mut client = connect(&server.path);
            // The timeout may come before all of it is sent.
            let _ = client.write_all(start);
            // With or without an error response, the connection ends.
            let _ = client.read_to_end(&mut Vec::new());
        }
    }

    #[test]
    fn a_client_that_reads_no_response_is_disconnected() {
        let short = Duration::from_millis(1);
        let waits = Waits { stall: short, owner_stall: short, ..Waits::default() };
        let server = Server::start(waits);
        let mut client = connect(&server.path);
        client.write_all(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        // The server ends the connection, after which nothing can be written.
        while client.write_all(b"\r\n").is_ok() {
            std::thread::yield_now();
        }
        let mut taken = Vec::new();
        let _ = client.read_to_end(&mut taken);
        assert!(taken.len() < BIG_BYTES, "all {} bytes were sent", taken.len());
    }
}

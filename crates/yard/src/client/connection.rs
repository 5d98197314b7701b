//! The connection to a daemon, which carries one request and its response.
//!
//! hyper speaks HTTP/1.1. Its task belongs to a runtime that runs only while the caller waits for
//! the daemon, so that a client has no thread.

use std::error::Error;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, TRANSFER_ENCODING};
use axum::http::{Method, Request, Response, response};
use http_body::Frame;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_tokio::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// The longest response header, in bytes.
const HEAD_MAX: usize = 64 << 10;

/// The size of a chunk that is sent, in bytes.
const CHUNK_BYTES: usize = 256 << 10;

/// The pause before the next attempt to connect while the socket's backlog is full.
const BACKLOG_PAUSE: Duration = Duration::from_millis(10);

/// A function that tells the user that a yard does not answer.
#[derive(Clone, Copy, Debug)]
pub struct Notice(pub fn(&Path));

impl Notice {
    /// How long a yard may send nothing before the notice.
    pub const AFTER: Duration = Duration::from_secs(3);
}

/// The timeout of each wait for a daemon.
///
/// A daemon that is stopped (SIGSTOP) still accepts connections, because its socket has a backlog,
/// and then sends nothing.
#[derive(Clone, Debug)]
pub(super) struct Timeout {
    pub(super) path: PathBuf,
    pub(super) silence_max: Duration,
    pub(super) notice: Option<Notice>,
}

impl Timeout {
    async fn wait<T>(&mut self, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let (mut work, mut left) = (pin!(work), self.silence_max);
        if let Some(notice) = self.notice.filter(|_| left > Notice::AFTER) {
            if let Ok(done) = timeout(Notice::AFTER, &mut work).await {
                return done;
            }
            // Only once per connection.
            self.notice = None;
            (notice.0)(&self.path);
            left -= Notice::AFTER;
        }
        timeout(left, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// A connection to a daemon.
///
/// An error of kind `InvalidInput` means that the request cannot be sent, `InvalidData` or
/// `UnexpectedEof` that the response is invalid.
#[derive(Debug)]
pub(super) struct Connection {
    runtime: Runtime,
    timeout: Timeout,
    sender: SendRequest<Body>,
}

impl Connection {
    pub(super) fn open(mut timeout: Timeout) -> io::Result<Connection> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let path = timeout.path.clone();
        let sender = runtime.block_on(timeout.wait(async {
            let io = TokioIo::new(Socket(connect(&path).await?));
            let mut builder = http1::Builder::new();
            let client = builder.max_header_size(HEAD_MAX).handshake(io);
            let (sender, connection) = client.await.map_err(failed)?;
            // Errors of the connection are results of the request and of the response's body.
            tokio::spawn(connection);
            Ok(sender)
        }))?;
        Ok(Connection { runtime, timeout, sender })
    }

    /// Sends a request; returns the response after its header.
    pub(super) fn send(mut self, method: Method, path: &str, body: Vec<u8>) -> io::Result<Answer> {
        let response = self.sender.send_request(request(method, path, body.into())?);
        self.receive(response)
    }

    /// Sends a POST request whose body is all data from `input`; returns the response after its
    /// header. `progress` receives the number of bytes sent.
    ///
    /// An early refusal is the response, even if the daemon did not read the whole body.
    pub(super) fn send_stream(
        mut self,
        path: &str,
        input: &mut dyn Read,
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<Answer> {
        let (chunks, body) = mpsc::channel(1);
        let request = request(Method::POST, path, Body::new(Chunks(body)))?;
        let response = self.sender.send_request(request);
        let (mut buffer, mut sent) = (vec![0; CHUNK_BYTES], 0);
        loop {
            let len = match input.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidInput, error)),
            };
            let chunk = Bytes::copy_from_slice(&buffer[..len]);
            let is_sent = self.runtime.block_on(self.timeout.wait(async {
                // There is space for the next chunk when hyper has taken this one to write it.
                Ok(chunks.send(chunk).await.is_ok() && chunks.reserve().await.is_ok())
            }))?;
            if !is_sent {
                break;
            }
            sent += len as u64;
            progress(sent);
        }
        drop(chunks);
        self.receive(response)
    }

    fn receive(
        mut self,
        response: impl Future<Output = hyper::Result<Response<Incoming>>>,
    ) -> io::Result<Answer> {
        let response = async { response.await.map_err(failed) };
        let (head, body) = self.runtime.block_on(self.timeout.wait(response))?.into_parts();
        let has_length = [CONTENT_LENGTH, TRANSFER_ENCODING];
        // Without a length, a body that is cut off would look complete.
        if !body.is_end_stream() && !has_length.iter().any(|name| head.headers.contains_key(name)) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its length is not given"));
        }
        Ok(Answer { connection: self, head, body, part: Bytes::new() })
    }
}

fn request(method: Method, path: &str, body: Body) -> io::Result<Request<Body>> {
    // The connection carries one request.
    let request = Request::builder().method(method).uri(path).header(CONNECTION, "close");
    let request = request.header(HOST, "blockyard").header(CONTENT_TYPE, "application/json");
    request.body(body).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

async fn connect(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(BACKLOG_PAUSE).await,
            done => return done,
        }
    }
}

/// The system's error if there was one, or what is wrong with the response.
fn failed(error: hyper::Error) -> io::Error {
    if error.is_incomplete_message() {
        return io::Error::new(io::ErrorKind::UnexpectedEof, "it ends too early");
    }
    match error.source().and_then(|source| source.downcast_ref::<io::Error>()) {
        Some(source) => match source.raw_os_error() {
            Some(number) => io::Error::from_raw_os_error(number),
            None => io::Error::new(source.kind(), format!("{error}: {source}")),
        },
        None => io::Error::new(io::ErrorKind::InvalidData, error),
    }
}

/// A response of the control API, whose body is read from it.
#[derive(Debug)]
pub struct Answer {
    connection: Connection,
    head: response::Parts,
    body: Incoming,
    /// The data that has arrived and is not read.
    part: Bytes,
}

impl Answer {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The status code.
    pub fn status(&self) -> u16 {
        self.head.status.as_u16()
    }

    /// Whether the status code means success.
    pub fn is_success(&self) -> bool {
        self.head.status.is_success()
    }

    /// Waits for the next part of the body, or for its end.
    fn part(&mut self) -> io::Result<Option<Bytes>> {
        let Connection { runtime, timeout, .. } = &mut self.connection;
        let body = &mut self.body;
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context));
        let frame = async { frame.await.transpose().map_err(broken_off) };
        let frame = runtime.block_on(timeout.wait(frame))?;
        // A frame without data has trailers, which say nothing here.
        Ok(frame.map(|frame| frame.into_data().unwrap_or_default()))
    }
}

impl Read for Answer {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.part.is_empty() && !into.is_empty() {
            match self.part()? {
                Some(part) => self.part = part,
                None => return Ok(0),
            }
        }
        let len = into.len().min(self.part.len());
        into[..len].copy_from_slice(&self.part.split_to(len));
        Ok(len)
    }
}

/// The error for a body that is invalid or ends too early.
fn broken_off(error: hyper::Error) -> io::Error {
    let error = failed(error);
    match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => {
            io::Error::new(io::ErrorKind::InvalidData, error)
        }
        _ => {
            let what = "the yard has broken off; its log says why";
            io::Error::new(io::ErrorKind::UnexpectedEof, what)
        }
    }
}

/// The body of a request, sent while it is read.
struct Chunks(mpsc::Receiver<Bytes>);

impl HttpBody for Chunks {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}

/// A socket that discards what can no longer be written. A daemon that refuses a request early
/// disconnects, and its response can still be read.
struct Socket(UnixStream);

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, into)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.0).poll_write(context, from));
        Poll::Ready(Ok(written.unwrap_or(from.len())))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;
    use std::thread::{self, JoinHandle};

    use super::*;
    use crate::paths::TempDir;

    /// Connects to a server that reads a request up to `end`, responds with `text` and closes; its
    /// thread returns the request.
    fn serve(end: &'static [u8], text: &[u8]) -> (Connection, JoinHandle<Vec<u8>>) {
        let temp = TempDir::new().unwrap();
        let path = temp.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let text = text.to_vec();
        let server = thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let (mut request, mut buffer) = (Vec::new(), [0; 4096]);
            while !request.ends_with(end) {
                let len = client.read(&mut buffer).unwrap();
                request.extend_from_slice(&buffer[..len]);
            }
            // The client may stop before the end.
            let _ = client.write_all(&text);
            request
        });
        let silence_max = Duration::from_secs(60);
        let connection = Connection::open(Timeout { path, silence_max, notice: None });
        (connection.unwrap(), server)
    }

    fn answer(text: &[u8]) -> io::Result<Answer> {
        serve(b"\r\n\r\n", text).0.send(Method::GET, "/", Vec::new())
    }

    #[test]
    fn chunks_are_put_together_and_a_break_is_noticed() {
        let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let (connection, server) = serve(b"\r\n0\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n");
        let done = connection.send_stream("/", &mut &[7; 300_000][..], &mut |_| {}).unwrap();
        assert_eq!(done.status(), 204);
        let request = server.join().unwrap();
        let body = request.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
        let text = [&head[..], &request[body..]].concat();
        let mut found = Vec::new();
        answer(&text).unwrap().read_to_end(&mut found).unwrap();
        assert_eq!(found, [7; 300_000]);
        for len in [head.len(), head.len() + 3, text.len() - 300, text.len() - 5] {
            let mut cut = answer(&text[..len]).unwrap();
            let error = cut.read_to_end(&mut Vec::new()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{len}");
        }
        assert!(answer(&head[..20]).is_err());
        let mut odd = answer(&[&head[..], b"zz\r\n"].concat()).unwrap();
        assert!(odd.read(&mut [0; 1]).is_err());
        let short = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nabc";
        let mut short = answer(short).unwrap();
        assert_eq!(short.status(), 404);
        assert!(short.read_to_end(&mut Vec::new()).is_err());
    }

    #[test]
    fn response_without_length_is_invalid() {
        let error = answer(b"HTTP/1.1 200 OK\r\n\r\nabc").unwrap_err();
        assert_eq!(error.to_string(), "its length is not given");
    }
}
